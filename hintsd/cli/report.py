"""What people see of hintsd's `status` answer: tables of mounts, of jobs and of jobs that have
ended; one line a job.

Every figure may be missing (a mount that has not answered yet): then it is a dash.
"""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table

from fusecache.base import processes
from fusecache.base.command import printable
from fusecache.base.units import format_bytes, format_duration
from hintsd.daemon.figures import NONE, Values, count, epoch, layout, reads, reasons, total

MOUNT_TITLES: Final = ("mount", "hintsd", "RAM tier", "SSD tier", "origin", "depth", "queued")
JOB_TITLES: Final = (
    *("job", "state", "epoch", "sample", "window"),
    *("not late", "late", "unplanned", "stall"),
)
ENDED_TITLES: Final = (
    *("ended", "state", "when", "epoch", "sample"),
    *("not late", "late", "unplanned"),
)
# Columns of several words: these get narrower on a terminal that is too narrow for the table.
_WRAPPED: Final = ("mount", "hintsd", "RAM tier", "SSD tier", "sample", "when")

_FULL: Final = "THE DISK OF ITS CACHE IS FULL: the SSD tier gets no larger (fusecache status tells)"
_NEEDS_RAM: Final = (
    "the RAM tier takes less than its loader reads at once, so little can be read ahead: --ram "
    "{ram} would do (fusecache mount --help), or fewer workers"
)
_WITHHELD: Final = (
    "the kernel took files again and again that RAM alone held ({reclaimed} in all), so {withheld} "
    "of the RAM tier are left to it for now: give less --ram, or its cgroup more memory"
)
_EVICTED_SHARE: Final = 0.01
_EVICTED: Final = "late (evicted): the kernel let go of files in RAM before they were read: "
_SHORT: Final = (
    "programs leave {available} of memory for the {ram} of the RAM tier: give less --ram"
)
_NOT_SHORT: Final = (
    "not for want of memory: programs leave {available} for the {ram} of the RAM tier, so another "
    "--ram changes nothing; the host pages out what it believes cold (DAMON), or a cgroup of the "
    "readers is tight"
)


def tables(status: Values) -> RenderableType:
    """The whole answer."""
    up = format_duration(status["uptime_s"])
    parts: list[RenderableType] = [f"hintsd {status['version']}, process {status['pid']}, up {up}"]
    if status["mounts"]:
        parts += ["", _table(MOUNT_TITLES, [_mount(mount) for mount in status["mounts"]])]
        parts += [_log(mount) for mount in status["mounts"] if mount.get("log_segments")]
        parts += [_full(mount) for mount in status["mounts"] if mount.get("ssd_disk_full")]
        parts += _reasons("mountpoint", status["mounts"])
    if status["jobs"]:
        parts += ["", _table(JOB_TITLES, [_job(job) for job in status["jobs"]])]
        parts += _missed(status["jobs"])
        parts += _reasons("name", status["jobs"])
        parts += [printable(f"{job['name']}: {layout(job)}") for job in _laid_out(status["jobs"])]
        parts += [
            printable(f"{job['name']}: {_evicted(status['mounts'])}")
            for job in status["jobs"]
            if _loses(job)
        ]
        parts += [
            printable(f"{job['name']}: {_NEEDS_RAM.format(ram=format_bytes(needed))}")
            for job in status["jobs"]
            if (needed := job.get("ram_needed_bytes"))
        ]
        parts += [
            printable(f"{job['name']}: {_withheld(job)}")
            for job in status["jobs"]
            if job.get("withheld_bytes")
        ]
        parts += [printable(_hits(job)) for job in status["jobs"] if job.get("hits") is not None]
        parts += [printable(_cached(job)) for job in status["jobs"] if job.get("share_why")]
    else:
        parts.append("no jobs")
    if status["ended"]:
        parts += ["", _table(ENDED_TITLES, [_ended(job) for job in status["ended"]])]
        parts += _missed(status["ended"])
        parts += [printable(f"{job['name']}: {_why(job)}") for job in status["ended"]]
    return Group(*parts)


def job_line(job: Values) -> str:
    """Where a job is, or was when it ended, in one line."""
    parts = [f"{job.get('state', NONE)}: {reads(job)}"]
    if "why_ended" in job:
        parts.append(printable(job["why_ended"]))
    else:
        parts.append(f"predicted stall {_stall(job)}")
    if job.get("layout"):
        parts.append(printable(layout(job)))
    if job.get("reason"):
        parts.append(printable(job["reason"]))
    return ", ".join(parts)


