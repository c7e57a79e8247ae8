"""Manifests that are believed: whose they are, and what a mount takes from its own (S8 of
SECURITY.md).

INVARIANT: nothing of one is believed before it was read to its end, and found right.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from fusecache.base import trust
from fusecache.base.digest import ALGORITHMS, digest_bytes
from fusecache.base.units import format_count
from fusecache.manifest.format import NAME, ManifestError, Reader
from fusecache.manifest.listed import Listed

log = logging.getLogger(__name__)

AUTO: Final = "auto"
NONE: Final = "none"


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
    """That of one mount. Empty until it was read."""

    def __init__(self, setting: str, source: str, source_fd: int, digest: str) -> None:
        """`setting`: `auto`, `none`, or the path of the file."""
        self._setting = setting
        self._path = os.path.join(source, NAME) if setting == AUTO else setting
        self._source_fd = source_fd
        self._algorithm = ALGORITHMS[digest]
        self._listed = Listed()
        self._why_not = ""
        self._thread = threading.Thread(target=self._load, name="manifest", daemon=True)

    def begin(self) -> None:
        """Read it, in a thread of its own: it may lie at the origin, which hangs, or below the
        mount itself.
        """
        self._thread.start()

    def wait(self, seconds: float) -> str:
        """Until it is read, so long at most; a line, if it is not used. Blocking."""
        self._thread.join(seconds)
        return self._why_not

    def _load(self) -> None:
        self._why_not = self._read()

    def _read(self) -> str:
        if self._setting == NONE:
            return ""
        try:
            if self._setting == AUTO:  # by its path it may lie below the mount
                fd = trust.open_in(self._source_fd, NAME, self._path)
            else:
                fd = trust.open_file(self._path)
            self._listed = read(fd, self._algorithm)
        except FileNotFoundError as error:
            return "" if self._setting == AUTO else self._refuse(error)
        except (OSError, ManifestError) as error:
            return self._refuse(error)
        log.info("manifest %s: %s listed", self._path, format_count(self.files, "file"))
        return ""

    def _refuse(self, error: OSError | ManifestError) -> str:
        line = f"the manifest is not used: {why(self._path, error)}"
        log.warning("%s", line)
        return line

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
