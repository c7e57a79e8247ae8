"""Row sharing: what four jobs on one dataset take from the origin together.

All have seeds of their own and read side by side through one mount, whose cache takes a part of the
dataset, from an origin of 30 MB/s that is what limits them. An arm is what is said of their order,
and by which sampler it is made.

Rows unlike and three: jobs, each on a dataset of its own, from that origin. The slow one trains for
so long that it waits for nothing, the fast one takes what it is given. Row unlike: these two, in
one cache, or each with a mount that has half of it. Row three: one more, in one cache, with hints
and without.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
EPOCHS_MOST = 500
# Rows unlike and three: of each dataset; by job, how long a batch trains.
OWN_FILES, OWN_FILES_QUICK, OWN_BATCH = 3_000, 1_000, 16
PAUSES_S = {"slow": 0.08, "fast": 0.0, "middle": 0.02}
UNLIKE_SHARE, UNLIKE_S = 0.4, 150.0
THREE_SHARES, THREE_S = (0.13, 0.26, 0.9), 90.0


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
    """Row unlike: two datasets, two jobs, one cache or two halves of one."""
    with _datasets(bench, "unlike", ("slow", "fast")) as (work, daemon, origin, names):
        for number in range(bench.rounds(ROUNDS)):
            for arm in bench.turns(number, ("a half each", "one cache")):
                mounts = 2 if arm == "a half each" else 1
                options = _cache_of(names, UNLIKE_SHARE / mounts)
                bench.drop()
                with contextlib.ExitStack() as stack:
                    points = [
                        stack.enter_context(
                            hinted_mount(daemon, origin.directory, work / job, options)
                        ).mountpoint
                        for job in list(names)[:mounts]
                    ]
                    roots = {"slow": points[0] / "slow", "fast": points[-1] / "fast"}
                    found = _trained(roots, names, number, UNLIKE_S, origin.bytes_read)
                _add_figures(bench, "unlike", arm, found)


def three(bench: Bench) -> None:
    """Row three: three datasets, three jobs, one cache, with hints and without."""
    with _datasets(bench, "three", tuple(PAUSES_S)) as (work, daemon, origin, names):
        for number in range(bench.rounds(ROUNDS)):
            for share in THREE_SHARES:
                for arm in bench.turns(number, ("no hints", "hints")):
                    bench.drop()
                    options = _cache_of(names, share)
                    with hinted_mount(daemon, origin.directory, work, options) as mount:
                        roots = {job: mount.mountpoint / job for job in names}
                        is_hinted = arm == "hints"
                        found = _trained(
                            *(roots, names, number, THREE_S, origin.bytes_read), hinted=is_hinted
                        )
                    _add_figures(bench, "three", f"{arm}, {share:.0%}", found)


Names = dict[str, list[str]]  # by job


@contextlib.contextmanager
def _datasets(
    bench: Bench, row: str, jobs: tuple[str, ...]
) -> Iterator[tuple[Path, HintsdCommand, LoopOrigin, Names]]:
    """One for each job, on a slow origin."""
    count = OWN_FILES_QUICK if bench.quick else OWN_FILES
    size_bytes = len(jobs) * count * (FILE_BYTES + 8192) * 5 // 4
    with (
        bench.folder(row) as work,
        HintsdCommand(work) as daemon,
        LoopOrigin(work, size_bytes) as origin,
    ):
        names: Names = {}
        for job in jobs:
            (work / job).mkdir()  # for what belongs to a mount of its own
            (origin.directory / job).mkdir()
            names[job] = list(
                bench.readers.fill_files(origin.directory / job, count, FILE_BYTES, 8)
            )
        origin.throttle(ORIGIN_BPS, ORIGIN_IOPS)
        yield work, daemon, origin, names
    bench.results.note(
        f"{row}: datasets of {count:,} files of {FILE_BYTES // 1000} KB; half of the cache is SSD; "
        f"the origin gives {ORIGIN_BPS / 1e6:.0f} MB/s; the second half of each training counts"
    )


def _cache_of(names: Names, share: float) -> tuple[str, ...]:
    """Options of a mount whose cache takes so much of all datasets."""
    dataset_bytes = sum(map(len, names.values())) * FILE_BYTES
    half_bytes = max(int(dataset_bytes * share / 2), SSD_BYTES_MIN)
    return "--ram", str(half_bytes), "--ssd", str(half_bytes)


Found = dict[tuple[str, str], float]  # by what, and its unit


def _add_figures(bench: Bench, row: str, arm: str, found: Found) -> None:
    for (what, unit), value in found.items():
        bench.results.add(row, f"{arm}: {what}", "fusecache", unit, value)
        bench.say(f"{row}, {arm}: {what}: {value:.2f} {unit}")


def _trained(
    roots: dict[str, Path],
    names: Names,
    number: int,
    seconds: float,
    bytes_read: Callable[[], int],
    *,
    hinted: bool = True,
) -> Found:
    """All jobs side by side for so long; what counts are epochs that ended in the second half."""
    command = [sys.executable, "-m", "tools.bench.sharing_reader"]
    ended_s: dict[str, list[float]] = {job: [] for job in names}
    with contextlib.ExitStack() as stack:
        readers = {}
        for job, root in roots.items():
            readers[job] = reader = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(reader.kill)
            told = {"root": str(root), "paths": names[job], "sampler": "shuffle", "hinted": hinted}
            told |= {"epochs": EPOCHS_MOST, "pause_s": PAUSES_S[job], "seed": number}
            _say(reader, json.dumps({**told, "batch": OWN_BATCH, "workers": WORKERS}))
        for reader in readers.values():
            _await(reader, "ready")
        for job, reader in readers.items():
            assert reader.stdout is not None
            threading.Thread(target=_note, args=(reader.stdout, ended_s[job]), daemon=True).start()
            _say(reader, "\n" * EPOCHS_MOST)  # one after another
        time.sleep(seconds / 2)
        half_s, before = time.monotonic(), bytes_read()
        time.sleep(seconds / 2)
        read_bytes = bytes_read() - before
    found: Found = {("the origin", "MB/s"): read_bytes / 1e6 / (seconds / 2)}
    for job, ends_s in ended_s.items():
        later_s = [at_s for at_s in ends_s if at_s >= half_s]
        if len(later_s) < 2:
            raise RuntimeError(f"the {job} job ended {len(ends_s)} epochs: too few; see above")
        samples = (len(later_s) - 1) * len(names[job])
        found[f"the {job} job", "samples/s"] = samples / (later_s[-1] - later_s[0])
    return found


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


ROWS: dict[str, Callable[[Bench], None]] = {
    "sharing": sharing,
    "unlike": unlike,
    "three": three,
}
