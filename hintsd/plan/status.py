"""The figures of one job, as hintsd knows them now: for `hintsd status` (cli/report.py says how
they are shown) and the log (pure).

Reads the plan, changes nothing. INVARIANT: plain Python values; the work is bounded by READY_MOST,
STALL_SAMPLES_MOST and the job's window.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from hintsd.plan.files import STAGED, STORED, Files
from hintsd.plan.job import Job, samples_read
from hintsd.plan.ram import OUTSIDE_SHARE, Ram

READY_MOST = 1 << 14
STALL_SAMPLES_MOST = 1 << 16
STALL_S_LEAST = 0.05  # less is shown as none

Floats = npt.NDArray[np.float64]

NAMES: Final = (
    *("name", "path", "mountpoint", "pid", "age_s", "state", "reason"),
    *("epoch", "epochs", "index", "samples", "window_bytes", "ahead_bytes"),
    *("not_late", "late", "unplanned", "predicted_stall_s", "samples_per_s"),
    *("layout", "layout_why", "ram_needed_bytes"),
    *("reclaimed", "withheld_bytes"),
    *("hits", "kept_bytes", "scores_age_s", "substituted", "h_list"),
    *("cached_bytes", "share_bytes", "share_why"),
)
"""Of what `hintsd status --json` has of every job, be it live or ended (docs/WIRE.md)."""


class Rates(NamedTuple):
    """What a second of reading there gives; 0: not known."""

    origin_bytes_per_s: float = 0.0
    ssd_bytes_per_s: float = 0.0


class Hits:
    """Of the samples that the jobs of one mount have read since one of them began, the share that
    needed no file of the origin: 1 - files read there / samples. What anybody else reads through
    the mount counts against them. With one job it is that job's.
    """

    def __init__(self) -> None:
        self._origin_files = 0
        self._told: int | None = None  # by this server, last
        self._read_before = 0  # by jobs that are closed
        self._begun: dict[str, tuple[int, int]] = {}  # files and samples when a job began

    def tell(self, origin_files: int) -> None:
        """So many the mount's server has read there; less than it said before: another server."""
        if self._told is not None:
            is_other = origin_files < self._told
            self._origin_files += origin_files - (0 if is_other else self._told)
        self._told = origin_files

    def open(self, job: Job, others: Collection[Job]) -> None:
        """It begins, beside the others of the mount."""
        self._begun[job.name] = self._origin_files, self._read(others)

    def close(self, job: Job) -> None:
        """It ends."""
        self._read_before += samples_read(job)
        del self._begun[job.name]

    def of(self, job: Job, jobs: Collection[Job]) -> float | None:
        """Since it began; `jobs`: all of the mount. None: nothing was read yet."""
        files_before, read_before = self._begun[job.name]
        read = self._read(jobs) - read_before
        if read <= 0:
            return None
        return max(0.0, 1 - (self._origin_files - files_before) / read)

    def _read(self, jobs: Collection[Job]) -> int:
        return self._read_before + sum(samples_read(job) for job in jobs)


def unknown() -> dict[str, Any]:
    """A job of which nothing is known."""
    return dict.fromkeys(NAMES)


def status(job: Job, jobs: Collection[Job], files: Files, ram: Ram, rates: Rates) -> dict[str, Any]:
    """Figures of `job`; all but how it lies on SSD (`Layout.status`). `jobs`: all of the mount."""
    progress = job.progress
    total = job.sequence.total
    epoch, index = job.sequence.at(job.sequence.last(progress.high))
    if total is not None and progress.high >= total > 0:
        epoch, index = epoch - 1, job.sequence.length(epoch - 1)
    return {
        "state": job.state,
        "reason": job.reason,
        "epoch": epoch,
        "epochs": job.sequence.epochs,
        "index": index,
        "samples": job.sequence.length(epoch),
        "window_bytes": _distinct_bytes(job, jobs, files, ram),
        "ahead_bytes": _ahead_bytes(job, files, ram),
        "not_late": _not_late(job),
        "late": {reason: count for reason, count in job.tally.late.items() if count},
        "unplanned": {reason: count for reason, count in job.tally.unplanned.items() if count},
        "predicted_stall_s": _predicted_stall_s(job, files, rates),
        "samples_per_s": progress.samples_per_s,
        "ram_needed_bytes": _ram_needed_bytes(jobs, ram) if job.live else None,
    }


