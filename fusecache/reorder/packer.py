"""The log of the mount: a segment for each chunk of the coming epoch, and what was read from them
(docs/LOG.md).

Here is decided how many bytes may be appended, and which segments go. Records are appended and
locations switched in C (native/log/), files are made and deleted in the store (store/log.py).

With too little room for all that moves, the log is *drained*: only what lies in a few segments is
moved, as many as the credit can empty, so that each bit of it comes back, and more (choosing.py).

INVARIANT: a segment is released only when no location leads into it; and one that others may know
from the index only after as many files have left it as the index has in it.
INVARIANT: what is released or ended was written out before.
INVARIANT: nothing is evicted for a log.

All but `run_forever` may wait for the disk, and is for worker threads. The decision what is packed,
and when, is hintsd's.
"""

from __future__ import annotations

import threading

import numpy as np
import trio
from numpy.typing import NDArray

from fusecache import _native
from fusecache.base import digest
from fusecache.base.wire import Packing
from fusecache.reorder.open_log import (
    TICK_S,
    OpenLog,
    begin_in_c,
)
from fusecache.reorder.room import Room, Sizes
from fusecache.reorder.segments import Segments, survey
from fusecache.store import Store
from fusecache.store.log import Log
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace
from fusecache.table.pins import Pins

LOGS_KEPT = 2  # behind the open one: what a file did not leave in one epoch, it leaves in the next


