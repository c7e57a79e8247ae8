"""A group: the blocks of one dataset, known by the set of their digests (docs/CACHED.md).

INVARIANT: what its segments hold are blocks of its set; each digest was computed here.
Any thread, but for what says otherwise.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from fusecache import _native
from fusecache.base.digest import ALGORITHMS, digest
from fusecache.cached.numbers import AT_ONCE, Numbers, sync_folder
from fusecache.cached.talk import NAME_BYTES
from fusecache.store import Store
from fusecache.store.types import Location, StoreSettings, Version

log = logging.getLogger(__name__)

BLAKE3: Final = ALGORITHMS["blake3"]
_DATASET_BYTES: Final = 16
_SET, _OWNER, _STORE = "digests", "owner", "store"
Data = bytes | bytearray | memoryview
_NUMBERS_LEFT: Final = 16  # a put takes a few at most, also one that fails


def is_folder(name: str) -> bool:
    """Whether a group's folder may have this name; also one that is not whole, or removed."""
    return re.fullmatch(r"[0-9a-f]{64}|\.[0-9a-f]{64}-[-0-9]+", name) is not None


def caches_in(root: Path) -> list[Path]:
    """The cache directories of all groups there."""
    return [folder / _STORE for folder in root.iterdir() if is_folder(folder.name)]


class NotAGroup(Exception):
    """A folder that holds none, or a set of another name; one line."""


def name_of(digests: bytes | mmap.mmap) -> bytes:
    """Of the group with this set: sorted, each once."""
    return digest(BLAKE3, memoryview(digests))


def set_of(digests: bytes) -> bytes:
    """Sorted, each once."""
    return np.unique(np.frombuffer(digests, f"S{NAME_BYTES}")).tobytes()


class NewSet:
    """The set of a group that is made: it comes in pieces. One thread."""

    def __init__(self, root: Path, name: bytes, owner: int, reserved_bytes: int) -> None:
        """`reserved_bytes`: of SSD, for the group. OSError."""
        self.name, self.owner, self.reserved_bytes = name, owner, reserved_bytes
        self._final = root / name.hex()
        self._folder = root / f".{name.hex()}-{os.getpid()}-{time.monotonic_ns()}"
        self._folder.mkdir(mode=0o700)
        with (self._folder / _OWNER).open("w", encoding="ascii") as file:
            file.write(f"{owner}\n")
            file.flush()
            os.fsync(file.fileno())
        self._file = (self._folder / _SET).open("x+b")

    def add(self, data: bytes | bytearray) -> None:
        self._file.write(data)

    def check(self) -> None:
        """It is complete, and on the disk. NotAGroup: it is no set, or that of another name;
        OSError.
        """
        self._file.flush()
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as digests:
            if not is_set(digests) or name_of(digests) != self.name:
                raise NotAGroup("these digests are not the set of that name")
        os.fsync(self._file.fileno())
        sync_folder(self._folder)

    def finish(self) -> Path:
        """The group's folder. After `check`. OSError."""
        if self._final.exists():  # one that could not be opened
            remove(self._final)
        os.rename(self._folder, self._final)
        sync_folder(self._final.parent)
        return self._final

    def close(self) -> None:
        self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def is_set(digests: bytes | mmap.mmap) -> bool:
    """Sorted, each once."""
    if not len(digests) or len(digests) % NAME_BYTES:
        return False
    rows = np.frombuffer(digests, f"S{NAME_BYTES}")
    return bool((rows[:-1] < rows[1:]).all())


