"""Row sharing: what four jobs on one dataset take from the origin together.

All have seeds of their own and read side by side through one mount, whose cache takes a part of the
dataset, from an origin of 30 MB/s that is what limits them. An arm is what is said of their order,
and by which sampler it is made.

Row unlike: two jobs, each on a dataset of its own, from that origin. The slow one trains for so
long that it waits for nothing; the fast one takes what it is given. Either they share one cache, or
each has a mount with half of it.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from fusecache.config.settings import SSD_BYTES_MIN
from tools.bench.hints import hinted_mount
from tools.bench.rows import Bench
from tools.hintsd_command import HintsdCommand
from tools.slow_origin import LoopOrigin

FILES, FILES_QUICK, FILE_BYTES = 12_000, 3_000, 50_000
ORIGIN_BPS, ORIGIN_IOPS = 30_000_000, 1_000
EPOCHS = 2
SHARES = (0.2, 0.4)
BATCH, WORKERS, JOBS = 4, 2, 4
PAUSE_S = 0.0025
ROUNDS = 3
ARMS: dict[str, dict[str, Any]] = {
    "no hints": {"sampler": "shuffle", "hinted": False},
    "a plain shuffle": {"sampler": "shuffle", "hinted": True},
    "the next 10 batches": {"sampler": "substitutable", "hinted": True},
    "20 chunks": {"sampler": "chunked", "hinted": True},
}
TIMEOUT_S = 600.0
UNLIKE_FILES, UNLIKE_FILES_QUICK, UNLIKE_BATCH = 6_000, 1_500, 16  # files of each
UNLIKE_SHARE = 0.4  # of both datasets
UNLIKE_JOBS, UNLIKE_ARMS = ("slow", "fast"), {"a half each": 2, "one cache": 1}  # mounts of each
FAST_EPOCHS_MOST = 200
SLOW_PAUSE_S, SLOW_EPOCHS = 0.08, 5  # 200 samples a second; the last two epochs count


def sharing(bench: Bench) -> None:
    """Row sharing: a fifth, and two fifths of the dataset in a mount's RAM and SSD."""
    count = FILES_QUICK if bench.quick else FILES
    size_bytes = count * (FILE_BYTES + 8192) * 5 // 4
    with (
        bench.folder("sharing") as work,
        HintsdCommand(work) as daemon,
        LoopOrigin(work, size_bytes) as origin,
    ):
        names = bench.readers.fill_files(origin.directory, count, FILE_BYTES, 8)
        origin.throttle(ORIGIN_BPS, ORIGIN_IOPS)
        for number in range(bench.rounds(ROUNDS)):
            for share in SHARES:
                for arm in bench.turns(number, tuple(ARMS)):
                    budget = max(int(count * FILE_BYTES * share), 4 * SSD_BYTES_MIN)
                    options = ("--ram", str(budget * 3 // 4), "--ssd", str(budget // 4))
                    bench.drop()
                    with hinted_mount(daemon, origin.directory, work, options) as mount:
                        told = {"root": str(mount.mountpoint), "paths": list(names), **ARMS[arm]}
                        told |= {"epochs": EPOCHS, "batch": BATCH, "workers": WORKERS}
                        epochs = _run({**told, "pause_s": PAUSE_S}, number, origin.bytes_read)
                    _add(bench, f"{arm}, {share:.0%}", epochs, count * FILE_BYTES)
    bench.results.note(
        f"sharing: {JOBS} jobs together; {count:,} files of {FILE_BYTES // 1000} KB, batches of "
        f"{BATCH}; a quarter of the cache is SSD; the origin gives {ORIGIN_BPS / 1e6:.0f} MB/s"
    )


Epochs = list[tuple[float, int]]  # seconds until all jobs have read it, bytes of the origin


def _add(bench: Bench, what: str, epochs: Epochs, dataset_bytes: int) -> None:
    later = epochs[1:]
    for name, some in (("first epoch", epochs[:1]), ("later ones", later)):
        seconds = sum(epoch[0] for epoch in some) / len(some)
        datasets = sum(epoch[1] for epoch in some) / len(some) / dataset_bytes
        bench.results.add("sharing", f"{what}: {name}", "fusecache", "s", seconds)
        bench.results.add("sharing", f"{what}: {name}, origin", "fusecache", "datasets", datasets)
        bench.say(f"sharing, {what}: {name}: {seconds:.1f} s, {datasets:.3f} datasets")


def _run(told: dict[str, Any], number: int, bytes_read: Callable[[], int]) -> Epochs:
    """Of each epoch, for all jobs together."""
    command = [sys.executable, "-m", "tools.bench.sharing_reader"]
    epochs: Epochs = []
    with contextlib.ExitStack() as stack:
        readers = []
        for job in range(JOBS):
            reader = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(reader.kill)
            readers.append(reader)
            _say(reader, json.dumps({**told, "seed": JOBS * number + job}))
        for reader in readers:
            _await(reader, "ready")
        for _ in range(told["epochs"]):
            before, began_s = bytes_read(), time.monotonic()
            for reader in readers:
                _say(reader, "")
            for reader in readers:
                _await(reader, str(len(told["paths"])))
            epochs.append((time.monotonic() - began_s, bytes_read() - before))
        for reader in readers:
            reader.wait(TIMEOUT_S)
    return epochs


def unlike(bench: Bench) -> None:
    """Row unlike."""
    count = UNLIKE_FILES_QUICK if bench.quick else UNLIKE_FILES
    size_bytes = 2 * count * (FILE_BYTES + 8192) * 5 // 4
    with (
        bench.folder("unlike") as work,
        HintsdCommand(work) as daemon,
        LoopOrigin(work, size_bytes) as origin,
    ):
        names: dict[str, list[str]] = {}
        for job in UNLIKE_JOBS:
            folder = origin.directory / job
            folder.mkdir()
            (work / job).mkdir()  # what belongs to a mount of its own
            names[job] = list(bench.readers.fill_files(folder, count, FILE_BYTES, 8))
        origin.throttle(ORIGIN_BPS, ORIGIN_IOPS)
        budget = max(int(2 * count * FILE_BYTES * UNLIKE_SHARE), 8 * SSD_BYTES_MIN)
        for number in range(bench.rounds(ROUNDS)):
            for arm in bench.turns(number, tuple(UNLIKE_ARMS)):
                bench.drop()
                mounts = UNLIKE_ARMS[arm]
                options = ("--ram", str(budget // 2 // mounts), "--ssd", str(budget // 2 // mounts))
                with contextlib.ExitStack() as stack:
                    points = [
                        stack.enter_context(
                            hinted_mount(daemon, origin.directory, work / job, options)
                        ).mountpoint
                        for job in UNLIKE_JOBS[:mounts]
                    ]
                    roots = {"slow": points[0] / "slow", "fast": points[-1] / "fast"}
                    before = origin.bytes_read()
                    figures = _train_unlike(roots, names, number)
                    figures["origin", "GB"] = (origin.bytes_read() - before) / 1e9
                for (what, unit), value in figures.items():
                    bench.results.add("unlike", f"{arm}: {what}", "fusecache", unit, value)
                    bench.say(f"unlike, {arm}: {what}: {value:.2f} {unit}")
    bench.results.note(
        f"unlike: two datasets of {count:,} files of {FILE_BYTES // 1000} KB; the cache takes "
        f"{UNLIKE_SHARE:.0%} of them, half is SSD; the origin gives {ORIGIN_BPS / 1e6:.0f} MB/s"
    )


def _train_unlike(
    roots: dict[str, Path], names: dict[str, list[str]], number: int
) -> dict[tuple[str, str], float]:
    """Both, until the slow one has read its epochs: samples a second in the last two of them."""
    command = [sys.executable, "-m", "tools.bench.sharing_reader"]
    ended_s: dict[str, list[float]] = {"slow": [], "fast": []}
    with contextlib.ExitStack() as stack:
        readers, threads = {}, []
        for job, root in roots.items():
            readers[job] = reader = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(reader.kill)
            told = {"root": str(root), "paths": names[job], "sampler": "shuffle", "hinted": True}
            told |= {"epochs": SLOW_EPOCHS if job == "slow" else FAST_EPOCHS_MOST}
            told |= {"pause_s": SLOW_PAUSE_S if job == "slow" else 0.0}
            told |= {"batch": UNLIKE_BATCH, "workers": WORKERS, "seed": number}
            _say(reader, json.dumps(told))
        for reader in readers.values():
            _await(reader, "ready")
        for job, reader in readers.items():
            _say(reader, "\n" * FAST_EPOCHS_MOST)  # all epochs, one after another
            assert reader.stdout is not None
            thread = threading.Thread(target=_note, args=(reader.stdout, ended_s[job]), daemon=True)
            thread.start()
            threads.append(thread)
        threads[0].join(TIMEOUT_S)
    if len(ended_s["slow"]) < SLOW_EPOCHS:
        raise RuntimeError("a reader of row unlike failed: see above")
    begun_s, end_s = ended_s["slow"][-3], ended_s["slow"][-1]
    fast = [at_s for at_s in ended_s["fast"] if begun_s <= at_s <= end_s]
    count = len(names["slow"])
    return {
        ("the slow job", "samples/s"): 2 * count / (end_s - begun_s),
        ("the fast job", "samples/s"): (len(fast) - 1) * count / (fast[-1] - fast[0]),
    }


def _note(lines: IO[str], ended_s: list[float]) -> None:
    for _ in lines:
        ended_s.append(time.monotonic())


def _await(reader: "subprocess.Popen[str]", line: str) -> None:
    assert reader.stdout is not None
    if reader.stdout.readline().strip() != line:
        raise RuntimeError("a reader of row sharing failed: see above")


def _say(reader: "subprocess.Popen[str]", line: str) -> None:
    assert reader.stdin is not None
    reader.stdin.write(line + "\n")
    reader.stdin.flush()


ROWS: dict[str, Callable[[Bench], None]] = {"sharing": sharing, "unlike": unlike}
