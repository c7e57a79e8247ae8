"""What callers of the store may rely on, in both digests."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusecache.errors import UserError
from fusecache.store import Version
from fusecache.store import format as fmt
from fusecache.store.types import BLOCK_BYTES
from tests.store_support import (
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
    assert store.store.lookup_file(DATASET, b"big", version) is None
    blocks = blocks_of(payload)
    locations = [store.put(b"big", blocks[n], version, n) for n in (0, 2)]
    assert store.store.lookup_file(DATASET, b"big", version) == [locations[0], None, locations[1]]
    store.store.flush()
    assert store.store.lookup_file(DATASET, b"big", version) == [locations[0], None, locations[1]]
    assert store.get(b"big", version, 2) == blocks[2]
    changed = version._replace(mtime_ns=0)
    assert store.store.lookup_file(DATASET, b"big", changed) is None


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
    assert store.store.quarantined == 1
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
    files = {b"f%d" % n: content(n, 2000) for n in range(600)}
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
        assert 20 <= len(present) <= 36
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


def test_a_deduplicated_block_needs_no_room(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=12 * MIB, policy="keep") as store:
        payload = content(1, MIB)
        store.put(b"a", payload)
        while store.put(b"fill%d" % store.store.usage().blocks, os.urandom(MIB)) is not None:
            pass
        store.store._paused_until = 0.0
        assert store.put(b"b", payload) is not None
        assert store.get(b"b", version_of(payload)) == payload


def test_a_limit_below_one_segment_holds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=MIB) as store:
        assert store.put(b"a", b"a") is None
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
        store.store._paused_until = 0.0
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


def test_exclusive_use_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr("fusecache.store.directory._LOCK_SECONDS", 0.1)
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


def test_a_directory_with_other_things_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    tmp_path.chmod(0o755)
    with opened(tmp_path) as store:
        store.put(b"a", b"a")
        assert stat.S_IMODE((tmp_path / "segments").stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert (tmp_path / "mine.txt").read_text() == "mine"


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
