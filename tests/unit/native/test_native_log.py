"""The log in C: byte-identical records, switches that lose nothing, and every way to be refused."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import resource
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusecache import _native
from fusecache.base import digest
from fusecache.store.segment import files as segment
from fusecache.store.segment import format as fmt
from fusecache.store.types import BLOCK_BYTES, Location, Version
from tests.support.log_support import block_record

ROOT = 1
KIB = 1 << 10
MIB = 1 << 20
UUID = bytes(range(16))
DATASET = bytes(range(100, 116))
XXH3, BLAKE3 = 1, 2
FETCHED_NS = 1_234_567_890_123_456_789

_segment_numbers = itertools.count(5000)


def u32(numbers: Iterable[int]) -> bytes:
    listed = list(numbers)
    return struct.pack(f"<{len(listed)}I", *listed)


def live_in(segnos: Iterable[int]) -> list[int]:
    """How many files with a name lie in each of these segments."""
    files = {segno: count for segno, count, _, _ in _native.log_survey()}
    return [files.get(segno, 0) for segno in segnos]


def record_bytes(size: int, path: bytes) -> int:
    return fmt.align(fmt.header_length(size, path) + size)


class Files:
    """Files at an origin, a table attached to it, and a directory of segments."""

    def __init__(self, directory: Path, sizes: Sequence[int], algorithm: int = XXH3) -> None:
        self.directory = directory
        self.algorithm = algorithm
        self.source = directory / "source"
        self.source.mkdir()
        self.contents: dict[int, bytes] = {}
        rng = random.Random(len(sizes))
        for number, size in enumerate(sizes):
            (self.source / f"f{number:04}").write_bytes(rng.randbytes(size))
        self.table_fd = os.memfd_create("table")
        self.source_fd = os.open(self.source, os.O_RDONLY | os.O_DIRECTORY)
        _native.attach(self.table_fd, self.source_fd, True)
        _native.scan(ROOT)
        self.inos = [_native.lookup(ROOT, b"f%04d" % number) for number in range(len(sizes))]
        for ino, path in zip(self.inos, sorted(self.source.iterdir()), strict=True):
            self.contents[ino] = path.read_bytes()
        self.segments: dict[int, Path] = {}
        self._fds: list[int] = []

    def version(self, ino: int) -> Version:
        return Version(*_native.version(ino))

    def path(self, ino: int) -> Path:
        return self.source / os.fsdecode(_native.path(ino))

    def record(self, ino: int, fetched_ns: int = FETCHED_NS) -> fmt.Record:
        path, content = _native.path(ino), self.contents[ino]
        return block_record(self.algorithm, DATASET, path, content, self.version(ino), fetched_ns)

    def store(self, inos: Iterable[int]) -> int:
        """Write these files to a static segment of their own, as the store does; its number."""
        records = [(self.record(ino), self.contents[ino]) for ino in inos]
        segno = next(_segment_numbers)
        path = self.directory / f"{segno:08}.seg"
        size = fmt.SEGMENT_HEADER_BYTES + sum(record.record_len for record, _ in records)
        writer = segment.SegmentWriter(path, segno, size, UUID, self.algorithm)
        written: list[Location] = []
        writer.append(records, written)
        writer.seal()
        self.segments[segno] = path
        with open(path, "rb") as file:
            _native.segment_add(segno, file.fileno())
        for ino, at in zip(inos, written, strict=True):
            assert _native.set_location(ino, 0, segno, at.offset, at.header_len, self.version(ino))
        return segno

    def begin(
        self, chunks: int, buffer_bytes: int = 64 * KIB, credit_bytes: int = 1 << 40
    ) -> list[int]:
        """Begin a log; its segments."""
        segnos = [next(_segment_numbers) for _ in range(chunks)]
        fds = []
        for segno in segnos:
            path = self.segments[segno] = self.directory / f"{segno:08}.seg"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            header = fmt.SegmentHeader(segno, UUID, 0, self.algorithm)
            os.write(fd, fmt.pack_segment_header(header))
            if segno % 2:
                segment.try_direct(fd)
            fds.append(fd)
        self._fds += fds
        self.begin_with(segnos, fds, buffer_bytes, credit_bytes)
        return segnos

    def begin_with(
        self,
        segnos: Sequence[int],
        fds: Sequence[int],
        buffer_bytes: int = 64 * KIB,
        credit_bytes: int = 1 << 40,
    ) -> None:
        _native.log_begin(
            len(segnos),
            buffer_bytes,
            u32(segnos),
            struct.pack(f"<{len(fds)}i", *fds),
            UUID,
            DATASET,
            self.algorithm,
            credit_bytes,
        )

    def add(self, ino: int, fetched_ns: int = FETCHED_NS) -> bool:
        content = self.contents[ino]
        name = digest.digest(self.algorithm, content)
        return _native.log_add(ino, self.version(ino), name, fetched_ns, content)

    def change(self, ino: int, content: bytes) -> None:
        self.path(ino).write_bytes(content)
        os.utime(self.path(ino), ns=(0, self.version(ino).mtime_ns + 1))
        assert _native.refresh(ino) == 2
        self.contents[ino] = content

    def segno_of(self, ino: int) -> int | None:
        at = _native.get_location(ino, 0)
        return at[0] if at else None

    def read(self, ino: int) -> bytes | None:
        return _native.read_cached(ino, 0, BLOCK_BYTES)

    def records(self, segno: int) -> dict[int, fmt.Record]:
        """By offset; each verified whole, as the store's reader does it."""
        reader = segment.RecordReader()
        with open(self.segments[segno], "rb") as file:
            found = dict(segment.walk(file.fileno(), segno, UUID))
            for offset, record in found.items():
                at = Location(segno, offset, record.header_len, record.payload_len)
                assert reader.read(file.fileno(), at, UUID)[0] == record
        return found

    def drop(self, segno: int) -> None:
        _native.segment_drop(segno)
        self.segments.pop(segno).unlink()

    def close(self) -> None:
        _native.log_end()
        _native.log_left()
        for segno in self.segments:
            _native.segment_drop(segno)
        for fd in (*self._fds, self.table_fd, self.source_fd):
            os.close(fd)


