"""What the front has to know, to read blocks from SSD by itself."""

from __future__ import annotations

import os
from typing import Protocol

from fusecache import _native
from fusecache.store.types import Location, Version


class Segments(Protocol):
    """Whose segments they are."""

    def open_segment(self, segno: int) -> int | None:
        """A new read-only descriptor, the caller's to close; None: the segment is gone."""


def use(store: Segments, ino: int, block: int, location: Location, version: Version) -> bool:
    """Tell the front where a block lies. False: its segment is gone, or the file has changed."""
    return open_segment(store, location.segno) and _native.set_location(
        ino, block, location.segno, location.offset, location.header_len, version
    )


def open_segment(store: Segments, segno: int) -> bool:
    """Make sure the front can read from it. False: it is gone. Blocking."""
    if _native.segment_known(segno):
        return True
    fd = store.open_segment(segno)
    if fd is None:
        return False
    try:
        _native.segment_add(segno, fd)
    finally:
        os.close(fd)
    return True
