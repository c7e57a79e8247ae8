"""Storing blocks: what is there already is found by its digest, the rest is written in batches,
and indexed. And the opposite: evicting files, one by one.

INVARIANT: a row is added only for a record that is in its segment, whole.
All with the store's lock, but for what says otherwise.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fusecache.base import digest
from fusecache.store import index as idx
from fusecache.store.attachment import Attachment
from fusecache.store.capacity import Place, evict_blocks, evict_least
from fusecache.store.index import evicting
from fusecache.store.index.evicting import BlockAt
from fusecache.store.reading import Quarantine, is_block
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import SegmentWriter
from fusecache.store.segment.holes import can_punch, is_punched
from fusecache.store.types import BLOCK_BYTES, Item, Location, Version
from fusecache.store.writing import OpenSegment

_DESCRIPTORS: Final = 16
_PAUSE_SECONDS: Final = 0.001  # a lock is not handed over


class StoredBlocks:
    """Looks whether what the index names is really there; a few segments stay open for that."""

    def __init__(self, attachment: Attachment, quarantine: Quarantine) -> None:
        self._attachment = attachment
        self._quarantine = quarantine
        self._fds: dict[int, int] = {}

    def hold(self, location: Location, name: bytes, length: int) -> bool:
        """Is the block with this digest and length there? A look at its header says so."""
        directory = self._attachment.given.opened
        assert directory is not None
        if location.payload_len != length:
            return False
        fd = self._open(location.segno)
        if fd is None:
            return False
        status = os.fstat(fd)
        if status.st_nlink == 0:
            self.gone(location.segno)
            self._attachment.suspect()
            return False
        is_there = is_block(fd, location, name, directory.uuid)
        if is_punched(fd, location):  # evicted by another process, which is no fault
            return False
        if is_there:
            return True
        # Cut to nothing: the same.
        if status.st_size > location.offset:
            message = f"damaged record header in segment {location.segno}"
            self._attachment.faults.tell("checksum", message)
            self._quarantine.add(location.segno, location.offset)
        return False

    def _open(self, segno: int) -> int | None:
        fd = self._fds.get(segno)
        if fd is None:
            if len(self._fds) >= _DESCRIPTORS:
                self.gone(next(iter(self._fds)))
            try:
                path = self._attachment.given.segment_path(segno)
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return None
            self._fds[segno] = fd
        return fd

    def gone(self, segno: int) -> None:
        fd = self._fds.pop(segno, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        for segno in list(self._fds):
            self.gone(segno)


class Puts:
    """One thread of the process at a time."""

    def __init__(
        self, attachment: Attachment, segment: OpenSegment, quarantine: Quarantine
    ) -> None:
        self._attachment = attachment
        self._segment = segment
        self._quarantine = quarantine
        self._blocks = StoredBlocks(attachment, quarantine)
        self._evicted: set[int] = set()  # since the last put began

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
        whatever_is_used: bool = True,
        pinned_by_plan: Callable[[], Collection[int]] | None = None,
        leave: int = -1,
    ) -> list[Location | None]:
        """Store blocks and say of each where it lies, as if they were put one after another; small
        ones cost a fraction of that. Only one thread of the process may call this or `put`. Takes
        the lock.

        Unless `whatever_is_used` only what `reuse` lets go is evicted, if there is one.
        None: full under `keep`, nothing may go, too large for a record, or a fault (already
        reported); evicted again for a later one; with `evict=False` also what would need the
        eviction of a segment.
        With `pinned_by_plan`: those segments are not evicted, nor what this call has put.
        What lies in segment `leave`, or is known by an entry there, is written anew.
        """
        assert len(dataset) == 16
        attachment = self._attachment
        algorithm = digest.ALGORITHMS[attachment.settings.digest]
        names = [
            digest.digest(algorithm, item[3]) if _is_storable(item) else None for item in items
        ]
        found: list[Location | None] = [None] * len(items)
        with attachment.lock, attachment.contained():
            place = attachment.usable_place()
            if place is not None:
                self._evicted.clear()
                self._quarantine.drain(attachment)
                how = _How(evict, whatever_is_used, pinned_by_plan, leave)
                parts = attachment, self._segment, self._blocks
                _Put(*parts, how, dataset, place.index, self._evicted).store(items, names, found)
        if self._evicted:
            return [at if at and at.segno not in self._evicted else None for at in found]
        return found

    def link(self, dataset: bytes, path: bytes, version: Version, block: int, at: Location) -> None:
        """Have the index lead from a file's block to what `lookup_block` has found, while there is
        room for a row; no record says so. Any thread, and waits for no lock: the next commit may be
        another's.
        """
        attachment = self._attachment
        with attachment.contained():
            place = attachment.sound_place()
            if place is None or len(path) > fmt.PATH_BYTES_MAX:
                return
            if not self._segment.has_room_for_rows():
                return
            pending = place.index.pending
            pending.touch(at.segno, time.time_ns())
            is_time = pending.add([idx.file_row(dataset, path, version, block, at)], [])
            if is_time and attachment.lock.acquire(blocking=False):
                try:
                    if attachment.is_current(place) and not attachment.faults.is_paused():
                        place.index.flush()
                finally:
                    attachment.lock.release()

    def gone(self, segno: int) -> None:
        """This segment's file is about to go."""
        self._evicted.add(segno)
        self._blocks.gone(segno)

    def close(self) -> None:
        """Leave the directory."""
        self._blocks.close()


