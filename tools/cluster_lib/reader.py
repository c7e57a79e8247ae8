"""A reader on a host: whole files, some at a time, in a seeded order. Needs no torch.

Run as a process with a line of JSON on standard input: root, names (relative to it), order, seed,
host, hosts, threads, hinted (epochs that hintsd is told of; 0: it is told nothing). It prints
"ready", or the state of its hint, and waits for a line before each epoch, its number; after it, it
prints a line of JSON: seconds (of the first epoch from the hint on), files, bytes, checksum (the
sum of the files' CRC-32), processor_s.

order: "distributed": the epoch's permutation is that of all hosts, each of which reads every N-th
of it, as a DistributedSampler does; "all": each host reads all files, in an order of its own.
"""

import json
import os
import random
import sys
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tools.hintsd_command import await_answer

if TYPE_CHECKING:
    import hintsd

BATCH = 32
ORDERS = ("distributed", "all")


def order_of(
    names: Sequence[str], order: str, seed: int, epoch: int, host: int, hosts: int
) -> list[str]:
    """What the host reads in the epoch, in this order."""
    whose = "" if order == "distributed" else f" {host}"
    permuted = random.Random(f"{seed} {epoch}{whose}").sample(names, len(names))
    return permuted[host::hosts] if order == "distributed" else permuted


def _read(path: str) -> tuple[int, int]:
    """Its length, and its CRC-32."""
    fd = os.open(path, os.O_RDONLY)
    try:
        content = os.read(fd, os.fstat(fd).st_size)
        return len(content), zlib.crc32(content)
    finally:
        os.close(fd)


def _attach(work: dict[str, Any]) -> "hintsd.Job":
    """To the hintsd of the mount."""
    import hintsd

    number = {name: index for index, name in enumerate(work["names"])}
    return hintsd.connect(work["root"]).order(
        lambda epoch: [number[name] for name in _order(work, epoch)],
        paths=[os.path.join(work["root"], name) for name in work["names"]],
        epochs=work["hinted"],
        batch_size=BATCH,
        workers=work["threads"],
    )


def _order(work: dict[str, Any], epoch: int) -> list[str]:
    told = (work["order"], work["seed"], epoch, work["host"], work["hosts"])
    return order_of(work["names"], *told)


def main() -> None:
    work = json.loads(sys.stdin.readline())
    told = time.perf_counter() if work["hinted"] else None  # from then on hints fetch
    job = _attach(work) if work["hinted"] else None
    if job is not None:
        await_answer(job)
    with ThreadPoolExecutor(work["threads"]) as readers:
        print("ready" if job is None else job.state, flush=True)
        for line in sys.stdin:
            paths = [os.path.join(work["root"], name) for name in _order(work, int(line))]
            if job is not None:
                job.step(0, int(line))
            begin, computed = told or time.perf_counter(), time.process_time()
            told = None
            read = list(readers.map(_read, paths))
            done = {
                "seconds": time.perf_counter() - begin,
                "processor_s": time.process_time() - computed,
                "files": len(read),
                "bytes": sum(size for size, _ in read),
                "checksum": sum(checksum for _, checksum in read),
            }
            print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
