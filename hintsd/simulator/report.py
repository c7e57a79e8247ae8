"""Results for people (tables) and for machines (JSON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hintsd.simulator.accesses import Accesses
from hintsd.simulator.catalogue import Entry, published_s
from hintsd.simulator.grid import GB, Grid
from hintsd.simulator.run import Result
from hintsd.simulator.system import Scenario


def seconds(value: float) -> str:
    """With as many digits as say something: 7.27, 3826.7, 19123."""
    value = max(value, 0.0) if value > -0.01 else value  # rounding of sums
    return f"{value:.2f}" if value < 1000 else f"{value:.1f}" if value < 10_000 else f"{value:.0f}"


def table(scenario: Scenario, results: Sequence[Result], published: bool) -> Table:
    """Of one scenario, times in seconds. published: beside the published run times."""
    shown = Table(title=f"{scenario.name}: {scenario.title}", title_justify="left", box=None)
    shown.add_column("policy")
    columns = ["run time s"]
    if published:
        columns += ["published s", "ratio"]
    columns += ["start-up", "compute", "barrier", "stall", "staging s"]
    sources = list(dict.fromkeys(name for result in results for name in result.fetch_s))
    columns += [f"{name} s" for name in sources] + ["PFS GB", ""]
    for column in columns:
        shown.add_column(column, justify="right" if column else "left")
    for result in results:
        known = published_s(result.scenario, result.policy)
        if result.refused is not None:
            blank = [""] * (len(columns) - 1)
            shown.add_row(result.policy, *blank, f"refused: {result.refused}")
            continue
        cells = [seconds(result.total_s)]
        if published:
            cells += (
                [seconds(known), f"{result.total_s / known:.3f}"] if known is not None else ["", ""]
            )
        cells += [
            seconds(value)
            for value in (
                result.startup_s,
                result.compute_s,
                result.barrier_s,
                result.stall_s,
                result.write_s,
            )
        ]
        cells += [
            seconds(result.fetch_s[name]) if name in result.fetch_s else "" for name in sources
        ]
        cells.append(f"{result.read_mb.get('PFS', 0.0) / GB:.2f}")
        shown.add_row(result.policy, *cells)
    return shown


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
        staging.add_row(f"{point.staging_mb / GB:g} GB", f"{point.total_s / 3600:.2f}")
    columns = dict.fromkeys(point.ssd_mb for point in found.storage)
    storage = Table("hours", *(f"SSD {ssd_mb / GB:g} GB" for ssd_mb in columns), box=None)
    hours = {(point.ram_mb, point.ssd_mb): point.total_s / 3600 for point in found.storage}
    for ram_mb in dict.fromkeys(point.ram_mb for point in found.storage):
        cells = [f"{hours[ram_mb, ssd_mb]:.2f}" for ssd_mb in columns]
        storage.add_row(f"RAM {ram_mb / GB:g} GB", *cells)
    return bound, staging, storage


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
