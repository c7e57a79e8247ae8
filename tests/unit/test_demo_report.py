"""The demo's table, as a pipe or a file gets it."""

from __future__ import annotations

import io

from rich.console import Console

from tools.demo_lib import report
from tools.demo_lib.training import Epoch


def test_a_pipe_gets_whole_columns_and_what_each_epoch_is_read_from() -> None:
    epoch = Epoch(1000, 13.6, 12.1, (2.76,), 0.1875, "")
    rows = [report.Row("hinted", number, "RAM", epoch, 109_200_000, 201) for number in (1, 2)]
    last = "no epoch follows; until then reorder: first epoch"
    layouts = [report.Layout("reorder", "first epoch"), report.Layout("log", last)]
    out = io.StringIO()
    console = Console(file=out, width=report.WIDTH)
    report.print_table(console, rows, report.Log("reorder", layouts, 1.0), [])
    lines = out.getvalue().splitlines()
    assert "…" not in out.getvalue()
    assert any("late" in line and "acc." in line for line in lines)
    assert "    after epoch 1: reorder, because: first epoch" in lines
    assert (
        "    after epoch 2: epoch 2 is read from the log; none comes after it: nothing is written"
    ) in lines
