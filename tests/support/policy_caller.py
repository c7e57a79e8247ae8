"""A caller of a policy that keeps books of what it was told, and checks them after every step; and
what no policy can do better than.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hintsd.policies import MISS, Hints, Integers, Policy
from hintsd.policies.belady import Belady


class Caller:
    """Reads items of a dataset through a policy.

    hits, substituted, missed: the items that were read, in order; a substituted one by what was
    read in its stead. loaded: what the policy had fetched of its own accord.
    """

    def __init__(self, policy: Policy, sizes: Sequence[int], *, loader: bool = False) -> None:
        self.policy = policy
        self.sizes = sizes
        self.held: set[int] = set()
        self.hits: list[int] = []
        self.substituted: list[int] = []
        self.missed: list[int] = []
        self.loaded: list[int] = []
        self.evicted: list[int] = []
        policy._on_evict = self._evict
        if loader:
            policy.on_load = self._load

    def read(self, *items: int, now_s: float = 0.0) -> list[int]:
        """What the job gets for these."""
        return [self._read(item, now_s) for item in items]

    def tell(self, importance: dict[int, float]) -> None:
        told = Hints(
            items=np.array(list(importance), np.int64),
            importance=np.array(list(importance.values())),
        )
        self.policy.hint(told)
        self.check()

    def epoch(self) -> None:
        self.policy.hint(Hints(epoch=True))

    def check(self) -> None:
        self.policy.check_invariants()
        assert {item for item in range(len(self.sizes)) if item in self.policy} == self.held
        assert len(self.policy) == len(self.held)
        assert self.policy.held_bytes == sum(self.sizes[item] for item in self.held)

    def _read(self, item: int, now_s: float) -> int:
        before, loaded = set(self.held), len(self.loaded)
        served = self.policy.access(item, self.sizes[item], now_s=now_s)
        if served == MISS:
            assert item not in before
            self.missed.append(item)
            if item in self.policy:
                self.held.add(item)
        else:
            assert served in before | set(self.loaded[loaded:])
            (self.hits if served == item else self.substituted).append(served)
        self.check()
        return item if served == MISS else served

    def _evict(self, item: int) -> None:
        self.held.remove(item)
        self.evicted.append(item)

    def _load(self, item: int) -> None:
        assert item not in self.held
        self.held.add(item)
        self.loaded.append(item)


def origin_bytes(epochs: Sequence[Integers], sizes: Integers, capacity_bytes: int) -> list[int]:
    """Bytes that Belady's MIN fetches from the origin in each epoch.

    epochs: the items (indices into `sizes`) in the order they are read, one array an epoch.
    """
    policy = Belady(capacity_bytes)
    policy.hint(Hints(sequence=np.concatenate([np.empty(0, np.int64), *epochs])))
    bytes_of = sizes.tolist()
    return [
        sum(
            bytes_of[item] for item in epoch.tolist() if policy.access(item, bytes_of[item]) == MISS
        )
        for epoch in epochs
    ]
