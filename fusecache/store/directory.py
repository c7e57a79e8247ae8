"""The cache directory apart from its data: names, locks, `format` and `high` (docs/FORMAT.md).

INVARIANT: `next_segno` never returns a number twice for one directory path, even when `high` or the
whole directory was lost in between (`floor` is what this process has seen).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import time
import uuid as uuids
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fusecache import digest
from fusecache.errors import UserError
from fusecache.store import format as fmt
from fusecache.store.segment import discard

# How far numbering jumps when nobody knows what was given out.
UNKNOWN_HIGH_STEP: Final = 1_000_000
FIRST_SEGNO_MOST = 1 << 30
_LOCK_SECONDS: Final = 2.0
_SEGMENT_NAME = re.compile(r"(\d{8,18})\.seg")
_INDEX_NAME = re.compile(r"(\d{8,18})\.db")


class Directory:
    """An opened cache directory; holds the shared lock until `close`."""

    def __init__(self, path: Path, algorithm_name: str) -> None:
        """Create what is missing. UserError: it cannot be used; OSError: the disk failed."""
        self.path = path
        self.segments = path / "segments"
        self.indices = path / "index"
        self._lock_fd = -1
        self._index_lock_fd = -1
        try:
            self._open(algorithm_name)
        except BaseException:
            self.close()
            raise

    def _open(self, algorithm_name: str) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = {entry.name for entry in os.scandir(self.path)} - {"lost+found", "probe"}
        if not others or "segments" in others:
            # Ours alone: nobody else may look in. A shared directory keeps its mode, ours below
            # it are private all the same.
            if self.path.stat().st_mode & 0o077:
                self.path.chmod(0o700)
        elif "format" in others:
            version = fmt.format_version_of(_read(self.path / "format"))
            if version is not None and version > fmt.FORMAT_VERSION:
                raise _newer(self.path, version)
        self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock_shared()
        self.segments.mkdir(mode=0o700, exist_ok=True)
        self.indices.mkdir(mode=0o700, exist_ok=True)
        self._index_lock_fd = os.open(
            self.indices / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        status = self.path.stat()
        self._identity = (status.st_dev, status.st_ino)
        with self.index_lock():
            self.uuid, name = self._load_format(algorithm_name)
        if name != algorithm_name:
            raise UserError(
                f"{self.path}: this cache directory uses the digest {name}, not {algorithm_name}:"
                f" use --digest {name}, or another --cache-dir"
            )
        self.algorithm = digest.ALGORITHMS[name]

    def _lock_shared(self) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self.path}: another process uses this cache directory exclusively:"
                        " wait for it, or use another --cache-dir"
                    ) from error
                time.sleep(0.05)

    def _load_format(self, algorithm_name: str) -> tuple[bytes, str]:
        line = _read(self.path / "format")
        version = fmt.format_version_of(line)
        if version is not None and version > fmt.FORMAT_VERSION:
            raise _newer(self.path, version)
        found = fmt.parse_format_line(line) or self._format_from_segments()
        if found is None:
            found = uuids.uuid4().bytes, algorithm_name
        wanted = fmt.pack_format_line(*found)
        if wanted != line:
            temporary = self.path / "format.tmp"
            temporary.write_bytes(wanted)
            temporary.chmod(0o600)
            temporary.replace(self.path / "format")
        return found

    def _format_from_segments(self) -> tuple[bytes, str] | None:
        names = {number: name for name, number in digest.ALGORITHMS.items()}
        for segno in self.segment_numbers():
            header = fmt.parse_segment_header(_read(self.segment_path(segno)))
            if header is not None and header.algorithm in names:
                return header.uuid, names[header.algorithm]
        return None

    def close(self) -> None:
        for fd in (self._lock_fd, self._index_lock_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._index_lock_fd = -1

    def is_present(self) -> bool:
        """Is the directory at this path still the one that was opened?"""
        try:
            status = self.path.stat()
            return (
                (status.st_dev, status.st_ino) == self._identity
                and self.segments.is_dir()
                and os.fstat(self._index_lock_fd).st_nlink > 0
                and os.fstat(self._lock_fd).st_nlink > 0
            )
        except OSError:
            return False

    # ---- index generations ----
    @contextlib.contextmanager
    def index_lock(self) -> Iterator[None]:
        """Exclusive: a generation is looked for or built."""
        fcntl.flock(self._index_lock_fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._index_lock_fd, fcntl.LOCK_UN)

    def try_share_index(self) -> bool:
        """Shared: a segment is created. False: a generation is being built. See `unshare_index`."""
        try:
            fcntl.flock(self._index_lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unshare_index(self) -> None:
        fcntl.flock(self._index_lock_fd, fcntl.LOCK_UN)

    def generation(self) -> int:
        """Number of the newest index, 0 when there is none."""
        return max(_numbers(self.indices, _INDEX_NAME), default=0)

    def index_path(self, generation: int) -> Path:
        return self.indices / f"{generation:08d}.db"

    def remove_indices(self, below: int) -> None:
        """Older generations, their WALs, and what a killed builder left."""
        for entry in list(os.scandir(self.indices)):
            number = re.match(r"(\d{8,18})\.", entry.name)
            old = number is not None and int(number[1]) < below
            if old or ".tmp" in entry.name:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    # ---- segments ----
    def segment_path(self, segno: int) -> Path:
        return self.segments / f"{segno:08d}.seg"

    def segment_numbers(self) -> list[int]:
        return _numbers(self.segments, _SEGMENT_NAME)

    def remove_unborn_segments(self) -> None:
        """Files of creators that were killed. Within the transaction that creation needs too."""
        for entry in list(os.scandir(self.segments)):
            if entry.name.endswith(".tmp"):
                with contextlib.suppress(OSError):
                    discard(Path(entry.path))

    def next_segno(self, known: int, count: int = 1) -> int:
        """The first of `count` consecutive numbers never used before; `known` is the highest that
        the caller knows of.
        """
        high = fmt.parse_high(_read(self.path / "high"))
        known = max(known, *self.segment_numbers(), 0)
        if high is None:
            # Somebody may remember numbers that we do not: another process, of the directory that
            # was here before. So a fresh one begins anywhere.
            high = known + UNKNOWN_HIGH_STEP if known else secrets.randbelow(FIRST_SEGNO_MOST)
        segno = max(high, known) + 1
        fd = os.open(self.path / "high", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, 16)
            os.pwrite(fd, fmt.pack_high(segno + count - 1), 0)
        finally:
            os.close(fd)
        return segno


def _newer(path: Path, version: int) -> UserError:
    return UserError(
        f"{path}: was written by a newer fusecache (format {version}; this one knows"
        f" {fmt.FORMAT_VERSION}): update fusecache, or use another --cache-dir"
    )


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


def _numbers(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    matches = (pattern.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match is not None)
