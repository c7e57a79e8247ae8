"""Epochs: what each scheme reads, by the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.sampling.epochs import Drawing
from hintsd.sampling.schemes import Icache, Loss, Shade
from hintsd.sampling.scores import Scores
from hintsd.sampling.settings import Settings


def scores_of(values: Any, told: Any = 1) -> Scores:
    scores = Scores(len(values))
    scores.learn(np.arange(len(values)), np.array(values, np.float32), 0)
    scores.told[:] = told
    return scores


def draw(scores: Scores, number: int = 1, cached: Any = None, **settings: Any) -> Any:
    drawing = Drawing(Settings(**settings))
    return drawing.draw(scores, number, cached=cached, shuffle=False, repeat=True)


# ---- scores --------------------------------------------------------------------------------------


def test_shade_scores_by_rank_in_the_batch() -> None:
    """Equation 6, with the bias 10 of its authors' code."""
    found = Shade().score(np.array([0.3, 0.5, 0.4, 0.5]), np.full(4, np.nan), 4)
    assert found == pytest.approx([math.log(10), math.log(12), math.log(11), math.log(12)])


def test_shade_scales_a_short_batch_up() -> None:
    none = np.full(3, np.nan)
    found = Shade().score(np.array([0.3, 0.5, 0.4]), none, 65)
    assert found == pytest.approx([math.log(10), math.log(74), math.log(42)])
    assert Shade().score(np.array([7.0]), none[:1], 65) == pytest.approx([math.log(42)])


def test_loss_smooths_and_knows_no_negative_loss() -> None:
    found = Loss().score(np.array([2.0, 2.0, -3.0]), np.array([np.nan, 1.0, 4.0]), 3)
    assert found.tolist() == [2.0, 1.5, 2.0]


def test_icache_scores_by_the_loss() -> None:
    assert Icache(0.5).score(np.array([2.0, -1.0]), np.array([9.0, 9.0]), 9).tolist() == [2.0, -1.0]


# ---- expected reads ------------------------------------------------------------------------------


def test_shade_reads_in_proportion_to_the_scores() -> None:
    """PADS: a multinomial draw; what has no score is worth as much as the highest."""
    scores = scores_of([1.0, 3.0, 0.0, 2.0], [1, 1, 0, 1])
    expected = Drawing(Settings()).expected(scores, 1)
    assert expected == pytest.approx(np.array([1, 3, 3, 2]) * 4 / 9)


def test_loss_gives_a_tenth_to_all_alike() -> None:
    expected = Drawing(Settings(scheme="loss")).expected(scores_of([0.0, 1.0, 3.0, 0.0]), 1)
    assert expected == pytest.approx([0.1, 1.0, 2.8, 0.1])
    zero = Drawing(Settings(scheme="loss")).expected(scores_of([0.0, 0.0]), 1)
    assert zero.tolist() == [1.0, 1.0]


def test_icache_selects_by_percentile() -> None:
    """q = percentile^(1/fraction - 1), scaled so that exactly `fraction` is read: III-A."""
    losses = [5.0, 1.0, 3.0, 9.0]
    expected = Drawing(Settings(scheme="icache", fraction=0.5)).expected(scores_of(losses), 1)
    assert expected == pytest.approx(np.array([0.625, 0.125, 0.375, 0.875]))
    third = Drawing(Settings(scheme="icache", fraction=0.25)).expected(scores_of(losses), 1)
    cubes = np.array([0.625, 0.125, 0.375, 0.875]) ** 3
    assert third == pytest.approx(cubes / cubes.sum())


def test_equal_losses_are_selected_alike_and_as_many() -> None:
    """The percentile of all is a half then: to the ninth power a tenth would become 1/500."""
    expected = Drawing(Settings(scheme="icache", fraction=0.1)).expected(scores_of([2.0] * 50), 1)
    assert expected == pytest.approx(np.full(50, 0.1))


def test_icache_selects_first_what_has_no_score() -> None:
    scores = scores_of([1.0, 2.0, 3.0, 0.0, 0.0], [1, 1, 1, 0, 0])
    expected = Drawing(Settings(scheme="icache", fraction=0.6)).expected(scores, 1)
    assert expected[3:].tolist() == [1.0, 1.0]
    assert expected.sum() == pytest.approx(3)
    # of the others, as if they were alone: a sixth, a half and five sixths to the power of 2/3
    part = (np.array([1, 3, 5]) / 6) ** (2 / 3)
    assert expected[:3] == pytest.approx(part / part.sum())


# ---- orders --------------------------------------------------------------------------------------


