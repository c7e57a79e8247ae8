"""The life of each job of the daemon: a task, from what was asked for, or stands in the journal, to
its end.

It ends with `end`, the trainer's process (a pidfd: DataLoader workers are forked and keep the
socket open, so its end alone says nothing), its last epoch, or, if it is not detached, GRACE_S
after its connection. What a job does to the caches is the Director's.

INVARIANT: a task that is cancelled from outside leaves the journal as it is: the next hintsd takes
the job up.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Final, NoReturn

import trio

from fusecache.base import processes
from fusecache.base.wire import WireError
from hintsd.daemon import figures
from hintsd.daemon.datasets import GUEST, Guest, is_guests
from hintsd.daemon.director import Director
from hintsd.daemon.hinted_job import Scores
from hintsd.daemon.journal import Entry, Journal, process_start
from hintsd.daemon.messages import JobRefused, NotHere, Sampled, internal_error, scores_of
from hintsd.daemon.mount import JobInfo
from hintsd.orders.hint import Hint, read_hint
from hintsd.orders.spec import OrderSpec, samples_per_epoch
from hintsd.plan.status import unknown
from hintsd.users import quota
from hintsd.users.rights import Rights

log = logging.getLogger(__name__)

JOBS_MOST: Final = 256
ENDED_MOST: Final = 16  # jobs of one user that status still shows
GRACE_S: Final = 1.0  # for a client to come back
RESTART_GRACE_S: Final = 30.0  # the same, for the clients of the hintsd before: all may be busy
CLOSE_TIMEOUT_S: Final = 5.0
SCORES_EVERY_S = 1.0  # they are written

OpenDirector = Callable[..., Director]
_Ended = deque[tuple[float, dict[str, Any]]]


@dataclass(eq=False, slots=True)
class LiveJob:
    name: str
    uid: int
    pid: int | None
    """Of the process whose end is the job's."""
    hint: Hint
    guest: Guest | None = None
    """Its user, if that is none of hintsd's own."""
    resume_at: tuple[int, int] | None = None
    """(epoch, index), of a job of the hintsd before."""
    pid_start: int | None = None
    """`process_start` of its process then."""
    scores: Scores | None = None
    """The latest; of a job of the hintsd before, those that it was told."""
    info: JobInfo | None = None
    """Once it is open."""
    refusal: str = ""
    """Why it never was."""
    announced: dict[int, int] = field(default_factory=dict)
    """Samples of each epoch whose order was told, and which is not read yet."""
    order_bytes: int = 0
    """Of the arrays of the latest of these."""
    reason: str = "its connection was lost"
    """Of its end, unless another is set."""
    is_kept: bool = False  # in the journal, for a hintsd that can open it
    is_done: bool = False  # all its epochs are read
    scored: trio.Event = field(default_factory=trio.Event)  # `scores` are to be written
    opened: trio.Event = field(default_factory=trio.Event)  # or refused
    ended: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    @property
    def is_over(self) -> bool:
        """Whether it may be told nothing any more. If not: that holds until the next await."""
        return self.scope.cancel_called or self.ended.is_set()

    @property
    def samples(self) -> int:
        """Of its orders that are kept, as far as they were told; else of one epoch."""
        opened = self.info.samples_per_epoch if self.info is not None else self.hint.samples_told
        return max(opened, sum(self.announced.values()))

    @property
    def array_bytes(self) -> int:
        """Of its paths and orders."""
        return self.hint.array_bytes + self.order_bytes

    def announce(self, epoch: int, spec: OrderSpec) -> None:
        """Its client tells this order."""
        self.announced[epoch], self.order_bytes = samples_per_epoch(spec), spec.array_bytes

    def pass_epochs(self, epoch: int) -> None:
        """Those before are read."""
        self.announced = {one: count for one, count in self.announced.items() if one >= epoch}

    def end(self, reason: str) -> None:
        self.reason = reason
        self.scope.cancel()

    def attach(self) -> None:
        """A client has it."""
        self.scope.deadline = float("inf")

    def detach(self, *, is_taken_up: bool = False) -> None:
        """No client has it, or (`is_taken_up`) none of this hintsd yet."""
        if not self.hint.detached:
            grace_s = RESTART_GRACE_S if is_taken_up else GRACE_S
            self.scope.deadline = trio.current_time() + grace_s

    def finish(self) -> None:
        """All its epochs are read."""
        self.is_done = True
        self.end("all its epochs are read")

    def open(self, info: JobInfo) -> None:
        self.info = info

    def score(self, uses: Scores) -> None:
        """Its mount has these; what was told before is forgotten."""
        self.scores = uses
        self.scored.set()

    def take_scores(self) -> bytes:
        """To be written."""
        assert self.scores is not None
        self.scored = trio.Event()
        return self.scores.tobytes()

    def forget_scores(self) -> None:
        """They are none."""
        self.scores = None

    def refuse(self, refusal: str, *, is_kept: bool = False) -> None:
        """It cannot be opened; by another hintsd, perhaps, it can."""
        self.refusal, self.is_kept = refusal, is_kept


