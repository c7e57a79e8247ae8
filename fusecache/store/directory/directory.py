"""The cache directories apart from their data: names, locks, `format`, `set` and `high`
(docs/FORMAT.md). Most caches have one directory; of several, one is home and has the index.

INVARIANT: `next_segno` never returns a number twice for one directory path, even when `high` or the
whole directory was lost in between (`known` is what this process has seen).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
import uuid as uuids
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from fusecache.base import digest
from fusecache.base.errors import UserError
from fusecache.store.directory.generations import Generations
from fusecache.store.directory.joining import UNKNOWN_HIGH_STEP, Joining
from fusecache.store.directory.member import Member
from fusecache.store.directory.pin_files import PinFiles
from fusecache.store.directory.tables import Tables
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import discard

FIRST_SEGNO_MOST = 1 << 30
# After so many errors of its disk a directory of several is not used any more.
ERRORS_MOST: Final = 3
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
        joined = Joining(
            algorithm_name, warn, {path: out[path] for path in paths if out and path in out}
        )
        with contextlib.ExitStack() as opened:
            opened.callback(joined.close)
            joined.open(paths, devices)
            self.members = joined.members  # home first
            self.left_out = joined.left_out
            self.path = self.members[0].path
            self._is_less = joined.is_less  # than what the index knows of
            self._where: dict[int, Member] = {}  # segment -> where its file is; of several members
            self.generations = Generations(self.path / "index")
            self.tables = Tables(self.path)
            self.pins = PinFiles(self.path)
            opened.callback(self.generations.close)
            with self.generations.lock():
                self.uuid, name = self._load_format(algorithm_name)
            if name != algorithm_name:
                raise UserError(
                    f"{self.path}: this cache directory uses the digest {name}, not"
                    f" {algorithm_name}: use --digest {name}, or another --cache-dir"
                )
            self.algorithm = digest.ALGORITHMS[name]
            self._opened = opened.pop_all()

    def _load_format(self, algorithm_name: str) -> tuple[bytes, str]:
        home = self.members[0]
        home.check_version()
        found = home.format()
        if found is None:
            found = uuids.uuid4().bytes, algorithm_name
        home.write_format(fmt.pack_format_line(*found), None)
        return found

    def least_limit(self, own_bytes: int) -> int:
        """The least limit of the processes that use the cache now; `own_bytes` is ours. Told by
        locks of single bytes, which end with who holds them.
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
        member.put_out(why)
        return f"cache directory {member.path} is out of service until the next restart: {why}"

    def close(self) -> None:
        self._opened.close()

    def is_present(self) -> bool:
        """Is the directory at this path still the one that was opened, and in service?"""
        home = self.members[0]
        try:
            return not home.why_out and home.is_there() and self.generations.is_there()
        except OSError:
            return False

    # ---- segments --------------------------------------------------------------------------------
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

    def highest_segno(self) -> int:
        """That was given out here."""
        return self.members[0].high() or 0

    def number_from(self, segno: int) -> None:
        """Numbers up to it are taken elsewhere."""
        if self.highest_segno() < segno:
            self.members[0].write_high(segno)

    def next_segno(self, known: int, count: int = 1) -> int:
        """The first of `count` consecutive numbers never used before; `known` is the highest that
        the caller knows of.
        """
        highs = [member.high() for member in self.in_service()]
        high = self.members[0].high()
        known = max([known, *self.segment_numbers(), *(high for high in highs if high is not None)])
        if high is None:
            # Somebody may remember numbers that we do not: another process, of the directory that
            # was here before. So a fresh one begins anywhere.
            high = known + UNKNOWN_HIGH_STEP if known else secrets.randbelow(FIRST_SEGNO_MOST)
        segno = max(high, known) + 1
        self.members[0].write_high(segno + count - 1)
        for member in self.in_service():
            if member is not self.members[0]:
                with contextlib.suppress(OSError):
                    member.write_high(segno + count - 1)
        return segno
