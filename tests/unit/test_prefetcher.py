"""The prefetcher's queues. All else of it is seen on real mounts: mount/test_plan.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache import _native
from fusecache.fetcher import Fetcher
from fusecache.pins import Pins
from fusecache.prefetcher import LEFT_FILES, ArrayQueue, Prefetcher

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


def test_files_left_to_readers_come_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "plan_mark", lambda inos, add, remove: None)
    queued = bytes([_native.PLAN_QUEUED])
    monkeypatch.setattr(_native, "plan_flags", lambda inos: queued * (len(inos) // 4))
    stub: Any = None
    prefetcher = Prefetcher(
        fetcher=cast(Fetcher, SimpleNamespace(pins=Pins())),
        reader=stub,
        origin=stub,
        packer=stub,
        kernel=stub,
        stats=stub,
        mountpoint=b"/nowhere",
        depth_most=1,
        bytes_per_s=None,
    )
    count = 3 * LEFT_FILES
    for start in range(1, count + 1, 100):  # in several parts
        inos = np.arange(start, min(start + 100, count + 1), dtype=np.uint32)
        prefetcher.stage(inos, np.ones(len(inos), np.uint8))

    def next_ones() -> list[int]:
        inos, store = prefetcher._next_to_stage()
        assert store.all()
        found: list[int] = inos.tolist()
        return found

    first = next_ones()
    assert first == list(range(1, len(first) + 1))
    prefetcher._leave_to_readers(0)
    prefetcher._leave_to_readers(0)  # once at a time
    assert prefetcher.queued_stage == count - len(first)
    beyond = next_ones()
    assert beyond[0] == len(first) + LEFT_FILES + 1
    prefetcher._take_back()
    rest: list[int] = []
    while prefetcher.queued_stage:
        rest += next_ones()
    assert rest[:LEFT_FILES] == list(range(len(first) + 1, len(first) + LEFT_FILES + 1))
    assert sorted(first + beyond + rest) == list(range(1, count + 1))
