"""Row policies: accesses a second of one core, and memory for each item (policy_cost.py)."""

import json

from tools.bench.hints import run_module
from tools.bench.policy_cost import WORKLOADS
from tools.bench.rows import Bench

SIMPLE = ("fifo", "lru", "lfu", "random", "s3fifo", "minio", "frequency")
OPERATIONS, OPERATIONS_QUICK = 100_000_000, 2_000_000
OTHERS = ("belady", "shade", "icache", "quiver")  # SHADE's ablations cost what one of these does
OTHERS_SHARE = 10  # they do a tenth of that
ITEMS, MEMORY_ITEMS = 1_000_000, 10_000_000
ROUNDS = 5


def policies(bench: Bench) -> None:
    """Each policy in a process of its own."""
    for name in (*SIMPLE, *OTHERS):
        operations = OPERATIONS_QUICK if bench.quick else OPERATIONS
        if name not in SIMPLE:
            operations //= OTHERS_SHARE
        counts = (ITEMS, operations, ROUNDS, MEMORY_ITEMS)
        done = run_module("tools.bench.policy_cost", name, *map(str, counts))
        found = json.loads(done.stdout)
        for workload in WORKLOADS:
            for speed in found[workload]:
                what = f"{name}, {workload}"
                bench.results.add("policies", what, "fusecache", "accesses/s", speed)
        memory = found["bytes_per_item"]
        bench.results.add("policies", f"{name}, memory", "fusecache", "bytes/item", memory)
        bench.say(f"policies: {name} done")
    bench.results.note(
        f"policies: {ITEMS:,} items, a fifth cached; memory: {MEMORY_ITEMS:,}, all held"
    )
