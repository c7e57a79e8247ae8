"""A manifest's bytes (docs/FORMAT.md, Manifests)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

from fusecache.base.digest import ALGORITHMS, checksum, digest, digest_bytes
from fusecache.base.units import BLOCK_BYTES

NAME: Final = ".fusecache-manifest"
MAGIC: Final = b"FCMANIF\1"
_HEADER: Final = struct.Struct("<8sB3xI")
_ENTRY: Final = struct.Struct("<H6xQQqq")
_END: Final = struct.Struct("<8xQQ")
_SUM: Final = struct.Struct("<Q")
HEADER_BYTES: Final = _HEADER.size + _SUM.size


class ManifestError(Exception):
    """It cannot be used; the text says why, in a few words."""


class Entry(NamedTuple):
    """A file in one version. `ino` 0: inode numbers mean nothing there. `digests`: of its blocks,
    one behind the other.
    """

    path: bytes
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    digests: bytes


def block_count(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def header(algorithm: int) -> bytes:
    return _summed(_HEADER.pack(MAGIC, algorithm, BLOCK_BYTES))


def entry_bytes(entry: Entry) -> bytes:
    path, *version, digests = entry
    return _summed(_ENTRY.pack(len(path), *version) + path + digests)


def _summed(data: bytes) -> bytes:
    return data + _SUM.pack(checksum(data))


class Whole:
    """Of all entries so far: how many `files`, their `bytes`, and the `digest` of the whole."""

    def __init__(self, algorithm: int) -> None:
        self._algorithm = algorithm
        self.files = self.bytes = 0
        self.digest = digest(algorithm, b"")

    def add(self, entry: Entry) -> None:
        self.files += 1
        self.bytes += entry.size
        told = struct.pack("<QH", entry.size, len(entry.path))
        self.digest = digest(self._algorithm, self.digest + told + entry.path + entry.digests)

    def end(self) -> bytes:
        """What closes the manifest."""
        return _summed(_END.pack(self.files, self.bytes) + self.digest)


class Reader:
    """Of a file of `length` bytes. Reads from front to back, a little at a time."""

    def __init__(self, file: BinaryIO, length: int) -> None:
        """ManifestError: it does not begin as a manifest. OSError."""
        self._file = file
        self._length = length
        data = self._file.read(HEADER_BYTES)
        if len(data) < HEADER_BYTES or not data.startswith(MAGIC[:-1]):
            raise ManifestError("it is no manifest")
        if data[:8] != MAGIC:
            raise ManifestError(f"it has format {data[7]}, which this version does not know")
        self.algorithm: int = data[8]
        if data != header(self.algorithm) or self.algorithm not in ALGORITHMS.values():
            raise ManifestError("its header is damaged")
        self._whole = Whole(self.algorithm)
        self.sound_bytes = HEADER_BYTES
        """Up to the last entry that was read."""

    def entries(self) -> Iterator[Entry]:
        """All of them. ManifestError: it is not whole, or damaged: then none may be believed."""
        while (entry := self._next()) is not None:
            yield entry

    def sound_entries(self) -> Iterator[Entry]:
        """Of what is being written, those that are whole, up to the first that is not."""
        try:
            yield from self.entries()
        except ManifestError:
            return

    def _next(self) -> Entry | None:
        """None: that was the last, and all is right."""
        head = self._read(8, b"")
        if head == bytes(8):
            end = self._whole.end()
            found = self._read(len(end) - len(head), head)
            if found != end or self.sound_bytes + len(end) != self._length:
                raise ManifestError("its end is damaged")
            return None
        head = self._read(_ENTRY.size - len(head), head)
        path_len, ino, size, mtime_ns, ctime_ns = _ENTRY.unpack(head)
        blocks_len = block_count(size) * digest_bytes(self.algorithm)
        data = self._read(path_len + blocks_len + _SUM.size, head)
        body, end_of_path = data[: -_SUM.size], _ENTRY.size + path_len
        if not path_len or _SUM.unpack(data[-_SUM.size :])[0] != checksum(body):
            raise ManifestError("an entry is damaged")
        path, digests = body[_ENTRY.size : end_of_path], body[end_of_path:]
        entry = Entry(path, ino, size, mtime_ns, ctime_ns, digests)
        self._whole.add(entry)
        self.sound_bytes += len(data)
        return entry

    def _read(self, length: int, before: bytes) -> bytes:
        """So much more behind `before`, which was read of this entry."""
        if self.sound_bytes + len(before) + length > self._length:
            raise ManifestError("it ends early")
        data = self._file.read(length)
        if len(data) != length:
            raise ManifestError("it ends early")
        return before + data
