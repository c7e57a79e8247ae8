"""The files of one mount, by inode number: their sizes, what is known of each, what SSD has and is
to have of them, and which are armed (pure).

Each flag has an owner, which alone marks it, and keeps its sum in step: STORED, RESIDENT, FETCHING,
STORING and GONE are `Ssd`'s, ARMED is `Wires`'s, PINNED placement.py's, all others are ram.py's.

INVARIANT: the counts and sums here are those of the flags; no RESIDENT file is STORED.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from fusecache.base.wire import Place, Result
from hintsd.follow.sequence import SLICE, Inos
from hintsd.plan.commands import Withdrawn
from hintsd.policies import Integers, Mask
from hintsd.policies.residents import Residents

PAGE_BYTES = 4096
ARM_MOST = 4096  # files for one job, in one decide()

STORED, RESIDENT, HELD, SENT, STAGED, FETCHING, FAILED, GONE = (1 << bit for bit in range(8))
ARMED, STORING, MOVING, KEPT_IN_RAM, READ = (1 << bit for bit in range(8, 13))
PINNED, LISTED, LOST = 1 << 13, 1 << 14, 1 << 15
# All 16 bits are taken: a further mark is an array of its own.
_OF_SSD = STORED | RESIDENT | FETCHING | STORING | GONE


class Files:
    """Arrays have one entry for each inode number; entry 0 stands for all outside the mount."""

    def __init__(self) -> None:
        self.sizes: npt.NDArray[Any] = np.zeros(0, np.uint32)
        """Bytes; 0: never learned, and so not prefetched."""
        self.flags = np.zeros(0, np.uint16)
        self._owned: Mask | None = None  # None: none is

    def grow(self, count: int) -> None:
        """Makes room for inode numbers below `count`."""
        self.sizes, self.flags = grown(self.sizes, count), grown(self.flags, count)
        if self._owned is not None:
            self._owned = grown(self._owned, count)

    def own(self, inos: Inos, are_owned: Mask) -> None:
        """Other hosts ask this one for these, or do not."""
        if self._owned is None and are_owned.any():
            self._owned = np.zeros(len(self.flags), np.bool_)
        if self._owned is not None:
            self._owned[inos] = are_owned

    def are_owned(self, inos: Inos) -> Mask:
        """Which of these other hosts ask this one for: its SSD is the pool's place for them."""
        if self._owned is None:
            return np.zeros(len(inos), np.bool_)
        found: Mask = self._owned[inos]
        return found

    def widen(self, sizes: Integers) -> None:
        """Makes room for sizes as large as these."""
        if int(sizes.max()) >= 1 << 32 and self.sizes.dtype == np.uint32:
            self.sizes = self.sizes.astype(np.uint64)

    def resize(self, inos: Inos, sizes: Integers) -> None:
        """They have these sizes from now on."""
        self.sizes[inos] = sizes

    def total_bytes(self, inos: Inos) -> int:
        """Of all these together."""
        return int(self.sizes[inos].sum(dtype=np.int64))

    def having(self, inos: Inos, flags: int) -> Inos:
        """Those of them that have one of these flags."""
        if len(inos) == 0:
            return inos
        found: Inos = inos[self.flags[inos] & flags != 0]
        return found

    def are_cached(self, inos: Inos, *, staged: bool = False) -> Mask:
        """Which of these need no read of the origin: they are on SSD, or kept in RAM. What is in
        RAM for a moment (of a window, or spare) is, too, if `staged`. Shape (files,).
        """
        flags = STORED | KEPT_IN_RAM | (STAGED if staged else 0)
        found: Mask = (self.flags[inos] & flags != 0) & (inos != 0)
        return found

    def all_with(self, flags: int) -> Inos:
        """All files that have one of these flags. Costs a pass over all files."""
        return np.flatnonzero(self.flags & flags).astype(np.uint32)

    def mark(self, inos: Inos, flags: int) -> None:
        """For the flags' owner."""
        if len(inos):
            self.flags[inos] |= flags

    def unmark(self, inos: Inos, flags: int) -> None:
        """For the flags' owner."""
        if len(inos):
            self.flags[inos] &= ~flags & 0xFFFF

    def put(self, inos: Inos, which: int, flags: npt.NDArray[np.uint16]) -> None:
        """Of each file those flags that are among `which`: for their owner."""
        self.flags[inos] = (self.flags[inos] & (~which & 0xFFFF)) | (flags & which)

    def unmark_all(self, flags: int) -> None:
        """For the flags' owner. Costs a pass over all files."""
        for start in range(0, len(self.flags), SLICE):
            self.flags[start : start + SLICE] &= ~flags & 0xFFFF


