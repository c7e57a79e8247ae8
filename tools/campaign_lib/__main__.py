"""tools/campaign: runs the attacks one after the other, and adds up.

INVARIANT: mounts, processes and files are gone at the end, also after a failure, Ctrl-C or SIGTERM.
INVARIANT: what an attack has counted is shown and is in the verdict, however the attack ends.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from tools.campaign_lib import flips, fuzz, kills, links, planted
from tools.campaign_lib.ground import Count
from tools.interrupts import end_on_signals

Attack = Callable[[Path, random.Random, float, Count], None]

ATTACKS: dict[str, tuple[Attack, float]] = {
    "planted": (planted.run, 0.04),
    "links": (links.run, 0.06),
    "flips": (flips.run, 0.2),
    "fuzz": (fuzz.run, 0.3),
    "kills": (kills.run, 0.4),
}
"""Each with its share of the time."""


def _chosen(asked: str) -> list[str]:
    names = list(ATTACKS) if asked == "all" else asked.split(",")
    for name in names:
        if name not in ATTACKS:
            raise click.UsageError(f"no attack {name!r}; known: {', '.join(ATTACKS)}")
    return names


@click.command(help="Attack a live fusecache, and count what it survived (docs/CAMPAIGN.md).")
@click.option("--minutes", type=click.FloatRange(0), default=10.0, show_default=True)
@click.option("--only", default="all", show_default=True, help=",".join(ATTACKS))
@click.option("--seed", type=int)
@click.option("--work-dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(minutes: float, only: str, seed: int | None, work_dir: Path | None) -> None:
    names = _chosen(only)
    if os.geteuid() != 0:
        raise click.ClickException("attacks on links, caches and kernel caches need root")
    end_on_signals()
    console = Console(highlight=False, soft_wrap=True)
    seed = time.time_ns() % 1_000_000_000 if seed is None else seed
    console.print(f"seed {seed}; {minutes:g} minute{'s' * (minutes != 1)} for {', '.join(names)}")
    total, share = Count(), sum(ATTACKS[name][1] for name in names)
    work = Path(tempfile.mkdtemp(prefix="fusecache-campaign-", dir=work_dir))
    is_whole = False
    try:
        for name in names:
            attack, part = ATTACKS[name]
            begin, count = time.monotonic(), Count()
            until = begin + minutes * 60 * part / share
            directory = work / name
            directory.mkdir()
            try:
                attack(directory, random.Random(f"{seed} {name}"), until, count)
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                count.failed(f"{name} could not go on", error)
            finally:
                _show(console, name, count, time.monotonic() - begin)
                total.add(count)
        is_whole = True
    except KeyboardInterrupt:
        console.print("interrupted")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    survived = is_whole and not total.wrong and not total.errors
    tried = ", ".join(f"{number:,} {what}" for what, number in sorted(total.tried.items()))
    verdict = "survived" if survived else "FAILED"
    console.print(
        f"campaign: {verdict}: {tried}; {total.wrong:,} wrong reads, {total.errors:,} errors"
    )
    sys.exit(0 if survived else 1)


def _show(console: Console, name: str, count: Count, seconds: float) -> None:
    table = Table(
        title=f"{name}, {seconds:.0f} s", title_justify="left", show_header=False, box=None
    )
    for what, number in sorted(count.tried.items()):
        table.add_row(what, f"{number:,}")
    table.add_row("wrong reads", f"{count.wrong:,}")
    table.add_row("errors", f"{count.errors:,}")
    console.print(table)
    for line in count.notes:
        console.print(f"  {line}")
    for line, times in count.surprises.values():
        console.print(f"  {times:,} ×: {line}", style="bold red")


if __name__ == "__main__":
    main(prog_name="tools/campaign")