def _ram_needed_bytes(jobs: Collection[Job], ram: Ram) -> int | None:
    """The mount's budget of RAM that would do, where this one does not take what its jobs read
    at once, twice: windows keep no distance then, and most reads come before their files.
    """
    need_bytes = sum(job.at_once_bytes for job in jobs if job.live)
    if need_bytes <= ram.budget_bytes:
        return None
    return math.ceil(need_bytes * OUTSIDE_SHARE / (OUTSIDE_SHARE - 1))


def _not_late(job: Job) -> int:
    """Never more than the job has: a reader that goes back passes samples again."""
    count = max(0, samples_read(job) - job.tally.misses)
    return count if job.sequence.total is None else min(count, job.sequence.total)


def _distinct_bytes(job: Job, jobs: Collection[Job], files: Files, ram: Ram) -> int:
    """Bytes of its window, a file of two epochs counted once."""
    if all(other is job or other.window.begin == other.window.end for other in jobs):
        return ram.wanted_bytes  # no other job wants any
    window, epoch_of = job.window, job.sequence.epoch_of
    pieces = list(job.sequence.pieces(window.begin, window.end))
    is_of_one = epoch_of(window.begin) == epoch_of(max(window.end - 1, 0))
    if is_of_one and not any(repeats for _, repeats in pieces):
        return window.size_bytes
    in_window = np.zeros(len(files.flags), np.bool_)
    for inos, _ in pieces:
        in_window[inos] = True
    return ram.total_bytes(np.flatnonzero(in_window).astype(np.uint32))


def _ahead_bytes(job: Job, files: Files, ram: Ram) -> int:
    """Bytes that the reader finds in RAM before the first that is missing (of the next
    READY_MOST files).
    """
    start = max(job.window.begin, job.progress.high)
    total = 0
    stop = min(job.window.end, start + READY_MOST)
    for inos, _ in job.sequence.pieces(start, max(start, stop)):
        sizes = ram.bytes_of(inos)
        missing = np.flatnonzero((files.flags[inos] & STAGED == 0) & (sizes > 0))
        if len(missing):
            return total + int(sizes[: missing[0]].sum())
        total += int(sizes.sum())
    return total


def _predicted_stall_s(job: Job, files: Files, rates: Rates) -> float | None:
    """Of the rest of this epoch (`stall_seconds`); of many samples every m-th stands for m. None:
    there would be none, but reads were late just now: for reasons that the model does not know (a
    rate that is not known, processors, hintsd itself).
    """
    start, sequence = job.progress.high, job.sequence
    stop = min(sequence.start(sequence.epoch_of(start) + 1), sequence.known_until(start))
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
    seconds = float(stall_seconds(sizes, speeds, consumer))
    return None if job.tally.is_late and seconds < STALL_S_LEAST else seconds


def _available_s(sizes: Floats, rates: Floats) -> Floats:
    """When each sample is there, from now (HDMLP: avail).

    sizes: bytes; rates: bytes/s of the source each sample comes from, inf: it is there already,
    0 or less: unknown, counted as there. Shape (samples,), in order of need.
    """
    at = np.zeros(len(sizes))
    for rate in np.unique(rates[np.isfinite(rates) & (rates > 0)]):
        here = rates == rate
        at[here] = np.cumsum(sizes[here]) / rate
    return at


def stall_seconds(sizes: Floats, rates: Floats, consumer_bytes_per_s: float) -> float:
    """Seconds that the consumer stands still until it has taken all samples: HDMLP's performance
    model (section 4) on one node.

    A consumer that could take `consumer_bytes_per_s` stands still whenever the next sample is not
    available: t_f = max(avail(f), t_{f-1} + s_{f-1} / c). Sources work side by side (the page
    cache, SSD, the origin), each delivering its own samples in order of need.

    The recurrence has a closed form: with C_f = Σ_{k<f} s_k / c,
    t_f = C_f + max_{g<=f}(avail(g) - C_g), so the stall is that last maximum.
    """
    if len(sizes) == 0 or consumer_bytes_per_s <= 0:
        return 0.0
    computed = np.concatenate([[0.0], np.cumsum(sizes[:-1])]) / consumer_bytes_per_s
    return max(0.0, float((_available_s(sizes, rates) - computed).max()))
