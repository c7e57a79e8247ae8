"""Least recently used goes: what the kernel's page cache and most caches approximate.

Against uniform shuffles it is nearly useless: of a share c of the dataset, an epoch hits
c + (1 - c) ln(1 - c), for what was read last is what will be read last (docs/POLICIES.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from hintsd.policies.ring import Ring
from hintsd.policies.table import Evicting


class LRU(Evicting):
    """16 bytes an item, O(1) an access."""

    name: ClassVar[str] = "lru"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        on_evict: Callable[[int], object] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(capacity_bytes, on_evict=on_evict, seed=seed)
        self._order = Ring()  # the least recently used is the first

    def _grow(self, item: int) -> int:
        more = super()._grow(item)
        self._order.grow(more)
        return more

    def _touch(self, item: int) -> None:
        self._order.renew(item)

    def _enter(self, item: int) -> None:
        self._order.append(item)

    def _evict(self) -> None:
        self._drop(self._order.pop())

    def check_invariants(self) -> None:
        super().check_invariants()
        order = list(self._order)
        assert len(order) == len(self)
        assert all(item in self for item in order)
