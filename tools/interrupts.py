"""How a tool that has to clean up is ended."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType

from rich.console import Console


def end_on_signals() -> None:
    """SIGINT and SIGTERM raise KeyboardInterrupt, once: nothing disturbs the cleaning up then. Nor
    does torch, which would raise when it hears (SIGCHLD) that its workers were ended by the same
    signal.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)


def _end(number: int, frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    raise KeyboardInterrupt


@contextlib.contextmanager
def failing_in_a_line(console: Console) -> Iterator[None]:
    """What goes wrong within ends the process: one line, exit code 1; of a signal 130."""
    try:
        yield
    except KeyboardInterrupt:
        console.print("[bold red]FAIL[/]: interrupted; everything was cleaned up")
        sys.exit(130)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        console.print(f"[bold red]FAIL[/]: {error}", highlight=False, soft_wrap=True)
        sys.exit(1)
