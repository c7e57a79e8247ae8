"""What the packer decides: how much may be appended, and which segments go. The log on disk, and
real mounts: mount/test_log.py.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import trio

from fusecache import _native
from fusecache.base.wire import Packing
from fusecache.reorder.choosing import Candidates, Use, choose
from fusecache.reorder.open_log import (
    APPENDERS_MOST,
)
from fusecache.reorder.packer import Packer
from fusecache.reorder.room import LOOK_SHARE, slack_bytes
from fusecache.store.types import BLOCK_BYTES, StoreSettings, Version

CHUNKS, BUFFER_BYTES, SIZE_BYTES, SAMPLES = 4, 1 << 16, 40 << 20, 4 << 10
SLACK_BYTES = slack_bytes(CHUNKS, SIZE_BYTES, BUFFER_BYTES, SIZE_BYTES // CHUNKS)
STATIC = 7  # a segment with rows in the index
RECORD_BYTES = 12 << 10


class FakeLog:
    uuid, algorithm = b"u" * 16, 1

    def __init__(self, disk: Disk, credit_bytes: int) -> None:
        self.disk, self.credit_bytes = disk, credit_bytes
        first = max(disk.segments, default=0) + 1
        self.segnos = list(range(first, first + CHUNKS))
        self.fds = [-1] * CHUNKS
        disk.segments |= {*self.segnos}
        self.is_finished = self.is_ended = False

    def draw(self, more_bytes: int) -> int:
        got = min(more_bytes, self.disk.room_bytes)
        self.disk.room_bytes -= got
        return got

    def room_bytes(self) -> int:
        self.disk.now += self.disk.look_s
        return self.disk.room_bytes

    def finish(self, lengths: Iterable[tuple[int, int]]) -> None:
        self.is_finished = True

    def rows_in(self, segnos: Sequence[int]) -> dict[int, int]:
        return {n: self.disk.rows.get(n, 0) for n in segnos if n not in self.disk.in_use}

    def reserved(self) -> dict[int, int]:
        return dict.fromkeys(self.disk.segments, SIZE_BYTES // CHUNKS)

    def release(self, segnos: Sequence[int]) -> int:
        assert self.disk.releasing == {*segnos}
        self.disk.segments -= {*segnos}
        self.disk.room_bytes += len(segnos) * SAMPLES // CHUNKS * RECORD_BYTES
        return len(segnos)

    def end(self) -> None:
        self.is_ended = True


class Disk:
    """The store and C's part of the log, as far as a packer sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room_bytes = 1 << 40
        self.adopted = 0
        self.orphaned: list[int] = []  # to which nothing leads once that is done
        self.orphans_bytes = 0  # that dead writers have reserved, and nobody has adopted yet
        self.segment_bytes = 0  # of the new one that the store needs for what comes; 0: none
        self.limit_bytes = 1 << 30
        self.put_bytes = 0  # in the store
        self.segments = {STATIC}
        self.rows = {STATIC: 10}
        self.in_use: set[int] = set()  # being written by another store
        self.own: int | None = None  # ... by this one
        self.comes: dict[int, int] = {}  # files that are put there before it is sealed
        self.live: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.credit_bytes = 0
        self.counters = dict.fromkeys(
            ("written_bytes", "waiting_bytes", "moved", "added", "failed"), 0
        )
        self.to_come: dict[int, int] = {}  # of `live`, if not all of them
        self.drained: set[int] | None = None  # None: everything is moved
        self.flushes = 0
        self.opened: list[FakeLog] = []
        self.logs = self  # of the store
        self.given_back_bytes = 0
        self.looks = 0
        self.look_s = 0.0  # that looking for room takes
        self.now = 100.0
        self.error: OSError | None = None
        self.releasing: set[int] = set()
        for name in ("begin", "end", "open", "credit", "left", "survey", "drain", "flush"):
            monkeypatch.setattr(_native, f"log_{name}", getattr(self, f"_log_{name}"))
        monkeypatch.setattr(_native, "log_counters", lambda: dict(self.counters))
        monkeypatch.setattr(_native, "segment_known", lambda segno: segno in self.segments)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.rowless: list[int] = []  # the index leads to nothing in them
        store: Any = self
        self.packer = Packer(store, b"d" * 16, self.releasing)

    @property
    def settings(self) -> StoreSettings:
        return StoreSettings(limit_bytes=self.limit_bytes, keep_free_bytes=0)

    def begin_log(self, chunks: int, slack_bytes: int, record_bytes: int) -> FakeLog | None:
        assert (chunks, record_bytes) == (CHUNKS, RECORD_BYTES)
        credit = min(slack_bytes, self.room_bytes)
        if not credit:
            return None
        self.room_bytes -= credit
        self.opened.append(FakeLog(self, credit))
        return self.opened[-1]

    def adopt_orphans(self) -> None:
        found, self.orphans_bytes = self.orphans_bytes, 0
        self.room_bytes += found
        self.adopted += found > 0
        self.rowless += self.orphaned

    def evicted_bytes(self) -> int:
        return self.given_back_bytes

    def stored_bytes(self) -> int:
        return self.put_bytes

    def taken_bytes(self, length: int) -> int:
        return self.segment_bytes or length

    def seal_in(self, segnos: Sequence[int]) -> bool:
        if self.own not in segnos:
            return False
        self.own = None
        self.live.update(self.comes)
        return True

    def unused(self) -> tuple[Disk, list[int]]:
        return self, self.rowless

    def release(self, directory: Disk, segnos: Sequence[int]) -> int:
        assert self.releasing == {*segnos}
        self.segments -= {*segnos}
        return 0

    def _log_begin(self, *arguments: Any) -> None:
        if self.error is not None:
            raise self.error
        self.credit_bytes = arguments[-1]

    def _log_end(self) -> list[tuple[int, int, int]]:
        return [(segno, 4096, 0) for segno in self.opened[-1].segnos]

    def _log_credit(self, more_bytes: int) -> int:
        self.credit_bytes += more_bytes
        return self.credit_bytes

    def _log_left(self) -> list[tuple[int, int]]:
        left, self.left = list(self.left.items()), {}
        return left

    def _log_survey(self) -> list[tuple[int, int, int, int]]:
        self.looks += 1
        return [
            (segno, files, files * RECORD_BYTES, self.to_come.get(segno, files))
            for segno, files in self.live.items()
        ]

    def _log_open(self) -> None:
        pass

    def _log_flush(self) -> None:
        self.flushes += 1

    def _log_drain(self, segnos: bytes | None) -> None:
        self.drained = None if segnos is None else {*np.frombuffer(segnos, np.uint32).tolist()}

    def begin(self, inos: Iterable[int] = ()) -> FakeLog:
        self.packer.begin(CHUNKS, SIZE_BYTES, SAMPLES, BUFFER_BYTES)
        if inos:
            self.packer.assign(0, [len(list(inos))], np.array(list(inos), np.uint32))
        self.packer.open()
        return self.opened[-1]

    def tick(self, left: dict[int, int], after_s: float = 10.0) -> None:
        self.left, self.now = left, self.now + after_s
        self.counters["moved"] += sum(left.values())
        self.packer._tick()

    @property
    def packing(self) -> int:
        return self.packer.state()["packing"]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_a_static_segment_goes_when_nothing_leads_there_and_all_its_rows_have_left(
    disk: Disk,
) -> None:
    disk.live = {STATIC: 10}
    disk.begin()
    disk.live = {STATIC: 4}
    disk.tick({STATIC: 5})
    assert STATIC in disk.segments
    disk.live = {}
    disk.tick({STATIC: 4})  # the tenth was left in another way: another mount may know it
    assert STATIC in disk.segments
    disk.tick({STATIC: 1})
    assert STATIC not in disk.segments
    assert not disk.releasing


