"""Rows of the index: each with a checksum over what it says and for whom (docs/FORMAT.md).

INVARIANT: a row whose checksum is wrong is never used.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import xxhash

from fusecache.base import digest
from fusecache.store.index.database import IndexDamaged
from fusecache.store.segment.format import signed, unsigned, wrap_version
from fusecache.store.types import ALIGNMENT, Location, Version

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
# An unsealed row whose time is no time (1970) but a segment number is one of a log.
LOG_BELOW: Final = 1 << 32

_SEGMENT_SUM = struct.Struct("<4Q")
_BLOCK_SUM = struct.Struct("<4Q")
_FILE_SUM = struct.Struct("<QQQqqQQQQ")

FileKey = tuple[bytes, bytes, int]
FileRow = tuple[bytes, bytes, int, int, int, int, int, int, int, int, int, int]
BlockRow = tuple[bytes, int, int, int, int, int]


class SegmentRow(NamedTuple):
    """`fetched_ns` of a log's segment that is not sealed yet: the number of the log's first one.
    `holes`: bytes of a sealed one that were given back, and are not `reserved`: whole pages.
    """

    segno: int
    sealed: bool
    reserved: int
    fetched_ns: int
    holes: int = 0

    @property
    def length(self) -> int:
        """Of the file of a sealed segment."""
        return self.reserved + self.holes

    def taking(self, taken_bytes: int) -> SegmentRow:
        """The same file, sealed, of which so much is on the disk."""
        return self._replace(reserved=taken_bytes, holes=self.length - taken_bytes)

    @property
    def log(self) -> int | None:
        """The log that the segment is written for; None: it is none's, or sealed."""
        is_log = not self.sealed and 0 < self.fetched_ns < LOG_BELOW
        return self.fetched_ns if is_log else None


def _seed(location: Location) -> int:
    """Of a row's sum. A fusecache that knows only records at whole pages finds the others' rows
    damaged: a miss.
    """
    return location.offset % ALIGNMENT


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
    row_sum = signed(digest.checksum(packed + dataset + path, _seed(location)))
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


def parse_file(
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
    if signed(digest.checksum(packed + dataset + path, _seed(location))) != row_sum:
        return None
    return version, location


def growth_bytes(path: bytes) -> int:
    """How much an index grows, at most, by the rows of one block; more on an average page."""
    return 256 + 3 * len(split(path)[1])


def block_row(name: bytes, location: Location) -> BlockRow:
    row_sum = signed(digest.checksum(_BLOCK_SUM.pack(*location) + name, _seed(location)))
    return (name, *location, row_sum)


def segment_values(row: SegmentRow) -> tuple[int, int, int, int, int]:
    sealed = 1 + row.holes // ALIGNMENT if row.sealed else 0
    values = (row.segno, sealed, row.length, row.fetched_ns)
    return (*values, signed(digest.checksum(_SEGMENT_SUM.pack(*values))))


def parse_segment(values: tuple[int, ...]) -> SegmentRow:
    try:
        segno, sealed, length, fetched_ns, row_sum = values
        expected = signed(digest.checksum(_SEGMENT_SUM.pack(segno, sealed, length, fetched_ns)))
    except (struct.error, TypeError, ValueError) as error:
        raise IndexDamaged("a row of segments is not one") from error
    if expected != row_sum:
        raise IndexDamaged("a row of segments does not match its checksum")
    holes = max(0, sealed - 1) * ALIGNMENT
    return SegmentRow(segno, bool(sealed), length - holes, fetched_ns, holes)


def parse_block(values: tuple[Any, ...]) -> Location | None:
    """Where the block of this row lies, or None when the sum is wrong."""
    try:
        location = Location(*values[1:5])
        is_intact = block_row(values[0], location) == tuple(values)
    except (struct.error, TypeError):
        return None
    return location if is_intact else None
