"""What callers of the store may rely on, in both digests."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.base.errors import UserError
from fusecache.store import Location, Version
from fusecache.store.index.pending import Batch, Pending
from fusecache.store.segment import format as fmt
from fusecache.store.types import BLOCK_BYTES, Item
from tests.support.store_support import (
    DATASET,
    MIB,
    Opened,
    blocks_of,
    check_invariants,
    content,
    disk_bytes,
    opened,
    version_of,
)

OTHER = b"another dataset!"


@pytest.fixture(params=["xxh3-128", "blake3"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    with opened(tmp_path / "cache", digest=request.param) as found:
        yield found
        assert found.faults == []


def test_what_is_put_is_found_at_once_and_after_reopening(store: Opened) -> None:
    files = {b"d%d/f%d" % (n % 3, n): content(n, 1 + 7000 * n) for n in range(40)}
    for path, payload in files.items():
        location = store.put(path, payload)
        assert location is not None
        assert store.find(path, version_of(payload)) == location
        assert store.read(location) == payload
    store.close()
    with opened(store.directory, digest=store.settings.digest) as again:
        for path, payload in files.items():
            assert again.get(path, version_of(payload)) == payload
        assert again.store.usage().blocks == 40
        assert again.bad_after_verify() == (40, 0)
        check_invariants(again)


def test_blocks_that_are_being_committed_count_once(
    store: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    drop = Pending.drop

    def look(pending: Pending, committed: Batch) -> None:
        counted.append(store.store.usage().blocks)
        drop(pending, committed)

    monkeypatch.setattr(Pending, "drop", look)
    for number in range(3):
        store.put(b"before%d" % number, content(number, 1000))
        store.store.flush()
    store.put(b"after", content(3, 1000))
    assert store.store.usage().blocks == 4
    assert counted == [1, 2, 3]


def test_another_version_path_block_or_dataset_is_not_found(store: Opened) -> None:
    payload, version = b"content", version_of(b"content")
    store.put(b"a/b", payload)
    assert store.find(b"a/b", version) is not None
    for field, value in version._asdict().items():
        assert store.find(b"a/b", version._replace(**{field: value + 1})) is None
    assert store.find(b"a/c", version) is None
    assert store.find(b"b", version) is None
    assert store.find(b"a/b", version, 1) is None
    assert store.store.lookup(OTHER, b"a/b", version, 0) is None
    assert store.store.lookup(DATASET[:8] + bytes(8), b"a/b", version, 0) is None


def test_odd_paths_and_versions(store: Opened) -> None:
    odd = [b"x", bytes(range(1, 47)), b"\xff/\xfe", b"n" * 255, b"/".join([b"d" * 255] * 30)]
    version = Version(2**64 - 1, 5, -(2**40), 2**62)
    for path in odd:
        store.put(path, path[:5], version)
        assert store.get(path, version) == path[:5]
    assert store.put(b"/".join([b"d" * 255] * 300), b"too long a path") is None
    wild = Version(-5, 2**70, 2**64, -(2**64))
    store.put(b"wild", b"x", wild)
    assert store.get(b"wild", wild) == b"x"


def test_what_does_not_fit_a_record_is_refused(store: Opened) -> None:
    assert store.put(b"empty", b"") is None
    assert store.put(b"large", bytes(BLOCK_BYTES + 1)) is None
    assert store.put(b"largest", bytes(BLOCK_BYTES)) is not None
    assert store.get(b"largest", version_of(bytes(BLOCK_BYTES))) == bytes(BLOCK_BYTES)


def test_memoryviews_are_payloads_too(store: Opened) -> None:
    payload = content(1, 300_000)
    version = version_of(payload)
    view = memoryview(bytearray(payload))
    assert store.store.put(DATASET, b"view", version, 0, view) is not None
    assert store.get(b"view", version) == payload


def test_files_of_many_blocks(store: Opened) -> None:
    payload = content(2, 2 * BLOCK_BYTES + 100)
    version = version_of(payload)
    blocks = blocks_of(payload)
    locations = [store.put(b"big", blocks[n], version, n) for n in (0, 2)]
    expected = [locations[0], None, locations[1], None]
    assert [store.find(b"big", version, n) for n in range(4)] == expected
    store.store.flush()
    assert [store.find(b"big", version, n) for n in range(4)] == expected
    assert store.get(b"big", version, 2) == blocks[2]
    assert store.find(b"big", version._replace(mtime_ns=0)) is None


def test_equal_content_is_stored_once(store: Opened) -> None:
    payload = content(3, 100_000)
    first = store.put(b"one", payload)
    before = store.store.usage().blocks
    second = store.put(b"two", payload, version_of(payload, ino=8))
    third = store.store.put(OTHER, b"one", version_of(payload, ino=9), 0, payload)
    assert first == second == third
    assert store.store.usage().blocks == before == 1
    assert store.find(b"two", version_of(payload, ino=8)) == first
    position = store.segments()[0].stat().st_size
    for _ in range(10):
        assert store.put(b"one", payload) == first
    assert store.segments()[0].stat().st_size == position


def one_by_one(store: Opened, items: list[Item]) -> list[Location | None]:
    return [store.store.put(DATASET, *item) for item in items]


def an_odd_batch() -> list[Item]:
    """New blocks, several blocks of a file, what cannot be stored, and every kind of duplicate."""
    items: list[Item] = []
    for n in range(12):
        payload = content(n, 1 + 9000 * n)
        items.append((b"d/new%d" % n, version_of(payload), 0, payload))
    big = content(50, BLOCK_BYTES + 70_000)
    items += [(b"big", version_of(big), n, block) for n, block in enumerate(blocks_of(big))]
    items += [(b"empty", version_of(b""), 0, b""), (b"n" * 70_000, version_of(b"x"), 0, b"x")]
    items += [(b"large", version_of(b"x"), 0, bytes(BLOCK_BYTES + 1))]
    payload = content(60, 20_000)
    for n in range(3):
        items.append((b"equal/%d" % n, version_of(payload, ino=n), 0, payload))
    items += [items[-1], items[-2], items[2], items[2]]  # the very same files once more
    for n in range(3):  # one file in three versions; then the second content under another name
        payload = content(70 + n, 5000)
        items.append((b"rewritten", version_of(payload, ino=n), 0, payload))
    items.append((b"late", version_of(b"late"), 0, content(71, 5000)))
    return items


def test_a_batch_is_as_good_as_putting_one_by_one(store: Opened, tmp_path: Path) -> None:
    with opened(tmp_path / "other", digest=store.settings.digest) as other:
        for items in (an_odd_batch(), an_odd_batch()[::-1], an_odd_batch()):
            found, expected = store.store.put_many(DATASET, items), one_by_one(other, items)
            assert [at and at[1:] for at in found] == [at and at[1:] for at in expected]
            for path, version, block, _ in items:
                here, there = store.find(path, version, block), other.find(path, version, block)
                assert (here and here[1:]) == (there and there[1:])
                if here is not None and there is not None:
                    assert store.read(here) == other.read(there) is not None
        assert store.store.usage().blocks == other.store.usage().blocks
        store.close()
        other.close()
        lengths = [[path.stat().st_size for path in s.segments()] for s in (store, other)]
        assert lengths[0] == lengths[1]
    for file in (store.directory / "index").glob("*.db*"):
        file.unlink()
    with opened(store.directory, digest=store.settings.digest) as again:
        for path, version, block, payload in an_odd_batch()[:14]:
            assert again.get(path, version, block) == payload
        assert again.bad_after_verify()[1] == 0
        check_invariants(again)


def test_a_file_changed_and_changed_back_in_one_batch(store: Opened) -> None:
    first, second = content(1, 5000), content(2, 6000)
    location = store.put(b"f", first)
    assert store.put_many([(b"f", second), (b"f", first)])[1] == location
    assert store.find(b"f", version_of(first)) == location
    assert store.find(b"f", version_of(second)) is None


def test_an_empty_batch(store: Opened) -> None:
    assert store.put_many([]) == []
    assert store.put_many([(b"empty", b"")]) == [None]
    assert store.segments() == []


def test_a_batch_of_several_segments(store: Opened) -> None:
    files = {b"f%d" % n: content(n, 700_000) for n in range(30)}
    found = store.put_many(files.items())
    places = [at for at in found if at is not None]
    assert len(places) == 30
    assert len({at.segno for at in places}) == len(store.segments()) == 3
    for (path, payload), location in zip(files.items(), found, strict=True):
        assert store.find(path, version_of(payload)) == location
        assert store.get(path, version_of(payload)) == payload


def test_a_batch_of_small_files_is_one_write_and_is_known_after_it(
    store: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put(b"first", b"first")  # the segment is there
    files = {b"f%d" % n: content(n, 10_000) for n in range(128)}
    real, lengths = os.pwrite, list[int]()

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        assert all(store.find(path, version_of(payload)) is None for path, payload in files.items())
        lengths.append(len(data))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert None not in store.put_many(files.items())
    assert lengths == [fmt.align(512 + 128 * 10_240)]
    assert all(store.get(path, version_of(payload)) for path, payload in files.items())


def test_a_deduplicated_file_survives_the_index(store: Opened) -> None:
    payload = content(4, 50_000)
    store.put(b"one", payload)
    store.put(b"dir/two", payload, version_of(payload, ino=8))
    store.close()
    for path in (store.directory / "index").glob("*.db*"):
        path.unlink()
    with opened(store.directory, digest=store.settings.digest) as again:
        assert again.get(b"one", version_of(payload)) == payload
        assert again.get(b"dir/two", version_of(payload, ino=8)) == payload


def test_lookup_directory_lists_single_block_files(store: Opened) -> None:
    for n in range(2500):
        store.put(b"dir/%04d" % n, b"%d" % n)
    store.put(b"dir/sub/deeper", b"deeper")
    store.put(b"top", b"top")
    big = version_of(bytes(BLOCK_BYTES + 1))
    store.put(b"dir/big", bytes(BLOCK_BYTES), big)
    for _ in range(2):
        found = {n: (v, at) for n, v, at in store.store.lookup_directory(DATASET, b"dir")}
        assert set(found) == {b"%04d" % n for n in range(2500)}
        for name, (version, location) in list(found.items())[::500]:
            assert version == version_of(b"%d" % int(name))
            assert store.read(location) == b"%d" % int(name)
        store.store.flush()
    assert [n for n, *_ in store.store.lookup_directory(DATASET, b"")] == [b"top"]
    assert list(store.store.lookup_directory(OTHER, b"dir")) == []


def test_quarantine_forgets_every_file_of_the_record(store: Opened) -> None:
    payload, other = content(5, 1000), content(6, 1000)
    location = store.put(b"one", payload)
    store.put(b"two", payload)
    store.put(b"other", other)
    assert location is not None
    store.store.quarantine(location.segno, location.offset)
    assert store.find(b"one", version_of(payload)) is None
    assert store.find(b"two", version_of(payload)) is None
    assert store.get(b"other", version_of(other)) == other
    store.store.housekeeping()
    assert store.find(b"one", version_of(payload)) is None
    assert store.store.usage().blocks == 1
    again = store.put(b"one", payload)
    assert again is not None
    assert again != location
    assert store.get(b"one", version_of(payload)) == payload


def test_verify_of_one_dataset(store: Opened) -> None:
    for n in range(30):
        store.put(b"f%d" % n, b"%d" % n)
        store.store.put(OTHER, b"f%d" % n, Version(n, 3, 0, 0), 0, b"%d" % (n // 2))
    assert store.bad_after_verify(None) == (30, 0)
    assert store.bad_after_verify(DATASET) == (30, 0)
    assert store.bad_after_verify(OTHER) == (15, 0)
    assert store.bad_after_verify(bytes(16)) == (0, 0)


def test_the_directory_is_private(store: Opened) -> None:
    store.put(b"a", b"a")
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
    for folder, _, names in os.walk(store.directory):
        for name in names:
            assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) & 0o077 == 0


def test_lookups_from_many_threads_while_putting(store: Opened) -> None:
    files = {b"f%d" % n: content(n, 2000) for n in range(201)}
    wrong: list[bytes] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            for path, payload in list(files.items())[::37]:
                found = store.get(path, version_of(payload))
                if found not in (None, payload):
                    wrong.append(path)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for path, payload in files.items():
        assert store.put(path, payload) is not None
        if path.endswith(b"00"):
            store.store.housekeeping()
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert all(store.get(path, version_of(payload)) == payload for path, payload in files.items())


# ---- capacity ------------------------------------------------------------------------------------
def test_the_segment_fetched_longest_ago_goes_first(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=40 * MIB) as store:
        files = {b"f%03d" % n: content(n, MIB) for n in range(60)}
        first = b"f000"
        for path, payload in files.items():
            assert store.put(path, payload) is not None
            # Fetched again, the first file's segment is not the oldest any more.
            assert store.put(first, files[first]) is not None
            check_invariants(store)
        present = [p for p, payload in files.items() if store.find(p, version_of(payload))]
        assert first in present
        # Its segment stayed, with the neighbours it was fetched with; else the newest are here.
        recent = present[7:]
        assert present[:7] == list(files)[:7]
        assert recent == list(files)[-len(recent) :]
        assert 28 <= len(present) < 40
        assert store.gone
        assert store.faults == []
        assert all(store.get(path, version_of(files[path])) == files[path] for path in present)


def test_keep_never_replaces(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=24 * MIB, policy="keep") as store:
        files = {b"f%03d" % n: content(n, MIB) for n in range(40)}
        results = {path: store.put(path, payload) for path, payload in files.items()}
        stored = [path for path, location in results.items() if location is not None]
        assert stored == list(files)[: len(stored)]
        assert 7 <= len(stored) < 24
        store.store.housekeeping()
        assert all(store.get(path, version_of(files[path])) == files[path] for path in stored)
        assert store.gone == []
        assert store.faults == []
        check_invariants(store)


def test_a_batch_larger_than_the_cache(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=24 * MIB) as store:
        files = {b"f%02d" % n: content(n, MIB) for n in range(60)}
        store.put(b"f50", files[b"f50"])  # will be evicted before its turn comes
        found = store.put_many(files.items())
        for (path, payload), location in zip(files.items(), found, strict=True):
            assert store.find(path, version_of(payload)) == location
            assert location is None or store.read(location) == payload
        stored = [path for path, at in zip(files, found, strict=True) if at is not None]
        assert stored == list(files)[-len(stored) :]
        assert 8 <= len(stored) < 24
        assert store.faults == []
        check_invariants(store)


def test_a_batch_that_fills_the_cache_under_keep(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=24 * MIB, policy="keep") as store:
        files = {b"f%02d" % n: content(n, MIB) for n in range(40)}
        found = store.put_many([*files.items(), (b"again", files[b"f00"])])
        stored = [path for path, at in zip(files, found[:-1], strict=True) if at is not None]
        assert stored == list(files)[: len(stored)]
        assert 7 <= len(stored) < 24
        assert found[-1] == found[0], "a deduplicated block needs no room"
        assert store.gone == []
        assert store.faults == []
        check_invariants(store)


def test_what_must_not_evict_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=40 * MIB) as store:
        files = [(b"f%03d" % n, content(n, MIB)) for n in range(60)]
        found = store.put_many(files, evict=False)
        kept = [file for file, at in zip(files, found, strict=True) if at is not None]
        assert kept == files[: len(kept)]
        assert len(kept) > 20
        assert store.gone == []
        # The end of the open segment is still there for smaller ones, and duplicates need no room.
        assert store.put_many([(b"small", b"small"), (b"again", files[0][1])], evict=False) == [
            store.find(b"small", version_of(b"small")),
            found[0],
        ]
        assert store.put(b"small", b"small") is not None
        assert all(store.get(path, version_of(payload)) == payload for path, payload in kept)
        # Refusing does not stop those who may evict.
        rest = files[len(kept) :]
        assert None not in store.put_many(rest)
        assert store.gone
        assert store.faults == []
        check_invariants(store)
    with opened(tmp_path / "cache", limit_bytes=40 * MIB) as store:  # full, and no open segment
        count = 0
        fill = ((b"x%d" % n, content(200 + n, MIB // 2)) for n in range(80))
        assert any(store.put_many([file], evict=False) == [None] for file in fill)
        while store.put_many([(b"y%d" % count, os.urandom(256))], evict=False) != [None]:
            count += 1
        count = len(store.segments())
        assert store.put_many([(b"x", content(100, MIB)), (b"y", b"y")], evict=False) == [None] * 2
        assert store.store.full_disk_bytes() is None  # its own limit is why
        assert len(store.segments()) == count
        assert store.gone == []
        assert store.put(b"x", content(100, MIB)) is not None
        assert store.gone
        assert store.faults == []


@pytest.mark.parametrize(
    ("size", "policy"),
    [(500, "lrf"), (10_000, "keep"), (110_000, "lrf"), (110_000, "keep"), (BLOCK_BYTES, "lrf")],
)
def test_room_is_what_can_still_be_stored(tmp_path: Path, size: int, policy: str) -> None:
    limit = (56 if size >= 10_000 else 36) * MIB
    with opened(tmp_path / "cache", limit_bytes=limit, policy=policy) as store:
        room = store.store.room_bytes()
        assert room < limit
        stored = promised = early = number = 0
        batch = max(1, min(100, MIB // size))
        while True:
            files = [(b"f%d" % n, content(n, size)) for n in range(number, number + batch)]
            found = store.put_many(files, evict=False)
            number += batch
            fresh = sum(at is not None for at in found) * size
            # What was said is kept, from when the store has seen what sizes come.
            assert fresh >= min(room, batch * size) // size * size or stored == 0
            stored += fresh
            if room >= batch * size:
                promised = stored
            if None in found:
                break
            room = store.store.room_bytes()
            early = early or stored + room
        assert 0.6 * stored <= early <= stored
        assert promised >= 0.6 * stored
        assert stored > (25 if size >= 10_000 else 3) * MIB
        assert store.store.room_bytes() < 2 * MIB
        assert store.gone == []
        assert store.faults == []
        check_invariants(store)


def test_a_block_takes_a_segment_where_the_open_one_is_full(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        segments = 0
        for n in range(20):
            before, taken = store.store.usage().reserved_bytes, store.store.taken_bytes(3 * MIB)
            assert store.put(b"f%d" % n, content(n, 3 * MIB)) is not None
            more = store.store.usage().reserved_bytes - before
            is_new = taken > 8 * MIB
            rows_bytes = 1 * MIB  # at most: the index grows by pages when its log is written back
            assert more <= (taken if is_new else rows_bytes)
            segments += is_new
        assert segments == 10


def test_room_is_shared_and_ends_with_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache") as one, opened(tmp_path / "cache") as two:
        empty = two.store.room_bytes()
        one.put_many([(b"f%d" % n, content(n, MIB)) for n in range(20)])
        assert two.store.room_bytes() <= empty - 10 * MIB
        full = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 0))
        monkeypatch.setattr(os, "statvfs", lambda _: full)
        assert two.store.room_bytes() == 0
        assert two.store.full_disk_bytes() == 0
        assert 0 < one.store.room_bytes() < 8 * MIB  # the rest of its open segment
        assert one.store.full_disk_bytes() is None
    assert one.store.room_bytes() == 0  # closed


def test_a_deduplicated_block_needs_no_room(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=12 * MIB, policy="keep") as store:
        payload = content(1, MIB)
        store.put(b"a", payload)
        while store.put(b"fill%d" % store.store.usage().blocks, os.urandom(MIB)) is not None:
            pass
        store.end_pause()
        assert store.put(b"b", payload) is not None
        assert store.get(b"b", version_of(payload)) == payload


def test_a_limit_below_the_index_holds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=200 << 10) as store:
        assert store.put(b"a", b"a") is None
        assert disk_bytes(store.directory) <= 200 << 10
        assert store.faults == []
    with opened(tmp_path / "cache", limit_bytes=MIB) as store:
        assert store.put(b"a", content(1, 200_000)) is not None
        assert disk_bytes(store.directory) <= MIB
        assert store.faults == []


def test_a_lowered_limit_evicts_also_under_keep(tmp_path: Path) -> None:
    files = {b"f%03d" % n: content(n, MIB) for n in range(50)}
    with opened(tmp_path / "cache", limit_bytes=100 * MIB) as store:
        for path, payload in files.items():
            store.put(path, payload)
    with opened(tmp_path / "cache", limit_bytes=30 * MIB, policy="keep") as store:
        check_invariants(store)
        assert store.find(b"f000", version_of(files[b"f000"])) is None
        assert store.get(b"f049", version_of(files[b"f049"])) == files[b"f049"]


def test_keep_free_evicts_also_under_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache", policy="keep", keep_free_bytes=100 * MIB) as store:
        for n in range(20):
            store.put(b"f%d" % n, content(n, MIB))
        assert len(store.segments()) == 3
        free = 90 * MIB

        def statvfs(_: object) -> os.statvfs_result:
            room = free + (3 - len(store.segments())) * 8 * MIB
            return os.statvfs_result((4096, 4096, 0, 0, room // 4096, 0, 0, 0, 0, 0))

        monkeypatch.setattr(os, "statvfs", statvfs)
        store.store.housekeeping()
        assert len(store.segments()) == 1
        check_invariants(store)
        free = 0
        for _ in range(3):
            store.store.housekeeping()
        assert store.segments() == []
        store.end_pause()
        assert store.put(b"more", b"more") is None
        assert store.kinds == {"disk-full"}


def test_segment_numbers_are_never_used_again(tmp_path: Path) -> None:
    seen: set[int] = set()
    for turn in range(4):
        with opened(tmp_path / "cache", limit_bytes=20 * MIB) as store:
            for n in range(25):
                location = store.put(b"f", content(100 * turn + n, MIB))
                assert location is not None
            fresh = {int(path.stem) for path in store.segments()} - seen
            assert all(number > max(seen, default=0) for number in fresh)
            seen |= fresh | set(store.gone)
        for path in (store.directory / "segments").iterdir():
            path.unlink()
        if turn % 2:
            for path in (store.directory / "index").glob("*.db"):
                path.unlink()


# ---- opening -------------------------------------------------------------------------------------
def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "cache"):
        pass
    line = (tmp_path / "cache/format").read_bytes()
    (tmp_path / "cache/format").write_bytes(line.replace(b"fusecache 1 ", b"fusecache 7 "))
    with pytest.raises(UserError, match=r"was written by a newer fusecache \(format 7"):
        Opened(tmp_path / "cache")


def test_another_digest_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "cache"):
        pass
    with pytest.raises(UserError, match="xxh3-128, not blake3"):
        Opened(tmp_path / "cache", digest="blake3")
    with pytest.raises(UserError, match="unknown digest"):
        Opened(tmp_path / "cache", digest="md5")


def test_blake3_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "blake3", None)  # as if it were not installed
    with opened(tmp_path / "cache"):
        pass
    with pytest.raises(UserError, match="pip install blake3"):
        Opened(tmp_path / "other", digest="blake3")


def test_exclusive_use_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr("fusecache.store.directory.joining._LOCK_SECONDS", 0.1)
    with opened(tmp_path / "cache"):
        pass
    with open(tmp_path / "cache/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="exclusively"):
            Opened(tmp_path / "cache")


def test_what_cannot_be_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file/below", Path("/proc/none")):
        with pytest.raises(UserError, match="cannot use cache directory"):
            Opened(path)


def test_no_parent_of_a_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it does not exist"):
        Opened(tmp_path / "disk/cache")
    with opened(tmp_path / "one", further=[tmp_path / "disk/cache"]) as store:
        (two,) = [state for state in store.store.directories() if state.why_out]
        assert two.path == str(tmp_path / "disk/cache")
    assert not (tmp_path / "disk").exists()


def test_a_deleted_directory_is_made_again_unless_its_parent_is_gone(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    with opened(parent / "cache") as store:
        store.put(b"a", b"a")
        shutil.rmtree(parent / "cache")
        store.store.housekeeping()
        assert [state.why_out for state in store.store.directories()] == [""]
        store.put(b"a", b"a")
        parent.rename(tmp_path / "away")
        for _ in range(2):
            store.store.housekeeping()
        assert not parent.exists()
        assert store.get(b"a", version_of(b"a")) is None
        assert store.faults[-1] == (
            "missing",
            f"nothing is cached until cache directory {parent / 'cache'} can be used:"
            " it does not exist (is its disk mounted?)",
        )
        assert len(store.faults) == 3  # deleted twice, and once that it is not there
        assert store.store.directories()[0].why_out == "it does not exist (is its disk mounted?)"
        (tmp_path / "away").rename(parent)
        store.store.housekeeping()
        assert store.get(b"a", version_of(b"a")) == b"a"


def test_a_directory_with_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    tmp_path.chmod(0o755)
    with pytest.raises(UserError, match="holds other files"), opened(tmp_path):
        pass
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_lost_format_file_comes_back_from_the_segments(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        store.put(b"a", b"a")
    line = (tmp_path / "cache/format").read_bytes()
    for damaged in (None, b"", b"garbage", line[:20] + b"?" + line[21:]):
        if damaged is None:
            (tmp_path / "cache/format").unlink()
        else:
            (tmp_path / "cache/format").write_bytes(damaged)
        with opened(tmp_path / "cache") as store:
            assert store.get(b"a", version_of(b"a")) == b"a"
        assert (tmp_path / "cache/format").read_bytes() == line


def test_segments_are_preallocated_then_cut(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        store.put(b"a", content(1, 10_000))
        (path,) = store.segments()
        assert path.stat().st_size == fmt.segment_bytes(64 * MIB)
        assert path.stat().st_blocks * 512 >= path.stat().st_size
    assert path.stat().st_size == 4096 + 12288
    with opened(tmp_path / "cache") as store:
        assert store.get(b"a", version_of(content(1, 10_000))) is not None
        store.store.put(DATASET, b"b", Version(1, 1, 1, 1), 0, b"b")
        assert len(store.segments()) == 2


def test_inode_number_0_does_not_count(tmp_path: Path) -> None:
    """Of an origin whose numbers mean nothing; rows from before that was known match."""
    of, without = Version(7, 1, 20, 30), Version(0, 1, 20, 30)
    with opened(tmp_path) as store:
        store.put(b"d/before", b"b", of)
        store.put(b"d/after", b"a", without)
    with opened(tmp_path) as store:
        for version in (of, without):
            assert store.get(b"d/before", version) == b"b"
            assert store.get(b"d/after", version) == b"a"
        for version in (Version(8, 1, 20, 30), without._replace(ctime_ns=31)):
            assert store.get(b"d/before", version) is None
        assert store.get(b"d/after", without._replace(mtime_ns=21)) is None