def test_nobody_looks_before_something_has_moved(disk: Disk) -> None:
    disk.begin()
    disk.live = {STATIC: 9}
    disk.tick({STATIC: 1})
    looks = disk.looks
    disk.tick({})
    assert disk.looks == looks
    disk.tick({STATIC: 1})
    assert disk.looks == looks + 1


def test_a_segment_that_is_still_written_stays(disk: Disk) -> None:
    disk.in_use = {STATIC}
    disk.begin()
    disk.tick({STATIC: 10})
    assert STATIC in disk.segments


@pytest.mark.parametrize("comes", [{}, {STATIC: 1}])
def test_the_segment_that_the_store_writes_is_sealed_when_it_is_empty(
    disk: Disk, comes: dict[int, int]
) -> None:
    disk.own, disk.comes = STATIC, comes
    disk.begin()
    disk.live = {STATIC: 4}
    disk.tick({STATIC: 6})
    assert disk.own == STATIC
    disk.live = {}
    disk.tick({STATIC: 4})
    assert disk.own is None
    assert (STATIC in disk.segments) == bool(comes)


def test_with_little_room_segments_are_emptied_one_after_the_other(disk: Disk) -> None:
    """And each of them gives its room back at once."""
    first = disk.begin()
    each = SAMPLES // CHUNKS
    size = each * RECORD_BYTES
    disk.live = dict.fromkeys(first.segnos, each)
    disk.room_bytes = size + size // 2
    second = disk.begin()
    assert disk.drained == {first.segnos[0]}
    disk.tick({})
    assert disk.packing == Packing.DRAINING
    for number in range(CHUNKS - 1):
        disk.credit_bytes -= size
        disk.counters["written_bytes"] += size
        disk.counters["moved"] += each
        del disk.live[first.segnos[number]]
        disk.left = {first.segnos[number]: each}
        disk.now += 1
        disk.packer.make_credit(4096)
        assert disk.flushes == number + 1
        assert first.segnos[number] not in disk.segments
        assert disk.drained == {first.segnos[number + 1]}
    disk.room_bytes = 1 << 40
    disk.tick({first.segnos[-1]: 1})
    assert disk.drained is None
    assert disk.packing == Packing.OPEN
    assert not second.is_finished


