"""What each policy keeps, against examples worked by hand, closed formulas and brute force."""

from __future__ import annotations

import functools
import math
import re
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.policies import MISS, Hints, Integers, Policy
from hintsd.policies.belady import Belady
from hintsd.policies.catalogue import CATALOGUE
from hintsd.policies.frequency import Frequency
from hintsd.policies.lfu import LFU
from hintsd.policies.lru import LRU
from hintsd.policies.minio import MinIO
from hintsd.policies.random_eviction import RandomEviction
from hintsd.policies.residents import Residents
from hintsd.policies.s3fifo import S3FIFO
from tests.support.policy_caller import origin_bytes

SIZE_BYTES = 100


def read(policy: Policy, items: str, sizes: dict[str, int] | None = None) -> str:
    """Reads items named by letters; capital letters are hits."""
    answers = [
        policy.access(ord(item) - ord("a"), 1 if sizes is None else sizes[item]) for item in items
    ]
    return "".join(
        item if answer == MISS else item.upper()
        for item, answer in zip(items, answers, strict=True)
    )


def held(policy: Policy) -> str:
    return "".join(chr(ord("a") + item) for item in range(26) if item in policy)


def later_hit_ratio(policy: Policy, epochs: list[Integers]) -> float:
    """Of the epochs after the first, all items of one size."""
    policy.hint(Hints(sequence=np.concatenate(epochs)))
    answers = [[policy.access(item, SIZE_BYTES) for item in epoch.tolist()] for epoch in epochs]
    return float(np.mean(np.array(answers[1:]) != MISS))


@functools.cache
def shuffles(count: int, rounds: int) -> list[Integers]:
    rng = np.random.default_rng(3)
    return [rng.permutation(count) for _ in range(rounds)]


def lru_hit_ratio(share: float) -> float:
    """Of an epoch after an independent one, both uniform shuffles, the cache holding `share`.

    An item read at the (relative) place x of one epoch and y of the next is found if at most
    `share` of the dataset was read between. The rest, read before x and after y, is x (1 - y). So
    it hits if x (1 - y) >= 1 - share = a; of two uniform variables, P(x z >= a) = 1 - a + a ln a.
    """
    rest = 1 - share
    return share + rest * math.log(rest)


SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 0.95)


@pytest.mark.parametrize("share", SHARES)
def test_lru_on_uniform_shuffles_hits_as_computed(share: float) -> None:
    count = 4000
    found = later_hit_ratio(LRU(int(share * count) * SIZE_BYTES), shuffles(count, 9))
    assert found == pytest.approx(lru_hit_ratio(share), abs=0.01)


def test_the_formula_gives_icache_s_figures_for_lru() -> None:
    """iCACHE, Figure 16: an LRU cache of 20, 40, 60 and 80 % of CIFAR-10."""
    found = [round(lru_hit_ratio(share), 2) for share in (0.2, 0.4, 0.6, 0.8)]
    assert found == [0.02, 0.09, 0.23, 0.48]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["minio", "frequency"])
def test_never_replacing_hits_its_share_of_uniform_shuffles(name: str, share: float) -> None:
    count = 2000
    policy = CATALOGUE[name](int(share * count) * SIZE_BYTES)
    assert later_hit_ratio(policy, shuffles(count, 4)) == pytest.approx(share)


@pytest.mark.parametrize("share", SHARES)
def test_belady_hits_its_share_of_uniform_shuffles(share: float) -> None:
    """And hardly more, which is why nothing needs to be replaced."""
    count = 4000
    found = later_hit_ratio(Belady(int(share * count) * SIZE_BYTES), shuffles(count, 9))
    assert found == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("name", ["fifo", "lru", "lfu", "random", "s3fifo"])
def test_nobody_who_replaces_reaches_belady_on_uniform_shuffles(name: str, share: float) -> None:
    count = 2000
    found = later_hit_ratio(CATALOGUE[name](int(share * count) * SIZE_BYTES), shuffles(count, 4))
    assert 0 < found < share


def test_fifo_does_not_mind_hits_and_lru_does() -> None:
    assert read(CATALOGUE["fifo"](3), "abcaadabc") == "abcAAdabc"
    assert read(CATALOGUE["lru"](3), "abcaadabc") == "abcAAdAbc"


def test_lfu_drops_the_least_used_and_of_those_the_least_recent() -> None:
    policy = LFU(3)
    assert read(policy, "abcab") == "abcAB"
    assert read(policy, "d") == "d"
    assert held(policy) == "abd"  # c was used once, a and b twice
    assert read(policy, "de") == "De"
    assert held(policy) == "bde"  # all were used twice, a least recently


