"""What the reader of a job has passed since a recording began (pure).

For `fusecache trace` (docs/TRACES.md): page-cache hits are invisible to the mount, but before `low`
(progress.py) all is read.

INVARIANT: positions told ascend; each stretch begins where the one before ended, but where the
reader was found at another place or an order is not known: it is not known what it has read there.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from hintsd.follow.progress import AT_END_S, Progress
from hintsd.follow.sequence import EpochOrder, Inos, Sequence

STRETCH_MOST: Final = 1 << 16  # samples


class Passed(NamedTuple):
    """A stretch of a job's sequence, within one epoch."""

    job: str
    position: int
    begin: int  # position of its epoch
    samples: int  # of its epoch
    inos: Inos  # 0: a sample outside the mount


class Trail:
    """One job's, of one recording. It begins at `high`: much of what is before was read before."""

    def __init__(self, job: str, sequence: Sequence, progress: Progress) -> None:
        self._job, self._sequence, self._progress = job, sequence, progress
        self._position = progress.high
        self._moves = progress.moves
        self._generation = sequence.generation
        self._lost_at: int | None = None  # where the reader was thought to be when it was lost
        # The sequence forgets an epoch that its window has left, which may be ahead of `low`. By
        # where it begins.
        self._orders: dict[int, EpochOrder] = {}

    def lose(self) -> None:
        """The reader's place is not known; what is told next begins where it is seen next."""
        self._lost_at = self._progress.low

    def follow(self, stop: int) -> list[Passed]:
        """What is read before position `stop` and was not told; nothing of an epoch whose order is
        not known.
        """
        progress = self._progress
        if self._lost_at is not None:
            if (self._lost_at, self._moves) == (progress.low, progress.moves):
                return []  # it was not found, only given up
            self._position, self._lost_at = progress.low, None
        elif self._moves != progress.moves:
            self._position = progress.moved_to
        self._moves = progress.moves
        sequence, found = self._sequence, []
        if self._generation != sequence.generation:
            self._generation = sequence.generation
            self._orders.clear()
        for epoch, order in sequence.orders.items():
            self._orders[sequence.start(epoch)] = order
        while self._position < stop:
            begin, samples, known = self._epoch_at(self._position)
            index = self._position - begin
            count = min(stop - self._position, samples - index, STRETCH_MOST)
            if known is not None:
                inos = known.inos[index : index + count]
                found.append(Passed(self._job, self._position, begin, samples, inos))
            self._position += count
        first = self._epoch_at(self._position)[0]
        self._orders = {begin: order for begin, order in self._orders.items() if begin >= first}
        return found

    def _epoch_at(self, position: int) -> tuple[int, int, EpochOrder | None]:
        """Where the epoch of this position begins, its samples, and its order, if that is known."""
        for begin, order in self._orders.items():
            if begin <= position < begin + len(order.inos):
                return begin, len(order.inos), order
        epoch, index = self._sequence.at(position)
        return position - index, self._sequence.length(epoch), None


class Followed(Protocol):
    """A job, as far as its trail goes."""

    name: str
    sequence: Sequence
    progress: Progress
    is_lost: bool


class Trails:
    """Those of one mount's jobs, while a recording runs."""

    def __init__(self) -> None:
        self.number = 0
        """The mount's number of the recording that runs; 0: none."""
        self._jobs: dict[str, Followed] = {}
        self._trails: dict[str, Trail] = {}
        self._passed: list[Passed] = []  # of jobs that were closed

    def open(self, job: Followed) -> None:
        """There is this job from now on."""
        self._jobs[job.name] = job
        if self.number:
            trail = self._trails[job.name] = Trail(job.name, job.sequence, job.progress)
            if job.is_lost:  # it may be found before a recording asks what it has passed
                trail.lose()

    def close(self, job: Followed) -> None:
        """There is it no more: no more is told of it than that it has read for sure."""
        self._passed += self._passed_of(job, job.progress.low)
        self._trails.pop(job.name, None)
        del self._jobs[job.name]

    def record(self, number: int) -> None:
        """The mount has this recording, or (0) none."""
        if number == self.number:
            return
        self.number = number
        self._passed.clear()
        self._trails.clear()
        for job in self._jobs.values():
            self.open(job)

    def passed(self, now: float) -> list[Passed]:
        """What readers have passed and was not told to the recording; before windows move on, for
        with them epochs are forgotten.
        """
        found, self._passed = self._passed, []
        for job in self._jobs.values():
            progress = job.progress
            is_at_end = job.sequence.at(progress.high)[1] == 0
            is_at_end = is_at_end and now - progress.confirmed_at > AT_END_S
            found += self._passed_of(job, progress.high if is_at_end else progress.low)
        return found

    def _passed_of(self, job: Followed, stop: int) -> list[Passed]:
        trail = self._trails.get(job.name)
        if trail is None:
            return []
        if job.is_lost:
            trail.lose()
            return []
        return trail.follow(job.sequence.last(stop))
