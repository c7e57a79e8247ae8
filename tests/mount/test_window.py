"""What is staged and let go of by the kernel before it is read is staged again; nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusecache.base.wire import Result
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import Mount, errno_of, eventually
from tests.support.plan_client import PlanClient
from tests.support.residency import is_in_memory, missing_pages
from tests.support.trees import random_bytes

FILES, SIZE = 400, 20_000
TAKEN = FILES // 20  # pages that a host may page out by itself, as cold (DAMON)


def let_go(paths: list[Path]) -> None:
    """What drop_caches does, to these files only."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def in_memory(paths: list[Path]) -> int:
    return sum(is_in_memory(path) for path in paths)


def staged_window(place: Place, mount: Mount, client: PlanClient) -> list[Path]:
    """All files of the source, staged, in the order of need; their paths on the mount."""
    names = {os.fsencode(path.name): mount.path / path.name for path in place.source.iterdir()}
    listing = client.listing(b"")
    order = sorted(names)
    client.stage_all([listing[name][0] for name in order])
    return [names[name] for name in order]


def requests(mount: Mount) -> int:
    return int(mount.value("reads", "requests"))


@pytest.fixture
def files(place: Place) -> None:
    for number in range(FILES):
        place.write(f"{number:04}", random_bytes(str(number), SIZE))


@pytest.mark.claim("P13")
def test_evicted_files_are_staged_again(place: Place, mounting: Mounting, files: None) -> None:
    mount = mounting("--ram", "64M")
    with PlanClient(mount.path) as client:
        paths = staged_window(place, mount, client)
        assert in_memory(paths) >= FILES - TAKEN
        held_bytes = mount.value("ram", "bytes")
        let_go(paths[: FILES // 4])
        let_go(paths[FILES // 2 :])
        eventually(lambda: in_memory(paths) >= FILES - TAKEN)
        assert mount.value("ram", "bytes") == held_bytes
        assert mount.value("prefetch", "restored_files") >= FILES // 4
        missing = sum(map(missing_pages, paths))  # a file has five
        assert missing <= FILES
        before = requests(mount)
        for path in paths:
            assert path.read_bytes() == (place.source / path.name).read_bytes()
        assert requests(mount) - before <= missing + TAKEN
        # Nothing of what is not wanted any more comes back.
        passed, looks = paths[: FILES // 2], mount.value("prefetch", "looks")
        listing = client.listing(b"")
        client.command("drop", [listing[os.fsencode(path.name)][0] for path in passed])
        client.obeyed()
        left = paths[FILES // 2 :]
        let_go(left)
        eventually(lambda: in_memory(left) >= len(left) - TAKEN)
        assert mount.value("prefetch", "looks") > looks
        assert in_memory(passed) == 0


@pytest.mark.claim("P13")
@in_one_mode
def test_what_only_the_origin_has_is_told_of_and_not_read_again(
    place: Place, mounting: Mounting, files: None
) -> None:
    mount = mounting("--ram", "64M")
    with PlanClient(mount.path, "reclaimed") as client:
        listing = client.listing(b"")
        names = sorted(listing)
        inos, paths = [listing[name][0] for name in names], [mount.path / n.decode() for n in names]
        stored = FILES // 2
        client.stage_all(inos[:stored], store=1)
        client.stage_all(inos[stored:], store=0)
        eventually(lambda: mount.value("ssd", "blocks") == stored)
        fetched = mount.value("origin", "files")
        let_go(paths)

        def told() -> set[int]:
            return {ino for ino in inos if client.results[ino][-1] == Result.RECLAIMED}

        client.until(lambda: told() >= set(inos[stored:]))
        assert told() == set(inos[stored:])
        eventually(lambda: in_memory(paths[:stored]) >= stored - TAKEN)
        assert mount.value("origin", "files") == fetched
        assert mount.value("prefetch", "reclaimed_files") == FILES - stored
        # What is wanted anew is fetched anew, and its loss would be told of anew.
        assert client.stage_all(inos[stored:], store=0) == {Result.STAGED: FILES - stored}
        assert mount.value("origin", "files") == fetched + FILES - stored


@pytest.mark.claim("P13", "P6")
def test_what_the_budget_has_dropped_stays_dropped(place: Place, mounting: Mounting) -> None:
    for number in range(FILES):
        place.write(f"{number:04}", random_bytes(str(number), 4 * SIZE))
    mount = mounting("--ram", "16M")
    with PlanClient(mount.path) as client:
        paths = staged_window(place, mount, client)
        limit = mount.value("ram", "limit_bytes")
        eventually(lambda: mount.value("ram", "bytes") <= limit)
        looks = mount.value("prefetch", "looks")
        eventually(lambda: mount.value("prefetch", "looks") >= looks + 3)
        # What a host takes is restored. What the budget has dropped were half of the files.
        assert mount.value("prefetch", "restored_files") <= FILES // 4
        assert in_memory(paths) * 4 * SIZE <= limit


@pytest.mark.claim("P13")
@in_one_mode
def test_files_whose_inodes_are_gone(place: Place, mounting: Mounting, files: None) -> None:
    """As with `echo 3 > drop_caches`: names, inodes and pages."""
    mount = mounting("--ram", "64M")
    with PlanClient(mount.path) as client:
        paths = staged_window(place, mount, client)
        mount.drop_kernel_caches()
        eventually(lambda: mount.value("prefetch", "restored_files") >= FILES - TAKEN)
        eventually(lambda: in_memory(paths) >= FILES - TAKEN)


@pytest.mark.claim("P13")
@in_one_mode
def test_the_next_server_ignores_answers_to_the_one_before(
    place: Place, mounting: Mounting, files: None
) -> None:
    mount = mounting("--ram", "64M")
    for _ in range(3):
        with PlanClient(mount.path) as client:
            paths = staged_window(place, mount, client)
            let_go(paths)
            eventually(lambda: mount.value("prefetch", "looks") > 0)
            mount.kill_server()
        eventually(lambda: mount.server_pid() > 0)
    for path in paths:
        assert path.read_bytes() == (place.source / path.name).read_bytes()
    assert errno_of(os.stat, mount.path / "absent") == "ENOENT"
