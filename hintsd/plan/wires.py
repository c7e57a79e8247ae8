"""Arming: files of a mount whose next look-up is told (docs/HINTS.md rule 4; pure).

In the steady state no READ reaches the mount, and look-ups of armed files are all that is seen.
Which files those are: wiring.py, for each job.

INVARIANT: a file is ARMED from when the mount is told until it was looked up.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hintsd.follow.sequence import NO_POSITIONS, Inos, Positions
from hintsd.plan.files import ARMED, Files
from hintsd.plan.job import Job
from hintsd.policies import Mask

ARM_MOST = 4096


class Wires:
    """Those of one mount's jobs."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._stolen: list[Inos] = []  # ARMED, but the mount has them no more
        self._asked: list[Inos] = []  # ARMED, and to be sent

    def void(self) -> None:
        """Nothing is armed any more."""
        self._files.unmark_all(ARMED)
        self._stolen.clear()
        self._asked.clear()

    def disarm(self, inos: Inos) -> None:
        """They were looked up."""
        self._files.unmark(inos, ARMED)

    def take_away(
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
            if job.live:
                stolen |= job.wiring.steal(where, theirs & ~reads)
        self.disarm(inos[~reads & ~stolen])
        if stolen.any():
            self._files.mark(inos[stolen], ARMED)
            self._stolen.append(inos[stolen])

    def lay(self, jobs: Iterable[Job], now: float) -> list[Inos]:
        """Files to be armed now."""
        parts = [np.unique(self._files.having(inos, ARMED)) for inos in self._stolen]
        self._stolen.clear()
        for job in jobs:
            if job.state == "done" or not job.sequence.orders:
                continue
            wiring = job.wiring
            where = [wiring.ahead(), *wiring.sentinels(now)] if job.live else []
            laid = np.concatenate([*where, _for_search(job, now)])
            inos = job.sequence.inos_at(wiring.without_fired(laid))
            inos = inos[(inos != 0) & (self._files.flags[inos] & ARMED == 0)]
            if len(inos):
                inos = np.unique(inos)[:ARM_MOST]
                self._files.mark(inos, ARMED)
                parts.append(inos)
        asked, self._asked = self._asked, []
        return parts + asked

    def ask(self, inos: Inos) -> None:
        """These, too, are to be armed next."""
        self._files.mark(inos, ARMED)
        self._asked.append(inos)


def _for_search(job: Job, now: float) -> Positions:
    if job.search is None or not job.search.are_wires_due(now):
        return NO_POSITIONS
    return job.wiring.over_an_epoch(job.search_spacing)
