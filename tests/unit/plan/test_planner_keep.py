"""What stays by the rule of a policy of the laboratory: fetches, beside a replay of the reads."""

from __future__ import annotations

import functools

import numpy as np

from hintsd.follow.sequence import Inos
from hintsd.keeping import AUTO, NAMES, NONE
from hintsd.keeping.keeping import Keeping
from hintsd.policies import MISS, Hints
from hintsd.policies.catalogue import CATALOGUE
from tests.unit.plan.test_planner import FILE_BYTES, Scene, same_sizes
from tests.unit.plan.test_planner_uneven import COUNT, OFTEN, drawn_with_replacement, read

RAM, SSD, EPOCHS = 150, 300, 5
SEED = 11


@functools.cache
def orders() -> tuple[Inos, ...]:
    rng = np.random.default_rng(SEED)
    return tuple(drawn_with_replacement(rng) for _ in range(EPOCHS))


def fetched(keep: str) -> int:
    """Of the origin, under this rule, by a planner whose mount evicts."""
    scene = Scene(
        same_sizes(COUNT),
        ram_bytes=RAM * FILE_BYTES,
        ssd_bytes=SSD * FILE_BYTES,
        outside_bytes=64 * FILE_BYTES,
        keep=keep,
    )
    scene.planner.set_pins(False, 0, others_may_go=True, evicts=True)
    return read(scene, list(orders()), OFTEN, turn_every=16)


def missed(name: str) -> int:
    """In a replay."""
    policy = CATALOGUE[name]((RAM + SSD) * FILE_BYTES)
    inos = np.arange(1, COUNT + 1)
    policy.hint(Hints(items=inos, importance=OFTEN))
    misses = 0
    for order in orders():
        policy.hint(Hints(epoch=True))
        misses += sum(policy.access(ino, FILE_BYTES) == MISS for ino in order.tolist())
    return misses


def test_rules_differ_and_a_policy_fetches_what_it_misses_in_a_replay() -> None:
    """Windows have a part of RAM, which the replay has as cache."""
    found = [fetched(name) for name in (AUTO, "shade", NONE, "lru")]
    for name, count, most in (("shade", found[1], 1.15), ("lru", found[3], 1.15)):
        assert 0.95 < count / missed(name) < most, (name, count, missed(name))
    assert 0.95 < fetched("icache") / missed("icache") < 1.25
    assert found == sorted(found), found
    assert found[0] < 0.9 * found[1] < 0.9 * 0.9 * found[2]
    assert all(name in CATALOGUE for name in NAMES if name not in (AUTO, NONE))


def test_what_is_told_before_there_is_a_cache_is_not_lost() -> None:
    inos = np.arange(4, dtype=np.uint32)
    keeping, sizes = Keeping("shade"), np.full(4, 10)
    keeping.tell(inos, np.array([4, 3, 2, 1], np.float32))
    keeping.tell(inos, np.array([1, 2, 3, 4], np.float32))
    keeping.read(inos, sizes)
    assert keeping.leaves(inos).tolist() == [1, 1, 1, 1]
    assert not keeping.is_begun
    keeping.begin(20)
    keeping.begin(1000)  # it has one
    keeping.read(inos, sizes)
    assert keeping.leaves(np.array([0, 1, 2, 3, 99], np.uint32)).tolist() == [1, 1, 0, 0, 1]


def test_none_holds_nothing() -> None:
    keeping, inos = Keeping(NONE), np.arange(4, dtype=np.uint32)
    keeping.tell(inos, np.ones(4, np.float32))
    keeping.begin(1000)
    keeping.begin_epoch()
    keeping.read(inos, np.full(4, 10))
    assert keeping.holds_nothing
    assert keeping.leaves(inos).tolist() == [1, 1, 1, 1]
