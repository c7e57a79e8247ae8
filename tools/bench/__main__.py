"""tools/bench/run: chooses rows and peers, makes the work directory, saves what was measured.

INVARIANT: mounts, processes, loop devices and files are gone at the end, also after a failure,
Ctrl-C or SIGTERM; what was measured until then is saved.
"""

import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console

from tools.bench import (
    budgets,
    gpu,
    hints,
    importance,
    log,
    papers,
    peers,
    policies,
    pool,
    ranges,
    recording,
    rows,
    service,
    shards,
    sharing,
    wide,
)
from tools.bench.readers import Readers
from tools.bench.results import Results, machine
from tools.interrupts import end_on_signals

ROWS = (
    "hot",
    "cold",
    "listing",
    "stream",
    "memory",
    "kill",
    "origin",
    *hints.ROWS,
    *budgets.ROWS,
    *wide.ROWS,
    *gpu.ROWS,
    *importance.ROWS,
    *papers.ROWS,
    *sharing.ROWS,
    *service.ROWS,
    *shards.ROWS,
    *ranges.ROWS,
    *pool.ROWS,
    *recording.ROWS,
    *log.ROWS,
    "policies",
)
PEERS = (*peers.ALL, *budgets.LOADERS)


def _chosen(kind: str, asked: str, known: tuple[str, ...]) -> tuple[str, ...]:
    patterns = ("*",) if asked == "all" else tuple(asked.split(","))
    for pattern in patterns:
        if not fnmatch.filter(known, pattern):
            raise click.UsageError(f"no {kind} {pattern!r}; known: {', '.join(known)}")
    return tuple(name for name in known if any(fnmatch.fnmatch(name, each) for each in patterns))


def _counts(asked: tuple[str, ...]) -> dict[int, int]:
    try:
        return {int(size): int(count) for size, count in (each.split("=") for each in asked)}
    except ValueError as error:
        raise click.UsageError("--files SIZE=COUNT: both are numbers") from error


@click.command(help="Measure fusecache and its peers side by side (docs/BENCHMARKS.md).")
@click.option("--rows", "row_list", default="all", show_default=True, help=",".join(ROWS))
@click.option("--peers", "peer_list", default="all", show_default=True, help=",".join(PEERS))
@click.option("--rounds", type=click.IntRange(1), help="Of each row, instead of its own number.")
@click.option(
    "--files",
    multiple=True,
    metavar="SIZE=COUNT",
    help="hot, cold, log-…, budgets…: so many of that size in bytes; again for another size.",
)
@click.option(
    "--epochs", type=click.IntRange(1), help="log-…: so many of a mount count, behind its first."
)
@click.option(
    "--layouts", default="all", help="log-…: of " + ",".join(log.LAYOUTS) + ", instead of a row's."
)
@click.option("--quick", is_flag=True, help="Less data, fewer rounds: a check of the harness.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/bench"),
    show_default=True,
    help="bench.json and bench.md go here.",
)
@click.option(
    "--work-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Data and caches go below this directory (a local SSD); default: the system's temporary.",
)
def main(
    row_list: str,
    peer_list: str,
    rounds: int | None,
    files: tuple[str, ...],
    epochs: int | None,
    layouts: str,
    quick: bool,
    out: Path,
    work_dir: Path | None,
) -> None:
    console = Console()
    chosen_rows = _chosen("row", row_list, ROWS)
    chosen_peers = _chosen("peer", peer_list, PEERS)
    names = tuple(name for name in chosen_peers if name in peers.ALL)
    only = () if layouts == "all" else _chosen("layout", layouts, log.LAYOUTS)
    counts = _counts(files)
    if os.geteuid() != 0:
        raise click.ClickException("dropping the kernel's caches needs root")
    absent = [name for name in names if peers.missing(name)]
    names = tuple(name for name in names if name not in absent)
    end_on_signals()
    results = Results()
    for name in absent:
        console.print(f"{name} is not installed: left out")
        results.note(f"{name} was not installed")
    results.about = machine() | peers.versions(names) | {"quick": quick}
    console.print(f"load average: {os.getloadavg()[0]:.2f} on {os.cpu_count()} processors")
    work = Path(tempfile.mkdtemp(prefix="fusecache-bench-", dir=work_dir))
    bench = rows.Bench(
        *(work, Readers(work), names, quick, results, _sayer(console)),
        asked_rounds=rounds,
        files=counts,
        epochs=epochs,
        layouts=only,
        loaders=tuple(name for name in chosen_peers if name in budgets.LOADERS),
    )
    failed = 0
    try:
        for label, row in _plan(chosen_rows, bench):
            results.note(f"{label}: load average before {os.getloadavg()[0]:.2f}")
            try:
                row()
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                failed += 1
                console.print(f"[bold red]{label}[/]: {error}", highlight=False, soft_wrap=True)
                results.note(f"{label}: NOT MEASURED: {error}")
    except KeyboardInterrupt:
        console.print("interrupted")
        failed += 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
        columns = _columns(names)
        results.save(out, columns)
    console.print(
        results.markdown(columns),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"saved {out / 'bench.md'}, {out / 'bench.json'}")
    sys.exit(1 if failed else 0)


def _columns(names: tuple[str, ...]) -> tuple[str, ...]:
    """Rows of their own readers have figures of fusecache whichever peers are chosen."""
    own = (
        *rows.COLUMNS,
        *hints.COLUMNS,
        *budgets.COLUMNS,
        *recording.COLUMNS,
        *service.COLUMNS,
        *log.COLUMNS,
    )
    return tuple(dict.fromkeys((*names, "fusecache", *own)))


def _plan(chosen: tuple[str, ...], bench: rows.Bench) -> list[tuple[str, Callable[[], None]]]:
    plan: list[tuple[str, Callable[[], None]]] = []
    hot, cold = "hot" in chosen, "cold" in chosen
    if hot or cold:
        label = "+".join(name for name in ("hot", "cold") if name in chosen)
        plan.append((label, lambda: rows.small_files(bench, hot, cold)))
    single: dict[str, Callable[[rows.Bench], None]] = {
        "listing": rows.listing,
        "stream": rows.stream,
        "memory": rows.memory,
        "kill": rows.kill,
        "origin": rows.origin,
        **hints.ROWS,
        **budgets.ROWS,
        **wide.ROWS,
        **gpu.ROWS,
        **importance.ROWS,
        **papers.ROWS,
        **sharing.ROWS,
        **service.ROWS,
        **shards.ROWS,
        **ranges.ROWS,
        **pool.ROWS,
        "policies": policies.policies,
        **recording.ROWS,
        **log.ROWS,
    }
    for name, row in single.items():
        if name in chosen:
            plan.append((name, lambda row=row: row(bench)))  # type: ignore[misc]  # bound early
    return plan


def _sayer(console: Console) -> Callable[[str], None]:
    start = time.monotonic()

    def say(text: str) -> None:
        seconds = time.monotonic() - start
        console.print(f"[dim]{seconds:6.0f} s[/]  {text}", highlight=False, soft_wrap=True)

    return say


if __name__ == "__main__":
    main()
