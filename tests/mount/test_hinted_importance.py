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
from tests.mount.test_hinted import FILE_BYTES, make_dataset
from tests.support.hintsd_support import DaemonProcess
from tests.support.mounted import eventually
from tests.support.trees import random_bytes


@pytest.fixture
def daemon(place: Place) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base, "--ram", "4M")
    daemon.start()
    yield daemon
    daemon.kill()


class Files(Dataset[int]):
    """Sample i is i, if its file has its bytes."""

    def __init__(self, paths: list[Path], names: list[Path]) -> None:
        self._paths, self._names = paths, names

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> int:
        data = self._paths[index].read_bytes()
        assert data == random_bytes(str(self._names[index]), FILE_BYTES), index
        return index


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
@pytest.mark.filterwarnings("ignore:hintsd. the connection was lost")
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
    where an epoch is shorter than the one before. Amid the third epoch hintsd is killed, amid the
    fourth the mount's server: whoever comes next knows orders, scores and place again.
    """
    monkeypatch.setattr(warning, "_warned", set())
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 20.0)
    names = make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    paths = [mount.path / name for name in names]
    sampler = hintsd.ImportanceSampler(len(paths), **settings)
    loader = DataLoader(Files(paths, names), batch_size=4, sampler=sampler, num_workers=2)
    with hintsd.attach(loader, paths=paths) as job:
        for epoch in range(5):
            read = 0
            for number, batch in enumerate(loader):
                if (epoch, number) == (2, 5):
                    daemon.kill()
                    daemon.start()
                if (epoch, number) == (3, 5):
                    mount.kill_server()
                sampler.learn(np.sin(batch.numpy() * (epoch + 1.0)) ** 2)
                read += len(batch)
                assert job.state != "wrong", job
            assert read == len(paths) * (0.5 if epoch and settings["scheme"] == "icache" else 1)

            def is_there(epoch: int = epoch) -> None:
                assert job.state == "hinted"
                told = daemon.job(str(job.name))
                assert (told["epoch"] or 0) >= epoch, told
                assert told["scores_age_s"] is not None, told

            eventually(is_there)
        [name] = daemon.jobs()
        told = daemon.job(name)
        assert told["not_late"] > len(paths) // 2, told
        assert 0 <= told["hits"] <= 1, told
    assert sampler.report().refused == 0
    mount.umount("--force")
