"""The index: which block lies where. A SQLite database that is only a cache of the segments.

Every row carries a checksum; a row that fails it is reported, never returned, and replaced by the
next put of that file or block.
INVARIANT: a row is returned only for the dataset, path and version that it was written for (inode
number 0, in a row or a question: it does not count).
Rows to come are kept in memory (at most PENDING_ROWS_MAX), visible to this process at once.

Connections: one for writing, guarded by the caller (the store's write lock); a few for reading,
handed out one thread at a time. Errors of SQLite leave this module as they are (`ERRORS`);
`damage` says whether one of them means that the file is broken.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import xxhash

from fusecache import digest, trust
from fusecache.store.format import align, signed, unsigned, wrap_version
from fusecache.store.types import BLOCK_BYTES, Location, Version

SCHEMA_VERSION: Final = 1
BATCH_ROWS: Final = 256
BATCH_SECONDS: Final = 0.2
PENDING_ROWS_MAX: Final = 8192
_BUSY_SECONDS: Final = 10.0
_READERS_KEPT: Final = 8
_PAGE_ROWS: Final = 1000
# Small transactions keep the WAL small, which the capacity check counts on.
_DELETE_ROWS: Final = 128

TABLES: Final = """
CREATE TABLE segments (segno INTEGER PRIMARY KEY, sealed, reserved, fetched_ns, sum);
CREATE TABLE blocks (digest BLOB PRIMARY KEY, segno, offset, header_len, payload_len, sum)
  WITHOUT ROWID;
CREATE TABLE files (dir BLOB, name BLOB, block, ino, size, mtime_ns, ctime_ns,
  segno, offset, header_len, payload_len, sum, PRIMARY KEY (dir, name, block)) WITHOUT ROWID;
"""
INDICES: Final = """
CREATE INDEX blocks_place ON blocks (segno, offset);
CREATE INDEX files_place ON files (segno, offset);
"""
INSERT_BLOCK: Final = "INSERT OR REPLACE INTO blocks VALUES (?,?,?,?,?,?)"
INSERT_FILE: Final = "INSERT OR REPLACE INTO files VALUES (?,?,?,?,?,?,?,?,?,?,?,?)"
# Rows of a segment that was not known. A file that a log moved has two equal records, a kill may
# leave both: the later version's row stays; of equals, the one in the segment of higher number;
# rows that lead to segments that are gone give way.
ADOPT_BLOCK: Final = (
    "INSERT INTO blocks VALUES (?,?,?,?,?,?) ON CONFLICT DO UPDATE SET (segno, offset, header_len,"
    " payload_len, sum) = (excluded.segno, excluded.offset, excluded.header_len,"
    " excluded.payload_len, excluded.sum) WHERE (excluded.segno, excluded.offset) > (blocks.segno,"
    " blocks.offset) OR blocks.segno NOT IN (SELECT segno FROM segments)"
)
ADOPT_FILE: Final = (
    "INSERT INTO files VALUES (?,?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET (ino, size,"
    " mtime_ns, ctime_ns, segno, offset, header_len, payload_len, sum) = (excluded.ino,"
    " excluded.size, excluded.mtime_ns, excluded.ctime_ns, excluded.segno, excluded.offset,"
    " excluded.header_len, excluded.payload_len, excluded.sum) WHERE (excluded.ctime_ns,"
    " excluded.segno, excluded.offset) > (files.ctime_ns, files.segno, files.offset)"
    " OR files.segno NOT IN (SELECT segno FROM segments)"
)
INSERT_SEGMENT: Final = "INSERT OR REPLACE INTO segments VALUES (?,?,?,?,?)"
_SELECT_SEGMENTS: Final = "SELECT segno, sealed, reserved, fetched_ns, sum FROM segments"
# An unsealed row whose time is no time (1970) but a segment number is one of a log.
_LOG_BELOW: Final = 1 << 32

_SEGMENT_SUM = struct.Struct("<4Q")
_BLOCK_SUM = struct.Struct("<4Q")
_FILE_SUM = struct.Struct("<QQQqqQQQQ")

FileKey = tuple[bytes, bytes, int]
FileRow = tuple[bytes, bytes, int, int, int, int, int, int, int, int, int, int]
BlockRow = tuple[bytes, int, int, int, int, int]


class SegmentRow(NamedTuple):
    """`fetched_ns` of a log's segment that is not sealed yet: the number of the log's first one."""

    segno: int
    sealed: bool
    reserved: int
    fetched_ns: int

    @property
    def log(self) -> int | None:
        """The log that the segment is written for; None: it is none's, or sealed."""
        is_log = not self.sealed and 0 < self.fetched_ns < _LOG_BELOW
        return self.fetched_ns if is_log else None


