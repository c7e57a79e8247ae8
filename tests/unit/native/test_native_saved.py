"""Saved tables in C: what is written and loaded, what of it is believed, and files that are not
what they should be (docs/FORMAT.md, "Saved tables").
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from fusecache import _native
from tests.support.mounted import eventually
from tests.support.native_table import ROOT

SOURCE = b"0123456789abcdef"
HEADER, NODE = struct.Struct("<8s16sQQQQ"), struct.Struct("<QQQqqqqIIIIIIHHI")
SETTLED_NS = 2_100_000_000
PARENT, MODE, NAME_LEN = 12, 7, 13  # fields of a node


class Tables:
    """A source, and one table after the other attached to it."""

    def __init__(self, base: Path) -> None:
        self.source, self.file = base / "source", base / "saved"
        self.source.mkdir()

    def attach(self, source: Path | None = None) -> None:
        """An empty one."""
        source_fd = os.open(source or self.source, os.O_RDONLY | os.O_DIRECTORY)
        table_fd = os.memfd_create("table")
        assert _native.attach(table_fd, source_fd, True) == ROOT
        os.close(source_fd)
        os.close(table_fd)

    def settle(self) -> None:
        """Until no directory of the source has changed within the last two seconds."""
        eventually(lambda: time.time_ns() - newest_ns(self.source) > SETTLED_NS)

    def save(self) -> bytes:
        with open(self.file, "wb") as file:
            written = _native.save_table(file.fileno(), SOURCE)
        data = self.file.read_bytes()
        assert written == len(data) <= _native.saved_bytes()
        return data

    def load(self, data: bytes | None = None, source: bytes = SOURCE) -> str:
        """Into the table that is attached."""
        if data is not None:
            self.file.write_bytes(data)
        with open(self.file, "rb") as file:
            return _native.load_table(file.fileno(), source)

    def again(self) -> None:
        """What is known now, saved and loaded into the next table."""
        self.save()
        self.attach()
        assert self.load() == ""


def newest_ns(path: Path) -> int:
    return max(os.stat(directory).st_ctime_ns for directory, _, _ in os.walk(path))


def ino_of(path: str) -> int:
    ino = ROOT
    for name in path.split("/"):
        ino = _native.lookup(ino, name.encode())
        assert ino > 0, path
    return ino


def scan_all() -> None:
    directories = [ROOT]
    while directories:
        directory = directories.pop()
        _native.scan(directory)
        for _, child, _ in _native.children(directory, 0, 1000):
            if _native.attributes(child)[0] & 0o170000 == 0o040000:
                directories.append(child)


Known = dict[bytes, tuple[object, ...]]


def known() -> Known:
    """All that a table knows of each name."""
    found: Known = {}
    for directory in (ROOT, *(ino for ino in range(2, _native.count() + 1))):
        for name, child, _ in _native.children(directory, 0, 1000):
            path = _native.path(directory) + b"/" + name
            found[path] = (_native.attributes(child), _native.version(child))
    return found


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Tables]:
    made = Tables(tmp_path)
    yield made
    made.attach()  # no later test sees a table of this one


@pytest.fixture
def small(tables: Tables) -> bytes:
    """A saved table of a directory with two files, and one beside it; the next one is attached."""
    for name in ("d/one", "d/two", "three"):
        path = tables.source / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(name.encode())
    tables.settle()
    tables.attach()
    scan_all()
    data = tables.save()
    tables.attach()
    return data


# ---- what is written and loaded ------------------------------------------------------------------


def test_all_that_is_known_comes_back(tables: Tables) -> None:
    source = tables.source
    (source / "empty").mkdir()
    (source / "d" / "e").mkdir(parents=True)
    (source / "d" / "file").write_bytes(b"x" * 5000)
    os.link(source / "d" / "file", source / "d" / "e" / "link")
    os.symlink("d/file", source / "symlink")
    os.mkfifo(source / "fifo")
    os.mknod(source / "device", 0o600 | 0o020000, os.makedev(1, 3))
    Path(os.fsdecode(os.fsencode(source) + b"/\xff\n \xc3\xa4")).write_bytes(b"")
    (source / ("n" * 255)).write_bytes(b"long")
    os.chown(source / "fifo", 12, 34)
    os.utime(source / "d" / "file", ns=(-5, 1_000_000_000_123_456_789))
    (source / "gone").write_bytes(b"")
    tables.settle()
    tables.attach()
    scan_all()
    (source / "gone").unlink()
    _native.scan(ROOT)
    before = known()
    count = _native.count()
    tables.again()
    assert known() == before
    assert b"/gone" not in before
    assert _native.count() == count - 1  # names that are gone are not saved
    assert _native.lookup(ino_of("d"), b"file") == -1, "with another name, it is to be looked at"
    linked = [_native.children(ino_of(folder), 0, 10) for folder in ("d", "d/e")]
    assert dict(entry[:2] for entry in linked[0])[b"file"] == linked[1][0][1]
    assert not any(_native.is_listed(ino) for ino in range(1, _native.count() + 1))
    assert _native.take_stale(100) == []
    tables.again()  # what no reader has used since is not lost
    assert known() == before


def test_a_listing_whose_stamps_are_the_same_costs_one_look(tables: Tables) -> None:
    (tables.source / "d").mkdir()
    file = tables.source / "d" / "file"
    file.write_bytes(b"before")
    tables.settle()
    tables.attach()
    scan_all()
    tables.again()
    file.write_bytes(b"rewritten")  # no directory's stamps change
    assert _native.scan(ROOT) == (0, 0, 0)
    assert _native.is_listed(ROOT)
    assert not _native.is_listed(ino_of("d"))
    assert _native.scan(ino_of("d")) == (0, 0, 0)
    assert _native.is_listed(ino_of("d"))
    ino = ino_of("d/file")
    assert _native.attributes(ino)[5] == len(b"before")
    assert _native.is_unchecked(ino)
    assert _native.has_unchecked(ino_of("d"))
    assert not _native.has_unchecked(ROOT)
    assert _native.refresh(ino) > 0
    assert not _native.is_unchecked(ino)
    assert _native.attributes(ino)[5] == len(b"rewritten")


@pytest.mark.parametrize("look", ["refresh", "add", "scan", "sweep of the link's directory"])
def test_a_look_at_a_file_checks_it(tables: Tables, look: str) -> None:
    (tables.source / "d").mkdir()
    (tables.source / "file").write_bytes(b"content")
    os.link(tables.source / "file", tables.source / "d" / "link")
    tables.settle()
    tables.attach()
    scan_all()
    tables.again()
    _native.scan(ROOT)
    ino = ino_of("file")
    assert _native.is_unchecked(ino)
    if look == "refresh":
        assert _native.refresh(ino) == 0
    elif look == "add":
        assert _native.add(ROOT, b"file") == ino
    elif look == "scan":
        _native.scan(ROOT)
    else:
        _native.scan(ino_of("d"))
        assert _native.is_unchecked(ino)
        _native.scan(ino_of("d"))
    assert not _native.is_unchecked(ino)


def test_a_table_that_knows_more_is_not_filled(tables: Tables, small: bytes) -> None:
    _native.scan(ROOT)
    with pytest.raises(FileExistsError):
        tables.load(small)


# ---- what is believed: only a listing that its stamps stand for ----------------------------------


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda d: (d / "new").write_bytes(b""),
        lambda d: (d / "one").unlink(),
        lambda d: (d / "one").rename(d / "renamed"),
        lambda d: (d / "one").rename(d / "two"),
        lambda d: ((d / "sub").rmdir(), (d / "sub").write_bytes(b"now a file")),
        lambda d: (d.rename(d.with_name("old")), d.mkdir()),
        lambda d: d.chmod(0o700),
    ],
    ids=["added", "removed", "renamed", "replaced", "other type", "other directory", "mode"],
)
def test_a_directory_that_changed_is_listed_anew(tables: Tables, change: Change) -> None:
    """What changed within it too, whose own stamps tell nothing."""
    directory = tables.source / "d"
    (directory / "sub").mkdir(parents=True)
    for name in ("one", "two", "in place"):
        (directory / name).write_bytes(name.encode())
    tables.settle()
    tables.attach()
    scan_all()
    tables.again()
    change(directory)
    if (directory / "in place").exists():
        (directory / "in place").write_bytes(b"rewritten")
    _native.scan(ROOT)
    _native.scan(ino_of("d"))
    found = {name for name, _, _ in _native.children(ino_of("d"), 0, 100)}
    assert found == {name.encode() for name in os.listdir(directory)}
    for entry in os.scandir(directory):
        ino = _native.lookup(ino_of("d"), os.fsencode(entry.name))
        assert _native.attributes(ino)[5] == entry.stat(follow_symlinks=False).st_size


def test_stamps_that_another_look_brought_are_not_those_of_the_listing(tables: Tables) -> None:
    """A sweep has come to the parent and not to the directory: then the mount ends."""
    directory = tables.source / "d"
    directory.mkdir()
    (directory / "old").write_bytes(b"")
    tables.settle()
    tables.attach()
    scan_all()
    (directory / "new").write_bytes(b"")
    tables.settle()
    _native.scan(ROOT)
    assert _native.attributes(ino_of("d"))[8] == directory.stat().st_mtime_ns
    tables.again()
    _native.scan(ROOT)
    _native.scan(ino_of("d"))
    assert _native.lookup(ino_of("d"), b"new") > 0


def test_a_listing_of_young_stamps_is_not_believed(tables: Tables) -> None:
    """The directory may change once more within the clock's tick, and look the same."""
    tables.settle()
    while True:  # until the machine takes less than two seconds for a scan
        (tables.source / "file").unlink(missing_ok=True)  # the directory is young again
        (tables.source / "file").write_bytes(b"before")
        tables.attach()
        _native.scan(ROOT)
        if time.time_ns() - newest_ns(tables.source) <= 2_000_000_000:
            break
    tables.again()
    (tables.source / "file").write_bytes(b"rewritten")
    _native.scan(ROOT)
    assert _native.attributes(ino_of("file"))[5] == len(b"rewritten")


