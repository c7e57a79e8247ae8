"""Changes at the origin: visible within the period, and never as wrong bytes."""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
import os
import select
import shutil
import struct
import time
from pathlib import Path

import pytest

from fusecache.read.origin import NETWORK_TICK_NS
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import Mount, errno_of, eventually
from tests.support.trees import assert_same, make_files, random_bytes, snapshot

PERIOD = ("--revalidate", "1")
VISIBLE_S = 60.0  # the period, a sweep, and a slow machine


def visible(source: Path, mount: Mount) -> None:
    """Wait until the mount shows the source as it is now."""
    eventually(lambda: assert_same(source, mount.path), VISIBLE_S)


def fill(mount: Mount) -> None:
    """Read everything, so that every cache there is holds it."""
    snapshot(mount.path)
    snapshot(mount.path)


@pytest.mark.claim("C1", "C2")
def test_names_come_and_go(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 120, lambda index: 100 + index)
    mount = mounting(*PERIOD)
    new = ["new", "class000/new", "class001/deep/er/new"]
    for _ in range(2):
        for name in new:
            assert errno_of(os.stat, mount.path / name) == "ENOENT"  # a negative entry
    fill(mount)
    for name in new:
        place.write(name, name.encode())
    (place.source / "class000/00001.jpg").unlink()
    shutil.rmtree(place.source / "class002")
    os.symlink("new", place.source / "link")
    eventually(lambda: (mount.path / "class001/deep/er/new").read_bytes() == new[2].encode())
    visible(place.source, mount)
    assert errno_of(os.stat, mount.path / "class002/00100.jpg") == "ENOENT"
    for name in new:
        (place.source / name).unlink()
    (place.source / "class000/00001.jpg").write_bytes(b"back again")
    visible(place.source, mount)
    assert (mount.path / "class000/00001.jpg").read_bytes() == b"back again"


@pytest.mark.claim("C3", "C10")
def test_files_rewritten_in_place(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 10, lambda _: 50_000)
    same_size, mtime_back, grown, shrunk, emptied, filled, touched, *_ = files
    emptied.write_bytes(random_bytes("emptied", 9 << 20))
    filled.write_bytes(b"")
    mount = mounting(*PERIOD)
    fill(mount)
    with open(same_size, "r+b") as file:
        file.write(b"S" * 50_000)
    before = mtime_back.stat()
    with open(mtime_back, "r+b") as file:
        file.write(b"B" * 50_000)
    os.utime(mtime_back, ns=(before.st_atime_ns, before.st_mtime_ns))
    with open(grown, "ab") as file:
        file.write(b"G" * (5 << 20))
    os.truncate(shrunk, 10_000)
    os.truncate(emptied, 0)
    filled.write_bytes(random_bytes("filled", 5 << 20))
    os.utime(touched)
    visible(place.source, mount)
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)
    mount.restart()
    mount.drop_kernel_caches()
    assert_same(place.source, mount.path)


@pytest.mark.claim("C4", "C5", "C7", "N7")
def test_replaced_files_and_attributes(place: Place, mounting: Mounting) -> None:
    files = make_files(place.source, 6, lambda _: 40_000)
    link = place.source / "link"
    link.symlink_to("class000/00000.jpg")
    mount = mounting(*PERIOD)
    fill(mount)
    first = mount.path / files[0].relative_to(place.source)
    number = first.stat().st_ino
    other = place.base / "other"
    other.write_bytes(random_bytes("other", 40_000))
    os.utime(other, ns=(files[0].stat().st_atime_ns, files[0].stat().st_mtime_ns))
    other.rename(files[0])
    files[1].chmod(0o600)
    os.chown(files[2], 12, 34)
    (place.source / "class000").chmod(0o700)
    place.source.chmod(0o711)
    link.unlink()
    link.symlink_to("class000/00005.jpg")
    visible(place.source, mount)
    assert first.stat().st_ino != number
    assert (mount.path / "link").read_bytes() == files[5].read_bytes()


@pytest.mark.claim("C5", "N5")
def test_a_link_made_later(place: Place, mounting: Mounting) -> None:
    first = place.write("first", b"content")
    mount = mounting(*PERIOD)
    assert (mount.path / "first").stat().st_nlink == 1
    os.link(first, place.source / "second")
    eventually(lambda: (mount.path / "second").read_bytes() == b"content")
    eventually(lambda: (mount.path / "first").stat().st_nlink == 2)
    assert (mount.path / "second").stat().st_nlink == 2
    mount.umount()
    mount.start()
    assert_same(place.source, mount.path)


