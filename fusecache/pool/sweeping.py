"""One host sweeps the origin, and the others follow it (docs/POOL.md, "One sweep for all").

`SharedSweep.tick` is all that asks the engine. Between two ticks an epoch says what there is to
sweep, and hears what was swept. An epoch that has ended is an object that nobody asks any more, so
what is still said to it does no harm.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from fusecache.pool import board
from fusecache.pool.board import Board, Changes, Lease, Name, Times, Values, hash_of
from fusecache.pool.keys import Away

TICKS: Final = 8
"""In a period."""
TICK_LEAST_S: Final = 0.05
RETRY_S: Final = 1.0
"""To the next tick, where nobody has the lease, or the engine has not answered."""
NOTES_MOST: Final = 64
"""Written, or read, at one tick."""
OWN_PERIODS: Final = 64
"""After so many a follower sweeps all by itself, whatever it has heard."""


class Journal(Protocol):
    """`_native` is one."""

    def journal(self, is_on: bool, /) -> None: ...
    def journal_take(self) -> tuple[list[tuple[bytes, bytes]], bool]: ...


class Found(NamedTuple):
    """Of a tick."""

    changes: Mapping[bytes, Sequence[bytes]] = MappingProxyType(Changes())
    """Names, by the path of their directory below the source: to be looked at."""
    wanted: tuple[bytes, ...] = ()
    """Paths of directories that others want swept."""


# ---- epochs --------------------------------------------------------------------------------------


class Alone:
    """This host sweeps for itself."""

    role: str = "alone"
    leader: str | None = None

    def leaves(self, directory: int) -> bool:
        """Whether this host need not look at it."""
        del directory
        return False

    def trusts(self, path: bytes) -> bool:
        """Whether it may be left to the leader, once it was looked at past attribute caches."""
        del path
        return False

    def looked(self, directory: int, path: bytes, is_shared: bool, was_forced: bool) -> None:
        """At all entries of it. `is_shared`: all hosts see them alike (_native.is_shared)."""

    def failed(self, directory: int) -> None:
        """It could not be looked at."""


class Leading(Alone):
    role = "leader"

    def __init__(self, token: str, leader: str) -> None:
        self.token, self.leader = token, leader
        self.notes = 0
        self.written = 0  # of `swept`
        self.is_broken = False
        self._swept: dict[int, int] = {}  # by directory, the hash of its path; in order

    def looked(self, directory: int, path: bytes, is_shared: bool, was_forced: bool) -> None:
        del was_forced
        if not is_shared:
            self.failed(directory)
        elif len(self._swept) < board.DIRECTORIES_MOST:
            self._swept.setdefault(directory, hash_of(path))

    def failed(self, directory: int) -> None:
        self.is_broken |= directory in self._swept

    def hashes(self) -> list[int]:
        return list(self._swept.values())


class Following(Alone):
    role = "follower"

    def __init__(self, lease: Lease, own_at_s: float) -> None:
        """`own_at_s`: when all is swept by this host once more."""
        self.token, self.leader = lease.token, lease.leader
        self.notes = lease.notes
        self.own_at_s = own_at_s
        self.is_joined = False
        self.read = 0  # of the leader's directories
        self._swept: set[int] = set()
        self._left: set[int] = set()
        self._wants: dict[bytes, None] = {}

    def leaves(self, directory: int) -> bool:
        return directory in self._left

    def trusts(self, path: bytes) -> bool:
        return hash_of(path) in self._swept

    def looked(self, directory: int, path: bytes, is_shared: bool, was_forced: bool) -> None:
        if not is_shared:
            return
        if was_forced:
            self._left.add(directory)
        elif self.is_joined and not self.trusts(path):
            self._wants[path] = None

    def failed(self, directory: int) -> None:
        self._left.discard(directory)

    def learn(self, hashes: list[int]) -> None:
        self._swept.update(hashes)

    def take_wants(self) -> list[bytes]:
        wants, self._wants = list(self._wants), {}
        return wants

    def begin_anew(self, own_at_s: float) -> None:
        """Sweep all once more."""
        self._left.clear()
        self.own_at_s = own_at_s

    @property
    def count_left(self) -> int:
        return len(self._left)


# ---- one mount -----------------------------------------------------------------------------------


class SharedSweep:
    """One mount's part."""

    def __init__(
        self,
        values: Values,
        journal: Journal,
        prefix: str,
        member: str,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`prefix`: of the pool's keys. `member`: the name that others are shown. Hosts share a
        sweep if their `period_s` is the same.
        """
        self.epoch: Alone = Alone()
        self.tick_s = max(TICK_LEAST_S, period_s / TICKS)
        self.fault = ""
        """Why the engine is not asked, or does not answer; "": it does."""
        self._board = Board(values, prefix, period_s)
        self._journal, self._clock = journal, clock
        self._member, self._period_s = member, period_s
        self._may_lead = True
        self._id, self._tokens = secrets.token_hex(8), 0
        self._heard_s = clock()
        self._is_vacant = False
        """Nobody had the lease."""
        self._unwritten: dict[Name, None] = {}

    @property
    def needs_root(self) -> bool:
        """Whether the next tick wants the root's time stamps."""
        epoch = self.epoch
        return self._is_vacant or not (isinstance(epoch, Following) and epoch.is_joined)

    @property
    def pause_s(self) -> float:
        """Until the next tick."""
        is_soon = self._is_vacant or self.fault
        return min(self.tick_s, RETRY_S) if is_soon else self.tick_s

    def tick(self, root: Times | None) -> Found:
        """Blocking. `root`: the source's time stamps, past attribute caches; None: not needed, or
        the origin does not answer. What others have found is this host's to look at from then on.
        """
        try:
            lease = self._board.lease()
            self._is_vacant = lease is None
            is_ours = lease is None or self._is_own(lease)  # it may be under an older token
            if isinstance(self.epoch, Leading) and is_ours:
                found = self._lead(self.epoch, lease, root)
            else:
                found = self._follow(lease, root)
            self.fault = ""
        except Away as error:
            self.fault = str(error)
            if self._clock() - self._heard_s > self._board.lease_s:
                self._be_alone()
            return Found()
        return found

    def leave(self) -> None:
        """The mount has ended: if it leads, another one may, at once. Blocking."""
        if isinstance(self.epoch, Leading):
            self._be_alone()
            try:
                lease = self._board.lease()
                if lease is not None and self._is_own(lease):
                    self._board.remove_lease()
            except Away:
                pass  # it expires

    def begin_pass(self) -> None:
        """Over the directories."""
        epoch = self.epoch
        if isinstance(epoch, Following) and self._clock() > epoch.own_at_s:
            epoch.begin_anew(self._clock() + OWN_PERIODS * self._period_s)

    def end_pass(self, is_well: bool) -> None:
        """Not well: it has met a time-out. Then this host does not lead."""
        self._may_lead = is_well

    def status(self) -> dict[str, Any]:
        epoch = self.epoch
        return {
            "role": epoch.role,
            "leader": epoch.leader,
            "left": epoch.count_left if isinstance(epoch, Following) else 0,
            "fault": self.fault,
        }

    # ---- the leader ------------------------------------------------------------------------------

    def _lead(self, epoch: Leading, lease: Lease | None, root: Times | None) -> Found:
        """Away."""
        if root is None or not self._may_lead:
            self._be_alone()
            if lease is not None:
                self._board.remove_lease()
            return Found()
        notes = self._notes(epoch)
        if notes is None:
            epoch = self.epoch = self._new_epoch()
            notes = []
        for note in notes:
            self._board.put_note(epoch.token, epoch.notes + 1, note)
            epoch.notes += 1
            for name in note:
                del self._unwritten[name]
        wanted = self._board.take_wanted()
        if not {hash_of(path) for path in wanted}.isdisjoint(epoch.hashes()):
            epoch.written = 0  # somebody cannot read what was written
        self._write_swept(epoch)
        if self._put_lease(epoch, root, is_new=lease is None):
            self._heard_s = self._clock()
        return Found(wanted=wanted)

    def _notes(self, epoch: Leading) -> list[list[Name]] | None:
        """What is to be written. None: it cannot be told name by name."""
        names, is_whole = self._journal.journal_take()
        self._unwritten |= dict.fromkeys(names)
        if is_whole and not epoch.is_broken:
            notes = list(board.pieces(self._unwritten))
            if len(notes) <= NOTES_MOST:
                return notes
        self._unwritten.clear()
        return None

    def _write_swept(self, epoch: Leading) -> None:
        """Directories that were swept for the first time. Away."""
        hashes = epoch.hashes()
        while epoch.written < len(hashes):
            number = epoch.written // board.PART
            part = hashes[number * board.PART : (number + 1) * board.PART]
            self._board.put_swept(epoch.token, number, part)
            epoch.written = number * board.PART + len(part)

    def _put_lease(self, epoch: Leading, root: Times, is_new: bool) -> bool:
        """Away."""
        lease = Lease(epoch.token, self._member, epoch.notes, epoch.written, root)
        return self._board.put_lease(lease, is_new)

    def _new_epoch(self) -> Leading:
        self._tokens += 1
        return Leading(f"{self._id}-{self._tokens}", self._member)

    # ---- a follower ------------------------------------------------------------------------------

    def _follow(self, lease: Lease | None, root: Times | None) -> Found:
        """Away."""
        if lease is None:
            self._try_to_lead(root)
            return Found()
        if self._is_own(lease):
            self._be_alone()  # it was given up, and has yet to expire
            return Found()
        self._heard_s = self._clock()
        epoch = self._followed(lease)
        changes = self._board.notes(epoch.token, range(epoch.notes + 1, lease.notes + 1))
        if changes is None:
            changes, epoch = {}, self._begin_following(lease)
        epoch.notes = lease.notes
        if not epoch.is_joined:
            epoch.is_joined = root == lease.root
        if epoch.is_joined:
            self._read_swept(epoch, lease.swept)
            self._board.want(epoch.take_wants())
        return Found(changes)

    def _try_to_lead(self, root: Times | None) -> None:
        """Away."""
        if self._may_lead and root is not None:
            epoch = self._new_epoch()
            self._unwritten.clear()
            self._journal.journal(True)
            try:
                has_it = self._put_lease(epoch, root, is_new=True)
            except Away:
                self._journal.journal(False)
                raise
            if has_it:
                self.epoch, self._heard_s = epoch, self._clock()
            else:
                self._journal.journal(False)
        elif self._clock() - self._heard_s > self._board.lease_s:
            self._be_alone()

    def _followed(self, lease: Lease) -> Following:
        epoch = self.epoch
        if (
            isinstance(epoch, Following)
            and epoch.token == lease.token
            and 0 <= lease.notes - epoch.notes <= NOTES_MOST
            and lease.swept >= epoch.read
        ):
            return epoch
        return self._begin_following(lease)

    def _begin_following(self, lease: Lease) -> Following:
        self._be_alone()
        own_s = random.uniform(0.5, 1.0) * OWN_PERIODS * self._period_s
        epoch = self.epoch = Following(lease, self._clock() + own_s)
        return epoch

    def _read_swept(self, epoch: Following, count: int) -> None:
        """Away."""
        while epoch.read < count:
            number = epoch.read // board.PART
            expected = min(board.PART, count - number * board.PART)
            hashes = self._board.swept(epoch.token, number, expected)
            if hashes is None:
                return
            epoch.learn(hashes)
            epoch.read = number * board.PART + expected

    # ---- both ------------------------------------------------------------------------------------

    def _be_alone(self) -> None:
        if isinstance(self.epoch, Leading):
            self._journal.journal(False)
        if type(self.epoch) is not Alone:
            self.epoch = Alone()

    def _is_own(self, lease: Lease) -> bool:
        return lease.token.startswith(self._id)
