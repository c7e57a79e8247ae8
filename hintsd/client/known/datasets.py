"""Which file, or which ranges of files, each index of a torch dataset means: of those that say so
themselves or were registered (extending.py), torchvision's, and other libraries' (libraries.py);
and Subsets and ConcatDatasets of them. torchvision is looked at where the script has imported it,
and never imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from hintsd.client.client import (
    absolute,
    common_root,
    folder_files,
    listed_files,
    tidy_paths,
)
from hintsd.client.known.extending import Unreadable, told_paths
from hintsd.client.known.libraries import paths_in_library
from hintsd.client.link import Ways
from hintsd.client.ranges.rows import Ranges, Told
from hintsd.client.warning import warn_once
from hintsd.orders.hint import CHECK_SAMPLES_MOST, Check

COMPARED = 1000  # samples
ROWS_LEAST = 50  # of one file, on average: it is hardly one that is read so often

Paths = dict[int, list[str]]
"""By a dataset's id: its paths, absolute and tidy, where it is not torchvision's."""


def files_of(dataset: Any) -> tuple[str, Ways | Ranges]:
    """The directory of a dataset, and the ways to tell hintsd its files; or the ranges of large
    files that its samples are. Unreadable: unknown."""
    said: dict[int, Told | None] = {}
    ranges = _ranges(dataset, said)
    if ranges is not None:
        return ranges.root, ranges
    base, here = _folder_class(), os.getcwd()
    told: Paths = {}
    root = common_root([folder + "/" for folder in _roots(dataset, base, here, told, said)])
    listed = listed_files(
        root, lambda: [absolute(path, here) for path in _paths(dataset, base, told)]
    )
    follows_rule = (
        isinstance(dataset, base)
        and not told
        and dataset.extensions is not None  # else: is_valid_file decided
        and type(dataset).find_classes is base.find_classes
        and type(dataset).make_dataset is base.make_dataset
    )
    if not follows_rule:
        return root, (listed,)

    def check() -> Check:
        count = len(dataset.samples)
        some = sorted({int(i) for i in np.linspace(0, count - 1, min(count, CHECK_SAMPLES_MOST))})
        skipped = len(root.rstrip("/")) + 1
        named = [(i, os.fsencode(absolute(dataset.samples[i][0], here)[skipped:])) for i in some]
        return Check(count, named)

    extensions = dataset.extensions
    by_rule = folder_files([extensions] if isinstance(extensions, str) else list(extensions), check)
    # Listed, when the samples are not (any more) what the rule finds.
    return root, (by_rule, listed)


def is_in_memory(dataset: Any) -> bool:
    """Whether it is known to read no file: TensorDataset, and what has a row of `data` for each
    sample (torchvision's MNIST, CIFAR10, SVHN and their like)."""
    from torch import Tensor
    from torch.utils.data import ConcatDataset, Subset, TensorDataset

    if type(dataset) is Subset:
        return is_in_memory(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(is_in_memory(part) for part in dataset.datasets)
    if isinstance(dataset, TensorDataset):
        return True
    rows: Any = getattr(dataset, "data", None)
    if hasattr(dataset, "__hintsd_paths__") or isinstance(rows, np.memmap):
        return False
    numeric = isinstance(rows, np.ndarray) and rows.dtype.kind in "iuf"
    is_array = numeric or isinstance(rows, Tensor)
    return is_array and rows.ndim > 1 and len(rows) == len(dataset)


def _folder_class() -> Any:
    module = sys.modules.get("torchvision.datasets.folder")  # a dataset of it has imported it
    return getattr(module, "DatasetFolder", None) or _NoFolder


class _NoFolder:
    """Stands for DatasetFolder where there is none: no dataset is one of these."""


def _ranges(dataset: Any, said: dict[int, Told | None]) -> Ranges | None:
    """None: its samples are a file each, or it is not known. `said` gets what each dataset in it
    says of itself. Unreadable: they are ranges that do not fit it.
    """
    from torch.utils.data import ConcatDataset, Subset

    try:
        told = told_paths(dataset)
    except ValueError as error:
        name = type(dataset).__name__
        raise Unreadable(f"where the samples of a {name} lie cannot be told: {error}") from None
    is_plain = isinstance(dataset, _folder_class()) or type(dataset) in (Subset, ConcatDataset)
    if told is None and not is_plain:
        told = paths_in_library(dataset)
    said[id(dataset)] = told
    if told is None and type(dataset) is Subset:
        inner = _ranges(dataset.dataset, said)
        return None if inner is None else inner.select(dataset.indices)
    if told is None and type(dataset) is ConcatDataset:
        parts = [_ranges(part, said) for part in dataset.datasets]
        ranges = [part for part in parts if part is not None]
        if ranges and len(ranges) < len(parts):
            raise Unreadable("this ConcatDataset has samples that are files, and such that are not")
        return Ranges.joined(ranges) if ranges else None
    if not isinstance(told, Ranges):
        return None
    if len(told) != len(dataset) or not len(dataset):
        count = len(told)
        raise Unreadable(f"{count} ranges for a {type(dataset).__name__} of {len(dataset)} samples")
    return told


def _roots(
    dataset: Any, base: Any, here: str, told: Paths, said: dict[int, Told | None]
) -> list[str]:
    """The directories that it lies in; `told` is filled. Unreadable: not known."""
    from torch.utils.data import ConcatDataset, Subset

    paths = said[id(dataset)]
    if paths is None and isinstance(dataset, base):
        return [os.path.normpath(os.path.join(here, os.fspath(dataset.root)))]
    if paths is None and type(dataset) is Subset:
        return _roots(dataset.dataset, base, here, told, said)
    if paths is None and type(dataset) is ConcatDataset:
        return [root for part in dataset.datasets for root in _roots(part, base, here, told, said)]
    if paths is None:
        raise Unreadable(
            f"which files a {type(dataset).__name__} reads is not known: give hintsd.attach their "
            "paths, or the dataset a method __hintsd_paths__"
        )
    assert not isinstance(paths, Ranges)
    try:
        told[id(dataset)] = tidy_paths(paths, here)
    except ValueError as error:
        raise Unreadable(f"of a {type(dataset).__name__}: {error}") from None
    some = told[id(dataset)][:COMPARED]
    if len(some) >= ROWS_LEAST * len(set(some)):
        warn_once(
            f"{len(some)} samples of a {type(dataset).__name__} name {len(set(some))} files, which "
            "are fetched whole: if these samples are rows of them, say so by hintsd.rows_of or "
            "hintsd.Ranges"
        )
    if len(told[id(dataset)]) != len(dataset) or not len(dataset):
        count = len(told[id(dataset)])
        raise Unreadable(f"{count} paths for a {type(dataset).__name__} of {len(dataset)} samples")
    return [common_root(told[id(dataset)])]


def _paths(dataset: Any, base: Any, told: Paths) -> list[str]:
    from torch.utils.data import Subset

    if id(dataset) in told:
        return told[id(dataset)]
    if isinstance(dataset, base):
        return [sample[0] for sample in dataset.samples]
    if type(dataset) is Subset:
        whole = _paths(dataset.dataset, base, told)
        return [whole[index] for index in dataset.indices]
    return [path for part in dataset.datasets for path in _paths(part, base, told)]
