"""How much of a dataset is on SSD: whose word counts, and how often it is counted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fusecache import _native
from fusecache.server import figures
from fusecache.server.figures import Census

BYTES, LOCATED, ROWS = 1000, 10, 300


def census(*, is_loaded: bool = False) -> Census:
    store: Any = SimpleNamespace(dataset_bytes=lambda dataset: ROWS)
    saved: Any = SimpleNamespace(is_loaded=is_loaded)
    return Census(store, b"d", saved)


def on_ssd_bytes(of: Census) -> int | None:
    found = trio.run(of.figures)
    return None if found is None else int(found["on_ssd_bytes"])


@pytest.mark.parametrize(
    ("is_whole", "is_loaded", "size_bytes", "said"),
    [
        (False, False, BYTES, LOCATED),  # the rows may be of other files
        (True, False, BYTES, ROWS),
        (False, True, BYTES, ROWS),
        (True, True, ROWS - 1, ROWS - 1),  # some were deleted
    ],
)
def test_the_index_counts_where_the_names_are_those_of_the_dataset(
    monkeypatch: pytest.MonkeyPatch, is_whole: bool, is_loaded: bool, size_bytes: int, said: int
) -> None:
    monkeypatch.setattr(_native, "census", lambda: (3, size_bytes, LOCATED, is_whole))
    assert on_ssd_bytes(census(is_loaded=is_loaded)) == said


def test_who_asks_meanwhile_gets_the_last_count(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = list[int](), threading.Event()

    def count() -> tuple[int, int, int, bool]:
        begun.append(1)
        assert len(begun) == 1 or may_end.wait(30)
        return 3, BYTES, LOCATED * len(begun), False

    monkeypatch.setattr(_native, "census", count)
    monkeypatch.setattr(figures, "WAIT_S", 0.1)
    counted = census()

    async def run() -> None:
        async def said() -> int:
            return int((await counted.figures() or {})["on_ssd_bytes"])

        assert [await said() for _ in range(3)] == [LOCATED] * 3
        assert len(begun) == 2, "one count at a time"
        may_end.set()
        with trio.fail_after(30):
            while await said() == LOCATED:
                await trio.sleep(0.001)

    trio.run(run)


def test_what_is_costly_is_not_counted_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(1, 100))
    monkeypatch.setattr(_native, "census", lambda: (3, BYTES, next(counts), False))
    counted = census()
    assert [on_ssd_bytes(counted), on_ssd_bytes(counted)] == [1, 2]
    monkeypatch.setattr(figures, "COSTS_NOTHING_S", -1.0)
    monkeypatch.setattr(figures, "COST_SHARE", 1e9)
    assert [on_ssd_bytes(counted), on_ssd_bytes(counted)] == [3, 3]
