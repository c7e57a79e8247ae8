"""Blocks that other hosts ask this one for, and that are not on its SSD (docs/POOL.md, Peers).

The C threads that answer others (native/pool/serve.c, native/ahead/asked.c) wait for them here.

INVARIANT: each block that asked_take() names gets one asked_end(): its bytes, or none.
INVARIANT: no other host is asked for it. So requests do not go round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from fusecache import _native
from fusecache.base.errors import OriginError, UnknownInode
from fusecache.read.fetcher import Fetcher, Flight
from fusecache.store.types import BLOCK_BYTES

log = logging.getLogger(__name__)

PLACES_MOST = 16


class ReadThrough:
    """Of one mount."""

    def __init__(
        self,
        fetcher: Fetcher,
        origin_threads: int,
        is_told: Callable[[], bool],
        stored: Callable[[int], None],
    ) -> None:
        """`origin_threads`: calls to the origin at a time. Others get half of them, at most.
        `stored(ino)`: a file of one block is on SSD now; if somebody wants to know (`is_told`).
        """
        self._fetcher = fetcher
        self._is_told, self._stored = is_told, stored
        self._places = trio.CapacityLimiter(max(1, min(PLACES_MOST, origin_threads // 2)))

    async def serve_forever(self) -> None:
        """It may be run again after it has failed."""
        _native.asked_enable(True)
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await trio.lowlevel.wait_readable(_native.asked_fd())
                    for ino, block in _native.asked_take():
                        nursery.start_soon(self._bring, ino, block)
        finally:
            _native.asked_enable(False)  # nobody waits for what was not brought

    async def _bring(self, ino: int, block: int) -> None:
        flight: Flight | None = None
        try:
            async with self._places:
                if _native.asked_waits(ino, block):
                    flight = await self._fetcher.block(ino, block, shared=False)
        except (OriginError, UnknownInode) as error:
            log.debug("a block for another host: %s", error)
        except Exception:
            log.exception("a block for another host")
        finally:
            is_right = flight is not None and flight.is_settled
            data = flight.data if flight is not None and is_right else None
            version = flight.version if flight is not None else None
            _native.asked_end(ino, block, version, data)
        if version is not None and version.size <= BLOCK_BYTES and self._is_told():
            assert flight is not None
            await flight.landed.wait()
            if flight.stored or flight.was_stored:
                self._stored(ino)
