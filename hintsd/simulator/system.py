"""The symbols of HDMLP's performance model (Table A.1) as two dataclasses.

Units: megabytes (MB), MB/s, seconds; as in the paper 1 GB of storage is 1,024 MB.
INVARIANT: every number in them is finite and possible; `ScenarioError` names the key that is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from fusecache.base.errors import EXIT_USAGE, UserError


class ScenarioError(UserError):
    """A scenario that cannot be: one line that names the key and what it must be."""

    def __init__(self, key: str, fault: str) -> None:
        super().__init__(f"{key}: {fault}", EXIT_USAGE)
        self.key = key
        self.fault = fault


# Sizes are float32, uses uint16, samples int32.
NUMBER_MOST: Final = 1e12
SPEED_LEAST: Final = 1e-9
SAMPLES_MOST: Final = 2**31 - 1
EPOCHS_MOST: Final = 2**16 - 1
WORKERS_MOST: Final = 2**16 - 2
STORAGE_MOST: Final = 100
RAM_NAME: Final = "RAM"


def _require(
    key: str,
    value: float,
    least: float = 0.0,
    most: float = NUMBER_MOST,
    *,
    above: bool = False,
) -> None:
    """A finite number of at least (or above) `least`, at most `most`."""
    if not math.isfinite(value):
        raise ScenarioError(key, f"must be a finite number, not {value}")
    if value < least or (above and value == least):
        raise ScenarioError(
            key, f"must be {'above' if above else 'at least'} {least:g}, not {value:g}"
        )
    if value > most:
        raise ScenarioError(key, f"must be at most {most:,.0f}, not {value:g}")


@dataclass(frozen=True, slots=True)
class Throughput:
    """Aggregate MB/s with so many threads or clients: straight lines between the points given,
    the first and the last value beyond them.

    clients: increasing, shape (points,); mb_per_s: shape (points,).
    """

    clients: tuple[float, ...]
    mb_per_s: tuple[float, ...]

    def check(self, key: str) -> None:
        """Raises ScenarioError that names `key`."""
        if not self.clients or len(self.clients) != len(self.mb_per_s):
            raise ScenarioError(key, "needs at least one point: clients = MB/s")
        for count, speed in zip(self.clients, self.mb_per_s, strict=True):
            _require(f"{key}.{count:g}", speed, SPEED_LEAST)
            if not (math.isfinite(count) and count >= 1):
                raise ScenarioError(key, f"a number of clients must be at least 1, not {count:g}")
        if any(a >= b for a, b in zip(self.clients, self.clients[1:], strict=False)):
            raise ScenarioError(key, "numbers of clients must not repeat")

    def at(self, clients: float) -> float:
        """Aggregate MB/s."""
        return float(np.interp(clients, self.clients, self.mb_per_s))

    def each(self, clients: float) -> float:
        """MB/s of one of so many."""
        return self.at(clients) / clients


@dataclass(frozen=True, slots=True)
class StorageClass:
    """A kind of local storage, j.

    capacity_mb: d_j. threads: p_j, which prefetch into it. read: r_j(p). write: w_j(p), None where
    it limits nothing.
    """

    name: str
    capacity_mb: float
    threads: int
    read: Throughput
    write: Throughput | None = None

    @property
    def read_mb_per_s(self) -> float:
        """r_j(p_j) / p_j: of one thread."""
        return self.read.each(self.threads)

    @property
    def write_mb_per_s(self) -> float:
        """w_j(p_j) / p_j: of one thread."""
        return math.inf if self.write is None else self.write.each(self.threads)

    def check(self, key: str) -> None:
        """Raises ScenarioError that names the key below `key`."""
        _require(f"{key}.capacity_mb", self.capacity_mb, above=True)
        _require(f"{key}.threads", self.threads, 1)
        self.read.check(f"{key}.read_mb_per_s")
        if self.write is not None:
            self.write.check(f"{key}.write_mb_per_s")


@dataclass(frozen=True, slots=True)
class System:
    """A cluster of equal workers, one a node.

    workers: N. compute_mb_per_s: c. preprocess_mb_per_s: β. network_mb_per_s: b_c, between
    workers. pfs: t(γ), of the shared file system with γ reading workers. pfs_network_mb_per_s:
    b_fs, of a worker, None where it limits nothing. staging: storage class 0. storage: the classes
    from 1 on, the fastest first; one that is called RAM is class 1.
    """

    workers: int
    compute_mb_per_s: float
    preprocess_mb_per_s: float
    network_mb_per_s: float
    pfs: Throughput
    staging: StorageClass
    storage: tuple[StorageClass, ...] = ()
    pfs_network_mb_per_s: float | None = None

    @property
    def capacity_mb(self) -> float:
        """D: local storage of a worker, without the staging buffer."""
        return sum(storage.capacity_mb for storage in self.storage)

    @property
    def ram(self) -> StorageClass | None:
        """Class 1, if it is called RAM: some policies keep samples there and nowhere else."""
        return next((kind for kind in self.storage if kind.name == RAM_NAME), None)

    def check(self) -> None:
        """Raises ScenarioError."""
        _require("system.workers", self.workers, 1, WORKERS_MOST)
        for name in ("compute_mb_per_s", "preprocess_mb_per_s", "network_mb_per_s"):
            _require(f"system.{name}", getattr(self, name), SPEED_LEAST)
        if self.pfs_network_mb_per_s is not None:
            _require("system.pfs_network_mb_per_s", self.pfs_network_mb_per_s, SPEED_LEAST)
        self.pfs.check("system.pfs_mb_per_s")
        self.staging.check("system.staging")
        names = [storage.name for storage in self.storage]
        if len(names) > STORAGE_MOST:
            raise ScenarioError("system.storage", f"at most {STORAGE_MOST} classes")
        for number, storage in enumerate(self.storage):
            storage.check(f"system.storage[{number}]")
        if len(set(names)) < len(names):
            raise ScenarioError("system.storage", "two classes have one name")
        for number, name in enumerate(names):
            if name == "PFS" or name.startswith("remote "):  # other sources are called so
                key = f"system.storage[{number}].name"
                raise ScenarioError(key, f"{name!r} is what results call another source")
        if RAM_NAME in names[1:]:
            raise ScenarioError("system.storage[0].name", f"must be {RAM_NAME} where one class is")

    def pfs_s_per_mb(self, readers: float) -> float:
        """Seconds to fetch a MB from the shared file system, which so many workers (γ, on average)
        read: 1 / (t(γ)/γ) (section 4, fetch case 1).
        """
        speed = self.pfs.each(readers)
        return 1 / min(speed, self.pfs_network_mb_per_s or math.inf)

    def remote_s_per_mb(self, number: int) -> float:
        """From another worker's class j (fetch case 2)."""
        return 1 / min(self.network_mb_per_s, self.storage[number].read_mb_per_s)

    def local_s_per_mb(self, number: int) -> float:
        """From the worker's own class j (fetch case 3)."""
        return 1 / self.storage[number].read_mb_per_s

    @property
    def write_s_per_mb(self) -> float:
        """write_i(k) of a MB: preprocessing and writing to the staging buffer, in a pipeline."""
        return 1 / min(self.preprocess_mb_per_s, self.staging.write_mb_per_s)

    def fill_s_per_mb(self, number: int, readers: float) -> float:
        """To bring a MB from the shared file system to the class j, by its p_j threads."""
        storage = self.storage[number]
        write = 1 / min(self.preprocess_mb_per_s, storage.write_mb_per_s)
        return (self.pfs_s_per_mb(readers) + write) / storage.threads


