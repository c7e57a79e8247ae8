"""The rows with hints: what a known order is worth, and what planning it costs.

INVARIANT: hinted and unhinted readers read the same files in the same order, in the same round.
INVARIANT: a daemon of the benchmark's own serves them; it is ended with the row.
"""

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hintsd
from hintsd.orders.drawing import access_sequence
from hintsd.orders.spec import OrderSpec
from tools.bench.readers import PREFETCH_FACTOR
from tools.bench.rows import FILE_BYTES, READER_COUNTS, Bench, Figure
from tools.fusecache_command import FusecacheMount
from tools.hintsd_command import HintsdCommand
from tools.latency_origin import LatencyOrigin
from tools.slow_origin import LoopOrigin

SMALL_BYTES = 10_000
BATCH = 64
READERS = 4
RAM_SHARE = 0.2
ORIGIN_BPS, ORIGIN_IOPS = 100_000_000, 2000
LATENCY_S = 0.005
PACE_SHARE = 0.7
HOT = {5000: 8, 40_000: 3}  # files, and epochs that are measured together
_MODULE_TIMEOUT_S = 900.0
_ACCEPT_TIMEOUT_S = 60.0
_SETTLE_S = 6.0


@contextlib.contextmanager
def started_hintsd(work: Path) -> Iterator[HintsdCommand]:
    """A hintsd that has finished starting: it runs since the machine was booted, not since now."""
    with HintsdCommand(work) as daemon:
        time.sleep(_SETTLE_S)
        yield daemon


@contextlib.contextmanager
def hinted_mount(
    daemon: HintsdCommand,
    source: Path,
    work: Path,
    options: tuple[str, ...] = (),
    cache_in: Path | None = None,
) -> Iterator[FusecacheMount]:
    """A mount with an empty cache, in `work` or elsewhere, that names the daemon."""
    cache = (cache_in or work) / "hinted-cache"
    mount = FusecacheMount(source, work / "mnt", cache, ("--hintsd", str(daemon.socket), *options))
    try:
        with mount:
            yield mount
    finally:
        shutil.rmtree(cache, ignore_errors=True)


@contextlib.contextmanager
def _warm_mount(
    source: Path, work: Path, ram_bytes: float
) -> Iterator[tuple[HintsdCommand, FusecacheMount]]:
    """A daemon, and a mount of it that has all files on SSD and so much RAM."""
    options = ("--ram", str(int(ram_bytes)))
    with started_hintsd(work) as daemon, hinted_mount(daemon, source, work, options) as mount:
        mount.command("warm", str(mount.mountpoint), timeout_s=900)
        mount.settle()
        yield daemon, mount


def _spec(count: int, seed: int) -> OrderSpec:
    return OrderSpec(
        sampler="distributed", length=count, seed=seed, world_size=1, rank=0, batch_size=BATCH
    )


@contextlib.contextmanager
def announced(root: Path, names: Sequence[str], seed: int, epochs: int) -> Iterator[None]:
    """A job that hintsd has accepted, until the context is left."""
    job = hintsd.connect(root).shuffle(
        seed=seed,
        epochs=epochs,
        batch_size=BATCH,
        sampler="distributed",
        world_size=1,
        rank=0,
        workers=READERS,
        prefetch_factor=PREFETCH_FACTOR,
        paths=names,
    )
    with job:
        deadline = time.monotonic() + _ACCEPT_TIMEOUT_S
        while job.name is None:
            if job.is_over or time.monotonic() > deadline:
                raise RuntimeError(f"hintsd did not take the job on {root}")
            time.sleep(0.001)
        yield


def in_order(root: Path, names: Sequence[str], seed: int, epoch: int) -> list[str]:
    sequence = access_sequence(_spec(len(names), seed), epoch)
    return [f"{root}/{names[index]}" for index in sequence]


def _missed(mount: FusecacheMount) -> int:
    return int(mount.status()["reads"]["requests"])


def hinted(bench: Bench) -> None:
    """Row hinted: whole epochs from the SSD store with a RAM budget of a fifth of the dataset."""
    counts = {FILE_BYTES: 8000, SMALL_BYTES: 40_000}
    for size, full in counts.items():
        count = full // 4 if bench.quick else full
        with bench.folder("hinted") as work:
            _hinted_size(bench, work, count, size)


