"""`fusecache status` without a path: each mount of a host in a line or two."""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from fusecache.base.command import printable
from fusecache.base.metrics import figure
from fusecache.base.units import format_bytes, format_count, format_share
from fusecache.observe.asking import Answer, Host, Status, log_of, maps


def as_json(host: Host) -> list[dict[str, Any]]:
    """For machines."""
    return [
        {
            "mountpoint": one.mountpoint,
            "source": one.target.mount.source,
            "uid": one.target.mount.uid,
            "state": one.state,
            "fault": one.fault,
            "heal": one.heal,
            "log": log_of(one.target),
            "jobs": host.jobs(one.mountpoint),
            "status": one.status or None,
        }
        for one in host.mounts
    ]


def table(host: Host) -> Table:
    """For people."""
    found = Table(show_header=False, box=None, pad_edge=False)
    found.add_column(style="bold", overflow="fold")
    found.add_column(overflow="fold")
    for one in host.mounts:
        first, *more = _lines(one, host)
        found.add_row(printable(one.mountpoint), printable(first))
        for line in more:
            found.add_row("", printable(line))
    return found


def hit_share(reads: Status) -> float | None:
    """Of READs that reached the mount, those that this host could answer; None: none did."""
    from_ssd, from_origin = reads.get("from_ssd", 0), reads.get("from_origin", 0)
    return from_ssd / (from_ssd + from_origin) if from_ssd + from_origin else None


def on_ssd(dataset: Any) -> str:
    """Of a mount's dataset, which its status describes; "": it has no files that are known."""
    size_bytes = figure(dataset, "bytes")
    if not size_bytes:
        return ""
    known = "" if figure(dataset, "is_whole") else " that are known"
    return f"cached {format_share(figure(dataset, 'on_ssd_bytes') or 0, size_bytes)}{known}"


def troubles(one: Answer) -> list[str]:
    """What is wrong with a mount that answers, a line each."""
    status = one.status
    out = [part for part in figure(status, "ssd.directories") or [] if part.get("why_out")]
    found = []
    if figure(status, "origin.available") is False:
        error = figure(status, "origin.last_error") or "it does not answer"
        found.append(f"THE ORIGIN IS AWAY: {error}; cached files are served")
    if status.get("keeper_alive") is False:
        found.append("THE KEEPER IS GONE: umount and mount again at the next occasion")
    if figure(status, "ssd.full_disk_bytes") is not None:
        found.append("THE DISK OF THE CACHE IS FULL: the SSD tier gets no larger")
    return found + [f"OUT OF SERVICE: {part['path']}: {part['why_out']}" for part in out]


def servers_away(pool: Any) -> list[tuple[Status, str]]:
    """Servers of a mount's pool that it does without now, and why. `pool`: what its status says."""
    return [
        (server, server.get("why") or figure(pool, "fault") or "no address")
        for server in maps(figure(pool, "servers"))
        if server.get("is_left_alone") or not server.get("has_address")
    ]


def _lines(one: Answer, host: Host) -> Iterator[str]:
    if one.state == "private":
        yield f"another user's ({_user(one.target.mount.uid)}), and shows you nothing"
    elif one.state == "up":
        yield _tiers(one.status, len(host.jobs(one.mountpoint)))
        yield from troubles(one)
    else:
        yield f"{'DEAD' if one.state == 'dead' else 'SILENT'}: {one.fault}"
        yield f"to heal it: {one.heal}"
        if log := log_of(one.target):
            yield f"log file: {log}"


def _tiers(status: Status, jobs: int) -> str:
    parts = [f"RAM {_of(status['ram'])}", f"SSD {_of(status['ssd'])}"]
    if cached := on_ssd(status.get("dataset")):
        parts.append(cached)
    hits = hit_share(status["reads"])
    parts.append("no READs yet" if hits is None else f"{hits:.0%} of READs hit")
    if jobs:
        parts.append(f"{format_count(jobs, 'job')} with hints")
    return ", ".join(parts)


def _of(part: Status) -> str:
    used, limit = part["bytes"], part["limit_bytes"]
    share = f" ({used / limit:.0%})" if limit else ""
    return f"{format_bytes(used)} of {format_bytes(limit)}{share}"


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
