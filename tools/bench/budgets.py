"""The rows of a cache for a part of the dataset, and for all of it: seconds, origin bytes and
processor time of each epoch of a stock loader (HDMLP, section 6, has these cases).

INVARIANT: each run begins with empty caches and a process of its own; the peers take turns.
INVARIANT: between epochs a peer keeps what it calls its RAM, and no other pages: of a mount its
own ones stay, those of its origin go.
"""

import functools
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusecache.config import RAM_BYTES_MIN
from tools.bench.hints import (
    BATCH,
    LATENCY_S,
    ORIGIN_BPS,
    ORIGIN_IOPS,
    READERS,
    hinted_mount,
    load_epochs,
    run_module,
    started_hintsd,
)
from tools.bench.nopfs_reader import configuration
from tools.bench.readers import PREFETCH_FACTOR
from tools.bench.rows import Bench
from tools.hintsd_command import HintsdCommand
from tools.latency_origin import LatencyOrigin
from tools.slow_origin import LoopOrigin

EPOCHS = 3
BUDGETS = {"half": (0.10, 0.40), "all": (0.20, 1.15)}  # RAM and SSD, of the dataset
COUNTS = {10_000: 17_000, 100_000: 3072, 500_000: 600}
NOPFS_BUILD = Path(__file__).with_name("nopfs")
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

    def nopfs(self, built: Path, number: int, budget: str) -> None:
        """Its own loader; it holds as many files ahead as the stock loader's queues."""
        total = len(self.names) * self.size
        ram, ssd = (total * share for share in BUDGETS[budget])
        storage = self.work / "nopfs"
        storage.mkdir()
        config = self.work / "nopfs.cfg"
        ahead = PREFETCH_FACTOR * READERS * BATCH * self.size
        config.write_text(configuration(ahead, ram, ssd, storage))
        paths = {"built": built, "root": self.source, "config": config, "storage": storage}
        work: dict[str, Any] = {name: str(path) for name, path in paths.items()}
        work |= {"seed": number, "epochs": EPOCHS, "batch": BATCH}
        work["device"] = "" if self.device is None else str(self.device.stat_path)
        try:
            done = json.loads(run_module("tools.bench.nopfs_reader", told=json.dumps(work)).stdout)
        except (RuntimeError, subprocess.SubprocessError) as error:
            self.bench.say(f"{self.row}, {self.what}, {budget}: NoPFS failed: {error}")
            self.bench.results.note(f"{self.row}, {self.what}, {budget}: NoPFS failed: {error}")
            return
        finally:
            shutil.rmtree(storage)
        if any(epoch["bytes"] != total for epoch in done):
            raise RuntimeError(f"NoPFS did not read each of {len(self.names)} files")
        what = f"{self.what}, {budget}, set-up, within the first epoch"
        self.bench.results.add(self.row, what, "nopfs", "s", done[0]["setup_s"])
        self._add("nopfs", (budget,), done)

    def _read(
        self, peer: str, number: int, budgets: tuple[str, ...], root: Path, forget: Path
    ) -> None:
        options: dict[str, Any] = {"seed": number, "epochs": EPOCHS, "forget": str(forget)}
        options["hints"] = peer == "fusecache"
        if self.device is not None:
            options["device"] = str(self.device.stat_path)
        self._add(peer, budgets, load_epochs(root, self.names, **options))

    def _add(self, peer: str, budgets: tuple[str, ...], epochs: list[dict[str, Any]]) -> None:
        add, total = self.bench.results.add, len(self.names) * self.size
        for epoch, done in enumerate(epochs):
            cpu_us = done["cpu_s"] * 1e6 / done["samples"]
            for budget in budgets:
                what = f"{self.what}, {budget}, {'later epochs' if epoch else 'first epoch'}"
                add(self.row, what, peer, "s", done["seconds"])
                add(self.row, f"{what}: CPU", peer, "us a file", cpu_us)
                if self.device is not None:
                    share = done["device_bytes"] / total
                    add(self.row, f"{what}: origin", peer, "of the dataset", share)


def built_nopfs(bench: Bench) -> Path | None:
    """Where NoPFS lies, built if need be; None, and it is said: it cannot be built here."""
    done = subprocess.run([NOPFS_BUILD], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Path(done.stdout.strip())
    why = (done.stderr.strip().splitlines() or ["?"])[-1]
    bench.say(f"NoPFS is left out: {why}")
    bench.results.note(f"NoPFS was left out: {why}")
    return None


def _measure(runs: Budgets) -> None:
    bench = runs.bench
    built = built_nopfs(bench)
    with started_hintsd(runs.work) as daemon:
        for number in range(bench.rounds(3)):
            turns: dict[str, Callable[[], None]] = {
                f"{peer}, {budget}": _turn(runs, peer, daemon, number, budget)
                for budget in BUDGETS
                for peer in _MOUNTS
            }
            if built is not None:
                for budget in BUDGETS:
                    turns[f"nopfs, {budget}"] = functools.partial(runs.nopfs, built, number, budget)
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
COLUMNS = ("copied", "keep", "nopfs")