@dataclass(frozen=True, slots=True)
class Dataset:
    """Samples with normally distributed sizes, cut off at 0.

    samples: F. mean_mb, deviation_mb: µ and σ of s_k. batch_size: B, over all workers. epochs: E.
    drop_last: whether the last, smaller batch of an epoch is left out.
    """

    samples: int
    mean_mb: float
    deviation_mb: float
    batch_size: int
    epochs: int
    drop_last: bool = False

    @property
    def iterations(self) -> int:
        """T: batches of an epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def expected_mb(self) -> float:
        """S, about."""
        return self.samples * self.mean_mb

    def check(self) -> None:
        """Raises ScenarioError."""
        _require("dataset.samples", self.samples, 1, SAMPLES_MOST)
        _require("dataset.mean_mb", self.mean_mb, above=True)
        _require("dataset.deviation_mb", self.deviation_mb)
        _require("dataset.batch_size", self.batch_size, 1)
        _require("dataset.epochs", self.epochs, 1, EPOCHS_MOST)
        if self.iterations == 0:
            raise ScenarioError(
                "dataset.batch_size",
                f"must be at most dataset.samples ({self.samples}) where drop_last is true",
            )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A system, a dataset, and what they are called."""

    name: str
    title: str
    system: System
    dataset: Dataset

    def check(self) -> None:
        """Raises ScenarioError."""
        self.system.check()
        self.dataset.check()

    def with_workers(self, workers: int) -> Scenario:
        """With so many workers, each with as large a part of a batch: B grows with N, and the
        shared file system stays as it is. Raises ScenarioError.
        """
        if workers == self.system.workers:
            return self
        batch_size = round(self.dataset.batch_size * workers / self.system.workers)
        scaled = Scenario(
            f"{self.name}, {workers:,} workers",
            self.title,
            replace(self.system, workers=workers),
            replace(self.dataset, batch_size=max(1, batch_size)),
        )
        scaled.check()
        return scaled