def _loses(job: Values) -> bool:
    """Whether many of its reads found that what had been staged for them was gone."""
    evicted = (job.get("late") or {}).get("evicted", 0)
    return bool(evicted > _EVICTED_SHARE * (job.get("not_late") or 0))


def _hits(job: Values) -> str:
    """How much it spares the origin, and by which scores."""
    kept, age_s = _bytes(job, "kept_bytes"), job.get("scores_age_s")
    parts = [f"{job['name']}: hits {job['hits'] * 100:.0f}%, {kept} kept in RAM"]
    if age_s is not None:
        parts.append(f"scores told {format_duration(age_s)} ago")
    if job.get("h_list") is not None:
        parts.append(f"{count(job, 'h_list')} on the H-list")
    if job.get("substituted") is not None:
        parts.append(f"{count(job, 'substituted')} reads of the epoch substituted")
    return ", ".join(parts)


def _cached(job: Values) -> str:
    """What the cache has of its dataset, where there are others."""
    cached, share = _bytes(job, "cached_bytes"), _bytes(job, "share_bytes")
    return f"{job['name']}: its dataset has {cached} of the cache, of {share}: {job['share_why']}"


def _withheld(job: Values) -> str:
    withheld = format_bytes(job["withheld_bytes"])
    return _WITHHELD.format(reclaimed=count(job, "reclaimed"), withheld=withheld)


def _evicted(mounts: list[Values]) -> str:
    """The page cache counts as available, what it holds of the mounts, too: while they hold less
    than that, the kernel needs nothing of theirs.
    """
    available = processes.available_memory_bytes()
    ram = sum(mount.get("ram_bytes", 0) for mount in mounts)
    line = _SHORT if available < ram else _NOT_SHORT
    return _EVICTED + line.format(available=format_bytes(available), ram=format_bytes(ram))


def _laid_out(jobs: list[Values]) -> list[Values]:
    return [job for job in jobs if job.get("layout")]


def _log(mount: Values) -> str:
    written = _bytes(mount, "log_written_bytes")
    segments = count(mount, "log_segments")
    return printable(f"{mount['mountpoint']}: log of {segments} segments, {written} written")


def _full(mount: Values) -> str:
    return printable(f"{mount['mountpoint']}: {_FULL}")


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title not in _WRAPPED)
    for row in rows:
        table.add_row(*row)
    return table


def _reasons(name: str, rows: list[Values]) -> list[str]:
    return [printable(f"{row[name]}: {row['reason']}") for row in rows if row.get("reason")]


def _missed(jobs: list[Values]) -> list[str]:
    """Of which kinds their late and unplanned reads were; a line for each that has some."""
    kinds = ("late", "unplanned")
    found = (
        (job, [f"{kind}: {reasons(job, kind)}" for kind in kinds if job.get(kind)]) for job in jobs
    )
    return [printable(f"{job['name']}: {'; '.join(parts)}") for job, parts in found if parts]


def _mount(mount: Values) -> tuple[str, ...]:
    queued = [count(mount, "queued_stage"), count(mount, "queued_fetch")]
    return (
        printable(mount.get("mountpoint", NONE)),
        "connected" if mount.get("connected") else "NOT CONNECTED",
        _share(mount, "ram"),
        _share(mount, "ssd"),
        f"{_bytes(mount, 'origin_bytes_per_s')}/s",
        count(mount, "depth"),
        " + ".join(queued),
    )


def _job(job: Values) -> tuple[str, ...]:
    return (
        printable(job["name"]),
        printable(job.get("state", NONE)),
        epoch(job),
        _sample(job),
        _bytes(job, "window_bytes"),
        count(job, "not_late"),
        total(job, "late"),
        total(job, "unplanned"),
        _stall(job),
    )


def _ended(job: Values) -> tuple[str, ...]:
    return (
        printable(job["name"]),
        printable(job["state"]),
        f"{format_duration(job['ended_ago_s'])} ago",
        epoch(job),
        _sample(job),
        count(job, "not_late"),
        total(job, "late"),
        total(job, "unplanned"),
    )


def _why(job: Values) -> str:
    """Why it has ended."""
    return "; ".join(line for line in (job["why_ended"], job.get("reason")) if line)


def _sample(job: Values) -> str:
    return f"{count(job, 'index')} / {count(job, 'samples')}"


def _stall(job: Values) -> str:
    seconds = job.get("predicted_stall_s")
    return NONE if seconds is None else f"{seconds:.1f} s"


def _bytes(values: Values, name: str) -> str:
    value = values.get(name)
    return NONE if value is None else format_bytes(value)


def _share(mount: Values, tier: str) -> str:
    return f"{_bytes(mount, tier + '_bytes')} of {_bytes(mount, tier + '_limit_bytes')}"
