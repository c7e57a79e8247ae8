"""What the packer decides: how much may be appended, and which segments go. The log on disk, and
real mounts: mount/test_log.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from fusecache import _native, packer
from fusecache.packer import NO_CREDIT, NO_ROOM, NONE, OPEN, WRITE_FAILED, Packer

CHUNKS, BUFFER_BYTES, SIZE_BYTES = 4, 1 << 16, 40 << 20
SLACK_BYTES = CHUNKS * BUFFER_BYTES * 13 // 10 + 3 * (10 << 20)
STATIC = 7  # a segment with rows in the index


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

    def finish(self, lengths: Iterable[tuple[int, int]]) -> None:
        self.is_finished = True

    def rows_in(self, segnos: Sequence[int]) -> dict[int, int]:
        return {segno: self.disk.rows.get(segno, 0) for segno in segnos}

    def release(self, segnos: Sequence[int]) -> int:
        assert not {*segnos} & self.disk.in_use
        assert self.disk.releasing == {*segnos}
        self.disk.segments -= {*segnos}
        return len(segnos)

    def end(self) -> None:
        self.is_ended = True


class Disk:
    """The store and C's part of the log, as far as a packer sees them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room_bytes = 1 << 40
        self.segments = {STATIC}
        self.rows = {STATIC: 10}
        self.in_use: set[int] = set()  # being written by the store
        self.live: dict[int, int] = {}
        self.left: dict[int, int] = {}
        self.credit_bytes = 0
        self.counters = dict.fromkeys(("written_bytes", "waiting_bytes", "refused", "failed"), 0)
        self.logs: list[FakeLog] = []
        self.looks = 0
        self.now = 100.0
        self.error: OSError | None = None
        self.releasing: set[int] = set()
        for name in ("log_begin", "log_end", "log_credit", "log_left", "live_in"):
            monkeypatch.setattr(_native, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(_native, "log_counters", lambda: dict(self.counters))
        monkeypatch.setattr(_native, "segment_known", lambda segno: segno in self.segments)
        monkeypatch.setattr(packer.time, "monotonic", lambda: self.now)  # type: ignore[attr-defined]
        store: Any = self
        self.packer = Packer(store, b"d" * 16, self.releasing)

    def begin_log(self, chunks: int, slack_bytes: int) -> FakeLog | None:
        assert (chunks, slack_bytes) == (CHUNKS, SLACK_BYTES)
        credit = min(slack_bytes, self.room_bytes)
        if not credit:
            return None
        self.room_bytes -= credit
        self.logs.append(FakeLog(self, credit))
        return self.logs[-1]

    def _log_begin(self, *arguments: Any) -> None:
        if self.error is not None:
            raise self.error
        self.credit_bytes = arguments[-1]

    def _log_end(self) -> list[tuple[int, int]]:
        return [(segno, 4096) for segno in self.logs[-1].segnos]

    def _log_credit(self, more_bytes: int) -> int:
        self.credit_bytes += more_bytes
        return self.credit_bytes

    def _log_left(self) -> list[tuple[int, int]]:
        left, self.left = list(self.left.items()), {}
        return left

    def _live_in(self, segnos: bytes) -> list[int]:
        self.looks += 1
        return [self.live.get(int(segno), 0) for segno in np.frombuffer(segnos, np.uint32)]

    def begin(self) -> FakeLog:
        self.packer.begin(CHUNKS, SIZE_BYTES, BUFFER_BYTES)
        return self.logs[-1]

    def tick(self, left: dict[int, int], after_s: float = 10.0) -> None:
        self.left, self.now = left, self.now + after_s
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


def test_nobody_looks_before_enough_has_left(disk: Disk) -> None:
    disk.begin()
    disk.live = {STATIC: 9}
    disk.tick({STATIC: 1})
    assert disk.looks == 1
    disk.tick({STATIC: 8}, after_s=0.1)
    disk.tick({}, after_s=10)
    assert disk.looks == 1
    disk.live = {STATIC: 1}
    disk.tick({STATIC: 1})
    assert disk.looks == 2
    disk.live = {}
    disk.looks = 1
    disk.tick({STATIC: 1}, after_s=0.1)  # not twice a second
    assert disk.looks == 1
    disk.tick({})
    assert disk.looks == 2
    assert STATIC not in disk.segments


def test_a_segment_that_is_still_written_stays(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.begin()
    monkeypatch.setattr(FakeLog, "release", lambda self, segnos: 0)
    disk.tick({STATIC: 10})
    looks = disk.looks
    disk.tick({})
    assert disk.looks == looks


def test_logs_follow_each_other(disk: Disk) -> None:
    first = disk.begin()
    second = disk.begin()
    assert first.is_finished
    assert not second.is_finished
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
    assert disk.logs[-1].is_finished
    assert disk.logs[-1].is_ended
    assert disk.packing == NONE
    assert disk.packer.state()["log_segments"] == 0


def test_credit_is_drawn_as_there_is_room(disk: Disk) -> None:
    disk.begin()
    assert disk.credit_bytes == SLACK_BYTES
    assert disk.packer.room_bytes(1 << 30) == 1 << 30
    disk.packer.make_credit(4096)
    assert disk.credit_bytes == SLACK_BYTES
    disk.credit_bytes = 100
    assert disk.packer.room_bytes(1 << 30) == (1 << 30) + 100 - SLACK_BYTES
    assert disk.packer.room_bytes(100) == 0
    disk.packer.make_credit(4096)
    assert disk.credit_bytes == SLACK_BYTES
    disk.packer.make_credit(SLACK_BYTES)  # for each of those that append
    assert disk.credit_bytes == packer.APPENDERS_MOST * SLACK_BYTES
    disk.credit_bytes = disk.room_bytes = 0
    disk.packer.make_credit(4096)
    disk.room_bytes = 50
    disk.packer.make_credit(4096)  # not asked for all the time
    assert disk.credit_bytes == 0
    disk.now += 1
    disk.packer.make_credit(4096)
    assert disk.credit_bytes == 50


def test_what_state_says(disk: Disk) -> None:
    assert disk.packing == NONE
    disk.begin()
    assert disk.packing == OPEN
    disk.counters["refused"] = 3
    disk.tick({})
    assert disk.packing == NO_CREDIT
    disk.tick({})
    assert disk.packing == OPEN
    disk.counters["failed"] = 1
    disk.tick({})
    disk.tick({})
    assert disk.packing == WRITE_FAILED
    disk.begin()
    assert disk.packing == OPEN


def test_no_room_for_a_log(disk: Disk) -> None:
    first = disk.begin()
    disk.room_bytes = 0
    disk.packer.begin(CHUNKS, SIZE_BYTES, BUFFER_BYTES)
    assert first.is_finished  # it is read all the same
    assert not first.is_ended
    assert disk.packing == NO_ROOM
    disk.packer.assign(0, [1], np.array([5], np.uint32))
    disk.packer.open()
    assert disk.packer.room_bytes(5) == 5


def test_a_log_that_cannot_be_begun_leaves_nothing(disk: Disk) -> None:
    disk.error = OSError(12, "no memory")
    log = disk.begin()
    assert disk.packing == NO_ROOM
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
