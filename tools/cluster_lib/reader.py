"""A reader on a host: whole files, some at a time, in a seeded order. Needs no torch.

Run as a process with a line of JSON on standard input: root, names (relative to it), order, seed,
host, hosts, threads. It prints "ready", and waits for a line before each epoch, its number; after
it, it prints a line of JSON: seconds, files, bytes, checksum (the sum of the files' CRC-32),
processor_s.

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


def main() -> None:
    work = json.loads(sys.stdin.readline())
    root, names, threads = work["root"], work["names"], work["threads"]
    told = (work["order"], work["seed"])
    with ThreadPoolExecutor(threads) as readers:
        print("ready", flush=True)
        for line in sys.stdin:
            paths = [
                os.path.join(root, name)
                for name in order_of(names, *told, int(line), work["host"], work["hosts"])
            ]
            begin, computed = time.perf_counter(), time.process_time()
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
