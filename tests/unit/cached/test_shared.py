"""A mount's blocks in the service: what is asked of it, and told to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from fusecache import _native
from fusecache.base.errors import UnknownInode
from fusecache.cached import shared as module
from fusecache.cached.shared import DOUBTS_MOST, SharedBlocks
from fusecache.cached.talk import SEGMENTS_FROM, Found
from fusecache.store.types import BLOCK_BYTES, Location, Version
from tests.support import PATIENCE_S
from tests.unit.cached.support import eventually

SEGNO = SEGMENTS_FROM + 5


class FakeService:
    """It has all that it is asked for, and takes doubts once it may."""

    def __init__(self) -> None:
        self.is_used = True
        self.asked: list[tuple[list[bytes], list[int], bool]] = []
        self.doubted: list[tuple[int, int]] = []
        self.may_go_on = threading.Event()
        self.fails = self.is_promised = False

    def find(
        self, names: Sequence[bytes], lengths: Sequence[int], promise: bool = False
    ) -> list[Found]:
        for length in lengths:
            length.to_bytes(4, "little")  # as it is sent
        self.asked.append((list(names), list(lengths), promise))
        if self.is_promised:
            return [Found(None, is_promised=True)] * len(names)
        return [
            Found(Location(SEGNO, 4096 * number, 200, length))
            for number, length in enumerate(lengths, 1)
        ]

    def doubt(self, segno: int, offset: int) -> None:
        self.doubted.append((segno, offset))
        assert self.may_go_on.wait(PATIENCE_S)
        if self.fails:
            raise OSError("it has failed")


class FakeManifest:
    """It knows all files. Their digests are their paths."""

    def find(self, path: bytes, _: Version, number: int) -> bytes | None:
        assert number == 0
        return path if path != b"unlisted" else None


class FakeMetrics:
    def add(self, *_: object) -> None:
        pass


SIZES = {
    1: 1,
    2: BLOCK_BYTES,
    3: BLOCK_BYTES + 1,
    4: 2**33,
    5: 2**62,
    6: 5000,
    7: 0,
}


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, Location]]:
    """What the front was told of: inode, block, where."""
    told: list[tuple[int, int, Location]] = []

    def version(ino: int) -> Version:
        if ino not in SIZES:
            raise UnknownInode(ino)
        return Version(0, SIZES[ino], 0, 0)

    def use(_: object, ino: int, number: int, at: Location, is_of: Version) -> bool:
        assert is_of.size == SIZES[ino]
        told.append((ino, number, at))
        return True

    monkeypatch.setattr(_native, "path", lambda ino: b"unlisted" if ino == 6 else b"%d" % ino)
    monkeypatch.setattr("fusecache.table.namespace.version", version)
    monkeypatch.setattr(module, "use", use)
    return told


@pytest.fixture
def shared(service: FakeService) -> Iterator[SharedBlocks]:
    made = SharedBlocks(cast(Any, service), cast(Any, FakeManifest()), cast(Any, FakeMetrics()))
    yield made
    service.may_go_on.set()
    made._doubts.shutdown()


@pytest.mark.parametrize("promise", [False, True])
def test_of_many_files_those_of_one_block_are_located_and_larger_ones_left_out(
    service: FakeService,
    shared: SharedBlocks,
    used: list[tuple[int, int, Location]],
    promise: bool,
) -> None:
    shared.locate_all([4, 1, 99, 3, 2, 5, 6], promise)
    assert service.asked == [([b"1", b"2"], [1, BLOCK_BYTES], promise)]
    assert used == [
        (1, 0, Location(SEGNO, 4096, 200, 1)),
        (2, 0, Location(SEGNO, 8192, 200, BLOCK_BYTES)),
    ]
    shared.locate_all([4, 5], promise)
    assert len(used) == 2


def test_what_is_not_used_is_asked_nothing(
    service: FakeService, shared: SharedBlocks, used: list[tuple[int, int, Location]]
) -> None:
    service.is_used = False
    shared.locate_all([1, 2, 4])
    assert not any(names for names, _, _ in service.asked)
    assert not used


def test_what_another_mount_has_promised_is_waited_for_so_long_and_then_not_at_once_again(
    service: FakeService,
    shared: SharedBlocks,
    used: list[tuple[int, int, Location]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("fusecache.cached.shared.time.monotonic", lambda: now)
    block = module.Block(1, Version(0, 1, 0, 0), 0)
    service.is_promised = True
    assert not shared.locate(block, promise=False)
    assert not shared.is_awaited(1, 0), "nobody waits for it"
    assert not shared.locate(block, promise=True)
    assert shared.is_awaited(1, 0)
    now += module.WAIT_S / 2
    shared.locate(block, promise=True)
    now += module.WAIT_S / 2
    assert not shared.is_awaited(1, 0), "so long from when it was heard first"
    shared.locate(block, promise=True)
    assert not shared.is_awaited(1, 0), "it was waited for in vain"
    now += module.VAIN_S + 1
    shared.locate(block, promise=True)
    assert shared.is_awaited(1, 0)
    service.is_promised = False
    assert shared.locate(block, promise=True)
    assert not shared.is_awaited(1, 0)
    assert [ino for ino, *_ in used] == [1]


def test_a_record_is_doubted_once_at_a_time(service: FakeService, shared: SharedBlocks) -> None:
    for _ in range(5):
        shared.quarantine(SEGNO, 4096)
    shared.quarantine(SEGNO, 8192)
    shared.quarantine(SEGNO + 1, 4096)
    eventually(lambda: bool(service.doubted))
    shared.quarantine(SEGNO, 4096)  # it is being told
    service.may_go_on.set()
    eventually(lambda: not shared._doubted)
    assert service.doubted == [(SEGNO, 4096), (SEGNO, 8192), (SEGNO + 1, 4096)]
    shared.quarantine(SEGNO, 4096)
    eventually(lambda: not shared._doubted)
    assert len(service.doubted) == 4, "later it may be bad again"


@pytest.mark.parametrize("fails", [False, True])
def test_so_many_doubts_are_on_their_way_and_no_more(
    service: FakeService, shared: SharedBlocks, fails: bool
) -> None:
    service.fails = fails
    for number in range(3 * DOUBTS_MOST):
        shared.quarantine(SEGNO, 4096 * number)
    service.may_go_on.set()
    eventually(lambda: not shared._doubted)
    assert service.doubted == [(SEGNO, 4096 * number) for number in range(DOUBTS_MOST)]
    shared.quarantine(SEGNO, 1)
    eventually(lambda: not shared._doubted)
    assert service.doubted[-1] == (SEGNO, 1)