@pytest.mark.claim("C6")
def test_directories_move_and_types_change(place: Place, mounting: Mounting) -> None:
    make_files(place.source, 150, lambda index: 10 * index)
    place.write("was a file", b"content")
    place.write("was a directory/inside", b"content")
    place.write("was a link", b"").unlink()
    (place.source / "was a link").symlink_to("class000")
    mount = mounting(*PERIOD)
    fill(mount)
    (place.source / "class000").rename(place.source / "class001/moved")
    (place.source / "was a file").unlink()
    place.write("was a file/inside", b"now a directory")
    shutil.rmtree(place.source / "was a directory")
    place.write("was a directory", b"now a file")
    (place.source / "was a link").unlink()
    place.write("was a link/inside", b"now a directory")
    visible(place.source, mount)
    assert errno_of(os.stat, mount.path / "class000/00001.jpg") == "ENOENT"
    # Exchange two directories: every name stays, every content is another's.
    exchanged = place.source / "class002", place.source / "class001"
    aside = place.source / "aside"
    exchanged[0].rename(aside)
    exchanged[1].rename(exchanged[0])
    aside.rename(exchanged[1])
    visible(place.source, mount)


@pytest.mark.claim("C8")
@in_one_mode
def test_never_means_never(place: Place, mounting: Mounting, zero_open: bool) -> None:
    """A second mount with a period is the clock that says when a change would show."""
    files = make_files(place.source, 20, lambda index: 1000 + index)
    clock_point = place.base / "clock"
    clock_point.mkdir()
    mount = mounting("--revalidate", "never")
    clock = mounting(*PERIOD, mountpoint=clock_point, cache_dir=place.base / "other cache")
    before = snapshot(mount.path)
    eventually(lambda: mount.value("ssd", "blocks") == len(files))
    fill(clock)
    files[0].write_bytes(b"rewritten")
    files[1].unlink()
    place.write("class000/new", b"new")
    for _ in range(2):
        visible(place.source, clock)
        mount.drop_pages()
        assert snapshot(mount.path) == before
        files[0].write_bytes(b"rewritten again")


@pytest.mark.claim("H1", "H4", "C10")
def test_held_open_and_rewritten_in_place(place: Place, mounting: Mounting) -> None:
    first, longer, shorter = make_files(place.source, 3, lambda _: 300_000)
    mount = mounting(*PERIOD)
    views = [mount.path / path.relative_to(place.source) for path in (first, longer, shorter)]
    with (
        open(views[0], "rb", buffering=0) as one,
        open(views[1], "rb", buffering=0) as two,
        open(views[2], "rb", buffering=0) as three,
        mmap.mmap(one.fileno(), 0, prot=mmap.PROT_READ) as mapped,
    ):
        for file in (one, two, three):
            assert len(os.pread(file.fileno(), 300_000, 0)) == 300_000
        assert mapped[-1] == first.read_bytes()[-1]
        new = random_bytes("new", 300_000)
        with open(first, "r+b") as origin:
            origin.write(new)
        with open(longer, "ab") as origin:
            origin.write(new)
        os.truncate(shorter, 100_000)
        eventually(lambda: os.pread(one.fileno(), 300_000, 0) == new)
        eventually(lambda: os.pread(two.fileno(), 600_000, 0) == longer.read_bytes())
        eventually(lambda: os.pread(three.fileno(), 300_000, 0) == shorter.read_bytes())
        assert os.pread(three.fileno(), 1000, 100_000) == b""
        eventually(lambda: mapped[:] == new)


