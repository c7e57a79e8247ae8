"""The files that `fusecache digest` writes: the manifest, and what it has so far.

INVARIANT: the manifest has its name only when it is complete. Before that FILE.partial holds the
entries of what was read, as soon as it was read; FILE.new all of this run's.
INVARIANT: what others have put there is neither read nor written to, but replaced.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from pathlib import Path
from typing import Final

from fusecache.base import trust
from fusecache.base.errors import EXIT_BUSY, UserError
from fusecache.manifest import loading
from fusecache.manifest.format import NAME, Entry, ManifestError, Reader, Whole, entry_bytes, header
from fusecache.manifest.listed import Listed

PARTIAL: Final = ".partial"
NEW: Final = ".new"
_SHARED: Final = 0o644  # what its owner may have opened to others


class Output:
    """Of one run. To be closed; unless it is finished, what was read stays for the next one."""

    def __init__(self, path: str, algorithm: int) -> None:
        """UserError: another run is at work, or `path` is no plain file. OSError."""
        self.path = path
        self.notes: list[str] = []
        """Lines for the user: what is there and was not used."""
        self.whole = Whole(algorithm)
        self._algorithm = algorithm
        folder, self._name = os.path.split(os.path.abspath(path))
        folder = os.path.realpath(folder)
        self.files = [os.path.join(folder, self._name + end) for end in ("", PARTIAL, NEW)]
        """What may lie in the directory that is gone through."""
        self._lock = threading.Lock()
        self._mode = 0o600
        with contextlib.ExitStack() as stack:
            self._directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._directory)
            self._refuse_device()
            before, self._partial = self._open_partial()
            stack.callback(os.close, self._partial)
            self._unlink(NEW)
            self._new = stack.enter_context(open(self._make(NEW), "wb"))
            stack.callback(self._unlink, NEW)
            self._new.write(header(algorithm))
            self.known = [before, self._read_old()]
            """What earlier runs have found, the latest first."""
            self.close = stack.pop_all().close

    def _refuse_device(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(self._name, dir_fd=self._directory).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):  # a link is replaced
                raise UserError(f"{self.path} is no plain file")

    def _make(self, end: str) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(self._name + end, flags, 0o600, dir_fd=self._directory)

    def _unlink(self, end: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name + end, dir_fd=self._directory)

    def _open_partial(self) -> tuple[Listed, int]:
        """What it holds; and its descriptor, locked."""
        shown = self.path + PARTIAL
        flags = os.O_RDWR | os.O_APPEND
        try:
            fd = trust.open_in(self._directory, self._name + PARTIAL, shown, flags)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._note(shown, error)
        else:
            self._lock_partial(fd)
            try:
                return self._read_partial(fd), fd
            except ManifestError as error:
                os.close(fd)
                self._note(shown, error)
        self._unlink(PARTIAL)
        fd = self._make(PARTIAL)
        self._lock_partial(fd)
        os.write(fd, header(self._algorithm))
        return Listed(), fd

    def _lock_partial(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            line = f"{self.path} is being written by another fusecache digest"
            raise UserError(line, EXIT_BUSY) from None

    def _read_partial(self, fd: int) -> Listed:
        with open(os.dup(fd), "rb") as file:
            reader = Reader(file, os.fstat(fd).st_size)
            loading.check_algorithm(reader, self._algorithm)
            found = Listed(reader.sound_entries())
        os.truncate(fd, reader.sound_bytes)  # a torn one
        return found

    def _read_old(self) -> Listed:
        try:
            fd = trust.open_in(self._directory, self._name, self.path)
            mode = os.fstat(fd).st_mode
            found = loading.read(fd, self._algorithm)
        except FileNotFoundError:
            return Listed()
        except (OSError, ManifestError) as error:
            self._note(self.path, error)
            return Listed()
        self._mode |= stat.S_IMODE(mode) & _SHARED
        return found

    def _note(self, path: str, error: OSError | ManifestError) -> None:
        self.notes.append(f"{loading.why(path, error)}: not used, it is written anew")

    def note_read(self, entry: Entry) -> None:
        """A file was read. Any thread."""
        with self._lock:
            os.write(self._partial, entry_bytes(entry))

    def add(self, entry: Entry) -> None:
        """The next file of the manifest."""
        self.whole.add(entry)
        self._new.write(entry_bytes(entry))

    def finish(self) -> str:
        """There are no more. A line, if mounts will not use it."""
        self._new.write(self.whole.end())
        self._new.flush()
        os.fchmod(self._new.fileno(), self._mode)
        os.fsync(self._new.fileno())
        os.rename(
            self._name + NEW,
            self._name,
            src_dir_fd=self._directory,
            dst_dir_fd=self._directory,
        )
        self._unlink(PARTIAL)
        try:
            os.close(trust.open_in(self._directory, self._name, self.path))
        except OSError as error:
            return f"no mount will use it: {error.strerror}"
        return ""


def copied(path: str, algorithm: int) -> Listed:
    """What a manifest says of the files that others are copies of: by path, size and mtime alone.

    UserError: it cannot be used.
    """
    try:
        return loading.read(trust.open_file(path), algorithm, of_copies=True)
    except (OSError, ManifestError) as error:
        raise UserError(loading.why(path, error)) from None


def is_read_only(error: OSError) -> bool:
    """Whether the manifest cannot be beside the data."""
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


def default_path(directory: str) -> str:
    return str(Path(directory) / NAME)
