"""What the store does by itself, once a second: keep limits, follow what other processes did to the
directory, and mend. Index and files are made to agree: what dead writers left is adopted, what is
missing forgotten.

That runs at open, now and then, and when something was found out of place. Other processes may do
the same at the same time: every decision is taken again in the transaction that carries it out.
Files that look like segments and hold no record of this cache are removed.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import time
from pathlib import Path
from typing import Final

from fusecache.store import index as idx
from fusecache.store.attachment import Attachment
from fusecache.store.capacity import ROW_BYTES, Place
from fusecache.store.directory import Directory
from fusecache.store.index import recovery
from fusecache.store.log import Logs
from fusecache.store.reading import Quarantine, Reads
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import SegmentWriter, cut, discard, is_segment, trim
from fusecache.store.segment.holes import is_punched, taken_bytes
from fusecache.store.writing import OpenSegment

# Gone in between; or a directory or a link that somebody put there.
_NOT_A_SEGMENT: Final = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO)
_RECONCILE_SECONDS: Final = 30.0
_USES_SECONDS: Final = 5.0  # after so long others know which segments we read
# A process that was killed before we began lets go of its segments so soon, or it lives.
_DYING_SECONDS: Final = 10.0
_DYING_PAUSE_SECONDS: Final = 1.0
_ADOPTED_WITHIN_SECONDS: Final = 1.0
_ADOPTION_PAUSE_SECONDS: Final = 0.001
_ADOPTION_SECONDS: Final = 0.5  # of each second of housekeeping: readers want the processors, too


def unsealed(place: Place, own: SegmentWriter | None) -> list[int]:
    """Segments to `adopt`, unless their writers live. sqlite3.Error."""
    sealed = {row.segno for row in place.index.segments.all() if row.sealed}
    if own is not None:
        sealed.add(own.segno)
    return [segno for segno in place.directory.segment_numbers() if segno not in sealed]


def tidy(place: Place, own: SegmentWriter | None) -> None:
    """What is left to do after adoption.

    sqlite3.Error, OSError: not finished; nothing is worse than before.
    """
    directory, index = place.directory, place.index
    own_segno = -1 if own is None else own.segno
    for row in index.segments.all():
        if row.segno != own_segno:
            _check(place, row)
    with index.database.transaction():
        # In this transaction no other process is half-way through creating a segment.
        dangling = index.referenced_segments() - {row.segno for row in index.segments.all()}
        directory.remove_unborn_segments()
    for segno in dangling:
        index.delete_rows(segno)


def insert(index: idx.Index, found: recovery.Scan) -> None:
    """Rows for all records of a segment; entries only where their block is known."""
    index.adopt(found.files, found.blocks)
    rows = []
    places = index.lookup_blocks([record.digest for record in found.entries])
    for record in found.entries:
        location = places.get(record.digest)
        if location is not None:
            rows.append(
                idx.file_row(record.dataset, record.path, record.version, record.block, location)
            )
    index.adopt(rows, [])


def reindex_own(place: Place, writer: SegmentWriter) -> None:
    """Rows of the segment we write: whoever built this index read it before its end."""
    with recovery.claimed(writer.path) as (fd, _):
        found = recovery.scan(fd, writer.segno, place.directory.uuid, live=True)
    with place.index.database.transaction():
        row = idx.SegmentRow(writer.segno, False, writer.size, found.fetched_ns)
        place.index.segments.put([row])
    insert(place.index, found)


def _check(place: Place, row: idx.SegmentRow) -> None:
    index, path = place.index, place.directory.segment_path(row.segno)
    sizes = _segment_sizes(place, row.segno)
    if sizes is None:
        return
    size, taken = sizes
    if size <= fmt.SEGMENT_HEADER_BYTES:
        _forget(place, row.segno)
    elif row.sealed and size < row.length:
        place.fault("missing", f"segment {row.segno} of {place.directory.path} was cut")
        index.delete_rows(row.segno, size)
        _count_anew(index, row, row._replace(reserved=fmt.align(size), holes=0).taking(taken))
    elif row.sealed and size > row.length:
        with contextlib.suppress(OSError):
            cut(path, row.length)
    elif row.sealed and taken != row.reserved:
        if taken < row.reserved:  # whoever evicted files was killed
            _forget_punched(place, row.segno)
        _count_anew(index, row, row.taking(taken))


def _count_anew(index: idx.Index, known: idx.SegmentRow, row: idx.SegmentRow) -> None:
    """Unless it is not what was `known` any more."""
    with index.database.transaction():
        if known in index.segments.all():
            index.segments.put([row])


def _forget_punched(place: Place, segno: int) -> None:
    """Rows that lead to what was punched."""
    path = place.directory.segment_path(segno)
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for location in place.index.records_of(segno):
                if is_punched(fd, location):
                    place.index.quarantine(*location[:2])
        finally:
            os.close(fd)


def _segment_size(place: Place, segno: int) -> int | None:
    """The first of `_segment_sizes`."""
    sizes = _segment_sizes(place, segno)
    return None if sizes is None else sizes[0]


def _segment_sizes(place: Place, segno: int) -> tuple[int, int] | None:
    """(length, what it takes on the disk). 0: no file, or another one under this name. None: cannot
    be said now (I/O error).
    """
    path = place.directory.segment_path(segno)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            is_ours = is_segment(fd, segno, place.directory.uuid)
            return (os.fstat(fd).st_size, taken_bytes(fd)) if is_ours else (0, 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _NOT_A_SEGMENT:
            return 0, 0
        place.count_error(place.directory.member_of(segno), error)
        return None


def _forget(place: Place, segno: int) -> None:
    """A segment without a file, or with a useless one: it was not evicted, it was lost."""
    directory, index = place.directory, place.index
    with index.database.transaction():
        row = {row.segno: row for row in index.segments.all()}.get(segno)
        if row is None:
            return  # evicted in between, as it should be
        size = _segment_size(place, segno)
        if size is None or size > fmt.SEGMENT_HEADER_BYTES:
            return
        if size > 0 and not row.sealed and _is_locked(directory.segment_path(segno)):
            return  # a log has just begun it
        place.gone(segno)
        discard(directory.segment_path(segno))
        index.segments.delete(segno)
    index.delete_rows(segno)
    if not directory.is_short():
        place.fault("missing", f"segment {segno} of {directory.path} is missing or another file")


def _is_locked(path: Path) -> bool:
    try:
        with recovery.claimed(path) as (_, live):
            return live
    except OSError:
        return False


def adopt(place: Place, segno: int) -> bool:
    """Take over a segment whose writer died, or that the index does not know. False: its writer
    lives, or is dying.

    sqlite3.Error, OSError: not done; nothing is worse than before.
    """
    directory, index = place.directory, place.index
    try:
        with recovery.claimed(directory.segment_path(segno)) as (fd, live):
            if live:
                return False
            found = recovery.scan(fd, segno, directory.uuid, live=False)
            if found.log is not None:
                os.fsync(fd)  # before rows that lead to intact copies give way
            if not found.empty:
                insert(index, found)
            with index.database.transaction():
                rows = {row.segno: row for row in index.segments.all()}
                row = rows.get(segno)
                if os.fstat(fd).st_nlink == 0 or (row is not None and row.sealed):
                    return True  # another process was faster
                if row is not None and row.log is not None:
                    _settle(index, rows, row, 0 if found.empty else _taken_bytes(found))
                if found.empty:
                    place.gone(segno)
                    discard(directory.segment_path(segno))
                    index.segments.delete(segno)
                else:
                    used = trim(fd, found.used)
                    fetched_ns = max(found.fetched_ns, row.fetched_ns if row else 0)
                    sealed = idx.SegmentRow(segno, True, used, fetched_ns)
                    index.segments.put([sealed.taking(taken_bytes(fd))])
    except OSError as error:
        if error.errno in _NOT_A_SEGMENT:
            return True
        place.count_error(directory.member_of(segno), error)
        if len(directory.members) == 1:
            raise  # the other segments are on the same disk
    return True


def _taken_bytes(found: recovery.Scan) -> int:
    """Of what a log has reserved: the segment, and the rows that are in the index now."""
    return found.used + ROW_BYTES * (len(found.files) + len(found.entries))


def _settle(
    index: idx.Index, rows: dict[int, idx.SegmentRow], adopted: idx.SegmentRow, taken: int
) -> None:
    """What a dead log had reserved for all its segments may lie in one row: whichever is adopted
    first, the others keep what it does not take. Within a transaction.
    """
    rest = adopted.reserved - taken
    others = [row for row in rows.values() if row.log == adopted.log and row != adopted]
    for row in sorted(others, key=lambda row: row.reserved, reverse=True):
        changed = row._replace(reserved=max(0, row.reserved + rest))
        index.segments.put([changed])
        rest += row.reserved - changed.reserved
        if rest >= 0:
            break


class Reconciler:
    """When index and files are compared. `adopted`: segments of dead writers, since the start of
    this process.
    """

    def __init__(self, attachment: Attachment, segment: OpenSegment, logs: Logs) -> None:
        self.adopted = 0
        self._attachment = attachment
        self._segment = segment
        self._logs = logs
        self._at = 0.0
        self._dying_until = time.monotonic() + _DYING_SECONDS

    def run_if_due(self) -> None:
        if self._attachment.take_suspicion() or time.monotonic() >= self._at:
            self.run(_ADOPTION_SECONDS)

    def run(self, within_s: float = math.inf) -> bool:
        """Whether others write segments, or have not died yet. The lock is let go between the
        segments that are adopted: a log leaves many of them. If that takes longer, the rest is left
        to the next call.
        """
        attachment, others_write, took_s = self._attachment, False, 0.0
        with attachment.contained():
            self._at = time.monotonic() + _RECONCILE_SECONDS
            attachment.take_suspicion()
            with attachment.lock:
                place = attachment.sound_place()
                segnos = unsealed(place, self._segment.writer) if place is not None else []
                ours = self._logs.segnos()
            for segno in segnos:
                with attachment.lock:
                    if attachment.is_current(place):
                        begin = time.monotonic()
                        if adopt(place, segno):
                            self.adopted += 1
                            took_s += time.monotonic() - begin
                        else:  # it stays, however often it is looked at
                            others_write |= segno not in ours
                if took_s > within_s:
                    self._at = 0.0
                    return others_write
                time.sleep(_ADOPTION_PAUSE_SECONDS)  # a lock is not handed over
            if others_write and time.monotonic() < self._dying_until:
                self._at = time.monotonic() + _DYING_PAUSE_SECONDS
            with attachment.lock:
                self._tidy(place)
        return others_write

    def _tidy(self, place: Place | None) -> None:
        if self._attachment.is_current(place):
            tidy(place, self._segment.writer)
            self._attachment.saw(place.directory.segment_numbers())

    def adopt_orphans(self) -> None:
        """Take over what dead writers have left. For a while after our start it waits a second for
        those that seem to live: the threads of a process that was killed may be in the kernel
        still.
        """
        end = min(time.monotonic() + _ADOPTED_WITHIN_SECONDS, self._dying_until)
        while self.run() and time.monotonic() < end:
            time.sleep(_ADOPTED_WITHIN_SECONDS / 10)


class Housekeeping:
    """See `run`."""

    def __init__(
        self,
        attachment: Attachment,
        segment: OpenSegment,
        reads: Reads,
        quarantine: Quarantine,
        reconciler: Reconciler,
    ) -> None:
        self._attachment = attachment
        self._segment = segment
        self._reads = reads
        self._quarantine = quarantine
        self._reconciler = reconciler
        self._uses_at = 0.0

    def limit_to(self, limit_bytes: int) -> None:
        """Another limit from now on; at once, whatever goes for it. Any thread."""
        attachment = self._attachment
        with attachment.lock, attachment.contained():
            if limit_bytes < attachment.settings.limit_bytes:
                self._segment.seal()  # it can go, too
            attachment.limit_to(limit_bytes)
            self._segment.keep_limits()
            self._segment.note_room()

    def run(self) -> None:
        """To be called about once a second, from any thread. May take seconds (rebuild)."""
        attachment, is_off = self._attachment, False
        with attachment.lock, attachment.contained():
            is_off = attachment.is_closed or not self._mend()
            if not is_off:
                self._catch_up()
        if is_off:
            return
        self._reconciler.run_if_due()
        with attachment.lock, attachment.contained():
            self._segment.keep_limits()

    def _mend(self) -> bool:
        """Follow what became of the directories and the index. False: there is nothing sound."""
        attachment, directory = self._attachment, self._attachment.given.opened
        if directory is not None:
            self._follow_failures(directory)
        if directory is not None and not directory.is_present():
            attachment.lose()
            directory = None
        if directory is None:
            directory = attachment.reattach()
            if directory is None:
                return False
        attachment.current.mend(directory)
        return attachment.current.is_sound()

    def _follow_failures(self, directory: Directory) -> None:
        """What a directory that was put out of service held is gone."""
        failed = self._attachment.given.newly_failed(directory)
        if not failed:
            return
        self._attachment.suspect()
        self._segment.abandon_in(failed)
        self._reads.announce_gone(
            lambda segno: (
                bool(directory.member_of(segno).why_out)
                or not directory.segment_path(segno).exists()
            )
        )

    def _catch_up(self) -> None:
        """With what this process has to tell the others, and they us."""
        attachment, index = self._attachment, self._attachment.current.index
        assert index is not None
        if attachment.follow_limit():
            self._segment.seal_if_larger(attachment.segment_bytes)
        self._quarantine.drain(attachment)
        if attachment.reuse is not None and time.monotonic() >= self._uses_at:
            self._uses_at = time.monotonic() + _USES_SECONDS
            now_ns = time.time_ns()
            for segno in attachment.reuse.take_used(now_ns):
                index.pending.touch(segno, now_ns)
        index.flush()
        present = {row.segno for row in index.segments.all()}
        attachment.saw(present)
        self._reads.announce_gone(lambda segno: segno not in present)
