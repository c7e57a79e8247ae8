"""The files of one mount, by inode number: their sizes, what is known of each, what was sent about
it, and the bytes of it all (pure).

hintsd/planner.py and the modules beside it decide; here is what they decide about, and the changes
of state that they share: a file is sent, answered, let go. Who sets a flag keeps its sum in step.

INVARIANT: held = Σ RAM bytes of HELD files; wanted = the same over those with refs > 0; SENT and
STAGED only on HELD files, MOVING on SENT ones, KEPT on HELD and STAGED ones that
are not RESIDENT; the other counts and sums are those of their flags.
INVARIANT: a file that is KEPT counts as one use more in `refs`: it is wanted, in a window or not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hintsd.policies import Integers, Mask
from hintsd.policies.frequency import Frequency
from hintsd.sequence import CHUNK, NO_INOS, Inos

PAGE_BYTES = 4096
RETRY_FIRST_S, RETRY_MOST_S = 0.5, 30.0

STORED, RESIDENT, HELD, SENT, STAGED, FETCHING, FAILED, GONE, ARMED, STORING, MOVING, KEPT, READ = (
    1 << bit for bit in range(13)
)
PINNED = 1 << 13
DONE_STAGED, DONE_STORED, DONE_BOTH, DONE_ERROR, DONE_GONE, DONE_NO_ROOM, DONE_NOT_PUSHED = range(
    1, 8
)


class Files:
    """Arrays have one entry for each inode number; entry 0 stands for all outside the mount."""

    def __init__(self) -> None:
        self.sizes: npt.NDArray[Any] = np.zeros(0, np.uint32)
        """Bytes; 0: never learned, and so not prefetched."""
        self.flags = np.zeros(0, np.uint16)
        self.refs = np.zeros(0, np.uint32)
        """How often windows use each; and once more if it is KEPT."""
        self.uses: npt.NDArray[np.uint16] | None = None
        """How often each is used over the epochs that were counted; None: none were."""
        self.limit_bytes = 0
        """The mount's budget of RAM."""
        self.budget_bytes = 0
        """The part of it that is for windows."""
        self.held_bytes = self.wanted_bytes = self.kept_bytes = 0
        self.residents = Frequency(0)
        """The policy that lets files in that are to live on SSD, and the bytes of those that are
        RESIDENT."""
        self.room_bytes = 0
        """What SSD can take now."""
        self.storing_bytes = 0
        """Of it, what unanswered commands will take."""
        self.stage_unanswered = self.fetch_unanswered = 0
        self.moving = 0
        """Files that are MOVING."""
        self.cancels: list[Inos] = []
        """To be sent with the next commands, as `drops`."""
        self.drops: list[Inos] = []
        self._again: list[Inos] = []
        self._retry_at = 0.0
        self._retry_s = RETRY_FIRST_S

    def grow(self, count: int) -> None:
        """Makes room for inode numbers below `count`."""
        if count > len(self.flags):
            for name in ("sizes", "flags", "refs", "uses"):
                old = getattr(self, name)
                if old is not None:
                    new = np.zeros(count, old.dtype)
                    new[: len(old)] = old
                    setattr(self, name, new)

    def widen(self, sizes: Integers) -> None:
        """Makes room for sizes as large as these."""
        if int(sizes.max()) >= 1 << 32 and self.sizes.dtype == np.uint32:
            self.sizes = self.sizes.astype(np.uint64)

    def changed(self, inos: Inos, sizes: Integers) -> Mask:
        """Whether each of these has another size than before, by which it is counted somewhere."""
        flags = self.flags[inos]
        found: Mask = (self.sizes[inos] != sizes) & (flags & (HELD | RESIDENT | FETCHING) != 0)
        return found

    def learn(self, inos: Inos, sizes: Integers, stored: npt.NDArray[np.uint8]) -> None:
        """Sizes, and what is on SSD (`stored` is not 0). Those `changed` were let go and unsettled
        before.
        """
        flags = self.flags[inos]
        is_stored = stored != 0
        settled = is_stored & (flags & RESIDENT != 0)
        self.residents.release(int(self.sizes[inos[settled]].sum(dtype=np.int64)))
        flags[settled] &= ~RESIDENT & 0xFFFF
        flags &= ~(STORED | GONE) & 0xFFFF
        self.flags[inos] = flags | np.where(is_stored, STORED, 0).astype(np.uint16)
        self.sizes[inos] = sizes

    def unsettle(self, inos: Inos) -> None:
        """These are to be fetched to SSD no more (their sizes are about to change)."""
        residents = inos[self.flags[inos] & RESIDENT != 0]
        self.residents.release(int(self.sizes[residents].sum(dtype=np.int64)))
        self.flags[residents] &= ~RESIDENT & 0xFFFF
        self.cancel_fetches(inos[self.flags[inos] & FETCHING != 0])

    def done(self, inos: Inos, results: npt.NDArray[np.uint8], now: float) -> None:
        """What the mount has answered: `done` frames (docs/WIRE.md)."""
        known = (inos > 0) & (inos < len(self.flags))
        inos, first = np.unique(inos[known], return_index=True)
        results = results[known][first]
        flags = self.flags[inos]
        sizes = self.sizes[inos].astype(np.int64)
        sent, fetching = flags & SENT != 0, flags & FETCHING != 0
        self.stage_unanswered -= int(np.count_nonzero(sent))
        self.fetch_unanswered -= int(np.count_nonzero(fetching))
        storing = flags & STORING != 0
        self.storing_bytes -= int(sizes[storing].sum())
        self.moving -= int(np.count_nonzero(flags & MOVING))

        no_room = results == DONE_NO_ROOM
        staged = (results == DONE_STAGED) | (results == DONE_BOTH) | (no_room & sent)
        stored = ((results == DONE_STORED) | (results == DONE_BOTH)) & (flags & STORED == 0)
        failed = (results == DONE_ERROR) | (results == DONE_NOT_PUSHED) | (results == DONE_STORED)
        gone = results == DONE_GONE
        self.room_bytes = max(0, self.room_bytes - int(sizes[stored].sum()))
        if no_room.any():
            self.room_bytes = 0  # until the mount says otherwise
        settled = (flags & RESIDENT != 0) & (stored | no_room | gone)
        self.residents.release(int(sizes[settled].sum()))

        flags &= ~(SENT | FETCHING | STORING | MOVING) & 0xFFFF
        flags[sent | staged | gone] &= ~FAILED & 0xFFFF  # no answer to a `fetch` ends a retry
        flags[settled] &= ~RESIDENT & 0xFFFF
        flags[stored] |= STORED
        flags[staged & (flags & HELD != 0)] |= STAGED
        again = failed & sent & (flags & HELD != 0)
        flags[again] |= FAILED
        flags[gone] = (flags[gone] | GONE) & (~STORED & 0xFFFF)
        self.flags[inos] = flags
        unwanted = inos[staged & (flags & HELD == 0)]
        if len(unwanted):  # crossed our cancel
            self.drops.append(unwanted)
        self.let_go(inos[gone & (flags & HELD != 0)])
        if again.any():
            self._again.append(inos[again])
            self._retry_at = max(self._retry_at, now + self._retry_s)
        elif staged.any():
            self._retry_s = RETRY_FIRST_S

    def void(self) -> None:
        """Nothing is sent, staged or armed any more."""
        for start in range(0, len(self.flags), CHUNK):
            part = slice(start, start + CHUNK)
            self.refs[part] -= self.flags[part] & KEPT != 0
            self.flags[part] &= (
                ~(HELD | SENT | STAGED | FETCHING | FAILED | ARMED | STORING | MOVING | KEPT | READ)
                & 0xFFFF
            )
        self.held_bytes = self.wanted_bytes = self.storing_bytes = self.kept_bytes = 0
        self.stage_unanswered = self.fetch_unanswered = self.moving = 0
        self._again.clear()
        self.cancels.clear()
        self.drops.clear()

    def clear(self) -> None:
        """Nobody plans any more."""
        self.drops.clear()  # nobody needs the room: pages stay, under the mount's own budget
        residents = self.flags & RESIDENT != 0
        self.flags[residents] &= ~RESIDENT & 0xFFFF
        self.residents.held_bytes = 0
        for start in range(0, len(self.flags), CHUNK):
            self.flags[start : start + CHUNK] &= ~ARMED & 0xFFFF

    def ram_bytes(self, inos: Inos) -> npt.NDArray[np.int64]:
        """Bytes of page cache of each file; 0 for what is never staged: outside the mount, empty,
        larger than the budget.
        """
        sizes = self.sizes[inos].astype(np.int64)
        pages = (sizes + (PAGE_BYTES - 1)) & ~(PAGE_BYTES - 1)
        pages[(pages > self.budget_bytes) | (inos == 0)] = 0
        return pages

    def let_go(self, inos: Inos) -> None:
        """Held files that are to be held no more: cancelled if sent, dropped if perhaps staged."""
        self.unkeep(inos)
        flags = self.flags[inos]
        held = flags & HELD != 0
        inos, flags = inos[held], flags[held]
        if len(inos) == 0:
            return
        bytes_each = self.ram_bytes(inos)
        self.held_bytes -= int(bytes_each.sum())
        self.wanted_bytes -= int(bytes_each[self.refs[inos] > 0].sum())
        sent = flags & SENT != 0
        self.stage_unanswered -= int(np.count_nonzero(sent))
        storing = flags & STORING != 0
        self.storing_bytes -= int(self.sizes[inos[storing]].sum(dtype=np.int64))
        self.moving -= int(np.count_nonzero(flags & MOVING))
        if sent.any():
            self.cancels.append(inos[sent])
        out = inos[flags & (SENT | STAGED) != 0]
        if len(out):
            self.drops.append(out)
        self.flags[inos] &= ~(HELD | SENT | STAGED | FAILED | STORING | MOVING) & 0xFFFF

    def read_first(self, inos: Inos) -> None:
        """A reader has missed these, and nobody else is to read them now: they are not staged for
        this use, be they in a window already or not yet.
        """
        asked = HELD | SENT | STAGED
        self.flags[inos[(self.refs[inos] == 0) & (self.flags[inos] & asked == 0)]] |= READ
        self.let_go(inos[(self.refs[inos] == 1) & (self.flags[inos] & asked == HELD)])

    def keep(self, inos: Inos, most_bytes: int) -> None:
        """Of these the first ones that are missing on SSD are KEPT, as far as there is room."""
        missing = inos[self.flags[inos] & (STAGED | STORED | RESIDENT | KEPT) == STAGED]
        total = np.cumsum(self.ram_bytes(missing))
        count = int(np.searchsorted(total, most_bytes - self.kept_bytes, "right"))
        if count:
            self.flags[missing[:count]] |= KEPT
            self.refs[missing[:count]] += 1
            self.kept_bytes += int(total[count - 1])

    def unkeep(self, inos: Inos) -> Inos:
        """They are kept no more; which of them no window wants either: they are spare."""
        kept = inos[self.flags[inos] & KEPT != 0]
        self.flags[kept] &= ~KEPT & 0xFFFF
        self.refs[kept] -= 1
        self.kept_bytes -= int(self.ram_bytes(kept).sum())
        spare: Inos = kept[self.refs[kept] == 0]
        self.wanted_bytes -= int(self.ram_bytes(spare).sum())
        return spare

    def kept(self) -> Inos:
        """All that are. Costs a pass over all files."""
        return np.flatnonzero(self.flags & KEPT).astype(np.uint32)

    def still_spare(self, inos: Inos) -> Inos:
        """Those that are held, but in no window."""
        spare: Inos = inos[(self.refs[inos] == 0) & (self.flags[inos] & HELD != 0)]
        return spare

    def mark_sent(self, inos: Inos) -> npt.NDArray[np.uint8]:
        """Files that are to be staged by the next command; whether each is to be on SSD."""
        self.flags[inos] |= SENT
        self.stage_unanswered += len(inos)
        flags = self.flags[inos]
        store = flags & (STORED | RESIDENT) != 0
        sizes = self.sizes[inos].astype(np.int64)
        storing = (flags & (RESIDENT | STORING) == RESIDENT) & (flags & STORED == 0)
        fits = np.cumsum(np.where(storing, sizes, 0)) <= self.room_bytes - self.storing_bytes
        store &= ~storing | fits
        storing &= fits
        self.storing_bytes += int(sizes[storing].sum())
        # a file that was to be fetched ahead is staged now: one answer comes for both
        fetching = flags & FETCHING != 0
        self.fetch_unanswered -= int(np.count_nonzero(fetching))
        self.flags[inos[fetching]] &= ~FETCHING & 0xFFFF
        self.flags[inos[storing]] |= STORING
        marked: npt.NDArray[np.uint8] = store.astype(np.uint8)
        return marked

    def retry(self, now: float, most: int) -> Inos:
        """Wanted files whose staging has failed, once it is time to try again; the others later."""
        if not self._again or now < self._retry_at or most <= 0:
            return NO_INOS
        inos = np.unique(np.concatenate(self._again))
        self._again.clear()
        failed = self.flags[inos] & (HELD | FAILED | SENT) == HELD | FAILED
        wanted: Inos = inos[failed & (self.refs[inos] > 0)]
        if len(wanted) > most:
            self._again.append(wanted[most:])
            wanted = wanted[:most]
        self.flags[wanted] &= ~FAILED & 0xFFFF
        self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
        return wanted

    def cancel_fetches(self, inos: Inos) -> None:
        """Takes back the fetches of these that are not answered."""
        inos = np.unique(inos[self.flags[inos] & FETCHING != 0])
        if len(inos) == 0:
            return
        self.fetch_unanswered -= len(inos)
        storing = inos[self.flags[inos] & STORING != 0]
        self.storing_bytes -= int(self.sizes[storing].sum(dtype=np.int64))
        self.flags[inos] &= ~(FETCHING | STORING) & 0xFFFF
        self.cancels.append(inos)

    def check_invariants(self) -> None:
        """Costs a pass over all files: for tests."""
        flags = self.flags
        held = np.flatnonzero(flags & HELD).astype(np.uint32)
        bytes_each = self.ram_bytes(held)
        assert int(bytes_each.sum()) == self.held_bytes
        assert int(bytes_each[self.refs[held] > 0].sum()) == self.wanted_bytes
        assert self.wanted_bytes <= self.budget_bytes
        kept = self.kept()
        assert (flags[kept] & (HELD | STAGED | RESIDENT) == HELD | STAGED).all()
        assert (self.refs[kept] > 0).all()
        assert int(self.ram_bytes(kept).sum()) == self.kept_bytes
        assert np.count_nonzero(flags & (SENT | STAGED)) == np.count_nonzero(
            flags[held] & (SENT | STAGED)
        )
        sent = flags & SENT != 0
        assert np.count_nonzero(sent) == self.stage_unanswered
        moving = flags & MOVING != 0
        assert not (moving & ~sent).any()
        assert np.count_nonzero(moving) == self.moving
        assert np.count_nonzero(flags & FETCHING) == self.fetch_unanswered
        storing = self.sizes[flags & STORING != 0]
        assert int(storing.sum(dtype=np.int64)) == self.storing_bytes
        residents = flags & RESIDENT != 0
        assert not (flags[residents] & STORED).any()
        assert int(self.sizes[residents].sum(dtype=np.int64)) == self.residents.held_bytes
        self.residents.check_invariants()
