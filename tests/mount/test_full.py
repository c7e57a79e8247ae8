"""An SSD tier that is small against its dataset holds nearly as much of it as it is allowed to take
on disk, and never takes more.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hintsd.orders.spec import OrderSpec
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import idle, order
from tests.support.directed import Directed, request
from tests.support.mounted import Mount, eventually
from tests.support.store_support import disk_bytes
from tests.support.trees import random_bytes

# Of the limit: SQLite's log, its shared memory, headers of segments, less than a file; and of each
# file a header, its row in the index, and the rest of a sector.
FIXED_BYTES, FILE_BYTES = 700 << 10, 1024
SIZES = [(10_000, 5000), (500_000, 200)]


def make(place: Place, size: int, count: int) -> int:
    """What SSD is to be: 40 % of it."""
    base = random_bytes("base", size)
    for number in range(count):
        path = place.source / f"class{number % 10}" / f"img_{number:06}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(number.to_bytes(8, "little") + base[8:])
        os.utime(path, (1e9, 1e9))
    return size * count * 2 // 5


def least_files(limit: int, size: int) -> int:
    return (limit - limit // 256 - FIXED_BYTES) // (size + FILE_BYTES) - 1


def is_full(mount: Mount, limit: int, size: int) -> bool:
    stored = mount.value("ssd", "blocks")
    share = 0.975 if size >= 100_000 else 0.92
    return bool(stored >= least_files(limit, size) and stored * size >= share * limit)


@contextmanager
def watching(directory: Path, limit: int) -> Iterator[None]:
    """What lies in the directory is measured all the time."""
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.02):
            most = max(most, disk_bytes(directory))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert 0 < most <= limit


@in_one_mode
@pytest.mark.parametrize(("size", "count"), SIZES)
def test_warm_fills_a_small_ssd(place: Place, mounting: Mounting, size: int, count: int) -> None:
    limit = make(place, size, count)
    mount = mounting("--ssd", str(limit))
    with watching(place.cache_dir, limit):
        assert mount.run("warm", mount.path).returncode != 0, "not all fit"
    assert is_full(mount, limit, size)
    before = mount.value("origin", "bytes")
    again = mount.run("warm", mount.path)
    assert mount.value("origin", "bytes") == before, "nothing has gone, nothing is fetched in vain"
    assert again.returncode != 0


@in_one_mode
@pytest.mark.parametrize(("size", "count"), SIZES)
def test_hints_fill_a_small_ssd(place: Place, mounting: Mounting, size: int, count: int) -> None:
    limit = make(place, size, count)
    mount = mounting("--ram", "16M", "--ssd", str(limit))
    spec = OrderSpec("random", count, seed=7, batch_size=10)
    names = sorted(str(path.relative_to(place.source)) for path in place.source.glob("*/*"))
    with Directed() as directed, watching(place.cache_dir, limit):
        directed.open("job", request(mount.path, spec, epochs=3))
        eventually(lambda: is_full(mount, limit, size))
        eventually(idle(directed))
        stored = mount.value("ssd", "blocks")
        for epoch in range(2):
            before = mount.value("origin", "bytes")
            for step, index in enumerate(order(spec, epoch), 1):
                assert len((mount.path / names[index]).read_bytes()) == size
                if step % 10 == 0:
                    directed.step("job", epoch, step // 10)
        # Of what is stored nothing; some of the rest twice, where readers and the plan cross, or
        # where the host took it.
        fetched = (mount.value("origin", "bytes") - before) / size
        assert fetched <= 1.15 * (count - stored) + directed.job("job")["reclaimed"]
        assert mount.value("ssd", "blocks") >= stored
    assert mount.value("integrity", "faults") == {}
