"""Reads a file of traces.

INVARIANT: whatever bytes a file has, what comes back is what was written, or TraceError is raised;
nothing is decoded that would not fit into memory.
"""

from __future__ import annotations

import io
import itertools
import os
import zlib
from collections.abc import Iterator
from typing import Final, NoReturn

import numpy as np

from fusecache.base.digest import checksum
from fusecache.base.processes import usable_memory_bytes
from fusecache.base.units import format_bytes
from fusecache.traces import blocks
from fusecache.traces.blocks import Columns
from fusecache.traces.trace import Gap, Importance, Integers, Trace, TraceError

# What reading takes at its peak, merging included. Rows of zeros cost a file nothing.
_MEMORY_PER_ROW: Final = 160
_MEMORY_PER_PAYLOAD: Final = 4  # a name's characters may take so much each


class Reading:
    """Of one file, block by block. TraceError: no trace, damaged, of another version, or larger
    than memory.
    """

    def __init__(self, path: str, file: io.BufferedReader) -> None:
        self._path, self._file = path, file
        self._number = 0  # of the block being read
        self._memory_bytes, self._usable_bytes = 0, usable_memory_bytes()
        self._sizes: list[Integers] = []
        self._names: list[str] = []
        self._accesses: list[list[Integers]] = []
        self._starts = [0]
        self._importances: list[Importance] = []
        self._gaps: list[Gap] = []
        self._items = self._count = 0
        self._is_complete = False
        start = file.read(blocks.HEADER.size)
        if start[: len(blocks.MAGIC)] != blocks.MAGIC or len(start) < blocks.HEADER.size:
            raise TraceError(f"{path} is no access trace")
        _, version, self._columns, source_bytes = blocks.HEADER.unpack(start)
        if version != blocks.VERSION:
            raise TraceError(
                f"{path} is a trace of version {version}; "
                f"this fusecache reads version {blocks.VERSION}"
            )
        source = file.read(min(source_bytes, blocks.SOURCE_BYTES_MOST))
        if file.read(blocks.SUM.size) != blocks.SUM.pack(checksum(start + source)):
            raise TraceError(f"{path} is damaged or cut off: its header")
        self._source = source.decode("utf-8", "surrogateescape")

    def _damaged(self, why: str) -> NoReturn:
        raise TraceError(f"{self._path} is damaged: block {self._number}: {why}")

    def blocks(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, rows, payload) of each whole block."""
        while True:
            header = self._file.read(blocks.BLOCK_HEADER_BYTES)
            if header and self._is_complete:
                self._damaged("it follows the last one")
            if len(header) < blocks.BLOCK_HEADER_BYTES:
                return
            (magic, kind, packing, zero, rows, stored_bytes, size_bytes, number, payload_sum) = (
                blocks.BLOCK.unpack_from(header)
            )
            if header[blocks.BLOCK.size :] != blocks.SUM.pack(
                checksum(header[: blocks.BLOCK.size])
            ):
                self._damaged("checksum of its header")
            if (magic, zero, number) != (blocks.BLOCK_MAGIC, 0, self._number):
                self._damaged("it does not belong here")
            if max(stored_bytes, size_bytes) > blocks.PAYLOAD_BYTES_MOST:
                self._damaged("it is too large")
            if rows > blocks.ROWS_MOST.get(kind, 1):
                self._damaged(f"{rows} rows")
            self._reserve(rows, size_bytes)
            stored = self._file.read(stored_bytes)
            if len(stored) < stored_bytes:
                return
            if checksum(stored) != payload_sum:
                self._damaged("checksum")
            yield kind, rows, self._unpack(packing, stored, size_bytes)
            self._number += 1

    def _reserve(self, rows: int, size_bytes: int) -> None:
        """Before a block is decoded: what it says that it holds may be far more than its bytes."""
        self._memory_bytes += rows * _MEMORY_PER_ROW + size_bytes * _MEMORY_PER_PAYLOAD
        if self._memory_bytes > self._usable_bytes:
            raise TraceError(
                f"{self._path}: block {self._number}: up to here it takes "
                f"{format_bytes(self._memory_bytes)} of memory to read, "
                f"and {format_bytes(self._usable_bytes)} are usable"
            )

    def _unpack(self, packing: int, stored: bytes, size_bytes: int) -> bytes:
        if packing == blocks.ZLIB:
            unpacking = zlib.decompressobj()
            try:
                stored = unpacking.decompress(stored, size_bytes + 1)
            except zlib.error as error:
                self._damaged(str(error))
        elif packing != blocks.RAW:
            self._damaged(f"packing {packing} is unknown")
        if len(stored) != size_bytes:
            self._damaged("it has another length than it says")
        return stored

    def take(self, kind: int, rows: int, payload: bytes) -> None:
        columns = Columns(payload)
        try:
            if kind == blocks.ITEMS:
                self._take_items(rows, columns)
            elif kind == blocks.ACCESSES:
                self._take_accesses(rows, columns)
            elif kind == blocks.EPOCH:
                position = self._position(columns)
                if position <= self._starts[-1]:
                    raise ValueError("the epoch before it has no access")
                self._starts.append(position)
            elif kind == blocks.IMPORTANCES:
                position = self._position(columns)
                items = self._known(columns.integers(rows))
                values = np.frombuffer(columns.bytes(4 * rows), "<f4").astype(np.float32)
                self._importances.append(Importance(position, items, values))
            elif kind == blocks.GAP:
                position, lost = self._position(columns), columns.u64()
                self._gaps.append(Gap(position, None if lost == blocks.UNKNOWN else lost))
            elif kind == blocks.END:
                if (columns.u64(), columns.u64()) != (self._count, self._items):
                    raise ValueError("it counts other accesses or items than there are")
                self._is_complete = True
            else:
                raise ValueError(f"kind {kind} is unknown")
            columns.end()
        except ValueError as error:
            self._damaged(str(error))

    def _position(self, columns: Columns) -> int:
        """Where such a block stands: it is written right there."""
        position = columns.u64()
        if position != self._count:
            raise ValueError(f"it is about access {position} and stands before {self._count}")
        return position

    def _known(self, items: Integers) -> Integers:
        if len(items) and not 0 <= int(items.min()) <= int(items.max()) < self._items:
            raise ValueError("it names an item that no block before it has")
        return items

    def _take_items(self, rows: int, columns: Columns) -> None:
        sizes = columns.integers(rows)
        if rows and int(sizes.min()) < 0:
            raise ValueError("a size is negative")
        if self._columns & blocks.HAS_NAMES:
            lengths = columns.integers(rows)
            if rows and not 0 <= int(lengths.min()) <= int(lengths.max()) <= blocks.NAME_BYTES_MOST:
                raise ValueError(f"a name is longer than {blocks.NAME_BYTES_MOST} bytes")
            ends = np.cumsum(lengths).tolist()
            names = bytes(columns.bytes(ends[-1] if ends else 0))
            self._names += [os.fsdecode(names[a:b]) for a, b in itertools.pairwise([0, *ends])]
        self._sizes.append(sizes)
        self._items += rows

    def _take_accesses(self, rows: int, columns: Columns) -> None:
        taken = [self._known(columns.integers(rows))]
        for flag in (blocks.HAS_TIMES, blocks.HAS_READERS, blocks.HAS_SEEN):
            if self._columns & flag:
                taken.append(columns.integers(rows))
        self._accesses.append(taken)
        self._count += rows

    def trace(self) -> Trace:
        parts = [np.concatenate(column) for column in zip(*self._accesses, strict=True)]

        def column(flag: int) -> Integers | None:
            if not self._columns & flag:
                return None
            place = (
                self._columns & (flag - 1) & (blocks.HAS_TIMES | blocks.HAS_READERS)
            ).bit_count() + 1
            return parts[place] if parts else np.zeros(0, np.int64)

        times_us, readers, seen = map(
            column, (blocks.HAS_TIMES, blocks.HAS_READERS, blocks.HAS_SEEN)
        )
        return Trace(
            items=parts[0] if parts else np.zeros(0, np.int64),
            sizes=np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int64),
            epoch_starts=np.array(self._starts, np.int64),
            times_s=None if times_us is None else times_us / 1e6,
            importances=tuple(self._importances),
            readers=None if readers is None else readers.astype(np.int32),
            seen=None if seen is None else seen.astype(np.uint8),
            names=tuple(self._names) if self._columns & blocks.HAS_NAMES else None,
            source=self._source,
            gaps=tuple(self._gaps),
            is_complete=self._is_complete,
        )
