"""From access sequences, sizes and budgets to commands for one mount: what to stage, fetch, drop
and arm, in which order and when (pure: no I/O, no clock of its own).

The rules are docs/HINTS.md's; HDMLP 3.1 is where they come from. How they are kept here:

* Each job has a *window* [begin, end) of positions. A file in any window is *wanted*; `refs` counts
  the windows' uses of each file. Windows grow, the smallest first, as long as the bytes of all
  wanted files together stay below the budget, and shrink from their far end.
* A file that has left the last window is *spare*: it stays in RAM until its room is needed, then it
  is dropped (an epoch whose order is not known yet will use the same files). All that is in no
  window is used later than all that is, so it does not matter which spare goes first.
* A file is *held* from when it is wanted until it is dropped or cancelled; held bytes never exceed
  the budget, counting from a command's sending, since the mount carries out commands in order.
* A job that is *packed* (docs/LOG.md, hintsd/packing.py) has windows of whole chunks, each staged
  by one command; a log is announced before the first chunk of the epoch that is moved into it.

Per file: size, flags, refs. Jobs' orders: hintsd/sequence.py; positions: hintsd/progress.py.

INVARIANT: held = Σ RAM bytes of HELD files ≤ window budget (after `decide`); wanted = the same over
those with refs > 0; SENT and STAGED only on HELD files, MOVING on SENT ones.
INVARIANT: the first sample of an epoch of a job that is packed is staged when all of the epoch
before is answered, so that all is written to its log, or nothing of it comes any more (BARRIER_S).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hintsd import packing, stall
from hintsd.packing import Chunks, Contents, Grain, Log
from hintsd.policies import Integers, Mask
from hintsd.policies.frequency import Frequency
from hintsd.progress import AT_END_S, Progress
from hintsd.readers import OWN, STRANGER, Pids, Standings
from hintsd.search import (
    DENSE_SPACING,
    DENSE_WIRES,
    ENOUGH,
    EPOCHS_LEAST,
    REST_FIRST_S,
    REST_MOST_S,
    SAMPLES_MOST,
    WIRES,
    WIRES_EVERY_S,
    Opened,
    Place,
    Search,
)
from hintsd.sequence import CHUNK, EpochOrder, Inos, Positions, Sequence
from hintsd.trail import Passed, Trail

COMMAND_INOS_MOST = 65_536
STAGE_UNANSWERED_MOST = 1 << 15  # few enough that a new job's first files need not wait for long
FETCH_UNANSWERED_MOST = 1 << 14
EXTEND_MOST = 1 << 20  # positions that enter windows in one decide()
WALK_MOST = 1 << 15  # positions that fetching ahead looks at in one decide()
PAGE_BYTES = 4096
OUTSIDE_SHARE = 10  # a tenth of the budget is left to reads outside any plan
UNEVEN_SHARE = (
    32  # windows are evened out when they differ by more than a 32nd of the budget, twice
)
WIRED_AHEAD_S = 0.2
SENTINELS_MOST = 1 << 15
SENTINELS_EVERY_S = 1.0
ARM_MOST = 4096
RETRY_FIRST_S, RETRY_MOST_S = 0.5, 30.0
OBSERVED_WIRES, OBSERVED_MOST = 2, 128  # weighed at once
AWAITED_S = 30.0  # a trainer may need so long to begin
PATIENCE_SHARE = 6  # readers may take a sixth of a window between two decisions
HORIZON_SAMPLES_MOST = 1 << 26  # over so many accesses uses are counted, when they are uneven
HORIZON_WAIT_S = 60.0
READY_MOST = 1 << 14
STALL_SAMPLES_MOST = 1 << 16
HOLD_S = 1.0  # a job waits so long for the next epoch's order before it is staged without a log
BARRIER_S = 1.0
PACK_FRAMES_MOST = 4  # in one decide()
SHARING_SHOWN = 3  # names of jobs, in a reason
REFUSED_AFTER_S = 1.0  # what the mount said before that may be of the log before

STORED, RESIDENT, HELD, SENT, STAGED, FETCHING, FAILED, GONE, ARMED, STORING, MOVING = (
    1 << bit for bit in range(11)
)
STORE_BIT, MOVE_BIT, KEEP_ORDER_BIT, SORT_BIT = 1, 2, 4, 8  # of `store` in a `stage` frame
_UNKNOWN_SIZE = 0  # of a number that was never learned: such a file is not prefetched

SEEN_MASK, SEEN_LOOKUP = 7, 1
_EVICTED = 64
_LATE = ((128, "failed"), (_EVICTED, "evicted"), (32, "fetching"))
DONE_STAGED, DONE_STORED, DONE_BOTH, DONE_ERROR, DONE_GONE, DONE_NO_ROOM, DONE_NOT_PUSHED = range(
    1, 8
)

_NO_INOS = np.empty(0, np.uint32)
_NO_POSITIONS: Positions = np.empty(0, np.int64)


class Command(NamedTuple):
    kind: str  # "stage" | "fetch" | "cancel" | "drop" | "arm" | "clear" | "pack"
    inos: Inos
    store: npt.NDArray[np.uint8] | None = None
    fields: Mapping[str, Any] | None = None  # of a `pack`


class _Fired(NamedTuple):
    """A wire whose file was looked up."""

    is_sure: bool  # for this use of the file, by this job
    first: int  # the use it was, or may have been: this one or an earlier one


class _Job:
    def __init__(
        self,
        name: str,
        sequence: Sequence,
        epochs: int | None,
        batch_size: int,
        progress: Progress,
    ) -> None:
        self.name = name
        self.sequence = sequence
        self.epochs = epochs
        self.batch_size = batch_size
        self.progress = progress
        self.trail: Trail | None = None  # while a recording runs
        self.opened_at = progress.confirmed_at
        self.state = "waiting"
        self.reason = ""
        self.unknown: set[int] = set()
        self.counted: set[int] = set()  # epochs whose uses are in the counts
        self.unplaced = False
        # window: [begin, end) is referenced, [begin, sent) has been looked at for staging
        self.begin = self.end = self.sent = self.fetched = progress.low
        self.window_bytes = self.sent_bytes = 0
        self.spare: deque[Inos] = deque()
        self.sentinels_at = -SENTINELS_EVERY_S
        self.sentinel_epoch = -1
        self.wired = progress.high  # wires are laid up to here
        self.wires = _NO_POSITIONS  # those laid from `low` on, sorted
        # wires from `low` on that fired in order: not laid again
        self.fired: dict[int, _Fired] = {}
        # wires from `low` on that a stranger has fired: its reader may have passed meanwhile
        self.stolen: set[int] = set()
        self.is_read = False  # its own process, or one that this has started, was seen to read
        self.is_swayed = False  # before that, reads that may be others' were weighed
        self.search: Search | None = None
        # the reader's place is not known, or the hint is taken for wrong: nothing moves `low`
        self.is_lost = False
        self.check_at = 0.0  # when he is looked for next, in a short epoch
        self.rest_s = REST_FIRST_S  # of a search, once more taken for wrong
        self.log = Log()
        self.order_bytes: int | None = None  # of RAM, that an epoch would take as a whole
        # a chunk at this position needs so much room in the windows
        self.lacking: tuple[int, int] | None = None
        self.misses = 0
        self.waited = 0  # of them, for the disk or the origin: were not in RAM already
        self.late: Counter[str] = Counter()
        self.unplanned: Counter[str] = Counter()

    @property
    def live(self) -> bool:
        return self.state in ("waiting", "running", "idle")

    @property
    def total(self) -> int | None:
        return None if self.epochs is None else self.epochs * self.sequence.samples_per_epoch

    def chunk_end(self, position: int) -> int | None:
        """End of the chunk at `position`, if its epoch is cut."""
        epoch, index = divmod(position, self.sequence.samples_per_epoch)
        chunks = self.log.chunks.get(epoch)
        return None if chunks is None else position - index + chunks.end_of(index)

    def last(self, position: int) -> int:
        """`position`, or the job's end if that comes first."""
        return position if self.total is None else min(position, self.total)


