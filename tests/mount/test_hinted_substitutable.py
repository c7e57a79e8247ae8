"""Trainings with a SubstitutableSampler through a mount whose cache takes a part of the dataset."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import hintsd
from hintsd.client import client, link, warning
from hintsd.client.importance import substitutable
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted_importance import CACHE, Files
from tests.support.hintsd_support import DaemonProcess
from tests.support.mounted import Mount, eventually
from tests.support.trees import random_bytes

FILES, FILE_BYTES = 450, 80_000  # SSD takes less than half of them
BATCH, LOOK_AHEAD, EPOCHS = 5, 10, 3


@pytest.fixture
def daemon(place: Place) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base, "--ram", "12M")
    daemon.start()
    yield daemon
    daemon.kill()


class Trainings:
    """Side by side, in step, with seeds of their own; sample i is i, if its file has its bytes."""

    def __init__(
        self,
        place: Place,
        mounting: Mounting,
        daemon: DaemonProcess,
        monkeypatch: pytest.MonkeyPatch,
        *,
        workers: int,
        look_ahead: int = LOOK_AHEAD,
        count: int = 1,
    ) -> None:
        monkeypatch.setattr(warning, "_warned", set())
        monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 20.0)
        asked = client.Job.cached
        monkeypatch.setattr(  # however busy the machine is
            client.Job, "cached", lambda job, *, staged: asked(job, 20.0, staged=staged)
        )
        monkeypatch.setattr(substitutable, "LATE_S", 20.0)
        names = [Path(f"c/{n:04}.jpg") for n in range(FILES)]
        for name in names:
            os.utime(place.write(str(name), random_bytes(str(name), FILE_BYTES)), (1e9, 1e9))
        self.mount: Mount = mounting("--hintsd", daemon.path, "--ram", "16M", "--ssd", CACHE)
        self.daemon = daemon
        paths = [self.mount.path / name for name in names]
        data = Files(paths, names, FILE_BYTES)
        self.samplers = [
            hintsd.SubstitutableSampler(data, BATCH, seed=seed, look_ahead=look_ahead)
            for seed in range(count)
        ]
        self.loaders = [
            DataLoader(data, BATCH, sampler=sampler, num_workers=workers)
            for sampler in self.samplers
        ]
        self.jobs = [hintsd.attach(loader, paths=paths) for loader in self.loaders]
        self.fetched: list[int] = []  # files, in each epoch
        eventually(lambda: all(job.name for job in self.jobs))

    def train(self, on_batch: Any = None) -> list[list[int]]:
        """What each reads of an epoch; before each batch `on_batch` is called with its number."""
        before = self.origin_files()
        read: list[list[int]] = [[] for _ in self.loaders]
        for number, batches in enumerate(itertools.zip_longest(*self.loaders)):
            if on_batch is not None:
                on_batch(number)
            for order, batch in zip(read, batches, strict=True):
                order += batch.tolist()
            assert all(job.state != "wrong" for job in self.jobs), self.jobs
        eventually(self.is_idle)
        self.fetched.append(self.origin_files() - before)
        return read

    def close(self) -> None:
        for job in self.jobs:
            job.close()

    def origin_files(self) -> int:
        return int(self.mount.value("origin", "files"))

    def is_idle(self) -> bool:
        mounts = self.daemon.status()["mounts"]
        return bool(mounts) and not any(
            mounts[0][name] for name in ("queued_stage", "queued_fetch", "in_flight")
        )


def plain(seed: int, epoch: int) -> list[int]:
    sampler = hintsd.SubstitutableSampler(FILES, BATCH, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_once_and_never_a_wrong_hint(
    place: Place,
    mounting: Mounting,
    daemon: DaemonProcess,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    """What is cached comes earlier, no sample is further from its place than ten batches, and no
    file is fetched twice an epoch for it (but a few, as without it, where readers come first)."""
    training = Trainings(place, mounting, daemon, monkeypatch, workers=workers)
    drifted = 0  # samples that are not in their place, where the machine lets hintsd answer in time
    for epoch in range(EPOCHS):
        (read,) = training.train()
        assert sorted(read) == list(range(FILES))
        place_of = {index: at for at, index in enumerate(plain(0, epoch))}
        drift = [abs(at - place_of[index]) for at, index in enumerate(read)]
        assert max(drift) < LOOK_AHEAD * BATCH
        drifted += sum(one > 0 for one in drift)
        assert training.fetched[-1] <= 1.2 * FILES, training.fetched
    assert drifted > FILES / 10, "it did look ahead"
    # SSD has less than half, RAM a tenth or more of the rest
    assert max(training.fetched[1:]) <= 0.8 * FILES, training.fetched
    training.close()


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
@pytest.mark.filterwarnings("ignore:hintsd. the connection was lost")
@pytest.mark.parametrize("is_started_again", [False, True])
def test_hintsd_dies_amid_an_epoch(
    place: Place,
    mounting: Mounting,
    daemon: DaemonProcess,
    monkeypatch: pytest.MonkeyPatch,
    is_started_again: bool,
) -> None:
    """Each sample is read once all the same; the next hintsd is told the order as it is read."""
    training = Trainings(place, mounting, daemon, monkeypatch, workers=1)
    training.train()

    def kill(number: int) -> None:
        if number == 30:
            daemon.kill()
            if is_started_again:
                daemon.start()

    monkeypatch.setattr(training, "is_idle", lambda: True)
    (read,) = training.train(kill)
    assert sorted(read) == list(range(FILES))
    if is_started_again:
        eventually(lambda: training.jobs[0].state == "hinted")
    (read,) = training.train()
    assert sorted(read) == list(range(FILES))
    if is_started_again:
        assert read != plain(0, 2)
        eventually(lambda: daemon.job(str(training.jobs[0].name))["epoch"] >= 2)  # 3: at its end
    training.close()


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
def test_two_trainings_fetch_no_more_than_plain_shuffles(
    place: Place,
    mounting: Mounting,
    daemon: DaemonProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files of the origin, together; how many fewer, row substitution says."""
    training = Trainings(place, mounting, daemon, monkeypatch, workers=2, count=2)
    for _ in range(EPOCHS):
        for read in training.train():
            assert sorted(read) == list(range(FILES))
    training.close()
    assert max(training.fetched[1:]) <= FILES, training.fetched
