"""The segment that this process is writing: when there is a new one, and what it may still take.

INVARIANT: this process writes one segment at most; it is sealed, or abandoned, before the next.
All with the store's lock, but for what says otherwise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from fusecache.store import index as idx
from fusecache.store.attachment import Attachment
from fusecache.store.capacity import (
    MeanRecord,
    Place,
    create,
    keep_limits,
    make_room,
    may_go,
    pressing,
    room_to_come,
    segment_within,
)
from fusecache.store.directory.given import PAUSE_SECONDS
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import SegmentWriter
from fusecache.store.types import ALIGNMENT

# While none was written: a low guess.
_RECORD_AT_FIRST: Final = MeanRecord(3 * ALIGNMENT // 4, ALIGNMENT, 0)


class RecordsSeen:
    """What records this process has written, in the mean. `largest_bytes` of one."""

    def __init__(self) -> None:
        self.largest_bytes = 0
        self._sums = (0, 0, 0, 0)  # records; bytes: payload, records, rows

    def note(self, record: fmt.Record) -> None:
        of = (1, record.payload_len, record.record_len, idx.growth_bytes(record.path))
        count, payload, length, rows = map(sum, zip(self._sums, of, strict=True))
        self._sums = (count, payload, length, rows)
        self.largest_bytes = max(self.largest_bytes, record.record_len)

    @property
    def payload_bytes(self) -> int:
        """Of all of them. Any thread."""
        return self._sums[1]

    def mean(self) -> MeanRecord:
        """What takes room is rounded up. Any thread."""
        count, payload, length, rows = self._sums
        if not count:
            return _RECORD_AT_FIRST
        return MeanRecord(payload // count, -(-length // count), -(-rows // count))


class OpenSegment:
    """`writer`: of the segment, None: there is none. `seen`: what was written, here and before."""

    def __init__(self, attachment: Attachment) -> None:
        self.writer: SegmentWriter | None = None
        self.seen = RecordsSeen()
        self._attachment = attachment
        # Until then nothing is tried: by who must not evict; by anybody, for nothing may go.
        self._full_until = self._stuck_until = 0.0

    # ---- a segment for what is to be written -----------------------------------------------------
    def for_records(
        self,
        needed: tuple[int, int],
        evict: bool,
        whatever_is_used: bool,
        pinned_by_plan: Callable[[], Collection[int]] | None,
    ) -> SegmentWriter | None:
        """The open segment with room for what is `needed` (`SegmentWriter.has_room`), a new one if
        need be; None: full. The directory may turn out to be lost (`Attachment.lose`).
        """
        writer = self.writer
        if writer is None or not writer.has_room(*needed):
            evict = evict and (whatever_is_used or self._may_replace())
        if writer is not None:
            if not writer.is_linked():
                self._drop(writer)
            elif writer.has_room(*needed):
                return writer
            elif not evict and self._is_full(writer, needed[0]):
                return None  # sealed, it could not even take smaller ones
            else:
                self.seal()
        return self._begin(needed[0], evict, whatever_is_used, pinned_by_plan)

    def _drop(self, writer: SegmentWriter) -> None:
        """Its file was deleted."""
        self.abandon()
        self._attachment.hooks.gone(writer.segno)
        self._attachment.faults.tell(
            "missing", f"segment {writer.segno} of {writer.path.parent.parent} was deleted"
        )
        self._attachment.suspect()

    def _begin(
        self,
        record_len: int,
        evict: bool,
        whatever_is_used: bool,
        pinned_by_plan: Callable[[], Collection[int]] | None,
    ) -> SegmentWriter | None:
        attachment, place = self._attachment, self._attachment.place()
        is_full = self._is_stuck() or (not evict and time.monotonic() < self._full_until)
        if place is None or is_full or attachment.faults.is_paused():
            return None
        if not place.directory.is_present():
            attachment.lose()
            return None
        place.index.flush()
        if not attachment.current.try_share(place.directory):
            return None
        try:
            bytes_of_next, highest = self.bytes_of_next(place), attachment.highest_segno
            writer, failed = create(
                place, bytes_of_next, record_len, highest, evict, whatever_is_used, pinned_by_plan
            )
        finally:
            place.directory.generations.unshare()
        self.writer = writer
        if writer is not None:
            attachment.saw([writer.segno])
        elif failed is not None:
            attachment.given.tell_error(failed)
        elif evict and (whatever_is_used or attachment.reuse is None):
            self._stuck_until = time.monotonic() + PAUSE_SECONDS
        else:
            self._full_until = time.monotonic() + PAUSE_SECONDS
        return writer

    def _may_replace(self) -> bool:
        """Whether a segment may go for what was missed."""
        reuse, place = self._attachment.reuse, self._attachment.place()
        if reuse is None:
            return True
        if reuse.has_refused() or place is None:
            return False
        unpinned = place.unpinned(place.index.segments.all())
        return may_go(place, unpinned, whatever_is_used=False) is not None

    def bytes_of_next(self, place: Place) -> int:
        """Across several directories even a little is spread: segments begin small there. Any
        thread.
        """
        most, count = self._attachment.segment_bytes, len(place.directory.in_service())
        if count == 1:
            return most
        stored, _ = place.index.segments.reserved_bytes()
        return min(most, fmt.segment_bytes(stored // count))

    # ---- room ------------------------------------------------------------------------------------
    def _is_full(self, writer: SegmentWriter, record_len: int) -> bool:
        """Would sealing our segment leave no room for one with this record, without an eviction?"""
        now = time.monotonic()
        if now >= self._full_until:
            self.settle()
            room = self.room_to_come(writer.size - writer.position)
            if segment_within(room) < fmt.SEGMENT_HEADER_BYTES + record_len:
                self._full_until = now + PAUSE_SECONDS
        return now < self._full_until

    def _is_stuck(self) -> bool:
        return time.monotonic() < self._stuck_until

    def note_room(self) -> None:
        """A file was evicted: its room is there for all."""
        self._full_until = self._stuck_until = 0.0

    def settle(self) -> None:
        """Have the index take no more room than it must. With the store's lock; sqlite3.Error."""
        index = self._attachment.current.index
        if index is not None:
            index.flush()
            index.database.checkpoint()  # SQLite's log stays as long as it once was

    def room_to_come(self, returned: int = 0) -> int:
        """See `capacity.room_to_come`; 0: nothing can be written now. Any thread."""
        place = self._attachment.place()
        if place is None or self._is_stuck() or self._attachment.faults.is_paused():
            return 0
        try:
            return room_to_come(place, self.writer, returned)
        except (*idx.ERRORS, OSError):
            return 0  # whoever puts will say what is wrong

    def has_room_for_rows(self) -> bool:
        """Of blocks that are stored already. sqlite3.Error, OSError."""
        place = self._attachment.sound_place()
        return place is not None and room_to_come(place, self.writer) > 0

    # ---- its end ---------------------------------------------------------------------------------
    def seal(self) -> None:
        """Cut it to what is used, if there is one. sqlite3.Error, OSError: an orphan, perhaps."""
        index = self._attachment.current.index
        if index is not None:
            index.flush()  # a sealed segment without rows is an unused one
        writer, self.writer = self.writer, None
        if writer is None:
            return
        if writer.position == fmt.SEGMENT_HEADER_BYTES:
            with contextlib.suppress(OSError):
                writer.path.unlink()
            writer.seal()
            if index is not None:
                with index.database.transaction():
                    index.segments.delete(writer.segno)
            return
        used = writer.seal()
        if index is None:
            return
        with index.database.transaction():
            for row in index.segments.all():
                if row.segno == writer.segno:
                    index.segments.put([row._replace(sealed=True, reserved=used)])

    def seal_if_in(self, segnos: Collection[int]) -> bool:
        """Whether it was among these."""
        is_in = self.writer is not None and self.writer.segno in segnos
        if is_in:
            self.seal()
        return is_in

    def seal_if_larger(self, segment_bytes: int) -> None:
        """What was reserved for a larger one is given back."""
        if self.writer is not None and self.writer.size > segment_bytes:
            self.seal()

    def abandon(self) -> None:
        """It is an orphan, or its file is gone."""
        if self.writer is not None:
            self.writer.abandon()
            self.writer = None

    def abandon_in(self, directories: Collection[Path]) -> None:
        """If it lies in one of these."""
        if self.writer is not None and self.writer.path.parent.parent in directories:
            self.abandon()

    def keep_limits(self) -> None:
        """Evict what is over them; ours can go the next time, if that helps."""
        place = self._attachment.sound_place()
        if place is not None:
            make_room(place, self._attachment.segment_bytes)
        if place is None or keep_limits(place) or self.writer is None:
            return
        # Only segments that are being written are left, or what others have on one of the disks.
        if self.writer.segno in {row.segno for row in pressing(place, place.index.segments.all())}:
            self.seal()
            self._attachment.faults.pause()
