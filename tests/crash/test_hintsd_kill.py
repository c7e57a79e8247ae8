"""SIGKILL to hintsd, and to trainers, over a real mount: readers go on, jobs are taken up."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.hintsd_support import Client, DaemonProcess
from tests.support.mounted import eventually
from tests.support.trees import assert_same, make_files

RULE = {"rule": "imagefolder", "extensions": [""], "allow_empty": False}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess(tmp_path)
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.mark.claim("P10")
@in_one_mode
def test_killed_hintsd_is_followed_by_one_that_goes_on(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    make_files(place.source / "set", 50, lambda index: 5000 + index)
    mount = mounting()
    dataset = mount.path / "set"
    with contextlib.closing(Client(daemon.path)) as client:
        job = client.job(path=os.fsencode(dataset), files=RULE)["job"]
        daemon.kill()
    for _ in range(2):
        assert_same(place.source / "set", dataset)  # without any hintsd
        daemon.start()
        eventually(lambda: daemon.jobs() == [job])
        with contextlib.closing(Client(daemon.path)) as client:
            accepted = client.job(path=os.fsencode(dataset), files=RULE, resume=job)
            assert (accepted["job"], accepted["samples_per_epoch"]) == (job, 50)
            assert daemon.jobs() == [job]
            assert_same(place.source / "set", dataset)
            daemon.kill()


@pytest.mark.claim("P12")
@in_one_mode
def test_killed_trainer_frees_its_job(
    place: Place, mounting: Mounting, daemon: DaemonProcess
) -> None:
    make_files(place.source / "set", 10, lambda index: 5000 + index)
    mount = mounting()
    path = os.fsencode(mount.path / "set")
    with subprocess.Popen(["sleep", "1000"]) as trainer:
        with contextlib.closing(Client(daemon.path)) as client:
            job = client.job(path=path, files=RULE, detached=True, pid=trainer.pid)["job"]
        assert daemon.jobs() == [job]
        trainer.kill()
    eventually(lambda: not daemon.jobs())
