"""The row of an accelerator: how well a training uses it, from where its images lie.

INVARIANT: it ends: each epoch of each run after Setting.limit_s (gpu_reader.py), the process that
reads after that and what it takes to start.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusecache.config.settings import RAM_BYTES_MIN, SSD_BYTES_MIN
from tools.bench.hints import LATENCY_S, hinted_mount, run_reader, started_hintsd
from tools.bench.processes import processor_s
from tools.bench.readers import PREFETCH_FACTOR
from tools.bench.rows import Bench
from tools.demo_lib import dataset
from tools.hintsd_command import HintsdCommand
from tools.latency_origin import LatencyOrigin

EPOCHS = 2
RAM_SHARE, SSD_SHARE = 0.2, 0.5  # of the dataset
AHEAD_TIMES = 20  # the dataset is so many times what the loader has in flight: RAM is four times
DECODERS = ("workers", "device")
PEERS = ("ceiling", "stock", "unhinted", "fusecache")
_START_S = 120.0  # of a reader: CUDA, torch, the network
_HAS_CUDA = "import sys, torch; sys.exit(not torch.cuda.is_available())"


@dataclass(frozen=True)
class Setting:
    device: str = "cuda"
    network: str = "resnet50"
    pixels: int = 224
    batch: int = 64
    workers: int = max(2, (os.cpu_count() or 2) - 2)
    ahead_times: int = AHEAD_TIMES
    limit_s: int = 25  # of an epoch
    peers: tuple[str, ...] = PEERS
    decoders: tuple[str, ...] = DECODERS

    @property
    def images(self) -> int:
        return self.batch * self.workers * PREFETCH_FACTOR * self.ahead_times


def gpu(bench: Bench) -> None:
    """Row gpu: where CUDA is."""
    if subprocess.run([sys.executable, "-c", _HAS_CUDA], capture_output=True).returncode:
        bench.say("gpu: no CUDA device here: left out")
        bench.results.note("gpu: no CUDA device here: left out")
        return
    measure(bench, Setting(ahead_times=5) if bench.quick else Setting())


def measure(bench: Bench, setting: Setting) -> None:
    """The row with that device and network. OSError, RuntimeError: it could not be measured."""
    with bench.folder("gpu") as work:
        behind = work / "behind"
        bench.say(f"gpu: making {setting.images} JPEG files")
        size_bytes = dataset.make(behind, setting.images, 0).size_bytes
        with LatencyOrigin(behind, work, LATENCY_S) as origin, started_hintsd(work) as daemon:
            runs = _Runs(bench, setting, work, behind, origin.directory, size_bytes, daemon)
            for number in range(bench.rounds(1)):
                for decode in setting.decoders:
                    for peer in bench.turns(number, setting.peers):
                        runs.run(peer, decode, number)
                bench.say(f"gpu: round {number + 1} done")
    bench.results.note(
        f"gpu: {setting.network} on {setting.device}, {setting.images} JPEG files of"
        f" {size_bytes / setting.images / 1000:.0f} KB in batches of {setting.batch},"
        f" {setting.workers} workers"
    )


@dataclass(frozen=True)
class _Runs:
    bench: Bench
    setting: Setting
    work: Path
    behind: Path
    origin: Path
    size_bytes: int
    daemon: HintsdCommand

    def run(self, peer: str, decode: str, number: int) -> None:
        for file in self.behind.rglob("*.jpg"):  # the row is not about the disk of a server
            file.read_bytes()
        if peer == "ceiling":
            self._read(peer, decode, number, self.behind, lambda: ())
        elif peer == "stock":
            self._read(peer, decode, number, self.origin, lambda: ())
        else:
            ram = max(RAM_BYTES_MIN, int(self.size_bytes * RAM_SHARE))
            ssd = max(SSD_BYTES_MIN, int(self.size_bytes * SSD_SHARE))
            options = ("--ram", str(ram), "--ssd", str(ssd))
            with hinted_mount(self.daemon, self.origin, self.work, options) as mount:
                self._read(
                    *(peer, decode, number, mount.mountpoint),
                    lambda: (*mount.pids(), self.daemon.pid),
                )

    def _read(
        self, peer: str, decode: str, number: int, root: Path, pids: Callable[[], tuple[int, ...]]
    ) -> None:
        told = {name: getattr(self.setting, name) for name in _TOLD}
        told |= {"root": str(root), "seed": number, "epochs": EPOCHS, "decode": decode}
        told |= {"prefetch_factor": PREFETCH_FACTOR, "hints": peer == "fusecache"}
        before = processor_s(pids())
        timeout_s = _START_S + 3 * EPOCHS * self.setting.limit_s
        epochs = run_reader("tools.bench.gpu_reader", told, timeout_s)
        taken_s = processor_s(pids()) - before
        self._add(peer, f"decode in {decode}", epochs, taken_s)

    def _add(self, peer: str, what: str, epochs: list[dict[str, Any]], taken_s: float) -> None:
        add = self.bench.results.add
        for number, epoch in enumerate(epochs):
            which = f"{what}, {'later epochs' if number else 'first epoch'}"
            behind_s = epoch["seconds"] - epoch["first_step_s"]
            computed_s = epoch["compute_s"] - epoch["first_compute_s"]
            if computed_s:  # else it was left after one batch
                add("gpu", f"{which}: AU", peer, "of the time", computed_s / behind_s)
            add("gpu", f"{which}: first step", peer, "s", epoch["first_step_s"])
            speed = epoch["samples"] / epoch["seconds"]
            add("gpu", f"{which}: speed", peer, "images/s", speed)
            if not epoch["is_whole"]:
                self.bench.results.note(f"gpu, {which}: {peer} was left after {epoch['samples']}")
        samples = sum(epoch["samples"] for epoch in epochs)
        workers_s = sum(epoch["workers_cpu_s"] for epoch in epochs)
        add("gpu", f"{what}: CPU of the workers", peer, "us an image", workers_s / samples * 1e6)
        add("gpu", f"{what}: CPU of the mount", peer, "us an image", taken_s / samples * 1e6)


_TOLD = ("device", "network", "pixels", "batch", "workers", "images", "limit_s")
ROWS: dict[str, Callable[[Bench], None]] = {"gpu": gpu}
