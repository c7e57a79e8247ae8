"""The story of one READ that the front could not answer: store, else origin.

Small files and streams fetch whole blocks. The first touch of a block of a large file passes
through: exactly the bytes that were asked for. The second touch fetches the block, so random reads
of a large file cost at most one small read more than the blocks they use.

Cache faults end here: whatever the store does wrong, the read goes on at the origin.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import trio

from fusecache import _native, namespace
from fusecache.errors import OriginChanged
from fusecache.fetcher import Fetcher
from fusecache.stager import Stager
from fusecache.stats import FaultLog, Stats
from fusecache.store.types import BLOCK_BYTES, Version

T = TypeVar("T")

STORE_TIMEOUT_S = 5.0
STORE_OFF_S = 30.0  # how long a cache that hung is not asked again
TOUCHED_FILES_MOST = 4096  # large files whose touched blocks are remembered


class Reader:
    """Answers reads from the store or the origin."""

    def __init__(
        self,
        fetcher: Fetcher,
        stager: Stager,
        stats: Stats,
        faults: FaultLog,
    ) -> None:
        self._fetcher = fetcher
        self._stager = stager
        self._stats = stats
        self._store_threads = trio.CapacityLimiter(8)
        self._faults = faults
        self._store_off_until = -math.inf
        self._touched: OrderedDict[int, set[int]] = OrderedDict()

    async def read(self, ino: int, offset: int, size: int, asker: int) -> bytes | memoryview:
        """The file's bytes [offset, offset + size), clipped to its size, for thread `asker`.

        All bytes are of one version. Raises OriginError, KeyError (unknown inode).
        """
        self._stats.add("requests")
        for _ in range(3):
            version = namespace.version(ino)
            length = min(size, version.size - offset)
            if length <= 0:
                return b""
            if self._must_ask_store(ino, version):
                cached = await self._ask_store(self._from_store, ino, version, offset, length)
                if cached is not None:
                    self._stats.add("from_ssd")
                    self._stats.add("bytes_replied", length)
                    _note(ino, offset, length, asker, was_stored=True)
                    return cached
            parts = [
                await self._from_origin(ino, version, block, offset, length)
                for block in namespace.blocks_of(offset, length)
            ]
            if None not in parts and namespace.version(ino) == version:
                found = [part for part in parts if part is not None]
                was_stored = all(stored for stored, _ in found)
                self._stats.add("bytes_replied", length)
                _note(ino, offset, length, asker, was_stored)
                return found[0][1] if len(found) == 1 else b"".join(data for _, data in found)
        raise OriginChanged

    def _must_ask_store(self, ino: int, version: Version) -> bool:
        """Is a visit to the store of its own worth it? For a small file the fetcher asks the store
        in the thread that would read the origin. Not so when that may hang, or a location is known.
        """
        return (
            version.size > BLOCK_BYTES
            or not self._fetcher.is_origin_ready(ino)
            or _native.get_location(ino, 0) is not None
        )

    def _from_store(self, ino: int, version: Version, offset: int, length: int) -> bytes | None:
        blocks = namespace.blocks_of(offset, length)
        if not all(self._fetcher.locate(ino, version, block) for block in blocks):
            return None
        return _native.read_cached(ino, offset, length)

    async def _from_origin(
        self, ino: int, version: Version, block: int, offset: int, length: int
    ) -> tuple[bool, memoryview] | None:
        """The part of [offset, offset + length) that lies in `block`, and whether it came from the
        store after all; None: the version changed.
        """
        start, span = namespace.block_span(version.size, block)
        first, last = max(offset, start), min(offset + length, start + span)
        if version.size > BLOCK_BYTES and not self._is_wanted_whole(ino, block):
            got, data = await self._fetcher.range(ino, first, last - first)
            self._stats.add("from_origin")
            return (False, data) if got == version else None
        flight = await self._fetcher.block(ino, block)
        self._stats.add("from_ssd" if flight.was_stored else "from_origin")
        if flight.version != version or flight.data is None:
            return None
        if version.size <= BLOCK_BYTES and flight.is_settled:
            self._stager.push_rest(ino, version, flight.data, first, last)
        return flight.was_stored, flight.data[first - start : last - start]

    def _is_wanted_whole(self, ino: int, block: int) -> bool:
        """True from the second touch of a block on, and while the file is being streamed."""
        blocks = self._touched.setdefault(ino, set())
        self._touched.move_to_end(ino)
        if len(self._touched) > TOUCHED_FILES_MOST:
            self._touched.popitem(last=False)
        touched_before = block in blocks
        blocks.add(block)
        return touched_before or self._stager.is_streaming(ino, block)

    async def stream_block(self, ino: int, block: int) -> tuple[Version, memoryview] | None:
        """The block's bytes from the origin, or None when the front can read its segment."""
        if await self.is_cached(ino, block):
            return None
        flight = await self._fetcher.block(ino, block)
        assert flight.version is not None
        assert flight.data is not None
        return flight.version, flight.data if flight.is_settled else memoryview(b"")

    async def ensure_cached(self, ino: int, block: int) -> bool | None:
        """For `warm`: True: was cached already; False: fetched and stored; None: could not be
        stored.
        """
        if await self.is_cached(ino, block):
            return True
        flight = await self._fetcher.block(ino, block, asked=True)
        await flight.published.wait()
        return False if flight.stored else None

    async def is_cached(self, ino: int, block: int) -> bool:
        """Whether the front can read the block from its segment, as far as is known."""
        return bool(await self._ask_store(self._fetcher.locate, ino, namespace.version(ino), block))

    async def _ask_store(self, function: Callable[..., T], *arguments: Any) -> T | None:
        """A slow or hanging cache disk is a miss, not a reader's wait."""
        if trio.current_time() < self._store_off_until:
            return None
        with trio.move_on_after(STORE_TIMEOUT_S):
            return await trio.to_thread.run_sync(
                function, *arguments, limiter=self._store_threads, abandon_on_cancel=True
            )
        self._faults.report("slow", f"the cache did not answer within {STORE_TIMEOUT_S:g} s")
        self._store_off_until = trio.current_time() + STORE_OFF_S
        return None


def _note(ino: int, offset: int, length: int, asker: int, was_stored: bool) -> None:
    """A READ is answered: for sequential detection, the RAM budget and the plan."""
    _native.note_read(ino, offset, length)
    if offset == 0:
        what = _native.SEEN_SSD if was_stored else _native.SEEN_ORIGIN
        _native.note_seen(ino, what, asker)
