"""What may go from SSD for what is published, when a plan's list of pins changes meanwhile."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from fusecache import _native
from fusecache.ahead.prefetcher import Prefetcher
from fusecache.base.metrics import Metrics
from fusecache.read.fetch_threads import FetchThreads
from fusecache.read.fetcher import Fetcher
from fusecache.store.types import Version
from fusecache.table import namespace
from fusecache.table.pins import Pins

VERSION = Version(1, 1, 4, 1)


class Scene:
    """A fetcher whose store notes what may go, and waits for `may_put`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.puts: list[tuple[bool, frozenset[int] | None]] = []
        self.may_put, self.is_putting = threading.Event(), threading.Event()
        self.may_put.set()
        monkeypatch.setattr(namespace, "version", lambda ino: VERSION)
        monkeypatch.setattr(_native, "path", lambda ino: b"f")
        monkeypatch.setattr(
            _native, "segments_of", lambda marks: (np.array([7], np.uint32).tobytes(), b"")
        )
        monkeypatch.setattr(_native, "count", lambda: 9)
        store: Any = SimpleNamespace(missed=lambda *_: None, put_many=self._put)
        packer: Any = SimpleNamespace(
            add=lambda *_: False, keeps_out=lambda *_: False, has_logs=False
        )
        stub: Any = SimpleNamespace(tick_ns=1, threads=1, forget_later=lambda *_: None)
        self.fetcher = Fetcher(stub, store, packer, stub, b"d" * 16, stub, Metrics(), Pins())
        self.prefetcher = Prefetcher(
            fetcher=self.fetcher,
            reader=stub,
            stager=stub,
            origin=stub,
            misses=stub,
            fetch_threads=FetchThreads(stub),
            segments=stub,
            packer=packer,
            preloaded=(),
            evictions=stub,
            kernel=stub,
            metrics=Metrics(),
            mountpoint=b"/nowhere",
            depth_most=1,
            bytes_per_s=None,
        )

    def _put(self, dataset: bytes, items: list[object], **how: Any) -> list[None]:
        self.is_putting.set()
        assert self.may_put.wait(30)
        pinned = how["pinned_by_plan"]
        self.puts.append((how["evict"], None if pinned is None else pinned()))
        return [None] * len(items)

    def miss(self, ino: int) -> None:
        """A reader has missed it, and its bytes are here."""
        flight, _ = self.fetcher.claim(ino)
        assert self.fetcher.finish(ino, flight, VERSION, b"data", 1 << 62, True, missed=True)

    async def pin(self, others: bool) -> None:
        await self.prefetcher.pin(np.array([1], np.uint32), 1, others, True)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


@pytest.mark.parametrize("others", [True, False])
def test_what_was_queued_before_the_list_goes_by_it(scene: Scene, others: bool) -> None:
    async def run() -> None:
        scene.miss(2)
        await scene.pin(others)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.fetcher.publish_forever)
            with trio.fail_after(30):
                while not scene.puts:
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()

    trio.run(run)
    assert scene.puts == [(others, frozenset({7}))]


def test_a_list_is_in_force_when_what_is_being_stored_has_ended(scene: Scene) -> None:
    async def run() -> None:
        scene.may_put.clear()
        scene.miss(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.fetcher.publish_forever)
            await trio.to_thread.run_sync(scene.is_putting.wait, 30)
            nursery.start_soon(scene.pin, True)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert scene.fetcher.pins.number == 0
            scene.may_put.set()
            with trio.fail_after(30):
                while scene.fetcher.pins.number == 0:
                    await trio.sleep(0.001)
            nursery.cancel_scope.cancel()

    trio.run(run)
    assert scene.puts == [(True, None)]


def test_what_a_fetch_thread_has_read_did_not_come_from_ssd(scene: Scene) -> None:
    """A plan that has joined it must not take it for stored."""
    flight, _ = scene.fetcher.claim(2)
    assert scene.fetcher.finish(2, flight, VERSION, b"data", 1 << 62, False)
    assert not flight.was_stored
    assert not flight.stored


def test_one_of_many_threads_gets_the_flight(scene: Scene) -> None:
    def claim(number: int) -> int:
        start.wait(30)
        return sum(scene.fetcher.claim(ino)[1] for ino in range(2, 200))

    start = threading.Barrier(4)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert sum(threads.map(claim, range(4))) == 198
    finally:
        sys.setswitchinterval(interval_s)
