"""Chunks: a ring of parts of a dataset, walked by several jobs; and which of them is next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.sampling.chunks import Ring, Walk, next_chunk
from tests.support.chunk_simulation import CHUNKS, PARTS, SimulatedJob, fetched

LENGTH_OF_EPOCH = CHUNKS * PARTS


def in_ring_order(unread: list[int], others: list[int], chunks: int) -> int:
    return unread[0]


# ---- a ring, and a walk of it --------------------------------------------------------------------


@given(
    samples=st.integers(1, 70),
    chunks=st.integers(1, 12),
    replicas=st.integers(1, 5),
    epoch=st.integers(0, 3),
    seed=st.integers(-3, 1 << 70),
)
def test_ranks_share_each_chunk_and_all_jobs_have_the_same(
    samples: int, chunks: int, replicas: int, epoch: int, seed: int
) -> None:
    """As many for each rank; what cannot be dealt evenly comes twice, of the last chunk alone."""
    alone = Ring(samples, chunks, 0, 1, 0)
    rings = [Ring(samples, chunks, seed, replicas, rank) for rank in range(replicas)]
    shares = [[ring.share(chunk, epoch).tolist() for chunk in range(chunks)] for ring in rings]
    for chunk in range(chunks):
        whole = alone.share(chunk, 0).tolist()
        dealt = [index for share in shares for index in share[chunk]]
        assert set(dealt) == set(whole)
        assert len(whole) in (samples // chunks, -(-samples // chunks))
        more = -samples % replicas if chunk == chunks - 1 else 0
        assert len(dealt) == len(whole) + more
        assert len({len(share[chunk]) for share in shares}) <= 2
    assert {sum(map(len, share)) for share in shares} == {-(-samples // replicas)}
    assert [ring.reads for ring in rings] == [-(-samples // replicas)] * replicas


def test_a_chunk_is_a_sample_of_the_dataset_and_shuffled_anew_each_epoch() -> None:
    """The first is known by heart: another program, of another version, must have the same."""
    ring = Ring(1000, 10, 5, 1, 0)
    first, second = (ring.share(3, epoch) for epoch in range(2))
    assert sorted(first.tolist()) == sorted(second.tolist())
    assert first.tolist() != second.tolist() != sorted(second.tolist())
    assert Ring(1000, 10, 6, 1, 0).share(3, 0).tolist() != first.tolist()
    for chunk in range(10):
        assert abs(np.mean(ring.share(chunk, 0)) - 500) < 120
    assert sorted(Ring(20, 4, 0, 1, 0).share(0, 0).tolist()) == KNOWN


KNOWN = [2, 4, 6, 8, 18]


def walk_on(walk: Walk, rng: np.random.Generator, stop: int) -> None:
    while walk.arranged < stop:
        before, unread = walk.reads().tolist(), list(walk.unread)
        is_other = walk.take(unread[rng.integers(len(unread))])
        assert walk.reads()[: walk.arranged].tolist() == walk.decided(0, 99).tolist()
        if walk.reads().tolist() != before:
            assert is_other


@given(
    samples=st.integers(1, 60),
    chunks=st.integers(1, 9),
    replicas=st.integers(1, 3),
    last=st.integers(-1, 8),
    seed=st.integers(0, 1 << 20),
    read=st.integers(0, 60),
)
def test_each_is_read_once_whatever_is_chosen_and_where_it_is_resumed(
    samples: int, chunks: int, replicas: int, last: int, seed: int, read: int
) -> None:
    rng = np.random.default_rng(seed)
    ring = Ring(samples, chunks, seed, replicas, 0)
    walk, resumed, plain = (Walk(ring, 4, min(last, chunks - 1)) for _ in range(3))
    assert walk.last == walk.before % chunks  # once around
    whole = plain.reads().tolist()
    assert len(whole) == len(walk)
    walk_on(walk, rng, min(read, len(walk)))
    head = walk.decided(0, read).tolist()
    begin = resumed.resume(*walk.state(len(head)))
    assert begin == len(head)
    assert resumed.reads()[:begin].tolist() == head
    assert resumed.arranged - begin < -(-samples // chunks) + replicas  # nothing but that chunk
    walk_on(resumed, rng, len(walk))
    assert sorted(resumed.decided(0, 99).tolist()) == sorted(whole)


def test_what_is_not_decided_stands_in_the_order_of_the_ring() -> None:
    walk = Walk(Ring(40, 4, 0, 1, 0), 0, 1)
    assert (walk.unread, walk.last, walk.arranged) == ([2, 3, 0, 1], 1, 0)
    assert walk.take(0)
    assert (walk.unread, walk.last, walk.arranged) == ([1, 2, 3], 3, 10)
    assert not walk.take(1)
    assert not walk.follow(3)  # it has begun
    assert walk.state(10) == ([0], 10)
    assert walk.state(11) == ([0, 1], 1)
    assert walk.state(0) == ([], 0)
    other = Walk(Ring(40, 4, 0, 1, 0), 0, 1)
    assert not other.follow(1)
    assert other.follow(3)
    assert (other.unread, other.before) == ([0, 1, 2, 3], 3)


@pytest.mark.parametrize(
    ("begun", "read"), [([4], 1), ([-1], 1), ([1, 1], 3), ([1], 11), ([1], -1), ([1], 0), ([], 1)]
)
def test_what_no_walk_leaves_is_refused(begun: list[int], read: int) -> None:
    with pytest.raises(ValueError, match=r"^its (chunks|reads) are not those of such"):
        Walk(Ring(40, 4, 0, 1, 0), 0, 1).resume(begun, read)


# ---- the rule ------------------------------------------------------------------------------------


@given(data=st.data(), chunks=st.integers(1, 12))
def test_one_of_the_unread_chunks_is_chosen(data: Any, chunks: int) -> None:
    numbers = st.integers(0, chunks - 1)
    unread = data.draw(st.lists(numbers, min_size=1, unique=True))
    chosen = next_chunk(unread, data.draw(st.lists(numbers, max_size=5)), chunks)
    assert chosen in unread
    assert next_chunk(unread, [], chunks) == unread[0]


@pytest.mark.parametrize(
    ("unread", "others", "expected"),
    [
        ([3, 4, 5, 6], [3], 3),
        ([3, 4, 5, 6], [2], 3),  # one behind: it is coming
        ([3, 4, 5, 6], [4], 4),  # ahead: it goes there
        ([3, 4, 6], [5], 4),  # where it would have read: as near as can be
        ([3, 4], [6], 3),  # nothing is near
        ([9, 0, 1, 2], [1], 1),  # around the ring's end
        ([1, 2, 3], [0], 1),
        ([9, 1, 2], [0], 9),
        ([3, 4, 5, 6, 7], [5, 7, 7], 7),  # where most are
        ([3, 4, 5, 6, 7], [5, 7], 5),  # the first of those that are alike
        (list(range(10)), [7, 8, 5], 7),
    ],
)
def test_a_job_goes_where_it_has_most_company(
    unread: list[int], others: list[int], expected: int
) -> None:
    assert next_chunk(unread, others, 10) == expected


# ---- several jobs, simulated ---------------------------------------------------------------------

SCENES: dict[str, tuple[list[tuple[float, int, float]], float, float]] = {
    # (speed, epochs, start in epochs) of each, the most that is fetched together, and the least
    # that would be by the order of the ring alone: in datasets
    "begun together": ([(1, 4, 0), (1, 4, 0)], 3.3, 3.0),
    "one comes late": ([(1, 4, 0), (1, 4, 0.35)], 3.7, 4.2),
    "three, a third of an epoch apart": ([(1, 4, 0), (1, 4, 0.33), (1, 4, 0.66)], 4.1, 7.5),
    "one is a little slower": ([(1, 5, 0), (0.8, 4, 0)], 4.1, 4.65),
    "one is slow": ([(1, 6, 0), (0.5, 3, 0.2)], 4.8, 4.9),
    "two are alike, one is slow": ([(1, 5, 0), (1, 5, 0.6), (0.5, 3, 0.3)], 5.4, 6.8),
    "four speeds": ([(1, 5, 0), (0.9, 5, 0.2), (0.5, 3, 0.6), (0.33, 2, 0.9)], 5.5, 7.2),
    "the fastest ends": ([(1, 2, 0), (0.6, 3, 0.3), (0.5, 3, 0.5)], 3.8, 4.4),
}


@pytest.mark.parametrize("name", SCENES)
def test_jobs_that_walk_together_fetch_less(name: str) -> None:
    """About the dataset once an epoch, less what the cache keeps (three of ten chunks). And each
    job reads each part once an epoch, whatever the others do."""
    scene, most, in_turn = SCENES[name]

    def jobs() -> list[SimulatedJob]:
        return [
            SimulatedJob(speed, epochs, start * LENGTH_OF_EPOCH) for speed, epochs, start in scene
        ]

    walking = jobs()
    found, alone = fetched(walking, 3, next_chunk), fetched(jobs(), 3, in_ring_order)
    for job in walking:
        assert [sorted(epoch) for epoch in job.read[:-1]] == [
            [*range(LENGTH_OF_EPOCH)]
        ] * job.epochs
    assert found <= most
    assert alone >= in_turn


def test_jobs_whose_epochs_begin_at_one_place_come_together() -> None:
    """They have begun, and stood still: each is at the ring's begin when another one is far on."""
    jobs = [SimulatedJob(1, 4, start * LENGTH_OF_EPOCH, place=0) for start in (0, 0.33, 0.66)]
    assert fetched(jobs, 3, next_chunk) < 4.1
