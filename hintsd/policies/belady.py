"""MIN with bypass (Belady 1966): the yardstick. Offline and slow: for tests and simulations only.

Knows the whole access sequence; when room is needed, what is used furthest in the future goes,
and a file that would be that one itself is passed through without being kept. For files of one
size no policy fetches less; for mixed sizes it is a good heuristic.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from hintsd.policies import Integers


def origin_bytes(epochs: Sequence[Integers], sizes: Integers, capacity_bytes: int) -> list[int]:
    """Bytes fetched from the origin in each epoch.

    epochs: the items (indices into `sizes`) in the order they are read, one array an epoch.
    """
    lengths = [len(epoch) for epoch in epochs]
    accesses = np.concatenate(epochs) if epochs else np.empty(0, np.int64)
    never = len(accesses)
    next_use = np.full(len(accesses), never, np.int64)
    last: dict[int, int] = {}
    for position in range(len(accesses) - 1, -1, -1):
        item = int(accesses[position])
        next_use[position] = last.get(item, never)
        last[item] = position
    cached: dict[int, int] = {}  # item -> its next use
    furthest: list[tuple[int, int]] = []  # heap of (-next use, item); stale entries are skipped
    fetched = [0] * len(lengths)
    epoch_of = np.repeat(np.arange(len(lengths)), lengths)
    held = 0
    for position in range(len(accesses)):
        item, use = int(accesses[position]), int(next_use[position])
        size = int(sizes[item])
        if item in cached:
            held -= size
            del cached[item]
        else:
            fetched[epoch_of[position]] += size
        if use == never:
            continue
        cached[item] = use
        held += size
        heapq.heappush(furthest, (-use, item))
        while held > capacity_bytes:
            minus_use, victim = heapq.heappop(furthest)
            if cached.get(victim) == -minus_use:
                del cached[victim]
                held -= int(sizes[victim])
    return fetched
