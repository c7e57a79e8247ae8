"""How much memory a run takes, so that one that cannot be is refused before it begins.

About: measured peaks are 0.6 to 1.2 times what is estimated.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fusecache.base.errors import UserError
from fusecache.base.processes import usable_memory_bytes
from fusecache.base.units import format_bytes
from hintsd.simulator.catalogue import POLICIES
from hintsd.simulator.orders import KEPT_BYTES_MOST
from hintsd.simulator.system import Scenario

SAMPLE_BYTES: Final = 65
"""Sizes, and an epoch while it is looked at."""
SHUFFLED_BYTES: Final = 4
PART_BYTES: Final = 60
"""Of each batch of each epoch, a worker."""
PLACED_BYTES: Final = 11
"""Of each sample, a worker: where it has it, since when, how often it is read."""
SERVED_BYTES: Final = 20
"""Of each batch of each epoch, a worker and what it serves by: network out, in, each class."""
COUNTED_BYTES: Final = 2


def check_run(scenario: Scenario, policies: Iterable[str]) -> None:
    """UserError: a policy takes more than there is."""
    for policy in policies:
        _check(scenario, policy, run_bytes(scenario, policy))


def check_accesses(scenario: Scenario) -> None:
    """UserError: counting accesses takes more than there is."""
    workers, samples = scenario.system.workers, scenario.dataset.samples
    _check(scenario, "--accesses", _orders_bytes(scenario) + COUNTED_BYTES * workers * samples)


def run_bytes(scenario: Scenario, policy: str) -> int:
    """At the most, about."""
    workers, dataset = scenario.system.workers, scenario.dataset
    parts = workers * dataset.iterations * dataset.epochs
    needed = _orders_bytes(scenario) + PART_BYTES * parts
    if POLICIES[policy].places:
        needed += PLACED_BYTES * workers * dataset.samples
    if POLICIES[policy].serves:
        needed += SERVED_BYTES * (2 + len(scenario.system.storage)) * parts
    return needed


def _orders_bytes(scenario: Scenario) -> int:
    dataset = scenario.dataset
    kept = min(KEPT_BYTES_MOST, SHUFFLED_BYTES * dataset.samples * dataset.epochs)
    return SAMPLE_BYTES * dataset.samples + kept


def _check(scenario: Scenario, what: str, needed_bytes: int) -> None:
    usable_bytes = usable_memory_bytes()
    if needed_bytes > usable_bytes:
        raise UserError(
            f"{scenario.name}, {what}: needs about {format_bytes(needed_bytes)} of memory for "
            f"{scenario.system.workers:,} workers, {scenario.dataset.samples:,} samples, batches "
            f"of {scenario.dataset.batch_size:,}; {format_bytes(usable_bytes)} are free"
        )
