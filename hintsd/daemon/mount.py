"""One mount: its task, which turns jobs into orders, orders into a plan, and the plan into commands
for the mount's server (docs/HINTS.md).

INVARIANT: commands of a plan go only to the channel that was up when they were decided.
INVARIANT: a mount without jobs is left alone: its link ends IDLE_S after the last one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import trio

from fusecache.base.wire import Packing
from hintsd.daemon import datasets
from hintsd.daemon.datasets import Guest, Resolved
from hintsd.daemon.hinted_job import HintedJob, Scores
from hintsd.daemon.messages import JobRefused, Sampled, internal_error
from hintsd.daemon.mount_link import (
    Channel,
    Done,
    Down,
    Event,
    Gone,
    LinkDown,
    MountFacts,
    MountLink,
    Seen,
    State,
    Up,
)
from hintsd.daemon.ordering import Ordering, Supply
from hintsd.daemon.planning import STEP_HELD_S, Coming, Decided, Planning, clock
from hintsd.follow.readers import Hinted
from hintsd.orders.drawing import Order
from hintsd.orders.hint import Hint
from hintsd.orders.own_drawing import OwnDrawing, needs_torch
from hintsd.orders.spec import OrderSpec
from hintsd.orders.torch_process import TorchProcess
from hintsd.plan.planner import MountPlanner

DECIDE_EVERY_S: Final = 0.2
IDLE_S: Final = 3.0
CONNECT_TIMEOUT_S: Final = 30.0
EVENTS_MOST: Final = 256
RATE_SMOOTHING: Final = 0.3
_SHOWN_STATE: Final = (
    *("ram_bytes", "ram_limit_bytes", "ssd_bytes", "ssd_limit_bytes", "ssd_room_bytes"),
    "ssd_disk_full",
    *("origin_bytes", "origin_files", "origin_bytes_per_s", "depth", "queued_stage"),
    *("queued_fetch", "in_flight", "changes_seen", "segments_lost"),
    *("packing", "log_written_bytes", "log_waiting_bytes", "log_segments"),
)
PACKING_REFUSED: Final = {
    Packing.NO_ROOM: "no room on SSD for a log",
    Packing.NO_CREDIT: "too little room on SSD for a log",
}
"""`packing` of a state, when what was announced is not open (docs/WIRE.md)."""


class Owner(Protocol):
    """The Director, to a mount."""

    torch: TorchProcess
    drawing: OwnDrawing
    keep: str
    ordering: Ordering
    resolving: trio.CapacityLimiter

    def forget(self, mount: Mount) -> None:
        """A job that comes now begins with a new task."""

    def sharers(self, mount: Mount) -> int:
        """How many mounts with jobs are on its cache directory."""

    def budgets(self, mount: Mount) -> tuple[int, int]:
        """Bytes of RAM for a mount's jobs, and of SSD beyond what is stored."""

    def tell_position(self, job: str, epoch: int, index: int) -> None: ...

    def tell_notice(self, job: str, line: str) -> None: ...

    def tell_finished(self, job: str) -> None: ...


