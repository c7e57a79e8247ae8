"""What is read again, and what is not: which segment may go for a block that was just missed.

The rule is in docs/POLICIES.md ("The mount without hints"). Time is counted in ticks, each a 128th
of the limit in missed bytes, so nothing ages while nothing is missed. Kept are some words for each
segment, and the tick of the last miss for a sample of the blocks, the same by their number each
time: KEYS_MOST at most, whatever the datasets. All of it is in memory: after a restart nothing goes
before it has been learned anew.

A second policy is another class with the methods that the store calls: `missed`, `may_go`,
`has_refused`, `gone` and `take_used`. server/serving.py makes it, and passes it as `reuse`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from fusecache.store.index import SegmentRow

KEYS_MOST: Final = 1 << 15
TICKS_MOST: Final = 4096  # that are told apart; older ones count as one
TICKS: Final = 128  # in the limit
SHARE: Final = 1 / 16  # of the limit, at least
GAPS: Final = 16  # mean gaps between reads of the segment, if there were so many:
READS_LEAST: Final = 8
PASS_SHARE: Final = 1 / 2  # else of what was missed for the first time meanwhile
# In order: one of the last so many misses was so few inodes before.
ORDER_MISSES: Final = 32
ORDER_INODES: Final = 4
_MASK: Final = (1 << 64) - 1


@dataclass(slots=True)
class _Segment:
    """`used`: the tick of the last read or fetch; `missed`, `first`, `loose`: the counters then."""

    fetched_ns: int
    used: int
    missed: int
    first: int
    loose: int
    met: int  # `missed` when it was met
    counted: int = 0  # reads, as the front counts them
    reads: int = 0
    is_unsaid: bool = False  # the use is to be written to the index

    def use(self, tick: int, missed: int, first: int, loose: int) -> None:
        self.used, self.missed, self.first, self.loose = tick, missed, first, loose

    def count(self, counted: int) -> bool:
        """The front has counted so many reads. Whether there were some since."""
        if counted == self.counted:
            return False
        self.reads += counted - self.counted if counted > self.counted else counted
        self.counted = counted
        self.is_unsaid = True
        return True

    def note_fetch(self, fetched_ns: int) -> bool:
        """As its row says. Whether it has changed: fetched into, or used by others."""
        is_new, self.fetched_ns = fetched_ns != self.fetched_ns, fetched_ns
        return is_new

    def take_use(self, now_ns: int) -> bool:
        """Whether the others are to know of a use, now."""
        was_unsaid, self.is_unsaid = self.is_unsaid, False
        if was_unsaid:
            self.fetched_ns = now_ns
        return was_unsaid


class Reuse:
    """`reads`: of each segment that the front has open, how many blocks were read from it. Any
    thread.
    """

    def __init__(self, limit_bytes: int, reads: Callable[[], Mapping[int, int]]) -> None:
        self._lock = threading.Lock()
        self._limit_bytes = limit_bytes
        self._reads = reads
        self._began_ns = time.time_ns()
        self._segments: dict[int, _Segment] = {}
        self._missed_at: dict[int, int] = {}  # of sampled blocks
        self._halvings = 0
        self._near: dict[int, None] = {}  # inodes that were missed last, the oldest first
        self._tick = 0
        self._to_tick = 0  # bytes
        self._again: deque[int] = deque([0], maxlen=TICKS_MOST)  # by the tick of the miss before
        self._missed = 0  # bytes
        self._first = 0  # of these for the first time
        self._loose = 0  # of all, in no order
        self._refused_at = -1

    def missed(self, ino: int, block: int, length: int) -> None:
        """The block came from the origin, or from another host."""
        with self._lock:
            is_in_order = not self._near.keys().isdisjoint(range(ino - ORDER_INODES, ino + 1))
            self._near.pop(ino, None)
            self._near[ino] = None
            if len(self._near) > ORDER_MISSES:
                del self._near[next(iter(self._near))]
            key = ((ino << 24) ^ block) * 0x9E3779B97F4A7C15 & _MASK
            if key <= _MASK >> self._halvings:
                self._count(key, length << self._halvings)
            self._missed += length
            self._loose += 0 if is_in_order else length
            self._to_tick += length
            if self._to_tick * TICKS >= self._limit_bytes:
                self._to_tick = 0
                self._look()
                self._tick += 1
                self._again.append(0)

    def _count(self, key: int, weight: int) -> None:
        before = self._missed_at.get(key)
        self._missed_at[key] = self._tick
        if before is not None:
            age = min(self._tick - before, len(self._again) - 1)
            self._again[len(self._again) - 1 - age] += weight
            return
        self._first += weight
        if len(self._missed_at) > KEYS_MOST:
            self._halvings += 1
            most = _MASK >> self._halvings
            self._missed_at = {key: tick for key, tick in self._missed_at.items() if key <= most}

    def _look(self) -> None:
        """What was read since the last look was read now."""
        for segno, count in self._reads().items():
            segment = self._segments.get(segno)
            if segment is None:
                self._segments[segno] = self._new(0, self._tick, count)
            elif segment.count(count):
                self._use(segment)

    def _new(self, fetched_ns: int, used: int, counted: int = 0) -> _Segment:
        missed = self._missed
        return _Segment(fetched_ns, used, missed, self._first, self._loose, missed, counted)

    def _use(self, segment: _Segment) -> None:
        segment.use(self._tick, self._missed, self._first, self._loose)

    def may_go(self, rows: Iterable[SegmentRow], limit_bytes: int) -> SegmentRow | None:
        """Of these segments the one that was used longest ago of those that may; None: none may."""
        with self._lock:
            self._limit_bytes = limit_bytes
            again = list(itertools.accumulate(reversed(self._again)))
            for row in self._in_order(rows):
                if self._is_idle(self._segments[row.segno], again):
                    return row
            self._refused_at = self._tick
            return None

    def has_refused(self) -> bool:
        """Whether nothing could have changed since `may_go` last said None."""
        with self._lock:
            return self._refused_at == self._tick

    def _in_order(self, rows: Iterable[SegmentRow]) -> list[SegmentRow]:
        self._look()
        rows = list(rows)
        for row in rows:
            segment = self._segments.get(row.segno)
            if segment is None:
                # From before our time, or written by another process.
                used = self._tick if row.fetched_ns >= self._began_ns else -1
                self._segments[row.segno] = self._new(row.fetched_ns, used)
            elif segment.note_fetch(row.fetched_ns):
                self._use(segment)
        return sorted(
            rows, key=lambda row: (self._segments[row.segno].used, row.fetched_ns, row.segno)
        )

    def _is_idle(self, segment: _Segment, again_since: list[int]) -> bool:
        """`again_since`: bytes missed again that were missed before in the last 1, 2, … ticks."""
        ticks = min(self._tick - segment.used, len(again_since))
        again = again_since[ticks - 1] if ticks else 0
        if segment.reads < READS_LEAST:
            usual = PASS_SHARE * (self._first - segment.first)
        else:
            usual = GAPS * (segment.missed - segment.met) / segment.reads
            again = max(again, self._loose - segment.loose)
        return again >= max(SHARE * self._limit_bytes, usual)

    def gone(self, segno: int) -> None:
        with self._lock:
            self._segments.pop(segno, None)

    def take_used(self, now_ns: int) -> list[int]:
        """Segments that were read since the last call: others are to know."""
        with self._lock:
            self._look()
            return [s for s, segment in self._segments.items() if segment.take_use(now_ns)]
