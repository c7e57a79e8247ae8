"""Whether a run has reproduced what was published, and what the documents state.

Run times that were published are to be met within 5 %. Hit ratios that were published are of other
networks and data: those that are met (within 5 %, or half a unit of the last digit printed) are
counted, the others listed, and docs/LAB.md says why; what it states of them is to be met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hintsd.simulator import catalogue, scenario
from hintsd.simulator.accesses import Accesses
from hintsd.simulator.figures.grid import GB, Grid
from hintsd.simulator.run import Result
from tools.simulate.stated import Stated

TOLERANCE: Final = 0.05
LOWER_BOUND_H: Final = 2.13
STAGING_H: Final = 2.76
READ_OFTEN: Final = 323
"""HDMLP 6.2 (fits-cluster, any staging buffer) and 3.2 (samples that are read more often)."""
COLUMNS: Final = {"shuffle.trace": "shuffles", "rank.trace": "rank", "zipf.trace": "Zipf"}
POOLED: Final = "imagenet-22k"
POOLED_WORKERS: Final = (64, 1024)
"""Of the table of pools in docs/SIMULATOR.md, which has those of the scenario first."""
SHARES: Final = ("10 %", "20 %", "50 %")
"""Of docs/POLICIES.md."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a run has found; replays and figures as docs/LAB.md lists the keys."""

    run_times: Sequence[Result]
    what_if: Grid
    accesses: Accesses
    replays: Sequence[dict[str, Any]]
    figures: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Figure:
    """Of a paper. half_unit: of the last digit that the paper prints."""

    name: str
    published: float
    here: float
    half_unit: float = 0.0

    @property
    def met(self) -> bool:
        allowed = max(TOLERANCE * self.published, self.half_unit)
        return abs(self.here - self.published) <= allowed

    @property
    def line(self) -> str:
        return f"{self.name}: published {self.published:g}, here {self.here:.4g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """lines: for people, the last one says it all. missed: what should have been met."""

    lines: list[str]
    missed: list[str]


def judge(found: Found, documents: Path) -> Verdict:
    """documents: the folder that has SIMULATOR.md, LAB.md and POLICIES.md."""
    simulated = [*run_times(found.run_times), *others(found)]
    ratios = list(hit_ratios(found.figures))
    missed = [f"not within 5 %: {figure.line}" for figure in simulated if not figure.met]
    missed += refusals(found.run_times)
    compared = 0
    for stated in (*simulator_tables(found), *laboratory_tables(found)):
        count, lines = stated.differences((documents / stated.document).read_text())
        compared += count
        missed += [f"not as stated: {line}" for line in lines]
    explained = [figure.line for figure in ratios if not figure.met]
    worst = max(abs(figure.here / figure.published - 1) for figure in simulated)
    lines = [
        "Published hit ratios that are not reproduced, for the reasons in docs/LAB.md:",
        *explained,
        "",
        f"published figures of the simulator: {len(simulated)}, the worst differs by {worst:.1%}",
        f"published hit ratios: {len(ratios)}, of which {len(ratios) - len(explained)} reproduced",
        f"cells of docs/SIMULATOR.md, LAB.md and POLICIES.md that were compared: {compared:,}",
        *missed,
    ]
    if missed:
        lines.append(f"MISSED: the {len(missed)} above")
    else:
        lines.append(
            f"OK: all {len(simulated)} published figures of the simulator reproduced within 5 %, "
            f"{len(ratios) - len(explained)} of {len(ratios)} published hit ratios, the others as "
            "docs/LAB.md explains"
        )
    return Verdict(lines, missed)


def run_times(results: Sequence[Result]) -> Iterator[Figure]:
    """The published ones."""
    for result in results:
        published_s = catalogue.published_s(result.scenario, result.policy)
        if published_s is not None:
            yield Figure(f"{result.scenario} {result.policy}, s", published_s, result.total_s)


def refusals(results: Sequence[Result]) -> list[str]:
    """Runs that are refused there and not here, or the other way."""
    return [
        f"{result.scenario} {result.policy}: refused by only one of here and there"
        for result in results
        if result.scenario in catalogue.PUBLISHED
        if catalogue.POLICIES[result.policy].published_s[0] is not None
        if (catalogue.published_s(result.scenario, result.policy) is None) != bool(result.refused)
    ]


def others(found: Found) -> Iterator[Figure]:
    """What else HDMLP's text gives."""
    yield Figure("what-if lower bound, h", LOWER_BOUND_H, found.what_if.lower_bound_s / 3600)
    for point in found.what_if.staging:
        hours = (point.total_s or 0.0) / 3600
        yield Figure(f"what-if staging {point.staging_mb / GB:g} GB, h", STAGING_H, hours)
    yield Figure("samples read more often", READ_OFTEN, found.accesses.estimated)


