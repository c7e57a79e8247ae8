"""Segment reads in C: only verified bytes leave, and eviction elsewhere is a miss, not a fault."""

from __future__ import annotations

import itertools
import os
import random
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from fusecache import _native

ROOT = 1
MIB = 1 << 20
BLOCK = _native.BLOCK_BYTES
CHUNK = _native.CHUNK_BYTES
FIRST_RECORD = 4096

_segment_numbers = itertools.count(1000)


def seed(segno: int, offset: int) -> int:
    return segno << 32 | offset // 4096


def pack_record(
    payload: bytes, segno: int, offset: int, entry: bytes = b"entry"
) -> tuple[int, bytes]:
    """(header_len, record) as docs/FORMAT.md has it, written down here independently."""
    chunks = [payload[at : at + CHUNK] for at in range(0, len(payload), CHUNK)]
    header_len = -(-(72 + 8 * len(chunks) + len(entry)) // 8) * 8
    record_len = -(-(header_len + len(payload)) // 4096) * 4096
    header = bytearray(header_len)
    struct.pack_into(
        "<IIII32sQIHBBQ",
        header,
        0,
        0x31424346,
        header_len,
        len(payload),
        record_len,
        xxhash.xxh3_128_digest(payload),
        1,
        len(chunks),
        len(entry),
        1,
        1,
        0,
    )
    for number, chunk in enumerate(chunks):
        struct.pack_into("<Q", header, 72 + 8 * number, xxhash.xxh3_64_intdigest(chunk))
    header[72 + 8 * len(chunks) : 72 + 8 * len(chunks) + len(entry)] = entry
    struct.pack_into("<Q", header, 64, xxhash.xxh3_64_intdigest(bytes(header), seed(segno, offset)))
    return header_len, (bytes(header) + payload).ljust(record_len, b"\0")


class Cached:
    """One file at the origin whose blocks all lie in one segment."""

    def __init__(self, directory: Path, size: int, entry: bytes = b"entry") -> None:
        source = directory / "source"
        source.mkdir()
        self.data = random.Random(size).randbytes(size)
        (source / "file").write_bytes(self.data)
        self.table_fd = os.memfd_create("table")
        self.source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
        _native.attach(self.table_fd, self.source_fd, True)
        _native.scan(ROOT)
        self.ino = _native.lookup(ROOT, b"file")
        self.version = _native.version(self.ino)
        self.segno = next(_segment_numbers)
        self.path = directory / "segment"
        self.offsets: list[int] = []
        self.header_lens: list[int] = []
        with open(self.path, "wb") as segment:
            segment.write(bytes(FIRST_RECORD))
            for at in range(0, size, BLOCK):
                header_len, record = pack_record(
                    self.data[at : at + BLOCK], self.segno, segment.tell(), entry
                )
                self.offsets.append(segment.tell())
                self.header_lens.append(header_len)
                segment.write(record)
        self.fd = os.open(self.path, os.O_RDWR)
        _native.segment_add(self.segno, self.fd)
        self.locate()

    def locate(self) -> None:
        for block, offset in enumerate(self.offsets):
            assert _native.set_location(
                self.ino, block, self.segno, offset, self.header_lens[block], self.version
            )

    def read(self, offset: int, size: int) -> bytes | None:
        return _native.read_cached(self.ino, offset, size)

    def flip(self, offset: int, bit: int = 0) -> None:
        (byte,) = os.pread(self.fd, 1, offset)
        os.pwrite(self.fd, bytes([byte ^ (1 << bit)]), offset)

    def faults(self) -> list[tuple[int, int, int, int]]:
        return [event for event in _native.take_events() if event[0] == _native.EVENT_FAULT]

    def close(self) -> None:
        _native.segment_drop(self.segno)
        for fd in (self.fd, self.table_fd, self.source_fd):
            os.close(fd)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Cached]:
    cached = Cached(tmp_path, 150_001)
    yield cached
    cached.close()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Cached]:
    cached = Cached(tmp_path, 2 * BLOCK + 70_000, entry=b"p" * 4200)
    yield cached
    cached.close()


