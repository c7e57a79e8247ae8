"""The database file of one index generation: its connections, transactions, and SQLite's log.

Connections: one for writing, guarded by the caller (the store's write lock); a few for reading,
handed out one thread at a time. Errors of SQLite leave this package as they are (`ERRORS`);
`damage` says whether one of them means that the file is broken.
INVARIANT: transactions are small (`rows_at_once`), so that SQLite's log stays as short as the
capacity check counts on (`bound_wal`).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fusecache.base import trust

SCHEMA_VERSION: Final = 1
BATCH_ROWS: Final = 256
_BUSY_SECONDS: Final = 10.0
_READERS_KEPT: Final = 8
# A row changes so many bytes of pages in SQLite's log, at most, and each transaction some more.
_WAL_ROW_BYTES: Final = 3 * 4120
_WAL_LEAST_BYTES: Final = 8 * 4120
_CHECKPOINT_SECONDS: Final = 0.1
_CHECKPOINT_PAUSE_SECONDS: Final = 1.0

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

# What a damaged database raises: besides SQLite's own, decoding its messages may fail, and lengths
# may be absurd.
ERRORS: Final = (sqlite3.Error, UnicodeError, OverflowError, MemoryError)


class IndexDamaged(sqlite3.DatabaseError):
    """A row that the store cannot do without is broken, or the file is not ours any more."""


def damage(error: Exception) -> bool:
    """Does this error mean that the database is broken (not merely busy or out of space)?"""
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    return code not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL)


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


class Database:
    """The file of one generation. `rows_at_once`: how many rows a transaction may change."""

    def __init__(self, path: Path, wal_bytes: int) -> None:
        """`wal_bytes`: see `bound_wal`. sqlite3.Error, OSError: cannot be opened, or is not an
        index of this schema.
        """
        self.path = path
        self._lock = threading.Lock()  # guards the readers' list
        self._readers: list[sqlite3.Connection] = []
        self._closed = False
        self._checkpoint_at = 0.0
        for suffix in ("", "-wal", "-shm"):  # SQLite opens them by name, and follows links
            _check_plain(f"{path}{suffix}")
        status = path.stat()
        self.identity = (status.st_dev, status.st_ino)
        self.writer = self._connect()
        try:
            self.writer.executescript("PRAGMA journal_mode=WAL; PRAGMA journal_size_limit=524288;")
            self.bound_wal(wal_bytes)
            found = self.writer.execute("PRAGMA user_version").fetchone()[0]
            tables = self.writer.execute(
                "SELECT count(*) FROM sqlite_master WHERE name IN "
                "('segments', 'blocks', 'files', 'blocks_place', 'files_place')"
            ).fetchone()[0]
            if (found, tables) != (SCHEMA_VERSION, 5):
                raise IndexDamaged(f"not an index of schema {SCHEMA_VERSION}")
        except BaseException:
            self.writer.close()
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
    def reader(self) -> Iterator[sqlite3.Connection]:
        """A connection of this thread alone; any thread."""
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
        for connection in (*readers, self.writer):
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def bound_wal(self, wal_bytes: int) -> None:
        """SQLite's log is to stay about as short as that: it is written back when it is three
        quarters as long, and the rest is what one transaction may come to.
        """
        self._wal_bytes = wal_bytes
        pages = max(8, min(128, wal_bytes * 3 // 4 // 4096))
        self.writer.execute(f"PRAGMA wal_autocheckpoint={pages}")
        most = (wal_bytes // 4 - _WAL_LEAST_BYTES) // _WAL_ROW_BYTES
        self.rows_at_once = max(1, min(BATCH_ROWS, most))

    def checkpoint(self) -> None:
        """Write SQLite's log back and empty it, unless somebody reads it for long. With the write
        lock.
        """
        if self.wal_size() == 0:
            return
        with contextlib.suppress(sqlite3.OperationalError):
            self.writer.execute(f"PRAGMA busy_timeout={int(_CHECKPOINT_SECONDS * 1000)}")
            try:
                deadline = time.monotonic() + _CHECKPOINT_SECONDS
                # Another process does so just now (no pages are told of): SQLite waits for
                # readers only.
                while self._truncated_pages() < 0 and time.monotonic() < deadline:
                    time.sleep(_CHECKPOINT_SECONDS / 50)
            finally:
                self.writer.execute(f"PRAGMA busy_timeout={int(_BUSY_SECONDS * 1000)}")

    def _truncated_pages(self) -> int:
        """-1: none, for somebody else is at it."""
        _, _, pages = self.writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return int(pages)

    def wal_size(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0

    def size_bytes(self) -> int:
        total = 0
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                total += Path(f"{self.path}{suffix}").stat().st_blocks * 512
        return total

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """BEGIN IMMEDIATE … COMMIT; any exception rolls back."""
        self.writer.execute("BEGIN IMMEDIATE")
        try:
            yield self.writer
            self.writer.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self.writer.execute("ROLLBACK")
            raise
        if self.wal_size() > self._wal_bytes and time.monotonic() >= self._checkpoint_at:
            self.checkpoint()  # a reader was in the way
            if self.wal_size() > self._wal_bytes:  # and is so still
                self._checkpoint_at = time.monotonic() + _CHECKPOINT_PAUSE_SECONDS
