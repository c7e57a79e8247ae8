"""A mount that carries out a planner's commands, and readers: numbers only.

Model of docs/WIRE.md's plan channel: commands in order; staging and fetching take turns of `work`;
answers and observations wait until `frames` hands them over, so they cross commands. Its SSD is a
log (docs/LOG.md): a file lies in one place, which is another one when the buffer of its chunk in
the log that is open has been written.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from fusecache.base.wire import Result
from hintsd.follow.readers import ANOTHERS, OWN, STRANGER, UNKNOWN
from hintsd.follow.sequence import Inos
from hintsd.keeping.keeping import Keeping
from hintsd.plan.commands import Command
from hintsd.plan.planner import MountPlanner

PAGE_BYTES = 4096
BUFFERED_FILES = 3  # of a chunk: written when so many are in its buffer
STORE, MOVE, KEEP_ORDER, SORT = 1, 2, 4, 8

Place = tuple[int, int]  # epoch of a log, chunk; or (-1, number) where it was fetched to


def pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class ModelMount:
    def __init__(self, sizes: Inos, *, ssd_bytes: int, outside_bytes: int = 0) -> None:
        """sizes[i] belongs to inode number i + 1. `outside_bytes`: of RAM, for what readers have
        missed; 0: that is neither there nor on SSD when it is staged.
        """
        self.sizes = dict(enumerate(sizes.tolist(), 1))
        self.ssd_free_bytes = ssd_bytes
        self.outside_bytes = outside_bytes
        self.missed: OrderedDict[int, int] = OrderedDict()  # pages that readers brought: bytes
        self.missed_bytes = 0
        self.ram: set[int] = set()  # staged
        self.evicts: set[int] = set()  # of it, files whose pages the kernel takes at once
        self.ram_bytes = 0
        self.ram_bytes_most = 0
        self.ssd: set[int] = set()
        self.armed: set[int] = set()
        self.stage_queue: deque[tuple[int, int]] = deque()
        self.fetch_queue: deque[int] = deque()
        self.origin_reads: Counter[int] = Counter()
        self.staged_order: list[int] = []
        self.places: dict[int, Place] = {}
        self.frames: list[tuple[list[int], list[int], list[Place | None]]] = []  # of `stage`
        self.evicted: Counter[int] = Counter()
        self.has_evicted = False  # and has not told what room there is
        self.unsealed: set[int] = set()
        self.stored: Counter[int] = Counter()  # how often each was written to SSD
        self.packs: list[int] = []  # chunks of each log that was announced; 0: ended, -1: written
        self.moved: dict[int, list[int]] = {}  # epoch of a log -> what was appended to it
        self.last_cell: dict[int, list[int]] = {}  # and, of that, to its last cell
        self.log_epoch: int | None = None
        self.log_is_open = False
        self.holding: set[int] = set()  # the origin hangs on these
        self.failing: set[int] = set()
        self._done: list[tuple[int, int]] = []
        self._seen: list[tuple[int, int, str, int]] = []
        self._seen_before: deque[list[tuple[int, int, str, int]]] = deque()
        self.late_by = 0  # deliveries: what was seen is told so much later
        self.reads = self.lookups = 0
        self._chunk_of: dict[int, int] = {}
        self._buffers: dict[int, list[int]] = {}
        self._next_chunk = 0

    @property
    def origin_bytes(self) -> int:
        return sum(self.sizes[ino] * count for ino, count in self.origin_reads.items())

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            inos = command.inos.tolist()
            if command.kind == "stage":
                assert command.store is not None
                self._queue(inos, command.store.tolist())
                queued = set(inos)
                self.fetch_queue = deque(i for i in self.fetch_queue if i not in queued)
            elif command.kind == "fetch":
                self.fetch_queue.extend(inos)
            elif command.kind == "cancel":
                out = set(inos)
                self.stage_queue = deque(i for i in self.stage_queue if i[0] not in out)
                self.fetch_queue = deque(i for i in self.fetch_queue if i not in out)
            elif command.kind == "drop":
                self.drop(inos)
            elif command.kind == "arm":
                self.armed |= set(inos)
            elif command.kind == "evict":
                self._evict(inos)
            elif command.kind == "pack":
                assert command.fields is not None
                self._pack(command.fields)
            else:
                assert command.kind == "clear"
                self.stage_queue.clear()
                self.fetch_queue.clear()
                self.armed.clear()
                self.ram_bytes = 0
                self.ram.clear()  # pages stay, but as any reader's: under the mount's own budget

    def _evict(self, inos: list[int]) -> None:
        """What lies in a segment that is written (`unsealed`) stays."""
        assert not set(inos) & {ino for ino, _ in self.stage_queue}, "it is to be staged"
        for ino in inos:
            goes = ino in self.ssd and ino not in self.unsealed
            if goes:
                self.ssd.remove(ino)
                self.ssd_free_bytes += self.sizes[ino]
                self.evicted[ino] += 1
                self.has_evicted = True
            self._done.append((ino, Result.EVICTED if goes else Result.NOT_EVICTED))

    def _queue(self, inos: list[int], bits: list[int]) -> None:
        self.frames.append((inos, bits, [self.places.get(ino) for ino in inos]))
        pairs = list(zip(inos, bits, strict=True))
        if any(bit & (MOVE | SORT) for bit in bits) and not any(bit & KEEP_ORDER for bit in bits):
            far = (1 << 60, 0)
            pairs.sort(key=lambda pair: self.places.get(pair[0], far))
        self.stage_queue.extend(pairs)

    def _pack(self, fields: Mapping[str, Any]) -> None:
        if fields["first"] == 0:
            self.end_log()
            self.packs.append(fields["chunks"] if fields["chunks"] or fields["last"] else -1)
        if fields["chunks"] == 0:
            return
        inos = fields["inos"].tolist()
        assert fields["first"] == self._next_chunk
        for chunk, length in enumerate(fields["lengths"].tolist(), self._next_chunk):
            for ino in inos[:length]:
                self._chunk_of.setdefault(ino, chunk)
            del inos[:length]
            self._next_chunk += 1
        assert not inos
        self.log_epoch = fields["epoch"]
        self.moved.setdefault(fields["epoch"], [])
        self.log_is_open = fields["last"]
        assert self.log_is_open == (self._next_chunk == fields["chunks"])

    def end_log(self) -> None:
        for chunk in list(self._buffers):
            self._write(chunk)
        self._chunk_of.clear()
        self._next_chunk = 0
        self.log_epoch, self.log_is_open = None, False

    def _append(self, ino: int) -> bool:
        """False: it has no chunk, or lies there already."""
        chunk = self._chunk_of.get(ino) if self.log_is_open else None
        assert self.log_epoch is not None or chunk is None
        if chunk is None or self.places.get(ino) == (self.log_epoch, chunk):
            return False
        buffer = self._buffers.setdefault(chunk, [])
        if ino in buffer:
            return False
        buffer.append(ino)
        self.moved[self.log_epoch or 0].append(ino)
        if chunk == self._next_chunk - 1:
            self.last_cell.setdefault(self.log_epoch or 0, []).append(ino)
        if len(buffer) == BUFFERED_FILES:
            self._write(chunk)
        return True

    def _write(self, chunk: int) -> None:
        assert self.log_epoch is not None
        for ino in self._buffers.pop(chunk):
            self.places[ino] = self.log_epoch, chunk

    def drop(self, inos: Iterable[int]) -> None:
        inos = list(inos)
        for ino in inos:
            self.missed_bytes -= self.missed.pop(ino, 0)
        gone = self.ram & set(inos)
        self.ram -= gone
        self.ram_bytes -= sum(pages(self.sizes[ino]) for ino in gone)

    def reclaim(self, inos: Iterable[int]) -> list[int]:
        """The kernel takes these as far as they are staged; the mount notices. Those that it tells
        of: what SSD has it stages again by itself.
        """
        told = [ino for ino in inos if ino in self.ram and ino not in self.ssd]
        self.ram -= set(told)
        self.ram_bytes -= sum(pages(self.sizes[ino]) for ino in told)
        self._done += [(ino, Result.RECLAIMED) for ino in told]
        return told

    def work(self, files: int) -> None:
        """Stages and fetches at most so many files, until the origin hangs on all that are left."""
        hanging = 0
        for _ in range(files):
            if self.stage_queue:
                ino, bits = self.stage_queue.popleft()
                if ino in self.holding and ino not in self.ssd:
                    self.fetch_queue.append(ino)
                else:
                    self._stage(ino, bits)
            elif self.fetch_queue:
                ino = self.fetch_queue.popleft()
                if ino in self.holding:
                    self.fetch_queue.append(ino)
                    hanging += 1
                    if hanging == len(self.fetch_queue):
                        break
                    continue
                hanging = 0
                stored = self._bring(ino, store=True)
                self._done.append((ino, stored))
            else:
                break

    def _stage(self, ino: int, bits: int) -> None:
        self.staged_order.append(ino)
        assert not bits & MOVE or ino in self.ssd, "what is moved is on SSD"
        stored = self._bring(ino, bool(bits & STORE))
        if bits & MOVE:
            self._append(ino)
        if stored == 4:
            self._done.append((ino, 4))
            return
        if ino not in self.ram:
            self.ram.add(ino)
            self.ram_bytes += pages(self.sizes[ino])
        self.ram_bytes_most = max(self.ram_bytes_most, self.ram_bytes)
        self._done.append((ino, {0: 1, 2: 3, 6: 6}[stored]))

    def _bring(self, ino: int, store: bool) -> int:
        """0: not asked to store it, 2: it is on SSD, 4: origin error, 6: no room."""
        if ino in self.ssd:
            return 2
        if ino in self.ram or ino in self.missed:
            self.missed_bytes -= self.missed.pop(ino, 0)
            return 0
        if ino in self.failing:
            return 4
        self.origin_reads[ino] += 1
        if not store:
            return 0
        if self.sizes[ino] > self.ssd_free_bytes:
            return 6
        self.ssd_free_bytes -= self.sizes[ino]
        self.ssd.add(ino)
        self.stored[ino] += 1
        if not self._append(ino):
            self.places[ino] = -1, len(self.places)
        return 2

    def read(self, ino: int, reader: str = "", process: int = 0) -> bool:
        """A reader opens and reads the file; whether it was a READ (was not in the page cache).
        `reader`: the job that it is of ("a+b": of both), another word: nobody's, or "": it is not
        known.
        """
        if ino == 0:
            return False
        self.look_up(ino, reader, process)
        is_staged = ino in self.ram
        if (is_staged and ino not in self.evicts) or self.sizes[ino] == 0 or ino in self.missed:
            return False
        self.reads += 1
        kind = 2 | 64 * is_staged
        if ino not in self.ssd:
            self.origin_reads[ino] += 1
            kind = 3
        if self.outside_bytes:
            self._keep_missed(ino)
        if ino in map(itemgetter(0), self.stage_queue):
            kind |= 8 | 16
        self._seen.append((ino, kind, reader, process))
        return True

    def _keep_missed(self, ino: int) -> None:
        """Where there is room: nothing goes for it."""
        if ino not in self.ssd and self.sizes[ino] <= self.ssd_free_bytes:
            self.ssd_free_bytes -= self.sizes[ino]
            self.ssd.add(ino)
        self.missed_bytes += pages(self.sizes[ino]) - self.missed.get(ino, 0)
        self.missed[ino] = pages(self.sizes[ino])
        while self.missed_bytes > self.outside_bytes:
            self.missed_bytes -= self.missed.popitem(last=False)[1]

    def look_up(self, ino: int, reader: str = "", process: int = 0) -> None:
        if ino in self.armed:
            self.armed.remove(ino)
            self.lookups += 1
            self._seen.append((ino, 1, reader, process))

    def deliver(
        self,
        planner: MountPlanner,
        now: float,
        jobs: Collection[str],
        nobodys: Collection[str] = (),
    ) -> None:
        """Hands over what the mount has to say. `nobodys`: of the jobs, those without a process."""

        def standing(of: str, job: str) -> int:
            if job in of.split("+") and job not in nobodys:
                return OWN
            if of in jobs and of not in nobodys:
                return ANOTHERS
            return UNKNOWN if not of or job in nobodys else STRANGER

        done, self._done = self._done, []
        self._seen_before.append(self._seen)
        seen, self._seen = [], []
        while len(self._seen_before) > self.late_by:
            seen += self._seen_before.popleft()
        if done:
            inos, results = zip(*done, strict=True)
            planner.done(np.array(inos, np.uint32), np.array(results, np.uint8), now)
        if seen:
            inos, kinds, readers, processes = zip(*seen, strict=True)
            whose = {job: np.array([standing(of, job) for of in readers], np.uint8) for job in jobs}
            planner.followers.observe(
                np.array(inos, np.uint32),
                np.array(kinds, np.uint8),
                now,
                whose,
                np.array(processes, np.uint32),
            )


def make_planner(mount: ModelMount, ram_bytes: int, keeping: Keeping | None = None) -> MountPlanner:
    """One that knows the mount's files, and has `ram_bytes` for windows."""
    planner = MountPlanner(ram_bytes * 10 // 9, mount.ssd_free_bytes, keeping)
    count = len(mount.sizes)
    inos = np.arange(1, count + 1, dtype=np.uint32)
    stored = np.array([ino in mount.ssd for ino in range(1, count + 1)], np.uint8)
    planner.learn(inos, np.array(list(mount.sizes.values()), np.uint64), stored)
    return planner


def loader_order(
    order: Inos, batch_size: int, workers: int, prefetch_factor: int, rng: np.random.Generator
) -> Iterator[int]:
    """`loader_reads` without the workers."""
    return (ino for _, ino in loader_reads(order, batch_size, workers, prefetch_factor, rng))


def loader_reads(
    order: Inos, batch_size: int, workers: int, prefetch_factor: int, rng: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """(worker, sample) of one epoch as a DataLoader's workers read them: each worker its batches
    one after another, batches handed out round robin, at most workers * prefetch_factor of them
    ahead of the oldest one that is not complete.
    """
    batches = [order[at : at + batch_size].tolist() for at in range(0, len(order), batch_size)]
    if workers == 0:
        yield from ((0, ino) for ino in order.tolist())
        return
    queues: list[deque[int]] = [deque() for _ in range(workers)]
    left = [len(batch) for batch in batches]
    oldest = handed = 0
    while oldest < len(batches):
        while handed < len(batches) and handed < oldest + workers * prefetch_factor:
            queues[handed % workers].append(handed)
            handed += 1
        busy = [queue for queue in queues if queue]
        queue = busy[int(rng.integers(len(busy)))]
        batch = queue[0]
        yield batch % workers, batches[batch][len(batches[batch]) - left[batch]]
        left[batch] -= 1
        if left[batch] == 0:
            queue.popleft()
        while oldest < len(batches) and left[oldest] == 0:
            oldest += 1
