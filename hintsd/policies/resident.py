"""Never replace: what is let in stays.

For uniform shuffles no cache fetches less than (1 - c) of the dataset an epoch, c being the cached
share, and keeping any fixed set reaches exactly that (docs/HINTS.md rule 2; the yardstick is
policies/belady.py).
Where files are read unequally often, the most used go first (policies/frequency.py).
"""

from __future__ import annotations

import numpy as np

from hintsd.policies import Integers, Mask
from hintsd.policies.frequency import by_use

ROUNDS_MOST = 16


class Residents:
    """Files that are to be on SSD and are not stored yet: what they will take of its room."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.held_bytes)

    def admit(self, sizes: Integers, uses: Integers | None = None) -> Mask:
        """In order of use counts, then of first use, as long as they fit; a file that does not is
        passed over (at most ROUNDS_MOST times: then the rest is too small to matter).
        """
        total_bytes = int(sizes.sum(dtype=np.int64))
        if total_bytes <= self.free_bytes:
            self.held_bytes += total_bytes
            return np.ones(len(sizes), np.bool_)
        admitted = np.zeros(len(sizes), np.bool_)
        rank = np.arange(len(sizes)) if uses is None else by_use(uses)
        for _ in range(ROUNDS_MOST):
            rank = rank[sizes[rank] <= self.free_bytes]
            total = np.cumsum(sizes[rank], dtype=np.int64)
            fitting = int(np.searchsorted(total, self.free_bytes, "right"))
            if fitting == 0:
                break
            admitted[rank[:fitting]] = True
            self.held_bytes += int(total[fitting - 1])
            rank = rank[fitting + 1 :]
        return admitted

    def release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes

    def check_invariants(self) -> None:
        assert self.held_bytes >= 0
