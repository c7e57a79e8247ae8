"""The command `hintsd simulate`.

INVARIANT: importing it is quick: numpy and matplotlib come when it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from fusecache.base import units
from fusecache.base.command import PATH
from fusecache.base.errors import ConfigError, UserError
from fusecache.base.terminal import show

if TYPE_CHECKING:
    from hintsd.simulator.system import Scenario

MIB = 1 << 20


def _sizes_mb(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[float, ...]:
    try:
        return tuple(units.parse_bytes(value) / MIB for value in values)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


@click.command()
@click.argument("scenarios", nargs=-1, type=PATH, metavar="[SCENARIO|FILE.toml]...")
@click.option("--list", "listed", is_flag=True, help="The built-in scenarios and the policies.")
@click.option("--toml", is_flag=True, help="The file of a built-in scenario, to change a copy.")
@click.option(
    "--policy", "policies", multiple=True, metavar="NAME", help="Again for another. [all]"
)
@click.option(
    "--workers", type=int, metavar="N", help="So many, each with as large a part of a batch."
)
@click.option("--published", is_flag=True, help="Beside the run times of HDMLP's authors.")
@click.option(
    "--what-if", "what_if", is_flag=True, help="Other sizes of RAM and SSD. [of the paper's system]"
)
@click.option(
    "--ram", callback=_sizes_mb, multiple=True, metavar="SIZE", help="What-if. [10G 20G 40G]"
)
@click.option(
    "--ssd",
    callback=_sizes_mb,
    multiple=True,
    metavar="SIZE",
    help="What-if. [20G 40G 80G]",
)
@click.option(
    "--accesses", is_flag=True, help="How unequally a worker reads. [N = 4, E = 1000, F = 10000]"
)
@click.option("--delta", type=float, help="Accesses: δ. [0.1]")
@click.option("--json", "as_json", is_flag=True, help="For machines (docs/SIMULATOR.md).")
@click.option("--plot", type=PATH, metavar="FILE", help="Save a picture: .png or .svg.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def simulate(
    scenarios: tuple[str, ...],
    listed: bool,
    toml: bool,
    policies: tuple[str, ...],
    workers: int | None,
    published: bool,
    what_if: bool,
    ram: tuple[float, ...],
    ssd: tuple[float, ...],
    accesses: bool,
    delta: float | None,
    as_json: bool,
    plot: str | None,
    seed: int,
) -> None:
    """Predict how long a training takes on a system, under each I/O policy (HDMLP's performance
    model; nothing is read).

    \b
    hintsd simulate --published                  the published scenarios, beside published times
    hintsd simulate imagenet-1k --policy fusecache --policy naive
    hintsd simulate imagenet-1k --toml > my.toml your own system and dataset: a copy, changed
    hintsd simulate my.toml --plot my.svg
    hintsd simulate imagenet-22k --workers 1024 --policy pool
    hintsd simulate --what-if --ram 64G --ssd 1T which hardware would help
    hintsd simulate --accesses                   why caching by access frequency pays

    \b
    run time  = start-up + compute + barrier + stall
    start-up  loading before training begins
    barrier   waiting at each batch for the worker that has most to compute
    stall     waiting for data
    staging   preprocessing and writing to the staging buffer, beside computing
    PFS s, …  fetching from there, beside computing; PFS GB: how much. Mean of the workers

    docs/SIMULATOR.md has the keys of a FILE.toml, and what each policy is taken to do.
    """
    from hintsd.simulator import catalogue, scenario
    from hintsd.simulator.figures import plot_file

    if sum((listed, toml, published, what_if, accesses)) > 1:
        raise click.UsageError(
            "--list, --toml, --published, --what-if and --accesses exclude each other"
        )
    if (ram or ssd) and not what_if:
        raise click.UsageError("--ram and --ssd go with --what-if")
    if workers is not None and (listed or toml or published):
        raise click.UsageError("--workers goes with none of --list, --toml and --published")
    if delta is not None and not accesses:
        raise click.UsageError("--delta goes with --accesses")
    if policies and accesses:
        raise click.UsageError("--accesses takes no policy")
    if any(size_mb == 0 for size_mb in (*ram, *ssd)):
        raise click.UsageError("--ram and --ssd must be above 0")
    for name in policies:
        if name not in catalogue.POLICIES:
            raise click.UsageError(f"no policy {name!r}; there are {', '.join(catalogue.POLICIES)}")
    if listed:
        _list(as_json)
        return
    if toml:
        if len(scenarios) != 1:
            raise click.UsageError("--toml takes one scenario")
        click.echo(scenario.text_of(scenarios[0]), nl=False)
        return
    if plot is not None:
        plot_file.check(plot)
    try:
        if what_if:
            _what_if(scenarios, policies, workers, ram, ssd, as_json, plot, seed)
        elif accesses:
            _accesses(scenarios, workers, 0.1 if delta is None else delta, as_json, plot, seed)
        else:
            _run_times(scenarios, policies, workers, published, as_json, plot, seed)
    except MemoryError:
        raise UserError("not enough memory for so many samples, batches and workers") from None


def _list(as_json: bool) -> None:
    from hintsd.simulator import catalogue, scenario
    from hintsd.simulator.figures import report

    built_in = [scenario.load(name) for name in scenario.BUILT_IN]
    if as_json:
        click.echo(
            json.dumps(
                {
                    "scenarios": {item.name: item.title for item in built_in},
                    "policies": {name: one.about for name, one in catalogue.POLICIES.items()},
                },
                indent=2,
            )
        )
        return
    show(report.scenarios(built_in), "", report.policies(catalogue.POLICIES))


def _run_times(
    names: Sequence[str],
    policies: Sequence[str],
    workers: int | None,
    published: bool,
    as_json: bool,
    plot: str | None,
    seed: int,
) -> None:
    from hintsd.simulator import catalogue
    from hintsd.simulator.figures import footprint, plots, report
    from hintsd.simulator.orders import Orders

    chosen = list(dict.fromkeys(policies)) or list(catalogue.POLICIES)
    loaded = _load(names or catalogue.PUBLISHED, workers)
    for scenario in loaded:
        footprint.check_run(scenario, chosen)
    found = []
    with _bar(len(loaded) * len(chosen)) as step:
        for scenario in loaded:
            orders = Orders(scenario.dataset, scenario.system.workers, seed)
            results = [
                catalogue.simulate(scenario, name, orders, step(f"{scenario.name} {name}"))
                for name in chosen
            ]
            found.append((scenario, results))
    if plot is not None:
        plots.run_times(plot, found)
    if as_json:
        flat = [result for _, results in found for result in results]
        click.echo(json.dumps({"seed": seed, "results": report.as_json(flat)}, indent=2))
        return
    for scenario, results in found:
        show(report.table(scenario, results, published), "")


def _what_if(
    names: Sequence[str],
    policies: Sequence[str],
    workers: int | None,
    ram_mb: Sequence[float],
    ssd_mb: Sequence[float],
    as_json: bool,
    plot: str | None,
    seed: int,
) -> None:
    from dataclasses import asdict

    from hintsd.simulator.figures import footprint, grid, plots, report

    if len(names) > 1 or len(policies) > 1:
        raise click.UsageError("--what-if takes one scenario and one policy")
    scenario = _load(names, workers)[0] if names else _scaled(grid.paper(), workers)
    policy = policies[0] if policies else "frequency"
    footprint.check_run(scenario, [policy])
    with _bar(1) as step:
        found = grid.explore(
            scenario, policy, ram_mb or grid.RAM_MB, ssd_mb or grid.SSD_MB, seed, step("what if")
        )
    if plot is not None:
        plots.grid(plot, found)
    if as_json:
        click.echo(json.dumps({"seed": seed, **asdict(found)}, indent=2))
    else:
        show(*(part for shown in report.grid(found) for part in (shown, "")))


def _accesses(
    names: Sequence[str],
    workers: int | None,
    delta: float,
    as_json: bool,
    plot: str | None,
    seed: int,
) -> None:
    from hintsd.simulator.accesses import analyse
    from hintsd.simulator.figures import footprint, plots, report

    if not 0 <= delta <= 1e6:
        raise ConfigError(f"--delta {delta:g}: must be between 0 and 1,000,000")
    if workers is not None and not names:
        raise click.UsageError("--accesses --workers takes a scenario")
    shapes = [(4, 1000, 10_000)]
    if names:
        loaded = _load(names, workers)
        for item in loaded:
            footprint.check_accesses(item)
        shapes = [
            (item.system.workers, item.dataset.epochs, item.dataset.samples) for item in loaded
        ]
    with _bar(len(shapes)) as step:
        found = [analyse(*shape, delta, seed, step("shuffles")) for shape in shapes]
    if plot is not None:
        plots.accesses(plot, found)
    if as_json:
        click.echo(json.dumps({"seed": seed, "accesses": report.accesses_json(found)}, indent=2))
    else:
        show(report.accesses(found))


def _load(names: Sequence[str], workers: int | None) -> list[Scenario]:
    from hintsd.simulator.scenario import load

    return [_scaled(load(name), workers) for name in dict.fromkeys(names)]


def _scaled(scenario: Scenario, workers: int | None) -> Scenario:
    return scenario if workers is None else scenario.with_workers(workers)


@contextmanager
def _bar(parts: int) -> Iterator[Callable[[str], Callable[[float], None]]]:
    """On stderr a bar, or, where that is no terminal, a line for each part. Called at the start of
    each of so many parts with its name, it answers what takes the share of that part that is done.
    """
    from rich.console import Console
    from rich.progress import Progress

    begun = 0
    with Progress(
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task("", total=parts)

        def step(name: str) -> Callable[[float], None]:
            nonlocal begun
            before, begun = begun, begun + 1
            if not sys.stderr.isatty():
                click.echo(f"hintsd: {begun} of {parts}: {name}", err=True)
            progress.update(task, description=name, completed=before)

            def done(share: float) -> None:
                progress.update(task, completed=before + share)

            return done

        yield step
