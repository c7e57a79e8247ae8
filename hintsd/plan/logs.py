"""A log for the epochs behind one of a job that is packed: whether it pays, and its chunks
(docs/LOG.md, "When a dataset is packed"; pure).

packing.py has the rules; here they are applied to what the mount has: its RAM, its jobs, the files
that are on SSD.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import numpy as np

from hintsd.follow.sequence import CHUNK, EpochOrder, Inos
from hintsd.plan import packing
from hintsd.plan.files import GONE, RESIDENT, STORED, Files
from hintsd.plan.job import Job
from hintsd.plan.packing import Chunks, Contents, Grain, Wanted
from hintsd.plan.ram import Ram
from hintsd.policies import Mask

SHARING_SHOWN = 3  # names of jobs, in a reason
NO_EPOCH = "no epoch follows"


class Logs:
    """Of one mount. `jobs`: all of them, as they come and go."""

    def __init__(self, files: Files, ram: Ram, jobs: Mapping[str, Job]) -> None:
        self._files, self._ram, self._jobs = files, ram, jobs
        self._setting = packing.STATIC
        self._probe: packing.Probe | None = None

    def set(self, setting: str, probe: packing.Probe | None) -> None:
        """static, reorder or auto, and what the mount has measured of its SSD."""
        self._setting, self._probe = setting, probe

    @property
    def are_static(self) -> bool:
        """The mount is told to leave its samples where they are."""
        return self._setting == packing.STATIC

    def window_share(self) -> int:
        """Bytes of RAM for one job's window."""
        sharing = sum(job.takes_share for job in self._jobs.values())
        return self._ram.budget_bytes // max(sharing, 1)

    def fits(self, job: Job) -> bool:
        """Whether its window takes two of its chunks."""
        return 2 * job.log.largest_bytes <= self.window_share()

    def measure(self, job: Job) -> None:
        """What an epoch of it takes of RAM, if an order is known."""
        order = job.sequence.orders.get(job.sequence.epoch_of(job.window.begin))
        if job.log.order_bytes is None and order is not None:
            inos = np.unique(order.inos) if order.repeats else order.inos
            pieces = (inos[start : start + CHUNK] for start in range(0, len(inos), CHUNK))
            job.log.measure(sum(self._ram.total_bytes(piece) for piece in pieces))

    def epochs_served(self, job: Job) -> int:
        """By one log at most, as far as sizes tell."""
        n, order_bytes = job.sequence.samples_per_epoch, job.log.order_bytes or 0
        by_sizes = packing.epochs_served(n, order_bytes, self.window_share(), self._ram.limit_bytes)
        return min(by_sizes, job.log.epochs_most)

    def recount(self, job: Job) -> None:
        """The log that was written lacks nothing for which there was no room after all."""
        log, orders = job.log, job.sequence.orders
        if log.is_open and not log.is_whole and log.served.start in orders:
            log.recount(self._contents(orders[log.served.start].inos).samples)

    def passed(self, job: Job) -> dict[str, int]:
        """The samples that the readers of all other jobs have passed."""
        return {other.name: other.progress.passed_samples for other in self._beside(job)}

    def is_stored(self, job: Job, epoch: int) -> bool:
        """Whether all that it reads is on SSD."""
        order = job.sequence.orders.get(epoch)
        if order is None:
            return False
        stored = sum(
            int(np.count_nonzero(self._files.flags[order.inos[start : start + CHUNK]] & STORED))
            for start in range(0, len(order.inos), CHUNK)
        )
        return stored >= packing.WHOLE_SHARE * len(order.inos)

    def begin(self, job: Job, epoch: int, now: float) -> str:
        """A log for the epochs behind this one, if it pays; why, or why not."""
        orders = job.sequence.orders
        present, coming = orders.get(epoch), orders.get(epoch + 1)
        if present is None or coming is None:
            return _unknown(job, epoch)
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
                return f"{why}; {rhythm(served)}" if epochs > 1 else why
        return refusal

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

    def _lay_out(self, job: Job, served: range, contents: Contents) -> str:
        """Begin a log for these epochs; or why not."""
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
        if len(served) > 1 and not packing.are_cells_good(count, contents.size_bytes, limit_bytes):
            return "the cells would be too small"
        buffer = packing.buffer_bytes(count, limit_bytes, limits)
        if not buffer:
            return self._lacks_buffers(job, count, limits)
        for other in self._jobs.values():
            other.log.withdraw()  # the mount lets go of it when its samples have moved
        orders = [job.sequence.orders[epoch] for epoch in served]
        cells = packing.cells(orders, [found[epoch] for epoch in served])
        pieces = packing.frames(served, cells, contents, buffer, self._is_to_be_packed)
        job.log.begin(served, found, contents.samples, pieces)
        return ""

    def _lacks_room(self, job: Job, found: Mapping[int, Chunks]) -> str:
        """Why windows take no two of these chunks; "": they do."""
        needed_bytes = 2 * max(chunks.largest_bytes for chunks in found.values())
        if needed_bytes <= self.window_share():
            return ""
        sharing = self._sharing(job) if needed_bytes <= self._ram.budget_bytes else ""
        return f"two chunks do not fit into its share of RAM{sharing}"

    def _lacks_buffers(self, job: Job, count: int, limits: Grain) -> str:
        limit_bytes = self._ram.limit_bytes
        needed = packing.ram_bytes_needed(count, limit_bytes)
        # its chunks, were there no others
        alone = max(1, count * self.window_share() // self._ram.budget_bytes)
        is_shared = packing.buffer_bytes(alone, limit_bytes, limits) > 0
        sharing = self._sharing(job) if is_shared else ""
        return f"--ram {-(-needed * 17 // (16 << 20))}M or more would be needed{sharing}"

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

    def _cut(self, job: Job, served: range, limits: Grain) -> dict[int, Chunks] | None:
        """These epochs and the one before; None: too many chunks."""
        found = {}
        for epoch in range(served.start - 1, served.stop):
            order = job.sequence.orders[epoch].inos
            chunks = job.log.chunks.get(epoch) if epoch < served.start else None
            if chunks is None:
                share = self.window_share()
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

    def _contents(self, order: Inos) -> Contents:
        samples = size_bytes = stored_bytes = 0
        for start in range(0, len(order), CHUNK):
            inos = order[start : start + CHUNK]
            inos = inos[self._is_to_be_packed(inos)]
            samples += len(inos)
            size_bytes += self._files.total_bytes(inos)
            stored_bytes += self._files.total_bytes(self._files.having(inos, STORED))
        return Contents(samples, size_bytes, stored_bytes)


def rhythm(served: range) -> str:
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
