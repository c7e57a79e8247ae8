"""A log that is being written: what it was assigned, what was added, its credit, its draining."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
from numpy.typing import NDArray

from fusecache import _native
from fusecache.base import digest
from fusecache.base.wire import Packing
from fusecache.reorder.choosing import Use, choose
from fusecache.reorder.room import LOOK_SHARE, Room, Sizes
from fusecache.reorder.segments import Segments, survey
from fusecache.store.log import Log
from fusecache.store.types import ALIGNMENT, Version
from fusecache.table import namespace

log = logging.getLogger(__name__)

APPENDERS_MOST = 8
FIRST_SHARE = 0.1  # of its files on SSD: a first log, as in hintsd/reorder/worth.py
TICK_S = 1.0


def begin_in_c(begun: Log, chunks: int, buffer_bytes: int, dataset: bytes) -> bool:
    """False: there is no memory for it."""
    try:
        _native.log_begin(
            chunks,
            buffer_bytes,
            np.array(begun.segnos, np.uint32).tobytes(),
            np.array(begun.fds, np.int32).tobytes(),
            begun.uuid,
            dataset,
            begun.algorithm,
            begun.credit_bytes,
        )
    except OSError as error:
        log.warning("cannot begin a log of %d chunks: %s", chunks, error)
        return False
    return True


class OpenLog:
    """INVARIANT: a thread that draws credit or looks for what is empty has the lock."""

    def __init__(
        self,
        begun: Log,
        sizes: Sizes,
        room: Room,
        segments: Segments,
        previous: set[int],
        lock: threading.Lock,
    ) -> None:
        """`previous`: the segments of the log that is read now."""
        self.log = begun
        self.samples = 0  # that it was assigned
        self.is_assigned = False
        """It has all its files, and takes others."""
        self._sizes = sizes
        self._room = room
        self._segments = segments
        self._previous = previous
        self._lock = lock
        self._is_closed = False
        self._is_first = False  # hardly anything was on SSD when it was begun
        self._is_dirty = False
        self._coming = 0  # files that it was assigned, and that are not on SSD yet
        self._strays = 0  # that it has got: files in no chunk
        self._counters = _native.log_counters()  # of C, as they were when it began
        self._is_draining = True  # unless there is room
        self._moved = -1  # `moved` when empty segments were looked for
        self._flushed_bytes = self._counters["written_bytes"]  # after the last flush
        self._look_at = 0.0
        self._draw_at = 0.0  # there was no room for more credit

    # ---- its files -------------------------------------------------------------------------------

    def assign(self, first: int, lengths: list[int], inos: NDArray[np.uint32]) -> None:
        """See Packer.assign."""
        self.samples += len(inos)
        start = 0
        for chunk, length in enumerate(lengths, first):
            _native.log_assign(inos[start : start + length].tobytes(), chunk)
            start += length

    def open(self) -> None:
        """All is assigned: files may be appended."""
        stored = sum(use.to_come for use in self._look())
        self._coming = max(0, self.samples - stored)
        self._is_first = stored <= self.samples * FIRST_SHARE
        _native.log_open()
        self.is_assigned = True

    def close(self) -> None:
        """It takes no more."""
        self._is_closed = True

    def add(self, ino: int, version: Version, payload: digest.Buffer) -> bool:
        """See Packer.add. Any thread, without the lock."""
        known = _native.get_location(ino, 0)
        if not self.is_assigned or namespace.is_located(ino):
            return False
        if known is not None:  # evicted by others; in its place nothing can be appended
            _native.clear_location(ino, 0, known)
        is_stray = not _native.log_wants(ino)
        if self._is_first and not is_stray:
            self.make_credit(len(payload))
        elif not self._has_room_beside_slack(len(payload), is_stray):
            return False
        if is_stray and not self._assign_stray(ino):
            return False
        name = digest.digest(self.log.algorithm, payload)
        is_added = _native.log_add(ino, version, name, time.time_ns(), payload)
        self._strays += is_stray and is_added
        self._is_dirty |= is_added
        return is_added

    def _assign_stray(self, ino: int) -> bool:
        """To what is read last: there it keeps no other segment alive. False: not now, the log
        ends, perhaps (then each of its files looks like a stray).
        """
        if not self._lock.acquire(blocking=False):  # ending may take seconds
            return False
        try:
            if self._is_closed:
                return False
            last = len(self.log.segnos) - 1
            _native.log_assign(np.array([ino], np.uint32).tobytes(), last)
            return True
        finally:
            self._lock.release()

    def _has_room_beside_slack(self, size_bytes: int, is_stray: bool) -> bool:
        slack_bytes = self._sizes.slack_bytes
        wanted = slack_bytes + APPENDERS_MOST * size_bytes
        if is_stray:
            wanted += self.coming_bytes() + self._strays * self._sizes.record_bytes
        wanted = -(-wanted // ALIGNMENT) * ALIGNMENT  # as credit is drawn
        if _native.log_credit(0) >= wanted:
            return True
        if not self._lock.acquire(blocking=False):  # looking may take seconds
            return False
        try:
            # More than for this one: each time is a transaction.
            more = wanted + slack_bytes // 4
            return not self._is_closed and self._draw(more) >= wanted
        finally:
            self._lock.release()

    def is_for_first(self, ino: int) -> bool:
        """Whether it fills the cache, and this file is one of its chunks."""
        return self._is_first and _native.log_wants(ino)

    def flush(self) -> None:
        """Write out what was added."""
        if self._is_dirty:
            self._is_dirty = False
            _native.log_flush()

    # ---- credit ----------------------------------------------------------------------------------

    def make_credit(self, size_bytes: int) -> None:
        """See Packer.make_credit. Takes the lock."""
        wanted = max(self._sizes.slack_bytes, APPENDERS_MOST * size_bytes)
        if _native.log_credit(0) >= wanted - wanted // 4:
            return
        with self._lock:
            if self._is_closed:
                return
            credit = self._draw(wanted)
            if credit >= wanted // 4 and not self._is_draining:
                return
            # What waits in buffers keeps segments alive, however little it is.
            written = _native.log_counters()["written_bytes"] - self._flushed_bytes
            if written >= credit:
                _native.log_flush()
                self._flushed_bytes = _native.log_counters()["written_bytes"]
            self.look_if_moved()

    def _draw(self, wanted_bytes: int) -> int:
        """Have so much credit, if there is room; how much there is."""
        left = _native.log_credit(0)
        if wanted_bytes - left >= ALIGNMENT and time.monotonic() >= self._draw_at:
            got = self.log.draw(wanted_bytes - left)
            self._room.take(got)
            if not got:
                self._draw_at = time.monotonic() + TICK_S
            left = _native.log_credit(got)
        return left

    # ---- what goes -------------------------------------------------------------------------------

    def look_if_moved(self) -> None:
        """Release what has become empty, now and then."""
        moved = _native.log_counters()["moved"]
        if moved != self._moved and time.monotonic() >= self._look_at:
            self._look()

    def _look(self) -> list[Use]:
        """Release what is empty; choose what is to be emptied next, if not everything can be. What
        there was.
        """
        begin = time.thread_time()  # a busy machine's other processes are no cost of looking
        self._moved = _native.log_counters()["moved"]
        uses = survey()
        self._look_at = time.monotonic() + LOOK_SHARE * (time.thread_time() - begin)
        if self._segments.release_empty(self.log, uses):
            self._draw_at = 0.0
        ours = self._previous.union(self.log.segnos)
        scattered = sum(use.bytes for use in uses if use.to_come and use.segno not in ours)
        slack_bytes = self._sizes.slack_bytes
        credit = self._draw(scattered + slack_bytes)
        enough = scattered + slack_bytes // 4 * (3 if self._is_draining else 1)
        self._is_draining = credit < enough
        if self._is_draining:
            budget = credit + _native.log_counters()["waiting_bytes"]
            candidates = self._segments.candidates(self.log, uses, self._previous)
            chosen = choose(candidates, budget)
            _native.log_drain(np.array(chosen, np.uint32).tobytes())
        else:
            _native.log_drain(None)
        return uses

    # ---- figures ---------------------------------------------------------------------------------

    def packing(self) -> int:
        if _native.log_counters()["failed"] > self._counters["failed"]:
            return Packing.WRITE_FAILED
        return Packing.DRAINING if self._is_draining else Packing.OPEN

    def coming_bytes(self) -> int:
        """What is assigned and not on SSD yet, in records."""
        added = _native.log_counters()["added"] - self._counters["added"] - self._strays
        return max(0, self._coming - added) * self._sizes.record_bytes

    def beyond_bytes(self) -> int:
        """In records: room beside the slack and what is to come. May wait for the disk."""
        room = _native.log_credit(0) + self._room.of_log(self.log)
        strays = self._strays * self._sizes.record_bytes
        return room - self._sizes.slack_bytes - self.coming_bytes() - strays

    def moved_samples(self) -> int:
        """Of those that it was assigned, so many have their location in it."""
        counters, before = _native.log_counters(), self._counters
        moved = sum(counters[name] - before[name] for name in ("moved", "added")) - self._strays
        return max(0, min(moved, self.samples))