class Packer:
    """The logs of one mount: at most one is open."""

    def __init__(
        self, store: Store, dataset: bytes, releasing: set[int], pins: Pins | None = None
    ) -> None:
        """`releasing`: has segments while they are released. The store tells that they are gone,
        but nothing leads into them, so no reader has lost anything. `pins`: what else may go is
        room, but for a log.
        """
        self._store = store
        self._dataset = dataset
        self._lock = threading.Lock()
        self._segments = Segments(store, releasing)
        self._room = Room(store, pins)
        self._open: OpenLog | None = None  # or being assigned
        self._finished: list[Log] = []  # written, and read from now; the oldest first
        self._sizes = Sizes()  # of the log that was begun last, or refused
        self._packing = Packing.NONE
        self._limit_bytes = 0  # of the store, when the last log was begun
        self._needed_bytes = 0  # more, for the log that was refused
        self._begun = 0  # logs, all in all
        self._is_first = True  # none was begun, or refused
        self._is_abandoned = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._wake = trio.Event()

    @property
    def is_open(self) -> bool:
        """Whether there is a log that files from the origin may go to."""
        return self._open is not None

    @property
    def has_logs(self) -> bool:
        """Whether a log is open, or one is read that the next follows: nothing is evicted then."""
        return self._open is not None or bool(self._finished)

    # ---- what a hintsd asks for ------------------------------------------------------------------

    def begin(
        self, chunks: int, size_bytes: int, samples: int, buffer_bytes: int, epochs: int = 1
    ) -> None:
        """A log; what was open is written out, and can be read from.

        `size_bytes` of all `samples` together, each chunk with a write buffer of `buffer_bytes`. It
        serves so many `epochs`. A chunk here is what hintsd/reorder/packing.py calls a cell: what
        lies in one chunk of each of these epochs, for each combination of their chunks.
        """
        is_first, self._is_first = self._is_first, False
        if is_first:
            # A dead server's log may have room reserved, and lead past what was moved to it. With a
            # part of that room there would be a log, but not all would move (DRAINING).
            self._store.adopt_orphans()
        with self._lock:
            self._is_abandoned = False
            self._finish()
            self._segments.remove_dead()
            self._sizes = Sizes.of(chunks, size_bytes, samples, buffer_bytes, epochs)
            adopted = self._store.adopted
            self._packing = self._begin(chunks, buffer_bytes)
            if not is_first and self._packing in (Packing.NO_ROOM, Packing.NO_CREDIT):
                # The server of another mount may have died meanwhile.
                self._store.adopt_orphans()
                if self._store.adopted > adopted:
                    self._segments.remove_dead()
                    self._packing = self._begin(chunks, buffer_bytes)
        if self._token is not None:
            self._token.run_sync_soon(lambda: self._wake.set())

    def _begin(self, chunks: int, buffer_bytes: int) -> int:
        """What `packing` is then."""
        least = min((use.bytes for use in survey()), default=0)
        wanted = max(self._sizes.slack_bytes, least)
        begun = self._store.begin_log(chunks, wanted, self._sizes.record_bytes)
        if begun is None:
            return Packing.NO_ROOM
        credit = begun.credit_bytes
        if least <= credit and begin_in_c(begun, chunks, buffer_bytes, self._dataset):
            self._limit_bytes = self._store.settings.limit_bytes
            self._begun += 1
            self._segments.begin(begun.segnos)
            self._room.forget()
            previous = set(self._finished[-1].segnos) if self._finished else set[int]()
            self._open = OpenLog(
                begun, self._sizes, self._room, self._segments, previous, self._lock
            )
            return Packing.OPEN
        begun.finish([])
        self._segments.release(begun, begun.segnos)
        begun.end()
        if least <= credit:
            return Packing.NO_ROOM
        self._needed_bytes = wanted - credit
        return Packing.NO_CREDIT

    def assign(self, first: int, lengths: list[int], inos: NDArray[np.uint32]) -> None:
        """Files of chunk `first` and those behind it; of a chunk, some more files each time."""
        with self._lock:
            if self._open is not None:
                self._open.assign(first, lengths, inos)

    def open(self) -> None:
        """All is assigned: files may be appended."""
        with self._lock:
            if self._open is not None:
                self._open.open()

    def finish(self) -> None:
        """What is open is written out, can be read from, and takes no more."""
        with self._lock:
            self._is_abandoned = False
            self._finish()
            self._packing = Packing.NONE

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
        self._segments.give_up_all()
        self._packing = Packing.NONE

    def _finish(self) -> None:
        if self._open is None:
            return
        closed = self._open.log
        self._open.close()
        self._finished.append(closed)  # first: there are logs while it is written out, too
        self._open = None
        self._room.forget()
        closed.finish(_native.log_end())
        self._segments.release_empty(closed, survey())
        while len(self._finished) > LOGS_KEPT:
            oldest = self._finished.pop(0)
            self._segments.give_up(oldest.segnos)
            oldest.end()

    # ---- files from the origin -------------------------------------------------------------------

    def add(self, ino: int, version: Version, payload: digest.Buffer) -> bool:
        """Append a file that has no location. False: it is not for the log, or there is no room
        beside the slack, without which the logs to come would hardly move (a first log may fill the
        cache: all of the dataset on SSD is worth more).

        One that is in no chunk is a stray: the next epoch reads it at any time, so its segment is
        empty only at the end of that epoch. Strays are taken where there is room for them twice.
        """
        opened = self._open
        return opened is not None and opened.add(ino, version, payload)

    def keeps_out(self, ino: int, size_bytes: int, length: int) -> bool:
        """Whether `length` bytes of a file of `size_bytes` that `add` has not taken are not to be
        stored elsewhere: what room there is belongs to the log, or to the one that follows.
        """
        opened = self._open
        if opened is not None and (not opened.is_assigned or self._packing == Packing.WRITE_FAILED):
            return False
        is_small = size_bytes <= BLOCK_BYTES
        if not self.has_logs or (is_small and namespace.is_located(ino)):
            return False
        if opened is not None and is_small:
            return not opened.is_for_first(ino)
        taken = self._room.taken_bytes(length, opened is not None)
        if self.spare_bytes() < taken:
            return True
        self._room.take(taken)
        return False

    def has_spare(self, length: int) -> bool:
        """Whether a block of that length can be stored without an eviction, and in no log. May wait
        for the disk.
        """
        return self.spare_bytes() >= self._room.taken_bytes(length, self.is_open)

    def make_credit(self, size_bytes: int) -> None:
        """Files of so many bytes are about to be appended, at the same time by several threads."""
        opened = self._open
        if opened is not None:
            opened.make_credit(size_bytes)

    def flush(self) -> None:
        """Write out what was added."""
        opened = self._open
        if opened is not None:
            opened.flush()

    # ---- by itself -------------------------------------------------------------------------------

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

    def _tick(self) -> None:
        with self._lock:
            if self._is_abandoned:
                self._end()
            elif self.has_logs and self._store.settings.limit_bytes < self._limit_bytes:
                self._end()  # what they have, and may write yet, was drawn from a larger cache
                self._packing = Packing.NO_ROOM
            elif self._open is not None:
                self._open.look_if_moved()
                self._packing = self._open.packing()

    def remove_dead(self) -> None:
        """Delete sealed segments to which nothing leads: what logs that were cut off have left."""
        with self._lock:
            self._segments.remove_dead()

    # ---- figures ---------------------------------------------------------------------------------

    def room_bytes(self) -> int:
        """How many payload bytes can be stored, evicting no pinned one. Beside an open log that is
        what it was assigned, and half of what its slack leaves: strays lie on SSD twice for a
        while. While it is being assigned, it is not known yet what is one. May wait for the disk.
        """
        opened = self._open
        if opened is None or not opened.is_assigned:
            return self.spare_bytes()
        coming, beyond = opened.coming_bytes(), opened.beyond_bytes()
        room = coming + (beyond // 2 if beyond > 0 else beyond)
        return self._sizes.payload_bytes(max(0, room))

    def spare_bytes(self) -> int:
        """How many payload bytes can be stored, evicting no pinned one, and in no log: what neither
        the open one wants nor the next. May wait for the disk.
        """
        opened = self._open
        if opened is not None:
            return self._sizes.payload_bytes(max(0, opened.beyond_bytes()))
        room = self._room.of_store(self.has_logs)
        return max(0, room - self._sizes.slack_payload_bytes) if self._finished else room

    @property
    def ssd_needed_bytes(self) -> int:
        """The --ssd for which a log was refused; 0: none was."""
        limit = self._store.settings.limit_bytes
        return limit + self._needed_bytes if self._packing == Packing.NO_CREDIT else 0

    def progress(self) -> dict[str, int]:
        """What is in logs, and how far the open one is (0: none is). Scans the table: for people
        who ask, in a worker thread. It waits for no lock.
        """
        segments, opened = self._segments.copy(), self._open
        return {
            "log_files": sum(use.files for use in survey() if use.segno in segments),
            "logs": self._begun,
            "log_samples": 0 if opened is None else opened.samples,
            "log_moved_samples": 0 if opened is None else opened.moved_samples(),
        }

    def state(self) -> dict[str, int]:
        counters = _native.log_counters()
        return {
            "packing": self._packing,
            "log_written_bytes": counters["written_bytes"],
            "log_waiting_bytes": counters["waiting_bytes"],
            "log_segments": len(self._segments),
        }
