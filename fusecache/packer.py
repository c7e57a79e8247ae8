"""The log of the mount: a segment for each chunk of the coming epoch, and what was read from them
(docs/LOG.md).

Here is decided how many bytes may be appended, and which segments go. Records are appended and
locations switched in C (native_log.c), files are made and deleted in the store (store/log.py).

INVARIANT: a segment is released only when no location leads into it; and one that others may know
from the index only after as many files have left it as the index has in it.
INVARIANT: what is released or ended was written out before.

All but `run_forever` may wait for the disk, and is for worker threads. The policy, what is packed
and when, is hintsd's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

import numpy as np
import trio
from numpy.typing import NDArray

from fusecache import _native, digest
from fusecache.store import Store
from fusecache.store.log import Log
from fusecache.store.types import Version

log = logging.getLogger(__name__)

# `packing` in docs/WIRE.md
NONE, OPEN, NO_ROOM, BUSY, NO_CREDIT, WRITE_FAILED = range(6)

CHUNKS_MOST = 4096
LOGS_KEPT = 2  # behind the open one: what a file did not leave in one epoch, it leaves in the next
APPENDERS_MOST = 8
TICK_S = 0.25
LOOK_EVERY_S = 1.0
LOOK_SHARE = 20  # looking for empty segments takes at most this part of the time


class Packer:
    """The logs of one mount: at most one is open."""

    def __init__(self, store: Store, dataset: bytes, releasing: set[int]) -> None:
        """`releasing`: has segments while they are released, for who hears from the store that they
        are gone: nothing leads into them, so nobody has lost anything.
        """
        self._store = store
        self._dataset = dataset
        self._releasing = releasing
        self._lock = threading.Lock()
        self._log: Log | None = None  # open, or being assigned
        self._finished: list[Log] = []  # written, and read from now; the oldest first
        self._packing = NONE
        self._slack_bytes = 0
        self._refused = self._failed = 0  # counters of C, as they were
        self._is_dirty = False
        self._is_abandoned = False
        self._left: Counter[int] = Counter()  # segment -> files whose location was switched away
        self._segments: set[int] = set()  # of these logs, not released yet
        self._due: dict[int, int] = {}  # segment -> how many have to have left before a look
        self._look_at = 0.0
        self._draw_at = 0.0  # there was no room for more credit

    # ---- what a hintsd asks for ------------------------------------------------------------------

    def begin(self, chunks: int, size_bytes: int, buffer_bytes: int) -> None:
        """The log of the next epoch; what was open is written out, and can be read from.

        `size_bytes` of all files, each chunk with a write buffer of `buffer_bytes`.
        """
        with self._lock:
            self._is_abandoned = False
            self._finish()
            # What waits in buffers keeps its old place, and so do three chunks around the reader.
            self._slack_bytes = chunks * buffer_bytes * 13 // 10 + 3 * -(-size_bytes // chunks)
            opened = self._store.begin_log(chunks, self._slack_bytes)
            if opened is None:
                self._packing = NO_ROOM
                return
            try:
                _native.log_begin(
                    chunks,
                    buffer_bytes,
                    np.array(opened.segnos, np.uint32).tobytes(),
                    np.array(opened.fds, np.int32).tobytes(),
                    opened.uuid,
                    self._dataset,
                    opened.algorithm,
                    opened.credit_bytes,
                )
            except OSError as error:
                log.warning("cannot begin a log of %d chunks: %s", chunks, error)
                opened.finish([])
                self._release(opened, opened.segnos)
                opened.end()
                self._packing = NO_ROOM
                return
            self._log, self._packing = opened, OPEN
            self._segments.update(opened.segnos)
            counters = _native.log_counters()
            self._refused, self._failed = counters["refused"], counters["failed"]

    def assign(self, first: int, lengths: list[int], inos: NDArray[np.uint32]) -> None:
        """Files of chunk `first` and those behind it; of a chunk, some more files each time."""
        with self._lock:
            if self._log is None:
                return
            start = 0
            for chunk, length in enumerate(lengths, first):
                _native.log_assign(inos[start : start + length].tobytes(), chunk)
                start += length

    def open(self) -> None:
        """All is assigned: files may be appended."""
        with self._lock:
            if self._log is not None:
                _native.log_open()

    def end(self) -> None:
        """No further log: what is open is written out, and all segments are the store's."""
        with self._lock:
            self._end()

    def abandon(self) -> None:
        """As `end`, soon, without waiting for it; unless another log begins before."""
        self._is_abandoned = True

    def _end(self) -> None:
        self._is_abandoned = False
        self._finish()
        for finished in self._finished:
            finished.end()
        self._finished.clear()
        self._segments.clear()
        self._left.clear()
        self._due.clear()
        self._packing = NONE

    def _finish(self) -> None:
        opened, self._log = self._log, None
        if opened is None:
            return
        opened.finish(_native.log_end())
        self._finished.append(opened)
        self._due.clear()  # a file that was changed has left a segment, too
        self._look_at = 0.0
        self._release_empty(opened)
        while len(self._finished) > LOGS_KEPT:
            oldest = self._finished.pop(0)
            self._segments.difference_update(oldest.segnos)
            oldest.end()

    # ---- files from the origin -------------------------------------------------------------------

    def add(self, ino: int, version: Version, payload: digest.Buffer) -> bool:
        """Append a file that has no location. False: it is not for the log."""
        opened = self._log
        if opened is None or not _native.log_wants(ino):
            return False
        self.make_credit(len(payload))
        name = digest.digest(opened.algorithm, payload)
        is_added = _native.log_add(ino, version, name, time.time_ns(), payload)
        self._is_dirty |= is_added
        return is_added

    def flush(self) -> None:
        """Write out what was added."""
        if self._is_dirty:
            self._is_dirty = False
            _native.log_flush()

    # ---- credit and releases ---------------------------------------------------------------------

    async def run_forever(self) -> None:
        while True:
            await trio.sleep(TICK_S)
            if self._log is not None or self._is_abandoned:
                await trio.to_thread.run_sync(self._tick)

    def _tick(self) -> None:
        with self._lock:
            if self._is_abandoned:
                self._end()
            elif self._log is not None:
                self._release_empty(self._log)
                self._look_at_counters()

    def make_credit(self, size_bytes: int) -> None:
        """Files of so many bytes are about to be appended, at the same time by several threads."""
        wanted = max(self._slack_bytes, APPENDERS_MOST * size_bytes)
        enough = wanted - wanted // 4
        if _native.log_credit(0) >= enough or time.monotonic() < self._draw_at:
            return
        with self._lock:
            left = _native.log_credit(0)
            if self._log is None or left >= enough:
                return
            got = self._log.draw(wanted - left)
            _native.log_credit(got)
            if not got:
                self._draw_at = time.monotonic() + TICK_S

    def _look_at_counters(self) -> None:
        counters = _native.log_counters()
        if counters["failed"] > self._failed:
            self._packing = WRITE_FAILED
        else:
            self._packing = NO_CREDIT if counters["refused"] > self._refused else OPEN
            self._refused = counters["refused"]

    def _release_empty(self, newest: Log) -> None:
        self._left.update(dict(_native.log_left()))
        begin = time.monotonic()
        due = [segno for segno, left in self._left.items() if left >= self._due.get(segno, 0)]
        if not due or begin < self._look_at:
            return
        empty = []
        for segno, live in zip(
            due, _native.live_in(np.array(due, np.uint32).tobytes()), strict=True
        ):
            self._due[segno] = self._left[segno] + live
            if not live:
                empty.append(segno)
        rows = newest.rows_in(empty)
        self._due.update(rows)
        gone = [segno for segno in rows if self._left[segno] >= rows[segno]]
        if gone:
            self._release(newest, gone)
        for segno in gone:
            if _native.segment_known(segno):  # the store still writes into it
                self._due[segno] = self._left[segno] + 1
                continue
            self._segments.discard(segno)
            del self._left[segno], self._due[segno]
        self._look_at = begin + max(LOOK_EVERY_S, LOOK_SHARE * (time.monotonic() - begin))

    def _release(self, opened: Log, segnos: list[int]) -> None:
        self._releasing.update(segnos)
        opened.release(segnos)
        self._releasing.clear()

    # ---- figures ---------------------------------------------------------------------------------

    def room_bytes(self, store_bytes: int) -> int:
        """How much of the store's room is left for others, beside the open log."""
        if self._log is None:
            return store_bytes
        return max(0, store_bytes + _native.log_credit(0) - self._slack_bytes)

    def state(self) -> dict[str, int]:
        counters = _native.log_counters()
        return {
            "packing": self._packing,
            "log_written_bytes": counters["written_bytes"],
            "log_waiting_bytes": counters["waiting_bytes"],
            "log_segments": len(self._segments),
        }
