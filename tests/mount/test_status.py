"""What `fusecache status` says of a mount that writes a log; how `auto` gets to know its device."""

from __future__ import annotations

import os
import re

from fusecache.base.disk import probe
from fusecache.base.disk.probe import Probe
from fusecache.control import control_client
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


@in_one_mode
def test_how_much_of_the_dataset_is_on_ssd(place: Place, mounting: Mounting) -> None:
    """By all its names once; blocks of large files, one by one; and by the next mount, too."""
    sizes = {"a/1": 100_000, "a/2": 50_000, "b/large": 9 << 20, "b/empty": 0, "b/sparse": 1 << 43}
    for number, (name, size) in enumerate(sizes.items()):
        place.write(name, random_bytes(number, size % (1 << 30)))
    os.truncate(place.source / "b/sparse", sizes["b/sparse"])  # two million blocks
    os.link(place.source / "a/1", place.source / "a/link")
    mount = mounting()

    def is_said(files: int, size_bytes: int, on_ssd_bytes: int, is_whole: bool) -> bool:
        found: dict[str, int] = mount.value("dataset")
        return list(found.values()) == [files, size_bytes, on_ssd_bytes, is_whole]

    os.listdir(mount.path)
    os.listdir(mount.path / "a")
    assert is_said(2, 150_000, 0, False)
    os.listdir(mount.path / "b")
    assert is_said(5, sum(sizes.values()), 0, True)
    (mount.path / "a/1").read_bytes()
    eventually(lambda: is_said(5, sum(sizes.values()), 100_000, True))
    (mount.path / "b/large").read_bytes()
    eventually(lambda: is_said(5, sum(sizes.values()), 100_000 + sizes["b/large"], True))
    (place.source / "a/2").unlink()
    control_client.ask(control_client.find(str(mount.path)), {"op": "sweep"})
    assert is_said(4, sum(sizes.values()) - 50_000, 100_000 + sizes["b/large"], True)
    mount.umount()
    mount.start()  # nothing is located yet: the index tells
    assert is_said(4, sum(sizes.values()) - 50_000, 100_000 + sizes["b/large"], False)
    said = " ".join(mount.run("status", mount.path).stdout.split())
    assert "dataset 4 files, cached 9.1 MiB of 8 TiB (0%) that are known" in said
    mount.run("evict", mount.path, "b/large")
    assert mount.value("dataset")["on_ssd_bytes"] == 100_000
