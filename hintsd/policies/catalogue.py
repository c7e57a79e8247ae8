"""All policies by name, for the laboratory, the benchmark and the contract suite; and those in
`hintsd.keeping.NAMES` live (`hintsd serve --keep`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from hintsd.policies import Policy
from hintsd.policies.belady import Belady
from hintsd.policies.fifo import FIFO
from hintsd.policies.frequency import Frequency
from hintsd.policies.lfu import LFU
from hintsd.policies.lru import LRU
from hintsd.policies.minio import MinIO
from hintsd.policies.papers.icache import ICache
from hintsd.policies.papers.quiver import Quiver
from hintsd.policies.papers.shade import VARIANTS
from hintsd.policies.random_eviction import RandomEviction
from hintsd.policies.s3fifo import S3FIFO


class Maker(Protocol):
    """A policy's class, or a function that makes a variant of one (`functools.partial`)."""

    def __call__(
        self,
        capacity_bytes: int,
        *,
        on_evict: Callable[[int], object] | None = None,
        seed: int = 0,
    ) -> Policy: ...


CATALOGUE: Final[dict[str, Maker]] = {
    "fifo": FIFO,
    "lru": LRU,
    "lfu": LFU,
    "random": RandomEviction,
    "s3fifo": S3FIFO,
    "minio": MinIO,
    "frequency": Frequency,
    "belady": Belady,
    **{variant.name: variant for variant in VARIANTS},
    "icache": ICache,
    "quiver": Quiver,
}
