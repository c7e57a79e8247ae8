"""What part of a mount's cache the files of each dataset may have, where several are trained and
it does not take them all (docs/HINTS.md, *Shares of the cache*; pure).

INVARIANT: shares together are no more than the cache, if datasets have no files in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from hintsd.follow.sequence import Inos
from hintsd.keeping.shared_files import OVERLAP_SAMPLES, OVERLAP_SHARE
from hintsd.policies import Mask

REVIEW_S: Final = 1.0
LOOK_MOST: Final = 1 << 16
"""Files of a dataset that are looked at each time; of a larger one every m-th stands for m."""
OVER, UNDER = 1.05, 0.95
"""Of its share: who has more gives to who has less."""
WAITS_SHARE: Final = 0.1
"""A job waits that is behind in more than this share of the times that it is looked at."""
JUDGED_EVERY_S, JUDGED_SAMPLES, JUDGED_LOOKS = 10.0, 1000, 20  # at least, from time to time


class Need:
    """What a job gains by what stays from epoch to epoch: something, or nothing."""

    def __init__(self) -> None:
        self.waits = True
        """Whether its readers wait for bytes, as far as is known."""
        self.nothing_why = ""
        """Why it gains nothing, whether it waits or not; else empty."""
        self._was_behind = True
        self._begin_again()

    def _begin_again(self) -> None:
        self._judged = 0.0, 0  # when, and how many samples were read then
        self._looked_at = 0.0
        self._looks = self._behind = 0  # since it was judged

    def look(self, is_behind: bool, samples: int, now: float) -> None:
        """While it is read: whether something is missing of what is read next. `samples`: that were
        read so far.
        """
        if now - self._looked_at > JUDGED_EVERY_S:  # what was seen before says nothing of now
            self._begin_again()
        self._looked_at = now
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
            was_behind = self._was_behind
            self._was_behind = self._behind > WAITS_SHARE * self._looks
            # one that did not wait does so when it is behind twice: the origin may have been away
            self.waits = self._was_behind and (self.waits or was_behind)
            self._begin_again()
            self._looked_at = now

    def gain_nothing(self, why: str) -> None:
        self.nothing_why = why


class Sharer(Protocol):
    """A job, as far as this goes."""

    name: str
    owner: int
    dataset: Inos
    need: Need


class _Dataset:
    """Jobs that read the same files."""

    def __init__(self, jobs: list[Sharer]) -> None:
        self.jobs = jobs
        self.inos = np.flatnonzero(_contained([job.dataset for job in jobs])).astype(np.uint32)
        self._every = max(1, -(-len(self.inos) // LOOK_MOST))
        self.sample = self.inos[:: self._every]
        self.size_bytes = self.cached_bytes = self.share_bytes = 0

    def look(self, sizes: npt.NDArray[np.uint32], are_cached: Mask) -> None:
        """`sizes`, `are_cached`: of `sample`."""
        each = sizes.astype(np.int64) * self._every
        self.size_bytes, self.cached_bytes = int(each.sum()), int(each[are_cached].sum())

    def has_less_than(self, share_bytes: int) -> bool:
        return self.cached_bytes < UNDER * share_bytes


class Shares:
    """What each dataset of one mount's jobs may have. Found once a second."""

    def __init__(self) -> None:
        self._jobs: tuple[Sharer, ...] = ()
        self._datasets: list[_Dataset] = []
        self._reviewed_at = -REVIEW_S
        self._over: set[int] = set()  # of the datasets
        self._are_over = np.zeros(0, np.bool_)  # by inode number
        self._were_content: set[str] = set()  # jobs that did not wait once
        self._were_wronged: set[str] = set()  # and did, with less than an equal share
        self.are_uneven = False
        """Whether a dataset has more than its share, and another one less."""

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
        """`jobs`: all that have shares; `free_bytes`: of the cache. Whether what is to leave first
        has changed.
        """
        is_new = tuple(jobs) != self._jobs
        if not is_new and now - self._reviewed_at < REVIEW_S:
            return False
        if is_new:
            self._jobs = tuple(jobs)
            self._datasets = [_Dataset(group) for group in _by_dataset(self._jobs)]
        self._reviewed_at = now
        was = self.are_uneven, self._over
        self.are_uneven, self._over = False, set()
        if self.are_several:
            for dataset in self._datasets:
                dataset.look(sizes_of(dataset.sample), are_cached(dataset.sample))
            self._divide(free_bytes)
        has_changed = is_new or was != (self.are_uneven, self._over)
        if has_changed:
            self._mark()
        return has_changed

    def _divide(self, free_bytes: int) -> None:
        datasets = self._datasets
        cache_bytes = max(0, free_bytes) + sum(dataset.cached_bytes for dataset in datasets)
        sizes = [dataset.size_bytes for dataset in datasets]
        equal = fair(self._claims(self._jobs), sizes, cache_bytes)
        for dataset, share_bytes in zip(datasets, equal, strict=True):
            dataset.share_bytes = share_bytes
            self._note(dataset)
        claiming = [job for job in self._jobs if self._claims_share(job)]
        if not claiming:  # nobody would gain by what is moved
            return
        claims = self._claims(claiming)
        is_under = False
        for number, share_bytes in enumerate(fair(claims, sizes, cache_bytes)):
            dataset = datasets[number]
            dataset.share_bytes = share_bytes
            if dataset.cached_bytes > OVER * share_bytes:
                self._over.add(number)
            is_under |= claims[number] > 0 and dataset.has_less_than(share_bytes)
        self.are_uneven = bool(self._over) and is_under

    def _note(self, dataset: _Dataset) -> None:
        """Who waits for nothing, and who waits for want of an equal share."""
        for job in dataset.jobs:
            if not job.need.waits:
                self._were_content.add(job.name)
            elif job.name in self._were_content and dataset.has_less_than(dataset.share_bytes):
                self._were_wronged.add(job.name)

    def _claims_share(self, job: Sharer) -> bool:
        return not job.need.nothing_why and (job.need.waits or job.name in self._were_wronged)

    def _claims(self, jobs: Collection[Sharer]) -> list[float]:
        """Of each dataset: owners claim equal parts, and for each of their datasets equal parts of
        that.
        """
        owners = [{job.owner for job in dataset.jobs if job in jobs} for dataset in self._datasets]
        counts = Counter(owner for of_one in owners for owner in of_one)
        return [sum(1 / counts[owner] for owner in of_one) for of_one in owners]

    def _mark(self) -> None:
        """Files that a dataset which is not over has, too, stay."""
        over = [dataset for number, dataset in enumerate(self._datasets) if number in self._over]
        others = [dataset for dataset in self._datasets if dataset not in over]
        count = max((int(of.inos.max(initial=0)) + 1 for of in self._datasets), default=0)
        self._are_over = np.zeros(count if self.are_uneven else 0, np.bool_)
        if self.are_uneven:
            for dataset in over:
                self._are_over[dataset.inos] = True
            for dataset in others:
                self._are_over[dataset.inos] = False

    def are_over(self, inos: Inos) -> Mask:
        """Which of these files are of a dataset that has more than its share, while another one
        has less. Shape (files,).
        """
        found: Mask = np.zeros(len(inos), np.bool_)
        is_known = inos < len(self._are_over)
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
        if job.need.nothing_why:
            return job.need.nothing_why
        if job.name in self._were_wronged:
            return "it waited when others had its share"
        if job.need.waits:
            return "it waits for files"
        others_wait = any(map(self._claims_share, self._jobs))
        return "it waits for nothing" + (": others may have its share" if others_wait else "")


