"""SHADE's Algorithm 1 and its ablations: by hand, and against the rule written out plainly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.policies import Hints
from hintsd.policies.papers.shade import (
    VARIANTS,
    Shade,
    ShadeCoarse,
    ShadePriority,
    ShadePriorityLfu,
)
from tests.support.policy_caller import Caller

UNTOLD = float("-inf")


class Plain:
    """The same rules, looking through all that is held at every eviction."""

    def __init__(self, capacity_bytes: int, kind: type[Shade]) -> None:
        self.capacity_bytes = capacity_bytes
        self.kind = kind
        self.held: dict[int, int] = {}
        self.score: dict[int, float] = {}
        self.reads: dict[int, int] = {}

    def access(self, item: int, size_bytes: int) -> None:
        self.reads[item] = self.reads.get(item, 0) + 1
        if item in self.held or size_bytes > self.capacity_bytes:
            return
        left = dict(self.held)
        while sum(left.values()) + size_bytes > self.capacity_bytes:
            victim = min(left, key=self.key)
            if self.kind is Shade and (
                item not in self.score or self.score[item] < self.score.get(victim, UNTOLD)
            ):
                return
            del left[victim]
        self.held = {**left, item: size_bytes}

    def key(self, item: int) -> tuple[float, int, int]:
        reads = 0 if self.kind is ShadePriority else self.reads[item]
        return (self.score.get(item, UNTOLD), reads, item)


def test_algorithm_1_step_by_step() -> None:
    caller = Caller(Shade(2), [1] * 4)
    caller.read(0, 1)  # line 9: there is room
    assert caller.held == {0, 1}
    caller.read(2)  # line 22: the cache is full, and nothing is known of 2
    assert caller.held == {0, 1}
    caller.tell({0: 1.0, 1: 3.0, 2: 2.0})
    caller.read(2)  # lines 16 to 18: 2.0 >= 1.0
    assert (caller.held, caller.evicted) == ({1, 2}, [0])
    caller.read(0)  # line 20: 1.0 < 2.0
    assert caller.held == {1, 2}
    caller.tell({0: 2.0})
    caller.read(0)  # 2.0 >= 2.0: equal is enough
    assert (caller.held, caller.evicted) == ({0, 1}, [0, 2])
    caller.tell({1: 0.5})  # a held sample loses its importance
    caller.read(2)  # the ghost cache still has 2.0 for the sample that went
    assert (caller.held, caller.evicted) == ({0, 2}, [0, 2, 1])
    caller.read(0, 2)
    assert (caller.hits, caller.missed) == ([0, 2], [0, 1, 2, 2, 0, 0, 2])


def test_a_sample_that_gained_importance_stays() -> None:
    caller = Caller(Shade(2), [1] * 3)
    caller.tell({0: 1.0, 1: 2.0, 2: 3.0})
    caller.read(0, 1)
    caller.tell({0: 9.0})
    caller.read(2)
    assert caller.evicted == [1]


def test_of_equals_the_one_read_least_often_goes() -> None:
    caller = Caller(Shade(2), [1] * 3)
    caller.tell({0: 1.0, 1: 1.0, 2: 1.0})
    caller.read(0, 0, 1)
    caller.read(2)
    assert caller.evicted == [1]
    caller.read(1)  # both were read twice now, as 0: the smaller item goes
    caller.read(1)
    assert caller.evicted == [1, 2]


def test_what_nothing_is_known_of_goes_first() -> None:
    caller = Caller(Shade(2), [1] * 3)
    caller.tell({0: -5.0, 2: -9.0})
    caller.read(0, 1, 2)
    assert caller.evicted == [1]


def test_several_go_for_a_large_one_or_none() -> None:
    caller = Caller(Shade(4), [2, 1, 1, 3, 5, 4])
    caller.tell({0: 1.0, 1: 2.0, 2: 4.0, 3: 3.0, 4: 9.0, 5: 3.9})
    caller.read(0, 1, 2)
    caller.read(3)  # takes the places of 0 and 1
    assert (caller.evicted, caller.held) == ([0, 1], {2, 3})
    caller.read(5)  # needs those of 3 and 2, and 2 is more important
    caller.read(4)  # larger than the cache
    assert caller.held == {2, 3}
    caller.tell({2: 0.0})
    caller.read(5)
    assert (caller.evicted, caller.held) == ([0, 1, 2, 3], {5})


def test_the_most_important_are_held_in_the_end() -> None:
    rng = np.random.default_rng(2)
    importance = rng.permutation(200).astype(float)
    caller = Caller(Shade(40), [1] * 200)
    caller.tell(dict(enumerate(importance.tolist())))
    for _ in range(2):
        caller.read(*rng.permutation(200).tolist())
    assert caller.held == set(np.argsort(importance)[-40:].tolist())


def test_the_ablations_let_in_all_that_fits() -> None:
    for kind in (ShadePriority, ShadePriorityLfu):
        caller = Caller(kind(2), [1] * 4)
        caller.tell({0: 2.0, 1: 3.0, 2: 1.0})
        caller.read(0, 1, 2)
        assert caller.evicted == [0]  # for a less important one
        caller.read(3)
        assert caller.evicted == [0, 2]  # for one of which nothing is known


def test_pqlfu_counts_reads_among_equals_and_pq_does_not() -> None:
    evicted = {}
    for kind in (ShadePriority, ShadePriorityLfu):
        caller = Caller(kind(2), [1] * 3)
        caller.tell({0: 1.0, 1: 1.0, 2: 1.0})
        caller.read(0, 0, 1, 2)
        evicted[kind.name] = caller.evicted
    assert evicted == {"sh_pq": [0], "sh_pqlfu": [1]}


def test_the_six_ablations_of_section_6_2() -> None:
    names = [kind.name for kind in VARIANTS]
    assert names == ["shade", "sh_pqlfu", "sh_pq", "sh_lru", "sh_lfu", "sh_rand", "sh_app"]
    assert ShadeCoarse.access is Shade.access  # it is told other importance
    evicted = {}
    for kind in VARIANTS[3:5]:
        caller = Caller(kind(2), [1] * 3)
        caller.tell({0: 9.0, 1: 9.0})  # neither looks at it
        caller.read(0, 0, 1, 2)
        evicted[kind.name] = caller.evicted
    assert evicted == {"sh_lru": [0], "sh_lfu": [1]}


STEPS = st.lists(
    st.one_of(
        st.integers(0, 11),
        st.dictionaries(st.integers(0, 11), st.sampled_from([-1.0, 0.0, 1.0, 1.5]), max_size=12),
    ),
    max_size=80,
)


@pytest.mark.parametrize("kind", [Shade, ShadePriorityLfu, ShadePriority])
@given(STEPS, st.lists(st.integers(0, 4), min_size=12, max_size=12), st.integers(0, 12))
def test_every_decision_is_that_of_the_plain_rule(
    kind: type[Shade], steps: list[int | dict[int, float]], sizes: list[int], capacity_bytes: int
) -> None:
    caller, plain = Caller(kind(capacity_bytes), sizes), Plain(capacity_bytes, kind)
    for step in steps:
        if isinstance(step, dict):
            caller.tell(step)
            plain.score.update(step)
        else:
            caller.read(step)
            plain.access(step, sizes[step])
        assert caller.held == plain.held.keys()


def test_the_heap_stays_small_however_often_importance_changes() -> None:
    policy = Shade(100)
    rng = np.random.default_rng(1)
    for _ in range(200):
        items = rng.integers(0, 1000, 64)
        for item in items.tolist():
            policy.access(item, 1)
        policy.hint(Hints(items=items, importance=rng.random(64)))
        assert len(policy._queue) < 2 * 100 + 1024 + 64
    policy.check_invariants()


@pytest.mark.parametrize(
    ("items", "importance", "message"),
    [
        ([0, 1], [1.0, np.nan], r"importance\[1\] must be a finite number, not nan"),
        ([0], [np.inf], r"importance\[0\] must be a finite number, not inf"),
        ([0, 1], [1.0], r"one length, not \(2,\) and \(1,\)"),
        ([-3], [1.0], "items must be 0 or more, not -3"),
        ([0], None, "told together"),
        (None, [1.0], "told together"),
    ],
)
def test_importance_that_means_nothing_is_refused_and_nothing_changes(
    items: list[int] | None, importance: list[float] | None, message: str
) -> None:
    caller = Caller(Shade(1), [1, 1])
    caller.tell({0: 1.0, 1: 0.0})
    caller.read(0)
    with pytest.raises(ValueError, match=message):
        caller.policy.hint(
            Hints(
                items=None if items is None else np.array(items),
                importance=None if importance is None else np.array(importance),
            )
        )
    caller.read(1)
    assert caller.held == {0}


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity_bytes must be 0 or more, not -1"):
        Shade(-1)
