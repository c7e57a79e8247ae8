"""`fusecache metrics`, `top`, `doctor`: what an operator asks of all mounts of a host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Final

import click

from fusecache.base import command, mounts
from fusecache.base.command import PATH
from fusecache.base.errors import EXIT_FAILED, EXIT_NOT_A_MOUNT, UserError
from fusecache.observe import rates
from fusecache.observe.asking import look

_PORT_MOST: Final = 65535


@click.command()
@click.option("--once", is_flag=True, help="Show one interval, and end.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, metavar="SECONDS"
)
@click.option("--json", "as_json", is_flag=True, help="For machines: one interval.")
def top(once: bool, interval: float, as_json: bool) -> None:
    """Show what all mounts of this machine and their jobs do now. Ctrl-C ends it.

    \b
    fusecache top
    fusecache top --json --interval 10 | jq '.mounts[0].origin_bytes_per_s'

    \b
    READs/s    that reached the mount: not those that the page cache answered
    SSD        of them, the share that was answered from there; origin: from there
    served/s   bytes to readers, or into the page cache
    fetched/s  bytes read at the origin, by readers, hints and `warm`; calls/s: reads that this took
    queued     files to be put into RAM + files to be put on SSD
    done       of the epoch's samples
    in RAM     samples that were there when they were read; late: that were not yet
    ends in    all epochs, at this rate; this one, where their number is not known

    What is no terminal gets one interval.
    """
    before = rates.look()
    if once or as_json or not sys.stdout.isatty():
        time.sleep(interval)
        found = rates.figures(before, rates.look())
        command.say_json(found) if as_json else command.show(rates.screen(found))
        return
    with contextlib.suppress(KeyboardInterrupt), command.display(command.show) as show:
        show(rates.screen(rates.figures(None, before)))
        while True:
            time.sleep(interval)
            now = rates.look()
            show(rates.screen(rates.figures(before, now)))
            before = now


@click.command()
@click.argument("path", required=False, type=PATH)
@command.json_flag
def doctor(path: str | None, as_json: bool) -> None:
    """Look for what is in the way: of this machine, and of the mount at PATH, or of all mounts.

    \b
    fusecache doctor
    fusecache doctor /data/imagenet                    a mount, or a directory to be mounted

    Kernel, /dev/fuse, libfuse, torch, and who pages memory out; of a mount its open mode, faults,
    memory limits, hintsd, the disks of its cache, its origin and the origin's clock. Nothing is
    written. Exit code: 0, or 1 if a problem was found; a warning is none.
    """
    from fusecache.observe import findings

    if path is not None and mounts.find(path) is None and not os.path.isdir(path):
        raise UserError(f"{path} is no directory", EXIT_NOT_A_MOUNT)
    host = look()
    mount = None if path is None else mounts.find(path)
    found = list(findings.of_host())
    if path is not None and mount is None:
        found += findings.of_directory(path)
    for one in host.mounts:
        if path is None or (mount is not None and one.target.mount.device == mount.device):
            found += findings.of_mount(one, host)
    if as_json:
        command.say_json(findings.as_json(found))
    else:
        command.console().print(findings.report(found))
    if any(one.level == "problem" for one in found):
        sys.exit(EXIT_FAILED)


@click.command()
@click.option("--listen", metavar="HOST:PORT", help="Serve them there, until SIGTERM.")
@click.option(
    "--textfile",
    type=PATH,
    metavar="DIR",
    help="Write DIR/fusecache.prom, whole or not at all, for node_exporter, and end.",
)
def metrics(listen: str | None, textfile: str | None) -> None:
    """Export the figures of all mounts of this host, and of hintsd, for Prometheus.

    \b
    fusecache metrics                                  once, on stdout, as OpenMetrics
    fusecache metrics --listen 127.0.0.1:9460          http://127.0.0.1:9460/metrics
    fusecache metrics --textfile /var/lib/prometheus/node-exporter

    Of the mounts that you may ask: as root of all. One that is dead, or does not answer within 3 s,
    is fusecache_up 0, and holds up no other. docs/OPERATING.md has the names, a dashboard and
    alerts.
    """
    if listen is not None and textfile is not None:
        raise click.UsageError("--listen or --textfile, not both")
    place = None if listen is None else _place(listen)
    from fusecache.observe import exposition

    found = exposition.registry()
    if place is not None:
        _serve(*place, found)
    elif textfile is not None:
        try:
            exposition.write(found, textfile)
        except OSError as error:
            raise UserError(f"--textfile {textfile}: {error.strerror}") from None
    else:
        sys.stdout.write(exposition.text(found))


def _place(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > _PORT_MOST:
        raise click.UsageError(f"--listen {listen}: give HOST:PORT, such as 127.0.0.1:9460")
    return host, int(port)


def _serve(host: str, port: int, found: object) -> None:
    from prometheus_client import CollectorRegistry, start_http_server

    assert isinstance(found, CollectorRegistry)
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # in the threads to come, too
    try:
        server, _ = start_http_server(port, host, found)
    except OSError as error:
        raise UserError(f"--listen {host}:{port}: {error.strerror or error}") from None
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"serving http://{shown}:{server.server_port}/metrics", err=True)
    signal.sigwait(ends)
    server.shutdown()
    os._exit(0)  # a scrape that is under way is not waited for