def test_every_range_of_a_small_file(small: Cached) -> None:
    size = len(small.data)
    edges = [0, 1, 4095, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, size - 1, size, size + 9]
    for first, last in itertools.combinations(edges, 2):
        assert small.read(first, last - first) == small.data[first:last]
    assert small.read(0, 10 * MIB) == small.data
    assert small.read(0, 0) == b""
    assert small.faults() == []


def test_ranges_of_a_large_file_span_blocks(large: Cached) -> None:
    size = len(large.data)
    rng = random.Random(5)
    ranges = [
        (BLOCK - 10, 20),
        (BLOCK - MIB, MIB + 1),
        (2 * BLOCK - 1, 2),
        (BLOCK, BLOCK),
        (0, BLOCK),
    ]
    ranges += [(size - 5, 100), (2 * BLOCK, 70_000), (size, 1), (size + BLOCK, 1)]
    ranges += [(rng.randrange(size), rng.randrange(1, MIB)) for _ in range(60)]
    for offset, length in ranges:
        assert large.read(offset, length) == large.data[offset : offset + length]
    assert large.faults() == []


def test_location_round_trip(large: Cached) -> None:
    for block, offset in enumerate(large.offsets):
        assert _native.get_location(large.ino, block) == (
            large.segno,
            offset,
            large.header_lens[block],
        )
    assert _native.get_location(large.ino, 3) is None
    assert _native.get_location(large.ino, 2**40) is None
    _native.clear_location(large.ino, 1, (large.segno, large.offsets[0], large.header_lens[0]))
    assert _native.get_location(large.ino, 1) is not None
    _native.clear_location(large.ino, 1, (large.segno, large.offsets[1], large.header_lens[1]))
    assert _native.get_location(large.ino, 1) is None
    assert large.read(0, 100) == large.data[:100]
    assert large.read(BLOCK, 1) is None
    for number in range(9):
        for header_len in (80, 8184):
            at = (7, (1 << 28) - 4096 + 512 * number, header_len)
            assert _native.set_location(large.ino, 0, *at, large.version)
            assert _native.get_location(large.ino, 0) == at
    for at in ((7, 4096, 65_528), (7, 4096, 8192)):
        assert _native.set_location(large.ino, 0, *at, large.version)
        assert _native.get_location(large.ino, 0) == at
    bad = ((0, 80), (4097, 80), (1 << 30, 80), (4096, 81), (4096, 1 << 20), (4096 + 512, 8192))
    for bad_offset, bad_header in bad:
        with pytest.raises(ValueError, match="out of range"):
            _native.set_location(large.ino, 0, 1, bad_offset, bad_header, large.version)


def test_location_is_only_for_the_version(small: Cached, tmp_path: Path) -> None:
    other = (small.version[0], small.version[1], small.version[2], small.version[3] + 1)
    _native.clear_location(small.ino, 0, (small.segno, small.offsets[0], small.header_lens[0]))
    assert not _native.set_location(small.ino, 0, small.segno, FIRST_RECORD, 80, other)
    assert not _native.set_location(small.ino, 1, small.segno, FIRST_RECORD, 80, small.version)
    assert not _native.set_location(ROOT, 0, small.segno, FIRST_RECORD, 80, _native.version(ROOT))
    small.locate()
    (tmp_path / "source" / "file").write_bytes(b"new")
    assert _native.refresh(small.ino) == 2
    assert _native.get_location(small.ino, 0) is None
    assert small.read(0, 3) is None


def test_a_version_change_clears_all_blocks(large: Cached, tmp_path: Path) -> None:
    os.utime(tmp_path / "source" / "file", ns=(0, 0))
    assert _native.refresh(large.ino) == 2
    for block in range(3):
        assert _native.get_location(large.ino, block) is None


def test_locations_of_small_files_survive_the_server(small: Cached) -> None:
    _native.attach(small.table_fd, small.source_fd, True)
    assert small.read(1, 2) == small.data[1:3]


