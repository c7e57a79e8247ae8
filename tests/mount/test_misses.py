"""READs of small files that are not on SSD, answered by the fetch threads (docs/MISSES.md)."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusecache.base.wire import Result
from fusecache.control import control_client
from fusecache.read.origin import NETWORK_TICK_NS
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import Mount, errno_of, eventually
from tests.support.plan_client import READ_ORIGIN, PlanClient
from tests.support.trees import random_bytes

pytestmark = in_one_mode  # the front has threads in zero-open mode only

SIZES = (1, 3000, 4096, 70_001, 100_000)
READERS = 4


def write(place: Place, count: int) -> dict[str, bytes]:
    contents = {
        f"d/{n:04}": random_bytes(f"{n}", SIZES[n % len(SIZES)] + n // 10) for n in range(count)
    }
    for name, content in contents.items():
        place.write(name, content)
    return contents


def read_all(mount: Mount, contents: dict[str, bytes]) -> None:
    def is_right(name: str) -> bool:
        return (mount.path / name).read_bytes() == contents[name]

    with ThreadPoolExecutor(READERS) as pool:
        assert all(pool.map(is_right, contents))


def read_direct(path: Path, size: int) -> bytes:
    """By a READ of its own, whoever else reads the file."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, -(-size // 4096) * 4096) as buffer:
            count = os.preadv(fd, [buffer], 0)
            return buffer[:count]
    finally:
        os.close(fd)


def test_a_first_pass_is_read_by_the_pool_once_and_stored(place: Place, mounting: Mounting) -> None:
    contents = write(place, 200)
    mount = mounting()
    read_all(mount, contents)
    assert mount.value("origin", "files") == len(contents)
    assert mount.value("origin", "bytes") == sum(map(len, contents.values()))
    assert mount.value("reads", "from_origin") == mount.value("reads", "requests")
    assert mount.value("reads", "by_fetch_threads") == len(contents)
    eventually(lambda: mount.value("ssd", "blocks") == len(contents))
    mount.drop_pages()
    read_all(mount, contents)
    assert mount.value("origin", "files") == len(contents)
    assert mount.value("reads", "by_fetch_threads") == len(contents)


def test_what_was_evicted_is_read_by_the_pool_again(place: Place, mounting: Mounting) -> None:
    """Its location leads to a segment that is gone."""
    size, ssd, ram = 100_000, 32 << 20, 16 << 20
    contents = {f"d/{n:04}": random_bytes(f"{n}", size) for n in range(600)}
    for name, content in contents.items():
        place.write(name, content)
    mount = mounting("--ssd", str(ssd), "--ram", str(ram), "--policy", "lrf")
    read_all(mount, contents)
    mount.drop_pages()
    before = mount.value("reads", "by_fetch_threads"), mount.value("origin", "files")
    read_all(mount, contents)
    by_pool, fetched = (
        mount.value("reads", "by_fetch_threads") - before[0],
        mount.value("origin", "files") - before[1],
    )
    assert fetched >= len(contents) - (ssd + ram) // size, "all that cannot be cached"
    assert by_pool > fetched / 2, "the others found the publisher busy"


@pytest.mark.parametrize(
    ("how", "result"),
    [("changed", Result.NOT_PUSHED), ("gone", Result.GONE), ("failed once", Result.STORED)],
)
def test_a_fetch_that_has_joined_a_miss_is_told_what_became_of_the_file(
    place: Place, faulty: FaultyOrigin, mounting: Mounting, how: str, result: int
) -> None:
    name = "d/f"
    path = place.write(name, random_bytes(name, 50_000))
    mount = mounting(source=faulty.mountpoint)
    eventually(lambda: time.time_ns() - os.stat(mount.path / name).st_ctime_ns > NETWORK_TICK_NS)
    error = "EIO" if how == "failed once" else ""
    faulty.add(Fault("read", name, hang=True, error=error, times=1))
    with PlanClient(mount.path) as client:
        ino = client.listing(b"d")[b"f"][0]
    with ThreadPoolExecutor() as pool:
        reading = pool.submit(lambda: errno_of((mount.path / name).read_bytes))
        eventually(lambda: faulty.hanging() == 1)
        with PlanClient(mount.path) as client:
            client.listing(b"d")
            client.command("fetch", [ino])
            client.settle()
            if how == "changed":
                path.write_bytes(random_bytes("other", 40_000))
            elif how == "gone":
                path.unlink()
            faulty.clear()
            reading.result(40)
            client.until(lambda: ino in client.results)
            assert client.results[ino] == [result]


