"""Which shards a DataLoader of a WebDataset reads, and in which order: computed as an epoch begins,
by copies of the stages that name them.

A pipeline begins with stages that give out shards (a list, splitters, a shuffle of it). The first
one that opens them ends that part. Each worker runs all of it, so it is run here once a worker.
Workers take turns (a DataLoader's batches do), and are taken to read their shards equally fast.

INVARIANT: the dataset and all global generators stay as they are. Exactly these stages are meant:
another one may do anything.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlparse

from hintsd.client.client import explicit_order, tidy_paths
from hintsd.client.known.extending import NO_INDICES, Unreadable, class_name

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from hintsd.orders.spec import OrderSpec

_PIPELINE: Final = "webdataset.pipeline.DataPipeline"
_HOLDER: Final = "webdataset.filters.FilterFunction"
_LIST: Final = "webdataset.shardlists.SimpleShardList"
_SHUFFLE: Final = "webdataset.filters._shuffle"
_SPLITTERS: Final = {
    "webdataset.shardlists.single_node_only",
    "webdataset.shardlists.split_by_node",
    "webdataset.shardlists.split_by_worker",
}
_EPOCH_SHUFFLE: Final = "webdataset.filters.detshuffle"
_OPENERS: Final = {"webdataset.cache.StreamingOpen", "webdataset.tariterators.tarfile_samples"}
_COPYING_OPENER: Final = "webdataset.cache.FileCache"
PASSES_MOST: Final = 2  # over the shards in an epoch that ends nobody knows where


class ShardOrder:
    """The shards of a DataLoader, epoch by epoch."""

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        """`sampler`: what tells the loader to draw. Unreadable: it is no WebDataset of files, or
        which shards it reads when is not known.
        """
        dataset: Any = loader.dataset
        self.sampler, self.dataset = sampler, dataset
        kinds = {class_name(kind): kind for kind in type(dataset).__mro__}
        if _PIPELINE not in kinds or not _iterates_as(type(dataset), kinds[_PIPELINE]):
            raise Unreadable(NO_INDICES)
        stages = _naming(dataset.pipeline)
        self._workers = loader.num_workers
        self._goes_on = loader.persistent_workers
        if self._goes_on and any(class_name(type(stage)) == _EPOCH_SHUFFLE for stage in stages):
            _check_epochs(loader, dataset.repetitions)
        urls = list(dict.fromkeys(stages[0].urls))
        self.paths = _paths(urls)
        self._number = {url: number for number, url in enumerate(urls)}
        self._copies: dict[int, list[Any]] = {}  # of the workers that go on
        self.epoch = 0
        """The next one."""

    @property
    def described(self) -> str:
        """For `hintsd explain`."""
        return f"the order of the shards of {type(self.dataset).__name__}"

    @property
    def at_once(self) -> int:
        """Shards that are read together."""
        return max(1, self._workers)

    def begun(self) -> OrderSpec:
        """The order of the epoch that begins now. Exception: `untold` says why there is none."""
        of_each = [self._of_worker(number) for number in range(self.at_once)]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*of_each))
        order = [self._number[url] for url in turns if url is not None]
        return explicit_order(order, self.epoch, 1, False, len(self.paths))

    def begin(self, epoch: int) -> None:
        """This epoch is read now."""
        self.epoch = epoch + 1

    def untold(self, error: Exception) -> str:
        return f"{self.described} cannot be told ({error!r})"

    def _of_worker(self, number: int) -> list[str]:
        stages = self._copies.get(number) or copy.deepcopy(_naming(self.dataset.pipeline))
        if self._goes_on:
            self._copies[number] = stages
        found: list[str] = []
        with _as_worker(number, self._workers, self.dataset):
            for _ in range(min(self.dataset.repetitions, PASSES_MOST)):
                shards: Any = iter(stages[0])
                for stage in stages[1:]:
                    shards = stage.run(shards) if hasattr(stage, "run") else stage(shards)
                found += [shard["url"] for shard in shards]
        return found


def _check_epochs(loader: DataLoader[Any], repetitions: int) -> None:
    """Of workers that go on, and shuffle by an epoch that they count. Unreadable."""
    why = ""
    if repetitions > 1:
        why = "where an epoch of this WebDataset ends is not known (with_epoch, repeat)"
    elif getattr(loader, "_iterator", None) is not None:
        why = "how many epochs its workers have begun is not known (attach it before the first)"
    if why:
        raise Unreadable(f"{why}, and so is the next one's order (detshuffle, persistent_workers)")


def _iterates_as(kind: type, base: type) -> bool:
    names = ("__iter__", "iterator", "iterator1", "invoke")
    return all(getattr(kind, name) is getattr(base, name) for name in names)


def _naming(pipeline: list[Any]) -> list[Any]:
    """The stages before the one that opens what they name. Unreadable."""
    if not pipeline or class_name(type(pipeline[0])) != _LIST:
        kind = type(pipeline[0]).__name__ if pipeline else "nothing"
        raise Unreadable(f"which shards come next cannot be told of a {kind}")
    for number, stage in enumerate(pipeline[1:], 1):
        name = _stage_name(stage)
        if name in _OPENERS:
            return pipeline[:number]
        if name == _COPYING_OPENER:
            raise Unreadable("this WebDataset keeps copies of its shards (cache_dir)")
        if name == _SHUFFLE and not _is_seeded(stage):
            raise Unreadable("the shuffle of the shards has no seed: WebDataset(…, seed=…)")
        if name not in (*_SPLITTERS, _SHUFFLE, _EPOCH_SHUFFLE):
            raise Unreadable(f"what {name} does to the list of shards is not known")
    raise Unreadable("nothing of this pipeline opens shards")


def _stage_name(stage: Any) -> str:
    """Of what it runs: a class, or a function (webdataset's FilterFunction holds one)."""
    function = stage.f if class_name(type(stage)) == _HOLDER else stage
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _is_seeded(shuffle: Any) -> bool:
    """`args` and `kw`: of _shuffle(data, bufsize, initial, rng, seed, handler)."""
    seed = shuffle.args[3] if len(shuffle.args) > 3 else shuffle.kw.get("seed")
    return seed is not None


def _paths(urls: list[str]) -> list[str]:
    """Absolute and tidy. Unreadable: a URL is no path."""
    parsed = [urlparse(url) for url in urls]
    strange = next((found for found in parsed if found.scheme not in ("", "file")), None)
    if strange is not None:
        raise Unreadable(f"a shard of this WebDataset is no file: {strange.geturl()}")
    return tidy_paths([found.path for found in parsed], os.getcwd())


@contextmanager
def _as_worker(number: int, workers: int, dataset: Any) -> Iterator[None]:
    """torch says that this is a DataLoader's worker; with 0 `workers`, that it is none."""
    from torch.utils.data._utils import worker

    known = worker._worker_info
    if workers:
        worker._worker_info = worker.WorkerInfo(
            id=number, num_workers=workers, seed=0, dataset=dataset
        )
    try:
        yield
    finally:
        worker._worker_info = known
