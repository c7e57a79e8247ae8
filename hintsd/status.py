"""The figures of one job, as hintsd knows them now: for `hintsd status` (hintsd/report.py says how
they are shown) and the log (pure).

Reads the plan, changes nothing. INVARIANT: plain Python values; the work is bounded by READY_MOST,
STALL_SAMPLES_MOST and the job's window.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final, NamedTuple

import numpy as np

from hintsd import stall
from hintsd.files import STAGED, STORED, Files
from hintsd.job import Job

READY_MOST = 1 << 14
STALL_SAMPLES_MOST = 1 << 16
STALL_S_LEAST = 0.05  # less is shown as none


NAMES: Final = (
    *("name", "path", "mountpoint", "pid", "age_s", "state", "reason"),
    *("epoch", "epochs", "index", "samples", "window_bytes", "ahead_bytes"),
    *("not_late", "late", "unplanned", "predicted_stall_s", "samples_per_s"),
    *("layout", "layout_why", "ram_needed_bytes"),
)
"""Of what `hintsd status --json` has of every job, be it live or ended (docs/WIRE.md)."""


def unknown() -> dict[str, Any]:
    """A job of which nothing is known."""
    return dict.fromkeys(NAMES)


class Rates(NamedTuple):
    """What the mount reads at most; 0: not known."""

    origin_bytes_per_s: float
    ssd_bytes_per_s: float


def status(job: Job, jobs: Collection[Job], files: Files, rates: Rates) -> dict[str, Any]:
    """Figures of `job`; all but how it lies on SSD (`Layout.status`), and what RAM its mount needs.
    `jobs`: all of the mount.
    """
    progress = job.progress
    n = job.sequence.samples_per_epoch
    epoch, index = divmod(job.last(progress.high), n)
    if job.total is not None and progress.high >= job.total > 0:
        epoch, index = epoch - 1, n
    return {
        "state": job.state,
        "reason": job.reason,
        "epoch": epoch,
        "epochs": job.epochs,
        "index": index,
        "samples": n,
        "window_bytes": _distinct_bytes(job, jobs, files),
        "ahead_bytes": _ahead_bytes(job, files),
        "not_late": _not_late(job),
        "late": {reason: count for reason, count in job.late.items() if count},
        "unplanned": {reason: count for reason, count in job.unplanned.items() if count},
        "predicted_stall_s": _predicted_stall_s(job, files, rates),
        "samples_per_s": progress.samples_per_s,
    }


def _not_late(job: Job) -> int:
    """Never more than the job has: who goes back passes samples again."""
    progress = job.progress
    count = max(0, progress.passed_samples + progress.high - progress.low - job.misses)
    return count if job.total is None else min(count, job.total)


def _distinct_bytes(job: Job, jobs: Collection[Job], files: Files) -> int:
    """Bytes of its window, a file of two epochs counted once."""
    if all(other is job or other.begin == other.end for other in jobs):
        return files.wanted_bytes  # nobody else wants any
    n = job.sequence.samples_per_epoch
    pieces = list(job.sequence.pieces(job.begin, job.end))
    if job.begin // n == max(job.end - 1, 0) // n and not any(repeats for _, repeats in pieces):
        return job.window_bytes
    in_window = np.zeros(len(files.flags), np.bool_)
    for inos, _ in pieces:
        in_window[inos] = True
    return int(files.ram_bytes(np.flatnonzero(in_window).astype(np.uint32)).sum())


def _ahead_bytes(job: Job, files: Files) -> int:
    """Bytes that the reader finds in RAM before the first that is missing (of the next
    READY_MOST files).
    """
    start = max(job.begin, job.progress.high)
    total = 0
    stop = min(job.end, start + READY_MOST)
    for inos, _ in job.sequence.pieces(start, max(start, stop)):
        sizes = files.ram_bytes(inos)
        missing = np.flatnonzero((files.flags[inos] & STAGED == 0) & (sizes > 0))
        if len(missing):
            return total + int(sizes[: missing[0]].sum())
        total += int(sizes.sum())
    return total


def _predicted_stall_s(job: Job, files: Files, rates: Rates) -> float | None:
    """Of the rest of this epoch (hintsd/stall.py); of many samples every m-th stands for m. None:
    there would be none, but reads were late just now: for reasons that the model does not know (a
    rate that is not known, processors, hintsd itself).
    """
    start = job.progress.high
    n = job.sequence.samples_per_epoch
    stop = min((start // n + 1) * n, job.sequence.known_until(start))
    speed = job.progress.samples_per_s
    if stop <= start or not job.live or speed <= 0:
        return 0.0
    every = -(-(stop - start) // STALL_SAMPLES_MOST)
    inos = job.sequence.inos_at(np.arange(start, stop, every))
    sizes = files.sizes[inos].astype(np.float64) * every
    flags = files.flags[inos]
    speeds = np.where(flags & STORED != 0, rates.ssd_bytes_per_s, rates.origin_bytes_per_s)
    speeds[flags & STAGED != 0] = np.inf
    consumer = float(sizes.mean()) / every * speed
    seconds = float(stall.stall_seconds(sizes, speeds, consumer))
    return None if job.is_late and seconds < STALL_S_LEAST else seconds
