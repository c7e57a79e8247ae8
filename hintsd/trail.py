"""What the reader of a job has passed since a recording began (pure).

For `fusecache trace` (docs/TRACES.md): page-cache hits are invisible to the mount, but before `low`
(hintsd/progress.py) all is read.

INVARIANT: positions told ascend; each stretch begins where the one before ended, but where the
reader was found at another place or an order is not known: nobody knows what he has read there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from hintsd.progress import Progress
from hintsd.sequence import EpochOrder, Inos, Sequence

STRETCH_MOST: Final = 1 << 16  # samples


class Passed(NamedTuple):
    """A stretch of a job's sequence, within one epoch."""

    job: str
    position: int
    samples_per_epoch: int
    inos: Inos  # 0: a sample outside the mount


class Trail:
    """One job's, of one recording. It begins at `high`: much of what is before was read before."""

    def __init__(self, job: str, sequence: Sequence, progress: Progress) -> None:
        self._job, self._sequence, self._progress = job, sequence, progress
        self._position = progress.high
        self._moves: int | None = progress.moves
        # The sequence forgets an epoch that its window has left, which may be ahead of `low`.
        self._orders: dict[int, EpochOrder] = {}

    def lose(self) -> None:
        """Nobody follows the order; what is told next begins where the reader is found again."""
        self._moves = None

    def follow(self, stop: int) -> list[Passed]:
        """What is read before position `stop` and was not told; nothing of an epoch whose order is
        not known.
        """
        if self._moves != self._progress.moves:
            self._moves, self._position = self._progress.moves, self._progress.moved_to
        self._orders |= self._sequence.orders
        n, found = self._sequence.samples_per_epoch, []
        while self._position < stop:
            epoch, index = divmod(self._position, n)
            count = min(stop - self._position, n - index, STRETCH_MOST)
            if (order := self._orders.get(epoch)) is not None:
                inos = order.inos[index : index + count]
                found.append(Passed(self._job, self._position, n, inos))
            self._position += count
        epoch = self._position // n
        self._orders = {known: order for known, order in self._orders.items() if known >= epoch}
        return found