def _hinted_size(bench: Bench, work: Path, count: int, size: int) -> None:
    what = f"{size // 1000} KB"
    source, large = work / "source", work / "large"
    source.mkdir()
    large.mkdir()
    bench.say(f"hinted: making {count} files of {size} bytes")
    names = bench.readers.fill_files(source, count, size, 3)
    whole = large / bench.readers.fill_files(large, 1, min(count * size, 1 << 30), 4)[0]
    with _warm_mount(source, work, count * size * RAM_SHARE) as (_, mount):
        root = mount.mountpoint

        def one_round(number: int) -> list[Figure]:
            figures: list[Figure] = []

            def add(peer: str, work: str, bytes_per_s: float) -> None:
                figures.append((work, peer, "MB/s", bytes_per_s / 1e6))

            bench.drop()
            device = bench.readers.read_direct(whole).bytes_per_s
            for state in ("begun cold", "next epoch"):
                add("device", f"{what}, {state}", device)
            ways = [("native", source), ("unhinted", root), ("fusecache", root)]
            for peer, base in ways[number % 3 :] + ways[: number % 3]:
                bench.drop()
                seed = number * 10 + 1
                with contextlib.ExitStack() as stack:
                    if peer == "fusecache":
                        stack.enter_context(announced(base, names, seed, 3))
                    for epoch, state in enumerate(("begun cold", "next epoch")):
                        if peer != "fusecache":
                            bench.drop()
                        before = _missed(mount)
                        paths = in_order(base, names, seed, epoch)
                        done = bench.readers.read_batches(paths, READERS, BATCH)
                        add(peer, f"{what}, {state}", done.bytes_per_s)
                        if peer == "fusecache":
                            missed = (_missed(mount) - before) / count
                            figures.append((f"{what}, {state}: missed", peer, "of all", missed))
            return figures

        for number in range(bench.rounds(5)):
            bench.undisturbed("hinted", functools.partial(one_round, number))
            bench.say(f"hinted, {what}: round {number + 1} done")


def hot_hinted(bench: Bench) -> None:
    """Row hot-hinted: all in RAM, tripwires armed, against the same files on ext4."""
    for count, epochs in HOT.items():
        with bench.folder("hot-hinted") as work:
            _hot_files(bench, work, min(count, 2000) if bench.quick else count, epochs)
        if bench.quick:
            break


def _hot_files(bench: Bench, work: Path, count: int, epochs: int) -> None:
    source = work / "source"
    source.mkdir()
    names = bench.readers.fill_files(source, count, FILE_BYTES, 1)
    with _warm_mount(source, work, count * FILE_BYTES * 1.5) as (_, mount):
        root = mount.mountpoint

        def one_round(number: int) -> list[Figure]:
            figures: list[Figure] = []
            bench.drop()
            seed = number
            with announced(root, names, seed, 1 + 3 * epochs):
                for base in (source, root):
                    bench.readers.read_batches(in_order(base, names, seed, 0), READERS, BATCH)
                later = itertools.count(1)
                for readers in READER_COUNTS:
                    ways = {"native": source, "fusecache": root}
                    seconds = dict.fromkeys(ways, 0.0)
                    for turn, epoch in zip(range(epochs), later, strict=False):
                        for peer in bench.turns(number + turn, tuple(ways)):
                            paths = in_order(ways[peer], names, seed, epoch)
                            done = bench.readers.read_batches(paths, readers, BATCH)
                            seconds[peer] += done.seconds
                    what = f"{count:,} files, {readers} reader{'s' * (readers > 1)}"
                    for peer, took_s in seconds.items():
                        figures.append((what, peer, "files/s", epochs * count / took_s))
            return figures

        for number in range(bench.rounds(7)):
            bench.undisturbed("hot-hinted", functools.partial(one_round, number))
            bench.say(f"hot-hinted, {count:,} files: round {number + 1} done")


def wrong(bench: Bench) -> None:
    """Row wrong: what a hint costs that the reader does not follow, against no hint."""
    counts = {FILE_BYTES: 8000, SMALL_BYTES: 40_000}
    for size, full in counts.items():
        count = full // 4 if bench.quick else full
        with bench.folder("wrong") as work:
            _wrong_size(bench, work, count, size)


