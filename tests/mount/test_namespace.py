"""The namespace: what is listed, with which attributes and numbers; and it is read-only."""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place
from tests.support.mounted import Mount, errno_of, eventually
from tests.support.trees import (
    DIRECTORY,
    assert_same,
    make_everything,
    make_files,
    random_bytes,
    snapshot,
)

WIDE = 6000  # three scans of the origin, many a READDIRPLUS


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, zero_open: bool) -> Iterator[Mount]:
    """A mount of a tree with one of each; `source` has a file system mounted below it as well."""
    place = Place(tmp_path_factory.mktemp("everything"))
    make_everything(place.source)
    os.setxattr(place.source / "modes/644", "user.colour", b"red")
    (place.source / "wide").mkdir()
    wide = os.open(place.source / "wide", DIRECTORY)
    for index in range(WIDE):
        os.close(os.open(f"{index:07d}", os.O_CREAT | os.O_WRONLY, dir_fd=wide))
    os.close(wide)
    below = place.source / "below"
    below.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(below)], check=True)
    try:
        (below / "file").write_bytes(b"on another file system")
        with Mount(
            *(place.source, place.mountpoint, place.cache_dir, "--ssd", "256M"), zero_open=zero_open
        ) as mount:
            yield mount
    finally:
        subprocess.run(["umount", "-l", str(below)], check=True)


@pytest.mark.claim("N1", "N2", "N3", "N4", "N5", "N6", "N8", "A1", "A5")
def test_everything_is_shown_as_it_is(everything: Mount) -> None:
    assert_same(everything.source, everything.path)
    everything.drop_kernel_caches()
    assert_same(everything.source, everything.path)


@pytest.mark.claim("N2")
def test_many_readers_list_a_wide_directory(everything: Mount) -> None:
    expected = {f"{index:07d}" for index in range(WIDE)}
    everything.drop_kernel_caches()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        listings = list(pool.map(lambda _: os.listdir(everything.path / "wide"), range(8)))
    assert all(len(listing) == WIDE and set(listing) == expected for listing in listings)
    assert all(listing == listings[0] for listing in listings)
    raw = subprocess.run(
        ["ls", "-fa", everything.path / "kinds"], capture_output=True, text=True, check=True
    )
    names = raw.stdout.splitlines()
    assert names.count(".") == names.count("..") == 1


@pytest.mark.claim("N3")
def test_the_bottom_of_a_deep_tree_is_read(everything: Mount) -> None:
    deep = os.open(everything.path, DIRECTORY)
    for _ in range(22):
        below = os.open(b"d" * 200, DIRECTORY, dir_fd=deep)
        os.close(deep)
        deep = below
    with open(os.open("bottom", os.O_RDONLY, dir_fd=deep), "rb") as file:
        assert file.read() == b"down here"
    os.close(deep)


@pytest.mark.claim("N6", "X5")
def test_special_files_lead_nowhere(everything: Mount) -> None:
    kinds = everything.path / "kinds"
    for name in ("null", "block"):
        assert errno_of(os.open, kinds / name, os.O_RDONLY) == "EACCES"
    here = os.open(kinds, DIRECTORY)
    with socket.socket(socket.AF_UNIX) as client:
        assert errno_of(client.connect, f"/proc/self/fd/{here}/socket") == "ECONNREFUSED"
    os.close(here)
    source = os.open(everything.source / "kinds/fifo", os.O_RDONLY | os.O_NONBLOCK)
    try:
        # ENXIO: nobody reads the mount's own FIFO, whoever reads the origin's.
        assert errno_of(os.open, kinds / "fifo", os.O_WRONLY | os.O_NONBLOCK) == "ENXIO"
    finally:
        os.close(source)
    options = next(
        line
        for line in Path("/proc/self/mounts").read_text().splitlines()
        if str(kinds.parent) in line
    ).split()[3]
    assert {"ro", "nosuid", "nodev"} <= set(options.split(","))


