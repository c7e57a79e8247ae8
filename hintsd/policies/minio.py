"""MinIO (Mohan et al., CoorDL, VLDB '21, section 4.1): what is let in stays.

For uniform shuffles no cache fetches less than (1 - c) of the dataset an epoch, c being the cached
share, and keeping any fixed set reaches exactly that (docs/HINTS.md rule 2; policies/belady.py).
"""

from __future__ import annotations

from typing import ClassVar, Final

from hintsd.policies import MISS, Policy
from hintsd.policies.residents import Residents

ROWS_LEAST: Final = 1024


class MinIO(Policy):
    """1 byte an item, O(1) an access."""

    name: ClassVar[str] = "minio"

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._residents = Residents(self.capacity_bytes)
        self._held = bytearray()
        self._count = 0

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if item >= len(self._held):
            self._grow(item)
        if self._held[item]:
            return item
        if self._residents.admit_one(size_bytes):
            self._held[item] = True
            self.held_bytes = self._residents.held_bytes
            self._count += 1
        return MISS

    def _grow(self, item: int) -> None:
        rows = len(self._held)
        self._held.extend(bytes(max(item + 1 - rows, rows >> 3, ROWS_LEAST)))

    def __contains__(self, item: int) -> bool:
        return 0 <= item < len(self._held) and bool(self._held[item])

    def __len__(self) -> int:
        return self._count

    def check_invariants(self) -> None:
        super().check_invariants()
        self._residents.check_invariants()
        assert self.held_bytes == self._residents.held_bytes
        assert self._held.count(True) == self._count
