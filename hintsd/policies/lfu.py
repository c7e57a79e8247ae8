"""Least frequently used goes; among equals, the one that was used least recently.

Uses are counted while an item is held: who comes back begins with one. One list holds all items,
fewest uses first, and the last item of each number of uses is known, so that a use moves an item in
O(1) (Shah, Mitra and Matani, 2010, keep a list for each number instead).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

from hintsd.policies.lru import LRU
from hintsd.policies.ring import END


class LFU(LRU):
    """20 bytes an item, O(1) an access.

    INVARIANT: the order is by (uses, time of the last use).
    """

    name: ClassVar[str] = "lfu"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        on_evict: Callable[[int], object] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(capacity_bytes, on_evict=on_evict, seed=seed)
        self._uses = array("i")
        self._last: dict[int, int] = {}  # uses -> the last item that has so many

    def _grow(self, item: int) -> int:
        more = super()._grow(item)
        self._uses.frombytes(bytes(self._uses.itemsize * more))
        return more

    def _touch(self, item: int) -> None:
        uses = self._uses[item]
        behind = self._last.get(uses + 1)
        if behind is None and self._last[uses] != item:
            behind = self._last[uses]
        self._forget(item, uses)
        if behind is not None:
            self._order.remove(item)
            self._order.insert(behind, item)
        self._uses[item] = uses + 1
        self._last[uses + 1] = item

    def _enter(self, item: int) -> None:
        self._order.insert(self._last.get(1, END), item)
        self._uses[item] = 1
        self._last[1] = item

    def _evict(self) -> None:
        item = self._order.pop()
        uses = self._uses[item]
        if self._last[uses] == item:
            del self._last[uses]
        self._drop(item)

    def _forget(self, item: int, uses: int) -> None:
        """It has so many uses no longer; it is still where it was in the order."""
        if self._last[uses] == item:
            before = self._order.before(item)
            if before != END and self._uses[before] == uses:
                self._last[uses] = before
            else:
                del self._last[uses]

    def check_invariants(self) -> None:
        super().check_invariants()
        order = list(self._order)
        assert all(self._uses[one] <= self._uses[next_] for one, next_ in pairwise(order))
        assert self._last == {self._uses[item]: item for item in order}
