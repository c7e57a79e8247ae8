"""How the samples of one mount's jobs lie on SSD: which job is packed, which epoch of it is moved
into a log, and how its chunks are staged (docs/LOG.md, "Who reorders"; pure).

hintsd/packing.py has the rules and cuts the chunks, and its `Log` is what is known of one job's;
here they are applied to what the mount has: its RAM, its jobs, the files that are on SSD.

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

from hintsd import packing
from hintsd.commands import KEEP_ORDER_BIT, MOVE_BIT, SORT_BIT, Command
from hintsd.files import FAILED, GONE, HELD, MOVING, RESIDENT, SENT, STAGED, STORED, Files
from hintsd.job import Job
from hintsd.packing import Chunks, Contents, Grain, Log, Wanted
from hintsd.policies import Mask
from hintsd.sequence import CHUNK, NO_INOS, EpochOrder, Inos

STAGE_UNANSWERED_MOST = 1 << 15  # few enough that a new job's first files need not wait for long
CHUNK_PATIENCE_SHARE = 8  # readers may take an eighth of a chunk between two decisions
HOLD_S = 1.0  # a job waits so long for the next epoch's order before it is staged without a log
BARRIER_S = 1.0
PACK_FRAMES_MOST = 4  # in one decide()
SHARING_SHOWN = 3  # names of jobs, in a reason
NO_EPOCH = "no epoch follows"
REFUSED_AFTER_S = 1.0  # what the mount said before that may be of the log before


class Layout:
    """Of one mount. `jobs`: all of them, as they come and go."""

    def __init__(self, files: Files, jobs: Mapping[str, Job]) -> None:
        self._files = files
        self._jobs = jobs
        self._setting = packing.STATIC
        self._probe: packing.Probe | None = None
        self._packer: str | None = None  # the job whose log there is
        self._packs: list[Command] = []
        self._moving_seen, self._moved_at = -1, 0.0  # how many at the barrier, and since when

    def set(self, setting: str, probe: packing.Probe | None) -> None:
        """static, reorder or auto, and what the mount has measured of its SSD."""
        self._setting, self._probe = setting, probe

    def void(self) -> None:
        """All that was sent is void: no job is packed."""
        for job in self._jobs.values():
            job.log.undecide()
        self._packs.clear()
        self._packer = None

    def take_packs(self) -> list[Command]:
        """`pack` commands, to be sent before what is staged next."""
        packs, self._packs = self._packs, []
        return packs

    def room(self) -> int:
        """So many files that belong to no chunk may be staged now."""
        if self._packer is None:
            return STAGE_UNANSWERED_MOST - self._files.stage_unanswered
        others = self._files.stage_unanswered - self._files.moving  # beside the chunks
        return STAGE_UNANSWERED_MOST - packing.CHUNK_SAMPLES_MOST - others

    def refused(self, why: str, now: float) -> None:
        """The mount has no log open, for this reason, although one was announced."""
        job = self._jobs.get(self._packer or "")
        if job is None or not job.log.is_open or job.log.begun is None:
            return
        if now - job.log.begun[0] > REFUSED_AFTER_S:
            job.log.refuse(why)

    def is_packable(self, job: Job) -> bool:
        """Whether epochs of it may be moved into a log: they do not fit into RAM."""
        if self._setting == packing.STATIC or not job.live or job.is_lost:
            return False
        if self._packer not in (None, job.name) or self._files.budget_bytes <= 0:
            return False
        if job.order_bytes is None:
            job.order_bytes = self._order_bytes(job)
        return job.order_bytes is not None and job.order_bytes > self._files.budget_bytes

    def _order_bytes(self, job: Job) -> int | None:
        """RAM that an epoch of it takes; None: no order is known."""
        order = job.sequence.orders.get(job.sequence.epoch_of(job.begin))
        if order is None:
            return None
        inos = np.unique(order.inos) if order.repeats else order.inos
        pieces = (inos[start : start + CHUNK] for start in range(0, len(inos), CHUNK))
        return sum(int(self._files.ram_bytes(piece).sum()) for piece in pieces)

    def epochs_ahead(self, job: Job) -> int:
        """So many orders are kept beside the current epoch's: when the next one begins to be
        staged, a log for those behind it is begun.
        """
        return 1 + self._epochs_served(job) if self.is_packable(job) else 1

    def _epochs_served(self, job: Job) -> int:
        """By one log at most, as far as sizes tell."""
        n, order_bytes = job.sequence.samples_per_epoch, job.order_bytes or 0
        by_sizes = packing.epochs_served(
            n, order_bytes, self._window_share(), self._files.limit_bytes
        )
        return min(by_sizes, job.log.epochs_most)

    def _window_share(self) -> int:
        return self._files.budget_bytes // max(
            sum(job.takes_share for job in self._jobs.values()), 1
        )

    def _sharing(self, job: Job) -> str:
        """Whose shares of RAM the job lacks; "": it has no others beside it."""
        names = [other.name for other in self._beside(job) if other.takes_share]
        if not names:
            return ""
        which = names[0] if len(names) == 1 else "NAME"
        shown = ", ".join(names[:SHARING_SHOWN])
        if len(names) > SHARING_SHOWN:
            shown += f" and {len(names) - SHARING_SHOWN:,} more"
        verb = "shares" if len(names) == 1 else "share"
        return f", because {shown} {verb} --ram: hintsd end {which}"

    def review(self) -> None:
        """A job that lost its reader, or has no room for two chunks any more, is packed no more, or
        anew.
        """
        for job in self._jobs.values():
            if job.log.chunks and not (
                self.is_packable(job) and 2 * job.log.largest_bytes <= self._window_share()
            ):
                self.end(job)

    def end(self, job: Job) -> None:
        """The job's log is over; the mount is told."""
        if job.log.is_announced:
            self._packs.append(Command("pack", NO_INOS, None, packing.END))
        if self._packer == job.name:
            self._packer = None
        job.log.forget()

    def patience_s(self) -> float | None:
        """How long the next decision may wait where whole chunks are staged: a small part of one,
        while one is under way; else the disk is idle until the next is sent. None: there are none.
        """
        if self._packer is None:
            return None
        job = self._jobs[self._packer]
        stop = job.chunk_end(job.sent)
        if stop is None or not self._files.stage_unanswered or job.log.pieces is not None:
            return 0.0
        samples = (stop - job.sent) / CHUNK_PATIENCE_SHARE
        return samples / max(job.progress.samples_per_s, 1.0)

    def sendable_end(self, job: Job) -> int:
        """End of what may be staged of the window now: another epoch is decided on first."""
        if not self.is_packable(job):
            return job.end
        n = job.sequence.samples_per_epoch
        return min(job.end, (job.sent // n + 1) * n)

    def _is_begun(self, job: Job, now: float) -> bool:
        """Whether the files at `sent` may be staged. Before an epoch's first ones are, it is
        decided whether it is moved into a log, and the mount is told.
        """
        log, epoch = job.log, job.sequence.epoch_of(job.sent)
        if not self.is_packable(job):
            return True
        if log.pieces is None and epoch > log.decided:
            if log.is_announced and self._is_moving(now):
                return False
            if self._waits_for_orders(job, epoch, now):
                return False
            self._decide_log(job, epoch, now)
        if log.pieces is not None:
            for _, fields in zip(range(PACK_FRAMES_MOST), log.pieces, strict=False):
                self._packs.append(Command("pack", NO_INOS, None, fields))
                if fields["last"]:
                    log.pieces = None
        return log.pieces is None

    def _is_moving(self, now: float) -> bool:
        """Whether files are on their way to the log, and have become fewer within BARRIER_S: by
        answers, or as readers pass what is not answered yet.
        """
        if self._files.moving != self._moving_seen:
            self._moving_seen, self._moved_at = self._files.moving, now
        return self._files.moving > 0 and now - self._moved_at < BARRIER_S

    def is_loose(self, job: Job) -> bool:
        """Whether what is at `sent` may be staged, and belongs to no chunk."""
        epoch = job.sequence.epoch_of(job.sent)
        is_begun = job.log.pieces is None and epoch <= job.log.decided
        return (is_begun or not self.is_packable(job)) and epoch not in job.log.chunks

    def _waits_for_orders(self, job: Job, epoch: int, now: float) -> bool:
        """Of the epochs that a log written in this one could serve."""
        log = job.log
        if log.waits_since is None:
            self._recount(job)
        behind = range(epoch + 1, epoch + 1 + self._epochs_served(job))
        is_awaited = not log.keeps(epoch) and any(
            (job.epochs is None or later < job.epochs)
            and not (later in job.sequence.orders or later in job.unknown)
            for later in behind
        )
        if is_awaited and log.waits_since is None:
            log.waits_since = now
        if is_awaited and log.waits_since is not None and now - log.waits_since < HOLD_S:
            return True
        log.waits_since = None
        return False

    def _recount(self, job: Job) -> None:
        """The log that was written lacks nothing for which there was no room after all."""
        log, orders = job.log, job.sequence.orders
        if log.is_open and not log.is_whole and log.served.start in orders:
            contents = self._contents(orders[log.served.start].inos)
            log.samples = min(log.samples, contents.samples)

    def _decide_log(self, job: Job, epoch: int, now: float) -> None:
        log, before = job.log, self.status(job)
        was_open, log.is_open = log.is_open, False
        self._moving_seen = -1
        if log.keeps(epoch):
            first, last = log.served.start, log.served.stop - 1
            log.why = f"the orders of epochs {first} to {last} lie on SSD; {_rhythm(log.served)}"
            if was_open:
                self._packs.append(Command("pack", NO_INOS, None, packing.WRITTEN))
        else:
            known, log.why = log.why, self._begin_log(job, epoch, now)
            if known and log.why == NO_EPOCH:  # which alone says nothing of the training
                log.why += f"; until then {before['layout']}: {known}"
            if log.is_announced and not log.is_open:
                # Where nothing wants its room it stays: at its end the mount enters each of its
                # files into an index, which takes as long as reading them.
                log.is_announced = self._is_stored(job, epoch)
                if was_open or not log.is_announced:
                    written = packing.WRITTEN if log.is_announced else packing.END
                    self._packs.append(Command("pack", NO_INOS, None, written))
        log.decided, log.begun = epoch, (now, job.begin, job.waited)
        log.others_begun = {
            other.name: other.progress.passed_samples for other in self._beside(job)
        }
        self._packer = job.name if epoch in log.chunks else None

    def _begin_log(self, job: Job, epoch: int, now: float) -> str:
        """A log for the epochs behind this one, if it pays; why, or why not."""
        orders = job.sequence.orders
        present, coming = orders.get(epoch), orders.get(epoch + 1)
        if present is None or coming is None:
            is_last = job.epochs is not None and epoch + 1 >= job.epochs
            if is_last:
                return NO_EPOCH
            if epoch + 1 in job.unknown:
                return (
                    "the next epoch's order is known only when it begins: give the DataLoader a "
                    "generator=torch.Generator().manual_seed(…)"
                )
            return "the next epoch's order is not computed yet"
        if refusal := packing.refusal(present, coming):
            return refusal
        contents = self._contents(coming.inos)
        wanted = self._wanted(job, contents, now)
        coming_all = self._known_behind(job, epoch)
        for epochs in range(max(1, packing.following(present, coming_all)), 0, -1):
            served = range(epoch + 1, epoch + 1 + epochs)
            is_packed, why = packing.decide(self._setting, self._probe, contents, wanted, epochs)
            if not is_packed:
                return why
            refusal = self._lay_out(job, served, contents)
            if not refusal:
                return f"{why}; {_rhythm(served)}" if epochs > 1 else why
        return refusal

    def _wanted(self, job: Job, contents: Contents, now: float) -> Wanted | None:
        wanted = job.log.wanted(contents, job.begin, job.waited, now)
        if wanted is None or job.log.begun is None:
            return None
        others_bytes = sum(
            (other.progress.passed_samples - job.log.others_begun.get(other.name, 0))
            * other.mean_bytes
            for other in self._beside(job)
        )
        return wanted._replace(others_bytes_per_s=others_bytes / (now - job.log.begun[0]))

    def _beside(self, job: Job) -> list[Job]:
        return [other for other in self._jobs.values() if other is not job]

    def _known_behind(self, job: Job, epoch: int) -> list[EpochOrder]:
        """Orders of the epochs behind that one, of as many as one log may serve."""
        orders = job.sequence.orders
        behind = range(epoch + 1, epoch + 1 + self._epochs_served(job))
        return [orders[later] for later in itertools.takewhile(orders.__contains__, behind)]

    def _lay_out(self, job: Job, served: range, contents: Contents) -> str:
        """Begin a log for these epochs; or why not."""
        log, orders, share = job.log, job.sequence.orders, self._window_share()
        limits = packing.grain(len(served))
        found = self._cut(job, served, limits)
        if found is None and limits is packing.FINE:
            limits = packing.COARSE
            found = self._cut(job, served, limits)
        if found is None:
            return f"it would be more than {packing.CHUNKS_MOST} chunks"
        largest_bytes = max(chunks.largest_bytes for chunks in found.values())
        if 2 * largest_bytes > share:
            sharing = self._sharing(job) if 2 * largest_bytes <= self._files.budget_bytes else ""
            return f"two chunks do not fit into its share of RAM{sharing}"
        count = math.prod(len(found[epoch].ends) for epoch in served)
        if len(served) > 1 and not packing.are_cells_good(
            count, contents.size_bytes, self._files.limit_bytes
        ):
            return "the cells would be too small"
        buffer = packing.buffer_bytes(count, self._files.limit_bytes, limits)
        if not buffer:
            needed = packing.ram_bytes_needed(count, self._files.limit_bytes)
            # its chunks, were there no others
            alone = max(1, count * share // self._files.budget_bytes)
            is_shared = packing.buffer_bytes(alone, self._files.limit_bytes, limits) > 0
            sharing = self._sharing(job) if is_shared else ""
            return f"--ram {-(-needed * 17 // (16 << 20))}M or more would be needed{sharing}"
        for other in self._jobs.values():
            other.log.is_announced = False  # the mount lets go of it when its samples have moved
        log.chunks[served.start - 1] = found.pop(served.start - 1)
        log.begin(served, list(found.values()), contents.samples)
        cells = packing.cells([orders[epoch] for epoch in served], list(found.values()))
        log.pieces = packing.frames(served, cells, contents, buffer, self._is_to_be_packed)
        return ""

    def _cut(self, job: Job, served: range, limits: Grain) -> dict[int, Chunks] | None:
        """These epochs and the one before; None: too many chunks."""
        found = {}
        for epoch in range(served.start - 1, served.stop):
            order = job.sequence.orders[epoch].inos
            chunks = job.log.chunks.get(epoch) if epoch < served.start else None
            if chunks is None:
                share = self._window_share()
                chunks = packing.cut(order, self._files.ram_bytes, share, job.batch_size, limits)
            if chunks is None:
                return None
            found[epoch] = chunks
        return found

    def _is_to_be_packed(self, inos: Inos) -> Mask:
        flags, sizes = self._files.flags[inos], self._files.sizes[inos]
        is_resident = (flags & (STORED | RESIDENT) != 0) & (flags & GONE == 0) & (inos != 0)
        found: Mask = is_resident & (sizes > 0) & (sizes <= packing.BLOCK_BYTES)
        return found

    def _is_stored(self, job: Job, epoch: int) -> bool:
        """Whether all that it reads is on SSD."""
        order = job.sequence.orders.get(epoch)
        if order is None:
            return False
        stored = sum(
            int(np.count_nonzero(self._files.flags[order.inos[start : start + CHUNK]] & STORED))
            for start in range(0, len(order.inos), CHUNK)
        )
        return stored >= packing.WHOLE_SHARE * len(order.inos)

    def _contents(self, order: Inos) -> Contents:
        samples = size_bytes = stored_bytes = 0
        for start in range(0, len(order), CHUNK):
            inos = order[start : start + CHUNK]
            inos = inos[self._is_to_be_packed(inos)]
            sizes = self._files.sizes[inos].astype(np.int64)
            samples += len(inos)
            size_bytes += int(sizes.sum())
            stored_bytes += int(sizes[self._files.flags[inos] & STORED != 0].sum())
        return Contents(samples, size_bytes, stored_bytes)

    def stage_chunks(self, job: Job, now: float) -> list[Command]:
        """The next chunks, each by one command, as there is room for all of one; `sent` moves."""
        commands: list[Command] = []
        while job.sent < job.end and self._is_begun(job, now):
            stop = job.chunk_end(job.sent)
            if stop is None or stop > job.end:
                break
            inos, repeats = job.sequence.piece(job.sent, stop - job.sent)
            is_moved = job.log.is_open and job.sequence.epoch_of(job.sent) == job.log.decided
            flags = self._files.flags[inos]
            open_ = flags & (HELD | SENT | STAGED | FAILED) == HELD
            if is_moved:  # what is in RAM already, too
                open_ |= flags & (HELD | SENT | FAILED | STORED) == HELD | STORED
            chosen = inos[open_]
            if repeats:
                chosen = chosen[np.sort(np.unique(chosen, return_index=True)[1])]
            # one more than the one that is under way
            most = max(STAGE_UNANSWERED_MOST, 2 * len(chosen))
            if len(chosen) > most - self._files.stage_unanswered:
                break
            if len(chosen):
                before = self._files.moving
                commands += self._stage_chunk(job.log, chosen, is_moved)
                if is_moved:
                    job.log.count_moved(job.sent, stop, self._files.moving - before)
            job.sent_bytes += int(self._files.ram_bytes(inos).sum())
            job.sent = stop
        return commands

    def _stage_chunk(self, log: Log, inos: Inos, is_moved: bool) -> list[Command]:
        store = self._files.mark_sent(inos)
        moving = inos[store != 0]
        self._files.flags[moving] |= MOVING
        self._files.moving += len(moving)
        if is_moved:
            is_small = self._files.sizes[inos] <= packing.BLOCK_BYTES
            store[(self._files.flags[inos] & STORED != 0) & is_small] |= MOVE_BIT
        store |= SORT_BIT
        if not log.keeps_order:
            return [Command("stage", inos, store)]
        log.keeps_order = False
        first = slice(packing.CHUNK_SAMPLES_MOST)
        store[first] ^= SORT_BIT | KEEP_ORDER_BIT
        rest = slice(packing.CHUNK_SAMPLES_MOST, None)
        commands = [Command("stage", inos[part], store[part]) for part in (first, rest)]
        return [command for command in commands if len(command.inos)]

    def status(self, job: Job) -> dict[str, str]:
        """How its samples lie on SSD, and why; {}: the mount is told to leave them."""
        if self._setting == packing.STATIC:
            return {}
        if job.state == "done" and job.laid_out:
            return job.laid_out
        if job.state == "wrong":
            return {"layout": "static", "layout_why": "nothing is moved for a hint that is wrong"}
        if self._packer not in (None, job.name):
            return {"layout": "static", "layout_why": f"{self._packer} is packed on this mount"}
        if job.order_bytes is not None and job.order_bytes <= self._files.budget_bytes:
            return {"layout": "static", "layout_why": "all of it fits into RAM"}
        layout = "reorder" if job.log.is_open else "log" if job.log.chunks else "static"
        return {"layout": layout, "layout_why": job.log.why or "not decided yet"}


def _rhythm(served: range) -> str:
    return f"written anew every {len(served)} epochs"
