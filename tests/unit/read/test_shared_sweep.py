"""Which directories a pass looks at, and how, where another host of a pool sweeps.

Who does is pool/sweeping.py's: unit/pool/test_sweeping.py.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache import _native
from fusecache.base.metrics import CHANGES_SEEN, SWEPT, Metrics
from fusecache.pool.board import Lease, hash_of, seal
from fusecache.pool.sweeping import Following, Found, Leading, SharedSweep
from fusecache.read.directories import Revalidation
from fusecache.read.origin import Origin
from tests.support.native_table import ROOT, attach

PERIOD_S = 60.0


class Values(dict[str, bytes]):
    """An engine without time."""

    def put(self, key: str, value: bytes, expires_s: float, is_new: bool = False) -> bool:
        del expires_s, is_new
        self[key] = value
        return True

    def remove(self, key: str) -> None:
        self.pop(key, None)


class One:
    """A host, and how it has asked the origin."""

    def __init__(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source_fd = os.open(source, os.O_RDONLY)
        self.metrics = Metrics()
        self.origin = Origin(self.source_fd, "ext4", 2, math.inf, self.metrics)
        self.values = Values()
        self.shared = SharedSweep(self.values, _native, "fusecache:n:", "me", PERIOD_S)
        self.revalidation = Revalidation(self.origin, PERIOD_S, self.metrics, shared=self.shared)
        self.scans: list[tuple[int, bool]] = []
        self.adds: list[tuple[int, bytes, bool]] = []
        scan, add = _native.scan, _native.add

        def note_scan(ino: int, tick: Any = None, is_forced: bool = False) -> tuple[int, int, int]:
            self.scans.append((ino, is_forced))
            return scan(ino, tick, is_forced)

        def note_add(parent: int, name: bytes, is_forced: bool = False) -> int:
            self.adds.append((parent, name, is_forced))
            return add(parent, name, is_forced)

        monkeypatch.setattr(_native, "scan", note_scan)
        monkeypatch.setattr(_native, "add", note_add)

    def follow(self, *swept: bytes) -> Following:
        """A leader that sweeps these."""
        self.shared.epoch = epoch = Following(Lease("t", "h", 0, len(swept), (0, 0)), math.inf)
        epoch.is_joined = True
        epoch.learn([hash_of(path) for path in swept])
        return epoch

    async def sweep(self) -> set[tuple[int, bool]]:
        self.scans.clear()
        await self.revalidation.sweep(shared=self.shared)
        return set(self.scans)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    top = tmp_path / "source"
    for directory in ("a", "b"):
        (top / directory).mkdir(parents=True)
        (top / directory / "file").write_text("1")
    attach(top)
    for path in (b"", b"a", b"b"):
        _native.scan(_native.find_path(path))
    return top


@pytest.fixture
def one(source: Path, monkeypatch: pytest.MonkeyPatch) -> One:
    return One(source, monkeypatch)


def test_what_is_left_was_looked_at_past_caches(one: One) -> None:
    a, b = _native.find_path(b"a"), _native.find_path(b"b")

    async def script() -> None:
        assert await one.sweep() == {(ROOT, False), (a, False), (b, False)}
        epoch = one.follow(b"a", b"")
        assert await one.sweep() == {(ROOT, True), (a, True), (b, False)}
        assert epoch.take_wants() == [b"b"]
        assert await one.sweep() == {(b, False)}
        epoch.learn([hash_of(b"b")])
        assert await one.sweep() == {(b, True)}
        before = one.metrics.read()[SWEPT]
        assert await one.sweep() == set()
        assert one.metrics.read()[SWEPT] == before
        one.scans.clear()
        await one.revalidation.sweep()  # `fusecache` was asked for it
        assert len(one.scans) == 3
        one.follow()
        assert len(await one.sweep()) == 3

    trio.run(script)


def test_a_pass_that_meets_a_hang_cannot_lead(one: One, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script() -> None:
        one.origin.timeout_s = 0.0
        await one.revalidation.sweep(shared=one.shared)
        one.shared.tick((1, 1))
        assert not isinstance(one.shared.epoch, Leading)
        one.origin.timeout_s = math.inf
        await one.revalidation.sweep(shared=one.shared)
        one.shared.tick((1, 1))
        assert isinstance(one.shared.epoch, Leading)
        _native.journal(False)

    trio.run(script)


def test_what_another_host_names_is_looked_at_twice(
    one: One, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = _native.find_path(b"a"), _native.find_path(b"b")
    epoch = one.follow(b"", b"a", b"b")
    names = {b"a": [b"file", b"new", b"none"], b"x/y": [b"z"], b"b": [b"file"]}
    found = iter([Found(names)] + [Found()] * 100)
    monkeypatch.setattr(SharedSweep, "tick", lambda *_: next(found))
    one.shared.tick_s = 0.01
    (source / "a/new").touch()
    (source / "a/file").write_text("12")

    async def script() -> None:
        await one.sweep()
        assert all(epoch.leaves(directory) for directory in (a, b, ROOT))
        one.scans.clear()
        with trio.move_on_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.revalidation.share_forever)
                while len(one.adds) < 8:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(script)
    looks = [(a, b"file", True), (a, b"new", True), (a, b"none", True), (b, b"file", True)]
    assert one.adds == looks * 2
    assert not one.scans
    assert _native.lookup(a, b"new") > 0
    assert _native.version(_native.lookup(a, b"file"))[1] == 2
    assert one.metrics.read()[CHANGES_SEEN] >= 8
    assert epoch.leaves(a)


def test_what_cannot_be_looked_at_is_left_no_more(
    one: One, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = _native.find_path(b"a"), _native.find_path(b"b")
    epoch = one.follow(b"", b"a", b"b")

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "no")

    async def script() -> None:
        await one.sweep()
        monkeypatch.setattr(_native, "add", refuse)
        found = iter([Found({b"a": [b"file"]})])
        monkeypatch.setattr(SharedSweep, "tick", lambda *_: next(found, Found()))
        one.shared.tick_s = 0.01
        with trio.move_on_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.revalidation.share_forever)
                while epoch.leaves(a):
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        assert not epoch.leaves(a)
        assert epoch.leaves(b)

    trio.run(script)


def test_a_pass_begins_when_another_host_leads(
    one: One, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what others want is listed before it."""
    (source / "new/below").mkdir(parents=True)
    one.shared.tick_s = 0.01
    one.revalidation = Revalidation(one.origin, 1e6, one.metrics, is_late=False, shared=one.shared)
    times = os.stat(source)
    value = seal(["t", "h", 0, 0, [times.st_mtime_ns, times.st_ctime_ns]])
    tick = SharedSweep.tick

    def with_wanted(shared: SharedSweep, root: tuple[int, int] | None) -> Found:
        return (
            Found(wanted=(b"new/below", b"none", b"a/file", b"b"))
            if tick(shared, root)
            else Found()
        )

    monkeypatch.setattr(SharedSweep, "tick", with_wanted)

    async def script() -> None:
        with trio.move_on_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.revalidation.sweep_forever)
                nursery.start_soon(one.revalidation.share_forever)
                one.values["fusecache:n:FCS1:60000"] = value
                below = 0
                while not below or not _native.is_listed(below) or len(one.scans) < 4:
                    await trio.sleep(0.01)
                    below = _native.find_path(b"new/below")
                nursery.cancel_scope.cancel()

    trio.run(script)
    assert _native.is_listed(_native.find_path(b"new/below"))
    assert len(one.scans) >= 4
