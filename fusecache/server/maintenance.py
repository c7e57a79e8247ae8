"""What the command line asks a running server to do: fill the cache (warm), check it (verify)."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import trio

from fusecache import _native
from fusecache.base.errors import OriginError
from fusecache.cached.shared import SharedBlocks
from fusecache.control.control import PROGRESS_INTERVAL_S, Message, RequestError, Send
from fusecache.read.operations import Operations
from fusecache.read.reader import Reader
from fusecache.server.selecting import (
    ERRORS_SHOWN,
    Asked,
    Failures,
    find,
    select,
    strings,
    telling,
)
from fusecache.store import Store
from fusecache.store.index import growth_bytes
from fusecache.store.segment.format import header_length, record_length, segment_bytes
from fusecache.store.types import BLOCK_BYTES, Location, RecordFault
from fusecache.table import namespace
from fusecache.table.pins import UserPins

VERIFY_BATCH = 64
LOCATIONS_BATCH = 1 << 14
MISSING_SHOWN = 5
WARM_SHARE = 0.9  # of the limit: for so much other datasets go; beyond it nothing does
LANDED_LOOK_S = 0.01
FIXED_BYTES = 1 << 19  # of a cache: headers of segments, pages of the index


@dataclass
class WarmProgress:
    """Counts of files and bytes; `already` files were cached before.

    `skipped` files could not be stored, or, `unfitting` of them, were not tried for lack of room.
    """

    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    bytes_stored: int = 0  # of whole files
    room_bytes: int = 0  # on SSD, that all of them take
    largest_bytes: int = 0  # of a file's records
    already: int = 0
    skipped: int = 0
    skipped_bytes: int = 0
    unfitting: int = 0
    unfitting_bytes: int = 0
    failures: Failures = field(default_factory=Failures)

    def select(self, size: int, taken: int) -> None:
        """One more, that takes so much on SSD."""
        self.files_total += 1
        self.bytes_total += size
        self.room_bytes += taken
        self.largest_bytes = max(self.largest_bytes, min(taken, BLOCK_BYTES))

    def leave(self, files: int, size: int) -> None:
        """These are not tried."""
        self.unfitting, self.unfitting_bytes = files, size
        self.skip(files, size)

    def skip(self, files: int, size: int) -> None:
        self.skipped += files
        self.skipped_bytes += size

    def cache_block(self, size: int) -> None:
        self.bytes_done += size

    def finish(self, size: int, already: bool) -> None:
        """All blocks of a file are cached."""
        self.files_done += 1
        self.bytes_stored += size
        self.already += already

    def fields(self) -> Message:
        """Of a message of progress."""
        found = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return {**found, "errors": self.failures.count}


class _Room:
    """What `warm` has left without an eviction, as `look` says when no file is in flight."""

    def __init__(self, look: Callable[[], int]) -> None:
        self._look = look
        self._left_bytes = 0
        self._flying = 0

    def send(self) -> None:
        """A file is in flight."""
        self._flying += 1

    def land(self) -> None:
        self._flying -= 1

    async def take(self, size: int) -> bool:
        """Whether there is so much."""
        if size > self._left_bytes:
            while self._flying:
                await trio.sleep(LANDED_LOOK_S)
            self._left_bytes = await trio.to_thread.run_sync(self._look)
        self._left_bytes -= size
        return self._left_bytes >= 0


class Maintenance:
    """Long operations on the cache; each ends when its client hangs up."""

    def __init__(
        self,
        operations: Operations,
        reader: Reader,
        store: Store,
        concurrency: int,
        note_bad: Callable[[RecordFault, int, int, str], str],
        pins: UserPins,
        shared: SharedBlocks | None = None,
    ) -> None:
        """`note_bad(fault, segno, offset, when)` counts, logs, quarantines; the line."""
        self._operations = operations
        self._reader = reader
        self._store = store
        self._concurrency = concurrency
        self._note_bad = note_bad
        self._pins = pins
        self._shared = shared

    async def warm(self, request: Message, send: Send) -> Message:
        """Fetch every file below the request's "prefix" that matches its "globs", relative to the
        prefix, and is not cached.

        Ends early when the store cannot take more ("skipped" counts the rest): with a full cache it
        would only replace what it has just fetched. "needed_bytes": the limit of the store with
        which all would fit.
        """
        progress = WarmProgress()
        return await telling(lambda: self._warm(request, progress), progress.fields, send)

    async def warm_paths(self, request: Message, send: Send) -> Message:
        """The same of the files at "paths" of the mount: a part of a list. "carried" of the result
        goes into the request for the next part.
        """
        progress = WarmProgress()
        return await telling(lambda: self._warm(request, progress), progress.fields, send)

    async def _warm(self, request: Message, progress: WarmProgress) -> Message:
        def chosen(ino: int, path: bytes) -> None:
            size = namespace.version(ino).size
            progress.select(size, taken_bytes(size, path))

        stored, taken, largest = _carried(request)
        unmatched, missing, failures = list[str](), list[str](), progress.failures
        if request["op"] == "warm_paths":
            paths = strings(request, "paths")
            files, missing = await find(paths, self._operations, chosen, failures)
        else:
            asked, list_checked = Asked.of(request), self._operations.list_checked
            files, unmatched = await select(asked, list_checked, chosen, failures)
            if (asked.globs or asked.prefix) and not files:
                raise asked.none_found()
        limit = self._store.usage().limit_bytes
        budget = int(limit * WARM_SHARE) - segment_bytes(limit)  # one may be begun or evicted
        budget -= await trio.to_thread.run_sync(self._store.pinned_bytes)
        stored = await self._fetch(files, stored, budget, progress)
        taken += progress.room_bytes
        largest = max(largest, progress.largest_bytes)
        return {
            "result": {
                "files": progress.files_done,
                "bytes": progress.bytes_stored,
                "already": progress.already,
                "skipped": progress.skipped,
                "skipped_bytes": progress.skipped_bytes,
                "unfitting": progress.unfitting,
                "unfitting_bytes": progress.unfitting_bytes,
                "limit_bytes": limit,
                "needed_bytes": limit_for(taken, largest),
                "unmatched": unmatched,
                "missing": len(missing),
                "missing_names": missing[:MISSING_SHOWN],
                "carried": [stored, taken, largest],
                **failures.fields(),
            }
        }

    async def _fetch(
        self, files: array[int], stored: int, budget: int, progress: WarmProgress
    ) -> int:
        """Those that are not cached. `stored`: bytes that were asked for before, of which the
        result is; `budget`: for so many others go. What is pinned and cached counts in neither.
        """
        room, tried_bytes = _Room(self._room_bytes), 0
        send_file, receive_file = trio.open_memory_channel[tuple[int, bool]](0)
        async with trio.open_nursery() as workers:
            for _ in range(self._concurrency):
                workers.start_soon(self._warm_some, receive_file.clone(), progress, room)
            receive_file.close()
            async with send_file:
                for index, ino in enumerate(files):
                    size = namespace.version(ino).size
                    if not (self._pins.holds_one(ino) and await self._is_cached(ino, size)):
                        stored += taken_bytes(size, _native.path(ino))
                    if stored > budget and not await self._fits(ino, size, room):
                        progress.leave(len(files) - index, progress.bytes_total - tried_bytes)
                        break
                    tried_bytes += size
                    room.send()
                    await send_file.send((ino, stored <= budget))
        return stored

    async def _fits(self, ino: int, size: int, room: _Room) -> bool:
        """Whether the file is stored, or can be without an eviction."""
        return await self._is_cached(ino, size) or await room.take(size)

    async def _is_cached(self, ino: int, size: int) -> bool:
        blocks = range(namespace.block_count(size))
        return all([await self._reader.is_cached(ino, block) for block in blocks])

    def _room_bytes(self) -> int:
        self._store.settle()
        shared_bytes = self._shared.room_bytes if self._shared is not None else 0
        return self._store.room_bytes() + shared_bytes

    async def _warm_some(
        self,
        files: trio.MemoryReceiveChannel[tuple[int, bool]],
        progress: WarmProgress,
        room: _Room,
    ) -> None:
        async for ino, evict in files:
            try:
                size = namespace.version(ino).size
                already = True
                for block in range(namespace.block_count(size)):
                    cached = await self._reader.ensure_cached(ino, block, evict)
                    if cached is None:
                        progress.skip(1, size)
                        break
                    already = already and cached
                    progress.cache_block(namespace.block_span(size, block)[1])
                else:
                    progress.finish(size, already)
            except OriginError as error:
                progress.failures.add(_native.path(ino), error)
            finally:
                room.land()

    async def verify(self, request: Message, send: Send) -> Message:
        """Read every record of the cache directory, and of this mount's logs, and check it against
        its digest; count, log and quarantine what is bad. "faults": the first ERRORS_SHOWN lines of
        that.
        """
        del request
        total = await trio.to_thread.run_sync(_count_records, self._store)
        counts = {"blocks_done": 0, "blocks_total": total, "bytes_done": 0, "bad": 0}
        lines: list[str] = []
        records = _check_records(self._store)
        next_report = 0.0
        while batch := await trio.to_thread.run_sync(_take, records, VERIFY_BATCH):
            for at, fault in batch:
                counts["blocks_done"] += 1
                counts["bytes_done"] += at.payload_len
                if fault:
                    counts["bad"] += 1
                    line = self._note_bad(fault, at.segno, at.offset, "found by verify")
                    if len(lines) < ERRORS_SHOWN:
                        lines.append(line)
            if trio.current_time() >= next_report:
                await send({"progress": counts})
                next_report = trio.current_time() + PROGRESS_INTERVAL_S
        return {
            "result": {
                "blocks": counts["blocks_done"],
                "bytes": counts["bytes_done"],
                "bad": counts["bad"],
                "faults": lines,
            }
        }


def _stored_bytes(size: int, path: bytes) -> int:
    """What a file of this size takes on SSD."""

    def record_bytes(length: int) -> int:
        return record_length(header_length(length, path), length)

    blocks, rest = divmod(size, BLOCK_BYTES)
    return blocks * record_bytes(BLOCK_BYTES) + (record_bytes(rest) if rest else 0)


def taken_bytes(size: int, path: bytes) -> int:
    """The same, with the rows of the index."""
    return _stored_bytes(size, path) + namespace.block_count(size) * growth_bytes(path)


def _carried(request: Message) -> tuple[int, int, int]:
    """Of a list so far, in bytes: what is to be stored, what all takes, the largest record.
    RequestError.
    """
    found = request.get("carried") or [0, 0, 0]
    if not isinstance(found, list) or [type(one) for one in found] != [int] * 3 or min(found) < 0:
        raise RequestError("carried must be what the last answer said")
    return found[0], found[1], found[2]


def limit_for(taken_bytes: int, largest_bytes: int) -> int:
    """A limit, little more than the least, with which `warm` stores so much: SQLite's log may take
    1/256 of it, and the last record needs a segment of its own.
    """
    return int((taken_bytes + 2 * largest_bytes + FIXED_BYTES) * 1.01)


def _take(
    records: Iterator[tuple[Location, RecordFault | None]], most: int
) -> list[tuple[Location, RecordFault | None]]:
    return list(itertools.islice(records, most))


def _count_records(store: Store) -> int:
    segnos = store.log_segments()
    in_logs = sum(files for segno, files, *_ in _native.log_survey() if segno in segnos)
    return store.usage().blocks + in_logs


def _check_records(store: Store) -> Iterator[tuple[Location, RecordFault | None]]:
    """Each record, and its fault. To those of logs only the inode table leads; a bad one's location
    is forgotten. Before and after the others: a log that ends meanwhile gets rows behind our back.
    """
    segnos = store.log_segments()
    yield from store.verify(None)
    segnos |= store.log_segments()
    if not segnos:
        return
    for begin in range(1, _native.count() + 1, LOCATIONS_BATCH):
        files = _files_in(segnos, range(begin, begin + LOCATIONS_BATCH))
        for at, fault in store.check(sorted(files)):
            ino = files[at]
            if fault and _location_in(segnos, ino) != at:
                continue  # moved or changed: the segment may have been released
            if fault:
                _native.clear_location(ino, 0, (at.segno, at.offset, at.header_len))
            yield at, fault


def _files_in(segnos: set[int], inos: range) -> dict[Location, int]:
    found = {_location_in(segnos, ino): ino for ino in inos}
    return {at: ino for at, ino in found.items() if at is not None}


def _location_in(segnos: set[int], ino: int) -> Location | None:
    """Of a file of one block, if it is in these segments."""
    at = _native.get_location(ino, 0)
    if at is None or at[0] not in segnos or _native.is_dead(ino):
        return None
    return Location(*at, namespace.version(ino).size)
