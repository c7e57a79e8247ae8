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
from pathlib import Path

from tools.bench.budgets import Origin, OriginOf, latent, on_device
from tools.bench.hints import hinted_mount, loader_work, run_reader, started_hintsd
from tools.bench.rows import Bench
from tools.hintsd_command import HintsdCommand

SHARDS, SHARDS_QUICK = 48, 12
SAMPLES, SAMPLE_BYTES = 160, 100_000
RAM, SSD = 0.25, 0.5  # of the dataset
EPOCHS = 3
_MOUNTS: dict[str, tuple[str, ...]] = {
    "unhinted": (),
    "keep": ("--policy", "keep"),
    "fusecache": (),
}


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
            turns: dict[str, Callable[[int], None]] = {
                "stock": functools.partial(_read, bench, row, total, origin, "stock"),
                "webdataset": functools.partial(_cached, bench, row, total, origin, work),
            }
            for peer in _MOUNTS:
                turns[peer] = functools.partial(
                    _mounted, bench, row, total, origin, work, daemon, peer
                )
            for number in range(bench.rounds(1 if bench.quick else 3)):
                for turn in bench.turns(number, tuple(turns)):
                    bench.drop()
                    turns[turn](number)
                bench.say(f"{row}: round {number + 1} done")


def _mounted(
    bench: Bench, row: str, total: int, origin: Origin, work: Path, daemon: HintsdCommand,
    peer: str, number: int,
) -> None:  # fmt: skip
    options = ("--ram", str(int(total * RAM)), "--ssd", str(int(total * SSD)), *_MOUNTS[peer])
    with hinted_mount(daemon, origin.seen / "data", work, options) as mount:
        _read(bench, row, total, origin, peer, number, mount.mountpoint)


def _cached(bench: Bench, row: str, total: int, origin: Origin, work: Path, number: int) -> None:
    """WebDataset's own cache, which holds shards as files."""
    cache = work / "webdataset-cache"
    cache.mkdir()
    try:
        _read(
            *(bench, row, total, origin, "webdataset", number, None),
            cache=str(cache),
            cache_bytes=int(total * SSD),
        )
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _read(
    bench: Bench,
    row: str,
    total: int,
    origin: Origin,
    peer: str,
    number: int,
    root: Path | None = None,
    cache: str = "",
    cache_bytes: int = 0,
) -> None:
    source = origin.seen / "data"
    options = {"seed": number, "epochs": EPOCHS, "device": str(origin.counter)}
    told = loader_work(source, (), **options, hints=peer == "fusecache", forget=str(source))
    told |= {"shards": str(root or source), "cache": cache, "cache_bytes": cache_bytes}
    for epoch, done in enumerate(run_reader("tools.bench.shards_reader", told)):
        if done["bytes"] != total:
            raise RuntimeError(f"{peer} read {done['bytes']} of {total} bytes")
        what = "later epochs" if epoch else "first epoch"
        figures = (
            ("", "s", done["seconds"]),
            (": waiting", "s", done["stall_s"]),
            (": origin", "of the dataset", done["device_bytes"] / total),
            (": CPU", "s", done["cpu_s"]),
        )
        for more, unit, value in figures:
            bench.results.add(row, what + more, peer, unit, value)


ROWS: dict[str, Callable[[Bench], None]] = {"shards": shards, "shards-latency": shards_latency}