class Making:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.made: list[Files] = []

    def __call__(self, sizes: Sequence[int], algorithm: int = XXH3) -> Files:
        self.made.append(Files(self._directory, sizes, algorithm))
        return self.made[-1]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Making]:
    making = Making(tmp_path)
    yield making
    for files in making.made:
        files.close()


class Tally:
    """What the counters have grown by."""

    def __init__(self) -> None:
        self._before = _native.log_counters()

    def __getitem__(self, name: str) -> int:
        return _native.log_counters()[name] - self._before[name]


# ---- records -----------------------------------------------------------------------------------
EDGES = [1, 7, 8, 4095, 4096, 64 * KIB - 1, 64 * KIB, 64 * KIB + 1, 3 * 64 * KIB, BLOCK_BYTES]


@pytest.mark.parametrize("algorithm", [XXH3, BLAKE3])
@pytest.mark.parametrize("is_move", [True, False], ids=["moved", "added"])
def test_records_are_those_of_the_store(make: Making, is_move: bool, algorithm: int) -> None:
    """Byte for byte what pack_record makes, zeros behind the payload, and one after the other."""
    rng = random.Random(3)
    files = make(EDGES + [rng.randrange(1, 300 * KIB) for _ in range(30)], algorithm)
    if is_move:
        files.store(files.inos)
    (segno,) = files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    rng.shuffle(files.inos)
    for ino in files.inos:
        assert (_native.log_move(ino) == 0) if is_move else files.add(ino)
    assert _native.log_end() == [(segno, os.path.getsize(files.segments[segno]), 0)]
    data = files.segments[segno].read_bytes()
    at = fmt.SEGMENT_HEADER_BYTES
    for ino in files.inos:
        record, content = files.record(ino), files.contents[ino]
        header = fmt.pack_record(record, algorithm, UUID, segno, at)
        assert data[at : at + record.record_len] == (header + content).ljust(
            record.record_len, b"\0"
        )
        assert _native.get_location(ino, 0) == (segno, at, record.header_len)
        assert files.read(ino) == content
        at += record.record_len
    assert at == len(data)
    assert [record.path for record in files.records(segno).values()] == [
        _native.path(ino) for ino in files.inos
    ]


