"""`fusecache evict` and `fusecache pin`: what leaves the cache, and what stays."""

from __future__ import annotations

import sys
from typing import Any

import click

from fusecache.base import command
from fusecache.base.command import PATH
from fusecache.base.errors import EXIT_FAILED, EXIT_USAGE, UserError
from fusecache.base.units import format_bytes, format_count
from fusecache.cli import files
from fusecache.control import control_client
from fusecache.control.control_client import Target


def _ask(target: Target, request: dict[str, Any], what: str) -> dict[str, Any]:
    """The result. UserError."""
    result: dict[str, Any] = {}
    with files.progress(what) as show:
        for message in control_client.converse(target, request):
            if "progress" in message:
                files.show_files(show, message["progress"])
            else:
                result = message["result"]
    return result


@click.command()
@click.argument("path", type=PATH)
@click.argument("globs", nargs=-1, required=True, metavar="GLOB...")
@command.json_flag
def evict(path: str, globs: tuple[str, ...], as_json: bool) -> None:
    """Drop the files that a GLOB names from the cache: from SSD, and their pages from RAM.

    GLOBs are those of `fusecache warm`, '**' is all. Readers notice nothing: what they read next
    comes from the origin, and is cached again.

    Files that a hinted training or `fusecache pin` has pinned stay, and so does what shares its
    bytes with a file that stays; the rest goes. The exit code is 1 then.

    \b
    fusecache evict /data/imagenet 'train/n02*'
    fusecache evict /data/imagenet/val '**/*.png'
    """
    target = control_client.find(path)
    result = _ask(target, files.request_of("evict", target.mountpoint, path, globs), "evicting")
    freed, absent = format_bytes(result["evicted_bytes"]), result["absent"]
    line = (
        f"{format_count(result['files'], 'file')}, {format_bytes(result['bytes'])} evicted, {freed}"
        f" given back on SSD; {absent:,} were not there"
    )
    command.say_json(result) if as_json else command.say(line)
    has_failed = files.complain_of(result)
    of_jobs, pinned, staying = result["of_jobs"], result["pinned"], result["staying"]
    if of_jobs:
        command.complain(
            "fusecache",
            f"{format_count(of_jobs, 'file')} left in the cache, pinned by hinted jobs: end them "
            "first (hintsd status shows them, hintsd end JOB)",
        )
    if pinned:
        command.complain(
            "fusecache",
            f"{format_count(pinned, 'file')} left in the cache, pinned by a user: "
            f"fusecache pin {target.mountpoint} --remove GLOB first "
            f"(fusecache status {target.mountpoint} shows the globs)",
        )
    if staying:
        why = (
            "they lie in a log of hinted jobs"
            if result["has_logs"]
            else "they share blocks with files that were not named, or another mount writes them"
        )
        command.complain("fusecache", f"{format_count(staying, 'file')} left in the cache: {why}")
    if has_failed or of_jobs or pinned or staying:
        sys.exit(EXIT_FAILED)


@click.command()
@click.argument("path", type=PATH)
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
@click.option(
    "--remove", is_flag=True, help="Unpin these globs, as they were given; none: all below PATH."
)
@command.json_flag
def pin(path: str, globs: tuple[str, ...], remove: bool, as_json: bool) -> None:
    """Keep on SSD what is cached of the files that a GLOB names, now and later.

    GLOBs are those of `fusecache warm`, '**' is all. They are remembered, so they hold for files
    that come later, too. Nothing is fetched: `fusecache warm` with the same GLOB does that, before
    or after. Pinned files are not evicted for others, by no mount on the cache directory, nor by
    hints or `fusecache evict`. They go, last, where --ssd or --keep-free could not hold otherwise.
    RAM is not pinned.

    Pins are kept in the cache directory: they survive a server that dies, `umount`, and a reboot.
    `fusecache status` shows them. If all files that are pinned need more than --ssd holds, nothing
    is pinned, and the exit code is 1.

    \b
    fusecache pin /data/imagenet 'val/**' && fusecache warm /data/imagenet 'val/**'
    fusecache pin /data/imagenet --remove 'val/**'
    fusecache pin /data/imagenet --remove
    """
    if not globs and not remove:
        raise UserError("name a GLOB: '**' is all; fusecache status shows pins", EXIT_USAGE)
    target = control_client.find(path)
    request = files.request_of("pin", target.mountpoint, path, globs)
    result = _ask(target, {**request, "remove": remove}, "looking")
    count, size = format_count(result["files"], "file"), format_bytes(result["bytes"])
    pinned = f"pinned: {' '.join(result['globs'])} ({count}, {size})"
    if as_json:
        command.say_json(result)
    else:
        command.say(pinned if result["globs"] else "no pins")
    if files.complain_of(result):
        sys.exit(EXIT_FAILED)
