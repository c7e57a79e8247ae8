"""Origins whose inode numbers change while the files do not (sshfs, and most in user space)."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.control import control_client
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import FaultyOrigin
from tests.support.mounted import Mount, errno_of, eventually
from tests.support.trees import assert_same, make_files, random_bytes

FILES = 40
DOUBTS = 4  # so many files that differ by their number alone decide


def sweep(mount: Mount) -> None:
    """The mount has looked at everything, and the kernel was told."""
    control_client.ask(control_client.find(str(mount.path)), {"op": "sweep"})


def fill(mount: Mount, files: list[Path], source: Path) -> list[str]:
    names = [str(path.relative_to(source)) for path in files]
    assert_same(source, mount.path)  # lists every directory
    mount.read_until_stored(*names, blocks=len(names))
    return names


@pytest.mark.claim("R4", "N7", "C12")
@in_one_mode
def test_a_file_that_has_not_changed_is_not_read_again(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    files = make_files(place.source, FILES, lambda index: 30_000 + index)
    large = place.write("large", random_bytes("large", 9 << 20))
    mount = mounting(source=faulty.mountpoint)
    fill(mount, [*files], place.source)
    mount.read_until_stored("large", blocks=FILES + 3)
    held_path = mount.path / files[0].relative_to(place.source)
    numbers = {path: (mount.path / path.relative_to(place.source)).stat().st_ino for path in files}
    with open(held_path, "rb", buffering=0) as held, open(mount.path / "large", "rb") as mapped:
        view = mmap.mmap(mapped.fileno(), 0, prot=mmap.PROT_READ)
        faulty.reset_counts()
        for _ in range(2):
            at_origin = (faulty.mountpoint / "large").stat().st_ino
            faulty.renumber()
            assert (faulty.mountpoint / "large").stat().st_ino != at_origin
            sweep(mount)
            mount.drop_pages()
            assert os.pread(held.fileno(), 1 << 20, 0) == files[0].read_bytes()
            assert view[:] == large.read_bytes()
            assert_same(place.source, mount.path)
        view.close()
    assert numbers == {
        path: (mount.path / path.relative_to(place.source)).stat().st_ino for path in files
    }
    mount.kill_server()
    faulty.renumber()
    mount.drop_pages()
    assert_same(place.source, mount.path)
    mount.umount()
    faulty.renumber()
    mount.start()
    assert_same(place.source, mount.path)
    assert faulty.count("read") == 0


@pytest.mark.claim("C12", "H2", "H3")
@in_one_mode
def test_a_replaced_file_is_another_one(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    """... also when every number has changed in the same moment: size or times tell."""
    size = 9 << 20
    old = random_bytes("old", size)
    names = ["replaced", "removed"]
    for name in names:
        place.write(name, old)
    place.write("same/file", b"content")
    mount = mounting(source=faulty.mountpoint)
    assert_same(place.source, mount.path)
    held = {name: os.open(mount.path / name, os.O_RDONLY) for name in names}
    for fd in held.values():
        assert os.pread(fd, 4096, 0) == old[:4096]
    times = (place.source / "replaced").stat()
    other = place.base / "other"
    other.write_bytes(random_bytes("new", size))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))  # only ctime tells
    other.rename(place.source / "replaced")
    (place.source / "removed").unlink()
    faulty.renumber()
    sweep(mount)
    assert_same(place.source, mount.path)
    for fd in held.values():
        if (kind := errno_of(os.pread, fd, 4096, 6 << 20)) != "ESTALE":
            assert kind == ""
            assert os.pread(fd, 4096, 6 << 20) == old[6 << 20 : (6 << 20) + 4096]
        os.close(fd)
    assert errno_of(os.stat, mount.path / "removed") == "ENOENT"


@pytest.mark.claim("C12", "C3", "N5")
def test_changes_and_links_there(place: Place, faulty: FaultyOrigin, mounting: Mounting) -> None:
    files = make_files(place.source, 80, lambda index: 5000 + index)
    place.write("fifo", b"").unlink()
    os.mkfifo(place.source / "fifo")
    mount = mounting(source=faulty.mountpoint)
    assert_same(place.source, mount.path)
    for index, path in enumerate(files[:20]):
        if index % 2:
            path.write_bytes(random_bytes(index, path.stat().st_size))
        else:
            path.chmod(0o640)
    (place.source / "class001").rename(place.source / "aside")
    (place.source / "class000").rename(place.source / "class001")
    (place.source / "aside").rename(place.source / "class000")
    faulty.renumber()
    sweep(mount)
    assert_same(place.source, mount.path)
    assert stat.S_ISFIFO((mount.path / "fifo").stat().st_mode)
    os.link(place.source / "class001/00001.jpg", place.source / "link")
    sweep(mount)
    found = [(mount.path / name).stat() for name in ("link", "class001/00001.jpg")]
    assert found[0].st_nlink == found[1].st_nlink == 2
    assert found[0].st_ino != found[1].st_ino


@pytest.mark.claim("C12")
@pytest.mark.parametrize("directory", ["", "class"])
@in_one_mode
def test_numbers_that_should_stay_are_watched(
    place: Place, mounting: Mounting, directory: str
) -> None:
    """A type of file system that keeps its numbers, but does not: that is found out."""
    files = [
        place.write(os.path.join(directory, str(index)), random_bytes(index, 30_000 + index))
        for index in range(FILES)
    ]
    mountpoint = place.base / "origin"
    mountpoint.mkdir()
    with FaultyOrigin(place.source, mountpoint, place.base / "origin.sock", "juicefs") as origin:
        mount = mounting(source=mountpoint)
        fill(mount, files, place.source)
        origin.reset_counts()
        origin.renumber()
        sweep(mount)
        assert_same(place.source, mount.path)
        names = [str(path.relative_to(place.source)) for path in files]
        assert sum(origin.count("read", name) > 0 for name in names) < DOUBTS
        origin.reset_counts()
        held = os.open(mount.path / files[-1].relative_to(place.source), os.O_RDONLY)
        origin.renumber()
        sweep(mount)
        mount.drop_pages()
        assert os.pread(held, 1 << 20, 0) == files[-1].read_bytes()
        os.close(held)
        assert_same(place.source, mount.path)
        assert origin.count("read") == 0
        mount.umount()


@pytest.fixture
def coarse_disk(place: Place) -> Iterator[Path]:
    """A file system that keeps numbers, with whole seconds and no time of birth."""
    image, mountpoint = place.base / "disk.img", place.base / "disk"
    mountpoint.mkdir()
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-I", "128", image], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", image, mountpoint], check=True)
    yield mountpoint
    subprocess.run(["umount", "-l", mountpoint], check=True)


@pytest.mark.claim("R1", "C4")
@in_one_mode
def test_where_numbers_are_kept_equal_times_are_no_proof(
    place: Place, coarse_disk: Path, mounting: Mounting
) -> None:
    """Two copies of a dataset, alike in all but their bytes, are mounted in turn at one place."""

    one, two = coarse_disk / "one", coarse_disk / "two"

    def are_alike() -> bool:
        for copy in (one, two):
            copy.mkdir(exist_ok=True)
            for index in range(DOUBTS):
                (copy / f"{index}").write_bytes(copy.name.encode() * 1000)
            os.utime(copy, (10**9, 10**9))
        return times(one) == times(two)

    def times(copy: Path) -> list[tuple[int, int, int]]:
        found = [path.stat() for path in (copy, *sorted(copy.iterdir()))]
        return [(one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]

    eventually(are_alike)  # all of it within one second
    data = place.source / "data"
    data.mkdir()
    subprocess.run(["mount", "--bind", one, data], check=True)
    try:
        mount = mounting("--revalidate", "0.5")
        assert_same(place.source, mount.path)
        mount.read_until_stored(*(f"data/{index}" for index in range(DOUBTS)), blocks=1)
        subprocess.run(["umount", "-l", data], check=True)
        subprocess.run(["mount", "--bind", two, data], check=True)
        eventually(lambda: (mount.path / "data/0").read_bytes() == b"two" * 1000)
        assert_same(place.source, mount.path)
    finally:
        subprocess.run(["umount", "-l", data], check=True)
