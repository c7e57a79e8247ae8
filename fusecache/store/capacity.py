"""The hard limit: making room, and evicting. Decided and done in IMMEDIATE transactions, because
several processes share one directory.

INVARIANT: reserved segment bytes + index + allowance <= limit_bytes whenever a segment is created.
INVARIANT: only sealed segments are evicted, so nobody loses the file that he writes.

A log reserves what it may still write, and the index rows to come of that, in the row of its first
segment (store/log.py). It is not preallocated: what it has not written yet is missing on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from fusecache.store import index as idx
from fusecache.store.directory import Directory, Member
from fusecache.store.reuse import Reuse
from fusecache.store.segment import SegmentWriter, discard
from fusecache.store.types import StoreSettings

# Of the index, by one record: what a log reserves for rows to come.
ROW_BYTES: Final = 512
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
    used = sum(row.reserved for row in rows) + more + place.index.size_bytes()
    if not more:
        rooms = [room for _, room in _rooms(place, [])]
        return used - _promised_bytes(place, rows) - limit, -min(rooms)
    used += _allowance(_opened_bytes(rows) + more, limit)
    return used - limit, more - max(room for _, room in _rooms(place, rows))


def log_room_bytes(
    place: Place, rows: Iterable[idx.SegmentRow], members: Sequence[Member] = ()
) -> int:
    """How much more a log may reserve, without an eviction, in equal parts in each of these (all:
    `log_members`).
    """
    rows, limit = list(rows), place.settings.limit_bytes
    used = sum(row.reserved for row in rows) + place.index.size_bytes()
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


def _allowance(opened_bytes: int, limit_bytes: int) -> int:
    """By how much the index will grow by the rows of segments that are being written."""
    return opened_bytes // 8 + max(512 << 10, min(limit_bytes // 64, 8 << 20))


def segments_to_come(
    place: Place, own: SegmentWriter | None, segment_bytes: int, returned: int = 0
) -> int:
    """How many segments could be created and filled after `own`, without an eviction.

    `returned`: bytes that `own` would give back if it were sealed before. sqlite3.Error, OSError.
    """
    limit = place.settings.limit_bytes
    reserved, opened = place.index.reserved_bytes()
    others = max(0, opened - own.size) if own is not None else opened
    used = reserved + place.index.size_bytes() + _allowance(others, limit)
    shares = _shares(place, place.index.read_log_segments())
    free = shares[0][1] if len(shares) == 1 else sum(max(0, share) for _, share in shares)
    return max(0, min(limit - used, free) + returned) // (segment_bytes + segment_bytes // 8)


def full_disk_bytes(place: Place, segment_bytes: int) -> int | None:
    """What is free on the disk that has most room, if the limit allows another segment and no disk
    has room for it, others having taken it (not a log, to which it was promised); else None.
    sqlite3.Error, OSError.
    """
    excess, _ = pressure(place, place.index.read_segments(), segment_bytes)
    room = max(room for _, room in _rooms(place, []))
    if excess > 0 or room >= segment_bytes:
        return None
    return room + place.settings.keep_free_bytes


def oldest(rows: Iterable[idx.SegmentRow], unused: Collection[int] = ()) -> idx.SegmentRow | None:
    """The eviction policy: of the sealed segments, one in which nothing is in use, or else the one
    fetched longest ago.
    """
    sealed = [row for row in rows if row.sealed]
    return min(
        sealed, key=lambda row: (row.segno not in unused, row.fetched_ns, row.segno), default=None
    )


def may_go(place: Place, rows: Iterable[idx.SegmentRow], asked: bool) -> idx.SegmentRow | None:
    """What goes for a block that was missed, or that somebody `asked` to have stored."""
    unused = place.index.unused_segments()
    if place.reuse is None or asked or unused:
        return oldest(rows, unused)
    sealed = [row for row in rows if row.sealed]
    return place.reuse.may_go(sealed, place.settings.limit_bytes)


def evict(place: Place, segno: int) -> None:
    """Give the space of a segment back at once. Within a transaction; `Index.sweep` after it."""
    place.gone(segno)
    directory = place.directory
    try:
        discard(directory.segment_path(segno))
    except OSError as error:
        if len(directory.members) == 1:
            raise
        place.count_error(directory.member_of(segno), error)
    place.index.delete_segment(segno)


def create(
    place: Place,
    segment_bytes: int,
    highest_segno: int,
    may_evict: bool,
    asked: bool,
    kept: Callable[[], Container[int]] | None,
) -> tuple[SegmentWriter | None, OSError | None]:
    """A new segment, after evicting what must go for it, but for those that are `kept`.

    (None, None): full under `keep`, full of what is in use or is being written, or another would
    have to go and must not. (None, error): the disk is full or failed.
    """
    directory, index = place.directory, place.index
    victims: list[int] = []
    stays: Container[int] | None = None  # asked for once, and only if something has to go
    writer: SegmentWriter | None = None
    failed: OSError | None = None
    try:
        with index.transaction():
            rows = {row.segno: row for row in index.segments()}
            while True:
                excess, short = pressure(place, rows.values(), segment_bytes)
                failed = None
                if excess <= 0 and short <= 0:
                    roomy = [m for m, room in _rooms(place, rows.values()) if room >= segment_bytes]
                    try:
                        segno = directory.next_segno(max(highest_segno, *rows, 0))
                        writer, failed = _written(place, segno, segment_bytes, roomy)
                    except OSError as error:
                        failed = error
                    if failed is None or failed.errno not in _NO_SPACE:
                        break
                elif short > 0:
                    failed = OSError(errno.ENOSPC, "less than --keep-free of the disk is left")
                if may_evict and kept is not None and stays is None:
                    stays = kept()
                free = [row for row in rows.values() if stays is None or row.segno not in stays]
                victim = may_go(place, free, asked)
                is_all_in_use = stays is not None or (place.reuse is not None and not asked)
                if place.settings.policy == "keep" or (victim is None and not is_all_in_use):
                    break
                if victim is None or not may_evict:
                    failed = None
                    break
                evict(place, victim.segno)
                del rows[victim.segno]
                victims.append(victim.segno)
            if writer is not None:
                row = idx.SegmentRow(writer.segno, False, writer.size, time.time_ns())
                index.put_segments([row])
    except BaseException:
        if writer is not None:
            discard(writer.path)
            writer.abandon()
        raise
    for segno in victims:
        index.sweep(segno)
    return writer, failed


def _written(
    place: Place, segno: int, segment_bytes: int, members: Sequence[Member]
) -> tuple[SegmentWriter | None, OSError | None]:
    """The segment in one of these, the next if one is full after all or fails; or the error."""
    directory, others = place.directory, list(members)
    failed: OSError | None = OSError(errno.ENOSPC, "no cache directory has room")
    while others:
        path = directory.place_segment(segno, others)
        member = directory.member_of(segno)
        try:
            writer = SegmentWriter(path, segno, segment_bytes, directory.uuid, directory.algorithm)
        except OSError as error:
            failed = error
            place.count_error(member, error)
            others.remove(member)
        else:
            return writer, None
    return None, failed


def keep_limits(place: Place) -> bool:
    """Evict (under `keep` too) while over the limit or short of keep-free. False: in vain."""
    index = place.index
    if max(pressure(place, index.read_segments())) <= 0:
        return True
    index.flush()
    victims: list[int] = []
    with index.transaction():
        rows = {row.segno: row for row in index.segments()}
        while not (is_within := max(pressure(place, rows.values())) <= 0):
            victim = oldest(pressing(place, rows.values()), index.unused_segments())
            if victim is None:
                break
            evict(place, victim.segno)
            del rows[victim.segno]
            victims.append(victim.segno)
    for segno in victims:
        index.sweep(segno)
    return is_within


def pressing(place: Place, rows: Iterable[idx.SegmentRow]) -> list[idx.SegmentRow]:
    """Segments whose eviction helps: any if they are too many, else those on a disk too full."""
    rows = list(rows)
    excess, _ = pressure(place, rows)
    if excess > 0 or len(place.directory.members) == 1:
        return rows
    full = [member for member, room in _rooms(place, []) if room < 0]
    return [row for row in rows if place.directory.member_of(row.segno) in full]
