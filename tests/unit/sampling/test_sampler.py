"""hintsd.ImportanceSampler without torch: epochs, pairing, states, bad input."""

from __future__ import annotations

import math
import warnings
from itertools import islice
from typing import Any

import numpy as np
import pytest

import hintsd
from hintsd import ImportanceSampler

Heard = list[warnings.WarningMessage]


class Data:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def losses_of(indices: Any, epoch: int = 0) -> Any:
    """Of its own for each sample and epoch."""
    return 1 + np.sin(np.asarray(indices, np.float64) * (epoch + 1)) ** 2


def train(
    sampler: ImportanceSampler, epochs: int, batch: int = 4, after: int | None = None
) -> list[list[int]]:
    """What is read; of the last epoch only so many batches, if `after` says so."""
    read = []
    for number in range(epochs):
        epoch, order, batches = sampler.epoch, [], 0
        indices = iter(sampler)
        while taken := list(islice(indices, batch)):
            order += taken
            sampler.learn(losses_of(taken, epoch))
            batches += 1
            if number == epochs - 1 and batches == after:
                break
        read.append(order)
    return read


def texts(heard: Heard) -> list[str]:
    return [str(each.message) for each in heard]


GO_ON = "; training goes on with the scores that there are"


# ---- epochs --------------------------------------------------------------------------------------


def test_the_first_epoch_is_a_permutation_and_the_next_is_drawn(heard: Heard) -> None:
    sampler = ImportanceSampler(20, batch_size=4)
    first, second = train(sampler, 2)
    assert sorted(first) == list(range(20))
    assert len(second) == 20
    assert len(set(second)) < 20
    assert sampler.epoch == 2
    assert texts(heard) == []


def test_an_epoch_is_drawn_by_the_scores_of_the_one_before() -> None:
    """What loses nothing is read a tenth as often as all alike would be, and what loses all ..."""
    sampler = ImportanceSampler(1000, "loss", batch_size=1000)
    order = list(sampler)
    sampler.learn((np.array(order) == 5).astype(float))
    expected = sampler.expected_reads()
    assert expected[5] == pytest.approx(900.1)
    assert expected[6] == pytest.approx(0.1)
    counts = np.bincount(list(sampler), minlength=1000)
    assert counts[5] > 850


def test_its_length_is_that_of_the_epoch_that_is_read() -> None:
    sampler = ImportanceSampler(10, "icache", fraction=0.5, batch_size=2)
    assert len(sampler) == 10
    indices = iter(sampler)
    assert len(sampler) == 10
    for _ in range(10):
        next(indices)
    assert len(sampler) == 10
    assert next(indices, None) is None
    assert len(sampler) == 5
    assert len(list(sampler)) == 5


def test_an_epoch_that_is_left_is_not_read_on() -> None:
    sampler = ImportanceSampler(10, "icache", fraction=0.5)
    indices = iter(sampler)
    next(indices)
    del indices
    assert len(sampler) == 5
    assert sampler.epoch == 1


def test_asking_for_the_order_changes_nothing() -> None:
    asked, other = (ImportanceSampler(30, seed=2, batch_size=4) for _ in range(2))
    for _ in range(3):
        order = asked.order_of_next_epoch()
        assert (order == asked.order_of_next_epoch()).all()
        assert asked.drawn()[0][0] == asked.epoch
        read = train(asked, 1)[0]
        assert read == order.tolist()
        assert read == train(other, 1)[0]
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 1


def test_iterators_that_nobody_reads_take_no_epoch() -> None:
    """torch makes two for each pass of a loader with workers."""
    sampler = ImportanceSampler(10)
    iter(sampler), iter(sampler)
    assert sampler.epoch == 0


def test_an_iterator_of_an_earlier_epoch_counts_for_nothing() -> None:
    sampler = ImportanceSampler(10, batch_size=5)
    old = iter(sampler)
    next(old)
    new = iter(sampler)
    for _ in range(4):
        next(new), next(old)
    assert sampler.report().refused == 0
    sampler.learn(np.ones(5))
    assert sampler.report().refused == 5, "no batch of five is handed out yet"


