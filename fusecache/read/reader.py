"""The story of one READ that neither the front nor misses.py answers: store, else other hosts
(whole blocks only), else origin.

Small files and streams fetch whole blocks. The first touch of a block of a large file passes
through: exactly the bytes that were asked for. The second touch fetches the block, so random reads
of a large file cost at most one small read more than the blocks they use. What of a block is not
stored goes to the kernel, so that the next READ does not fetch it again.

Cache faults end here: whatever the store does wrong, the read goes on at the origin.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from fusecache import _native
from fusecache.base.errors import OriginChanged
from fusecache.base.metrics import BYTES_REPLIED, FROM_ORIGIN, FROM_SSD, REQUESTS, Metrics
from fusecache.base.wire import Observed, Standing
from fusecache.read.fetcher import Fetcher, Flight
from fusecache.read.sources import Sources, SsdSource
from fusecache.read.stager import Stager
from fusecache.store.types import BLOCK_BYTES, Version
from fusecache.table import namespace

TOUCHED_FILES_MOST = 4096  # large files whose touched blocks are remembered


class Reader:
    """Answers reads: from the store, or with what the fetcher brings."""

    def __init__(
        self,
        fetcher: Fetcher,
        sources: Sources,
        segments: SsdSource,
        stager: Stager,
        metrics: Metrics,
    ) -> None:
        self._fetcher = fetcher
        self._sources = sources
        self._segments = segments
        self._stager = stager
        self._metrics = metrics
        self._touched: OrderedDict[int, set[int]] = OrderedDict()

    async def read(self, ino: int, offset: int, size: int, asker: int) -> bytes | memoryview:
        """The file's bytes [offset, offset + size), clipped to its size, for thread `asker`.

        All bytes are of one version. Raises OriginError, UnknownInode.
        """
        self._metrics.add(REQUESTS)
        for _ in range(3):
            version = namespace.version(ino)
            length = min(size, version.size - offset)
            if length <= 0:
                return b""
            if self._must_ask_store(ino, version):
                cached = await self._sources.ask(self._from_store, ino, version, offset, length)
                if cached is not None:
                    self._metrics.add(FROM_SSD)
                    self._metrics.add(BYTES_REPLIED, length)
                    _note(ino, offset, length, asker, was_stored=True)
                    return cached
            parts = [
                await self._part(ino, version, block, offset, length)
                for block in namespace.blocks_of(offset, length)
            ]
            if None not in parts and namespace.version(ino) == version:
                found = [part for part in parts if part is not None]
                was_stored = all(stored for stored, _ in found)
                self._metrics.add(BYTES_REPLIED, length)
                _note(ino, offset, length, asker, was_stored)
                return found[0][1] if len(found) == 1 else b"".join(data for _, data in found)
        raise OriginChanged

    def _must_ask_store(self, ino: int, version: Version) -> bool:
        """Is it asked before a flight is joined? For a small file the flight asks. Not so where it
        may hang at the origin, or a location is known.
        """
        return (
            version.size > BLOCK_BYTES
            or not self._fetcher.is_origin_ready(ino)
            or _native.get_location(ino, 0) is not None
        )

    def _from_store(self, ino: int, version: Version, offset: int, length: int) -> bytes | None:
        blocks = namespace.blocks_of(offset, length)
        if not all(self._segments.has(ino, version, block) for block in blocks):
            return None
        return _native.read_cached(ino, offset, length)

    async def _part(
        self, ino: int, version: Version, block: int, offset: int, length: int
    ) -> tuple[bool, memoryview] | None:
        """The part of [offset, offset + length) that lies in `block`, and whether it came from the
        store after all; None: the version changed.
        """
        start, span = namespace.block_span(version.size, block)
        first, last = max(offset, start), min(offset + length, start + span)
        if version.size > BLOCK_BYTES and not self._is_wanted_whole(ino, version, block):
            part = partial(namespace.clipped, first, last)
            got, data = await self._fetcher.uncached(ino, part)
            self._metrics.add(FROM_ORIGIN)
            return (False, data) if got == version else None
        flight = await self._fetcher.block(ino, block)
        self._metrics.add(FROM_SSD if flight.was_stored else FROM_ORIGIN)
        if flight.version != version or flight.data is None:
            return None
        if flight.is_settled and version.size <= BLOCK_BYTES:
            self._stager.push_rest(ino, version, start, flight.data, first, last)
        elif flight.is_settled:
            self._stager.note_brought(ino, version, block)
            push = partial(self._push_unstored, flight, ino, block, first, last)
            if flight.landed.is_set():
                push()
            else:
                flight.when_landed(push)
        return flight.was_stored, flight.data[first - start : last - start]

    def _push_unstored(self, flight: Flight, ino: int, block: int, first: int, last: int) -> None:
        """All of a block but [first, last), unless SSD has it, or it was dropped meanwhile."""
        assert flight.version is not None
        assert flight.data is not None
        if self._stager.has_brought(ino, flight.version, block) and flight.claim_push():
            start = block * BLOCK_BYTES
            self._stager.push_rest(ino, flight.version, start, flight.data, first, last)

    def _is_wanted_whole(self, ino: int, version: Version, block: int) -> bool:
        """From the second touch of a block on; while it is being fetched; of what a sequential
        reader comes to next, or a plan wants, unless all but its head was pushed ahead already.
        """
        blocks = self._touched.setdefault(ino, set())
        self._touched.move_to_end(ino)
        if len(self._touched) > TOUCHED_FILES_MOST:
            self._touched.popitem(last=False)
        touched_before = block in blocks
        blocks.add(block)
        if touched_before or self._fetcher.has(ino, block):
            return True
        if self._stager.has_brought(ino, version, block):
            return False
        is_planned = _native.plan_flags(ino.to_bytes(4, "little"))[0] & Standing.WANTED
        return bool(is_planned) or self._stager.is_next(ino, block)

    async def stream_block(self, ino: int, block: int) -> tuple[Version, memoryview] | None:
        """The block's bytes, wherever they were; None: the front can read its segment."""
        if await self.is_cached(ino, block):
            return None
        flight = await self._fetcher.block(ino, block)
        assert flight.version is not None
        assert flight.data is not None
        return flight.version, flight.data if flight.is_settled else memoryview(b"")

    async def ensure_cached(self, ino: int, block: int, evict: bool = True) -> bool | None:
        """For `warm`: True: was cached already; False: fetched and stored; None: could not be
        stored, without anything being evicted for it unless `evict`.
        """
        if await self.is_cached(ino, block):
            return True
        flight = await self._fetcher.block(ino, block, asked=True, evict=evict)
        await flight.landed.wait()
        if flight.was_stored:  # in the log's buffers, say
            return True
        return False if flight.stored else None

    async def is_cached(self, ino: int, block: int) -> bool:
        """Whether the front can read the block from its segment, as far as is known."""
        return bool(await self._sources.ask(self._segments.has, ino, namespace.version(ino), block))


def _note(ino: int, offset: int, length: int, asker: int, was_stored: bool) -> None:
    """A READ is answered: for sequential detection, the RAM budget and the plan."""
    _native.note_read(ino, offset, length)
    if offset == 0:
        what = Observed.SSD if was_stored else Observed.ORIGIN
        _native.note_seen(ino, what, asker)
