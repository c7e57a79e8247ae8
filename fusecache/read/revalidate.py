"""The sweep: changes at the origin become visible within the revalidation period.

Kernel caches never expire by themselves; this sweep compares every known directory with the origin
and tells the kernel what changed. It begins anew every half period, so that a change is seen at
most (half a period + one pass) after it happened. When a pass takes longer than half a period,
`status` shows
it (`last_sweep_s`).

It is gentle: between two directories it sleeps PAUSE times as long as the last one took, unless it
is late.
"""

from __future__ import annotations

import logging

import trio

from fusecache import _native
from fusecache.base.errors import OriginError, OriginTimeout
from fusecache.base.metrics import CHANGES_SEEN, SWEEPS, Metrics
from fusecache.read.origin import Origin, Tick

log = logging.getLogger(__name__)

DIRECTORIES_A_BATCH = 1024
PAUSE = 3.0


class Revalidation:
    """Sweeps all listed directories; `period_s` None: never."""

    def __init__(self, origin: Origin, period_s: float | None, metrics: Metrics) -> None:
        self.period_s = period_s
        self.last_sweep_s = 0.0
        self._begin_after = 0
        self._origin = origin
        self._metrics = metrics

    async def sweep_forever(self) -> None:
        if self.period_s is None:
            return
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
