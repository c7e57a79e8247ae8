"""A cache of several directories under live mounts: one disk of them dies."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import Mount, drop_file, eventually
from tests.support.trees import random_bytes

FILES = 160
FILE_BYTES = 300_000
ALLOWED = [
    "directory fault",
    "io fault",
    "index fault",
    "checksum fault",
    "missing fault",
    "read fault",
]
_EXT4_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN: from now every I/O fails
_AT_ONCE = struct.pack("I", 2)  # without writing the journal out


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[list[Path]]:
    """Two small disks."""
    made = []
    for name in ("one", "two"):
        image, mountpoint = tmp_path / f"{name}.img", tmp_path / name
        with image.open("wb") as file:
            file.truncate(256 << 20)
        mountpoint.mkdir()
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mountpoint], check=True)
        made.append(mountpoint)
    yield made
    for mountpoint in made:
        subprocess.run(["umount", "-l", mountpoint], check=True)


def kill_disk(disk: Path) -> None:
    fd = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _EXT4_SHUTDOWN, _AT_ONCE)
    finally:
        os.close(fd)


def written(place: Place) -> dict[str, bytes]:
    files = {f"{n % 4}/{n:03d}": random_bytes(n, FILE_BYTES) for n in range(FILES)}
    for name, content in files.items():
        place.write(name, content)
    return files


def assert_read(root: Path, files: dict[str, bytes]) -> None:
    """Through the front, not from page cache."""
    for name, content in files.items():
        drop_file(root / name)
        assert (root / name).read_bytes() == content


@in_one_mode
@pytest.mark.claim("F8")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_disk_dies_under_the_mount(
    disks: list[Path], place: Place, mounting: Mounting, lost: int
) -> None:
    files = written(place)
    flags = ("--cache-dir", str(disks[1] / "cache"), "--ssd", "200M", "--keep-free", "1M")
    cache = disks[0] / "cache"
    log = place.base / "mount.log"
    mount = mounting(*flags, cache_dir=cache, log_file=log, allow_log=ALLOWED)
    assert_read(mount.path, files)
    eventually(lambda: mount.value("ssd", "blocks") == FILES)
    parts = mount.value("ssd", "directories")
    assert all(part["segments"] > 0 and not part["why_out"] for part in parts)
    before = mount.value("reads", "from_origin")
    assert_read(mount.path, files)
    assert mount.value("reads", "from_origin") == before

    kill_disk(disks[lost])

    def is_out() -> bool:
        assert_read(mount.path, files)
        return bool(mount.value("ssd", "directories")[lost]["why_out"])

    eventually(is_out)
    assert not mount.value("ssd", "directories")[1 - lost]["why_out"]
    assert mount.value("integrity", "mismatches") == 0  # it is the disk that fails
    said = mount.run("status", mount.path).stdout
    assert said.count("OUT OF SERVICE") == 1
    assert len([line for line in mount.log().splitlines() if "out of service" in line]) == 1

    def is_stored_again() -> bool:
        before = mount.value("reads", "from_origin")
        assert_read(mount.path, files)
        return bool(mount.value("reads", "from_origin") == before)

    eventually(is_stored_again)


@in_one_mode
@pytest.mark.claim("F7", "F8")
def test_two_mounts_share_them(disks: list[Path], place: Place, mounting: Mounting) -> None:
    files = written(place)
    flags = ("--cache-dir", str(disks[1] / "cache"), "--ssd", "200M", "--keep-free", "1M")
    cache, other = disks[0] / "cache", place.base / "other"
    other.mkdir()
    one = mounting(*flags, cache_dir=cache, log_file=place.base / "1.log")
    two = mounting(*flags, cache_dir=cache, log_file=place.base / "2.log", mountpoint=other)
    assert_read(one.path, files)
    eventually(lambda: one.value("ssd", "blocks") == FILES)
    assert_read(two.path, files)
    assert two.value("reads", "from_origin") == 0
    done = two.run("gc", str(cache), str(disks[1] / "cache"))
    assert done.returncode == 0, done.stderr
    done = two.run("gc", str(cache))
    assert "one of 2 directories" in done.stderr
    third = place.base / "third"
    third.mkdir()
    subset = ("mount", str(place.source), str(third), "--cache-dir", str(cache))
    done = two.run(*subset)
    assert done.returncode != 0
    assert f"uses {cache}, {disks[1] / 'cache'}" in done.stderr


@in_one_mode
@pytest.mark.claim("F8")
def test_a_directory_that_is_not_given_is_told_of(place: Place, mounting: Mounting) -> None:
    """On stderr, of the mount and of a restart."""
    cache, more = place.base / "cache", place.base / "more"
    flags = ("--cache-dir", str(more))
    first = mounting(*flags, cache_dir=cache)
    first.umount()
    mount = Mount(
        place.source,
        place.mountpoint,
        more,
        "--cache-dir",
        str(more),
        "--ssd",
        "64M",
        log_file=place.base / "mount.log",
        allow_log=ALLOWED,
    )
    done = mount.run(*mount.mount_arguments())
    assert (done.returncode, done.stderr.count("1 of them is not given now")) == (0, 1)
    assert f"the same twice: --cache-dir {more} {more}" in done.stderr
    done = mount.run("restart", mount.path, "--cache-dir", str(cache), *flags)
    assert done.returncode == 0
    assert f"{cache} is back" in done.stderr
    done = mount.run("umount", mount.path)
    assert done.returncode == 0, done.stderr


@in_one_mode
@pytest.mark.claim("F7", "F8")
def test_what_a_mount_knows_of_dead_directories_is_not_met_again(
    place: Place, mounting: Mounting
) -> None:
    """Two of three become home of the same cache, neither knowing of the other."""
    files = dict(list(written(place).items())[:40])
    paths = [place.base / name for name in "abc"]
    flags = [text for path in paths[1:] for text in ("--cache-dir", str(path))]
    first = mounting("--ssd", "200M", cache_dir=paths[0])

    def is_stored(mount: Mount) -> bool:
        before = mount.value("reads", "from_origin")
        assert_read(mount.path, files)
        return bool(mount.value("reads", "from_origin") == before)

    eventually(lambda: is_stored(first))
    first.umount()  # so the other two get nothing
    mount = mounting(
        *flags,
        "--ssd",
        "200M",
        cache_dir=paths[0],
        log_file=place.base / "mount.log",
        allow_log=ALLOWED,
    )
    assert is_stored(mount)

    def lose(path: Path) -> None:
        path.rename(path.with_name(f"{path.name}.away"))
        path.write_bytes(b"no directory")

    for lost, back in ((paths[::2], []), ([paths[1]], [paths[2]])):
        for path in back:
            path.unlink()
            path.with_name(f"{path.name}.away").rename(path)
        for path in lost:
            lose(path)
        mount.kill_server()
        assert_read(mount.path, files)
        eventually(lambda: is_stored(mount))
        files = dict(reversed(files.items()))
