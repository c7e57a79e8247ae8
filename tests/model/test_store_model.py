"""Random operations on the store against a dictionary, with two handles, crashes and damage.

The model knows, of each file, the version and content last put, and whether the store is allowed to
have lost it: evicted, or damaged since. Never allowed: other bytes, another version, more than the
limit.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fusecache.store import Version
from fusecache.store.types import Item, Location
from tests.support.store_support import DATASET, Opened, check_invariants, content, disk_bytes

MIB = 1 << 20
LIMIT = 22 * MIB

paths = st.sampled_from([b"a", b"b", b"d/a", b"d/b", b"d/e/f", b"\xff\xfe"])
lengths = st.sampled_from([1, 100, 4096, 65536, 65537, 300_000, MIB, 3 * MIB])
seeds = st.integers(0, 5)
handles = st.integers(0, 1)


@dataclass
class Known:
    version: Version
    payload: bytes
    segno: int
    may_be_lost: bool = False
    rewritten: bool = False


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.model: dict[bytes, Known] = {}
        self.versions: dict[
            bytes, set[Version]
        ] = {}  # all that were ever put: a rebuild meets them
        self.writers: dict[bytes, set[int]] = {}  # handles that have put the path since a flush
        self.index_was_flipped = False
        self.was_damaged = False
        self.damaged: set[int] = set()  # segments, and those that were deleted
        self.source = random.Random(0)
        self.stores: list[Opened] = []

    @initialize(seed=st.integers(0, 1 << 20))
    def begin(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.stores = [self.open(), self.open()]

    def open(self) -> Opened:
        return Opened(self.directory / "cache", limit_bytes=LIMIT)

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.directory)

    def after_eviction(self) -> None:
        gone = {segno for store in self.stores for segno in store.gone}
        for known in self.model.values():
            known.may_be_lost |= known.segno in gone

    def all_may_be_lost(self) -> None:
        self.was_damaged = True
        for known in self.model.values():
            known.may_be_lost = True

    def index_is_built_anew(self) -> None:
        """Of a file that was put in several versions, a rebuild may find an older one last."""
        for known in self.model.values():
            known.may_be_lost |= known.rewritten

    # ---- what users do ----
    @rule(handle=handles, path=paths, seed=seeds, length=lengths, ino=st.integers(1, 2))
    def put(self, handle: int, path: bytes, seed: int, length: int, ino: int) -> None:
        payload = content(seed, length)
        version = Version(ino, length, seed, seed + 1)
        location = self.stores[handle].put(path, payload, version)
        self.know(handle, path, version, payload, location)
        self.after_eviction()

    def know(
        self, handle: int, path: bytes, version: Version, payload: bytes, at: Location | None
    ) -> None:
        before = self.model.pop(path, None)
        versions = self.versions.setdefault(path, set())
        versions.add(version)
        if at is None:
            return
        rewritten = len(versions) > 1 or (before is not None and before.rewritten)
        # Behind a damaged record, or in a file that is gone, it may be lost although it came later.
        may_be_lost = self.is_disputed(handle, path) or at.segno in self.damaged
        self.model[path] = Known(version, payload, at.segno, may_be_lost, rewritten)
        assert self.stores[handle].read(at) in (None, payload)

    def is_disputed(self, handle: int, path: bytes) -> bool:
        """Of versions that two handles have put at the same time the one committed last stays."""
        writers = self.writers.setdefault(path, set())
        writers.add(handle)
        return len(writers) > 1

    @rule(
        handle=handles,
        files=st.lists(st.tuples(paths, seeds, lengths, st.integers(1, 2)), max_size=12),
        evict=st.booleans(),
    )
    def put_many(self, handle: int, files: list[tuple[bytes, int, int, int]], evict: bool) -> None:
        store = self.stores[handle]
        items: list[Item] = [
            (path, Version(ino, length, seed, seed + 1), 0, content(seed, length))
            for path, seed, length, ino in files
        ]
        gone = len(store.gone)
        found = store.store.put_many(DATASET, items, evict=evict)
        for (path, version, _, payload), location in zip(items, found, strict=True):
            self.know(handle, path, version, bytes(payload), location)
            assert location is None or location.segno not in store.gone[gone:]
        self.after_eviction()

    @rule(handle=handles, path=paths)
    def get(self, handle: int, path: bytes) -> None:
        known = self.model.get(path)
        if known is None:
            return
        self.stores[0].store.flush()
        self.stores[1].store.flush()
        self.writers.clear()
        self.after_eviction()
        found = self.stores[handle].get(path, known.version)
        if found is None:
            assert known.may_be_lost
            del self.model[path]
        else:
            assert found == known.payload

    @rule(handle=handles, path=paths, seed=seeds, length=lengths)
    def get_any_version(self, handle: int, path: bytes, seed: int, length: int) -> None:
        version = Version(1, length, seed, seed + 1)
        assert self.stores[handle].get(path, version) in (None, content(seed, length))

    @rule(handle=handles, directory=st.sampled_from([b"", b"d", b"d/e"]))
    def list_directory(self, handle: int, directory: bytes) -> None:
        store = self.stores[handle]
        for name, version, location in store.store.lookup_directory(DATASET, directory):
            assert b"/" not in name
            expected = content(version.mtime_ns, version.size)
            assert store.read(location) in (None, expected)

    @rule(handle=handles, path=paths)
    def quarantine(self, handle: int, path: bytes) -> None:
        known = self.model.get(path)
        if known is None:
            return
        location = self.stores[handle].find(path, known.version)
        if location is not None:
            self.stores[handle].store.quarantine(location.segno, location.offset)
            assert self.stores[handle].find(path, known.version) is None
            self.all_may_be_lost()  # others may share the record

    @rule(handle=handles, chosen=st.sets(paths, max_size=4), is_sealed=st.booleans())
    def evict(self, handle: int, chosen: set[bytes], is_sealed: bool) -> None:
        for store in self.stores:
            store.store.flush()
            if is_sealed:
                store.seal()
        self.writers.clear()
        self.after_eviction()
        files = [(path, self.model[path].version) for path in sorted(chosen & self.model.keys())]
        found, _ = self.stores[handle].store.evict(DATASET, files)
        for (path, version), places in zip(files, found, strict=True):
            if places is not None:
                assert self.stores[handle].find(path, version) is None
                del self.model[path]
        for known in self.model.values():
            known.rewritten = True  # an entry may be gone: a new index does not know of it
        self.after_eviction()

    @rule(handle=handles)
    def housekeeping(self, handle: int) -> None:
        self.stores[handle].suspect()
        self.stores[handle].store.housekeeping()
        self.after_eviction()

    @rule(handle=handles)
    def verify(self, handle: int) -> None:
        for at, fault in self.stores[handle].store.verify(None):
            if fault:
                assert self.was_damaged
                self.stores[handle].store.quarantine(at.segno, at.offset)

    # ---- what happens to them ----
    @rule(handle=handles)
    def reopen(self, handle: int) -> None:
        self.stores[handle].close()
        self.stores[handle] = self.open()
        self.after_eviction()

    @rule(handle=handles)
    def crash(self, handle: int) -> None:
        self.after_eviction()
        self.stores[handle].kill()
        self.stores[handle] = self.open()
        self.index_is_built_anew()

    @rule()
    def flip_a_bit_in_a_segment(self) -> None:
        found = self.stores[0].segments()
        if found:
            chosen = self.source.choice(found)
            self.damaged.add(int(chosen.stem))
            self.flip(chosen)

    @rule()
    def flip_bits_in_the_index(self) -> None:
        for store in self.stores:
            store.store.flush()
        for path in (self.directory / "cache/index").glob("*.db"):
            for _ in range(3):
                self.flip(path)
            self.index_was_flipped = True

    def flip(self, path: Path) -> None:
        size = path.stat().st_size
        if size:
            with path.open("r+b") as file:
                at = self.source.randrange(size)
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 1 << self.source.randrange(8)]))
        self.all_may_be_lost()

    @rule()
    def delete_a_segment(self) -> None:
        found = self.stores[0].segments()
        if found:
            chosen = self.source.choice(found)
            self.damaged.add(int(chosen.stem))
            chosen.unlink()
            self.all_may_be_lost()

    @rule(handle=handles)
    def delete_the_index(self, handle: int) -> None:
        for store in self.stores:
            store.store.flush()
        for path in (self.directory / "cache/index").glob("*.db*"):
            path.unlink()
        self.index_was_flipped = False
        for store in (self.stores[handle], self.stores[1 - handle]):
            store.repair_now()
            store.store.housekeeping()
        self.after_eviction()
        self.index_is_built_anew()

    @rule()
    def delete_the_directory(self) -> None:
        self.damaged |= {int(path.stem) for path in self.stores[0].segments()}
        shutil.rmtree(self.directory / "cache")
        for store in self.stores:
            store.store.housekeeping()
        self.all_may_be_lost()

    @invariant()
    def limit_holds(self) -> None:
        assert disk_bytes(self.directory) <= LIMIT
        for store in self.stores:
            store.end_pause()
            store.repair_now()

    @invariant()
    def sound_after_mending(self) -> None:
        if self.source.randrange(10) == 0 and self.stores:
            for store in (*self.stores, self.stores[0]):
                store.suspect()
                store.store.housekeeping()
            self.after_eviction()
            if not self.index_was_flipped:
                check_invariants(self.stores[0])


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
