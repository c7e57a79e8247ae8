"""`fusecache doctor`: what of host, mounts, origins and cache disks is in fusecache's way.

INVARIANT: nothing is written. What may hang (an origin, a disk) is asked in a child, which has
WAIT_S; other users' mounts are believed in what they say, and their paths are not looked at.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, Final, Literal

from rich.console import Group, RenderableType
from rich.table import Table

from fusecache.base import mounts, processes
from fusecache.base.command import printable
from fusecache.base.disk import probe
from fusecache.base.errors import UserError
from fusecache.base.metrics import figure
from fusecache.base.units import format_bytes, format_count, format_duration
from fusecache.config.places import check_fuse
from fusecache.control import hintsd_client
from fusecache.observe.asking import Answer, Host, maps
from fusecache.observe.summary import servers_away, troubles

Level = Literal["ok", "warning", "problem"]

WAIT_S: Final = 5.0
SKEW_S: Final = 2.0
"""As far as clocks may differ (docs/LIMITS.md, The origin)."""
ENTRIES_MOST: Final = 1000
LIBFUSE_LEAST: Final = (3, 10)
TORCH_LEAST: Final = (2, 1)
MEMORY: Final = ("tmpfs", "ramfs")
NETWORK: Final = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "9p", "afs", "gpfs")
_MADE_UP: Final = ("exfat", "msdos", "vfat")
_DAMON: Final = "/sys/module/damon_reclaim/parameters/enabled"
# In a process of its own: the command line imports nothing that serves.
_ASK_LIBFUSE: Final = """
import ctypes, pyfuse3
paths = [line.split()[-1] for line in open("/proc/self/maps") if "libfuse3" in line]
library = ctypes.CDLL(paths[0])
library.fuse_pkgversion.restype = ctypes.c_char_p
print(library.fuse_pkgversion().decode())
"""


@dataclass(frozen=True)
class Finding:
    """`about`: what was looked at; `mount`: of which mount, "": of the host; `do`: what helps."""

    level: Level
    about: str
    says: str
    do: str = ""
    mount: str = ""


def of_host() -> Iterator[Finding]:
    """What holds for all mounts."""
    yield kernel(os.uname().release)
    yield _device()
    yield libfuse(*_libfuse_version())
    yield torch(_version_of("torch"))
    yield paging(_text_of(_DAMON))


def of_mount(one: Answer, host: Host) -> Iterator[Finding]:
    """What holds for this one."""
    place = one.mountpoint
    if one.state == "private":
        yield Finding("ok", "server", "another user's, and shows you nothing", mount=place)
        return
    if one.state != "up":
        yield Finding("problem", "server", f"{one.state}: {one.fault}", one.heal, place)
        return
    status = one.status
    yield from (Finding("problem", "mount", line, mount=place) for line in troubles(one))
    yield _mode(status, place)
    yield _faults(status, place)
    yield memory(
        figure(status, "ram.limit_bytes") or 0,
        processes.cgroup_limit_bytes(int(status.get("server_pid", 0))),
        processes.available_memory_bytes(),
        place,
    )
    yield reclaimed(figure(status, "prefetch.reclaimed_files") or 0, place)
    yield _hints(one, host)
    if status.get("pool"):
        yield pool(status["pool"], place)
    if figure(status, "service.socket"):
        yield service(status["service"], place)
    if one.target.mount.uid == os.getuid():
        for part in figure(status, "ssd.directories") or []:
            if not part.get("why_out"):
                yield disk(str(part["path"]), status["ssd"], place)
        yield origin(one.target.mount.source, place)
        yield clock(place, place)


def of_directory(path: str) -> Iterator[Finding]:
    """What holds for a directory that may be mounted."""
    yield origin(path, "")
    yield clock(path, "")


def as_json(found: list[Finding]) -> list[dict[str, Any]]:
    """For machines."""
    return [
        {"level": one.level, "mount": one.mount, "about": one.about, "says": one.says, "do": one.do}
        for one in found
    ]


def report(found: list[Finding]) -> RenderableType:
    """For people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    place = ""
    for one in found:
        if one.mount != place:
            place = one.mount
            table.add_row("", "", "")
            table.add_row("", "mount", printable(place))
        level = one.level if one.level == "ok" else one.level.upper()
        table.add_row(level, one.about, printable(one.says))
        if one.do:
            table.add_row("", "", printable(f"do: {one.do}"))
    levels = [one.level for one in found]
    problems, warnings = levels.count("problem"), levels.count("warning")
    total = f"{format_count(problems, 'problem')}, {format_count(warnings, 'warning')}"
    return Group(table, "", total)


# ---- the host ------------------------------------------------------------------------------------


def kernel(release: str) -> Finding:
    """`release`: as uname(2) has it."""
    version = numbers(release)
    says = f"Linux {release}"
    if version < (5, 6):
        return Finding("problem", "kernel", f"{says}: too old", "use Linux 5.6 or later")
    if version < (6, 9):
        says += ": readers may hang when a mount's server dies"
        return Finding("warning", "kernel", says, "use Linux 6.9 or later")
    return Finding("ok", "kernel", says)


