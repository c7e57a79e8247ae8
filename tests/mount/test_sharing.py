"""The cache directory: shared by mounts, limited in size, kept from one mount to the next."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import Mount, digest, eventually
from tests.support.trees import assert_same, make_files, random_bytes

MIB = 1 << 20


def disk_bytes(directory: Path) -> int:
    """What the directory takes on its disk; files may go while it is measured."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@pytest.mark.claim("F7", "R5")
@in_one_mode
def test_two_mounts_share_a_cache_directory(place: Place, mounting: Mounting) -> None:
    """Same source: fetched once. Another source with the same content: stored once."""
    make_files(place.source, 60, lambda index: 30_000 + index)
    other_source, second, third = (place.base / name for name in ("source 2", "mnt 2", "mnt 3"))
    for directory in (other_source, second, third):
        directory.mkdir()
    make_files(other_source, 60, lambda index: 30_000 + index)
    (other_source / "more").write_bytes(b"only here")
    one = mounting()
    assert_same(place.source, one.path)
    eventually(lambda: one.value("ssd", "blocks") == 60)
    two = mounting(mountpoint=second)
    assert_same(place.source, two.path)
    assert two.value("reads", "from_origin") == 0
    three = mounting(source=other_source, mountpoint=third)
    assert_same(other_source, three.path)
    eventually(lambda: three.value("ssd", "blocks") == 61)
    for source, mount in ((place.source, one), (place.source, two), (other_source, three)):
        mount.drop_kernel_caches()
        assert_same(source, mount.path)
    assert one.value("reads", "from_origin") == 60
    two.umount()
    one.kill_server()
    assert_same(place.source, one.path)
    assert_same(other_source, three.path)


@in_one_mode
@pytest.mark.claim("F6", "F7")
def test_the_smaller_limit_holds_for_both_mounts(place: Place, mounting: Mounting) -> None:
    """Also when the segment that the larger one is writing exceeds it."""
    files = make_files(place.source, 40, lambda _: MIB)
    second = place.base / "second"
    second.mkdir()
    large = mounting("--ssd", "1G")
    assert digest(large.path / files[0].relative_to(place.source)) == digest(files[0])
    eventually(lambda: large.value("ssd", "blocks") == 1)
    ssd = large.status()["ssd"]
    assert ssd["bytes"] < 3 * MIB
    assert ssd["reserved_bytes"] >= 64 * MIB
    small = mounting("--ssd", "48M", mountpoint=second)
    eventually(lambda: large.value("ssd", "limit_bytes") == 48 * MIB)
    assert small.value("ssd", "limit_bytes") == 48 * MIB
    eventually(lambda: disk_bytes(place.cache_dir) <= 48 * MIB)
    for path in files:
        assert digest(small.path / path.relative_to(place.source)) == digest(path)
    eventually(lambda: small.value("ssd", "blocks") > 10)
    assert disk_bytes(place.cache_dir) <= 48 * MIB
    small.umount()
    eventually(lambda: large.value("ssd", "limit_bytes") == 1024 * MIB)


@pytest.mark.claim("F6")
@in_one_mode
def test_capacity_is_a_limit_and_eviction_makes_room(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 80, lambda _: MIB)
    mount = mounting("--ssd", "32M", "--ram", "64M", "--policy", "lrf")
    for path in files:
        assert digest(mount.path / path.relative_to(place.source)) == digest(path)
        assert disk_bytes(place.cache_dir) <= 32 * MIB
    eventually(
        lambda: 0 < mount.value("ssd", "reserved_bytes") <= mount.value("ssd", "limit_bytes")
    )
    assert mount.value("ssd", "limit_bytes") == 32 * MIB
    mount.drop_kernel_caches()
    before = mount.status()
    for path in files[-4:]:  # fetched last, so still there
        assert digest(mount.path / path.relative_to(place.source)) == digest(path)
    assert mount.value("origin", "bytes") == before["origin"]["bytes"]
    assert digest(mount.path / files[0].relative_to(place.source)) == digest(files[0])
    assert mount.value("origin", "bytes") > before["origin"]["bytes"]
    assert disk_bytes(place.cache_dir) <= 32 * MIB


def _sizes_of_segments(place: Place) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (place.cache_dir / "segments").iterdir()}


