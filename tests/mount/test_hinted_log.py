"""hintsd's policy and a real mount that reorders (docs/LOG.md)."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import walk
from hintsd.follow.progress import SPACING_LEAST as SPACING
from hintsd.orders.spec import OrderSpec
from hintsd.reorder import packing
from tests.conftest import Mounting, Place, in_one_mode
from tests.mount.test_hinted import (
    FILE_BYTES,
    PAGES_BYTES,
    Reader,
    make_dataset,
    order,
    running,
    shuffled,
    staged,
)
from tests.support.directed import Directed, request
from tests.support.mounted import Mount, eventually
from tests.support.trees import random_bytes

pytestmark = in_one_mode  # how readers open is test_hinted.py's

EPOCHS = 3
FILES = 2000
TOTAL_BYTES = FILES * PAGES_BYTES
RAM_BYTES = 14 << 20  # less than the dataset, and enough for the buffers of its chunks
STRIDE = 200
MANY = 4000  # enough for the buffers of two jobs' chunks
MANY_RAM_BYTES = 25 << 20


def staged_on(directed: Directed, count: int, epochs: int, epoch: int, read: int) -> None:
    """Wait until, `read` of an epoch's `count` samples being read, the next part is staged: a
    reader that overtakes leaves files unmoved, and fetches what is not on SSD.
    """
    place = epoch + read // count, read % count
    if place < (epochs, 0):
        staged(directed, "job", min(count - place[1], STRIDE) * PAGES_BYTES, place)


def log_bytes(directed: Directed) -> int:
    """What is written to logs, as the mount said last: twice a second."""
    return int(directed.mount()["log_written_bytes"])


def begun(reader: Reader, directed: Directed, spec: OrderSpec, epochs: int) -> Iterator[int]:
    """Epochs are read, a part at a time, each when it is staged. Gives an epoch's number when its
    first part was read.
    """
    samples = len(order(spec, 0))
    with reader.asks_at_most(epochs * samples // 4, directed):
        for epoch in range(epochs):
            sequence = order(spec, epoch)
            for start in range(0, samples, STRIDE):
                reader.read(sequence[start : start + STRIDE])
                directed.step("job", epoch, (start + STRIDE) // 4)
                staged_on(directed, samples, epochs, epoch, start + STRIDE)
                if start == 0:
                    yield epoch


@contextlib.contextmanager
def reordered(
    place: Place, mounting: Mounting, spec: OrderSpec, count: int
) -> Iterator[tuple[Mount, Directed]]:
    """A mount that reorders `count` files, and a job on it that has read all of its epochs."""
    names = make_dataset(place, count)
    mount = mounting("--ram", "16M", "--layout", "reorder")
    reader = Reader(mount, names)
    with Directed(ram_bytes=RAM_BYTES) as directed:
        directed.open("job", request(mount.path, spec, epochs=EPOCHS))
        staged(directed, "job", RAM_BYTES // 2)
        for epoch in begun(reader, directed, spec, EPOCHS):
            if epoch < EPOCHS - 1:
                assert directed.job("job")["layout"] == "reorder", directed.job("job")
        yield mount, directed


def test_each_epoch_is_moved_into_the_next_ones_order(place: Place, mounting: Mounting) -> None:
    with reordered(place, mounting, shuffled(FILES), FILES) as (_, directed):
        job = directed.job("job")
        assert job["layout"] == "log"
        assert job["layout_why"] == "no epoch follows; until then reorder: --layout reorder"
        moves = EPOCHS - 1
        eventually(lambda: log_bytes(directed) > 0.9 * moves * TOTAL_BYTES)
        assert log_bytes(directed) <= 1.02 * moves * TOTAL_BYTES


def test_epochs_that_read_a_part_of_the_dataset_are_moved(place: Place, mounting: Mounting) -> None:
    """As an importance sampler with draw_ahead=1 reads: two thirds, others each time."""
    count = FILES * 3 // 2
    spec = replace(shuffled(count), num_samples=FILES)
    with reordered(place, mounting, spec, count) as (mount, directed):
        read_bytes = (EPOCHS - 1) * len(order(spec, 0)) * PAGES_BYTES
        eventually(lambda: log_bytes(directed) > 0.9 * read_bytes)
        # What the first epoch does not read comes from the origin, to its chunk.
        others_bytes = (count - FILES) * PAGES_BYTES
        assert log_bytes(directed) <= 1.02 * (read_bytes + others_bytes)
    different = {index for epoch in range(EPOCHS) for index in order(spec, epoch)}
    assert mount.value("origin", "files") <= 1.02 * len(different)


def expected(name: Path) -> bytes:
    return random_bytes(str(name), FILE_BYTES)


# A reader of its own, in the order of its own seed; every byte is compared.
READER = """
import sys
from pathlib import Path
from hintsd.orders.drawing import access_sequence
from hintsd.orders.spec import OrderSpec
root, source = map(Path, sys.argv[1:3])
seed, epochs, stride = map(int, sys.argv[3:6])
names = sys.argv[6:]
expected = {name: (source / name).read_bytes() for name in names}
spec = OrderSpec("random", len(names), seed=seed, batch_size=4)
print("ready", flush=True)
for epoch in range(epochs):
    for number, index in enumerate(access_sequence(spec, epoch)):
        if number % stride == 0:
            assert sys.stdin.readline()
        assert (root / names[index]).read_bytes() == expected[names[index]], names[index]
        if (number + 1) % stride == 0:
            print("read", flush=True)
