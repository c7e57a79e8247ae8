"""The store's vocabulary, shared with its callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from fusecache.base.units import BLOCK_BYTES as BLOCK_BYTES

CHUNK_BYTES = 64 << 10
ALIGNMENT = 4096  # of what is read and written
RECORD_ALIGNMENT = 512


class Version(NamedTuple):
    """What identifies the content of a file at the origin (see docs/ARCHITECTURE.md). `ino` 0: the
    origin's inode numbers mean nothing.
    """

    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    def matches(self, other: Version) -> bool:
        """Of the two, one may be from before it was known that numbers mean nothing."""
        return self[1:] == other[1:] and (self.ino == other.ino or not self.ino or not other.ino)


# A block to store: (path, version of the file, number of the block in it, its bytes).
Item = tuple[bytes, Version, int, bytes | bytearray | memoryview]


class Location(NamedTuple):
    """Where a block's record lies. The payload begins `header_len` bytes after `offset`."""

    segno: int
    offset: int
    header_len: int
    payload_len: int


# What can be wrong with a record: its bytes, or the disk that does not give them.
RecordFault = Literal["checksum", "read"]


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """`limit_bytes`: hard limit of the whole cache, the least that any of its processes was given;
    `keep_free_bytes` of each disk stay free.
    """

    limit_bytes: int
    keep_free_bytes: int
    policy: str = "lrf"  # or "keep"; "reuse" needs a Reuse, else it is lrf
    digest: str = "xxh3-128"  # or "blake3"


@dataclass(frozen=True, slots=True)
class Usage:
    """Of the whole cache directory, all mounts together. `bytes`: what is written, and the index;
    `reserved_bytes`: with what is reserved for segments that are being written, which the limit
    counts.
    """

    bytes: int
    reserved_bytes: int
    limit_bytes: int
    blocks: int
    segments: int


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """One directory of the cache. `why_out`: why it is not used; empty: it is. `bytes`: written."""

    path: str
    why_out: str
    bytes: int
    segments: int
