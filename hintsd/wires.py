"""Wires: armed files, whose look-ups tell where a job's reader is (docs/HINTS.md rule 4; pure).

In the steady state no READ reaches the mount, and they are all that is seen. Here they are laid
ahead of the reader, over the rest of his epoch (sentinels) and over whole epochs where he is
sought, and here it is said which have fired. What that means for his place: hintsd/progress.py.

INVARIANT: a wire is laid again once its file is ARMED no more, unless it has fired for its job.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import numpy as np

from hintsd.files import ARMED, Files
from hintsd.job import SENTINELS_EVERY_S, Fired, Job
from hintsd.policies import Mask
from hintsd.search import WIRES_EVERY_S
from hintsd.sequence import NO_POSITIONS, Inos, Positions

WIRED_AHEAD_S = 0.2
SENTINELS_MOST = 1 << 15
ARM_MOST = 4096


class Wires:
    """Those of one mount's jobs; each job's own are marks of its `Job`."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._stolen: list[Inos] = []  # ARMED, but the mount has them no more

    def void(self) -> None:
        """Nothing is armed any more."""
        self._stolen.clear()

    def _grid(self, job: Job, start: int, stop: int, spacing: int) -> Positions:
        """Wires in [start, stop): every `spacing`-th sample and the last one of each epoch."""
        n = job.sequence.samples_per_epoch
        parts = []
        for epoch in range(start // n, -(-stop // n) if stop > start else start // n):
            base = epoch * n
            low, high = max(start - base, 0), min(stop - base, n)
            parts.append(np.arange(-(-low // spacing) * spacing, high, spacing) + base)
            if low < n <= high and (n - 1) % spacing and n - 1 >= low:
                parts.append(np.array([base + n - 1]))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def first_unfired(self, job: Job, besides: Container[int] = ()) -> int | None:
        """The first wire from `low` on that has not fired."""
        progress = job.progress
        first, last = np.searchsorted(
            job.wires, [progress.low, progress.high + 2 * progress.spacing]
        )
        where = job.wires[first:last]
        armed = where[self._files.flags[job.sequence.inos_at(where)] & ARMED != 0].tolist()
        return next((wire for wire in armed if wire not in job.fired and wire not in besides), None)

    def disarm(
        self,
        inos: Inos,
        reads: Mask,
        jobs: list[Job],
        candidates: list[Positions],
        strange: list[Mask],
    ) -> None:
        """Files that were looked up have no wire any more. What a stranger took away from a job
        that has not read it yet is laid again; it holds `low`, but not what is in order beyond it.
        """
        stolen = np.zeros(len(inos), np.bool_)
        for job, where, theirs in zip(jobs, candidates, strange, strict=True):
            if not theirs.any() or len(job.wires) == 0 or not job.live:
                continue
            wire = _are_wires(job, where) & (where >= job.progress.low)
            wire &= theirs & ~reads & ~np.isin(where, list(job.fired))
            job.stolen.update(where[wire].tolist())
            stolen |= wire.any(axis=0)
        self._files.flags[inos[~reads & ~stolen]] &= ~ARMED & 0xFFFF
        if stolen.any():
            self._files.flags[inos[stolen]] |= ARMED
            self._stolen.append(inos[stolen])

    def fired(
        self, job: Job, candidates: Positions, own: Mask, unfired: int | None
    ) -> dict[int, Fired]:
        """Wires of the zone among these look-ups. A file may be used twice there (at the end of one
        epoch and the beginning of the next), and by another job (not `own`), but the wire is gone.
        """
        if candidates.size == 0 or len(job.wires) == 0:
            return {}
        progress = job.progress
        zone = (candidates >= progress.low) & (candidates < progress.zone_end(unfired))
        sure = np.broadcast_to((zone.sum(axis=0) == 1) & own, zone.shape)
        uses = np.where(zone, candidates, np.iinfo(np.int64).max).min(axis=0)
        first = np.broadcast_to(uses, zone.shape)
        wire = zone & _are_wires(job, candidates)
        how = map(Fired, sure[wire].tolist(), first[wire].tolist())
        return dict(zip(candidates[wire].tolist(), how, strict=True))

    def doubt_fired(self, job: Job) -> None:
        """Wires that an earlier use of their file may have fired are laid again once that use is
        read.
        """
        low = job.progress.low
        for wire, (is_sure, first) in list(job.fired.items()):
            if not is_sure and first < min(wire, low):
                del job.fired[wire]

    def fired_in_turn(self, job: Job) -> int:
        """End of the wires from `high` on that have fired without a gap."""
        progress = job.progress
        end = progress.high
        first, last = np.searchsorted(job.wires, [end, progress.zone_end(None)])
        where = job.wires[first:last]
        for position, ino in zip(where.tolist(), job.sequence.inos_at(where), strict=True):
            if ino and position not in job.fired:
                break
            if position in job.fired and job.fired[position].is_sure:
                end = position + 1
        return end

    def lay(self, jobs: Iterable[Job], now: float) -> list[Inos]:
        """Files to be armed now."""
        parts = [np.unique(inos[self._files.flags[inos] & ARMED != 0]) for inos in self._stolen]
        self._stolen.clear()
        for job in jobs:
            if job.state == "done" or not job.sequence.orders:
                continue
            where = [self._ahead(job), *self._sentinels(job, now)] if job.live else []
            laid = np.concatenate([*where, self._search_wires(job, now)])
            if job.fired:
                laid = laid[~np.isin(laid, list(job.fired))]
            if len(laid) == 0:
                continue
            inos = job.sequence.inos_at(laid)
            inos = np.unique(inos[self._files.flags[inos] & ARMED == 0])
            inos = inos[inos != 0][:ARM_MOST]
            self._files.flags[inos] |= ARMED
            if len(inos):
                parts.append(inos)
        return parts

    def _ahead(self, job: Job) -> Positions:
        """The wires from `high` on; new ones once a good part of them has fired."""
        progress = job.progress
        high = progress.high
        ahead = 2 * (progress.disorder + 8 * progress.spacing)
        ahead = max(ahead, int(progress.samples_per_s * WIRED_AHEAD_S))
        stop = min(job.last(high + ahead), job.sequence.known_until(high))
        if job.wired < min(stop, high + ahead - ahead // 4):
            start = max(job.wired, high)
            kept = job.wires[np.searchsorted(job.wires, progress.low) :]
            if start > job.wired or not len(kept):
                job.wired_from = start
            job.wires = np.concatenate([kept, self._grid(job, start, stop, progress.spacing)])
            job.wired = stop
            job.fired = {wire: how for wire, how in job.fired.items() if wire >= progress.low}
            job.stolen = {wire for wire in job.stolen if wire >= progress.low}
        return job.wires[np.searchsorted(job.wires, high) :]

    def _sentinels(self, job: Job, now: float) -> list[Positions]:
        """Wires over the rest of the epoch, and, four times as far apart, over what is read."""
        progress = job.progress
        n = job.sequence.samples_per_epoch
        epoch = job.sequence.epoch_of(progress.high)
        if epoch == job.sentinel_epoch and now - job.sentinels_at < SENTINELS_EVERY_S:
            return []
        job.sentinels_at, job.sentinel_epoch = now, epoch
        wide = progress.spacing * max(1, -(-n // (progress.spacing * SENTINELS_MOST)))
        return [
            self._grid(job, max(job.wired, epoch * n), job.last((epoch + 1) * n), wide),
            self._grid(job, epoch * n, max(progress.low, epoch * n), 4 * wide),
        ]

    def _search_wires(self, job: Job, now: float) -> Positions:
        """Wires over a whole epoch: any files do."""
        if job.search is None or now < job.search.wires_at:
            return NO_POSITIONS
        job.search.wires_at = now + WIRES_EVERY_S
        n = job.sequence.samples_per_epoch
        return np.arange(0, n, job.search_spacing) + min(job.sequence.orders) * n


def _are_wires(job: Job, positions: Positions) -> Mask:
    """Which of these have a wire of the job, which has some."""
    place = np.minimum(np.searchsorted(job.wires, positions), len(job.wires) - 1)
    found: Mask = job.wires[place] == positions
    return found
