"""What is known of a file under a plan: its Standing (native/plan/plan.h), and how it ended."""

from __future__ import annotations

import stat
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fusecache import _native
from fusecache.base.wire import Result

Inos = NDArray[np.uint32]
Wishes = NDArray[np.uint8]  # how each of them is to be staged (queues.py)
Report = Callable[[bytes, bytes], None]  # inodes (packed u32), a result each


def flags_of(inos: Inos) -> NDArray[np.uint8]:
    return np.frombuffer(_native.plan_flags(inos.tobytes()), np.uint8)


def flags(ino: int) -> int:
    return _native.plan_flags(ino.to_bytes(4, "little"))[0]


def mark(ino: int, add: int, remove: int) -> None:
    _native.plan_mark(ino.to_bytes(4, "little"), add, remove)


def refusal(ino: int) -> int:
    """Why the kernel was not given a file's pages. What is flagged as changed, too young, or
    another version may be tried again.
    """
    is_file = stat.S_ISREG(_native.attributes(ino)[0]) and not _native.is_dead(ino)
    return Result.NOT_PUSHED if is_file else Result.GONE


class Answers:
    """Which plan there is, and what it is told."""

    def __init__(self) -> None:
        self.plan = 0
        """Its number: who has waited looks whether it is still the same."""
        self._report: Report | None = None

    @property
    def report(self) -> Report | None:
        """None: there is no plan."""
        return self._report

    def begin(self, report: Report) -> None:
        self._report = report

    def end(self) -> None:
        self.plan += 1
        self._report = None

    def tell(self, ino: int, result: int) -> None:
        if self._report is not None:
            self._report(ino.to_bytes(4, "little"), bytes((result,)))

    def tell_all(self, inos: Inos, result: int) -> None:
        if self._report is not None and len(inos):
            self._report(inos.tobytes(), bytes((result,)) * len(inos))