class Ssd:
    """What is on SSD, what is to be there (the residents), and what is being fetched to it."""

    def __init__(self, files: Files, withdrawn: Withdrawn) -> None:
        self._files = files
        self._withdrawn = withdrawn
        self._residents = Residents(0)  # lets them in, and has their bytes
        self.uses: npt.NDArray[np.uint16] | None = None
        """How often each is used over the epochs that were counted; None: none were."""
        self.room_bytes = 0
        """What SSD can take now."""
        self.storing_bytes = 0
        """Of it, what unanswered commands will take."""
        self.fetch_unanswered = 0
        self._are_fleeting = False  # residents, as `admit_for_once` has it

    @property
    def has_residents(self) -> bool:
        """Whether files are to be on SSD that are not there."""
        return self._residents.held_bytes > 0

    @property
    def free_bytes(self) -> int:
        """What further residents may take."""
        return self._residents.free_bytes

    @property
    def unclaimed_bytes(self) -> int:
        """Of the room, what no resident is to take."""
        return max(0, min(self.free_bytes, self.room_bytes - self._residents.held_bytes))

    @property
    def surplus_bytes(self) -> int:
        """What the residents that no command has asked for take beyond the room."""
        return self._residents.held_bytes - self.storing_bytes - self.room_bytes

    def grow(self, count: int) -> None:
        """Makes room for inode numbers below `count`."""
        if self.uses is not None:
            self.uses = grown(self.uses, count)

    def set_room(self, room_bytes: int) -> None:
        """room_bytes: what SSD can take beyond what is stored."""
        self.room_bytes = room_bytes
        self._residents.resize(room_bytes)

    def learn(self, inos: Inos, where: npt.NDArray[np.uint8]) -> None:
        """What is on SSD (`where`: bits of `Place`), before they may get another size."""
        is_stored = where & Place.STORED != 0
        if self.has_residents:
            self._settle(np.unique(self._files.having(inos[is_stored], RESIDENT)))
        flags = np.where(is_stored, STORED, 0).astype(np.uint16)
        self._files.put(inos, STORED | GONE, flags)

    def _settle(self, residents: Inos) -> None:
        """They, each once, are residents no more: they are on SSD, or are not to be there."""
        self._residents.release(self._files.total_bytes(residents))
        self._files.unmark(residents, RESIDENT)

    def unsettle(self, inos: Inos) -> None:
        """These, each once, are to be fetched to SSD no more."""
        self._settle(self._files.having(inos, RESIDENT))
        self.cancel_fetches(inos)

    def admit_for_once(self, is_once: bool) -> None:
        """Whether a file is a resident only until it was staged: what could not be stored then is
        not fetched once more.
        """
        self._are_fleeting = is_once

    def admit(self, inos: Inos, uses: Integers | None) -> bool:
        """Makes residents of those that fit, each of these once; whether all did."""
        admitted = self._residents.admit(self._files.sizes[inos], uses)
        self._files.mark(inos[admitted], RESIDENT)
        return bool(admitted.all())

    def count(self, inos: Inos) -> None:
        """Adds the uses of an epoch whose order this is."""
        if self.uses is None:
            self.uses = np.zeros(len(self._files.flags), np.uint16)
        inside = inos[inos < len(self.uses)]
        uses = np.bincount(inside, minlength=len(self.uses))
        self.uses += np.minimum(uses, np.iinfo(np.uint16).max - self.uses).astype(np.uint16)

    def fetch(self, inos: Inos) -> None:
        """Residents that the next command asks for, each once."""
        self.storing_bytes += self._files.total_bytes(inos)
        self.fetch_unanswered += len(inos)
        self._files.mark(inos, FETCHING | STORING)

    def cancel_fetches(self, inos: Inos) -> None:
        """Takes back the fetches of these that are not answered."""
        inos = np.unique(self._files.having(inos, FETCHING))
        if len(inos) == 0:
            return
        self.fetch_unanswered -= len(inos)
        self.unstore(inos)
        self._files.unmark(inos, FETCHING)
        self._withdrawn.cancel(inos)

    def store(self, inos: Inos) -> Mask:
        """Which of these, that the next command stages, it is to store, or read from SSD."""
        if len(inos) == 0:
            return np.zeros(0, np.bool_)
        flags = self._files.flags[inos]
        store: Mask = flags & (STORED | RESIDENT) != 0
        sizes = self._files.sizes[inos].astype(np.int64)
        storing = flags & (RESIDENT | STORING | STORED) == RESIDENT
        fits = np.cumsum(np.where(storing, sizes, 0)) <= self.room_bytes - self.storing_bytes
        store &= ~storing | fits
        storing &= fits
        self.storing_bytes += int(sizes[storing].sum())
        # a file that was to be fetched ahead is staged now: one answer comes for both
        fetching = flags & FETCHING != 0
        self.fetch_unanswered -= int(np.count_nonzero(fetching))
        self._files.unmark(inos[fetching], FETCHING)
        self._files.mark(inos[storing], STORING)
        return store

    def unstore(self, inos: Inos) -> None:
        """What these take is not asked for any more."""
        storing = self._files.having(inos, STORING)
        if len(storing) == 0:
            return
        self.storing_bytes -= self._files.total_bytes(storing)
        self._files.unmark(storing, STORING)
        if self._are_fleeting:
            self._settle(np.unique(self._files.having(storing, RESIDENT)))

    def done(self, inos: Inos, results: npt.NDArray[np.uint8]) -> None:
        """What the mount has answered, each file once."""
        flags = self._files.flags[inos]
        sizes = self._files.sizes[inos].astype(np.int64)
        self.storing_bytes -= int(sizes[flags & STORING != 0].sum())
        self.fetch_unanswered -= int(np.count_nonzero(flags & FETCHING))
        no_room, gone = results == Result.NO_ROOM, results == Result.GONE
        stored = ((results == Result.STORED) | (results == Result.STAGED_AND_STORED)) & (
            flags & STORED == 0
        )
        self.room_bytes = max(0, self.room_bytes - int(sizes[stored].sum()))
        if no_room.any():
            self.room_bytes = 0  # until the mount says otherwise
        settled = (flags & RESIDENT != 0) & (stored | no_room | gone | self._are_fleeting)
        self._residents.release(int(sizes[settled].sum()))
        flags &= ~(FETCHING | STORING) & 0xFFFF
        flags[settled] &= ~RESIDENT & 0xFFFF
        flags[stored] |= STORED
        flags[gone] = (flags[gone] | GONE) & (~STORED & 0xFFFF)
        self._files.put(inos, _OF_SSD, flags)

    def stored_for_others(self, inos: Inos) -> None:
        """The mount has stored these, which no command may have asked for."""
        inos = self.missing(inos)
        self.room_bytes = max(0, self.room_bytes - self._files.total_bytes(inos))
        self._settle(self._files.having(inos, RESIDENT))
        self._files.mark(inos, STORED)

    def missing(self, inos: Inos) -> Inos:
        """Those that are not known to be on SSD, each once."""
        known = np.unique(inos[inos < len(self._files.flags)])
        found: Inos = known[self._files.flags[known] & STORED == 0]
        return found

    def evict(self, inos: Inos) -> None:
        """They are to make way; that the mount has room is for it to say."""
        self._files.unmark(inos, STORED)

    def put_back(self, inos: Inos) -> None:
        """They were to make way, and are still there."""
        self.unsettle(np.unique(inos))
        self._files.mark(inos[self._files.flags[inos] & GONE == 0], STORED)

    def void(self) -> None:
        """Nothing is being fetched or stored any more."""
        self._files.unmark_all(FETCHING | STORING)
        self.storing_bytes = self.fetch_unanswered = 0

    def clear(self) -> None:
        """Nothing is to be there besides what is."""
        self._files.unmark_all(RESIDENT)
        self._residents.release(self._residents.held_bytes)

    def check_invariants(self) -> None:
        """Costs a pass over all files: for tests."""
        flags, sizes = self._files.flags, self._files.sizes
        assert np.count_nonzero(flags & FETCHING) == self.fetch_unanswered
        storing = sizes[flags & STORING != 0]
        assert int(storing.sum(dtype=np.int64)) == self.storing_bytes
        residents = flags & RESIDENT != 0
        assert not (flags[residents] & STORED).any()
        assert int(sizes[residents].sum(dtype=np.int64)) == self._residents.held_bytes
        self._residents.check_invariants()


