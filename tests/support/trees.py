"""Directory trees for tests: one with everything a file system can hold, and the comparison of two.

The walk goes by directory descriptors, one name at a time, so paths may be longer than PATH_MAX.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path

EQUAL_FIELDS = (
    *("st_mode", "st_uid", "st_gid", "st_nlink", "st_size", "st_rdev", "st_blocks"),
    *("st_mtime_ns", "st_ctime_ns"),
)
HASH_LIMIT_BYTES = 64 << 20
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

Snapshot = dict[bytes, tuple[tuple[int, ...], bytes]]


def content_at(parent: int, name: bytes, found: os.stat_result) -> bytes:
    """What an entry holds: a digest of the bytes, the text of a link; nothing for other types."""
    if stat.S_ISLNK(found.st_mode):
        return os.readlink(name, dir_fd=parent)
    if not stat.S_ISREG(found.st_mode) or found.st_size > HASH_LIMIT_BYTES:
        return b""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=parent)
    with open(descriptor, "rb") as file:
        return hashlib.sha256(file.read()).digest()


def snapshot(root: Path, content: bool = True) -> tuple[Snapshot, dict[bytes, int]]:
    """Every entry's compared attributes and content, and every entry's inode number, by path."""
    entries: Snapshot = {}
    numbers: dict[bytes, int] = {}

    def record(path: bytes, parent: int, name: bytes, found: os.stat_result) -> None:
        fields = tuple(getattr(found, field) for field in EQUAL_FIELDS)
        entries[path] = (fields, content_at(parent, name, found) if content else b"")
        numbers[path] = found.st_ino

    def walk(directory: int, path: bytes) -> None:
        # Listing a descriptor gives str names through fsdecode; back to bytes it is exact.
        names = [os.fsencode(name) for name in os.listdir(directory)]
        assert len(names) == len(set(names)), f"a name twice in {path!r}"
        for name in names:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            record(path + b"/" + name, directory, name, found)
            if stat.S_ISDIR(found.st_mode):
                below = os.open(name, DIRECTORY, dir_fd=directory)
                try:
                    walk(below, path + b"/" + name)
                finally:
                    os.close(below)

    top = os.open(root, DIRECTORY)
    try:
        record(b"", top, b".", os.fstat(top))
        walk(top, b"")
    finally:
        os.close(top)
    return entries, numbers


def links(numbers: dict[bytes, int]) -> set[frozenset[bytes]]:
    """The groups of paths that share an inode number."""
    groups: dict[int, set[bytes]] = {}
    for path, number in numbers.items():
        groups.setdefault(number, set()).add(path)
    return {frozenset(group) for group in groups.values() if len(group) > 1}


def assert_same(source: Path, view: Path, content: bool = True) -> None:
    """The view shows the source: names, attributes, links, content."""
    expected, expected_numbers = snapshot(source, content)
    seen, seen_numbers = snapshot(view, content)
    assert seen.keys() == expected.keys(), {
        "missing": sorted(expected.keys() - seen.keys())[:5],
        "extra": sorted(seen.keys() - expected.keys())[:5],
    }
    different = {
        path: (seen[path], expected[path]) for path in seen if seen[path] != expected[path]
    }
    assert not different, dict(list(different.items())[:3])
    assert links(seen_numbers) == links(expected_numbers)


_RING_BYTES = (4 << 20) + 4099  # no block of a file is like the next one


@functools.cache
def _ring() -> bytes:
    return random.Random(0).randbytes(_RING_BYTES)


def random_bytes(seed: object, count: int) -> bytes:
    """Others for each seed. Cut out of a ring: to draw the gigabytes of a run takes a minute."""
    head = hashlib.sha256(repr(seed).encode()).digest()
    begin = int.from_bytes(head[:8], "little") % _RING_BYTES
    ring = _ring() * (1 + (begin + count) // _RING_BYTES)
    return (head + ring[begin : begin + count])[:count]


def make_files(root: Path, count: int, size: Callable[[int], int], seed: object = 0) -> list[Path]:
    """`count` files in directories of 50, with bytes that name and seed decide."""
    paths = []
    for index in range(count):
        path = root / f"class{index // 50:03d}" / f"{index:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random_bytes((seed, index), size(index)))
        paths.append(path)
    return paths


def make_everything(root: Path) -> None:
    """One of each: every byte in names, every type, deep, linked, sparse, odd times and modes."""
    top = os.fsencode(root)
    odd = os.path.join(top, b"odd")
    os.mkdir(odd)
    names = [b"x" + bytes([n]) for n in range(1, 256) if n != ord("/")]
    names += [b" ", b"-rf", b"...", b"\n", b"\\040", b"a" * 255, b"\xff" * 255, "ü€😀".encode()]
    for index, name in enumerate(names):
        with open(os.path.join(odd, name), "wb") as file:
            file.write(b"%d" % index * (index % 7))

    deep = os.open(root, DIRECTORY)
    for _ in range(22):  # 22 * 201 bytes: beyond PATH_MAX
        os.mkdir(b"d" * 200, dir_fd=deep)
        below = os.open(b"d" * 200, DIRECTORY, dir_fd=deep)
        os.close(deep)
        deep = below
    with open(os.open(b"bottom", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=deep), "wb") as file:
        file.write(b"down here")
    os.close(deep)

    (root / "links").mkdir()
    (root / "links/first").write_bytes(b"linked content")
    os.link(root / "links/first", root / "links/second")
    os.link(root / "links/first", root / "third")
    for link, text in {
        "relative": "first",
        "up": "../third",
        "dangling": "nothing here",
        "absolute": "/etc/hostname",
        "directory": "..",
        "loop": "loop",
        "long": "x/" * 2000,
    }.items():
        os.symlink(text, root / "links" / link)
    os.symlink(b"\xff\xfe\x01", os.path.join(top, b"links", b"bytes"))

    kinds = root / "kinds"
    kinds.mkdir()
    os.mkfifo(kinds / "fifo", 0o640)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
        here = os.open(kinds, DIRECTORY)
        bound.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    os.mknod(kinds / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(kinds / "block", stat.S_IFBLK | 0o600, os.makedev(259, 70000))
    (kinds / "empty").touch()
    (kinds / "empty directory").mkdir()
    with open(kinds / "sparse", "wb") as file:
        file.truncate(3 << 20)
        file.seek(1 << 20)
        file.write(b"island")
    with open(kinds / "huge", "wb") as file:
        file.truncate((5 << 30) + 12345)
        for offset in (0, (4 << 30) - 5, (5 << 30) + 12345 - 100):
            file.seek(offset)
            file.write(random_bytes(offset, 100))

    modes = root / "modes"
    modes.mkdir()
    for mode in (0o000, 0o111, 0o400, 0o644, 0o4755, 0o2755, 0o1777):
        (modes / f"{mode:o}").write_bytes(b"mode")
        (modes / f"{mode:o}").chmod(mode)
    for owner in (1, 65534, 2**31 + 5):
        (modes / f"of {owner}").write_bytes(b"owned")
        os.chown(modes / f"of {owner}", owner, owner + 1)
    (modes / "closed").mkdir(mode=0o000)
    for second in (-1_000_000_000, 0, 1, 4_000_000_000):
        (modes / f"at {second}").write_bytes(b"time")
        moment = second * 10**9 + 123_456_789
        os.utime(modes / f"at {second}", ns=(moment, moment))
