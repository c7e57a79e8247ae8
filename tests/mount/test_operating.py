"""What an operator sees of mounts that live, and of one that died."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import alive, drop_file, eventually
from tests.support.trees import random_bytes

FILE_BYTES = 100_000


@in_one_mode
def test_the_export_is_what_the_mount_says_of_itself(place: Place, mounting: Mounting) -> None:
    names = ("a", "b", "c")
    for number, name in enumerate(names):
        place.write(name, random_bytes(number, FILE_BYTES))
    place.write("large", random_bytes(9, 5 << 20))  # in two blocks, which Python fetches
    mount = mounting("--ram", "16M")
    for name in (*names, "large"):
        assert len((place.mountpoint / name).read_bytes()) >= FILE_BYTES
    assert len(os.listdir(place.mountpoint)) == 4  # C answers of what is listed
    mount.drop_kernel_caches()
    before = mount.status()["metadata"]
    assert sum((place.mountpoint / name).stat().st_size for name in names) == 3 * FILE_BYTES
    status = mount.status()
    assert status["metadata"]["lookups"] - before["lookups"] == len(names)

    def exported() -> dict[tuple[str, str | None], float]:
        text, found = mount.run("metrics").stdout, {}
        for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
            for sample in family.samples:
                if sample.labels.get("mount") == str(mount.path):
                    found[sample.name, sample.labels.get("tier")] = sample.value
        assert found["fusecache_up", None] == 1, "it did not answer in time"
        return found

    found = eventually(exported)
    assert found["fusecache_origin_files_total", None] == status["origin"]["files"] == 4
    # Small files by the fetch threads, blocks by Python; what is young may be read again.
    assert found["fusecache_origin_read_seconds_count", None] >= 3 + 2
    assert 0 < found["fusecache_origin_read_seconds_sum", None] < 60
    assert found["fusecache_reads_total", "origin"] == status["reads"]["from_origin"] > 0
    assert found["fusecache_read_seconds_count", None] == status["reads"]["requests"]
    assert found["fusecache_tier_limit_bytes", "ram"] == 16 << 20
    mount.restart("--log-format", "json")
    lines = mount.log().splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert {line["mount"] for line in told} == {str(mount.path)}
    loggers = {line["logger"] for line in told}
    assert "fusecache.keeper" in loggers
    assert "fusecache.server.serving" in loggers


@pytest.mark.parametrize("size_bytes", [1000, 5 << 20], ids=["small", "in blocks"])
def test_how_long_reads_took_is_told(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, size_bytes: int
) -> None:
    """Also what waited for the origin, and whoever answered it: fetch threads, or Python."""
    place.write("held", random_bytes("held", size_bytes))
    mount = mounting("--ram", "16M", source=faulty.mountpoint)
    faulty.add(Fault("read", "held", hang=True))

    def slow() -> int:
        """READs that took more than half a second."""
        took = mount.value("reads", "read_s")
        bounds, counts = took["bounds"], took["counts"]
        assert len(counts) == len(bounds) + 1
        return sum(counts[sum(bound <= 0.5 for bound in bounds) :])

    with ThreadPoolExecutor() as pool:
        reading = pool.submit((mount.path / "held").read_bytes)
        eventually(lambda: faulty.hanging() > 0)
        time.sleep(0.6)
        assert slow() == 0
        faulty.clear()
        assert reading.result() == random_bytes("held", size_bytes)
    assert slow() > 0
    drop_file(mount.path / "held")
    before = sum(mount.value("reads", "read_s")["counts"])
    (mount.path / "held").read_bytes()
    assert sum(mount.value("reads", "read_s")["counts"]) > before


@in_one_mode
def test_a_dead_mount_is_shown_with_the_command_that_heals_it(
    place: Place, mounting: Mounting
) -> None:
    mount = mounting("--ram", "16M", allow_log=[".*"])
    log_file = mount.run("list", "--json").stdout
    assert str(mount.log_file) in log_file
    server_pid = mount.server_pid()
    os.kill(mount.keeper_pid, signal.SIGKILL)  # first, or it starts another server
    os.kill(server_pid, signal.SIGKILL)
    eventually(lambda: not alive(mount.keeper_pid) and not alive(server_pid))

    def state() -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(mount.run("status", "--json").stdout)
        return {one["mountpoint"]: one for one in found}[str(mount.path)]

    eventually(lambda: state()["state"] == "dead")  # the last of its threads has closed /dev/fuse
    dead = state()
    assert dead["status"] is None
    assert f"DEAD: {dead['fault']}" in mount.run("status").stdout
    assert f'fusecache_up{{mount="{mount.path}"}} 0.0' in mount.run("metrics").stdout
    doctor = mount.run("doctor", mount.path)
    assert (doctor.returncode, "1 problem" in doctor.stdout) == (1, True)
    assert shlex.split(dead["heal"]) == ["fusecache", *mount.mount_arguments()[:3]]
    mount.start()  # so it is done, with the options of before

    def is_well() -> bool:  # and answers in time
        doctor = mount.run("doctor", "--json", mount.path)
        about = {one["about"] for one in json.loads(doctor.stdout) if one["mount"]}
        assert {"open mode", "memory", "hintsd", "cache disk", "origin", "clock"} < about
        return doctor.returncode == 0

    eventually(is_well)
    assert mount.run("status", mount.path).stdout.count(str(mount.log_file)) == 1
