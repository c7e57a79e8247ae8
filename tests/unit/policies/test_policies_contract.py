"""What `hintsd.policies.Policy` promises, for every policy of the catalogue: random operations
against a dict model that is fed by what enters and by `on_evict`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintsd.policies import MISS, Hints, Policy
from hintsd.policies.catalogue import CATALOGUE

ITEMS = 12
EVERY_POLICY = pytest.mark.parametrize("name", CATALOGUE)


@dataclass(frozen=True)
class Work:
    """Reads of a few items, in epochs; before each epoch everything is told that is true."""

    capacity_bytes: int
    sizes: tuple[int, ...]
    epochs: tuple[tuple[int, ...], ...]
    importance: tuple[float, ...]

    def hints(self, epoch: int) -> Hints:
        rest = np.array([item for read in self.epochs[epoch:] for item in read], np.int64)
        return Hints(
            sequence=rest,
            uses=np.bincount(rest, minlength=ITEMS),
            sizes=np.array(self.sizes),
            items=np.arange(ITEMS),
            importance=np.array(self.importance),
            epoch=True,
        )


def works(sizes: st.SearchStrategy[int], *, capacity: int = 120) -> st.SearchStrategy[Work]:
    items = st.integers(0, ITEMS - 1)
    return st.builds(
        Work,
        st.integers(0, capacity),
        st.tuples(*[sizes] * ITEMS),
        st.lists(st.lists(items, max_size=40).map(tuple), max_size=4).map(tuple),
        st.tuples(*[st.floats(0, 1)] * ITEMS),
    )


class Watched:
    """A policy and the model: what entered and was not evicted, with sizes."""

    def __init__(self, name: str, work: Work, seed: int = 0) -> None:
        self.work = work
        self.held: dict[int, int] = {}
        self.log: list[int] = []  # answers, and evictions as -2 - item
        self.policy: Policy = CATALOGUE[name](
            work.capacity_bytes, on_evict=self._evicted, seed=seed
        )

    def _evicted(self, item: int) -> None:
        del self.held[item]
        self.log.append(-2 - item)

    def access(self, item: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        size_bytes = self.work.sizes[item]
        before = set(self.held)
        evicted = len(self.log)
        served = self.policy.access(item, size_bytes, cost_s, now_s)
        if size_bytes > self.work.capacity_bytes:
            assert item not in self.policy
            assert len(self.log) == evicted
        assert served in before or served == MISS
        assert (served == MISS) <= (item not in before)
        if served == MISS and item in self.policy:
            assert item not in self.held
            self.held[item] = size_bytes
        self.log.append(served)
        return served

    def check(self) -> None:
        policy = self.policy
        policy.check_invariants()
        assert {item for item in range(-2, 2 * ITEMS) if item in policy} == set(self.held)
        assert len(policy) == len(self.held)
        assert policy.held_bytes == sum(self.held.values()) <= policy.capacity_bytes

    def run(self, costs: Sequence[float] = (0.0,), step_s: float = 0.0) -> list[int]:
        now_s = 0.0
        for epoch, items in enumerate(self.work.epochs):
            self.policy.hint(self.work.hints(epoch))
            self.check()
            for at, item in enumerate(items):
                now_s += step_s
                self.access(item, costs[at % len(costs)], now_s)
                self.check()
        return self.log


@EVERY_POLICY
@given(work=works(st.integers(0, 40)))
@settings(max_examples=60)
def test_invariants_hold_after_every_operation(name: str, work: Work) -> None:
    Watched(name, work).run()


@EVERY_POLICY
@given(work=works(st.just(1), capacity=ITEMS + 2))
@settings(max_examples=30)
def test_invariants_hold_for_items_of_one_size(name: str, work: Work) -> None:
    Watched(name, work).run()


@EVERY_POLICY
@given(work=works(st.integers(1, 40)), costs=st.lists(st.floats(0, 10), min_size=1, max_size=5))
@settings(max_examples=30)
def test_the_same_calls_give_the_same_answers_whatever_a_fetch_costs_and_the_clock_says(
    name: str, work: Work, costs: list[float]
) -> None:
    assert Watched(name, work, 7).run() == Watched(name, work, 7).run(costs, 3.5)


@EVERY_POLICY
def test_a_policy_that_is_told_nothing_answers_too(name: str) -> None:
    rng = np.random.default_rng(1)
    items = rng.integers(0, ITEMS, 400).tolist()
    watched = Watched(name, Work(40, tuple(range(4, 4 + ITEMS)), (), ()))
    for hints in (Hints(), Hints(epoch=True)):
        watched.policy.hint(hints)
        for item in items:
            watched.access(item)
            watched.check()


@EVERY_POLICY
def test_nothing_with_a_size_is_held_without_capacity(name: str) -> None:
    work = Work(0, (1,) * ITEMS, (tuple(range(ITEMS)) * 3,), (0.5,) * ITEMS)
    watched = Watched(name, work)
    assert watched.run() == [MISS] * 3 * ITEMS
    assert len(watched.policy) == 0


@EVERY_POLICY
def test_an_item_larger_than_the_capacity_passes_and_evicts_nothing(name: str) -> None:
    sizes = (1,) * (ITEMS - 1) + (50,)
    big = ITEMS - 1
    watched = Watched(name, Work(49, sizes, ((*range(big), big, *range(big)),), (1.0,) * ITEMS))
    answers = watched.run()
    assert answers[big] == MISS
    assert [answer for answer in answers[big + 1 :] if answer >= 0] == list(range(big))


@EVERY_POLICY
def test_all_is_held_where_all_fits(name: str) -> None:
    """Each item misses once."""
    epochs = tuple(
        tuple(np.random.default_rng(epoch).permutation(ITEMS).tolist()) for epoch in range(4)
    )
    work = Work(10 * ITEMS, (10,) * ITEMS, epochs, tuple(np.linspace(0, 1, ITEMS)))
    assert Watched(name, work).run().count(MISS) == ITEMS


@EVERY_POLICY
def test_a_negative_capacity_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="capacity_bytes must be 0 or more, not -1"):
        CATALOGUE[name](-1)


@EVERY_POLICY
def test_a_policy_bears_its_name(name: str) -> None:
    assert name.startswith(CATALOGUE[name](1).name)


@EVERY_POLICY
def test_many_items_far_apart(name: str) -> None:
    """Arrays grow as items come, in whatever order."""
    rng = np.random.default_rng(2)
    items = rng.permutation(np.concatenate([rng.integers(0, 1 << 20, 300)] * 3))
    uses = np.bincount(items)
    evicted: list[int] = []
    policy = CATALOGUE[name](100, on_evict=evicted.append)
    policy.hint(Hints(sequence=items, uses=uses, sizes=np.ones(len(uses), np.int64)))
    entered: list[int] = []
    for item in items.tolist():
        if policy.access(item, 1) == MISS and item in policy:
            entered.append(item)
    policy.check_invariants()
    held = sorted(item for item in set(items.tolist()) if item in policy)
    assert sorted(entered) == sorted(evicted + held)
    assert len(held) == len(policy) == policy.held_bytes <= 100
