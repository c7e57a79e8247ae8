"""Samples within large files, on a real mount: their ranges are in the page cache before they are
read, and of the origin no more was read than they are."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import hintsd
from hintsd.client import warning
from tests.conftest import Mounting, Place, in_one_mode
from tests.support import PATIENCE_S
from tests.support.mounted import Mount, environment, eventually
from tests.support.trees import random_bytes

BUSY = 4
BLOCK_BYTES = 4 << 20
BLOCKS = 12
ROW_BYTES = 96 << 10  # whole pages
ROWS_OF_BLOCK = BLOCK_BYTES // ROW_BYTES


class Rows(Dataset[Any]):
    """One row of each block of a file."""

    def __init__(self, path: Path, row_bytes: int = ROW_BYTES) -> None:
        self.path, self.row_bytes = path, row_bytes
        self.ranges = hintsd.Ranges(
            [path],
            [0] * BLOCKS,
            [number * BLOCK_BYTES + (number + 3) * ROW_BYTES for number in range(BLOCKS)],
            [row_bytes] * BLOCKS,
        )

    def __len__(self) -> int:
        return BLOCKS

    def __hintsd_paths__(self) -> hintsd.Ranges:
        return self.ranges

    def __getitem__(self, index: int) -> bytes:
        (offset,) = self.ranges.table[1][index].tolist()
        file = os.open(self.path, os.O_RDONLY)
        try:
            return os.pread(file, self.row_bytes, offset)
        finally:
            os.close(file)


@pytest.fixture(autouse=True)
def _nothing_was_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warning, "_warned", set())


def fetched_bytes(mount: Mount, expected: int) -> None:
    def look() -> bool:
        assert mount.value("origin", "bytes") == expected
        return True

    eventually(look)


@in_one_mode
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("workers", [0, 2])
def test_ranges_are_there_before_they_are_read(
    place: Place, mounting: Mounting, workers: int
) -> None:
    """No hintsd is needed. The rest of each block is left where it is."""
    content = random_bytes("rows", BLOCKS * BLOCK_BYTES)
    os.utime(place.write("rows.bin", content), (1e9, 1e9))
    mount = mounting("--ram", "64M", "--ssd", "64M")
    dataset = Rows(mount.path / "rows.bin")
    torch.manual_seed(1)
    order = torch.randperm(BLOCKS).tolist()
    loader: Any = DataLoader(
        dataset, 1, sampler=order, num_workers=workers, collate_fn=lambda rows: rows[0]
    )
    with hintsd.attach(loader) as job:
        assert job.state == "hinted"
        batches = iter(loader)
        found = [next(batches)]
        fetched_bytes(mount, BLOCKS * ROW_BYTES)  # of all, while it stands at the first
        requests = mount.value("reads", "requests")
        busy = mount.run("umount", mount.path)
        assert (busy.returncode, "is in use by" in busy.stderr) == (BUSY, True)
        found += batches
    offsets = dataset.ranges.table[1][order].ravel().tolist()
    assert found == [content[offset : offset + ROW_BYTES] for offset in offsets]
    status = mount.status()
    assert status["origin"]["bytes"] == BLOCKS * ROW_BYTES
    assert status["reads"]["requests"] == requests


@in_one_mode
def test_of_large_ranges_the_blocks_are_fetched(place: Place, mounting: Mounting) -> None:
    """The kernel asks for them in pieces, of which the second is a second touch of the block. None
    looks like the beginning of the whole file."""
    content = random_bytes("rows", BLOCKS * BLOCK_BYTES)
    os.utime(place.write("rows.bin", content), (1e9, 1e9))
    mount = mounting("--ram", "64M", "--ssd", "64M")
    row_bytes, piece_bytes = 600 << 10, 128 << 10
    chosen = list(range(0, BLOCKS, 2))
    dataset = Subset(Rows(mount.path / "rows.bin", row_bytes), chosen)
    loader: Any = DataLoader(dataset, 1, collate_fn=lambda rows: rows[0])
    with hintsd.attach(loader):
        batches = iter(loader)
        found = [next(batches)]
        pieces = -(-row_bytes // piece_bytes) * len(chosen)

        def look() -> bool:
            assert mount.value("reads", "requests") >= pieces
            return True

        eventually(look)
        requests = mount.value("reads", "requests")
        found += batches
    offsets = dataset.dataset.ranges.table[1][chosen].ravel().tolist()  # type: ignore[attr-defined]
    assert found == [content[offset : offset + row_bytes] for offset in offsets]
    # Where its reader comes to the first one before that, it reads some of it itself.
    assert mount.value("reads", "requests") <= requests
    fetched = mount.value("origin", "bytes")
    assert 0 < fetched <= len(chosen) * (BLOCK_BYTES + 3 * piece_bytes)


@in_one_mode
def test_a_later_epoch_finds_all_in_place(place: Place, mounting: Mounting) -> None:
    """Each block is touched by many rows: it is fetched once, and stays on SSD."""
    content = np.frombuffer(random_bytes("rows", BLOCKS * BLOCK_BYTES), np.uint8)
    os.utime(place.write("rows.bin", content.tobytes()), (1e9, 1e9))
    mount = mounting("--ram", "16M", "--ssd", "128M")
    rows: Any = np.memmap(
        mount.path / "rows.bin", np.uint8, "r", shape=(len(content) // ROW_BYTES, ROW_BYTES)
    )
    loader = DataLoader(rows, 8, shuffle=True, num_workers=2)
    with hintsd.attach(loader, hintsd.rows_of(rows)):
        for _ in range(3):
            read = np.concatenate([batch.numpy() for batch in loader])
            assert np.array_equal(np.sort(read[:, 7]), np.sort(np.array(rows)[:, 7]))
    del loader, rows, read  # the map is closed, and with it the file
    gc.collect()
    # Two touches of a block come before it; and what the kernel reads around a map's fault.
    assert mount.value("origin", "bytes") <= 1.3 * len(content)
    assert mount.value("ssd", "bytes") >= 0.9 * len(content)


SCRIPT = """
import sys
import datasets
from torch.utils.data import DataLoader
rows = datasets.load_from_disk(sys.argv[1])
for epoch in range(2):
    assert sum(map(len, (batch["x"] for batch in DataLoader(rows, 8, shuffle=True)))) == len(rows)
"""


def hintsd_of(home: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A command with a script and its argument last."""
    *told, script, argument = map(str, words)
    command = [sys.executable, "-m", "hintsd", *told, "--", sys.executable, script, argument]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=environment(HF_HOME=str(home), HF_HUB_OFFLINE="1"),
        check=False,
    )


@in_one_mode
def test_a_dataset_of_arrow_files_below_hintsd_run(
    place: Place, mounting: Mounting, tmp_path: Path
) -> None:
    import datasets  # type: ignore[import-untyped]  # it has no types

    datasets.disable_progress_bars()
    values = [os.urandom(20_000) for _ in range(500)]
    rows = datasets.Dataset.from_dict({"x": values})
    rows.save_to_disk(place.source / "saved")
    mount = mounting("--ram", "64M")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = hintsd_of(tmp_path, "run", "--require", script, mount.path / "saved")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "hintsd: run: 2 loaders hinted"
    done = hintsd_of(tmp_path, "explain", script, mount.path / "saved")
    order = "would be hinted: the order of RandomSampler, as each epoch begins"
    assert done.stdout.endswith(f"{order}; by ranges, which need no hintsd\n"), done
    assert done.returncode == 0
