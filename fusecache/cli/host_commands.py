"""`fusecache metrics`, `top`, `doctor`, `pool`: what an operator asks of all mounts of a host, and
of the hosts of a pool.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click
from rich.table import Table

from fusecache.base import command, mounts, terminal
from fusecache.base.command import PATH, Commands
from fusecache.base.errors import EXIT_FAILED, EXIT_NOT_A_MOUNT, ConfigError, UserError
from fusecache.base.units import format_bytes
from fusecache.config.building import credentials_of, pool_of
from fusecache.config.options import parse_setting
from fusecache.config.settings import Config
from fusecache.control import control_client
from fusecache.observe import rates
from fusecache.observe.asking import look
from fusecache.pool.address import Credentials, PoolAddress, parse_address

if TYPE_CHECKING:
    from fusecache.pool.engine import Engine

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
        command.say_json(found) if as_json else terminal.show(rates.screen(found))
        return
    with contextlib.suppress(KeyboardInterrupt), terminal.display(terminal.show) as show:
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
        terminal.console().print(findings.report(found))
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


# ---- pool ----------------------------------------------------------------------------------------


@click.group(cls=Commands)
def pool() -> None:
    """What hosts share that mount with --pool.

    \b
    fusecache pool status /data/imagenet
    """


def _flag(name: str, help_: str, **more: Any) -> Callable[..., Any]:
    return click.option(name, default=None, help=help_, **more)


@pool.command()
@click.argument("place_or_url", metavar="URL|MOUNTPOINT")
@_flag("--pool-ca", "Whose certificates to trust.", type=PATH, metavar="FILE")
@_flag("--pool-cert", "This host's certificate.", type=PATH, metavar="FILE")
@_flag("--pool-key", "Its private key.", type=PATH, metavar="FILE")
@_flag("--pool-user", "User of the pool's ACL.", metavar="NAME")
@_flag("--pool-password-file", "Its password, in a file.", type=PATH, metavar="FILE")
@_flag("--pool-insecure", "Allow a pool without TLS.", is_flag=True)
@command.json_flag
def status(place_or_url: str, as_json: bool, **flags: Any) -> None:
    """Servers and members of a pool. The exit code is 1 where a server does not answer.

    A member is a mount that has written what it did in the last 15 seconds.

    \b
    fusecache pool status /data/imagenet          the pool of that mount
    cd /etc/fusecache/pool && fusecache pool status valkeys://pool-1,pool-2/imagenet \\
        --pool-ca ca.pem --pool-cert host.pem --pool-key host.key \\
        --pool-user imagenet --pool-password-file imagenet.password
    """
    address, credentials = _named(place_or_url, flags)
    try:
        credentials.open_all()
        password = credentials.password()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    from fusecache.pool.engine import Engine  # 0.1 s, for this command alone

    with Engine(address, credentials, password) as engine:
        found = _look(engine, address)
    command.say_json(found) if as_json else _show(found)
    away = [server for server in found["servers"] if server["fault"]]
    for server in away:
        command.complain("fusecache", f"pool: {server['fault']}")
    if found["fault"]:
        command.complain("fusecache", f"pool: {found['fault']}")
    if away or found["fault"]:
        raise SystemExit(EXIT_FAILED)


def _named(place: str, flags: dict[str, Any]) -> tuple[PoolAddress, Credentials]:
    if "://" not in place:
        for name, value in flags.items():
            if value is not None:
                raise ConfigError(f"--{name.replace('_', '-')}: only with a URL")
        return _of_mount(place)
    given = {
        name: parse_setting(name, value, f"--{name.replace('_', '-')}")[1]
        for name, value in flags.items()
        if value is not None
    }
    credentials = credentials_of(given)
    try:
        address = parse_address(place)
        credentials.check(address, bool(given.get("pool_insecure")))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return address, credentials


def _of_mount(place: str) -> tuple[PoolAddress, Credentials]:
    target = control_client.find(place)
    info = control_client.ask_keeper(target, {"op": "info"})["info"]
    found = pool_of(Config.from_json(json.dumps(info["config"])))
    if found is None:
        raise UserError(f"{target.mountpoint} is in no pool: fusecache mount … --pool URL")
    return found


def _look(engine: Engine, address: PoolAddress) -> dict[str, Any]:
    """All of it; what does not answer has a `fault`."""
    from fusecache.pool.engine import Unreachable
    from fusecache.pool.slots import NO_SERVER, place
    from fusecache.pool.view import agreed

    names, slots, is_cluster, fault = list(address.servers), b"", False, ""
    for server in () if address.has_peers else address.servers:
        try:
            cluster = engine.cluster(server)
        except Unreachable:
            continue
        if cluster is not None:
            is_cluster, (names, slots) = True, cluster
        break
    rows: dict[str, dict[str, Any]] = {}
    for host, port in names:
        row: dict[str, Any] = {"server": f"{host}:{port}", "fault": ""}
        try:
            row |= engine.figures((host, port))
        except Unreachable as error:
            row["fault"] = str(error)
        rows[row["server"]] = row
    members: dict[str, dict[str, Any]] = {}
    try:
        if is_cluster:
            index = slots[engine.members_slot]
            at = names[index] if index != NO_SERVER else None
        else:
            first = next((n for n in engine.members_at(rows) if not rows[n]["fault"]), None)
            at = names[list(rows).index(first)] if first is not None else None
        if at is None:
            raise Unreachable("no server that has them answers")
        members = engine.members(at)
    except Unreachable as error:
        fault = f"the members are not known: {error}"
    named = {name: str(member.get("servers")) for name, member in members.items()}
    if len(set(named.values())) > 1:
        odd = "; ".join(f"{name}: {servers}" for name, servers in sorted(named.items()))
        fault = f"members name different servers, and do not share what they read: {odd}"
    if not is_cluster:
        without = agreed([member.get("without") or [] for member in members.values()], rows)
        slots = place(list(rows), without)
    for index, row in enumerate(rows.values()):
        row["slots"] = slots.count(index)
    return {
        "dataset": address.dataset,
        "is_cluster": is_cluster,
        "has_peers": address.has_peers,
        "servers": list(rows.values()),
        "members": members,
        "fault": fault,
    }


def _show(found: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False)
    more = (
        ("asked for", "on SSD", "read for others") if found["has_peers"] else ("policy", "evicted")
    )
    for name in ("server", "slots", "used", "limit", *more):
        table.add_column(name, justify="left" if name in ("server", "policy") else "right")
    for server in found["servers"]:
        if server["fault"]:
            table.add_row(server["server"], f"{server['slots']:,}", "", "", server["fault"])
            continue
        if found["has_peers"]:
            figures = [f"{server[name] or 0:,}" for name in ("requests", "hits", "fetched")]
        else:
            figures = [str(server["policy"]), f"{server['evicted'] or 0:,}"]
        table.add_row(
            server["server"],
            f"{server['slots']:,}",
            format_bytes(server["used_bytes"] or 0),
            format_bytes(server["limit_bytes"]) if server["limit_bytes"] else "none",
            *figures,
        )
    members = Table(box=None, pad_edge=False)
    for name in ("member", "from the pool", "from the origin", "written", "failures", "swept"):
        members.add_column(name, justify="left" if name == "member" else "right")
    for name, member in sorted(found["members"].items()):
        members.add_row(
            name,
            format_bytes(member.get("bytes", 0)),
            format_bytes(member.get("origin_bytes", 0)),
            format_bytes(member.get("bytes_written", 0)),
            f"{member.get('failures', 0):,}",
            f"{member.get('swept', 0):,}",
        )
    terminal.show(table, "", members)
