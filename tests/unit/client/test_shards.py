"""attach and WebDatasets: the shards that are announced are those that the workers open, in that
order. The library itself is used."""

from __future__ import annotations

import copy
import io
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import webdataset  # type: ignore[import-untyped]  # noqa: E402  (no types; torch may be missing)
from torch.utils.data import DataLoader, get_worker_info  # noqa: E402  (it may be missing)

import hintsd  # noqa: E402
from hintsd.client import loaders  # noqa: E402
from hintsd.client.known.extending import Unreadable  # noqa: E402
from hintsd.client.known.shards import ShardOrder  # noqa: E402
from tests.support.fake_hintsd import FakeHintsd  # noqa: E402
from tests.support.shard_orders import announced  # noqa: E402

SHARDS = 7
EPOCHS = 3


@pytest.fixture(autouse=True)
def daemon(fake_hintsd: FakeHintsd) -> FakeHintsd:
    return fake_hintsd


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Tar files of one sample each: what a loader gives out is the order in which it opens them."""
    folder = tmp_path_factory.mktemp("shards")
    for number in range(SHARDS):
        with tarfile.open(folder / f"{number:03d}.tar", "w") as tar:
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    return [str(path) for path in sorted(folder.iterdir())]


def _itself(sample: Any) -> Any:
    return sample


def _loader(data: Any, workers: int = 0, *, persistent: bool = False) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_size=None,
        collate_fn=_itself,
        num_workers=workers,
        persistent_workers=persistent,
    )


def _web(shards: list[str], **options: Any) -> Any:
    return webdataset.WebDataset(shards, **{"shardshuffle": False, "empty_check": False, **options})


def _own_pipeline(shards: list[str]) -> Any:
    return webdataset.DataPipeline(
        webdataset.SimpleShardList(shards, seed=5),
        webdataset.split_by_worker,
        webdataset.detshuffle(100, seed=3),
        webdataset.tarfile_to_samples(),
    )


DATASETS: dict[str, Callable[[list[str]], Any]] = {
    "in order": _web,
    "one seed": lambda shards: _web(shards, shardshuffle=100, seed=1),
    "by epoch": lambda shards: _web(shards, shardshuffle=100, seed=1, detshuffle=True),
    "small buffer": lambda shards: _web(shards, shardshuffle=2, seed=1, detshuffle=True),
    "no splitter": lambda shards: _web(shards, shardshuffle=9, seed=1, workersplitter=None),
    "own pipeline": _own_pipeline,
    "file URLs": lambda shards: _web([f"file:{shard}" for shard in shards]),
    "one shard twice": lambda shards: _web([*shards, shards[2]]),
    "shuffled samples": lambda shards: _web(shards, shardshuffle=9, seed=1).to_tuple("__url__"),
}


def _opened(loader: Iterable[Any]) -> list[str]:
    """Shards, in the order of their samples."""
    urls = (sample["__url__"] if isinstance(sample, dict) else sample[0] for sample in loader)
    return [url[len("file:") :] if url.startswith("file:") else url for url in urls]


def _check_announced(
    daemon: FakeHintsd, job: hintsd.Job, shards: list[str], read: list[list[str]]
) -> None:
    for epoch, order in announced(daemon, job, shards, EPOCHS).items():
        assert order == read[epoch]


@pytest.mark.claim("P3")
@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (3, False), (3, True)])
def test_shards_are_opened_as_announced(
    daemon: FakeHintsd, shards: list[str], kind: str, workers: int, persistent: bool
) -> None:
    """What is read is what is read without us, too, and the generators stand as they would."""
    results = []
    for is_hinted in (False, True):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(3)
        loader = _loader(DATASETS[kind](shards), workers, persistent=persistent)
        job = hintsd.attach(loader) if is_hinted else None
        read = [_opened(loader) for _ in range(EPOCHS)]
        generators = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()
        results.append((read, str(generators)))
        if job is not None:
            _check_announced(daemon, job, shards, read)
    assert results[0] == results[1]


def test_each_rank_reads_its_own(
    daemon: FakeHintsd, shards: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        data = _web(shards, nodesplitter=webdataset.split_by_node, seed=1, shardshuffle=9)
        loader = _loader(data, 2)
        job = hintsd.attach(loader)
        read = [_opened(loader) for _ in range(EPOCHS)]
        assert len(read[0]) in (SHARDS // 2, SHARDS - SHARDS // 2)
        _check_announced(daemon, job, shards, read)


def test_an_epoch_of_so_many_samples_may_begin_anew_within(
    daemon: FakeHintsd, shards: list[str]
) -> None:
    """Two passes over the shards are announced: where the epoch ends is not known."""
    loader = _loader(_web(shards, shardshuffle=9, seed=1, detshuffle=True).with_epoch(SHARDS + 2))
    job = hintsd.attach(loader)
    read = [_opened(loader) for _ in range(EPOCHS)]
    for epoch, order in announced(daemon, job, shards, EPOCHS).items():
        assert len(order) == 2 * SHARDS
        assert order[: SHARDS + 2] == read[epoch]


def test_batches_of_samples(daemon: FakeHintsd, shards: list[str]) -> None:
    """Where a DataLoader makes batches its sampler is drawn once a sample: that tells nothing."""
    loader = DataLoader(_web(shards), batch_size=2, collate_fn=_itself)
    job = hintsd.attach(loader)
    assert hintsd.attach(loader) is job
    read = [_opened(sample for batch in loader for sample in batch) for _ in range(EPOCHS)]
    _check_announced(daemon, job, shards, read)
    told = next(told for told in daemon.jobs if told.name == job.name)
    assert {place for _, place in told.steps} == {0}


def test_explain_tells_of_shards(shards: list[str]) -> None:
    found = loaders.foretell(_loader(_web(shards)))
    assert isinstance(found, loaders.Readable)
    assert isinstance(found.source, ShardOrder)
    assert found.source.described == "the order of the shards of WebDataset"
    assert get_worker_info() is None


class _Own(webdataset.WebDataset):  # type: ignore[misc]  # it has no types
    def iterator1(self) -> Iterator[Any]:
        return reversed(list(super().iterator1()))  # type: ignore[no-any-return]  # as above


def _every_second(source: Iterable[Any]) -> Iterator[Any]:
    yield from list(source)[::2]


REFUSED: dict[str, tuple[Callable[[list[str], Path], Any], str]] = {
    "own copies": (lambda shards, tmp: _web(shards, cache_dir=str(tmp)), "keeps copies"),
    "drawn anew": (lambda shards, tmp: _web(shards, resampled=True), "ResampledShards"),
    "no seed": (
        lambda shards, tmp: webdataset.DataPipeline(
            webdataset.SimpleShardList(shards),
            webdataset.shuffle(9),
            webdataset.tarfile_to_samples(),
        ),
        "no seed",
    ),
    "own splitter": (lambda shards, tmp: _web(shards, nodesplitter=_every_second), "_every_second"),
    "own class": (lambda shards, tmp: _Own(shards, shardshuffle=False), "IterableDataset"),
    "pipe": (lambda shards, tmp: _web(["pipe:cat /x.tar"]), "no file: pipe:cat /x.tar"),
    "no opener": (
        lambda shards, tmp: webdataset.DataPipeline(webdataset.SimpleShardList(shards)),
        "opens shards",
    ),
    "nothing": (lambda shards, tmp: webdataset.DataPipeline(), "nothing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_known_is_not_announced(shards: list[str], tmp_path: Path, kind: str) -> None:
    make, why = REFUSED[kind]
    loader = _loader(make(shards, tmp_path))
    with pytest.raises(Unreadable, match=why):
        loaders.foretell(loader)
    with pytest.warns(RuntimeWarning, match=why):
        assert hintsd.attach(loader).is_over


def test_workers_that_go_on_in_an_epoch_without_a_known_end(shards: list[str]) -> None:
    data = _web(shards, shardshuffle=9, seed=1, detshuffle=True).with_epoch(SHARDS + 2)
    with pytest.raises(Unreadable, match="with_epoch"):
        loaders.foretell(_loader(data, 2, persistent=True))


def test_workers_that_have_begun_already(shards: list[str]) -> None:
    data = _web(shards, shardshuffle=9, seed=1, detshuffle=True)
    loader = _loader(data, 2, persistent=True)
    assert len(_opened(loader)) == SHARDS
    with pytest.raises(Unreadable, match="attach it before the first"):
        loaders.foretell(loader)


def test_paths_are_of_indices(shards: list[str]) -> None:
    with pytest.warns(RuntimeWarning, match="no indices"):
        assert hintsd.attach(_loader(_web(shards)), paths=shards).is_over


class _Renamed:
    """Looks like one of webdataset's stages, and is none."""

    def __init__(self) -> None:
        self.f = webdataset.split_by_worker

    def __call__(self, source: Iterable[Any]) -> Iterator[Any]:
        raise AssertionError


def test_what_looks_like_a_known_stage_is_not_run(shards: list[str]) -> None:
    with pytest.raises(Unreadable, match="_Renamed"):
        loaders.foretell(_loader(_web(shards, nodesplitter=_Renamed())))


def test_an_order_that_cannot_be_computed_costs_the_hints_alone(
    daemon: FakeHintsd, shards: list[str]
) -> None:
    data = _web(shards)
    loader = _loader(data)
    job = hintsd.attach(loader)
    data.pipeline[0] = copy.copy(data.pipeline[0])
    data.pipeline[0].urls = [*shards, "/elsewhere/007.tar"]  # it was not there when it was attached
    read = iter(loader)
    with pytest.warns(RuntimeWarning, match="shards of WebDataset cannot be told"):
        assert next(read)["__url__"] == shards[0]
    daemon.wait(lambda: job.is_over)