def test_draw_ahead_draws_an_epoch_earlier() -> None:
    now, ahead = (ImportanceSampler(40, draw_ahead=d, batch_size=4) for d in (0, 1))
    train(now, 1), train(ahead, 1)
    assert now.drawn() == []
    ((number, order),) = ahead.drawn()
    assert number == 1
    assert sorted(order) == list(range(40)), "there was no score when it was drawn"
    known = order.tolist()
    assert train(ahead, 1) == [known]
    (_, order), before = ahead.drawn()[0], ahead.report().times.copy()
    assert len(set(order.tolist())) < 40
    assert before.sum() == 80


def test_hooks_hear_of_draws_and_scores(heard: Heard) -> None:
    sampler = ImportanceSampler(8, "icache", batch_size=4, draw_ahead=1)
    drawn: list[Any] = []
    scores: list[Any] = []
    remove = sampler.on_drawn(lambda epoch, indices: drawn.append((epoch, indices.tolist())))
    sampler.on_scores(lambda *told: scores.append(told))
    sampler.on_scores(lambda *told: 1 / 0)
    (read,) = train(sampler, 1)
    assert [epoch for epoch, _ in drawn] == [0, 1]
    assert drawn[0][1] == read
    assert [(epoch, len(i)) for epoch, i, _ in scores] == [(0, 4), (0, 4)]
    assert np.concatenate([i for _, i, _ in scores]).tolist() == read
    assert np.concatenate([v for _, _, v in scores]) == pytest.approx(losses_of(read))
    remove()
    train(sampler, 1)
    assert len(drawn) == 2
    assert texts(heard) == [
        "hintsd: ImportanceSampler: a hook failed (ZeroDivisionError('division by zero'))" + GO_ON
    ]


def test_an_epoch_that_cannot_be_drawn_is_shuffled(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = ImportanceSampler(20, batch_size=4)
    train(sampler, 1)
    monkeypatch.setattr(sampler._drawing, "_weights", lambda scores: np.empty(1 << 62))
    (read,) = train(sampler, 1)
    assert sorted(read) == list(range(20))
    assert "an epoch cannot be drawn by its scores, and is shuffled" in texts(heard)[0]


def test_no_other_generator_is_drawn_from() -> None:
    state = str(np.random.get_state())
    train(ImportanceSampler(50, batch_size=4), 3)
    assert str(np.random.get_state()) == state


# ---- pairing -------------------------------------------------------------------------------------


def test_losses_are_paired_with_the_batches_in_order() -> None:
    """Also the last one, which is short."""
    sampler = ImportanceSampler(10, "icache")
    train(sampler, 1, batch=4)
    assert sampler.h_list().tolist() == np.sort(np.argsort(-losses_of(range(10)))[:7]).tolist()
    assert sampler.report().times.tolist() == [1] * 10


def test_ranks_of_a_short_batch_are_those_of_a_whole_one() -> None:
    """Equation 6 alone would give the last of ten at most log(1 + 10)."""
    sampler = ImportanceSampler(10, batch_size=4)
    told: list[Any] = []
    sampler.on_scores(lambda epoch, indices, values: told.append(values))
    list(sampler)
    for losses in (np.arange(4.0), np.arange(4.0), np.arange(2.0)):
        sampler.learn(losses)
    assert told[2] == pytest.approx(np.log([10, 13]))
    list(sampler)
    sampler.learn(np.array([math.nan, 7.0, 3.0, math.nan]))
    assert told[3] == pytest.approx(np.log([13, 10]))


def test_losses_with_indices_count_for_a_state_within_the_epoch() -> None:
    sampler, resumed = (ImportanceSampler(12, batch_size=4) for _ in range(2))
    order = list(islice(iter(sampler), 8))
    sampler.learn(np.ones(4), indices=order[:4])
    resumed.load_state_dict(sampler.state_dict())
    assert list(resumed)[:4] == order[4:]


def test_losses_come_with_indices_too() -> None:
    sampler = ImportanceSampler(10, "loss", batch_size=5)
    list(sampler)
    sampler.learn([4.0, 8.0], indices=[3, -1])
    sampler.learn(np.array([[1.0]]), indices=np.array([3], np.uint8))
    expected = sampler.expected_reads()
    assert expected[9] / expected[3] == pytest.approx(
        (0.9 * 8 / 74.5 + 0.01) / (0.9 * 2.5 / 74.5 + 0.01)
    )
    assert sampler.report().times.tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 0, 1]