def libfuse(version: str, fault: str) -> Finding:
    """`version`: of the libfuse that pyfuse3 is bound to; `fault`: why it is not known."""
    if fault:
        do = "install libfuse 3 with its headers, then: pip install --force-reinstall pyfuse3"
        return Finding("problem", "libfuse", f"pyfuse3 cannot be loaded: {fault}", do)
    if numbers(version) < LIBFUSE_LEAST:
        return Finding("problem", "libfuse", f"{version}: too old", "install libfuse 3.10 or later")
    return Finding("ok", "libfuse", version)


def torch(version: str | None) -> Finding:
    """`version`: None: it is not installed."""
    if version is None:
        says = "not installed here: hints of a WeightedRandomSampler are not taken, nor the longest"
        return Finding("ok", "torch", says)
    if numbers(version) < TORCH_LEAST:
        return Finding(
            "warning", "torch", f"{version}: too old for weighted hints", "install torch 2.1"
        )
    return Finding("ok", "torch", version)


def paging(damon: str) -> Finding:
    """`damon`: whether DAMON_RECLAIM is on, as the kernel says."""
    if damon.strip() != "Y":
        return Finding("ok", "paging", "DAMON_RECLAIM is off")
    says = "the kernel pages out what it believes cold (DAMON_RECLAIM): staged files, too"
    return Finding("warning", "paging", says, f"echo N > {_DAMON}")


def _device() -> Finding:
    try:
        check_fuse(allow_other=False)
    except UserError as error:
        says, _, do = str(error).partition(": ")
        return Finding("problem", "/dev/fuse", says, do)
    return Finding("ok", "/dev/fuse", "can be opened")


def _libfuse_version() -> tuple[str, str]:
    """And why it is not known."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_LIBFUSE],
            capture_output=True, text=True, timeout=30, check=False, cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode == 0:
        return done.stdout.strip(), ""
    return "", (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def numbers(version: str) -> tuple[int, int]:
    """The first two of "6.18.0-rc1"."""
    first, second, *_ = [*re.findall(r"\d+", version), "0", "0"]
    return int(first), int(second)


# ---- a mount -------------------------------------------------------------------------------------


def memory(ram_bytes: int, limit_bytes: int | None, available_bytes: int, place: str) -> Finding:
    """`limit_bytes`: of the cgroup of the mount's server; None: it has none."""
    says = f"--ram {format_bytes(ram_bytes)}"
    if limit_bytes is not None and ram_bytes > limit_bytes:
        says += f" is more than its cgroup may use ({format_bytes(limit_bytes)})"
        less = f"fusecache restart {quote(place)} --ram {limit_bytes // 4 >> 20}M"
        do = f"{less}, or a larger MemoryMax="
        return Finding("problem", "memory", says, do, place)
    if ram_bytes > available_bytes:
        says += f" is more than programs leave of memory ({format_bytes(available_bytes)})"
        do = f"fusecache restart {quote(place)} --ram {available_bytes // 4 >> 20}M"
        return Finding("warning", "memory", says, do, place)
    return Finding("ok", "memory", says, mount=place)


def reclaimed(files: int, place: str) -> Finding:
    """`files`: that only RAM held, and the kernel took."""
    if not files:
        return Finding("ok", "reclaimed", "the kernel took nothing from RAM", mount=place)
    says = f"the kernel took {format_count(files, 'file')} that RAM alone held"
    do = "less --ram, or more memory for the cgroups of mount and readers"
    return Finding("warning", "reclaimed", says, do, place)


def _mode(status: dict[str, Any], place: str) -> Finding:
    if status.get("zero_open"):
        return Finding("ok", "open mode", "zero-open", mount=place)
    do = f"the log file says why, unless it is --no-zero-open: fusecache status {quote(place)}"
    return Finding("warning", "open mode", "ordinary: reads are slower", do, place)


def _faults(status: dict[str, Any], place: str) -> Finding:
    bad = figure(status, "integrity.mismatches") or 0
    faults = sum((figure(status, "integrity.faults") or {}).values())
    restarts = status.get("restarts", 0)
    says = f"{bad:,} bad blocks, {faults:,} cache faults, {restarts:,} restarts"
    if not bad + faults + restarts:
        return Finding("ok", "faults", says, mount=place)
    return Finding("warning", "faults", says, "look into its log file (fusecache list)", place)


def _hints(one: Answer, host: Host) -> Finding:
    place = one.mountpoint
    if hintsd_client.setting(one.target) == "none":
        return Finding("ok", "hintsd", "mounted without hints (--hintsd none)", mount=place)
    path = hintsd_client.socket_of(one.target)
    if path is not None and host.hintsds.get(path) is None:
        says = f"none answers at {path}: hints have no effect"
        return Finding("warning", "hintsd", says, "hintsd serve", place)
    says = "answers" if path is not None else "not known to you"
    return Finding("ok", "hintsd", says, mount=place)