@given(
    st.sampled_from(["shade", "icache", "loss"]),
    st.integers(1, 60),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(1, 4),
    st.floats(0.05, 1),
    st.booleans(),
)
def test_every_index_is_in_range(
    scheme: str,
    samples: int,
    seed: int,
    number: int,
    replicas: int,
    fraction: float,
    replacement: bool,
) -> None:
    settings: dict[str, Any] = {
        "scheme": scheme,
        "seed": seed,
        "num_replicas": replicas,
        "fraction": fraction,
    }
    settings["replacement"] = replacement or scheme == "icache"
    rng = np.random.default_rng(seed)
    scores = scores_of(rng.random(samples), rng.integers(0, 3, samples))
    epoch = draw(scores, number, **settings)
    drawing = Drawing(Settings(**settings))
    assert len(epoch.order) == drawing.reads(samples, number)
    assert len(epoch.order) % replicas == 0
    assert epoch.order.min() >= 0
    assert epoch.order.max() < samples
    assert epoch.order.dtype == np.int32
    again = draw(scores, number, **settings)
    assert (again.order == epoch.order).all()
    if number == 0:
        assert set(epoch.order.tolist()) == set(range(samples))
    shares = [epoch.of_rank(replicas, rank).order for rank in range(replicas)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(np.concatenate(shares)) == sorted(epoch.order)


@given(st.integers(1, 50), st.integers(0, 9), st.floats(0.02, 1))
def test_without_replacement_nothing_comes_twice(samples: int, seed: int, fraction: float) -> None:
    scores = scores_of(np.random.default_rng(seed).random(samples) + 1)
    for scheme in ("shade", "loss"):
        epoch = draw(scores, scheme=scheme, seed=seed, replacement=False, fraction=fraction)
        assert len(epoch.order) == max(1, round(fraction * samples))
        assert len(set(epoch.order.tolist())) == len(epoch.order)
    whole = draw(scores, seed=seed, replacement=False, fraction=1.0)
    assert sorted(whole.order) == list(range(samples))


def test_shares_of_a_selection_are_disjoint() -> None:
    scores = scores_of(np.arange(100.0))
    epoch = draw(scores, scheme="icache", fraction=0.5, num_replicas=3)
    assert len(epoch.order) == 51
    assert len(set(epoch.order.tolist())) == 51


def test_the_exact_draws_of_a_seed() -> None:
    """As numpy's PCG64 gives them: a resumed training, and another host, draw the same."""
    scores = scores_of([4.0, 1.0, 2.0, 3.0, 5.0, 0.5, 2.5, 3.5])
    assert draw(scores, 0, seed=7).order.tolist() == EXACT["warm-up"]
    assert draw(scores, 1, seed=7).order.tolist() == EXACT["shade"]
    assert draw(scores, 2, seed=7).order.tolist() == EXACT["shade, next"]
    icache = draw(scores, 1, seed=7, scheme="icache", fraction=0.5)
    assert icache.order.tolist() == EXACT["icache"]
    assert draw(scores, 1, seed=-1).order.tolist() == draw(scores, 1, seed=2**64 - 1).order.tolist()


EXACT: dict[str, list[int]] = {
    "warm-up": [0, 6, 7, 2, 4, 5, 1, 3],
    "shade": [3, 7, 2, 2, 7, 3, 4, 2],
    "shade, next": [0, 7, 7, 4, 7, 0, 7, 7],
    "icache": [3, 0, 4, 7],
}


def test_an_epoch_without_any_score_is_a_plain_shuffle() -> None:
    epoch = draw(Scores(20), 5)
    assert epoch.is_shuffled
    assert sorted(epoch.order) == list(range(20))
    part = draw(Scores(20), 5, scheme="icache", fraction=0.3)
    assert part.is_shuffled
    assert len(set(part.order.tolist())) == 6


def test_a_fallback_reads_as_many_by_no_scores() -> None:
    scores = scores_of([0.0] * 99 + [1000.0])
    for settings in ({"scheme": "loss"}, {"scheme": "icache", "fraction": 0.2}):
        drawing = Drawing(Settings(**settings))
        epoch = drawing.draw(scores, 3, cached=None, shuffle=True, repeat=True)
        assert epoch.is_shuffled
        assert len(set(epoch.order.tolist())) == len(epoch.order) == drawing.reads(100, 3)


# ---- weights, coverage, what is cached -----------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"scheme": "loss"},
        {"scheme": "shade"},
        {"scheme": "shade", "replacement": False, "fraction": 0.4},
        {"scheme": "icache", "fraction": 0.4},
        {"scheme": "icache", "fraction": 0.4, "compute_only": True},
    ],
)
def test_weights_undo_the_draw(settings: dict[str, Any]) -> None:
    """Expected reads times weight is the same for every sample: 1 read of N, weighed 1."""
    scores = scores_of(np.random.default_rng(0).random(30) + 0.1)
    epoch = draw(scores, unbiased=True, **settings)
    kept = epoch.order if epoch.computed is None else epoch.order[epoch.computed]
    weights = epoch.weights if epoch.computed is None else epoch.weights[epoch.computed]
    plain = {name: value for name, value in settings.items() if name != "compute_only"}
    expected = Drawing(Settings(**plain)).expected(scores, 1)
    assert expected[kept] * weights == pytest.approx(np.full(len(kept), expected.sum() / 30))


