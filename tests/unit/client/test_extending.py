"""Datasets and samplers that say themselves what is read, or whose classes were registered."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Sampler, Subset  # noqa: E402

import hintsd  # noqa: E402
from hintsd.client.known import extending  # noqa: E402
from tests.support.fake_hintsd import FakeHintsd  # noqa: E402

LENGTH = 20


@pytest.fixture(autouse=True)
def daemon(fake_hintsd: FakeHintsd) -> FakeHintsd:
    return fake_hintsd


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


class Telling(Numbers):
    def __hintsd_paths__(self) -> list[str]:
        return [f"/data/told/{index}" for index in range(LENGTH)]


class ByEpoch(Sampler[int]):
    """Draws from a generator of its own, and from Python's, which must not be seen."""

    epoch = 0

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        random.random()
        return iter(random.Random(self.epoch).sample(range(LENGTH), LENGTH))


class Heir(ByEpoch):
    def __iter__(self) -> Iterator[int]:
        return iter(range(LENGTH))


def names(daemon: FakeHintsd) -> list[str]:
    daemon.wait(lambda: daemon.jobs)
    job = daemon.jobs[-1].job
    return [
        f"{job['path'].decode()}/{path.decode()}" for path in job["files"]["paths"].split(b"\0")
    ]


def test_which_files_an_index_is(daemon: FakeHintsd, monkeypatch: pytest.MonkeyPatch) -> None:
    told = [f"/data/told/{index}" for index in range(LENGTH)]
    joined: Any = ConcatDataset([Subset(Telling(), [3, 1]), Telling()])
    with hintsd.attach(DataLoader(joined)):
        assert names(daemon) == [told[3], told[1], *told]

    class Registered(Numbers):
        pass

    class Child(Registered):
        pass

    hintsd.paths_of.register(Registered, lambda dataset: [f"/r/{i}" for i in range(len(dataset))])
    with hintsd.attach(DataLoader(Child())) as job:
        daemon.wait(lambda: job.name == "fake-1")
        assert names(daemon) == [f"/r/{index}" for index in range(LENGTH)]
    point = metadata.EntryPoint(f"{__name__}.Numbers", f"{__name__}:of_package", extending.DATASETS)
    entries = {extending.DATASETS: {point.name: point}, extending.SAMPLERS: {}}
    monkeypatch.setattr(extending, "_entries", entries.__getitem__)
    with hintsd.attach(DataLoader(Numbers())) as job:
        daemon.wait(lambda: job.name == "fake-2")
        assert names(daemon) == [f"/p/{index}" for index in range(LENGTH)]


def of_package(dataset: Numbers) -> list[str]:
    return [f"/p/{index}" for index in range(len(dataset))]


def test_paths_that_cannot_be_right(daemon: FakeHintsd) -> None:
    class Short(Numbers):
        __hintsd_paths__ = ("/a/1", "/a/2")

    with pytest.warns(RuntimeWarning, match="2 paths for a Short of 20 samples"):
        assert hintsd.attach(DataLoader(Short())).is_over
    assert not daemon.jobs


def test_the_order_of_a_registered_sampler(daemon: FakeHintsd) -> None:
    hintsd.order_of.register(ByEpoch, list)
    sampler = ByEpoch()
    loader = DataLoader(Telling(), batch_size=3, sampler=sampler)
    job = hintsd.attach(loader)
    read = []
    for sampler.epoch in (5, 6):
        random.seed(1)
        read.append([int(index) for batch in loader for index in batch])
        drawn = random.random()
        random.seed(1)
        random.random()
        assert drawn == random.random()
    daemon.wait(lambda: daemon.jobs and len(daemon.jobs[0].orders) == 2)
    assert [sequence.tolist() for _, sequence in daemon.jobs[0].sequences()] == read
    job.close()
    with pytest.warns(RuntimeWarning, match="the order of Heir cannot be told"):
        assert hintsd.attach(DataLoader(Telling(), sampler=Heir())).is_over


def test_files_of_any_reader(daemon: FakeHintsd) -> None:
    with hintsd.files(["/d/b", "/d/a", "/d/b"]) as job:
        daemon.wait(lambda: job.name == "fake-0")
        assert names(daemon) == ["/d/b", "/d/a", "/d/b"]
        assert daemon.jobs[0].job["spec"]["sampler"] == "sequential"
    orders = [["/d/b", "/d/a"], ["/d/a", "/d/b"], ["/d/c"]]
    with hintsd.files(lambda epoch: orders[epoch]) as job:
        daemon.wait(lambda: len(daemon.jobs) == 2 and len(daemon.jobs[1].orders) == 2)
        told = names(daemon)
        for epoch, sequence in daemon.jobs[1].sequences():
            assert [told[index] for index in sequence] == orders[epoch]
        with pytest.raises(ValueError, match="order of epoch 2 has /d/c, which epoch 0 has not"):
            job.step(0, 1)
