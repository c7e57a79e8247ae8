"""kill -9 of writers, evictors and rebuilders, again and again, on one cache directory."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.store_support import (
    DATASET,
    MIB,
    Opened,
    check_invariants,
    content,
    opened,
    version_of,
)

Acknowledged = dict[bytes, int]


@pytest.fixture
def source() -> random.Random:
    seed = random.SystemRandom().randrange(1 << 32)
    print("seed", seed)
    return random.Random(seed)


def killed(child: Callable[[Callable[[int], None]], None], seconds: float) -> list[int]:
    """Run `child` in a forked process, kill it after `seconds`; the numbers it acknowledged."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            child(lambda number: (os.write(writing, number.to_bytes(4, "little")), None)[1])
        finally:
            os._exit(0)
    os.close(writing)
    data = b""
    try:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and select.select([reading], [], [], left)[0]:
            chunk = os.read(reading, 65536)
            if not chunk:
                break
            data += chunk
        os.kill(pid, signal.SIGKILL)
        while chunk := os.read(reading, 65536):
            data += chunk
    finally:
        os.close(reading)
        os.waitpid(pid, 0)
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data) - 3, 4)]


def payload_of(number: int) -> bytes:
    return content(number, 1 + number * 7919 % 300_000)


def path_of(number: int) -> bytes:
    return b"d%d/f%d" % (number % 5, number)


def test_what_put_returned_is_found_after_kill(tmp_path: Path, source: random.Random) -> None:
    """Room for everything: nothing acknowledged may be lost, whenever the kill came."""
    number = 0
    acknowledged: list[int] = []

    def write(acknowledge: Callable[[int], None]) -> None:
        store = Opened(tmp_path / "cache", limit_bytes=1024 * MIB)
        for n in range(number, number + 100_000):
            if store.put(path_of(n), payload_of(n)) is None:
                return
            acknowledge(n)

    kills = 0
    while kills < 12 or len(acknowledged) <= 20:  # beside much load a child may acknowledge nothing
        fresh = killed(write, source.uniform(0.01, 0.15))
        kills += 1
        acknowledged += fresh
        number = max(acknowledged, default=0) + 10
        with opened(tmp_path / "cache", limit_bytes=1024 * MIB) as store:
            for n in [*fresh, *source.sample(acknowledged, min(20, len(acknowledged)))]:
                assert store.get(path_of(n), version_of(payload_of(n))) == payload_of(n)
            assert store.faults == []
            check_invariants(store)
    with opened(tmp_path / "cache", limit_bytes=1024 * MIB) as store:
        records, bad = store.bad_after_verify()
        assert records >= len(acknowledged)
        assert bad == 0


def test_killed_while_evicting(tmp_path: Path, source: random.Random) -> None:
    limit = 24 * MIB

    def write(begin: int, acknowledge: Callable[[int], None]) -> None:
        store = Opened(tmp_path / "cache", limit_bytes=limit)
        for n in range(begin, begin + 1000):
            store.put(path_of(n), payload_of(n))
            acknowledge(n)
            if n % 10 == 0:
                store.store.housekeeping()

    done = begin = 0
    while begin < 10_000 or done <= 10:  # on a busy machine a round comes to little
        fresh = killed(partial(write, begin), source.uniform(0.05, 0.25))
        begin += 1000
        done += len(fresh)
        with opened(tmp_path / "cache", limit_bytes=limit) as store:
            for n in fresh:
                assert store.get(path_of(n), version_of(payload_of(n))) in (None, payload_of(n))
            check_invariants(store)
            assert store.kinds <= {"missing"}
            assert store.bad_after_verify()[1] == 0


def test_killed_while_evicting_files(tmp_path: Path, source: random.Random) -> None:
    """One by one, beside a process that lives: every byte is right, and nothing is damaged."""
    limit, files = 32 * MIB, range(240)
    with opened(tmp_path / "cache", limit_bytes=limit) as living:

        def change(acknowledge: Callable[[int], None]) -> None:
            store = Opened(tmp_path / "cache", limit_bytes=limit)
            mine = random.Random(os.getpid())
            for turn in range(1000):
                for n in mine.sample(files, 20):
                    store.put(path_of(n), payload_of(n))
                store.seal()
                chosen = mine.sample(files, 60)
                names = [(path_of(n), version_of(payload_of(n))) for n in chosen]
                store.store.evict(DATASET, names)
                acknowledge(turn)

        done = rounds = 0
        while rounds < 12 or done <= 10:  # on a busy machine a round comes to little
            rounds += 1
            done += len(killed(change, source.uniform(0.1, 0.5)))
            for n in files:
                found = living.get(path_of(n), version_of(payload_of(n)))
                assert found in (None, payload_of(n))
            living.suspect()
            living.store.housekeeping()
            check_invariants(living)
            assert living.bad_after_verify()[1] == 0
            assert living.kinds <= {"missing"}


def test_killed_while_rebuilding(tmp_path: Path, source: random.Random) -> None:
    files = list(range(400))
    with opened(tmp_path / "cache", limit_bytes=256 * MIB) as store:
        for n in files:
            assert store.put(path_of(n), payload_of(n)) is not None

    def rebuild(acknowledge: Callable[[int], None]) -> None:
        Opened(tmp_path / "cache", limit_bytes=256 * MIB)
        acknowledge(1)
        time.sleep(10)

    for turn in range(15):
        for path in (tmp_path / "cache/index").glob("*.db*"):
            path.unlink()
        killed(rebuild, 0.004 * turn)
        with opened(tmp_path / "cache", limit_bytes=256 * MIB) as store:
            for n in source.sample(files, 20):
                assert store.get(path_of(n), version_of(payload_of(n))) == payload_of(n)
            assert store.store.usage().blocks == len(files)
            check_invariants(store)
    assert not list((tmp_path / "cache/index").glob("*.tmp*"))
