"""Bytes from the origin, or from other hosts, into the cache: one flight per block, verified,
published in the background.

INVARIANT: bytes leave this module only if the file had the table's version before and after they
were read, or if that is the version under which another host has written them.
INVARIANT: a file whose time stamps are too young to be trusted (Origin.tick_ns) is served but
neither published nor left in the kernel's cache.

A block that cannot be published (nothing may go for it, disk trouble) was still delivered:
publishing is never the reader's business.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import trio

from fusecache.base.errors import OriginChanged, OriginError, OriginTimeout
from fusecache.base.metrics import (
    BYTES_FROM_ORIGIN,
    FRONT_BYTES_FETCHED,
    FRONT_FILES_FETCHED,
    NOT_PUBLISHED,
    ORIGIN_FILES,
    Metric,
    Metrics,
)  # fmt: skip
from fusecache.cached.shared import SharedBlocks
from fusecache.read.kernel import Kernel
from fusecache.read.origin import Origin, Tick
from fusecache.read.publisher import Publication, Publisher
from fusecache.read.sources import Counts, Loaded, Sources
from fusecache.reorder.packer import Packer
from fusecache.store import Store
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace
from fusecache.table.pins import Pins

# Blocks of large files that are not stored: READs get them while they are pushed to the kernel.
UNSTORED_MOST, UNSTORED_S = 8, 1.0
CHANGES_MOST = 3  # times a file may change under a fetch before the reader gets ESTALE

Span = Callable[[int], tuple[int, int]]  # file size -> (offset, length)


@dataclass(eq=False, slots=True)
class Flight:
    """One fetch that any number of readers join, until it has landed: stored, or not to be."""

    done: trio.Event = field(default_factory=trio.Event)
    version: Version | None = None
    data: memoryview | None = None
    error: OriginError | None = None
    is_settled: bool = True  # False: too young to be kept anywhere
    counts: Counts | None = None  # of the source that was not this host's SSD
    was_stored: bool = False  # the bytes came from this host's SSD
    is_queued: bool = False
    stored: bool = False
    landed: trio.Event = field(default_factory=trio.Event)
    is_by_threads: bool = False
    is_asked: bool = False  # it is to be stored, whatever is stored already
    may_evict: bool = True
    landed_s: float = 0.0
    on_landed: Callable[[], None] | None = None
    _is_pushed: bool = False

    def when_landed(self, call: Callable[[], None]) -> None:
        """Once, when the flight cannot be joined any more."""
        self.on_landed = call

    def land(self, now: float) -> None:
        self.landed_s = now
        self.landed.set()
        call, self.on_landed = self.on_landed, None  # it may hold the flight, and so its bytes
        if call is not None:
            call()

    def claim_push(self) -> bool:
        """Whether the caller is to bring the bytes to the kernel: once, if they are not stored."""
        is_claimed, self._is_pushed = self._is_pushed, True
        return not (is_claimed or self.stored or self.was_stored)


Key = tuple[int, int]  # inode, block


class _Flights:
    """One a block: what may be joined.

    INVARIANT: two threads that claim a block at once get one flight.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flying: dict[Key, Flight] = {}
        # Blocks of large files that have just landed, and were not stored
        self._unstored: OrderedDict[Key, Flight] = OrderedDict()

    def flying(self, key: Key) -> Flight | None:
        """What has not landed, unless the file is another one since. Any thread."""
        flight = self._flying.get(key)
        if flight is not None and flight.version in (None, namespace.version(key[0])):
            return flight
        return None

    def unstored(self, key: Key) -> Flight | None:
        flight = self._unstored.get(key)
        if flight is None or trio.current_time() - flight.landed_s > UNSTORED_S:
            return None
        return flight if flight.version == namespace.version(key[0]) else None

    def claim(self, key: Key, new: Flight) -> tuple[Flight, bool]:
        """The flight to join; or, True, `new`, which is the caller's to end. Any thread, if `new`
        is by threads.
        """
        with self._lock:
            flight = self.flying(key)
            if flight is None and not (new.is_asked or new.is_by_threads):
                flight = self.unstored(key)
            if flight is not None:
                return flight, False
            self._flying[key] = new
            return new, True

    def land(self, key: Key, flight: Flight) -> None:
        """It cannot be joined any more, unless it is of a large file, and unstored."""
        with self._lock:
            if self._flying.get(key) is flight:
                del self._flying[key]
        flight.land(trio.current_time())
        self._unstored.pop(key, None)
        is_large = flight.version is not None and flight.version.size > BLOCK_BYTES
        if is_large and flight.is_settled and not (flight.stored or flight.was_stored):
            self._unstored[key] = flight
            if len(self._unstored) > UNSTORED_MOST:
                self._unstored.popitem(last=False)

    async def forget_forever(self) -> None:
        while True:
            await trio.sleep(UNSTORED_S)
            last = trio.current_time() - UNSTORED_S
            while self._unstored and next(iter(self._unstored.values())).landed_s <= last:
                self._unstored.popitem(last=False)


