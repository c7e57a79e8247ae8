"""Runs every `hintsd simulate` that docs/SIMULATOR.md quotes; a picture and JSON of each are kept.

usage: tools/simulate/run [FOLDER], where FOLDER is out/simulate unless it is said.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusecache import command
from hintsd import plot_file
from hintsd.simulator import catalogue, grid, plots, report, scenario
from hintsd.simulator.accesses import analyse
from hintsd.simulator.orders import Orders

SEED = 0


def main() -> None:
    """Progress on stderr, tables on stdout and in tables.txt."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "out/simulate")
    folder.mkdir(parents=True, exist_ok=True)
    plot_file.check(str(folder / "x.png"))
    shown: list[Any] = []
    for name in scenario.BUILT_IN:
        item = scenario.load(name)
        orders = Orders(item.dataset, item.system.workers, SEED)
        results = []
        for policy in catalogue.POLICIES:
            begun = time.perf_counter()
            results.append(catalogue.simulate(item, policy, orders))
            _say(f"{name} {policy}: {time.perf_counter() - begun:.1f} s")
        shown += [report.table(item, results, name in catalogue.PUBLISHED), ""]
        plots.run_times(str(folder / f"{name}.png"), [(item, results)])
        _save(folder / f"{name}.json", {"seed": SEED, "results": report.as_json(results)})
    found = grid.explore(
        scenario.load("fits-cluster"), "frequency", grid.RAM_MB, grid.SSD_MB, SEED, lambda _: None
    )
    shown += [*report.grid(found), ""]
    plots.grid(str(folder / "what-if.png"), found)
    _save(folder / "what-if.json", {"seed": SEED, **asdict(found)})
    accesses = [analyse(4, 1000, 10_000, 0.1, SEED, lambda _: None)]
    shown.append(report.accesses(accesses))
    plots.accesses(str(folder / "accesses.png"), accesses)
    _save(folder / "accesses.json", {"seed": SEED, "accesses": report.accesses_json(accesses)})
    console = command.console()
    with console.capture() as captured:
        console.print(*shown, sep="\n")
    (folder / "tables.txt").write_text(captured.get())
    print(captured.get(), end="")
    _say(f"in {folder}")


def _save(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=2) + "\n")


def _say(line: str) -> None:
    print(f"tools/simulate: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    command.run("tools/simulate", main)
