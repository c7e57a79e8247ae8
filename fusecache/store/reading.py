"""The read side for Python: look-ups, descriptors of segments, and checking what is stored.

INVARIANT: a location is returned only for the version it was stored for.
INVARIANT: the front is told of the end of each segment that it was given a descriptor of.
Any thread, and never waits for the store's lock, but for what says otherwise.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from fusecache.base import digest
from fusecache.base.errors import CacheFault
from fusecache.store import index as idx
from fusecache.store.attachment import Attachment
from fusecache.store.directory import Directory
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import RecordReader, is_segment, read_header, try_direct
from fusecache.store.segment.holes import is_punched
from fusecache.store.types import Location, RecordFault, Version


class Quarantine:
    """Records that were found bad: not found any more, and soon not in the index."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, int], bool] = {}  # whether the disk is doubted

    def add(self, segno: int, offset: int) -> None:
        """Forget the record: at once here, in the index with the next put or housekeeping."""
        self._places[segno, offset] = True

    def forget(self, segno: int, offset: int) -> None:
        """The same of one that was evicted, and is not bad."""
        self._places.setdefault((segno, offset), False)

    def unless_bad(self, location: Location | None) -> Location | None:
        if location is not None and self._places and location[:2] in self._places:
            return None
        return location

    def drain(self, attachment: Attachment) -> None:
        """Into the index, with the lock. sqlite3.Error: the rest is for the next time."""
        index = attachment.current.index
        if index is None:
            return
        for (segno, offset), is_bad in list(self._places.items()):
            if is_bad:
                attachment.given.look_at_disk(segno, offset)
            index.quarantine(segno, offset)
            self._places.pop((segno, offset), None)

    def clear(self) -> None:
        self._places.clear()


