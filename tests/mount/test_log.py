"""The log on a real mount: a hintsd has each epoch's samples written where the next one reads them
together. Every byte stays right, old segments go, and whoever dies loses time only.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import walk
from tests.conftest import Mounting, Place, in_one_mode
from tests.support.mounted import Mount, eventually
from tests.support.plan_client import PlanClient
from tests.support.residency import read_without_requests
from tests.support.trees import random_bytes

STORE, MOVE, KEEP_ORDER, SORT = 1, 2, 4, 8
STORED, STORED_BOTH = 2, 3
OPEN = 1
SIZES = (100_000, 3_000, 250_000, 70_001, 4096, 150_000)
LIMIT_BYTES = 64 << 20  # static segments of 8 MiB


class Job:
    """A hintsd that packs: files of one block, in `d`, by inode number."""

    def __init__(self, place: Place, mount: Mount, client: PlanClient) -> None:
        self.place, self.mount, self.client = place, mount, client
        listed = sorted(client.listing(b"d").items())
        self.names = {entry[0]: name.decode() for name, entry in listed}
        self.bytes = sum(entry[1] for _, entry in listed)

    def chunks(self, seed: int, count: int = 5) -> list[list[int]]:
        inos = list(self.names)
        random.Random(seed).shuffle(inos)
        size = -(-len(inos) // count)
        return [inos[start : start + size] for start in range(0, len(inos), size)]

    def pack(self, chunks: list[list[int]]) -> None:
        self.client.pack(chunks, self.bytes)

    def read(self, chunks: list[list[int]]) -> None:
        """Stage the chunks one after the other and move what is in them, as a reader goes on."""
        for number, chunk in enumerate(chunks):
            self.client.stage_all(chunk, STORE | MOVE | (0 if number else KEEP_ORDER))
            for ino in chunk[::7]:
                self.check(ino)
            self.client.command("drop", chunk)
            self.client.obeyed()
            assert self.mount.value("ssd", "reserved_bytes") <= LIMIT_BYTES

    def is_right(self, ino: int) -> bool:
        paths = (root / "d" / self.names[ino] for root in (self.mount.path, self.place.source))
        view, source = (path.read_bytes() for path in paths)
        return view == source

    def check(self, ino: int) -> None:
        assert self.is_right(ino), self.names[ino]

    def check_all(self) -> None:
        """From SSD: the origin is not asked."""
        self.mount.drop_pages()
        before = self.mount.value("reads", "from_origin")
        for ino in self.names:
            self.check(ino)
        assert self.mount.value("reads", "from_origin") == before

    def end_epoch(self, chunks: list[list[int]]) -> None:
        """The log is written out, because another one begins: every file lies in its chunk."""
        self.pack(chunks)
        self.client.obeyed()

    def lies_in(self) -> list[set[str]]:
        """The files of each segment that has any, in the order of their numbers."""
        found = [names_in(path) for path in segments(self.place)]
        return [names for names in found if names]


def segments(place: Place) -> list[Path]:
    return sorted((place.cache_dir / "segments").glob("*.seg"))


def names_in(path: Path) -> set[str]:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return set()
    try:
        header = fmt.parse_segment_header(os.pread(fd, fmt.SEGMENT_HEADER_BYTES, 0))
        if header is None:  # it is about to be begun
            return set()
        return {os.path.basename(record.path).decode()
                for _, record in walk(fd, header.segno, header.uuid)}  # fmt: skip
    finally:
        os.close(fd)


def spoil(path: Path) -> tuple[int, int]:
    """The last byte of the last record's payload: segment, offset of the record."""
    with open(path, "r+b") as file:
        header = fmt.parse_segment_header(file.read(fmt.SEGMENT_HEADER_BYTES))
        assert header is not None
        *_, (at, record) = walk(file.fileno(), header.segno, header.uuid)
        file.seek(at + record.header_len + record.payload_len - 1)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([last ^ 1]))
    return header.segno, at


Begin = Callable[..., Job]


