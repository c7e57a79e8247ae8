"""What is known of one job's logs: the one that is written, and the one that is read (docs/LOG.md;
pure).

plan/layout.py decides on it; plan/staging.py counts what has moved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hintsd.reorder.packing import EPOCHS_MOST, Chunks, Contents
from hintsd.reorder.worth import WHOLE_SHARE, Wanted


class Draft(NamedTuple):
    """A log that may be begun."""

    served: range
    """The epochs that it is for."""
    chunks: Mapping[int, Chunks]
    """Theirs, and those of the epoch before."""
    samples: int
    """That it is to take."""
    pieces: Iterator[Mapping[str, Any]]
    """The fields of the frames that announce it."""


class Log:
    """One job's chunks, and the log that is written while an epoch of it is staged."""

    def __init__(self) -> None:
        self.order_bytes: int | None = None
        """Of RAM, that an epoch would take as a whole; None: no order is known."""
        self.decided = -1
        """The epoch whose staging has begun, or the one before the first."""
        self.chunks: dict[int, Chunks] = {}
        self.is_open = False
        """A log for the epochs behind `decided` takes what is staged."""
        self.is_announced = False
        """The mount was told of a log, and not that there is none any more."""
        self.served = range(0)
        """The epochs for which the newest log is, or was, written."""
        self.epochs_most = EPOCHS_MOST
        """It serves so many: fewer, once the mount has refused a log for so many."""
        self.why = ""
        self.waits_since: float | None = None
        """For the orders of the epochs behind."""
        self.begun: tuple[float, int, int] | None = None
        """When `decided` began to be staged, where the reader was then, and the reads that had
        waited."""
        self.others_begun: Mapping[str, int] = {}
        """The samples that other jobs' readers had passed then."""
        self._samples = 0  # that it is to take
        self._moved = 0  # of them, sent to be moved
        self._moved_until = 0  # the position up to which they were counted
        self._pieces: Iterator[Mapping[str, Any]] | None = None  # of its `pack`, not sent yet
        self._keeps_order = True

    def keeps(self, epoch: int) -> bool:
        """Whether the log that this epoch reads serves the one behind it, too, and has all of it:
        then nothing is written anew.
        """
        return (
            epoch in self.served
            and epoch + 1 in self.served
            and all(later in self.chunks for later in range(epoch, self.served.stop))
            and self.is_whole
        )

    @property
    def is_whole(self) -> bool:
        return self._moved >= WHOLE_SHARE * self._samples

    def measure(self, order_bytes: int | None) -> None:
        """Of RAM, that an epoch would take as a whole."""
        self.order_bytes = order_bytes

    def say(self, why: str) -> None:
        """What becomes of it."""
        self.why = why

    def waits(self, *, is_awaited: bool, now: float, most_s: float) -> bool:
        """Whether the orders behind, which may be to come, are waited for: for so long at most."""
        if is_awaited and self.waits_since is None:
            self.waits_since = now
        if is_awaited and self.waits_since is not None and now - self.waits_since < most_s:
            return True
        self.waits_since = None
        return False

    def decide(self, epoch: int, begun: tuple[float, int, int], others: Mapping[str, int]) -> None:
        """The staging of this epoch begins."""
        self.decided, self.begun, self.others_begun = epoch, begun, others

    def begin(self, draft: Draft) -> None:
        """It takes what is staged from now on."""
        self.is_open = self.is_announced = True
        self.served, self._samples, self._pieces = draft.served, draft.samples, draft.pieces
        self._moved = self._moved_until = 0
        self.chunks.update(draft.chunks)

    def close(self) -> bool:
        """It takes no more; whether it did."""
        was_open, self.is_open = self.is_open, False
        return was_open

    def withdraw(self) -> None:
        """The mount has it no more."""
        self.is_announced = False

    @property
    def is_being_announced(self) -> bool:
        return self._pieces is not None

    def take_pieces(self, most: int) -> list[Mapping[str, Any]]:
        """The next frames that announce it, so many at most."""
        found = list(itertools.islice(self._pieces or (), most))
        if found and found[-1]["last"]:
            self._pieces = None
        return found

    def take_keep_order(self) -> bool:
        """Whether the order of the chunk that is staged now is to be kept."""
        keeps, self._keeps_order = self._keeps_order, False
        return keeps

    def count_moved(self, start: int, stop: int, samples: int) -> None:
        """So many of those at [start, stop) are moved; twice counts once."""
        if start >= self._moved_until:
            self._moved += samples
            self._moved_until = stop

    def recount(self, samples: int) -> None:
        """It lacks nothing for which there was no room after all."""
        self._samples = min(self._samples, samples)

    @property
    def largest_bytes(self) -> int:
        """Of RAM, that a chunk takes."""
        return max((chunks.largest_bytes for chunks in self.chunks.values()), default=0)

    def wanted(self, contents: Contents, position: int, waited: int, now: float) -> Wanted | None:
        """Since the last decision, of its reader who is at `position` and has waited for so many
        samples in all; None: not known yet.
        """
        if self.begun is None:
            return None
        since, before, waited_before = self.begun
        samples = position - before
        if now <= since or samples <= 0 or not contents.samples:
            return None
        bytes_per_s = contents.size_bytes / contents.samples * samples / (now - since)
        return Wanted(bytes_per_s, (waited - waited_before) / samples)

    def keep_order(self) -> None:
        """Of the chunk that is staged next: its reader waits for it."""
        self._keeps_order = True

    def forget_before(self, epoch: int) -> None:
        for old in [known for known in self.chunks if known < epoch]:
            del self.chunks[old]

    def refuse(self, why: str) -> None:
        """The mount could not open it."""
        self.is_open, self.why = False, why
        self.epochs_most = max(1, len(self.served) - 1)
        self._forget_ahead()

    def forget(self) -> None:
        """The log is over: nothing more is moved, no epoch is cut."""
        self.chunks.clear()
        self.served = range(0)
        self.undecide()

    def undecide(self) -> None:
        """What was sent is void; the present epoch may begin another log, unless the one that it
        reads serves further ones: that one lies on SSD whole.
        """
        if self.decided >= 0 and not self.keeps(self.decided):
            self._forget_ahead()
        self.decided = -1
        self.why = ""
        self.is_open = self.is_announced = False
        self._pieces = None
        self.waits_since = None
        self._keeps_order = True
        self.begun = None

    def _forget_ahead(self) -> None:
        self.served = range(0)
        for epoch in [known for known in self.chunks if known > self.decided]:
            del self.chunks[epoch]
