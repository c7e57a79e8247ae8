"""NoPFS as a peer of the benchmark, where it is not installed: tools/bench/nopfs and its reader."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import SUBPROCESS_WITH_TORCH
from tools.bench import budgets, hints
from tools.bench.hints import run_module
from tools.bench.nopfs_reader import configuration
from tools.bench.readers import Readers
from tools.bench.results import Results
from tools.bench.rows import Bench

_MIB = 1 << 20
_HDMLP = """
class Job:
    def __init__(self, root, batch, epochs, scheme, drop_last, **options):
        assert (scheme, drop_last, options["seed"]) == ("uniform", False, 6)
        assert options["libhdmlp_path"].endswith("/libhdmlp.so")
        self.batch, self.storage = batch, open(options["config_path"]).read()
"""
_HDMLP_TORCH = """
import mmap, os, torch
class HDMLPDatasetFolder:
    def __init__(self, root, job, transform):
        assert torch._six.string_classes is str
        file = open(job.storage + "/0_0", "wb+")
        file.write(bytes(9000))
        file.flush()
        self.mapped, self.size = mmap.mmap(file.fileno(), 9000), transform
        self.job = job
class HDMLPDataLoader:
    def __init__(self, dataset, collate_fn):
        self.dataset, self.collate = dataset, collate_fn
    def __iter__(self):
        sizes = [self.dataset.size(self.dataset.mapped[begin:]) for begin in range(0, 9000, 1000)]
        for begin in range(0, 9, self.dataset.job.batch):
            yield self.collate([(size, 0) for size in sizes[begin:begin + self.dataset.job.batch]])
"""


def test_the_configuration_has_the_budgets_in_whole_mib() -> None:
    text = configuration(2.1 * _MIB, 17.4 * _MIB, 0.2 * _MIB, Path("/ssd/here"))
    assert re.findall(r"capacity: (\d+)", text) == ["3", "17", "1"]
    assert re.findall(r"\bthreads: (\d+)", text) == ["4", "2", "2"]
    assert re.findall(r'backend: "(\w+)"', text) == ["memory", "filesystem"]
    assert 'path = "/ssd/here"' in text
    assert "distributed_threads = 0;" in text
    bandwidths = [int(found) for found in re.findall(r"bw[ :=]+(\d+)", text)]
    assert bandwidths[1] > bandwidths[2] > bandwidths[3], "RAM, SSD, origin"


def test_each_epoch_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "subprocess", SUBPROCESS_WITH_TORCH)
    package = tmp_path / "source" / "hdmlp"
    (package / "lib" / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text(_HDMLP)
    (package / "lib" / "torch" / "__init__.py").write_text(_HDMLP_TORCH)
    storage, config = tmp_path / "ssd", tmp_path / "config"
    storage.mkdir()
    config.write_text(str(storage))
    work = {"built": tmp_path, "root": tmp_path, "config": config, "storage": storage}
    told = {name: str(path) for name, path in work.items()}
    told |= {"seed": 5, "epochs": 3, "batch": 4, "device": ""}  # type: ignore[dict-item]
    epochs = json.loads(run_module("tools.bench.nopfs_reader", told=json.dumps(told)).stdout)
    assert [epoch["samples"] for epoch in epochs] == [9, 9, 9]
    assert [epoch["bytes"] for epoch in epochs] == [45_000] * 3
    assert epochs[0]["setup_s"] > 10 * epochs[1]["setup_s"]
    assert all(epoch["seconds"] >= epoch["setup_s"] for epoch in epochs)


def test_rows_go_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NOPFS_SOURCE", str(tmp_path / "nowhere"))
    said: list[str] = []
    bench = Bench(tmp_path, Readers(tmp_path), (), True, Results(), said.append)
    assert budgets.built_nopfs(bench) is None
    log = tmp_path / "fusecache-bench/nopfs/log"
    why = f"cannot fetch branch old-nopfs of {tmp_path}/nowhere (see {log})"
    assert said == [f"NoPFS is left out: {why}"]
    assert bench.results.notes == [f"NoPFS was left out: {why}"]


def test_help_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = subprocess.run([budgets.NOPFS_BUILD, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: tools/bench/nopfs" in done.stdout
    assert not list(tmp_path.iterdir())
