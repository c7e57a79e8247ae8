"""Which shards a DataLoader reads whose dataset gives out samples of them (files that are read one
after another), and in which order: computed as an epoch begins, by the library's own code
(web_dataset.py, streams.py).

Workers take turns (a DataLoader's batches do), and are taken to read their shards equally fast.

INVARIANT: the dataset and all global generators stay as they are.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlparse

from hintsd.client.client import explicit_order, tidy_paths
from hintsd.client.known.extending import Unreadable

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from hintsd.orders.spec import OrderSpec

PASSES_MOST: Final = 2  # over the shards in an epoch that ends nobody knows where


class ShardOrder(ABC):
    """The shards of a DataLoader, epoch by epoch. Those of one library; Unreadable: which shards it
    reads when is not known.
    """

    @staticmethod
    @abstractmethod
    def knows(dataset: Any) -> bool:
        """Whether it is one of that library's."""

    def __init__(self, loader: DataLoader[Any], sampler: Any, urls: Iterable[str]) -> None:
        """`sampler`: what tells the loader to draw. `urls`: paths, or file URLs, of all shards."""
        self.sampler = sampler
        self.dataset: Any = loader.dataset
        self._workers = loader.num_workers
        each = list(dict.fromkeys(urls))
        self.paths = _paths(each)
        self._number = {url: number for number, url in enumerate(each)}
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
        order = [self._number[url] for url in in_turns(self._of_workers())]
        return explicit_order(order, self.epoch, 1, False, len(self.paths))

    def begin(self, epoch: int) -> None:
        """This epoch is read now."""
        self.epoch = epoch + 1

    def untold(self, error: Exception) -> str:
        return f"{self.described} cannot be told ({error!r})"

    @abstractmethod
    def _of_workers(self) -> list[list[str]]:
        """The shards that each worker (without workers: the process itself) reads now."""


def in_turns(lists: Sequence[list[str]]) -> list[str]:
    """One of each, again and again, while there are any."""
    turns = itertools.chain.from_iterable(itertools.zip_longest(*lists))
    return [one for one in turns if one is not None]


def _paths(urls: list[str]) -> list[str]:
    """Absolute and tidy. Unreadable: a URL is no path."""
    parsed = [urlparse(url) for url in urls]
    strange = next((found for found in parsed if found.scheme not in ("", "file")), None)
    if strange is not None:
        raise Unreadable(f"a shard of this dataset is no file: {strange.geturl()}")
    paths = [found.path if found.scheme else url for found, url in zip(parsed, urls)]
    return tidy_paths(paths, os.getcwd())
