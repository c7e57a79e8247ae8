"""Files of one block that have been fetched, from memory to the kernel."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import trio

from fusecache import _native
from fusecache.ahead.jobs import Job
from fusecache.ahead.marks import Answers, flags
from fusecache.ahead.pages import PUSH_THREADS, File, Pages
from fusecache.base.wire import Standing

BATCH = 32  # files pushed in one visit to a thread
BATCH_BYTES = 8 << 20


class Pushes:
    """Those of the one plan there is."""

    def __init__(
        self, pages: Pages, answers: Answers, on_pushed: Callable[[list[tuple[Job, int]]], None]
    ) -> None:
        """`on_pushed` gets what has left the queue, while its plan lives."""
        self._pages = pages
        self._answers = answers
        self._on_pushed = on_pushed
        self._queue: deque[tuple[Job, memoryview]] = deque()
        self._work = trio.lowlevel.ParkingLot()
        self.bytes = 0
        """Not pushed yet."""

    def put(self, job: Job, data: memoryview) -> None:
        self._queue.append((job, data))
        self.bytes += len(data)
        if len(self._queue) % BATCH == 1:
            self._work.unpark()

    def clear(self) -> None:
        self._queue.clear()
        self.bytes = 0

    async def run_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(PUSH_THREADS - 1):
                nursery.start_soon(self._push_forever)

    async def _push_forever(self) -> None:
        while True:
            if not self._queue:
                await self._work.park()
                continue
            plan, batch = self._answers.plan, self._next()
            if self._queue:
                self._work.unpark()
            results = await self._push(batch)
            if plan != self._answers.plan:
                continue
            self.bytes -= sum(len(data) for _, data in batch)
            done = [(job, results.get(job.ino, _native.PUSH_REFUSED)) for job, _ in batch]
            self._on_pushed(done)

    def _next(self) -> list[tuple[Job, memoryview]]:
        batch: list[tuple[Job, memoryview]] = []
        size_bytes = 0
        while self._queue and len(batch) < BATCH and size_bytes < BATCH_BYTES:
            batch.append(self._queue.popleft())
            size_bytes += len(batch[-1][1])
        return batch

    async def _push(self, batch: list[tuple[Job, memoryview]]) -> dict[int, int]:
        """Of each inode that is still wanted: the result."""
        files: list[File] = [
            (job.ino, job.version, data) for job, data in batch if flags(job.ino) & Standing.WANTED
        ]
        if not files:
            return {}
        inos = [ino for ino, _, _ in files]
        results = await self._pages.push(inos, partial(self._pages.push_files, files))
        return dict(zip(inos, results, strict=True))
