"""What becomes of a READ that has missed: queues and time-outs. Real ones: mount/test_misses.py."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio
from trio.abc import Clock
from trio.testing import MockClock

from fusecache import _native
from fusecache.base.errors import OriginChanged, OriginTimeout
from fusecache.read import misses
from fusecache.read.fetch_threads import Fetched, FetchThreads
from fusecache.read.misses import FLYING_MOST, Misses
from fusecache.store.types import Version
from fusecache.table import namespace

DATA = b"data"


class Scene:
    """The front, the fetch threads, Fetcher and Origin, as far as misses use them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fresh: queue.Queue[int] = queue.Queue()
        self.kept: set[int] = set()  # whose READs wait
        self.switched: list[bool] = []
        self.passed: list[int] = []
        self.submitted: list[tuple[int, int]] = []  # tag, inode
        self.submitted_by: set[str] = set()  # threads
        self.finished: list[int] = []
        self.failed: list[tuple[int, type[Exception]]] = []
        self.stored: set[int] = set()
        self.awaited: set[int] = set()  # what another mount of the host reads
        self.flying: set[int] = set()
        self.by_threads: dict[int, trio.Event] = {}  # a plan's fetches, and whether they are done
        self.begun: set[int] = set()  # flights that nobody has ended
        self.has_room = self.is_ready = self.is_settled = True
        self.may_answer = threading.Event()  # the index
        self.may_answer.set()
        origin: Any = SimpleNamespace(
            tick_ns=1,
            timeout_s=60.0,
            threads=FLYING_MOST,
            answered_at=0.0,
            failed=lambda number, message: None,
        )
        fetcher: Any = SimpleNamespace(
            **{"claim": self._claim, "fail": self._fail},
            **{"finish": self._finish, "land": self._land, "has_room": lambda: self.has_room},
            flight_of=self._flight_of,
            is_origin_ready=lambda ino: self.is_ready,
        )
        for name, stub in {
            "missed_fresh": self._fresh,
            "missed_enable": lambda enabled, tick_ns: self.switched.append(enabled),
            "missed_pass": self._pass,
            "missed_waits": lambda ino: ino in self.kept,
            "fetch_submit": self._submit,
            "get_location": lambda ino, block: None,
        }.items():
            monkeypatch.setattr(_native, name, stub)
        for name in ("ROOM_WAIT_S", "INDEX_TIMEOUT_S"):
            monkeypatch.setattr(misses, name, 60.0)
        monkeypatch.setattr(namespace, "version", lambda ino: Version(1, 1, 1, 1))
        sources: Any = SimpleNamespace(
            is_near=self._is_near, is_awaited=lambda ino, block: ino in self.awaited
        )
        self.origin = origin
        self.threads = FetchThreads(origin)
        self.misses = Misses(fetcher, origin, sources, self.threads)

    def _submit(self, ino: int, version: Version, tag: int) -> None:
        self.submitted.append((tag, ino))
        self.submitted_by.add(threading.current_thread().name)

    def _fresh(self, wait: bool) -> bytes:
        inos = []
        try:
            inos.append(self.fresh.get(timeout=0.02) if wait else self.fresh.get_nowait())
            while True:
                inos.append(self.fresh.get_nowait())
        except queue.Empty:
            return np.array(inos, np.uint32).tobytes()

    def read(self, *inos: int) -> None:
        for ino in inos:
            self.kept.add(ino)
            self.fresh.put(ino)

    def land(self, tag: int, data: bytes | None = DATA) -> None:
        """A fetch thread answers, then Python hears of it."""
        if data is not None:
            self.kept.discard(next(ino for other, ino in self.submitted if other == tag))
        self.misses._fetches.land(
            tag, Fetched(data, 0 if data else errno.EIO, 1, 2, is_pooled=False)
        )
        self.misses._fetches.after_landings()

    def _pass(self, ino: int) -> None:
        self.passed += sorted(self.kept) if ino == misses.ALL else [ino]
        self.kept -= self.kept.copy() if ino == misses.ALL else {ino}

    def _is_near(self, ino: int, version: Version, block: int) -> bool:
        assert self.may_answer.wait(30)
        return ino in self.stored

    def _flight_of(self, ino: int) -> object:
        if ino in self.by_threads:
            return SimpleNamespace(is_by_threads=True, done=self.by_threads[ino])
        return SimpleNamespace(is_by_threads=False) if ino in self.flying else None

    def _claim(self, ino: int) -> tuple[object, bool]:
        if (flight := self._flight_of(ino)) is not None:
            return flight, False
        self.begun.add(ino)
        return ino, True

    def _finish(self, ino: int, *_: object, store: bool, missed: bool, lent: bool) -> bool:
        assert store
        assert missed
        assert not lent
        self.finished.append(ino)
        return self.is_settled

    def _land(self, ino: int, flight: int) -> None:
        assert flight == ino
        self.begun.discard(ino)

    def _fail(
        self, ino: int, flight: object, error: Exception, ended: trio.Event | None = None
    ) -> None:
        self.failed.append((ino, type(error)))
        self.begun.discard(ino)

    def play(self, act: Callable[[], Awaitable[None]], clock: Clock | None = None) -> None:
        async def main() -> None:
            with trio.fail_after(30):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.misses.run_forever)
                    await act()
                    nursery.cancel_scope.cancel()

        try:
            trio.run(main, clock=clock)
        finally:
            self.may_answer.set()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(monkeypatch)
    yield made
    assert not made.kept, "READs wait for ever"
    assert not made.begun, "readers join what is over"
    if made.misses._thread is not None:
        made.misses._thread.join(10)
        assert not made.misses._thread.is_alive()


