"""Batches of files staged with many reads at a time: what one read meets is no other's trouble."""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusecache import _native
from tests.conftest import Place, in_one_mode
from tests.mount.test_cache_faults import flip
from tests.mount.test_plan_native import Door, read_all, read_staged, start

__all__ = ["start"]  # the fixture

# More than are read at a time; some of them larger than those that are read that way.
SIZES = [100, 4096, 110_000, 400_000] * 20
FILES = {f"deep/{number:03}": size for number, size in enumerate(SIZES)}


IO_SETUP = {"x86_64": 206, "aarch64": 0}[platform.machine()]  # the system call's number


def store_all(
    place: Place,
    start: Callable[..., Door],
    environ: dict[str, str] | None = None,
    *,
    is_listed: bool = True,
) -> Door:
    """All FILES on SSD, none in RAM. They are listed, as hintsd does it: the kernel may forget
    their inodes at any moment (anybody's `drop_caches`), and can be told of them again.
    """
    rng = random.Random(1)
    for name, size in FILES.items():
        place.write(name, rng.randbytes(size))
    door = start(allow_log=["fault"], environ=environ)
    door.mount.read_until_stored(*FILES, blocks=len(FILES))
    if is_listed:
        for _ in os.walk(door.mount.path):
            pass
    door.drop(*FILES)
    return door


def damage(place: Place, *names: str) -> None:
    """One bit of each file's bytes in its segment."""
    wanted = {name: (place.source / name).read_bytes() for name in names}
    for segment in sorted((place.cache_dir / "segments").glob("*.seg")):
        content = segment.read_bytes()
        for name, expected in list(wanted.items()):
            if (at := content.find(expected)) >= 0:
                flip(segment, at + len(expected) // 2)
                del wanted[name]
    assert not wanted


@pytest.mark.parametrize(
    "environ", [{}, {"NATIVE_DOOR_REFUSES": str(IO_SETUP)}], ids=["deep", "one-by-one"]
)
@in_one_mode
def test_each_file_of_a_batch_ends_as_it_would_alone(
    place: Place, start: Callable[..., Door], environ: dict[str, str]
) -> None:
    door = store_all(place, start, environ)
    names = list(FILES)
    damaged = names[10:60:9]
    read = names[70]
    assert len(damaged) > 3
    damage(place, *damaged)
    door.call("plan_mark", door.inos(read), _native.PLAN_QUEUED, _native.PLAN_READ)
    read_all(door, read)
    before, faults = door.counter("bytes_staged"), door.counter("faults")
    results = dict(zip(names, door.stage(*names), strict=True))
    maps = Path(f"/proc/{door.mount.server_pid()}/maps").read_text()
    assert ("[aio]" in maps) == (not environ)
    assert [name for name in names if results[name] == _native.PUSH_NO_BYTES] == damaged
    assert [name for name in names if results[name] == _native.PUSH_READ] == [read]
    pushed = [name for name in names if results[name] == _native.PUSHED]
    assert len(pushed) == len(names) - len(damaged) - 1
    assert door.counter("bytes_staged") - before == sum(FILES[name] for name in pushed)
    assert door.counter("faults") - faults == len(damaged)
    read_staged(door, *pushed)
    read_all(door, read)  # its pages the host may take, and nothing stages them again
    read_all(door, *damaged)


@in_one_mode
def test_segments_cut_under_a_batch(place: Place, start: Callable[..., Door]) -> None:
    """As an eviction does it, before it unlinks them."""
    door = store_all(place, start)
    for segment in (place.cache_dir / "segments").glob("*.seg"):
        os.truncate(segment, segment.stat().st_size // 2)
    faults = door.counter("faults")
    results = door.stage(*FILES)
    assert set(results) == {_native.PUSHED, _native.PUSH_NO_BYTES}
    assert door.counter("faults") == faults  # gone, not broken
    read_all(door, *FILES)


def stage_in_threads(door: Door, names: list[str]) -> set[int]:
    with ThreadPoolExecutor(12) as threads:  # more than there are buffers kept
        parts = list(threads.map(lambda first: door.stage(*names[first::12]), range(12)))
    return {result for part in parts for result in part}


@in_one_mode
def test_batches_at_the_same_time(place: Place, start: Callable[..., Door]) -> None:
    door, names = store_all(place, start), list(FILES)
    assert stage_in_threads(door, names) == {_native.PUSHED}
    read_staged(door, *names)


@pytest.mark.parametrize("is_listed", [True, False], ids=["listed", "not listed"])
@in_one_mode
def test_files_that_the_kernel_has_forgotten(
    place: Place, start: Callable[..., Door], is_listed: bool
) -> None:
    """They are looked up first, unless that might have to wait for the origin."""
    door, names = store_all(place, start, is_listed=is_listed), list(FILES)
    door.mount.drop_kernel_caches()
    expected = _native.PUSHED if is_listed else _native.PUSH_REFUSED
    assert stage_in_threads(door, names) == {expected}
    if is_listed:
        read_staged(door, *names)
    read_all(door, *names)
