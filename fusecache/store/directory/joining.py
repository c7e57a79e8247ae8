"""Opening the directories of a cache together: locks, and an agreement on who belongs to it.

INVARIANT: `set` and `format` are written only by a process that holds every directory's lock
exclusively.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from fusecache.base.errors import UserError
from fusecache.store.directory.member import Member
from fusecache.store.directory.membership import Membership, decide
from fusecache.store.segment import format as fmt

# How far numbering jumps when it is not known what was given out.
UNKNOWN_HIGH_STEP: Final = 1_000_000
_LOCK_SECONDS: Final = 2.0
_NO_DEVICE: Final = -1


class Joining:
    """`members`: those that can be used, home first; `left_out`: the others, and why; `is_less`:
    they hold less than the index knows of.
    """

    def __init__(
        self, algorithm_name: str, warn: Callable[[str], None], left_out: Mapping[Path, str]
    ) -> None:
        """`warn` is told in a line of each directory that is left out."""
        self.members: list[Member] = []
        self.left_out = dict(left_out)
        self.is_less = False
        self._algorithm_name = algorithm_name
        self._warn = warn

    def close(self) -> None:
        for member in self.members:
            member.close()

    def open(self, paths: Sequence[Path], devices: Mapping[Path, int] | None) -> None:
        """Open, lock and agree; see `Directory`. UserError, OSError: `close` it."""
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
                self._leave_out(path, error.strerror or str(error))
        if not self.members:
            raise UserError("no cache directory can be used: choose others with --cache-dir")
        self._join()
        for member in list(self.members):
            try:
                member.segments.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                if member is self.members[0]:
                    raise
                self._leave_out(member.path, error.strerror or str(error))

    def _join(self) -> None:
        """Lock, agree on who belongs together, and say so in each directory."""
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            is_late = time.monotonic() > deadline
            if self._is_alone():
                if self._lock_all(fcntl.LOCK_SH):
                    return
            elif self._lock_all(fcntl.LOCK_EX):
                if self._agree() and self._lock_all(fcntl.LOCK_SH):
                    return
            elif self._lock_all(fcntl.LOCK_SH) and self._is_agreed(is_late):
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

    def _agree(self) -> bool:
        """No other process uses them. False: one failed, and is left out; once more, please."""
        formats = [found for member in self.members if (found := member.format()) is not None]
        name = formats[0][1] if formats else self._algorithm_name
        decided = decide([member.said() for member in self.members], len(self.left_out))
        _tell(decided, [member.path for member in self.members], self._warn)
        members = list(self.members)
        home = members[decided.home]
        self.members.remove(home)
        self.members.insert(0, home)
        self.is_less |= decided.lost > 0 or decided.is_promoted
        if decided.is_promoted and not decided.lost:  # if one is, that was told
            self._warn(
                f"the index of the cache was lost with a directory: {home.path} gets a new one"
            )
        highest = self._highest()  # of what is going to be discarded, too
        if highest and (decided.is_promoted or home.high() is None):
            highest += UNKNOWN_HIGH_STEP
        for member in list(self.members) if decided.is_change else []:  # home first: `_is_kept`
            line = decided.lines[members.index(member)]
            assert line is not None
            version = fmt.FORMAT_VERSION if member is home else fmt.FURTHER_VERSION
            try:
                if highest:  # whoever is home next knows, whatever becomes of the others
                    member.write_high(highest)
                if members.index(member) in decided.discarded:
                    self._warn(
                        f"cache directory {member.path} is back, but the cache was used without it,"
                        " and without its index: what it held is discarded"
                    )
                    member.empty()
                member.segments.mkdir(mode=0o700, exist_ok=True)
                member.write_format(fmt.pack_format_line(line.uuid, name, version), line)
            except OSError as error:
                if len(self.members) == 1:
                    raise
                self._leave_out(member.path, error.strerror or str(error))
                return False
        return True

    def _highest(self) -> int:
        """Segment number that any of the directories knows of."""
        numbers = [segno for member in self.members for segno in member.segment_numbers()]
        return max([0, *numbers, *(member.high() or 0 for member in self.members)])

    def _leave_out(self, path: Path, why: str) -> None:
        self.left_out[path] = why
        self._warn(f"cache directory {path} is left out: {why}")
        for member in [member for member in self.members if member.path == path]:
            self.members.remove(member)
            member.close()

    def _is_agreed(self, is_late: bool) -> bool:
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
                    self._leave_out(stranger, "others use the cache without it")
        if decided.is_change:
            return False
        member = self.members[decided.home]
        self.members.remove(member)
        self.members.insert(0, member)
        return True


def _tell(decided: Membership, paths: Sequence[Path], warn: Callable[[str], None]) -> None:
    """Which of the directories that the cache had is missing, and which is there again."""
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
