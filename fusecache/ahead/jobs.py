"""Files that are being fetched: each has left the queues, and is not reported yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import trio

from fusecache import _native
from fusecache.ahead.marks import Answers, mark, refusal
from fusecache.base.wire import Result, Standing
from fusecache.read.fetcher import Fetcher, Flight
from fusecache.store.types import Version
from fusecache.table import namespace

WAITING = -1


@dataclass(eq=False, slots=True)
class Job:
    """`push` and `stored`: None: not asked for (so far); WAITING; else the result."""

    ino: int
    store: bool
    plan: int  # number of the plan that wants it
    version: Version
    begun_s: float
    attempts: int
    flight: Flight | None = None  # ours, or a reader's that has landed
    push: int | None = None
    stored: int | None = None


class Jobs:
    """Of the one plan there is. Jobs of an ended one go on, and are not reported."""

    def __init__(
        self, fetcher: Fetcher, answers: Answers, push: Callable[[Job, memoryview], None]
    ) -> None:
        """`push(job, data)` has a file staged; `pushed` is called when that is done."""
        self._fetcher = fetcher
        self._answers = answers
        self._push = push
        self._jobs: dict[int, Job] = {}

    def __contains__(self, ino: object) -> bool:
        return ino in self._jobs

    def has_any(self, inos: set[int]) -> bool:
        return not self._jobs.keys().isdisjoint(inos)

    def is_current(self, job: Job) -> bool:
        return job.plan == self._answers.plan

    def clear(self) -> None:
        for job in self._jobs.values():
            self.land(job)
        self._jobs.clear()

    # ---- the life of one -------------------------------------------------------------------------

    def begin(self, ino: int, store: bool, attempts: int) -> Job:
        mark(ino, Standing.FLYING, Standing.QUEUED)
        version, now = namespace.version(ino), trio.current_time()
        job = self._jobs[ino] = Job(ino, store, self._answers.plan, version, now, attempts)
        return job

    def fly(self, job: Job) -> Flight | None:
        """It gets a flight of its own: it can be joined, and has a `flight` to be ended. Else
        somebody else's that brings the file.
        """
        flight, is_ours = self._fetcher.claim(job.ino)
        if not is_ours:
            return flight
        job.flight = flight
        flight.when_landed(partial(self._landed, job, flight))
        return None

    def store(self, ino: int) -> None:
        """A file that is being fetched is to be stored, too."""
        self._jobs[ino].store = True
        mark(ino, 0, Standing.QUEUED)

    def stage(self, ino: int) -> None:
        """A file that is being fetched is to be staged, too. While its bytes are not here this
        comes again, for then it is WANTED.
        """
        job = self._jobs[ino]
        mark(ino, 0, Standing.QUEUED)
        if job.push is None and job.flight is not None and job.flight.data is not None:
            job.push = WAITING
            self._push(job, job.flight.data)

    def brought(self, job: Job, flight: Flight) -> None:
        """A fetch of somebody else's has brought what is to be staged."""
        job.flight = flight
        job.stored = Result.STORED if flight.stored or flight.was_stored else None
        self.stage(job.ino)

    def arrived(self, job: Job, is_wanted: bool) -> None:
        """Its own fetch has brought it. `is_wanted`: to be staged."""
        job.stored = WAITING if job.flight is not None and job.flight.is_queued else None
        if is_wanted:
            self.stage(job.ino)
        else:
            self._end_if_done(job)

    def _landed(self, job: Job, flight: Flight) -> None:
        """Our flight can be joined no more: it is stored, or never will be."""
        if job.stored == WAITING and self.is_current(job):
            job.stored = Result.STORED if flight.stored else Result.NO_ROOM
            self._end_if_done(job)

    def pushed(self, job: Job, result: int) -> None:
        """`result`: _native.PUSHED and such."""
        job.push = result
        self._end_if_done(job)

    def queue_again(self, job: Job) -> None:
        """It goes back to a queue."""
        del self._jobs[job.ino]
        mark(job.ino, Standing.QUEUED, Standing.FLYING)

    # ---- its end ---------------------------------------------------------------------------------

    def _end_if_done(self, job: Job) -> None:
        if job.push == WAITING or job.stored == WAITING:
            return
        if job.push is None:
            # neither: it was dropped while it was on its way
            result = job.stored or Result.NOT_PUSHED
        elif job.push not in (_native.PUSHED, _native.PUSH_READ):
            result = refusal(job.ino)
        elif job.stored is None:
            result = Result.STAGED
        else:
            is_stored = job.stored == Result.STORED
            result = Result.STAGED_AND_STORED if is_stored else Result.NO_ROOM
        self.end(job, result)

    def land(self, job: Job) -> None:
        """Until its file is pushed, a reader's miss joins the flight that has brought it."""
        if job.flight is not None:
            self._fetcher.land(job.ino, job.flight)

    def end(self, job: Job, result: int) -> None:
        self.land(job)
        if self._jobs.get(job.ino) is job:
            del self._jobs[job.ino]
        mark(job.ino, 0, Standing.FLYING)
        self._answers.tell(job.ino, result)
