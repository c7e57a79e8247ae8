"""What each worker caches, and from when on, if the whole access sequence is known.

By access frequency, then by first use, class by class (HDMLP, 5.1); the classes fill side by side
in the order of first use, and nothing is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hintsd.policies.residents import Residents
from hintsd.simulator.orders import Samples
from hintsd.simulator.run import Run

MB: Final = 1 << 20
NOT_CACHED: Final = 255


@dataclass(frozen=True, slots=True)
class Placement:
    """storage: the class in which worker i has sample k, or NOT_CACHED, shape (N, F). since_s: the
    time from which it is there, infinite where it never is, shape (N, F). done_s: when the last
    class of the last worker is full.
    """

    storage: npt.NDArray[np.uint8]
    since_s: npt.NDArray[np.float32]
    done_s: float

    def earliest_s(self, number: int) -> npt.NDArray[np.float32]:
        """From when on any worker has a sample in the class `number`, shape (F,)."""
        earliest = np.full(self.storage.shape[1], np.inf, np.float32)
        for storage, since_s in zip(self.storage, self.since_s, strict=True):
            np.minimum(earliest, since_s, out=earliest, where=storage == number)
        return earliest


def place(run: Run, first_class: int) -> Placement:
    """Of a run, into the storage classes from `first_class` on."""
    workers, count = run.system.workers, run.dataset.samples
    uses, sequences = _sequences(run)
    storage = np.full((workers, count), NOT_CACHED, np.uint8)
    since_s = np.full((workers, count), np.inf, np.float32)
    done_s = 0.0
    sizes = (run.sizes_mb * np.float32(MB)).astype(np.int64)
    for worker in range(workers):
        left = sequences[worker]
        for number in range(first_class, len(run.system.storage)):
            kind = run.system.storage[number]
            residents = Residents(int(kind.capacity_mb * MB))
            admitted = residents.admit(sizes[left], uses[worker, left])
            held, left = left[admitted], left[~admitted]
            filled_s = np.cumsum(run.sizes_mb[held], dtype=np.float64)
            filled_s *= run.system.fill_s_per_mb(number, workers)
            storage[worker, held] = number
            since_s[worker, held] = filled_s
            done_s = max(done_s, float(filled_s[-1]) if len(held) else 0.0)
    return Placement(storage, since_s, done_s)


def _sequences(run: Run) -> tuple[npt.NDArray[np.uint16], list[Samples]]:
    """How often each worker reads each sample, shape (N, F), and for each worker all samples in the
    order of its first use, those it never reads last.
    """
    workers, count = run.system.workers, run.dataset.samples
    uses = np.zeros((workers, count), np.uint16)
    parts: list[list[Samples]] = [[] for _ in range(workers)]
    for number in range(run.dataset.epochs):
        order = run.orders.epoch(number)
        readers = order.workers()
        for worker in range(workers):
            mine = order.samples[readers == worker]
            parts[worker].append(mine[uses[worker, mine] == 0])
            uses[worker, mine] += 1
    for worker in range(workers):
        parts[worker].append(np.flatnonzero(uses[worker] == 0).astype(np.int32))
    return uses, [np.concatenate(part) for part in parts]
