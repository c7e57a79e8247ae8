"""Where the files of a listing lie, told to the front before anybody reads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import trio

from fusecache import _native
from fusecache.read.locations import use
from fusecache.store import Store
from fusecache.store.types import Location, Version

PRELOAD_BATCH = 256


class Preloading:
    """Of one mount: the directories (`in`) of whose files the front knows what the index knew."""

    def __init__(self, store: Store, dataset: bytes) -> None:
        self._store = store
        self._dataset = dataset
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
                self._done.add(directory)
            finally:
                del self._running[directory]
                event.set()

    def _preload_some(
        self, directory: int, rows: Iterator[tuple[bytes, Version, Location]]
    ) -> bool:
        batch = list(itertools.islice(rows, PRELOAD_BATCH))
        for name, version, location in batch:
            ino = _native.lookup(directory, name)
            if ino > 0:
                use(self._store, ino, 0, location, version)
        return bool(batch)