def test_a_name_that_a_look_missed_for_a_moment_is_not_missed_for_ever(tables: Tables) -> None:
    """A directory above had another name while a file was looked at. Its own never changed."""
    (tables.source / "a" / "b").mkdir(parents=True)
    (tables.source / "a" / "b" / "file").write_bytes(b"")
    tables.settle()
    tables.attach()
    scan_all()
    (tables.source / "a").rename(tables.source / "other")
    assert _native.refresh(ino_of("a/b/file")) == 3
    (tables.source / "other").rename(tables.source / "a")
    tables.again()
    _native.scan(ROOT)
    _native.scan(ino_of("a"))
    _native.scan(ino_of("a/b"))
    assert _native.lookup(ino_of("a/b"), b"file") > 0


@pytest.mark.parametrize("what", ["a name is missed", "its stamps are looked at"])
def test_what_happens_amid_a_scan(tables: Tables, what: str) -> None:
    """A tick comes after each 2,048 entries."""
    directory = tables.source / "p" / "d"
    directory.mkdir(parents=True)
    for number in range(2500):
        (directory / f"{number:04}").touch()
    tables.settle()
    tables.attach()
    _native.scan(ROOT)
    _native.scan(ino_of("p"))
    ino, ticks = ino_of("p/d"), 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if what == "a name is missed":
            [(_, first, _)] = _native.children(ino, 0, 1)
            (tables.source / "p").rename(tables.source / "other")
            assert _native.refresh(first) == 3
            (tables.source / "other").rename(tables.source / "p")
        else:
            for number in range(100):
                (directory / f"new {number}").touch()
            assert _native.refresh(ino) > 0

    _native.scan(ino, tick)
    assert ticks == 1
    tables.again()
    for path in ("", "p", "p/d"):
        _native.scan(ino_of(path) if path else ROOT)
    found = [name.decode() for name, _, _ in _native.children(ino_of("p/d"), 0, 10_000)]
    assert sorted(found) == sorted(os.listdir(directory))


