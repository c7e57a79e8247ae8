"""Writes a file of traces."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence

import numpy as np

from fusecache.traces import blocks
from fusecache.traces.blocks import pack
from fusecache.traces.trace import Floats, Integers, Path_


class Writer:
    """Writes a trace piece by piece; a context manager that closes it.

    Every method may raise OSError; the file ends with the last whole block then.
    """

    def __init__(
        self,
        path: Path_,
        *,
        source: str,
        times: bool = False,
        readers: bool = False,
        seen: bool = False,
        names: bool = False,
        force: bool = False,
    ) -> None:
        """Which columns there are is said once. `force`: replace what `path` names.

        OSError: the file cannot be made (FileExistsError without `force`).
        """
        self._has_times, self._has_readers = times, readers
        self._has_seen, self._has_names = seen, names
        columns = (
            blocks.HAS_TIMES * times
            + blocks.HAS_READERS * readers
            + blocks.HAS_SEEN * seen
            + blocks.HAS_NAMES * names
        )
        self._pending: list[list[Integers]] = []
        self._pending_count = 0
        self._blocks = self._items = self._accesses = self._epoch_at = self.size_bytes = 0
        self._file = open(path, "wb" if force else "xb", buffering=0)  # noqa: SIM115
        try:
            self._append(blocks.header(columns, source))
        except OSError:
            self._file.close()
            raise

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    @property
    def accesses(self) -> int:
        return self._accesses

    @property
    def written(self) -> int:
        """Accesses in whole blocks of the file."""
        return self._accesses - self._pending_count

    @property
    def items(self) -> int:
        return self._items

    def add_items(self, sizes: Integers, names: Sequence[str] | None = None) -> int:
        """More items; returns the number of the first one, the others follow it."""
        if not self._has_names:
            return self._add_items(sizes, None, b"")
        if names is None or len(names) != len(sizes):
            raise ValueError("names: one for each size")
        raw = [os.fsencode(name) for name in names]
        lengths = np.array([len(name) for name in raw], np.int64)
        return self._add_items(sizes, lengths, b"".join(raw))

    def add_named_items(self, sizes: Integers, lengths: Integers, names: bytes) -> int:
        """The same with names as the kernel has them: how many bytes each has, and all joined."""
        if not self._has_names or len(lengths) != len(sizes) or int(lengths.sum()) != len(names):
            raise ValueError("names: one for each size")
        return self._add_items(sizes, lengths, names)

    def _add_items(self, sizes: Integers, lengths: Integers | None, names: bytes) -> int:
        first = self._items
        if lengths is not None and int(lengths.max(initial=0)) > blocks.NAME_BYTES_MOST:
            raise ValueError(f"names: one is longer than {blocks.NAME_BYTES_MOST} bytes")
        most, begin = blocks.ROWS_MOST[blocks.ITEMS], 0
        for start in range(0, len(sizes), most):
            some = slice(start, start + most)
            payload = pack(sizes[some])
            if lengths is not None:
                end = begin + int(lengths[some].sum())
                payload += pack(lengths[some]) + names[begin:end]
                begin = end
            self._block(blocks.ITEMS, len(sizes[some]), payload)
            self._items += len(sizes[some])
        return first

    def add(
        self,
        items: Integers,
        *,
        times_s: Floats | None = None,
        readers: Integers | None = None,
        seen: Integers | None = None,
    ) -> None:
        """More accesses, of items that were added; written when they fill a block, or by `flush`.

        All arrays have the shape of `items`, and exactly those that `__init__` announced are given.
        """
        columns = [np.array(items, np.int64)]
        for has, values, scale in (
            (self._has_times, times_s, 1e6),
            (self._has_readers, readers, 0),
            (self._has_seen, seen, 0),
        ):
            if has != (values is not None) or (values is not None and len(values) != len(items)):
                raise ValueError("each column that the file has, and no other, with a value each")
            if values is not None:
                scaled = np.rint(np.asarray(values) * scale) if scale else np.array(values)
                columns.append(scaled.astype(np.int64))
        if len(items) and not 0 <= int(columns[0].min()) <= int(columns[0].max()) < self._items:
            raise ValueError(f"items: each must be 0 or more and less than {self._items}")
        self._pending.append(columns)
        self._pending_count += len(items)
        self._accesses += len(items)
        if self._pending_count >= blocks.BLOCK_ACCESSES:
            self.flush()

    def begin_epoch(self) -> None:
        """The next access begins an epoch. The first one need not be said."""
        if self._accesses > self._epoch_at:
            self.flush()
            self._block(blocks.EPOCH, 1, blocks.SUM.pack(self._accesses))
            self._epoch_at = self._accesses

    def tell(self, items: Integers, values: Floats) -> None:
        """Importance values of items, known before the next access."""
        self.flush()
        most = blocks.ROWS_MOST[blocks.IMPORTANCES]
        for start in range(0, len(items), most) if len(items) else (0,):
            some = np.asarray(items[start : start + most])
            told = np.asarray(values[start : start + most], "<f4")
            payload = blocks.SUM.pack(self._accesses) + pack(some) + told.tobytes()
            self._block(blocks.IMPORTANCES, len(some), payload)

    def note_gap(self, lost: int | None) -> None:
        """Accesses are missing here: so many, or (None) it is not known how many."""
        self.flush()
        count = blocks.UNKNOWN if lost is None else lost
        self._block(blocks.GAP, 1, struct.pack("<QQ", self._accesses, count))

    def flush(self) -> None:
        """Write all accesses: a killed writer loses nothing that came before."""
        pending, self._pending, self._pending_count = self._pending, [], 0
        columns = [np.concatenate(column) for column in zip(*pending, strict=True)]
        for start in range(0, len(columns[0]) if columns else 0, blocks.BLOCK_ACCESSES):
            some = [column[start : start + blocks.BLOCK_ACCESSES] for column in columns]
            self._block(blocks.ACCESSES, len(some[0]), b"".join(map(pack, some)))

    def close(self) -> None:
        """Write what is pending, and that this is the end."""
        try:
            self.flush()
            self._block(blocks.END, 0, struct.pack("<QQ", self._accesses, self._items))
        finally:
            self._file.close()

    def _block(self, kind: int, rows: int, payload: bytes) -> None:
        self._append(blocks.block(kind, rows, self._blocks, payload))
        self._blocks += 1

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):  # the part of a block that fitted
                self._file.truncate(self.size_bytes)
                self._file.seek(self.size_bytes)
            raise
        self.size_bytes += len(data)