def fair(claims: Sequence[float], most: Sequence[int], total: int) -> list[int]:
    """`total` bytes, divided by `claims`; none gets more than its `most`: what that leaves goes to
    the others in the same way. Who claims nothing gets what nobody else takes.
    """
    shares = [0] * len(claims)
    for parts in (claims, [float(not claim) for claim in claims]):
        left = total - sum(shares)
        hungry = {number for number, part in enumerate(parts) if part and most[number]}
        while hungry and left > 0:
            a_part = left / sum(parts[number] for number in hungry)
            full = {number for number in hungry if a_part * parts[number] >= most[number]}
            for number in full or hungry:
                shares[number] = most[number] if full else int(a_part * parts[number])
            left -= sum(most[number] for number in full)
            hungry = hungry - full if full else set()
    return shares


def _by_dataset(jobs: Sequence[Sharer]) -> list[list[Sharer]]:
    """The jobs, by what they read."""
    groups: list[list[Sharer]] = []
    for job in jobs:
        is_in = _contained([job.dataset])
        same = [group for group in groups if any(_are_same(is_in, job, one) for one in group)]
        groups = [group for group in groups if group not in same]
        groups.append([job, *(one for group in same for one in group)])
    return groups


def _are_same(is_in: Mask, job: Sharer, other: Sharer) -> bool:
    """`is_in`: of each inode number, whether `job` has it."""
    if len(job.dataset) < len(other.dataset):  # of the smaller one
        is_in, job, other = _contained([other.dataset]), other, job
    sample = other.dataset[other.dataset != 0]
    sample = sample[:: max(1, len(sample) // OVERLAP_SAMPLES)]
    found = is_in[sample[sample < len(is_in)]]
    return bool(len(sample) and np.count_nonzero(found) > OVERLAP_SHARE * len(sample))


def _contained(datasets: Sequence[Inos]) -> Mask:
    """Of each inode number: whether any of these has it. 0: is in none."""
    most = max(int(inos.max(initial=0)) for inos in datasets)
    found: Mask = np.zeros(most + 1, np.bool_)
    for inos in datasets:
        found[inos] = True
    found[0] = False
    return found
