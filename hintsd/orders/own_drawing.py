"""Orders drawn here, without torch: permutations and numbers below a bound, as torch draws them.

What torch would draw otherwise than with 32 bits, and weighted samples, torch draws itself.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hintsd.orders import _mt19937
from hintsd.orders.drawing import Drawing, Generator
from hintsd.orders.spec import Indices, OrderSpec

SAMPLES_MOST: Final = 1 << 27


class OwnGenerator(Generator):
    """A mt19937 of ours."""

    def __init__(self, state: bytes | None, seed: int | None) -> None:
        self._state = state
        if state is None:
            assert seed is not None
            if not -(1 << 63) <= seed < 1 << 64:
                raise OverflowError(f"a seed of {seed}")
            self._state = _mt19937.seeded(seed)

    def permutation(self, length: int) -> Indices:
        found = np.empty(length, np.int64)
        self._state = _mt19937.permute(self.state(), found)
        return found

    def numbers(self, below: int, count: int) -> Indices:
        found = np.empty(count, np.int64)
        self._state = _mt19937.draw(self.state(), below, found)
        return found

    def seed(self) -> int:
        seed, self._state = _mt19937.draw_seed(self.state())
        return seed

    def state(self) -> bytes:
        assert self._state is not None
        return self._state


class OwnDrawing(Drawing):
    """As Drawing, for any thread."""

    def __init__(self, torch: Drawing) -> None:
        """`torch`: for what is not drawn here."""
        self._torch = torch

    def sequences(
        self, spec: OrderSpec, epochs: range, end: bytes | None
    ) -> list[tuple[Indices, bytes | None]]:
        if needs_torch(spec):
            return self._torch.sequences(spec, epochs, end)
        return super().sequences(spec, epochs, end)

    def skip(self, spec: OrderSpec, epochs: range, end: bytes | None) -> bytes:
        if needs_torch(spec):
            return self._torch.skip(spec, epochs, end)
        return super().skip(spec, epochs, end)

    def generator(self, state: bytes | None, seed: int | None) -> Generator:
        return OwnGenerator(state, seed)


def needs_torch(spec: OrderSpec) -> bool:
    """Whether torch must draw its order."""
    return spec.sampler == "weighted_random" or spec.length > SAMPLES_MOST
