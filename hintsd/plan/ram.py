"""The page cache of one mount, as far as its jobs' windows go: what they use, what is held, what
was sent to be staged and answered, and the bytes of it all (pure).

windows.py and the modules beside it decide; here are the changes that they make.

INVARIANT: held = Σ RAM bytes of HELD files; wanted = the same over those with refs > 0; SENT and
STAGED only on HELD files, MOVING on SENT ones, KEPT_IN_RAM on HELD and STAGED ones that
are not RESIDENT; the other counts and sums are those of their flags.
INVARIANT: a file that is KEPT_IN_RAM counts as one use more in `refs`: it is wanted, in a window or
not.
INVARIANT: of the budget an eighth is usable, or two files, however often the kernel takes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fusecache.base.wire import Result
from hintsd.follow.sequence import NO_INOS, SLICE, Inos, Uses
from hintsd.plan.commands import Withdrawn
from hintsd.plan.files import (
    FAILED,
    FETCHING,
    HELD,
    KEPT_IN_RAM,
    LISTED,
    LOST,
    MOVING,
    PAGE_BYTES,
    READ,
    RESIDENT,
    SENT,
    STAGED,
    STORED,
    Files,
    Ssd,
    first_uses,
    grown,
    takes,
)
from hintsd.policies import Integers, Mask
from hintsd.policies.residents import fits

if TYPE_CHECKING:
    from hintsd.keeping.keeping import Keeping

OUTSIDE_SHARE = 10  # a tenth of the budget is left to reads outside any plan
RETRY_FIRST_S, RETRY_MOST_S = 0.5, 30.0
# What is kept is sorted anew when so many files, and such a part of it, have been passed.
SORT_LEAST, SORT_SHARE = 256, 8
# Shares of the budget: what is usable at least; what is tried first, when an epoch has lost less
# than the last one.
USABLE_SHARE, TRIED_SHARE, LOST_SHARE = 8, 16, 64
_OF_RAM = HELD | SENT | STAGED | FAILED | MOVING | KEPT_IN_RAM | READ

Bytes = npt.NDArray[np.int64]


class Ram:
    """What windows hold of it."""

    def __init__(self, files: Files, ssd: Ssd, withdrawn: Withdrawn) -> None:
        self._files, self._ssd, self._withdrawn = files, ssd, withdrawn
        self.refs = np.zeros(0, np.uint32)
        """How often windows use each; and once more if it is KEPT_IN_RAM."""
        self.limit_bytes = 0
        """The mount's budget of RAM."""
        self.budget_bytes = 0
        """The part of it that is for windows."""
        self.usable_bytes = 0
        """What of that may be held: all, but for what the kernel takes again and again."""
        self.held_bytes = self.wanted_bytes = self.kept_bytes = 0
        self.stage_unanswered = 0
        self.moving = 0
        """Files that are MOVING."""
        self._again: list[Inos] = []
        self._retry_at = 0.0
        self._retry_s = RETRY_FIRST_S

    def set_budget(self, limit_bytes: int, budget_bytes: int) -> None:
        """`limit_bytes`: the mount's; `budget_bytes`: of it, for windows, which are empty, and keep
        nothing. Held files that it cannot take go: `bytes_of` counts them no more.
        """
        if budget_bytes < self.budget_bytes:
            held = self._files.all_with(HELD)
            self.let_go(held[self.bytes_of(held) > budget_bytes])
        if budget_bytes != self.budget_bytes:
            self.usable_bytes = budget_bytes
        self.limit_bytes, self.budget_bytes = limit_bytes, budget_bytes

    def grow(self, count: int) -> None:
        """Makes room for inode numbers below `count`."""
        self.refs = grown(self.refs, count)

    def bytes_of(self, inos: Inos) -> Bytes:
        """Bytes of page cache of each file; 0 for what is never staged: outside the mount, empty,
        larger than the budget.
        """
        sizes = self._files.sizes[inos].astype(np.int64)
        pages = (sizes + (PAGE_BYTES - 1)) & ~(PAGE_BYTES - 1)
        pages[(pages > self.budget_bytes) | (inos == 0)] = 0
        return pages

    def total_bytes(self, inos: Inos) -> int:
        """Of page cache, that all these take together."""
        return int(self.bytes_of(inos).sum()) if len(inos) else 0

    @property
    def room_bytes(self) -> int:
        """What windows may want more; less than 0: they want too much."""
        return self.usable_bytes - self.wanted_bytes

    def changed(self, inos: Inos, sizes: Integers) -> Mask:
        """Whether each of these has another size than before, by which it is counted somewhere."""
        is_counted = self._files.flags[inos] & (HELD | RESIDENT | FETCHING) != 0
        found: Mask = (self._files.sizes[inos] != sizes) & (is_counted | (self.refs[inos] > 0))
        return found

    # --- windows

    def enter(self, inos: Inos, bytes_each: Bytes, fresh: Mask, *, repeats: bool) -> None:
        """A window grows by these, of which the `fresh` ones, each once, are to be held and were
        wanted by none; there is room for them.
        """
        newly = fresh & (self._files.flags[inos] & HELD == 0)
        self.held_bytes += int(bytes_each[newly].sum())
        self.wanted_bytes += int(bytes_each[fresh].sum())
        self._files.mark(inos[newly], HELD)
        self._use(inos, repeats)

    def cover(self, inos: Inos, *, repeats: bool) -> None:
        """A window grows by these, and holds none of them by itself."""
        was_spare = self.still_spare(np.unique(inos) if repeats else inos)
        self.wanted_bytes += self.total_bytes(was_spare)
        self._use(inos, repeats)

    def _use(self, inos: Inos, repeats: bool) -> None:
        if repeats:
            np.add.at(self.refs, inos, 1)
        else:
            self.refs[inos] += 1
        self.refs[0] = 0  # stands for all samples outside the mount
        self._files.unmark(inos, READ)

    def leave(
        self, inos: Inos, *, repeats: bool, keep: Callable[[Inos], None] | None = None
    ) -> Inos:
        """A window loses these; what is spare now. `keep`: keeps those of them that are to stay."""
        if repeats:
            np.subtract.at(self.refs, inos, 1)
            inos = np.unique(inos)
        else:
            self.refs[inos] -= 1
        self.refs[0] = 0
        left = self.still_spare(inos)
        if keep is not None:
            keep(left)
            left = self.still_spare(left)
        self.wanted_bytes -= self.total_bytes(left)
        is_staged = self._files.flags[left] & STAGED != 0
        self.let_go(left[~is_staged])
        spare: Inos = left[is_staged]
        return spare

    def still_spare(self, inos: Inos) -> Inos:
        """Those that are held, but in no window."""
        spare: Inos = inos[(self.refs[inos] == 0) & (self._files.flags[inos] & HELD != 0)]
        return spare

    # --- what is held

    def hold(self, inos: Inos) -> None:
        """Files that are to be held from now on, each once."""
        inos = inos[self._files.flags[inos] & HELD == 0]
        if len(inos) == 0:
            return
        bytes_each = self.bytes_of(inos)
        self.held_bytes += int(bytes_each.sum())
        self.wanted_bytes += int(bytes_each[self.refs[inos] > 0].sum())
        self._files.mark(inos, HELD)

    def let_go(self, inos: Inos) -> None:
        """Held files that are to be held no more: cancelled if sent, dropped if perhaps staged."""
        if len(inos) == 0:
            return
        self.unkeep(inos)
        flags = self._files.flags[inos]
        held = flags & HELD != 0
        inos, flags = inos[held], flags[held]
        if len(inos) == 0:
            return
        bytes_each = self.bytes_of(inos)
        self.held_bytes -= int(bytes_each.sum())
        self.wanted_bytes -= int(bytes_each[self.refs[inos] > 0].sum())
        sent = flags & SENT != 0
        self.stage_unanswered -= int(np.count_nonzero(sent))
        self._ssd.unstore(inos)
        self.moving -= int(np.count_nonzero(flags & MOVING))
        if sent.any():
            self._withdrawn.cancel(inos[sent])
        out = inos[flags & (SENT | STAGED) != 0]
        if len(out):
            self._withdrawn.drop(out)
        self._files.unmark(inos, HELD | SENT | STAGED | FAILED | MOVING)

    def read_first(self, inos: Inos) -> None:
        """A reader has missed these, and no other is to read them now: they are not staged for
        this use, be they in a window already or not yet.
        """
        if len(inos) == 0:
            return
        inos = np.unique(inos)
        refs, asked = self.refs[inos], self._files.flags[inos] & (HELD | SENT | STAGED)
        self._files.mark(inos[(refs == 0) & (asked == 0)], READ)
        self.let_go(inos[(refs == 1) & (asked == HELD)])

    def keep(self, inos: Inos, most_bytes: int) -> None:
        """Of these the first ones that are missing on SSD are KEPT_IN_RAM, as far as there is
        room.
        """
        if len(inos) == 0:
            return
        missing = _keepable(self._files, inos)
        own = self.bytes_of(missing)
        count = fits(own, most_bytes - self.kept_bytes)
        if count:
            self._files.mark(missing[:count], KEPT_IN_RAM)
            self.refs[missing[:count]] += 1
            self.kept_bytes += int(own[:count].sum())

    def unkeep(self, inos: Inos) -> Inos:
        """They are kept no more; which of them no window wants either: they are spare."""
        kept = self._files.having(inos, KEPT_IN_RAM)
        if len(kept) == 0:
            return kept
        self._files.unmark(kept, KEPT_IN_RAM)
        self.refs[kept] -= 1
        self.kept_bytes -= self.total_bytes(kept)
        spare: Inos = kept[self.refs[kept] == 0]
        self.wanted_bytes -= self.total_bytes(spare)
        return spare

    def kept(self) -> Inos:
        """All that are. Costs a pass over all files."""
        return self._files.all_with(KEPT_IN_RAM) if self.kept_bytes else NO_INOS

    # --- staging

    def send(self, inos: Inos) -> npt.NDArray[np.uint8]:
        """Files that are to be staged by the next command; whether each is to be on SSD."""
        self._files.mark(inos, SENT)
        self.stage_unanswered += len(inos)
        store: npt.NDArray[np.uint8] = self._ssd.store(inos).astype(np.uint8)
        return store

    def move(self, inos: Inos) -> None:
        """Of those that were sent, each once: they are on their way to the log."""
        self._files.mark(inos, MOVING)
        self.moving += len(inos)

    def done(self, inos: Inos, results: npt.NDArray[np.uint8], now: float) -> Inos:
        """What the mount has answered: `done` frames (docs/WIRE.md). What of that was staged and
        is RECLAIMED: `Reclaimed` is to know.
        """
        reclaimed = NO_INOS
        known = (inos > 0) & (inos < len(self._files.flags))
        inos, results = inos[known], results[known]
        while len(inos):
            first = first_uses(inos)
            taken = self._take(inos[first], results[first], now)
            reclaimed = np.concatenate([reclaimed, taken])
            inos, results = np.delete(inos, first), np.delete(results, first)
        return reclaimed

    def _take(self, inos: Inos, results: npt.NDArray[np.uint8], now: float) -> Inos:
        """Answers about different files. One of two about one file is taken after the other."""
        flags = self._files.flags[inos]
        taken = results == Result.RECLAIMED
        lost: Inos = inos[taken & (flags & (SENT | STAGED) == STAGED)]
        inos, results = inos[~taken], results[~taken]
        self._ssd.done(inos, results)
        flags = self._files.flags[inos]
        sent = flags & SENT != 0
        self.stage_unanswered -= int(np.count_nonzero(sent))
        self.moving -= int(np.count_nonzero(flags & MOVING))

        no_room, gone = results == Result.NO_ROOM, results == Result.GONE
        staged = (
            (results == Result.STAGED) | (results == Result.STAGED_AND_STORED) | (no_room & sent)
        )
        failed = (
            (results == Result.ORIGIN_ERROR)
            | (results == Result.NOT_PUSHED)
            | (results == Result.STORED)
        )
        flags &= ~(SENT | MOVING) & 0xFFFF
        flags[sent | staged | gone] &= ~FAILED & 0xFFFF  # no answer to a `fetch` ends a retry
        is_held = flags & HELD != 0
        flags[staged & is_held] |= STAGED
        again = failed & sent & is_held
        flags[again] |= FAILED
        self._files.put(inos, _OF_RAM, flags)
        unwanted = inos[staged & ~is_held]
        if len(unwanted):  # crossed our cancel
            self._withdrawn.drop(unwanted)
        self.let_go(inos[gone & is_held])
        if again.any():
            self._again.append(inos[again])
            self._retry_at = max(self._retry_at, now + self._retry_s)
        elif staged.any():
            self._retry_s = RETRY_FIRST_S
        return lost

    def retry(self, now: float, most: int) -> Inos:
        """Wanted files whose staging has failed, once it is time to try again; the others later."""
        if not self._again or now < self._retry_at or most <= 0:
            return NO_INOS
        inos = np.unique(np.concatenate(self._again))
        self._again.clear()
        failed = self._files.flags[inos] & (HELD | FAILED | SENT) == HELD | FAILED
        wanted: Inos = inos[failed & (self.refs[inos] > 0)]
        if len(wanted) > most:
            self._again.append(wanted[most:])
            wanted = wanted[:most]
        self._files.unmark(wanted, FAILED)
        self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
        return wanted

    def void(self) -> None:
        """Nothing is sent or staged any more."""
        for start in range(0, len(self.refs), SLICE):
            part = slice(start, start + SLICE)
            self.refs[part] -= self._files.flags[part] & KEPT_IN_RAM != 0
        self._files.unmark_all(_OF_RAM)
        self.held_bytes = self.wanted_bytes = self.kept_bytes = 0
        self.stage_unanswered = self.moving = 0
        self._again.clear()

    def check_invariants(self) -> None:
        """Costs a pass over all files: for tests."""
        flags = self._files.flags
        held = self._files.all_with(HELD)
        bytes_each = self.bytes_of(held)
        assert int(bytes_each.sum()) == self.held_bytes
        assert int(bytes_each[self.refs[held] > 0].sum()) == self.wanted_bytes
        assert self.wanted_bytes <= self.budget_bytes
        assert self.budget_bytes // USABLE_SHARE <= self.usable_bytes <= self.budget_bytes
        kept = self._files.all_with(KEPT_IN_RAM)
        assert (flags[kept] & (HELD | STAGED | RESIDENT) == HELD | STAGED).all()
        assert (self.refs[kept] > 0).all()
        assert self.total_bytes(kept) == self.kept_bytes
        assert np.count_nonzero(flags & (SENT | STAGED)) == np.count_nonzero(
            flags[held] & (SENT | STAGED)
        )
        sent = flags & SENT != 0
        assert np.count_nonzero(sent) == self.stage_unanswered
        moving = flags & MOVING != 0
        assert not (moving & ~sent).any()
        assert np.count_nonzero(moving) == self.moving