def test_a_path_longer_than_a_page(make: Making) -> None:
    files = make([1])
    name, ino = b"\xff" * 250, ROOT
    with contextlib.ExitStack() as stack:
        fd = files.source_fd
        for _ in range(20):
            os.mkdir(name, dir_fd=fd)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            stack.callback(os.close, fd)
        with open(os.open(b"file", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
            file.write(b"deep")
    for _ in range(20):
        ino = _native.add(ino, name)
    ino = _native.add(ino, b"file")
    files.contents[ino] = b"deep"
    (segno,) = files.begin(1)
    _native.log_assign(u32([ino]), 0)
    _native.log_open()
    assert files.add(ino)
    _native.log_end()
    assert list(files.records(segno).values()) == [files.record(ino)]
    assert files.record(ino).header_len > 5000
    assert files.read(ino) == b"deep"


def test_a_record_that_carries_another_files_entry(make: Making) -> None:
    """Two files of one content share a record in the store. Moved, each has one of its own."""
    files = make([5000, 5000])
    first, second = files.inos
    files.change(second, files.contents[first])
    static = files.store([first])
    at = _native.get_location(first, 0)
    assert at is not None
    assert _native.set_location(second, 0, *at, files.version(second))
    (segno,) = files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    assert [_native.log_move(ino) for ino in files.inos] == [0, 0]
    _native.log_flush()
    assert list(files.records(segno).values()) == [files.record(first), files.record(second)]
    assert _native.log_left() == [(static, 2)]


def test_a_hard_linked_file_is_one_sample(make: Making) -> None:
    files = make([5000])
    (ino,) = files.inos
    os.link(files.source / "f0000", files.source / "other")
    _native.refresh(ino)
    _native.scan(ROOT)
    ((_, shared, alias),) = [
        child for child in _native.children(ROOT, 0, 9) if child[0] == b"other"
    ]
    assert (shared, alias != ino) == (ino, True)
    static = files.store([ino])
    (segno,) = files.begin(1)
    _native.log_assign(u32([alias]), 0)
    _native.log_open()
    assert (_native.log_wants(alias), _native.log_wants(ino)) == (True, True)
    assert live_in([static]) == [1]
    assert _native.log_move(ino) == 0
    (files.source / "f0000").unlink()
    _native.scan(ROOT)
    _native.log_flush()
    assert (live_in([static, segno]), files.read(ino)) == ([0, 0], None)
    assert files.add(ino)
    _native.log_flush()
    assert [record.path for record in files.records(segno).values()] == [b"f0000", b"other"]
    assert live_in([static, segno]) == [0, 1]


# ---- what is refused ---------------------------------------------------------------------------
def test_answers(make: Making) -> None:
    files = make([5000, 5000, 5000, 5000])
    moved, stranger, absent, added = files.inos
    files.store([moved, stranger])
    assert (_native.log_move(moved), files.add(added)) == (errno.ENOENT, False)
    assert (_native.log_wants(moved), _native.log_credit(5)) == (False, 0)
    with pytest.raises(OSError, match="No such file"):
        _native.log_assign(u32([moved]), 0)
    with pytest.raises(OSError, match="No such file"):
        _native.log_open()
    assert _native.log_end() == []
    _native.log_flush()

    segnos = files.begin(2)
    with pytest.raises(OSError, match="busy"):
        files.begin(1)
    with pytest.raises(ValueError, match="no chunk 2"):
        _native.log_assign(u32([moved]), 2)
    _native.log_assign(u32([moved, absent, added, 2**32 - 1, 0]), 1)
    _native.log_assign(u32([moved]), 0)  # the first assignment counts
    assert (_native.log_move(moved), _native.log_wants(moved)) == (errno.ENOENT, False)
    assert not files.add(added)
    _native.log_open()
    _native.log_open()
    assert [_native.log_wants(ino) for ino in files.inos] == [True, False, True, True]
    assert not _native.log_wants(2**40)
    assert _native.log_move(stranger) == errno.ENOENT
    assert _native.log_move(absent) == errno.ESTALE
    assert not _native.log_add(added, (1, 2, 3, 4), b"", 0, files.contents[added])
    assert not _native.log_add(added, files.version(added), b"", 0, b"short")
    assert not _native.log_add(added, files.version(added), b"", 0, b"")
    assert not _native.log_add(added, files.version(added), b"", 0, bytes(BLOCK_BYTES + 1))
    assert not files.add(moved)  # it has a location
    assert [_native.log_wants(ino) for ino in files.inos] == [True, False, True, True]
    assert (_native.log_move(moved), files.add(added)) == (0, True)
    assert (_native.log_move(moved), files.add(added)) == (errno.EALREADY, False)
    assert not _native.log_wants(moved)
    _native.log_flush()
    assert (_native.log_move(moved), files.add(added)) == (errno.EALREADY, False)
    assert [files.segno_of(ino) for ino in (moved, added)] == [segnos[1]] * 2
    lengths = [fmt.SEGMENT_HEADER_BYTES, fmt.SEGMENT_HEADER_BYTES + 2 * 8192]
    assert _native.log_end() == list(zip(segnos, lengths, (0, 0), strict=True))
    assert _native.log_move(moved) == errno.ENOENT

    files.begin(1)  # the chunks of the last one are forgotten
    _native.log_open()
    assert [_native.log_move(ino) for ino in (moved, added)] == [errno.ENOENT] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"chunks": 0}, "1 to 4096"),
        ({"chunks": 4097}, "1 to 4096"),
        ({"buffer_bytes": 0}, "multiple of 4096"),
        ({"buffer_bytes": 5000}, "multiple of 4096"),
        ({"segnos": bytes(8)}, "four bytes"),
        ({"fds": b""}, "four bytes"),
        ({"uuid": bytes(15)}, "16 bytes"),
        ({"dataset": bytes(17)}, "16 bytes"),
    ],
)
def test_wrong_arguments(wrong: dict[str, int | bytes], message: str) -> None:
    right: dict[str, int | bytes] = {
        "chunks": 1,
        "buffer_bytes": 4096,
        "segnos": bytes(4),
        "fds": bytes(4),
        "uuid": UUID,
        "dataset": DATASET,
        "algorithm": XXH3,
        "credit_bytes": 0,
    }
    with pytest.raises(ValueError, match=message):
        _native.log_begin(**(right | wrong))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="four bytes"):
        _native.log_drain(b"abc")
    with pytest.raises(ValueError, match="four bytes"):
        _native.sort_by_location(b"abc")


