"""Files are evicted one by one: their room is free at once, what lies beside them stays, and nobody
takes what was punched for damage.
"""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash

from fusecache.base import digest
from fusecache.store import Location, Version, capacity, gc, housekeeping
from fusecache.store.index import SegmentRow, block_row, file_row, segment_values
from fusecache.store.segment import holes
from fusecache.store.types import BLOCK_BYTES
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

Files = dict[bytes, bytes]


def fill(store: Opened, count: int = 120, size: int = 100_000, seed: int = 0) -> Files:
    """Of sizes that end anywhere in a page; in sealed segments."""
    files = {b"d/%d" % n: content(seed + n, size + 613 * (n % 50)) for n in range(count)}
    for path, payload in files.items():
        assert store.put(path, payload) is not None
    store.seal()
    return files


def evict(store: Opened, files: Files, paths: Sequence[bytes]) -> list[bool]:
    """Of each, whether it is gone."""
    found, _ = store.store.evict(DATASET, [(path, version_of(files[path])) for path in paths])
    return [places is not None for places in found]


def taken(store: Opened) -> int:
    """By the segments, on disk."""
    return sum(path.stat().st_blocks * 512 for path in store.segments())


def reserved(store: Opened) -> int:
    """For the segments, in the index."""
    index = store.index
    assert index is not None
    return sum(row.reserved for row in index.segments.all())


def check(store: Opened, files: Files, gone: Sequence[bytes]) -> None:
    for path, payload in files.items():
        expected = None if path in gone else payload
        assert (store.find(path, version_of(payload)) is None) == (path in gone), path
        assert store.get(path, version_of(payload)) == expected, path
    assert store.faults == []
    assert store.bad_after_verify()[1] == 0
    check_invariants(store)


def whole_pages(places: list[Location]) -> int:
    """That these records cover alone, in bytes."""
    return sum(
        (at.offset + at.header_len + at.payload_len) // 4096 * 4096 - -(-at.offset // 4096) * 4096
        for at in places
    )


@pytest.mark.parametrize("size", [300, 5_000, 100_000])
def test_what_is_evicted_is_free_at_once_and_the_rest_stays(tmp_path: Path, size: int) -> None:
    with opened(tmp_path / "cache") as store:
        files = fill(store, size=size)
        gone = random.Random(1).sample(sorted(files), 60)
        places = [store.find(path, version_of(files[path])) for path in gone]
        before = taken(store)
        assert reserved(store) == before
        assert evict(store, files, gone) == [True] * 60
        freed = before - taken(store)
        assert freed >= whole_pages([at for at in places if at is not None])
        assert reserved(store) == taken(store)
        assert store.store.evicted_bytes() == freed
        check(store, files, gone)
        for path in gone:
            assert store.put(path, files[path]) is not None
        check(store, files, [])


