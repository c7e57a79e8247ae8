"""The C fetch threads. They get small files, whole, from other hosts or from the origin: for READs
that have missed (misses.py), and for a plan (ahead/fetching.py).

INVARIANT: a fetch ends once for its user: it has landed, or it was given up. A thread that hangs in
the origin counts as `lost` until it comes back.
"""

from __future__ import annotations

import errno
import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

import trio

from fusecache import _native
from fusecache.base.errors import OriginTimeout
from fusecache.read.origin import Origin
from fusecache.store.types import Version

log = logging.getLogger(__name__)

TAKE_MOST: Final = 256
# A visit to what has landed has its price, be it for one file or for ten. Between two of them:
LONG_FETCH_S, LAND_EVERY_S = 0.015, 0.0015  # where a fetch takes so long
GATHER_S = 0.005  # where nobody waits for it

T = TypeVar("T")


class Fetched(NamedTuple):
    """What became of a fetch; times are of CLOCK_REALTIME."""

    data: bytes | None
    errno: int
    """0: `data` is the file, of its version, at the origin before and after, or of another host."""
    begun_ns: int
    ended_ns: int
    is_pooled: bool
    """From another host: the origin was not read."""


class Fetches(Generic[T]):
    """Those of one user, each for an object of the user's."""

    def __init__(
        self,
        threads: FetchThreads,
        landed: Callable[[T, Fetched], None],
        given_up: Callable[[T, OriginTimeout, trio.Event], None],
        after_landings: Callable[[], None],
        is_awaited: Callable[[], bool] | None = None,
    ) -> None:
        """`given_up(of, error, ended)`: it hangs; `ended` is set when it does no more.
        `after_landings`: some have landed, of whichever user. `is_awaited`: whether somebody waits
        for the next landing; None: always, while some fly.
        """
        self.is_awaited = is_awaited or (lambda: bool(self._flying))
        self._threads = threads
        self._landed, self._given_up = landed, given_up
        self.after_landings = after_landings
        self._flying: dict[int, tuple[T, float]] = {}  # by tag, the oldest first; since when
        self._lost: dict[int, trio.Event] = {}
        threads.add(self)

    @property
    def flying(self) -> int:
        return len(self._flying)

    @property
    def lost(self) -> int:
        """How many hang, and were given up."""
        return len(self._lost)

    def submit(self, of: T, ino: int, version: Version) -> None:
        """Any thread. OSError, ValueError: no thread is to be had, or the file has grown."""
        tag = self._threads.new_tag()
        self._flying[tag] = of, time.monotonic()  # it may land before this returns
        try:
            _native.fetch_submit(ino, version, tag)
        except BaseException:
            self._flying.pop(tag, None)
            raise

    def clear(self) -> list[T]:
        """Forget those that fly; which they were."""
        popped = [self._flying.pop(tag, None) for tag in list(self._flying)]
        return [known[0] for known in popped if known is not None]

    def land(self, tag: int, fetched: Fetched) -> bool:
        """False: it is another user's."""
        if (ended := self._lost.pop(tag, None)) is not None:
            ended.set()
        elif (known := self._flying.pop(tag, None)) is not None:
            self._landed(known[0], fetched)
        else:
            return False
        return True

    def give_up_on_hung(self) -> None:
        """Those that have taken the origin's time-out, behind what other hosts may have taken."""
        origin, limit_s = self._threads.origin, self._threads.timeout_s
        for tag, (of, begun_s) in self._flying.copy().items():
            if time.monotonic() - begun_s < limit_s:
                return
            if self._flying.pop(tag, None) is None:
                continue
            ended = self._lost[tag] = trio.Event()
            origin.failed(errno.EIO, f"no answer within {origin.timeout_s:g} s")
            self._given_up(of, OriginTimeout(origin.timeout_s), ended)


class FetchThreads:
    """Of one mount. Its fetches outlive plans."""

    def __init__(self, origin: Origin, hosts_s: float = 0.0) -> None:
        """`hosts_s`: what asking other hosts takes at most, before the origin is read."""
        self.origin = origin
        self._hosts_s = hosts_s
        self._tags = itertools.count(1)
        self._users: list[Fetches[Any]] = []

    @property
    def timeout_s(self) -> float:
        return self._hosts_s + self.origin.timeout_s

    def add(self, user: Fetches[Any]) -> None:
        self._users.append(user)

    def new_tag(self) -> int:
        """Any thread."""
        return next(self._tags)

    def _land(self, tag: int, fetched: Fetched) -> None:
        any(user.land(tag, fetched) for user in self._users)

    @staticmethod
    def _tell(call: Callable[[], None]) -> None:
        """A fault of one user is no other's, and loses no other landing."""
        try:
            call()
        except Exception:
            log.exception("a landed fetch")

    def start(self, threads_most: int) -> None:
        """Before the first fetch."""
        _native.fetch_start(threads_most, direct=self.origin.reads_direct)

    async def land_forever(self) -> None:
        """After `start`; it may be run again after it has failed."""
        fetch_fd = _native.fetch_fd()
        while True:
            await trio.lowlevel.wait_readable(fetch_fd)
            fetch_s = 0.0
            for tag, _, data, number, begun_ns, ended_ns, pooled in _native.fetch_take(TAKE_MOST):
                fetch_s = (ended_ns - begun_ns) / 1e9
                fetched = Fetched(data, number, begun_ns, ended_ns, pooled)
                self._tell(partial(self._land, tag, fetched))
            for user in self._users:
                self._tell(user.after_landings)
            if not any(user.is_awaited() for user in self._users):
                await trio.sleep(GATHER_S)
            elif fetch_s >= LONG_FETCH_S:
                await trio.sleep(LAND_EVERY_S)