def _keepable(files: Files, inos: Inos) -> Inos:
    """Those that are staged, and neither kept, nor on SSD, nor to be there for other hosts."""
    found: Inos = inos[files.flags[inos] & (STAGED | STORED | RESIDENT | KEPT_IN_RAM) == STAGED]
    return found[~files.are_owned(found)]


class Kept:
    """Which of the files that readers pass, and SSD will not have, stay for good: as many as there
    is room for. Where all are used equally often the first ones: to replace one gains nothing
    (MinIO). Else those that are used soonest, as far as orders tell, and are expected to be beyond
    (`next_uses`): what would be used later makes way (Belady's MIN, with bypass).
    """

    def __init__(self, files: Files, ram: Ram, spare: Spare, keeping: Keeping | None) -> None:
        """`keeping`: is told what readers pass."""
        self._files, self._ram, self._spare, self._keeping = files, ram, spare, keeping
        self.most_bytes = 0
        """Of RAM, that they may take."""
        self._next_uses: Callable[[Inos], Uses] | None = None
        self._latest = NO_INOS  # those that are kept, the one that is used last first ...
        self._used_at = np.zeros(0)  # ... and when
        self._passed = 0  # files that were taken since they were sorted
        self._is_stale = True

    def limit(self, most_bytes: int) -> None:
        """So much may be kept from now on."""
        self.most_bytes = most_bytes

    def choose_by(self, next_uses: Callable[[Inos], Uses] | None) -> None:
        """When each of some files is used next; None: all are used equally often."""
        self._next_uses = next_uses

    def sort_anew(self) -> None:
        """It is known now that they are used at other times."""
        self._is_stale = True

    def take(self, inos: Inos) -> None:
        """Readers have passed these; a file may stand here twice."""
        if self._keeping is not None:
            self._keeping.read(inos, self._ram.bytes_of(inos))
        if self._next_uses is None:
            self._ram.keep(inos, self.most_bytes)
            return
        self._passed += len(inos)
        coming = _keepable(self._files, np.unique(inos))
        room_bytes = self.most_bytes - self._ram.kept_bytes
        if self._ram.total_bytes(coming) > room_bytes:
            uses = self._next_uses(coming)
            order = np.argsort(uses, kind="stable")
            coming = coming[order]
            coming = coming[: self._make_way(coming, uses[order], room_bytes)]
        self._ram.keep(coming, self.most_bytes)

    def _make_way(self, coming: Inos, uses: Uses, room_bytes: int) -> int:
        """How many of these are to be kept, which are used at `uses` (ascending); those that are
        used later than they make way for them.
        """
        self._sort()
        count = fits(self._ram.bytes_of(coming), max(0, room_bytes))
        is_kept = self._files.flags[self._latest] & KEPT_IN_RAM != 0
        self._latest, self._used_at = self._latest[is_kept], self._used_at[is_kept]
        pairs = min(len(coming) - count, len(self._latest))
        replaces = self._used_at[:pairs] > uses[count : count + pairs]
        leaving = int(np.count_nonzero(replaces))
        self._spare.add(self._ram.unkeep(self._latest[:leaving]))
        self._latest, self._used_at = self._latest[leaving:], self._used_at[leaving:]
        return count + leaving

    def _sort(self) -> None:
        if not self._is_stale and self._passed < max(SORT_LEAST, len(self._latest) // SORT_SHARE):
            return
        assert self._next_uses is not None
        kept = self._ram.kept()
        uses = self._next_uses(kept)
        order = np.argsort(-uses, kind="stable")
        self._latest, self._used_at = kept[order], uses[order]
        self._is_stale, self._passed = False, 0

    def shrink(self, uses: Integers | None) -> None:
        """What is kept beyond the limit is spare: what is used last goes first, or least often,
        where `uses` of all files are known and nothing else is.
        """
        surplus = self._ram.kept_bytes - self.most_bytes
        if surplus <= 0:
            return
        kept = self._ram.kept()
        if self._next_uses is not None:
            kept = kept[np.argsort(-self._next_uses(kept), kind="stable")]
        elif uses is not None:
            kept = kept[np.argsort(uses[kept], kind="stable")]
        count = takes(self._ram.bytes_of(kept), surplus)
        self._spare.add(self._ram.unkeep(kept[:count]))

    def void(self) -> None:
        """Nothing is kept any more."""
        self._latest, self._used_at, self._is_stale = NO_INOS, np.zeros(0), True


class Spare:
    """What has left the last window, or is kept no more: it stays until its room is needed, or no
    job has it. It is the mount's, whichever job's window it was in.

    INVARIANT: each file that is held and not wanted stands here; what stands here may be wanted
    again, or gone. A file stands here once, and is LISTED while it does.
    """

    def __init__(self, files: Files, ram: Ram) -> None:
        self._files, self._ram = files, ram
        self._parts: deque[Inos] = deque()  # the oldest first

    def add(self, inos: Inos) -> None:
        """These are spare now, each once."""
        inos = inos[self._files.flags[inos] & LISTED == 0]
        if len(inos):
            self._files.mark(inos, LISTED)
            self._parts.append(inos)

    def reclaim(self) -> None:
        """Drops the oldest until all that is held fits."""
        ram = self._ram
        while ram.held_bytes > ram.usable_bytes and self._parts:
            part = self._parts.popleft()
            self._files.unmark(part, LISTED)
            spare = ram.still_spare(part)
            count = takes(ram.bytes_of(spare), ram.held_bytes - ram.usable_bytes)
            ram.let_go(spare[:count])
            if count < len(spare):
                self._files.mark(spare[count:], LISTED)
                self._parts.appendleft(spare[count:])

    def let_go_but(self, wanted: Mask) -> None:
        """Drops those that are not wanted; `wanted`: of each inode number."""
        spare = self._ram.still_spare(self._take())
        stays = wanted[spare]
        self._ram.let_go(spare[~stays])
        self.add(spare[stays])

    def void(self) -> None:
        """Nothing is staged any more."""
        self._take()

    def _take(self) -> Inos:
        inos = np.concatenate([NO_INOS, *self._parts])
        self._parts.clear()
        self._files.unmark(inos, LISTED)
        return inos

    def check_invariants(self) -> None:
        """Costs a pass over all files: for tests."""
        listed = np.sort(np.concatenate([NO_INOS, *self._parts]))
        assert np.array_equal(listed, self._files.all_with(LISTED))
        held = self._files.all_with(HELD)
        assert (self._files.flags[self._ram.still_spare(held)] & LISTED != 0).all()


class Reclaimed:
    """What the kernel takes of what is held, and SSD does not have: it is known to be lost, and
    what is taken again and again is withheld from the windows.

    INVARIANT: a file is LOST from when it was taken until little is taken any more.
    """

    def __init__(self, files: Files, ram: Ram) -> None:
        self._files, self._ram = files, ram
        self.count = 0
        """Files that were taken, each as often as it was."""
        self._wanted: list[Inos] = []  # of those, what windows want
        self._lost_bytes = 0  # in this epoch
        self._tried_bytes = 0  # given back last
        self._is_marked = False  # a file is LOST

    @property
    def withheld_bytes(self) -> int:
        """What of the budget is not usable."""
        return self._ram.budget_bytes - self._ram.usable_bytes

    def lose(self, inos: Inos) -> None:
        """Staged files that were taken, each once: what no window wants is held no more, the
        others are to be staged again. What is taken a second time is more than there is.
        """
        ram = self._ram
        again_bytes = ram.total_bytes(self._files.having(inos, LOST))
        two_bytes = 2 * int(ram.bytes_of(inos).max(initial=0))  # the reader's file, and the next
        least_bytes = min(max(ram.budget_bytes // USABLE_SHARE, two_bytes), ram.usable_bytes)
        ram.usable_bytes = max(ram.usable_bytes - again_bytes, least_bytes)
        self._note(inos)
        ram.unkeep(inos)
        is_wanted = ram.refs[inos] > 0
        ram.let_go(inos[~is_wanted])
        self._files.unmark(inos[is_wanted], STAGED)
        self._wanted.append(inos[is_wanted])

    def read(self, inos: Inos) -> None:
        """READs of these have come: one that is KEPT_IN_RAM had been taken, and is there again."""
        if len(kept := self._files.having(inos, KEPT_IN_RAM)):
            self._note(np.unique(kept))

    def _note(self, inos: Inos) -> None:
        self.count += len(inos)
        self._lost_bytes += self._ram.total_bytes(inos)
        self._files.mark(inos, LOST)
        self._is_marked = self._is_marked or len(inos) > 0

    def take(self, most: int) -> Inos:
        """Files to be staged again, as they were told, `most` of them; the others later."""
        if not self._wanted or most <= 0:
            return NO_INOS
        inos = np.concatenate(self._wanted)
        self._wanted.clear()
        is_open = self._files.flags[inos] & (HELD | SENT | STAGED | FAILED) == HELD
        wanted: Inos = inos[is_open & (self._ram.refs[inos] > 0)]
        wanted = wanted[first_uses(wanted)]
        if len(wanted) > most:
            self._wanted.append(wanted[most:])
        return wanted[:most]

    def begin_epoch(self) -> None:
        """An epoch has begun. If little was taken in the one before, more is tried."""
        ram = self._ram
        is_calm = self._lost_bytes <= ram.budget_bytes // LOST_SHARE
        self._lost_bytes = 0
        if not is_calm:
            self._tried_bytes = 0
        elif self.withheld_bytes:
            self._tried_bytes = max(2 * self._tried_bytes, ram.budget_bytes // TRIED_SHARE)
            ram.usable_bytes = min(ram.usable_bytes + self._tried_bytes, ram.budget_bytes)
        if is_calm and not self.withheld_bytes and self._is_marked:
            self._tried_bytes = 0
            self._files.unmark_all(LOST)
            self._is_marked = False

    def void(self) -> None:
        """Nothing is staged any more."""
        self._wanted.clear()
