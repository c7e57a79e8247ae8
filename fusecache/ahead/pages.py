"""Pages of files, to the kernel and out of it; whose are on their way now.

A push, a drop or a look-up may wait for a page, or a directory, that a reader waits for: each runs
in a thread.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
import trio
from numpy.typing import NDArray

from fusecache import _native
from fusecache.ahead.marks import Answers, Inos, flags
from fusecache.ahead.prefetches import Prefetch
from fusecache.base.metrics import BYTES_PUSHED, Metrics
from fusecache.base.wire import Standing
from fusecache.read.kernel import Kernel
from fusecache.store.types import BLOCK_BYTES, Version

PUSH_THREADS = 6
PUSH_BATCH, PUSH_BATCH_BYTES = 32, 8 << 20  # files pushed from memory in one visit to a thread
DROP_BATCH = 512
ASK_MS = 100  # for what the kernel has

File = tuple[int, tuple[int, int, int, int], bytes | memoryview]
Results = NDArray[np.uint8]  # _native.PUSHED and such
T = TypeVar("T")


class Pages:
    """Of one mount."""

    def __init__(
        self, kernel: Kernel, mountpoint: bytes, metrics: Metrics, on_end: Callable[[], None]
    ) -> None:
        """`on_end`: a push has ended."""
        self._kernel = kernel
        self._mountpoint = mountpoint
        self._metrics = metrics
        self._on_end = on_end
        self._pushers, self._droppers = trio.CapacityLimiter(PUSH_THREADS), trio.CapacityLimiter(2)
        self._busy = Counter[int]()  # inodes whose pages are being pushed: how many pushes
        self._left_over: set[int] = set()  # those of them that an ended plan began
        self._idle = trio.lowlevel.ParkingLot()

    # ---- whose are on their way ------------------------------------------------------------------

    def end_plan(self) -> None:
        self._left_over.update(self._busy)

    def __contains__(self, ino: object) -> bool:
        """Whether this plan is pushing it."""
        return ino in self._busy and ino not in self._left_over

    def left_over(self, inos: set[int]) -> set[int]:
        """Those of these that an ended plan began to push."""
        return self._left_over & inos

    def has_any(self, inos: set[int]) -> bool:
        return not inos.isdisjoint(self._busy)

    @contextmanager
    def _pushing(self, inos: Iterable[int]) -> Iterator[None]:
        inos = list(inos)
        self._busy.update(inos)
        try:
            yield
        finally:
            self._busy.subtract(inos)
            ended = [ino for ino in inos if not self._busy[ino]]
            for ino in ended:
                self._busy.pop(ino, None)
            self._left_over.difference_update(ended)
            if self._idle:
                self._idle.unpark_all()
            self._on_end()

    # ---- in threads ------------------------------------------------------------------------------

    async def push(self, inos: list[int], push: Callable[[], T]) -> T:
        """Have `push`, which calls `stage` or `push_files` for these, run in a thread."""
        with self._pushing(inos):
            return await trio.to_thread.run_sync(push, limiter=self._pushers)

    async def push_block(
        self, ino: int, version: Version, block: int, data: memoryview | None
    ) -> bool:
        """From memory, or (None) from SSD. False: it was refused."""
        push: Callable[[], Awaitable[int]] = partial(self._kernel.push_cached, ino, block, 0)
        if data is not None:
            push = partial(self._kernel.push, ino, version, block * BLOCK_BYTES, data)
        try:
            with self._pushing([ino]):
                pushed = await push()
                if pushed <= 0:  # perhaps the kernel has never heard of it
                    pushed = await self._push_held(ino, push)
        except OSError:
            pushed = 0
        self._metrics.add(BYTES_PUSHED, max(0, pushed))
        return pushed > 0

    async def _push_held(self, ino: int, push: Callable[[], Awaitable[int]]) -> int:
        """While the file is held, so that the kernel knows it, and cannot forget it again."""
        path = os.path.join(self._mountpoint, _native.path(ino))
        fd = await trio.to_thread.run_sync(_native.open_unseen, path, abandon_on_cancel=True)
        try:
            return await push()
        finally:
            os.close(fd)

    async def drop(self, inos: Inos) -> None:
        """Once none of them is being pushed."""
        while self.has_any(set(inos.tolist())):
            await self._idle.park()
        for start in range(0, len(inos), DROP_BATCH):
            some = inos[start : start + DROP_BATCH].tobytes()
            await self._slowly(partial(_native.drop, self._mountpoint, some, self._kernel.fuse_fd))

    async def arm(self, inos: Inos) -> None:
        """Waits for look-ups that are going on in the same directories."""
        await self._slowly(partial(_native.arm, self._kernel.fuse_fd, inos.tobytes()))

    async def _slowly(self, call: Callable[[], object]) -> None:
        await trio.to_thread.run_sync(call, limiter=self._droppers, abandon_on_cancel=True)

    # ---- for such threads ------------------------------------------------------------------------

    def stage(self, inos: Inos, moves: NDArray[np.uint8]) -> Results:
        """From SSD. Blocking."""
        results = _native.stage(
            self._kernel.fuse_fd, self._mountpoint, inos.tobytes(), moves.tobytes()
        )
        return np.frombuffer(results, np.uint8)

    def push_files(self, files: list[File]) -> bytes:
        """From memory; a result each. Blocking."""
        results = _native.push_files(self._kernel.fuse_fd, self._mountpoint, files)
        for (_, _, data), result in zip(files, results, strict=True):
            if result == _native.PUSHED:
                self._metrics.add(BYTES_PUSHED, len(data))
        return results

    def are_there(self, inos: Inos) -> NDArray[np.bool_]:
        """Whether the kernel has their pages, from a reader: they need not be fetched. Blocking."""
        answers = _native.ask_pages(self._kernel.fuse_fd, inos.tobytes(), ASK_MS)
        are_there: NDArray[np.bool_] = np.frombuffer(answers, np.uint8) == _native.PAGES_THERE
        return are_there


class Pushes:
    """Fetched files of one block, from memory to the kernel: those of the one plan there is."""

    def __init__(
        self,
        pages: Pages,
        answers: Answers,
        on_pushed: Callable[[list[tuple[Prefetch, int]]], None],
    ) -> None:
        """`on_pushed` gets what has left the queue, while its plan lives."""
        self._pages = pages
        self._answers = answers
        self._on_pushed = on_pushed
        self._queue: deque[tuple[Prefetch, memoryview]] = deque()
        self._work = trio.lowlevel.ParkingLot()
        self.bytes = 0
        """Not pushed yet."""

    def put(self, prefetch: Prefetch, data: memoryview) -> None:
        self._queue.append((prefetch, data))
        self.bytes += len(data)
        if len(self._queue) % PUSH_BATCH == 1:
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
            done = [
                (prefetch, results.get(prefetch.ino, _native.PUSH_REFUSED)) for prefetch, _ in batch
            ]
            self._on_pushed(done)

    def _next(self) -> list[tuple[Prefetch, memoryview]]:
        batch: list[tuple[Prefetch, memoryview]] = []
        size_bytes = 0
        while self._queue and len(batch) < PUSH_BATCH and size_bytes < PUSH_BATCH_BYTES:
            batch.append(self._queue.popleft())
            size_bytes += len(batch[-1][1])
        return batch

    async def _push(self, batch: list[tuple[Prefetch, memoryview]]) -> dict[int, int]:
        """Of each inode that is still wanted: the result."""
        files: list[File] = [
            (prefetch.ino, prefetch.version, data)
            for prefetch, data in batch
            if flags(prefetch.ino) & Standing.WANTED
        ]
        if not files:
            return {}
        inos = [ino for ino, _, _ in files]
        results = await self._pages.push(inos, partial(self._pages.push_files, files))
        return dict(zip(inos, results, strict=True))
