"""Which files a DataLoader of a `datasets.IterableDataset` reads, and in which order:
`load_dataset(…, streaming=True)`.

Such a dataset is a tree of iterables: leaves that hold the files, and what maps, shuffles or joins
them. The library deals the files out to ranks and workers, and shuffles them by the epoch, by
building another tree; so it is asked for that tree, and the leaves are read from left to right.

INVARIANT: exactly these classes are meant: another one may do anything.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from hintsd.client.known.extending import Unreadable, class_name
from hintsd.client.known.shards import PASSES_MOST, ShardOrder, in_turns

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_MODULE: Final = "datasets.iterable_dataset."
_LEAVES: Final = {"ArrowExamplesIterable", "ExamplesIterable"}
_CHAIN: Final = "VerticallyConcatenatedMultiSourcesExamplesIterable"
_INTERLEAVED: Final = "InterleavedShardsExamplesIterable"
_REPEATED: Final = "RepeatExamplesIterable"
JOINED_MOST: Final = 256  # the library deals n of them out in n² steps, for each worker
_READ_THROUGH: Final = {
    "BufferShuffledExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "SkipExamplesIterable",
    "StepExamplesIterable",
}
"""They ask for all that is below them, from front to back."""
_FORMATS: Final = {"arrow", "csv", "hdf5", "json", "parquet", "text", "webdataset"}
_BUILDERS: Final = {f"datasets.packaged_modules.{name}.{name}" for name in _FORMATS}
_FILES: Final = ("base_files", "tar_paths", "files")  # of a builder's arguments: the first there is


class StreamedShards(ShardOrder):
    """Of a datasets.IterableDataset."""

    _each = 1  # shards that a worker reads in turns

    @staticmethod
    def knows(dataset: Any) -> bool:
        return class_name(type(dataset)) == f"{_MODULE}IterableDataset"

    def __init__(self, loader: DataLoader[Any], sampler: Any) -> None:
        dataset: Any = loader.dataset
        super().__init__(loader, sampler, self._files(dataset._ex_iterable))
        self._each = 1
        self._of_workers()

    @property
    def at_once(self) -> int:
        return super().at_once * self._each

    def _of_workers(self) -> list[list[str]]:
        dataset = object.__new__(type(self.dataset))  # copy.copy's would share its attributes
        tree = _copied(self.dataset._ex_iterable)  # preparing it marks places in it
        dataset.__dict__.update(self.dataset.__dict__, _ex_iterable=tree)
        tree = dataset._prepare_ex_iterable_for_iteration()
        if not self._workers:
            return [self._files(tree)]
        return [self._of_worker(tree, number) for number in range(self._workers)]

    def _of_worker(self, tree: Any, number: int) -> list[str]:
        told = {"num_shards": self._workers, "index": number, "contiguous": False}
        if not tree.split_shard_indices_by_worker(**told):
            return []
        return self._files(tree.shard_data_sources(**told))

    def _files(self, node: Any) -> list[str]:
        """As they are read. Unreadable."""
        name = class_name(type(node)).removeprefix(_MODULE)
        if name in _LEAVES:
            return _of_leaf(node)
        if name == _CHAIN:
            if node.num_shards > JOINED_MOST:
                raise Unreadable(
                    f"{node.num_shards} files of joined datasets are more than {JOINED_MOST}: to "
                    "say which come next would hold up each epoch"
                )
            return [file for part in node.ex_iterables for file in self._files(part)]
        if name == _INTERLEAVED:
            parts = getattr(node._interleave_shards(), "ex_iterables", [])
            self._each = max(self._each, len(parts))
            return in_turns([self._files(part) for part in parts])
        if name == _REPEATED:
            times = PASSES_MOST if node.num_times is None else node.num_times
            return self._files(node.ex_iterable) * max(0, min(times, PASSES_MOST))
        if name in _READ_THROUGH:
            return self._files(node.ex_iterable)
        raise Unreadable(f"which files come next cannot be told of a {name}")


def _copied(node: Any) -> Any:
    """The tree, with leaves that hold the same files."""
    node = copy.copy(node)
    if hasattr(node, "ex_iterable"):
        node.ex_iterable = _copied(node.ex_iterable)
    elif hasattr(node, "ex_iterables"):
        node.ex_iterables = [_copied(part) for part in node.ex_iterables]
    return node


def _of_leaf(leaf: Any) -> list[str]:
    """Unreadable: it is no builder's of files."""
    reads = getattr(leaf, "generate_tables_fn", None) or leaf.generate_examples_fn
    builder = type(getattr(reads, "__self__", None))
    files: Any = next((leaf.kwargs[key] for key in _FILES if key in leaf.kwargs), None)
    is_known = builder.__module__ in _BUILDERS and isinstance(files, list)
    if not is_known or not all(isinstance(file, str) for file in files):
        raise Unreadable("which files this datasets.IterableDataset reads next is not known")
    return list(files)
