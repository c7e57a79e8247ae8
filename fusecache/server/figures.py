"""What a mount's status says (server/serving.py), part by part."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import trio

from fusecache import _native
from fusecache.base import metrics
from fusecache.base.metrics import Metric
from fusecache.server.saved import SavedTable
from fusecache.store import Store

WAIT_S = 1.0
COST_SHARE = 10  # counting takes at most one in so many of a processor's seconds
COSTS_NOTHING_S = 0.01


class Census:
    """How much of the dataset there is, as far as it is known, and how much of that is on SSD.

    Where blocks lie is known once they were read or asked for. After a remount the index tells,
    but for what lies in logs alone; it is asked where the names are those of the whole dataset.
    """

    def __init__(self, store: Store, dataset: bytes, saved: SavedTable) -> None:
        self._store = store
        self._dataset = dataset
        self._saved = saved
        self._found: dict[str, Any] | None = None
        self._good_until_s = -math.inf
        self._is_counting = False

    async def figures(self) -> dict[str, Any] | None:
        """As they are, or, of millions of files, were a while ago; None: they are being counted for
        the first time.
        """
        if not self._is_counting and time.monotonic() >= self._good_until_s:
            self._is_counting = True
            with trio.move_on_after(WAIT_S):
                await trio.to_thread.run_sync(self._count, abandon_on_cancel=True)
        return self._found

    def _count(self) -> None:
        begin_s = time.thread_time()
        try:
            files, size_bytes, on_ssd_bytes, is_whole = _native.census()
            if is_whole or self._saved.is_loaded:
                on_ssd_bytes = max(on_ssd_bytes, self._store.dataset_bytes(self._dataset))
            self._found = {
                "files": files,
                "bytes": size_bytes,
                "on_ssd_bytes": min(size_bytes, on_ssd_bytes),
                "is_whole": is_whole,
            }
        finally:
            cost_s = time.thread_time() - begin_s
            if cost_s > COSTS_NOTHING_S:
                self._good_until_s = time.monotonic() + COST_SHARE * cost_s
            self._is_counting = False


def reads(now: Mapping[Metric, int], *, is_ordinary: bool) -> dict[str, Any]:
    pushed_bytes, served_bytes = served_so_far(now)
    return {
        "requests": now[metrics.REQUESTS if is_ordinary else metrics.FRONT_REQUESTS],
        "from_ssd": now[metrics.FRONT_FROM_SSD] + now[metrics.FROM_SSD],
        "from_origin": now[metrics.FRONT_FROM_ORIGIN] + now[metrics.FROM_ORIGIN],
        "by_fetch_threads": now[metrics.FRONT_FROM_ORIGIN],
        "waited_for_staging": now[metrics.FRONT_WAITED],
        "bytes_pushed": pushed_bytes,
        "bytes_staged": now[metrics.FRONT_BYTES_STAGED],
        "bytes_served": served_bytes,
        "read_s": latency(_native.mount_reads()),
    }


def manifest(files: int, now: Mapping[Metric, int]) -> dict[str, int]:
    """`files`: that it lists."""
    return {
        "files": files,
        "linked_files": now[metrics.LINKED_FILES],
        "linked_bytes": now[metrics.LINKED_BYTES],
    }


def metadata(now: Mapping[Metric, int]) -> dict[str, int]:
    return {
        "lookups": now[metrics.FRONT_LOOKUPS],
        "getattrs": now[metrics.FRONT_GETATTRS],
        "readdirs": now[metrics.FRONT_READDIRS],
        "to_python": now[metrics.FRONT_SLOW],
    }


def prefetch(now: Mapping[Metric, int]) -> dict[str, int]:
    return {
        "depth": now[metrics.DEPTH],
        "queued_stage": now[metrics.QUEUED_STAGE],
        "queued_fetch": now[metrics.QUEUED_FETCH],
        "in_flight": now[metrics.IN_FLIGHT],
        "files": now[metrics.PREFETCHED_FILES],
        "bytes": now[metrics.PREFETCHED_BYTES],
        "overtaking_reads": now[metrics.OVERTAKING_READS],
        "looks": now[metrics.WINDOW_LOOKS],
        "restored_files": now[metrics.RESTORED_FILES],
        "reclaimed_files": now[metrics.RECLAIMED_FILES],
    }


def latency(reads: tuple[list[int], int]) -> dict[str, Any]:
    """A histogram: upper bounds in seconds, reads of each bucket (one more: all that took longer),
    and the seconds of all reads together.
    """
    counts, sum_ns = reads
    bounds = [2 ** (_native.LATENCY_SHIFT + k) / 1e9 for k in range(len(counts) - 1)]
    return {"bounds": bounds, "counts": counts, "sum": sum_ns / 1e9}


def served_so_far(now: Mapping[Metric, int]) -> tuple[int, int]:
    """Bytes that were pushed, and that were pushed or replied."""
    pushed = now[metrics.FRONT_BYTES_STAGED] + now[metrics.BYTES_PUSHED]
    from_c = now[metrics.FRONT_BYTES_FROM_SSD] + now[metrics.FRONT_BYTES_FROM_ORIGIN]
    return pushed, pushed + from_c + now[metrics.BYTES_REPLIED]
