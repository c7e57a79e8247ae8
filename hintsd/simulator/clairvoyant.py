"""The policies that know the access sequence: HDMLP's and fusecache's.

Both fill storage while training goes on, so what a sample is read from depends on the time: it is
looked up in steps of a few batches until all classes are full, and then once an epoch. While they
fill, every worker reads the shared file system all the time: γ = N.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hintsd.simulator.orders import Order
from hintsd.simulator.placement import Placement, place
from hintsd.simulator.run import PFS, Run, Sources

RAM: Final = 0
STEPS_AN_EPOCH: Final = 100
STEPS_A_BUFFER: Final = 8

Flags = npt.NDArray[np.bool_]
Times = npt.NDArray[np.float32]


def frequency(run: Run) -> None:
    """HDMLP: each worker caches what it reads most, the most of it in the fastest class; a sample
    is read from the fastest place that has it by then, on whatever worker.
    """
    placement = place(run, 0)
    anywhere = [placement.earliest_s(number) for number in range(len(run.system.storage))]
    _run(run, placement, anywhere, None)


def fusecache(run: Run) -> None:
    """This project (docs/HINTS.md): the next bytes of the sequence are in RAM, over an epoch's end;
    what each worker reads most is on its SSD and is never replaced. Workers share nothing.
    """
    ram = run.system.ram
    if ram is None:
        _run(run, place(run, 0), [], None)
        return
    window_mb = run.system.staging.capacity_mb + ram.capacity_mb
    run.widen(window_mb)
    _run(run, place(run, 1), [], _Window(run, window_mb))


class _Window:
    """Which reads find their sample in RAM because the window never let go of it: it is used again
    before as many bytes have gone by as the window holds. Where all of the dataset fits, a sample
    stays from its first use on.
    """

    def __init__(self, run: Run, window_mb: float) -> None:
        self._sizes_mb = run.sizes_mb
        self._workers = run.system.workers
        self._window_mb = np.inf if run.total_mb <= window_mb else window_mb
        # How far the worker was when it used a sample last, in MB of its own sequence.
        self._used_mb = np.full((self._workers, run.dataset.samples), -np.inf, np.float32)
        self._read_mb = np.zeros(self._workers)

    def kept(self, order: Order) -> Flags:
        """Of each entry of the next epoch."""
        readers = order.workers()
        kept = np.zeros(len(order.samples), np.bool_)
        for worker in range(self._workers):
            mine = readers == worker
            samples = order.samples[mine]
            at_mb = np.cumsum(self._sizes_mb[samples], dtype=np.float64) + self._read_mb[worker]
            used_mb = self._used_mb[worker, samples]
            kept[mine] = np.isfinite(used_mb) & (at_mb - used_mb <= self._window_mb)
            self._used_mb[worker, samples] = at_mb
            self._read_mb[worker] = at_mb[-1] if len(at_mb) else self._read_mb[worker]
        return kept


def _run(run: Run, placement: Placement, anywhere: list[Times], window: _Window | None) -> None:
    """All epochs; anywhere: from when on another worker can give a sample, by class."""
    batches = run.dataset.iterations
    step = max(1, min(run.clock.depth // STEPS_A_BUFFER, batches // STEPS_AN_EPOCH))
    settled: list[tuple[Order, Sources]] = []
    for number in run.epochs():
        order = run.orders.epoch(number)
        kept = np.zeros(len(order.samples), np.bool_) if window is None else window.kept(order)
        first = 0
        while first < batches and run.clock.ready_s.min() < placement.done_s:
            part = run.part(order, first, first + step)
            sources = _fastest(run, part, placement, anywhere, run.clock.ready_s)
            sources[kept[_entries(order, first, first + step)]] = run.local(RAM)
            run.prefetched([(part, sources)], run.system.workers)
            first += step
        if first < batches:
            part = run.part(order, first, batches)
            sources = _fastest(run, part, placement, anywhere, None)
            sources[kept[_entries(order, first, batches)]] = run.local(RAM)
            settled.append((part, sources))
        # A staging buffer that holds several epochs is filled with all of them at once.
        if settled and (len(settled) * batches > run.clock.depth or number == run.last_epoch):
            run.prefetched(settled)
            settled = []


def _entries(order: Order, first: int, end: int) -> slice:
    bounds = order.bounds[first:end]
    return slice(bounds[0, 0], bounds[-1, -1])


def _fastest(
    run: Run,
    order: Order,
    placement: Placement,
    anywhere: list[Times],
    now_s: npt.NDArray[np.float64] | None,
) -> Sources:
    """The fastest source of each entry at the time at which its worker prefetches, shape (N,), or
    None for later than everything. Of the shared file system a worker expects its share among N.
    """
    system = run.system
    readers, samples = order.workers(), order.samples
    limit = np.finfo(np.float32).max
    times = np.float32(limit) if now_s is None else now_s.astype(np.float32)[readers]
    sources = np.full(len(samples), PFS, np.uint8)
    best = np.full(len(samples), system.pfs_s_per_mb(system.workers))
    for number, since_s in enumerate(anywhere):
        there = (since_s[samples] <= times) & (system.remote_s_per_mb(number) < best)
        sources[there] = run.remote(number)
        best[there] = system.remote_s_per_mb(number)
    storage = placement.storage[readers, samples]
    here = placement.since_s[readers, samples] <= times
    for number in range(len(system.storage)):
        # Where they are equal, one's own: no other worker is disturbed.
        there = here & (storage == number) & (system.local_s_per_mb(number) <= best)
        sources[there] = run.local(number)
        best[there] = system.local_s_per_mb(number)
    return sources