@pytest.fixture
def begin(place: Place, mounting: Mounting) -> Iterator[Begin]:
    """A mount with a dataset on it and a channel to it."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, count: int = 200, store: bool = True, **changes: Any) -> Job:
            for number in range(count):
                name = f"d/{number:04}"
                same = "same" if number % 40 == 0 else name  # stored once under one of the names
                place.write(name, random_bytes(same, SIZES[number % len(SIZES)]))
            mount = mounting("--ssd", "64M", "--layout", "reorder", *flags, **changes)
            client = stack.enter_context(PlanClient(mount.path))
            job = Job(place, mount, client)
            if store:
                eventually(lambda: client.fetch_all(list(job.names)) == {2: count})
            return job

        yield start


@in_one_mode
@pytest.mark.parametrize("how", [STORE | SORT, 0], ids=["chunk", "window"])
def test_readers_that_have_caught_up_wait_for_what_is_staged(begin: Begin, how: int) -> None:
    """Whoever answers them: who stages it, or, when it is cancelled, the server as ever."""
    job = begin()
    inos = list(job.names)
    for number in range(100):
        job.client.stage(inos, how)
        if number % 4 == 3:
            job.client.command("cancel", inos)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(job.check, inos[:: 7 + number] if how else inos))
        job.client.command("drop", inos)
        job.client.obeyed()
        if number > 3 and job.mount.value("reads", "waited_for_staging") > 8:
            break
    assert job.mount.value("reads", "waited_for_staging") > 8
    assert job.mount.value("reads", "from_origin") == 0
    assert job.mount.value("integrity", "mismatches") == 0


@in_one_mode
def test_what_an_ended_plan_was_staging_is_reported_to_the_next_one(begin: Begin) -> None:
    job = begin()
    inos = list(job.names)
    for number in range(6):
        job.client.stage(inos, STORE | SORT * (number % 2))
        job.client.send("clear")
        assert job.client.stage_all(inos) == {STORED_BOTH: len(inos)}
        job.client.command("drop", inos)
        job.client.obeyed()


@in_one_mode
def test_each_epoch_lies_in_its_order(place: Place, begin: Begin) -> None:
    job = begin()
    static = segments(place)
    assert len(static) > 2
    first, second, third = (job.chunks(seed) for seed in range(3))
    job.pack(first)
    job.read(job.chunks(99))
    job.end_epoch(second)
    packed = [{job.names[ino] for ino in chunk} for chunk in first]
    found = job.lies_in()
    assert [names for names in found if names in packed] == packed
    eventually(lambda: not any(path.exists() for path in static))
    job.read(first)
    job.check_all()
    old = segments(place)
    job.end_epoch(third)
    packed = [{job.names[ino] for ino in chunk} for chunk in second]
    eventually(lambda: [names for names in job.lies_in() if names in packed] == packed)
    eventually(lambda: len(set(old) & set(segments(place))) == len(second))
    job.read(second)
    job.check_all()
    assert job.mount.value("layout", "packing") == OPEN
    assert job.mount.value("integrity", "mismatches") == 0


@in_one_mode
def test_a_first_epoch_is_written_as_it_is_fetched(place: Place, begin: Begin) -> None:
    job = begin(store=False)
    first, second = job.chunks(1), job.chunks(2)
    job.pack(first)
    eventually(lambda: job.client.stage_all(list(job.names), STORE | MOVE)[STORED_BOTH] > 190)
    for ino in job.names:
        job.check(ino)
    job.end_epoch(second)
    packed = [{job.names[ino] for ino in chunk} for chunk in first]
    assert [names for names in job.lies_in() if len(names) > 30] == packed
    job.read(first)
    job.check_all()


@in_one_mode
def test_the_room_that_a_log_leaves_is_told_before_more_is_obeyed(begin: Begin) -> None:
    job = begin(store=False)
    job.client.settle()
    job.pack(job.chunks(1))
    job.client.obeyed()
    assert job.client.state["packing"] == OPEN


@in_one_mode
def test_what_was_fetched_is_written_when_nothing_more_comes(place: Place, begin: Begin) -> None:
    job = begin(store=False, count=20)
    job.pack(job.chunks(1))
    for ino in job.names:
        job.check(ino)  # a reader without hints
    eventually(lambda: job.mount.value("layout", "log_waiting_bytes") == 0)
    eventually(job.check_all)


@in_one_mode
def test_a_file_that_waits_to_be_written_is_fetched_once(begin: Begin) -> None:
    job = begin(store=False, count=60)
    job.pack(job.chunks(1))
    small = [ino for ino, name in job.names.items() if SIZES[int(name) % len(SIZES)] < 5000]
    for number, ino in enumerate(small):  # they fill no buffer
        job.check(ino)
        job.mount.drop_pages()
        job.check(small[max(0, number - 3)])
    assert job.mount.value("origin", "files") == len(small)


@in_one_mode
def test_a_file_that_waits_to_be_written_is_staged_from_memory(begin: Begin) -> None:
    job = begin(store=False, count=60)
    job.pack(job.chunks(1))
    small = [ino for ino, name in job.names.items() if SIZES[int(name) % len(SIZES)] < 5000]
    for ino in small:  # they fill no buffer, and nothing is written before there is a pause
        assert job.client.fetch_all([ino]) == {STORED: 1}
        job.client.command("drop", [ino])
        assert job.client.fetch_all([ino]) == {STORED: 1}
        assert job.client.stage_all([ino], STORE | MOVE) == {STORED_BOTH: 1}
        read_without_requests(
            [job.mount.path / "d" / job.names[ino]],
            lambda _: job.check(ino),  # noqa: B023
            lambda: int(job.mount.value("reads", "requests")),
            lambda: job.client.stage_all([ino], STORE | MOVE),  # noqa: B023
        )
    assert job.mount.value("origin", "files") == len(small)


@in_one_mode
def test_a_killed_server_loses_no_file(place: Place, begin: Begin) -> None:
    job = begin()
    first, second = job.chunks(1), job.chunks(2)
    job.pack(first)
    job.read(job.chunks(3)[:3])
    job.client.stage(job.chunks(3)[3], STORE | MOVE)
    job.mount.kill_server()
    eventually(lambda: job.mount.value("restarts") == 1)
    job.check_all()
    with PlanClient(job.mount.path) as client:
        again = Job(place, job.mount, client)
        again.pack(first)
        again.read(again.chunks(4))
        again.end_epoch(second)
        again.check_all()
        packed = [{job.names[ino] for ino in chunk} for chunk in first]
        assert [names for names in again.lies_in() if names in packed] == packed


@in_one_mode
def test_when_the_hintsd_goes_its_log_ends(place: Place, begin: Begin) -> None:
    job = begin()
    job.pack(job.chunks(1))
    job.read(job.chunks(3)[:3])
    job.client.stage(job.chunks(3)[3], STORE | MOVE)
    job.client.socket.close()
    eventually(lambda: job.mount.value("layout", "packing") == 0)
    assert job.mount.value("layout", "log_segments") == 0
    job.check_all()
    # They are segments like all others now: of a mount that begins anew, too.
    job.mount.restart()
    job.check_all()


@in_one_mode
def test_a_log_that_is_written_is_read_and_nothing_moves(place: Place, begin: Begin) -> None:
    job = begin()
    first, second = job.chunks(1), job.chunks(2)
    job.pack(first)
    job.read(job.chunks(3))
    job.client.send("pack", chunks=0, last=False)
    eventually(lambda: job.mount.value("layout", "packing") == 0)
    packed = [{job.names[ino] for ino in chunk} for chunk in first]
    assert [names for names in job.lies_in() if names in packed] == packed
    assert job.mount.value("layout", "log_segments") >= len(first)
    written = job.mount.value("layout", "log_written_bytes")
    for chunk in first:
        job.client.stage_all(chunk, STORE | SORT)
        for ino in chunk[::7]:
            job.check(ino)
        job.client.command("drop", chunk)
    assert job.mount.value("layout", "log_written_bytes") == written
    job.pack(second)  # and is moved out of by the next one
    job.read(first)
    job.client.send("pack", chunks=0, last=False)
    eventually(lambda: job.mount.value("layout", "packing") == 0)
    packed = [{job.names[ino] for ino in chunk} for chunk in second]
    assert [names for names in job.lies_in() if names in packed] == packed
    job.check_all()


@in_one_mode
def test_verify_checks_what_lies_in_logs(place: Place, begin: Begin) -> None:
    """In the one that is read and in the one that is written."""
    job = begin(allow_log=("checksum",), count=100)
    first, second = job.chunks(1), job.chunks(2)
    job.pack(first)
    job.read(job.chunks(3))
    job.end_epoch(second)
    for chunk in first[:3]:
        job.client.stage_all(chunk, STORE | MOVE)
    done = job.mount.run("verify", job.mount.path)
    assert done.returncode == 0, done.stderr
    records = int(done.stdout.split()[0])
    assert records >= len(job.names)
    spoilt = [spoil(path) for path in segments(place)[-10:] if names_in(path)]
    assert len(spoilt) > 5
    done = job.mount.run("verify", job.mount.path)
    assert done.returncode == 1
    live = [
        place for place in spoilt if "byte {1} of segment {0} is bad".format(*place) in done.stderr
    ]
    assert f" {len(live)} bad, dropped; fetched again on use" in done.stdout
    assert len(live) > 5
    job.mount.drop_pages()
    for ino in job.names:
        job.check(ino)
    assert job.mount.value("integrity", "mismatches") == len(live)
    assert job.mount.run("verify", job.mount.path).returncode == 0


@in_one_mode
def test_no_further_log(place: Place, begin: Begin) -> None:
    job = begin()
    static = segments(place)
    job.pack(job.chunks(1))
    job.read(job.chunks(3))
    job.client.send("pack", chunks=0)
    eventually(lambda: job.mount.value("layout", "log_segments") == 0)
    assert not any(path.exists() for path in static)
    job.check_all()
    job.mount.umount()
    job.mount.start()
    job.names = {}  # other numbers
    with PlanClient(job.mount.path) as client:
        job = Job(place, job.mount, client)
        job.check_all()


@in_one_mode
def test_files_that_change_meanwhile(place: Place, begin: Begin) -> None:
    job = begin("--revalidate", "1")
    chunks = job.chunks(1)
    job.pack(chunks)
    stop = threading.Event()

    def change() -> None:
        rng = random.Random(5)
        while not stop.wait(0.01):
            name = f"{rng.randrange(200):04}"
            (place.source / "d" / name).write_bytes(rng.randbytes(rng.choice(SIZES)))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for chunk in job.chunks(3):
            job.client.stage_all(chunk, STORE | MOVE)
            job.client.command("drop", chunk)
    finally:
        stop.set()
        thread.join()
    job.end_epoch(job.chunks(2))

    eventually(lambda: all(map(job.is_right, job.names)))
    for chunk in chunks:
        job.client.stage_all(chunk, STORE | MOVE)
    job.mount.drop_pages()
    eventually(lambda: all(map(job.is_right, job.names)))


def is_adopted(place: Place) -> bool:
    """Nobody writes a segment."""
    path = max((place.cache_dir / "index").glob("*.db"))
    with (
        contextlib.suppress(sqlite3.OperationalError),
        contextlib.closing(sqlite3.connect(path)) as db,
    ):
        return not db.execute("SELECT count(*) FROM segments WHERE NOT sealed").fetchone()[0]
    return False


def disk_bytes(place: Place) -> int:
    found = 0
    for path in segments(place):
        with contextlib.suppress(FileNotFoundError):  # released meanwhile
            found += path.stat().st_blocks * 512
    return found


@in_one_mode
@pytest.mark.parametrize(("share", "moved_least"), [(1.15, 0.05), (1.5, 0.9)])
def test_ten_epochs_with_little_room(
    place: Place, begin: Begin, share: float, moved_least: float
) -> None:
    """Nothing is fetched again, the limit holds, and every epoch moves something: all of it from
    half a dataset of room on.
    """
    count, chunks = 200, 12
    size = sum(SIZES[number % len(SIZES)] for number in range(count))
    limit = int(share * size)
    job = begin("--ssd", f"{limit >> 10}K", count=count, store=False)
    job.pack(job.chunks(1, chunks))
    written = 0
    for epoch in range(10):
        for chunk in job.chunks(epoch, chunks):
            job.client.stage_all(chunk, STORE | MOVE)
            assert disk_bytes(place) <= limit
        job.client.command("drop", list(job.names))
        job.pack(job.chunks(epoch + 2, chunks))
        job.client.obeyed()
        status = job.mount.status()
        assert status["origin"]["files"] == count
        before, written = written, status["layout"]["log_written_bytes"]
        assert written - before > moved_least * size
        assert status["ssd"]["reserved_bytes"] <= limit
    job.check_all()


@in_one_mode
def test_jobs_that_are_left_do_not_fill_the_disk(place: Place, begin: Begin) -> None:
    count, chunks = 200, 12
    size = sum(SIZES[number % len(SIZES)] for number in range(count))
    job = begin("--ssd", f"{2 * size >> 10}K", count=count, store=False)
    job.pack(job.chunks(1, chunks))
    job.client.stage_all(list(job.names), STORE | MOVE)
    job.client.send("pack", chunks=0)
    job.client.obeyed()
    for seed in range(3):
        with PlanClient(job.mount.path) as client:
            left = Job(place, job.mount, client)
            left.pack(left.chunks(seed, chunks))
            some = [ino for chunk in left.chunks(9, chunks)[:6] for ino in chunk]
            client.command("drop", some)
            client.stage_all(some, STORE | MOVE)
        eventually(lambda: is_adopted(place))
        assert disk_bytes(place) <= 2 * size
    with PlanClient(job.mount.path) as client:
        whole = Job(place, job.mount, client)
        for seed in range(3):
            whole.pack(whole.chunks(seed, chunks))
            for chunk in whole.chunks(seed - 1, chunks):
                client.command("drop", chunk)
                client.stage_all(chunk, STORE | MOVE)
        whole.end_epoch(whole.chunks(4, chunks))
        assert job.mount.value("origin", "files") == count
        assert disk_bytes(place) < 1.2 * size
        whole.check_all()


@in_one_mode
def test_without_room_nothing_breaks(place: Place, begin: Begin) -> None:
    job = begin("--ssd", "36M", count=330)
    job.pack(job.chunks(1))
    job.read(job.chunks(3))
    job.end_epoch(job.chunks(2))
    job.read(job.chunks(1))
    job.check_all()


@in_one_mode
def test_a_smaller_ssd_is_kept_while_a_log_is_only_read(
    place: Place, begin: Begin, mounting: Mounting
) -> None:
    job = begin()
    job.pack(job.chunks(1))
    job.read(job.chunks(3))
    job.client.send("pack", chunks=0, last=False)
    job.client.obeyed()
    limit_bytes = 16 << 20
    assert job.mount.value("ssd", "reserved_bytes") > limit_bytes
    source, mountpoint = place.base / "source-2", place.base / "mnt-2"
    source.mkdir()
    mountpoint.mkdir()
    mounting("--ssd", "16M", source=source, mountpoint=mountpoint)
    eventually(lambda: job.mount.value("ssd", "reserved_bytes") <= limit_bytes)
    assert job.mount.value("layout", "log_segments") == 0
    for ino in job.names:
        job.check(ino)


@in_one_mode
def test_a_large_file_takes_no_segment_that_a_first_log_wants(place: Place, begin: Begin) -> None:
    place.write("large", random_bytes("large", 5 << 20))
    job = begin("--ssd", "36M", store=False)
    job.pack(job.chunks(1))
    job.client.settle()
    assert job.bytes < job.client.state["ssd_room_bytes"] < job.bytes + (8 << 20)
    (job.mount.path / "large").read_bytes()
    eventually(lambda: job.mount.value("origin", "files") > 0)
    job.client.settle()
    assert job.client.state["ssd_room_bytes"] > job.bytes
    assert job.client.fetch_all(list(job.names)) == {2: len(job.names)}


@in_one_mode
@pytest.mark.parametrize("changes", [
    {"lengths": b"\2\0\0\0"}, {"first": 2}, {"buffer": 1000}, {"chunks": 5000}, {"bytes": 0}
])  # fmt: skip
def test_a_pack_frame_that_is_none(begin: Begin, changes: dict[str, Any]) -> None:
    job = begin(count=1)
    fields = {"epoch": 0, "chunks": 2, "bytes": 1, "buffer": 65536, "first": 0,
              "lengths": b"\1\0\0\0", "inos": b"\5\0\0\0", "last": True}  # fmt: skip
    job.client.send("pack", **{**fields, **changes})
    job.client.wait_closed()
    assert job.client.errors