@pytest.mark.claim("A5")
def test_holes_are_data(everything: Mount) -> None:
    with open(everything.path / "kinds/sparse", "rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 3 << 20
        file.seek(0)
        assert file.read() == (everything.source / "kinds/sparse").read_bytes()


@pytest.mark.claim("R3")
def test_beyond_four_gib(everything: Mount) -> None:
    with open(everything.path / "kinds/huge", "rb") as file:
        for offset in (0, (4 << 30) - 5, (5 << 30) + 12345 - 100):
            assert os.pread(file.fileno(), 200, offset)[:100] == random_bytes(offset, 100)
        assert os.pread(file.fileno(), 100, 3 << 30) == bytes(100)
        assert os.pread(file.fileno(), 100, (5 << 30) + 12345) == b""


WRITES: dict[str, Callable[[Path], object]] = {
    "create": lambda top: os.open(top / "new", os.O_CREAT | os.O_WRONLY),
    "create exclusively": lambda top: os.open(top / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR),
    "mkdir": lambda top: os.mkdir(top / "new"),
    "mknod": lambda top: os.mknod(top / "new", stat.S_IFREG | 0o600),
    "mkfifo": lambda top: os.mkfifo(top / "new"),
    "unlink": lambda top: os.unlink(top / "third"),
    "rmdir": lambda top: os.rmdir(top / "kinds/empty directory"),
    "rename": lambda top: os.rename(top / "third", top / "fourth"),
    "rename over": lambda top: os.rename(top / "third", top / "links/first"),
    "link": lambda top: os.link(top / "third", top / "fourth"),
    "symlink": lambda top: os.symlink("third", top / "fourth"),
    "truncate": lambda top: os.truncate(top / "third", 0),
    "chmod": lambda top: os.chmod(top / "third", 0o777),
    "chmod of a directory": lambda top: os.chmod(top / "links", 0o777),
    "chown": lambda top: os.chown(top / "third", 1, 1),
    "lchown": lambda top: os.lchown(top / "links/relative", 1, 1),
    "utime": lambda top: os.utime(top / "third"),
    "setxattr": lambda top: os.setxattr(top / "third", "user.a", b"b"),
    "removexattr": lambda top: os.removexattr(top / "third", "user.a"),
    "open for writing": lambda top: os.open(top / "third", os.O_WRONLY),
    "open for both": lambda top: os.open(top / "third", os.O_RDWR),
    "open for appending": lambda top: os.open(top / "third", os.O_WRONLY | os.O_APPEND),
    "O_TRUNC": lambda top: os.open(top / "third", os.O_RDONLY | os.O_TRUNC),
    "O_TMPFILE": lambda top: os.open(top, os.O_TMPFILE | os.O_RDWR),
}


@pytest.mark.claim("W1", "W2")
def test_every_write_gets_erofs(everything: Mount) -> None:
    before = snapshot(everything.source)
    results = {name: errno_of(write, everything.path) for name, write in WRITES.items()}
    assert results == dict.fromkeys(WRITES, "EROFS")
    with open(everything.path / "third", "rb") as file:
        with pytest.raises(PermissionError):
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)
        assert errno_of(os.ftruncate, file.fileno(), 0) in ("EINVAL", "EBADF", "EROFS")
    assert snapshot(everything.source) == before


