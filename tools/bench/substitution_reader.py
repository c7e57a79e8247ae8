"""A stock DataLoader that reads whole files by a SubstitutableSampler.

Run as a process with a line of JSON on standard input: root, paths (relative to the root), seed,
epochs, batch, workers, look_ahead (in batches), pause_s (after each batch: it trains).
Before each epoch it waits for a line; after it, it prints a line of JSON: how many different
samples it has read.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader

import hintsd
from tools.bench.loader_reader import Files
from tools.hintsd_command import await_answer


def main() -> None:
    work = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    dataset = Files(work["root"], work["paths"])
    sampler = hintsd.SubstitutableSampler(
        dataset, work["batch"], seed=work["seed"], look_ahead=work["look_ahead"]
    )
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=work["batch"],
        sampler=sampler,
        num_workers=work["workers"],
        persistent_workers=True,
    )
    paths = [os.path.join(work["root"], path) for path in work["paths"]]
    with hintsd.attach(loader, paths=paths, epochs=work["epochs"]) as job:
        await_answer(job)
        for _ in range(work["epochs"]):
            sys.stdin.readline()
            read: set[int] = set()
            for indices, _sizes in loader:
                read.update(indices.tolist())
                time.sleep(work["pause_s"])
            print(json.dumps(len(read)), flush=True)


if __name__ == "__main__":
    main()
