"""Manifests that are believed: whose they are, and what a mount takes from its own (S8 of
SECURITY.md).

INVARIANT: nothing of one is believed before it was read to its end, and found right.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from fusecache.base import trust
from fusecache.base.digest import ALGORITHMS, digest_bytes
from fusecache.base.errors import AWAY_ERRNOS
from fusecache.base.units import format_count
from fusecache.manifest.format import NAME, ManifestError, Reader
from fusecache.manifest.listed import Listed

log = logging.getLogger(__name__)

AUTO: Final = "auto"
NONE: Final = "none"
AGAIN_S: Final = 10.0


def read(fd: int, algorithm: int, *, of_copies: bool = False) -> Listed:
    """All of the manifest. ManifestError, also where it has digests of another algorithm; OSError.
    Takes the descriptor.
    """
    with open(fd, "rb") as file:
        reader = Reader(file, os.fstat(fd).st_size)
        check_algorithm(reader, algorithm)
        return Listed(reader.entries(), of_copies=of_copies)


def check_algorithm(reader: Reader, algorithm: int) -> None:
    """ManifestError: it is another."""
    if reader.algorithm != algorithm:
        names = {number: name for name, number in ALGORITHMS.items()}
        raise ManifestError(
            f"its digests are {names[reader.algorithm]}, and {names[algorithm]} is wanted"
        )


def why(path: str, error: OSError | ManifestError) -> str:
    """Why it is not believed: a line."""
    if isinstance(error, trust.Untrusted):  # it names the path
        return str(error.strerror)
    return f"{path}: {error.strerror if isinstance(error, OSError) else error}"


class Manifest:
    """That of one mount. Empty until it was read: then what is looked up goes to the origin."""

    def __init__(
        self,
        setting: str,
        source: str,
        source_fd: int,
        digest: str,
        is_of_cache: bool = True,
        on_loaded: Callable[[bytes], object] = lambda _: None,
    ) -> None:
        """`setting`: `auto`, `none`, or the path of the file. `is_of_cache`: `digest` is that of
        the mount's own cache, too. `on_loaded` is told the digests that it lists.
        """
        self.is_of_cache = is_of_cache
        self._on_loaded = on_loaded
        self._setting = setting
        self._path = os.path.join(source, NAME) if setting == AUTO else setting
        self._source_fd = source_fd
        self._algorithm = ALGORITHMS[digest]
        self._listed = Listed()
        self._why_not = ""
        self._tried = threading.Event()
        self._thread = threading.Thread(target=self._load, name="manifest", daemon=True)

    def begin(self) -> None:
        """Read it, in a thread of its own: it may lie at the origin, which hangs, or below the
        mount itself. While the origin is away it is tried again.
        """
        self._thread.start()

    def wait(self, seconds: float) -> str:
        """Until that was tried, so long at most; a line, if it is not used. Blocking."""
        self._tried.wait(seconds)
        return self._why_not

    def _load(self) -> None:
        try:
            while not self._is_over():
                self._tried.set()
                time.sleep(AGAIN_S)
        finally:
            self._tried.set()

    def _is_over(self) -> bool:
        """False: try again."""
        if self._setting == NONE:
            return True
        try:
            if self._setting == AUTO:  # by its path it may lie below the mount
                fd = trust.open_in(self._source_fd, NAME, self._path)
            else:
                fd = trust.open_file(self._path)
            self._listed = read(fd, self._algorithm)
        except (OSError, ManifestError) as error:
            if isinstance(error, OSError) and error.errno in AWAY_ERRNOS:
                return False
            if not (isinstance(error, FileNotFoundError) and self._setting == AUTO):
                self._refuse(error)
        else:
            log.info("manifest %s: %s listed", self._path, format_count(self.files, "file"))
            self._on_loaded(self._listed.digests)
        return True

    def _refuse(self, error: OSError | ManifestError) -> None:
        self._why_not = f"the manifest is not used: {why(self._path, error)}"
        log.warning("%s", self._why_not)

    @property
    def why_not(self) -> str:
        """It is not used, although there is one: a line; "": it is, or there is none."""
        return self._why_not

    @property
    def files(self) -> int:
        """How many it lists."""
        return len(self._listed)

    def find(self, path: bytes, version: tuple[int, int, int, int], block: int) -> bytes | None:
        """The digest of this block of a file (inode number 0, size, mtime, ctime in ns); None: it
        does not say. Any thread.
        """
        names = self._listed.find(path, *version)
        if names is None:
            return None
        length = digest_bytes(self._algorithm)
        return names[block * length : (block + 1) * length] or None
