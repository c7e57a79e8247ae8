"""The directories that this process was given, and what it tells of faults."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from fusecache.base import digest, trust
from fusecache.base.errors import UserError
from fusecache.store.directory.directory import Directory
from fusecache.store.segment.files import read_through
from fusecache.store.types import DirectoryState

# After a full cache or a failed write, how long nothing is stored.
PAUSE_SECONDS: Final = 1.0
_REATTACH_SECONDS: Final = 5.0  # between attempts at a directory that cannot be used


class Faults:
    """`tell(kind, message)`: of each; any thread. After some nothing is stored for a while."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self.tell = tell
        self._paused_until = 0.0

    def pause(self) -> None:
        self._paused_until = time.monotonic() + PAUSE_SECONDS

    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    def of_disk(self, path: Path, error: OSError) -> None:
        """Of the directory there."""
        self.pause()
        kind = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io"
        self.tell(kind, f"cache directory {path}: {error.strerror or error}")


class Given:
    """Which of the directories are out of service, and why; on which disks they were; and the
    `opened` cache that they are. With the store's lock, but for what says otherwise.

    INVARIANT: a directory that was put out of service is not used again by this process.
    """

    def __init__(self, paths: Sequence[Path], algorithm_name: str, faults: Faults) -> None:
        """Opens nothing."""
        self.opened: Directory | None = None
        self._paths = paths
        self._algorithm_name = algorithm_name
        self._faults = faults
        self._out: dict[Path, str] = {}  # of several
        self._devices: dict[Path, int] = {}  # of those that this process has used
        self._why_off = ""  # why nothing is opened
        self._reopen_at = 0.0

    # ---- opening ---------------------------------------------------------------------------------
    def make(self) -> None:
        """Those that do not exist; their parents must."""
        for path in self._paths:
            with contextlib.suppress(OSError):  # opening says what is wrong
                os.close(trust.open_directory(str(path.absolute()), make=True))

    def open(self, devices: Mapping[Path, int] | None) -> Directory:
        """See `Directory`. UserError, OSError."""
        if why := digest.why_unusable(self._algorithm_name):
            raise UserError(why)
        return Directory(
            self._paths,
            self._algorithm_name,
            lambda line: self._faults.tell("directory", line),
            self._out,
            devices,
        )

    def reopen(self) -> Directory | None:
        """The directory as it is there again, or a new one where it was deleted. None: it is not
        there; where its disk is not mounted, another one must not be filled.
        """
        if time.monotonic() < self._reopen_at:
            return None
        for path, device in self._devices.items():
            with contextlib.suppress(OSError):
                if path not in self._out and path.parent.stat().st_dev == device:
                    os.close(trust.open_directory(str(path.absolute()), make=True))
        try:
            return self.open(self._devices)
        except (OSError, UserError) as error:
            if not isinstance(error, FileNotFoundError):
                self._reopen_at = time.monotonic() + _REATTACH_SECONDS
            why = getattr(error, "strerror", None) or str(error)
            if why != self._why_off:
                self._why_off = why
                self._faults.tell("missing", f"nothing is cached until {self} can be used: {why}")
            return None

    def use(self, directory: Directory) -> None:
        self.opened = directory
        self._devices |= {member.path: member.device for member in directory.members}
        self._why_off = ""

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()
            self.opened = None

    # ---- failures --------------------------------------------------------------------------------
    def lose(self) -> None:
        """It is not where it was; `close` it."""
        directory = self.opened
        failed = directory.failed() if directory is not None else {}
        self._out.update(failed)
        if directory is None or directory.path not in failed:
            self._faults.tell(
                "missing",
                f"cache directory {self.home()} is not where it was: nothing is cached until it is"
                " there again",
            )

    def newly_failed(self, directory: Directory) -> set[Path]:
        """Those of several that are out of service since the last call."""
        for line in directory.put_out_missing():
            self._faults.tell("directory", line)
        failed = directory.failed()
        fresh = {path for path in failed if path not in self._out}
        self._out.update(failed)
        return fresh

    def count_error(self, segno: int, error: OSError) -> bool:
        """An error of the disk under this segment; any thread. False: of the only directory."""
        directory = self.opened
        if directory is None or len(directory.members) == 1:
            return False
        line = directory.count_error(directory.member_of(segno), error)
        if line:
            self._faults.tell("directory", line)
        return True

    def look_at_disk(self, segno: int, offset: int) -> None:
        """A record was bad: if the disk of one of several directories fails, that counts."""
        directory = self.opened
        if directory is None or len(directory.members) == 1:
            return
        try:
            read_through(directory.segment_path(segno), offset)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.count_error(segno, error)

    def tell_error(self, error: OSError, segno: int | None = None) -> None:
        """Of the file of that segment, if it is one's. Any thread."""
        path = self.home()
        if segno is not None:
            path = self.segment_path(segno).parent.parent
        elif isinstance(error.filename, (str, Path)):
            path = next((p for p in self._paths if p in Path(error.filename).parents), path)
        self._faults.of_disk(path, error)

    # ---- any thread ------------------------------------------------------------------------------
    def home(self) -> Path:
        """The directory that has the index; while there is none, the first that is to be used."""
        directory = self.opened
        if directory is not None and directory.members:
            return directory.members[0].path
        return next((path for path in self._paths if path not in self._out), self._paths[0])

    def segment_path(self, segno: int) -> Path:
        directory = self.opened
        if directory is None:
            return self._paths[0] / "segments" / f"{segno:08d}.seg"
        return directory.segment_path(segno)

    def states(self, written: Mapping[Path, Collection[int]]) -> list[DirectoryState]:
        """Of each; `written`: the bytes of the segments that lie there."""
        out, directory = dict(self._out), self.opened
        if directory is not None:
            out.update(directory.left_out)
        return [
            DirectoryState(
                str(path),
                out.get(path, self._why_off),
                sum(written.get(path, ())),
                len(written.get(path, ())),
            )
            for path in self._paths
        ]

    def __str__(self) -> str:
        many = len(self._paths) > 1
        return f"cache director{'ies' if many else 'y'} {', '.join(map(str, self._paths))}"