"""


def test_of_two_jobs_one_is_packed(place: Place, mounting: Mounting) -> None:
    names = make_dataset(place, MANY)
    mount = mounting("--ram", "28M", "--layout", "reorder")
    seeds = (7, 8)
    with contextlib.ExitStack() as stack:
        directed = stack.enter_context(Directed(ram_bytes=MANY_RAM_BYTES))
        readers = []
        for seed in seeds:
            told = (str(seed), str(EPOCHS), str(STRIDE), *map(str, names))
            command = (sys.executable, "-c", READER, str(mount.path), str(place.source), *told)
            reader = stack.enter_context(running(*command))
            assert reader.stdin is not None
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            job = request(mount.path, shuffled(MANY, seed), epochs=EPOCHS, pid=reader.pid)
            directed.open(f"job-{seed}", job)
            staged(directed, f"job-{seed}", MANY_RAM_BYTES // 4)
            readers.append((reader.stdin, reader.stdout))
        for epoch in range(EPOCHS):
            for start in range(0, MANY, STRIDE):
                for to, _ in readers:
                    to.write("\n")
                    to.flush()
                for _, out in readers:
                    assert out.readline() == "read\n"
                read = start + STRIDE
                for seed in seeds:  # no steps are told, so they are seen late
                    ahead_bytes = min(MANY - read, STRIDE) * PAGES_BYTES
                    staged(directed, f"job-{seed}", ahead_bytes, (epoch, read - 2 * SPACING))
            if epoch < EPOCHS - 1:
                one, other = (directed.job(f"job-{seed}") for seed in seeds)
                assert one["layout"] in ("reorder", "log")
                why = "job-7 is packed on this mount"
                assert (other["layout"], other["layout_why"]) == ("static", why)
                assert "wrong" not in (one["state"], other["state"])
        eventually(lambda: log_bytes(directed) > 0.9 * MANY * PAGES_BYTES)
        assert mount.value("integrity", "mismatches") == 0


def test_half_of_the_dataset_on_ssd_is_packed(place: Place, mounting: Mounting) -> None:
    names, spec = make_dataset(place, MANY), shuffled(MANY)
    limit_bytes = 24 << 20
    mount = mounting("--ram", "28M", "--ssd", str(limit_bytes), "--layout", "reorder")
    with Directed(ram_bytes=MANY_RAM_BYTES) as directed:
        directed.open("job", request(mount.path, spec, epochs=EPOCHS))
        staged(directed, "job", MANY_RAM_BYTES // 4)
        fetched = []
        for epoch in range(EPOCHS):
            before = mount.value("reads", "from_origin") + mount.value("prefetch", "files")
            sequence = order(spec, epoch)
            for start in range(0, MANY, STRIDE):
                for index in sequence[start : start + STRIDE]:
                    assert (mount.path / names[index]).read_bytes() == expected(names[index])
                directed.step("job", epoch, (start + STRIDE) // 4)
                assert mount.value("ssd", "reserved_bytes") <= limit_bytes
                if start == 0 and epoch < EPOCHS - 1:
                    assert directed.job("job")["layout"] in ("reorder", "log")
                staged_on(directed, MANY, EPOCHS, epoch, start + STRIDE)
            after = mount.value("reads", "from_origin") + mount.value("prefetch", "files")
            fetched.append(after - before)
        assert max(fetched[1:]) < MANY // 2
        eventually(lambda: log_bytes(directed) > limit_bytes // 2)
        assert mount.value("integrity", "mismatches") == 0


def test_with_little_room_on_ssd_nothing_is_fetched_twice(place: Place, mounting: Mounting) -> None:
    """A third more than the dataset: samples are moved as there is room, and none is evicted."""
    names, spec = make_dataset(place, MANY), shuffled(MANY)
    limit_bytes = MANY * PAGES_BYTES * 4 // 3
    mount = mounting("--ram", "28M", "--ssd", str(limit_bytes), "--layout", "reorder")
    with Directed(ram_bytes=MANY_RAM_BYTES) as directed:
        directed.open("job", request(mount.path, spec, epochs=EPOCHS + 1))
        staged(directed, "job", MANY_RAM_BYTES // 4)
        for epoch in range(EPOCHS):
            sequence = order(spec, epoch)
            for start in range(0, MANY, STRIDE):
                for number, index in enumerate(sequence[start : start + STRIDE]):
                    path = mount.path / names[index]
                    if number % 3:  # looked up, so that hintsd sees all of them read
                        assert path.stat().st_size == FILE_BYTES
                    else:
                        assert path.read_bytes() == expected(names[index])
                directed.step("job", epoch, (start + STRIDE) // 4)
                staged_on(directed, MANY, EPOCHS + 1, epoch, start + STRIDE)
            assert mount.value("ssd", "reserved_bytes") <= limit_bytes
        assert mount.value("origin", "files") == MANY
        eventually(lambda: log_bytes(directed) > 0.2 * MANY * PAGES_BYTES)


def segments(place: Place) -> list[list[str]]:
    """Names of the files that lie in each."""
    found = []
    for path in sorted((place.cache_dir / "segments").glob("*.seg")):
        fd = os.open(path, os.O_RDONLY)
        try:
            header = fmt.parse_segment_header(os.pread(fd, fmt.SEGMENT_HEADER_BYTES, 0))
            assert header is not None
            records = walk(fd, header.segno, header.uuid)
            found.append([os.fsdecode(record.path) for _, record in records])
        finally:
            os.close(fd)
    return [names for names in found if names]


def test_one_log_serves_two_epochs(
    place: Place, mounting: Mounting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A seventh of the dataset is a chunk; what two chunks share lies together."""
    monkeypatch.setattr(packing, "CELL_BYTES_LEAST", 64 << 10)
    monkeypatch.setattr(packing, "BUFFER_BYTES_LEAST", 16 << 10)
    monkeypatch.setattr(packing, "EPOCHS_MOST", 2)
    names, spec, epochs = make_dataset(place, FILES), shuffled(FILES), 5
    mount = mounting("--ram", "16M", "--layout", "reorder")
    reader = Reader(mount, names)
    fetched = 0
    with Directed(ram_bytes=RAM_BYTES) as directed:
        directed.open("job", request(mount.path, spec, epochs=epochs))
        staged(directed, "job", RAM_BYTES // 2)
        for epoch in begun(reader, directed, spec, epochs):
            if epoch < epochs - 1:
                job = directed.job("job")
                assert job["layout"] == ("log" if epoch % 2 else "reorder")
                assert "every 2 epochs" in job["layout_why"]
            if epoch == 1:
                fetched = mount.value("prefetch", "files")
                eventually(lambda: assert_cells(segments(place), [order(spec, 1), order(spec, 2)]))
        moved_bytes = 2 * TOTAL_BYTES  # twice in five epochs
        eventually(lambda: log_bytes(directed) > 0.9 * moved_bytes)
        assert log_bytes(directed) <= 1.02 * moved_bytes
    assert mount.value("prefetch", "files") == fetched
    for name in names[::17]:
        assert (mount.path / name).read_bytes() == random_bytes(str(name), FILE_BYTES)


def assert_cells(found: list[list[str]], orders: list[list[int]]) -> None:
    """Each segment of the log holds neighbours of both orders, and a chunk is a few segments."""
    number_of = {f"class{n * 3 // FILES}/{n:05}.jpg": n for n in range(FILES)}
    places = [{n: place for place, n in enumerate(order)} for order in orders]
    packed = [
        {number_of[name] for name in names}
        for names in found
        if all(span([at[number_of[name]] for name in names]) < FILES // 4 for at in places)
    ]
    assert len(set[int]().union(*packed)) > 0.99 * FILES
    assert len(packed) < 80  # of some 40 files each


def span(places: list[int]) -> int:
    return max(places) - min(places)