class ServerState:
    """What the mount's server says, on its plan channel."""

    def __init__(self) -> None:
        self.facts: MountFacts | None = None
        self.values: dict[str, int] = {}
        self.channel: Channel | None = None
        self.is_gone = False
        """Not mounted any more."""
        self.origin_bytes_per_s = 0.0
        self._changes_seen: int | None = None
        self._lost = 0

    @property
    def ready_channel(self) -> Channel | None:
        """The channel, if a state came through it."""
        return self.channel if self._changes_seen is not None else None

    def learn(self, facts: MountFacts) -> None:
        """Of a channel that is about to come up."""
        self.facts = self.facts or facts

    def come_up(self, channel: Channel) -> bool:
        """A server is there; whether it is another mount's than before."""
        is_other = self.facts is not None and self.facts.identity != channel.facts.identity
        self.facts, self._changes_seen = channel.facts, None
        self.channel, self.is_gone = channel, False
        return is_other

    def go_down(self) -> None:
        self.channel = None

    def go(self) -> None:
        """It is not mounted any more."""
        self.is_gone, self.values = True, {}

    def lose(self, observations: int) -> None:
        """So many could not be told."""
        self._lost += observations

    def take(self, state: State) -> bool:
        """Whether files have changed at the origin since the state before."""
        self.values = values = state.values
        busy = values["queued_stage"] + values["queued_fetch"] + values["in_flight"] > 0
        if busy and (rate := values["origin_bytes_per_s"]):
            before = self.origin_bytes_per_s or rate
            self.origin_bytes_per_s = before + RATE_SMOOTHING * (rate - before)
        if state.probe is not None and self.facts is not None:
            self.facts = self.facts._replace(probe=state.probe)
        before_seen, self._changes_seen = self._changes_seen, values["changes_seen"]
        return before_seen is not None and values["changes_seen"] > before_seen

    def layout(self, planner: MountPlanner) -> Callable[[], None]:
        """Tells the planner how the mount's samples are to lie on SSD."""
        assert self.facts is not None
        return functools.partial(planner.set_layout, self.facts.layout, self.facts.probe)

    def shown(self) -> dict[str, Any]:
        return {
            "connected": self.channel is not None,
            **{name: self.values[name] for name in _SHOWN_STATE if name in self.values},
            "layout": self.facts.layout if self.facts is not None else "static",
            "observations_lost": self._lost,
        }


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job that its mount has, until `Mount.close_job`."""

    mount: Mount
    samples_per_epoch: int
    warnings: list[str]


class Mount:
    """Its task, its link and its jobs."""

    def __init__(self, owner: Owner, mountpoint: str) -> None:
        self.mountpoint = mountpoint
        self.jobs: dict[str, HintedJob] = {}
        self.server = ServerState()
        self._owner = owner
        self._coming = Coming()
        self._send_event, self._events = trio.open_memory_channel[Event](EVENTS_MOST)
        self._link = MountLink(mountpoint, self._send_event)
        self._planning = Planning(self.jobs, self._coming, lambda: self.server.facts, owner.keep)
        self.cached, self.next_chunk = self._planning.cached, self._planning.next_chunk
        self._supply = Supply(
            self.jobs, self._planning, owner.ordering, owner.tell_notice, self._wake
        )
        self._users = 0  # that open jobs
        self._woken = trio.Event()
        self._left_at: float | None = None
        self._has_failed = False
        self._nursery: trio.Nursery  # set by `run`

    @property
    def takes_share(self) -> bool:
        """Whether its jobs have a part of what all mounts share."""
        server = self.server
        return server.facts is not None and bool(self.jobs) and not server.is_gone

    # ---- its task --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until there are no jobs any more, or cancelled."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._link.run)
            self._nursery.start_soon(self._take_events)
            self._nursery.start_soon(self._supply.run, self._nursery)
            while not self._is_left():
                with trio.move_on_after(
                    STEP_HELD_S if self._planning.has_steps else DECIDE_EVERY_S
                ):
                    await self._woken.wait()
                self._woken = trio.Event()
                await self._advance()
                await trio.sleep(self._link.gather_s)
            self._owner.forget(self)
            self._nursery.cancel_scope.cancel()

    def fail(self) -> None:
        """Its task has ended with a fault: jobs stay, unplanned, until they are closed."""
        self.server.go_down()
        self._has_failed = True
        for job in self.jobs.values():
            self._give_up(job, internal_error())

    def _give_up(self, job: HintedJob, fault: str) -> None:
        job.give_up(fault)
        self._owner.tell_notice(job.name, fault)

    def use(self, change: int) -> None:
        """So many more open jobs."""
        self._users += change

    def _is_left(self) -> bool:
        if self.jobs or self._users:
            self._left_at = None
        elif self._left_at is None:
            self._left_at = trio.current_time()
        return self._left_at is not None and trio.current_time() - self._left_at > IDLE_S

    def _wake(self, *, orders: bool = False) -> None:
        self._woken.set()
        if orders:
            self._supply.want()

    async def _advance(self) -> None:
        """Tell the planner what has happened, send what it decides, report."""
        channel = self.server.ready_channel
        found = await self._planning.decide(
            # another one may have come, and what was planned for this one is void
            lambda: channel is not None and self.server.channel is channel
        )
        if found is None:
            return
        self._link.gather(found.pause_s)
        try:
            if channel is not None:
                for command in found.commands:
                    await channel.send(*command)
                for passed in found.passed:
                    await channel.send_passed(found.recording, passed)
        except LinkDown:
            pass  # `Down` will come
        self._report(found)

    def _report(self, found: Decided) -> None:
        """To the Director's owner."""
        now = clock()
        for name, line in found.notices:
            self._owner.tell_notice(name, line)
        for job in list(self.jobs.values()):
            if job.take_moved(now):
                self._owner.tell_position(job.name, *job.place)
        for job in found.finished:
            if job.finish():
                self._owner.tell_finished(job.name)
        if found.wants_orders:
            self._supply.want()

    # ---- jobs ------------------------------------------------------------------------------------

    async def open_job(
        self,
        name: str,
        hint: Hint,
        root: bytes,
        resume_at: tuple[int, int] | None,
        *,
        uid: int = 0,
        guest: Guest | None = None,
    ) -> JobInfo:
        """JobRefused."""
        with self._coming.job(name, Hinted(hint.pid, root)):
            while True:
                place = resume_at or (hint.start_epoch, 0)
                job = HintedJob(name, hint, root, place, resume_at is not None, uid, guest)
                info = await self._open_job(job, is_new=resume_at is None)
                if info is not None:
                    return info

    async def _open_job(self, job: HintedJob, *, is_new: bool) -> JobInfo | None:
        """None: it was mounted anew meanwhile."""
        name, hint = job.name, job.hint
        torch, planning = self._owner.torch, self._planning
        channel = await self._connected(hint)
        if hint.spec is not None and needs_torch(hint.spec):
            await trio.to_thread.run_sync(torch.begin)  # while files are listed
        found = await self._resolve(job, hint)
        warnings, inos = found.warnings, None
        if (facts := self.server.facts) is not None and facts.ram_bytes == 0:
            warnings.append(f"{self.mountpoint} has no RAM budget: files are only put on SSD")
        job.resolve(found.samples.inos)
        spec = hint.spec_over(job.samples)
        if spec is not None:
            order = Order(spec, self._owner.drawing)
            warnings += job.describe(order, is_new=is_new)
            inos = await self._owner.ordering.sequence(job.inos, order, job.tidy_place()[0])
        # From here on the planner knows a job that we know.
        with trio.CancelScope(shield=True):
            async with planning.lock:
                if self._link.identity not in (None, channel.facts.identity):
                    return None
                self._assert_sound()
                self.server.learn(channel.facts)
                await planning.learn(found.samples.inos, found.samples.sizes, found.where)
                self.jobs[name] = job
                if spec is not None:
                    await planning.in_thread(planning.plan, job, inos)
        self._wake(orders=True)
        return JobInfo(self, job.epoch_samples, warnings)

    async def _connected(self, hint: Hint) -> Channel:
        try:
            channel = await self._link.channel(CONNECT_TIMEOUT_S)
        except LinkDown as down:
            raise JobRefused(f"{self.mountpoint} {down}") from None
        if channel.facts.mountpoint != self.mountpoint:
            raise JobRefused(
                f"{os.fsdecode(hint.path)} is in a bind mount of {channel.facts.mountpoint}: "
                "name it as it is called there"
            )
        return channel

    async def _resolve(self, job: HintedJob, hint: Hint) -> Resolved:
        limiter = self._owner.resolving
        return await datasets.resolve(self._link, job.root, hint, limiter, job.guest)

    def _assert_sound(self) -> None:
        if self._has_failed:
            raise JobRefused(internal_error())

    async def order(self, name: str, epoch: int, spec: OrderSpec) -> None:
        """The order of `epoch`, and of those behind it as far as the spec tells. JobRefused."""
        job = self.jobs.get(name)
        if job is None:
            raise JobRefused(f"job {name} has ended")
        files = None
        while job.inos is not files:  # else it was mounted anew: they have other numbers
            files = job.inos
            with self._coming.order():
                try:
                    job.samples_of(spec)
                    order = Order(spec, self._owner.drawing)
                    inos = await self._owner.ordering.sequence(files, order, epoch)
                    if inos is None:
                        raise JobRefused(f"the order does not tell epoch {epoch}")
                except JobRefused as refusal:
                    job.refuse(refusal)
                    raise
            with trio.CancelScope(shield=True):
                async with self._planning.lock:
                    if self.jobs.get(name) is not job:
                        raise JobRefused(f"job {name} has ended")
                    self._assert_sound()
                    if job.inos is files:
                        await self._planning.announce(job, order, epoch, inos)
                        break
        self._wake(orders=True)

    async def score(self, name: str, uses: Scores, sampled: Sampled) -> None:
        """How often each index of the dataset is expected to be used in an epoch whose order is not
        known. JobRefused.
        """
        job = self.jobs.get(name)
        if job is None:
            raise JobRefused(f"job {name} has ended")
        with trio.CancelScope(shield=True):
            async with self._planning.lock:
                job.score(uses, sampled)
                if self.jobs.get(name) is job:
                    await self._planning.score(job)
        self._wake()

    def step(self, name: str, epoch: int, batch: int) -> None:
        """The trainer has taken `batch` batches of `epoch`."""
        if not self._has_failed:
            self._planning.step(name, epoch, batch)
        self._wake()

    async def close_job(self, name: str) -> dict[str, Any]:
        """Its plan is taken back; its last status."""
        with trio.CancelScope(shield=True):
            async with self._planning.lock:
                job = self.jobs[name]
                try:
                    await self._planning.close(job)
                finally:
                    del self.jobs[name]
        self._wake()
        return job.shown(self.mountpoint, is_gone=self.server.is_gone)

    # ---- what the mount says ---------------------------------------------------------------------

    async def _take_events(self) -> None:
        server = self.server
        async for event in self._events:
            if isinstance(event, Up):
                await self._come_up(event.channel)
            elif isinstance(event, Down):
                server.go_down()
            elif isinstance(event, Gone):
                server.go()
                for name in self.jobs:
                    self._owner.tell_notice(name, f"{self.mountpoint} is not mounted any more")
            elif isinstance(event, State):
                self._take_state(event)
            elif isinstance(event, Seen):
                server.lose(event.lost)
                self._planning.tell(event)
            else:
                assert isinstance(event, Done)
                self._planning.tell(event)
            self._wake()

    async def _come_up(self, channel: Channel) -> None:
        """A server is there: what was sent to another one is void."""
        planning = self._planning
        if not self.server.come_up(channel):
            planning.tell(planning.planner.disconnected, self.server.layout(planning.planner))
            return
        # Mounted anew: inode numbers mean other files.
        async with planning.lock:
            planning.begin_anew()
            planning.tell(self.server.layout(planning.planner))
            for job in self.jobs.values():
                self._nursery.start_soon(self._plan_anew, job, planning.planner)

    async def _plan_anew(self, job: HintedJob, planner: MountPlanner) -> None:
        planning = self._planning

        def is_current() -> bool:
            return planning.planner is planner and self.jobs.get(job.name) is job

        try:
            files = replace(job.hint.files, check=None)
            found = await self._resolve(job, replace(job.hint, files=files))
            count = len(found.samples)
            if count != job.samples:
                raise JobRefused(f"it had {job.samples} samples, and has {count} now")
        except JobRefused as refusal:
            if is_current():
                self._give_up(job, f"{self.mountpoint} was mounted anew: {refusal}")
            return
        while True:
            order, epoch, inos = job.order, job.tidy_place()[0], None
            if order is not None and job.knows(epoch):
                try:
                    inos = await self._owner.ordering.sequence(found.samples.inos, order, epoch)
                except JobRefused as refusal:
                    self._owner.tell_notice(job.name, str(refusal))
            with trio.CancelScope(shield=True):
                async with planning.lock:
                    if not is_current():
                        return
                    if (job.order, job.tidy_place()[0]) != (order, epoch):
                        continue  # another one was announced meanwhile
                    job.resolve_anew(found.samples.inos)
                    await planning.learn(found.samples.inos, found.samples.sizes, found.where)
                    if order is not None:
                        await planning.in_thread(planning.plan, job, inos)
            break
        self._wake(orders=True)

    def _take_state(self, state: State) -> None:
        server, owner, tell = self.server, self._owner, self._planning.tell
        planner, values = self._planning.planner, state.values
        has_changed = server.take(state)
        tell(functools.partial(planner.set_budgets, *owner.budgets(self)))
        knows_pins = server.facts is not None and server.facts.knows_pins
        evicts = server.facts is not None and server.facts.evicts
        is_alone = owner.sharers(self) == 1
        set_pins = functools.partial(planner.set_pins, others_may_go=is_alone, evicts=evicts)
        tell(functools.partial(set_pins, knows_pins, values["pins"]))
        tell(functools.partial(planner.trails.record, values["recording"]))
        tell(
            functools.partial(
                planner.set_sources,
                server.origin_bytes_per_s,
                values["ssd_bytes_per_s"],
                values["origin_files"],
            )
        )
        if state.probe is not None and server.facts is not None:
            tell(server.layout(planner))
        if (why := PACKING_REFUSED.get(values.get("packing", 0))) is not None:
            refuse = functools.partial(planner.packing_refused, why)
            tell(lambda: refuse(clock()))
        for job in self.jobs.values() if has_changed else ():
            if job.warn():
                self._owner.tell_notice(
                    job.name,
                    f"files below {self.mountpoint} have changed at the origin: if the dataset "
                    "has, its order is not what was hinted",
                )

    # ---- what people see -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        shown = {
            "mountpoint": self.mountpoint,
            **self.server.shown(),
            "jobs": len(self.jobs),
        }
        if not shown["connected"]:
            shown["reason"] = self._link.refusal
        return shown

    def job_statuses(self) -> list[dict[str, Any]]:
        is_gone = self.server.is_gone
        return [job.shown(self.mountpoint, is_gone=is_gone) for job in self.jobs.values()]
