"""The Director: one task a mount, which turns jobs into orders, orders into a plan, and the plan
into commands for the mount's server (docs/HINTS.md).

It joins what is pure (orders.py, folders.py, planner.py) to what is outside: the mount's link,
threads, the clock. What a client may say is messages.py's and server.py's.

INVARIANT: planner and readers are touched by one thread at a time, with `_Mount._planning` held.
INVARIANT: commands of a plan go only to the channel that was up when they were decided.
INVARIANT: a mount without jobs is left alone: its link ends IDLE_S after the last one.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from fusecache import mounts, wire
from hintsd import folders, search, status, unheard
from hintsd.commands import Command
from hintsd.folders import DatasetError, Samples
from hintsd.messages import Check, JobRequest
from hintsd.mount_link import (
    Bytes,
    Channel,
    Done,
    Down,
    Event,
    Gone,
    Inos,
    LinkDown,
    LinkTree,
    MountFacts,
    MountLink,
    Seen,
    State,
    Up,
    relative,
)
from hintsd.orders import (
    NoTorch,
    Order,
    OrderLost,
    OrderSpec,
    OrderTooFar,
    OrderUnknown,
    epochs_at_once,
    needs_torch,
    samples_per_epoch,
)
from hintsd.own_log import internal_error
from hintsd.planner import SEEN_LOOKUP, SEEN_MASK, MountPlanner
from hintsd.readers import OWN, Hinted, Readers, Standings
from hintsd.torch_process import TorchProcess
from hintsd.trail import Passed
from hintsd.unheard import Unheard

log = logging.getLogger(__name__)

EPOCH_SAMPLES_LEAST: Final = 1 << 24  # an epoch may always be so long, and longer ...
EPOCH_REPEATS_MOST: Final = 4  # ... as long as each file comes so often on average
DECIDE_EVERY_S: Final = 0.2
PAUSE_LEAST_S: Final = 0.01  # after a decision: what comes meanwhile is taken in together
PAUSE_MOST_S: Final = 0.03
# Where readers are in no hurry, planning takes a tenth of a core: it is theirs.
PAUSE_SHARE, PAUSE_IDLE_MOST_S = 9, 0.1
# A step comes straight from the trainer: what was read before it must have been told first, or it
# would be taken for the next epoch's reads.
STEP_HELD_S: Final = 0.1
REPORT_EVERY_S: Final = 0.5
POSITION_EVERY_S: Final = 1.0
IDLE_S: Final = 3.0
CONNECT_TIMEOUT_S: Final = 30.0
LOOK_TIMEOUT_S: Final = 30.0
EVENTS_MOST: Final = 256
ORDERS_AT_ONCE: Final = 2
RESOLVING_AT_ONCE: Final = 4
RATE_SMOOTHING: Final = 0.3
SHORT_EPOCH: Final = 1 << 18  # samples; a longer one is not read in REPORT_EVERY_S
_PID_NAMESPACE: Final = wire.pid_namespace()
_SHOWN_STATE: Final = (
    *("ram_bytes", "ram_limit_bytes", "ssd_bytes", "ssd_limit_bytes", "ssd_room_bytes"),
    "ssd_disk_full",
    *("origin_bytes", "origin_files", "origin_bytes_per_s", "depth", "queued_stage"),
    *("queued_fetch", "in_flight", "changes_seen", "segments_lost"),
    *("packing", "log_written_bytes", "log_waiting_bytes", "log_segments"),
)
_UNPLANNED: Final = {
    **{"state": "waiting", "reason": "", "window_bytes": 0, "ahead_bytes": 0},
    **{"predicted_stall_s": 0.0, "samples_per_s": 0.0},
}
"""Of a job that was read before its mount went."""
PACKING_REFUSED: Final = {
    2: "no room on SSD for a log",
    4: "too little room on SSD for a log",
}
"""`packing` of a state, when what was announced is not open (docs/WIRE.md)."""
_SILENT: Final = "no epoch's order was announced yet"

T = TypeVar("T")
Told: TypeAlias = Done | Seen | Callable[[], None]


class JobRefused(Exception):
    """One line for the user."""


class NotHere(JobRefused):
    """This hintsd cannot compute the order; one with torch could."""


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What a client is told of its job."""

    mountpoint: str
    samples_per_epoch: int
    warnings: list[str]


@dataclass(eq=False, slots=True)
class _Job:
    name: str
    request: JobRequest
    root: bytes
    """The dataset's directory relative to its mount."""
    begun_s: float
    place: tuple[int, int]
    """(epoch, index) to begin at, and then the latest known."""
    is_lost: bool = False
    """Its reader may have gone on from there."""
    samples: int = 0
    inos: Inos = field(default_factory=lambda: np.empty(0, np.uint32))
    order: Order | None = None
    """None: each epoch is announced, and none has been."""
    known_from: int = 0
    """The first epoch that `order` is asked for."""
    epoch_samples: int = 0
    is_planned: bool = False  # the planner knows it
    is_finished: bool = False
    is_warned: bool = False  # that the origin has changed
    fault: str = ""  # why it is not planned any more
    refused: str = ""  # why an order was refused, while there is no other one
    unheard: Unheard = field(default_factory=Unheard)
    reported_s: float = -math.inf
    reported: tuple[int, int] | None = None
    status: dict[str, Any] = field(default_factory=dict)


