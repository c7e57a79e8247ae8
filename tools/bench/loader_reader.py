"""A stock DataLoader that reads whole files, and a consumer with a pace: what a training sees.

The consumer is an accelerator: it takes samples at its pace, and while it is at one batch the loop
asks for the next, but no further ahead. stall_s: the seconds in which it had nothing to take
(without a pace: in which the loop waited).

Run as a process with a JSON object on standard input: root, paths (relative to the root, in the
order of their indices), seed, epochs, batch, workers, pace_bytes_per_s (0: as fast as it goes),
hints (true: `hintsd.attach`), ahead (epochs that hints foretell beyond those read), drop (true:
the kernel's caches are dropped before each epoch; "pages": all pages, but no names), forget (a
directory: the pages of its files are, ""), device (a file of /sys/block/*/stat, or /proc/*/io of an
origin's server: what each epoch read from it; "": from none), while_there (a file: when it has
gone, the epoch that is being read is left and not told of; "": all are read).
Prints a JSON list, one object an epoch: seconds, stall_s, first_s (until the first batch), samples,
bytes, order (a digest of the indices as they came), cpu_s (processor time of the whole machine),
device_bytes.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hintsd
from tools.slow_origin import drop_caches, forget_pages

SECTOR_BYTES = 512  # of /sys/block/*/stat


class Files(Dataset[tuple[int, int]]):
    """(index, size) of a file whose bytes were read: the tensors of a real dataset would only add
    the same work for every peer.
    """

    def __init__(self, root: str, paths: list[str]) -> None:
        self._paths = [os.path.join(root, path) for path in paths]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[int, int]:
        fd = os.open(self._paths[index], os.O_RDONLY)
        try:
            return index, len(os.read(fd, os.fstat(fd).st_size))
        finally:
            os.close(fd)


def processor_s() -> float:
    """Processor time that all processes and the kernel have used since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def bytes_read(device: str) -> int:
    """By everybody from a block device, or by a process: its "rchar". 0 of no device."""
    if not device:
        return 0
    with open(device, encoding="ascii") as file:
        words = file.read().split()
    return int(words[1]) if words[0] == "rchar:" else int(words[2]) * SECTOR_BYTES


def _epoch(loader: Iterable[Any], pace: float, while_there: str) -> dict[str, Any] | None:
    order = hashlib.blake2b(digest_size=8)
    samples = total = 0
    stall_s = first_s = 0.0
    begin = has_work_until = time.perf_counter()
    batches = iter(loader)
    while (batch := next(batches, None)) is not None:
        if while_there and not os.path.exists(while_there):
            return None
        came = time.perf_counter()
        starts = max(came, has_work_until)
        stall_s += starts - has_work_until
        if not samples:
            first_s = came - begin
        indices, sizes = batch
        order.update(indices.numpy().tobytes())
        samples += len(indices)
        got = int(sizes.sum())
        total += got
        has_work_until = starts + got / pace if pace else time.perf_counter()
        time.sleep(max(0.0, starts - time.perf_counter()))
    time.sleep(max(0.0, has_work_until - time.perf_counter()))
    return {
        "seconds": time.perf_counter() - begin,
        "stall_s": stall_s,
        "first_s": first_s,
        "samples": samples,
        "bytes": total,
        "order": order.hexdigest(),
    }


def clean(work: dict[str, Any]) -> None:
    """Empty the kernel's caches as `work` wants it."""
    if work["drop"] == "pages":
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")
    elif work["drop"]:
        drop_caches()
    if work["forget"]:
        forget_pages([Path(work["forget"])])


def measured(
    loader: Iterable[Any], work: dict[str, Any], begin: Callable[[int], None]
) -> list[dict[str, Any]]:
    """What is to be printed, of a loader whose batches are tensors: indices, sizes in bytes.

    `begin` is told the number of each epoch before it.
    """
    results = []
    for epoch in range(work["epochs"]):
        begin(epoch)
        if epoch:
            clean(work)
        cpu_s, device_bytes = processor_s(), bytes_read(work["device"])
        done = _epoch(loader, work["pace_bytes_per_s"], work["while_there"])
        if done is None:
            break
        done["cpu_s"] = processor_s() - cpu_s
        done["device_bytes"] = bytes_read(work["device"]) - device_bytes
        results.append(done)
    return results


def main() -> None:
    work = json.load(sys.stdin)
    torch.set_num_threads(1)
    dataset = Files(work["root"], work["paths"])
    sampler: DistributedSampler[tuple[int, int]] = DistributedSampler(
        dataset, num_replicas=1, rank=0, seed=work["seed"]
    )
    loader = DataLoader(
        dataset,
        batch_size=work["batch"],
        sampler=sampler,
        num_workers=work["workers"],
        persistent_workers=True,
    )
    clean(work)  # before hints may fetch anything
    if work["hints"]:
        paths = [os.path.join(work["root"], path) for path in work["paths"]]
        hintsd.attach(loader, paths=paths, epochs=work["epochs"] + work["ahead"])
    json.dump(measured(loader, work, sampler.set_epoch), sys.stdout)


if __name__ == "__main__":
    main()
