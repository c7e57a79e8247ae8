"""What part of a mount's cache the files of each dataset may have, where several are trained and
it does not take them all (docs/HINTS.md, *Shares of the cache*; pure).

INVARIANT: shares together are the cache, or all that the datasets have.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hintsd.policies import Mask

Inos = npt.NDArray[np.uint32]

REVIEW_S: Final = 1.0
LOOK_MOST: Final = 1 << 16
"""Files of a dataset that are looked at each time; of a larger one every m-th stands for m."""
OVER, UNDER = 1.05, 0.95
"""Of its share: who has more gives to who has less."""
WAITS_SHARE: Final = 0.1
"""A job waits that is behind in more than this share of the times that it is looked at."""
JUDGED_EVERY_S, JUDGED_SAMPLES, JUDGED_LOOKS = 10.0, 1000, 20  # at least, from time to time
_SAMPLE, _SAME_SHARE = 64, 0.1  # of a dataset; so much of it in another one, and they are one


class Haste:
    """Whether its readers wait for bytes."""

    def __init__(self) -> None:
        self.waits = True
        """As far as is known."""
        self._judged = 0.0, 0  # last: when, and how many samples were read then
        self._looks = self._behind = 0  # since

    def look(self, is_behind: bool, samples: int, now: float) -> None:
        """Whether something is missing of what is read next; `samples`: that were read so far."""
        self._looks += 1
        self._behind += is_behind
        at, samples_then = self._judged
        if self._looks == 1:
            self._judged = now, samples
        elif (
            now - at >= JUDGED_EVERY_S
            and samples - samples_then >= JUDGED_SAMPLES
            and self._looks >= JUDGED_LOOKS
        ):
            self.waits = self._behind > WAITS_SHARE * self._looks
            self._looks = self._behind = 0


class Sharer(Protocol):
    """A job, as far as this goes."""

    name: str
    owner: int
    dataset: Inos
    haste: Haste


class _Dataset:
    """Jobs that read the same files."""

    def __init__(self, jobs: list[Sharer]) -> None:
        self.jobs = jobs
        self.inos = max((job.dataset for job in jobs), key=len)
        self._every = -(-len(self.inos) // LOOK_MOST)
        self.sample = self.inos[:: self._every]
        self.size_bytes = self.cached_bytes = self.share_bytes = 0

    def look(self, sizes: npt.NDArray[np.uint32], are_cached: Mask) -> None:
        """`sizes`, `are_cached`: of `sample`."""
        each = sizes.astype(np.int64) * self._every
        self.size_bytes, self.cached_bytes = int(each.sum()), int(each[are_cached].sum())


class Shares:
    """Of one mount's jobs. Found once a second."""

    def __init__(self) -> None:
        self._datasets: list[_Dataset] = []
        self._of: tuple[Sharer, ...] = ()
        self._reviewed_at = -REVIEW_S
        self._over: set[int] = set()  # of the datasets
        self._are_over = np.zeros(0, np.bool_)  # by inode number
        self._gave_in_vain: set[str] = set()  # jobs that waited once others had their share
        self._gives: dict[str, bool] = {}
        self.are_uneven = False
        """Whether a dataset has more than its share and another one less."""

    @property
    def are_several(self) -> bool:
        """Whether there is more than one dataset."""
        return len(self._datasets) > 1

    def review(
        self,
        jobs: Collection[Sharer],
        now: float,
        free_bytes: int,
        sizes_of: Callable[[Inos], npt.NDArray[np.uint32]],
        are_cached: Callable[[Inos], Mask],
    ) -> bool:
        """`jobs`: all that are planned for; `free_bytes`: of the cache. Whether what is to leave
        first has changed.
        """
        if tuple(jobs) == self._of and now - self._reviewed_at < REVIEW_S:
            return False
        if tuple(jobs) != self._of:
            self._of = tuple(jobs)
            self._datasets = [_Dataset(of) for of in _by_dataset(self._of)]
        self._reviewed_at = now
        was = self.are_uneven, self._over, self._datasets
        self.are_uneven, self._over = False, set()
        if self.are_several:
            for dataset in self._datasets:
                dataset.look(sizes_of(dataset.sample), are_cached(dataset.sample))
            self._divide(free_bytes)
        has_changed = was != (self.are_uneven, self._over, self._datasets)
        if has_changed:
            self._mark()
        return has_changed

    def _divide(self, free_bytes: int) -> None:
        datasets = self._datasets
        cache_bytes = max(0, free_bytes) + sum(dataset.cached_bytes for dataset in datasets)
        sizes = [dataset.size_bytes for dataset in datasets]
        equal = fair(self._claims(dict.fromkeys(self._of, 1.0)), sizes, cache_bytes)
        for dataset, bytes_ in zip(datasets, equal, strict=True):
            for job in dataset.jobs:
                gave = self._gives.get(job.name, False)
                if gave and job.haste.waits and dataset.cached_bytes < UNDER * bytes_:
                    self._gave_in_vain.add(job.name)
        waiting = {
            job: float(job.haste.waits or job.name in self._gave_in_vain) for job in self._of
        }
        is_any = any(waiting.values())
        self._gives = {job.name: is_any and not waits for job, waits in waiting.items()}
        shares = fair(self._claims(waiting), sizes, cache_bytes) if is_any else equal
        for dataset, bytes_ in zip(datasets, shares, strict=True):
            dataset.share_bytes = bytes_
        self._over = {
            number for number, of in enumerate(datasets) if of.cached_bytes > OVER * of.share_bytes
        }
        self.are_uneven = bool(self._over) and any(
            of.cached_bytes < UNDER * of.share_bytes for of in datasets
        )

    def _claims(self, weights: dict[Sharer, float]) -> list[float]:
        """Of each dataset: owners claim equal parts, and the jobs of each equal parts of that."""
        jobs_of = Counter(job.owner for job, weight in weights.items() if weight)
        return [
            sum(weights[job] / max(1, jobs_of[job.owner]) for job in dataset.jobs)
            for dataset in self._datasets
        ]

    def _mark(self) -> None:
        count = max((int(of.inos.max(initial=0)) + 1 for of in self._datasets), default=0)
        self._are_over = np.zeros(count if self.are_uneven else 0, np.bool_)
        if self.are_uneven:
            for is_over in (True, False):  # what another dataset has, too, stays
                for number, dataset in enumerate(self._datasets):
                    if (number in self._over) == is_over:
                        for job in dataset.jobs:
                            self._are_over[job.dataset] = is_over

    def are_over(self, inos: Inos) -> Mask:
        """Which of these files are of a dataset that has more than its share, while another one
        has less. Shape (files,).
        """
        is_known = inos < len(self._are_over)
        found: Mask = np.zeros(len(inos), np.bool_)
        found[is_known] = self._are_over[inos[is_known]]
        return found

    def figures(self, name: str) -> dict[str, int | str | None]:
        """Of this job's dataset, for `hintsd status` (docs/WIRE.md). Each is None where there is no
        other one, or it was not looked at yet.
        """
        for dataset in self._datasets if self.are_several else []:
            for job in dataset.jobs:
                if job.name == name:
                    return {
                        "cached_bytes": dataset.cached_bytes,
                        "share_bytes": dataset.share_bytes,
                        "share_why": self._why(job),
                    }
        return dict.fromkeys(("cached_bytes", "share_bytes", "share_why"))

    def _why(self, job: Sharer) -> str:
        if job.name in self._gave_in_vain:
            return "it waited when others had its share"
        if self._gives.get(job.name):
            return "it waits for nothing: others may have its share"
        return "it waits for files" if job.haste.waits else "nobody waits"


