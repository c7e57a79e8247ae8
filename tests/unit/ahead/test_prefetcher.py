"""The prefetcher's queues. All else of it is seen on real mounts: mount/test_plan.py."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from fusecache import _native
from fusecache.ahead.prefetcher import Prefetcher
from fusecache.ahead.queues import LEFT_FILES, ArrayQueue
from fusecache.ahead.staging import READ_LATELY_S
from fusecache.base.metrics import Metrics
from fusecache.base.wire import Result, Wish
from fusecache.read.fetch_threads import FetchThreads
from fusecache.read.fetcher import Fetcher
from fusecache.read.misses import Misses
from fusecache.read.origin import Origin
from fusecache.read.sources import SsdSource
from fusecache.read.stager import Stager
from fusecache.store.types import Version
from fusecache.table import namespace
from fusecache.table.pins import Pins

PARTS = st.lists(st.lists(st.tuples(st.integers(1, 2**32 - 1), st.integers(0, 1)), max_size=20))


def put(queue: ArrayQueue, pairs: list[tuple[int, int]]) -> None:
    queue.put(
        np.array([ino for ino, _ in pairs], np.uint32), np.array([f for _, f in pairs], np.uint8)
    )


def take(queue: ArrayQueue, most: int) -> list[tuple[int, int]]:
    inos, flags = queue.take(most)
    return list(zip(inos.tolist(), flags.tolist(), strict=True))


@given(PARTS, st.integers(1, 30))
def test_first_in_first_out(parts: list[list[tuple[int, int]]], most: int) -> None:
    queue = ArrayQueue()
    for part in parts:
        put(queue, part)
    expected = [pair for part in parts for pair in part]
    assert queue.count == len(expected)
    found = []
    while queue.count:
        expected_now = min(most, queue.count)
        taken = take(queue, most)
        assert len(taken) == expected_now  # from as many parts as it takes
        found += taken
    assert found == expected
    assert take(queue, most) == []


def test_what_is_put_first_comes_first() -> None:
    queue = ArrayQueue()
    put(queue, [(1, 0), (2, 1), (3, 0)])
    assert take(queue, 1) == [(1, 0)]
    queue.put_first(np.array([9], np.uint32), np.array([1], np.uint8))
    assert queue.count == 3
    assert take(queue, 2) + take(queue, 9) == [(9, 1), (2, 1), (3, 0)]


def test_cancelled_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    live = {2, 5}

    def plan_flags(inos: bytes) -> bytes:
        array = np.frombuffer(inos, np.uint32).tolist()
        return bytes(_native.PLAN_QUEUED if ino in live else 0 for ino in array)

    monkeypatch.setattr(_native, "plan_flags", plan_flags)
    queue = ArrayQueue()
    put(queue, [(1, 0), (2, 1)])
    put(queue, [(3, 0), (4, 0)])
    put(queue, [(5, 0)])
    queue.forget_cancelled()
    assert queue.count == 2
    assert take(queue, 9) == [(2, 1), (5, 0)]


class Flags:
    """PLAN_* of each inode, as C keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: Counter[int] = Counter()
        monkeypatch.setattr(_native, "plan_mark", self._mark)
        monkeypatch.setattr(_native, "plan_flags", self._flags)

    def _flags(self, inos: bytes) -> bytes:
        return bytes(self.of[ino] for ino in u32(inos))

    def _mark(self, inos: bytes, add: int, remove: int) -> None:
        for ino in u32(inos):
            self.of[ino] = self.of[ino] & ~remove | add


def u32(inos: bytes) -> list[int]:
    found: list[int] = np.frombuffer(inos, np.uint32).tolist()
    return found


