"""From segments back to an index: scan, adopt, rebuild.

A scan reads record headers only, and the payload of the last record, the one that a killed writer
may have torn. What a log wrote before the machine was started anew is read whole: a power cut may
have left a header without its payload, and the intact copy that it was made of must not give way.
So is a record with a hole: it was evicted, and its header may be left in a page of its neighbour.
INVARIANT: only a file whose flock we got is cut or removed; a live writer's is only read.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fusecache.base.errors import CacheFault
from fusecache.store import index as idx
from fusecache.store.directory import Directory
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import RecordReader, trim, try_direct, walk
from fusecache.store.segment.holes import is_punched, taken_bytes
from fusecache.store.types import Location, Version

_THREADS: Final = 8
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(slots=True)
class Scan:
    """What one segment holds. `entries` are type-2 records: rows once their block is found."""

    segno: int
    live: bool
    used: int
    fetched_ns: int = 0
    files: list[idx.FileRow] = field(default_factory=list)
    blocks: list[idx.BlockRow] = field(default_factory=list)
    entries: list[fmt.Record] = field(default_factory=list)
    log: fmt.LogMark | None = None

    @property
    def empty(self) -> bool:
        return not self.blocks and not self.entries

    def add(self, location: Location, record: fmt.Record) -> None:
        """The next record."""
        self.used = location.offset + record.record_len
        self.fetched_ns = max(self.fetched_ns, record.fetched_ns)
        if record.type == fmt.TYPE_ENTRY:
            self.entries.append(record)
            return
        self.blocks.append(idx.block_row(record.digest, location))
        self.files.append(
            idx.file_row(record.dataset, record.path, record.version, record.block, location)
        )


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[tuple[int, bool]]:
    """(descriptor, live): live means that a writer holds the file's lock; else we hold it.

    OSError: cannot be opened (gone, not a regular file).
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            live = False
        except BlockingIOError:
            live = True
        yield fd, live
    finally:
        os.close(fd)


def scan(fd: int, segno: int, uuid: bytes, live: bool) -> Scan:
    """All records; those of a live writer as far as it has come."""
    header = b""
    with contextlib.suppress(OSError):
        header = os.pread(fd, fmt.SEGMENT_HEADER_BYTES, 0)
    found = Scan(segno, live, fmt.SEGMENT_HEADER_BYTES, log=fmt.parse_log_mark(header))
    is_damaged = fmt.parse_segment_header(header) is None  # by a power cut, or a log's all the same
    is_foreign = found.log is not None and found.log.boot != boot_id()
    is_doubtful = not live and (is_damaged or is_foreign)
    reader = RecordReader()
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try_direct(own)
        last: tuple[Location, fmt.Record] | None = None
        for offset, record in walk(fd, segno, uuid):
            if last is not None and not (
                (is_doubtful or is_punched(fd, last[0])) and not _intact(reader, own, last[0], uuid)
            ):
                found.add(*last)
            last = Location(segno, offset, record.header_len, record.payload_len), record
        if last is not None and _intact(reader, own, last[0], uuid):
            found.add(*last)
    finally:
        os.close(own)
    return found


