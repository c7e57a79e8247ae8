"""Files of several blocks: the readers' way, block by block."""

from __future__ import annotations

from collections import deque

import trio

from fusecache.ahead.depth import LimitedFetches
from fusecache.ahead.marks import Answers, flags, mark
from fusecache.ahead.pages import Pages
from fusecache.base.errors import OriginChanged, OriginError
from fusecache.base.metrics import PREFETCHED_BYTES, PREFETCHED_FILES, Metrics
from fusecache.base.wire import Result, Standing
from fusecache.read.fetcher import Fetcher
from fusecache.read.reader import Reader
from fusecache.reorder.packer import Packer
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace

LARGE_AT_ONCE = 2
POLL_S = 0.02  # what holds prefetching back ends without a sign


class LargeFiles:
    """Of the one plan there is."""

    def __init__(
        self,
        fetcher: Fetcher,
        reader: Reader,
        packer: Packer,
        fetches: LimitedFetches,
        pages: Pages,
        answers: Answers,
        metrics: Metrics,
    ) -> None:
        self._fetcher = fetcher
        self._reader = reader
        self._packer = packer
        self._fetches = fetches
        self._pages = pages
        self._answers = answers
        self._metrics = metrics
        self._queue: deque[tuple[int, bool, int]] = deque()  # inode, whether to store it, plan
        self._work = trio.lowlevel.ParkingLot()

    def put(self, ino: int, store: bool) -> None:
        self._queue.append((ino, store, self._answers.plan))
        self._work.unpark()

    def clear(self) -> None:
        self._queue.clear()

    async def run_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(LARGE_AT_ONCE):
                nursery.start_soon(self._work_forever)

    async def _work_forever(self) -> None:
        while True:
            if not self._queue:
                await self._work.park()
                continue
            ino, store, plan = self._queue.popleft()
            marks = flags(ino)
            if not marks & Standing.QUEUED:
                continue
            mark(ino, Standing.FLYING, Standing.QUEUED)
            try:
                result = await self._do(ino, store, bool(marks & Standing.WANTED), plan)
            except OriginChanged:
                result = Result.GONE
            except OriginError:
                result = Result.ORIGIN_ERROR
            if plan == self._answers.plan:
                failed = Standing.FAILED if result == Result.ORIGIN_ERROR else 0
                staged = (
                    Standing.STAGED if result in (Result.STAGED, Result.STAGED_AND_STORED) else 0
                )
                mark(ino, failed | staged, Standing.FLYING | Standing.QUEUED)
                self._answers.tell(ino, result)

    async def _do(self, ino: int, store: bool, is_staged: bool, plan: int) -> int:
        version = namespace.version(ino)
        is_stored, is_fetched = True, False
        for block in range(namespace.block_count(version.size)):
            if not await self._reader.is_cached(ino, block):
                size_bytes = namespace.block_span(version.size, block)[1]
                await self._wait_for_origin(size_bytes, plan)
                if plan != self._answers.plan:
                    return Result.NOT_PUSHED
                is_fetched = True
                is_stored = is_stored and store and await self._store(ino, block, size_bytes)
            if not is_staged:
                if not is_stored:
                    return Result.NO_ROOM
                continue
            if not await self._push_block(ino, version, block, plan):
                return Result.NOT_PUSHED
        self._metrics.add(PREFETCHED_FILES, int(is_fetched))
        if not is_staged:
            return Result.STORED
        if is_stored:
            return Result.STAGED_AND_STORED
        return Result.NO_ROOM if store else Result.STAGED

    async def _wait_for_origin(self, size_bytes: int, plan: int) -> None:
        while plan == self._answers.plan and not (
            self._fetcher.is_origin_ready() and self._fetches.may_take()
        ):
            await trio.sleep(POLL_S)
        self._fetches.take(size_bytes)

    async def _store(self, ino: int, block: int, size_bytes: int) -> bool:
        """False: there is no room for it on SSD."""
        if not await trio.to_thread.run_sync(self._packer.has_spare, BLOCK_BYTES):
            return False
        was_cached = await self._reader.ensure_cached(ino, block)
        self._metrics.add(PREFETCHED_BYTES, 0 if was_cached else size_bytes)
        return was_cached is not None

    async def _push_block(self, ino: int, version: Version, block: int, plan: int) -> bool:
        """From SSD or another source. False: not wanted any more, or refused."""
        data: memoryview | None = None
        if not await self._reader.is_cached(ino, block):
            got, data = await self._fetcher.uncached(ino, block)
            self._metrics.add(PREFETCHED_BYTES, len(data))
            if got != version:
                raise OriginChanged
        if plan != self._answers.plan or not flags(ino) & Standing.WANTED:
            return False
        return await self._pages.push_block(ino, version, block, data)
