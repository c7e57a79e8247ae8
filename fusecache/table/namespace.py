"""Python's view of the inode table: files as versions and blocks, and who may be listed when.

The table itself is in C (`_native`): compact, shared with the front threads, outliving the server.
"""

from __future__ import annotations

import os

import xxhash

from fusecache import _native
from fusecache.store.types import BLOCK_BYTES, Version


def dataset_id(source: str) -> bytes:
    """16 bytes that name a dataset in the store: a hash of the source's path (resolved by the
    caller).
    """
    return xxhash.xxh3_128_digest(os.fsencode(source))


def version(ino: int) -> Version:
    """The version the table holds. Raises UnknownInode."""
    return Version(*_native.version(ino))


def block_span(size: int, block: int) -> tuple[int, int]:
    """(offset, length) in bytes of block number `block` in a file of `size` bytes."""
    offset = block * BLOCK_BYTES
    return offset, min(BLOCK_BYTES, size - offset)


def clipped(first: int, stop: int, size: int) -> tuple[int, int]:
    """(offset, length) in bytes of what a file of `size` bytes has of [first, stop)."""
    return first, max(0, min(stop, size) - first)


def block_count(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def blocks_of(offset: int, length: int) -> range:
    """Numbers of the blocks that [offset, offset + length) touches; length > 0."""
    return range(offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES + 1)


def is_located(ino: int, block: int = 0) -> bool:
    """Whether the block has a location, in a segment that was not evicted since."""
    location = _native.get_location(ino, block)
    return location is not None and _native.segment_known(location[0])
