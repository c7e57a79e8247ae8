"""The bytes of segments: pack and parse, nothing that touches a file. Specified in docs/FORMAT.md.

INVARIANT: `parse_record` returns only headers whose checksum is right, and only
records that were written at that very place of this very cache.
This is not the reader of the fast path: C (native/segment/) parses fixed parts of headers itself,
and native/log/record.c writes those of a log.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from fusecache.base import digest
from fusecache.store.types import ALIGNMENT, BLOCK_BYTES, RECORD_ALIGNMENT, Version

FORMAT_VERSION: Final = 1  # the next one is 3
FURTHER_VERSION: Final = 2  # the `format` line of a set's directory that is not home
SEGMENT_HEADER_BYTES: Final = 4096
TYPE_BLOCK: Final = 1
TYPE_ENTRY: Final = 2

_SEGMENT_MAGIC: Final = b"FCSEG\0\0\1"
_SEGMENT = struct.Struct("<8sQ16sQB7x")
_LOG_MARK_AT: Final = 64
_LOG_MARK = struct.Struct("<QQ16s")
_RECORD_MAGIC: Final = 0x31424346
_MAGIC_BYTES: Final = struct.pack("<I", _RECORD_MAGIC)
_RECORD = struct.Struct("<IIII32sQIHBBQ")
_ENTRY = struct.Struct("<16sQQqqIHH")
_CHECKSUM_AT: Final = 64
_U64 = struct.Struct("<Q")
_PLACE = struct.Struct("<16sQQ")

# entry_len is 16 bits wide; header_len must stay a small part of the smallest segment.
PATH_BYTES_MAX: Final = 60_000
# A longer header begins at a multiple of ALIGNMENT: the inode table has no more bits for both.
_HEADER_BYTES_SHORT: Final = ((1 << 10) - 1) * 8


class SegmentHeader(NamedTuple):
    segno: int
    uuid: bytes
    created_ns: int
    algorithm: int


class Record(NamedTuple):
    """A parsed record header. `digest` has its natural length; `chunk_sums` are unsigned."""

    type: int
    header_len: int
    payload_len: int
    record_len: int
    digest: bytes
    fetched_ns: int
    chunk_sums: tuple[int, ...]
    dataset: bytes
    version: Version
    block: int
    path: bytes


def align(length: int) -> int:
    return (length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def record_length(header_len: int, payload_len: int) -> int:
    alignment = RECORD_ALIGNMENT if header_len <= _HEADER_BYTES_SHORT else ALIGNMENT
    return (header_len + payload_len + alignment - 1) // alignment * alignment


def record_begin(position: int, header_len: int) -> int:
    """Where a record with such a header begins, at `position` or behind."""
    return position if header_len <= _HEADER_BYTES_SHORT else align(position)


def segment_bytes(limit_bytes: int) -> int:
    return max(8 << 20, min(limit_bytes // 16, 256 << 20)) // ALIGNMENT * ALIGNMENT


def pack_segment_header(header: SegmentHeader) -> bytes:
    body = _SEGMENT.pack(
        _SEGMENT_MAGIC, header.segno, header.uuid, header.created_ns, header.algorithm
    )
    return (body + _U64.pack(digest.checksum(body))).ljust(SEGMENT_HEADER_BYTES, b"\0")


def parse_segment_header(data: bytes) -> SegmentHeader | None:
    if len(data) < _SEGMENT.size + 8 or data[:8] != _SEGMENT_MAGIC:
        return None
    if digest.checksum(data[: _SEGMENT.size]) != _U64.unpack_from(data, _SEGMENT.size)[0]:
        return None
    _, segno, uuid, created_ns, algorithm = _SEGMENT.unpack_from(data)
    return SegmentHeader(segno, uuid, created_ns, algorithm)


class LogMark(NamedTuple):
    """What the header of a packed segment says: `log` is the number of its log's first segment,
    whose mark has `reserved_bytes`, all that the log may still come to (0 in the others); `boot`:
    which run of the machine wrote it."""

    log: int
    reserved_bytes: int
    boot: bytes


def add_log_mark(header: bytes, mark: LogMark) -> bytes:
    body = _LOG_MARK.pack(*mark)
    marked = body + _U64.pack(digest.checksum(body))
    return header[:_LOG_MARK_AT] + marked + header[_LOG_MARK_AT + len(marked) :]


def parse_log_mark(data: bytes) -> LogMark | None:
    """Of a segment header; None: a segment that is no log's."""
    body = data[_LOG_MARK_AT : _LOG_MARK_AT + _LOG_MARK.size]
    end = _LOG_MARK_AT + _LOG_MARK.size + 8
    if len(data) < end or digest.checksum(body) != _U64.unpack_from(data, end - 8)[0]:
        return None
    return LogMark(*_LOG_MARK.unpack(body))