def test_lfu_forgets_the_uses_of_what_it_drops() -> None:
    policy = LFU(2)
    read(policy, "aaabbbb")
    assert read(policy, "cd") == "cd"
    assert held(policy) == "bd"
    assert read(policy, "a") == "a"
    assert held(policy) == "ab"
    assert read(policy, "c") == "c"
    assert held(policy) == "bc"  # a has one use, not four


def test_as_many_go_as_the_new_item_needs_room_for() -> None:
    sizes = {"a": 2, "b": 2, "c": 2, "d": 3}
    for name in ("fifo", "lru", "lfu"):
        policy = CATALOGUE[name](6)
        read(policy, "abc", sizes)
        assert read(policy, "d", sizes) == "d"
        assert held(policy) == "cd"
        assert policy.held_bytes == 5


def test_random_drops_anyone_with_the_same_chance() -> None:
    count, rounds = 10, 3000
    gone = np.zeros(count, np.int64)
    for seed in range(rounds):
        evicted: list[int] = []
        policy = RandomEviction(count, on_evict=evicted.append, seed=seed)
        for item in range(count + 2):
            policy.access(item, 1)
        assert len(set(evicted)) == 2
        gone[evicted[0]] += 1
    expected = rounds / count
    assert ((gone - expected) ** 2 / expected).sum() < 27.9  # chi-square, 9 degrees, p = 0.001


def test_s3_fifo_by_hand() -> None:
    """Small queue of 2, main queue of 18; nine tenths of 20 names in the ghost queue."""
    policy = S3FIFO(20)
    first = "abcdefghijklmnopqrst"
    read(policy, first)  # a and b fill the small queue, the rest goes to the main queue
    assert read(policy, "aabccc") == "AABCCC"
    assert read(policy, "u") == "u"
    assert "b" not in held(policy)  # a was used twice and moved; b once: only its name is kept
    assert read(policy, "b") == "b"  # straight into the main queue, for it was remembered
    assert "d" not in held(policy)  # which had one too many: c was used and goes round, d not
    assert read(policy, "c") == "C"
    assert read(policy, "d") == "d"  # of what the main queue drops no name is kept
    assert "e" not in held(policy)
    assert read(policy, "v") == "v"  # the small queue had u and d
    assert "u" not in held(policy)
    assert "d" in held(policy)


@pytest.mark.parametrize(("others", "remembered"), [(17, True), (18, False)])
def test_s3_fifo_remembers_names_of_nine_tenths_of_its_capacity(
    others: int, remembered: bool
) -> None:
    policy = S3FIFO(20)
    for item in range(
        20 + 1 + others
    ):  # each after the first twenty lets one go from the small queue
        policy.access(item, 1)
    assert policy.access(0, 1) == MISS
    for item in (100, 101):  # as many as the small queue holds
        policy.access(item, 1)
    assert (0 in policy) == remembered


def test_s3_fifo_takes_an_item_that_the_small_queue_has_no_room_for() -> None:
    policy = S3FIFO(10)
    assert read(policy, "aa", {"a": 7}) == "aA"


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=14),
    st.integers(0, 5),
)
def test_no_choice_of_what_to_keep_fetches_less_than_belady(
    items: list[int], capacity: int
) -> None:
    @functools.cache
    def most_hits(at: int, kept: frozenset[int]) -> int:
        if at == len(items):
            return 0
        item = items[at]
        if item in kept:
            return 1 + most_hits(at + 1, kept)
        hits = most_hits(at + 1, kept)
        if len(kept) < capacity:
            return max(hits, most_hits(at + 1, kept | {item}))
        return max([hits, *(most_hits(at + 1, kept - {gone} | {item}) for gone in kept)])

    policy = Belady(capacity)
    policy.hint(Hints(sequence=np.array(items)))
    hits = sum(policy.access(item, 1) != MISS for item in items)
    assert hits == most_hits(0, frozenset())


def test_belady_keeps_what_is_used_next_and_passes_the_rest() -> None:
    sizes = np.array([1, 1, 1])
    # 0 1 2 | 0 1 2 with room for two: 2 is passed by, for it is used last
    assert origin_bytes([np.array([0, 1, 2]), np.array([0, 1, 2])], sizes, 2) == [3, 1]
    assert origin_bytes([np.array([0, 0, 0])], sizes, 0) == [3]
    assert origin_bytes([], sizes, 2) == []