def bare_prefetcher() -> Prefetcher:
    stub: Any = None
    return Prefetcher(
        fetcher=cast(Fetcher, SimpleNamespace(pins=Pins())),
        reader=stub,
        stager=cast(Stager, SimpleNamespace(forget_all=lambda: None)),
        origin=cast(Origin, SimpleNamespace(threads=1)),
        misses=stub,
        fetch_threads=FetchThreads(stub),
        segments=cast(SsdSource, SimpleNamespace(has_shared=False)),
        packer=stub,
        preloaded=(),
        evictions=stub,
        kernel=stub,
        metrics=Metrics(),
        mountpoint=b"/nowhere",
        depth_most=1,
        bytes_per_s=None,
    )


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_is_to_be_staged_meanwhile_is_not_answered_as_fetched(
    monkeypatch: pytest.MonkeyPatch, is_stored: bool
) -> None:
    """While a thread looks for files that are to be fetched, one of them is to be staged."""
    flags, prefetcher, reported = Flags(monkeypatch), bare_prefetcher(), list[tuple[int, int]]()
    monkeypatch.setattr(_native, "plan_begin", lambda: None)
    monkeypatch.setattr(_native, "plan_end", lambda: None)
    monkeypatch.setattr(prefetcher._fetching, "feed", lambda: None)
    monkeypatch.setattr(namespace, "version", lambda ino: Version(1, 1, 1, 1))

    def look(inos: list[int]) -> list[bool]:
        trio.from_thread.run_sync(prefetcher.stage, np.array([2], np.uint32), np.ones(1, np.uint8))
        return [is_stored] * len(inos)

    monkeypatch.setattr(prefetcher._stored, "are_stored", look)
    prefetcher.begin(lambda inos, results: reported.extend(zip(u32(inos), results, strict=True)))

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(prefetcher._sorting.run_forever)
            prefetcher.fetch(np.array([1, 2, 3], np.uint32))
            with trio.fail_after(30):
                while (
                    not flags.of[2] & _native.PLAN_WANTED
                    or prefetcher._sorting._threads.borrowed_tokens
                ):
                    await trio.sleep(0.001)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()

    trio.run(run)
    assert reported == ([(1, Result.STORED), (3, Result.STORED)] if is_stored else [])
    assert prefetcher.queued_fetch == (0 if is_stored else 2)
    assert flags.of[2] & _native.PLAN_QUEUED
    inos, _ = prefetcher._staging._next()
    assert inos.tolist() == [2]


