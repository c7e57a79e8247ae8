"""The command `hintsd lab`: records access traces, replays them, and sets what policies reach here
beside what their papers report.

INVARIANT: importing it is quick: numpy, torch and matplotlib come with the commands that need them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console, RenderableType

from fusecache.base import command, units
from fusecache.base.command import PATH, Commands
from fusecache.base.errors import ConfigError, UserError
from fusecache.base.terminal import show

if TYPE_CHECKING:
    from fusecache.traces.traces import Trace
    from hintsd.lab.papers import Comparison
    from hintsd.lab.tables import Result

SHARES: Final = "5%,10%,20%,30%,40%,50%,60%,70%,80%,90%"
PAPERS: Final = ("shade-7", "shade-12", "icache-16")
SAMPLERS: Final = ("uniform", "coarse", "loss", "shade", "icache")
GENERATED_ITEMS: Final = 20_000
SHUFFLED_ITEMS: Final = 100_000
GENERATED_MOST: Final = 2_000_000
READS_MOST: Final = 500_000_000
BYTES_MOST: Final = 1 << 62
SEED_MOST: Final = (1 << 63) - 1
MISSES_SHARE_MOST: Final = 0.1  # of a recording: replays of more are not what was read
TEXT_COLUMNS: Final = 200

_seed = click.option("--seed", type=click.IntRange(0, SEED_MOST), default=0, show_default=True)
_as_json = click.option("--json", "as_json", is_flag=True, help="For machines (docs/LAB.md).")


def _size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        size_bytes = units.parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    if size_bytes == 0:
        raise click.BadParameter("it must be more than 0", ctx, param)
    return size_bytes


class _OverPolicies(click.Command):
    """Its help ends with the names of the policies, which are not there without numpy."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from hintsd.policies.catalogue import CATALOGUE

        formatter.write_paragraph()
        formatter.write_text(f"Policies: {', '.join(CATALOGUE)}")


@click.group(cls=Commands)
def lab() -> None:
    """Hit ratios: access traces through every caching policy.

    \b
    hintsd lab record digits --sampler shade -o shade.trace
    hintsd lab replay shade.trace --cache 10%,20%,50% --plot shade.svg
    hintsd lab paper icache-16
    hintsd lab all -o results

    `fusecache trace` records one from a mount. docs/LAB.md explains the figures.
    """


# ---- record --------------------------------------------------------------------------------------


@lab.command()
@click.argument("what", type=click.Choice(["digits", "generated", "shuffle"]))
@click.option("-o", "--output", required=True, type=PATH, metavar="FILE", help="The trace.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option(
    "--sampler",
    type=click.Choice(SAMPLERS),
    help="What a training reads next. [uniform]",
)
@click.option("--epochs", type=click.IntRange(1), default=30, show_default=True, metavar="N")
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Of a training. [32]")
@click.option(
    "--items",
    type=click.IntRange(1),
    metavar="N",
    help=f"generated: [{GENERATED_ITEMS:,}], shuffle: [{SHUFFLED_ITEMS:,}]",
)
@click.option(
    "--item-bytes",
    callback=_size,
    metavar="SIZE",
    help="shuffle: of each item. [100K]",
)
@click.option(
    "--cache",
    metavar="SHARE",
    help="shade: repeat what a SHADE cache of this share of the items holds (PADS).",
)
@_seed
def record(
    what: str,
    output: str,
    force: bool,
    sampler: str | None,
    epochs: int,
    batch_size: int | None,
    items: int | None,
    item_bytes: int | None,
    cache: str | None,
    seed: int,
) -> None:
    """Record the reads of a training, or of plain shuffles.

    \b
    digits     a small network learns 1,500 of scikit-learn's digits; seconds
    generated  the same with N images made from the seed, of different sizes
    shuffle    no training: the orders of torch's RandomSampler over N items

    \b
    Samplers, for what a training reads in an epoch:
    uniform    every item once
    coarse     drawn by the mean loss of the batch that an item was in last (SHADE 6.2)
    loss       drawn by the item's own last loss
    shade      drawn by the rank of its loss within the batch (SHADE, PADS)
    icache     a part of the items, each once, those of high loss preferred (iCACHE's IIS)
    """
    from fusecache.traces import traces

    if what == "shuffle" and (sampler is not None or batch_size is not None):
        raise click.UsageError("--sampler and --batch-size are for trainings, not for shuffle")
    if what == "digits" and items is not None:
        raise click.UsageError("--items is for generated and shuffle: the digits are 1,500")
    if what != "shuffle" and item_bytes is not None:
        raise click.UsageError("--item-bytes is for shuffle")
    if cache is not None and sampler != "shade":
        raise click.UsageError("--cache is for --sampler shade")
    if not force and os.path.lexists(output):
        raise UserError(f"{output} exists; --force replaces it")
    if not os.path.isdir(os.path.dirname(output) or "."):
        raise ConfigError(f"--output {output}: there is no such folder")
    if what == "shuffle":
        from hintsd.lab.shuffle import ITEM_BYTES, shuffled

        items = SHUFFLED_ITEMS if items is None else items
        _bounded(items * epochs, READS_MOST, "reads: --items times --epochs")
        item_bytes = ITEM_BYTES if item_bytes is None else item_bytes
        _bounded(items * epochs * item_bytes, BYTES_MOST, "bytes read: --item-bytes")
        made = shuffled(items, epochs, seed, item_bytes)
    else:
        items = GENERATED_ITEMS if items is None else items
        _bounded(items, GENERATED_MOST, "images: --items")
        made = _train(what, sampler or "uniform", epochs, batch_size, items, cache, seed)
    traces.write(output, made)
    click.echo(
        f"{output}: {len(made.items):,} reads of {len(made.sizes):,} items, "
        f"{units.format_bytes(os.path.getsize(output))}"
    )


