"""What a server counts and measures: declared once, read at one moment."""

from __future__ import annotations

from typing import Any

import pytest

from fusecache import _native
from fusecache.base import metrics
from fusecache.base.metrics import DECLARED, Counter, FrontCounter, Gauge, Metrics


def test_counters_begin_at_zero_and_add_up() -> None:
    counted = Metrics()
    assert counted.read()[metrics.REQUESTS] == 0
    counted.add(metrics.REQUESTS)
    counted.add(metrics.REQUESTS, 4)
    assert counted.read()[metrics.REQUESTS] == 5
    assert counted.read()[metrics.FROM_SSD] == 0


def test_what_is_not_declared_is_not_counted() -> None:
    wrong: Any
    for wrong in ("requests", metrics.DEPTH, Counter("requests", "READs", "another")):
        with pytest.raises(KeyError):
            Metrics().add(wrong)


def test_each_is_declared_once() -> None:
    names = [metric.name for metric in DECLARED]
    assert len(set(names)) == len(names)
    assert all(metric.unit and metric.help for metric in DECLARED)
    assert {type(metric): metric.kind for metric in DECLARED} == {
        Counter: "counter", FrontCounter: "counter", Gauge: "gauge",
    }  # fmt: skip


def test_all_counters_of_the_c_part_are_declared() -> None:
    of_c = [metric.of_c for metric in DECLARED if isinstance(metric, FrontCounter)]
    assert sorted(of_c) == sorted(_native.counters())


def test_all_is_read_at_one_moment() -> None:
    asked, depth = 0, 3

    def front() -> dict[str, int]:
        nonlocal asked
        asked += 1
        return dict.fromkeys(_native.counters(), 7)

    counted = Metrics(front)
    counted.watch(metrics.DEPTH, lambda: depth)
    assert counted.read()[metrics.DEPTH] == 3
    depth = 4
    now = counted.read()
    assert (now[metrics.DEPTH], now[metrics.FRONT_WAITED], now[metrics.FRONT_SLOW]) == (4, 7, 7)
    assert asked == 2
    assert metrics.INODES not in now  # nobody says
