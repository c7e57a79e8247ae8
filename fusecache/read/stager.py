"""The RAM tier: what is pushed into the mount's page cache ahead of use, and what is dropped again.

INVARIANT: pages are pushed only from bytes of the version the table holds (`_native.push` looks
again after the push and drops the pages if the version has changed meanwhile). The sum of all
ranges read or pushed and not yet dropped stays near `ram_bytes`: an upper bound of the pages held,
because the kernel may drop pages without telling.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable

import trio

from fusecache import _native
from fusecache.base.errors import OriginError
from fusecache.base.metrics import BYTES_PUSHED, RANGES_DROPPED, Metrics
from fusecache.read.kernel import Kernel
from fusecache.store.types import Version
from fusecache.table import namespace

AHEAD_BLOCKS = 4  # 16 MiB ahead of a sequential reader
STREAMS_MOST = 64
PUSHES_WAITING_MOST, WAITING_BYTES_MOST = 256, 64 << 20
BROUGHT_MOST = 4096  # large files
DROP_BATCH = 512
DROP_TO = 0.95  # of the budget: some room, so that dropping comes in batches
POLL_S, POLL_MOST_S = 0.02, 0.25
FILLS_BYTES_PER_S = 8 << 30  # faster than pages come: room for so much need not be looked at sooner
PAGE = 4096

# (inode, block) -> the block's bytes, or None if they lie in the store and the front knows where
BlockSource = Callable[[int, int], Awaitable[tuple[Version, memoryview] | None]]


class Stager:
    """Pushes ahead, drops behind."""

    def __init__(self, kernel: Kernel, ram_bytes: int, metrics: Metrics) -> None:
        self.ram_bytes = ram_bytes
        self._kernel = kernel
        self._metrics = metrics
        # inode -> the blocks that were asked for: the first one, the last one
        self._streams: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._brought: OrderedDict[int, tuple[Version, set[int]]] = OrderedDict()
        self._send_rest, self._rest = trio.open_memory_channel[
            tuple[int, Version, int, memoryview]
        ](PUSHES_WAITING_MOST)
        self._waiting_bytes = 0
        self._ahead_blocks = min(AHEAD_BLOCKS, ram_bytes // 4 // _native.BLOCK_BYTES)

    def push_rest(
        self, ino: int, version: Version, start: int, data: memoryview, first: int, last: int
    ) -> None:
        """Push a block's pages, which begin at `start`, outside [first, last), which a READ is
        about to deliver.

        Never waits: when too many pushes are waiting, the pages are left to later READs.
        """
        before, after = first // PAGE * PAGE - start, -(-last // PAGE) * PAGE - start
        for offset, part in ((0, data[:before]), (after, data[after:])):
            if len(part) and self._waiting_bytes + len(part) <= WAITING_BYTES_MOST:
                try:
                    self._send_rest.send_nowait((ino, version, start + offset, part))
                    self._waiting_bytes += len(part)
                except trio.WouldBlock:
                    return

    async def push_forever(self) -> None:
        async for ino, version, offset, part in self._rest:
            self._waiting_bytes -= len(part)
            self._metrics.add(BYTES_PUSHED, await self._kernel.push(ino, version, offset, part))

    # ---- what of large files the kernel was given ------------------------------------------------

    def note_brought(self, ino: int, version: Version, block: int) -> None:
        """A READ has brought the block; the kernel has all of it, or is about to, or SSD."""
        known, blocks = self._brought.pop(ino, (version, set[int]()))
        blocks = blocks if known == version else set[int]()
        blocks.add(block)
        self._brought[ino] = version, blocks
        if len(self._brought) > BROUGHT_MOST:
            self._brought.popitem(last=False)

    def has_brought(self, ino: int, version: Version, block: int) -> bool:
        """Whether READs have, or what is pushed ahead of a sequential reader, since it was
        forgotten.
        """
        known, blocks = self._brought.get(ino, (version, ()))
        if known == version and block in blocks:
            return True
        first, last = self._streams.get(ino, (0, -1))
        return first <= block <= last

    def forget(self, inos: Iterable[int]) -> None:
        """Pages of these were dropped."""
        for ino in inos:
            self._brought.pop(ino, None)
            self._streams.pop(ino, None)

    def forget_all(self) -> None:
        """What was brought is not known: the kernel drops pages without telling."""
        self._brought.clear()
        self._streams.clear()

    def is_next(self, ino: int, block: int) -> bool:
        """Whether a sequential reader is heading for `block`, and it was not asked for yet."""
        return ino in self._streams and self._streams[ino][1] == block - 1

    async def stream(self, ino: int, block: int, source: BlockSource) -> None:
        """A sequential reader has come to `block`: have the next AHEAD_BLOCKS pushed, each once."""
        if self._ahead_blocks == 0:
            return
        size = namespace.version(ino).size
        begin, ahead = self._streams.pop(ino, (block, -1))
        goes_on = begin <= block <= ahead + 1 <= block + self._ahead_blocks
        first = ahead + 1 if goes_on else block
        last = min(block + self._ahead_blocks, namespace.block_count(size)) - 1
        self._streams[ino] = begin if goes_on else block, max(last, first - 1)
        if len(self._streams) > STREAMS_MOST:
            self._streams.popitem(last=False)
        async with trio.open_nursery() as nursery:
            for number in range(first, last + 1):
                nursery.start_soon(self._push_block, ino, number, source)

    async def _push_block(self, ino: int, block: int, source: BlockSource) -> None:
        try:
            found = await source(ino, block)
        except OriginError:
            return  # the reader's own READ will meet it
        skip = _native.STREAM_HEAD_BYTES
        if found is None:
            pushed = await self._kernel.push_cached(ino, block, skip)
        else:
            version, data = found
            offset = block * _native.BLOCK_BYTES + skip
            pushed = await self._kernel.push(ino, version, offset, data[skip:])
        self._metrics.add(BYTES_PUSHED, max(0, pushed))

    async def drop_forever(self) -> None:
        """Keep the noted bytes within the budget."""
        while True:
            room = self.ram_bytes - _native.ram_bytes()
            if room >= 0:
                await trio.sleep(min(max(POLL_S, room / FILLS_BYTES_PER_S), POLL_MOST_S))
                continue
            ranges = _native.ram_take(int(self.ram_bytes * DROP_TO), DROP_BATCH)
            self._metrics.add(RANGES_DROPPED, len(ranges))
            self._note_dropped(ranges)
            await self._kernel.drop(ranges)

    def _note_dropped(self, ranges: list[tuple[int, int, int]]) -> None:
        for ino, offset, _ in ranges:
            self._brought.pop(ino, None)
            if ino in self._streams:
                first, last = self._streams[ino]
                self._streams[ino] = max(first, offset // _native.BLOCK_BYTES + 1), last