def _bounded(count: int, most: int, what: str) -> None:
    """ConfigError: it would not fit into memory."""
    if count > most:
        raise ConfigError(f"{count:,} {what}; at most {most:,}")


def _train(
    what: str,
    sampler: str,
    epochs: int,
    batch_size: int | None,
    items: int,
    cache: str | None,
    seed: int,
) -> Trace:
    from hintsd.lab import images, training
    from hintsd.lab.grid import parse_capacity
    from hintsd.lab.sampler import Repeating, make

    pictures = images.digits() if what == "digits" else images.generated(items, seed)
    if cache is None:
        chosen = make(sampler, pictures, seed)
    else:
        cached_bytes = parse_capacity(cache).of(pictures.total_bytes, what)
        chosen = make(
            sampler, pictures, seed, repeating=Repeating.ALWAYS, cached_bytes=cached_bytes
        )
    with _progress("epochs", epochs) as advance:
        recording = training.record(
            pictures,
            chosen,
            epochs=epochs,
            seed=seed,
            batch_size=batch_size or training.BATCH_SIZE,
            on_epoch=lambda _: advance(),
        )
    first, last = recording.accuracies[0], recording.accuracies[-1]
    click.echo(f"held-out images right: {first:.1%} after epoch 0, {last:.1%} after {epochs - 1}")
    return recording.trace


# ---- replay --------------------------------------------------------------------------------------


