"""The index: which block lies where. A SQLite database that is only a cache of the segments."""

from fusecache.store.index.database import ERRORS, IndexDamaged, create, damage, finish
from fusecache.store.index.index import Index
from fusecache.store.index.rows import (
    ADOPT_BLOCK,
    ADOPT_FILE,
    INSERT_SEGMENT,
    BlockRow,
    FileRow,
    SegmentRow,
    block_row,
    file_row,
    growth_bytes,
    segment_values,
)

__all__ = [
    "ADOPT_BLOCK",
    "ADOPT_FILE",
    "ERRORS",
    "INSERT_SEGMENT",
    "BlockRow",
    "FileRow",
    "Index",
    "IndexDamaged",
    "SegmentRow",
    "block_row",
    "create",
    "damage",
    "file_row",
    "finish",
    "growth_bytes",
    "segment_values",
]
