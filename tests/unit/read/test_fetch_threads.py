"""Whose each fetch is, and what becomes of one that hangs."""

from __future__ import annotations

import errno
import time
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from fusecache import _native
from fusecache.base.errors import OriginTimeout
from fusecache.read.fetch_threads import GATHER_S, Fetched, Fetches, FetchThreads
from fusecache.store.types import Version

VERSION = Version(1, 4, 1, 1)
DATA = Fetched(b"data", 0, 1, 2, is_pooled=False)


class User:
    def __init__(self, threads: FetchThreads, is_awaited: bool = True) -> None:
        self.landed: list[tuple[str, Fetched]] = []
        self.hung: list[tuple[str, trio.Event]] = []
        calls = (self._landed, self._hangs, lambda: None)
        never = None if is_awaited else (lambda: False)
        self.fetches = Fetches[str](threads, *calls, is_awaited=never)

    def _landed(self, of: str, fetched: Fetched) -> None:
        self.landed.append((of, fetched))

    def _hangs(self, of: str, error: OriginTimeout, ended: trio.Event) -> None:
        self.hung.append((of, ended))


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_native, "fetch_submit", lambda ino, version, tag: None)
    return SimpleNamespace(timeout_s=10.0, failed=lambda number, message: None)


@pytest.fixture
def threads(origin: Any) -> FetchThreads:
    return FetchThreads(origin)


def test_each_fetch_lands_with_its_user(
    threads: FetchThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = User(threads), User(threads)
    one.fetches.submit("first", 7, VERSION)
    other.fetches.submit("second", 7, VERSION)
    assert [one.fetches.land(2, DATA), other.fetches.land(2, DATA)] == [False, True]
    assert (one.landed, other.landed) == ([], [("second", DATA)])
    assert (one.fetches.flying, other.fetches.flying) == (1, 0)
    assert one.fetches.clear() == ["first"]
    assert not one.fetches.land(1, DATA), "nobody waits for it any more"
    assert one.landed == []


def test_what_hangs_is_lost_until_its_thread_comes_back(
    threads: FetchThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    user = User(threads)
    user.fetches.submit("first", 7, VERSION)
    now = 9.0
    user.fetches.submit("second", 8, VERSION)
    user.fetches.give_up_on_hung()
    assert user.hung == []
    now = 10.0
    user.fetches.give_up_on_hung()
    ((of, ended),) = user.hung
    assert (of, user.fetches.flying, user.fetches.lost, ended.is_set()) == ("first", 1, 1, False)
    assert user.fetches.land(1, Fetched(None, errno.EIO, 1, 2, is_pooled=False))
    assert (user.fetches.lost, ended.is_set(), user.landed) == (0, True, [])


def test_what_waits_for_other_hosts_does_not_hang(
    origin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    user = User(FetchThreads(origin, hosts_s=5.0))
    user.fetches.submit("first", 7, VERSION)
    now = 14.0
    user.fetches.give_up_on_hung()
    assert user.hung == []
    now = 15.0
    user.fetches.give_up_on_hung()
    assert [of for of, _ in user.hung] == ["first"]


def land_two(threads: FetchThreads, one: User, other: User) -> None:
    """A fetch of each, until who waits for landings raises EOFError."""

    async def run() -> None:
        one.fetches.submit("first", 7, VERSION)
        other.fetches.submit("second", 8, VERSION)
        await threads.land_forever()

    with pytest.raises(EOFError):
        trio.run(run)


def test_a_users_fault_loses_no_other_landing(
    threads: FetchThreads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = User(threads), User(threads)
    taken = [(1, 7, b"data", 0, 1, 2, False), (2, 8, b"data", 0, 1, 2, False)]
    monkeypatch.setattr(_native, "fetch_fd", lambda: 0)
    monkeypatch.setattr(_native, "fetch_take", lambda most: taken)
    monkeypatch.setattr(one, "landed", None)  # it cannot note anything

    async def once(fd: int) -> None:
        if other.landed:
            raise EOFError

    monkeypatch.setattr(trio.lowlevel, "wait_readable", once)
    land_two(threads, one, other)
    assert [of for of, _ in other.landed] == ["second"]
    assert "a landed fetch" in caplog.text


@pytest.mark.parametrize("is_awaited", [False, True])
def test_what_nobody_waits_for_is_gathered(
    threads: FetchThreads, monkeypatch: pytest.MonkeyPatch, is_awaited: bool
) -> None:
    first, rest = User(threads, is_awaited), User(threads, False)
    taken = [[(1, 7, b"data", 0, 1, 2, False)], [(2, 8, b"data", 0, 1, 2, False)]]
    did = list[object]()

    async def once(fd: int) -> None:
        did.append("looked")
        if not taken:
            raise EOFError

    async def sleep(seconds: float) -> None:
        did.append(seconds)

    monkeypatch.setattr(_native, "fetch_fd", lambda: 0)
    monkeypatch.setattr(_native, "fetch_take", lambda most: taken.pop(0))
    monkeypatch.setattr(trio.lowlevel, "wait_readable", once)
    monkeypatch.setattr(trio, "sleep", sleep)
    land_two(threads, rest, first)
    pause = ["looked"] if is_awaited else ["looked", GATHER_S]
    assert did == [*pause, "looked", GATHER_S, "looked"]


def test_what_cannot_be_submitted_does_not_fly(
    threads: FetchThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ino: int, version: Version, tag: int) -> None:
        raise OSError(errno.EAGAIN, "no thread")

    monkeypatch.setattr(_native, "fetch_submit", fail)
    user = User(threads)
    with pytest.raises(OSError, match="no thread"):
        user.fetches.submit("first", 7, VERSION)
    assert user.fetches.flying == 0
