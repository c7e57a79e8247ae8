"""Which shards a job has announced."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import hintsd
from tests.support.fake_hintsd import FakeHintsd


def announced(
    daemon: FakeHintsd, job: hintsd.Job, shards: Collection[str], epochs: int
) -> dict[int, list[str]]:
    """By epoch, once the last one has been. (One that is over soon may be left out.)"""

    def told() -> Any:
        return next((told for told in daemon.jobs if told.name == job.name), None)

    daemon.wait(lambda: told() is not None and told().steps[-1:] == [(epochs - 1, 0)])
    paths = bytes(told().job["files"]["paths"]).decode().split("\0")
    files = [f"{told().job['path'].decode()}/{path}" for path in paths]
    assert sorted(files) == sorted(shards)
    orders: dict[int, list[str]] = {e: [files[i] for i in o] for e, o in told().sequences()}
    assert epochs - 1 in orders
    return orders
