"""What another system would bring: run times over sizes of RAM and SSD (HDMLP, section 6.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from hintsd.simulator.catalogue import simulate
from hintsd.simulator.orders import Orders
from hintsd.simulator.scenario import load
from hintsd.simulator.system import RAM_NAME, Scenario, StorageClass, Throughput

GB: Final = 1024.0
STAGING_MB: Final = (1 * GB, 2 * GB, 4 * GB)
RAM_MB: Final = (10 * GB, 20 * GB, 40 * GB)
SSD_MB: Final = (20 * GB, 40 * GB, 80 * GB)
SSD_READ: Final = Throughput((2.0,), (100.0,))
THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class Point:
    """One system: MB of each, and the run time."""

    staging_mb: float
    ram_mb: float
    ssd_mb: float
    total_s: float | None


@dataclass(frozen=True, slots=True)
class Grid:
    """lower_bound_s: of every system. staging: with a staging buffer alone. storage: with the
    largest of those and RAM and SSD added, 0 MB of each first.
    """

    scenario: str
    policy: str
    lower_bound_s: float
    staging: list[Point]
    storage: list[Point]


def paper() -> Scenario:
    """The system that section 6.2 asks about: fits-cluster, but that the SSD reads 100 MB/s."""
    scenario = load("fits-cluster")
    ram, ssd = scenario.system.storage
    storage = (ram, replace(ssd, read=SSD_READ))
    return replace(scenario, system=replace(scenario.system, storage=storage))


def explore(
    scenario: Scenario,
    policy: str,
    ram_mb: Sequence[float],
    ssd_mb: Sequence[float],
    seed: int,
    progress: Callable[[float], None],
) -> Grid:
    """RAM is the scenario's, SSD the first of its other storage classes, each of another size. RAM
    that it has not is as fast as its staging buffer, an SSD reads 100 MB/s, both with two threads.

    progress: called with the share that is done.
    """
    orders = Orders(scenario.dataset, scenario.system.workers, seed)
    largest = max(STAGING_MB)
    wanted = [(staging, 0.0, 0.0) for staging in STAGING_MB] + [
        (largest, ram, ssd) for ram, ssd in product((0.0, *ram_mb), (0.0, *ssd_mb)) if ram or ssd
    ]
    lower_bound_s = simulate(scenario, "perfect", orders).total_s
    points = []
    for number, (staging, ram, ssd) in enumerate(wanted):
        progress((number + 1) / (len(wanted) + 1))
        result = simulate(_system(scenario, staging, ram, ssd), policy, orders)
        points.append(Point(staging, ram, ssd, None if result.refused else result.total_s))
    progress(1.0)
    count = len(STAGING_MB)
    bare = points[count - 1]
    return Grid(scenario.name, policy, lower_bound_s, points[:count], [bare, *points[count:]])


def _system(scenario: Scenario, staging_mb: float, ram_mb: float, ssd_mb: float) -> Scenario:
    system = scenario.system
    staging = replace(system.staging, capacity_mb=staging_mb)
    ram = system.ram or StorageClass(RAM_NAME, ram_mb, THREADS, staging.read)
    ssd = next(
        (kind for kind in system.storage if kind is not system.ram),
        StorageClass("SSD", ssd_mb, THREADS, SSD_READ),
    )
    sizes_mb = ((ram, ram_mb), (ssd, ssd_mb))
    storage = tuple(replace(kind, capacity_mb=size_mb) for kind, size_mb in sizes_mb if size_mb)
    return replace(scenario, system=replace(system, staging=staging, storage=storage))
