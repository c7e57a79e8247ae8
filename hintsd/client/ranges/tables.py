"""Where the rows of a `datasets.Dataset` lie: in arrow files, which the library maps into memory.
An address in such a map is a place in its file (/proc/self/maps says which).

INVARIANT: of the files only offsets of strings and lists are read, which lie before the values.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from fusecache.base import mounts
from fusecache.base.mounts import unescape
from hintsd.client.ranges.rows import Numbers, Ranges

SHARE_LEAST: Final = 0.1
"""Of what the largest column has: columns with less are left to the reader."""

_MAPS: Final = "/proc/self/maps"


class Mapped(NamedTuple):
    """Files that are mapped, by address: shape (maps,) each."""

    begins: Numbers
    ends: Numbers
    offsets: Numbers
    """In the file, of the map's first byte."""
    paths: list[str]

    def find(self, addresses: Numbers, lengths: Numbers) -> Ranges | None:
        """What lies at these; of length 0 where that is no file. None: nothing does."""
        place = (np.searchsorted(self.begins, addresses, "right") - 1).clip(0)
        is_there = (self.begins[place] <= addresses) & (addresses + lengths <= self.ends[place])
        is_there &= lengths > 0
        if not is_there.any():
            return None
        offsets = np.where(is_there, self.offsets[place] + addresses - self.begins[place], 0)
        used, files = np.unique(np.where(is_there, place, place[is_there][0]), return_inverse=True)
        paths = [self.paths[number] for number in used]
        return Ranges(paths, files.reshape(place.shape), offsets, np.where(is_there, lengths, 0))


def is_on_mount(folder: str) -> bool:
    """Whether it lies on a fusecache mount."""
    return mounts.find(folder) is not None


def mapped_files() -> Mapped | None:
    """Of this process, those on fusecache mounts; None: there are none."""
    begins, ends, offsets, paths = [], [], [], []
    known: dict[str, bool] = {}
    with open(_MAPS, encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            addresses, _, offset, _, _, *name = line.rstrip("\n").split(None, 5)
            path = unescape(name[0]) if name else ""
            folder = os.path.dirname(path)
            if path.startswith("/") and folder not in known:
                known[folder] = is_on_mount(folder)
            if known.get(folder):
                begin, end = (int(part, 16) for part in addresses.split("-"))
                begins.append(begin)
                ends.append(end)
                offsets.append(int(offset, 16))
                paths.append(path)
    if not paths:
        return None
    return Mapped(
        np.array(begins, np.int64), np.array(ends, np.int64), np.array(offsets, np.int64), paths
    )


def rows_of_table(dataset: Any) -> Ranges | None:
    """Of each index of a datasets.Dataset. None: its rows lie in memory, or on no mount."""
    mapped = mapped_files()
    if mapped is None:  # soon known, however many rows there are
        return None
    columns = dataset._data.column_names
    if dataset._format_columns and not dataset._output_all_columns:
        columns = dataset._format_columns
    leaves = [leaf for name in columns for leaf in _leaves(dataset._data.table.column(name))]
    if not leaves:
        return None
    sizes = np.array([int(lengths.sum()) for _, lengths in leaves])
    heavy = [leaf for leaf, size in zip(leaves, sizes) if size >= SHARE_LEAST * sizes.max()]
    addresses, lengths = (np.stack(column, axis=1) for column in zip(*heavy))
    found, chosen = mapped.find(addresses, lengths), dataset._indices
    if found is None or chosen is None:
        return found
    return found.select(chosen.column(0).to_numpy())


def _leaves(column: Any) -> list[tuple[Numbers, Numbers]]:
    """Address and length of each row's values, shape (rows,) each, for each array of values that a
    column (pyarrow.ChunkedArray) is made of."""
    parts = []
    for chunk in column.chunks:
        rows = np.arange(len(chunk), dtype=np.int64)
        if len(chunk):
            parts.append([np.stack(leaf) for leaf in _values(chunk, rows, rows + 1)])
    joined = [np.concatenate(leaf, axis=1) for leaf in zip(*parts)]
    return [(addresses, lengths) for addresses, lengths in joined]


def _values(array: Any, begin: Numbers, end: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Of the entries from `begin` to `end` (shape (rows,) each) of a pyarrow.Array."""
    import pyarrow.types as kinds  # type: ignore[import-untyped]

    kind = array.type
    if hasattr(array, "storage"):  # of an extension
        yield from _values(array.storage, begin, end)
    elif kinds.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _values(array.field(number), begin, end)
    elif kinds.is_dictionary(kind):
        yield from _values(array.indices, begin, end)
    elif kinds.is_fixed_size_list(kind):
        size = kind.list_size
        yield from _values(array.values, (array.offset + begin) * size, (array.offset + end) * size)
    elif kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_map(kind):
        places = _offsets(array, large=kinds.is_large_list(kind))
        yield from _values(array.values, places[begin], places[end])
    elif _is_string(kind) or _is_large_string(kind):
        places, values = _offsets(array, large=_is_large_string(kind)), array.buffers()[2]
        address = 0 if values is None else values.address
        yield address + places[begin], places[end] - places[begin]
    elif kinds.is_primitive(kind):
        values = array.buffers()[1]
        address, bits = 0 if values is None else values.address, kind.bit_width
        first, last = (array.offset + begin) * bits // 8, -(-(array.offset + end) * bits // 8)
        yield address + first, last - first


def _is_string(kind: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_string(kind) or kinds.is_binary(kind))


def _is_large_string(kind: Any) -> bool:
    import pyarrow.types as kinds

    return bool(kinds.is_large_string(kind) or kinds.is_large_binary(kind))


def _offsets(array: Any, *, large: bool) -> Numbers:
    """Of the entries' values: shape (entries + 1,)."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(1, np.int64)
    places = np.frombuffer(buffer, np.int64 if large else np.int32)
    return places[array.offset : array.offset + len(array) + 1].astype(np.int64)
