"""State in one row of an array for each item of the dataset, whether held or not: a few bytes.

A dict or an object for each item would cost a hundred bytes or more, which matters with fourteen
million of them. What is known of an item lies side by side: an access waits for memory once for
each item that it looks at, not for each part.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from hintsd.policies import MISS, Policy

NOT_HELD: Final = -1
ROWS_LEAST: Final = 1024
ITEMS_MOST: Final = 2**31


class Table(Policy):
    """Remembers which items are held and their sizes: 8 bytes an item.

    row: what is known of an item. A row begins with NOT_HELD in all its parts. One more, the last,
    is of no item.
    """

    row: ClassVar[np.dtype[np.void]] = np.dtype([("size", np.int64)])

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._count = 0
        self._use(np.full(1, NOT_HELD, self.row))

    def _use(self, rows: npt.NDArray[Any]) -> None:
        """Takes memory, and memoryviews of its parts: one element of those is faster to get at
        than NumPy's."""
        self._rows = rows
        self._items = len(rows) - 1
        self._sizes = rows["size"].data  # bytes of an item that is held, else NOT_HELD or less

    def _grow(self, item: int) -> None:
        """Makes room for `item`. Raises ValueError where links (int32) cannot name it."""
        if item >= ITEMS_MOST:
            raise ValueError(f"item {item} must be less than {ITEMS_MOST}")
        old, items = self._rows, self._items
        rows = np.full(max(item + 1, items + (items >> 3), ROWS_LEAST) + 1, NOT_HELD, self.row)
        rows[:items] = old[:items]
        rows[-1] = old[-1]
        self._use(rows)

    def __contains__(self, item: int) -> bool:
        return 0 <= item < self._items and self._sizes[item] > NOT_HELD

    def __len__(self) -> int:
        return self._count

    def _drop(self, item: int) -> None:
        self.held_bytes -= self._sizes[item]
        self._sizes[item] = NOT_HELD
        self._count -= 1
        if self._on_evict is not None:
            self._on_evict(item)

    def check_invariants(self) -> None:
        super().check_invariants()
        sizes = self._rows["size"]
        held = sizes > NOT_HELD
        assert int(sizes[held].sum()) == self.held_bytes
        assert int(np.count_nonzero(held)) == self._count


class Evicting(Table):
    """What is missed comes in, and a subclass says what goes for it."""

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if item >= self._items:
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
