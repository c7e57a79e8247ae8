"""Verified blocks on their way to the log or the store, in the background.

INVARIANT: about PUBLISH_BYTES wait at most. When the SSD is slower than the origin a fetch waits
ROOM_WAIT_S for room, then goes on without being published.
INVARIANT: only this task of a server calls `Store.put_many` (one writer a segment); `fusecache gc`
does so in a process of its own (store/gc.py).
INVARIANT: while there is a plan, nothing that it has pinned is evicted (table/pins.py), and `reuse`
is not asked: of what is not pinned the oldest goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from fusecache import _native
from fusecache.cached.shared import Block, SharedBlocks
from fusecache.reorder.packer import Packer
from fusecache.store import Store
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table.locations import use
from fusecache.table.pins import Pins

PUBLISH_BYTES = 64 << 20
PUBLISH_BATCH = 128  # blocks published in one visit to a thread, of
PUBLISH_BATCH_BYTES = 16 << 20  # together, unless the first is larger

ROOM_WAIT_S = 1.0
FLUSH_AFTER_S = 0.05
FLUSH_LOG_AFTER_S = 1.0  # buffers that are not full: what is in them has no location yet
GATHER_S = 0.005  # a visit to the store has its price, be it for one block or for many
GATHERED_BYTES = 1 << 20  # are many


@dataclass(eq=False, slots=True)
class Publication:
    """A block; `on_done` is told whether it is stored now."""

    ino: int
    version: Version
    block: int
    data: memoryview
    evict: bool  # may take the room of what is stored already
    whatever_is_used: bool  # ... even of what `reuse` would not let go
    on_done: Callable[[bool], None]
    is_stored: bool = False


class Publisher:
    """Of one mount."""

    def __init__(
        self,
        store: Store,
        packer: Packer,
        dataset: bytes,
        pins: Pins,
        shared: SharedBlocks | None = None,
    ) -> None:
        self._shared = shared
        self._store = store
        self._packer = packer
        self._dataset = dataset
        self.pins = pins
        self.lock = trio.Lock()
        """Its holder sees no batch that began before the holder changed what may go."""
        self._queue: deque[Publication] = deque()
        self._queued_bytes = 0
        self._queued = self._done = 0  # publications so far
        self._wake = trio.Event()
        self._room = trio.Event()
        self._waiting = trio.lowlevel.ParkingLot()  # for those that are queued now

    @property
    def may_evict_for_readers(self) -> bool:
        """Whether what is stored may go for what a reader has asked for."""
        return self.pins.may_evict or not self.pins.is_planned

    def has_room(self) -> bool:
        """False: the publisher is behind."""
        return self._queued_bytes < PUBLISH_BYTES

    async def wait_for_room(self) -> bool:
        """A little; False: it is too slow, and the reader matters more."""
        with trio.move_on_after(ROOM_WAIT_S):
            while self._queued_bytes > PUBLISH_BYTES:
                if self._room.is_set():
                    self._room = trio.Event()
                await self._room.wait()
            return True
        return False

    def put(self, publication: Publication) -> None:
        self._queue.append(publication)
        self._queued += 1
        self._queued_bytes += len(publication.data)
        self._wake.set()

    async def published(self) -> None:
        """Waits until what is queued now is published."""
        number = self._queued
        while self._done < number:
            await self._waiting.park()

    async def run_forever(self) -> None:
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
                async with self.lock:
                    await trio.to_thread.run_sync(self._publish, batch)
            finally:
                self._queued_bytes -= sum(len(item.data) for item in batch)
                self._done += len(batch)
                self._room.set()
                for item in batch:
                    item.on_done(item.is_stored)
                self._waiting.unpark_all()

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
        if self._shared is not None:
            blocks = [(Block(item.ino, item.version, item.block), item.data) for item in batch]
            for item, is_stored in zip(batch, self._shared.put(blocks), strict=True):
                item.is_stored = is_stored
        rest = []
        for item in (item for item in batch if not item.is_stored):
            size_bytes, length = item.version.size, len(item.data)
            if size_bytes <= BLOCK_BYTES:
                item.is_stored = self._packer.add(item.ino, item.version, item.data)
            if not (item.is_stored or self._packer.keeps_out(item.ino, size_bytes, length)):
                rest.append(item)
        pinned_by_plan = self.pins.segments if self.pins.is_planned else None
        may_evict = not self._packer.has_logs  # one file would cost the log segments of hundreds
        kinds: dict[tuple[bool, bool], list[Publication]] = {}
        for item in rest:
            evict = item.evict and may_evict and self.may_evict_for_readers
            kinds.setdefault((evict, evict and item.whatever_is_used), []).append(item)
        for (evict, whatever), chosen in sorted(kinds.items(), key=lambda kv: kv[0], reverse=True):
            items = [
                (_native.path(item.ino), item.version, item.block, item.data) for item in chosen
            ]
            locations = self._store.put_many(
                self._dataset,
                items,
                evict=evict,
                # Here alone a plan switches `reuse` off.
                whatever_is_used=whatever or pinned_by_plan is not None,
                pinned_by_plan=pinned_by_plan,
            )
            for item, location in zip(chosen, locations, strict=True):
                if location is not None:
                    item.is_stored = True
                    use(self._store, item.ino, item.block, location, item.version)
