"""Trainings with a ChunkedSampler through a mount whose cache takes a part of the dataset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import hintsd
from hintsd.client import client, link, warning
from hintsd.orders.spec import OrderSpec
from hintsd.sampling.chunks import Ring
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted_importance import Files
from tests.support import trainer
from tests.support.hintsd_support import DaemonProcess
from tests.support.mounted import Mount, eventually
from tests.support.trees import random_bytes

FILES, FILE_BYTES, CHUNKS, BATCH = 400, 80_000, 10, 5
NAMES = [Path(f"c/{n:04}.jpg") for n in range(FILES)]
WHOLE = list(range(FILES))
CHUNK_OF = {
    index: chunk
    for chunk in range(CHUNKS)
    for index in Ring(FILES, CHUNKS, 0, 1, 0).share(chunk, 0).tolist()
}


@pytest.fixture
def daemon(place: Place) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base, "--ram", "6M")
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture
def mount(place: Place, mounting: Mounting, daemon: DaemonProcess) -> Mount:
    for name in NAMES:
        os.utime(place.write(str(name), random_bytes(str(name), FILE_BYTES)), (1e9, 1e9))
    return mounting("--hintsd", daemon.path, "--ram", "16M", "--ssd", "16M")


@pytest.fixture(autouse=True)
def _is_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(warning, "_warned", set())
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 20.0)
    ask = client.Job.next_chunk
    monkeypatch.setattr(
        client.Job, "next_chunk", lambda job, unread, chunks: ask(job, unread, chunks, 20.0)
    )


class Training:
    """Reads a batch at a time; each sample is i, if its file has its bytes."""

    def __init__(self, mount: Mount, seed: int, workers: int = 1, state: Any = None) -> None:
        paths = [mount.path / name for name in NAMES]
        data = Files(paths, NAMES, FILE_BYTES)
        self.sampler = hintsd.ChunkedSampler(data, BATCH, seed=seed, chunks=CHUNKS)
        if state is not None:
            self.sampler.load_state_dict(state)
        self.loader = DataLoader(data, BATCH, sampler=self.sampler, num_workers=workers)
        self.job = hintsd.attach(self.loader, paths=paths)
        self.told: dict[int, list[int]] = {}  # of each epoch, last
        announce = self.job.announce

        def hear(epoch: int, spec: OrderSpec) -> None:
            assert spec.indices is not None
            self.told[epoch] = spec.indices.tolist()
            announce(epoch, spec)

        self.job.announce = hear  # type: ignore[method-assign]
        eventually(lambda: self.job.name is not None)

    def read(self) -> Iterator[list[int]]:
        """Batch by batch, for ever. What was told last of an epoch is what is read."""
        while True:
            epoch, read = self.sampler.epoch, list[int]()
            for batch in self.loader:
                read += batch.tolist()
                assert self.told[epoch][: len(read)] == read
                assert self.job.state != "wrong", self.job
                yield batch.tolist()


class Trainer(trainer.Trainer):
    """A Training in a process of its own."""

    def __init__(self, mount: Mount, seed: int, workers: int = 0, state: Any = None) -> None:
        def begin(state: Any) -> tuple[Iterator[list[int]], Any, hintsd.Job]:
            training = Training(mount, seed, workers, state)
            return training.read(), training.sampler, training.job

        super().__init__(begin, state)

    @property
    def chunk(self) -> int:
        """Where it is."""
        return CHUNK_OF[self.order[-1]]


@in_one_mode
def test_trainings_read_the_same_chunk_at_a_time(mount: Mount, daemon: DaemonProcess) -> None:
    """One that comes late goes where the other one is; one that is slower stays beside it. Each
    reads each file once an epoch, as was told, and no hint is wrong: also where hintsd dies amid a
    chunk."""
    epoch, chunk = FILES // BATCH, FILES // BATCH // CHUNKS
    with Trainer(mount, 1) as first:
        first.read(4 * chunk + 1)
        with Trainer(mount, 2) as second:
            second.read(1)
            assert (second.chunk - first.chunk) % CHUNKS in (0, 1, CHUNKS - 1)
            apart = list[int]()
            for number in range(2 * epoch):
                first.read(1)
                if number % 4 < 3:
                    second.read(1)
                distance = (first.chunk - second.chunk) % CHUNKS
                apart.append(min(distance, CHUNKS - distance))
                if number == epoch // 2 + 2:
                    daemon.kill()
                    daemon.start()
                    eventually(lambda: len(daemon.jobs()) == 2)
                    # both trainings are there again, and who asks
                    eventually(lambda: daemon.status()["connections"] >= 3)
            for trainer in (first, second):
                for start in range(0, len(trainer.order) - FILES + 1, FILES):
                    assert sorted(trainer.order[start : start + FILES]) == WHOLE
                assert daemon.job(trainer.job)["state"] == "running"
    assert sum(one <= 1 for one in apart) >= 0.7 * len(apart), apart


@in_one_mode
def test_a_trainer_that_is_killed_amid_a_chunk_goes_on_beside_the_others(
    mount: Mount, daemon: DaemonProcess
) -> None:
    """It reads exactly what it has not read, whatever its workers held and where the other is."""
    epoch, chunk = FILES // BATCH, FILES // BATCH // CHUNKS
    with Trainer(mount, 1) as other:
        other.read(chunk)
        with Trainer(mount, 7, 2) as killed:
            killed.read(3 * chunk + 2)
        other.read(6 * chunk)
        at = other.chunk
        with Trainer(mount, 7, 2, killed.state) as resumed:
            resumed.read(epoch - 3 * chunk - 2)
            assert sorted(killed.order + resumed.order) == WHOLE
            walked = [CHUNK_OF[index] for index in resumed.order[::BATCH]]
            assert walked[0] == killed.chunk  # the rest of it
            assert walked[chunk - 2] in (at, at + 1), (walked, at)
            resumed.read(chunk)
            assert len(set(resumed.order[-FILES // CHUNKS :])) == FILES // CHUNKS
            for job in (other.job, resumed.job):
                assert daemon.job(job)["state"] != "wrong", daemon.status()
