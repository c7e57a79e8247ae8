"""What a hintsd wants done ahead of use, in its order: staged from SSD, fetched from the origin.

Files of one block go through C: `_native.stage` pushes batches of them from their segments into the
page cache, the fetch pool reads those that are not on SSD. Larger ones take the readers' way, block
by block. The state of each inode is its PLAN_* flags: QUEUED until its turn comes (who clears it,
cancels), FLYING while the origin or the publisher has it, WANTED while its pages are to stay.

INVARIANT: nothing new is begun while readers' fetches wait for a thread, while the publisher or
the kernel is behind (FLYING_BYTES_MOST), or while the origin is away.
INVARIANT: each file in the fetch pool is a Flight in Fetcher, so a reader's miss joins it.
INVARIANT: no page of an inode is pushed between the end of its `drop` and the next `stage` of it.
INVARIANT: each staged or fetched inode is reported once, unless it is cancelled or dropped before
its turn; one that is restored (window.py) is reported again. What a plan has begun when it ends is
finished, and reported to nobody.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import os
import stat
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio
from numpy.typing import NDArray

from fusecache import _native, namespace
from fusecache.depth import Depth, TokenBucket
from fusecache.errors import OriginChanged, OriginError, OriginTimeout
from fusecache.fetcher import Fetcher, Flight
from fusecache.kernel import Kernel
from fusecache.misses import FLYING_MOST, Misses
from fusecache.origin import AWAY_ERRNOS, Origin
from fusecache.packer import Packer
from fusecache.pins import Pins
from fusecache.reader import Reader
from fusecache.stats import Stats
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.window import Inos, Window, flags_of

log = logging.getLogger(__name__)

# results (docs/WIRE.md, `done`)
STAGED, STORED, STAGED_AND_STORED, ORIGIN_ERROR, CHANGED, NO_ROOM, NOT_PUSHED = range(1, 8)

# How a file is to be staged (docs/WIRE.md): stored on SSD; appended to the log; in the given order;
# in that on SSD
STORE, MOVE, KEEP_ORDER, SORT = 1, 2, 4, 8
CHUNK_MARKS = (64, 128)  # added here, in turn: which frame a file came in

ASK_MS = 100  # for what the kernel has
READ_LATELY_S = 0.1  # a hintsd that has not heard of a READ may want the file staged for it
STAGE_BATCH = 64  # files staged in one visit to a thread
BATCH = 32  # pushed from memory in one
BATCH_BYTES = 8 << 20
MOVE_BATCH, MOVE_BATCH_BYTES = 512, 4 << 20  # in the order in which they lie on SSD
SORT_BATCH = 256
DROP_BATCH = 512
TAKE_MOST = 256
PUSH_THREADS = 6
LEFT_FILES = 256  # to readers that have caught up: they have read such a part of a batch
LEFT_SHARE = 0.25
LEFT_SHARE_OF_CHUNK = 0.75  # READs wait for a chunk: few that were in it before get ahead of it
FLYING_BYTES_MOST = 64 << 20  # read or being read, and not pushed yet
SORTED_MOST = 16_384  # known to be only at the origin, waiting for it
QUEUED_MOST = 1 << 22
LOST_MOST = 32  # threads that may hang in the origin beside those that work
ATTEMPTS_MOST = 3  # times a file may change under its fetch
LARGE_AT_ONCE = 2
CAME_MOST = 256  # looked at in one go
PAUSE_S_FIRST, PAUSE_S_MOST = 0.1, 5.0
POLL_S = 0.02  # what holds prefetching back ends without a sign
# Between two looks at what the pool has fetched, where a fetch takes LONG_FETCH_S or more
LONG_FETCH_S, LAND_EVERY_S = 0.015, 0.0015

File = tuple[int, tuple[int, int, int, int], bytes | memoryview]
Report = Callable[[bytes, bytes], None]  # inodes (packed u32), a result each


class ArrayQueue:
    """A first-in first-out of (inode, flags) pairs, kept as the arrays they came in."""

    def __init__(self) -> None:
        self._parts: deque[tuple[Inos, NDArray[np.uint8]]] = deque()
        self.count = 0

    def put(self, inos: Inos, flags: NDArray[np.uint8]) -> None:
        if len(inos):
            self._parts.append((inos, flags))
            self.count += len(inos)

    @property
    def first_flags(self) -> int:
        """Of the oldest, which there is."""
        return int(self._parts[0][1][0])

    def put_first(self, inos: Inos, flags: NDArray[np.uint8]) -> None:
        if len(inos):
            self._parts.appendleft((inos, flags))
            self.count += len(inos)

    def take(self, most: int) -> tuple[Inos, NDArray[np.uint8]]:
        """The oldest ones, `most` if there are so many."""
        left = min(most, self.count)
        self.count -= left
        taken = [(np.empty(0, np.uint32), np.empty(0, np.uint8))]
        while left:
            inos, flags = self._parts.popleft()
            if len(inos) > left:
                self._parts.appendleft((inos[left:], flags[left:]))
                inos, flags = inos[:left], flags[:left]
            taken.append((inos, flags))
            left -= len(inos)
        if len(taken) <= 2:
            return taken[-1]
        return np.concatenate([i for i, _ in taken]), np.concatenate([f for _, f in taken])

    def forget_cancelled(self) -> None:
        parts = list(self._parts)
        self.clear()
        for inos, flags in parts:
            is_live = flags_of(inos) & _native.PLAN_QUEUED != 0
            self.put(inos[is_live], flags[is_live])

    def clear(self) -> None:
        self._parts.clear()
        self.count = 0


@dataclass(eq=False, slots=True)
class Job:
    """A file that has left the queues and is not reported yet.

    `push` and `stored`: None: not asked for (so far); WAITING; else the result.
    """

    ino: int
    store: bool
    plan: int  # number of the plan that wants it
    version: Version
    flight: Flight | None = None  # ours; None: a reader's is waited for
    begun_s: float = 0.0
    attempts: int = 1
    push: int | None = None
    stored: int | None = None


WAITING = -1


def _refusal(ino: int) -> int:
    """Why the kernel was not given a file's pages. What is flagged as changed, too young, or
    another version may be tried again.
    """
    is_file = stat.S_ISREG(_native.attributes(ino)[0]) and not _native.is_dead(ino)
    return NOT_PUSHED if is_file else CHANGED


def _in_log(ino: int, size_bytes: int | None = None) -> tuple[Version, bytes] | None:
    """A file of one block that waits in the log to be written, and has no location before; so many
    of its bytes (None: all). One that is written meanwhile has its location when this returns.
    """
    try:
        version = namespace.version(ino)
    except KeyError:
        return None
    if version.size > BLOCK_BYTES:
        return None
    data = _native.log_read(ino, version, 0, version.size if size_bytes is None else size_bytes)
    return None if data is None else (version, data)


def _flags(ino: int) -> int:
    return _native.plan_flags(ino.to_bytes(4, "little"))[0]


def _mark(ino: int, add: int, remove: int) -> None:
    _native.plan_mark(ino.to_bytes(4, "little"), add, remove)


class Prefetcher:
    """The queues of the one plan there is, and the tasks that work them off."""

    def __init__(
        self,
        *,
        fetcher: Fetcher,
        reader: Reader,
        origin: Origin,
        packer: Packer,
        kernel: Kernel,
        stats: Stats,
        mountpoint: bytes,
        depth_most: int,
        bytes_per_s: int | None,
    ) -> None:
        self._fetcher = fetcher
        self._reader = reader
        self._origin = origin
        self._packer = packer
        self._kernel = kernel
        self._stats = stats
        self._mountpoint = mountpoint
        self._depth_most = depth_most
        self._depth = Depth(depth_most)
        self._bucket_bytes_per_s = bytes_per_s
        self._threads = trio.CapacityLimiter(PUSH_THREADS)
        self._sorters = trio.CapacityLimiter(1)
        self._droppers = trio.CapacityLimiter(2)
        self._report: Report | None = None
        self._plan = 0
        self.preloaded: set[int] = set()  # directories whose files' locations the front knows
        self.misses = Misses(fetcher, origin)

        self.window = Window(kernel, stats, self._restore)

        self._staging, self._fetching = ArrayQueue(), ArrayQueue()
        self._restoring = ArrayQueue()  # staged before, and let go of by the kernel: they go first
        # Not on SSD: inode -> whether to store it. Those to be staged go first, and in their order,
        # a heap of (number in that order, inode): batches come from several threads.
        self._to_stage: dict[int, bool] = {}
        self._came: set[int] = set()  # those that were to be fetched, but had come to SSD
        self._order: list[tuple[int, int]] = []
        self._number = 0  # of files whose turn to be staged has come
        self._left: list[tuple[Inos, NDArray[np.uint8]]] = []  # to the readers
        self._left_until = 0
        self._chunk_mark = CHUNK_MARKS[0]
        self._to_fetch: OrderedDict[int, bool] = OrderedDict()
        self._read_lately: deque[tuple[float, Inos]] = deque()
        self._large: deque[tuple[int, bool, int]] = deque()
        self._jobs: dict[int, Job] = {}
        self._pushes: deque[tuple[Job, memoryview]] = deque()
        self._push_bytes = 0
        self._flying: dict[int, Job] = {}  # tag -> job, the oldest first
        self._flying_bytes = 0
        self._lost: set[int] = set()  # tags of fetches that hang, and were given up
        self._tags = itertools.count(1)
        self._pause_s = 0.0
        self._pause_until = 0.0
        self._busy: set[int] = set()  # inodes whose pages are being pushed now
        self._left_over: set[int] = set()  # those of them that an ended plan began
        self._waiting: list[tuple[Inos, NDArray[np.uint8]]] = []  # for those, to be staged again
        self._idle = trio.lowlevel.ParkingLot()  # waits for those
        self._stageable = trio.lowlevel.ParkingLot()  # each for one kind of work
        self._sortable = trio.lowlevel.ParkingLot()
        self._pushable = trio.lowlevel.ParkingLot()
        self._large_work = trio.lowlevel.ParkingLot()
        self._origin_work = trio.lowlevel.ParkingLot()

    # ---- figures ---------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        return self._depth.depth

    @property
    def queued_stage(self) -> int:
        left = sum(len(inos) for inos, _ in self._left + self._waiting)
        return self._restoring.count + self._staging.count + left + len(self._to_stage)

    @property
    def queued_fetch(self) -> int:
        return self._fetching.count + len(self._to_fetch)

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    # ---- commands: each has taken effect when it returns -----------------------------------------

    def begin(self, report: Report) -> None:
        """A plan begins, empty. `report` must not wait."""
        self.end()
        _native.plan_begin()
        self._report = report

    def end(self) -> None:
        """Forget the plan. What is in flight is finished."""
        self._plan += 1
        self._report = None
        self._left_over |= self._busy
        self._fetcher.pins.clear()
        _native.plan_end()
        self._staging.clear()
        self._restoring.clear()
        self.window.clear()
        self._left.clear()
        self._waiting.clear()
        self._fetching.clear()
        self._to_stage.clear()
        self._came.clear()
        self._order.clear()
        self._to_fetch.clear()
        self._large.clear()
        for job in self._jobs.values():
            self._land(job)
        self._jobs.clear()
        self._pushes.clear()
        self._push_bytes = 0

    def clear(self) -> None:
        if self._report is not None:
            self.begin(self._report)

    def stage(self, inos: Inos, store: NDArray[np.uint8]) -> None:
        """`store`: STORE, MOVE, KEEP_ORDER, SORT of each.

        ValueError: more than QUEUED_MOST would wait.
        """
        store = store & np.uint8(STORE | MOVE | KEEP_ORDER | SORT)
        marks = _native.PLAN_WANTED
        if np.any(store & (MOVE | SORT)):
            if not np.any(store & KEEP_ORDER):
                marks |= _native.PLAN_COMING
                order = np.frombuffer(_native.sort_by_location(inos.tobytes()), np.int64)
                inos, store = inos[order], store[order]
            self._chunk_mark = CHUNK_MARKS[self._chunk_mark == CHUNK_MARKS[0]]
            store = store | np.uint8(self._chunk_mark)
        self.window.put(inos)
        self._queue(self._staging, inos, store, marks)
        self._stageable.unpark(count=-(-len(inos) // STAGE_BATCH))

    def fetch(self, inos: Inos) -> None:
        """ValueError: more than QUEUED_MOST would wait."""
        self._queue(self._fetching, inos, np.full(len(inos), STORE, np.uint8), 0)
        self._sortable.unpark()

    def _queue(self, queue: ArrayQueue, inos: Inos, store: NDArray[np.uint8], add: int) -> None:
        if queue.count + len(inos) > QUEUED_MOST:
            queue.forget_cancelled()
            if queue.count + len(inos) > QUEUED_MOST:
                raise ValueError(f"more than {QUEUED_MOST} files are unanswered")
        self._fetcher.pins.plan()
        _native.plan_mark(
            inos.tobytes(),
            _native.PLAN_QUEUED | add,
            _native.PLAN_FAILED | _native.PLAN_READ | _native.PLAN_COMING,
        )
        is_known = (flags_of(inos) & _native.PLAN_QUEUED != 0) & (inos != 0)
        if not is_known.all():
            self._answer_all(inos[~is_known], CHANGED)
            inos, store = inos[is_known], store[is_known]
        queue.put(inos, store)

    def saw_reads(self, inos: Inos) -> None:
        """Readers have missed these just now."""
        self._read_lately.append((trio.current_time(), inos))

    def _were_read(self, inos: Inos) -> NDArray[np.bool_]:
        """Whether a reader has missed them lately: it is for him that they are wanted."""
        since = trio.current_time() - READ_LATELY_S
        while self._read_lately and self._read_lately[0][0] < since:
            self._read_lately.popleft()
        return np.isin(inos, [ino for _, part in self._read_lately for ino in part.tolist()])

    def _restore(self, inos: Inos) -> None:
        """Not stored once more: where the origin has to be asked, it once was not."""
        _native.plan_mark(inos.tobytes(), _native.PLAN_QUEUED, _native.PLAN_READ)
        self._restoring.put(inos, np.zeros(len(inos), np.uint8))
        self._stageable.unpark(count=-(-len(inos) // STAGE_BATCH))

    @property
    def pins(self) -> Pins:
        return self._fetcher.pins

    async def pin(self, inos: Inos, number: int, others: bool, last: bool) -> None:
        """The next part of a list of what is to stay on SSD (docs/WIRE.md, *Pins*)."""
        async with self._fetcher.publishing:
            unknown = await trio.to_thread.run_sync(self.pins.put, inos, number, others, last)
        if len(unknown):
            await trio.to_thread.run_sync(self._locate_all, unknown.tolist())

    def _locate_all(self, inos: list[int]) -> None:
        """Blocking."""
        for ino in inos:
            with contextlib.suppress(KeyError):
                version = namespace.version(ino)
                for block in range(namespace.block_count(version.size)):
                    self._fetcher.locate(ino, version, block)

    def cancel(self, inos: Inos) -> None:
        _native.plan_mark(inos.tobytes(), 0, _native.PLAN_QUEUED | _native.PLAN_WANTED)

    async def published(self) -> None:
        """Waits until what was fetched so far is on SSD, or in the log."""
        await self._fetcher.published()

    async def drop(self, inos: Inos) -> None:
        self.cancel(inos)
        self._read_lately = deque(
            (at, part[~np.isin(part, inos)]) for at, part in self._read_lately
        )
        _native.plan_mark(inos.tobytes(), 0, _native.PLAN_FAILED)
        while self._busy and not self._busy.isdisjoint(inos.tolist()):
            await self._idle.park()
        for start in range(0, len(inos), DROP_BATCH):
            await trio.to_thread.run_sync(
                _native.drop,
                self._mountpoint,
                inos[start : start + DROP_BATCH].tobytes(),
                self._kernel.fuse_fd,
                limiter=self._droppers,
                abandon_on_cancel=True,
            )

    async def arm(self, inos: Inos) -> None:
        """Waits for look-ups that are going on in the same directories."""
        await trio.to_thread.run_sync(
            _native.arm,
            self._kernel.fuse_fd,
            inos.tobytes(),
            limiter=self._droppers,
            abandon_on_cancel=True,
        )

    # ---- tasks -----------------------------------------------------------------------------------

    async def run_forever(self) -> None:
        self._bucket = TokenBucket(self._bucket_bytes_per_s, trio.current_time())
        threads = self._depth_most + FLYING_MOST + LOST_MOST  # at most FETCH_THREADS_MOST
        _native.fetch_start(threads, direct=self._origin.reads_direct)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for _ in range(PUSH_THREADS):
                nursery.start_soon(self._stage_forever)
            for _ in range(PUSH_THREADS - 1):
                nursery.start_soon(self._push_forever)
            for _ in range(LARGE_AT_ONCE):
                nursery.start_soon(self._large_forever)
            nursery.start_soon(self._sort_forever)
            nursery.start_soon(self._land_forever)
            nursery.start_soon(self.misses.run_forever)
            nursery.start_soon(self._poll_forever)
            nursery.start_soon(self.window.watch_forever)

    async def _stage_forever(self) -> None:
        while True:
            if self._left and (self._number >= self._left_until or not self._staging.count):
                self._take_back()
            if not self._to_be_staged.count or len(self._to_stage) >= SORTED_MOST:
                await self._stageable.park()
                continue
            plan = self._plan
            inos, store = self._next_to_stage()
            if not len(inos):
                await trio.sleep(0)
                continue
            number, self._number = self._number, self._number + len(inos)
            names = inos.tolist()
            self._busy.update(names)
            try:
                results = await trio.to_thread.run_sync(
                    self._stage_now, inos, store, limiter=self._threads
                )
            finally:
                self._end_pushes(names)
            if plan == self._plan:
                chunk = int(store[0]) & sum(CHUNK_MARKS)
                share = LEFT_SHARE_OF_CHUNK if chunk else LEFT_SHARE
                if np.count_nonzero(results == _native.PUSH_READ) > share * len(inos):
                    self._leave_to_readers(chunk)
                self._staged(inos, results, store, number)

    def _end_pushes(self, inos: list[int]) -> None:
        """No pages of theirs are being pushed any more."""
        self._busy.difference_update(inos)
        self._left_over.difference_update(inos)
        if self._idle:
            self._idle.unpark_all()
        if self._waiting:
            for part in reversed(self._waiting):
                self._staging.put_first(*part)
            self._waiting.clear()
            self._stageable.unpark_all()

    def _leave_to_readers(self, chunk: int) -> None:
        """Readers have caught up. Go on at a distance, or both would read the same files; the ones
        between are looked at again later. With the mark of a chunk: all that is left of it.
        """
        if self._left or self._staging.count < 2 * LEFT_FILES:
            return
        count = 0
        while self._staging.count and (
            self._staging.first_flags & chunk if chunk else count < LEFT_FILES
        ):
            self._left.append(self._staging.take(LEFT_FILES if chunk else LEFT_FILES - count))
            _native.plan_mark(self._left[-1][0].tobytes(), 0, _native.PLAN_COMING)
            count += len(self._left[-1][0])
        self._left_until = self._number + count

    def _take_back(self) -> None:
        for inos, store in reversed(self._left):
            self._staging.put_first(inos, store)
        self._left.clear()
        self._stageable.unpark_all()

    @property
    def _to_be_staged(self) -> ArrayQueue:
        return self._restoring if self._restoring.count else self._staging

    def _next_to_stage(self) -> tuple[Inos, NDArray[np.uint8]]:
        """The next batch of those that were not cancelled and are not under way."""
        queue = self._to_be_staged
        flags = queue.first_flags
        if flags & (MOVE | SORT) and not flags & KEEP_ORDER:
            inos, store = queue.take(MOVE_BATCH)
            count = _native.count_within(inos.tobytes(), MOVE_BATCH_BYTES)
            queue.put_first(inos[count:], store[count:])
            inos, store = inos[:count], store[:count]
        else:
            inos, store = queue.take(STAGE_BATCH)
        is_live = flags_of(inos) & _native.PLAN_QUEUED != 0
        if not is_live.all():
            inos, store = inos[is_live], store[is_live]
        names = inos.tolist()
        if not self._left_over.isdisjoint(names):
            waits = np.array([ino in self._left_over for ino in names])
            self._waiting.append((inos[waits], store[waits]))
            inos, store = inos[~waits], store[~waits]
            names = inos.tolist()
        unique = set(names)
        under_way = (self._busy, self._to_stage.keys(), self._jobs.keys())
        if len(unique) == len(names) and all(some.isdisjoint(unique) for some in under_way):
            return inos, store
        is_new = []
        for ino in names:
            is_new.append(ino in unique and not any(ino in some for some in under_way))
            unique.discard(ino)
            if ino in self._jobs:
                self._join(self._jobs[ino])
        chosen = np.array(is_new)
        return inos[chosen], store[chosen]

    def _stage_now(self, inos: Inos, store: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Blocking. Those whose location is not known are looked for in the index once."""
        fuse_fd, mountpoint = self._kernel.fuse_fd, self._mountpoint
        moves = store & MOVE
        if moves.any():
            self._packer.make_credit(MOVE_BATCH_BYTES)
        results = np.frombuffer(
            _native.stage(fuse_fd, mountpoint, inos.tobytes(), moves.tobytes()), np.uint8
        ).copy()
        missing = np.flatnonzero(results == _native.PUSH_NO_BYTES).tolist()
        found = []
        for index, ino in zip(missing, inos[missing].tolist(), strict=True):
            waiting = _in_log(ino)
            if waiting is not None:
                (results[index],) = _native.push_files(fuse_fd, mountpoint, [(ino, *waiting)])
                if results[index] == _native.PUSHED:
                    self._stats.add("bytes_pushed", waiting[0].size)
            elif self._is_located(ino):
                found.append(index)
        if found:
            again = _native.stage(
                fuse_fd, mountpoint, inos[found].tobytes(), moves[found].tobytes()
            )
            results[found] = np.frombuffer(again, np.uint8)
        unkept = np.flatnonzero((results == _native.PUSH_NO_BYTES) & (store & STORE == 0))
        if len(unkept):
            results[unkept[self._are_there(inos[unkept])]] = _native.PUSH_READ
        return results

    def _are_there(self, inos: Inos) -> NDArray[np.bool_]:
        """Whether the kernel has their pages, from a reader: they need not be fetched. Blocking."""
        answers = _native.ask_pages(self._kernel.fuse_fd, inos.tobytes(), ASK_MS)
        are_there: NDArray[np.bool_] = np.frombuffer(answers, np.uint8) == _native.PAGES_THERE
        return are_there

    def _is_stored(self, ino: int) -> bool:
        """Whether the file's one block is on SSD, or on its way there in the log. Blocking."""
        return _in_log(ino, 0) is not None or self._is_located(ino)

    def _is_located(self, ino: int) -> bool:
        """Whether the file's one block has a location. Blocking."""
        try:
            version = namespace.version(ino)
            if version.size == 0:
                return True
            is_known = _native.get_location(ino, 0) is not None
            if not is_known and _native.parent(ino) in self.preloaded:
                return False  # the index was asked for the whole directory
            return self._fetcher.locate(ino, version, 0)
        except KeyError:
            return False

    def _staged(
        self,
        inos: Inos,
        results: NDArray[np.uint8],
        store: NDArray[np.uint8],
        number: int,
    ) -> None:
        """`number`: of the first of them, in the order in which they are to be staged."""
        missing = np.flatnonzero((results == _native.PUSH_NO_BYTES) & (store & STORE == 0))
        if len(missing):
            results[missing[self._were_read(inos[missing])]] = _native.PUSH_READ
        is_pushed = (results == _native.PUSHED) | (results == _native.PUSH_READ)
        is_refused = (results == _native.PUSH_CHANGED) | (results == _native.PUSH_REFUSED)
        is_done = is_pushed | is_refused
        pushed = inos if is_pushed.all() else inos[is_pushed]
        _native.plan_mark(pushed.tobytes(), 0, _native.PLAN_QUEUED)
        is_read = results == _native.PUSH_READ  # from wherever
        self._answer_all(inos[is_pushed & ~is_read], STAGED_AND_STORED)
        _native.plan_mark(inos[is_read].tobytes(), _native.PLAN_STAGED, 0)
        self._answer_all(inos[is_read], STAGED)
        for ino in inos[is_refused].tolist():
            _mark(ino, 0, _native.PLAN_QUEUED)
            self._answer(ino, _refusal(ino))
        if self._came:
            self._came.difference_update(inos[is_done].tolist())
        if is_done.all():
            return
        for index in np.flatnonzero(~is_done).tolist():
            ino, keep = int(inos[index]), bool(store[index] & STORE)
            if results[index] == _native.PUSH_LARGE:
                self._large.append((ino, keep, self._plan))
                self._large_work.unpark()
            else:
                self._to_stage[ino] = self._to_fetch.pop(ino, keep)
                heapq.heappush(self._order, (number + index, ino))
        self._origin_work.unpark()
        self._feed()

    async def _sort_forever(self) -> None:
        """Of those to be fetched, which are not on SSD yet?"""
        while True:
            if not self._fetching.count or len(self._to_fetch) >= SORTED_MOST:
                await self._sortable.park()
                continue
            plan, (inos, _) = self._plan, self._fetching.take(SORT_BATCH)
            unsorted = self._only_fetched(inos)
            if not unsorted:
                await trio.sleep(0)
                continue
            is_stored = await trio.to_thread.run_sync(
                self._sort_now, unsorted, limiter=self._sorters, abandon_on_cancel=True
            )
            if plan != self._plan:
                continue
            stored = {ino for ino, yes in zip(unsorted, is_stored, strict=True) if yes}
            left = self._only_fetched(np.array(unsorted, np.uint32))
            self._answer_stored([ino for ino in left if ino in stored])
            for ino in (ino for ino in left if ino not in stored):
                if namespace.version(ino).size > BLOCK_BYTES:
                    self._large.append((ino, True, self._plan))
                    self._large_work.unpark()
                else:
                    self._to_fetch[ino] = True
            self._origin_work.unpark()
            self._feed()

    def _only_fetched(self, inos: Inos) -> list[int]:
        """Those of these that wait for nothing but to be fetched. What is to be staged as well is
        answered when it is staged: in its turn, or after all others.
        """
        flags = flags_of(inos)
        is_staged = flags & _native.PLAN_STAGED != 0
        is_to_be_staged = (flags & _native.PLAN_WANTED != 0) & ~is_staged
        is_queued = flags & _native.PLAN_QUEUED != 0
        left, wanted = [], inos[is_queued & is_to_be_staged]
        for ino in dict.fromkeys(inos[is_queued & ~is_to_be_staged].tolist()):
            if ino in self._jobs:
                self._jobs[ino].store = True
                _mark(ino, 0, _native.PLAN_QUEUED)
            elif ino in self._to_stage:
                self._to_stage[ino] = True
            elif not self._is_being_staged(ino):
                left.append(ino)
        self._staging.put(wanted, np.full(len(wanted), STORE, np.uint8))
        self._stageable.unpark(count=-(-len(wanted) // STAGE_BATCH))
        return left

    def _is_being_staged(self, ino: int) -> bool:
        return ino in self._busy and ino not in self._left_over

    def _answer_stored(self, inos: list[int]) -> None:
        packed = np.array(inos, np.uint32)
        _native.plan_mark(packed.tobytes(), 0, _native.PLAN_QUEUED)
        self._answer_all(packed, STORED)

    def _sort_now(self, inos: list[int]) -> list[bool]:
        return [namespace.version(ino).size <= BLOCK_BYTES and self._is_stored(ino) for ino in inos]

    async def _poll_forever(self) -> None:
        while True:
            if not (self._to_stage or self._to_fetch or self._flying):
                await self._origin_work.park()
                continue
            await trio.sleep(POLL_S)
            self._give_up_on_hung()
            self._feed()

    # ---- the fetch pool --------------------------------------------------------------------------

    def _feed(self) -> None:
        """Begin as many fetches as may be begun now."""
        if not self._may_begin():
            return
        came: list[tuple[int, int]] = []  # to be staged, with whether to store it
        stored: list[int] = []
        while (
            (self._to_stage or self._to_fetch)
            and len(self._flying) < self._depth.depth
            and self._flying_bytes + self._push_bytes < FLYING_BYTES_MOST
            and len(came) + len(stored) < CAME_MOST
            and self._bucket.wait_s(trio.current_time()) == 0
        ):
            is_to_be_staged = bool(self._to_stage)
            if is_to_be_staged:
                ino = heapq.heappop(self._order)[1]
                store = self._to_stage.pop(ino)
            else:
                ino, store = self._to_fetch.popitem(last=False)
            flags = _flags(ino)
            if not flags & _native.PLAN_QUEUED:
                continue
            if not is_to_be_staged and self._is_being_staged(ino):
                continue  # it comes back from there if it has to be fetched
            if ino not in self._came and self._has_come(ino):  # once: perhaps it cannot be read
                if is_to_be_staged:
                    came.append((ino, STORE if store else 0))
                else:
                    stored.append(ino)
                continue
            self._came.discard(ino)
            was_read = flags & _native.PLAN_READ and flags & _native.PLAN_WANTED
            if was_read and self._fetcher.flight_of(ino) is None:  # a reader has brought its pages
                _mark(ino, _native.PLAN_STAGED, _native.PLAN_QUEUED)
                self._answer(ino, STAGED)
            else:
                self._fetch(ino, store)
        if came:
            inos, wishes = (np.array(column) for column in zip(*came, strict=True))
            self._came.update(inos.tolist())
            self._staging.put_first(inos.astype(np.uint32), wishes.astype(np.uint8))
            self._stageable.unpark()
        if stored:
            self._answer_stored(self._only_fetched(np.array(stored, np.uint32)))
        if self._to_be_staged.count and len(self._to_stage) < SORTED_MOST // 2:
            self._stageable.unpark_all()
        if self._fetching.count and len(self._to_fetch) < SORTED_MOST // 2:
            self._sortable.unpark()

    def _has_come(self, ino: int) -> bool:
        """To SSD, or to the log, since it was looked for there: a reader was faster, say."""
        return namespace.is_located(ino) or (self._packer.has_logs and _in_log(ino, 0) is not None)

    def _may_begin(self) -> bool:
        """Is the origin there, and does nobody else wait for it or for the publisher?"""
        return (
            len(self._lost) < LOST_MOST
            and trio.current_time() >= self._pause_until
            and self._fetcher.has_room()
            and self._fetcher.is_origin_ready()
        )

    def _fetch(self, ino: int, store: bool, attempts: int = 1) -> None:
        _mark(ino, _native.PLAN_FLYING, _native.PLAN_QUEUED)
        version = namespace.version(ino)
        job = Job(ino, store, self._plan, version, attempts=attempts)
        self._jobs[ino] = job
        flight = self._fetcher.flight_of(ino)
        if flight is not None:  # a reader was faster, or an earlier plan
            flight.on_landed = partial(self._others_landed, job, flight)
            return
        job.flight = self._fetcher.begin(ino)
        job.flight.on_landed = partial(self._landed, job, job.flight)
        job.begun_s = trio.current_time()
        tag = next(self._tags)
        try:
            _native.fetch_submit(ino, version, tag)
        except (OSError, ValueError) as error:  # no thread to be had, or it has grown
            self._fetcher.fail(ino, job.flight, OriginChanged())
            log.info("cannot fetch ahead: %s", error)
            self._end(job, NOT_PUSHED)
            return
        self._flying[tag] = job
        self._flying_bytes += version.size
        self._bucket.take(version.size)

    def _others_landed(self, job: Job, flight: Flight) -> None:
        """A fetch of somebody else's that we waited for."""
        if job.plan != self._plan:
            return
        if _flags(job.ino) & _native.PLAN_WANTED and self._has(job, flight):
            job.flight = flight
            job.stored = STORED if flight.stored or flight.was_stored else None
            self._join(job)
        elif _flags(job.ino) & _native.PLAN_WANTED:
            del self._jobs[job.ino]
            _mark(job.ino, _native.PLAN_QUEUED, _native.PLAN_FLYING)
            self._staging.put_first(np.array([job.ino], np.uint32), np.array([job.store], np.uint8))
            self._stageable.unpark()
        elif flight.stored:
            self._end(job, STORED)
        elif isinstance(flight.error, OriginChanged):  # or cannot be read: our own fetch says why
            del self._jobs[job.ino]
            _mark(job.ino, _native.PLAN_QUEUED, _native.PLAN_FLYING)
            self._to_fetch[job.ino] = True
            self._origin_work.unpark()
        elif flight.error is not None:
            self._end(job, ORIGIN_ERROR)
        else:
            self._end(job, NO_ROOM if flight.is_settled else NOT_PUSHED)

    def _has(self, job: Job, flight: Flight) -> bool:
        """Whether a landed flight brought the file as it is now, to be pushed."""
        return (
            flight.data is not None
            and flight.is_settled
            and flight.version == job.version == namespace.version(job.ino)
        )

    async def _land_forever(self) -> None:
        fetch_fd = _native.fetch_fd()
        while True:
            await trio.lowlevel.wait_readable(fetch_fd)
            now = trio.current_time()
            is_full = len(self._flying) >= self._depth.depth  # ... until these came
            fetch_s = 0.0
            for tag, _, data, number, begun_ns, ended_ns in _native.fetch_take(TAKE_MOST):
                fetch_s = (ended_ns - begun_ns) / 1e9
                if tag < 0:
                    self.misses.landed(tag, data if number == 0 else None, begun_ns)
                    continue
                job = self._flying.pop(tag, None)
                if job is None:
                    self._lost.discard(tag)
                    continue
                self._flying_bytes -= job.version.size
                if number == 0 and data is not None:
                    self._depth.completed(now, len(data), is_full)
                    self._arrived(job, data, begun_ns)
                else:
                    self._failed(job, number or errno.EIO, now)
            self._feed()
            if fetch_s >= LONG_FETCH_S:  # a visit has its price, be it for one file or for ten
                await trio.sleep(LAND_EVERY_S)

    def _arrived(self, job: Job, data: bytes, begun_ns: int) -> None:
        assert job.flight is not None
        self._pause_s = 0.0
        self._stats.add("prefetched_files")
        self._stats.add("prefetched_bytes", len(data))
        is_settled = self._fetcher.finish(
            job.ino, job.flight, job.version, data, begun_ns, job.store
        )
        if job.plan != self._plan:
            self._land(job)
            return
        if not is_settled:
            self._end(job, _refusal(job.ino))
            return
        job.stored = WAITING if job.flight.is_queued else None
        if _flags(job.ino) & _native.PLAN_WANTED:
            self._join(job)
        else:
            self._end_if_done(job)

    def _join(self, job: Job) -> None:
        """The file of the job is to be staged, too. While its bytes are not here this comes again,
        for then it is WANTED.
        """
        _mark(job.ino, 0, _native.PLAN_QUEUED)
        if job.push is None and job.flight is not None and job.flight.data is not None:
            job.push = WAITING
            self._pushes.append((job, job.flight.data))
            self._push_bytes += len(job.flight.data)
            if len(self._pushes) % BATCH == 1:
                self._pushable.unpark()

    def _landed(self, job: Job, flight: Flight) -> None:
        """Our flight is published, or never will be."""
        if job.stored == WAITING and job.plan == self._plan:
            job.stored = STORED if flight.stored else NO_ROOM
            self._end_if_done(job)

    def _failed(self, job: Job, number: int, now: float) -> None:
        assert job.flight is not None
        if number in (errno.ESTALE, errno.ENOENT):
            self._fetcher.fail(job.ino, job.flight, OriginChanged())
            self._nursery.start_soon(self._look_again, job)
            return
        error = self._origin.failed(number, os.strerror(number))
        self._fetcher.fail(job.ino, job.flight, error)
        self._hold_back(job, now, is_away=number in AWAY_ERRNOS)

    def _hold_back(self, job: Job, now: float, is_away: bool) -> None:
        self._depth.failed(now, job.begun_s)
        if is_away and now >= self._pause_until:
            self._pause_s = min(PAUSE_S_MOST, max(PAUSE_S_FIRST, 2 * self._pause_s))
            self._pause_until = now + self._pause_s
        if job.plan == self._plan:
            _mark(job.ino, _native.PLAN_FAILED, 0)
            self._end(job, ORIGIN_ERROR)

    async def _look_again(self, job: Job) -> None:
        """The file was another one than the table says."""
        result = 0
        try:
            await self._fetcher.refresh(job.ino)
        except OriginChanged:
            result = CHANGED
        except OriginError:
            result = ORIGIN_ERROR
        if job.plan != self._plan:
            return
        size = namespace.version(job.ino).size
        if not result and job.attempts < ATTEMPTS_MOST and 0 < size <= BLOCK_BYTES:
            self._origin_work.unpark()
            self._fetch(job.ino, job.store, job.attempts + 1)
        else:
            self._end(job, result or NOT_PUSHED)

    def _give_up_on_hung(self) -> None:
        now = trio.current_time()
        while self._flying:
            tag, job = next(iter(self._flying.items()))
            if now - job.begun_s < self._origin.timeout_s:
                return
            assert job.flight is not None
            del self._flying[tag]
            self._lost.add(tag)
            self._flying_bytes -= job.version.size
            self._origin.failed(errno.EIO, f"no answer within {self._origin.timeout_s:g} s")
            self._fetcher.fail(job.ino, job.flight, OriginTimeout(self._origin.timeout_s))
            self._hold_back(job, now, is_away=True)

    # ---- from memory to the kernel ---------------------------------------------------------------

    async def _push_forever(self) -> None:
        while True:
            if not self._pushes:
                await self._pushable.park()
                continue
            plan, batch = self._plan, self._next_pushes()
            if self._pushes:  # a push may wait for a reader's page
                self._pushable.unpark()
            wanted = [item for item in batch if _flags(item[0].ino) & _native.PLAN_WANTED]
            results = b""
            if wanted:
                files: list[File] = [(job.ino, job.version, data) for job, data in wanted]
                inos = [job.ino for job, _ in wanted]
                self._busy.update(inos)
                try:
                    results = await trio.to_thread.run_sync(
                        _native.push_files,
                        self._kernel.fuse_fd,
                        self._mountpoint,
                        files,
                        limiter=self._threads,
                    )
                finally:
                    self._end_pushes(inos)
            if plan != self._plan:
                continue
            self._push_bytes -= sum(len(data) for _, data in batch)
            for job, _ in batch:
                job.push = _native.PUSH_REFUSED
            for (job, data), result in zip(wanted, results, strict=True):
                job.push = result
                if result == _native.PUSHED:
                    self._stats.add("bytes_pushed", len(data))
            for job, _ in batch:
                self._end_if_done(job)
            self._feed()

    def _next_pushes(self) -> list[tuple[Job, memoryview]]:
        batch: list[tuple[Job, memoryview]] = []
        size_bytes = 0
        while self._pushes and len(batch) < BATCH and size_bytes < BATCH_BYTES:
            batch.append(self._pushes.popleft())
            size_bytes += len(batch[-1][1])
        return batch

    # ---- files of several blocks -----------------------------------------------------------------

    async def _large_forever(self) -> None:
        while True:
            if not self._large:
                await self._large_work.park()
                continue
            ino, store, plan = self._large.popleft()
            flags = _flags(ino)
            if not flags & _native.PLAN_QUEUED:
                continue
            _mark(ino, _native.PLAN_FLYING, _native.PLAN_QUEUED)
            is_staged = bool(flags & _native.PLAN_WANTED)
            try:
                result = await self._do_large(ino, store, is_staged, plan)
            except OriginChanged:
                result = CHANGED
            except OriginError:
                result = ORIGIN_ERROR
            if plan == self._plan:
                failed = _native.PLAN_FAILED if result == ORIGIN_ERROR else 0
                staged = _native.PLAN_STAGED if result in (STAGED, STAGED_AND_STORED) else 0
                _mark(ino, failed | staged, _native.PLAN_FLYING | _native.PLAN_QUEUED)
                self._answer(ino, result)

    async def _do_large(self, ino: int, store: bool, is_staged: bool, plan: int) -> int:
        version = namespace.version(ino)
        is_stored, is_fetched = True, False
        for block in range(namespace.block_count(version.size)):
            if not await self._reader.is_cached(ino, block):
                await self._wait_for_origin(namespace.block_span(version.size, block)[1], plan)
                if plan != self._plan:
                    return NOT_PUSHED
                is_fetched = True
                is_stored = (
                    is_stored
                    and store
                    and await trio.to_thread.run_sync(self._packer.has_spare, BLOCK_BYTES)
                    and await self._reader.ensure_cached(ino, block) is not None
                )
            if not is_staged:
                if not is_stored:
                    return NO_ROOM
                continue
            if not await self._push_block(ino, version, block, plan):
                return NOT_PUSHED
        self._stats.add("prefetched_files", int(is_fetched))
        if not is_staged:
            return STORED
        if is_stored:
            return STAGED_AND_STORED
        return NO_ROOM if store else STAGED

    async def _wait_for_origin(self, size_bytes: int, plan: int) -> None:
        while plan == self._plan and not (
            self._fetcher.is_origin_ready() and self._bucket.wait_s(trio.current_time()) == 0
        ):
            await trio.sleep(POLL_S)
        self._bucket.take(size_bytes)
        self._stats.add("prefetched_bytes", size_bytes)

    async def _push_block(self, ino: int, version: Version, block: int, plan: int) -> bool:
        """From SSD if it is there, else from the origin. False: not wanted any more, or refused."""
        data: memoryview | None = None
        if not await self._reader.is_cached(ino, block):
            got, data = await self._fetcher.range(ino, *namespace.block_span(version.size, block))
            if got != version:
                raise OriginChanged
        if plan != self._plan or not _flags(ino) & _native.PLAN_WANTED:
            return False
        self._busy.add(ino)
        try:
            pushed = await self._push(ino, version, block, data)
            if pushed <= 0:  # perhaps the kernel has never heard of it
                path = os.path.join(self._mountpoint, _native.path(ino))
                fd = await trio.to_thread.run_sync(
                    os.open, path, os.O_PATH | os.O_NOFOLLOW, abandon_on_cancel=True
                )
                try:  # while it is held, the kernel cannot forget it again
                    pushed = await self._push(ino, version, block, data)
                finally:
                    os.close(fd)
        except OSError:
            pushed = 0
        finally:
            self._end_pushes([ino])
        self._stats.add("bytes_pushed", max(0, pushed))
        return pushed > 0

    async def _push(self, ino: int, version: Version, block: int, data: memoryview | None) -> int:
        if data is None:
            return await self._kernel.push_cached(ino, block, 0)
        return await self._kernel.push(ino, version, block * BLOCK_BYTES, data)

    # ---- answers ---------------------------------------------------------------------------------

    def _end_if_done(self, job: Job) -> None:
        if job.push == WAITING or job.stored == WAITING:
            return
        if job.push is None:
            result = job.stored or NOT_PUSHED  # neither: it was dropped while it was on its way
        elif job.push in (_native.PUSHED, _native.PUSH_READ):
            result = {STORED: STAGED_AND_STORED, None: STAGED}.get(job.stored, NO_ROOM)
        else:
            result = _refusal(job.ino)
        self._end(job, result)

    def _land(self, job: Job) -> None:
        """Until its file is pushed, a reader's miss joins the flight that has brought it."""
        if job.flight is not None:
            self._fetcher.land(job.ino, job.flight)

    def _end(self, job: Job, result: int) -> None:
        self._land(job)
        if self._jobs.get(job.ino) is job:
            del self._jobs[job.ino]
        _mark(job.ino, 0, _native.PLAN_FLYING)
        self._answer(job.ino, result)

    def _answer(self, ino: int, result: int) -> None:
        if self._report is not None:
            self._report(ino.to_bytes(4, "little"), bytes((result,)))

    def _answer_all(self, inos: Inos, result: int) -> None:
        if self._report is not None and len(inos):
            self._report(inos.tobytes(), bytes((result,)) * len(inos))
