"""tools/cluster: epochs that several hosts read, or hosts to try things on.

INVARIANT: all is gone at the end, also after a failure, Ctrl-C or SIGTERM.
"""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from fusecache.base import command, terminal
from fusecache.base.errors import UserError
from tools.cluster_lib import dataset, remains
from tools.cluster_lib.cluster import Cluster
from tools.cluster_lib.reader import ORDERS
from tools.cluster_lib.running import Epoch, Readers, Reading
from tools.interrupts import end_on_signals
from tools.latency_origin import HOSTS_MOST

PROGRAM = "tools/cluster"
_MBIT = click.FloatRange(0, 100_000)
_FAILURES = (OSError, RuntimeError, ValueError, subprocess.SubprocessError)


def _cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--hosts", type=click.IntRange(1, HOSTS_MOST), default=4),
        click.option("--link-mbit", type=_MBIT, default=400.0, help="Of each host, each way."),
        click.option("--origin-mbit", type=_MBIT, default=100.0, help="Of all hosts together."),
        click.option(
            "--origin-latency-ms", type=click.FloatRange(0, 10_000), default=0.0, help="Of a call."
        ),
        click.option("--ram", default="64M", help="Of each mount."),
        click.option("--ssd", default="1G", help="Of each mount."),
        click.option("--pool/--no-pool", default=True, help="Hosts share what they have."),
        click.option("--peers", is_flag=True, help="By asking each other, instead of engines."),
        click.option("--tls/--no-tls", default=False, help="Between hosts."),
        click.option("--hints", is_flag=True, help="A hintsd on each host, which readers tell."),
        click.option(
            "--engine-mb", type=click.IntRange(1), default=256, help="Of each engine, in MiB."
        ),
        click.option(
            "--data",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            help="The dataset, in place of one that is made.",
        ),
        click.option("--files", type=click.IntRange(1), default=2000, help="Of the dataset."),
        click.option("--file-kb", type=click.IntRange(1), default=110, help="Of each file."),
        click.option("--seed", default=0, help="Of files and orders."),
        click.option(
            "--work-dir",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            default="/var/tmp",
            help="Files, caches and logs go below it, until the end.",
        ),
        click.argument("mount_options", nargs=-1, type=click.UNPROCESSED),
    )
    for option in reversed(options):
        function = option(function)
    return function


class Setting:
    """What the options ask for."""

    def __init__(self, options: dict[str, Any], *, has_mounts: bool = True) -> None:
        """click.UsageError: options do not go together."""
        self._options = options
        self.has_mounts = has_mounts
        self.has_pool: bool = options["pool"] and has_mounts
        self.has_hints: bool = options["hints"]
        if self.has_hints and not has_mounts:
            raise click.UsageError("--hints needs mounts")
        if options["tls"] and not self.has_pool:
            raise click.UsageError("--tls needs a pool")
        if options["peers"] and not self.has_pool:
            raise click.UsageError("--peers are a pool")

    def cluster(self) -> Cluster:
        given = self._options
        return Cluster(
            given["data"].resolve() if given["data"] else None,
            hosts=given["hosts"],
            link_mbit=given["link_mbit"],
            origin_mbit=given["origin_mbit"],
            origin_latency_s=given["origin_latency_ms"] / 1000,
            has_engines=self.has_pool,
            has_peers=given["peers"],
            engine_bytes=given["engine_mb"] << 20,
            has_tls=given["tls"],
            work_dir=given["work_dir"],
        )

    def dataset(self, cluster: Cluster) -> dataset.Dataset:
        given = self._options
        if given["data"]:
            return dataset.of(cluster.data)
        return dataset.make(cluster.data, given["files"], given["file_kb"] * 1000, given["seed"])

    def mount(self, cluster: Cluster) -> None:
        """On all hosts, if wanted."""
        given = self._options
        if not self.has_mounts:
            return
        if self.has_hints:
            cluster.start_hintsd()
        pool = cluster.pool_options() if self.has_pool else ()
        cluster.mount("--ram", given["ram"], "--ssd", given["ssd"], *pool, *given["mount_options"])


