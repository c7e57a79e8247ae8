"""A lost reader is found by the order in which he opens files."""

from __future__ import annotations

import numpy as np
import pytest

from hintsd.follow.search import (
    AWAKE_S,
    ENOUGH,
    FOUND_ERROR,
    SEEN_MOST,
    Opened,
    Search,
    chain,
    chain_least,
    chain_mean,
    find,
    inversions_most,
    walk,
)
from hintsd.follow.sequence import EpochOrder, Inos
from tests.support.planner_model import loader_order

COUNT = 480


def order_of(epoch: int) -> Inos:
    return (np.random.default_rng(epoch).permutation(COUNT) + 1).astype(np.uint32)


def opened(inos: Inos) -> Opened:
    """Nobody knows by whom."""
    return Opened(inos, np.empty((0, 2), np.uint32), 1)


def test_so_few_inversions_are_no_chance() -> None:
    assert [inversions_most(count) for count in (11, 12, 16)] == [-1, 0, 7]
    # nearly normal, with thinner tails: less than 5.6 standard deviations below the mean
    mean, deviation = 64 * 63 / 4, np.sqrt(64 * 63 * 133 / 72)
    assert 5.2 < (mean - inversions_most(64)) / deviation < 5.6


def test_a_chain_is_the_longest_subsequence_that_rises() -> None:
    assert chain(np.array([], np.int64)) == []
    assert chain(np.array([3, 1, 4, 1, 5, 9, 2, 6])) in ([3, 4, 5, 6], [1, 4, 5, 6])
    assert [chain_least(count) for count in (11, 12, 64)] == [12, 12, 26]
    rng = np.random.default_rng(0)
    for count in (16, 32, 64):
        lengths = [len(chain(rng.permutation(count))) for _ in range(500)]
        assert max(lengths) < chain_least(count)
        assert np.mean(lengths) == pytest.approx(chain_mean(count), abs=0.7)


def test_a_reader_is_found_among_others() -> None:
    rng = np.random.default_rng(3)
    for start in range(0, COUNT - 160, 20):
        own = order_of(7)[start : start + 160 : 5]
        others = rng.choice(np.setdiff1d(order_of(7), own), len(own), replace=False)
        seen = np.stack([own, others], axis=1).ravel()
        place = walk(opened(seen.astype(np.uint32)), range(4, 40), order_of)
        assert place is not None
        assert place.epoch == 7
        assert place.position == pytest.approx(start + 160, abs=80)


@pytest.mark.parametrize("is_his", [True, False])
def test_a_reader_is_given_up_when_chance_explains_what_was_seen(is_his: bool) -> None:
    orders = [EpochOrder(order_of(7)), EpochOrder(order_of(8))]
    given_up = 0
    for seed in range(20):
        search, rng = Search(0.0), np.random.default_rng(seed)
        order = order_of(7 if is_his else 100 + seed)
        read = list(loader_order(order, 16, 4, 2, rng))[:256:8]
        search.see(np.array(read, np.uint32), np.ones(32, np.bool_), 1, 0.0)
        assert not search.is_hopeless(orders)  # the epochs to come were not looked through
        search.walked(0.0)
        given_up += search.is_hopeless(orders)
        search.see(np.array(read, np.uint32), np.ones(32, np.bool_), 1, 0.0)
        search.walked(0.0)
        assert search.is_hopeless(orders)  # enough was seen
    assert given_up == 0 if is_his else given_up >= 8


@pytest.mark.parametrize(("files_per_s", "is_reader"), [(20, True), (2000, False)])
def test_a_listing_is_no_reader(files_per_s: int, is_reader: bool) -> None:
    search, spacing = Search(0.0), 10
    for count in range(64):
        now = 100 + count / files_per_s
        search.see(np.array([count + 1], np.uint32), np.zeros(1, np.bool_), 1, now)
    assert search.lasted(now, spacing) == is_reader
    assert search.lasted(now + 2, spacing)


def test_of_files_that_were_read_each_so_many_th_counts() -> None:
    search = Search(0.0)
    for _ in range(4):
        search.see(np.arange(1, 7, dtype=np.uint32), np.arange(6) != 2, 4, 0.0)
    assert search.files == 4 * 5 // 4 + 4


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_reader_is_found_in_his_epoch(workers: int) -> None:
    rng = np.random.default_rng(workers)
    read = list(loader_order(order_of(7), 4, workers, 2, rng))
    for end in range(SEEN_MOST, COUNT, 40):
        seen = opened(np.array(read[end - SEEN_MOST : end], np.uint32))
        place = walk(seen, range(4, 40), order_of)
        assert place is not None
        assert place.epoch == 7
        assert place.position == pytest.approx(end, abs=4 * workers * 2 + 8)


def test_nobody_is_found_who_reads_another_order() -> None:
    rng = np.random.default_rng(1000)
    orders = [EpochOrder(order_of(epoch)) for epoch in range(20)]
    for _ in range(200):
        seen = opened((rng.permutation(COUNT)[:ENOUGH] + 1).astype(np.uint32))
        assert [find(order, seen) for order in orders] == [None] * 20
    assert 200 * 20 * 6 * FOUND_ERROR < 1e-3


def test_epochs_are_looked_through_until_one_is_unknown() -> None:
    asked = []

    def known(epoch: int) -> Inos | None:
        asked.append(epoch)
        return order_of(epoch) if epoch < 3 else None

    assert walk(opened(order_of(9)[:64]), range(9), known) is None
    assert asked == [0, 1, 2, 3]


def test_a_search_rests_longer_each_time_and_sleeps_meanwhile() -> None:
    search = Search(0.0, rest_s=1.0, awake_s=AWAKE_S)
    assert not search.is_asleep(0.9)
    now, waits = 0.0, []
    for _ in range(4):
        waited = next(wait for wait in range(100) if not search.is_asleep(now + wait + 0.9))
        now += waited + 0.9
        assert not search.is_walk_due(now)  # what was seen before says nothing
        search.see(order_of(0)[:ENOUGH], np.ones(ENOUGH, np.bool_), 1, now)
        now += 0.1
        assert search.is_walk_due(now)
        search.walked(now)
        waits.append(waited)
        search.see(order_of(0)[:ENOUGH], np.zeros(ENOUGH, np.bool_), 1, now + 0.5)
    assert waits == [0, 1, 2, 4]
