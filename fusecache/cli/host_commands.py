"""`fusecache metrics`, `top`, `doctor`: what an operator asks of all mounts of a host."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

import click

from fusecache.base.errors import UserError

_PORT_MOST: Final = 65535


@click.command()
@click.option("--listen", metavar="HOST:PORT", help="Serve them there, until SIGTERM.")
@click.option(
    "--textfile",
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
