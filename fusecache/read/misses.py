"""READs of small files that are not on SSD, many at a time (docs/MISSES.md).

The front keeps such READs (ahead/missed.c) and names their inodes. A thread asks the index where
their files lie; what is not on SSD, and plain, is read by the fetch threads, which answer the
READs. All else goes to pyfuse3, and Operations.read.

INVARIANT: each inode that the front has named is fetched or passed on.
INVARIANT: each fetch is a Flight in Fetcher: whoever else wants the file joins it, and a file that
has a Flight is not fetched here. A READ joins one of the threads': it answers, or `let_go`.
INVARIANT: a READ waits for the index, for the publisher and for the origin no longer than it would
in Operations.read: then it is passed on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import trio

from fusecache import _native
from fusecache.base.errors import OriginChanged, OriginTimeout, UnknownInode
from fusecache.read.fetch_threads import Fetched, Fetches, FetchThreads
from fusecache.read.fetcher import Fetcher, Flight
from fusecache.read.origin import Origin
from fusecache.read.publisher import ROOM_WAIT_S
from fusecache.read.sources import STORE_TIMEOUT_S, Pool, Sources
from fusecache.store.types import Version
from fusecache.table import namespace

log = logging.getLogger(__name__)

FLYING_MOST = 64
ALL = 0  # for missed_pass()
POLL_S = 0.02  # room with the publisher comes without a sign
INDEX_TIMEOUT_S = 1.0  # for one answer
BATCH_TIMEOUT_S = STORE_TIMEOUT_S / 2  # for all that were named together; others wait meanwhile


class _Miss(NamedTuple):
    ino: int
    version: Version
    flight: Flight
    store: bool  # there was room with the publisher when it began


class Misses:
    """Of one mount."""

    def __init__(
        self, fetcher: Fetcher, origin: Origin, sources: Sources, threads: FetchThreads
    ) -> None:
        self._flying_most = min(FLYING_MOST, origin.threads)
        self._fetcher = fetcher
        self._origin = origin
        self._sources = sources
        self._asking: list[int] = []  # what the thread looks for in the index now
        self._asked = 0  # how often it has begun
        self._answered = 0  # how often it got on
        self._given_up = 0  # that is what has hung
        self._absent: deque[int] = deque()  # what it did not find
        self._awaited: deque[int] = deque()  # what another mount of this host reads
        self._is_watched = self._is_over = False
        self._thread: threading.Thread | None = None
        self._waiting: deque[tuple[int, float]] = deque()  # inodes, since when
        calls = (self._landed, self._hangs, self._feed_now, self._is_awaited)
        self._fetches = Fetches(threads, *calls)
        self._placing = threading.Lock()  # from a look for a place in line until it is taken
        self._joined: set[int] = set()  # whose READs another user's fetches are to answer
        self._some, self._some_awaited = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    async def run_forever(self) -> None:
        """It may be run again after it has failed."""
        if self._thread is not None:  # it may just be ending
            await trio.to_thread.run_sync(self._thread.join, abandon_on_cancel=True)
        self._token = trio.lowlevel.current_trio_token()
        self._is_over, self._given_up = False, 0
        self._absent.clear()
        self._awaited.clear()
        _native.missed_enable(True, self._origin.tick_ns)
        self._thread = threading.Thread(target=self._ask_forever, name="misses", daemon=True)
        self._thread.start()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_again_forever)
                await self._watch_forever()
        finally:
            self._is_over = True
            _native.missed_enable(False, 0)
            self._waiting.clear()
            self._joined.clear()
            for miss in self._fetches.clear():
                self._fetcher.fail(miss.ino, miss.flight, OriginChanged())
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
            if not self._is_watched:  # _watch_forever looks after `_asking` once it has said so
                self._call(self._some.unpark)
            until_s = time.monotonic() + BATCH_TIMEOUT_S
            for ino in inos:
                if self._given_up == self._asked:  # all are passed on
                    break
                try:
                    self._ask(ino, until_s)
                except Exception:
                    log.exception("a READ that missed")
                    _native.missed_pass(ino)
                self._answered += 1
            self._asking = []
            if self._absent or self._awaited or not self._is_watched:
                self._call(self._take)

    def _call(self, function: Callable[[], object]) -> None:
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function, idempotent=True)

    def _ask(self, ino: int, until_s: float) -> None:
        if time.monotonic() > until_s or self._is_there(ino):
            _native.missed_pass(ino)
        elif self._given_up == self._asked:
            pass  # no READ waits for it any more
        elif self._sources.is_awaited(ino, 0):
            self._awaited.append(ino)
        elif not self._begin_at_once(ino):
            self._absent.append(ino)

    def _begin_at_once(self, ino: int) -> bool:
        """What need not wait for a place in line, and may not join anything. False: trio's side
        looks at it.
        """
        with self._placing:
            may_begin = not (self._absent or self._waiting) and self._may_begin()
            return may_begin and self._fetch(ino)

    def _is_there(self, ino: int) -> bool:
        """Nearer than at the origin; or not to be told."""
        try:
            version = namespace.version(ino)
            return self._sources.is_near(ino, version, 0)
        except (UnknownInode, OSError):  # gone; no descriptor is left for its segment
            return True

    # ---- trio's side: what is to be read ---------------------------------------------------------

    def _take(self) -> None:
        self._some_awaited.unpark()
        self._feed(trio.current_time())
        if not self._is_watched:
            self._some.unpark()

    async def _watch_forever(self) -> None:
        """Looks after what takes long."""
        looked_at, since = (0, 0), 0.0
        while True:
            self._is_watched = False
            if not (self._asking or self._waiting or self._fetches.flying or self._given_up):
                await self._some.park()
            self._is_watched = True
            await trio.sleep(POLL_S)
            now = trio.current_time()
            asked, _ = stands = self._asked, self._answered
            if looked_at != stands or not self._asking:
                looked_at, since = stands, now
                if self._given_up and not self._asking:
                    self._given_up = 0
                    _native.missed_enable(True, self._origin.tick_ns)
            elif now > since + INDEX_TIMEOUT_S and self._given_up != asked:
                log.warning("the index did not answer within %g s", INDEX_TIMEOUT_S)
                self._given_up = asked
                _native.missed_enable(False, 0)
                self._waiting.clear()
                self._awaited.clear()
                _native.missed_pass(ALL)
            self._fetches.give_up_on_hung()
            self._feed(now)

    async def _look_again_forever(self) -> None:
        while True:
            if not self._awaited:
                await self._some_awaited.park()
            await trio.to_thread.run_sync(self._look_again, abandon_on_cancel=True)
            self._take()
            await trio.sleep(POLL_S)

    def _look_again(self) -> None:
        """For what another mount was reading, until that has taken long enough."""
        for _ in range(len(self._awaited)):
            ino = self._awaited.popleft()
            try:
                if self._is_there(ino):
                    _native.missed_pass(ino)
                elif self._sources.is_awaited(ino, 0):
                    self._awaited.append(ino)
                else:
                    self._absent.append(ino)
            except Exception:
                log.exception("a READ that missed")
                _native.missed_pass(ino)

    def _feed_now(self) -> None:
        if self._waiting:
            self._feed(trio.current_time())

    def _feed(self, now: float) -> None:
        """Begin as many fetches as may be begun now. What the publisher has no room for would not
        be stored.
        """
        while self._absent:
            self._waiting.append((self._absent.popleft(), now))
        while self._waiting:
            ino, since = self._waiting[0]
            with self._placing:
                if now < since + ROOM_WAIT_S and not self._may_begin():
                    break
                self._waiting.popleft()
                is_kept = self._has_place() and self._begin(ino)
            if not is_kept:
                _native.missed_pass(ino)

    def _is_awaited(self) -> bool:
        """A READ waits for a place, or for another user's fetch. (Others are answered already.)"""
        return bool(self._waiting or self._joined) or not self._has_place()

    def _may_begin(self) -> bool:
        return self._has_place() and self._fetcher.has_room()

    def _has_place(self) -> bool:
        return self._fetches.flying + self._fetches.lost < self._flying_most

    def _begin(self, ino: int) -> bool:
        """False: it is not plain."""
        flight = self._fetcher.flight_of(ino)
        if flight is None:
            return self._fetch(ino)
        if flight.is_by_threads and not flight.done.is_set():
            self._joined.add(ino)
            return True
        return False

    def _fetch(self, ino: int) -> bool:
        """False: it is not plain, or somebody fetches it. Any thread."""
        try:
            version = namespace.version(ino)
            if not self._fetcher.is_origin_ready(ino):
                return False
            if time.time_ns() - version.ctime_ns <= self._origin.tick_ns:
                return False  # too young: no READ could be given what is read
            flight, is_ours = self._fetcher.claim(ino)
        except UnknownInode:
            return False
        if not is_ours:
            return False
        # Another fetch may have brought it since it was named, and have landed before the claim.
        is_waited_for = _native.missed_waits(ino)
        if is_waited_for and not namespace.is_located(ino):
            try:
                miss = _Miss(ino, version, flight, self._fetcher.has_room())
                self._fetches.submit(miss, ino, version)
                return True
            except Exception as error:
                log.info("cannot fetch for a READ: %s", error)
        self._call(partial(self._fail, ino, flight))
        return not is_waited_for

    def _fail(self, ino: int, flight: Flight) -> None:
        """It was claimed, and not begun."""
        try:
            self._fetcher.fail(ino, flight, OriginChanged())
        except Exception:  # of whoever waits for it: here it would end the server
            log.exception("a fetch that was not begun")
        self.let_go(ino)

    def _landed(self, miss: _Miss, fetched: Fetched) -> None:
        """A fetch thread has read the file, and answered its READs; or it could not be read."""
        self.let_go(miss.ino)
        if fetched.errno or fetched.data is None:
            self._fetcher.fail(miss.ino, miss.flight, OriginChanged())
            _native.missed_pass(miss.ino)  # that way says why
        else:
            store = miss.store or self._fetcher.has_room()  # what has joined may want it stored
            found = (miss.ino, miss.flight, miss.version, fetched.data, fetched.begun_ns)
            lent = fetched.is_pooled and self._sources.is_lent(Pool.counts)
            if not self._fetcher.finish(*found, store=store, missed=True, lent=lent):
                _native.missed_pass(miss.ino)
            self._fetcher.land(miss.ino, miss.flight)

    def let_go(self, ino: int) -> None:
        """A fetch has ended, or is given up: what has joined it, and was not answered
        by it, is passed on.
        """
        if ino in self._joined:
            self._joined.discard(ino)
            _native.missed_pass(ino)

    @property
    def is_crowded(self) -> bool:
        """Some wait for a place in line."""
        return bool(self._waiting)

    def _hangs(self, miss: _Miss, error: OriginTimeout, ended: trio.Event) -> None:
        self._fetcher.fail(miss.ino, miss.flight, error, ended)
        self._joined.discard(miss.ino)
        _native.missed_pass(miss.ino)


def _inodes(packed: bytes) -> list[int]:
    found: list[int] = np.frombuffer(packed, np.uint32).tolist()
    return found
