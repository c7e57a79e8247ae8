"""The plan in C, as far as it needs no mount: flags, observations, RAM ring, listings, fetches.

With a kernel behind it: tests/mount/test_plan_native.py.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fusecache import _native
from fusecache.ahead.depth import LOST_MOST
from fusecache.base.errors import UnknownInode
from fusecache.config.settings import PREFETCH_DEPTH_MAX
from fusecache.read.misses import FLYING_MOST
from tests.conftest import Place
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import eventually, open_flags
from tests.support.native_table import ROOT, attach

BLOCK = _native.BLOCK_BYTES
SEEN_MOST = 65_536
Fetched = tuple[int, int, bytes | None, int, int, int, bool]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for number in range(20):
        (tmp_path / f"f{number:02}").write_bytes(bytes([number]) * (1000 + number))
    attach(tmp_path)
    return tmp_path


@pytest.fixture
def plan(source: Path) -> Iterator[Path]:
    _native.plan_begin()
    yield source
    _native.plan_end()


def ino_of(name: str) -> int:
    return _native.lookup(ROOT, name.encode())


def pack(*inos: int) -> bytes:
    return struct.pack(f"<{len(inos)}I", *inos)


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def seen(most: int = SEEN_MOST) -> tuple[list[tuple[int, int]], int]:
    """[(inode, kind), …] and how many were lost."""
    inos, kinds, processes, parents, lost = _native.take_seen(most)
    assert len(processes) == len(parents) == len(inos)
    return list(zip(struct.unpack(f"<{len(kinds)}I", inos), kinds, strict=True)), lost


# ---- flags ---------------------------------------------------------------------------------------


def test_flags_are_set_and_taken_back(plan: Path) -> None:
    two = pack(2, 3)
    assert _native.plan_flags(two) == b"\0\0"
    _native.plan_mark(two, _native.PLAN_WANTED | _native.PLAN_QUEUED, 0)
    _native.plan_mark(pack(3), _native.PLAN_FLYING, _native.PLAN_QUEUED)
    assert list(_native.plan_flags(pack(2, 3, 4))) == [
        _native.PLAN_WANTED | _native.PLAN_QUEUED,
        _native.PLAN_WANTED | _native.PLAN_FLYING,
        0,
    ]


def test_unknown_inodes_have_no_flags(plan: Path) -> None:
    unknown = pack(0, _native.count() + 1, 0xFFFFFFFF)
    _native.plan_mark(unknown, 0xFF, 0)
    assert _native.plan_flags(unknown[4:]) == bytes(2)
    with pytest.raises(ValueError, match="four bytes"):
        _native.plan_flags(b"abc")


def test_no_flag_outlives_its_plan(plan: Path) -> None:
    _native.plan_mark(pack(2), 0xFF, 0)
    _native.plan_end()
    assert _native.plan_flags(pack(2)) == b"\0"
    _native.plan_mark(pack(2), 0xFF, 0)
    _native.plan_begin()
    assert _native.plan_flags(pack(2)) == b"\0"
    _native.plan_mark(pack(2), 0xFF, 0)
    _native.plan_begin()  # a plan that displaces another
    assert _native.plan_flags(pack(2)) == b"\0"


# ---- observations --------------------------------------------------------------------------------


def test_reads_are_seen_with_the_flags_of_the_moment(plan: Path) -> None:
    staged = _native.PLAN_WANTED | _native.PLAN_STAGED
    _native.plan_mark(pack(2), staged | _native.PLAN_ARMED, 0)
    assert not readable(_native.seen_fd())
    _native.note_seen(2, _native.SEEN_ORIGIN)
    _native.plan_mark(pack(2), 0, staged)
    _native.note_seen(2, _native.SEEN_SSD)
    assert readable(_native.seen_fd())
    assert seen() == ([(2, _native.SEEN_ORIGIN | staged), (2, _native.SEEN_SSD)], 0)
    assert not readable(_native.seen_fd())


def test_a_look_up_is_seen_once_after_it_was_armed(plan: Path) -> None:
    for _ in range(2):
        _native.note_seen(2, _native.SEEN_LOOKUP)
        assert seen() == ([], 0)
        _native.plan_mark(pack(2), _native.PLAN_ARMED | _native.PLAN_FAILED, 0)
        assert _native.note_seen(2, _native.SEEN_LOOKUP, tid=os.getpid()) is False
        assert seen() == ([(2, _native.SEEN_LOOKUP | _native.PLAN_FAILED)], 0)


def test_nothing_is_seen_without_a_plan(source: Path) -> None:
    _native.note_seen(2, _native.SEEN_SSD)
    _native.plan_begin()
    assert seen() == ([], 0)
    _native.note_seen(2, _native.SEEN_SSD)
    _native.plan_end()
    assert not readable(_native.seen_fd())
    _native.plan_begin()
    assert seen() == ([], 0)
    _native.plan_end()


def test_what_does_not_fit_is_counted(plan: Path) -> None:
    for number in range(SEEN_MOST + 10):
        _native.note_seen(2 + number % 20, _native.SEEN_SSD)
    found, lost = seen(5)
    assert found == [(2 + number, _native.SEEN_SSD) for number in range(5)]
    assert lost == 10
    assert readable(_native.seen_fd())  # there is more
    _native.note_seen(7, _native.SEEN_ORIGIN)  # there is room again
    found, lost = seen()
    assert (len(found), found[-1], lost) == (SEEN_MOST - 4, (7, _native.SEEN_ORIGIN), 0)
    assert not readable(_native.seen_fd())


def test_an_observation_must_be_one(plan: Path) -> None:
    with pytest.raises(ValueError, match="what"):
        _native.note_seen(2, 0)
    _native.note_seen(_native.count() + 1, _native.SEEN_SSD)
    _native.note_seen(0, _native.SEEN_LOOKUP)
    assert seen() == ([], 0)


# ---- RAM ring ------------------------------------------------------------------------------------


def test_what_is_wanted_is_spared(plan: Path) -> None:
    for ino in range(2, 12):
        _native.note_read(ino, 0, 1000)
    _native.plan_mark(pack(*range(2, 8)), _native.PLAN_WANTED, 0)
    assert [ino for ino, _, _ in _native.ram_take(6000, 100)] == [8, 9, 10, 11]
    assert _native.ram_bytes() == 6000
    # nothing else is left: the oldest of them, in their order
    assert [ino for ino, _, _ in _native.ram_take(4000, 100)] == [2, 3]
    # what is wanted no more is taken before what is, wherever it stands
    _native.plan_mark(pack(7), 0, _native.PLAN_WANTED)
    assert [ino for ino, _, _ in _native.ram_take(3000, 100)] == [7]
    _native.plan_end()
    assert [ino for ino, _, _ in _native.ram_take(0, 100)] == [4, 5, 6]
    assert _native.ram_bytes() == 0


def test_sparing_many_is_done_in_small_steps(tmp_path: Path) -> None:
    blocks = 10_000
    with open(tmp_path / "large", "wb") as file:
        file.truncate(blocks * BLOCK)
    (tmp_path / "small").write_bytes(bytes(1000))
    attach(tmp_path)
    _native.plan_begin()
    large, small = ino_of("large"), ino_of("small")
    _native.plan_mark(pack(large), _native.PLAN_WANTED, 0)
    for block in range(blocks):
        _native.note_read(large, block * BLOCK, 4096)
    _native.note_read(small, 0, 1000)
    assert _native.ram_take(blocks * 4096, 1) == []  # comes back before it has looked at all
    taken = [_native.ram_take(blocks * 4096, 1) for _ in range(3)]
    assert [ino for batch in taken for ino, _, _ in batch] == [small]
    # and when all are wanted, each call gets somewhere
    taken = [_native.ram_take(0, 100) for _ in range(blocks // 100 + 10)]
    assert sorted(offset for batch in taken for _, offset, _ in batch) == [
        block * BLOCK for block in range(blocks)
    ]
    _native.plan_end()


# ---- listings ------------------------------------------------------------------------------------


def listing(ino: int, most: int) -> list[tuple[int, int, int, int, bytes]]:
    """[(inode, size, kind, stored, name), …] of all pages."""
    found = []
    after = 0
    while True:
        inos, sizes, kinds, stored, lengths, names, after = _native.list_directory(ino, after, most)
        count = len(kinds)
        assert count <= most
        at = 0
        ends = struct.unpack(f"<{count}H", lengths)
        for number, (child, size) in enumerate(
            zip(struct.unpack(f"<{count}I", inos), struct.unpack(f"<{count}Q", sizes), strict=True)
        ):
            name = names[at : at + ends[number]]
            at += ends[number]
            found.append((child, size, kinds[number], stored[number], name))
        assert at == len(names)
        if not after:
            return found


@pytest.mark.parametrize("most", [1, 7, 8, 1000])
def test_a_listing_is_what_the_directory_holds(tmp_path: Path, most: int) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "symlink").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(bytes(12345))
    (tmp_path / "empty").touch()
    (tmp_path / "gone").touch()
    os.link(tmp_path / "file", tmp_path / "same")
    for name in (b"n" * 255, b"\xff\n"):
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
            file.write(name)
    attach(tmp_path)
    (tmp_path / "gone").unlink()
    _native.scan(ROOT)
    kinds = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFLNK: 3}
    with os.scandir(os.fsencode(tmp_path)) as entries:
        expected = sorted(
            (
                _native.lookup(ROOT, entry.name),
                entry.stat(follow_symlinks=False).st_size,
                kinds.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode), 0),
                int(entry.name == b"empty"),
                entry.name,
            )
            for entry in entries
        )
    assert sorted(listing(ROOT, most)) == expected
    assert len(expected) == 8


def test_a_listing_of_thousands(tmp_path: Path) -> None:
    names = {f"{number:04}".encode() for number in range(5000)}
    for name in names:
        os.close(os.open(os.path.join(os.fsencode(tmp_path), name), os.O_CREAT))
    attach(tmp_path)
    for most in (2000, 65536):
        found = [name for *_, name in listing(ROOT, most)]
        assert len(found) == 5000
        assert set(found) == names


def test_a_file_is_stored_when_all_its_blocks_are(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(bytes(1000))
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2 * BLOCK + 1)
    attach(tmp_path)

    def stored() -> dict[bytes, int]:
        return {name: stored for _, _, _, stored, name in listing(ROOT, 10)}

    assert stored() == {b"small": 0, b"large": 0}
    small, large = ino_of("small"), ino_of("large")
    assert _native.set_location(small, 0, 1, 4096, 512, _native.version(small))
    assert stored() == {b"small": 0, b"large": 0}
    with open(tmp_path / "large", "rb") as segment:
        for segno in (1, 2):
            _native.segment_add(segno, segment.fileno())
    for block in range(3):
        assert stored() == {b"small": 1, b"large": 0}
        assert _native.set_location(large, block, 2, 4096, 512, _native.version(large))
    assert stored() == {b"small": 1, b"large": 1}
    _native.segment_drop(2)
    assert stored() == {b"small": 1, b"large": 0}
    _native.segment_drop(1)


def test_segments_of_files_and_of_one_with_more_blocks_than_could_be_walked(tmp_path: Path) -> None:
    for name, size in (("small", 1000), ("large", 2 * BLOCK), ("giant", 15 << 40), ("other", 1)):
        with open(tmp_path / name, "wb") as file:
            file.truncate(size)
    attach(tmp_path)
    small, large, giant, other = map(ino_of, ("small", "large", "giant", "other"))
    for ino, block, segno in ((small, 0, 1), (large, 1, 2), (giant, 7, 3), (giant, 3_900_000, 4)):
        assert _native.set_location(ino, block, segno, 4096, 512, _native.version(ino))

    def of(*inos: int) -> tuple[list[int], list[int]]:
        marks = np.zeros(20, np.uint8)
        marks[list(inos)] = 1
        segnos, unknown = _native.segments_of(marks)
        return sorted(np.frombuffer(segnos, np.uint32)), sorted(np.frombuffer(unknown, np.uint32))

    assert of() == of(other) == ([], [])
    assert of(small) == ([1], [])
    assert of(large) == ([2], [large])
    assert of(giant) == ([3, 4], [giant])
    assert of(small, large, giant, other) == ([1, 2, 3, 4], sorted([large, giant]))
    assert _native.set_location(large, 0, 1, 4096, 512, _native.version(large))
    assert of(large) == ([1, 2], [])


def test_a_listing_needs_a_listed_directory(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    attach(tmp_path)
    with pytest.raises(ValueError, match="LISTED"):
        _native.list_directory(ino_of("directory"), 0, 10)
    with pytest.raises(NotADirectoryError):
        _native.list_directory(ino_of("file"), 0, 10)
    with pytest.raises(UnknownInode):
        _native.list_directory(99, 0, 10)
    with pytest.raises(ValueError, match="at least 1"):
        _native.list_directory(ROOT, 0, 0)
    _native.scan(ino_of("directory"))
    assert listing(ino_of("directory"), 10) == []


# ---- fetch threads -------------------------------------------------------------------------------


@pytest.fixture
def pool() -> None:
    _native.fetch_start(4)


def submit(name: str, tag: int = 0) -> None:
    ino = ino_of(name)
    _native.fetch_submit(ino, _native.version(ino), tag)


def take(count: int) -> list[Fetched]:
    """The results of `count` submitted files, in the order of their tags."""
    taken: list[Fetched] = []
    while len(taken) < count:
        assert select.select([_native.fetch_fd()], [], [], 20)[0], "no answer from the pool"
        taken += _native.fetch_take(3)
    assert not readable(_native.fetch_fd())
    return sorted(taken)


@pytest.mark.parametrize("direct", [False, True])  # True: most are refused here, and are read again
def test_files_are_fetched_whole(pool: None, tmp_path: Path, direct: bool) -> None:
    _native.fetch_start(4, direct=direct)
    contents = {
        "empty": b"",
        "one": b"x",
        "page": os.urandom(4096),
        "odd": os.urandom(1_234_567),
        "block": os.urandom(BLOCK),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    attach(tmp_path)
    before_ns = time.time_ns()
    for tag, name in enumerate(contents):
        submit(name, tag)
    results = take(len(contents))
    for tag, (name, (got, ino, data, error, begun_ns, ended_ns, is_pooled)) in enumerate(
        zip(contents, results, strict=True)
    ):
        assert (got, ino, error) == (tag, ino_of(name), 0)
        assert data == contents[name]
        assert before_ns <= begun_ns <= ended_ns
        assert not is_pooled


@pytest.mark.parametrize("direct", [False, True])
def test_direct_reads_are_direct(pool: None, tmp_path: Path, direct: bool) -> None:
    content = os.urandom(100_001)
    behind = tmp_path / "behind"
    behind.mkdir()
    (behind / "file").write_bytes(content)
    shown = tmp_path / "shown"
    shown.mkdir()
    with FaultyOrigin(behind, shown, tmp_path / "socket") as origin:
        attach(shown)
        _native.fetch_start(4, direct=direct)
        origin.add(Fault("read", "file", hang=True))
        submit("file")
        eventually(lambda: origin.hanging() == 1)
        (flags,) = open_flags(os.getpid(), shown / "file")
        assert (flags & os.O_DIRECT != 0) is direct
        origin.clear()
        assert take(1)[0][2:4] == (content, 0)
        attach(behind)  # lets go of the origin


def test_many_files_in_few_threads(pool: None, tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"f{number}").write_bytes(b"%d " % number * 100)
    attach(tmp_path)
    before = set(os.listdir("/proc/self/task"))
    for number in range(1000):
        submit(f"f{number}", number)
    assert len(set(os.listdir("/proc/self/task")) - before) <= 4
    for number, (tag, _, data, error, _, _, _) in enumerate(take(1000)):
        assert (tag, error, data) == (number, 0, b"%d " % number * 100)


def test_only_the_version_that_was_asked_for(pool: None, source: Path) -> None:
    (source / "f00").write_bytes(b"another content")
    (source / "f01").unlink()
    os.replace(source / "f03", source / "f02")
    (source / "f04").unlink()
    (source / "f04").mkdir()
    for tag in range(6):
        submit(f"f{tag:02}", tag)
    assert [(error, data is None) for _, _, data, error, _, _, _ in take(6)] == [
        (errno.ESTALE, True),
        (errno.ENOENT, True),
        (errno.ESTALE, True),
        (errno.ENOENT, True),
        (errno.ESTALE, True),
        (0, False),
    ]


def test_what_cannot_be_fetched_is_refused(source: Path) -> None:
    version = _native.version(2)
    for threads in (0, PREFETCH_DEPTH_MAX + FLYING_MOST + LOST_MOST + 1, -1):
        with pytest.raises(ValueError, match="threads"):
            _native.fetch_start(threads)
    with pytest.raises(UnknownInode):
        _native.fetch_submit(99, version, 0)
    with pytest.raises(ValueError, match="larger"):
        _native.fetch_submit(2, (version[0], BLOCK + 1, *version[2:]), 0)
    with pytest.raises(OverflowError):
        _native.fetch_submit(2, version, 1 << 64)


def test_an_origin_that_fails(pool: None, place: Place, faulty: FaultyOrigin) -> None:
    for name in ("short", "broken", "denied", "good"):
        place.write(name, bytes(5000))
    attach(faulty.mountpoint)
    faulty.add(Fault("read", "short", short=4096))
    faulty.add(Fault("read", "broken", error="EREMOTEIO"))
    faulty.add(Fault("open", "denied", error="EACCES"))
    for tag, name in enumerate(("short", "broken", "denied", "good")):
        submit(name, tag)
    assert [error for _, _, _, error, _, _, _ in take(4)] == [
        errno.EIO,
        errno.EREMOTEIO,
        errno.EACCES,
        0,
    ]


def test_a_fetch_asks_the_origin_for_the_version_once(
    pool: None, place: Place, faulty: FaultyOrigin
) -> None:
    """When all is read: it has not changed since the table's look, which was before the fetch."""
    place.write("file", bytes(5000))
    attach(faulty.mountpoint)
    faulty.reset_counts()
    fd = os.open(faulty.mountpoint / "file", os.O_RDONLY)
    assert len(os.pread(fd, 5000, 0)) == 5000
    os.close(fd)
    to_read = faulty.count("getattr", "file")
    submit("file")
    assert [error for _, _, _, error, _, _, _ in take(1)] == [0]
    assert faulty.count("getattr", "file") == 2 * to_read + 1


