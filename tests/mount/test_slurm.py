"""deploy/slurm: what prolog and epilog do on a node (with Slurm itself: tools/slurm)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from fusecache.base import mounts
from tests.conftest import Place
from tests.support.mounted import ROOT, alive, eventually

JOB = "999999999"


class Node:
    """Its `prolog` and `epilog`, and what is there of the job."""

    def __init__(self, place: Place) -> None:
        self.scripts = place.base / "slurm"
        shutil.copytree(ROOT / "deploy/slurm", self.scripts)
        self.jobs, self.caches = place.base / "jobs", place.base / "caches"
        self.mount, self.cache = self.jobs / JOB, self.caches / f"fusecache-{JOB}"
        self.settings = {
            "NODE_MOUNTS": "",
            "JOB_SOURCE": str(place.source),
            "JOB_OPTIONS": "--ssd 16M --ram 16M --keep-free 0 --hintsd none",
            "JOB_MOUNTS": str(self.jobs),
            "JOB_CACHES": str(self.caches),
        }

    def run(self, script: str, code: int = 0, job: str = JOB, **changes: str) -> str:
        settings = {"FUSECACHE": shutil.which("fusecache") or "", **self.settings, **changes}
        text = "".join(f"{name}='{value}'\n" for name, value in settings.items())
        (self.scripts / "fusecache.conf").write_text(text)
        done = subprocess.run(
            [self.scripts / script],
            env={"SLURM_JOB_ID": job},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    def record(self) -> tuple[str, int, int]:
        """Runtime directory, keeper and server."""
        mount = mounts.at(str(self.mount))
        assert mount is not None
        directory = mounts.runtime_directory(mount)
        assert directory is not None
        record = mounts.keeper_record(directory)
        return directory, record["keeper_pid"], record["server_pid"]


@pytest.fixture
def node(place: Place) -> Iterator[Node]:
    place.write("a", b"content")
    node = Node(place)
    yield node
    node.run("epilog")


@pytest.mark.parametrize(
    ("number", "victims"),
    [(0, ()), (signal.SIGKILL, (0, 1)), (signal.SIGKILL, (0,)), (signal.SIGSTOP, (0, 1))],
    ids=["all live", "both killed", "keeper killed", "both stopped"],
)
def test_the_epilog_leaves_nothing(node: Node, number: int, victims: tuple[int, ...]) -> None:
    stale = node.caches / "fusecache-1"
    stale.mkdir(parents=True)
    (node.caches / "fusecache").mkdir()  # another cache
    assert node.run("prolog") == ""
    assert not stale.exists()
    assert (node.mount / "a").read_bytes() == b"content"
    directory, *pids = node.record()
    with open(node.mount / "a"):  # busy
        for victim in victims:
            os.kill(pids[victim], number)
        assert node.run("epilog") == ""
    assert mounts.at(str(node.mount)) is None
    eventually(lambda: not any(map(alive, pids)))  # pkill does not see who is just ending
    assert sorted(os.listdir(node.caches)) == ["fusecache"]
    assert os.listdir(node.jobs) == []
    assert not os.path.exists(mounts.status_socket(os.path.basename(directory)))
    assert not os.path.exists(directory)


def test_a_prolog_mends_what_no_epilog_did(node: Node) -> None:
    node.run("prolog")
    first = node.record()
    node.run("prolog")  # the job was requeued
    assert node.record()[1:] != first[1:]
    assert (node.mount / "a").read_bytes() == b"content"


def test_a_node_that_is_not_ready_fails_with_one_line(node: Node, place: Place) -> None:
    for changes, line in (
        ({"NODE_MOUNTS": str(place.source)}, f"{place.source} does not answer"),
        ({"JOB_SOURCE": str(place.base / "away")}, f"{place.base}/away was not mounted: fusecache"),
        ({"FUSECACHE": "/nowhere"}, "there is no /nowhere: set FUSECACHE"),
    ):
        (said,) = node.run("prolog", code=1, **changes).splitlines()
        assert said.startswith(f"fusecache prolog: job {JOB}: {line}")
    for job in ("", "..", "1/2"):
        assert "must be a job's number" in node.run("epilog", code=1, job=job)