# What a damaged database raises: besides SQLite's own, decoding its messages may fail, and lengths
# may be absurd.
ERRORS: Final = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)


class IndexDamaged(sqlite3.DatabaseError):
    """A row that the store cannot do without is broken, or the file is not ours any more."""


def damage(error: Exception) -> bool:
    """Does this error mean that the database is broken (not merely busy or out of space)?"""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    return code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)


# ---- rows ----------------------------------------------------------------------------------------
def split(path: bytes) -> tuple[bytes, bytes]:
    directory, _, name = path.rpartition(b"/")
    return directory, name


def directory_key(dataset: bytes, directory: bytes) -> bytes:
    return dataset[:8] + xxhash.xxh3_128_digest(dataset + directory)


def file_key(dataset: bytes, path: bytes, block: int) -> FileKey:
    directory, name = split(path)
    return directory_key(dataset, directory), name, block


def file_row(
    dataset: bytes, path: bytes, version: Version, block: int, location: Location
) -> FileRow:
    version = wrap_version(version)
    packed = _FILE_SUM.pack(block, *version, *location)
    row_sum = signed(digest.checksum(packed + dataset + path))
    ino, size, mtime_ns, ctime_ns = version
    return (
        *file_key(dataset, path, block),
        signed(ino),
        signed(size),
        mtime_ns,
        ctime_ns,
        *location,
        row_sum,
    )


def _row_file(
    dataset: bytes, path: bytes, block: int, values: tuple[int, ...]
) -> tuple[Version, Location] | None:
    """Version and location of (ino … sum) as stored, or None when the sum is wrong."""
    try:
        ino, size, mtime_ns, ctime_ns, segno, offset, header_len, payload_len, row_sum = values
        version = Version(unsigned(ino), unsigned(size), mtime_ns, ctime_ns)
        location = Location(segno, offset, header_len, payload_len)
        packed = _FILE_SUM.pack(block, *version, *location)
    except (struct.error, TypeError, ValueError):
        return None
    if signed(digest.checksum(packed + dataset + path)) != row_sum:
        return None
    return version, location


def block_row(name: bytes, location: Location) -> BlockRow:
    row_sum = signed(digest.checksum(_BLOCK_SUM.pack(*location) + name))
    return (name, *location, row_sum)


def _blocks_named(
    connection: sqlite3.Connection, columns: str, names: Sequence[bytes]
) -> Iterator[tuple[Any, ...]]:
    """Of the rows of blocks with these digests."""
    for at in range(0, len(names), _PAGE_ROWS):
        page = names[at : at + _PAGE_ROWS]
        yield from connection.execute(
            f"SELECT {columns} FROM blocks WHERE digest IN ({','.join('?' * len(page))})", page
        )


def segment_values(row: SegmentRow) -> tuple[int, int, int, int, int]:
    values = (row.segno, int(row.sealed), row.reserved, row.fetched_ns)
    return (*values, signed(digest.checksum(_SEGMENT_SUM.pack(*values))))


def _row_segment(values: tuple[int, ...]) -> SegmentRow:
    try:
        segno, sealed, reserved, fetched_ns, row_sum = values
        expected = signed(digest.checksum(_SEGMENT_SUM.pack(segno, sealed, reserved, fetched_ns)))
    except (struct.error, TypeError, ValueError) as error:
        raise IndexDamaged("a row of segments is not one") from error
    if expected != row_sum:
        raise IndexDamaged("a row of segments does not match its checksum")
    return SegmentRow(segno, bool(sealed), reserved, fetched_ns)


