"""Whether a file of one block is on SSD: by its location, the log, and the index."""

from __future__ import annotations

import contextlib
from collections.abc import Container

from fusecache import _native
from fusecache.base.errors import UnknownInode
from fusecache.read.sources import Segments
from fusecache.reorder.packer import Packer
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace


def in_log(ino: int, size_bytes: int | None = None) -> tuple[Version, bytes] | None:
    """A file of one block that waits in the log to be written, and has no location before; so many
    of its bytes (None: all). One that is written meanwhile has its location when this returns.
    """
    try:
        version = namespace.version(ino)
    except UnknownInode:
        return None
    if version.size > BLOCK_BYTES:
        return None
    data = _native.log_read(ino, version, 0, version.size if size_bytes is None else size_bytes)
    return None if data is None else (version, data)


class Stored:
    """What is where, of one mount. All but `has_come` is blocking."""

    def __init__(self, segments: Segments, packer: Packer, preloaded: Container[int]) -> None:
        """`preloaded`: directories whose files' locations the front knows."""
        self._segments = segments
        self._packer = packer
        self._preloaded = preloaded

    def are_stored(self, inos: list[int]) -> list[bool]:
        """Whether each is on SSD, or on its way there in the log. No: what is larger than that."""
        return [self._is_stored(ino) for ino in inos]

    def _is_stored(self, ino: int) -> bool:
        if namespace.version(ino).size > BLOCK_BYTES:
            return False
        return in_log(ino, 0) is not None or self.is_located(ino)

    def is_located(self, ino: int) -> bool:
        """Whether the file's one block has a location."""
        try:
            version = namespace.version(ino)
            if version.size == 0:
                return True
            is_known = _native.get_location(ino, 0) is not None
            if not is_known and _native.parent(ino) in self._preloaded:
                return False  # the index was asked for the whole directory
            return self._segments.has(ino, version, 0)
        except UnknownInode:
            return False

    def locate_all(self, inos: list[int]) -> None:
        """Have the front know where all of their blocks lie that are on SSD."""
        for ino in inos:
            with contextlib.suppress(UnknownInode):
                version = namespace.version(ino)
                for block in range(namespace.block_count(version.size)):
                    self._segments.has(ino, version, block)

    def has_come(self, ino: int) -> bool:
        """To SSD, or to the log, since it was looked for there: a reader was faster, say."""
        # In this order: what leaves the log is located before.
        return (self._packer.has_logs and in_log(ino, 0) is not None) or namespace.is_located(ino)
