"""iCACHE: the H-cache and its shadow heap, the L-cache, packages, and how they share the room."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.policies import Hints
from hintsd.policies.papers.icache import PACKAGE_BYTES, HCache, ICache
from hintsd.policies.papers.substitutes import Substitutes
from tests.support.policy_caller import Caller


def h_cache(*importance: float) -> HCache:
    """Holds nothing; its heap goes by these values."""
    cache = HCache()
    cache.refresh(array("d", importance))
    cache.rebuild(0)
    return cache


def admit(cache: HCache, most_bytes: int, item: int, size_bytes: int = 1) -> list[int] | None:
    gone = cache.admit(item, size_bytes, most_bytes)
    cache.check_invariants()
    assert cache.held_bytes <= most_bytes
    return gone


def test_the_least_important_goes_not_the_least_recent() -> None:
    """Figure 5: of samples 1, 2 and 3, held in this order, 2 matters least and goes for 4."""
    cache = h_cache(0.0, 5.0, 1.0, 4.0, 2.0)
    assert [admit(cache, 3, item) for item in (1, 2, 3, 4)] == [[], [], [], [2]]
    assert set(cache.sizes) == {1, 3, 4}
    assert admit(cache, 3, 2) is None  # 1.0 < 2.0


def test_an_equally_important_sample_is_not_let_in() -> None:
    """Algorithm 1, line 14, where SHADE's line 16 has >=."""
    cache = h_cache(3.0, 3.0, 3.5)
    assert admit(cache, 1, 0) == []
    assert admit(cache, 1, 1) is None
    assert admit(cache, 1, 2) == [0]


def test_the_frozen_heap_gives_victims_until_the_shadow_heap_has_all() -> None:
    cache = h_cache(1.0, 2.0, 3.0, 0.0, 0.0, 0.0)
    assert [admit(cache, 3, item) for item in (0, 1, 2)] == [[], [], []]
    cache.refresh(array("d", [9.0, 8.0, 1.0, 5.0, 6.0, 7.0]))
    cache.rebuild(1)
    assert admit(cache, 3, 3) == [0]  # 9.0 now, but 1.0 in the frozen heap; and 5.0 > 1.0
    assert admit(cache, 3, 0) == [1]  # 9.0 > 2.0; 3 is not in the frozen heap, and safe
    cache.rebuild(10)
    assert admit(cache, 3, 4) == [2]  # the new values: 2 has 1.0, 3 has 5.0, 0 has 9.0
    assert admit(cache, 3, 5) == [3]
    assert admit(cache, 3, 2) is None
    assert set(cache.sizes) == {0, 4, 5}


def test_a_frozen_heap_that_ran_out_is_replaced_at_once() -> None:
    cache = h_cache(1.0, 2.0, 3.0, 4.0, 5.0)
    assert [admit(cache, 2, item) for item in (0, 1)] == [[], []]
    cache.refresh(array("d", [1.0, 2.0, 3.0, 4.0, 5.0]))
    assert [admit(cache, 2, item) for item in (2, 3, 4)] == [[0], [1], [2]]


def test_several_go_only_if_all_are_less_important() -> None:
    cache = h_cache(1.0, 5.0, 2.0, 6.0, 9.0)
    assert [admit(cache, 3, item) for item in (0, 1)] == [[], []]
    assert admit(cache, 3, 2, 3) is None  # 0 would go, 1 would not
    assert set(cache.sizes) == {0, 1}
    assert admit(cache, 3, 3, 3) == [0, 1]
    assert admit(cache, 3, 4, 4) is None  # larger than the cache
    assert set(cache.sizes) == {3}


def test_victims_that_stay_after_all_go_by_their_new_importance() -> None:
    cache = h_cache(1.0, 5.0, 0.0, 0.0)
    assert [admit(cache, 3, item) for item in (0, 1)] == [[], []]
    cache.refresh(array("d", [7.0, 9.0, 8.0, 7.5]))
    assert admit(cache, 3, 2) == []
    # the frozen heap gives 0 and 1 and runs out; in the shadow heap 2 has 8.0: all three stay
    assert admit(cache, 3, 3, 3) is None
    assert set(cache.sizes) == {0, 1, 2}
    assert admit(cache, 3, 3) == [0]  # 7.0 now
    assert admit(cache, 3, 0) is None


