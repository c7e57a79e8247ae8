"""What a hintsd wants done ahead of use, in its order: staged from SSD, fetched from the origin.

Files of one block go through C: `_native.stage` pushes batches of them from their segments into the
page cache, the fetch threads get those that are not on SSD. Larger ones take the readers' way,
block by block. The state of each inode is its `Standing` (C: PLAN_*): QUEUED until its turn comes
(what clears it, cancels), FLYING while the origin or the publisher has it, WANTED while its pages
are to stay.

INVARIANT: nothing new is begun while readers' fetches wait for a thread or a place, while the
publisher or the kernel is behind (FLYING_BYTES_MOST), or while the origin is away.
INVARIANT: each file that they fetch is a Flight in Fetcher, so a reader's miss joins it.
INVARIANT: no page of an inode is pushed between the end of its `drop` and the next `stage` of it.
INVARIANT: each staged or fetched inode is reported once, unless it is cancelled or dropped before
its turn; one that is restored or RECLAIMED (window.py) is reported again. What a plan has begun
when it ends is finished, and not reported.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import trio

from fusecache import _native
from fusecache.ahead.depth import LimitedFetches
from fusecache.ahead.fetching import Fetching, Sorting
from fusecache.ahead.large import LargeFiles
from fusecache.ahead.marks import Answers, Inos, Report, Wishes, flags_of
from fusecache.ahead.pages import Pages
from fusecache.ahead.queues import FetchQueue, StageQueue
from fusecache.ahead.staging import Staging
from fusecache.ahead.stored import Evictions, Stored
from fusecache.ahead.window import Window, standing
from fusecache.base.metrics import (
    DEPTH,
    IN_FLIGHT,
    QUEUED_FETCH,
    QUEUED_STAGE,
    RECLAIMED_FILES,
    RESTORED_FILES,
    Metrics,
)
from fusecache.base.wire import Result, Standing, Wish
from fusecache.read.fetch_threads import FetchThreads
from fusecache.read.fetcher import Fetcher
from fusecache.read.kernel import Kernel
from fusecache.read.misses import Misses
from fusecache.read.origin import Origin
from fusecache.read.reader import Reader
from fusecache.read.sources import SsdSource
from fusecache.read.stager import Stager
from fusecache.reorder.packer import Packer
from fusecache.table.pins import Pins


class Prefetcher:
    """The one plan there is: its commands, and the tasks that work off what they queue."""

    def __init__(
        self,
        *,
        fetcher: Fetcher,
        reader: Reader,
        stager: Stager,
        origin: Origin,
        misses: Misses,
        fetch_threads: FetchThreads,
        segments: SsdSource,
        packer: Packer,
        preloaded: Container[int],
        evictions: Evictions,
        kernel: Kernel,
        metrics: Metrics,
        mountpoint: bytes,
        depth_most: int,
        bytes_per_s: int | None,
    ) -> None:
        """`preloaded`: see Stored."""
        self._fetcher, self._stager = fetcher, stager
        self._answers = answers = Answers()
        self._to_stage, self._to_fetch = StageQueue(), FetchQueue()
        self._pages = pages = Pages(kernel, mountpoint, metrics, self._to_stage.take_postponed)
        self._stored = stored = Stored(segments, packer, preloaded)
        self._fetches = LimitedFetches(fetch_threads, depth_most, bytes_per_s)
        self._evictions = evictions
        self._metrics = metrics
        self._tells_reclaimed = self._tells_owned = False
        self.window = Window(kernel, metrics, self._lost)
        self._large = large = LargeFiles(
            fetcher, reader, stager, packer, self._fetches, pages, answers, metrics
        )
        self._fetching = fetching = Fetching(
            fetcher=fetcher, origin=origin, misses=misses, fetches=self._fetches, stored=stored,
            segments=segments, pages=pages, to_stage=self._to_stage, to_fetch=self._to_fetch,
            answers=answers, metrics=metrics,
        )  # fmt: skip
        self._sorting = Sorting(self._to_fetch, stored, fetching, large, answers)
        self._staging = Staging(self._to_stage, pages, stored, fetching, large, packer, answers)
        metrics.watch(DEPTH, lambda: self._fetches.depth)
        metrics.watch(IN_FLIGHT, lambda: self._fetches.in_flight)
        metrics.watch(QUEUED_STAGE, lambda: self.queued_stage)
        metrics.watch(QUEUED_FETCH, lambda: self.queued_fetch)

    async def run_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            for part in (self._staging, self._sorting, self._fetching, self._large):
                nursery.start_soon(part.run_forever)
            nursery.start_soon(self.window.watch_forever)

    def staging_s(self) -> float:
        """As Staging.busy_s."""
        return self._staging.busy_s()

    @property
    def queued_stage(self) -> int:
        return self._to_stage.count + self._fetching.line.count_to_stage

    @property
    def queued_fetch(self) -> int:
        return self._to_fetch.count + self._fetching.line.count_to_fetch

    # ---- commands: each has taken effect when it returns -----------------------------------------

    def begin(
        self, report: Report, *, tells_reclaimed: bool = False, tells_owned: bool = False
    ) -> None:
        """A plan begins, empty. `report` must not wait. `tells_reclaimed`: of what the kernel let
        go of, and is not on SSD, it is told; else that is staged again. `tells_owned`: it is told
        of what was stored for other hosts.
        """
        self.end()
        self._stager.forget_all()
        _native.plan_begin()
        self._tells_reclaimed, self._tells_owned = tells_reclaimed, tells_owned
        self._answers.begin(report)

    def end(self) -> None:
        """Forget the plan. What is in flight is finished."""
        self._answers.end()
        self._pages.end_plan()
        self.pins.clear()
        _native.plan_end()
        for queue in (self._to_stage, self._to_fetch, self._large, self._fetching, self.window):
            queue.clear()

    def clear(self) -> None:
        if self._answers.report is not None:
            self.begin(
                self._answers.report,
                tells_reclaimed=self._tells_reclaimed,
                tells_owned=self._tells_owned,
            )

    def stage(self, inos: Inos, wishes: Wishes) -> None:
        """`wishes`: a sum of Wish for each.

        ValueError: more than QUEUED_MOST would wait.
        """
        wishes = wishes & np.uint8(Wish.STORE | Wish.MOVE | Wish.KEEP_ORDER | Wish.SORT)
        marks = Standing.WANTED
        if np.any(wishes & (Wish.MOVE | Wish.SORT)):
            if not np.any(wishes & Wish.KEEP_ORDER):
                marks |= Standing.COMING
                order = np.frombuffer(_native.sort_by_location(inos.tobytes()), np.int64)
                inos, wishes = inos[order], wishes[order]
            wishes = wishes | np.uint8(self._to_stage.next_chunk_mark())
        self.window.put(inos)
        self._queue(self._to_stage, inos, wishes, marks)

    def fetch(self, inos: Inos) -> None:
        """ValueError: more than QUEUED_MOST would wait."""
        self._queue(self._to_fetch, inos, np.full(len(inos), Wish.STORE, np.uint8), 0)

    def _queue(self, queue: StageQueue | FetchQueue, inos: Inos, wishes: Wishes, add: int) -> None:
        queue.make_room(len(inos))
        self.pins.plan()
        _native.plan_mark(
            inos.tobytes(),
            Standing.QUEUED | add,
            Standing.FAILED | Standing.READ | Standing.COMING,
        )
        is_known = (flags_of(inos) & Standing.QUEUED != 0) & (inos != 0)
        if not is_known.all():
            self._answers.tell_all(inos[~is_known], Result.GONE)
            inos, wishes = inos[is_known], wishes[is_known]
        queue.put(inos, wishes)

    def saw_reads(self, inos: Inos) -> None:
        """Readers have missed these just now."""
        self._staging.read_lately.put(inos)

    def tells_owned(self) -> bool:
        """Whether a plan is told of what is stored for other hosts."""
        return self._tells_owned and self._answers.report is not None

    def stored_for_others(self, ino: int) -> None:
        """The file, of one block, was asked for by another host, and is on SSD now."""
        if self.tells_owned():
            self._answers.tell(ino, Result.STORED_FOR_OTHERS)

    async def _lost(self, inos: Inos) -> None:
        """The kernel has let go of these. SSD gives them back at once; whether the origin is to,
        and when, the plan says.
        """
        plan = self._answers.plan
        are_stored = np.ones(len(inos), np.bool_)
        if self._tells_reclaimed:
            are_stored[:] = await trio.to_thread.run_sync(self._stored.are_stored, inos.tolist())
        if plan != self._answers.plan:
            return
        restored, reclaimed = standing(inos[are_stored]), standing(inos[~are_stored])
        self._metrics.add(RESTORED_FILES, len(restored))
        self._metrics.add(RECLAIMED_FILES, len(reclaimed))
        if len(restored):
            _native.plan_mark(restored.tobytes(), Standing.QUEUED, Standing.READ)
            self._to_stage.restore(restored)
        _native.plan_mark(reclaimed.tobytes(), 0, Standing.WANTED | Standing.STAGED)
        self._answers.tell_all(reclaimed, Result.RECLAIMED)

    @property
    def pins(self) -> Pins:
        return self._fetcher.pins

    async def pin(self, inos: Inos, number: int, others: bool, last: bool) -> None:
        """The next part of a list of what is to stay on SSD (docs/WIRE.md, *Pins*)."""
        async with self._fetcher.publishing:
            unknown = await trio.to_thread.run_sync(self.pins.put, inos, number, others, last)
        if len(unknown):
            await trio.to_thread.run_sync(self._stored.locate_all, unknown.tolist())

    async def can_evict(self) -> bool:
        """Whether `evict` may have an effect."""
        return await trio.to_thread.run_sync(self._evictions.are_possible)

    async def evict(self, inos: Inos) -> None:
        """Have these on SSD no more, as far as can be. Each is told of, once."""
        plan, unique = self._answers.plan, np.unique(inos)
        found = await trio.to_thread.run_sync(self._evictions.evict, unique.tolist())
        async with self._fetcher.publishing:  # what was found by its digest before has a location
            gone = await trio.to_thread.run_sync(self._evictions.forget, found)
        if plan == self._answers.plan:
            are_gone = np.array([gone.get(ino, True) for ino in unique.tolist()], np.bool_)
            self._answers.tell_all(unique[are_gone], Result.EVICTED)
            self._answers.tell_all(unique[~are_gone], Result.NOT_EVICTED)

    def cancel(self, inos: Inos) -> None:
        _native.plan_mark(inos.tobytes(), 0, Standing.QUEUED | Standing.WANTED)

    async def published(self) -> None:
        """Waits until what was fetched so far is on SSD, or in the log."""
        await self._fetcher.published()

    async def drop(self, inos: Inos) -> None:
        self.cancel(inos)
        self._staging.read_lately.forget(inos)
        _native.plan_mark(inos.tobytes(), 0, Standing.FAILED)
        self._large.forget(inos.tolist())
        await self._pages.drop(inos)
        self._stager.forget(inos.tolist())  # what a READ has brought meanwhile, too

    async def arm(self, inos: Inos) -> None:
        """Waits for look-ups that are going on in the same directories."""
        await self._pages.arm(inos)
