"""Hit ratio over cache size as a picture: PNG or SVG, by the file's extension."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Final

from fusecache.base.command import printable
from hintsd.lab.tables import Result
from hintsd.simulator.figures.plot_file import DOTS_PER_INCH

MARKERS: Final = "osv^D<>PX*phd8"
INCHES: Final = (9.0, 5.5)


def hit_ratios(path: str, results: Sequence[Result]) -> None:
    """A panel a trace, a line a policy; dashed: with the reads that another item answered."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure((INCHES[0], INCHES[1] * len(results)), layout="constrained")
    colours = colormaps["tab20"].colors  # type: ignore[attr-defined]  # of a listed map
    for number, result in enumerate(results):
        axes = figure.add_subplot(len(results), 1, number + 1)
        policies = list(dict.fromkeys(outcome.policy for outcome in result.outcomes))
        looks = zip(itertools.cycle(colours), itertools.cycle(MARKERS))
        for policy, (colour, marker) in zip(policies, looks, strict=False):
            outcomes = [outcome for outcome in result.outcomes if outcome.policy == policy]
            outcomes.sort(key=lambda outcome: outcome.capacity_bytes)
            shares = [100 * outcome.capacity_share for outcome in outcomes]
            hits = [100 * outcome.hit_ratio for outcome in outcomes]
            axes.plot(shares, hits, color=colour, marker=marker, markersize=4, label=policy)
            if any(outcome.substituted for outcome in outcomes):
                answered = [
                    hit + 100 * outcome.substituted_ratio
                    for hit, outcome in zip(hits, outcomes, strict=True)
                ]
                axes.plot(shares, answered, color=colour, linestyle="--", linewidth=1)
        title = printable(f"{os.path.basename(result.name)}: {result.trace.source}")
        axes.set_title(title.replace("$", r"\$"), fontsize=8)  # no formula
        axes.set_xlabel("cache, % of the bytes of all items")
        axes.set_ylabel("hits, % of reads (dashed: + substituted)")
        axes.set_ylim(0, 101)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=DOTS_PER_INCH)
