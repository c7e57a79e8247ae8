"""Access traces: which item was read when, by whom; in memory and as a file (docs/TRACES.md).

A file is a header and blocks, each with checksums of its own, so that whoever writes may be killed
at any moment: what was written in whole blocks stays readable.

INVARIANT: a block refers only to items and accesses of blocks before it.
INVARIANT: whatever bytes a file has, `read` returns what was written or raises TraceError; it does
not begin to decode what would not fit into memory.
It knows no mount: who records is `recorder.py`.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from fusecache.digest import checksum
from fusecache.errors import EXIT_USAGE, UserError
from fusecache.memory import usable_memory_bytes
from fusecache.units import format_bytes

VERSION: Final = 1
BLOCK_ACCESSES: Final = 1 << 16

# How a mount saw an access: the low bits of `seen`.
OPENED: Final = 1  # a look-up or an open
FROM_SSD: Final = 2  # a READ at offset 0, answered from SSD
FROM_ORIGIN: Final = 3  # a READ at offset 0, answered from the origin
ELSEWHERE: Final = 4  # a READ at another offset of a file of several blocks
BY_HINT: Final = 5  # not seen: hintsd says that a hinted reader has passed it
CONTINUES: Final = 16  # flag: part of an access that has been noted before

# How the source line of a recording ends that does not hold all that was read.
MISSES_ONLY: Final = "READs and fired tripwires only"

_Mask = npt.NDArray[np.bool_]

Path_ = str | os.PathLike[str]
Integers = npt.NDArray[Any]
Floats = npt.NDArray[Any]


class TraceError(UserError):
    """A file that is no trace, is damaged, or is of another version; names file and block."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=EXIT_USAGE)


@dataclass(frozen=True, slots=True)
class Importance:
    """What a sampler was told before the access at `position`."""

    position: int
    items: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Gap:
    """Before the access at `position`, accesses are missing: `lost` of them, None: nobody knows."""

    position: int
    lost: int | None


@dataclass(frozen=True, slots=True)
class Trace:
    """An access sequence.

    items: which item each access reads, int64, shape (accesses,)
    sizes: bytes of each item, int64, shape (items,)
    epoch_starts: positions where an epoch begins, int64, ascending, the first is 0
    times_s: since the recording began, float64, shape (accesses,), to the microsecond; None: none
    importances: in the order of their positions
    readers: who read (thread id or rank; -n: the n-th job that hints told of; 0: not known), int32,
        shape (accesses,); None: one reader
    seen: how a mount saw it (OPENED, FROM_SSD, …), uint8, shape (accesses,); None: all are exact
    names: path of each item; None: none
    source: one line: where it comes from
    gaps: where a recording lost accesses, in the order of their positions
    is_complete: False: the writer was killed; later accesses may be missing
    """

    items: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    epoch_starts: npt.NDArray[np.int64]
    times_s: npt.NDArray[np.float64] | None
    importances: tuple[Importance, ...]
    readers: npt.NDArray[np.int32] | None
    seen: npt.NDArray[np.uint8] | None
    names: tuple[str, ...] | None
    source: str
    gaps: tuple[Gap, ...] = ()
    is_complete: bool = True

    def check(self) -> None:
        """ValueError, naming the field, where the parts do not belong together."""
        accesses, items = len(self.items), len(self.sizes)
        if accesses and not 0 <= int(self.items.min()) <= int(self.items.max()) < items:
            raise ValueError(f"items: each must be 0 or more and less than {items}")
        if items and int(self.sizes.min()) < 0:
            raise ValueError("sizes: each must be 0 or more")
        starts = self.epoch_starts
        if len(starts) == 0 or int(starts[0]) != 0 or np.any(np.diff(starts) <= 0):
            raise ValueError("epoch_starts: must be ascending and begin with 0")
        if int(starts[-1]) > accesses:
            raise ValueError(f"epoch_starts: {int(starts[-1])} is beyond the {accesses} accesses")
        for field, column, length in (
            ("times_s", self.times_s, accesses),
            ("readers", self.readers, accesses),
            ("seen", self.seen, accesses),
            ("names", self.names, items),
        ):
            if column is not None and len(column) != length:
                raise ValueError(f"{field}: {len(column)} values instead of {length}")
        if self.times_s is not None and not np.all(np.isfinite(self.times_s)):
            raise ValueError("times_s: each must be a finite number")
        for what, marks in (("importances", self.importances), ("gaps", self.gaps)):
            positions = [0, *(mark.position for mark in marks), accesses]
            if positions != sorted(positions):
                raise ValueError(f"{what}: positions must not descend or exceed {accesses}")
        for told in self.importances:
            if len(told.items) != len(told.values):
                raise ValueError(f"importances: {len(told.items)} items, {len(told.values)} values")
            if len(told.items) and not (
                0 <= int(told.items.min()) <= int(told.items.max()) < items
            ):
                raise ValueError(f"importances: items must be 0 or more and less than {items}")

    def select(self, mask: npt.NDArray[np.bool_]) -> Trace:
        """The accesses for which `mask` (shape (accesses,)) is true; positions move along."""
        before = np.concatenate(([0], np.cumsum(mask)))
        starts = np.unique(before[self.epoch_starts])
        return replace(
            self,
            items=self.items[mask],
            epoch_starts=starts.astype(np.int64),
            times_s=None if self.times_s is None else self.times_s[mask],
            readers=None if self.readers is None else self.readers[mask],
            seen=None if self.seen is None else self.seen[mask],
            importances=tuple(
                replace(told, position=int(before[told.position])) for told in self.importances
            ),
            gaps=tuple(replace(gap, position=int(before[gap.position])) for gap in self.gaps),
        )


