"""Results for people (tables) and for machines (JSON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from hintsd.simulator.accesses import Accesses
from hintsd.simulator.catalogue import Entry, published_s
from hintsd.simulator.figures.grid import GB, Grid
from hintsd.simulator.run import Result
from hintsd.simulator.system import Scenario


def seconds(value: float) -> str:
    """With as many digits as say something: 7.27, 3826.7, 19123."""
    value = max(value, 0.0) if value > -0.01 else value  # rounding of sums
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def table(scenario: Scenario, results: Sequence[Result], published: bool) -> Group:
    """Of one scenario, times in seconds: the run time and its parts, then what goes on beside
    computing; two tables, so that a terminal of 80 columns shows them. published: beside the
    published run times.
    """
    parts = ["start-up", "compute", "barrier", "stall"]
    times = _figures(["run time s", *(["paper s", "ratio"] if published else []), *parts])
    sources = list(dict.fromkeys(name for result in results for name in result.fetch_s))
    beside = _figures(["staging s", *(f"{name} s" for name in sources), "PFS GB"])
    refused = []
    for result in results:
        if result.refused is not None:
            refused.append(f"{result.policy}: refused: {result.refused}")
            continue
        cells = [seconds(result.total_s)]
        if published:
            known = published_s(result.scenario, result.policy)
            cells += (
                ["", ""] if known is None else [seconds(known), f"{result.total_s / known:.3f}"]
            )
        spent = (result.startup_s, result.compute_s, result.barrier_s, result.stall_s)
        times.add_row(result.policy, *cells, *map(seconds, spent))
        beside.add_row(
            result.policy,
            seconds(result.write_s),
            *(seconds(result.fetch_s[name]) if name in result.fetch_s else "" for name in sources),
            f"{result.read_mb.get('PFS', 0.0) / GB:.2f}",
        )
    shown: list[RenderableType] = [f"{scenario.name}: {scenario.title}", times, "", beside]
    return Group(*shown, *refused)


def _figures(titles: Sequence[str]) -> Table:
    """A column of policies and those of figures, none of which is cut."""
    made = Table(box=None, pad_edge=False, collapse_padding=True)
    made.add_column("policy", no_wrap=True)
    for title in titles:
        made.add_column(title, justify="right", overflow="fold")
    return made


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Stable keys: docs/SIMULATOR.md."""
    return [
        {
            "scenario": result.scenario,
            "policy": result.policy,
            "refused": result.refused,
            "published_s": published_s(result.scenario, result.policy),
            "total_s": None if result.refused else result.total_s,
            "startup_s": result.startup_s,
            "compute_s": result.compute_s,
            "barrier_s": result.barrier_s,
            "stall_s": result.stall_s,
            "write_s": result.write_s,
            "fetch_s": result.fetch_s,
            "read_mb": result.read_mb,
        }
        for result in results
    ]


def scenarios(items: Sequence[Scenario]) -> Table:
    """The built-in ones."""
    shown = Table("scenario", "workers", "samples", "GB", "epochs", "", box=None)
    for column in shown.columns[1:5]:
        column.justify = "right"
    for item in items:
        shown.add_row(
            item.name,
            str(item.system.workers),
            f"{item.dataset.samples:,}",
            f"{item.dataset.expected_mb / GB:,.1f}",
            str(item.dataset.epochs),
            item.title,
        )
    return shown


def policies(entries: Mapping[str, Entry]) -> Table:
    """All of them."""
    shown = Table("policy", "", box=None)
    for name, entry in entries.items():
        shown.add_row(name, entry.about)
    return shown


def grid(found: Grid) -> tuple[str, Table, Table]:
    """Run times in hours."""
    bound = f"{found.scenario}, {found.policy}: lower bound {found.lower_bound_s / 3600:.2f} h"
    staging = Table("staging buffer", "hours", box=None)
    for point in found.staging:
        staging.add_row(f"{point.staging_mb / GB:g} GB", _hours(point.total_s))
    columns = dict.fromkeys(point.ssd_mb for point in found.storage)
    storage = Table("hours", *(f"SSD {ssd_mb / GB:g} GB" for ssd_mb in columns), box=None)
    hours = {(point.ram_mb, point.ssd_mb): _hours(point.total_s) for point in found.storage}
    for ram_mb in dict.fromkeys(point.ram_mb for point in found.storage):
        cells = [hours[ram_mb, ssd_mb] for ssd_mb in columns]
        storage.add_row(f"RAM {ram_mb / GB:g} GB", *cells)
    return bound, staging, storage


def _hours(total_s: float | None) -> str:
    return "refused" if total_s is None else f"{total_s / 3600:.2f}"


def accesses(found: Sequence[Accesses]) -> Table:
    """Estimated and drawn."""
    shown = Table(
        "workers", "epochs", "samples", "read more than", "estimated", "drawn, by worker", box=None
    )
    for one in found:
        shown.add_row(
            str(one.workers),
            f"{one.epochs:,}",
            f"{one.samples:,}",
            f"{one.threshold:g} times",
            f"{one.estimated:.1f}",
            " ".join(map(str, one.drawn)),
        )
    return shown


def accesses_json(found: Sequence[Accesses]) -> list[dict[str, Any]]:
    """Stable keys: docs/SIMULATOR.md."""
    return [
        {
            "workers": one.workers,
            "epochs": one.epochs,
            "samples": one.samples,
            "delta": one.delta,
            "threshold": one.threshold,
            "estimated": one.estimated,
            "drawn": one.drawn,
            "histogram": one.histogram.tolist(),
            "expected": one.expected.tolist(),
        }
        for one in found
    ]
