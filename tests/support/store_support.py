"""What the store's tests share: opening one, reading as the front does, checking its invariants."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from fusecache import _native
from fusecache.store import Location, Store, StoreSettings, Version
from fusecache.store.index import Index
from fusecache.store.types import BLOCK_BYTES
from tests.support.trees import random_bytes

MIB = 1 << 20
DATASET = b"0123456789abcdef"


class Opened:
    """A store with what it reported. `get` is the story of a read: verified bytes or None."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int = 64 * MIB,
        keep_free_bytes: int = 0,
        policy: str = "lrf",
        digest: str = "xxh3-128",
        further: Sequence[Path] = (),
        pinned: Callable[[], Collection[int] | None] = frozenset,
    ) -> None:
        self.faults: list[tuple[str, str]] = []
        self.gone: list[int] = []
        self.directory = directory
        self.settings = StoreSettings(limit_bytes, keep_free_bytes, policy, digest)
        self.store = Store.open(
            directory,
            self.settings,
            further=further,
            pinned=pinned,
            on_fault=lambda kind, message: self.faults.append((kind, message)),
            on_segment_gone=self.gone.append,
        )

    @property
    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.faults}

    def put(
        self, path: bytes, payload: bytes, version: Version | None = None, block: int = 0
    ) -> Location | None:
        return self.store.put(DATASET, path, version or version_of(payload), block, payload)

    def put_many(
        self, files: Iterable[tuple[bytes, bytes]], evict: bool = True
    ) -> list[Location | None]:
        """One batch of (path, payload)."""
        items = [(path, version_of(payload), 0, payload) for path, payload in files]
        return self.store.put_many(DATASET, items, evict=evict)

    def find(self, path: bytes, version: Version, block: int = 0) -> Location | None:
        return self.store.lookup(DATASET, path, version, block)

    def get(self, path: bytes, version: Version, block: int = 0) -> bytes | None:
        location = self.find(path, version, block)
        return None if location is None else self.read(location)

    def read(self, location: Location) -> bytes | None:
        """As the front does: header and chunk sums verified, and nothing else."""
        fd = self.store.open_segment(location.segno)
        if fd is None:
            return None
        segno, offset, header_len, payload_len = location
        try:
            return _native.read_record(fd, offset, header_len, payload_len, segno)
        except (ValueError, OSError):
            self.store.quarantine(location.segno, location.offset)
            return None
        finally:
            os.close(fd)

    def segments(self) -> list[Path]:
        return sorted((self.directory / "segments").glob("*.seg"))

    def bad_after_verify(self, dataset: bytes | None = None) -> tuple[int, int]:
        """(records read, bad ones)."""
        results = list(self.store.verify(dataset))
        return len(results), sum(fault is not None for *_, fault in results)

    def close(self) -> None:
        self.store.close()

    # ---- what takes place by itself, now ----
    @property
    def index(self) -> Index | None:
        return self.store._attachment.current.index

    def kill(self) -> None:
        """As kill -9: nothing sealed, nothing flushed."""
        self.store._attachment.detach()

    def seal(self) -> None:
        self.store._segment.seal()

    def suspect(self) -> None:
        """The next housekeeping compares index and files."""
        self.store._attachment.suspect()

    def end_pause(self) -> None:
        """After a fault, or a full cache."""
        self.store._attachment.faults._paused_until = 0.0

    def repair_now(self) -> None:
        """With the next housekeeping or put, however short ago the last time was."""
        self.store._attachment.current._repair_at = 0.0


@contextlib.contextmanager
def opened(directory: Path, **settings: object) -> Iterator[Opened]:
    store = Opened(directory, **settings)  # type: ignore[arg-type]
    try:
        yield store
    finally:
        store.close()


def version_of(payload: bytes, ino: int = 7) -> Version:
    return Version(ino, len(payload), 1_700_000_000_000_000_000, 1_700_000_000_000_000_001)


def content(seed: int, length: int) -> bytes:
    return random_bytes(seed, length)


def disk_bytes(directory: Path) -> int:
    """What the directory occupies, without the directories' own blocks."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def check_invariants(store: Opened) -> None:
    """INVARIANT: the hard limit holds, on disk too, and rows point into segments that exist."""
    usage = store.store.usage()
    assert usage.reserved_bytes <= usage.limit_bytes
    assert disk_bytes(store.directory) <= usage.limit_bytes
    path = max((store.directory / "index").glob("*.db"))
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        segments = {row[0] for row in connection.execute("SELECT segno FROM segments")}
        for table in ("files", "blocks"):
            used = {row[0] for row in connection.execute(f"SELECT DISTINCT segno FROM {table}")}
            assert used <= segments
    finally:
        connection.close()
    assert segments == {int(path.stem) for path in store.segments()}


def blocks_of(payload: bytes) -> list[bytes]:
    return [payload[at : at + BLOCK_BYTES] for at in range(0, len(payload), BLOCK_BYTES)]
