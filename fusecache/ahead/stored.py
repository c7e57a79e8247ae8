"""Whether a file of one block is on SSD: by its location, the log, and the index; where the files
of a listing lie, told to the front before anybody reads them; and what is to be there no more.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import numpy as np
import trio

from fusecache import _native
from fusecache.base.errors import UnknownInode
from fusecache.base.metrics import EVICTED_BYTES, EVICTED_FILES, Metrics
from fusecache.read.sources import AWAITED_POLL_S, SsdSource
from fusecache.reorder.packer import Packer
from fusecache.store import Store
from fusecache.store.types import BLOCK_BYTES, Location, Version
from fusecache.table import namespace
from fusecache.table.locations import use
from fusecache.table.pins import UserPins

PRELOAD_BATCH = 256

Places = list[tuple[int, Location]]  # number of a block of a file, where it lay


def in_log(ino: int, size_bytes: int | None = None) -> tuple[Version, bytes] | None:
    """A file of one block that waits in the log to be written, and has no location before; so many
    of its bytes (None: all). One that is written meanwhile has its location when this returns.
    """
    try:
        version = namespace.version(ino)
    except UnknownInode:
        return None
    if version.size > BLOCK_BYTES:
        return None
    data = _native.log_read(ino, version, 0, version.size if size_bytes is None else size_bytes)
    return None if data is None else (version, data)


class Stored:
    """What is where, of one mount. All but `has_come` is blocking."""

    def __init__(self, segments: SsdSource, packer: Packer, preloaded: Container[int]) -> None:
        """`preloaded`: directories whose files' locations the front knows."""
        self._segments = segments
        self._packer = packer
        self._preloaded = preloaded

    def are_stored(self, inos: list[int]) -> list[bool]:
        """Whether each is on SSD, or on its way there in the log. No: what is larger than that."""
        self.look_in_service(inos)
        return [self._is_stored(ino) for ino in inos]

    def _is_stored(self, ino: int) -> bool:
        if namespace.version(ino).size > BLOCK_BYTES:
            return False
        return in_log(ino, 0) is not None or self.is_located(ino)

    def is_located(self, ino: int) -> bool:
        """Whether the file's one block has a location. After `look_in_service`, for many."""
        try:
            version = namespace.version(ino)
            if version.size == 0:
                return True
            is_known = _native.get_location(ino, 0) is not None
            if not is_known and _native.parent(ino) in self._preloaded:
                # The index was asked for the whole directory.
                return self._segments.link(ino, version, 0)
            return self._segments.has_unasked(ino, version, 0)
        except UnknownInode:
            return False

    def look_in_service(self, inos: list[int]) -> None:
        """Those that the host's cache service has are located from now on."""
        self._segments.locate_shared(inos)

    def locate_all(self, inos: list[int]) -> None:
        """Have the front know where all of their blocks lie that are on SSD."""
        for ino in inos:
            with contextlib.suppress(UnknownInode):
                version = namespace.version(ino)
                for block in range(namespace.block_count(version.size)):
                    self._segments.has(ino, version, block)

    def has_come(self, ino: int) -> bool:
        """To SSD, or to the log, since it was looked for there: a reader was faster, say."""
        # In this order: what leaves the log is located before.
        return (self._packer.has_logs and in_log(ino, 0) is not None) or namespace.is_located(ino)


class Claim(NamedTuple):
    """A file that is to be fetched now: whether to `store` it, and whether it is to be staged."""

    ino: int
    store: bool
    is_to_be_staged: bool


class Claims:
    """Files that are to be fetched now, unless another mount of this host does: its cache service
    is asked, for many at a time (docs/CACHED.md, Single flight).
    """

    def __init__(
        self, segments: SsdSource, settled: Callable[[list[Claim], list[Claim]], None]
    ) -> None:
        """`settled(ours, come)`: those that nobody else fetches, and those that are on SSD."""
        self._segments = segments
        self._settled = settled
        self._waiting: dict[int, Claim] = {}
        self._some = trio.lowlevel.ParkingLot()
        self._threads = trio.CapacityLimiter(1)

    @property
    def are_needed(self) -> bool:
        return self._segments.has_shared

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ino: object) -> bool:
        return ino in self._waiting

    def has_any(self, inos: set[int]) -> bool:
        return not self._waiting.keys().isdisjoint(inos)

    def put(self, claim: Claim) -> None:
        self._waiting[claim.ino] = claim
        self._some.unpark()

    def store(self, ino: int) -> None:
        """One that waits is to be stored, too."""
        self._waiting[ino] = self._waiting[ino]._replace(store=True)

    def clear(self) -> None:
        self._waiting.clear()

    async def run_forever(self) -> None:
        while True:
            if not self._waiting:
                await self._some.park()
            inos = list(self._waiting)
            await trio.to_thread.run_sync(
                self._segments.locate_shared, inos, True,
                limiter=self._threads, abandon_on_cancel=True,
            )  # fmt: skip
            asked = [self._waiting[ino] for ino in inos if ino in self._waiting]
            come = [claim for claim in asked if namespace.is_located(claim.ino)]
            ours = [
                claim
                for claim in asked
                if not namespace.is_located(claim.ino) and not self._segments.is_awaited(claim.ino)
            ]
            for claim in (*come, *ours):
                del self._waiting[claim.ino]
            if come or ours:
                self._settled(ours, come)
            if self._waiting:
                await trio.sleep(AWAITED_POLL_S)


