"""The policies that HDMLP is compared with (section 6): each a function that drives a `Run`.

What each one is taken to do where the paper leaves it open: docs/SIMULATOR.md.
"""

from __future__ import annotations

import numpy as np

from hintsd.simulator.orders import Order
from hintsd.simulator.run import (
    PFS,
    Refusal,
    Run,
    Shards,
    Sources,
    fill_s,
    laid_out,
    owned_sources,
    shards,
)
from hintsd.simulator.system import RAM_NAME, StorageClass


def perfect(run: Run) -> None:
    """No stall: the lower bound."""
    for number in run.epochs():
        run.ideal(run.orders.epoch(number))


def naive(run: Run) -> None:
    """Each sample is read from the shared file system when it is needed, by one thread."""
    for number in run.epochs():
        order = run.orders.epoch(number)
        run.on_demand(order, _all(order, PFS))


def staging_buffer(run: Run) -> None:
    """The staging buffer is filled ahead from the shared file system: double buffering, tf.data."""
    orders = (run.orders.epoch(number) for number in run.epochs())
    run.prefetched((order, _all(order, PFS)) for order in orders)


def deepio_ordered(run: Run) -> None:
    """Each worker loads a shard into RAM; the rest is read when it is needed."""
    _ram(run)
    held = _loaded(run, 1)
    for number in run.epochs():
        order = run.orders.epoch(number)
        run.on_demand(order, owned_sources(run, order, held))


def deepio_opportunistic(run: Run) -> None:
    """As ordered, but only what is in RAM is used."""
    _ram(run)
    held = _loaded(run, 1)
    subset = np.flatnonzero(held.owners < run.system.workers).astype(np.int32)
    if len(subset) == 0:
        raise Refusal("nothing fits into RAM")
    orders = (run.orders.within(number, subset) for number in run.epochs())
    run.prefetched((order, owned_sources(run, order, held)) for order in orders)


def parallel_staging(run: Run) -> None:
    """Each worker copies the dataset, or the shard that fits, and trains on that only."""
    _needs_storage(run)
    if run.total_mb > run.system.capacity_mb:
        held = _loaded(run, len(run.system.storage))
    else:
        # All want the same files: they are read once and passed on, so there is one reader.
        storage = np.zeros(run.dataset.samples, np.uint8)
        everything = laid_out(run, 0, run.dataset.samples, len(run.system.storage), storage)
        run.startup(fill_s(run, everything, storage, 1))
        held = Shards([everything] * run.system.workers, np.empty(0, np.uint16), storage)
    if any(len(samples) == 0 for samples in held.samples):
        raise Refusal("nothing fits into the storage of a worker")
    orders = (run.orders.local(number, held.samples) for number in run.epochs())
    run.prefetched(
        (order, (run.local(0) + held.storage[order.samples]).astype(np.uint8)) for order in orders
    )


def lbann_dynamic(run: Run) -> None:
    """What a worker reads in the first epoch stays in its RAM."""
    _fits_ram(run)
    owners = np.empty(run.dataset.samples, np.uint16)
    storage = np.zeros(run.dataset.samples, np.uint8)
    rest = []
    for number in run.epochs():
        order = run.orders.epoch(number)
        if number == 0:
            owners[:] = run.system.workers
            owners[order.samples] = order.workers()
            run.prefetched([(order, _all(order, PFS))], run.system.workers)
        else:
            rest.append((order, owned_sources(run, order, Shards([], owners, storage))))
    if rest:
        run.prefetched(rest)


def lbann_preloading(run: Run) -> None:
    """Each worker loads its shard into RAM before training."""
    _fits_ram(run)
    held = _loaded(run, 1)
    orders = (run.orders.epoch(number) for number in run.epochs())
    run.prefetched((order, owned_sources(run, order, held)) for order in orders)


def locality_aware(run: Run) -> None:
    """Each worker loads its shard into its storage; batches are dealt so that it reads its own."""
    held = _loaded(run, len(run.system.storage))
    orders = (run.orders.owned(number, held.owners) for number in run.epochs())
    run.prefetched((order, owned_sources(run, order, held)) for order in orders)


def _all(order: Order, source: int) -> Sources:
    return np.full(len(order.samples), source, np.uint8)


def _needs_storage(run: Run) -> None:
    if not run.system.storage:
        raise Refusal("the system has no storage class")


def _ram(run: Run) -> StorageClass:
    ram = run.system.ram
    if ram is None:
        raise Refusal(f"the system has no storage class called {RAM_NAME}")
    return ram


def _fits_ram(run: Run) -> None:
    if run.total_mb > run.system.workers * _ram(run).capacity_mb:
        raise Refusal(f"the dataset exceeds the aggregate {RAM_NAME}")


def _loaded(run: Run, classes: int) -> Shards:
    """Shards in place, which all workers have fetched at once before training."""
    _needs_storage(run)
    held = shards(run, classes)
    workers = run.system.workers
    run.startup(max(fill_s(run, samples, held.storage, workers) for samples in held.samples))
    return held
