"""SubstitutableSampler: each sample exactly once an epoch, what is cached a little earlier.

    sampler = hintsd.SubstitutableSampler(dataset, batch_size=256, seed=0)
    loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4)
    job = hintsd.attach(loader)

Quiver's substitutable hits (FAST '20, 4.7): any order of an epoch is as good as another, so a batch
takes, out of the next ten, what is cached, while the rest is being fetched. docs/IMPORTANCE.md says
what that is worth, and what it is not.

INVARIANT: those of `once`; what decides is what is cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from hintsd.client.importance.once import OnceSampler
from hintsd.client.importance.shared import mask_of
from hintsd.sampling.arranging import Arrangement, permutation
from hintsd.sampling.formulas import Mask
from hintsd.sampling.settings import whole

LOOKS_MOST: Final = 64  # an epoch is arranged, and its order told, so often: it costs O(samples)
BATCHES_FIXED: Final = 2  # decided before they are drawn, so that hintsd knows them in time
LATE_S: Final = 0.25  # behind an answer that does not come in this time ...
SKIPPED: Final = 8  # ... so many questions are not asked


class SubstitutableSampler(OnceSampler):
    """Gives out the indices of an epoch: a permutation, in which what is cached comes earlier."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        look_ahead: int = 10,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """`dataset`: what the loader reads, or its length. `batch_size`: the loader's, in samples.

        `look_ahead`: batches out of which one is filled; each sample is read less than so many
        batches from its place in the permutation. 0: the permutation as it is.
        `num_replicas`, `rank`: of a distributed training; None: torch.distributed's, if it is
        initialised by now. A rank has its share of each epoch, as a DistributedSampler deals it
        (where the samples cannot be dealt evenly, a few come to two ranks).

        9 bytes a sample, twice where one epoch is read and the next is asked for.
        ValueError: an argument, which the line begins with.
        """
        super().__init__(dataset, batch_size, seed, num_replicas, rank)
        whole("look_ahead", look_ahead, 0)
        self._look_ahead = look_ahead
        self._cached: Callable[[], Any] | None = None
        self._is_offer = False  # it is not the user's
        self._skipped = 0  # questions that are not asked, for an answer did not come

    def set_cached(self, cached: Callable[[], Any], *, is_offer: bool = False) -> None:
        """`cached()` tells which samples are cached now, a mask of shape (samples,) or indices, or
        None; it is called up to 64 times an epoch. `is_offer`: attach's, which is asked where no
        other was set."""
        if not is_offer or self._cached is None or self._is_offer:
            self._cached, self._is_offer = cached, is_offer

    # ---- what OnceSampler asks -------------------------------------------------------------------

    def _order(self, number: int) -> Arrangement:
        self._skipped = 0
        order = permutation(self._samples, self._seed, number, self._replicas, self._rank)
        return Arrangement(order, self._batch_size, self._look_ahead)

    def _ahead(self) -> int:
        return BATCHES_FIXED * self._batch_size

    def _decide(self, order: Arrangement, reads: int) -> bool:
        """By what is cached now."""
        batches = -(-len(order) // (self._batch_size * LOOKS_MOST))
        cached: Mask | None = None
        if self._cached is not None and self._look_ahead > 0:
            cached = self._ask(self._cached)
        return order.arrange(max(BATCHES_FIXED, batches), cached)

    def _ask(self, cached: Callable[[], Any]) -> Mask | None:
        """What is cached now; None: it is not known."""
        if self._skipped:
            self._skipped -= 1
            return None
        begun_s = time.monotonic()
        found = mask_of(cached, self._samples, self._say)
        if found is None and time.monotonic() - begun_s > LATE_S:
            self._skipped = SKIPPED
        return found

    def _settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            {"samples": self._samples, "seed": self._seed, "replicas": self._replicas},
            {
                "batch_size": self._batch_size,
                "look_ahead": self._look_ahead,
                "rank": self._rank,
            },
        )

    def _place(self, order: Arrangement | None, read: int) -> dict[str, Any]:
        first, beyond = (0, list[int]()) if order is None else order.state(read)
        return {"first": first, "beyond": beyond}

    def _resumed(self, number: int, told: Mapping[str, Any]) -> tuple[Arrangement, int]:
        order = self._order(number)
        order.resume(int(told["first"]), [int(place) for place in told["beyond"]])
        return order, order.arranged
