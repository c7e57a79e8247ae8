"""Where a job's readers are in its access sequence (pure).

Positions are those of sequence.py. Two marks are kept: `high`, the furthest position seen,
and `low`, before which all is read. Between them lies the disorder of a DataLoader: w workers read
w batches at once, and up to w * prefetch_factor batches are handed out ahead of the oldest.

What is observed: READs that reached the server, LOOKUPs of armed files (wires; in the steady state
nothing else), and the steps a trainer reports.

**In order** is an observation whose file is used between `low` and `zone_end`: the disorder and a
few wires beyond the first wire that has not fired. A burst of foreign look-ups (`ls -l`) can
therefore not carry the position away: it fires wires here and there, but not each one in turn.
While strays abound, the position moves only if chance does not explain the share in order.

Whether the hint is wrong, and where the reader is if it is elsewhere, evidence.py weighs. Where
look-ups cannot tell one place of an epoch from another (`is_to_be_checked`), it condemns no job:
there search.py looks for the reader, and that decides.

INVARIANT: low ≤ high ≤ low + slack; all before `low` is read, as far as can be told.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hintsd.follow.evidence import Evidence
from hintsd.follow.sequence import FAR, Positions

SPACING_LEAST = 64  # samples between wires: arming costs readers a few per cent at most
SPACING_BYTES = (
    8 << 20
)  # of large samples, instead: to read these takes 200 times as long as a wire
UNKNOWN_WORKERS, UNKNOWN_PREFETCH_FACTOR = 16, 2
IDLE_AFTER_S = 60.0
NEAR_END_S = 30.0
AT_END_S = 2.0  # the last batches are read, when nothing was seen for so long after the last sample

PACE_FIRST_S, PACE_S = 0.2, 1.0

Mask = npt.NDArray[np.bool_]


def wire_spacing(batch_size: int, sample_bytes: float = 0.0) -> int:
    """Samples from one wire to the next: whole batches when they are small, else a batch or an even
    part of it (64 to 255 samples), so that a batch begins with a wire if that is even. Fewer of
    large samples, SPACING_BYTES or less; `sample_bytes`: of one, about.
    """
    least = int(min(SPACING_LEAST, max(1, SPACING_BYTES // max(1, sample_bytes))))
    if batch_size < least:
        return -(-least // batch_size) * batch_size
    if least < SPACING_LEAST:
        return next(part for part in range(least, 0, -1) if batch_size % part == 0)
    return batch_size // max(1, batch_size // (2 * SPACING_LEAST))


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
        sample_bytes: float = 0.0,
    ) -> None:
        """`sample_bytes`: of one, about; 0: not known."""
        workers_assumed = workers or UNKNOWN_WORKERS
        handed_out = workers_assumed * (prefetch_factor or UNKNOWN_PREFETCH_FACTOR) + 1
        if workers == 1:
            handed_out = 1  # one worker reads its batches one after another
        self.spacing = wire_spacing(batch_size, sample_bytes)
        self.workers = workers
        """0: not known."""
        self._handed_out = handed_out * batch_size
        # a worker that begins a batch has read its one before; no wire tells that of small batches
        is_told = self.spacing <= batch_size
        self._under_way = workers_assumed * batch_size if is_told else self._handed_out
        self.is_low_known = workers > 1
        """Whether all that lies before `low` was read: a slow worker is waited for."""
        self._told = self.low = self.high = start  # _told: by the trainer, the last time
        # `high` and `low`, had there been no steps; and `low` a while ago
        self._observed = self._unstepped = self._low_before = start
        self.moves, self.moved_to = 0, start  # to where its way did not lead; the last place
        self._unseen = 0  # samples beyond `high` that may be read: others have fired the wires
        self._has_repeats = False
        self.begun = False
        self.passed_samples = 0
        self.samples_per_s = 0.0
        self.confirmed_at = now
        self._paced, self._paced_low = (now, start), start
        self._last_step: int | None = None
        self.evidence = Evidence(spacing=self.spacing, read_span=SPACING_LEAST)
        self.resize(samples_per_epoch)

    def resize(self, samples: int) -> None:
        """The reader is in an epoch of this length."""
        self._epoch_samples, quarter = samples, max(1, samples // 4)
        # All of a short epoch may be handed out: less, and `low` would pass what is not read yet.
        self.disorder = min(self._handed_out, samples)
        self.is_scattered = self.disorder > quarter
        """Whether so much is read at once that an epoch's files come in little order."""
        self.near_end = min(self.slack, quarter)
        """So many samples before its end an epoch may be read already. No more: where most of one
        is in flight, the reader waits for a validation, say.
        """
        self._reading = min(self._under_way, samples)
        # workers that are only assumed take no more of the RAM
        at_once = self._reading if self.workers else min(self._reading, quarter)
        self.at_once = at_once + self.spacing
        """Samples from the first to the last that are being read, as far as wires tell."""
        self.evidence.resize(samples, self.disorder)
        self._advance(max(self.low, self.high - self.slack))

    # --- the zone

    def expect_unseen(self, stolen: int, *, has_repeats: bool = False) -> None:
        """So many wires beyond `high` others have fired: the reader may have passed them.
        `has_repeats`: an epoch may read a file more than once.
        """
        self._has_repeats = has_repeats
        # not more: if all were in order, no wrong hint would be noticed
        self._unseen = min(self.spacing * stolen, self._epoch_samples // 4)

    def zone_end(self, unfired: int | None) -> int:
        """End of what is in order; `unfired`: the first wire from `low` on that has not fired."""
        base = self.high if unfired is None else min(unfired, self.high)
        return max(base + self.disorder + 4 * self.spacing + self._unseen, self.high + 1)

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
    def floor(self) -> int:
        """What is used from here on may be told of only now: a step is here before the reads that
        it is about, by as much as a reader comes on in PACE_S on a busy machine. Where files come
        again, any use of one fires its wire: a slow worker may be `slack` behind.
        """
        told = min(self._unstepped, self.low - self.slack) if self._has_repeats else self._unstepped
        return max(0, told, min(self.low, self._low_before) - self.slack)

    def place(self, candidates: Positions, unfired: int | None) -> Positions:
        """The position in order of each observed file, or -1. `candidates`: Sequence.locate."""
        if candidates.size == 0:
            return np.full(candidates.shape[1:], -1, np.int64)
        # of two uses (an epoch's end and the next one's beginning) the first: it moves nothing
        nearest: Positions = np.minimum.reduce(np.where(candidates >= self.floor, candidates, FAR))
        return np.where((nearest >= self.low) & (nearest < self.zone_end(unfired)), nearest, -1)

    # --- evidence

    def take(
        self,
        inos: npt.NDArray[np.uint32],
        candidates: Positions,
        placed: Positions,
        reads: Mask,
        strays: Mask,
        unfired: int | None,
        now: float,
    ) -> None:
        """Weighs one batch of observations. `candidates`: Sequence.locate (with strays, from
        `floor` on where a file may come again: what was read may be the earlier use). `placed`:
        what `place` said; `strays`: they say something about this job, and are in order for none.
        """
        relevant = placed >= 0
        if np.count_nonzero(strays):
            overtaken = (candidates >= self.floor) & (candidates < self.low)
            relevant |= strays & ~np.logical_or.reduce(overtaken)
        zone_end = self.zone_end(unfired)
        share = self.evidence.share_percent(zone_end - self.low)
        for index in np.flatnonzero(relevant).tolist():
            position, is_read = int(placed[index]), bool(reads[index])
            if position >= 0:
                self.evidence.follow(is_read, share)
                self._confirm(position, share, zone_end, now)
            else:
                self.evidence.stray(int(inos[index]), candidates[:, index], is_read, now)

    def _confirm(self, position: int, share: int, zone_end: int, now: float) -> None:
        if self.evidence.do_strays_abound and (
            # beyond the disorder: it would push `low` past the one who follows
            position >= zone_end - 3 * self.spacing or self.evidence.is_chance(share)
        ):
            return
        self.begun = True
        self.confirmed_at = now
        self.high = max(self.high, position + 1)
        self._observed = max(self._observed, position + 1)

    def reach(self, position: int, now: float) -> None:
        """All wires before `position` have fired: chance cannot do that."""
        if position > self.high:
            self.begun = True
            self.confirmed_at = now
            self.high = self._observed = position

    # --- moving

    def settle(self, unfired: int | None, wired_from: int | None) -> None:
        """Moves `low` up: to the first wire that has not fired, less the batches that are being
        read, and never more than `slack` behind `high`. Before `wired_from` (None: anywhere) no
        wires are laid, and that none stands there says nothing of a slow worker.
        """

        def behind(high: int) -> int:
            first = high if unfired is None else min(unfired, high)
            if wired_from is not None and first - self._reading >= wired_from:
                return max(high - self.slack, first - self._reading)
            return high - self.slack

        self._unstepped = max(self._unstepped, behind(self._observed))
        self._advance(max(self.low, behind(self.high)))

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

    def enter(self, start: int) -> None:
        """The reader is found in the epoch that begins there: a loader begins it when all before
        is read.
        """
        self._unstepped = max(self._unstepped, start)
        self._observed = max(self._observed, start)
        self.high = max(self.high, start)
        self._advance(max(self.low, start))

    def find(self, position: int, now: float) -> None:
        """The reader is seen to read at another place."""
        self.move(position, now)
        self.begun = True

    def confirm(self, now: float) -> None:
        """It is about to read."""
        self.confirmed_at = now

    def move(self, position: int, now: float) -> None:
        """The reader is at another place."""
        self.moves += not self.low <= position <= self.high
        self.moved_to = position
        if position > self.low:
            self._advance(position)
        self.low = self.high = position
        self._observed = self._unstepped = self._low_before = position
        self._paced, self._paced_low = (now, position), position
        self.confirmed_at = now
        self.evidence.forget()

    def begin(self, position: int, now: float) -> None:
        """The trainer says that it begins there."""
        self._told = position
        self.move(position, now)

    def begin_again(self, now: float) -> None:
        """All that was seen says nothing of the reader: it is where the trainer said last."""
        self.move(self._told, now)

    def jump(self) -> int | None:
        """Another place that the strays agree on, if the present one explains nothing."""
        if 4 * (self.disorder + 4 * self.spacing) > self._epoch_samples:
            return None  # so much is in order: chance agrees as well; search.py looks for it
        share = self.evidence.share_percent(self.zone_end(None) - self.low)
        return self.evidence.elsewhere(share)

    # --- time

    def pace(self, now: float) -> None:
        """Measures the reader's speed; call it often."""
        then, position = self._paced
        if now - then < (PACE_S if self.samples_per_s else PACE_FIRST_S):
            return
        speed = max(0, self.high - position) / (now - then)
        self.samples_per_s = speed if not self.samples_per_s else (self.samples_per_s + speed) / 2
        self._paced = (now, self.high)
        self._low_before, self._paced_low = self._paced_low, self.low

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
            or (self.high > total - self.near_end and quiet_s > NEAR_END_S)
        )

    def check_invariants(self) -> None:
        assert self.low <= self.high
        assert self.high - self.low <= self.slack, (self.low, self.high)
        self.evidence.check_invariants()


def are_late(progress: Progress, placed: Positions, candidates: Positions) -> Mask:
    """Which of what `place` said, further on than the next wires, may be a late word of an earlier
    use, and says nothing. `candidates`: Sequence.locate from `floor` on.
    """
    is_earlier = (candidates >= progress.floor) & (candidates < progress.low)
    is_far: Mask = placed >= progress.high + 2 * progress.spacing
    return is_far & is_earlier.any(axis=0)