def test_belady_drops_nothing_in_vain() -> None:
    """Dropping d, which is used last, would not make room enough for b: so d stays."""
    sizes = {"a": 4, "d": 2, "b": 3}
    items = "adbabd"
    policy = Belady(6)
    policy.hint(Hints(sequence=np.array([ord(item) - ord("a") for item in items])))
    assert read(policy, items, sizes) == "adbAbD"


def test_belady_believes_the_newest_sequence() -> None:
    evicted: list[int] = []
    policy = Belady(2, on_evict=evicted.append)
    policy.hint(Hints(sequence=np.array([0, 1, 0, 1])))
    assert read(policy, "ab") == "ab"
    policy.hint(Hints(sequence=np.array([1, 2, 2])))
    assert evicted == [0]  # is not read any more
    policy.check_invariants()
    assert read(policy, "bcc") == "BcC"
    assert read(policy, "c") == "c"  # after the end everything passes


def test_belady_says_where_a_read_is_not_as_told() -> None:
    policy = Belady(2)
    policy.hint(Hints(sequence=np.array([0, 1])))
    policy.access(0, 1)
    with pytest.raises(
        ValueError, match="access 1 is of item 5; the sequence that was told says 1"
    ):
        policy.access(5, 1)


@pytest.mark.parametrize(
    ("policy", "hints", "line"),
    [
        (
            Belady,
            Hints(sequence=np.zeros((2, 2), int)),
            r"sequence must be of shape (n,), not (2, 2)",
        ),
        (Belady, Hints(sequence=np.array([0.5])), "sequence must be whole numbers, not float64"),
        (Belady, Hints(sequence=np.array([0, -1])), "sequence must be 0 or more, not -1"),
        (Frequency, Hints(uses=np.array(3)), "uses must be of shape (n,), not ()"),
        (Frequency, Hints(uses=np.array([1]), sizes=np.array([np.nan])), "sizes must be whole"),
        (
            Frequency,
            Hints(uses=np.array([1, 2]), sizes=np.array([1])),
            "uses and sizes must be of one length, not 2, 1",
        ),
    ],
)
def test_hints_of_a_wrong_shape_are_refused_in_a_line(
    policy: type[Policy], hints: Hints, line: str
) -> None:
    one = policy(2)
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        one.hint(hints)
    assert "\n" not in str(caught.value)
    assert one.access(0, 1) == MISS
    one.check_invariants()


def test_minio_keeps_what_came_first() -> None:
    policy = MinIO(5)
    sizes = {"a": 2, "b": 4, "c": 2, "d": 1}
    assert read(policy, "abcdabcd", sizes) == "abcdAbCD"
    policy.check_invariants()


SIZED = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=16)


@given(SIZED, st.integers(0, 300), st.randoms(use_true_random=False))
def test_frequency_keeps_the_same_items_in_whatever_order_they_are_read(
    items: list[tuple[int, int]], capacity_bytes: int, random: Random
) -> None:
    sizes = np.array([size for size, _ in items], np.int64)
    uses = np.array([use for _, use in items], np.int64)
    policy = Frequency(capacity_bytes)
    policy.hint(Hints(uses=uses, sizes=sizes))
    order = list(range(len(items)))
    random.shuffle(order)
    for item in order:
        policy.access(item, int(sizes[item]))
    admitted = Residents(capacity_bytes).admit(sizes, uses)
    assert [item in policy for item in range(len(items))] == admitted.tolist()
    policy.hint(Hints(uses=uses, sizes=sizes))
    assert [policy.access(item, int(sizes[item])) != MISS for item in order] == [
        bool(admitted[item]) for item in order
    ]


def test_frequency_lets_the_most_used_in_and_keeps_what_it_has() -> None:
    uses = np.array([1, 3, 2, 3])
    policy = Frequency(2)
    policy.hint(Hints(uses=uses))  # no sizes: all are as large as the first that is read
    assert read(policy, "abcdabcd") == "abcdaBcD"
    policy.hint(Hints(uses=uses[::-1]))
    assert read(policy, "abcd") == "aBcD"


def test_what_frequency_holds_already_takes_no_more_room() -> None:
    policy = Frequency(3)
    policy.hint(Hints(uses=np.array([1, 3, 2, 3])))
    assert read(policy, "bdbd") == "bdBD"
    policy.hint(Hints(uses=np.array([1, 9, 0, 8])))
    assert read(policy, "cadba") == "caDBA"