class Fetcher:
    """One flight a block, through all sources; see the module's invariants."""

    def __init__(
        self,
        origin: Origin,
        store: Store,
        packer: Packer,
        kernel: Kernel,
        dataset: bytes,
        sources: Sources,
        metrics: Metrics,
        pins: Pins,
        shared: SharedBlocks | None = None,
    ) -> None:
        self._origin = origin
        self._sources = sources
        self._store = store
        self._publisher = Publisher(store, packer, dataset, pins, shared)
        self._kernel = kernel
        self._metrics = metrics
        self._flights = _Flights()

    # ---- the publisher ---------------------------------------------------------------------------

    @property
    def pins(self) -> Pins:
        return self._publisher.pins

    @property
    def publishing(self) -> trio.Lock:
        """Its holder sees no batch that began before the holder changed what may go."""
        return self._publisher.lock

    def has_room(self) -> bool:
        """False: the publisher is behind."""
        return self._publisher.has_room()

    async def published(self) -> None:
        """Waits until what is queued now is published."""
        await self._publisher.published()

    async def publish_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._publisher.run_forever)
            nursery.start_soon(self._flights.forget_forever)

    # ---- for readers -----------------------------------------------------------------------------

    async def block(
        self,
        ino: int,
        block: int,
        *,
        asked: bool = False,
        evict: bool = True,
        store: bool = True,
        shared: bool = True,
    ) -> Flight:
        """A finished flight with the whole block's bytes (`data`, of `version`), which is to be
        stored, whatever goes for it, if `asked`. Without `evict` nothing goes; without `store` it
        is not stored, unless the flight was somebody else's. Without `shared` no other host is
        asked.

        Raises OriginError: as the origin said; ESTALE when the file keeps changing or was replaced.
        """
        key = (ino, block)
        flight, is_ours = self._flights.claim(key, Flight(is_asked=asked, may_evict=evict))
        if not is_ours:
            flight.is_asked |= asked
            await flight.done.wait()
            if flight.is_by_threads and _is_worth_another_try(flight.error):
                return await self.block(
                    ino, block, asked=asked, evict=evict, store=store, shared=shared
                )
        else:
            try:
                await self._fly(flight, ino, block, store, shared)
            except OriginError as error:
                flight.error = error
            finally:
                flight.done.set()
                if not flight.is_queued:
                    self._flights.land(key, flight)
        if flight.error is not None:
            raise flight.error
        if flight.data is None:  # the leader was cancelled: the server is going down
            raise OriginChanged
        return flight

    def has(self, ino: int, block: int) -> bool:
        """Whether the block is in memory, or about to be."""
        key = (ino, block)
        flights = self._flights
        return flights.flying(key) is not None or flights.unstored(key) is not None

    # ---- for what the C fetch threads get: a plan's files, and READs that missed -----------------

    def flight_of(self, ino: int) -> Flight | None:
        """The flight of a small file that is in the air, or not published yet."""
        return self._flights.flying((ino, 0))

    def claim(self, ino: int) -> tuple[Flight, bool]:
        """`flight_of(ino)`; or a new one, True, that the caller will `finish`: readers join it. Any
        thread.
        """
        return self._flights.claim((ino, 0), Flight(is_by_threads=True))

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
        lent: bool = False,
    ) -> bool:
        """The file was read, whole, and had `version` before and after; reading began at `begun_ns`
        (CLOCK_REALTIME). Readers get it; it is published if `store`. If not, readers join the
        flight until the caller calls `land`.

        `missed`: a reader asked for it. C has counted it (counters()). `lent`: it is another
        host's, and stored only if that is asked for.

        False: the table knows another version by now (a failed flight), or it is too young to be
        kept anywhere.
        """
        if namespace.version(ino) != version:
            self.fail(ino, flight, OriginChanged())
            return False
        flight.version, flight.data = version, memoryview(data)
        flight.is_settled = self._is_settled(ino, version, begun_ns)
        if lent and not flight.is_asked:
            missed = store = False
        if missed and flight.is_settled:
            self._tell_reuse(flight, ino, 0)
            self._metrics.add(NOT_PUBLISHED, int(not store))
        if flight.is_settled and store:
            evict = self._publisher.may_evict_for_readers if missed else self.pins.may_evict
            self._queue_publication(flight, ino, version, 0, flight.data, evict)
        flight.done.set()
        return flight.is_settled

    def land(self, ino: int, flight: Flight) -> None:
        """The bytes of a finished flight are where they are wanted, unless they are published."""
        if flight.done.is_set() and not flight.is_queued and not flight.landed.is_set():
            self._flights.land((ino, 0), flight)

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
        self._flights.land((ino, 0), flight)

    async def uncached(self, ino: int, span: Span) -> tuple[Version, memoryview]:
        """Bytes that are not cached, for the first touch of a large file's block, from far sources
        alone. Raises as `block`.
        """
        flight = Flight()
        await self._read(flight, ino, span)
        assert flight.version is not None
        assert flight.data is not None
        return flight.version, flight.data

    async def _fly(self, flight: Flight, ino: int, block: int, store: bool, shared: bool) -> None:
        await self._read(flight, ino, block, shared)
        if flight.counts is None or flight.version is None or flight.data is None:
            return
        if not flight.is_settled or not (store or flight.is_asked):
            return
        if not flight.is_asked and self._sources.is_lent(flight.counts):
            return
        self._tell_reuse(flight, ino, block)
        if not await self._publisher.wait_for_room():
            self._metrics.add(NOT_PUBLISHED)
            return
        evict = flight.may_evict and self._publisher.may_evict_for_readers
        self._queue_publication(flight, ino, flight.version, block, flight.data, evict)

    def _tell_reuse(self, flight: Flight, ino: int, block: int) -> None:
        if not flight.is_asked and flight.data is not None:
            self._store.missed(ino, block, len(flight.data))

    def _queue_publication(
        self, flight: Flight, ino: int, version: Version, block: int, data: memoryview, evict: bool
    ) -> None:
        flight.is_queued = True
        done = partial(self._published, (ino, block), flight)
        whatever = flight.is_asked
        self._publisher.put(Publication(ino, version, block, data, evict, whatever, done))

    def _published(self, key: tuple[int, int], flight: Flight, is_stored: bool) -> None:
        flight.stored = is_stored
        self._flights.land(key, flight)

    async def _read(
        self, flight: Flight, ino: int, wanted: int | Span, shared: bool = True
    ) -> None:
        """Fill in the flight's bytes: of one block, or of a span of what is not near."""
        block = None if callable(wanted) else wanted
        for _ in range(CHANGES_MOST):
            version = namespace.version(ino)
            if callable(wanted):
                offset, length = wanted(version.size)
            else:
                offset, length = namespace.block_span(version.size, wanted)
            if length <= 0:
                flight.version, flight.data = version, memoryview(b"")
                return
            begun_ns = time.time_ns()
            try:
                loaded = None
                if block is not None:
                    loaded = await self._sources.load_near(ino, version, offset, length)
                if loaded is None:
                    load_far = partial(self._sources.load_far, ino, version, offset, length)
                    loaded = await self._shared(ino, version, block, load_far, shared)
            except OriginChanged:
                await self.refresh(ino)
                continue
            if namespace.version(ino) != version:
                continue  # the sweep was faster
            flight.version, flight.data = version, memoryview(loaded.data)
            flight.counts = loaded.counts
            flight.was_stored = loaded.counts is None
            if loaded.counts is None:
                return
            self._metrics.add(loaded.counts.files, int(block == 0))
            self._metrics.add(loaded.counts.bytes, length)
            flight.is_settled = self._is_settled(ino, version, begun_ns)
            return
        raise OriginChanged

    async def _shared(
        self,
        ino: int,
        version: Version,
        block: int | None,
        load_far: Callable[[Tick], Loaded],
        ask: bool,
    ) -> Loaded:
        """From another host, if that is asked, or from the origin. Raises as Source.read."""
        pool = self._sources.pool
        if pool is None or block is None:
            return await self._origin.call(load_far, about=ino)
        loaded, ticket = await pool.load(ino, version, block) if ask else (None, b"")
        if loaded is not None:
            return loaded
        data = None
        begun_s = trio.current_time()
        try:
            loaded = await self._origin.call(load_far, about=ino)
            data = memoryview(loaded.data)
            pool.note_origin(trio.current_time() - begun_s, len(data))
        finally:
            pool.finish(ticket, data)
        return loaded

    def _is_settled(self, ino: int, version: Version, begun_ns: int) -> bool:
        """Was the file's last change long enough ago? If not, the kernel will forget its pages."""
        # mtime can be set to anything; every change sets ctime to the origin's clock.
        is_settled = begun_ns - version.ctime_ns > self._origin.tick_ns
        if not is_settled:
            self._kernel.forget_later(ino, self._origin.tick_ns / 1e9)
        return is_settled

    def is_origin_ready(self, ino: int = 0) -> bool:
        """False while the origin is away, all threads are waiting for it, or one for this inode.
        Any thread.
        """
        ready = self._origin.available and self._origin.has_free_thread()
        return ready and not self._origin.hangs(ino)

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


def read_so_far(now: Mapping[Metric, int]) -> tuple[int, int]:
    """Files and bytes that were read from the origin, whoever has read them."""
    return (
        now[FRONT_FILES_FETCHED] + now[ORIGIN_FILES],
        now[FRONT_BYTES_FETCHED] + now[BYTES_FROM_ORIGIN],
    )


def _is_worth_another_try(error: OriginError | None) -> bool:
    """Of a reader that had joined a prefetch: only a hang has cost it all its time already."""
    return error is not None and not isinstance(error, OriginTimeout)
