"""What writes into a log in the store's tests: the C code's part (docs/LOG.md) in a few lines."""

from __future__ import annotations

import mmap
import os

from fusecache.base import digest
from fusecache.store import Location, Log, Version
from fusecache.store.segment import format as fmt
from tests.support.store_support import DATASET, version_of

_BUFFER_BYTES = 1 << 20


class Mover:
    """Appends records to the segments of a log, a piece at a time, and remembers where they lie.

    `locations` plays the inode table: it is switched when the piece is written.
    """

    def __init__(self, log: Log, locations: dict[bytes, Location], piece_bytes: int = 64 << 10):
        self.log = log
        self.locations = locations
        self.credit_bytes = log.credit_bytes
        self._piece_bytes = piece_bytes
        self._ends = dict.fromkeys(log.segnos, fmt.SEGMENT_HEADER_BYTES)
        self._waiting: dict[int, list[tuple[bytes, bytes, Location]]] = {n: [] for n in log.segnos}
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)

    def append(
        self,
        chunk: int,
        path: bytes,
        payload: bytes,
        version: Version | None = None,
        at_ns: int = 1,
    ) -> bool:
        """False: no credit."""
        segno = self.log.segnos[chunk]
        waiting = self._waiting[segno]
        offset = self._ends[segno] + sum(len(raw) for _, raw, _ in waiting)
        version = version or version_of(payload)
        raw = packed(self.log, segno, offset, path, payload, version, at_ns)
        if len(raw) > self.credit_bytes:
            return False
        self.credit_bytes -= len(raw)
        location = Location(segno, offset, fmt.header_length(len(payload), path), len(payload))
        waiting.append((path, raw, location))
        if sum(len(raw) for _, raw, _ in waiting) >= self._piece_bytes:
            self.flush(segno)
        return True

    def flush(self, segno: int) -> None:
        waiting, self._waiting[segno] = self._waiting[segno], []
        piece = b"".join(raw for _, raw, _ in waiting)
        self._buffer[: len(piece)] = piece
        fd = self.log.fds[self.log.segnos.index(segno)]
        with memoryview(self._buffer) as view:
            assert os.pwrite(fd, view[: len(piece)], self._ends[segno]) == len(piece)
        self._ends[segno] += len(piece)
        for path, _, location in waiting:
            self.locations[path] = location

    def finish(self) -> None:
        for segno, waiting in self._waiting.items():
            if waiting:
                self.flush(segno)
        self.log.finish([(segno, end, 0) for segno, end in self._ends.items()])


def block_record(
    algorithm: int, dataset: bytes, path: bytes, payload: bytes, version: Version, at_ns: int
) -> fmt.Record:
    """Of a whole file of one block."""
    header_len = fmt.header_length(len(payload), path)
    return fmt.Record(
        fmt.TYPE_BLOCK,
        header_len,
        len(payload),
        fmt.align(header_len + len(payload)),
        digest.digest(algorithm, payload),
        at_ns,
        tuple(digest.chunk_sums(payload)),
        dataset,
        version,
        0,
        path,
    )


def packed(
    log: Log, segno: int, offset: int, path: bytes, payload: bytes, version: Version, at_ns: int
) -> bytes:
    """A whole record, as it lies in the segment."""
    record = block_record(log.algorithm, DATASET, path, payload, version, at_ns)
    header = fmt.pack_record(record, log.algorithm, log.uuid, segno, offset)
    return (header + payload).ljust(record.record_len, b"\0")
