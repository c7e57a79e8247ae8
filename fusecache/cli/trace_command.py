"""`fusecache trace`: records what is read from a mount, and shows what a recording holds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fusecache.base import command
from fusecache.base.command import PATH, printable
from fusecache.base.errors import ConfigError
from fusecache.base.terminal import console
from fusecache.base.units import format_bytes, format_count, format_duration, parse_bytes
from fusecache.control import control_client

if TYPE_CHECKING:
    from fusecache.recording.recorder import Recorder

# numpy is imported late: `fusecache --help` need not wait for it.


@click.command()
@click.argument("path", type=PATH, metavar="PATH|FILE")
@click.option("--output", "-o", type=PATH, metavar="FILE", help="Where the trace goes.")
@click.option("--seconds", type=float, metavar="N", help="End after this long. [Ctrl-C]")
@click.option("--max-size", metavar="SIZE", help="End when FILE is that large.")
@click.option("--every-open", is_flag=True, help="See opens that the page cache serves, too.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@click.option("--show", is_flag=True, help="Show what the trace FILE holds.")
@click.option("--json", "as_json", is_flag=True, help="What is printed at the end, for machines.")
def trace(
    path: str,
    output: str | None,
    seconds: float | None,
    max_size: str | None,
    every_open: bool,
    force: bool,
    show: bool,
    as_json: bool,
) -> None:
    """Record which files are read from the mount at PATH, in which order, until Ctrl-C.

    \b
    fusecache trace /data/imagenet -o epoch.trace
    fusecache trace /data/imagenet -o hour.trace --seconds 3600 --max-size 1G
    fusecache trace --show epoch.trace

    A mount sees READs that the page cache cannot serve, and opens of hinted files that carry a
    tripwire; the rest never leaves the kernel. Of hinted jobs hintsd tells the rest: what their
    readers have passed, and where epochs begin. With --every-open the kernel asks the mount at each
    open of a file while the recording runs: all is seen, and each open costs some microseconds more
    (`ls -l` and stat() count as opens then). A mount in ordinary mode sees every open anyway.

    The mount may be used, and its server restarted, meanwhile. docs/TRACES.md has the format.
    """
    if show:
        if output is not None or seconds is not None or max_size is not None or every_open or force:
            raise ConfigError("--show takes a FILE and --json, nothing else")
        _print(_facts(path), as_json)
        return
    if output is None:
        raise ConfigError("where to? give -o FILE")
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"--seconds: {seconds:g} is not more than 0")
    try:
        size_bytes = None if max_size is None else parse_bytes(max_size)
    except ValueError as error:
        raise ConfigError(f"--max-size: {error}") from None
    if os.path.lexists(output) and not force:
        raise ConfigError(f"{output} exists; --force replaces it")
    target = control_client.find(path)

    from fusecache.recording.recorder import Limits, Recorder

    recorder = Recorder(target, output, every_open=every_open, force=force)
    with _end_signals() as wake_fd, _progress(recorder) as report:
        reason = recorder.run(Limits(seconds, size_bytes), wake_fd, report)
    if reason == "the mount is gone":
        command.complain("fusecache", f"{target.mountpoint}: {reason}: the recording has ended")
    if recorder.is_cut:
        command.complain("fusecache", "warning: what was read last may be missing")
    if recorder.reconnections:
        times = f"{recorder.reconnections} time{'s' * (recorder.reconnections > 1)}"
        command.complain(
            "fusecache",
            "warning: the server was restarted, or had to wait too long for this recorder, "
            f"{times}; what was read meanwhile is missing",
        )
    for job, told, samples in recorder.untold:
        command.complain(
            "fusecache",
            f"warning: {job}: hintsd told of {told:,} samples of its last epoch, of {samples:,}; "
            "of what it read after these, the trace has what the mount saw",
        )
    if recorder.lost:
        command.complain("fusecache", f"warning: {recorder.lost:,} accesses were lost")
    _print(_facts(output), as_json)


@contextlib.contextmanager
def _end_signals() -> Iterator[int]:
    """A descriptor that becomes readable with SIGINT or SIGTERM, which do nothing else."""
    ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def nothing(number: int, frame: object) -> None:
        del number, frame

    before = {number: signal.signal(number, nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    woken = signal.set_wakeup_fd(theirs)
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(ours)
        os.close(theirs)


@contextlib.contextmanager
def _progress(recorder: Recorder) -> Iterator[Any]:
    line = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn("{task.fields[note]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )

    def report() -> None:
        lost = f", {recorder.lost:,} lost" if recorder.lost else ""
        waiting = ", waiting for the server" if recorder.is_waiting else ""
        line.update(
            task,
            note=f"{recorder.accesses:,} accesses of {recorder.files:,} files, "
            f"{format_bytes(recorder.size_bytes)}{lost}{waiting}",
        )

    with line:
        task = line.add_task("recording, Ctrl-C ends it", total=None, note="")
        yield report


def _facts(path: str) -> dict[str, Any]:
    """What `--show` says of a trace; the keys are documented in docs/TRACES.md."""
    import numpy as np

    from fusecache.traces import traces

    whole = traces.read(path, parts=True)
    merged = traces.accesses(whole)
    kinds = np.bincount(
        np.zeros(0, np.uint8) if whole.seen is None else whole.seen & 7, minlength=8
    )
    items, times_s, readers = merged.items, merged.times_s, merged.readers
    losses = [gap.lost for gap in whole.gaps]
    return {
        "file": path,
        "size_bytes": os.path.getsize(path),
        "version": traces.VERSION,
        "source": whole.source,
        "complete": whole.is_complete,
        "accesses": len(items),
        "items": len(whole.sizes),
        "items_read": len(np.unique(items)),
        "item_bytes": int(whole.sizes.sum()),
        "access_bytes": int(whole.sizes[items].sum()),
        "epochs": len(merged.epoch_starts),
        "seconds": None if times_s is None or not len(times_s) else float(np.ptp(times_s)),
        "readers": None if readers is None else len(np.unique(readers[readers != 0])),
        "seen": None
        if whole.seen is None
        else {
            "opened": int(kinds[traces.OPENED]),
            "from_ssd": int(kinds[traces.FROM_SSD]),
            "from_origin": int(kinds[traces.FROM_ORIGIN]),
            "elsewhere": int(kinds[traces.ELSEWHERE]),
            "continued": int(np.count_nonzero(whole.seen & traces.CONTINUES)),
            "by_hint": 0
            if merged.seen is None
            else int(np.count_nonzero(merged.seen & 7 == traces.BY_HINT)),
        },
        "importances": len(whole.importances),
        "lost": sum(lost for lost in losses if lost is not None),
        "gaps_unknown": losses.count(None),
    }


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    accesses, seen, span_s = facts["accesses"], facts["seen"], facts["seconds"]
    rate = f", {accesses / span_s:,.0f} a second" if span_s else ""
    rows = [
        ("trace", f"{facts['file']}, {format_bytes(facts['size_bytes'])}"),
        ("source", facts["source"]),
        (
            "accesses",
            f"{accesses:,} of {facts['items_read']:,} files, "
            f"{format_bytes(facts['access_bytes'])}{rate}",
        ),
        ("files", f"{facts['items']:,}, {format_bytes(facts['item_bytes'])}"),
        ("epochs", f"{facts['epochs']:,}"),
    ]
    if span_s is not None:
        rows.append(("time", format_duration(span_s)))
    if facts["readers"]:
        rows.append(("readers", f"{facts['readers']:,} known"))
    if seen is not None:
        rows.append(
            (
                "seen",
                f"{seen['opened']:,} opens; READs: {seen['from_ssd']:,} from SSD, "
                f"{seen['from_origin']:,} from the origin, "
                f"{seen['elsewhere']:,} within large files; {seen['by_hint']:,} by hints alone; "
                f"{seen['continued']:,} of these belong to an access before them",
            )
        )
    if facts["importances"]:
        rows.append(("importances", f"told {facts['importances']:,} times"))
    if facts["lost"] or facts["gaps_unknown"]:
        gaps = format_count(facts["gaps_unknown"], "gap")
        rows.append(("missing", f"{facts['lost']:,} accesses, and {gaps} of unknown size"))
    if not facts["complete"]:
        rows.append(("", "the recorder was killed: later accesses may be missing"))
    for name, value in rows:
        table.add_row(name, printable(value))
    console().print(table)
