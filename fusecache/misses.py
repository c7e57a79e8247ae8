"""READs of small files that are not on SSD, many at a time (docs/MISSES.md).

The front keeps such READs (native_missed.c) and names their inodes. A thread asks the index where
their files lie; what is not on SSD, and plain, is read by the fetch pool, whose threads answer the
READs. All else goes to pyfuse3, and Operations.read.

INVARIANT: each inode that the front has named is fetched or passed on.
INVARIANT: each fetch is a Flight in Fetcher: whoever else wants the file joins it, and a file that
has a Flight is not fetched here.
INVARIANT: a READ waits for the index, for the publisher and for the origin no longer than it would
in Operations.read: then it is passed on.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import trio

from fusecache import _native, namespace
from fusecache.errors import OriginChanged, OriginTimeout
from fusecache.fetcher import ROOM_WAIT_S, Fetcher, Flight
from fusecache.origin import Origin
from fusecache.store.types import Version

log = logging.getLogger(__name__)

FLYING_MOST = 64
ALL = 0  # for missed_pass()
POLL_S = 0.02  # room with the publisher comes without a sign
INDEX_TIMEOUT_S = 1.0


class _Miss(NamedTuple):
    ino: int
    version: Version
    flight: Flight
    begun_s: float
    store: bool  # there was room with the publisher when it began


class Misses:
    """Of one mount."""

    def __init__(self, fetcher: Fetcher, origin: Origin) -> None:
        self._flying_most = min(FLYING_MOST, origin.threads)
        self._fetcher = fetcher
        self._origin = origin
        self._asking: list[int] = []  # what the thread looks for in the index now
        self._asked = 0  # how often it has begun
        self._given_up = 0  # that is what has hung
        self._absent: deque[int] = deque()  # what it did not find
        self._is_watched = self._is_over = False
        self._thread: threading.Thread | None = None
        self._waiting: deque[tuple[int, float]] = deque()  # inodes, since when
        self._flying: dict[int, _Miss] = {}  # by tag, the oldest first
        self._lost: dict[int, trio.Event] = {}  # by tag: what hung, was given up, and is to end
        self._tags = itertools.count(-1, -1)  # those of the prefetcher are positive
        self._some = trio.lowlevel.ParkingLot()

    async def run_forever(self) -> None:
        """It may be run again after it has failed."""
        self._token = trio.lowlevel.current_trio_token()
        self._is_over, self._given_up = False, 0
        self._absent.clear()
        _native.missed_enable(True, self._origin.tick_ns)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask_forever, name="misses", daemon=True)
            self._thread.start()
        try:
            await self._watch_forever()
        finally:
            self._is_over = True
            _native.missed_enable(False, 0)
            self._waiting.clear()
            for miss in self._flying.values():
                self._fetcher.fail(miss.ino, miss.flight, OriginChanged())
            self._flying.clear()
            _native.missed_pass(ALL)

    # ---- the thread: what is on SSD? -------------------------------------------------------------

    def _ask_forever(self) -> None:
        while not self._is_over:
            inos = _inodes(_native.missed_fresh(True))
            if not inos:  # switched off
                time.sleep(POLL_S)
                continue
            self._asked += 1
            self._asking = inos
            if not self._is_watched:  # ... who looks after `_asking` when he has said so
                self._call(self._some.unpark)
            for ino in inos:
                if self._is_there(ino):
                    _native.missed_pass(ino)
                elif self._given_up != self._asked:  # else nobody waits for it any more
                    self._absent.append(ino)
            self._asking = []
            self._call(self._take)

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, idempotent=True)

    def _is_there(self, ino: int) -> bool:
        """On SSD, or on its way there in the log; or not to be told."""
        try:
            version = namespace.version(ino)
            return _native.log_read(ino, version, 0, 0) is not None or self._fetcher.locate(
                ino, version, 0
            )
        except (KeyError, OSError):  # gone; no descriptor is left for its segment
            return True

    # ---- trio's side: what is to be read ---------------------------------------------------------

    def _take(self) -> None:
        now = trio.current_time()
        while self._absent:
            self._waiting.append((self._absent.popleft(), now))
        self._feed(now)
        if not self._is_watched:
            self._some.unpark()

    async def _watch_forever(self) -> None:
        """Looks after what takes long."""
        looked_at, since = 0, 0.0
        while True:
            self._is_watched = False
            if not (self._asking or self._waiting or self._flying):
                await self._some.park()
            self._is_watched = True
            await trio.sleep(POLL_S)
            now = trio.current_time()
            if looked_at != self._asked or not self._asking:
                looked_at, since = self._asked, now
                if self._given_up and not self._asking:
                    self._given_up = 0
                    _native.missed_enable(True, self._origin.tick_ns)
            elif now > since + INDEX_TIMEOUT_S and self._given_up != looked_at:
                log.warning("the index did not answer within %g s", INDEX_TIMEOUT_S)
                self._given_up = looked_at
                _native.missed_enable(False, 0)
                self._waiting.clear()
                _native.missed_pass(ALL)
            self._give_up_on_hung(now)
            self._feed(now)

    def _feed(self, now: float) -> None:
        """Begin as many fetches as may be begun now. What the publisher has no room for would not
        be stored.
        """
        while self._waiting:
            ino, since = self._waiting[0]
            may_begin = len(self._flying) + len(self._lost) < self._flying_most
            if now < since + ROOM_WAIT_S and not (may_begin and self._fetcher.has_room()):
                break
            self._waiting.popleft()
            if not (may_begin and self._begin(ino, now)):
                _native.missed_pass(ino)

    def _begin(self, ino: int, now: float) -> bool:
        """False: it is not plain."""
        try:
            version = namespace.version(ino)
        except KeyError:
            return False
        if self._fetcher.flight_of(ino) is not None or not self._fetcher.is_origin_ready(ino):
            return False
        if namespace.is_located(ino):
            return False  # it was published since the index was asked
        if time.time_ns() - version.ctime_ns <= self._origin.tick_ns:
            return False  # too young: nobody could be given what is read
        flight, tag = self._fetcher.begin(ino), next(self._tags)
        try:
            _native.fetch_submit(ino, version, tag, answers=True)
        except (OSError, ValueError, RuntimeError) as error:
            log.info("cannot fetch for a READ: %s", error)
            self._fetcher.fail(ino, flight, OriginChanged())
            return False
        self._flying[tag] = _Miss(ino, version, flight, now, self._fetcher.has_room())
        return True

    def landed(self, tag: int, data: bytes | None, begun_ns: int) -> None:
        """The pool has read the file, and answered its READs; or (None) it could not be read."""
        miss = self._flying.pop(tag, None)
        if miss is None:
            if tag in self._lost:
                self._lost.pop(tag).set()
            return
        found = (miss.ino, miss.flight, miss.version)
        if data is None:
            self._fetcher.fail(miss.ino, miss.flight, OriginChanged())
            _native.missed_pass(miss.ino)  # that way says why
        else:
            store = miss.store or self._fetcher.has_room()  # who has joined may want it stored
            if not self._fetcher.finish(*found, data, begun_ns, store=store, missed=True):
                _native.missed_pass(miss.ino)
            self._fetcher.land(miss.ino, miss.flight)
        self._feed(trio.current_time())

    def _give_up_on_hung(self, now: float) -> None:
        timeout_s = self._origin.timeout_s
        while self._flying:
            tag, miss = next(iter(self._flying.items()))
            if now - miss.begun_s < timeout_s:
                return
            del self._flying[tag]
            ended = self._lost[tag] = trio.Event()
            self._origin.failed(errno.EIO, f"no answer within {timeout_s:g} s")
            self._fetcher.fail(miss.ino, miss.flight, OriginTimeout(timeout_s), ended)
            _native.missed_pass(miss.ino)


def _inodes(packed: bytes) -> list[int]:
    found: list[int] = np.frombuffer(packed, np.uint32).tolist()
    return found
