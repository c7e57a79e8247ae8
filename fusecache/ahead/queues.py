"""What is to be staged or fetched and was not looked at yet, in hintsd's order."""

from __future__ import annotations

from collections import deque

import numpy as np
import trio

from fusecache import _native
from fusecache.ahead.marks import Inos, Wishes, flags_of
from fusecache.base.wire import Standing, Wish

CHUNK_MARKS = (64, 128)  # added to wishes, in turn: which frame a file came in

STAGE_BATCH = 64  # files staged in one visit to a thread
MOVE_BATCH, MOVE_BATCH_BYTES = 512, 4 << 20  # in the order in which they lie on SSD
LEFT_FILES = 256  # to readers that have caught up: they have read such a part of a batch
LEFT_SHARE = 0.25
LEFT_SHARE_OF_CHUNK = 0.75  # READs wait for a chunk: few that were in it before get ahead of it
QUEUED_MOST = 1 << 22


class ArrayQueue:
    """A first-in first-out of (inode, wish) pairs, kept as the arrays they came in."""

    def __init__(self) -> None:
        self._parts: deque[tuple[Inos, Wishes]] = deque()
        self.count = 0

    def make_room(self, count: int) -> None:
        """For so many. ValueError: more than QUEUED_MOST would wait."""
        if self.count + count > QUEUED_MOST:
            self.forget_cancelled()
            if self.count + count > QUEUED_MOST:
                raise ValueError(f"more than {QUEUED_MOST} files are unanswered")

    def put(self, inos: Inos, wishes: Wishes) -> None:
        if len(inos):
            self._parts.append((inos, wishes))
            self.count += len(inos)

    @property
    def first_wish(self) -> int:
        """Of the oldest, which there is."""
        return int(self._parts[0][1][0])

    def put_first(self, inos: Inos, wishes: Wishes) -> None:
        if len(inos):
            self._parts.appendleft((inos, wishes))
            self.count += len(inos)

    def take(self, most: int) -> tuple[Inos, Wishes]:
        """The oldest ones, `most` if there are so many."""
        left = min(most, self.count)
        self.count -= left
        taken = [(np.empty(0, np.uint32), np.empty(0, np.uint8))]
        while left:
            inos, wishes = self._parts.popleft()
            if len(inos) > left:
                self._parts.appendleft((inos[left:], wishes[left:]))
                inos, wishes = inos[:left], wishes[:left]
            taken.append((inos, wishes))
            left -= len(inos)
        if len(taken) <= 2:
            return taken[-1]
        return np.concatenate([i for i, _ in taken]), np.concatenate([w for _, w in taken])

    def forget_cancelled(self) -> None:
        parts = list(self._parts)
        self.clear()
        for inos, wishes in parts:
            is_live = flags_of(inos) & Standing.QUEUED != 0
            self.put(inos[is_live], wishes[is_live])

    def clear(self) -> None:
        self._parts.clear()
        self.count = 0


class FetchQueue(ArrayQueue):
    """What is to be fetched; whoever sorts it waits here for some."""

    def __init__(self) -> None:
        super().__init__()
        self.work = trio.lowlevel.ParkingLot()

    def put(self, inos: Inos, wishes: Wishes) -> None:
        super().put(inos, wishes)
        self.work.unpark()


