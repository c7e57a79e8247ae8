"""What tools/prometheus runs in namespaces of its own, as root. A line for all that holds."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import traceback
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tools.services_lib.inside import PROGRAMS, eventually, fusecache, holds, run

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD, ALERTS = ROOT / "deploy/grafana/fusecache.json", ROOT / "deploy/prometheus/alerts.yml"
FILES, FILE_BYTES = 300, 20_000
METRICS, SERVER = "127.0.0.1:9460", "127.0.0.1:9090"
CONFIG = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ["{alerts}"]
scrape_configs:
  - job_name: fusecache
    static_configs: [{{targets: ["{metrics}"]}}]
"""
# What Grafana puts in the place of its variables.
VARIABLES = {"$instance": ".*", "$mount": ".*", "$__rate_interval": "10s"}
# Nothing went wrong here, so their counters do not exist; no READ was late, or for no known reason.
MAY_BE_EMPTY = ("cache_faults_total", "late_reads_total")
READER = """\
import pathlib, sys, time
import numpy as np
import hintsd
paths = sorted(pathlib.Path(sys.argv[1]).rglob("*.jpg"))
order = lambda epoch: np.random.default_rng(epoch).permutation(len(paths))
with hintsd.connect(sys.argv[1]).order(order, epochs=10_000, paths=paths) as job:
    for epoch in range(10_000):
        for at, index in enumerate(order(epoch)):
            job.step(at, epoch)
            paths[index].read_bytes()
            time.sleep(0.002)
"""


def asked(path: str, **query: str) -> Any:
    """What Prometheus answers. AssertionError: an error."""
    url = f"http://{SERVER}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    assert found["status"] == "success", found
    return found["data"]


def is_scraped() -> bool:
    try:
        return bool(asked("query", query="fusecache_job_reads_total > 0")["result"])
    except (urllib.error.URLError, AssertionError):  # AssertionError: it is not ready
        return False


def rules() -> dict[str, dict[str, Any]]:
    return {rule["name"]: rule for group in asked("rules")["groups"] for rule in group["rules"]}


def expressions() -> list[str]:
    """Those of the dashboard, as Grafana would ask."""
    board = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    for variable, value in VARIABLES.items():
        found = [expression.replace(variable, value) for expression in found]
    return found


def check(work: Path) -> None:
    source, mount = work / "source", work / "mount"
    mount.mkdir()
    for number in range(FILES):
        path = source / f"{number % 3}/{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(number).randbytes(FILE_BYTES))
    limits = ("--ram", "16M", "--ssd", "64M", "--keep-free", "0")
    fusecache("mount", source, mount, "--cache-dir", work / "cache", *limits)
    subprocess.Popen([sys.executable, "-c", READER, str(mount)], stderr=subprocess.DEVNULL)
    subprocess.Popen([str(PROGRAMS / "fusecache"), "metrics", "--listen", METRICS])

    run("promtool", "check", "rules", ALERTS)
    (work / "textfile").mkdir()
    fusecache("metrics", "--textfile", work / "textfile")
    text = (work / "textfile/fusecache.prom").read_text()
    run("promtool", "check", "metrics", input=text)
    holds("promtool finds nothing in the rules, nor in the metrics")

    (work / "prometheus.yml").write_text(CONFIG.format(alerts=ALERTS, metrics=METRICS))
    run("promtool", "check", "config", work / "prometheus.yml")
    subprocess.Popen(
        [
            "prometheus",
            f"--config.file={work}/prometheus.yml",
            f"--storage.tsdb.path={work}/database",
            f"--web.listen-address={SERVER}",
            "--log.level=error",
        ]
    )
    eventually(is_scraped)
    (target,) = asked("targets")["activeTargets"]
    assert target["health"] == "up", target
    holds("a Prometheus scrapes the mount, hintsd and the job")

    def answers() -> bool:
        """`rate` wants two scrapes."""
        empty = [one for one in expressions() if not asked("query", query=one)["result"]]
        return all(any(name in one for name in MAY_BE_EMPTY) for one in empty)

    eventually(answers)
    holds(f"each of the dashboard's {len(expressions())} expressions is valid, and has values")

    (share,) = asked("query", query="fusecache_dataset_on_ssd_bytes / fusecache_dataset_bytes")[
        "result"
    ]
    assert 0 < float(share["value"][1]) <= 1, share
    found = rules()
    names = re.findall(r"- alert: (\w+)", ALERTS.read_text())
    assert sorted(found) == sorted(names)
    assert all(rule["health"] in ("ok", "unknown") for rule in found.values()), found
    assert found["FusecacheMountDown"]["state"] == "inactive"
    eventually(lambda: all(rule["health"] == "ok" for rule in rules().values()))
    holds(f"all {len(names)} alerts are loaded, and can be computed")

    status = json.loads(fusecache("status", mount, "--json"))
    for pid in (status["keeper_pid"], status["server_pid"]):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: rules()["FusecacheMountDown"]["state"] == "pending")
    holds("of a mount that has died the alert is pending")


def main() -> int:
    try:
        check(Path(sys.argv[1]))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
