"""A policy of the laboratory, told what readers have passed as in a replay: what it would hold then
is what stays (`hintsd serve --keep`; docs/HINTS.md, rule 1).

Policies decide at once, and one read after another; a mount's RAM and SSD follow a moment later.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hintsd.keeping import NONE
from hintsd.policies import Hints, Policy
from hintsd.policies.catalogue import CATALOGUE

_SOON, _LATE = 0.0, 1.0


class Keeping:
    """One policy, of a mount's files by their inode numbers."""

    def __init__(self, name: str, seed: int = 0) -> None:
        """`name`: one of NAMES but AUTO. `seed`: of the policy's draws, if it makes any."""
        self.holds_nothing = name == NONE
        self._name, self._seed = name, seed
        self._policy: Policy | None = None
        self._told: list[Hints] = []  # before it began
        self._is_held = np.zeros(0, np.bool_)  # by inode number

    @property
    def is_begun(self) -> bool:
        """Whether it has a cache."""
        return self.holds_nothing or self._policy is not None

    def begin(self, capacity_bytes: int) -> None:
        """It has a cache of so many bytes, which is empty."""
        if not self.is_begun:
            make = CATALOGUE[self._name]
            self._policy = make(capacity_bytes, on_evict=self._evict, seed=self._seed)
            for hints in self._told:
                self._policy.hint(hints)
            self._told.clear()

    def read(self, inos: npt.NDArray[np.uint32], sizes: npt.NDArray[np.int64]) -> None:
        """Readers have passed these, of so many bytes each, in this order. Shapes (files,)."""
        if self._policy is None or not len(inos):
            return
        missing = int(inos.max()) + 1 - len(self._is_held)
        if missing > 0:
            self._is_held = np.concatenate([self._is_held, np.zeros(2 * missing, np.bool_)])
        for ino, size_bytes in zip(inos.tolist(), sizes.tolist(), strict=True):
            self._policy.access(ino, size_bytes)
            self._is_held[ino] = ino in self._policy

    def tell(self, inos: npt.NDArray[np.uint32], importance: npt.NDArray[np.float32]) -> None:
        """Of these files, larger matters more. Shapes (files,)."""
        self._hint(Hints(items=inos, importance=importance))

    def begin_epoch(self) -> None:
        self._hint(Hints(epoch=True))

    def leaves(self, inos: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
        """0: it holds this one; 1: it does not, so that it goes before those. Shape (files,)."""
        known = inos < len(self._is_held)
        is_held = np.zeros(len(inos), np.bool_)
        is_held[known] = self._is_held[inos[known]]
        return np.where(is_held, _SOON, _LATE)

    def _hint(self, hints: Hints) -> None:
        if self._policy is not None:
            self._policy.hint(hints)
        elif not self.holds_nothing:
            self._told = [*(old for old in self._told if old.epoch), hints]

    def _evict(self, ino: int) -> None:
        if ino < len(self._is_held):
            self._is_held[ino] = False
