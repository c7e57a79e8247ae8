"""A file is led to a block that came from another path: found by its digest, not written again."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from fusecache.base.digest import ALGORITHMS, digest
from fusecache.store import index as idx
from fusecache.store.types import Location
from tests.support.store_support import DATASET, MIB, Opened, content, opened, version_of

OTHER = b"fedcba9876543210"
XXH3 = ALGORITHMS["xxh3-128"]


def link(store: Opened, path: bytes, payload: bytes, length: int | None = None) -> Location | None:
    """As a mount's source does."""
    at = store.store.lookup_block(digest(XXH3, payload), length or len(payload))
    if at is not None:
        store.store.link(OTHER, path, version_of(payload), 0, at)
    return at


def has(store: Opened, payload: bytes) -> bool:
    return store.store.lookup_block(digest(XXH3, payload), len(payload)) is not None


def found(store: Opened, path: bytes, payload: bytes) -> Location | None:
    return store.store.lookup(OTHER, path, version_of(payload), 0)


def test_it_is_found_by_its_digest_and_known_from_then_on(tmp_path: Path) -> None:
    payload = content(1, 100_000)
    with opened(tmp_path / "cache") as store:
        at = store.put(b"first", payload)
        assert store.store.lookup_block(digest(XXH3, payload), len(payload)) == at
        assert found(store, b"second", payload) is None
        assert link(store, b"second", payload) == at
        assert found(store, b"second", payload) == at
        assert at is not None
        assert store.read(at) == payload
        assert not store.faults
    with opened(tmp_path / "cache") as store:  # the row was committed
        assert found(store, b"second", payload) == at
        assert store.store.usage().blocks == 1


def test_what_is_not_stored_or_has_another_length_is_not_linked(tmp_path: Path) -> None:
    payload, other = content(1, 100_000), content(2, 100_000)
    with opened(tmp_path / "cache") as store:
        store.put(b"first", payload)
        assert link(store, b"second", other) is None
        assert not has(store, other)
        assert link(store, b"second", payload, 99_999) is None
        assert found(store, b"second", payload) is None
        assert not store.faults


def test_what_a_row_says_is_compared_with_the_record(tmp_path: Path) -> None:
    """A row from before a power cut may lead to what was written there since."""
    payload, other = content(1, 100_000), content(2, 100_000)
    with opened(tmp_path / "cache") as store:
        at = store.put(b"first", payload)
        assert at is not None
        assert store.index is not None
        store.index.insert([], [idx.block_row(digest(XXH3, other), at)])
        assert not has(store, other)
        assert has(store, payload)


@pytest.mark.parametrize("how", ["header", "gone", "cut"])
def test_a_block_that_is_bad_or_gone_is_not_linked(tmp_path: Path, how: str) -> None:
    payload = content(1, 100_000)
    with opened(tmp_path / "cache") as store:
        at = store.put(b"first", payload)
        assert at is not None
        store.seal()
        (segment,) = store.segments()
        if how == "gone":
            segment.unlink()
        elif how == "cut":
            os.truncate(segment, at.offset)
        else:
            with open(segment, "r+b") as file:
                file.seek(at.offset + 20)
                file.write(b"x")
        assert link(store, b"second", payload) is None
        assert found(store, b"second", payload) is None
        if how == "header":
            assert store.put(b"second", payload) != at
            assert link(store, b"third", payload) is not None


def test_a_bad_payload_is_quarantined_for_both(tmp_path: Path) -> None:
    payload = content(1, 100_000)
    with opened(tmp_path / "cache") as store:
        at = store.put(b"first", payload)
        assert at is not None
        (segment,) = store.segments()
        with open(segment, "r+b") as file:
            file.seek(at.offset + at.header_len + 5)
            file.write(b"xxx")
        assert link(store, b"second", payload) == at
        assert store.read(at) is None
        assert not has(store, payload)
        assert link(store, b"third", payload) is None
        store.store.housekeeping()
        assert found(store, b"second", payload) is None


def test_a_row_waits_for_no_lock(tmp_path: Path) -> None:
    """Whoever holds it, commits it."""
    payload = content(1, 100_000)
    with opened(tmp_path / "cache") as store:
        at = store.put(b"first", payload)
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with store.store._attachment.lock:
                held.set()
                over.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        try:
            assert held.wait(60)
            for number in range(600):
                assert link(store, b"%d" % number, payload) == at
                assert found(store, b"%d" % number, payload) == at
        finally:
            over.set()
            thread.join()
    with opened(tmp_path / "cache") as store:
        assert found(store, b"599", payload) == at


def test_a_linked_block_counts_as_fetched_now(tmp_path: Path) -> None:
    """By lrf the segment fetched longest ago goes: a linked one is younger than that."""
    kept = content(0, MIB)
    with opened(tmp_path / "cache", limit_bytes=32 * MIB) as store:
        store.put(b"first", kept)
        store.seal()
        for number in range(1, 100):
            store.put(b"%d" % number, content(number, MIB))
            assert link(store, b"second", kept) is not None
        assert store.gone


def test_a_rebuilt_index_does_not_know_it_and_nothing_is_wrong(tmp_path: Path) -> None:
    payload = content(1, 100_000)
    with opened(tmp_path / "cache") as store:
        at = store.put(b"first", payload)
        assert link(store, b"second", payload) == at
    for path in (tmp_path / "cache/index").glob("*.db*"):
        path.unlink()
    with opened(tmp_path / "cache") as store:
        assert store.find(b"first", version_of(payload)) is not None
        assert found(store, b"second", payload) is None
        assert link(store, b"second", payload) is not None


def test_where_there_is_no_room_for_rows_it_is_found_all_the_same(tmp_path: Path) -> None:
    """But not kept in the index: the limit holds."""
    payload = content(0, 60_000)
    with opened(tmp_path / "cache", limit_bytes=16 * MIB, policy="keep") as store:
        at = store.put(b"first", payload)
        number = 0
        while store.store.room_bytes() > 0 and number < 20_000:
            number += 1
            store.put(b"%d" % number, content(number, 20_000))
        for number in range(30_000):
            path = b"%d" % number + b"x" * 200
            assert link(store, path, payload) == at
            if found(store, path, payload) is None:
                break
        else:
            pytest.fail("there was room for each row")
        assert store.store.usage().reserved_bytes <= 16 * MIB
        assert not store.faults


def test_without_a_directory_nothing_is_linked(tmp_path: Path) -> None:
    payload = content(1, 1000)
    with opened(tmp_path / "cache") as store:
        store.put(b"first", payload)
        shutil.rmtree(tmp_path / "cache")
        store.suspect()
        store.store.housekeeping()
        assert not has(store, payload)
        assert link(store, b"second", payload) is None
    assert not has(store, payload)
    assert link(store, b"second", payload) is None
    assert DATASET != OTHER
