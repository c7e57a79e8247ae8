"""Crashes of a process that rewrites its dataset, replayed from a record of all that it wrote.

The record (of the index, too) is cut everywhere: after each write (a kill), within the last one,
and by power cuts, where of what was written since the last `syncfs` any sectors are missing. Names,
lengths and unlinks are in order, up to some point, as journals have it. Then the directory is
opened.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from fusecache.store import Location
from fusecache.store.index import recovery
from fusecache.store.segment import format as fmt
from tests.crash.rewriting import FILES, LIMIT_BYTES, path_of, payload_of
from tests.support.log_support import Mover
from tests.support.store_support import MIB, Opened, check_invariants, opened, version_of

CREATE, WRITE, TRUNCATE, RENAME, UNLINK, SYNC, ALLOCATE = range(1, 8)
SECTOR = 512
POWER_CUTS = 40
_HEAD = struct.Struct("<IIQQQ")
_ZEROS = bytes(SECTOR * 8)


class Op(NamedTuple):
    kind: int
    path: str
    ino: int
    offset: int
    data: bytes


@dataclass
class Disk:
    """What a replay has made so far."""

    names: dict[str, int] = field(default_factory=dict)
    files: dict[int, bytearray] = field(default_factory=dict)

    def apply(self, op: Op) -> None:
        if op.kind == CREATE and op.path not in self.names:
            self.names[op.path] = op.ino
            self.files[op.ino] = bytearray()
        elif op.kind == RENAME and op.path in self.names:
            self.names[op.data.decode()] = self.names.pop(op.path)
        elif op.kind == UNLINK:
            self.names.pop(op.path, None)
        elif op.ino in self.files:
            data = self.files[op.ino]
            if op.kind == TRUNCATE:
                del data[op.offset :]
            length = op.offset + len(op.data)
            if op.kind in (TRUNCATE, ALLOCATE, WRITE):
                data.extend(bytes(max(0, length - len(data))))
            if op.kind == WRITE:
                data[op.offset : length] = op.data

    def build(self, directory: Path) -> None:
        for name in ("segments", "index"):
            (directory / name).mkdir(parents=True)
        for name, ino in self.names.items():
            if not name.endswith("-shm"):  # memory of processes that are dead
                data = self.files[ino]
                with open(directory / name, "wb") as file:
                    file.write(data[: _used(data)])
                    file.truncate(len(data))

    def held(self) -> set[int]:
        """The numbers of the files that have an intact copy in a segment."""
        segments = [self.files[ino] for name, ino in self.names.items() if name.endswith(".seg")]
        return {n for n, raw in RAW.items() if any(raw in data for data in segments)}


def _used(data: bytearray) -> int:
    """Where the blocks of zeros begin that it ends with. Not `rstrip`, which goes byte by byte."""
    end = len(data)
    while end and _ZEROS.startswith(data[max(0, end - len(_ZEROS)) : end]):
        end = max(0, end - len(_ZEROS))
    return end


RAW = {n: payload_of(n) for n in range(FILES)}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> list[Op]:
    base = tmp_path_factory.mktemp("record")
    library, written, directory = base / "record.so", base / "ops", base / "cache"
    source = Path(__file__).with_name("record_writes.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-D_LARGEFILE64_SOURCE"]
    subprocess.run([*command, "-o", library, source, "-ldl"], check=True)
    settings = {"LD_PRELOAD": library, "RECORD_FILE": written, "RECORD_DIR": directory}
    subprocess.run(
        [sys.executable, "-m", "tests.crash.rewriting", directory],
        env={**os.environ, **{name: str(value) for name, value in settings.items()}},
        cwd=Path(__file__).parents[2],
        check=True,
    )
    return list(_parsed(written.read_bytes(), f"{directory}/"))


def _parsed(data: bytes, prefix: str) -> Iterator[Op]:
    at = 0
    while at < len(data):
        kind, path_len, ino, offset, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        path = data[at : at + path_len].decode().removeprefix(prefix)
        at += path_len
        payload = data[at : at + length]
        at += length
        if kind == RENAME:
            payload = payload.removeprefix(prefix.encode())
        yield Op(kind, path, ino, offset, payload)


def replayed(ops: list[Op]) -> Disk:
    disk = Disk()
    for op in ops:
        disk.apply(op)
    return disk


def look(disk: Disk, directory: Path, must_be_there: set[int]) -> None:
    """Open what a crash left: everything that is found is right, and nothing else is wrong."""
    disk.build(directory)
    try:
        with opened(directory, limit_bytes=LIMIT_BYTES) as store:
            _check(store, must_be_there)
    finally:
        shutil.rmtree(directory)


def _check(store: Opened, must_be_there: set[int]) -> None:
    for n, payload in RAW.items():
        found = store.get(path_of(n), version_of(payload))
        assert found == payload or (found is None and n not in must_be_there), n
    log = None
    current = store.store._attachment.current
    if current._why_bad is None:  # else damage was met, and adoption stopped where it was
        try:
            check_invariants(store)
            log = store.store.begin_log(1, MIB)
            assert log is not None or current._why_bad
        except sqlite3.DatabaseError:
            pass  # no look-up has met it: whoever does has the index built anew
    if log is None:
        list(store.store.verify(None))
        store.store.housekeeping()
        check_invariants(store)
        log = store.store.begin_log(1, MIB)
        assert log is not None
    mover = Mover(log, dict[bytes, Location]())
    assert mover.append(0, path_of(0), RAW[0])
    mover.finish()
    assert store.read(mover.locations[path_of(0)]) == RAW[0]
    log.end()


def test_kills_after_each_write_and_within(record: list[Op], tmp_path: Path) -> None:
    """What was once in a segment as a whole is there at every later cut."""
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    source = random.Random(seed)
    disk, held = Disk(), set[int]()
    for number, op in enumerate(record):
        steps = range(SECTOR, len(op.data), SECTOR) if op.kind == WRITE else range(0)
        names = [name for name, ino in disk.names.items() if ino == op.ino]
        in_index = any(name.startswith("index") for name in names)
        if in_index and number % 6:  # SQLite's are its own affair
            disk.apply(op)
            continue
        if steps and names and (not in_index or number % 4 == 0):
            whole = bytes(disk.files[op.ino])
            disk.apply(op._replace(data=op.data[: source.choice(steps)]))
            look(disk, tmp_path / "cache", held)
            disk.files[op.ino][:] = whole
        disk.apply(op)
        if op.kind == SYNC:  # a kill at it is one after the last write
            continue
        if not in_index:
            now = disk.held()
            assert now >= held  # the rewriting itself never deletes the only copy
            held = now
        look(disk, tmp_path / "cache", held)
    assert len(held) == FILES


def power_cut(record: list[Op], source: random.Random) -> tuple[Disk, int]:
    """(what the disk has, how many operations were synced)."""
    cut = source.randrange(len(record))
    syncs = [n for n, op in enumerate(record[:cut]) if op.kind == SYNC]
    synced = max((n for n in syncs if record[n].path == "syncfs"), default=0)
    files_synced = {record[n].ino: n for n in syncs}
    disk = replayed(record[:synced])
    # Names and lengths are on the disk up to here: a sync of one file brings all of them.
    named = source.randint(max(syncs, default=0), cut)
    share = source.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    late: list[Op] = []
    for number, op in enumerate(record[synced:named], synced):
        if op.kind != WRITE or number < files_synced.get(op.ino, 0):
            disk.apply(op)
            continue
        if source.random() < 0.5 and op.ino in disk.files:  # its length arrives before its bytes
            end = op.offset + len(op.data)
            if len(disk.files[op.ino]) < end:
                disk.apply(Op(ALLOCATE, "", op.ino, end, b""))
        for at in range(0, len(op.data), SECTOR):
            if source.random() < share:
                late.append(op._replace(offset=op.offset + at, data=op.data[at : at + SECTOR]))
    for op in late if source.random() < 0.5 else source.sample(late, len(late)):
        ends = len(disk.files.get(op.ino, b""))
        if op.offset < ends:  # of a file that was cut later nothing comes back
            disk.apply(op._replace(data=op.data[: ends - op.offset]))
    return disk, synced


@pytest.mark.parametrize("index", ["kept", "lost"])
def test_power_cuts(
    record: list[Op], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: str
) -> None:
    """All that was synced is in the segments: with the index lost, nothing is missing. An index
    that is half of one age and half of another may miss some, and never gives a wrong one.
    """
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    source = random.Random(seed)
    monkeypatch.setattr(recovery, "boot_id", lambda: bytes(16))  # the machine was started anew
    for _ in range(POWER_CUTS):
        disk, synced = power_cut(record, source)
        must_be_there: set[int] = set()
        if index == "lost":
            must_be_there = replayed(record[:synced]).held()
            for name in [name for name in disk.names if name.endswith((".db", ".db-wal"))]:
                del disk.names[name]
        assert disk.held() >= must_be_there
        look(disk, tmp_path / "cache", must_be_there)


def test_the_recorder_sees_everything(record: list[Op], tmp_path: Path) -> None:
    """The replay of the whole record is the directory as it was left."""
    disk = replayed(record)
    look(disk, tmp_path / "cache", set(RAW))
    syncs = [op.path for op in record if op.kind == SYNC]
    assert (syncs.count("syncfs"), syncs.count("fsync")) == (2, 6)
    assert sum(name.endswith(".seg") for name in disk.names) > 3
    header = next(bytes(disk.files[ino]) for name, ino in disk.names.items() if ".seg" in name)
    assert fmt.parse_segment_header(header) is not None
