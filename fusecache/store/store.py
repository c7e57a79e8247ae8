"""The store: what the rest of fusecache sees of the SSD tier.

`put` appends and indexes, `lookup` finds; `housekeeping` keeps limits, follows what other processes
did to the directory, and mends. Reading payloads is the callers' business (native.c).

INVARIANT: a location is returned only for the version it was stored for.
INVARIANT: no fault of the cache leaves this module: `on_fault` is told, the result is None.

Locks: `_lock` guards the writer, the writing connection and all changes; it may be held for seconds
(rebuild). Lookups, `quarantine` and `open_segment` never take it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeGuard

from fusecache import digest, trust
from fusecache.errors import CacheFault, UserError
from fusecache.store import format as fmt
from fusecache.store import index as idx
from fusecache.store import recovery
from fusecache.store.capacity import (
    Place,
    create,
    full_disk_bytes,
    keep_limits,
    log_room_bytes,
    may_go,
    pressing,
    segments_to_come,
)
from fusecache.store.directory import Directory
from fusecache.store.log import Log
from fusecache.store.reconcile import adopt, reindex_own, tidy, unsealed
from fusecache.store.reuse import Reuse
from fusecache.store.segment import (
    RecordReader,
    SegmentWriter,
    is_segment,
    read_header,
    read_through,
    try_direct,
)
from fusecache.store.types import (
    ALIGNMENT,
    BLOCK_BYTES,
    DirectoryState,
    Item,
    Location,
    RecordFault,
    StoreSettings,
    Usage,
    Version,
)

# After a full cache or a failed write, how long puts return None without trying.
_PAUSE_SECONDS: Final = 1.0
_REATTACH_SECONDS: Final = 5.0  # between attempts at a directory that cannot be used
_RECONCILE_SECONDS: Final = 30.0
_USES_SECONDS: Final = 5.0  # after so long others know which segments we read
# Who was killed before we began lets go of his segments so soon, or he lives.
_DYING_SECONDS: Final = 10.0
_DYING_PAUSE_SECONDS: Final = 1.0
_ADOPTED_WITHIN_SECONDS: Final = 1.0
_ADOPTION_PAUSE_SECONDS: Final = 0.001
_ADOPTION_SECONDS: Final = 0.5  # of each second of housekeeping: readers want the processors, too
_REPAIR_SECONDS_MIN: Final = 1.0
_REPAIR_SECONDS_MAX: Final = 300.0
_DEDUPE_DESCRIPTORS: Final = 16
# Payload bytes in how many bytes of records: a low guess, which the first records outweigh.
_SHARE_AT_FIRST: Final = (3, 4)


@dataclass(slots=True)
class _Run:
    """Records of one `put_many` that wait for being written behind each other, in one segment.

    INVARIANT: no two of them hold the same block, none is found in `known` or the index yet.
    """

    index: idx.Index
    dataset: bytes
    found: list[Location | None]  # the answer: one for each item
    now_ns: int
    leave: int = -1  # a segment from which everything is to go
    kept: Callable[[], Collection[int]] | None = None  # segments that are not evicted
    known: dict[bytes, Location] = field(default_factory=dict)  # digest -> stored block
    writer: SegmentWriter | None = None
    # (number of the item, its record, payload, place of the block if only the entry is written)
    waiting: list[tuple[int, fmt.Record, digest.Buffer, Location | None]] = field(
        default_factory=list
    )
    length: int = 0
    names: set[bytes] = field(default_factory=set)
    files: set[tuple[bytes, int]] = field(default_factory=set)

    def add(
        self, number: int, record: fmt.Record, payload: digest.Buffer, existing: Location | None
    ) -> None:
        self.waiting.append((number, record, payload, existing))
        self.length += record.record_len
        self.names.add(record.digest)
        self.files.add((record.path, record.block))

    def all_kept(self) -> Collection[int]:
        assert self.kept is not None
        return {*self.kept(), *(at.segno for at in self.found if at is not None)}

    def take(self) -> list[tuple[int, fmt.Record, digest.Buffer, Location | None]]:
        waiting, self.waiting, self.length = self.waiting, [], 0
        self.names.clear()
        self.files.clear()
        return waiting


class Store:
    """One process's handle on a cache directory."""

    def __init__(
        self,
        path: Path,
        settings: StoreSettings,
        on_fault: Callable[[str, str], None],
        on_segment_gone: Callable[[int], None],
        further: Sequence[Path] = (),
    ) -> None:
        """Use `Store.open` or `Store.reopen`. Has no directory yet: every look-up is a miss."""
        self.settings = settings
        self.reuse: Reuse | None = None  # who knows what may go; None: what was fetched longest ago
        self._own_limit_bytes = settings.limit_bytes
        self.quarantined = 0  # records, since the start of this process
        self.highest_segno = 0  # that this process knows of
        self.logs: list[Log] = []  # those that have not ended, the latest last
        self._on_fault = on_fault
        self._on_segment_gone = on_segment_gone
        self._path = path
        self._paths = (path, *further)
        self._out: dict[Path, str] = {}  # directories of several that failed, and why
        self._devices: dict[Path, int] = {}  # those that this process has used, and their disks
        self._why_off = ""  # why there is no directory now
        self._lock = threading.RLock()
        self._directory: Directory | None = None
        self._index: idx.Index | None = None
        self._index_bad: str | None = None
        self._generation = 0
        self._writer: SegmentWriter | None = None
        self._segment_bytes = fmt.segment_bytes(settings.limit_bytes)
        self._paused_until = 0.0
        self._full_until = 0.0  # the same for puts that must not evict
        self._evicted: set[int] = set()  # since the last put began
        self._payload_bytes, self._record_bytes = _SHARE_AT_FIRST
        self._record_bytes_most = 0
        self._reconcile_at = 0.0
        self._uses_at = 0.0
        self.adopted = 0  # segments of dead writers, since the start of this process
        self._dying_until = time.monotonic() + _DYING_SECONDS
        self._repair_at = 0.0
        self._reattach_at = 0.0
        self._repair_seconds = _REPAIR_SECONDS_MIN
        self._announced: set[int] = set()
        self._bad_records: set[tuple[int, int]] = set()
        self._dedupe_fds: dict[int, int] = {}
        # Blocks, bytes written, and the monotonic time until which these will do.
        self._counted = (0, 0, 0.0)
        self._closed = False

    # ---- open and close --------------------------------------------------------------------------
    @classmethod
    def open(
        cls,
        directory: Path,
        settings: StoreSettings,
        *,
        further: Sequence[Path] = (),
        create: bool = True,
        on_fault: Callable[[str, str], None],
        on_segment_gone: Callable[[int], None],
    ) -> Store:
        """Open or `create` a cache directory, or several (`further`) across which segments are
        striped, and adopt what dead writers left. Their parents must exist. Without `create` only
        directories are opened that have a cache already: the disk of others may not be mounted.

        `on_fault(kind, message)`: kind is one of checksum, io, disk-full, index, missing, and
        directory: one of several is not used, or lost what it held.
        `on_segment_gone(segno)`: its file is about to go, or gone; must not call the store.
        Both are called from any thread.

        UserError: not writable, newer format, another digest algorithm, in exclusive use.
        """
        store = cls(directory, settings, on_fault, on_segment_gone, further)
        try:
            for path in store._paths if create else ():
                with contextlib.suppress(OSError):  # opening says what is wrong
                    os.close(trust.open_directory(str(path.absolute()), make=True))
            opened = store._open_directory(None if create else {})
        except OSError as error:
            raise UserError(
                f"cannot use {store._names()}: {error.strerror or error}:"
                " choose another with --cache-dir"
            ) from error
        with store._lock, store._faults():
            store._attach(opened)
            store._reconcile()
            store._keep_limits()
        return store

    @classmethod
    def reopen(
        cls,
        directory: Path,
        settings: StoreSettings,
        *,
        further: Sequence[Path] = (),
        on_fault: Callable[[str, str], None],
        on_segment_gone: Callable[[int], None],
    ) -> Store:
        """For a server that takes over a live mount: as `open`, but what is wrong with the
        directory is a fault, and `attach` or `housekeeping` opens it once it is there, with the
        cache in it: where it is not, its disk may not be mounted. Opens nothing yet, so it cannot
        block.
        """
        return cls(directory, settings, on_fault, on_segment_gone, further)

    def attach(self) -> None:
        """After `reopen`: have look-ups find something. Writes nothing, so it does not wait for a
        writer; the rest is for `housekeeping`.
        """
        with self._lock, self._faults():
            if self._directory is None and not self._closed:
                self._recreate()

    def _open_directory(self, devices: dict[Path, int] | None) -> Directory:
        if why := digest.why_unusable(self.settings.digest):
            raise UserError(why)
        return Directory(
            self._paths,
            self.settings.digest,
            lambda line: self._fault("directory", line),
            self._out,
            devices,
        )

    def _attach(self, directory: Directory) -> None:
        self._directory = directory
        self._devices |= {member.path: member.device for member in directory.members}
        self._why_off = ""
        self._follow_or_build(directory)
        self._follow_limit(directory)

    def flush(self) -> None:
        """Commit the rows that are still in memory."""
        with self._lock, self._faults():
            if self._index is not None:
                self._drain_bad_records()
                self._index.flush()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            with self._faults():
                if self._directory is not None and self._index is not None:
                    self._drain_bad_records()
                    self._index.flush()
                    self._seal()
            for log in [log for log in self.logs if log.is_finished]:
                log.end()
            self._closed = True
            self._detach()

    def _detach(self) -> None:
        """Let go of everything that belongs to the directory."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        index, self._index = self._index, None
        if index is not None:
            index.close()
        if self._directory is not None:
            self._directory.close()
            self._directory = None
        for fd in self._dedupe_fds.values():
            os.close(fd)
        self._dedupe_fds.clear()

    # ---- faults ----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Turns errors of disk and database into faults. The caller's result is then None."""
        try:
            yield
        except idx.ERRORS as error:
            self._index_error(self._index, error)
        except UserError as error:
            self._fault("io", str(error))
        except OSError as error:
            self._os_error(error)

    def _os_error(self, error: OSError, segno: int | None = None) -> None:
        """Of the file of that segment, if it is one's."""
        self._paused_until = time.monotonic() + _PAUSE_SECONDS
        kind = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io"
        path = self._home()
        if segno is not None:
            path = self.segment_path(segno).parent.parent
        elif isinstance(error.filename, (str, Path)):
            path = next((p for p in self._paths if p in Path(error.filename).parents), path)
        self._fault(kind, f"cache directory {path}: {error.strerror or error}")

    def _home(self) -> Path:
        """The directory that has the index; while there is none, the first that is to be used."""
        directory = self._directory
        if directory is not None and directory.members:
            return directory.members[0].path
        return next((path for path in self._paths if path not in self._out), self._path)

    def _index_error(self, index: idx.Index | None, error: Exception) -> None:
        if index is None or index is not self._index:
            return  # closed under a lookup in another thread: that is no fault
        if idx.damage(error):
            if self._index_bad is None:
                self._index_bad = str(error)
                self._fault("index", f"index of {self._home()}: {error}; it will be rebuilt")
        elif getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
            self._fault("disk-full", f"index of {self._home()}: no space left")
        else:
            self._fault("index", f"index of {self._home()}: {error}")

    def _row_damaged(self, message: str) -> None:
        self._fault("index", f"index of {self._home()}: {message}")

    def _fault(self, kind: str, message: str) -> None:
        self._on_fault(kind, message)

    # ---- lookups (any thread, never wait for _lock) ----------------------------------------------
    def lookup(self, dataset: bytes, path: bytes, version: Version, block: int) -> Location | None:
        """Where this block of this version of the file lies; None: not cached."""
        index = self._index
        if index is None:
            return None
        try:
            location = index.lookup(dataset, path, version, block)
        except idx.ERRORS as error:
            self._index_error(index, error)
            return None
        return self._unless_bad(location)

    def lookup_file(
        self, dataset: bytes, path: bytes, version: Version
    ) -> list[Location | None] | None:
        """One item a block of the file; None: nothing of this version is cached."""
        index = self._index
        if index is None:
            return None
        try:
            found = index.lookup_file(dataset, path, version)
        except idx.ERRORS as error:
            self._index_error(index, error)
            return None
        if found is not None and self._bad_records:
            return [self._unless_bad(location) for location in found]
        return found

    def lookup_directory(
        self, dataset: bytes, directory: bytes
    ) -> Iterator[tuple[bytes, Version, Location]]:
        """(name, version, location) of the single-block files directly in the directory."""
        index = self._index
        if index is None:
            return
        try:
            for name, version, location in index.lookup_directory(dataset, directory):
                if self._unless_bad(location) is not None:
                    yield name, version, location
        except idx.ERRORS as error:
            self._index_error(index, error)

    def _unless_bad(self, location: Location | None) -> Location | None:
        if (
            location is not None
            and self._bad_records
            and (location.segno, location.offset) in self._bad_records
        ):
            return None
        return location

    def segment_path(self, segno: int) -> Path:
        directory = self._directory
        if directory is None:
            return self._path / "segments" / f"{segno:08d}.seg"
        return directory.segment_path(segno)

    def open_segment(self, segno: int) -> int | None:
        """A new read-only descriptor, the caller's to close; None: the segment is gone."""
        directory = self._directory
        if directory is None:
            return None
        # Announced first: an eviction between the two calls must still be reported.
        self._announced.add(segno)
        fd = -1
        try:
            fd = os.open(self.segment_path(segno), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            # Readers check records against themselves only, so the file must be the right one.
            if is_segment(fd, segno, directory.uuid):
                return fd
            if os.fstat(fd).st_size > 0:
                self._reconcile_at = 0.0
                self._fault("checksum", f"{self.segment_path(segno)} is not what it was")
        except OSError as error:
            self._reconcile_at = 0.0
            if error.errno != errno.ENOENT and not self._count_error(segno, error):
                self._os_error(error, segno)
        if fd >= 0:
            os.close(fd)
        return None

    def quarantine(self, segno: int, offset: int) -> None:
        """Forget the record: at once here, in the index with the next put or housekeeping."""
        self.quarantined += 1
        self._bad_records.add((segno, offset))

    def _drain_bad_records(self) -> None:
        if self._index is None or not self._bad_records:
            return
        for segno, offset in list(self._bad_records):
            self._look_at_disk(segno, offset)
            self._index.quarantine(segno, offset)
            self._bad_records.discard((segno, offset))

    # ---- one of several directories that fails ---------------------------------------------------
    def _count_error(self, segno: int, error: OSError) -> bool:
        """An error of the disk under this segment. False: there is only one directory."""
        directory = self._directory
        if directory is None or len(directory.members) == 1:
            return False
        line = directory.count_error(directory.member_of(segno), error)
        if line:
            self._fault("directory", line)
        return True

    def _look_at_disk(self, segno: int, offset: int) -> None:
        """A record was bad: if the disk of one of several directories fails, that counts."""
        directory = self._directory
        if directory is None or len(directory.members) == 1:
            return
        try:
            read_through(directory.segment_path(segno), offset)
        except FileNotFoundError:
            pass
        except OSError as error:
            self._count_error(segno, error)

    def _follow_failures(self, directory: Directory) -> None:
        """What a directory that was put out of service held is gone."""
        for line in directory.put_out_missing():
            self._fault("directory", line)
        fresh = {path: why for path, why in directory.failed().items() if path not in self._out}
        if not fresh:
            return
        self._out.update(fresh)
        self._reconcile_at = 0.0
        writer = self._writer
        if writer is not None and writer.path.parent.parent in fresh:
            writer.abandon()
            self._writer = None
        for segno in list(self._announced):
            if directory.member_of(segno).why_out or not directory.segment_path(segno).exists():
                self._gone(segno)

    # ---- put -------------------------------------------------------------------------------------
    def put(
        self,
        dataset: bytes,
        path: bytes,
        version: Version,
        block: int,
        payload: digest.Buffer,
    ) -> Location | None:
        """Store one block and say where it lies: `put_many` of one."""
        return self.put_many(dataset, [(path, version, block, payload)])[0]

    def put_many(
        self,
        dataset: bytes,
        items: Sequence[Item],
        *,
        evict: bool = True,
        asked: bool = True,
        kept: Callable[[], Collection[int]] | None = None,
        leave: int = -1,
    ) -> list[Location | None]:
        """Store blocks and say of each where it lies, as if they were put one after another; small
        ones cost a fraction of that. Only one thread of the process may call this or `put`.

        Without `asked` only what `reuse` lets go is evicted, if there is one.
        None: full under `keep`, nothing may go, too large for a record, or a fault (already
        reported); evicted again for a later one; with `evict=False` also what would need the
        eviction of a segment.
        With `kept`: those segments are not evicted, nor what this call has put.
        What lies in segment `leave`, or is known by an entry there, is written anew.
        """
        assert len(dataset) == 16
        algorithm = digest.ALGORITHMS[self.settings.digest]
        names = [
            digest.digest(algorithm, item[3]) if _is_storable(item) else None for item in items
        ]
        found: list[Location | None] = [None] * len(items)
        with self._lock, self._faults():
            if not self._closed and self._usable():
                assert self._index is not None
                self._evicted.clear()
                run = _Run(self._index, dataset, found, time.time_ns(), leave, kept)
                self._put(run, items, names, evict, asked)
        if self._evicted:
            return [at if at and at.segno not in self._evicted else None for at in found]
        return found

    def _usable(self) -> bool:
        """Is there a directory with a sound index? Mends the index when it is time to."""
        if self._directory is None:
            return False
        if self._index_bad is not None:
            self._repair(self._directory)
        return self._index is not None and self._index_bad is None

    def _put(
        self,
        run: _Run,
        items: Sequence[Item],
        names: Sequence[bytes | None],
        evict: bool,
        asked: bool,
    ) -> None:
        self._drain_bad_records()
        run.known = run.index.lookup_blocks([name for name in names if name is not None])
        for number, ((path, version, block, payload), name) in enumerate(
            zip(items, names, strict=True)
        ):
            if name is None:
                continue
            if name in run.names:
                self._write(run)  # a duplicate within the batch: the first one gets its place
            existing = run.known.get(name)
            if existing is not None and (
                existing.segno == run.leave or not self._holds(existing, name, len(payload))
            ):
                existing = None
            if existing is not None:
                if (path, block) in run.files:
                    self._write(run)  # the index must know what it was changed to
                run.index.touch(existing.segno, run.now_ns)
                is_known = run.index.lookup(run.dataset, path, version, block) == existing
                if is_known and run.leave < 0:
                    run.found[number] = existing
                    continue
            length = len(payload) if existing is None else 0
            header_len = fmt.header_length(length, path)
            record_len = fmt.align(header_len + length)
            if run.writer is None or not run.writer.has_room(run.length + record_len):
                self._write(run)
                run.writer = self._writer_for(
                    record_len, evict, asked, None if run.kept is None else run.all_kept
                )
                if self._index is not run.index:  # the directory is gone, with all that was put
                    run.found[:] = [None] * len(items)
                    return
                if existing is not None and existing.segno in self._evicted:
                    continue
            if run.writer is not None:
                record = fmt.Record(
                    fmt.TYPE_BLOCK if existing is None else fmt.TYPE_ENTRY,
                    header_len,
                    length,
                    record_len,
                    name,
                    run.now_ns,
                    tuple(digest.chunk_sums(payload)) if existing is None else (),
                    run.dataset,
                    version,
                    block,
                    path,
                )
                run.add(number, record, payload if existing is None else b"", existing)
            elif existing is not None:  # known to the index only, for which there is room
                run.found[number] = existing
                run.index.add([idx.file_row(run.dataset, path, version, block, existing)], [])
        self._write(run)

    def _write(self, run: _Run) -> None:
        """Write the records of the run, index what was written, and empty the run."""
        waiting, writer = run.take(), run.writer
        if writer is None or not waiting:
            return
        written: list[Location] = []
        failed: OSError | None = None
        try:
            writer.append([(record, payload) for _, record, payload, _ in waiting], written)
        except OSError as error:
            failed = error
        files: list[idx.FileRow] = []
        blocks: list[idx.BlockRow] = []
        for (number, record, _, existing), location in zip(waiting, written, strict=False):
            at = location if existing is None else existing
            if existing is None:
                run.known[record.digest] = at
                blocks.append(idx.block_row(record.digest, at))
            files.append(idx.file_row(run.dataset, record.path, record.version, record.block, at))
            run.found[number] = at
            self._payload_bytes += record.payload_len
            self._record_bytes += record.record_len
            self._record_bytes_most = max(self._record_bytes_most, record.record_len)
        if written:
            run.index.touch(writer.segno, run.now_ns)
        is_time = run.index.add(files, blocks)
        if failed is not None:
            run.writer = None
            self._seal()
            self._count_error(writer.segno, failed)
            self._os_error(failed, writer.segno)
        elif is_time and time.monotonic() >= self._paused_until:
            with self._faults():  # the blocks are stored all the same, their rows are in memory
                run.index.flush()

    def _holds(self, location: Location, name: bytes, length: int) -> bool:
        """Is the record that the index names really there? A look at its header says so."""
        directory = self._directory
        assert directory is not None
        if location.payload_len != length:
            return False
        fd = self._dedupe_fds.get(location.segno)
        if fd is None:
            if len(self._dedupe_fds) >= _DEDUPE_DESCRIPTORS:
                oldest = next(iter(self._dedupe_fds))
                os.close(self._dedupe_fds.pop(oldest))
            try:
                path = self.segment_path(location.segno)
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return False
            self._dedupe_fds[location.segno] = fd
        status = os.fstat(fd)
        if status.st_nlink == 0:
            os.close(self._dedupe_fds.pop(location.segno))
            self._reconcile_at = 0.0
            return False
        record = read_header(fd, location.segno, location.offset, directory.uuid)
        if (
            record is not None
            and record.type == fmt.TYPE_BLOCK
            and record.digest == name
            and (record.header_len, record.payload_len) == location[2:]
        ):
            return True
        # Cut to nothing: another process evicted it, which is no fault.
        if status.st_size > location.offset:
            self._fault("checksum", f"damaged record header in segment {location.segno}")
            self.quarantine(location.segno, location.offset)
        return False

    # ---- segments and capacity (with _lock) ------------------------------------------------------
    def _writer_for(
        self,
        record_len: int,
        evict: bool,
        asked: bool,
        kept: Callable[[], Collection[int]] | None,
    ) -> SegmentWriter | None:
        """The open segment with room for the record, a new one if need be; None: full."""
        writer = self._writer
        if writer is None or not writer.has_room(record_len):
            evict = evict and (asked or self._may_replace())
        if writer is not None:
            if not writer.is_linked():
                writer.abandon()
                self._writer = None
                self._gone(writer.segno)
                self._fault(
                    "missing", f"segment {writer.segno} of {writer.path.parent.parent} was deleted"
                )
                self._reconcile_at = 0.0
            elif writer.has_room(record_len):
                return writer
            elif not evict and self._is_full(writer):
                return None  # sealed, it could not even take smaller ones
            else:
                self._seal()
        directory, index = self._directory, self._index
        paused_until = self._paused_until if evict else max(self._paused_until, self._full_until)
        if directory is None or index is None or time.monotonic() < paused_until:
            return None
        if not directory.is_present():
            self._lost()
            return None
        index.flush()
        if not directory.try_share_index():
            return None  # a process is building the next index; housekeeping will follow
        try:
            if directory.generation() != self._generation:
                return None  # what others hold is in an index that we have yet to follow
            writer, failed = create(
                self._place(directory, index),
                self._bytes_of_next(directory, index),
                self.highest_segno,
                evict,
                asked,
                kept,
            )
        finally:
            directory.unshare_index()
        self._writer = writer
        if failed is not None and writer is None:
            self._os_error(failed)
        elif writer is None and evict and (asked or self.reuse is None):
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
        elif writer is None:
            self._full_until = time.monotonic() + _PAUSE_SECONDS
        else:
            self.highest_segno = writer.segno
        return writer

    def _may_replace(self) -> bool:
        """Whether a segment may go for what was missed."""
        if self.reuse is None:
            return True
        if self.reuse.has_refused() or self._directory is None or self._index is None:
            return False
        place = self._place(self._directory, self._index)
        return may_go(place, self._index.segments(), asked=False) is not None

    def _bytes_of_next(self, directory: Directory, index: idx.Index) -> int:
        """Across several directories even a little is spread: segments begin small there."""
        count = len(directory.in_service())
        if count == 1:
            return self._segment_bytes
        stored, _ = index.reserved_bytes()
        return min(self._segment_bytes, fmt.segment_bytes(stored // count))

    def _is_full(self, writer: SegmentWriter) -> bool:
        """Would sealing our segment leave no room for another one, without an eviction?"""
        now = time.monotonic()
        if now >= self._full_until and not self._segments_to_come(writer.size - writer.position):
            self._full_until = now + _PAUSE_SECONDS
        return now < self._full_until

    def _segments_to_come(self, returned: int = 0) -> int:
        index, directory = self._index, self._directory
        if index is None or directory is None or time.monotonic() < self._paused_until:
            return 0
        try:
            place = self._place(directory, index)
            return segments_to_come(place, self._writer, self._segment_bytes, returned)
        except (*idx.ERRORS, OSError):
            return 0  # whoever puts will say what is wrong

    def _place(self, directory: Directory, index: idx.Index) -> Place:
        return Place(directory, index, self.settings, self._gone, self._fault, self.reuse)

    def _sound_place(self) -> Place | None:
        directory, index = self._directory, self._index
        if self._closed or directory is None or index is None or self._index_bad is not None:
            return None
        return self._place(directory, index)

    def _is_place(self, place: Place | None) -> TypeGuard[Place]:
        """Is that still the directory, and its index?"""
        now = self._sound_place()
        return (
            now is not None
            and place is not None
            and (now.directory, now.index) == (place.directory, place.index)
        )

    # ---- logs ------------------------------------------------------------------------------------
    def begin_log(self, chunks: int, slack_bytes: int, record_bytes: int = ALIGNMENT) -> Log | None:
        """A log of so many segments that may at first be filled with `slack_bytes`, or with what
        there is room for without an eviction. None: there is none; the directory cannot be used.

        `record_bytes`: mean length of the records to come (the index needs room for their rows).
        """
        with self.sharing() as place:
            if place is None:
                return None
            for log in self.logs:
                log.put_rows(place)
            if log_room_bytes(place, place.index.segments()) < 2 * slack_bytes:
                self._seal()  # what is reserved for it and not written is room for the log
            log = Log(self, place, chunks, slack_bytes, record_bytes)
            if not log.segnos:
                return None
            self.highest_segno = log.segnos[-1]
            self.logs.append(log)
            return log
        return None

    def seal_in(self, segnos: Collection[int]) -> bool:
        """Whether the segment that is being written was among these: nothing is put there now."""
        with self.sharing() as place:
            if place is not None and self._writer is not None and self._writer.segno in segnos:
                self._seal()
                return True
        return False

    @contextlib.contextmanager
    def sharing(self) -> Iterator[Place | None]:
        """For a log: the place with a sound index, which nobody leaves for another meanwhile. None:
        not now. Errors of disk and database end the block, and are faults.
        """
        with self._lock:
            place = None
            with self._faults():
                place = self._place_to_share()
            try:
                with self._faults():
                    yield place
            finally:
                if place is not None:
                    place.directory.unshare_index()

    def _place_to_share(self) -> Place | None:
        if self._closed or not self._usable():
            return None
        place = self._sound_place()
        assert place is not None
        if not place.directory.is_present() or not place.directory.try_share_index():
            return None  # housekeeping will find out, or follow
        if place.directory.generation() != self._generation:
            place.directory.unshare_index()
            return None
        return place

    @contextlib.contextmanager
    def forgetting(self, log: Log) -> Iterator[None]:
        """For a log that ends: its segments will be orphans."""
        with self._lock:
            yield
            if log in self.logs:
                self.logs.remove(log)
            self._reconcile_at = 0.0

    def _gone(self, segno: int) -> None:
        self._evicted.add(segno)
        fd = self._dedupe_fds.pop(segno, None)
        if fd is not None:
            os.close(fd)
        self._announced.discard(segno)
        if self.reuse is not None:
            self.reuse.gone(segno)
        self._on_segment_gone(segno)

    def _seal(self) -> None:
        index = self._index
        if index is not None:
            index.flush()  # a sealed segment without rows is an unused one
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if writer.position == fmt.SEGMENT_HEADER_BYTES:
            with contextlib.suppress(OSError):
                writer.path.unlink()
            writer.seal()
            if index is not None:
                with index.transaction():
                    index.delete_segment(writer.segno)
            return
        used = writer.seal()
        if index is None:
            return
        with index.transaction():
            for row in index.segments():
                if row.segno == writer.segno:
                    index.put_segments([row._replace(sealed=True, reserved=used)])

    # ---- housekeeping ----------------------------------------------------------------------------
    def housekeeping(self) -> None:
        """To be called about once a second, from any thread. May take seconds (rebuild)."""
        with self._lock, self._faults():
            if self._closed:
                return
            directory = self._directory
            if directory is not None:
                self._follow_failures(directory)
            if directory is not None and not directory.is_present():
                self._lost()
                directory = None
            if directory is None:
                directory = self._recreate()
                if directory is None:
                    return
            self._mend(directory)
            index = self._index
            if index is None or self._index_bad is not None:
                return
            self._follow_limit(directory)
            self._drain_bad_records()
            if self.reuse is not None and time.monotonic() >= self._uses_at:
                self._uses_at = time.monotonic() + _USES_SECONDS
                now_ns = time.time_ns()
                for segno in self.reuse.take_used(now_ns):
                    index.touch(segno, now_ns)
            index.flush()
            present = {row.segno for row in index.segments()}
            self.highest_segno = max(self.highest_segno, *present, 0)
            for segno in list(self._announced):
                if segno not in present:
                    self._gone(segno)
        if time.monotonic() >= self._reconcile_at:
            self._reconcile(_ADOPTION_SECONDS)
        with self._lock, self._faults():
            self._keep_limits()

    def _follow_limit(self, directory: Directory) -> None:
        """The least limit of all who use the cache holds for all, as long as they use it. Segments
        are as large as fits it: what was reserved for a larger one is given back.
        """
        limit_bytes = directory.least_limit(self._own_limit_bytes)
        if limit_bytes == self.settings.limit_bytes:
            return
        self.settings = replace(self.settings, limit_bytes=limit_bytes)
        self._segment_bytes = fmt.segment_bytes(limit_bytes)
        if self._writer is not None and self._writer.size > self._segment_bytes:
            self._seal()

    def _mend(self, directory: Directory) -> None:
        """Follow a newer generation; rebuild a damaged or missing index."""
        index = self._index
        if index is not None and self._index_bad is None:
            try:
                status = index.path.stat()
                if (status.st_dev, status.st_ino) != index.identity:
                    self._index_bad = "replaced"
            except OSError:
                self._index_bad = "missing"
            if directory.generation() > self._generation:
                self._follow_or_build(directory)
                return
            if self._index_bad is not None:
                self._fault("index", f"index of {self._home()}: {self._index_bad}; rebuilding it")
        if self._index is None or self._index_bad is not None:
            self._repair(directory)

    def _repair(self, directory: Directory) -> None:
        now = time.monotonic()
        if now < self._repair_at:
            return
        # A disk that damages each new index must not keep us building.
        self._repair_seconds = (
            min(self._repair_seconds * 2, _REPAIR_SECONDS_MAX)
            if now < self._repair_at + 60
            else _REPAIR_SECONDS_MIN
        )
        try:
            self._follow_or_build(directory)
        except (OSError, sqlite3.Error) as error:
            line = directory.count_error(directory.members[0], error)
            if line:
                self._fault("directory", line)
            raise
        finally:
            self._repair_at = time.monotonic() + self._repair_seconds

    def _follow_or_build(self, directory: Directory) -> None:
        """Leave the present generation (if any) for a newer one; build that if there is none."""
        old, self._index = self._index, None
        pending: tuple[list[idx.FileRow], list[idx.BlockRow]] = ([], [])
        if old is not None:
            pending = old.take_pending()
            old.close()
        with directory.index_lock():
            newest = directory.generation()
            index: idx.Index | None = None
            if newest > self._generation:
                try:
                    index = idx.Index(directory.index_path(newest), self._row_damaged)
                    index.segments()
                except (*idx.ERRORS, OSError) as error:
                    self._fault("index", f"index of {self._home()}: {error}; rebuilding it")
                    if index is not None:
                        index.close()
                    index = None
            if index is None:
                newest = max(newest, self._generation) + 1
                recovery.rebuild(directory, newest)
                index = idx.Index(directory.index_path(newest), self._row_damaged)
        self._index, self._generation, self._index_bad = index, newest, None
        index.insert(*pending)
        place = self._place(directory, index)
        if self._writer is not None:
            reindex_own(place, self._writer)
        for log in self.logs:
            log.put_rows(place)
        self._reconcile_at = 0.0

    def _reconcile(self, within_s: float = math.inf) -> bool:
        """Whether others write segments, or have not died yet. The lock is let go between the
        segments that are adopted: a log leaves many of them. If that takes longer, the rest is left
        to the next call.
        """
        others_write, took_s = False, 0.0
        with self._faults():
            self._reconcile_at = time.monotonic() + _RECONCILE_SECONDS
            with self._lock:
                place = self._sound_place()
                segnos = unsealed(place, self._writer) if place is not None else []
                ours = {segno for log in self.logs for segno in log.segnos}
            for segno in segnos:
                with self._lock:
                    if self._is_place(place):
                        begin = time.monotonic()
                        if adopt(place, segno):
                            self.adopted += 1
                            took_s += time.monotonic() - begin
                        else:  # it stays, however often it is looked at
                            others_write |= segno not in ours
                if took_s > within_s:
                    self._reconcile_at = 0.0
                    return others_write
                time.sleep(_ADOPTION_PAUSE_SECONDS)  # a lock is not handed over
            if others_write and time.monotonic() < self._dying_until:
                self._reconcile_at = time.monotonic() + _DYING_PAUSE_SECONDS
            with self._lock:
                if self._is_place(place):
                    tidy(place, self._writer)
                    numbers = place.directory.segment_numbers()
                    self.highest_segno = max(self.highest_segno, *numbers, 0)
        return others_write

    def adopt_orphans(self) -> None:
        """Take over what dead writers have left. For a while after our start it waits a second for
        those who seem to live: the threads of a process that was killed may be in the kernel still.
        """
        end = min(time.monotonic() + _ADOPTED_WITHIN_SECONDS, self._dying_until)
        while self._reconcile() and time.monotonic() < end:
            time.sleep(_ADOPTED_WITHIN_SECONDS / 10)

    def _keep_limits(self) -> None:
        place = self._sound_place()
        if place is None or keep_limits(place) or self._writer is None:
            return
        # Only segments that are being written are left, or what others have on one of the disks.
        # Ours can go the next time, if that helps.
        if self._writer.segno in {row.segno for row in pressing(place, place.index.segments())}:
            self._seal()
            self._paused_until = time.monotonic() + _PAUSE_SECONDS

    # ---- a directory that went away --------------------------------------------------------------
    def _lost(self) -> None:
        directory = self._directory
        failed = directory.failed() if directory is not None else {}
        self._out.update(failed)
        if directory is None or directory.path not in failed:
            self._fault(
                "missing",
                f"cache directory {self._home()} is not where it was: nothing is cached until it is"
                " there again",
            )
        self._detach()
        self._index_bad = None
        self._generation = 0
        self._bad_records.clear()
        for segno in list(self._announced):
            self._gone(segno)

    def _recreate(self) -> Directory | None:
        """The directory as it is there again, or a new one where it was deleted. None: it is not
        there; where its disk is not mounted, another one must not be filled.
        """
        if time.monotonic() < self._reattach_at:
            return None
        for path, device in self._devices.items():
            with contextlib.suppress(OSError):
                if path not in self._out and path.parent.stat().st_dev == device:
                    os.close(trust.open_directory(str(path.absolute()), make=True))
        try:
            directory = self._open_directory(self._devices)
        except (OSError, UserError) as error:
            if not isinstance(error, FileNotFoundError):
                self._reattach_at = time.monotonic() + _REATTACH_SECONDS
            why = getattr(error, "strerror", None) or str(error)
            if why != self._why_off:
                self._why_off = why
                self._fault(
                    "missing", f"nothing is cached until {self._names()} can be used: {why}"
                )
            return None
        self._attach(directory)
        return directory

    def _names(self) -> str:
        many = len(self._paths) > 1
        return f"cache director{'ies' if many else 'y'} {', '.join(map(str, self._paths))}"

    # ---- reports ---------------------------------------------------------------------------------
    def usage(self) -> Usage:
        """Of the directory, not of this process; zeros while there is none."""
        index, limit = self._index, self.settings.limit_bytes
        if index is None:
            return Usage(0, 0, limit, 0, 0)
        try:
            rows = index.read_segments()
            count, written, good_until = self._counted
            now, begin = time.monotonic(), time.thread_time()
            if now >= good_until:
                count = index.count_blocks()
                written = sum(self.written_bytes(index, row) for row in rows)
                # Millions of rows, thousands of segments: not more than a tenth of a processor.
                cost = time.thread_time() - begin
                if cost > 0.01:
                    self._counted = (count, written, now + 10 * cost)
        except idx.ERRORS as error:
            self._index_error(index, error)
            return Usage(0, 0, limit, 0, 0)
        own, reserved = index.size_bytes(), sum(row.reserved for row in rows)
        return Usage(written + own, reserved + own, limit, count, len(rows))

    def written_bytes(self, index: idx.Index, row: idx.SegmentRow) -> int:
        """Of what is reserved for the segment. Any thread."""
        if row.sealed:
            return row.reserved
        if row.log is not None:  # not preallocated
            try:
                return self.segment_path(row.segno).stat().st_size
            except OSError:
                return 0
        writer = self._writer
        if writer is not None and writer.segno == row.segno:
            return writer.position
        return index.written_end(row.segno)

    def directories(self) -> list[DirectoryState]:
        """Of each directory: is it used, and what lies there; in the order they were given."""
        directory, index = self._directory, self._index
        out, counts = dict(self._out), dict[Path, list[int]]()
        if directory is not None:
            out.update(directory.left_out)
        if directory is not None and index is not None:
            with contextlib.suppress(*idx.ERRORS):
                for row in index.read_segments():
                    path = directory.member_of(row.segno).path
                    counts.setdefault(path, []).append(self.written_bytes(index, row))
        return [
            DirectoryState(
                str(path),
                out.get(path, self._why_off),
                sum(counts.get(path, [])),
                len(counts.get(path, [])),
            )
            for path in self._paths
        ]

    def room_bytes(self, kept: Callable[[], Collection[int]] | None = None) -> int:
        """How many payload bytes can probably still be stored without an eviction; 0: full. With
        `kept`: when all segments but those have been evicted (not under `keep`).

        On the low side: what headers, the alignment of records, ends of segments, and the index
        will take is estimated from the records that this process has written. Any thread.
        """
        writer = self._writer
        segments = self._segments_to_come(0 if kept is None else self._evictable_bytes(kept))
        room = segments * (self._segment_bytes - fmt.SEGMENT_HEADER_BYTES)
        if writer is not None:
            room += writer.size - writer.position
        room -= min((segments + 1) * self._record_bytes_most, self._segment_bytes)
        return max(0, room * self._payload_bytes // self._record_bytes)

    def _evictable_bytes(self, kept: Callable[[], Collection[int]]) -> int:
        index = self._index
        if index is None or self.settings.policy == "keep":
            return 0
        try:
            rows, stays = index.read_segments(), kept()
        except idx.ERRORS:
            return 0
        return sum(row.reserved for row in rows if row.sealed and row.segno not in stays)

    def full_disk_bytes(self) -> int | None:
        """What is free on the disk, if that is why the cache gets no larger: its limit would allow
        it, but others have taken the room. None: not so. Any thread.
        """
        index, directory = self._index, self._directory
        if index is None or directory is None or self.room_bytes() > 0:
            return None
        try:
            segment_bytes = self._bytes_of_next(directory, index)
            return full_disk_bytes(self._place(directory, index), segment_bytes)
        except (*idx.ERRORS, OSError):
            return None  # whoever puts will say what is wrong

    def taken_bytes(self, length: int) -> int:
        """What is reserved, at most, for a block of that length: all of a new segment and of its
        index rows, where the open one has no room for it. Any thread.
        """
        writer = self._writer
        header_len = fmt.header_length(length, bytes(fmt.PATH_BYTES_MAX))
        if writer is not None and writer.has_room(fmt.align(header_len + length)):
            return length
        return self._segment_bytes + self._segment_bytes // 8

    def verify(self, dataset: bytes | None) -> Iterator[tuple[Location, RecordFault | None]]:
        """`check` every record in the index (that the dataset uses)."""
        index = self._index
        if index is None:
            return
        self.flush()
        yield from self.check(index.records(dataset))

    def check(self, locations: Iterable[Location]) -> Iterator[tuple[Location, RecordFault | None]]:
        """Read each record: its fault. Those whose segment was evicted meanwhile are left out.

        Chunk sums are checked and the digest is computed anew. The caller quarantines.
        """
        index, directory = self._index, self._directory
        if index is None or directory is None:
            return
        reader = RecordReader()
        fd, opened = -1, -1
        try:
            for location in locations:
                if location.segno != opened:
                    if fd >= 0:
                        os.close(fd)
                    fd, opened = self._open_to_verify(location.segno), location.segno
                fault = _record_fault(reader, fd, location, directory) if fd >= 0 else "read"
                if not fault or not index.is_gone_now(location.segno):
                    yield location, fault
        except idx.ERRORS as error:
            self._index_error(index, error)
        finally:
            if fd >= 0:
                os.close(fd)

    def log_segments(self) -> set[int]:
        """Segments of logs, of which the index has no rows yet. Any thread."""
        index = self._index
        if index is not None:
            try:
                return {row.segno for row in index.read_log_segments()}
            except idx.ERRORS as error:
                self._index_error(index, error)
        return set()

    def _open_to_verify(self, segno: int) -> int:
        try:
            fd = os.open(self.segment_path(segno), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return -1
        try_direct(fd)  # what the disk has, not what the page cache remembers
        return fd

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False


def _is_storable(item: Item) -> bool:
    path, _, block, payload = item
    return (
        0 < len(payload) <= BLOCK_BYTES and len(path) <= fmt.PATH_BYTES_MAX and 0 <= block < 1 << 32
    )


def _record_fault(
    reader: RecordReader, fd: int, location: Location, directory: Directory
) -> RecordFault | None:
    try:
        record, payload = reader.read(fd, location, directory.uuid)
    except CacheFault as fault:
        return "read" if isinstance(fault.__cause__, OSError) else "checksum"
    is_sound = digest.digest(directory.algorithm, payload) == record.digest
    return None if is_sound else "checksum"
