"""Who follows which order: what an observation says of each job's reader, and what becomes of the
job then (docs/HINTS.md rules 5 to 8; pure).

How far a reader is: follow/progress.py; whether it is one: follow/evidence.py; where it is when
its place is not known: follow/search.py; which wires have fired: follow/wiring.py. Here they are
asked, and a job is woken, moved to another place, looked for, or taken for wrong.

INVARIANT: an observation is weighed once for each job, and moves at most the nearest reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fusecache.base.wire import Observed, Standing
from hintsd.follow.progress import are_late
from hintsd.follow.readers import ANOTHERS, OWN, STRANGER, Pids, Whose
from hintsd.follow.search import (
    ENOUGH,
    EPOCHS_LEAST,
    EPOCHS_MOST,
    SAMPLES_MOST,
    Opened,
    Place,
)
from hintsd.follow.sequence import FAR, Inos, Positions
from hintsd.plan.files import Files, Wires
from hintsd.plan.job import Cause, Job
from hintsd.plan.lanes import Lanes
from hintsd.plan.layout import Layout
from hintsd.plan.ram import Ram, Reclaimed
from hintsd.plan.windows import Windows
from hintsd.policies import Mask

OBSERVED_WIRES, OBSERVED_MOST = 4, 128  # weighed at once: a zone reaches four wires ahead
AWAITED_S = 30.0  # a trainer may need so long to begin

_LATE = (
    (Standing.FAILED, "failed"),
    (Standing.STAGED, "evicted"),
    (Standing.FLYING, "fetching"),
)


class _Seen(NamedTuple):
    """Observations (docs/WIRE.md), and who made them."""

    inos: Inos
    kinds: npt.NDArray[np.uint8]
    reads: Mask
    """Which of them are READs; the others are look-ups."""
    processes: Pids
    whose: Mapping[str, Whose]
    now: float

    def part(self, chosen: slice | Mask) -> _Seen:
        whose = {name: stands[chosen] for name, stands in self.whose.items()}
        return _Seen(
            self.inos[chosen],
            self.kinds[chosen],
            self.reads[chosen],
            self.processes[chosen],
            whose,
            self.now,
        )


@dataclass(eq=False)
class _View:
    """What observations are to one job."""

    job: Job
    theirs: Mask
    """They say nothing of it."""
    where: Positions
    """Where their files stand in its epochs; -1: nowhere, or they say nothing of it."""
    is_used: Mask
    """The file stands in its order, whoever reads it."""
    is_known: Mask
    """`where` has a place."""
    unfired: int | None
    placed: Positions
    """The position in order, or -1; of several jobs' the nearest one's."""
    in_order: Mask
    """`placed` has one."""


class Followers:
    """The readers of one mount's `jobs`: all of them, as they come and go."""

    def __init__(
        self,
        files: Files,
        ram: Ram,
        reclaimed: Reclaimed,
        jobs: Mapping[str, Job],
        wires: Wires,
        lanes: Lanes,
        windows: Windows,
        layout: Layout,
        retire: Callable[[Job], None],
    ) -> None:
        """`retire`: takes back the plan of a job that no reader follows."""
        self._files, self._ram, self._jobs, self._reclaimed = files, ram, jobs, reclaimed
        self._wires, self._lanes, self._windows, self._layout = wires, lanes, windows, layout
        self._retire = retire
        self._notices: list[tuple[str, str]] = []

    def notices(self) -> list[tuple[str, str]]:
        """(job, one line): new since last asked."""
        notices, self._notices = self._notices, []
        return notices

    # --- a reader whose place is not known

    def is_sought(self, name: str, now: float) -> bool:
        """Whether epochs that are not known yet are to be looked through for its reader."""
        search = self._jobs[name].search
        return search is not None and search.is_walk_due(now)

    def sought(self, name: str) -> tuple[Opened, list[int]]:
        """What the reader was seen to open, for `search.walk`, and the epochs to look through."""
        job = self._jobs[name]
        assert job.search is not None
        sequence = job.sequence
        first = sequence.epoch_of(job.window.begin)
        many = SAMPLES_MOST // sequence.samples_per_epoch
        stop = first + min(max(EPOCHS_LEAST, many), EPOCHS_MOST)
        stop = stop if sequence.epochs is None else min(stop, sequence.epochs)
        # the one before, too: where much of an epoch is in order, it may be left too early
        likely = [*range(first, stop), *range(max(first - 1, 0), first)]
        return job.search.seen(), [epoch for epoch in likely if epoch not in sequence.orders]

    def found(self, name: str, place: Place | None, now: float) -> None:
        """What came of it. The reader has gone on meanwhile, so the search does, too."""
        job = self._jobs[name]
        if job.search is None:
            return
        job.search.walked(now)
        if place is None:
            return
        self._windows.empty(job)
        self._layout.end(job)
        job.sequence.forget()
        job.sequence.put(place.epoch, place.inos)
        job.placed.demand()
        self._jump(job, job.sequence.start(place.epoch) + place.position, now)

    def _find(self, job: Job, now: float) -> int | None:
        """Where the reader is found in the known epochs, unless it is where we thought."""
        if job.search is None:
            return None
        place = job.search.find(sorted(job.sequence.orders.items()))
        if place is None:
            return None
        job.end_search(now)
        progress = job.progress
        position = job.sequence.start(place[0]) + place[1]
        if job.live and progress.low - progress.slack <= position < progress.zone_end(None):
            progress.evidence.forget()
            progress.enter(job.sequence.start(place[0]))
            return None
        return position

    def _give_up(self, job: Job, now: float) -> None:
        """The reader is not found."""
        if job.is_lost:
            job.give_up(now)
        elif self._may_be_others(job) or not _is_clear(job):
            job.end_search(now)
        elif job.search is not None and job.search.lasted(now, job.search_spacing):
            self._condemn(job, now, Cause.SEARCH)

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

    def _jump(self, job: Job, place: int, now: float) -> None:
        """The reader is at another place."""
        was_wrong = job.state == "wrong"
        is_watched = job.live and job.wiring.is_watched
        if is_watched:  # what it has opened on its way there is known
            job.wiring.weigh_passed(now, place)
        self._windows.empty(job)
        if job.sequence.epoch_of(place) + 1 < job.log.decided:  # begun again, or an earlier one
            self._layout.end(job)
        job.progress.find(job.sequence.last(place), now)
        job.run(now)
        job.restart()
        if is_watched:
            job.wiring.watch(place)
        job.seek_on(now)
        if was_wrong:
            self._notices.append((job.name, "follows its order again; planned again"))

    def begin_anew(self, job: Job, epoch: int, inos: Inos) -> None:
        """Its order has another length than was known, and all behind it lies elsewhere now: the
        reader is there, or comes there next.
        """
        sequence, progress = job.sequence, job.progress
        current, index = sequence.at(progress.high)
        now = sequence.orders.get(current)
        self._windows.empty(job)
        self._layout.end(job)
        sequence.forget()
        if current == epoch - 1 and now is not None:
            sequence.put(current, now.inos)
        else:
            current, index = epoch, 0
        sequence.put(epoch, inos)
        progress.begin(sequence.start(current) + index, progress.confirmed_at)
        job.restart()
        job.placed.demand()

    def _condemn(self, job: Job, now: float, cause: Cause) -> None:
        job.condemn(now, cause)
        self._retire(job)
        self._notices.append((job.name, f"wrong hint: {job.reason}"))

    # --- what is seen

    def step(self, name: str, epoch: int, batch: int, now: float) -> None:
        """The trainer has taken `batch` batches of this epoch."""
        job = self._jobs[name]
        if job.state == "done":
            return
        start, n = job.sequence.start(epoch), job.sequence.length(epoch)
        job.progress.step(start + min(batch * job.batch_size, n), now)
        if job.live:
            if job.is_lost:
                job.end_search(now)
            job.wake(now)
        else:  # nothing is believed, but this is the epoch in which to look for the reader
            job.restart()
            job.sequence.forget_before(epoch)

    def observe(
        self,
        inos: Inos,
        kinds: npt.NDArray[np.uint8],
        now: float,
        whose: Mapping[str, Whose] | None = None,
        processes: Pids | None = None,
    ) -> None:
        """`seen` frames (docs/WIRE.md). `whose`: for each job who made each of these observations
        (follow/readers.py), where that can be told; `processes`: which process did, 0: not known.
        """
        processes = np.zeros(len(inos), np.uint32) if processes is None else processes
        reads = kinds & Observed.MASK != Observed.LOOKUP
        seen = _Seen(inos, kinds, reads, processes, whose or {}, now)
        known = (inos > 0) & (inos < len(self._files.flags))
        if _count(known) < len(known):
            seen = seen.part(known)
        if not self._is_anybody_heeded(now):
            self._listen(seen)
            return
        # A reader moves on between two wires: only few of them are weighed at one position. Where
        # no job is planned for, there is none.
        is_placed = any(job.live for job in self._jobs.values())
        start, count = 0, len(seen.inos)
        looks = count - _count(seen.reads)
        if count and (not is_placed or (looks <= OBSERVED_WIRES and count <= OBSERVED_MOST)):
            self._observe(seen)
            return
        wires = np.cumsum(~seen.reads)
        while start < count:
            passed = wires[start - 1] if start else 0
            stop = int(np.searchsorted(wires, passed + OBSERVED_WIRES, "right"))
            stop = min(max(stop, start + 1), start + OBSERVED_MOST)
            self._observe(seen.part(slice(start, stop)))
            start = stop
            if start < count and not self._is_anybody_heeded(now):
                self._listen(seen.part(slice(start, count)))
                return

    def _is_anybody_heeded(self, now: float) -> bool:
        """Whether each READ counts: for a plan, or to tell where a reader is."""
        return any(
            job.live or (job.search is not None and not job.search.is_asleep(now))
            for job in self._jobs.values()
        )

    def _listen(self, seen: _Seen) -> None:
        """No job is planned for or watched: of what is seen only wires count."""
        inos, reads = seen.inos, seen.reads
        self._wires.disarm(inos[~reads])
        for job in self._jobs.values():
            if job.search is None or job.state == "done":
                continue
            his = ~reads & ~self._strangers(job, seen)
            his[his] &= self._may_be_of(job, inos[his])
            if job.search is not None and his.any():
                job.search.see(inos[his], reads[his], 1, seen.now, seen.processes[his])
                if (place := self._find(job, seen.now)) is not None:
                    self._jump(job, place, seen.now)

    def _observe(self, seen: _Seen) -> None:
        views = self._views(seen)
        excused = np.zeros(len(seen.inos), np.bool_)
        # a file of the dataset that no reader is to read now: another rank reads it, or a stranger
        in_none = seen.reads & (self._files.sizes[seen.inos] > 0)
        for view in views:
            excused |= view.in_order
            in_none &= ~view.is_used
        _give_to_nearest(views)
        if _count(seen.reads):
            _count_reads(views, seen)
            self._reclaimed.read(seen.inos[seen.reads])
            self._read_first(views, seen)
        for view in views:
            strays = (view.is_known | in_none) & ~(excused | view.theirs)
            for other in views:  # what another live job reads somewhere is no stray of this one
                if other is not view and other.job.live:
                    strays &= ~other.is_known
            self._weigh(view, seen, strays)

    def _views(self, seen: _Seen) -> list[_View]:
        """Of all jobs that have orders, with what strangers took from them taken away."""
        jobs = [job for job in self._jobs.values() if job.state != "done" and job.sequence.orders]
        strange = [self._strangers(job, seen) for job in jobs]
        candidates = [job.sequence.locate(seen.inos, job.progress.low) for job in jobs]
        looks = ~seen.reads
        if _count(looks):
            stolen = np.zeros(len(looks), np.bool_)
            for job, where, theirs in zip(jobs, candidates, strange, strict=True):
                if job.live and _count(theirs):
                    stolen |= job.wiring.steal(where, theirs & looks)
            # What was looked up has no wire any more. What a stranger took from a job that has not
            # read it is laid again; it holds `low`, but not what is in order beyond it.
            self._wires.disarm(seen.inos[looks & ~stolen])
            self._wires.ask(seen.inos[stolen])
        views = []
        for job, theirs, where in zip(jobs, strange, candidates, strict=True):
            is_used = is_known = _somewhere(where)
            if _count(theirs):
                where[:, theirs] = -1
                is_known = is_used & ~theirs
            has_repeats = job.sequence.has_repeats
            job.progress.expect_unseen(job.wiring.count_stolen(), has_repeats=has_repeats)
            unfired = job.wiring.first_unfired(or_stolen=False)
            placed = np.full(len(looks), -1) if job.is_lost else job.progress.place(where, unfired)
            if has_repeats:
                earlier = job.sequence.locate(seen.inos, job.progress.floor)
                late = are_late(job.progress, placed, earlier)
                theirs, is_known = theirs | late, is_known & ~late
                placed[late] = -1
            views.append(_View(job, theirs, where, is_used, is_known, unfired, placed, placed >= 0))
        return views

    def _weigh(self, view: _View, seen: _Seen, strays: Mask) -> None:
        """What was seen, as evidence for and against one job. `strays`: it says something of the
        job, but is in order for none, and not another one's.
        """
        job, progress, reads, now = view.job, view.job.progress, seen.reads, seen.now
        if not job.live and job.search is None:
            return  # it is known where its reader is: too much is not read
        candidates, here, unfired = view.where, view.placed, view.unfired
        is_any_in_order = _count(view.in_order) > 0
        # Before `take`: what is in order is what was so when they were placed.
        if self._windows.has_lanes and is_any_in_order:
            self._lanes.see(job, candidates, here)
        fired = {}
        if _count(reads) < len(reads):
            fired = job.wiring.find_fired(candidates[:, ~reads], view.in_order[~reads], unfired)
        if _count(strays):
            if _is_used_up(job):  # it may be the next epoch's, which is told in a moment
                strays = np.zeros(len(reads), np.bool_)
            elif job.sequence.has_repeats:
                candidates = job.sequence.locate(seen.inos, progress.floor)
        progress.take(seen.inos, candidates, here, reads, strays, unfired, now)
        if fired and not job.is_lost:
            progress.reach(job.wiring.fire(fired), now)
        if job.search is not None:
            self._look(view, seen)
        if (place := self._find(job, now)) is None and not (job.live and job.search):
            place = progress.jump()
        if place is not None:
            self._jump(job, place, now)
            return
        if not job.is_lost:
            progress.settle(job.wiring.first_unfired(), job.wiring.laid_from)
            job.wiring.doubt_fired()
            if job.wiring.passed.is_much_left_out:
                self._condemn(job, now, Cause.UNREAD)
            elif progress.is_to_be_checked and not job.sequence.has_repeats:
                job.check(now)
            elif progress.evidence.condemned(now):
                self._condemn(job, now, Cause.STRAYS)
        if job.live and job.search and job.search.is_hopeless(job.sequence.orders.values()):
            self._give_up(job, now)
        if is_any_in_order:
            job.wake(now)

    def _look(self, view: _View, seen: _Seen) -> None:
        """What was seen, for the search of a reader whose place is not known."""
        job, inos, reads = view.job, seen.inos, seen.reads
        assert job.search is not None
        his = ~view.theirs & (self._files.sizes[inos] > 0) & self._may_be_of(job, inos)
        if job.search.is_asleep(seen.now):
            his &= ~reads
        every = max(1, 4 * job.progress.disorder // ENOUGH)
        job.search.see(inos[his], reads[his], every, seen.now, seen.processes[his])

    def _read_first(self, views: list[_View], seen: _Seen) -> None:
        """What a job's reader has missed is not staged for it. Another job may want it."""
        live = [view for view in views if view.job.live]
        for view in live:
            first = seen.reads & view.in_order
            for other in live:
                if other is not view:
                    first &= ~other.is_used
            self._ram.read_first(seen.inos[first])

    # --- whose it is

    def _may_be_of(self, job: Job, inos: Inos) -> Mask:
        """Which files tell of the job's reader. Those that only other jobs have do not: one process
        may read for several, as a training and its validation.
        """
        others = [other.sequence for other in self._jobs.values() if other is not job]
        found = np.ones(len(inos), np.bool_)
        for other in others:
            found &= ~other.contains(inos)
        return found | job.sequence.contains(inos) if others else found

    def _strangers(self, job: Job, seen: _Seen) -> Mask:
        """Which observations say nothing of the job: those of another job's processes, strangers',
        and, once its own process is seen to read, those of processes that are unknown: all that it
        has started would be known. If it is not seen to read for AWAITED_S, its readers may be
        processes that it has not started, but not those of another job.
        """
        stands = seen.whose.get(job.name)
        if stands is None:
            return np.zeros(len(seen.inos), np.bool_)
        if not job.is_read:
            own = seen.inos[stands == OWN]
            if not job.sequence.contains(own).any():
                is_awaited = seen.now - job.opened_at < AWAITED_S
                theirs: Mask = (stands == ANOTHERS) | ((stands == STRANGER) & is_awaited)
                if (~theirs & (stands != OWN)).any():
                    job.sway()
                return theirs
            if job.see_read():
                self._windows.empty(job)
                job.progress.begin_again(seen.now)
                job.restart()
                if job.state == "wrong":
                    job.believe()
        others: Mask = stands != OWN
        return others


def _give_to_nearest(views: list[_View]) -> None:
    """An observation in order for several jobs is evidence for the nearest reader alone: ranks of
    one dataset read each other's files of the next epoch.
    """
    views = [view for view in views if _count(view.in_order)]
    if len(views) < 2:
        return
    away = [
        np.where(view.in_order, abs(view.placed - view.job.progress.high), FAR) for view in views
    ]
    nearest = np.minimum.reduce(away)
    for view, distance in zip(views, away, strict=True):
        is_far = distance > nearest
        view.placed[is_far], view.in_order[is_far] = -1, False


def _count_reads(views: list[_View], seen: _Seen) -> None:
    """Late and unplanned READs (docs/HINTS.md rule 7). One that is late for a job is not
    unplanned for another.
    """
    kinds, reads = seen.kinds, seen.reads
    live = [view for view in views if view.job.live]
    planned = np.zeros(len(reads), np.bool_)
    in_dataset = np.zeros(len(reads), np.bool_)
    late_of = []
    for view in live:
        window = view.job.window
        in_window = (view.where >= window.begin) & (view.where < window.end)
        late = np.logical_or.reduce(in_window) & reads
        late_of.append(late)
        planned |= late
        in_dataset |= view.is_used
    unplanned = reads & ~planned
    for view, late in zip(live, late_of, strict=True):
        tally = view.job.tally
        missed = kinds[reads & view.in_order]
        tally.miss(len(missed), _count(missed & Standing.STAGED == 0))
        left, reasons = kinds[late], {}
        if len(left):
            for bit, reason in _LATE:
                others = left[left & bit == 0]
                reasons[reason] = len(left) - len(others)
                left = others
            tally.add_late({**reasons, "queued": len(left)}, seen.now)
        if _count(unplanned):
            tally.add_unplanned(
                {
                    "not in window": _count(unplanned & view.is_known),
                    "not in dataset": _count(unplanned & ~(in_dataset | view.theirs)),
                }
            )


def _somewhere(where: Positions) -> Mask:
    """Which of these files have a place."""
    found: Mask = np.logical_or.reduce(where >= 0)
    return found


def _count(mask: Mask) -> int:
    return int(np.count_nonzero(mask))


def _is_used_up(job: Job) -> bool:
    """Whether its reader is at the end of what is known of its order, and there may be more."""
    progress, sequence = job.progress, job.sequence
    end = sequence.known_until(progress.high)
    return progress.high >= end - progress.near_end and sequence.last(end + 1) > end


def _is_clear(job: Job) -> bool:
    """Whether what was seen tells that no reader follows the job's order: half of it at least is of
    one epoch, and, where that comes in little order, it is known which worker read what.
    """
    is_of_one = job.sequence.samples_per_epoch >= 2 * ENOUGH
    tells_apart = job.search is not None and job.search.tells_apart
    return is_of_one and (tells_apart or not job.progress.is_scattered)