def test_a_flipped_bit_anywhere_is_a_fault(small: Cached) -> None:
    """Every byte of the header and a sample of the payload: never a wrong byte."""
    header_len = small.header_lens[0]
    places = [*range(header_len), *range(header_len, header_len + len(small.data), 9973)]
    for place in places:
        small.flip(FIRST_RECORD + place, place % 8)
        got = small.read(0, len(small.data))
        assert got is None or got == small.data
        assert got is None, place
        assert small.faults() == [(_native.EVENT_FAULT, small.segno, FIRST_RECORD, small.ino)]
        assert _native.get_location(small.ino, 0) is None
        small.flip(FIRST_RECORD + place, place % 8)
        small.locate()
        assert small.read(0, 7) == small.data[:7]


def test_a_read_that_fails_is_no_wrong_record(tmp_path: Path) -> None:
    """A directory has a length, too, and cannot be read."""
    wide = tmp_path / "wide"
    wide.mkdir()
    for number in range(500):
        (wide / f"{number:0100}").touch()
    one = Cached(tmp_path, 1)
    _native.segment_drop(one.segno)
    os.close(one.fd)
    one.fd = os.open(wide, os.O_RDONLY | os.O_DIRECTORY)
    assert os.fstat(one.fd).st_size > FIRST_RECORD + one.header_lens[0]
    _native.segment_add(one.segno, one.fd)
    one.locate()
    _native.take_events()
    assert one.read(0, 1) is None
    assert _native.take_events() == [(_native.EVENT_UNREAD, one.segno, FIRST_RECORD, one.ino)]
    assert _native.get_location(one.ino, 0) is None
    one.close()


def test_other_chunks_are_served_while_one_is_bad(large: Cached) -> None:
    bad = large.offsets[1] + large.header_lens[1] + 5 * CHUNK + 77
    large.flip(bad)
    assert large.read(BLOCK, CHUNK) == large.data[BLOCK : BLOCK + CHUNK]
    assert large.read(BLOCK + 5 * CHUNK, 1) is None
    assert large.faults() == [(_native.EVENT_FAULT, large.segno, large.offsets[1], large.ino)]
    assert large.read(BLOCK - 1, 2) is None  # the location is gone, and no fault is reported
    assert large.faults() == []


def test_a_record_of_another_length_is_a_fault(small: Cached) -> None:
    _, record = pack_record(small.data[:-1], small.segno, FIRST_RECORD)
    os.pwrite(small.fd, record, FIRST_RECORD)
    assert small.read(0, 5) is None
    assert len(small.faults()) == 1


def test_a_file_entry_is_no_block(small: Cached) -> None:
    _, record = pack_record(small.data, small.segno, FIRST_RECORD)
    header = bytearray(record[: small.header_lens[0]])
    header[63] = 2
    header[64:72] = bytes(8)
    header[64:72] = struct.pack(
        "<Q", xxhash.xxh3_64_intdigest(bytes(header), seed(small.segno, FIRST_RECORD))
    )
    os.pwrite(small.fd, header, FIRST_RECORD)
    assert small.read(0, 5) is None
    assert len(small.faults()) == 1


@pytest.mark.parametrize("length", [0, 4096, 8192, 100_000])
def test_a_truncated_segment_is_a_plain_miss(small: Cached, length: int) -> None:
    before = _native.counters()["faults"]
    os.ftruncate(small.fd, length)
    assert small.read(0, 150_000) is None
    assert small.faults() == []
    assert _native.counters()["faults"] == before
    assert _native.get_location(small.ino, 0) is None


def test_an_unlinked_segment_is_still_read(small: Cached) -> None:
    small.path.unlink()
    assert small.read(0, 100) == small.data[:100]


def test_dropped_and_unknown_segments_are_misses(small: Cached) -> None:
    assert _native.segment_known(small.segno)
    _native.segment_drop(small.segno)
    assert not _native.segment_known(small.segno)
    assert small.read(0, 1) is None
    assert _native.get_location(small.ino, 0) is not None  # it may be added again
    _native.segment_drop(small.segno)
    _native.segment_add(small.segno, small.fd)
    _native.segment_add(small.segno, small.fd)
    assert small.read(0, 1) == small.data[:1]
    assert small.faults() == []
    with pytest.raises(OSError, match="descriptor"):
        _native.segment_add(next(_segment_numbers), 10**6)


