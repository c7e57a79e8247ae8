"""`fusecache top`, from two recorded looks; and as a process."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from fusecache.observe import rates
from fusecache.observe.asking import Host
from fusecache.observe.rates import Look
from tests.support import recorded_status
from tests.support.mounted import environment

Change = Callable[[dict[str, Any], dict[str, Any]], None]


def later(change: Change) -> rates.Figures:
    """Two seconds later `change` is made to what the mount and its first job say."""
    now = recorded_status.host()
    status, hintsd = now.mounts[0].status, now.hintsds[recorded_status.SOCKET]
    assert hintsd is not None
    change(status, hintsd["jobs"][0])
    return rates.figures(Look(recorded_status.host(), 10.0), Look(now, 12.0))


def busy(status: dict[str, Any], job: dict[str, Any]) -> None:
    status["reads"]["requests"] += 4000
    status["reads"]["from_ssd"] += 3000
    status["reads"]["from_origin"] += 1000
    status["reads"]["bytes_served"] += 400 << 20
    status["origin"]["bytes"] += 100 << 20
    status["origin"]["read_s"]["counts"][3] += 1000
    job["not_late"] += 950
    job["late"]["queued"] += 40
    job["late"]["evicted"] = 10


def test_rates_are_what_grew_by_the_time_that_passed() -> None:
    found = later(busy)
    mount, dead = found["mounts"]  # another user's is none of ours
    assert (found["interval_s"], dead["state"]) == (2, "dead")
    assert (mount["reads_per_s"], mount["origin_requests_per_s"]) == (2000, 500)
    assert (mount["ssd_share"], mount["origin_share"]) == (0.75, 0.25)
    assert (mount["served_bytes_per_s"], mount["origin_bytes_per_s"]) == (200 << 20, 50 << 20)
    job, waiting = found["jobs"]
    assert (job["late_share"], job["ram_share"]) == (0.05, 0.95)
    # 7,500 samples of this epoch and 6 epochs of 10,000, at 250 a second
    assert (job["epoch_eta_s"], job["eta_s"]) == (30, 270)
    assert (waiting["late_share"], waiting["eta_s"], waiting["state"]) == (None, None, "waiting")
    assert json.loads(json.dumps(found)) == found


def test_counters_that_began_anew_and_the_first_look_have_no_rates() -> None:
    def restarted(status: dict[str, Any], job: dict[str, Any]) -> None:
        busy(status, job)  # the new server has counted more than the old one
        status["server_pid"] += 1
        job["not_late"] = 0

    def fewer(status: dict[str, Any], job: dict[str, Any]) -> None:
        status["origin"]["bytes"] = 0

    first = rates.figures(None, Look(recorded_status.host(), 1.0))
    for found in (later(restarted), first):
        mount, job = found["mounts"][0], found["jobs"][0]
        assert mount["reads_per_s"] is mount["origin_requests_per_s"] is mount["ssd_share"] is None
        assert job["late_share"] is None
        assert job["eta_s"] == 270
    assert later(fewer)["mounts"][0]["origin_bytes_per_s"] is None
    assert later(fewer)["mounts"][0]["reads_per_s"] == 0


def test_one_screen_has_80_columns() -> None:
    def show(found: rates.Figures) -> list[str]:
        console = Console(file=io.StringIO(), width=80)
        console.print(rates.screen(found))
        assert isinstance(console.file, io.StringIO)
        lines = console.file.getvalue().splitlines()
        assert all(len(line) <= 80 for line in lines)
        return [" ".join(line.split()) for line in lines]

    assert show(later(busy)) == [
        "mount READs/s SSD origin served/s fetched/s calls/s queued",
        "/data/imagenet 2,000 75% 25% 200 MiB 50 MiB 500 21 + 22",
        "/data/coco: DEAD: its keeper and its server are gone; fusecache mount",
        "/mnt/nfs/imagenet /data/coco",
        "",
        "job state epoch done samples/s in RAM late ends in",
        "train-1 running 3 of 10 25% 250 95% 5% 4 min 30 s",
        "eval-1 waiting - - - - - -",
    ]
    assert show(rates.figures(None, Look(Host([], {}), 0.0))) == ["no mounts"]


def test_ctrl_c_on_a_terminal_ends_it_and_is_no_fault() -> None:
    above, below = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fusecache.cli.main", "top", "--interval", "60"],
        stdin=below, stdout=below, stderr=subprocess.PIPE, text=True,
        env=environment(TERM="xterm", COLUMNS="80"),
    ) as process:  # fmt: skip
        try:
            os.close(below)
            assert os.read(above, 1 << 16)  # it shows the first look at once
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=30)
            assert (process.returncode, error) == (0, "")
        finally:
            process.kill()
            os.close(above)
