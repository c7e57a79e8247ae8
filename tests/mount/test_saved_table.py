"""From one mount of a source to the next: what the second one asks the origin for, exactly, and
that readers see what changed between the two.

Directories settle for two seconds before a mount's listing of them counts for the next.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import Mount, alive, drop_file, eventually
from tests.support.plan_client import PlanClient
from tests.support.trees import assert_same, random_bytes

UNSWEPT = ("--revalidate", "100000")
DIRECTORIES, FILES, SIZE = 3, 40, 1000
AWAY = "origin (does not answer|is away)"


def settle(source: Path) -> None:
    """Until what is listed now counts for the next mount."""

    def is_settled() -> bool:
        newest_ns = max(os.lstat(folder).st_ctime_ns for folder, _, _ in os.walk(source))
        return time.time_ns() - newest_ns > 2_200_000_000

    eventually(is_settled)


@pytest.fixture
def files(place: Place) -> list[str]:
    names = [f"d{d}/{f:03}" for d in range(DIRECTORIES) for f in range(FILES)]
    for name in names:
        place.write(name, random_bytes(name, SIZE))
    settle(place.source)
    return names


def scan(mount: Mount) -> dict[str, int]:
    """As `find -type f -printf '%P %s'` does: every listing, and the size of each file."""
    done = subprocess.run(
        ["find", mount.path, "-type", "f", "-printf", "%P %s\n"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}


def names(mount: Mount) -> set[str]:
    """As `ImageFolder` does: every listing, and of the files names and types alone."""
    top = str(mount.path)
    walked = ((os.path.relpath(at, top), found) for at, _, found in os.walk(top))
    return {os.path.normpath(f"{at}/{name}") for at, found in walked for name in found}


def sizes(source: Path) -> dict[str, int]:
    return {
        str(path.relative_to(source)): path.stat().st_size
        for path in source.rglob("*")
        if path.is_file()
    }


def files_asked_for(faulty: FaultyOrigin) -> int:
    """Looks at files, by whatever way."""
    return sum(faulty.count(op, "d*/*") for op in ("lookup", "getattr", "open", "read"))


def listed(faulty: FaultyOrigin) -> float:
    """Directories, but the source itself. One is two requests: the second finds the end."""
    return faulty.count("readdir", "d*") / 2


def once(mount: Mount, faulty: FaultyOrigin, *, read: bool = False) -> None:
    """A first mount sees everything, and ends; a second one begins, and nothing is counted yet."""
    scan(mount)
    if read:
        names = [str(path.relative_to(mount.source)) for path in mount.source.rglob("[0-9]*")]
        mount.read_until_stored(*names, blocks=len(names))
    mount.umount()
    mount.start()
    faulty.reset_counts()


def test_a_second_mount_lists_nothing_again(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    scan(mount)
    assert listed(faulty) == DIRECTORIES
    assert files_asked_for(faulty) >= len(files)
    mount.umount()
    for _ in range(2):  # the third by what the second knew, which has looked at no file
        mount.start()
        assert mount.value("inodes") == 1 + DIRECTORIES + len(files)
        faulty.reset_counts()
        assert names(mount) == set(files)
        assert listed(faulty) == faulty.count("readdir", "") == 0
        assert files_asked_for(faulty) == 0
        looks = faulty.count("getattr", "d*")
        assert DIRECTORIES <= looks <= 2 * DIRECTORIES  # its listing; its path, if that comes first
        mount.umount()


@pytest.mark.claim("C14", "R4")
@in_one_mode
def test_bytes_cost_one_look_a_file(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    """Read after a listing, or by path alone: the origin is asked for its stat, not for bytes."""
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty, read=True)
    names(mount)
    assert files_asked_for(faulty) == 0
    for name in files:
        assert (mount.path / name).read_bytes() == random_bytes(name, SIZE)
    assert faulty.count("open") == faulty.count("read") == 0
    looks = files_asked_for(faulty)
    assert looks <= 3 * len(files)  # the path, and the stat
    for name in files:
        drop_file(mount.path / name)
        assert (mount.path / name).read_bytes() == random_bytes(name, SIZE)
    assert files_asked_for(faulty) == looks


Change = Callable[[Path], object]


def replace_by_directory(source: Path) -> None:
    (source / "d1/003").unlink()
    (source / "d1/003").mkdir()
    (source / "d1/003/inside").write_bytes(b"inside")


def replace_by_file(source: Path) -> None:
    shutil.rmtree(source / "d1")
    (source / "d1").write_bytes(b"now a file")


CHANGES: dict[str, tuple[Change, int]] = {
    # what happens between the two mounts, and how many directories are listed because of it
    "added": (lambda source: (source / "d1/new").write_bytes(b"new"), 1),
    "removed": (lambda source: (source / "d1/003").unlink(), 1),
    "renamed": (lambda source: (source / "d1/003").rename(source / "d1/renamed"), 1),
    "moved": (lambda source: (source / "d1/003").rename(source / "d2/moved"), 2),
    "replaced": (lambda source: (source / "d1/003").rename(source / "d1/004"), 1),
    "file to directory": (replace_by_directory, 2),
    "directory to file": (replace_by_file, 0),
    "directory renamed": (lambda source: (source / "d1").rename(source / "d9"), 1),
    "directory gone": (lambda source: shutil.rmtree(source / "d1"), 0),
    "directory exchanged": (
        lambda source: (
            (source / "d1").rename(source / "aside"),
            (source / "d2").rename(source / "d1"),
            (source / "aside").rename(source / "d2"),
        ),
        2,
    ),
}


@pytest.mark.claim("C13")
@pytest.mark.parametrize(("change", "lists"), CHANGES.values(), ids=CHANGES.keys())
@in_one_mode
def test_names_that_changed_between_two_mounts(
    place: Place,
    faulty: FaultyOrigin,
    mounting: Mounting,
    files: list[str],
    change: Change,
    lists: int,
) -> None:
    """Visible from the first listing on; only what changed is listed."""
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty)
    change(place.source)
    assert scan(mount) == sizes(place.source)
    assert listed(faulty) == lists
    assert_same(place.source, mount.path)


@pytest.mark.claim("C13")
@in_one_mode
def test_a_path_that_is_looked_up_before_any_listing(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty)
    place.write("d1/new", b"new")
    (place.source / "d1/003").unlink()
    (place.source / "d1/004").write_bytes(b"rewritten")
    assert (mount.path / "d1/new").read_bytes() == b"new"
    assert not (mount.path / "d1/003").exists()
    assert (mount.path / "d1/004").read_bytes() == b"rewritten"
    assert listed(faulty) == 0


@pytest.mark.claim("C14")
@in_one_mode
def test_of_a_file_with_two_names_one_was_replaced_between_two_mounts(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    """The other one is what it was, and says nothing of this one."""
    os.link(place.source / files[0], place.source / "d1/linked")
    settle(place.source)
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty, read=True)
    place.write("d2/other", b"another file")
    (place.source / "d2/other").rename(place.source / "d1/linked")
    assert (mount.path / "d1/linked").read_bytes() == b"another file"
    assert (mount.path / files[0]).read_bytes() == random_bytes(files[0], SIZE)


@pytest.mark.claim("C14")
@pytest.mark.parametrize("is_listed", [True, False])
def test_a_file_rewritten_between_two_mounts(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str], is_listed: bool
) -> None:
    """In place, with the same size and mtime, so that no listing tells; its old bytes are stored.
    Those that nobody changed are not fetched again.
    """
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty, read=True)
    path, new = place.source / files[50], random_bytes("new", SIZE)
    before = path.stat()
    with open(path, "r+b") as file:
        file.write(new)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if is_listed:
        scan(mount)
    assert (mount.path / files[50]).read_bytes() == new
    assert (mount.path / files[51]).read_bytes() == random_bytes(files[51], SIZE)
    assert listed(faulty) == 0
    assert faulty.count("read") == faulty.count("read", files[50])


@pytest.mark.claim("C15")
@pytest.mark.parametrize("is_listed", [True, False])
@in_one_mode
def test_attributes_that_changed_between_two_mounts(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str], is_listed: bool
) -> None:
    """A listing has names alone: each is looked at before its attributes are told, once."""
    (place.source / "d2/link").symlink_to("target")
    settle(place.source)
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty)
    (place.source / files[50]).write_bytes(b"another size")
    (place.source / files[51]).chmod(0o600)
    (place.source / "d2").chmod(0o711)
    if is_listed:
        names(mount)
        assert faulty.count("lookup", "d[01]/*") == 0
    assert (mount.path / files[50]).read_bytes() == b"another size"
    assert faulty.count("lookup", "d[01]/*") == faulty.count("lookup", files[50])
    assert_same(place.source, mount.path)
    assert listed(faulty) == 1  # d2: its own time stamps changed
    looks = faulty.count("lookup", "d*/*")
    assert_same(place.source, mount.path, content=False)
    assert faulty.count("lookup", "d*/*") == looks


@pytest.mark.claim("C15", "E5", "E6")
@in_one_mode
def test_an_origin_that_hangs_amid_looks(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    """What is known is said; what the looks find is told when they end."""
    mount = mounting(*UNSWEPT, "--origin-timeout", "60", source=faulty.mountpoint)
    once(mount, faulty, read=True)
    names(mount)
    (place.source / files[1]).write_bytes(b"another size")
    faulty.add(Fault("lookup", "d*/*", hang=True))
    with ThreadPoolExecutor(100) as readers:  # more than looks at a time
        found = readers.map(lambda name: (mount.path / name).stat().st_size, files)
        assert list(found) == [SIZE] * len(files)
        faulty.clear()
        faulty.release()
        eventually(lambda: (mount.path / files[1]).stat().st_size == 12)
    assert (mount.path / files[0]).read_bytes() == random_bytes(files[0], SIZE)


@pytest.mark.claim("C15")
@in_one_mode
def test_a_mount_that_never_looks_again_begins_with_nothing(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    mount = mounting("--revalidate", "never", source=faulty.mountpoint)
    once(mount, faulty)
    assert mount.value("inodes") == 1
    (place.source / files[50]).write_bytes(b"another size")
    assert scan(mount) == sizes(place.source)
    assert not (place.cache_dir / "tables").exists()


@in_one_mode
def test_a_mount_that_was_not_used_leaves_what_the_one_before_knew(
    place: Place, mounting: Mounting, files: list[str]
) -> None:
    mount = mounting(*UNSWEPT)
    scan(mount)
    for _ in range(3):
        mount.umount()
        mount.start()
        assert mount.value("inodes") == 1 + DIRECTORIES + len(files)
    mount.umount()
    [table] = (place.cache_dir / "tables").iterdir()
    table.unlink()
    mount.start()
    mount.umount()
    assert not table.exists()  # nothing was known: not worth a file


@pytest.mark.claim("E5", "E6")
def test_the_origin_goes_away(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    """Then what is stored is served, though nothing can be looked at."""
    mount = mounting(*UNSWEPT, source=faulty.mountpoint, allow_log=[AWAY])
    once(mount, faulty, read=True)
    scan(mount)
    faulty.add(Fault("*", "*", error="EIO"))
    for name in files[:5]:
        assert (mount.path / name).read_bytes() == random_bytes(name, SIZE)
    faulty.clear()


# ---- which table it is ---------------------------------------------------------------------------


@pytest.mark.claim("F7")
@in_one_mode
def test_two_sources_on_one_cache(place: Place, mounting: Mounting, files: list[str]) -> None:
    other, point = place.base / "other", place.base / "other mnt"
    for directory in (other, point):
        directory.mkdir()
    (other / "only here").write_bytes(b"other")
    settle(other)
    for _ in range(2):
        first = mounting(*UNSWEPT)
        second = mounting(*UNSWEPT, source=other, mountpoint=point)
        assert scan(first) == dict.fromkeys(files, SIZE)
        assert (second.path / "only here").read_bytes() == b"other"
        assert os.listdir(second.path) == ["only here"]
        assert first.value("inodes") == 1 + DIRECTORIES + len(files)
        assert second.value("inodes") == 2
        first.umount()
        second.umount()
    assert len(os.listdir(place.cache_dir / "tables")) == 2


@in_one_mode
def test_another_file_system_at_the_sources_place(
    place: Place, mounting: Mounting, files: list[str]
) -> None:
    mount = mounting(*UNSWEPT, allow_log=["saved table is not used: it is of another source"])
    scan(mount)
    mount.umount()
    subprocess.run(["mount", "-t", "tmpfs", "none", place.source], check=True)
    try:
        (place.source / "only here").write_bytes(b"other")
        mount.start()
        assert mount.value("inodes") == 1
        assert os.listdir(mount.path) == ["only here"]
        mount.umount()
    finally:
        subprocess.run(["umount", place.source], check=True)
    mount.start()  # by what the tmpfs had left
    assert scan(mount) == dict.fromkeys(files, SIZE)


@in_one_mode
def test_what_is_mounted_below_the_source_is_looked_at_anew(
    place: Place, mounting: Mounting, files: list[str]
) -> None:
    below = place.source / "d1"
    subprocess.run(["mount", "-t", "tmpfs", "none", below], check=True)
    try:
        (below / "on tmpfs").write_bytes(b"")
        mount = mounting(*UNSWEPT)
        assert_same(place.source, mount.path)
        mount.umount()
        subprocess.run(["umount", below], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", below], check=True)
        (below / "on another").write_bytes(b"")
        mount.start()
        assert os.listdir(mount.path / "d1") == ["on another"]
        assert_same(place.source, mount.path)
        mount.umount()
    finally:
        subprocess.run(["umount", below], check=True)


@pytest.mark.claim("F9")
@in_one_mode
def test_a_table_that_was_damaged(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    line = "the saved table is not used: it is damaged"
    mount = mounting(*UNSWEPT, source=faulty.mountpoint, allow_log=[line])
    scan(mount)
    mount.umount()
    [table] = (place.cache_dir / "tables").iterdir()
    with open(table, "r+b") as file:
        file.truncate(table.stat().st_size - 1)
    mount.start()
    assert mount.log().count(line) == 1
    assert scan(mount) == dict.fromkeys(files, SIZE)
    mount.umount()
    mount.start()
    assert mount.value("inodes") == 1 + DIRECTORIES + len(files)


@in_one_mode
def test_a_mount_that_is_killed_leaves_what_the_one_before_knew(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty)
    place.write("d1/new", b"new")
    assert "d1/new" in scan(mount)
    mount.kill_server()  # the next server has the table from the keeper, and saves it
    eventually(lambda: mount.value("restarts") == 1)
    assert "d1/new" in scan(mount)
    mount.umount()
    mount.start()
    assert mount.value("inodes") == 2 + DIRECTORIES + len(files)
    place.write("d1/newer", b"newer")
    assert "d1/newer" in scan(mount)
    mount.allow_log.append("killed")
    for pid in (mount.keeper_pid, mount.server_pid()):
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: not alive(pid))  # type: ignore[misc]  # bound early
    mount.destroy()
    mount.start()
    assert mount.value("inodes") == 2 + DIRECTORIES + len(files)
    assert scan(mount) == sizes(place.source)


# ---- what is put before readers unasked ----------------------------------------------------------


@pytest.mark.claim("C14", "P1")
@in_one_mode
def test_hints_stage_no_bytes_of_an_earlier_mount(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty, read=True)
    new = random_bytes("new", SIZE)
    with open(place.source / files[0], "r+b") as file:
        file.write(new)
    scan(mount)
    with PlanClient(mount.path) as client:
        inos = [entry[0] for _, entry in sorted(client.listing(b"d0").items())]
        client.stage_all(inos, store=0)
    assert (mount.path / files[0]).read_bytes() == new
    assert (mount.path / files[1]).read_bytes() == random_bytes(files[1], SIZE)
    assert faulty.count("read") == faulty.count("read", files[0])


@in_one_mode
def test_warm_fetches_what_changed(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, files: list[str]
) -> None:
    mount = mounting(*UNSWEPT, source=faulty.mountpoint)
    once(mount, faulty, read=True)
    with open(place.source / files[0], "r+b") as file:
        file.write(random_bytes("new", SIZE))
    settle(place.source)

    def warm() -> bool:
        done = mount.run("warm", mount.path)
        assert done.returncode == 0, done.stderr
        return faulty.count("read", files[0]) > 0

    eventually(warm)
    assert faulty.count("read") == faulty.count("read", files[0])
