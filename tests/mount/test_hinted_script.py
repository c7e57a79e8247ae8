"""What a script with hints, and who takes its mount away, are told: a real hintsd, a real mount."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hintsd
from hintsd import link
from hintsd.orders import OrderSpec, access_sequence
from tests.conftest import Mounting, Place, in_one_mode
from tests.hintsd_support import DaemonProcess
from tests.mount.test_hinted import make_dataset, running
from tests.mounted import eventually

FILES = 2000  # many more than there are samples between a few wires
BUSY = 4


@pytest.fixture
def daemon(place: Place) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base, "--ram", "4M")
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture(autouse=True)
def _nothing_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_warned", set())


def becomes(job: hintsd.Job, state: str) -> None:
    def look() -> bool:
        assert job.state == state, job
        return True

    eventually(look)


@in_one_mode
@pytest.mark.filterwarnings("ignore:hintsd")
def test_a_job_tells_what_has_become_of_it(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    names = [f"class{number % 2}/{number:04}.jpg" for number in range(FILES)]
    for name in names:
        os.utime(place.write(name, name.encode() * 400), (1e9, 1e9))
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    job = hintsd.connect(mount.path).shuffle(seed=1, batch_size=4, epochs=50)
    becomes(job, "hinted")
    names.sort()
    for index in access_sequence(OrderSpec("random", FILES, seed=2), 0):
        (mount.path / names[index]).read_bytes()
    becomes(job, "wrong")
    assert "another seed" in repr(job)
    done = mount.run("umount", mount.path)
    assert (done.returncode, done.stderr.count("\n")) == (BUSY, 1)
    assert f"read with hints by {job.name} (process {os.getpid()})" in done.stderr
    mount.umount("--force")
    becomes(job, "waiting")

    def says_why() -> bool:  # its server is gone a little earlier
        assert repr(job).endswith(f"({mount.path} is not mounted any more)>")
        return True

    eventually(says_why)
    mount.start()
    becomes(job, "hinted")
    job.close()
    assert job.state == "over"
    mount.umount()


def run(dataset: Path) -> None:
    with hintsd.connect(dataset).shuffle() as job:
        becomes(job, "hinted")


@in_one_mode
@pytest.mark.filterwarnings("error")
def test_the_directory_above_the_dataset(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    for name in ("train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg"):
        place.write(name, b"content")
    mount = mounting("--hintsd", daemon.path)
    with pytest.warns(RuntimeWarning, match=f"is the dataset {mount.path}/train") as caught:
        run(mount.path)
    assert len(caught) == 1
    run(mount.path / "train")  # another warning would be an error


class Files(Dataset[int]):
    """Samples, as torch reads them."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> int:
        return len(self._paths[index].read_bytes())


def shuffled(paths: list[Path]) -> DataLoader[int]:
    """As `hintsd hint --seed 5 --batch-size 4` describes it."""
    return DataLoader(
        Files(paths),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        generator=torch.Generator().manual_seed(5),
    )


@pytest.mark.claim("P9")
@in_one_mode
def test_a_hint_that_nobody_reads_beside_a_training(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    names = make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    paths = [mount.path / name for name in names]
    loader = shuffled(paths)
    order = ("--seed", "6", "--batch-size", "4", "--detach", "--socket", daemon.path)
    with hintsd.attach(loader, paths=paths) as job:
        becomes(job, "hinted")
        name = str(job.name)
        with running(sys.executable, "-m", "hintsd", "hint", str(mount.path), *order) as hint:
            assert hint.communicate()[0].startswith("hint-2: 2,000 samples")
        for _ in range(3):
            assert sum(len(batch) for batch in loader) == FILES
        eventually(lambda: daemon.job(name)["epoch"] == 2)
        read, unread = daemon.job(name), daemon.job("hint-2")
    assert read["not_late"] > FILES
    assert (unread["state"], unread["epoch"], unread["index"]) == ("waiting", 0, 0)
    assert (unread["late"], unread["unplanned"], unread["not_late"]) == ({}, {}, 0)
    eventually(lambda: daemon.jobs() == ["hint-2"])
    unread = daemon.job("hint-2")  # nor is what came last anybody's who reads it
    assert (unread["state"], unread["not_late"], unread["unplanned"]) == ("waiting", 0, {})
    mount.umount("--force")


@in_one_mode
def test_a_hint_for_a_reader_that_knows_nothing_of_it(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    """The command that gives it waits beside him, and reads nothing."""
    names = make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    loader = shuffled([mount.path / name for name in names])
    order = ("--seed", "5", "--epochs", "1", "--batch-size", "4", "--workers", "2")
    arguments = ("hint", str(mount.path), *order, "--socket", daemon.path)
    with running(sys.executable, "-m", "hintsd", *arguments) as hint:
        eventually(lambda: daemon.jobs() == ["hint-1"])
        assert sum(len(batch) for batch in loader) == FILES
        assert "hint-1: done" in hint.communicate(timeout=60)[0]
