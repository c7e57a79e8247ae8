"""Uniform shuffles without a training: the orders that torch's RandomSampler draws, and what theory
says of them.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from fusecache.errors import UserError
from fusecache.traces import Trace
from hintsd.orders import Order, OrderSpec

ITEM_BYTES: Final = 100 << 10


def shuffled(items: int, epochs: int, seed: int, item_bytes: int = ITEM_BYTES) -> Trace:
    """RandomSampler(generator of this seed) over items of one size. UserError: torch is missing."""
    order = Order(OrderSpec("random", items, seed=seed))
    try:
        sequences = [order.sequence(epoch) for epoch in range(epochs)]
    except ImportError:
        raise UserError("a shuffle needs torch: pip install 'fusecache[lab]'") from None
    return Trace(
        items=np.concatenate(sequences),
        sizes=np.full(items, item_bytes, np.int64),
        epoch_starts=np.arange(epochs, dtype=np.int64) * items,
        times_s=None,
        importances=(),
        readers=None,
        seen=None,
        names=None,
        source=f"uniform shuffles: {items:,} items, {epochs} epochs, seed {seed}",
    )


def lru_hit_ratio(share: float) -> float:
    """Of an LRU cache of this share of the items, in epochs after the first, for many items.

    An item at the place x of one permutation (0 to 1) and y of the next is still held if fewer than
    `share` of the items were read between: 1 - x after it, and those of the next epoch's first y
    that are not among them, x y of the items. So it hits where 1 - x + x y < share; integrated over
    x and y this is share + (1 - share) ln(1 - share).
    """
    return share + (1 - share) * math.log1p(-share) if share < 1 else 1.0
