"""What people see of hintsd's `status` answer: a table of mounts, a table of jobs, one line a job.

Every figure may be missing (a mount that has not answered yet): then it is a dash.
"""

from __future__ import annotations

from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from fusecache.units import format_bytes

Values = dict[str, Any]

NONE: Final = "-"
MOUNT_TITLES: Final = ("mount", "hintsd", "RAM tier", "SSD tier", "origin", "depth", "queued")
JOB_TITLES: Final = (
    *("job", "state", "epoch", "sample", "window"),
    *("hits", "late", "unplanned", "stall"),
)


def printable(value: object) -> str:
    """Text that any terminal takes, of what may hold the bytes of a file name."""
    return str(value).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def tables(status: Values) -> RenderableType:
    """The whole answer."""
    head = f"hintsd {status['version']}, process {status['pid']}, up {duration(status['uptime_s'])}"
    parts: list[RenderableType] = [head]
    if status["mounts"]:
        parts += ["", _table(MOUNT_TITLES, [_mount(mount) for mount in status["mounts"]])]
        parts += _reasons("mountpoint", status["mounts"])
    if status["jobs"]:
        parts += ["", _table(JOB_TITLES, [_job(job) for job in status["jobs"]])]
        parts += _reasons("name", status["jobs"])
    else:
        parts.append("no jobs")
    return Group(*parts)


def job_line(job: Values) -> str:
    """Where a job is, in one line."""
    sample = f"{_count(job, 'index')} of {_count(job, 'samples')}"
    parts = [
        f"{job.get('state', NONE)}: epoch {_epoch(job)}, sample {sample}",
        f"{_count(job, 'hits')} hits",
        f"{_misses(job, 'late')} late",
        f"{_misses(job, 'unplanned')} unplanned",
        f"predicted stall {_stall(job)}",
    ]
    if job.get("reason"):
        parts.append(printable(job["reason"]))
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """1 h 2 min 3 s"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _reasons(name: str, rows: list[Values]) -> list[str]:
    return [printable(f"{row[name]}: {row['reason']}") for row in rows if row.get("reason")]


def _mount(mount: Values) -> tuple[str, ...]:
    queued = [_count(mount, "queued_stage"), _count(mount, "queued_fetch")]
    return (
        printable(mount.get("mountpoint", NONE)),
        "connected" if mount.get("connected") else "NOT CONNECTED",
        _share(mount, "ram"),
        _share(mount, "ssd"),
        f"{_bytes(mount, 'origin_bytes_per_s')}/s",
        _count(mount, "depth"),
        " + ".join(queued),
    )


def _job(job: Values) -> tuple[str, ...]:
    return (
        printable(job["name"]),
        printable(job.get("state", NONE)),
        _epoch(job),
        f"{_count(job, 'index')} / {_count(job, 'samples')}",
        _bytes(job, "window_bytes"),
        _count(job, "hits"),
        _misses(job, "late"),
        _misses(job, "unplanned"),
        _stall(job),
    )


def _epoch(job: Values) -> str:
    epochs = job.get("epochs")
    return _count(job, "epoch") + (f" of {epochs:,}" if epochs is not None else "")


def _misses(job: Values, kind: str) -> str:
    reasons: dict[str, int] = job.get(kind) or {}
    names = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
    return f"{sum(reasons.values()):,}" + (f" ({names})" if names else "")


def _stall(job: Values) -> str:
    seconds = job.get("predicted_stall_s")
    return NONE if seconds is None else f"{seconds:.1f} s"


def _count(values: Values, name: str) -> str:
    value = values.get(name)
    return NONE if value is None else f"{value:,}"


def _bytes(values: Values, name: str) -> str:
    value = values.get(name)
    return NONE if value is None else format_bytes(value)


def _share(mount: Values, tier: str) -> str:
    return f"{_bytes(mount, tier + '_bytes')} of {_bytes(mount, tier + '_limit_bytes')}"
