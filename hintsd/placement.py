"""Which files are to live on SSD, and their fetching ahead of the windows (docs/HINTS.md rule 2;
pure).

A policy (hintsd/policies/frequency.py) lets files in, those that are used first or, where files are
used unequally often and not all fit, those that are used most: uses are counted over a horizon of
epochs. Those let in are RESIDENT (hintsd/files.py); what is in no window is fetched.

INVARIANT: what is fetched fits into the SSD's room beside all that is being stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from hintsd.commands import COMMAND_INOS_MOST, Command, commands_of
from hintsd.files import (
    FETCHING,
    GONE,
    HELD,
    KEPT,
    PAGE_BYTES,
    PINNED,
    RESIDENT,
    SENT,
    STORED,
    STORING,
    Files,
)
from hintsd.job import Job
from hintsd.policies import Integers
from hintsd.sequence import CHUNK, NO_INOS, Inos

FETCH_UNANSWERED_MOST = 1 << 14
WALK_MOST = 1 << 15  # positions that fetching ahead looks at in one decide()
HORIZON_SAMPLES_MOST = 1 << 26  # over so many accesses uses are counted, when they are uneven,
HORIZON_EPOCHS_MOST = 1 << 10  # and over so many epochs
HORIZON_WAIT_S = 60.0


class Placement:
    """Of one mount's files."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._short_of_bytes: int | None = None  # free room when residents did not fit
        self._fetching: deque[Inos] = deque()
        self.knows_pins = self.others_may_go = False
        """Whether the mount knows pins, and whether no other one's are to be heeded."""
        self.pins_told = 0
        """The list that the mount goes by."""
        self._pins = self._pins_awaited = 0  # the last one that was sent; that must be heard of
        self._pinned_for: tuple[bool, list[Job]] = False, []

    @property
    def is_short(self) -> bool:
        """Whether files are to be missing on SSD."""
        return self._short_of_bytes is not None

    def void(self) -> None:
        """Nothing is being fetched or pinned any more."""
        self._fetching.clear()
        self.unpinned()

    def cancel(self) -> None:
        """Takes back all fetches that are not answered."""
        self._files.cancel_fetches(np.concatenate([NO_INOS, *self._fetching]))

    @property
    def is_room_known(self) -> bool:
        """Whether the mount has said what room there is beside what is pinned."""
        return self._pins_awaited in (0, self.pins_told)

    def unpinned(self) -> None:
        """The mount has forgotten its pins, or will before it hears of others."""
        self._pinned_for, self._pins_awaited = (False, []), 0
        for start in range(0, len(self._files.flags), CHUNK):
            self._files.flags[start : start + CHUNK] &= ~PINNED & 0xFFFF

    def pin(self, jobs: Iterable[Job]) -> list[Command]:
        """What is to stay on SSD: the datasets of all live jobs, if they are others than before."""
        live = [job for job in jobs if job.live]
        wanted = self.others_may_go, live
        if not live or not self.knows_pins or wanted == self._pinned_for:
            return []
        is_told = self._pinned_for[1] != [] and self._pinned_for[0] == self.others_may_go
        self._pinned_for = wanted
        flags = self._files.flags
        was = flags & PINNED
        flags &= ~PINNED & 0xFFFF
        for job in live:
            flags[job.dataset] |= PINNED
        if is_told and np.array_equal(was, flags & PINNED):
            return []
        inos = np.flatnonzero(flags & PINNED).astype(np.uint32)
        self._pins += 1
        self._pins_awaited = self._pins
        commands = []
        for start in range(0, max(1, len(inos)), COMMAND_INOS_MOST):
            part = inos[start : start + COMMAND_INOS_MOST]
            last = start + COMMAND_INOS_MOST >= len(inos)
            fields = {"number": self._pins, "others": self.others_may_go, "last": last}
            commands.append(Command("pin", part, fields={"inos": part, **fields}))
        return commands

    def set_room(self, room_bytes: int, jobs: Iterable[Job]) -> None:
        """room_bytes: what SSD can take beyond what is stored. Where residents do not fit any more
        (a log has its slack now), all are chosen anew whom no command has asked for.
        """
        files = self._files
        files.room_bytes = files.residents.capacity_bytes = room_bytes
        least = max(room_bytes // 64, PAGE_BYTES)
        surplus = files.residents.held_bytes - files.storing_bytes - room_bytes
        if surplus > least:
            waiting = np.flatnonzero(files.flags & (RESIDENT | STORING) == RESIDENT)
            files.unsettle(waiting.astype(np.uint32))
        elif (
            self._short_of_bytes is None
            or files.residents.free_bytes - self._short_of_bytes <= least
        ):
            return
        self._short_of_bytes = None
        for job in jobs:
            job.unplaced = True
            job.fetched = job.begin

    def place(self, jobs: Iterable[Job], now: float) -> None:
        """Chooses the residents among the files of orders that are new."""
        for job in jobs:
            if not (job.live and job.unplaced):
                continue
            current = job.sequence.epoch_of(job.begin)
            waiting = now - job.opened_at < HORIZON_WAIT_S
            if waiting and self.horizon_epoch(job, current) is not None:
                continue
            job.unplaced = False
            uneven = self._files.uses is not None and len(job.counted) > 1
            if uneven:
                self._place_by_use(job)
            else:
                self._place_by_first_use(job)

    def _missing(self, inos: Inos) -> Inos:
        """Those that could become residents."""
        inos = inos[self._files.flags[inos] & (STORED | RESIDENT | GONE | KEPT) == 0]
        found: Inos = inos[(self._files.sizes[inos] > 0) & (inos != 0)]
        return found

    def _place_by_first_use(self, job: Job) -> None:
        stop = job.last(job.sequence.known_until(job.begin))
        for inos, repeats in job.sequence.pieces(job.begin, stop):
            inos = self._missing(inos)
            if repeats:
                inos = inos[np.sort(np.unique(inos, return_index=True)[1])]
            if not self._admit(inos, None) and len(inos):
                self._short_of_bytes = self._files.residents.free_bytes
                break

    def _place_by_use(self, job: Job) -> None:
        assert self._files.uses is not None
        stop = job.last(job.sequence.known_until(job.begin))
        inos = np.concatenate(
            [NO_INOS, *(self._missing(part) for part, _ in job.sequence.pieces(job.begin, stop))]
        )
        inos = inos[np.sort(np.unique(inos, return_index=True)[1])]
        if not self._admit(inos, self._files.uses[inos]):
            self._short_of_bytes = self._files.residents.free_bytes

    def _admit(self, inos: Inos, uses: Integers | None) -> bool:
        """Makes residents of those that fit; whether all did."""
        admitted = self._files.residents.admit(self._files.sizes[inos], uses)
        self._files.flags[inos[admitted]] |= RESIDENT
        return bool(admitted.all())

    def horizon(self, job: Job, current: int) -> range:
        """Epochs over which uses are counted."""
        n = job.sequence.samples_per_epoch
        if job.epochs is None:
            return range(0)
        epochs = min(max(2, HORIZON_SAMPLES_MOST // n), HORIZON_EPOCHS_MOST)
        return range(current, min(job.epochs, current + epochs))

    def horizon_epoch(self, job: Job, current: int) -> int | None:
        """The next epoch whose uses are worth counting: files are read unequally often, and not all
        of them fit on SSD.
        """
        orders = job.sequence.orders
        if current not in orders or current + 1 not in orders or not job.unplaced:
            return None
        inos = orders[current + 1].inos
        sample = inos[:: max(1, len(inos) // 1024)]
        if orders[current].contains(sample).mean() > 0.99:
            return None
        missing = sum(
            int(self._files.sizes[self._missing(part)].sum(dtype=np.int64))
            for part, _ in job.sequence.pieces(job.begin, job.sequence.known_until(job.begin))
        )
        if missing <= self._files.residents.free_bytes:
            return None
        for epoch, order in orders.items():
            self.count(job, epoch, order.inos)
        return next(
            (
                epoch
                for epoch in self.horizon(job, current)
                if epoch not in job.counted and epoch not in job.unknown
            ),
            None,
        )

    def count(self, job: Job, epoch: int, inos: Inos) -> None:
        """Adds the uses of this epoch, whose order is `inos`."""
        if epoch in job.counted:
            return
        if self._files.uses is None:
            self._files.uses = np.zeros(len(self._files.flags), np.uint16)
        job.counted.add(epoch)
        inside = inos[inos < len(self._files.uses)]
        uses = np.bincount(inside, minlength=len(self._files.uses))
        self._files.uses += np.minimum(uses, 1 << 10).astype(np.uint16)

    def fetch(self, jobs: Iterable[Job]) -> list[Command]:
        """Residents that are in no window, in the order of their first use."""
        parts: list[Inos] = []
        walk = WALK_MOST
        for job in jobs:
            if not job.live:
                continue
            job.fetched = max(job.fetched, job.begin)
            stop = job.last(job.sequence.known_until(job.fetched))
            while (
                job.fetched < stop
                and walk > 0
                and self._files.fetch_unanswered < FETCH_UNANSWERED_MOST
                and self._files.residents.held_bytes > 0
            ):
                most = min(walk, 4096, stop - job.fetched)
                inos, repeats = job.sequence.piece(job.fetched, most)
                walk -= len(inos)
                flags = self._files.flags[inos]
                next_ = np.flatnonzero(
                    flags & (RESIDENT | STORED | HELD | SENT | FETCHING | GONE) == RESIDENT
                )
                if repeats:
                    next_ = next_[np.sort(np.unique(inos[next_], return_index=True)[1])]
                sizes = np.cumsum(self._files.sizes[inos[next_]], dtype=np.int64)
                fitting = int(
                    np.searchsorted(
                        sizes, self._files.room_bytes - self._files.storing_bytes, "right"
                    )
                )
                chosen = inos[next_[:fitting]]
                job.fetched += len(inos) if fitting == len(next_) else int(next_[fitting])
                if len(chosen):
                    self._files.storing_bytes += int(sizes[len(chosen) - 1])
                    self._files.flags[chosen] |= FETCHING | STORING
                    self._files.fetch_unanswered += len(chosen)
                    parts.append(chosen)
                if fitting < len(next_):
                    break
        self._fetching.extend(parts)
        if len(self._fetching) > 4096:
            all_ = np.concatenate(list(self._fetching))
            self._fetching = deque([all_[self._files.flags[all_] & FETCHING != 0]])
        return commands_of("fetch", parts)
