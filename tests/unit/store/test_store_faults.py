"""Errors of the disk while the store is open: reported by kind, and survived."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.store_support import MIB, Opened, check_invariants, content, opened, version_of


class SmallDisk:
    """A disk of 40 MiB: a tmpfs; for ordinary users, a fallocate that gives up."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        mounting = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(path)]
        self.is_mounted = subprocess.run(mounting, capture_output=True).returncode == 0
        self._room = 40 * MIB
        if not self.is_mounted:
            monkeypatch.setattr(os, "posix_fallocate", self._fallocate)

    def _fallocate(self, fd: int, offset: int, length: int) -> None:
        used = sum(path.stat().st_size for path in self.path.rglob("*") if path.is_file())
        if used + length > self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(fd, offset + length)

    def leave(self, room: int) -> None:
        """Other users of the disk take all but `room` bytes (or give it back)."""
        filler = self.path / "filler"
        filler.unlink(missing_ok=True)
        disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize if self.is_mounted else self._room
        with filler.open("wb") as file:
            length = max(free - room, 0)
            if self.is_mounted:
                os.posix_fallocate(file.fileno(), 0, max(length, 1))
            else:
                os.ftruncate(file.fileno(), length)

    def close(self) -> None:
        if self.is_mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    (tmp_path / "disk").mkdir()
    made = SmallDisk(tmp_path / "disk", monkeypatch)
    yield made
    made.close()


def unpause(store: Opened) -> None:
    store.end_pause()


def test_a_disk_smaller_than_the_limit_evicts(disk: SmallDisk) -> None:
    with opened(disk.path / "cache", limit_bytes=100 * MIB) as store:
        files = {b"f%d" % n: content(n, MIB) for n in range(60)}
        for path, payload in files.items():
            assert store.put(path, payload) is not None
        assert store.gone
        newest = list(files)[-5:]
        assert all(store.get(path, version_of(files[path])) == files[path] for path in newest)
        assert store.faults == []
        check_invariants(store)


def test_a_disk_smaller_than_the_limit_under_keep(disk: SmallDisk) -> None:
    with opened(disk.path / "cache", limit_bytes=100 * MIB, policy="keep") as store:
        files = {b"f%d" % n: content(n, MIB) for n in range(60)}
        for path, payload in files.items():
            store.put(path, payload)
            unpause(store)
        assert store.kinds == {"disk-full"}
        here = [path for path in files if store.get(path, version_of(files[path]))]
        assert here == list(files)[: len(here)]
        assert len(here) > 20
        assert store.gone == []


def test_a_full_disk_stores_nothing_until_there_is_room(disk: SmallDisk) -> None:
    disk.leave(MIB)
    with opened(disk.path / "cache") as store:
        for n in range(5):
            assert store.put(b"f%d" % n, content(n, MIB)) is None
        assert store.kinds == {"disk-full"}
        assert len(store.faults) == 1, "no second try within a second"
        disk.leave(30 * MIB)
        unpause(store)
        assert store.put(b"f", b"payload") is not None
        assert store.get(b"f", version_of(b"payload")) == b"payload"
        check_invariants(store)


def test_a_preallocated_segment_needs_no_space(disk: SmallDisk) -> None:
    with opened(disk.path / "cache") as store:
        assert store.put(b"first", b"first") is not None
        store.store.flush()
        disk.leave(256 << 10)
        for n in range(6):
            assert store.put(b"f%d" % n, content(n, MIB)) is not None
        assert all(store.get(b"f%d" % n, version_of(content(n, MIB))) for n in range(6))


def test_no_room_for_the_index(disk: SmallDisk) -> None:
    if not disk.is_mounted:
        disk.leave(0)  # the fake disk does not know SQLite: nothing more than this can be seen
    with opened(disk.path / "cache") as store:
        disk.leave(9 * MIB)
        store.put(b"first", b"first")
        disk.leave(0)
        files = {b"%d" % n + b"n" * 240: b"%d" % n for n in range(400)}
        for path, payload in files.items():
            store.put(path, payload)
            unpause(store)
        for path, payload in files.items():
            assert store.get(path, version_of(payload)) in (None, payload)
        assert store.kinds <= {"disk-full", "index"}
        disk.leave(20 * MIB)
        store.repair_now()
        store.store.housekeeping()
        unpause(store)
        assert store.put(b"last", b"last") is not None
        assert store.get(b"last", version_of(b"last")) == b"last"


