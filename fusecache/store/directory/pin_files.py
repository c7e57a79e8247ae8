"""What users have pinned: a file for each source, in `pins/` at home (docs/FORMAT.md, "Pins").

A file that is not ours, or that others may write to, pins nothing.
INVARIANT: a file has its name only when it is complete: it is written under another, fsynced, and
renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any, Final, NamedTuple

from fusecache.base import trust
from fusecache.store.directory.tables import check_folder, checked, files_in

_FOLDER: Final = "pins"
_VERSION: Final = 1
_BYTES_MOST: Final = 16 << 20
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Pinned(NamedTuple):
    """Of one source. Without globs nothing is pinned."""

    globs: tuple[str, ...] = ()
    segnos: frozenset[int] = frozenset()


class PinFiles:
    """Those of one cache."""

    def __init__(self, home: Path) -> None:
        self._path = home.absolute() / _FOLDER
        self._known: dict[str, tuple[object, frozenset[int]]] = {}  # name -> identity, segments

    def size_bytes(self) -> int:
        """What all of them take on the disk; 0: it does not say."""
        return sum(status.st_blocks * 512 for _, status in files_in(self._path))

    def read(self, dataset: bytes) -> Pinned:
        """What is pinned of that source. FileNotFoundError: all of the cache is away; ValueError:
        damaged, or of another version; Untrusted; OSError.
        """
        try:
            return self._read(dataset.hex())
        except FileNotFoundError:
            os.stat(self._path.parent)
            return Pinned()

    def _read(self, name: str) -> Pinned:
        check_folder(self._path)
        path = self._path / name
        with open(checked(os.open(path, _READ), path), "rb") as file:
            data = file.read(_BYTES_MOST)
        try:
            kept = json.loads(data)
            pins = kept["pins"]
            if kept["version"] != _VERSION or kept["checksum"] != _checksum(pins):
                raise ValueError("another version, or damaged")
            return Pinned(tuple(map(str, pins["globs"])), frozenset(map(int, pins["segments"])))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None

    def write(self, dataset: bytes, pinned: Pinned) -> None:
        """Untrusted; OSError: it is as it was."""
        if not pinned.globs:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path / dataset.hex())
            return
        pins = {"globs": list(pinned.globs), "segments": sorted(pinned.segnos)}
        kept = {"version": _VERSION, "pins": pins, "checksum": _checksum(pins)}
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._path, 0o700)
        check_folder(self._path)
        fd, temporary = tempfile.mkstemp(prefix=f"{dataset.hex()}.", suffix=".tmp", dir=self._path)
        try:
            with open(fd, "w", encoding="ascii") as file:
                file.write(json.dumps(kept) + "\n")
                file.flush()
                os.fsync(fd)
            os.replace(temporary, self._path / dataset.hex())
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def segments(self) -> frozenset[int]:
        """Those listed for any source; of what cannot be believed, none."""
        known: dict[str, tuple[object, frozenset[int]]] = {}
        for name, status in files_in(self._path):
            identity = status.st_ino, status.st_mtime_ns, status.st_size
            found = self._known.get(name)
            if found is None or found[0] != identity:
                found = identity, frozenset()
                with contextlib.suppress(ValueError, OSError, trust.Untrusted):
                    if not name.endswith(".tmp"):
                        found = identity, self._read(name).segnos
            known[name] = found
        self._known = known
        return frozenset().union(*(segnos for _, segnos in known.values()))


def _checksum(pins: Any) -> int:
    return zlib.crc32(json.dumps(pins, sort_keys=True).encode())
