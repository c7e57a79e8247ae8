"""Which pages of a file the kernel holds (mincore), and holding them there (mlock).

A host that pages out what it believes cold (DAMON) may take pages at any moment. A test that counts
READs first asserts that the pages are there, and then locks them until it has read.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.support.mounted import drop_file

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.mlock.argtypes = _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
STAGED_MOST = 20
_FAILED = ctypes.c_void_p(-1).value


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the whole file. Reads nothing; opens the file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            yield 0, 0
            return
        address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), "mmap", str(path))
    try:
        yield address, size
    finally:
        _libc.munmap(address, size)


def _are_there(path: Path) -> list[bool]:
    """Which of the file's pages are in the page cache. It brings none in."""
    with _mapped(path) as (address, size):
        states = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
        if size and _libc.mincore(address, size, states):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        return [bool(state & 1) for state in states.raw[: -(-size // mmap.PAGESIZE)]]


def missing_pages(path: Path) -> int:
    """How many of the file's pages are not in the page cache."""
    return _are_there(path).count(False)


def is_in_memory(path: Path) -> bool:
    """Whether the file's first page is in the page cache."""
    return _are_there(path)[0]


@contextlib.contextmanager
def locked(paths: Iterable[Path]) -> Iterator[None]:
    """Brings all pages of these files, and nobody takes them meanwhile. Opens the files."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            address, size = stack.enter_context(_mapped(path))
            if size and _libc.mlock(address, size):
                raise OSError(ctypes.get_errno(), "mlock", str(path))
        yield


@contextlib.contextmanager
def held(paths: Iterable[Path], stage: Callable[[], object]) -> Iterator[None]:
    """All pages of these files are there, as `stage` left them, and nobody takes them meanwhile.

    It may be called again: what the host has just taken is staged anew, what never is is missing.
    """
    paths = list(paths)
    for _ in range(STAGED_MOST):
        missing = {str(path): pages for path in paths if (pages := missing_pages(path))}
        if not missing:
            break
        for path in missing:  # staging goes by the first page: it is to see that some are gone
            drop_file(path)
        stage()
    assert not missing, missing
    with locked(paths):
        yield


def read_without_requests(
    paths: Iterable[Path],
    read: Callable[[Path], object],
    requests: Callable[[], int],
    stage: Callable[[], object],
) -> None:
    """All pages of these files are there (see `held`), and `read` of each asks for nothing."""
    paths = list(paths)
    with held(paths, stage):
        before = requests()
        for path in paths:
            read(path)
        assert requests() == before