def test_what_is_chosen() -> None:
    uses = [Use(segno, 10, 10 * segno, 10) for segno in range(10)]
    nothing: list[Use] = []
    assert choose(Candidates(nothing, nothing, nothing), 100) == []
    assert choose(Candidates(uses[3:0:-1], nothing, nothing), 35) == [1, 2]
    # In order, and what would never fit is left out.
    assert choose(Candidates(nothing, [uses[2], uses[9], uses[3], uses[1]], nothing), 55) == [2, 3]
    # Half for what is scattered, which could not begin later; the rest as there is room.
    assert choose(Candidates(uses[1:2], uses[2:4], uses[4:6]), 100) == [1, 2, 4, 3]


def test_what_cannot_become_empty_is_not_chosen(disk: Disk) -> None:
    """Not what others lead to, and not what was refused before."""
    disk.live = {STATIC: 10, STATIC + 1: 10, STATIC + 2: 10}
    disk.segments |= set(disk.live)
    disk.rows = {STATIC: 11, STATIC + 1: 10, STATIC + 2: 10}
    disk.to_come = {STATIC + 1: 9}
    disk.room_bytes = SLACK_BYTES // 2
    disk.begin()
    assert disk.drained == {STATIC + 2}


def test_a_log_that_could_empty_nothing_is_refused(disk: Disk) -> None:
    disk.live = {STATIC: 1000}
    disk.room_bytes = 1000 * RECORD_BYTES - 4096
    log = disk.begin()
    assert log.is_ended
    assert disk.packing == Packing.NO_CREDIT
    assert disk.packer.ssd_needed_bytes > disk.settings.limit_bytes
    disk.room_bytes = 1 << 40
    disk.begin()
    assert disk.packing == Packing.OPEN
    assert disk.packer.ssd_needed_bytes == 0


def test_logs_follow_each_other(disk: Disk) -> None:
    first = disk.begin()
    disk.live = dict.fromkeys(first.segnos, 5)
    second = disk.begin()
    assert first.is_finished
    assert not second.is_finished
    disk.live = {first.segnos[3]: 5}
    disk.tick(dict.fromkeys(first.segnos[:3], 5))
    assert disk.segments == {STATIC, first.segnos[3], *second.segnos}
    assert disk.packer.state()["log_segments"] == CHUNKS + 1
    third = disk.begin()
    assert not first.is_ended  # what is left of it may leave it in this epoch
    disk.begin()
    assert first.is_ended
    assert not second.is_ended
    disk.packer.end()
    assert second.is_ended
    assert third.is_ended
    assert disk.opened[-1].is_finished
    assert disk.opened[-1].is_ended
    assert disk.packing == Packing.NONE
    assert disk.packer.state()["log_segments"] == 0


