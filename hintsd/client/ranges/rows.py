"""Where the rows of numpy, HDF5 and parquet files lie: `Ranges`, and `rows_of`, which finds them.

INVARIANT: nothing here imports h5py or pyarrow but for a file of theirs, or reads a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Union

import numpy as np
import numpy.typing as npt

from hintsd.client.client import Path, common_root, tidy_paths

CHUNKS_MOST: Final = 64
"""Of one row; more are told as one range."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ranges:
    """Which bytes each index of a dataset reads: `lengths[i]` bytes from `offsets[i]` on in
    `paths[files[i]]`. `files`, `offsets`, `lengths`: integers, shape (samples,), or (samples, n)
    where a sample has n ranges (of length 0: none). `paths`: as for `attach`.

    ValueError: they are no such thing.
    """

    paths: Sequence[Path]
    files: npt.ArrayLike
    offsets: npt.ArrayLike
    lengths: npt.ArrayLike

    def __post_init__(self) -> None:
        paths = tidy_paths(self.paths, os.getcwd())
        arrays = {}
        for name in ("files", "offsets", "lengths"):
            try:
                array = np.asarray(getattr(self, name))
            except ValueError:  # rows of several lengths
                array = np.empty(0, object)
            if array.ndim not in (1, 2) or array.dtype.kind not in "iu":
                raise ValueError(f"{name} must be integers, of shape (samples,) or (samples, n)")
            arrays[name] = array.astype(np.int64).reshape(len(array), -1 if len(array) else 1)
            if array.size and arrays[name].min() < 0:
                raise ValueError(f"{name} must be 0 or more")
        shapes = {array.shape for array in arrays.values()}
        if len(shapes) != 1:
            raise ValueError("files, offsets and lengths must have one shape")
        if not paths or (arrays["files"] >= len(paths)).any():
            raise ValueError(f"files has a number that is none of the {len(paths)} paths'")
        object.__setattr__(self, "paths", paths)
        for name, array in arrays.items():
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        """Samples."""
        return len(self.table[0])

    @property
    def table(self) -> tuple[Numbers, Numbers, Numbers]:
        """File, offset and length of each range: shape (samples, n) each."""
        return self.files, self.offsets, self.lengths  # type: ignore[return-value]  # arrays by now

    @property
    def root(self) -> str:
        """The directory that all files lie below."""
        return common_root([os.fspath(path) for path in self.paths])

    def select(self, indices: npt.ArrayLike) -> Ranges:
        """Those of these samples, in this order. IndexError."""
        rows = np.asarray(indices, np.int64)
        return Ranges(self.paths, *(column[rows] for column in self.table))

    @staticmethod
    def joined(parts: Sequence[Ranges]) -> Ranges:
        """The samples of all, one part after another, as ConcatDataset has them."""
        wide = max(part.table[0].shape[1] for part in parts)
        columns = [
            [np.pad(array, ((0, 0), (0, wide - array.shape[1]))) for array in column]
            for column in _columns(parts)
        ]
        return Ranges(_paths(parts), *(np.concatenate(column) for column in columns))

    @staticmethod
    def beside(parts: Sequence[Ranges]) -> Ranges:
        """Each sample reads what it has in all parts: an image and a label, say. ValueError: they
        have not equally many.
        """
        if len({len(part) for part in parts}) != 1:
            raise ValueError(f"parts of {[len(part) for part in parts]} samples")
        columns = (np.concatenate(column, axis=1) for column in _columns(parts))
        return Ranges(_paths(parts), *columns)


def _paths(parts: Sequence[Ranges]) -> list[Path]:
    """Of all, one part after another."""
    return [path for part in parts for path in part.paths]


def _columns(parts: Sequence[Ranges]) -> tuple[list[Numbers], list[Numbers], list[Numbers]]:
    """Of each part the files, by `_paths`; offsets; lengths."""
    files, before = [], 0
    for part in parts:
        files.append(part.table[0] + before)
        before += len(part.paths)
    return files, [part.table[1] for part in parts], [part.table[2] for part in parts]


def rows_of(*arrays: Any) -> Ranges:
    """Where the rows of these lie, one array after another: numpy.memmap (so `numpy.load(path,
    mmap_mode="r")`), h5py.Dataset, or the path of a parquet file, each of whose rows has the
    range of its row group.

    ValueError: it is none of these, or its rows lie in no file of their own (an HDF5 dataset that
    is compact, external or virtual; an array in memory).
    """
    if not arrays:
        raise ValueError("rows_of takes at least one array")
    return Ranges.joined([_rows(array) for array in arrays])


