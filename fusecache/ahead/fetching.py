"""What is not on SSD: it waits for its turn, is got by the fetch threads, pushed, and published."""

from __future__ import annotations

import errno
import heapq
import logging
import os
from collections import OrderedDict
from functools import partial

import numpy as np
import trio

from fusecache import _native
from fusecache.ahead.depth import LimitedFetches
from fusecache.ahead.large import POLL_S, LargeFiles
from fusecache.ahead.marks import Answers, Inos, flags, flags_of, mark, refusal
from fusecache.ahead.pages import Pages, Pushes
from fusecache.ahead.prefetches import Prefetch, Prefetches
from fusecache.ahead.queues import FetchQueue, StageQueue
from fusecache.ahead.stored import Claim, Claims, Stored
from fusecache.base.errors import AWAY_ERRNOS, OriginChanged, OriginError, OriginTimeout
from fusecache.base.metrics import PREFETCHED_BYTES, PREFETCHED_FILES, Metrics
from fusecache.base.wire import Result, Standing, Wish
from fusecache.read.fetch_threads import Fetched
from fusecache.read.fetcher import Fetcher, Flight
from fusecache.read.misses import Misses
from fusecache.read.origin import Origin
from fusecache.read.sources import SsdSource
from fusecache.store.types import BLOCK_BYTES
from fusecache.table import namespace

log = logging.getLogger(__name__)

FLYING_BYTES_MOST = 64 << 20  # read or being read, and not pushed yet
SORT_BATCH = 256
SORTED_MOST = 16_384  # known to be only at the origin, waiting for it
ATTEMPTS_MOST = 3  # times a file may change under its fetch
CAME_MOST = 256  # looked at in one go


class Line:
    """What waits for the origin, with whether to store it. What is to be staged goes first, and in
    its order: batches of it come from several threads.
    """

    def __init__(self) -> None:
        self._to_stage: dict[int, bool] = {}
        self._order: list[tuple[int, int]] = []  # a heap of (number in that order, inode)
        self._to_fetch: OrderedDict[int, bool] = OrderedDict()
        self._came: set[int] = set()  # those that were to be fetched, but had come to SSD

    @property
    def count_to_stage(self) -> int:
        return len(self._to_stage)

    @property
    def count_to_fetch(self) -> int:
        return len(self._to_fetch)

    @property
    def has_some(self) -> bool:
        return bool(self._to_stage or self._to_fetch)

    def __contains__(self, ino: object) -> bool:
        """Whether it waits to be staged."""
        return ino in self._to_stage

    def has_any(self, inos: set[int]) -> bool:
        return not self._to_stage.keys().isdisjoint(inos)

    def stage(self, ino: int, store: bool, number: int) -> None:
        """`number`: its place in the order."""
        self._to_stage[ino] = self._to_fetch.pop(ino, store)
        heapq.heappush(self._order, (number, ino))

    def store(self, ino: int) -> None:
        """What waits to be staged is to be stored, too."""
        self._to_stage[ino] = True

    def fetch(self, ino: int) -> None:
        self._to_fetch[ino] = True

    def take(self) -> tuple[int, bool, bool]:
        """The next inode, whether to store it, whether it is to be staged. There is one."""
        if self._to_stage:
            ino = heapq.heappop(self._order)[1]
            return ino, self._to_stage.pop(ino), True
        ino, store = self._to_fetch.popitem(last=False)
        return ino, store, False

    def has_come(self, inos: list[int]) -> None:
        """They are on SSD, after all, and are to be staged from there."""
        self._came.update(inos)

    def had_come(self, ino: int) -> bool:
        """If so once, it could not be read there."""
        return ino in self._came

    def forget_came(self, inos: list[int]) -> None:
        if self._came:
            self._came.difference_update(inos)

    def clear(self) -> None:
        self._to_stage.clear()
        self._order.clear()
        self._to_fetch.clear()
        self._came.clear()