def test_a_file_that_changes_while_it_is_fetched(
    pool: None, place: Place, faulty: FaultyOrigin
) -> None:
    place.write("file", bytes(5000))
    attach(faulty.mountpoint)
    faulty.add(Fault("read", "file", hang=True))
    submit("file")
    eventually(lambda: faulty.hanging() == 1)
    place.write("file", bytes(5000))  # same bytes, another time of change
    faulty.clear()
    assert [error for _, _, _, error, _, _, _ in take(1)] == [errno.ESTALE]


def test_more_threads_for_those_that_hang(pool: None, place: Place, faulty: FaultyOrigin) -> None:
    for number in range(6):
        place.write(f"f{number}", b"%d" % number * 5000)
    attach(faulty.mountpoint)
    faulty.add(Fault("read", "f[0-3]", hang=True))
    for number in range(6):
        submit(f"f{number}", number)
    eventually(lambda: faulty.hanging() == 4)
    _native.fetch_start(5)  # the fifth thread does the other two
    found: list[Fetched] = []
    eventually(lambda: len(found.__iadd__(_native.fetch_take(10))) == 2)
    assert [tag for tag, *_ in sorted(found)] == [4, 5]
    faulty.clear()
    assert [error for _, _, _, error, _, _, _ in [*found, *take(4)]] == [0] * 6


