"""What Prometheus is told, from recorded statuses; dashboard and alerts use nothing else."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from fusecache.base import metrics, mounts
from fusecache.base.metrics import FAMILIES
from fusecache.control import control_client
from fusecache.observe import asking, exposition
from fusecache.observe.asking import Answer, Host
from tests.support import recorded_status
from tests.support.mounted import ROOT, environment

NAME = re.compile(r"\bfusecache_\w+")


def samples(host: Host) -> dict[tuple[str, ...], float]:
    """(name, label=value, …) -> value, as a strict parser of OpenMetrics reads it."""
    text = exposition.text(exposition.registry(lambda: host))
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def test_every_family_is_exported_and_every_figure_is_where_it_is_said() -> None:
    found = samples(recorded_status.host())
    names = {name for name, *_ in found}
    for family in FAMILIES:
        suffix = {"counter": "_total", "histogram": "_count", "gauge": ""}[family.kind]
        assert f"fusecache_{family.name}{suffix}" in names, family.name
    mount, job = f"mount={recorded_status.MOUNT}", "hinted_job=train-1"
    assert found["fusecache_up", mount] == 1
    assert found["fusecache_reads_total", mount, "tier=ssd"] == 33
    assert found["fusecache_reads_total", mount, "tier=origin"] == 11
    assert found["fusecache_origin_bytes_total", mount] == 12262144
    assert found["fusecache_tier_limit_bytes", mount, "tier=ssd"] == 256000000
    assert found["fusecache_cache_faults_total", "kind=read", mount] == 2
    assert found["fusecache_queued_files", mount, "queue=fetch"] == 22
    assert found["fusecache_metadata_requests_total", "kind=readdir", mount] == 7
    assert found["fusecache_restored_files_total", mount] == 15
    assert found["fusecache_cache_disk_full", mount] == 0
    assert found["fusecache_job_late_reads_total", job, mount, "reason=queued"] == 600
    assert found["fusecache_job_state", job, mount, "state=running"] == 1
    assert found["fusecache_job_samples_per_second", job, mount] == 250
    assert ("fusecache_job_epoch", "hinted_job=eval-1", mount) not in found  # it is not known
    assert found["fusecache_mount_info", mount, "source=/mnt/nfs/imagenet", "version=0.1.0"] == 1


def test_latency_is_a_cumulative_histogram() -> None:
    found = samples(recorded_status.host())
    mount, name = f"mount={recorded_status.MOUNT}", "fusecache_origin_read_seconds"
    buckets = [found[f"{name}_bucket", f"le={le}", mount] for le in ("0.25", "0.5", "1.0", "+Inf")]
    assert buckets == [30, 31, 31, 33]
    assert (found[f"{name}_count", mount], found[f"{name}_sum", mount]) == (33, 9.5)
    assert found["fusecache_read_seconds_bucket", "le=0.01", mount] == 44


def test_what_does_not_answer_is_down_and_anothers_mount_is_not_told_of() -> None:
    found = samples(recorded_status.host())
    assert [key for key in found if "mount=/data/coco" in key] == [
        ("fusecache_up", "mount=/data/coco")
    ]
    assert found["fusecache_up", "mount=/data/coco"] == 0
    assert not [key for key in found if "mount=/home/u/data" in key]
    assert found["fusecache_hintsd_up", f"socket={recorded_status.SOCKET}"] == 1
    assert found["fusecache_hintsd_up", "socket=/run/user/1000/fusecache/hintsd.sock"] == 0


def test_a_full_disk_a_directory_that_is_out_and_a_name_that_is_no_text() -> None:
    status = recorded_status.mount_status()
    status["ssd"] |= {
        "full_disk_bytes": 0,
        "directories": [{"path": "/a", "why_out": "gone"}, {"path": "/b", "why_out": ""}],
    }
    del status["origin"]["read_s"]  # of an older version
    target = recorded_status.target('/data/\udcff "a"\n')
    found = samples(Host([Answer(target, "up", status)], {}))
    mount = 'mount=/data/\\xff "a"\n'
    assert found["fusecache_cache_disk_full", mount] == 1
    assert found["fusecache_cache_directories_out", mount] == 1
    assert ("fusecache_origin_read_seconds_count", mount) not in found


def test_help_is_that_of_the_registry() -> None:
    text = exposition.text(exposition.registry(recorded_status.host))
    assert f"# HELP fusecache_sweeps {metrics.SWEEPS.help} (sweeps)\n" in text
    assert f"# HELP fusecache_prefetch_depth {metrics.DEPTH.help} (fetches)\n" in text
    assert "# UNIT fusecache_origin_bytes bytes\n" in text
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert all(metric.kind == "gauge" or "bytes" in metric.name or metric.unit != "bytes"
               for metric in metrics.DECLARED)  # fmt: skip


def test_scrapes_at_the_same_time_ask_once() -> None:
    asked = []

    def ask() -> Host:
        asked.append(1)
        return recorded_status.host()

    registry = exposition.registry(ask)
    exposition.text(registry)
    exposition.text(registry)
    assert len(asked) == 1


# ---- what is built on them ---------------------------------------------------------------


def exported() -> set[str]:
    return {name for name, *_ in samples(recorded_status.host())}


def test_the_dashboard_uses_metrics_that_exist() -> None:
    board = json.loads((ROOT / "deploy/grafana/fusecache.json").read_text())
    targets = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries = [one["definition"] for one in board["templating"]["list"] if "definition" in one]
    assert len(targets) > 20
    for expr in targets + queries:
        assert NAME.findall(expr), expr
        assert set(NAME.findall(expr)) <= exported(), expr


def test_the_alerts_use_metrics_that_exist() -> None:
    (group,) = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    assert len(group["rules"]) > 10
    for rule in group["rules"]:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["alert"].startswith("Fusecache")
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert NAME.findall(rule["expr"]), rule
        assert set(NAME.findall(rule["expr"])) <= exported(), rule


# ---- where they go -----------------------------------------------------------------------


@pytest.mark.claim("S10")
def test_a_textfile_is_whole_readable_and_in_the_older_format(tmp_path: Path) -> None:
    (tmp_path / exposition.FILE_NAME).symlink_to(tmp_path / "elsewhere")
    exposition.write(exposition.registry(recorded_status.host), str(tmp_path))
    (written,) = tmp_path.iterdir()  # nothing is left beside it, and no link was followed
    assert written.name == "fusecache.prom"
    assert written.stat().st_mode & 0o777 == 0o644
    text = written.read_text()
    assert "# TYPE fusecache_reads_total counter\n" in text
    assert "# EOF" not in text


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fusecache.cli.main", "metrics", *arguments],
        capture_output=True, text=True, timeout=60, env=environment(), check=False,
    )  # fmt: skip


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_what_cannot_be_served_or_written_is_one_line(tmp_path: Path, taken: int) -> None:
    for arguments, code, line in (
        (("--listen", "9460"), 2, "give HOST:PORT"),
        (("--listen", "127.0.0.1:99999"), 2, "give HOST:PORT"),
        (("--listen", "127.0.0.1:1", "--textfile", "/tmp"), 2, "not both"),
        (("--listen", f"127.0.0.1:{taken}"), 1, "Address already in use"),
        (("--textfile", str(tmp_path / "none")), 1, "No such file"),
    ):
        done = command(*arguments)
        assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
        assert line in done.stderr


def test_it_serves_until_it_is_told_to_end() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "fusecache.cli.main", "metrics", "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE, text=True, env=environment(),
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            found = re.search(r"http://\S+", process.stderr.readline())
            assert found is not None
            with urllib.request.urlopen(found[0], timeout=30) as answer:
                text = answer.read().decode()
            assert "# TYPE fusecache_up gauge" in text
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


# ---- asking ------------------------------------------------------------------------------


@pytest.mark.claim("S10")
def test_a_mount_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    targets = [recorded_status.target(), recorded_status.target("/data/hung", "0:98")]

    def status(target: control_client.Target, timeout_s: float) -> dict[str, object]:
        if target.mountpoint == "/data/hung":
            release.wait(60)
        return recorded_status.mount_status()

    monkeypatch.setattr(control_client, "find_all", lambda: targets)
    monkeypatch.setattr(control_client, "status", status)
    monkeypatch.setattr(asking, "is_private", lambda target: False)
    monkeypatch.setattr(control_client, "is_kept", lambda target: True)
    begun_s = time.monotonic()
    try:
        good, hung = asking.look(0.2).mounts
    finally:
        release.set()
    assert time.monotonic() - begun_s < 30
    assert (good.state, hung.state) == ("up", "silent")
    assert (hung.fault, hung.heal) == (
        "no answer within 0.2 s", "fusecache restart /data/hung",
    )  # fmt: skip


def test_a_mount_is_asked_once_and_the_topmost_of_a_place() -> None:
    below, top = recorded_status.target(device="0:1"), recorded_status.target(device="0:2")
    bound = recorded_status.target("/bound", device="0:2")
    assert asking.seen([below, top, bound]) == [top]


def test_a_dead_mount_is_healed_by_mounting_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = recorded_status.target("/data/a b")
    itself = recorded_status.target("/mnt/nfs/imagenet", "0:98")
    monkeypatch.setattr(control_client, "find_all", lambda: [dead, itself])
    monkeypatch.setattr(mounts, "mounts", lambda: [dead.mount, itself.mount])
    monkeypatch.setattr(asking, "is_private", lambda target: False)
    found = asking.look().mounts
    assert [one.state for one in found] == ["dead", "dead"]
    assert [one.heal for one in found] == [
        "fusecache mount /mnt/nfs/imagenet '/data/a b'", "fusecache mount /mnt/nfs/imagenet",
    ]  # fmt: skip
