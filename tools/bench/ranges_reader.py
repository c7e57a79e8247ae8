"""A stock DataLoader that shuffles the rows of an npy file, which is mapped into memory.

Run as a process of its own with a JSON object on standard input: shards (the file's directory), and
what loader_reader.py is told, of which root, paths and ahead count for nothing. Prints what
loader_reader.py prints.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import hintsd
from tools.bench.loader_reader import clean, measured
from tools.bench.streaming_reader import Sample, loading

NAME: Final = "rows.npy"


class Rows(Dataset[Sample]):
    """Of one file."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return index, self.rows[index].tobytes()


def main() -> None:
    work = json.load(sys.stdin)
    torch.set_num_threads(1)
    dataset = Rows(Path(work["shards"]) / NAME)
    generator = torch.Generator().manual_seed(work["seed"])
    loader: DataLoader[Any] = DataLoader(
        dataset, shuffle=True, generator=generator, **loading(work)
    )
    clean(work)  # before hints may fetch anything
    if work["hints"]:
        hintsd.attach(loader, hintsd.rows_of(dataset.rows), work["epochs"])
    json.dump(measured(loader, work, lambda _: None), sys.stdout)


if __name__ == "__main__":
    main()