def _wrong_size(bench: Bench, work: Path, count: int, size: int) -> None:
    what = f"{size // 1000} KB"
    source = work / "source"
    source.mkdir()
    bench.say(f"wrong: making {count * 3 // 2} files of {size} bytes")
    files = bench.readers.fill_files(source, count * 3 // 2, size, 8)
    random.Random(8).shuffle(files)
    names, gone = sorted(files[:count]), files[count:]
    few = count // 100
    revised = sorted(names[few:] + gone[:few])
    half = [gone[n // 2] if n % 2 else name for n, name in enumerate(names)]
    told = {
        "another seed": (names, 5),
        "another revision": (revised, 0),
        "half of it": (half, 0),
    }
    peers = ("unhinted", *told)
    with _warm_mount(source, work, count * size * RAM_SHARE) as (daemon, mount):
        root = mount.mountpoint
        warnings.filterwarnings("ignore", "hintsd: wrong hint")

        def one_round(number: int) -> list[Figure]:
            figures: list[Figure] = []
            seed = number * 10 + 1
            for peer in bench.turns(number, peers):
                bench.drop()
                with contextlib.ExitStack() as stack:
                    if peer in told:
                        listed, other = told[peer]
                        stack.enter_context(announced(root, listed, seed + other, 3))
                    for epoch, state in enumerate(("begun cold", "next epoch")):
                        paths = in_order(root, names, seed, epoch)
                        done = bench.readers.read_batches(paths, READERS, BATCH)
                        speed = done.bytes_per_s / 1e6
                        figures.append((f"{what}, {state}", peer, "MB/s", speed))
                    if peer in told:
                        (job,) = daemon.status()["jobs"]
                        is_noticed = float(job["state"] == "wrong")
                        figures.append((f"{what}: noticed", peer, "of all", is_noticed))
            return figures

        for number in range(bench.rounds(7)):
            bench.undisturbed("wrong", functools.partial(one_round, number))
            bench.say(f"wrong, {what}: round {number + 1} done")


def limited(bench: Bench) -> None:
    """Row limited: the first epoch from an origin of 100 MB/s and 2,000 requests a second."""
    count = 2000 if bench.quick else 8000
    with (
        bench.folder("limited") as work,
        LoopOrigin(work, count * FILE_BYTES * 5 // 4) as device,
        started_hintsd(work) as daemon,
    ):
        source = device.directory / "data"
        source.mkdir()
        names = bench.readers.fill_files(source, count, FILE_BYTES, 5)
        device.throttle(ORIGIN_BPS, ORIGIN_IOPS)
        for number in range(bench.rounds(3)):
            bench.drop()
            some = names[: count // 4]
            paths = in_order(source, some, number, 0)
            done = bench.readers.read_batches(paths, READERS, BATCH)
            bench.results.add("limited", "first epoch", "native", "MB/s", done.bytes_per_s / 1e6)
            bench.results.add("limited", "first epoch", "limit", "MB/s", ORIGIN_BPS / 1e6)
            for peer in ("unhinted", "fusecache"):
                with hinted_mount(daemon, source, work) as mount:
                    bench.drop()
                    bench.readers.list_tree(mount.mountpoint)
                    with contextlib.ExitStack() as stack:
                        if peer == "fusecache":
                            stack.enter_context(announced(mount.mountpoint, names, number, 1))
                        paths = in_order(mount.mountpoint, names, number, 0)
                        done = bench.readers.read_batches(paths, READERS, BATCH)
                    speed = done.bytes_per_s / 1e6
                    bench.results.add("limited", "first epoch", peer, "MB/s", speed)
            bench.say(f"limited: round {number + 1} done")


def run_module(
    module: str,
    *arguments: str,
    told: str = "",
    python: str = sys.executable,
    timeout_s: float = _MODULE_TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """In a process of its own; `told` on its stdin. RuntimeError: it failed.

    What it has started ends with it.
    """
    with subprocess.Popen(
        [python, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, errors = process.communicate(told, timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise RuntimeError(f"{module}: {errors.strip().splitlines()[-1:]}")
    return subprocess.CompletedProcess(process.args, 0, said, errors)


class HintDoubted(RuntimeError):
    """hintsd took a right hint for a wrong one: what was measured is not what was meant."""


def run_reader(
    module: str, request: dict[str, Any], timeout_s: float = _MODULE_TIMEOUT_S
) -> list[dict[str, Any]]:
    """A reader in a process of its own: JSON goes there, and comes back. HintDoubted."""
    done = run_module(module, told=json.dumps(request), timeout_s=timeout_s)
    said = [line for line in done.stderr.splitlines() if "RuntimeWarning: hintsd" in line]
    if said:
        raise HintDoubted(said[0].partition("RuntimeWarning: ")[2])
    results = json.loads(done.stdout)
    assert isinstance(results, list)
    return results


def loader_work(root: Path, names: Sequence[str], **work: Any) -> dict[str, Any]:
    """What loader_reader.py is told: `work`, and else one epoch as fast as it goes."""
    return {
        "root": str(root),
        "paths": list(names),
        "seed": 0,
        "epochs": 1,
        "batch": BATCH,
        "workers": READERS,
        "pace_bytes_per_s": 0,
        "hints": False,
        "ahead": 0,
        "drop": False,
        "forget": "",
        "device": "",
        "while_there": "",
    } | work


def load_epochs(root: Path, names: Sequence[str], **work: Any) -> list[dict[str, Any]]:
    """A stock DataLoader in a process of its own (loader_reader.py). HintDoubted."""
    return run_reader("tools.bench.loader_reader", loader_work(root, names, **work))


def latency(bench: Bench) -> None:
    """Row latency: the first epoch from an origin that takes 5 ms for each request."""
    count = 3000 if bench.quick else 12_000
    few = count // 6
    with bench.folder("latency") as work:
        behind = work / "behind"
        behind.mkdir()
        names = bench.readers.fill_files(behind, count, FILE_BYTES, 6)
        with LatencyOrigin(behind, work, LATENCY_S) as origin, started_hintsd(work) as daemon:
            for number in range(bench.rounds(3)):

                def measure(peer: str, root: Path, some: Sequence[str], **options: Any) -> None:
                    for name in some:  # the row is about latency, not the disk behind it
                        (behind / name).read_bytes()
                    bench.readers.list_tree(root)
                    (epoch,) = load_epochs(root, some, **options)
                    speed = epoch["samples"] / epoch["seconds"]
                    bench.results.add("latency", "first epoch", peer, "samples/s", speed)

                measure("stock", origin.directory, names[:few], seed=number)
                for peer, some in (("unhinted", names[:few]), ("fusecache", names)):
                    with hinted_mount(daemon, origin.directory, work) as mount:
                        hints = peer == "fusecache"
                        measure(peer, mount.mountpoint, some, seed=number, hints=hints)
                bench.say(f"latency: round {number + 1} done")


def stall(bench: Bench) -> None:
    """Row stall: a consumer with a pace; the seconds in which it had nothing to consume."""
    count = 2000 if bench.quick else 8000
    with (
        bench.folder("stall") as work,
        LoopOrigin(work, count * FILE_BYTES * 5 // 4) as device,
        started_hintsd(work) as daemon,
    ):
        source, large = device.directory / "data", work / "large"
        source.mkdir()
        large.mkdir()
        names = bench.readers.fill_files(source, count, FILE_BYTES, 7)
        whole = large / bench.readers.fill_files(large, 1, min(count * FILE_BYTES, 1 << 30), 4)[0]
        device.throttle(ORIGIN_BPS, ORIGIN_IOPS)
        ram = int(count * FILE_BYTES * RAM_SHARE)
        for number in range(bench.rounds(3)):
            bench.drop()
            pace = bench.readers.read_direct(whole).bytes_per_s * PACE_SHARE
            options = {"seed": number, "epochs": 3, "pace_bytes_per_s": pace}
            (first, *_) = load_epochs(source, names, **(options | {"epochs": 1, "drop": True}))
            results = bench.results
            for _ in range(2):
                results.add("stall", "later epochs", "stock", "seconds", first["stall_s"])
            for epoch in load_epochs(source, names, **(options | {"epochs": 2})):  # all in RAM now
                results.add("stall", "later epochs", "ceiling", "seconds", epoch["stall_s"])
            for peer in ("unhinted", "fusecache"):
                with hinted_mount(daemon, source, work, ("--ram", str(ram))) as mount:
                    bench.drop()
                    hints = peer == "fusecache"
                    epochs = load_epochs(mount.mountpoint, names, **options, hints=hints)
                    results.add("stall", "first epoch", peer, "seconds", epochs[0]["stall_s"])
                    for epoch in epochs[1:]:
                        results.add("stall", "later epochs", peer, "seconds", epoch["stall_s"])
            bench.say(f"stall: round {number + 1} done")
    bench.results.note("stall: the consumer takes 0.7 of the device's sequential bandwidth")


def plan(bench: Bench) -> None:
    """Row plan: 14,000,000 samples, until the first window is decided (plan_cost.py)."""
    directories, files = (100, 14_000) if bench.quick else (1000, 14_000)
    for _ in range(bench.rounds(3)):
        done = run_module("tools.bench.plan_cost", str(directories), str(files))
        seconds, size_bytes = done.stdout.split()
        bench.results.add("plan", "until the first window", "fusecache", "seconds", float(seconds))
        memory = float(size_bytes) / 1e9
        bench.results.add("plan", "memory of hintsd's process", "fusecache", "GB", memory)
    bench.results.note(f"plan: {directories * files:,} samples in {directories} directories")


ROWS = {
    "hinted": hinted,
    "hot-hinted": hot_hinted,
    "wrong": wrong,
    "limited": limited,
    "latency": latency,
    "stall": stall,
    "plan": plan,
}
COLUMNS = ("device", "limit", "stock", "unhinted", "another seed", "another revision", "half of it")
