"""Quiver: every sample once an epoch, out of what is cached now."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.policies import Hints
from hintsd.policies.papers.quiver import Quiver
from tests.support.policy_caller import Caller


def caller(
    capacity_bytes: int, sizes: list[int], *, loader: bool = True, known: bool = True
) -> Caller:
    made = Caller(Quiver(capacity_bytes), sizes, loader=loader)
    if known:
        made.policy.hint(Hints(sizes=np.array(sizes, np.int64)))
    return made


def test_two_chunks_are_held_and_the_exhausted_one_makes_room() -> None:
    """Eight samples in four chunks: 0 4, 1 5, 2 6 and 3 7."""
    job = caller(4, [1] * 8)
    job.epoch()
    assert job.loaded == [0, 4, 1, 5]
    assert job.read(4, 0) == [4, 0]
    assert job.held == {1, 5, 2, 6}  # the first chunk was served, the third is there
    (first,) = job.read(3)  # pending: one of the older chunk is read in its stead
    assert first in {1, 5}
    (other,) = job.read(first)  # its turn was taken, so the other one is read
    assert {first, other} == {1, 5}
    assert job.held == {2, 6, 3, 7}
    assert sorted(job.read(other, 7, 6, 2)) == [2, 3, 6, 7]
    assert job.missed == []
    assert job.held == {2, 6, 3, 7}  # all chunks had their turn


def test_an_epoch_begins_with_what_is_held() -> None:
    job = caller(4, [1] * 8)
    job.epoch()
    job.read(*range(8))
    held = set(job.held)
    loaded = len(job.loaded)
    job.epoch()
    assert job.held == held
    served = [job.read(item)[0] for item in range(8)]
    assert set(served[:2]) <= held
    assert sorted(served) == list(range(8))
    assert len(job.loaded) == loaded + 4  # the two chunks that were not held


def test_chunks_are_striped_over_the_dataset() -> None:
    job = caller(200, [1] * 1000)
    job.epoch()
    assert job.held == {item for item in range(1000) if item % 10 in (0, 1)}


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
def test_substitution_hits_always_and_fetches_as_much_as_if_it_did_not(share: float) -> None:
    """Docstring of the module: it takes misses out of the reader's way, not off the origin."""
    rng = np.random.default_rng(1)
    job, plain = (
        caller(int(share * 200), [1] * 200, loader=loader, known=False) for loader in (True, False)
    )
    for epoch in range(4):
        order = rng.permutation(200).tolist()
        for reader in (job, plain):
            reader.epoch()
            reader.missed.clear()
            reader.loaded.clear()
            assert sorted(reader.read(*order)) == list(range(200))
        if epoch > 1:
            assert job.missed == []
            assert len(job.loaded) == len(plain.missed) == 200 - int(share * 200)
    assert plain.substituted == []


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40),
    st.integers(0, 60),
    st.integers(1, 4),
    st.integers(0, 99),
    st.booleans(),
    st.booleans(),
)
def test_every_sample_is_seen_exactly_once_an_epoch(
    sizes: list[int], capacity_bytes: int, epochs: int, seed: int, loader: bool, known: bool
) -> None:
    job = caller(capacity_bytes, sizes, loader=loader, known=known)
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        job.epoch()
        seen = job.read(*rng.permutation(len(sizes)).tolist())
        assert sorted(seen) == list(range(len(sizes)))


@given(
    st.lists(st.one_of(st.integers(0, 19), st.just(-1)), max_size=120),
    st.lists(st.integers(0, 6), min_size=20, max_size=20),
    st.integers(0, 50),
)
def test_the_books_are_right_for_any_reads(
    steps: list[int], sizes: list[int], capacity_bytes: int
) -> None:
    job = caller(capacity_bytes, sizes, known=False)
    for step in steps:
        if step < 0:
            job.epoch()
        else:
            job.read(step)


def test_a_dataset_that_fits_stays_whole() -> None:
    job = caller(10, [1] * 10, known=False)
    for _ in range(3):
        job.epoch()
        job.read(*range(10))
    assert (len(job.missed), len(job.hits), job.loaded) == (10, 20, [])


def test_a_sample_asked_for_again_is_not_substituted() -> None:
    job = caller(4, [1] * 8)
    job.epoch()
    job.read(0)
    job.read(0)
    assert job.hits == [0, 0]
    (first,) = job.read(7)
    job.read(7)  # pending already: it is fetched
    assert (job.substituted, job.missed) == ([first], [7])
    job.read(*range(1, 7))
    assert 3 in job.loaded
    assert 7 not in job.loaded  # with its chunk: it was read


def test_a_sample_larger_than_a_chunk_is_read_in_its_own_turn() -> None:
    job = caller(4, [1, 1, 3, 1, 1, 1])
    job.epoch()
    assert sorted(job.read(2, 5, 4, 3, 1, 0)) == [0, 1, 2, 3, 4, 5]
    assert job.missed == [2]


def test_samples_that_come_up_later_join_the_chunks() -> None:
    job = caller(4, [1] * 12, known=False)
    for items in (range(8), range(12), range(12), range(12)):
        job.epoch()
        job.missed.clear()
        assert sorted(job.read(*items)) == list(items)
    assert job.missed == []


def test_the_same_seed_substitutes_the_same() -> None:
    def served(seed: int) -> list[int]:
        job = Caller(Quiver(20, seed=seed), [1] * 100, loader=True)
        seen = []
        for epoch in range(3):
            job.epoch()
            seen += job.read(*np.random.default_rng(epoch).permutation(100).tolist())
        return seen

    assert served(1) == served(1)
    assert served(1) != served(2)


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="sizes must be 0 or more, not -1"):
        Quiver(1).hint(Hints(sizes=np.array([-1])))
