"""What a user has pinned is not evicted, whoever evicts; and the files that say what is pinned."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest

from fusecache.base.trust import Untrusted
from fusecache.store import capacity
from fusecache.store.directory.pin_files import Pinned
from tests.support.store_support import (
    DATASET,
    MIB,
    Opened,
    check_invariants,
    content,
    opened,
    version_of,
)

LIMIT = 64 * MIB
OTHER = b"another dataset!"
Files = dict[bytes, bytes]


def fill(store: Opened, name: bytes, count: int, size: int = MIB) -> Files:
    files = {
        name + b"/%d" % n: content(zlib.crc32(b"%s/%d" % (name, n)), size) for n in range(count)
    }
    for path, payload in files.items():
        store.put(path, payload)
    store.store.flush()
    return files


def left(store: Opened, files: Files) -> int:
    return sum(store.get(path, version_of(payload)) == payload for path, payload in files.items())


def segnos_of(store: Opened, files: Files) -> frozenset[int]:
    places = [store.find(path, version_of(payload)) for path, payload in files.items()]
    return frozenset(at.segno for at in places if at is not None)


def pin(store: Opened, files: Files, dataset: bytes = DATASET) -> None:
    store.store.keep_pins(dataset, Pinned(("*",), segnos_of(store, files)))


@pytest.mark.parametrize("dataset", [DATASET, OTHER])
def test_what_is_pinned_stays_and_the_rest_goes(tmp_path: Path, dataset: bytes) -> None:
    """Of another dataset, too, that nobody has mounted."""
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        mine, old = fill(store, b"mine", 14), fill(store, b"old", 30)
        pin(store, mine, dataset)
        fill(store, b"new", 100)
        assert left(store, mine) == 14
        assert left(store, old) < 10
        check_invariants(store)
        store.store.keep_pins(dataset, Pinned())
        fill(store, b"newer", 60)
        assert left(store, mine) < 14
    assert store.faults == []


def test_pins_are_heeded_by_the_next_process(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        mine = fill(store, b"mine", 14)
        pin(store, mine)
        store.kill()
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        assert store.store.pins_of(DATASET) == Pinned(("*",), segnos_of(store, mine))
        assert store.store.pins_of(OTHER) == Pinned()
        fill(store, b"new", 100)
        assert left(store, mine) == 14


@pytest.mark.parametrize("is_known", [True, False])
def test_where_all_is_pinned_nothing_goes(tmp_path: Path, is_known: bool) -> None:
    """Or where it is not known what is."""
    segnos: set[int] = set()
    answer = segnos if is_known else None
    with opened(tmp_path / "cache", limit_bytes=LIMIT, pinned=lambda: answer) as store:
        files = fill(store, b"all", 70)
        count = left(store, files)
        store.seal()
        segnos |= segnos_of(store, files)
        store.end_pause()
        others = fill(store, b"others", 40, size=4 * MIB)
        assert left(store, files) == count > 30
        assert left(store, others) < 4
        assert store.store.room_bytes(frozenset) < 8 * MIB, "nothing of it can be evicted"
    assert store.faults == [], "a cache that is full of pins is no fault"


def test_a_lower_limit_takes_what_is_pinned_last(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        mine = fill(store, b"mine", 24)
        store.seal()
        others = fill(store, b"others", 30)
        store.seal()
        pin(store, mine)
    with opened(tmp_path / "cache", limit_bytes=36 * MIB) as store:
        assert left(store, mine) == 24
        assert left(store, others) < 10
        check_invariants(store)
    with opened(tmp_path / "cache", limit_bytes=16 * MIB) as store:
        assert left(store, others) == 0
        assert left(store, mine) < 24
        check_invariants(store)


def test_a_saved_table_takes_no_room_of_what_is_pinned(tmp_path: Path) -> None:
    size = LIMIT // 16
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        files = fill(store, b"all", 70)
        store.seal()
        rest = {b"rest/%d" % n: content(n, MIB) for n in range(8)}
        store.put_many(rest.items(), evict=False)
        store.seal()
        files |= rest
        count = left(store, files)
        pin(store, files)
        assert not store.store.save_table(DATASET, size, lambda fd: os.pwrite(fd, b"x", 0))
        assert left(store, files) == count
        store.store.keep_pins(DATASET, Pinned())
        assert store.store.save_table(DATASET, size, lambda fd: os.pwrite(fd, b"x", 0))


def test_too_many_segments_with_holes_take_nothing_that_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "HOLED_MOST", 0)
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        mine = fill(store, b"mine", 5)
        store.seal()
        others = fill(store, b"others", 5)
        store.seal()
        pin(store, mine)
        for files in (mine, others):
            path, payload = next(iter(files.items()))
            store.store.evict(DATASET, [(path, version_of(payload))])
        assert (left(store, mine), left(store, others)) == (4, 0)


def test_a_user_evicts_under_keep_and_a_plan_does_not(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=LIMIT, policy="keep") as store:
        files = fill(store, b"files", 4)
        names = [(path, version_of(payload)) for path, payload in files.items()]
        assert store.store.evict(DATASET, names, by_user=True) == ([None] * 4, 0), "it is open"
        store.store.seal()
        assert store.store.evict(DATASET, names) == ([None] * 4, 0)
        found, freed = store.store.evict(DATASET, names, by_user=True)
        assert all(found)
        assert freed > 3 * MIB
        assert left(store, files) == 0


# ---- files ---------------------------------------------------------------------------------------


def path_of(cache: Path) -> Path:
    return cache / "pins" / DATASET.hex()


def test_what_is_pinned_is_read_as_it_was_written(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        segnos = segnos_of(store, fill(store, b"files", 10))
        globs = ("a b/**", "\udcff", "語")
        assert store.store.living(segnos | {7}) == segnos
        store.store.keep_pins(DATASET, Pinned(globs, segnos))
        assert store.store.pins_of(DATASET) == Pinned(globs, segnos)
        assert path_of(store.directory).stat().st_mode & 0o777 == 0o600
        store.store.keep_pins(DATASET, Pinned((), segnos))
        assert store.store.pins_of(DATASET) == Pinned()
        assert os.listdir(store.directory / "pins") == []


def spoil_version(kept: bytes) -> bytes:
    return kept.replace(b'"version": 1', b'"version": 2')


def spoil_segment(kept: bytes) -> bytes:
    fields = json.loads(kept)
    fields["pins"]["segments"][0] += 1
    return json.dumps(fields).encode()


def test_a_damaged_file_pins_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        mine = fill(store, b"mine", 14)
        pin(store, mine)
        path = path_of(store.directory)
        kept = path.read_bytes()
        spoiled = [spoil_version(kept), b"[" * 100_000, b"", b"\0" * 100, b"[1]", kept[:-20]]
        for content in (*spoiled, spoil_segment(kept)):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=DATASET.hex()):
                store.store.pins_of(DATASET)
        fill(store, b"new", 100)
        assert left(store, mine) < 14
        pin(store, fill(store, b"again", 5))
        assert store.store.pins_of(DATASET) != Pinned()


def test_a_file_that_others_may_write_to_pins_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        mine = fill(store, b"mine", 14)
        pin(store, mine)
        path_of(store.directory).chmod(0o666)
        with pytest.raises(Untrusted):
            store.store.pins_of(DATASET)
        fill(store, b"new", 100)
        assert left(store, mine) < 14


def test_a_cache_directory_that_has_just_gone_says_nothing_of_pins(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        pin(store, fill(store, b"mine", 14))
        store.directory.rename(tmp_path / "away")
        assert store.store.pins_of(DATASET) is None
