"""What of a cache directory is dead, and getting rid of it: for `fusecache gc`.

A record is alive when a file's row leads to it. What has been replaced by another version, or moved
by a log that a kill ended, lies in its segment until that is evicted, or compacted here.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Final

from fusecache.base.errors import CacheFault
from fusecache.store.capacity import Place
from fusecache.store.segment import format as fmt
from fusecache.store.segment.files import RecordReader, walk
from fusecache.store.store import Store
from fusecache.store.types import Item, Location

ALIVE_MOST: Final = 0.5  # of a segment, or else rewriting it costs more than it brings
_BATCH_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class SegmentUse:
    """`kind`: static, packed, or open: somebody writes it, `bytes` are what is written, and
    `alive_bytes` counts nothing.
    """

    segno: int
    kind: str
    bytes: int
    alive_bytes: int


def survey(store: Store) -> list[SegmentUse]:
    """All segments of the directory, by number. CacheFault: it cannot be used."""
    store.flush()
    found = []
    with store.sharing() as place:
        if place is not None:
            for row in place.index.segments.all():
                kind = "open" if not row.sealed else _kind(place, row.segno)
                alive = place.index.alive_bytes(row.segno) if row.sealed else 0
                written = store.written_bytes(place.index, row)
                found.append(SegmentUse(row.segno, kind, written, alive))
            return sorted(found, key=lambda use: use.segno)
    raise CacheFault("the cache directory cannot be used now")


def _kind(place: Place, segno: int) -> str:
    header = b""
    with contextlib.suppress(OSError):
        fd = os.open(
            place.directory.segment_path(segno), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        )
        with open(fd, "rb") as file:
            header = file.read(fmt.SEGMENT_HEADER_BYTES)
    return "static" if fmt.parse_log_mark(header) is None else "packed"


def compact(store: Store) -> int:
    """Write what is alive in segments that are mostly dead anew, and delete them; no eviction.

    Returns by how many bytes the segments shrank. Ends early when there is no room. A segment stays
    whose blocks are used by files that only other segments name.
    """
    freed = 0
    for use in survey(store):
        if use.kind != "open" and use.alive_bytes < ALIVE_MOST * use.bytes:
            alive = _move_out(store, use.segno)
            if alive is None:
                continue
            store.flush()
            with store.sharing() as place:
                directory = None if place is None else place.directory
            if not alive or directory is None:
                break
            freed += max(0, store.logs.release(directory, [use.segno]) - use.alive_bytes)
    return freed


def _move_out(store: Store, segno: int) -> bool | None:
    """True: nothing that is alive is left in the segment. False: no room. None: shared blocks."""
    with store.sharing() as place:
        if place is None:
            return False
        uuid, index = place.directory.uuid, place.index
    reader = RecordReader()
    try:
        fd = os.open(store.segment_path(segno), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        rows = index.file_rows_of(segno)
        wanted: list[tuple[fmt.Record, Location]] = []
        for offset, record in walk(fd, segno, uuid):
            at = store.lookup(record.dataset, record.path, record.version, record.block)
            is_here = at is not None and at[:2] == (segno, offset)
            if record.type == fmt.TYPE_BLOCK and rows.pop(offset, 0) != is_here:
                return None
            if at is not None and (is_here or record.type == fmt.TYPE_ENTRY):
                wanted.append((record, at))
        batch: list[Item] = []
        length, dataset = 0, b""
        for record, at in wanted:
            if batch and (length >= _BATCH_BYTES or record.dataset != dataset):
                if None in store.put_many(dataset, batch, evict=False, leave=segno):
                    return False
                batch, length = [], 0
            dataset = record.dataset
            with contextlib.suppress(CacheFault):
                payload = _payload(store, reader, at, fd, segno, uuid)
                batch.append((record.path, record.version, record.block, payload))
                length += len(payload)
        return not batch or None not in store.put_many(dataset, batch, evict=False, leave=segno)
    finally:
        os.close(fd)


def _payload(
    store: Store, reader: RecordReader, at: Location, fd: int, segno: int, uuid: bytes
) -> bytes:
    """CacheFault: there is none any more that is intact."""
    if at.segno == segno:
        return reader.read(fd, at, uuid)[1]
    other = store.open_segment(at.segno)
    if other is None:
        raise CacheFault("the segment is gone")
    try:
        return reader.read(other, at, uuid)[1]
    finally:
        os.close(other)
