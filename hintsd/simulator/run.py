"""One run: a scenario under a strategy, and what it took.

A strategy says for each entry of an order which *source* it is read from; a `Run` turns that into
time and keeps the tally.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from hintsd.simulator.clock import Clock
from hintsd.simulator.orders import Order, Orders, Samples, Seconds
from hintsd.simulator.system import Scenario

Sources = npt.NDArray[np.uint8]
Progress = Callable[[float], None]
Serving = Callable[[Order, Sources], Seconds]

PFS: Final = 0


class Refusal(Exception):
    """A strategy cannot run a scenario; says why."""


@dataclass(slots=True)
class Result:
    """What a run took.

    total_s: startup_s (before training begins) + compute_s (mean of the workers) + barrier_s (what
    the faster workers wait at each batch for the slowest, if no data were ever late) + stall_s.
    fetch_s: seconds a worker's staging buffer spends fetching, by source; write_s: preprocessing
    and writing into it; read_mb: what it fetches. Of these the mean of the workers; they go on
    beside computing.
    """

    scenario: str
    policy: str
    total_s: float = 0.0
    startup_s: float = 0.0
    compute_s: float = 0.0
    barrier_s: float = 0.0
    stall_s: float = 0.0
    write_s: float = 0.0
    fetch_s: dict[str, float] = field(default_factory=dict)
    read_mb: dict[str, float] = field(default_factory=dict)
    refused: str | None = None


class Run:
    """Time and tally of one run.

    Sources are numbered: PFS is 0, the class j of another worker 1 + j, one's own 1 + J + j, where
    j counts `system.storage` from 0 and J is its length.
    """

    def __init__(
        self, scenario: Scenario, orders: Orders, policy: str, progress: Progress | None = None
    ) -> None:
        self.scenario = scenario
        self.system = scenario.system
        self.dataset = scenario.dataset
        self.orders = orders
        self.sizes_mb = orders.sizes_mb
        self.total_mb = float(orders.sizes_mb.sum(dtype=np.float64))
        self.threads = self.system.staging.threads
        self.clock = Clock(self.system, self.depth(self.system.staging.capacity_mb))
        self.result = Result(scenario.name, policy)
        self.progress = progress or (lambda _: None)
        names = [storage.name for storage in self.system.storage]
        self.source_names = ["PFS", *(f"remote {name}" for name in names), *names]
        self._fetch_s = np.zeros(len(self.source_names))
        self._read_mb = np.zeros(len(self.source_names))
        count = len(names)
        self._cost_s = np.array(
            [
                0.0,
                *(self.system.remote_s_per_mb(j) for j in range(count)),
                *(self.system.local_s_per_mb(j) for j in range(count)),
            ]
        )
        self._write_s = 0.0
        self._ideal_s = 0.0

    def depth(self, capacity_mb: float) -> int:
        """Batches (a worker's part of each) that fit into so much, at least the one in use."""
        part_mb = self.dataset.mean_mb * self.dataset.batch_size / self.system.workers
        epochs = self.dataset.iterations * self.dataset.epochs
        return int(max(1, min(capacity_mb // part_mb, epochs)))

    def remote(self, storage: int) -> int:
        """The source: class `storage` of another worker."""
        return 1 + storage

    def local(self, storage: int) -> int:
        """The source: one's own class `storage`."""
        return 1 + len(self.system.storage) + storage

    def epochs(self) -> Iterable[int]:
        """0 … E - 1, told to `progress`."""
        for number in range(self.dataset.epochs):
            self.progress(number / self.dataset.epochs)
            yield number
        self.progress(1.0)

    @property
    def last_epoch(self) -> int:
        return self.dataset.epochs - 1

    def widen(self, window_mb: float) -> None:
        """Before anything else: the staging buffer is this large."""
        self.clock = Clock(self.system, self.depth(window_mb))

    # ---- time ----

    def startup(self, seconds: float) -> None:
        """Before training."""
        self.clock.wait(seconds)
        self.result.startup_s += seconds

    def part(self, order: Order, first: int, end: int) -> Order:
        """The batches from `first` to before `end`."""
        bounds = order.bounds[first:end]
        start = bounds[0, 0]
        return Order(order.samples[start : bounds[-1, -1]], bounds - start)

    def ideal(self, order: Order) -> None:
        """No stall at all."""
        compute_s, _ = self._computing(order)
        self.clock.wait(float(compute_s.max(axis=1).sum()))

    def prefetched(
        self,
        orders: Iterable[tuple[Order, Sources]],
        readers: int | None = None,
        serving: Serving | None = None,
    ) -> None:
        """Epochs, or parts of one, whose entries come from these sources through the staging
        buffer. serving: for how long servers that all share work for each batch, shape (batches,
        servers).
        """
        parts = []
        write_s_per_mb = self.system.write_s_per_mb
        for order, sources in orders:
            compute_s, last_s = self._computing(order)
            read_mb = self._volumes(order, sources)
            self._count(read_mb)
            buffered = (
                np.tensordot(self._cost_s, read_mb, 1),
                write_s_per_mb * read_mb.sum(axis=0),
                read_mb[PFS],
            )
            self._write_s += float(buffered[1].sum()) / self.threads
            served_s = np.empty((len(compute_s), 0)) if serving is None else serving(order, sources)
            parts.append((compute_s, last_s, *(part / self.threads for part in buffered), served_s))
        compute_s, last_s, fetch_s, write_s, pfs_mb, served_s = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        pfs_s = self.clock.prefetched(
            compute_s, last_s, fetch_s, write_s, pfs_mb, readers, served_s
        )
        self._fetch_s[PFS] += float(pfs_s.sum())

    def on_demand(self, order: Order, sources: Sources) -> None:
        """What comes from the shared file system is read when it is needed; the rest is there."""
        compute_s, last_s = self._computing(order)
        read_mb = self._volumes(order, sources)
        write_s = self.system.write_s_per_mb
        tail_s = last_s * (1 + write_s * self.system.compute_mb_per_s)
        serial_s = compute_s + read_mb[PFS] * write_s
        buffered_mb = read_mb[PFS].sum() + read_mb[PFS + 1 :].sum() / self.threads
        self._write_s += float(buffered_mb) * write_s
        self._count(read_mb)
        pfs_s = self.clock.on_demand(serial_s, read_mb[PFS], tail_s)
        self._fetch_s[PFS] += float(pfs_s.sum())

    def _computing(self, order: Order) -> tuple[Seconds, Seconds]:
        """Seconds of each batch and worker, and of the last sample of each."""
        sizes = self.sizes_mb[order.samples]
        compute_s = order.sums(sizes) / self.system.compute_mb_per_s
        self._ideal_s += float(compute_s.max(axis=1).sum())
        self.result.compute_s += float(compute_s.sum()) / self.system.workers
        return compute_s, order.last(sizes) / self.system.compute_mb_per_s

    def _volumes(self, order: Order, sources: Sources) -> Seconds:
        """MB by source, batch and worker."""
        sizes = self.sizes_mb[order.samples]
        volumes = np.zeros((len(self.source_names), len(order.bounds), self.system.workers))
        for source in np.flatnonzero(np.bincount(sources, minlength=len(volumes))):
            volumes[source] = order.sums(np.where(sources == source, sizes, np.float32(0)))
        return volumes

    def _count(self, read_mb: Seconds) -> None:
        total_mb = read_mb.sum(axis=(1, 2))
        self._read_mb += total_mb
        self._fetch_s += total_mb * self._cost_s / self.threads

    def finish(self) -> Result:
        """What it took."""
        result, workers = self.result, self.system.workers
        result.total_s = self.clock.now_s
        result.barrier_s = self._ideal_s - result.compute_s
        result.stall_s = result.total_s - self._ideal_s - result.startup_s
        result.write_s = self._write_s / workers
        for name, fetch_s, read_mb in zip(
            self.source_names, self._fetch_s, self._read_mb, strict=True
        ):
            if read_mb > 0:
                result.fetch_s[name] = float(fetch_s) / workers
                result.read_mb[name] = float(read_mb) / workers
        return result


@dataclass(frozen=True, slots=True)
class Shards:
    """A fixed division of the dataset among the workers.

    samples: of each worker. owners: of each sample, N where none has it, shape (F,). storage: in
    which class it lies there, shape (F,).
    """

    samples: list[Samples]
    owners: npt.NDArray[np.uint16]
    storage: npt.NDArray[np.uint8]


def shards(run: Run, classes: int) -> Shards:
    """Equal parts, as far as they fit into the first so many storage classes, the fastest first."""
    count, workers = run.dataset.samples, run.system.workers
    owners = np.full(count, workers, np.uint16)
    storage = np.zeros(count, np.uint8)
    parts = []
    for worker in range(workers):
        start, end = count * worker // workers, count * (worker + 1) // workers
        parts.append(laid_out(run, start, end, classes, storage))
        owners[parts[-1]] = worker
    return Shards(parts, owners, storage)


def laid_out(
    run: Run, start: int, end: int, classes: int, storage: npt.NDArray[np.uint8]
) -> Samples:
    """Samples start … end - 1 into a worker's classes, one after the other; writes their class
    into `storage` and answers those that fit.
    """
    first = start
    for number, kind in enumerate(run.system.storage[:classes]):
        held_mb = np.cumsum(run.sizes_mb[start:end], dtype=np.float64)
        fitting = int(np.searchsorted(held_mb, kind.capacity_mb, "right"))
        storage[start : start + fitting] = number
        start += fitting
    return np.arange(first, start, dtype=np.int32)


def fill_s(run: Run, held: Samples, storage: npt.NDArray[np.uint8], readers: int) -> float:
    """How long a worker takes to fetch what it holds; its classes fill side by side."""
    held_mb = np.bincount(storage[held], weights=run.sizes_mb[held])
    return max(
        (mb * run.system.fill_s_per_mb(j, readers) for j, mb in enumerate(held_mb)), default=0.0
    )


def owned_sources(run: Run, order: Order, held: Shards) -> Sources:
    """One's own storage, else the owner's, else the shared file system."""
    owners = held.owners[order.samples]
    storage = held.storage[order.samples]
    sources = np.where(owners == order.workers(), run.local(0) + storage, run.remote(0) + storage)
    return np.where(owners == run.system.workers, PFS, sources).astype(np.uint8)
