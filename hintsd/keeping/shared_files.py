"""Whether jobs read the same files, each in an order of its own (docs/HINTS.md, rule 1; pure)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from hintsd.follow.sequence import EpochOrder
from hintsd.follow.sequence import Sequence as Access

OVERLAP_SAMPLES, OVERLAP_SHARE = 64, 0.1  # jobs share files: of so many samples, so much


class Ordered(Protocol):
    """A job, as far as this goes."""

    name: str
    sequence: Access


class SharedFiles:
    """Whether jobs read the same files, each in an order of its own: then what is used soonest by
    any of them is worth keeping. Asked with each decision, found once for the orders known.
    """

    def __init__(self) -> None:
        self._orders: list[tuple[str, list[EpochOrder]]] = []
        self._is_shared = False

    def by(self, jobs: Sequence[Ordered]) -> bool:
        """Whether any two of these do."""
        orders = [(job.name, list(job.sequence.orders.values())) for job in jobs]
        if orders != self._orders:
            self._orders = orders
            of_each = [known for _, known in orders]
            self._is_shared = any(itertools.starmap(_overlap, itertools.combinations(of_each, 2)))
        return self._is_shared


def _overlap(some: list[EpochOrder], others: list[EpochOrder]) -> bool:
    """Whether each of these epochs reads some of what each of the others does. Not so for ranks of
    one job: in the same epoch they read different files.
    """
    samples = [order.inos[:: max(1, len(order.inos) // OVERLAP_SAMPLES)] for order in some]
    shares = [other.contains(sample).mean() for sample in samples for other in others]
    return bool(shares and min(shares) > OVERLAP_SHARE)
