"""MinIO (Mohan et al., CoorDL, VLDB '21, section 4.1): what is let in stays.

For uniform shuffles no cache fetches less than (1 - c) of the dataset an epoch, c being the cached
share, and keeping any fixed set reaches exactly that (docs/HINTS.md rule 2; policies/belady.py).
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from hintsd.policies import MISS, Integers, Mask, Policy

ROUNDS_MOST: Final = 16
ROWS_LEAST: Final = 1024


class MinIO(Policy):
    """1 byte an item, O(1) an access.

    A planner that knows all items beforehand asks for many at once (`admit`, the same rule) and
    remembers itself which ones were let in: for those, `in` and `len` do not speak. It may change
    `capacity_bytes`; below `held_bytes` nothing more is let in until enough is released.
    """

    name: ClassVar[str] = "minio"

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._held = bytearray()
        self._count = 0

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if item >= len(self._held):
            self._grow(item)
        if self._held[item]:
            return item
        if size_bytes <= self.capacity_bytes - self.held_bytes:
            self._held[item] = True
            self.held_bytes += size_bytes
            self._count += 1
        return MISS

    def _grow(self, item: int) -> None:
        rows = len(self._held)
        self._held.extend(bytes(max(item + 1 - rows, rows >> 3, ROWS_LEAST)))

    def __contains__(self, item: int) -> bool:
        return 0 <= item < len(self._held) and bool(self._held[item])

    def __len__(self) -> int:
        return self._count

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.held_bytes)

    def admit(self, sizes: Integers) -> Mask:
        """Which of these items are let in, in the order given; sizes: bytes, shape (items,)."""
        return self._admit(sizes, np.arange(len(sizes)))

    def _admit(self, sizes: Integers, order: Integers) -> Mask:
        admitted = fill(sizes, order, self.free_bytes)
        self.held_bytes += int(sizes[admitted].sum(dtype=np.int64))
        return admitted

    def release(self, size_bytes: int) -> None:
        """Items that were admitted, of so many bytes together, are held no more."""
        self.held_bytes -= size_bytes

    def check_invariants(self) -> None:
        assert self.held_bytes >= 0
        assert self._held.count(True) == self._count


def fill(sizes: Integers, order: Integers, free_bytes: int) -> Mask:
    """Which items get in that ask in this order (indices of `sizes`), as long as they fit; an item
    that does not is passed over (at most ROUNDS_MOST times: then the rest is too small to matter).
    """
    if int(sizes.sum(dtype=np.int64)) <= free_bytes:
        return np.ones(len(sizes), np.bool_)
    admitted = np.zeros(len(sizes), np.bool_)
    for _ in range(ROUNDS_MOST):
        order = order[sizes[order] <= free_bytes]
        total = np.cumsum(sizes[order], dtype=np.int64)
        fitting = int(np.searchsorted(total, free_bytes, "right"))
        if fitting == 0:
            break
        admitted[order[:fitting]] = True
        free_bytes -= int(total[fitting - 1])
        order = order[fitting + 1 :]
    return admitted
