"""Segment files: one writer each, aligned appends, and verified reads of whole records.

INVARIANT: an offset of a segment is written at most once; after a failed write the position moves
past the records that arrived whole, no further, and the caller seals. Ownership is the exclusive
flock on the descriptor that wrote the header, taken before the file gets its name.
This module knows neither index nor capacity.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fusecache.base import digest
from fusecache.base.errors import CacheFault
from fusecache.store.segment import format as fmt
from fusecache.store.segment.holes import data_from
from fusecache.store.types import ALIGNMENT, BLOCK_BYTES, Location

# Largest record: 4 MiB of payload, 64 chunk sums, the longest path; and room to align both ends.
_BUFFER_BYTES = BLOCK_BYTES + (80 << 10)
_WINDOW_BYTES = 256 << 10


def try_direct(fd: int) -> bool:
    """Switch the descriptor to O_DIRECT where the file system has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _leave_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


class SegmentWriter:
    """The one writer of a new segment. Not thread-safe."""

    def __init__(
        self,
        path: Path,
        segno: int,
        size: int,
        uuid: bytes,
        algorithm: int,
        rows_most: int | None = None,
    ) -> None:
        """Create, lock and preallocate the file. `rows_most`: by so many bytes the index may grow
        for its records. OSError: nothing is left behind.
        """
        self.path = path
        self.segno = segno
        self.size = size
        self._rows_left = rows_most
        self._uuid = uuid
        self._algorithm = algorithm
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        temporary = path.with_suffix(".tmp")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        self._fd = os.open(temporary, flags, 0o600)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._fd, 0, size)
            try_direct(self._fd)
            header = fmt.SegmentHeader(segno, uuid, time.time_ns(), algorithm)
            self._buffer[: fmt.SEGMENT_HEADER_BYTES] = fmt.pack_segment_header(header)
            _, error = self._write(0, fmt.SEGMENT_HEADER_BYTES)
            if error is not None:
                raise error
            temporary.rename(path)
        except BaseException:
            # The space must come back even if somebody opened the file meanwhile.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, 0)
            with contextlib.suppress(OSError):
                temporary.unlink()
            os.close(self._fd)
            raise
        self.position = fmt.SEGMENT_HEADER_BYTES
        self._tail = b""  # what is written of the page that the next record begins in

    def has_room(self, record_len: int, rows_bytes: int = 0) -> bool:
        """For records of that length together, and for their rows in the index."""
        has_rows = self._rows_left is None or rows_bytes <= self._rows_left
        return self.position + record_len <= self.size and has_rows

    def fitting(self, record_len: int, rows_bytes: int) -> int:
        """How many such records there is room for."""
        count = (self.size - self.position) // record_len
        if self._rows_left is not None and rows_bytes:
            count = min(count, max(0, self._rows_left) // rows_bytes)
        return count

    def take_rows(self, rows_bytes: int) -> None:
        """The index grows by so much for what was appended."""
        if self._rows_left is not None:
            self._rows_left -= rows_bytes

    def is_linked(self) -> bool:
        """False when the file was deleted (with the cache directory, say) or cut."""
        status = os.fstat(self._fd)
        return status.st_nlink > 0 and status.st_size == self.size

    def append(
        self, records: Iterable[tuple[fmt.Record, digest.Buffer]], written: list[Location]
    ) -> None:
        """Write records, each with its payload, from the current position on: one write for as
        many as the buffer holds. They must fit (`has_room`).

        `written` gets the places of those that are in the file, in order, also when this raises
        OSError (seal then).
        """
        buffer, waiting = self._buffer, list[Location]()
        begin, end = self._begin()
        for record, payload in records:
            if fmt.align(end) + record.record_len > len(buffer):
                self._append(waiting, begin, end, written)
                waiting = []
                begin, end = self._begin()
            gap_at, end = end, fmt.record_begin(end, record.header_len)
            buffer[gap_at:end] = bytes(end - gap_at)
            at = begin + end
            header = fmt.pack_record(record, self._algorithm, self._uuid, self.segno, at)
            payload_at = end + record.header_len
            payload_end = payload_at + record.payload_len
            buffer[end:payload_at] = header
            buffer[payload_at:payload_end] = payload
            end += record.record_len
            if payload_end < end:
                buffer[payload_end:end] = bytes(end - payload_end)
            waiting.append(Location(self.segno, at, record.header_len, record.payload_len))
        self._append(waiting, begin, end, written)

    def _begin(self) -> tuple[int, int]:
        """Where the page lies in which the position is, and what the buffer has of it now."""
        length = len(self._tail)
        self._buffer[:length] = self._tail
        return self.position - length, length

    def _append(
        self, waiting: list[Location], begin: int, length: int, written: list[Location]
    ) -> None:
        """The first `length` bytes of the buffer to `begin`, and zeros up to the end of the page:
        what the first page has already is written again as it is.
        """
        self._buffer[length : fmt.align(length)] = bytes(fmt.align(length) - length)
        done, error = self._write(begin, fmt.align(length))
        for location in waiting:
            _, _, header_len, payload_len = location
            end = location.offset + fmt.record_length(header_len, payload_len)
            if end > begin + done:
                break
            written.append(location)
            self.position = end
        if error is not None:
            raise error
        self._tail = self._buffer[length // ALIGNMENT * ALIGNMENT : length]

    def _write(self, offset: int, length: int) -> tuple[int, OSError | None]:
        """The start of the buffer to `offset`; returns how much of it arrived."""
        done = 0
        with memoryview(self._buffer) as view:
            while done < length:
                try:
                    count = os.pwrite(self._fd, view[done:length], offset + done)
                except OSError as error:
                    # Some file systems accept the flag and refuse the write.
                    if not fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DIRECT:
                        return done, error
                    _leave_direct(self._fd)
                    continue
                done += count
                if done % ALIGNMENT:
                    _leave_direct(self._fd)
        return done, None

    def seal(self) -> int:
        """Cut the file to the pages in use, give the lock up; returns its length."""
        with contextlib.suppress(OSError):
            trim(self._fd, self.position)
        os.close(self._fd)
        return fmt.align(self.position)

    def abandon(self) -> None:
        """Close without sealing (the file is gone, or a test plays a crash)."""
        os.close(self._fd)


class RecordReader:
    """Reads and verifies whole records from descriptors the caller owns. Not thread-safe."""

    def __init__(self) -> None:
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)

    def read(self, fd: int, location: Location, uuid: bytes) -> tuple[fmt.Record, bytes]:
        """Header and payload, chunk sums verified. CacheFault: anything is not as it should be."""
        skipped = location.offset % ALIGNMENT
        used = skipped + location.header_len + location.payload_len
        if fmt.align(used) > _BUFFER_BYTES:
            raise CacheFault("record longer than a block")
        try:
            got = pread_into(fd, self._buffer, fmt.align(used), location.offset - skipped)
        except OSError as error:
            raise CacheFault(f"read of a segment failed: {error.strerror}") from error
        if got < used:
            raise CacheFault("segment ends within a record")
        data = self._buffer[skipped:used]
        record = fmt.parse_record(data, (uuid, location.segno, location.offset))
        if record is None:
            raise CacheFault("record header does not match its checksum")
        if (record.header_len, record.payload_len) != location[2:]:
            raise CacheFault("record is not the one that was indexed")
        payload = data[location.header_len :]
        if digest.chunk_sums(payload) != list(record.chunk_sums):
            raise CacheFault("payload does not match its checksums")
        return record, payload


def pread_into(fd: int, buffer: mmap.mmap, length: int, offset: int) -> int:
    """Fill the start of `buffer`; returns how many bytes there were before the end of the file."""
    done = 0
    with memoryview(buffer) as view:
        while done < length:
            count = os.preadv(fd, [view[done:length]], offset + done)
            if count == 0:
                break
            done += count
            if done % ALIGNMENT and done < length:
                break  # end of file: the next aligned read could only return nothing
    return done


def read_through(path: Path, offset: int) -> None:
    """Read where a record begins from the disk itself. OSError: the disk fails, or no file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        try_direct(fd)
        with mmap.mmap(-1, _WINDOW_BYTES) as buffer:
            pread_into(fd, buffer, _WINDOW_BYTES, offset // ALIGNMENT * ALIGNMENT)
    finally:
        os.close(fd)


def walk(fd: int, segno: int, uuid: bytes) -> Iterator[tuple[int, fmt.Record]]:
    """(offset, record) of every valid record header in the file, in order.

    Where no valid header is found the search goes on at the next multiple of 512 that could be
    one, so that one damaged header costs one record.
    """
    size = os.fstat(fd).st_size
    offset = fmt.SEGMENT_HEADER_BYTES
    window, begin, span = b"", 0, ALIGNMENT
    while offset < size:
        if not begin <= offset <= begin + len(window) - ALIGNMENT:
            try:
                window, begin = os.pread(fd, span, offset), offset
            except OSError:
                window = b""  # one unreadable sector: look for the next readable one
        at = offset - begin
        record = None
        header_len = fmt.header_length_of(window[at : at + ALIGNMENT])
        if header_len is not None:
            if header_len <= ALIGNMENT:
                place = (uuid, segno, offset)
                record = fmt.parse_record(window[at : at + header_len], place)
            else:
                record = read_header(fd, segno, offset, uuid)
        if record is not None and offset + record.record_len <= size:
            yield offset, record
            offset += record.record_len
            # Small records are close together: one read for many. Large ones: headers only.
            span = _WINDOW_BYTES if record.record_len <= _WINDOW_BYTES // 4 else ALIGNMENT
        else:
            span = ALIGNMENT if not window else _WINDOW_BYTES
            offset += fmt.next_header(window[at:])
            if offset >= begin + len(window):  # of files that were evicted nothing is left
                offset = max(offset, data_from(fd, offset))


def trim(fd: int, used: int) -> int:
    """Cut a segment file behind what is used, with zeros up to a whole page; its length. OSError"""
    os.ftruncate(fd, used)
    if fmt.align(used) > used:
        os.ftruncate(fd, fmt.align(used))
    return fmt.align(used)


def cut(path: Path, length: int) -> None:
    """Truncate a segment file; never what a link at its place points to. OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.ftruncate(fd, length)
    finally:
        os.close(fd)


def discard(path: Path) -> None:
    """Remove a segment file; its space returns even while other processes hold it open."""
    with contextlib.suppress(OSError):
        cut(path, 0)
    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()


def is_segment(fd: int, segno: int, uuid: bytes) -> bool:
    """Is the open file the segment of this number, and not another under its name?

    The segment header says so, or (when it is damaged) the place of the first record. OSError.
    """
    header = fmt.parse_segment_header(os.pread(fd, fmt.SEGMENT_HEADER_BYTES, 0))
    if header is not None:
        return (header.segno, header.uuid) == (segno, uuid)
    return read_header(fd, segno, fmt.SEGMENT_HEADER_BYTES, uuid) is not None


def read_header(fd: int, segno: int, offset: int, uuid: bytes) -> fmt.Record | None:
    """The valid record header at this place, or None. An unreadable sector reads as None too."""
    try:
        data = os.pread(fd, ALIGNMENT, offset)
        header_len = fmt.header_length_of(data)
        if header_len is not None and header_len > len(data):
            data += os.pread(fd, fmt.align(header_len) - len(data), offset + len(data))
    except OSError:
        return None
    return fmt.parse_record(data, (uuid, segno, offset))
