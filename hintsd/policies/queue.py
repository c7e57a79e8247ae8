"""First in, first out, in one array: 4 to 8 bytes for each item that is in it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Final

NONE: Final = -1
_PASSED_LEAST: Final = 1024


class Queue:
    """Of items. What was taken stays in the array until it is half of it."""

    def __init__(self) -> None:
        self._items = array("i")
        self._passed = 0
        self.append = self._items.append

    def __len__(self) -> int:
        return len(self._items) - self._passed

    def __iter__(self) -> Iterator[int]:
        return iter(self._items[self._passed :])

    def pop(self) -> int:
        """Takes the first. NONE: there is none."""
        passed = self._passed
        if passed == len(self._items):
            return NONE
        item = self._items[passed]
        self._passed = passed = passed + 1
        if passed > _PASSED_LEAST and 2 * passed > len(self._items):
            del self._items[:passed]
            self._passed = 0
        return item
