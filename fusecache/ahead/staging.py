"""From SSD to the kernel, in batches; what is not on SSD waits for the origin from here on."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np
import trio
from numpy.typing import NDArray

from fusecache import _native
from fusecache.ahead.fetching import SORTED_MOST, Fetching
from fusecache.ahead.large import LargeFiles
from fusecache.ahead.marks import Answers, Inos, Wishes, mark, refusal
from fusecache.ahead.pages import PUSH_THREADS, Pages
from fusecache.ahead.queues import MOVE_BATCH_BYTES, StageQueue
from fusecache.ahead.stored import Stored, in_log
from fusecache.base.wire import Result, Standing, Wish
from fusecache.reorder.packer import Packer

READ_LATELY_S = 0.1  # a hintsd that has not heard of a READ may want the file staged for it


class ReadLately:
    """What readers have missed a moment ago: it is for them that it is wanted."""

    def __init__(self) -> None:
        self._parts: deque[tuple[float, set[int]]] = deque()

    def put(self, inos: Inos) -> None:
        self._forget_old()
        if len(inos):
            self._parts.append((trio.current_time(), set(inos.tolist())))

    def forget(self, inos: Inos) -> None:
        self._forget_old()
        for _, part in self._parts:
            part.difference_update(inos.tolist())

    def has(self, inos: Inos) -> NDArray[np.bool_]:
        """Of each."""
        self._forget_old()
        parts = [part for _, part in self._parts]
        return np.array([any(ino in part for part in parts) for ino in inos.tolist()], np.bool_)

    def _forget_old(self) -> None:
        since = trio.current_time() - READ_LATELY_S
        while self._parts and self._parts[0][0] < since:
            self._parts.popleft()


class Staging:
    """Of the one plan there is."""

    def __init__(
        self,
        queue: StageQueue,
        pages: Pages,
        stored: Stored,
        fetching: Fetching,
        large: LargeFiles,
        packer: Packer,
        answers: Answers,
    ) -> None:
        self._queue = queue
        self._pages = pages
        self._stored = stored
        self._fetching = fetching
        self._large = large
        self._packer = packer
        self._answers = answers
        self.read_lately = ReadLately()
        self._running, self._began_s = 0, 0.0
        self._busy_s = 0.0

    def busy_s(self) -> float:
        """Seconds in which something was being staged, so far."""
        return self._busy_s + (trio.current_time() - self._began_s if self._running else 0.0)

    @contextlib.contextmanager
    def _is_running(self) -> Iterator[None]:
        if not self._running:
            self._began_s = trio.current_time()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._busy_s += trio.current_time() - self._began_s

    async def run_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(PUSH_THREADS):
                nursery.start_soon(self._stage_forever)

    async def _stage_forever(self) -> None:
        line = self._fetching.line
        while True:
            self._queue.look_at_left()
            if not self._queue.has_some or line.count_to_stage >= SORTED_MOST:
                await self._queue.work.park()
                continue
            plan = self._answers.plan
            inos, wishes = self._next()
            if not len(inos):
                await trio.sleep(0)
                continue
            number = self._queue.number(len(inos))
            with self._is_running():
                results = await self._pages.push(inos.tolist(), partial(self._stage, inos, wishes))
            if plan == self._answers.plan:
                overtaken = int(np.count_nonzero(results == _native.PUSH_READ))
                self._queue.saw_reads(overtaken, wishes)
                self._staged(inos, results, wishes, number)

    def _next(self) -> tuple[Inos, Wishes]:
        """The next batch of those that are not under way."""
        inos, wishes = self._queue.take()
        names = inos.tolist()
        left_over = self._pages.left_over(set(names))
        if left_over:
            waits = np.array([ino in left_over for ino in names])
            self._queue.postpone(inos[waits], wishes[waits])
            inos, wishes = inos[~waits], wishes[~waits]
            names = inos.tolist()
        unique = set(names)
        prefetches = self._fetching.prefetches
        under_way = (self._pages, self._fetching.line, self._fetching.claims, prefetches)
        if len(unique) == len(names) and not any(some.has_any(unique) for some in under_way):
            return inos, wishes
        is_new = []
        for ino in names:
            is_new.append(ino in unique and not any(ino in some for some in under_way))
            unique.discard(ino)
            if ino in prefetches:
                prefetches.stage(ino)
        chosen = np.array(is_new)
        return inos[chosen], wishes[chosen]

    # ---- in a thread -----------------------------------------------------------------------------

    def _stage(self, inos: Inos, wishes: Wishes) -> NDArray[np.uint8]:
        """Those whose location is not known are looked for in the index once."""
        moves = wishes & np.uint8(Wish.MOVE)
        if moves.any():
            self._packer.make_credit(MOVE_BATCH_BYTES)
        results = self._pages.stage(inos, moves).copy()
        missing = np.flatnonzero(results == _native.PUSH_NO_BYTES).tolist()
        self._stored.look_in_service(inos[missing].tolist())
        found = []
        for index, ino in zip(missing, inos[missing].tolist(), strict=True):
            waiting = in_log(ino)
            if waiting is not None:
                (results[index],) = self._pages.push_files([(ino, *waiting)])
            elif self._stored.is_located(ino):
                found.append(index)
        if found:
            results[found] = self._pages.stage(inos[found], moves[found])
        unkept = np.flatnonzero((results == _native.PUSH_NO_BYTES) & (wishes & Wish.STORE == 0))
        if len(unkept):
            results[unkept[self._pages.are_there(inos[unkept])]] = _native.PUSH_READ
        return results

    # ---- what has become of them -----------------------------------------------------------------

    def _staged(self, inos: Inos, results: NDArray[np.uint8], wishes: Wishes, number: int) -> None:
        """`number`: of the first of them, in the order in which they are to be staged."""
        missing = np.flatnonzero((results == _native.PUSH_NO_BYTES) & (wishes & Wish.STORE == 0))
        if len(missing):
            results[missing[self.read_lately.has(inos[missing])]] = _native.PUSH_READ
        is_pushed = (results == _native.PUSHED) | (results == _native.PUSH_READ)
        is_refused = (results == _native.PUSH_CHANGED) | (results == _native.PUSH_REFUSED)
        is_done = is_pushed | is_refused
        pushed = inos if is_pushed.all() else inos[is_pushed]
        _native.plan_mark(pushed.tobytes(), 0, Standing.QUEUED)
        is_read = results == _native.PUSH_READ  # from wherever
        self._answers.tell_all(inos[is_pushed & ~is_read], Result.STAGED_AND_STORED)
        _native.plan_mark(inos[is_read].tobytes(), Standing.STAGED, 0)
        self._answers.tell_all(inos[is_read], Result.STAGED)
        for ino in inos[is_refused].tolist():
            mark(ino, 0, Standing.QUEUED)
            self._answers.tell(ino, refusal(ino))
        self._fetching.line.forget_came(inos[is_done].tolist())
        if is_done.all():
            return
        for index in np.flatnonzero(~is_done).tolist():
            ino, store = int(inos[index]), bool(wishes[index] & Wish.STORE)
            if results[index] == _native.PUSH_LARGE:
                self._large.put(ino, store)
            else:
                self._fetching.line.stage(ino, store, number + index)
        self._fetching.feed_soon()