def _rows(array: Any) -> Ranges:
    if isinstance(array, np.memmap):
        return _of_memmap(array)
    if type(array).__module__.partition(".")[0] == "h5py" and hasattr(type(array), "chunks"):
        return _of_hdf5(array)
    if isinstance(array, (str, os.PathLike)):
        return _of_parquet(os.fspath(array))
    raise ValueError(
        f'rows_of takes what numpy.load(path, mmap_mode="r") gives, h5py.Dataset or the path of a '
        f"parquet file, not {type(array).__name__}"
    )


def _of_memmap(array: np.memmap[Any, Any]) -> Ranges:
    base: Any = array
    while isinstance(base.base, np.memmap):  # a slice of a slice: the first one knows its place
        base = base.base
    if not array.ndim or array.filename is None:
        raise ValueError("this memmap has no rows in a file")
    if len(array) and (array[0].size == 0 or not array[0].flags.c_contiguous):
        raise ValueError("the rows of this memmap do not lie in one piece each")
    first = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    offsets = base.offset + first + np.arange(len(array), dtype=np.int64) * array.strides[0]
    return _in_one(str(array.filename), offsets, array.nbytes // max(1, len(array)))


def _in_one(path: str, offsets: Any, lengths: Any) -> Ranges:
    """Ranges of one file."""
    offsets = np.asarray(offsets, np.int64)
    lengths = np.broadcast_to(np.asarray(lengths, np.int64), offsets.shape)
    return Ranges([path], np.zeros(offsets.shape, np.int64), offsets, lengths)


def _of_hdf5(dataset: Any) -> Ranges:
    if not dataset:
        raise ValueError("this h5py.Dataset is closed: call rows_of while its file is open")
    path, count = dataset.file.filename, dataset.shape[0] if dataset.shape else 0
    if not count:
        raise ValueError(f"{dataset.name} of {path} has no rows")
    offset = dataset.id.get_offset() if dataset.chunks is None else 0
    is_elsewhere = offset is None or dataset.is_virtual or dataset.external
    if is_elsewhere or dataset.dtype.hasobject:  # of the latter references lie there
        raise ValueError(
            f"the rows of {dataset.name} do not lie in {path} as they are: they have several "
            "lengths (vlen), or are compact, external or virtual"
        )
    if dataset.chunks is None:
        length = dataset.id.get_type().get_size() * int(np.prod(dataset.shape[1:], dtype=np.int64))
        return _in_one(path, offset + np.arange(count, dtype=np.int64) * length, length)
    chunks = _chunks(dataset)
    return _in_one(path, *(column[np.arange(count) // dataset.chunks[0]] for column in chunks))


def _chunks(dataset: Any) -> tuple[Numbers, Numbers]:
    """Offset and length of the chunks that each group of rows lies in: shape (groups, n) each."""
    found: list[tuple[int, int, int]] = []

    def note(chunk: Any) -> None:
        group = chunk.chunk_offset[0] // dataset.chunks[0]
        found.append((group, chunk.byte_offset, chunk.size))

    dataset.id.chunk_iter(note)  # one pass: to ask for each by its number takes one each
    groups = -(-dataset.shape[0] // dataset.chunks[0])
    told = np.array(sorted(found), np.int64).reshape(-1, 3)
    of_group = told[:, 0]
    counts = np.bincount(of_group, minlength=groups)
    wide = int(counts.max(initial=1))
    if wide > CHUNKS_MOST:
        begin, end = np.full(groups, np.iinfo(np.int64).max), np.zeros(groups, np.int64)
        np.minimum.at(begin, of_group, told[:, 1])
        np.maximum.at(end, of_group, told[:, 1] + told[:, 2])
        begin = np.where(end, begin, 0)
        return begin[:, None], (end - begin)[:, None]
    offsets, lengths = np.zeros((2, groups, wide), np.int64)
    place = np.arange(len(told)) - (np.cumsum(counts) - counts)[of_group]
    offsets[of_group, place], lengths[of_group, place] = told[:, 1], told[:, 2]
    return offsets, lengths


def _of_parquet(path: str) -> Ranges:
    try:
        from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(f"{path}: pyarrow is not there, which reads parquet files") from None
    try:
        metadata = read_metadata(path)
    except Exception as error:  # pyarrow's, of several classes
        raise ValueError(
            f"{path} is no parquet file ({error}): give rows_of a dataset of h5py, or what "
            'numpy.load(path, mmap_mode="r") gives'
        ) from None
    rows, offsets, lengths = [], [], []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = [group.column(place) for place in range(group.num_columns)]
        begins = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        ends = [b + column.total_compressed_size for b, column in zip(begins, columns)]
        rows.append(group.num_rows)
        offsets.append(min(begins, default=0))
        lengths.append(max(ends, default=0) - offsets[-1])
    return _in_one(path, np.repeat(offsets, rows), np.repeat(lengths, rows))


Told = Union[Sequence[Any], Ranges]
"""What a dataset reads: a path for each index, or a range."""
