"""Row log: what it brings that samples lie on SSD in the order in which the next epoch reads them.

INVARIANT: all peers read the same files in the same order, through the same stock DataLoader.
INVARIANT: what is measured of a mount is whole epochs after its first one, in which its store was
filled (and, with a log, packed); every byte of them comes from the device, but for `--ram`.
"""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.hints import (
    ORIGIN_BPS,
    ORIGIN_IOPS,
    PACE_SHARE,
    RAM_SHARE,
    READERS,
    hinted_mount,
    load_epochs,
    started_hintsd,
)
from tools.bench.rows import Bench
from tools.fusecache_command import default_executable
from tools.hintsd_command import HintsdCommand
from tools.slow_origin import LoopOrigin

# Samples, and how many: a fifth of them is RAM enough for a log of 64 KiB a chunk (docs/LOG.md).
SIZES = {3000: 120_000, 10_000: 36_000, 30_000: 15_000, 110_000: 6000}
SIZES_QUICK = {10_000: 3000}
RAM_BYTES_QUICK = 24 << 20
PACED_BYTES = 110_000
PARTIAL = {10_000: 20_000, 110_000: 4000}
PARTIAL_QUICK = {10_000: 3000}
PARTIAL_SHARE = 0.5
DEVICE_IOPS = 3000
EPOCHS = 3
LAYOUTS = ("static", "reorder", "auto")
_RECORD_BYTES = 4096  # records are as many of these as header and payload need
_HEADER_BYTES = 192
_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Files:
    source: Path  # on the plain disk: from here stores are filled
    names: Sequence[str]
    size: int
    ram_bytes: int

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
class _Ran:
    """A mount's epochs after the first one (see loader_reader.py)."""

    epochs: list[dict[str, Any]]
    written_share: float  # bytes of the log for each byte that was read, in all epochs

    @property
    def seconds(self) -> float:
        """Of one epoch, in the mean."""
        return float(sum(epoch["seconds"] for epoch in self.epochs)) / len(self.epochs)


def log(bench: Bench) -> None:
    """See the module."""
    with bench.folder("log") as work, started_hintsd(work) as daemon:
        for size, count in (SIZES_QUICK if bench.quick else SIZES).items():
            with _files(bench, work, size, count) as files:
                if not bench.quick:
                    _epochs(bench, daemon, files, work, files.source, "plain")
                with _device(work, files) as disk:
                    native = disk.directory / "native"
                    native.mkdir()
                    bench.readers.fill_files(native, count, size, 3)
                    disk.throttle(0, DEVICE_IOPS)
                    _epochs(bench, daemon, files, disk.directory, native, "limited")
        for size, count in (PARTIAL_QUICK if bench.quick else PARTIAL).items():
            with _files(bench, work, size, count) as files:
                _partial(bench, daemon, files, work)
    bench.results.note(
        f"log: limited: {DEVICE_IOPS} reads/s of ext4 on a loop device that holds the cache"
    )


@contextlib.contextmanager
def _files(bench: Bench, work: Path, size: int, count: int) -> Iterator[_Files]:
    source = work / "source"
    source.mkdir()
    bench.say(f"log: making {count} files of {size} bytes")
    names = bench.readers.fill_files(source, count, size, 3)
    ram = RAM_BYTES_QUICK if bench.quick else int(count * size * RAM_SHARE)
    try:
        yield _Files(source, names, size, ram)
    finally:
        shutil.rmtree(source, ignore_errors=True)


