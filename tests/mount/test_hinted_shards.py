"""Hints for a dataset of shards on a real mount: files of several blocks, which workers read from
front to back, several at a time. The cache takes a part of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hintsd.orders.drawing import access_sequence
from hintsd.orders.spec import OrderSpec
from tests.conftest import Mounting, Place
from tests.support.directed import Directed, request
from tests.support.mounted import Mount, eventually
from tests.support.trees import random_bytes

SHARDS = 12
SHARD_BYTES = 9 << 20  # three blocks
TOTAL_BYTES = SHARDS * SHARD_BYTES
READ_BYTES = 256 << 10
SPEC = OrderSpec("random", SHARDS, seed=3, batch_size=1)


@pytest.fixture
def names(place: Place) -> list[Path]:
    found = [Path(f"class0/{number:02}.jpg") for number in range(SHARDS)]
    for name in found:
        path = place.write(str(name), random_bytes(str(name), SHARD_BYTES))
        os.utime(path, (1e9, 1e9))
    return found


def order(epoch: int) -> list[int]:
    return [int(index) for index in access_sequence(SPEC, epoch)]


def read(mount: Mount, names: list[Path], place: Place, *indices: int) -> None:
    """These shards together, a piece of each in turn."""
    files = [(mount.path / names[index]).open("rb", buffering=0) for index in indices]
    expected = [(place.source / names[index]).read_bytes() for index in indices]
    for start in range(0, SHARD_BYTES, READ_BYTES):
        for file, content in zip(files, expected, strict=True):
            assert file.read(READ_BYTES) == content[start : start + READ_BYTES]
    for file in files:
        file.close()


def staged(directed: Directed, position: int) -> None:
    """Wait until the shard at that position of both epochs is."""

    def look() -> None:
        status = directed.job("job")
        # The one before it was opened last: it may still be read.
        here = (status["epoch"] or 0) * SHARDS + (status["index"] or 0)
        assert here >= position - 1, repr(status)
        assert (status["ahead_bytes"] or 0) >= (position + 1 - here) * SHARD_BYTES, repr(status)

    eventually(look)


def fetched_bytes(mount: Mount) -> int:
    return int(mount.value("origin", "bytes"))


@pytest.mark.parametrize("ssd", [0, 3], ids=["no SSD", "SSD for some"])
def test_each_shard_is_staged_before_it_is_read_and_fetched_once(
    place: Place, mounting: Mounting, names: list[Path], ssd: int
) -> None:
    """`ssd`: so many shards have room there."""
    mount = mounting("--ram", "64M", "--ssd", str(max(16 << 20, ssd * (10 << 20))))
    with Directed() as directed:
        directed.open("job", request(mount.path, SPEC, epochs=2))
        for epoch in range(2):
            for number, index in enumerate(order(epoch)):
                staged(directed, epoch * SHARDS + number)
                read(mount, names, place, index)
        eventually(lambda: directed.finished == ["job"])
        stored_bytes = int(mount.value("ssd", "bytes")) // SHARD_BYTES * SHARD_BYTES
        assert stored_bytes >= SHARD_BYTES
        status = directed.close("job")
        # The host may page out what waits, on a loaded machine, and parts of what is read.
        again_bytes = status["reclaimed"] * SHARD_BYTES
        most_bytes = 2.2 * TOTAL_BYTES - stored_bytes + again_bytes
        assert fetched_bytes(mount) <= most_bytes, repr((status, mount.status()["reads"]))
    assert status["not_late"] >= 2 * SHARDS - 2 - status["reclaimed"], repr(status)


def test_readers_that_catch_up_join_what_is_being_fetched(
    place: Place, mounting: Mounting, names: list[Path]
) -> None:
    """Nothing waits for staging: the plan and two readers want the same blocks at the same time."""
    mount = mounting("--ram", "64M", "--ssd", "16M")
    with Directed() as directed:
        directed.open("job", request(mount.path, SPEC, epochs=2, workers=2))
        eventually(lambda: bool(directed.mount()["connected"]))
        for epoch in range(2):
            sequence = order(epoch)
            for first in range(0, SHARDS, 2):
                read(mount, names, place, *sequence[first : first + 2])
        eventually(lambda: directed.finished == ["job"])
    # Each READ of a block that was not stored fetched all of it: eight datasets in two epochs.
    assert fetched_bytes(mount) <= 2.5 * TOTAL_BYTES