class Wires:
    """Armed files, whose next look-up is told (docs/HINTS.md rule 4).

    In the steady state no READ reaches the mount, and their look-ups are all that is seen. Which
    files those are: follow/wiring.py, for each job.

    INVARIANT: a file is ARMED from when the mount is told until it was looked up.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._asked: list[Inos] = []  # ARMED, and to be sent

    def are_armed(self, inos: Inos) -> Mask:
        """Which of these are."""
        found: Mask = self._files.flags[inos] & ARMED != 0
        return found

    def void(self) -> None:
        """Nothing is armed any more."""
        self._files.unmark_all(ARMED)
        self._asked.clear()

    def disarm(self, inos: Inos) -> None:
        """They were looked up."""
        self._files.unmark(inos, ARMED)

    def ask(self, inos: Inos) -> None:
        """These are to be armed next, whatever the mount has."""
        if len(inos):
            self._files.mark(inos, ARMED)
            self._asked.append(inos)

    def lay(self, wanted: Iterable[Inos]) -> list[Inos]:
        """Files to be armed now; `wanted`: of each job, armed already or not."""
        parts = [np.unique(self._files.having(inos, ARMED)) for inos in self._asked]
        self._asked.clear()
        for inos in wanted:
            new = np.unique(inos[(inos != 0) & ~self.are_armed(inos)])[:ARM_MOST]
            self._files.mark(new, ARMED)
            parts.append(new)
        return parts


def grown(array: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """An array with `count` entries at least, the new ones 0."""
    if count <= len(array):
        return array
    new = np.zeros(count, array.dtype)
    new[: len(array)] = array
    return new


def first_uses(inos: Inos) -> npt.NDArray[np.int64]:
    """Where in `inos`, of shape (uses,), each file stands first: indices in this order."""
    found: npt.NDArray[np.int64] = np.sort(np.unique(inos, return_index=True)[1])
    return found


def takes(sizes: npt.NDArray[np.int64], least_bytes: int) -> int:
    """How many of these files, from the first one on, have so many bytes together, or more; all, if
    they have less. `least_bytes`: more than 0; `sizes`: of shape (files,).
    """
    count = int(np.searchsorted(np.cumsum(sizes), least_bytes)) + 1
    return min(count, len(sizes))