# ---- the index -----------------------------------------------------------------------------------
def create(path: Path) -> sqlite3.Connection:
    """A new, empty database (without indices) for bulk insertion; see `finish`."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.executescript(
        "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-200000;" + TABLES
    )
    return connection


def finish(connection: sqlite3.Connection) -> None:
    """Indices, version, WAL mode (part of the file: openers need not race for it); closes."""
    connection.executescript(
        INDICES + f"PRAGMA user_version={SCHEMA_VERSION}; PRAGMA journal_mode=WAL;"
    )
    connection.close()


def _check_plain(path: str) -> None:
    """IndexDamaged: a link, or no file that is ours alone, was put in its place."""
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        try:
            trust.check_private(status, path)
        except trust.Untrusted as error:
            raise IndexDamaged(error.strerror) from None
        if not stat.S_ISREG(status.st_mode):
            raise IndexDamaged(f"{path} is not a file")


class Index:
    """One generation. `damaged` (called from any thread, without locks) reports a broken row."""

    def __init__(self, path: Path, damaged: Callable[[str], None]) -> None:
        """sqlite3.Error, OSError: cannot be opened, or is not an index of this schema."""
        self.path = path
        self._damaged = damaged
        self._lock = threading.Lock()  # guards the pending rows and the readers' list
        self._pending_files: dict[FileKey, FileRow] = {}
        self._pending_blocks: dict[bytes, BlockRow] = {}
        self._pending_fetched: dict[int, int] = {}
        self._gone: set[int] = set()
        self._first_pending = 0.0
        self._readers: list[sqlite3.Connection] = []
        self._closed = False
        for suffix in ("", "-wal", "-shm"):  # SQLite opens them by name, and follows links
            _check_plain(f"{path}{suffix}")
        status = path.stat()
        self.identity = (status.st_dev, status.st_ino)
        self._writer = self._connect()
        try:
            self._writer.executescript(
                "PRAGMA journal_mode=WAL; PRAGMA wal_autocheckpoint=128;"
                "PRAGMA journal_size_limit=524288;"
            )
            found = self._writer.execute("PRAGMA user_version").fetchone()[0]
            tables = self._writer.execute(
                "SELECT count(*) FROM sqlite_master WHERE name IN "
                "('segments', 'blocks', 'files', 'blocks_place', 'files_place')"
            ).fetchone()[0]
            if (found, tables) != (SCHEMA_VERSION, 5):
                raise IndexDamaged(f"not an index of schema {SCHEMA_VERSION}")
        except BaseException:
            self._writer.close()
            raise

    def _connect(self) -> sqlite3.Connection:
        # mode=rw: a database that was deleted must not come back empty.
        connection = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode=rw",
            uri=True,
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=32,
        )
        connection.execute("PRAGMA synchronous=OFF")
        return connection

    @contextlib.contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            connection = self._readers.pop() if self._readers else None
        if connection is None:
            connection = self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            keep = not self._closed and len(self._readers) < _READERS_KEPT
            if keep:
                self._readers.append(connection)
        if not keep:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            readers, self._readers = self._readers, []
        for connection in (*readers, self._writer):
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def size_bytes(self) -> int:
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                total += Path(f"{self.path}{suffix}").stat().st_blocks * 512
        return total

    # ---- lookups (any thread) ----
    def lookup(self, dataset: bytes, path: bytes, version: Version, block: int) -> Location | None:
        key = file_key(dataset, path, block)
        values: tuple[int, ...] | None = None
        with self._lock:
            row = self._pending_files.get(key)
        if row is not None:
            values = row[3:]
        else:
            with self._reader() as connection:
                values = connection.execute(
                    "SELECT ino, size, mtime_ns, ctime_ns, segno, offset, header_len,"
                    " payload_len, sum FROM files WHERE dir=? AND name=? AND block=?",
                    key,
                ).fetchone()
        return self._checked(dataset, path, version, block, values)

    def _checked(
        self,
        dataset: bytes,
        path: bytes,
        version: Version,
        block: int,
        values: tuple[int, ...] | None,
    ) -> Location | None:
        if values is None:
            return None
        found = _row_file(dataset, path, block, values)
        if found is None:
            self._damaged("a row of files does not match its checksum")
            return None
        if not found[0].matches(wrap_version(version)) or found[1].segno in self._gone:
            return None
        return found[1]

    def lookup_file(
        self, dataset: bytes, path: bytes, version: Version
    ) -> list[Location | None] | None:
        directory, name, _ = file_key(dataset, path, 0)
        blocks = -(-version.size // BLOCK_BYTES)
        with self._reader() as connection:
            rows = {
                values[0]: values[1:]
                for values in connection.execute(
                    "SELECT block, ino, size, mtime_ns, ctime_ns, segno, offset, header_len,"
                    " payload_len, sum FROM files WHERE dir=? AND name=? AND block<?",
                    (directory, name, blocks),
                )
            }
        with self._lock:
            for row in self._pending_files.values():
                if row[0] == directory and row[1] == name and row[2] < blocks:
                    rows[row[2]] = row[3:]
        found: list[Location | None] = [None] * blocks
        for block, values in rows.items():
            if isinstance(block, int) and 0 <= block < blocks:
                found[block] = self._checked(dataset, path, version, block, values)
        return found if any(found) else None

    def lookup_directory(
        self, dataset: bytes, directory: bytes
    ) -> Iterator[tuple[bytes, Version, Location]]:
        key, prefix = directory_key(dataset, directory), directory + b"/" if directory else b""
        with self._lock:
            pending = {
                row[1]: row[2:]
                for row in self._pending_files.values()
                if row[0] == key and row[2] == 0
            }
        after = b""
        while True:
            with self._reader() as connection:
                rows = connection.execute(
                    "SELECT name, block, ino, size, mtime_ns, ctime_ns, segno, offset,"
                    " header_len, payload_len, sum FROM files"
                    f" WHERE dir=? AND name>? AND block=0 ORDER BY name LIMIT {_PAGE_ROWS}",
                    (key, after),
                ).fetchall()
            for name, *values in rows:
                if isinstance(name, bytes) and name not in pending:
                    yield from self._entry(dataset, prefix, name, tuple(values))
            # A damaged tree may hand out names in any order: go forward or stop.
            if len(rows) < _PAGE_ROWS or not rows[-1][0] > after:
                break
            after = rows[-1][0]
        for name, row_values in pending.items():
            yield from self._entry(dataset, prefix, name, row_values)

    def _entry(
        self, dataset: bytes, prefix: bytes, name: bytes, values: tuple[int, ...]
    ) -> Iterator[tuple[bytes, Version, Location]]:
        found = _row_file(dataset, prefix + name, values[0], values[1:])
        if found is None:
            self._damaged("a row of files does not match its checksum")
        elif found[0].size <= BLOCK_BYTES and found[1].segno not in self._gone:
            yield name, found[0], found[1]

    def lookup_blocks(self, names: Sequence[bytes]) -> dict[bytes, Location]:
        """Where the blocks with these digests lie; those that are not stored are missing."""
        with self._lock:
            pending = self._pending_blocks
            rows = [pending[name] for name in names if name in pending]
            others = [name for name in names if name not in pending]
        if others:
            with self._reader() as connection:
                rows += _blocks_named(
                    connection, "digest, segno, offset, header_len, payload_len, sum", others
                )
        found: dict[bytes, Location] = {}
        for row in rows:
            try:
                location = Location(*row[1:5])
                is_intact = block_row(row[0], location) == tuple(row)
            except (struct.error, TypeError):
                is_intact = False
            if not is_intact:
                self._damaged("a row of blocks does not match its checksum")
            elif location.segno not in self._gone:
                found[row[0]] = location
        return found

    def records(self, dataset: bytes | None) -> Iterator[Location]:
        """Distinct records in use (by the dataset), ordered by place."""
        segno, offset = -1, -1
        table, where = "blocks", ""
        prefix: tuple[bytes, ...] = ()
        if dataset is not None:
            low = dataset[:8]
            # All keys of the dataset begin with these 8 bytes and are 24 bytes long.
            table, where, prefix = "files", "dir>=? AND dir<=? AND", (low, low + b"\xff" * 17)
        while True:
            with self._reader() as connection:
                rows = connection.execute(
                    f"SELECT DISTINCT segno, offset, header_len, payload_len FROM {table}"
                    f" WHERE {where} (segno, offset) > (?, ?)"
                    f" ORDER BY segno, offset LIMIT {_PAGE_ROWS}",
                    (*prefix, segno, offset),
                ).fetchall()
            for row in rows:
                if all(isinstance(value, int) for value in row):
                    yield Location(*row)
            if len(rows) < _PAGE_ROWS or not rows[-1][:2] > (segno, offset):
                return
            segno, offset = rows[-1][:2]

    # ---- pending rows (publisher) ----
    def add(self, files: Sequence[FileRow], blocks: Sequence[BlockRow]) -> bool:
        """Queue rows; True when it is time to `flush`."""
        with self._lock:
            if not self._pending_files and not self._pending_blocks:
                self._first_pending = time.monotonic()
            for file in files:
                self._pending_files[file[:3]] = file
            for block in blocks:
                self._pending_blocks[block[0]] = block
            count = len(self._pending_files)
            return count >= BATCH_ROWS or (time.monotonic() - self._first_pending >= BATCH_SECONDS)

    def touch(self, segno: int, fetched_ns: int) -> None:
        """The segment was fetched into, or deduplicated against, at this time."""
        with self._lock:
            self._pending_fetched[segno] = fetched_ns

    def take_pending(self) -> tuple[list[FileRow], list[BlockRow]]:
        """For the next generation: what this one has not committed."""
        with self._lock:
            return list(self._pending_files.values()), list(self._pending_blocks.values())

    def is_gone_now(self, segno: int) -> bool:
        """No such segment in the index any more, whoever evicted it."""
        return segno not in {row.segno for row in self.read_segments()}

    def forget(self, segno: int, offset: int) -> None:
        """Drop the pending rows of one record."""
        with self._lock:
            for key in [k for k, r in self._pending_files.items() if r[7:9] == (segno, offset)]:
                del self._pending_files[key]
            for name in [k for k, r in self._pending_blocks.items() if r[1:3] == (segno, offset)]:
                del self._pending_blocks[name]

    # ---- writing (the caller holds the write lock) ----
    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """BEGIN IMMEDIATE … COMMIT; any exception rolls back."""
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
            self._writer.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._writer.execute("ROLLBACK")
            raise

    def flush(self) -> None:
        """Commit the pending rows, except those whose segment was evicted meanwhile."""
        with self._lock:
            files = dict(self._pending_files)
            blocks = dict(self._pending_blocks)
            fetched = dict(self._pending_fetched)
        if not files and not blocks and not fetched:
            return
        try:
            with self.transaction() as connection:
                known = {row.segno: row for row in self.segments()}
                connection.executemany(
                    INSERT_BLOCK, [row for row in blocks.values() if row[1] in known]
                )
                connection.executemany(
                    INSERT_FILE, [row for row in files.values() if row[7] in known]
                )
                self.put_segments(
                    [
                        known[segno]._replace(fetched_ns=when)
                        for segno, when in fetched.items()
                        if segno in known
                        and known[segno].log is None
                        and known[segno].fetched_ns < when
                    ]
                )
        except ERRORS:
            if len(files) > PENDING_ROWS_MAX:
                self._drop(files, blocks, fetched)
            raise
        self._drop(files, blocks, fetched)

    def _drop(
        self,
        files: dict[FileKey, FileRow],
        blocks: dict[bytes, BlockRow],
        fetched: dict[int, int],
    ) -> None:
        with self._lock:
            for key, row in files.items():
                if self._pending_files.get(key) is row:
                    del self._pending_files[key]
            for name, block in blocks.items():
                if self._pending_blocks.get(name) is block:
                    del self._pending_blocks[name]
            for segno, when in fetched.items():
                if self._pending_fetched.get(segno) == when:
                    del self._pending_fetched[segno]
            self._first_pending = time.monotonic()

    def segments(self) -> list[SegmentRow]:
        """All segments, on the writing connection. IndexDamaged: one row is broken."""
        return [_row_segment(row) for row in self._writer.execute(_SELECT_SEGMENTS)]

    def read_segments(self) -> list[SegmentRow]:
        """The same from any thread, without the write lock."""
        with self._reader() as connection:
            return [_row_segment(row) for row in connection.execute(_SELECT_SEGMENTS)]

    def reserved_bytes(self) -> tuple[int, int]:
        """(of all segments, of those that are being written, logs left out); any thread. An
        estimate: the rows' checksums are not looked at.
        """
        with self._reader() as connection:
            total, opened = connection.execute(
                "SELECT sum(reserved), sum(CASE WHEN sealed OR (fetched_ns > 0 AND fetched_ns < ?)"
                " THEN 0 ELSE reserved END) FROM segments",
                (_LOG_BELOW,),
            ).fetchone()
        return int(total or 0), int(opened or 0)

    def written_end(self, segno: int) -> int:
        """Where the last record that the index knows of ends in a segment; 0: it knows none."""
        ends = [0]
        with self._reader() as connection:
            for table in ("blocks", "files"):
                ends += [
                    offset + align(header_len + payload_len)
                    for offset, header_len, payload_len in connection.execute(
                        f"SELECT offset, header_len, payload_len FROM {table} WHERE segno=?"
                        " ORDER BY offset DESC LIMIT 1",
                        (segno,),
                    )
                ]
        return max(ends)

    def read_log_segments(self) -> list[SegmentRow]:
        """Those that are written for logs; any thread."""
        with self._reader() as connection:
            rows = connection.execute(
                f"{_SELECT_SEGMENTS} WHERE NOT sealed AND fetched_ns > 0 AND fetched_ns < ?",
                (_LOG_BELOW,),
            )
            return [_row_segment(row) for row in rows]

    def file_rows_in(self, segnos: Sequence[int]) -> dict[int, int]:
        """How many committed rows of files lead into each segment; any thread."""
        with self._reader() as connection:
            return {
                segno: connection.execute(
                    "SELECT count(*) FROM files WHERE segno=?", (segno,)
                ).fetchone()[0]
                for segno in segnos
            }

    def unused_segments(self) -> list[int]:
        """Sealed segments to which no committed row of a file leads; with the write lock."""
        return [
            segno
            for (segno,) in self._writer.execute(
                "SELECT segno FROM segments WHERE sealed"
                " AND NOT EXISTS (SELECT 1 FROM files WHERE files.segno = segments.segno)"
            )
        ]

    def alive_bytes(self, segno: int) -> int:
        """Of records to which committed rows of files lead; any thread."""
        with self._reader() as connection:
            rows = connection.execute(
                "SELECT DISTINCT offset, header_len, payload_len FROM files WHERE segno=?", (segno,)
            )
            return sum(align(header_len + payload_len) for _, header_len, payload_len in rows)

    def file_rows_of(self, segno: int) -> dict[int, int]:
        """How many committed rows of files lead to each offset of a segment; any thread."""
        with self._reader() as connection:
            return dict(
                connection.execute(
                    "SELECT offset, count(*) FROM files WHERE segno=? GROUP BY offset", (segno,)
                )
            )

    def put_segments(self, rows: list[SegmentRow]) -> None:
        self._writer.executemany(INSERT_SEGMENT, [segment_values(row) for row in rows])

    def delete_segment(self, segno: int) -> None:
        """Its row only, within the caller's transaction; `sweep` takes the other rows."""
        self._gone.add(segno)
        self._writer.execute("DELETE FROM segments WHERE segno=?", (segno,))

    def sweep(self, segno: int, from_offset: int = 0) -> None:
        """Delete the rows of a segment (at `from_offset` or behind), in small transactions."""
        for table, key in (("files", "dir, name, block"), ("blocks", "digest")):
            while True:
                with self.transaction() as connection:
                    count = connection.execute(
                        f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table}"
                        f" WHERE segno=? AND offset>=? LIMIT {_DELETE_ROWS})",
                        (segno, from_offset),
                    ).rowcount
                if count < _DELETE_ROWS:
                    break
        if from_offset == 0:
            self._gone.discard(segno)

    def quarantine(self, segno: int, offset: int) -> int:
        """Delete the rows of one record; returns how many there were."""
        self.forget(segno, offset)
        with self.transaction() as connection:
            return sum(
                connection.execute(
                    f"DELETE FROM {table} WHERE segno=? AND offset=?", (segno, offset)
                ).rowcount
                for table in ("files", "blocks")
            )

    def referenced_segments(self) -> set[int]:
        """Numbers that rows of blocks and files mention: a loose scan, one step a segment."""
        found: set[int] = set()
        for table in ("blocks", "files"):
            segno = -1
            while True:
                row = self._writer.execute(
                    f"SELECT min(segno) FROM {table} WHERE segno>?", (segno,)
                ).fetchone()
                if row[0] is None:
                    break
                if not isinstance(row[0], int):
                    raise IndexDamaged("a segment number is not an integer")
                segno = row[0]
                found.add(segno)
        return found

    def insert(self, files: list[FileRow], blocks: list[BlockRow]) -> None:
        """Rows in transactions of BATCH_ROWS, whatever they take the place of."""
        self._insert(((blocks, INSERT_BLOCK), (files, INSERT_FILE)))

    def adopt(self, files: list[FileRow], blocks: list[BlockRow]) -> None:
        """The same for a segment of another writer: see `ADOPT_FILE` for what they replace."""
        self._insert(((blocks, ADOPT_BLOCK), (files, ADOPT_FILE)))

    def _insert(self, rows: tuple[tuple[list[BlockRow], str], tuple[list[FileRow], str]]) -> None:
        for table_rows, statement in rows:
            for at in range(0, len(table_rows), BATCH_ROWS):
                with self.transaction() as connection:
                    connection.executemany(statement, table_rows[at : at + BATCH_ROWS])

    def count_blocks(self) -> int:
        """Of the rows that are written or wait to be; for a moment some are both."""
        with self._lock:
            pending = list(self._pending_blocks)
        with self._reader() as connection:
            connection.execute("BEGIN")  # one state of the table, and a later one than `pending`
            (count,) = connection.execute("SELECT count(*) FROM blocks").fetchone()
            both = sum(1 for _ in _blocks_named(connection, "digest", pending))
            connection.execute("COMMIT")
        return int(count) + len(pending) - both