class _How(NamedTuple):
    """See `Puts.put_many`."""

    evict: bool
    whatever_is_used: bool
    pinned_by_plan: Callable[[], Collection[int]] | None
    leave: int


class _Waiting(NamedTuple):
    """A record to be written. `existing`: the block's, if only the entry is written."""

    number: int
    record: fmt.Record
    payload: digest.Buffer
    existing: Location | None


class _Put:
    """One `put_many`: records that wait for being written behind each other, in one segment.

    INVARIANT: no two of them hold the same block, none is found in `known` or the index yet.
    """

    def __init__(
        self,
        attachment: Attachment,
        segment: OpenSegment,
        blocks: StoredBlocks,
        how: _How,
        dataset: bytes,
        index: idx.Index,
        evicted: Collection[int],
    ) -> None:
        """`evicted`: so far, kept up to date by the caller."""
        self._attachment = attachment
        self._segment = segment
        self._blocks = blocks
        self._how = how
        self._dataset = dataset
        self._index = index
        self._evicted = evicted
        self._now_ns = time.time_ns()
        self._found: list[Location | None] = []  # the answer: one for each item
        self._known: dict[bytes, Location] = {}  # digest -> stored block
        self._writer: SegmentWriter | None = None
        self._waiting: list[_Waiting] = []
        self._length = 0  # of what waits
        self._rows_bytes = 0
        self._names: set[bytes] = set()
        self._files: set[tuple[bytes, int]] = set()

    def store(
        self, items: Sequence[Item], names: Sequence[bytes | None], found: list[Location | None]
    ) -> None:
        """`names`: the digests, None: not storable. The places go to `found`, one by one:
        what was stored before an error is stored.
        """
        self._found = found
        self._known = self._index.lookup_blocks([name for name in names if name is not None])
        for number, (item, name) in enumerate(zip(items, names, strict=True)):
            if name is not None and not self._store(number, item, name):
                found[:] = [None] * len(items)
                return
        self._write()

    def _store(self, number: int, item: Item, name: bytes) -> bool:
        """False: the directory is gone, with all that was put."""
        path, version, block, payload = item
        if name in self._names:
            self._write()  # a duplicate within the batch: the first one gets its place
        existing = self._existing(name, len(payload))
        if existing is not None and self._is_known(item, existing) and self._how.leave < 0:
            self._found[number] = existing
            return True
        length = len(payload) if existing is None else 0
        header_len = fmt.header_length(length, path)
        record_len = fmt.record_length(header_len, length)
        gap = fmt.record_begin(1, header_len) - 1  # at most
        if not self._has_room(gap + record_len, idx.growth_bytes(path)):
            if self._attachment.current.index is not self._index:
                return False
            if existing is not None and existing.segno in self._evicted:
                return True
        if self._writer is not None:
            record = fmt.Record(
                fmt.TYPE_BLOCK if existing is None else fmt.TYPE_ENTRY,
                header_len,
                length,
                record_len,
                name,
                self._now_ns,
                tuple(digest.chunk_sums(payload)) if existing is None else (),
                self._dataset,
                version,
                block,
                path,
            )
            self._add(_Waiting(number, record, payload if existing is None else b"", existing), gap)
        elif existing is not None and self._segment.has_room_for_rows():  # known to the index only
            self._found[number] = existing
            row = idx.file_row(self._dataset, path, version, block, existing)
            self._index.pending.add([row], [])
        return True

    def _existing(self, name: bytes, length: int) -> Location | None:
        existing = self._known.get(name)
        if existing is None or existing.segno == self._how.leave:
            return None
        return existing if self._blocks.hold(existing, name, length) else None

    def _is_known(self, item: Item, existing: Location) -> bool:
        """Does the index lead there from this file? The block counts as fetched now."""
        path, version, block, _ = item
        if (path, block) in self._files:
            self._write()  # the index must know what it was changed to
        self._index.pending.touch(existing.segno, self._now_ns)
        return self._index.lookup(self._dataset, path, version, block) == existing

    def _has_room(self, length: int, rows_bytes: int) -> bool:
        """Behind what waits. False: that is written, and there is another segment now, or none."""
        more = (self._length + length, self._rows_bytes + rows_bytes)
        if self._writer is not None and self._writer.has_room(*more):
            return True
        self._write()
        evict, whatever_is_used, pinned_by_plan, _ = self._how
        stays = None if pinned_by_plan is None else self._staying
        self._writer = self._segment.for_records(
            (length, rows_bytes), evict, whatever_is_used, stays
        )
        return False

    def _staying(self) -> Collection[int]:
        """What the plan has pinned, and what was put so far."""
        assert self._how.pinned_by_plan is not None
        return {*self._how.pinned_by_plan(), *(at.segno for at in self._found if at is not None)}

    def _add(self, waiting: _Waiting, gap: int) -> None:
        record = waiting.record
        self._waiting.append(waiting)
        self._length += gap + record.record_len
        self._rows_bytes += idx.growth_bytes(record.path)
        self._names.add(record.digest)
        self._files.add((record.path, record.block))

    def _take(self) -> list[_Waiting]:
        waiting, self._waiting, self._length, self._rows_bytes = self._waiting, [], 0, 0
        self._names.clear()
        self._files.clear()
        return waiting

    def _write(self) -> None:
        """Write what waits, and index what was written."""
        waiting, writer = self._take(), self._writer
        if writer is None or not waiting:
            return
        written: list[Location] = []
        failed: OSError | None = None
        try:
            writer.append([(record, payload) for _, record, payload, _ in waiting], written)
        except OSError as error:
            failed = error
        is_time = self._index_written(writer, waiting, written)
        if failed is not None:
            self._writer = None
            self._segment.seal()
            self._attachment.given.count_error(writer.segno, failed)
            self._attachment.given.tell_error(failed, writer.segno)
        elif is_time and not self._attachment.faults.is_paused():
            with self._attachment.contained():  # the blocks are stored, their rows are in memory
                self._index.flush()

    def _index_written(
        self, writer: SegmentWriter, waiting: Sequence[_Waiting], written: Sequence[Location]
    ) -> bool:
        """Those of what waited that were. True: it is time to commit."""
        files: list[idx.FileRow] = []
        blocks: list[idx.BlockRow] = []
        for (number, record, _, existing), location in zip(waiting, written, strict=False):
            at = location if existing is None else existing
            if existing is None:
                self._known[record.digest] = at
                blocks.append(idx.block_row(record.digest, at))
            files.append(idx.file_row(self._dataset, record.path, record.version, record.block, at))
            self._found[number] = at
            self._segment.seen.note(record)
            writer.take_rows(idx.growth_bytes(record.path))
        if written:
            self._index.pending.touch(writer.segno, self._now_ns)
        return self._index.pending.add(files, blocks)


