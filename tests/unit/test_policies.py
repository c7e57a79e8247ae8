"""SSD placement against Belady's MIN, and the admission contract."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.policies import Admission, Integers
from hintsd.policies.belady import origin_bytes
from hintsd.policies.resident import Residents

SIZE_BYTES = 100


def kept_origin_bytes(epochs: list[Integers], sizes: Integers, kept: Integers) -> list[int]:
    """What a cache that holds `kept` and never replaces fetches: the first time, and all others."""
    stored = np.zeros(len(sizes), bool)
    fetched = []
    for epoch in epochs:
        fetched.append(int(sizes[epoch[~stored[epoch]]].sum()))
        stored[epoch] |= kept[epoch]
    return fetched


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 0.9])
def test_residents_fetch_what_belady_fetches_of_uniform_shuffles(share: float) -> None:
    rng = np.random.default_rng(3)
    count, rounds = 4000, 4
    sizes = np.full(count, SIZE_BYTES)
    epochs = [rng.permutation(count) for _ in range(rounds)]
    policy = Residents(int(share * count * SIZE_BYTES))
    kept = np.zeros(count, bool)
    kept[epochs[0]] = policy.admit(sizes[epochs[0]])
    ours = kept_origin_bytes(epochs, sizes, kept)
    best = origin_bytes(epochs, sizes, policy.capacity_bytes)
    whole = count * SIZE_BYTES
    assert ours[0] == best[0] == whole
    for epoch in range(1, rounds):
        assert ours[epoch] <= (1 - share) * whole * 1.01
    assert sum(ours[1:]) <= sum(best[1:]) + 0.01 * whole * rounds


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
        kept[first_use] = Residents(int(share * count * SIZE_BYTES)).admit(sizes[first_use], counts)
        totals[name] = sum(kept_origin_bytes(epochs, sizes, kept))
    best = sum(origin_bytes(epochs, sizes, int(share * count * SIZE_BYTES)))
    assert best <= totals["frequency"] < totals["first use"]


def test_belady_keeps_what_is_used_next_and_passes_the_rest() -> None:
    sizes = np.array([1, 1, 1])
    # 0 1 2 | 0 1 2 with room for two: 2 is passed by, for it is used last
    assert origin_bytes([np.array([0, 1, 2]), np.array([0, 1, 2])], sizes, 2) == [3, 1]
    assert origin_bytes([np.array([0, 0, 0])], sizes, 0) == [3]
    assert origin_bytes([], sizes, 2) == []


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=40),
    st.integers(0, 300),
    st.booleans(),
)
def test_admission_contract(
    items: list[tuple[int, int]], capacity_bytes: int, counted: bool
) -> None:
    sizes = np.array([size for size, _ in items], np.int64)
    uses = np.array([use for _, use in items], np.uint16) if counted else None
    policy: Admission = Residents(capacity_bytes)
    for part in (slice(0, len(items) // 2), slice(len(items) // 2, None)):
        admitted = policy.admit(sizes[part], None if uses is None else uses[part])
        policy.check_invariants()
        assert policy.held_bytes <= policy.capacity_bytes
        refused = sizes[part][~admitted]
        assert admitted.shape == sizes[part].shape
        assert (refused > policy.capacity_bytes - policy.held_bytes).all()
        if uses is not None and len(refused):
            first = np.flatnonzero(~admitted)[0]  # nothing less used took the room it needed
            better = (uses[part][first] > uses[part]) & (sizes[part][first] <= sizes[part])
            assert not (better & admitted & (sizes[part] > 0)).any()
    policy.release(policy.held_bytes)
    assert policy.held_bytes == 0
