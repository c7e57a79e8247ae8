"""What people see of replays: a table a trace, policies down, capacities across; and the JSON.

A policy that answers other items than asked for has two figures: "31.2 + 20.4" are 31.2 % hits and
20.4 % of the reads answered by another item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from fusecache.base.command import printable
from fusecache.base.units import format_bytes
from fusecache.traces.traces import Trace
from hintsd.lab.replay import Outcome


@dataclass(frozen=True, slots=True)
class Result:
    """All outcomes of one trace."""

    name: str
    """Of the trace: its file."""
    trace: Trace
    warm_up_epochs: int
    outcomes: Sequence[Outcome]


MEASURES: Final[dict[str, tuple[str, Callable[[Outcome], str]]]] = {
    "hits": ("hits, % of reads (+ answered by another item)", lambda outcome: hits(outcome)),
    "bytes": (
        "hits, % of bytes (+ answered by another item)",
        lambda outcome: percents(outcome.byte_hit_ratio, outcome.substituted_byte_ratio),
    ),
    "origin": ("read from the origin", lambda outcome: format_bytes(outcome.origin_bytes)),
    "evictions": ("evictions", lambda outcome: f"{outcome.evictions:,}"),
}


def hits(outcome: Outcome) -> str:
    """Hit ratio in percent, what was substituted apart."""
    return percents(outcome.hit_ratio, outcome.substituted_ratio)


def percents(hit_ratio: float, substituted_ratio: float) -> str:
    text = _percent(hit_ratio)
    return f"{text} + {_percent(substituted_ratio)}" if substituted_ratio else text


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f}"


def tables(result: Result, measures: Sequence[str]) -> RenderableType:
    """The trace in a line, and a table a measure; one table of all measures for one capacity."""
    by_cell = {(outcome.policy, outcome.capacity_bytes): outcome for outcome in result.outcomes}
    policies = list(dict.fromkeys(policy for policy, _ in by_cell))
    capacities = list(dict.fromkeys(capacity for _, capacity in by_cell))
    parts: list[RenderableType] = [*_headline(result), ""]
    if len(capacities) == 1:
        outcomes = [by_cell[policy, capacities[0]] for policy in policies]
        share = f"{100 * outcomes[0].capacity_share:.3g} %"
        rows = [
            (outcome.policy, *(show(outcome) for _, show in MEASURES.values()))
            for outcome in outcomes
        ]
        titles = [title for title, _ in MEASURES.values()]
        heading = f"cache {format_bytes(capacities[0])}, {share} of the bytes"
        parts += [heading, table(["policy", *titles], rows), ""]
        return Group(*parts)
    shares = [by_cell[policies[0], capacity].capacity_share for capacity in capacities]
    columns = [f"{100 * share:.3g} %" for share in shares]
    for measure in measures:
        title, show = MEASURES[measure]
        rows = [
            (policy, *(show(by_cell[policy, capacity]) for capacity in capacities))
            for policy in policies
        ]
        parts += [f"{title}, by cache size", table(["policy", *columns], rows), ""]
    return Group(*parts)


def _headline(result: Result) -> list[str]:
    trace = result.trace
    lines = [
        printable(f"{result.name}: {trace.source}"),
        f"{len(trace.items):,} reads of {len(trace.sizes):,} items "
        f"({format_bytes(int(trace.sizes.sum()))}), {len(trace.epoch_starts)} epochs"
        + (f", the first {result.warm_up_epochs} not counted" if result.warm_up_epochs else ""),
    ]
    if not trace.is_complete:
        lines.append("the recording was cut off: later reads may be missing")
    if trace.gaps:
        lost = sum(gap.lost or 0 for gap in trace.gaps)
        lines.append(f"reads are missing in {len(trace.gaps)} places, {lost:,} or more")
    return lines


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The first column to the left, figures to the right."""
    made = Table(box=None, pad_edge=False)
    for number, title in enumerate(titles):
        made.add_column(
            title, justify="right" if number else "left", overflow="fold", no_wrap=not number
        )
    for row in rows:
        made.add_row(*row)
    return made


def as_json(results: Sequence[Result], seed: int) -> dict[str, Any]:
    """One object; docs/LAB.md lists the keys."""
    return {
        "seed": seed,
        "traces": [
            {
                "name": printable(result.name),
                "source": printable(result.trace.source),
                "reads": len(result.trace.items),
                "items": len(result.trace.sizes),
                "bytes": int(result.trace.sizes.sum()),
                "epochs": len(result.trace.epoch_starts),
                "warm_up_epochs": result.warm_up_epochs,
                "complete": result.trace.is_complete and not result.trace.gaps,
                "outcomes": [
                    asdict(outcome)
                    | {
                        "hit_ratio": outcome.hit_ratio,
                        "byte_hit_ratio": outcome.byte_hit_ratio,
                        "substituted_ratio": outcome.substituted_ratio,
                    }
                    for outcome in result.outcomes
                ],
            }
            for result in results
        ],
    }
