"""`fusecache evict` on real mounts: what goes, what stays and why; readers notice nothing."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_cli import FAILED, OK, USAGE, refused
from tests.support.mounted import Mount, eventually
from tests.support.plan_client import PlanClient
from tests.support.trees import assert_same, random_bytes

FILE_BYTES = 200_000
FLAGS = ("--ssd", "64M", "--hintsd", "none")


def write(root: Path, directory: str, count: int, size: int = FILE_BYTES) -> None:
    for number in range(count):
        path = root / directory / f"{number:03}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random_bytes(f"{directory}{number}", size + number))
        os.utime(path, (1e9, 1e9))


def warm(mount: Mount, *globs: str) -> None:
    done = mount.run("warm", mount.path, *globs)
    assert done.returncode == OK, done.stderr


def fetched(mount: Mount, source: Path, directory: str) -> int:
    """Files that reading all of the directory takes from the origin."""
    before = int(mount.value("origin", "files"))
    for path in sorted((source / directory).iterdir()):
        assert (mount.path / directory / path.name).read_bytes() == path.read_bytes()
    return int(mount.value("origin", "files")) - before


@pytest.mark.parametrize("policy", ["reuse", "keep"])
def test_what_is_evicted_leaves_ssd_and_ram(place: Place, mounting: Mounting, policy: str) -> None:
    write(place.source, "a", 30)
    write(place.source, "b", 30)
    mount = mounting(*FLAGS, "--policy", policy)
    warm(mount, "b")
    warm(mount, "a")
    assert fetched(mount, place.source, "a") == fetched(mount, place.source, "b") == 0

    def is_in_the_page_cache() -> bool:  # unless the host has just taken pages
        asked = mount.value("reads", "requests")
        assert fetched(mount, place.source, "a") == 0
        return bool(mount.value("reads", "requests") == asked)

    eventually(is_in_the_page_cache)
    reserved = mount.value("ssd", "reserved_bytes")
    done = mount.run("evict", mount.path, "a/*", "no*")
    assert (done.returncode, done.stderr) == (FAILED, "fusecache: warning: no file matches no*\n")
    assert done.stdout.startswith("30 files, 5.72 MiB evicted, ")
    assert mount.value("ssd", "blocks") == 30
    assert mount.value("ssd", "reserved_bytes") < reserved - 29 * FILE_BYTES
    done = mount.run("evict", mount.path / "a", "**")
    assert (done.returncode, done.stderr) == (OK, "")
    assert done.stdout == "0 files, 0 B evicted, 0 B given back on SSD; 30 were not there\n"
    assert fetched(mount, place.source, "b") == 0
    assert fetched(mount, place.source, "a") == 30
    assert mount.value("integrity", "faults") == {}


def test_readers_notice_nothing(place: Place, mounting: Mounting) -> None:
    write(place.source, "a", 8, size=9 << 20)
    mount = mounting("--ssd", "256M", "--hintsd", "none")
    warm(mount)
    path, content = mount.path / "a/003", (place.source / "a/003").read_bytes()
    with open(path, "rb") as opened, open(path, "rb") as mapped:
        assert opened.read(5 << 20) == content[: 5 << 20]
        with mmap.mmap(mapped.fileno(), 0, prot=mmap.PROT_READ) as memory:
            assert memory[:4096] == content[:4096]
            done = mount.run("evict", mount.path, "**")
            assert (done.returncode, done.stderr) == (OK, "")
            assert memory[:] == content
        assert opened.read() == content[5 << 20 :]
    assert mount.value("ssd", "evicted_files") == 8
    assert_same(place.source, mount.path)
    assert mount.value("integrity", "faults") == {}


@in_one_mode
def test_what_a_plan_has_pinned_stays(place: Place, mounting: Mounting) -> None:
    write(place.source, "a", 12)
    write(place.source, "b", 12)
    mount = mounting(*FLAGS)
    warm(mount)
    with PlanClient(mount.path) as client:
        inos = sorted(entry[0] for entry in client.listing(b"a").values())
        client.fetch_all(inos)
        done = mount.run("evict", mount.path, "b/**")
        assert done.returncode == FAILED, "nobody knows yet what the plan wants"
        assert "12 files left in the cache, pinned by hinted jobs: end them first" in done.stderr
        array = np.array(inos[:5], np.uint32)
        client.send("pin", inos=array, number=1, others=True, last=True)
        client.settle()
        done = mount.run("evict", mount.path, "**")
        assert done.returncode == FAILED
        assert done.stdout.startswith("19 files, ")
        assert "5 files left in the cache, pinned by hinted jobs" in done.stderr
        assert fetched(mount, place.source, "a") == 7
    done = mount.run("evict", mount.path, "**")
    assert (done.returncode, done.stderr) == (OK, "")


@in_one_mode
def test_files_that_share_their_bytes_go_together(place: Place, mounting: Mounting) -> None:
    write(place.source, "a", 4)
    write(place.source, "b", 4)
    for number in range(3):
        path = place.source / f"b/{number:03}"
        path.write_bytes((place.source / f"a/{number:03}").read_bytes())
        os.utime(path, (1e9, 1e9))
    mount = mounting(*FLAGS)
    warm(mount)
    assert mount.value("ssd", "blocks") == 5
    done = mount.run("evict", mount.path, "a")
    assert done.returncode == FAILED
    assert (
        "fusecache: 3 files left in the cache: they share blocks with files that were not named"
        in done.stderr
    )
    assert mount.value("ssd", "blocks") == 4
    assert mount.run("evict", mount.path, "**").returncode == OK
    assert mount.value("ssd", "blocks") == 0
    assert_same(place.source, mount.path)


@in_one_mode
def test_so_do_more_files_than_are_evicted_at_once(place: Place, mounting: Mounting) -> None:
    for number in range(1100):
        path = place.write(f"d/{number:04}", b"all the same")
        os.utime(path, (1e9, 1e9))
    mount = mounting(*FLAGS)
    warm(mount)
    assert mount.value("ssd", "blocks") == 1
    done = mount.run("evict", mount.path, "**")
    assert (done.returncode, done.stderr) == (OK, "")
    assert done.stdout.startswith("1,100 files, ")
    assert mount.value("ssd", "blocks") == 0


@in_one_mode
def test_a_mistake_evicts_nothing(place: Place, mounting: Mounting) -> None:
    write(place.source, "a", 3)
    mount = mounting(*FLAGS)
    warm(mount)
    assert refused("evict", mount.path, says="Missing argument 'GLOB...'") == USAGE
    assert refused("evict", mount.path, "", says="'' is no glob") == USAGE
    assert refused("evict", mount.path, "[z-a]", says="ends before it begins") == USAGE
    assert refused("evict", mount.path, "b", says="no file matches b") == FAILED
    assert refused("evict", mount.path, "*a" * 28 + "b", says="no file matches") == FAILED
    assert mount.value("ssd", "blocks") == 3