# ---- columns -------------------------------------------------------------------------------------
# A column is a byte (width in bytes of a value, and whether values are differences) and then the
# bytes of all values, plane by plane: all lowest bytes, all second bytes, …

_DIFFERENCES: Final = 0x80


def _width(values: npt.NDArray[np.uint64]) -> int:
    return (int(values.max()).bit_length() + 7) // 8 if len(values) else 0


def _pack(values: Integers) -> bytes:
    signed = np.ascontiguousarray(values, np.int64)
    steps = np.diff(signed, prepend=np.int64(0))
    zigzag = ((steps << 1) ^ (steps >> 63)).view(np.uint64)
    plain = signed.view(np.uint64)  # a negative value is wide
    flag, column = (_DIFFERENCES, zigzag) if _width(zigzag) < _width(plain) else (0, plain)
    width = _width(column)
    planes = column.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T
    return bytes([width | flag]) + planes.tobytes()


class _Columns:
    """Takes the columns of a block's payload off it. ValueError: they are not there."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._at = 0

    def bytes(self, count: int) -> memoryview:
        if len(self._payload) - self._at < count:
            raise ValueError("the payload is too short")
        self._at += count
        return memoryview(self._payload)[self._at - count : self._at]

    def integers(self, count: int) -> npt.NDArray[np.int64]:
        kind = self.bytes(1)[0]
        width = kind & ~_DIFFERENCES
        if width > 8:
            raise ValueError(f"a column of {width} bytes a value")
        padded = np.zeros((count, 8), np.uint8)
        padded[:, :width] = (
            np.frombuffer(self.bytes(count * width), np.uint8).reshape(width, count).T
        )
        column = padded.view("<u8").reshape(count)
        if not kind & _DIFFERENCES:
            return column.view("<i8").astype(np.int64)
        steps = (column >> np.uint64(1)).astype(np.int64) ^ -(column & np.uint64(1)).astype(
            np.int64
        )
        return np.cumsum(steps, dtype=np.int64)

    def u64(self) -> int:
        return int.from_bytes(self.bytes(8), "little")

    def end(self) -> None:
        if self._at != len(self._payload):
            raise ValueError("the payload is too long")


# ---- blocks --------------------------------------------------------------------------------------

_MAGIC: Final = b"FCTRACE\n"
_HEADER: Final = struct.Struct("<8sHHI")  # magic, version, columns, length of the source
_HAS_TIMES, _HAS_READERS, _HAS_SEEN, _HAS_NAMES = 1, 2, 4, 8
_SOURCE_BYTES_MOST: Final = 64 << 10
_BLOCK_MAGIC: Final = 0x42544346  # "FCTB"
# magic, kind, packing, zero, rows, stored bytes, bytes, number, checksum of the stored bytes;
# then the checksum of all this
_BLOCK: Final = struct.Struct("<IBBHIIIIQ")
_SUM: Final = struct.Struct("<Q")
_BLOCK_HEADER_BYTES: Final = _BLOCK.size + _SUM.size
_PAYLOAD_BYTES_MOST: Final = 64 << 20
_ITEMS, _ACCESSES, _EPOCH, _IMPORTANCES, _GAP, _END = 1, 2, 3, 4, 5, 6
_RAW, _ZLIB = 0, 1
_ZLIB_LEVEL: Final = 1
_ROWS_MOST: Final = {_ITEMS: 1 << 9, _ACCESSES: BLOCK_ACCESSES, _IMPORTANCES: 1 << 20}
_NAME_BYTES_MOST: Final = (64 << 10) - 1
# What reading takes at its peak, merging included. Rows of zeros cost a file nothing.
_MEMORY_PER_ROW: Final = 160
_MEMORY_PER_PAYLOAD: Final = 4  # a name's characters may take so much each
_UNKNOWN: Final = (1 << 64) - 1
_HOW: Final = 7  # the bits of `seen` that are no flags
_NESTED_MOST: Final = 64  # uses of one item that are seen before the first is told: bounds the work
_BEHIND_MOST: Final = 1 << 16  # samples that hintsd is behind a reader, at most


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
        text = " ".join(source.split()).encode("utf-8", "surrogateescape")[:_SOURCE_BYTES_MOST]
        self._has_times, self._has_readers = times, readers
        self._has_seen, self._has_names = seen, names
        columns = (
            _HAS_TIMES * times + _HAS_READERS * readers + _HAS_SEEN * seen + _HAS_NAMES * names
        )
        header = _HEADER.pack(_MAGIC, VERSION, columns, len(text)) + text
        self._pending: list[list[Integers]] = []
        self._pending_count = 0
        self._blocks = self._items = self._accesses = self._epoch_at = self.size_bytes = 0
        self._file = open(path, "wb" if force else "xb", buffering=0)  # noqa: SIM115
        try:
            self._append(header + _SUM.pack(checksum(header)))
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
        if lengths is not None and int(lengths.max(initial=0)) > _NAME_BYTES_MOST:
            raise ValueError(f"names: one is longer than {_NAME_BYTES_MOST} bytes")
        most, begin = _ROWS_MOST[_ITEMS], 0
        for start in range(0, len(sizes), most):
            some = slice(start, start + most)
            payload = _pack(sizes[some])
            if lengths is not None:
                end = begin + int(lengths[some].sum())
                payload += _pack(lengths[some]) + names[begin:end]
                begin = end
            self._block(_ITEMS, len(sizes[some]), payload)
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
        if self._pending_count >= BLOCK_ACCESSES:
            self.flush()

    def begin_epoch(self) -> None:
        """The next access begins an epoch. The first one need not be said."""
        if self._accesses > self._epoch_at:
            self.flush()
            self._block(_EPOCH, 1, _SUM.pack(self._accesses))
            self._epoch_at = self._accesses

    def tell(self, items: Integers, values: Floats) -> None:
        """Importance values of items, known before the next access."""
        self.flush()
        most = _ROWS_MOST[_IMPORTANCES]
        for start in range(0, len(items), most) if len(items) else (0,):
            some = np.asarray(items[start : start + most])
            told = np.asarray(values[start : start + most], "<f4")
            payload = _SUM.pack(self._accesses) + _pack(some) + told.tobytes()
            self._block(_IMPORTANCES, len(some), payload)

    def note_gap(self, lost: int | None) -> None:
        """Accesses are missing here: so many, or (None) nobody knows how many."""
        self.flush()
        self._block(_GAP, 1, struct.pack("<QQ", self._accesses, _UNKNOWN if lost is None else lost))

    def flush(self) -> None:
        """Write all accesses: a killed writer loses nothing that came before."""
        pending, self._pending, self._pending_count = self._pending, [], 0
        columns = [np.concatenate(column) for column in zip(*pending, strict=True)]
        for start in range(0, len(columns[0]) if columns else 0, BLOCK_ACCESSES):
            some = [column[start : start + BLOCK_ACCESSES] for column in columns]
            self._block(_ACCESSES, len(some[0]), b"".join(map(_pack, some)))

    def close(self) -> None:
        """Write what is pending, and that this is the end."""
        try:
            self.flush()
            self._block(_END, 0, struct.pack("<QQ", self._accesses, self._items))
        finally:
            self._file.close()

    def _block(self, kind: int, rows: int, payload: bytes) -> None:
        stored, packing = zlib.compress(payload, _ZLIB_LEVEL), _ZLIB
        if len(stored) >= len(payload):
            stored, packing = payload, _RAW
        header = _BLOCK.pack(
            _BLOCK_MAGIC, kind, packing, 0, rows, len(stored), len(payload), self._blocks,
            checksum(stored),
        )  # fmt: skip
        self._append(header + _SUM.pack(checksum(header)) + stored)
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


def write(path: Path_, trace: Trace) -> None:
    """The whole trace; `path` names it when it is complete, and what it named before until then.

    ValueError: parts of the trace do not belong together (`Trace.check`). OSError.
    """
    trace.check()
    part = f"{os.fspath(path)}.part"
    writer = Writer(
        part,
        source=trace.source,
        times=trace.times_s is not None,
        readers=trace.readers is not None,
        seen=trace.seen is not None,
        names=trace.names is not None,
        force=True,
    )
    try:
        with writer:
            writer.add_items(trace.sizes, trace.names)
            _write_accesses(writer, trace)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _write_accesses(writer: Writer, trace: Trace) -> None:
    starts = set(map(int, trace.epoch_starts))
    marks = starts | {told.position for told in trace.importances}
    marks |= {gap.position for gap in trace.gaps} | {len(trace.items)}
    importances, gaps = list(trace.importances), list(trace.gaps)
    for begin, end in itertools.pairwise([*sorted(marks), len(trace.items)]):
        if begin in starts:
            writer.begin_epoch()
        while importances and importances[0].position == begin:
            writer.tell(importances[0].items, importances[0].values)
            del importances[0]
        while gaps and gaps[0].position == begin:
            writer.note_gap(gaps[0].lost)
            del gaps[0]
        if end > begin:
            some = slice(begin, end)
            writer.add(
                trace.items[some],
                times_s=None if trace.times_s is None else trace.times_s[some],
                readers=None if trace.readers is None else trace.readers[some],
                seen=None if trace.seen is None else trace.seen[some],
            )


# ---- reading -------------------------------------------------------------------------------------


def read(path: Path_, *, parts: bool = False) -> Trace:
    """The trace in `path`; of one whose writer was killed, all that was written in whole blocks.
    Takes up to some 160 bytes of memory an access.

    `parts`: all rows, as they are written; else `accesses` of them.
    TraceError: no trace, damaged, of another version, or larger than memory. OSError.
    """
    with open(path, "rb") as file:
        reading = _Reading(os.fsdecode(path), file)
        for block in reading.blocks():
            reading.take(*block)
        trace = reading.trace()
    return trace if parts else accesses(trace)


def accesses(trace: Trace) -> Trace:
    """Of a recording's rows, one for each access: without those that continue one (CONTINUES), and
    what a hint told merged with what was seen of the same access.

    Told rows of a job keep their order, which is the job's. Each takes the latest row that was seen
    of its item before it was told and that no other has taken, if one is not too old: `seen`
    and time come from there, and so does its place among the rows of others, unless the job was
    further already. The others stand behind the one before them, at a time between those of their
    neighbours that were seen.
    """
    if trace.seen is None:
        return trace
    trace = trace.select(trace.seen & CONTINUES == 0)
    assert trace.seen is not None
    told: _Mask = trace.seen & _HOW == BY_HINT
    return _merged(trace, trace.seen, told) if told.any() else trace


def _merged(trace: Trace, seen: Integers, told: _Mask) -> Trace:
    readers = np.zeros(len(told), np.int32) if trace.readers is None else trace.readers
    times_s = None if trace.times_s is None else trace.times_s.copy()
    when = np.arange(len(told)) if trace.times_s is None else trace.times_s
    taken = _latest_seen(trace.items, when, told)  # by each told row; -1: none
    keys, how = np.arange(len(told)), seen.copy()
    for job in np.unique(readers[told]):
        its = np.flatnonzero(told & (readers == job))
        found = taken[its]
        found[_BEHIND_MOST:][found[_BEHIND_MOST:] < its[:-_BEHIND_MOST]] = -1
        taken[its] = found
        known = np.flatnonzero(found >= 0)
        if len(known) == 0:
            continue
        how[its[known]] = seen[found[known]]
        keys[its] = np.maximum(np.maximum.accumulate(found), found[known[0]])
        if times_s is not None:
            ascending = np.maximum.accumulate(times_s[found[known]])
            times_s[its] = np.interp(np.arange(len(its)), known, ascending)
    merged = np.flatnonzero(taken >= 0)
    kept = np.ones(len(told), np.bool_)
    kept[taken[merged]] = False
    order = np.argsort(keys, kind="stable")
    order = order[kept[order]]
    moved_to = np.full(len(told) + 1, len(order))
    moved_to[order] = np.arange(len(order))
    moved_to[taken[merged]] = moved_to[merged]

    def moved(positions: Iterable[int]) -> list[int]:
        found: list[int] = np.maximum.accumulate(
            moved_to[np.fromiter(positions, np.int64)]
        ).tolist()
        return found

    importances = moved(what.position for what in trace.importances)
    gaps = moved(gap.position for gap in trace.gaps)
    return replace(
        trace,
        items=trace.items[order],
        epoch_starts=np.unique([0, *moved(trace.epoch_starts[1:])]),
        times_s=None if times_s is None else times_s[order],
        readers=None if trace.readers is None else trace.readers[order],
        seen=how[order],
        importances=tuple(
            replace(what, position=at)
            for at, what in zip(importances, trace.importances, strict=True)
        ),
        gaps=tuple(Gap(at, gap.lost) for at, gap in zip(gaps, trace.gaps, strict=True)),
    )


def _latest_seen(items: Integers, when: npt.NDArray[Any], told: _Mask) -> npt.NDArray[np.int64]:
    """For each told row the row that was seen of its item: like brackets, inner pairs first."""
    found = np.full(len(items), -1, np.int64)
    left = np.lexsort((when, items))  # stable; rows are written later than they are told
    for _ in range(_NESTED_MOST):
        is_pair = ~told[left[:-1]] & told[left[1:]] & (items[left[:-1]] == items[left[1:]])
        pairs = np.flatnonzero(is_pair)
        if len(pairs) == 0:
            break
        found[left[pairs + 1]] = left[pairs]
        left = np.delete(left, np.concatenate((pairs, pairs + 1)))
    return found


class _Reading:
    def __init__(self, path: str, file: io.BufferedReader) -> None:
        self._path, self._file = path, file
        self._number = 0  # of the block being read
        self._memory_bytes, self._usable_bytes = 0, usable_memory_bytes()
        self._sizes: list[Integers] = []
        self._names: list[str] = []
        self._accesses: list[list[Integers]] = []
        self._starts = [0]
        self._importances: list[Importance] = []
        self._gaps: list[Gap] = []
        self._items = self._count = 0
        self._is_complete = False
        start = file.read(_HEADER.size)
        if start[: len(_MAGIC)] != _MAGIC or len(start) < _HEADER.size:
            raise TraceError(f"{path} is no access trace")
        _, version, self._columns, source_bytes = _HEADER.unpack(start)
        if version != VERSION:
            raise TraceError(
                f"{path} is a trace of version {version}; this fusecache reads version {VERSION}"
            )
        source = file.read(min(source_bytes, _SOURCE_BYTES_MOST))
        if file.read(_SUM.size) != _SUM.pack(checksum(start + source)):
            raise TraceError(f"{path} is damaged or cut off: its header")
        self._source = source.decode("utf-8", "surrogateescape")

    def _damaged(self, why: str) -> NoReturn:
        raise TraceError(f"{self._path} is damaged: block {self._number}: {why}")

    def blocks(self) -> Iterator[tuple[int, int, bytes]]:
        """(kind, rows, payload) of each whole block."""
        while True:
            header = self._file.read(_BLOCK_HEADER_BYTES)
            if header and self._is_complete:
                self._damaged("it follows the last one")
            if len(header) < _BLOCK_HEADER_BYTES:
                return
            (magic, kind, packing, zero, rows, stored_bytes, size_bytes, number, payload_sum) = (
                _BLOCK.unpack_from(header)
            )
            if header[_BLOCK.size :] != _SUM.pack(checksum(header[: _BLOCK.size])):
                self._damaged("checksum of its header")
            if (magic, zero, number) != (_BLOCK_MAGIC, 0, self._number):
                self._damaged("it does not belong here")
            if max(stored_bytes, size_bytes) > _PAYLOAD_BYTES_MOST:
                self._damaged("it is too large")
            if rows > _ROWS_MOST.get(kind, 1):
                self._damaged(f"{rows} rows")
            self._reserve(rows, size_bytes)
            stored = self._file.read(stored_bytes)
            if len(stored) < stored_bytes:
                return
            if checksum(stored) != payload_sum:
                self._damaged("checksum")
            yield kind, rows, self._unpack(packing, stored, size_bytes)
            self._number += 1

    def _reserve(self, rows: int, size_bytes: int) -> None:
        """Before a block is decoded: what it says that it holds may be far more than its bytes."""
        self._memory_bytes += rows * _MEMORY_PER_ROW + size_bytes * _MEMORY_PER_PAYLOAD
        if self._memory_bytes > self._usable_bytes:
            raise TraceError(
                f"{self._path}: block {self._number}: up to here it takes "
                f"{format_bytes(self._memory_bytes)} of memory to read, "
                f"and {format_bytes(self._usable_bytes)} are usable"
            )

    def _unpack(self, packing: int, stored: bytes, size_bytes: int) -> bytes:
        if packing == _ZLIB:
            unpacking = zlib.decompressobj()
            try:
                stored = unpacking.decompress(stored, size_bytes + 1)
            except zlib.error as error:
                self._damaged(str(error))
        elif packing != _RAW:
            self._damaged(f"packing {packing} is unknown")
        if len(stored) != size_bytes:
            self._damaged("it has another length than it says")
        return stored

    def take(self, kind: int, rows: int, payload: bytes) -> None:
        columns = _Columns(payload)
        try:
            if kind == _ITEMS:
                self._take_items(rows, columns)
            elif kind == _ACCESSES:
                self._take_accesses(rows, columns)
            elif kind == _EPOCH:
                position = self._position(columns)
                if position <= self._starts[-1]:
                    raise ValueError("the epoch before it has no access")
                self._starts.append(position)
            elif kind == _IMPORTANCES:
                position = self._position(columns)
                items = self._known(columns.integers(rows))
                values = np.frombuffer(columns.bytes(4 * rows), "<f4").astype(np.float32)
                self._importances.append(Importance(position, items, values))
            elif kind == _GAP:
                position, lost = self._position(columns), columns.u64()
                self._gaps.append(Gap(position, None if lost == _UNKNOWN else lost))
            elif kind == _END:
                if (columns.u64(), columns.u64()) != (self._count, self._items):
                    raise ValueError("it counts other accesses or items than there are")
                self._is_complete = True
            else:
                raise ValueError(f"kind {kind} is unknown")
            columns.end()
        except ValueError as error:
            self._damaged(str(error))

    def _position(self, columns: _Columns) -> int:
        """Where such a block stands: it is written right there."""
        position = columns.u64()
        if position != self._count:
            raise ValueError(f"it is about access {position} and stands before {self._count}")
        return position

    def _known(self, items: Integers) -> Integers:
        if len(items) and not 0 <= int(items.min()) <= int(items.max()) < self._items:
            raise ValueError("it names an item that no block before it has")
        return items

    def _take_items(self, rows: int, columns: _Columns) -> None:
        sizes = columns.integers(rows)
        if rows and int(sizes.min()) < 0:
            raise ValueError("a size is negative")
        if self._columns & _HAS_NAMES:
            lengths = columns.integers(rows)
            if rows and not 0 <= int(lengths.min()) <= int(lengths.max()) <= _NAME_BYTES_MOST:
                raise ValueError(f"a name is longer than {_NAME_BYTES_MOST} bytes")
            ends = np.cumsum(lengths).tolist()
            names = bytes(columns.bytes(ends[-1] if ends else 0))
            self._names += [os.fsdecode(names[a:b]) for a, b in itertools.pairwise([0, *ends])]
        self._sizes.append(sizes)
        self._items += rows

    def _take_accesses(self, rows: int, columns: _Columns) -> None:
        taken = [self._known(columns.integers(rows))]
        for flag in (_HAS_TIMES, _HAS_READERS, _HAS_SEEN):
            if self._columns & flag:
                taken.append(columns.integers(rows))
        self._accesses.append(taken)
        self._count += rows

    def trace(self) -> Trace:
        parts = [np.concatenate(column) for column in zip(*self._accesses, strict=True)]

        def column(flag: int) -> Integers | None:
            if not self._columns & flag:
                return None
            place = (self._columns & (flag - 1) & (_HAS_TIMES | _HAS_READERS)).bit_count() + 1
            return parts[place] if parts else np.zeros(0, np.int64)

        times_us, readers, seen = map(column, (_HAS_TIMES, _HAS_READERS, _HAS_SEEN))
        return Trace(
            items=parts[0] if parts else np.zeros(0, np.int64),
            sizes=np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int64),
            epoch_starts=np.array(self._starts, np.int64),
            times_s=None if times_us is None else times_us / 1e6,
            importances=tuple(self._importances),
            readers=None if readers is None else readers.astype(np.int32),
            seen=None if seen is None else seen.astype(np.uint8),
            names=tuple(self._names) if self._columns & _HAS_NAMES else None,
            source=self._source,
            gaps=tuple(self._gaps),
            is_complete=self._is_complete,
        )
