"""Saved tables as files: whose they are, when they have their name, and what they may take. What is
in them: unit/native/test_native_saved.py.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.store_support import (
    DATASET,
    MIB,
    Opened,
    content,
    disk_bytes,
    opened,
    version_of,
)

STRANGER = 12_345
LIMIT = 64 * MIB
MOST = LIMIT // 16


def path_of(cache: Path, dataset: bytes = DATASET) -> Path:
    return cache / "tables" / dataset.hex()


def save(store: Opened, data: bytes, dataset: bytes = DATASET, most: int = 0) -> bool:
    return store.store.save_table(dataset, most or len(data), lambda fd: os.pwrite(fd, data, 0))


def load(store: Opened, dataset: bytes = DATASET) -> bytes | None:
    with store.store.saved_table(dataset) as fd:
        return None if fd is None else os.pread(fd, 1 << 24, 0)


def test_what_was_saved_last_is_there(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with opened(cache, limit_bytes=LIMIT) as store:
        assert load(store) is None
        assert save(store, b"first", most=10_000)
        assert save(store, b"second, and longer")
        assert save(store, b"another", b"another dataset!")
    with opened(cache, limit_bytes=LIMIT) as store:
        assert load(store) == b"second, and longer"
        assert load(store, b"another dataset!") == b"another"
        assert store.faults == []
    assert len(os.listdir(cache / "tables")) == 2
    assert path_of(cache).stat().st_mode & 0o777 == 0o600
    assert (cache / "tables").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("is_killed", [True, False])
def test_what_was_not_finished_leaves_the_one_before(tmp_path: Path, is_killed: bool) -> None:
    cache, before = tmp_path / "cache", b"the one before"

    def write(fd: int) -> int:
        os.pwrite(fd, b"half", 0)
        if is_killed:
            os._exit(0)
        raise OSError(errno.EIO, "I/O error")

    with opened(cache, limit_bytes=LIMIT) as store:
        assert save(store, before)
    if is_killed:
        pid = os.fork()
        if not pid:
            Opened(cache, limit_bytes=LIMIT).store.save_table(DATASET, 100, write)
        assert os.waitpid(pid, 0)[1] == 0
        assert path_of(cache).with_name(f"{DATASET.hex()}.tmp").read_bytes()[:4] == b"half"
    with opened(cache, limit_bytes=LIMIT) as store:
        if not is_killed:
            assert not store.store.save_table(DATASET, 100, write)
            assert store.kinds == {"io"}
        assert load(store) == before
        assert save(store, b"next")
        assert load(store) == b"next"
    assert os.listdir(cache / "tables") == [DATASET.hex()]


def test_two_that_write_the_same(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with opened(cache, limit_bytes=LIMIT) as store:
        assert save(store, b"before")
        temporary = path_of(cache).with_name(f"{DATASET.hex()}.tmp")
        with open(temporary, "wb") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert not save(store, b"ours")
            assert load(store) == b"before"
        assert save(store, b"ours")
        assert store.faults == []


Plant = Callable[[Path], object]


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    "plant",
    [
        lambda file: os.chown(file, STRANGER, STRANGER),
        lambda file: file.chmod(0o620),
        lambda file: file.chmod(0o602),
        lambda file: os.chown(file.parent, STRANGER, STRANGER),
        lambda file: file.parent.chmod(0o770),
        lambda file: os.link(file, file.parents[2] / "second name"),
        lambda file: (file.rename(file.with_name("moved")), file.symlink_to("moved")),
        fifo,
        lambda file: (file.unlink(), file.mkdir()),
    ],
    ids=["owner", "group", "others", "folder's owner", "folder's mode", "hard link", "link", "FIFO",
         "directory"],
)  # fmt: skip
def test_what_is_not_ours_alone_is_not_used(tmp_path: Path, plant: Plant) -> None:
    cache = tmp_path / "cache"
    with opened(cache, limit_bytes=LIMIT) as store:
        assert save(store, b"table")
        plant(path_of(cache))
        assert load(store) is None
        assert len(store.faults) == 1


def test_its_disk_is_gone(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with opened(cache, limit_bytes=LIMIT) as store:
        cache.rename(tmp_path / "moved")
        assert not save(store, b"table")
        assert load(store) is None
    assert not cache.exists()


def test_they_count_for_the_limit(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with opened(cache, limit_bytes=LIMIT) as store:
        before = store.store.usage()
        assert save(store, content(1, MIB))
        assert store.store.usage().reserved_bytes >= before.reserved_bytes + MIB
        number = 0
        while store.put(b"%d" % number, content(number, MIB), version_of(bytes(MIB))):
            number += 1
            if store.gone:
                break
            assert disk_bytes(cache) <= LIMIT
        assert disk_bytes(cache) <= LIMIT


@pytest.mark.parametrize("policy", ["lrf", "keep"])
def test_a_full_cache_makes_room_unless_it_keeps(tmp_path: Path, policy: str) -> None:
    cache, number = tmp_path / "cache", 0
    with opened(cache, limit_bytes=LIMIT, policy=policy) as store:
        while store.put(b"%d" % number, content(number, MIB), version_of(bytes(MIB))):
            number += 1
            if store.gone and store.store.taken_bytes(MIB) > MIB:  # the open segment is full
                break
        gone = len(store.gone)
        assert save(store, content(1, MOST)) == (policy != "keep")
        assert (len(store.gone) > gone) == (policy != "keep")
        assert disk_bytes(cache) <= LIMIT
        assert store.faults == []


def test_those_saved_longest_ago_go(tmp_path: Path) -> None:
    cache, datasets = tmp_path / "cache", [bytes([number]) * 16 for number in range(5)]
    with opened(cache, limit_bytes=LIMIT) as store:
        for age, dataset in enumerate(datasets[:4]):
            assert save(store, content(age, MIB), dataset)
            os.utime(path_of(cache, dataset), (age, age))
        assert save(store, content(9, MIB), datasets[0])  # its own is in nobody's way
        assert len(os.listdir(cache / "tables")) == 4
        assert save(store, content(9, 2 * MIB), datasets[4])
        left = {datasets[0].hex(), datasets[3].hex(), datasets[4].hex()}
        assert set(os.listdir(cache / "tables")) == left
        assert not save(store, content(9, MOST + 1), datasets[1])
        assert set(os.listdir(cache / "tables")) == left
    with opened(cache, limit_bytes=LIMIT // 2) as store:  # what is saved already is too much
        assert not save(store, content(9, MOST // 2 + 1), datasets[1])
        taken = sum(file.stat().st_size for file in (cache / "tables").iterdir())
        assert taken <= MOST // 2
