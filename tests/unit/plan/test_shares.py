"""Shares of a cache: who has how much, and who is over its share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hintsd.follow.sequence import Inos
from hintsd.keeping.shares import Need, Shares, fair

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
    need: Need = field(default_factory=Need)


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


def test_owners_have_equal_shares_and_their_datasets_equal_parts_of_them() -> None:
    jobs = [Reader("a", files(1), 1), Reader("b", files(1001), 1), Reader("c", files(2001), 2)]
    ranks = [Reader(f"rank{rank}", files(1001), 1) for rank in range(3)]
    cache = Cache(cached=set(range(1, 901)), free_bytes=300)
    assert cache.review(*jobs, *ranks)
    assert [cache.share(job) for job in jobs] == [300, 300, 600]
    jobs[2].need.waits = False
    cache.review(*jobs, *ranks)
    assert [cache.share(job) for job in jobs] == [600, 600, 0]


def test_only_what_is_over_leaves_while_another_one_is_under() -> None:
    one, other = Reader("a", files(1)), Reader("b", files(1001))
    cache = Cache(cached=set(range(1, 801)))
    assert cache.review(one, other)
    assert cache.shares.are_uneven
    assert cache.shares.are_over(files(991, 20)).tolist() == [True] * 10 + [False] * 10
    assert not cache.shares.are_over(files(5000, 3)).any(), "nobody's"
    assert not cache.review(one, other), "nothing has changed"
    cache.cached = set(range(1, 411)) | set(range(1001, 1391))
    assert cache.review(one, other)
    assert not cache.shares.are_uneven
    assert not cache.shares.are_over(files(1)).any()


def test_of_a_large_dataset_some_files_stand_for_all() -> None:
    large, small = Reader("a", files(1, 300_000)), Reader("b", files(300_001, 50_000))
    cache = Cache(cached=set(range(1, 100_001)))
    cache.review(large, small)
    assert cache.share(small) == 50_000
    assert cache.share(large) == pytest.approx(50_000, rel=0.01)
    assert cache.shares.figures("a")["cached_bytes"] == pytest.approx(100_000, rel=0.01)
    assert cache.shares.are_over(files(1, 300_000)).all()


def test_files_of_two_datasets_stay_for_the_one_that_is_not_over() -> None:
    """A few in common: they are two still."""
    one, other = Reader("a", files(1)), Reader("b", files(951))
    cache = Cache(cached=set(range(1, 801)))
    cache.review(one, other)
    assert cache.shares.are_over(files(941, 20)).tolist() == [True] * 10 + [False] * 10


def test_jobs_with_files_in_common_are_of_one_dataset() -> None:
    one, other = Reader("a", files(1)), Reader("b", files(501))
    cache = Cache(cached=set(range(1, 1401)))
    cache.review(one, other)
    assert not cache.shares.are_several
    assert set(cache.shares.figures("a").values()) == {None}
    third = Reader("c", files(5000))
    cache.review(one, third, other)
    assert cache.shares.are_several
    assert cache.share(one) == cache.share(other)
    assert cache.shares.figures("a")["cached_bytes"] == 1400, "of both their files, each once"
    assert cache.shares.are_over(files(1, 1500)).all()


def test_samples_outside_of_the_mount_are_nobodys() -> None:
    outside = np.zeros(500, np.uint32)
    one = Reader("a", np.concatenate([outside, files(1)]))
    other = Reader("b", np.concatenate([outside, files(1001)]))
    cache = Cache(cached=set(range(1, 801)))
    cache.review(one, other)
    assert cache.shares.are_several
    assert not cache.shares.are_over(outside).any()


def gave_its_share() -> tuple[Reader, Reader, Cache]:
    """A job that waits for nothing, and one that has its share."""
    slow, fast = Reader("slow", files(1)), Reader("fast", files(1001))
    slow.need.waits = False
    cache = Cache(cached=set(range(1001, 1801)))
    cache.review(slow, fast)
    assert cache.share(slow) == 0
    return slow, fast, cache


def test_what_was_left_to_others_comes_back_for_good_when_it_is_missed() -> None:
    slow, fast, cache = gave_its_share()
    slow.need.waits = True
    cache.review(slow, fast)
    slow.need.waits = False
    cache.review(slow, fast)
    assert cache.share(slow) == cache.share(fast) == 400


def test_where_nobody_waits_nothing_moves() -> None:
    """Nor back: who has all of it would wait without."""
    slow, fast, cache = gave_its_share()
    fast.need.waits = False
    cache.review(slow, fast)
    assert not cache.shares.are_uneven
    slow.need.waits = True  # but not for ever
    cache.review(slow, fast)
    assert cache.shares.are_uneven
    fast.need.waits = True
    cache.cached = set(range(1, 801))
    cache.review(slow, fast)
    assert cache.share(slow) == cache.share(fast) == 400


def test_who_waits_with_an_equal_share_was_not_wronged() -> None:
    slow, fast = Reader("slow", files(1)), Reader("fast", files(1001))
    slow.need.waits = False
    cache = Cache(cached=set(range(1, 401)) | set(range(1001, 1401)))
    cache.review(slow, fast)
    slow.need.waits = True
    cache.review(slow, fast)
    slow.need.waits = False
    cache.review(slow, fast)
    assert cache.share(slow) == 0


def test_who_gains_nothing_has_no_share_that_others_want() -> None:
    once, often = Reader("once", files(1)), Reader("often", files(1001))
    cache = Cache(cached=set(range(1, 401)) | set(range(1001, 1401)))
    cache.review(once, often)
    assert cache.share(once) == cache.share(often) == 400
    once.need.gain_nothing("it reads one epoch")
    cache.review(once, often)
    assert (cache.share(once), cache.share(often)) == (0, 800)
    assert cache.shares.figures("once")["share_why"] == "it reads one epoch"


def test_nothing_moves_for_who_gains_nothing() -> None:
    """What nobody needs is theirs: it is not moved from one to another."""
    jobs = [Reader("x", files(1)), Reader("y", files(1001)), Reader("z", files(2001, 100))]
    jobs[0].need.waits = jobs[1].need.waits = False
    cache = Cache(cached=set(range(1, 801)) | set(range(2001, 2101)))
    cache.review(*jobs)
    assert not cache.shares.are_uneven


def judge(need: Need, looks: int, behind: int, at: float = 0.0) -> None:
    """By so many looks, half a second and forty samples apart."""
    for look in range(looks):
        need.look(look < behind, int(80 * at) + 40 * look, at + look / 2)


def test_a_job_is_judged_after_ten_seconds_and_a_thousand_samples() -> None:
    need = Need()
    assert need.waits, "as far as is known"
    judge(need, 25, 2)
    assert need.waits
    judge(need, 25, 2, at=60)  # what was seen long ago does not count
    assert need.waits
    judge(need, 26, 2, at=120)
    assert not need.waits


def test_who_did_not_wait_does_when_it_is_behind_twice() -> None:
    need = Need()
    judge(need, 26, 0)
    judge(need, 26, 26, at=100)
    assert not need.waits
    judge(need, 26, 0, at=200)
    judge(need, 26, 3, at=300)
    assert not need.waits
    judge(need, 26, 3, at=400)
    assert need.waits
    judge(need, 26, 2, at=500)
    assert not need.waits
