"""First in, first out: whoever came first goes, used or not."""

from __future__ import annotations

from typing import ClassVar

from hintsd.policies.queue import Queue
from hintsd.policies.table import Evicting


class FIFO(Evicting):
    """8 bytes an item and 4 to 8 for each that is held, O(1) an access."""

    name: ClassVar[str] = "fifo"

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._order = Queue()

    def _enter(self, item: int) -> None:
        self._order.append(item)

    def _evict(self) -> None:
        self._drop(self._order.pop())

    def check_invariants(self) -> None:
        super().check_invariants()
        assert len(set(self._order)) == len(self._order) == len(self)
        assert all(item in self for item in self._order)
