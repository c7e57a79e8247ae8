"""A permutation, read so that what is cached comes a little earlier."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.sampling.arranging import Arrangement, permutation


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 9),
    look_ahead=st.integers(0, 8),
    share=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 1 << 20),
    resumed_after=st.integers(0, 60),
)
def test_each_is_read_once_and_less_than_the_look_ahead_from_its_place(
    samples: int, batch: int, look_ahead: int, share: float, seed: int, resumed_after: int
) -> None:
    """Whatever is cached, and if that changes before each batch; also where it is resumed."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(samples)
    arrangement, resumed = (Arrangement(order, batch, look_ahead) for _ in range(2))
    place = np.argsort(order)

    def read_on(of: Arrangement, stop: int) -> list[int]:
        read = list[int]()
        while of.arranged < stop:
            start = of.arranged
            whole = of.reads()
            cached = None if rng.random() < 0.1 else rng.random(samples) < share
            is_changed = of.arrange(1, cached)
            assert is_changed == (of.reads().tolist() != whole.tolist())
            read += of.decided(start, samples).tolist()
            assert of.reads()[start : of.arranged].tolist() == read[-(of.arranged - start) :]
        return read

    read = read_on(arrangement, min(samples, resumed_after))
    resumed.resume(*arrangement.state(len(read)))
    assert sorted(resumed.reads(len(read)).tolist()) == sorted(set(range(samples)) - set(read))
    read += read_on(resumed, samples)
    assert sorted(read) == list(range(samples))
    drift = np.abs(place[read] - np.arange(samples))
    assert drift.max() < batch * max(1, look_ahead)
    if look_ahead == 0:
        assert read == order.tolist()


def test_what_is_cached_is_read_first_and_the_rest_at_the_end_of_the_look_ahead() -> None:
    arrangement = Arrangement(np.arange(30), 5, 3)
    cached = np.isin(np.arange(30), [1, 4, 7, 12, 14, 16, 20])
    assert arrangement.arrange(1, cached)
    assert arrangement.decided(0, 9).tolist() == [1, 4, 7, 12, 14]
    # 0 is waited for: nothing from 15 on is looked at before it is read
    assert not arrangement.arrange(1, cached)
    assert arrangement.decided(5, 9).tolist() == [0, 2, 3, 5, 6]
    assert arrangement.arrange(1, cached)
    assert arrangement.decided(10, 9).tolist() == [16, 20, 8, 9, 10]
    assert arrangement.reads(15).tolist() == [11, 13, 15, 17, 18, 19, *range(21, 30)]
    assert not arrangement.arrange(9, None)  # in turn: what was told stays
    assert len(arrangement) == arrangement.arranged == 30


def test_a_state_is_that_of_what_was_read_not_of_what_is_decided() -> None:
    arrangement = Arrangement(np.arange(10), 2, 3)
    arrangement.arrange(2, np.arange(10) % 2 == 1)
    assert arrangement.decided(0, 4).tolist() == [1, 3, 5, 0]
    assert arrangement.state(2) == (0, [1, 3])
    assert arrangement.state(4) == (2, [3, 5])
    assert arrangement.state(0) == (0, [])


@pytest.mark.parametrize(
    ("first", "beyond"),
    [(-1, []), (11, []), (2, [2]), (2, [1]), (2, [8]), (0, [3, 3]), (9, [10])],
)
def test_what_no_arrangement_leaves_is_refused(first: int, beyond: list[int]) -> None:
    arrangement = Arrangement(np.arange(10), 2, 3)
    with pytest.raises(ValueError, match="place"):
        arrangement.resume(first, beyond)


@pytest.mark.parametrize(("samples", "replicas"), [(30, 3), (31, 3), (2, 5)])
def test_ranks_have_shares_of_one_permutation(samples: int, replicas: int) -> None:
    shares = [permutation(samples, 4, 7, replicas, rank) for rank in range(replicas)]
    assert len({len(share) for share in shares}) == 1
    dealt = np.stack(shares, axis=1).reshape(-1)
    alone = permutation(samples, 4, 7, 1, 0)
    assert dealt[:samples].tolist() == alone.tolist()
    assert sorted(alone.tolist()) == list(range(samples))
    assert dealt.tolist() == np.resize(alone, len(dealt)).tolist()
    assert alone.tolist() != permutation(samples, 4, 8, 1, 0).tolist() or samples < 5
    assert alone.tolist() != permutation(samples, 5, 7, 1, 0).tolist() or samples < 5