@click.group(
    invoke_without_command=True,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.option("--remove", is_flag=True, help="Take away what killed runs have left.")
@click.pass_context
def main(context: click.Context, remove: bool) -> None:
    """Several hosts on this machine: links with a limit, an engine and a mount each, one slow
    origin whose bytes are counted.
    """
    if remove and context.invoked_subcommand is not None:
        raise click.UsageError("--remove goes alone")
    if not remove and context.invoked_subcommand is None:
        raise click.UsageError("run, shell or --remove is wanted")
    if os.geteuid() != 0:
        raise UserError("network namespaces need root")
    end_on_signals()
    if remove:
        _remove()


def _remove() -> None:
    found = remains.of_dead_owners()
    for record in found:
        remains.remove(record)
        command.say(f"removed {record.name}")
    if not found:
        command.say("nothing was left")


@main.command()
@_cluster_options
@click.option("--epochs", type=click.IntRange(1), default=3)
@click.option(
    "--order",
    type=click.Choice(ORDERS),
    default=ORDERS[0],
    help="distributed: hosts share each epoch; all: each reads all of it, in its own order.",
)
@click.option("--threads", type=click.IntRange(1, 256), default=4, help="Of each reader.")
@click.option("--no-mount", is_flag=True, help="Read the origin itself: the ground of comparison.")
@command.json_flag
def run(
    epochs: int, order: str, threads: int, no_mount: bool, as_json: bool, **options: Any
) -> None:
    """A reader on each host; a table of what each epoch took.

    Behind -- stand further options of `fusecache mount`. Bytes of the origin do not pass the hosts'
    links. Processor time is of the mounts (with their keepers), the engines, hintsd and the readers
    of all hosts, not of the origin. With --hints some bytes of an epoch are fetched in the one
    before it.
    """
    setting = Setting(options, has_mounts=not no_mount)
    with setting.cluster() as cluster:
        made = setting.dataset(cluster)
        setting.mount(cluster)
        hinted = epochs if setting.has_hints else 0
        reading = Reading(order, options["seed"], threads, is_direct=no_mount, hinted=hinted)
        with Readers(cluster, made, reading) as readers:
            done = [readers.read(epoch) for epoch in range(epochs)]
        pools = [host.status()["pool"] for host in cluster.hosts] if setting.has_pool else []
    if as_json:
        told = {"files": len(made.names), "bytes": made.bytes, "order": order, "pools": pools}
        command.say_json(told | {"epochs": [asdict(epoch) for epoch in done]})
        return
    terminal.show(_table(done, made))
    if pools:
        counted = ("leases", "waits", "written", "failures", "damaged", "skipped")
        sums = ", ".join(f"{sum(pool[name] for pool in pools):,} {name}" for name in counted)
        command.say(f"pool: {sums}")


def _table(epochs: list[Epoch], made: dataset.Dataset) -> Table:
    title = f"{len(made.names):,} files, {made.bytes / 1e6:.1f} MB"
    table = Table(title=title, title_justify="left", box=None)
    columns = ("epoch", "s", "origin MB", "datasets", "files", "links MB", "most of a host")
    for column in (*columns, "CPU s: mounts", "engines", "hintsd", "readers"):
        table.add_column(column, justify="right")
    for number, epoch in enumerate(epochs):
        table.add_row(str(number + 1), *_figures([epoch], made))
    table.add_row("all", *_figures(epochs, made))
    return table


def _figures(epochs: list[Epoch], made: dataset.Dataset) -> list[str]:
    origin = sum(sum(epoch.origin_bytes) for epoch in epochs)
    each = zip(*(epoch.link_received for epoch in epochs), strict=True)
    received = [sum(of_host) for of_host in each]
    roles = ("mount", "engine", "hintsd", "reader")
    computed = [sum(epoch.processor_s[role] for epoch in epochs) for role in roles]
    return [
        f"{sum(epoch.seconds for epoch in epochs):.2f}",
        f"{origin / 1e6:.1f}",
        f"{origin / made.bytes:.3f}",
        f"{sum(sum(epoch.origin_files) for epoch in epochs):,}",
        f"{sum(received) / 1e6:.1f}",
        f"{max(received) / 1e6:.1f}",
        *(f"{seconds:.2f}" for seconds in computed),
    ]


@main.command()
@_cluster_options
def shell(**options: Any) -> None:
    """Start all, say how to enter each host, and wait for Ctrl-C."""
    setting = Setting(options)
    with setting.cluster() as cluster:
        setting.dataset(cluster)
        setting.mount(cluster)
        with contextlib.suppress(KeyboardInterrupt):
            _say_how_to_enter(cluster)
            if setting.has_pool:
                command.say(f"mounted with: {shlex.join(cluster.pool_options())}")
            command.say("ready: Ctrl-C ends it, and takes all away")
            while True:
                signal.pause()


def _say_how_to_enter(cluster: Cluster) -> None:
    for host in cluster.hosts:
        command.say(f"host {host.number}: {host.address}, its mount {host.mountpoint}")
        command.say(f"  its log {host.log}, its origin {host.origin}")
        command.say(f"  enter it: {shlex.join(host.enter)} bash")


def _run() -> object:
    try:
        return main(prog_name=PROGRAM, standalone_mode=False)
    except (click.Abort, BrokenPipeError):
        raise
    except _FAILURES as error:
        raise UserError(str(error)) from None


if __name__ == "__main__":
    command.run(PROGRAM, _run)
