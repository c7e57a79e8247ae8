"""Rows shards and shards-latency: tar shards of a WebDataset, larger than the cache, in a stock
DataLoader: seconds, waiting, origin bytes and processor time of each epoch.

INVARIANT: each run begins with empty caches and a process of its own; the peers take turns.
"""

import functools
import io
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.budgets import MOUNTS, Origin, OriginOf, latent, on_device
from tools.bench.hints import hinted_mount, loader_work, run_reader, started_hintsd
from tools.bench.rows import Bench
from tools.hintsd_command import HintsdCommand

SHARDS, SHARDS_QUICK = 48, 12
SAMPLES, SAMPLE_BYTES = 160, 100_000
RAM, SSD = 0.25, 0.5  # of the dataset
EPOCHS = 3


def shards(bench: Bench) -> None:
    """Row shards: an origin of 100 MB/s and 2,000 requests a second."""
    _row(bench, "shards", functools.partial(on_device, limited=True))


def shards_latency(bench: Bench) -> None:
    """Row shards-latency: an origin that takes 5 ms for each request."""
    _row(bench, "shards-latency", latent)


def _fill(directory: Path, count: int) -> int:
    """Makes so many shards; bytes of all samples."""
    numbers = random.Random(1)
    noise = numbers.randbytes(2 * SAMPLE_BYTES)
    for shard in range(count):
        with tarfile.open(directory / f"{shard:06d}.tar", "w") as tar:
            for number in range(shard * SAMPLES, (shard + 1) * SAMPLES):
                member = tarfile.TarInfo(f"{number:08d}.bin")
                member.size = SAMPLE_BYTES
                first = numbers.randrange(SAMPLE_BYTES)
                tar.addfile(member, io.BytesIO(noise[first : first + SAMPLE_BYTES]))
    return count * SAMPLES * SAMPLE_BYTES


def _row(bench: Bench, row: str, origin_of: OriginOf) -> None:
    count = SHARDS_QUICK if bench.quick else SHARDS
    size_bytes = count * SAMPLES * (SAMPLE_BYTES + 2048)
    with bench.folder(row) as work, origin_of(work, size_bytes * 5 // 4) as origin:
        (origin.behind / "data").mkdir()
        total = _fill(origin.behind / "data", count)
        with started_hintsd(work) as daemon:
            runs = Runs(bench, row, work, origin, daemon, total)
            turns: dict[str, Callable[[int], None]] = {
                "stock": functools.partial(runs.read, "stock"),
                "webdataset": runs.cached,
            }
            turns |= {peer: functools.partial(runs.mounted, peer) for peer in MOUNTS}
            for number in range(bench.rounds(1 if bench.quick else 3)):
                for turn in bench.turns(number, tuple(turns)):
                    bench.drop()
                    turns[turn](number)
                bench.say(f"{row}: round {number + 1} done")


@dataclass(frozen=True)
class Runs:
    """Of one row, on one origin: each is a round's epochs of a peer."""

    bench: Bench
    row: str
    work: Path
    origin: Origin
    daemon: HintsdCommand
    total: int
    """Bytes of all samples."""
    reader: str = "tools.bench.shards_reader"
    ram: float = RAM
    ssd: float = SSD

    @property
    def source(self) -> Path:
        return self.origin.seen / "data"

    def mounted(self, peer: str, number: int) -> None:
        ram, ssd = int(self.total * self.ram), int(self.total * self.ssd)
        options = ("--ram", str(ram), "--ssd", str(ssd), *MOUNTS[peer])
        with hinted_mount(self.daemon, self.source, self.work, options) as mount:
            self.read(peer, number, shards=str(mount.mountpoint))

    def cached(self, number: int) -> None:
        """WebDataset's own cache, which holds shards as files."""
        cache = self.work / "webdataset-cache"
        cache.mkdir()
        try:
            self.read(
                "webdataset", number, cache=str(cache), cache_bytes=int(self.total * self.ssd)
            )
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    def read(self, peer: str, number: int, **told: Any) -> None:
        """`told`: of the reader's own, in place of no cache, on the origin."""
        work = loader_work(
            self.source,
            (),
            seed=number,
            epochs=EPOCHS,
            device=str(self.origin.counter),
            hints=peer == "fusecache",
            forget=str(self.source),
        )
        work |= {"shards": str(self.source), "cache": "", "cache_bytes": 0} | told
        for epoch, done in enumerate(run_reader(self.reader, work)):
            if done["bytes"] != self.total:
                raise RuntimeError(f"{peer} read {done['bytes']} of {self.total} bytes")
            what = "later epochs" if epoch else "first epoch"
            figures = (
                ("", "s", done["seconds"]),
                (": waiting", "s", done["stall_s"]),
                (": origin", "of the dataset", done["device_bytes"] / self.total),
                (": CPU", "s", done["cpu_s"]),
            )
            for more, unit, value in figures:
                self.bench.results.add(self.row, what + more, peer, unit, value)


ROWS: dict[str, Callable[[Bench], None]] = {"shards": shards, "shards-latency": shards_latency}
