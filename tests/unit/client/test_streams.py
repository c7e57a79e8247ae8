"""attach and streamed datasets of the library `datasets`: the files that are announced are those
that the loader's processes open, in that order. The library itself is used."""

from __future__ import annotations

import functools
import io
import os
import random
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import h5py  # type: ignore[import-untyped]  # noqa: E402  (no types; torch may be missing)
from torch.utils.data import DataLoader  # noqa: E402  (torch may be missing)

import hintsd  # noqa: E402
from hintsd.client import loaders  # noqa: E402
from hintsd.client.known.extending import Unreadable  # noqa: E402
from hintsd.client.known.shards import ShardOrder  # noqa: E402
from tests.support.fake_hintsd import FakeHintsd  # noqa: E402
from tests.support.shard_orders import announced  # noqa: E402

FILES = 8
ROWS = 4  # of each file
EPOCHS = 3


@pytest.fixture(autouse=True)
def daemon(fake_hintsd: FakeHintsd) -> FakeHintsd:
    return fake_hintsd


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """It asks no server, and keeps what it keeps here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        import datasets  # type: ignore[import-untyped]  # it has no types

        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # seconds an epoch
        datasets.disable_progress_bars()
        yield datasets


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, library: Any) -> list[str]:
    """Parquet files: a row says which file it is of."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(FILES):
        rows = library.Dataset.from_dict({"file": [number] * ROWS})
        rows.to_parquet(folder / f"{number}.parquet")
    return [str(path) for path in sorted(folder.iterdir())]


class Opened:
    """Which of some files are opened, and by which process, in forked ones, too."""

    def __init__(self) -> None:
        self._log: int | None = None
        self._watched: frozenset[str] = frozenset()
        sys.addaudithook(self._note)  # for good

    def watch(self, log: Path, files: list[str]) -> None:
        self.forget()
        self._watched = frozenset(files)
        self._log = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def forget(self) -> None:
        if self._log is not None:
            os.close(self._log)
        self._log = None

    def taken(self) -> dict[int, list[str]]:
        """Of each process, since the last time; what is opened twice in a row counts once."""
        assert self._log is not None
        found: dict[int, list[str]] = {}
        for line in os.pread(self._log, 1 << 20, 0).decode().splitlines():
            pid, _, file = line.partition(" ")
            of_process = found.setdefault(int(pid), [])
            if of_process[-1:] != [file]:
                of_process.append(file)
        os.ftruncate(self._log, 0)
        return found

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._log is not None and event == "open" and arguments[0] in self._watched:
            os.write(self._log, f"{os.getpid()} {arguments[0]}\n".encode())


_opened = Opened()


@pytest.fixture
def opened(tmp_path: Path, files: list[str]) -> Iterator[Opened]:
    _opened.watch(tmp_path / "opened", files)
    yield _opened
    _opened.forget()


def _streamed(files: list[str]) -> Any:
    import datasets

    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def _itself(sample: Any) -> Any:
    return sample


def _of_rank(files: list[str], rank: int, ranks: int) -> Any:
    from datasets.distributed import (  # type: ignore[import-untyped]  # as above
        split_dataset_by_node,
    )

    data = _streamed(files).shuffle(seed=2, buffer_size=4, max_buffer_input_shards=1)
    return split_dataset_by_node(data, rank, ranks)


def _joined(files: list[str]) -> Any:
    import datasets

    return datasets.concatenate_datasets([_streamed(files[:3]), _streamed(files[3:])])


TOGETHER = {"shuffled": FILES, "three at a time": 3, "joined and shuffled": 2}
"""How many files a process reads in turns: the order among these is not known."""
DATASETS: dict[str, Callable[[list[str]], Any]] = {
    "in order": _streamed,
    "shuffled": lambda files: _streamed(files).shuffle(seed=1, buffer_size=ROWS),
    "three at a time": lambda files: _streamed(files).shuffle(
        seed=1, buffer_size=6, max_buffer_input_shards=3
    ),
    "one at a time": lambda files: _streamed(files).shuffle(
        seed=1, buffer_size=3, max_buffer_input_shards=1
    ),
    "mapped": lambda files: (
        _streamed(files).map(_itself).filter(bool).select_columns(["file"]).with_format("torch")
    ),
    "skipped": lambda files: _streamed(files).skip(2),
    "repeated": lambda files: _streamed(files).repeat(2),
    "joined": _joined,
    "joined and shuffled": lambda files: _joined(files).shuffle(
        seed=3, buffer_size=4, max_buffer_input_shards=2
    ),
    "rank of two": lambda files: _of_rank(files, 1, 2),
    "rank of three, which reads all": lambda files: _of_rank(files, 1, 3),
    "rank of four": lambda files: _of_rank(files, 3, 4),
}