def test_a_smaller_h_cache_keeps_the_most_important() -> None:
    cache = h_cache(4.0, 1.0, 3.0, 2.0)
    assert [admit(cache, 4, item) for item in range(4)] == [[]] * 4
    assert cache.shrink(2) == [1, 3]
    cache.check_invariants()


@given(st.lists(st.integers(0, 9), max_size=60), st.permutations(range(10)), st.integers(1, 5))
def test_the_h_cache_holds_what_the_plain_rule_holds(
    items: list[int], importance: list[int], capacity_bytes: int
) -> None:
    cache = h_cache(*importance)
    held: set[int] = set()
    for item in items:
        if item in held:
            continue
        admit(cache, capacity_bytes, item)
        if len(held) == capacity_bytes:
            least = min(held, key=importance.__getitem__)
            if importance[item] > importance[least]:
                held ^= {item, least}
        else:
            held.add(item)
        assert cache.sizes.keys() == held


def test_substitutes_are_drawn_once_and_each_as_likely() -> None:
    first = np.zeros(5, int)
    rng = np.random.default_rng(0)
    for _ in range(2000):
        part = Substitutes(rng)
        for item in range(5):
            part.add(item, 1, used=False)
        drawn = [part.draw() for _ in range(5)]
        assert sorted(drawn) == [0, 1, 2, 3, 4]
        first[drawn[0]] += 1
    assert (abs(first - 400) < 80).all()


def test_substitutes_make_room_with_what_was_served_first() -> None:
    part = Substitutes(np.random.default_rng(0))
    for item in range(4):
        part.add(item, 1, used=False)
    for item in (2, 0):
        part.use(item)
        part.use(item)
    assert part.make_room(3, 4) is None  # two of them were not served yet
    assert part.make_room(1, 4) == [2]
    part.begin()
    assert part.make_room(2, 4) is None
    part.use(1)
    part.check_invariants()
    assert part.shrink(1)[0] == 1  # what was served goes first
    part.check_invariants()
    assert part.held_bytes == 1


def warmed(*, loader: bool, load_s: float = 0.0) -> Caller:
    """Room for 10 of 20 items of one size, the larger the more important: 10 to 19 are the H-list.

    Held: 9 to 18, all in the H-cache, which lends of its room 1 to the L-cache.
    """
    policy = ICache(10, h_share=0.5, load_s=load_s)
    caller = Caller(policy, [1] * 20, loader=loader)
    caller.read(*range(18, -1, -1), 19)
    assert (caller.held, len(caller.missed), caller.evicted) == (set(range(9, 19)), 20, [])
    caller.missed.clear()
    caller.tell({item: float(item) for item in range(20)})
    caller.epoch()
    return caller


def test_an_h_sample_is_read_itself_and_kept_by_importance() -> None:
    caller = warmed(loader=False)
    assert caller.read(12, 15, 19) == [12, 15, 19]
    assert (caller.hits, caller.missed, caller.evicted) == ([12, 15], [19], [9])


def test_an_l_sample_is_answered_by_another_once_an_epoch() -> None:
    caller = warmed(loader=False)
    caller.read(3)  # the L-cache is empty: 3 is read and held there, and the H-cache gives way
    assert (caller.missed, caller.evicted) == ([3], [9])
    caller.read(4)  # 3 was read in this epoch: 4 takes its place
    assert (caller.missed, caller.evicted) == ([3, 4], [9, 3])
    caller.epoch()
    assert caller.read(7) == [4]  # in its stead
    assert caller.substituted == [4]
    caller.read(4)  # held, though it was served
    assert caller.hits == [4]
    caller.read(8)
    assert caller.missed == [3, 4, 8]


def test_an_l_sample_in_the_h_cache_is_served_and_stands_for_none() -> None:
    caller = warmed(loader=False)
    caller.read(9)
    assert caller.hits == [9]
    caller.epoch()
    caller.read(3)
    assert (caller.substituted, caller.missed) == ([], [3])


