"""Row papers: what SHADE and iCACHE publish of their caches, beside ours, live.

Each arm is a training through a mount of its own, from an origin in which a request takes some
milliseconds. LRU is the papers' baseline: a plain shuffle, without hints, on a mount that replaces
what was fetched longest ago. (Nothing is read twice in an epoch of it, so that is LRU.)
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.hints import hinted_mount
from tools.bench.importance import (
    EPOCHS,
    EPOCHS_QUICK,
    FILE_BYTES,
    FILES,
    FILES_QUICK,
    WARM_UP,
    budget_bytes,
    hits_of,
    trained,
)
from tools.bench.rows import Bench
from tools.hintsd_command import HintsdCommand
from tools.latency_origin import LatencyOrigin

LATENCY_S = 0.002
WORKERS = 4
ROUNDS = 3


class Arm(NamedTuple):
    """One training."""

    keep: str | None
    """What stays in the cache (`hintsd serve --keep`); None: no hints."""
    settings: dict[str, Any] | None
    """Of the ImportanceSampler; None: a plain shuffle."""


_ICACHE: dict[str, Any] = {"scheme": "icache", "fraction": 0.7}
_SUBSTITUTING = {**_ICACHE, "substitute": "low"}
_SHADE: dict[str, Any] = {"scheme": "shade"}
LRU = Arm(None, None)
_LRU = {"LRU": LRU}
_WHOLE = {"iCACHE": Arm("icache", _SUBSTITUTING), "ours, substitutes": Arm("auto", _SUBSTITUTING)}
ARMS: dict[float, dict[str, Arm]] = {
    0.1: {
        **_LRU,
        "SHADE's APP": Arm("sh_app", _SHADE),
        "ours, shade": Arm("auto", _SHADE),
    },
    0.2: {
        **_LRU,
        "iCACHE: IIS alone": Arm(None, _ICACHE),
        "iCACHE: H-cache": Arm("icache", _ICACHE),
        **_WHOLE,
        "ours, icache": Arm("auto", _ICACHE),
        "ours, uniform": Arm("auto", None),
        "SHADE, repeat=3": Arm("shade", {**_SHADE, "repeat": 3}),
        "ours, shade, repeat=3": Arm("auto", {**_SHADE, "repeat": 3}),
    },
    0.4: {**_LRU, **_WHOLE},
    0.6: {**_LRU, **_WHOLE},
    0.8: {**_LRU, **_WHOLE},
}
"""By the cache's share of the dataset."""


def papers(bench: Bench) -> None:
    """Row papers."""
    count = FILES_QUICK if bench.quick else FILES
    with bench.folder("papers") as work:
        behind = work / "behind"
        behind.mkdir()
        names = bench.readers.fill_files(behind, count, FILE_BYTES, 8)
        with LatencyOrigin(behind, work, LATENCY_S) as origin:
            for seed in range(bench.rounds(ROUNDS)):
                for share, arms in ARMS.items():
                    for name, arm in arms.items():
                        epochs = _train(bench, work, origin.directory, names, share, arm, seed)
                        _add(bench, f"{name}, {share:.0%}", epochs, count)
    bench.results.note(
        f"papers: {count:,} files of {FILE_BYTES // 1000} KB, {LATENCY_S * 1000:.0f} ms a request; "
        f"half of the cache is RAM, half SSD; {WORKERS} workers; the epochs behind the first "
        f"{WARM_UP} count"
    )


def _train(
    bench: Bench,
    work: Path,
    source: Path,
    names: Sequence[str],
    share: float,
    arm: Arm,
    seed: int,
) -> list[dict[str, Any]]:
    budget = budget_bytes(len(names), share)
    options = ["--ram", str(budget // 2), "--ssd", str(budget // 2)]
    if arm.keep is None:
        options += ["--policy", "lrf"]
    with (
        HintsdCommand(work, "--keep", arm.keep or "auto") as daemon,
        hinted_mount(daemon, source, work, tuple(options)) as mount,
    ):
        return trained(
            *(bench, mount, names),
            settings=arm.settings,
            seed=seed,
            step_s=0.0,
            workers=WORKERS,
            hints=arm.keep is not None,
            epochs=EPOCHS_QUICK if bench.quick or arm == LRU else EPOCHS,  # LRU's are all alike
        )


def _add(bench: Bench, what: str, epochs: list[dict[str, Any]], count: int) -> None:
    later = epochs[WARM_UP:]
    reads = [index for epoch in later for index in epoch["read"]]
    found = {
        ("hits", "of reads"): hits_of(epochs),
        ("substituted", "of reads"): sum(e["substituted"] for e in later) / len(reads),
        ("an epoch", "s"): sum(epoch["seconds"] for epoch in later) / len(later),
        ("read at least once", "of the samples"): len(set(reads)) / count,
    }
    for (name, unit), value in found.items():
        bench.results.add("papers", f"{what}: {name}", "fusecache", unit, value)
    shown = ", ".join(f"{name} {value:.3f}" for (name, _), value in found.items())
    bench.say(f"papers, {what}: {shown}")


ROWS: dict[str, Callable[[Bench], None]] = {"papers": papers}
