"""Arranging: a permutation, read so that what is cached comes a little earlier (Quiver, FAST '20,
4.7: substitutable hits).

A *place* is where a sample stands in the permutation. A batch looks at the next `reach` places from
the first one that is not taken yet, and takes what is cached there first, the rest in turn. What it
skips is taken at the latest when nothing else is left there.

INVARIANT: each place is taken exactly once; all before `_first` are taken, none from `_first` +
`reach` on. So a read lies less than `reach` from its place, whatever is cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hintsd.sampling.draws import Order
from hintsd.sampling.formulas import Mask

Places = npt.NDArray[np.int64]


def permutation(samples: int, seed: int, number: int, replicas: int, rank: int) -> Order:
    """What a rank reads of an epoch, as a DistributedSampler deals it: all ranks have equally many,
    so where `samples` is no multiple of `replicas` the permutation's first ones come again."""
    order: Order = np.random.default_rng([seed % (1 << 64), number]).permutation(samples)
    order = np.resize(order, samples + -samples % replicas)[rank::replicas]
    return order.astype(np.int32 if samples <= np.iinfo(np.int32).max else np.int64)


class Arrangement:
    """One epoch of one rank: its permutation, and how far it is arranged to be read."""

    def __init__(self, order: npt.NDArray[Any], batch_size: int, look_ahead: int) -> None:
        """`look_ahead`: in batches; 0: the permutation itself."""
        self._order, self._batch_size = order, batch_size
        self._reach = min(batch_size * max(1, look_ahead), len(order))
        self._looks = look_ahead > 0
        self._is_taken = np.zeros(len(order), np.bool_)
        self._places = np.empty(
            len(order), order.dtype
        )  # of each read, as far as they are arranged
        self._first = 0
        self.arranged = 0
        """Reads that are decided."""

    def __len__(self) -> int:
        return len(self._order)

    def arrange(self, batches: int, cached: Mask | None) -> bool:
        """Decide what the next batches are, by what is cached now. Whether that changes `reads`."""
        begin, before = self.arranged, np.flatnonzero(~self._is_taken[self._first :]) + self._first
        for _ in range(batches):
            left = min(self._batch_size, len(self._order) - self.arranged)
            while left > 0:
                chosen = self._choose(left, cached)
                self._take(chosen)
                left -= len(chosen)
        decided = self._places[begin : self.arranged]
        return not np.array_equal(decided, before[: len(decided)])

    def _choose(self, most: int, cached: Mask | None) -> Places:
        """At least one place, at most so many."""
        end = self._first + self._reach
        free: Places = np.flatnonzero(~self._is_taken[self._first : end]) + self._first
        if cached is not None and self._looks:
            is_cached = cached[self._order[free]]
            free = np.concatenate([free[is_cached], free[~is_cached]])
        chosen: Places = free[:most]
        return chosen

    def _take(self, places: Places) -> None:
        self._is_taken[places] = True
        self._places[self.arranged : self.arranged + len(places)] = places
        self.arranged += len(places)
        end = self._first + self._reach + 1  # none beyond is taken
        still_free = ~self._is_taken[self._first : end]
        self._first += int(still_free.argmax()) if still_free.any() else len(still_free)

    def reads(self, start: int = 0) -> npt.NDArray[Any]:
        """The samples in the order in which they are read from `start` on: what is not decided yet
        as the permutation has it. Shape (len - start,)."""
        rest = np.flatnonzero(~self._is_taken[self._first :]) + self._first
        found: npt.NDArray[Any] = self._order[
            np.concatenate([self._places[start : self.arranged], rest])
        ]
        return found

    def decided(self, start: int, most: int) -> npt.NDArray[Any]:
        """The samples of at most so many decided reads, from `start` on."""
        return self._order[self._places[start : min(start + most, self.arranged)]]

    def state(self, read: int) -> tuple[int, list[int]]:
        """Of the first `read` reads: the places before which all are read, and those beyond."""
        base, end = max(0, read - self._reach), min(read + self._reach, len(self._order))
        recent = self._places[max(0, base - self._reach) : read]  # the others lie before `base`
        is_read = np.zeros(end - base + 1, np.bool_)
        is_read[recent[recent >= base] - base] = True
        first = int((~is_read).argmax())
        return base + first, (np.flatnonzero(is_read[first:]) + first + base).tolist()

    def resume(self, first: int, beyond: Iterable[int]) -> None:
        """These places were read before, and are not read again: nothing else is decided.
        ValueError: no arrangement of this length leaves such places."""
        places = np.array(list(beyond), np.int64)
        is_within = (places > first) & (places < first + self._reach)
        if not (0 <= first <= len(self._order) and is_within.all()):
            raise ValueError("its places are not those of such an epoch")
        if len(np.unique(places)) < len(places) or (places >= len(self._order)).any():
            raise ValueError("a place stands there twice, or lies outside")
        self._is_taken[:first] = True
        self._places[:first] = np.arange(first)
        self._first = self.arranged = first
        self._take(places)