class Evictions:
    """Of files of one mount. All is blocking."""

    def __init__(
        self,
        store: Store,
        packer: Packer,
        dataset: bytes,
        metrics: Metrics,
        user_pins: UserPins,
    ) -> None:
        self._store = store
        self._packer = packer
        self._dataset = dataset
        self._metrics = metrics
        self._user_pins = user_pins

    def are_possible(self) -> bool:
        return self._store.can_evict()

    def evict(self, inos: list[int], by_user: bool = False) -> dict[int, Places | None]:
        """Have them on SSD no more, but for what a user has pinned, or may have: a name that came a
        moment ago, all of a server that has just started. Of each where its blocks were;
        None: it stays. Those that are no inodes are missing. `forget` has to follow.
        """
        names: dict[int, tuple[bytes, Version]] = {}
        pinned: dict[int, Places | None] = {}
        are_pinned = self._user_pins.may_hold(np.array(inos, np.uint32)).tolist()
        for ino, is_pinned in zip(inos, are_pinned, strict=True):
            with contextlib.suppress(UnknownInode):
                if is_pinned:
                    pinned[ino] = None
                else:
                    names[ino] = _native.path(ino), namespace.version(ino)
        if self._packer.has_logs:  # where a file lies the index does not know
            return {
                **pinned,
                **{ino: None if namespace.is_located(ino) else [] for ino in names},
            }
        found, freed_bytes = self._store.evict(self._dataset, list(names.values()), by_user)
        self._metrics.add(EVICTED_BYTES, freed_bytes)
        return {**pinned, **dict(zip(names, found, strict=True))}

    def forget(self, found: dict[int, Places | None]) -> dict[int, bool]:
        """Clear locations in what was evicted, while nothing is published. Of each inode, whether
        it is not on SSD now.
        """
        gone: dict[int, bool] = {}
        for ino, places in found.items():
            for block, at in places or ():
                _native.clear_location(ino, block, at[:3])
            gone[ino] = places is not None and not self._is_there(ino)
            self._metrics.add(EVICTED_FILES, int(bool(places) and gone[ino]))
        return gone

    @staticmethod
    def _is_there(ino: int) -> bool:
        """Whether it has a location still, and can be read there: it has no row yet, say."""
        is_located = _native.get_location(ino, 0) is not None
        return is_located and bool(_native.read_cached(ino, 0, 1))


class Preloading:
    """Of one mount: the directories (`in`) of whose files the front knows what the index knew."""

    def __init__(self, store: Store, dataset: bytes, segments: SsdSource) -> None:
        self._store = store
        self._dataset = dataset
        self._segments = segments
        self._done: set[int] = set()
        self._running: dict[int, trio.Event] = {}

    def __contains__(self, directory: object) -> bool:
        """Any thread."""
        return directory in self._done

    async def preload(self, directory: int) -> None:
        """Ask the index for a whole directory that is listed; once."""
        while directory not in self._done:
            running = self._running.get(directory)
            if running is not None:
                await running.wait()
                continue
            event = self._running[directory] = trio.Event()
            try:
                rows = self._store.lookup_directory(self._dataset, _native.path(directory))
                limiter = trio.CapacityLimiter(1)
                while await trio.to_thread.run_sync(
                    self._preload_some, directory, rows, limiter=limiter
                ):
                    pass
                if self._segments.has_shared:
                    await trio.to_thread.run_sync(self._preload_shared, directory, limiter=limiter)
                self._done.add(directory)
            finally:
                del self._running[directory]
                event.set()

    def _preload_shared(self, directory: int) -> None:
        """What the host's cache service has of it."""
        cookie = 0
        while children := _native.children(directory, cookie, PRELOAD_BATCH):
            cookie = children[-1][2]
            self._segments.locate_shared([ino for _, ino, _ in children])

    def _preload_some(
        self, directory: int, rows: Iterator[tuple[bytes, Version, Location]]
    ) -> bool:
        batch = list(itertools.islice(rows, PRELOAD_BATCH))
        for name, version, location in batch:
            ino = _native.lookup(directory, name)
            if ino > 0:
                use(self._store, ino, 0, location, version)
        return bool(batch)
