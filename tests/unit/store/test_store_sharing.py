"""Several handles and several processes on one cache directory."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fusecache.base.errors import UserError
from fusecache.store import Store, StoreSettings
from tests.support import PATIENCE_S
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

LIMIT = 48 * MIB

# Reads random files of a common set and puts what it misses, so many times; everything found must
# be right.
WORKER = """
import sys, random
from pathlib import Path
from tests.support.store_support import Opened, content, version_of, disk_bytes
directory, seed = Path(sys.argv[1]), int(sys.argv[2])
rounds, limit = int(sys.argv[3]), int(sys.argv[4])
store = Opened(directory, limit_bytes=limit)
source = random.Random(seed)
puts = hits = wrong = refused = over = 0
for _ in range(rounds):
    missing = []
    for number in (source.randrange(160) for _ in range(source.choice([1, 1, 6]))):
        path, payload = b"f%d" % number, content(number, 400_000 + number)
        found = store.get(path, version_of(payload))
        if found is None:
            missing.append((path, payload))
        else:
            hits += 1
            wrong += found != payload
    puts += len(missing)
    refused += store.put_many(missing).count(None)
    if source.randrange(16) == 0:
        store.store.housekeeping()
    # the other writes and evicts while it is summed up
    over += all(disk_bytes(directory) > limit for _ in range(3))
store.close()
import json
print(json.dumps(dict(puts=puts, hits=hits, wrong=wrong, refused=refused, over=over,
                      gone=len(store.gone), faults=store.faults)))