@lab.command(cls=_OverPolicies)
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="TRACE...")
@click.option("--policy", "policies", multiple=True, metavar="P", help="Repeatable. [all]")
@click.option(
    "--cache",
    "caches",
    default=SHARES,
    metavar="C,...",
    help="Shares of the bytes of all items (20%) or sizes (64GiB). [5% to 90%]",
)
@click.option(
    "--measure",
    "measures",
    type=click.Choice(["hits", "bytes", "origin", "evictions"]),
    multiple=True,
    help="What to tabulate; repeatable. [hits]",
)
@click.option(
    "--warm-up",
    type=click.IntRange(0),
    metavar="N",
    help="Epochs at the beginning that are not counted. [1 if there are more]",
)
@click.option(
    "--epoch-reads",
    type=click.IntRange(1),
    metavar="N",
    help="An epoch begins every N reads: for traces that know no epochs, as those of a mount.",
)
@click.option("--plot", type=PATH, metavar="FILE", help="Hit ratio over cache size: .png or .svg.")
@_seed
@_as_json
def replay(
    files: tuple[str, ...],
    policies: tuple[str, ...],
    caches: str,
    measures: tuple[str, ...],
    warm_up: int | None,
    epoch_reads: int | None,
    plot: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Replay traces through the policies.

    A read that a policy answers with another item (iCACHE and Quiver substitute) is no hit; it is
    counted apart: "31.2 + 20.4" are 31.2 % hits and 20.4 % answered by another item. Belady and
    frequency are told the whole trace before it begins.

    \b
    hintsd lab replay a.trace b.trace
    hintsd lab replay a.trace --policy lru --policy shade --cache 10%,20% --measure origin
    """
    from hintsd.lab import plots
    from hintsd.lab.grid import parse_capacity, parse_policies
    from hintsd.lab.tables import as_json as to_json
    from hintsd.lab.tables import tables
    from hintsd.simulator.figures import plot_file

    names = parse_policies(policies)
    capacities = [parse_capacity(text) for text in caches.split(",")]
    if plot is not None:
        plot_file.check(plot)
    read = {name: _read(name, epoch_reads) for name in files}
    results = replayed(read, names, capacities, warm_up, seed)
    if as_json:
        click.echo(json.dumps(to_json(results, seed), indent=2))
    else:
        for result in results:
            show(tables(result, list(dict.fromkeys(measures)) or ["hits"]))
    if plot is not None:
        plots.hit_ratios(plot, results)


def _read(name: str, epoch_reads: int | None) -> Trace:
    import numpy as np

    from fusecache.traces import traces

    try:
        trace = traces.read(name)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    untold = np.mean(trace.readers >= 0) if trace.readers is not None and len(trace.items) else 1.0
    if trace.source.endswith(traces.MISSES_ONLY) and untold > MISSES_SHARE_MOST:
        command.complain(
            "hintsd",
            f"warning: {name} holds what reached the mount, not all that was read: "
            "fusecache trace --every-open records that",
        )
    if epoch_reads is None:
        return trace
    if len(trace.epoch_starts) > 1:
        raise ConfigError(f"{name} knows its {len(trace.epoch_starts)} epochs: no --epoch-reads")
    return replace(trace, epoch_starts=np.arange(0, max(1, len(trace.items)), epoch_reads))


def replayed(
    named: dict[str, Trace],
    policies: Sequence[str],
    capacities: Sequence[Any],
    warm_up: int | None,
    seed: int,
) -> list[Result]:
    """With a progress bar over all of them."""
    from hintsd.lab.grid import replay_all
    from hintsd.lab.tables import Result

    cells = len(named) * len(policies) * len(capacities)
    results = []
    with _progress("replays", cells) as advance:
        for name, trace in named.items():
            epochs = min(1, len(trace.epoch_starts) - 1) if warm_up is None else warm_up
            outcomes = replay_all(
                trace,
                policies,
                capacities,
                name=name,
                warm_up_epochs=epochs,
                seed=seed,
                on_outcome=lambda _: advance(),
            )
            results.append(Result(name, trace, epochs, outcomes))
    return results


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal; one step for each call of what it yields."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


# ---- paper, all ----------------------------------------------------------------------------------


@lab.command()
@click.argument("names", nargs=-1, type=click.Choice(PAPERS), metavar="[FIGURE]...")
@click.option("--quick", is_flag=True, help="Few epochs, one seed: seconds, and rougher.")
@_seed
@_as_json
def paper(names: tuple[str, ...], quick: bool, seed: int, as_json: bool) -> None:
    """What papers report beside what is reached here: shade-7, shade-12, icache-16. [all]

    Trains and replays; docs/LAB.md says why the figures differ.
    """
    from hintsd.lab import papers

    names = tuple(dict.fromkeys(names)) or PAPERS
    compared = _compared(names, quick, seed)
    if as_json:
        made = [papers.as_json(name, each) for name, each in compared.items()]
        click.echo(json.dumps({"figures": made}, indent=2))
        return
    for comparison in compared.values():
        show(papers.tables(comparison))


def _compared(names: Sequence[str], quick: bool, seed: int) -> dict[str, Comparison]:
    from hintsd.lab import papers

    with _progress("replays", sum(papers.cells(name, quick) for name in names)) as advance:
        return {
            name: papers.compare(name, seed=seed, quick=quick, on_cell=advance) for name in names
        }


@lab.command(name="all")
@click.option(
    "-o", "--output", required=True, type=PATH, metavar="DIR", help="Made if it is not there."
)
@click.option("--quick", is_flag=True, help="Small traces, few epochs: seconds, and rougher.")
@_seed
def everything(output: str, quick: bool, seed: int) -> None:
    """Make every table and plot of docs/LAB.md: minutes.

    \b
    DIR/*.trace              recorded trainings and shuffles
    DIR/replay.{txt,json,svg}  all of them through every policy
    DIR/papers.{txt,json}      the published figures
    """
    from hintsd.lab import papers, plots, recipes
    from hintsd.lab.grid import parse_capacity, parse_policies
    from hintsd.lab.tables import MEASURES, tables
    from hintsd.lab.tables import as_json as to_json
    from hintsd.simulator.figures import plot_file

    plot = os.path.join(output, "replay.svg")
    try:
        os.makedirs(output, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"--output {output} is no folder") from None
    plot_file.check(plot)
    with _progress("traces", len(recipes.QUICK if quick else recipes.FULL)) as advance:
        made = recipes.record_all(output, quick=quick, seed=seed, on_trace=advance)
    capacities = [parse_capacity(text) for text in SHARES.split(",")]
    results = replayed(made, parse_policies([]), capacities, None, seed)
    compared = _compared(PAPERS, quick, seed)
    plots.hit_ratios(plot, results)
    _save_json(output, "replay.json", to_json(results, seed))
    _save_text(output, "replay.txt", [tables(result, list(MEASURES)) for result in results])
    figures = [papers.as_json(name, each) for name, each in compared.items()]
    _save_json(output, "papers.json", {"figures": figures})
    _save_text(output, "papers.txt", [papers.tables(each) for each in compared.values()])
    click.echo(f"{output}: {', '.join(sorted(os.listdir(output)))}")


def _save_json(folder: str, name: str, value: dict[str, Any]) -> None:
    with open(os.path.join(folder, name), "w") as file:
        json.dump(value, file, indent=2)
        file.write("\n")


def _save_text(folder: str, name: str, shown: Sequence[RenderableType]) -> None:
    with open(os.path.join(folder, name), "w") as file:
        Console(file=file, width=TEXT_COLUMNS, highlight=False, markup=False).print(*shown)
