"""Draws of a whole epoch: with replacement in proportion to weights, or each at most once.

Both take expected reads, and keep to them exactly in the mean. The laboratory's draws
(formulas.py) are the papers' own, simple and slow; these take 14,000,000 samples in seconds.

INVARIANT: the same generator state and arguments give the same draw.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hintsd.sampling.formulas import Floats, Mask

Order = npt.NDArray[np.int64]
Expected = npt.NDArray[np.float64]


def with_replacement(rng: np.random.Generator, expected: Floats, count: int) -> Order:
    """`count` draws in proportion to `expected`, in random order, shape (count,).

    A multinomial draw: sorted uniform numbers (sums of exponential ones) are merged with the sums
    of `expected`, one pass over both, and the draw is shuffled. expected: 0 or more, above 0
    somewhere, of shape (samples,); what has 0 is never drawn.
    """
    ends = np.cumsum(expected, dtype=np.float64)
    places = np.cumsum(rng.standard_exponential(count + 1))
    places *= ends[-1] / places[-1]
    # a place that is rounded up to the very end belongs to the last that has anything
    drawn: Order = np.searchsorted(ends, places[:-1], side="right")
    drawn = np.minimum(drawn, int(np.searchsorted(ends, ends[-1], side="left")))
    rng.shuffle(drawn)
    return drawn


def at_most_once(rng: np.random.Generator, expected: Floats) -> Order:
    """Distinct samples in random order; sample i is among them with probability expected[i].

    As many as `expected` sums up to, rounded: systematic sampling over a random order. Both
    papers' independent choices would differ in number from epoch to epoch. expected: 0 to 1, of
    shape (samples,).
    """
    order = rng.permutation(len(expected))
    ends = np.cumsum(expected[order], dtype=np.float64)
    count = round(float(ends[-1])) if len(ends) else 0
    if count == 0:
        return order[:0]
    turns = np.arange(count)
    picked = np.searchsorted(ends, (rng.random() + turns) * (ends[-1] / count), side="right")
    # A sum is rounded, so that a sample of probability 1 could be met twice, and another never.
    picked = np.maximum.accumulate(picked - turns)
    found: Order = order[np.minimum(picked, len(order) - count) + turns]
    return found


def once_in_proportion(weights: Floats, count: int) -> Expected:
    """Probabilities in proportion to `weights`, with sum `count`: none above 1, what would be above
    is 1 and leaves the more to the others. weights: 0 or more, shape (samples,).

    Where only weights of 0 are left, these share what is left equally.
    """
    weights = np.asarray(weights, np.float64)
    if count >= len(weights):
        return np.ones(len(weights))
    found = np.zeros(len(weights))
    is_free = np.ones(len(weights), np.bool_)
    left = count
    while left > 0:
        total = float(weights[is_free].sum())
        if not total > 0:
            found[is_free] = left / np.count_nonzero(is_free)
            break
        scaled = weights * (left / total)
        is_full = is_free & (scaled >= 1)
        if not is_full.any():
            found[is_free] = scaled[is_free]
            break
        found[is_full] = 1
        is_free &= ~is_full
        left = count - (len(weights) - int(np.count_nonzero(is_free)))
    return found


def repeat_cached(
    rng: np.random.Generator, drawn: Order, cached: Mask, repetitions: float
) -> tuple[Order, int]:
    """A draw of which what is cached is read `repetitions` times, in place of what is not; of the
    same length, in random order. And how many of its reads are repeats: at most a half.

    SHADE's PADS with repetition (4.2.1), which its authors' code puts first in the epoch, and does
    not bound. drawn: shape (reads,). cached: shape (samples,).
    """
    is_hit = cached[drawn]
    hits, misses = drawn[is_hit], drawn[~is_hit]
    extra = min(int((repetitions - 1) * len(hits)), len(drawn) // 2, len(misses))
    repeats = np.resize(rng.permutation(hits), extra)
    read = np.concatenate((hits, repeats, rng.permutation(misses)[: len(misses) - extra]))
    rng.shuffle(read)
    return read, extra


def substitute_low(
    rng: np.random.Generator, chosen: Order, is_low: Mask, cached: Mask, must: Mask
) -> tuple[Order, int]:
    """A selection of which low samples that are not cached make way for such as are, and are not in
    it yet, as long as there are any; the places stay. And how many did.

    iCACHE's substitutability (III-C), before anything is opened; what comes may be high, too, for a
    cache that keeps what is used soonest has few that are low. All masks are of shape (samples,);
    what `must` marks is never replaced.
    """
    leaving = np.flatnonzero((is_low & ~cached & ~must)[chosen])
    is_chosen = np.zeros(len(cached), np.bool_)
    is_chosen[chosen] = True
    coming = np.flatnonzero(cached & ~is_chosen)
    count = min(len(leaving), len(coming))
    read = chosen.copy()
    read[rng.permutation(leaving)[:count]] = rng.permutation(coming)[:count]
    return read, count
