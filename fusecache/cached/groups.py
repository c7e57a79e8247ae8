"""All groups of a cache service, and whose room is whose (docs/CACHED.md, Quotas). Any thread.

INVARIANT: the limits of all groups together are `limit_bytes` at most.
INVARIANT: an owner who is within the quota loses nothing to others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
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
        for group in sorted(self._groups.values(), key=lambda group: group.used_s):
            if self._granted() > limit_bytes:  # it is less than before
                self._take(group, self._granted() - limit_bytes)

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
            new = NewSet(self._root, name, owner)
            self._new.append(new)
            return new

    def end(self, new: NewSet) -> None:
        with self._lock:
            self._new.remove(new)
        new.close()

    def add(self, new: NewSet) -> None:
        """Its set is complete. NotAGroup: that is none; NoRoom, OSError."""
        with self._lock:
            if new.name in self._groups:
                return
            own = [group for group in self._groups.values() if group.owner == new.owner]
            if len(own) >= GROUPS_MOST and (victim := _idlest(own)):
                self._remove(victim)
            if not self._make_room(new.owner, None, self._step + new.set_bytes):
                raise NoRoom("others have all of the room")
            self._open(new.finish())

    def _open(self, folder: Path) -> None:
        """NotAGroup, OSError."""
        try:
            group = Group(folder, self.limit_bytes, self._numbers, self._on_fault)
        except NotAGroup:
            remove(folder)
            raise
        except UserError as error:
            raise OSError(str(error)) from None
        group.limit_to(max(self._step + group.set_bytes, group.held_bytes()))
        self._groups[group.name] = group

    def __contains__(self, group: object) -> bool:
        return isinstance(group, Group) and self._groups.get(group.name) is group

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
        found, copies = [], 0
        for name, length in zip(names, lengths, strict=True):
            at = group.find(name, length)
            if at is None and promise and name in group:
                if copies < COPIES_MOST:
                    at = self._copied(group, name, length)
                    copies += at is not None
                if at is None:
                    found.append(Found(None, self.promises.ask(name, holder, uid)))
                    continue
            found.append(Found(at))
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
        groups = self._groups.values()
        return sum(one.limit_bytes for one in groups if owner in (None, one.owner))

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
            self._take(victim, self._step)
        return True

    def _disk_bytes(self) -> int:
        """What is left of the disk, beyond what is to be kept free."""
        disk = os.statvfs(self._root)
        return disk.f_bavail * disk.f_frsize - self._keep_free_bytes

    def _victim(self, owner: int, group: Group | None, bytes_: int) -> Group | None:
        """Who loses something; None: nobody who may."""
        gives = [one for one in self._groups.values() if one is not group and self._can_give(one)]
        forgotten = [one for one in gives if self._is_forgotten(one)]
        if forgotten:
            return _idlest(forgotten)
        if self._granted(owner) + bytes_ <= self.quota_bytes:
            above = {one.owner for one in gives if self._granted(one.owner) > self.quota_bytes}
            if above - {owner}:
                most = max(above - {owner}, key=self._granted)
                return _idlest([one for one in gives if one.owner == most])
        return _idlest([one for one in gives if one.owner == owner and not one.connections])

    @staticmethod
    def _is_forgotten(group: Group) -> bool:
        return not group.connections and time.monotonic() - group.used_s > FORGOTTEN_S

    def _can_give(self, group: Group) -> bool:
        return not group.connections or group.limit_bytes - group.set_bytes >= 2 * self._step

    def _take(self, group: Group, bytes_: int) -> None:
        """So much of its room; all of it where little would be left, and no mount uses it."""
        left, least = group.limit_bytes - bytes_, self._step + group.set_bytes
        if left >= least or group.connections:
            group.limit_to(max(left, least))
        else:
            self._remove(group)

    def _remove(self, group: Group) -> None:
        del self._groups[group.name]
        group.remove()

    # ---- by itself -------------------------------------------------------------------------------

    def keep_house(self) -> None:
        """Once a second."""
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            group.store.flush()
            group.store.housekeeping()
        with self._lock:
            if self._disk_bytes() < 0 and (victim := _idlest([g for g in groups if g in self])):
                self._take(victim, self._step)

    def figures(self) -> dict[int, tuple[int, int, int]]:
        """By owner: groups, bytes held, bytes granted."""
        found: dict[int, tuple[int, int, int]] = {}
        with self._lock:
            for group in self._groups.values():
                count, held, granted = found.get(group.owner, (0, 0, 0))
                more = group.held_bytes(), group.limit_bytes
                found[group.owner] = count + 1, held + more[0], granted + more[1]
        return found


def _idlest(groups: Sequence[Group]) -> Group | None:
    """Which no mount uses, used longest ago; the largest, if all are used."""
    idle = [group for group in groups if not group.connections]
    if idle:
        return min(idle, key=lambda group: group.used_s)
    return max(groups, key=lambda group: group.limit_bytes, default=None)
