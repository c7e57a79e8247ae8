"""What a script with hints, and who takes its mount away, are told: a real hintsd, a real mount."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import hintsd
from hintsd import link
from hintsd.orders import OrderSpec, access_sequence
from tests.conftest import Mounting, Place, in_one_mode
from tests.hintsd_support import DaemonProcess
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