class MountPlanner:
    """The plan of all jobs of one mount."""

    def __init__(self, ram_bytes: int, ssd_room_bytes: int) -> None:
        self._jobs: dict[str, _Job] = {}
        self._sizes: npt.NDArray[Any] = np.zeros(0, np.uint32)
        self._flags = np.zeros(0, np.uint16)
        self._refs = np.zeros(0, np.uint32)
        self._uses: npt.NDArray[np.uint16] | None = None
        self._budget_bytes = self._limit_bytes = 0
        self._held_bytes = self._wanted_bytes = 0
        self._residents = Frequency(0)
        self._room_bytes = 0  # what SSD can take now
        self._storing_bytes = 0  # of it, what unanswered commands will take
        self._short_of_bytes: int | None = None  # free room when residents did not fit
        self._stage_unanswered = self._fetch_unanswered = 0
        self._fetching: deque[Inos] = deque()
        self._cancels: list[Inos] = []
        self._drops: list[Inos] = []
        self._again: list[Inos] = []
        self._stolen: list[Inos] = []  # ARMED, but the mount has them no more
        self._retry_at = 0.0
        self._retry_s = RETRY_FIRST_S
        self._clear = False
        self._layout = packing.STATIC
        self._probe: packing.Probe | None = None
        self._packer: str | None = None  # the job whose log there is
        self._packs: list[Command] = []
        self._moving = 0  # files that are MOVING
        self._moving_seen, self._moved_at = -1, 0.0  # how many at the barrier, and since when
        self._notices: list[tuple[str, str]] = []
        self.recording = 0
        """The mount's number of the recording that runs; 0: none."""
        self._passed: list[Passed] = []  # of jobs that were closed
        self._origin_bytes_per_s = self._ssd_bytes_per_s = 0.0
        self.set_budgets(ram_bytes, ssd_room_bytes)

    # --- what is known of the mount

    def set_budgets(self, ram_bytes: int, ssd_room_bytes: int) -> None:
        """ram_bytes: of the mount; ssd_room_bytes: what SSD can take beyond what is stored."""
        self._limit_bytes = ram_bytes
        budget_bytes = ram_bytes - ram_bytes // OUTSIDE_SHARE
        if budget_bytes != self._budget_bytes:
            self._restart_windows()
            self._budget_bytes = budget_bytes
        self._room_bytes = self._residents.capacity_bytes = ssd_room_bytes
        if self._short_of_bytes is not None:
            more = self._residents.free_bytes - self._short_of_bytes
            if more > max(ssd_room_bytes // 64, PAGE_BYTES):
                self._short_of_bytes = None
                for job in self._jobs.values():
                    job.unplaced = True

    def set_layout(self, layout: str, probe: packing.Probe | None) -> None:
        """static, reorder or auto, and what the mount has measured of its SSD."""
        self._layout, self._probe = layout, probe

    def packing_refused(self, why: str, now: float) -> None:
        """The mount has no log open, for this reason, although one was announced."""
        job = self._jobs.get(self._packer or "")
        if job is None or not job.log.is_open or job.log.begun is None:
            return
        if now - job.log.begun[0] > REFUSED_AFTER_S:
            job.log.refuse(why)

    def rates(self, origin_bytes_per_s: float, ssd_bytes_per_s: float) -> None:
        self._origin_bytes_per_s, self._ssd_bytes_per_s = origin_bytes_per_s, ssd_bytes_per_s

    def learn(self, inos: Inos, sizes: Integers, stored: npt.NDArray[np.uint8]) -> None:
        """Files of a dataset; again: they have changed."""
        if len(inos) == 0:
            return
        self._grow(int(inos.max()) + 1)
        if int(sizes.max()) >= 1 << 32 and self._sizes.dtype == np.uint32:
            self._sizes = self._sizes.astype(np.uint64)
        for start in range(0, len(inos), CHUNK):
            part = slice(start, start + CHUNK)
            self._learn(inos[part], sizes[part], stored[part])

    def _learn(self, inos: Inos, sizes: Integers, stored: npt.NDArray[np.uint8]) -> None:
        flags = self._flags[inos]
        changed = (self._sizes[inos] != sizes) & (flags & (HELD | RESIDENT | FETCHING) != 0)
        if changed.any():
            self._restart_windows()
            self._let_go(inos[changed])
            self._unsettle(inos[changed])
            flags = self._flags[inos]
        is_stored = stored != 0
        settled = is_stored & (flags & RESIDENT != 0)
        self._residents.release(int(self._sizes[inos[settled]].sum(dtype=np.int64)))
        flags[settled] &= ~RESIDENT & 0xFFFF
        flags &= ~(STORED | GONE | FAILED) & 0xFFFF
        self._flags[inos] = flags | np.where(is_stored, STORED, 0).astype(np.uint16)
        self._sizes[inos] = sizes

    def _unsettle(self, inos: Inos) -> None:
        """These are to be fetched to SSD no more (their sizes are about to change)."""
        residents = inos[self._flags[inos] & RESIDENT != 0]
        self._residents.release(int(self._sizes[residents].sum(dtype=np.int64)))
        self._flags[residents] &= ~RESIDENT & 0xFFFF
        self._cancel_fetches(inos[self._flags[inos] & FETCHING != 0])

    def _grow(self, count: int) -> None:
        if count > len(self._flags):
            for name in ("_sizes", "_flags", "_refs", "_uses"):
                old = getattr(self, name)
                if old is not None:
                    new = np.zeros(count, old.dtype)
                    new[: len(old)] = old
                    setattr(self, name, new)

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
        now: float,
        is_lost: bool = False,
    ) -> None:
        """A job that begins at sample `index` of `epoch`; or (`is_lost`) was seen there last, and
        is anywhere beyond by now.
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
        job = _Job(name, Sequence(samples_per_epoch), epochs, batch_size, progress)
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
        last = current + self._epochs_ahead(job) + 1
        last = last if job.epochs is None else min(last, job.epochs)
        wanted = [
            epoch
            for epoch in range(current, last)
            if epoch not in job.sequence.orders and epoch not in job.unknown
        ]
        if not wanted and job.live and (epoch := self._horizon_epoch(job, current)) is not None:
            wanted.append(epoch)
        return wanted

    def announce(self, name: str, epoch: int, inos: Inos) -> None:
        """As `supply`, by the trainer: a job that was taken for wrong begins there anew."""
        job = self._jobs[name]
        if job.state == "wrong":
            job.progress.begin(epoch * job.sequence.samples_per_epoch, job.progress.confirmed_at)
            job.sequence.forget_before(epoch)
            self._restart(job)
            job.state, job.reason = "waiting", ""
            job.search, job.is_lost = None, False
        self.supply(name, epoch, inos)

    def supply(self, name: str, epoch: int, inos: Inos) -> None:
        """The order of one epoch; 0: a sample outside the mount. The array is kept. Again: replaces
        what was predicted. ValueError: not samples_per_epoch long.
        """
        job = self._jobs[name]
        sequence = job.sequence
        current = sequence.epoch_of(job.begin)
        if (
            epoch > current + self._epochs_ahead(job)
            and current in sequence.orders
            and epoch in self._horizon(job, current)
        ):
            self._count(job, epoch, inos)
            return
        if len(inos):
            self._grow(int(inos.max()) + 1)
        old = sequence.orders.get(epoch)
        if old is not None and np.array_equal(old.inos, inos):
            return
        if old is not None or current not in sequence.orders:
            self._release_window(job)
        if old is not None:
            self._end_log(job)
        sequence.put(epoch, inos)
        job.unknown.discard(epoch)
        if current not in sequence.orders and job.live:
            # the reader is in an epoch that nobody could tell us: he begins here
            job.progress.begin(epoch * sequence.samples_per_epoch, job.progress.confirmed_at)
            self._restart(job)
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
        self._end_log(job)
        job.sequence.orders.clear()
        job.unknown.clear()
        job.sequence.put(place.epoch, place.inos)
        job.unplaced = True
        self._jump(job, place.epoch * job.sequence.samples_per_epoch + place.position, now)

    def _find(self, job: _Job, now: float) -> int | None:
        """Where the reader is found in the known epochs, unless it is where we thought."""
        if job.search is None:
            return None
        place = job.search.find(sorted(job.sequence.orders.items()))
        if place is None:
            return None
        self._end_search(job, now)
        progress = job.progress
        position = place[0] * job.sequence.samples_per_epoch + place[1]
        if job.live and progress.low - progress.slack <= position < progress.zone_end(None):
            progress.forget()
            return None
        return position

    def _end_search(self, job: _Job, now: float) -> None:
        job.search, job.is_lost = None, False
        job.check_at = now + WIRES_EVERY_S

    def _give_up(self, job: _Job, now: float) -> None:
        """The reader is not found. One who was lost is judged by what is seen from now on, as any
        job.
        """
        if job.is_lost:
            self._end_search(job, now)
            job.check_at = now
            job.progress.forget()
        elif self._may_be_others(job) or (
            job.progress.is_scattered and job.search and not job.search.tells_apart
        ):
            self._end_search(job, now)
        elif job.search is not None and job.search.lasted(now, self._search_spacing(job)):
            self._condemn(job, now)

    def _may_be_others(self, job: _Job) -> bool:
        """Whether what was seen may be of another live job's reader."""
        if job.is_read or job.search is None:
            return False
        seen = job.search.seen().inos
        return any(
            order.contains(seen).any()
            for other in self._jobs.values()
            if other is not job and other.live
            for order in other.sequence.orders.values()
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
            self._woken(job)
        else:  # nothing is believed, but this is the epoch in which to look for the reader
            self._restart(job)
            job.sequence.forget_before(epoch)

    def observe(
        self,
        inos: Inos,
        kinds: npt.NDArray[np.uint8],
        now: float,
        whose: Mapping[str, Standings] | None = None,
        processes: Pids | None = None,
    ) -> None:
        """`seen` frames (docs/WIRE.md). `whose`: for jobs whose process is known, who made each of
        these observations (hintsd/readers.py); `processes`: which process did, 0: not known.
        """
        processes = np.zeros(len(inos), np.uint32) if processes is None else processes
        known = (inos > 0) & (inos < len(self._flags))
        inos, kinds, processes = inos[known], kinds[known], processes[known]
        whose = {name: stands[known] for name, stands in (whose or {}).items()}
        # A reader moves on between two wires: only few of them are weighed at one position.
        wires = np.cumsum(kinds & SEEN_MASK == SEEN_LOOKUP)
        start = 0
        while start < len(inos):
            passed = wires[start - 1] if start else 0
            stop = int(np.searchsorted(wires, passed + OBSERVED_WIRES, "right"))
            stop = min(max(stop, start + 1), start + OBSERVED_MOST)
            part = {name: stands[start:stop] for name, stands in whose.items()}
            chosen = slice(start, stop)
            self._observe(inos[chosen], kinds[chosen], part, processes[chosen], now)
            start = stop

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
        self._disarm(inos, reads, jobs, candidates, strange)
        for job, where, theirs in zip(jobs, candidates, strange, strict=True):
            where[:, theirs] = -1
            progress = job.progress
            unseen = progress.spacing * sum(wire >= progress.high for wire in job.stolen)
            # not more: if all were in order, no wrong hint would be noticed
            progress.unseen = min(unseen, job.sequence.samples_per_epoch // 4)
        unfired = [self._first_unfired(job, job.stolen) for job in jobs]
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
        in_none = reads & (self._sizes[inos] > 0)
        for used in used_in:
            in_none &= ~used
        self._count_reads(jobs, candidates, placed, used_in, strange, kinds, reads)
        for job, where, here, first, mine, theirs in zip(
            jobs, candidates, placed, unfired, in_order_of, strange, strict=True
        ):
            progress = job.progress
            others = excused.copy()  # what another live job reads somewhere is no stray of this one
            for other, used in zip(jobs, in_order_of, strict=True):
                if other is not job and other.live:
                    others |= used
            # Before `take`: what is in order is what was so when they were placed.
            fired = self._fired(job, where[:, ~reads], here[~reads] >= 0, first)
            relevant = (mine | in_none) & ~theirs
            progress.take(inos, where, here, reads, relevant, others, first, now)
            if fired and not job.is_lost:
                job.fired.update(fired)
                progress.reach(self._fired_in_turn(job), now)
            if job.search is not None:
                maybe_his = ~theirs & (self._sizes[inos] > 0)
                every = max(1, 4 * progress.disorder // ENOUGH)
                job.search.see(inos[maybe_his], reads[maybe_his], every, now, processes[maybe_his])
            if (place := self._find(job, now)) is None and not (job.live and job.search):
                place = progress.jump()
            if place is not None:
                self._jump(job, place, now)
                continue
            if not job.is_lost:
                progress.settle(self._first_unfired(job))
                self._doubt_fired(job)
                if progress.is_to_be_checked:
                    self._check(job, now)
                elif progress.condemned(now):
                    self._condemn(job, now)
            if job.live and job.search and job.search.is_hopeless(job.sequence.orders.values()):
                self._give_up(job, now)
            if (here >= 0).any():
                self._woken(job)

    def _strangers(self, job: _Job, inos: Inos, stands: Standings | None, now: float) -> Mask:
        """Which observations say nothing of the job: strangers', and, once its own process is seen
        to read, those of processes that are unknown: all that it has started would be known. If it
        is not seen to read for AWAITED_S, its readers may be processes that it has not started.
        """
        if stands is None:
            return np.zeros(len(inos), np.bool_)
        if not job.is_read:
            own = inos[stands == OWN]
            job.is_read = bool((job.sequence.locate(own, 0) >= 0).any())
            if not job.is_read:
                is_awaited = now - job.opened_at < AWAITED_S
                theirs: Mask = (stands == STRANGER) & is_awaited
                job.is_swayed |= bool((~theirs & (stands != OWN)).any())
                return theirs
            if job.is_swayed:
                self._release_window(job)
                job.progress.begin_again(now)
                self._restart(job)
                if job.state == "wrong":
                    job.state, job.reason = "waiting", ""
        others: Mask = stands != OWN
        return others

    def _count_reads(
        self,
        jobs: list[_Job],
        candidates: list[Positions],
        placed: list[Positions],
        used_in: list[Mask],
        strange: list[Mask],
        kinds: npt.NDArray[np.uint8],
        reads: Mask,
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
            left = late.copy()
            for bit, reason in _LATE:
                now = left & (kinds & bit != 0)
                job.late[reason] += int(np.count_nonzero(now))
                left &= ~now
            job.late["queued"] += int(np.count_nonzero(left))
            mine = (candidates[index] >= 0).any(axis=0)
            job.unplanned["not in window"] += int(np.count_nonzero(reads & mine & ~planned))
            outside = reads & ~in_dataset & ~strange[index]
            job.unplanned["not in dataset"] += int(np.count_nonzero(outside))

    def done(self, inos: Inos, results: npt.NDArray[np.uint8], now: float) -> None:
        """`done` frames (docs/WIRE.md)."""
        known = (inos > 0) & (inos < len(self._flags))
        inos, first = np.unique(inos[known], return_index=True)
        results = results[known][first]
        flags = self._flags[inos]
        sizes = self._sizes[inos].astype(np.int64)
        sent, fetching = flags & SENT != 0, flags & FETCHING != 0
        self._stage_unanswered -= int(np.count_nonzero(sent))
        self._fetch_unanswered -= int(np.count_nonzero(fetching))
        storing = flags & STORING != 0
        self._storing_bytes -= int(sizes[storing].sum())
        self._moving -= int(np.count_nonzero(flags & MOVING))

        no_room = results == DONE_NO_ROOM
        staged = (results == DONE_STAGED) | (results == DONE_BOTH) | (no_room & sent)
        stored = ((results == DONE_STORED) | (results == DONE_BOTH)) & (flags & STORED == 0)
        failed = (results == DONE_ERROR) | (results == DONE_NOT_PUSHED) | (results == DONE_STORED)
        gone = results == DONE_GONE
        self._room_bytes = max(0, self._room_bytes - int(sizes[stored].sum()))
        if no_room.any():
            self._room_bytes = 0  # until the mount says otherwise
        settled = (flags & RESIDENT != 0) & (stored | no_room | gone)
        self._residents.release(int(sizes[settled].sum()))

        flags &= ~(SENT | FETCHING | STORING | FAILED | MOVING) & 0xFFFF
        flags[settled] &= ~RESIDENT & 0xFFFF
        flags[stored] |= STORED
        flags[staged & (flags & HELD != 0)] |= STAGED
        again = failed & sent & (flags & HELD != 0)
        flags[again] |= FAILED
        flags[gone] = (flags[gone] | GONE) & (~STORED & 0xFFFF)
        self._flags[inos] = flags
        unwanted = inos[staged & (flags & HELD == 0)]
        if len(unwanted):  # crossed our cancel
            self._drops.append(unwanted)
        self._let_go(inos[gone & (flags & HELD != 0)])
        if again.any():
            self._again.append(inos[again])
            self._retry_at = max(self._retry_at, now + self._retry_s)
        elif staged.any():
            self._retry_s = RETRY_FIRST_S

    def disconnected(self) -> None:
        """All that was sent is void: the next decide() sends the windows anew."""
        self._restart_windows()
        for job in self._jobs.values():
            job.spare.clear()
            job.fetched = job.begin
            job.wired, job.wires = job.progress.high, _NO_POSITIONS
            job.sentinels_at = -SENTINELS_EVERY_S
            job.log.undecide()
        self._void()
        self._packs.clear()
        self._packer = None
        self._cancels.clear()
        self._drops.clear()
        self._clear = False
        self.record(0)

    def _void(self) -> None:
        """Nothing is sent, staged or armed any more."""
        for start in range(0, len(self._flags), CHUNK):
            self._flags[start : start + CHUNK] &= (
                ~(HELD | SENT | STAGED | FETCHING | FAILED | ARMED | STORING | MOVING) & 0xFFFF
            )
        self._held_bytes = self._wanted_bytes = self._storing_bytes = 0
        self._stage_unanswered = self._fetch_unanswered = self._moving = 0
        self._fetching.clear()
        self._again.clear()
        self._stolen.clear()

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

    def _passed_of(self, job: _Job, stop: int) -> list[Passed]:
        if job.trail is None:
            return []
        if job.state == "wrong":
            job.trail.lose()
            return []
        return job.trail.follow(job.last(stop))

    # --- deciding

    def patience_s(self) -> float:
        """How long the next decide() may wait: readers take so long for a small part of a window,
        or for half of what is staged when there is no more to stage. Not at all where whole chunks
        are staged: the disk would be idle until the next one is sent.
        """
        if self._packer is not None:
            return 0.0
        jobs = [job for job in self._jobs.values() if job.live and job.progress.samples_per_s > 0]
        return min((self._patience_s(job) for job in jobs), default=0.0)

    def _patience_s(self, job: _Job) -> float:
        if self._stage_unanswered == 0 and job.sent == job.end and not _can_grow(job):
            samples = (job.end - job.progress.high) / 2  # all that is known lies there
        else:
            samples = (job.end - job.begin) / PATIENCE_SHARE
        return max(samples, 0) / job.progress.samples_per_s

    def decide(self, now: float) -> list[Command]:
        """What to send now, in this order. Bounded work and bounded arrays; call it again."""
        for job in self._jobs.values():
            self._tick(job, now)
        for job in self._jobs.values():
            if job.live:
                self._follow(job)
        self._place(now)
        self._review_logs()
        self._balance()
        self._reclaim()
        stages = self._stage(now)
        fetches = self._fetch()
        wires = self._wires(now)
        commands = [
            *_commands("cancel", self._cancels),
            *_commands("drop", self._drops),
            *([Command("clear", _NO_INOS)] if self._clear else []),
            *self._packs,
            *stages,
            *fetches,
            *_commands("arm", wires),
        ]
        self._cancels, self._drops, self._packs, self._clear = [], [], [], False
        return commands

    def _tick(self, job: _Job, now: float) -> None:
        if not job.live:
            return
        job.progress.pace(now)
        if job.total is not None and job.progress.finished(job.total, now):
            job.state = "done"
            self._retire(job)
        elif job.state == "running" and job.progress.idle(now):
            job.state, job.reason = "idle", "nothing has been read for a while"
            self._notices.append((job.name, "idle: nothing has been read for a while"))

    def _woken(self, job: _Job) -> None:
        if job.live and job.progress.begun and job.state != "running":
            job.state, job.reason = "running", ""

    def _follow(self, job: _Job) -> None:
        """The window begins at `low`, but always reaches ahead of `high`: where it is small against
        the disorder, part of what is behind is given up.
        """
        progress = job.progress
        window = job.end - job.begin
        behind = window // (2 if progress.workers_known else 4)
        begin = max(progress.low, progress.high - max(1, behind))
        begin = min(begin, job.last(begin))
        if begin > job.begin:
            self._release(job, job.begin, min(begin, job.end))
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

    # --- windows

    def _ram_bytes(self, inos: Inos) -> npt.NDArray[np.int64]:
        """Bytes of page cache of each file; 0 for what is never staged: outside the mount, empty,
        larger than the budget.
        """
        sizes = self._sizes[inos].astype(np.int64)
        pages = (sizes + (PAGE_BYTES - 1)) & ~(PAGE_BYTES - 1)
        pages[(pages > self._budget_bytes) | (inos == 0)] = 0
        return pages

    def _balance(self) -> None:
        jobs = [job for job in self._jobs.values() if job.live]
        if not jobs or self._budget_bytes <= 0:
            return
        uneven_bytes = self._budget_bytes // UNEVEN_SHARE
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
            share = self._budget_bytes
            if others and (nearest := min(others, key=_standing)).state != "idle":
                share = max(nearest.window_bytes - small.window_bytes, 0) + uneven_bytes
            taken = self._extend(small, share, min(work, CHUNK))
            work -= taken
            if taken:
                continue
            large = max(others, key=_standing, default=None)
            excess = 0
            if large is not None and _can_grow(small):
                if large.state == "idle" != small.state:
                    excess = 2 * large.window_bytes
                elif large.state == "idle" or small.state != "idle":
                    excess = large.window_bytes - small.window_bytes
            if large is None or excess <= even_bytes or not self._shrink(large, excess // 2):
                blocked.add(small.name)

    def _extend(self, job: _Job, most_bytes: int, most: int) -> int:
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

    def _is_lacking(self, job: _Job) -> bool:
        """Whether there was no room for the chunk at its window's end, and is none now: to look
        costs a pass over it. What several jobs want may need less by now.
        """
        if job.lacking is None or len(self._jobs) > 1:
            return False
        position, needed_bytes = job.lacking
        return position == job.end and needed_bytes > self._budget_bytes - self._wanted_bytes

    def _extend_piece(self, job: _Job, most_bytes: int | None, most: int) -> tuple[int, int]:
        """Positions taken, and their bytes; None: all that are asked for, or none of them."""
        inos, repeats = job.sequence.piece(job.end, most)
        if len(inos) == 0:
            return 0, 0
        own = self._ram_bytes(inos)
        flags = self._flags[inos]
        fresh = (self._refs[inos] == 0) & (flags & GONE == 0) & (own > 0)
        if repeats:
            first = np.zeros(len(inos), np.bool_)
            first[np.unique(inos, return_index=True)[1]] = True
            fresh &= first
        cost, total = np.cumsum(np.where(fresh, own, 0)), np.cumsum(own)
        taken = int(np.searchsorted(cost, self._budget_bytes - self._wanted_bytes, "right"))
        if most_bytes is not None:
            taken = min(taken, int(np.searchsorted(total, most_bytes, "right")))
        if taken == 0 or (most_bytes is None and taken < len(inos)):
            job.lacking = (job.end, int(cost[-1])) if most_bytes is None else None
            return 0, 0
        inos, fresh = inos[:taken], fresh[:taken]
        if repeats:
            np.add.at(self._refs, inos, 1)
        else:
            self._refs[inos] += 1
        self._refs[0] = 0  # stands for all samples outside the mount
        newly = fresh & (flags[:taken] & HELD == 0)
        self._held_bytes += int(own[:taken][newly].sum())
        self._wanted_bytes += int(cost[taken - 1])
        self._flags[inos[newly]] |= HELD
        job.end += taken
        job.window_bytes += int(total[taken - 1])
        return taken, int(total[taken - 1])

    def _shrink(self, job: _Job, by_bytes: int) -> bool:
        """Takes about so many bytes (at least) off the window's far end; False: it is empty."""
        end, freed = job.end, 0
        while freed < by_bytes and end > job.begin:
            n = job.sequence.samples_per_epoch
            epoch, index = divmod(end - 1, n)
            chunks = job.log.chunks.get(epoch)
            first = max(index + 1 - 4096, 0) if chunks is None else chunks.begin_of(index)
            start = max(job.begin, epoch * n + first)
            inos, _ = job.sequence.piece(start, end - start)
            back = np.cumsum(self._ram_bytes(inos)[::-1])
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

    def _release(self, job: _Job, start: int, stop: int) -> None:
        """Positions at one end of the window leave it."""
        position = start
        for inos, repeats in job.sequence.pieces(start, stop):
            own = self._ram_bytes(inos)
            total_bytes = int(own.sum())
            job.window_bytes -= total_bytes
            if position < job.sent:
                looked_at = min(job.sent - position, len(inos))
                job.sent_bytes -= int(own[:looked_at].sum())
            position += len(inos)
            if repeats:
                np.subtract.at(self._refs, inos, 1)
                inos = np.unique(inos)
            else:
                self._refs[inos] -= 1
            self._refs[0] = 0
            flags = self._flags[inos]
            left = inos[(self._refs[inos] == 0) & (flags & HELD != 0)]
            self._wanted_bytes -= int(self._ram_bytes(left).sum())
            is_staged = self._flags[left] & STAGED != 0
            if is_staged.any():
                job.spare.append(left[is_staged])
            self._let_go(left[~is_staged])

    def _let_go(self, inos: Inos) -> None:
        """Held files that are to be held no more: cancelled if sent, dropped if perhaps staged."""
        flags = self._flags[inos]
        held = flags & HELD != 0
        inos, flags = inos[held], flags[held]
        if len(inos) == 0:
            return
        bytes_each = self._ram_bytes(inos)
        self._held_bytes -= int(bytes_each.sum())
        self._wanted_bytes -= int(bytes_each[self._refs[inos] > 0].sum())
        sent = flags & SENT != 0
        self._stage_unanswered -= int(np.count_nonzero(sent))
        storing = flags & STORING != 0
        self._storing_bytes -= int(self._sizes[inos[storing]].sum(dtype=np.int64))
        self._moving -= int(np.count_nonzero(flags & MOVING))
        if sent.any():
            self._cancels.append(inos[sent])
        out = inos[flags & (SENT | STAGED) != 0]
        if len(out):
            self._drops.append(out)
        self._flags[inos] &= ~(HELD | SENT | STAGED | FAILED | STORING | MOVING) & 0xFFFF

    def _reclaim(self) -> None:
        """Drops spare files until all that is held fits."""
        for job in self._jobs.values():
            while self._held_bytes > self._budget_bytes and job.spare:
                spare = job.spare.popleft()
                spare = self._still_spare(spare)
                total = np.cumsum(self._ram_bytes(spare))
                excess = self._held_bytes - self._budget_bytes
                count = min(int(np.searchsorted(total, excess)) + 1, len(spare))
                self._let_go(spare[:count])
                if count < len(spare):
                    job.spare.appendleft(spare[count:])

    def _still_spare(self, inos: Inos) -> Inos:
        spare: Inos = inos[(self._refs[inos] == 0) & (self._flags[inos] & HELD != 0)]
        return spare

    def _release_window(self, job: _Job) -> None:
        """Empties the window; what is staged is spare until the next decide() has looked."""
        self._release(job, job.begin, job.end)
        self._restart(job)

    def _restart(self, job: _Job) -> None:
        """The window begins anew at the present position."""
        job.begin = job.end = job.sent = job.fetched = job.last(job.progress.low)
        job.window_bytes = job.sent_bytes = 0
        job.wired = job.progress.high
        job.wires = _NO_POSITIONS
        job.fired.clear()
        job.stolen.clear()
        job.sentinels_at = -SENTINELS_EVERY_S
        job.log.keeps_order = True

    def _restart_windows(self) -> None:
        for job in self._jobs.values():
            if job.live:
                self._release_window(job)

    def _jump(self, job: _Job, place: int, now: float) -> None:
        self._release_window(job)
        was_wrong = job.state == "wrong"
        if job.sequence.epoch_of(place) + 1 < job.log.decided:  # begun again, or an earlier one
            self._end_log(job)
        job.progress.move(job.last(place), now)
        job.progress.begun = True
        job.state, job.reason = "running", ""
        self._restart(job)
        job.search = job.search and Search(now, span=job.batch_size)
        job.is_lost = job.search is not None
        if was_wrong:
            self._notices.append((job.name, "follows its order again; planned again"))

    def _check(self, job: _Job, now: float) -> None:
        """Where much of an epoch is in order, that says little, and a reader may be lost by chance:
        he is looked for again and again, and that decides.
        """
        if job.search is None and now >= job.check_at:
            job.search = Search(now, span=job.batch_size)

    def _condemn(self, job: _Job, now: float) -> None:
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

    def _retire(self, job: _Job) -> None:
        """A job that is over, or not believed any more, gives back all that no other one wants."""
        self._release_window(job)
        self._end_log(job)
        for spare in job.spare:
            self._let_go(self._still_spare(spare))
        job.spare.clear()
        self._cancel_fetches(np.concatenate([_NO_INOS, *self._fetching]))
        for other in self._jobs.values():
            other.fetched = other.begin
        if not any(other.live for other in self._jobs.values() if other is not job):
            self._clear = True
            self._drops.clear()  # nobody needs the room: pages stay, under the mount's own budget
            residents = self._flags & RESIDENT != 0
            self._flags[residents] &= ~RESIDENT & 0xFFFF
            self._residents.held_bytes = 0
            for start in range(0, len(self._flags), CHUNK):
                self._flags[start : start + CHUNK] &= ~ARMED & 0xFFFF

    # --- staging

    def _stage(self, now: float) -> list[Command]:
        # What two jobs want is moved with its chunk, so chunks are chosen first.
        chunks = [
            command
            for job in self._jobs.values()
            if job.live and job.sent < job.end
            for command in self._stage_chunks(job, now)
        ]
        room = STAGE_UNANSWERED_MOST - self._stage_unanswered
        if self._packer is not None:  # beside the chunks
            others = self._stage_unanswered - self._moving
            room = STAGE_UNANSWERED_MOST - packing.CHUNK_SAMPLES_MOST - others
        again = self._retry(now)
        found: list[tuple[_Job, Inos, Positions, npt.NDArray[np.float64]]] = []
        for job in self._jobs.values():
            if job.live and job.sent < job.end and room > 0 and self._is_loose(job):
                found.append(self._unsent(job, room))
        inos = np.concatenate([again, *(part[1] for part in found)])
        if len(found) > 1:
            need = np.concatenate([np.zeros(len(again)), *(part[3] for part in found)])
            inos = inos[np.argsort(need, kind="stable")]
        if len(inos) > 1:
            inos = inos[np.sort(np.unique(inos, return_index=True)[1])]
        inos = inos[: max(room, 0)]
        store = self._mark_sent(inos)
        for job, _, _, _ in found:
            self._advance_sent(job)
        return [*_commands("stage", [inos], store), *chunks]

    def _mark_sent(self, inos: Inos) -> npt.NDArray[np.uint8]:
        """Files that are to be staged by the next command; whether each is to be on SSD."""
        self._flags[inos] |= SENT
        self._stage_unanswered += len(inos)
        flags = self._flags[inos]
        store = flags & (STORED | RESIDENT) != 0
        sizes = self._sizes[inos].astype(np.int64)
        storing = (flags & (RESIDENT | STORING) == RESIDENT) & (flags & STORED == 0)
        fits = np.cumsum(np.where(storing, sizes, 0)) <= self._room_bytes - self._storing_bytes
        store &= ~storing | fits
        storing &= fits
        self._storing_bytes += int(sizes[storing].sum())
        # a file that was to be fetched ahead is staged now: one answer comes for both
        fetching = flags & FETCHING != 0
        self._fetch_unanswered -= int(np.count_nonzero(fetching))
        self._flags[inos[fetching]] &= ~FETCHING & 0xFFFF
        self._flags[inos[storing]] |= STORING
        marked: npt.NDArray[np.uint8] = store.astype(np.uint8)
        return marked

    def _unsent(
        self, job: _Job, most: int
    ) -> tuple[_Job, Inos, Positions, npt.NDArray[np.float64]]:
        """The next files of the window to be staged, where, and in how many seconds (or bytes) each
        is needed.
        """
        limit = min(self._sendable_end(job) - job.sent, max(most, 4096))
        parts: list[Inos] = []
        start = job.sent
        while start < job.sent + limit:
            inos, _ = job.sequence.piece(start, job.sent + limit - start)
            parts.append(inos)
            start += len(inos)
        inos = np.concatenate(parts)
        ahead = np.cumsum(self._ram_bytes(inos)) + job.sent_bytes
        open_ = np.flatnonzero(self._flags[inos] & (HELD | SENT | STAGED | FAILED) == HELD)
        open_ = open_[:most]
        speed = job.progress.samples_per_s or 1.0
        return job, inos[open_], open_ + job.sent, ahead[open_] / speed

    def _advance_sent(self, job: _Job) -> None:
        """Moves `sent` to the first file that is to be staged and is not sent yet."""
        step = 1024
        end = self._sendable_end(job)
        while job.sent < end:
            inos, _ = job.sequence.piece(job.sent, min(step, end - job.sent))
            step = min(4 * step, CHUNK)
            open_ = np.flatnonzero(self._flags[inos] & (HELD | SENT | STAGED | FAILED) == HELD)
            count = int(open_[0]) if len(open_) else len(inos)
            job.sent_bytes += int(self._ram_bytes(inos[:count]).sum())
            job.sent += count
            if len(open_):
                break

    def _retry(self, now: float) -> Inos:
        if not self._again or now < self._retry_at:
            return _NO_INOS
        inos = np.unique(np.concatenate(self._again))
        self._again.clear()
        failed = self._flags[inos] & (HELD | FAILED | SENT) == HELD | FAILED
        wanted: Inos = inos[failed & (self._refs[inos] > 0)]
        self._flags[wanted] &= ~FAILED & 0xFFFF
        self._retry_s = min(2 * self._retry_s, RETRY_MOST_S)
        return wanted

    # --- the log (docs/LOG.md, "Who reorders")

    def _is_packable(self, job: _Job) -> bool:
        if self._layout == packing.STATIC or not job.live or job.is_lost:
            return False
        if self._packer not in (None, job.name) or self._budget_bytes <= 0:
            return False
        if job.order_bytes is None:
            job.order_bytes = self._order_bytes(job)
        return job.order_bytes is not None and job.order_bytes > self._budget_bytes

    def _order_bytes(self, job: _Job) -> int | None:
        """RAM that an epoch of it takes; None: no order is known."""
        order = job.sequence.orders.get(job.sequence.epoch_of(job.begin))
        if order is None:
            return None
        inos = np.unique(order.inos) if order.repeats else order.inos
        pieces = (inos[start : start + CHUNK] for start in range(0, len(inos), CHUNK))
        return sum(int(self._ram_bytes(piece).sum()) for piece in pieces)

    def _epochs_ahead(self, job: _Job) -> int:
        """So many orders are kept beside the current epoch's: when the next one begins to be
        staged, a log for those behind it is begun.
        """
        return 1 + self._epochs_served(job) if self._is_packable(job) else 1

    def _epochs_served(self, job: _Job) -> int:
        """By one log at most, as far as sizes tell."""
        n, order_bytes = job.sequence.samples_per_epoch, job.order_bytes or 0
        by_sizes = packing.epochs_served(n, order_bytes, self._window_share(), self._limit_bytes)
        return min(by_sizes, job.log.epochs_most)

    def _window_share(self) -> int:
        return self._budget_bytes // max(sum(map(_takes_share, self._jobs.values())), 1)

    def _sharing(self, job: _Job) -> str:
        """Whose shares of RAM the job lacks; "": it has no others beside it."""
        names = [
            other.name for other in self._jobs.values() if other is not job and _takes_share(other)
        ]
        if not names:
            return ""
        which = names[0] if len(names) == 1 else "NAME"
        shown = ", ".join(names[:SHARING_SHOWN])
        if len(names) > SHARING_SHOWN:
            shown += f" and {len(names) - SHARING_SHOWN:,} more"
        verb = "shares" if len(names) == 1 else "share"
        return f", because {shown} {verb} --ram: hintsd end {which}"

    def _review_logs(self) -> None:
        """A job that lost its reader, or has no room for two chunks any more, is packed no more, or
        anew.
        """
        for job in self._jobs.values():
            if job.log.chunks and not (
                self._is_packable(job) and 2 * job.log.largest_bytes <= self._window_share()
            ):
                self._end_log(job)

    def _end_log(self, job: _Job) -> None:
        if job.log.is_announced:
            self._packs.append(Command("pack", _NO_INOS, None, packing.END))
        if self._packer == job.name:
            self._packer = None
        job.log.forget()

    def _sendable_end(self, job: _Job) -> int:
        """End of what may be staged of the window now: another epoch is decided on first."""
        if not self._is_packable(job):
            return job.end
        n = job.sequence.samples_per_epoch
        return min(job.end, (job.sent // n + 1) * n)

    def _is_begun(self, job: _Job, now: float) -> bool:
        """Whether the files at `sent` may be staged. Before an epoch's first ones are, it is
        decided whether it is moved into a log, and the mount is told.
        """
        log, epoch = job.log, job.sequence.epoch_of(job.sent)
        if not self._is_packable(job):
            return True
        if log.pieces is None and epoch > log.decided:
            if log.is_announced and self._is_moving(now):
                return False
            if self._waits_for_orders(job, epoch, now):
                return False
            self._decide_log(job, epoch, now)
        if log.pieces is not None:
            for _, fields in zip(range(PACK_FRAMES_MOST), log.pieces, strict=False):
                self._packs.append(Command("pack", _NO_INOS, None, fields))
                if fields["last"]:
                    log.pieces = None
        return log.pieces is None

    def _is_moving(self, now: float) -> bool:
        """Whether files are on their way to the log, and have become fewer within BARRIER_S: by
        answers, or as readers pass what is not answered yet.
        """
        if self._moving != self._moving_seen:
            self._moving_seen, self._moved_at = self._moving, now
        return self._moving > 0 and now - self._moved_at < BARRIER_S

    def _is_loose(self, job: _Job) -> bool:
        """Whether what is at `sent` may be staged, and belongs to no chunk."""
        epoch = job.sequence.epoch_of(job.sent)
        is_begun = job.log.pieces is None and epoch <= job.log.decided
        return (is_begun or not self._is_packable(job)) and epoch not in job.log.chunks

    def _waits_for_orders(self, job: _Job, epoch: int, now: float) -> bool:
        """Of the epochs that a log written in this one could serve."""
        log = job.log
        behind = range(epoch + 1, epoch + 1 + self._epochs_served(job))
        is_awaited = not log.keeps(epoch) and any(
            (job.epochs is None or later < job.epochs)
            and not (later in job.sequence.orders or later in job.unknown)
            for later in behind
        )
        if is_awaited and log.waits_since is None:
            log.waits_since = now
        if is_awaited and log.waits_since is not None and now - log.waits_since < HOLD_S:
            return True
        log.waits_since = None
        return False

    def _decide_log(self, job: _Job, epoch: int, now: float) -> None:
        log = job.log
        was_open, log.is_open = log.is_open, False
        self._moving_seen = -1
        if log.keeps(epoch):
            first, last = log.served.start, log.served.stop - 1
            log.why = f"the orders of epochs {first} to {last} lie on SSD; {_rhythm(log.served)}"
            if was_open:
                self._packs.append(Command("pack", _NO_INOS, None, packing.WRITTEN))
        else:
            log.why = self._begin_log(job, epoch, now)
            if log.is_announced and not log.is_open:
                self._packs.append(Command("pack", _NO_INOS, None, packing.END))
                log.is_announced = False
        log.decided, log.begun = epoch, (now, job.begin, job.waited)
        self._packer = job.name if epoch in log.chunks else None

    def _begin_log(self, job: _Job, epoch: int, now: float) -> str:
        """A log for the epochs behind this one, if it pays; why, or why not."""
        log, orders = job.log, job.sequence.orders
        present, coming = orders.get(epoch), orders.get(epoch + 1)
        if present is None or coming is None:
            is_last = job.epochs is not None and epoch + 1 >= job.epochs
            if is_last:
                return "no epoch follows"
            if epoch + 1 in job.unknown:
                return (
                    "the next epoch's order is known only when it begins: give the DataLoader a "
                    "generator=torch.Generator().manual_seed(…)"
                )
            return "the next epoch's order is not computed yet"
        if refusal := packing.refusal(present, coming):
            return refusal
        contents = self._contents(coming.inos)
        wanted = log.wanted(contents, job.begin, job.waited, now)
        coming_all = self._known_behind(job, epoch)
        for epochs in range(max(1, packing.following(present, coming_all)), 0, -1):
            served = range(epoch + 1, epoch + 1 + epochs)
            is_packed, why = packing.decide(self._layout, self._probe, contents, wanted, epochs)
            if not is_packed:
                return why
            refusal = self._lay_out(job, served, contents)
            if not refusal:
                return f"{why}; {_rhythm(served)}" if epochs > 1 else why
        return refusal

    def _known_behind(self, job: _Job, epoch: int) -> list[EpochOrder]:
        """Orders of the epochs behind that one, of as many as one log may serve."""
        orders = job.sequence.orders
        behind = range(epoch + 1, epoch + 1 + self._epochs_served(job))
        return [orders[later] for later in itertools.takewhile(orders.__contains__, behind)]

    def _lay_out(self, job: _Job, served: range, contents: Contents) -> str:
        """Begin a log for these epochs; or why not."""
        log, orders, share = job.log, job.sequence.orders, self._window_share()
        limits = packing.grain(len(served))
        found = self._cut(job, served, limits)
        if found is None and limits is packing.FINE:
            limits = packing.COARSE
            found = self._cut(job, served, limits)
        if found is None:
            return f"it would be more than {packing.CHUNKS_MOST} chunks"
        largest_bytes = max(chunks.largest_bytes for chunks in found.values())
        if 2 * largest_bytes > share:
            sharing = self._sharing(job) if 2 * largest_bytes <= self._budget_bytes else ""
            return f"two chunks do not fit into its share of RAM{sharing}"
        count = math.prod(len(found[epoch].ends) for epoch in served)
        if len(served) > 1 and not packing.are_cells_good(
            count, contents.size_bytes, self._limit_bytes
        ):
            return "the cells would be too small"
        buffer = packing.buffer_bytes(count, self._limit_bytes, limits)
        if not buffer:
            needed = packing.ram_bytes_needed(count, self._limit_bytes)
            alone = max(1, count * share // self._budget_bytes)  # its chunks, were there no others
            is_shared = packing.buffer_bytes(alone, self._limit_bytes, limits) > 0
            sharing = self._sharing(job) if is_shared else ""
            return f"--ram {-(-needed * 17 // (16 << 20))}M or more would be needed{sharing}"
        log.chunks[served.start - 1] = found.pop(served.start - 1)
        log.begin(served, list(found.values()), contents.samples)
        cells = packing.cells([orders[epoch] for epoch in served], list(found.values()))
        log.pieces = packing.frames(served, cells, contents, buffer, self._is_to_be_packed)
        return ""

    def _cut(self, job: _Job, served: range, limits: Grain) -> dict[int, Chunks] | None:
        """These epochs and the one before; None: too many chunks."""
        found = {}
        for epoch in range(served.start - 1, served.stop):
            order = job.sequence.orders[epoch].inos
            chunks = job.log.chunks.get(epoch) if epoch < served.start else None
            if chunks is None:
                share = self._window_share()
                chunks = packing.cut(order, self._ram_bytes, share, job.batch_size, limits)
            if chunks is None:
                return None
            found[epoch] = chunks
        return found

    def _is_to_be_packed(self, inos: Inos) -> Mask:
        flags, sizes = self._flags[inos], self._sizes[inos]
        is_resident = (flags & (STORED | RESIDENT) != 0) & (flags & GONE == 0) & (inos != 0)
        found: Mask = is_resident & (sizes > 0) & (sizes <= packing.BLOCK_BYTES)
        return found

    def _contents(self, order: Inos) -> Contents:
        samples = size_bytes = stored_bytes = 0
        for start in range(0, len(order), CHUNK):
            inos = order[start : start + CHUNK]
            inos = inos[self._is_to_be_packed(inos)]
            sizes = self._sizes[inos].astype(np.int64)
            samples += len(inos)
            size_bytes += int(sizes.sum())
            stored_bytes += int(sizes[self._flags[inos] & STORED != 0].sum())
        return Contents(samples, size_bytes, stored_bytes)

    def _stage_chunks(self, job: _Job, now: float) -> list[Command]:
        """The next chunks, each by one command, as there is room for all of one."""
        commands: list[Command] = []
        while job.sent < job.end and self._is_begun(job, now):
            stop = job.chunk_end(job.sent)
            if stop is None or stop > job.end:
                break
            inos, repeats = job.sequence.piece(job.sent, stop - job.sent)
            is_moved = job.log.is_open and job.sequence.epoch_of(job.sent) == job.log.decided
            flags = self._flags[inos]
            open_ = flags & (HELD | SENT | STAGED | FAILED) == HELD
            if is_moved:  # what is in RAM already, too
                open_ |= flags & (HELD | SENT | FAILED | STORED) == HELD | STORED
            chosen = inos[open_]
            if repeats:
                chosen = chosen[np.sort(np.unique(chosen, return_index=True)[1])]
            # one more than the one that is under way
            most = max(STAGE_UNANSWERED_MOST, 2 * len(chosen))
            if len(chosen) > most - self._stage_unanswered:
                break
            if len(chosen):
                before = self._moving
                commands += self._stage_chunk(job.log, chosen, is_moved)
                if is_moved:
                    job.log.count_moved(job.sent, stop, self._moving - before)
            job.sent_bytes += int(self._ram_bytes(inos).sum())
            job.sent = stop
        return commands

    def _stage_chunk(self, log: Log, inos: Inos, is_moved: bool) -> list[Command]:
        store = self._mark_sent(inos)
        moving = inos[store != 0]
        self._flags[moving] |= MOVING
        self._moving += len(moving)
        if is_moved:
            is_small = self._sizes[inos] <= packing.BLOCK_BYTES
            store[(self._flags[inos] & STORED != 0) & is_small] |= MOVE_BIT
        store |= SORT_BIT
        if not log.keeps_order:
            return [Command("stage", inos, store)]
        log.keeps_order = False
        first = slice(packing.CHUNK_SAMPLES_MOST)
        store[first] ^= SORT_BIT | KEEP_ORDER_BIT
        rest = slice(packing.CHUNK_SAMPLES_MOST, None)
        commands = [Command("stage", inos[part], store[part]) for part in (first, rest)]
        return [command for command in commands if len(command.inos)]

    # --- SSD

    def _place(self, now: float) -> None:
        """Chooses the residents among the files of orders that are new."""
        for job in self._jobs.values():
            if not (job.live and job.unplaced):
                continue
            current = job.sequence.epoch_of(job.begin)
            waiting = now - job.opened_at < HORIZON_WAIT_S
            if waiting and self._horizon_epoch(job, current) is not None:
                continue
            job.unplaced = False
            uneven = self._uses is not None and len(job.counted) > 1
            if uneven:
                self._place_by_use(job)
            else:
                self._place_by_first_use(job)

    def _missing(self, inos: Inos) -> Inos:
        """Those that could become residents."""
        inos = inos[self._flags[inos] & (STORED | RESIDENT | GONE) == 0]
        found: Inos = inos[(self._sizes[inos] > 0) & (inos != 0)]
        return found

    def _place_by_first_use(self, job: _Job) -> None:
        stop = job.last(job.sequence.known_until(job.begin))
        for inos, repeats in job.sequence.pieces(job.begin, stop):
            inos = self._missing(inos)
            if repeats:
                inos = inos[np.sort(np.unique(inos, return_index=True)[1])]
            if not self._admit(inos, None) and len(inos):
                self._short_of_bytes = self._residents.free_bytes
                break

    def _place_by_use(self, job: _Job) -> None:
        assert self._uses is not None
        stop = job.last(job.sequence.known_until(job.begin))
        inos = np.concatenate(
            [_NO_INOS, *(self._missing(part) for part, _ in job.sequence.pieces(job.begin, stop))]
        )
        inos = inos[np.sort(np.unique(inos, return_index=True)[1])]
        if not self._admit(inos, self._uses[inos]):
            self._short_of_bytes = self._residents.free_bytes

    def _admit(self, inos: Inos, uses: Integers | None) -> bool:
        """Makes residents of those that fit; whether all did."""
        admitted = self._residents.admit(self._sizes[inos], uses)
        self._flags[inos[admitted]] |= RESIDENT
        return bool(admitted.all())

    def _horizon(self, job: _Job, current: int) -> range:
        """Epochs over which uses are counted."""
        n = job.sequence.samples_per_epoch
        if job.epochs is None:
            return range(0)
        return range(current, min(job.epochs, current + max(2, HORIZON_SAMPLES_MOST // n)))

    def _horizon_epoch(self, job: _Job, current: int) -> int | None:
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
            int(self._sizes[self._missing(part)].sum(dtype=np.int64))
            for part, _ in job.sequence.pieces(job.begin, job.sequence.known_until(job.begin))
        )
        if missing <= self._residents.free_bytes:
            return None
        for epoch, order in orders.items():
            self._count(job, epoch, order.inos)
        return next(
            (
                epoch
                for epoch in self._horizon(job, current)
                if epoch not in job.counted and epoch not in job.unknown
            ),
            None,
        )

    def _count(self, job: _Job, epoch: int, inos: Inos) -> None:
        if epoch in job.counted:
            return
        if self._uses is None:
            self._uses = np.zeros(len(self._flags), np.uint16)
        job.counted.add(epoch)
        inside = inos[inos < len(self._uses)]
        uses = np.bincount(inside, minlength=len(self._uses))
        self._uses += np.minimum(uses, 1 << 10).astype(np.uint16)

    def _fetch(self) -> list[Command]:
        """Residents that are in no window, in the order of their first use."""
        parts: list[Inos] = []
        walk = WALK_MOST
        for job in self._jobs.values():
            if not job.live or (job.log.decided < 0 and self._is_packable(job)):
                continue  # in the latter case a log is announced first
            job.fetched = max(job.fetched, job.begin)
            stop = job.last(job.sequence.known_until(job.fetched))
            while (
                job.fetched < stop
                and walk > 0
                and self._fetch_unanswered < FETCH_UNANSWERED_MOST
                and self._residents.held_bytes > 0
            ):
                most = min(walk, 4096, stop - job.fetched)
                inos, repeats = job.sequence.piece(job.fetched, most)
                walk -= len(inos)
                flags = self._flags[inos]
                next_ = np.flatnonzero(
                    flags & (RESIDENT | STORED | HELD | SENT | FETCHING | GONE) == RESIDENT
                )
                if repeats:
                    next_ = next_[np.sort(np.unique(inos[next_], return_index=True)[1])]
                sizes = np.cumsum(self._sizes[inos[next_]], dtype=np.int64)
                fitting = int(
                    np.searchsorted(sizes, self._room_bytes - self._storing_bytes, "right")
                )
                chosen = inos[next_[:fitting]]
                job.fetched += len(inos) if fitting == len(next_) else int(next_[fitting])
                if len(chosen):
                    self._storing_bytes += int(sizes[len(chosen) - 1])
                    self._flags[chosen] |= FETCHING | STORING
                    self._fetch_unanswered += len(chosen)
                    parts.append(chosen)
                if fitting < len(next_):
                    break
        self._fetching.extend(parts)
        if len(self._fetching) > 4096:
            all_ = np.concatenate(list(self._fetching))
            self._fetching = deque([all_[self._flags[all_] & FETCHING != 0]])
        return _commands("fetch", parts)

    def _cancel_fetches(self, inos: Inos) -> None:
        inos = np.unique(inos[self._flags[inos] & FETCHING != 0])
        if len(inos) == 0:
            return
        self._fetch_unanswered -= len(inos)
        storing = inos[self._flags[inos] & STORING != 0]
        self._storing_bytes -= int(self._sizes[storing].sum(dtype=np.int64))
        self._flags[inos] &= ~(FETCHING | STORING) & 0xFFFF
        self._cancels.append(inos)

    # --- wires

    def _grid(self, job: _Job, start: int, stop: int, spacing: int) -> Positions:
        """Wires in [start, stop): every `spacing`-th sample and the last one of each epoch."""
        n = job.sequence.samples_per_epoch
        parts = []
        for epoch in range(start // n, -(-stop // n) if stop > start else start // n):
            base = epoch * n
            low, high = max(start - base, 0), min(stop - base, n)
            parts.append(np.arange(-(-low // spacing) * spacing, high, spacing) + base)
            if low < n <= high and (n - 1) % spacing and n - 1 >= low:
                parts.append(np.array([base + n - 1]))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _first_unfired(self, job: _Job, besides: Container[int] = ()) -> int | None:
        progress = job.progress
        first, last = np.searchsorted(
            job.wires, [progress.low, progress.high + 2 * progress.spacing]
        )
        where = job.wires[first:last]
        armed = where[self._flags[job.sequence.inos_at(where)] & ARMED != 0].tolist()
        return next((wire for wire in armed if wire not in job.fired and wire not in besides), None)

    def _disarm(
        self,
        inos: Inos,
        reads: Mask,
        jobs: list[_Job],
        candidates: list[Positions],
        strange: list[Mask],
    ) -> None:
        """Files that were looked up have no wire any more. What a stranger took away from a job
        that has not read it yet is laid again; it holds `low`, but not what is in order beyond it.
        """
        stolen = np.zeros(len(inos), np.bool_)
        for job, where, theirs in zip(jobs, candidates, strange, strict=True):
            if not theirs.any() or len(job.wires) == 0 or not job.live:
                continue
            place = np.minimum(np.searchsorted(job.wires, where), len(job.wires) - 1)
            wire = (job.wires[place] == where) & (where >= job.progress.low)
            wire &= theirs & ~reads & ~np.isin(where, list(job.fired))
            job.stolen.update(where[wire].tolist())
            stolen |= wire.any(axis=0)
        self._flags[inos[~reads & ~stolen]] &= ~ARMED & 0xFFFF
        if stolen.any():
            self._flags[inos[stolen]] |= ARMED
            self._stolen.append(inos[stolen])

    def _fired(
        self, job: _Job, candidates: Positions, own: Mask, unfired: int | None
    ) -> dict[int, _Fired]:
        """Wires of the zone among these look-ups. A file may be used twice there (at the end of one
        epoch and the beginning of the next), and by another job (not `own`), but the wire is gone.
        """
        if candidates.size == 0 or len(job.wires) == 0:
            return {}
        progress = job.progress
        zone = (candidates >= progress.low) & (candidates < progress.zone_end(unfired))
        sure = np.broadcast_to((zone.sum(axis=0) == 1) & own, zone.shape)
        uses = np.where(zone, candidates, np.iinfo(np.int64).max).min(axis=0)
        first = np.broadcast_to(uses, zone.shape)
        place = np.minimum(np.searchsorted(job.wires, candidates), len(job.wires) - 1)
        wire = zone & (job.wires[place] == candidates)
        how = map(_Fired, sure[wire].tolist(), first[wire].tolist())
        return dict(zip(candidates[wire].tolist(), how, strict=True))

    def _doubt_fired(self, job: _Job) -> None:
        """Wires that an earlier use of their file may have fired are laid again once that use is
        read.
        """
        low = job.progress.low
        for wire, (is_sure, first) in list(job.fired.items()):
            if not is_sure and first < min(wire, low):
                del job.fired[wire]

    def _fired_in_turn(self, job: _Job) -> int:
        """End of the wires from `high` on that have fired without a gap."""
        progress = job.progress
        end = progress.high
        first, last = np.searchsorted(job.wires, [end, progress.zone_end(None)])
        where = job.wires[first:last]
        for position, ino in zip(where.tolist(), job.sequence.inos_at(where), strict=True):
            if ino and position not in job.fired:
                break
            if position in job.fired and job.fired[position].is_sure:
                end = position + 1
        return end

    def _wires(self, now: float) -> list[Inos]:
        parts = [np.unique(inos[self._flags[inos] & ARMED != 0]) for inos in self._stolen]
        self._stolen.clear()
        for job in self._jobs.values():
            if job.state == "done" or not job.sequence.orders:
                continue
            where = [self._lay(job), *self._sentinels(job, now)] if job.live else []
            laid = np.concatenate([*where, self._search_wires(job, now)])
            if job.fired:
                laid = laid[~np.isin(laid, list(job.fired))]
            if len(laid) == 0:
                continue
            inos = job.sequence.inos_at(laid)
            inos = np.unique(inos[self._flags[inos] & ARMED == 0])
            inos = inos[inos != 0][:ARM_MOST]
            self._flags[inos] |= ARMED
            if len(inos):
                parts.append(inos)
        return parts

    def _lay(self, job: _Job) -> Positions:
        """The wires from `high` on; new ones once a good part of them has fired."""
        progress = job.progress
        high = progress.high
        ahead = 2 * (progress.disorder + 8 * progress.spacing)
        ahead = max(ahead, int(progress.samples_per_s * WIRED_AHEAD_S))
        stop = min(job.last(high + ahead), job.sequence.known_until(high))
        if job.wired < min(stop, high + ahead - ahead // 4):
            start = max(job.wired, high)
            kept = job.wires[np.searchsorted(job.wires, progress.low) :]
            job.wires = np.concatenate([kept, self._grid(job, start, stop, progress.spacing)])
            job.wired = stop
            job.fired = {wire: how for wire, how in job.fired.items() if wire >= progress.low}
            job.stolen = {wire for wire in job.stolen if wire >= progress.low}
        return job.wires[np.searchsorted(job.wires, high) :]

    def _sentinels(self, job: _Job, now: float) -> list[Positions]:
        """Wires over the rest of the epoch, and, four times as far apart, over what is read."""
        progress = job.progress
        n = job.sequence.samples_per_epoch
        epoch = job.sequence.epoch_of(progress.high)
        if epoch == job.sentinel_epoch and now - job.sentinels_at < SENTINELS_EVERY_S:
            return []
        job.sentinels_at, job.sentinel_epoch = now, epoch
        wide = progress.spacing * max(1, -(-n // (progress.spacing * SENTINELS_MOST)))
        return [
            self._grid(job, max(job.wired, epoch * n), job.last((epoch + 1) * n), wide),
            self._grid(job, epoch * n, max(progress.low, epoch * n), 4 * wide),
        ]

    def _search_wires(self, job: _Job, now: float) -> Positions:
        """Wires over a whole epoch: any files do."""
        if job.search is None or now < job.search.wires_at:
            return _NO_POSITIONS
        job.search.wires_at = now + WIRES_EVERY_S
        n = job.sequence.samples_per_epoch
        return np.arange(0, n, self._search_spacing(job)) + min(job.sequence.orders) * n

    def _search_spacing(self, job: _Job) -> int:
        """Samples between two of its wires: the disorder is an eighth of what is compared first; a
        batch has eight where it is read in turn, but the epoch is not.
        """
        n = job.sequence.samples_per_epoch
        wide = max(1, n // WIRES)
        if job.search is not None and job.search.is_resting:
            return wide
        in_turn = job.batch_size if job.progress.is_scattered else job.progress.disorder
        return min(wide, max(DENSE_SPACING, in_turn // 8, -(-n // DENSE_WIRES)))

    # --- what people see

    def status(self, name: str) -> dict[str, Any]:
        """Figures of one job; plain Python values."""
        job = self._jobs[name]
        progress = job.progress
        n = job.sequence.samples_per_epoch
        epoch, index = divmod(job.last(progress.high), n)
        if job.total is not None and progress.high >= job.total > 0:
            epoch, index = epoch - 1, n
        return {
            "state": job.state,
            "reason": job.reason,
            "epoch": epoch,
            "epochs": job.epochs,
            "index": index,
            "samples": n,
            "window_bytes": self._distinct_bytes(job),
            "ahead_bytes": self._ahead_bytes(job),
            "not_late": self._not_late(job),
            "late": {reason: count for reason, count in job.late.items() if count},
            "unplanned": {reason: count for reason, count in job.unplanned.items() if count},
            "predicted_stall_s": self._predicted_stall_s(job),
            "samples_per_s": progress.samples_per_s,
            **self._layout_status(job),
        }

    def _not_late(self, job: _Job) -> int:
        """Never more than the job has: who goes back passes samples again."""
        progress = job.progress
        count = max(0, progress.passed_samples + progress.high - progress.low - job.misses)
        return count if job.total is None else min(count, job.total)

    def _layout_status(self, job: _Job) -> dict[str, str]:
        """How its samples lie on SSD, and why; {}: the mount is told to leave them."""
        if self._layout == packing.STATIC:
            return {}
        if self._packer not in (None, job.name):
            return {"layout": "static", "layout_why": f"{self._packer} is packed on this mount"}
        if job.order_bytes is not None and job.order_bytes <= self._budget_bytes:
            return {"layout": "static", "layout_why": "all of it fits into RAM"}
        layout = "reorder" if job.log.is_open else "log" if job.log.chunks else "static"
        return {"layout": layout, "layout_why": job.log.why or "not decided yet"}

    def _distinct_bytes(self, job: _Job) -> int:
        """Bytes of its window, a file of two epochs counted once."""
        if all(other is job or other.begin == other.end for other in self._jobs.values()):
            return self._wanted_bytes  # nobody else wants any
        n = job.sequence.samples_per_epoch
        pieces = list(job.sequence.pieces(job.begin, job.end))
        if job.begin // n == max(job.end - 1, 0) // n and not any(repeats for _, repeats in pieces):
            return job.window_bytes
        in_window = np.zeros(len(self._flags), np.bool_)
        for inos, _ in pieces:
            in_window[inos] = True
        return int(self._ram_bytes(np.flatnonzero(in_window).astype(np.uint32)).sum())

    def _ahead_bytes(self, job: _Job) -> int:
        """Bytes that the reader finds in RAM before the first that is missing (of the next
        READY_MOST files).
        """
        start = max(job.begin, job.progress.high)
        total = 0
        stop = min(job.end, start + READY_MOST)
        for inos, _ in job.sequence.pieces(start, max(start, stop)):
            sizes = self._ram_bytes(inos)
            missing = np.flatnonzero((self._flags[inos] & STAGED == 0) & (sizes > 0))
            if len(missing):
                return total + int(sizes[: missing[0]].sum())
            total += int(sizes.sum())
        return total

    def _predicted_stall_s(self, job: _Job) -> float:
        """Of the rest of this epoch (hintsd/stall.py); of many samples every m-th stands for m."""
        start = job.progress.high
        n = job.sequence.samples_per_epoch
        stop = min((start // n + 1) * n, job.sequence.known_until(start))
        speed = job.progress.samples_per_s
        if stop <= start or not job.live or speed <= 0:
            return 0.0
        every = -(-(stop - start) // STALL_SAMPLES_MOST)
        inos = job.sequence.inos_at(np.arange(start, stop, every))
        sizes = self._sizes[inos].astype(np.float64) * every
        flags = self._flags[inos]
        rates = np.where(flags & STORED != 0, self._ssd_bytes_per_s, self._origin_bytes_per_s)
        rates[flags & STAGED != 0] = np.inf
        consumer = float(sizes.mean()) / every * speed
        return float(stall.stall_seconds(sizes, rates, consumer))

    def notices(self) -> list[tuple[str, str]]:
        """(job, one line): new since last asked."""
        notices, self._notices = self._notices, []
        return notices

    def check_invariants(self) -> None:
        """Costs a pass over all files: for tests."""
        refs = np.zeros(len(self._refs), np.int64)
        for job in self._jobs.values():
            assert job.begin <= job.sent <= job.end, (job.begin, job.sent, job.end)
            window_bytes = 0
            for inos, _ in job.sequence.pieces(job.begin, job.end):
                np.add.at(refs, inos, 1)
                window_bytes += int(self._ram_bytes(inos).sum())
            assert window_bytes == job.window_bytes
            assert job.live or job.begin == job.end
            job.progress.check_invariants()
        refs[:1] = 0
        assert (refs == self._refs).all()
        all_ = np.arange(len(self._flags), dtype=np.uint32)
        held = all_[self._flags & HELD != 0]
        assert int(self._ram_bytes(held).sum()) == self._held_bytes
        assert int(self._ram_bytes(held[self._refs[held] > 0]).sum()) == self._wanted_bytes
        assert self._wanted_bytes <= self._budget_bytes
        for bit in (SENT, STAGED):
            assert not (self._flags & bit != 0)[self._flags & HELD == 0].any()
        assert np.count_nonzero(self._flags & SENT) == self._stage_unanswered
        assert not (self._flags & MOVING != 0)[self._flags & SENT == 0].any()
        assert np.count_nonzero(self._flags & MOVING) == self._moving
        assert np.count_nonzero(self._flags & FETCHING) == self._fetch_unanswered
        storing = self._sizes[self._flags & STORING != 0]
        assert int(storing.sum(dtype=np.int64)) == self._storing_bytes
        residents = self._flags & RESIDENT != 0
        assert not (self._flags[residents] & STORED).any()
        assert int(self._sizes[residents].sum(dtype=np.int64)) == self._residents.held_bytes
        self._residents.check_invariants()


def _give_to_nearest(jobs: list[_Job], placed: list[Positions]) -> None:
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


def _rhythm(served: range) -> str:
    return f"written anew every {len(served)} epochs"


def _standing(job: _Job) -> tuple[bool, int]:
    """Windows grow in this order, and shrink in the opposite one."""
    return job.state == "idle", job.window_bytes


def _takes_share(job: _Job) -> bool:
    """Of the RAM for windows."""
    return job.live and job.state != "idle"


def _can_grow(job: _Job) -> bool:
    """Whether more of its sequence is known than its window covers."""
    return job.last(job.sequence.known_until(job.end)) > job.end


def _commands(
    kind: str, parts: Iterable[Inos], store: npt.NDArray[np.uint8] | None = None
) -> list[Command]:
    inos = np.concatenate([_NO_INOS, *parts])
    return [
        Command(
            kind,
            inos[start : start + COMMAND_INOS_MOST],
            None if store is None else store[start : start + COMMAND_INOS_MOST],
        )
        for start in range(0, len(inos), COMMAND_INOS_MOST)
    ]