def test_a_batch_size_that_nobody_tells_is_that_of_the_first_losses(heard: Heard) -> None:
    sampler = ImportanceSampler(10)
    order = list(sampler)
    sampler.learn(losses_of(order[:4]))
    sampler.learn(losses_of(order[4:7]))
    sampler.learn(losses_of(order[8:]))
    assert sampler.report().refused == 3
    assert np.flatnonzero(sampler.report().times == 0).tolist() == sorted(order[4:8])
    assert texts(heard) == [
        "hintsd: ImportanceSampler: 3 losses came for a batch of 4 samples" + GO_ON
    ]


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "line"),
    [
        ([1.0, math.nan, math.inf, -math.inf], "3 of 4 losses are NaN or infinite"),
        (np.array([1.0, 2.0, 3.0, 1e300]), "1 of 4 losses are NaN or infinite"),
        (np.arange(4), "losses are wanted, and these are of type int64 (labels?)"),
        (np.ones(4, bool), "losses are wanted, and these are of type bool (labels?)"),
        (np.ones(3), "3 losses came for a batch of 4 samples"),
        (np.ones(0), "0 losses came for a batch of 4 samples"),
        (2.5, "one loss a sample is wanted (reduction='none'), not a single number"),
        (np.ones((4, 3)), "one loss a sample is wanted (reduction='none'), not (4, 3)"),
        (None, "one loss a sample is wanted (reduction='none'), not a single number"),
        ("abcd", "one loss a sample is wanted (reduction='none'), not a single number"),
        (["a", "b", "c", "d"], "losses are wanted, and these are of type <U1 (labels?)"),
        (
            [[1.0], [2.0, 3.0]],
            "one loss a sample is wanted (reduction='none'), not a single number",
        ),
    ],
)
def test_bad_losses_are_one_line_and_the_next_are_paired_right(
    heard: Heard, losses: Any, line: str
) -> None:
    sampler = ImportanceSampler(12, "icache", batch_size=4)
    train(sampler, 1)
    told: list[Any] = []
    sampler.on_scores(lambda epoch, indices, values: told.extend(zip(indices, values)))  # noqa: B905
    indices = iter(sampler)
    order = [next(indices) for _ in range(8)]
    before = sampler.expected_reads()
    sampler.learn(losses)
    if "3 of 4" not in line and "1e300" not in repr(losses) and "1 of 4" not in line:
        assert told == []
        assert (sampler.expected_reads() == before).all()
    else:
        assert all(np.isfinite(value) for _, value in told)
    told.clear()
    sampler.learn(losses_of(order[4:]))
    assert [int(index) for index, _ in told] == order[4:]
    assert texts(heard) == ["hintsd: ImportanceSampler: " + line + GO_ON]


@pytest.mark.parametrize(
    ("indices", "line"),
    [
        ([0, 1, 12], "an index lies outside of the dataset's 12 samples"),
        ([0, 1], "2 indices came with 3 losses"),
        ([0.0, 1.0, 2.0], "indices must be whole numbers, not float64"),
        ([[0], [1, 2], [3]], "indices must be a row of whole numbers"),
        ([[0, 1, 2]], "3 indices came with 3 losses"),
    ],
)
def test_bad_indices_are_one_line(heard: Heard, indices: Any, line: str) -> None:
    sampler = ImportanceSampler(12)
    list(sampler)
    sampler.learn(np.ones(3), indices=indices)
    assert sampler.report().times.tolist() == [0] * 12
    assert sampler.report().refused == 3
    assert texts(heard) == ["hintsd: ImportanceSampler: " + line + GO_ON]