def test_under_a_plan_the_pool_answers_too_and_it_is_told(place: Place, mounting: Mounting) -> None:
    contents = write(place, 100)
    mount = mounting()
    with PlanClient(mount.path) as client:
        inos = {entry[0] for entry in client.listing(b"d").values()}
        read_all(mount, contents)
        client.until(lambda: {ino for ino, _ in client.seen} == inos)
        assert {kind for _, kind in client.seen} == {READ_ORIGIN}
        assert {process for askers in client.askers.values() for process, _ in askers} == {
            os.getpid()
        }
    assert mount.value("origin", "files") == len(contents)
    assert mount.value("reads", "by_fetch_threads") == len(contents)


def test_who_reads_what_a_plan_is_fetching_is_answered_by_that_fetch(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    content = place.write("d/file", random_bytes("file", 50_000)).read_bytes()
    mount = mounting(source=faulty.mountpoint)
    path = mount.path / "d/file"
    eventually(lambda: settled(path))
    faulty.add(Fault("read", "d/file", hang=True))
    with PlanClient(mount.path) as client, ThreadPoolExecutor(READERS) as pool:
        ino = client.listing(b"d")[b"file"][0]
        client.command("fetch", [ino])
        eventually(lambda: faulty.hanging() == 1)
        reading = [pool.submit(read_direct, path, len(content)) for _ in range(READERS)]
        eventually(lambda: mount.value("reads", "requests") == READERS)
        time.sleep(0.2)  # until they have joined
        faulty.clear()
        assert all(read.result(30) == content for read in reading)
        client.until(lambda: client.results.get(ino) == [Result.STORED])
    assert mount.value("origin", "files") == 1
    assert mount.value("reads", "by_fetch_threads") == READERS


def test_who_has_joined_a_plans_fetch_that_fails_reads_the_file_himself(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    content = place.write("d/file", random_bytes("file", 50_000)).read_bytes()
    mount = mounting(source=faulty.mountpoint)
    path = mount.path / "d/file"
    eventually(lambda: settled(path))
    faulty.add(Fault("read", "d/file", hang=True, error="EIO", times=1))
    with PlanClient(mount.path) as client, ThreadPoolExecutor(1) as pool:
        ino = client.listing(b"d")[b"file"][0]
        client.command("fetch", [ino])
        eventually(lambda: faulty.hanging() == 1)
        reading = pool.submit(read_direct, path, len(content))
        eventually(lambda: mount.value("reads", "requests") == 1)
        faulty.clear()
        assert reading.result(30) == content
        client.until(lambda: client.results.get(ino) == [Result.ORIGIN_ERROR])


def test_readers_of_one_file_wait_for_one_fetch(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    content = place.write("d/file", random_bytes("file", 50_000)).read_bytes()
    mount = mounting(source=faulty.mountpoint)
    path = mount.path / "d/file"
    os.listdir(path.parent)
    eventually(lambda: settled(path))
    faulty.add(Fault("read", "d/file", hang=True))
    with ThreadPoolExecutor(READERS) as pool:
        reading = [pool.submit(read_direct, path, len(content)) for _ in range(READERS)]
        eventually(lambda: faulty.hanging() == 1)
        eventually(lambda: mount.value("reads", "requests") == READERS)
        faulty.clear()
        assert all(read.result(30) == content for read in reading)
    assert mount.value("origin", "files") == 1
    assert mount.value("reads", "by_fetch_threads") == READERS


def outcome(path: Path) -> bytes | str:
    """What is read, or why it is not."""
    try:
        return path.read_bytes()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def settled(path: Path) -> bool:
    """Its last change is older than a file server's clock ticks."""
    return time.time_ns() - os.stat(path).st_ctime_ns > NETWORK_TICK_NS


def test_a_file_that_has_just_changed_takes_the_long_way(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    mount = mounting("--revalidate", "1", source=faulty.mountpoint)
    for name in "abcde":
        path, before = place.write(name, b"before"), mount.value("reads", "by_fetch_threads")
        assert (mount.path / name).read_bytes() == b"before"
        if not settled(path):  # else this machine was too slow
            break
    assert mount.value("reads", "by_fetch_threads") == before
    path.write_bytes(b"behind")  # as long, and perhaps in the same tick
    eventually(lambda: (mount.path / name).read_bytes() == b"behind")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda path: path.write_bytes(b"another"), b"another"),
        (lambda path: path.unlink(), "ENOENT"),
    ],
)
def test_what_changes_while_it_is_fetched(
    place: Place,
    faulty: FaultyOrigin,
    mounting: Mounting,
    change: Callable[[Path], object],
    expected: bytes | str,
) -> None:
    path = place.write("d/file", random_bytes("file", 5000))
    mount = mounting("--revalidate", "1", source=faulty.mountpoint)
    view = mount.path / "d/file"
    eventually(lambda: settled(view))
    faulty.add(Fault("read", "d/file", hang=True))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(outcome, view)
        eventually(lambda: faulty.hanging() == 1)
        before = path.read_bytes()
        change(path)
        faulty.clear()
        assert reading.result(30) in (before, expected, "ESTALE")
    assert mount.value("reads", "by_fetch_threads") == 0
    eventually(lambda: outcome(view) == expected)


def test_another_mounts_blocks_are_found(place: Place, mounting: Mounting, tmp_path: Path) -> None:
    """Both have listed the directory before either had stored a file of it."""
    contents = write(place, 40)
    (tmp_path / "other").mkdir()
    mount, other = mounting(), mounting(mountpoint=tmp_path / "other")
    for each in (mount, other):
        os.listdir(each.path / "d")
    read_all(mount, contents)
    eventually(lambda: mount.value("ssd", "blocks") == len(contents))
    eventually(lambda: other.value("ssd", "blocks") == len(contents))
    read_all(other, contents)
    assert other.value("origin", "files") == 0


LARGER = (131_073, 200_001, 500_000, 1_300_000, 4 << 20)
PIECE = 128 << 10  # what the kernel asks for at once


def write_larger(place: Place, count: int) -> dict[str, bytes]:
    contents = {f"e/{n:03}": random_bytes(f"e{n}", LARGER[n % len(LARGER)]) for n in range(count)}
    for name, content in contents.items():
        place.write(name, content)
    return contents


def test_a_file_that_the_kernel_asks_for_in_pieces_is_fetched_whole_and_once(
    place: Place, mounting: Mounting
) -> None:
    contents = write_larger(place, 40)
    mount = mounting("--ram", "256M")
    read_all(mount, contents)
    reads = mount.value("reads")
    assert mount.value("origin", "files") == len(contents)
    assert mount.value("origin", "bytes") == sum(map(len, contents.values()))
    # What another front thread takes before the file's first READ goes to Python. Without copies
    # all but the first do.
    assert reads["from_origin"] >= reads["by_fetch_threads"] > 2 * len(contents)
    assert reads["from_origin"] + reads["from_ssd"] == reads["requests"]
    eventually(lambda: mount.value("ssd", "blocks") == len(contents))
    mount.drop_pages()
    read_all(mount, contents)
    assert mount.value("origin", "files") == len(contents)


def test_pieces_are_answered_in_any_order_once_the_first_was(
    place: Place, mounting: Mounting
) -> None:
    """One READ at a time: the first, the last, those between."""
    contents = write_larger(place, 40)
    mount = mounting("--ram", "256M")
    for name, content in contents.items():
        fd = os.open(mount.path / name, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        try:
            end = (len(content) - 1) // PIECE * PIECE
            for at in (0, end, *range(PIECE, end, PIECE)):
                assert os.pread(fd, PIECE, at) == content[at : at + PIECE]
        finally:
            os.close(fd)
    reads = mount.value("reads")
    # Where a machine stands still for a second copies go. By the last piece's end most would.
    assert reads["from_origin"] >= reads["by_fetch_threads"] > 0.9 * reads["from_origin"]
    assert reads["from_origin"] > 2 * len(contents)
    assert mount.value("origin", "files") == len(contents)


def test_what_is_in_memory_is_no_answer_once_the_file_has_changed(
    place: Place, mounting: Mounting
) -> None:
    before, behind = random_bytes("before", 500_000), random_bytes("behind", 500_000)
    path = place.write("file", before)
    mount = mounting()
    os.listdir(mount.path)  # what is listed is swept
    with open(mount.path / "file", "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # one piece, none ahead
        assert os.pread(file.fileno(), 1000, 0) == before[:1000]
        path.write_bytes(behind)
        control_client.ask(control_client.find(str(mount.path)), {"op": "sweep"})
        for offset in (400_000, 200_000, 0):
            assert os.pread(file.fileno(), 1000, offset) == behind[offset : offset + 1000]


def test_readers_of_pieces_in_any_order_get_them(place: Place, mounting: Mounting) -> None:
    """Many files of which a part is wanted; what is kept of them has a bound, and an end."""
    contents = write_larger(place, 60)
    mount = mounting("--ram", "256M")

    def piece(name: str, at: int) -> bool:
        fd = os.open(mount.path / name, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            return os.pread(fd, PIECE, at) == contents[name][at : at + PIECE]
        finally:
            os.close(fd)

    def pieces(name: str) -> bool:
        size = len(contents[name])
        places = [0, size - 1000, PIECE, size // 2] if int(name[-1]) % 2 else [size // 2, 0, size]
        return all(piece(name, at) for at in places)

    with ThreadPoolExecutor(READERS) as pool:
        assert all(pool.map(pieces, contents))
        assert all(pool.map(lambda name: piece(name, 0) and pieces(name), reversed(contents)))
    read_all(mount, contents)
    assert mount.value("origin", "files") == len(contents)
