"""`fusecache warm`: files into the cache before they are needed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import click

from fusecache.base import command
from fusecache.base.command import PATH
from fusecache.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UserError
from fusecache.base.units import format_bytes, format_count, format_share
from fusecache.cli import files
from fusecache.control import control_client
from fusecache.control.control_client import Target

SUMMED: Final = ("files", "bytes", "already", "skipped", "skipped_bytes", "unfitting",
                 "unfitting_bytes", "error_count")  # fmt: skip
PROGRESS_SUMMED: Final = ("files_done", "files_total", "bytes_done", "bytes_total")


@click.command()
@click.argument("path", type=PATH)
@click.argument("globs", nargs=-1, metavar="[GLOB]...")
@click.option(
    "--list", "list_file", type=PATH, metavar="FILE", help="Fetch the files named there; -: stdin."
)
@command.json_flag
def warm(path: str, globs: tuple[str, ...], list_file: str | None, as_json: bool) -> None:
    """Fetch files into the cache before they are needed: all of them, or those a GLOB names.

    PATH is the mount point, or what lies below it: then only that is fetched. A GLOB is relative to
    PATH; `**` crosses directories; a directory means all below it.
    Interrupt it any time: running it again goes on where it was.

    --list FILE fetches just the files named there, one path a line, relative to PATH, or absolute
    below mount point or source; in this order, and as many as you like. Lines that are not UTF-8,
    lead out of the mount, or name no file, are counted, and the rest is fetched.

    What was used longest ago makes room (not with mount --policy keep). What does not fit into
    --ssd even so is left out: then, and where a file was not named well, or could not be read or
    stored, the exit code is 1.

    \b
    fusecache warm /data/imagenet
    fusecache warm /data/imagenet/train
    fusecache warm /data/imagenet train 'val/**/*.JPEG'
    sort -R all.txt | head -100000 | fusecache warm /data/imagenet --list -
    """
    if globs and list_file is not None:
        raise UserError("--list FILE or a GLOB, not both", EXIT_USAGE)
    target = control_client.find(path)
    warming = _Warming(target)
    if list_file is None:
        warming.run(iter([files.request_of("warm", target.mountpoint, path, globs)]))
    else:
        paths = files.PathList(target.mountpoint, target.mount.source, path)
        with _opened(list_file) as file:
            batches = paths.batches(file)
            warming.run({"op": "warm_paths", "paths": batch} for batch in batches)
        paths.refused.add_missing(warming.missing_names, warming.missing)
        if paths.refused.count:
            command.complain("fusecache", paths.refused.line())
    code = warming.say(as_json)
    if code or (list_file is not None and paths.refused.count):
        sys.exit(code or EXIT_FAILED)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """UserError: it cannot be read."""
    try:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            yield file
    except OSError as error:
        raise UserError(f"--list {name}: {error.strerror}", EXIT_USAGE) from None


class _Warming:
    """One request, or those of a list one after the other; `missing`: paths of no file."""

    def __init__(self, target: Target) -> None:
        self.missing = 0
        self.missing_names: list[str] = []
        self._target = target
        self._is_interrupted = False
        self._result: dict[str, Any] = dict.fromkeys(SUMMED, 0)
        self._errors: list[str] = []
        self._before = dict.fromkeys(PROGRESS_SUMMED, 0)
        self._done = dict(self._before)

    def run(self, requests: Iterator[dict[str, Any]]) -> None:
        """Until all are answered, or Ctrl-C."""
        try:
            with files.progress("warming") as show:
                for request in requests:
                    if "carried" in self._result:
                        request["carried"] = self._result["carried"]
                    for message in control_client.converse(self._target, request):
                        if "progress" in message:
                            now = message["progress"]
                            self._done = {
                                name: self._before[name] + now[name] for name in PROGRESS_SUMMED
                            }
                            files.show_files(show, self._done)
                        else:
                            self._add(message["result"])
        except KeyboardInterrupt:
            self._is_interrupted = True

    def _add(self, result: dict[str, Any]) -> None:
        errors = result.get("errors") or []
        result = {"error_count": len(errors), **result}
        if len(self._errors) < files.ERRORS_SHOWN:
            self._errors += errors
        sums = {name: self._result[name] + result.get(name, 0) for name in SUMMED}
        self._result = {**result, **sums, "errors": self._errors}
        self.missing += result.get("missing", 0)
        self.missing_names = [*self.missing_names, *result.get("missing_names", [])][
            : files.NAMES_SHOWN
        ]
        found = {
            "files_done": result["files"],
            "files_total": result["files"] + result.get("skipped", 0),
            "bytes_done": result["bytes"],
            "bytes_total": result["bytes"] + result.get("skipped_bytes", 0),
        }
        self._before = {name: self._before[name] + found[name] for name in PROGRESS_SUMMED}
        self._done = dict(self._before)

    def _facts(self) -> dict[str, Any]:
        """For machines: without what one request carries to the next."""
        facts = {name: value for name, value in self._result.items() if name != "carried"}
        return {**facts, "missing": self.missing, "missing_names": self.missing_names}

    def say(self, as_json: bool) -> int:
        """How it went; the exit code."""
        if self._is_interrupted:
            command.complain(
                "fusecache",
                f"interrupted after {self._done['files_done']:,} files "
                f"({format_bytes(self._done['bytes_done'])}); run it again to go on",
            )
            return EXIT_INTERRUPTED
        result = self._result
        has_failed = files.complain_of({**result, "unmatched": None})
        already, skipped = result["already"], result["skipped"]
        extra, size = "", format_bytes(result["bytes"])
        if skipped:
            extra = f"; {skipped:,} skipped"
            size = format_share(result["bytes"], result["bytes"] + result["skipped_bytes"])
        line = (
            f"{result['files']:,} files, {size} in the cache; {already:,} were there before{extra}"
        )
        command.say_json(self._facts()) if as_json else command.say(line)
        has_failed |= files.complain_of({"unmatched": result.get("unmatched")})
        unfitting = result["unfitting"]
        if unfitting:
            limit = format_bytes(result["limit_bytes"])
            line = f"{format_count(unfitting, 'file')} do not fit in --ssd {limit}"
            if "needed_bytes" in result:  # not of an older server, before `fusecache restart`
                left = format_bytes(result["unfitting_bytes"])
                line = (
                    f"{format_count(unfitting, 'file')} ({left}) do not fit in --ssd {limit}; "
                    f"--ssd {-(-result['needed_bytes'] >> 20)}M would hold all that was asked for"
                )
            command.complain("fusecache", line)
        if skipped > unfitting:
            left = format_bytes(result["skipped_bytes"] - result["unfitting_bytes"])
            command.complain(
                "fusecache",
                f"{format_count(skipped - unfitting, 'file')} ({left}) could not be stored: the "
                "SSD tier is full, has failed, or its room is a log's; "
                f"fusecache status {self._target.mountpoint} says which",
            )
        return EXIT_FAILED if has_failed or skipped else 0
