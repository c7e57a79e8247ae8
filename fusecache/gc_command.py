"""`fusecache gc`: what of a cache directory is dead, and rewriting what is mostly dead."""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from fusecache import command, control_client
from fusecache.errors import EXIT_BUSY, CacheFault, UserError
from fusecache.units import format_bytes

if TYPE_CHECKING:
    from fusecache.store import Store
    from fusecache.store.gc import SegmentUse

# The store is imported late: `fusecache --help` need not wait for it.

_NO_LIMIT_BYTES = 1 << 60
_ROOM_BYTES = 16 << 20


@click.command()
@click.argument("path", metavar="CACHE_DIR|MOUNTPOINT")
@click.option("--compact", is_flag=True, help="Rewrite what is alive in segments mostly dead.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def gc(path: str, compact: bool, as_json: bool) -> None:
    """Show what of the cache directory is in use, and what is dead: replaced, or moved elsewhere.

    \b
    fusecache gc /var/cache/fusecache
    fusecache gc /data/imagenet                      the directory of that mount
    fusecache gc /var/cache/fusecache --compact      while no mount uses it

    Dead bytes are no loss: a mount evicts them in time. --compact gives them back now: segments
    that are less than half alive are rewritten. Meanwhile the directory may grow by one segment.
    """
    directory = _directory(path)
    freed_bytes = 0
    if compact:
        _refuse_shared(directory)
        freed_bytes = _compact(directory)
    uses = _survey(directory)
    if as_json:
        segments = [asdict(use) for use in uses]
        answer = {"cache_dir": str(directory), "segments": segments, "freed_bytes": freed_bytes}
        print(json.dumps(answer, indent=2))
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
    command.console().print(table)
    if compact:
        command.console().print(f"{format_bytes(freed_bytes)} given back")


def _directory(path: str) -> Path:
    if (Path(path) / "format").is_file() and (Path(path) / "segments").is_dir():
        return Path(path).absolute()
    try:
        target = control_client.find(path)
    except UserError as error:
        raise UserError(
            f"{path} is neither a cache directory nor a mount", error.exit_code
        ) from None
    answer = control_client.ask(target, {"op": "status"})
    return Path(answer["status"]["cache_dir"])


def _refuse_shared(directory: Path) -> None:
    """The lock is let go again: a mount that begins meanwhile shares the directory, as all do."""
    with open(directory / "lock", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory} is used by a mount: --compact works when it is unmounted", EXIT_BUSY
            ) from None


def _open(directory: Path, limit_bytes: int) -> Store:
    from fusecache.store import Store, StoreSettings
    from fusecache.store import format as fmt

    found = fmt.parse_format_line((directory / "format").read_bytes())
    settings = StoreSettings(limit_bytes, 0, "keep", found[1] if found else "xxh3-128")
    return Store.open(
        directory,
        settings,
        on_fault=lambda kind, message: command.complain("fusecache", f"{kind}: {message}"),
        on_segment_gone=lambda segno: None,
    )


def _survey(directory: Path) -> list[SegmentUse]:
    from fusecache.store.gc import survey

    with _open(directory, _NO_LIMIT_BYTES) as store:
        try:
            return survey(store)
        except CacheFault as error:
            raise UserError(f"{directory}: {error}") from None


def _compact(directory: Path) -> int:
    from fusecache.store.gc import compact

    with _open(directory, _NO_LIMIT_BYTES) as store:
        used = store.usage().bytes
    # Enough for one segment, whose length follows from the limit, and for its rows.
    with _open(directory, used + used // 6 + _ROOM_BYTES) as store:
        try:
            return compact(store)
        except CacheFault as error:
            raise UserError(f"{directory}: {error}") from None
