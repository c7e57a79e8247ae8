"""A full cache holds what it is allowed to: exact counts, of small caches as of larger ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusecache.base import digest
from fusecache.store import Location, Version
from fusecache.store.index import database, rows
from fusecache.store.segment import format as fmt
from tests.support.store_support import (
    DATASET,
    MIB,
    Opened,
    check_invariants,
    content,
    disk_bytes,
    opened,
    version_of,
)

ROW_BYTES = 320  # of the index, for a file with such a name
# Not for files: SQLite's log (1/256 of the limit, 512 KiB at least), its shared memory, a page for
# each tree of the index, and the headers of some small segments.
FIXED_BYTES = 160 << 10


CHECKPOINTING = """
import fcntl, sys, time
with open(sys.argv[1], "r+b") as shared:
    fcntl.lockf(shared, fcntl.LOCK_EX, 1, 121)  # SQLite's WAL_CKPT_LOCK
    print(flush=True)
    time.sleep(0.03)
"""


def path_of(number: int) -> bytes:
    return b"class%02d/img_%06d.jpg" % (number % 100, number)


def fill(store: Opened, size: int, batch: int, evict: bool = False) -> int:
    """Puts files until none fits; how many are stored."""
    stored, base = 0, content(size, size)
    while True:
        limit = store.settings.limit_bytes
        assert disk_bytes(store.directory) <= limit
        for log in (store.directory / "index").glob("*-wal"):
            assert log.stat().st_size <= max(limit // 256, 512 << 10)
        items = []
        for number in range(stored, stored + batch):
            payload = number.to_bytes(8, "little") + base[8:]
            version = Version(number + 1, size, 1_700_000_000_000_000_000, 1)
            items.append((path_of(number), version, 0, payload))
        found = store.store.put_many(DATASET, items, evict=evict)
        fitting = [at is not None for at in found]
        assert fitting == sorted(fitting, reverse=True)
        stored += sum(fitting)
        if not all(fitting):
            return stored


def fill_fast(store: Opened, size: int) -> int:
    """As `fill`, one by one: SQLite's log is as long as it ever was when the cache is full."""
    stored = 0
    while True:
        version = Version(stored + 1, size, 1_700_000_000_000_000_000, 1)
        item = (path_of(stored), version, 0, stored.to_bytes(8, "little") + content(size, size)[8:])
        if store.store.put_many(DATASET, [item], evict=False) == [None]:
            return stored
        stored += 1


def least_files(limit_bytes: int, size: int) -> int:
    record_bytes = -(-(fmt.header_length(size, path_of(0)) + size) // 512) * 512
    room = limit_bytes - max(limit_bytes // 256, 512 << 10) - FIXED_BYTES
    return room // (record_bytes + ROW_BYTES) - 1


def test_what_sqlite_s_log_takes_is_room_in_the_end(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=12_000_000) as store:
        assert fill_fast(store, 10_000) >= least_files(12_000_000, 10_000)
        store.store.settle()
        assert store.store.room_bytes() < 10_000
        check_invariants(store)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    ("size", "count"),
    [(10_000, 300), (10_000, 3000), (100_000, 300), (100_000, 3000), (500_000, 300)],
)
def test_a_small_cache_is_filled(tmp_path: Path, size: int, count: int, batch: int) -> None:
    limit = size * count * 2 // 5
    with opened(tmp_path / "cache", limit_bytes=limit) as store:
        stored = fill(store, size, batch)
        assert stored >= least_files(limit, size)
        if size > 10_000 and limit >= 60_000_000:
            assert stored * size >= 0.98 * limit
        assert store.store.room_bytes() < size
        assert store.gone == []
        assert store.faults == []
        check_invariants(store)


def test_what_readers_miss_finds_segments_that_stay_as_large(tmp_path: Path) -> None:
    """Small ones are made of what is left where nothing may go; else there would be ever more."""
    with opened(tmp_path / "cache", limit_bytes=40 * MIB) as store:
        fill(store, 100_000, 16)
        for number in range(2000):
            payload = content(1_000_000 + number, 100_000)
            assert store.put(b"missed%d" % number, payload) is not None
        assert store.gone
        assert len(store.segments()) <= 12
        assert store.store.usage().blocks * 100_000 > 0.75 * 40 * MIB
        check_invariants(store)


def test_no_row_is_added_where_there_is_no_room_for_rows(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=16 * MIB, policy="keep") as store:
        payload = content(1, 1000)
        assert store.put(b"first", payload) is not None
        fill(store, 3000, 100)
        same = ([(b"%0200d" % number, payload)] for number in range(20_000))
        assert any(store.put_many(files, evict=False) == [None] for files in same)
        assert disk_bytes(store.directory) <= 16 * MIB
        check_invariants(store)


# ---- records that share a page -------------------------------------------------------------------
FILES = {b"f%d" % n: content(n, 1 + 2500 * n) for n in range(30)}


def assert_all_there(store: Opened) -> None:
    for path, payload in FILES.items():
        assert store.get(path, version_of(payload)) == payload
    assert store.bad_after_verify() == (len(FILES), 0)
    assert store.faults == []


def test_a_cache_of_whole_pages_opens_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fmt, "RECORD_ALIGNMENT", 4096)  # as earlier versions wrote them
        with opened(tmp_path / "cache") as store:
            found = [store.put(path, payload) for path, payload in FILES.items()]
            assert all(at is not None and at.offset % 4096 == 0 for at in found)
    with opened(tmp_path / "cache") as store:
        assert_all_there(store)
        for path in (store.directory / "index").glob("*.db*"):
            path.unlink()
        store.store.housekeeping()
        store.faults.clear()
        assert_all_there(store)


