"""Every table and plot of docs/SIMULATOR.md and docs/LAB.md, and whether they are what was
published and what those documents state.

usage: tools/simulate/run [FOLDER], where FOLDER is out/laboratory unless it is said. Ends with 1
where a published run time is missed by more than 5 %, or a figure that the documents state is not
what is found.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from fusecache.base import command, terminal
from fusecache.base.errors import EXIT_FAILED, EXIT_USAGE, UserError
from fusecache.base.processes import usable_memory_bytes
from hintsd.simulator import catalogue, scenario
from hintsd.simulator.accesses import analyse
from hintsd.simulator.figures import grid, plot_file, plots, report
from hintsd.simulator.orders import Orders
from tools.simulate import verdict

SEED: Final = 0
BESIDE_BYTES: Final = 4 << 30
"""The simulator takes 2 GB, the laboratory 0.5."""
ROOT: Final = Path(__file__).resolve().parents[2]


def main() -> int:
    """Progress on stderr, tables on stdout and in files."""
    words = sys.argv[1:]
    if len(words) > 1 or any(not word or word.startswith("-") for word in words):
        raise UserError("usage: tools/simulate/run [FOLDER]", EXIT_USAGE)
    folder = Path(words[0] if words else "out/laboratory")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}: name another folder", EXIT_USAGE) from None
    plot_file.check(str(folder / "x.png"))
    with _laboratory(folder / "lab") as laboratory:
        beside = len(os.sched_getaffinity(0)) > 1 and usable_memory_bytes() > BESIDE_BYTES
        if not beside:
            _finished(laboratory, folder / "lab")
        simulated = _simulate(folder, laboratory)
        if beside:
            _finished(laboratory, folder / "lab")
    for name in ("replay", "papers"):
        print((folder / "lab" / f"{name}.txt").read_text())
    found = verdict.Found(
        **simulated,
        replays=json.loads((folder / "lab/replay.json").read_text())["traces"],
        figures=json.loads((folder / "lab/papers.json").read_text())["figures"],
    )
    judged = verdict.judge(found, ROOT / "docs")
    (folder / "verdict.txt").write_text("\n".join(judged.lines) + "\n")
    print("\n".join(judged.lines))
    return EXIT_FAILED if judged.missed else 0


@contextmanager
def _laboratory(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`hintsd lab all`, what it says in a file beside the folder."""
    words = [sys.executable, "-m", "hintsd", "lab", "all", "--seed", str(SEED), "-o", str(folder)]
    with folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def _finished(laboratory: subprocess.Popen[bytes], folder: Path) -> None:
    _say("waiting for hintsd lab all (4 minutes of CPU time)")
    if laboratory.wait() != 0:
        said = folder.with_suffix(".log").read_text().strip()
        raise UserError(f"hintsd lab all failed: {said}")


def _simulate(folder: Path, laboratory: subprocess.Popen[bytes]) -> dict[str, Any]:
    """All of docs/SIMULATOR.md: the parts of verdict.Found that are of it. UserError: the
    laboratory, which runs meanwhile, has failed.
    """
    shown: list[Any] = []
    run_times = []
    items = [(scenario.load(name), tuple(catalogue.POLICIES)) for name in scenario.BUILT_IN]
    pooled = scenario.load(verdict.POOLED)
    items += [
        (pooled.with_workers(workers), ("perfect", "pool")) for workers in verdict.POOLED_WORKERS
    ]
    for item, policies in items:
        if laboratory.poll():
            _finished(laboratory, folder / "lab")
        orders = Orders(item.dataset, item.system.workers, SEED)
        results = []
        for policy in policies:
            begun = time.perf_counter()
            results.append(catalogue.simulate(item, policy, orders))
            _say(f"{item.name} {policy}: {time.perf_counter() - begun:.1f} s")
        shown += [report.table(item, results, item.name in catalogue.PUBLISHED), ""]
        plots.run_times(str(folder / f"{item.name}.png"), [(item, results)])
        _save(folder / f"{item.name}.json", {"seed": SEED, "results": report.as_json(results)})
        run_times += results
    what_if = grid.explore(
        grid.paper(), "frequency", grid.RAM_MB, grid.SSD_MB, SEED, lambda _: None
    )
    _say("what if")
    shown += [*report.grid(what_if), ""]
    plots.grid(str(folder / "what-if.png"), what_if)
    _save(folder / "what-if.json", {"seed": SEED, **asdict(what_if)})
    accesses = analyse(4, 1000, 10_000, 0.1, SEED, lambda _: None)
    shown.append(report.accesses([accesses]))
    plots.accesses(str(folder / "accesses.png"), [accesses])
    _save(folder / "accesses.json", {"seed": SEED, "accesses": report.accesses_json([accesses])})
    console = terminal.console()
    with console.capture() as captured:
        console.print(*shown, "", sep="\n")
    (folder / "tables.txt").write_text(captured.get())
    print(captured.get(), end="")
    return {"run_times": run_times, "what_if": what_if, "accesses": accesses}


def _save(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=2) + "\n")


def _say(line: str) -> None:
    print(f"tools/simulate: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    command.run("tools/simulate", main)
