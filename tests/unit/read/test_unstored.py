"""Blocks of large files that SSD has no room for: in memory for a moment, pushed once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from fusecache.base.metrics import BYTES_FROM_ORIGIN, ORIGIN_FILES, Metrics
from fusecache.read.fetcher import UNSTORED_MOST, UNSTORED_S, Fetcher, Flight
from fusecache.read.reader import Reader
from fusecache.read.sources import Counts
from fusecache.read.stager import Stager
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace
from fusecache.table.pins import Pins

INO, VERSION = 7, Version(7, 20 * BLOCK_BYTES, 1, 1)


class Scene:
    """Of an origin that gives each block; none finds room on SSD."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.version = VERSION
        self.read: list[int] = []
        self.queued: list[int] = []  # for the publisher
        monkeypatch.setattr(namespace, "version", lambda ino: self.version)
        stub: Any = SimpleNamespace(tick_ns=1, missed=lambda *_: None, is_lent=lambda counts: False)
        self.fetcher = Fetcher(stub, stub, stub, stub, b"d" * 16, stub, Metrics(), Pins())
        vars(self.fetcher)["_read"] = self._read
        vars(self.fetcher)["_publisher"] = SimpleNamespace(
            may_evict_for_readers=False, wait_for_room=self._has_room, put=self._put
        )

    async def _has_room(self) -> bool:
        return True

    def _put(self, publication: Any) -> None:
        self.queued.append(publication.block)
        publication.on_done(False)

    async def _read(self, flight: Flight, ino: int, block: int, shared: bool) -> None:
        self.read.append(block)
        flight.version, flight.data = self.version, memoryview(bytes(BLOCK_BYTES))
        flight.counts = Counts(ORIGIN_FILES, BYTES_FROM_ORIGIN)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_it_is_joined_for_a_moment(scene: Scene) -> None:
    async def work() -> None:
        first = await scene.fetcher.block(INO, 3, store=False)
        assert scene.fetcher.has(INO, 3)
        assert await scene.fetcher.block(INO, 3) is first
        await trio.sleep(UNSTORED_S + 0.1)
        assert not scene.fetcher.has(INO, 3)
        assert await scene.fetcher.block(INO, 3) is not first

    trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))
    assert scene.read == [3, 3]
    assert scene.queued == [3], "what a plan does not want stored is not, what a reader missed is"


@pytest.mark.parametrize(
    ("flight", "answer"),
    [
        (Flight(was_stored=True), True),
        (Flight(stored=True), False),
        (Flight(), None),
    ],
    ids=["a near source had it", "stored", "no room"],
)
def test_what_warm_is_told(flight: Flight, answer: bool | None) -> None:
    async def is_cached(ino: int, block: int) -> bool:
        return False

    async def block(ino: int, block: int, **_: Any) -> Flight:
        flight.landed.set()
        return flight

    reader: Any = SimpleNamespace(is_cached=is_cached, _fetcher=SimpleNamespace(block=block))
    assert trio.run(Reader.ensure_cached, reader, INO, 0) is answer


def test_another_version_is_not_joined(scene: Scene) -> None:
    async def work() -> None:
        await scene.fetcher.block(INO, 3)
        scene.version = VERSION._replace(mtime_ns=2)
        assert not scene.fetcher.has(INO, 3)
        assert (await scene.fetcher.block(INO, 3)).version == scene.version

    trio.run(work)
    assert scene.read == [3, 3]


def test_what_is_to_be_stored_is_fetched_for_that(scene: Scene) -> None:
    async def work() -> None:
        await scene.fetcher.block(INO, 3)
        await scene.fetcher.block(INO, 3, asked=True)

    trio.run(work)
    assert scene.queued == [3, 3]


def test_few_are_held_and_none_after_a_while(scene: Scene) -> None:
    async def work() -> None:
        for block in range(UNSTORED_MOST + 4):
            await scene.fetcher.block(INO, block)
        held = [block for block in range(20) if scene.fetcher.has(INO, block)]
        assert held == list(range(4, UNSTORED_MOST + 4))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.fetcher._flights.forget_forever)
            await trio.sleep(2 * UNSTORED_S + 0.1)
            nursery.cancel_scope.cancel()
        assert not scene.fetcher._flights._unstored

    trio.run(work, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_flight_that_has_landed_holds_no_callback() -> None:
    """It may hold the flight: bytes would stay until Python looks for cycles."""
    flight, landed = Flight(), []
    flight.when_landed(lambda: landed.append(flight))
    flight.land(0.0)
    assert landed == [flight]
    assert flight.on_landed is None


def test_one_pushes_what_is_not_stored() -> None:
    flight = Flight()
    assert flight.claim_push()
    assert not flight.claim_push()
    stored = Flight()
    stored.stored = True
    assert not stored.claim_push()


def stager() -> Stager:
    stub: Any = None
    return Stager(stub, 1 << 30, Metrics())


def test_what_was_brought_is_of_one_version_and_forgotten_with_its_pages() -> None:
    known = stager()
    known.note_brought(INO, VERSION, 2)
    assert known.has_brought(INO, VERSION, 2)
    assert not known.has_brought(INO, VERSION, 1)
    other = VERSION._replace(mtime_ns=2)
    assert not known.has_brought(INO, other, 2)
    known.note_brought(INO, other, 3)
    assert [known.has_brought(INO, other, block) for block in (2, 3)] == [False, True]
    known._note_dropped([(INO, 3 * BLOCK_BYTES, 4096)])
    assert not known.has_brought(INO, other, 3)
    known.note_brought(INO, VERSION, 2)
    known.forget([INO])
    assert not known.has_brought(INO, VERSION, 2)
    known.note_brought(INO, VERSION, 2)
    known.forget_all()
    assert not known.has_brought(INO, VERSION, 2)


def test_a_stream_has_brought_what_lies_between_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "version", lambda ino: VERSION)
    known = stager()

    async def nothing(ino: int, block: int, source: Any) -> None:
        pass

    vars(known)["_push_block"] = nothing
    source: Any = None
    trio.run(known.stream, INO, 2, source)
    brought = [block for block in range(20) if known.has_brought(INO, VERSION, block)]
    assert brought == [2, 3, 4, 5]
    assert known.is_next(INO, 6)
    trio.run(known.stream, INO, 3, source)
    known._note_dropped([(INO, 3 * BLOCK_BYTES, 4096)])
    brought = [block for block in range(20) if known.has_brought(INO, VERSION, block)]
    assert brought == [4, 5, 6]
