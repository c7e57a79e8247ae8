"""Row importance: what a cache of a part of the dataset is worth under importance sampling. Row
keep: the same reads, kept by the planner's rule and by those of papers.

Each arm is a training through a mount of its own; what it read is replayed by the laboratory's LRU
and MIN with as many bytes. Counted are files that the origin gave, so the machine's speed, and what
else it does, say nothing.
"""

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fusecache.config.settings import SSD_BYTES_MIN
from hintsd.policies import MISS, Hints, Policy
from hintsd.policies.belady import Belady
from hintsd.policies.lru import LRU
from tools.bench.hints import hinted_mount
from tools.bench.rows import Bench
from tools.fusecache_command import FusecacheMount
from tools.hintsd_command import HintsdCommand

FILES, FILES_QUICK, FILE_BYTES = 12_000, 3_000, 40_000
EPOCHS, EPOCHS_QUICK = 6, 3
WARM_UP = 2  # epochs that count for nothing: of the second the scores are the first there are
SHARES = (0.2, 0.4)
# Little of the cache is in flight, as where a dataset is large: 3.8 MB of 96 at 20 %
BATCH, WORKERS = 16, 2
STEP_S = 0.008  # of a batch: 2,000 samples a second
ROUNDS = 3
ARMS: dict[str, dict[str, Any] | None] = {
    "uniform": None,
    "shade": {"scheme": "shade"},
    "icache": {"scheme": "icache", "fraction": 0.7},
    "icache, drawn ahead": {"scheme": "icache", "fraction": 0.7, "draw_ahead": 1},
    "loss": {"scheme": "loss"},
    "loss, drawn ahead": {"scheme": "loss", "draw_ahead": 1},
}
SHADE: dict[str, Any] = {"scheme": "shade"}
KEEP_RULES = ("auto", "shade", "lru", "random", "none")
KEEP_SHARES = (0.1, 0.2)
TIMEOUT_S = 600.0


def importance(bench: Bench) -> None:
    """Row importance: a fifth, and two fifths of the dataset in a mount's RAM and SSD."""
    count = FILES_QUICK if bench.quick else FILES
    with bench.folder("importance") as work, HintsdCommand(work) as daemon:
        source = work / "source"
        source.mkdir()
        names = bench.readers.fill_files(source, count, FILE_BYTES, 8)
        for seed in range(bench.rounds(ROUNDS)):
            for share in SHARES:
                for arm, settings in ARMS.items():
                    run = functools.partial(_run, bench, work, daemon, source, names)
                    _add(bench, f"{arm}, {share:.0%}", run(share, settings, seed))
    bench.results.note(
        f"importance: {count:,} files of {FILE_BYTES // 1000} KB; half of the cache is RAM, half "
        f"SSD; a batch of {BATCH} every {STEP_S * 1000:.0f} ms; epochs behind the first {WARM_UP} "
        "count"
    )


Found = dict[str, float]


def _add(bench: Bench, what: str, found: Found) -> None:
    for name, hits in found.items():
        bench.results.add("importance", f"{what}: {name}", "fusecache", "of reads", hits)
    shown = ", ".join(f"{name} {hits:.3f}" for name, hits in found.items())
    bench.say(f"importance, {what}: {shown}")


def _run(
    bench: Bench,
    work: Path,
    daemon: HintsdCommand,
    source: Path,
    names: Sequence[str],
    share: float,
    settings: dict[str, Any] | None,
    seed: int,
) -> Found:
    """Hits: 1 - files that the origin gave / samples read."""
    budget = budget_bytes(len(names), share)
    options = ("--ram", str(budget // 2), "--ssd", str(budget // 2))
    with hinted_mount(daemon, source, work, options) as mount:
        epochs = trained(bench, mount, names, settings=settings, seed=seed, step_s=STEP_S)
    read = [epoch["read"] for epoch in epochs]
    found = {"hits": hits_of(epochs)}
    for name, policy in (("MIN", Belady(budget)), ("LRU", LRU(budget))):
        found[f"{name} of the same reads"] = _replayed(policy, read)
    return found


def budget_bytes(files: int, share: float) -> int:
    """Of the whole cache; half is RAM."""
    return max(int(files * FILE_BYTES * share), 2 * SSD_BYTES_MIN)


def hits_of(epochs: Sequence[dict[str, Any]]) -> float:
    """Of those behind the warm-up."""
    counted = sum(len(epoch["read"]) for epoch in epochs[WARM_UP:])
    fetched: int = epochs[-1]["origin_files"] - epochs[WARM_UP - 1]["origin_files"]
    return 1 - fetched / counted


def trained(
    bench: Bench, mount: FusecacheMount, names: Sequence[str], **work: Any
) -> list[dict[str, Any]]:
    """Of each epoch what importance_reader.py tells, and origin_files: that the origin gave until
    then. `work`: what it is told, besides.
    """
    told = {
        "root": str(mount.mountpoint),
        "paths": list(names),
        "epochs": EPOCHS_QUICK if bench.quick else EPOCHS,
        "batch": BATCH,
        "workers": WORKERS,
        "hints": True,
        **work,
    }
    return [
        {**epoch, "origin_files": int(mount.status()["origin"]["files"])} for epoch in _epochs(told)
    ]


def _epochs(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """As each ends; the next one begins when the caller has looked."""
    command = [sys.executable, "-m", "tools.bench.importance_reader"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        try:
            reader.stdin.write(json.dumps(told) + "\n")
            reader.stdin.flush()
            for line in reader.stdout:
                yield json.loads(line)
                reader.stdin.write("\n")
                reader.stdin.flush()
            reader.stdin.close()
            if reader.wait(TIMEOUT_S) != 0:
                raise RuntimeError("the reader of row importance failed: see above")
        finally:
            reader.kill()


def _replayed(policy: Policy, read: Sequence[Sequence[int]]) -> float:
    policy.hint(Hints(sequence=np.concatenate([np.asarray(epoch) for epoch in read])))
    hits = samples = 0
    for number, epoch in enumerate(read):
        answers = [policy.access(item, FILE_BYTES) for item in epoch]
        if number >= WARM_UP:
            hits += sum(answer != MISS for answer in answers)
            samples += len(answers)
    return hits / samples


def keep(bench: Bench) -> None:
    """Row keep: SHADE's reads, a tenth and a fifth of the dataset in a mount's RAM and SSD."""
    count = FILES_QUICK if bench.quick else FILES
    with bench.folder("keep") as work:
        source = work / "source"
        source.mkdir()
        names = bench.readers.fill_files(source, count, FILE_BYTES, 8)
        for seed in range(bench.rounds(ROUNDS)):
            for share in KEEP_SHARES:
                for rule in KEEP_RULES:
                    with HintsdCommand(work, "--keep", rule) as daemon:
                        found = _run(bench, work, daemon, source, names, share, SHADE, seed)
                    bench.results.add(
                        "keep", f"{rule}, {share:.0%}", "fusecache", "of reads", found["hits"]
                    )
                    bench.say(f"keep, {rule}, {share:.0%}: hits {found['hits']:.3f}")


ROWS: dict[str, Callable[[Bench], None]] = {"importance": importance, "keep": keep}
