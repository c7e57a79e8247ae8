"""An importance-sampled training through a mount: each epoch is hinted, whatever its length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

import hintsd
from hintsd.client import link, warning
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import make_dataset
from tests.support.hintsd_support import DaemonProcess
from tests.support.mounted import eventually


@pytest.fixture
def daemon(place: Place) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base, "--ram", "4M")
    daemon.start()
    yield daemon
    daemon.kill()


class Files(Dataset[int]):
    """Sample i is i, read from its file."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> int:
        assert self._paths[index].read_bytes()
        return index


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "shade"},
        {"scheme": "shade", "draw_ahead": 1},
        {"scheme": "loss"},
        {"scheme": "icache", "fraction": 0.5},
        {"scheme": "icache", "fraction": 0.5, "draw_ahead": 1},
    ],
)
def test_each_epoch_is_hinted(
    place: Place,
    mounting: Mounting,
    daemon: DaemonProcess,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    """One job, which hintsd never takes for wrong: also where a file comes twice an epoch, and
    where an epoch is shorter than the one before."""
    monkeypatch.setattr(warning, "_warned", set())
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 20.0)
    names = make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    paths = [mount.path / name for name in names]
    sampler = hintsd.ImportanceSampler(len(paths), **settings)
    loader = DataLoader(Files(paths), batch_size=4, sampler=sampler, num_workers=2)
    with hintsd.attach(loader, paths=paths) as job:
        for epoch in range(4):
            read = 0
            for batch in loader:
                sampler.learn(np.sin(batch.numpy() * (epoch + 1.0)) ** 2)
                read += len(batch)
                assert job.state != "wrong", job
            assert read == len(paths) * (0.5 if epoch and settings["scheme"] == "icache" else 1)

            def is_there(epoch: int = epoch) -> None:
                told = daemon.job(str(job.name))
                assert (job.state, told["epoch"] >= epoch) == ("hinted", True), told

            eventually(is_there)
        assert daemon.jobs() == [job.name]
        assert daemon.job(str(job.name))["not_late"] > len(paths)
    assert sampler.report().refused == 0
    mount.umount("--force")
