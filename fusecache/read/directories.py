"""Directories: compared with the origin again and again (the sweep), and listed ahead of a reader.

The sweep makes changes at the origin visible within the revalidation period, since kernel caches
never expire by themselves: it compares every known directory and tells the kernel what changed. It
begins anew every half period, so that a change is seen at most (half a period + one pass) after it
happened. When a pass takes longer than half a period, `status` shows it (`last_sweep_s`). It is
gentle: between two directories it sleeps PAUSE times as long as the last one took, unless it is
late.

In a pool one host sweeps for all (pool/sweeping.py). A pass of the others is over those directories
that they cannot leave to it; what it has found they look at between the passes.

A reader that has listed a directory and then one that follows it in their parent (by name or in the
order of its listing) will want the next: they are listed in the background, 1 at first, then 2, 4
and 8 each time that the reader has come to one that is not listed. That is gentle, too: AT_ONCE at
a time, nothing while the origin's threads are busy. Calls that hang keep their threads, so an
origin that hangs gets no more of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

import trio

from fusecache import _native
from fusecache.base.errors import OriginError, OriginTimeout
from fusecache.base.metrics import CHANGES_SEEN, SWEEPS, SWEPT, Metrics
from fusecache.pool.sweeping import Alone, SharedSweep
from fusecache.read.origin import Origin, Tick

log = logging.getLogger(__name__)

DIRECTORIES_A_BATCH = 1024
PAUSE = 3.0
Changes = Mapping[bytes, Sequence[bytes]]  # names, by the path of their directory
NAMES_A_CALL = 256
AGAIN_TICKS = 4  # of a pool's: half a period
WANTED_MOST = 1 << 16
AHEAD_MOST, AT_ONCE = 8, 2  # of those that are listed ahead
RUNS_MOST = 64
ROOT = 1


class Revalidation:
    """Sweeps all listed directories; `period_s` None: never."""

    def __init__(
        self,
        origin: Origin,
        period_s: float | None,
        metrics: Metrics,
        is_late: bool = True,
        shared: SharedSweep | None = None,
    ) -> None:
        """`is_late`: what is listed was looked at long ago: the first pass begins at once.
        `shared`: with the hosts of a pool.
        """
        self.period_s = period_s
        self._shared = shared
        self._is_due = trio.Event()  # a pass, before its time
        self._wanted: deque[bytes] = deque(maxlen=WANTED_MOST)  # paths of directories
        self._again: deque[tuple[float, Changes]] = deque()  # when, and what is looked at once more
        self._is_late = is_late
        self.last_sweep_s = 0.0
        self._begin_after = 0
        self._origin = origin
        self._metrics = metrics

    async def sweep_forever(self) -> None:
        if self.period_s is None:
            return
        if not self._is_late:
            await self._until_due(self.period_s / 2)
        while True:
            self._is_due = trio.Event()
            begun = trio.current_time()
            if self._shared is not None:
                await self._begin_shared(self._shared)
            if await self.sweep(begun + self.period_s / 2, self._shared):
                self.last_sweep_s = trio.current_time() - begun
                self._metrics.add(SWEEPS)
            await self._until_due(max(0.01, begun + self.period_s / 2 - trio.current_time()))

    async def _until_due(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self._is_due.wait()

    async def sweep(self, deadline: float = 0.0, shared: SharedSweep | None = None) -> bool:
        """One pass over all directories; pauses only while before `deadline` (trio clock).
        `shared`: some may be left to another host. False: all were.

        When the origin hangs the pass ends, and the next one goes on behind that directory.
        """
        after, self._begin_after = self._begin_after, 0
        has_looked = shared is None
        while batch := _native.directories(after, DIRECTORIES_A_BATCH):
            for directory in batch:
                epoch = shared.epoch if shared is not None else None
                if epoch is not None and epoch.leaves(directory):
                    continue
                has_looked = True
                begun = trio.current_time()
                try:
                    await self._look_for(epoch, directory)
                except OriginTimeout:
                    self._begin_after = directory
                    if shared is not None:
                        shared.end_pass(is_well=False)
                    return True
                except OriginError as error:
                    log.debug("cannot look at a directory: %s", error)
                self._metrics.add(SWEPT)
                now = trio.current_time()
                pause = PAUSE * (now - begun)
                await trio.sleep(pause if now + pause < deadline else 0)
            after = batch[-1]
            await trio.lowlevel.checkpoint()
        if shared is not None:
            shared.end_pass(is_well=True)
        return has_looked

    async def _look_for(self, epoch: Alone | None, directory: int) -> None:
        """The sweep's look at a directory. Raises OriginError."""
        if epoch is None:
            await self.look(directory)
            return
        path = _native.path(directory)
        is_forced = epoch.trusts(path) and _native.is_shared(directory)
        try:
            await self.look(directory, is_forced=is_forced)
        except OriginError:
            epoch.failed(directory)
            raise
        epoch.looked(directory, path, _native.is_shared(directory), is_forced)

    async def look(self, directory: int, background: bool = True, is_forced: bool = False) -> None:
        """Compare one directory with the origin; `is_forced`: past attribute caches on the way.
        Raises OriginError.
        """

        def scan(tick: Tick) -> tuple[int, int, int]:
            return _native.scan(directory, tick, is_forced)

        changes = await self._origin.call(scan, background=background, about=directory)
        self._metrics.add(CHANGES_SEEN, sum(changes))

    # ---- with the hosts of a pool ----------------------------------------------------------------

    async def share_forever(self) -> None:
        """Ask who sweeps, and look at what that host has found."""
        shared = self._shared
        if shared is None:
            return
        while True:
            await self._tick(shared)
            await trio.sleep(shared.pause_s)

    async def _tick(self, shared: SharedSweep) -> None:
        epoch = shared.epoch
        root = None
        if shared.needs_root:
            try:
                root = await self._origin.source_times()
            except OriginError as error:
                log.debug("cannot look at the source: %s", error)
        found = await trio.to_thread.run_sync(shared.tick, root, abandon_on_cancel=True)
        if shared.epoch is not epoch:
            self._is_due.set()
        self._wanted.extend(found.wanted)
        now = trio.current_time()
        await self._look_at(found.changes, shared)
        while self._again and self._again[0][0] <= now:
            await self._look_at(self._again.popleft()[1], shared)
        if found.changes:  # a look that was under way may have put something older back
            self._again.append((now + shared.tick_s * AGAIN_TICKS, found.changes))

    async def _look_at(self, changes: Changes, shared: SharedSweep) -> None:
        """At names that another host has seen change."""
        for path, names in changes.items():
            directory = _native.find_path(path)
            if not directory or not _native.is_listed(directory):
                continue  # what is not listed is looked up anew
            for first in range(0, len(names), NAMES_A_CALL):
                some = names[first : first + NAMES_A_CALL]
                try:
                    await self._origin.call(_looks(directory, some), background=True)
                except OriginError as error:
                    log.debug("cannot look at what another host has seen change: %s", error)
                    shared.epoch.failed(directory)
                    break
                self._metrics.add(CHANGES_SEEN, len(some))

    async def _begin_shared(self, shared: SharedSweep) -> None:
        """Before a pass: the root itself, and directories that others want swept."""
        shared.begin_pass()
        try:
            await self._origin.source_times()  # now what is kept of it on the way is not older
            await self._origin.refresh(ROOT)
            while self._wanted:
                await self._list(self._wanted.popleft())
        except OriginError as error:
            log.debug("cannot look at the source: %s", error)

    async def _list(self, path: bytes) -> None:
        """The directory at `path` below the source, if there is one. Raises OriginTimeout."""

        def find(_tick: Tick) -> int:
            directory = ROOT
            for name in path.split(b"/") if path else []:
                directory = _native.add(directory, name)
            return directory

        try:
            directory = _native.find_path(path) or await self._origin.call(find, background=True)
            if not _native.is_listed(directory):
                await self.look(directory)
        except OriginTimeout:
            raise
        except OriginError as error:
            log.debug("cannot list what another host has listed: %s", error)


def _looks(directory: int, names: Sequence[bytes]) -> Callable[[Tick], None]:
    def look(tick: Tick) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # and so it is gone from the table
                _native.add(directory, name, is_forced=True)
            tick()

    return look


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
