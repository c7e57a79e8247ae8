"""A stock DataLoader of a WebDataset: tar shards in another order each epoch, samples of raw bytes.

Run as a process of its own with a JSON object on standard input: shards (a directory), cache (of
WebDataset's own: an empty directory) and cache_bytes (0: none), and what loader_reader.py is told,
of which root, paths and ahead count for nothing. Prints what loader_reader.py prints.
"""

import json
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

import hintsd
from tools.bench.loader_reader import clean, measured
from tools.bench.streaming_reader import loading, of_tar, web_dataset

ACCEPTED_S = 60.0


def main() -> None:
    work = json.load(sys.stdin)
    torch.set_num_threads(1)
    loader: DataLoader[Any] = DataLoader(web_dataset(work).map(of_tar), **loading(work))
    clean(work)  # before hints may fetch anything
    if work["hints"]:
        hintsd.attach(loader, epochs=work["epochs"]).hear(ACCEPTED_S)
    json.dump(measured(loader, work, lambda _: None), sys.stdout)


if __name__ == "__main__":
    main()
