"""A lost reader is found by the order in which he opens files."""

from __future__ import annotations

import numpy as np
import pytest

from hintsd.search import ENOUGH, FOUND_ERROR, SEEN_MOST, Search, find, inversions_most, walk
from hintsd.sequence import EpochOrder, Inos
from tests.planner_model import loader_order

COUNT = 480


def order_of(epoch: int) -> Inos:
    return (np.random.default_rng(epoch).permutation(COUNT) + 1).astype(np.uint32)


def test_so_few_inversions_are_no_chance() -> None:
    assert [inversions_most(count) for count in (11, 12, 16)] == [-1, 0, 7]
    # nearly normal, with thinner tails: less than 5.6 standard deviations below the mean
    mean, deviation = 64 * 63 / 4, np.sqrt(64 * 63 * 133 / 72)
    assert 5.2 < (mean - inversions_most(64)) / deviation < 5.6


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_reader_is_found_in_his_epoch(workers: int) -> None:
    rng = np.random.default_rng(workers)
    read = list(loader_order(order_of(7), 4, workers, 2, rng))
    for end in range(SEEN_MOST, COUNT, 40):
        seen = np.array(read[end - SEEN_MOST : end], np.uint32)
        place = walk(seen, range(4, 40), order_of)
        assert place is not None
        assert place.epoch == 7
        assert place.position == pytest.approx(end, abs=4 * workers * 2 + 8)


def test_nobody_is_found_who_reads_another_order() -> None:
    rng = np.random.default_rng(1000)
    orders = [EpochOrder(order_of(epoch)) for epoch in range(20)]
    for _ in range(200):
        seen = (rng.permutation(COUNT)[:ENOUGH] + 1).astype(np.uint32)
        assert [find(order, seen) for order in orders] == [None] * 20
    assert 200 * 20 * 6 * FOUND_ERROR < 1e-3


def test_epochs_are_looked_through_until_one_is_unknown() -> None:
    asked = []

    def known(epoch: int) -> Inos | None:
        asked.append(epoch)
        return order_of(epoch) if epoch < 3 else None

    assert walk(order_of(9)[:64], range(9), known) is None
    assert asked == [0, 1, 2, 3]


def test_a_search_rests_longer_each_time() -> None:
    search = Search(0.0, rest_s=1.0)
    now, waits = 0.0, []
    for _ in range(4):
        search.see(order_of(0)[:64])
        waited = next(wait for wait in range(100) if search.is_walk_due(now + wait))
        waits.append(waited)
        now += waited
        search.walked(now)
        assert not search.is_walk_due(now + 1000)  # nothing new was seen
    assert waits == [1, 1, 2, 4]
