"""Making index and files agree: adopt what dead writers left, forget what is missing.

Runs at open, now and then, and when something was found out of place. Other processes may do the
same at the same time: every decision is taken again in the transaction that carries it out.
Files that look like segments and hold no record of this cache are removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Final

from fusecache.store import format as fmt
from fusecache.store import index as idx
from fusecache.store import recovery
from fusecache.store.capacity import Place
from fusecache.store.segment import SegmentWriter, cut, discard, is_segment

# Gone in between; or a directory or a link that somebody put there.
_NOT_A_SEGMENT: Final = (errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.ENXIO)


def reconcile(place: Place, own: SegmentWriter | None) -> None:
    """sqlite3.Error, OSError: not finished; nothing is worse than before."""
    directory, index = place.directory, place.index
    own_segno = -1 if own is None else own.segno
    rows = {row.segno: row for row in index.segments()}
    for segno in directory.segment_numbers():
        row = rows.get(segno)
        if segno != own_segno and (row is None or not row.sealed):
            _adopt(place, segno)
    for row in rows.values():
        if row.segno != own_segno:
            _check(place, row)
    with index.transaction():
        # In this transaction nobody else is half-way through creating a segment.
        dangling = index.referenced_segments() - {row.segno for row in index.segments()}
        directory.remove_unborn_segments()
    for segno in dangling:
        index.sweep(segno)


def insert(index: idx.Index, found: recovery.Scan) -> None:
    """Rows for all records of a segment; entries only where their block is known."""
    index.insert(found.files, found.blocks)
    rows = []
    places = index.lookup_blocks([record.digest for record in found.entries])
    for record in found.entries:
        location = places.get(record.digest)
        if location is not None:
            rows.append(
                idx.file_row(record.dataset, record.path, record.version, record.block, location)
            )
    index.insert(rows, [])


def reindex_own(place: Place, writer: SegmentWriter) -> None:
    """Rows of the segment we write: whoever built this index read it before its end."""
    with recovery.claimed(writer.path) as (fd, _):
        found = recovery.scan(fd, writer.segno, place.directory.uuid, live=True)
    with place.index.transaction():
        row = idx.SegmentRow(writer.segno, False, writer.size, found.fetched_ns)
        place.index.put_segments([row])
    insert(place.index, found)


def _check(place: Place, row: idx.SegmentRow) -> None:
    index, path = place.index, place.directory.segment_path(row.segno)
    size = _segment_size(place, row.segno)
    if size is None:
        return
    if size <= fmt.SEGMENT_HEADER_BYTES:
        _forget(place, row.segno)
    elif row.sealed and size < row.reserved:
        place.fault("missing", f"segment {row.segno} of {place.directory.path} was cut")
        index.sweep(row.segno, size)
        with index.transaction():
            if row in index.segments():
                index.put_segments([row._replace(reserved=fmt.align(size))])
    elif row.sealed and size > row.reserved:
        with contextlib.suppress(OSError):
            cut(path, row.reserved)


def _segment_size(place: Place, segno: int) -> int | None:
    """0: no file, or another one under this name. None: cannot be said now (I/O error)."""
    path = place.directory.segment_path(segno)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            is_ours = is_segment(fd, segno, place.directory.uuid)
            return os.fstat(fd).st_size if is_ours else 0
        finally:
            os.close(fd)
    except OSError as error:
        return 0 if error.errno in _NOT_A_SEGMENT else None


def _forget(place: Place, segno: int) -> None:
    """A segment without a file, or with a useless one: nobody evicted it, it was lost."""
    directory, index = place.directory, place.index
    with index.transaction():
        if segno not in {row.segno for row in index.segments()}:
            return  # evicted in between, as it should be
        size = _segment_size(place, segno)
        if size is None or size > fmt.SEGMENT_HEADER_BYTES:
            return
        place.gone(segno)
        discard(directory.segment_path(segno))
        index.delete_segment(segno)
    index.sweep(segno)
    place.fault("missing", f"segment {segno} of {directory.path} is missing or another file")


def _adopt(place: Place, segno: int) -> None:
    """Take over a segment whose writer died, or that the index does not know."""
    directory, index = place.directory, place.index
    try:
        with recovery.claimed(directory.segment_path(segno)) as (fd, live):
            if live:
                return
            found = recovery.scan(fd, segno, directory.uuid, live=False)
            if not found.empty:
                insert(index, found)
            with index.transaction():
                row = {row.segno: row for row in index.segments()}.get(segno)
                if os.fstat(fd).st_nlink == 0 or (row is not None and row.sealed):
                    return  # another process was faster
                if found.empty:
                    place.gone(segno)
                    discard(directory.segment_path(segno))
                    index.delete_segment(segno)
                else:
                    os.ftruncate(fd, found.used)
                    fetched_ns = max(found.fetched_ns, row.fetched_ns if row else 0)
                    index.put_segments([idx.SegmentRow(segno, True, found.used, fetched_ns)])
    except OSError as error:
        if error.errno not in _NOT_A_SEGMENT:
            raise
