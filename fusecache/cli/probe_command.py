"""`fusecache probe`: what the disk of a cache directory can do, and what that is worth."""

from __future__ import annotations

import os
import pathlib
import time
from typing import Final

import click
from rich.table import Table

from fusecache.base import command, mounts, terminal
from fusecache.base.command import PATH
from fusecache.base.disk import cache_names, probe
from fusecache.base.errors import EXIT_NOT_A_MOUNT, UserError
from fusecache.base.units import format_bytes, format_duration
from fusecache.control import control_client

_SAMPLES_BYTES: Final = (3000, 10_000, 30_000, 110_000)
_SPREAD_MOST: Final = 0.5


@click.command("probe")
@click.argument("path", type=PATH, metavar="CACHE_DIR|MOUNTPOINT")
@click.option("--show", is_flag=True, help="What was measured last; measures nothing.")
@command.json_flag
def probe_device(path: str, show: bool, as_json: bool) -> None:
    """Measure the disk of a cache directory, and keep the result there for `--layout auto`.

    \b
    fusecache probe /var/cache/fusecache
    fusecache probe /data/imagenet                    each cache directory of that mount
    fusecache probe /var/cache/fusecache --show --json | jq .mixed_bytes_per_s

    Takes some 3 s and, meanwhile, room for 256 MiB (an eighth of what is free if that is less, but
    32 MiB at least). Best while nothing else uses the disk. A mount with
    `--layout auto` that finds no result of the last 30 days measures by itself when the first
    training with hints comes. A directory that holds other files than a cache's is refused.
    Samples are worth reordering where the gain is well above 1; docs/TUNING.md says more.
    """
    directories = _probed(path)
    maps = []
    for directory in directories:
        if show:
            kept = probe.load(directory)
            if kept is None:
                raise UserError(
                    f"{directory}: nothing that was measured in the last 30 days is kept there; "
                    f"to measure: fusecache probe {path}"
                )
            found = kept
        else:
            found = probe.measure(directory)
        maps.append(found.as_map())
        if not as_json:
            heading = [f"{directory}:"] if len(directories) > 1 else []
            terminal.show(
                *heading, _device_table(found), "", _samples_table(found), "", _trust(found)
            )
            if directory is not directories[-1]:
                terminal.show("")
    if as_json:
        by_path = {str(path): one for path, one in zip(directories, maps, strict=True)}
        command.say_json(maps[0] if len(maps) == 1 else by_path)


def _probed(path: str) -> list[pathlib.Path]:
    """The cache directories that are meant, of a mount those in service. Whether a mount is, is
    seen without touching it.
    """
    if mounts.find(path) is not None:
        answer = control_client.ask(control_client.find(path), {"op": "status"})["status"]
        parts = answer["ssd"].get("directories") or [{"path": answer["cache_dir"]}]
        used = [pathlib.Path(part["path"]) for part in parts if not part.get("why_out")]
        return used or [pathlib.Path(answer["cache_dir"])]
    directory = pathlib.Path(path)
    why = None
    if not directory.exists():
        why = "does not exist: make it (mkdir -p), or mount with it first"
    elif not directory.is_dir():
        why = "is a file: give a cache directory, or a mount point"
    elif os.statvfs(directory).f_blocks == 0:
        why = "is on a file system that stores nothing; give a directory on the SSD"
    if why is not None:
        raise UserError(f"{path} {why}", EXIT_NOT_A_MOUNT)
    cache_names.check(str(directory.absolute()))
    return [directory]


def _trust(found: probe.Probe) -> str:
    line = f"passes of one figure lie up to {found.spread:.0%} apart"
    if found.spread > _SPREAD_MOST:
        line += ": somebody else uses the disk, or it is not steady; measure again when it is idle"
    return f"{line}; measured {format_duration(max(0.0, time.time() - found.taken_at))} ago"


def _device_table(found: probe.Probe) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("device", "bytes/s", "requests/s"):
        table.add_column(title, justify="left" if title == "device" else "right")
    rows = [
        ("sequential reads", found.sequential_bytes_per_s, probe.LARGE_BYTES),
        ("writes", found.write_bytes_per_s, probe.PIECE_BYTES),
        ("reads, while as much is written", found.mixed_bytes_per_s, probe.LARGE_BYTES),
        *((f"random reads of {format_bytes(size)}", rate, size) for size, rate in found.random),
    ]
    for name, rate, size in rows:
        table.add_row(name, format_bytes(rate), f"{rate / size:,.0f}")
    return table


def _samples_table(found: probe.Probe) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("samples of", "at random", "in order, rewritten", "gain"):
        table.add_column(title, justify="right")
    for size in _SAMPLES_BYTES:
        random, mixed = found.random_bytes_per_s(size), found.mixed_bytes_per_s
        shown = f"{format_bytes(random)}/s", f"{format_bytes(mixed)}/s", f"{mixed / random:.2f}"
        table.add_row(f"{size // 1000} KB", *shown)
    return table