class Fetching:
    """Of the one plan there is."""

    def __init__(
        self,
        *,
        fetcher: Fetcher,
        origin: Origin,
        misses: Misses,
        fetches: LimitedFetches,
        stored: Stored,
        segments: SsdSource,
        pages: Pages,
        to_stage: StageQueue,
        to_fetch: FetchQueue,
        answers: Answers,
        metrics: Metrics,
    ) -> None:
        self._fetcher = fetcher
        self._origin = origin
        self._misses = misses
        self._fetches = fetches
        fetches.serve(self._landed, self._given_up, self.feed)
        self._stored = stored
        self._pages = pages
        self._to_stage = to_stage
        self._to_fetch = to_fetch
        self._answers = answers
        self._metrics = metrics
        self._pushes = Pushes(pages, answers, self._pushed)
        self.line = Line()
        self.claims = Claims(segments, self._settled)
        self.prefetches = Prefetches(fetcher, answers, self._pushes.put)
        self._work = trio.lowlevel.ParkingLot()

    def clear(self) -> None:
        """The plan has ended. What is in flight is finished."""
        self.line.clear()
        self.claims.clear()
        self.prefetches.clear()
        self._pushes.clear()

    async def run_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._pushes.run_forever)
            nursery.start_soon(self._poll_forever)
            nursery.start_soon(self.claims.run_forever)

    async def _poll_forever(self) -> None:
        while True:
            if not (self.line.has_some or self._fetches.in_flight):
                await self._work.park()
                continue
            await trio.sleep(POLL_S)
            self._fetches.give_up_on_hung()
            self.feed()

    # ---- what is begun ---------------------------------------------------------------------------

    def feed(self) -> None:
        """Begin as many fetches as may be begun now."""
        if not self._may_begin():
            return
        came: list[tuple[int, int]] = []  # to be staged, with how
        stored: list[int] = []
        while (
            self.line.has_some
            and not self._fetches.is_full
            and self._fetches.in_flight + len(self.claims) < self._fetches.depth
            and self._fetches.flying_bytes + self._pushes.bytes < FLYING_BYTES_MOST
            and len(came) + len(stored) < CAME_MOST
            and self._fetches.may_take()
        ):
            ino, store, is_to_be_staged = self.line.take()
            marks = flags(ino)
            if not marks & Standing.QUEUED:
                continue
            if not is_to_be_staged and ino in self._pages:
                continue  # it comes back from there if it has to be fetched
            if self.line.had_come(ino):
                self._begin(ino, store, marks)
            elif not self._stored.has_come(ino):
                if self.claims.are_needed:
                    self.claims.put(Claim(ino, store, is_to_be_staged))
                else:
                    self._begin(ino, store, marks)
            elif is_to_be_staged:
                came.append((ino, Wish.STORE if store else 0))
            else:
                stored.append(ino)
        self._have_come(came, stored)
        if self._to_stage.has_some and self.line.count_to_stage < SORTED_MOST // 2:
            self._to_stage.work.unpark_all()
        if self._to_fetch.count and self.line.count_to_fetch < SORTED_MOST // 2:
            self._to_fetch.work.unpark()

    def _have_come(self, came: list[tuple[int, int]], stored: list[int]) -> None:
        """They are on SSD, after all: `came` are to be staged, with how."""
        if came:
            inos, wishes = (np.array(column) for column in zip(*came, strict=True))
            self.line.has_come(inos.tolist())
            self._to_stage.put_first(inos.astype(np.uint32), wishes.astype(np.uint8))
        if stored:
            self.answer_stored(self.only_fetched(np.array(stored, np.uint32)))

    def _settled(self, ours: list[Claim], come: list[Claim]) -> None:
        """They were in line, and had their turn."""
        came = [(c.ino, Wish.STORE if c.store else 0) for c in come if c.is_to_be_staged]
        self._have_come(came, [claim.ino for claim in come if not claim.is_to_be_staged])
        for ino, store, _ in ours:
            marks = flags(ino)
            if marks & Standing.QUEUED:
                self._begin(ino, store, marks)
        self.feed_soon()

    def feed_soon(self) -> None:
        """Some are in line."""
        self._work.unpark()
        self.feed()

    def _may_begin(self) -> bool:
        """Is the origin there, and does no reader wait for it or for the publisher?"""
        return (
            not self._fetches.is_paused
            and self._fetcher.has_room()
            and self._fetcher.is_origin_ready()
            and not self._misses.is_crowded
        )

    def _begin(self, ino: int, store: bool, marks: int) -> None:
        self.line.forget_came([ino])
        was_read = marks & Standing.READ and marks & Standing.WANTED
        if was_read and self._fetcher.flight_of(ino) is None:  # a reader has brought its pages
            mark(ino, Standing.STAGED, Standing.QUEUED)
            self._answers.tell(ino, Result.STAGED)
        else:
            self._fetch(ino, store)

    def _fetch(self, ino: int, store: bool, attempts: int = 1) -> None:
        prefetch = self.prefetches.begin(ino, store, attempts)
        flight = self.prefetches.fly(prefetch)
        if flight is not None:  # a reader was faster, or an earlier plan
            flight.when_landed(partial(self._others_landed, prefetch, flight))
            return
        try:
            self._fetches.submit(prefetch)
        except (OSError, ValueError) as error:
            log.info("cannot fetch ahead: %s", error)
            self._fail(prefetch, OriginChanged())
            self.prefetches.end(prefetch, Result.NOT_PUSHED)

    def only_fetched(self, inos: Inos) -> list[int]:
        """Those of these that wait for nothing but to be fetched. What is to be staged as well is
        answered when it is staged: in its turn, or after all others.
        """
        marks = flags_of(inos)
        is_staged = marks & Standing.STAGED != 0
        is_to_be_staged = (marks & Standing.WANTED != 0) & ~is_staged
        is_queued = marks & Standing.QUEUED != 0
        left, wanted = [], inos[is_queued & is_to_be_staged]
        for ino in dict.fromkeys(inos[is_queued & ~is_to_be_staged].tolist()):
            if ino in self.prefetches:
                self.prefetches.store(ino)
            elif ino in self.line:
                self.line.store(ino)
            elif ino in self.claims:
                self.claims.store(ino)
            elif ino not in self._pages:
                left.append(ino)
        self._to_stage.put(wanted, np.full(len(wanted), Wish.STORE, np.uint8))
        return left

    def answer_stored(self, inos: list[int]) -> None:
        packed = np.array(inos, np.uint32)
        _native.plan_mark(packed.tobytes(), 0, Standing.QUEUED)
        self._answers.tell_all(packed, Result.STORED)

    # ---- what has come ---------------------------------------------------------------------------

    def _landed(self, prefetch: Prefetch, fetched: Fetched) -> None:
        if fetched.errno == 0 and fetched.data is not None:
            if not fetched.is_pooled:  # the depth is the origin's
                self._fetches.completed(len(fetched.data))
            self._arrived(prefetch, fetched.data, fetched.begun_ns)
        else:
            self._failed(prefetch, fetched.errno or errno.EIO)
        self._misses.let_go(prefetch.ino)

    def _arrived(self, prefetch: Prefetch, data: bytes, begun_ns: int) -> None:
        assert prefetch.flight is not None
        self._metrics.add(PREFETCHED_FILES)
        self._metrics.add(PREFETCHED_BYTES, len(data))
        is_settled = self._fetcher.finish(
            prefetch.ino, prefetch.flight, prefetch.version, data, begun_ns, prefetch.store
        )
        if not self.prefetches.is_current(prefetch):
            self.prefetches.land(prefetch)
        elif not is_settled:
            self.prefetches.end(prefetch, refusal(prefetch.ino))
        else:
            self.prefetches.arrived(prefetch, bool(flags(prefetch.ino) & Standing.WANTED))

    def _pushed(self, done: list[tuple[Prefetch, int]]) -> None:
        for prefetch, result in done:
            self.prefetches.pushed(prefetch, result)
        self.feed()

    def _others_landed(self, prefetch: Prefetch, flight: Flight) -> None:
        """A fetch of somebody else's that we waited for."""
        if not self.prefetches.is_current(prefetch):
            return
        is_wanted = flags(prefetch.ino) & Standing.WANTED
        if is_wanted and _has_brought(prefetch, flight):
            self.prefetches.brought(prefetch, flight)
        elif is_wanted:
            self.prefetches.queue_again(prefetch)
            self._to_stage.put_first(
                np.array([prefetch.ino], np.uint32), np.array([prefetch.store], np.uint8)
            )
        elif flight.stored:
            self.prefetches.end(prefetch, Result.STORED)
        elif isinstance(flight.error, OriginChanged):  # or cannot be read: our own fetch says why
            self.prefetches.queue_again(prefetch)
            self.line.fetch(prefetch.ino)
            self._work.unpark()
        elif flight.error is not None:
            self.prefetches.end(prefetch, Result.ORIGIN_ERROR)
        else:
            self.prefetches.end(
                prefetch, Result.NO_ROOM if flight.is_settled else Result.NOT_PUSHED
            )

    # ---- what has failed -------------------------------------------------------------------------

    def _failed(self, prefetch: Prefetch, number: int) -> None:
        if number in (errno.ESTALE, errno.ENOENT):
            self._fail(prefetch, OriginChanged())
            self._nursery.start_soon(self._look_again, prefetch)
            return
        self._fail(prefetch, self._origin.failed(number, os.strerror(number)))
        self._hold_back(prefetch, is_away=number in AWAY_ERRNOS)

    def _fail(
        self, prefetch: Prefetch, error: OriginError, ended: trio.Event | None = None
    ) -> None:
        assert prefetch.flight is not None
        self._fetcher.fail(prefetch.ino, prefetch.flight, error, ended)

    def _hold_back(self, prefetch: Prefetch, is_away: bool) -> None:
        self._fetches.failed(prefetch, trio.current_time(), is_away)
        if self.prefetches.is_current(prefetch):
            mark(prefetch.ino, Standing.FAILED, 0)
            self.prefetches.end(prefetch, Result.ORIGIN_ERROR)

    async def _look_again(self, prefetch: Prefetch) -> None:
        """The file was another one than the table says."""
        result = 0
        try:
            await self._fetcher.refresh(prefetch.ino)
        except OriginChanged:
            result = Result.GONE
        except OriginError:
            result = Result.ORIGIN_ERROR
        if not self.prefetches.is_current(prefetch):
            return
        size = namespace.version(prefetch.ino).size
        if not result and prefetch.attempts < ATTEMPTS_MOST and 0 < size <= BLOCK_BYTES:
            self._work.unpark()
            self._fetch(prefetch.ino, prefetch.store, prefetch.attempts + 1)
        else:
            self.prefetches.end(prefetch, result or Result.NOT_PUSHED)

    def _given_up(self, prefetch: Prefetch, error: OriginTimeout, ended: trio.Event) -> None:
        self._fail(prefetch, error, ended)
        self._misses.let_go(prefetch.ino)
        self._hold_back(prefetch, is_away=True)


