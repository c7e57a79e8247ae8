"""What hintsd tells a recording that readers have passed: each position once, in order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fusecache.base.wire import Fields, Observed, Result, WireError
from fusecache.recording.passings import WAITING_MOST, Passings
from hintsd.follow.progress import AT_END_S, Progress
from hintsd.follow.sequence import Inos, Sequence
from hintsd.follow.trail import STRETCH_MOST, Trail
from hintsd.plan.planner import MountPlanner

N = 100


def order(seed: int, samples: int = N) -> Inos:
    return np.random.default_rng(seed).permutation(samples).astype(np.uint32) + 1


def trail_at(position: int, samples: int = N) -> tuple[Trail, Sequence, Progress]:
    progress = Progress(
        samples, start=position, batch_size=1, workers=1, prefetch_factor=1, now=0.0
    )
    sequence = Sequence(samples)
    return Trail("job", sequence, progress), sequence, progress


def told(trail: Trail, stop: int) -> list[tuple[int, list[int]]]:
    return [(passed.position, passed.inos.tolist()) for passed in trail.follow(stop)]


def test_each_position_is_told_once_and_no_stretch_leaves_its_epoch() -> None:
    trail, sequence, _ = trail_at(90)
    first, second = order(0), order(1)
    sequence.put(0, first)
    sequence.put(1, second)
    assert told(trail, 90) == []
    assert told(trail, 95) == [(90, first[90:95].tolist())]
    sequence.forget_before(1)  # its window has left the epoch, its reader has not
    assert told(trail, 130) == [(95, first[95:].tolist()), (100, second[:30].tolist())]
    assert told(trail, 120) == []


def test_nothing_is_told_by_positions_that_mean_others_now() -> None:
    trail, sequence, _ = trail_at(0)
    sequence.put(0, order(0))
    assert told(trail, 10) == [(0, order(0)[:10].tolist())]
    sequence.forget()
    sequence.put(0, order(2))
    assert told(trail, 20) == [(10, order(2)[10:20].tolist())]
    sequence.forget()
    assert told(trail, 30) == []


def test_long_stretches_are_told_in_parts() -> None:
    samples = STRETCH_MOST + 5
    trail, sequence, _ = trail_at(0, samples)
    sequence.put(0, order(0, samples))
    assert [len(inos) for _, inos in told(trail, samples)] == [STRETCH_MOST, 5]


def test_nothing_is_told_of_an_epoch_that_is_not_known() -> None:
    trail, sequence, _ = trail_at(0)
    sequence.put(1, order(1))
    assert [position for position, _ in told(trail, 150)] == [100]


@pytest.mark.parametrize("is_lost", [False, True])
def test_after_a_move_it_goes_on_from_there(is_lost: bool) -> None:
    trail, sequence, progress = trail_at(0)
    sequence.put(0, order(0))
    trail.follow(10)
    if is_lost:
        trail.lose()
    for place in (60, 20):
        progress.move(place, 0.0)
        assert [(at, len(inos)) for at, inos in told(trail, place + 5)] == [(place, 5)]


def test_who_is_given_up_is_told_of_from_where_it_is_seen_next() -> None:
    """Where it was thought to be another hintsd may have told."""
    trail, sequence, progress = trail_at(10)
    sequence.put(0, order(0))
    trail.lose()
    assert told(trail, 10) == []
    progress.step(12, 0.0)
    assert told(trail, 12) == []
    progress.step(20, 0.0)
    assert told(trail, 20) == [(12, order(0)[12:20].tolist())]


# ---- the planner's -------------------------------------------------------------------------------


class Read:
    """A job whose reader has all in RAM, and a wire fired at each 64th sample and the last."""

    def __init__(self, is_lost: bool = False) -> None:
        self.now = 0.0
        self.order = order(3, 640)
        self.planner = MountPlanner(1 << 30, 1 << 30)
        inos = np.sort(self.order)
        self.planner.learn(inos, np.full(640, 100, np.uint32), np.ones(640, np.uint8))
        self.planner.open_job(
            "job", samples_per_epoch=640, epochs=None, epoch=0, index=0, batch_size=8,
            workers=1, prefetch_factor=2, dataset=inos, now=0.0, is_lost=is_lost,
        )  # fmt: skip
        self.planner.supply("job", 0, self.order)
        self.armed: set[int] = set()
        self.decide()

    def decide(self) -> None:
        for _ in range(4):
            for command in self.planner.decide(self.now):
                if command.kind == "arm":
                    self.armed |= set(command.inos.tolist())
                elif command.kind == "stage":
                    results = np.full(len(command.inos), Result.STAGED_AND_STORED, np.uint8)
                    self.planner.done(command.inos, results, self.now)

    def read(self, start: int, stop: int) -> None:
        for ino in self.order[start:stop].tolist():
            self.now += 0.001
            if ino in self.armed:
                self.armed.remove(ino)
                kinds = np.array([Observed.LOOKUP], np.uint8)
                self.planner.followers.observe(np.array([ino], np.uint32), kinds, self.now)
                self.decide()

    def passed(self) -> list[int]:
        stretches = self.planner.trails.passed(self.now)
        ends = [passed.position + len(passed.inos) for passed in stretches]
        assert [passed.position for passed in stretches[1:]] == ends[:-1]
        return list(itertools.chain(*(passed.inos.tolist() for passed in stretches)))


def test_nothing_is_told_without_a_recording() -> None:
    reader = Read()
    reader.read(0, 300)
    assert reader.passed() == []


def test_what_is_told_is_what_was_read_since_the_recording_began() -> None:
    reader = Read()
    reader.read(0, 200)
    reader.planner.trails.record(1)
    assert reader.passed() == []
    got: list[int] = []
    for start in range(200, 600, 50):
        reader.read(start, start + 50)
        got += reader.passed()
        behind = 50 + start - (200 + len(got))
        assert behind >= 0
    first = reader.order.tolist().index(got[0])
    assert 192 <= first <= 200
    assert got == reader.order[first : first + len(got)].tolist()
    assert 600 - first - len(got) <= 64 + 8 + 64
    reader.planner.trails.record(0)
    reader.read(600, 640)
    assert reader.passed() == []


def test_the_end_of_an_epoch_is_told_when_all_is_quiet() -> None:
    reader = Read()
    reader.planner.trails.record(1)
    reader.read(0, 640)
    got = reader.passed()
    assert len(got) < 640
    reader.now += AT_END_S + 1
    assert got + reader.passed() == reader.order.tolist()


def test_of_a_job_of_a_hintsd_before_nothing_is_told_but_from_where_its_reader_is() -> None:
    """All before may have been told by the one before; a step tells the place."""
    reader = Read(is_lost=True)
    reader.planner.trails.record(1)
    assert reader.passed() == []
    reader.planner.followers.step("job", 0, 20, reader.now)  # not far: this is no move
    assert reader.passed() == []
    reader.planner.followers.step("job", 0, 38, reader.now)
    assert reader.passed() == reader.order[20 * 8 : 38 * 8].tolist()


def test_a_reader_who_is_found_before_anybody_asks_is_told_of_from_there() -> None:
    reader = Read(is_lost=True)
    reader.planner.trails.record(1)
    reader.planner.followers.step("job", 0, 20, reader.now)
    assert reader.passed() == []


def test_of_a_closed_job_what_is_certain_is_told() -> None:
    reader = Read()
    reader.planner.trails.record(1)
    reader.read(0, 300)
    reader.planner.followers.step("job", 0, 38, reader.now)
    reader.planner.close_job("job")
    assert reader.passed() == reader.order[: 38 * 8].tolist()
    assert reader.passed() == []


# ---- the mount's ---------------------------------------------------------------------------------


def frame(passings: Passings, **other: object) -> Fields:
    values = {"recording": passings.recording, "job": "j", "position": 0, "samples": 10}
    inos = np.arange(3, dtype=np.uint32).tobytes()
    return Fields(values | {"inos": inos} | other)


def test_frames_wait_for_their_recording() -> None:
    passings = Passings()
    passings.put(frame(passings, recording=1))
    assert passings.take() == []  # nobody records
    passings.begin()
    passings.put(frame(passings))
    passings.put(frame(passings, recording=passings.recording + 1))
    assert [(p.job, p.position, len(p.inos)) for p in passings.take()] == [("j", 0, 3)]
    assert passings.take() == []
    passings.put(frame(passings))
    passings.end()
    passings.begin()
    assert passings.take() == []


def test_what_waits_is_bounded() -> None:
    passings = Passings()
    passings.begin()
    for _ in range(3):
        passings.put(frame(passings, inos=bytes(4 * (WAITING_MOST // 2))))
    assert len(passings.take()) == 2


@pytest.mark.parametrize(
    "wrong", [{"job": 3}, {"position": -1}, {"samples": 0}, {"inos": b"123"}, {"recording": 0}]
)
def test_wrong_frames_are_refused(wrong: dict[str, object]) -> None:
    passings = Passings()
    passings.begin()
    with pytest.raises(WireError):
        passings.put(frame(passings, **wrong))
