"""Rows of segments: which there are, and what is reserved for each."""

from __future__ import annotations

from typing import Final

from fusecache.store.index.database import Database
from fusecache.store.index.rows import (
    INSERT_SEGMENT,
    LOG_BELOW,
    SegmentRow,
    parse_segment,
    segment_values,
)
from fusecache.store.types import ALIGNMENT

_SELECT: Final = "SELECT segno, sealed, reserved, fetched_ns, sum FROM segments"


class Segments:
    """`gone`: segments that were deleted here, and other rows may still lead to."""

    def __init__(self, database: Database) -> None:
        self.gone: set[int] = set()
        self._database = database

    # ---- any thread ------------------------------------------------------------------------------
    def read(self) -> list[SegmentRow]:
        """All of them. IndexDamaged: one row is broken."""
        with self._database.reader() as connection:
            return [parse_segment(row) for row in connection.execute(_SELECT)]

    def read_logs(self) -> list[SegmentRow]:
        """Those that are written for logs."""
        with self._database.reader() as connection:
            rows = connection.execute(
                f"{_SELECT} WHERE NOT sealed AND fetched_ns > 0 AND fetched_ns < ?", (LOG_BELOW,)
            )
            return [parse_segment(row) for row in rows]

    def is_gone_now(self, segno: int) -> bool:
        """No such segment in the index any more, whoever evicted it."""
        return segno not in {row.segno for row in self.read()}

    def reserved_bytes(self) -> tuple[int, int]:
        """(of all segments, of those that are being written, logs left out). An estimate: the
        rows' checksums are not looked at.
        """
        with self._database.reader() as connection:
            total, opened = connection.execute(
                f"SELECT sum(reserved - max(sealed - 1, 0) * {ALIGNMENT}), sum(CASE WHEN sealed"
                " OR (fetched_ns > 0 AND fetched_ns < ?) THEN 0 ELSE reserved END) FROM segments",
                (LOG_BELOW,),
            ).fetchone()
        return int(total or 0), int(opened or 0)

    # ---- with the write lock ---------------------------------------------------------------------
    def all(self) -> list[SegmentRow]:
        """As `read`, on the writing connection: within a transaction, what that has changed."""
        return [parse_segment(row) for row in self._database.writer.execute(_SELECT)]

    def unused(self) -> list[int]:
        """Sealed segments to which no committed row of a file leads."""
        return [
            segno
            for (segno,) in self._database.writer.execute(
                "SELECT segno FROM segments WHERE sealed"
                " AND NOT EXISTS (SELECT 1 FROM files WHERE files.segno = segments.segno)"
            )
        ]

    def put(self, rows: list[SegmentRow]) -> None:
        self._database.writer.executemany(INSERT_SEGMENT, [segment_values(row) for row in rows])

    def delete(self, segno: int) -> None:
        """Its row only, in the caller's transaction; `Index.delete_rows` takes the other rows."""
        self.gone.add(segno)
        self._database.writer.execute("DELETE FROM segments WHERE segno=?", (segno,))

    def rows_deleted(self, segno: int) -> None:
        """No row leads to it any more."""
        self.gone.discard(segno)
