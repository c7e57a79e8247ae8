"""What commands share that name files: globs, a list, the progress, what is said at the end."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Final

from rich.console import Console
from rich.progress import (
    Progress,
    ProgressColumn,
    Task,
)
from rich.table import Column
from rich.text import Text

from fusecache.base import command, mounts
from fusecache.base.errors import EXIT_USAGE, ConfigError, UserError
from fusecache.base.units import format_bytes, format_count, format_duration, format_share

LINE_EVERY_S: Final = 30.0  # of progress, where there is no terminal
ERRORS_SHOWN: Final = 20
NAMES_SHOWN: Final = 5
# Of a request, whose line is 1 MiB at most, in JSON.
BATCH_BYTES: Final = 512 << 10
BATCH_PATHS: Final = 4096
PATH_BYTES_MOST: Final = 4096


class _Figures(ProgressColumn):
    def get_table_column(self) -> Column:
        return Column(no_wrap=True)

    def render(self, task: Task) -> Text:
        return Text(_figures(task))


def _figures(task: Task) -> str:
    """How far it is, how fast, and how long it takes. What a narrow terminal cuts comes last."""
    parts = [
        format_share(task.completed, task.total) if task.total else format_bytes(task.completed)
    ]
    if task.speed:
        parts.append(f"{format_bytes(task.speed)}/s")
    if task.time_remaining is not None and not task.finished:
        parts.append(f"{format_duration(task.time_remaining)} left")
    if note := task.fields["note"]:
        parts.append(str(note))
    return f"{task.description}: {', '.join(parts)}"


Show = Callable[[float, float | None, str], None]
"""Takes the bytes done, the bytes in all, if that is known, and how far it is in other words."""


@contextlib.contextmanager
def progress(what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Show]:
    """On stderr, on a terminal in one line that changes; elsewhere a line each LINE_EVERY_S."""
    bar = Progress(
        _Figures(),
        console=Console(stderr=True),
        get_time=clock,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(what, total=None, note="")
        next_line = clock() + LINE_EVERY_S

        def show(done: float, total: float | None, note: str) -> None:
            nonlocal next_line
            bar.update(task, completed=done, total=total, note=note)
            if bar.disable and clock() >= next_line:
                next_line = clock() + LINE_EVERY_S
                command.complain("fusecache", _figures(bar.tasks[0]), "INFO")

        yield show


def show_files(show: Show, done: dict[str, Any]) -> None:
    """A message of progress over files."""
    note = f"{done['files_done']:,} of {done['files_total']:,} files"
    show(done["bytes_done"], done["bytes_total"], note)


def complain_of(result: dict[str, Any]) -> bool:
    """Lines on what failed, and on globs that name nothing. False: there are none."""
    errors, unmatched = list(result.get("errors") or []), result.get("unmatched") or []
    for line in errors[:ERRORS_SHOWN]:
        command.complain("fusecache", line)
    more = result.get("error_count", len(errors)) - min(len(errors), ERRORS_SHOWN)
    if more > 0:
        command.complain("fusecache", f"… and {more:,} more")
    if unmatched:
        command.complain("fusecache", f"warning: no file matches {' '.join(unmatched)}")
    return bool(errors or unmatched)


# ---- globs ---------------------------------------------------------------------------------------


def request_of(op: str, mountpoint: str, path: str, globs: tuple[str, ...]) -> dict[str, Any]:
    """What `path` and the globs, relative to it or absolute below it, name on the mount.

    UserError: no glob; ConfigError: not below `path`.
    """
    if "" in globs:
        raise UserError("'' is no glob", EXIT_USAGE)
    place = _place(mountpoint, path)
    relative = []
    for glob in globs:
        base = next((p for p in (os.path.abspath(path), place) if mounts.is_below(glob, p)), None)
        if base is not None:
            glob = glob[len(base) :].strip("/") or "**"
        elif mounts.is_below(glob, mountpoint):
            raise ConfigError(f"{glob} is not below {path}")
        relative.append(glob)
    request: dict[str, Any] = {"op": op, "globs": relative}
    if prefix := _below(place, mountpoint):
        request["prefix"] = prefix
    return request


def _place(mountpoint: str, path: str) -> str:
    place = os.path.abspath(path)
    return place if mounts.is_below(place, mountpoint) else mounts.resolve(place)  # by a link


def _below(place: str, mountpoint: str) -> str:
    """Relative to the mount; "": the mount itself."""
    return place[len(mountpoint) :].strip("/") if mounts.is_below(place, mountpoint) else ""


# ---- a list --------------------------------------------------------------------------------------


class PathList:
    """The lines of a file, each a path: relative to `path`, or absolute, below mount or source."""

    def __init__(self, mountpoint: str, source: str, path: str) -> None:
        self.refused = Refused()
        self._roots = [root.rstrip("/") for root in (mountpoint, source)]
        self._base = _below(_place(mountpoint, path), mountpoint)

    def batches(self, file: BinaryIO) -> Iterator[list[str]]:
        """Paths relative to the mount, as many as a request takes; OSError."""
        batch, taken = list[str](), 0
        for line in _lines(file):
            path = self._relative(line)
            if path is None:
                continue
            size = len(json.dumps(path)) + 2
            if batch and (taken + size > BATCH_BYTES or len(batch) == BATCH_PATHS):
                yield batch
                batch, taken = [], 0
            batch.append(path)
            taken += size
        if batch:
            yield batch

    def _relative(self, line: bytes) -> str | None:
        """None: it is refused, or empty."""
        if not line:
            return None
        try:
            text = line.decode()
        except UnicodeDecodeError:
            self.refused.add(repr(line[:40])[2:-1], "not UTF-8")
            return None
        path = self._below_mount(text)
        if len(line) > PATH_BYTES_MOST or "\0" in text:
            self.refused.add(f"{text[:40]!r}", "no path")
        elif path is None:
            self.refused.add(text, "not below the mount")
        elif not path:
            self.refused.add(text, "no file")
        else:
            return path
        return None

    def _below_mount(self, text: str) -> str | None:
        """None: it is not."""
        path = os.path.normpath(os.path.join("/", self._base, text))
        if not text.startswith("/"):
            return None if _climbs(f"{self._base}/{text}") else path.strip("/")
        path = "/" + path.lstrip("/")
        root = next((root for root in self._roots if mounts.is_below(path, root)), None)
        return None if root is None else path[len(root) :].strip("/")


class Refused:
    """Lines that name no file: how many, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self._shown: list[str] = []

    def add(self, name: str, why: str, count: int = 1) -> None:
        """One more, or so many of which this is the first."""
        self.count += count
        if len(self._shown) < NAMES_SHOWN:
            self._shown.append(f"{name} ({why})")

    def add_missing(self, names: Iterable[str], count: int) -> None:
        """So many, of which these are the first."""
        for name in names:
            self.add(name, "no such file", 0)
        self.count += count

    def line(self) -> str:
        more = ", …" if self.count > len(self._shown) else ""
        lines = format_count(self.count, "line")
        return f"{lines} of the list left out: {', '.join(self._shown)}{more}"


def _climbs(path: str) -> bool:
    """Whether `..` leads out of the mount."""
    depth = 0
    for part in path.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            return True
    return False


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Without their ends. One that is too long is cut: its rest is read, and not kept."""
    while line := file.readline(PATH_BYTES_MOST + 2):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(1 << 16)
        yield line.removesuffix(b"\n")