class Group:
    """Opened. `limit_bytes` of SSD are its part now, `set_bytes` of them for its set; a mount last
    used it at `used_s` (monotonic); so many `connections` are about it.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        numbers: Numbers,
        on_fault: Callable[[str, str], None],
    ) -> None:
        """NotAGroup, UserError, OSError."""
        self._numbers = numbers
        self._lock = threading.Lock()  # a put at a time
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.used_s = time.monotonic()
        self.connections = 0
        self.is_closed = False
        self.is_short = True  # of room, perhaps: a segment was begun
        try:
            self.name = bytes.fromhex(folder.name)
            self.owner = int((folder / _OWNER).read_text(encoding="ascii"))
            with (folder / _SET).open("rb") as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, FileNotFoundError) as error:
            raise NotAGroup(f"{folder}: {error}") from None
        if not is_set(self._mapped) or name_of(self._mapped) != self.name:
            raise NotAGroup(f"{folder}: its set is damaged")
        self._set = np.frombuffer(self._mapped, f"S{NAME_BYTES}")
        self.set_bytes = len(self._mapped)
        settings = StoreSettings(limit_bytes, 0, policy="lrf", digest="blake3")
        (folder / _STORE).mkdir(mode=0o700, exist_ok=True)
        self.store = Store.open(
            folder / _STORE, settings, on_fault=on_fault, on_segment_gone=lambda _: None
        )
        self._numbers_end = 0
        self._is_numbering = True  # numbers may have been used
        self._why_not = ""  # nothing can be put
        self._newest = 0  # segment
        self._number()

    def enter(self) -> None:
        """One more connection uses it; then `leave`. A thread at a time."""
        self.connections += 1
        self.used_s = time.monotonic()

    def leave(self) -> None:
        self.connections -= 1
        self.used_s = time.monotonic()

    def has_grown(self) -> None:
        """As far as it may, until another segment is begun."""
        self.is_short = False

    def __contains__(self, name: object) -> bool:
        """Whether the digest is of its set."""
        assert isinstance(name, bytes)
        wanted = np.frombuffer(name, f"S{NAME_BYTES}")
        at = int(np.searchsorted(self._set, wanted)[0])
        return at < len(self._set) and self._set[at : at + 1].tobytes() == name

    def find(self, blocks: Sequence[tuple[bytes, int]]) -> list[Location | None]:
        """Where these (digest, length) lie; None: not here."""
        ours = [block for block in blocks if block[0] in self]
        at = dict(zip(ours, self.store.lookup_blocks(ours), strict=True))
        return [at.get(block) for block in blocks]

    def read(self, name: bytes, length: int) -> bytes | None:
        """The block, verified; None: it is not here."""
        (at,) = self.find([(name, length)])
        fd = self.store.open_segment(at.segno) if at is not None else None
        if at is None or fd is None:
            return None
        try:
            return _native.read_record(fd, at.offset, at.header_len, at.payload_len, at.segno)
        except ValueError:
            self.store.quarantine(at.segno, at.offset)
            return None
        finally:
            os.close(fd)

    def put(self, blocks: Sequence[tuple[bytes, Data]]) -> list[Location | None]:
        """They have these digests, which are of the set. None: there is no room, or the disk
        failed.
        """
        items = [
            (name.hex().encode(), Version(0, len(data), 0, 0), 0, data) for name, data in blocks
        ]
        with self._lock:
            try:
                self._number()
            except OSError as error:  # the disk that has the numbers
                if self._why_not != str(error):
                    log.warning("nothing can be put: %s", error)
                self._why_not = str(error)
                return [None] * len(blocks)
            self._why_not = ""
            found = self.store.put_many(
                self.name[:_DATASET_BYTES], items, evict=True, whatever_is_used=True
            )
            newest = max((at.segno for at in found if at is not None), default=0)
            if newest > self._newest or None in found:
                self._newest = max(newest, self._newest)
                self.is_short = self._is_numbering = True
        return found

    def _number(self) -> None:
        """Have numbers for segments to come. OSError."""
        if not self._is_numbering:
            return
        highest = self.store.number_from(0)
        if highest >= self._numbers_end - _NUMBERS_LEFT:
            first = self._numbers.take()
            self.store.number_from(first - 1)
            self._numbers_end = first + AT_ONCE
        self._is_numbering = False

    def open_segment(self, segno: int) -> int | None:
        """A descriptor that reads, and has an offset and flags of its own."""
        fd = self.store.open_segment(segno)
        if fd is None:
            return None
        try:  # O_DIRECT: the mount has a page cache of what it reads
            direct = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return fd
        os.close(fd)
        return direct

    def doubt(self, segno: int, offset: int) -> None:
        """A mount says that the record there is bad: it is read, and forgotten if that is so."""
        self.store.flush()  # of what has no row yet nothing would be known
        doubted = [at for at in self.store.records_of(segno) if at.offset == offset]
        for at, fault in self.store.check(doubted):
            if fault:
                self.store.quarantine(at.segno, at.offset)

    def living(self, segnos: frozenset[int]) -> frozenset[int]:
        """Those of these segments that are its own, and are there."""
        return self.store.living(segnos)

    def limit_to(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.store.limit_to(limit_bytes - self.set_bytes)

    def held_bytes(self) -> int:
        return self.set_bytes + self.store.usage().reserved_bytes

    def close(self) -> None:
        """It has nothing any more."""
        self.is_closed = True
        self.store.close()

    def remove(self) -> None:
        self.close()
        remove(self.folder)


def remove(folder: Path) -> None:
    """All of a group, or of what was begun or removed by one that was killed. Room comes back at
    once, also where it is read: segments are truncated.
    """
    dead = folder.with_name(f".{folder.name.lstrip('.')}-{time.monotonic_ns()}")
    with contextlib.suppress(OSError):
        os.rename(folder, dead)
        for segment in (dead / _STORE / "segments").iterdir():
            os.truncate(segment, 0)
    shutil.rmtree(dead, ignore_errors=True)
