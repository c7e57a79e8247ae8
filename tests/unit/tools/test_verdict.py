"""tools/simulate/run: what it holds against the documents and the published figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hintsd.simulator import catalogue
from hintsd.simulator.accesses import Accesses, binomial
from hintsd.simulator.figures.grid import Grid, Point
from hintsd.simulator.run import Result
from tools.simulate import stated, verdict
from tools.simulate.stated import Stated

ROOT = Path(__file__).resolve().parents[3]
TEXT = """
# Other
| a | b |
| --- | --- |
| `x` | 1 |

# This
Words.

| a | b | paper | paper |
| --- | --: | --- | --- |
| `x` | 1,200.5 (0.99) | 7 | 8 |
| y | refused | | |

| a | b |
| --- | --- |
| z | 3 |
"""


def test_a_table_is_found_by_a_line_above_it() -> None:
    assert stated.table(TEXT, "# This") == {
        ("x", "b"): "1,200.5 (0.99)",
        ("x", "paper"): "7",
        ("y", "b"): "refused",
        ("y", "paper"): "",
    }
    assert stated.table(TEXT, "# None") == {}
    assert stated.numbers("1,200.5 (0.99) · 7 GB") == [1200.5, 0.99, 7]


@pytest.mark.parametrize(
    ("found", "differing"),
    [
        ({("x", "b"): [1200.5, 0.99], ("y", "b"): []}, 0),
        ({("x", "b"): [1205.0, 0.99]}, 0),
        ({("x", "b"): [1220.0, 0.99]}, 1),
        ({("x", "b"): [1200.5, 1.1]}, 1),
        ({("x", "b"): []}, 1),
        ({("y", "b"): [3.0]}, 1),
        ({("z", "b"): [3.0]}, 1),  # nothing was compared
    ],
)
def test_what_differs_is_named(found: stated.Cells, differing: int) -> None:
    count, lines = Stated("A.md", "# This", found, 0.05, 0.01).differences(TEXT)
    assert len(lines) == differing
    assert all(line.startswith("A.md") for line in lines)
    assert count == len({("x", "b"), ("y", "b")} & found.keys())


def as_published() -> verdict.Found:
    """Nothing but what HDMLP's authors found."""
    results = []
    for name in catalogue.PUBLISHED:
        for policy in catalogue.POLICIES:
            total_s = catalogue.published_s(name, policy)
            ours = policy in ("fusecache", "pool")
            refused = None if total_s or ours else "too large"
            results.append(Result(name, policy, total_s=total_s or 1.0, refused=refused))
    points = [Point(1024.0, 0.0, 0.0, 2.76 * 3600)] * 3
    storage = [Point(4096.0, 0.0, 0.0, 2.76 * 3600)]
    expected = binomial(2, 0.5)
    counts = Accesses(2, 2, 1, 0.1, 1.0, 323.0, [], expected.astype(int), expected)
    return verdict.Found(
        results, Grid("x", "frequency", 2.13 * 3600, points, storage), counts, [], []
    )


def test_published_figures_are_met_or_named(tmp_path: Path) -> None:
    found = as_published()
    figures = [*verdict.run_times(found.run_times), *verdict.others(found)]
    assert len(figures) == 28 + 5
    assert all(figure.met for figure in figures)
    assert verdict.refusals(found.run_times) == []
    slow = [replace(result, total_s=result.total_s * 1.06) for result in found.run_times]
    assert not any(figure.met for figure in verdict.run_times(slow))
    willing = [replace(result, refused=None) for result in found.run_times]
    assert len(verdict.refusals(willing)) == 2


def test_pools_are_stated_as_seconds_and_datasets() -> None:
    read_mb = {"PFS": 3.0, "remote RAM": 12.0}
    results = [
        Result("imagenet-22k", "perfect", 7.0),
        Result("imagenet-22k, 1,024 workers", "pool", 9.0, read_mb=read_mb),
        Result("imagenet-1k", "pool", 11.0, read_mb=read_mb),
    ]
    *_, pools = verdict.simulator_tables(replace(as_published(), run_times=results))
    assert pools.found == {
        ("perfect", "4 workers"): [7.0, 0.0],
        ("pool", "1,024 workers"): [9.0, 1.0],
    }
    stated_there = stated.table((ROOT / "docs" / pools.document).read_text(), pools.line)
    assert stated_there.keys() >= pools.found.keys()


def test_published_hit_ratios_are_met_to_their_last_digit() -> None:
    cells = [
        {"cache_share": 0.2, "hit_ratio": 0.0247, "reported_hit_ratio": 0.02},
        {"cache_share": 0.6, "hit_ratio": 0.245, "reported_hit_ratio": 0.23},
        {"cache_share": 0.8, "hit_ratio": 0.5, "reported_hit_ratio": None},
    ]
    row = {"label": "LRU", "policy": "lru", "reported_times_lru": None, "cells": cells}
    found = list(verdict.hit_ratios([{"name": "icache-16", "rows": [row]}]))
    assert [figure.met for figure in found] == [True, False]
    assert found[1].line == "icache-16 LRU, % at 60 %: published 23, here 24.5"


def test_the_verdict_names_what_is_missed() -> None:
    """The documents' tables, of which this run has the published scenarios only."""
    found = as_published()
    worse = list(found.run_times)
    worse[1] = replace(worse[1], total_s=100.0)
    judged = verdict.judge(replace(found, run_times=worse), ROOT / "docs")
    assert "not within 5 %: fits-ram naive, s: published 27.78, here 100" in judged.missed
    assert any(
        line.startswith("not as stated: SIMULATOR.md, '## Measured beside published', naive")
        for line in judged.missed
    )
    assert judged.lines[-1] == f"MISSED: the {len(judged.missed)} above"
