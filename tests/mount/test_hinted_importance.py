"""An importance-sampled training through a mount: each epoch is hinted, whatever its length."""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

import hintsd
from hintsd.client import client, link, warning
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import FILE_BYTES, make_dataset
from tests.support.hintsd_support import DaemonProcess
from tests.support.mounted import eventually
from tests.support.trainer import Trainer
from tests.support.trees import random_bytes

SCHEMES: Final[list[dict[str, Any]]] = [
    {"scheme": "shade", "draw_ahead": 1},
    {"scheme": "loss"},
    {"scheme": "icache", "fraction": 0.5, "draw_ahead": 1},
]


@pytest.fixture
def daemon(place: Place) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base, "--ram", "4M")
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(warning, "_warned", set())
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 20.0)
    monkeypatch.setattr(client, "ASKED_TIMEOUT_S", 20.0)


class Files(Dataset[int]):
    """Sample i is i, if its file has its bytes."""

    def __init__(self, paths: list[Path], names: list[Path], file_bytes: int = FILE_BYTES) -> None:
        self._paths, self._names, self._file_bytes = paths, names, file_bytes

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> int:
        data = self._paths[index].read_bytes()
        assert data == random_bytes(str(self._names[index]), self._file_bytes), index
        return index


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
@pytest.mark.filterwarnings("ignore:hintsd. the connection was lost")
@pytest.mark.parametrize("settings", SCHEMES)
def test_each_epoch_is_hinted(
    place: Place,
    mounting: Mounting,
    daemon: DaemonProcess,
    settings: dict[str, Any],
) -> None:
    """One job, which hintsd never takes for wrong: also where a file comes twice an epoch, and
    where an epoch is shorter than the one before. Amid the second epoch hintsd is killed, amid the
    third the mount's server: whoever comes next knows orders, scores and place again.
    """
    names = make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    paths = [mount.path / name for name in names]
    sampler = hintsd.ImportanceSampler(len(paths), **settings)
    loader = DataLoader(Files(paths, names), batch_size=4, sampler=sampler, num_workers=2)
    with hintsd.attach(loader, paths=paths) as job:
        for epoch in range(4):
            read = 0
            for number, batch in enumerate(loader):
                if (epoch, number) == (1, 5):
                    daemon.kill()
                    daemon.start()
                if (epoch, number) == (2, 5):
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


FEW, KILLED_AT, READ = 240, 80, 150  # files, batches: amid the second epoch, and a later one


@in_one_mode
@pytest.mark.parametrize("settings", SCHEMES)
def test_a_trainer_that_is_killed_goes_on(
    place: Place,
    mounting: Mounting,
    daemon: DaemonProcess,
    settings: dict[str, Any],
) -> None:
    """From its last state: it reads what a training that was never killed would have read, and is
    hinted, beside nothing of the job that died.
    """
    names = make_dataset(place, FEW)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    paths = [mount.path / name for name in names]

    def train(loader: Any, sampler: hintsd.ImportanceSampler) -> Iterator[list[int]]:
        while True:
            epoch = sampler.epoch
            for batch in map(np.asarray, loader):
                sampler.learn(np.sin(batch * (epoch + 1.0)) ** 2)
                yield batch.tolist()

    def begin(state: Any) -> tuple[Iterator[list[int]], Any, hintsd.Job]:
        sampler = hintsd.ImportanceSampler(len(paths), **settings)
        if state is not None:
            sampler.load_state_dict(state)
        data = Files(paths, names)
        loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
        job = hintsd.attach(loader, paths=paths)
        eventually(lambda: job.name is not None)
        return train(loader, sampler), sampler, job

    unhurt = hintsd.ImportanceSampler(len(paths), **settings)
    everything: Any = range(len(paths))
    whole = train(DataLoader(everything, batch_size=4, sampler=unhurt), unhurt)
    expected = list(itertools.chain(*itertools.islice(whole, READ)))
    with Trainer(begin) as killed:
        killed.read(KILLED_AT)
        assert killed.order == expected[: len(killed.order)]
        eventually(lambda: daemon.job(killed.job)["scores_age_s"] is not None)
    with Trainer(begin, killed.state) as resumed:
        resumed.read(READ - KILLED_AT)
        assert killed.order + resumed.order == expected
        eventually(lambda: [*daemon.jobs()] == [resumed.job])

        def is_hinted() -> bool:
            told = daemon.job(resumed.job)
            is_followed = told["state"] == "running" and (told["epoch"] or 0) >= 2
            return is_followed and told["not_late"] > 0 and told["scores_age_s"] is not None

        eventually(is_hinted)


LARGE_BYTES, LARGE_FILES, CACHE = 40_000, 900, "16M"  # SSD takes less than half of them


