"""Numbers of segments, no two groups of a service the same, ever (docs/CACHED.md).

A mount knows a segment by its number alone. So one that a group had is never another's, also when
the group is gone.
"""

from __future__ import annotations

import os
import secrets
import threading
from pathlib import Path
from typing import Final

from fusecache.cached.talk import SEGMENTS_FROM

AT_ONCE: Final = 256
"""A group takes so many, and gives them to its segments one by one."""
_BEGIN_MOST: Final = 1 << 30
_ALL: Final = (1 << 32) - AT_ONCE


def sync_folder(path: Path) -> None:
    """Its names are on the disk. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Numbers:
    """Of the service at `root`. Any thread."""

    def __init__(self, root: Path) -> None:
        """OSError, ValueError: the file says no number."""
        self._file = root / "numbers"
        self._lock = threading.Lock()
        try:
            self._next = int(self._file.read_text(encoding="ascii"))
        except FileNotFoundError:  # somebody may remember those of a cache that was here before
            self._next = SEGMENTS_FROM + AT_ONCE + secrets.randbelow(_BEGIN_MOST)

    def take(self) -> int:
        """The first of AT_ONCE. OSError."""
        with self._lock:
            first = self._next
            if first > _ALL:
                raise OSError(f"{self._file}: all numbers were given: begin with an empty --dir")
            new = self._file.with_name(f"{self._file.name}.new")
            with new.open("w", encoding="ascii") as file:
                file.write(f"{first + AT_ONCE}\n")
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._file)
            sync_folder(self._file.parent)
            self._next = first + AT_ONCE
            return first
