"""The plan channel on a real mount: what a hintsd asks for happens, and nothing else does."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.base.errors import UserError
from fusecache.control import control_client
from hintsd.client import finding
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.faulty_origin import Fault, FaultyOrigin
from tests.support.mounted import Mount, errno_of, eventually, open_flags
from tests.support.plan_client import (
    LOOKUP,
    QUEUED,
    READ_ORIGIN,
    READ_SSD,
    STAGED,
    WANTED,
    PlanClient,
)
from tests.support.residency import read_without_requests
from tests.support.trees import random_bytes

STAGED_ONLY, STORED, STAGED_AND_STORED, ORIGIN_ERROR, CHANGED, NO_ROOM, NOT_PUSHED = range(1, 8)
AWAY = "origin (does not answer|is away)"
SIZES = (1, 10_000, 110_000, 0, 4096, 300_000)


def write_files(place: Place, count: int, directory: str = "d") -> list[str]:
    names = [f"{directory}/{number:04}" for number in range(count)]
    for number, name in enumerate(names):
        place.write(name, random_bytes(name, SIZES[number % len(SIZES)]))
    return names


def inodes(client: PlanClient, directory: bytes = b"d") -> list[int]:
    """The inodes of a directory's files, by name."""
    return [entry[0] for _, entry in sorted(client.listing(directory).items())]


def check(place: Place, mount: Mount, names: list[str]) -> None:
    for name in names:
        assert (mount.path / name).read_bytes() == (place.source / name).read_bytes(), name


def check_staged(
    client: PlanClient, inos: list[int], place: Place, mount: Mount, names: list[str]
) -> None:
    """These have been staged: right, and read without a request."""
    paths = [mount.path / name for name in names]
    read_without_requests(
        paths,
        lambda path: check(place, mount, [str(path.relative_to(mount.path))]),
        lambda: requests(mount),
        lambda: client.stage_all(inos, store=0),
    )


def requests(mount: Mount) -> int:
    return int(mount.value("reads", "requests"))


Begin = Callable[..., tuple[Mount, PlanClient]]


