"""What a policy costs: accesses a second of one core, and memory for each item.

Run as a process: `python -m tools.bench.policy_cost NAME ITEMS OPERATIONS ROUNDS MEMORY_ITEMS`;
prints a JSON object: lists of accesses a second, one value a round, for each workload, and bytes an
item. Half of the operations read uniform shuffles of ITEMS items of one size, half a Zipf
distribution (weights 1/rank); the cache holds a fifth of them. Time is the processor's, while the
policy works: its hint, where it takes one, is in it, making the reads is not. Memory is what the
process has grown by when each of MEMORY_ITEMS items was read once and all are held.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hintsd.policies import Hints
from hintsd.policies.catalogue import CATALOGUE

SIZE_BYTES = 100_000
CACHE_SHARE = 5
CHUNK = 1 << 20
Reads = npt.NDArray[np.int64]


def _shuffles(rng: np.random.Generator, items: int, reads: int) -> Reads:
    epochs = -(-reads // items)
    return np.concatenate([rng.permutation(items) for _ in range(epochs)])[:reads]


def _zipf(rng: np.random.Generator, items: int, reads: int) -> Reads:
    """By inversion: the sum of 1/rank up to r is about ln r."""
    rank = np.exp(rng.random(reads) * np.log(items + 1)).astype(np.int64) - 1
    found: Reads = rng.permutation(items)[rank]
    return found


WORKLOADS: dict[str, Callable[[np.random.Generator, int, int], Reads]] = {
    "shuffles": _shuffles,
    "zipf": _zipf,
}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _memory_bytes(name: str, items: int) -> int:
    once = range(items - 1, -1, -1)  # a shuffle, too, soon comes to a large number
    hints = Hints(sequence=np.tile(once, 2), uses=np.full(items, 2))
    before = _resident_bytes()
    policy = CATALOGUE[name](items * SIZE_BYTES)
    policy.hint(hints)
    deque(map(policy.access, once, repeat(SIZE_BYTES)), maxlen=0)
    assert len(policy) == items
    return _resident_bytes() - before


def _speeds(name: str, workload: str, items: int, reads: int, rounds: int) -> Iterator[float]:
    rng = np.random.default_rng(1)
    policy = CATALOGUE[name](items // CACHE_SHARE * SIZE_BYTES, seed=1)
    for _ in range(rounds):
        sequence = WORKLOADS[workload](rng, items, reads)
        hints = Hints(sequence=sequence, uses=np.bincount(sequence, minlength=items))
        begin = time.process_time()
        policy.hint(hints)
        seconds = time.process_time() - begin
        for at in range(0, reads, CHUNK):
            chunk = sequence[at : at + CHUNK].tolist()
            begin = time.process_time()
            deque(map(policy.access, chunk, repeat(SIZE_BYTES)), maxlen=0)
            seconds += time.process_time() - begin
        yield reads / seconds


def main() -> None:
    name = sys.argv[1]
    items, operations, rounds, memory_items = map(int, sys.argv[2:])
    reads = operations // len(WORKLOADS) // rounds
    memory_bytes = _memory_bytes(name, memory_items)
    found = {
        "bytes_per_item": memory_bytes / memory_items,
        **{workload: list(_speeds(name, workload, items, reads, rounds)) for workload in WORKLOADS},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