def header_length(payload_len: int, path: bytes) -> int:
    chunks = -(-payload_len // digest.CHUNK_BYTES)
    return (_RECORD.size + 8 * chunks + _ENTRY.size + len(path) + 8 + 7) & ~7


def pack_record(record: Record, algorithm: int, uuid: bytes, segno: int, offset: int) -> bytes:
    """The header of a record at `offset` of `segno`; header_len and record_len must be right."""
    sums = record.chunk_sums
    entry = b"".join(
        (
            _ENTRY.pack(
                record.dataset, *wrap_version(record.version), record.block, len(record.path), 0
            ),
            record.path,
            _U64.pack(digest.checksum(_PLACE.pack(uuid, segno, offset))),
        )
    )
    header = bytearray(record.header_len)
    _RECORD.pack_into(
        header,
        0,
        _RECORD_MAGIC,
        record.header_len,
        record.payload_len,
        record.record_len,
        record.digest,
        record.fetched_ns,
        len(sums),
        len(entry),
        algorithm,
        record.type,
        0,
    )
    at = _RECORD.size
    struct.pack_into(f"<{len(sums)}Q", header, at, *sums)
    at += 8 * len(sums)
    header[at : at + len(entry)] = entry
    _U64.pack_into(header, _CHECKSUM_AT, digest.checksum(header, _seed(segno, offset)))
    return bytes(header)


def _seed(segno: int, offset: int) -> int:
    """A header is checked with its place as the seed: the C front has no uuid to compare, but must
    notice a record that the disk delivered from elsewhere."""
    return segno << 32 | offset % ALIGNMENT // RECORD_ALIGNMENT << 24 | offset // ALIGNMENT


def next_header(data: bytes) -> int:
    """How far behind the start of `data` a record header may begin, or all of it is none."""
    at = RECORD_ALIGNMENT
    while at < len(data) and data[at : at + len(_MAGIC_BYTES)] != _MAGIC_BYTES:
        found = data.find(_MAGIC_BYTES, at)
        at = len(data) if found < 0 else -(-found // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
    return max(at, RECORD_ALIGNMENT)


def header_length_of(data: bytes) -> int | None:
    """How many bytes a record header that begins with `data` has; None if it cannot be one."""
    if len(data) < _RECORD.size:
        return None
    fields = _RECORD.unpack_from(data)
    magic, header_len, payload_len, record_len = fields[:4]
    chunks, entry_len = fields[6:8]
    if (
        magic != _RECORD_MAGIC
        or header_len % 8
        or payload_len > BLOCK_BYTES
        or record_len % RECORD_ALIGNMENT
        or record_len < header_len + payload_len
        or chunks != -(-payload_len // digest.CHUNK_BYTES)
        or entry_len < _ENTRY.size + 8
        or header_len < _RECORD.size + 8 * chunks + entry_len
    ):
        return None
    return int(header_len)


def parse_record(data: bytes, place: tuple[bytes, int, int]) -> Record | None:
    """The record whose header is at the start of `data`; None if it is not a valid one.

    `data` must hold the whole header (see `header_length_of`). `place` is (uuid, segno, offset).
    """
    header_len = header_length_of(data)
    if header_len is None or header_len > len(data):
        return None
    header = bytearray(data[:header_len])
    fields = _RECORD.unpack_from(header)
    _, _, payload_len, record_len, name, fetched_ns, chunks, entry_len, algorithm, kind, sum_ = (
        fields
    )
    _U64.pack_into(header, _CHECKSUM_AT, 0)
    uuid, segno, offset = place
    if digest.checksum(header, _seed(segno, offset)) != sum_ or kind not in (
        TYPE_BLOCK,
        TYPE_ENTRY,
    ):
        return None
    at = _RECORD.size + 8 * chunks
    dataset, ino, size, mtime_ns, ctime_ns, block, path_len, _ = _ENTRY.unpack_from(header, at)
    path_at = at + _ENTRY.size
    if _ENTRY.size + path_len + 8 != entry_len:
        return None
    expected = digest.checksum(_PLACE.pack(uuid, segno, offset))
    if _U64.unpack_from(header, path_at + path_len)[0] != expected:
        return None
    return Record(
        kind,
        header_len,
        payload_len,
        record_len,
        name[: digest.digest_bytes(algorithm)],
        fetched_ns,
        struct.unpack_from(f"<{chunks}Q", header, _RECORD.size),
        dataset,
        Version(ino, size, mtime_ns, ctime_ns),
        block,
        bytes(header[path_at : path_at + path_len]),
    )


def signed(value: int) -> int:
    """The 64-bit pattern of `value` as a signed integer: what SQLite and `q` fields can hold."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def unsigned(value: int) -> int:
    return value & ((1 << 64) - 1)


def wrap_version(version: Version) -> Version:
    """Times and numbers outside 64 bits wrap; a strange origin must not stop the cache."""
    return Version(
        unsigned(version.ino),
        unsigned(version.size),
        signed(version.mtime_ns),
        signed(version.ctime_ns),
    )


FORMAT_WORD: Final = "fusecache"
SET_WORD: Final = "fusecache-set"


def pack_format_line(uuid: bytes, algorithm_name: str, version: int = FORMAT_VERSION) -> bytes:
    return _line(f"{FORMAT_WORD} {version} {algorithm_name} {uuid.hex()} ")


def format_version_of(line: bytes) -> int | None:
    """The version of a `format` file, whatever follows it; None when it is not one."""
    words = line[:200].split()
    if len(words) < 2 or words[0] != FORMAT_WORD.encode() or not words[1].isdigit():
        return None
    return int(words[1])


def parse_format_line(line: bytes) -> tuple[bytes, str] | None:
    """(uuid, digest algorithm) of an intact line of a version that is known."""
    try:
        _, version, algorithm, uuid = _words(line)
        if not 1 <= int(version) <= FURTHER_VERSION or algorithm not in digest.ALGORITHMS:
            return None
        return bytes.fromhex(uuid), algorithm
    except ValueError:
        return None


class SetLine(NamedTuple):
    """What one directory of several says of itself; `ids`: of all of them, home's first."""

    uuid: bytes
    age: int
    lineage: bytes
    before: bytes
    own: bytes
    ids: tuple[bytes, ...]


def pack_set_line(line: SetLine) -> bytes:
    ids = ",".join(name.hex() for name in line.ids)
    hexes = " ".join(part.hex() for part in (line.lineage, line.before, line.own))
    return _line(f"{SET_WORD} 1 {line.uuid.hex()} {line.age} {hexes} {ids} ")


def parse_set_line(data: bytes) -> SetLine | None:
    try:
        word, version, uuid, age, *hexes, ids = _words(data)
        lineage, before, own = map(bytes.fromhex, hexes)
        if (word, version) != (SET_WORD, "1"):
            return None
        names = tuple(bytes.fromhex(name) for name in ids.split(","))
        return SetLine(bytes.fromhex(uuid), int(age), lineage, before, own, names)
    except ValueError:
        return None


def _line(body: str) -> bytes:
    return f"{body}{digest.checksum(body.encode()):016x}\n".encode()


def _words(line: bytes) -> list[str]:
    """Those before the checksum. ValueError: it is wrong."""
    text = line.decode("ascii")
    body, sum_ = text[:-17], text[-17:]
    if sum_ != f"{digest.checksum(body.encode()):016x}\n" or not body.endswith(" "):
        raise ValueError("not an intact line")
    return body[:-1].split(" ")


def pack_high(segno: int) -> bytes:
    body = _U64.pack(segno)
    return body + _U64.pack(digest.checksum(body))


def parse_high(data: bytes) -> int | None:
    if len(data) != 16 or digest.checksum(data[:8]) != _U64.unpack_from(data, 8)[0]:
        return None
    return int(_U64.unpack_from(data)[0])
