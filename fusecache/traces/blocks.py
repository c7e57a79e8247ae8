"""The bytes of a file of traces: its header, its blocks, and their columns (docs/TRACES.md).

A file is a header and blocks, each with checksums of its own, so that whoever writes may be killed
at any moment: what was written in whole blocks stays readable.

INVARIANT: a block refers only to items and accesses of blocks before it.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

from fusecache.base.digest import checksum
from fusecache.traces.trace import Integers

VERSION: Final = 1
BLOCK_ACCESSES: Final = 1 << 16

MAGIC: Final = b"FCTRACE\n"
HEADER: Final = struct.Struct("<8sHHI")  # magic, version, columns, length of the source
HAS_TIMES, HAS_READERS, HAS_SEEN, HAS_NAMES = 1, 2, 4, 8
SOURCE_BYTES_MOST: Final = 64 << 10
BLOCK_MAGIC: Final = 0x42544346  # "FCTB"
# magic, kind, packing, zero, rows, stored bytes, bytes, number, checksum of the stored bytes;
# then the checksum of all this
BLOCK: Final = struct.Struct("<IBBHIIIIQ")
SUM: Final = struct.Struct("<Q")
BLOCK_HEADER_BYTES: Final = BLOCK.size + SUM.size
PAYLOAD_BYTES_MOST: Final = 64 << 20
ITEMS, ACCESSES, EPOCH, IMPORTANCES, GAP, END = 1, 2, 3, 4, 5, 6
RAW, ZLIB = 0, 1
ROWS_MOST: Final = {ITEMS: 1 << 9, ACCESSES: BLOCK_ACCESSES, IMPORTANCES: 1 << 20}
NAME_BYTES_MOST: Final = (64 << 10) - 1
UNKNOWN: Final = (1 << 64) - 1
_ZLIB_LEVEL: Final = 1


def header(columns: int, source: str) -> bytes:
    text = " ".join(source.split()).encode("utf-8", "surrogateescape")[:SOURCE_BYTES_MOST]
    return _sealed(HEADER.pack(MAGIC, VERSION, columns, len(text)) + text)


def block(kind: int, rows: int, number: int, payload: bytes) -> bytes:
    stored, packing = zlib.compress(payload, _ZLIB_LEVEL), ZLIB
    if len(stored) >= len(payload):
        stored, packing = payload, RAW
    sizes = len(stored), len(payload)
    start = BLOCK.pack(BLOCK_MAGIC, kind, packing, 0, rows, *sizes, number, checksum(stored))
    return _sealed(start) + stored


def _sealed(data: bytes) -> bytes:
    return data + SUM.pack(checksum(data))


# ---- columns -------------------------------------------------------------------------------------

# A column is a byte (width in bytes of a value, and whether values are differences) and then the
# bytes of all values, plane by plane: all lowest bytes, all second bytes, …

DIFFERENCES: Final = 0x80


def _width(values: npt.NDArray[np.uint64]) -> int:
    return (int(values.max()).bit_length() + 7) // 8 if len(values) else 0


def pack(values: Integers) -> bytes:
    signed = np.ascontiguousarray(values, np.int64)
    steps = np.diff(signed, prepend=np.int64(0))
    zigzag = ((steps << 1) ^ (steps >> 63)).view(np.uint64)
    plain = signed.view(np.uint64)  # a negative value is wide
    flag, column = (DIFFERENCES, zigzag) if _width(zigzag) < _width(plain) else (0, plain)
    width = _width(column)
    planes = column.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T
    return bytes([width | flag]) + planes.tobytes()


class Columns:
    """Takes the columns of a block's payload off it. ValueError: they are not there."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def bytes(self, count: int) -> memoryview:
        if len(self._payload) - self._at < count:
            raise ValueError("the payload is too short")
        self._at += count
        return memoryview(self._payload)[self._at - count : self._at]

    def integers(self, count: int) -> npt.NDArray[np.int64]:
        kind = self.bytes(1)[0]
        width = kind & ~DIFFERENCES
        if width > 8:
            raise ValueError(f"a column of {width} bytes a value")
        padded = np.zeros((count, 8), np.uint8)
        padded[:, :width] = (
            np.frombuffer(self.bytes(count * width), np.uint8).reshape(width, count).T
        )
        column = padded.view("<u8").reshape(count)
        if not kind & DIFFERENCES:
            return column.view("<i8").astype(np.int64)
        steps = (column >> np.uint64(1)).astype(np.int64) ^ -(column & np.uint64(1)).astype(
            np.int64
        )
        return np.cumsum(steps, dtype=np.int64)

    def u64(self) -> int:
        return int.from_bytes(self.bytes(8), "little")

    def end(self) -> None:
        if self._at != len(self._payload):
            raise ValueError("the payload is too long")
