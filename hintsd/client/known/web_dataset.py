"""Which shards a DataLoader of a WebDataset reads, and in which order: said by copies of the stages
that name them.

A pipeline begins with stages that give out shards (a list, splitters, a shuffle of it). The first
one that opens them ends that part. Each worker runs all of it, so it is run here once a worker.

INVARIANT: exactly these stages are meant: another one may do anything.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from hintsd.client.known.extending import NO_INDICES, Unreadable, class_name
from hintsd.client.known.shards import PASSES_MOST, ShardOrder

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

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


class WebDatasetShards(ShardOrder):
    """Of a WebDataset, or another pipeline of such stages."""

    @staticmethod
    def knows(dataset: Any) -> bool:
        return _PIPELINE in map(class_name, type(dataset).__mro__)

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        dataset: Any = loader.dataset
        kinds = {class_name(kind): kind for kind in type(dataset).__mro__}
        if not _iterates_as(type(dataset), kinds[_PIPELINE]):
            raise Unreadable(NO_INDICES)
        stages = _naming(dataset.pipeline)
        self._goes_on = loader.persistent_workers
        if self._goes_on and any(class_name(type(stage)) == _EPOCH_SHUFFLE for stage in stages):
            _check_epochs(loader, dataset.repetitions)
        self._copies: dict[int, list[Any]] = {}  # of the workers that go on
        super().__init__(loader, sampler, stages[0].urls)

    def _of_workers(self) -> list[list[str]]:
        return [self._of_worker(number) for number in range(max(1, self._workers))]

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
