"""A stock DataLoader that reads whole files by an importance sampler, or by a plain shuffle.

There is no network: the loss of a sample is how hard it is (log-normal, by the seed), times 0.9 for
each time that it was trained. So all arms of a seed have the same samples to learn.

Run as a process with a line of JSON on standard input: root, paths (relative to the root), seed,
epochs, batch, workers, step_s (seconds that a batch trains), settings (of the ImportanceSampler;
null: a plain shuffle), hints (whether hintsd is told).
After each epoch it prints a line of JSON: read (the indices as they were read), seconds,
substituted (reads that stand for another sample's). Then it waits for a line.
"""

import contextlib
import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import hintsd
from tools.bench.loader_reader import Files
from tools.hintsd_command import await_answer

EASIER = 0.9  # by each training


def main() -> None:
    work = json.loads(sys.stdin.readline())
    torch.set_num_threads(1)
    dataset = Files(work["root"], work["paths"])
    sampler = None
    if work["settings"] is not None:
        sampler = hintsd.ImportanceSampler(dataset, seed=work["seed"], **work["settings"])
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=work["batch"],
        sampler=sampler,
        shuffle=sampler is None,
        generator=torch.Generator().manual_seed(work["seed"]),
        num_workers=work["workers"],
        persistent_workers=True,
    )
    losses = np.random.default_rng(work["seed"]).lognormal(0.0, 1.0, len(dataset))
    paths = [os.path.join(work["root"], path) for path in work["paths"]]
    with contextlib.ExitStack() as stack:
        if work["hints"]:
            await_answer(stack.enter_context(hintsd.attach(loader, paths, work["epochs"])))
        for epoch in range(work["epochs"]):
            read: list[int] = []
            began_s = time.perf_counter()
            for indices, _sizes in loader:
                batch = indices.numpy()
                if sampler is not None:
                    sampler.learn(losses[batch])
                np.multiply.at(losses, batch, EASIER)
                read += batch.tolist()
                time.sleep(work["step_s"])
            seconds = time.perf_counter() - began_s
            substituted = 0 if sampler is None else sampler.report().substituted
            told = {"read": read, "seconds": seconds, "substituted": substituted}
            print(json.dumps(told), flush=True)
            if sampler is not None:
                sampler.judge(epoch / work["epochs"])  # it rises
            sys.stdin.readline()


if __name__ == "__main__":
    main()
