"""Files of several blocks: what is counted as fetched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fusecache.ahead import large
from fusecache.ahead.large import LargeFiles
from fusecache.ahead.marks import Answers
from fusecache.base.metrics import PREFETCHED_BYTES, Metrics
from fusecache.base.wire import Result, Standing
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace

INO = 7
VERSION = Version(INO, BLOCK_BYTES + 1000, 1, 1)


class Scene:
    """One large file, of which nothing is on SSD; the origin is ready once it was asked often
    enough.
    """

    def __init__(
        self, ready_after: int = 0, ends_after: int = 0, stored: bool | None = False
    ) -> None:
        """`ends_after`: when it was asked so often, the plan ends."""
        self.answers = Answers()
        self.metrics = Metrics()
        self.asked = 0
        self.counted: list[int] = []  # before each read
        self._ready_after, self._ends_after, self._stored = ready_after, ends_after, stored
        self.files = LargeFiles(
            fetcher=_any(is_origin_ready=self._is_ready, uncached=self._uncached),
            reader=_any(is_cached=self._is_cached, ensure_cached=self._ensure),
            packer=_any(has_spare=lambda size_bytes: True),
            fetches=_any(may_take=lambda: True, take=lambda size_bytes: None),
            pages=_any(push_block=self._push),
            answers=self.answers,
            metrics=self.metrics,
        )

    @property
    def bytes(self) -> int:
        return self.metrics.read()[PREFETCHED_BYTES]

    def do(self, *, store: bool, is_staged: bool) -> int:
        return trio.run(self.files._do, INO, store, is_staged, self.answers.plan)

    def _is_ready(self) -> bool:
        self.asked += 1
        if self.asked == self._ends_after:
            self.answers.end()
        return self.asked > self._ready_after

    async def _is_cached(self, ino: int, block: int) -> bool:
        return False

    async def _ensure(self, ino: int, block: int) -> bool | None:
        self.counted.append(self.bytes)
        return self._stored

    async def _uncached(self, ino: int, block: int) -> tuple[Version, memoryview]:
        self.counted.append(self.bytes)
        return VERSION, memoryview(bytes(namespace.block_span(VERSION.size, block)[1]))

    async def _push(self, ino: int, version: Version, block: int, data: Any) -> bool:
        return True


def _any(**parts: Any) -> Any:
    return SimpleNamespace(**parts)


@pytest.fixture(autouse=True)
def one_large_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "version", lambda ino: VERSION)
    monkeypatch.setattr(large, "flags", lambda ino: Standing.WANTED)


@pytest.mark.parametrize(
    ("store", "is_staged", "result"),
    [(True, False, Result.STORED), (False, True, Result.STAGED)],
)
def test_bytes_count_once_they_were_read(store: bool, is_staged: bool, result: int) -> None:
    scene = Scene()
    assert scene.do(store=store, is_staged=is_staged) == result
    assert scene.counted == [0, BLOCK_BYTES]
    assert scene.bytes == VERSION.size


def test_what_a_reader_has_stored_meanwhile_does_not_count() -> None:
    scene = Scene(stored=True)
    assert scene.do(store=True, is_staged=False) == Result.STORED
    assert scene.bytes == 0


def test_nothing_counts_of_a_plan_that_ends_while_the_origin_is_away() -> None:
    scene = Scene(ready_after=3, ends_after=2)
    assert scene.do(store=True, is_staged=True) == Result.NOT_PUSHED
    assert scene.counted == []
    assert scene.bytes == 0
