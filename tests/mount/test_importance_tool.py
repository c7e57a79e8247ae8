"""tools/importance, end to end, with few images: see there for the one that is worth looking at."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.support.commands import run_with_torch
from tests.support.mounted import ROOT


def test_it_compares_five_trainings_and_leaves_nothing(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    command = [sys.executable, "-m", "tools.importance_lib", "--images", "64", "--epochs", "2"]
    command += ["--judged", "20"]
    command += ["--out", str(out), "--work-dir", str(work)]
    done = run_with_torch(command, 500, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DONE: 5 trainings" in done.stdout
    assert "RuntimeWarning: hintsd" not in done.stderr
    told = json.loads((out / "importance.json").read_text())
    reads = {
        training["reader"]: [row["result"]["samples"] for row in training["rows"]]
        for training in told["trainings"]
    }
    plain = [64, 64]
    assert reads == {
        "direct": plain,
        "uniform": plain,
        "shade": plain,
        "icache": [64, 45],
        "ours": plain,
    }
    files = {
        training["reader"]: sum(row["origin_files"] or 0 for row in training["rows"])
        for training in told["trainings"]
    }
    assert files.pop("direct") == 0
    assert all(64 <= count <= 71 for count in files.values()), files  # all fits
    assert told["headline"] in (out / "table.txt").read_text()
    assert (out / "importance.png").stat().st_size > 10_000
    assert list(work.iterdir()) == []
