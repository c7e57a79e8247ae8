"""Logs: numbers, credit, what other processes make of them, adoption, release."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from fusecache.store import Log, housekeeping
from fusecache.store.capacity import Place
from fusecache.store.segment import format as fmt
from tests.support.log_support import Mover
from tests.support.store_support import (
    MIB,
    Opened,
    check_invariants,
    content,
    opened,
    version_of,
)

# Of the store's record of a payload of 10,000 bytes.
RECORD_BYTES = 12 << 10


def path_of(number: int) -> bytes:
    return b"d%d/f%d" % (number % 3, number)


def payload_of(number: int) -> bytes:
    return content(number, 10_000)


def begin(store: Opened, chunks: int, slack_bytes: int) -> Log:
    log = store.store.begin_log(chunks, slack_bytes, RECORD_BYTES)
    assert log is not None
    return log


def filled(store: Opened, files: range, chunks: int = 3, slack_bytes: int = 8 * MIB) -> Mover:
    """A log with these files in it, nothing finished."""
    mover = Mover(begin(store, chunks, slack_bytes), {})
    for n in files:
        assert mover.append(n % chunks, path_of(n), payload_of(n))
    for segno in mover.log.segnos:
        mover.flush(segno)
    return mover


def rows(store: Opened) -> dict[int, tuple[int, int, int]]:
    """segno -> (sealed, reserved, fetched_ns) as another process sees them."""
    path = max((store.directory / "index").glob("*.db"))
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        found = connection.execute("SELECT segno, sealed, reserved, fetched_ns FROM segments")
        return {segno: tuple(values) for segno, *values in found}
    finally:
        connection.close()


def assert_all_there(store: Opened, files: range) -> None:
    for n in files:
        assert store.get(path_of(n), version_of(payload_of(n))) == payload_of(n)


def test_what_is_moved_is_read_where_it_lies_and_found_after_the_end(tmp_path: Path) -> None:
    files = range(40)
    with opened(tmp_path / "cache") as store:
        mover = filled(store, files)
        for n in files:
            assert store.read(mover.locations[path_of(n)]) == payload_of(n)
            assert store.find(path_of(n), version_of(payload_of(n))) is None  # not in the index yet
        mover.finish()
        assert store.store.usage().blocks == 0
        mover.log.end()
        store.store.housekeeping()
        assert_all_there(store, files)
        for n in files:
            assert store.find(path_of(n), version_of(payload_of(n))) == mover.locations[path_of(n)]
        assert all(sealed for sealed, _, _ in rows(store).values())
        assert store.bad_after_verify() == (40, 0)
        check_invariants(store)
        assert store.faults == []


def test_segments_have_consecutive_numbers_on_one_line_with_static_ones(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=128 * MIB) as store:
        static = store.put(b"a", content(1, 100))
        assert static is not None
        log = begin(store, 5, MIB)
        assert log.segnos == list(range(static.segno + 1, static.segno + 6))
        assert fmt.parse_high((store.directory / "high").read_bytes()) == log.segnos[-1]
        with opened(tmp_path / "cache", limit_bytes=128 * MIB) as other:
            following = other.put(b"b", content(2, 100))
            assert following is not None
            assert following.segno == log.segnos[-1] + 1
        log.end()


def test_credit_is_reserved_and_drawn_within_the_limit_and_never_by_eviction(
    tmp_path: Path,
) -> None:
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        for n in range(1000):
            assert store.put(path_of(n), payload_of(n)) is not None
        before, room = store.store.usage().reserved_bytes, store.store.room_bytes()
        log = begin(store, 4, 10 * MIB)
        assert log.credit_bytes == 10 * MIB
        assert store.store.usage().reserved_bytes >= before + log.credit_bytes
        assert store.store.room_bytes() < room
        drawn = 0
        while got := log.draw(5 * MIB):
            assert 0 < got <= 5 * MIB
            drawn += got
        assert drawn > 5 * MIB
        assert log.draw(4096) == 0
        assert store.gone == []
        usage = store.store.usage()
        assert usage.reserved_bytes <= usage.limit_bytes
        assert store.store.room_bytes() < 8 * MIB  # no more than the rest of the open segment
        # the other process sees no room either
        with opened(tmp_path / "cache", limit_bytes=64 * MIB, policy="keep") as other:
            assert other.put_many([(b"new", content(5, MIB))], evict=False) == [None]
            assert other.store.begin_log(2, MIB) is None
        log.finish([(segno, fmt.SEGMENT_HEADER_BYTES, 0) for segno in log.segnos])
        assert store.store.usage().reserved_bytes <= before + 5 * 4096 + (64 << 10)
        log.end()


def test_the_log_of_a_server_that_takes_time_to_die_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its locks are let go of when its threads have left the kernel: after the first look."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        mover = filled(store, range(100), slack_bytes=40 * MIB)
        with opened(tmp_path / "cache", limit_bytes=64 * MIB) as other:
            assert other.store.begin_log(4, 40 * MIB) is not None
            assert next(iter(other.store.logs)).credit_bytes < 30 * MIB
            next(iter(other.store.logs)).finish([])
            run = other.store._reconciler.run

            def look() -> bool:
                nonlocal now
                now += 0.4
                others_write = run()
                if not mover.log.is_finished:
                    mover.log.end()
                return others_write

            monkeypatch.setattr(other.store._reconciler, "run", look)
            other.store.adopt_orphans()
            assert other.store.adopted == 3
            assert all(rows(other)[segno][0] for segno in mover.log.segnos)
            log = begin(other, 4, 40 * MIB)
            assert log.credit_bytes == 40 * MIB
            other.store.adopt_orphans()
            assert other.store.adopted == 3  # its own is not dead
            log.end()


def test_a_disk_whose_room_was_promised_to_a_log_is_not_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = os.statvfs_result((4096, 4096, 0, 0, 200 * MIB // 4096, 0, 0, 0, 0, 0))
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    with opened(tmp_path / "cache", limit_bytes=1024 * MIB) as store:
        log = begin(store, 2, 300 * MIB)
        assert 100 * MIB < log.credit_bytes < 200 * MIB
        assert store.store.room_bytes() == 0
        assert store.store.full_disk_bytes() is None
        log.finish([])
        log.end()


def test_a_log_does_not_wait_for_the_death_of_who_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long after the start, another mount's segments are no dead server's."""
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        mover = filled(store, range(100), slack_bytes=40 * MIB)
        with opened(tmp_path / "cache", limit_bytes=64 * MIB) as other:
            looks: list[bool] = []
            run = other.store._reconciler.run

            def look() -> bool:
                looks.append(run())
                return looks[-1]

            monkeypatch.setattr(other.store._reconciler, "run", look)
            other.store._reconciler._dying_until = time.monotonic()
            other.store.adopt_orphans()
            assert looks == [True]
        mover.log.end()


