"""Scores of all samples: what is kept of each, and what ranks tell each other."""

from __future__ import annotations

import numpy as np
import pytest

from hintsd.sampling.scores import EPOCH_MOST, TIMES_MOST, Scores


def learned() -> Scores:
    scores = Scores(5)
    scores.note_news()
    scores.learn(np.array([3, 1, 3]), np.array([1.0, 2.0, 4.0], np.float32), 7)
    return scores


def test_of_a_sample_that_comes_twice_the_last_score_stays() -> None:
    scores = learned()
    assert scores.values.tolist() == [0, 2, 0, 4, 0]
    assert scores.times.tolist() == [0, 1, 0, 2, 0]
    assert scores.seen.tolist() == [False, True, False, True, False]
    assert scores.ages(9).tolist() == [2, 2]


def test_8_bytes_a_sample() -> None:
    scores = Scores(1000)
    assert scores.values.nbytes + scores.told.nbytes + scores.times.nbytes == 8000


def test_counts_and_epochs_end_at_their_most() -> None:
    scores = Scores(1)
    scores.times[:] = TIMES_MOST
    scores.learn(np.array([0]), np.ones(1, np.float32), EPOCH_MOST + 9)
    assert scores.times[0] == TIMES_MOST
    assert scores.ages(EPOCH_MOST + 9).tolist() == [0]
    scores.merge(np.array([0]), np.ones(1, np.float32), np.array([9]), 1, is_own=False)
    assert scores.times[0] == TIMES_MOST


def test_news_are_told_once() -> None:
    scores = learned()
    indices, values, times = scores.take_news()
    assert (indices.tolist(), values.tolist(), times.tolist()) == ([1, 3], [2, 4], [1, 2])
    assert len(scores.take_news()[0]) == 0


def test_news_of_others_count_and_of_our_own_do_not_count_again() -> None:
    scores, news = learned(), learned().take_news()
    scores.merge(*news, 7, is_own=True)
    assert scores.times.tolist() == [0, 1, 0, 2, 0]
    scores.merge(*news, 7, is_own=False)
    assert scores.times.tolist() == [0, 2, 0, 4, 0]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_state_has_the_news_of_the_rank_that_saved_it(is_own: bool) -> None:
    scores = Scores(5)
    scores.note_news()
    scores.learn(np.array([0]), np.ones(1, np.float32), 0)
    scores.load(learned().state(), is_own=is_own)
    assert scores.values.tolist() == [0, 2, 0, 4, 0]
    assert scores.take_news()[0].tolist() == ([1, 3] if is_own else [])


def test_another_length_keeps_what_is_left() -> None:
    scores = learned()
    scores.resize(7)
    assert scores.values.tolist() == [0, 2, 0, 4, 0, 0, 0]
    scores.resize(2)
    assert scores.values.tolist() == [0, 2]
    assert scores.take_news()[0].tolist() == [1]
