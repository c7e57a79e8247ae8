"""A log: the packed segments of one rewriting of a dataset (docs/LOG.md), as the store sees them.

The packer (native/log/) writes the records, into the descriptors that it is given; the store keeps
numbers, space and the end. While a log lives, the index has no rows of what was written into it;
when its writer dies or ends it, its segments are orphans, and adopted as any other.

INVARIANT: what a log may write is reserved in the row of its first segment before it is written,
with the index rows that it will need one day; never by an eviction.
INVARIANT: a segment is deleted only after everything written before has reached its disk, or that
disk, one of several, has failed.
INVARIANT: the lock of a segment file is held until it is deleted, or the log ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fusecache.store import index as idx
from fusecache.store.attachment import Attachment
from fusecache.store.capacity import ROW_BYTES, Place, evict, log_members, log_room_bytes
from fusecache.store.directory import Directory, Member
from fusecache.store.index.recovery import boot_id
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import discard, try_direct
from fusecache.store.types import ALIGNMENT
from fusecache.store.writing import OpenSegment


class Log:
    """`segnos` are consecutive; `fds` belong to them in that order, open and locked until `end` or
    the segment's release. `credit_bytes` may be appended at first (headers of segments apart);
    `draw` gets more. Any thread.
    """

    def __init__(
        self, logs: Logs, place: Place, chunks: int, slack_bytes: int, record_bytes: int
    ) -> None:
        """See `Logs.begin`. OSError, sqlite3.Error: nothing is left behind."""
        assert chunks > 0
        self.directory = place.directory
        self.uuid = place.directory.uuid
        self.algorithm = place.directory.algorithm
        self.segnos: list[int] = []
        self.fds: list[int] = []
        self.credit_bytes = 0
        self.is_finished = False
        self._logs = logs
        self._record_bytes = record_bytes
        self._rows: dict[int, idx.SegmentRow] = {}  # as they are to be in any index
        self._open: dict[int, int] = {}  # number -> descriptor
        self._members: list[Member] = []  # in which its segments lie
        if log_room_bytes(place, place.index.segments.all()) < slack_bytes:
            place.index.database.checkpoint()  # what SQLite's log takes is room
        try:
            with place.index.database.transaction():
                self._begin(place, chunks, slack_bytes)
        except BaseException:
            for segno, fd in self._open.items():
                discard(place.directory.segment_path(segno))
                os.close(fd)
            raise

    def _begin(self, place: Place, chunks: int, slack_bytes: int) -> None:
        rows = place.index.segments.all()
        headers = chunks * fmt.SEGMENT_HEADER_BYTES
        self._members = log_members(place, rows)
        room = log_room_bytes(place, rows, self._members)
        credit = self._fitting(slack_bytes, room - headers)
        if credit <= 0:
            return
        known = max(self._logs.attachment.highest_segno, *(row.segno for row in rows), 0)
        first = place.directory.next_segno(known, chunks)
        reserved = headers + credit + self._rows_bytes(credit)
        for segno in range(first, first + chunks):
            mark = fmt.LogMark(first, reserved if segno == first else 0, boot_id())
            header = fmt.SegmentHeader(segno, self.uuid, time.time_ns(), self.algorithm)
            data = fmt.add_log_mark(fmt.pack_segment_header(header), mark)
            self._open[segno] = self._create(place, segno, data)
            self._rows[segno] = idx.SegmentRow(segno, False, mark.reserved_bytes, first)
        # Less, if a directory has just failed.
        room = log_room_bytes(place, rows, self._members)
        credit = min(credit, self._fitting(slack_bytes, room - headers))
        if credit <= 0:
            raise OSError(errno.ENOSPC, "no cache directory has room for a log")
        place.index.segments.put(list(self._rows.values()))
        self.credit_bytes = credit
        self.segnos = list(self._open)
        self.fds = list(self._open.values())

    def _create(self, place: Place, segno: int, header: bytes) -> int:
        """A segment in one of the directories, without those that fail."""
        while True:
            path = place.directory.place_segment(segno, self._members)
            try:
                return _create(path, header)
            except OSError as error:
                member = place.directory.member_of(segno)
                place.count_error(member, error)
                if len(self._members) == 1:
                    raise
                self._members.remove(member)

    def _rows_bytes(self, length: int) -> int:
        return length * ROW_BYTES // self._record_bytes

    def _fitting(self, wanted: int, room: int) -> int:
        """How much of `wanted` can be appended if `room` bytes are reserved for it."""
        fitting = min(wanted, room * self._record_bytes // (self._record_bytes + ROW_BYTES))
        return fitting // ALIGNMENT * ALIGNMENT

    # ---- space -----------------------------------------------------------------------------------
    def room_bytes(self) -> int:
        """How much `draw` would get, were all of it asked for."""
        with self._logs.sharing() as place:
            if place is None or place.directory is not self.directory or self.is_finished:
                return 0
            room = log_room_bytes(place, place.index.segments.all(), self._members)
            return self._fitting(room, room)
        return 0

    def draw(self, more_bytes: int) -> int:
        """Reserve more; how much of it may be appended now. 0: no room."""
        with self._logs.sharing() as place:
            if place is None or place.directory is not self.directory or self.is_finished:
                return 0
            first = self.segnos[0]
            if log_room_bytes(place, place.index.segments.all(), self._members) < more_bytes:
                place.index.database.checkpoint()
            with place.index.database.transaction():
                room = log_room_bytes(place, place.index.segments.all(), self._members)
                got = self._fitting(more_bytes, room)
                if got <= 0:
                    return 0
                row = self._rows[first]
                row = row._replace(reserved=row.reserved + got + self._rows_bytes(got))
                place.index.segments.put([row])
                self._mark(first, row.reserved)
            self._rows[first] = row
            return got
        return 0

    def finish(self, ends: Iterable[tuple[int, int, int]]) -> None:
        """All is written, so long are the files (segment, bytes, errno of a write that failed or
        0): what was reserved beyond is given back.
        """
        told = {segno: (length, error) for segno, length, error in ends}
        self.is_finished = True
        with self._logs.sharing() as place:
            for segno, fd in self._open.items():
                length, error = told.get(segno, (0, 0))
                if error and place is not None:
                    member = place.directory.member_of(segno)
                    place.count_error(member, OSError(error, os.strerror(error)))
                length = max(length, os.fstat(fd).st_size)
                reserved = length + self._rows_bytes(length)
                self._rows[segno] = self._rows[segno]._replace(reserved=reserved)
                with contextlib.suppress(OSError):  # of one disk, the rows are of all
                    self._mark(segno, reserved)
            if place is not None:
                self.put_rows(place)

    def put_rows(self, place: Place) -> None:
        """Into an index that others built, perhaps, or that could not be written before."""
        if place.directory is self.directory:
            rows = [r for r in self._rows.values() if os.fstat(self._open[r.segno]).st_nlink]
            with place.index.database.transaction():
                place.index.segments.put(rows)

    def _mark(self, segno: int, reserved_bytes: int) -> None:
        """For whoever builds an index while the log lives."""
        fd = os.open(f"/proc/self/fd/{self._open[segno]}", os.O_RDWR | os.O_CLOEXEC)
        try:
            header = os.pread(fd, fmt.SEGMENT_HEADER_BYTES, 0)
            mark = fmt.LogMark(self.segnos[0], reserved_bytes, boot_id())
            os.pwrite(fd, fmt.add_log_mark(header, mark), 0)
        finally:
            os.close(fd)

    # ---- the end of segments ---------------------------------------------------------------------
    def rows_in(self, segnos: Sequence[int]) -> dict[int, int]:
        """How many files the index has in each of the segments. Segments of logs of this process
        have none that matter; one that others write, or that cannot be looked at now, is missing.
        """
        with self._logs.sharing() as place:
            if place is None or place.directory is not self.directory:
                return {}
            place.index.flush()
            ours = self._logs.segnos()
            opened = {row.segno for row in place.index.segments.all() if not row.sealed} - ours
            known = [segno for segno in segnos if segno not in opened]
            counts = place.index.file_rows_in([segno for segno in known if segno not in ours])
            return {segno: counts.get(segno, 0) for segno in known}
        return {}

    def reserved(self) -> dict[int, int]:
        """Bytes of all segments of the directory, as far as they can be known now."""
        with self._logs.sharing() as place:
            if place is not None and place.directory is self.directory:
                return {row.segno: row.reserved for row in place.index.segments.all()}
        return {}

    def release(self, segnos: Sequence[int]) -> int:
        """See `Logs.release`."""
        return self._logs.release(self.directory, segnos)

    def held(self) -> list[int]:
        """Segments that are not released yet."""
        return list(self._open)

    def let_go(self, segno: int) -> bool:
        """It was deleted. True: it was the last one."""
        del self._rows[segno]
        os.close(self._open.pop(segno))
        return not self._open

    def end(self) -> None:
        """Give the descriptors up (nothing is written any more): what is left will be adopted."""
        with self._logs.forgetting(self):
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()
            self._rows.clear()
            self.is_finished = True


class Logs:
    """Those of this process that have not ended, the latest last."""

    def __init__(self, attachment: Attachment, segment: OpenSegment) -> None:
        self.attachment = attachment
        self._segment = segment
        self._logs: list[Log] = []

    def __iter__(self) -> Iterator[Log]:
        return iter(list(self._logs))

    def sharing(self) -> AbstractContextManager[Place | None]:
        return self.attachment.sharing()

    def begin(self, chunks: int, slack_bytes: int, record_bytes: int = ALIGNMENT) -> Log | None:
        """A log of so many segments that may at first be filled with `slack_bytes`, or with what
        there is room for without an eviction. None: there is none; the directory cannot be used.

        `record_bytes`: mean length of the records to come (the index needs room for their rows).
        """
        with self.sharing() as place:
            if place is None:
                return None
            self.put_rows(place)
            if log_room_bytes(place, place.index.segments.all()) < 2 * slack_bytes:
                self._segment.seal()  # what is reserved for it and not written is room for the log
            log = Log(self, place, chunks, slack_bytes, record_bytes)
            if not log.segnos:
                return None
            self.attachment.saw(log.segnos)
            self._logs.append(log)
            return log
        return None

    def seal_in(self, segnos: Collection[int]) -> bool:
        """Whether the segment that is being written was among these: nothing is put there now."""
        with self.sharing() as place:
            return place is not None and self._segment.seal_if_in(segnos)
        return False

    def put_rows(self, place: Place) -> None:
        """Into an index that others built, perhaps."""
        for log in self:
            log.put_rows(place)

    def segnos(self) -> set[int]:
        return {segno for log in self for segno in log.segnos}

    @contextlib.contextmanager
    def forgetting(self, log: Log) -> Iterator[None]:
        """For a log that ends: its segments will be orphans."""
        with self.attachment.lock:
            yield
            if log in self._logs:
                self._logs.remove(log)
            self.attachment.suspect()

    def end_finished(self) -> None:
        for log in self:
            if log.is_finished:
                log.end()

    # ---- the end of segments ---------------------------------------------------------------------
    def release(self, directory: Directory, segnos: Sequence[int]) -> int:
        """Delete segments to which nothing leads any more: sealed ones, and those of finished logs
        of this process. Others stay, and what another process has evicted counts nothing.

        Returns the bytes that were given back. Waits for the disks: `syncfs`. One of several that
        fails is counted and does not hold the others up: what moved to it may have to be fetched
        again.
        """
        disks = {member.device: member for member in directory.in_service()}
        if not segnos:
            return 0
        failed = [
            (member, error)
            for member in disks.values()
            if (error := _sync_file_system(member.path)) is not None
        ]
        freed, gone = 0, list[idx.SegmentRow]()
        with self.sharing() as place:
            if place is None or place.directory is not directory:
                return 0
            for member, error in failed:
                place.count_error(member, error)
            if len(failed) == len(disks):
                return 0
            ours = {n: log for log in self if log.is_finished for n in log.held()}
            with place.index.database.transaction():
                wanted = set(segnos)
                for row in place.index.segments.all():
                    if row.segno in wanted and (row.sealed or row.segno in ours):
                        evict(place, row.segno)
                        gone.append(row)
            freed = sum(row.reserved for row in gone)
            for row in gone:
                log = ours.get(row.segno)
                if log is not None and log.let_go(row.segno):
                    self._logs.remove(log)  # that was the last one
        for row in gone:
            with self.sharing() as place:
                if place is not None and place.directory is directory:
                    place.index.delete_rows(row.segno)
        return freed

    def unused(self) -> tuple[Directory | None, list[int]]:
        """Sealed segments to which no file's row leads, and the directory that they are in."""
        with self.sharing() as place:
            if place is not None:
                place.index.flush()
                return place.directory, place.index.segments.unused()
        return None, []


def _create(path: Path, header: bytes) -> int:
    """A new, locked segment file with this header. OSError: nothing is left behind."""
    temporary = path.with_suffix(".tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(fd, header, 0)
        try_direct(fd)
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        os.close(fd)
        raise
    return fd


def _sync_file_system(directory: Path) -> OSError | None:
    """None: everything that was written there has reached the disk."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        return error
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) == 0:
            return None
        return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(fd)
