"""State in arrays indexed by item: a few bytes for each item of the dataset, whether held or not.

A dict or an object for each item would cost a hundred bytes or more, which matters with fourteen
million of them.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Callable
from typing import Final

import numpy as np

from hintsd.policies import MISS, Policy

NOT_HELD: Final = -1
ROWS_LEAST: Final = 1024


class Table(Policy):
    """Remembers which items are held and their sizes: 8 bytes an item."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        on_evict: Callable[[int], object] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(capacity_bytes, on_evict=on_evict, seed=seed)
        self._sizes = array("q")  # bytes of an item that is held, else NOT_HELD or less
        self._count = 0

    def __contains__(self, item: int) -> bool:
        return 0 <= item < len(self._sizes) and self._sizes[item] > NOT_HELD

    def __len__(self) -> int:
        return self._count

    def _grow(self, item: int) -> int:
        """Makes room for `item` in the arrays; how many rows were added."""
        rows = len(self._sizes)
        more = max(item + 1 - rows, rows >> 3, ROWS_LEAST)
        self._sizes.extend(array("q", [NOT_HELD]) * more)
        return more

    def _drop(self, item: int) -> None:
        self.held_bytes -= self._sizes[item]
        self._sizes[item] = NOT_HELD
        self._count -= 1
        if self._on_evict is not None:
            self._on_evict(item)

    def check_invariants(self) -> None:
        super().check_invariants()
        sizes = np.array(self._sizes, np.int64)
        held = sizes > NOT_HELD
        assert int(sizes[held].sum()) == self.held_bytes
        assert int(np.count_nonzero(held)) == self._count


class Evicting(Table):
    """Who is missed comes in, and a subclass says who goes for it."""

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if item >= len(self._sizes):
            self._grow(item)
        if self._sizes[item] > NOT_HELD:
            self._touch(item)
            return item
        self._let_in(item, size_bytes)
        return MISS

    def _touch(self, item: int) -> None:
        """A hit."""

    def _let_in(self, item: int, size_bytes: int) -> None:
        most_bytes = self.capacity_bytes - size_bytes
        if most_bytes >= 0:
            while self.held_bytes > most_bytes:
                self._evict()
            self._sizes[item] = size_bytes
            self.held_bytes += size_bytes
            self._count += 1
            self._enter(item)

    @abstractmethod
    def _enter(self, item: int) -> None:
        """The item is held from now on."""

    @abstractmethod
    def _evict(self) -> None:
        """Chooses one of the items and drops it; there is one."""
