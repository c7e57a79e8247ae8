"""Reads without a training: the orders that torch's samplers draw, what theory says of them, and a
Zipf distribution, which no training has and other caches are measured by.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from fusecache.traces.traces import Trace
from hintsd.orders.drawing import Drawing, Order
from hintsd.orders.own_drawing import OwnDrawing
from hintsd.orders.spec import OrderSpec

ITEM_BYTES: Final = 100 << 10


def shuffled(items: int, epochs: int, seed: int, item_bytes: int = ITEM_BYTES) -> Trace:
    """RandomSampler(generator of this seed) over items of one size."""
    source = f"uniform shuffles: {items:,} items, {epochs} epochs, seed {seed}"
    return _drawn(OrderSpec("random", items, seed=seed), epochs, item_bytes, source)


def of_rank(items: int, epochs: int, ranks: int, seed: int, item_bytes: int = ITEM_BYTES) -> Trace:
    """What rank 0 of `ranks` reads by DistributedSampler."""
    order = OrderSpec("distributed", items, seed=seed, world_size=ranks, rank=0)
    source = f"rank 0 of {ranks}: {items:,} items, {epochs} epochs, seed {seed}"
    return _drawn(order, epochs, item_bytes, source)


def zipf(items: int, epochs: int, seed: int, item_bytes: int = ITEM_BYTES) -> Trace:
    """Independent reads, as many an epoch as there are items; weights 1/rank, shuffled ranks."""
    rng = np.random.default_rng(seed)
    weights = rng.permutation(1 / np.arange(1.0, items + 1))
    reads = rng.choice(items, items * epochs, p=weights / weights.sum())
    source = f"Zipf, weights 1/rank: {items:,} items, {len(reads):,} reads, seed {seed}"
    return _trace(reads, items, epochs, item_bytes, source)


def _drawn(spec: OrderSpec, epochs: int, item_bytes: int, source: str) -> Trace:
    order = Order(spec, OwnDrawing(Drawing()))
    sequences = [order.sequence(epoch) for epoch in range(epochs)]
    return _trace(np.concatenate(sequences), spec.length, epochs, item_bytes, source)


def _trace(
    reads: npt.NDArray[np.int64], items: int, epochs: int, item_bytes: int, source: str
) -> Trace:
    """Epochs of equally many reads."""
    return Trace(
        items=reads,
        sizes=np.full(items, item_bytes, np.int64),
        epoch_starts=np.arange(epochs, dtype=np.int64) * (len(reads) // epochs),
        times_s=None,
        importances=(),
        readers=None,
        seen=None,
        names=None,
        source=source,
    )


def lru_hit_ratio(share: float) -> float:
    """Of an LRU cache of this share of the items, in epochs after the first, for many items.

    An item at the place x of one permutation (0 to 1) and y of the next is still held if fewer than
    `share` of the items were read between: 1 - x after it, and those of the next epoch's first y
    that are not among them, x y of the items. So it hits where 1 - x + x y < share; integrated over
    x and y this is share + (1 - share) ln(1 - share).
    """
    return share + (1 - share) * math.log1p(-share) if share < 1 else 1.0