@pytest.fixture
def begin(mounting: Mounting) -> Iterator[Begin]:
    """Mounts and opens a plan channel, until the test ends; takes what `mounting` takes."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **changes: Any) -> tuple[Mount, PlanClient]:
            mount = mounting(*flags, **changes)
            return mount, stack.enter_context(PlanClient(mount.path))

        yield start


def staged(client: PlanClient, inos: list[int], store: bool = True) -> list[int]:
    """Stage until nothing is too young to be kept any more; the results at the end."""

    def look() -> bool:
        return NOT_PUSHED not in client.stage_all(inos, store)

    eventually(look)
    return [client.results[ino][-1] for ino in inos]


@in_one_mode
def test_hello(place: Place, mounting: Mounting) -> None:
    mount = mounting()
    with PlanClient(mount.path) as client:
        assert client.hello["ok"] is True
        assert client.hello["mount"]["mountpoint"] == str(mount.path)
        assert client.hello["mount"]["source"] == str(place.source)
        identity = client.hello["mount"]["identity"]
        client.until(lambda: bool(client.state))
        assert client.state["ssd_limit_bytes"] == 256 << 20
        assert client.state["ssd_room_bytes"] > 100 << 20
        eventually(lambda: mount.value("prefetch", "connected") is True)
    eventually(lambda: mount.value("prefetch", "connected") is False)
    mount.restart()
    with PlanClient(mount.path) as client:
        assert client.hello["mount"]["identity"] == identity


@in_one_mode
def test_listings(place: Place, begin: Begin) -> None:
    names = write_files(place, 30)
    for number in range(8300):  # more than a page
        place.write(f"many/{number}", b"")
    os.symlink("0001", place.source / "d/link")
    (place.source / "d/below").mkdir()
    mount, client = begin()
    assert {name: entry[2] for name, entry in client.listing(b"").items()} == {
        b"d": 2,
        b"many": 2,
    }
    found = client.listing(b"d")
    assert set(found) == {os.fsencode(Path(name).name) for name in names} | {b"link", b"below"}
    for name in names:
        status = (mount.path / name).stat()
        assert found[os.fsencode(Path(name).name)] == (
            status.st_ino,
            status.st_size,
            1,
            int(status.st_size == 0),
        )
    assert found[b"link"][2] == 3
    assert found[b"below"][2] == 2
    assert set(client.listing(b"many")) == {b"%d" % number for number in range(8300)}
    for path, error in ((b"none", "ENOENT"), (b"d/0001", "ENOTDIR"), (b"d/link/x", "ENOTDIR")):
        with pytest.raises(OSError, match=error):
            client.listing(path)


@in_one_mode
def test_listings_say_what_is_stored(place: Place, mounting: Mounting) -> None:
    names = write_files(place, 12)
    mount = mounting()
    mount.read_until_stored(*names, blocks=10)  # of 12, 2 are empty
    with PlanClient(mount.path) as client:
        stored = {name for name, entry in client.listing(b"d").items() if entry[3] or not entry[1]}
        assert len(stored) == 12
    mount.umount()
    mount.start()
    with PlanClient(mount.path) as client:  # known from the index alone
        assert {
            name for name, entry in client.listing(b"d").items() if entry[3] or not entry[1]
        } == stored


@pytest.mark.claim("P6")
def test_staged_files_are_read_without_a_request(place: Place, begin: Begin) -> None:
    names = write_files(place, 60)
    mount, client = begin()
    inos = inodes(client)
    results = staged(client, inos)
    assert set(results) <= {STAGED_ONLY, STAGED_AND_STORED}
    check_staged(client, inos, place, mount, names)
    assert mount.value("origin", "files") == 50
    # from SSD, after the pages were dropped
    client.command("drop", inos)
    assert client.stage_all(inos) == {STAGED_AND_STORED: 60}
    check_staged(client, inos, place, mount, names)
    assert mount.value("origin", "files") == 50


@in_one_mode
def test_what_was_read_before_a_plan_is_no_rate_of_its(place: Place, mounting: Mounting) -> None:
    names = write_files(place, 60)
    mount = mounting()
    check(place, mount, names)
    assert mount.value("reads", "by_fetch_threads") > 0
    with PlanClient(mount.path) as client:
        while client.states < 3:
            client.listen(10)
            assert client.state.get("origin_bytes_per_s", 0) == 0


@in_one_mode
def test_what_ssd_gives_is_told_while_it_is_staged(place: Place, begin: Begin) -> None:
    for number in range(30):
        place.write(f"d/{number}", random_bytes(number, 100_000))
    _, client = begin()
    inos = inodes(client)
    client.stage_all(inos)
    client.command("drop", inos)
    client.stage_all(inos)
    client.until(lambda: client.state["ssd_bytes_per_s"] > 0)


@in_one_mode
def test_dropped_files_are_read_from_ssd_again(place: Place, begin: Begin) -> None:
    names = write_files(place, 30)
    mount, client = begin()
    inos = inodes(client)
    staged(client, inos)
    client.command("drop", inos)
    client.obeyed()
    check(place, mount, names)
    assert requests(mount) >= 25
    assert mount.value("reads", "from_ssd") >= 25
    assert mount.value("reads", "from_origin") == 0


@in_one_mode
def test_fetched_files_are_on_ssd_and_not_in_ram(place: Place, begin: Begin) -> None:
    names = write_files(place, 30)
    mount, client = begin()
    inos = inodes(client)
    eventually(lambda: client.fetch_all(inos) == {STORED: 30})
    assert mount.value("ssd", "blocks") == 25
    assert mount.value("ram", "bytes") == 0
    origin_files = mount.value("origin", "files")
    check(place, mount, names)
    assert mount.value("reads", "from_origin") == 0
    assert mount.value("reads", "from_ssd") >= 25
    client.command("drop", inos)
    assert client.stage_all(inos) == {STAGED_AND_STORED: 30}
    assert client.fetch_all(inos) == {STORED: 30}
    assert mount.value("origin", "files") == origin_files


@in_one_mode
def test_staged_without_being_stored(place: Place, begin: Begin) -> None:
    names = write_files(place, 30)
    mount, client = begin()
    inos = inodes(client)
    results = staged(client, inos, store=False)
    # An empty file has nothing to store.
    assert {r for ino, r in zip(inos, results, strict=True)} <= {STAGED_ONLY, STAGED_AND_STORED}
    assert mount.value("ssd", "blocks") == 0
    check_staged(client, inos, place, mount, names)


@in_one_mode
def test_large_files(place: Place, begin: Begin) -> None:
    place.write("d/0", random_bytes("0", 9 << 20))
    place.write("d/1", random_bytes("1", (4 << 20) + 1))
    mount, client = begin()
    inos = inodes(client)
    eventually(lambda: client.fetch_all(inos) == {STORED: 2})
    assert mount.value("ssd", "blocks") == 5
    files = mount.value("origin", "files")
    assert client.stage_all(inos) == {STAGED_AND_STORED: 2}
    check_staged(client, inos, place, mount, ["d/0", "d/1"])
    assert mount.value("origin", "files") == files


@in_one_mode
def test_large_files_without_being_stored(place: Place, begin: Begin) -> None:
    place.write("d/0", random_bytes("0", 9 << 20))
    mount, client = begin()
    assert set(staged(client, inodes(client), store=False)) == {STAGED_ONLY}
    assert mount.value("ssd", "blocks") == 0
    check_staged(client, inodes(client), place, mount, ["d/0"])


@in_one_mode
def test_a_store_without_room(place: Place, begin: Begin) -> None:
    for number in range(12):
        place.write(f"d/{number:02}", random_bytes(str(number), 3 << 20))
    mount, client = begin("--ssd", "16M")
    inos = inodes(client)
    eventually(lambda: NOT_PUSHED not in client.fetch_all(inos))
    results = [client.results[ino][-1] for ino in inos]
    assert set(results) == {STORED, NO_ROOM}
    assert mount.value("ssd", "reserved_bytes") <= 16 << 20
    assert client.fetch_all(inos[:1]) == {results[0]: 1}
    assert set(staged(client, inos)) == {NO_ROOM, STAGED_AND_STORED}
    check_staged(client, inos, place, mount, [f"d/{number:02}" for number in range(12)])


@in_one_mode
def test_while_there_is_a_plan_readers_evict_nothing(place: Place, begin: Begin) -> None:
    names = [f"d/{number:02}" for number in range(12)]
    for name in names:
        path = place.write(name, random_bytes(name, 3 << 20))
        os.utime(path, (1e9, 1e9))
    mount, client = begin("--ssd", "16M")
    inos = inodes(client)
    eventually(lambda: NOT_PUSHED not in client.fetch_all(inos))
    stored = [ino for ino in inos if client.results[ino][-1] == STORED]
    missing = [ino for ino in inos if ino not in stored]

    check(place, mount, names)
    # The publisher answers for this one when all that readers have missed is published, or not.
    assert set(client.fetch_all(missing[-1:])) <= {NO_ROOM, STORED}
    before = mount.value("origin", "bytes")
    assert client.fetch_all(stored) == {STORED: len(stored)}
    assert mount.value("origin", "bytes") == before


def test_an_armed_file_reports_its_next_look_up_once(place: Place, begin: Begin) -> None:
    names = write_files(place, 3)
    mount, client = begin()
    inos = inodes(client)
    staged(client, inos)
    check(place, mount, names)
    del client.seen[:]
    client.command("arm", inos[1:2])

    def look_ups() -> list[tuple[int, int]]:
        check(place, mount, names)
        client.settle()
        return [(ino, kind) for ino, kind in client.seen if kind & 7 == LOOKUP]

    eventually(lambda: bool(look_ups()))
    assert look_ups() == [(inos[1], LOOKUP | WANTED | STAGED)]


def test_what_is_staged_of_a_large_file_cuts_no_wire(place: Place, begin: Begin) -> None:
    """The kernel has never heard of it, so the server looks it up."""
    content = random_bytes("large", (9 << 20) + 5)
    os.utime(place.write("d/large", content), (1e9, 1e9))
    mount, client = begin()
    (ino,) = inodes(client)
    client.command("arm", [ino])
    assert set(staged(client, [ino])) == {STAGED_AND_STORED}
    mount.drop_kernel_caches()
    client.command("drop", [ino])
    assert set(staged(client, [ino])) == {STAGED_AND_STORED}
    client.settle()
    assert not any(kind & 7 == LOOKUP for _, kind in client.seen)
    assert (mount.path / "d/large").read_bytes() == content
    client.settle()
    assert [(seen, kind & 7) for seen, kind in client.seen if kind & 7 == LOOKUP] == [(ino, LOOKUP)]


def test_reads_are_seen_with_how_the_file_stood(place: Place, begin: Begin) -> None:
    names = write_files(place, 3)
    mount, client = begin()
    inos = inodes(client)
    check(place, mount, names[2:])
    client.until(lambda: (inos[2], READ_ORIGIN) in client.seen)
    staged(client, inos[:2])
    del client.seen[:]

    # The kernel lets go of a page, the plan does not know.
    def is_told() -> bool:  # unless it is staged again before it is read
        mount.drop_pages()
        check(place, mount, names[1:2])
        client.listen(0.2)
        return (inos[1], READ_SSD | WANTED | STAGED) in client.seen

    eventually(is_told)
    assert eventually(lambda: mount.value("prefetch", "overtaking_reads") >= 1)
    del client.seen[:]
    client.command("drop", inos[1:2])
    client.obeyed()
    check(place, mount, names[1:2])
    client.until(lambda: (inos[1], READ_SSD) in client.seen)


def test_who_asks_is_seen(place: Place, begin: Begin) -> None:
    """Threads and processes that read at the same time, and have ended before it is told."""
    names = [f"d/{number:02}" for number in range(60)]
    for name in (*names, "d/last"):
        place.write(name, random_bytes(name, 10_000))
    mount, client = begin()
    *inos, last = inodes(client)

    def cat(number: int) -> tuple[int, int]:
        with subprocess.Popen(["cat", mount.path / names[number]], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert len(child.stdout.read()) == 10_000
        return child.pid, os.getpid()

    def read(number: int) -> tuple[int, int]:
        (mount.path / names[number]).read_bytes()
        return os.getpid(), os.getppid()

    def read_all() -> None:
        client.askers.clear()
        with concurrent.futures.ThreadPoolExecutor(6) as threads:
            asked = list(threads.map(lambda n: (cat, read)[n % 2](n), range(60)))
        client.until(lambda: len(client.askers) == 60)
        assert client.askers == {ino: {asker} for ino, asker in zip(inos, asked, strict=True)}

    read_all()  # from the origin
    client.fetch_all(inos)
    mount.drop_pages()
    read_all()  # from SSD
    staged(client, inos)
    client.command("arm", inos)
    client.command("arm", [last])  # behind the others

    def are_armed() -> bool:
        os.stat(mount.path / "d/last")
        client.listen(0.1)
        return last in client.askers

    eventually(are_armed)
    read_all()  # look-ups


@in_one_mode
def test_unknown_inodes_are_gone(place: Place, begin: Begin) -> None:
    write_files(place, 2)
    _, client = begin()
    assert client.stage_all([0, 999_999]) == {CHANGED: 2}
    assert client.fetch_all([4_000_000_000]) == {CHANGED: 1}
    directory = client.listing(b"")[b"d"][0]
    assert set(client.stage_all([directory])) <= {CHANGED, ORIGIN_ERROR, NOT_PUSHED}


@pytest.mark.claim("P1")
@in_one_mode
def test_a_changed_file_is_staged_as_it_is_now(place: Place, begin: Begin) -> None:
    names = write_files(place, 6)
    mount, client = begin("--revalidate", "never")
    inos = inodes(client)
    (place.source / names[2]).write_bytes(random_bytes("new", 50_000))
    (place.source / names[4]).unlink()
    results = staged(client, [inos[2]])
    assert results == [STAGED_AND_STORED]
    assert client.stage_all([inos[4]]) == {CHANGED: 1}
    check_staged(client, [inos[2]], place, mount, [names[2]])


# ---- an origin that is told what to do -----------------------------------------------------------


def settled(place: Place, mount: Mount, client: PlanClient, count: int) -> list[int]:
    """The inodes of `count` files, old enough to be kept: the first was stored."""
    inos = inodes(client)
    assert len(inos) == count
    assert staged(client, inos[:1]) == [STAGED_AND_STORED]
    return inos


@in_one_mode
def test_cancelled_files_are_not_fetched(place: Place, faulty: FaultyOrigin, begin: Begin) -> None:
    write_files(place, 40)
    mount, client = begin("--prefetch-depth", "1", source=faulty.mountpoint)
    inos = settled(place, mount, client, 40)
    files = mount.value("origin", "files")
    faulty.add(Fault("open", "d/0001", hang=True))
    client.stage(inos[1:2])
    eventually(lambda: faulty.hanging() == 1)
    client.stage(inos[2:])
    client.settle()
    client.command("cancel", inos[2:])
    client.settle()
    faulty.clear()
    client.until(lambda: inos[1] in client.results)
    client.settle()
    fetched = {ino for ino in inos[2:] if ino in client.results}
    assert all(SIZES[inos.index(ino) % len(SIZES)] == 0 for ino in fetched)
    assert client.state["queued_stage"] == 0
    assert client.state["in_flight"] == 0
    assert mount.value("origin", "files") == files + 1
    assert faulty.count("open", "d/0002") == 0


@pytest.mark.claim("P7")
@in_one_mode
def test_a_reader_joins_the_flight(place: Place, faulty: FaultyOrigin, begin: Begin) -> None:
    names = write_files(place, 2)
    mount, client = begin(source=faulty.mountpoint)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inos = settled(place, mount, client, 2)
        faulty.reset_counts()
        faulty.add(Fault("open", names[1], hang=True))
        client.stage(inos[1:])
        eventually(lambda: faulty.hanging() == 1)
        read = pool.submit((mount.path / names[1]).read_bytes)
        eventually(lambda: requests(mount) >= 1)
        faulty.clear()
        assert read.result(20) == (place.source / names[1]).read_bytes()
        client.until(lambda: inos[1] in client.results)
        assert faulty.count("open", names[1]) == 1
        assert faulty.count("bytes", names[1]) == len((place.source / names[1]).read_bytes())


@pytest.mark.claim("P7")
@in_one_mode
def test_a_readers_flight_is_joined(place: Place, faulty: FaultyOrigin, begin: Begin) -> None:
    names = write_files(place, 2)
    mount, client = begin(source=faulty.mountpoint)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inos = settled(place, mount, client, 2)
        faulty.reset_counts()
        faulty.add(Fault("open", names[1], hang=True))
        read = pool.submit((mount.path / names[1]).read_bytes)
        eventually(lambda: faulty.hanging() == 1)
        client.stage(inos[1:])
        client.settle()
        faulty.clear()
        assert read.result(20) == (place.source / names[1]).read_bytes()
        client.until(lambda: inos[1] in client.results)
        assert client.results[inos[1]][0] in (
            STAGED_AND_STORED,
            STAGED_ONLY,
        )  # the latter if it came late
        assert faulty.count("open", names[1]) == 1


@pytest.mark.claim("P1")
@in_one_mode
def test_origin_errors_are_told_and_harm_no_reader(
    place: Place, faulty: FaultyOrigin, begin: Begin
) -> None:
    names = write_files(place, 6)
    mount, client = begin(source=faulty.mountpoint, allow_log=[AWAY])
    inos = settled(place, mount, client, 6)
    faulty.add(Fault("read", names[1], error="EIO", times=1))
    assert client.stage_all(inos[1:2]) == {ORIGIN_ERROR: 1}
    check(place, mount, names[1:2])
    faulty.add(Fault("open", names[2], error="EACCES"))
    assert client.fetch_all(inos[2:3]) == {ORIGIN_ERROR: 1}
    assert errno_of((mount.path / names[2]).read_bytes) == "EACCES"
    check(place, mount, names[3:])
    faulty.clear()
    assert set(staged(client, inos)) <= {STAGED_AND_STORED}


@in_one_mode
@pytest.mark.parametrize("is_refused", [False, True])
def test_fetches_ahead_read_a_fuse_origin_directly(
    place: Place, faulty: FaultyOrigin, begin: Begin, is_refused: bool
) -> None:
    """Unless it has refused that once, which costs nobody anything."""
    names = write_files(place, 4)
    mount, client = begin(source=faulty.mountpoint)
    inos = settled(place, mount, client, 4)
    if is_refused:
        faulty.add(Fault("read", names[1], error="EINVAL", times=1))
        assert client.stage_all(inos[1:2]) == {STAGED_AND_STORED: 1}
        assert faulty.count("read", names[1]) > 1
    faulty.add(Fault("read", names[2], hang=True))
    client.stage(inos[2:3])
    eventually(lambda: faulty.hanging() == 1)
    (flags,) = open_flags(mount.server_pid(), faulty.mountpoint / names[2])
    assert bool(flags & os.O_DIRECT) is not is_refused
    faulty.clear()
    client.until(lambda: client.results.get(inos[2]) == [STAGED_AND_STORED])
    assert mount.value("origin", "errors") == 0
    check(place, mount, names)


@in_one_mode
def test_a_reader_that_joined_a_failing_flight_tries_itself(
    place: Place, faulty: FaultyOrigin, begin: Begin
) -> None:
    names = write_files(place, 2)
    mount, client = begin(source=faulty.mountpoint, allow_log=[AWAY])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inos = settled(place, mount, client, 2)
        faulty.add(Fault("open", names[1], hang=True, error="EIO", times=1))
        client.stage(inos[1:])
        eventually(lambda: faulty.hanging() == 1)
        read = pool.submit((mount.path / names[1]).read_bytes)
        eventually(lambda: requests(mount) >= 1)
        faulty.clear()
        assert read.result(20) == (place.source / names[1]).read_bytes()
        client.until(lambda: client.results.get(inos[1]) == [ORIGIN_ERROR])


@pytest.mark.claim("P1", "P7")
@in_one_mode
def test_an_origin_that_hangs(place: Place, faulty: FaultyOrigin, begin: Begin) -> None:
    names = write_files(place, 12)
    mount, client = begin("--origin-timeout", "10", source=faulty.mountpoint, allow_log=[AWAY])
    inos = settled(place, mount, client, 12)
    faulty.add(Fault("open", "d/000[1-2]", hang=True))
    client.stage(inos[1:3])
    client.until(lambda: all(client.results.get(ino) == [ORIGIN_ERROR] for ino in inos[1:3]))
    check(place, mount, names[3:])
    assert set(staged(client, inos[3:])) == {STAGED_AND_STORED}
    faulty.clear()
    assert set(staged(client, inos)) == {STAGED_AND_STORED}


# ---- channels that end ---------------------------------------------------------------------------


@in_one_mode
@pytest.mark.claim("P10")
def test_a_closed_channel_leaves_nothing_behind(
    place: Place, faulty: FaultyOrigin, mounting: Mounting
) -> None:
    names = write_files(place, 40)
    mount = mounting("--prefetch-depth", "1", source=faulty.mountpoint)
    with PlanClient(mount.path) as client:
        inos = settled(place, mount, client, 40)
        faulty.add(Fault("open", "d/0001", hang=True))
        client.stage(inos[1:])
        client.command("arm", inos)
        eventually(lambda: faulty.hanging() == 1)
        assert mount.value("prefetch", "queued_stage") > 20
    eventually(lambda: mount.value("prefetch", "connected") is False)
    assert mount.value("prefetch", "queued_stage") == 0
    faulty.clear()
    check(place, mount, names)
    with PlanClient(mount.path) as client:
        assert set(staged(client, inos)) == {STAGED_AND_STORED}
        assert not any(kind & (QUEUED | STAGED) for _, kind in client.seen)


@in_one_mode
@pytest.mark.claim("P10")
def test_a_second_channel_displaces_the_first(place: Place, mounting: Mounting) -> None:
    names = write_files(place, 6)
    mount = mounting()
    with PlanClient(mount.path) as first:
        inos = inodes(first)
        staged(first, inos)
        with PlanClient(mount.path) as second:
            first.wait_closed()
            assert set(staged(second, inos)) == {STAGED_AND_STORED}
            check(place, mount, names)
        eventually(lambda: mount.value("prefetch", "connected") is False)


@pytest.mark.claim("P11")
@in_one_mode
def test_the_next_server_takes_a_plan(place: Place, mounting: Mounting) -> None:
    names = write_files(place, 12)
    mount = mounting()
    with PlanClient(mount.path) as client:
        inos = inodes(client)
        staged(client, inos)
        mount.kill_server()
        client.wait_closed()
    with PlanClient(mount.path) as client:
        assert inodes(client) == inos
        client.command("drop", inos)
        assert client.stage_all(inos) == {STAGED_AND_STORED: 12}
        check_staged(client, inos, place, mount, names)


@pytest.mark.claim("P1")
@in_one_mode
def test_garbage_closes_the_channel_and_nothing_else(place: Place, mounting: Mounting) -> None:
    names = write_files(place, 2)
    mount = mounting()
    for garbage in (
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\x03\0\0\0abc",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x08\0\0\0\x92\xa4nope\x80\xc0",
        b"\x07\0\0\0\x92\xa4nope\x80",
        b"\x08\0\0\0\x92\xa5fetch\x80",
        b"\x11\0\0\0\x92\xa5fetch\x81\xa4inos\xc4\x03abc",
    ):
        with PlanClient(mount.path) as client:
            client.socket.sendall(garbage)
            client.wait_closed()
            assert len(client.errors) == 1, garbage
        check(place, mount, names)
        with PlanClient(mount.path) as client:
            assert set(staged(client, inodes(client))) == {STAGED_AND_STORED}


@in_one_mode
def test_another_version_is_refused(place: Place, mounting: Mounting) -> None:
    mount = mounting()
    target = control_client.find(str(mount.path))
    for version in (2, None, "1"):
        with pytest.raises(UserError, match="version 1"):
            control_client.ask(target, {"op": "plan", "version": version})
    done = mount.run("status", mount.path)
    assert "mounted without hints (--hintsd none)" in done.stdout


@in_one_mode
def test_a_mount_says_where_its_hintsd_listens(place: Place, mounting: Mounting) -> None:
    write_files(place, 1)
    mount = mounting("--hintsd", "/run/some.sock")
    bound = place.base / "bound"
    bound.mkdir()
    subprocess.run(["mount", "--bind", mount.path, bound], check=True)
    try:
        assert finding.find_socket(str(bound)) == ("/run/some.sock", str(bound))
    finally:
        subprocess.run(["umount", "-l", bound], check=True)
    assert finding.find_socket(str(mount.path / "d")) == ("/run/some.sock", str(mount.path / "d"))
    mount.restart("--hintsd", "/run/other.sock")
    assert finding.find_socket(str(mount.path))[0] == "/run/other.sock"
    mount.restart("--hintsd", "none")
    with pytest.raises(finding.Unhinted, match="hints are off"):
        finding.find_socket(str(mount.path))


@in_one_mode
@pytest.mark.claim("P7", "P8")
def test_the_bandwidth_limit_holds(place: Place, begin: Begin) -> None:
    for number in range(20):
        place.write(f"d/{number:02}", random_bytes(str(number), 100_000))
    place.write("d/20", random_bytes("20", 5 << 20))
    mount, client = begin("--prefetch-bandwidth", "4M")
    inos = inodes(client)
    begun = time.monotonic()
    staged(client, inos)
    # 7 MB at 4 MiB/s; the last piece, of 4 MiB at most, is not waited for.
    assert time.monotonic() - begun > 0.6
    # Readers are not held back.
    check(place, mount, [f"d/{number:02}" for number in range(21)])


@pytest.mark.claim("P1")
@pytest.mark.parametrize("seed", range(2))
def test_any_commands_in_any_order_harm_no_reader(place: Place, begin: Begin, seed: int) -> None:
    names = [*write_files(place, 60), "d/large"]
    place.write("d/large", random_bytes("large", 9 << 20))
    mount, client = begin("--ram", "16M", "--ssd", "64M")
    rng = random.Random(seed)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inos = inodes(client)
        for _ in range(10):
            reading = pool.submit(check, place, mount, rng.sample(names, 30))
            for _ in range(20):
                some = rng.choices([*inos, 0, 1, 77_777], k=rng.randint(0, 80))
                match rng.choice(["stage", "stage", "fetch", "cancel", "drop", "arm", "clear"]):
                    case "stage":
                        client.stage(some, store=rng.random() < 0.5)
                    case "clear":
                        client.send("clear")
                    case kind:
                        client.command(kind, some)
                client.listen(0)
            reading.result(60)
        client.send("clear")
        client.until(lambda: client.state["in_flight"] == 0)
        client.settle()
        assert client.state["queued_stage"] == client.state["queued_fetch"] == 0
        assert set(staged(client, inos[:60])) <= {STAGED_ONLY, NO_ROOM, STAGED_AND_STORED}
        check(place, mount, names)