async def becomes(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.sleep(0.005)


def test_what_is_not_on_ssd_is_fetched_and_what_is_is_passed_on(scene: Scene) -> None:
    scene.stored.add(2)

    async def act() -> None:
        scene.read(1, 2, 3)
        await becomes(lambda: len(scene.submitted) == 2)
        for tag, _ in scene.submitted:
            scene.land(tag)

    scene.play(act)
    assert [ino for _, ino in scene.submitted] == scene.finished == [1, 3]
    assert scene.passed == [2]
    assert scene.switched == [True, False]
    assert scene.submitted_by == {"misses"}, "each hand-over costs as much as a small file"


@pytest.mark.parametrize("why", ["flies", "has landed", "origin is away"])
def test_what_is_not_plain_is_passed_on(scene: Scene, why: str) -> None:
    async def act() -> None:
        if why == "flies":
            scene.flying.add(1)
        elif why == "has landed":
            scene.by_threads[1] = trio.Event()
            scene.by_threads[1].set()
        else:
            scene.is_ready = False
        scene.read(1)
        await becomes(lambda: scene.passed == [1])

    scene.play(act)
    assert scene.submitted == []


def test_what_is_fetched_already_is_awaited(scene: Scene) -> None:
    """Its thread answers 1; 2 was not read, or was asked for behind the answer."""
    scene.by_threads = {1: trio.Event(), 2: trio.Event()}

    async def act() -> None:
        scene.read(1, 2)
        await becomes(lambda: scene.misses._joined == {1, 2})
        assert scene.passed == []
        scene.kept.discard(1)
        scene.misses.let_go(1)
        scene.misses.let_go(2)
        assert not scene.kept
        assert scene.passed == [1, 2]
        scene.misses.let_go(2)
        assert scene.passed == [1, 2], "nobody has joined it"

    scene.play(act)
    assert scene.submitted == []


def test_who_joins_a_fetch_that_hangs_is_passed_on_with_it(scene: Scene) -> None:
    async def act() -> None:
        scene.read(1)
        await becomes(lambda: scene.submitted)
        scene.by_threads[1] = trio.Event()
        scene.read(1)
        await becomes(lambda: scene.misses._joined)
        scene.origin.timeout_s = 0.1
        await becomes(lambda: scene.passed == [1])
        assert not scene.misses._joined

    scene.play(act)


def test_what_was_answered_before_its_turn_is_not_fetched(scene: Scene) -> None:
    async def act() -> None:
        scene.may_answer.clear()
        scene.read(1, 2)
        scene.kept.discard(1)  # by a fetch thread
        scene.may_answer.set()
        await becomes(lambda: scene.submitted)

    scene.play(act)
    assert [ino for _, ino in scene.submitted] == [2]


def test_it_says_that_some_wait_for_a_place(scene: Scene) -> None:
    """Then a plan begins no fetches (ahead/fetching.py)."""

    async def act() -> None:
        assert not scene.misses.is_crowded
        scene.read(*range(1, FLYING_MOST + 2))
        await becomes(lambda: scene.misses.is_crowded)
        assert len(scene.submitted) == FLYING_MOST

    scene.play(act)


def test_what_has_changed_meanwhile_is_passed_on(scene: Scene) -> None:
    scene.is_settled = False

    async def act() -> None:
        scene.read(1)
        await becomes(lambda: scene.submitted)
        scene.land(scene.submitted[0][0])

    scene.play(act)
    assert (scene.passed, scene.finished) == ([1], [1])


def test_what_cannot_be_read_is_passed_on(scene: Scene) -> None:
    async def act() -> None:
        scene.read(1)
        await becomes(lambda: scene.submitted)
        scene.land(scene.submitted[0][0], None)

    scene.play(act)
    assert (scene.passed, scene.finished) == ([1], [])
    assert [ino for ino, _ in scene.failed] == [1]


def test_what_hangs_is_given_up_and_counts_until_it_ends(scene: Scene) -> None:
    scene.origin.timeout_s = 0.1

    async def act() -> None:
        scene.read(1)
        await becomes(lambda: scene.passed == [1])
        assert scene.failed == [(1, OriginTimeout)]
        ((tag, ended),) = scene.misses._fetches._lost.items()
        assert not ended.is_set()
        scene.land(tag, None)
        assert ended.is_set()
        assert scene.misses._fetches.lost == 0

    scene.play(act)
    assert scene.finished == []


def test_more_than_fly_at_once_wait_and_are_passed_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act() -> None:
        scene.read(*range(1, FLYING_MOST + 3))
        await becomes(lambda: len(scene.submitted) == FLYING_MOST)
        scene.land(scene.submitted[0][0])
        await becomes(lambda: len(scene.submitted) == FLYING_MOST + 1)
        assert scene.passed == []
        monkeypatch.setattr(misses, "ROOM_WAIT_S", 0.1)
        await becomes(lambda: scene.passed == [FLYING_MOST + 2])

    scene.play(act)


def test_the_publisher_is_waited_for(scene: Scene) -> None:
    async def act() -> None:
        scene.has_room = False
        scene.read(1)
        await trio.sleep(0.2)
        assert scene.submitted == []
        scene.has_room = True
        await becomes(lambda: scene.submitted)

    scene.play(act)
    assert scene.passed == [1], "at its end, what flies is passed on"


def test_what_another_mount_reads_is_passed_on_when_it_has_come(scene: Scene) -> None:
    scene.awaited = {1, 2}
    scene.read(1, 2, 3)

    async def act() -> None:
        await becomes(lambda: [ino for _, ino in scene.submitted] == [3])
        scene.stored.add(1)
        await becomes(lambda: scene.passed == [1])
        assert [ino for _, ino in scene.submitted] == [3], "2 is still awaited"
        scene.awaited.discard(2)
        await becomes(lambda: [ino for _, ino in scene.submitted] == [3, 2])

    scene.play(act)
    assert 2 not in scene.passed[:1]


def test_an_index_that_hangs_while_others_are_awaited_holds_nobody(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(misses, "INDEX_TIMEOUT_S", 0.1)
    scene.awaited = {1}
    scene.read(1)

    async def act() -> None:
        await becomes(lambda: bool(scene.misses._awaited))
        scene.may_answer.clear()
        scene.read(2)
        await becomes(lambda: sorted(scene.passed) == [1, 2])
        assert scene.switched == [True, False]
        scene.may_answer.set()
        await becomes(lambda: scene.switched == [True, False, True])

    scene.play(act)
    assert scene.submitted == []


def test_an_index_that_hangs_holds_nobody(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses, "INDEX_TIMEOUT_S", 0.1)
    sources: Any = scene.misses._sources
    asked, is_near = list[int](), sources.is_near

    def is_asked(ino: int, *of: Any) -> bool:
        asked.append(ino)
        return bool(is_near(ino, *of))

    sources.is_near = is_asked
    scene.may_answer.clear()
    scene.read(1, 3)  # together

    async def act() -> None:
        await becomes(lambda: scene.passed == [1, 3])
        assert scene.switched == [True, False]
        scene.may_answer.set()
        await becomes(lambda: scene.switched == [True, False, True])
        monkeypatch.setattr(misses, "INDEX_TIMEOUT_S", 60.0)
        scene.read(2)
        await becomes(lambda: scene.submitted)
        assert [ino for _, ino in scene.submitted] == [2], "nobody waits for the first any more"

    scene.play(act)
    assert asked == [1, 2], "nor for what was named with it"


def test_an_index_that_is_slow_does_not_hang(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer takes more than half of the time that one may take."""
    monkeypatch.setattr(misses, "INDEX_TIMEOUT_S", 10.0)
    clock, answers = MockClock(rate=1.0), threading.Semaphore(0)
    sources: Any = scene.misses._sources
    sources.is_near = lambda ino, version, block: not answers.acquire(timeout=30)

    async def act() -> None:
        scene.read(1, 2, 3)
        for answered in range(1, 4):
            await trio.sleep(0.1)  # it is looked at
            clock.jump(6.0)
            await trio.sleep(0.1)
            answers.release()
            while scene.misses._answered < answered:
                await trio.sleep(0.005)
            await becomes(lambda: len(scene.submitted) == answered)  # noqa: B023
        assert scene.passed == []

    scene.play(act, clock)


def test_those_behind_a_slow_index_are_passed_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(misses, "BATCH_TIMEOUT_S", -1.0)

    async def act() -> None:
        scene.read(1, 2)
        await becomes(lambda: scene.passed == [1, 2])

    scene.play(act)
    assert scene.submitted == []


def test_after_a_failure_it_begins_anew(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        if scene.submitted:
            raise ZeroDivisionError

    async def act() -> None:
        scene.read(1)
        await becomes(lambda: scene.submitted)
        await trio.sleep_forever()

    with monkeypatch.context() as broken:
        broken.setattr(scene.misses._fetches, "give_up_on_hung", fail)
        with pytest.raises(ExceptionGroup):
            scene.play(act)
    assert scene.passed == [1]
    assert [ino for ino, _ in scene.failed] == [1]

    async def again() -> None:
        await becomes(lambda: scene.switched == [True, False, True])  # else nothing is kept
        scene.read(2)
        await becomes(lambda: len(scene.submitted) == 2)

    scene.play(again)


def test_what_cannot_be_begun_is_passed_on(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have grown since it was named."""

    def fail(ino: int, version: Version, tag: int) -> None:
        raise ValueError("larger than one block")

    monkeypatch.setattr(_native, "fetch_submit", fail)

    async def act() -> None:
        scene.read(1)
        await becomes(lambda: scene.passed == [1])

    scene.play(act)
    assert set(scene.failed) == {(1, OriginChanged)}
    assert scene.misses._fetches.flying == 0


def test_a_fault_passes_one_on_and_the_next_is_looked_for(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    def is_near(ino: int, version: Version, block: int) -> bool:
        if ino == 1:
            raise MemoryError
        return False

    async def act() -> None:
        scene.read(1, 2)
        await becomes(lambda: scene.submitted)
        assert scene.passed == [1]
        scene.land(scene.submitted[0][0])

    scene.misses._sources.is_near = is_near  # type: ignore[method-assign]
    scene.play(act)
    assert scene.finished == [2]
    assert "a READ that missed" in caplog.text
