"""What the command line asks a running server to do: fill the cache (warm), check it (verify)."""

from __future__ import annotations

import itertools
import os
import stat
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import trio

from fusecache import _native
from fusecache.base.errors import OriginError
from fusecache.control.control import PROGRESS_INTERVAL_S, Message, RequestError, Send
from fusecache.read.operations import Operations
from fusecache.read.reader import Reader
from fusecache.server.globs import Globs
from fusecache.store import Store
from fusecache.store.index import growth_bytes
from fusecache.store.segment.format import header_length, record_length, segment_bytes
from fusecache.store.types import BLOCK_BYTES, Location, RecordFault
from fusecache.table import namespace

ERRORS_SHOWN = 10
VERIFY_BATCH = 64
LOCATIONS_BATCH = 1 << 14
LISTING_BATCH = 1024  # names that are asked for at once
SLICE_S = 0.002  # of work, after which readers get as much
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
    errors: int = 0
    messages: list[str] = field(default_factory=list)

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

    def fail(self, ino: int, error: OriginError) -> None:
        self.errors += 1
        if len(self.messages) < ERRORS_SHOWN:
            path = _native.path(ino).decode(errors="backslashreplace")
            self.messages.append(f"{path or '.'}: {error}")


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
    ) -> None:
        """`note_bad(fault, segno, offset, when)` counts, logs, quarantines; the line."""
        self._operations = operations
        self._reader = reader
        self._store = store
        self._concurrency = concurrency
        self._note_bad = note_bad

    async def warm(self, request: Message, send: Send) -> Message:
        """Fetch every file below the request's "prefix" that matches its "globs", relative to the
        prefix, and is not cached.

        Ends early when the store cannot take more ("skipped" counts the rest): with a full cache it
        would only replace what it has just fetched. "needed_bytes": the limit of the store with
        which all would fit.
        """
        globs = request.get("globs") or []
        if not all(isinstance(glob, str) for glob in globs):
            raise RequestError("globs must be a list of strings")
        prefix = request.get("prefix") or ""
        if not isinstance(prefix, str):
            raise RequestError("prefix must be a string")
        progress = WarmProgress()
        unmatched = dict.fromkeys(globs)
        files = await self._select(os.fsencode(prefix), unmatched, progress)
        if (globs or prefix) and not files:
            below = f" below {prefix}" if prefix else ""
            raise RequestError(f"no file matches {' '.join(globs) or '**'}{below}")
        limit = self._store.usage().limit_bytes
        budget = int(limit * WARM_SHARE) - segment_bytes(limit)  # one may be begun or evicted
        room = _Room(self._room_bytes)
        send_file, receive_file = trio.open_memory_channel[tuple[int, bool]](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_report, progress, send)
            async with trio.open_nursery() as workers:
                for _ in range(self._concurrency):
                    workers.start_soon(self._warm_some, receive_file.clone(), progress, room)
                receive_file.close()
                async with send_file:
                    stored = tried_bytes = 0
                    for index, ino in enumerate(files):
                        size = namespace.version(ino).size
                        stored += _taken_bytes(size, _native.path(ino))
                        if stored > budget and not await self._fits(ino, size, room):
                            progress.leave(len(files) - index, progress.bytes_total - tried_bytes)
                            break
                        tried_bytes += size
                        room.send()
                        await send_file.send((ino, stored <= budget))
            nursery.cancel_scope.cancel()
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
                "needed_bytes": _limit_for(progress.room_bytes, progress.largest_bytes),
                "unmatched": list(unmatched),
                "errors": progress.messages,
                "error_count": progress.errors,
            }
        }

    async def _select(
        self, below: bytes, unmatched: dict[str, None], progress: WarmProgress
    ) -> array[int]:
        """The files, and in `unmatched` only the globs that named none."""
        globs = Globs(unmatched)
        names_all = not unmatched
        give_way_at = time.monotonic() + SLICE_S
        files, directories = array("Q"), [1]
        while directories:
            directory = directories.pop()
            try:
                await self._operations.list_checked(directory)
            except OriginError as error:
                progress.fail(directory, error)
                continue
            prefix = _native.path(directory)
            for name, ino in _entries(directory):
                if time.monotonic() >= give_way_at:
                    await trio.sleep(SLICE_S)  # at 0 no other thread gets the interpreter's lock
                    give_way_at = time.monotonic() + SLICE_S
                mode = _native.attributes(ino)[0]
                path = prefix + b"/" + name if prefix else name
                if stat.S_ISDIR(mode):
                    if _is_below(path, below) or _is_below(below, path):
                        directories.append(ino)
                    continue
                if not stat.S_ISREG(mode) or not _is_below(path, below):
                    continue
                naming = globs.naming(path[len(below) :].lstrip(b"/"))
                if naming or names_all:
                    for glob in naming:
                        unmatched.pop(glob, None)
                    files.append(ino)
                    size = namespace.version(ino).size
                    progress.select(size, _taken_bytes(size, path))
        return files

    async def _fits(self, ino: int, size: int, room: _Room) -> bool:
        """Whether the file is stored, or can be without an eviction."""
        blocks = range(namespace.block_count(size))
        if all([await self._reader.is_cached(ino, block) for block in blocks]):
            return True
        return await room.take(size)

    def _room_bytes(self) -> int:
        self._store.settle()
        return self._store.room_bytes()

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
                progress.fail(ino, error)
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


async def _report(progress: WarmProgress, send: Send) -> None:
    while True:
        await trio.sleep(PROGRESS_INTERVAL_S)
        fields = asdict(progress)
        del fields["messages"]
        await send({"progress": fields})


def _stored_bytes(size: int, path: bytes) -> int:
    """What a file of this size takes on SSD."""

    def record_bytes(length: int) -> int:
        return record_length(header_length(length, path), length)

    blocks, rest = divmod(size, BLOCK_BYTES)
    return blocks * record_bytes(BLOCK_BYTES) + (record_bytes(rest) if rest else 0)


def _taken_bytes(size: int, path: bytes) -> int:
    """The same, with the rows of the index."""
    return _stored_bytes(size, path) + namespace.block_count(size) * growth_bytes(path)


def _limit_for(taken_bytes: int, largest_bytes: int) -> int:
    """A limit, little more than the least, with which `warm` stores so much: SQLite's log may take
    1/256 of it, and the last record needs a segment of its own.
    """
    return int((taken_bytes + 2 * largest_bytes + FIXED_BYTES) * 1.01)


def _is_below(path: bytes, directory: bytes) -> bool:
    return not directory or path == directory or path.startswith(directory + b"/")


def _entries(directory: int) -> Iterator[tuple[bytes, int]]:
    cookie = 0
    while batch := _native.children(directory, cookie, LISTING_BATCH):
        for name, ino, cookie in batch:  # noqa: B007 (the last cookie is where to go on)
            yield name, ino


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
