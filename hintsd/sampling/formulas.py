"""Which items an epoch reads, from the losses of the epochs before: the papers' formulas.

Pure functions for whoever trains (the laboratory, `hintsd.ImportanceSampler`): `rank_importance`
and `pads_draw` are SHADE's (section 4.2.1), `h_list` and `icache_selection` iCACHE's (section
III-A). An importance is stored under the item
that earned it: values come in the order of `losses`, and it is for the caller to pair them with
the items of the batch that was trained, not with a position in the draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Integers = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[np.float64]
Items = npt.NDArray[np.int64]

RANK_BIAS: Final = 10.0
REPETITIONS: Final = 3.0


def finite(name: str, values: Floats) -> Values:
    """The values in float64. Raises ValueError naming the first that is NaN or infinite."""
    values = np.asarray(values, np.float64)
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(f"{name}[{bad[0]}] must be a finite number, not {values[bad[0]]}")
    return values


def counts(name: str, values: Integers) -> Items:
    """The values in int64, copied. Raises ValueError unless they are whole numbers of 0 or more, of
    shape (n,).
    """
    values = np.asarray(values)
    if values.ndim != 1:
        raise ValueError(f"{name} must be of shape (n,), not {values.shape}")
    if len(values):
        if values.dtype.kind not in "iu":
            raise ValueError(f"{name} must be whole numbers, not {values.dtype}")
        if values.min() < 0:
            raise ValueError(f"{name} must be 0 or more, not {values.min()}")
    return np.array(values, np.int64)


def batch_importance(losses: Floats) -> Values:
    """The mean loss, for every sample of the batch: the coarse score that SHADE's section 6.2
    gives its six baselines (equation 5).
    """
    losses = finite("losses", losses)
    return np.full(len(losses), losses.mean() if len(losses) else 0.0)


def rank_importance(losses: Floats, *, bias: float = RANK_BIAS) -> Values:
    """log(number of samples of the batch with a lower loss + bias) (SHADE, equation 6).

    Equal losses get equal values. The paper names no bias; its authors' code has 10, which keeps
    the hardest of a batch of 64 at less than twice the easiest. Raises ValueError for a loss
    that is not finite or a bias under 1 (values would be negative, and they are weights).
    """
    if not bias >= 1:
        raise ValueError(f"bias must be 1 or more, not {bias}")
    losses = finite("losses", losses)
    ranks: Values = np.log(np.searchsorted(np.sort(losses), losses, side="left") + bias)
    return ranks


def unseen_first(importance: Floats, seen: Mask) -> Values:
    """Importance with every item that was not trained yet raised to the highest of the others:
    nothing is known of it, so it is not less worth reading than what is.

    seen: shape (items,). Before anything was trained all are 1.
    """
    importance = finite("importance", importance)
    highest = importance[seen].max() if seen.any() else 1.0
    return np.where(seen, importance, highest)


def pads_repetitions(scores: Sequence[float], most: float = REPETITIONS) -> float:
    """How often PADS repeats what is cached in the next epoch: `most` while the model gets
    better, else once, lest it trains on few samples only (SHADE, 4.2.1).

    scores: the accuracy after each epoch so far. The paper gives no rule for "stagnant"; this is
    its authors': the last one is above the one before.
    """
    return most if len(scores) > 1 and scores[-1] > scores[-2] else 1.0


def pads_draw(
    rng: np.random.Generator,
    importance: Floats,
    count: int,
    *,
    draws: int | None = None,
    cached: Mask | None = None,
    repetitions: float = REPETITIONS,
) -> Items:
    """The items of an epoch in the order they are read, shape (count,) (SHADE's PADS, 4.2.1).

    A multinomial draw of `draws` items (`count` if None) with replacement, in proportion to
    importance. Of more than `count` those drawn most often stay, among equals the more
    important: a process of a distributed job takes its part so. With `cached`, shape (items,),
    the drawn ones that are cached come first, `repetitions` times each (half of them once more
    for 2.5), and of the others as many as there is room for; both parts are shuffled. Which
    samples are repeated, and how often, the paper leaves open: this is as its authors' code does.
    Without `cached` the draw is only shuffled.

    Raises ValueError for importance that is not finite, is negative or is 0 everywhere.
    """
    if not repetitions >= 1:
        raise ValueError(f"repetitions must be 1 or more, not {repetitions}")
    draws = count if draws is None else draws
    if draws < count:
        raise ValueError(f"draws must be {count} (count) or more, not {draws}")
    importance = finite("importance", importance)
    if len(importance) and importance.min() < 0:
        raise ValueError(f"importance must be 0 or more, not {importance.min()}")
    total = float(importance.sum())
    if total <= 0:
        raise ValueError("importance must be above 0 somewhere")
    drawn = rng.choice(len(importance), draws, p=importance / total)
    if draws > count:
        times = np.bincount(drawn, minlength=len(importance))
        drawn = drawn[np.lexsort((drawn, -importance[drawn], -times[drawn]))][:count]
    if cached is None:
        return rng.permutation(drawn)
    hits, misses = drawn[cached[drawn]], drawn[~cached[drawn]]
    whole = int(repetitions)
    part = hits[: int((repetitions - whole) * len(hits))]
    repeated = np.concatenate((np.tile(hits, whole), part))
    return np.concatenate((rng.permutation(repeated), rng.permutation(misses)))[:count]


def percentiles(importance: Floats) -> Values:
    """The share of items below each one, equal ones counted half: in (0, 1), mean 1/2.

    One sort: 14,000,000 items take some seconds. Raises nothing; NaN comes last.
    """
    order = np.argsort(importance)
    ordered = importance[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    ends = np.append(starts[1:], len(ordered))
    found = np.empty(len(ordered))
    found[order] = np.repeat((starts + ends) / max(1, 2 * len(ordered)), ends - starts)
    return found


def icache_selection(rng: np.random.Generator, importance: Floats, fraction: float) -> Items:
    """The items that an epoch reads, each once, in random order (iCACHE's IIS, III-A).

    An item is selected with probability percentile ** (1 / fraction - 1), the percentile being
    that of its importance among all: selective backpropagation (Jiang et al. 2019), which iCACHE
    takes its losses from, with the exponent that selects `fraction` of the items on average. Their
    code has exponent 0.33, a fraction of 0.75. Items of equal importance share their mean rank.

    Raises ValueError for importance that is not finite or a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, not {fraction}")
    percentile = percentiles(finite("importance", importance))
    selected = np.flatnonzero(rng.random(len(importance)) < percentile ** (1 / fraction - 1))
    return rng.permutation(selected)


def h_list(importance: Floats, share: float) -> Items:
    """The `share` most important items, ascending: iCACHE's H-list (III-A); the rest are its
    L-samples. Among equals the smaller item. The paper gives no share; its authors' code has 0.7.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be 0 to 1, not {share}")
    importance = finite("importance", importance)
    count = round(share * len(importance))
    return np.sort(np.argsort(-importance, kind="stable")[:count])
