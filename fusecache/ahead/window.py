"""What is staged, of all jobs, in the order of need, and which of it the kernel has let go of. (The
window of one job is hintsd's: hintsd/plan/job.py.)

The kernel evicts pages without a word: under memory pressure, or when a process writes to
drop_caches. Once a second a few of the staged files are looked at, some of those that come first
and some anywhere; at once when a READ of a staged file arrives. Is one of them gone, all are looked
at, in their order, and those that are gone are given to `lost`, which stages them again or tells of
them.

INVARIANT: only what the RAM ring counts is restored, so the ring's total does not grow by it.
INVARIANT: restoring does not fight the kernel for memory: a look that finds something gone doubles
the pause before the next one, up to PAUSE_S_MOST.
It is no budget and no policy: what hintsd wants staged stays what it was.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable

import numpy as np
import trio

from fusecache import _native
from fusecache.ahead.marks import Inos, flags_of
from fusecache.base.metrics import WINDOW_LOOKS, Metrics
from fusecache.base.wire import Standing
from fusecache.read.kernel import Kernel

LOOK_S, PAUSE_S_MOST = 1.0, 64.0
SUSPECT_S = 0.05  # READs of staged files that come together are one suspicion
SAMPLES = 8  # of those that come first, and as many anywhere
HEAD_FILES = 512  # come first
BATCH = 256  # files asked for in one visit to a thread
ANSWER_MS = 1000
COMPACT_FILES = 65_536

_STANDING = Standing.WANTED | Standing.STAGED
_ON_ITS_WAY = Standing.QUEUED | Standing.FLYING


def standing(inos: Inos) -> Inos:
    """Those whose pages were pushed and are to stay, and that are not being staged again."""
    is_standing = flags_of(inos) & np.uint8(_STANDING | _ON_ITS_WAY) == _STANDING
    return np.compress(is_standing, inos)


class Window:
    """Of the one plan there is."""

    def __init__(
        self, kernel: Kernel, metrics: Metrics, lost: Callable[[Inos], Awaitable[None]]
    ) -> None:
        self._kernel = kernel
        self._metrics = metrics
        self._lost = lost
        self._parts: deque[Inos] = deque()
        self._count = self._compacted = 0
        self._plan = 0
        self._suspicion = trio.Event()
        self._threads = trio.CapacityLimiter(1)

    def put(self, inos: Inos) -> None:
        """They are to be staged, after all others."""
        if not len(inos):
            return
        self._parts.append(inos)
        self._count += len(inos)
        if self._count > 2 * self._compacted + COMPACT_FILES:
            self._compact()

    def clear(self) -> None:
        self._parts.clear()
        self._count = self._compacted = 0
        self._plan += 1

    def suspect(self) -> None:
        """A reader has asked for a file that was staged."""
        self._suspicion.set()

    async def watch_forever(self) -> None:
        pause_s = LOOK_S
        while True:
            if pause_s == LOOK_S:
                with trio.move_on_after(LOOK_S):
                    await self._suspicion.wait()
                    await trio.sleep(SUSPECT_S)
            else:
                await trio.sleep(pause_s)
            self._suspicion = trio.Event()
            is_whole = await self._look()
            pause_s = LOOK_S if is_whole else min(2 * pause_s, PAUSE_S_MOST)

    async def _look(self) -> bool:
        """False: something was gone."""
        self._metrics.add(WINDOW_LOOKS)
        if not len(await self._gone(self._sample())):
            return True
        plan = self._plan
        for part in list(self._parts):
            for start in range(0, len(part), BATCH):
                gone = await self._gone(standing(part[start : start + BATCH]))
                if plan != self._plan:
                    return True
                if len(gone):
                    await self._lost(gone)
        return False

    async def _gone(self, inos: Inos) -> Inos:
        if not len(inos):
            return inos
        flags = await trio.to_thread.run_sync(
            _native.ask_pages,
            self._kernel.fuse_fd,
            inos.tobytes(),
            ANSWER_MS,
            limiter=self._threads,
            abandon_on_cancel=True,
        )
        return np.compress(np.frombuffer(flags, np.uint8) == _native.PAGES_GONE, inos)

    def _sample(self) -> Inos:
        self._forget_passed()
        if not self._parts:
            return np.empty(0, np.uint32)
        head, size = [], 0
        for part in self._parts:
            head.append(part[:HEAD_FILES])
            size += len(head[-1])
            if size >= HEAD_FILES:
                break
        first = standing(np.concatenate(head))
        chosen = first[np.linspace(0, max(0, len(first) - 1), SAMPLES).astype(int)[: len(first)]]
        parts = random.choices(self._parts, [len(part) for part in self._parts], k=SAMPLES)
        anywhere = np.array([random.choice(part) for part in parts], np.uint32)
        return np.unique(np.concatenate([chosen, standing(anywhere)]))

    def _forget_passed(self) -> None:
        """Those in front that are not wanted any more."""
        while self._parts:
            is_wanted = flags_of(self._parts[0]) & Standing.WANTED != 0
            passed = int(np.argmax(is_wanted)) if is_wanted.any() else len(is_wanted)
            self._count -= passed
            if passed < len(is_wanted):
                self._parts[0] = self._parts[0][passed:]
                return
            self._parts.popleft()

    def _compact(self) -> None:
        """What is wanted, each file once, where it came last."""
        inos = np.concatenate(self._parts)
        inos = inos[flags_of(inos) & Standing.WANTED != 0]
        _, from_end = np.unique(inos[::-1], return_index=True)
        inos = inos[np.sort(len(inos) - 1 - from_end)]
        self._parts = deque([inos])
        self._count = self._compacted = len(inos)
