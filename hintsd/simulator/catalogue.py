"""All policies by name, what was published of them, and how one is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hintsd.simulator import clairvoyant, rivals
from hintsd.simulator.orders import Orders
from hintsd.simulator.pool import pool
from hintsd.simulator.run import Progress, Refusal, Result, Run
from hintsd.simulator.system import Scenario


@dataclass(frozen=True, slots=True)
class Entry:
    """published_s: run times of HDMLP's authors for the scenarios fits-ram, fits-worker and
    fits-cluster; None where their simulator refuses or there is none. places: whether it keeps a
    table of all samples for each worker. serves: whether it counts what each worker serves.
    """

    run: Callable[[Run], None]
    published_s: tuple[float | None, float | None, float | None] = (None, None, None)
    places: bool = False
    serves: bool = False

    @property
    def about(self) -> str:
        """What it does: the first sentences of its docstring."""
        return " ".join((self.run.__doc__ or "").split())


PUBLISHED: Final = ("fits-ram", "fits-worker", "fits-cluster")

POLICIES: Final[dict[str, Entry]] = {
    "perfect": Entry(rivals.perfect, (7.30, 3825.66, 7655.25)),
    "naive": Entry(rivals.naive, (27.78, 15130.54, 30272.96)),
    "staging-buffer": Entry(rivals.staging_buffer, (10.24, 4982.27, 9945.29)),
    "deepio-ordered": Entry(rivals.deepio_ordered, (8.41, 4433.27, 23948.24)),
    "deepio-opportunistic": Entry(rivals.deepio_opportunistic, (8.40, 4432.90, 8487.42)),
    "parallel-staging": Entry(rivals.parallel_staging, (10.11, 4972.65, 9313.58)),
    "lbann-dynamic": Entry(rivals.lbann_dynamic, (7.71, 4051.12, None)),
    "lbann-preloading": Entry(rivals.lbann_preloading, (8.41, 4433.27, None)),
    "locality-aware": Entry(rivals.locality_aware, (8.41, 4433.27, 9314.33)),
    "frequency": Entry(clairvoyant.frequency, (7.78, 3836.12, 7661.26), places=True),
    "fusecache": Entry(clairvoyant.fusecache, places=True),
    "pool": Entry(pool, serves=True),
}


def simulate(
    scenario: Scenario, policy: str, orders: Orders, progress: Progress | None = None
) -> Result:
    """One policy of POLICIES.

    orders: of the scenario's dataset and workers. progress: called with the share that is done, 0
    to 1. A policy that cannot run the scenario says why in `Result.refused`.
    """
    run = Run(scenario, orders, policy, progress)
    try:
        POLICIES[policy].run(run)
    except Refusal as refusal:
        return Result(scenario.name, policy, refused=str(refusal))
    return run.finish()


def published_s(scenario: str, policy: str) -> float | None:
    """The run time that HDMLP's authors give, seconds."""
    if scenario not in PUBLISHED:
        return None
    return POLICIES[policy].published_s[PUBLISHED.index(scenario)]
