"""Which directories are listed ahead, and how many.

Through a mount: mount/test_listing_ahead.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from fusecache import _native
from fusecache.base.errors import UnknownInode
from fusecache.base.metrics import Metrics
from fusecache.read.directories import AHEAD_MOST, AT_ONCE, RUNS_MOST, ListingAhead
from fusecache.read.origin import Origin, Tick
from tests.support.native_table import ROOT, attach

DIRECTORIES = 40


class Reader:
    """Lists directories; those that were listed ahead come at once."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.origin = Origin(-1, "ext4", 2, math.inf, Metrics())
        self.ahead = ListingAhead(self.origin, nursery, self._list)
        self.asked: list[int] = []
        self.at_once = self.at_once_most = 0
        self.go_on = trio.Event()
        self.go_on.set()

    async def _list(self, directory: int) -> None:
        self.at_once += 1
        self.at_once_most = max(self.at_once_most, self.at_once)
        self.asked.append(directory)
        await self.go_on.wait()
        self.at_once -= 1

    async def list(self, directory: int) -> list[int]:
        """What is listed ahead because of this one."""
        before = len(self.asked)
        if directory not in self.asked:
            self.ahead.note(directory)
            await trio.testing.wait_all_tasks_blocked()
        return self.asked[before:]


Script = Callable[[Reader, list[int]], Awaitable[None]]


def play(source: Path, script: Script, by_name: bool = True) -> None:
    """`script(reader, directories)`; these as a listing shows them, or by name."""
    if not source.exists():
        for number in range(DIRECTORIES):
            (source / f"{number * 7 % DIRECTORIES:02d}").mkdir(parents=True)
            (source / f"file{number}").touch()
    attach(source)
    names = {name: ino for name, ino, _ in _native.children(ROOT, 0, 1000) if name.isdigit()}
    directories = [names[name] for name in sorted(names)] if by_name else list(names.values())

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await script(Reader(nursery), directories)

    trio.run(main)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.mark.parametrize("by_name", [True, False])
def test_siblings_one_after_another(source: Path, by_name: bool) -> None:
    async def script(reader: Reader, directories: list[int]) -> None:
        found = [await reader.list(directory) for directory in directories]
        assert [len(ahead) for ahead in found if ahead] == [1, 2, 4, 8, 8, 8, 1]
        assert sorted(reader.asked) == sorted(set(reader.asked))
        assert not found[0]
        assert found[1] == directories[2:3]
        assert found[3] == directories[4:6]
        assert reader.at_once_most <= AT_ONCE

    play(source, script, by_name)


def test_one_alone_and_those_without_order(source: Path) -> None:
    async def script(reader: Reader, directories: list[int]) -> None:
        assert await reader.list(ROOT) == []
        assert await reader.list(directories[3]) == await reader.list(directories[3]) == []
        last = directories[3]
        for directory in random.Random(7).sample(directories, DIRECTORIES):
            if all(directory not in _native.siblings(last, order, 1) for order in (True, False)):
                assert await reader.list(directory) == []
                last = directory
        assert not reader.asked

    play(source, script)


def test_a_run_that_ends_begins_anew(source: Path) -> None:
    async def script(reader: Reader, directories: list[int]) -> None:
        for directory in directories[:8]:
            await reader.list(directory)
        before = len(reader.asked)
        assert await reader.list(directories[30]) == []
        assert await reader.list(directories[31]) == directories[32:33]
        assert len(reader.asked) == before + 1

    play(source, script)


def test_no_more_than_some_at_once_and_nothing_on_busy_threads(source: Path) -> None:
    async def script(reader: Reader, directories: list[int]) -> None:
        reader.go_on = trio.Event()
        for directory in directories:  # the reader is faster: he has them listed himself
            reader.ahead.note(directory)
            await trio.testing.wait_all_tasks_blocked()
        assert len(reader.asked) == reader.at_once == AT_ONCE
        reader.go_on.set()
        await trio.testing.wait_all_tasks_blocked()
        assert len(reader.asked) <= AT_ONCE + AHEAD_MOST

        reader.asked.clear()
        reader.origin.available = False
        for directory in directories[:6]:
            assert await reader.list(directory) == []
        reader.origin.available = True
        for directory in directories[:6]:
            await reader.list(directory)
        assert reader.asked

    play(source, script)


def test_calls_that_hang_keep_their_threads(source: Path) -> None:
    """Half of them are left to others, however long it takes."""

    async def script(reader: Reader, directories: list[int]) -> None:
        calls: list[int] = []

        async def list_ahead(directory: int) -> None:
            def hang(_tick: Tick) -> None:
                calls.append(directory)
                trio.from_thread.run(end.wait)

            with trio.move_on_after(0.01):  # given up: the thread is not
                await reader.origin.call(hang, background=True)

        end = trio.Event()
        async with trio.open_nursery() as nursery:
            ahead = ListingAhead(reader.origin, nursery, list_ahead)
            for directory in directories:
                ahead.note(directory)
                await trio.sleep(0.02)
            assert 0 < len(calls) <= AT_ONCE
            assert not reader.origin.has_idle_threads()
            with trio.fail_after(20):
                await reader.origin.call(lambda _tick: None, background=True)
            end.set()

    play(source, script)


def test_runs_of_many_parents_are_forgotten(source: Path) -> None:
    for parent in range(RUNS_MOST + 1):
        for name in "012":
            (source / f"{parent:03d}" / name).mkdir(parents=True)

    async def script(reader: Reader, directories: list[int]) -> None:
        found = []
        for directory in directories:
            _native.scan(directory)
            found.append([ino for _, ino, _ in sorted(_native.children(directory, 0, 10))])
        for first, _second, _third in found:
            assert await reader.list(first) == []
        assert await reader.list(found[0][1]) == []  # the oldest
        for _first, second, third in found[2:]:
            assert await reader.list(second) == [third]

    play(source, script)


@pytest.mark.parametrize("count", [0, 1, 7, 100])
def test_siblings_in_order(source: Path, count: int) -> None:
    """Against the plain definition; the names are the prefixes of others, too."""
    names = [f"{'ab'[n % 2] * (n % 9 + 1)}{n if n > 20 else ''}" for n in range(count)]
    random.Random(count).shuffle(names)
    source.mkdir()
    for number, name in enumerate(dict.fromkeys(names)):
        (source / name).mkdir() if number % 3 else (source / name).touch()
    attach(source)
    children = [(name, ino) for name, ino, _ in _native.children(ROOT, 0, 1000)]
    assert _native.siblings(ROOT, True, 8) == []
    for one, ino in children:
        is_directory = [child for child in children if (source / child[0].decode()).is_dir()]
        for limit in (1, 8, 32):
            by_name = [child for name, child in sorted(is_directory) if name > one]
            assert _native.siblings(ino, True, limit) == by_name[:limit]
            listed = [child for _, child in is_directory if child > ino]
            assert _native.siblings(ino, False, limit) == listed[:limit]
    with pytest.raises(UnknownInode):
        _native.siblings(10_000, True, 1)