def test_losses_of_no_batch_are_one_line_however_many_come(heard: Heard) -> None:
    sampler = ImportanceSampler(8, batch_size=4)
    for _ in range(3):
        sampler.learn(np.ones(4))
    train(sampler, 1)
    sampler.learn(np.ones(4))
    assert sampler.report().refused == 16
    assert texts(heard) == [
        "hintsd: ImportanceSampler: losses came for which no batch was handed out" + GO_ON
    ]


def test_a_nan_is_not_learned_and_its_neighbours_are() -> None:
    sampler = ImportanceSampler(4, "loss", batch_size=4)
    order = list(sampler)
    sampler.learn(np.array([4.0, math.nan, 2.0, 1.0]))
    report = sampler.report()
    assert report.refused == 1
    assert report.times[order].tolist() == [1, 0, 1, 1]
    assert report.coverage == 0.75
    # of what has no score as much is expected as of the highest
    assert sampler.expected_reads()[order[1]] == sampler.expected_reads()[order[0]]


def test_missing_losses_are_one_line(heard: Heard) -> None:
    sampler = ImportanceSampler(12, batch_size=4)
    list(sampler)
    list(sampler)
    assert texts(heard) == [
        "hintsd: ImportanceSampler: no losses of epoch 0 came: learn was not called" + GO_ON
    ]
    sampler.learn(np.ones(4))
    list(sampler)
    assert len(heard) == 2
    assert "the losses of 8 samples of epoch 1 did not come" in texts(heard)[1]


def test_an_epoch_that_is_left_early_misses_nothing(heard: Heard) -> None:
    sampler = ImportanceSampler(12, batch_size=4)
    train(sampler, 1, after=1)
    train(sampler, 1)
    assert texts(heard) == []


@pytest.mark.parametrize("length", [9, 15])
def test_a_dataset_of_another_length_is_one_line(heard: Heard, length: int) -> None:
    data = Data(12)
    sampler = ImportanceSampler(data, "icache", fraction=1.0, batch_size=4, draw_ahead=1)
    train(sampler, 2)
    data.length = length
    read = train(sampler, 2)
    assert sorted(read[0]) == sorted(read[1]) == list(range(length))
    assert texts(heard) == [
        f"hintsd: ImportanceSampler: the dataset has {length} samples now, and had 12" + GO_ON
    ]
    assert len(sampler.report().times) == length


@pytest.mark.parametrize("accuracy", [math.nan, None, "good", [1, 2]])
def test_judge_takes_numbers(heard: Heard, accuracy: Any) -> None:
    sampler = ImportanceSampler(4)
    sampler.judge(accuracy)
    assert texts(heard) == ["hintsd: ImportanceSampler: judge was given no accuracy" + GO_ON]


@pytest.mark.parametrize("epoch", [-1, None, 1.5])
def test_set_epoch_takes_numbers(heard: Heard, epoch: Any) -> None:
    sampler = ImportanceSampler(4)
    sampler.set_epoch(epoch)
    assert sampler.epoch == 0
    assert "set_epoch was given no number of an epoch" in texts(heard)[0]


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        (0, "dataset must have 1 to 4294967294 samples, not 0"),
        (True, "dataset must be one with a length, or its length, not bool"),
        (iter([1]), "dataset must be one with a length, or its length, not list_iterator"),
    ],
)
def test_bad_datasets_are_one_line(dataset: Any, line: str) -> None:
    with pytest.raises(ValueError) as found:  # noqa: PT011  (the whole line is compared)
        ImportanceSampler(dataset)
    assert str(found.value) == line


# ---- fallback, weights, what is computed ---------------------------------------------------------


def shuffles(accuracies: list[float], **settings: Any) -> list[bool]:
    """Of each epoch but the first, whether it was shuffled; it is judged before it."""
    sampler = ImportanceSampler(30, batch_size=30, **settings)
    found = []
    train(sampler, 1, 30)
    for accuracy in accuracies:
        sampler.judge(accuracy)
        train(sampler, 1, 30)
        found.append(sampler.report().shuffled)
    return found