def _device(work: Path, files: _Files) -> LoopOrigin:
    """For the files, two logs of them, and what ext4 and the store want to be left."""
    folder = work / "device"
    folder.mkdir(exist_ok=True)
    return LoopOrigin(folder, files.bytes * 5 // 4 + files.on_ssd_bytes * 5 // 2 + (1 << 30))


def _run(
    bench: Bench,
    daemon: HintsdCommand,
    files: _Files,
    place: Path,
    what: str,
    layout: str,
    source: Path | None = None,
    options: tuple[str, ...] = (),
    pace_bytes_per_s: float = 0.0,
) -> _Ran | None:
    """EPOCHS epochs over a mount whose cache lies at `place`, which was measured; None: it has not
    done that layout.
    """
    cache = place / "hinted-cache"
    cache.mkdir()
    try:
        shutil.copy(place / "probe", cache)
        ram = ("--ram", str(files.ram_bytes), "--layout", layout)
        root = bench.work / "log"
        with hinted_mount(daemon, source or files.source, root, (*ram, *options), place) as mount:
            bench.drop()
            bench.readers.list_tree(mount.mountpoint)
            epochs = load_epochs(
                mount.mountpoint,
                files.names,
                seed=1,
                epochs=EPOCHS,
                hints=True,
                ahead=1,  # or nothing would be written in the last epoch
                workers=READERS,
                pace_bytes_per_s=pace_bytes_per_s,
            )
            said = mount.status().get("layout", {})
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    written = said.get("log_written_bytes", 0)
    if layout == "reorder" and not written:
        bench.results.note(f"log: {what}: nothing was packed with --layout reorder: left out")
        return None
    if layout == "auto":
        bench.results.note(f"log: {what}: auto has chosen {_chosen(daemon)}")
    return _Ran(epochs[1:], written / (len(epochs) * files.bytes))


def _chosen(daemon: HintsdCommand) -> str:
    """What the job that has just ended, or is about to, says of its layout."""
    status = daemon.status()
    said = [job for job in (*status["ended"], *status["jobs"]) if "layout" in job]
    return f"{said[-1]['layout']}: {said[-1]['layout_why']}" if said else "static"


def _sequential_bytes_per_s(place: Path) -> float:
    """As `fusecache probe` measures it; `auto` needs what it leaves."""
    command = [str(default_executable()), "probe", str(place), "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return float(json.loads(done.stdout)["sequential_bytes_per_s"])


def _epochs(
    bench: Bench, daemon: HintsdCommand, files: _Files, place: Path, native: Path, device: str
) -> None:
    """The whole dataset on SSD, as fast as the loader goes, and, at one size, with a pace."""
    what, results = f"{files.what}, {device}", bench.results
    for number in range(1 if bench.quick else 3):
        device_bytes_per_s = _sequential_bytes_per_s(place)
        results.add("log", f"{what}: bandwidth", "device", "MB/s", device_bytes_per_s / 1e6)
        for peer in bench.turns(number, ("native", *LAYOUTS)):
            if peer == "native":
                seconds = load_epochs(native, files.names, seed=1, epochs=2, drop=True)[1][
                    "seconds"
                ]
            else:
                ran = _run(bench, daemon, files, place, what, peer)
                if ran is None:
                    continue
                seconds = ran.seconds
                share = ran.written_share
                results.add("log", f"{what}: written", peer, "of what was read", share)
            results.add("log", what, peer, "files/s", len(files.names) / seconds)
            results.add("log", f"{what}: bandwidth", peer, "MB/s", files.bytes / seconds / 1e6)
        if files.size == PACED_BYTES:
            _paced(bench, daemon, files, place, what, PACE_SHARE * device_bytes_per_s, number)
        bench.say(f"log, {what}: round {number + 1} done")


def _paced(
    bench: Bench,
    daemon: HintsdCommand,
    files: _Files,
    place: Path,
    what: str,
    pace_bytes_per_s: float,
    number: int,
) -> None:
    """A consumer that takes no more than that: how much longer its epochs are than they must be."""
    work = f"{what}, paced: epoch"
    bench.results.add("log", work, "consumer", "seconds", files.bytes / pace_bytes_per_s)
    for peer in bench.turns(number, LAYOUTS):
        ran = _run(bench, daemon, files, place, what, peer, pace_bytes_per_s=pace_bytes_per_s)
        if ran is not None:
            bench.results.add("log", work, peer, "seconds", ran.seconds)


def _partial(bench: Bench, daemon: HintsdCommand, files: _Files, work: Path) -> None:
    """Half of the dataset fits on SSD, the rest comes from a limited origin in every epoch."""
    folder = work / "origin"
    folder.mkdir(exist_ok=True)
    what = f"{files.what}, half of it on SSD"
    room = ("--ssd", str(int(files.on_ssd_bytes * PARTIAL_SHARE)))
    with LoopOrigin(folder, files.bytes * 5 // 4 + (256 << 20)) as origin:
        source = origin.directory / "data"
        shutil.copytree(files.source, source)
        with _device(work, files) as disk:
            origin.throttle(ORIGIN_BPS, ORIGIN_IOPS)
            disk.throttle(0, DEVICE_IOPS)
            _sequential_bytes_per_s(disk.directory)
            layouts = ("reorder",) if bench.quick else LAYOUTS
            for number in range(1 if bench.quick else 3):
                for peer in bench.turns(number, ("stock", *layouts)):
                    if peer == "stock":
                        _, epoch = load_epochs(source, files.names, seed=1, epochs=2, drop=True)
                        seconds = epoch["seconds"]
                    else:
                        ran = _run(bench, daemon, files, disk.directory, what, peer, source, room)
                        if ran is None:
                            continue
                        seconds = ran.seconds
                    bench.results.add("log", what, peer, "files/s", len(files.names) / seconds)
                bench.say(f"log, {what}: round {number + 1} done")


ROWS = {"log": log}
COLUMNS = ("consumer", *LAYOUTS)