class Reads:
    """Segments of which somebody got a descriptor are announced until they are gone."""

    def __init__(self, attachment: Attachment, quarantine: Quarantine) -> None:
        self._attachment = attachment
        self._quarantine = quarantine
        self._announced: set[int] = set()

    # ---- lookups ---------------------------------------------------------------------------------
    def lookup(self, dataset: bytes, path: bytes, version: Version, block: int) -> Location | None:
        """Where this block of this version of the file lies; None: not cached."""
        index = self._attachment.current.index
        if index is None:
            return None
        try:
            location = index.lookup(dataset, path, version, block)
        except idx.ERRORS as error:
            self._attachment.current.error(index, error)
            return None
        return self._quarantine.unless_bad(location)

    def lookup_block(self, name: bytes, length: int) -> Location | None:
        """Where the block with this digest lies, of so many bytes, as its header says, too; None:
        it is not cached.
        """
        return self.lookup_blocks([(name, length)])[0]

    def lookup_blocks(self, blocks: Sequence[tuple[bytes, int]]) -> list[Location | None]:
        """The same of several."""
        place = self._attachment.place()
        nothing: list[Location | None] = [None] * len(blocks)
        if place is None:
            return nothing
        try:
            rows = place.index.lookup_blocks([name for name, _ in blocks])
        except idx.ERRORS as error:
            self._attachment.current.error(place.index, error)
            return nothing
        found: list[Location | None] = []
        opened: dict[int, int | None] = {}
        try:
            for name, length in blocks:
                at = self._quarantine.unless_bad(rows.get(name))
                if at is not None and at.payload_len == length:
                    if at.segno not in opened:
                        opened[at.segno] = self.open_segment(at.segno)
                    if not _holds(opened[at.segno], at, name, place.directory.uuid):
                        at = None
                else:
                    at = None
                found.append(at)
        finally:
            for fd in opened.values():
                if fd is not None:
                    os.close(fd)
        return found

    def records_of(self, segno: int) -> list[Location]:
        """Those of the segment that the index knows."""
        index = self._attachment.current.index
        try:
            return [] if index is None else index.records_of(segno)
        except idx.ERRORS as error:
            self._attachment.current.error(index, error)
            return []

    def lookup_directory(
        self, dataset: bytes, directory: bytes
    ) -> Iterator[tuple[bytes, Version, Location]]:
        """(name, version, location) of the single-block files directly in the directory."""
        index = self._attachment.current.index
        if index is None:
            return
        try:
            for name, version, location in index.lookup_directory(dataset, directory):
                if self._quarantine.unless_bad(location) is not None:
                    yield name, version, location
        except idx.ERRORS as error:
            self._attachment.current.error(index, error)

    # ---- segments --------------------------------------------------------------------------------
    def open_segment(self, segno: int) -> int | None:
        """A new read-only descriptor, the caller's to close; None: the segment is gone."""
        attachment, directory = self._attachment, self._attachment.given.opened
        if directory is None:
            return None
        # Announced first: an eviction between the two calls must still be reported.
        self._announced.add(segno)
        fd, path = -1, attachment.given.segment_path(segno)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            # Readers check records against themselves only, so the file must be the right one.
            if is_segment(fd, segno, directory.uuid):
                return fd
            if os.fstat(fd).st_size > 0:
                attachment.suspect()
                attachment.faults.tell("checksum", f"{path} is not what it was")
        except OSError as error:
            attachment.suspect()
            if error.errno != errno.ENOENT and not attachment.given.count_error(segno, error):
                attachment.given.tell_error(error, segno)
        if fd >= 0:
            os.close(fd)
        return None

    def gone(self, segno: int) -> None:
        """It was told of."""
        self._announced.discard(segno)

    def announce_gone(self, is_gone: Callable[[int], bool] = lambda _: True) -> None:
        """Tell of each that is, with the lock."""
        for segno in list(self._announced):
            if is_gone(segno):
                self._attachment.hooks.gone(segno)

    def log_segments(self) -> set[int]:
        """Segments of logs, of which the index has no rows yet."""
        index = self._attachment.current.index
        if index is not None:
            try:
                return {row.segno for row in index.segments.read_logs()}
            except idx.ERRORS as error:
                self._attachment.current.error(index, error)
        return set()

    # ---- checking --------------------------------------------------------------------------------
    def check(self, locations: Iterable[Location]) -> Iterator[tuple[Location, RecordFault | None]]:
        """Read each record: its fault. Those that were evicted meanwhile are left out.

        Chunk sums are checked and the digest is computed anew. The caller quarantines.
        """
        place = self._attachment.place()
        if place is None:
            return
        reader = RecordReader()
        fd, opened = -1, -1
        try:
            for location in locations:
                if location.segno != opened:
                    if fd >= 0:
                        os.close(fd)
                    fd, opened = self._open_to_check(location.segno), location.segno
                fault = _fault(reader, fd, location, place.directory) if fd >= 0 else "read"
                if fault and fd >= 0 and is_punched(fd, location):
                    self._quarantine.forget(*location[:2])
                elif not fault or not place.index.segments.is_gone_now(location.segno):
                    yield location, fault
        except idx.ERRORS as error:
            self._attachment.current.error(place.index, error)
        finally:
            if fd >= 0:
                os.close(fd)

    def _open_to_check(self, segno: int) -> int:
        path = self._attachment.given.segment_path(segno)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return -1
        try_direct(fd)  # what the disk has, not what the page cache remembers
        return fd


def _holds(fd: int | None, at: Location, name: bytes, uuid: bytes) -> bool:
    return fd is not None and is_block(fd, at, name, uuid) and not is_punched(fd, at)


def is_block(fd: int, location: Location, name: bytes, uuid: bytes) -> bool:
    """Whether a valid header says that the block with this digest lies there."""
    record = read_header(fd, location.segno, location.offset, uuid)
    return (
        record is not None
        and record.type == fmt.TYPE_BLOCK
        and record.digest == name
        and (record.header_len, record.payload_len) == location[2:]
    )


def _fault(
    reader: RecordReader, fd: int, location: Location, directory: Directory
) -> RecordFault | None:
    try:
        record, payload = reader.read(fd, location, directory.uuid)
    except CacheFault as fault:
        return "read" if isinstance(fault.__cause__, OSError) else "checksum"
    is_sound = digest.digest(directory.algorithm, payload) == record.digest
    return None if is_sound else "checksum"
