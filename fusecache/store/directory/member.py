"""One of the directories of a cache: its files but the data (docs/FORMAT.md)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import time
from pathlib import Path
from typing import Final

from fusecache.base import digest
from fusecache.base.disk import cache_names
from fusecache.base.errors import UserError
from fusecache.store.directory.membership import Said
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import discard

READ_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_ERRORS_SECONDS: Final = 60.0  # a longer pause between two, and counting begins anew
_SEGMENT_NAME = re.compile(r"(\d{8,18})\.seg")
_FLOCK: Final = struct.Struct("@hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid


class Member:
    """One of the directories: opened, but not locked yet."""

    def __init__(self, path: Path, device: int | None = None) -> None:
        """Create what is missing in it. With `device`, one that holds no cache must be on that.

        UserError: of a newer version, not ours, or not a cache's; OSError: it cannot be used.
        """
        self.path = path
        self.segments = path / "segments"
        self.why_out = ""  # of service; empty: it is in service
        self.errors = 0  # of the disk, each soon after the one before
        self._error_at = 0.0
        self._told_bytes: int | None = None  # our limit, as the others know it
        try:
            others = {entry.name for entry in os.scandir(path)} - {"lost+found", "probe"}
        except FileNotFoundError:
            raise _missing("it does not exist (is its disk mounted?)") from None
        if device not in (None, path.stat().st_dev) and not others & {"format", "segments"}:
            raise _missing("no cache is there any more (is its disk mounted?)")
        if "format" in others and "segments" not in others:
            self.check_version()
        cache_names.check(str(path), claim=True)
        self._lock_fd = os.open(path / "lock", READ_WRITE, 0o600)
        status = path.stat()
        self.device = status.st_dev
        self._identity = (status.st_dev, status.st_ino)

    def check_readable(self) -> None:
        """OSError: what it says of itself is there, and cannot be read."""
        for name in ("format", "set", "high"):
            with contextlib.suppress(FileNotFoundError), (self.path / name).open("rb") as file:
                file.read(4096)

    def check_version(self) -> None:
        version = fmt.format_version_of(_read(self.path / "format"))
        if version is not None and version > fmt.FURTHER_VERSION:
            raise UserError(
                f"{self.path}: was written by a newer fusecache (format {version}; this one knows"
                f" {fmt.FURTHER_VERSION}): update fusecache, or use another --cache-dir"
            )

    def try_lock(self, operation: int) -> bool:
        """LOCK_SH, LOCK_EX or LOCK_UN; what is held already is changed."""
        try:
            fcntl.flock(self._lock_fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def least_limit(self, own_bytes: int) -> int:
        """Tell the others our limit, and hear the least of all: see `Directory.least_limit`."""
        fd, least_bytes = self._lock_fd, own_bytes
        with contextlib.suppress(OSError):  # a file system without such locks
            if self._told_bytes not in (None, own_bytes):
                told = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, self._told_bytes, 1, 0)
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, told)
            self._told_bytes = own_bytes
            own = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, own_bytes, 1, 0)
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, own)
            while least_bytes > 0:
                below = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, least_bytes, 0)
                found = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, below))
                if found[0] == fcntl.F_UNLCK or found[3] != 1:  # NFS: flock locks all bytes so
                    break
                least_bytes = found[2]
        return least_bytes

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1

    def is_there(self) -> bool:
        """Is the directory at this path still the one that was opened?"""
        try:
            status = self.path.stat()
            return (
                (status.st_dev, status.st_ino) == self._identity
                and self.segments.is_dir()
                and os.fstat(self._lock_fd).st_nlink > 0
            )
        except OSError:
            return False

    def said(self) -> Said:
        """What it is, by its files. UserError: of a newer version."""
        self.check_version()
        data = _read(self.path / "format")
        line = fmt.parse_set_line(_read(self.path / "set"))
        found = self.format()
        uuid = found[0] if found is not None else None
        if line is not None and line.uuid != uuid:
            line = None
        return Said(self.path, uuid, line, fmt.format_version_of(data) == fmt.FURTHER_VERSION)

    def format(self) -> tuple[bytes, str] | None:
        """uuid and digest algorithm; None: it holds no cache."""
        return fmt.parse_format_line(_read(self.path / "format")) or self._format_from_segments()

    def _format_from_segments(self) -> tuple[bytes, str] | None:
        names = {number: name for name, number in digest.ALGORITHMS.items()}
        for segno in self.segment_numbers():
            header = fmt.parse_segment_header(_read(self.segment_path(segno)))
            if header is not None and header.algorithm in names:
                return header.uuid, names[header.algorithm]
        return None

    def write_format(self, line: bytes, set_line: fmt.SetLine | None) -> None:
        if line != _read(self.path / "format"):
            _replace(self.path / "format", line)
        if set_line is not None:
            _replace(self.path / "set", fmt.pack_set_line(set_line))

    def empty(self) -> None:
        """Discard all that it holds of a cache, but for `high`: what was given out is known on.
        OSError.
        """
        for name in ("set", "format"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)
        for folder in (self.segments, self.path / "index"):
            for entry in list(os.scandir(folder)) if folder.is_dir() else []:
                if entry.name != "lock":
                    discard(Path(entry.path))

    def segment_path(self, segno: int) -> Path:
        return self.segments / f"{segno:08d}.seg"

    def segment_numbers(self) -> list[int]:
        return numbers(self.segments, _SEGMENT_NAME)

    def high(self) -> int | None:
        """The highest segment number given out; None: it does not say."""
        return fmt.parse_high(_read(self.path / "high"))

    def write_high(self, segno: int) -> None:
        """OSError."""
        fd = os.open(self.path / "high", READ_WRITE, 0o600)
        try:
            os.ftruncate(fd, 16)
            os.pwrite(fd, fmt.pack_high(segno), 0)
        finally:
            os.close(fd)

    def put_out(self, why: str) -> None:
        """Of service."""
        self.why_out = why

    def count_error(self) -> int:
        now = time.monotonic()
        self.errors = self.errors + 1 if now - self._error_at < _ERRORS_SECONDS else 1
        self._error_at = now
        return self.errors


def _missing(line: str) -> OSError:
    return FileNotFoundError(errno.ENOENT, line)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with open(os.open(temporary, READ_WRITE | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
    temporary.replace(path)


def _read(path: Path) -> bytes:
    """The first 4 KiB of a file; b"" when there is none, or none that can be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""
    finally:
        os.close(fd)


def numbers(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    """Of the files whose names are like that, in order."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    matches = (pattern.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match is not None)