def test_an_error_of_a_write_ends_the_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = os.pwrite, False

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if failing:
            real(fd, bytes(data)[:4096], offset)  # part of it arrives
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with opened(tmp_path / "cache") as store:
        good = content(1, 20_000)
        assert store.put(b"good", good) is not None
        failing = True
        assert store.put(b"bad", content(2, 20_000)) is None
        assert store.put(b"worse", content(3, 20_000)) is None
        assert store.kinds == {"io"}
        assert len(store.faults) == 1
        assert store.get(b"good", version_of(good)) == good
        unpause(store)
        assert store.put(b"bad", content(2, 20_000)) is None
        failing = False
        unpause(store)
        assert store.put(b"bad", content(2, 20_000)) is not None
        assert store.get(b"bad", version_of(content(2, 20_000))) == content(2, 20_000)
        check_invariants(store)
    (tmp_path / "cache/index/00000001.db").unlink()
    with opened(tmp_path / "cache") as store:
        assert store.get(b"good", version_of(good)) == good
        assert store.store.usage().blocks == 2


def test_a_batch_whose_write_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full in the middle of a batch: those before are stored, those after are not."""
    real, room = os.pwrite, 1 << 40

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, data[: min(len(data), room)], offset)
        room -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    files = [(b"f%d" % n, content(n, 20_000)) for n in range(10)]
    with opened(tmp_path / "cache") as store:
        assert store.put(b"good", b"good") is not None
        room = 5 * 20480 + 8192  # five records and a part of the sixth
        found = store.put_many([*files, (b"again", files[0][1]), (b"lost", files[7][1])])
        assert [at is not None for at in found] == [True] * 5 + [False] * 5 + [True, False]
        assert found[10] == found[0]
        assert store.kinds == {"disk-full"}
        assert len(store.faults) == 1
        room = 1 << 40
        assert store.put_many(files[5:]) == [None] * 5, "no second try within a second"
        unpause(store)
        assert None not in store.put_many(files[5:])
        assert all(store.get(path, version_of(payload)) == payload for path, payload in files)
        assert store.store.usage().blocks == 11
        check_invariants(store)
    (tmp_path / "cache/index/00000001.db").unlink()
    with opened(tmp_path / "cache") as store:
        assert all(store.get(path, version_of(payload)) == payload for path, payload in files)
        assert store.bad_after_verify() == (11, 0)


def test_a_batch_on_a_disk_that_fills(disk: SmallDisk) -> None:
    with opened(disk.path / "cache", limit_bytes=100 * MIB) as store:
        files = [(b"f%d" % n, content(n, MIB)) for n in range(60)]
        found = store.put_many(files, evict=False)
        count = sum(at is not None for at in found)
        assert count > 20
        assert None not in found[:count]
        assert store.gone == []
        assert store.faults == [], "a refusal, not a fault"
    with opened(disk.path / "cache", limit_bytes=100 * MIB) as store:
        assert store.put_many(files[-12:], evict=False)[-1] is None
        assert store.faults == []
        assert store.gone == []
        found = store.put_many(files)
        assert found[-1] is not None
        assert store.gone
        assert store.faults == []
        check_invariants(store)


def test_the_directory_goes_in_the_middle_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if offset == 4096 and len(store.segments()) == 2:
            shutil.rmtree(tmp_path / "parent", ignore_errors=True)
        return real(fd, data, offset)

    (tmp_path / "parent").mkdir()
    with opened(tmp_path / "parent/cache") as store:
        monkeypatch.setattr(os, "pwrite", pwrite)
        found = store.put_many([(b"f%d" % n, content(n, MIB)) for n in range(20)])
        assert found == [None] * 20
        assert store.kinds == {"missing"}


def test_no_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that takes the flag and refuses the write, and one that refuses the flag."""
    import fcntl

    real = os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with opened(tmp_path / "cache") as store:
        for n in range(20):
            assert store.put(b"f%d" % n, content(n, 10_000)) is not None
        assert store.faults == []
        assert store.bad_after_verify() == (20, 0)
    monkeypatch.setattr("fusecache.store.segment.files.try_direct", lambda _: False)
    with opened(tmp_path / "cache") as store:
        assert store.put(b"g", content(30, 10_000)) is not None
        assert store.bad_after_verify() == (21, 0)


def test_an_index_that_cannot_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Degraded, not dead: nothing is stored, nothing is wrong, and it mends itself later."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("fusecache.store.index.recovery.rebuild", broken)
        store = Opened(tmp_path / "cache")
    assert store.put(b"a", b"a") is None
    assert store.find(b"a", version_of(b"a")) is None
    assert store.kinds == {"io"}
    unpause(store)
    store.store.housekeeping()
    unpause(store)
    assert store.put(b"a", b"a") is not None
    assert store.get(b"a", version_of(b"a")) == b"a"
    store.close()
