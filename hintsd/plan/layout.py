"""How the samples of one mount's jobs lie on SSD: which job is packed, and which epoch of it is
moved into a log (docs/LOG.md, "When a dataset is packed"; pure).

What that log is: logs.py; how its chunks are staged: staging.py.

INVARIANT: one job of a mount is packed at a time; a log is announced before the first chunk of the
epoch that is moved into it.
INVARIANT: the first sample of an epoch of a job that is packed is staged when all of the epoch
before is answered, so that all is written to its log, or nothing of it comes any more (BARRIER_S).
"""

from __future__ import annotations

from collections.abc import Mapping

from hintsd.follow.sequence import NO_INOS
from hintsd.plan import packing
from hintsd.plan.commands import Command
from hintsd.plan.job import Job
from hintsd.plan.logs import NO_EPOCH, Logs, rhythm
from hintsd.plan.ram import Ram

CHUNK_PATIENCE_SHARE = 8  # readers may take an eighth of a chunk between two decisions
HOLD_S = 1.0  # a job waits so long for the next epoch's order before it is staged without a log
BARRIER_S = 1.0
PACK_FRAMES_MOST = 4  # in one decide()
REFUSED_AFTER_S = 1.0  # what the mount said before that may be of the log before


class Layout:
    """Of one mount. `jobs`: all of them, as they come and go."""

    def __init__(self, logs: Logs, ram: Ram, jobs: Mapping[str, Job]) -> None:
        self._logs, self._ram, self._jobs = logs, ram, jobs
        self._packer: str | None = None  # the job whose log there is
        self._packs: list[Command] = []
        self._moving_seen, self._moved_at = -1, 0.0  # how many at the barrier, and since when

    def void(self) -> None:
        """All that was sent is void: no job is packed."""
        for job in self._jobs.values():
            job.log.undecide()
        self._packs.clear()
        self._packer = None

    def _pack(self, fields: Mapping[str, object]) -> None:
        self._packs.append(Command("pack", NO_INOS, None, fields))

    def take_packs(self) -> list[Command]:
        """`pack` commands, to be sent before what is staged next."""
        packs, self._packs = self._packs, []
        return packs

    @property
    def has_packer(self) -> bool:
        """Whether a job is packed."""
        return self._packer is not None

    def refused(self, why: str, now: float) -> None:
        """The mount has no log open, for this reason, although one was announced."""
        job = self._jobs.get(self._packer or "")
        if job is None or not job.log.is_open or job.log.begun is None:
            return
        if now - job.log.begun[0] > REFUSED_AFTER_S:
            job.log.refuse(why)

    def is_packable(self, job: Job) -> bool:
        """Whether epochs of it may be moved into a log: they do not fit into RAM."""
        if self._logs.are_static or not job.live or job.is_lost:
            return False
        if self._packer not in (None, job.name) or self._ram.budget_bytes <= 0:
            return False
        self._logs.measure(job)
        return job.log.order_bytes is not None and job.log.order_bytes > self._ram.budget_bytes

    def epochs_ahead(self, job: Job) -> int:
        """So many orders are kept beside the current epoch's: when the next one begins to be
        staged, a log for those behind it is begun.
        """
        return 1 + self._logs.epochs_served(job) if self.is_packable(job) else 1

    def review(self) -> None:
        """A job that lost its reader, or has no room for two chunks any more, is packed no more, or
        anew.
        """
        for job in self._jobs.values():
            if job.log.chunks and not (self.is_packable(job) and self._logs.fits(job)):
                self.end(job)

    def end(self, job: Job) -> None:
        """The job's log is over; the mount is told."""
        if job.log.is_announced:
            self._pack(packing.END)
        if self._packer == job.name:
            self._packer = None
        job.log.forget()

    def patience_s(self) -> list[float]:
        """How long the next decision may wait where whole chunks are staged: a small part of one,
        while one is under way; else the disk is idle until the next is sent. []: there are none.
        """
        if self._packer is None:
            return []
        job = self._jobs[self._packer]
        stop = job.chunk_end(job.window.sent)
        if stop is None or not self._ram.stage_unanswered or job.log.is_being_announced:
            return [0.0]
        samples = (stop - job.window.sent) / CHUNK_PATIENCE_SHARE
        return [samples / max(job.progress.samples_per_s, 1.0)]

    def sendable_end(self, job: Job) -> int:
        """End of what may be staged of the window now: another epoch is decided on first."""
        window = job.window
        if not self.is_packable(job):
            return window.end
        n = job.sequence.samples_per_epoch
        return min(window.end, (window.sent // n + 1) * n)

    def is_loose(self, job: Job) -> bool:
        """Whether what is at `sent` may be staged, and belongs to no chunk."""
        log, epoch = job.log, job.sequence.epoch_of(job.window.sent)
        is_begun = not log.is_being_announced and epoch <= log.decided
        return (is_begun or not self.is_packable(job)) and epoch not in log.chunks

    def is_begun(self, job: Job, now: float) -> bool:
        """Whether the files at `sent` may be staged. Before an epoch's first ones are, it is
        decided whether it is moved into a log, and the mount is told.
        """
        log, epoch = job.log, job.sequence.epoch_of(job.window.sent)
        if not self.is_packable(job):
            return True
        if not log.is_being_announced and epoch > log.decided:
            if log.is_announced and self._is_moving(now):
                return False
            if self._waits_for_orders(job, epoch, now):
                return False
            self._decide_log(job, epoch, now)
        for fields in log.take_pieces(PACK_FRAMES_MOST):
            self._pack(fields)
        return not log.is_being_announced

    def _is_moving(self, now: float) -> bool:
        """Whether files are on their way to the log, and have become fewer within BARRIER_S: by
        answers, or as readers pass what is not answered yet.
        """
        if self._ram.moving != self._moving_seen:
            self._moving_seen, self._moved_at = self._ram.moving, now
        return self._ram.moving > 0 and now - self._moved_at < BARRIER_S

    def _waits_for_orders(self, job: Job, epoch: int, now: float) -> bool:
        """Of the epochs that a log written in this one could serve."""
        log = job.log
        if log.waits_since is None:
            self._logs.recount(job)
        behind = range(epoch + 1, epoch + 1 + self._logs.epochs_served(job))
        is_awaited = not log.keeps(epoch) and any(
            job.sequence.has(later) and job.sequence.is_open(later) for later in behind
        )
        return log.waits(is_awaited=is_awaited, now=now, most_s=HOLD_S)

    def _decide_log(self, job: Job, epoch: int, now: float) -> None:
        log, before = job.log, self.status(job)
        was_open = log.close()
        self._moving_seen = -1
        if log.keeps(epoch):
            first, last = log.served.start, log.served.stop - 1
            log.say(f"the orders of epochs {first} to {last} lie on SSD; {rhythm(log.served)}")
            if was_open:
                self._pack(packing.WRITTEN)
        else:
            known, why = log.why, self._logs.begin(job, epoch, now)
            if known and why == NO_EPOCH:  # which alone says nothing of the training
                why += f"; until then {before['layout']}: {known}"
            log.say(why)
            if log.is_announced and not log.is_open:
                # Where nothing wants its room it stays: at its end the mount enters each of its
                # files into an index, which takes as long as reading them.
                stays = self._logs.is_stored(job, epoch)
                if was_open or not stays:
                    self._pack(packing.WRITTEN if stays else packing.END)
                if not stays:
                    log.withdraw()
        begun = now, job.window.begin, job.tally.waited
        log.decide(epoch, begun, self._logs.passed(job))
        self._packer = job.name if epoch in log.chunks else None

    def status(self, job: Job) -> dict[str, str]:
        """How its samples lie on SSD, and why; {}: the mount is told to leave them."""
        log = job.log
        if self._logs.are_static:
            return {}
        if job.state == "done" and job.laid_out:
            return job.laid_out
        if job.state == "wrong":
            return {"layout": "static", "layout_why": "nothing is moved for a hint that is wrong"}
        if self._packer not in (None, job.name):
            return {"layout": "static", "layout_why": f"{self._packer} is packed on this mount"}
        if log.order_bytes is not None and log.order_bytes <= self._ram.budget_bytes:
            return {"layout": "static", "layout_why": "all of it fits into RAM"}
        layout = "reorder" if log.is_open else "log" if log.chunks else "static"
        return {"layout": layout, "layout_why": log.why or "not decided yet"}
