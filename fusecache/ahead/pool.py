"""The fetch pool, as a plan uses it: how much may be in the air, and when nothing."""

from __future__ import annotations

from collections.abc import Callable

import trio

from fusecache.ahead.depth import Depth, TokenBucket
from fusecache.ahead.jobs import Job
from fusecache.base.errors import OriginTimeout
from fusecache.read.misses import FLYING_MOST
from fusecache.read.pool import Fetched, Fetches, FetchPool

LOST_MOST = 32  # threads that may hang in the origin beside those that work
PAUSE_S_FIRST, PAUSE_S_MOST = 0.1, 5.0


def threads_most(depth_most: int) -> int:
    """Of the pool, for READs that missed and a plan: at most FETCH_THREADS_MOST."""
    return depth_most + FLYING_MOST + LOST_MOST


class Pool:
    """Of one mount. Its fetches outlive their plan."""

    def __init__(self, pool: FetchPool, depth_most: int, bytes_per_s: int | None) -> None:
        self._pool = pool
        self._depth = Depth(depth_most)
        self._bucket = TokenBucket(bytes_per_s, 0.0)
        self._fetches: Fetches[Job]  # set by `serve`
        self._was_full = False
        self._pause_s = 0.0
        self._pause_until = 0.0
        self.flying_bytes = 0

    def serve(
        self,
        landed: Callable[[Job, Fetched], None],
        given_up: Callable[[Job, OriginTimeout, trio.Event], None],
        after_landings: Callable[[], None],
    ) -> None:
        """As Fetches has them. Called once."""

        def land(job: Job, fetched: Fetched) -> None:
            self.flying_bytes -= job.version.size
            landed(job, fetched)

        def give_up(job: Job, error: OriginTimeout, ended: trio.Event) -> None:
            self.flying_bytes -= job.version.size
            given_up(job, error, ended)

        def after() -> None:
            after_landings()
            self._was_full = self.is_full

        self._fetches = Fetches(self._pool, land, give_up, after)

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

    def submit(self, job: Job) -> None:
        """Raises OSError, ValueError: no thread is to be had, or the file has grown."""
        self._fetches.submit(job, job.ino, job.version)
        self.flying_bytes += job.version.size
        self.take(job.version.size)
        self._was_full = self.is_full

    def completed(self, size_bytes: int) -> None:
        """One has landed; as Depth.completed, as the pool was before it landed."""
        self._pause_s = 0.0
        self._depth.completed(trio.current_time(), size_bytes, self._was_full)

    def failed(self, job: Job, now: float, is_away: bool) -> None:
        self._depth.failed(now, job.begun_s)
        if is_away and now >= self._pause_until:
            self._pause_s = min(PAUSE_S_MOST, max(PAUSE_S_FIRST, 2 * self._pause_s))
            self._pause_until = now + self._pause_s

    def give_up_on_hung(self) -> None:
        self._fetches.give_up_on_hung()
