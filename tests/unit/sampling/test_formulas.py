"""Importance samplers: SHADE's ranks and PADS, iCACHE's selection and H-list."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hintsd.sampling.formulas import (
    batch_importance,
    h_list,
    icache_selection,
    pads_draw,
    pads_repetitions,
    rank_importance,
    unseen_first,
)


def test_a_rank_counts_the_lower_losses_of_the_batch() -> None:
    """SHADE 4.2.1's example: in both batches the middle sample ranks highest, whatever its loss."""
    first = rank_importance(np.array([0.3, 0.5, 0.4]), bias=1)
    second = rank_importance(np.array([0.6, 1.2, 0.8]), bias=1)
    assert first == pytest.approx([0.0, math.log(3), math.log(2)])
    assert (first == second).all()
    assert rank_importance(np.array([2.0, 1.0])) == pytest.approx([math.log(11), math.log(10)])


def test_equal_losses_rank_equal() -> None:
    assert rank_importance(np.array([5.0, 1.0, 5.0, 9.0]), bias=1) == pytest.approx(
        [math.log(2), 0.0, math.log(2), math.log(4)]
    )
    assert len(rank_importance(np.empty(0))) == 0


def test_the_coarse_score_is_the_mean_of_the_batch() -> None:
    assert batch_importance(np.array([1.0, 2.0, 6.0])).tolist() == [3.0, 3.0, 3.0]


def test_what_was_not_trained_yet_is_worth_as_much_as_the_hardest() -> None:
    seen = np.array([True, False, True])
    assert unseen_first(np.array([2.0, 0.0, 3.0]), seen).tolist() == [2.0, 3.0, 3.0]
    assert unseen_first(np.zeros(3), np.zeros(3, bool)).tolist() == [1.0, 1.0, 1.0]


def test_pads_draws_in_proportion_to_importance() -> None:
    drawn = pads_draw(np.random.default_rng(1), np.array([1.0, 0.0, 3.0]), 40_000)
    counts = np.bincount(drawn, minlength=3)
    assert counts[1] == 0
    assert counts[2] / 40_000 == pytest.approx(0.75, abs=0.01)
    # with replacement: of n drawn from n equal ones 1 - 2/e come more than once (SHADE's Figure 2)
    counts = np.bincount(pads_draw(np.random.default_rng(2), np.ones(20_000), 20_000))
    assert (counts > 1).mean() == pytest.approx(1 - 2 / math.e, abs=0.01)


def test_a_process_takes_the_samples_drawn_most_often() -> None:
    """SHADE 4.2.1's example: of ten drawn the process takes the five repeated most."""
    importance = 1 + np.arange(10) / 100
    for seed in range(20):
        draws = [
            np.bincount(
                pads_draw(np.random.default_rng(seed), importance, count, draws=10), minlength=10
            )
            for count in (10, 5)
        ]
        drawn, kept = draws
        assert kept.sum() == 5
        order = sorted(range(10), key=lambda item: (-drawn[item], -importance[item]))
        expected = np.repeat(order, drawn[order])[:5]
        assert (kept == np.bincount(expected, minlength=10)).all()