def test_credit_is_drawn_as_there_is_room(disk: Disk) -> None:
    disk.begin()
    assert disk.credit_bytes == SLACK_BYTES
    disk.packer.make_credit(4096)
    assert disk.credit_bytes == SLACK_BYTES
    disk.credit_bytes = 4096
    disk.packer.make_credit(4096)
    assert disk.credit_bytes == SLACK_BYTES
    disk.packer.make_credit(SLACK_BYTES)  # for each of those that append
    assert disk.credit_bytes == APPENDERS_MOST * SLACK_BYTES
    disk.credit_bytes = disk.room_bytes = 0
    disk.packer.make_credit(4096)
    disk.room_bytes = 8192
    disk.packer.make_credit(4096)  # not asked for all the time
    assert disk.credit_bytes == 0
    disk.now += 1
    disk.packer.make_credit(4096)
    assert disk.credit_bytes == 8192


def payload(record_bytes: int) -> int:
    return record_bytes * (SIZE_BYTES // SAMPLES) // RECORD_BYTES


def keeps_out(disk: Disk, ino: int, size_bytes: int = 10_000) -> bool:
    return disk.packer.keeps_out(ino, size_bytes, min(size_bytes, BLOCK_BYTES))


def test_the_room_beside_a_log(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the log was assigned, and half of the rest: a stray lies on SSD twice for a while. The
    slack is nobody's.
    """
    monkeypatch.setattr(_native, "log_assign", lambda inos, chunk: None)
    disk.live = {STATIC: 10}
    disk.room_bytes = SLACK_BYTES + 90 * RECORD_BYTES + 8 * RECORD_BYTES
    disk.begin(range(100))
    assert disk.packer.room_bytes() == payload((90 + 4) * RECORD_BYTES)
    disk.counters["added"], disk.credit_bytes = 30, disk.credit_bytes - 30 * RECORD_BYTES
    assert disk.packer.room_bytes() == payload((60 + 4) * RECORD_BYTES)
    disk.room_bytes -= 18 * RECORD_BYTES
    assert disk.packer.room_bytes() == payload(50 * RECORD_BYTES)
    disk.room_bytes = 0
    assert disk.packer.room_bytes() == 0


def test_the_room_for_a_first_log_does_not_change_while_it_is_assigned(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those who are to be in it would have no place."""
    monkeypatch.setattr(_native, "log_assign", lambda inos, chunk: None)
    disk.room_bytes = SLACK_BYTES + 100 * RECORD_BYTES
    disk.packer.begin(CHUNKS, SIZE_BYTES, SAMPLES, BUFFER_BYTES)
    rooms = [disk.packer.room_bytes()]
    disk.packer.assign(0, [100], np.arange(100, dtype=np.uint32))
    rooms.append(disk.packer.room_bytes())
    disk.packer.open()
    rooms.append(disk.packer.room_bytes())
    assert rooms == [payload(100 * RECORD_BYTES)] * 3


def test_a_stray_is_taken_where_there_is_room_for_it_twice(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for all that is to come; it lies in what is read last."""
    chunk_of: dict[int, int] = {}
    refused = set[int]()

    def assign(inos: bytes, chunk: int) -> None:
        chunk_of.update(dict.fromkeys(np.frombuffer(inos, np.uint32).tolist(), chunk))

    def add(ino: int, *_: Any) -> bool:
        if ino in refused:
            return False
        disk.counters["added"] += 1
        disk.credit_bytes -= RECORD_BYTES
        return True

    monkeypatch.setattr(_native, "log_assign", assign)
    monkeypatch.setattr(_native, "log_wants", lambda ino: ino in chunk_of)
    location_of = {600: (STATIC, 0), 90: (999, 0)}  # the latter was evicted by others
    monkeypatch.setattr(_native, "get_location", lambda ino, block: location_of.get(ino))
    monkeypatch.setattr(_native, "clear_location", lambda ino, block, at: location_of.pop(ino))
    monkeypatch.setattr(_native, "log_add", add)
    version, data = Version(1, 10_000, 0, 0), bytes(10_000)
    strays = 20
    disk.room_bytes = SLACK_BYTES + (100 + 2 * strays - 1) * RECORD_BYTES
    disk.room_bytes += APPENDERS_MOST * len(data)
    disk.packer.begin(CHUNKS, SIZE_BYTES, SAMPLES, BUFFER_BYTES)
    assert not disk.packer.add(599, version, data)  # its chunk may not have been told yet
    assert not keeps_out(disk, 599)
    disk.packer.assign(0, [100], np.arange(100, dtype=np.uint32))
    disk.packer.open()
    refused.add(500)
    assert not disk.packer.add(500, version, data)  # and does not count
    taken = [ino for ino in range(501, 600) if disk.packer.add(ino, version, data)]
    assert len(taken) == strays
    assert {chunk_of[ino] for ino in taken} == {CHUNKS - 1}
    assert keeps_out(disk, 599)
    assert not disk.packer.add(600, version, data)
    assert not keeps_out(disk, 600)  # it is on SSD
    for ino in range(100):
        assert disk.packer.add(ino, version, data)
    assert disk.credit_bytes + disk.room_bytes >= SLACK_BYTES
    disk.packer.finish()
    disk.live = {STATIC: 90}
    disk.room_bytes = SLACK_BYTES + 3 * RECORD_BYTES + APPENDERS_MOST * len(data)
    disk.begin(range(100))  # no first log: what is assigned leaves the slack, too
    assert [disk.packer.add(ino, version, data) for ino in range(90, 95)] == [True] * 3 + [
        False
    ] * 2
    assert keeps_out(disk, 94)
    assert location_of == {600: (STATIC, 0)}


def test_a_file_that_comes_while_the_log_ends_is_not_for_it(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C wants none any more, and takes no stray. Nobody waits until all is written out."""
    is_ending, is_added = threading.Event(), threading.Event()
    answers = list[bool]()

    def assign(inos: bytes, chunk: int) -> None:
        if is_ending.is_set():
            raise OSError(errno.ENOENT, "no log is open")

    def log_end() -> list[tuple[int, int, int]]:
        is_ending.set()
        answers.append(is_added.wait(10))
        return disk._log_end()

    def log_wants(ino: int) -> bool:  # `add` has seen the open log
        ending.start()
        is_ending.wait(10)
        return False

    ending = threading.Thread(target=disk.packer.finish)
    monkeypatch.setattr(_native, "log_assign", assign)
    monkeypatch.setattr(_native, "log_end", log_end)
    monkeypatch.setattr(_native, "log_wants", log_wants)
    monkeypatch.setattr(_native, "get_location", lambda ino, block: None)
    disk.begin(range(100))
    disk.packer.make_credit(SLACK_BYTES)  # room for strays needs no look
    answers.append(disk.packer.add(5, Version(1, 10_000, 0, 0), bytes(10_000)))
    is_added.set()
    ending.join()
    assert answers == [False, True]


def test_a_location_that_was_just_written_is_not_forgotten(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the place of one that others have evicted."""
    lost, fresh = (999, 4096, 96), (STATIC, 8192, 96)
    location_of = {5: lost}

    def segment_known(segno: int) -> bool:
        location_of[5] = fresh
        return segno in disk.segments

    def clear_location(ino: int, block: int, only_if: tuple[int, int, int]) -> None:
        if location_of[ino] == only_if:
            del location_of[ino]

    monkeypatch.setattr(_native, "get_location", lambda ino, block: location_of.get(ino))
    monkeypatch.setattr(_native, "clear_location", clear_location)
    monkeypatch.setattr(_native, "log_wants", lambda ino: True)
    monkeypatch.setattr(_native, "log_add", lambda ino, *_: ino not in location_of)
    disk.begin()
    monkeypatch.setattr(_native, "segment_known", segment_known)
    assert not disk.packer.add(5, Version(1, 10_000, 0, 0), bytes(10_000))
    assert location_of == {5: fresh}


def test_a_log_ends_when_the_cache_becomes_smaller(disk: Disk) -> None:
    """Another mount has brought a smaller --ssd: what was drawn is given back."""
    log = disk.begin()
    disk.limit_bytes //= 2
    disk.tick({})
    assert log.is_ended
    assert disk.packing == Packing.NO_ROOM
    disk.begin()
    disk.tick({})
    assert disk.packing == Packing.OPEN


@pytest.mark.parametrize("is_refused", [False, True])
def test_logs_that_are_only_read_end_then_too(disk: Disk, is_refused: bool) -> None:
    """Else nobody could evict their segments."""
    logs = [disk.begin(), disk.begin()]
    disk.packer.finish()
    disk.limit_bytes //= 2
    if is_refused:  # a further one has no room in the smaller cache
        disk.room_bytes = 0
        disk.packer.begin(CHUNKS, SIZE_BYTES, SAMPLES, BUFFER_BYTES)

    async def run() -> None:
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(disk.packer.run_forever)
                while disk.packer.has_logs:
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()

    trio.run(run)
    assert all(log.is_ended for log in logs)
    assert disk.packing == Packing.NO_ROOM
    assert disk.packer.state()["log_segments"] == 0


def test_between_two_logs_the_slack_is_nobodys(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.begin()
    disk.packer.finish()
    monkeypatch.setattr(disk, "room_bytes", lambda: 1 << 30)
    assert disk.packer.room_bytes() == (1 << 30) - payload(SLACK_BYTES)
    disk.packer.end()
    assert disk.packer.room_bytes() == 1 << 30


def test_a_first_log_that_is_written_out_keeps_its_slack(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = disk.begin()
    disk.live = dict.fromkeys(log.segnos, 5)
    monkeypatch.setattr(disk, "room_bytes", lambda: 1 << 30)
    seen = []

    def log_end() -> list[tuple[int, int, int]]:
        seen.append((disk.packer.has_logs, disk.packer.room_bytes()))
        return disk._log_end()

    monkeypatch.setattr(_native, "log_end", log_end)
    disk.packer.finish()
    assert seen == [(True, (1 << 30) - payload(SLACK_BYTES))]


def test_who_reads_beside_a_finished_log_leaves_the_slack_to_the_next(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    location_of = {7: (STATIC, 0)}
    monkeypatch.setattr(_native, "get_location", lambda ino, block: location_of.get(ino))
    assert not disk.packer.has_logs
    assert not keeps_out(disk, 1)
    disk.begin()
    disk.packer.finish()
    assert disk.packer.has_logs
    room_bytes = payload(SLACK_BYTES) + 25_000

    def look() -> int:
        disk.now += 1
        return room_bytes

    monkeypatch.setattr(disk, "room_bytes", look)
    assert [keeps_out(disk, ino) for ino in range(1, 4)] == [False, False, True]
    assert not keeps_out(disk, 7)  # it is on SSD
    disk.now += LOOK_SHARE
    assert not keeps_out(disk, 3)  # what was stored before has not taken so much
    room_bytes = 0
    disk.packer.end()
    assert not disk.packer.has_logs
    assert not keeps_out(disk, 1)


def test_a_large_file_takes_no_room_that_a_log_wants(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "log_assign", lambda inos, chunk: None)
    monkeypatch.setattr(_native, "get_location", lambda ino, block: (STATIC, 0))
    large, blocks = 3 * BLOCK_BYTES, 2
    disk.room_bytes = SLACK_BYTES + 1000 * RECORD_BYTES + blocks * 5 * BLOCK_BYTES // 4
    disk.look_s = 1.0
    disk.begin(range(1000))
    assert [keeps_out(disk, 5, large) for _ in range(blocks + 1)] == [False] * blocks + [True]


def test_a_large_file_takes_no_segment_that_a_log_wants(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However little of it is written then."""
    monkeypatch.setattr(_native, "log_assign", lambda inos, chunk: None)
    monkeypatch.setattr(_native, "get_location", lambda ino, block: None)
    large, disk.segment_bytes = 3 * BLOCK_BYTES, 8 * BLOCK_BYTES
    disk.room_bytes = SLACK_BYTES + 1000 * RECORD_BYTES + 2 * BLOCK_BYTES
    disk.look_s = 1.0
    disk.begin(range(1000))
    assert keeps_out(disk, 5, large)
    assert not disk.packer.has_spare(BLOCK_BYTES)
    disk.room_bytes += 10 * BLOCK_BYTES
    disk.now += LOOK_SHARE
    assert disk.packer.has_spare(BLOCK_BYTES)
    assert not keeps_out(disk, 5, large)
    disk.segment_bytes = 0  # it has room for the next ones; nobody looks at what is free meanwhile
    assert [keeps_out(disk, 5, large) for _ in range(4)] == [False] * 3 + [True]


def test_without_an_open_log_a_new_segment_takes_what_is_written_into_it(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.segment_bytes = 8 * BLOCK_BYTES
    monkeypatch.setattr(disk, "room_bytes", lambda: BLOCK_BYTES)
    assert disk.packer.has_spare(BLOCK_BYTES)
    assert not disk.packer.has_spare(BLOCK_BYTES + 1)


def test_what_is_stored_is_no_room_any_more(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as long as nobody looks for it, and where it came while someone looked."""

    def look() -> int:
        disk.now += 1.0
        left = 1_000 - disk.put_bytes
        disk.put_bytes += 100
        return left

    monkeypatch.setattr(disk, "room_bytes", look)
    assert disk.packer.room_bytes() == 900
    disk.put_bytes += 300
    assert disk.packer.room_bytes() == 600
    disk.put_bytes += 1_000
    assert disk.packer.room_bytes() == 0


def test_what_is_evicted_is_room_at_once(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short ago it was looked for."""
    room = 1_000

    def look() -> int:
        disk.now += 1.0
        return room

    monkeypatch.setattr(disk, "room_bytes", look)
    assert disk.packer.room_bytes() == 1_000
    room = 5_000
    assert disk.packer.room_bytes() == 1_000
    disk.given_back_bytes = 4_000
    assert disk.packer.room_bytes() == 5_000


def test_what_is_drawn_is_no_room_any_more(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as long as nobody looks for it."""
    monkeypatch.setattr(_native, "log_assign", lambda inos, chunk: None)
    disk.room_bytes = 2 * SLACK_BYTES
    disk.look_s = 1.0
    disk.begin(range(100))
    disk.credit_bytes //= 2
    before = disk.packer.room_bytes()
    disk.packer.make_credit(4096)
    assert disk.credit_bytes == SLACK_BYTES
    assert disk.packer.room_bytes() == before


def test_what_logs_that_were_cut_off_have_left_is_removed(disk: Disk) -> None:
    disk.segments |= {70, 71}
    disk.rowless, disk.live = [70, 71], {71: 1, STATIC: 5}
    disk.packer.remove_dead()
    assert disk.segments == {STATIC, 71}  # a copy there is used, the index leads to another
    assert not disk.releasing


def test_what_state_says(disk: Disk) -> None:
    assert disk.packing == Packing.NONE
    disk.begin()
    assert disk.packing == Packing.OPEN
    disk.counters["failed"] = 1
    disk.tick({})
    assert disk.packing == Packing.WRITE_FAILED
    disk.begin()
    assert disk.packing == Packing.OPEN


def test_no_room_for_a_log(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    first = disk.begin()
    disk.live = dict.fromkeys(first.segnos, 1)
    disk.room_bytes = 0
    disk.packer.begin(CHUNKS, SIZE_BYTES, SAMPLES, BUFFER_BYTES)
    assert first.is_finished  # it is read all the same
    assert not first.is_ended
    assert disk.packing == Packing.NO_ROOM
    disk.packer.assign(0, [1], np.array([5], np.uint32))
    disk.packer.open()
    monkeypatch.setattr(disk, "room_bytes", lambda: 1 << 30)
    assert disk.packer.room_bytes() == (1 << 30) - payload(SLACK_BYTES)  # the next log's


@pytest.mark.parametrize("live", [0, 1000], ids=["no room", "no credit"])
def test_what_a_dead_server_had_reserved_is_room_for_a_log(disk: Disk, live: int) -> None:
    disk.live = {STATIC: live}
    disk.room_bytes, disk.orphans_bytes = 0, 1 << 40
    disk.begin()
    assert disk.packing == Packing.OPEN


def test_a_first_log_has_all_that_a_dead_server_had_reserved(disk: Disk) -> None:
    disk.live = {STATIC: 1000}
    disk.room_bytes, disk.orphans_bytes = SLACK_BYTES, 1 << 40
    disk.begin()
    disk.packer.open()
    disk.tick({STATIC: 1000})
    assert disk.packing == Packing.OPEN  # and not DRAINING


def test_where_nobody_died_a_log_is_not_tried_again(disk: Disk) -> None:
    disk.live, disk.room_bytes = {STATIC: 1000}, 900
    disk.begin()
    assert disk.packing == Packing.NO_CREDIT
    assert len(disk.opened) == 1


def test_what_is_dead_once_a_dead_servers_log_is_known_goes_first(disk: Disk) -> None:
    disk.room_bytes, disk.orphans_bytes, disk.orphaned = 0, 1 << 40, [STATIC]
    disk.begin()
    assert STATIC not in disk.segments


def test_a_log_that_cannot_be_begun_leaves_nothing(disk: Disk) -> None:
    disk.error = OSError(12, "no memory")
    log = disk.begin()
    assert disk.packing == Packing.NO_ROOM
    assert log.is_ended
    assert disk.segments == {STATIC}


def test_an_abandoned_log_ends_unless_another_begins(disk: Disk) -> None:
    log = disk.begin()
    disk.packer.abandon()
    second = disk.begin()
    disk.tick({})
    assert not second.is_finished
    disk.packer.abandon()
    disk.tick({})
    assert log.is_ended
    assert second.is_ended
