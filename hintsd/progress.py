"""Where a job's readers are in its access sequence, and whether they follow it at all (pure).

Positions are those of hintsd/sequence.py. Two marks are kept: `high`, the furthest position seen,
and `low`, before which all is read. Between them lies the disorder of a DataLoader: w workers read
w batches at once, and up to w * prefetch_factor batches are handed out ahead of the oldest.

What is observed: READs that reached the server, LOOKUPs of armed files (wires; in the steady state
nothing else), and the steps a trainer reports.

**In order** is an observation whose file is used between `low` and `zone_end`: the disorder and a
few wires beyond the first wire that has not fired. A burst of foreign look-ups (`ls -l`) can
therefore not carry the position away: it fires wires here and there, but not each one in turn.
While strays abound, the position moves only if chance does not explain the share in order.

**Wrong hints** (docs/HINTS.md rule 6). Two hypotheses. W: nobody reads in this order, an
observation is in order with probability q, the zone's share of the epoch. R: somebody does, and at
least one in nine samples read is his (another, unhinted reader may be beside him). Page's
cumulative sum over the observations, in samples: a stray READ adds 1, one in order takes
min(8, (1 - q) / 3q) away, never below 0; a LOOKUP in order stands for `spacing` READs. At
CONDEMNED_SAMPLES the hint is wrong. The drift under W is at least 2 (1 - q) / 3 a sample: 256 to
550 samples decide. Under R with one stray for each sample in order the drift is -3.5 a sample, and
the chance of an excursion to 256 below 1e-70; it reaches 1e-3 when the other reader is eight times
as fast. Stray LOOKUPs without READs are weaker evidence, for `ls` and backups fire wires, too: a
LOOKUP adds twice the spacing when its inode number is smaller than that of the one before (half of
them, in a shuffled order), or when they come as slowly as those of readers, not of listings (less
than SCANNED_PER_S samples a second), and no stray READs are seen; else 1. LOOKUPs alone condemn
only when they have gone on for LOOKUPS_LAST_S, slow ones for SLOW_LOOKUPS_LAST_S.

Where look-ups cannot tell one place of an epoch from another (`is_to_be_checked`), the test
condemns nobody: there search.py looks for the reader, and that decides.

**Elsewhere.** Strays that lie close together in a known epoch are the reader himself, somewhere
else: resumed, begun again, or in the next epoch already. `jump` finds such a place if chance
explains it with less than JUMP_ERROR. The same heals a verdict of "wrong".
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hintsd.sequence import Positions

SPACING_LEAST = 64  # samples between wires: arming costs readers a few per cent at most
UNKNOWN_WORKERS, UNKNOWN_PREFETCH_FACTOR = 16, 2
CONDEMNED_SAMPLES = 256.0
EXCULPATION_MOST = 8.0
LOOKUPS_LAST_S, SLOW_LOOKUPS_LAST_S = 1.0, 0.25
SCANNED_PER_S = 2000  # `ls -l` looks up more files a second
CHANCE_ERROR = (
    0.05  # an observation among strays moves the position only when chance is less likely
)
JUMP_ERROR = 1e-6
RECENT = 64  # observations remembered
STRAYS = 32  # strays remembered of each kind
STRAYS_ABOUND = 8
IDLE_AFTER_S = 60.0
NEAR_END_S = 30.0
AT_END_S = 2.0  # the last batches are read, when nothing was seen for so long after the last sample

PACE_FIRST_S, PACE_S = 0.2, 1.0

_FAR = np.iinfo(np.int64).max

Mask = npt.NDArray[np.bool_]


def wire_spacing(batch_size: int) -> int:
    """Samples from one wire to the next: whole batches when they are small, else a batch or an even
    part of it (64 to 255 samples), so that each batch begins with a wire.
    """
    if batch_size < SPACING_LEAST:
        return -(-SPACING_LEAST // batch_size) * batch_size
    return batch_size // max(1, batch_size // (2 * SPACING_LEAST))


@lru_cache(maxsize=4096)
def chance(hits: int, tries: int, share_percent: int) -> float:
    """P(at least `hits` of `tries` | each with probability share_percent / 100)."""
    share = share_percent / 100
    return sum(
        math.comb(tries, n) * share**n * (1 - share) ** (tries - n) for n in range(hits, tries + 1)
    )


class Progress:
    """One job's position and the evidence for and against its hint."""

    def __init__(
        self,
        samples_per_epoch: int,
        *,
        start: int,
        batch_size: int,
        workers: int,
        prefetch_factor: int,
        now: float,
    ) -> None:
        self._epoch_samples = samples_per_epoch
        workers_assumed = workers or UNKNOWN_WORKERS
        handed_out = workers_assumed * (prefetch_factor or UNKNOWN_PREFETCH_FACTOR) + 1
        if workers == 1:
            handed_out = 1  # one worker reads its batches one after another
        quarter = max(1, samples_per_epoch // 4)
        self.spacing = wire_spacing(batch_size)
        self.workers_known = workers > 0
        self.disorder = min(handed_out * batch_size, quarter)
        self.is_scattered = handed_out * batch_size > quarter
        """Whether so much is read at once that an epoch's files come in little order."""
        # a worker that begins a batch has read its one before; no wire tells that of small batches
        reading = workers_assumed * batch_size if self.spacing <= batch_size else self.disorder
        self._reading = min(reading, quarter)
        self.at_once = self._reading + self.spacing
        """Samples from the first to the last that are being read, as far as wires tell."""
        self.is_low_known = workers > 1
        """Whether all that lies before `low` was read: a slow worker is waited for."""
        self._told = self.low = self.high = start  # _told: by the trainer, the last time
        self._unstepped = start  # `low`, had there been no steps
        self.moves, self.moved_to = 0, start  # to where his way did not lead; the last place
        self.unseen = 0  # samples beyond `high` that may be read: others have fired the wires
        self.begun = False
        self.observations = self.strays = 0  # since the last verdict or jump
        self.passed_samples = 0
        self.samples_per_s = 0.0
        self.confirmed_at = now
        self._paced = (now, start)
        self._last_step: int | None = None
        self.forget()

    def forget(self) -> None:
        """Nothing that was seen counts any more."""
        self.observations = self.strays = 0
        self._read_evidence = self._lookup_evidence = 0.0
        self._lookups_since: float | None = None
        self._last_stray_ino = 0
        self._is_slow = False
        self._stray_lookups_at: deque[float] = deque(maxlen=2)
        self._recent: deque[bool] = deque(maxlen=RECENT)
        # candidate positions of the last strays: one array (known epochs) each
        self._stray_reads: deque[Positions] = deque(maxlen=STRAYS)
        self._stray_lookups: deque[Positions] = deque(maxlen=STRAYS)

    # --- the zone

    def zone_end(self, unfired: int | None) -> int:
        """End of what is in order; `unfired`: the first wire from `low` on that has not fired."""
        base = self.high if unfired is None else min(unfired, self.high)
        return max(base + self.disorder + 4 * self.spacing + self.unseen, self.high + 1)

    @property
    def is_epoch_short(self) -> bool:
        """Whether more than a quarter of an epoch is in order."""
        return 4 * (self.disorder + 4 * self.spacing) > self._epoch_samples

    @property
    def is_to_be_checked(self) -> bool:
        """Whether look-ups alone may not tell where else the reader is (`jump`): the span of eight
        is more than a sixteenth of an epoch.
        """
        return 16 * (self.disorder + 8 * self.spacing) > self._epoch_samples

    @property
    def slack(self) -> int:
        return self.disorder + self.spacing

    @property
    def _floor(self) -> int:
        """What is used from here on may not have been read yet: a step is here before the reads
        that it tells of.
        """
        return max(self._unstepped, self.low - self.slack)

    def _share_percent(self, zone_end: int) -> int:
        """q, the chance of being in order without following, in per cent (1 … 75)."""
        share = (zone_end - self.low) * 100 // max(1, self._epoch_samples)
        return min(max(share, 1), 75)

    def place(self, candidates: Positions, unfired: int | None) -> Positions:
        """The position in order of each observed file, or -1. `candidates`: Sequence.locate."""
        if candidates.size == 0:
            return np.full(candidates.shape[1:], -1, np.int64)
        inside = (candidates >= self._floor) & (candidates < self.zone_end(unfired))
        # of two uses (an epoch's end and the next one's beginning) the first: it moves nothing
        nearest: Positions = np.where(inside, candidates, _FAR).min(axis=0)
        return np.where((nearest >= self.low) & (nearest < _FAR), nearest, -1)

    # --- evidence

    def take(
        self,
        inos: npt.NDArray[np.uint32],
        candidates: Positions,
        placed: Positions,
        reads: Mask,
        in_dataset: Mask,
        excused: Mask,
        unfired: int | None,
        now: float,
    ) -> None:
        """Weighs one batch of observations. `placed`: what `place` said; `in_dataset`: they say
        something about this job; `excused`: in order for another job, so no stray.
        """
        zone_end = self.zone_end(unfired)
        share = self._share_percent(zone_end)
        relief = min(EXCULPATION_MOST, (100 - share) / (3 * share))
        in_order = placed >= 0
        overtaken = (candidates >= self._floor) & (candidates < self.low)
        relevant = in_order | (in_dataset & ~excused & ~overtaken.any(axis=0))
        for index in np.flatnonzero(relevant):
            self.observations += 1
            good, is_read = bool(in_order[index]), bool(reads[index])
            self._recent.append(good)
            if good:
                self._confirm(int(placed[index]), is_read, relief, share, zone_end, now)
            else:
                self._stray(int(inos[index]), candidates[:, index], is_read, now)

    def _confirm(
        self, position: int, is_read: bool, relief: float, share: int, zone_end: int, now: float
    ) -> None:
        relief *= 1 if is_read else self.spacing
        self._lookup_evidence -= relief
        if self._lookup_evidence <= 0:
            self._read_evidence = max(0.0, self._read_evidence + self._lookup_evidence)
            self._lookup_evidence = 0.0
            self._lookups_since = None
        strays = len(self._recent) - sum(self._recent)
        if strays >= STRAYS_ABOUND:
            hits = len(self._recent) - strays
            if position >= zone_end - 3 * self.spacing:
                return  # beyond the disorder: it would push `low` past the one who follows
            if chance(hits, len(self._recent), share) > CHANCE_ERROR:
                return
        self.begun = True
        self.confirmed_at = now
        self.high = max(self.high, position + 1)

    def reach(self, position: int, now: float) -> None:
        """All wires before `position` have fired: chance cannot do that."""
        if position > self.high:
            self.begun = True
            self.confirmed_at = now
            self.high = position

    def _stray(self, ino: int, candidates: Positions, is_read: bool, now: float) -> None:
        self.strays += 1
        if is_read:
            self._read_evidence += 1
            self._stray_reads.append(candidates)
            return
        before, slow_s = self._stray_lookups_at, 2 * self.spacing / SCANNED_PER_S
        self._is_slow = (
            len(before) == 2
            and now - before[0] >= slow_s
            and min(now - before[1], before[1] - before[0]) >= slow_s / 8
            and not self._stray_reads
        )
        is_reader = self._is_slow or ino < self._last_stray_ino
        self._lookup_evidence += 2 * self.spacing if is_reader else 1
        self._last_stray_ino = ino
        before.append(now)
        self._stray_lookups.append(candidates)
        if self._lookups_since is None:
            self._lookups_since = now

    def condemned(self, now: float) -> bool:
        """Whether the hint is wrong, by what has been seen."""
        if self._read_evidence >= CONDEMNED_SAMPLES:
            return True
        least_s = SLOW_LOOKUPS_LAST_S if self._is_slow else LOOKUPS_LAST_S
        lasted = self._lookups_since is not None and now - self._lookups_since >= least_s
        return lasted and self._read_evidence + self._lookup_evidence >= CONDEMNED_SAMPLES

    # --- moving

    def settle(self, unfired: int | None, wired_from: int | None) -> None:
        """Moves `low` up: to the first wire that has not fired, less the batches that are being
        read, and never more than `slack` behind `high`. Before `wired_from` (None: anywhere) no
        wires are laid, and that none stands there says nothing of a slow worker.
        """
        first = self.high if unfired is None else min(unfired, self.high)
        seen = max(self._unstepped, self.high - self.slack)
        if wired_from is not None and first - self._reading >= wired_from:
            seen = max(seen, first - self._reading)
        self._unstepped = seen
        self._advance(max(self.low, seen))

    def _advance(self, low: int) -> None:
        self.passed_samples += low - self.low
        self.low = low

    def step(self, position: int, now: float) -> None:
        """The trainer has taken all samples before `position`."""
        back = self._last_step is not None and position < self._last_step
        self._last_step = self._told = position
        if back or position > self.high + self.disorder + 4 * self.spacing:
            self.move(position, now)
        self.begun = True
        self.confirmed_at = now
        self.high = max(self.high, position)
        if position > self.low:
            self._advance(position)

    def move(self, position: int, now: float) -> None:
        """The reader is found at another place."""
        self.moves += not self.low <= position <= self.high
        self.moved_to = position
        if position > self.low:
            self._advance(position)
        self.low = self.high = self._unstepped = position
        self._paced = (now, position)
        self.confirmed_at = now
        self.forget()

    def begin(self, position: int, now: float) -> None:
        """The trainer says that it begins there."""
        self._told = position
        self.move(position, now)

    def begin_again(self, now: float) -> None:
        """All that was seen says nothing of the reader: he is where the trainer said last."""
        self.move(self._told, now)

    def jump(self) -> int | None:
        """Another place that the strays agree on, if the present one explains nothing."""
        if self.is_epoch_short:
            return None  # chance agrees as well; search.py looks for him
        hits = sum(list(self._recent)[-STRAYS:])
        seen = min(len(self._recent), STRAYS)
        if not seen or chance(hits, seen, self._share_percent(self.zone_end(None))) < CHANCE_ERROR:
            return None
        kinds = (
            (self._stray_reads, STRAYS, self.disorder + SPACING_LEAST),
            (self._stray_lookups, 8, self.disorder + 8 * self.spacing),
        )
        for strays, most, span in kinds:
            if len(strays) < 4:
                continue
            last = [stray for stray in list(strays)[-most:] if len(stray) == len(strays[-1])]
            for row in np.array(last).T:
                if (place := self._cluster(row, span)) is not None:
                    return place
        return None

    def _cluster(self, row: Positions, span: int) -> int | None:
        """Where the last of these positions and enough others lie within `span` of each other."""
        share = max(1, -(-span * 100 // max(1, self._epoch_samples)))
        newest = int(row[-1])
        if newest < 0 or share > 60:
            return None
        close = row[(row >= 0) & (abs(row - newest) < span)]
        # the newest one is the centre: it proves nothing, and others may lie on both its sides
        if chance(len(close) - 1, len(row) - 1, min(2 * share, 99)) >= JUMP_ERROR:
            return None
        return int(close.min())

    # --- time

    def pace(self, now: float) -> None:
        """Measures the reader's speed; call it often."""
        then, position = self._paced
        if now - then < (PACE_S if self.samples_per_s else PACE_FIRST_S):
            return
        speed = max(0, self.high - position) / (now - then)
        self.samples_per_s = speed if not self.samples_per_s else (self.samples_per_s + speed) / 2
        self._paced = (now, self.high)

    def idle(self, now: float) -> bool:
        """Nothing was read for a while, or nothing since it was announced."""
        return now - self.confirmed_at > IDLE_AFTER_S

    def finished(self, total: int, now: float) -> bool:
        """Whether all `total` samples are read: the last one was seen (or, the wire having gone
        astray, one of the last), and then nothing for a while.
        """
        quiet_s = now - self.confirmed_at
        return (
            self.low >= total
            or (self.high >= total and quiet_s > AT_END_S)
            or (self.high >= total - self.slack and quiet_s > NEAR_END_S)
        )

    def check_invariants(self) -> None:
        assert self.low <= self.high
        assert self.high - self.low <= self.slack, (self.low, self.high)
        assert self._read_evidence >= 0
        assert self._lookup_evidence >= 0
