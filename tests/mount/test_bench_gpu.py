"""The benchmark's row gpu, with a tiny network on the processor: it measures, and it ends."""

from __future__ import annotations

import itertools
import os
import time
import types
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import SUBPROCESS_WITH_TORCH, run_with_torch
from tests.support.tool_commands import fork_commands
from tools.bench import gpu, gpu_reader, hints
from tools.bench.processes import processor_s
from tools.bench.readers import Readers
from tools.bench.results import Results
from tools.bench.rows import Bench
from tools.demo_lib import dataset

_PEERS = ("stock", "fusecache")
_SMALL = gpu.Setting(
    *("cpu", "tiny"),
    pixels=16,
    batch=4,
    workers=2,
    ahead_times=2,
    limit_s=60,
    peers=_PEERS,
    decoders=("workers",),
)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    said: list[str] = []
    return Bench(tmp_path, Readers(tmp_path), (), True, Results(), said.append, asked_rounds=1)


def test_the_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_commands(monkeypatch)
    monkeypatch.setattr(hints, "subprocess", SUBPROCESS_WITH_TORCH)
    read: list[tuple[object, list[int]]] = []

    def reader(module: str, told: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        epochs = hints.run_reader(module, told, timeout_s)
        read.append((told["hints"], [epoch["samples"] for epoch in epochs]))
        return epochs

    monkeypatch.setattr(gpu, "run_reader", reader)
    monkeypatch.setattr(hints, "_SETTLE_S", 0.0)
    gpu.measure(bench, _SMALL)
    assert _SMALL.images == 32
    assert read == [(False, [32, 32]), (True, [32, 32])]

    def median(work: str, peer: str) -> float:
        series = bench.results.get("gpu", f"decode in workers{work}", peer)
        assert series is not None
        return series.median

    for peer, epoch in itertools.product(_PEERS, ("first epoch", "later epochs")):
        assert 0 < median(f", {epoch}: AU", peer) < 1
        assert median(f", {epoch}: first step", peer) > 0
        assert median(f", {epoch}: speed", peer) > 0
    assert median(": CPU of the workers", "stock") > 0
    assert median(": CPU of the mount", "stock") == 0 < median(": CPU of the mount", "fusecache")
    (note,) = bench.results.notes
    assert note.startswith("gpu: tiny on cpu, 32 JPEG files of ")
    assert note.endswith(" KB in batches of 4, 2 workers")


@pytest.mark.parametrize("decode", gpu.DECODERS)
def test_an_epoch_has_every_sample(tmp_path: Path, decode: str) -> None:
    size_bytes = dataset.make(tmp_path, 10, 0).size_bytes
    work = {"root": str(tmp_path), "images": 10, "seed": 0, "batch": 4, "workers": 2}
    work |= {"prefetch_factor": 2, "pixels": 16, "device": "cpu", "decode": decode, "limit_s": 60}
    loader, classes = gpu_reader._loader(work)
    trainer = gpu_reader.Trainer("tiny", classes, 16, "cpu")
    trainer.warm_up(4)
    for _ in range(2):
        epoch = gpu_reader._epoch(loader, trainer, 60)
        assert (epoch["samples"], epoch["bytes"]) == (10, size_bytes)
        assert epoch["is_whole"]
        assert 0 < epoch["first_compute_s"] < epoch["compute_s"] < epoch["seconds"]
        assert epoch["first_compute_s"] < epoch["first_step_s"] < epoch["seconds"]
    assert not gpu_reader._epoch(loader, trainer, 0)["is_whole"], "left behind the first batch"


def test_without_cuda_it_is_left_out(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = types.SimpleNamespace(run=lambda words, **_: run_with_torch(words, 60))
    monkeypatch.setattr(gpu, "subprocess", run)
    gpu.gpu(bench)
    assert bench.results.notes == ["gpu: no CUDA device here: left out"]
    assert list(bench.work.iterdir()) == [bench.work / "reader"]


def test_processor_time_of_a_process() -> None:
    before, begin = processor_s([os.getpid()]), time.process_time()
    while time.process_time() - begin < 0.3:
        pass
    assert processor_s([os.getpid(), os.getpid()]) - before == pytest.approx(0.3, abs=0.15)
    assert processor_s([2**22 + 1]) == 0
