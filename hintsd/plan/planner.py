"""From access sequences, sizes and budgets to commands for one mount: what to stage, fetch, drop
and arm, in which order and when (pure: no I/O, no clock of its own).

The rules are docs/HINTS.md's; HDMLP 3.1 is where they come from. Each has its module:

* which files are in RAM: windows.py
* in which order they are sent: staging.py
* which are on SSD: placement.py
* how they lie there: layout.py
* which reader is where, and whether it follows its order: followers.py

All of them go by the state of each file (files.py, ram.py) and of each job (job.py). Here jobs come
and go, and the parts are asked in turn.

INVARIANT: what is sent is sent for a job that is live: what no live job wants is taken back when
one ends, or is taken for wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fusecache.base.wire import Place, Result
from hintsd.follow.progress import IDLE_AFTER_S, Progress
from hintsd.follow.sequence import NO_INOS, NO_POSITIONS, SLICE, Inos, Sequence
from hintsd.follow.trail import Trails
from hintsd.plan.commands import Command, Withdrawn, commands_of
from hintsd.plan.files import Files, Ssd, Wires
from hintsd.plan.followers import Followers
from hintsd.plan.job import Job
from hintsd.plan.lanes import Lanes
from hintsd.plan.layout import Layout
from hintsd.plan.placement import Placement
from hintsd.plan.ram import Ram, Reclaimed
from hintsd.plan.staging import Staging
from hintsd.plan.status import Hits, Rates, status
from hintsd.plan.windows import Windows, datasets
from hintsd.policies import Integers, Mask
from hintsd.reorder.worth import Probe

if TYPE_CHECKING:
    from hintsd.keeping.keeping import Keeping


class MountPlanner:
    """The plan of all jobs of one mount."""

    def __init__(self, ram_bytes: int, ssd_room_bytes: int, keeping: Keeping | None = None) -> None:
        """`keeping`: whose rule says what stays; None: what is used soonest does."""
        jobs: dict[str, Job] = {}
        self._jobs = jobs
        self._withdrawn = Withdrawn()
        self._files = files = Files()
        self._ssd = Ssd(files, self._withdrawn)
        self._ram = ram = Ram(files, self._ssd, self._withdrawn)
        self._reclaimed = reclaimed = Reclaimed(files, ram)
        self._wires = Wires(files)
        self._placement = Placement(files, self._ssd)
        self._layout = layout = Layout(files, ram, jobs)
        lanes = Lanes(files, ram, self._wires)
        self._windows = Windows(
            files, self._ssd, ram, reclaimed, jobs, self._placement, layout, lanes, keeping
        )
        self._keeping = keeping
        self._exchange = exchange = self._placement.exchange
        self._staging = Staging(files, ram, reclaimed, jobs, layout, lanes, exchange)
        self.followers = Followers(
            files, ram, reclaimed, jobs, self._wires, lanes, self._windows, layout, self._retire
        )
        """What is seen of readers, and what becomes of the jobs then."""
        self.trails = Trails()
        """What they have passed, for a recording."""
        self.are_cached = files.are_cached
        """Which of these inode numbers, of files that were learned."""
        self._clear = False
        self._is_busy = True  # a job is planned for, or may come
        self._rates = Rates()
        self._hits = Hits()
        self.set_budgets(ram_bytes, ssd_room_bytes)

    # --- what is known of the mount

    def set_budgets(self, ram_bytes: int, ssd_room_bytes: int) -> None:
        """ram_bytes: of the mount; ssd_room_bytes: what SSD can take beyond what is stored."""
        self._windows.set_budget(ram_bytes)
        self._placement.set_room(ssd_room_bytes, self._jobs.values())

    def set_layout(self, layout: str, probe: Probe | None) -> None:
        """static, reorder or auto, and what the mount has measured of its SSD."""
        self._layout.set(layout, probe)

    def set_pins(
        self, is_known: bool, told: int, *, others_may_go: bool, evicts: bool = False
    ) -> None:
        """As `Placement.set_pins`."""
        self._placement.set_pins(is_known, told, others_may_go=others_may_go, evicts=evicts)

    def packing_refused(self, why: str, now: float) -> None:
        """The mount has no log open, for this reason, although one was announced."""
        self._layout.refused(why, now)

    def set_sources(
        self, origin_bytes_per_s: float, ssd_bytes_per_s: float, origin_files: int
    ) -> None:
        """What the mount reads there at most, 0: not known; how many files it has read at the
        origin.
        """
        self._rates = Rates(origin_bytes_per_s, ssd_bytes_per_s)
        self._hits.tell(origin_files)

    def learn(self, inos: Inos, sizes: Integers, where: npt.NDArray[np.uint8]) -> None:
        """Files of a dataset (`where`: bits of `Place`); again: they have changed."""
        if len(inos) == 0:
            return
        self._grow(inos)
        self._files.widen(sizes)
        for start in range(0, len(inos), SLICE):
            part = slice(start, start + SLICE)
            changed = np.unique(inos[part][self._ram.changed(inos[part], sizes[part])])
            if len(changed):
                self._windows.empty_all()
                self._ram.let_go(changed)
                self._ssd.unsettle(changed)
            self._ssd.learn(inos[part], where[part])
            self._files.own(inos[part], where[part] & Place.OWNED != 0)
            self._files.resize(inos[part], sizes[part])

    def _grow(self, inos: Inos) -> None:
        """Makes room for these inode numbers."""
        count = int(inos.max(initial=0)) + 1
        self._files.grow(count)
        self._ssd.grow(count)
        self._ram.grow(count)

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
        owner: int = 0,
    ) -> None:
        """A job on these files, which were learned before, that begins at sample `index` of
        `epoch`; or (`is_lost`) was seen there last, and is anywhere beyond by now. `owner`: of
        whose jobs it is.
        """
        assert name not in self._jobs, "job names are unique"
        assert samples_per_epoch > 0
        sample = dataset[:: max(1, len(dataset) // 1024)]
        mean_bytes = self._ram.total_bytes(sample) / max(1, len(sample))
        progress = Progress(
            samples_per_epoch,
            start=epoch * samples_per_epoch + index,
            batch_size=batch_size,
            workers=workers,
            prefetch_factor=prefetch_factor,
            now=now,
            sample_bytes=self._files.total_bytes(sample) / max(1, len(sample)),
        )
        sequence = Sequence(samples_per_epoch, epochs)
        job = Job(
            *(name, sequence, batch_size, progress, dataset, self._wires),
            mean_bytes=mean_bytes,
            owner=owner,
        )
        if is_lost:
            job.lose(now)
        self._hits.open(job, self._jobs.values())
        self._jobs[name] = job
        self.trails.open(job)

    def wanted_epochs(self, name: str) -> list[int]:
        """Epochs whose order is missing for planning now: the current one first, then the next,
        those behind that for a job that may be packed, then at most one of the horizon over
        which uses are counted.
        """
        job = self._jobs[name]
        if job.state == "done":
            return []
        sequence = job.sequence
        current = sequence.epoch_of(job.window.begin)
        last = current + self._layout.epochs_ahead(job) + 1
        last = last if sequence.epochs is None else min(last, sequence.epochs)
        wanted = [epoch for epoch in range(current, last) if sequence.is_open(epoch)]
        if not wanted and job.live:
            epoch = self._placement.horizon_epoch(job, current)
            return [] if epoch is None else [epoch]
        return wanted

    def announce(self, name: str, epoch: int, inos: Inos, now: float) -> None:
        """As `supply`, by the trainer, which is about to read it: a job that was taken for wrong
        begins there anew, and one that was not read for a while has its share of RAM again.
        """
        job = self._jobs[name]
        if job.state == "wrong":
            job.progress.begin(job.sequence.start(epoch), now)
            job.sequence.forget_before(epoch)
            job.restart()
            job.believe()
        elif job.live:
            job.progress.confirm(now)
            if job.state == "idle":
                job.run(now) if job.progress.begun else job.wait()
        self.supply(name, epoch, inos, is_announced=True)

    def supply(self, name: str, epoch: int, inos: Inos, *, is_announced: bool = False) -> None:
        """The order of one epoch, of any length; 0: a sample outside the mount. The array is kept.
        Again: replaces what was predicted. ValueError: it is empty. One of the horizon is counted
        alone, unless it `is_announced`: nobody could compute it again.
        """
        job = self._jobs[name]
        sequence = job.sequence
        current = sequence.epoch_of(job.window.begin)
        if (
            not is_announced
            and epoch > current + self._layout.epochs_ahead(job)
            and current in sequence.orders
            and epoch in self._placement.horizon(job, current)
        ):
            self._placement.count(job, epoch, inos)
            return
        self._grow(inos)
        old = sequence.orders.get(epoch)
        if old is not None and np.array_equal(old.inos, inos):
            return
        if sequence.is_moved_by(epoch, len(inos)):
            self.followers.begin_anew(job, epoch, inos)
            return
        if old is not None:
            self._layout.end(job)
        if old is not None and len(old.inos) == len(inos) and old.contains(inos).all():
            self._windows.rearrange(job, lambda: sequence.put(epoch, inos))
            job.placed.fetch_from(job.window.begin)
            self._windows.sort_anew()
            return
        if old is not None or current not in sequence.orders:
            self._windows.empty(job)
        sequence.put(epoch, inos)
        self._windows.sort_anew()
        if current not in sequence.orders and job.live:
            # the reader is in an epoch that could not be told us: it begins here
            job.progress.begin(sequence.start(epoch), job.progress.confirmed_at)
            job.restart()
        job.placed.demand()

    def score(self, name: str, inos: Inos, uses: npt.NDArray[np.float32]) -> None:
        """As `Scores.tell`."""
        self._grow(inos)
        self._jobs[name].scores.tell(inos, uses)
        if self._keeping is not None:
            self._keeping.tell(inos, uses)
        self._windows.sort_anew()

    def unknown(self, name: str, epoch: int) -> None:
        """This epoch's order cannot be known (yet)."""
        self._jobs[name].sequence.cannot_know(epoch)

    def close_job(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            self._hits.close(job)
            self.trails.close(job)
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

    def _retire(self, job: Job) -> None:
        """A job that is over, or not believed any more, gives back all that no other one wants."""
        self._windows.empty(job)
        self._layout.end(job)
        self._windows.spare.let_go_but(datasets(self._jobs.values(), len(self._files.flags)))
        kept = self._ram.kept()
        self._ram.let_go(kept[~self.is_told(kept)])
        self._placement.cancel()
        for other in self._jobs.values():
            other.placed.fetch_from(other.window.begin)
        if not any(other.live for other in self._jobs.values() if other is not job):
            self._clear = True
            self._withdrawn.forget_drops()
            self._ssd.clear()
            self._wires.void()
            self._placement.unpinned()

    # --- what the mount answers

    def done(self, inos: Inos, results: npt.NDArray[np.uint8], now: float) -> None:
        """`done` frames (docs/WIRE.md)."""
        told = set(results.tolist())
        if Result.STORED_FOR_OTHERS in told:
            is_for_others = results == Result.STORED_FOR_OTHERS
            self._ssd.stored_for_others(inos[is_for_others])
            inos, results = inos[~is_for_others], results[~is_for_others]
        if told & {Result.EVICTED, Result.NOT_EVICTED}:
            is_eviction = (results == Result.EVICTED) | (results == Result.NOT_EVICTED)
            self._exchange.done(inos[is_eviction], results[is_eviction])
            inos, results = inos[~is_eviction], results[~is_eviction]
        if told & {Result.STORED, Result.STAGED_AND_STORED}:
            is_stored = (results == Result.STORED) | (results == Result.STAGED_AND_STORED)
            self._exchange.store(self._ssd.missing(inos[is_stored]))
        if len(reclaimed := self._ram.done(inos, results, now)):
            self._reclaimed.lose(reclaimed)
        if Result.NO_ROOM in told:
            self._placement.cancel()  # they would be fetched for nothing

    def disconnected(self) -> None:
        """All that was sent is void: the next decide() sends the windows anew."""
        self._windows.empty_all()
        for job in self._jobs.values():
            job.disconnected()
        for part in (
            self._ram,
            self._windows.kept,
            self._windows.spare,
            self._ssd,
            self._withdrawn,
            self._wires,
        ):
            part.void()
        self._reclaimed.void()
        self._placement.void()
        self._layout.void()
        self._clear = False
        self.trails.record(0)

    # --- deciding

    def patience_s(self) -> float:
        """How long the next decide() may wait: as Windows.patience_s and Layout.patience_s have it.
        For ever, while none of those that there are is planned for.
        """
        if not self._is_busy:
            return math.inf
        return min([*self._windows.patience_s(), *self._layout.patience_s()], default=0.0)

    def decide(self, now: float) -> list[Command]:
        """What to send now, in this order. Bounded work and bounded arrays; call it again."""
        jobs = self._jobs.values()
        for job in jobs:
            self._tick(job, now)
        _share(jobs, now)
        self._windows.follow()
        self._windows.keep(now)
        self._exchange.tick(now)
        self._is_busy = not jobs or any(job.live for job in jobs)
        pins = self._placement.pin(jobs)
        if self._placement.is_room_known:
            self._placement.place(jobs, now)
        self._layout.review()
        self._windows.fill()
        stages, fetches = [], []
        if self._placement.is_room_known:
            self._layout.begin_epochs(now)
            stages = self._staging.stage(now, has_lanes=self._windows.has_lanes)
            fetches = self._placement.fetch(
                job
                for job in jobs
                if job.log.decided >= 0 or not self._layout.is_packable(job)  # a log comes first
            )
        wires = self._wires.lay(_wires(job, now) for job in jobs)
        clear, self._clear = self._clear, False
        return [
            *self._withdrawn.take(),
            *([Command("clear", NO_INOS)] if clear else []),
            *pins,
            *self._layout.take_packs(),
            *stages,
            *self._exchange.take(),
            *fetches,
            *commands_of("arm", wires),
        ]

    def _tick(self, job: Job, now: float) -> None:
        if not job.live:
            return
        progress, total = job.progress, job.sequence.total
        progress.resize(job.sequence.length(job.sequence.epoch_of(progress.high)))
        progress.pace(now)
        job.tally.tick(now)
        if total is not None and progress.finished(total, now):
            job.finish(self._layout.status(job))
            self._retire(job)
        elif progress.idle(now) and (
            job.state == "running"
            or (job.state == "waiting" and _is_in_the_way(job, self._jobs.values(), now))
        ):
            job.rest()

    # --- what people see

    def status(self, name: str) -> dict[str, Any]:
        """Figures of one job; plain Python values."""
        job, jobs = self._jobs[name], self._jobs.values()
        figures = status(job, jobs, self._files, self._ram, self._rates)
        taken = {
            "reclaimed": self._reclaimed.count,
            "withheld_bytes": self._reclaimed.withheld_bytes,
        }
        kept = {"hits": self._hits.of(job, jobs), "kept_bytes": self._ram.kept_bytes}
        share = self._windows.shares.figures(name)
        return figures | taken | kept | share | self._layout.status(job)

    def check_invariants(self) -> None:
        """Costs a pass over all files: for tests."""
        self._windows.check_invariants()
        for job in self._jobs.values():
            job.progress.check_invariants()
        self._ram.check_invariants()
        self._ssd.check_invariants()


def _wires(job: Job, now: float) -> Inos:
    """The files that are to be armed for it now, armed already or not."""
    if job.state == "done" or not job.sequence.orders:
        return NO_INOS
    wiring, where = job.wiring, [NO_POSITIONS]
    if job.live:
        if job.is_read:  # else it is not known who looks up what
            wiring.weigh_passed(now)
        where += [wiring.ahead(), *wiring.sentinels(now)]
    if job.search is not None and job.search.are_wires_due(now):
        where.append(wiring.over_an_epoch(job.search_spacing))
    return job.sequence.inos_at(wiring.without_fired(np.concatenate(where)))


def _is_in_the_way(job: Job, jobs: Collection[Job], now: float) -> bool:
    """Whether another job has been read for a while, which may have its share of RAM. Not one
    that has just begun, or gone on: ranks do so together, and are not seen at one moment.
    """
    return any(
        other.state == "running" and now - other.running_since > IDLE_AFTER_S
        for other in jobs
        if other is not job
    )


def _share(jobs: Collection[Job], now: float) -> None:
    """RAM: owners have equal shares, and the jobs of each have equal shares of that."""
    yielding = {
        job.name
        for job in jobs
        if job.state == "idle" and (job.yields or _may_yield(job, jobs, now))
    }
    sharers = Counter(job.owner for job in jobs if job.live and job.name not in yielding)
    for job in jobs:
        job.share(yields=job.name in yielding, sharers=max(1, sharers[job.owner]))


def _may_yield(job: Job, jobs: Collection[Job], now: float) -> bool:
    """Whether there is another one that its share is of more use to."""
    is_awaited = any(other.state == "waiting" for other in jobs)
    return is_awaited or _is_in_the_way(job, jobs, now)
