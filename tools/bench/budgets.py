"""The rows of a cache for a part of the dataset, and for all of it: seconds, origin bytes and
processor time of each epoch of a stock loader (HDMLP, section 6, has these cases).

INVARIANT: each run begins with empty caches and a process of its own; the peers take turns.
INVARIANT: between epochs a peer keeps what it calls its RAM, and no other pages: of a mount its
own ones stay, those of its origin go.
"""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusecache.config import RAM_BYTES_MIN
from tools.bench.hints import (
    LATENCY_S,
    ORIGIN_BPS,
    ORIGIN_IOPS,
    hinted_mount,
    load_epochs,
    started_hintsd,
)
from tools.bench.rows import Bench
from tools.hintsd_command import HintsdCommand
from tools.latency_origin import LatencyOrigin
from tools.slow_origin import LoopOrigin

EPOCHS = 3
BUDGETS = {"half": (0.10, 0.40), "all": (0.20, 1.15)}  # RAM and SSD, of the dataset
COUNTS = {10_000: 17_000, 100_000: 3072, 500_000: 600}
_MOUNTS: dict[str, tuple[str, ...]] = {
    "unhinted": (),
    "keep": ("--policy", "keep"),
    "fusecache": (),
}


def _files(size_bytes: int, count: int) -> int:
    """So many, or more: the smaller --ram must be one that a mount takes."""
    share = min(ram for ram, _ in BUDGETS.values())
    return max(count, math.ceil(RAM_BYTES_MIN / share / size_bytes))


def budgets(bench: Bench) -> None:
    """Row budgets: an origin of 100 MB/s and 2,000 requests a second."""
    for size, full in COUNTS.items():
        count = _files(size, full // 4 if bench.quick else full)
        with (
            bench.folder("budgets") as work,
            LoopOrigin(work, count * (size + 8192) * 5 // 4) as device,
        ):
            source = device.directory / "data"
            source.mkdir()
            names = bench.readers.fill_files(source, count, size, 8)
            device.throttle(ORIGIN_BPS, ORIGIN_IOPS)
            _measure(Budgets(bench, "budgets", work, source, names, size, device))


def budgets_latency(bench: Bench) -> None:
    """Row budgets-latency: an origin that takes 5 ms for each request."""
    size, full = 100_000, COUNTS[100_000]
    count = _files(size, full // 4 if bench.quick else full)
    with bench.folder("budgets-latency") as work:
        behind = work / "behind"
        behind.mkdir()
        names = bench.readers.fill_files(behind, count, size, 8)
        with LatencyOrigin(behind, work, LATENCY_S) as origin:
            _measure(Budgets(bench, "budgets-latency", work, origin.directory, names, size))


@dataclass(frozen=True)
class Budgets:
    """The runs of one dataset on one origin."""

    bench: Bench
    row: str
    work: Path
    source: Path
    names: Sequence[str]
    size: int
    device: LoopOrigin | None = None  # whose bytes are counted

    @property
    def what(self) -> str:
        return f"{self.size // 1000} KB"

    def mount(self, peer: str, daemon: HintsdCommand, number: int, budget: str) -> None:
        ram, ssd = (str(int(len(self.names) * self.size * share)) for share in BUDGETS[budget])
        options = ("--ram", ram, "--ssd", ssd, *_MOUNTS[peer])
        with hinted_mount(daemon, self.source, self.work, options) as mount:
            self._read(peer, number, (budget,), mount.mountpoint, forget=self.source)

    def stock(self, number: int) -> None:
        """It has no budgets: one run stands for all."""
        self._read("stock", number, tuple(BUDGETS), self.source, forget=self.source)

    def copied(self, number: int) -> None:
        """All files are copied to SSD first."""
        copy = self.work / "copy"
        begin = time.perf_counter()
        shutil.copytree(self.source, copy)
        seconds = time.perf_counter() - begin
        self.bench.results.add(self.row, f"{self.what}, to copy it", "copied", "s", seconds)
        self._read("copied", number, ("all",), copy, forget=copy)
        shutil.rmtree(copy)

    def _read(
        self, peer: str, number: int, budgets: tuple[str, ...], root: Path, forget: Path
    ) -> None:
        options: dict[str, Any] = {"seed": number, "epochs": EPOCHS, "forget": str(forget)}
        options["hints"] = peer == "fusecache"
        if self.device is not None:
            options["device"] = str(self.device.stat_path)
        add, total = self.bench.results.add, len(self.names) * self.size
        for epoch, done in enumerate(load_epochs(root, self.names, **options)):
            cpu_us = done["cpu_s"] * 1e6 / done["samples"]
            for budget in budgets:
                what = f"{self.what}, {budget}, {'later epochs' if epoch else 'first epoch'}"
                add(self.row, what, peer, "s", done["seconds"])
                add(self.row, f"{what}: CPU", peer, "us a file", cpu_us)
                if self.device is not None:
                    share = done["device_bytes"] / total
                    add(self.row, f"{what}: origin", peer, "of the dataset", share)


def _measure(runs: Budgets) -> None:
    bench = runs.bench
    with started_hintsd(runs.work) as daemon:
        for number in range(bench.rounds(3)):
            turns: dict[str, Callable[[], None]] = {
                f"{peer}, {budget}": _turn(runs, peer, daemon, number, budget)
                for budget in BUDGETS
                for peer in _MOUNTS
            }
            turns["stock"] = lambda number=number: runs.stock(number)  # type: ignore[misc]
            turns["copied"] = lambda number=number: runs.copied(number)  # type: ignore[misc]
            for turn in bench.turns(number, tuple(turns)):
                bench.drop()
                turns[turn]()
            bench.say(f"{runs.row}, {runs.what}: round {number + 1} done")


def _turn(
    runs: Budgets, peer: str, daemon: HintsdCommand, number: int, budget: str
) -> Callable[[], None]:
    return lambda: runs.mount(peer, daemon, number, budget)


ROWS: dict[str, Callable[[Bench], None]] = {
    "budgets": budgets,
    "budgets-latency": budgets_latency,
}
COLUMNS = ("copied", "keep")