def _fetched(mount: Mount, place: Place, order: list[Path]) -> int:
    """Bytes that the origin gave for one epoch of these."""
    mount.drop_kernel_caches()
    before: int = mount.value("origin", "bytes")
    for path in order:
        (mount.path / path.relative_to(place.source)).read_bytes()
    after: int = mount.value("origin", "bytes")
    return after - before


@in_one_mode
@pytest.mark.claim("F6")
def test_the_default_replaces_nothing_in_shuffles_and_a_dataset_that_is_read_no_more(
    place: Place, mounting: Mounting
) -> None:
    size, count = 64 << 10, 800
    files = make_files(place.source / "a", count, lambda _: size)
    others = make_files(place.source / "b", count // 4, lambda _: size, seed=1)
    mount = mounting("--ssd", "32M", "--ram", "32M")
    shuffled = random.Random(0)
    assert _fetched(mount, place, shuffled.sample(files, count)) == count * size
    segments = _sizes_of_segments(place)
    held = mount.value("ssd", "blocks")
    for _ in range(3):
        fetched = _fetched(mount, place, shuffled.sample(files, count))
        assert fetched <= (count - 0.95 * held) * size
    gone = segments.keys() - _sizes_of_segments(place).keys()
    # The last segments are small: in one of a file or two chance may tell that nobody reads it.
    assert sum(segments[name] for name in gone) <= 4 * size
    for _ in range(2):
        _fetched(mount, place, shuffled.sample(others, len(others)))
    assert _fetched(mount, place, shuffled.sample(others, len(others))) <= len(others) * size / 10


@in_one_mode
@pytest.mark.claim("F6")
def test_policy_keep_never_replaces(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 60, lambda _: MIB)
    mount = mounting("--ssd", "32M", "--policy", "keep", "--ram", "64M")
    for path in files:
        assert digest(mount.path / path.relative_to(place.source)) == digest(path)
    eventually(lambda: mount.value("ssd", "bytes") >= 16 * MIB)
    mount.drop_kernel_caches()
    fetched = mount.value("origin", "bytes")
    assert digest(mount.path / files[0].relative_to(place.source)) == digest(files[0])
    assert mount.value("origin", "bytes") == fetched
    for path in files:
        assert digest(mount.path / path.relative_to(place.source)) == digest(path)
    mount.drop_kernel_caches()
    fetched = mount.value("origin", "bytes")
    assert digest(mount.path / files[0].relative_to(place.source)) == digest(files[0])
    assert mount.value("origin", "bytes") == fetched
    assert disk_bytes(place.cache_dir) <= 32 * MIB


@in_one_mode
@pytest.mark.claim("F6")
def test_keep_free_is_left_to_others(place: Place, small_disk: Path, mounting: Mounting) -> None:
    """Another program fills the disk: the cache shrinks until the promised space is free."""
    files = make_files(place.source, 40, lambda _: MIB)
    mount = mounting(
        *("--ssd", "32M", "--keep-free", "16M"), cache_dir=small_disk / "cache", allow_log=["disk"]
    )
    for path in files:
        assert digest(mount.path / path.relative_to(place.source)) == digest(path)

    def free() -> int:
        found = os.statvfs(small_disk)
        return found.f_bavail * found.f_frsize

    eventually(lambda: mount.value("ssd", "bytes") > 8 * MIB)
    assert free() >= 16 * MIB
    (small_disk / "other").write_bytes(random_bytes("other", free() - 12 * MIB))
    eventually(lambda: free() >= 16 * MIB)
    for path in files:
        assert digest(mount.path / path.relative_to(place.source)) == digest(path)
    assert free() >= 16 * MIB


@in_one_mode
@pytest.mark.claim("F7")
def test_another_digest_is_refused_in_the_same_directory(place: Place, mounting: Mounting) -> None:
    place.write("file", b"content")
    mount = mounting("--digest", "blake3")
    assert (mount.path / "file").read_bytes() == b"content"
    second = place.base / "second"
    second.mkdir()
    done = mount.run(
        *("mount", place.source, second, "--cache-dir", place.cache_dir),
        *("--digest", "xxh3-128", "--ssd", "64M"),
    )
    assert done.returncode != 0
    assert len(done.stderr.strip().splitlines()) == 1
    assert "blake3" in done.stderr
