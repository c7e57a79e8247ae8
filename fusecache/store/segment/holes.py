"""Holes in sealed segments: where files were evicted, one by one (docs/FORMAT.md)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from fusecache.store.segment import format as fmt
from fusecache.store.types import ALIGNMENT, Location

_KEEP_SIZE_PUNCH_HOLE: Final = 0x01 | 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate


def punch(path: Path, ranges: Iterable[tuple[int, int | None]]) -> int:
    """Give whole pages of bytes [begin, end) of a sealed segment back, None: up to its end; what it
    takes on the disk now. OSError: some may be punched, none will be restored.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        for begin, end in ranges:
            first, stop = fmt.align(begin), (size if end is None else end // ALIGNMENT * ALIGNMENT)
            if first < stop:
                _punch(fd, first, stop - first)
        return taken_bytes(fd)
    finally:
        os.close(fd)


def _punch(fd: int, offset: int, length: int) -> None:
    span = ctypes.c_int64(offset), ctypes.c_int64(length)
    while _fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, *span):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def can_punch(directory: Path) -> bool:
    """Does its file system do so, page by page, and say where a hole is? Tries it with a file that
    gets no name, or not for long.
    """
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"\1" * 2 * ALIGNMENT)
        file.flush()
        _punch(file.fileno(), 0, ALIGNMENT)
        return _hole_from(file.fileno(), 0) == 0 and data_from(file.fileno(), 0) == ALIGNMENT
    return False


def taken_bytes(fd: int) -> int:
    """What a sealed segment takes on its disk, a multiple of 4096: its length, unless it has holes.
    OSError.
    """
    status = os.fstat(fd)
    length, blocks = fmt.align(status.st_size), fmt.align(status.st_blocks * 512)
    if blocks >= length:
        return length
    hole = _hole_from(fd, 0)
    return length if hole is None or hole >= status.st_size else blocks


def is_punched(fd: int, location: Location) -> bool:
    """Is a part of the record a hole? Unless what it holds is sound all the same (some file systems
    keep no zeros), it was evicted.
    """
    _, offset, header_len, payload_len = location
    hole = _hole_from(fd, offset)
    end = min(offset + header_len + payload_len, os.fstat(fd).st_size)
    return hole is not None and hole < end


def data_from(fd: int, offset: int) -> int:
    """Where there is something again, from here on; the end of the file: nowhere."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(fd).st_size if error.errno == errno.ENXIO else offset


def _hole_from(fd: int, offset: int) -> int | None:
    """None: there is none that is known of, or the file ends before."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE)
    except OSError:
        return None