def test_an_accuracy_that_stands_still_shuffles_one_epoch_in_three() -> None:
    assert shuffles([0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.7]) == [False] * 3 + [True, False, True, False]


def test_a_steep_fall_shuffles_the_next_epoch() -> None:
    assert shuffles([50.0, 60.0, 53.0, 61.0]) == [False, False, True, False]
    assert shuffles([50.0, 60.0, 55.0, 61.0]) == [False] * 4


def test_what_is_cached_is_repeated_while_the_accuracy_rises(heard: Heard) -> None:
    sampler = ImportanceSampler(100, repeat=3.0, batch_size=100)
    sampler.set_cached(lambda: range(20))
    repeats = []
    for accuracy in (0.1, 0.2, 0.15, 0.19):
        train(sampler, 1, 100)
        sampler.judge(accuracy)
        repeats.append(sampler.report().repeats > 0)
    train(sampler, 1, 100)
    assert [*repeats, sampler.report().repeats > 0] == [False, False, True, False, True]
    sampler.set_cached(lambda: [[1.5]])
    train(sampler, 1, 100)
    assert "what is cached cannot be told" in texts(heard)[0]


def test_weights_are_one_over_n_p() -> None:
    sampler = ImportanceSampler(50, "loss", unbiased=True, batch_size=10)
    train(sampler, 1, 10)
    expected = sampler.expected_reads()
    indices = iter(sampler)
    for _ in range(5):
        batch = [next(indices) for _ in range(10)]
        weighed = sampler.weigh(np.full(10, 2.0))
        assert weighed == pytest.approx(2 / expected[batch])
        sampler.learn(np.ones(10))


def test_without_weights_losses_stay_what_they_are(heard: Heard) -> None:
    sampler = ImportanceSampler(8, batch_size=4)
    losses = np.ones(4)
    assert sampler.weigh(losses) is losses
    list(sampler)
    assert sampler.weigh(losses) is losses
    assert texts(heard) == []


def test_a_batch_that_cannot_be_weighed_is_one_line(heard: Heard) -> None:
    sampler = ImportanceSampler(8, "loss", unbiased=True, batch_size=4)
    train(sampler, 1)
    list(sampler)
    losses = np.ones(3)
    assert sampler.weigh(losses) is losses
    assert "losses cannot be weighed" in texts(heard)[0]


def test_what_is_to_be_computed_may_come_alone() -> None:
    """iCACHE's computing-oriented sampling: all is read, a part is computed."""
    sampler = ImportanceSampler(40, "icache", fraction=0.5, compute_only=True, batch_size=8)
    train(sampler, 1, 8)
    indices, computed = iter(sampler), 0
    for number in range(5):
        batch = np.array([next(indices) for _ in range(8)])
        selected = sampler.selected()
        weighed = sampler.weigh(np.ones(8))
        assert weighed.mean() == pytest.approx(1.0 if selected.any() else 0.0)
        assert (weighed > 0).tolist() == selected.tolist()
        if number % 2 and 0 < selected.sum() < 8:
            assert sampler.weigh(np.ones(selected.sum())) == pytest.approx(np.ones(selected.sum()))
            sampler.learn(losses_of(batch[selected]))
        else:
            sampler.learn(losses_of(batch))
        computed += int(selected.sum())
    assert computed == 20
    assert sampler.report().refused == 0


def test_selected_is_all_elsewhere(heard: Heard) -> None:
    sampler = ImportanceSampler(8, batch_size=4)
    assert len(sampler.selected()) == 0
    assert "no batch is there to be computed" in texts(heard)[0]
    list(sampler)
    assert sampler.selected().tolist() == [True] * 4


# ---- states --------------------------------------------------------------------------------------

MADE: list[dict[str, Any]] = [
    {"scheme": "shade"},
    {"scheme": "loss", "unbiased": True},
    {"scheme": "icache", "fraction": 0.5},
    {"scheme": "icache", "fraction": 0.5, "compute_only": True},
    {"scheme": "shade", "replacement": False, "draw_ahead": 1},
]


