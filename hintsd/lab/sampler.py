"""Samplers: what a training reads in its next epoch, given the losses of what it has read.

INVARIANT: an importance is kept under the item that earned it: `learn` gets the items of a batch as
they were trained, and their losses in the same order.
INVARIANT: the first epoch is a permutation, so that no item is judged unseen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from fusecache.base.units import format_bytes
from hintsd.lab.images import Images
from hintsd.policies import Policy
from hintsd.policies.catalogue import CATALOGUE
from hintsd.sampling.formulas import (
    REPETITIONS,
    batch_importance,
    icache_selection,
    pads_draw,
    pads_repetitions,
    rank_importance,
)

Items = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]
Losses = npt.NDArray[np.float64]

SELECTED_SHARE: Final = 0.69
"""Of the items, an epoch of iCACHE's: its I/O-oriented sampling saves up to 31.4 % of the reads
(iCACHE, section V-D)."""


class Sampler(ABC):
    name: ClassVar[str]

    def __init__(self, items: int, seed: int) -> None:
        self.items = items
        self.description = self.name
        self.rng = np.random.default_rng(seed)
        self.importance = np.zeros(items, np.float32)
        self.cache: Policy | None = None
        """Sees every access and every importance of the training, where a sampler looks into it."""
        self._begun = False

    def epoch(self) -> Items:
        """The items of the next epoch, in order."""
        if not self._begun:
            self._begun = True
            return self.rng.permutation(self.items)
        return self._epoch()

    @abstractmethod
    def _epoch(self) -> Items: ...

    def learn(self, items: Items, losses: Losses) -> Values:
        """A batch was trained: the importance of each of its items, which the sampler keeps."""
        values = self._score(losses).astype(np.float32)
        self.importance[items] = values
        return values

    @abstractmethod
    def _score(self, losses: Losses) -> Losses: ...

    def judge(self, accuracy: float) -> None:
        """An epoch is over: the accuracy on images that are held out."""
        del accuracy


class Uniform(Sampler):
    """Every item once an epoch. What is learned on the way (ranks, as SHADE) changes nothing."""

    name = "uniform"

    def _epoch(self) -> Items:
        return self.rng.permutation(self.items)

    def _score(self, losses: Losses) -> Losses:
        return rank_importance(losses)


class Coarse(Sampler):
    """Default importance sampling: a batch's mean loss is the score of all its items, and items are
    drawn in proportion to it (SHADE, sections 3.1 and 6.2: its six baselines).
    """

    name = "coarse"

    def _epoch(self) -> Items:
        return pads_draw(self.rng, self.importance, self.items)

    def _score(self, losses: Losses) -> Losses:
        return batch_importance(losses)


class Loss(Sampler):
    """Importance sampling by each item's own loss, drawn in proportion to it (Katharopoulos and
    Fleuret; what SHADE's Figure 12 trains with).
    """

    name = "loss"

    def _epoch(self) -> Items:
        return pads_draw(self.rng, self.importance, self.items)

    def _score(self, losses: Losses) -> Losses:
        return losses


class Repeating(Enum):
    """When SHADE's sampler repeats what is cached, three times within the epoch.

    The paper: while the model gets better, lest it trains on few samples only (PADS, 4.2.1). Its
    authors' code: always.
    """

    LEARNING = "repeating while it learns"
    ALWAYS = "always repeating"


class Shade(Sampler):
    """Ranks within the batch, drawn in proportion (SHADE, equation 6 and PADS).

    With `repeating` it looks into `cache`: the trace depends on that, and stands for its capacity
    only.
    """

    name = "shade"

    def __init__(
        self,
        items: int,
        seed: int,
        *,
        cache: Policy | None = None,
        repeating: Repeating | None = None,
    ) -> None:
        super().__init__(items, seed)
        self.cache = cache
        self._repeating = repeating
        if cache is not None and repeating is not None:
            self.description += (
                f" ({repeating.value}, of a cache of {format_bytes(cache.capacity_bytes)})"
            )
        self._accuracies: list[float] = []

    def _epoch(self) -> Items:
        if self._repeating is None or self.cache is None:
            return pads_draw(self.rng, self.importance, self.items)
        cached = np.fromiter((i in self.cache for i in range(self.items)), np.bool_, self.items)
        always = self._repeating is Repeating.ALWAYS
        repetitions = REPETITIONS if always else pads_repetitions(self._accuracies)
        return pads_draw(
            self.rng, self.importance, self.items, cached=cached, repetitions=repetitions
        )

    def _score(self, losses: Losses) -> Losses:
        return rank_importance(losses)

    def judge(self, accuracy: float) -> None:
        self._accuracies.append(accuracy)


class Icache(Sampler):
    """A share of the items, each at most once an epoch, chosen by its last loss (iCACHE, III-A)."""

    name = "icache"

    def _epoch(self) -> Items:
        return icache_selection(self.rng, self.importance, SELECTED_SHARE)

    def _score(self, losses: Losses) -> Losses:
        return losses


SAMPLERS: Final = {sampler.name: sampler for sampler in (Uniform, Coarse, Loss, Shade, Icache)}


def make(
    name: str,
    images: Images,
    seed: int,
    *,
    repeating: Repeating | None = None,
    cached_bytes: int = 0,
) -> Sampler:
    """A sampler over these images. KeyError: no such one. cached_bytes: of the SHADE cache that
    `repeating` looks into.
    """
    if repeating is None:
        return SAMPLERS[name](len(images), seed)
    cache = CATALOGUE["shade"](cached_bytes, seed=seed)
    return Shade(len(images), seed, cache=cache, repeating=repeating)