@pytest.mark.claim("H2", "H3")
def test_held_open_and_replaced_or_deleted(place: Place, mounting: Mounting) -> None:
    """Old bytes or ESTALE; the new file's only when nobody had read the old one.

    On ext4 a file that is created anew gets the inode number of the one just removed.
    """
    cached = ("cached", "cached deleted", "cached recreated")
    for name in (*cached, "uncached", "uncached deleted"):
        place.write(name, random_bytes(name, 200_000))
    mount = mounting(*PERIOD)
    os.listdir(mount.path)
    old = {path.name: path.read_bytes() for path in place.source.iterdir()}
    held = {name: os.open(mount.path / name, os.O_RDONLY) for name in old}
    try:
        for name in cached:
            assert os.pread(held[name], 200_000, 0) == old[name]
        eventually(lambda: mount.value("ssd", "blocks") == len(cached))
        for name in old:
            if "deleted" in name:
                (place.source / name).unlink()
            elif "recreated" in name:
                (place.source / name).unlink()
                place.write(name, random_bytes("new", 200_000))
            else:
                place.write("replacement", random_bytes("new", 200_000)).rename(place.source / name)
        visible(place.source, mount)
        for name, descriptor in held.items():
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            if name.startswith("cached"):
                assert os.pread(descriptor, 200_000, 0) == old[name]
            elif errno_of(os.pread, descriptor, 200_000, 0) != "ESTALE":
                assert name == "uncached"
                assert os.pread(descriptor, 200_000, 0) == random_bytes("new", 200_000)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


@pytest.mark.claim("C9", "C10")
@pytest.mark.parametrize("change", ["rewritten", "truncated", "replaced"])
@in_one_mode
def test_changed_while_being_fetched(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, change: str
) -> None:
    """The origin is held in the middle of a block's fetch, and the file changes under it."""
    size = 3_000_000  # one block, fetched in several pieces
    old, new = b"o" * size, b"n" * (1_300_000 if change == "truncated" else size)
    path = place.write("file", old)
    mount = mounting("--revalidate", "60", source=faulty.mountpoint)
    os.listdir(mount.path)
    faulty.add(Fault("read", "file", hang=True, skip=1, times=1))
    with (
        open(mount.path / "file", "rb", buffering=0) as file,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        seen: list[bytes] = []
        # A read may come back short when the file shrinks under it: readers read to the end.
        reading = pool.submit(errno_of, lambda: seen.append(file.readall()))
        eventually(lambda: faulty.hanging() == 1)
        if change == "replaced":
            place.write("other", new).rename(path)
        else:
            with open(path, "r+b") as origin:
                origin.truncate(len(new))
                origin.write(new)
        faulty.clear()
        outcome = reading.result(30)
    # Nothing was read before, so all that was read is of the new content, also when the file was
    # replaced (claim H2): who has just opened a name must not be told that it is stale.
    assert outcome == ""
    assert set(seen[0]) == {ord("n")}
    assert len(seen[0]) == len(new)
    assert (mount.path / "file").read_bytes() == new
    mount.read_until_stored("file", blocks=1)
    assert mount.value("ssd", "blocks") == 1, "nothing of the abandoned fetch was stored"
    mount.drop_kernel_caches()
    assert (mount.path / "file").read_bytes() == new


@pytest.mark.claim("C11")
@in_one_mode
def test_a_young_file_is_not_kept(place: Place, faulty: FaultyOrigin, mounting: Mounting) -> None:
    """It is read from the origin until its times can be trusted; then it is stored."""
    mount = mounting("--revalidate", "1", source=faulty.mountpoint)
    names: list[str] = []
    is_slow = True  # this machine: the file was not young any more, and may be kept
    while is_slow and len(names) < 5:
        names.append(f"{len(names)}")
        path = place.write(names[-1], b"first")
        assert (mount.path / path.name).read_bytes() == b"first"
        is_slow = time.time_ns() - path.stat().st_ctime_ns > NETWORK_TICK_NS
    assert mount.value("ssd", "blocks") < len(names)
    place.write(path.name, b"again")
    eventually(lambda: (mount.path / path.name).read_bytes() == b"again", VISIBLE_S)
    mount.read_until_stored(*names, blocks=len(names))
    assert (mount.path / path.name).read_bytes() == b"again"


@pytest.mark.claim("U3")
@in_one_mode
def test_no_inotify_for_changes_at_the_origin(place: Place, mounting: Mounting) -> None:
    place.write("file", b"old")
    mount = mounting(*PERIOD)
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    in_modify, in_create = 2, 0x100
    assert libc.inotify_add_watch(watch, os.fsencode(mount.path), in_modify | in_create) > 0
    place.write("file", b"new!")
    place.write("other", b"")
    visible(place.source, mount)
    readable, _, _ = select.select([watch], [], [], 0)
    events = os.read(watch, 4096) if readable else b""
    assert events == b"", struct.unpack_from("iIII", events)
    os.close(watch)
