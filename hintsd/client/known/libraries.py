"""Datasets and samplers of libraries, known by the names of their classes: what each index
reads, and whose own `__iter__` may be run, so that their order is known as each epoch begins.
Samplers whose order we compute ahead: hintsd/orders/samplers.py.

INVARIANT: nothing here imports those libraries, draws, or changes what it looks at. Exactly these
classes are meant: a subclass may do anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from hintsd.client.known.extending import Function, Unreadable, class_name
from hintsd.client.ranges.rows import Told
from hintsd.client.ranges.tables import rows_of_table


def paths_in_library(dataset: Any) -> Told | None:
    """None: it is of none of these classes. Unreadable: where its samples lie is not known."""
    function = _DATASETS.get(class_name(type(dataset)))
    return None if function is None else function(dataset)


def order_in_library(sampler: Any) -> Function | None:
    """What gives the epoch that begins now; None: it is of none of these classes."""
    return list if class_name(type(sampler)) in _SEEDED_BY_EPOCH else None


def _timm(dataset: Any) -> Sequence[Any]:
    kind = type(dataset.reader).__name__
    if kind != "ReaderImageFolder":
        raise Unreadable(f"timm's {kind} does not read a file for each sample")
    return [path for path, _ in dataset.reader.samples]


def _monai(dataset: Any) -> Sequence[Any]:
    rows = dataset.data
    first = rows[0]
    if isinstance(first, (str, os.PathLike)):
        return rows  # type: ignore[no-any-return]  # each is looked at by who asks
    values = first if isinstance(first, dict) else {}
    files = [
        key
        for key, value in values.items()
        if isinstance(value, (str, os.PathLike)) and os.path.isfile(value)
    ]
    if len(files) != 1:
        raise Unreadable(
            f"a sample of MONAI's Dataset has {len(files) or 'no'} files that are known; "
            "hintsd.paths_of.register says which one is to be fetched"
        )
    return [row[files[0]] for row in rows]


def _read_before(dataset: Any) -> Sequence[Any]:
    raise Unreadable(
        f"MONAI's {type(dataset).__name__} reads its files when it is made, or keeps them elsewhere"
    )


def _huggingface(dataset: Any) -> Told:
    media = [name for name, value in dataset.features.items() if type(value).__name__ in _MEDIA]
    if len(media) == 1:
        column = dataset.select_columns(media).with_format("arrow")[:].column(media[0])
        stored, paths = (
            column.flatten()[column.type.get_field_index(name)] for name in ("bytes", "path")
        )
        if stored.null_count == len(stored) and not paths.null_count:
            return paths.to_pylist()  # type: ignore[no-any-return]  # strings
    ranges, files = rows_of_table(dataset), [file["filename"] for file in dataset.cache_files]
    if ranges is None and files:
        folder = os.path.dirname(files[0])
        raise Unreadable(f"{folder}, with rows of this datasets.Dataset, is on no fusecache mount")
    if ranges is None:
        raise Unreadable("the rows of this datasets.Dataset lie in memory, not in a file")
    return ranges


_MEDIA: Final = ("Image", "Audio", "Video", "Nifti", "Pdf")  # of datasets.features, with a path

_DATASETS: Final[dict[str, Callable[[Any], Told]]] = {
    "datasets.arrow_dataset.Dataset": _huggingface,
    "monai.data.dataset.CacheDataset": _read_before,
    "monai.data.dataset.Dataset": _monai,
    "monai.data.dataset.PersistentDataset": _read_before,
    "monai.data.dataset.SmartCacheDataset": _read_before,
    "timm.data.dataset.ImageDataset": _timm,
}

_SEEDED_BY_EPOCH: Final = {
    "lightning.pytorch.overrides.distributed.UnrepeatedDistributedSampler",
    "monai.data.samplers.DistributedSampler",
    "pytorch_lightning.overrides.distributed.UnrepeatedDistributedSampler",
    "timm.data.distributed_sampler.OrderedDistributedSampler",
    "timm.data.distributed_sampler.RepeatAugSampler",
}
"""Whose `__iter__` draws from a generator that it makes itself, and changes nothing."""
