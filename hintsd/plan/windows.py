"""What of each job's sequence is to be in RAM (docs/HINTS.md rule 1; pure).

* Each job has a *window* [begin, end) of positions. A file in any window is *wanted*; ram.py counts
  the windows' uses of each file. Windows grow, the smallest first, as long as the bytes of all
  wanted files together stay below the budget, and shrink from their far end.
* A file that has left the last window is *spare*: it stays in RAM until its room is needed, or no
  job has it any more, then it is dropped (an epoch whose order is not known yet will use the same
  files). All that is in no window is used later than all that is, so it does not matter which
  spare goes first.
* Before that it may be *kept*: a file that the reader has passed, that is in RAM and is to be
  missing on SSD, stays for good, as long as windows have the room that they need. It counts as one
  use more, so windows grow in what is left, and come upon it at no cost.
* A file is *held* from when it is wanted until it is dropped or cancelled; held bytes never exceed
  the budget, counting from a command's sending, since the mount carries out commands in order.
* A job that is *packed* (docs/LOG.md, layout.py) has windows of whole chunks.

INVARIANT: held bytes ≤ window budget after `fill`, wanted bytes always; `refs` of a file counts its
uses in all windows, and that it is kept. What the kernel takes again and again is no part of it
(`Ram.usable_bytes`), from the next `fill` on.
INVARIANT: kept bytes ≤ window budget less what the windows need, after `keep`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from hintsd.follow.sequence import SLICE, Inos, Uses
from hintsd.keeping.shared_files import SharedFiles
from hintsd.keeping.shares import Shares
from hintsd.plan.files import (
    GONE,
    KEPT_IN_RAM,
    READ,
    RESIDENT,
    STAGED,
    STORED,
    Files,
    Ssd,
    takes,
)
from hintsd.plan.job import Job, owner_count, samples_read
from hintsd.plan.lanes import LOOK_MOST, Lanes
from hintsd.plan.layout import Layout
from hintsd.plan.placement import Placement
from hintsd.plan.ram import OUTSIDE_SHARE, Bytes, Kept, Ram, Reclaimed, Spare
from hintsd.policies import Mask
from hintsd.policies.residents import fits

if TYPE_CHECKING:
    from hintsd.keeping.keeping import Keeping

EXTEND_MOST = 1 << 20  # positions that enter windows in one decide()
UNEVEN_SHARE = (
    32  # windows are evened out when they differ by more than a 32nd of the budget, twice
)
# What a window needs: a second of reading, but no more than an eighth of the budget for that; room
# for what is read at once, twice; all windows no more than a half of the budget.
AHEAD_S, AHEAD_SHARE, NEED_SHARE = 1.0, 8, 2
LANES_AHEAD_S = 0.05  # lanes go on twice in that time: they need an eighth to a half
EVEN_SHARE = 0.95  # an epoch of so much of the dataset, and nothing twice, reads all alike
MARGIN_SHARE = 8  # an eighth of an epoch
SCARCE = 0.9  # of what may be kept so much is
READ_LATELY_S = 5.0  # else it is not known whether readers wait
PATIENCE_SHARE = 6  # readers may take a sixth of a window between two decisions

HELD_MARGIN: Final = 0.5  # of `Keeping.leaves`
LEAVES_FIRST_S: Final = 1e12


class Windows:
    """Of one mount's `jobs`: all of them, as they come and go."""

    def __init__(
        self,
        files: Files,
        ssd: Ssd,
        ram: Ram,
        reclaimed: Reclaimed,
        jobs: Mapping[str, Job],
        placement: Placement,
        layout: Layout,
        lanes: Lanes,
        keeping: Keeping | None,
    ) -> None:
        """`keeping`: whose rule says what stays; None: what is used soonest."""
        self._files, self._ssd, self._ram, self._jobs = files, ssd, ram, jobs
        self._placement, self._layout, self._lanes = placement, layout, lanes
        self._reclaimed, self._keeping = reclaimed, keeping
        self.spare = Spare(files, ram)
        """What has left them."""
        self.kept = Kept(files, ram, self.spare, keeping)
        """What stays of that for good."""
        self.has_lanes = False
        """Whether those of all jobs that are planned for are lanes; else none is."""
        self._shared = SharedFiles()
        self.shares = Shares()
        """What the files of several datasets may have of the cache."""

    @property
    def _live(self) -> list[Job]:
        return [job for job in self._jobs.values() if job.live]

    def set_budget(self, ram_bytes: int) -> None:
        """ram_bytes: of the mount."""
        budget_bytes = ram_bytes - ram_bytes // OUTSIDE_SHARE
        if budget_bytes != self._ram.budget_bytes:
            self.empty_all()
            if budget_bytes < self._ram.budget_bytes:
                self._keep_at_most(0)  # what windows want of it they find in RAM
        self._ram.set_budget(ram_bytes, budget_bytes)

    # --- they begin where the readers are

    def follow(self) -> None:
        """Each begins at `low`, as far as the readers have come."""
        for job in self._live:
            job.window.note_reach()
            begin = self._begin_of(job)
            if begin > job.window.begin:
                self._move_on(job, begin)

    def _begin_of(self, job: Job) -> int:
        """The window begins at `low`, but always reaches ahead of `high`: where it is small against
        the disorder, part of what is behind is given up. (How small is known once there was one.)
        Not where slow workers are waited for, and the origin would be asked for it again.
        """
        progress, reach = job.progress, job.window.reach
        begin = progress.low
        if reach and not (progress.is_low_known and self._placement.is_short):
            behind = reach // (2 if progress.workers else 4)
            begin = max(begin, progress.high - max(1, behind))
        return min(begin, job.sequence.last(begin))

    def _move_on(self, job: Job, begin: int) -> None:
        is_next = job.sequence.epoch_of(begin) != job.sequence.epoch_of(job.window.begin)
        if is_next and job is max(self._live, key=lambda live: live.sequence.samples_per_epoch):
            self._reclaimed.begin_epoch()  # of several ranks one's: it is their mount's
            if self._keeping is not None:
                self._keeping.begin_epoch()
        self._note_need(job, begin)
        self.kept.limit(self._keep_bytes())
        keep = None if job.placed.is_due else self.kept.take
        job.window.leave_behind(begin)
        self._release(job, job.window.begin, min(begin, job.window.end), keep)
        job.move_on(begin)

    # --- what is kept

    def _note_need(self, job: Job, begin: int) -> None:
        """What its window needs, which goes on from `begin`: the most of this epoch and of the one
        before, for what was kept and is dropped has to be fetched again.
        """
        window, epoch_of = job.window, job.sequence.epoch_of
        window.note_mean()
        bytes_per_s = job.progress.samples_per_s * window.known_mean_bytes
        if self.has_lanes:
            need_bytes = bytes_per_s * LANES_AHEAD_S * job.reached.missing_share
        else:
            most_bytes = self._ram.usable_bytes / AHEAD_SHARE
            need_bytes = max(job.at_once_bytes, min(bytes_per_s * AHEAD_S, most_bytes))
        window.need(int(need_bytes), is_next_epoch=epoch_of(begin) != epoch_of(window.begin))

    def _keep_bytes(self) -> int:
        """What windows can spare; nothing where a job may be packed: its chunks need the room."""
        jobs = self._live
        if any(self._layout.is_packable(job) for job in jobs):
            return 0
        if self._keeping is not None and self._keeping.holds_nothing:
            return 0
        budget_bytes = self._ram.usable_bytes
        need_bytes = sum(job.window.need_bytes for job in jobs)
        if self.has_lanes:
            need_bytes = max(need_bytes, budget_bytes // self._lanes.room.part)
        elif need_bytes > 2 * budget_bytes:  # what is read at once does not fit: ahead is in vain
            return budget_bytes
        return budget_bytes - min(need_bytes, budget_bytes // NEED_SHARE)

    def keep(self, now: float) -> None:
        """What is kept beyond what windows can spare is spare, too, what is used last first. And
        what goes from SSD for files used sooner is chosen by the same uses. What is of a dataset
        that has more than its share leaves before all else.
        """
        jobs, keeping = self._live, self._keeping
        if self.has_lanes:
            is_scarce = self._ram.kept_bytes > SCARCE * self.kept.most_bytes
            self._lanes.look(jobs, is_scarce, now)
        keep_bytes = self._keep_bytes()
        is_packed = any(map(self._layout.is_packable, jobs))
        stored = functools.partial(_stored, self._files, jobs)
        in_ram: Callable[[Inos], Uses] | None
        on_ssd: Callable[[Inos], Uses] | None
        shut_out: Callable[[Inos], Mask] | None = None
        is_divided_anew = False
        if keeping is None:
            soon = functools.partial(_next_uses, jobs)  # behind windows if lanes lie in them
            is_shared = self._shared.by(jobs)
            is_uneven = is_shared or any(map(_is_uneven, jobs))
            in_ram = functools.partial(soon, self.has_lanes) if is_uneven else None
            is_weighed = is_shared or any(map(_is_weighed, jobs))
            on_ssd = functools.partial(soon, True) if is_weighed else None
            margin = min((_margin(job, len(jobs)) for job in jobs), default=0.0)
            may_move = self._placement.exchange.may_evict and not is_packed
            for job in jobs if len(jobs) > 1 else []:  # lanes have little in RAM
                _judge(job, self._files, None if self.has_lanes else self._ram, now)
            free_bytes = self._ssd.unclaimed_bytes + max(0, keep_bytes - self._ram.kept_bytes)
            sharers = jobs if may_move else []
            is_divided_anew = _divide(self.shares, sharers, self._files, free_bytes, now)
            if self.shares.are_uneven:
                shut_out = self.shares.are_over
                if not self.has_lanes:  # what it unkeeps takes the room of what is read next
                    in_ram = functools.partial(_by_share, shut_out, in_ram)
                on_ssd = functools.partial(_by_share, shut_out, on_ssd)
        else:
            if jobs and not keeping.is_begun and self._placement.is_room_known:
                ssd_bytes = self._ssd.room_bytes + self._files.total_bytes(stored())
                keeping.begin(keep_bytes + ssd_bytes)
            in_ram, on_ssd, margin = keeping.leaves, keeping.leaves, HELD_MARGIN
        self.kept.choose_by(in_ram)
        self._keep_at_most(keep_bytes)
        on_ssd = None if is_packed else on_ssd
        self._placement.exchange.choose_by(on_ssd, stored, margin, shut_out)
        if is_divided_anew:
            self.sort_anew()
            for job in jobs if shut_out is None else []:  # anybody may have what room is left
                job.placed.demand()

    def sort_anew(self) -> None:
        """It is known now that files are used at other times."""
        self.kept.sort_anew()
        self._placement.exchange.sort_anew()

    def _keep_at_most(self, most_bytes: int) -> None:
        self.kept.limit(most_bytes)
        self.kept.shrink(self._ssd.uses)

    # --- they fill what there is

    def fill(self) -> None:
        """Windows grow in what room there is, and shrink for each other; what is spare goes."""
        self._choose_lanes()
        self._give_up_excess()
        self._fill_lanes() if self.has_lanes else self._balance()
        self.spare.reclaim()

    def _give_up_excess(self) -> None:
        """What windows want beyond what is usable, now that the kernel has taken some of it."""
        jobs = [job for job in self._live if job.window.size_bytes]
        while self._ram.room_bytes < 0 and jobs and not self.has_lanes:
            large = max(jobs, key=_Turns(jobs).place)
            least_bytes = self._ram.usable_bytes // UNEVEN_SHARE  # some of it may be kept
            if not self._shrink(large, max(-self._ram.room_bytes, least_bytes)):
                jobs.remove(large)

    def _choose_lanes(self) -> None:
        """All jobs' windows become lanes where RAM does not take what they read at once and SSD not
        all files; they are windows again when there is clearly enough.
        """
        jobs = self._live
        may = self._placement.is_short and all(
            self._lanes.has(job) and not self._layout.is_packable(job) for job in jobs
        )
        share = NEED_SHARE + self.has_lanes
        need_bytes = sum(job.at_once_bytes for job in jobs)
        has_lanes = may and need_bytes > self._ram.usable_bytes / share
        if has_lanes != self.has_lanes:
            self.has_lanes = has_lanes
            self._lanes.begin_again()
            for job in jobs:
                self.empty(job)
                job.window.forget_needs()

    def _fill_lanes(self) -> None:
        """Windows cover what may be read soon; in what is not kept lies what is needed first."""
        self.spare.reclaim()  # what is spare, and wanted again, fits
        jobs = self._live
        owners = owner_count(jobs)
        for job in jobs:
            end = self._lanes.window_end(job)
            while job.window.end < end:
                inos, repeats = job.sequence.piece(job.window.end, end - job.window.end)
                if len(inos) == 0:
                    break
                self._ram.cover(inos, repeats=repeats)
                job.window.grow(len(inos), self._ram.total_bytes(inos))
        self.kept.limit(self._keep_bytes())
        for job in jobs:
            share_bytes = (self._ram.usable_bytes - self._ram.kept_bytes) // (owners * job.sharers)
            others = [other for other in jobs if other is not job]
            most_bytes = share_bytes if job.takes_share else 0
            self._lanes.hold(job, others, most_bytes, self.kept.take, LOOK_MOST // len(jobs))

    def _balance(self) -> None:
        jobs = self._live
        if not jobs or self._ram.usable_bytes <= 0:
            return
        uneven_bytes = self._ram.usable_bytes // UNEVEN_SHARE
        even_bytes = max([2 * uneven_bytes, *(job.log.largest_bytes for job in jobs)])
        work = EXTEND_MOST
        blocked: set[str] = set()
        turns = 8 * len(jobs) * len(jobs) + 64
        while work > 0 and turns > 0:
            turns -= 1
            growing = [job for job in jobs if job.name not in blocked]
            if not growing:
                break
            in_turn = _Turns(jobs)
            small = min(growing, key=in_turn.place)
            others = [job for job in jobs if job is not small]
            share = self._ram.usable_bytes
            if others and not (nearest := min(others, key=in_turn.place)).yields:
                share = max(in_turn.ahead_bytes(nearest, small), 0) + uneven_bytes
            taken = self._extend(small, share, min(work, SLICE))
            work -= taken
            if taken:
                continue
            spared = {job: in_turn.excess_bytes(job, small) for job in others}
            large = max(others, key=lambda job: (job.yields, spared[job]), default=None)
            excess = 0 if large is None else spared[large]
            if large is None or excess <= even_bytes or not self._shrink(large, excess // 2):
                blocked.add(small.name)

    def _extend(self, job: Job, most_bytes: int, most: int) -> int:
        """Lets the window grow by at most so many bytes of its own, or by a chunk; positions
        taken.
        """
        window = job.window
        most = min(most, job.sequence.last(window.end + most) - window.end)
        total, step = 0, 1024  # in the steady state there is little room
        while total < most:
            chunk_end = job.chunk_end(window.end)
            if chunk_end is not None:
                # To look costs a pass over the chunk. What several jobs want may need less by now.
                is_alone = len(self._jobs) == 1
                if total == 0 and not (is_alone and window.is_lacking(self._ram.room_bytes)):
                    total = self._extend_piece(job, None, chunk_end - window.end)[0]
                break
            step = min(step, most - total)
            taken, own_bytes = self._extend_piece(job, most_bytes, step)
            total += taken
            most_bytes -= own_bytes
            if (taken < step and job.sequence.at(window.end)[1]) or taken == 0:
                break
            step *= 4
        return total

    def _extend_piece(self, job: Job, most_bytes: int | None, most: int) -> tuple[int, int]:
        """Positions taken, and their bytes; None: all that are asked for, or none of them."""
        inos, repeats = job.sequence.piece(job.window.end, most)
        if len(inos) == 0:
            return 0, 0
        own, fresh = _own_and_fresh(self._ram, self._files, inos, repeats)
        cost = np.where(fresh, own, 0)
        taken = fits(cost, self._ram.room_bytes)
        if most_bytes is not None:
            taken = min(taken, fits(own, most_bytes))
        if taken == 0 or (most_bytes is None and taken < len(inos)):
            job.window.lack(int(cost.sum()) if most_bytes is None else None)
            return 0, 0
        self._ram.enter(inos[:taken], own[:taken], fresh[:taken], repeats=repeats)
        own_bytes = int(own[:taken].sum())
        job.window.grow(taken, own_bytes)
        return taken, own_bytes

    def rearrange(self, job: Job, put: Callable[[], None]) -> None:
        """`put` gives its sequence another order of as many samples: what its window had and still
        has stays as it is, be it staged or only asked for.
        """
        window, sequence = job.window, job.sequence
        leaving = list(sequence.pieces(window.begin, window.end))
        put()
        size_bytes = 0
        for inos, repeats in sequence.pieces(window.begin, window.end):
            own, fresh = _own_and_fresh(self._ram, self._files, inos, repeats)
            if self.has_lanes:
                self._ram.cover(inos, repeats=repeats)
            else:
                self._ram.enter(inos, own, fresh, repeats=repeats)
            size_bytes += int(own.sum())
        for inos, repeats in leaving:
            self.spare.add(self._ram.leave(inos, repeats=repeats))
        window.change(size_bytes)
        while self._ram.room_bytes < 0 and self._shrink(job, -self._ram.room_bytes):
            pass  # others' sizes

    def _shrink(self, job: Job, by_bytes: int) -> bool:
        """Takes about so many bytes (at least) off the window's far end; False: it is empty."""
        window, sequence = job.window, job.sequence
        end, freed = window.end, 0
        while freed < by_bytes and end > window.begin:
            epoch, index = sequence.at(end - 1)
            chunks = job.log.chunks.get(epoch)
            first = max(index + 1 - 4096, 0) if chunks is None else chunks.begin_of(index)
            start = max(window.begin, sequence.start(epoch) + first)
            inos, _ = sequence.piece(start, end - start)
            back = self._ram.bytes_of(inos)[::-1]
            count = takes(back, by_bytes - freed) if chunks is None else len(back)
            freed += int(back[:count].sum())
            end -= count
        if end == window.end:
            return False
        self._release(job, end, window.end)
        window.end_at(end)
        return True

    # --- what leaves them

    def _release(
        self, job: Job, start: int, stop: int, keep: Callable[[Inos], None] | None = None
    ) -> None:
        """Positions at one end of the window leave it. `keep`: as `Ram.leave` has it."""
        position, window = start, job.window
        for inos, repeats in job.sequence.pieces(start, stop):
            own = self._ram.bytes_of(inos)
            looked_at = max(min(window.sent - position, len(inos)), 0)
            window.shed(int(own.sum()), int(own[:looked_at].sum()))
            position += len(inos)
            self.spare.add(self._ram.leave(inos, repeats=repeats, keep=keep))

    def empty(self, job: Job) -> None:
        """The window begins anew; what is staged is spare until the next `fill` has looked."""
        self._release(job, job.window.begin, job.window.end)
        job.restart()

    def empty_all(self) -> None:
        for job in self._live:
            self.empty(job)

    # --- what others ask

    def patience_s(self) -> list[float]:
        """How long the next decision may wait, for each job that is read: its readers take so long
        for a small part of a window, or for half of what is staged when there is no more to stage.
        """
        jobs = [job for job in self._live if job.progress.samples_per_s > 0]
        return [0.0 if self.has_lanes else _patience_s(job, self._ram) for job in jobs]

    def check_invariants(self) -> None:
        """Costs a pass over all files: for tests."""
        self.spare.check_invariants()
        refs = np.zeros(len(self._ram.refs), np.int64)
        for job in self._jobs.values():
            window = job.window
            assert window.begin <= window.sent <= window.end
            size_bytes = 0
            for inos, _ in job.sequence.pieces(window.begin, window.end):
                np.add.at(refs, inos, 1)
                size_bytes += self._ram.total_bytes(inos)
            assert size_bytes == window.size_bytes
            assert job.live or window.begin == window.end
        refs[:1] = 0
        refs[self._ram.kept()] += 1
        assert (refs == self._ram.refs).all()


def _own_and_fresh(ram: Ram, files: Files, inos: Inos, repeats: bool) -> tuple[Bytes, Mask]:
    """Bytes of each, and which of them, each once, are to be held that no window wants."""
    own, flags = ram.bytes_of(inos), files.flags[inos]
    fresh = (ram.refs[inos] == 0) & (flags & (GONE | READ) == 0) & (own > 0)
    if repeats:
        first = np.zeros(len(inos), np.bool_)
        first[np.unique(inos, return_index=True)[1]] = True
        fresh &= first
    return own, fresh


def _patience_s(job: Job, ram: Ram) -> float:
    window = job.window
    if ram.stage_unanswered == 0 and window.sent == window.end and not job.can_grow:
        samples = (window.end - job.progress.high) / 2  # all that is known lies there
    else:
        samples = (window.end - window.begin) / PATIENCE_SHARE
    return max(samples, 0) / job.progress.samples_per_s


def _is_uneven(job: Job) -> bool:
    """Whether an epoch reads some of its files more often than others, or not at all."""
    if job.scores.are_told or job.sequence.has_repeats:
        return True
    most = EVEN_SHARE * len(job.dataset)
    return any(len(order.inos) < most for order in job.sequence.orders.values())


def _next_uses(jobs: list[Job], is_behind_windows: bool, inos: Inos) -> Uses:
    """When each is used next by one of them: after all that was passed, or after the windows. A
    position, or where there are several in how many seconds. Shape (files,).
    """
    found = np.full(len(inos), np.inf)
    for job in jobs:
        start = job.window.end if is_behind_windows else job.window.passed
        uses = job.sequence.next_uses(inos, start, job.scores.of(inos))
        if len(jobs) > 1:
            uses = (uses - start) / max(job.progress.samples_per_s, 1.0)
        found = np.minimum(found, uses)
    return found


def _judge(job: Job, files: Files, ram: Ram | None, now: float) -> None:
    """What it gains by what stays. Whether it waits is not known where `ram` is None, nothing was
    read lately, or no order is known.
    """
    sequence, at = job.sequence, job.progress.high
    soon, _ = sequence.piece(at, job.batch_size)
    if ram is not None and len(soon) and now - job.progress.confirmed_at < READ_LATELY_S:
        missing = soon[files.flags[soon] & (STAGED | GONE) == 0]
        job.need.look(bool(ram.bytes_of(missing).any()), samples_read(job), now)
    why = "it reads one epoch" if sequence.epochs == 1 else ""
    is_unread = job.state == "idle" and not job.progress.begun
    job.need.gain_nothing("nothing of it was read yet" if is_unread else why)


def _divide(shares: Shares, jobs: list[Job], files: Files, free_bytes: int, now: float) -> bool:
    """Whether what leaves first has changed. `free_bytes`: of what stays from epoch to epoch."""
    return shares.review(
        jobs,
        now,
        free_bytes,
        lambda inos: files.sizes[inos],
        lambda inos: files.flags[inos] & (STORED | RESIDENT | KEPT_IN_RAM) != 0,
    )


def _by_share(
    are_over: Callable[[Inos], Mask], next_uses: Callable[[Inos], Uses] | None, inos: Inos
) -> Uses:
    """`next_uses`, but later than all else what is of a dataset that has more than its share."""
    uses = np.where(are_over(inos), LEAVES_FIRST_S, 0.0)
    return uses if next_uses is None else uses + next_uses(inos)


def _stored(files: Files, jobs: list[Job]) -> Inos:
    """What SSD has of their datasets. Costs a pass over all files."""
    is_theirs = datasets(jobs, len(files.flags))
    return np.flatnonzero(is_theirs & (files.flags & STORED != 0)).astype(np.uint32)


def _is_weighed(job: Job) -> bool:
    """Whether some of its files are used more often than others, as far as is known or expected.
    Not a rank, which reads other files in each epoch: those that it leaves out are not worth less.
    """
    return job.scores.are_told or job.sequence.has_repeats


def _margin(job: Job, jobs: int) -> float:
    """So much later is a file used that makes way for another one: `_next_uses` has the unit. The
    more jobs there are, the sooner is a file used again.
    """
    samples = job.sequence.samples_per_epoch / MARGIN_SHARE / jobs
    return samples if jobs == 1 else samples / max(job.progress.samples_per_s, 1.0)


def datasets(jobs: Iterable[Job], count: int) -> Mask:
    """Of each inode number below `count`: whether a job that is planned for may read the file."""
    found = np.zeros(count, np.bool_)
    for job in jobs:
        if job.live:
            found[job.dataset] = True
    return found


class _Turns:
    """The order in which windows grow, and shrink in the opposite one: whose owner has least of RAM
    in windows, then which is smallest.
    """

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._held = Counter[int]()  # bytes by owner
        for job in jobs:
            self._held[job.owner] += 0 if job.yields else job.window.size_bytes

    def place(self, job: Job) -> tuple[bool, int, int]:
        return job.yields, self._held[job.owner], job.window.size_bytes

    def ahead_bytes(self, large: Job, small: Job) -> int:
        """How much more the one has: its owner, or, of one owner's, the job itself."""
        if large.owner == small.owner:
            return large.window.size_bytes - small.window.size_bytes
        return self._held[large.owner] - self._held[small.owner]

    def excess_bytes(self, large: Job, small: Job) -> int:
        """What the larger window may give to the smaller one, and as much again."""
        if not small.can_grow or (large.yields < small.yields):
            return 0
        if large.yields and not small.yields:
            return 2 * large.window.size_bytes
        return min(self.ahead_bytes(large, small), 2 * large.window.size_bytes)
