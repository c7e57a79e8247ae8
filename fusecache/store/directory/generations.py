"""Index generations: their files, and the lock under which one is built."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fusecache.store.directory.member import READ_WRITE, numbers

_INDEX_NAME: Final = re.compile(r"(\d{8,18})\.db")


class Generations:
    """Of the directory that is home. `folder`: where they lie."""

    def __init__(self, folder: Path) -> None:
        """Create what is missing. OSError."""
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)
        self._lock_fd = os.open(folder / "lock", READ_WRITE, 0o600)

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = -1

    def is_there(self) -> bool:
        """Is the lock that we have still the one that others find? OSError: no."""
        return os.fstat(self._lock_fd).st_nlink > 0

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Exclusive: a generation is looked for or built."""
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def try_share(self) -> bool:
        """Shared: a segment is created. False: a generation is being built. See `unshare`."""
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unshare(self) -> None:
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    def newest(self) -> int:
        """Number of the newest index, 0 when there is none."""
        return max(numbers(self.folder, _INDEX_NAME), default=0)

    def path(self, generation: int) -> Path:
        return self.folder / f"{generation:08d}.db"

    def remove(self, below: int) -> None:
        """Older generations, their WALs, and what a killed builder left."""
        for entry in list(os.scandir(self.folder)):
            number = re.match(r"(\d{8,18})\.", entry.name)
            old = number is not None and int(number[1]) < below
            if old or ".tmp" in entry.name:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
