"""Whether anybody follows a job's order: what speaks for it, and what against it (pure).

**Wrong hints** (docs/HINTS.md rule 6). Two hypotheses. W: no reader follows this order, an
observation is in order with probability q, the zone's share of the epoch. R: somebody does, and at
least one in nine samples read is its own (another, unhinted reader may be beside it). Page's
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

**Elsewhere.** Strays that lie close together in a known epoch are the reader itself, somewhere
else: resumed, begun again, or in the next epoch already. Such a place is found if chance
explains it with less than JUMP_ERROR. The same heals a verdict of "wrong".

INVARIANT: the evidence against the hint is never negative: a reader that follows it earns no
credit.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache

import numpy as np

from hintsd.follow.sequence import Positions

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
AGREE_LEAST = 4  # strays that may agree on a place


@lru_cache(maxsize=4096)
def chance(hits: int, tries: int, share_percent: int) -> float:
    """P(at least `hits` of `tries` | each with probability share_percent / 100)."""
    share = share_percent / 100
    return sum(
        math.comb(tries, n) * share**n * (1 - share) ** (tries - n) for n in range(hits, tries + 1)
    )


class Evidence:
    """Of one job, since the last verdict or jump."""

    def __init__(self, *, spacing: int, read_span: int) -> None:
        """`spacing`: samples from wire to wire; `read_span`: what strays that are READs may lie
        apart.
        """
        self._spacing, self._read_span = spacing, read_span
        self.resize(0, 0)
        self.forget()

    def resize(self, epoch_samples: int, disorder: int) -> None:
        """The reader is in an epoch of this length; `disorder`: of it may be read in any order."""
        self._epoch_samples, self._disorder = epoch_samples, disorder

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

    def share_percent(self, samples: int) -> int:
        """q, the chance of being in order, among so many samples, without following, in per cent
        (1 … 75).
        """
        return min(max(samples * 100 // max(1, self._epoch_samples), 1), 75)

    def follow(self, is_read: bool, share: int) -> None:
        """An observation in order; `share`: q."""
        self.observations += 1
        self._recent.append(True)
        if not self.strays:
            return  # there is no evidence against the hint
        relief = min(EXCULPATION_MOST, (100 - share) / (3 * share))
        self._lookup_evidence -= relief * (1 if is_read else self._spacing)
        if self._lookup_evidence <= 0:
            self._read_evidence = max(0.0, self._read_evidence + self._lookup_evidence)
            self._lookup_evidence = 0.0
            self._lookups_since = None

    def stray(self, ino: int, candidates: Positions, is_read: bool, now: float) -> None:
        """An observation that is not. `candidates`: where its file stands in the known epochs."""
        self.observations += 1
        self.strays += 1
        self._recent.append(False)
        if is_read:
            self._read_evidence += 1
            self._stray_reads.append(candidates)
            return
        before, slow_s = self._stray_lookups_at, 2 * self._spacing / SCANNED_PER_S
        self._is_slow = (
            len(before) == 2
            and now - before[0] >= slow_s
            and min(now - before[1], before[1] - before[0]) >= slow_s / 8
            and not self._stray_reads
        )
        is_reader = self._is_slow or ino < self._last_stray_ino
        self._lookup_evidence += 2 * self._spacing if is_reader else 1
        self._last_stray_ino = ino
        before.append(now)
        self._stray_lookups.append(candidates)
        if self._lookups_since is None:
            self._lookups_since = now

    @property
    def do_strays_abound(self) -> bool:
        return self.strays >= STRAYS_ABOUND and self._recent.count(False) >= STRAYS_ABOUND

    def is_chance(self, share: int) -> bool:
        """Whether chance may explain how many of the last observations were in order."""
        return chance(sum(self._recent), len(self._recent), share) > CHANCE_ERROR

    def condemned(self, now: float) -> bool:
        """Whether the hint is wrong, by what has been seen."""
        if self._read_evidence >= CONDEMNED_SAMPLES:
            return True
        least_s = SLOW_LOOKUPS_LAST_S if self._is_slow else LOOKUPS_LAST_S
        lasted = self._lookups_since is not None and now - self._lookups_since >= least_s
        return lasted and self._read_evidence + self._lookup_evidence >= CONDEMNED_SAMPLES

    def elsewhere(self, share: int) -> int | None:
        """Another place that the strays agree on, if the present one explains nothing."""
        if max(len(self._stray_reads), len(self._stray_lookups)) < AGREE_LEAST:
            return None
        hits = sum(list(self._recent)[-STRAYS:])
        seen = min(len(self._recent), STRAYS)
        if not seen or chance(hits, seen, share) < CHANCE_ERROR:
            return None
        kinds = (
            (self._stray_reads, STRAYS, self._disorder + self._read_span),
            (self._stray_lookups, 8, self._disorder + 8 * self._spacing),
        )
        for strays, most, span in kinds:
            if len(strays) < AGREE_LEAST:
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

    def check_invariants(self) -> None:
        assert self._read_evidence >= 0
        assert self._lookup_evidence >= 0