def boot_id() -> bytes:
    """Which run of the machine this is; nothing that another had, at least."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return secrets.token_bytes(16)


def _intact(reader: RecordReader, fd: int, location: Location, uuid: bytes) -> bool:
    if location.payload_len == 0:
        return True
    try:
        reader.read(fd, location, uuid)
    except CacheFault:
        return False
    return True


def rebuild(directory: Directory, generation: int) -> None:
    """Build index `generation` from all segments. The caller holds the index lock.

    Segments of dead writers are cut and sealed, files without a record removed.
    sqlite3.Error, OSError: could not be built; nothing is left behind.
    """
    temporary = directory.generations.folder / f"{generation:08d}.tmp"
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    connection = idx.create(temporary)
    try:
        _fill(directory, connection)
        idx.finish(connection)
        temporary.chmod(0o600)
        temporary.replace(directory.generations.path(generation))
    except BaseException:
        connection.close()
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    directory.generations.remove(generation)


def _fill(directory: Directory, connection: sqlite3.Connection) -> None:
    connection.execute(
        "CREATE TEMP TABLE entries"
        " (digest, dataset, path, ino, size, mtime_ns, ctime_ns, block, fetched_ns)"
    )
    segments: dict[int, idx.SegmentRow] = {}
    for found, length, taken in _scans(directory):
        row = _segment_row(found, length, taken)
        connection.execute("BEGIN")
        connection.execute(idx.INSERT_SEGMENT, idx.segment_values(row))
        connection.executemany(idx.ADOPT_BLOCK, found.blocks)
        connection.executemany(idx.ADOPT_FILE, found.files)
        connection.executemany(
            "INSERT INTO temp.entries VALUES (?,?,?,?,?,?,?,?,?)",
            (
                (
                    record.digest,
                    record.dataset,
                    record.path,
                    *(fmt.signed(value) for value in record.version),
                    record.block,
                    fmt.signed(record.fetched_ns),
                )
                for record in found.entries
            ),
        )
        connection.execute("COMMIT")
        segments[found.segno] = row
    _resolve(connection, segments)
    connection.execute("BEGIN")
    connection.executemany(
        idx.INSERT_SEGMENT, [idx.segment_values(row) for row in segments.values()]
    )
    connection.execute("COMMIT")


def _segment_row(found: Scan, length: int, taken: int) -> idx.SegmentRow:
    """A log that is being written keeps what it has reserved: the header says it."""
    if found.live and found.log is not None:
        return idx.SegmentRow(found.segno, False, found.log.reserved_bytes, found.log.log)
    row = idx.SegmentRow(found.segno, not found.live, length, fmt.signed(found.fetched_ns))
    return row if found.live else row.taking(taken)


def _resolve(connection: sqlite3.Connection, segments: dict[int, idx.SegmentRow]) -> None:
    """Rows for the file entries whose block was found; the block's segment counts as fetched."""
    query = connection.execute(
        "SELECT e.dataset, e.path, e.ino, e.size, e.mtime_ns, e.ctime_ns, e.block, e.fetched_ns,"
        " b.segno, b.offset, b.header_len, b.payload_len"
        " FROM temp.entries e JOIN blocks b ON b.digest = e.digest ORDER BY e.rowid"
    )
    writing = connection.cursor()
    connection.execute("BEGIN")
    while rows := query.fetchmany(1000):
        for dataset, path, ino, size, mtime_ns, ctime_ns, block, fetched_ns, *place in rows:
            version = Version(fmt.unsigned(ino), fmt.unsigned(size), mtime_ns, ctime_ns)
            location = Location(*place)
            writing.execute(idx.ADOPT_FILE, idx.file_row(dataset, path, version, block, location))
            row = segments[location.segno]
            if row.log is None and row.fetched_ns < fetched_ns:
                segments[location.segno] = row._replace(fetched_ns=fetched_ns)
    connection.execute("COMMIT")
    connection.execute("DROP TABLE temp.entries")


def _scans(directory: Directory) -> Iterator[tuple[Scan, int, int]]:
    """(scan, length, what it takes on the disk) of every segment in the order of their numbers; few
    in memory.
    """
    room = threading.Semaphore(2 * _THREADS)

    def one(segno: int) -> tuple[Scan, int, int] | None:
        room.acquire()
        path = directory.segment_path(segno)
        try:
            with claimed(path) as (fd, live):
                found = scan(fd, segno, directory.uuid, live)
                if live:
                    return found, os.fstat(fd).st_size, 0
                if found.empty:
                    os.ftruncate(fd, 0)
                    path.unlink()
                    return None
                return found, trim(fd, found.used), taken_bytes(fd)
        except OSError:
            return None  # gone, unreadable or no regular file: not ours to use

    with ThreadPoolExecutor(_THREADS) as pool:
        futures: list[Future[tuple[Scan, int, int] | None]] = [
            pool.submit(one, segno) for segno in directory.segment_numbers()
        ]
        futures.reverse()
        try:
            while futures:
                result = futures.pop().result()
                room.release()
                if result is not None:
                    yield result
        finally:
            for future in futures:
                future.cancel()
                room.release()
