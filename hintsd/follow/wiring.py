"""The wires of one job: armed files, whose look-ups tell where its reader is (docs/HINTS.md rule 4;
pure).

Here they are laid ahead of the reader, over the rest of its epoch (sentinels) and over whole
epochs where it is sought, and here it is said which have fired. What that means for its place:
progress.py. Which files are armed for all jobs of the mount: `Wires` (plan/files.py).

INVARIANT: a wire is laid again once its file is armed no more, unless it has fired for its job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hintsd.follow.passed import Passed
from hintsd.follow.progress import Progress
from hintsd.follow.sequence import NO_INOS, NO_POSITIONS, Inos, Positions, Sequence
from hintsd.policies import Mask

WIRED_AHEAD_S = 0.2
SENTINELS_EVERY_S = 1.0
SENTINELS_MOST = 1 << 15
WATCHED_AFTER_S = 0.1  # wires of an epoch are there by then: one that the reader opens is told of


class Fired(NamedTuple):
    """A wire whose file was looked up."""

    is_sure: bool  # for this use of the file, by this job
    first: int  # the use it was, or may have been: this one or an earlier one


class Wiring:
    """Those that are laid, have fired, or were stolen, as far back as that is asked for."""

    def __init__(
        self, sequence: Sequence, progress: Progress, are_armed: Callable[[Inos], Mask]
    ) -> None:
        self._sequence, self._progress, self._are_armed = sequence, progress, are_armed
        self._sentinels_at = 0.0
        self._fired: dict[int, Fired] = {}  # in order: not laid again
        # by a stranger: its reader may pass before it is laid again
        self._stolen: set[int] = set()
        self.passed = Passed()
        self._watched_epoch = -1
        self.unlay()

    def unlay(self) -> None:
        """No wires are laid."""
        self._until = self._progress.high  # they are laid up to here
        self._wires = NO_POSITIONS  # sorted
        self._inos, self._inos_of = NO_INOS, -1  # their files, after so many changes of the orders
        self.laid_from: int | None = None
        """Where they begin; from there on there is no gap."""
        self._sentinel_epoch = -1
        self._watched_from: int | None = None  # in the epoch `_watched_epoch`
        self.passed.skip()

    def restart(self) -> None:
        """The reader is at another place: none is laid, and none has fired."""
        self.unlay()
        self._fired.clear()
        self._stolen.clear()

    # --- what has become of them

    def first_unfired(self, *, or_stolen: bool = True) -> int | None:
        """The first wire from `low` on that has not fired; of those that strangers have fired
        only where `or_stolen`.
        """
        progress = self._progress
        where, inos = self._between(progress.low, progress.high + 2 * progress.spacing)
        armed = self._are_armed(inos).tolist()
        for wire, is_armed in zip(where.tolist(), armed, strict=True):
            if is_armed and wire not in self._fired and (or_stolen or wire not in self._stolen):
                return int(wire)
        return None

    def count_stolen(self) -> int:
        """Beyond `high`."""
        return sum(wire >= self._progress.high for wire in self._stolen)

    def steal(self, candidates: Positions, theirs: Mask) -> Mask:
        """Which of these look-ups, `theirs` of strangers, have taken a wire away that the reader
        has not come to.
        """
        stolen, weighed = np.zeros(len(theirs), np.bool_), self._weighed
        for index in np.flatnonzero(theirs).tolist():
            for use in candidates[:, index].tolist():
                if use >= weighed and use not in self._fired and self._is_wire(use):
                    self._stolen.add(use)
                    stolen[index] |= use >= self._progress.low
        return stolen

    def find_fired(self, candidates: Positions, own: Mask, unfired: int | None) -> dict[int, Fired]:
        """Wires of the zone among these look-ups. A file may be used twice there (at the end of one
        epoch and the beginning of the next), and by another job (not `own`), but the wire is gone.
        """
        found: dict[int, Fired] = {}
        if not len(self._wires):
            return found
        low, end = self._progress.low, self._progress.zone_end(unfired)
        for uses, is_own in zip(candidates.T.tolist(), own.tolist(), strict=True):
            zone = [use for use in uses if low <= use < end]
            for use in zone:
                if self._is_wire(use):
                    found[use] = Fired(len(zone) == 1 and is_own, min(zone))
        return found

    def fire(self, fired: dict[int, Fired]) -> int:
        """They have; the end of the wires from `high` on that have fired without a gap."""
        self._fired.update(fired)
        progress = self._progress
        end = progress.high
        where, inos = self._between(end, progress.zone_end(None))
        for position, ino in zip(where.tolist(), inos.tolist(), strict=True):
            if ino and position not in self._fired:
                break
            if position in self._fired and self._fired[position].is_sure:
                end = position + 1
        return end

    def doubt_fired(self) -> None:
        """Wires that an earlier use of their file may have fired are laid again once that use is
        read.
        """
        low = self._progress.low
        for wire, (is_sure, first) in list(self._fired.items()):
            if not is_sure and first < min(wire, low):
                del self._fired[wire]

    def _between(self, start: int, stop: int) -> tuple[Positions, Inos]:
        """The wires in [start, stop), and their files."""
        if self._inos_of != self._sequence.changes:
            self._inos = self._sequence.inos_at(self._wires)
            self._inos_of = self._sequence.changes
        first, last = self._wires.searchsorted((start, stop))
        return self._wires[first:last], self._inos[first:last]

    def _is_wire(self, position: int) -> bool:
        place = int(self._wires.searchsorted(position))
        return place < len(self._wires) and int(self._wires[place]) == position

    # --- laying

    def without_fired(self, wires: Positions) -> Positions:
        """Those of them that have not."""
        if not self._fired:
            return wires
        fired = np.array(sorted(self._fired))
        found: Positions = wires[fired.take(fired.searchsorted(wires), mode="clip") != wires]
        return found

    def ahead(self) -> Positions:
        """The wires from `high` on; new ones once a good part of them has fired."""
        progress, sequence = self._progress, self._sequence
        high = progress.high
        ahead = 2 * (progress.disorder + 8 * progress.spacing)
        ahead = max(ahead, int(progress.samples_per_s * WIRED_AHEAD_S))
        stop = min(sequence.last(high + ahead), sequence.known_until(high))
        if self._until < min(stop, high + ahead - ahead // 4):
            start = max(self._until, high)
            weighed = self._weighed
            kept = self._wires[self._wires.searchsorted(weighed) :]
            if start > self._until or not len(kept):
                self.laid_from = start
            self._wires = np.concatenate([kept, self._grid(start, stop, progress.spacing)])
            self._until, self._inos_of = stop, -1
            self._fired = {wire: how for wire, how in self._fired.items() if wire >= weighed}
            self._stolen = {wire for wire in self._stolen if wire >= weighed}
        return self._wires[self._wires.searchsorted(high) :]

    @property
    def _weighed(self) -> int:
        """What has become of wires before that is not asked for any more."""
        low = self._progress.low
        return low if self._watched_from is None else min(low, self._watched_from)

    def weigh_passed(self, now: float, until: int = 0) -> None:
        """What became of the wires of this epoch that the reader has left behind; `until`: it is
        seen to be there. Of an epoch that was left early the rest says nothing; nor do files that
        come again, nor wires that a stranger took, which any job may have laid anew.
        """
        progress, sequence = self._progress, self._sequence
        epoch = sequence.epoch_of(progress.high)
        if epoch != self._watched_epoch or sequence.has_repeats:
            self._watched_epoch, self._watched_from = epoch, None
            self.passed.forget()
        stop = max(progress.floor, until)
        if self._watched_from is None:
            is_laid = epoch == self._sentinel_epoch and not sequence.has_repeats
            if is_laid and now - self._sentinels_at >= WATCHED_AFTER_S:
                self.watch(progress.high)
        elif self._watched_from < stop and sequence.epoch_of(stop) == epoch:
            where = self._grid(self._watched_from, stop, progress.spacing)
            inos, wires = sequence.inos_at(where), where.tolist()
            have_fired = np.array([wire in self._fired for wire in wires], np.bool_)
            are_stolen = np.array([wire in self._stolen for wire in wires], np.bool_)
            are_opened = have_fired | ~self._are_armed(inos)  # another job may have laid one again
            self.passed.weigh(are_opened[(inos != 0) & (have_fired | ~are_stolen)])
            self._watched_from = stop

    @property
    def is_watched(self) -> bool:
        """Whether what becomes of its wires is weighed."""
        return self._watched_from is not None

    def watch(self, position: int) -> None:
        """What becomes of wires from there on is to be weighed."""
        self._watched_from = position

    def sentinels(self, now: float) -> list[Positions]:
        """Wires over the rest of the epoch, and, four times as far apart, over what is read: not
        where it is still to be told whether they were opened.
        """
        progress, sequence = self._progress, self._sequence
        epoch = sequence.epoch_of(progress.high)
        if epoch == self._sentinel_epoch and now - self._sentinels_at < SENTINELS_EVERY_S:
            return []
        self._sentinels_at, self._sentinel_epoch = now, epoch
        start, n = sequence.start(epoch), sequence.length(epoch)
        wide = progress.spacing * max(1, -(-n // (progress.spacing * SENTINELS_MOST)))
        stop = sequence.last(start + n)
        return [
            self._grid(max(self._until, start), stop, wide),
            self._grid(start, max(self._weighed, start), 4 * wide),
        ]

    def over_an_epoch(self, spacing: int) -> Positions:
        """Wires for a search: any files do."""
        epoch = min(self._sequence.orders)
        return np.arange(0, self._sequence.length(epoch), spacing) + self._sequence.start(epoch)

    def _grid(self, start: int, stop: int, spacing: int) -> Positions:
        """Wires in [start, stop): every `spacing`-th sample and the last one of each epoch."""
        sequence, parts = self._sequence, []
        epoch, index = sequence.at(start)
        base = start - index
        while base < stop:
            n = sequence.length(epoch)
            low, high = max(start - base, 0), min(stop - base, n)
            parts.append(np.arange(-(-low // spacing) * spacing, high, spacing) + base)
            if low < n <= high and (n - 1) % spacing and n - 1 >= low:
                parts.append(np.array([base + n - 1]))
            epoch, base = epoch + 1, base + n
        return np.concatenate(parts) if parts else np.empty(0, np.int64)
