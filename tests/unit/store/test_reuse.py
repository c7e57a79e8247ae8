"""The default policy: what a cache of segments keeps of datasets that are read again, and of scans.

Counted against the same cache that never replaces (`keep`) and that replaces what was fetched
longest ago (`lrf`, the default before).
"""

from __future__ import annotations

import random
from typing import Final

import pytest

from fusecache.store import reuse
from fusecache.store.index import SegmentRow
from fusecache.store.reuse import Reuse

BLOCK_BYTES: Final = 1000
SEGMENTS: Final = 16


class Cache:
    """One block a file; `blocks` a segment."""

    def __init__(self, policy: str, blocks: int = 32) -> None:
        self.policy, self.blocks = policy, blocks
        self.capacity = SEGMENTS * blocks
        self.where: dict[int, int] = {}
        self.content: dict[int, list[int]] = {}
        self.reads: dict[int, int] = {}
        self.hits = self.written = self._highest = 0
        self._random = random.Random(0)
        self.remount()

    def remount(self) -> None:
        self.reads.clear()
        self.reuse = Reuse(self.capacity * BLOCK_BYTES, lambda: self.reads)
        self.reuse._began_ns = self._highest + 1

    def dataset(self, number: int, share: float) -> range:
        return range(number << 20, (number << 20) + int(share * self.capacity))

    def epochs(self, items: range, count: int = 1, shuffled: bool = True) -> int:
        """Hits."""
        before = self.hits
        for _ in range(count):
            order = self._random.sample(items, len(items)) if shuffled else items
            for ino in order:
                self.read(ino)
        return self.hits - before

    def read(self, ino: int) -> None:
        segno = self.where.get(ino)
        if segno is not None:
            self.hits += 1
            self.reads[segno] = self.reads.get(segno, 0) + 1
            return
        self.reuse.missed(ino, 0, BLOCK_BYTES)
        if not self.content or len(self.content[self._highest]) == self.blocks:
            if len(self.content) == SEGMENTS and not self._evicts():
                return
            self._highest += 1
            self.content[self._highest] = []
            self.reads[self._highest] = 0
        self.content[self._highest].append(ino)
        self.where[ino] = self._highest
        self.written += 1

    def _evicts(self) -> bool:
        if self.policy == "keep" or (self.policy == "reuse" and self.reuse.has_refused()):
            return False
        rows = [SegmentRow(segno, True, 0, segno) for segno in self.content]
        victim: SegmentRow | None = rows[0]
        if self.policy == "reuse":
            victim = self.reuse.may_go(rows, self.capacity * BLOCK_BYTES)
        if victim is None:
            return False
        for ino in self.content.pop(victim.segno):
            del self.where[ino]
        self.reads.pop(victim.segno, None)
        self.reuse.gone(victim.segno)
        return True


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
@pytest.mark.parametrize("blocks", [16, 32])
@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled", "in order"])
def test_repeated_epochs_replace_nothing(share: float, blocks: int, shuffled: bool) -> None:
    cache = Cache("reuse", blocks)
    items = cache.dataset(1, 1 / share)
    assert cache.epochs(items, 4, shuffled) >= 0.95 * 3 * cache.capacity
    assert cache.written == cache.capacity  # what is not to stay is not written


def test_after_a_restart_nothing_is_replaced_either() -> None:
    cache = Cache("reuse")
    items = cache.dataset(1, 2.5)
    cache.epochs(items, 2)
    cache.remount()
    assert cache.epochs(items, 2) >= 0.95 * 2 * cache.capacity
    assert cache.written == cache.capacity


@pytest.mark.parametrize("shares", [(0.6, 0.6), (0.95, 0.95), (0.95, 0.3), (0.3, 0.95), (2, 0.95)])
def test_datasets_that_come_and_go(shares: tuple[float, float]) -> None:
    hits, written = {}, {}
    for policy in ("reuse", "lrf"):
        cache = Cache(policy)
        first, second = (cache.dataset(number, share) for number, share in enumerate(shares, 1))
        hits[policy] = sum(cache.epochs(items, 5) for items in (first, second, first))
        written[policy] = cache.written
    assert hits["reuse"] >= 0.9 * hits["lrf"]
    assert written["reuse"] <= written["lrf"]


def test_a_dataset_comes_although_the_one_before_was_read_once() -> None:
    cache = Cache("reuse")
    cache.epochs(cache.dataset(1, 0.95))
    second = cache.dataset(2, 0.95)
    cache.epochs(second, 3)
    assert cache.epochs(second) >= 0.9 * len(second)


@pytest.mark.parametrize("share", [0.9, 2.5])
def test_a_scan_takes_no_room(share: float) -> None:
    """While the training pauses, and beside it."""
    cache = Cache("reuse")
    items, scanned = cache.dataset(1, share), cache.dataset(2, 3)
    cache.epochs(items, 2)
    held = set(cache.where)
    cache.epochs(scanned, shuffled=False)
    others = iter(cache.dataset(3, 3))
    for ino in random.Random(1).sample(items, len(items)):
        cache.read(ino)
        cache.read(next(others))
    assert len(held & set(cache.where)) >= 0.95 * len(held)


def test_a_growing_dataset_hits_as_if_nothing_were_replaced() -> None:
    hits = {}
    for policy in ("reuse", "keep"):
        cache = Cache(policy)
        hits[policy] = sum(cache.epochs(cache.dataset(1, s)) for s in (0.5, 0.8, 1.1, 1.5, 2))
    assert hits["reuse"] >= 0.95 * hits["keep"]


def test_what_other_processes_use_is_used() -> None:
    cache = Cache("reuse")
    cache.epochs(cache.dataset(1, 0.95), 3)
    rows = [SegmentRow(segno, True, 0, 1 << 60) for segno in cache.content]
    cache.reuse.may_go(rows, cache.capacity * BLOCK_BYTES)
    for ino in random.Random(2).sample(cache.dataset(2, 0.5), cache.capacity // 2):
        cache.reuse.missed(ino, 0, BLOCK_BYTES)
    assert cache.reuse.may_go(rows, cache.capacity * BLOCK_BYTES) is not None
    used = [row._replace(fetched_ns=row.fetched_ns + 1) for row in rows]
    assert cache.reuse.may_go(used, cache.capacity * BLOCK_BYTES) is None


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "KEYS_MOST", 100)
    made = Reuse(1000 * BLOCK_BYTES, dict[int, int])
    for ino in range(5000):
        made.missed(ino, 0, BLOCK_BYTES)
        assert len(made._missed_at) <= 101
    assert abs(made._first / (5000 * BLOCK_BYTES) - 1) < 0.5