# ---- a recording ---------------------------------------------------------------------------------

OPENED, SSD, ORIGIN, CONTINUES = _native.SEEN_LOOKUP, _native.SEEN_SSD, _native.SEEN_ORIGIN, 16


@pytest.fixture
def recording(source: Path) -> Iterator[Callable[..., None]]:
    """Begins one; it is ended with the test."""
    yield _native.trace_begin
    _native.trace_end()


def accesses() -> tuple[list[tuple[int, int, int]], int]:
    """[(inode, thread id, seen), …] and how many were lost."""
    taken, lost = _native.take_accesses(65_536)
    rows = list(struct.iter_unpack("<QII", taken))
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    return [(ino, who >> 8, who & 0xFF) for _, ino, who in rows], lost


def test_nothing_is_recorded_when_nobody_records(recording: Callable[..., None]) -> None:
    _native.note_open(2, 7)
    _native.note_seen(2, SSD)
    recording(wires=False, lookups=False)
    assert accesses() == ([], 0)
    _native.note_open(2, 7)
    _native.trace_end()
    assert accesses() == ([], 0)
    recording(wires=True, lookups=False)
    assert accesses() == ([], 0)
    with pytest.raises(OSError, match="busy") as caught:
        _native.trace_begin(wires=False, lookups=False)
    assert caught.value.errno == errno.EBUSY


