"""What `hintsd.policies.residents` promises, and that all who use it let in the same items."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.plan.commands import Withdrawn
from hintsd.plan.files import RESIDENT, Files, Ssd
from hintsd.policies import Hints, Integers, Policy
from hintsd.policies.frequency import Frequency
from hintsd.policies.minio import MinIO
from hintsd.policies.residents import Residents, fits
from tests.support.policy_caller import origin_bytes

SIZE_BYTES = 100
ITEMS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=16)  # (bytes, uses)
CAPACITY = st.integers(0, 300)


def arrays(items: list[tuple[int, int]], counted: bool) -> tuple[Integers, Integers | None]:
    sizes = np.array([size for size, _ in items], np.uint32)
    uses = np.array([use for _, use in items], np.uint16)
    return sizes, uses if counted else None


def admitted(sizes: Integers, uses: Integers | None, free_bytes: int) -> list[bool]:
    """The rule, one item after the other."""
    order = range(len(sizes))
    found = [False] * len(sizes)
    for item in order if uses is None else sorted(order, key=lambda item: -int(uses[item])):
        if sizes[item] <= free_bytes:
            found[item] = True
            free_bytes -= int(sizes[item])
    return found


def in_policy(policy: Policy, sizes: Integers, uses: Integers | None) -> list[bool]:
    """Reads all items once."""
    policy.hint(Hints(uses=uses, sizes=sizes))
    for item, size_bytes in enumerate(sizes.tolist()):
        policy.access(item, size_bytes)
    policy.check_invariants()
    return [item in policy for item in range(len(sizes))]


def in_plan(capacity_bytes: int, sizes: Integers, uses: Integers | None) -> list[bool]:
    files = Files()
    ssd = Ssd(files, Withdrawn())
    inos = np.arange(1, len(sizes) + 1, dtype=np.uint32)
    files.grow(len(sizes) + 1)
    files.resize(inos, sizes)
    ssd.set_room(capacity_bytes)
    assert ssd.admit(inos, uses) == all(admitted(sizes, uses, capacity_bytes))
    ssd.check_invariants()
    found: list[bool] = (files.flags[inos] & RESIDENT != 0).tolist()
    return found


USERS: dict[str, Callable[[int, Integers, Integers | None], list[bool]]] = {
    "residents": lambda capacity, sizes, uses: Residents(capacity).admit(sizes, uses).tolist(),
    "minio": lambda capacity, sizes, _: in_policy(MinIO(capacity), sizes, None),
    "frequency": lambda capacity, sizes, uses: in_policy(Frequency(capacity), sizes, uses),
    "plan": in_plan,
}


@pytest.mark.parametrize("user", USERS)
@given(items=ITEMS, capacity_bytes=CAPACITY, counted=st.booleans())
def test_whoever_asks_the_same_items_are_let_in(
    user: str, items: list[tuple[int, int]], capacity_bytes: int, counted: bool
) -> None:
    sizes, uses = arrays(items, counted and user != "minio")
    assert USERS[user](capacity_bytes, sizes, uses) == admitted(sizes, uses, capacity_bytes)


Step = tuple[
    str, list[tuple[int, int]], int
]  # admit, counted or not, release or resize; by how much
STEPS = st.tuples(st.sampled_from(("admit", "count", "one", "release", "resize")), ITEMS, CAPACITY)


@given(CAPACITY, st.lists(STEPS, max_size=12))
def test_the_room_is_kept_whatever_comes_and_goes(capacity_bytes: int, steps: list[Step]) -> None:
    residents, held = Residents(capacity_bytes), [0]
    for step, items, number in steps:
        free_bytes = max(0, capacity_bytes - sum(held))
        if step in ("admit", "count"):
            sizes, uses = arrays(items, step == "count")
            found = residents.admit(sizes, uses).tolist()
            assert found == admitted(sizes, uses, free_bytes)
            held += sizes[found].tolist()
        elif step == "one":
            assert residents.admit_one(number) == (number <= free_bytes)
            held += [number] if number <= free_bytes else []
        elif step == "release":
            residents.release(held.pop(number % len(held)))
            held = held or [0]
        else:
            residents.resize(number)
            capacity_bytes = number
        residents.check_invariants()
        assert (residents.capacity_bytes, residents.held_bytes) == (capacity_bytes, sum(held))
        assert residents.free_bytes == max(0, capacity_bytes - sum(held))


def test_where_the_room_shrinks_nothing_more_is_let_in() -> None:
    residents = Residents(10)
    assert residents.admit(np.array([4, 4])).tolist() == [True, True]
    residents.resize(5)
    assert (residents.free_bytes, residents.held_bytes) == (0, 8)
    assert residents.admit(np.array([1])).tolist() == [False]
    residents.release(4)
    assert residents.admit(np.array([2, 1])).tolist() == [False, True]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda one: Residents(-1), "capacity_bytes must be 0 or more, not -1"),
        (lambda one: one.resize(-1), "capacity_bytes must be 0 or more, not -1"),
        (lambda one: one.release(-1), "-1 bytes released, 3 held"),
        (lambda one: one.release(4), "4 bytes released, 3 held"),
        (
            lambda one: one.admit(np.array([1, 1]), np.array([1])),
            "uses and sizes must be of one shape, not (1,), (2,)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_and_changes_nothing(
    call: Callable[[Residents], object], line: str
) -> None:
    one = Residents(5)
    assert one.admit_one(3)
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        call(one)
    one.check_invariants()
    assert (one.capacity_bytes, one.held_bytes, one.free_bytes) == (5, 3, 2)


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(-3, 40))
def test_what_fits_is_the_longest_beginning(sizes: list[int], room_bytes: int) -> None:
    count = fits(np.array(sizes, np.uint32), room_bytes)
    sums = [sum(sizes[:stop]) for stop in range(1, len(sizes) + 1)]
    assert count == sum(total <= room_bytes for total in sums)


def kept_origin_bytes(epochs: list[Integers], sizes: Integers, kept: Integers) -> list[int]:
    """What a cache that holds `kept` and never replaces fetches: the first time, and all others."""
    stored = np.zeros(len(sizes), bool)
    fetched = []
    for epoch in epochs:
        fetched.append(int(sizes[epoch[~stored[epoch]]].sum()))
        stored[epoch] |= kept[epoch]
    return fetched


def test_the_most_used_files_of_a_rank_go_first() -> None:
    """HDMLP 3.2: a rank reads some samples more often; keeping those beats keeping the first."""
    rng = np.random.default_rng(5)
    count, ranks, rounds, share = 2000, 4, 40, 0.1
    sizes = np.full(count, SIZE_BYTES)
    epochs = [rng.permutation(count)[: count // ranks] for _ in range(rounds)]
    uses = np.bincount(np.concatenate(epochs), minlength=count).astype(np.uint16)
    in_order = np.concatenate(epochs)
    first_use = in_order[np.sort(np.unique(in_order, return_index=True)[1])]
    totals = {}
    for name, counts in (("frequency", uses[first_use]), ("first use", None)):
        kept = np.zeros(count, bool)
        residents = Residents(int(share * count * SIZE_BYTES))
        kept[first_use] = residents.admit(sizes[first_use], counts)
        totals[name] = sum(kept_origin_bytes(epochs, sizes, kept))
    best = sum(origin_bytes(epochs, sizes, int(share * count * SIZE_BYTES)))
    assert best <= totals["frequency"] < totals["first use"]
