"""The demo's table and headline, as a pipe or a file gets them, and its verdict."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from tools.demo_lib import __main__ as demo
from tools.demo_lib import report
from tools.demo_lib.training import Epoch

_EPOCH = Epoch(1000, 10.0, 7.5, (2.76,), 0.5, "ab")
_WAITING_S = {"direct": 7.5, "mount": 5.0, "hinted": 0.25}


def _rows() -> list[report.Row]:
    return [
        report.Row(reader, number, replace(_EPOCH, waiting_s=waiting_s), 109_200_000)
        for reader, waiting_s in _WAITING_S.items()
        for number in (1, 2)
    ]


def test_a_pipe_gets_whole_columns_and_the_headline() -> None:
    out = io.StringIO()
    report.print_table(Console(file=out, width=report.WIDTH), _rows(), [])
    assert "…" not in out.getvalue()
    lines = out.getvalue().splitlines()
    assert any("busy" in line and "MB from the origin" in line and "acc." in line for line in lines)
    assert lines[-1] == "accelerator busy: direct 25 %, mount 50 %, hinted 98 %"


def test_plot_and_json_are_of_all_readers(tmp_path: Path) -> None:
    rows = [*_rows(), report.Row("hinted", 3, _EPOCH, None)]
    report.save_plot(tmp_path / "demo.png", rows, "about")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    report.save_json(tmp_path / "demo.json", rows, [], {})
    told = json.loads((tmp_path / "demo.json").read_text())
    assert told["headline"] == "accelerator busy: direct 25 %, mount 50 %, hinted 73 %"
    assert len(told["rows"]) == 7


def _failed(is_slow: bool = True, mismatches: int = 0, **changed: Epoch) -> list[str]:
    rows = [replace(row, result=changed.get(row.reader, row.result)) for row in _rows()]
    found: Any = mock.Mock(rows=rows, statuses={"mount": {"integrity": {"mismatches": mismatches}}})
    found.trained = {
        reader: [row.result for row in rows if row.reader == reader] for reader in _WAITING_S
    }
    return [check.claim for check in demo._compare(found, is_slow) if not check.holds]


def test_the_verdict() -> None:
    assert _failed() == []
    bytes_differ = replace(_EPOCH, waiting_s=0.25, delivered="cd")
    assert _failed(hinted=bytes_differ) == ["every reader got the same bytes in the same order"]
    learned_otherwise = replace(_EPOCH, losses=(2.75,))
    assert _failed(mount=learned_otherwise) == ["every network learned the same, to the last bit"]
    assert _failed(mismatches=1) == ["no cached block failed its checksum"]
    as_slow = replace(_EPOCH, waiting_s=7.5)
    assert _failed(hinted=as_slow) == [
        "hinted keeps the accelerator busier than direct",
        "hinted keeps the accelerator busier than mount",
    ]
    assert _failed(is_slow=False, hinted=as_slow) == [], "your data, at its own speed"