def test_a_log_without_files_to_write_to_is_not_begun(make: Making) -> None:
    files = make([5000])
    with pytest.raises(OSError, match="Bad file descriptor"):
        files.begin_with([next(_segment_numbers)], [1 << 20])
    files.begin(1)


def test_nothing_is_appended_without_credit(make: Making) -> None:
    files = make([5000, 100, 5000])
    first, small, last = files.inos
    files.store([first, small])
    tally = Tally()
    (segno,) = files.begin(1, credit_bytes=8192)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    assert (_native.log_move(first), _native.log_credit(0)) == (0, 0)
    assert (_native.log_move(small), files.add(last)) == (errno.ENOSPC, False)
    assert _native.log_wants(small)
    assert _native.log_credit(8191) == 8191
    assert (files.add(last), _native.log_move(small)) == (False, 0)
    assert _native.log_credit(4096) == 8191
    assert (files.add(last), _native.log_move(small)) == (False, errno.EALREADY)
    assert _native.log_credit(1) == 8192 - 4096 + 4096
    assert files.add(last)
    assert _native.log_end() == [(segno, fmt.SEGMENT_HEADER_BYTES + 8192 + 4096 + 8192, 0)]
    assert (tally["refused"], tally["moved"], tally["added"]) == (4, 2, 1)
    assert tally["written_bytes"] == 8192 + 4096 + 8192


def test_what_was_added_can_be_read_at_any_time(make: Making) -> None:
    """In the buffer, while that is written and the log ends, and in its segment."""
    files = make([9000] * 400)
    files.begin(1, buffer_bytes=32 * KIB)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    added: list[int] = []
    lost: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            for ino in added[-12:]:
                version = files.version(ino)
                if _native.log_read(ino, version, 0, 9000) is None and not files.segno_of(ino):
                    lost.append(ino)

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for ino in files.inos:
            assert files.add(ino)
            added.append(ino)
        _native.log_end()
        ended.set()
        looking.result()
    assert lost == []
    assert all(files.read(ino) == files.contents[ino] for ino in files.inos)