def test_a_directory_that_was_never_listed_is_not_afterwards(tables: Tables) -> None:
    (tables.source / "d").mkdir()
    (tables.source / "d" / "file").write_bytes(b"")
    (tables.source / "d" / "other").write_bytes(b"")
    tables.settle()
    tables.attach()
    _native.scan(ROOT)
    _native.add(ino_of("d"), b"file")
    tables.again()
    assert _native.lookup(ino_of("d"), b"other") == -1
    _native.scan(ino_of("d"))
    assert _native.lookup(ino_of("d"), b"other") > 0


# ---- files that are not what they should be ------------------------------------------------------


def nothing_is_loaded(tables: Tables, data: bytes, source: bytes = SOURCE) -> str:
    why_not = tables.load(data, source)
    assert why_not
    assert _native.count() == ROOT
    assert _native.scan(ROOT) == (0, 0, 0)
    tables.attach()
    return why_not


def test_cut_at_every_byte(tables: Tables, small: bytes) -> None:
    for length in range(len(small)):
        tables.file.write_bytes(small[:length])
        assert tables.load() == "it is damaged"
        assert _native.count() == ROOT
    assert nothing_is_loaded(tables, small + b"\0") == "it is damaged"
    assert tables.load(small) == ""


def test_every_bit_flipped(tables: Tables, small: bytes) -> None:
    for bit in range(8 * len(small)):
        flipped = bytearray(small)
        flipped[bit // 8] ^= 1 << bit % 8
        expected = "it was written by another version" if bit // 8 == 7 else "it is damaged"
        assert tables.load(bytes(flipped)) == expected
        assert _native.count() == ROOT
    assert tables.load(small) == ""


def test_of_another_source(tables: Tables, small: bytes, tmp_path: Path) -> None:
    assert nothing_is_loaded(tables, small, SOURCE[::-1]) == "it is of another source"
    other = tmp_path / "other"
    other.mkdir()
    tables.attach(other)  # another directory has the path now
    assert tables.load(small) == "it is of another source"
    assert _native.count() == ROOT


def test_a_file_that_cannot_be_read(tables: Tables, tmp_path: Path) -> None:
    tables.attach()
    directory = os.open(tmp_path, os.O_RDONLY)
    assert _native.load_table(directory, SOURCE) == "it is damaged"
    os.close(directory)
    with pytest.raises(ValueError, match="16 bytes"):
        _native.load_table(0, b"short")


def test_a_disk_that_is_full(tables: Tables, small: bytes) -> None:
    assert tables.load(small) == ""
    with open("/dev/full", "wb") as full, pytest.raises(OSError, match="No space"):
        _native.save_table(full.fileno(), SOURCE)


def forged(small: bytes, number: int, field: int, value: int, names: bytes | None = None) -> bytes:
    """With right checksums, node `number`'s field another; and other names."""
    magic, source, count, name_bytes, *_ = HEADER.unpack_from(small)
    nodes = bytearray(small[HEADER.size : HEADER.size + count * NODE.size])
    fields = list(NODE.unpack_from(nodes, (number - 1) * NODE.size))
    fields[field] = value
    NODE.pack_into(nodes, (number - 1) * NODE.size, *fields)
    names = small[-name_bytes:] if names is None else names
    content = bytes(nodes) + names
    head = struct.pack(
        "<8s16sQQQ", magic, source, count, len(names), xxhash.xxh3_64_intdigest(content)
    )
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little") + content


def named(small: bytes) -> dict[bytes, int]:
    """The nodes' numbers."""
    _, _, count, name_bytes, *_ = HEADER.unpack_from(small)
    names, found = small[-name_bytes:], {}
    for number in range(1, count + 1):
        length = NODE.unpack_from(small, HEADER.size + (number - 1) * NODE.size)[NAME_LEN]
        found[names[:length]] = number
        names = names[length:]
    return found


def test_what_no_mount_has_written(tables: Tables, small: bytes) -> None:
    """Its checksums are right."""
    numbers = named(small)
    assert forged(small, 1, PARENT, 0) == small
    names = b"".join(numbers)
    last = max(numbers.values())
    length = {name: len(name) for name in numbers}
    wrong = [
        forged(small, 1, PARENT, 1),
        forged(small, 1, NAME_LEN, 1),
        forged(small, 1, MODE, 0o100644),
        forged(small, last, PARENT, 0),
        forged(small, last, PARENT, last),
        forged(small, last, PARENT, last + 1),
        forged(small, last, PARENT, 1 << 31),
        forged(small, last, PARENT, numbers[b"three"]),
        forged(small, last, MODE, 0),
        forged(small, last, MODE, 0o030644),
        forged(small, last, NAME_LEN, 0),
        forged(small, last, NAME_LEN, 256, names + b"n" * 256),
        forged(small, last, NAME_LEN, length[list(numbers)[-1]] + 1),
        forged(small, 1, PARENT, 0, names + b"x"),
        forged(small, 1, PARENT, 0, names.replace(b"three", b"th/ee")),
        forged(small, 1, PARENT, 0, names.replace(b"three", b"th\0ee")),
        forged(small, 1, PARENT, 0, names.replace(b"d", b".")),
        forged(small, last, NAME_LEN, 2, names[: -length[list(numbers)[-1]]] + b".."),
    ]
    assert small not in wrong
    for data in wrong:
        assert nothing_is_loaded(tables, data) == "it is damaged"
    assert tables.load(small) == ""