def test_pads_repeats_what_is_cached_and_reads_it_first() -> None:
    importance, cached = np.ones(100), np.zeros(100, bool)
    cached[:20] = True
    plain = pads_draw(np.random.default_rng(3), importance, 100, cached=cached, repetitions=1)
    hits = int(cached[plain].sum())
    assert cached[plain[:hits]].all()
    assert not cached[plain[hits:]].any()
    for repetitions, expected in ((2, 2 * hits), (2.5, 2 * hits + hits // 2)):
        drawn = pads_draw(
            np.random.default_rng(3), importance, 100, cached=cached, repetitions=repetitions
        )
        assert len(drawn) == 100
        assert cached[drawn[:expected]].all()
        assert cached[drawn].sum() == expected
    whole = pads_draw(np.random.default_rng(3), importance, 10, cached=np.ones(100, bool))
    assert len(whole) == 10


def test_pads_repeats_only_while_the_model_gets_better() -> None:
    assert [pads_repetitions(scores) for scores in ([], [0.5], [0.5, 0.6], [0.6, 0.6])] == [
        1.0,
        1.0,
        3.0,
        1.0,
    ]


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75, 1.0])
def test_icache_selects_its_share_and_the_important_ones_rather(fraction: float) -> None:
    rng = np.random.default_rng(5)
    importance = rng.exponential(size=20_000)
    selected = icache_selection(rng, importance, fraction)
    assert len(np.unique(selected)) == len(selected)
    assert len(selected) / 20_000 == pytest.approx(fraction, abs=0.01)
    order = np.argsort(importance)
    chosen = np.zeros(20_000, bool)
    chosen[selected] = True
    for share in (0.1, 0.5, 0.9):  # at the percentile p an item is selected with p^(1/f - 1)
        near = order[int((share - 0.02) * 20_000) : int((share + 0.02) * 20_000)]
        assert chosen[near].mean() == pytest.approx(share ** (1 / fraction - 1), abs=0.05)
    if fraction < 1:
        assert not (np.diff(selected) > 0).all()  # in random order


def test_icache_selects_equals_alike() -> None:
    selected = icache_selection(np.random.default_rng(6), np.full(10_000, 7.0), 0.5)
    assert len(selected) / 10_000 == pytest.approx(0.5, abs=0.02)
    assert len(icache_selection(np.random.default_rng(6), np.empty(0), 0.5)) == 0


def test_the_h_list_is_by_item_and_holds_the_most_important() -> None:
    assert h_list(np.array([3.0, 9.0, 1.0, 9.0, 5.0]), 0.6).tolist() == [1, 3, 4]
    assert h_list(np.array([2.0, 2.0, 2.0, 2.0]), 0.5).tolist() == [0, 1]
    assert h_list(np.empty(0), 0.5).tolist() == []


def test_the_same_seed_draws_the_same() -> None:
    importance = np.random.default_rng(0).random(500)

    def draw(seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [
            pads_draw(rng, importance, 500, cached=importance > 0.8).tolist(),
            icache_selection(rng, importance, 0.5).tolist(),
        ]

    assert draw(1) == draw(1)
    assert draw(1)[0] != draw(2)[0]


def test_values_that_mean_nothing_are_refused_by_name() -> None:
    rng, bad = np.random.default_rng(0), np.array([1.0, np.nan])
    with pytest.raises(ValueError, match=r"losses\[1\] must be a finite number, not nan"):
        rank_importance(bad)
    with pytest.raises(ValueError, match=r"losses\[0\] .*inf"):
        batch_importance(np.array([np.inf]))
    for function in (pads_draw, icache_selection):
        with pytest.raises(ValueError, match=r"importance\[1\] must be a finite number"):
            function(rng, bad, 1)
    with pytest.raises(ValueError, match=r"importance\[1\]"):
        h_list(bad, 0.5)
    with pytest.raises(ValueError, match=r"importance\[1\]"):
        unseen_first(bad, np.array([True, True]))
    with pytest.raises(ValueError, match="bias must be 1 or more, not nan"):
        rank_importance(np.ones(2), bias=np.nan)
    with pytest.raises(ValueError, match="importance must be 0 or more, not -1"):
        pads_draw(rng, np.array([2.0, -1.0]), 1)
    for nothing in (np.zeros(3), np.empty(0)):
        with pytest.raises(ValueError, match="importance must be above 0 somewhere"):
            pads_draw(rng, nothing, 1)
    with pytest.raises(ValueError, match="repetitions must be 1 or more, not 0"):
        pads_draw(rng, np.ones(2), 1, repetitions=0.5)
    with pytest.raises(ValueError, match="draws must be 2"):
        pads_draw(rng, np.ones(2), 2, draws=1)
    for fraction in (0.0, 1.5, np.nan):
        with pytest.raises(ValueError, match="fraction must be"):
            icache_selection(rng, np.ones(2), fraction)
    with pytest.raises(ValueError, match="share must be 0 to 1, not 2"):
        h_list(np.ones(2), 2)
