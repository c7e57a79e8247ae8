"""The depth controller against simulated origins, in simulated time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest

from fusecache.ahead.depth import Depth, TokenBucket

FILE_BYTES = 110_000


class Origin:
    """`latency_s` for each request, and a pipe of `bytes_per_s` that all share, first come first
    served. `fails(now)` says whether a request that ends now ends badly.
    """

    def __init__(self, latency_s: float, bytes_per_s: float, seed: int = 1) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.fails: Callable[[float], bool] = lambda now: False
        self.now = 0.0
        self._pipe_free_at = 0.0
        self._flying: list[tuple[float, float, int]] = []  # end, begin, bytes
        self._random = random.Random(seed)

    def run(self, depth: Depth, seconds: float) -> float:
        """Keep `depth` in flight; returns the mean number of files a second."""
        end, files = self.now + seconds, 0
        while self.now < end:
            while len(self._flying) < depth.depth:
                size = int(FILE_BYTES * self._random.uniform(0.5, 1.5))
                self._pipe_free_at = max(self._pipe_free_at, self.now) + size / self.bytes_per_s
                latency_s = self.latency_s * self._random.uniform(0.8, 1.3)
                ends = max(self.now + latency_s, self._pipe_free_at)
                heapq.heappush(self._flying, (ends, self.now, size))
            is_full = len(self._flying) >= depth.depth
            self.now, begun, size = heapq.heappop(self._flying)
            if self.fails(self.now):
                depth.failed(self.now, begun)
            else:
                depth.completed(self.now, size, is_full)
                files += 1
            assert depth.depth >= 1
        return files / seconds


def test_grows_to_the_bound_while_only_latency_limits() -> None:
    depth, origin = Depth(64), Origin(0.005, 1e12)
    origin.run(depth, 0.5)
    assert origin.run(depth, 3) > 0.8 * 64 / 0.005 / 1.05
    assert depth.depth <= 64


def test_meets_a_far_origin_with_its_depth_within_some_round_trips() -> None:
    depth, origin = Depth(128), Origin(0.02, 1e12)
    origin.run(depth, 15 * 0.02)
    assert depth.depth > 100


def test_rises_to_where_throughput_saturates_and_stays_near() -> None:
    # 5 ms and 350 MB/s: 16 in flight are enough
    depth, origin = Depth(128), Origin(0.005, 350e6)
    origin.run(depth, 5)
    assert origin.run(depth, 10) > 0.85 * 350e6 / FILE_BYTES
    assert 10 <= depth.depth <= 32


def test_does_not_grow_where_bandwidth_limits() -> None:
    depth, origin = Depth(128), Origin(0.0005, 50e6)
    assert origin.run(depth, 20) > 0.9 * 50e6 / FILE_BYTES
    assert depth.depth <= 8


def test_falls_when_an_origin_becomes_slow() -> None:
    depth, origin = Depth(128), Origin(0.005, 1e12)
    origin.run(depth, 5)
    assert depth.depth > 60
    origin.bytes_per_s = 20e6
    origin.run(depth, 120)
    assert depth.depth <= 16


def test_an_outage_halves_once_what_is_in_flight() -> None:
    depth, origin = Depth(64), Origin(0.005, 1e12)
    origin.run(depth, 5)
    before, stop = depth.depth, origin.now + 0.002
    origin.fails = lambda now: now < stop
    origin.run(depth, 0.002)
    assert depth.depth == before // 2


def test_falls_to_one_while_all_fails_and_recovers() -> None:
    depth, origin = Depth(64), Origin(0.005, 1e12)
    origin.run(depth, 3)
    origin.fails = lambda now: True
    origin.run(depth, 1)
    assert depth.depth == 1
    origin.fails = lambda now: False
    origin.run(depth, 3)
    assert depth.depth > 48


def test_what_is_not_full_says_nothing() -> None:
    depth = Depth(64)
    before = depth.depth
    for number in range(1000):
        depth.completed(number * 0.01, FILE_BYTES, is_full=False)
    assert depth.depth == before


def test_the_bound_holds_from_the_start() -> None:
    assert Depth(1).depth == 1


def test_no_limit_never_waits() -> None:
    bucket = TokenBucket(None, 0.0)
    bucket.take(1 << 40)
    assert bucket.wait_s(0.0) == 0


@pytest.mark.parametrize("size", [1000, 110_000, 4 << 20])
def test_a_bucket_lets_its_rate_pass(size: int) -> None:
    rate, now, taken = 1_000_000, 0.0, 0
    bucket = TokenBucket(rate, now)
    while now < 60:
        wait_s = bucket.wait_s(now)
        if wait_s:
            now += wait_s
            continue
        bucket.take(size)
        taken += size
    assert 58 * rate - size < taken < 60 * rate + rate * TokenBucket.BURST_S + 2 * size


def test_an_idle_bucket_does_not_save_up() -> None:
    bucket = TokenBucket(1_000_000, 0.0)
    assert bucket.wait_s(1000.0) == 0
    bucket.take(200_000)
    assert bucket.wait_s(1000.0) > 0.09
