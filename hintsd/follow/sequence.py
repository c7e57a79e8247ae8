"""The access sequence of one job: the orders of the epochs that are known, as inode numbers.

A *position* counts samples over all epochs: one number line. Epochs may differ in length; one
whose order is not known counts as long as the latest that is. Here positions become inode numbers
(`piece`) and inode numbers become positions (`locate`), vectorised. Neither what is cached nor
where the reader is belongs here.

INVARIANT: entry 0 of an order is a sample outside the mount.
INVARIANT: no known epoch moves; where an order would move one (`is_moved_by`), all is forgotten
first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Inos: TypeAlias = npt.NDArray[np.uint32]
Positions: TypeAlias = npt.NDArray[np.int64]
Uses: TypeAlias = npt.NDArray[np.float64]

NO_INOS: Inos = np.empty(0, np.uint32)
NO_POSITIONS: Positions = np.empty(0, np.int64)

FAR = np.iinfo(np.int64).max  # behind all positions
AHEAD_MOST = 1 << 10  # epochs from one that is known to one that is told, of another length
SLICE = 1 << 20  # elements worked on at once: bounds what numpy allocates on the way


class EpochOrder:
    """The order of one epoch, and its inverse: 4 bytes a sample, and 4 for each number between the
    smallest and the largest inode number. The array given is kept, not copied.
    """

    def __init__(self, inos: Inos) -> None:
        self.inos = inos
        inside = inos[inos != 0] if len(inos) and inos.min() == 0 else inos
        self._base = np.uint32(inside.min() if len(inside) else 0)
        span = int(inside.max()) - int(self._base) + 1 if len(inside) else 0
        # by number: 1 more than the index of the first use, or 0; the last entry is for all others
        self._first = np.zeros(span + 1, np.uint32)
        del inside
        starts = range(0, len(inos), SLICE)
        for start in reversed(starts):  # from behind: of several uses the first one stays
            piece = inos[start : start + SLICE]
            first = np.arange(start + 1, start + 1 + len(piece), dtype=np.uint32)
            if self._base == 0 or piece.min() == 0:
                first, piece = first[piece != 0], piece[piece != 0]
            self._first[(piece - self._base)[::-1]] = first[::-1]
        more = []
        for start in starts:
            piece = inos[start : start + SLICE]
            index = np.arange(start, start + len(piece), dtype=np.uint32)
            again = np.flatnonzero((piece != 0) & (self._first_of(piece) != index + np.uint32(1)))
            more.append(piece[again].astype(np.uint64) << np.uint64(32) | index[again])
        self._more = np.sort(np.concatenate(more)) if more else np.empty(0, np.uint64)

    @property
    def repeats(self) -> bool:
        """Whether a file is read more than once in this epoch."""
        return len(self._more) > 0

    def find(self, inos: Inos, at_or_after: int) -> Positions:
        """Index of each file's first use at or after the index `at_or_after`; -1: there is none."""
        found = self._first_of(inos).astype(np.int64) - 1
        if at_or_after <= 0:
            return found
        if not self.repeats:
            found[found < at_or_after] = -1
            return found
        seek = np.flatnonzero((found >= 0) & (found < at_or_after))
        key = inos[seek].astype(np.uint64) << np.uint64(32)
        place = np.searchsorted(self._more, key | np.uint64(at_or_after))
        candidate = self._more[np.minimum(place, len(self._more) - 1)]
        same = (place < len(self._more)) & (candidate >> np.uint64(32) == inos[seek])
        index = (candidate & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        found[seek] = np.where(same, index, -1)
        return found

    def find_any(self, inos: Inos, at_or_after: int) -> Positions:
        """As `find`; where there is none, the index of the first use at all."""
        if at_or_after <= 0 or not self.repeats:
            return self.find(inos, 0)
        found = self.find(inos, at_or_after)
        return np.where(found < 0, self.find(inos, 0), found)

    def contains(self, inos: Inos) -> npt.NDArray[np.bool_]:
        known: npt.NDArray[np.bool_] = self._first_of(inos) > 0
        return known

    def _first_of(self, inos: Inos) -> npt.NDArray[np.uint32]:
        # what is less than the base, 0 too, comes out beyond the span: these are without a sign
        offsets = (inos - self._base).astype(np.uint32, copy=False)
        return self._first.take(offsets, mode="clip")


class Sequence:
    """The known epochs of one job."""

    def __init__(self, samples_per_epoch: int, epochs: int | None = None) -> None:
        """`samples_per_epoch`: as far as is known now; `epochs`: of the job; None: not known how
        many.
        """
        self.samples_per_epoch = samples_per_epoch
        """Of each epoch whose order is not known."""
        self.epochs = epochs
        self._anchor = (0, 0)  # an epoch, and where it begins: all that is known lies behind
        self._lengths: dict[int, int] = {}  # of epochs from there on that are not so long; sorted
        self.generation = 0
        """Positions of another one mean others."""
        self.changes = 0
        """Of the known orders, so far."""
        self.has_repeats = False
        """Whether a known epoch reads a file more than once."""
        self.orders: dict[int, EpochOrder] = {}
        self.unknown: set[int] = set()
        """Epochs whose order cannot be known (yet)."""

    @property
    def total(self) -> int | None:
        """The job's samples; None: it is not known how many epochs it has."""
        return None if self.epochs is None else self.start(self.epochs)

    def last(self, position: int) -> int:
        """`position`, or the job's end if that comes first."""
        total = self.total
        return position if total is None else min(position, total)

    def has(self, epoch: int) -> bool:
        """Whether the job has so many epochs, as far as anybody knows."""
        return self.epochs is None or epoch < self.epochs

    def is_open(self, epoch: int) -> bool:
        """Whether its order is neither known nor known to be unknown."""
        return epoch not in self.orders and epoch not in self.unknown

    # --- the number line

    def length(self, epoch: int) -> int:
        """Its samples."""
        return self._lengths.get(epoch, self.samples_per_epoch)

    def start(self, epoch: int) -> int:
        """Position of its first sample."""
        first, position = self._anchor
        position += (epoch - first) * self.samples_per_epoch
        for other, length in self._lengths.items():
            if other < epoch:
                position += length - self.samples_per_epoch
        return position

    def at(self, position: int) -> tuple[int, int]:
        """Its epoch, and its index there."""
        (epoch, start), n = self._anchor, self.samples_per_epoch
        for uneven, length in self._lengths.items():
            if position < start + (uneven - epoch) * n:
                break
            start += (uneven - epoch) * n
            if position < start + length:
                return uneven, position - start
            epoch, start = uneven + 1, start + length
        passed, index = divmod(position - start, n)
        return epoch + passed, index

    def epoch_of(self, position: int) -> int:
        return self.at(position)[0]

    def starts_of(self, positions: Positions) -> Positions:
        """Where the epoch of each begins."""
        if len(positions) == 0:
            return positions
        first, last = self.epoch_of(int(positions.min())), self.epoch_of(int(positions.max()))
        if first == last:
            return np.full(len(positions), self.start(first))
        starts = np.array([self.start(epoch) for epoch in range(first, last + 1)])
        found: Positions = starts[np.searchsorted(starts, positions, "right") - 1]
        return found

    def is_moved_by(self, epoch: int, length: int) -> bool:
        """Whether an order of that length would move known epochs, or what lies before them."""
        known = self.orders or [epoch]
        is_amid = epoch < self._anchor[0] or epoch < max(known) or epoch > max(known) + AHEAD_MOST
        return is_amid and length != self.length(epoch)

    def _measure(self, epoch: int, length: int) -> None:
        """It has this length, and those that are not known yet, too."""
        assert not self.is_moved_by(epoch, length)
        if not self.orders:
            self._anchor, self._lengths = (epoch, self.start(epoch)), {}
            self.samples_per_epoch = length
        elif length != self.length(epoch):
            lengths = {other: self.length(other) for other in range(self._anchor[0], epoch)}
            self.samples_per_epoch = length
            self._lengths = {other: n for other, n in lengths.items() if n != length}

    # --- the orders

    def put(self, epoch: int, inos: Inos) -> None:
        """ValueError: the order is empty."""
        if len(inos) == 0:
            raise ValueError(f"epoch {epoch} has no samples")
        self._measure(epoch, len(inos))
        self.orders[epoch] = EpochOrder(inos)
        self.unknown.discard(epoch)
        self._note_change()

    def cannot_know(self, epoch: int) -> None:
        """This epoch's order cannot be known (yet)."""
        self.unknown.add(epoch)

    def forget(self) -> None:
        """Nothing is known of any epoch, and positions may mean others."""
        self.orders.clear()
        self.unknown.clear()
        self._anchor = (0, 0)
        self._lengths.clear()
        self.generation += 1
        self._note_change()

    def forget_before(self, epoch: int) -> None:
        for old in [known for known in self.orders if known < epoch]:
            del self.orders[old]
            self._note_change()
        self.unknown = {known for known in self.unknown if known >= epoch}
        first = epoch - 1  # a late step may be of the one before
        if first > self._anchor[0]:
            self._anchor = first, self.start(first)
            self._lengths = {known: n for known, n in self._lengths.items() if known >= first}

    def _note_change(self) -> None:
        self.changes += 1
        self.has_repeats = any(order.repeats for order in self.orders.values())

    def known_until(self, position: int) -> int:
        """First position from `position` on that no known order covers."""
        epoch = self.epoch_of(position)
        if epoch not in self.orders:
            return position
        while epoch in self.orders:
            epoch += 1
        return self.start(epoch)

    def piece(self, start: int, most: int) -> tuple[Inos, bool]:
        """At most `most` inode numbers from `start` on, none beyond the epoch's end or of an
        unknown epoch; and whether the epoch has repeats.
        """
        epoch, index = self.at(start)
        order = self.orders.get(epoch)
        if order is None:
            return np.empty(0, np.uint32), False
        return order.inos[index : index + most], order.repeats

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Inos, bool]]:
        """All of [start, stop), which must be known, in pieces of at most SLICE."""
        while start < stop:
            inos, repeats = self.piece(start, min(SLICE, stop - start))
            assert len(inos), "a window covers known positions only"
            yield inos, repeats
            start += len(inos)

    def next_uses(self, inos: Inos, at_or_after: int, uses_per_epoch: Uses) -> Uses:
        """Position of each file's first use from there on: where no known order has one the
        expected one, beyond them all. Shape (files,); `uses_per_epoch`: expected, 0 or more, of
        the same shape, or one number for all.
        """
        n, end = self.samples_per_epoch, self.known_until(at_or_after)
        with np.errstate(divide="ignore"):
            found: Uses = end + n / np.broadcast_to(uses_per_epoch, inos.shape)
        for row in reversed(self.locate(inos, at_or_after)):
            is_there = row >= at_or_after
            found[is_there] = row[is_there]
        return found

    def inos_at(self, positions: Positions) -> Inos:
        """The file at each position; 0 where the epoch is unknown."""
        found = np.zeros(len(positions), np.uint32)
        if len(positions) == 0:
            return found
        low, high = int(positions.min()), int(positions.max())
        for epoch, order in self.orders.items():
            start = self.start(epoch)
            stop = start + len(order.inos)
            if start <= low and high < stop:
                return order.inos[positions - start]
            if start <= high and low < stop:
                here = (positions >= start) & (positions < stop)
                found[here] = order.inos[positions[here] - start]
        return found

    def contains(self, inos: Inos) -> npt.NDArray[np.bool_]:
        """Which files are in the known epochs."""
        found = np.zeros(len(inos), np.bool_)
        for order in self.orders.values():
            found |= order.contains(inos)
        return found

    def locate(self, inos: Inos, at_or_after: int) -> Positions:
        """Where each file is used: shape (known epochs, files), -1 where it is not. In each epoch
        the first use at or after `at_or_after`, or the first at all.
        """
        rows = []
        for epoch, order in sorted(self.orders.items()):
            start = self.start(epoch)
            index = order.find_any(inos, min(at_or_after - start, len(order.inos)))
            rows.append(np.where(index >= 0, index + start, -1))
        return np.array(rows, np.int64).reshape(len(rows), len(inos))
