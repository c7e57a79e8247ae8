"""The demo's results: a table for the terminal, a plot and a JSON file for keeps."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tools.demo_lib.training import Epoch

WIDTH = 120  # of what is not printed on a terminal


@dataclass(frozen=True)
class Row:
    source: str  # "direct", "mount" or "hinted"
    epoch: int  # from 1
    served_from: str  # where the bytes came from, as measured
    result: Epoch
    origin_bytes: int | None  # None: this machine cannot count them
    late: int | None  # reads that came before their bytes; None: nobody was told the order


@dataclass(frozen=True)
class Layout:
    name: (
        str  # "reorder": written anew for the epoch that follows; "log": read from a log; "static"
    )
    why: str


@dataclass(frozen=True)
class Log:
    """How the hinted mount's SSD was laid out."""

    asked: str  # --layout
    epochs: list[Layout]  # at the end of each
    written_share: float  # bytes of logs, for each byte that the training read


@dataclass(frozen=True)
class Check:
    claim: str
    holds: bool
    found: str


def print_table(console: Console, rows: list[Row], log: Log, checks: list[Check]) -> None:
    table = Table(
        title="One training: directly from the origin, through a mount, and with hints",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("read", "epoch", "from"):
        table.add_column(heading, no_wrap=True)
    for heading in ("images/s", "time", "waiting", "origin MB", "late", "loss", "acc."):
        table.add_column(heading, justify="right", no_wrap=True)
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.source != row.source:
            table.add_section()
        fetched = "?" if row.origin_bytes is None else f"{row.origin_bytes / 1e6:.1f}"
        table.add_row(
            row.source,
            str(row.epoch),
            row.served_from,
            f"{row.result.samples_per_s:.0f}",
            f"{row.result.seconds:.1f} s",
            f"{row.result.waiting_s:.1f} s",
            fetched,
            "" if row.late is None else str(row.late),
            f"{sum(row.result.losses) / len(row.result.losses):.3f}",
            f"{row.result.accuracy:.1%}",
        )
    console.print(table)
    console.print(
        f"  hinted, layout on SSD (--layout {log.asked}):"
        f" {log.written_share:.2f} bytes written for each byte served",
        highlight=False,
        soft_wrap=True,
    )
    for number, layout in enumerate(log.epochs, start=1):
        told = f"    after epoch {number}: {_said(layout, len(log.epochs))}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    for check in checks:
        mark = "[green]yes[/]" if check.holds else "[bold red]NO [/]"
        console.print(f"  {mark} {check.claim}: {check.found}", highlight=False, soft_wrap=True)


def _said(layout: Layout, last: int) -> str:
    if layout.name == "log" and layout.why.startswith("no epoch follows"):
        return f"epoch {last} is read from the log; none comes after it: nothing is written"
    return f"{layout.name}, because: {layout.why}"


def save_json(path: Path, rows: list[Row], checks: list[Check], about: dict[str, object]) -> None:
    data = {
        "about": about,
        "rows": [asdict(r) for r in rows],
        "checks": [asdict(c) for c in checks],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def save_plot(path: Path, rows: list[Row], about: str) -> None:
    """Four small charts, PNG: speed, waiting, bytes from the origin, loss of each step."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"direct": "#9a9a9a", "mount": "#2a78b8", "hinted": "#1f9d55"}
    labels = [f"{row.source}\nepoch {row.epoch}\nfrom {row.served_from}" for row in rows]
    fill = [colours[row.source] for row in rows]
    figure, ((speed, waiting), (fetched, loss)) = plt.subplots(2, 2, figsize=(13, 8.5))
    bars = [
        (speed, "samples/s", [row.result.samples_per_s for row in rows]),
        (waiting, "stall: seconds waiting for data", [row.result.waiting_s for row in rows]),
        (fetched, "MB read from the origin", [(row.origin_bytes or 0) / 1e6 for row in rows]),
    ]
    for axes, title, values in bars:
        drawn = axes.bar(range(len(rows)), values, color=fill)
        axes.bar_label(drawn, fmt="%.0f" if max(values, default=0) >= 20 else "%.1f")
        axes.set_xticks(range(len(rows)), labels, fontsize=7)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    for source, width in (("direct", 6.0), ("mount", 3.5), ("hinted", 1.5)):
        losses = [value for row in rows if row.source == source for value in row.result.losses]
        loss.plot(losses, color=colours[source], label=source, linewidth=width)
    loss.set_title("loss of each step")
    loss.legend(frameon=False)
    loss.spines[["top", "right"]].set_visible(False)
    figure.suptitle(about)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
