"""The inode table in C: scanning, merging, paths, hard links, staleness, resuming after kill -9.

Each test attaches a table of its own: `attach` may be called again in one process.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from fusecache import _native
from fusecache.base.errors import UnknownInode
from tests.conftest import Place
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import errno_of

ROOT = 1


class Table:
    """A source directory and a table attached to it."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
        self.table_fd = os.memfd_create("table")
        assert _native.table_mode(self.table_fd) == -1
        assert _native.attach(self.table_fd, self.source_fd, True) == ROOT
        assert _native.table_mode(self.table_fd) == 1

    def again(self) -> int:
        """As the next server does."""
        return _native.attach(self.table_fd, self.source_fd, True)

    def close(self) -> None:
        os.close(self.source_fd)
        os.close(self.table_fd)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    source = tmp_path / "source"
    source.mkdir()
    made = Table(source)
    yield made
    made.close()


def make_files(table: Table, names: Iterable[str]) -> None:
    """Empty ones, a system call each."""
    for name in names:
        os.mknod(name, dir_fd=table.source_fd)


def names(ino: int = ROOT, at_once: int = 7) -> dict[bytes, int]:
    """What a listing shows, in two ways that must agree."""
    found: dict[bytes, int] = {}
    cookie = 0
    while batch := _native.children(ino, cookie, at_once):
        for name, child, at in batch:
            assert at > cookie
            cookie = at
            assert name not in found
            found[name] = child
    for name, child in found.items():
        assert _native.lookup(ino, name) in (child, -1)
    return found


def settle() -> dict[int, tuple[bool, set[tuple[int, bytes]]]]:
    """Take all that is stale, as the notifier does."""
    stale: dict[int, tuple[bool, set[tuple[int, bytes]]]] = {}
    while batch := _native.take_stale(3):
        for ino, name_is_stale, where in batch:
            stale[ino] = (name_is_stale, set(where))
            _native.settled(ino)
    return stale


