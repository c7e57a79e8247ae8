"""Orders: how they are computed, beside all else, and given to the planner that wants them.

INVARIANT: no job waits for another one's order, but for a thread that computes one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, TypeVar

import trio

from hintsd.daemon.hinted_job import HintedJob
from hintsd.daemon.messages import JobRefused, NotHere
from hintsd.daemon.mount_link import Inos
from hintsd.daemon.planning import Planning, clock
from hintsd.follow import search
from hintsd.orders.drawing import (
    NoTorch,
    Order,
    OrderLost,
    OrderTooFar,
    OrderUnknown,
    epochs_at_once,
)

ORDERS_AT_ONCE: Final = 2

T = TypeVar("T")


class Ordering:
    """Of all mounts' jobs: what computes orders."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(ORDERS_AT_ONCE)
        self._far = trio.CapacityLimiter(1)

    async def sequence(self, inos: Inos, order: Order, epoch: int) -> Inos | None:
        """The files `inos` as they come in one epoch; None: that is not known. JobRefused.

        May take minutes: not to be waited for with a planner's lock held.
        """

        def compute() -> Inos:
            sequence = order.sequence(epoch)
            found: Inos = inos[sequence]
            return found

        try:
            await self.approach(order, epoch)
            return await trio.to_thread.run_sync(
                compute, limiter=self._threads, abandon_on_cancel=True
            )
        except NoTorch as error:
            raise NotHere(str(error)) from None
        except OrderLost as error:
            raise JobRefused(f"the order of epoch {epoch} cannot be computed: {error}") from None
        except OrderUnknown:
            return None
        except (ValueError, IndexError, MemoryError) as error:
            raise JobRefused(f"the order of epoch {epoch} cannot be computed: {error}") from None

    async def approach(self, order: Order, epoch: int) -> None:
        """Until `order` tells this epoch at the cost of one. As `Order.approach` raises."""
        while not await self.far(functools.partial(order.approach, epoch)):
            pass

    async def far(self, work: Callable[[], T]) -> T:
        """A part of what is drawn to come to an epoch: such requests wait for one another, and no
        other does. One that is cancelled waits for no thread.
        """
        return await trio.to_thread.run_sync(work, limiter=self._far, abandon_on_cancel=True)


class Supply:
    """Of one mount's jobs: the planner gets the orders that it wants."""

    def __init__(
        self,
        jobs: Mapping[str, HintedJob],
        planning: Planning,
        ordering: Ordering,
        on_notice: Callable[[str, str], None],
        on_supplied: Callable[[], None],
    ) -> None:
        """`on_notice(job, line)`; `on_supplied()`: there is more to plan."""
        self._jobs, self._planning, self._ordering = jobs, planning, ordering
        self._on_notice, self._on_supplied = on_notice, on_supplied
        self._wanted = trio.Event()

    def want(self) -> None:
        """The planner may want orders."""
        self._wanted.set()

    async def run(self, nursery: trio.Nursery) -> None:
        """Until cancelled; no job waits for another one's."""
        supplying: dict[str, bool] = {}  # whether to look again

        async def supply(name: str) -> None:
            while supplying.pop(name):
                supplying[name] = False
                await self._seek(name)
                await self._supply(name)

        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            for name in self._jobs:
                if name not in supplying:
                    nursery.start_soon(supply, name)
                supplying[name] = True

    def _is_current(self, job: HintedJob) -> bool:
        return self._jobs.get(job.name) is job and job.is_planned

    async def _supply(self, name: str) -> None:
        planning = self._planning
        while True:
            job = self._jobs.get(name)
            if job is None or not job.is_planned:
                return
            async with planning.lock:
                wanted = await self._wanted_epochs(job)
            if not wanted:
                return
            epoch, order, files, inos = wanted[0], job.order, job.inos, None
            assert order is not None
            try:
                if job.knows(epoch):
                    inos = await self._ordering.sequence(files, order, epoch)
            except JobRefused as refusal:
                self._on_notice(name, str(refusal))
            async with planning.lock:
                if not self._is_current(job):
                    return
                if job.order is not order or job.inos is not files:
                    continue  # another one was announced meanwhile, or it was mounted anew
                if inos is None:
                    planning.planner.unknown(name, epoch)
                else:
                    with trio.CancelScope(shield=True):
                        await planning.in_thread(planning.planner.supply, name, epoch, inos)
            self._on_supplied()

    async def _wanted_epochs(self, job: HintedJob) -> list[int]:
        if not job.is_planned:  # it was closed meanwhile
            return []
        return await self._planning.in_thread(self._planning.planner.wanted_epochs, job.name)

    async def _seek(self, name: str) -> None:
        """Look through the epochs to come for a reader whose place is not known."""
        planning = self._planning
        async with planning.lock:
            job, followers = self._jobs.get(name), planning.planner.followers
            if job is None or not job.is_planned or not followers.is_sought(name, clock()):
                return
            order, files = job.order, job.inos
            seen, epochs = await planning.in_thread(followers.sought, name)
        assert order is not None
        place = await self._walk(job, order.copy(), seen, epochs)  # `order` stays where it is
        async with planning.lock:
            if self._is_current(job) and job.order is order and job.inos is files:
                await planning.in_thread(followers.found, name, place, clock())
        self._on_supplied()

    async def _walk(
        self, job: HintedJob, ahead: Order, seen: search.Opened, epochs: list[int]
    ) -> search.Place | None:
        def order_of(epoch: int) -> Inos | None:
            with suppress(OrderUnknown):
                return job.inos[ahead.sequence(epoch)] if epoch >= job.known_from else None
            return None

        def walk(epochs: list[int]) -> search.Place | None:
            with suppress(OrderUnknown):
                ahead.draw_ahead(epochs)
            return search.walk(seen, epochs, order_of)

        at_once = epochs_at_once(job.epoch_samples)
        for start in range(0, len(epochs), at_once):
            some = epochs[start : start + at_once]
            try:
                await self._ordering.approach(ahead, some[0])
            except (OrderUnknown, OrderTooFar):
                continue
            place = await self._ordering.far(functools.partial(walk, some))
            if place is not None:
                return place
        return None
