"""Which records `verify` finds bad in logs (on real mounts: mount/test_log.py), what `warm` takes
for the room of a file, and that it gives way.
"""

from __future__ import annotations

import gc
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache import _native
from fusecache.server.maintenance import _check_records, _stored_bytes
from fusecache.server.selecting import Asked, Failures, select
from fusecache.store.types import BLOCK_BYTES, Location, RecordFault
from tests.support.store_support import DATASET, MIB, content, opened, version_of

SIZE = 1000
BEFORE, LOG, NEXT_LOG = 4, 5, 6


class Cache:
    """The inode table, and a store in which every record is bad."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places: dict[int, tuple[int, int, int]] = {}
        self.dead: set[int] = set()
        self.logs = {LOG}
        self.moves: dict[int, tuple[int, int, int]] = {}  # made while records are read
        self.checked: list[Location] = []
        for name, function in {
            "count": lambda: 40_000,
            "get_location": lambda ino, block: self.places.get(ino),
            "clear_location": self.clear_location,
            "is_dead": lambda ino: ino in self.dead,
            "version": lambda ino: (ino, SIZE, 0, 0),
        }.items():
            monkeypatch.setattr(_native, name, function)

    def clear_location(self, ino: int, block: int, only_if: tuple[int, int, int]) -> None:
        assert self.places.pop(ino) == only_if

    def log_segments(self) -> set[int]:
        return set(self.logs)

    def verify(self, dataset: None) -> Iterator[tuple[Location, RecordFault | None]]:
        yield Location(BEFORE, 4096, 128, SIZE), None

    def check(self, locations: Iterable[Location]) -> Iterator[tuple[Location, RecordFault]]:
        for at in locations:
            self.checked.append(at)
            self.places.update(self.moves)
            yield at, "read"

    def bad(self) -> list[Location]:
        store: Any = self
        return [at for at, fault in _check_records(store) if fault]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(monkeypatch)


def test_a_bad_record_of_a_log_is_forgotten(cache: Cache) -> None:
    cache.places = {2: (LOG, 8192, 128), 3: (BEFORE, 4096, 128), 39_000: (LOG, 4096, 128)}
    places = [Location(LOG, 8192, 128, SIZE), Location(LOG, 4096, 128, SIZE)]
    assert cache.bad() == places
    assert set(cache.places) == {3}


def test_a_file_that_was_moved_meanwhile_is_not_bad(cache: Cache) -> None:
    cache.places = {2: (LOG, 4096, 128)}
    cache.moves = {2: (NEXT_LOG, 4096, 128)}
    assert cache.bad() == []
    assert len(cache.checked) == 1
    assert cache.places == cache.moves


def test_a_file_without_a_name_may_have_lost_its_segment(cache: Cache) -> None:
    cache.places, cache.dead = {2: (LOG, 4096, 128)}, {2}
    assert cache.bad() == []


def test_a_log_that_begins_meanwhile_is_checked(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(dataset: None) -> Iterator[tuple[Location, RecordFault | None]]:
        cache.logs = {NEXT_LOG}
        return iter(())

    monkeypatch.setattr(cache, "verify", verify)
    cache.places = {2: (LOG, 4096, 128), 3: (NEXT_LOG, 4096, 128)}
    assert [at.segno for at in cache.bad()] == [LOG, NEXT_LOG]


@pytest.mark.parametrize(
    "path",
    [
        b"a",
        "ü/語".encode() * 500,
        b"n" * 255,
        b"/".join([b"\xff" * 255] * 16)[:4095],
        b"p" * 60_000,
    ],
    ids=["short", "not ASCII", "a long name", "PATH_MAX", "beyond it"],
)
@pytest.mark.parametrize("size", [1, 3500, 3900, 70_000, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_warm_counts_what_a_file_takes(tmp_path: Path, path: bytes, size: int) -> None:
    payload = content(size, size)
    with opened(tmp_path / "cache", limit_bytes=256 * MIB) as store:
        found = [
            store.store.put(DATASET, path, version_of(payload), number, payload[at:][:BLOCK_BYTES])
            for number, at in enumerate(range(0, size, BLOCK_BYTES))
        ]
        after = store.put(b"after", b"after")
        assert found[0] is not None
        assert after is not None
        assert after.segno == found[0].segno
        assert after.offset - found[0].offset == _stored_bytes(size, path)


class Directory:
    """One directory of `names` files, as the inode table and Operations tell it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: int) -> None:
        self.names = names
        for name, function in {
            "children": self.children,
            "attributes": lambda ino: (stat.S_IFDIR if ino == 1 else stat.S_IFREG,),
            "path": lambda ino: b"",
            "version": lambda ino: (ino, SIZE, 0, 0),
        }.items():
            monkeypatch.setattr(_native, name, function)

    def children(self, ino: int, after: int, most: int) -> list[tuple[bytes, int, int]]:
        first = max(after, 1) + 1
        return [(b"%d" % n, n, n) for n in range(first, min(first + most, self.names + 2))]

    async def list_checked(self, directory: int) -> None:
        await trio.lowlevel.checkpoint()


class LongestStep(trio.abc.Instrument):
    """CPU time of the longest run of this thread that nobody else had a turn in. None of it is a
    collection of all that other tests have left."""

    def __init__(self) -> None:
        self.seconds = self._begun = 0.0
        self.count = 0  # of such runs

    def before_run(self) -> None:
        gc.collect()
        gc.disable()

    def after_run(self) -> None:
        gc.enable()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._begun = time.thread_time()
        self.count += 1

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.seconds = max(self.seconds, time.thread_time() - self._begun)


async def select_files(operations: Any, glob: str) -> Any:
    asked = Asked([glob], b"")
    return (await select(asked, operations.list_checked, lambda ino, path: None, Failures()))[0]


@pytest.mark.parametrize("glob", ["*", "nothing*"])
def test_warm_gives_way_while_it_looks_at_the_names_of_a_directory(
    monkeypatch: pytest.MonkeyPatch, glob: str
) -> None:
    operations: Any = Directory(monkeypatch, 200_000)
    step = LongestStep()

    async def select_all() -> int:
        return len(await select_files(operations, glob))

    assert trio.run(select_all, instruments=[step]) == (200_000 if glob == "*" else 0)
    assert step.seconds < 0.05  # all at once they take ten times as long


def test_other_threads_get_the_interpreter_while_warm_looks_at_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read needs some fifty turns of worker threads: where each waited for a forced switch, as
    behind sleep(0), it took 0.25 s."""
    operations: Any = Directory(monkeypatch, 200_000)
    turns, is_over = 0, threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_over.is_set():
            time.sleep(0)  # gives the lock away, and takes it again
            turns += 1

    def turns_in_a_step() -> float:
        begun, step = turns, LongestStep()
        trio.run(select_files, operations, "*", instruments=[step])
        return (turns - begun) / step.count

    thread = threading.Thread(target=take_turns)
    thread.start()
    try:  # one to five behind sleep(0)
        assert any(turns_in_a_step() > 8 for _ in range(5))
    finally:
        is_over.set()
        thread.join()
