"""Directories: compared with the origin again and again (the sweep), and listed ahead of a reader.

The sweep makes changes at the origin visible within the revalidation period, since kernel caches
never expire by themselves: it compares every known directory and tells the kernel what changed. It
begins anew every half period, so that a change is seen at most (half a period + one pass) after it
happened. When a pass takes longer than half a period, `status` shows it (`last_sweep_s`). It is
gentle: between two directories it sleeps PAUSE times as long as the last one took, unless it is
late.

A reader that has listed a directory and then one that follows it in their parent (by name or in the
order of its listing) will want the next: they are listed in the background, 1 at first, then 2, 4
and 8 each time that the reader has come to one that is not listed. That is gentle, too: AT_ONCE at
a time, nothing while the origin's threads are busy. Calls that hang keep their threads, so an
origin that hangs gets no more of them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from fusecache import _native
from fusecache.base.errors import OriginError, OriginTimeout
from fusecache.base.metrics import CHANGES_SEEN, SWEEPS, Metrics
from fusecache.read.origin import Origin, Tick

log = logging.getLogger(__name__)

DIRECTORIES_A_BATCH = 1024
PAUSE = 3.0
AHEAD_MOST, AT_ONCE = 8, 2  # of those that are listed ahead
RUNS_MOST = 64
ROOT = 1


class Revalidation:
    """Sweeps all listed directories; `period_s` None: never."""

    def __init__(
        self, origin: Origin, period_s: float | None, metrics: Metrics, is_late: bool = True
    ) -> None:
        """`is_late`: what is listed was looked at long ago: the first pass begins at once."""
        self.period_s = period_s
        self._is_late = is_late
        self.last_sweep_s = 0.0
        self._begin_after = 0
        self._origin = origin
        self._metrics = metrics

    async def sweep_forever(self) -> None:
        if self.period_s is None:
            return
        if not self._is_late:
            await trio.sleep(self.period_s / 2)
        while True:
            begun = trio.current_time()
            await self.sweep(deadline=begun + self.period_s / 2)
            self.last_sweep_s = trio.current_time() - begun
            self._metrics.add(SWEEPS)
            await trio.sleep(max(0.01, begun + self.period_s / 2 - trio.current_time()))

    async def sweep(self, deadline: float = 0.0) -> None:
        """One pass over all directories; pauses only while before `deadline` (trio clock).

        When the origin hangs the pass ends, and the next one goes on behind that directory.
        """
        after, self._begin_after = self._begin_after, 0
        while batch := _native.directories(after, DIRECTORIES_A_BATCH):
            for directory in batch:
                begun = trio.current_time()
                try:
                    await self.look(directory)
                except OriginTimeout:
                    self._begin_after = directory
                    return
                except OriginError as error:
                    log.debug("cannot look at a directory: %s", error)
                now = trio.current_time()
                pause = PAUSE * (now - begun)
                await trio.sleep(pause if now + pause < deadline else 0)
            after = batch[-1]

    async def look(self, directory: int, background: bool = True) -> None:
        """Compare one directory with the origin. Raises OriginError."""

        def scan(tick: Tick) -> tuple[int, int, int]:
            return _native.scan(directory, tick)

        changes = await self._origin.call(scan, background=background, about=directory)
        self._metrics.add(CHANGES_SEEN, sum(changes))


class Run(NamedTuple):
    """How the directories of one parent are being listed."""

    last: int
    ahead: int = 0  # so many behind `last` were asked for
    by_name: bool = True


class ListingAhead:
    """`list_ahead` raises nothing, and returns at once when the directory is being listed."""

    def __init__(
        self,
        origin: Origin,
        nursery: trio.Nursery,
        list_ahead: Callable[[int], Awaitable[None]],
    ) -> None:
        self._origin = origin
        self._nursery = nursery
        self._list_ahead = list_ahead
        self._runs: dict[int, Run] = {}  # by parent; the one that went on last is the last
        self._wanted: deque[int] = deque(maxlen=AHEAD_MOST)
        self._tasks = 0

    def note(self, directory: int) -> None:
        """A reader had to wait until this directory was listed."""
        if directory == ROOT:
            return
        parent = _native.parent(directory)
        run = _next(self._runs.pop(parent, None), directory)
        self._runs[parent] = run
        if len(self._runs) > RUNS_MOST:
            del self._runs[next(iter(self._runs))]
        if run.ahead == 0:
            return
        self._wanted.clear()
        self._wanted.extend(_native.siblings(directory, run.by_name, run.ahead))
        while self._tasks < min(AT_ONCE, len(self._wanted)):
            self._tasks += 1
            self._nursery.start_soon(self._work)

    async def _work(self) -> None:
        try:
            while self._wanted and self._origin.available and self._origin.has_idle_threads():
                await self._list_ahead(self._wanted.popleft())
        finally:
            self._tasks -= 1


def _next(run: Run | None, directory: int) -> Run:
    if run is not None:
        for by_name in (run.by_name, not run.by_name):
            if directory in _native.siblings(run.last, by_name, run.ahead + 1):
                return Run(directory, min(2 * run.ahead or 1, AHEAD_MOST), by_name)
    return Run(directory)
