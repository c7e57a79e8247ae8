"""What the rows of the log share: a dataset, a device that holds caches, and epochs of a mount.

INVARIANT: all peers read the same files in the same order, through the same stock DataLoader.
INVARIANT: what is measured of a mount is whole epochs after its first one, in which its store was
filled (and, with a log, packed); every byte of them comes from the device, but for `--ram`.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.hints import RAM_SHARE, READERS, HintDoubted, hinted_mount, load_epochs
from tools.bench.rows import Bench
from tools.fusecache_command import FusecacheMount
from tools.hintsd_command import HintsdCommand
from tools.slow_origin import LoopOrigin

# Samples, and how many: a fifth of them is RAM enough for a log of 64 KiB a chunk (docs/LOG.md),
# and an epoch lasts seconds: what happens between two, some 0.1 s, does not grow with them.
COUNTS = {3000: 120_000, 10_000: 120_000, 30_000: 50_000, 110_000: 20_000}
COUNTS_QUICK = {3000: 6000, 10_000: 8000, 30_000: 1500, 110_000: 2000}
DEVICE_IOPS = 3000
AHEAD = 4  # epochs that are announced beyond those read: or nothing would be written in the last
_CHUNK_BUFFERS_BYTES = 16 << 20  # of RAM for each chunk, of which there are 8 to a window
_RECORD_BYTES = 4096  # records are as many of these as header and payload need
_HEADER_BYTES = 192


@dataclass(frozen=True)
class Files:
    source: Path  # on the plain disk: from here stores are filled
    names: Sequence[str]
    size: int
    ram_bytes: int  # of one job

    @property
    def bytes(self) -> int:
        return len(self.names) * self.size

    @property
    def on_ssd_bytes(self) -> int:
        return len(self.names) * (-(-(self.size + _HEADER_BYTES) // _RECORD_BYTES) * _RECORD_BYTES)

    @property
    def what(self) -> str:
        return f"{self.size // 1000} KB"


@dataclass(frozen=True)
class Place:
    """Where caches lie. `fusecache probe` has measured it: the result is kept beside them."""

    directory: Path
    name: str
    sequential_bytes_per_s: float
    disk: LoopOrigin | None = None  # of which bytes are counted

    def written_bytes(self) -> int | None:
        """To the device, since it exists."""
        if self.disk is None:
            return None
        os.sync()
        return self.disk.bytes_written()


@dataclass(frozen=True)
class Stand:
    """What mounts of a row have in common."""

    bench: Bench
    daemon: HintsdCommand
    files: Files
    place: Place


@dataclass(frozen=True)
class Ran:
    """A mount's epochs after the first one (see loader_reader.py)."""

    epochs: list[dict[str, Any]]
    log_written_share: float  # bytes of the log for each byte that was read, in all epochs
    written_share: float | None  # the same of the device: the store's first filling, too

    @property
    def seconds(self) -> float:
        """Of one epoch, in the mean."""
        return float(sum(epoch["seconds"] for epoch in self.epochs)) / len(self.epochs)


@contextlib.contextmanager
def dataset(bench: Bench, work: Path, size: int, most: int = 1 << 30) -> Iterator[Files]:
    """`most`: files, if the command does not say how many."""
    counts = COUNTS_QUICK if bench.quick else COUNTS
    count = bench.files.get(size) or min(counts[size], most)
    source = work / "source"
    source.mkdir()
    bench.say(f"making {count} files of {size} bytes")
    names = bench.readers.fill_files(source, count, size, 3)
    ram = int(count * size * RAM_SHARE)
    if bench.quick:  # for a sixteenth of it to be 64 KiB for each chunk
        ram = int((_CHUNK_BUFFERS_BYTES * count * size) ** 0.5)
    try:
        yield Files(source, names, size, ram)
    finally:
        shutil.rmtree(source, ignore_errors=True)


def device(work: Path, files: Files) -> LoopOrigin:
    """For the files, two logs of them, and what ext4 and the store want to be left."""
    folder = work / "device"
    folder.mkdir(exist_ok=True)
    return LoopOrigin(folder, files.bytes * 5 // 4 + files.on_ssd_bytes * 5 // 2 + (1 << 30))


def measured(
    bench: Bench,
    daemon: HintsdCommand,
    files: Files,
    directory: Path,
    name: str,
    disk: LoopOrigin | None = None,
) -> Stand:
    """With the place as `fusecache probe` measures it, in a cache directory of its own; `auto`
    needs the result, which is kept in `directory`.
    """
    with hinted_mount(daemon, files.source, bench.work / "log", (), directory) as mount:
        cache = directory / "hinted-cache"
        said = json.loads(mount.command("probe", str(cache), "--json"))
        shutil.copy(cache / "probe", directory)
    place = Place(directory, name, float(said["sequential_bytes_per_s"]), disk)
    return Stand(bench, daemon, files, place)


@contextlib.contextmanager
def mounted(
    stand: Stand,
    layout: str,
    source: Path | None = None,
    options: tuple[str, ...] = (),
    jobs: int = 1,
) -> Iterator[FusecacheMount]:
    """An empty cache on the measured place; RAM for so many jobs; kernel caches dropped."""
    bench, files, directory = stand.bench, stand.files, stand.place.directory
    cache = directory / "hinted-cache"
    cache.mkdir()
    try:
        shutil.copy(directory / "probe", cache)
        ram = ("--ram", str(files.ram_bytes * jobs), "--layout", layout)
        root = bench.work / "log"
        source = source or files.source
        with hinted_mount(stand.daemon, source, root, (*ram, *options), directory) as mount:
            bench.drop()
            bench.readers.list_tree(mount.mountpoint)
            yield mount
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def run(
    stand: Stand,
    what: str,
    layout: str,
    source: Path | None = None,
    options: tuple[str, ...] = (),
    pace_bytes_per_s: float = 0.0,
) -> Ran | None:
    """A first epoch and those that count; None: the mount has not done that layout."""
    bench, files, place = stand.bench, stand.files, stand.place
    count = bench.epochs or (2 if layout == "static" or bench.quick else 4)
    with mounted(stand, layout, source, options) as mount:
        before = place.written_bytes()
        try:
            epochs = load_epochs(
                mount.mountpoint,
                files.names,
                seed=1,
                epochs=1 + count,
                hints=True,
                ahead=AHEAD,
                workers=READERS,
                pace_bytes_per_s=pace_bytes_per_s,
            )
        except HintDoubted as error:
            bench.results.note(f"log: {what}: {layout}: left out: {error}")
            return None
        written = log_written_bytes(mount)
        why = chosen(stand.daemon)
        after = place.written_bytes()
    if layout == "reorder" and not written:
        bench.results.note(f"log: {what}: nothing was packed with --layout reorder: left out")
        return None
    if layout == "auto":
        bench.results.note(f"log: {what}: auto has chosen {why}")
    served = len(epochs) * files.bytes
    share = None if before is None or after is None else (after - before) / served
    return Ran(epochs[1:], written / served, share)


def log_written_bytes(mount: FusecacheMount) -> int:
    return int(mount.status().get("layout", {}).get("log_written_bytes", 0))


def chosen(daemon: HintsdCommand) -> str:
    """What the job that has just ended, or is about to, says of its layout."""
    status = daemon.status()
    said = [job for job in (*status["ended"], *status["jobs"]) if "layout" in job]
    return f"{said[-1]['layout']}: {said[-1]['layout_why']}" if said else "static"
