"""The hard limit: making room, and evicting. Decided and done in IMMEDIATE transactions, because
several processes share one directory.

INVARIANT: reserved segment bytes + index + allowance <= limit_bytes whenever a segment is created.
INVARIANT: the index grows by no more than the allowance while what is open is written: a segment
takes no more rows than there is room for (`rows_bytes`), SQLite's log is short (`wal_bytes`).
INVARIANT: only sealed segments are evicted, so no writer loses its file.

A log reserves what it may still write, and the index rows to come of that, in the row of its first
segment (store/log.py). It is not preallocated: what it has not written yet is missing on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fusecache.store import index as idx
from fusecache.store.directory import Directory, Member
from fusecache.store.directory.tables import Unfinished
from fusecache.store.index import evicting
from fusecache.store.index.evicting import BlockAt
from fusecache.store.reuse import Reuse
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import SegmentWriter, discard
from fusecache.store.segment.holes import punch
from fusecache.store.types import ALIGNMENT, StoreSettings

# Of the index, by one record: what a log reserves for rows to come.
ROW_BYTES: Final = 512
# What rows may come to, of a segment's bytes.
ROWS_PART: Final = 8
# Each tree of the index may begin a page, whatever the rows.
_PAGES_BYTES: Final = 32 << 10
# Of the limit: where something may go, no smaller segment is made of what is left, or there would
# be ever more of them.
_LEAST_PART: Final = 16
# Segments with holes: each costs a file, whatever is left in it.
HOLED_MOST: Final = 512
# Saved tables, of the limit, at most.
_TABLES_PART: Final = 16
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Place:
    """An opened directory with its index. `gone` is told of each segment before its file goes."""

    directory: Directory
    index: idx.Index
    settings: StoreSettings
    gone: Callable[[int], None]
    fault: Callable[[str, str], None]
    reuse: Reuse | None = None
    pinned: Callable[[], Collection[int] | None] = frozenset
    """In which segments our user's pinned files lie; None: that is not known yet."""

    def unpinned(self, rows: Iterable[idx.SegmentRow]) -> list[idx.SegmentRow]:
        """Those of these segments in which no user has pinned a file, as far as is known."""
        ours = self.pinned()
        if ours is None:
            return []
        stay = self.directory.pins.segments().union(ours)
        return [row for row in rows if row.segno not in stay]

    def count_error(self, member: Member, error: OSError) -> None:
        """The disk of that directory failed; it may be put out of service."""
        line = self.directory.count_error(member, error)
        if line:
            self.fault("directory", line)


def pressure(place: Place, rows: Iterable[idx.SegmentRow], more: int = 0) -> tuple[int, int]:
    """Bytes over the limit, and bytes missing to keep-free, were a segment of `more` made: on the
    disk that has most room; without `more`, on the one that has least, and what logs were promised
    does not count: it is given back when the limit has become smaller.
    """
    rows, limit = list(rows), place.settings.limit_bytes
    used = sum(row.reserved for row in rows) + more + _kept_bytes(place)
    if not more:
        rooms = [room for _, room in _rooms(place, [])]
        return used - _promised_bytes(place, rows) - limit, -min(rooms)
    used += _allowance(_opened_bytes(rows) + more, limit)
    return used - limit, more - max(room for _, room in _rooms(place, rows))


def _kept_bytes(place: Place) -> int:
    """What the cache takes apart from its segments."""
    directory = place.directory
    return (
        place.index.database.size_bytes()
        + directory.tables.size_bytes()
        + directory.pins.size_bytes()
    )


def _fitting_bytes(place: Place, rows: Iterable[idx.SegmentRow], most: int) -> tuple[int, int]:
    """How large a segment, up to `most`, the limit allows without an eviction, and the disk that
    has most room: there less than `most` leaves room for the index.
    """
    rows, limit = list(rows), place.settings.limit_bytes
    used = sum(row.reserved for row in rows) + _kept_bytes(place)
    room = limit - used - _allowance(_opened_bytes(rows), limit)
    on_disk = max(room for _, room in _rooms(place, rows))
    if on_disk < most:
        on_disk = segment_within(on_disk - _allowance(0, limit))
    return min(most, segment_within(room)), min(most, on_disk)


