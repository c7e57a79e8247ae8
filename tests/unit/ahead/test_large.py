"""Files of several blocks: which are fetched, stored and pushed, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from fusecache.ahead import large
from fusecache.ahead.large import LargeFiles
from fusecache.ahead.marks import Answers
from fusecache.base.errors import OriginChanged, OriginError, OriginTimeout
from fusecache.base.metrics import PREFETCHED_BYTES, PREFETCHED_FILES, Metrics
from fusecache.base.wire import Result, Standing
from fusecache.read.fetcher import Flight
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace

INO = 7
VERSION = Version(INO, 2 * BLOCK_BYTES + 1000, 1, 1)


class Scene:
    """One large file, of which nothing is on SSD; the origin is ready once it was asked often
    enough.
    """

    def __init__(
        self,
        ready_after: int = 0,
        ends_after: int = 0,
        *,
        is_stored: bool = True,
        was_stored: bool = False,
        come_to: int = -1,
    ) -> None:
        """`ends_after`: when it was asked so often, the plan ends. `is_stored`: what is to be; or
        it was before (`was_stored`). `come_to`: the last block that a reader has come to.
        """
        self.answers = Answers()
        self.told: list[int] = []
        self.answers.begin(lambda inos, results: self.told.extend(results))
        self.metrics = Metrics()
        self.asked = 0
        self.fetched: list[tuple[int, bool]] = []  # block, and whether it is to be stored
        self.pushed: list[int] = []
        self.most_at_once = 0
        self.error: OriginError | None = None  # of block 1
        self.version = VERSION  # of what is fetched
        self.is_settled = True
        self.on_fetch: Callable[[], None] = lambda: None
        self._ready_after, self._ends_after = ready_after, ends_after
        self._is_stored, self._was_stored, self._come_to = is_stored, was_stored, come_to
        self._at_once = 0
        self.files = LargeFiles(
            fetcher=_any(is_origin_ready=self._is_ready, block=self._block),
            reader=_any(is_cached=self._is_cached),
            stager=_any(has_brought=self._has_brought),
            packer=_any(has_spare=lambda size_bytes: True),
            fetches=_any(may_take=lambda: True, take=lambda size_bytes: None),
            pages=_any(push_block=self._push),
            answers=self.answers,
            metrics=self.metrics,
        )

    @property
    def bytes(self) -> int:
        return self.metrics.read()[PREFETCHED_BYTES]

    def do(self, *, store: bool, files: int = 1) -> list[int]:
        """What is told of them."""

        async def work() -> None:
            for number in range(files):
                self.files.put(INO + number, store)
            with trio.move_on_after(5) as waiting:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.files.run_forever)
                    await trio.testing.wait_all_tasks_blocked(0.05)
                    while len(self.told) < files and self.answers.report is not None:
                        await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()
            assert not waiting.cancelled_caught

        trio.run(work)
        return self.told

    def _is_ready(self) -> bool:
        self.asked += 1
        if self.asked == self._ends_after:
            self.answers.end()
            self.files.clear()
        return self.asked > self._ready_after

    async def _is_cached(self, ino: int, block: int) -> bool:
        return False

    def _has_brought(self, ino: int, version: Version, block: int) -> bool:
        return block <= self._come_to

    async def _block(self, ino: int, block: int, *, asked: bool, store: bool) -> Flight:
        assert asked == store
        self.fetched.append((block, store))
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await trio.sleep(0.02)
        self._at_once -= 1
        self.on_fetch()
        if self.error is not None and block == 1:
            raise self.error
        length = namespace.block_span(VERSION.size, block)[1]
        flight = Flight(version=self.version, data=memoryview(bytes(length)))
        flight.was_stored, flight.is_settled = self._was_stored, self.is_settled
        flight.stored = store and self._is_stored
        flight.landed.set()
        return flight

    async def _push(self, ino: int, version: Version, block: int, data: Any) -> bool:
        assert len(data) == namespace.block_span(VERSION.size, block)[1]
        self.pushed.append(block)
        return True


def _any(**parts: Any) -> Any:
    return SimpleNamespace(**parts)


@pytest.fixture(autouse=True)
def marks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """There is one large file; how it stands."""
    standing = {"now": Standing.WANTED | Standing.QUEUED}

    def mark(ino: int, add: int, remove: int) -> None:
        standing["now"] = (standing["now"] & ~(remove & ~Standing.QUEUED)) | add

    monkeypatch.setattr(namespace, "version", lambda ino: VERSION)
    monkeypatch.setattr(large, "flags", lambda ino: standing["now"])
    monkeypatch.setattr(large, "mark", mark)
    return standing


@pytest.mark.parametrize(
    ("store", "is_staged", "result"),
    [
        (True, False, Result.STORED),
        (False, True, Result.STAGED),
        (True, True, Result.STAGED_AND_STORED),
    ],
)
def test_all_blocks_are_fetched_counted_and_pushed(
    marks: dict[str, int], store: bool, is_staged: bool, result: int
) -> None:
    marks["now"] = Standing.QUEUED | (Standing.WANTED if is_staged else 0)
    scene = Scene()
    assert scene.do(store=store) == [result]
    assert sorted(scene.fetched) == [(0, store), (1, store), (2, store)]
    assert sorted(scene.pushed) == ([0, 1, 2] if is_staged else [])
    assert scene.bytes == VERSION.size
    assert scene.metrics.read()[PREFETCHED_FILES] == 1


def test_what_is_on_ssd_meanwhile_does_not_count() -> None:
    scene = Scene(was_stored=True)
    assert scene.do(store=True) == [Result.STAGED_AND_STORED]
    assert scene.bytes == 0


def test_without_room_on_ssd_it_is_staged_all_the_same(marks: dict[str, int]) -> None:
    assert Scene(is_stored=False).do(store=True) == [Result.NO_ROOM]
    marks["now"] = Standing.QUEUED
    assert Scene(is_stored=False).do(store=True) == [Result.NO_ROOM]


def test_what_a_reader_has_come_to_is_neither_fetched_nor_pushed() -> None:
    scene = Scene(come_to=0)
    assert scene.do(store=False) == [Result.STAGED]
    assert sorted(scene.fetched) == [(1, False), (2, False)]
    assert sorted(scene.pushed) == [1, 2]


def test_what_a_reader_has_come_to_is_stored_if_it_is_to_be() -> None:
    scene = Scene(come_to=2)
    assert scene.do(store=True) == [Result.STAGED_AND_STORED]
    assert sorted(scene.fetched) == [(0, True), (1, True), (2, True)]
    assert scene.pushed == []


def test_blocks_of_several_files_are_fetched_together_and_not_too_many() -> None:
    scene = Scene()
    assert scene.do(store=False, files=5) == [Result.STAGED] * 5
    assert [block for block, _ in scene.fetched] == [0, 1, 2] * 5
    assert scene.most_at_once == large.BLOCKS_AT_ONCE


@pytest.mark.parametrize(
    ("error", "result"),
    [(OriginTimeout(1.0), Result.ORIGIN_ERROR), (OriginChanged(), Result.GONE)],
)
def test_a_block_that_fails_ends_the_file(
    marks: dict[str, int], error: OriginError, result: int
) -> None:
    scene = Scene()
    scene.error = error
    assert scene.do(store=False) == [result]
    assert bool(marks["now"] & Standing.FAILED) == (result == Result.ORIGIN_ERROR)
    assert not marks["now"] & (Standing.FLYING | Standing.STAGED)


def test_another_version_is_gone_and_one_that_is_too_young_is_tried_again() -> None:
    scene = Scene()
    scene.version = VERSION._replace(mtime_ns=2)
    assert scene.do(store=False) == [Result.GONE]
    assert scene.pushed == []
    scene = Scene()
    scene.is_settled = False
    assert scene.do(store=False) == [Result.NOT_PUSHED]
    assert scene.pushed == []


def test_a_file_that_is_wanted_no_more_is_not_pushed(marks: dict[str, int]) -> None:
    scene = Scene()

    def cancel() -> None:
        marks["now"] &= ~(Standing.WANTED | Standing.QUEUED)

    scene.on_fetch = cancel
    assert scene.do(store=False) == [Result.NOT_PUSHED]
    assert scene.pushed == []


def test_a_file_that_is_dropped_and_staged_again_is_pushed_anew(marks: dict[str, int]) -> None:
    """What was begun before is not pushed any more, and not answered."""
    scene = Scene()
    fetched = 0

    def drop_once() -> None:
        nonlocal fetched
        fetched += 1
        if fetched == 2:
            scene.files.forget([INO])
            scene.pushed.clear()
            marks["now"] = Standing.WANTED | Standing.QUEUED
            scene.files.put(INO, False)

    scene.on_fetch = drop_once
    assert scene.do(store=False) == [Result.STAGED]
    assert sorted(scene.pushed) == [0, 1, 2]


def test_a_fault_is_not_told_as_staged() -> None:
    scene = Scene()

    def fail() -> None:
        raise ZeroDivisionError

    scene.on_fetch = fail
    with pytest.raises(BaseExceptionGroup):
        scene.do(store=False)
    assert scene.told == [Result.NOT_PUSHED]


def test_nothing_is_fetched_for_a_plan_that_ends_while_the_origin_is_away() -> None:
    scene = Scene(ready_after=3, ends_after=2)
    assert scene.do(store=True) == []
    assert scene.fetched == []
    assert scene.bytes == 0
