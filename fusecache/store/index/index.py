"""The index: which block lies where. A SQLite database that is only a cache of the segments.

Every row carries a checksum; a row that fails it is reported, never returned, and replaced by the
next put of that file or block.
INVARIANT: a row is returned only for the dataset, path and version that it was written for (inode
number 0, in a row or a question: it does not count).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fusecache.store.index.database import ERRORS, Database, IndexDamaged
from fusecache.store.index.pending import ROWS_MOST, Pending
from fusecache.store.index.rows import (
    ADOPT_BLOCK,
    ADOPT_FILE,
    INSERT_BLOCK,
    INSERT_FILE,
    BlockRow,
    FileRow,
    SegmentRow,
    directory_key,
    file_key,
    parse_block,
    parse_file,
)
from fusecache.store.index.segments import Segments
from fusecache.store.segment.format import align, record_length, wrap_version
from fusecache.store.types import BLOCK_BYTES, Location, Version

_PAGE_ROWS: Final = 1000
_DELETE_ROWS: Final = 128
_SUM_ROWS: Final = 50_000
_OF_DATASET: Final = "dir>=? AND dir<=?"


class Index:
    """One generation: rows of files and blocks; what holds them; the rows to come (`pending`) and
    those of `segments`. `damaged` (called from any thread, without locks) reports a broken row.
    """

    def __init__(self, path: Path, damaged: Callable[[str], None], wal_bytes: int) -> None:
        """See `Database`."""
        self.database = Database(path, wal_bytes)
        self.segments = Segments(self.database)
        self.pending = Pending()
        self._damaged = damaged

    # ---- lookups (any thread) --------------------------------------------------------------------
    def lookup(self, dataset: bytes, path: bytes, version: Version, block: int) -> Location | None:
        key = file_key(dataset, path, block)
        values: tuple[int, ...] | None = None
        row = self.pending.file(key)
        if row is not None:
            values = row[3:]
        else:
            with self.database.reader() as connection:
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
        found = parse_file(dataset, path, block, values)
        if found is None:
            self._damaged("a row of files does not match its checksum")
            return None
        if not found[0].matches(wrap_version(version)) or found[1].segno in self.segments.gone:
            return None
        return found[1]

    def lookup_directory(
        self, dataset: bytes, directory: bytes
    ) -> Iterator[tuple[bytes, Version, Location]]:
        key, prefix = directory_key(dataset, directory), directory + b"/" if directory else b""
        pending = {row[1]: row[2:] for row in self.pending.files_in(key) if row[2] == 0}
        after = b""
        while True:
            with self.database.reader() as connection:
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
        found = parse_file(dataset, prefix + name, values[0], values[1:])
        if found is None:
            self._damaged("a row of files does not match its checksum")
        elif found[0].size <= BLOCK_BYTES and found[1].segno not in self.segments.gone:
            yield name, found[0], found[1]

    def lookup_blocks(self, names: Sequence[bytes]) -> dict[bytes, Location]:
        """Where the blocks with these digests lie; those that are not stored are missing."""
        pending, others = self.pending.blocks(names)
        rows: list[tuple[Any, ...]] = list(pending)
        if others:
            with self.database.reader() as connection:
                rows += _blocks_named(
                    connection, "digest, segno, offset, header_len, payload_len, sum", others
                )
        found: dict[bytes, Location] = {}
        for row in rows:
            location = parse_block(row)
            if location is None:
                self._damaged("a row of blocks does not match its checksum")
            elif location.segno not in self.segments.gone:
                found[row[0]] = location
        return found

    def records(self, dataset: bytes | None) -> Iterator[Location]:
        """Distinct records in use (by the dataset), ordered by place."""
        segno, offset = -1, -1
        table, where = "blocks", ""
        prefix: tuple[bytes, ...] = ()
        if dataset is not None:
            table, where, prefix = "files", f"{_OF_DATASET} AND", _keys_of(dataset)
        while True:
            with self.database.reader() as connection:
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

    def dataset_bytes(self, dataset: bytes) -> int:
        """Of the blocks that committed rows of its files lead to, one by one: what has one content
        counts as often as it has names.
        """
        after, stop = _keys_of(dataset)
        at: tuple[bytes, bytes, int] = (after, b"", -1)
        found = 0
        while True:  # a reader that stays long keeps the log of the database from being cut
            with self.database.reader() as connection:
                next_at = connection.execute(
                    "SELECT dir, name, block FROM files WHERE (dir, name, block) > (?, ?, ?)"
                    f" AND dir<=? ORDER BY dir, name, block LIMIT 1 OFFSET {_SUM_ROWS - 1}",
                    (*at, stop),
                ).fetchone()
                is_last = next_at is None or not tuple(next_at) > at  # a damaged tree
                (some,) = connection.execute(
                    "SELECT total(payload_len) FROM files WHERE (dir, name, block) > (?, ?, ?)"
                    + (" AND dir<=?" if is_last else " AND (dir, name, block) <= (?, ?, ?)"),
                    (*at, stop) if is_last else (*at, *next_at),
                ).fetchone()
            found += int(some)
            if is_last:
                return found
            at = next_at

    def count_blocks(self) -> int:
        """Of the rows that are written or wait to be; for a moment some are both."""
        pending = self.pending.block_names()
        with self.database.reader() as connection:
            connection.execute("BEGIN")  # one state of the table, and a later one than `pending`
            (count,) = connection.execute("SELECT count(*) FROM blocks").fetchone()
            both = sum(1 for _ in _blocks_named(connection, "digest", pending))
            connection.execute("COMMIT")
        return int(count) + len(pending) - both

    def written_end(self, segno: int) -> int:
        """Where the last record that the index knows of ends in a segment; 0: it knows none."""
        ends = [0]
        with self.database.reader() as connection:
            for table in ("blocks", "files"):
                ends += [
                    align(offset + header_len + payload_len)
                    for offset, header_len, payload_len in connection.execute(
                        f"SELECT offset, header_len, payload_len FROM {table} WHERE segno=?"
                        " ORDER BY offset DESC LIMIT 1",
                        (segno,),
                    )
                ]
        return max(ends)

    def file_rows_in(self, segnos: Sequence[int]) -> dict[int, int]:
        """How many committed rows of files lead into each segment; any thread."""
        with self.database.reader() as connection:
            return {
                segno: connection.execute(
                    "SELECT count(*) FROM files WHERE segno=?", (segno,)
                ).fetchone()[0]
                for segno in segnos
            }

    def alive_bytes(self, segno: int) -> int:
        """Of records to which committed rows of files lead; any thread."""
        with self.database.reader() as connection:
            rows = connection.execute(
                "SELECT DISTINCT offset, header_len, payload_len FROM files WHERE segno=?", (segno,)
            )
            return sum(
                record_length(header_len, payload_len) for _, header_len, payload_len in rows
            )

    def records_of(self, segno: int) -> list[Location]:
        """To which committed rows lead in a segment; any thread."""
        place = "SELECT segno, offset, header_len, payload_len FROM"
        with self.database.reader() as connection:
            rows = connection.execute(
                f"{place} files WHERE segno=? UNION {place} blocks WHERE segno=?", (segno, segno)
            )
            return [Location(*row) for row in rows]

    def file_rows_of(self, segno: int) -> dict[int, int]:
        """How many committed rows of files lead to each offset of a segment; any thread."""
        with self.database.reader() as connection:
            return dict(
                connection.execute(
                    "SELECT offset, count(*) FROM files WHERE segno=? GROUP BY offset", (segno,)
                )
            )

    # ---- writing (the caller holds the write lock) -----------------------------------------------
    def flush(self) -> None:
        """Commit the pending rows, except those whose segment or block was evicted meanwhile."""
        batch = self.pending.copy()
        if not any(batch):
            return
        blocks, files = list(batch.blocks.values()), list(batch.files.values())
        count, most = max(len(blocks), len(files), 1), self.database.rows_at_once
        try:
            for at in range(0, count, most):
                part = slice(at, at + most)
                is_last = at + most >= count
                self._commit(blocks[part], files[part], batch.fetched_ns if is_last else {})
        except ERRORS:
            if len(files) > ROWS_MOST:
                self.pending.drop(batch)
            raise
        self.pending.drop(batch)

    def _commit(
        self, blocks: list[BlockRow], files: list[FileRow], fetched: dict[int, int]
    ) -> None:
        with self.database.transaction() as connection:
            known = {row.segno: row for row in self.segments.all()}
            connection.executemany(INSERT_BLOCK, [row for row in blocks if row[1] in known])
            rows = [row for row in files if row[7] in known]
            connection.executemany(
                INSERT_FILE, [row for row in rows if _leads(connection, known, row)]
            )
            self.segments.put(
                [
                    known[segno]._replace(fetched_ns=when)
                    for segno, when in fetched.items()
                    if segno in known
                    and known[segno].log is None
                    and known[segno].fetched_ns < when
                ]
            )

    def delete_rows(self, segno: int, from_offset: int = 0) -> None:
        """Delete the rows of a segment (at `from_offset` or behind), in small transactions.
        IndexDamaged: some cannot be.
        """
        most = min(_DELETE_ROWS, self.database.rows_at_once)
        for table, key in (("files", "dir, name, block"), ("blocks", "digest")):
            while True:
                with self.database.transaction() as connection:
                    count = connection.execute(
                        f"DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM {table}"
                        f" WHERE segno=? AND offset>=? LIMIT {most})",
                        (segno, from_offset),
                    ).rowcount
                if count < most:
                    break
            place = f"SELECT 1 FROM {table} WHERE segno=? AND offset>=? LIMIT 1"
            if self.database.writer.execute(place, (segno, from_offset)).fetchone():
                raise IndexDamaged(f"places of {table} lead to no rows")  # as after a power cut
        if from_offset == 0:
            self.segments.rows_deleted(segno)

    def quarantine(self, segno: int, offset: int) -> int:
        """Delete the rows of one record; returns how many there were."""
        self.pending.forget(segno, offset)
        with self.database.transaction() as connection:
            return sum(
                connection.execute(
                    f"DELETE FROM {table} WHERE segno=? AND offset=?", (segno, offset)
                ).rowcount
                for table in ("files", "blocks")
            )

    def referenced_segments(self) -> set[int]:
        """Numbers that rows of blocks and files mention: a loose scan, one step a segment."""
        found, writer = set[int](), self.database.writer
        for table in ("blocks", "files"):
            nowhere = f"SELECT 1 FROM {table} WHERE segno IS NULL LIMIT 1"
            if writer.execute(nowhere).fetchone():  # pages of two ages, after a power cut
                raise IndexDamaged(f"a row of {table} has no segment number")
            segno = -1
            while True:
                row = writer.execute(
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
        """Rows in small transactions, whatever they take the place of."""
        self._insert(((blocks, INSERT_BLOCK), (files, INSERT_FILE)))

    def adopt(self, files: list[FileRow], blocks: list[BlockRow]) -> None:
        """The same for a segment of another writer: see `ADOPT_FILE` for what they replace."""
        self._insert(((blocks, ADOPT_BLOCK), (files, ADOPT_FILE)))

    def _insert(self, rows: tuple[tuple[list[BlockRow], str], tuple[list[FileRow], str]]) -> None:
        most = self.database.rows_at_once
        for table_rows, statement in rows:
            for at in range(0, len(table_rows), most):
                with self.database.transaction() as connection:
                    connection.executemany(statement, table_rows[at : at + most])


def _keys_of(dataset: bytes) -> tuple[bytes, bytes]:
    """For _OF_DATASET: all keys of the dataset begin with these 8 bytes and are 24 bytes long."""
    return dataset[:8], dataset[:8] + b"\xff" * 17


def _leads(connection: sqlite3.Connection, known: Mapping[int, SegmentRow], row: FileRow) -> bool:
    """Whether the row's block is there: of a sealed segment it may have been evicted since it was
    found by its digest.
    """
    if not known[row[7]].sealed:
        return True
    place = "SELECT 1 FROM blocks WHERE segno=? AND offset=? LIMIT 1"
    return connection.execute(place, row[7:9]).fetchone() is not None


def _blocks_named(
    connection: sqlite3.Connection, columns: str, names: Sequence[bytes]
) -> Iterator[tuple[Any, ...]]:
    """Of the rows of blocks with these digests."""
    for at in range(0, len(names), _PAGE_ROWS):
        page = names[at : at + _PAGE_ROWS]
        yield from connection.execute(
            f"SELECT {columns} FROM blocks WHERE digest IN ({','.join('?' * len(page))})", page
        )
