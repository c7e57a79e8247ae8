"""What the cache holds, and what it may still take. Any thread, without the store's lock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from pathlib import Path

from fusecache.store import index as idx
from fusecache.store.attachment import Attachment
from fusecache.store.capacity import full_disk_bytes, records_within
from fusecache.store.segment import format as fmt
from fusecache.store.types import DirectoryState, Usage
from fusecache.store.writing import OpenSegment


class Accounts:
    """Of the directory, not of this process."""

    def __init__(self, attachment: Attachment, segment: OpenSegment) -> None:
        self._attachment = attachment
        self._segment = segment
        # Blocks, bytes written, and the monotonic time until which these will do.
        self._counted = (0, 0, 0.0)

    def usage(self) -> Usage:
        """Zeros while there is no directory."""
        index, limit = self._attachment.current.index, self._attachment.settings.limit_bytes
        if index is None:
            return Usage(0, 0, limit, 0, 0)
        try:
            rows = index.segments.read()
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
            self._attachment.current.error(index, error)
            return Usage(0, 0, limit, 0, 0)
        own, reserved = index.database.size_bytes(), sum(row.reserved for row in rows)
        directory = self._attachment.given.opened
        if directory is not None:
            own += directory.tables.size_bytes() + directory.pins.size_bytes()
        return Usage(written + own, reserved + own, limit, count, len(rows))

    def dataset_bytes(self, dataset: bytes) -> int:
        """What is stored of its files; one that was deleted at the origin counts while its row is
        there. Reads all its rows. 0 while there is no directory.
        """
        index = self._attachment.current.index
        if index is None:
            return 0
        try:
            return index.dataset_bytes(dataset)
        except idx.ERRORS as error:
            self._attachment.current.error(index, error)
            return 0

    def written_bytes(self, index: idx.Index, row: idx.SegmentRow) -> int:
        """Of what is reserved for the segment."""
        if row.sealed:
            return row.reserved
        if row.log is not None:  # not preallocated
            try:
                return self._attachment.given.segment_path(row.segno).stat().st_size
            except OSError:
                return 0
        writer = self._segment.writer
        if writer is not None and writer.segno == row.segno:
            return writer.position
        return index.written_end(row.segno)

    def directories(self) -> list[DirectoryState]:
        """Of each directory: is it used, and what lies there; in the order they were given."""
        written, place = dict[Path, list[int]](), self._attachment.place()
        if place is not None:
            with contextlib.suppress(*idx.ERRORS):
                for row in place.index.segments.read():
                    path = place.directory.member_of(row.segno).path
                    written.setdefault(path, []).append(self.written_bytes(place.index, row))
        return self._attachment.given.states(written)

    def room_bytes(self, pinned_by_plan: Callable[[], Collection[int]] | None = None) -> int:
        """How many payload bytes can probably still be stored without an eviction; 0: full. With
        `pinned_by_plan`: when all segments but those, and what a user has pinned, have been evicted
        (not under `keep`).

        On the low side: what headers, the alignment of records, and the index will take is
        estimated from the records that this process has written.
        """
        writer, seen = self._segment.writer, self._segment.seen.mean()
        largest = self._segment.seen.largest_bytes
        returned = 0 if pinned_by_plan is None else self._evictable_bytes(pinned_by_plan)
        count = 0
        if writer is not None:
            if writer.has_room(max(largest, seen.record_bytes)):
                count = writer.fitting(seen.record_bytes, seen.rows_bytes)
            returned += writer.size - writer.position - count * seen.record_bytes
        room = self._segment.room_to_come(returned) - count * seen.rows_bytes
        count += records_within(room, self._attachment.segment_bytes, seen, largest)
        return count * seen.payload_bytes

    def _evictable_bytes(self, pinned_by_plan: Callable[[], Collection[int]]) -> int:
        place = self._attachment.place()
        if place is None or self._attachment.settings.policy == "keep":
            return 0
        try:
            rows, stays = place.unpinned(place.index.segments.read()), pinned_by_plan()
        except idx.ERRORS:
            return 0
        return sum(row.reserved for row in rows if row.sealed and row.segno not in stays)

    def pinned_bytes(self) -> int:
        """What is reserved for segments in which users have pinned files."""
        place = self._attachment.place()
        if place is None:
            return 0
        try:
            rows = place.index.segments.read()
        except idx.ERRORS:
            return 0
        return sum(row.reserved for row in {*rows}.difference(place.unpinned(rows)))

    def full_disk_bytes(self) -> int | None:
        """What is free on the disk, if that is why the cache gets no larger: its limit would allow
        it, but others have taken the room. None: not so.
        """
        place = self._attachment.place()
        if place is None or self.room_bytes() > 0:
            return None
        try:
            return full_disk_bytes(place, self._segment.bytes_of_next(place))
        except (*idx.ERRORS, OSError):
            return None  # whoever puts will say what is wrong

    def stored_bytes(self) -> int:
        """What this process has stored so far. Any thread, at no cost."""
        return self._segment.seen.payload_bytes

    def taken_bytes(self, length: int) -> int:
        """What is reserved, at most, for a block of that length: all of a new segment and of its
        index rows, where the open one has no room for it.
        """
        writer, segment_bytes = self._segment.writer, self._attachment.segment_bytes
        header_len = fmt.header_length(length, bytes(fmt.PATH_BYTES_MAX))
        if writer is not None and writer.has_room(fmt.record_length(header_len, length)):
            return length
        return segment_bytes + segment_bytes // 8
