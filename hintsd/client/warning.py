"""Warnings to the trainer's user: each reason once in a process, at a line of the script.

INVARIANT: a warning never becomes an exception.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Container
from types import FrameType
from typing import NamedTuple

_warned: set[str] = set()  # reasons that this process has been told


class Place(NamedTuple):
    """A line of the script."""

    file: str
    line: int
    module: str


def script_place(besides: Container[str] = ()) -> Place:
    """The line that called us: of the innermost frame that is neither ours nor torch's, nor of one
    of the packages `besides`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        _package(frame) in ("hintsd", "torch") or _package(frame) in besides
    ):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def was_warned(reason: str) -> bool:
    """Whether this process has been told it."""
    return reason in _warned


def warn_once(message: str, reason: str | None = None, place: Place | None = None) -> None:
    """One RuntimeWarning per process and reason, which never becomes an exception.

    It points at `place` in the script; None: at the line that called us.
    """
    reason = message if reason is None else reason
    if reason in _warned:
        return
    _warned.add(reason)
    file, line, module = place or script_place()
    try:
        warnings.warn_explicit(f"hintsd: {message}", RuntimeWarning, file, line, module)
    except RuntimeWarning:  # the script has made errors of warnings; a hint must not end it
        logging.getLogger("hintsd").warning(message)