"""


def worker(directory: Path, seed: int, rounds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(directory), str(seed), str(rounds), str(LIMIT)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_two_processes_write_and_evict(tmp_path: Path) -> None:
    workers = [worker(tmp_path / "cache", seed, 150) for seed in range(2)]
    results = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in workers]
    print(results)
    assert [process.returncode for process in workers] == [0, 0]
    for result in results:
        assert result["wrong"] == result["over"] == 0
        assert result["faults"] == []
        assert result["puts"] > 20
        assert result["hits"] > 5
        # a process that is held up in a batch may find that its room is the oldest by now
        assert result["refused"] <= 6 + result["puts"] // 20
    assert sum(result["gone"] for result in results) > 0
    with opened(tmp_path / "cache", limit_bytes=LIMIT) as store:
        records, bad = store.bad_after_verify()
        assert records > 20
        assert bad == 0
        check_invariants(store)


def test_what_one_stores_the_other_finds(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as one, opened(tmp_path / "cache") as two:
        payload = content(1, 5000)
        location = one.put(b"a", payload)
        one.store.flush()
        assert two.get(b"a", version_of(payload)) == payload
        assert two.put(b"b", payload) == location
        assert one.store.usage().blocks == two.store.usage().blocks == 1
        assert len(two.segments()) == 2  # one writer a segment
        two.store.flush()
        assert one.get(b"b", version_of(payload)) == payload
        assert one.faults == two.faults == []


def test_the_smallest_limit_holds_for_all_as_long_as_it_is_there(tmp_path: Path) -> None:
    """Also where the open segment of one is larger than the limit of the other."""
    with opened(tmp_path / "cache", limit_bytes=1024 * MIB) as one:
        assert one.put(b"a", content(1, 5000)) is not None
        with opened(tmp_path / "cache", limit_bytes=48 * MIB) as two:
            assert two.store.usage().limit_bytes == 48 * MIB
            assert two.store.usage().reserved_bytes >= 64 * MIB
            one.store.housekeeping()
            assert two.put(b"b", content(2, 5000)) is not None
            for n in range(60):
                for store in (one, two):
                    assert store.put(b"%d" % n, content(n + 3, MIB)) is not None
                check_invariants(one)
                check_invariants(two)
            assert one.faults == two.faults == []
        one.store.housekeeping()
        assert one.store.usage().limit_bytes == 1024 * MIB


def test_a_limit_can_change_while_the_store_is_open(tmp_path: Path) -> None:
    """Less: at once, whatever goes for it. More: there is room again at once."""
    with opened(tmp_path / "cache", limit_bytes=96 * MIB) as store:
        files = {b"f%03d" % n: content(n, MIB) for n in range(60)}
        for path, payload in files.items():
            assert store.put(path, payload) is not None
        store.store.limit_to(40 * MIB)
        assert disk_bytes(tmp_path / "cache") <= 40 * MIB
        assert store.store.usage().limit_bytes == 40 * MIB
        left = [path for path, payload in files.items() if store.get(path, version_of(payload))]
        assert left
        assert left == list(files)[-len(left) :], "the oldest went"
        store.store.limit_to(96 * MIB)
        for path, payload in files.items():
            assert store.put(path, payload) is not None
        assert all(store.get(path, version_of(payload)) for path, payload in files.items())
        check_invariants(store)
        with opened(tmp_path / "cache", limit_bytes=200 * MIB) as other:
            assert other.store.usage().limit_bytes == 96 * MIB, "what was told before is forgotten"
        assert store.faults == []


def test_numbers_that_are_taken_elsewhere_are_given_to_no_segment(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=40 * MIB) as store:
        assert store.store.number_from(5_000_000_000 >> 1) == 2_500_000_000
        first = store.put(b"one", content(1, MIB))
        assert first is not None
        assert first.segno == 2_500_000_001
        assert store.store.number_from(0) == 2_500_000_001, "the highest that was given"
        store.store.seal()
        store.store.number_from(2_500_000_100)
        second = store.put(b"two", content(2, MIB))
        assert second is not None
        assert second.segno == 2_500_000_101
        assert store.read(first) == content(1, MIB)


def test_use_is_what_is_written_not_what_is_reserved(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as one, opened(tmp_path / "cache") as two:
        for store, name in ((one, b"a"), (two, b"b")):
            assert store.put(name, name * MIB) is not None
            store.store.flush()
        for store in (one, two):
            usage = store.store.usage()
            assert 2 * MIB <= usage.bytes < 3 * MIB
            assert usage.reserved_bytes >= 16 * MIB
            (directory,) = store.store.directories()
            assert 2 * MIB <= directory.bytes < 3 * MIB


def test_an_evicted_segment_is_reported_to_who_reads_it(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "cache", limit_bytes=20 * MIB) as one,
        opened(tmp_path / "cache", limit_bytes=20 * MIB) as two,
    ):
        payload = content(1, 5000)
        location = one.put(b"a", payload)
        assert location is not None
        one.close()
        assert two.get(b"a", version_of(payload)) == payload
        with opened(tmp_path / "cache", limit_bytes=20 * MIB) as three:
            for n in range(40):
                assert three.put(b"x%d" % n, content(n + 2, MIB)) is not None
            assert location.segno in three.gone
            assert two.read(location) is None
            two.store.housekeeping()
            assert location.segno in two.gone
            assert two.find(b"a", version_of(payload)) is None
            assert two.faults == three.faults == []


def test_a_dead_writers_segment_is_adopted_by_the_living(tmp_path: Path) -> None:
    files = {b"f%d" % n: content(n, 3000) for n in range(50)}
    with opened(tmp_path / "cache") as two:
        one = Opened(tmp_path / "cache")
        for path, payload in files.items():
            one.put(path, payload)
        one.kill()
        two.suspect()
        two.store.housekeeping()
        for path, payload in files.items():
            assert two.get(path, version_of(payload)) == payload
        assert two.segments()[0].stat().st_size < 8 * MIB
        assert two.faults == []
        check_invariants(two)


def test_a_new_generation_is_followed(tmp_path: Path) -> None:
    """One process rebuilds the index; what the other had written, also since, stays found."""
    early, late = content(1, 5000), content(2, 6000)
    with opened(tmp_path / "cache") as one, opened(tmp_path / "cache") as two:
        one.put(b"early", early)
        two.put(b"two", content(3, 100))
        two.store._attachment.current._why_bad = "because the test says so"
        two.store.housekeeping()
        one.put(b"late", late)  # still into the old generation
        assert two.get(b"early", version_of(early)) == early
        one.store.housekeeping()
        two.store.housekeeping()
        for store in (one, two):
            assert store.get(b"early", version_of(early)) == early
            assert store.get(b"late", version_of(late)) == late
            assert store.get(b"two", version_of(content(3, 100))) is not None
        assert one.faults == []
        assert len(list((tmp_path / "cache/index").glob("*.db"))) == 1
        check_invariants(one)
    with opened(tmp_path / "cache") as three:
        assert three.get(b"late", version_of(late)) == late
        check_invariants(three)


def test_a_deleted_directory_comes_back(tmp_path: Path) -> None:
    payload = content(1, 5000)
    directory = tmp_path / "parent/cache"
    directory.parent.mkdir()
    with opened(directory) as one, opened(directory) as two:
        location = one.put(b"a", payload)
        assert location is not None
        one.store.flush()
        assert two.get(b"a", version_of(payload)) == payload
        assert one.get(b"a", version_of(payload)) == payload
        line = (directory / "format").read_bytes()
        shutil.rmtree(directory.parent)
        assert one.put(b"b", payload + b"b") is None
        assert one.put(b"c", payload + b"c") is None
        assert one.kinds == {"missing"}
        for _ in range(2):
            one.store.housekeeping()
            two.store.housekeeping()
        assert not directory.exists()
        assert one.find(b"a", version_of(payload)) is None
        assert location.segno in one.gone
        assert location.segno in two.gone
        assert two.store.usage().bytes == 0
        directory.parent.mkdir()
        two.store.housekeeping()
        one.store.housekeeping()
        one.end_pause()
        again = one.put(b"a", payload)
        assert again is not None
        assert again.segno > location.segno
        assert one.get(b"a", version_of(payload)) == payload
        one.store.flush()
        assert two.get(b"a", version_of(payload)) == payload
        assert (directory / "format").read_bytes() != line
        assert one.kinds == two.kinds == {"missing"}


def test_a_moved_directory_is_left_alone(tmp_path: Path) -> None:
    payload = content(1, 5000)
    with opened(tmp_path / "cache") as store:
        store.put(b"a", payload)
        (tmp_path / "cache").rename(tmp_path / "moved")
        store.store.housekeeping()
        assert store.put(b"b", payload) is not None
        assert store.find(b"a", version_of(payload)) is None
    with opened(tmp_path / "moved") as store:
        assert store.get(b"a", version_of(payload)) == payload


def test_a_directory_that_becomes_newer_is_not_used(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        shutil.rmtree(tmp_path / "cache")
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache/format").write_text("fusecache 3 whatever\n")
        store.store.housekeeping()
        assert store.put(b"a", b"a") is None
        assert store.kinds == {"missing"}
    with pytest.raises(UserError, match="newer"):
        Opened(tmp_path / "cache")
    assert disk_bytes(tmp_path / "cache") <= 8192


# Stores a file, and is killed before its segment is sealed; another writes to the index for ever.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.store_support import Opened, content
store = Opened(Path(sys.argv[1]))
store.put(b"file", content(1, 100_000))
store.store.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_look_ups_do_not_wait_for_who_writes_the_index(tmp_path: Path) -> None:
    """A killed server's lock on the index stays until the next one has answered what its last
    threads wait for: that one must not wait for the lock before it answers anything.
    """
    cache, payload = tmp_path / "cache", content(1, 100_000)
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", KILLED, str(cache)], cwd=root, check=False)
    with contextlib.closing(
        sqlite3.connect(max((cache / "index").glob("*.db")), isolation_level=None)
    ) as writer:
        writer.execute("BEGIN IMMEDIATE")
        settings = StoreSettings(64 * MIB, 0, "lrf", "xxh3-128")
        store = Store.reopen(
            cache, settings, on_fault=lambda *_: None, on_segment_gone=lambda _: None
        )
        attaching = threading.Thread(target=store.attach, daemon=True)
        attaching.start()
        attaching.join(8.0)  # housekeeping, which adopts the segment, waits for 10 s and more
        assert not attaching.is_alive()
        assert store.lookup(DATASET, b"file", version_of(payload), 0) is not None
        assert writer.in_transaction
    store.close()
