"""Shares of a cache: who has how much, and who is over its share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.keeping.shares import Haste, Shares, fair

Inos = npt.NDArray[np.uint32]

claim = st.tuples(st.sampled_from([0.0, 0.25, 1.0, 3.0]), st.integers(0, 10**12))


@given(st.lists(claim, min_size=1, max_size=8), st.integers(0, 10**13))
def test_shares_are_the_cache_or_all_there_is(pairs: list[tuple[float, int]], total: int) -> None:
    parts, most = zip(*pairs, strict=True)
    shares = fair(parts, most, total)
    assert all(share <= limit for share, limit in zip(shares, most, strict=True))
    assert 0 <= min(total, sum(most)) - sum(shares) <= len(parts)
    served = [
        (share / part, share < limit)
        for part, limit, share in zip(parts, most, shares, strict=True)
        if part and limit
    ]
    for height, wants_more in served:  # who wants more has as much for its claim as any other
        if wants_more:
            assert all(height >= other * (1 - 1e-9) - 8 for other, _ in served)
    if any(wants_more for _, wants_more in served):
        others = [share for share, part in zip(shares, parts, strict=True) if not part]
        assert sum(others) <= len(parts)


@pytest.mark.parametrize(
    ("parts", "most", "total", "shares"),
    [
        ([1, 1], [100, 100], 60, [30, 30]),
        ([1, 1], [10, 100], 60, [10, 50]),
        ([2, 1], [100, 100], 60, [40, 20]),
        ([1, 0], [100, 100], 60, [60, 0]),
        ([1, 0], [40, 100], 60, [40, 20]),
        ([0, 0], [100, 100], 60, [30, 30]),
        ([1, 1], [0, 0], 60, [0, 0]),
    ],
)
def test_fair(parts: list[float], most: list[int], total: int, shares: list[int]) -> None:
    assert fair(parts, most, total) == shares


@dataclass(eq=False)
class Reader:
    name: str
    dataset: Inos
    owner: int = 0
    haste: Haste = field(default_factory=Haste)


@dataclass
class Cache:
    """Of files of one byte each."""

    cached: set[int] = field(default_factory=set)
    free_bytes: int = 0
    shares: Shares = field(default_factory=Shares)
    now: float = 0.0

    def review(self, *jobs: Reader) -> bool:
        self.now += 1.0
        return self.shares.review(
            jobs,
            self.now,
            self.free_bytes,
            lambda inos: np.ones(len(inos), np.uint32),
            lambda inos: np.array([ino in self.cached for ino in inos.tolist()], np.bool_),
        )

    def share(self, job: Reader) -> int:
        found = self.shares.figures(job.name)["share_bytes"]
        assert isinstance(found, int)
        return found


def files(first: int, count: int = 1000) -> Inos:
    return np.arange(first, first + count, dtype=np.uint32)


def test_owners_have_equal_shares_and_their_jobs_equal_parts_of_them() -> None:
    jobs = [Reader("a", files(0), 1), Reader("b", files(1000), 1), Reader("c", files(2000), 2)]
    cache = Cache(cached=set(range(900)), free_bytes=300)
    assert cache.review(*jobs)
    assert [cache.share(job) for job in jobs] == [300, 300, 600]
    jobs[2].haste.waits = False
    cache.review(*jobs)
    assert [cache.share(job) for job in jobs] == [600, 600, 0]


def test_only_what_is_over_leaves_while_another_one_is_under() -> None:
    one, other = Reader("a", files(0)), Reader("b", files(1000))
    cache = Cache(cached=set(range(800)))
    assert cache.review(one, other)
    assert cache.shares.are_uneven
    assert cache.shares.are_over(files(990, 20)).tolist() == [True] * 10 + [False] * 10
    assert not cache.shares.are_over(files(5000, 3)).any(), "nobody's"
    assert not cache.review(one, other), "nothing has changed"
    cache.cached = set(range(410)) | set(range(1000, 1390))
    assert cache.review(one, other)
    assert not cache.shares.are_uneven
    assert not cache.shares.are_over(files(0)).any()


def test_files_of_two_datasets_stay_for_the_one_that_is_not_over() -> None:
    """A few in common: they are two still."""
    one, other = Reader("a", files(0)), Reader("b", files(950))
    cache = Cache(cached=set(range(800)))
    cache.review(one, other)
    assert cache.shares.are_over(files(940, 20)).tolist() == [True] * 10 + [False] * 10


def test_jobs_with_files_in_common_are_of_one_dataset() -> None:
    one, other = Reader("a", files(0)), Reader("b", files(500))
    cache = Cache(cached=set(range(800)))
    cache.review(one, other)
    assert not cache.shares.are_several
    assert set(cache.shares.figures("a").values()) == {None}
    third = Reader("c", files(5000))
    cache.review(one, third, other)
    assert cache.shares.are_several
    assert cache.share(one) == cache.share(other)


def test_what_was_left_to_others_comes_back_for_good_when_it_is_missed() -> None:
    slow, fast = Reader("slow", files(0)), Reader("fast", files(1000))
    slow.haste.waits = False
    cache = Cache(cached=set(range(1000, 1800)))
    cache.review(slow, fast)
    assert cache.share(slow) == 0
    slow.haste.waits = True
    cache.review(slow, fast)
    slow.haste.waits = False
    cache.review(slow, fast)
    assert cache.share(slow) == cache.share(fast) == 400


def test_who_waits_with_an_equal_share_was_not_wronged() -> None:
    slow, fast = Reader("slow", files(0)), Reader("fast", files(1000))
    slow.haste.waits = False
    cache = Cache(cached=set(range(400)) | set(range(1000, 1400)))
    cache.review(slow, fast)
    slow.haste.waits = True
    cache.review(slow, fast)
    slow.haste.waits = False
    cache.review(slow, fast)
    assert cache.share(slow) == 0


def test_haste() -> None:
    """Judged after ten seconds, a thousand samples and twenty looks."""
    haste = Haste()
    assert haste.waits, "as far as is known"
    for look in range(26):
        assert haste.waits
        haste.look(look < 2, 40 * look, look / 2)
    assert not haste.waits
    for look in range(26):
        assert not haste.waits
        haste.look(look < 4, 1200 + 40 * look, 15 + look / 2)
    assert haste.waits
