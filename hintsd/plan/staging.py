"""What of the windows is to be staged now, in which order, by which commands (pure).

What is in no chunk goes as there is room; a chunk (docs/LOG.md, layout.py) by one command.

INVARIANT: what is sent and not answered is bounded: STAGE_UNANSWERED_MOST files, or two chunks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fusecache.base.wire import Wish
from hintsd.follow.sequence import SLICE, Inos
from hintsd.plan.commands import Command, commands_of
from hintsd.plan.files import FAILED, HELD, SENT, STAGED, STORED, Files, first_uses
from hintsd.plan.job import Job
from hintsd.plan.lanes import Lanes
from hintsd.plan.layout import Layout
from hintsd.plan.placement import Exchange
from hintsd.plan.ram import Ram, Reclaimed
from hintsd.reorder import packing
from hintsd.reorder.log import Log

STAGE_UNANSWERED_MOST = 1 << 15  # few enough that a new job's first files need not wait for long


class Staging:
    """Of one mount. `jobs`: all of them, as they come and go."""

    def __init__(
        self,
        files: Files,
        ram: Ram,
        reclaimed: Reclaimed,
        jobs: Mapping[str, Job],
        layout: Layout,
        lanes: Lanes,
        exchange: Exchange,
    ) -> None:
        self._files, self._ram, self._jobs, self._exchange = files, ram, jobs, exchange
        self._layout, self._lanes, self._reclaimed = layout, lanes, reclaimed

    def stage(self, now: float, *, has_lanes: bool) -> list[Command]:
        """What to send now; `has_lanes`: windows are lanes."""
        # What two jobs want is moved with its chunk, so chunks are chosen first.
        behind = [job for job in self._jobs.values() if job.live and _is_behind(job)]
        chunks = [command for job in behind for command in self._stage_chunks(job)]
        room = self._room()
        taken = self._reclaimed.take(room)
        again = np.concatenate([taken, self._ram.retry(now, room - len(taken))])
        if has_lanes:
            parts = [self._lanes.unsent(job) for job in self._jobs.values() if job.live]
            return [*self._send([again, *parts], room), *chunks]
        behind = [
            job for job in behind if _is_behind(job) and room > 0 and self._layout.is_loose(job)
        ]
        found = [self._unsent(job, room) for job in behind]
        parts = [again, *(inos for inos, _ in found)]
        if len(found) > 1:
            need_s = np.concatenate([np.zeros(len(again)), *(need_s for _, need_s in found)])
            parts = [np.concatenate(parts)[np.argsort(need_s, kind="stable")]]
        commands = self._send(parts, room)
        for job in behind:
            self._advance_sent(job)
        return [*commands, *chunks]

    def _send(self, parts: list[Inos], most: int) -> list[Command]:
        inos = np.concatenate(parts)
        if len(inos) > 1:
            inos = inos[first_uses(inos)]
        inos = inos[: max(most, 0)]
        self._exchange.admit(inos)
        return commands_of("stage", [inos], self._ram.send(inos))

    def _room(self) -> int:
        """So many files that belong to no chunk may be staged now."""
        if not self._layout.has_packer:
            return STAGE_UNANSWERED_MOST - self._ram.stage_unanswered
        others = self._ram.stage_unanswered - self._ram.moving  # beside the chunks
        return STAGE_UNANSWERED_MOST - packing.CHUNK_SAMPLES_MOST - others

    def _unsent(self, job: Job, most: int) -> tuple[Inos, npt.NDArray[np.float64]]:
        """The next files of the window to be staged, and in how many seconds (or bytes) each is
        needed.
        """
        window = job.window
        limit = min(self._layout.sendable_end(job) - window.sent, max(most, 4096))
        parts: list[Inos] = []
        start = window.sent
        while start < window.sent + limit:
            inos, _ = job.sequence.piece(start, window.sent + limit - start)
            parts.append(inos)
            start += len(inos)
        inos = np.concatenate(parts)
        ahead = np.cumsum(self._ram.bytes_of(inos)) + window.sent_bytes
        open_ = self._open(inos)[:most]
        speed = job.progress.samples_per_s or 1.0
        return inos[open_], ahead[open_] / speed

    def _open(self, inos: Inos) -> npt.NDArray[np.intp]:
        """Where in `inos` files are to be staged that are not sent."""
        return np.flatnonzero(self._files.flags[inos] & (HELD | SENT | STAGED | FAILED) == HELD)

    def _advance_sent(self, job: Job) -> None:
        """Moves `sent` to the first file that is to be staged and is not sent yet."""
        step, window = 1024, job.window
        end = self._layout.sendable_end(job)
        while window.sent < end:
            inos, _ = job.sequence.piece(window.sent, min(step, end - window.sent))
            step = min(4 * step, SLICE)
            open_ = self._open(inos)
            count = int(open_[0]) if len(open_) else len(inos)
            window.send(count, self._ram.total_bytes(inos[:count]))
            if len(open_):
                break

    # --- chunks

    def _stage_chunks(self, job: Job) -> list[Command]:
        """The next chunks, each by one command, as there is room for all of one; `sent` moves."""
        commands: list[Command] = []
        window, log = job.window, job.log
        while _is_behind(job) and self._layout.is_begun(job):
            stop = job.chunk_end(window.sent)
            if stop is None or stop > window.end:
                break
            inos, repeats = job.sequence.piece(window.sent, stop - window.sent)
            is_moved = log.is_open and job.sequence.epoch_of(window.sent) == log.decided
            chosen = self._of_chunk(inos, repeats, is_moved)
            # one more than the one that is under way
            most = max(STAGE_UNANSWERED_MOST, 2 * len(chosen))
            if len(chosen) > most - self._ram.stage_unanswered:
                break
            if len(chosen):
                before = self._ram.moving
                commands += self._send_chunk(log, chosen, is_moved)
                if is_moved:
                    log.count_moved(window.sent, stop, self._ram.moving - before)
            window.send(stop - window.sent, self._ram.total_bytes(inos))
        return commands

    def _of_chunk(self, inos: Inos, repeats: bool, is_moved: bool) -> Inos:
        """What of a chunk is to be staged, each file once."""
        flags = self._files.flags[inos]
        open_ = flags & (HELD | SENT | STAGED | FAILED) == HELD
        if is_moved:  # what is in RAM already, too
            open_ |= flags & (HELD | SENT | FAILED | STORED) == HELD | STORED
        chosen: Inos = inos[open_]
        return chosen[first_uses(chosen)] if repeats else chosen

    def _send_chunk(self, log: Log, inos: Inos, is_moved: bool) -> list[Command]:
        store = self._ram.send(inos)
        self._ram.move(inos[store != 0])
        if is_moved:
            is_small = self._files.sizes[inos] <= packing.BLOCK_BYTES
            store[(self._files.flags[inos] & STORED != 0) & is_small] |= Wish.MOVE
        store |= Wish.SORT
        if not log.take_keep_order():
            return [Command("stage", inos, store)]
        first = slice(packing.CHUNK_SAMPLES_MOST)
        store[first] ^= Wish.SORT | Wish.KEEP_ORDER
        rest = slice(packing.CHUNK_SAMPLES_MOST, None)
        commands = [Command("stage", inos[part], store[part]) for part in (first, rest)]
        return [command for command in commands if len(command.inos)]


def _is_behind(job: Job) -> bool:
    """Whether something of its window has not been looked at."""
    return job.window.sent < job.window.end
