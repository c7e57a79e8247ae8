"""What jobs hold where RAM does not take all that their workers read at once (docs/HINTS.md rule 1;
pure).

A DataLoader's w workers read w batches at once, each from its first sample to its last: batch b
and, after it, b + w make a *lane*. A window over all of that would be several batches for each
worker. Here a window covers it and holds nothing by itself; of each lane the next few files are
held that are missing on SSD, the same number of each. Where a lane's reader is, its READs tell:
what SSD has is not staged, so it makes some. Where it will make none, one of those files is armed.

INVARIANT: behind a lane's reader nothing is held but what is kept, or needed again soon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from hintsd.follow.sequence import NO_INOS, NO_POSITIONS, Inos, Positions
from hintsd.plan.files import (
    ARMED,
    FAILED,
    GONE,
    HELD,
    KEPT_IN_RAM,
    SENT,
    STAGED,
    STORED,
    Files,
    Wires,
    first_uses,
    takes,
)
from hintsd.plan.job import Job, samples_read
from hintsd.plan.ram import Ram
from hintsd.policies.residents import fits

WINDOW_SHARE = 2  # a window covers what is read at once, twice
LOOK_MOST = 1 << 13  # samples that are looked at in one decide(): 0.1 s of fast readers


# Of the budget, that lanes have: an eighth, and twice as much if that makes readers faster by a
# fifth. Tried where a tenth of the reads came while their file was fetched; again in a minute, or
# two, ...
LEAST_PART, MOST_PART = 8, 2
TRIED_S, TRIED_SAMPLES, FETCHING_SHARE, FASTER = 2.0, 128, 0.1, 1.2
REST_FIRST_S, REST_MOST_S = 60.0, 3600.0

Keep: TypeAlias = Callable[[Inos], None]


class Room:
    """How much of the budget lanes have, and what is kept has not. Where an answer of the origin
    takes long, but many come at a time, more of it is more speed; where its bandwidth is the limit,
    less is kept for nothing.
    """

    def __init__(self) -> None:
        self.part = LEAST_PART
        """One of so many of the budget is theirs, at least."""
        self._looked = 0.0, 0, 0  # last: when, samples and reads of files in flight until then
        self._before: float | None = None  # samples a second with half as much, while it is tried
        self._is_new = False  # what is tried, or reading, has begun within this time
        self._rests_until, self._rest_s = 0.0, REST_FIRST_S

    def look(self, samples: int, fetching: int, is_scarce: bool, now: float) -> None:
        """`samples`: that were read so far; `fetching`: of these, those whose files were in flight.
        `is_scarce`: all that may be kept is.
        """
        at, samples_then, fetching_then = self._looked
        if now - at < TRIED_S:
            return
        self._looked = now, samples, fetching
        read = samples - samples_then
        if read < TRIED_SAMPLES or now - at > 2 * TRIED_S:  # a pause ends in the next time
            self._is_new = True
            return
        if self._is_new:
            self._is_new = False
            return
        speed = read / (now - at)
        if self._before is not None:
            if speed < FASTER * self._before:
                self.part *= 2
                self._rests_until = now + self._rest_s
                self._rest_s = min(2 * self._rest_s, REST_MOST_S)
            self._before = None
        is_late = fetching - fetching_then > FETCHING_SHARE * read
        may_try = is_scarce and self.part > MOST_PART and now >= self._rests_until
        if is_late and may_try:
            self._before, self._is_new = speed, True
            self.part //= 2


class Lanes:
    """Of one mount's jobs; how far each batch was seen to be read is a mark of its `Job`."""

    def __init__(self, files: Files, ram: Ram, wires: Wires) -> None:
        self._files, self._ram, self._wires = files, ram, wires
        self.begin_again()

    def begin_again(self) -> None:
        """There are none yet, or none any more."""
        self.room = Room()
        self._looked_for: list[tuple[str, int]] = []  # jobs, and how often each has jumped

    def look(self, jobs: list[Job], is_scarce: bool, now: float) -> None:
        """How fast `jobs` are, for `Room.look`; of other ones, or elsewhere, it is found anew."""
        looked_for = [(job.name, job.progress.moves) for job in jobs]
        if looked_for != self._looked_for:
            self.begin_again()
            self._looked_for = looked_for
        fetching = sum(job.tally.late["fetching"] for job in jobs)
        self.room.look(sum(map(samples_read, jobs)), fetching, is_scarce, now)

    @staticmethod
    def has(job: Job) -> bool:
        """Whether its batches, and which of them are read together, are known, and few of an
        epoch's are.
        """
        progress = job.progress
        return progress.workers > 0 and job.batch_size > 1 and not progress.is_scattered

    @staticmethod
    def window_end(job: Job) -> int:
        """Where a window ends that covers all that may be read soon."""
        return job.sequence.last(job.window.begin + WINDOW_SHARE * job.progress.at_once)

    @staticmethod
    def see(job: Job, candidates: Positions, placed: Positions) -> None:
        """What the job's readers were seen to read; as `Progress.place` has it, but what was told
        late, and is used again soon, is not taken for that use.
        """
        low = job.progress.low
        is_late = ((candidates >= low - job.progress.slack) & (candidates < low)).any(axis=0)
        placed = placed[(placed >= 0) & ~is_late]
        job.reached.see(_starts(job, placed), placed)

    def unsent(self, job: Job) -> Inos:
        """Files to be staged, those that are needed first first."""
        inos = job.reached.held
        found: Inos = inos[self._files.flags[inos] & (HELD | SENT | STAGED | FAILED) == HELD]
        return found

    def hold(
        self, job: Job, others: list[Job], most_bytes: int, keep: Keep, most: int = LOOK_MOST
    ) -> None:
        """Keeps what is to stay of what the job's readers have passed, and lets go of the rest;
        holds what they need next, `most_bytes` of it at most, of `most` samples (at least one of
        each lane). `others`: all other jobs that have windows.
        """
        files, ram, reached = self._files, self._ram, job.reached
        reached.forget_before(job.window.begin - job.batch_size * (1 + job.progress.workers))
        positions = reached.take_passed(job.window.begin, job.window.end)
        passed = NO_INOS
        if len(positions):
            passed = np.unique(job.sequence.inos_at(positions))
            keep(passed)
        positions, lane = _coming(job, most)
        inos = job.sequence.inos_at(positions)
        flags, own = files.flags[inos], ram.bytes_of(inos)
        coming = (flags & (KEPT_IN_RAM | GONE) == 0) & (own > 0)
        chosen = np.flatnonzero(coming & (flags & STORED == 0))
        reached.note_missing(len(chosen) / max(1, len(inos)))
        chosen = chosen[np.argsort(_rank(lane[chosen]), kind="stable")]
        chosen = chosen[first_uses(inos[chosen])]
        chosen = chosen[: fits(own[chosen], most_bytes)]
        self._let_go(passed, inos[chosen], others)
        is_held = files.flags[inos[chosen]] & HELD != 0
        rest = self._rest(job, np.concatenate([passed, inos[chosen]]))
        left_bytes = most_bytes - int(own[chosen[is_held]].sum()) - ram.total_bytes(rest)
        if left_bytes < 0:  # it had more than is its share now
            count = takes(ram.bytes_of(rest[::-1]), -left_bytes)
            self._let_go(rest[-count:], NO_INOS, others)
            rest, left_bytes = rest[:-count], 0
        cost = np.where(is_held, 0, own[chosen])
        chosen = chosen[: fits(cost, min(left_bytes, ram.room_bytes))]
        ram.hold(inos[chosen])
        reached.hold(inos[chosen], rest)
        will_read = coming & (flags & (STORED | HELD) == STORED)
        self._wire(
            inos[chosen], positions[chosen], lane[chosen], positions[will_read], lane[will_read]
        )

    def _rest(self, job: Job, besides: Inos) -> Inos:
        """What was held for it, and still is, but for these; what is needed last comes last."""
        inos = np.concatenate([job.reached.rest, job.reached.held])
        is_held = self._files.flags[inos] & (HELD | KEPT_IN_RAM) == HELD
        inos = inos[is_held & (self._ram.refs[inos] > 0)]
        if len(inos) == 0:
            return NO_INOS
        inos = inos[first_uses(inos)]
        rest: Inos = inos[~np.isin(inos, besides)]
        return rest

    def _let_go(self, passed: Inos, needed: Inos, others: list[Job]) -> None:
        """Of what was passed what neither this window needs soon nor another one has."""
        passed = passed[self._files.flags[passed] & (HELD | KEPT_IN_RAM) == HELD]
        if len(passed) == 0:
            return
        passed = np.setdiff1d(passed, needed)
        for other in others if len(passed) else []:
            begin, end = other.window.begin, other.window.end
            uses = other.sequence.locate(passed, begin)
            is_there = (uses >= begin) & (uses < end)
            passed = passed[~is_there.any(axis=0)]
        self._ram.let_go(passed)

    def _wire(
        self, inos: Inos, where: Positions, lane: Positions, reads: Positions, of: Positions
    ) -> None:
        """Arms a file in the midst of what each lane holds, `inos` at `where`, unless READs, at
        `reads` in the lanes `of`, will tell before, or one is armed.
        """
        for number in np.unique(lane).tolist():
            ahead = np.flatnonzero(lane == number)
            ahead = ahead[: len(ahead) // 2 + 1]
            is_told = (reads[of == number] < where[ahead[-1]]).any()
            if not is_told and not (self._files.flags[inos[ahead]] & ARMED).any():
                self._wires.ask(inos[ahead[-1:]])


def _starts(job: Job, positions: Positions) -> Positions:
    """Where the batch of each begins."""
    of_epochs = job.sequence.starts_of(positions)
    starts: Positions = positions - (positions - of_epochs) % job.batch_size
    return starts


def _coming(job: Job, most: int) -> tuple[Positions, Positions]:
    """What the job's readers come to next in its window, the same number of positions of each
    lane, `most` of all; and the lane of each.
    """
    sequence, size, workers = job.sequence, job.batch_size, job.progress.workers
    begin, end, seen = job.window.begin, job.window.end, job.reached.seen
    left = [max(1, most // workers)] * workers
    parts, lanes, counts = [NO_POSITIONS], [0], [0]
    epoch, index = sequence.at(begin)
    epoch_start, epoch_stop = begin - index, sequence.start(epoch + 1)
    start = begin - index % size
    while start < end and any(left):
        if start == epoch_stop:
            epoch, epoch_start = epoch + 1, epoch_stop
            epoch_stop = sequence.start(epoch + 1)
        stop = min(start + size, epoch_stop)
        ahead = start + workers * size
        is_over = ahead in seen and ahead < epoch_stop
        lane = (start - epoch_start) // size % workers
        first = max(seen.get(start, start - 1) + 1, begin)
        count = min(stop, end, first + left[lane]) - first
        if count > 0 and not is_over:
            left[lane] -= count
            parts.append(np.arange(first, first + count))
            lanes.append(lane)
            counts.append(count)
        start = stop
    return np.concatenate(parts), np.repeat(lanes, counts)


def _rank(lane: Positions) -> Positions:
    """How many before it are in its lane."""
    order = np.argsort(lane, kind="stable")
    in_turn = lane[order]
    begins = np.flatnonzero(np.diff(in_turn, prepend=-1))
    rank = np.empty(len(lane), np.int64)
    lengths = np.diff(begins, append=len(lane))
    rank[order] = np.arange(len(lane)) - np.repeat(begins, lengths)
    return rank
