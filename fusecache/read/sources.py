"""Where the bytes of a block come from: the near sources, the pool over hosts, if any, then the far
sources, nearest first.

server/serving.py has the lists. A READ on the slow path goes by all (fetcher.py). READs that wait
for the fetch threads ask the near ones (misses.py), and a plan asks the log and SsdSource
(ahead/stored.py). The fetch threads do not see these lists: native/ahead/fetch.c (`fetch_one`)
repeats the pool and the far ones; a new far source goes into both.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import trio

from fusecache import _native
from fusecache.base.errors import FaultLog
from fusecache.base.metrics import (
    BYTES_FROM_ORIGIN,
    BYTES_FROM_POOL,
    LINKED_BYTES,
    LINKED_FILES,
    ORIGIN_FILES,
    POOL_FILES,
    Counter,
    Metrics,
)
from fusecache.cached.shared import Block, SharedBlocks
from fusecache.cached.talk import is_of_service
from fusecache.manifest.loading import Manifest
from fusecache.read.origin import Tick, read_range
from fusecache.store import Store
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table.locations import open_segment, use
from fusecache.table.namespace import block_span, is_located

T = TypeVar("T")

STORE_THREADS: Final = 8
STORE_TIMEOUT_S: Final = 5.0
STORE_OFF_S: Final = 30.0
"""How long a cache that hung is not asked again."""
AWAITED_POLL_S: Final = 0.02
"""What another mount reads is looked for so often."""
POOL_THREADS: Final = 16
POOL_WRITERS: Final = 2
POOL_WRITES_MOST: Final = 8
"""Blocks that wait to be written to the pool, in memory."""


class Counts(NamedTuple):
    """What is counted of what is not near."""

    files: Counter
    bytes: Counter


class Source(Protocol):
    """All is blocking: for worker threads. The file's path is `_native.path(ino)`.

    A far one runs on a thread of the origin, within its time-out. What it raises ends the read, and
    counts as the origin's: one that fails returns None.

    What proves that bytes are of a version: they were read at the origin itself; or they match a
    checksum of what was stored under that version (SSD, pool), or the manifest's digest. Size and
    mtime alone of another directory are no proof.
    """

    @property
    def counts(self) -> Counts | None:
        """None: it is near: its bytes count as SSD's, and are not stored. All else is far, wherever
        it lies.
        """

    def has(self, ino: int, version: Version, block: int, is_read: bool = False) -> bool:
        """Whether it has the block; the front may be told where. Near ones alone are asked.
        `is_read`: a reader waits for it, so it is read at the origin if none has it.
        """

    def read(
        self, ino: int, version: Version, offset: int, length: int, tick: Tick
    ) -> bytes | memoryview | None:
        """Exactly these bytes of one block, verified, of `version`; None: it has them not. Calls
        `tick` whenever it made progress. OSError, OriginChanged: as the origin's.
        """


class LogBuffers:
    """Files that wait in the log to be written: they have no location yet."""

    counts = None

    def has(self, ino: int, version: Version, block: int, is_read: bool = False) -> bool:
        is_small = version.size <= BLOCK_BYTES
        return is_small and _native.log_read(ino, version, 0, 0) is not None

    def read(
        self, ino: int, version: Version, offset: int, length: int, tick: Tick
    ) -> bytes | memoryview | None:
        return _native.log_read(ino, version, offset, length)


class SsdSource:
    """Segment files on SSD, which the front reads by itself once it knows where blocks lie: the
    mount's own, and those of the host's cache service.
    """

    counts = None

    def __init__(
        self,
        store: Store,
        dataset: bytes,
        manifest: Manifest,
        metrics: Metrics,
        shared: SharedBlocks | None = None,
    ) -> None:
        self._shared = shared
        self._store = store
        self._dataset = dataset
        self._manifest = manifest
        self._metrics = metrics

    def has(self, ino: int, version: Version, block: int, is_read: bool = False) -> bool:
        """If so, the front knows from now on where the block lies."""
        if self.has_unasked(ino, version, block):
            return True
        return self._shared is not None and self._shared.locate(Block(ino, version, block), is_read)

    def has_unasked(self, ino: int, version: Version, block: int) -> bool:
        """The same, without a question to the cache service: for many there is `locate_shared`."""
        known = _native.get_location(ino, block)
        if known is not None and self._open(known[0]):
            return True
        at = self._store.lookup(self._dataset, _native.path(ino), version, block)
        if at is not None and use(self._store, ino, block, at, version):
            return True
        return self.link(ino, version, block)

    def _open(self, segno: int) -> bool:
        """False: the segment is gone, or was the service's, which this mount uses no more."""
        if is_of_service(segno):
            return self._shared is not None and open_segment(self._shared, segno)
        return open_segment(self._store, segno)

    @property
    def has_shared(self) -> bool:
        """Whether the host's cache service is asked now."""
        return self._shared is not None and self._shared.is_used

    def locate_shared(self, inos: list[int], are_read: bool = False) -> None:
        """Of files of one block those that the cache service has, and are not known to be on SSD,
        are located now. As `has`, many at a time.
        """
        if self._shared is not None:
            self._shared.locate_all([i for i in inos if not is_located(i)], are_read)

    def is_awaited(self, ino: int) -> bool:
        """As Sources.is_awaited, of a file of one block."""
        return self._shared is not None and self._shared.is_awaited(ino, 0)

    def link(self, ino: int, version: Version, block: int) -> bool:
        """The same of what came there under another path: the manifest knows its digest."""
        # The usual case: a path is not computed for nothing.
        if not (self._manifest.files and self._manifest.is_of_cache):
            return False
        path = _native.path(ino)
        name = self._manifest.find(path, version, block)
        if name is None:
            return False
        _, length = block_span(version.size, block)
        at = self._store.lookup_block(name, length)
        if at is None or not use(self._store, ino, block, at, version):
            return False
        self._store.link(self._dataset, path, version, block, at)
        self._metrics.add(LINKED_FILES, int(block == 0))
        self._metrics.add(LINKED_BYTES, length)
        return True

    def read(
        self, ino: int, version: Version, offset: int, length: int, tick: Tick
    ) -> bytes | memoryview | None:
        if not self.has(ino, version, offset // BLOCK_BYTES, is_read=True):
            return None
        return _native.read_cached(ino, offset, length)


class OriginFiles:
    """The origin. It has everything."""

    counts = Counts(ORIGIN_FILES, BYTES_FROM_ORIGIN)

    def has(self, ino: int, version: Version, block: int, is_read: bool = False) -> bool:
        return True

    def read(
        self, ino: int, version: Version, offset: int, length: int, tick: Tick
    ) -> bytes | memoryview | None:
        return read_range(ino, version, offset, length, tick)


class Loaded(NamedTuple):
    data: bytes | memoryview
    counts: Counts | None
    """Of the source that had them."""


class Sources:
    """What is near, the pool, and what is far.

    INVARIANT: a slow or hanging cache disk is a miss, and never a reader's long wait: what is near
    is asked by threads of its own, for STORE_TIMEOUT_S, before a thread of the origin is taken. All
    near ones share one breaker: one that hangs takes SSD out of use for STORE_OFF_S.
    """

    def __init__(
        self,
        near: Sequence[Source],
        far: Sequence[Source],
        faults: FaultLog,
        pool: Pool | None = None,
        shared: SharedBlocks | None = None,
    ) -> None:
        """`near`: on this host; `far`: the last one is the origin."""
        self._shared = shared
        self._near, self._far, self.pool = near, far, pool
        self._faults = faults
        self._threads = trio.CapacityLimiter(STORE_THREADS)
        self._off_until = -math.inf
        self._hung: list[threading.Event] = []  # of each call that was given up: set when it ends

    def is_lent(self, counts: Counts | None) -> bool:
        """Whether bytes of the source with these counts are another host's, which has them on its
        SSD: they are not stored here as well.
        """
        return self.pool is not None and self.pool.has_peers and counts is self.pool.counts

    # ---- near ------------------------------------------------------------------------------------
    def is_near(self, ino: int, version: Version, block: int) -> bool:
        """Whether a near one has the block that a reader waits for. Blocking."""
        return any(source.has(ino, version, block, is_read=True) for source in self._near)

    def is_awaited(self, ino: int, block: int) -> bool:
        """Whether no near one has it, but another mount of this host reads it now: a near one will
        have it soon.
        """
        return self._shared is not None and self._shared.is_awaited(ino, block)

    async def load_near(
        self, ino: int, version: Version, offset: int, length: int
    ) -> Loaded | None:
        """These bytes of one block; None: no near one has them, or said so in time."""
        while True:
            asked = self._load, self._near, ino, version, offset, length, _no_tick
            loaded = await self.ask(*asked)
            if loaded is not None or not self.is_awaited(ino, offset // BLOCK_BYTES):
                return loaded
            await trio.sleep(AWAITED_POLL_S)

    async def ask(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """function(*arguments), which asks the store; None: it failed, or not in time."""
        self._hung = [ended for ended in self._hung if not ended.is_set()]
        if trio.current_time() < self._off_until or len(self._hung) == STORE_THREADS:
            return None
        has_begun, ended = False, threading.Event()

        def call() -> T:
            nonlocal has_begun
            has_begun = True
            try:
                return function(*arguments)
            finally:
                ended.set()

        with trio.move_on_after(STORE_TIMEOUT_S):
            try:
                return await trio.to_thread.run_sync(
                    call, limiter=self._threads, abandon_on_cancel=True
                )
            except OSError as error:  # no descriptor is left for a segment
                self._faults.report("io", f"the cache cannot be read: {error.strerror or error}")
                return None
        if not has_begun:  # a queue is no hang
            return None
        self._hung.append(ended)
        self._faults.report("slow", f"the cache did not answer within {STORE_TIMEOUT_S:g} s")
        self._off_until = trio.current_time() + STORE_OFF_S
        return None

    # ---- far -------------------------------------------------------------------------------------
    def load_far(self, ino: int, version: Version, offset: int, length: int, tick: Tick) -> Loaded:
        """These bytes of one block. Blocking; raises as Source.read."""
        loaded = self._load(self._far, ino, version, offset, length, tick)
        assert loaded is not None, "the origin has everything"
        return loaded

    @staticmethod
    def _load(
        sources: Sequence[Source], ino: int, version: Version, offset: int, length: int, tick: Tick
    ) -> Loaded | None:
        for source in sources:
            data = source.read(ino, version, offset, length, tick)
            if data is not None and len(data) == length:
                return Loaded(data, source.counts)
        return None


class Pool:
    """Whole blocks that other hosts have read (docs/POOL.md): between the near and the far sources.
    It has threads of its own: some wait until another host has read a block.
    """

    counts = Counts(POOL_FILES, BYTES_FROM_POOL)

    def __init__(self, has_peers: bool = False) -> None:
        """`has_peers`: blocks come from other hosts' SSDs, not from an engine's memory."""
        self.has_peers = has_peers
        self._readers = trio.CapacityLimiter(POOL_THREADS)
        self._writers = ThreadPoolExecutor(POOL_WRITERS, "pool")
        self._room = threading.BoundedSemaphore(POOL_WRITES_MOST)

    async def load(self, ino: int, version: Version, block: int) -> tuple[Loaded | None, bytes]:
        """The block, or None; and a ticket for `finish`."""
        if self._readers.available_tokens < 1:  # a line that has no end
            return None, b""
        length = block_span(version.size, block)[1]
        data, ticket = await trio.to_thread.run_sync(
            _native.pool_get, ino, version, block, length,
            limiter=self._readers, abandon_on_cancel=True,
        )  # fmt: skip
        return None if data is None else Loaded(data, self.counts), ticket

    @staticmethod
    def note_origin(took_s: float, size_bytes: int) -> None:
        """A read of the origin, with its turn."""
        _native.pool_note_origin(int(took_s * 1e9), size_bytes)

    def finish(self, ticket: bytes, data: memoryview | None) -> None:
        """It was read at the origin; None: it was not. Nobody waits for the engine."""
        if not ticket:
            return
        has_room = data is not None and self._room.acquire(blocking=False)

        def write() -> None:
            try:
                _native.pool_finish(ticket, data if has_room else None)
            finally:
                if has_room:
                    self._room.release()

        self._writers.submit(write)


def _no_tick() -> None:
    """Of what is near nobody waits for progress."""
