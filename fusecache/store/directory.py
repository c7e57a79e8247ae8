"""The cache directories apart from their data: names, locks, `format`, `set` and `high`
(docs/FORMAT.md). Most caches have one directory; of several, one is home and has the index.

INVARIANT: `next_segno` never returns a number twice for one directory path, even when `high` or the
whole directory was lost in between (`floor` is what this process has seen).
INVARIANT: `set` and `format` are written only by who holds every directory's lock exclusively.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import sqlite3
import struct
import time
import uuid as uuids
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from fusecache import cache_names, digest
from fusecache.errors import UserError
from fusecache.store import format as fmt
from fusecache.store.membership import Membership, Said, decide
from fusecache.store.segment import discard

# How far numbering jumps when nobody knows what was given out.
UNKNOWN_HIGH_STEP: Final = 1_000_000
FIRST_SEGNO_MOST = 1 << 30
# After so many errors of its disk a directory of several is not used any more.
ERRORS_MOST: Final = 3
_ERRORS_SECONDS: Final = 60.0  # a longer pause between two, and counting begins anew
_DISK_ERRORS: Final = (
    errno.EIO,
    errno.EROFS,
    errno.ENXIO,
    errno.ENODEV,
    errno.ENOMEDIUM,
    errno.ESHUTDOWN,
    errno.EUCLEAN,
    errno.ENOTCONN,
)
_SQLITE_DISK_ERRORS: Final = (
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
)
_LOCK_SECONDS: Final = 2.0
_SEGMENT_NAME = re.compile(r"(\d{8,18})\.seg")
_INDEX_NAME = re.compile(r"(\d{8,18})\.db")
_NO_DEVICE: Final = -1
_READ_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
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
        try:
            others = {entry.name for entry in os.scandir(path)} - {"lost+found", "probe"}
        except FileNotFoundError:
            raise _missing("it does not exist (is its disk mounted?)") from None
        if device not in (None, path.stat().st_dev) and not others & {"format", "segments"}:
            raise _missing("no cache is there any more (is its disk mounted?)")
        if "format" in others and "segments" not in others:
            self.check_version()
        cache_names.check(str(path), claim=True)
        self._lock_fd = os.open(path / "lock", _READ_WRITE, 0o600)
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
        return _numbers(self.segments, _SEGMENT_NAME)

    def count_error(self) -> int:
        now = time.monotonic()
        self.errors = self.errors + 1 if now - self._error_at < _ERRORS_SECONDS else 1
        self._error_at = now
        return self.errors


class Directory:
    """An opened cache; holds the shared locks of its directories until `close`."""

    def __init__(
        self,
        paths: Sequence[Path],
        algorithm_name: str,
        warn: Callable[[str], None],
        out: Mapping[Path, str] | None = None,
        devices: Mapping[Path, int] | None = None,
    ) -> None:
        """Create what is missing in the directories, which exist; `paths` that are `out` (and why)
        are left out. `warn` is told in a line of each directory of several that cannot be used, or
        holds less than it should. With `devices`, a cache begins only in directories on theirs.

        UserError: it cannot be used; OSError: the disk of the only directory failed.
        """
        self.members: list[Member] = []  # home first
        self.left_out = {path: out[path] for path in paths if out and path in out}
        self._where: dict[int, Member] = {}  # segment -> where its file is; with several members
        self._index_lock_fd = -1
        self._is_less = False  # than what the index knows of
        try:
            self._open(paths, algorithm_name, warn, devices)
        except BaseException:
            self.close()
            raise

    def _open(
        self,
        paths: Sequence[Path],
        algorithm_name: str,
        warn: Callable[[str], None],
        devices: Mapping[Path, int] | None,
    ) -> None:
        for path in paths:
            if path in self.left_out:
                continue
            try:
                device = None if devices is None else devices.get(path, _NO_DEVICE)
                self.members.append(Member(path, device))
                if len(paths) > 1:
                    self.members[-1].check_readable()
            except OSError as error:
                if len(paths) == 1:
                    raise
                self._leave_out(path, error.strerror or str(error), warn)
        if not self.members:
            raise UserError("no cache directory can be used: choose others with --cache-dir")
        self._join(algorithm_name, warn)
        self._where.clear()
        self.path = self.members[0].path
        self.indices = self.path / "index"
        for member in list(self.members):
            try:
                member.segments.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                if member is self.members[0]:
                    raise
                self._leave_out(member.path, error.strerror or str(error), warn)
        self.indices.mkdir(mode=0o700, exist_ok=True)
        self._index_lock_fd = os.open(self.indices / "lock", _READ_WRITE, 0o600)
        with self.index_lock():
            self.uuid, name = self._load_format(algorithm_name)
        if name != algorithm_name:
            raise UserError(
                f"{self.path}: this cache directory uses the digest {name}, not {algorithm_name}:"
                f" use --digest {name}, or another --cache-dir"
            )
        self.algorithm = digest.ALGORITHMS[name]

    # ---- several directories ---------------------------------------------------------------------
    def _join(self, algorithm_name: str, warn: Callable[[str], None]) -> None:
        """Lock, agree on who belongs together, and say so in each directory."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            is_late = time.monotonic() > deadline
            if self._is_alone():
                if self._lock_all(fcntl.LOCK_SH):
                    return
            elif self._lock_all(fcntl.LOCK_EX):
                if self._agree(algorithm_name, warn) and self._lock_all(fcntl.LOCK_SH):
                    return
            elif self._lock_all(fcntl.LOCK_SH) and self._is_agreed(is_late, warn):
                return
            if is_late:
                raise UserError(self._why_busy())
            self._lock_all(fcntl.LOCK_UN)
            time.sleep(0.05)

    def _is_alone(self) -> bool:
        """One directory that never was one of several: nothing to agree upon."""
        return (
            len(self.members) == 1
            and not self.left_out
            and not (self.members[0].path / "set").exists()
            and not self.members[0].said().is_further
        )

    def _lock_all(self, operation: int) -> bool:
        return all(member.try_lock(operation) for member in self.members)

    def _why_busy(self) -> str:
        if len(self.members) == 1:
            return (
                f"{self.members[0].path}: another process uses this cache directory exclusively,"
                " or together with others: wait for it, or use another --cache-dir"
            )
        return (
            f"{self.members[0].path}: another process uses this cache exclusively, or with other"
            " directories: give the same ones with --cache-dir, or wait for it"
        )

    def _agree(self, algorithm_name: str, warn: Callable[[str], None]) -> bool:
        """Nobody else uses them. False: one failed, and is left out; once more, please."""
        formats = [found for member in self.members if (found := member.format()) is not None]
        name = formats[0][1] if formats else algorithm_name
        decided = decide([member.said() for member in self.members], len(self.left_out))
        _tell(decided, [member.path for member in self.members], warn)
        members = list(self.members)
        home = members[decided.home]
        self.members.remove(home)
        self.members.insert(0, home)
        self._is_less |= decided.lost > 0 or decided.is_promoted
        if decided.is_promoted and not decided.lost:  # if one is, that was told
            warn(f"the index of the cache was lost with a directory: {home.path} gets a new one")
        highest = self._highest()  # of what is going to be discarded, too
        if highest and (decided.is_promoted or fmt.parse_high(_read(home.path / "high")) is None):
            highest += UNKNOWN_HIGH_STEP
        for member in list(self.members) if decided.is_change else []:  # home first: `_is_kept`
            line = decided.lines[members.index(member)]
            assert line is not None
            version = fmt.FORMAT_VERSION if member is home else fmt.FURTHER_VERSION
            try:
                if highest:  # whoever is home next knows, whatever becomes of the others
                    _write_high(member.path, highest)
                if members.index(member) in decided.discarded:
                    warn(
                        f"cache directory {member.path} is back, but the cache was used without it,"
                        " and without its index: what it held is discarded"
                    )
                    member.empty()
                member.segments.mkdir(mode=0o700, exist_ok=True)
                member.write_format(fmt.pack_format_line(line.uuid, name, version), line)
            except OSError as error:
                if len(self.members) == 1:
                    raise
                self._leave_out(member.path, error.strerror or str(error), warn)
                return False
        return True

    def _highest(self) -> int:
        """Segment number that any directory in service knows of."""
        found = [fmt.parse_high(_read(member.path / "high")) for member in self.in_service()]
        return max([0, *self.segment_numbers(), *(high for high in found if high is not None)])

    def _leave_out(self, path: Path, why: str, warn: Callable[[str], None]) -> None:
        self.left_out[path] = why
        warn(f"cache directory {path} is left out: {why}")
        for member in [member for member in self.members if member.path == path]:
            self.members.remove(member)
            member.close()

    def _is_agreed(self, is_late: bool, warn: Callable[[str], None]) -> bool:
        """While others use them: can these directories be used as they are? At last (`is_late`)
        without those that are new.
        """
        said = [member.said() for member in self.members]
        decided = decide(said, len(self.left_out))
        home = said[decided.home].line
        if decided.is_change and is_late and home is not None:
            fitting = [s for s in said if s.line is not None and s.line.own in home.ids]
            decided = decide(fitting, len(self.left_out))
            if not decided.is_change:
                for stranger in [s.path for s in said if s not in fitting]:
                    self._leave_out(stranger, "others use the cache without it", warn)
        if decided.is_change:
            return False
        member = self.members[decided.home]
        self.members.remove(member)
        self.members.insert(0, member)
        return True

    def _load_format(self, algorithm_name: str) -> tuple[bytes, str]:
        home = self.members[0]
        home.check_version()
        found = home.format()
        if found is None:
            found = uuids.uuid4().bytes, algorithm_name
        home.write_format(fmt.pack_format_line(*found), None)
        return found

    def least_limit(self, own_bytes: int) -> int:
        """The least limit of the processes that use the cache now; `own_bytes` is ours, the same
        at each call. Told by locks of single bytes, which end with who holds them.
        """
        return self.members[0].least_limit(own_bytes)

    def in_service(self) -> list[Member]:
        return [member for member in self.members if not member.why_out]

    def failed(self) -> dict[Path, str]:
        """Those that were put out of service, and why."""
        return {member.path: member.why_out for member in self.members if member.why_out}

    def is_short(self) -> bool:
        """Is one of the directories missing? Then segments are, too, and that was said."""
        return bool(self._is_less or self.left_out or self.failed())

    def member_of(self, segno: int) -> Member:
        """Where the file of a segment is; home, if it is nowhere."""
        if len(self.members) == 1:
            return self.members[0]
        found = self._where.get(segno)
        if found is None or found.why_out:
            for member in self.in_service():
                if os.path.lexists(member.segment_path(segno)):
                    self._where[segno] = member
                    return member
            return self.members[0]
        return found

    def place_segment(self, segno: int, members: Sequence[Member]) -> Path:
        """The path of a new segment: in one of these, in turn."""
        member = members[segno % len(members)]
        if len(self.members) > 1:
            self._where[segno] = member
        return member.segment_path(segno)

    def count_error(self, member: Member, error: OSError | sqlite3.Error) -> str:
        """An error of the disk under one of several; after some it is out of service. Returns the
        line that is to be said about that, once.
        """
        if isinstance(error, OSError):
            is_disk = error.errno in _DISK_ERRORS
        else:
            is_disk = (getattr(error, "sqlite_errorcode", 0) & 0xFF) in _SQLITE_DISK_ERRORS
        if not is_disk or len(self.in_service()) < 2 or member.why_out:
            return ""
        if member.count_error() < ERRORS_MOST:
            return ""
        return self._put_out(member, getattr(error, "strerror", None) or str(error))

    def put_out_missing(self) -> list[str]:
        """Directories that are not where they were; home apart (`is_present`)."""
        return [
            self._put_out(member, "it is no more where it was")
            for member in self.in_service()
            if member is not self.members[0] and not member.is_there()
        ]

    def _put_out(self, member: Member, why: str) -> str:
        member.why_out = why
        return f"cache directory {member.path} is out of service until the next restart: {why}"

    def close(self) -> None:
        for member in self.members:
            member.close()
        if self._index_lock_fd >= 0:
            os.close(self._index_lock_fd)
        self._index_lock_fd = -1

    def is_present(self) -> bool:
        """Is the directory at this path still the one that was opened, and in service?"""
        home = self.members[0]
        try:
            return (
                not home.why_out and home.is_there() and os.fstat(self._index_lock_fd).st_nlink > 0
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
        return self.member_of(segno).segment_path(segno)

    def segment_numbers(self) -> list[int]:
        """Of all directories in service; where each was found is kept."""
        if len(self.members) == 1:
            return self.members[0].segment_numbers()
        where: dict[int, Member] = {}
        for member in reversed(self.in_service()):
            where.update(dict.fromkeys(member.segment_numbers(), member))
        self._where.update(where)
        return sorted(where)

    def remove_unborn_segments(self) -> None:
        """Files of creators that were killed. Within the transaction that creation needs too."""
        for member in self.in_service():
            for name in os.listdir(member.segments):
                if name.endswith(".tmp"):
                    with contextlib.suppress(OSError):
                        discard(member.segments / name)

    def next_segno(self, known: int, count: int = 1) -> int:
        """The first of `count` consecutive numbers never used before; `known` is the highest that
        the caller knows of.
        """
        high = fmt.parse_high(_read(self.path / "high"))
        known = max(known, self._highest())
        if high is None:
            # Somebody may remember numbers that we do not: another process, of the directory that
            # was here before. So a fresh one begins anywhere.
            high = known + UNKNOWN_HIGH_STEP if known else secrets.randbelow(FIRST_SEGNO_MOST)
        segno = max(high, known) + 1
        _write_high(self.path, segno + count - 1)
        for member in self.in_service():
            if member is not self.members[0]:
                with contextlib.suppress(OSError):
                    _write_high(member.path, segno + count - 1)
        return segno


def _tell(decided: Membership, paths: Sequence[Path], warn: Callable[[str], None]) -> None:
    """Who of the directories that the cache had is missing, and who is there again."""
    for number in decided.returned:
        warn(f"cache directory {paths[number]} is back, with what it holds")
    for number in decided.fresh[: decided.lost]:
        warn(
            f"cache directory {paths[number]} is empty, and one that this cache had is missing:"
            " what that one held is fetched again"
        )
    missing = decided.lost - len(decided.fresh) - len(decided.discarded)
    if missing > 0:
        end = "discarded when given again" if decided.is_promoted else "not used until given again"
        what = "what it holds is" if missing == 1 else "what they hold is"
        are = "is" if missing == 1 else "are"
        warn(
            f"cache directory {paths[decided.home]}: this cache had {decided.listed} directories,"
            f" {missing} of them {are} not given now: {what} {end}"
        )


def _missing(line: str) -> OSError:
    return FileNotFoundError(errno.ENOENT, line)


def _write_high(path: Path, segno: int) -> None:
    fd = os.open(path / "high", _READ_WRITE, 0o600)
    try:
        os.ftruncate(fd, 16)
        os.pwrite(fd, fmt.pack_high(segno), 0)
    finally:
        os.close(fd)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    with open(os.open(temporary, _READ_WRITE | os.O_TRUNC, 0o600), "wb") as file:
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


def _numbers(directory: Path, pattern: re.Pattern[str]) -> list[int]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    matches = (pattern.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match is not None)