def test_neighbours_give_back_the_page_they_share(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        files = fill(store, 9, size=6_000)
        for path in files:
            evict(store, files, [path])
        assert taken(store) == 4096 * len(store.segments())
        check(store, files, list(files))
        assert store.store.logs.unused()[1], "nothing leads there: it may go"


def test_a_full_cache_takes_others_at_once_and_no_segment_goes(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=32 * MIB, policy="lrf") as store:
        files: Files = {}
        while True:
            path, payload = b"d/%d" % len(files), content(len(files), 90_000)
            if store.put_many([(path, payload)], evict=False) == [None]:
                break
            files[path] = payload
        gone = [p for p in files if evict(store, files, [p]) == [True]][: len(files) // 2]
        lost = [p for p in files if store.find(p, version_of(files[p])) is None]
        assert len(lost) > len(files) * 3 // 4, "all but those in the segment that is written"
        others = {b"e/%d" % n: content(5000 + n, 90_000) for n in range(len(gone))}
        found = [store.put_many([item], evict=False)[0] for item in others.items()]
        assert None not in found
        assert store.gone == []
        check(store, {p: files[p] for p in files if p not in lost} | others, [])


def test_what_stays(tmp_path: Path) -> None:
    """What is in the open segment, what is shared, another version, and all of it under `keep`."""
    with opened(tmp_path / "cache") as store:
        files = fill(store, 10)
        twin = files[b"twin"] = files[b"d/3"]
        assert store.put(b"twin", twin) is not None
        files[b"open"] = content(77, 50_000)
        assert store.put(b"open", files[b"open"]) is not None
        assert evict(store, files, [b"d/3", b"twin", b"open", b"d/4"]) == [True, True, False, True]
        check(store, files, [b"d/3", b"twin", b"d/4"])
        files[b"twin"] = files[b"d/5"]
        assert store.put(b"twin", files[b"twin"]) is not None
        assert evict(store, files, [b"d/5"]) == [False]
        assert evict(store, files, [b"twin"]) == [False]
        other = version_of(files[b"d/6"], ino=8)
        assert store.store.evict(DATASET, [(b"d/6", other), (b"none", other)])[0] == [[], []]
        check(store, files, [b"d/3", b"d/4"])
    with opened(tmp_path / "cache", policy="keep") as store:
        assert not store.store.can_evict()
        assert evict(store, files, [b"d/6"]) == [False]
        check(store, files, [b"d/3", b"d/4"])


def test_of_a_large_file_all_blocks_go_or_none(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        blocks = [content(n, BLOCK_BYTES) for n in range(3)]
        version = Version(7, 3 * BLOCK_BYTES, 1, 2)
        for number, payload in enumerate(blocks):
            assert store.put(b"large", payload, version, number) is not None
        shared = Version(8, BLOCK_BYTES, 1, 2)
        assert store.put(b"other", blocks[1], shared) is not None
        store.seal()
        assert store.store.evict(DATASET, [(b"large", version)]) == ([None], 0)
        assert [store.get(b"large", version, n) for n in range(3)] == blocks
        found, freed = store.store.evict(DATASET, [(b"large", version), (b"other", shared)])
        assert [[number for number, _ in places or []] for places in found] == [[0, 1, 2], [0]]
        assert freed >= 3 * BLOCK_BYTES
        assert store.get(b"large", version, 1) is None


def test_what_shares_a_block_with_what_stays(tmp_path: Path) -> None:
    """All the way: of the last of them a block is in the open segment."""
    with opened(tmp_path / "cache") as store:
        blocks = [content(n, BLOCK_BYTES) for n in range(4)]
        versions = [Version(n, 2 * BLOCK_BYTES, 1, 2) for n in range(3)]
        for number in range(4):
            if number == 3:
                store.seal()
            for n, path in enumerate((b"one", b"two", b"three")):
                if n <= number <= n + 1:
                    assert store.put(path, blocks[number], versions[n], number - n) is not None
        names = list(zip((b"one", b"two", b"three"), versions, strict=True))
        assert store.store.evict(DATASET, names) == ([None] * 3, 0)
        for n, (path, version) in enumerate(names):
            assert [store.get(path, version, k) for k in range(2)] == blocks[n : n + 2]


def test_a_new_index_knows_what_is_left_and_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache") as store:
        files = fill(store)
        gone = sorted(files)[::2]
        evict(store, files, gone)
        before = reserved(store)
    for path in (tmp_path / "cache/index").glob("*.db*"):
        path.unlink()
    monkeypatch.setattr(housekeeping, "tidy", lambda *_: None)  # it would be mended a moment later
    with opened(tmp_path / "cache") as store:
        check(store, files, gone)
        assert reserved(store) == taken(store) <= before


def test_a_row_of_an_earlier_version_is_counted_anew(tmp_path: Path) -> None:
    """Which takes a segment to be as large as its file."""
    with opened(tmp_path / "cache") as store:
        files = fill(store)
        evict(store, files, sorted(files)[::2])
        before = store.store.usage()
        index = store.index
        assert index is not None
        rows = index.segments.all()
        assert all(row.holes for row in rows)
        index.segments.put([row._replace(reserved=row.length, holes=0) for row in rows])
        assert store.store.usage().reserved_bytes > before.reserved_bytes
        store.suspect()
        store.store.housekeeping()
        assert store.store.usage() == before
        check(store, files, sorted(files)[::2])


def test_to_earlier_versions_a_segment_with_holes_is_a_sealed_one_of_its_length() -> None:
    segno, sealed, reserved, fetched_ns, row_sum = segment_values(
        SegmentRow(5, True, 3 * 4096, 1_700_000_000_000_000_000, holes=7 * 4096)
    )
    packed = struct.pack("<4Q", segno, sealed, reserved, fetched_ns)
    assert xxhash.xxh3_64_intdigest(packed) == row_sum & (1 << 64) - 1
    assert bool(sealed)
    assert reserved == 10 * 4096
    whole = SegmentRow(5, True, 4096, 1)
    assert segment_values(whole)[:4] == (5, 1, 4096, 1)


@pytest.mark.parametrize("is_punched", [False, True])
def test_killed_while_evicting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_punched: bool
) -> None:
    with opened(tmp_path / "cache") as store:
        files = fill(store)
        before = reserved(store)
    gone = sorted(files)[::2]
    pid = os.fork()
    if pid == 0:
        real = holes.punch

        def punch_and_die(path: Path, ranges: set[tuple[int, int | None]]) -> int:
            if is_punched:
                real(path, ranges)
            os._exit(3)

        monkeypatch.setattr(capacity, "punch", punch_and_die)
        evict(Opened(tmp_path / "cache"), files, gone)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    with opened(tmp_path / "cache") as store:
        lost = [p for p in files if store.find(p, version_of(files[p])) is None]
        check(store, files, lost)
        assert bool(lost) == is_punched
        assert set(lost) <= set(gone)
        assert reserved(store) == taken(store)
        assert (reserved(store) < before) == is_punched
        evict(store, files, gone)
        check(store, files, gone)


def test_what_was_found_by_its_digest_and_evicted_meanwhile(tmp_path: Path) -> None:
    """By another process, which does not know of the row yet."""
    with opened(tmp_path / "cache") as one, opened(tmp_path / "cache") as two:
        files = fill(one, 20)
        payload = files[b"d/7"]
        two.store.flush()
        location = two.put(b"twin", payload)
        assert location is not None
        if one.find(b"twin", version_of(payload)) is None:  # it waits for its commit
            assert evict(one, files, [b"d/7"]) == [True]
            two.store.flush()
            assert one.find(b"twin", version_of(payload)) is None
            assert two.find(b"twin", version_of(payload)) is None
        assert two.put(b"twin", payload) is not None
        assert two.get(b"twin", version_of(payload)) == payload
        assert one.faults == two.faults == []


def test_a_location_that_somebody_holds_is_a_miss(tmp_path: Path) -> None:
    """Nor is a row that leads there: the next put replaces it."""
    with opened(tmp_path / "cache") as one, opened(tmp_path / "cache") as two:
        files = fill(one, 20)
        path = b"d/7"
        version = version_of(files[path])
        held = two.find(path, version)
        assert held is not None
        assert evict(one, files, [path]) == [True]
        assert held.offset % 4096, "its header is in a page of its neighbour, and is left"
        index = two.index
        assert index is not None
        name = digest.digest(digest.ALGORITHMS["xxh3-128"], files[path])
        index.insert([file_row(DATASET, path, version, 0, held)], [block_row(name, held)])
        fresh = two.put(path, files[path])
        assert fresh is not None
        assert fresh != held
        assert two.get(path, version) == files[path]
        assert list(two.store.check([held])) == []
        check(two, files, [])


def test_gc_compacts_what_evictions_left(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        files = fill(store)
        gone = [path for number, path in enumerate(sorted(files)) if number % 10]
        evict(store, files, gone)
        assert all(use.bytes - use.alive_bytes < 32 * 4096 * 2 for use in gc.survey(store.store))
        gc.compact(store.store)
        check(store, files, gone)


def test_of_segments_with_holes_the_one_that_takes_least_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "HOLED_MOST", 2)
    with opened(tmp_path / "cache") as store:
        files = fill(store, 240)
        places = {path: store.find(path, version_of(files[path])) for path in files}
        segnos = sorted({at.segno for at in places.values() if at is not None})
        assert len(segnos) > 2
        for segno in segnos:
            evict(store, files, [p for p, at in places.items() if at and at.segno == segno][:-1])
        assert len(store.gone) == len(segnos) - 2
        assert store.faults == []
        check_invariants(store)


def test_a_disk_that_cannot_punch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with opened(tmp_path / "cache") as store:
        files = fill(store, 10)
        monkeypatch.setattr(holes, "_punch", refuse)
        assert not store.store.can_evict()
        assert evict(store, files, [b"d/1"]) == [False]
        check(store, files, [])


def test_an_error_of_the_disk_while_punching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache") as store:
        files = fill(store, 10)
        assert store.store.can_evict()

        def fail(path: Path, ranges: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(capacity, "punch", fail)
        assert evict(store, files, [b"d/1"]) == [False]
        assert store.kinds == {"io"}
        assert store.get(b"d/1", version_of(files[b"d/1"])) == files[b"d/1"]


def test_over_several_directories(tmp_path: Path) -> None:
    further = [tmp_path / "two"]
    with opened(tmp_path / "cache", further=further) as store:
        files = fill(store)
        gone = sorted(files)[::2]
        before = disk_bytes(tmp_path)
        assert all(evict(store, files, gone))
        assert before - disk_bytes(tmp_path) > 60 * 90_000
        for path, payload in files.items():
            assert store.get(path, version_of(payload)) == (None if path in gone else payload)


def test_who_found_nothing_to_evict_finds_the_room_that_is_made_then(tmp_path: Path) -> None:
    """All that is stored is pinned: for a second nothing would be tried."""
    with opened(tmp_path / "cache", limit_bytes=16 * MIB) as store:
        files: Files = {}

        def put(number: int) -> bool:
            path, payload = b"d/%d" % number, content(number, 100_000)
            files[path] = payload
            item = (path, version_of(payload), 0, payload)
            pinned = lambda: {row.segno for row in store.index.segments.all()}  # type: ignore[union-attr]  # noqa: E731
            return (
                store.store.put_many(DATASET, [item], evict=True, pinned_by_plan=pinned)[0]
                is not None
            )

        count = next(number for number in range(1000) if not put(number))
        assert store.store.room_bytes() == 0
        gone = [b"d/%d" % number for number in range(20)]
        assert evict(store, files, gone) == [True] * 20
        assert store.store.room_bytes() > 1_500_000
        assert put(count)
