"""Where a command prints tables, and what changes on a terminal: rich.

Apart from base.command, since importing rich takes longer than most commands.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from rich.console import Console, RenderableType
from rich.measure import Measurement

WIDTH_MOST: Final = 10_000
"""Columns of what no terminal limits."""


class _Plain(Console):
    """Of what is no terminal: lines are neither cut nor folded, and end without blanks."""

    def print(self, *objects: Any, **how: Any) -> None:
        with self.capture() as captured:
            super().print(*objects, **how)
        self.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))
        self.file.flush()


def console() -> Console:
    """Of stdout."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    return _Plain(highlight=False, markup=False, width=WIDTH_MOST)


def show(*parts: RenderableType) -> None:
    """Prints tables on stdout, one below the other. On a terminal that is too narrow for them lines
    are longer than it: figures are not folded.
    """
    target = console()
    options = target.options.update_width(WIDTH_MOST)
    needed = max(Measurement.get(target, options, part).minimum for part in parts)
    target.width = max(target.width, needed)
    target.print(*parts, sep="\n")


@contextlib.contextmanager
def display(elsewhere: Callable[[Any], None]) -> Iterator[Callable[[Any], None]]:
    """On a terminal: shows what it is given in the place of what it was given before. In a script:
    `elsewhere`.
    """
    if not sys.stdout.isatty():
        yield elsewhere
        return
    from rich.live import Live

    with Live(console=console(), auto_refresh=False) as live:
        yield lambda shown: live.update(shown, refresh=True)
