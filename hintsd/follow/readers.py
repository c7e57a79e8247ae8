"""Who reads: from the process that made a request to whose it is.

A job is announced by a process. What that process and its descendants read (threads, DataLoader
workers, whether forked, spawned or of a fork server) is the job's OWN; what any other process
reads, a STRANGER's. UNKNOWN: its ancestors have ended or are hidden (another pid namespace,
procfs's hidepid), or the job's process is not known (`hintsd hint` without --pid).

The mount tells the process and its parent as they were when the request was made: a process that
reads one file has ended before we hear of it. The ancestors are looked up here, once a second, so a
number that is used again is not believed for longer; one that has ended is believed for KEPT_S
more.

INVARIANT: a process is a STRANGER only if all its ancestors were seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fusecache.base.processes import parent

UNKNOWN, OWN, STRANGER, ANOTHERS = 0, 1, 2, 3
LOOKED_UP_EVERY_S: Final = 1.0
KEPT_S: Final = 5.0
LEFT_S: Final = 5.0  # what a job's process has read before it closed the job is told later
KNOWN_MOST: Final = 4096
ANCESTORS_MOST: Final = 256

Pids: TypeAlias = npt.NDArray[np.uint32]
Whose: TypeAlias = npt.NDArray[np.uint8]
Lineage: TypeAlias = tuple[int, ...]
"""A process, its parent, and so on; ends with 0 when all were seen."""


class Hinted(NamedTuple):
    """Of a job: what tells its readers from those of others."""

    process: int | None
    """That it is of; None: not known."""
    root: bytes
    """The dataset's directory relative to its mount."""
    is_followed: bool = True
    """Not taken for wrong: else its readers may be those of another job."""


class _Known(NamedTuple):
    lineage: Lineage
    looked_up_at: float


class Readers:
    """The ancestors of those that have read, as far as they matter still."""

    def __init__(self, parent_of: Callable[[int], int | None] = parent) -> None:
        self._parent_of = parent_of
        self._known: dict[int, _Known] = {}
        self._jobs: dict[Hinted, float] = {}  # those that there were lately: when

    def whose(
        self, processes: Pids, parents: Pids, jobs: Mapping[str, Hinted], now: float
    ) -> dict[str, Whose]:
        """How each request, of a process that has (or had) a parent, shapes (n,), stands to each of
        `jobs`: OWN, STRANGER, ANOTHERS or UNKNOWN, shape (n,).
        """
        trainers = self._trainers(jobs, now)
        pairs = processes.astype(np.uint64) << np.uint64(32) | parents
        different, which = np.unique(pairs, return_inverse=True)
        told: dict[tuple[tuple[Hinted, ...], bool], list[int]] = {}
        rows = []
        for pair in different.tolist():
            lineage = self._lineage(pair >> 32, pair & 0xFFFF_FFFF, now)
            owners = tuple(job for job in trainers if job.process in lineage)
            is_seen = bool(lineage) and lineage[-1] == 0
            if (owners, is_seen) not in told:  # all workers of a rank are alike
                told[owners, is_seen] = [_whose(job, owners, is_seen) for job in jobs.values()]
            rows.append(told[owners, is_seen])
        table = np.array(rows, np.uint8).reshape(len(different), len(jobs))
        return {job: table[which, column] for column, job in enumerate(jobs)}

    def _trainers(self, jobs: Mapping[str, Hinted], now: float) -> list[Hinted]:
        """Jobs of a process: these, and those that were closed a moment ago."""
        places = {(job.process, job.root) for job in jobs.values()}
        self._jobs = {
            job: last
            for job, last in self._jobs.items()
            if now - last < LEFT_S and (job.process, job.root) not in places
        }
        self._jobs |= {job: now for job in jobs.values() if job.process is not None}
        return list(self._jobs)

    def _lineage(self, process: int, parent: int, now: float) -> Lineage:
        return (process, *self._ancestors(parent, now)) if process else ()

    def _ancestors(self, process: int, now: float) -> Lineage:
        """Of a process's child."""
        known = self._known.get(process)
        if known is not None and now - known.looked_up_at < LOOKED_UP_EVERY_S:
            return known.lineage
        lineage = self._look_up(process)
        if len(lineage) > 1 or process == 0:
            if len(self._known) >= KNOWN_MOST:
                self._known.clear()
            self._known[process] = _Known(lineage, now)
        elif known is not None and now - known.looked_up_at < KEPT_S:
            return known.lineage
        return lineage

    def _look_up(self, process: int) -> Lineage:
        lineage = [process]
        while lineage[-1] and len(lineage) < ANCESTORS_MOST:
            parent = self._parent_of(lineage[-1])
            if parent is None:
                break
            lineage.append(parent)
        return tuple(lineage)


def _whose(job: Hinted, owners: tuple[Hinted, ...], is_seen: bool) -> int:
    """Of a request of these jobs' process, to a job. `is_seen`: all its ancestors were."""
    if job in owners:
        return OWN
    if any(owner.is_followed and _overlap(owner.root, job.root) for owner in owners):
        return ANOTHERS
    return STRANGER if is_seen and job.process is not None else UNKNOWN


def _overlap(root: bytes, other: bytes) -> bool:
    """Whether one of these directories is, or lies in, the other."""
    first, second = (path and path + b"/" for path in (root, other))
    return first.startswith(second) or second.startswith(first)