def pool(found: Any, place: str) -> Finding:
    """`found`: what a mount's status says of its pool."""
    servers, fault = maps(figure(found, "servers")), figure(found, "fault")
    away, without = servers_away(found), figure(found, "without")
    says = f"{len(servers) - len(away)} of {format_count(len(servers), 'server')} in use"
    if away:
        server, why = away[0]
        says += f"; {server.get('host')}: {why}"
    elif fault:
        says += f"; {fault}"
    elif isinstance(without, list) and without:
        says += f"; most hosts do without {', '.join(map(str, without))}"
    else:
        return Finding("ok", "pool", says, mount=place)
    return Finding("warning", "pool", says, f"fusecache pool status {quote(place)}", place)


def service(found: Any, place: str) -> Finding:
    """`found`: what a mount's status says of the host's cache service, which it is to use."""
    if figure(found, "used"):
        return Finding("ok", "cache service", f"{figure(found, 'socket')} is used", mount=place)
    return Finding("warning", "cache service", str(figure(found, "why_not")), mount=place)


def disk(path: str, ssd: dict[str, Any], place: str) -> Finding:
    """Of a cache directory; `ssd`: what its mount says of the tier."""

    def look() -> Finding:
        disk = os.statvfs(path)
        free_bytes = disk.f_bavail * disk.f_frsize
        below = mounts.holding(os.path.realpath(path))
        kind = below.filesystem if below else "unknown"
        measured = probe.load(Path(path))
        says = f"{path} on {kind}, {format_bytes(free_bytes)} free"
        if measured is not None:
            age = format_duration(max(0.0, time.time() - measured.taken_at))
            rate = format_bytes(measured.sequential_bytes_per_s)
            says += f", reads {rate}/s (measured {age} ago)"
        if kind in MEMORY or is_network(kind):
            what = "takes memory" if kind in MEMORY else "is no local disk"
            do = "a cache directory on a local SSD (--cache-dir)"
            return Finding("warning", "cache disk", f"{says}: it {what}", do, place)
        missing_bytes = ssd["limit_bytes"] - max(ssd["bytes"], ssd.get("reserved_bytes", 0))
        if missing_bytes > free_bytes and len(ssd.get("directories") or []) < 2:
            says += f", and --ssd may take {format_bytes(missing_bytes)} more"
            return Finding("warning", "cache disk", says, "free some, or give less --ssd", place)
        do = "" if measured is not None else f"fusecache probe {quote(path)} measures it"
        return Finding("ok", "cache disk", says, do, place)

    return _in_time("cache disk", path, place, look)


def origin(source: str, place: str) -> Finding:
    """What its file system is, as far as the mount table tells."""
    table = [mount for mount in mounts.mounts() if not mount.is_fusecache]
    below = mounts.holding(os.path.abspath(source), table)
    kind = below.filesystem if below else "unknown"
    says = f"{source} on {kind}"
    if kind.partition(".")[0] in ("fuse", "fuseblk", *_MADE_UP):
        says += ": inode numbers may change there, so files are known by path, size and times"
        do = "do not rewrite files of the dataset in place, with size and mtime put back"
        return Finding("warning", "origin", says, do, place)
    return Finding("ok", "origin", says, mount=place)


def clock(directory: str, place: str) -> Finding:
    """Whether what lies in the directory has changed in this host's future: ctime is what the
    origin's clock said, and nobody can set it. A clock that is behind does not show.
    """

    def look() -> Finding:
        with os.scandir(directory) as entries:
            stats = (one.stat(follow_symlinks=False) for one in islice(entries, ENTRIES_MOST))
            latest_s = max([os.stat(directory).st_ctime, *(one.st_ctime for one in stats)])
        ahead_s = latest_s - time.time()
        if ahead_s <= SKEW_S:
            return Finding("ok", "clock", "no change lies in this host's future", mount=place)
        says = (
            f"files changed {format_duration(ahead_s)} in this host's future: the origin's clock "
            "is ahead, or this one behind; such files are not cached until then"
        )
        return Finding("problem", "clock", says, "synchronize both clocks (NTP)", place)

    return _in_time("clock", directory, place, look)


def is_network(kind: str) -> bool:
    """Whether a file system of that type is not on this machine."""
    return kind in NETWORK or kind.startswith("fuse")


def _in_time(about: str, path: str, place: str, look: Callable[[], Finding]) -> Finding:
    """`look` in a child."""

    def question() -> str:
        try:
            found = look()
        except OSError as error:
            found = Finding("problem", about, f"{path}: {error.strerror}", mount=place)
        return json.dumps([found.level, found.says, found.do])

    answer = processes.ask(question, WAIT_S)
    if answer is None:
        return Finding("problem", about, f"{path} does not answer within {WAIT_S:g} s", mount=place)
    if not answer:
        return Finding("warning", about, f"{path} could not be looked at", mount=place)
    level, says, do = json.loads(answer)
    return Finding(level, about, says, do, place)