def test_what_waits_in_a_buffer_can_be_read(make: Making) -> None:
    files = make([5000, 100, 200 * KIB, 700])
    small, tiny, large, stored = files.inos
    files.store([stored])
    (segno,) = files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()

    def read(ino: int, offset: int = 0, size: int | None = None) -> bytes | None:
        length = len(files.contents[ino]) - offset if size is None else size
        return _native.log_read(ino, files.version(ino), offset, length)

    assert read(small) is None
    assert files.add(small)
    assert files.add(tiny)
    assert _native.log_move(stored) == 0
    for ino in (small, tiny, stored):
        assert read(ino) == files.contents[ino]
    assert read(small, 4000, 10) == files.contents[small][4000:4010]
    assert (read(small, 5000, 0), read(small, 5000, 1), read(small, 5001, 0)) == (b"", None, None)
    version = files.version(small)._replace(mtime_ns=1)
    assert _native.log_read(small, version, 0, 10) is None
    assert _native.log_read(1 << 40, version, 0, 10) is None
    assert files.add(large)  # closes the buffer
    _native.log_flush()
    assert {read(ino) for ino in files.inos} == {None}
    assert files.segno_of(small) == segno
    _native.log_end()
    assert read(small) is None


def test_attaching_forgets_the_log(make: Making) -> None:
    files = make([5000])
    static = files.store(files.inos)
    (segno,) = files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    tally = Tally()
    assert _native.log_move(files.inos[0]) == 0
    assert tally["waiting_bytes"] == 8192
    _native.attach(files.table_fd, files.source_fd, True)
    assert (_native.log_end(), _native.log_left(), tally["waiting_bytes"]) == ([], [], 0)
    assert (files.records(segno), files.segno_of(files.inos[0])) == ({}, static)
    assert (tally["failed"], files.read(files.inos[0])) == (0, files.contents[files.inos[0]])


# ---- changes between append and switch ---------------------------------------------------------
def test_a_file_that_changes_before_it_is_written(make: Making) -> None:
    files = make([5000, 5000, 5000])
    moved, touched, added = files.inos
    files.store([moved, touched])
    at = _native.get_location(touched, 0)
    assert at is not None
    (segno,) = files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    tally = Tally()
    assert (_native.log_move(moved), _native.log_move(touched), files.add(added)) == (0, 0, True)
    files.change(moved, b"new")
    files.change(added, b"new too")
    # Of the same content, found again: the same place, but the copy is of the old version.
    files.change(touched, files.contents[touched])
    assert _native.set_location(touched, 0, *at, files.version(touched))
    _native.log_flush()
    assert (tally["moved"], tally["added"], _native.log_left()) == (0, 0, [])
    assert [files.segno_of(ino) for ino in files.inos] == [None, at[0], None]
    assert all(_native.log_wants(ino) for ino in files.inos)
    assert (files.add(moved), files.add(added), _native.log_move(touched)) == (True, True, 0)
    _native.log_flush()
    assert [files.segno_of(ino) for ino in files.inos] == [segno] * 3
    assert [files.read(ino) for ino in files.inos] == list(files.contents.values())
    assert (tally["moved"], tally["added"]) == (1, 2)


def test_a_location_that_came_first_stays(make: Making) -> None:
    files = make([5000, 5000])
    moved, added = files.inos
    files.store([moved])
    files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    assert (_native.log_move(moved), files.add(added)) == (0, True)
    elsewhere = files.store([moved, added])
    _native.log_flush()
    assert [files.segno_of(ino) for ino in files.inos] == [elsewhere] * 2


@pytest.mark.parametrize("seed", range(4))
def test_against_a_model(make: Making, seed: int) -> None:
    """Random appends, changes, flushes and logs one after the other: what is read is right, and it
    lies where it was appended last, or where it lay."""
    rng = random.Random(seed)
    sizes = [int(4 ** rng.uniform(0, 9)) for _ in range(40)]
    files = make([*sizes, BLOCK_BYTES])
    files.store(files.inos[::2])
    chunks: dict[int, int] = {}
    segnos: list[int] = []
    waiting: dict[int, int] = {}  # inode -> segment it is on its way to
    places = {ino: files.segno_of(ino) for ino in files.inos}
    credit = 0

    def settle() -> None:
        places.update(waiting)
        waiting.clear()

    for _ in range(300):
        ino = rng.choice(files.inos)
        match rng.choices(
            ["move", "add", "change", "flush", "end", "credit"], [20, 20, 3, 2, 1, 2]
        )[0]:
            case "move" | "add" as way:
                target = segnos[chunks[ino]] if ino in chunks else None
                length = record_bytes(len(files.contents[ino]), _native.path(ino))
                ready = (
                    target is not None
                    and ino not in waiting
                    and places[ino] != target
                    and (places[ino] is None) == (way == "add")
                    and length <= credit
                )
                done = files.add(ino) if way == "add" else _native.log_move(ino) == 0
                assert done == ready
                if done and target is not None:
                    waiting[ino] = target
                    credit -= length
                    # It may be written at any time from now on; the next flush tells.
            case "change":
                _native.log_flush()
                settle()
                files.change(ino, rng.randbytes(rng.randrange(1, 100 * KIB)))
                places[ino] = None
            case "flush":
                _native.log_flush()
                settle()
            case "end":
                lengths = _native.log_end()
                settle()
                assert [segno for segno, *_ in lengths] == segnos
                for segno, length, _ in lengths:
                    assert length == os.path.getsize(files.segments[segno])
                    files.records(segno)
                credit = rng.randrange(12 * MIB)
                segnos = files.begin(rng.randrange(1, 6), 4096 << rng.randrange(9), credit)
                chunks = {one: rng.randrange(len(segnos)) for one in files.inos[1:]}
                for one, chunk in chunks.items():
                    _native.log_assign(u32([one]), chunk)
                _native.log_open()
            case "credit":
                more = rng.randrange(MIB) if segnos else 0
                credit += more
                assert _native.log_credit(more) == credit
        if not waiting:
            assert {one: files.segno_of(one) for one in files.inos} == places
        content = files.read(ino)
        assert content == files.contents[ino] or (content is None and places[ino] is None)


