"""The log of the mount: a segment for each chunk of the coming epoch, and what was read from them
(docs/LOG.md).

Here is decided how many bytes may be appended, and which segments go. Records are appended and
locations switched in C (native_log.c), files are made and deleted in the store (store/log.py).

With too little room for all that moves, the log is *drained*: only what lies in a few segments is
moved, as many as the credit can empty, so that each bit of it comes back, and more (`choose`).

INVARIANT: a segment is released only when no location leads into it; and one that others may know
from the index only after as many files have left it as the index has in it.
INVARIANT: what is released or ended was written out before.
INVARIANT: nothing is evicted for a log.

All but `run_forever` may wait for the disk, and is for worker threads. The policy, what is packed
and when, is hintsd's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import trio
from numpy.typing import NDArray

from fusecache import _native, digest, namespace
from fusecache.pins import Pins
from fusecache.store import Store
from fusecache.store.log import Log, release, unused
from fusecache.store.types import ALIGNMENT, BLOCK_BYTES, Version

log = logging.getLogger(__name__)

# `packing` in docs/WIRE.md
NONE, OPEN, NO_ROOM, NO_CREDIT, WRITE_FAILED, DRAINING = 0, 1, 2, 4, 5, 6

LOGS_KEPT = 2  # behind the open one: what a file did not leave in one epoch, it leaves in the next
APPENDERS_MOST = 8
FIRST_SHARE = 0.1  # of its files on SSD: a first log, as in hintsd/packing.py
TICK_S = 1.0
LOOK_SHARE = 20  # looking for empty segments takes at most this part of the time
LOOK_BYTES_SHARE = 50  # of the dataset: what is moved between two looks at 27,000 files/s


class Use(NamedTuple):
    """What locations lead to in a segment: `to_come` of the `files` are going to be moved yet."""

    segno: int
    files: int
    bytes: int
    to_come: int


class Candidates(NamedTuple):
    """Segments that can become empty in this epoch."""

    dead: list[Use]
    """Less than half alive."""
    next: list[Use]
    """Of the log that is read now, in the order in which they are read."""
    scattered: list[Use]
    """Others: read all epoch long."""


def choose(candidates: Candidates, budget_bytes: int) -> list[int]:
    """Which segments to empty with so much credit: what is nearly empty gives most for it, what is
    read next gives it back first. Until the epoch ends, half of what is left goes to what is
    scattered: it could not begin later.
    """
    chosen: list[int] = []
    by_size = sorted(candidates.dead, key=lambda use: use.bytes)
    others = sorted(candidates.scattered, key=lambda use: use.bytes)

    def take(uses: Iterable[Use], most_bytes: int) -> int:
        left = most_bytes
        for use in uses:
            if use.segno in chosen or use.bytes > most_bytes:
                continue
            if use.bytes > left:
                break  # its turn comes when another has given its room back
            chosen.append(use.segno)
            left -= use.bytes
        return most_bytes - left

    budget_bytes -= take(by_size, budget_bytes)
    budget_bytes -= take(candidates.next, budget_bytes // 2 if others else budget_bytes)
    budget_bytes -= take(others, budget_bytes)
    take(candidates.next, budget_bytes)
    return chosen


def slack_bytes(chunks: int, size_bytes: int, buffer_bytes: int, chunk_bytes: int) -> int:
    """Room beyond the dataset that a log takes at full speed (docs/LOG.md): what waits in buffers
    keeps its old place, and so do three chunks of an epoch around the reader, and what moves
    between two looks.
    """
    waiting = chunks * buffer_bytes * 13 // 10
    return waiting + 3 * chunk_bytes + size_bytes // LOOK_BYTES_SHARE


class Packer:
    """The logs of one mount: at most one is open."""

    def __init__(
        self, store: Store, dataset: bytes, releasing: set[int], pins: Pins | None = None
    ) -> None:
        """`releasing`: has segments while they are released, for who hears from the store that they
        are gone: nothing leads into them, so nobody has lost anything. `pins`: what else may go
        is room, but for a log.
        """
        self._pins = pins
        self._store = store
        self._dataset = dataset
        self._releasing = releasing
        self._lock = threading.Lock()
        self._log: Log | None = None  # open, or being assigned
        self._finished: list[Log] = []  # written, and read from now; the oldest first
        self._packing = NONE
        self._slack_bytes = 0  # that the open log wants
        self._is_assigned = False  # it has all its files, and takes others
        self._is_first = False  # hardly anything was on SSD when it was begun
        self._coming = 0  # files that it was assigned, and that are not on SSD yet
        self._strays = 0  # that it has got: files in no chunk
        self._limit_bytes = 0  # of the store, when the last log was begun
        self._needed_bytes = 0  # more, for the log that was refused
        self._mean_bytes = self._record_bytes = 1  # of a file, and on SSD
        self._counters: dict[str, int] = {}  # of C, as they were when the log began
        self._is_draining = False
        self._begun = 0  # logs, all in all
        self._samples = self._moved_before = 0  # of the log that was begun last
        self._is_dirty = False
        self._is_abandoned = False
        self._left: Counter[int] = Counter()  # segment -> files whose location was switched away
        self._can_empty: dict[int, bool] = {}  # static segment -> only this mount leads there
        self._kept: dict[int, int] = {}  # ... -> how many had left it when it could not go
        self._segments: set[int] = set()  # of these logs, not released yet
        self._moved = -1  # `moved` when empty segments were looked for
        self._flushed_bytes = 0  # `written_bytes` after the last flush
        self._look_at = 0.0
        self._draw_at = 0.0  # there was no room for more credit
        self._free, self._free_until = 0, 0.0  # what there is room for; until when that will do ...
        self._free_pins = 0  # ... with this list of pins
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake = trio.Event()

    @property
    def is_open(self) -> bool:
        """Whether there is a log that files from the origin may go to."""
        return self._log is not None

    @property
    def has_logs(self) -> bool:
        """Whether a log is open, or one is read that the next follows: nothing is evicted then."""
        return self._log is not None or bool(self._finished)

    # ---- what a hintsd asks for ------------------------------------------------------------------

    def begin(
        self, chunks: int, size_bytes: int, samples: int, buffer_bytes: int, epochs: int = 1
    ) -> None:
        """A log; what was open is written out, and can be read from.

        `size_bytes` of all `samples` together, each chunk with a write buffer of `buffer_bytes`. It
        serves so many `epochs`: what is a chunk here is one of theirs to the power of that.
        """
        with self._lock:
            self._is_abandoned = False
            self._finish()
            self._sweep()
            chunk_bytes = math.ceil(size_bytes / chunks ** (1 / epochs))
            self._slack_bytes = slack_bytes(chunks, size_bytes, buffer_bytes, chunk_bytes)
            self._is_assigned, self._coming, self._strays = False, 0, 0
            self._mean_bytes = -(-size_bytes // samples)
            self._record_bytes = -(-self._mean_bytes // ALIGNMENT) * ALIGNMENT
            adopted = self._store.adopted
            self._packing = self._begin(chunks, buffer_bytes)
            if self._packing in (NO_ROOM, NO_CREDIT):
                # A dead server's log may have room reserved, and lead past what was moved to it.
                self._store.adopt_orphans()
                if self._store.adopted > adopted:
                    self._sweep()
                    self._packing = self._begin(chunks, buffer_bytes)
        self._rouse()

    def _begin(self, chunks: int, buffer_bytes: int) -> int:
        """What `packing` is then."""
        least = min((use.bytes for use in self._survey()), default=0)
        wanted = max(self._slack_bytes, least)
        opened = self._store.begin_log(chunks, wanted, self._record_bytes)
        if opened is None:
            return NO_ROOM
        credit = opened.credit_bytes
        if least <= credit:
            try:
                _native.log_begin(
                    chunks,
                    buffer_bytes,
                    np.array(opened.segnos, np.uint32).tobytes(),
                    np.array(opened.fds, np.int32).tobytes(),
                    opened.uuid,
                    self._dataset,
                    opened.algorithm,
                    credit,
                )
            except OSError as error:
                log.warning("cannot begin a log of %d chunks: %s", chunks, error)
            else:
                self._log = opened
                self._limit_bytes = self._store.settings.limit_bytes
                self._begun, self._samples, self._moved_before = self._begun + 1, 0, _moved()
                self._segments.update(opened.segnos)
                self._can_empty.clear()
                self._kept.clear()
                self._is_draining = True  # unless there is room
                self._counters = _native.log_counters()
                self._flushed_bytes = self._counters["written_bytes"]
                self._moved = -1
                self._look_at = self._draw_at = self._free_until = 0.0
                return OPEN
        opened.finish([])
        self._release(opened, opened.segnos)
        opened.end()
        if least <= credit:
            return NO_ROOM
        self._needed_bytes = wanted - credit
        return NO_CREDIT

    def assign(self, first: int, lengths: list[int], inos: NDArray[np.uint32]) -> None:
        """Files of chunk `first` and those behind it; of a chunk, some more files each time."""
        with self._lock:
            if self._log is None:
                return
            self._samples += len(inos)
            start = 0
            for chunk, length in enumerate(lengths, first):
                _native.log_assign(inos[start : start + length].tobytes(), chunk)
                start += length

    def open(self) -> None:
        """All is assigned: files may be appended."""
        with self._lock:
            if self._log is not None:
                stored = sum(use.to_come for use in self._look(self._log))
                self._coming = max(0, self._samples - stored)
                self._is_first = stored <= self._samples * FIRST_SHARE
                _native.log_open()
                self._is_assigned = True

    def finish(self) -> None:
        """What is open is written out, can be read from, and takes no more."""
        with self._lock:
            self._is_abandoned = False
            self._finish()
            self._packing = NONE

    def end(self) -> None:
        """No further log: what is open is written out, and all segments are the store's."""
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """As `end`, soon, without waiting for it; unless another log begins before."""
        self._is_abandoned = True
        self._wake.set()

    def _end(self) -> None:
        self._is_abandoned = False
        self._finish()
        for finished in self._finished:
            finished.end()
        self._finished.clear()
        self._segments.clear()
        self._left.clear()
        self._packing = NONE

    def _finish(self) -> None:
        opened = self._log
        if opened is None:
            return
        self._finished.append(opened)  # first: there are logs while it is written out, too
        self._log = None
        self._free_until = 0.0
        opened.finish(_native.log_end())
        self._release_empty(opened, self._survey())
        while len(self._finished) > LOGS_KEPT:
            oldest = self._finished.pop(0)
            self._segments.difference_update(oldest.segnos)
            oldest.end()

    # ---- files from the origin -------------------------------------------------------------------

    def add(self, ino: int, version: Version, payload: digest.Buffer) -> bool:
        """Append a file that has no location. False: it is not for the log, or there is no room
        beside the slack, without which the logs to come would hardly move (a first log may fill the
        cache: all of the dataset on SSD is worth more).

        One that is in no chunk is a stray: the next epoch reads it at any time, so its segment is
        empty only at the end of that epoch. Strays are taken where there is room for them twice.
        """
        opened, known = self._log, _native.get_location(ino, 0)
        if opened is None or not self._is_assigned or namespace.is_located(ino):
            return False
        if known is not None:  # evicted by others; in its place nothing can be appended
            _native.clear_location(ino, 0, known)
        is_stray = not _native.log_wants(ino)
        if self._is_first and not is_stray:
            self.make_credit(len(payload))
        elif not self._has_room_beside_slack(opened, len(payload), is_stray):
            return False
        if is_stray and not self._assign_stray(opened, ino):
            return False
        name = digest.digest(opened.algorithm, payload)
        is_added = _native.log_add(ino, version, name, time.time_ns(), payload)
        self._strays += is_stray and is_added
        self._is_dirty |= is_added
        return is_added

    def _assign_stray(self, opened: Log, ino: int) -> bool:
        """To what is read last: there it keeps no other segment alive. False: not now, the log
        ends, perhaps (then each of its files looks like a stray).
        """
        if not self._lock.acquire(blocking=False):  # ending may take seconds
            return False
        try:
            if self._log is not opened:
                return False
            last = len(opened.segnos) - 1
            _native.log_assign(np.array([ino], np.uint32).tobytes(), last)
            return True
        finally:
            self._lock.release()

    def _has_room_beside_slack(self, opened: Log, size_bytes: int, is_stray: bool) -> bool:
        wanted = self._slack_bytes + APPENDERS_MOST * size_bytes
        if is_stray:
            wanted += self._coming_bytes() + self._strays * self._record_bytes
        wanted = -(-wanted // ALIGNMENT) * ALIGNMENT  # as credit is drawn
        if _native.log_credit(0) >= wanted:
            return True
        if not self._lock.acquire(blocking=False):  # looking may take seconds
            return False
        try:
            # More than for this one: each time is a transaction.
            more = wanted + self._slack_bytes // 4
            return self._log is opened and self._draw(opened, more) >= wanted
        finally:
            self._lock.release()

    def _coming_bytes(self) -> int:
        """What is assigned and not on SSD yet, in records."""
        added = _native.log_counters()["added"] - self._counters["added"] - self._strays
        return max(0, self._coming - added) * self._record_bytes

    def keeps_out(self, ino: int, size_bytes: int, length: int) -> bool:
        """Whether `length` bytes of a file of `size_bytes` that `add` has not taken are not to be
        stored elsewhere: what room there is belongs to the log, or to the one that follows.
        """
        opened = self._log
        if opened is not None and (not self._is_assigned or self._packing == WRITE_FAILED):
            return False
        is_small = size_bytes <= BLOCK_BYTES
        if not self.has_logs or (is_small and namespace.is_located(ino)):
            return False
        if opened is not None and is_small:
            return not (self._is_first and _native.log_wants(ino))
        taken = self._taken_bytes(length)
        if self.spare_bytes() < taken:
            return True
        self._free -= taken
        return False

    def has_spare(self, length: int) -> bool:
        """Whether a block of that length can be stored without an eviction, and in no log. May wait
        for the disk.
        """
        return self.spare_bytes() >= self._taken_bytes(length)

    def _taken_bytes(self, length: int) -> int:
        """What the open log has less room by, when a block is stored; without one, what is reserved
        for a new segment and not written is given back when the next log begins.
        """
        return length if self._log is None else self._store.taken_bytes(length)

    def flush(self) -> None:
        """Write out what was added."""
        if self._is_dirty:
            self._is_dirty = False
            _native.log_flush()

    # ---- credit and releases ---------------------------------------------------------------------

    async def run_forever(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        while True:
            while self.has_logs or self._is_abandoned:
                await trio.to_thread.run_sync(self._tick)
                with trio.move_on_after(TICK_S):
                    await self._wake.wait()
                self._wake = trio.Event()
            await self._wake.wait()
            self._wake = trio.Event()

    def _rouse(self) -> None:
        """From a worker thread."""
        if self._token is not None:
            self._token.run_sync_soon(lambda: self._wake.set())

    def _tick(self) -> None:
        with self._lock:
            if self._is_abandoned:
                self._end()
            elif self.has_logs and self._store.settings.limit_bytes < self._limit_bytes:
                self._end()  # what they have, and may write yet, was drawn from a larger cache
                self._packing = NO_ROOM
            elif self._log is not None:
                self._look_if_moved(self._log)
                self._look_at_counters()

    def make_credit(self, size_bytes: int) -> None:
        """Files of so many bytes are about to be appended, at the same time by several threads."""
        wanted = max(self._slack_bytes, APPENDERS_MOST * size_bytes)
        if _native.log_credit(0) >= wanted - wanted // 4:
            return
        with self._lock:
            opened = self._log
            if opened is None:
                return
            credit = self._draw(opened, wanted)
            if credit >= wanted // 4 and not self._is_draining:
                return
            # What waits in buffers keeps segments alive, however little it is.
            written = _native.log_counters()["written_bytes"] - self._flushed_bytes
            if written >= credit:
                _native.log_flush()
                self._flushed_bytes = _native.log_counters()["written_bytes"]
            self._look_if_moved(opened)

    def _draw(self, opened: Log, wanted_bytes: int) -> int:
        """Have so much credit, if there is room; how much there is."""
        left = _native.log_credit(0)
        if wanted_bytes - left >= ALIGNMENT and time.monotonic() >= self._draw_at:
            got = opened.draw(wanted_bytes - left)
            self._free -= got
            if not got:
                self._draw_at = time.monotonic() + TICK_S
            left = _native.log_credit(got)
        return left

    def _look_at_counters(self) -> None:
        if _native.log_counters()["failed"] > self._counters["failed"]:
            self._packing = WRITE_FAILED
        else:
            self._packing = DRAINING if self._is_draining else OPEN

    def _look_if_moved(self, opened: Log) -> None:
        moved = _native.log_counters()["moved"]
        if moved != self._moved and time.monotonic() >= self._look_at:
            self._look(opened)

    def _look(self, opened: Log) -> list[Use]:
        """Release what is empty; choose what is to be emptied next, if not everything can be. What
        there was.
        """
        begin = time.monotonic()
        self._moved = _native.log_counters()["moved"]
        uses = self._survey()
        self._look_at = begin + LOOK_SHARE * (time.monotonic() - begin)
        if self._release_empty(opened, uses):
            self._draw_at = 0.0
        newest = set(self._finished[-1].segnos) if self._finished else set[int]()
        ours = newest.union(opened.segnos)
        scattered = sum(use.bytes for use in uses if use.to_come and use.segno not in ours)
        credit = self._draw(opened, scattered + self._slack_bytes)
        enough = scattered + self._slack_bytes // 4 * (3 if self._is_draining else 1)
        self._is_draining = credit < enough
        if self._is_draining:
            budget = credit + _native.log_counters()["waiting_bytes"]
            chosen = choose(self._candidates(opened, uses, newest), budget)
            _native.log_drain(np.array(chosen, np.uint32).tobytes())
        else:
            _native.log_drain(None)
        return uses

    def _survey(self) -> list[Use]:
        return [Use(*use) for use in _native.log_survey()]

    def _candidates(self, opened: Log, uses: list[Use], newest: set[int]) -> Candidates:
        whole = [use for use in uses if use.to_come == use.files and use.segno not in opened.segnos]
        unknown = [
            use
            for use in whole
            if use.segno not in self._segments and use.segno not in self._can_empty
        ]
        rows = opened.rows_in([use.segno for use in unknown])
        for use in unknown:
            if use.segno in rows:  # else it is to be adopted yet, perhaps
                has_left = self._left[use.segno] + use.files
                self._can_empty[use.segno] = has_left >= rows[use.segno]
        found = Candidates([], [], [])
        reserved = opened.reserved()
        for use in whole:
            if use.segno in self._segments or self._can_empty.get(use.segno, False):
                is_dead = 2 * use.bytes < reserved.get(use.segno, 0)
                is_next = use.segno in newest
                group = found.dead if is_dead else found.next if is_next else found.scattered
                group.append(use)
        return found

    def _release_empty(self, newest: Log, uses: list[Use]) -> bool:
        """Whether there was one."""
        self._left.update(dict(_native.log_left()))
        live = {use.segno for use in uses}
        is_open = set[int]() if newest.is_finished else set(newest.segnos)
        gone = [segno for segno in self._segments if segno not in live and segno not in is_open]
        static = [
            segno
            for segno, left in self._left.items()
            if segno not in live and segno not in self._segments and self._kept.get(segno) != left
        ]
        if self._store.seal_in(static):  # it may have got more before: looked at again
            return self._release_empty(newest, self._survey())
        rows = newest.rows_in(static)
        gone += [segno for segno, count in rows.items() if count <= self._left[segno]]
        self._kept.update({segno: self._left[segno] for segno in rows})
        if not gone:
            return False
        self._release(newest, gone)
        for segno in gone:
            if not _native.segment_known(segno):  # else it is there still
                self._segments.discard(segno)
                del self._left[segno]
                self._kept.pop(segno, None)
        return True

    def sweep(self) -> None:
        """Delete sealed segments to which nothing leads: what logs that were cut off have left."""
        with self._lock:
            self._sweep()

    def _sweep(self) -> None:
        directory, segnos = unused(self._store)
        live = {use.segno for use in self._survey()} if segnos else set[int]()
        dead = [segno for segno in segnos if segno not in live]
        if directory is not None and dead:
            self._releasing.update(dead)
            release(self._store, directory, dead)
            self._releasing.clear()

    def _release(self, opened: Log, segnos: list[int]) -> None:
        self._releasing.update(segnos)
        opened.release(segnos)
        self._releasing.clear()

    # ---- figures ---------------------------------------------------------------------------------

    def room_bytes(self) -> int:
        """How many payload bytes can be stored, evicting no pinned one. Beside an open log that is
        what it was assigned, and half of what its slack leaves: strays lie on SSD twice for a
        while. While it is being assigned, nobody knows yet what is one. May wait for the disk.
        """
        opened = self._log
        if opened is None or not self._is_assigned:
            return self.spare_bytes()
        coming, beyond = self._coming_bytes(), self._beyond_bytes(opened)
        room = coming + (beyond // 2 if beyond > 0 else beyond)
        return self._payload_bytes(max(0, room))

    def spare_bytes(self) -> int:
        """How many payload bytes can be stored, evicting no pinned one, and in no log: what neither
        the open one wants nor the next. May wait for the disk.
        """
        opened = self._log
        if opened is not None:
            return self._payload_bytes(max(0, self._beyond_bytes(opened)))
        room = self._free_bytes(self._store)
        return max(0, room - self._payload_bytes(self._slack_bytes)) if self._finished else room

    def _beyond_bytes(self, opened: Log) -> int:
        """In records: room beside the slack and what is to come."""
        room = _native.log_credit(0) + self._free_bytes(opened)
        return room - self._slack_bytes - self._coming_bytes() - self._strays * self._record_bytes

    def _free_bytes(self, of: Store | Log) -> int:
        """What that has room for. With thousands of segments looking takes a while: what is taken
        meanwhile is taken off.
        """
        begin, pins = time.monotonic(), self._pins
        number = 0 if pins is None else pins.number
        if begin >= self._free_until or number != self._free_pins:
            self._free_pins = number
            if isinstance(of, Store) and pins is not None and pins.may_evict and not self.has_logs:
                self._free = of.room_bytes(pins.segments)
            else:
                self._free = of.room_bytes()
            self._free_until = begin + LOOK_SHARE * (time.monotonic() - begin)
        return self._free

    def _payload_bytes(self, size_bytes: int) -> int:
        return size_bytes * self._mean_bytes // self._record_bytes

    @property
    def ssd_needed_bytes(self) -> int:
        """The --ssd for which a log was refused; 0: none was."""
        limit = self._store.settings.limit_bytes
        return limit + self._needed_bytes if self._packing == NO_CREDIT else 0

    def progress(self) -> dict[str, int]:
        """What is in logs, and how far the open one is (0: none is). Scans the table: for people
        who ask, in a worker thread. It waits for nobody.
        """
        segments = self._segments.copy()
        samples = self._samples if self._log else 0
        moved = _moved() - self._moved_before - self._strays
        return {
            "log_files": sum(use.files for use in self._survey() if use.segno in segments),
            "logs": self._begun,
            "log_samples": samples,
            "log_moved_samples": max(0, min(moved, samples)),
        }

    def state(self) -> dict[str, int]:
        counters = _native.log_counters()
        return {
            "packing": self._packing,
            "log_written_bytes": counters["written_bytes"],
            "log_waiting_bytes": counters["waiting_bytes"],
            "log_segments": len(self._segments),
        }


def _moved() -> int:
    """Files whose location was switched to a log since the process began."""
    counters = _native.log_counters()
    return counters["moved"] + counters["added"]