def fair(claims: Sequence[float], most: Sequence[int], total: int) -> list[int]:
    """`total` bytes, divided by `claims`; none gets more than its `most`: what that leaves goes to
    the others in the same way. Who claims nothing gets what nobody else takes.
    """
    shares = [0] * len(claims)
    for parts in (claims, [float(not claim) for claim in claims]):
        left = total - sum(shares)
        hungry = {number for number, part in enumerate(parts) if part and most[number]}
        while hungry and left > 0:
            all_parts = sum(parts[number] for number in hungry)
            full = {number for number in hungry if left * parts[number] / all_parts >= most[number]}
            for number in full or hungry:
                share = most[number] if full else int(left * parts[number] / all_parts)
                shares[number] = share
            if not full:
                break
            left -= sum(most[number] for number in full)
            hungry -= full
    return shares


def _by_dataset(jobs: Sequence[Sharer]) -> list[list[Sharer]]:
    """The jobs, by what they read."""
    groups = [[job] for job in jobs]
    for one, other in itertools.combinations(jobs, 2):
        mine = next(group for group in groups if one in group)
        theirs = next(group for group in groups if other in group)
        if mine is not theirs and _are_same(one.dataset, other.dataset):
            mine += theirs
            groups.remove(theirs)
    return groups


def _are_same(one: Inos, other: Inos) -> bool:
    small, large = sorted((one, other), key=len)
    sample = small[:: max(1, len(small) // _SAMPLE)]
    return bool(len(sample) and np.isin(sample, large).mean() > _SAME_SHARE)