class Jobs:
    """All that live, by name; and those that ended lately."""

    def __init__(
        self,
        journal: Journal,
        open_director: OpenDirector,
        on_notice: Callable[[str, str], None],
    ) -> None:
        """`open_director(on_position=, on_notice=, on_finished=)`: a Director with these calls."""
        self._journal = journal
        self.rights = Rights()
        self.director = open_director(
            on_position=self._on_position, on_notice=on_notice, on_finished=self._on_finished
        )
        self._jobs: dict[str, LiveJob] = {}
        self._ended = defaultdict[int, _Ended](lambda: deque(maxlen=ENDED_MOST))  # by user
        self._nursery: trio.Nursery  # set by `run`

    async def run(self, nursery: trio.Nursery) -> None:
        """Begin, in this nursery: with the jobs of the hintsd before."""
        self._nursery = nursery
        await nursery.start(self.director.run)
        for entry in await trio.to_thread.run_sync(self._journal.load):
            await self._take_up(entry)

    def get(self, name: str) -> LiveJob | None:
        return self._jobs.get(name)

    def ended(self, uid: int | None = None) -> Iterator[dict[str, Any]]:
        """Those (of one user) that ended lately, as status shows them."""
        now_s = time.monotonic()
        known = self._ended.values() if uid is None else [self._ended[uid]]
        for ended_s, job in sorted(itertools.chain(*known), key=itemgetter(0)):
            yield {**job, "ended_ago_s": round(now_s - ended_s, 3)}

    async def resume(
        self, name: str | None, uid: int, pid: int | None, hint: Hint
    ) -> LiveJob | None:
        """The job of this name, if it is this client's, and the same; else it ends."""
        job = self._jobs.get(name) if name is not None else None
        if job is None or (job.uid, job.pid) != (uid, pid):
            return None  # not known here, or not this client's
        is_same = await trio.to_thread.run_sync(hint.is_same_job, job.hint)  # both may be long
        if not is_same or job.is_over:
            await self.end(job, "its trainer describes another one")
            return None
        return job

    def begin(
        self, hint: Hint, uid: int, pid: int | None, before: str, guest: Guest | None = None
    ) -> LiveJob:
        """A new one; `before`: what its client calls it. JobRefused."""
        if len(self._jobs) >= JOBS_MOST:
            raise JobRefused(f"there are {JOBS_MOST} jobs already")
        if guest is not None and (why := self._excess(uid, hint)):
            raise JobRefused(why)
        job = LiveJob(self._name(hint.name, pid, before), uid, pid, hint, guest)
        self._begin(job)
        return job

    def _of(self, uid: int) -> list[LiveJob]:
        return [job for job in self._jobs.values() if job.uid == uid]

    def _excess(self, uid: int, hint: Hint) -> str:
        """Why this is too much for a guest; "": it is not."""
        uids = [job.uid for job in self._jobs.values() if is_guests(job.uid)]
        jobs = quota.excess("jobs", uid, uids, quota.JOBS_MOST, quota.JOBS_OF_ALL)
        if hint.files.count > quota.ENTRIES_MOST:
            return f"one job can name {quota.ENTRIES_MOST:,} files at most"
        return jobs or self._excess_of(uid, hint.samples_told, hint.array_bytes)

    def _excess_of(self, uid: int, samples: int = 0, array_bytes: int = 0) -> str:
        """Why a guest cannot have so much more; "": they can."""
        if sum(job.array_bytes for job in self._of(uid)) + array_bytes > quota.BYTES_MOST:
            return f"the paths and orders of your jobs are more than {quota.BYTES_MOST:,} bytes"
        if sum(job.samples for job in self._of(uid)) + samples > quota.SAMPLES_MOST:
            return f"your jobs have more than {quota.SAMPLES_MOST:,} samples an epoch"
        return ""

    def _check_excess(self, uid: int) -> None:
        """JobRefused: what this guest has is too much."""
        if why := self._excess_of(uid):
            raise JobRefused(why)

    def admit(self, name: str, epoch: int, spec: OrderSpec) -> None:
        """A job is told this order. JobRefused: it is too much for a guest."""
        job = self._jobs.get(name)
        if job is None or job.guest is None:
            return
        before = dict(job.announced), job.order_bytes
        job.announce(epoch, spec)
        try:
            self._check_excess(job.uid)
        except JobRefused:
            job.announced, job.order_bytes = before
            raise

    def _name(self, wanted: str, pid: int | None, before: str) -> str:
        program = wanted or (processes.program(pid) if pid is not None else "") or "job"
        program = re.sub(r"[^A-Za-z0-9._-]+", "-", program)[:64].strip(".-") or "job"
        return f"{program}-{self._journal.number(before)}"

    async def _take_up(self, entry: Entry) -> None:
        """Go on with a job of the hintsd before; its client will come back, if it has one."""
        try:
            hint = await trio.to_thread.run_sync(read_hint, entry.message)
        except (ValueError, WireError) as error:
            log.warning("journal: job %s cannot be used and is removed: %s", entry.job, error)
            self._journal.remove(entry.job)
            return
        place = entry.epoch, entry.position
        pid, start = entry.pid or None, entry.pid_start
        guest = Guest.of_journal(entry.uid, entry.message, self.rights)
        job = LiveJob(entry.job, entry.uid, pid, hint, guest, place, start)
        job.scores = await trio.to_thread.run_sync(self._scores_of, entry.job)
        job.detach(is_taken_up=True)
        self._begin(job)

    def _scores_of(self, job: str) -> Scores | None:
        """In a thread. Those that the hintsd before was told."""
        try:
            uses = self._journal.scores(job)
            return None if uses is None else scores_of(uses)
        except (OSError, ValueError, WireError) as error:
            self._forget_scores(job, error)
            return None

    def _forget_scores(self, job: str, why: Exception) -> None:
        log.warning("journal: scores of job %s cannot be used and are removed: %s", job, why)
        try:
            self._journal.forget_scores(job)
        except OSError as error:
            log.warning("journal: %s", error)

    def _begin(self, job: LiveJob) -> None:
        self._jobs[job.name] = job
        self._nursery.start_soon(self._live, job)

    async def _live(self, job: LiveJob) -> None:
        """The task of a job. Cancelled from outside, it leaves the journal's entry."""
        is_resumed, start = job.resume_at is not None, None
        with job.scope:
            async with trio.open_nursery() as nursery:
                try:
                    if job.pid is not None:
                        nursery.start_soon(_watch, job, _open_process(job.pid))
                        if job.uid != 0 and job.uid not in _owners(job.pid):
                            raise JobRefused(f"process {job.pid} is not yours")
                        start = process_start(job.pid)  # of the one that is watched
                        if is_resumed and start != job.pid_start:
                            raise JobRefused(f"its process {job.pid} is gone")
                    hint, place = replace(job.hint, pid=job.pid), job.resume_at
                    info = await self.director.open_job(
                        job.name, hint, uid=job.uid, guest=job.guest, resume_at=place
                    )
                    job.open(info)
                    if job.guest is not None:
                        self._check_excess(job.uid)
                    if is_resumed:
                        await self._score_again(job)
                    else:
                        await trio.to_thread.run_sync(self._record, job, start or 0)
                except JobRefused as refusal:
                    # None else would tell it again.
                    is_kept = is_resumed and job.hint.detached and isinstance(refusal, NotHere)
                    job.refuse(str(refusal), is_kept=is_kept)
                except Exception:
                    log.exception("job %s cannot be opened", job.name)
                    job.refuse(internal_error())
                if job.refusal:
                    job.end(f"refused: {job.refusal}")
                else:
                    log.info("job %s has begun", job.name)
                    job.opened.set()
                    await self._keep_scores(job)
                await trio.sleep_forever()
        status: dict[str, Any] = {}
        with trio.move_on_after(CLOSE_TIMEOUT_S):
            try:
                if job.info is not None:
                    status = await job.info.mount.close_job(job.name)
            except Exception:
                log.exception("job %s cannot be closed", job.name)
        if job.info is None:
            log.info("job %s has ended: %s", job.name, job.reason)
            if job.refusal:
                state = "ended" if is_resumed else "refused"  # it had begun before
                self._note_end(job, {}, state, job.refusal)
        else:
            log.info("job %s has ended: %s: %s", job.name, job.reason, figures.reads(status))
            is_done = job.is_done or status.get("state") == "done" or _is_read(status)
            state = "done" if is_done else "ended"
            self._note_end(job, status, state, job.reason)
        self._forget(job)

    async def _score_again(self, job: LiveJob) -> None:
        """What the hintsd before was told; its client, if it has one, comes later."""
        if job.scores is None or job.info is None:
            return
        try:
            await job.info.mount.score(job.name, job.scores, Sampled())
        except JobRefused as refusal:
            job.forget_scores()
            await trio.to_thread.run_sync(self._forget_scores, job.name, refusal)

    async def _keep_scores(self, job: LiveJob) -> NoReturn:
        """Write each that is told, at most one a second."""
        while True:
            await job.scored.wait()
            try:
                await trio.to_thread.run_sync(self._journal.score, job.name, job.take_scores())
            except OSError as error:
                log.warning("journal: scores of job %s: %s", job.name, error)
            await trio.sleep(SCORES_EVERY_S)

    def _note_end(self, job: LiveJob, status: dict[str, Any], state: str, why: str) -> None:
        known = {**unknown(), "pid": job.pid, **status, "name": job.name, "uid": job.uid}
        known["state"] = state
        self._ended[job.uid].append((time.monotonic(), {**known, "why_ended": why}))

    def _forget(self, job: LiveJob) -> None:
        try:
            if not job.is_kept:
                self._journal.remove(job.name)
        except OSError as error:
            log.warning("journal: %s", error)
        del self._jobs[job.name]
        job.opened.set()
        job.ended.set()

    def _record(self, job: LiveJob, pid_start: int) -> None:
        """In a thread."""
        hint, spec = job.hint, job.hint.spec
        place = hint.start_epoch, hint.start_batch * (spec.batch_size if spec is not None else 0)
        who = job.name, job.uid, job.pid or 0, pid_start
        try:
            message = hint.to_message()
            if job.guest is not None:
                message[GUEST] = job.guest.to_journal()
            self._journal.write(Entry(*who, message, *place))
        except OSError as error:
            log.warning("journal: job %s will not survive this hintsd: %s", job.name, error)

    async def end(self, job: LiveJob, reason: str) -> None:
        job.end(reason)
        await job.ended.wait()

    def _on_position(self, name: str, epoch: int, index: int) -> None:
        job = self._jobs.get(name)
        if job is None or job.info is None:
            return
        job.pass_epochs(epoch)
        try:
            self._journal.move(name, epoch, index)
        except OSError as error:
            log.warning("journal: %s", error)

    def _on_finished(self, name: str) -> None:
        job = self._jobs.get(name)
        if job is not None:
            job.finish()


def _is_read(status: dict[str, Any]) -> bool:
    """Are all epochs of a job read, by its last status?"""
    epoch, epochs = status.get("epoch", 0), status.get("epochs")
    if epochs is None:
        return False
    is_last = epoch == epochs - 1 and status.get("index") == status.get("samples")
    return bool(is_last or epoch >= epochs)


def _open_process(pid: int) -> int:
    """A pidfd. JobRefused: there is no such process."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise JobRefused(f"process {pid} cannot be watched: {error.strerror}") from None


async def _watch(job: LiveJob, pidfd: int) -> None:
    """End the job with its process."""
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    job.end(f"its process {job.pid} has ended")


def _owners(pid: int) -> tuple[int, int]:
    """The users that a process runs for and as. JobRefused: it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            (line,) = (line for line in file if line.startswith(b"Uid:"))
    except OSError:
        raise JobRefused(f"process {pid} is gone") from None
    real, effective = line.split()[1:3]
    return int(real), int(effective)
