"""What `fusecache doctor` finds, and what it says to do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fusecache.base import mounts, processes
from fusecache.base.errors import UserError
from fusecache.cli import host_commands
from fusecache.control import control_client, hintsd_client
from fusecache.observe import findings
from fusecache.observe.asking import Answer, Host
from fusecache.observe.findings import Finding
from tests.support import recorded_status
from tests.unit.cli.test_cli import run

GIB = 1 << 30


def refuse(allow_other: bool) -> None:
    raise UserError("/dev/fuse does not exist: load the fuse module (modprobe fuse)")


def pooled(why: str = "", without: Sequence[str] = (), fault: str = "") -> dict[str, Any]:
    """What a status says of servers a and b; `why`: b is left alone for that."""
    servers = [
        {"host": "a", "why": "once", "is_left_alone": False, "has_address": True},
        {"host": "b", "why": why, "is_left_alone": bool(why), "has_address": True},
    ]
    return {"servers": servers, "without": list(without), "fault": fault}


@pytest.mark.parametrize(
    ("found", "level", "says", "do"),
    [
        (findings.kernel("5.5.19-generic"), "problem", "too old", "5.6 or later"),
        (findings.kernel("6.8.0-45"), "warning", "may hang when", "6.9 or later"),
        (findings.kernel("6.9"), "ok", "Linux 6.9", ""),
        (findings.kernel("odd"), "problem", "too old", "5.6"),
        (findings.libfuse("3.9.4", ""), "problem", "too old", "3.10 or later"),
        (findings.libfuse("3.14.0", ""), "ok", "3.14.0", ""),
        (findings.libfuse("", "No module named 'pyfuse3'"), "problem", "No module", "pip install"),
        (findings.torch(None), "ok", "not installed", ""),
        (findings.torch("2.0.1"), "warning", "too old", "2.1"),
        (findings.torch("2.13.0+cpu"), "ok", "2.13.0+cpu", ""),
        (findings.paging("Y\n"), "warning", "DAMON_RECLAIM", "echo N > /sys/module"),
        (findings.paging("N\n"), "ok", "off", ""),
        (findings.memory(4 * GIB, 2 * GIB, 9 * GIB, "/a b"), "problem", "more than its cgroup",
         "fusecache restart '/a b' --ram 512M"),
        (findings.memory(4 * GIB, None, 2 * GIB, "/m"), "warning", "more than programs leave",
         "--ram 512M"),
        (findings.memory(4 * GIB, 4 * GIB, 4 * GIB, "/m"), "ok", "--ram 4 GiB", ""),
        (findings.reclaimed(3, "/m"), "warning", "took 3 files", "less --ram"),
        (findings.reclaimed(0, "/m"), "ok", "took nothing", ""),
        (findings.pool(pooled(), "/m"), "ok", "2 of 2 servers in use", ""),
        (findings.pool(pooled(why="refused"), "/a b"), "warning",
         "1 of 2 servers in use; b: refused", "fusecache pool status '/a b'"),
        (findings.pool(pooled(without=["b:6379"]), "/m"), "warning",
         "2 of 2 servers in use; most hosts do without b:6379", "fusecache pool status /m"),
        (findings.pool(pooled(fault="no CA"), "/m"), "warning",
         "2 of 2 servers in use; no CA", "fusecache pool status /m"),
    ],
)  # fmt: skip
def test_each_has_a_level_and_says_what_to_do(
    found: Finding, level: str, says: str, do: str
) -> None:
    assert found.level == level
    assert says in found.says
    assert do in found.do
    assert bool(found.do) == (level != "ok")


def test_clocks_are_compared_by_what_changed_at_the_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    os.utime(tmp_path / "file", (time.time() + 9999, time.time() + 9999))  # anybody may say so
    assert findings.clock(str(tmp_path), "").level == "ok"
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s - 61)
    found = findings.clock(str(tmp_path), "/m")
    assert (found.level, found.mount) == ("problem", "/m")
    assert "in this host's future" in found.says
    assert "NTP" in found.do
    assert "No such file" in findings.clock(str(tmp_path / "none"), "").says


def test_a_directory_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "WAIT_S", 0.05)
    monkeypatch.setattr(os, "scandir", lambda path: time.sleep(60))
    found = findings.clock("/hung", "")
    assert (found.level, found.says) == ("problem", "/hung does not answer within 0.05 s")


def test_a_cache_is_to_lie_on_a_local_disk_with_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(kind: str, limit_bytes: int) -> Finding:
        below = mounts.Mount(7, "0:1", str(tmp_path), kind, "somewhere")
        monkeypatch.setattr(mounts, "mounts", lambda: [below])
        ssd = {"bytes": 0, "limit_bytes": limit_bytes}
        return findings.disk(str(tmp_path), ssd, "/m")

    assert on("ext4", 1).level == "ok"
    assert on("ext4", 1).do == f"fusecache probe {tmp_path} measures it"
    assert on("ext4", 1 << 62).level == "warning"
    assert "--ssd may take 4096 PiB more" in on("ext4", 1 << 62).says
    assert "takes memory" in on("tmpfs", 1).says
    for kind in ("nfs4", "fuse.sshfs", "lustre"):
        assert "is no local disk" in on(kind, 1).says
        assert on(kind, 1).level == "warning"


def test_an_origin_whose_inode_numbers_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(kind: str) -> Finding:
        over = mounts.Mount(8, "0:2", "/data", mounts.FILESYSTEM_TYPE, "/data")
        below = mounts.Mount(7, "0:1", "/data", kind, "server:/x")
        monkeypatch.setattr(mounts, "mounts", lambda: [below, over])  # mounted over itself
        return findings.origin("/data/train", "/data")

    assert (on("nfs4").level, on("nfs4").says) == ("ok", "/data/train on nfs4")
    for kind in ("fuse.sshfs", "fuse", "vfat"):
        assert on(kind).level == "warning"
        assert "inode numbers may change" in on(kind).says


def test_a_mount_that_is_down_or_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cgroup_limit_bytes", lambda pid: None)
    monkeypatch.setattr(processes, "available_memory_bytes", lambda: GIB)
    monkeypatch.setattr(hintsd_client, "socket_of", lambda target: "/run/none.sock")
    status = recorded_status.mount_status(zero_open=False, keeper_alive=False)
    target = recorded_status.target(uid=os.getuid() + 1)  # another user's: no path is looked at
    host = Host([], {"/run/none.sock": None})
    found = {one.about: one for one in findings.of_mount(Answer(target, "up", status), host)}
    levels = {about: one.level for about, one in found.items()}
    assert levels == {
        "mount": "problem",
        "open mode": "warning",
        "faults": "warning",
        "memory": "ok",
        "reclaimed": "warning",
        "hintsd": "warning",
        "pool": "ok",
        "cache service": "ok",
    }
    assert "THE KEEPER IS GONE" in found["mount"].says
    assert found["faults"].says == "1 bad blocks, 3 cache faults, 2 restarts"
    assert "none answers at /run/none.sock" in found["hintsd"].says
    dead = recorded_status.host().mounts[1]
    (only,) = findings.of_mount(dead, Host([], {}))
    assert (only.level, only.do) == ("problem", "fusecache mount /mnt/nfs/imagenet /data/coco")


def test_a_cache_service_that_is_not_used() -> None:
    status = {"socket": "/run/s", "used": False, "why_not": "--cache /run/s: Connection refused"}
    found = findings.service(status, "/m")
    assert (found.level, found.says) == ("warning", "--cache /run/s: Connection refused")
    assert findings.service(status | {"used": True}, "/m").level == "ok"


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(control_client, "find_all", list)
    monkeypatch.setattr(findings, "_libfuse_version", lambda: ("3.14.0", ""))
    monkeypatch.setattr(findings, "check_fuse", lambda allow_other: None)
    monkeypatch.setattr(host_commands, "look", lambda: Host([], {}))
    monkeypatch.setattr(findings, "kernel", lambda release: Finding("warning", "kernel", "old"))
    assert run("doctor") == 0
    assert capfd.readouterr().out.endswith("\n\n0 problems, 1 warning\n")
    monkeypatch.setattr(findings, "check_fuse", refuse)
    assert run("doctor", "--json") == 1
    (device,) = [one for one in json.loads(capfd.readouterr().out) if one["about"] == "/dev/fuse"]
    assert device == {
        "level": "problem", "mount": "", "about": "/dev/fuse", "says": "/dev/fuse does not exist",
        "do": "load the fuse module (modprobe fuse)",
    }  # fmt: skip
    assert run("doctor", "/none") == 3
    assert capfd.readouterr().err == "fusecache: /none is no directory\n"
