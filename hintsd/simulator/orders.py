"""Which samples each worker reads in each batch: sizes and shuffles, from one seed.

An epoch's order is an array of samples; batch h is the slice h·B to (h+1)·B of it, and each worker
has an equal part of that slice. Sums over such parts are differences of one running sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hintsd.simulator.system import Dataset

Samples = npt.NDArray[np.int32]
Bounds = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Megabytes = npt.NDArray[np.float32]

_SIZES: Final = 0
_EPOCH: Final = 1
_LOCAL: Final = 2

# Shuffles are kept for the next policy as far as this goes.
KEPT_BYTES_MOST: Final = 512 << 20


@dataclass(frozen=True, slots=True)
class Order:
    """One epoch.

    samples: in the order of use, shape (used,). bounds: worker i's part of batch h is
    samples[bounds[h, i] : bounds[h, i + 1]], shape (T, N + 1).
    """

    samples: Samples
    bounds: Bounds

    def sums(self, values: npt.NDArray[np.float32] | npt.NDArray[np.float64]) -> Seconds:
        """Sums of a value per entry of `samples`, shape (T, N)."""
        running = np.zeros(len(values) + 1)
        np.cumsum(values, out=running[1:], dtype=np.float64)
        return np.diff(running[self.bounds], axis=1)

    def last(self, values: npt.NDArray[np.float32]) -> Seconds:
        """The value of each part's last entry, 0 where the part is empty, shape (T, N)."""
        ends = self.bounds[:, 1:]
        filled = ends > self.bounds[:, :-1]
        return np.where(filled, values[np.maximum(ends - 1, 0)], 0.0)

    def workers(self) -> npt.NDArray[np.uint16]:
        """Which worker reads each entry of `samples`."""
        parts = np.diff(self.bounds, axis=1)
        numbers = np.tile(np.arange(parts.shape[1], dtype=np.uint16), len(parts))
        return np.repeat(numbers, parts.ravel())


class Orders:
    """The sizes and all epochs of a run; the same seed gives the same ones."""

    def __init__(self, dataset: Dataset, workers: int, seed: int) -> None:
        self.dataset = dataset
        self.workers = workers
        self.seed = seed
        generator = np.random.default_rng([seed, _SIZES])
        sizes = generator.standard_normal(dataset.samples, dtype=np.float32)
        sizes *= np.float32(dataset.deviation_mb)
        sizes += np.float32(dataset.mean_mb)
        self.sizes_mb: Megabytes = np.maximum(sizes, 0, out=sizes)
        self.bounds = self._bounds()
        self._kept: dict[int, Samples] = {}

    @property
    def used(self) -> int:
        """Samples of an epoch, without a last batch that is dropped."""
        return int(self.bounds[-1, -1])

    def _bounds(self) -> Bounds:
        dataset, workers = self.dataset, self.workers
        starts = np.arange(dataset.iterations, dtype=np.int64) * dataset.batch_size
        lengths = np.minimum(dataset.batch_size, dataset.samples - starts)
        shares = np.arange(workers + 1) * lengths[:, None] // workers
        return starts[:, None] + shares

    def epoch(self, number: int) -> Order:
        """Full randomisation: a permutation of the dataset."""
        samples = self._kept.get(number)
        if samples is None:
            generator = np.random.default_rng([self.seed, _EPOCH, number])
            samples = np.arange(self.dataset.samples, dtype=np.int32)
            generator.shuffle(samples)
            if samples.nbytes * (len(self._kept) + 1) <= KEPT_BYTES_MOST:
                self._kept[number] = samples
        return Order(samples[: self.used], self.bounds)

    def within(self, number: int, subset: Samples) -> Order:
        """An epoch as long as any other that has the samples of `subset` only, each about equally
        often.
        """
        return Order(self._draw(number, 0, subset, self.used), self.bounds)

    def local(self, number: int, shards: list[Samples]) -> Order:
        """An epoch in which worker i reads samples of shards[i] only."""
        parts = np.diff(self.bounds, axis=1)
        owners = Order(np.empty(0, np.int32), self.bounds).workers()
        samples = np.empty(self.used, np.int32)
        for worker, shard in enumerate(shards):
            count = int(parts[:, worker].sum())
            samples[owners == worker] = self._draw(number, worker, shard, count)
        return Order(samples, self.bounds)

    def _draw(self, number: int, worker: int, subset: Samples, count: int) -> Samples:
        generator = np.random.default_rng([self.seed, _LOCAL, number, worker])
        rounds = []
        while count > 0:
            samples = subset.copy()
            generator.shuffle(samples)
            rounds.append(samples[:count])
            count -= len(samples)
        return np.concatenate(rounds) if rounds else np.empty(0, np.int32)

    def owned(self, number: int, owners: npt.NDArray[np.uint16]) -> Order:
        """The batches of `epoch`, each dealt anew: a worker gets those samples of a batch that it
        owns, as many as its part holds; the others go where there is room (Yang & Cong 2019).

        owners: a worker per sample, N where no one has it, shape (F,).
        """
        order = self.epoch(number)
        parts = np.diff(self.bounds, axis=1)
        batches = np.repeat(np.arange(len(parts)), parts.sum(axis=1))
        keys = batches * (self.workers + 1) + owners[order.samples]
        by_owner = np.argsort(keys, kind="stable")
        keys = keys[by_owner]
        first = np.searchsorted(keys, keys, "left")
        rank = np.arange(len(keys)) - first
        rooms = np.concatenate([parts, np.zeros((len(parts), 1), parts.dtype)], axis=1).ravel()
        kept = rank < rooms[keys]
        keys_of_places = np.repeat(
            np.arange(rooms.size), rooms
        )  # in the order of batches and workers
        place_rank = np.arange(len(keys_of_places)) - np.searchsorted(
            keys_of_places, keys_of_places, "left"
        )
        counts = np.minimum(np.bincount(keys, minlength=rooms.size), rooms)
        vacant = place_rank >= counts[keys_of_places]
        samples = np.empty(self.used, np.int32)
        samples[~vacant] = order.samples[by_owner[kept]]
        samples[vacant] = order.samples[by_owner[~kept]]
        return Order(samples, self.bounds)
