"""Which files a mount holds for pinned, and which segments it tells others of."""

from __future__ import annotations

import errno
import stat
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from fusecache import _native
from fusecache.base.errors import OriginError
from fusecache.base.metrics import Metrics
from fusecache.server.pinning import Pinning
from fusecache.store.directory.pin_files import Pinned
from fusecache.table.pins import UserPins
from tests.support.store_support import DATASET, MIB, Opened, content, opened


def inos(*numbers: int) -> Any:
    return np.array(numbers, np.uint32)


def test_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "segments_of", lambda marks: (bytes(4 * int(marks.sum())), b""))
    monkeypatch.setattr(_native, "is_dead", lambda ino: ino == 7)
    pins = UserPins()
    assert pins.segments() is None
    pins.mark(inos(7, 9))
    pins.mark(inos(3))
    assert pins.segments() is None, "there may be more"
    pins.note_known()
    assert pins.segments() == frozenset({0})
    asked = inos(3, 4, 7, 9, 10, 4_000_000_000)
    assert pins.holds(asked).tolist() == [True, False, True, True, False, False]
    pins.forget_dead()
    assert pins.holds(asked).tolist() == [True, False, False, True, False, False]
    assert pins.may_hold(asked).tolist() == pins.holds(asked).tolist(), "no later ones"
    pins.replace(inos(4), known_to=9)
    assert pins.may_hold(asked).tolist() == [False, True, False, False, True, True]
    assert pins.holds(asked).tolist() == [False, True, False, False, False, False]
    assert [pins.holds_one(4), pins.holds_one(3), pins.holds_one(99)] == [True, False, False]
    pins.begin()
    assert pins.segments() is None
    assert pins.may_hold(asked).all(), "nothing was looked at"


class Table:
    """Inode 1 is the root, the others are files; a pinned one lies in the segments of `where`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Opened) -> None:
        self.where: set[int] = set()
        self.is_listed, self.names = True, 5
        for name, function in {
            "count": lambda: self.names,
            "attributes": lambda ino: (stat.S_IFDIR if ino == 1 else stat.S_IFREG,),
            "path": lambda ino: b"" if ino == 1 else b"d/%d" % ino,
            "version": lambda ino: (ino, 10, 0, 0),
            "is_dead": lambda ino: False,
            "is_listed": lambda ino: self.is_listed,
            "segments_of": lambda marks: (np.array([*self.where], np.uint32).tobytes(), b""),
        }.items():
            monkeypatch.setattr(_native, name, function)
        self.pins, nothing = UserPins(), Any
        self.pinning = Pinning(
            operations=nothing,  # type: ignore[arg-type]
            store=store.store,
            dataset=DATASET,
            pins=self.pins,
            metrics=Metrics(lambda: defaultdict(int)),
            locate_all=lambda found: None,
        )

    async def look(self) -> None:
        await self.pinning.look()


def test_a_listing_that_fails_unpins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not listed now may be pinned, and what is known stays so."""

    async def list_checked(directory: int) -> None:
        raise OriginError(errno.EIO)

    async def send(message: object) -> None:
        pass

    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        table = Table(monkeypatch, store)
        table.pinning._operations = SimpleNamespace(list_checked=list_checked)  # type: ignore[assignment]

        async def run() -> None:
            store.store.keep_pins(DATASET, Pinned(("d/[23]*", "d/[45]*"), frozenset()))
            await table.look()
            assert table.pinning.status()["files"] == 4
            await table.pinning.pin({"globs": ["d/[45]*"], "prefix": "", "remove": True}, send)
            assert table.pinning.status()["globs"] == ["d/[23]*"]
            assert table.pins.holds(inos(2, 3, 4, 5)).tolist() == [True, True, False, False]
            assert table.pins.may_hold(inos(5, 6)).tolist() == [False, True]

        trio.run(run)


def test_pins_that_cannot_be_read_now_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        table = Table(monkeypatch, store)

        def fail(dataset: bytes) -> Pinned:
            raise OSError(errno.EIO, "no disk")

        async def run() -> None:
            store.store.keep_pins(DATASET, Pinned(("d/*",), frozenset()))
            with monkeypatch.context() as patch:
                patch.setattr(store.store, "pins_of", fail)
                await table.look()
                assert not table.pins.is_known
                assert table.pins.may_hold(inos(2)).all()
            await table.look()
            with monkeypatch.context() as patch:
                patch.setattr(store.store, "pins_of", fail)
                await table.look()
            assert table.pins.holds(inos(2, 5)).all()
            assert table.pins.is_known

        trio.run(run)


def segments(store: Opened, count: int) -> list[int]:
    """As many segments."""
    for number in range(count):
        store.put(b"%d" % number, content(number, MIB))
        store.seal()
    return [int(path.stem) for path in store.segments()]


def test_what_is_told_of_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path / "cache", limit_bytes=64 * MIB) as store:
        first, second, third = segments(store, 3)
        table = Table(monkeypatch, store)

        def told() -> frozenset[int]:
            pinned = store.store.pins_of(DATASET)
            assert pinned is not None
            return pinned.segnos

        async def run() -> None:
            await table.look()
            assert table.pins.segments() == frozenset(), "there is no file"
            store.store.keep_pins(DATASET, Pinned(("d/[2-9]*",), frozenset({first, 7})))
            await table.look()  # as another mount has pinned
            assert table.pinning.status()["files"] == 4
            table.where = {second, 8}
            await table.pinning._tell_segments()
            assert told() == frozenset({first, second}), "the others' too, and none that is gone"
            await table.look()
            table.names = 10
            await table.look()
            assert table.pinning.status()["files"] == 8, "2 to 9"
            table.where = {third}
            await table.pinning._tell_segments(is_all=await table.pinning._knows_all_names())
            assert told() == frozenset({third})
            table.is_listed, table.where = False, {second}
            await table.look()
            await table.pinning._tell_segments(is_all=await table.pinning._knows_all_names())
            assert told() == frozenset({second, third})
            store.store.keep_pins(DATASET, Pinned())
            await table.look()
            assert table.pinning.status() == {"globs": [], "files": 0, "bytes": 0, "known": True}

        trio.run(run)
