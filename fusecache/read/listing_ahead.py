"""Directories are listed ahead of a reader that lists one after another.

A reader that has listed a directory and then one that follows it in their parent (by name or in the
order of its listing) will want the next: they are listed in the background, 1 at first, then 2, 4
and 8 each time that the reader has come to one that is not listed.

It is gentle: AT_ONCE at a time, nothing while the origin's threads are busy. Calls that hang keep
their threads, so an origin that hangs gets no more of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from fusecache import _native
from fusecache.read.origin import Origin

AHEAD_MOST = 8
AT_ONCE = 2
RUNS_MOST = 64
ROOT = 1


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
