"""How much of the budget lanes have: more where that makes readers faster."""

from __future__ import annotations

import itertools

from hintsd.plan.lanes import LEAST_PART, MOST_PART, REST_FIRST_S, TRIED_S, Room


class Reading:
    """At a speed that may follow from what lanes have; some of it comes while it is fetched."""

    def __init__(self, *, fetching_share: float = 0.5, is_scarce: bool = True) -> None:
        self.room = Room()
        self.fetching_share, self.is_scarce = fetching_share, is_scarce
        self.now = 0.0
        self._samples = self._fetching = 0.0

    def read(self, seconds: float, speeds: dict[int, float]) -> None:
        """`speeds`: samples a second by the part of the budget."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self._samples += speeds[self.room.part] / 10
            self._fetching += self.fetching_share * speeds[self.room.part] / 10
            self.room.look(int(self._samples), int(self._fetching), self.is_scarce, self.now)


LATENCY = {8: 500.0, 4: 900.0, 2: 1500.0}
BANDWIDTH = {8: 1000.0, 4: 990.0, 2: 970.0}


def test_more_is_more_speed_where_answers_take_long() -> None:
    reading = Reading()
    reading.read(7 * TRIED_S, LATENCY)
    assert reading.room.part == MOST_PART
    reading.read(3600, LATENCY)
    assert reading.room.part == MOST_PART


def test_where_it_gains_nothing_it_is_tried_for_seconds_and_less_and_less_often() -> None:
    reading = Reading()
    tried = []
    for _ in range(3600):
        reading.read(1, BANDWIDTH)
        if reading.room.part != LEAST_PART:
            tried.append(reading.now)
    assert 20 < len(tried) < 50, "seconds of an hour"
    rests = [later - earlier for earlier, later in itertools.pairwise(tried)]
    longest = [rest for rest in rests if rest > REST_FIRST_S / 2]
    assert longest[0] > 0.9 * REST_FIRST_S
    assert all(later > 1.8 * earlier for earlier, later in itertools.pairwise(longest))


def test_it_is_not_tried_where_readers_are_not_late_or_room_is_left() -> None:
    for reading in (Reading(fetching_share=0.05), Reading(is_scarce=False)):
        reading.read(60, LATENCY)
        assert reading.room.part == LEAST_PART


def test_a_pause_is_no_speed() -> None:
    """Neither before a trial nor in its midst: readers are looked at meanwhile, too."""
    reading = Reading(is_scarce=False)
    reading.read(60, LATENCY)
    reading.read(21, dict.fromkeys(LATENCY, 0.0))
    reading.is_scarce = True
    reading.read(0.9 * TRIED_S, BANDWIDTH)
    reading.read(4 * TRIED_S, BANDWIDTH)
    assert reading.room.part == LEAST_PART, "what came after the pause was no slow reading"
    reading = Reading()
    while reading.room.part == LEAST_PART:
        reading.read(0.1, LATENCY)
    reading.read(TRIED_S + 0.1, LATENCY)
    reading.read(31, dict.fromkeys(LATENCY, 0.0))
    reading.read(4 * TRIED_S, LATENCY)
    assert reading.room.part < LEAST_PART
