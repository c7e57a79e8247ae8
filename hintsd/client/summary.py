"""What became of each DataLoader below `hintsd run`, or would become of it (`hintsd explain`): its
process notes it in a file, line by line, and the command that made the file sums the lines up at
the end.

What `hintsd run` was asked for comes by environment variables, which its children inherit.
INVARIANT: a note never fails, and is one write: processes do not tear each other's lines.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from typing import Final

NOTES: Final = "HINTSD_NOTES"  # the file
REQUIRE: Final = "HINTSD_REQUIRE"
COPY_SAMPLERS: Final = "HINTSD_COPY_SAMPLERS"
EXPLAIN: Final = "HINTSD_EXPLAIN"  # autohint/ knows these words, too

FAILED: Final = "failed"
"""Besides a job's states: it was given up, be it that it was hinted before."""
WOULD_BE: Final = "would be"
WOULD_NOT_BE: Final = "would not be"
NEEDLESS: Final = "needless"
"""What `hintsd explain` has noted: hinted, not hinted, not hinted for there is no need."""
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
UNANSWERED: Final = "hintsd has not answered"


class NotHinted(RuntimeError):
    """`hintsd run --require`: a DataLoader of the script is not hinted."""


def is_set(variable: str) -> bool:
    """REQUIRE, COPY_SAMPLERS or EXPLAIN."""
    return os.environ.get(variable) == "1"


def reason(warning: str) -> str:
    """Of a warning, in one line: why, without what becomes of it."""
    return " ".join(warning.split()).partition("; going on without")[0]


def note(loader: int, state: str, why: str) -> bool:
    """Of this process's loader of that number. Whether it is noted: not without a `hintsd run`."""
    path = os.environ.get(NOTES)
    if not path:
        return False
    line = json.dumps([os.getpid(), loader, state, reason(why)]) + "\n"
    try:
        notes = os.open(path, _APPEND)
        try:
            os.write(notes, line.encode())
        finally:
            os.close(notes)
    except OSError:  # another machine's, or the disk is full
        return False
    return True


def _read(line: bytes) -> tuple[int, int, str, str] | None:
    try:
        pid, loader, state, why = json.loads(line)
    except (ValueError, TypeError):
        return None
    are_numbers = isinstance(pid, int) and isinstance(loader, int)
    if not (are_numbers and isinstance(state, str) and isinstance(why, str)):
        return None
    return pid, loader, state, why


class Summary:
    """Of the notes of all processes: how many loaders were hinted, and why others were not. A line
    that is no note (the disk was full, say) is left out.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        outcome: dict[tuple[int, int], str | None] = {}  # None: hinted
        for line in lines:
            if (noted := _read(line)) is None:
                continue
            pid, loader, state, why = noted
            known = outcome.get((pid, loader), UNANSWERED)
            if state == "hinted":
                outcome[pid, loader] = None
            elif state in ("wrong", FAILED) or known is not None:
                outcome[pid, loader] = why or known or state
        self.hinted = sum(why is None for why in outcome.values())
        self.reasons = Counter(why for why in outcome.values() if why is not None)

    @property
    def is_whole(self) -> bool:
        """Whether there were loaders, and all were hinted."""
        return self.hinted > 0 and not self.reasons

    def __str__(self) -> str:
        count = sum(self.reasons.values())
        if not self.hinted and not count:
            return "no DataLoader was read"
        line = f"{self.hinted} {'loader' if self.hinted == 1 else 'loaders'} hinted"
        told = [why if n == 1 else f"{why} ({n} loaders)" for why, n in self.reasons.items()]
        return f"{line}, {count} not: {'; '.join(told)}" if count else line


class Explained:
    """Of the notes of all processes below `hintsd explain`: a line for each loader; what several
    processes say of their loaders of one number is one line.
    """

    def __init__(self, lines: Iterable[bytes]) -> None:
        told = Counter(noted[1:] for line in lines if (noted := _read(line)) is not None)
        self.lines = [
            line if count == 1 else f"{line} (in {count} processes)"
            for (_, _, line), count in told.items()
        ]
        states = {state for _, state, _ in told}
        self.is_whole = WOULD_BE in states and WOULD_NOT_BE not in states
        """Whether there are loaders to be hinted, and all would be."""
