"""What `fusecache status` says of a mount that writes a log; how `auto` gets to know its device."""

from __future__ import annotations

import re

from fusecache.base.disk import probe
from fusecache.base.disk.probe import Probe
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import eventually
from tests.support.plan_client import PlanClient
from tests.support.trees import random_bytes

STORE, MOVE = 1, 2
FILES, FILE_BYTES = 40, 100_000


@in_one_mode
def test_status_follows_a_log(place: Place, mounting: Mounting) -> None:
    for number in range(FILES):
        place.write(f"{number}", random_bytes(number, FILE_BYTES))
    mount = mounting("--ram", "16M", "--layout", "reorder")
    assert "nothing is moved: mounted without hints" in mount.run("status", mount.path).stdout
    with PlanClient(mount.path) as client:
        listed = client.listing(b"")
        inos = [entry[0] for entry in listed.values()]
        client.pack([inos[:20], inos[20:]], FILES * FILE_BYTES)
        client.stage_all(inos[:30], STORE | MOVE)

        def are_written() -> bool:
            layout = mount.value("layout")
            return bool(layout["log_moved_samples"] == 30)

        def check_bytes(**files: int) -> None:
            """So many files, and once more what the kernel has let go of meanwhile."""
            status = mount.status()
            for name, count in files.items():
                again = status["reads"][f"bytes_{name}"] / FILE_BYTES - count
                assert 0 <= again <= status["prefetch"]["restored_files"], name

        eventually(are_written)
        layout = mount.value("layout")
        assert layout["log_samples"] == FILES
        assert layout["log_files"] == layout["log_moved_samples"]  # each where `status` says
        check_bytes(served=30, staged=0)
        said = " ".join(mount.run("status", mount.path).stdout.split())
        assert f"{layout['log_files']} files in the log" in said
        share = layout["log_moved_samples"] / FILES
        assert f"the next epoch's log is being written, {share:.0%} is there" in said
        assert re.search(r"MiB written in 1 log, (1\.[0-9]|0\.[5-9])", said)
        client.command("drop", inos[:10])
        client.obeyed()
        client.stage_all(inos[:10], STORE)
        check_bytes(served=40, staged=10)
        (place.mountpoint / list(listed)[35].decode()).read_bytes()  # nobody staged it
        check_bytes(served=41, staged=10)


@in_one_mode
def test_auto_measures_when_a_hintsd_connects(place: Place, mounting: Mounting) -> None:
    mount = mounting("--ram", "16M", "--layout", "auto")
    assert probe.load(mount.cache_dir) is None
    with PlanClient(mount.path) as client:
        assert "probe" not in client.hello["mount"]
        client.until(lambda: "probe" in client.state)
        found = Probe.from_map(client.state["probe"])
    assert probe.load(mount.cache_dir) == found
    assert "random reads of 4 KiB" in mount.run("probe", "--show", mount.path).stdout
    with PlanClient(mount.path) as client:
        assert Probe.from_map(client.hello["mount"]["probe"]) == found
