"""Trainings with a ChunkedSampler through a mount whose cache takes a part of the dataset."""

from __future__ import annotations

import multiprocessing
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
        eventually(lambda: self.job.name)
        self.epochs: list[list[int]] = []
        self._batches = self._read()

    def _read(self) -> Iterator[None]:
        while True:
            self.epochs.append([])
            for batch in self.loader:
                self.epochs[-1] += batch.tolist()
                yield

    def read(self, batches: int) -> None:
        for _ in range(batches):
            next(self._batches)
            assert self.job.state != "wrong", self.job

    @property
    def chunk(self) -> int:
        """Where it is."""
        return CHUNK_OF[self.epochs[-1][-1]]


@in_one_mode
@pytest.mark.filterwarnings("error:hintsd")
@pytest.mark.filterwarnings("ignore:hintsd. the connection was lost")
def test_trainings_read_the_same_chunk_at_a_time(mount: Mount, daemon: DaemonProcess) -> None:
    """One that comes late goes where the other one is; one that is slower stays beside it. Each
    reads each file once an epoch, as was told, and no hint is wrong: also where hintsd dies amid a
    chunk."""
    epoch, chunk = FILES // BATCH, FILES // BATCH // CHUNKS
    first = Training(mount, 1)
    first.read(4 * chunk + 1)
    second = Training(mount, 2)
    second.read(1)
    assert second.chunk in (first.chunk, first.chunk + 1)
    apart = list[int]()
    for number in range(2 * epoch):
        first.read(1)
        if number % 4 < 3:
            second.read(1)
        apart.append(
            min((first.chunk - second.chunk) % CHUNKS, (second.chunk - first.chunk) % CHUNKS)
        )
        if number == epoch // 2 + 2:
            daemon.kill()
            daemon.start()
            eventually(lambda: {first.job.state, second.job.state} == {"hinted"})
    assert max(apart) <= 3, apart
    assert sum(one <= 1 for one in apart) >= 0.7 * len(apart), apart
    for training in (first, second):
        training.job.close()
        for number, read in enumerate(training.epochs):
            assert training.told[number][: len(read)] == read
            assert sorted(training.told[number]) == WHOLE
    assert (len(first.epochs), len(second.epochs)) == (3, 2)


class Trainer:
    """A training in a process of its own, from `state` on. No job is its parent's."""

    def __init__(self, mount: Mount, seed: int, workers: int = 0, state: Any = None) -> None:
        fork = multiprocessing.get_context("fork")
        self._ours, theirs = fork.Pipe()
        self._process = fork.Process(target=_train, args=(theirs, mount, seed, workers, state))
        self._process.start()
        theirs.close()
        self.order: list[int] = []
        self.state, self.job = state, ""

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def read(self, batches: int) -> None:
        for _ in range(batches):
            self._ours.send("on")
            batch, self.state, self.job = self._ours.recv()
            self.order += batch


def _train(pipe: Any, mount: Mount, seed: int, workers: int, state: Any) -> None:
    training = Training(mount, seed, workers, state)
    while pipe.recv():
        training.read(1)
        pipe.send((training.epochs[-1][-BATCH:], training.sampler.state_dict(), training.job.name))


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
        at = CHUNK_OF[other.order[-1]]
        with Trainer(mount, 7, 2, killed.state) as resumed:
            resumed.read(epoch - 3 * chunk - 2)
            assert sorted(killed.order + resumed.order) == WHOLE
            walked = [CHUNK_OF[index] for index in resumed.order[::BATCH]]
            assert walked[0] == CHUNK_OF[killed.order[-1]]  # the rest of its chunk
            assert walked[chunk - 2] in (at, at + 1), (walked, at)
            resumed.read(chunk)
            assert len(set(resumed.order[-FILES // CHUNKS :])) == FILES // CHUNKS
            for job in (other.job, resumed.job):
                assert daemon.job(job)["state"] != "wrong", daemon.status()