@pytest.mark.parametrize("one_by_one", [True, False])
def test_records_of_a_killed_writer_are_found(tmp_path: Path, one_by_one: bool) -> None:
    long_path = b"/".join([b"d" * 255] * 40)  # its header begins at a page
    store = Opened(tmp_path / "cache")
    files = [*FILES.items(), (long_path, b"long"), (b"after", b"after")]
    found = [store.put(*file) for file in files] if one_by_one else store.put_many(files)
    offsets = [at.offset for at in found if at is not None]
    assert len(offsets) == len(files)
    assert sum(offset % 4096 != 0 for offset in offsets) > 20
    assert offsets[-2] % 4096 == 0
    store.kill()
    for file in (store.directory / "index").glob("*.db*"):
        file.unlink()
    with opened(tmp_path / "cache") as again:
        for path, payload in files:
            assert again.get(path, version_of(payload)) == payload
        assert again.faults == []
        assert all(path.stat().st_size % 4096 == 0 for path in again.segments())
        check_invariants(again)


def test_a_record_is_read_while_the_next_is_written_into_its_page(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        last: list[tuple[Location, bytes]] = []
        over, bad = threading.Event(), list[Location]()

        def read() -> None:
            while not over.is_set():
                for at, payload in last[-1:]:
                    if store.read(at) != payload:
                        bad.append(at)

        thread = threading.Thread(target=read)
        thread.start()
        for number in range(500):
            payload = os.urandom(700)
            at = store.put(b"%d" % number, payload)
            assert at is not None
            last.append((at, payload))
        over.set()
        thread.join()
        assert bad == []
        assert store.faults == []


def test_a_checkpoint_waits_for_that_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else SQLite's log grows beyond what is reserved for it."""
    monkeypatch.setattr(database, "_CHECKPOINT_SECONDS", 30.0)  # the other has no time of its own
    with opened(tmp_path) as store:
        payload = content(1, 100)
        assert store.store.put_many(DATASET, [(path_of(1), version_of(payload), 0, payload)])[0]
        store.store.flush()
        index = store.index
        assert index is not None
        assert index.database.wal_size() > 0
        shared = f"{index.database.path}-shm"
        command = [sys.executable, "-c", CHECKPOINTING, shared]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            index.database.checkpoint()
            assert index.database.wal_size() == 0


def test_to_earlier_versions_a_row_of_a_record_within_a_page_is_a_damaged_one() -> None:
    name, version = b"n" * 16, Version(1, 2, 3, 4)
    for offset in (4096, 4608):
        at = Location(7, offset, 160, 2)
        earlier = fmt.signed(digest.checksum(rows._BLOCK_SUM.pack(*at) + name))
        assert (rows.block_row(name, at)[-1] == earlier) == (offset == 4096)
        packed = rows._FILE_SUM.pack(0, *version, *at)
        earlier = fmt.signed(digest.checksum(packed + DATASET + b"path"))
        row = rows.file_row(DATASET, b"path", version, 0, at)
        assert (row[-1] == earlier) == (offset == 4096)
