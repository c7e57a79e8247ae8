"""WebDataset, MosaicML Streaming and LitData, peers of the rows budgets: their shards, and loaders.

Each has the dataset converted to shards of its own first, and reads these in its own shuffle.
None of it is in this repository: `tools/bench/streaming` installs them elsewhere.

Run as a process of that environment with a JSON object on standard input. To convert: peer, source,
paths (relative to it, in the order of their indices), to (a directory that is made). Prints a JSON
object: seconds, version. To read: peer, shards (the directory), cache (an empty one), cache_bytes
(0: none; only WebDataset can), ram_bytes (of its shuffle: WebDataset's), sample_bytes, and what
loader_reader.py is told, of which root, paths, hints and ahead count for nothing. Prints what
loader_reader.py prints. Both: temporary (a directory for what they leave behind).
"""

import contextlib
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tools.bench.loader_reader import clean, measured
from tools.torchvision_cpu import import_torchvision

SHARD_BYTES = 4_000_000  # theirs are 64 MB and more, of datasets that are larger as well
_READERS = 4
_BLOCKS = 4  # of its shuffle that fit into its cache; its own is larger than these datasets
_AHEAD = 256  # files that are read side by side while a dataset is converted

Sample = tuple[int, bytes]


def _contents(source: str, paths: list[str]) -> Iterator[Sample]:
    with ThreadPoolExecutor(_READERS) as pool:
        for first in range(0, len(paths), _AHEAD):
            some = [Path(source, path) for path in paths[first : first + _AHEAD]]
            yield from enumerate(pool.map(Path.read_bytes, some), first)


def _sizes(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    indices, contents = zip(*samples, strict=True)
    return torch.tensor(indices), torch.tensor([len(content) for content in contents])


def _library(name: str) -> Any:
    with contextlib.suppress(ImportError):
        import_torchvision()  # they may import it
    return importlib.import_module(name)


def loading(work: dict[str, Any]) -> dict[str, Any]:
    return {
        "batch_size": work["batch"],
        "num_workers": work["workers"],
        "persistent_workers": True,
        "collate_fn": _sizes,
    }


def of_tar(sample: dict[str, Any]) -> Sample:
    return int(sample["__key__"]), sample["bin"]


def web_dataset(work: dict[str, Any]) -> Any:
    """Of the tar files in `shards`, in another order each epoch; with its own cache, or without."""
    wds: Any = _library("webdataset")
    shards, has_cache = sorted(Path(work["shards"]).iterdir()), work["cache_bytes"] > 0
    dataset = wds.WebDataset(
        # a plain path would not be cached
        [f"pipe:cat {shard}" if has_cache else str(shard) for shard in shards],
        shardshuffle=len(shards),
        detshuffle=True,
        seed=work["seed"],
        cache_dir=work["cache"] if has_cache else None,
        cache_size=work["cache_bytes"],
    )
    for stage in dataset.pipeline:
        if isinstance(stage, wds.cache.FileCache):
            stage.cleaner.interval = None  # seconds; 30 would outlast the epochs
    return dataset


class WebDataset:
    """Tar files in shuffled order, and a buffer in each worker, in which samples are shuffled."""

    package = "webdataset"

    def convert(self, source: str, paths: list[str], to: Path) -> None:
        to.mkdir()
        wds: Any = _library("webdataset")
        with wds.ShardWriter(f"{to}/%06d.tar", maxsize=SHARD_BYTES, verbose=0) as shards:
            for index, content in _contents(source, paths):
                shards.write({"__key__": f"{index:08d}", "bin": content})

    def loader(self, work: dict[str, Any]) -> Iterable[Any]:
        wds: Any = _library("webdataset")
        dataset = web_dataset(work)
        held = work["ram_bytes"] // work["workers"] // work["sample_bytes"]
        samples = dataset.compose(wds.detshuffle(max(1, held), seed=work["seed"])).map(of_tar)
        return DataLoader(samples, **loading(work))


class Mosaic:
    """MosaicML Streaming: MDS files, evicted the least recently used first."""

    package = "mosaicml-streaming"

    def convert(self, source: str, paths: list[str], to: Path) -> None:
        streaming: Any = _library("streaming")
        columns = {"index": "int", "content": "bytes"}
        with streaming.MDSWriter(out=str(to), columns=columns, size_limit=SHARD_BYTES) as shards:
            for index, content in _contents(source, paths):
                shards.write({"index": index, "content": content})

    def loader(self, work: dict[str, Any]) -> Iterable[Any]:
        streaming: Any = _library("streaming")

        class Samples(streaming.StreamingDataset):  # type: ignore[misc]  # it has no types
            def __getitem__(self, at: int) -> Sample:
                sample = super().__getitem__(at)
                return sample["index"], sample["content"]

        dataset: Any = Samples(
            remote=work["shards"],
            local=work["cache"],
            cache_limit=work["cache_bytes"],
            batch_size=work["batch"],
            shuffle=True,
            shuffle_seed=work["seed"],
            shuffle_block_size=max(1, work["cache_bytes"] // _BLOCKS // work["sample_bytes"]),
        )
        return DataLoader(dataset, **loading(work))


class LitData:
    """LitData: chunks; where they do not all fit, each goes when it has been read."""

    package = "litdata"

    def convert(self, source: str, paths: list[str], to: Path) -> None:
        litdata: Any = _library("litdata")
        litdata.optimize(
            fn=_read,
            inputs=[(index, f"{source}/{path}") for index, path in enumerate(paths)],
            output_dir=str(to),
            chunk_bytes=SHARD_BYTES,
            num_workers=_READERS,
            verbose=False,
        )

    def loader(self, work: dict[str, Any]) -> Iterable[Any]:
        litdata: Any = _library("litdata")
        dataset = litdata.StreamingDataset(
            f"local:{work['shards']}",  # a plain path would not be cached
            cache_dir=work["cache"],
            max_cache_size=work["cache_bytes"],
            shuffle=True,
            seed=work["seed"],
        )
        loader: Iterable[Any] = litdata.StreamingDataLoader(dataset, **loading(work))
        return loader


def _read(sample: tuple[int, str]) -> Sample:
    return sample[0], Path(sample[1]).read_bytes()


PEERS: dict[str, WebDataset | Mosaic | LitData] = {
    "webdataset": WebDataset(),
    "mosaicml": Mosaic(),
    "litdata": LitData(),
}


def main() -> None:
    work = json.load(sys.stdin)
    os.environ["TMPDIR"] = work["temporary"]
    torch.set_num_threads(1)
    peer = PEERS[work["peer"]]
    with contextlib.redirect_stdout(sys.stderr):  # they say things
        if "to" in work:
            begin = time.perf_counter()
            peer.convert(work["source"], work["paths"], Path(work["to"]))
            version = importlib.metadata.version(peer.package)
            done: Any = {"seconds": time.perf_counter() - begin, "version": version}
        else:
            loader = peer.loader(work)
            clean(work)
            done = measured(loader, work, lambda _: None)
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()