class StageQueue:
    """What is to be staged. What was staged before and let go of by the kernel goes first; what is
    left to readers, and what waits for a push that an ended plan began, comes back in front.
    """

    def __init__(self) -> None:
        self._staging, self._restoring = ArrayQueue(), ArrayQueue()
        self._left: list[tuple[Inos, Wishes]] = []  # to the readers
        self._left_until = 0
        self._postponed: list[tuple[Inos, Wishes]] = []
        self._number = 0  # of files whose turn has come
        self._chunk_mark = CHUNK_MARKS[0]
        self.work = trio.lowlevel.ParkingLot()
        """Those who stage wait here for some."""

    @property
    def _next(self) -> ArrayQueue:
        return self._restoring if self._restoring.count else self._staging

    @property
    def has_some(self) -> bool:
        return self._next.count > 0

    @property
    def count(self) -> int:
        left = sum(len(inos) for inos, _ in self._left + self._postponed)
        return self._restoring.count + self._staging.count + left

    def clear(self) -> None:
        self._staging.clear()
        self._restoring.clear()
        self._left.clear()
        self._postponed.clear()

    def next_chunk_mark(self) -> int:
        self._chunk_mark = CHUNK_MARKS[self._chunk_mark == CHUNK_MARKS[0]]
        return self._chunk_mark

    def make_room(self, count: int) -> None:
        """For so many. ValueError: more than QUEUED_MOST would wait."""
        self._staging.make_room(count)

    def put(self, inos: Inos, wishes: Wishes) -> None:
        self._staging.put(inos, wishes)
        self._wake(len(inos))

    def put_first(self, inos: Inos, wishes: Wishes) -> None:
        self._staging.put_first(inos, wishes)
        self.work.unpark()

    def restore(self, inos: Inos) -> None:
        """Not stored once more: where the origin has to be asked, it once was not."""
        self._restoring.put(inos, np.zeros(len(inos), np.uint8))
        self._wake(len(inos))

    def _wake(self, files: int) -> None:
        self.work.unpark(count=-(-files // STAGE_BATCH))

    def take(self) -> tuple[Inos, Wishes]:
        """The next batch of those that were not cancelled."""
        queue = self._next
        wish = queue.first_wish
        if wish & (Wish.MOVE | Wish.SORT) and not wish & Wish.KEEP_ORDER:
            inos, wishes = queue.take(MOVE_BATCH)
            count = _native.count_within(inos.tobytes(), MOVE_BATCH_BYTES)
            queue.put_first(inos[count:], wishes[count:])
            inos, wishes = inos[:count], wishes[:count]
        else:
            inos, wishes = queue.take(STAGE_BATCH)
        is_live = flags_of(inos) & Standing.QUEUED != 0
        return (inos, wishes) if is_live.all() else (inos[is_live], wishes[is_live])

    def number(self, count: int) -> int:
        """The turn of so many has come: of the first of them."""
        first, self._number = self._number, self._number + count
        return first

    def postpone(self, inos: Inos, wishes: Wishes) -> None:
        """Until some push has ended."""
        self._postponed.append((inos, wishes))

    def take_postponed(self) -> None:
        self._take_back(self._postponed)

    def saw_reads(self, count: int, wishes: Wishes) -> None:
        """Of this batch readers have read so many before they were staged."""
        chunk = int(wishes[0]) & sum(CHUNK_MARKS)
        share = LEFT_SHARE_OF_CHUNK if chunk else LEFT_SHARE
        if count > share * len(wishes):
            self.leave_to_readers(chunk)

    def leave_to_readers(self, chunk: int) -> None:
        """Readers have caught up. Go on at a distance, or both would read the same files; the ones
        between are looked at again later. With the mark of a chunk: all that is left of it.
        """
        if self._left or self._staging.count < 2 * LEFT_FILES:
            return
        count = 0
        while self._staging.count and (
            self._staging.first_wish & chunk if chunk else count < LEFT_FILES
        ):
            self._left.append(self._staging.take(LEFT_FILES if chunk else LEFT_FILES - count))
            _native.plan_mark(self._left[-1][0].tobytes(), 0, Standing.COMING)
            count += len(self._left[-1][0])
        self._left_until = self._number + count

    def look_at_left(self) -> None:
        """Is it time for what was left to readers?"""
        if self._number >= self._left_until or not self._staging.count:
            self.take_left()

    def take_left(self) -> None:
        self._take_back(self._left)

    def _take_back(self, parts: list[tuple[Inos, Wishes]]) -> None:
        if not parts:
            return
        for inos, wishes in reversed(parts):
            self._staging.put_first(inos, wishes)
        parts.clear()
        self.work.unpark_all()
