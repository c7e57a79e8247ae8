"""Looking for a reader whose place is not known: in which epoch's order he reads, and where (pure).

A job that a new hintsd takes up is known to where it was seen last, many epochs ago if they are
short; and a hint that was taken for wrong may be right after all. Then the files that were seen to
be opened are compared with whole epochs, in the order in which they were opened.

If nobody reads in an epoch's order, each order of m of its files is as likely as any other, and the
number of pairs that were opened the wrong way round is distributed as the inversions of a random
permutation (Kendall 1938, "A new measure of rank correlation"). A DataLoader's workers swap near
files only. A place is *found* when chance explains so few inversions with at most FOUND_ERROR: 12
files all in turn, or 64 with three pairs of ten the wrong way round. The latest files count, since
the earlier ones may be of the epoch before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hintsd.sequence import EpochOrder, Inos

FOUND_ERROR = 1e-8
COMPARED = (64, 48, 32, 24, 16, 12)  # files
SEEN_MOST = COMPARED[0]
WALK_EVERY = 32  # files: a look through many epochs takes long
ENOUGH = SEEN_MOST  # half of them at least are of one epoch
LOOK_EVERY = 4  # files
WIRES = 64  # laid over an epoch, once a second: a look-up each costs readers little
WIRES_EVERY_S = 1.0
EPOCHS_LEAST, SAMPLES_MOST = 2, 1 << 20  # that are looked through at once
REST_FIRST_S, REST_MOST_S = 1.0, 64.0


@lru_cache
def inversions_most(count: int) -> int:
    """So many inversions of `count` files, or fewer, are no chance; -1: none are."""
    chances = np.ones(1)
    for size in range(2, count + 1):
        chances = np.convolve(chances, np.full(size, 1 / size))
    return int(np.searchsorted(np.cumsum(chances), FOUND_ERROR, "right")) - 1


class Place(NamedTuple):
    epoch: int
    position: int
    """Index of the sample within the epoch."""
    inos: Inos
    """The order of that epoch."""


class Search:
    """The files that a lost reader was seen to open."""

    def __init__(self, now: float, *, rest_s: float = 0.0) -> None:
        """`rest_s`: between two looks through many epochs at least, twice as long each time."""
        self.files = 0  # seen
        self.wires_at = now + (WIRES_EVERY_S if rest_s else 0.0)
        self._seen: deque[int] = deque(maxlen=SEEN_MOST)
        self._looked = self._walked = 0  # counts at the last look
        self._rest_s = rest_s
        self._walk_at = now + rest_s

    def see(self, inos: Inos) -> None:
        self._seen.extend(inos.tolist())
        self.files += len(inos)

    def seen(self) -> Inos:
        """Each file once, the latest last."""
        latest = dict.fromkeys(reversed(self._seen))
        return np.array(list(latest)[::-1], np.uint32)

    def find(self, orders: Iterable[tuple[int, EpochOrder]]) -> tuple[int, int] | None:
        """(epoch, index) in one of these orders, once there is something new."""
        if self.files < self._looked + LOOK_EVERY:
            return None
        self._looked = self.files
        seen = self.seen()
        places = ((epoch, find(order, seen)) for epoch, order in orders)
        return next(((epoch, index) for epoch, index in places if index is not None), None)

    def is_walk_due(self, now: float) -> bool:
        """Whether more epochs are to be looked through (`walk`)."""
        return self.files >= self._walked + WALK_EVERY and now >= self._walk_at

    def walked(self, now: float) -> None:
        self._walked = self.files
        self._walk_at = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, REST_MOST_S)


def find(order: EpochOrder, seen: Inos) -> int | None:
    """The index that the reader of these files has come to, if he follows this order."""
    where = order.find(seen, 0)
    where = where[where >= 0]
    swapped = np.triu(where[:, None] > where)
    for count in COMPARED:
        if count <= len(where) and swapped[-count:, -count:].sum() <= inversions_most(count):
            return int(np.median(where[-5:]))
    return None


def walk(seen: Inos, epochs: Iterable[int], order_of: Callable[[int], Inos | None]) -> Place | None:
    """The first of `epochs` whose order the reader follows."""
    for epoch in epochs:
        inos = order_of(epoch)
        if inos is None:
            break
        if (index := find(EpochOrder(inos), seen)) is not None:
            return Place(epoch, index, inos)
    return None
