"""Which files are to live on SSD, and their fetching ahead of the windows (docs/HINTS.md rule 2;
pure).

hintsd/policies/residents.py lets files in, those that are used first or, where files are used
unequally often and not all fit, those that are used most: uses are counted over a horizon of
epochs. Those let in are RESIDENT (files.py); what is in no window is fetched. Where scores or
repeats say that others are used sooner, what is stored makes way for them (`Exchange`).

INVARIANT: what is fetched fits into the SSD's room beside all that is being stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from fusecache.base.wire import Result
from hintsd.follow.sequence import NO_INOS, Inos, Uses
from hintsd.plan.commands import COMMAND_INOS_MOST, Command, commands_of
from hintsd.plan.files import (
    FETCHING,
    GONE,
    HELD,
    KEPT_IN_RAM,
    PAGE_BYTES,
    PINNED,
    RESIDENT,
    SENT,
    STAGED,
    STORED,
    STORING,
    Files,
    Ssd,
    first_uses,
    takes,
)
from hintsd.plan.job import Job
from hintsd.policies import Mask
from hintsd.policies.residents import fits

FETCH_UNANSWERED_MOST = 1 << 14
WALK_MOST = 1 << 15  # positions that fetching ahead looks at in one decide()
HORIZON_SAMPLES_MOST = 1 << 26  # over so many accesses uses are counted, when they are uneven,
HORIZON_EPOCHS_MOST = 1 << 10  # and over so many epochs
HORIZON_WAIT_S = 60.0
# What makes way is told when it is so many files, and such a part of those that are stored: each
# time costs the mount a transaction. They are sorted anew when such a part of them has come.
EVICT_LEAST, EVICT_SHARE, SORT_SHARE = 8, 64, 8
# Of what is stored, so much may be evicted that is not used; half of it counts so much later.
UNUSED_SHARE, UNUSED_S = 16, 1.0


class Placement:
    """Of one mount's files."""

    def __init__(self, files: Files, ssd: Ssd) -> None:
        self._files, self._ssd = files, ssd
        self.exchange = Exchange(files, ssd)
        """What of it makes way for others."""
        self._short_of_bytes: int | None = None  # free room when residents did not fit
        self._fetching: deque[Inos] = deque()
        # whether the mount knows pins, and whether no other one's are to be heeded
        self._knows_pins = self._others_may_go = False
        self._pins_told = 0  # the list that the mount goes by
        self._pins = self._pins_awaited = 0  # the last one that was sent; that must be heard of
        self._pinned_for: tuple[bool, list[Job]] = False, []

    @property
    def is_short(self) -> bool:
        """Whether files are to be missing on SSD."""
        return self._short_of_bytes is not None

    def set_pins(self, is_known: bool, told: int, *, others_may_go: bool, evicts: bool) -> None:
        """Whether the mount's server knows pins, and by which list it goes; whether no other
        mount's files on its cache directory have to stay; whether it evicts what it is told to.
        """
        self.exchange.allow(evicts and others_may_go)
        self._knows_pins, self._pins_told = is_known, told
        self._others_may_go = others_may_go

    def void(self) -> None:
        """Nothing is being fetched, pinned or evicted any more."""
        self._fetching.clear()
        self.unpinned()
        self.exchange.void()

    def cancel(self) -> None:
        """Takes back all fetches that are not answered."""
        self._ssd.cancel_fetches(np.concatenate([NO_INOS, *self._fetching]))

    @property
    def is_room_known(self) -> bool:
        """Whether the mount has said what room there is beside what is pinned."""
        return self._pins_awaited in (0, self._pins_told)

    def unpinned(self) -> None:
        """The mount has forgotten its pins, or will before it hears of others."""
        self._pinned_for, self._pins_awaited = (False, []), 0
        self._files.unmark_all(PINNED)

    def pin(self, jobs: Iterable[Job]) -> list[Command]:
        """What is to stay on SSD: the datasets of all live jobs, if they are others than before."""
        live = [job for job in jobs if job.live]
        wanted = self._others_may_go, live
        if not live or not self._knows_pins or wanted == self._pinned_for:
            return []
        is_told = self._pinned_for[1] != [] and self._pinned_for[0] == self._others_may_go
        self._pinned_for = wanted
        was = self._files.all_with(PINNED)
        self._files.unmark_all(PINNED)
        for job in live:
            self._files.mark(job.dataset, PINNED)
        inos = self._files.all_with(PINNED)
        if is_told and np.array_equal(was, inos):
            return []
        self._pins += 1
        self._pins_awaited = self._pins
        commands = []
        for start in range(0, max(1, len(inos)), COMMAND_INOS_MOST):
            part = inos[start : start + COMMAND_INOS_MOST]
            last = start + COMMAND_INOS_MOST >= len(inos)
            fields = {"number": self._pins, "others": self._others_may_go, "last": last}
            commands.append(Command("pin", part, fields={"inos": part, **fields}))
        return commands

    def set_room(self, room_bytes: int, jobs: Iterable[Job]) -> None:
        """room_bytes: what SSD can take beyond what is stored. Where residents do not fit any more
        (a log has its slack now), all are chosen anew that no command has asked for.
        """
        ssd = self._ssd
        ssd.set_room(room_bytes)
        least = max(room_bytes // 64, PAGE_BYTES)
        if ssd.surplus_bytes > least:
            waiting = self._files.all_with(RESIDENT)
            ssd.unsettle(waiting[self._files.flags[waiting] & STORING == 0])
        elif self._short_of_bytes is None or ssd.free_bytes - self._short_of_bytes <= least:
            return
        if self.exchange.is_on:  # who is staged next may have it
            for job in jobs:
                if job.live:
                    self._place_owned(job)
            return
        self._short_of_bytes = None
        for job in jobs:
            job.placed.demand()
            job.placed.fetch_from(job.window.begin)

    def place(self, jobs: Iterable[Job], now: float) -> None:
        """Chooses the residents among the files of orders that are new."""
        for job in jobs:
            if not (job.live and job.placed.is_due):
                continue
            current = job.sequence.epoch_of(job.window.begin)
            waiting = now - job.opened_at < HORIZON_WAIT_S
            if waiting and self.horizon_epoch(job, current) is not None:
                continue
            job.placed.settle()
            self._place_owned(job)
            if self.exchange.is_on and self.is_short:
                continue
            if self._ssd.uses is not None and len(job.placed.counted) > 1:  # uneven
                self._place_by_use(job)
            else:
                self._place_by_first_use(job)

    def _missing(self, inos: Inos) -> Inos:
        """Those that could become residents."""
        inos = inos[self._files.flags[inos] & (STORED | RESIDENT | GONE | KEPT_IN_RAM) == 0]
        found: Inos = inos[(self._files.sizes[inos] > 0) & (inos != 0)]
        return found

    def _place_owned(self, job: Job) -> None:
        """What other hosts ask this one for goes before all else, whether the job reads it or not:
        it is stored when one of them does.
        """
        owned = np.unique(self._missing(job.dataset[self._files.are_owned(job.dataset)]))
        is_known = job.sequence.contains(owned)
        if not self._ssd.admit(np.concatenate([owned[is_known], owned[~is_known]]), None):
            self._short_of_bytes = self._ssd.free_bytes

    def _place_by_first_use(self, job: Job) -> None:
        for inos, repeats in self._known(job):
            inos = self._missing(inos)
            if repeats:
                inos = inos[first_uses(inos)]
            if not self._ssd.admit(inos, None) and len(inos):
                self._short_of_bytes = self._ssd.free_bytes
                break

    def _place_by_use(self, job: Job) -> None:
        assert self._ssd.uses is not None
        inos = np.concatenate([NO_INOS, *(self._missing(part) for part, _ in self._known(job))])
        inos = inos[first_uses(inos)]
        if not self._ssd.admit(inos, self._ssd.uses[inos]):
            self._short_of_bytes = self._ssd.free_bytes

    @staticmethod
    def _known(job: Job) -> Iterator[tuple[Inos, bool]]:
        """The files of its known orders, from its window's beginning on."""
        sequence, begin = job.sequence, job.window.begin
        return sequence.pieces(begin, sequence.last(sequence.known_until(begin)))

    def horizon(self, job: Job, current: int) -> range:
        """Epochs over which uses are counted."""
        n, epochs_all = job.sequence.samples_per_epoch, job.sequence.epochs
        if epochs_all is None:
            return range(0)
        epochs = min(max(2, HORIZON_SAMPLES_MOST // n), HORIZON_EPOCHS_MOST)
        return range(current, min(epochs_all, current + epochs))

    def horizon_epoch(self, job: Job, current: int) -> int | None:
        """The next epoch whose uses are worth counting: files are read unequally often, and not all
        of them fit on SSD.
        """
        orders = job.sequence.orders
        if current not in orders or current + 1 not in orders or not job.placed.is_due:
            return None
        inos = orders[current + 1].inos
        sample = inos[:: max(1, len(inos) // 1024)]
        if orders[current].contains(sample).mean() > 0.99:
            return None
        begin, stop = job.window.begin, job.sequence.known_until(job.window.begin)
        missing_bytes = sum(
            self._files.total_bytes(self._missing(part))
            for part, _ in job.sequence.pieces(begin, stop)
        )
        if missing_bytes <= self._ssd.free_bytes:
            return None
        for epoch, order in orders.items():
            self.count(job, epoch, order.inos)
        return next(
            (
                epoch
                for epoch in self.horizon(job, current)
                if epoch not in job.placed.counted and epoch not in job.sequence.unknown
            ),
            None,
        )

    def count(self, job: Job, epoch: int, inos: Inos) -> None:
        """Adds the uses of this epoch, whose order is `inos`."""
        if epoch not in job.placed.counted:
            job.placed.count(epoch)
            self._ssd.count(inos)

    def fetch(self, jobs: Iterable[Job]) -> list[Command]:
        """Residents that are in no window, in the order of their first use."""
        parts: list[Inos] = []
        walk = WALK_MOST
        for job in jobs:
            if not job.live:
                continue
            position = max(job.placed.fetched, job.window.begin)
            stop = job.sequence.last(job.sequence.known_until(position))
            while (
                position < stop
                and walk > 0
                and self._ssd.fetch_unanswered < FETCH_UNANSWERED_MOST
                and self._ssd.has_residents
            ):
                most = min(walk, 4096, stop - position)
                inos, repeats = job.sequence.piece(position, most)
                walk -= len(inos)
                chosen, looked_at = self._fetchable(inos, repeats)
                position += looked_at
                if len(chosen):
                    self._ssd.fetch(chosen)
                    parts.append(chosen)
                if looked_at < len(inos):
                    break
            job.placed.fetch_from(position)
        self._fetching.extend(parts)
        if len(self._fetching) > 4096:
            all_ = np.concatenate(list(self._fetching))
            self._fetching = deque([self._files.having(all_, FETCHING)])
        return commands_of("fetch", parts)

    def _fetchable(self, inos: Inos, repeats: bool) -> tuple[Inos, int]:
        """What of these, in the order of their use, is to be fetched now, and how many of them were
        looked at: behind that there is no room.
        """
        flags = self._files.flags[inos]
        next_ = np.flatnonzero(
            flags & (RESIDENT | STORED | HELD | SENT | FETCHING | GONE) == RESIDENT
        )
        if repeats:
            next_ = next_[first_uses(inos[next_])]
        room_bytes = self._ssd.room_bytes - self._ssd.storing_bytes
        fitting = fits(self._files.sizes[inos[next_]], room_bytes)
        looked_at = len(inos) if fitting == len(next_) else int(next_[fitting])
        return inos[next_[:fitting]], looked_at


class Exchange:
    """What is stored makes way for what is staged from the origin, where that is used sooner by
    more than a margin (Belady's MIN, with bypass; Belady 1966): as far as orders tell, and is
    expected to be beyond. The room is there a moment after the mount was told. So it is those who
    come next that have it, the one that is used soonest first.

    INVARIANT: nothing that is to be staged from SSD is evicted, nor what other hosts ask for.
    """

    def __init__(self, files: Files, ssd: Ssd) -> None:
        self._files, self._ssd = files, ssd
        self.may_evict = False
        """Whether the mount evicts what it is told to, and nobody else's files are concerned."""
        self._next_uses: Callable[[Inos], Uses] | None = None
        self._stored: Callable[[], Inos] = lambda: NO_INOS
        self._shut_out: Callable[[Inos], Mask] | None = None
        self._margin = 0.0
        self._latest = NO_INOS  # those that are stored, the one that is used last first ...
        self._used_at = np.zeros(0)  # ... and when
        self._stored_count = 0  # when they were sorted
        self._come = 0  # files that were looked at since
        self._is_stale = True
        self._short_bytes = 0  # what has come, is used sooner, and had no room
        self._evicting_bytes = 0
        self._unused_bytes, self._unused_at = 0, 0.0  # what was evicted, and is not used yet
        self._evictions: list[Inos] = []

    def allow(self, may_evict: bool) -> None:
        """As `may_evict`."""
        self.may_evict = may_evict

    def choose_by(
        self,
        next_uses: Callable[[Inos], Uses] | None,
        stored: Callable[[], Inos],
        margin: float,
        shut_out: Callable[[Inos], Mask] | None = None,
    ) -> None:
        """When each of some files is used next, after the windows: the one that makes way is used
        later by more than `margin`. None: nothing is to make way. `stored`: all files on SSD that
        may go, each once. `shut_out`: which files are not to have the room that was made.
        """
        self._next_uses, self._stored, self._margin = next_uses, stored, margin
        self._shut_out = shut_out

    def tick(self, now: float) -> None:
        """Time passes: others may have used the room."""
        self._ssd.admit_for_once(self.is_on)
        if now - self._unused_at > UNUSED_S:
            self._unused_bytes, self._unused_at = self._unused_bytes // 2, now

    def store(self, inos: Inos) -> None:
        """These, each once, have been stored."""
        self._unused_bytes = max(0, self._unused_bytes - self._files.total_bytes(inos))

    @property
    def is_on(self) -> bool:
        """Whether files make way."""
        return self.may_evict and self._next_uses is not None

    def sort_anew(self) -> None:
        """It is known now that files are used at other times."""
        self._is_stale = True

    def admit(self, inos: Inos) -> None:
        """These, each once, are about to be staged: which of them are to be stored, and for which
        others are to make way.
        """
        if not self.is_on:
            return
        assert self._next_uses is not None
        flags = self._files.flags[inos]
        is_missing = flags & (STORED | RESIDENT | KEPT_IN_RAM | GONE) == 0
        coming = inos[is_missing & (self._files.sizes[inos] > 0) & (inos != 0)]
        self._come += len(inos)
        if len(coming) == 0:
            return
        uses = self._next_uses(coming)
        order = np.argsort(uses, kind="stable")
        coming, uses = coming[order], uses[order]
        room_bytes = min(self._ssd.free_bytes, self._ssd.room_bytes - self._ssd.storing_bytes)
        if self._shut_out is not None:
            coming, uses = self._without_shut_out(coming, uses, room_bytes)
        count = fits(self._files.sizes[coming], room_bytes)
        self._ssd.admit(coming[:count], None)
        self._make_way(coming[count:], uses[count:])

    def _without_shut_out(self, coming: Inos, uses: Uses, room_bytes: int) -> tuple[Inos, Uses]:
        """But for those that fit into what room is left beside what was made for others."""
        assert self._shut_out is not None
        is_out = self._shut_out(coming)
        sizes = self._files.sizes[coming]
        made_bytes = self._evicting_bytes + self._unused_bytes
        others_bytes = int(sizes[~is_out].sum(dtype=np.int64))
        left_bytes = max(0, room_bytes - made_bytes - others_bytes)
        stays = np.flatnonzero(is_out)[: fits(sizes[is_out], left_bytes)]
        is_out[stays] = False
        return coming[~is_out], uses[~is_out]

    def _make_way(self, coming: Inos, uses: Uses) -> None:
        """For these, which are used at `uses` (ascending)."""
        self._sort()
        stays = self._is_evictable(self._latest)
        self._latest, self._used_at = self._latest[stays], self._used_at[stays]
        pairs = min(len(coming), len(self._latest))
        gains = self._used_at[:pairs] - uses[:pairs] > self._margin
        count = int(np.count_nonzero(gains))
        self._short_bytes += self._files.total_bytes(coming[:count])
        victims = self._latest[:count]
        wanted_bytes = self._short_bytes - self._evicting_bytes
        sizes = self._files.sizes[self._latest].astype(np.int64)
        least = max(EVICT_LEAST, self._stored_count // EVICT_SHARE)
        if count == 0 or wanted_bytes < least * self._files.total_bytes(victims) // count:
            return
        # The room is not told of yet, or of no use: more of it would empty the SSD.
        stored_bytes = self._stored_count * self._files.total_bytes(victims) // count
        wanted_bytes = min(wanted_bytes, stored_bytes // UNUSED_SHARE - self._unused_bytes)
        if wanted_bytes <= 0:
            return
        useful = int(np.count_nonzero(self._used_at - uses[0] > self._margin))
        going = self._latest[: min(takes(sizes, wanted_bytes), useful)]
        self._latest, self._used_at = self._latest[len(going) :], self._used_at[len(going) :]
        self._short_bytes = 0
        self._evicting_bytes += self._files.total_bytes(going)
        self._unused_bytes += self._files.total_bytes(going)
        self._ssd.evict(going)
        self._evictions.append(going)

    def _is_evictable(self, inos: Inos) -> Mask:
        flags = self._files.flags[inos]
        found: Mask = (flags & STORED != 0) & (flags & (HELD | STAGED) != HELD)
        return found & ~self._files.are_owned(inos)

    def _sort(self) -> None:
        most = self._stored_count // SORT_SHARE
        if not self._is_stale and len(self._latest) and self._come < max(EVICT_LEAST, most):
            return
        assert self._next_uses is not None
        stored = self._stored()
        stored = stored[self._is_evictable(stored)]
        self._stored_count, uses = len(stored), self._next_uses(stored)
        most = max(EVICT_LEAST * EVICT_SHARE, len(stored) // SORT_SHARE)
        if len(stored) > most:  # those that are used last are enough
            last = np.argpartition(-uses, most)[:most]
            stored, uses = stored[last], uses[last]
        order = np.argsort(-uses, kind="stable")
        self._latest, self._used_at = stored[order], uses[order]
        self._come, self._is_stale = 0, False

    def take(self) -> list[Command]:
        """What is to be evicted, behind what is staged now; once."""
        evictions, self._evictions = self._evictions, []
        return commands_of("evict", evictions)

    def done(self, inos: Inos, results: npt.NDArray[np.uint8]) -> None:
        """The mount has answered. What was found on SSD meanwhile is there no more."""
        self._evicting_bytes = max(0, self._evicting_bytes - self._files.total_bytes(inos))
        stays = results == Result.NOT_EVICTED
        self._unused_bytes = max(0, self._unused_bytes - self._files.total_bytes(inos[stays]))
        self._ssd.evict(inos[~stays])
        self._ssd.put_back(inos[stays])

    def void(self) -> None:
        """Nothing is being evicted."""
        self._evictions.clear()
        self._short_bytes = self._evicting_bytes = self._unused_bytes = 0
        self._is_stale = True
