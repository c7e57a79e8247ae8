"""Orders drawn here, without torch: permutations and numbers below a bound, as torch draws them.

Weighted samples, and more than SAMPLES_MOST, are left to torch, which draws so many with 64 bits.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hintsd.orders import _mt19937
from hintsd.orders.drawing import Drawing, Generator
from hintsd.orders.spec import ALL, Indices, OrderSpec

SAMPLES_MOST: Final = 1 << 27
PASSES_MOST: Final = 1 << 10  # over a dataset in an epoch: each costs a call


class OwnGenerator(Generator):
    """A mt19937 of ours."""

    def __init__(self, state: bytes | None, seed: int | None) -> None:
        if state is None:
            assert seed is not None
            if not -(1 << 63) <= seed < 1 << 64:
                raise OverflowError(f"a seed of {seed}")
            state = _mt19937.seeded(seed)
        self._state = state

    def permutation(self, length: int) -> Indices:
        found = np.empty(length, np.int64)
        self._state = _mt19937.permute(self._state, found)
        return found

    def numbers(self, below: int, count: int) -> Indices:
        found = np.empty(count, np.int64)
        self._state = _mt19937.draw(self._state, below, found)
        return found

    def seed(self) -> int:
        seed, self._state = _mt19937.draw_seed(self._state)
        return seed

    def state(self) -> bytes:
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
    """Whether torch must draw its order. (A length that is not known yet is short.)"""
    if spec.sampler == "weighted_random":
        return True
    length = len(spec.indices) if spec.indices is not None else spec.length
    passes = (spec.num_samples or 0) // max(1, length)
    return SAMPLES_MOST < max(length, spec.length) != ALL or passes > PASSES_MOST