@pytest.mark.parametrize("settings", MADE)
@pytest.mark.parametrize("after", [None, 1, 4])
def test_a_resumed_training_reads_what_it_would_have_read(
    settings: dict[str, Any], after: int | None
) -> None:
    whole, stopped, resumed = (
        ImportanceSampler(22, batch_size=4, seed=5, **settings) for _ in range(3)
    )
    expected = train(whole, 5)
    begun = train(stopped, 3, after=after)
    stopped.judge(0.5)
    resumed.load_state_dict(stopped.state_dict())
    if after is None:
        assert resumed.epoch == 3
    left = train(resumed, 5 - resumed.epoch)
    assert sum(begun + left, []) == sum(expected, [])  # noqa: RUF017  (they are short)
    assert resumed.report().times.sum() == whole.report().times.sum()


def test_a_resumed_training_falls_back_as_it_would_have() -> None:
    sampler, resumed = (ImportanceSampler(22, batch_size=4) for _ in range(2))
    train(sampler, 2)
    sampler.judge(0.9)
    sampler.judge(0.5)
    resumed.load_state_dict(sampler.state_dict())
    train(resumed, 1)
    assert resumed.report().shuffled


def test_a_state_that_is_loaded_ends_the_epoch_that_is_read(heard: Heard) -> None:
    sampler = ImportanceSampler(12, batch_size=4)
    state = sampler.state_dict()
    left = iter(sampler)
    list(islice(left, 8))
    sampler.learn(np.ones(4))
    sampler.load_state_dict(state)
    next(left)
    sampler.learn(np.ones(4))
    assert sampler.report().times.sum() == 0
    assert "losses came for which no batch was handed out" in texts(heard)[0]
    assert len(sampler) == 12
    assert sampler.epoch == 0


def test_a_state_is_not_changed_by_what_comes_later() -> None:
    sampler = ImportanceSampler(22, batch_size=4)
    train(sampler, 2, after=2)
    state = sampler.state_dict()
    before = str(state)
    train(sampler, 2)
    assert str(state) == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda state: {}, "this state is not taken (KeyError: 'version')"),
        (lambda state: None, "this state is not taken (TypeError: 'NoneType' object is not"),
        (lambda state: {**state, "version": 9}, "(ValueError: it is of version 9)"),
        (lambda state: {**state, "scheme": "loss"}, "(ValueError: its scheme is loss)"),
        (lambda state: ImportanceSampler(9).state_dict(), "(ValueError: it has 9 samples)"),
        (
            lambda state: {**state, "scores": {**state["scores"], "values": [math.nan] * 8}},
            "(ValueError: a score is not finite)",
        ),
        (
            lambda state: {**state, "upcoming": {**state["upcoming"], "drawn": [{}]}},
            "(KeyError: 'order')",
        ),
    ],
)
def test_a_bad_state_is_one_line_and_changes_nothing(heard: Heard, change: Any, line: str) -> None:
    sampler, other = (ImportanceSampler(8, batch_size=4) for _ in range(2))
    train(sampler, 2), train(other, 2)
    sampler.load_state_dict(change(sampler.state_dict()))
    assert [line in text for text in texts(heard)] == [True]
    assert train(sampler, 1) == train(other, 1)


# ---- report --------------------------------------------------------------------------------------


def test_a_report_tells_how_often_and_how_long_ago() -> None:
    sampler = ImportanceSampler(4, "loss", batch_size=4)
    assert math.isnan(sampler.report().age_mean)
    for epoch in range(3):
        list(sampler)
        sampler.learn([1.0, 2.0], indices=[0, epoch])
    report = sampler.report()
    assert report.epoch == 2
    assert report.times.tolist() == [4, 1, 1, 0]
    assert report.coverage == 0.75
    assert report.recent_coverage == 0.75
    assert report.age_mean == pytest.approx(1 / 3)
    assert report.age_most == 1
    assert str(report).startswith("epoch 2: each of 4 samples trained 0 to 4 times, 75.0% at least")


def test_the_package_shows_it() -> None:
    assert "ImportanceSampler" in dir(hintsd)