def statx(path: Path, *flags: str) -> str:
    """Type, mode, links, owners, size, blocks, device number, times; of birth last."""
    shown = "%f %h %u %g %s %b %t:%T %y %z %w"
    done = subprocess.run(
        ["stat", "-c", shown, *flags, path], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.claim("A6", "A1")
def test_the_time_of_birth(place: Place, mounting: Mounting) -> None:
    place.write("d/file", b"one")
    (place.source / "d/link").symlink_to("file")
    os.mkfifo(place.source / "d/fifo")
    os.mknod(place.source / "d/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert statx(place.source / "d/file").split()[-1] != "-", "no such time here"
    mount = mounting("--revalidate", "1")
    names = ("", "d", "d/file", "d/link", "d/fifo", "d/null")

    def same(*flags: str) -> bool:
        for name in names:
            assert statx(mount.path / name, *flags) == statx(place.source / name), name
        return True

    held = os.open(mount.path / "d/file", os.O_RDONLY)
    opened = Path(f"/proc/{os.getpid()}/fd/{held}")
    try:
        same()  # before anything was listed
        for size in (5, 50):  # and after: by the sweep
            place.write("d/file", bytes(size))
            eventually(same)
            assert os.stat(mount.path / "d/file").st_size == size
            assert statx(opened, "-L") == statx(place.source / "d/file")
            same("--cached=never")
            os.listdir(mount.path / "d")
        (place.source / "d/new").write_bytes(b"another")
        (place.source / "d/new").rename(place.source / "d/file")
        eventually(same)
        mount.drop_kernel_caches()
        same()
        mount.kill_server()
        mount.drop_kernel_caches()
        same()
    finally:
        os.close(held)


LONG_LISTING = """
import errno, os, sys

for path in sys.argv[1:]:
    os.lstat(path)
    for ask in (lambda: os.listxattr(path, follow_symlinks=False),
                lambda: os.getxattr(path, "user.colour", follow_symlinks=False),
                lambda: os.getxattr(path, "security.capability", follow_symlinks=False),
                lambda: os.getxattr(path, "system.posix_acl_access", follow_symlinks=False)):
        try:
            assert not ask(), "there is none"
        except OSError as error:
            if error.errno not in (errno.ENOTSUP, errno.ENODATA):
                raise
    if os.path.islink(path):
        os.readlink(path)
"""


@pytest.mark.claim("U1")
def test_extended_attributes_are_not_shown_and_asked_for_once(everything: Mount) -> None:
    names = ("modes/644", "modes/400", "third", "links/relative", "wide")
    paths = [everything.path / name for name in ("", *names)]
    command = [sys.executable, "-c", LONG_LISTING, *map(str, paths)]
    server, keeper = everything.server_pid(), everything.keeper_pid

    def is_known() -> bool:
        subprocess.run(command, check=True, timeout=60)
        for pid in (keeper, server):  # what has to be asked for now waits
            os.kill(pid, signal.SIGSTOP)
        try:
            subprocess.run(command, check=True, timeout=20)
        except subprocess.TimeoutExpired:  # the kernel may have let go of something
            return False
        finally:
            for pid in (server, keeper):
                os.kill(pid, signal.SIGCONT)
        return True

    assert any(is_known() for _ in range(3))
    assert everything.server_pid() == server, "another one answered"
    assert errno_of(os.getxattr, paths[1], "user.colour") == "ENOTSUP"
    assert errno_of(os.listxattr, paths[0]) in ("", "ENOTSUP")


@pytest.mark.claim("U2")
def test_locks_stay_in_the_mount(everything: Mount) -> None:
    import fcntl

    with (
        open(everything.path / "third", "rb") as one,
        open(everything.path / "third", "rb") as two,
        open(everything.source / "third", "rb") as origin,
    ):
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(origin, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.claim("A2")
def test_access_times_follow_the_origin_only(place: Place, mounting: Mounting) -> None:
    path = place.write("file", b"content")
    os.utime(path, ns=(10**18, 10**18 + 5))
    mount = mounting("--revalidate", "never")
    assert (mount.path / "file").stat().st_atime_ns == 10**18
    assert (mount.path / "file").read_bytes() == b"content"
    eventually(lambda: mount.value("ssd", "blocks") == 1)
    os.utime(path, ns=(10**18, 10**18 + 5))
    mount.drop_kernel_caches()
    assert (mount.path / "file").read_bytes() == b"content"
    assert path.stat().st_atime_ns == 10**18


@pytest.mark.claim("N7", "K1", "K2")
def test_inode_numbers_outlive_the_server(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 120, lambda index: index * 10)
    os.link(place.source / "class000/00007.jpg", place.source / "class001/linked")
    mount = mounting("--revalidate", "1")
    held = os.open(mount.path / "class001", DIRECTORY)
    try:
        _, before = snapshot(mount.path)
        assert len(set(before.values())) == len(before) - 1
        mount.kill_server()
        mount.drop_kernel_caches()
        assert snapshot(mount.path)[1] == before
        mount.restart()
        assert snapshot(mount.path)[1] == before
        (place.source / "class000/00003.jpg").unlink()
        (place.source / "class000/new").write_bytes(b"new")
        eventually(lambda: (mount.path / "class000/new").exists())
        assert (mount.path / "class000/new").stat().st_ino not in before.values()
        mount.kill_server()
        mount.drop_kernel_caches()
        _, after = snapshot(mount.path)
        assert {path: number for path, number in after.items() if path in before} == {
            path: number for path, number in before.items() if not path.endswith(b"/00003.jpg")
        }
        assert len(os.listdir(held)) == 51
    finally:
        os.close(held)


def test_readdir_can_be_resumed_at_any_cookie(place: Place, mounting: Mounting) -> None:
    """telldir and seekdir, as a program with a small buffer uses them."""
    for index in range(300):
        place.write(f"{index}", b"")
    mount = mounting()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
    libc.telldir.restype = ctypes.c_long
    stream = ctypes.c_void_p(libc.opendir(os.fsencode(mount.path)))

    def following() -> bytes | None:
        entry = libc.readdir(stream)
        return None if entry is None else ctypes.string_at(entry + 19)

    order, cookies = [], []
    while (name := following()) is not None:
        order.append(name)
        cookies.append(libc.telldir(stream))
    assert len(order) == 302
    for position in (0, 1, 2, 150, 300):
        libc.seekdir(stream, ctypes.c_long(cookies[position]))
        assert following() == order[position + 1]
    libc.closedir(stream)
