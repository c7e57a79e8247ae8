"""All groups of a cache service, and whose room is whose (docs/CACHED.md, Quotas). Any thread.

INVARIANT: the limits of all groups together are `limit_bytes` at most.
INVARIANT: an owner who is within the quota loses nothing to others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Final

from fusecache.base.errors import UserError
from fusecache.cached.group import Data, Group, NewSet, NotAGroup, is_folder, remove
from fusecache.cached.numbers import Numbers
from fusecache.cached.promises import Promises
from fusecache.cached.talk import Found
from fusecache.store.types import Location

log = logging.getLogger(__name__)

LIMIT_BYTES_LEAST: Final = 64 << 20
STEP_BYTES_LEAST, STEP_BYTES_MOST = 32 << 20, 1 << 30
STEPS: Final = 64
FORGOTTEN_S: Final = 7 * 86400.0
"""What no mount has used for so long makes room for anybody."""
COPIES_MOST: Final = 8
"""Blocks of other groups that one request may have copied."""
GROUPS_MOST: Final = 256
"""Of one owner."""
NEW_MOST: Final = 8
"""Groups that are being made at a time, by different owners."""
SETS_PART: Final = 16
"""Of the limit: what the set of one group may take."""


class NoRoom(Exception):
    """One line."""


class Groups:
    """Of one service."""

    def __init__(
        self,
        root: Path,
        limit_bytes: int,
        quota_bytes: int,
        keep_free_bytes: int,
        on_fault: Callable[[str, str], None],
    ) -> None:
        """`quota_bytes`: what each owner keeps. OSError, UserError: `root` cannot be used."""
        self.limit_bytes, self.quota_bytes = limit_bytes, quota_bytes
        self._root = root
        self._keep_free_bytes = keep_free_bytes
        self._on_fault = on_fault
        self._step = max(STEP_BYTES_LEAST, min(limit_bytes // STEPS, STEP_BYTES_MOST))
        self._lock = threading.RLock()  # over which groups there are, and their limits
        self._groups: dict[bytes, Group] = {}
        self._new: list[NewSet] = []
        self.promises = Promises()
        self._numbers = Numbers(root)
        for folder in sorted(root.iterdir()):
            if not is_folder(folder.name):
                continue
            if folder.name.startswith("."):
                remove(folder)
            else:
                try:
                    self._open(folder)
                except (NotAGroup, OSError) as error:
                    log.warning("%s: it is not used", error)
        while self._granted() > limit_bytes:  # it is less than before
            victim = max(self._groups.values(), key=lambda group: group.limit_bytes)
            self._take(victim)

    def close(self) -> None:
        with self._lock:
            for group in self._groups.values():
                group.close()
            self._groups.clear()

    # ---- which there are -------------------------------------------------------------------------

    def use(self, name: bytes) -> Group | None:
        """The group, for one more connection: `leave` it; None: it is not there."""
        with self._lock:
            group = self._groups.get(name)
            if group is not None:
                group.enter()
            return group

    def leave(self, group: Group) -> None:
        with self._lock:
            group.leave()

    def begin(self, name: bytes, owner: int, set_bytes: int) -> NewSet:
        """`end` it. NoRoom, OSError."""
        with self._lock:
            if any(new.owner == owner for new in self._new) or len(self._new) >= NEW_MOST:
                raise NoRoom("another group is being made")
            if set_bytes > self.limit_bytes // SETS_PART:
                raise NoRoom("the set is too large for this cache")
            own = [group for group in self._groups.values() if group.owner == owner]
            if len(own) >= GROUPS_MOST and not self._remove_idle(own):
                raise NoRoom("too many groups of this user")
            reserved = 0 if name in self._groups else self._step + set_bytes
            if reserved and not self._make_room(owner, None, reserved):
                raise NoRoom("others have all of the room")
            new = NewSet(self._root, name, owner, reserved)
            self._new.append(new)
            return new

    def end(self, new: NewSet) -> None:
        """What was reserved for it is the group's, or free."""
        with self._lock:
            if new in self._new:
                self._new.remove(new)
        new.close()

    def add(self, new: NewSet) -> None:
        """Its set has come. NotAGroup: that is none; OSError."""
        new.check()
        with self._lock:
            if new.name not in self._groups:
                self._new.remove(new)
                self._open(new.finish())

    def _open(self, folder: Path) -> None:
        """NotAGroup, OSError."""
        try:
            group = Group(folder, self.limit_bytes, self._numbers, self._on_fault)
        except NotAGroup:
            remove(folder)
            raise
        except UserError as error:  # of a newer version, say: it stays
            raise OSError(str(error)) from None
        group.limit_to(max(self._step + group.set_bytes, group.held_bytes()))
        self._groups[group.name] = group

    # ---- blocks ----------------------------------------------------------------------------------

    def find(
        self,
        group: Group,
        names: Sequence[bytes],
        lengths: Sequence[int],
        holder: Hashable,
        uid: int,
        promise: bool,
    ) -> list[Found]:
        """Of each digest where it lies. With `promise` what is nowhere is the holder's to bring, or
        promised to another one; and what another group has comes from there.
        """
        copies, found = 0, list[Found]()
        places = group.find(list(zip(names, lengths, strict=True)))
        for name, length, at in zip(names, lengths, places, strict=True):
            if at is not None or not promise or name not in group:
                found.append(Found(at))
                continue
            copied = self._copied(group, name, length) if copies < COPIES_MOST else None
            copies += copied is not None
            is_promised = copied is None and self.promises.ask(name, holder, uid)
            if copied is None and not is_promised:  # it may just have been put
                (copied,) = group.find([(name, length)])
                if copied is not None:
                    self.promises.end(name, holder)
            found.append(Found(copied, is_promised))
        return found

    def _copied(self, group: Group, name: bytes, length: int) -> Location | None:
        with self._lock:
            others = [other for other in self._groups.values() if other is not group]
        for other in others:
            data = other.read(name, length) if name in other else None
            if data is not None:
                return self.put(group, [(name, data)])[0]
        return None

    def put(self, group: Group, blocks: Sequence[tuple[bytes, Data]]) -> list[Location | None]:
        """They have these digests, and are of the group. None: there is no room for it."""
        try:
            if group.is_short:
                self._grow(group)
            return group.put(blocks)
        finally:
            for name, _ in blocks:
                self.promises.end(name)

    # ---- room, with the lock ---------------------------------------------------------------------

    def _granted(self, owner: int | None = None) -> int:
        groups, new = self._groups.values(), self._new
        granted = sum(one.limit_bytes for one in groups if owner in (None, one.owner))
        return granted + sum(one.reserved_bytes for one in new if owner in (None, one.owner))

    def room_bytes(self, group: Group) -> int:
        """What may be put in it without a loss of others."""
        with self._lock:
            free = max(0, self.limit_bytes - self._granted())
            return free + max(0, group.limit_bytes - group.held_bytes())

    def _grow(self, group: Group) -> None:
        """There is always room for half a step, if it may have that."""
        with self._lock:
            is_short = group.limit_bytes - group.held_bytes() < self._step // 2
            if is_short and self._make_room(group.owner, group, self._step):
                group.limit_to(group.limit_bytes + self._step)
            group.has_grown()

    def _make_room(self, owner: int, group: Group | None, bytes_: int) -> bool:
        """For so much more of this owner's, in this group (None: a new one). False: in vain."""
        while self._granted() + bytes_ > self.limit_bytes or self._disk_bytes() < bytes_:
            victim = self._victim(owner, group, bytes_)
            if victim is None:
                return False
            self._take(victim)
        return True

    def _disk_bytes(self) -> int:
        """What is left of the disk, beyond what is to be kept free."""
        disk = os.statvfs(self._root)
        return disk.f_bavail * disk.f_frsize - self._keep_free_bytes

    def _victim(self, owner: int, group: Group | None, bytes_: int) -> Group | None:
        """Who loses something; None: nobody who may."""
        others = [one for one in self._groups.values() if one is not group]
        forgotten = [one for one in others if self._is_forgotten(one)]
        if forgotten:
            return _idlest(forgotten)
        if self._granted(owner) + bytes_ <= self.quota_bytes:
            victim = self._of_who_has_most(one for one in others if one.owner != owner)
            if victim is not None:
                return victim
        return _idlest([one for one in others if one.owner == owner and not one.connections])

    def _of_who_has_most(self, groups: Iterable[Group]) -> Group | None:
        """Of an owner who keeps the quota without what it loses; None: there is none."""
        above = [
            one for one in groups if self._granted(one.owner) - self._loss(one) >= self.quota_bytes
        ]
        most = max((self._granted(one.owner) for one in above), default=0)
        return _idlest([one for one in above if self._granted(one.owner) == most])

    @staticmethod
    def _is_forgotten(group: Group) -> bool:
        return not group.connections and time.monotonic() - group.used_s > FORGOTTEN_S

    def _loss(self, group: Group) -> int:
        """What it gives when something is taken: a step, or all of it, if little would be left."""
        left = group.limit_bytes - self._step
        return self._step if left >= self._step + group.set_bytes else group.limit_bytes

    def _take(self, group: Group) -> None:
        """Some of its room."""
        loss = self._loss(group)
        if loss < group.limit_bytes:
            group.limit_to(group.limit_bytes - loss)
        else:
            self._remove(group)

    def _remove(self, group: Group) -> None:
        del self._groups[group.name]
        group.remove()

    def _remove_idle(self, groups: Sequence[Group]) -> bool:
        """The one of these that no mount uses, used longest ago. False: there is none."""
        idle = _idlest([group for group in groups if not group.connections])
        if idle is not None:
            self._remove(idle)
        return idle is not None

    # ---- by itself -------------------------------------------------------------------------------

    def keep_house(self) -> None:
        """Once a second."""
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            group.store.flush()
            group.store.housekeeping()
        with self._lock:
            if self._disk_bytes() < 0:  # others have taken it
                groups = list(self._groups.values())
                victim = self._of_who_has_most(groups) or _idlest(groups)
                if victim is not None:
                    self._take(victim)


def _idlest(groups: Sequence[Group]) -> Group | None:
    """Which no mount uses, used longest ago; the largest, if all are used."""
    idle = [group for group in groups if not group.connections]
    if idle:
        return min(idle, key=lambda group: group.used_s)
    return max(groups, key=lambda group: group.limit_bytes, default=None)
