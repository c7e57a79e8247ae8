"""The fetch threads, as a plan uses them: how much may be in the air, and when nothing.

`Depth` finds by trying how many fetches to have in flight: it climbs the hill of throughput over
depth. It measures for a few round trips at one depth, then tries twice as much, and when that has
not paid once, a quarter more. What does not pay for itself is taken back, and then tried the other
way round: an origin that is as fast with less in flight only queues the rest, which costs readers
latency. (By Little's law latency is depth over throughput: latency that climbs without more
throughput is exactly a step up that does not pay.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from fusecache.ahead.prefetches import Prefetch
from fusecache.base.errors import OriginTimeout
from fusecache.read.fetch_threads import Fetched, Fetches, FetchThreads
from fusecache.read.misses import FLYING_MOST

LOST_MOST = 32  # threads that may hang in the origin beside those that work
PAUSE_S_FIRST, PAUSE_S_MOST = 0.1, 5.0

DEPTH_AT_FIRST = 16
STEP_AT_FIRST = 2.0
STEP = 1.25
PAYS = 0.4  # of the throughput that a step up promises: to be kept it must bring so much
COSTS_NOTHING = 0.97  # a step down is kept when this share of the throughput stays
HOLD_ROUNDS = 4  # measurements at a depth that was found good, before the next try
# Completions come in bunches of the depth's size: a measurement is as exact as one in so many.
# Whether twice as much pays shows in few.
BUNCHES_AT_FIRST = 2
BUNCHES = 5
COMPLETIONS_LEAST = 16
ROUND_S_LEAST = 0.01
BYTES_A_REQUEST = 64 << 10  # a request is as much work as so many bytes


def threads_most(depth_most: int) -> int:
    """Of the fetch threads, for READs that missed and a plan: at most FETCH_THREADS_MOST."""
    return depth_most + FLYING_MOST + LOST_MOST


class Depth:
    """The number of requests to keep in flight, within [1, most]. The clock is the caller's, in
    seconds.
    """

    def __init__(self, most: int) -> None:
        self.depth = min(DEPTH_AT_FIRST, most)
        self._most = most
        self._good: tuple[int, float] | None = None  # depth and rate before the step on trial
        self._rounds_to_hold = 0
        self._goes_up = True
        self._step = STEP_AT_FIRST
        self._halved_at = -math.inf
        self._begin_round()

    def _begin_round(self) -> None:
        self._to_settle = self.depth  # these were in flight before: they tell of the old depth
        self._begun_at = 0.0
        self._completions = 0
        self._work = 0.0

    def completed(self, now: float, size_bytes: int, is_full: bool) -> None:
        """A request has ended well. `is_full`: as many were in flight as allowed, so that the
        throughput tells of the depth.
        """
        if not is_full:
            self._begin_round()
            return
        if self._to_settle > 0:
            self._to_settle -= 1
            self._begun_at = now
            return
        self._completions += 1
        self._work += 1 + size_bytes / BYTES_A_REQUEST
        elapsed_s = now - self._begun_at
        if (
            self._completions >= max(self._bunches() * self.depth, COMPLETIONS_LEAST)
            and elapsed_s >= ROUND_S_LEAST
        ):
            self._decide(self._work / elapsed_s)
            self._begin_round()

    def failed(self, now: float, begun_at: float) -> None:
        """A request has ended badly. Those that were begun before the last halving change nothing:
        one outage fails all that are in flight.
        """
        if begun_at < self._halved_at:
            return
        self._halved_at = now
        self.depth = max(1, self.depth // 2)
        self._good = None
        self._rounds_to_hold = 0
        self._goes_up = True
        self._step = STEP_AT_FIRST
        self._begin_round()

    def _bunches(self) -> int:
        return BUNCHES_AT_FIRST if self._step > STEP else BUNCHES

    def _decide(self, rate: float) -> None:
        if self._rounds_to_hold > 0:
            self._rounds_to_hold -= 1
            return
        if self._good is not None and not self._has_paid(rate):
            self.depth, _ = self._good
            self._good = None
            if self._step > STEP:
                self._step = STEP
                return
            self._goes_up = not self._goes_up
            # Both ways were tried in turn: this is the place to be for now. Down is tried at once.
            self._rounds_to_hold = HOLD_ROUNDS if self._goes_up else 1
            return
        self._good = (self.depth, rate)
        if self._goes_up:
            step = max(self.depth + 1, round(self.depth * self._step))
        else:
            step = min(self.depth - 1, round(self.depth / STEP))
        step = max(1, min(step, self._most))
        if step == self.depth:  # at a bound
            self._good = None
            self._goes_up = not self._goes_up
            self._rounds_to_hold = HOLD_ROUNDS
        self.depth = step

    def _has_paid(self, rate: float) -> bool:
        assert self._good is not None
        depth, good = self._good
        if self._goes_up:
            return rate >= good * (1 + PAYS * (self.depth / depth - 1))
        return rate >= good * COSTS_NOTHING


class TokenBucket:
    """At most `bytes_per_s` over any second or so; None: no limit. The clock is the caller's.

    INVARIANT: what is taken may exceed what is there (a file larger than the bucket must pass): the
    debt is waited for by those that come after.
    """

    BURST_S = 0.1

    def __init__(self, bytes_per_s: int | None, now: float) -> None:
        self._rate = bytes_per_s
        self._tokens = 0.0 if bytes_per_s is None else bytes_per_s * self.BURST_S
        self._at = now

    def wait_s(self, now: float) -> float:
        """Seconds until the next may begin; 0: now."""
        if self._rate is None:
            return 0.0
        most = self._rate * self.BURST_S
        self._tokens = min(most, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return 0.0 if self._tokens > 0 else -self._tokens / self._rate + 1e-6

    def take(self, size_bytes: int) -> None:
        self._tokens -= size_bytes


class LimitedFetches:
    """Fetches of one mount, within depth and bandwidth. They outlive their plan."""

    def __init__(self, threads: FetchThreads, depth_most: int, bytes_per_s: int | None) -> None:
        self._threads = threads
        self._depth = Depth(depth_most)
        self._bucket = TokenBucket(bytes_per_s, 0.0)
        self._fetches: Fetches[Prefetch]  # set by `serve`
        self._was_full = False
        self._pause_s = 0.0
        self._pause_until = 0.0
        self.flying_bytes = 0

    def serve(
        self,
        landed: Callable[[Prefetch, Fetched], None],
        given_up: Callable[[Prefetch, OriginTimeout, trio.Event], None],
        after_landings: Callable[[], None],
    ) -> None:
        """As Fetches has them. Called once."""

        def land(prefetch: Prefetch, fetched: Fetched) -> None:
            self.flying_bytes -= prefetch.version.size
            if fetched.is_pooled:  # the bandwidth is the origin's
                self.take(-prefetch.version.size)
            landed(prefetch, fetched)

        def give_up(prefetch: Prefetch, error: OriginTimeout, ended: trio.Event) -> None:
            self.flying_bytes -= prefetch.version.size
            given_up(prefetch, error, ended)

        def after() -> None:
            after_landings()
            self._was_full = self.is_full

        self._fetches = Fetches(self._threads, land, give_up, after)

    @property
    def depth(self) -> int:
        return self._depth.depth

    @property
    def in_flight(self) -> int:
        return self._fetches.flying

    @property
    def is_full(self) -> bool:
        return self._fetches.flying >= self._depth.depth

    @property
    def is_paused(self) -> bool:
        """The origin is away, or all threads hang in it."""
        return self._fetches.lost >= LOST_MOST or trio.current_time() < self._pause_until

    # ---- what the token bucket lets pass ---------------------------------------------------------

    def may_take(self) -> bool:
        """Whether the next file may be read, of whatever size."""
        return self._bucket.wait_s(trio.current_time()) == 0

    def take(self, size_bytes: int) -> None:
        self._bucket.take(size_bytes)

    # ---- the life of a fetch ---------------------------------------------------------------------

    def submit(self, prefetch: Prefetch) -> None:
        """Raises OSError, ValueError: no thread is to be had, or the file has grown."""
        self._fetches.submit(prefetch, prefetch.ino, prefetch.version)
        self.flying_bytes += prefetch.version.size
        self.take(prefetch.version.size)
        self._was_full = self.is_full

    def completed(self, size_bytes: int) -> None:
        """One has landed; as Depth.completed, as things were before it landed."""
        self._pause_s = 0.0
        self._depth.completed(trio.current_time(), size_bytes, self._was_full)

    def failed(self, prefetch: Prefetch, now: float, is_away: bool) -> None:
        self._depth.failed(now, prefetch.begun_s)
        if is_away and now >= self._pause_until:
            self._pause_s = min(PAUSE_S_MOST, max(PAUSE_S_FIRST, 2 * self._pause_s))
            self._pause_until = now + self._pause_s

    def give_up_on_hung(self) -> None:
        self._fetches.give_up_on_hung()