def _loader(data: Any, workers: int, *, persistent: bool = False) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_size=2,
        collate_fn=_itself,
        num_workers=workers,
        persistent_workers=persistent,
    )


@pytest.mark.claim("P4")
@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_files_are_opened_as_announced(
    daemon: FakeHintsd, files: list[str], opened: Opened, kind: str, workers: int, persistent: bool
) -> None:
    """What is read is what is read without us, too, and the generators stand as they would."""
    results = []
    for is_hinted in (False, True):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        data = DATASETS[kind](files)
        loader = _loader(data, workers, persistent=persistent)
        job = hintsd.attach(loader) if is_hinted else None
        opened.taken()
        read, of_epochs = [], []
        for epoch in range(EPOCHS):
            data.set_epoch(epoch)
            read.append([int(sample["file"]) for batch in loader for sample in batch])
            of_epochs.append(opened.taken())
        generators = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
        results.append((read, str(generators)))
        if job is None:
            continue
        for epoch, order in announced(daemon, job, files, EPOCHS).items():
            by_process = of_epochs[epoch].values()
            assert sorted(order) == sorted(file for some in by_process for file in some)
            for some in by_process:
                told = [file for file in order if file in some]
                assert sorted(told) == sorted(some)
                assert all(
                    abs(told.index(file) - number) < TOGETHER[kind]
                    for number, file in enumerate(some)
                    if kind in TOGETHER
                )
                assert kind in TOGETHER or told == some
    assert results[0] == results[1]


def _write_tar(path: Path, rows: int) -> None:
    with tarfile.open(path, "w") as tar:
        for row in range(rows):
            member = tarfile.TarInfo(f"{row}.txt")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))


@pytest.mark.parametrize("kind", ["json", "csv", "text", "arrow", "hdf5", "webdataset"])
def test_other_formats(
    daemon: FakeHintsd, opened: Opened, library: Any, tmp_path: Path, kind: str
) -> None:
    suffix = "tar" if kind == "webdataset" else kind
    paths = [tmp_path / f"{number}#a?b.{suffix}" for number in range(FILES)]
    for number, path in enumerate(paths):
        rows = library.Dataset.from_dict({"text": [str(number)] * ROWS})
        if kind == "arrow":
            saved = tmp_path / f"saved{number}"
            rows.save_to_disk(saved)
            (saved / "data-00000-of-00001.arrow").rename(path)
        elif kind == "text":
            path.write_text(f"{number}\n" * ROWS)
        elif kind == "hdf5":
            with h5py.File(path, "w") as file:
                file["text"] = [number] * ROWS
        elif kind == "webdataset":
            _write_tar(path, ROWS)
        else:
            getattr(rows, f"to_{kind}")(path)
    names = [str(path) for path in paths]
    data = library.load_dataset(kind, data_files=names, split="train", streaming=True)
    data = data.shuffle(seed=4, max_buffer_input_shards=1)
    loader = _loader(data, 0)
    job = hintsd.attach(loader)
    opened.watch(tmp_path / "log", names)
    for _ in range(EPOCHS):
        assert sum(len(batch) for batch in loader) == FILES * ROWS
    [order] = opened.taken().values()
    orders = announced(daemon, job, names, EPOCHS)
    assert orders[EPOCHS - 1] == order[-FILES:]
    assert order[:FILES] == order[-FILES:] != names