def test_compute_only_reads_all_and_computes_a_part() -> None:
    epoch = draw(scores_of(np.arange(50.0)), scheme="icache", fraction=0.3, compute_only=True)
    assert sorted(epoch.order) == list(range(50))
    assert np.count_nonzero(epoch.computed) == 15
    assert epoch.order[epoch.computed].mean() > 24.5  # the later ones lose more


@pytest.mark.parametrize("coverage", [4, 5, 6, 20])
def test_coverage_reads_what_was_left_out_too_long(coverage: int) -> None:
    """Without it the least important of 100 waits for thousands of epochs."""
    scores = scores_of(np.arange(100.0))
    drawing = Drawing(Settings(scheme="icache", fraction=0.25, coverage=coverage))
    last = np.zeros(100, int)
    for number in range(1, 40):
        epoch = drawing.draw(scores, number, cached=None, shuffle=False, repeat=False)
        assert len(set(epoch.order.tolist())) == 25
        assert (number - last)[epoch.order].max() <= coverage
        last[epoch.order] = number
        scores.learn(epoch.order, scores.values[epoch.order], number)
        assert (number - last).max() < coverage


def test_what_is_cached_is_repeated_while_the_model_learns() -> None:
    scores, cached = scores_of(np.ones(100)), np.arange(100) < 10
    drawing = Drawing(Settings(repeat=3.0))
    plain = drawing.draw(scores, 1, cached=cached, shuffle=False, repeat=False)
    more = drawing.draw(scores, 1, cached=cached, shuffle=False, repeat=True)
    hits = np.count_nonzero(cached[plain.order])
    assert plain.repeats == 0
    assert more.repeats == 2 * hits
    assert np.count_nonzero(cached[more.order]) == 3 * hits


def test_low_samples_are_substituted_and_high_ones_are_not() -> None:
    scores = scores_of(np.arange(100.0))
    settings: dict[str, Any] = {"scheme": "icache", "fraction": 0.5, "h_share": 0.3}
    cached = np.arange(100) < 60  # none of the H-list
    plain = draw(scores, cached=cached, **settings)
    other = draw(scores, cached=cached, substitute="low", **settings)
    high = plain.order >= 70
    assert (other.order[high] == plain.order[high]).all()
    assert cached[other.order[~high]].all()
    assert other.substituted == np.count_nonzero(~cached[plain.order[~high]]) > 0


def test_the_h_list_leaves_out_what_has_no_score() -> None:
    scores = scores_of([5.0, 1.0, 0.0, 4.0, 2.0], [1, 1, 0, 1, 1])
    assert Drawing(Settings(h_share=0.5)).h_list(scores).tolist() == [0, 3]


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"scheme": "random"}, "scheme must be one of shade, icache, loss, not 'random'"),
        ({"seed": 1.5}, "seed must be an integer, not 1.5"),
        ({"fraction": 0}, "fraction must be above 0 and at most 1, not 0"),
        ({"fraction": math.nan}, "fraction must be above 0 and at most 1, not nan"),
        ({"h_share": 1.1}, "h_share must be 0 to 1, not 1.1"),
        ({"repeat": 0.5}, "repeat must be 1 or more, not 0.5"),
        ({"repeat": "3"}, "repeat must be 1 or more, not '3'"),
        ({"substitute": "high"}, "substitute must be one of none, low, not 'high'"),
        ({"substitute": "low"}, "substitute is for icache, not 'low'"),
        ({"scheme": "icache", "replacement": False}, "replacement is not for icache, not False"),
        ({"scheme": "icache", "repeat": 2.0}, "repeat needs a draw with replacement, not 2.0"),
        ({"repeat": 2.0, "unbiased": True}, "repeat above 1 cannot be unbiased, not 2.0"),
        ({"compute_only": True}, "compute_only is for icache, not True"),
        ({"unbiased": 1}, "unbiased must be True or False, not 1"),
        ({"draw_ahead": 2}, "draw_ahead must be at most 1, not 2"),
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"num_replicas": 2, "rank": 2}, "rank must be at most 1, not 2"),
        ({"coverage": 9}, "coverage needs samples once an epoch, not 9"),
        (
            {"scheme": "icache", "fraction": 0.3, "coverage": 3},
            "coverage must be at least 4, not 3",
        ),
    ],
)
def test_bad_settings_are_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as found:  # noqa: PT011  (the whole line is compared)
        Settings(**settings)
    assert str(found.value) == line
