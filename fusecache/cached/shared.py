"""A mount's blocks in the cache service of its host (docs/CACHED.md): those whose digests its
manifest knows. Blocking; for worker threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import trio

from fusecache import _native
from fusecache.base.errors import UnknownInode
from fusecache.base.metrics import (
    SERVICE_FILES,
    SERVICE_PUT_BYTES,
    SERVICE_PUTS,
    Metric,
    Metrics,
)
from fusecache.cached.client import CacheService
from fusecache.cached.group import set_of
from fusecache.cached.talk import Found
from fusecache.config.settings import Config
from fusecache.manifest.loading import Manifest
from fusecache.store.types import BLOCK_BYTES, Location, Version
from fusecache.table import namespace
from fusecache.table.locations import use

WAIT_S: Final = 2.0
"""For what another mount reads, from when that was heard first."""
VAIN_S: Final = 10.0
TRIED_S: Final = 2.0
DOUBTS_MOST: Final = 64
WAITS_MOST: Final = 65_536


class Block(NamedTuple):
    """Of a file, in the table."""

    ino: int
    version: Version
    number: int


class SharedBlocks:
    """Of one mount."""

    def __init__(self, service: CacheService, manifest: Manifest, metrics: Metrics) -> None:
        self.service = service
        self._manifest = manifest
        self._metrics = metrics
        self._doubts = ThreadPoolExecutor(1, "doubts")
        self._doubted: set[tuple[int, int]] = set()  # on their way
        self._lock = threading.Lock()
        self._awaited: dict[tuple[int, int], float] = {}  # inode, block: until when

    @property
    def is_used(self) -> bool:
        return self.service.is_used

    @property
    def room_bytes(self) -> int:
        """What the service would take now, as far as is known."""
        return self.service.room_bytes if self.is_used else 0

    def _name(self, block: Block) -> bytes | None:
        return self._manifest.find(_native.path(block.ino), block.version, block.number)

    # ---- where they are --------------------------------------------------------------------------

    def locate(self, block: Block, promise: bool = False) -> bool:
        """Whether the service has it; then the front knows where. `promise`: a reader waits for
        it: if nobody has promised it, it is read at the origin now, and put.
        """
        name = self._name(block) if self.is_used else None
        if name is None:
            return False
        length = namespace.block_span(block.version.size, block.number)[1]
        found = self.service.find([name], [length], promise)[0]
        if promise:
            self._note(block, found)
        return found.at is not None and self._use(block, found.at)

    def locate_all(self, inos: Sequence[int], promise: bool = False) -> None:
        """The same of files of one block, many at a time; larger ones are left out."""
        blocks, names, lengths = [], [], []
        for ino in inos if self.is_used else ():
            with contextlib.suppress(UnknownInode):
                block = Block(ino, namespace.version(ino), 0)
                name = self._name(block) if block.version.size <= BLOCK_BYTES else None
                if name is not None:
                    blocks.append(block)
                    names.append(name)
                    lengths.append(block.version.size)
        places = self.service.find(names, lengths, promise)
        for block, found in zip(blocks, places, strict=True):
            if promise:
                self._note(block, found)
            if found.at is not None:
                self._use(block, found.at)

    def _use(self, block: Block, at: Location) -> bool:
        was_located = namespace.is_located(block.ino, block.number)
        if not use(self, block.ino, block.number, at, block.version):
            return False
        self._metrics.add(SERVICE_FILES, int(block.number == 0 and not was_located))
        return True

    def open_segment(self, segno: int) -> int | None:
        """A descriptor, the caller's; None: the service has it no more."""
        return self.service.open_segment(segno)

    # ---- what another mount reads ----------------------------------------------------------------

    def is_awaited(self, ino: int, block: int) -> bool:
        """Whether another mount reads it now, as far as was heard, and not for too long."""
        until_s = self._awaited.get((ino, block))
        return until_s is not None and time.monotonic() < until_s

    def _note(self, block: Block, found: Found) -> None:
        key, now = (block.ino, block.number), time.monotonic()
        if not found.is_promised:
            self._awaited.pop(key, None)
            return
        with self._lock:
            if len(self._awaited) >= WAITS_MOST:
                self._awaited.clear()
            # What was waited for in vain is not waited for again, for a while.
            if now > self._awaited.get(key, 0.0) + VAIN_S:
                self._awaited[key] = now + WAIT_S

    # ---- what is put -----------------------------------------------------------------------------

    def put(self, blocks: Sequence[tuple[Block, memoryview]]) -> list[bool]:
        """Of each whether the service has it now."""
        if not self.is_used:
            return [False] * len(blocks)
        named = [(number, self._name(block)) for number, (block, _) in enumerate(blocks)]
        wanted = [(number, name) for number, name in named if name is not None]
        are_stored = [False] * len(blocks)
        places = self.service.put([(name, blocks[number][1]) for number, name in wanted])
        for (number, _), at in zip(wanted, places, strict=True):
            block, data = blocks[number]
            if at is not None:
                are_stored[number] = use(self, block.ino, block.number, at, block.version)
                self._metrics.add(SERVICE_PUTS, int(block.number == 0))
                self._metrics.add(SERVICE_PUT_BYTES, len(data))
        return are_stored

    def quarantine(self, segno: int, offset: int) -> None:
        """The record there was bad: the service is told, by a thread."""
        with self._lock:
            if (segno, offset) in self._doubted or len(self._doubted) >= DOUBTS_MOST:
                return
            self._doubted.add((segno, offset))
        self._doubts.submit(self._doubt, segno, offset)

    def _doubt(self, segno: int, offset: int) -> None:
        try:
            self.service.doubt(segno, offset)
        finally:
            with self._lock:
                self._doubted.discard((segno, offset))

    # ---- what is asked ---------------------------------------------------------------------------

    async def lines(self) -> list[str]:
        """Once it was tried, or that takes long: why it is not used, if so."""
        await trio.to_thread.run_sync(self.service.wait, TRIED_S, abandon_on_cancel=True)
        return [why] if (why := self.why_not()) else []

    def why_not(self) -> str:
        """It is not used: a line; "": it is."""
        if self.is_used:
            return ""
        no_manifest = self._manifest.why_not or "the dataset has no manifest"
        why = self.service.why_not or (
            f"--cache {self.service.path}: {no_manifest} (fusecache digest --digest blake3)"
        )
        return f"{why}: the mount's own cache is used"


def join(config: Config, source_fd: int, metrics: Metrics) -> tuple[Manifest, SharedBlocks | None]:
    """A mount's manifest, and its part in the host's cache service, if it is to have one: that is
    asked once the manifest was read.
    """
    where = config.manifest, config.source, source_fd
    if config.cache is None:
        return Manifest(*where, config.digest), None
    service = CacheService(config.cache)

    def use(digests: bytes) -> None:
        if digests:
            service.use(set_of(digests))

    manifest = Manifest(*where, "blake3", config.digest == "blake3", use)
    return manifest, SharedBlocks(service, manifest, metrics)


def status(shared: SharedBlocks | None, now: Mapping[Metric, int]) -> dict[str, Any]:
    """What `fusecache status` says of it."""
    return {
        "socket": shared.service.path if shared is not None else None,
        "used": shared is not None and shared.is_used,
        "why_not": shared.why_not() if shared is not None else "",
        "room_bytes": shared.service.room_bytes if shared is not None else 0,
        "found_files": now[SERVICE_FILES],
        "put_files": now[SERVICE_PUTS],
        "put_bytes": now[SERVICE_PUT_BYTES],
    }
