"""The settings of three published figures, replayed: what the paper reports beside what is reached
here (docs/LAB.md says why they differ).

The papers train ResNet-18 and others on the 50,000 images of CIFAR-10; here a small network learns
1,500 digits, with several seeds where a paper averages over several networks. Reported are the
figures that the papers' texts give; curves that are only drawn are not guessed at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Final

from rich.console import Group, RenderableType

from hintsd.lab.grid import Capacity, replay_all
from hintsd.lab.images import Images, digits
from hintsd.lab.sampler import Repeating, make
from hintsd.lab.shuffle import lru_hit_ratio
from hintsd.lab.tables import percents, table
from hintsd.lab.training import Recording, record

EPOCHS: Final = 30
SEEDS: Final = 3
QUICK_EPOCHS: Final = 8
QUICK_SEEDS: Final = 1


@dataclass(frozen=True, slots=True)
class Row:
    """A policy over the reads of a sampler.

    repeating: of the sampler `shade`. reported: the paper's hit ratios, by cache share;
    reported_times: its hit ratio at the smallest share, over that of the first row.
    """

    label: str
    sampler: str
    policy: str
    repeating: Repeating | None = None
    reported: dict[float, float] = field(default_factory=dict)
    reported_times: float | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    title: str
    shares: tuple[float, ...]
    """Of the items, that the cache holds."""
    rows: tuple[Row, ...]
    """The first is the baseline: LRU over uniform shuffles."""
    peer: str | None = None
    """A row of the importance-sampled reads that others are set against, too."""


# SHADE 6.2: Figure 7, 10 % of the working set cached: SHADE 4.5 times the hits of the baseline,
# sh_app 2.67 times, the others "around 1.94".
_OTHERS: Final = 1.94

SETTINGS: Final[dict[str, Setting]] = {
    "shade-7": Setting(
        "SHADE, Figure 7: hit ratios by cache size (CIFAR-10; mean of three networks)",
        (0.10, 0.25, 0.50, 0.75),
        (
            Row("LRU, random order (baseline)", "uniform", "lru", reported_times=1.0),
            Row("MIN, random order", "uniform", "belady"),
            Row("sh_rand", "coarse", "random", reported_times=_OTHERS),
            Row("sh_lru", "coarse", "lru", reported_times=_OTHERS),
            Row("sh_lfu", "coarse", "lfu", reported_times=_OTHERS),
            Row("sh_pq", "coarse", "sh_pq", reported_times=_OTHERS),
            Row("sh_pqlfu", "coarse", "sh_pqlfu", reported_times=_OTHERS),
            Row("sh_app", "coarse", "shade", reported_times=2.67),
            Row("SHADE, draw only", "shade", "shade"),
            Row("SHADE, repeating while it learns", "shade", "shade", Repeating.LEARNING),
            Row(
                "SHADE, always repeating",
                "shade",
                "shade",
                Repeating.ALWAYS,
                reported_times=4.5,
            ),
            Row("MIN, order of SHADE's draw", "shade", "belady"),
        ),
        peer="sh_lru",
    ),
    "shade-12": Setting(
        "SHADE, Figure 12: hit ratios at 20 % (CIFAR-10, ResNet-18)",
        (0.20,),
        (
            Row("LRU, random order", "uniform", "lru"),
            Row("CoorDL (MinIO)", "loss", "minio", reported={0.2: 0.20}),
            Row("Quiver", "loss", "quiver", reported={0.2: 0.20}),
            Row("SHADE, draw only", "shade", "shade"),
            Row("SHADE, repeating while it learns", "shade", "shade", Repeating.LEARNING),
            Row(
                "SHADE, always repeating",
                "shade",
                "shade",
                Repeating.ALWAYS,
                reported={0.2: 0.725},
            ),
        ),
    ),
    "icache-16": Setting(
        "iCACHE, Figure 16: hit ratios by cache size (CIFAR-10, ResNet-18)",
        (0.20, 0.40, 0.60, 0.80),
        (
            Row(
                "LRU, random order (Default)",
                "uniform",
                "lru",
                reported={0.2: 0.02, 0.4: 0.09, 0.6: 0.23, 0.8: 0.48},
            ),
            Row("LRU, iCACHE's reads", "icache", "lru"),
            Row("LFU, iCACHE's reads (iLFU)", "icache", "lfu"),
            Row("MinIO, iCACHE's reads", "icache", "minio"),
            Row(
                "iCACHE",
                "icache",
                "icache",
                reported={0.2: 0.37, 0.4: 0.55, 0.6: 0.69, 0.8: 0.83},
            ),
            Row("MIN, iCACHE's reads", "icache", "belady"),
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """Means over the seeds, of the epochs after the first."""

    hit_ratio: float
    substituted_ratio: float
    accuracy: float
    """Of the network on the images that are held out, at the end."""


@dataclass(frozen=True, slots=True)
class Comparison:
    setting: Setting
    epochs: int
    seeds: tuple[int, ...]
    cells: tuple[dict[float, Cell], ...]
    """By cache share, one a row of the setting."""

    def times(self, row: int, base: int = 0) -> float | None:
        """The hits of a row over those of another, at the smallest cache; None: that has none."""
        share = self.setting.shares[0]
        divisor = self.cells[base][share].hit_ratio
        return self.cells[row][share].hit_ratio / divisor if divisor else None


def compare(
    name: str,
    *,
    seed: int = 0,
    quick: bool = False,
    on_cell: Callable[[], object] = lambda: None,
) -> Comparison:
    """Trains and replays. KeyError: no such setting. on_cell: called `cells(name, quick)` times."""
    setting = SETTINGS[name]
    epochs = QUICK_EPOCHS if quick else EPOCHS
    seeds = tuple(range(seed, seed + (QUICK_SEEDS if quick else SEEDS)))
    images = digits()
    found: list[dict[float, list[Cell]]] = [
        {share: [] for share in setting.shares} for _ in setting.rows
    ]
    for each in seeds:
        recordings: dict[tuple[str, Repeating | None, float | None], Recording] = {}
        for row, by_share in zip(setting.rows, found, strict=True):
            for share in setting.shares:
                key = (row.sampler, row.repeating, share if row.repeating else None)
                if key not in recordings:
                    recordings[key] = _trained(images, *key, epochs=epochs, seed=each)
                by_share[share].append(_replayed(recordings[key], row, share, each))
                on_cell()
    means = tuple({share: _mean(cells) for share, cells in row.items()} for row in found)
    return Comparison(setting, epochs, seeds, means)


def _replayed(recording: Recording, row: Row, share: float, seed: int) -> Cell:
    (outcome,) = replay_all(
        recording.trace,
        [row.policy],
        [Capacity(share=share)],
        name=row.sampler,
        warm_up_epochs=1,
        seed=seed,
    )
    return Cell(outcome.hit_ratio, outcome.substituted_ratio, recording.accuracies[-1])


def _mean(cells: Sequence[Cell]) -> Cell:
    return Cell(
        hit_ratio=fmean(cell.hit_ratio for cell in cells),
        substituted_ratio=fmean(cell.substituted_ratio for cell in cells),
        accuracy=fmean(cell.accuracy for cell in cells),
    )


def cells(name: str, quick: bool) -> int:
    setting = SETTINGS[name]
    return len(setting.rows) * len(setting.shares) * (QUICK_SEEDS if quick else SEEDS)


def _trained(
    images: Images,
    sampler: str,
    repeating: Repeating | None,
    share: float | None,
    *,
    epochs: int,
    seed: int,
) -> Recording:
    cached_bytes = 0 if share is None else Capacity(share=share).of(images.total_bytes, images.name)
    chosen = make(sampler, images, seed, repeating=repeating, cached_bytes=cached_bytes)
    return record(images, chosen, epochs=epochs, seed=seed)


def tables(comparison: Comparison) -> RenderableType:
    """Rows down, cache sizes across; what the paper reports beside each figure that it gives."""
    setting = comparison.setting
    columns = [_labels(setting)]
    for share in setting.shares:
        columns.append([f"{share:.0%}", *(_hits(row[share]) for row in comparison.cells)])
        reported = [row.reported.get(share) for row in setting.rows]
        if any(reported):
            columns.append(
                ["paper", *(f"{100 * ratio:.4g}" if ratio else "" for ratio in reported)]
            )
    if any(row.reported_times for row in setting.rows):
        columns += _times(comparison, 0, "LRU")
    if setting.peer is not None:
        peer = [row.label for row in setting.rows].index(setting.peer)
        columns += _times(comparison, peer, setting.peer)
    accuracies = [min(cell.accuracy for cell in row.values()) for row in comparison.cells]
    columns.append(["right", *(f"{100 * accuracy:.1f}" for accuracy in accuracies)])
    titles, *rows = zip(*columns, strict=True)
    theory = ", ".join(f"{100 * lru_hit_ratio(share):.1f}" for share in setting.shares)
    seeds = len(comparison.seeds)
    return Group(
        setting.title,
        f"here: a small network on 1,500 digits, {comparison.epochs} epochs, mean of {seeds} "
        f"seed{'s' if seeds > 1 else ''}; hits in % of reads (+ answered by another item), without "
        "the first epoch;",
        "right: held-out images in % at the end, the least of the row",
        "",
        table(titles, rows),
        "",
        f"LRU over uniform shuffles, in theory: {theory}",
        "",
    )


def _labels(setting: Setting) -> list[str]:
    return ["", *(row.label for row in setting.rows)]


def _hits(cell: Cell) -> str:
    return percents(cell.hit_ratio, cell.substituted_ratio)


def _times(comparison: Comparison, base: int, name: str) -> list[list[str]]:
    """Two columns: hits over those of another row at the smallest cache, here and in the paper."""
    rows = comparison.setting.rows
    divisor = rows[base].reported_times
    times = [comparison.times(number, base) for number in range(len(rows))]
    here = ["-" if ratio is None else f"{ratio:.1f}" for ratio in times]
    paper = [
        f"{row.reported_times / divisor:.3g}" if row.reported_times and divisor else ""
        for row in rows
    ]
    return [[f"× {name} at {comparison.setting.shares[0]:.0%}", *here], ["paper", *paper]]


def as_json(name: str, comparison: Comparison) -> dict[str, Any]:
    """docs/LAB.md lists the keys."""
    setting = comparison.setting
    return {
        "name": name,
        "title": setting.title,
        "epochs": comparison.epochs,
        "seeds": list(comparison.seeds),
        "rows": [
            {
                "label": row.label,
                "sampler": row.sampler,
                "policy": row.policy,
                "repeating": row.repeating.value if row.repeating else None,
                "times_lru": comparison.times(number),
                "reported_times_lru": row.reported_times,
                "cells": [
                    {"cache_share": share}
                    | asdict(cell)
                    | {"reported_hit_ratio": row.reported.get(share)}
                    for share, cell in comparison.cells[number].items()
                ],
            }
            for number, row in enumerate(setting.rows)
        ],
    }