def test_the_room_is_divided_as_samples_were_read() -> None:
    caller = warmed(loader=False)
    policy = caller.policy
    assert isinstance(policy, ICache)
    assert policy.l_bytes == 1
    caller.read(*range(12, 18), *range(4))  # 6 H-samples, 4 L-samples
    caller.epoch()
    assert policy.l_bytes == 4
    caller.read(*range(5))  # one stands for another, the others are let in
    assert len(caller.substituted) == 1
    assert caller.held == {*range(1, 5), *range(13, 19)}
    caller.read(*range(10, 20))
    caller.epoch()
    assert policy.l_bytes == 3  # 5 of 15
    caller.read(*range(10, 20))
    caller.epoch()
    assert policy.l_bytes == 1  # H-samples only; there stays room for one package
    caller.read(*range(10, 20))
    assert caller.held >= set(range(11, 20))


def test_what_one_region_leaves_free_the_other_may_use() -> None:
    caller = Caller(ICache(10), [1] * 10)
    for _ in range(3):
        caller.tell({item: float(item) for item in range(10)})
        caller.epoch()
        caller.read(*range(10))
    assert (len(caller.missed), len(caller.hits)) == (10, 20)


def test_importance_that_changed_is_gone_by_when_the_shadow_heap_is_built() -> None:
    policy = ICache(100, h_share=1.0)
    caller = Caller(policy, [1] * 120)
    rising, falling = ({item: sign * item for item in range(120)} for sign in (1.0, -1.0))
    caller.read(*range(99, -1, -1))
    caller.tell(rising)
    caller.epoch()
    caller.read(100)  # the first H-list counts at once: the heap knew nothing before
    assert caller.evicted == [0]
    caller.tell({**falling, 0: 99.0, 119: 98.0})
    caller.epoch()
    caller.read(0)
    assert caller.evicted == [0, 1]  # the least important before
    caller.read(*[50] * 4)  # 16 of the 100 in each access, the one above and the next one too
    caller.read(119)
    assert caller.evicted == [0, 1, 2]
    caller.read(50)
    caller.read(1)
    assert caller.evicted == [0, 1, 2, 100]  # the least important now


def test_an_l_sample_that_became_important_moves_to_the_h_cache() -> None:
    caller = warmed(loader=False)
    caller.read(3)
    caller.tell({3: 99.0})
    caller.epoch()
    assert caller.held == {3, *range(10, 19)}
    caller.read(4)  # 10 is no H-sample any more, for 3 took its place on the list
    assert (caller.missed, caller.evicted) == ([3, 4], [9, 10])
    caller.read(3)
    assert caller.hits == [3]


def test_packages_answer_every_l_sample_each_once() -> None:
    caller = warmed(loader=True)  # one sample a package
    assert caller.read(12) == [12]
    assert len(caller.loaded) == 1
    served = caller.read(*range(10))
    assert sorted(served) == list(range(10))  # ten L-samples asked for, ten seen, each once
    assert caller.missed == []
    assert set(caller.loaded) >= set(range(9))
    assert caller.read(5) == [5]  # nothing is left that was not read in this epoch
    assert caller.missed == [5]
    for _ in range(3):  # and so in the epochs to come, whatever is held when they begin
        caller.epoch()
        assert sorted(caller.read(*range(10))) == list(range(10))
    assert caller.missed == [5]


def test_a_package_is_loaded_when_all_of_the_last_was_served() -> None:
    policy = ICache(60, h_share=0.5, package_bytes=3)
    caller = Caller(policy, [1] * 100, loader=True)
    caller.policy.hint(Hints(sizes=np.ones(100, int)))  # nothing need be read to be packed
    caller.tell({item: float(item) for item in range(100)})
    caller.epoch()
    caller.read(99)
    assert len(caller.loaded) == 6  # two packages
    caller.read(*range(6))
    assert len(caller.loaded) == 6
    caller.read(6)
    assert len(caller.loaded) == 12
    assert set(caller.evicted) == set(caller.loaded[:6])