def test_a_segment_costs_one_descriptor(small: Cached) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    numbers = [next(_segment_numbers) for _ in range(50)]
    for segno in numbers:
        _native.segment_add(segno, small.fd)
        _native.segment_add(segno, small.fd)
    assert descriptors() == before + 50
    for segno in numbers:
        _native.segment_drop(segno)
    assert descriptors() == before


def test_the_front_leaves_half_of_the_descriptors_to_others(small: Cached) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) * 2 + 40
    numbers = [next(_segment_numbers) for _ in range(limit)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        for segno in numbers:
            _native.segment_add(segno, small.fd)
            assert _native.segment_known(segno)
            assert small.read(0, 100) == small.data[:100]  # in use: it stays
        known = [segno for segno in numbers if _native.segment_known(segno)]
        assert 0 < len(known) < limit // 2 + 1
        assert known == numbers[-len(known) :]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for segno in numbers:
            _native.segment_drop(segno)


def test_a_segment_without_direct_io(small: Cached) -> None:
    """A memfd may refuse O_DIRECT: buffered reads do."""
    fd = os.memfd_create("segment")
    segno = next(_segment_numbers)
    os.write(fd, bytes(FIRST_RECORD) + pack_record(small.data, segno, FIRST_RECORD)[1])
    _native.segment_add(segno, fd)
    assert _native.set_location(
        small.ino, 0, segno, FIRST_RECORD, small.header_lens[0], small.version
    )
    assert small.read(0, 150_001) == small.data
    _native.segment_drop(segno)
    os.close(fd)


def test_read_record(large: Cached) -> None:
    for block, offset in enumerate(large.offsets):
        payload = large.data[block * BLOCK : (block + 1) * BLOCK]
        assert (
            _native.read_record(
                large.fd, offset, large.header_lens[block], len(payload), large.segno
            )
            == payload
        )
    with pytest.raises(ValueError, match="mismatch"):
        _native.read_record(large.fd, FIRST_RECORD, large.header_lens[0], BLOCK - 1, large.segno)
    with pytest.raises(ValueError, match="mismatch"):
        _native.read_record(large.fd, FIRST_RECORD + 4096, large.header_lens[0], BLOCK, large.segno)
    large.flip(large.offsets[0] + large.header_lens[0] + BLOCK - 1)
    with pytest.raises(ValueError, match="mismatch"):
        _native.read_record(large.fd, FIRST_RECORD, large.header_lens[0], BLOCK, large.segno)


def test_push_cached(large: Cached) -> None:
    null = os.open("/dev/null", os.O_WRONLY)
    while batch := _native.take_stale(10):
        for ino, _, _ in batch:
            _native.settled(ino)
    assert _native.push_cached(null, large.ino, 0, _native.STREAM_HEAD_BYTES) == BLOCK - 131072
    assert _native.push_cached(null, large.ino, 2, 0) == 70_000
    assert _native.push_cached(null, large.ino, 2, 70_000) == 0
    assert _native.push_cached(null, large.ino, 3, 0) == -1
    _native.mark_stale(large.ino)
    assert _native.push_cached(null, large.ino, 0, 0) == 0
    os.close(null)


# ---- what is noted of reads ----------------------------------------------------------------------


def streamed(cached: Cached) -> list[int]:
    return [
        event[2]
        for event in _native.take_events()
        if event[0] == _native.EVENT_STREAM and event[1] == cached.ino
    ]


def test_a_sequential_reader_is_noticed_block_by_block(large: Cached) -> None:
    step = 128 << 10
    for offset in range(0, BLOCK, step):
        _native.note_read(large.ino, offset, step)
    assert streamed(large) == [0]
    _native.note_read(large.ino, BLOCK, step)
    assert streamed(large) == [1]
    _native.note_read(large.ino, 2 * BLOCK, step)  # block 1 had been pushed: only its head was read
    assert streamed(large) == [2]
    _native.note_read(large.ino, 2 * BLOCK, step)
    assert streamed(large) == []


def test_random_reads_are_no_stream(large: Cached) -> None:
    for offset in (5 * MIB, MIB, 7 * MIB, 0, 4 * MIB + 5):
        _native.note_read(large.ino, offset, 4096)
    assert streamed(large) == []


@pytest.mark.parametrize(("tid", "is_stream"), [(7, False), (0, True)])
def test_a_reader_of_samples_in_any_order_reads_no_stream(
    large: Cached, tid: int, is_stream: bool
) -> None:
    """Though each lies next to another one. Of unknown readers it looks like one each."""
    step = 200 << 10
    for offset in range(0, 6 * step, step):
        for place in (0, 3 * MIB, 6 * MIB):
            _native.note_read(large.ino, place + offset, step, tid)
    assert bool(streamed(large)) == is_stream
    for offset in range(0, MIB, step):  # each by another thread of a pool
        _native.note_read(large.ino, 2 * BLOCK + offset, step, 100 + offset)
    _native.note_read(large.ino, 0, step, 7)
    for offset in range(0, 2 * MIB, step):
        _native.note_read(large.ino, offset, step, 8 + offset % 3)
    assert streamed(large)


def test_ram_ring_counts_a_block_once_and_drops_the_oldest(large: Cached) -> None:
    assert _native.ram_bytes() == 0
    for _ in range(3):
        _native.note_read(large.ino, 0, BLOCK)
    _native.note_read(large.ino, BLOCK, 4096)
    _native.note_read(large.ino, 2 * BLOCK, BLOCK)
    assert _native.ram_bytes() == BLOCK + 4096 + 70_000
    assert _native.ram_take(2**60, 10) == []
    assert _native.ram_take(74_096, 10) == [(large.ino, 0, BLOCK)]
    assert _native.ram_bytes() == 74_096
    assert _native.ram_take(0, 1) == [(large.ino, BLOCK, BLOCK)]
    assert _native.ram_take(0, 10) == [(large.ino, 2 * BLOCK, 70_000)]
    assert _native.ram_bytes() == 0
    assert _native.ram_take(0, 10) == []


def test_ram_ring_against_a_model(tmp_path: Path) -> None:
    """Any order of notes and takes: the total is the sum of what is held."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(40):
        (source / str(number)).write_bytes(bytes(100 + number))
    table_fd = os.memfd_create("table")
    source_fd = os.open(source, os.O_RDONLY)
    _native.attach(table_fd, source_fd, True)
    _native.scan(ROOT)
    sizes = {ino: _native.version(ino)[1] for _, ino, _ in _native.children(ROOT, 0, 100)}
    rng = random.Random(3)
    held: set[int] = set()
    for _ in range(20000):
        if rng.random() < 0.9:
            ino = rng.choice(list(sizes))
            _native.note_read(ino, 0, 10**6)
            held.add(ino)
        else:
            limit = rng.randrange(5000)
            for ino, offset, length in _native.ram_take(limit, rng.randrange(1, 60)):
                assert (offset, length) == (0, sizes[ino])
                held.remove(ino)
        assert _native.ram_bytes() == sum(sizes[ino] for ino in held)
    os.close(table_fd)
    os.close(source_fd)


@pytest.mark.parametrize(
    ("note", "counted"),
    [
        (_native.note_origin_read, _native.origin_reads),
        (_native.note_mount_read, _native.mount_reads),
    ],
    ids=["of the origin", "of the mount"],
)
def test_reads_are_counted_by_what_they_took(
    note: Callable[[Any], None], counted: Callable[[], tuple[list[int], int]]
) -> None:
    least = 1 << _native.LATENCY_SHIFT
    for took, bucket in (
        (-1, 0), (0, 0), (least, 0), (least + 1, 1), (2 * least, 1), (2 * least + 1, 2),
        (least << 21, 21), ((least << 21) + 1, 22), ((1 << 63) - 1, 22),
    ):  # fmt: skip
        before, before_ns = counted()
        note(took)
        counts, sum_ns = counted()
        changed = [k for k, (a, b) in enumerate(zip(before, counts, strict=True)) if b != a]
        assert (len(counts), changed) == (23, [bucket]), took
        assert (sum_ns - before_ns) % (1 << 64) == max(0, took)
    with pytest.raises(TypeError):
        note("long")
