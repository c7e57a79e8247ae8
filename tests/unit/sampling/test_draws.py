"""Draws of a whole epoch: each read comes as often as expected, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.sampling.draws import (
    at_most_once,
    once_in_proportion,
    repeat_cached,
    substitute_low,
    with_replacement,
)

WEIGHTS = st.lists(st.floats(0, 100).map(lambda x: round(x, 3)), min_size=1, max_size=40)


class Even:
    """A generator without chance: numbers evenly spaced, nothing shuffled, one start."""

    def __init__(self, start: float = 0.5) -> None:
        self.start = start

    def standard_exponential(self, count: int) -> Any:
        return np.ones(count)

    def shuffle(self, values: Any) -> None: ...

    def permutation(self, values: Any) -> Any:
        return np.arange(values) if isinstance(values, int) else values

    def random(self) -> float:
        return self.start


def test_draws_with_replacement_are_in_proportion() -> None:
    """Places evenly spaced fall on each sample as its part of the whole says."""
    expected = np.array([1.0, 0.0, 2.0, 5.0, 0.0])
    drawn = with_replacement(Even(), expected, 799)  # type: ignore[arg-type]  # stands for one
    assert np.bincount(drawn, minlength=5).tolist() == [99, 0, 200, 500, 0]


def test_a_place_at_the_very_end_is_of_a_sample_that_may_be_drawn() -> None:
    class Last(Even):
        def standard_exponential(self, count: int) -> Any:
            return np.concatenate(([1.0], np.zeros(count - 1)))  # every sum is the whole

    drawn = with_replacement(Last(), np.array([1.0, 2.0, 0.0]), 3)  # type: ignore[arg-type]
    assert drawn.tolist() == [1, 1, 1]


@given(WEIGHTS, st.integers(1, 60), st.integers(0, 5))
def test_draws_with_replacement_are_in_range(weights: list[float], count: int, seed: int) -> None:
    expected = np.array(weights)
    if not expected.sum():
        expected += 1
    drawn = with_replacement(np.random.default_rng(seed), expected, count)
    assert len(drawn) == count
    assert (expected[drawn] > 0).all()
    again = with_replacement(np.random.default_rng(seed), expected, count)
    assert (drawn == again).all()


def test_a_draw_is_shuffled() -> None:
    drawn = with_replacement(np.random.default_rng(3), np.ones(1000), 1000)
    halves = drawn[:500].mean(), drawn[500:].mean()
    assert all(400 < half < 600 for half in halves)
    assert len(np.flatnonzero(np.diff(drawn) < 0)) > 300


def test_each_sample_is_selected_as_often_as_expected() -> None:
    """Over all starts, each sixty-fourth of the way: exactly the probabilities."""
    expected = np.array([0.5, 1.0, 0.125, 0.0, 0.25, 0.875, 0.25])
    found = np.zeros(7)
    for start in range(64):
        rng: Any = Even((start + 0.5) / 64)
        selected = at_most_once(rng, expected)
        assert len(selected) == 3
        found[selected] += 1
    assert (found / 64).tolist() == expected.tolist()


@given(WEIGHTS, st.integers(0, 50), st.integers(0, 5))
def test_what_is_selected_is_distinct(weights: list[float], count: int, seed: int) -> None:
    expected = once_in_proportion(np.array(weights), count)
    selected = at_most_once(np.random.default_rng(seed), expected)
    assert len(selected) == min(count, len(weights))
    assert len(set(selected.tolist())) == len(selected)
    assert set(np.flatnonzero(expected == 1)) <= set(selected.tolist())


def test_a_sum_that_is_rounded_up_brings_nothing_twice() -> None:
    """As if the sums of some millions had been: one sample's part is longer than a turn."""
    rng: Any = Even(0.50000005)
    assert at_most_once(rng, np.array([0.5, 1.0000001, 0.4999999])).tolist() == [1, 2]


def test_a_million_that_are_all_but_sure_come_once() -> None:
    selected = at_most_once(np.random.default_rng(0), np.full(999_999, 1 - 1e-9))
    assert np.bincount(selected).tolist() == [1] * 999_999
    assert not (selected == np.arange(999_999)).all()


@given(WEIGHTS, st.integers(0, 50))
def test_probabilities_are_in_proportion_and_none_above_1(weights: list[float], count: int) -> None:
    given_weights = np.array(weights)
    found = once_in_proportion(given_weights, count)
    assert found.sum() == pytest.approx(min(count, len(weights)))
    assert (found >= 0).all()
    assert (found <= 1).all()
    below = (found < 1) & (given_weights > 0)
    if below.any():
        factors = found[below] / given_weights[below]
        assert factors == pytest.approx(np.full(len(factors), factors[0]))
        # what is full would be above 1 in that proportion
        assert (given_weights[found == 1] * factors[0] >= 1 - 1e-9).all()


def test_probabilities_of_an_example() -> None:
    found = once_in_proportion(np.array([8.0, 1.0, 1.0, 2.0]), 2)
    assert found.tolist() == [1.0, 0.25, 0.25, 0.5]
    assert once_in_proportion(np.array([1.0, 0.0, 0.0]), 2).tolist() == [1.0, 0.5, 0.5]


def test_what_is_cached_is_repeated_in_place_of_what_is_not() -> None:
    drawn = np.array([0, 1, 2, 2, 5, 6, 7, 8, 9, 9])
    cached = np.zeros(10, np.bool_)
    cached[[0, 2]] = True
    read, extra = repeat_cached(np.random.default_rng(0), drawn, cached, 2.0)
    assert (len(read), extra) == (10, 3)
    counts = np.bincount(read, minlength=10)
    assert (counts[0], counts[2]) == (2, 4)
    others = np.bincount(drawn, minlength=10)
    others[[0, 2]] = 0
    assert (counts <= np.maximum(others, counts * cached)).all()


@pytest.mark.parametrize(("hits", "repetitions", "extra"), [(1, 3.0, 2), (4, 3.0, 5), (9, 3.0, 1)])
def test_at_most_half_of_an_epoch_repeats(hits: int, repetitions: float, extra: int) -> None:
    cached = np.arange(10) < hits
    read, found = repeat_cached(np.random.default_rng(0), np.arange(10), cached, repetitions)
    assert (len(read), found) == (10, extra)
    assert np.count_nonzero(cached[read]) == hits + extra


@given(st.integers(0, 2**10 - 1), st.integers(0, 2**10 - 1), st.integers(0, 2**10 - 1))
def test_low_samples_make_way_for_any_that_are_cached(low: int, held: int, due: int) -> None:
    def mask(bits: int) -> Any:
        return np.array([bool(bits >> i & 1) for i in range(10)])

    is_low, cached, must = mask(low), mask(held), mask(due)
    chosen = np.array([7, 1, 0, 4, 9, 3])
    read, count = substitute_low(np.random.default_rng(1), chosen, is_low, cached, must)
    assert len(set(read.tolist())) == 6
    changed = read != chosen
    assert np.count_nonzero(changed) == count
    assert (is_low & ~cached & ~must)[chosen[changed]].all()
    assert cached[read[changed]].all()
    left = np.count_nonzero((is_low & ~cached & ~must)[read])
    unused = set(np.flatnonzero(cached)) - set(read.tolist())
    assert left == 0 or not unused