class Feeding:
    """A prefetcher whose fetches are noted, and begin at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flags, self.prefetcher = Flags(monkeypatch), bare_prefetcher()
        self.fetched: list[tuple[int, bool]] = []
        self.reported: list[tuple[int, int]] = []
        self.located: set[int] = set()
        fetching = self.prefetcher._fetching
        monkeypatch.setattr(_native, "plan_begin", lambda: None)
        monkeypatch.setattr(_native, "plan_end", lambda: None)
        monkeypatch.setattr(_native, "get_location", lambda ino, block: (7, 4096, 512))
        monkeypatch.setattr(_native, "segment_known", lambda segno: bool(self.located))
        monkeypatch.setattr(trio, "current_time", lambda: 0.0)
        monkeypatch.setattr(self.prefetcher._stored, "_packer", SimpleNamespace(has_logs=False))
        monkeypatch.setattr(fetching, "_may_begin", lambda: True)
        monkeypatch.setattr(fetching, "_fetch", self._fetch)
        self.prefetcher.begin(self._report)

    def _fetch(self, ino: int, store: bool) -> None:
        self.fetched.append((ino, store))

    def _report(self, inos: bytes, results: bytes) -> None:
        self.reported += zip(u32(inos), results, strict=True)

    def sorted_out(self, ino: int) -> None:
        """It was to be fetched, and is not on SSD."""
        self.prefetcher.fetch(np.array([ino], np.uint32))
        self.prefetcher._to_fetch.clear()
        self.prefetcher._fetching.line.fetch(ino)

    def stage(self, ino: int, store: int) -> None:
        self.prefetcher.stage(np.array([ino], np.uint32), np.array([store], np.uint8))

    def staged(self, result: int) -> None:
        inos, store = self.prefetcher._staging._next()
        self.prefetcher._staging._staged(inos, np.full(len(inos), result, np.uint8), store, 0)


@pytest.fixture
def feeding(monkeypatch: pytest.MonkeyPatch) -> Feeding:
    return Feeding(monkeypatch)


def test_what_was_evicted_is_fetched(feeding: Feeding) -> None:
    """Its location leads to a segment that is gone."""
    feeding.sorted_out(1)
    feeding.prefetcher._fetching.feed()
    assert (feeding.fetched, feeding.reported) == ([(1, True)], [])


def test_what_came_to_ssd_meanwhile_is_not_fetched(feeding: Feeding) -> None:
    feeding.sorted_out(1)
    feeding.located.add(1)
    feeding.prefetcher._fetching.feed()
    assert (feeding.fetched, feeding.reported) == ([], [(1, Result.STORED)])


def test_what_came_and_is_to_be_staged_is_answered_by_its_stage(feeding: Feeding) -> None:
    feeding.sorted_out(1)
    feeding.stage(1, Wish.STORE)
    feeding.located.add(1)
    feeding.prefetcher._fetching.feed()
    assert (feeding.fetched, feeding.reported) == ([], [])
    feeding.staged(_native.PUSHED)
    assert feeding.reported == [(1, Result.STAGED_AND_STORED)]
    assert feeding.prefetcher.queued_stage == 0


@pytest.mark.parametrize("is_located", [True, False])
def test_what_is_being_staged_is_not_fetched(feeding: Feeding, is_located: bool) -> None:
    feeding.sorted_out(1)
    feeding.stage(1, 0)
    inos, store = feeding.prefetcher._staging._next()
    with feeding.prefetcher._pages._pushing([1]):
        feeding.located.update([1] if is_located else [])
        feeding.prefetcher._fetching.feed()
        assert (feeding.fetched, feeding.reported) == ([], [])
    feeding.prefetcher._staging._staged(inos, np.full(1, _native.PUSHED, np.uint8), store, 0)
    assert (feeding.fetched, feeding.reported) == ([], [(1, Result.STAGED_AND_STORED)])


@pytest.mark.parametrize("store", [0, Wish.STORE])
def test_what_came_and_cannot_be_read_is_fetched_and_stored_as_was_asked(
    feeding: Feeding, store: int
) -> None:
    feeding.located.add(1)
    feeding.stage(1, store)
    feeding.staged(_native.PUSH_NO_BYTES)
    assert feeding.fetched == []
    feeding.staged(_native.PUSH_NO_BYTES)
    assert (feeding.fetched, feeding.reported) == ([(1, bool(store))], [])


def test_a_fetch_has_what_is_staged_stored(feeding: Feeding) -> None:
    feeding.sorted_out(1)
    feeding.stage(1, 0)
    feeding.staged(_native.PUSH_NO_BYTES)
    assert feeding.fetched == [(1, True)]


def test_files_left_to_readers_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "plan_mark", lambda inos, add, remove: None)
    queued = bytes([_native.PLAN_QUEUED])
    monkeypatch.setattr(_native, "plan_flags", lambda inos: queued * (len(inos) // 4))
    prefetcher = bare_prefetcher()
    count = 3 * LEFT_FILES
    for start in range(1, count + 1, 100):  # in several parts
        inos = np.arange(start, min(start + 100, count + 1), dtype=np.uint32)
        prefetcher.stage(inos, np.ones(len(inos), np.uint8))

    def next_ones() -> list[int]:
        inos, store = prefetcher._staging._next()
        assert store.all()
        found: list[int] = inos.tolist()
        return found

    first = next_ones()
    assert first == list(range(1, len(first) + 1))
    prefetcher._to_stage.leave_to_readers(0)
    prefetcher._to_stage.leave_to_readers(0)  # once at a time
    assert prefetcher.queued_stage == count - len(first)
    beyond = next_ones()
    assert beyond[0] == len(first) + LEFT_FILES + 1
    prefetcher._to_stage.take_left()
    rest: list[int] = []
    while prefetcher.queued_stage:
        rest += next_ones()
    assert rest[:LEFT_FILES] == list(range(len(first) + 1, len(first) + LEFT_FILES + 1))
    assert sorted(first + beyond + rest) == list(range(1, count + 1))


def test_reads_are_remembered_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long nothing is to be fetched."""
    now = 0.0
    monkeypatch.setattr(trio, "current_time", lambda: now)
    prefetcher = bare_prefetcher()
    for _ in range(1000):
        now += READ_LATELY_S / 10
        prefetcher.saw_reads(np.array([1, 2], np.uint32))
        prefetcher.saw_reads(np.empty(0, np.uint32))
    assert len(prefetcher._staging.read_lately._parts) <= 12
    asked = np.array([3, 2, 1], np.uint32)
    assert prefetcher._staging.read_lately.has(asked).tolist() == [False, True, True]
    now += 2 * READ_LATELY_S
    assert prefetcher._staging.read_lately.has(asked).tolist() == [False, False, False]


@pytest.mark.parametrize("is_crowded", [True, False])
def test_nothing_is_begun_while_reads_wait_for_a_place(is_crowded: bool) -> None:
    prefetcher = bare_prefetcher()
    ready = {"has_room": lambda: True, "is_origin_ready": lambda: True}
    prefetcher._fetching._fetcher = cast(Fetcher, SimpleNamespace(**ready))
    prefetcher._fetching._misses = cast(Misses, SimpleNamespace(is_crowded=is_crowded))

    async def ask() -> bool:
        return prefetcher._fetching._may_begin()

    assert trio.run(ask) is not is_crowded
