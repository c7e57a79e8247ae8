"""Bytes from the origin into the cache: one flight per block, verified, published in the
background.

INVARIANT: bytes leave this module only if the file had the table's version before and after they
were read.
INVARIANT: about PUBLISH_BYTES wait to be published at most. When the SSD is slower than the origin
a fetch waits ROOM_WAIT_S for room, then goes on without being published.
INVARIANT: a file whose time stamps are too young to be trusted (Origin.tick_ns) is served but
neither published nor left in the kernel's cache.
INVARIANT: only the publisher task calls `Store.put` (one writer a segment).

A block that cannot be published (store full under `keep`, disk trouble) was still delivered:
publishing is never the reader's business.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from fusecache import _native, namespace
from fusecache.errors import OriginChanged, OriginError
from fusecache.kernel import Kernel
from fusecache.origin import Origin, Tick, read_range
from fusecache.stats import Stats
from fusecache.store import Store
from fusecache.store.types import Location, Version

PUBLISH_BYTES = 64 << 20
PUBLISH_BATCH = 32  # blocks published in one visit to a thread
CHANGES_MOST = 3  # times a file may change under a fetch before the reader gets ESTALE

ROOM_WAIT_S = 1.0
FLUSH_AFTER_S = 0.05

Span = Callable[[int], tuple[int, int]]  # file size -> (offset, length)


@dataclass(eq=False, slots=True)
class Flight:
    """One fetch that any number of readers join, until the block is published."""

    done: trio.Event = field(default_factory=trio.Event)
    version: Version | None = None
    data: memoryview | None = None
    error: OriginError | None = None
    is_settled: bool = True  # False: too young to be kept anywhere
    was_stored: bool = False  # the bytes came from the store, not from the origin
    is_queued: bool = False
    stored: bool = False
    published: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class Publication:
    """A verified block on its way to the store."""

    flight: Flight
    ino: int
    version: Version
    block: int
    data: memoryview


class Fetcher:
    """Reads the origin for everyone; see the module's invariants."""

    def __init__(
        self, origin: Origin, store: Store, kernel: Kernel, dataset: bytes, stats: Stats
    ) -> None:
        self._origin = origin
        self._store = store
        self._kernel = kernel
        self._dataset = dataset
        self._stats = stats
        self._flights: dict[tuple[int, int], Flight] = {}
        self._queue: deque[Publication] = deque()
        self._queued_bytes = 0
        self._wake = trio.Event()
        self._room = trio.Event()

    async def block(self, ino: int, block: int) -> Flight:
        """A finished flight with the whole block's bytes (`data`, of `version`).

        Raises OriginError: as the origin said; ESTALE when the file keeps changing or was replaced.
        """
        key = (ino, block)
        flight = self._flights.get(key)
        if flight is not None and flight.version in (None, namespace.version(ino)):
            await flight.done.wait()
        else:
            flight = self._flights[key] = Flight()
            try:
                await self._fly(flight, ino, block)
            except OriginError as error:
                flight.error = error
            finally:
                flight.done.set()
                if not flight.is_queued:
                    self._land(key, flight)
        if flight.error is not None:
            raise flight.error
        if flight.data is None:  # the leader was cancelled: the server is going down
            raise OriginChanged
        return flight

    async def range(self, ino: int, offset: int, length: int) -> tuple[Version, memoryview]:
        """Exactly these bytes (clipped to the file's size), not cached. Raises as `block`."""

        def span(size: int) -> tuple[int, int]:
            return offset, max(0, min(length, size - offset))

        flight = Flight()
        await self._read(flight, ino, span, None)
        assert flight.version is not None
        assert flight.data is not None
        return flight.version, flight.data

    async def _fly(self, flight: Flight, ino: int, block: int) -> None:
        await self._read(flight, ino, partial(namespace.block_span, block=block), block)
        if flight.was_stored or flight.version is None or flight.data is None:
            return
        if block == 0:
            self._stats.add("origin_files")
        if not flight.is_settled or not await self._has_room():
            return
        flight.is_queued = True
        self._queue.append(Publication(flight, ino, flight.version, block, flight.data))
        self._queued_bytes += len(flight.data)
        self._wake.set()

    async def _has_room(self) -> bool:
        """Wait a little for the publisher; False: it is too slow, and the reader matters more."""
        with trio.move_on_after(ROOM_WAIT_S):
            while self._queued_bytes > PUBLISH_BYTES:
                if self._room.is_set():
                    self._room = trio.Event()
                await self._room.wait()
            return True
        self._stats.add("not_published")
        return False

    async def _read(self, flight: Flight, ino: int, span: Span, block: int | None) -> None:
        """Fill in the flight's bytes. With a block number the store is asked first."""
        for _ in range(CHANGES_MOST):
            version = namespace.version(ino)
            offset, length = span(version.size)
            if length <= 0:
                flight.version, flight.data = version, memoryview(b"")
                return
            begun_ns = time.time_ns()
            try:
                data, was_stored = await self._origin.call(
                    partial(self._load, ino, version, block, offset, length)
                )
            except OriginChanged:
                await self.refresh(ino)
                continue
            if namespace.version(ino) != version:
                continue  # the sweep was faster
            flight.version, flight.data, flight.was_stored = version, memoryview(data), was_stored
            if was_stored:
                return
            self._stats.add("bytes_from_origin", length)
            # mtime can be set to anything; every change sets ctime to the origin's clock.
            flight.is_settled = begun_ns - version.ctime_ns > self._origin.tick_ns
            if not flight.is_settled:
                self._kernel.forget_later(ino, self._origin.tick_ns / 1e9)
            return
        raise OriginChanged

    def _load(
        self, ino: int, version: Version, block: int | None, offset: int, length: int, tick: Tick
    ) -> tuple[bytes | bytearray, bool]:
        """(bytes, whether they came from the store), in a worker thread."""
        if block is not None and self.locate(ino, version, block):
            cached = _native.read_cached(ino, offset, length)
            if cached is not None and len(cached) == length:
                return cached, True
        return read_range(ino, version, offset, length, tick), False

    def is_origin_ready(self) -> bool:
        """False while the origin is away or all threads are waiting for it."""
        return self._origin.available and self._origin.has_free_thread()

    def locate(self, ino: int, version: Version, block: int) -> bool:
        """Make sure the front knows where the block lies, if the store has it. Blocking."""
        known = _native.get_location(ino, block)
        if known is not None and _native.segment_known(known[0]):
            return True
        location = self._store.lookup(self._dataset, _native.path(ino), version, block)
        if location is None:
            return False
        return use(self._store, ino, block, location, version)

    async def refresh(self, ino: int) -> None:
        """Look at the origin again, into the table.

        Raises OriginChanged when the name is gone or another file now.
        """
        has_changed = await self._origin.refresh(ino)
        if has_changed is None:
            raise OriginChanged
        if has_changed:
            # The reader waits for a page of this inode, so its pages cannot be dropped before it
            # has its answer; its attributes can, and must be, so that it sees the new size.
            self._kernel.forget_attributes(ino)

    async def publish_forever(self) -> None:
        """The publisher task: the only caller of Store.put."""
        while True:
            if not self._queue:
                self._wake = trio.Event()
                with trio.move_on_after(FLUSH_AFTER_S):
                    await self._wake.wait()
                if not self._queue:
                    # Nothing more comes for now: let other mounts on the cache directory see it.
                    await trio.to_thread.run_sync(self._store.flush)
                    await self._wake.wait()
            batch = [self._queue.popleft() for _ in range(min(PUBLISH_BATCH, len(self._queue)))]
            try:
                await trio.to_thread.run_sync(self._publish, batch)
            finally:
                self._queued_bytes -= sum(len(item.data) for item in batch)
                self._room.set()
                for item in batch:
                    self._land((item.ino, item.block), item.flight)

    def _land(self, key: tuple[int, int], flight: Flight) -> None:
        """Nobody can join the flight any more: the store has the block, or will not get it."""
        flight.published.set()
        if self._flights.get(key) is flight:
            del self._flights[key]

    def _publish(self, batch: list[Publication]) -> None:
        for item in batch:
            path = _native.path(item.ino)
            location = self._store.put(self._dataset, path, item.version, item.block, item.data)
            if location is not None:
                item.flight.stored = True
                use(self._store, item.ino, item.block, location, item.version)


def use(store: Store, ino: int, block: int, location: Location, version: Version) -> bool:
    """Tell the front where a block lies. False: its segment is gone, or the file has changed."""
    if not _native.segment_known(location.segno):
        fd = store.open_segment(location.segno)
        if fd is None:
            return False
        try:
            _native.segment_add(location.segno, fd)
        finally:
            os.close(fd)
    return _native.set_location(
        ino, block, location.segno, location.offset, location.header_len, version
    )