def test_a_stateful_loader_goes_on_amid_an_epoch(daemon: FakeHintsd, files: list[str]) -> None:
    """Its epoch is announced whole; what is read is what is left."""
    loaders_of_torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        data = _streamed(files).shuffle(seed=1, max_buffer_input_shards=1, buffer_size=1)
        return loaders_of_torchdata.StatefulDataLoader(data, batch_size=2, collate_fn=_itself)

    whole = [sample["file"] for batch in make() for sample in batch]
    first = make()
    batches = iter(first)
    read = [next(batches) for _ in range(5)]
    second = make()
    second.load_state_dict(first.state_dict())
    job = hintsd.attach(second)
    read += list(second)
    assert [sample["file"] for batch in read for sample in batch] == whole
    names = [os.path.basename(path) for path in announced(daemon, job, files, 1)[0]]
    assert names == [f"{number}.parquet" for number in dict.fromkeys(whole)]


def _names(daemon: FakeHintsd, name: str | None) -> bool:
    return any(told.name == name for told in daemon.jobs)


def test_hintsd_is_told_how_many_are_read_together(daemon: FakeHintsd, files: list[str]) -> None:
    """A worker shuffles rows of several files: it reads these in turns."""
    for most, workers, together in ((1, 0, 1), (3, 0, 3), (3, 2, 6), (10, 2, 8), (10, 0, 8)):
        shuffled = _streamed(files).shuffle(seed=1, max_buffer_input_shards=most)
        loader = _loader(shuffled, workers)
        job = hintsd.attach(loader)
        list(loader)
        names = functools.partial(_names, daemon, job.name)
        daemon.wait(names)
        assert (
            next(told for told in daemon.jobs if told.name == job.name).job["workers"] == together
        )
        job.close()


def test_explain_tells_of_files(files: list[str]) -> None:
    data = _streamed(files).shuffle(seed=1)
    node = data._ex_iterable
    before = _states(node)
    found = loaders.foretell(_loader(data, 2))
    assert isinstance(found, loaders.Readable)
    assert isinstance(found.source, ShardOrder)
    assert found.source.described == "the order of the shards of IterableDataset"
    assert data._ex_iterable is node
    assert _states(node) == before


def _states(node: Any) -> list[int]:
    """Which objects say how far what is there has been read."""
    below = _states(node.ex_iterable) if hasattr(node, "ex_iterable") else []
    return [id(node._state_dict), *below]


def _rows(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        yield {"file": file}


def _generated(files: list[str]) -> Any:
    import datasets

    return datasets.IterableDataset.from_generator(_rows, gen_kwargs={"files": files})


def _interleaved(files: list[str]) -> Any:
    import datasets

    return datasets.interleave_datasets([_streamed(files[:3]), _streamed(files[3:])])


def _of_rows(files: list[str]) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"x": [0] * 8}).to_iterable_dataset(num_shards=2)


REFUSED: dict[str, tuple[Callable[[list[str]], Any], str]] = {
    "cut": (lambda files: _streamed(files).take(3), "TakeExamplesIterable"),
    "interleaved": (_interleaved, "CyclingMultiSourcesExamplesIterable"),
    "generated": (_generated, "is not known"),
    "rows in memory": (_of_rows, "is not known"),
    "many joined": (lambda files: _joined(files * 40), "more than 256"),
    "remote": (lambda files: _moved(_streamed(files), "s3://bucket/0"), "no file: s3://bucket/0"),
}


def _moved(data: Any, url: str) -> Any:
    data._ex_iterable.kwargs["files"] = [url]
    return data


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_is_not_announced(files: list[str], kind: str) -> None:
    make, why = REFUSED[kind]
    loader = _loader(make(files), 0)
    with pytest.raises(Unreadable, match=why):
        loaders.foretell(loader)
    with pytest.warns(RuntimeWarning, match=why):
        assert hintsd.attach(loader).is_over


def test_a_class_of_ones_own_is_not_taken_for_the_library_s(files: list[str]) -> None:
    import datasets

    class Own(datasets.IterableDataset):  # type: ignore[misc]  # it has no types
        pass

    data = _streamed(files)
    data.__class__ = Own
    with pytest.raises(Unreadable, match="no indices"):
        loaders.foretell(_loader(data, 0))
