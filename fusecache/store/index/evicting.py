"""Rows of files that are to be on SSD no more: which they are, and what they leave dead.

INVARIANT: what is said to be dead is led to by no row of files or blocks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from fusecache.store.index.rows import FileKey, file_key, parse_file
from fusecache.store.segment import format as fmt
from fusecache.store.types import Location, Version


class BlockAt(NamedTuple):
    """One block of a file, as its row has it."""

    key: FileKey
    at: Location


def blocks_of(
    connection: sqlite3.Connection, dataset: bytes, path: bytes, version: Version
) -> list[BlockAt]:
    """Those that are stored of this version of the file. Damaged rows lead nowhere."""
    directory, name, _ = file_key(dataset, path, 0)
    found = []
    for block, *values in connection.execute(
        "SELECT block, ino, size, mtime_ns, ctime_ns, segno, offset, header_len, payload_len, sum"
        " FROM files WHERE dir=? AND name=?",
        (directory, name),
    ):
        parsed = parse_file(dataset, path, block, tuple(values))
        if parsed is not None and parsed[0].matches(fmt.wrap_version(version)):
            found.append(BlockAt((directory, name, block), parsed[1]))
    return found


def staying(
    connection: sqlite3.Connection, files: Sequence[Sequence[BlockAt]], sealed: Collection[int]
) -> set[int]:
    """Numbers of those files that cannot go: a block lies in no `sealed` segment, or is used by a
    file that is not among these, or cannot go.
    """
    keys = {block.key for blocks in files for block in blocks}
    users: dict[tuple[int, int], list[int]] = {}  # of a record, among these files
    for number, blocks in enumerate(files):
        for _, at in blocks:
            users.setdefault(at[:2], []).append(number)
    staying_records = [
        record
        for record in users
        if record[0] not in sealed or _has_others(connection, record, keys)
    ]
    stay: set[int] = set()
    while staying_records:
        for number in users.pop(staying_records.pop(), ()):
            if number not in stay:
                stay.add(number)
                staying_records += [at[:2] for _, at in files[number]]
    return stay


def _has_others(
    connection: sqlite3.Connection, record: tuple[int, int], keys: Collection[FileKey]
) -> bool:
    """Whether a row of a file that is not among these leads to the record."""
    rows = connection.execute(
        "SELECT dir, name, block FROM files WHERE segno=? AND offset=?", record
    )
    return any(key not in keys for key in rows)


def delete(connection: sqlite3.Connection, blocks: Iterable[BlockAt]) -> list[Location]:
    """The rows of these; and the records that none of a file leads to any more, without their
    rows of blocks. Within a transaction.
    """
    places: dict[tuple[int, int], Location] = {}
    for key, at in blocks:
        connection.execute(
            "DELETE FROM files WHERE dir=? AND name=? AND block=? AND segno=? AND offset=?",
            (*key, *at[:2]),
        )
        places[at[:2]] = at
    dead = []
    for place, at in places.items():
        used = "SELECT 1 FROM files WHERE segno=? AND offset=? LIMIT 1"
        if connection.execute(used, place).fetchone() is None:
            connection.execute("DELETE FROM blocks WHERE segno=? AND offset=?", place)
            dead.append(at)
    return dead


def dead_range(connection: sqlite3.Connection, at: Location) -> tuple[int, int | None]:
    """What is dead around a record without rows: bytes [begin, end) of its segment; None: up to
    its end.
    """
    begin, ends = fmt.SEGMENT_HEADER_BYTES, list[int]()
    for table in ("blocks", "files"):
        before = connection.execute(
            f"SELECT offset, header_len, payload_len FROM {table} WHERE segno=? AND offset<?"
            " ORDER BY offset DESC LIMIT 1",
            at[:2],
        ).fetchone()
        if before is not None:
            begin = max(begin, before[0] + fmt.record_length(*before[1:]))
        (behind,) = connection.execute(
            f"SELECT min(offset) FROM {table} WHERE segno=? AND offset>?", at[:2]
        ).fetchone()
        if behind is not None:
            ends.append(behind)
    return begin, min(ends) if ends else None