class Cached:
    """A training through a mount whose cache takes half of the dataset, and what it is told."""

    def __init__(
        self,
        place: Place,
        mounting: Mounting,
        daemon: DaemonProcess,
        monkeypatch: pytest.MonkeyPatch,
        **settings: Any,
    ) -> None:
        names = [Path(f"c/{n:04}.jpg") for n in range(LARGE_FILES)]
        for name in names:
            os.utime(place.write(str(name), random_bytes(str(name), LARGE_BYTES)), (1e9, 1e9))
        self.mount = mounting("--hintsd", daemon.path, "--ram", "16M", "--ssd", CACHE)
        self.daemon, self.settings = daemon, settings
        self.sampler = hintsd.ImportanceSampler(LARGE_FILES, **settings)
        paths = [self.mount.path / name for name in names]
        data = Files(paths, names, LARGE_BYTES)
        self.loader = DataLoader(data, batch_size=10, sampler=self.sampler, num_workers=1)
        self.job = hintsd.attach(self.loader, paths=paths)
        self.masks: list[Any] = []  # what was told, at each draw
        asked = client.Job.cached

        def ask(job: hintsd.Job, *, staged: bool) -> Any:
            self.masks.append(asked(job, staged=staged))
            return self.masks[-1]

        monkeypatch.setattr(client.Job, "cached", ask)
        self.losses = np.zeros(LARGE_FILES)
        self.read: list[list[int]] = []  # of each epoch

    def train(self) -> tuple[int, int]:
        """An epoch: its reads of what was not cached when it was drawn, and the files that the
        origin was asked for. Losses are each sample's own, and fall."""
        before, read = self.origin_files(), []
        for batch in map(np.asarray, self.loader):
            self.losses[batch] = np.sin(batch + 1.0) ** 2 / (1 + len(self.read))
            self.sampler.learn(self.losses[batch])
            read += batch.tolist()
            time.sleep(0.005)  # it trains
        self.read.append(read)
        mask = self.masks[-1] if self.masks else np.zeros(LARGE_FILES, np.bool_)
        eventually(self.is_idle)
        return int((~mask[read]).sum()), self.origin_files() - before

    def is_told(self, substituted: int, h_list: int) -> None:
        """`hintsd status` has it."""

        def look() -> bool:
            told = self.daemon.job(str(self.job.name))
            return (told["substituted"], told["h_list"]) == (substituted, h_list)

        eventually(look)

    def origin_files(self) -> int:
        return int(self.mount.value("origin", "files"))

    def is_idle(self) -> bool:
        [mount] = self.daemon.status()["mounts"]
        return not any(mount[name] for name in ("queued_stage", "queued_fetch", "in_flight"))


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
def test_what_is_cached_stands_for_what_is_not(
    place: Place, mounting: Mounting, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """iCACHE's substitution: attach alone tells the sampler what is cached. Bytes, losses and
    coverage are the read samples' own."""
    training = Cached(
        place, mounting, daemon, monkeypatch,
        scheme="icache", fraction=0.5, h_share=0.3, substitute="low", coverage=4,
    )  # fmt: skip
    training.train()
    total = 0
    assert training.masks == []  # the warm-up reads all
    for epoch in range(1, 6):
        uncached, fetched = training.train()
        substituted = training.sampler.report().substituted
        told = epoch, uncached, fetched, substituted
        total += substituted
        assert len(set(training.read[-1])) == LARGE_FILES // 2
        # without it, so many more would have been fetched
        assert fetched <= uncached + 0.05 * LARGE_FILES, told
        training.is_told(substituted, training.sampler.report().h_list)
        assert training.losses.astype(np.float32).tolist() == (
            training.sampler.state_dict()["scores"]["values"].tolist()
        )
    for begin in range(2):
        assert len(set(itertools.chain(*training.read[begin : begin + 4]))) == LARGE_FILES
    assert len(training.masks) == 5
    assert total > 0.3 * LARGE_FILES


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
def test_what_is_cached_is_repeated(
    place: Place, mounting: Mounting, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SHADE's PADS with repetition, while the accuracy rises."""
    training = Cached(place, mounting, daemon, monkeypatch, scheme="loss", repeat=3.0)
    for epoch in range(4):
        uncached, fetched = training.train()
        training.sampler.judge(0.1 * epoch)
        repeats = training.sampler.report().repeats
        told = epoch, uncached, fetched, repeats
        assert fetched <= uncached + 0.05 * LARGE_FILES, told
        if epoch < 2:  # nothing has risen yet
            continue
        assert repeats > 0.1 * LARGE_FILES, told
        mask, times = training.masks[-1], Counter(training.read[-1])
        assert np.mean([times[n] for n in times if mask[n]]) > 2.5
