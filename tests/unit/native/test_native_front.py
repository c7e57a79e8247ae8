"""The front on a real mount: no request may stay without an answer, or get an odd one.

Both open modes must say the same. What a tree looks like and what reads deliver is in tests/mount.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import struct
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place
from tests.support.mounted import Mount, errno_of

FS_IOC_GETFLAGS = 0x80086601
FALLOC_FL_KEEP_SIZE_PUNCH_HOLE = 3
RENAME_EXCHANGE = 2
AT_FDCWD = -100
AT_STATX_FORCE_SYNC = 0x2000
STATX_EVERYTHING = 0xFFF
SIZE = 300_000

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> str:
    """The errno of a C function that Python does not offer; "" when it succeeds."""
    ctypes.set_errno(0)
    return "" if getattr(_libc, name)(*arguments) >= 0 else errno.errorcode[ctypes.get_errno()]


@pytest.fixture
def mount(place: Place, mounting: Mounting) -> Mount:
    place.write("file", os.urandom(SIZE))
    place.write("n" * 255, b"longest")
    place.write("directory/file", b"")
    return mounting()


def test_names_longer_than_any_file_system_takes(mount: Mount) -> None:
    assert (mount.path / ("n" * 255)).read_bytes() == b"longest"
    assert errno_of(os.stat, mount.path / ("m" * 255)) == "ENOENT"
    for length in (256, 1024, 1025, 4000):
        assert errno_of(os.stat, mount.path / ("n" * length)) == "ENAMETOOLONG"
    os.listdir(mount.path)  # and when all names are known
    for length in (256, 1024, 1025, 4000):
        assert errno_of(os.stat, mount.path / ("n" * length)) == "ENAMETOOLONG"


def test_every_rare_request_is_answered(mount: Mount, tmp_path: Path) -> None:
    path = os.fsencode(mount.path / "file")
    file = os.open(path, os.O_RDONLY)
    directory = os.open(mount.path, os.O_RDONLY | os.O_DIRECTORY)
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    buffer = ctypes.create_string_buffer(256)
    lock = struct.pack("hhlli", fcntl.F_RDLCK, 0, 0, 0, 0)
    try:
        for fd in (file, directory):
            assert errno_of(fcntl.ioctl, fd, termios.TCGETS, bytes(60)) == "ENOTTY"
            assert errno_of(fcntl.ioctl, fd, FS_IOC_GETFLAGS, bytes(8)) == "ENOTTY"
            assert errno_of(os.fsync, fd) == ""
            assert call("syncfs", fd) == ""
        for flags in (0, AT_STATX_FORCE_SYNC):
            assert call("statx", AT_FDCWD, path, flags, STATX_EVERYTHING, buffer) == ""
        assert os.lseek(file, 0, os.SEEK_DATA) == 0
        assert os.lseek(file, 0, os.SEEK_HOLE) == SIZE
        assert errno_of(os.lseek, file, 1 << 40, os.SEEK_DATA) == "ENXIO"
        poll = select.poll()
        poll.register(file, select.POLLIN)
        assert poll.poll(0) == [(file, select.POLLIN)]
        assert os.access(path, os.R_OK)
        assert not os.access(path, os.W_OK)
        fcntl.fcntl(file, fcntl.F_GETLK, lock)
        fcntl.fcntl(file, fcntl.F_SETLK, lock)
        fcntl.flock(file, fcntl.LOCK_SH)
        assert errno_of(os.copy_file_range, file, other, 1000, 0, 0) in ("", "EXDEV")
        assert os.sendfile(other, file, 0, 1000) == 1000
        assert errno_of(os.posix_fallocate, file, 0, 10) == "EBADF"
        assert call("fallocate", file, FALLOC_FL_KEEP_SIZE_PUNCH_HOLE, 0, 10) == "EBADF"
        new = (directory, b"file", directory, b"new")
        assert call("renameat2", *new, RENAME_EXCHANGE) == "EROFS"
        assert errno_of(os.open, mount.path, os.O_TMPFILE | os.O_RDWR) == "EROFS"
        for offset in (SIZE, 1 << 40, (1 << 63) - 8192):
            assert os.pread(file, 4096, offset) == b""
    finally:
        for fd in (file, directory, other):
            os.close(fd)


def test_terminal_questions_from_many_threads(mount: Mount) -> None:
    """Each open() of Python asks TCGETS; reads and look-ups go on beside."""
    expected = (mount.source / "file").read_bytes()
    failed: list[BaseException] = []

    def often(action: Callable[[], object]) -> None:
        try:
            for _ in range(100):
                action()
        except BaseException as error:
            failed.append(error)

    def read() -> None:
        with open(mount.path / "file", "rb") as file:
            assert not file.isatty()
            assert file.read() == expected
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def look_up() -> None:
        assert errno_of(os.stat, mount.path / "directory" / os.urandom(4).hex()) == "ENOENT"

    threads = [threading.Thread(target=often, args=(each,)) for each in [read, look_up] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
