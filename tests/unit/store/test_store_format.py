"""The bytes of docs/FORMAT.md."""

from __future__ import annotations

import struct

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from fusecache.store.segment import format as fmt
from fusecache.store.types import Version
from tests.support.store_support import DATASET, MIB

UUID = bytes(range(16))


def make(path: bytes, payload: bytes, kind: int = fmt.TYPE_BLOCK) -> fmt.Record:
    length = len(payload) if kind == fmt.TYPE_BLOCK else 0
    header_len = fmt.header_length(length, path)
    sums = tuple(
        xxhash.xxh3_64_intdigest(payload[at : at + 65536]) for at in range(0, length, 65536)
    )
    return fmt.Record(
        kind,
        header_len,
        length,
        fmt.align(header_len + length),
        xxhash.xxh3_128_digest(payload),
        123456789,
        sums,
        DATASET,
        Version(2**64 - 1, len(payload), -1, 2**62),
        3,
        path,
    )


def test_record_header_is_laid_out_as_specified() -> None:
    payload = bytes(65536) + b"x" * 100
    record = make(b"a/b.jpg", payload)
    header = fmt.pack_record(record, 1, UUID, 5, 8192)
    assert len(header) == record.header_len
    assert record.header_len % 8 == 0
    assert struct.unpack_from("<IIII", header) == (
        0x31424346,
        record.header_len,
        len(payload),
        record.record_len,
    )
    assert header[16:48] == xxhash.xxh3_128_digest(payload).ljust(32, b"\0")
    assert struct.unpack_from("<QIHBB", header, 48) == (123456789, 2, 56 + 7 + 8, 1, 1)
    zeroed = header[:64] + bytes(8) + header[72:]
    assert struct.unpack_from("<Q", header, 64)[0] == xxhash.xxh3_64_intdigest(zeroed, 5 << 32 | 2)
    assert struct.unpack_from("<2Q", header, 72) == record.chunk_sums
    assert header[88:104] == DATASET
    assert struct.unpack_from("<QQqqIHH", header, 104) == (*record.version, 3, 7, 0)
    assert header[144:151] == b"a/b.jpg"
    place = xxhash.xxh3_64_intdigest(UUID + struct.pack("<QQ", 5, 8192))
    assert struct.unpack_from("<Q", header, 151)[0] == place


@given(
    path=st.binary(min_size=1, max_size=5000),
    payload=st.binary(min_size=1, max_size=200_000),
    kind=st.sampled_from([fmt.TYPE_BLOCK, fmt.TYPE_ENTRY]),
)
def test_record_headers_come_back(path: bytes, payload: bytes, kind: int) -> None:
    record = make(path, payload, kind)
    header = fmt.pack_record(record, 1, UUID, 5, 8192)
    assert fmt.parse_record(header + payload, (UUID, 5, 8192)) == record
    assert fmt.parse_record(header, (UUID, 5, 4096)) is None
    assert fmt.parse_record(header, (UUID, 6, 8192)) is None
    assert fmt.parse_record(header, (bytes(16), 5, 8192)) is None
    assert fmt.parse_record(header[:-1], (UUID, 5, 8192)) is None


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    header = fmt.pack_record(make(b"name", b"payload"), 1, UUID, 1, 4096)
    for bit in range(len(header) * 8):
        flipped = bytearray(header)
        flipped[bit // 8] ^= 1 << bit % 8
        assert fmt.parse_record(bytes(flipped), (UUID, 1, 4096)) is None


@given(st.binary(max_size=300))
def test_garbage_is_no_record(data: bytes) -> None:
    assert fmt.parse_record(data, (UUID, 1, 4096)) is None
    assert fmt.parse_record(struct.pack("<I", 0x31424346) + data, (UUID, 1, 4096)) is None
    assert fmt.parse_segment_header(data) is None
    assert fmt.parse_format_line(data) is None
    assert fmt.parse_high(data) is None


def test_segment_headers_and_small_files_come_back() -> None:
    header = fmt.SegmentHeader(9, UUID, 42, 2)
    data = fmt.pack_segment_header(header)
    assert len(data) == 4096
    assert fmt.parse_segment_header(data) == header
    line = fmt.pack_format_line(UUID, "blake3")
    assert fmt.parse_format_line(line) == (UUID, "blake3")
    assert fmt.format_version_of(line) == 1
    assert fmt.parse_format_line(line[:-1]) is None
    assert fmt.parse_high(fmt.pack_high(77)) == 77


def test_segment_sizes() -> None:
    assert fmt.segment_bytes(1) == 8 * MIB
    assert fmt.segment_bytes(1 << 50) == 256 * MIB
    middle = fmt.segment_bytes((1 << 30) + 12345)
    assert middle % 4096 == 0
    assert middle == 64 * MIB
