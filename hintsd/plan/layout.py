"""How the samples of one mount's jobs lie on SSD: which job is packed, and which epoch of it is
moved into which log (docs/LOG.md, "When a dataset is packed"; pure).

`Logs` applies the rules of hintsd/reorder to what the mount has; `Layout` decides. How a log's
chunks are staged: staging.py.

INVARIANT: one job of a mount is packed at a time; a log is announced before the first chunk of the
epoch that is moved into it.
INVARIANT: the first sample of an epoch of a job that is packed is staged when all of the epoch
before is answered, so that all is written to its log, or nothing of it comes any more (BARRIER_S).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from hintsd.follow.sequence import NO_INOS, SLICE, EpochOrder, Inos
from hintsd.plan.commands import Command
from hintsd.plan.files import GONE, RESIDENT, STORED, Files
from hintsd.plan.job import Job, owner_count
from hintsd.plan.ram import Ram
from hintsd.policies import Mask
from hintsd.reorder import packing, worth
from hintsd.reorder.log import Draft
from hintsd.reorder.packing import Chunks, Contents, Grain
from hintsd.reorder.worth import Wanted

CHUNK_PATIENCE_SHARE = 8  # readers may take an eighth of a chunk between two decisions
HOLD_S = 1.0  # a job waits so long for the next epoch's order before it is staged without a log
BARRIER_S = 1.0
PACK_FRAMES_MOST = 4  # in one decide()
REFUSED_AFTER_S = 1.0  # what the mount said before that may be of the log before
SHARING_SHOWN = 3  # names of jobs, in a reason
NO_EPOCH = "no epoch follows"


class Logs:
    """What a log for the epochs behind one of a job would be, and whether it pays: by what the
    mount has, its RAM, its `jobs`, the files that are on SSD. Changes nothing of a job.
    """

    def __init__(self, files: Files, ram: Ram, jobs: Mapping[str, Job]) -> None:
        self._files, self._ram, self._jobs = files, ram, jobs
        self._setting = worth.STATIC
        self._probe: worth.Probe | None = None

    def set(self, setting: str, probe: worth.Probe | None) -> None:
        """static, reorder or auto, and what the mount has measured of its SSD."""
        self._setting, self._probe = setting, probe

    @property
    def are_static(self) -> bool:
        """The mount is told to leave its samples where they are."""
        return self._setting == worth.STATIC

    def _window_share(self, job: Job) -> int:
        """Bytes of RAM for its window."""
        return self._ram.budget_bytes // (owner_count(self._jobs.values()) * job.sharers)

    def fits(self, job: Job) -> bool:
        """Whether its window takes two of its chunks."""
        return 2 * job.log.largest_bytes <= self._window_share(job)

    def order_bytes(self, job: Job) -> int | None:
        """Of RAM, that an epoch of it would take as a whole; None: no order is known."""
        order = job.sequence.orders.get(job.sequence.epoch_of(job.window.begin))
        if order is None:
            return None
        inos = np.unique(order.inos) if order.repeats else order.inos
        pieces = (inos[start : start + SLICE] for start in range(0, len(inos), SLICE))
        return sum(self._ram.total_bytes(piece) for piece in pieces)

    def epochs_served(self, job: Job) -> int:
        """By one log at most, as far as sizes tell."""
        n = job.sequence.samples_per_epoch
        order_bytes = job.log.order_bytes or 0
        by_sizes = packing.epochs_served(
            n, order_bytes, self._window_share(job), self._ram.limit_bytes
        )
        return min(by_sizes, job.log.epochs_most)

    def passed(self, job: Job) -> dict[str, int]:
        """The samples that the readers of all other jobs have passed."""
        return {other.name: other.progress.passed_samples for other in self._beside(job)}

    def is_stored(self, job: Job, epoch: int) -> bool:
        """Whether all that it reads is on SSD."""
        order = job.sequence.orders.get(epoch)
        if order is None:
            return False
        stored = sum(
            int(np.count_nonzero(self._files.flags[order.inos[start : start + SLICE]] & STORED))
            for start in range(0, len(order.inos), SLICE)
        )
        return stored >= worth.WHOLE_SHARE * len(order.inos)

    def draft(self, job: Job, epoch: int, now: float) -> tuple[Draft | None, str]:
        """A log for the epochs behind this one, if it pays; why, or why not."""
        orders = job.sequence.orders
        present, coming = orders.get(epoch), orders.get(epoch + 1)
        if present is None or coming is None:
            return None, _unknown(job, epoch)
        if refusal := worth.refusal(present, coming):
            return None, refusal
        unread = packing.unread(present, coming)
        inos = np.unique(coming.inos) if coming.repeats else coming.inos
        contents = self.contents(np.concatenate([inos, unread]) if len(unread) else inos)
        wanted, in_order = self._wanted(job, contents, now), worth.shared(present, coming)
        coming_all = self._known_behind(job, epoch)
        for epochs in range(max(1, worth.following(present, coming_all)), 0, -1):
            served = range(epoch + 1, epoch + 1 + epochs)
            is_packed, why = worth.decide(
                self._setting, self._probe, contents, wanted, epochs, in_order
            )
            if not is_packed:
                return None, why
            found = self._lay_out(job, served, contents, unread)
            if isinstance(found, Draft):
                return found, f"{why}; {_rhythm(served)}" if epochs > 1 else why
            refusal = found
        return None, refusal

    def _wanted(self, job: Job, contents: Contents, now: float) -> Wanted | None:
        log = job.log
        wanted = log.wanted(contents, job.window.begin, job.tally.waited, now)
        if wanted is None or log.begun is None:
            return None
        others_bytes = sum(
            (other.progress.passed_samples - log.others_begun.get(other.name, 0))
            * other.window.mean_bytes
            for other in self._beside(job)
        )
        return wanted._replace(others_bytes_per_s=others_bytes / (now - log.begun[0]))

    def _beside(self, job: Job) -> list[Job]:
        return [other for other in self._jobs.values() if other is not job]

    def _known_behind(self, job: Job, epoch: int) -> list[EpochOrder]:
        """Orders of the epochs behind that one, of as many as one log may serve."""
        orders = job.sequence.orders
        behind = range(epoch + 1, epoch + 1 + self.epochs_served(job))
        return [orders[later] for later in itertools.takewhile(orders.__contains__, behind)]

    def _lay_out(self, job: Job, served: range, contents: Contents, unread: Inos) -> Draft | str:
        """A log for these epochs, which do not read `unread`; or why there can be none."""
        limits = packing.grain(len(served))
        found = self._cut(job, served, limits)
        if found is None and limits is packing.FINE:
            limits = packing.COARSE
            found = self._cut(job, served, limits)
        if found is None:
            return f"it would be more than {packing.CHUNKS_MOST} chunks"
        if refusal := self._lacks_room(job, found):
            return refusal
        limit_bytes = self._ram.limit_bytes
        count = math.prod(len(found[epoch].ends) for epoch in served)
        count += len(served) == 1 and len(unread) > 0
        if len(served) > 1 and not packing.are_cells_good(count, contents.size_bytes, limit_bytes):
            return "the cells would be too small"
        buffer = packing.buffer_bytes(count, limit_bytes, limits)
        if not buffer:
            return self._lacks_buffers(job, count, limits)
        orders = [job.sequence.orders[epoch] for epoch in served]
        cells = packing.cells(orders, [found[epoch] for epoch in served], unread)
        pieces = packing.frames(served, cells, contents, buffer, self._is_to_be_packed)
        return Draft(served, found, contents.samples, pieces)

    def _lacks_room(self, job: Job, found: Mapping[int, Chunks]) -> str:
        """Why windows take no two of these chunks; "": they do."""
        needed_bytes = 2 * max(chunks.largest_bytes for chunks in found.values())
        if needed_bytes <= self._window_share(job):
            return ""
        sharing = self._sharing(job) if needed_bytes <= self._ram.budget_bytes else ""
        return f"two chunks do not fit into its share of RAM{sharing}"

    def _lacks_buffers(self, job: Job, count: int, limits: Grain) -> str:
        limit_bytes = self._ram.limit_bytes
        needed = packing.ram_bytes_needed(count, limit_bytes)
        # its chunks, were there no others
        alone = max(1, count * self._window_share(job) // self._ram.budget_bytes)
        is_shared = packing.buffer_bytes(alone, limit_bytes, limits) > 0
        sharing = self._sharing(job) if is_shared else ""
        return f"--ram {-(-needed * 17 // (16 << 20))}M or more would be needed{sharing}"

    def _sharing(self, job: Job) -> str:
        """Whose shares of RAM the job lacks; "": it has no others beside it."""
        sharing = [other for other in self._beside(job) if other.takes_share]
        names = [other.name for other in sharing if other.owner == job.owner]
        if not names:
            return ", because other users' jobs share --ram" if sharing else ""
        which = names[0] if len(names) == 1 else "NAME"
        shown = ", ".join(names[:SHARING_SHOWN])
        if len(names) > SHARING_SHOWN:
            shown += f" and {len(names) - SHARING_SHOWN:,} more"
        verb = "shares" if len(names) == 1 else "share"
        return f", because {shown} {verb} --ram: hintsd end {which}"

    def _cut(self, job: Job, served: range, limits: Grain) -> dict[int, Chunks] | None:
        """These epochs and the one before; None: too many chunks."""
        found = {}
        for epoch in range(served.start - 1, served.stop):
            order = job.sequence.orders[epoch].inos
            chunks = job.log.chunks.get(epoch) if epoch < served.start else None
            if chunks is None:
                share = self._window_share(job)
                chunks = packing.cut(order, self._ram.bytes_of, share, job.batch_size, limits)
            if chunks is None:
                return None
            found[epoch] = chunks
        return found

    def _is_to_be_packed(self, inos: Inos) -> Mask:
        flags, sizes = self._files.flags[inos], self._files.sizes[inos]
        is_resident = (flags & (STORED | RESIDENT) != 0) & (flags & GONE == 0) & (inos != 0)
        found: Mask = is_resident & (sizes > 0) & (sizes <= packing.BLOCK_BYTES)
        return found

    def contents(self, order: Inos) -> Contents:
        """What of these samples is to be packed."""
        samples = size_bytes = stored_bytes = 0
        for start in range(0, len(order), SLICE):
            inos = order[start : start + SLICE]
            inos = inos[self._is_to_be_packed(inos)]
            samples += len(inos)
            size_bytes += self._files.total_bytes(inos)
            stored_bytes += self._files.total_bytes(self._files.having(inos, STORED))
        return Contents(samples, size_bytes, stored_bytes)


class Layout:
    """Of one mount. `jobs`: all of them, as they come and go."""

    def __init__(self, files: Files, ram: Ram, jobs: Mapping[str, Job]) -> None:
        self._ram, self._jobs = ram, jobs
        self._logs = Logs(files, ram, jobs)
        self._packer: str | None = None  # the job whose log there is
        self._packs: list[Command] = []
        self._moving_seen, self._moved_at = -1, 0.0  # how many at the barrier, and since when

    def set(self, setting: str, probe: worth.Probe | None) -> None:
        """static, reorder or auto, and what the mount has measured of its SSD."""
        self._logs.set(setting, probe)

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
        if job.log.order_bytes is None:
            job.log.measure(self._logs.order_bytes(job))
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
        sequence = job.sequence
        return min(window.end, sequence.start(sequence.epoch_of(window.sent) + 1))

    def is_begun(self, job: Job) -> bool:
        """Whether the files at `sent` may be staged: `begin_epochs` has decided on their epoch."""
        log, epoch = job.log, job.sequence.epoch_of(job.window.sent)
        return not self.is_packable(job) or (epoch <= log.decided and not log.is_being_announced)

    def is_loose(self, job: Job) -> bool:
        """Whether what is at `sent` may be staged, and belongs to no chunk."""
        epoch = job.sequence.epoch_of(job.window.sent)
        return epoch not in job.log.chunks and self.is_begun(job)

    def begin_epochs(self, now: float) -> None:
        """Before an epoch's first files are staged, it is decided whether it is moved into a log,
        and the mount is told.
        """
        for job in self._jobs.values():
            log, window = job.log, job.window
            if not self.is_packable(job) or window.sent >= window.end:
                continue
            epoch = job.sequence.epoch_of(window.sent)
            if not log.is_being_announced and epoch > log.decided:
                is_held = log.is_announced and self._is_moving(now)
                if is_held or self._waits_for_orders(job, epoch, now):
                    continue
                self._decide_log(job, epoch, now)
            for fields in log.take_pieces(PACK_FRAMES_MOST):
                self._pack(fields)

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
        written = job.sequence.orders.get(log.served.start)
        if log.waits_since is None and log.is_open and not log.is_whole and written is not None:
            log.recount(self._logs.contents(written.inos).samples)
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
            log.say(f"the orders of epochs {first} to {last} lie on SSD; {_rhythm(log.served)}")
            if was_open:
                self._pack(packing.WRITTEN)
        else:
            known, (draft, why) = log.why, self._logs.draft(job, epoch, now)
            if draft is not None:
                for other in self._jobs.values():
                    other.log.withdraw()  # the mount lets go of it when its samples have moved
                log.begin(draft)
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


def _rhythm(served: range) -> str:
    return f"written anew every {len(served)} epochs"


def _unknown(job: Job, epoch: int) -> str:
    """Why no log can follow: an order is not known."""
    if not job.sequence.has(epoch + 1):
        return NO_EPOCH
    if epoch + 1 in job.sequence.unknown:
        return (
            "the next epoch's order is known only when it begins: give the DataLoader a "
            "generator=torch.Generator().manual_seed(…)"
        )
    return "the next epoch's order is not computed yet"