def check_against(path: Path, ino: int) -> None:
    """INVARIANT: after a scan the table equals the directory."""
    found = names(ino)
    assert sorted(found) == sorted(os.fsencode(name) for name in os.listdir(path))
    for name, child in found.items():
        status = os.lstat(path / os.fsdecode(name))
        assert _native.attributes(child) == (
            status.st_mode,
            status.st_nlink,
            status.st_uid,
            status.st_gid,
            status.st_rdev,
            status.st_size,
            status.st_blocks,
            status.st_atime_ns,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
        assert _native.version(child) == (
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )


def test_root_is_known_before_any_scan(table: Table) -> None:
    status = os.stat(table.source)
    assert _native.count() == ROOT
    assert _native.attributes(ROOT)[0] == status.st_mode
    assert _native.path(ROOT) == b""
    assert not _native.is_listed(ROOT)
    assert _native.lookup(ROOT, b"x") == -1


def test_scan_lists_a_directory_with_every_kind_of_entry(table: Table) -> None:
    (table.source / "file").write_bytes(b"x" * 5000)
    (table.source / "empty").touch()
    (table.source / "dir").mkdir()
    (table.source / "link").symlink_to("nowhere/at all")
    os.mkfifo(table.source / "pipe")
    os.utime(table.source / "file", ns=(1, -5))  # before 1970
    assert _native.scan(ROOT) == (0, 0, 1)  # the directory itself has changed since attach
    assert _native.is_listed(ROOT)
    check_against(table.source, ROOT)
    assert _native.lookup(ROOT, b"none") == 0
    assert _native.readlink(names()[b"link"]) == b"nowhere/at all"
    with pytest.raises(NotADirectoryError):
        _native.scan(names()[b"file"])


def test_unknown_inodes(table: Table) -> None:
    for ask in (_native.attributes, _native.version, _native.path, _native.is_dead):
        for ino in (0, 2, 2**32 + 1, 2**70, -1):
            with pytest.raises(UnknownInode):
                ask(ino)
    assert _native.lookup(99, b"x") == -1
    with pytest.raises(FileNotFoundError):
        _native.scan(99)


def test_second_scan_of_the_same_finds_nothing(table: Table) -> None:
    for number in range(300):
        (table.source / str(number)).touch()
    _native.scan(ROOT)
    before = names()
    settle()
    assert _native.scan(ROOT) == (0, 0, 0)
    assert names() == before
    assert settle() == {}


def test_scan_reports_and_flags_what_changed(table: Table) -> None:
    for name in ("a", "b", "c", "d"):
        (table.source / name).write_text(name)
    _native.scan(ROOT)
    settle()
    inodes = names()
    (table.source / "a").write_text("longer")
    (table.source / "b").unlink()
    (table.source / "new").touch()
    (table.source / "d2").write_text("other")
    os.rename(table.source / "d2", table.source / "d")
    added, removed, changed = _native.scan(ROOT)
    assert (added, removed, changed) == (2, 2, 2)  # a, and the directory itself
    after = names()
    check_against(table.source, ROOT)
    assert after[b"a"] == inodes[b"a"]
    assert after[b"c"] == inodes[b"c"]
    assert after[b"d"] not in inodes.values()
    assert _native.is_dead(inodes[b"b"])
    assert _native.is_dead(inodes[b"d"])
    stale = settle()
    assert stale[ROOT] == (False, set())
    assert stale[inodes[b"a"]][0] is False
    assert stale[inodes[b"b"]] == (True, {(ROOT, b"b")})
    assert stale[inodes[b"d"]] == (True, {(ROOT, b"d")})
    assert stale[after[b"d"]] == (True, {(ROOT, b"d")})
    assert stale[after[b"new"]] == (True, {(ROOT, b"new")})
    assert inodes[b"c"] not in stale


def test_access_time_alone_is_no_change(table: Table) -> None:
    (table.source / "a").touch()
    _native.scan(ROOT)
    settle()
    status = os.stat(table.source / "a")
    before = status.st_ctime_ns
    os.utime(table.source / "a", ns=(1, status.st_mtime_ns))
    assert (
        os.stat(table.source / "a").st_ctime_ns != before
    )  # utime changes ctime: a version change
    assert _native.scan(ROOT)[2] == 1


def test_mode_change_is_seen_by_refresh(table: Table) -> None:
    (table.source / "a").touch()
    _native.scan(ROOT)
    ino = names()[b"a"]
    assert _native.refresh(ino) == 0
    (table.source / "a").chmod(0o600)
    assert _native.refresh(ino) == 2  # ctime is in the version
    assert stat.S_IMODE(_native.attributes(ino)[0]) == 0o600
    (table.source / "a").unlink()
    assert _native.refresh(ino) == 3
    assert _native.is_dead(ino)
    with pytest.raises(OSError, match="Stale"):
        _native.open(ino, os.O_RDONLY)


def test_odd_names(table: Table) -> None:
    odd = [bytes([byte]) * 3 for byte in range(1, 256) if byte != ord("/")]
    odd += [b"n" * 255, "ü".encode() * 127, b" ", b"\n", b"-rf", b"\xff\xfe"]
    for name in odd:
        with open(os.path.join(os.fsencode(table.source), name), "wb"):
            pass
    _native.scan(ROOT)
    assert sorted(names()) == sorted(odd)
    for name, ino in names().items():
        assert _native.path(ino) == name
        os.close(_native.open(ino, os.O_RDONLY))


def test_add_finds_one_name_without_listing(table: Table) -> None:
    (table.source / "a").write_text("1")
    ino = _native.add(ROOT, b"a")
    assert ino == 2
    assert _native.add(ROOT, b"a") == ino
    assert _native.lookup(ROOT, b"a") == ino
    assert _native.lookup(ROOT, b"b") == -1
    (table.source / "b").write_text("2")
    os.rename(table.source / "b", table.source / "a")
    other = _native.add(ROOT, b"a")
    assert other != ino
    assert _native.is_dead(ino)
    with pytest.raises(FileNotFoundError):
        _native.add(ROOT, b"none")
    for bad in (b"", b".", b"..", b"a/b", b"a\0b"):
        with pytest.raises(OSError, match="Invalid"):
            _native.add(ROOT, bad)
    with pytest.raises(OSError, match="too long"):
        _native.add(ROOT, b"n" * 256)
    with pytest.raises(NotADirectoryError):
        _native.add(other, b"x")


def test_hard_links_share_one_inode(table: Table) -> None:
    (table.source / "sub").mkdir()
    (table.source / "a").write_text("data")
    os.link(table.source / "a", table.source / "b")
    os.link(table.source / "a", table.source / "sub" / "c")
    _native.scan(ROOT)
    found = names()
    assert found[b"a"] == found[b"b"]
    _native.scan(found[b"sub"])
    assert names(found[b"sub"])[b"c"] == found[b"a"]
    assert _native.attributes(found[b"a"])[1] == 3
    settle()
    # the name it was first seen under goes: the others lead to it still
    ino = found[b"a"]
    first = _native.path(ino)
    (table.source / os.fsdecode(first)).unlink()
    _native.scan(ROOT)
    assert first not in names()
    assert not _native.is_dead(ino)
    assert _native.path(ino) != first
    fd = _native.open(ino, os.O_RDONLY)
    assert os.read(fd, 9) == b"data"
    os.close(fd)
    stale = settle()
    assert stale[ino][0] is True
    assert (ROOT, first) in stale[ino][1]
    assert _native.refresh(ino) in (0, 1, 2)
    # and after a restart
    table.again()
    assert not _native.is_dead(ino)
    for left in ("a", "b", "sub/c"):
        (table.source / left).unlink(missing_ok=True)
    assert _native.refresh(ino) == 3
    assert _native.is_dead(ino)


def test_a_reused_origin_inode_is_no_hard_link(table: Table) -> None:
    (table.source / "a").write_text("1")
    os.link(table.source / "a", table.source / "b")
    _native.scan(ROOT)
    ino = names()[b"a"]
    os.utime(table.source / "a", ns=(0, 0))  # as if another file had got the number
    os.link(table.source / "a", table.source / "c")
    assert _native.add(ROOT, b"c") == ino  # looked again: it is the same file after all
    assert _native.version(ino)[2] == 0


def test_a_link_made_later_keeps_the_inode(table: Table) -> None:
    (table.source / "a").write_text("1")
    _native.scan(ROOT)
    ino = names()[b"a"]
    os.link(table.source / "a", table.source / "b")
    _native.refresh(ino)
    _native.scan(ROOT)
    assert names()[b"b"] == ino


def test_deep_paths_beyond_path_max(table: Table) -> None:
    name = b"d" * 200
    fd = os.open(table.source, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(40):  # 8 KB of path
        os.mkdir(name, dir_fd=fd)
        deeper = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(os.open(b"leaf", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.symlink(b"target", b"sym", dir_fd=fd)
    os.close(fd)
    ino = ROOT
    for _ in range(40):
        _native.scan(ino)
        ino = names(ino)[name]
    _native.scan(ino)
    leaf = names(ino)[b"leaf"]
    assert len(_native.path(leaf)) == 40 * 201 + 4
    os.close(_native.open(leaf, os.O_RDONLY))
    assert _native.refresh(leaf) == 0
    assert _native.readlink(names(ino)[b"sym"]) == b"target"
    assert _native.directories(0, 100) == sorted(_native.directories(0, 100))
    assert len(_native.directories(0, 100)) == 41
    assert _native.directories(0, 3) == _native.directories(0, 100)[:3]


def test_a_swapped_in_symlink_is_not_followed(table: Table, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("no")
    (outside / "sub").mkdir()
    (table.source / "dir").mkdir()
    (table.source / "dir" / "secret").write_text("yes")
    (table.source / "file").write_text("yes")
    _native.scan(ROOT)
    directory, file = names()[b"dir"], names()[b"file"]
    _native.scan(directory)
    secret = names(directory)[b"secret"]
    os.rename(table.source / "dir", table.source / "old")
    (table.source / "dir").symlink_to(outside)
    (table.source / "file").unlink()
    (table.source / "file").symlink_to(outside / "secret")
    for ino in (secret, file):
        with pytest.raises(OSError, match="Stale"):
            _native.open(ino, os.O_RDONLY)
    with pytest.raises(NotADirectoryError):
        _native.scan(directory)
    with pytest.raises(NotADirectoryError):
        _native.add(directory, b"sub")
    assert _native.refresh(secret) == 3


def test_another_directory_under_the_path_is_refused(table: Table) -> None:
    (table.source / "dir").mkdir()
    (table.source / "dir" / "a").touch()
    _native.scan(ROOT)
    directory = names()[b"dir"]
    _native.scan(directory)
    os.rename(table.source / "dir", table.source / "old")
    (table.source / "dir").mkdir()
    (table.source / "dir" / "b").touch()
    with pytest.raises(OSError, match="Stale"):
        _native.scan(directory)
    with pytest.raises(OSError, match="Stale"):
        _native.add(directory, b"b")
    _native.scan(ROOT)
    assert _native.is_dead(directory)
    assert _native.directories(0, 10) == [ROOT]
    assert _native.lookup(directory, b"never") == -1


def test_tick_reports_progress_and_aborts(table: Table) -> None:
    make_files(table, (str(number) for number in range(5000)))
    ticks = []
    _native.scan(ROOT, lambda: ticks.append(1))
    assert len(ticks) >= 2

    def abort() -> None:
        raise InterruptedError("enough")

    table2 = Table(table.source)
    with pytest.raises(InterruptedError, match="enough"):
        _native.scan(ROOT, tick=abort)
    assert not _native.is_listed(ROOT)
    assert _native.lookup(ROOT, b"none") == -1
    _native.scan(ROOT)
    assert len(names(at_once=1000)) == 5000
    table2.close()


def scan_and_be_overtaken(
    table: Table, overtake: Callable[[], None], is_forced: bool = False
) -> tuple[int, int, int]:
    """A second scan of 5,000 files, in the middle of which that is done, once; what it returns."""
    make_files(table, (str(number) for number in range(5000)))
    _native.scan(ROOT)
    to_do = [overtake]

    def tick() -> None:
        if to_do:
            to_do.pop()()

    found = _native.scan(ROOT, tick, is_forced)
    assert not to_do
    return found


def test_the_later_of_two_overlapping_scans_has_the_word(table: Table) -> None:
    def overtake() -> None:
        (table.source / "17").unlink()
        (table.source / "fresh").touch()
        _native.scan(ROOT)
        assert _native.lookup(ROOT, b"17") == 0

    scan_and_be_overtaken(table, overtake)
    found = names(at_once=1000)
    assert b"17" not in found
    assert _native.lookup(ROOT, b"fresh") > 0
    assert len(found) == 5000


@pytest.mark.parametrize("is_forced", [True, False])
def test_a_forced_scan_that_was_overtaken_looks_again(table: Table, is_forced: bool) -> None:
    """What overtook it may have seen what attribute caches had: here, what there was before."""

    def overtake() -> None:
        _native.scan(ROOT)
        (table.source / "17").unlink()

    added, removed, _ = scan_and_be_overtaken(table, overtake, is_forced)
    assert (added, removed) == (0, int(is_forced))
    assert (b"17" in names(at_once=1000)) != is_forced


def test_entries_without_attributes_are_listed(tmp_path: Path) -> None:
    """A directory that may be read but not searched, seen by an ordinary user (a child)."""
    source = tmp_path / "source"
    (source / "dir").mkdir(parents=True)
    (source / "dir" / "file").touch()
    (source / "dir" / "sub").mkdir()
    (source / "dir").chmod(0o644)
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and not above.stat().st_mode & 1:
            above.chmod(above.stat().st_mode | 0o011)
    source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    table_fd = os.memfd_create("table")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            _native.attach(table_fd, source_fd, True)
            _native.scan(ROOT)
            directory = names()[b"dir"]
            assert _native.scan(directory)[0] == 0
            inside = _native.children(directory, 0, 10)
            assert sorted(name for name, _, _ in inside) == [b"file", b"sub"]
            for name, ino, _ in inside:
                mode, nlink = _native.attributes(ino)[:2]
                assert nlink == 0
                assert mode == (stat.S_IFREG if name == b"file" else stat.S_IFDIR)
                assert _native.lookup(directory, name) == -1
                try:
                    _native.add(directory, name)
                except PermissionError:
                    continue
                raise AssertionError(name)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    (source / "dir").chmod(0o755)  # what was refused may be allowed later
    _native.attach(table_fd, source_fd, True)
    directory = names()[b"dir"]
    _native.scan(directory)
    check_against(source / "dir", directory)
    os.close(source_fd)
    os.close(table_fd)


def test_a_hard_link_that_was_refused_for_a_while(tmp_path: Path) -> None:
    """Both names lose their attributes and get them back: the second scan after that is quiet."""
    source = tmp_path / "source"
    for directory in ("one", "two"):
        (source / directory).mkdir(parents=True)
    (source / "one" / "name").write_text("data")
    os.link(source / "one" / "name", source / "two" / "alias")
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == 0 and not above.stat().st_mode & 1:
            above.chmod(above.stat().st_mode | 0o011)
    source_fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    table_fd = os.memfd_create("table")
    _native.attach(table_fd, source_fd, True)
    _native.scan(ROOT)
    one, two = names()[b"one"], names()[b"two"]

    def scan_both() -> int:
        return sum(sum(_native.scan(directory)) for directory in (one, two))

    scan_both()
    (source / "two").chmod(0o644)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            scan_both()
            assert _native.lookup(two, b"alias") == -1
            assert _native.lookup(one, b"name") > 0
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    (source / "two").chmod(0o755)
    _native.attach(table_fd, source_fd, True)
    scan_both()
    assert _native.lookup(two, b"alias") == _native.lookup(one, b"name")
    assert scan_both() == 0
    os.close(source_fd)
    os.close(table_fd)


_CROWD = """
import os, sys, threading, time
from fusecache import _native
from fusecache.base.errors import UnknownInode

source = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
_native.attach(os.memfd_create("table"), source, True)
_native.scan(1)
stop = time.monotonic() + 0.7

def often(call):
    def loop():
        while time.monotonic() < stop:
            call()
    return threading.Thread(target=loop)

threads = [often(call) for call in (
    _native.memory_bytes,
    lambda: _native.scan(1, lambda: None),
    lambda: _native.scan(1),
    lambda: _native.children(1, 0, 100),
    lambda: _native.attributes(2),
    lambda: _native.path(3),
    lambda: _native.mark_stale(4),
    lambda: [_native.settled(ino) for ino, _, _ in _native.take_stale(8)],
)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_table_lock_and_interpreter_lock_make_no_circle(table: Table) -> None:
    """A reader of the table that waits for the GIL, a waiting writer, and a reader that has the
    GIL must not wait for each other. (In a process of its own: it would hang for ever.)"""
    for number in range(500):
        (table.source / str(number)).touch()
    subprocess.run([sys.executable, "-c", _CROWD, table.source], check=True, timeout=60)


def test_times_that_64_bits_of_nanoseconds_cannot_hold(table: Table) -> None:
    (table.source / "far").touch()
    os.utime(table.source / "far", (10_000_000_000, 10_000_000_000))  # the year 2286
    _native.scan(ROOT)
    ino = names()[b"far"]
    if (table.source / "far").stat().st_mtime_ns >= 1 << 63:  # this file system can say so
        assert _native.attributes(ino)[7:9] == ((1 << 63) - 1, (1 << 63) - 1)
    fd = _native.open(ino, os.O_RDONLY)
    assert _native.version_of_fd(fd)[:4] == _native.version(ino)
    os.close(fd)
    assert _native.scan(ROOT) == (0, 0, 0)


def test_open_waits_for_a_lease_to_be_given_up(table: Table) -> None:
    (table.source / "leased").write_text("data")
    _native.scan(ROOT)
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGIO})
        fd = os.open(table.source / "leased", os.O_RDWR)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        os.write(told, b".")
        signal.sigwait({signal.SIGIO})
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os._exit(0)
    os.read(ready, 1)
    used = time.process_time()
    fd = _native.open(names()[b"leased"], os.O_RDONLY | os.O_NONBLOCK)
    assert os.read(fd, 9) == b"data"
    assert time.process_time() - used < 0.5
    assert os.waitpid(pid, 0)[1] == 0
    for each in (fd, ready, told):
        os.close(each)


def test_a_name_that_is_too_long_is_asked_for_at_the_origin(table: Table) -> None:
    _native.scan(ROOT)
    assert _native.lookup(ROOT, b"n" * 255) == 0
    assert _native.lookup(ROOT, b"n" * 256) == -1  # so that add() gives the errno
    with pytest.raises(OSError, match="too long"):
        _native.add(ROOT, b"n" * 256)


def test_memory_a_file(table: Table) -> None:
    make_files(table, (f"n01440764_{number:09d}" for number in range(20_000)))
    before = _native.memory_bytes()
    _native.scan(ROOT)
    assert (_native.memory_bytes() - before) / 20_000 <= 150


def test_a_table_of_another_mode_or_layout_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="another"):
        _native.attach(table.table_fd, table.source_fd, False)
    os.pwrite(table.table_fd, b"\xff", 8)
    with pytest.raises(ValueError, match="another"):
        table.again()


# ---- staleness -----------------------------------------------------------------------------------


def test_flagged_again_while_in_flight(table: Table) -> None:
    (table.source / "a").touch()
    _native.scan(ROOT)
    settle()
    ino = names()[b"a"]
    _native.mark_stale(ino)
    assert _native.take_stale(10) == [(ino, False, [(ROOT, b"a")])]
    assert _native.take_stale(10) == []
    _native.mark_stale(ino)
    assert _native.take_stale(10) == []  # the one in flight comes first
    _native.settled(ino)
    assert [taken[0] for taken in _native.take_stale(10)] == [ino]
    _native.settled(ino)
    assert _native.take_stale(10) == []
    _native.mark_stale(2**40)  # unknown: nothing


def test_staleness_survives_the_server(table: Table) -> None:
    for name in ("a", "b", "c"):
        (table.source / name).write_text(name)
    _native.scan(ROOT)
    settle()
    inodes = names()
    (table.source / "a").write_text("changed")
    (table.source / "b").unlink()
    (table.source / "n").touch()
    _native.scan(ROOT)
    taken = {item[0] for item in _native.take_stale(2)}  # in flight, and never settled
    table.again()
    stale = settle()
    assert taken <= set(stale)
    assert set(stale) == {ROOT, inodes[b"a"], inodes[b"b"], names()[b"n"]}
    assert stale[inodes[b"b"]] == (True, {(ROOT, b"b")})
    table.again()
    assert settle() == {}


def test_event_descriptor_tells_of_staleness(table: Table) -> None:
    (table.source / "a").touch()
    _native.scan(ROOT)
    settle()
    fd = _native.event_fd()
    if select.select([fd], [], [], 0)[0]:
        os.read(fd, 8)
    assert not select.select([fd], [], [], 0)[0]
    _native.mark_stale(names()[b"a"])
    assert select.select([fd], [], [], 5)[0]
    settle()


def test_push_needs_the_version_and_a_settled_inode(table: Table) -> None:
    (table.source / "a").write_text("abc")
    _native.scan(ROOT)
    settle()
    ino = names()[b"a"]
    version = _native.version(ino)
    other = (version[0], version[1], version[2] + 1, version[3])
    null = os.open("/dev/null", os.O_WRONLY)
    assert _native.push(null, ino, other, 0, b"abc") == 0
    assert _native.push(null, ino, version, 0, b"abcdef") == 3  # clipped
    assert _native.push(null, ino, version, 3, b"d") == 0
    assert _native.ram_bytes() == 3
    _native.mark_stale(ino)
    assert _native.push(null, ino, version, 0, b"abc") == 0
    settle()
    assert _native.push(null, ino, version, 1, memoryview(b"bc")) == 2
    os.close(null)


# ---- servers that die ----------------------------------------------------------------------------

SCANNER = """
import os, sys
from fusecache import _native
from fusecache.base.errors import UnknownInode
_native.attach(int(sys.argv[1]), int(sys.argv[2]), True)
print("attached", flush=True)
while True:
    _native.scan(1)
"""


def test_resume_in_another_process(table: Table) -> None:
    (table.source / "sub").mkdir()
    for number in range(500):
        (table.source / "sub" / str(number)).touch()
    _native.scan(ROOT)
    sub = names()[b"sub"]
    _native.scan(sub)
    before = names(sub)
    code = (
        "import sys\nfrom fusecache import _native as n\n"
        "print(n.attach(int(sys.argv[1]), int(sys.argv[2]), True))\n"
        f"print(len(n.children({sub}, 0, 1000)), n.lookup({sub}, b'77'))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(table.table_fd), str(table.source_fd)],
        pass_fds=[table.table_fd, table.source_fd],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert said == [str(_native.count()), "500", str(before[b"77"])]
    table.again()
    assert names(sub) == before
    assert _native.is_listed(sub)


def test_kill_9_during_scans(table: Table) -> None:
    """The source changes all the while; after each death the table is whole and numbers stay."""
    known: dict[bytes, int] = {}
    step = 0
    for round_number in range(8):
        for number in range(step, step + 200):
            (table.source / f"file {number}").write_bytes(b"x" * (number % 50))
        for number in range(max(0, step - 150), step, 3):
            (table.source / f"file {number}").unlink(missing_ok=True)
        step += 200
        server = subprocess.Popen(
            [sys.executable, "-c", SCANNER, str(table.table_fd), str(table.source_fd)],
            pass_fds=[table.table_fd, table.source_fd],
            stdout=subprocess.PIPE,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"attached\n"
        end = time.monotonic() + 0.006 * round_number
        number = 0
        while time.monotonic() < end:  # work for it to be killed in
            os.utime(table.source / f"file {step - 1 - number % 100}", ns=(0, number))
            number += 1
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        server.stdout.close()
        table.again()
        for name, ino, _ in _native.children(ROOT, 0, 65536):
            assert _native.path(ino) == name
            assert _native.attributes(ino)[1] == 1
            assert known.get(name, ino) == ino or _native.is_dead(known[name])
        _native.scan(ROOT)
        check_against(table.source, ROOT)
        known = names()


def test_an_update_cut_off_is_finished(table: Table) -> None:
    """The redo slot: what a server leaves that dies between arming it and the last byte."""
    (table.source / "a").write_text("one")
    _native.scan(ROOT)
    ino = names()[b"a"]
    before = _native.attributes(ino)
    (table.source / "a").write_text("longer")
    _native.refresh(ino)
    after = _native.attributes(ino)
    header = os.pread(table.table_fd, 4096, 0)
    node_at = 4096 + 96 * ino
    image = os.pread(table.table_fd, 96, node_at)
    redo_at = header.index(image)  # the last update is in the slot still
    torn = image[:40] + b"\xaa" * 20 + image[60:]
    os.pwrite(table.table_fd, torn, node_at)
    os.pwrite(table.table_fd, ino.to_bytes(4, "little"), redo_at - 8)  # armed
    table.again()
    assert before != after
    assert _native.attributes(ino) == after


def test_errors_of_the_origin_pass(table: Table) -> None:
    (table.source / "dir").mkdir()
    _native.scan(ROOT)
    directory = names()[b"dir"]
    (table.source / "dir").rmdir()
    with pytest.raises(FileNotFoundError):
        _native.scan(directory)


def test_a_stale_source_says_nothing_of_its_names(place: Place, faulty: FaultyOrigin) -> None:
    """An NFS server that has forgotten the export: ESTALE from everything buries nothing."""
    place.write("directory/file", b"content")
    table = Table(faulty.mountpoint)
    directory = _native.add(ROOT, b"directory")
    ino = _native.add(directory, b"file")
    faulty.add(Fault("*", error="ESTALE"))
    for known in (ino, directory):
        assert errno_of(_native.refresh, known) == "ESTALE"
        assert not _native.is_dead(known)
    faulty.clear()
    faulty.add(Fault("lookup", "directory/file", error="ESTALE"))
    assert _native.refresh(ino) == 3
    table.close()
