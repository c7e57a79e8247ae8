"""What `fusecache evict` drops: files from SSD, and their pages from the kernel."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial

import numpy as np
import trio

from fusecache import _native
from fusecache.ahead.prefetcher import Prefetcher
from fusecache.ahead.stored import Evictions, Places
from fusecache.base.errors import OriginError
from fusecache.control.control import Message, RequestError, Send
from fusecache.read.fetcher import Fetcher
from fusecache.read.operations import Operations
from fusecache.reorder.packer import Packer
from fusecache.server.pinning import Pinning
from fusecache.server.selecting import Asked, Failures, select, telling
from fusecache.store import Store
from fusecache.table import namespace
from fusecache.table.pins import Inos

BATCH = 1024  # files
AGAIN_MOST = 1 << 16  # those that stayed, together: they may share blocks with each other alone


@dataclass
class _Progress:
    """Of files that the globs name."""

    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0


@dataclass
class _Outcome:
    files: int = 0
    bytes: int = 0
    absent: int = 0
    of_jobs: int = 0
    pinned: int = 0

    def count(self, evicted: int, size: int, dropped: int) -> None:
        self.files += evicted
        self.bytes += size
        self.absent += dropped - evicted


class Evicting:
    """Of one mount."""

    def __init__(
        self,
        *,
        operations: Operations,
        prefetcher: Prefetcher,
        fetcher: Fetcher,
        evictions: Evictions,
        store: Store,
        packer: Packer,
        pinning: Pinning,
    ) -> None:
        self._operations = operations
        self._prefetcher = prefetcher
        self._fetcher = fetcher
        self._evictions = evictions
        self._store = store
        self._packer = packer
        self._pinning = pinning
        self._one = trio.Lock()

    async def evict(self, request: Message, send: Send) -> Message:
        """Drop what the request's "globs" name below its "prefix" (docs/WIRE.md)."""
        progress = _Progress()
        return await telling(lambda: self._evict(request, progress), lambda: vars(progress), send)

    async def _evict(self, request: Message, progress: _Progress) -> Message:
        asked, failures = Asked.of(request), Failures()
        if not asked.globs:
            raise RequestError("globs must name something")

        async def list_known(directory: int) -> None:
            try:
                await self._operations.list(directory)
            except OriginError as error:  # what is known of it can be evicted all the same
                failures.add(_native.path(directory), error)

        def chosen(ino: int, _: bytes) -> None:
            progress.files_total += 1
            progress.bytes_total += namespace.version(ino).size

        files, unmatched = await select(asked, list_known, chosen, failures)
        if not files:
            raise asked.none_found()
        if not await trio.to_thread.run_sync(self._store.can_punch):
            raise RequestError(
                "nothing was evicted: the cache directory is away, or its disk cannot give back a "
                "part of a file"
            )
        await self._pinning.look()  # names may have come that it has not seen
        async with self._one:
            freed_before = self._store.evicted_bytes()
            await self._fetcher.published()
            await trio.to_thread.run_sync(self._store.seal)
            outcome, staying = await self._evict_all(files, progress)
        return {
            "result": {
                **vars(outcome),
                "evicted_bytes": self._store.evicted_bytes() - freed_before,
                "staying": len(staying),
                "has_logs": self._packer.has_logs,
                "unmatched": unmatched,
                **failures.fields(),
            }
        }

    async def _evict_all(
        self, files: array[int], progress: _Progress
    ) -> tuple[_Outcome, list[int]]:
        outcome, staying = _Outcome(), list[int]()
        for begin in range(0, len(files), BATCH):
            inos = np.unique(np.array(files[begin : begin + BATCH], np.uint32))
            sizes = [namespace.version(ino).size for ino in files[begin : begin + BATCH]]
            staying += await self._evict_some(self._unpinned(inos, outcome), outcome)
            progress.files_done += len(sizes)
            progress.bytes_done += sum(sizes)
        again, staying = staying, []
        for begin in range(0, len(again), AGAIN_MOST):
            inos = np.array(again[begin : begin + AGAIN_MOST], np.uint32)
            staying += await self._evict_some(inos, outcome)
        return outcome, staying

    def _unpinned(self, inos: Inos, outcome: _Outcome) -> Inos:
        of_jobs = self._prefetcher.pins.holds(inos)
        of_users = self._pinning.may_hold(inos) & ~of_jobs
        outcome.of_jobs += int(of_jobs.sum())
        outcome.pinned += int(of_users.sum())
        return inos[~(of_jobs | of_users)]

    async def _evict_some(self, inos: Inos, outcome: _Outcome) -> list[int]:
        """Those that stay."""
        evict = partial(self._evictions.evict, inos.tolist(), by_user=True)
        found = await trio.to_thread.run_sync(evict)
        async with self._fetcher.publishing:  # as Prefetcher.evict
            gone = await trio.to_thread.run_sync(self._evictions.forget, found)
        dropped = await trio.to_thread.run_sync(_count, found, gone, outcome)
        await self._prefetcher.drop(dropped)
        return [ino for ino, is_gone in gone.items() if not is_gone]


def _count(found: dict[int, Places | None], gone: dict[int, bool], outcome: _Outcome) -> Inos:
    """Those that are not on SSD now; there may be many."""
    dropped = [ino for ino, is_gone in gone.items() if is_gone]
    evicted = [ino for ino in dropped if found[ino]]
    outcome.count(len(evicted), sum(namespace.version(ino).size for ino in evicted), len(dropped))
    return np.array(dropped, np.uint32)
