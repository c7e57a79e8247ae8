"""From access sequences, sizes and budgets to commands for one mount: what to stage, fetch, drop
and arm, in which order and when (pure: no I/O, no clock of its own).

The rules are docs/HINTS.md's; HDMLP 3.1 is where they come from. How they are kept here:

* Each job has a *window* [begin, end) of positions. A file in any window is *wanted*; `refs` counts
  the windows' uses of each file. Windows grow, the smallest first, as long as the bytes of all
  wanted files together stay below the budget, and shrink from their far end.
* A file that has left the last window is *spare*: it stays in RAM until its room is needed, then it
  is dropped (an epoch whose order is not known yet will use the same files). All that is in no
  window is used later than all that is, so it does not matter which spare goes first.
* Before that it may be *kept*: a file that the reader has passed, that is in RAM and is to be
  missing on SSD, stays for good, as long as windows have the room that they need. It counts as one
  use more, so windows grow in what is left, and come upon it at no cost.
* What a reader has missed is not staged for that use: the origin is asked for it once.
* A file is *held* from when it is wanted until it is dropped or cancelled; held bytes never exceed
  the budget, counting from a command's sending, since the mount carries out commands in order.
* A job that is *packed* (docs/LOG.md, hintsd/layout.py) has windows of whole chunks, each staged
  by one command.

Here are the windows, what is staged for them, and what an observation changes. Which files are to
be on SSD: hintsd/placement.py; which job is packed, and its chunks: hintsd/layout.py; what is
armed: hintsd/wires.py. All share the state of each file (hintsd/files.py) and of each job
(hintsd/job.py). Jobs' orders: hintsd/sequence.py; positions: hintsd/progress.py.

INVARIANT: held bytes ≤ window budget after `decide`, wanted bytes always (hintsd/files.py); `refs`
of a file counts its uses in all windows, and that it is kept.
INVARIANT: kept bytes ≤ window budget less what the windows need, after `decide`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hintsd import packing
from hintsd.commands import Command, commands_of
from hintsd.files import ARMED, DONE_NO_ROOM, FAILED, GONE, HELD, READ, SENT, STAGED, Files
from hintsd.job import Job
from hintsd.layout import Layout
from hintsd.placement import Placement
from hintsd.policies import Integers, Mask
from hintsd.progress import AT_END_S, IDLE_AFTER_S, Progress
from hintsd.readers import ANOTHERS, OWN, STRANGER, Pids, Standings
from hintsd.search import (
    ENOUGH,
    EPOCHS_LEAST,
    REST_MOST_S,
    SAMPLES_MOST,
    Opened,
    Place,
    Search,
)
from hintsd.sequence import CHUNK, NO_INOS, Inos, Positions, Sequence
from hintsd.status import Rates, status
from hintsd.trail import Passed, Trail
from hintsd.wires import Wires

EXTEND_MOST = 1 << 20  # positions that enter windows in one decide()
OUTSIDE_SHARE = 10  # a tenth of the budget is left to reads outside any plan
UNEVEN_SHARE = (
    32  # windows are evened out when they differ by more than a 32nd of the budget, twice
)
OBSERVED_WIRES, OBSERVED_MOST = 4, 128  # weighed at once: a zone reaches four wires ahead
AWAITED_S = 30.0  # a trainer may need so long to begin
LATE_LATELY_S = 5.0  # a late read is no more told of then
# What a window needs: a second of reading, but no more than an eighth of the budget for that; room
# for what is read at once, twice; all windows no more than a half of the budget.
AHEAD_S, AHEAD_SHARE, NEED_SHARE = 1.0, 8, 2
PATIENCE_SHARE = 6  # readers may take a sixth of a window between two decisions

SEEN_MASK, SEEN_LOOKUP = 7, 1
_EVICTED = 64
_LATE = ((128, "failed"), (_EVICTED, "evicted"), (32, "fetching"))


class MountPlanner:
    """The plan of all jobs of one mount."""

    def __init__(self, ram_bytes: int, ssd_room_bytes: int) -> None:
        self._jobs: dict[str, Job] = {}
        self._files = Files()
        self._wires = Wires(self._files)
        self._placement = Placement(self._files)
        self._layout = Layout(self._files, self._jobs)
        self._clear = False
        self._is_busy = True  # somebody is planned for, or may come
        self._notices: list[tuple[str, str]] = []
        self.recording = 0
        """The mount's number of the recording that runs; 0: none."""
        self._passed: list[Passed] = []  # of jobs that were closed
        self._rates = Rates(0.0, 0.0)
        self.set_budgets(ram_bytes, ssd_room_bytes)

    # --- what is known of the mount

    def set_budgets(self, ram_bytes: int, ssd_room_bytes: int) -> None:
        """ram_bytes: of the mount; ssd_room_bytes: what SSD can take beyond what is stored."""
        self._files.limit_bytes = ram_bytes
        budget_bytes = ram_bytes - ram_bytes // OUTSIDE_SHARE
        if budget_bytes != self._files.budget_bytes:
            self._restart_windows()
            if budget_bytes < self._files.budget_bytes:
                self._keep_at_most(0)  # what windows want of it they find in RAM
            self._files.budget_bytes = budget_bytes
        self._placement.set_room(ssd_room_bytes, self._jobs.values())

    def set_layout(self, layout: str, probe: packing.Probe | None) -> None:
        """static, reorder or auto, and what the mount has measured of its SSD."""
        self._layout.set(layout, probe)

    def set_pins(self, is_known: bool, told: int, *, others_may_go: bool) -> None:
        """Whether the mount's server knows pins, and by which list it goes; whether no other
        mount's files on its cache directory have to stay.
        """
        self._placement.knows_pins, self._placement.pins_told = is_known, told
        self._placement.others_may_go = others_may_go

    def packing_refused(self, why: str, now: float) -> None:
        """The mount has no log open, for this reason, although one was announced."""
        self._layout.refused(why, now)

    def rates(self, origin_bytes_per_s: float, ssd_bytes_per_s: float) -> None:
        self._rates = Rates(origin_bytes_per_s, ssd_bytes_per_s)

    def learn(self, inos: Inos, sizes: Integers, stored: npt.NDArray[np.uint8]) -> None:
        """Files of a dataset; again: they have changed."""
        if len(inos) == 0:
            return
        self._files.grow(int(inos.max()) + 1)
        self._files.widen(sizes)
        for start in range(0, len(inos), CHUNK):
            part = slice(start, start + CHUNK)
            self._learn(inos[part], sizes[part], stored[part])

    def _learn(self, inos: Inos, sizes: Integers, stored: npt.NDArray[np.uint8]) -> None:
        changed = self._files.changed(inos, sizes)
        if changed.any():
            self._restart_windows()
            self._files.let_go(inos[changed])
            self._files.unsettle(inos[changed])
        self._files.learn(inos, sizes, stored)

    # --- jobs

    def open_job(
        self,
        name: str,
        *,
        samples_per_epoch: int,
        epochs: int | None,
        epoch: int,
        index: int,
        batch_size: int,
        workers: int,
        prefetch_factor: int,
        dataset: Inos,
        now: float,
        is_lost: bool = False,
    ) -> None:
        """A job on these files, which were learned before, that begins at sample `index` of
        `epoch`; or (`is_lost`) was seen there last, and is anywhere beyond by now.
        """
        assert name not in self._jobs, "job names are unique"
        assert samples_per_epoch > 0
        progress = Progress(
            samples_per_epoch,
            start=epoch * samples_per_epoch + index,
            batch_size=batch_size,
            workers=workers,
            prefetch_factor=prefetch_factor,
            now=now,
        )
        job = Job(name, Sequence(samples_per_epoch), epochs, batch_size, progress, dataset)
        if is_lost:
            job.search, job.is_lost = Search(now, span=batch_size), True
        self._jobs[name] = job
        if self.recording:
            job.trail = Trail(name, job.sequence, progress)

    def wanted_epochs(self, name: str) -> list[int]:
        """Epochs whose order is missing for planning now: the current one first, then the next,
        those behind that for a job that may be packed, then at most one of the horizon over
        which uses are counted.
        """
        job = self._jobs[name]
        if job.state == "done":
            return []
        current = job.sequence.epoch_of(job.begin)
        last = current + self._layout.epochs_ahead(job) + 1
        last = last if job.epochs is None else min(last, job.epochs)
        wanted = [
            epoch
            for epoch in range(current, last)
            if epoch not in job.sequence.orders and epoch not in job.unknown
        ]
        if (
            not wanted
            and job.live
            and (epoch := self._placement.horizon_epoch(job, current)) is not None
        ):
            wanted.append(epoch)
        return wanted

    def announce(self, name: str, epoch: int, inos: Inos, now: float) -> None:
        """As `supply`, by the trainer, which is about to read it: a job that was taken for wrong
        begins there anew, and one that nobody has read for a while has its share of RAM again.
        """
        job = self._jobs[name]
        if job.state == "wrong":
            job.progress.begin(epoch * job.sequence.samples_per_epoch, now)
            job.sequence.forget_before(epoch)
            job.restart()
            self._believe(job)
        elif job.live:
            job.progress.confirmed_at = now
            if job.state == "idle" and job.progress.begun:
                self._woken(job, now)
            elif job.state == "idle":
                job.state, job.reason = "waiting", ""
        self.supply(name, epoch, inos)

    def supply(self, name: str, epoch: int, inos: Inos) -> None:
        """The order of one epoch; 0: a sample outside the mount. The array is kept. Again: replaces
        what was predicted. ValueError: not samples_per_epoch long.
        """
        job = self._jobs[name]
        sequence = job.sequence
        current = sequence.epoch_of(job.begin)
        if (
            epoch > current + self._layout.epochs_ahead(job)
            and current in sequence.orders
            and epoch in self._placement.horizon(job, current)
        ):
            self._placement.count(job, epoch, inos)
            return
        if len(inos):
            self._files.grow(int(inos.max()) + 1)
        old = sequence.orders.get(epoch)
        if old is not None and np.array_equal(old.inos, inos):
            return
        if old is not None or current not in sequence.orders:
            self._release_window(job)
        if old is not None:
            self._layout.end(job)
        sequence.put(epoch, inos)
        job.unknown.discard(epoch)
        if current not in sequence.orders and job.live:
            # the reader is in an epoch that nobody could tell us: he begins here
            job.progress.begin(epoch * sequence.samples_per_epoch, job.progress.confirmed_at)
            job.restart()
        job.unplaced = True

    def unknown(self, name: str, epoch: int) -> None:
        """This epoch's order cannot be known (yet)."""
        self._jobs[name].unknown.add(epoch)

    def close_job(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            self._passed += self._passed_of(job, job.progress.low)
            self._retire(job)

    def finished(self, name: str) -> bool:
        return self._jobs[name].state == "done"

    def is_told(self, inos: Inos) -> Mask:
        """Which of these files stand in the order of a job that is planned for."""
        found = np.zeros(len(inos), np.bool_)
        for job in self._jobs.values():
            if job.live:
                found |= job.sequence.contains(inos)
        return found

    # --- a reader whose place is not known

    def is_sought(self, name: str, now: float) -> bool:
        """Whether epochs that are not known yet are to be looked through for its reader."""
        search = self._jobs[name].search
        return search is not None and search.is_walk_due(now)

    def sought(self, name: str) -> tuple[Opened, list[int]]:
        """What the reader was seen to open, for `search.walk`, and the epochs to look through."""
        job = self._jobs[name]
        assert job.search is not None
        first = job.sequence.epoch_of(job.begin)
        stop = first + max(EPOCHS_LEAST, SAMPLES_MOST // job.sequence.samples_per_epoch)
        stop = stop if job.epochs is None else min(stop, job.epochs)
        # the one before, too: where much of an epoch is in order, it may be left too early
        likely = [*range(first, stop), *range(max(first - 1, 0), first)]
        epochs = [epoch for epoch in likely if epoch not in job.sequence.orders]
        return job.search.seen(), epochs

    def found(self, name: str, place: Place | None, now: float) -> None:
        """What came of it. The reader has gone on meanwhile, so the search does, too."""
        job = self._jobs[name]
        if job.search is None:
            return
        job.search.walked(now)
        if place is None:
            return
        self._release_window(job)
        self._layout.end(job)
        job.sequence.orders.clear()
        job.unknown.clear()
        job.sequence.put(place.epoch, place.inos)
        job.unplaced = True
        self._jump(job, place.epoch * job.sequence.samples_per_epoch + place.position, now)

    def _find(self, job: Job, now: float) -> int | None:
        """Where the reader is found in the known epochs, unless it is where we thought."""
        if job.search is None:
            return None
        place = job.search.find(sorted(job.sequence.orders.items()))
        if place is None:
            return None
        job.end_search(now)
        progress = job.progress
        position = place[0] * job.sequence.samples_per_epoch + place[1]
        if job.live and progress.low - progress.slack <= position < progress.zone_end(None):
            progress.forget()
            return None
        return position

    def _give_up(self, job: Job, now: float) -> None:
        """The reader is not found. One who was lost is judged by what is seen from now on, as any
        job.
        """
        if job.is_lost:
            job.end_search(now)
            job.check_at = now
            job.progress.forget()
        elif self._may_be_others(job) or (
            job.progress.is_scattered and job.search and not job.search.tells_apart
        ):
            job.end_search(now)
        elif job.search is not None and job.search.lasted(now, job.search_spacing):
            self._condemn(job, now)

    def _may_be_others(self, job: Job) -> bool:
        """Whether what was seen may be of another live job's reader."""
        if job.is_read or job.search is None:
            return False
        seen = job.search.seen().inos
        return any(
            other.sequence.contains(seen).any()
            for other in self._jobs.values()
            if other is not job and other.live
        )

    # --- what happens

    def step(self, name: str, epoch: int, batch: int, now: float) -> None:
        """The trainer has taken `batch` batches of this epoch."""
        job = self._jobs[name]
        if job.state == "done":
            return
        n = job.sequence.samples_per_epoch
        job.progress.step(epoch * n + min(batch * job.batch_size, n), now)
        if job.live:
            self._woken(job, now)
        else:  # nothing is believed, but this is the epoch in which to look for the reader
            job.restart()
            job.sequence.forget_before(epoch)

    def observe(
        self,
        inos: Inos,
        kinds: npt.NDArray[np.uint8],
        now: float,
        whose: Mapping[str, Standings] | None = None,
        processes: Pids | None = None,
    ) -> None:
        """`seen` frames (docs/WIRE.md). `whose`: for each job who made each of these observations
        (hintsd/readers.py), where that can be told; `processes`: which process did, 0: not known.
        """
        processes = np.zeros(len(inos), np.uint32) if processes is None else processes
        known = (inos > 0) & (inos < len(self._files.flags))
        inos, kinds, processes = inos[known], kinds[known], processes[known]
        whose = {name: stands[known] for name, stands in (whose or {}).items()}
        if not self._is_anybody_heeded(now):
            self._listen(inos, kinds & SEEN_MASK != SEEN_LOOKUP, whose, processes, now)
            return
        # A reader moves on between two wires: only few of them are weighed at one position. Where
        # nobody is planned for, there is none.
        is_placed = any(job.live for job in self._jobs.values())
        wires = np.cumsum(kinds & SEEN_MASK == SEEN_LOOKUP)
        start = 0
        while start < len(inos):
            passed = wires[start - 1] if start else 0
            stop = int(np.searchsorted(wires, passed + OBSERVED_WIRES, "right"))
            stop = min(max(stop, start + 1), start + OBSERVED_MOST) if is_placed else len(inos)
            part = {name: stands[start:stop] for name, stands in whose.items()}
            chosen = slice(start, stop)
            self._observe(inos[chosen], kinds[chosen], part, processes[chosen], now)
            start = stop

    def _is_anybody_heeded(self, now: float) -> bool:
        """Whether each READ counts: for a plan, or to tell where a reader is."""
        return any(
            job.live or (job.search is not None and not job.search.is_asleep(now))
            for job in self._jobs.values()
        )

    def _listen(
        self,
        inos: Inos,
        reads: Mask,
        whose: Mapping[str, Standings],
        processes: Pids,
        now: float,
    ) -> None:
        """Nobody is planned for or watched: of what is seen only wires count."""
        self._files.flags[inos[~reads]] &= ~ARMED & 0xFFFF
        for job in self._jobs.values():
            if job.search is None or job.state == "done":
                continue
            his = ~reads & ~self._strangers(job, inos, whose.get(job.name), now)
            his[his] &= self._may_be_of(job, inos[his])
            if job.search is not None and his.any():
                job.search.see(inos[his], reads[his], 1, now, processes[his])
                if (place := self._find(job, now)) is not None:
                    self._jump(job, place, now)

    def _observe(
        self,
        inos: Inos,
        kinds: npt.NDArray[np.uint8],
        whose: Mapping[str, Standings],
        processes: Pids,
        now: float,
    ) -> None:
        reads = kinds & SEEN_MASK != SEEN_LOOKUP
        jobs = [job for job in self._jobs.values() if job.state != "done" and job.sequence.orders]
        strange = [self._strangers(job, inos, whose.get(job.name), now) for job in jobs]
        candidates = [job.sequence.locate(inos, job.progress.low) for job in jobs]
        used_in: list[Mask] = [np.logical_or.reduce(where >= 0, axis=0) for where in candidates]
        self._wires.disarm(inos, reads, jobs, candidates, strange)
        for job, where, theirs in zip(jobs, candidates, strange, strict=True):
            where[:, theirs] = -1
            progress = job.progress
            unseen = progress.spacing * sum(wire >= progress.high for wire in job.stolen)
            # not more: if all were in order, no wrong hint would be noticed
            progress.unseen = min(unseen, job.sequence.samples_per_epoch // 4)
        unfired = [self._wires.first_unfired(job, job.stolen) for job in jobs]
        placed = [
            np.full(len(inos), -1, np.int64) if job.is_lost else job.progress.place(where, first)
            for job, where, first in zip(jobs, candidates, unfired, strict=True)
        ]
        excused = np.zeros(len(inos), np.bool_)
        for where in placed:
            excused |= where >= 0
        _give_to_nearest(jobs, placed)
        in_order_of = [np.logical_or.reduce(where >= 0, axis=0) for where in candidates]
        # a file of the dataset that nobody is to read now: another rank reads it, or a stranger
        in_none = reads & (self._files.sizes[inos] > 0)
        for used in used_in:
            in_none &= ~used
        self._count_reads(jobs, candidates, placed, used_in, strange, kinds, reads, now)
        self._read_first(jobs, inos, placed, used_in, reads)
        for job, where, here, first, mine, theirs in zip(
            jobs, candidates, placed, unfired, in_order_of, strange, strict=True
        ):
            progress = job.progress
            others = excused.copy()  # what another live job reads somewhere is no stray of this one
            for other, used in zip(jobs, in_order_of, strict=True):
                if other is not job and other.live:
                    others |= used
            # Before `take`: what is in order is what was so when they were placed.
            fired = self._wires.fired(job, where[:, ~reads], here[~reads] >= 0, first)
            relevant = (mine | in_none) & ~theirs
            progress.take(inos, where, here, reads, relevant, others, first, now)
            if fired and not job.is_lost:
                job.fired.update(fired)
                progress.reach(self._wires.fired_in_turn(job), now)
            if job.search is not None:
                maybe_his = ~theirs & (self._files.sizes[inos] > 0) & self._may_be_of(job, inos)
                every = max(1, 4 * progress.disorder // ENOUGH)
                job.search.see(inos[maybe_his], reads[maybe_his], every, now, processes[maybe_his])
            if (place := self._find(job, now)) is None and not (job.live and job.search):
                place = progress.jump()
            if place is not None:
                self._jump(job, place, now)
                continue
            if not job.is_lost:
                progress.settle(self._wires.first_unfired(job), job.wired_from)
                self._wires.doubt_fired(job)
                if progress.is_to_be_checked:
                    self._check(job, now)
                elif progress.condemned(now):
                    self._condemn(job, now)
            if job.live and job.search and job.search.is_hopeless(job.sequence.orders.values()):
                self._give_up(job, now)
            if (here >= 0).any():
                self._woken(job, now)

    def _read_first(
        self,
        jobs: list[Job],
        inos: Inos,
        placed: list[Positions],
        used_in: list[Mask],
        reads: Mask,
    ) -> None:
        """What a job's reader has missed is not staged for him. Another job may want it."""
        live = [index for index, job in enumerate(jobs) if job.live]
        users = np.zeros(len(inos), np.int64)
        for index in live:
            users += used_in[index]
        for index in live:
            self._files.read_first(inos[reads & (placed[index] >= 0) & (users == 1)])

    def _may_be_of(self, job: Job, inos: Inos) -> Mask:
        """Which files tell of the job's reader. Those that only other jobs have do not: one process
        may read for several, as a training and its validation.
        """
        others = np.zeros(len(inos), np.bool_)
        for other in self._jobs.values():
            if other is not job:
                others |= other.sequence.contains(inos)
        return ~others | job.sequence.contains(inos)

    def _strangers(self, job: Job, inos: Inos, stands: Standings | None, now: float) -> Mask:
        """Which observations say nothing of the job: those of another job's processes, strangers',
        and, once its own process is seen to read, those of processes that are unknown: all that it
        has started would be known. If it is not seen to read for AWAITED_S, its readers may be
        processes that it has not started, but not those of another job.
        """
        if stands is None:
            return np.zeros(len(inos), np.bool_)
        if not job.is_read:
            own = inos[stands == OWN]
            job.is_read = bool(job.sequence.contains(own).any())
            if not job.is_read:
                is_awaited = now - job.opened_at < AWAITED_S
                theirs: Mask = (stands == ANOTHERS) | ((stands == STRANGER) & is_awaited)
                job.is_swayed |= bool((~theirs & (stands != OWN)).any())
                return theirs
            if job.is_swayed:
                self._release_window(job)
                job.progress.begin_again(now)
                job.restart()
                if job.state == "wrong":
                    self._believe(job)
        others: Mask = stands != OWN
        return others

    def _count_reads(
        self,
        jobs: list[Job],
        candidates: list[Positions],
        placed: list[Positions],
        used_in: list[Mask],
        strange: list[Mask],
        kinds: npt.NDArray[np.uint8],
        reads: Mask,
        now: float,
    ) -> None:
        """Late and unplanned READs (docs/HINTS.md rule 7). One that is late for a job is not
        unplanned for another. `used_in`: whether each is in a job's order, whoever reads it.
        """
        if not reads.any():
            return
        live = [index for index, job in enumerate(jobs) if job.live]
        in_window = {
            index: (
                (candidates[index] >= jobs[index].begin) & (candidates[index] < jobs[index].end)
            ).any(axis=0)
            & reads
            for index in live
        }
        planned = np.zeros(len(reads), np.bool_)
        in_dataset = np.zeros(len(reads), np.bool_)
        for index in live:
            planned |= in_window[index]
            in_dataset |= used_in[index]
        for index in live:
            job, late = jobs[index], in_window[index]
            missed = reads & (placed[index] >= 0)
            job.misses += int(np.count_nonzero(missed))
            job.waited += int(np.count_nonzero(missed & (kinds & _EVICTED == 0)))
            if late.any():
                job.late_at = now
            left = late.copy()
            for bit, reason in _LATE:
                found = left & (kinds & bit != 0)
                job.late[reason] += int(np.count_nonzero(found))
                left &= ~found
            job.late["queued"] += int(np.count_nonzero(left))
            mine = (candidates[index] >= 0).any(axis=0)
            job.unplanned["not in window"] += int(np.count_nonzero(reads & mine & ~planned))
            outside = reads & ~in_dataset & ~strange[index]
            job.unplanned["not in dataset"] += int(np.count_nonzero(outside))

    def done(self, inos: Inos, results: npt.NDArray[np.uint8], now: float) -> None:
        """`done` frames (docs/WIRE.md)."""
        self._files.done(inos, results, now)
        if (results == DONE_NO_ROOM).any():
            self._placement.cancel()  # they would be fetched for nothing

    def disconnected(self) -> None:
        """All that was sent is void: the next decide() sends the windows anew."""
        self._restart_windows()
        for job in self._jobs.values():
            job.spare.clear()
            job.fetched = job.begin
            job.unwire()
        for part in (self._files, self._wires, self._placement, self._layout):
            part.void()
        self._clear = False
        self.record(0)

    # --- for a recording

    def record(self, number: int) -> None:
        """The mount has this recording, or (0) none."""
        if number == self.recording:
            return
        self.recording = number
        self._passed.clear()
        for job in self._jobs.values():
            job.trail = Trail(job.name, job.sequence, job.progress) if number else None

    def passed(self, now: float) -> list[Passed]:
        """What readers have passed and was not told to the recording; before `decide`, which
        forgets epochs.
        """
        found, self._passed = self._passed, []
        for job in self._jobs.values():
            progress, n = job.progress, job.sequence.samples_per_epoch
            is_at_end = progress.high % n == 0 and now - progress.confirmed_at > AT_END_S
            found += self._passed_of(job, progress.high if is_at_end else progress.low)
        return found

    def _passed_of(self, job: Job, stop: int) -> list[Passed]:
        if job.trail is None:
            return []
        if job.state == "wrong":
            job.trail.lose()
            return []
        return job.trail.follow(job.last(stop))

    # --- deciding

    def patience_s(self) -> float:
        """How long the next decide() may wait: readers take so long for a small part of a window,
        or for half of what is staged when there is no more to stage. Of chunks: Layout.patience_s.
        For ever, while nobody of those that there are is planned for.
        """
        if not self._is_busy:
            return math.inf
        jobs = [job for job in self._jobs.values() if job.live and job.progress.samples_per_s > 0]
        waits_s = [self._patience_s(job) for job in jobs]
        if (of_chunks_s := self._layout.patience_s()) is not None:
            waits_s.append(of_chunks_s)
        return min(waits_s, default=0.0)

    def _patience_s(self, job: Job) -> float:
        if self._files.stage_unanswered == 0 and job.sent == job.end and not job.can_grow:
            samples = (job.end - job.progress.high) / 2  # all that is known lies there
        else:
            samples = (job.end - job.begin) / PATIENCE_SHARE
        return max(samples, 0) / job.progress.samples_per_s

    def decide(self, now: float) -> list[Command]:
        """What to send now, in this order. Bounded work and bounded arrays; call it again."""
        for job in self._jobs.values():
            self._tick(job, now)
        for job in self._jobs.values():
            job.yields = job.state == "idle" and (job.yields or self._may_yield(job, now))
        for job in self._jobs.values():
            if job.live:
                self._follow(job)
        self._keep_at_most(self._keep_bytes())
        self._is_busy = not self._jobs or any(job.live for job in self._jobs.values())
        pins = self._placement.pin(self._jobs.values())
        if self._placement.is_room_known:
            self._placement.place(self._jobs.values(), now)
        self._layout.review()
        self._balance()
        self._reclaim()
        stages, fetches = [], []
        if self._placement.is_room_known:
            stages = self._stage(now)
            fetches = self._placement.fetch(
                job
                for job in self._jobs.values()
                if job.log.decided >= 0 or not self._layout.is_packable(job)  # a log comes first
            )
        wires = self._wires.lay(self._jobs.values(), now)
        commands = [
            *commands_of("cancel", self._files.cancels),
            *commands_of("drop", self._files.drops),
            *([Command("clear", NO_INOS)] if self._clear else []),
            *pins,
            *self._layout.take_packs(),
            *stages,
            *fetches,
            *commands_of("arm", wires),
        ]
        self._files.cancels, self._files.drops, self._clear = [], [], False
        return commands

    def _tick(self, job: Job, now: float) -> None:
        if not job.live:
            return
        job.progress.pace(now)
        job.is_late = now - job.late_at < LATE_LATELY_S
        if job.total is not None and job.progress.finished(job.total, now):
            job.laid_out = self._layout.status(job)
            job.state = "done"
            self._retire(job)
        elif job.progress.idle(now) and (
            job.state == "running" or (job.state == "waiting" and self._is_in_the_way(job, now))
        ):
            which = "has been read for a while" if job.progress.begun else "of it was read yet"
            job.state, job.reason = "idle", f"nothing {which}"  # no fault: a validation waits

    def _is_in_the_way(self, job: Job, now: float) -> bool:
        """Whether another job has been read for a while, which may have its share of RAM. Not one
        that has just begun, or gone on: ranks do so together, and are not seen at one moment.
        """
        return any(
            other.state == "running" and now - other.running_since > IDLE_AFTER_S
            for other in self._jobs.values()
            if other is not job
        )

    def _may_yield(self, job: Job, now: float) -> bool:
        """Whether there is another one that its share is of more use to."""
        is_awaited = any(other.state == "waiting" for other in self._jobs.values())
        return is_awaited or self._is_in_the_way(job, now)

    def _woken(self, job: Job, now: float) -> None:
        if job.live and job.progress.begun and job.state != "running":
            job.state, job.reason, job.running_since = "running", "", now

    def _follow(self, job: Job) -> None:
        """The window begins at `low`, but always reaches ahead of `high`: where it is small against
        the disorder, part of what is behind is given up. (How small is known once there was one.)
        Not where slow workers are waited for, and the origin would be asked for it again.
        """
        progress = job.progress
        job.reach = job.end - job.begin or job.reach
        begin = progress.low
        if job.reach and not (progress.is_low_known and self._placement.is_short):
            behind = job.reach // (2 if progress.workers_known else 4)
            begin = max(begin, progress.high - max(1, behind))
        begin = min(begin, job.last(begin))
        if begin > job.begin:
            self._note_need(job, begin)
            keep_bytes = 0 if job.unplaced else self._keep_bytes()
            self._release(job, job.begin, min(begin, job.end), keep_bytes)
            job.begin = begin
            job.end = max(job.end, begin)
            if job.sent < begin:
                job.sent, job.sent_bytes = begin, 0
            epoch = job.sequence.epoch_of(begin)
            if job.search is not None and min(job.sequence.orders, default=epoch) < epoch:
                job.search.begin_again()
            job.sequence.forget_before(epoch)
            job.log.forget_before(epoch)
            job.unknown = {known for known in job.unknown if known >= epoch}

    # --- what is kept

    def _note_need(self, job: Job, begin: int) -> None:
        """What its window needs, which goes on from `begin`: the most of this epoch and of the one
        before, for what was kept and is dropped has to be fetched again.
        """
        progress = job.progress
        if job.sequence.epoch_of(begin) != job.sequence.epoch_of(job.begin):
            job.needs_bytes = (job.needs_bytes[1], 0)
        before, now = job.needs_bytes
        job.known_mean_bytes = job.mean_bytes or job.known_mean_bytes
        ahead_bytes = progress.samples_per_s * AHEAD_S * job.known_mean_bytes
        need_bytes = max(
            job.at_once_bytes,
            min(ahead_bytes, self._files.budget_bytes / AHEAD_SHARE),
        )
        job.needs_bytes = (before, max(now, int(need_bytes)))

    def _keep_bytes(self) -> int:
        """What windows can spare; nothing where a job may be packed: its chunks need the room."""
        jobs = [job for job in self._jobs.values() if job.live]
        if any(self._layout.is_packable(job) for job in jobs):
            return 0
        budget_bytes = self._files.budget_bytes
        need_bytes = sum(max(job.needs_bytes) for job in jobs)
        if need_bytes > 2 * budget_bytes:  # what is read at once does not fit: ahead is in vain
            return budget_bytes
        return budget_bytes - min(need_bytes, budget_bytes // NEED_SHARE)

    def _keep_at_most(self, most_bytes: int) -> None:
        """What is kept beyond that is spare, what is used least first."""
        surplus = self._files.kept_bytes - most_bytes
        if surplus <= 0:
            return
        kept = self._files.kept()
        if self._files.uses is not None:
            kept = kept[np.argsort(self._files.uses[kept], kind="stable")]
        count = int(np.searchsorted(np.cumsum(self._files.ram_bytes(kept)), surplus)) + 1
        next(iter(self._jobs.values())).spare.append(self._files.unkeep(kept[:count]))

    def _kept_for_nobody(self) -> Inos:
        """What is kept, but in no order of a job that is planned for."""
        kept = self._files.kept() if self._files.kept_bytes else NO_INOS
        return kept[~self.is_told(kept)]

    # --- windows

    def _balance(self) -> None:
        jobs = [job for job in self._jobs.values() if job.live]
        if not jobs or self._files.budget_bytes <= 0:
            return
        uneven_bytes = self._files.budget_bytes // UNEVEN_SHARE
        even_bytes = max([2 * uneven_bytes, *(job.log.largest_bytes for job in jobs)])
        work = EXTEND_MOST
        blocked: set[str] = set()
        turns = 8 * len(jobs) * len(jobs) + 64
        while work > 0 and turns > 0:
            turns -= 1
            growing = [job for job in jobs if job.name not in blocked]
            if not growing:
                break
            small = min(growing, key=_standing)
            others = [job for job in jobs if job is not small]
            share = self._files.budget_bytes
            if others and not (nearest := min(others, key=_standing)).yields:
                share = max(nearest.window_bytes - small.window_bytes, 0) + uneven_bytes
            taken = self._extend(small, share, min(work, CHUNK))
            work -= taken
            if taken:
                continue
            large = max(others, key=_standing, default=None)
            excess = 0
            if large is not None and small.can_grow:
                if large.yields and not small.yields:
                    excess = 2 * large.window_bytes
                elif large.yields or not small.yields:
                    excess = large.window_bytes - small.window_bytes
            if large is None or excess <= even_bytes or not self._shrink(large, excess // 2):
                blocked.add(small.name)

    def _extend(self, job: Job, most_bytes: int, most: int) -> int:
        """Lets the window grow by at most so many bytes of its own, or by a chunk; positions
        taken.
        """
        most = min(most, job.last(job.end + most) - job.end)
        total, step = 0, 1024  # in the steady state there is little room
        while total < most:
            chunk_end = job.chunk_end(job.end)
            if chunk_end is not None:
                if total == 0 and not self._is_lacking(job):
                    total = self._extend_piece(job, None, chunk_end - job.end)[0]
                break
            step = min(step, most - total)
            taken, own_bytes = self._extend_piece(job, most_bytes, step)
            total += taken
            most_bytes -= own_bytes
            if (taken < step and job.end % job.sequence.samples_per_epoch) or taken == 0:
                break
            step *= 4
        return total

    def _is_lacking(self, job: Job) -> bool:
        """Whether there was no room for the chunk at its window's end, and is none now: to look
        costs a pass over it. What several jobs want may need less by now.
        """
        if job.lacking is None or len(self._jobs) > 1:
            return False
        position, needed_bytes = job.lacking
        return (
            position == job.end
            and needed_bytes > self._files.budget_bytes - self._files.wanted_bytes
        )

    def _extend_piece(self, job: Job, most_bytes: int | None, most: int) -> tuple[int, int]:
        """Positions taken, and their bytes; None: all that are asked for, or none of them."""
        inos, repeats = job.sequence.piece(job.end, most)
        if len(inos) == 0:
            return 0, 0
        own = self._files.ram_bytes(inos)
        flags = self._files.flags[inos]
        fresh = (self._files.refs[inos] == 0) & (flags & (GONE | READ) == 0) & (own > 0)
        if repeats:
            first = np.zeros(len(inos), np.bool_)
            first[np.unique(inos, return_index=True)[1]] = True
            fresh &= first
        cost, total = np.cumsum(np.where(fresh, own, 0)), np.cumsum(own)
        taken = int(
            np.searchsorted(cost, self._files.budget_bytes - self._files.wanted_bytes, "right")
        )
        if most_bytes is not None:
            taken = min(taken, int(np.searchsorted(total, most_bytes, "right")))
        if taken == 0 or (most_bytes is None and taken < len(inos)):
            job.lacking = (job.end, int(cost[-1])) if most_bytes is None else None
            return 0, 0
        inos, fresh = inos[:taken], fresh[:taken]
        if repeats:
            np.add.at(self._files.refs, inos, 1)
        else:
            self._files.refs[inos] += 1
        self._files.refs[0] = 0  # stands for all samples outside the mount
        self._files.flags[inos] &= ~READ & 0xFFFF
        newly = fresh & (flags[:taken] & HELD == 0)
        self._files.held_bytes += int(own[:taken][newly].sum())
        self._files.wanted_bytes += int(cost[taken - 1])
        self._files.flags[inos[newly]] |= HELD
        job.end += taken
        job.window_bytes += int(total[taken - 1])
        return taken, int(total[taken - 1])

    def _shrink(self, job: Job, by_bytes: int) -> bool:
        """Takes about so many bytes (at least) off the window's far end; False: it is empty."""
        end, freed = job.end, 0
        while freed < by_bytes and end > job.begin:
            n = job.sequence.samples_per_epoch
            epoch, index = divmod(end - 1, n)
            chunks = job.log.chunks.get(epoch)
            first = max(index + 1 - 4096, 0) if chunks is None else chunks.begin_of(index)
            start = max(job.begin, epoch * n + first)
            inos, _ = job.sequence.piece(start, end - start)
            back = np.cumsum(self._files.ram_bytes(inos)[::-1])
            count = min(int(np.searchsorted(back, by_bytes - freed)) + 1, len(back))
            if chunks is not None:
                count = len(back)
            freed += int(back[count - 1])
            end -= count
        if end == job.end:
            return False
        self._release(job, end, job.end)
        job.end = end
        job.sent = min(job.sent, end)
        return True

    def _release(self, job: Job, start: int, stop: int, keep_bytes: int = 0) -> None:
        """Positions at one end of the window leave it. `keep_bytes`: of all files that are missing
        on SSD as much may stay for good.
        """
        position = start
        for inos, repeats in job.sequence.pieces(start, stop):
            own = self._files.ram_bytes(inos)
            total_bytes = int(own.sum())
            job.window_bytes -= total_bytes
            if position < job.sent:
                looked_at = min(job.sent - position, len(inos))
                job.sent_bytes -= int(own[:looked_at].sum())
            position += len(inos)
            if repeats:
                np.subtract.at(self._files.refs, inos, 1)
                inos = np.unique(inos)
            else:
                self._files.refs[inos] -= 1
            self._files.refs[0] = 0
            left = self._files.still_spare(inos)
            if keep_bytes:
                self._files.keep(left, keep_bytes)
                left = self._files.still_spare(left)
            self._files.wanted_bytes -= int(self._files.ram_bytes(left).sum())
            is_staged = self._files.flags[left] & STAGED != 0
            if is_staged.any():
                job.spare.append(left[is_staged])
            self._files.let_go(left[~is_staged])

    def _reclaim(self) -> None:
        """Drops spare files until all that is held fits."""
        for job in self._jobs.values():
            while self._files.held_bytes > self._files.budget_bytes and job.spare:
                spare = job.spare.popleft()
                spare = self._files.still_spare(spare)
                total = np.cumsum(self._files.ram_bytes(spare))
                excess = self._files.held_bytes - self._files.budget_bytes
                count = min(int(np.searchsorted(total, excess)) + 1, len(spare))
                self._files.let_go(spare[:count])
                if count < len(spare):
                    job.spare.appendleft(spare[count:])

    def _release_window(self, job: Job) -> None:
        """Empties the window; what is staged is spare until the next decide() has looked."""
        self._release(job, job.begin, job.end)
        job.restart()

    def _restart_windows(self) -> None:
        for job in self._jobs.values():
            if job.live:
                self._release_window(job)

    def _jump(self, job: Job, place: int, now: float) -> None:
        self._release_window(job)
        was_wrong = job.state == "wrong"
        if job.sequence.epoch_of(place) + 1 < job.log.decided:  # begun again, or an earlier one
            self._layout.end(job)
        job.progress.move(job.last(place), now)
        job.progress.begun = True
        if job.state != "running":
            job.state, job.reason, job.running_since = "running", "", now
        job.restart()
        job.search = job.search and Search(now, span=job.batch_size)
        job.is_lost = job.search is not None
        if was_wrong:
            self._notices.append((job.name, "follows its order again; planned again"))

    def _check(self, job: Job, now: float) -> None:
        """Where much of an epoch is in order, that says little, and a reader may be lost by chance:
        he is looked for again and again, and that decides.
        """
        if job.search is None and now >= job.check_at:
            job.search = Search(now, span=job.batch_size)

    def _condemn(self, job: Job, now: float) -> None:
        progress = job.progress
        job.reason = (
            f"{progress.strays} of {progress.observations} reads seen were not in the hinted "
            "order: another seed, rank, world size or directory, no shuffling, or other readers?"
        )
        job.state = "wrong"
        job.search, job.is_lost = Search(now, span=job.batch_size, rest_s=job.rest_s), True
        job.rest_s = min(2 * job.rest_s, REST_MOST_S)
        self._retire(job)
        self._notices.append((job.name, f"wrong hint: {job.reason}"))

    def _believe(self, job: Job) -> None:
        """What was taken for wrong is to be judged anew, from where the trainer said last."""
        job.state, job.reason = "waiting", ""
        job.search, job.is_lost = None, False

    def _retire(self, job: Job) -> None:
        """A job that is over, or not believed any more, gives back all that no other one wants."""
        self._release_window(job)
        self._layout.end(job)
        for spare in job.spare:
            self._files.let_go(self._files.still_spare(spare))
        job.spare.clear()
        self._files.let_go(self._kept_for_nobody())
        self._placement.cancel()
        for other in self._jobs.values():
            other.fetched = other.begin
        if not any(other.live for other in self._jobs.values() if other is not job):
            self._clear = True
            self._files.clear()
            self._placement.unpinned()

    # --- staging

    def _stage(self, now: float) -> list[Command]:
        # What two jobs want is moved with its chunk, so chunks are chosen first.
        chunks = [
            command
            for job in self._jobs.values()
            if job.live and job.sent < job.end
            for command in self._layout.stage_chunks(job, now)
        ]
        room = self._layout.room()
        again = self._files.retry(now, room)
        found: list[tuple[Job, Inos, Positions, npt.NDArray[np.float64]]] = []
        for job in self._jobs.values():
            if job.live and job.sent < job.end and room > 0 and self._layout.is_loose(job):
                found.append(self._unsent(job, room))
        inos = np.concatenate([again, *(part[1] for part in found)])
        if len(found) > 1:
            need = np.concatenate([np.zeros(len(again)), *(part[3] for part in found)])
            inos = inos[np.argsort(need, kind="stable")]
        if len(inos) > 1:
            inos = inos[np.sort(np.unique(inos, return_index=True)[1])]
        inos = inos[: max(room, 0)]
        store = self._files.mark_sent(inos)
        for job, _, _, _ in found:
            self._advance_sent(job)
        return [*commands_of("stage", [inos], store), *chunks]

    def _unsent(self, job: Job, most: int) -> tuple[Job, Inos, Positions, npt.NDArray[np.float64]]:
        """The next files of the window to be staged, where, and in how many seconds (or bytes) each
        is needed.
        """
        limit = min(self._layout.sendable_end(job) - job.sent, max(most, 4096))
        parts: list[Inos] = []
        start = job.sent
        while start < job.sent + limit:
            inos, _ = job.sequence.piece(start, job.sent + limit - start)
            parts.append(inos)
            start += len(inos)
        inos = np.concatenate(parts)
        ahead = np.cumsum(self._files.ram_bytes(inos)) + job.sent_bytes
        open_ = np.flatnonzero(self._files.flags[inos] & (HELD | SENT | STAGED | FAILED) == HELD)
        open_ = open_[:most]
        speed = job.progress.samples_per_s or 1.0
        return job, inos[open_], open_ + job.sent, ahead[open_] / speed

    def _advance_sent(self, job: Job) -> None:
        """Moves `sent` to the first file that is to be staged and is not sent yet."""
        step = 1024
        end = self._layout.sendable_end(job)
        while job.sent < end:
            inos, _ = job.sequence.piece(job.sent, min(step, end - job.sent))
            step = min(4 * step, CHUNK)
            open_ = np.flatnonzero(
                self._files.flags[inos] & (HELD | SENT | STAGED | FAILED) == HELD
            )
            count = int(open_[0]) if len(open_) else len(inos)
            job.sent_bytes += int(self._files.ram_bytes(inos[:count]).sum())
            job.sent += count
            if len(open_):
                break

    # --- what people see

    def status(self, name: str) -> dict[str, Any]:
        """Figures of one job; plain Python values."""
        job, jobs = self._jobs[name], self._jobs.values()
        ram = {"ram_needed_bytes": self._ram_needed_bytes() if job.live else None}
        return status(job, jobs, self._files, self._rates) | self._layout.status(job) | ram

    def _ram_needed_bytes(self) -> int | None:
        """The mount's budget of RAM that would do, where this one does not take what its jobs read
        at once, twice: windows keep no distance then, and most reads come before their files.
        """
        need_bytes = sum(job.at_once_bytes for job in self._jobs.values() if job.live)
        if need_bytes <= self._files.budget_bytes:
            return None
        return math.ceil(need_bytes * OUTSIDE_SHARE / (OUTSIDE_SHARE - 1))

    def notices(self) -> list[tuple[str, str]]:
        """(job, one line): new since last asked."""
        notices, self._notices = self._notices, []
        return notices

    def check_invariants(self) -> None:
        """Costs a pass over all files: for tests."""
        refs = np.zeros(len(self._files.refs), np.int64)
        for job in self._jobs.values():
            assert job.begin <= job.sent <= job.end, (job.begin, job.sent, job.end)
            window_bytes = 0
            for inos, _ in job.sequence.pieces(job.begin, job.end):
                np.add.at(refs, inos, 1)
                window_bytes += int(self._files.ram_bytes(inos).sum())
            assert window_bytes == job.window_bytes
            assert job.live or job.begin == job.end
            job.progress.check_invariants()
        refs[:1] = 0
        refs[self._files.kept()] += 1
        assert (refs == self._files.refs).all()
        self._files.check_invariants()


def _give_to_nearest(jobs: list[Job], placed: list[Positions]) -> None:
    """An observation in order for several jobs is evidence for the nearest reader alone: ranks of
    one dataset read each other's files of the next epoch.
    """
    if len(jobs) < 2:
        return
    away = np.array(
        [
            np.where(where >= 0, abs(where - job.progress.high), np.iinfo(np.int64).max)
            for job, where in zip(jobs, placed, strict=True)
        ]
    )
    nearest = away.min(axis=0)
    for where, distance in zip(placed, away, strict=True):
        where[distance > nearest] = -1


def _standing(job: Job) -> tuple[bool, int]:
    """Windows grow in this order, and shrink in the opposite one."""
    return job.yields, job.window_bytes
