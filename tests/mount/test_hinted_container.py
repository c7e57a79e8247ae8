"""Hints from a container: other namespaces, a part of the mount at another path."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hintsd
from hintsd.client import finding
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_other_users import TRAIN
from tests.support.hintsd_support import JOB, Client, DaemonProcess
from tests.support.mounted import Mount, eventually
from tests.support.trees import random_bytes

FILES, FILE_BYTES = 40, 30_000
CONTAINER = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")

pytestmark = in_one_mode


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    (tmp_path / "hints").mkdir(mode=0o700)
    daemon = DaemonProcess(tmp_path / "hints")
    daemon.start()
    yield daemon
    daemon.kill()


@pytest.fixture
def mount(place: Place, mounting: Mounting, daemon: DaemonProcess) -> Mount:
    for number in range(FILES):
        for part in ("train", "val"):
            name = f"{part}/{'ab'[number % 2]}/{number:02}.jpg"
            os.utime(place.write(name, random_bytes(name, FILE_BYTES)), (1e9, 1e9))
    return mounting("--hintsd", daemon.path, "--ram", "16M", "--ssd", "16M")


@pytest.fixture
def box(place: Place) -> Path:
    """In a container: data/, and run/ with the socket."""
    box = place.base / "box"
    (box / "data").mkdir(parents=True)
    (box / "run").mkdir()
    return box


def enter(box: Path, mount: Mount, daemon: DaemonProcess, *words: str) -> list[str]:
    """A command that sees the part train/ at another path, and neither the mount nor, where it was,
    the socket.
    """
    hidden = os.path.dirname(daemon.path)
    steps = [
        ["mount", "--bind", f"{mount.path}/train", f"{box}/data"],
        ["mount", "--bind", hidden, f"{box}/run"],
        ["mount", "-t", "tmpfs", "none", hidden],
        ["umount", "-l", str(mount.path)],
        ["exec", *words],
    ]
    return [*CONTAINER, "sh", "-ec", "\n".join(shlex.join(step) for step in steps)]


def device_of(mount: Mount) -> str:
    device = os.stat(mount.path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def jobs_of(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """Those that have ended."""
    told: list[dict[str, Any]] = Client(daemon.path).ask("status")["ended"]
    return told


def test_a_training_in_a_container_is_hinted(
    mount: Mount, daemon: DaemonProcess, box: Path
) -> None:
    socket = str(box / "run" / os.path.basename(daemon.path))
    words = enter(box, mount, daemon, sys.executable, "-c", TRAIN, str(box / "data"))
    environment = {**os.environ, "HINTSD_SOCKET": socket}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["hinted", *[str(FILES * FILE_BYTES)] * 2]
    eventually(lambda: len(jobs_of(daemon)) == 1)
    (job,) = jobs_of(daemon)
    assert (job["path"], job["mountpoint"]) == (f"{mount.path}/train", str(mount.path))
    assert job["not_late"] + sum(job["late"].values()) == 2 * FILES
    assert job["not_late"] >= FILES  # the second epoch's


def test_without_its_socket_a_container_is_told_what_to_do(
    mount: Mount, daemon: DaemonProcess, box: Path
) -> None:
    program = "import hintsd, sys; print(hintsd.connect(sys.argv[1]).shuffle().state)"
    words = enter(box, mount, daemon, sys.executable, "-c", program, str(box / "data"))
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "waiting\n"
    (line,) = [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]
    assert "a container needs the directory of its socket (HINTSD_SOCKET)" in line


def test_a_part_that_is_bound_elsewhere(mount: Mount, daemon: DaemonProcess, box: Path) -> None:
    subprocess.run(["mount", "--bind", mount.path / "train", box / "data"], check=True)
    try:
        told = {**JOB, "path": os.fsencode(box / "data"), "detached": True, "spec": None}
        # a client that is older than `device` and `inside`, and one that is not
        accepted = Client(daemon.path).ask("job", **told)
        assert (accepted["mountpoint"], accepted["samples_per_epoch"]) == (str(mount.path), FILES)
        done = subprocess.run(
            [sys.executable, "-m", "hintsd", "hint", box / "data", "--detach"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert f"{FILES} samples an epoch" in done.stdout
        paths = {job["path"] for job in Client(daemon.path).ask("status")["jobs"]}
        assert paths == {f"{mount.path}/train", str(box / "data")}
    finally:
        subprocess.run(["umount", box / "data"], check=True)


def test_a_place_that_hintsd_does_not_see_is_refused(mount: Mount, daemon: DaemonProcess) -> None:
    client = Client(daemon.path)
    for device, inside, why in (
        ("0:999999", b"/train", "is on a mount that hintsd does not see"),
        (device_of(mount), b"/nowhere", "No such file or directory"),
        (device_of(mount), b"/train/../../etc", "inside must be absolute, without"),
        (device_of(mount), b"train", "inside must be absolute, without"),
        (device_of(mount), b"/val//deleted", "inside must be absolute, without"),
    ):
        told = {**JOB, "path": b"/data", "device": device, "inside": inside}
        assert why in json.dumps(client.ask("job", **told)), (device, inside)


def test_figures_of_a_job_are_asked_where_the_environment_says(
    mount: Mount, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HINTSD_SOCKET", "run/hintsd.sock")  # a training changes its directory
    with pytest.raises(finding.Unhinted, match=r"HINTSD_SOCKET=run/.*: no absolute path"):
        finding.find_socket(str(mount.path))
    monkeypatch.setenv("HINTSD_SOCKET", daemon.path)
    mount.restart("--hintsd", "none")
    with hintsd.connect(mount.path / "train").shuffle(epochs=1, batch_size=4) as job:
        eventually(lambda: job.stats(timeout_s=60) != {})  # once it is planned
        figures = job.stats(timeout_s=60)
        nothing_read = {"epoch": 0, "index": 0, "late": 0, "unplanned": 0, "not_late": 0}
        assert nothing_read.items() <= figures.items()
        assert all(isinstance(value, int | float) for value in figures.values())
    assert job.stats() == {}
