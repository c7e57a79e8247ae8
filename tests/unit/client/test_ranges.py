"""Samples within large files: where they lie, as the libraries' own files say, and that they are
asked for ahead of the loader that reads them. The libraries themselves are used."""

from __future__ import annotations

import functools
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")

import h5py  # type: ignore[import-untyped]  # noqa: E402  (no types; torch may be missing)
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset  # noqa: E402

import hintsd  # noqa: E402
from fusecache.base import mounts  # noqa: E402
from hintsd.client import loaders, warning  # noqa: E402
from hintsd.client.finding import NotMounted  # noqa: E402
from hintsd.client.known.datasets import files_of, is_in_memory  # noqa: E402
from hintsd.client.known.extending import Unreadable  # noqa: E402
from hintsd.client.ranges import advice, rows, tables  # noqa: E402
from hintsd.client.ranges.advice import AHEAD_BYTES, BLOCK_BYTES, FIRST_BYTES, Epoch  # noqa: E402
from hintsd.client.ranges.rows import Ranges, rows_of  # noqa: E402
from tests.support.fake_hintsd import FakeHintsd  # noqa: E402
from tests.support.mounted import eventually  # noqa: E402

ROWS = 40


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """It asks no server, and keeps what it keeps here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        import datasets  # type: ignore[import-untyped]  # it has no types

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(tables, "is_on_mount", lambda folder: "pytest" in folder)
        datasets.disable_progress_bars()
        yield datasets


def content(ranges: Ranges, sample: int) -> list[bytes]:
    """What lies in each range of a sample."""
    found = []
    for file, offset, length in zip(*(column[sample] for column in ranges.table), strict=True):
        with open(ranges.paths[file], "rb") as opened:
            found.append(os.pread(opened.fileno(), int(length), int(offset)))
            assert len(found[-1]) == length
    return found


def own(ranges: Any) -> Ranges:
    """As `files_of` gives them."""
    assert isinstance(ranges, Ranges)
    return ranges


# ---- where rows lie ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    [
        lambda array: array,
        lambda array: array[5:30],
        lambda array: array[5:30][::-2],
        lambda array: array[3:][2:, 1],
    ],
    ids=["all", "a part", "backwards", "a column of a part"],
)
@pytest.mark.parametrize("is_npy", [False, True], ids=["raw", "npy"])
def test_rows_of_a_memmap(tmp_path: Path, is_npy: bool, part: Callable[[Any], Any]) -> None:
    array = np.random.default_rng(1).integers(0, 255, (ROWS, 3, 50), np.uint16)
    path = tmp_path / "rows.npy"
    if is_npy:
        np.save(path, array)
        mapped = np.load(path, mmap_mode="r")
    else:
        path.write_bytes(b"x" * 5000 + array.tobytes())
        mapped = np.memmap(path, np.uint16, "r", 5000, (ROWS, 3, 50))
    found, expected = rows_of(part(mapped)), part(array)
    assert len(found) == len(expected)
    for row in range(len(expected)):
        assert content(found, row) == [expected[row].tobytes()]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 1),
        ({"chunks": (7, 30, 2)}, 1),
        ({"chunks": (7, 10, 1)}, 6),
        ({"chunks": (7, 30, 2), "compression": "gzip"}, 1),
        ({"chunks": (7, 1, 1)}, 60),
        ({"chunks": (5, 1, 1), "shuffle": True}, 60),
    ],
    ids=["contiguous", "chunks", "chunks in a grid", "compressed", "many chunks", "filtered"],
)
def test_rows_of_an_hdf5_dataset(tmp_path: Path, options: dict[str, Any], most: int) -> None:
    array = np.random.default_rng(1).integers(0, 1 << 62, (ROWS, 30, 2))
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("before", data=np.arange(999))
        file.create_dataset("rows", data=array, **options)
    with h5py.File(tmp_path / "rows.h5") as file:
        ranges, dataset = rows_of(file["rows"]), file["rows"]
        assert ranges.table[0].shape == (ROWS, most)
        for row in range(ROWS):
            found = content(ranges, row)
            if not options:
                assert found == [array[row].tobytes()]
            elif "compression" not in options and "shuffle" not in options:
                lie_in = b"".join(found)
                assert all(value.tobytes() in lie_in for value in array[row].ravel())
            else:
                chunks = options["chunks"]
                place = (row // chunks[0] * chunks[0], 0, 0)
                assert dataset.id.read_direct_chunk(place)[1] in found


def test_a_row_of_very_many_chunks_is_one_range(tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 1 << 62, (ROWS, 100))
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("rows", data=array, chunks=(10, 1))
        file.create_dataset("none", shape=(ROWS, 100), dtype="i8", chunks=(10, 1))
        ranges, empty = rows_of(file["rows"]), rows_of(file["none"])
    assert ranges.table[0].shape == (ROWS, 1)
    assert rows.CHUNKS_MOST < 100
    for row in range(ROWS):
        (found,) = content(ranges, row)
        assert all(value.tobytes() in found for value in array[row])
    assert not empty.table[2].any()  # nothing was written


def test_rows_of_a_parquet_file_have_the_range_of_their_group(tmp_path: Path) -> None:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyarrow import parquet

    values = [os.urandom(30) for _ in range(ROWS)]
    path = tmp_path / "rows.parquet"
    table = pa.table({"number": range(ROWS), "value": values})
    parquet.write_table(
        table, path, row_group_size=15, compression="none", use_dictionary=["number"]
    )
    ranges = rows_of(path)
    assert len(ranges) == ROWS
    assert len(set(map(tuple, np.concatenate(ranges.table, axis=1).tolist()))) == 3
    for row, value in enumerate(values):
        (found,) = content(ranges, row)
        assert value in found
        assert found.startswith(content(ranges, 0)[0][:2])  # a page begins as another does
        assert values[(row + 15) % ROWS] not in found


def test_several_arrays_are_one_after_another(tmp_path: Path) -> None:
    arrays = []
    for number, width in enumerate((8, 80)):
        np.save(tmp_path / f"{number}.npy", np.full((3, width), number, np.uint8))
        arrays.append(np.load(tmp_path / f"{number}.npy", mmap_mode="r"))
    ranges = rows_of(*arrays)
    found = [content(ranges, row) for row in range(6)]
    assert found == [[bytes(8)]] * 3 + [[b"\1" * 80]] * 3
    assert [content(ranges.select([4, 1]), row) for row in (0, 1)] == [[b"\1" * 80], [bytes(8)]]


def test_several_arrays_beside_each_other(tmp_path: Path) -> None:
    for number, width in enumerate((8, 80)):
        np.save(tmp_path / f"{number}.npy", np.full((3, width), number, np.uint8))
    parts = [rows_of(np.load(tmp_path / f"{number}.npy", mmap_mode="r")) for number in (0, 1)]
    ranges = Ranges.beside(parts)
    assert [content(ranges, row) for row in range(3)] == [[bytes(8), b"\1" * 80]] * 3
    with pytest.raises(ValueError, match=r"parts of \[3, 2\] samples"):
        Ranges.beside([parts[0], parts[1].select([0, 1])])


def test_rows_that_lie_in_no_file(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((ROWS, 2), "i8")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("scalar", data=1)
        file.create_dataset("external", (4,), "i8", external=[(str(tmp_path / "x"), 0, 32)])
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("lengths", (4,), h5py.vlen_dtype(np.uint8))
        for name in ("scalar", "external", "virtual", "lengths"):
            with pytest.raises(ValueError, match=f"{name}.*(no rows|as they are)"):
                rows_of(file[name])
        closed = file["scalar"]
    with pytest.raises(ValueError, match="call rows_of while its file is open"):
        rows_of(closed)
    (tmp_path / "no.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"no\.parquet is no parquet file"):
        rows_of(tmp_path / "no.parquet")
    with pytest.raises(ValueError, match="not list"):
        rows_of([1, 2])
    with pytest.raises(ValueError, match="not ndarray"):
        rows_of(np.zeros((3, 3)))
    with pytest.raises(ValueError, match="at least one"):
        rows_of()
    np.save(tmp_path / "rows.npy", np.zeros((4, 5)).T)  # in Fortran's order
    with pytest.raises(ValueError, match="in one piece"):
        rows_of(np.load(tmp_path / "rows.npy", mmap_mode="r"))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((["a"], [0, 0], [0, 1], [1]), "one shape"),
        ((["a"], [0], [-1], [1]), "offsets must be 0 or more"),
        ((["a"], [0], [0.5], [1]), "offsets must be integers"),
        ((["a"], [0], [[0], [1, 2]], [1]), "offsets must be integers"),
        ((["a"], [1], [0], [1]), "none of the 1 paths"),
        (([], [0], [0], [1]), "none of the 0 paths"),
        (("a", [0], [0], [1]), "paths must be a sequence"),
        ((["a"], 0, 0, 1), "files must be integers"),
    ],
)
def test_what_are_no_ranges(arguments: tuple[Any, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Ranges(*arguments)


# ---- datasets of the library datasets ------------------------------------------------------------


def saved(library: Any, folder: Path, columns: dict[str, list[Any]], batch: int = 7) -> Any:
    """In arrow files, of so many rows a record batch."""
    dataset = library.Dataset.from_dict(columns)
    from datasets.arrow_writer import ArrowWriter  # type: ignore[import-untyped]  # as above

    path = folder / "rows.arrow"
    with ArrowWriter(path=str(path), features=dataset.features, writer_batch_size=batch) as writer:
        for row in dataset:
            writer.write(row)
        writer.finalize()
    return library.Dataset.from_file(str(path))


def test_strings_of_arrow_files(library: Any, tmp_path: Path) -> None:
    values = [os.urandom(100 + 13 * number) for number in range(ROWS)]
    found = saved(library, tmp_path, {"value": values, "label": list(range(ROWS))})
    ranges = own(files_of(found)[1])
    assert [content(ranges, row) for row in range(ROWS)] == [[value] for value in values]
    chosen = found.shuffle(seed=1).select(range(5, 25))
    order = chosen["label"]
    ranges = own(files_of(chosen)[1])
    assert [content(ranges, row) for row in range(20)] == [[values[i]] for i in order]
    joined = library.concatenate_datasets([chosen, found.select(range(3, 9))])
    ranges = own(files_of(joined)[1])
    expected = [values[i] for i in joined["label"]]
    assert [content(ranges, row) for row in range(26)] == [[value] for value in expected]


def test_lists_of_arrow_files(library: Any, tmp_path: Path) -> None:
    """As a tokenizer writes them."""
    lists = [list(range(number, 2 * number + 1)) for number in range(ROWS)]
    masks = [[1] * len(each) for each in lists]
    features = library.Features(
        tokens=library.List(library.Value("int32")), mask=library.List(library.Value("int16"))
    )
    dataset = library.Dataset.from_dict({"tokens": lists, "mask": masks}, features=features)
    dataset.save_to_disk(str(tmp_path / "saved"))
    ranges = own(files_of(library.load_from_disk(str(tmp_path / "saved")))[1])
    for row in range(ROWS):
        tokens, mask = content(ranges, row)
        assert tokens == np.array(lists[row], np.int32).tobytes()
        assert mask == np.array(masks[row], np.int16).tobytes()


def test_images_of_arrow_files(library: Any, tmp_path: Path) -> None:
    images = [{"bytes": os.urandom(500 + number), "path": "x.jpg"} for number in range(ROWS)]
    features = library.Features(
        image=library.Image(decode=False), grid=library.Array2D((2, 3), "float32")
    )
    grids = [np.full((2, 3), number, np.float32) for number in range(ROWS)]
    dataset = library.Dataset.from_dict({"image": images, "grid": grids}, features=features)
    dataset.save_to_disk(str(tmp_path / "saved"))
    ranges = own(files_of(library.load_from_disk(str(tmp_path / "saved")))[1])
    found = [content(ranges, row)[0] for row in range(ROWS)]
    assert found == [image["bytes"] for image in images]


def test_a_table_of_which_a_part_lies_in_memory(library: Any, tmp_path: Path) -> None:
    values = [os.urandom(100) for _ in range(ROWS)]
    on_disk = saved(library, tmp_path, {"value": values})
    added = on_disk.add_column("more", [os.urandom(90) for _ in range(ROWS)])
    ranges = own(files_of(added)[1])
    assert ranges.root == str(tmp_path)
    found = [content(ranges, row) for row in range(ROWS)]
    assert found == [[value, b""] for value in values]
    joined = library.concatenate_datasets([library.Dataset.from_dict({"value": values}), on_disk])
    ranges = own(files_of(joined)[1])
    assert [content(ranges, row) for row in range(ROWS)] == [[b""]] * ROWS
    assert [content(ranges, ROWS + row) for row in range(ROWS)] == [[value] for value in values]


def test_many_columns_alike(library: Any, tmp_path: Path) -> None:
    columns = {
        f"c{number}": [float(number * ROWS + row) for row in range(ROWS)] for number in range(20)
    }
    found = saved(library, tmp_path, {**columns, "label": [True] * ROWS})
    ranges = own(files_of(found)[1])
    for row in range(ROWS):
        numbers = [np.frombuffer(each, np.float64)[0] for each in content(ranges, row)[:20]]
        assert numbers == [columns[f"c{number}"][row] for number in range(20)]
    chosen = found.with_format("numpy", columns=["label"], output_all_columns=True)
    assert own(files_of(chosen)[1]).table[0].shape == (ROWS, 21)
    chosen = found.with_format("numpy", columns=["label"])
    assert own(files_of(chosen)[1]).table[0].shape == (ROWS, 1)


def test_batches_without_a_value(library: Any, tmp_path: Path) -> None:
    """Their arrays are empty, or lie nowhere."""
    lists = [[] if 7 <= row < 14 else [os.urandom(30 + row)] * 2 for row in range(ROWS)]
    texts = [None if row < 7 else os.urandom(50) for row in range(ROWS)]
    ranges = own(files_of(saved(library, tmp_path, {"a": lists, "b": texts}))[1])
    for row in range(ROWS):
        assert content(ranges, row) == [b"".join(lists[row]), texts[row] or b""]


def test_rows_in_memory(library: Any) -> None:
    with pytest.raises(Unreadable, match="lie in memory"):
        files_of(library.Dataset.from_dict({"x": list(range(ROWS))}))


def test_rows_in_files_that_are_on_no_mount(library: Any, tmp_path: Path) -> None:
    """Known at once, without a look at any of them."""
    found = saved(library, tmp_path, {"x": [b"x"] * ROWS})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "is_on_mount", lambda folder: mounts.find(folder) is not None)
        patch.setattr(tables, "_leaves", None)
        with pytest.raises(Unreadable, match=f"{tmp_path}, with rows .* is on no fusecache mount"):
            files_of(found)


# ---- how far ahead -------------------------------------------------------------------------------


def epoch_of(
    offsets: list[int] | npt.NDArray[Any], length: int, met: list[int] | None = None
) -> Epoch:
    count = len(offsets)
    ranges = Ranges(["/a/file"], [0] * count, offsets, [length] * count)
    return Epoch(ranges, np.arange(count), np.array(met or [], np.int64))


def test_the_first_range_of_a_block_counts_more() -> None:
    small = 1000
    offsets = [BLOCK_BYTES * number for number in range(100)]
    blocks = AHEAD_BYTES // (FIRST_BYTES + small)
    epoch = epoch_of(offsets, small)
    assert epoch.until(0) == blocks
    assert epoch.until(50) == 50 + blocks
    assert epoch_of(offsets, small, list(range(100))).until(0) == 100  # of an epoch before
    again = epoch_of(offsets[:5] * 20, small)
    assert again.until(0) == 100
    assert again.blocks.tolist() == list(range(5))


def test_a_sample_larger_than_that_is_asked_for_alone() -> None:
    epoch = epoch_of(list(range(5)), 2 * AHEAD_BYTES)
    assert [epoch.until(drawn) for drawn in range(7)] == [1, 2, 3, 4, 5, 5, 5]


def test_rows_of_one_group_cost_it_once() -> None:
    group, rows_of_group = AHEAD_BYTES // 4, 100
    epoch = epoch_of(np.repeat(np.arange(10) * group, rows_of_group), group)
    assert epoch.until(0) == AHEAD_BYTES // (group + FIRST_BYTES) * rows_of_group
    assert epoch.until(350) == 350 + 50 + 3 * rows_of_group


def test_ranges_of_a_sample_that_are_near_are_one() -> None:
    near = advice.NEAR_BYTES
    offsets = [[900_000, 0, 100 + near, 50, 0, 0], [0, 900_000 + near, 900_000, 0, 0, 0]]
    lengths = [[10, 100, 100, 20, 0, 0], [5, 20, 10, 5, 0, 7]]
    files = [[0] * 6, [1, 0, 0, 0, 0, 0]]
    epoch = Epoch(
        Ranges(["/a", "/b"], files, offsets, lengths), np.arange(2), np.zeros(0, np.int64)
    )
    assert epoch.ranges_of(0) == [(0, 0, 200 + near), (0, 900_000, 10)]
    assert epoch.ranges_of(1) == [(0, 0, 7), (0, 900_000, 20 + near), (1, 0, 5)]


# ---- a loader ------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    """Row i of a file of one's own."""

    def __init__(self, path: Path, count: int = ROWS, *, says: bool = True) -> None:
        self.path, self.count = path, count
        path.write_bytes(b"".join(bytes([number]) * 100 for number in range(count)))
        if says:
            self.__hintsd_paths__ = self.ranges

    def ranges(self) -> Ranges:
        offsets = np.arange(self.count) * 100
        return Ranges([self.path], [0] * self.count, offsets, [100] * self.count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), 100, index * 100)[50]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What the kernel is asked for: name, offset, length; all is as on a mount."""
    found: list[tuple[str, int, int]] = []

    def fadvise(descriptor: int, offset: int, length: int, what: int) -> None:
        assert what == os.POSIX_FADV_WILLNEED
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        found.append((name, offset, length))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    monkeypatch.setattr(advice, "check_mounted", lambda ranges: None)
    monkeypatch.setattr(warning, "_warned", set())
    return found


def is_asked(asked: list[tuple[str, int, int]], expected: list[tuple[str, int, int]]) -> None:
    def look() -> bool:
        assert asked == expected
        return True

    eventually(look, every_s=0.01)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["itself", "attach", "registered", "Subset", "ConcatDataset"])
def test_what_a_loader_reads_is_asked_for_in_its_order(
    tmp_path: Path, asked: list[tuple[str, int, int]], way: str, workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    rows_there = Rows(tmp_path / "a", says=way not in ("attach", "registered"))
    dataset: Any = rows_there
    if way == "registered":
        registry = functools.singledispatch(hintsd.paths_of.dispatch(object))
        registry.register(Rows, lambda dataset: dataset.ranges())
        monkeypatch.setattr("hintsd.client.known.extending.paths_of", registry)
    if way == "Subset":
        dataset = Subset(rows_there, list(range(30, 3, -1)))
    if way == "ConcatDataset":
        dataset = ConcatDataset([rows_there, Rows(tmp_path / "b", 10)])
    torch.manual_seed(1)
    plain = [value for batch in DataLoader(dataset, 8, shuffle=True) for value in batch.tolist()]
    torch.manual_seed(1)
    loader = DataLoader(dataset, 8, shuffle=True, num_workers=workers)
    job = hintsd.attach(loader, rows_there.ranges() if way == "attach" else None)
    assert (job.state, job.name) == ("hinted", None)
    assert job.stats() == {"ranges": 0, "bytes": 0}
    for number in range(2):
        batches = iter(loader)
        read = next(batches).tolist()
        eventually(lambda: len(asked) == len(dataset), every_s=0.01)  # all fits the window
        read += [value for batch in batches for value in batch.tolist()]
        assert number or read == plain
        files = ["a"] * len(read)
        if way == "ConcatDataset":  # rows of both begin with 0: as they were drawn
            files = [name for name, _, _ in asked]
            assert sorted(zip(files, read, strict=True)) == sorted(
                [("a", row) for row in range(ROWS)] + [("b", row) for row in range(10)]
            )
        assert asked == [(name, row * 100, 100) for name, row in zip(files, read, strict=True)]
        asked.clear()
    job.close()
    assert job.state == "over"
    assert [batch.tolist() for batch in loader]
    assert asked == []


def test_no_further_ahead_than_is_allowed(
    tmp_path: Path, asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advice, "AHEAD_BYTES", 600)
    monkeypatch.setattr(advice, "FIRST_BYTES", 0)
    loader = DataLoader(Rows(tmp_path / "a"), 4)
    with hintsd.attach(loader):
        batches = iter(loader)
        for number in range(3):
            next(batches)
            is_asked(asked, [("a", row * 100, 100) for row in range(4 * number + 6)])


def test_a_range_that_comes_again_at_once_is_asked_for_once(
    tmp_path: Path, asked: list[tuple[str, int, int]]
) -> None:
    """Rows of one group, each epoch; and a large one in pieces, from its end."""
    dataset = Rows(tmp_path / "a", 6)
    with dataset.path.open("rb+") as file:
        piece = advice.read_ahead_bytes(file.fileno())
        file.truncate(piece + 100)
    ranges = Ranges([dataset.path], [0] * 6, [0, 0, 0, 9, 9, 0], [100, 100, 100, 0, piece + 5, 100])
    loader = DataLoader(dataset, 3)
    with hintsd.attach(loader, ranges):
        for epoch in range(2):
            batches = iter(loader)
            next(batches)
            pieces = [("a", 9 + piece, 5), ("a", 9, piece)]
            is_asked(asked, [("a", 0, 100), *pieces, ("a", 0, 100)] * (epoch + 1))
            list(batches)


def is_asked_of_all(asked: list[tuple[str, int, int]], loader: Any, epochs: int) -> None:
    """All that each epoch reads, while its first batch is looked at."""
    for _ in range(epochs):
        asked.clear()
        batches = iter(loader)
        read = next(batches).tolist()
        eventually(lambda: len(asked) == ROWS, every_s=0.01)
        read += [value for batch in batches for value in batch.tolist()]
        assert asked == [("a", row * 100, 100) for row in read]


@pytest.mark.filterwarnings("ignore:hintsd. ImportanceSampler")  # nothing is learned
@pytest.mark.parametrize("draw_ahead", [0, 1])
def test_orders_that_are_told_an_epoch_ahead(
    tmp_path: Path, asked: list[tuple[str, int, int]], draw_ahead: int
) -> None:
    dataset = Rows(tmp_path / "a")
    sampler = hintsd.ImportanceSampler(dataset, scheme="icache", fraction=1, draw_ahead=draw_ahead)
    loader: Any = DataLoader(dataset, 8, sampler=sampler)
    with hintsd.attach(loader):
        is_asked_of_all(asked, loader, 3)


def test_what_the_reader_has_passed_is_not_asked_for(
    tmp_path: Path, asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, may_go, plain = Rows(tmp_path / "a"), threading.Event(), os.posix_fadvise

    def slow(*arguments: Any) -> None:
        plain(*arguments)
        may_go.wait()

    monkeypatch.setattr(os, "posix_fadvise", slow)
    loader = DataLoader(dataset, 4)
    with hintsd.attach(loader):
        batches = iter(loader)
        next(batches)
        eventually(lambda: len(asked) == 1, every_s=0.01)
        for _ in range(7):  # 32 were drawn, and 28 handed out
            next(batches)
        may_go.set()
        is_asked(asked, [("a", row * 100, 100) for row in [0, *range(28, ROWS)]])
        assert descriptors(dataset.path) == 0


def descriptors(path: Path) -> int:
    def count() -> int:
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(os.path.realpath(link) == str(path) for link in links)

    eventually(lambda: count() == 0, every_s=0.01)
    return count()


@pytest.mark.parametrize("is_batched", [False, True])
def test_it_is_ahead_of_what_workers_are_given(
    tmp_path: Path, asked: list[tuple[str, int, int]], is_batched: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(advice, "AHEAD_BYTES", 400)
    monkeypatch.setattr(advice, "FIRST_BYTES", 0)
    dataset = Rows(tmp_path / "a")
    batching: Any = (
        {"batch_sampler": [list(range(first, first + 4)) for first in range(0, ROWS, 4)]}
        if is_batched
        else {"batch_size": 4}
    )
    loader: Any = DataLoader(dataset, num_workers=2, **batching)
    with hintsd.attach(loader):
        batches = iter(loader)
        next(batches)
        # Four batches are with the workers, one was handed out.
        eventually(lambda: len(asked) >= 4 * 4 + 4, every_s=0.01)
        list(batches)


def test_a_file_that_goes_is_one_warning(tmp_path: Path, asked: list[tuple[str, int, int]]) -> None:
    dataset = Rows(tmp_path / "a")
    ranges = Ranges([tmp_path / "gone"], [0] * ROWS, [0] * ROWS, [1] * ROWS)
    loader = DataLoader(dataset, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = hintsd.attach(loader, ranges)
        batches = iter(loader)
        read = next(batches).tolist()
        eventually(lambda: job.is_over)
        read += [row for batch in batches for row in batch.tolist()]
        assert read == list(range(ROWS))
        assert [row for batch in loader for row in batch.tolist()] == list(range(ROWS))
    said = [str(one.message) for one in caught]
    path = tmp_path / "gone"
    assert said == [f"hintsd: {path}: No such file or directory; going on without hints"]
    assert job.state == "over"
    assert job.why in said[0]


def test_ranges_that_a_file_does_not_have(
    tmp_path: Path, asked: list[tuple[str, int, int]]
) -> None:
    dataset = Rows(tmp_path / "a", says=False)
    ranges = Ranges(
        [dataset.path], [[0, 0]] * ROWS, [[0, 90 * row] for row in range(ROWS)], [[1, 500]] * ROWS
    )
    line = f"sample 39 reaches to byte 4,010 of {tmp_path}/a, which has 4,000"
    assert ROWS == 40
    loader = DataLoader(dataset, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = hintsd.attach(loader, ranges)
        eventually(lambda: job.is_over)
    assert [str(one.message) for one in caught] == [f"hintsd: {line}; going on without hints"]
    with pytest.raises(advice.Wrong, match=line):
        advice.check_files(ranges)


def test_rows_that_are_told_as_whole_files(
    tmp_path: Path, fake_hintsd: FakeHintsd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warning, "_warned", set())
    files = Rows(tmp_path / "a", 60, says=False)
    files.__hintsd_paths__ = [str(files.path)] * 60  # type: ignore[assignment]  # or a method
    with pytest.warns(RuntimeWarning, match="60 samples of a Rows name 1 files.*hintsd.rows_of"):
        files_of(files)
    warning._warned.clear()
    files.__hintsd_paths__ = [str(tmp_path / str(row % 2)) for row in range(60)]  # type: ignore[assignment]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        files_of(files)


def test_what_was_asked_for_is_told(tmp_path: Path, asked: list[tuple[str, int, int]]) -> None:
    loader = DataLoader(Rows(tmp_path / "a"), 8)
    with hintsd.attach(loader) as job:
        next(iter(loader))
        eventually(lambda: len(asked) == ROWS, every_s=0.01)
        assert job.stats() == {"ranges": ROWS, "bytes": ROWS * 100}


def test_what_is_on_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warning, "_warned", set())
    dataset = Rows(tmp_path / "a")
    with pytest.warns(RuntimeWarning, match="is not on a fusecache mount") as caught:
        job = hintsd.attach(DataLoader(dataset, 8))
    assert len(caught) == 1
    assert job.is_over
    with pytest.raises(NotMounted):
        advice.check_mounted(dataset.ranges())


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda rows: rows.ranges().select([0, 1]), "2 ranges for a Rows of 40 samples"),
        (lambda rows: Ranges(["a"], [0], [-1], [1]), "offsets must be 0 or more"),
    ],
)
def test_a_dataset_that_says_nonsense(
    tmp_path: Path, wrong: Callable[[Rows], Ranges], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warning, "_warned", set())
    dataset = Rows(tmp_path / "a", says=False)
    dataset.__hintsd_paths__ = functools.partial(wrong, dataset)
    with pytest.warns(RuntimeWarning, match=why) as caught:
        job = hintsd.attach(DataLoader(dataset, 8))
    assert len(caught) == 1
    assert job.is_over
    with pytest.raises(ValueError, match="2 paths for a dataset of 40 samples"):
        hintsd.attach(DataLoader(dataset, 8), dataset.ranges().select([0, 1]))


def test_files_and_ranges_in_one_dataset(tmp_path: Path) -> None:
    files = Rows(tmp_path / "b", 3, says=False)
    files.__hintsd_paths__ = [str(tmp_path / "b")] * 3  # type: ignore[assignment]  # or a method
    with pytest.raises(Unreadable, match="samples that are files, and such that are not"):
        files_of(ConcatDataset([Rows(tmp_path / "a"), files]))


def test_a_map_is_no_dataset_in_memory(tmp_path: Path) -> None:
    class Mapped(Dataset[Any]):
        def __init__(self) -> None:
            np.save(tmp_path / "rows.npy", np.zeros((ROWS, 3)))
            self.data = np.load(tmp_path / "rows.npy", mmap_mode="r")

        def __len__(self) -> int:
            return ROWS

    assert not is_in_memory(Mapped())


@pytest.mark.parametrize("kind", [list, np.array, iter])
def test_paths_of_any_kind(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    """As before there were ranges."""
    loader = DataLoader(Rows(tmp_path / "a", 3), 1)
    with pytest.raises(ValueError, match="2 paths for a dataset of 3 samples"):
        hintsd.attach(loader, kind(["x", "y"]))
    with pytest.raises(ValueError, match="paths must be a sequence of paths"):
        hintsd.attach(loader, tmp_path)  # type: ignore[arg-type]  # no sequence of them


def test_it_is_foretold(tmp_path: Path, asked: list[tuple[str, int, int]]) -> None:
    found = loaders.foretell(DataLoader(Rows(tmp_path / "a"), 8, shuffle=True))
    assert isinstance(found, loaders.Readable)
    assert isinstance(found.ways, Ranges)
    assert found.root == str(tmp_path)


def test_a_loader_that_is_gone_is_let_go_of(
    tmp_path: Path, asked: list[tuple[str, int, int]]
) -> None:
    dataset = Rows(tmp_path / "a", says=False)
    loader: Any = DataLoader(dataset, 8, shuffle=True)
    job = weakref.ref(hintsd.attach(loader, dataset.ranges()))
    assert list(loader)
    held = weakref.ref(dataset)
    del loader, dataset
    gc.collect()
    assert held() is None
    assert job() is None
