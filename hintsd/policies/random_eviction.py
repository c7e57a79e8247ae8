"""Any item may go, with the same chance: the yardstick of what thinking is worth."""

from __future__ import annotations

from array import array
from typing import ClassVar

import numpy as np

from hintsd.policies.table import Evicting


class RandomEviction(Evicting):
    """8 bytes an item and 4 for each that is held, O(1) an access."""

    name: ClassVar[str] = "random"

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._held = array("i")  # in no order
        self._draw = np.random.default_rng(seed).random

    def _enter(self, item: int) -> None:
        self._held.append(item)

    def _evict(self) -> None:
        held = self._held
        place = int(self._draw() * len(held))
        item, held[place] = held[place], held[-1]
        held.pop()
        self._drop(item)

    def check_invariants(self) -> None:
        super().check_invariants()
        assert len(set(self._held)) == len(self._held) == len(self)
        assert all(item in self for item in self._held)
