"""Rows that wait for a commit: in memory, visible to this process at once.

INVARIANT: a row is dropped only after the transaction that has it, unless a later one took its
place meanwhile; or, where none can be committed, when there are more than ROWS_MOST.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from fusecache.store.index.database import BATCH_ROWS
from fusecache.store.index.rows import BlockRow, FileKey, FileRow, growth_bytes

BATCH_SECONDS: Final = 0.2
ROWS_MOST: Final = 8192


class Batch(NamedTuple):
    """What is to be committed; `fetched_ns` of segments."""

    files: dict[FileKey, FileRow]
    blocks: dict[bytes, BlockRow]
    fetched_ns: dict[int, int]


class Pending:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[FileKey, FileRow] = {}
        self._blocks: dict[bytes, BlockRow] = {}
        self._fetched_ns: dict[int, int] = {}
        self._since = 0.0

    def add(self, files: Sequence[FileRow], blocks: Sequence[BlockRow]) -> bool:
        """Queue rows; True when it is time to commit."""
        with self._lock:
            if not self._files and not self._blocks:
                self._since = time.monotonic()
            for file in files:
                self._files[file[:3]] = file
            for block in blocks:
                self._blocks[block[0]] = block
            is_late = time.monotonic() - self._since >= BATCH_SECONDS
            return len(self._files) >= BATCH_ROWS or is_late

    def touch(self, segno: int, fetched_ns: int) -> None:
        """The segment was fetched into, deduplicated against or, as `reuse` notes it, read from."""
        with self._lock:
            self._fetched_ns[segno] = fetched_ns

    def copy(self) -> Batch:
        with self._lock:
            return Batch(dict(self._files), dict(self._blocks), dict(self._fetched_ns))

    def drop(self, batch: Batch) -> None:
        """What of it has not been replaced since it was copied."""
        with self._lock:
            for key, row in batch.files.items():
                if self._files.get(key) is row:
                    del self._files[key]
            for name, block in batch.blocks.items():
                if self._blocks.get(name) is block:
                    del self._blocks[name]
            for segno, when in batch.fetched_ns.items():
                if self._fetched_ns.get(segno) == when:
                    del self._fetched_ns[segno]
            self._since = time.monotonic()

    def forget(self, segno: int, offset: int) -> None:
        """Drop the rows of one record."""
        with self._lock:
            for key in [k for k, r in self._files.items() if r[7:9] == (segno, offset)]:
                del self._files[key]
            for name in [k for k, r in self._blocks.items() if r[1:3] == (segno, offset)]:
                del self._blocks[name]

    def growth_bytes(self) -> int:
        """By how much the index will grow by these rows, about."""
        with self._lock:
            return sum(growth_bytes(row[1]) for row in self._files.values())

    def file(self, key: FileKey) -> FileRow | None:
        with self._lock:
            return self._files.get(key)

    def files_in(self, directory: bytes) -> list[FileRow]:
        """Of all files with this `directory_key`."""
        with self._lock:
            return [row for row in self._files.values() if row[0] == directory]

    def blocks(self, names: Sequence[bytes]) -> tuple[list[BlockRow], list[bytes]]:
        """The rows of blocks with these digests, and the digests of which there is none."""
        with self._lock:
            rows = [self._blocks[name] for name in names if name in self._blocks]
            return rows, [name for name in names if name not in self._blocks]

    def block_names(self) -> list[bytes]:
        with self._lock:
            return list(self._blocks)
