"""How a tool that has to clean up is ended."""

import signal
from types import FrameType


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
