"""Epochs: what is read in one, drawn before it is read.

An epoch follows from seed, number, scores, what is cached, and whether it is shuffled: no generator
goes on from one epoch to the next.

INVARIANT: `draw` gives `reads(number)` indices, each below the number of samples.
INVARIANT: the epochs of the warm-up read every sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hintsd.sampling import draws
from hintsd.sampling.draws import Expected, Order
from hintsd.sampling.formulas import Mask, h_list
from hintsd.sampling.schemes import Losses
from hintsd.sampling.scores import Scores
from hintsd.sampling.settings import Settings

Weights = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Epoch:
    """Of all ranks, or of one. Arrays are of shape (reads,)."""

    number: int
    order: npt.NDArray[Any]
    """Indices, i4 where they fit."""
    weights: Weights | None = None
    """1 / (N p) of each read; None: all are 1."""
    computed: Mask | None = None
    """Which reads are to be computed; None: all."""
    repeats: int = 0
    substituted: int = 0
    is_shuffled: bool = False
    """It goes by no scores: the warm-up's, or a fallback."""
    read: int = 0
    """Reads of `order` that lie behind: it is resumed."""

    def of_rank(self, replicas: int, rank: int) -> Epoch:
        """A rank's reads of it, as a DistributedSampler deals them."""

        def share(array: Any) -> Any:
            return None if array is None else array[rank::replicas]

        return replace(
            self,
            order=share(self.order),
            weights=share(self.weights),
            computed=share(self.computed),
            read=self.read // replicas,
        )


class Drawing:
    """Draws epochs by one sampler's settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._scheme = settings, settings.make_scheme()

    def reads(self, samples: int, number: int) -> int:
        """Of all ranks in this epoch: as many for each."""
        settings = self._settings
        count = samples
        if number >= settings.warm_up and not settings.may_repeat and not settings.compute_only:
            count = max(1, round(settings.fraction * samples))
        return count + -count % settings.num_replicas

    def expected(self, scores: Scores, number: int) -> Expected:
        """Reads of each sample in this epoch, of all ranks, before it is drawn; what is repeated,
        substituted or shuffled is left out. They sum up to at most `reads`."""
        samples = len(scores)
        count = min(self.reads(samples, number), samples)
        if number < self._settings.warm_up or self._settings.compute_only:
            return np.ones(samples)
        if self._settings.may_repeat:
            weights = self._weights(scores)
            return weights * (self.reads(samples, number) / float(weights.sum()))
        return self._once(scores, number, count)

    def draw(
        self, scores: Scores, number: int, *, cached: Mask | None, shuffle: bool, repeat: bool
    ) -> Epoch:
        """`cached`: which samples are, shape (samples,); None: not known. `shuffle`: draw by no
        scores. `repeat`: what is cached may be repeated."""
        settings, samples = self._settings, len(scores)
        rng = np.random.default_rng([settings.seed % (1 << 64), number])
        total = self.reads(samples, number)
        weights: Weights | None = None
        computed: Mask | None = None
        repeats = substituted = 0
        shuffle = shuffle or number < settings.warm_up or not scores.seen.any()
        if shuffle:
            order: Order = rng.permutation(samples)[:total]
        elif settings.compute_only:
            order = rng.permutation(samples)
            expected = self._once(scores, number, max(1, round(settings.fraction * samples)))
            is_chosen = np.zeros(samples, np.bool_)
            is_chosen[draws.at_most_once(rng, expected)] = True
            computed = is_chosen[order]
            if settings.unbiased:
                weights = _unbiased(expected, order)
        else:
            expected = self.expected(scores, number)
            if settings.may_repeat:
                order = draws.with_replacement(rng, expected, total)
            else:
                order = draws.at_most_once(rng, expected)
            if settings.unbiased:
                weights = _unbiased(expected, order)
            if cached is not None and repeat and settings.repeat > 1:
                order, repeats = draws.repeat_cached(rng, order, cached, settings.repeat)
            if cached is not None and settings.substitute == "low":
                order, substituted = draws.substitute_low(
                    rng, order, ~self._high(scores), cached, self._due(scores, number, total)
                )
        if len(order) < total:  # so that all ranks have as many: the first ones once more
            order = np.resize(order, total)
            weights = None if weights is None else np.resize(weights, total)
            computed = None if computed is None else np.resize(computed, total)
        narrow = order.astype(np.int32 if samples <= np.iinfo(np.int32).max else np.int64)
        narrow.flags.writeable = False  # it is given to whoever asks
        return Epoch(number, narrow, weights, computed, repeats, substituted, shuffle)

    def score(self, losses: Losses, before: Losses, batch_size: int) -> Losses:
        """See `Scheme.score`."""
        return self._scheme.score(losses, before, batch_size)

    def h_list(self, scores: Scores) -> npt.NDArray[np.int64]:
        """iCACHE's H-list: of the samples that have a score the `h_share` most important,
        ascending."""
        known = np.flatnonzero(scores.seen)
        return known[h_list(scores.values[known], self._settings.h_share)]

    def h_count(self, scores: Scores) -> int:
        """How many samples that is."""
        return round(self._settings.h_share * int(np.count_nonzero(scores.told)))

    def _weights(self, scores: Scores) -> Expected:
        return self._scheme.weights(scores.values, scores.seen)

    def _once(self, scores: Scores, number: int, count: int) -> Expected:
        """Of samples that come at most once, `count` in all."""
        due = self._due(scores, number, count)
        sure = int(np.count_nonzero(due))
        weights = self._weights(scores)
        if sure == 0:
            return draws.once_in_proportion(weights, count)
        found = due.astype(np.float64)
        found *= min(1.0, count / sure)
        if sure < count:
            found[~due] = draws.once_in_proportion(weights[~due], count - sure)
        return found

    def _due(self, scores: Scores, number: int, count: int) -> Mask:
        """What has no score; and of the others the longest not trained, as many as this epoch has
        to read lest later ones, of `count` reads each, come too late for `coverage`.
        """
        due = ~scores.seen
        most = self._settings.coverage
        if most is None:
            return due
        ages = np.where(due, most, np.clip(number + 1 - scores.told.astype(np.int64), 1, most))
        # within[d]: samples to be read in this epoch or the d after it
        within = np.cumsum(np.bincount(ages, minlength=most + 1)[:0:-1])
        need = min(count, int((within - count * np.arange(most)).max()))
        if need <= 0:
            return due
        last = int(np.searchsorted(within, need))
        due = ages > most - last
        some = np.flatnonzero(ages == most - last)
        rng = np.random.default_rng([self._settings.seed % (1 << 64), number, 1])
        due[rng.permutation(some)[: need - int(np.count_nonzero(due))]] = True
        return due

    def _high(self, scores: Scores) -> Mask:
        """Those of the H-list, and what has no score."""
        high = ~scores.seen
        high[self.h_list(scores)] = True
        return high


def _unbiased(expected: Expected, order: Order) -> Weights:
    """Weights that make the mean of an epoch's losses that of all samples', in the mean."""
    scale = float(expected.sum()) / len(expected)
    return (scale / expected[order]).astype(np.float32)
