"""Trainings that walk a ring of chunks side by side, through a cache that keeps what any of them
reads soonest: how often the dataset is fetched. No clock, no process: speeds are numbers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

CHUNKS = 10
PARTS = 8  # of a chunk, which are read in an order of the job's own
LEAD = PARTS // 2  # the next chunk is chosen when so many parts are still to be read

Rule = Callable[..., int]


@dataclass
class SimulatedJob:
    """Reads `epochs`, `speed` parts in a unit of time, from `start` on."""

    speed: float
    epochs: int
    start: float = 0.0
    read: list[list[int]] = field(default_factory=lambda: [[]])
    """The parts of each epoch, in turn."""
    place: int | None = None
    """The chunk that it chose last; None: nobody knows of it yet."""
    last: int = -1
    unread: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.read) > self.epochs

    def begin(self) -> None:
        self.unread = _after(self.last)

    def take(self, chunk: int, rng: np.random.Generator) -> None:
        self.place = self.last = chunk
        self.unread = [each for each in _after(chunk) if each in self.unread and each != chunk]
        self.queue += (chunk * PARTS + rng.permutation(PARTS)).tolist()

    def future(self) -> list[int]:
        """What it says it will read, of this epoch and the next."""
        told = list(self.queue)
        behind = _after((self.unread or [self.last])[-1]) if len(self.read) < self.epochs else []
        for chunk in [*self.unread, *behind]:
            told += range(chunk * PARTS, (chunk + 1) * PARTS)
        return told


def _after(chunk: int) -> list[int]:
    return [(chunk + step) % CHUNKS for step in range(1, CHUNKS + 1)]


def fetched(jobs: Sequence[SimulatedJob], cached_chunks: int, rule: Rule, seed: int = 0) -> float:
    """Datasets that are fetched until all jobs are over. The cache takes so many chunks."""
    rng, cache, count = np.random.default_rng(seed), set[int](), 0
    due = [(job.start, number) for number, job in enumerate(jobs)]
    heapq.heapify(due)
    for job in jobs:
        job.begin()
    while due:
        now, number = heapq.heappop(due)
        job = jobs[number]
        if not job.queue and not job.unread:
            job.read.append([])
            if job.is_over:
                continue
            job.begin()
        while len(job.queue) <= LEAD and job.unread:
            others = [
                other.place
                for other in jobs
                if other is not job and other.place is not None and not other.is_over
            ]
            job.take(rule(job.unread, others, CHUNKS), rng)
        part = job.queue.pop(0)
        job.read[-1].append(part)
        if part not in cache:
            count += 1
            if len(cache) == cached_chunks * PARTS:
                cache.remove(_used_last(cache, [each for each in jobs if each.start <= now]))
            cache.add(part)
        heapq.heappush(due, (now + (0.9 + 0.2 * rng.random()) / job.speed, number))
    return count / (CHUNKS * PARTS)


def _used_last(cache: set[int], jobs: list[SimulatedJob]) -> int:
    when = dict.fromkeys(cache, np.inf)
    for job in jobs:
        if not job.is_over:
            for step, part in enumerate(job.future()):
                if part in when:
                    when[part] = min(when[part], step / job.speed)
    return max(cache, key=lambda part: (when[part], part))