def test_orphans_behind_the_log_of_one_who_lives_are_adopted_in_little_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "_ADOPTION_SECONDS", 0.0)
    with opened(tmp_path / "cache") as store:
        alive = begin(store, 20, MIB)
        dead = filled(store, range(100)).log
        with opened(tmp_path / "cache") as other:
            dead.end()
            other.suspect()
            for _ in dead.segnos:
                other.store.housekeeping()
            assert all(rows(other)[segno][0] for segno in dead.segnos)
            assert not any(rows(other)[segno][0] for segno in alive.segnos)
        alive.end()


def test_a_segment_of_a_dying_writer_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        mover = filled(store, range(100))
        now = time.monotonic()
        monkeypatch.setattr(
            housekeeping.time,  # type: ignore[attr-defined]
            "monotonic",
            lambda: now,
        )
        with opened(tmp_path / "cache", limit_bytes=64 * MIB) as other:
            mover.log.end()
            now += 0.9
            other.store.housekeeping()
            assert not any(rows(other)[segno][0] for segno in mover.log.segnos)
            now += 0.2
            other.store.housekeeping()
            assert all(rows(other)[segno][0] for segno in mover.log.segnos)


def test_nothing_is_evicted_for_what_a_log_has_not_written(tmp_path: Path) -> None:
    """When another mount brings a smaller limit, the log ends, and what it was promised is free."""
    with opened(tmp_path / "cache", limit_bytes=128 * MIB) as store:
        for n in range(30):
            assert store.put(path_of(n), content(n, MIB)) is not None
        log = begin(store, 4, 60 * MIB)
        assert log.credit_bytes == 60 * MIB
        with opened(tmp_path / "cache", limit_bytes=48 * MIB) as other:
            for each in (other, store):
                each.store.housekeeping()
                assert each.store.usage().limit_bytes == 48 * MIB
            log.finish([])
            other.store.housekeeping()
            assert store.gone == other.gone == []
            check_invariants(other)
            mover = filled(store, range(1000), slack_bytes=12 * MIB)
        with opened(tmp_path / "cache", limit_bytes=38 * MIB) as other:
            assert other.gone  # for what it has written
        mover.log.end()
        log.end()


