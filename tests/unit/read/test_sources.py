"""Which source of several answers, and what of that is counted and stored."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from fusecache.base.errors import FaultLog, OriginChanged
from fusecache.base.metrics import BYTES_FROM_ORIGIN, ORIGIN_FILES
from fusecache.read import sources as sources_module
from fusecache.read.origin import Tick
from fusecache.read.sources import POOL_WRITES_MOST, Counts, Loaded, Pool, Source, Sources
from fusecache.store.types import Version

VERSION = Version(1, 10, 4, 1)
COUNTS = Counts(ORIGIN_FILES, BYTES_FROM_ORIGIN)


@dataclass
class Fake:
    content: dict[int, bytes]
    counts: Counts | None = None
    asked: list[int] = field(default_factory=list)

    def has(self, ino: int, version: Version, block: int, is_read: bool = False) -> bool:
        return ino in self.content

    def read(
        self, ino: int, version: Version, offset: int, length: int, tick: Tick
    ) -> bytes | None:
        self.asked.append(ino)
        data = self.content.get(ino)
        return None if data is None else data[offset : offset + length]


@dataclass
class Failing(Fake):
    error: Exception = field(default_factory=OriginChanged)

    def read(
        self, ino: int, version: Version, offset: int, length: int, tick: Tick
    ) -> bytes | None:
        raise self.error


@dataclass
class Hanging(Fake):
    may_end: threading.Event = field(default_factory=threading.Event)

    def read(
        self, ino: int, version: Version, offset: int, length: int, tick: Tick
    ) -> bytes | None:
        assert self.may_end.wait(30)
        return super().read(ino, version, offset, length, tick)


def sources_of(near: list[Source], far: list[Source]) -> tuple[Sources, FaultLog]:
    faults = FaultLog()
    return Sources(near, far, faults), faults


async def ask(sources: Sources, ino: int) -> Loaded:
    """As Fetcher does."""
    near = await sources.load_near(ino, VERSION, 2, 4)
    return near or sources.load_far(ino, VERSION, 2, 4, lambda: None)


def load(sources: Sources, ino: int) -> Loaded:
    return trio.run(ask, sources, ino)


def test_the_nearest_answers() -> None:
    near, peer = Fake({1: b"0123456789"}), Fake({1: b"peer......", 2: b"abcdefghij"}, COUNTS)
    origin = Fake(dict.fromkeys((1, 2, 3), b"origin....."), COUNTS)
    sources, faults = sources_of([near], [peer, origin])
    assert load(sources, 1) == (b"2345", None)
    assert load(sources, 2) == (b"cdef", COUNTS)
    assert load(sources, 3) == (b"igin", COUNTS)
    assert (near.asked, peer.asked, origin.asked) == ([1, 2, 3], [2, 3], [3])
    assert [sources.is_near(ino, VERSION, 0) for ino in (1, 2, 3)] == [True, False, False]
    assert faults.counts() == {}


class Awaited:
    """What another mount of the host reads, until it was asked so often."""

    def __init__(self, times: int, arrive: Callable[[], None]) -> None:
        self.times, self._arrive = times, arrive

    def is_awaited(self, ino: int, block: int) -> bool:
        self.times -= 1
        if self.times == 1:
            self._arrive()
        return self.times > 0


def test_what_another_mount_reads_is_waited_for() -> None:
    near, origin = Fake({}), Fake({1: b"abcdefghij"}, COUNTS)
    shared: Any = Awaited(4, lambda: near.content.update({1: b"0123456789"}))
    sources = Sources([near], [origin], FaultLog(), shared=shared)

    assert load(sources, 1) == (b"2345", None)
    assert (near.asked, origin.asked) == ([1] * 4, [])


def test_what_another_mount_does_not_bring_is_read_at_the_origin() -> None:
    near, origin = Fake({}), Fake({1: b"abcdefghij"}, COUNTS)
    shared: Any = Awaited(3, lambda: None)
    assert load(Sources([near], [origin], FaultLog(), shared=shared), 1) == (b"cdef", COUNTS)
    assert near.asked == [1] * 3


def test_who_has_less_than_was_asked_for_has_nothing() -> None:
    sources, _ = sources_of([Fake({1: b"0123"})], [Fake({1: b"abcdefghij"}, COUNTS)])
    assert load(sources, 1) == (b"cdef", COUNTS)


def test_a_cache_that_hangs_is_a_miss_and_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "STORE_TIMEOUT_S", 0.5)  # its thread has begun by then
    near = Hanging({1: b"0123456789"})
    sources, faults = sources_of([near], [Fake({1: b"abcdefghij"}, COUNTS)])

    async def twice() -> list[Loaded]:
        try:
            return [await ask(sources, 1), await ask(sources, 1)]
        finally:
            near.may_end.set()

    assert trio.run(twice) == [(b"cdef", COUNTS)] * 2
    assert faults.counts() == {"slow": 1}


def test_while_all_threads_hang_in_the_cache_no_miss_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It hangs for longer than it is not asked again."""
    monkeypatch.setattr(sources_module, "STORE_TIMEOUT_S", 1.0)  # all threads have begun by then
    monkeypatch.setattr(sources_module, "STORE_OFF_S", 0.1)
    near = Hanging({1: b"0123456789"})
    sources, _ = sources_of([near], [Fake({1: b"abcdefghij"}, COUNTS)])

    async def hang() -> None:
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(sources_module.STORE_THREADS):
                    nursery.start_soon(ask, sources, 1)
            await trio.sleep(0.15)
            begun_s = trio.current_time()
            for _ in range(3):
                assert await ask(sources, 1) == (b"cdef", COUNTS)
            assert trio.current_time() - begun_s < sources_module.STORE_TIMEOUT_S
        finally:
            near.may_end.set()
        while (await ask(sources, 1)).counts is not None:
            await trio.sleep(0.01)

    trio.run(hang)


def test_a_cache_that_cannot_be_read_is_a_miss() -> None:
    near = Failing({}, error=OSError(errno.EMFILE, "too many files"))
    sources, faults = sources_of([near], [Fake({1: b"abcdefghij"}, COUNTS)])
    assert load(sources, 1) == (b"cdef", COUNTS)
    assert faults.counts() == {"io": 1}


def test_a_change_that_a_source_sees_is_raised() -> None:
    sources, _ = sources_of([], [Failing({})])
    with pytest.raises(OriginChanged):
        load(sources, 1)


def test_of_blocks_that_wait_for_the_pool_there_are_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that hangs: each of them is 4 MiB. The others' leases are given back."""
    may_end, wanted = threading.Event(), POOL_WRITES_MOST * 3
    finished: list[bool] = []
    ends = threading.Semaphore(0)

    def finish(ticket: bytes, data: memoryview | None) -> None:
        assert may_end.wait(30)
        finished.append(data is not None)
        ends.release()

    monkeypatch.setattr("fusecache._native.pool_finish", finish)
    pool = Pool()
    for _ in range(2):
        may_end.clear()
        for _ in range(wanted):
            pool.finish(b"ticket", memoryview(b"block"))
        pool.finish(b"ticket", None)
        may_end.set()
        for _ in range(wanted + 1):
            assert ends.acquire(timeout=30)
    assert len(finished) == 2 * (wanted + 1)
    assert finished.count(True) == 2 * POOL_WRITES_MOST
