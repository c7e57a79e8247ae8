"""`fusecache gc`: what of a cache directory is dead, and rewriting what is mostly dead."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from fusecache.base import command, terminal
from fusecache.base.command import PATH
from fusecache.base.disk import cache_names
from fusecache.base.errors import EXIT_BUSY, EXIT_NOT_A_MOUNT, CacheFault, UserError
from fusecache.base.units import format_bytes
from fusecache.control import control_client

if TYPE_CHECKING:
    from fusecache.store import Store
    from fusecache.store.gc import SegmentUse

# The store is imported late: `fusecache --help` need not wait for it.

_NO_LIMIT_BYTES = 1 << 60
_ROOM_BYTES = 16 << 20


@click.command()
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="CACHE_DIR...|MOUNTPOINT")
@click.option("--compact", is_flag=True, help="Rewrite what is alive in segments mostly dead.")
@command.json_flag
def gc(paths: tuple[str, ...], compact: bool, as_json: bool) -> None:
    """Show what of the cache directory is in use, and what is dead: replaced, or moved elsewhere.

    \b
    fusecache gc /var/cache/fusecache
    fusecache gc /data/imagenet                      the directory of that mount
    fusecache gc /var/cache/fusecache --compact      while no mount uses it
    fusecache gc /ssd1/cache /ssd2/cache             a cache with two directories

    \b
    segments       files of many records: a record is a file of the dataset, or 4 MiB of it
    static         written as files were fetched
    packed         of a log: written anew in the order of an epoch (--layout; docs/LOG.md)
    being written  open now, by a mount; what of it is dead is known when it is closed
    alive          of files as they are now, at the place where they are read
    dead           replaced by a newer version, deleted, or moved to another segment

    Dead bytes are no loss: a mount evicts them in time. --compact gives them back now: segments
    that are less than half alive are rewritten. Meanwhile the directory may grow by one segment.
    """
    directories = _directories(_distinct(paths))
    freed_bytes = 0
    if compact:
        for directory in directories:
            _refuse_shared(directory)
        freed_bytes = _compact(directories)
    uses = _survey(directories)
    if as_json:
        segments = [asdict(use) for use in uses]
        answer = {
            "cache_dir": str(directories[0]),
            "cache_dirs": [str(directory) for directory in directories],
            "segments": segments,
            "freed_bytes": freed_bytes,
        }
        command.say_json(answer)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("segments", "count", "alive", "dead"):
        table.add_column(title, justify="left" if title == "segments" else "right")
    for kind, name in (("static", "static"), ("packed", "packed"), ("open", "being written")):
        some = [use for use in uses if use.kind == kind]
        total, alive = sum(use.bytes for use in some), sum(use.alive_bytes for use in some)
        known = kind != "open"
        table.add_row(
            name,
            f"{len(some):,}",
            format_bytes(alive if known else total),
            format_bytes(total - alive) if known else "-",
        )
    closed = [use for use in uses if use.kind != "open"]
    alive = sum(use.alive_bytes for use in closed)
    table.add_row(
        "in all",
        f"{len(uses):,}",
        format_bytes(alive + sum(use.bytes for use in uses if use.kind == "open")),
        format_bytes(sum(use.bytes for use in closed) - alive),
    )
    terminal.console().print(table)
    if compact:
        terminal.console().print(f"{format_bytes(freed_bytes)} given back")


def _distinct(paths: Sequence[str]) -> list[str]:
    """Each place once, as it was named first."""
    places: dict[str, str] = {}
    for path in paths:
        places.setdefault(os.path.realpath(path), path)
    if len(places) < len(paths):
        command.complain("fusecache", f"warning: the same twice: {' '.join(paths)}")
    return list(places.values())


def _directories(paths: Sequence[str]) -> list[Path]:
    """All of one cache."""
    if all(_is_cache(Path(path)) for path in paths):
        found = [Path(path).absolute() for path in paths]
        for directory in found:
            cache_names.check(str(directory), claim=True)
        _refuse_some(found)
        return found
    if len(paths) > 1:
        other = next(path for path in paths if not _is_cache(Path(path)))
        raise UserError(f"{other} is no cache directory", EXIT_NOT_A_MOUNT)
    try:
        target = control_client.find(paths[0])
    except UserError as error:
        raise UserError(
            f"{paths[0]} is neither a cache directory nor a mount", error.exit_code
        ) from None
    status = control_client.ask(target, {"op": "status"})["status"]
    parts = status["ssd"].get("directories") or [{"path": status["cache_dir"]}]
    return [Path(part["path"]) for part in parts]


def _is_cache(path: Path) -> bool:
    try:
        return (path / "format").is_file() and (path / "segments").is_dir()
    except PermissionError:
        raise UserError(f"{path}: another user's cache directory: run gc as that user") from None


def _refuse_some(directories: Sequence[Path]) -> None:
    """Opened without the others, a directory would leave its set."""
    from fusecache.store.segment import format as fmt

    for directory in directories:
        with contextlib.suppress(OSError):
            line = fmt.parse_set_line((directory / "set").read_bytes())
            if line is None or len(line.ids) == len(directories):
                continue
            if len(line.ids) > len(directories):
                raise UserError(
                    f"{directory} is one of {len(line.ids)} directories of a cache: name them all;"
                    " or, if the others are gone, mount once with those that are left"
                )
            alone = "by itself" if len(line.ids) == 1 else f"with {len(line.ids) - 1} others"
            raise UserError(
                f"{directory} was last used {alone}, not with all of these: name it so here,"
                " or mount once with all of them, which makes them one cache again"
            )


def _refuse_shared(directory: Path) -> None:
    """The lock is let go again: a mount that begins meanwhile shares the directory, as all do."""
    with open(directory / "lock", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory} is used by a mount: --compact works when it is unmounted", EXIT_BUSY
            ) from None


def _open(directories: Sequence[Path], limit_bytes: int) -> Store:
    from fusecache.store import Store, StoreSettings
    from fusecache.store.segment import format as fmt

    found = fmt.parse_format_line((directories[0] / "format").read_bytes())
    settings = StoreSettings(limit_bytes, 0, "keep", found[1] if found else "xxh3-128")
    return Store.open(
        directories[0],
        settings,
        further=directories[1:],
        on_fault=lambda kind, message: command.complain("fusecache", f"{kind}: {message}"),
        on_segment_gone=lambda segno: None,
    )


def _survey(directories: Sequence[Path]) -> list[SegmentUse]:
    from fusecache.store.gc import survey

    with _open(directories, _NO_LIMIT_BYTES) as store:
        try:
            return survey(store)
        except CacheFault as error:
            raise UserError(f"{directories[0]}: {error}") from None


def _compact(directories: Sequence[Path]) -> int:
    from fusecache.store.gc import compact

    with _open(directories, _NO_LIMIT_BYTES) as store:
        used = store.usage().reserved_bytes
    # Enough for one segment, whose length follows from the limit, and for its rows.
    with _open(directories, used + used // 6 + _ROOM_BYTES) as store:
        try:
            return compact(store)
        except CacheFault as error:
            raise UserError(f"{directories[0]}: {error}") from None
