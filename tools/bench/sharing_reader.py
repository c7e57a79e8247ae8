"""A stock DataLoader that reads whole files, in an order of its own.

Run as a process with a line of JSON on standard input: root, paths (relative to the root), seed,
epochs, batch, workers, sampler (shuffle, substitutable, chunked), hinted, pause_s (after each
batch: it trains). It prints "ready", and waits for a line before each epoch; after it, it prints
how many different samples it has read.
"""

import contextlib
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

CHUNKS = 20


def main() -> None:
    work = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    dataset = Files(work["root"], work["paths"])
    loader = _loader(dataset, work)
    paths = [os.path.join(work["root"], path) for path in work["paths"]]
    with contextlib.ExitStack() as stack:
        if work["hinted"]:
            job = stack.enter_context(hintsd.attach(loader, paths=paths, epochs=work["epochs"]))
            await_answer(job)
        print("ready", flush=True)
        for _ in range(work["epochs"]):
            sys.stdin.readline()
            read: set[int] = set()
            for indices, _sizes in loader:
                read.update(indices.tolist())
                time.sleep(work["pause_s"])
            print(len(read), flush=True)


def _loader(dataset: Files, work: dict[str, Any]) -> "DataLoader[Any]":
    options: dict[str, Any]
    if work["sampler"] == "shuffle":
        generator = torch.Generator()
        generator.manual_seed(work["seed"])
        options = {"shuffle": True, "generator": generator}
    elif work["sampler"] == "substitutable":
        sampler = hintsd.SubstitutableSampler(dataset, work["batch"], seed=work["seed"])
        options = {"sampler": sampler}
    else:
        chunked = hintsd.ChunkedSampler(dataset, work["batch"], seed=work["seed"], chunks=CHUNKS)
        options = {"sampler": chunked}
    return DataLoader(
        dataset,
        batch_size=work["batch"],
        num_workers=work["workers"],
        persistent_workers=True,
        **options,
    )


if __name__ == "__main__":
    main()