class Director:
    """The jobs of all mounts. Its methods belong to the trio task that runs it."""

    def __init__(
        self,
        *,
        ram_bytes: int | None = None,
        on_position: Callable[[str, int, int], None] | None = None,
        on_notice: Callable[[str, str], None] | None = None,
        on_finished: Callable[[str], None] | None = None,
    ) -> None:
        """`ram_bytes`: most that all mounts together hold for jobs; None: what each mount may.
        `on_position(job, epoch, index)`, at most once a second each; `on_notice(job, line)`;
        `on_finished(job)`, once, when all its epochs are read. None of them may open or close jobs.
        """
        self.ram_bytes = ram_bytes
        self._on_position = on_position or (lambda job, epoch, index: None)
        self._on_notice = on_notice or (lambda job, line: None)
        self._on_finished = on_finished or (lambda job: None)
        self._mounts: dict[str, _Mount] = {}
        self._mount_of: dict[str, _Mount] = {}  # by job
        self._ordering = trio.CapacityLimiter(ORDERS_AT_ONCE)
        self._far = trio.CapacityLimiter(1)
        self._resolving = trio.CapacityLimiter(RESOLVING_AT_ONCE)
        self.torch = TorchProcess()
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the links to the mounts, and the process that draws; until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.torch.end()

    async def open_job(
        self, job: str, request: JobRequest, *, resume_at: tuple[int, int] | None = None
    ) -> JobInfo:
        """Plan a job from its start, or from (epoch, index) `resume_at` on. JobRefused."""
        assert job not in self._mount_of, "job names are unique"
        mountpoint, root = await _locate(request.path)
        with self._user_of(mountpoint) as mount:
            info = await mount.open_job(job, request, root, resume_at)
            self._mount_of[job] = mount
        return info

    async def order(self, job: str, epoch: int, spec: OrderSpec) -> None:
        """The order of `epoch`, and of those behind it as far as the spec tells. JobRefused."""
        mount = self._mount_of.get(job)
        if mount is None:
            raise JobRefused(f"there is no job {job}")
        await mount.order(job, epoch, spec)

    def step(self, job: str, epoch: int, batch: int) -> None:
        """The trainer has taken `batch` batches of `epoch`."""
        mount = self._mount_of.get(job)
        if mount is not None:
            mount.step(job, epoch, batch)

    async def close_job(self, job: str) -> dict[str, Any]:
        """Its plan is taken back; its last status. A job that is unknown: {}."""
        mount = self._mount_of.pop(job, None)
        return {} if mount is None else await mount.close_job(job)

    def finished(self, job: str) -> bool:
        """All its epochs are read."""
        mount = self._mount_of.get(job)
        return mount is not None and mount.jobs[job].is_finished

    def status(self) -> dict[str, Any]:
        """{"mounts": […], "jobs": […]}, as JSON has it; at most REPORT_EVERY_S old."""
        shown = dict.fromkeys([*self._mounts.values(), *self._mount_of.values()])
        return {
            "mounts": [mount.status() for mount in shown],
            "jobs": [status for mount in shown for status in mount.job_statuses()],
        }

    @contextmanager
    def _user_of(self, mountpoint: str) -> Iterator[_Mount]:
        """The mount's task, which stays as long as it is used here or has jobs."""
        assert self._nursery is not None, "the Director runs"
        mount = self._mounts.get(mountpoint)
        if mount is None:
            mount = self._mounts[mountpoint] = _Mount(self, mountpoint)
            self._nursery.start_soon(self._run_mount, mount)
        mount.users += 1
        try:
            yield mount
        finally:
            mount.users -= 1

    async def _run_mount(self, mount: _Mount) -> None:
        try:
            await mount.run()
        except Exception:
            log.exception("%s: a fault in its plan", mount.mountpoint)
            self.forget(mount)
            mount.fail()
        finally:
            self.forget(mount)

    def forget(self, mount: _Mount) -> None:
        """A job that comes now begins with a new task."""
        if self._mounts.get(mount.mountpoint) is mount:
            del self._mounts[mount.mountpoint]

    # ---- for the mounts --------------------------------------------------------------------------

    def _peers(self, mount: _Mount) -> list[_Mount]:
        """The mounts with jobs, this one among them."""
        peers = [peer for peer in self._mounts.values() if peer.takes_share]
        return peers if mount in peers else [*peers, mount]

    def sharers(self, mount: _Mount) -> int:
        """How many of them are on its cache directory."""
        assert mount.facts is not None
        cache_dir = mount.facts.cache_dir
        return sum(
            peer.facts is not None and peer.facts.cache_dir == cache_dir
            for peer in self._peers(mount)
        )

    def budgets(self, mount: _Mount) -> tuple[int, int]:
        """Bytes of RAM for a mount's jobs, and of SSD beyond what is stored."""
        peers = self._peers(mount)
        assert mount.facts is not None
        ram_bytes = mount.facts.ram_bytes
        total_bytes = sum(peer.facts.ram_bytes for peer in peers if peer.facts is not None)
        if self.ram_bytes is not None and total_bytes > self.ram_bytes:
            ram_bytes = self.ram_bytes * ram_bytes // total_bytes
        return ram_bytes, mount.state.get("ssd_room_bytes", 0) // self.sharers(mount)

    async def in_order_thread(self, work: Callable[[], T]) -> T:
        """Of an epoch: others wait for the thread. Who is cancelled does not."""
        return await trio.to_thread.run_sync(work, limiter=self._ordering, abandon_on_cancel=True)

    async def in_far_thread(self, work: Callable[[], T]) -> T:
        """As `in_order_thread`, for a part of what is drawn to come to an epoch: who wants that
        waits for his like, and nobody else does.
        """
        return await trio.to_thread.run_sync(work, limiter=self._far, abandon_on_cancel=True)

    async def in_resolving_thread(self, work: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(work, limiter=self._resolving)

    def tell_position(self, job: str, epoch: int, index: int) -> None:
        self._on_position(job, epoch, index)

    def tell_notice(self, job: str, line: str) -> None:
        self._on_notice(job, line)

    def tell_finished(self, job: str) -> None:
        self._on_finished(job)


class _Decided(NamedTuple):
    commands: list[Command]
    recording: int
    passed: list[Passed]
    pause_s: float
    notices: list[tuple[str, str]]
    finished: list[_Job]
    wants_orders: bool


class _Mount:
    """One mount: its link, its planner and its jobs."""

    def __init__(self, director: Director, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.jobs: dict[str, _Job] = {}
        self._opening: dict[str, Hinted] = {}  # jobs to be, whose processes may read already
        self._ordering = 0  # orders that are being computed
        self.users = 0  # that open jobs
        self.facts: MountFacts | None = None
        self.state: dict[str, int] = {}
        self._director = director
        self._send_event, self._events = trio.open_memory_channel[Event](EVENTS_MOST)
        self._link = MountLink(mountpoint, self._send_event)
        self._planner = MountPlanner(0, 0)
        self._readers = Readers()
        self._planning = trio.Lock()
        self._told: list[Told] = []  # for the planner, in its thread
        self._unheard: list[tuple[str, str]] = []  # notices, of the same thread
        self._steps: deque[tuple[float, Callable[[], None]]] = deque()  # when to tell them
        self._channel: Channel | None = None
        self._woken = trio.Event()
        self._orders_wanted = trio.Event()
        self._changes_seen: int | None = None
        self._is_gone = False  # not mounted any more
        self._lost = 0
        self._origin_bytes_per_s = 0.0
        self._report_at = -math.inf
        self._left_at: float | None = None
        self._has_failed = False
        self._nursery: trio.Nursery  # set by `run`

    @property
    def takes_share(self) -> bool:
        """Whether its jobs have a part of what all mounts share."""
        return self.facts is not None and bool(self.jobs) and not self._is_gone

    async def run(self) -> None:
        """Until there are no jobs any more, or cancelled."""
        async with trio.open_nursery() as self._nursery:
            for task in (self._link.run, self._take_events, self._supply):
                self._nursery.start_soon(task)
            while not self._is_left():
                with trio.move_on_after(STEP_HELD_S if self._steps else DECIDE_EVERY_S):
                    await self._woken.wait()
                self._woken = trio.Event()
                await self._advance()
                await trio.sleep(self._link.gather_s)
            self._director.forget(self)
            self._nursery.cancel_scope.cancel()

    def fail(self) -> None:
        """Its task has ended with a fault: jobs stay, unplanned, until they are closed."""
        self._channel, self._has_failed = None, True
        for job in self.jobs.values():
            self._give_up(job, internal_error())

    def _give_up(self, job: _Job, fault: str) -> None:
        job.is_planned, job.fault = False, fault
        job.status = {**job.status, "state": "wrong", "reason": fault}
        self._director.tell_notice(job.name, fault)

    def _is_left(self) -> bool:
        if self.jobs or self.users:
            self._left_at = None
        elif self._left_at is None:
            self._left_at = trio.current_time()
        return self._left_at is not None and trio.current_time() - self._left_at > IDLE_S

    # ---- jobs ------------------------------------------------------------------------------------

    async def open_job(
        self, name: str, request: JobRequest, root: bytes, resume_at: tuple[int, int] | None
    ) -> JobInfo:
        self._opening[name] = Hinted(request.pid, root)
        try:
            return await self._open_job(name, request, root, resume_at)
        finally:
            del self._opening[name]

    async def _open_job(
        self, name: str, request: JobRequest, root: bytes, resume_at: tuple[int, int] | None
    ) -> JobInfo:
        while True:
            channel = await self._connected(request)
            if request.spec is not None and needs_torch(request.spec):
                await trio.to_thread.run_sync(self._director.torch.begin)  # while files are listed
            place = resume_at or (request.start_epoch, 0)
            job = _Job(name, request, root, time.monotonic(), place, resume_at is not None)
            samples, stored, warnings = await self._resolve(job, request.check)
            job.samples, job.inos = len(samples), samples.inos
            job.epoch_samples = job.samples
            spec, inos = request.spec_over(job.samples), None
            if spec is not None:
                job.epoch_samples = self._samples_of(spec, job)
                if resume_at is None:
                    batches = -(-job.epoch_samples // spec.batch_size)
                    if request.start_batch > batches:
                        raise JobRefused(
                            f"start_batch {request.start_batch} lies beyond the epoch's "
                            f"{batches} batches"
                        )
                    job.place = request.start_epoch, request.start_batch * spec.batch_size
                if spec.length < job.samples and spec.sampler in ("sequential", "random"):
                    warnings.append(f"the order is of {spec.length} of the {job.samples} samples")
                job.order = Order(spec, self._director.torch)
                inos = await self._sequence(job.inos, job.order, self._tidy_place(job)[0])
            # From here on the planner knows a job that we know.
            with trio.CancelScope(shield=True):
                async with self._planning:
                    if self._link.identity not in (None, channel.facts.identity):
                        continue  # mounted anew meanwhile
                    self._assert_sound()
                    self.facts = self.facts or channel.facts
                    learn = functools.partial(
                        self._planner.learn, samples.inos, samples.sizes, stored
                    )
                    await trio.to_thread.run_sync(learn)
                    self.jobs[name] = job
                    if spec is not None:
                        await trio.to_thread.run_sync(self._plan_job, job, inos)
            self._wake(orders=True)
            return JobInfo(self.mountpoint, job.epoch_samples, warnings)

    async def _connected(self, request: JobRequest) -> Channel:
        try:
            channel = await self._link.channel(CONNECT_TIMEOUT_S)
        except LinkDown as down:
            raise JobRefused(f"{self.mountpoint} {down}") from None
        if channel.facts.mountpoint != self.mountpoint:
            raise JobRefused(
                f"{os.fsdecode(request.path)} is in a bind mount of {channel.facts.mountpoint}: "
                "name it as it is called there"
            )
        return channel

    def _assert_sound(self) -> None:
        if self._has_failed:
            raise JobRefused(internal_error())

    def _samples_of(self, spec: OrderSpec, job: _Job) -> int:
        """Samples an epoch. JobRefused: not an order of this dataset."""
        if spec.length > job.samples:
            raise JobRefused(
                f"the order is of {spec.length} samples, but {os.fsdecode(job.request.path)} has "
                f"{job.samples}"
            )
        count = samples_per_epoch(spec)
        if count == 0:
            raise JobRefused("the order has no samples: a batch is larger than the dataset")
        if count > max(EPOCH_SAMPLES_LEAST, EPOCH_REPEATS_MOST * job.samples):
            raise JobRefused(
                f"an epoch of {count} samples of {job.samples} files is too long to plan"
            )
        return count

    def _tidy_place(self, job: _Job) -> tuple[int, int]:
        epoch, index = job.place
        place = epoch + index // job.epoch_samples, index % job.epoch_samples
        epochs = job.request.epochs
        return place if epochs is None else min(place, (epochs, 0))

    def _plan_job(self, job: _Job, order: Inos | None) -> None:
        """In a thread, `_planning` held: a job for the planner, with its first epoch's order."""
        assert job.order is not None
        epoch, index = self._tidy_place(job)
        self._planner.open_job(
            job.name,
            samples_per_epoch=job.epoch_samples,
            epochs=job.request.epochs,
            epoch=epoch,
            index=index,
            batch_size=job.order.spec.batch_size,
            workers=job.request.workers,
            prefetch_factor=job.request.prefetch_factor,
            dataset=job.inos,
            now=_now(),
            is_lost=job.is_lost,
        )
        job.is_planned = True
        if order is not None:
            self._planner.supply(job.name, epoch, order)
        else:
            self._planner.unknown(job.name, epoch)

    def _unplan(self, job: _Job, told: list[Told]) -> None:
        """In a thread, `_planning` held."""
        self._take_in(told, _now())
        job.status = self._planner.status(job.name)
        self._planner.close_job(job.name)
        job.is_planned = False

    async def order(self, name: str, epoch: int, spec: OrderSpec) -> None:
        job = self.jobs.get(name)
        if job is None:
            raise JobRefused(f"job {name} has ended")
        self._ordering += 1
        try:
            count, order = self._samples_of(spec, job), Order(spec, self._director.torch)
            inos = await self._sequence(job.inos, order, epoch)
            if inos is None:
                raise JobRefused(f"the order does not tell epoch {epoch}")
        except JobRefused as refusal:
            job.refused = f"an order was refused: {refusal}"
            raise
        finally:
            self._ordering -= 1
        with trio.CancelScope(shield=True):
            async with self._planning:
                if self.jobs.get(name) is not job:
                    raise JobRefused(f"job {name} has ended")
                self._assert_sound()
                is_first = job.order is None
                if job.is_planned and count != job.epoch_samples:
                    self._planner.close_job(name)  # epochs of another length: planned anew
                    job.is_planned = False
                job.order, job.known_from, job.epoch_samples = order, epoch, count
                if is_first:
                    job.status, job.refused = {}, ""
                if job.is_planned:
                    announce = functools.partial(self._planner.announce, name, epoch, inos, _now())
                    await trio.to_thread.run_sync(announce)
                elif not job.fault:
                    if job.place[0] != epoch:
                        job.place = epoch, 0
                    elif is_first and job.place[1] == 0:
                        job.place = epoch, job.request.start_batch * spec.batch_size
                    await trio.to_thread.run_sync(self._plan_job, job, inos)
        self._wake(orders=True)

    def step(self, name: str, epoch: int, batch: int) -> None:
        def step() -> None:
            job = self.jobs.get(name)
            if job is not None and job.is_planned:
                self._planner.step(name, epoch, batch, _now())

        if not self._has_failed:
            self._steps.append((_now() + STEP_HELD_S, step))
        self._wake()

    def _due(self, now: float) -> list[Told]:
        """Steps that have been held long enough."""
        due: list[Told] = []
        while self._steps and self._steps[0][0] <= now:
            due.append(self._steps.popleft()[1])
        return due

    async def close_job(self, name: str) -> dict[str, Any]:
        with trio.CancelScope(shield=True):
            async with self._planning:
                job = self.jobs[name]
                try:
                    if job.is_planned:
                        # what was read last, its last step
                        told, self._told = self._told + self._due(math.inf), []
                        await trio.to_thread.run_sync(self._unplan, job, told)
                finally:
                    del self.jobs[name]
        self._wake()
        return self._job_status(job)

    def _wake(self, *, orders: bool = False) -> None:
        self._woken.set()
        if orders:
            self._orders_wanted.set()

    # ---- datasets --------------------------------------------------------------------------------

    async def _resolve(self, job: _Job, check: Check | None) -> tuple[Samples, Bytes, list[str]]:
        """A job's files, which of them are stored, and what its user should know. JobRefused."""
        request, shown = job.request, os.fsdecode(job.request.path)

        def resolve(nursery: trio.Nursery) -> tuple[Samples, Bytes]:
            if request.paths is None:
                tree = LinkTree(self._link, job.root, nursery)
                samples = folders.sample_files(
                    tree, request.extensions, allow_empty=request.allow_empty
                )
            else:
                directories = dict.fromkeys(path.rpartition(b"/")[0] for path in request.paths)
                tree = LinkTree(self._link, job.root, nursery, directories)
                samples = folders.explicit_files(tree, request.paths)
            if check is not None:
                _check(tree, samples, check)
            return samples, tree.stored(samples.inos)

        fault: Exception | None = None
        async with trio.open_nursery() as nursery:
            try:
                found, stored = await self._director.in_resolving_thread(
                    functools.partial(resolve, nursery)
                )
            except (DatasetError, JobRefused, OSError) as error:
                fault = error
            nursery.cancel_scope.cancel()  # what was listed ahead in vain
        if isinstance(fault, OSError):
            name = f" ({fault.filename})" if fault.filename else ""
            raise JobRefused(f"{shown} cannot be listed: {fault.strerror}{name}")
        if fault is not None:
            raise JobRefused(f"{shown}: {fault}")
        if len(found) == 0:
            raise JobRefused(f"{shown}: there are no samples")
        warnings = []
        outside = int(np.count_nonzero(found.inos == 0))
        if outside:
            warnings.append(f"{outside} of {len(found)} samples lie outside the mount")
        if found.splits and check is None:
            names = ", ".join(os.fsdecode(name) for name in found.splits[: folders.NAMED_MOST])
            warnings.append(
                f"the classes {names} of {shown} hold no files but directories: is the dataset "
                f"{os.path.join(shown, os.fsdecode(found.splits[0]))}?"
            )
        if self.facts is not None and self.facts.ram_bytes == 0:
            warnings.append(f"{self.mountpoint} has no RAM budget: files are only put on SSD")
        return found, stored, warnings

    async def _sequence(self, inos: Inos, order: Order, epoch: int) -> Inos | None:
        """The files `inos` as they come in one epoch; None: that is not known. JobRefused.

        May take minutes: not to be waited for with `_planning` held.
        """

        def compute() -> Inos:
            sequence = order.sequence(epoch)
            found: Inos = inos[sequence]
            return found

        try:
            await self._approach(order, epoch)
            return await self._director.in_order_thread(compute)
        except NoTorch as error:
            raise NotHere(str(error)) from None
        except OrderLost as error:
            raise JobRefused(f"the order of epoch {epoch} cannot be computed: {error}") from None
        except OrderUnknown:
            return None
        except (ValueError, IndexError, MemoryError) as error:
            raise JobRefused(f"the order of epoch {epoch} cannot be computed: {error}") from None

    async def _approach(self, order: Order, epoch: int) -> None:
        """Until `order` tells this epoch at the cost of one. As `Order.approach` raises."""
        while not await self._director.in_far_thread(functools.partial(order.approach, epoch)):
            pass

    async def _supply(self) -> None:
        """Give the planner the orders that it wants; no job waits for another one's."""
        supplying: dict[str, bool] = {}  # whether to look again

        async def supply(name: str) -> None:
            while supplying.pop(name):
                supplying[name] = False
                await self._seek(name)
                await self._supply_job(name)

        while True:
            await self._orders_wanted.wait()
            self._orders_wanted = trio.Event()
            for name in self.jobs:
                if name not in supplying:
                    self._nursery.start_soon(supply, name)
                supplying[name] = True

    async def _supply_job(self, name: str) -> None:
        while True:
            job = self.jobs.get(name)
            if job is None or not job.is_planned:
                return
            async with self._planning:
                wanted = await self._wanted(job)  # none, if it was closed meanwhile
            if not wanted:
                return
            epoch, order, inos = wanted[0], job.order, None
            assert order is not None
            try:
                if epoch >= job.known_from:
                    inos = await self._sequence(job.inos, order, epoch)
            except JobRefused as refusal:
                self._director.tell_notice(name, str(refusal))
            async with self._planning:
                if self.jobs.get(name) is not job or not job.is_planned:
                    return
                if job.order is not order:
                    continue  # another one was announced meanwhile
                if inos is None:
                    self._planner.unknown(name, epoch)
                else:
                    supply = functools.partial(self._planner.supply, name, epoch, inos)
                    with trio.CancelScope(shield=True):
                        await trio.to_thread.run_sync(supply)
            self._wake()

    async def _seek(self, name: str) -> None:
        """Look through the epochs to come for a reader whose place is not known."""
        async with self._planning:
            job = self.jobs.get(name)
            if job is None or not job.is_planned or not self._planner.is_sought(name, _now()):
                return
            order, planner = job.order, self._planner
            seen, epochs = await trio.to_thread.run_sync(planner.sought, name)
        assert order is not None
        ahead = order.copy()  # `order` stays where it is

        def order_of(epoch: int) -> Inos | None:
            with suppress(OrderUnknown):
                return job.inos[ahead.sequence(epoch)] if epoch >= job.known_from else None
            return None

        def walk(epochs: list[int]) -> search.Place | None:
            with suppress(OrderUnknown):
                ahead.draw_ahead(epochs)
            return search.walk(seen, epochs, order_of)

        place, at_once = None, epochs_at_once(job.epoch_samples)
        for start in range(0, len(epochs), at_once):
            some = epochs[start : start + at_once]
            try:
                await self._approach(ahead, some[0])
            except (OrderUnknown, OrderTooFar):
                continue
            place = await self._director.in_far_thread(functools.partial(walk, some))
            if place is not None:
                break
        async with self._planning:
            if self.jobs.get(name) is job and job.is_planned and job.order is order:
                await trio.to_thread.run_sync(planner.found, name, place, _now())
        self._wake()

    async def _wanted(self, job: _Job) -> list[int]:
        if not job.is_planned:
            return []
        return await trio.to_thread.run_sync(self._planner.wanted_epochs, job.name)

    # ---- what the mount says ---------------------------------------------------------------------

    async def _take_events(self) -> None:
        async for event in self._events:
            if isinstance(event, Up):
                await self._come_up(event.channel)
            elif isinstance(event, Down):
                self._channel = None
            elif isinstance(event, Gone):
                self._is_gone, self.state = True, {}
                for name in self.jobs:
                    self._director.tell_notice(name, f"{self.mountpoint} is not mounted any more")
            elif isinstance(event, State):
                self._take_state(event)
            elif isinstance(event, Seen):
                self._lost += event.lost
                self._told.append(event)
            else:
                assert isinstance(event, Done)
                self._told.append(event)
            self._wake()

    async def _come_up(self, channel: Channel) -> None:
        """A server is there: what was sent to another one is void."""
        is_other = self.facts is not None and self.facts.identity != channel.facts.identity
        self.facts, self._changes_seen = channel.facts, None
        self._channel, self._is_gone = channel, False
        if not is_other:
            self._told += [self._planner.disconnected, self._layout_of(channel.facts)]
            return
        # Mounted anew: inode numbers mean other files.
        async with self._planning:
            planner = self._planner = MountPlanner(0, 0)
            self._told = [self._layout_of(channel.facts)]
            for job in self.jobs.values():
                job.is_planned = False
                self._nursery.start_soon(self._plan_anew, job, planner)

    def _layout_of(self, facts: MountFacts) -> Callable[[], None]:
        return functools.partial(self._planner.set_layout, facts.layout, facts.probe)

    async def _plan_anew(self, job: _Job, planner: MountPlanner) -> None:
        inos: Inos | None = None
        try:
            samples, stored, _ = await self._resolve(job, None)
            if len(samples) != job.samples:
                raise JobRefused(f"it had {job.samples} samples, and has {len(samples)} now")
        except JobRefused as refusal:
            if self._planner is planner and self.jobs.get(job.name) is job:
                self._give_up(job, f"{self.mountpoint} was mounted anew: {refusal}")
            return
        while True:
            order, epoch, inos = job.order, self._tidy_place(job)[0], None
            if order is not None and epoch >= job.known_from:
                try:
                    inos = await self._sequence(samples.inos, order, epoch)
                except JobRefused as refusal:
                    self._director.tell_notice(job.name, str(refusal))
            with trio.CancelScope(shield=True):
                async with self._planning:
                    if self._planner is not planner or self.jobs.get(job.name) is not job:
                        return
                    if (job.order, self._tidy_place(job)[0]) != (order, epoch):
                        continue  # another one was announced meanwhile
                    job.inos = samples.inos
                    learn = functools.partial(planner.learn, samples.inos, samples.sizes, stored)
                    await trio.to_thread.run_sync(learn)
                    if order is not None:
                        job.is_lost = True
                        await trio.to_thread.run_sync(self._plan_job, job, inos)
            break
        self._wake(orders=True)

    def _take_state(self, state: State) -> None:
        self.state = values = state.values
        ram_bytes, room_bytes = self._director.budgets(self)
        busy = values["queued_stage"] + values["queued_fetch"] + values["in_flight"] > 0
        if busy and values["origin_bytes_per_s"]:
            before = self._origin_bytes_per_s or values["origin_bytes_per_s"]
            self._origin_bytes_per_s = before + RATE_SMOOTHING * (
                values["origin_bytes_per_s"] - before
            )
        self._told.append(functools.partial(self._planner.set_budgets, ram_bytes, room_bytes))
        knows_pins = self.facts is not None and self.facts.knows_pins
        is_alone = self._director.sharers(self) == 1
        set_pins = functools.partial(
            self._planner.set_pins, knows_pins, values["pins"], others_may_go=is_alone
        )
        self._told.append(set_pins)
        self._told.append(functools.partial(self._planner.record, values["recording"]))
        self._told.append(functools.partial(self._planner.rates, self._origin_bytes_per_s, 0.0))
        if state.probe is not None and self.facts is not None:
            self.facts = self.facts._replace(probe=state.probe)
            self._told.append(self._layout_of(self.facts))
        if (why := PACKING_REFUSED.get(values.get("packing", 0))) is not None:
            refuse = functools.partial(self._planner.packing_refused, why)
            self._told.append(lambda: refuse(_now()))
        if self._changes_seen is not None and values["changes_seen"] > self._changes_seen:
            for job in self.jobs.values():
                if not job.is_warned:
                    job.is_warned = True
                    self._director.tell_notice(
                        job.name,
                        f"files below {self.mountpoint} have changed at the origin: if the dataset "
                        "has, its order is not what was hinted",
                    )
        self._changes_seen = values["changes_seen"]

    # ---- the plan --------------------------------------------------------------------------------

    async def _advance(self) -> None:
        """Tell the planner what has happened, send what it decides, report."""
        channel = self._channel if self._changes_seen is not None else None
        self._told += self._due(_now())
        if channel is None and not self._told:
            return
        async with self._planning:
            told, self._told = self._told, []
            if self._channel is not channel:
                channel = None  # another one came, and its `disconnected` is in `told`
            with trio.CancelScope(shield=True):
                found = await trio.to_thread.run_sync(self._decide, told, channel is not None)
        self._link.gather_s = found.pause_s
        try:
            if channel is not None:
                for command in found.commands:
                    await channel.send(*command)
                for passed in found.passed:
                    await channel.send_passed(found.recording, passed)
        except LinkDown:
            pass  # `Down` will come
        self._report(found)

    def _take_in(self, told: list[Told], now: float) -> None:
        for is_event, part in itertools.groupby(told, lambda tell: isinstance(tell, Done | Seen)):
            if is_event:
                self._tell_events(list(part), now)
            else:
                for tell in part:
                    assert callable(tell)
                    tell()

    def _tell_events(self, events: list[Told], now: float) -> None:
        """All answers at once, then all observations: what numpy costs, it costs by the call."""
        done = [event for event in events if isinstance(event, Done)]
        seen = [event for event in events if isinstance(event, Seen)]
        if done:
            answered = np.concatenate([event.inos for event in done])
            self._planner.done(answered, np.concatenate([event.results for event in done]), now)
        if seen:
            inos = np.concatenate([event.inos for event in seen])
            kinds = np.concatenate([event.kinds for event in seen])
            processes = np.concatenate([event.processes for event in seen])
            parents = np.concatenate([event.parents for event in seen])
            whose = self._readers.whose(processes, parents, self._hinted(), now)
            self._planner.observe(inos, kinds, now, whose, processes)
            self._look_for_unheard(inos, kinds & SEEN_MASK != SEEN_LOOKUP, whose, now)

    def _look_for_unheard(
        self,
        inos: Inos,
        reads: npt.NDArray[np.bool_],
        whose: Mapping[str, Standings],
        now: float,
    ) -> None:
        for job in self.jobs.values():
            if job.order is not None or job.name not in whose:
                continue
            own = inos[reads & (whose[job.name] == OWN)]
            told = self._planner.is_told(own)
            if self._opening or self._ordering or (job.unheard.is_said and told.any()):
                # what is read may be what will be announced in a moment, or was after all
                job.unheard, job.status = Unheard(), {}
            elif job.unheard.take(own[~told], job.inos, now):
                job.status = {"state": "wrong", "reason": unheard.SAID}
                self._unheard.append((job.name, unheard.SAID))

    def _hinted(self) -> dict[str, Hinted]:
        """Whose its jobs are, if process ids of the mount mean anything to us."""
        if self.facts is None or self.facts.pid_namespace != _PID_NAMESPACE or not _PID_NAMESPACE:
            return {}
        return self._opening | {
            job.name: Hinted(job.request.pid, job.root, job.status.get("state") != "wrong")
            for job in self.jobs.values()
        }

    def _decide(self, told: list[Told], is_up: bool) -> _Decided:
        """In a thread, `_planning` held."""
        now, planner = _now(), self._planner
        self._take_in(told, now)
        passed = planner.passed(now) if is_up else []
        commands = planner.decide(now) if is_up else []
        is_due = now >= self._report_at
        if is_due:
            self._report_at = now + REPORT_EVERY_S
        finished, wants_orders = [], False
        for job in list(self.jobs.values()):
            if not job.is_planned:
                continue
            finishes = planner.finished(job.name) and not job.is_finished
            if finishes:
                finished.append(job)
            if is_due or finishes:
                job.status = planner.status(job.name)
                job.place = job.status["epoch"], job.status["index"]
            if is_due or job.epoch_samples < SHORT_EPOCH:
                wants_orders = wants_orders or bool(planner.wanted_epochs(job.name))
            wants_orders = wants_orders or planner.is_sought(job.name, now)
        patience_s = planner.patience_s()
        share_s = PAUSE_SHARE * (_now() - now) if patience_s < math.inf else math.inf
        pause_most_s = max(PAUSE_MOST_S, min(share_s, PAUSE_IDLE_MOST_S))
        pause_s = min(max(patience_s, PAUSE_LEAST_S), pause_most_s)
        notices, self._unheard = [*self._unheard, *planner.notices()], []
        return _Decided(
            commands, planner.recording, passed, pause_s, notices, finished, wants_orders
        )

    def _report(self, found: _Decided) -> None:
        """To the Director's owner."""
        now = _now()
        for name, line in found.notices:
            self._director.tell_notice(name, line)
        for job in list(self.jobs.values()):
            moved = job.is_planned and job.place != job.reported
            if moved and now - job.reported_s >= POSITION_EVERY_S:
                job.reported, job.reported_s = job.place, now
                self._director.tell_position(job.name, *job.place)
        for job in found.finished:
            if not job.is_finished:
                job.is_finished = True
                self._director.tell_finished(job.name)
        if found.wants_orders:
            self._orders_wanted.set()

    # ---- what people see -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "mountpoint": self.mountpoint,
            "connected": self._channel is not None,
            **{name: self.state[name] for name in _SHOWN_STATE if name in self.state},
            "layout": self.facts.layout if self.facts is not None else "static",
            "jobs": len(self.jobs),
            "observations_lost": self._lost,
        }
        if self._channel is None:
            shown["reason"] = self._link.refusal
        return shown

    def job_statuses(self) -> list[dict[str, Any]]:
        return [self._job_status(job) for job in self.jobs.values()]

    def _job_status(self, job: _Job) -> dict[str, Any]:
        silent = (job.refused or _SILENT) if job.order is None else ""
        shown = job.status or {"state": "waiting", "reason": silent}
        is_planned = job.is_planned and not self._is_gone
        if not is_planned and shown["state"] in ("running", "idle"):
            shown = {**shown, **_UNPLANNED}
        return {
            **status.unknown(),
            **shown,
            "name": job.name,
            "path": os.fsdecode(job.request.path),
            "mountpoint": self.mountpoint,
            "pid": job.request.pid,
            "age_s": round(time.monotonic() - job.begun_s, 3),
        }


def _now() -> float:
    """The planner's clock, for threads, too."""
    return time.monotonic()


async def _locate(path: bytes) -> tuple[str, bytes]:
    """The mount point that a dataset's directory is below, and its path from there. JobRefused."""
    shown = os.fsdecode(path)

    def locate() -> tuple[str, bytes]:
        if mounts.find(shown) is None:
            raise JobRefused(f"{shown} is not in a fusecache mount")
        try:
            real = os.path.realpath(shown, strict=True)
        except OSError as error:
            raise JobRefused(f"{shown}: {error.strerror}") from None
        mount = mounts.find(real)
        if mount is None:
            raise JobRefused(f"{shown} is not in a fusecache mount, but leads to {real}")
        root = relative(os.fsencode(real), os.fsencode(mount.mountpoint))
        if root is None:
            raise JobRefused(f"{shown} cannot be found in {mount.mountpoint}")
        return mount.mountpoint, root

    with trio.move_on_after(LOOK_TIMEOUT_S):
        return await trio.to_thread.run_sync(locate, abandon_on_cancel=True)
    raise JobRefused(f"{shown}: its mount does not answer")


def _check(tree: LinkTree, samples: Samples, check: Check) -> None:
    """Compare with what the client knows of its dataset. JobRefused: the first difference."""
    if check.count != len(samples):
        raise JobRefused(
            f"your dataset has {check.count} samples, but the directory holds {len(samples)}"
        )
    for index, path in check.samples:
        target = tree.resolve(path)
        if target.ino != samples.inos[index]:
            raise JobRefused(
                f"your sample {index} is {os.fsdecode(path)!r}, but sample {index} of the "
                "directory is another file"
            )
