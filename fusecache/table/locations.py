"""What the front has to know, to read blocks from SSD by itself."""

from __future__ import annotations

import os

from fusecache import _native
from fusecache.store import Store
from fusecache.store.types import Location, Version


def use(store: Store, ino: int, block: int, location: Location, version: Version) -> bool:
    """Tell the front where a block lies. False: its segment is gone, or the file has changed."""
    return open_segment(store, location.segno) and _native.set_location(
        ino, block, location.segno, location.offset, location.header_len, version
    )


def open_segment(store: Store, segno: int) -> bool:
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
