"""Man pages, one for each command (fusecache-warm(1)), from what `--help` shows.

usage: python -m tools.man DIR     tools/build has them put into the wheel (docs/PACKAGES.md)
click-man was tried: it fills what `--help` leaves as it is, and has no exit codes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from fusecache import __version__
from fusecache.base.command import Commands
from fusecache.cli.main import cli as fusecache
from hintsd.cli.main import cli as hintsd

# What groff would show as another character, or read as its own.
_ESCAPES: Final = str.maketrans(
    {"\\": r"\(rs", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"}
)


def pages() -> dict[str, str]:
    """By file name."""
    found = {}
    for name, command in (("fusecache", fusecache), ("hintsd", hintsd)):
        for context in _walk(command, name, None):
            found[f"{_name(context)}.1"] = page(context)
    return found


def page(context: click.Context) -> str:
    """Of one command, as troff."""
    command, name = context.command, _name(context)
    text = inspect.cleandoc(command.help or "")
    records = [
        one.get_help_record(context)
        for one in command.get_params(context)
        if isinstance(one, click.Option)
    ]
    options = [record for record in records if record is not None]
    lines = [
        f'.TH {name.upper()} 1 "" "fusecache {__version__}" "User Commands"',
        ".SH NAME",
        _escaped(f"{name} - {_first_sentence(text)}"),
        ".SH SYNOPSIS",
        f".B {_escaped(context.command_path)}",
        _escaped(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
        *_paragraphs(text),
        *([".SH OPTIONS"] if options else []),
    ]
    for names, help_ in options:
        lines += [".TP", f".B {_escaped(names)}", _escaped(help_) or r"\&"]
    if isinstance(command, Commands):
        lines.append(".SH COMMANDS")
        for each, child in command.all_commands(context).items():
            what = _first_sentence(inspect.cleandoc(child.help or ""))
            lines += [".TP", f".BR {_escaped(f'{name}-{each}')} (1)", _escaped(what)]
    if command.epilog:
        lines += [".SH NOTES", *_paragraphs(inspect.cleandoc(command.epilog))]
    if context.parent is not None:
        lines += [".SH SEE ALSO", f".BR {_escaped(_name(context.parent))} (1)"]
    return "\n".join(lines) + "\n"


def _walk(
    command: click.Command, name: str, parent: click.Context | None
) -> Iterator[click.Context]:
    context = click.Context(command, parent, name, **command.context_settings)
    yield context
    if isinstance(command, Commands):
        for each, child in command.all_commands(context).items():
            yield from _walk(child, each, context)


def _name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _first_sentence(text: str) -> str:
    first = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)])\. ", first, maxsplit=1)[0].rstrip(".")


def _paragraphs(text: str) -> list[str]:
    """Those that begin with a `\\b` stay as they are, in click and here."""
    lines = []
    for number, paragraph in enumerate(text.split("\n\n")):
        lines += [".PP"] if number else []
        if paragraph.startswith("\b\n"):
            lines += [".nf", *map(_escaped, paragraph.splitlines()[1:]), ".fi"]
        else:
            lines += map(_escaped, paragraph.splitlines())
    return lines


def _escaped(line: str) -> str:
    text = line.translate(_ESCAPES)
    return rf"\&{text}" if text.startswith(".") else text


def main(directory: str) -> None:
    for name, text in pages().items():
        Path(directory, name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
