"""`fusecache pin` on real mounts: what it names stays on SSD, whatever is read besides, and when
server or mount end. What the origin is asked for is counted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_cli import FAILED, OK, USAGE, refused
from tests.mount.test_evict_command import FLAGS, fetched, warm, write
from tests.mount.test_pins import Reading
from tests.support.mounted import Mount, eventually
from tests.support.plan_client import PlanClient

MINE, FULL = 60, 360  # files: 12 MB; more than SSD takes
LRF = (*FLAGS, "--policy", "lrf")
NOT_EVICTED = 10


def pin(mount: Mount, *arguments: str | Path) -> str:
    done = mount.run("pin", mount.path, *arguments)
    assert (done.returncode, done.stderr) == (OK, ""), done.stderr
    return done.stdout


def read_others(mount: Mount, source: Path) -> None:
    """More than SSD takes, until they are stored."""
    Reading(mount, source).read([f"others/{number:03}" for number in range(FULL)])
    mount.drop_kernel_caches()


@pytest.fixture
def filled(place: Place) -> Place:
    write(place.source, "mine", MINE)
    write(place.source, "others", FULL)
    return place


@in_one_mode
@pytest.mark.parametrize("policy", ["lrf", "reuse"])
def test_what_is_pinned_stays(filled: Place, mounting: Mounting, policy: str) -> None:
    mount = mounting(*FLAGS, "--policy", policy)
    assert pin(mount, "mine/*") == "pinned: mine/* (60 files, 11.4 MiB)\n"
    assert mount.value("origin", "bytes") == 0, "nothing is fetched"
    warm(mount, "mine")
    # what is pinned would go in the fourth round: until then `reuse` has not seen enough
    for _ in range(4 if policy == "reuse" else 1):
        read_others(mount, filled.source)
    assert fetched(mount, filled.source, "mine") == 0
    status = mount.value("pins")
    assert (status["globs"], status["files"], status["known"]) == (["mine/*"], MINE, True)
    assert "60 files, 11.4 MiB: mine/*" in mount.run("status", mount.path).stdout
    assert pin(mount, "--remove", "mine/*") == "no pins\n"
    if policy == "lrf":  # `reuse` may keep what was read more than once
        warm(mount, "others/[01]*", "others/20*")
        mount.drop_kernel_caches()
        assert fetched(mount, filled.source, "mine") > 0


@in_one_mode
def test_warm_takes_no_room_of_its_own_files_beside_pins(filled: Place, mounting: Mounting) -> None:
    mount = mounting(*LRF)
    pin(mount, "mine", "others/0*")
    warm(mount, "mine", "others/0*")
    done = mount.run("warm", mount.path, "others/[12]*", "mine")
    assert done.returncode == FAILED
    said = re.search(r"(\d+) files \(.*\) do not fit in --ssd", done.stderr)
    assert said is not None, done.stderr
    assert mount.value("ssd", "blocks") == MINE + 300 - int(said[1]) > MINE + 200


@in_one_mode
def test_pins_survive_the_server_and_the_mount(filled: Place, mounting: Mounting) -> None:
    mount = mounting(*LRF)
    warm(mount, "mine")
    pin(mount, "mine/*")
    mount.kill_server()
    read_others(mount, filled.source)
    assert fetched(mount, filled.source, "mine") == 0
    mount.umount()
    mount = mounting(*LRF, allow_log=mount.allow_log)
    read_others(mount, filled.source)
    assert fetched(mount, filled.source, "mine") == 0
    assert mount.value("pins", "globs") == ["mine/*"]
    pin(mount, "--remove")
    assert mount.value("pins", "files") == 0


@in_one_mode
def test_pins_hold_where_no_name_is_known_yet(filled: Place, mounting: Mounting) -> None:
    flags = (*LRF, "--revalidate", "never")  # nothing is handed to the next mount
    mount = mounting(*flags)
    pin(mount, "mine/*")
    warm(mount, "mine")
    mount.umount()
    mount = mounting(*flags)
    read_others(mount, filled.source)
    assert mount.value("pins", "files") == 0
    assert fetched(mount, filled.source, "mine") == 0


@in_one_mode
def test_a_name_that_came_a_moment_ago_is_not_evicted(filled: Place, mounting: Mounting) -> None:
    flags = (*LRF, "--revalidate", "never")
    mount = mounting(*flags)
    pin(mount, "mine/*")
    warm(mount, "mine")
    mount.umount()
    mount = mounting(*flags)
    done = mount.run("evict", mount.path, "**")  # which is the first to list it
    assert f"{MINE} files left in the cache, pinned by a user" in done.stderr
    assert fetched(mount, filled.source, "mine") == 0


@in_one_mode
def test_what_is_damaged_is_said_once(filled: Place, mounting: Mounting) -> None:
    mount = mounting(*LRF, allow_log=["pins are not used"])
    pin(mount, "mine/*")
    [file] = (filled.cache_dir / "pins").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    eventually(lambda: mount.value("pins", "globs") == [])
    mount.restart()
    eventually(lambda: mount.value("pins", "known"))
    assert mount.log().count("pins are not used") == 2, "by each server"
    warm(mount, "others/[01]*")
    pin(mount, "mine/*")
    assert mount.value("pins", "globs") == ["mine/*"]


@in_one_mode
def test_another_mount_on_the_cache_heeds_them(
    filled: Place, mounting: Mounting, tmp_path: Path
) -> None:
    """Also while the source whose files are pinned is not mounted."""
    write(tmp_path / "second", "others", FULL)
    mountpoint = tmp_path / "second-mount"
    mountpoint.mkdir()
    mount = mounting(*LRF)
    pin(mount, "mine/*")
    warm(mount, "mine")
    mount.umount()  # what was stored last is told now
    other = mounting(*LRF, source=tmp_path / "second", mountpoint=mountpoint)
    read_others(other, tmp_path / "second")
    other.umount()
    mount = mounting(*LRF)
    assert fetched(mount, filled.source, "mine") == 0


@in_one_mode
def test_files_that_come_later_are_pinned(place: Place, mounting: Mounting) -> None:
    write(place.source, "mine", 3)
    write(place.source, "others", FULL)
    mount = mounting(*LRF, "--revalidate", "1")
    pin(mount, "mine")
    write(place.source, "mine", MINE)
    eventually(lambda: mount.value("pins", "files") == MINE)
    warm(mount, "mine")
    read_others(mount, place.source)
    assert fetched(mount, place.source, "mine") == 0


@in_one_mode
def test_neither_a_plan_nor_a_user_evicts_them(filled: Place, mounting: Mounting) -> None:
    mount = mounting(*LRF)
    warm(mount, "mine")
    pin(mount, "mine/*")
    mount.restart()  # whatever it wrote is sealed
    with PlanClient(mount.path) as client:
        inos = sorted(entry[0] for entry in client.listing(b"mine").values())
        for _ in range(2):  # maybe before the server knows what is pinned, and when it does
            client.results.clear()
            client.command("evict", inos)
            client.until(lambda: all(NOT_EVICTED in client.results.get(ino, []) for ino in inos))
            eventually(lambda: mount.value("pins", "known"))
    warm(mount, "others/00*")
    done = mount.run("evict", mount.path, "**")
    assert done.returncode == FAILED
    assert done.stdout.startswith("10 files, ")
    assert (
        f"60 files left in the cache, pinned by a user: fusecache pin {mount.path} --remove"
        in done.stderr
    )
    pin(mount, "--remove", "mine/*")
    assert mount.run("evict", mount.path, "mine").stdout.startswith("60 files, ")


@in_one_mode
def test_what_cannot_be_pinned(filled: Place, mounting: Mounting) -> None:
    mount = mounting(*LRF)
    pin(mount, "mine/0[0-4]*")
    assert refused("pin", mount.path, says="name a GLOB") == USAGE
    assert refused("pin", mount.path, "[z-a]", says="ends before it begins") == USAGE
    assert refused("pin", mount.path, "mine", "no*", says="no file matches no*; nothing") == FAILED
    assert refused("pin", mount.path, "--remove", "mine", says="not pinned: mine") == FAILED
    says = "needs --ssd 83M, and --ssd is 64M: nothing was pinned"
    assert refused("pin", mount.path, "**", says=says) == FAILED
    assert mount.value("pins", "globs") == ["mine/0[0-4]*"]
    assert pin(mount, "mine/05*").startswith("pinned: mine/0[0-4]* mine/05*")
    done = mount.run("pin", mount.path / "others", "--remove")
    assert done.stdout.startswith("pinned: mine/0[0-4]* mine/05* (60 files"), "none is below others"
    assert mount.run("pin", mount.path / "mine", "--remove").stdout == "no pins\n"


@in_one_mode
def test_a_directory_whose_name_looks_like_a_glob(place: Place, mounting: Mounting) -> None:
    for name in ("a[1]*", "a1"):
        write(place.source, name, 2)
    mount = mounting(*LRF)
    done = mount.run("pin", mount.path / "a[1]*", "000")
    assert done.stdout.startswith("pinned: a[[]1][*]/000 (1 file, "), done.stderr
