"""What a mount's status says (server/serving.py), part by part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fusecache import _native
from fusecache.base import metrics
from fusecache.base.metrics import Metric
from fusecache.store import Store


def dataset(store: Store, name: bytes) -> dict[str, Any]:
    """How much there is, as far as it is known, and how much of that is on SSD. Blocking.

    Where blocks lie is known once they were read or asked for; after a remount only the index
    tells. That knows nothing of what is in logs alone.
    """
    files, size_bytes, located_bytes, is_whole = _native.census()
    on_ssd_bytes = max(located_bytes, store.dataset_bytes(name))
    return {
        "files": files,
        "bytes": size_bytes,
        "on_ssd_bytes": min(size_bytes, on_ssd_bytes),
        "is_whole": is_whole,
    }


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
