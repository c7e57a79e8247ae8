"""Pairing: which samples the next losses are of, from the order that was handed out.

A loader hands its batches to the script in the order in which the sampler gave out their indices.
So losses that come batch by batch need no indices.

INVARIANT: losses that do not fit a batch take that batch's place: those after them fit theirs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hintsd.sampling.draws import Order
from hintsd.sampling.formulas import Mask

Indices = npt.NDArray[np.int64]


class Unpaired(Exception):
    """Losses of no batch, or of another length: in one line, why."""


class Pairing:
    """Of one reader: its epoch's order, how much of it is handed out, and how much is paired."""

    def __init__(self, batch_size: int | None = None) -> None:
        self.order: Order = np.empty(0, np.int64)
        self.batch_size = batch_size
        """None: that of the first losses that come."""
        self.drops_last = False
        self.handed = 0
        self.paired = 0
        """Samples whose losses have come."""
        self._computed: Mask | None = None

    def begin(self, order: Order, computed: Mask | None, paired: int = 0) -> None:
        """An epoch begins, of which `paired` samples were trained before: what is missing of the
        one before will not come. `computed`: which samples of `order` may come alone."""
        self.order, self._computed = order, computed
        self.handed = self.paired = paired

    def batch(self, size: int, drops_last: bool) -> None:
        """So the loader makes batches."""
        self.batch_size, self.drops_last = size, drops_last

    def hand_out(self, order: Order) -> None:
        """One more of `order` is handed out, if that is still this epoch's."""
        if order is self.order:
            self.handed += 1

    def skip(self, count: int) -> None:
        """So many samples more have their scores by another way."""
        self.paired = min(self.paired + count, self.handed)

    @property
    def left(self) -> int:
        """Samples that may still be paired in this epoch."""
        whole = len(self.order)
        if self.drops_last and self.batch_size is not None:
            whole -= whole % self.batch_size
        return max(0, whole - self.paired)

    def turn(self, count: int | None = None) -> slice:
        """The places in `order` of the batch whose losses come next, of `count` samples if the
        batch size is not known. Unpaired: no such batch was handed out."""
        size = max(0, self.batch_size or count or 0)
        end = min(self.paired + size, len(self.order))
        if end == self.paired or end > self.handed:
            raise Unpaired("losses came for which no batch was handed out")
        return slice(self.paired, end)

    def computed(self) -> Mask:
        """Which samples of the batch that comes next are to be computed. Unpaired."""
        turn = self.turn(self.handed - self.paired)
        if self._computed is None:
            return np.ones(turn.stop - turn.start, np.bool_)
        return self._computed[turn]

    def take(self, count: int) -> Indices:
        """The samples that `count` losses are of: all of a batch, or those to be computed.
        Unpaired."""
        turn = self.turn(count)
        if self.batch_size is None:
            self.batch_size = count
        self.paired = turn.stop
        indices = self.order[turn]
        if count == len(indices):
            return indices
        if self._computed is not None and count == np.count_nonzero(self._computed[turn]):
            return indices[self._computed[turn]]
        raise Unpaired(f"{count} losses came for a batch of {len(indices)} samples")