def test_a_read_continues_the_open_before_it_once(recording: Callable[..., None]) -> None:
    recording(wires=False, lookups=False)
    _native.note_open(2, 4_194_303)
    _native.note_open(3, 8)
    _native.note_open(_native.count() + 1, 8)  # unknown
    for ino in (2, 2, 4, 3):
        _native.note_seen(ino, ORIGIN)
    seen, lost = accesses()
    assert lost == 0
    assert [(ino, what) for ino, _, what in seen] == [
        *((2, OPENED), (3, OPENED), (2, ORIGIN | CONTINUES)),
        *((2, ORIGIN), (4, ORIGIN), (3, ORIGIN | CONTINUES)),
    ]
    assert [tid for _, tid, _ in seen[:2]] == [4_194_303, 8]


def test_lookups_and_fired_wires_count_where_asked_for(recording: Callable[..., None]) -> None:
    _native.plan_begin()
    try:
        for wires, lookups, expected in ((False, False, 0), (True, False, 1), (False, True, 2)):
            _native.plan_mark(pack(2), _native.PLAN_ARMED, 0)
            recording(wires=wires, lookups=lookups)
            assert _native.trace_sees_lookups() is lookups
            _native.note_seen(2, OPENED, os.getpid())  # fires the wire
            _native.note_seen(2, OPENED, os.getpid())
            assert accesses() == ([(2, os.getpid(), OPENED)] * expected, 0)
            _native.trace_end()
    finally:
        _native.plan_end()


def test_accesses_that_do_not_fit_are_counted(recording: Callable[..., None]) -> None:
    recording(wires=False, lookups=False)
    most = 4 * 65_536
    for _ in range(most + 5):
        _native.note_open(2, 1)
    taken, lost = _native.take_accesses(1)
    assert (len(taken), lost) == (16, 5)
    _native.note_open(3, 1)
    taken_count = 0
    while (batch := accesses())[0]:
        assert batch[1] == 0
        taken_count += len(batch[0])
    assert taken_count == most
