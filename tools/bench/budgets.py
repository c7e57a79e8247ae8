"""The rows of a cache for a part of the dataset, and for all of it: seconds, waiting, origin bytes
and processor time of each epoch of a stock loader, or a peer's (HDMLP, section 6, has such cases).

INVARIANT: each run begins with empty caches and a process of its own; the peers take turns.
INVARIANT: between epochs a peer keeps what it calls its RAM, and no other pages: of a mount its
own ones stay, those of its origin go.
INVARIANT: a peer that fails is left out, and it is said; the others go on.
"""

import contextlib
import functools
import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusecache.config.settings import RAM_BYTES_MIN, SSD_BYTES_MIN
from tools.bench import peers
from tools.bench.hints import (
    BATCH,
    LATENCY_S,
    ORIGIN_BPS,
    ORIGIN_IOPS,
    READERS,
    HintDoubted,
    hinted_mount,
    load_epochs,
    loader_work,
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
BUDGETS = {"ram": (0.05, 0.0), "half": (0.10, 0.40), "all": (0.20, 1.15)}  # RAM, SSD, of all
COUNTS = {10_000: 17_000, 100_000: 3072, 500_000: 600}
QUICK_BYTES = 100_000
QUICK_BUDGETS = ("ram", "half")
NOPFS_BUILD = Path(__file__).with_name("nopfs")
STREAMING_BUILD = Path(__file__).with_name("streaming")
STREAMING = ("webdataset", "mosaicml", "litdata")
LOADERS = ("nopfs", *STREAMING)  # of their own
TAKES = {  # budgets that a peer can be given
    "nopfs": tuple(BUDGETS),
    "juicefs": tuple(BUDGETS),
    "rclone": ("half", "all"),
    "webdataset": tuple(BUDGETS),
    "mosaicml": ("half", "all"),
    "litdata": ("half", "all"),
}
_COPIES = 6  # of the dataset on its origin: each peer's shards or objects
MOUNTS: dict[str, tuple[str, ...]] = {
    "unhinted": (),
    "keep": ("--policy", "keep"),
    "fusecache": (),
}
_FAILURES = (OSError, RuntimeError, ValueError, subprocess.SubprocessError)

Run = Callable[[int, str], None]  # of a round and a budget


@dataclass(frozen=True)
class Origin:
    """Written below `behind`, read below `seen`; `counter` is for loader_reader.py's device."""

    behind: Path
    seen: Path
    counter: Path


# Of a work directory, and of how many bytes it has to hold.
OriginOf = Callable[[Path, int], contextlib.AbstractContextManager[Origin]]


@contextlib.contextmanager
def on_device(work: Path, size_bytes: int, limited: bool) -> Iterator[Origin]:
    with LoopOrigin(work, size_bytes) as device:
        if limited:
            device.throttle(ORIGIN_BPS, ORIGIN_IOPS)
        yield Origin(device.directory, device.directory, device.stat_path)


@contextlib.contextmanager
def latent(work: Path, size_bytes: int) -> Iterator[Origin]:
    behind = work / "behind"
    behind.mkdir()
    with LatencyOrigin(behind, work, LATENCY_S) as origin:
        yield Origin(behind, origin.directory, origin.io_path)


def budgets(bench: Bench) -> None:
    """Row budgets: an origin of 100 MB/s and 2,000 requests a second."""
    _row(bench, "budgets", functools.partial(on_device, limited=True), COUNTS)


def budgets_local(bench: Bench) -> None:
    """Row budgets-local: an origin without a limit."""
    _row(bench, "budgets-local", functools.partial(on_device, limited=False), COUNTS)


def budgets_latency(bench: Bench) -> None:
    """Row budgets-latency: an origin that takes 5 ms for each request."""
    _row(bench, "budgets-latency", latent, {100_000: COUNTS[100_000]})


def _counts(bench: Bench, full: Mapping[int, int]) -> dict[int, int]:
    """So many files of each size, or more: the smallest --ram must be one that a mount takes."""
    if bench.files:
        return dict(bench.files)
    if bench.quick:
        return {QUICK_BYTES: full[QUICK_BYTES] // 4}
    share = min(ram for ram, _ in BUDGETS.values())
    return {
        size: max(count, math.ceil(RAM_BYTES_MIN / share / size)) for size, count in full.items()
    }


def _row(
    bench: Bench,
    row: str,
    origin_of: OriginOf,
    full: Mapping[int, int],
) -> None:
    for size, count in _counts(bench, full).items():
        with (
            bench.folder(row) as work,
            origin_of(work, count * (size + 8192) * _COPIES * 5 // 4) as origin,
        ):
            (origin.behind / "data").mkdir()
            names = bench.readers.fill_files(origin.behind / "data", count, size, 8)
            _measure(Budgets(bench, row, work, origin, names, size))


@dataclass(frozen=True)
class Budgets:
    """The runs of one dataset on one origin."""

    bench: Bench
    row: str
    work: Path
    origin: Origin
    names: Sequence[str]
    size: int

    @property
    def budgets(self) -> tuple[str, ...]:
        return QUICK_BUDGETS if self.bench.quick else tuple(BUDGETS)

    @property
    def epochs(self) -> int:
        return 2 if self.bench.quick else EPOCHS

    @property
    def what(self) -> str:
        return f"{self.size // 1000} KB"

    @property
    def total(self) -> int:
        return len(self.names) * self.size

    @property
    def source(self) -> Path:
        return self.origin.seen / "data"

    def given(self, budget: str) -> tuple[int, int]:
        """RAM and SSD in bytes."""
        ram, ssd = BUDGETS[budget]
        return int(self.total * ram), int(self.total * ssd)

    def mount(self, peer: str, daemon: HintsdCommand, number: int, budget: str) -> None:
        ram, ssd = self.given(budget)
        if ram < RAM_BYTES_MIN or ssd < SSD_BYTES_MIN:
            least = f"RAM {RAM_BYTES_MIN >> 20}, SSD {SSD_BYTES_MIN >> 20} MiB"
            self.bench.results.note(f"{self.row}, {self.what}, {budget}: a mount's least: {least}")
        ram, ssd = max(ram, RAM_BYTES_MIN), max(ssd, SSD_BYTES_MIN)
        options = ("--ram", str(ram), "--ssd", str(ssd), *MOUNTS[peer])
        with hinted_mount(daemon, self.source, self.work, options) as mount:
            self._read(peer, number, (budget,), mount.mountpoint, forget=str(self.source))

    def stock(self, number: int) -> None:
        """It has no budgets: one run stands for all."""
        self._read("stock", number, self.budgets, self.source, forget=str(self.source))

    def copied(self, number: int) -> None:
        """All files are copied to SSD first."""
        with self._own("copy") as copy:
            begin = time.perf_counter()
            shutil.copytree(self.source, copy, dirs_exist_ok=True)
            seconds = time.perf_counter() - begin
            self.bench.results.add(self.row, f"{self.what}, to copy it", "copied", "s", seconds)
            self._read("copied", number, ("all",), copy, forget=str(copy))

    def nopfs(self, built: Path, number: int, budget: str) -> None:
        """Its own loader; it holds as many files ahead as the stock loader's queues."""
        ram, ssd = self.given(budget)
        config = self.work / "nopfs.cfg"
        ahead = PREFETCH_FACTOR * READERS * BATCH * self.size
        with self._own("nopfs") as storage:
            config.write_text(configuration(ahead, ram, ssd, storage))
            paths = {"built": built, "root": self.source, "config": config, "storage": storage}
            work: dict[str, Any] = {name: str(path) for name, path in paths.items()}
            work |= {"seed": number, "epochs": self.epochs, "batch": BATCH}
            work["device"] = str(self.origin.counter)
            done = json.loads(run_module("tools.bench.nopfs_reader", told=json.dumps(work)).stdout)
        what = f"{self.what}, {budget}, set-up, within the first epoch"
        self.bench.results.add(self.row, what, "nopfs", "s", done[0]["setup_s"])
        self._add("nopfs", (budget,), done)

    def filled_juicefs(self) -> Run:
        """A volume whose objects lie on the origin."""
        volume = peers.JuicefsVolume(self.work, self.origin.behind / "juicefs")
        with self._own("cache") as cache:
            begin = time.perf_counter()
            volume.fill(self.source, cache)
        self._converted("juicefs", time.perf_counter() - begin)
        return functools.partial(self.juicefs, volume)

    def juicefs(self, volume: peers.JuicefsVolume, number: int, budget: str) -> None:
        """RAM is its buffers, and with no SSD its cache as well."""
        ram, ssd = self.given(budget)
        with self._own("cache") as cache:
            mount = volume.mount(
                self.work / "mnt-juicefs",
                cache if ssd else "memory",
                f"{_mib(ssd or ram)}M",
                self.origin.seen / "juicefs",
                ("--buffer-size", f"{_mib(ram)}M"),
            )
            with mount:
                self._read("juicefs", number, (budget,), mount.root, drop="pages")

    def rclone(self, number: int, budget: str) -> None:
        """A file that is not held open can be evicted, each second."""
        _, ssd = self.given(budget)
        more = ["--vfs-cache-max-size", f"{ssd}B", "--vfs-cache-poll-interval", "1s"]
        more += ["--vfs-handle-caching", "0s"]
        with self._own("rclone-cache"), peers.make("rclone", self.source, self.work, more) as mount:
            self._read("rclone", number, (budget,), mount.root, drop="pages")

    def convert(self, peer: str, python: str) -> Run:
        """To its shards, on the origin."""
        with self._own("temporary") as temporary:
            work = {"peer": peer, "source": str(self.source), "paths": list(self.names)}
            work |= {"to": str(self.origin.behind / peer), "temporary": str(temporary)}
            done = self._stream(work, python)
        self._converted(peer, done["seconds"])
        self.bench.results.about[peer] = done["version"]
        return functools.partial(self.streamed, peer, python)

    def streamed(self, peer: str, python: str, number: int, budget: str) -> None:
        ram, ssd = self.given(budget)
        with self._own("cache") as cache, self._own("temporary") as temporary:
            paths = {"cache": cache, "temporary": temporary, "shards": self.origin.seen / peer}
            work: dict[str, Any] = {name: str(path) for name, path in paths.items()}
            work |= {"peer": peer, "cache_bytes": ssd, "ram_bytes": ram, "sample_bytes": self.size}
            options = {"seed": number, "epochs": self.epochs, "drop": "pages"}
            options["device"] = str(self.origin.counter)
            done = self._stream(loader_work(cache, (), **options) | work, python)
        self._add(peer, (budget,), done)

    def _stream(self, work: dict[str, Any], python: str) -> Any:
        told = json.dumps(work)
        return json.loads(
            run_module("tools.bench.streaming_reader", told=told, python=python).stdout
        )

    @contextlib.contextmanager
    def _own(self, name: str) -> Iterator[Path]:
        """An empty directory, until the context is left."""
        directory = self.work / name
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _converted(self, peer: str, seconds: float) -> None:
        self.bench.results.add(self.row, f"{self.what}, to convert it", peer, "s", seconds)

    def _read(
        self, peer: str, number: int, budgets: tuple[str, ...], root: Path, **options: Any
    ) -> None:
        options |= {"seed": number, "epochs": self.epochs, "device": str(self.origin.counter)}
        options["hints"] = peer == "fusecache"
        self._add(peer, budgets, load_epochs(root, self.names, **options))

    def _add(self, peer: str, budgets: tuple[str, ...], epochs: list[dict[str, Any]]) -> None:
        if any(
            (done["samples"], done["bytes"]) != (len(self.names), self.total) for done in epochs
        ):
            raise RuntimeError(f"{peer} did not read each of {len(self.names)} files once")
        for epoch, done in enumerate(epochs):
            figures = (
                ("", "s", done["seconds"]),
                (": waiting", "s", done["stall_s"]),
                (": origin", "of the dataset", done["device_bytes"] / self.total),
                (": CPU", "us a file", done["cpu_s"] * 1e6 / done["samples"]),
            )
            for budget in budgets:
                what = f"{self.what}, {budget}, {'later epochs' if epoch else 'first epoch'}"
                for more, unit, value in figures:
                    self.bench.results.add(self.row, what + more, peer, unit, value)


def _mib(size_bytes: int) -> int:
    return max(1, round(size_bytes / 2**20))


def built_nopfs(bench: Bench) -> Path | None:
    """Where NoPFS lies, built if need be; None, and it is said: it cannot be built here."""
    built = _built(bench, NOPFS_BUILD, "NoPFS")
    return None if built is None else Path(built)


def built_streaming(bench: Bench) -> str | None:
    """A Python that has the peers of streaming_reader.py; None, and it is said: cannot be had."""
    return _built(bench, STREAMING_BUILD, ", ".join(STREAMING))


def _built(bench: Bench, script: Path, name: str) -> str | None:
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    _left_out(bench, name, (done.stderr.strip().splitlines() or ["?"])[-1])
    return None


def _left_out(bench: Bench, what: str, why: object) -> None:
    bench.say(f"{what} is left out: {why}")
    bench.results.note(f"{what} was left out: {why}")


def prepared(runs: Budgets) -> dict[str, Run]:
    """The peers that can run here, their datasets converted."""
    bench, found = runs.bench, dict[str, Run]()
    makers: dict[str, Callable[[], Run]] = {}
    if "nopfs" in bench.loaders and (built := built_nopfs(bench)) is not None:
        found["nopfs"] = functools.partial(runs.nopfs, built)
    if "rclone" in bench.names:
        found["rclone"] = runs.rclone
    if "juicefs" in bench.names:
        makers["juicefs"] = runs.filled_juicefs
    chosen = [peer for peer in STREAMING if peer in bench.loaders]
    if chosen and (python := built_streaming(bench)) is not None:
        makers |= {peer: functools.partial(runs.convert, peer, python) for peer in chosen}
    for peer, make in makers.items():
        bench.say(f"{runs.row}, {runs.what}: converting for {peer}")
        bench.drop()
        try:
            found[peer] = make()
        except _FAILURES as error:
            _left_out(bench, f"{runs.row}, {runs.what}, {peer}", error)
    return found


def _measure(runs: Budgets) -> None:
    bench = runs.bench
    with started_hintsd(runs.work) as daemon:
        turns: dict[str, Callable[[int], None]] = {"stock": runs.stock, "copied": runs.copied}
        for budget in runs.budgets:
            for name in MOUNTS:
                turns[f"{name}, {budget}"] = functools.partial(_mounted, runs, name, daemon, budget)
        others = {
            f"{peer}, {budget}": functools.partial(_other, run, budget)
            for peer, run in prepared(runs).items()
            for budget in runs.budgets
            if budget in TAKES[peer]
        }
        turns |= others
        for number in range(bench.rounds(1 if bench.quick else 3)):
            for turn in bench.turns(number, tuple(turns)):
                bench.drop()
                try:
                    turns[turn](number)
                except HintDoubted as error:
                    what = f"{runs.row}, {runs.what}, {turn}: NO FIGURE of a round: {error}"
                    bench.say(what)
                    bench.results.note(what)
                except _FAILURES as error:
                    if turn not in others:
                        raise
                    _left_out(bench, f"{runs.row}, {runs.what}, {turn}", error)
                    del turns[turn]
            bench.say(f"{runs.row}, {runs.what}: round {number + 1} done")


def _mounted(runs: Budgets, peer: str, daemon: HintsdCommand, budget: str, number: int) -> None:
    runs.mount(peer, daemon, number, budget)


def _other(run: Run, budget: str, number: int) -> None:
    run(number, budget)


ROWS: dict[str, Callable[[Bench], None]] = {
    "budgets": budgets,
    "budgets-latency": budgets_latency,
    "budgets-local": budgets_local,
}
COLUMNS = ("copied", "keep", *LOADERS)
