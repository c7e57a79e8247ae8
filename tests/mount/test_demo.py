"""The demo, end to end, with few images: see tools/demo for the one that is worth looking at."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tests.support.commands import run_with_torch
from tests.support.mounted import ROOT
from tools.demo_lib import dataset
from tools.demo_lib.origin import LATENCY_S, slow_origin
from tools.slow_origin import forget_files


def test_your_own_images(tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    dataset.make(data, 60, 0)
    command = [sys.executable, "-m", "tools.demo_lib", "--data", str(data), "--images", "48"]
    done = run_with_torch([*command, "--out", str(out), "--work-dir", str(tmp_path)], 400, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: 3 of 3 checks" in done.stdout
    told = json.loads((out / "demo.json").read_text())
    assert [(row["reader"], row["epoch"]) for row in told["rows"]] == [
        (reader, epoch) for reader in ("direct", "mount", "hinted") for epoch in (1, 2, 3)
    ]
    assert {row["result"]["samples"] for row in told["rows"]} == {48}
    assert told["headline"] in (out / "table.txt").read_text()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "out"]


def test_the_slow_origin_takes_its_time_and_goes(tmp_path: Path) -> None:
    with slow_origin(tmp_path, 10, 0, lambda text: None) as origin:
        files = sorted(path.relative_to(origin.behind) for path in origin.behind.rglob("*.jpg"))
        begin = time.monotonic()
        for file in files:
            assert (origin.directory / file).read_bytes() == (origin.behind / file).read_bytes()
        assert time.monotonic() - begin >= len(files) * 3 * LATENCY_S, "look-up, open, read"
        assert origin.device is not None, "tests run as root"
        before = origin.device.bytes_read()
        forget_files(origin.behind / file for file in files)
        size_bytes = sum(len((origin.directory / file).read_bytes()) for file in files)
        assert origin.device.bytes_read() - before >= size_bytes
    assert not any(path.is_mount() for path in tmp_path.iterdir())
    assert not list(tmp_path.rglob("*.jpg"))
