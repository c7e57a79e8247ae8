"""The planner of one mount, and what it is to be told, in the order in which it happened.

It joins what is pure (hintsd/plan, hintsd/follow) to threads and the clock.

INVARIANT: planner and readers are touched by one thread at a time, with `lock` held.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from fusecache.base import wire
from fusecache.base.wire import Observed
from hintsd.daemon.hinted_job import SHORT_EPOCH, HintedJob
from hintsd.daemon.messages import JobRefused
from hintsd.daemon.mount_link import Bytes, Done, Inos, MountFacts, Seen
from hintsd.follow.readers import OWN, Hinted, Readers, Whose
from hintsd.follow.trail import Passed
from hintsd.keeping import AUTO
from hintsd.orders.drawing import Order
from hintsd.plan.commands import Command
from hintsd.plan.planner import MountPlanner

PAUSE_LEAST_S: Final = 0.01  # after a decision: what comes meanwhile is taken in together
PAUSE_MOST_S: Final = 0.03
# Where readers are in no hurry, planning takes a tenth of a core: it is theirs.
PAUSE_SHARE, PAUSE_IDLE_MOST_S = 9, 0.1
# A step comes straight from the trainer: what was read before it must have been told first, or it
# would be taken for the next epoch's reads.
STEP_HELD_S: Final = 0.1
REPORT_EVERY_S: Final = 0.5
_PID_NAMESPACE: Final = wire.pid_namespace()

T = TypeVar("T")
Told: TypeAlias = Done | Seen | Callable[[], None]


def _new_planner(keep: str) -> MountPlanner:
    if keep == AUTO:
        return MountPlanner(0, 0)
    from hintsd.keeping.keeping import Keeping  # the laboratory's policies are many

    return MountPlanner(0, 0, Keeping(keep))


class Coming:
    """What will be announced in a moment: jobs that are being opened, orders that are computed."""

    def __init__(self) -> None:
        self.jobs: dict[str, Hinted] = {}
        """Their processes may read already."""
        self._orders = 0

    @contextmanager
    def job(self, name: str, hinted: Hinted) -> Iterator[None]:
        self.jobs[name] = hinted
        try:
            yield
        finally:
            del self.jobs[name]

    @contextmanager
    def order(self) -> Iterator[None]:
        self._orders += 1
        try:
            yield
        finally:
            self._orders -= 1

    @property
    def is_anything(self) -> bool:
        return bool(self.jobs) or self._orders > 0


class Decided(NamedTuple):
    commands: list[Command]
    recording: int
    passed: list[Passed]
    pause_s: float
    notices: list[tuple[str, str]]
    finished: list[HintedJob]
    wants_orders: bool


class Planning:
    """Of the mount that has these jobs. What is not async is for a thread, or the Director's."""

    def __init__(
        self,
        jobs: Mapping[str, HintedJob],
        coming: Coming,
        facts: Callable[[], MountFacts | None],
        keep: str = AUTO,
    ) -> None:
        """`facts`: what is known of the mount now. `keep`: whose rule says what stays."""
        self.lock = trio.Lock()
        self._keep = keep
        self.planner = _new_planner(keep)
        self._jobs, self._coming, self._facts = jobs, coming, facts
        self._readers = Readers()
        self._told: list[Told] = []  # for the planner, in its thread
        self._notices: list[tuple[str, str]] = []  # of the same thread
        self._steps: deque[tuple[float, Callable[[], None]]] = deque()  # when to tell them
        self._report_at = -math.inf

    # ---- the Director's thread -------------------------------------------------------------------

    def tell(self, *told: Told) -> None:
        """What has happened; it is taken in before the next decision."""
        self._told += told

    def step(self, name: str, epoch: int, batch: int) -> None:
        """The job's trainer has taken `batch` batches of `epoch`."""

        def step() -> None:
            job = self._jobs.get(name)
            if job is not None and job.is_planned:
                self.planner.followers.step(name, epoch, batch, clock())

        self._steps.append((clock() + STEP_HELD_S, step))

    @property
    def has_steps(self) -> bool:
        """Whether some are held."""
        return bool(self._steps)

    def _take_told(self, until: float) -> list[Told]:
        """With the steps that have been held long enough."""
        told, self._told = self._told, []
        while self._steps and self._steps[0][0] <= until:
            told.append(self._steps.popleft()[1])
        return told

    def begin_anew(self) -> None:
        """`lock` held. Inode numbers mean other files: nothing is known, no job is planned."""
        self.planner = _new_planner(self._keep)
        self._told.clear()
        for job in self._jobs.values():
            job.lose_files()

    async def in_thread(self, work: Callable[..., T], *args: object) -> T:
        """`lock` held."""
        return await trio.to_thread.run_sync(functools.partial(work, *args))

    async def decide(self, is_up: Callable[[], bool]) -> Decided | None:
        """Tell the planner what has happened, and let it decide if the mount hears of it. None:
        there is nothing to do.
        """
        due = self._take_told(clock())
        self._told = due
        if not is_up() and not due:
            return None
        async with self.lock:
            told, self._told = self._told, []
            with trio.CancelScope(shield=True):
                found = await self.in_thread(self._decide, told, is_up())
        return found

    async def learn(self, inos: Inos, sizes: npt.NDArray[np.uint64], where: Bytes) -> None:
        """`lock` held. As `MountPlanner.learn`."""
        await self.in_thread(self.planner.learn, inos, sizes, where)

    async def announce(self, job: HintedJob, order: Order, epoch: int, inos: Inos) -> None:
        """`lock` held: `inos` are read in `epoch`, and what `order` tells in those behind it."""
        job.announce(order, epoch)
        if job.is_planned:
            await self.in_thread(self.planner.announce, job.name, epoch, inos, clock())
        elif job.has_files and not job.fault:  # else it is planned once they are found
            await self.in_thread(self.plan, job, inos)

    async def score(self, job: HintedJob) -> None:
        """`lock` held: it has other scores."""
        if job.is_planned and job.scores is not None:
            await self.in_thread(self.planner.score, job.name, job.inos, job.scores)

    async def cached(self, name: str, *, staged: bool) -> tuple[int, bytes]:
        """How many samples the dataset of this job has, and which of them need no read of the
        origin (as `Files.are_cached`): a bit each, in each byte the first one lowest. JobRefused.
        """
        async with self.lock:
            job = self._jobs.get(name)
            if job is None or not job.has_files:
                raise JobRefused("its files are not known now")
            return job.samples, await self.in_thread(self._cached, job.inos, staged)

    def next_chunk(self, name: str, chunks: int, unread: list[int]) -> int:
        """Which of the unread chunks of so many this job reads next, by where the other jobs of its
        dataset are that have as many. JobRefused."""
        job = self._jobs.get(name)
        if job is None or not job.has_files:
            raise JobRefused("its files are not known now")
        return job.go_on(chunks, unread, [one for one in self._jobs.values() if one is not job])

    async def close(self, job: HintedJob) -> None:
        """`lock` held: with what was read last, and its last step."""
        if job.is_planned:
            await self.in_thread(self._unplan, job, self._take_told(math.inf))

    # ---- the planner's thread --------------------------------------------------------------------

    def plan(self, job: HintedJob, order: Inos | None) -> None:
        """A job for the planner, with its first epoch's order."""
        assert job.order is not None
        epoch, index = job.tidy_place()
        self.planner.open_job(
            job.name,
            samples_per_epoch=job.epoch_samples,
            epochs=job.hint.epochs,
            epoch=epoch,
            index=index,
            batch_size=job.order.spec.batch_size,
            workers=job.hint.workers,
            prefetch_factor=job.hint.prefetch_factor,
            dataset=job.inos,
            now=clock(),
            is_lost=job.is_lost,
            owner=job.uid,
        )
        job.plan()
        if job.scores is not None:
            self.planner.score(job.name, job.inos, job.scores)
        if order is not None:
            self.planner.supply(job.name, epoch, order)
        else:
            self.planner.unknown(job.name, epoch)

    def _cached(self, inos: Inos, staged: bool) -> bytes:
        found = self.planner.are_cached(inos, staged=staged)
        return np.packbits(found, bitorder="little").tobytes()

    def _unplan(self, job: HintedJob, told: list[Told]) -> None:
        self._take_in(told, clock())
        job.note(self.planner.status(job.name))
        self.planner.close_job(job.name)
        job.unplan()

    def _decide(self, told: list[Told], is_up: bool) -> Decided:
        now, planner = clock(), self.planner
        self._take_in(told, now)
        passed = planner.trails.passed(now) if is_up else []
        commands = planner.decide(now) if is_up else []
        finished, wants_orders = self._look(now)
        patience_s = planner.patience_s()
        share_s = PAUSE_SHARE * (clock() - now) if patience_s < math.inf else math.inf
        pause_most_s = max(PAUSE_MOST_S, min(share_s, PAUSE_IDLE_MOST_S))
        pause_s = min(max(patience_s, PAUSE_LEAST_S), pause_most_s)
        notices, self._notices = [*self._notices, *planner.followers.notices()], []
        return Decided(
            commands, planner.trails.number, passed, pause_s, notices, finished, wants_orders
        )

    def _look(self, now: float) -> tuple[list[HintedJob], bool]:
        """Which jobs are read now, and whether orders are wanted; notes figures when it is time."""
        planner, is_due = self.planner, now >= self._report_at
        if is_due:
            self._report_at = now + REPORT_EVERY_S
        finished, wants_orders = [], False
        for job in list(self._jobs.values()):
            if not job.is_planned:
                continue
            finishes = planner.finished(job.name) and not job.is_finished
            if finishes:
                finished.append(job)
            if is_due or finishes:
                job.note(planner.status(job.name))
            if is_due or job.epoch_samples < SHORT_EPOCH:
                wants_orders = wants_orders or bool(planner.wanted_epochs(job.name))
            wants_orders = wants_orders or planner.followers.is_sought(job.name, now)
        return finished, wants_orders

    def _take_in(self, told: list[Told], now: float) -> None:
        for is_event, part in itertools.groupby(told, lambda tell: isinstance(tell, Done | Seen)):
            if is_event:
                self._take_events(list(part), now)
            else:
                for tell in part:
                    assert callable(tell)
                    tell()

    def _take_events(self, events: list[Told], now: float) -> None:
        """All answers at once, then all observations: what numpy costs, it costs by the call."""
        done = [event for event in events if isinstance(event, Done)]
        seen = [event for event in events if isinstance(event, Seen)]
        if done:
            answered = np.concatenate([event.inos for event in done])
            self.planner.done(answered, np.concatenate([event.results for event in done]), now)
        if seen:
            inos = np.concatenate([event.inos for event in seen])
            kinds = np.concatenate([event.kinds for event in seen])
            processes = np.concatenate([event.processes for event in seen])
            parents = np.concatenate([event.parents for event in seen])
            whose = self._readers.whose(processes, parents, self._hinted(), now)
            self.planner.followers.observe(inos, kinds, now, whose, processes)
            self._look_for_unheard(inos, kinds & Observed.MASK != Observed.LOOKUP, whose, now)

    def _look_for_unheard(
        self,
        inos: Inos,
        reads: npt.NDArray[np.bool_],
        whose: Mapping[str, Whose],
        now: float,
    ) -> None:
        for job in self._jobs.values():
            if job.order is not None or job.name not in whose:
                continue
            own = inos[reads & (whose[job.name] == OWN)]
            told = self.planner.is_told(own)
            if said := job.hear(own, told, now, is_more_to_come=self._coming.is_anything):
                self._notices.append((job.name, said))

    def _hinted(self) -> dict[str, Hinted]:
        """Whose its jobs are, if process ids of the mount mean anything to us."""
        facts = self._facts()
        if facts is None or facts.pid_namespace != _PID_NAMESPACE or not _PID_NAMESPACE:
            return {}
        return self._coming.jobs | {job.name: job.hinted for job in self._jobs.values()}


def clock() -> float:
    """The planner's, for threads, too."""
    return time.monotonic()