# ---- threads -----------------------------------------------------------------------------------
@contextlib.contextmanager
def beside(*mains: Callable[[], None]) -> Iterator[None]:
    """Runs them again and again until the block ends."""
    done = threading.Event()

    def repeat(main: Callable[[], None]) -> None:
        while not done.is_set():
            main()

    threads = [threading.Thread(target=repeat, args=(main,)) for main in mains]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_many_threads_move_each_file_once(make: Making) -> None:
    """Movers that all want all files, a flusher and readers; more bytes than the queue holds."""
    rng = random.Random(11)
    sizes = [rng.choice([10, 3_000, 30_000, 200_000]) + rng.randrange(3_000) for _ in range(300)]
    files = make(sizes + [BLOCK_BYTES - number for number in range(10)])
    static = [files.store(files.inos[:100]), files.store(files.inos[100:])]
    tally = Tally()
    segnos = files.begin(8)
    for chunk in range(8):
        _native.log_assign(u32(files.inos[chunk::8]), chunk)
    _native.log_open()
    moved: list[int] = []
    wrong: list[object] = []
    left: Counter[int] = Counter()
    own = random.Random(9)

    def move(seed: int) -> None:
        for ino in random.Random(seed).sample(files.inos, len(files.inos)):
            answer = _native.log_move(ino)
            if answer == 0:
                moved.append(ino)
            elif answer not in (errno.EALREADY, errno.ESTALE):
                wrong.append((ino, answer))

    def look() -> None:
        ino = own.choice(files.inos)
        if files.read(ino) != files.contents[ino]:
            wrong.append((ino, "content"))

    def flush() -> None:
        _native.log_flush()
        left.update(dict(_native.log_left()))

    movers = [threading.Thread(target=move, args=(seed,)) for seed in range(5)]
    with beside(look, flush):
        for thread in movers:
            thread.start()
        for thread in movers:
            thread.join()
    lengths = _native.log_end()
    left.update(dict(_native.log_left()))
    assert wrong == []
    assert sorted(moved) == sorted(files.inos)
    for chunk, segno in enumerate(segnos):
        here = files.inos[chunk::8]
        assert sorted(record.path for record in files.records(segno).values()) == sorted(
            _native.path(ino) for ino in here
        )
        assert {files.segno_of(ino) for ino in here} == {segno}
    assert all(files.read(ino) == files.contents[ino] for ino in files.inos)
    assert left == {static[0]: 100, static[1]: len(files.inos) - 100}
    assert live_in(static + segnos) == [0, 0] + [len(files.inos[chunk::8]) for chunk in range(8)]
    assert (tally["moved"], tally["waiting_bytes"]) == (len(files.inos), 0)
    assert tally["written_bytes"] == sum(length - 4096 for _, length, _ in lengths)


