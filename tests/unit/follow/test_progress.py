"""Positions from observations, and the orders they are looked up in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.follow.evidence import CONDEMNED_SAMPLES, chance
from hintsd.follow.progress import Progress, are_late, wire_spacing
from hintsd.follow.sequence import EpochOrder, Sequence

N = 10_000


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(0, 60))
def test_find_is_the_first_use_from_there_on(order: list[int], start: int) -> None:
    inos = np.array(order, np.uint32)
    epoch = EpochOrder(inos)
    inside = [ino for ino in order if ino]
    assert epoch.repeats == (len(set(inside)) < len(inside))
    asked = np.arange(0, 15, dtype=np.uint32)
    expected = [
        next((i for i in range(start, len(order)) if ino and order[i] == ino), -1)
        for ino in asked.tolist()
    ]
    assert epoch.find(asked, start).tolist() == expected
    assert epoch.contains(asked).tolist() == [bool(ino) and ino in order for ino in range(15)]


def test_positions_run_over_the_epochs() -> None:
    sequence = Sequence(3)
    sequence.put(4, np.array([7, 8, 9], np.uint32))
    sequence.put(5, np.array([9, 7, 8], np.uint32))
    assert sequence.locate(np.array([7, 9, 1], np.uint32), 13).tolist() == [
        [12, 14, -1],
        [16, 15, -1],
    ]
    assert sequence.known_until(12) == 18
    assert sequence.known_until(9) == 9
    assert sequence.inos_at(np.array([14, 15, 18])).tolist() == [9, 9, 0]
    with pytest.raises(ValueError, match="epoch 6 has no samples"):
        sequence.put(6, np.empty(0, np.uint32))


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.integers(0, 3),
    st.integers(1, 6),
    st.data(),
)
def test_positions_of_epochs_of_unequal_lengths(
    lengths: list[int], first: int, n: int, data: st.DataObject
) -> None:
    """They come one after the other, and the reader follows; what was known moves nowhere."""
    sequence = Sequence(n)
    starts: dict[int, int] = {}
    for epoch, length in enumerate(lengths, first):
        order = (np.arange(length) + 100 * epoch + 1).astype(np.uint32)
        sequence.put(epoch, order)
        starts[epoch] = sequence.start(epoch)
        if data.draw(st.booleans()):
            sequence.forget_before(data.draw(st.integers(first, epoch)))
    where: dict[int, tuple[int, int]] = {}
    for epoch in sequence.orders:
        length = lengths[epoch - first]
        assert (sequence.start(epoch), sequence.length(epoch)) == (starts[epoch], length)
        where |= {starts[epoch] + index: (epoch, index) for index in range(length)}
    positions = np.array(sorted(where))
    for position, place in where.items():
        assert sequence.at(position) == place
    assert sequence.starts_of(positions).tolist() == [
        starts[where[p][0]] for p in positions.tolist()
    ]
    inos = [100 * epoch + index + 1 for epoch, index in map(where.__getitem__, positions.tolist())]
    assert sequence.inos_at(positions).tolist() == inos
    assert sequence.locate(np.array(inos, np.uint32), 0).max(axis=0).tolist() == positions.tolist()
    end = max(where) + 1
    assert sequence.known_until(min(where)) == end
    assert sequence.at(end) == (first + len(lengths), 0)
    assert sequence.at(end + lengths[-1]) == (first + len(lengths) + 1, 0)


def test_an_epoch_far_ahead_costs_no_more_than_the_next_one() -> None:
    sequence = Sequence(3)
    sequence.put(0, np.array([7, 8, 9], np.uint32))
    far = 1 << 32
    assert sequence.is_moved_by(far, 2)
    assert not sequence.is_moved_by(1, 2)
    sequence.forget()
    sequence.put(far, np.array([7, 8], np.uint32))
    assert sequence.at(sequence.start(far) + 2) == (far + 1, 0)
    assert sequence.length(far + 1) == 2


@given(st.integers(1, 5000))
def test_each_batch_or_a_whole_number_of_batches_begins_with_a_wire(batch_size: int) -> None:
    spacing = wire_spacing(batch_size)
    assert spacing >= 64
    if batch_size < 64:
        assert spacing % batch_size == 0
    else:
        assert spacing <= batch_size
        assert spacing < 256


@pytest.mark.parametrize(
    ("batch_size", "sample_bytes", "spacing"),
    [
        (1, 20 << 20, 1),  # shards
        (1, 1 << 20, 8),
        (32, 4 << 20, 2),
        (64, 1 << 20, 8),
        (7, 4 << 20, 1),
        (6, 2 << 20, 3),
        (64, 100_000, 64),
        (1, 0, 64),
    ],
)
def test_wires_of_large_samples_are_some_bytes_apart(
    batch_size: int, sample_bytes: int, spacing: int
) -> None:
    assert wire_spacing(batch_size, sample_bytes) == spacing


def make(batch_size: int = 64, workers: int = 2, start: int = 0) -> Progress:
    return Progress(
        N, start=start, batch_size=batch_size, workers=workers, prefetch_factor=2, now=0.0
    )


def feed(
    progress: Progress,
    positions: list[int],
    *,
    reads: bool,
    now: float = 0.0,
    ino: int = 1,
    unfired: int | None = None,
) -> None:
    """Observations of files that are used at these positions; `unfired`: None, all wires fired."""
    for position in positions:
        where = np.array([[position]])
        placed = progress.place(where, unfired)
        yes, no = np.array([True]), np.array([False])
        progress.take(
            np.array([ino], np.uint32),
            where,
            placed,
            yes if reads else no,
            placed < 0,
            unfired,
            now,
        )
        progress.settle(unfired, 0)
        progress.check_invariants()


def test_low_waits_for_the_first_wire_that_has_not_fired_but_not_for_ever() -> None:
    progress = make()
    feed(progress, [0, 64, 128, 192, 256], reads=False)
    assert (progress.low, progress.high) == (129, 257)  # two workers: two batches being read
    progress.settle(200, 0)
    assert progress.low == 129
    for position in range(320, 1000, 64):
        feed(progress, [position], reads=False)
    assert progress.high - progress.low <= progress.slack


def test_unknown_workers_are_sixteen_and_take_room_for_a_quarter_epoch_at_most() -> None:
    assert make(workers=0, batch_size=8).disorder == 33 * 8
    progress = make(workers=0, batch_size=512)
    assert progress.disorder == N
    assert progress.at_once == N // 4 + progress.spacing
    assert make(workers=16, batch_size=512).at_once == 16 * 512 + progress.spacing


@pytest.mark.parametrize("workers", [4, 8])
def test_low_passes_nothing_of_an_epoch_that_may_be_in_flight_as_a_whole(workers: int) -> None:
    progress = Progress(150, start=150, batch_size=64, workers=workers, prefetch_factor=2, now=0.0)
    feed(progress, [150, 214, 278, 299], reads=False)
    assert (progress.low, progress.high) == (150, 300)
    feed(progress, [152, 280, 216], reads=True)
    assert (progress.low, progress.high) == (150, 300)
    progress.enter(300)
    assert (progress.low, progress.high) == (300, 300)
    progress.enter(150)
    assert (progress.low, progress.high) == (300, 300)


def test_strays_condemn_and_samples_in_order_excuse() -> None:
    wrong = make()
    feed(wrong, [5000] * int(CONDEMNED_SAMPLES), reads=True)
    assert wrong.evidence.condemned(0.0)
    right = make()
    for sample in range(2000):
        stranger = (sample * 7919 + 5000) % N
        feed(right, [sample, stranger], reads=True, unfired=(sample // 64 + 1) * 64)
    assert not right.evidence.condemned(0.0)
    assert right.high >= 1990


def test_look_ups_alone_must_go_on_for_a_while() -> None:
    progress = make()
    for count in range(20):
        feed(progress, [5000 + count], reads=False, ino=100 - count)
    assert not progress.evidence.condemned(0.5)
    assert progress.evidence.condemned(1.5)
    ascending = make()
    for count in range(200):
        feed(ascending, [5000 + count], reads=False, ino=100 + count)
    assert not ascending.evidence.condemned(1.5)


def test_slow_look_ups_condemn_in_any_order_sooner() -> None:
    progress = make()
    for count in range(5):
        feed(progress, [5000 + count], reads=False, ino=100 + count, now=0.08 * count)
    assert progress.evidence.condemned(0.4)
    bursts = make()
    for count in range(20):
        feed(bursts, [5000 + count], reads=False, ino=100 + count, now=0.3 * (count // 5))
    assert not bursts.evidence.condemned(1.5)


def test_a_jump_is_seen_from_reads_in_a_row() -> None:
    progress = make()
    feed(progress, list(range(400)), reads=True)
    assert progress.jump() is None
    feed(progress, list(range(7000, 7060)), reads=True)
    assert progress.jump() == pytest.approx(7000, abs=60)


def test_scattered_strays_are_no_jump() -> None:
    progress = make()
    rng = np.random.default_rng(2)
    for position in rng.integers(2000, N, 3000).tolist():
        feed(progress, [position], reads=True)
        assert progress.jump() is None


def test_steps_bound_the_position_from_below_and_start_over() -> None:
    progress = make()
    progress.step(640, 1.0)
    assert progress.low == progress.high == 640
    progress.step(704, 1.0)
    feed(progress, [900], reads=False)
    assert (progress.low, progress.high) == (773, 901)
    progress.step(64, 2.0)
    assert progress.low == 64


def test_what_a_step_has_overtaken_is_no_stray() -> None:
    progress = make()
    for position in range(0, 5000, 64):
        now = position / 1000
        progress.pace(now)
        progress.step(position + 64, now)
        feed(progress, [position], reads=False, now=now)
    assert progress.evidence.strays == 0
    assert not progress.evidence.condemned(10.0)
    feed(progress, [0], reads=False)
    assert progress.evidence.strays == 1


def test_what_is_told_long_after_a_step_is_not_taken_for_the_next_use() -> None:
    """A reader of one batch at a time; its look-ups come by frames, a while after its steps."""
    progress = Progress(1000, start=0, batch_size=10, workers=1, prefetch_factor=2, now=0.0)
    for position in range(0, 1000, 10):
        now = position / 1000
        progress.pace(now)
        progress.step(position + 10, now)
        if position < 800:
            feed(progress, [position], reads=False, now=now)
    late, again = 850, 1185  # the file's uses at one epoch's end and at the next one's beginning
    candidates = np.array([[late], [again]])
    assert late < progress.low - progress.slack
    assert again < progress.zone_end(None)
    assert progress.place(candidates, None).tolist() == [-1]
    progress.pace(3.0)
    progress.pace(5.0)
    progress.step(1010, 5.0)
    assert progress.place(candidates, None).tolist() == [again]  # nothing comes as late as that


@pytest.mark.parametrize("uses", [(100, 850), (850, 1040)])
def test_a_late_read_of_a_file_that_comes_again_moves_nothing(uses: tuple[int, ...]) -> None:
    """What was read is the use at 850: it was told of behind the step to 900."""
    n, file, again = 1100, 5000, 1150
    orders = np.arange(1, 2 * n + 1, dtype=np.uint32).reshape(2, n)
    orders[0, list(uses)] = orders[1, again - n] = file
    sequence = Sequence(n, 2)
    for epoch, order in enumerate(orders):
        sequence.put(epoch, order)
    progress = Progress(n, start=0, batch_size=10, workers=4, prefetch_factor=2, now=0.0)
    progress.expect_unseen(0, has_repeats=True)
    for step in range(10, 910, 10):
        progress.pace(step / 100)
        progress.step(step, step / 100)
    assert 100 < progress.floor < 850 < progress.low
    seen = np.array([file, 905, n + 2], np.uint32)  # the last one is of the second epoch alone
    where = sequence.locate(seen, progress.low)
    assert progress.high <= where[where > progress.low].max() < progress.zone_end(None)
    placed = progress.place(where, None)
    assert placed[0] >= progress.high, "it is taken for a use that is to come"
    earlier = sequence.locate(seen, progress.floor)
    assert are_late(progress, placed, earlier).tolist() == [True, False, False]


def test_pace_and_idleness() -> None:
    progress = make()
    feed(progress, [500], reads=True, now=1.0)
    progress.pace(2.0)
    assert progress.samples_per_s == pytest.approx(501 / 2)
    assert not progress.idle(50.0)
    assert progress.idle(70.0)


def test_chance_is_the_binomial_tail() -> None:
    assert chance(0, 5, 10) == pytest.approx(1.0)
    assert chance(5, 5, 50) == pytest.approx(1 / 32)