def _has_brought(prefetch: Prefetch, flight: Flight) -> bool:
    """Whether a landed flight brought the file as it is now, to be pushed."""
    return (
        flight.data is not None
        and flight.is_settled
        and flight.version == prefetch.version == namespace.version(prefetch.ino)
    )


class Sorting:
    """Of what is to be fetched: what is on SSD already, what is large, what waits for the origin?
    For the one plan there is.
    """

    def __init__(
        self,
        queue: FetchQueue,
        stored: Stored,
        fetching: Fetching,
        large: LargeFiles,
        answers: Answers,
    ) -> None:
        self._queue = queue
        self._stored = stored
        self._fetching = fetching
        self._large = large
        self._answers = answers
        self._threads = trio.CapacityLimiter(1)

    async def run_forever(self) -> None:
        while True:
            if not self._queue.count or self._fetching.line.count_to_fetch >= SORTED_MOST:
                await self._queue.work.park()
                continue
            plan, (inos, _) = self._answers.plan, self._queue.take(SORT_BATCH)
            unsorted = self._fetching.only_fetched(inos)
            if not unsorted:
                await trio.sleep(0)
                continue
            are_stored = await trio.to_thread.run_sync(
                self._stored.are_stored, unsorted, limiter=self._threads, abandon_on_cancel=True
            )
            if plan == self._answers.plan:
                stored = {ino for ino, yes in zip(unsorted, are_stored, strict=True) if yes}
                self._sorted(unsorted, stored)

    def _sorted(self, inos: list[int], stored: set[int]) -> None:
        left = self._fetching.only_fetched(np.array(inos, np.uint32))
        self._fetching.answer_stored([ino for ino in left if ino in stored])
        for ino in (ino for ino in left if ino not in stored):
            if namespace.version(ino).size > BLOCK_BYTES:
                self._large.put(ino, store=True)
            else:
                self._fetching.line.fetch(ino)
        self._fetching.feed_soon()
