"""The pool: all workers together hold one copy of the dataset, a sample by its owner.

Nothing here has a row for each worker and sample: an owner a sample, and sums by batch and worker.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from hintsd.policies.residents import Residents
from hintsd.simulator.orders import Order, Samples, Seconds
from hintsd.simulator.placement import MB
from hintsd.simulator.run import PFS, Run, Shards, Sources, owned_sources

SLOTS: Final = 65_536
LOAD_MOST: Final = 1.05
"""Slots of a worker, in parts of the mean."""
_OWNERS: Final = 3
"""The random numbers' stream; orders.py has 0 to 2."""

Owners = npt.NDArray[np.uint16]
Flags = npt.NDArray[np.bool_]


def pool(run: Run) -> None:
    """This project with a pool: workers hold one copy together. A sample is read from the shared
    file system once, and by all others from its owner, which a hash chooses; what that has no room
    for is read again in each epoch.
    """
    shared = Pool(run)
    later: list[tuple[Order, Sources]] = []
    for number in run.epochs():
        order = run.orders.epoch(number)
        sources = shared.sources(order)
        if number == 0:
            run.prefetched([(order, sources)], run.system.workers, shared.serving_s)
        else:
            later.append((order, sources))
    if later:
        run.prefetched(later, serving=shared.serving_s)


def owners(samples: int, workers: int, seed: int) -> Owners:
    """The owner of each sample, shape (samples,): that of its slot. The slot of a sample is that
    of its hash, random here.
    """
    generator = np.random.default_rng([seed, _OWNERS])
    by_slot = slot_owners(workers, generator)
    found: Owners = by_slot[generator.integers(0, SLOTS, samples, np.uint16)]
    return found


def slot_owners(workers: int, generator: np.random.Generator) -> Owners:
    """The owner of each slot, shape (SLOTS,): the highest random weight among those workers that
    have less than LOAD_MOST of the mean (Thaler and Ravishankar 1998; Mirrokni et al. 2018).

    Weights being independent, that is any of these workers with equal chances, so none is drawn.
    """
    most = max(int(LOAD_MOST * SLOTS / workers), -(-SLOTS // workers))
    loads = [0] * workers
    below = list(range(workers))
    found = np.empty(SLOTS, np.uint16)
    for slot, chance in enumerate(generator.random(SLOTS).tolist()):
        number = int(chance * len(below))
        owner = found[slot] = below[number]
        loads[owner] += 1
        if loads[owner] == most:
            below[number] = below[-1]
            below.pop()
    return found


class Pool:
    """What the owners hold.

    held: by whom and in which class, so far. INVARIANT: only its owner holds a sample, and never
    lets go of it; a class holds at most its capacity.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        workers, count = run.system.workers, run.dataset.samples
        self._owners = owners(count, workers, run.orders.seed)
        self._met = np.zeros(count, np.bool_)
        self._rooms = [
            [Residents(int(kind.capacity_mb * MB)) for kind in run.system.storage]
            for _ in range(workers)
        ]
        self._holders = np.full(count, workers, np.uint16)
        self._storage = np.zeros(count, np.uint8)
        self.held = Shards([], self._holders, self._storage)

    def sources(self, order: Order) -> Sources:
        """Where the entries of the next epoch are read: what is new, from the shared file system;
        its owners hold it afterwards, as far as they have room.
        """
        found = owned_sources(self._run, order, self.held)
        new = order.samples[~self._met[order.samples]]
        self._met[new] = True
        if len(new):
            self._admit(new)
        return found

    def _admit(self, new: Samples) -> None:
        """In the order of first use, to the fastest class that has room."""
        owned = self._owners[new]
        by_owner = new[np.argsort(owned, kind="stable")]
        ends = np.cumsum(np.bincount(owned, minlength=len(self._rooms)))
        for owner, left in enumerate(np.split(by_owner, ends[:-1])):
            for number, room in enumerate(self._rooms[owner]):
                sizes = (self._run.sizes_mb[left] * np.float32(MB)).astype(np.int64)
                admitted = room.admit(sizes)
                self._holders[left[admitted]] = owner
                self._storage[left[admitted]] = number
                left = left[~admitted]

    def serving_s(self, order: Order, sources: Sources) -> Seconds:
        """For how long each shared server works for each batch: of every worker the network out,
        the network in, and each storage class. Shape (T, (2 + J) N).

        What is held and comes from the shared file system all the same is on its way to its owner.
        """
        system = self._run.system
        loads = _Loads(order, self._holders[order.samples], self._run.sizes_mb[order.samples])
        storage = self._storage[order.samples]
        held = loads.holders < system.workers
        read, written = held & (sources != PFS), held & (sources == PFS)
        away = loads.holders != order.workers()
        sent_mb = loads.by_holder(read & away) + loads.by_reader(written & away)
        received_mb = loads.by_reader(read & away) + loads.by_holder(written & away)
        served_s = [sent_mb / system.network_mb_per_s, received_mb / system.network_mb_per_s]
        for number, kind in enumerate(system.storage):
            here = storage == number
            class_s = loads.by_holder(read & here) / kind.read.at(kind.threads)
            if kind.write is not None:
                class_s += loads.by_holder(written & here) / kind.write.at(kind.threads)
            served_s.append(class_s)
        return np.concatenate(served_s, axis=1)


class _Loads:
    """MB of chosen entries of an order, by batch and worker, shape (T, N).

    holders: of each entry, N where none holds it.
    """

    def __init__(self, order: Order, holders: Owners, sizes_mb: npt.NDArray[np.float32]) -> None:
        self._order = order
        self.holders = holders
        self._sizes_mb = sizes_mb
        self._shape = (len(order.bounds), order.bounds.shape[1] - 1)

    def by_reader(self, chosen: Flags) -> Seconds:
        """Of the worker that reads them."""
        if not chosen.any():
            return np.zeros(self._shape)
        return self._order.sums(np.where(chosen, self._sizes_mb, np.float32(0)))

    def by_holder(self, chosen: Flags) -> Seconds:
        """Of the worker that holds them."""
        batches, workers = self._shape
        ends = self._order.bounds[:, -1] - self._order.bounds[0, 0]
        where = np.flatnonzero(chosen)
        keys = np.searchsorted(ends, where, "right")
        keys *= workers
        keys += self.holders[where]
        sums = np.bincount(keys, self._sizes_mb[where], batches * workers)
        return sums.astype(np.float64, copy=False).reshape(self._shape)