def hit_ratios(figures: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    """Of SHADE's and iCACHE's figures; iCACHE counts what it substitutes."""
    for figure in figures:
        for number, row in enumerate(figure["rows"]):
            name = f"{figure['name']} {row['label']}"
            if number and row["reported_times_lru"] is not None:
                yield Figure(f"{name}, × LRU", row["reported_times_lru"], row["times_lru"])
            for cell in row["cells"]:
                if cell["reported_hit_ratio"] is None:
                    continue
                here = cell["hit_ratio"]
                if row["policy"] == "icache":
                    here += cell["substituted_ratio"]
                share = f"{100 * cell['cache_share']:g} %"
                yield Figure(
                    f"{name}, % at {share}", 100 * cell["reported_hit_ratio"], 100 * here, 0.5
                )


def simulator_tables(found: Found) -> Iterator[Stated]:
    measured: dict[tuple[str, str], list[float]] = {}
    volumes: dict[tuple[str, str], list[float]] = {}
    for result in found.run_times:
        key = (result.policy, result.scenario)
        published_s = catalogue.published_s(result.scenario, result.policy)
        if result.refused is not None:
            measured[key] = volumes[key] = []
            continue
        ratio = [] if published_s is None else [result.total_s / published_s]
        measured[key] = [result.total_s, *ratio]
        volumes[key] = [result.total_s, result.read_mb.get("PFS", 0.0) / GB]
    yield Stated("SIMULATOR.md", "## Measured beside published", measured, 0.0, 0.01)
    yield Stated("SIMULATOR.md", "## The paper's own scenarios", volumes, 0.6, 0.01)
    hours = {
        (
            f"RAM {point.ram_mb / GB:g} GB" if point.ram_mb else "no RAM",
            f"SSD {point.ssd_mb / GB:g} GB" if point.ssd_mb else "no SSD",
        ): [(point.total_s or 0.0) / 3600]
        for point in found.what_if.storage
    }
    yield Stated("SIMULATOR.md", "## What if", hours, 0.0, 0.01)
    yield Stated("SIMULATOR.md", "## A pool", dict(_pooled(found.run_times)), 0.006, 0.01)


def _pooled(results: Sequence[Result]) -> Iterator[tuple[tuple[str, str], list[float]]]:
    """Seconds, and how many datasets all workers together read from the shared file system."""
    first = scenario.load(POOLED)
    columns = {first.with_workers(workers).name: workers for workers in POOLED_WORKERS}
    columns[first.name] = first.system.workers
    for result in results:
        if result.scenario in columns and result.refused is None:
            read_mb = sum(result.read_mb.values())
            share = result.read_mb.get("PFS", 0.0) / read_mb if read_mb else 0.0
            cell = [result.total_s, first.dataset.epochs * share]
            yield (result.policy, f"{columns[result.scenario]:,} workers"), cell


def laboratory_tables(found: Found) -> Iterator[Stated]:
    """Hit ratios within 1 % of the reads: torch computes a little differently elsewhere."""
    policies: dict[tuple[str, str], list[float]] = {}
    for trace in found.replays:
        by_share = {}
        for outcome in trace["outcomes"]:
            share = f"{outcome['capacity_share']:.0%}".replace("%", " %")
            by_share[outcome["policy"], share] = _percents(outcome)
        if trace["name"] in COLUMNS:
            for policy in {policy for policy, _ in by_share}:
                policies[policy, COLUMNS[trace["name"]]] = [
                    percent for share in SHARES for percent in by_share[policy, share]
                ]
        if trace["name"].startswith(("shuffle", "digits")) and "coarse" not in trace["name"]:
            yield Stated("LAB.md", f"`{trace['name']}`", by_share, 1.0, 0.0)
    yield Stated("POLICIES.md", "## Hit ratios", policies, 1.0, 0.0)
    for figure in found.figures:
        rows: dict[tuple[str, str], list[float]] = {}
        for row in figure["rows"]:
            rows[row["label"], "× LRU at 10 %"] = [row["times_lru"]]
            for cell in row["cells"]:
                rows[row["label"], f"{100 * cell['cache_share']:g} %"] = _percents(cell)
        yield Stated("LAB.md", f"## {figure['title'].partition(':')[0]}", rows, 1.0, 0.02)


def _percents(cell: dict[str, Any]) -> list[float]:
    """As the tables show them: what is substituted apart, if anything is."""
    ratios = [cell["hit_ratio"], cell["substituted_ratio"]]
    return [100 * ratio for ratio in ratios[: 1 + bool(ratios[1])]]
