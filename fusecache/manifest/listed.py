"""Manifests in memory: the digests of a file's blocks, by its path and version."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable
from typing import Final

import numpy as np

from fusecache.manifest.format import Entry

_KEY_BYTES: Final = 16


class Listed:
    """Complete once made. 64 bytes a file of one block.

    INVARIANT: digests are found only for the path and version (inode number 0, in an entry or a
    question: it does not count) of their entry; with `of_copies` for path, size and mtime. What two
    entries hash to is cryptographic: paths are chosen by others.
    """

    def __init__(self, entries: Iterable[Entry] = (), *, of_copies: bool = False) -> None:
        """As many as `entries` yields; raises what it raises."""
        self._of_copies = of_copies
        keys, digests = bytearray(), bytearray()
        self._inos, self._ends = array("Q"), array("Q", [0])
        for path, ino, size, mtime_ns, ctime_ns, names in entries:
            keys += self._key(path, size, mtime_ns, ctime_ns)
            self._inos.append(0 if of_copies else ino)
            digests += names
            self._ends.append(len(digests))
        self._keys, self._digests = bytes(keys), bytes(digests)
        halves = np.frombuffer(self._keys, "<u8")[::2]
        self._order = np.argsort(halves, kind="stable")
        self._sorted = halves[self._order]

    @property
    def digests(self) -> bytes:
        """Of all blocks, one behind the other."""
        return self._digests

    def __len__(self) -> int:
        return len(self._inos)

    def find(self, path: bytes, ino: int, size: int, mtime_ns: int, ctime_ns: int) -> bytes | None:
        """The digests of its blocks, one behind the other; None: it is not listed. Of entries that
        are equal but for these, the last one's.
        """
        if not self._inos:
            return None
        key = self._key(path, size, mtime_ns, ctime_ns)
        half = np.uint64(int.from_bytes(key[:8], "little"))
        at = int(np.searchsorted(self._sorted, half, "right")) - 1
        while at >= 0 and self._sorted[at] == half:
            number = int(self._order[at])
            is_it = self._keys[number * _KEY_BYTES : (number + 1) * _KEY_BYTES] == key
            if is_it and (self._inos[number] in (0, ino) or not ino):
                return self._digests[self._ends[number] : self._ends[number + 1]]
            at -= 1
        return None

    def _key(self, path: bytes, size: int, mtime_ns: int, ctime_ns: int) -> bytes:
        told = struct.pack("<Qqq", size, mtime_ns, 0 if self._of_copies else ctime_ns)
        return hashlib.blake2b(told + path, digest_size=_KEY_BYTES).digest()