def test_the_end_comes_in_between(make: Making) -> None:
    """What was appended when the log was ended is written; what comes later is refused."""
    files = make([20_000] * 400)
    files.store(files.inos)
    (segno,) = files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    moved: list[int] = []
    begun = threading.Event()

    def move(inos: list[int]) -> None:
        for ino in inos:
            if _native.log_move(ino) == 0:
                moved.append(ino)
            begun.set()

    threads = [threading.Thread(target=move, args=(files.inos[part::3],)) for part in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    _native.log_end()
    for thread in threads:
        thread.join()
    assert {ino for ino in files.inos if files.segno_of(ino) == segno} == set(moved)
    assert len(files.records(segno)) == len(moved)


# ---- failing disks -----------------------------------------------------------------------------
@contextlib.contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_stops_halfway(make: Making) -> None:
    """A short write, then EFBIG: the first piece counts, the torn one is cut off, nothing is lost,
    the other chunk goes on, and the next log takes what this one has not."""
    files = make([30_000] * 20)
    static = files.store(files.inos)
    torn, whole = files.inos[:16], files.inos[16:]
    tally = Tally()
    segnos = files.begin(2, buffer_bytes=128 * KIB)  # four records of 32 KiB
    _native.log_assign(u32(torn), 0)
    _native.log_assign(u32(whole), 1)
    _native.log_open()
    with file_size_limit(4096 + 128 * KIB + 70_001):
        assert [_native.log_move(ino) for ino in torn[:7]] == [0] * 7
        assert _native.log_move(whole[0]) == 0
        _native.log_flush()
        credit = _native.log_credit(0)
        assert [_native.log_move(ino) for ino in torn[4:9]] == [errno.EIO] * 5
        assert _native.log_credit(0) == credit
        assert [_native.log_move(ino) for ino in whole[1:]] == [0] * 3
        _native.log_flush()
    length = 4096 + 128 * KIB
    assert _native.log_end() == [(segnos[0], length, errno.EFBIG), (segnos[1], length, 0)]
    assert os.path.getsize(files.segments[segnos[0]]) == 4096 + 128 * KIB
    assert (tally["failed"], tally["moved"], tally["waiting_bytes"]) == (3, 8, 0)
    assert [files.segno_of(ino) for ino in files.inos] == (
        [segnos[0]] * 4 + [static] * 12 + [segnos[1]] * 4
    )
    assert (len(files.records(segnos[0])), len(files.records(segnos[1]))) == (4, 4)
    (again,) = files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    assert {_native.log_move(ino) for ino in files.inos} == {0}
    _native.log_end()
    assert {files.segno_of(ino) for ino in files.inos} == {again}
    assert all(files.read(ino) == files.contents[ino] for ino in files.inos)


@pytest.mark.parametrize(("path", "flags"), [("/dev/full", os.O_RDWR), ("file", os.O_RDONLY)])
def test_a_disk_that_takes_nothing(make: Making, tmp_path: Path, path: str, flags: int) -> None:
    files = make([5000, 5000])
    moved, added = files.inos
    static = files.store([moved])
    (tmp_path / "file").write_bytes(bytes(4096))
    fd = os.open(tmp_path / path, flags)
    segno = next(_segment_numbers)
    tally = Tally()
    files.begin_with([segno], [fd])
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    assert (_native.log_move(moved), files.add(added)) == (0, True)
    _native.log_flush()
    assert (_native.log_move(moved), files.add(added)) == (errno.EIO, False)
    code = errno.ENOSPC if path == "/dev/full" else errno.EBADF
    assert _native.log_end() == [(segno, fmt.SEGMENT_HEADER_BYTES, code)]
    assert (tally["failed"], tally["moved"], tally["added"]) == (2, 0, 0)
    assert [files.segno_of(ino) for ino in files.inos] == [static, None]
    assert files.read(moved) == files.contents[moved]
    _native.segment_drop(segno)
    os.close(fd)


# ---- many locations ----------------------------------------------------------------------------
def test_sort_by_location(make: Making) -> None:
    files = make([100, 5000, BLOCK_BYTES + 1, 1, 1, 30_000])
    a, b, large, c, d, e = files.inos
    first = files.store([e, a])
    second = files.store([c, b])
    at = _native.get_location(b, 0)
    assert at is not None
    assert _native.set_location(large, 0, second, at[1] + 4096, 88, files.version(large))
    inos = [d, b, 0, large, a, c, 2**32 - 1, e, a]
    order = struct.unpack("<9q", _native.sort_by_location(memoryview(u32(inos))))
    assert [inos[number] for number in order] == [e, a, a, c, b, large, d, 0, 2**32 - 1]
    assert order[1:3] == (4, 8)
    assert _native.sort_by_location(b"") == b""
    assert live_in([second, 7, first]) == [3, 0, 2]


def test_a_deleted_file_holds_no_segment(make: Making) -> None:
    files = make([100, 100])
    static = files.store(files.inos)
    files.path(files.inos[0]).unlink()
    _native.scan(ROOT)
    assert live_in([static]) == [1]
    files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    assert [_native.log_move(ino) for ino in files.inos] == [errno.ESTALE, 0]


# ---- epochs ------------------------------------------------------------------------------------
def test_epochs_one_after_the_other(make: Making) -> None:
    """Static -> log -> log -> log, chunk by chunk in another order each time, while a reader looks:
    segments go as they empty, the disk holds little more than one dataset, each log holds each
    file once, and a chunk's segment its files."""
    rng = random.Random(2)
    chunk_files, buffer_bytes = 32, 64 * KIB
    files = make([rng.randrange(1, 24_000) for _ in range(512)])
    for part in range(4):
        files.store(files.inos[part * 128 : (part + 1) * 128])
    dataset_bytes = disk_bytes = sum(map(os.path.getsize, files.segments.values()))
    old = set(files.segments)
    most_bytes = 0
    wrong: list[int] = []
    own = random.Random(1)

    def look() -> None:
        ino = own.choice(files.inos)
        if files.read(ino) not in (files.contents[ino], None):
            wrong.append(ino)

    present = rng.sample(files.inos, len(files.inos))
    with beside(look):
        for _ in range(3):
            coming = rng.sample(files.inos, len(files.inos))
            chunks = [coming[at : at + chunk_files] for at in range(0, len(coming), chunk_files)]
            segnos = files.begin(len(chunks), buffer_bytes)
            for number, chunk in enumerate(chunks):
                _native.log_assign(u32(chunk), number)
            _native.log_open()
            left: Counter[int] = Counter()
            for at in range(0, len(present), chunk_files):
                inos = present[at : at + chunk_files]
                order = struct.unpack(f"<{len(inos)}q", _native.sort_by_location(u32(inos)))
                assert [_native.log_move(inos[number]) for number in order] == [0] * len(inos)
                left.update(dict(_native.log_left()))
                candidates = sorted(old)
                for segno, live in zip(candidates, live_in(candidates), strict=True):
                    if not live:
                        files.drop(segno)
                        old.discard(segno)
                disk_bytes = sum(map(os.path.getsize, files.segments.values()))
                most_bytes = max(most_bytes, disk_bytes)
            lengths = {segno: length for segno, length, _ in _native.log_end()}
            left.update(dict(_native.log_left()))
            assert sum(left.values()) == len(files.inos)
            assert live_in(sorted(old)) == [0] * len(old)
            for segno in old:
                files.drop(segno)
            for segno, chunk in zip(segnos, chunks, strict=True):
                assert lengths[segno] == os.path.getsize(files.segments[segno])
                assert {record.path for record in files.records(segno).values()} == {
                    _native.path(ino) for ino in chunk
                }
                assert {files.segno_of(ino) for ino in chunk} == {segno}
            old = set(segnos)
            present = coming
    assert wrong == []
    assert all(files.read(ino) == files.contents[ino] for ino in files.inos)
    # The first rewriting empties four large segments at its end; later ones a chunk at a time.
    assert most_bytes <= 2 * dataset_bytes
    assert sum(map(os.path.getsize, files.segments.values())) <= dataset_bytes + 16 * 4096


# ---- with little credit ------------------------------------------------------------------------
def test_only_what_is_drained_is_moved(make: Making) -> None:
    files = make([3000] * 4)
    ours, other = files.store(files.inos[:2]), files.store(files.inos[2:])
    files.begin(1)
    _native.log_assign(u32(files.inos), 0)
    _native.log_open()
    size = 2 * record_bytes(3000, b"f0000")
    assert _native.log_survey() == [(ours, 2, size, 2), (other, 2, size, 2)]
    _native.log_drain(u32([ours]))
    assert [_native.log_wants(ino) for ino in files.inos[:3]] == [True, True, False]
    assert [_native.log_move(ino) for ino in files.inos] == [0, 0, errno.ENOSPC, errno.ENOSPC]
    _native.log_flush()
    assert live_in([ours, other]) == [0, 2]
    assert _native.log_survey()[0] == (other, 2, size, 0)  # refused: they do not come again
    _native.log_drain(None)
    assert _native.log_move(files.inos[2]) == 0
