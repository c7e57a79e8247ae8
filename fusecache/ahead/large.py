"""Files of several blocks: block by block, as readers fetch them.

Blocks are taken in the files' order, BLOCKS_AT_ONCE of them together, be they of one file or of
several: an origin with latency needs as many for its bandwidth.

INVARIANT: a block that is not on SSD is a Flight in Fetcher: readers join it, it joins theirs.
INVARIANT: a file is answered once all of its blocks that were begun have ended, unless it was
dropped.
INVARIANT: what a reader has come to is neither fetched nor pushed, unless it is to be stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import trio

from fusecache.ahead.depth import LimitedFetches
from fusecache.ahead.marks import Answers, flags, mark
from fusecache.ahead.pages import Pages
from fusecache.base.errors import OriginChanged, OriginError
from fusecache.base.metrics import PREFETCHED_BYTES, PREFETCHED_FILES, Metrics
from fusecache.base.wire import Result, Standing
from fusecache.read.fetcher import Fetcher, Flight
from fusecache.read.reader import Reader
from fusecache.read.stager import Stager
from fusecache.reorder.packer import Packer
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace

BLOCKS_AT_ONCE = 8
POLL_S = 0.02  # what holds prefetching back ends without a sign


@dataclass(eq=False, slots=True)
class _File:
    """One that is being staged, or fetched."""

    ino: int
    version: Version
    is_staged: bool
    """Else it is to be stored, nothing more."""
    may_store: bool
    is_stored: bool = True
    """All blocks so far."""
    is_fetched: bool = False
    """A block of it was not on SSD."""
    ended: int | None = None
    """Why no more of it is begun: a Result."""
    under_way: int = 1
    """Blocks, and one more until all were begun."""

    def end(self, result: int) -> None:
        self.ended = result if self.ended is None else self.ended

    @property
    def result(self) -> int:
        if self.ended is not None:
            return self.ended
        if not self.is_staged:
            return Result.STORED
        if self.is_stored:
            return Result.STAGED_AND_STORED
        return Result.NO_ROOM if self.may_store else Result.STAGED


class LargeFiles:
    """Of the one plan there is."""

    def __init__(
        self,
        fetcher: Fetcher,
        reader: Reader,
        stager: Stager,
        packer: Packer,
        fetches: LimitedFetches,
        pages: Pages,
        answers: Answers,
        metrics: Metrics,
    ) -> None:
        self._fetcher = fetcher
        self._reader = reader
        self._stager = stager
        self._packer = packer
        self._fetches = fetches
        self._pages = pages
        self._answers = answers
        self._metrics = metrics
        self._queue: deque[tuple[int, bool]] = deque()  # inode, whether to store it
        self._begun: dict[int, _File] = {}  # those that are to be answered
        self._work = trio.lowlevel.ParkingLot()
        self._places = trio.Semaphore(BLOCKS_AT_ONCE)

    def put(self, ino: int, store: bool) -> None:
        self._queue.append((ino, store))
        self._work.unpark()

    def clear(self) -> None:
        """The plan ends: nothing that was begun is answered."""
        self._queue.clear()
        self._begun.clear()

    def forget(self, inos: Iterable[int]) -> None:
        """They are dropped: what was begun is neither pushed nor answered."""
        for ino in inos:
            if self._begun.pop(ino, None) is not None:
                mark(ino, 0, Standing.FLYING)

    async def run_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                if not self._queue:
                    await self._work.park()
                    continue
                ino, store = self._queue.popleft()
                if flags(ino) & Standing.QUEUED:
                    await self._begin(ino, store, nursery)

    async def _begin(self, ino: int, store: bool, nursery: trio.Nursery) -> None:
        """Each of its blocks, as soon as there is a place for it."""
        is_staged = bool(flags(ino) & Standing.WANTED)
        mark(ino, Standing.FLYING, Standing.QUEUED)
        file = self._begun[ino] = _File(ino, namespace.version(ino), is_staged, store)
        for block in range(namespace.block_count(file.version.size)):
            await self._places.acquire()
            if file.ended is not None or not self._is_wanted(file):
                self._places.release()
                file.end(Result.NOT_PUSHED)
                break
            file.under_way += 1
            nursery.start_soon(self._take, file, block)
        self._leave(file)

    async def _take(self, file: _File, block: int) -> None:
        try:
            await self._do(file, block)
        except OriginChanged:
            file.end(Result.GONE)
        except OriginError:
            file.end(Result.ORIGIN_ERROR)
        except BaseException:  # a fault of ours, or the server ends
            file.end(Result.NOT_PUSHED)
            raise
        finally:
            self._places.release()
            self._leave(file)

    def _leave(self, file: _File) -> None:
        file.under_way -= 1
        if file.under_way or self._begun.get(file.ino) is not file:
            return
        del self._begun[file.ino]
        result = file.result
        failed = Standing.FAILED if result == Result.ORIGIN_ERROR else 0
        staged = Standing.STAGED if result in (Result.STAGED, Result.STAGED_AND_STORED) else 0
        mark(file.ino, failed | staged, Standing.FLYING | Standing.QUEUED)
        self._metrics.add(PREFETCHED_FILES, int(file.is_fetched and file.ended is None))
        self._answers.tell(file.ino, result)

    async def _do(self, file: _File, block: int) -> None:
        """Raises OriginError."""
        flight: Flight | None = None
        if not await self._reader.is_cached(file.ino, block):
            await self._wait_for_origin(file)
            if not self._is_wanted(file):
                file.end(Result.NOT_PUSHED)
                return
            store = file.may_store and file.is_stored
            store = store and await trio.to_thread.run_sync(self._packer.has_spare, BLOCK_BYTES)
            if file.is_staged and not store and self._has_come_to(file, block):
                file.is_stored = False
                return
            flight = await self._fetch(file, block, store)
        if not file.is_staged:
            if not file.is_stored:
                file.end(Result.NO_ROOM)
        elif not await self._push(file, block, flight):
            file.end(Result.NOT_PUSHED)

    def _has_come_to(self, file: _File, block: int) -> bool:
        """Whether a reader has."""
        return self._stager.has_brought(file.ino, file.version, block)

    async def _push(self, file: _File, block: int, flight: Flight | None) -> bool:
        """Unless it needs none. False: not wanted any more, or refused."""
        if file.ended is not None or self._has_come_to(file, block):
            return True
        if not self._is_wanted(file):
            return False
        if flight is not None:
            flight.claim_push()
        data = None if flight is None else flight.data
        return await self._pages.push_block(file.ino, file.version, block, data)

    def _is_wanted(self, file: _File) -> bool:
        if self._begun.get(file.ino) is not file:
            return False
        return not file.is_staged or bool(flags(file.ino) & Standing.WANTED)

    async def _wait_for_origin(self, file: _File) -> None:
        while self._is_wanted(file) and not (
            self._fetcher.is_origin_ready() and self._fetches.may_take()
        ):
            await trio.sleep(POLL_S)

    async def _fetch(self, file: _File, block: int, store: bool) -> Flight:
        """Into memory, and to SSD if `store`. Raises OriginError."""
        size_bytes = namespace.block_span(file.version.size, block)[1]
        file.is_fetched = True
        self._fetches.take(size_bytes)
        flight = await self._fetcher.block(file.ino, block, asked=store, store=store)
        self._metrics.add(PREFETCHED_BYTES, 0 if flight.was_stored else size_bytes)
        if store:
            await flight.landed.wait()
        file.is_stored &= flight.was_stored or flight.stored
        if flight.version != file.version or flight.data is None:
            raise OriginChanged
        if not flight.is_settled:
            file.end(Result.NOT_PUSHED)
        return flight
