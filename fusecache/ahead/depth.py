"""How many prefetches to have in flight, found by trying; and how fast, by a token bucket.

Pure: the clock is the caller's, in seconds.

`Depth` climbs the hill of throughput over depth. It measures for a few round trips at one depth,
then tries twice as much, and when that has not paid once, a quarter more. What does not pay for
itself is taken back, and then tried the other way round: an origin that is as fast with less in
flight only queues the rest, which costs readers latency. (By Little's law latency is depth over
throughput: latency that climbs without more throughput is exactly a step up that does not pay.)
"""

from __future__ import annotations

import math

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


class Depth:
    """The number of requests to keep in flight, within [1, most]."""

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
    """At most `bytes_per_s` over any second or so; None: no limit.

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
