"""What the commands `fusecache` and `hintsd` share: how one is found, begins and ends.

A mistake is one line on stderr ("fusecache: …") and an exit code of errors.EXIT_*, never a
traceback. What a command does is its own module's. None runs where files of another version's
hintsd were installed over fusecache's (docs/PACKAGES.md).
INVARIANT: importing it is quick. Tables and what changes on a terminal are base.terminal's.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

import click
from click.shell_completion import CompletionItem

from fusecache import __version__
from fusecache.base import logs, processes
from fusecache.base.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, UserError

_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tab and newline


class _Path(click.ParamType):  # type: ignore[type-arg]  # which click 8.1 has not
    """Text that a shell completes as a path. click's own looks at what it is given, and would hang
    where a mount does.
    """

    name = "path"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


PATH: Final = _Path()
"""The type of an argument or option that is a path."""


json_flag: Final = click.option("--json", "as_json", is_flag=True, help="For machines.")


class Commands(click.Group):
    """Commands in the order of use. Without arguments it shows its help, as a mistake.

    `places`: where those are that are imported when they are called: by name, "module:attribute".
    """

    def __init__(self, *given: Any, places: Mapping[str, str] | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self._places = places or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(name for name in self.commands if name not in self._places), *self._places]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._places:
            self._load(cmd_name)
        elif cmd_name not in self.commands:
            self.all_commands(ctx)  # click suggests what it knows
        return super().get_command(ctx, cmd_name)

    def all_commands(self, ctx: click.Context) -> dict[str, click.Command]:
        """By name, in the order of use."""
        for name in self._places:
            self._load(name)
        return {name: self.commands[name] for name in self.list_commands(ctx)}

    def _load(self, name: str) -> None:
        if name not in self.commands:
            self.add_command(pkgutil.resolve_name(self._places[name]), name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:  # what a shell completes has no words yet
            click.echo(self.get_help(ctx), err=True)
            ctx.exit(EXIT_USAGE)
        return super().parse_args(ctx, args)


def run(program: str, command: Callable[[], object]) -> NoReturn:
    """Ends the process: with the number that `command` gives, if any, else as the module says."""
    _open_standard_streams()
    try:
        if line := mixture():
            raise UserError(line)
        code = command()
    except UserError as error:
        complain(program, str(error))
        sys.exit(error.exit_code)
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        complain(program, f"{error.format_message()}{hint}")
        sys.exit(EXIT_USAGE)
    except (KeyboardInterrupt, click.Abort):
        complain(program, "interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        complain(program, str(error))
        sys.exit(EXIT_FAILED)
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _open_standard_streams() -> None:
    """On /dev/null where the shell has closed them (`2>&-`)."""
    processes.open_standard_descriptors()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, "w", closefd=False))


def complain(program: str, line: str, level: str = "ERROR") -> None:
    """One line on stderr. `level` is for the journal, where "warning: …" is no error."""
    mark = logs.priority("WARNING" if line.startswith("warning: ") else level)
    sys.stderr.write(f"{mark}{program}: {printable(line)}\n")
    sys.stderr.flush()


def say(line: str) -> None:
    """print, for text that may hold the bytes of a file name."""
    sys.stdout.flush()
    sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.flush()


def say_json(value: object) -> None:
    """For machines."""
    say(json.dumps(value, indent=2))


def printable(value: object) -> str:
    """Text that any terminal takes, of what may hold the bytes of a file name: they command
    nothing there.
    """
    text = str(value).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def mixture(directory: str | None = None) -> str:
    """A line for the user; "": there is none. `directory`: where the packages lie. What pip names
    beside them tells: a checkout or a link to one has nothing there, and is whole.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    directory = directory or root
    prefix, suffix = "fusecache-", ".dist-info"
    try:
        names = os.listdir(directory)
    except OSError:  # it may be searched, not listed; or is none
        return ""
    versions = [
        name[len(prefix) : -len(suffix)]
        for name in names
        if name.startswith(prefix) and name.endswith(suffix)
    ]
    if not versions or __version__ in versions:
        return ""
    return (
        f"this is fusecache {versions[0]}, with files of hintsd {__version__}: install the same "
        f"version of both (pip install --force-reinstall --no-deps fusecache=={versions[0]} brings "
        "this one back)"
    )
