"""`fusecache status` without a path, from recorded statuses."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from fusecache.cli import status_command
from fusecache.observe import summary
from fusecache.observe.asking import Answer, Host
from tests.support import recorded_status
from tests.unit.cli.test_cli import run


def shown(host: Host) -> list[str]:
    console = Console(file=io.StringIO(), width=200)
    console.print(summary.table(host))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_each_mount_has_a_line_and_what_is_dead_how_to_heal_it() -> None:
    assert shown(recorded_status.host()) == [
        "/data/imagenet RAM 11.4 MiB of 16 MiB (72%), SSD 122 MiB of 244 MiB (50%), "
        "cached 412 GiB of 480 GiB (85%), 75% of READs hit, 2 jobs with hints",
        "/data/coco DEAD: its keeper and its server are gone",
        "to heal it: fusecache mount /mnt/nfs/imagenet /data/coco",
        "/home/u/data another user's (uid 54321), and shows you nothing",
    ]


def test_what_is_wrong_with_a_mount_that_answers_is_shown() -> None:
    status = recorded_status.mount_status(keeper_alive=False)
    status["reads"] |= {"from_ssd": 0, "from_origin": 0}
    status["origin"] |= {"available": False, "last_error": "EIO"}
    status["ssd"] |= {
        "limit_bytes": 0, "full_disk_bytes": 0,
        "directories": [{"path": "/a", "why_out": "is gone"}, {"path": "/b", "why_out": ""}],
    }  # fmt: skip
    first, *more = shown(Host([Answer(recorded_status.target(), "up", status)], {}))
    assert "SSD 122 MiB of 0 B, cached" in first
    assert first.endswith(", no READs yet")
    assert more == [
        "THE ORIGIN IS AWAY: EIO; cached files are served",
        "THE KEEPER IS GONE: umount and mount again at the next occasion",
        "THE DISK OF THE CACHE IS FULL: the SSD tier gets no larger",
        "OUT OF SERVICE: /a: is gone",
    ]


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"is_whole": False}, "cached 412 GiB of 480 GiB (85%) that are known"),
        ({"on_ssd_bytes": 0}, "cached 0 B of 480 GiB (0%)"),
        ({"bytes": 0}, ""),
    ],
)
def test_how_much_is_cached_of_what_is_known(dataset: dict[str, Any], said: str) -> None:
    assert summary.on_ssd(recorded_status.mount_status()["dataset"] | dataset) == said


def test_a_server_of_an_earlier_version_says_nothing_of_its_dataset() -> None:
    assert summary.on_ssd(None) == ""


def test_for_machines(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status_command, "look", recorded_status.host)
    assert run("status", "--json") == 0
    found: list[dict[str, Any]] = json.loads(capfd.readouterr().out)
    assert [one["state"] for one in found] == ["up", "dead", "private"]
    assert found[0]["status"] == recorded_status.mount_status()
    assert [job["name"] for job in found[0]["jobs"]] == ["train-1", "eval-1"]
    assert found[1]["heal"] == "fusecache mount /mnt/nfs/imagenet /data/coco"
    assert found[1]["status"] is None
    monkeypatch.setattr(status_command, "look", lambda: Host([], {}))
    assert run("status") == 0
    assert capfd.readouterr().out == "no mounts\n"
