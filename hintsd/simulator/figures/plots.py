"""Results as a picture: PNG or SVG, by the file's extension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from hintsd.simulator.accesses import Accesses
from hintsd.simulator.catalogue import published_s
from hintsd.simulator.figures.grid import GB, Grid
from hintsd.simulator.figures.plot_file import DOTS_PER_INCH
from hintsd.simulator.run import Result
from hintsd.simulator.system import Scenario

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STAGING: Final = "staging (preprocess, write)"
PARTS: Final = (
    ("startup_s", "start-up", "#9a9a9a"),
    ("compute_s", "compute", "#2a78b8"),
    ("barrier_s", "barrier", "#9cc7e6"),
    ("stall_s", "stall", "#d1495b"),
)


def run_times(path: str, results: Sequence[tuple[Scenario, Sequence[Result]]]) -> None:
    """A row a scenario (HDMLP, Figure 7): the run time and its parts, the published one as a mark;
    beside it where the time for fetching goes.
    """
    from matplotlib.figure import Figure

    figure = Figure((13, 4.2 * len(results)), layout="constrained")
    for row, (scenario, outcomes) in enumerate(results):
        shown = [result for result in outcomes if result.refused is None]
        names = [result.policy for result in shown]
        places = np.arange(len(shown))
        times = figure.add_subplot(len(results), 2, 2 * row + 1)
        left = np.zeros(len(shown))
        for attribute, label, colour in PARTS:
            widths = np.array([max(0.0, getattr(result, attribute)) for result in shown])
            times.barh(places, widths, left=left, color=colour, label=label)
            left += widths
        known = [
            (place, published)
            for place, result in zip(places, shown, strict=True)
            if (published := published_s(scenario.name, result.policy)) is not None
        ]
        if known:
            times.plot(
                [seconds for _, seconds in known],
                [place for place, _ in known],
                "k|",
                markersize=14,
                label="published",
            )
        _bars(times, names, f"{_plain(scenario.name)}: run time, s")
        shares = figure.add_subplot(len(results), 2, 2 * row + 2)
        left = np.zeros(len(shown))
        sources = dict.fromkeys(name for result in shown for name in result.fetch_s)
        spent = [{**result.fetch_s, STAGING: result.write_s} for result in shown]
        totals = np.array([sum(one.values()) for one in spent])
        for source in [*sources, STAGING]:
            fetch_s = np.array([one.get(source, 0.0) for one in spent])
            widths = 100 * np.divide(fetch_s, totals, out=np.zeros_like(fetch_s), where=totals > 0)
            shares.barh(places, widths, left=left, label=_plain(source))
            left += widths
        _bars(shares, names, "I/O, % of its time by source")
    figure.savefig(path, dpi=DOTS_PER_INCH)


def _plain(text: str) -> str:
    """Text that is no formula to matplotlib."""
    return text.replace("$", r"\$")


def _bars(axes: Axes, names: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def grid(path: str, found: Grid) -> None:
    """A line a size of RAM over sizes of SSD (HDMLP, Figure 8)."""
    from matplotlib.figure import Figure

    figure = Figure((7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for ram_mb in dict.fromkeys(point.ram_mb for point in found.storage):
        points = [point for point in found.storage if point.ram_mb == ram_mb]
        axes.plot(
            [point.ssd_mb / GB for point in points],
            [np.nan if point.total_s is None else point.total_s / 3600 for point in points],
            marker="o",
            label=f"{ram_mb / GB:g} GB RAM",
        )
    axes.axhline(found.lower_bound_s / 3600, color="k", linestyle=":", label="lower bound")
    axes.set_xlabel("SSD, GB")
    axes.set_ylabel("run time, hours")
    axes.set_title(f"{_plain(found.scenario)}, {found.policy}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=DOTS_PER_INCH)


def accesses(path: str, found: Sequence[Accesses]) -> None:
    """How many samples a worker reads how often: drawn and expected (HDMLP, Figure 2)."""
    from matplotlib.figure import Figure

    figure = Figure((7, 4.2 * len(found)), layout="constrained")
    for number, one in enumerate(found):
        axes = figure.add_subplot(len(found), 1, number + 1)
        times = np.flatnonzero((one.histogram > 0) | (one.expected > 0.01 * one.expected.max()))
        axes.bar(times, one.histogram[times], color="#9cc7e6", width=1.0, label="drawn")
        axes.plot(times, one.expected[times], color="#2a78b8", label="binomial")
        axes.axvline(one.threshold, color="k", linestyle=":", label=f"(1 + {one.delta:g})·E/N")
        axes.set_xlabel("reads of a sample by one worker")
        axes.set_ylabel("samples")
        axes.set_title(
            f"N = {one.workers}, E = {one.epochs:,}, F = {one.samples:,}: above "
            f"{one.threshold:g} expected {one.estimated:.1f}, drawn {one.drawn[0]}",
            fontsize=9,
        )
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=DOTS_PER_INCH)
