"""Bytes from the origin into the cache: one flight per block, verified, published in the
background.

INVARIANT: bytes leave this module only if the file had the table's version before and after they
were read.
INVARIANT: about PUBLISH_BYTES wait to be published at most. When the SSD is slower than the origin
a fetch waits ROOM_WAIT_S for room, then goes on without being published.
INVARIANT: a file whose time stamps are too young to be trusted (Origin.tick_ns) is served but
neither published nor left in the kernel's cache.
INVARIANT: only the publisher task calls `Store.put_many` (one writer a segment).
INVARIANT: while there is a plan, nothing that it has pinned is evicted (pins.py).

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
from fusecache.errors import OriginChanged, OriginError, OriginTimeout
from fusecache.kernel import Kernel
from fusecache.origin import Origin, Tick, read_range
from fusecache.packer import Packer
from fusecache.pins import Pins
from fusecache.stats import Stats
from fusecache.store import Store
from fusecache.store.types import BLOCK_BYTES, Location, Version

PUBLISH_BYTES = 64 << 20
PUBLISH_BATCH = 128  # blocks published in one visit to a thread, of
PUBLISH_BATCH_BYTES = 16 << 20  # together, unless the first is larger
CHANGES_MOST = 3  # times a file may change under a fetch before the reader gets ESTALE

ROOM_WAIT_S = 1.0
FLUSH_AFTER_S = 0.05
FLUSH_LOG_AFTER_S = 1.0  # buffers that are not full: what is in them has no location yet
GATHER_S = 0.005  # a visit to the store has its price, be it for one block or for many
GATHERED_BYTES = 1 << 20  # are many

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
    is_prefetch: bool = False
    is_asked: bool = False  # somebody wants it stored, whatever is stored already
    on_landed: Callable[[], None] | None = None  # called once, when nobody can join any more


@dataclass(frozen=True, slots=True)
class Publication:
    """A verified block on its way to the store."""

    flight: Flight
    ino: int
    version: Version
    block: int
    data: memoryview
    evict: bool = True  # may take the room of what is stored already
    asked: bool = False  # even of what is in use


class Fetcher:
    """Reads the origin for everyone; see the module's invariants."""

    def __init__(
        self,
        origin: Origin,
        store: Store,
        packer: Packer,
        kernel: Kernel,
        dataset: bytes,
        stats: Stats,
        pins: Pins,
    ) -> None:
        self._origin = origin
        self._store = store
        self._packer = packer
        self._kernel = kernel
        self._dataset = dataset
        self._stats = stats
        self.pins = pins
        self.publishing = trio.Lock()
        """Whoever has it sees no batch that began before he changed what may go."""
        self._flights: dict[tuple[int, int], Flight] = {}
        self._queue: deque[Publication] = deque()
        self._last_queued: Flight | None = None
        self._queued_bytes = 0
        self._wake = trio.Event()
        self._room = trio.Event()

    async def block(self, ino: int, block: int, *, asked: bool = False) -> Flight:
        """A finished flight with the whole block's bytes (`data`, of `version`), which is to be
        stored, whatever goes for it, if `asked`.

        Raises OriginError: as the origin said; ESTALE when the file keeps changing or was replaced.
        """
        key = (ino, block)
        flight = self._joinable(key)
        if flight is not None:
            flight.is_asked |= asked
            await flight.done.wait()
            if flight.is_prefetch and _is_worth_another_try(flight.error):
                return await self.block(ino, block, asked=asked)
        else:
            flight = self._flights[key] = Flight(is_asked=asked)
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

    def _joinable(self, key: tuple[int, int]) -> Flight | None:
        flight = self._flights.get(key)
        if flight is not None and flight.version in (None, namespace.version(key[0])):
            return flight
        return None

    # ---- for the prefetcher, which reads small files by threads of its own -----------------------

    def flight_of(self, ino: int) -> Flight | None:
        """The flight of a small file that is in the air, or not published yet."""
        return self._joinable((ino, 0))

    def begin(self, ino: int) -> Flight:
        """A flight that the caller will `finish`; readers join it. There is no `flight_of(ino)`."""
        flight = self._flights[ino, 0] = Flight(is_prefetch=True)
        return flight

    def finish(
        self,
        ino: int,
        flight: Flight,
        version: Version,
        data: bytes,
        begun_ns: int,
        store: bool,
        *,
        missed: bool = False,
    ) -> bool:
        """The file was read, whole, and had `version` before and after; reading began at `begun_ns`
        (CLOCK_REALTIME). Readers get it; it is published if `store`. If not, readers join the
        flight until the caller calls `land`.

        `missed`: a reader asked for it; it is counted already (counters()).

        False: the table knows another version by now (a failed flight), or it is too young to be
        kept anywhere.
        """
        if namespace.version(ino) != version:
            self.fail(ino, flight, OriginChanged())
            return False
        flight.version, flight.data = version, memoryview(data)
        if not missed:
            self._stats.add("origin_files")
            self._stats.add("bytes_from_origin", len(data))
        flight.is_settled = self._is_settled(ino, version, begun_ns)
        if missed and flight.is_settled:
            self._note_miss(flight, ino, 0)
            self._stats.add("not_published", int(not store))
        if flight.is_settled and store:
            evict = self._may_evict_for_readers if missed else self.pins.may_evict
            self._queue_publication(flight, ino, version, 0, flight.data, evict)
        flight.done.set()
        return flight.is_settled

    def land(self, ino: int, flight: Flight) -> None:
        """The bytes of a finished flight are where they are wanted, unless they are published."""
        if flight.done.is_set() and not flight.is_queued and not flight.published.is_set():
            self._land((ino, 0), flight)

    def fail(
        self, ino: int, flight: Flight, error: OriginError, ended: trio.Event | None = None
    ) -> None:
        """The file was not read. Readers that have joined try it themselves, unless it hung: until
        that has `ended`, if that will be known.
        """
        if isinstance(error, OriginTimeout):
            self._origin.note_hang(ino, trio.Event() if ended is None else ended)
        flight.error = error
        flight.done.set()
        self._land((ino, 0), flight)

    def has_room(self) -> bool:
        """False: the publisher is behind."""
        return self._queued_bytes < PUBLISH_BYTES

    async def published(self) -> None:
        """Waits until what is queued now is published."""
        if self._last_queued is not None:
            await self._last_queued.published.wait()

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
        if flight.is_settled:
            self._note_miss(flight, ino, block)
        if not flight.is_settled or not await self._has_room():
            return
        self._queue_publication(
            flight, ino, flight.version, block, flight.data, self._may_evict_for_readers
        )

    @property
    def _may_evict_for_readers(self) -> bool:
        """Whether what is stored may go for what a reader has asked for."""
        return self.pins.may_evict or not self.pins.is_planned

    def _note_miss(self, flight: Flight, ino: int, block: int) -> None:
        if not flight.is_asked and self._store.reuse is not None and flight.data is not None:
            self._store.reuse.missed(ino, block, len(flight.data))

    def _queue_publication(
        self, flight: Flight, ino: int, version: Version, block: int, data: memoryview, evict: bool
    ) -> None:
        flight.is_queued = True
        self._last_queued = flight
        asked = flight.is_asked
        self._queue.append(Publication(flight, ino, version, block, data, evict, asked))
        self._queued_bytes += len(data)
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
                    partial(self._load, ino, version, block, offset, length), about=ino
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
            flight.is_settled = self._is_settled(ino, version, begun_ns)
            return
        raise OriginChanged

    def _is_settled(self, ino: int, version: Version, begun_ns: int) -> bool:
        """Was the file's last change long enough ago? If not, the kernel will forget its pages."""
        # mtime can be set to anything; every change sets ctime to the origin's clock.
        is_settled = begun_ns - version.ctime_ns > self._origin.tick_ns
        if not is_settled:
            self._kernel.forget_later(ino, self._origin.tick_ns / 1e9)
        return is_settled

    def _load(
        self, ino: int, version: Version, block: int | None, offset: int, length: int, tick: Tick
    ) -> tuple[bytes | bytearray, bool]:
        """(bytes, whether they came from the store), in a worker thread."""
        if block is not None:
            cached = _native.log_read(ino, version, offset, length)
            if cached is None and self.locate(ino, version, block):  # then it may be written
                cached = _native.read_cached(ino, offset, length)
            if cached is not None and len(cached) == length:
                return cached, True
        return read_range(ino, version, offset, length, tick), False

    def is_origin_ready(self, ino: int = 0) -> bool:
        """False while the origin is away, all threads are waiting for it, or one for this inode."""
        ready = self._origin.available and self._origin.has_free_thread()
        return ready and not self._origin.hangs(ino)

    def locate(self, ino: int, version: Version, block: int) -> bool:
        """Make sure the front knows where the block lies, if the store has it. Blocking."""
        known = _native.get_location(ino, block)
        if known is not None and _open_segment(self._store, known[0]):
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
        """The publisher task: the only caller of Store.put_many."""
        while True:
            if not self._queue:
                self._wake = trio.Event()
                with trio.move_on_after(FLUSH_AFTER_S):
                    await self._wake.wait()
                if not self._queue:
                    # Nothing more comes for now: let other mounts on the cache directory see it.
                    await trio.to_thread.run_sync(self._store.flush)
                    with trio.move_on_after(FLUSH_LOG_AFTER_S):
                        await self._wake.wait()
                if not self._queue:
                    await trio.to_thread.run_sync(self._packer.flush)
                    await self._wake.wait()
            if self._queued_bytes < GATHERED_BYTES:
                await trio.sleep(GATHER_S)
            batch = self._next_batch()
            try:
                async with self.publishing:
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
        if flight.on_landed is not None:
            flight.on_landed()

    def _next_batch(self) -> list[Publication]:
        """What is published next, at least one."""
        batch = [self._queue.popleft()]
        length = len(batch[0].data)
        while self._queue and len(batch) < PUBLISH_BATCH:
            length += len(self._queue[0].data)
            if length > PUBLISH_BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
        return batch

    def _publish(self, batch: list[Publication]) -> None:
        rest = []
        for item in batch:
            size_bytes, length = item.version.size, len(item.data)
            if size_bytes <= BLOCK_BYTES:
                item.flight.stored = self._packer.add(item.ino, item.version, item.data)
            if not (item.flight.stored or self._packer.keeps_out(item.ino, size_bytes, length)):
                rest.append(item)
        kept = self.pins.segments if self.pins.is_planned else None
        may_evict = not self._packer.has_logs  # one file would cost the log segments of hundreds
        kinds: dict[tuple[bool, bool], list[Publication]] = {}
        for item in rest:
            evict = item.evict and may_evict and self._may_evict_for_readers
            kinds.setdefault((evict, evict and item.asked), []).append(item)
        for (evict, asked), chosen in sorted(kinds.items(), key=lambda kind: kind[0], reverse=True):
            items = [
                (_native.path(item.ino), item.version, item.block, item.data) for item in chosen
            ]
            locations = self._store.put_many(
                self._dataset, items, evict=evict, asked=asked or kept is not None, kept=kept
            )
            for item, location in zip(chosen, locations, strict=True):
                if location is not None:
                    item.flight.stored = True
                    use(self._store, item.ino, item.block, location, item.version)


def read_so_far(stats: Stats) -> tuple[int, int]:
    """Files and bytes that were read from the origin, whoever has read them."""
    front = _native.counters()
    return (
        front["files_missed"] + stats["origin_files"],
        front["bytes_missed"] + stats["bytes_from_origin"],
    )


def _is_worth_another_try(error: OriginError | None) -> bool:
    """Of a reader that had joined a prefetch: only a hang has cost it all its time already."""
    return error is not None and not isinstance(error, OriginTimeout)


def use(store: Store, ino: int, block: int, location: Location, version: Version) -> bool:
    """Tell the front where a block lies. False: its segment is gone, or the file has changed."""
    return _open_segment(store, location.segno) and _native.set_location(
        ino, block, location.segno, location.offset, location.header_len, version
    )


def _open_segment(store: Store, segno: int) -> bool:
    """Make sure the front can read from it. False: it is gone."""
    if _native.segment_known(segno):
        return True
    fd = store.open_segment(segno)
    if fd is None:
        return False
    try:
        _native.segment_add(segno, fd)
    finally:
        os.close(fd)
    return True
