"""What `fusecache digest` does: goes through a directory, and reads what is not known yet.

INVARIANT: a file is opened beneath the directory, and through no link: who may write there has us
read nothing else.
INVARIANT: a digest is of one version: a file's stat is the same before and after it is read, and
its time stamps were so old that a further change would have changed them.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from fusecache.base import mounts, trust
from fusecache.base.digest import digest
from fusecache.base.units import BLOCK_BYTES
from fusecache.manifest.format import Entry
from fusecache.manifest.listed import Listed
from fusecache.manifest.writing import Output

THREADS: Final = 16
SETTLED_NS: Final = 2_000_000_000  # of any origin: see read/origin.py
CHANGES_MOST: Final = 3
ERRORS_SHOWN: Final = 10
_WAITING_MOST: Final = 256
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass
class Progress:
    """Counts of files and bytes. Of `files`, `read_files` were read, the others are unchanged; the
    `bad` ones are missing in the manifest; what is `special` is no plain file.
    """

    files: int = 0
    seen_bytes: int = 0
    read_files: int = 0
    read_bytes: int = 0
    special: int = 0
    bad: int = 0
    messages: list[str] = field(default_factory=list)

    def fail(self, path: bytes, error: OSError) -> None:
        self.bad += 1
        if len(self.messages) < ERRORS_SHOWN:
            self.messages.append(f"{os.fsdecode(path) or '.'}: {error.strerror or error}")


Stamp = tuple[int, int, int, int]  # inode number, size, mtime and ctime in ns


class _File(NamedTuple):
    directory: int
    name: bytes
    path: bytes


class _Found(NamedTuple):
    entry: Entry
    was_read: bool


class _Buffer(threading.local):
    """Of each thread its own."""

    def __init__(self) -> None:
        # from a page's beginning: see BlockBuffers in fusecache/read/origin.py
        self.block = memoryview(mmap.mmap(-1, BLOCK_BYTES))


class Digesting:
    """Of one directory."""

    def __init__(
        self,
        root: int,
        output: Output,
        algorithm: int,
        copied: Listed,
        left_out: Collection[bytes],
    ) -> None:
        """`root`: a descriptor, to be kept open. `copied` knows files by size and mtime alone, and
        is believed of files of ours.
        `left_out`: paths that are not listed.
        """
        self.progress = Progress()
        self._root = root
        self._output = output
        self._algorithm = algorithm
        self._known: Sequence[Listed] = output.known
        self._copied = copied
        self._left_out = left_out
        self._is_over = False
        self._fuse = _fuse_devices()
        self._buffer = _Buffer()

    def run(self, show: Callable[[Progress], None]) -> None:
        """`show` is called after each file. OSError: the directory or the manifest cannot be used;
        what one file or directory gives is counted.
        """
        waiting: deque[tuple[_File, Future[_Found]] | int] = deque()

        def take() -> None:
            first = waiting.popleft()
            if isinstance(first, int):
                os.close(first)
            else:
                self._take(first[0].path, first[1])
                show(self.progress)

        with ThreadPoolExecutor(THREADS, "digest") as pool:
            try:
                for item in self._walk():
                    if isinstance(item, int):
                        waiting.append(item)
                    else:
                        waiting.append((item, pool.submit(self._find, item)))
                    while len(waiting) > _WAITING_MOST:
                        take()
                while waiting:
                    take()
            finally:
                self._is_over = True
                pool.shutdown(cancel_futures=True)
                for left in waiting:
                    if isinstance(left, int):
                        os.close(left)

    def _take(self, path: bytes, future: Future[_Found]) -> None:
        try:
            entry, was_read = future.result()
        except FileNotFoundError:
            return  # deleted meanwhile
        except OSError as error:
            self.progress.fail(path, error)
            return
        self._output.add(entry)
        self.progress.files += 1
        self.progress.seen_bytes += entry.size
        if was_read:
            self.progress.read_files += 1
            self.progress.read_bytes += entry.size

    # ---- the directories -------------------------------------------------------------------------

    def _walk(self) -> Iterator[_File | int]:
        """The files; and the descriptor of each directory, when all below it were named."""
        stack = [(os.dup(self._root), b"", iter([b""]))]
        try:
            while stack:
                above, path, names = stack[-1]
                name = next(names, None)
                if name is None:
                    stack.pop()
                    yield above
                    continue
                below = os.path.join(path, name)
                try:
                    fd = os.open(name or b".", _OPEN | os.O_DIRECTORY, dir_fd=above)
                    try:
                        files, directories = self._list(fd, below)
                    except BaseException:
                        os.close(fd)
                        raise
                except FileNotFoundError:
                    continue
                except OSError as error:
                    if not below:
                        raise
                    self.progress.fail(below, error)
                    continue
                stack.append((fd, below, iter(directories)))
                for file in files:
                    yield _File(fd, file, os.path.join(below, file))
        finally:
            for fd, *_ in stack:
                os.close(fd)

    def _list(self, fd: int, path: bytes) -> tuple[list[bytes], list[bytes]]:
        """Names of files and of directories, sorted."""
        files, directories = [], []
        with os.scandir(fd) as entries:
            for found in entries:
                name = os.fsencode(found.name)
                if os.path.join(path, name) in self._left_out:
                    continue
                if found.is_dir(follow_symlinks=False):
                    directories.append(name)
                elif found.is_file(follow_symlinks=False):
                    files.append(name)
                else:
                    self.progress.special += 1
        return sorted(files), sorted(directories)

    # ---- a file (in a thread) --------------------------------------------------------------------

    def _find(self, file: _File) -> _Found:
        """OSError."""
        for _ in range(CHANGES_MOST):
            before = self._settled(file)
            ino = 0 if before.st_dev in self._fuse else before.st_ino
            version = ino, before.st_size, before.st_mtime_ns, before.st_ctime_ns
            names = self._known_digests(file.path, version, before.st_uid)
            if names is not None:
                return _Found(Entry(file.path, *version, names), was_read=False)
            names = self._read(file, before)
            if names is not None:
                entry = Entry(file.path, *version, names)
                self._output.note_read(entry)
                return _Found(entry, was_read=True)
        raise OSError(0, "it changes while it is read")

    def _known_digests(self, path: bytes, version: Stamp, uid: int) -> bytes | None:
        for listed in self._known:
            names = listed.find(path, *version)
            if names is not None:
                return names
        # Others can give a file of theirs any size and mtime: those of what they may not read, say.
        return self._copied.find(path, *version) if trust.is_ours(uid) else None

    @staticmethod
    def _settled(file: _File) -> os.stat_result:
        """Its stat, once a further change would change its time stamps."""
        while True:
            found = os.stat(file.name, dir_fd=file.directory, follow_symlinks=False)
            young_ns = found.st_ctime_ns + SETTLED_NS - time.time_ns()
            if young_ns < 0:
                return found
            if young_ns > 2 * SETTLED_NS:
                raise OSError(0, "its ctime lies in the future")
            time.sleep((young_ns + 1) / 1e9)

    def _read(self, file: _File, before: os.stat_result) -> bytes | None:
        """The digests of its blocks; None: it changed."""
        fd = os.open(file.name, _OPEN, dir_fd=file.directory)
        try:
            if _version(os.fstat(fd)) != _version(before):
                return None
            names = b"".join(self._digests(fd, before.st_size))
            return names if _version(os.fstat(fd)) == _version(before) else None
        finally:
            os.close(fd)

    def _digests(self, fd: int, size: int) -> Iterator[bytes]:
        """OSError, also where it ends early."""
        for start in range(0, size, BLOCK_BYTES):
            block = self._buffer.block[: min(BLOCK_BYTES, size - start)]
            got = 0
            while got < len(block):
                if self._is_over:
                    raise OSError(0, "interrupted")
                count = os.preadv(fd, [block[got:]], start + got)
                if count == 0:
                    raise OSError(0, "it ends before its size")
                got += count
            yield digest(self._algorithm, block)


def _fuse_devices() -> set[int]:
    """File systems whose inode numbers are of their own making: a mount of ours, sshfs."""
    found = set()
    for mount in mounts.mounts():
        if mount.filesystem.partition(".")[0] in ("fuse", "fuseblk"):
            major, minor = map(int, mount.device.split(":"))
            found.add(os.makedev(major, minor))
    return found


def _version(found: os.stat_result) -> tuple[int, ...]:
    return (
        stat.S_IFMT(found.st_mode),
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
    )
