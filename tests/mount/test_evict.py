"""Files are evicted from SSD one by one, for a plan: their room is there for others at once, and
readers of any mount get the origin's bytes, without a fault of the cache.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import Mount, eventually
from tests.support.plan_client import PlanClient
from tests.support.trees import assert_same, random_bytes

FILE_BYTES = 300_000
COUNT = 240  # more than SSD takes
FLAGS = ("--ram", "16M", "--ssd", "48M", "--hintsd", "none", "--policy", "lrf")
STORED, EVICTED, NOT_EVICTED = 2, 9, 10


def write(root: Path, count: int = COUNT, size: int = FILE_BYTES) -> None:
    for number in range(count):
        path = root / f"d/{number:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random_bytes(f"{number}", size + number))
        os.utime(path, (1e9, 1e9))


def inodes(client: PlanClient, stored: bool | None = None) -> list[int]:
    """Of all files, in the order of their names, or of those that are `stored` or not."""
    entries = sorted(client.listing(b"d").items())
    return [e[0] for _, e in entries if stored is None or bool(e[3]) == stored]


def evict(client: PlanClient, inos: list[int]) -> list[int]:
    """The results."""
    for ino in inos:
        client.results.pop(ino, None)
    client.command("evict", inos)
    answers = {EVICTED, NOT_EVICTED}
    client.until(lambda: all(answers.intersection(client.results.get(ino, ())) for ino in inos))
    client.settle()  # what the kernel let go of may be told of, too
    told = [[r for r in client.results[ino] if r in (EVICTED, NOT_EVICTED)] for ino in inos]
    assert all(len(results) == 1 for results in told)
    return [results[0] for results in told]


def read_all(mount: Mount, source: Path) -> None:
    mount.drop_kernel_caches()
    assert_same(source, mount.path)


def assert_no_fault(*mounts: Mount) -> None:
    for mount in mounts:
        assert mount.value("integrity", "mismatches") == 0
        assert mount.value("integrity", "faults") == {}


@in_one_mode
def test_what_is_evicted_makes_room_for_others(place: Place, mounting: Mounting) -> None:
    write(place.source)
    mount = mounting(*FLAGS)
    with PlanClient(mount.path) as client:
        assert client.hello["mount"]["evicts"] == 1
        inos = inodes(client)
        client.fetch_all(inos)
        client.settle()
        there = inodes(client, stored=True)
        assert 100 < len(there) < COUNT
        room = client.state["ssd_room_bytes"]
        assert room < FILE_BYTES
        reserved = mount.value("ssd", "reserved_bytes")
        results = evict(client, there[::2])
        gone = [ino for ino, result in zip(there[::2], results, strict=True) if result == EVICTED]
        assert set(results) <= {EVICTED, NOT_EVICTED}
        assert len(gone) > len(there) // 3, "all but those in the segment that is written"
        assert client.state["ssd_room_bytes"] > len(gone) * FILE_BYTES * 0.8
        assert reserved - mount.value("ssd", "reserved_bytes") >= len(gone) * FILE_BYTES * 0.9
        assert mount.value("ssd", "evicted_files") == len(gone)
        assert mount.value("ssd", "evicted_bytes") >= len(gone) * FILE_BYTES * 0.9
        assert set(inodes(client, stored=True)) == set(there) - set(gone)
        others = [ino for ino in inos if ino not in there][: len(gone) * 3 // 4]
        assert client.fetch_all(others) == {STORED: len(others)}
        assert client.state["segments_lost"] == 0
        assert set(inodes(client, stored=True)) == set(there) - set(gone) | set(others)
        assert evict(client, gone) == [EVICTED] * len(gone), "again: there is nothing"
        read_all(mount, place.source)
        assert mount.value("ssd", "reserved_bytes") <= 48 << 20
    assert_no_fault(mount)


@in_one_mode
def test_small_files_share_pages(place: Place, mounting: Mounting) -> None:
    """Bytes of what is evicted may be left on the disk; it is stored no more."""
    write(place.source, 90, size=2_000)
    mount = mounting(*FLAGS)
    with PlanClient(mount.path) as client:
        inos = inodes(client)
        assert client.fetch_all(inos) == {STORED: 90}
        mount.restart()
    with PlanClient(mount.path) as client:  # whose segment is sealed by now
        assert inodes(client, stored=True) == inos
        assert evict(client, inos[::2]) == [EVICTED] * 45
        assert inodes(client, stored=True) == inos[1::2]
        before = mount.value("origin", "files")
        read_all(mount, place.source)
        assert mount.value("origin", "files") == before + 45
    assert_no_fault(mount)


@in_one_mode
def test_what_another_mount_evicts_is_a_miss(
    place: Place, mounting: Mounting, tmp_path: Path
) -> None:
    """Its table knows where the files lie, and is not told."""
    write(place.source, 80)
    second = tmp_path / "second"
    second.mkdir()
    one, two = mounting(*FLAGS), mounting(*FLAGS, mountpoint=second)
    with PlanClient(one.path) as client, PlanClient(two.path) as other:
        inos = inodes(client)
        assert client.fetch_all(inos) == {STORED: 80}
        eventually(lambda: len(inodes(other)) == 80)
        read_all(two, place.source)
        eventually(lambda: two.value("ssd", "blocks") == 80)
        mine, theirs = inodes(client), inodes(other)
        gone = [n for n, r in enumerate(evict(client, mine)) if r == EVICTED]
        assert len(gone) > 40
        results = other.stage_all(theirs, store=0)  # deep reads of what was punched
        assert sum(results.values()) == 80
        read_all(two, place.source)
        assert evict(other, [theirs[n] for n in gone[:5]])
        read_all(two, place.source)
        read_all(one, place.source)
    done = two.run("verify", two.path)
    assert done.returncode == 0, done.stdout
    assert_no_fault(one, two)


@in_one_mode
def test_the_server_is_killed_while_it_evicts(place: Place, mounting: Mounting) -> None:
    write(place.source)
    mount = mounting(*FLAGS)
    for turn in range(4):
        with PlanClient(mount.path) as client:
            inos = inodes(client)
            client.fetch_all(inos)
            client.command("evict", inodes(client, stored=True)[turn % 3 :: 2])
            client.listen(0.004 * turn)
            mount.kill_servers_now()
        read_all(mount, place.source)
        assert mount.value("ssd", "reserved_bytes") <= 48 << 20
    done = mount.run("verify", mount.path)
    assert done.returncode == 0, done.stdout
    assert_no_fault(mount)


@in_one_mode
@pytest.mark.parametrize("fields", [{}, {"inos": b"\1\0\0"}, {"inos": bytes(4 * 65_537)}])
def test_a_malformed_frame_ends_the_channel(
    place: Place, mounting: Mounting, fields: dict[str, object]
) -> None:
    write(place.source, 3)
    mount = mounting(*FLAGS)
    with PlanClient(mount.path) as client:
        client.send("evict", **fields)
        client.wait_closed()
        assert len(client.errors) == 1
    read_all(mount, place.source)


@in_one_mode
def test_what_is_no_file_or_never_was_stored(place: Place, mounting: Mounting) -> None:
    write(place.source, 3)
    (place.source / "d/empty").touch()
    mount = mounting(*FLAGS, "--policy", "keep")
    with PlanClient(mount.path) as client:
        assert "evicts" not in client.hello["mount"]
        inos = inodes(client)
        assert evict(client, [1, 4_000_000, *inos]) == [EVICTED] * 6
        assert client.fetch_all(inos[:2]) == {STORED: 2}
        assert evict(client, [inos[0], inos[0]]) == [NOT_EVICTED] * 2
    read_all(mount, place.source)
