"""Of what is to be fetched: what is on SSD already, what is large, what waits for the origin?"""

from __future__ import annotations

import numpy as np
import trio

from fusecache.ahead.fetching import SORTED_MOST, Fetching
from fusecache.ahead.large import LargeFiles
from fusecache.ahead.marks import Answers
from fusecache.ahead.queues import FetchQueue
from fusecache.ahead.stored import Stored
from fusecache.store.types import BLOCK_BYTES
from fusecache.table import namespace

SORT_BATCH = 256


class Sorting:
    """Of the one plan there is."""

    def __init__(
        self,
        queue: FetchQueue,
        stored: Stored,
        fetching: Fetching,
        large: LargeFiles,
        answers: Answers,
    ) -> None:
        self._queue = queue
        self._stored = stored
        self._fetching = fetching
        self._large = large
        self._answers = answers
        self._threads = trio.CapacityLimiter(1)

    async def run_forever(self) -> None:
        while True:
            if not self._queue.count or self._fetching.line.count_to_fetch >= SORTED_MOST:
                await self._queue.work.park()
                continue
            plan, (inos, _) = self._answers.plan, self._queue.take(SORT_BATCH)
            unsorted = self._fetching.only_fetched(inos)
            if not unsorted:
                await trio.sleep(0)
                continue
            are_stored = await trio.to_thread.run_sync(
                self._stored.are_stored, unsorted, limiter=self._threads, abandon_on_cancel=True
            )
            if plan == self._answers.plan:
                stored = {ino for ino, yes in zip(unsorted, are_stored, strict=True) if yes}
                self._sorted(unsorted, stored)

    def _sorted(self, inos: list[int], stored: set[int]) -> None:
        left = self._fetching.only_fetched(np.array(inos, np.uint32))
        self._fetching.answer_stored([ino for ino in left if ino in stored])
        for ino in (ino for ino in left if ino not in stored):
            if namespace.version(ino).size > BLOCK_BYTES:
                self._large.put(ino, store=True)
            else:
                self._fetching.line.fetch(ino)
        self._fetching.feed_soon()
