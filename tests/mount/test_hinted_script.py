"""What a script with hints, and who takes its mount away, are told: a real hintsd, a real mount."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hintsd
from hintsd.client import link, warning
from hintsd.orders.drawing import access_sequence
from hintsd.orders.spec import OrderSpec
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import FILES, make_dataset, running
from tests.support import PATIENCE_S
from tests.support.commands import run_with_torch
from tests.support.hintsd_support import DaemonProcess
from tests.support.mounted import eventually

BUSY = 4


@pytest.fixture
def daemon(place: Place) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(place.base, "--ram", "4M")
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture(autouse=True)
def _nothing_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it because the machine is slow."""
    monkeypatch.setattr(warning, "_warned", set())
    monkeypatch.setattr(link, "CONNECT_TIMEOUT_S", 20.0)


def becomes(job: hintsd.Job, state: str) -> None:
    def look() -> bool:
        assert job.state == state, job
        return True

    eventually(look)


def says(job: hintsd.Job, why: str) -> None:
    def look() -> bool:
        assert why in repr(job)
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
    for epoch in range(10):  # one is enough for a hintsd that gets a processor meanwhile
        for index in access_sequence(OrderSpec("random", FILES, seed=2), epoch):
            (mount.path / names[index]).read_bytes()
        with contextlib.suppress(AssertionError):
            eventually(lambda: job.state == "wrong", timeout_s=2)
            break
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
            assert hint.communicate()[0].startswith("hint-2: 1,000 samples")
        for _ in range(3):
            assert sum(len(batch) for batch in loader) == FILES
        eventually(lambda: daemon.job(name)["epoch"] in (2, 3))
        read, unread = daemon.job(name), daemon.job("hint-2")
    assert read["not_late"] > FILES
    assert (unread["state"], unread["epoch"], unread["index"]) == ("waiting", 0, 0)
    assert (unread["late"], unread["unplanned"], unread["not_late"]) == ({}, {}, 0)
    eventually(lambda: daemon.jobs() == ["hint-2"])
    unread = daemon.job("hint-2")  # nor is what came last anybody's who reads it
    assert (unread["state"], unread["not_late"], unread["unplanned"]) == ("waiting", 0, {})
    mount.umount("--force")


@pytest.mark.claim("P9")
@in_one_mode
def test_a_loader_that_is_attached_while_another_one_is_read(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    """As under Lightning with several processes, which makes its own from the one it is given."""
    names = make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    paths = [mount.path / name for name in names]
    attached, own = (DataLoader(Files(paths), batch_size=4, shuffle=True) for _ in range(2))
    job = hintsd.attach(attached, paths=paths)
    says(job, "no epoch's order was announced yet")
    batches = iter(own)

    def read_on() -> bool:
        next(batches)
        assert job.state == "wrong", job
        return True

    with pytest.warns(RuntimeWarning, match="what accelerator.prepare returned") as caught:
        eventually(read_on)
    assert (len(caught), caught[0].filename) == (1, __file__)
    assert daemon.job(str(job.name))["state"] == "wrong"
    next(iter(attached))  # it is read now
    becomes(job, "hinted")
    assert daemon.job(str(job.name))["state"] != "wrong"
    job.close()


@in_one_mode
@pytest.mark.filterwarnings("error")
def test_a_validation_that_waits_is_no_fault(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    names = make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    paths = [mount.path / name for name in names]
    training = shuffled(paths)
    validation = DataLoader(Files(paths[:200]), batch_size=4, shuffle=True)
    with (
        hintsd.attach(training, paths=paths) as job,
        hintsd.attach(validation, paths=paths[:200]) as waiting,
    ):
        becomes(job, "hinted")
        for _ in range(2):
            assert sum(len(batch) for batch in training) == FILES

        # 2: the last sample of the second one has been seen, too
        eventually(lambda: daemon.job(str(job.name))["epoch"] in (1, 2))
        assert daemon.job(str(waiting.name))["state"] == "waiting"
        assert sum(len(batch) for batch in validation) == 200
        becomes(waiting, "hinted")


@in_one_mode
@pytest.mark.filterwarnings("ignore:hintsd")
@pytest.mark.parametrize(
    ("orders", "why"),
    [([], "no epoch's order was announced yet"), ([[0, FILES]], "an order was refused: the order")],
)
def test_an_order_of_nothing_or_of_no_file(
    place: Place,
    mounting: Mounting,
    daemon: DaemonProcess,
    orders: list[list[int]],
    why: str,
) -> None:
    make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    with hintsd.connect(mount.path).order(orders) as job:
        says(job, why)
        assert job.state == "waiting"


@in_one_mode
@pytest.mark.filterwarnings("ignore:hintsd")
def test_what_is_told_of_a_job_that_has_ended_is_named_as_before(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    make_dataset(place)
    mount = mounting("--hintsd", daemon.path, "--ram", "16M")
    silent = hintsd.connect(mount.path).order([])
    planned = hintsd.connect(mount.path).shuffle(seed=1)
    eventually(lambda: len(daemon.jobs()) == 2)
    eventually(lambda: daemon.job(str(planned.name))["samples"] == FILES)
    jobs = [daemon.job(str(job.name)) for job in (silent, planned)]
    assert jobs[0]["samples"] is None
    planned.close()
    silent.close()
    refused = hintsd.connect(mount.path / "class0").shuffle(seed=1)
    eventually(lambda: refused.is_over)
    ended = daemon.status()["ended"]
    assert [job["state"] for job in ended] == ["ended", "ended", "refused"]
    for job in ended:
        assert set(job) - {"why_ended", "ended_ago_s"} == set(jobs[0]) == set(jobs[1])


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
        eventually(lambda: bool(daemon.job("hint-1")["window_bytes"]))  # it is planned
        assert sum(len(batch) for batch in loader) == FILES
        assert "hint-1: done" in hint.communicate(timeout=60)[0]


SHORT_EPOCHS = """
import sys, time
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
import hintsd
paths = sys.argv[1:]
class Files:
    def __len__(self):
        return len(paths)
    def __getitem__(self, index):
        time.sleep(0.005)  # a slow origin, as all workers see it
        with open(paths[index], "rb") as file:
            return len(file.read())
files = Files()
sampler = DistributedSampler(files, num_replicas=1, rank=0, seed=3)
loader = DataLoader(files, batch_size=64, sampler=sampler, num_workers=4, persistent_workers=True)
job = hintsd.attach(loader, paths=paths, epochs=8)
deadline = time.monotonic() + 60
while job.state != "hinted" and time.monotonic() < deadline:
    time.sleep(0.01)
for epoch in range(8):
    sampler.set_epoch(epoch)
    assert sum(len(batch) for batch in loader) == len(files)
print(job.state)
"""


@pytest.mark.claim("P9")
@pytest.mark.parametrize("ram", ["256K", "4M"])
@in_one_mode
def test_an_epoch_that_workers_hold_as_a_whole_condemns_no_hint(
    place: Place, mounting: Mounting, ram: str
) -> None:
    names = make_dataset(place, 150)
    mount = mounting("--hintsd", str(place.base / "sock"), "--ram", "16M")
    daemon = DaemonProcess(place.base, "--ram", ram)
    daemon.start()
    try:
        paths = [str(mount.path / name) for name in names]
        command = [sys.executable, "-c", SHORT_EPOCHS, *paths]
        done = run_with_torch(command, PATIENCE_S)
        assert (done.returncode, done.stdout) == (0, "hinted\n"), done.stderr
        assert "wrong hint" not in done.stderr
    finally:
        daemon.kill()
