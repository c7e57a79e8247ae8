"""`fusecache top`: what all mounts and jobs of a host do now, from two looks at them.

A rate is null where it is not known: at the first look, and where a server has begun anew between
the two, so that its counters did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from fusecache.base.command import printable
from fusecache.base.metrics import figure
from fusecache.base.units import format_bytes, format_duration
from fusecache.observe import asking
from fusecache.observe.asking import Answer, Host, Status, maps
from fusecache.observe.summary import hit_share, troubles

NONE: Final = "-"
MOUNT_TITLES: Final = (
    *("mount", "READs/s", "SSD", "origin", "served/s"),
    *("fetched/s", "calls/s", "queued"),
)
JOB_TITLES: Final = ("job", "state", "epoch", "done", "samples/s", "in RAM", "late", "ends in")
_WRAPPED: Final = ("mount", "job")

Figures = dict[str, Any]


@dataclass(frozen=True)
class Look:
    """What a host said at a moment."""

    host: Host
    at_s: float


def look(ask: Callable[[], Host] = asking.look) -> Look:
    """Now."""
    return Look(ask(), time.monotonic())


def figures(before: Look | None, now: Look) -> Figures:
    """For machines. Rates are of a second, shares 0 … 1, `eta_s` seconds until a job has read all
    its epochs (`epoch_eta_s`: this one).
    """
    passed_s = None if before is None else now.at_s - before.at_s
    earlier = {} if before is None else {one.mountpoint: one for one in before.host.mounts}
    jobs_before = {} if before is None else _jobs(before.host)
    return {
        "interval_s": passed_s,
        "mounts": [
            _mount(earlier.get(one.mountpoint), one, passed_s)
            for one in now.host.mounts
            if one.state != "private"
        ],
        "jobs": [_job(jobs_before.get(key), job) for key, job in _jobs(now.host).items()],
    }


def screen(found: Figures) -> RenderableType:
    """For people, in 80 columns."""
    if not found["mounts"]:
        return "no mounts"
    up = [one for one in found["mounts"] if one["state"] == "up"]
    down = [one for one in found["mounts"] if one["state"] != "up"]
    parts: list[RenderableType] = [_table(MOUNT_TITLES, [_mount_row(one) for one in up])]
    for one in down:
        line = f"{one['mountpoint']}: {one['state'].upper()}: {one['fault']}; {one['heal']}"
        parts.append(printable(line))
    for one in up:
        parts += [printable(f"{one['mountpoint']}: {line}") for line in one["troubles"]]
    if found["jobs"]:
        parts += ["", _table(JOB_TITLES, [_job_row(one) for one in found["jobs"]])]
    return Group(*parts)


# ---- figures -------------------------------------------------------------------------------------


def _jobs(host: Host) -> dict[tuple[str, str], Status]:
    """By hintsd and name."""
    return {
        (path, str(job.get("name"))): job
        for path, status in host.hintsds.items()
        for job in maps((status or {}).get("jobs"))
    }


def _mount(before: Answer | None, now: Answer, passed_s: float | None) -> Figures:
    old, new = before.status if before else {}, now.status
    is_same = bool(old) and old.get("server_pid") == new.get("server_pid")

    def grown(path: str) -> float | None:
        return _grown(figure(old, path), figure(new, path)) if is_same else None

    def rate(growth: float | None) -> float | None:
        return growth / passed_s if growth is not None and passed_s else None

    growth = {name: grown(f"reads.{name}") or 0 for name in ("from_ssd", "from_origin")}
    share = hit_share(growth)
    old_reads, new_reads = (_reads_of_origin(status) for status in (old, new))
    return {
        "mountpoint": now.mountpoint,
        "state": now.state,
        "fault": now.fault,
        "heal": now.heal,
        "troubles": troubles(now) if new else [],
        "reads_per_s": rate(grown("reads.requests")),
        "ssd_share": share,
        "origin_share": None if share is None else 1 - share,
        "served_bytes_per_s": rate(grown("reads.bytes_served")),
        "origin_bytes_per_s": rate(grown("origin.bytes")),
        "origin_requests_per_s": rate(_grown(old_reads, new_reads) if is_same else None),
        "queued_stage": figure(new, "prefetch.queued_stage"),
        "queued_fetch": figure(new, "prefetch.queued_fetch"),
    }


def _reads_of_origin(status: Status) -> Any:
    counts = figure(status, "origin.read_s.counts")
    return sum(counts) if isinstance(counts, list) else None


def _grown(old: Any, new: Any) -> float | None:
    """None: it is not known, or began anew."""
    is_known = isinstance(old, (int, float)) and isinstance(new, (int, float))
    return new - old if is_known and new >= old else None


def _job(before: Status | None, now: Status) -> Figures:
    late = _grown(_late(before or {}), _late(now))
    not_late = _grown((before or {}).get("not_late"), now.get("not_late"))
    reads = None if late is None or not_late is None else late + not_late
    late_share = late / reads if late is not None and reads else None
    epoch_eta_s, eta_s = _eta_s(now)
    kept = ("name", "mountpoint", "state", "epoch", "epochs", "index", "samples", "samples_per_s")
    return {
        **{key: now.get(key) for key in kept},
        "late_share": late_share,
        "ram_share": None if late_share is None else 1 - late_share,
        "epoch_eta_s": epoch_eta_s,
        "eta_s": eta_s,
    }


def _late(job: Status) -> int | None:
    late = job.get("late")
    return sum(late.values()) if isinstance(late, dict) else None


def _eta_s(job: Status) -> tuple[float | None, float | None]:
    """Of its epoch, and of all; None: it cannot be told."""
    rate, samples, index = job.get("samples_per_s"), job.get("samples"), job.get("index")
    if not rate or samples is None or index is None:
        return None, None
    epoch_s = max(0, samples - index) / rate
    epoch, epochs = job.get("epoch"), job.get("epochs")
    if epoch is None or epochs is None:
        return epoch_s, None
    return epoch_s, epoch_s + max(0, epochs - epoch - 1) * samples / rate


# ---- rows ----------------------------------------------------------------------------------------


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        is_text = title in ("mount", "job", "state")
        table.add_column(
            title,
            justify="left" if is_text else "right",
            overflow="fold",
            no_wrap=title not in _WRAPPED,
        )
    for row in rows:
        table.add_row(*row)
    return table


def _mount_row(one: Figures) -> tuple[str, ...]:
    queued = [one["queued_stage"], one["queued_fetch"]]
    return (
        printable(one["mountpoint"]),
        _number(one["reads_per_s"]),
        _share(one["ssd_share"]),
        _share(one["origin_share"]),
        _bytes(one["served_bytes_per_s"]),
        _bytes(one["origin_bytes_per_s"]),
        _number(one["origin_requests_per_s"]),
        NONE if None in queued else " + ".join(f"{count:,}" for count in queued),
    )


def _job_row(one: Figures) -> tuple[str, ...]:
    epochs = "" if one["epochs"] is None else f" of {one['epochs']:,}"
    samples, index = one["samples"], one["index"]
    # The two largest units do.
    eta_s = one["epoch_eta_s"] if one["eta_s"] is None else one["eta_s"]
    ends_in = NONE if eta_s is None else " ".join(format_duration(eta_s).split()[:4])
    return (
        printable(one["name"]),
        printable(one["state"] or NONE),
        NONE if one["epoch"] is None else f"{one['epoch']:,}{epochs}",
        _share(index / samples if samples and index is not None else None),
        _number(one["samples_per_s"]),
        _share(one["ram_share"]),
        _share(one["late_share"]),
        ends_in,
    )


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return NONE if value is None else f"{value:.0%}"


def _bytes(value: float | None) -> str:
    return NONE if value is None else format_bytes(value)