def test_no_log_where_there_is_no_room_or_no_directory(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=200 << 10) as store:
        assert store.store.begin_log(4, MIB) is None
        assert store.faults == []
    with opened(tmp_path / "other") as store:
        (tmp_path / "other").rename(tmp_path / "away")
        assert store.store.begin_log(4, MIB) is None


class Disk(NamedTuple):
    f_bavail: int
    f_frsize: int = 4096


def test_what_was_reserved_and_not_written_is_missing_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Disk(100 * MIB // 4096))
    limits = {"limit_bytes": 128 * MIB, "keep_free_bytes": 50 * MIB}
    with opened(tmp_path / "cache", **limits) as store, opened(tmp_path / "cache", **limits) as two:
        log = begin(store, 2, 45 * MIB)
        assert log.credit_bytes == 45 * MIB
        assert 0 < two.store.room_bytes() < 5 * MIB
        assert two.put(b"a", content(1, 3_000_000)) is None
        assert two.kinds == {"disk-full"}
        log.finish([])
        two.end_pause()
        assert two.store.room_bytes() > 20 * MIB
        log.end()


def test_an_open_log_is_left_alone_by_everybody(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        log = begin(store, 3, MIB)  # files of 4096 bytes
        with opened(tmp_path / "cache") as other:
            for either in (store, other):
                either.suspect()
                either.store.housekeeping()
            assert set(rows(store)) == set(log.segnos)
            mover = Mover(log, {})
            assert mover.append(1, b"a", payload_of(1))
            mover.flush(log.segnos[1])
            (index,) = (store.directory / "index").glob("*.db")
            index.unlink()
            other.store.housekeeping()  # builds a new index
            assert other.kinds == {"index"}
        assert [path.stat().st_size for path in store.segments()] == [
            4096,
            4096 + RECORD_BYTES,
            4096,
        ]
        store.store.housekeeping()  # follows
        assert {sealed for sealed, _, _ in rows(store).values()} == {0}
        assert store.read(mover.locations[b"a"]) == payload_of(1)
        log.end()


@pytest.mark.parametrize("follow", [False, True], ids=["rebuilt", "followed"])
def test_a_new_index_keeps_the_credit(tmp_path: Path, follow: bool) -> None:
    with opened(tmp_path / "cache") as store:
        log = begin(store, 3, 2 * MIB)
        assert log.draw(3 * MIB) == 3 * MIB
        assert log.draw(MIB) == MIB
        before = rows(store)
        max((store.directory / "index").glob("*.db")).unlink()
        with opened(tmp_path / "cache") as other:
            if follow:
                store.store.housekeeping()
            assert rows(other) == before
        log.end()


def test_a_finished_log_keeps_its_lengths_in_a_new_index(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        mover = filled(store, range(30))
        mover.finish()
        before = rows(store)
        assert sum(reserved for _, reserved, _ in before.values()) < 30 * RECORD_BYTES * 1.1
        max((store.directory / "index").glob("*.db")).unlink()
        with opened(tmp_path / "cache") as other:
            assert rows(other) == before
        mover.log.end()


def test_release_gives_room_back_and_the_rest_is_adopted(tmp_path: Path) -> None:
    files = range(60)
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        static = {}
        for n in files:
            static[n] = store.put(path_of(n), payload_of(n))
        store.seal()
        (segno,) = {at.segno for at in static.values() if at is not None}
        one = filled(store, files)
        assert one.log.rows_in([segno]) == {segno: 60}
        before = store.store.usage().reserved_bytes
        freed = one.log.release([segno, 12345])
        assert freed >= 60 * len(payload_of(0))
        assert store.gone == [segno]
        assert store.store.usage().reserved_bytes <= before - freed + (256 << 10)
        assert one.log.rows_in([segno]) == {segno: 0}
        assert one.log.release([segno]) == 0  # it is gone already
        assert one.log.release(one.log.segnos) == 0  # still being written
        one.finish()
        two = Mover(begin(store, 3, 8 * MIB), one.locations)
        for n in range(40):  # files 40 … 59 stay where they are
            assert two.append(n // 15, path_of(n), payload_of(n))
        two.finish()
        alive = {at.segno for at in two.locations.values()}
        assert alive >= set(one.log.segnos)
        for n in range(40, 60):
            assert two.append(2, path_of(n), payload_of(n))
        two.finish()
        assert two.log.rows_in(one.log.segnos) == dict.fromkeys(one.log.segnos, 0)
        assert two.log.release(one.log.segnos) >= 60 * RECORD_BYTES
        assert {int(path.stem) for path in store.segments()} == set(two.log.segnos)
        for n in files:
            assert store.read(two.locations[path_of(n)]) == payload_of(n)
        two.log.end()
        one.log.end()
        store.store.housekeeping()
        assert_all_there(store, files)
        check_invariants(store)
        assert store.faults == []


def test_release_leaves_segments_of_others_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store, opened(tmp_path / "cache") as other:
        at = other.put(b"a", content(1, 100))
        assert at is not None
        theirs = begin(other, 2, MIB)
        theirs.finish([])
        log = begin(store, 2, MIB)
        assert log.release([at.segno, *theirs.segnos]) == 0
        assert other.read(at) == content(1, 100)
        assert all(store.store.segment_path(segno).exists() for segno in theirs.segnos)
        theirs.end()
        log.end()


def test_what_another_process_evicted_is_tolerated(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "cache", limit_bytes=40 * MIB) as store,
        opened(tmp_path / "cache", limit_bytes=40 * MIB) as other,
    ):
        at = store.put(b"a", content(1, 100))
        assert at is not None
        store.seal()
        log = begin(store, 2, MIB)
        n = 0
        while at.segno not in other.gone:
            n += 1
            assert other.put(b"x%d" % n, content(n, MIB)) is not None
        assert log.rows_in([at.segno]) == {at.segno: 0}
        assert log.release([at.segno]) == 0
        log.end()


# ---- adoption ------------------------------------------------------------------------------------
def abandon(log: Log) -> None:
    """As a kill does it: the locks are gone, nothing else happens."""
    for fd in log.fds:
        os.close(fd)
    log._open.clear()
    log._logs._logs.remove(log)


def killed(store: Opened) -> None:
    """As a kill does it."""
    for log in list(store.store.logs):
        abandon(log)
    store.kill()


def after_each_adoption(
    monkeypatch: pytest.MonkeyPatch, then: Callable[[Place, int], None]
) -> None:
    adopt = housekeeping.adopt

    def watched(place: Place, segno: int) -> None:
        adopt(place, segno)
        then(place, segno)

    monkeypatch.setattr(housekeeping, "adopt", watched)


@pytest.mark.parametrize("finished", [False, True], ids=["open", "finished"])
@pytest.mark.parametrize("order", [1, -1], ids=["upwards", "downwards"])
def test_a_killed_log_never_counts_less_than_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, order: int
) -> None:
    """Whoever adopts which segment first: others may fill room that is not counted at any time."""
    files = range(200)
    store = Opened(tmp_path / "cache")
    mover = filled(store, files, chunks=6, slack_bytes=40 * MIB)
    if finished:
        mover.finish()
    before = sum(reserved for _, reserved, _ in rows(store).values())
    killed(store)
    seen: list[int] = []

    def look(place: Place, segno: int) -> None:
        counted = sum(row.reserved for row in place.index.segments.all())
        assert sum(path.stat().st_size for path in store.segments()) <= counted <= before
        seen.append(segno)

    after_each_adoption(monkeypatch, look)
    unsealed = housekeeping.unsealed
    monkeypatch.setattr(housekeeping, "unsealed", lambda *args: unsealed(*args)[::order])
    with opened(tmp_path / "cache") as after:
        assert seen == mover.log.segnos[::order]
        assert sum(reserved for _, reserved, _ in rows(after).values()) == sum(
            path.stat().st_size for path in after.segments()
        )
        assert_all_there(after, files)
        check_invariants(after)


def test_puts_go_on_while_a_log_is_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        mover = filled(store, range(30))
        mover.finish()
        mover.log.end()
        adopted: list[int] = []
        stored = threading.Event()

        def put() -> None:
            assert store.put(b"new", content(1, 100)) is not None
            stored.set()

        thread = threading.Thread(target=put)

        def pause(seconds: float) -> None:
            assert 0 < seconds < 0.1
            if len(adopted) == 1:
                thread.start()
                assert stored.wait(20)

        after_each_adoption(monkeypatch, lambda place, segno: adopted.append(segno))
        monkeypatch.setattr(time, "sleep", pause)
        store.store.housekeeping()
        thread.join()
        assert adopted == mover.log.segnos
        assert_all_there(store, range(30))


@pytest.mark.parametrize("how", ["adopted", "rebuilt"])
def test_of_two_copies_the_one_in_the_higher_segment_is_used(tmp_path: Path, how: str) -> None:
    """Moved twice, killed before the first copy was released: and the older one can still go."""
    files = range(30)
    store = Opened(tmp_path / "cache")
    one = filled(store, files)
    one.finish()
    two = filled(store, files)
    if how == "rebuilt":
        max((store.directory / "index").glob("*.db")).unlink()
    killed(store)
    with opened(tmp_path / "cache") as after:
        for n in files:
            found = after.find(path_of(n), version_of(payload_of(n)))
            assert found == two.locations[path_of(n)]
        log = begin(after, 1, MIB)
        assert log.rows_in(one.log.segnos) == dict.fromkeys(one.log.segnos, 0)
        assert log.release(one.log.segnos) > 30 * RECORD_BYTES
        assert_all_there(after, files)
        check_invariants(after)
        log.end()


@pytest.mark.parametrize("order", [1, -1], ids=["upwards", "downwards"])
def test_the_order_of_adoption_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: int
) -> None:
    store = Opened(tmp_path / "cache")
    one, two = filled(store, range(30)), filled(store, range(20))
    killed(store)
    unsealed = housekeeping.unsealed
    monkeypatch.setattr(housekeeping, "unsealed", lambda *args: unsealed(*args)[::order])
    with opened(tmp_path / "cache") as after:
        for n in range(30):
            mover = two if n < 20 else one
            found = after.find(path_of(n), version_of(payload_of(n)))
            assert found == mover.locations[path_of(n)]


@pytest.mark.parametrize("how", ["adopted", "rebuilt"])
def test_a_later_version_is_not_replaced_by_a_moved_older_one(tmp_path: Path, how: str) -> None:
    """The static segment has the lower number: it was begun before the log."""
    store = Opened(tmp_path / "cache")
    old, new = payload_of(1), payload_of(2)
    version = version_of(new)._replace(ctime_ns=version_of(old).ctime_ns + 1)
    assert store.put(b"a", old) is not None
    mover = Mover(begin(store, 1, MIB), {})
    assert mover.append(0, b"a", old)
    at = store.put(b"a", new, version)
    assert at is not None
    assert at.segno < mover.log.segnos[0]
    mover.finish()
    store.store.flush()
    if how == "rebuilt":
        max((store.directory / "index").glob("*.db")).unlink()
    killed(store)
    with opened(tmp_path / "cache") as after:
        assert after.get(b"a", version) == new


def test_a_row_that_leads_nowhere_gives_way(tmp_path: Path) -> None:
    store = Opened(tmp_path / "cache")
    mover = filled(store, range(5), chunks=1)
    for n in range(5):
        assert store.put(path_of(n), payload_of(n)) is not None
    assert store.store._segment.writer is not None
    gone = store.store._segment.writer.segno
    assert gone > mover.log.segnos[0]
    store.store.flush()
    index = store.index
    assert index is not None
    with index.database.transaction():
        index.segments.delete(gone)  # evicted by a process that was killed before it swept the rows
    killed(store)
    store.store.segment_path(gone).unlink()
    with opened(tmp_path / "cache") as after:
        assert_all_there(after, range(5))
        check_invariants(after)


def test_a_torn_piece_is_cut_off(tmp_path: Path) -> None:
    store = Opened(tmp_path / "cache")
    mover = filled(store, range(5), chunks=1)
    fd = os.open(store.store.segment_path(mover.log.segnos[0]), os.O_WRONLY)
    os.ftruncate(fd, mover.locations[path_of(4)].offset + 8192)
    os.close(fd)
    killed(store)
    with opened(tmp_path / "cache") as after:
        assert_all_there(after, range(4))
        assert after.get(path_of(4), version_of(payload_of(4))) is None
        check_invariants(after)


# ---- a directory that goes away ------------------------------------------------------------------
def test_a_log_outlives_its_directory_harmlessly(tmp_path: Path) -> None:
    with opened(tmp_path / "cache") as store:
        mover = filled(store, range(5))
        (tmp_path / "cache").rename(tmp_path / "away")
        store.store.housekeeping()
        store.store.housekeeping()
        assert (tmp_path / "cache").exists()
        assert mover.log.draw(MIB) == 0
        assert mover.log.rows_in([1]) == {}
        mover.append(0, b"a", b"a")
        mover.finish()
        assert mover.log.release(mover.log.segnos) == 0
        fresh = begin(store, 2, MIB)
        assert not set(fresh.segnos) & set(mover.log.segnos)
        assert set(rows(store)) == set(fresh.segnos)
        fresh.end()
        mover.log.end()


def test_closing_ends_logs_that_are_finished_and_no_others(tmp_path: Path) -> None:
    """The descriptors of the others may be in use by whoever writes."""
    store = Opened(tmp_path / "cache")
    one, two = filled(store, range(5)), filled(store, range(5, 10))
    one.finish()
    store.close()
    assert two.append(0, b"late", payload_of(1))
    two.flush(two.log.segnos[0])
    with opened(tmp_path / "cache") as other:
        assert_all_there(other, range(5))
        assert other.get(path_of(7), version_of(payload_of(7))) is None
        two.log.end()
        other.suspect()
        other.store.housekeeping()
        assert_all_there(other, range(10))


def test_a_failed_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache") as store:
        count = len(os.listdir("/proc/self/fd"))
        limit = 3
        rename = Path.rename

        def failing(self: Path, target: Path) -> Path:
            nonlocal limit
            limit -= 1
            if not limit:
                raise OSError(5, "Input/output error")
            return rename(self, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", failing)
            assert store.store.begin_log(5, MIB) is None
        assert store.kinds == {"io"}
        assert os.listdir(store.directory / "segments") == []
        assert len(os.listdir("/proc/self/fd")) == count
        assert rows(store) == {}


def test_release_without_a_sync_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache") as store:
        mover = filled(store, range(5))
        mover.finish()
        with monkeypatch.context() as patched:
            patched.setattr("fusecache.store.log._sync_file_system", lambda path: False)
            assert mover.log.release(mover.log.segnos) == 0
        assert len(store.segments()) == 3
        assert mover.log.release(mover.log.segnos) > 5 * RECORD_BYTES
        mover.log.end()
        assert store.segments() == []


# ---- what nothing leads to -----------------------------------------------------------------------
def test_a_segment_without_rows_is_unused_and_evicted_first(tmp_path: Path) -> None:
    with opened(tmp_path / "cache", limit_bytes=40 * MIB) as store:
        first = store.put(b"a", content(1, 100))
        store.seal()
        assert first is not None
        assert store.store.logs.unused()[1] == []
        second = store.put(b"b", content(2, 100))
        store.seal()
        assert second is not None
        index = store.index
        assert index is not None
        index.delete_rows(second.segno)  # as another copy's row does it
        assert store.store.logs.unused()[1] == [second.segno]
        n = 0
        while not store.gone:
            n += 1
            assert store.put(b"x%d" % n, content(10 + n, MIB)) is not None
        assert store.gone[0] == second.segno
