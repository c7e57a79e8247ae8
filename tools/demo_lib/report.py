"""The demo's results: a table for the terminal, a plot of two panels and a JSON file for keeps."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tools.demo_lib.training import Epoch

WIDTH = 120  # of what is not printed on a terminal
_COLOURS = {"direct": "#9a9a9a", "mount": "#2a78b8", "hinted": "#1f9d55"}


def sayer(console: Console) -> Callable[[str], None]:
    """Says a line, and how long it is since this call."""
    start = time.monotonic()

    def say(text: str) -> None:
        seconds = time.monotonic() - start
        console.print(f"[dim]{seconds:6.1f} s[/]  {text}", highlight=False, soft_wrap=True)

    return say


@dataclass(frozen=True)
class Row:
    reader: str  # "direct", "mount" or "hinted"
    epoch: int  # from 1
    result: Epoch
    origin_bytes: int | None  # None: this machine cannot count them


@dataclass(frozen=True)
class Check:
    claim: str
    holds: bool
    found: str


def busy(rows: Sequence[Row], reader: str) -> float:
    """Share of the reader's time, over all its epochs, in which the accelerator computed."""
    mine = [row.result for row in rows if row.reader == reader]
    return 1 - sum(e.waiting_s for e in mine) / sum(e.seconds for e in mine)


def headline(rows: Sequence[Row]) -> str:
    shares = [f"{reader} {percent(busy(rows, reader))}" for reader in _readers(rows)]
    return f"accelerator busy: {', '.join(shares)}"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _readers(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.reader for row in rows))


def print_table(console: Console, rows: Sequence[Row], checks: Sequence[Check]) -> None:
    table = Table(
        title="One training: directly from the origin, through a mount, and with hints",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("reader", "epoch"):
        table.add_column(heading, no_wrap=True)
    for heading in ("time", "waiting", "busy", "images/s", "MB from the origin", "loss", "acc."):
        table.add_column(heading, justify="right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.reader != row.reader:
            table.add_section()
        result = row.result
        table.add_row(
            row.reader,
            str(row.epoch),
            f"{result.seconds:.1f} s",
            f"{result.waiting_s:.1f} s",
            percent(result.busy),
            f"{result.samples_per_s:.0f}",
            "?" if row.origin_bytes is None else f"{row.origin_bytes / 1e6:.1f}",
            f"{sum(result.losses) / len(result.losses):.3f}",
            percent(result.accuracy),
        )
    console.print(table)
    for check in checks:
        mark = "[green]yes[/]" if check.holds else "[bold red]NO [/]"
        console.print(f"  {mark} {check.claim}: {check.found}", highlight=False, soft_wrap=True)
    console.print(f"\n[bold]{headline(rows)}[/]", highlight=False, soft_wrap=True)


def save_json(
    path: Path, rows: Sequence[Row], checks: Sequence[Check], about: dict[str, object]
) -> None:
    data = {
        "headline": headline(rows),
        "about": about,
        "rows": [asdict(row) for row in rows],
        "checks": [asdict(check) for check in checks],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def save_plot(path: Path, rows: Sequence[Row], about: str) -> None:
    """Two panels, PNG: how busy the accelerator was, and what the origin had to give."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels: dict[str, Callable[[Row], float]] = {
        "accelerator busy, %": lambda row: row.result.busy * 100,
        "MB read from the origin": lambda row: (row.origin_bytes or 0) / 1e6,
    }
    readers = _readers(rows)
    figure, both = plt.subplots(1, 2, figsize=(11, 4.6))
    for axes, (title, value) in zip(both, panels.items(), strict=True):
        for number, reader in enumerate(readers):
            mine = [row for row in rows if row.reader == reader]
            places = [row.epoch + (number - 1) * 0.28 for row in mine]
            bars = axes.bar(places, [value(row) for row in mine], 0.26, color=_COLOURS[reader])
            axes.bar_label(bars, fmt="%.0f")
            bars.set_label(reader)
        epochs = sorted({row.epoch for row in rows})
        axes.set_xticks(epochs, [f"epoch {epoch}" for epoch in epochs])
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylim(0, 110)
    figure.legend(*both[0].get_legend_handles_labels(), ncols=3, loc="lower center", frameon=False)
    figure.suptitle(headline(rows), fontsize=15, fontweight="bold")
    figure.text(0.5, 0.885, about, ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.05, 1, 0.93))
    figure.savefig(path, dpi=110)
    plt.close(figure)