def segment_within(room_bytes: int) -> int:
    """The largest segment that fits there with its rows."""
    return max(0, room_bytes * ROWS_PART // (ROWS_PART + 1))


def log_room_bytes(
    place: Place, rows: Iterable[idx.SegmentRow], members: Sequence[Member] = ()
) -> int:
    """How much more a log may reserve, without an eviction, in equal parts in each of these (all:
    `log_members`).
    """
    rows, limit = list(rows), place.settings.limit_bytes
    used = sum(row.reserved for row in rows) + _kept_bytes(place)
    used += _allowance(_opened_bytes(rows), limit)
    members = members or log_members(place, rows)
    found = [share for member, share in _shares(place, rows) if member in members]
    return max(0, min(limit - used, len(found) * min(found, default=0)))


def log_members(place: Place, rows: Iterable[idx.SegmentRow]) -> list[Member]:
    """Those in which a log of equal parts has most room; not empty."""
    shares = _shares(place, rows)
    rooms = sorted((share for _, share in shares), reverse=True)
    least = max(enumerate(rooms, 1), key=lambda item: item[0] * item[1])[1]
    return [member for member, share in shares if share >= least]


def _opened_bytes(rows: Iterable[idx.SegmentRow]) -> int:
    return sum(row.reserved for row in rows if not row.sealed and row.log is None)


def _rooms(place: Place, rows: Iterable[idx.SegmentRow]) -> list[tuple[Member, int]]:
    """What is free on the disk of each directory in service, beyond what is to be kept free and
    what logs, in equal parts, were promised. One that cannot say has nothing. OSError: the only one
    cannot.
    """
    members = place.directory.in_service()
    promised = _promised_bytes(place, rows)
    found = []
    for member in members:
        try:
            disk = os.statvfs(member.path)
        except OSError as error:
            if len(members) == 1:
                raise
            place.count_error(member, error)
            continue
        share = promised * _neighbours(members, member) // len(members)
        room = disk.f_bavail * disk.f_frsize - share - place.settings.keep_free_bytes
        found.append((member, room))
    if not found:
        raise OSError(errno.EIO, "no cache directory answers")
    return found


def _shares(place: Place, rows: Iterable[idx.SegmentRow]) -> list[tuple[Member, int]]:
    """The same, where directories on one disk divide its room."""
    rooms = _rooms(place, rows)
    members = [member for member, _ in rooms]
    return [(member, room // _neighbours(members, member)) for member, room in rooms]


def _neighbours(members: Sequence[Member], member: Member) -> int:
    """How many of them are on its disk."""
    return sum(other.device == member.device for other in members)


def _promised_bytes(place: Place, rows: Iterable[idx.SegmentRow]) -> int:
    """What logs have reserved and not written yet."""
    promised: dict[int, int] = {}
    for row in rows:
        if row.log is not None:
            size = 0
            with contextlib.suppress(OSError):
                size = place.directory.segment_path(row.segno).stat().st_size
            promised[row.log] = promised.get(row.log, 0) + row.reserved - size
    return sum(max(0, missing) for missing in promised.values())


def rows_bytes(segment_bytes: int) -> int:
    """By how much the index may grow by the rows of a segment of that size."""
    return segment_bytes // ROWS_PART


def wal_bytes(limit_bytes: int) -> int:
    """How long SQLite's log may become."""
    return max(512 << 10, min(limit_bytes // 256, 8 << 20))


def make_room(place: Place, segment_bytes: int) -> None:
    """Where there is none for a whole segment: what SQLite's log takes. With the write lock."""
    if _fitting_bytes(place, place.index.segments.all(), segment_bytes)[0] < segment_bytes:
        place.index.database.checkpoint()


def _allowance(opened_bytes: int, limit_bytes: int) -> int:
    """By how much the index will grow by the rows of segments that are being written."""
    return rows_bytes(opened_bytes) + wal_bytes(limit_bytes) + _PAGES_BYTES


def room_to_come(place: Place, own: SegmentWriter | None, returned: int = 0) -> int:
    """What is free, without an eviction, for segments after `own`, with their headers and rows.

    `returned`: bytes that would be given back before. sqlite3.Error, OSError.
    """
    limit = place.settings.limit_bytes
    reserved, opened = place.index.segments.reserved_bytes()
    others = max(0, opened - own.size) if own is not None else opened
    used = reserved + _kept_bytes(place) + place.index.pending.growth_bytes()
    used += _allowance(others, limit)
    shares = _shares(place, place.index.segments.read_logs())
    free = shares[0][1] if len(shares) == 1 else sum(max(0, share) for _, share in shares)
    return max(0, min(limit - used, free) + returned)


class MeanRecord(NamedTuple):
    """`rows_bytes`: of the index."""

    payload_bytes: int
    record_bytes: int
    rows_bytes: int


def records_within(room_bytes: int, segment_bytes: int, mean: MeanRecord, largest: int) -> int:
    """How many of these fit into segments that are made there, whole ones and then smaller ones,
    the `largest` of them into the last.
    """
    count = 0
    room_bytes -= _PAGES_BYTES  # rows come by pages
    largest = max(largest, mean.record_bytes)
    while True:
        size = min(segment_within(room_bytes), segment_bytes)
        if size < fmt.SEGMENT_HEADER_BYTES + largest:
            return count
        fitting = (size - fmt.SEGMENT_HEADER_BYTES) // mean.record_bytes
        if mean.rows_bytes:
            fitting = max(1, min(fitting, rows_bytes(size) // mean.rows_bytes))
        # Twice: of trees that are filled evenly, many pages are split at about the same time.
        taken = fmt.SEGMENT_HEADER_BYTES + fitting * (mean.record_bytes + 2 * mean.rows_bytes)
        times = max(1, (room_bytes - size - rows_bytes(size)) // taken)  # as large as this one
        count += times * fitting
        room_bytes -= times * taken


def full_disk_bytes(place: Place, segment_bytes: int) -> int | None:
    """What is free on the disk that has most room, if the limit allows another segment and no disk
    has room for it, others having taken it (not a log, to which it was promised); else None.
    sqlite3.Error, OSError.
    """
    excess, _ = pressure(place, place.index.segments.read(), segment_bytes)
    room = max(room for _, room in _rooms(place, []))
    if excess > 0 or room >= segment_bytes:
        return None
    return room + place.settings.keep_free_bytes


def oldest(rows: Iterable[idx.SegmentRow], unused: Collection[int] = ()) -> idx.SegmentRow | None:
    """By `lrf`, for limits, saved tables, `warm`, plans, and where there is no `reuse`; for a block
    that was missed `may_go` asks it. Of the sealed segments, one in which nothing is in use, or
    else the one whose `fetched_ns` is least: fetched longest ago, or, where `reuse` notes what is
    read (housekeeping.py), used longest ago.
    """
    sealed = [row for row in rows if row.sealed]
    return min(
        sealed, key=lambda row: (row.segno not in unused, row.fetched_ns, row.segno), default=None
    )


def may_go(
    place: Place, rows: Iterable[idx.SegmentRow], whatever_is_used: bool
) -> idx.SegmentRow | None:
    """What goes for a block that was missed, or, `whatever_is_used`, for one that is to be stored
    without asking `reuse`; of these segments: those that are pinned are not among them.
    """
    unused = place.index.segments.unused()
    if place.reuse is None or whatever_is_used or unused:
        return oldest(rows, unused)
    sealed = [row for row in rows if row.sealed]
    return place.reuse.may_go(sealed, place.settings.limit_bytes)


def evict(place: Place, segno: int) -> None:
    """Give the space of a segment back at once. In a transaction; `Index.delete_rows` after it."""
    place.gone(segno)
    directory = place.directory
    try:
        discard(directory.segment_path(segno))
    except OSError as error:
        if len(directory.members) == 1:
            raise
        place.count_error(directory.member_of(segno), error)
    place.index.segments.delete(segno)


def evict_blocks(place: Place, blocks: Sequence[BlockAt]) -> int:
    """Blocks of files, sorted by segment and few enough for a transaction, are to be on SSD no
    more; by how many bytes their segments shrank. Those stay whose segment is not sealed, or gone.
    sqlite3.Error, OSError: all stay, though some may be punched.
    """
    index, freed = place.index, 0
    with index.database.transaction() as connection:
        rows = {row.segno: row for row in index.segments.all()}
        for segno, group in itertools.groupby(blocks, lambda block: block.at.segno):
            row = rows.get(segno)
            if row is None or not row.sealed:
                continue
            dead = evicting.delete(connection, list(group))
            ranges = {evicting.dead_range(connection, at) for at in dead}
            taken = punch(place.directory.segment_path(segno), ranges)
            index.segments.put([row.taking(min(taken, row.length))])
            freed += row.reserved - taken
    return freed


def evict_least(place: Place) -> None:
    """Whole segments, while more have holes than may."""
    victims = list[int]()
    with place.index.database.transaction():
        rows = [row for row in place.index.segments.all() if row.sealed and row.holes]
        rows = place.unpinned(rows) if len(rows) > HOLED_MOST else []
        for row in sorted(rows, key=lambda row: row.reserved)[: max(0, len(rows) - HOLED_MOST)]:
            evict(place, row.segno)
            victims.append(row.segno)
    for segno in victims:
        place.index.delete_rows(segno)


def create(
    place: Place,
    segment_bytes: int,
    record_len: int,
    highest_segno: int,
    may_evict: bool,
    whatever_is_used: bool,
    pinned_by_plan: Callable[[], Container[int]] | None,
) -> tuple[SegmentWriter | None, OSError | None]:
    """A new segment for a record of that length, after evicting what must go for it, but for those
    that are `pinned_by_plan`, or by a user. Where there is less room than for one of
    `segment_bytes`, it gets what is left.

    (None, None): full under `keep`, full of what is in use or is being written, or another would
    have to go and must not. (None, error): the disk is full or failed.
    """
    index, limit = place.index, place.settings.limit_bytes
    least = fmt.SEGMENT_HEADER_BYTES + record_len
    wanted = max(least, min(segment_bytes, limit // _LEAST_PART))
    victims: list[int] = []
    free: dict[int, idx.SegmentRow] | None = None  # asked for once, if something has to go
    writer: SegmentWriter | None = None
    failed: OSError | None = None
    number = _Number(place.directory)
    make_room(place, segment_bytes)
    try:
        with index.database.transaction():
            rows = {row.segno: row for row in index.segments.all()}
            while True:
                by_limit, by_disk = _fitting_bytes(place, rows.values(), segment_bytes)
                size = min(by_limit, by_disk) // ALIGNMENT * ALIGNMENT
                failed = None
                if by_disk < least:
                    failed = OSError(errno.ENOSPC, "less than --keep-free of the disk is left")
                if size >= wanted:
                    writer, failed = _written(place, number, highest_segno, rows, size)
                    if failed is None or failed.errno not in _NO_SPACE:
                        break
                if may_evict and free is None:
                    stays: Container[int] = pinned_by_plan() if pinned_by_plan else ()
                    unpinned = place.unpinned(rows.values())
                    free = {row.segno: row for row in unpinned if row.segno not in stays}
                evictable = (rows if free is None else free).values()
                victim = may_go(place, evictable, whatever_is_used)
                is_pinned = free is not None and (
                    pinned_by_plan is not None or len(free) < len(rows)
                )
                is_all_in_use = is_pinned or (place.reuse is not None and not whatever_is_used)
                if victim is not None and free is not None and place.settings.policy != "keep":
                    evict(place, victim.segno)
                    del rows[victim.segno], free[victim.segno]
                    victims.append(victim.segno)
                    continue
                if least <= size < wanted:
                    writer, failed = _written(place, number, highest_segno, rows, size)
                is_full = place.settings.policy != "keep" and (victim is not None or is_all_in_use)
                if is_full and failed is not None and failed.errno in _NO_SPACE:
                    failed = None
                break
            if writer is not None:
                row = idx.SegmentRow(writer.segno, False, writer.size, time.time_ns())
                index.segments.put([row])
    except BaseException:
        if writer is not None:
            discard(writer.path)
            writer.abandon()
        raise
    for segno in victims:
        index.delete_rows(segno)
    return writer, failed


class _Number:
    """Of a segment to come: one, however often it is tried to make the segment."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._segno: int | None = None

    def take(self, known: int) -> int:
        """`known`: the highest that the caller knows of. OSError."""
        if self._segno is None:
            self._segno = self._directory.next_segno(known)
        return self._segno


def _written(
    place: Place,
    number: _Number,
    highest_segno: int,
    rows: Mapping[int, idx.SegmentRow],
    segment_bytes: int,
) -> tuple[SegmentWriter | None, OSError | None]:
    """The segment in a directory with room for it, the next if one is full after all or fails; or
    the error.
    """
    directory = place.directory
    others = [m for m, room in _rooms(place, rows.values()) if room >= segment_bytes]
    failed: OSError | None = OSError(errno.ENOSPC, "no cache directory has room")
    try:
        segno = number.take(max(highest_segno, *rows, 0))
        while others:
            path = directory.place_segment(segno, others)
            member = directory.member_of(segno)
            uuid, algorithm = directory.uuid, directory.algorithm
            try:
                rows_most = rows_bytes(segment_bytes)
                writer = SegmentWriter(path, segno, segment_bytes, uuid, algorithm, rows_most)
            except OSError as error:
                failed = error
                place.count_error(member, error)
                others.remove(member)
            else:
                return writer, None
    except OSError as error:
        failed = error
    return None, failed


def keep_limits(place: Place) -> bool:
    """Evict (under `keep` too) while over the limit or short of keep-free. False: in vain."""
    index = place.index
    if max(pressure(place, index.segments.read())) <= 0:
        return True
    index.flush()
    return _evict_for(place, 0, may_evict=True, spares_pinned=False)


def _evict_for(
    place: Place, more_bytes: int, *, may_evict: bool, spares_pinned: bool = True
) -> bool:
    """Evict, if that may be, until limit and keep-free hold with so much more. False: in vain. What
    is pinned by a user goes last, or not at all.
    """
    index, victims = place.index, list[int]()
    with index.database.transaction():
        rows = {row.segno: row for row in index.segments.all()}
        while not (is_within := max(pressure(place, rows.values(), more_bytes)) <= 0):
            helping = pressing(place, rows.values(), more_bytes)
            unused = index.segments.unused()
            victim = oldest(place.unpinned(helping), unused)
            if victim is None and not spares_pinned:
                victim = oldest(helping, unused)
            if victim is None or not may_evict:
                break
            evict(place, victim.segno)
            del rows[victim.segno]
            victims.append(victim.segno)
    for segno in victims:
        index.delete_rows(segno)
    return is_within


def begin_table(place: Place, dataset: bytes, size_bytes: int) -> Unfinished | None:
    """A saved table of so many bytes, after evicting what must go for it (not under `keep`). All
    together take a 16th of the limit at most. None: there is no room, or it is being written.
    sqlite3.Error, OSError.
    """
    tables = place.directory.tables
    most_bytes = place.settings.limit_bytes // _TABLES_PART
    if size_bytes > most_bytes:
        tables.let_go(most_bytes)
        return None
    tables.let_go(most_bytes - size_bytes, dataset)
    fits = _evict_for(place, size_bytes, may_evict=place.settings.policy != "keep")
    return tables.begin(dataset, size_bytes) if fits else None


def pressing(place: Place, rows: Iterable[idx.SegmentRow], more: int = 0) -> list[idx.SegmentRow]:
    """Segments whose eviction helps: any if they are too many, else those on a disk too full."""
    rows = list(rows)
    excess, _ = pressure(place, rows, more)
    if excess > 0 or len(place.directory.members) == 1:
        return rows
    full = [member for member, room in _rooms(place, []) if room < 0]
    return [row for row in rows if place.directory.member_of(row.segno) in full]
