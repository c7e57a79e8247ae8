"""Schemes: what a score is, and how often each sample is to be read by the scores.

| scheme | a score | an epoch |
| --- | --- | --- |
| shade | the rank of the loss in its batch (SHADE, equation 6) | drawn in proportion (PADS) |
| icache | the loss (iCACHE, III-A) | a part of the samples, by percentile^beta (IIS) |
| loss | the loss, smoothed | drawn in proportion, a tenth of it from all alike |

docs/IMPORTANCE.md has the formulas, and what was decided where the papers are silent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from hintsd.sampling.draws import Expected
from hintsd.sampling.formulas import RANK_BIAS, Floats, Mask, percentiles, unseen_first

Losses = npt.NDArray[np.float64]

UNIFORM_SHARE: Final = 0.1
"""Of the draws of `loss`, that go to all samples alike: what once had loss 0 comes again, and no
weight 1/(N p) is above 10."""
SMOOTHING: Final = 0.5
"""Of the score of `loss`, that the loss before has."""


class Scheme(ABC):
    name: ClassVar[str]
    may_repeat: ClassVar[bool]
    """Whether a sample may come more than once an epoch: it is drawn with replacement."""

    @abstractmethod
    def score(self, losses: Losses, before: Losses, batch_size: int) -> Losses:
        """The scores of a batch's samples, from their losses, and from their scores before (NaN:
        none); all of shape (n,), n of a whole batch being `batch_size`. `losses` are finite."""

    @abstractmethod
    def weights(self, scores: Floats, seen: Mask) -> Expected:
        """What the expected reads of each sample are in proportion to; 0 or more, above 0
        somewhere, shape (samples,)."""


class Shade(Scheme):
    """SHADE, 4.2.1."""

    name = "shade"
    may_repeat = True

    def score(self, losses: Losses, before: Losses, batch_size: int) -> Losses:
        """log(b + bias), b being the samples of the batch with a lower loss. Of a shorter batch b
        is scaled up, lest its samples all rank low; a sample that is alone ranks in the middle."""
        lower = np.searchsorted(np.sort(losses), losses, side="left").astype(np.float64)
        others = len(losses) - 1
        if others == 0:
            lower[:] = (batch_size - 1) / 2
        elif len(losses) < batch_size:
            lower *= (batch_size - 1) / others
        found: Losses = np.log(lower + RANK_BIAS)
        return found

    def weights(self, scores: Floats, seen: Mask) -> Expected:
        return unseen_first(scores, seen)


class Icache(Scheme):
    """iCACHE's I/O-oriented importance sampling, III-A, with the losses of Jiang et al. (2019)."""

    name = "icache"
    may_repeat = False

    def __init__(self, fraction: float) -> None:
        self._exponent = 1 / fraction - 1

    def score(self, losses: Losses, before: Losses, batch_size: int) -> Losses:
        return losses

    def weights(self, scores: Floats, seen: Mask) -> Expected:
        """percentile ** (1 / fraction - 1), among those that have a score; the others have 1."""
        if seen.all():
            return percentiles(scores) ** self._exponent
        found = np.ones(len(scores))
        found[seen] = percentiles(scores[seen]) ** self._exponent
        return found


class Loss(Scheme):
    """In proportion to the loss (Katharopoulos and Fleuret; SHADE's section 3.1 trains so)."""

    name = "loss"
    may_repeat = True

    def score(self, losses: Losses, before: Losses, batch_size: int) -> Losses:
        losses = np.maximum(losses, 0)
        return np.where(np.isnan(before), losses, SMOOTHING * before + (1 - SMOOTHING) * losses)

    def weights(self, scores: Floats, seen: Mask) -> Expected:
        found = unseen_first(scores, seen)
        total = float(found.sum())
        if not total > 0:
            return np.ones(len(found))
        found *= (1 - UNIFORM_SHARE) / total
        found += UNIFORM_SHARE / len(found)
        return found


NAMES: Final = ("shade", "icache", "loss")


def scheme_of(name: str, fraction: float) -> Scheme:
    """ValueError: none of them has this name."""
    if name == "icache":
        return Icache(fraction)
    if name == "shade":
        return Shade()
    if name == "loss":
        return Loss()
    raise ValueError(f"scheme must be one of {', '.join(NAMES)}, not {name!r}")
