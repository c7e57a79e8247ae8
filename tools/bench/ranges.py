"""Rows ranges and ranges-latency: rows of one large npy file, in a stock DataLoader that shuffles
them: seconds, waiting, origin bytes and processor time of each epoch. The cache takes all of it.

INVARIANT: each run begins with empty caches and a process of its own; the peers take turns.
"""

import functools
from collections.abc import Callable

import numpy as np

from tools.bench.budgets import OriginOf, latent, on_device
from tools.bench.hints import started_hintsd
from tools.bench.ranges_reader import NAME
from tools.bench.rows import Bench
from tools.bench.shards import Runs

ROWS_OF_FILE, ROWS_QUICK, ROW_BYTES = 4_000, 500, 100_000
RAM, SSD = 0.2, 1.15  # of the dataset
PEERS = ("unhinted", "fusecache")


def ranges(bench: Bench) -> None:
    """Row ranges: an origin of 100 MB/s and 2,000 requests a second."""
    _row(bench, "ranges", functools.partial(on_device, limited=True))


def ranges_latency(bench: Bench) -> None:
    """Row ranges-latency: an origin that takes 5 ms for each request."""
    _row(bench, "ranges-latency", latent)


def _row(bench: Bench, row: str, origin_of: OriginOf) -> None:
    count = ROWS_QUICK if bench.quick else ROWS_OF_FILE
    total = count * ROW_BYTES
    with bench.folder(row) as work, origin_of(work, total * 5 // 4) as origin:
        (origin.behind / "data").mkdir()
        rows = np.random.default_rng(1).integers(0, 256, (count, ROW_BYTES), np.uint8)
        np.save(origin.behind / "data" / NAME, rows)
        del rows
        with started_hintsd(work) as daemon:
            runs = Runs(
                *(bench, row, work, origin, daemon, total),
                reader="tools.bench.ranges_reader",
                ram=RAM,
                ssd=SSD,
            )
            turns: dict[str, Callable[[int], None]] = {
                "stock": functools.partial(runs.read, "stock")
            }
            turns |= {peer: functools.partial(runs.mounted, peer) for peer in PEERS}
            for number in range(bench.rounds(1 if bench.quick else 3)):
                for turn in bench.turns(number, tuple(turns)):
                    bench.drop()
                    turns[turn](number)
                bench.say(f"{row}: round {number + 1} done")


ROWS: dict[str, Callable[[Bench], None]] = {"ranges": ranges, "ranges-latency": ranges_latency}
