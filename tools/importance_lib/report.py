"""What tools/importance found: a table for the terminal, a plot of three panels, and JSON."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from tools.importance_lib.training import Epoch

WIDTH = 120  # of what is not printed on a terminal
_COLOURS = ("#9a9a9a", "#2a78b8", "#1f9d55", "#d07a1c", "#8a4fb0")


@dataclass(frozen=True)
class Row:
    """One epoch of one training."""

    reader: str
    epoch: int  # from 1
    result: Epoch
    origin_files: int | None  # None: nothing counts them
    origin_bytes: int | None

    @property
    def hits(self) -> float | None:
        """Of what was read, the share that needed no file of the origin."""
        return None if self.origin_files is None else 1 - self.origin_files / self.result.samples


@dataclass(frozen=True)
class Training:
    """All epochs of one."""

    reader: str
    what: str
    rows: Sequence[Row]

    @property
    def seconds(self) -> float:
        return sum(row.result.seconds for row in self.rows)

    @property
    def best(self) -> float:
        return max(row.result.accuracy for row in self.rows)

    @property
    def reads(self) -> int:
        return sum(row.result.samples for row in self.rows)

    @property
    def hits(self) -> float | None:
        """Of all epochs but the first, which has to fetch everything once."""
        later = [(row.hits, row.result.samples) for row in self.rows[1:]]
        known = [(hits, samples) for hits, samples in later if hits is not None]
        if not known:
            return None
        return sum(hits * samples for hits, samples in known) / sum(many for _, many in known)

    @property
    def origin_bytes(self) -> int | None:
        parts = [row.origin_bytes for row in self.rows]
        return None if None in parts else sum(part or 0 for part in parts)

    def seconds_to(self, accuracy: float) -> float | None:
        """Until an epoch ended with it; None: none did."""
        seconds = 0.0
        for row in self.rows:
            seconds += row.result.seconds
            if row.result.accuracy >= accuracy:
                return seconds
        return None


def target(trainings: Sequence[Training]) -> float:
    """An accuracy that all reach: a point below the best of the one that is worst."""
    return min(training.best for training in trainings) - 0.01


def headline(trainings: Sequence[Training]) -> str:
    """Who is there first."""
    accuracy = target(trainings)
    times = [(of.seconds_to(accuracy) or of.seconds, of.reader) for of in trainings]
    (first_s, first), (direct_s, direct) = min(times), times[0]
    return (
        f"{accuracy * 100:.1f} % are reached first by {first}: {first_s:.0f} s "
        f"({direct}: {direct_s:.0f} s)"
    )


def print_table(console: Console, trainings: Sequence[Training]) -> None:
    accuracy = target(trainings)
    table = Table(
        title="One network, trained in different orders from one slow origin",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for heading in ("training", "order"):
        table.add_column(heading, no_wrap=True)
    headings = (f"to {accuracy * 100:.1f} %", "best", "all epochs", "reads", "hits", "from origin")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for of in trainings:
        table.add_row(
            of.reader,
            of.what,
            _shown(of.seconds_to(accuracy), "{:.0f} s"),
            f"{of.best * 100:.1f} %",
            f"{of.seconds:.0f} s",
            f"{of.reads:,}",
            _shown(of.hits, "{:.2f}"),
            _shown(of.origin_bytes, "{:,.0f} MB", 1e-6),
        )
    console.print(table)
    console.print(
        "  hits: samples read without a file of the origin, of all epochs but the first",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"\n[bold]{headline(trainings)}[/]", highlight=False, soft_wrap=True)


def _shown(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)


def save_json(path: Path, trainings: Sequence[Training], about: str) -> None:
    data = {
        "headline": headline(trainings),
        "about": about,
        "target_accuracy": target(trainings),
        "trainings": [
            {"reader": of.reader, "what": of.what, "hits": of.hits}
            | {"rows": [asdict(row) for row in of.rows]}
            for of in trainings
        ],
    }
    path.write_text(json.dumps(data, indent=1) + "\n")


def save_plot(path: Path, trainings: Sequence[Training], about: str) -> None:
    """PNG: accuracy over time, hits, and what the origin had to give, of each epoch."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.6))
    for colour, of in zip(_COLOURS, trainings, strict=False):
        times = list(itertools.accumulate(row.result.seconds for row in of.rows))
        accuracies = [row.result.accuracy * 100 for row in of.rows]
        left.plot(times, accuracies, ".-", color=colour, label=of.reader)
        for axes, name, scale in ((middle, "hits", 1.0), (right, "origin_bytes", 1e-6)):
            known = [row for row in of.rows if getattr(row, name) is not None]
            values = [getattr(row, name) * scale for row in known]
            axes.plot([row.epoch for row in known], values, ".-", color=colour)
    left.set_title("accuracy on unseen images, %, over seconds")
    left.set_ylim(bottom=max(0, target(trainings) * 100 - 25))
    middle.set_title("hits, by epoch")
    right.set_title("MB read from the origin, by epoch")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), ncols=5, loc="lower center", frameon=False)
    figure.suptitle(headline(trainings), fontsize=14, fontweight="bold")
    figure.text(0.5, 0.885, about, ha="center", fontsize=8)
    figure.tight_layout(rect=(0, 0.06, 1, 0.92))
    figure.savefig(path, dpi=110)
    plt.close(figure)