class StoreEvictions:
    """Of files, one by one: docs/FORMAT.md, *Eviction of files*. Any thread."""

    def __init__(self, attachment: Attachment, segment: OpenSegment) -> None:
        self._attachment = attachment
        self._segment = segment
        self._punches: dict[Path, bool] = {}
        self._evicted_bytes = 0

    def can_evict(self) -> bool:
        """Whether there is more to `evict` for a plan than a refusal: the disks can give a part of
        a file back, and the policy is not `keep`.
        """
        return self._attachment.settings.policy != "keep" and self.can_punch()

    def can_punch(self) -> bool:
        """The disks can. Tried once."""
        place = self._attachment.place()
        if place is None:
            return False
        folders = [member.segments for member in place.directory.in_service()]
        for folder in folders:
            if folder not in self._punches:
                self._punches[folder] = can_punch(folder)
        return all(self._punches[folder] for folder in folders)

    def evicted_bytes(self) -> int:
        """What was given back so far, at no cost."""
        return self._evicted_bytes

    def evict(
        self, dataset: bytes, files: Sequence[tuple[bytes, Version]], by_user: bool = False
    ) -> tuple[list[list[tuple[int, Location]] | None], int]:
        """Have these (path, version) on SSD no more. Of each its blocks (number, where it was),
        which may be read no more; None: it stays. And the bytes that were given back. `by_user`:
        under `keep`, too.

        Takes the lock for as many rows at a time as a transaction may change.
        """
        stay: list[list[tuple[int, Location]] | None] = [None] * len(files)
        with self._attachment.sharing() as place:
            if place is not None:
                place.index.flush()
        if place is None:
            return stay, 0
        freed = 0
        with self._attachment.contained():
            found, sealed = _find(place.index, dataset, files)
            with place.index.database.reader() as connection:
                can_go = self.can_punch() if by_user else self.can_evict()
                kept = evicting.staying(connection, found, sealed if can_go else ())
            blocks = [b for n, each in enumerate(found) if n not in kept for b in each]
            freed = self._evict(place, sorted(blocks, key=lambda block: block.at))
            self._evicted_bytes += freed
            self._segment.note_room()
            left, _ = _find(place.index, dataset, files)
            return [
                None if still else [(key[2], at) for key, at in before]
                for before, still in zip(found, left, strict=True)
            ], freed
        return stay, freed

    def _evict(self, place: Place, blocks: Sequence[BlockAt]) -> int:
        freed, most = 0, place.index.database.rows_at_once
        for start in range(0, len(blocks), most):
            some = blocks[start : start + most]
            try:
                freed += self._evict_some(place, some)
            except OSError:  # of which disk?
                for segno, group in itertools.groupby(some, lambda block: block.at.segno):
                    try:
                        freed += self._evict_some(place, list(group))
                    except OSError as error:
                        self._attachment.given.count_error(segno, error)
                        self._attachment.given.tell_error(error, segno)
        with self._attachment.sharing() as now:
            if now is not None:
                evict_least(now)
        return freed

    def _evict_some(self, place: Place, blocks: Sequence[BlockAt]) -> int:
        """In one transaction. OSError."""
        freed = 0
        with self._attachment.sharing() as now:
            if now is not None and now.index is place.index:
                freed = max(0, evict_blocks(now, blocks))
        time.sleep(_PAUSE_SECONDS)
        return freed


def _find(
    index: idx.Index, dataset: bytes, files: Sequence[tuple[bytes, Version]]
) -> tuple[list[list[BlockAt]], set[int]]:
    """The blocks of each file, and the sealed segments."""
    with index.database.reader() as connection:
        found = [evicting.blocks_of(connection, dataset, *file) for file in files]
    return found, {row.segno for row in index.segments.read() if row.sealed}


def _is_storable(item: Item) -> bool:
    path, _, block, payload = item
    return (
        0 < len(payload) <= BLOCK_BYTES and len(path) <= fmt.PATH_BYTES_MAX and 0 <= block < 1 << 32
    )