def test_what_missed_is_packed_first() -> None:
    caller = warmed(loader=True)
    caller.read(12)
    missed = [item for item in range(9) if item not in caller.loaded][:2]
    caller.read(*missed)
    assert len(caller.substituted) == 2
    caller.epoch()
    there, before = caller.loaded[-1], len(caller.loaded)
    caller.read(there, 12)
    assert caller.loaded[before] == next(item for item in missed if item != there)


def test_packages_take_their_time() -> None:
    caller = warmed(loader=True, load_s=2.0)
    caller.read(12, now_s=10.0)
    caller.read(3, now_s=11.9)
    assert (caller.loaded, caller.missed) == ([], [3])
    caller.read(12, now_s=12.0)
    assert len(caller.loaded) == 1
    caller.read(12, now_s=12.4)
    caller.read(caller.loaded[0], now_s=12.5)  # all was served: the next one begins
    caller.read(12, now_s=14.4)
    assert len(caller.loaded) == 1
    caller.read(12, now_s=14.5)
    assert len(caller.loaded) == 2
    assert 3 not in caller.loaded  # it was read in this epoch


def test_packages_come_one_after_the_other() -> None:
    caller = Caller(ICache(60, h_share=0.5, package_bytes=2, load_s=1.0), [1] * 100, loader=True)
    caller.policy.hint(Hints(sizes=np.ones(100, int)))
    caller.tell({item: float(item) for item in range(100)})
    caller.epoch()
    loaded = []
    for now_s in (5.0, 5.9, 6.0, 6.9, 7.5, 20.0):
        caller.read(99, now_s=now_s)
        loaded.append(len(caller.loaded))
    assert loaded == [0, 0, 2, 2, 4, 6]


def test_a_package_has_a_megabyte_or_what_the_l_cache_has() -> None:
    assert ICache(100 * PACKAGE_BYTES).package_bytes == PACKAGE_BYTES
    assert ICache(500).package_bytes == 50


def test_the_same_seed_substitutes_the_same() -> None:
    def served(seed: int) -> list[int]:
        policy = ICache(100, seed=seed)
        caller = Caller(policy, [1] * 200, loader=True)
        rng = np.random.default_rng(1)
        caller.tell({item: float(item % 50) for item in range(200)})
        answers = []
        for _ in range(3):
            answers += caller.read(*rng.permutation(200).tolist())
            caller.epoch()
        return answers

    assert served(1) == served(1)
    assert served(1) != served(2)


@given(
    st.lists(
        st.one_of(
            st.integers(0, 14),
            st.just("epoch"),
            st.dictionaries(st.integers(0, 14), st.integers(-2, 3).map(float), max_size=15),
        ),
        max_size=100,
    ),
    st.lists(st.integers(0, 5), min_size=15, max_size=15),
    st.integers(0, 40),
    st.booleans(),
)
def test_the_books_are_right_and_nothing_stands_for_another_twice(
    steps: list[int | str | dict[int, float]],
    sizes: list[int],
    capacity_bytes: int,
    loader: bool,
) -> None:
    caller = Caller(ICache(capacity_bytes), sizes, loader=loader)
    substitutes: set[int] = set()
    read: set[int] = set()
    for step in steps:
        if isinstance(step, dict):
            caller.tell(step)
        elif isinstance(step, str):
            caller.epoch()
            substitutes, read = set(), set()
        else:
            before = len(caller.substituted)
            (served,) = caller.read(step)
            if len(caller.substituted) > before:
                assert served not in substitutes | read
                substitutes.add(served)
            else:
                read.add(served)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"h_share": 1.5}, "h_share must be 0 to 1, not 1.5"),
        ({"package_bytes": -1}, "package_bytes must be 0 or more, not -1"),
        ({"load_s": float("nan")}, "load_s must be 0 or more, not nan"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ICache(10, **options)  # type: ignore[arg-type]


def test_importance_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"importance\[1\] must be a finite number, not nan"):
        ICache(10).hint(Hints(items=np.array([0, 1]), importance=np.array([1.0, np.nan])))


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="sizes must be 0 or more, not -4"):
        ICache(10).hint(Hints(sizes=np.array([1, -4])))
