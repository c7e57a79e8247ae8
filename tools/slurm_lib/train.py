"""Trains for two epochs of FOLDER, hinted: a line for its hint, one for the bytes of each epoch.

usage: train.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time

from torch.utils.data import DataLoader, Dataset

import hintsd

PATIENCE_S = 60.0


class Files(Dataset[int]):
    def __init__(self, folder: str) -> None:
        self.paths = sorted(
            os.path.join(top, name) for top, _, names in os.walk(folder) for name in names
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        with open(self.paths[index], "rb") as file:
            return len(file.read())


def main() -> None:
    files = Files(sys.argv[1])
    loader = DataLoader(files, batch_size=4, shuffle=True)
    job = hintsd.attach(loader, files.paths, epochs=2)
    end = time.monotonic() + PATIENCE_S
    while job.state != "hinted" and time.monotonic() < end:
        time.sleep(0.05)
    print(job.state)
    for _ in range(2):
        print(sum(int(batch.sum()) for batch in loader))


if __name__ == "__main__":
    main()
