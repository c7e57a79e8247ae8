"""Saved tables: a file for each source, in `tables/` at home (docs/FORMAT.md, "Saved tables").

What they hold is the caller's business (native/table/saved.c). A file that is not ours, or that
others may write to, is not used.
INVARIANT: a file has its name only when it is complete: it is written under another, fsynced, and
renamed. One process at a time writes it, and holds its flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Final

from fusecache.base import trust

_FOLDER: Final = "tables"
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Unfinished:
    """A table that is being written, to `fd`. `finish` or `abandon` it."""

    def __init__(self, fd: int, path: Path) -> None:
        """`path`: its name, once it is finished. Has the flock."""
        self.fd = fd
        self._path = path

    def finish(self, size_bytes: int) -> None:
        """It is so long, and takes the place of the one before. OSError; `abandon` it then."""
        os.ftruncate(self.fd, size_bytes)
        os.fsync(self.fd)
        _temporary(self._path).replace(self._path)
        os.close(self.fd)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(_temporary(self._path))
        os.close(self.fd)


class Tables:
    """Those of one cache."""

    def __init__(self, home: Path) -> None:
        self._path = home.absolute() / _FOLDER

    def size_bytes(self) -> int:
        """What all of them take on the disk, unfinished ones too; 0: it does not say."""
        return sum(status.st_blocks * 512 for _, status in files_in(self._path))

    def open(self, dataset: bytes) -> int:
        """A descriptor of that dataset's. FileNotFoundError; Untrusted: not ours; OSError."""
        check_folder(self._path)
        path = self._path / dataset.hex()
        return checked(os.open(path, _READ), path)

    def begin(self, dataset: bytes, size_bytes: int) -> Unfinished | None:
        """With room for so many bytes. None: another process writes it. Untrusted, OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._path, 0o700)
        check_folder(self._path)
        path = self._path / dataset.hex()
        fd = checked(os.open(_temporary(path), _WRITE, 0o600), _temporary(path))
        unfinished = Unfinished(fd, path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            now, named = os.fstat(fd), os.lstat(_temporary(path))
            if (now.st_dev, now.st_ino) != (named.st_dev, named.st_ino):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # or has written it just now
            os.close(fd)
            return None
        try:
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            unfinished.abandon()
            raise
        return unfinished

    def let_go(self, most_bytes: int, kept: bytes | None = None) -> None:
        """Delete those saved longest ago, all but the dataset's `kept`, until the others take no
        more than that. OSError.
        """
        others = [
            found for found in files_in(self._path) if kept is None or found[0][:32] != kept.hex()
        ]
        others.sort(key=lambda found: found[1].st_mtime_ns)
        taken = sum(status.st_blocks * 512 for _, status in others)
        for name, status in others:
            if taken <= most_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path / name)
            taken -= status.st_blocks * 512


def files_in(folder: Path) -> list[tuple[str, os.stat_result]]:
    """Names and what is known of them; none, where it cannot be said."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found.append((entry.name, entry.stat(follow_symlinks=False)))
    return found


def check_folder(path: Path) -> None:
    """Untrusted: not ours, or others may write to it; OSError."""
    fd = trust.open_directory(str(path))
    try:
        trust.check_private(os.fstat(fd), str(path))
    finally:
        os.close(fd)


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp")


def checked(fd: int, path: Path) -> int:
    """The same descriptor, of a file that is ours; else closed. Untrusted."""
    try:
        status = os.fstat(fd)
        trust.check_private(status, str(path))
        if not stat.S_ISREG(status.st_mode):
            raise trust.Untrusted(f"{path} is no file")
    except BaseException:
        os.close(fd)
        raise
    return fd
