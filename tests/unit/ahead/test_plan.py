"""What a hintsd is told of its mount."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fusecache.ahead.plan import Plan
from fusecache.base.metrics import (
    DEPTH,
    IN_FLIGHT,
    QUEUED_FETCH,
    QUEUED_STAGE,
    RAM_BYTES,
    Metrics,
)


class Store:
    """Also the packer: as a plan sees them. Somebody stores 100 bytes whenever it is looked at."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self.put_bytes = 0

    def stored_bytes(self) -> int:
        return self.put_bytes

    def usage(self) -> SimpleNamespace:
        self.put_bytes += 100
        return SimpleNamespace(bytes=0, limit_bytes=1_000)

    def room_bytes(self) -> int:
        left = 1_000 - self.put_bytes
        self.put_bytes += 100
        return left

    def state(self) -> dict[str, int]:
        return {}


@pytest.mark.parametrize(("is_open", "room_bytes"), [(False, 800), (True, 900)])
@pytest.mark.parametrize("shared_bytes", [None, 70])
def test_what_is_stored_while_someone_looks_is_no_room(
    is_open: bool, room_bytes: int, shared_bytes: int | None
) -> None:
    """hintsd may have heard of it before. An open log's room is not the store's. What the host's
    cache service would take is room.
    """
    shared: Any = None if shared_bytes is None else SimpleNamespace(room_bytes=shared_bytes)
    store: Any = Store(is_open=is_open)
    other: Any = SimpleNamespace(pins=SimpleNamespace(number=0), recording=0)
    mount: Any = {"ram_bytes": 1}
    metrics = Metrics(lambda: defaultdict(int))
    for gauge in (RAM_BYTES, DEPTH, QUEUED_STAGE, QUEUED_FETCH, IN_FLIGHT):
        metrics.watch(gauge, lambda: 0)
    plan = Plan(
        operations=other,
        prefetcher=other,
        packer=store,
        preload=other,
        store=store,
        metrics=metrics,
        passings=other,
        mount=mount,
        device=other,
        shared=shared,
    )
    assert trio.run(plan.state)["ssd_room_bytes"] == room_bytes + (shared_bytes or 0)
