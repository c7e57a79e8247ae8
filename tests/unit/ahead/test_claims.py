"""Files that a plan is about to fetch, and another mount of the host perhaps fetches already."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from fusecache.ahead.stored import Claim, Claims
from fusecache.read.sources import AWAITED_POLL_S
from fusecache.table import namespace


class Service:
    """SsdSource, as far as claims use it: what is on SSD, and what another mount reads."""

    def __init__(self) -> None:
        self.has_shared = True
        self.stored: set[int] = set()
        self.awaited: set[int] = set()
        self.asked: list[list[int]] = []
        self.on_asked: Callable[[], object] = lambda: None

    def locate_shared(self, inos: list[int], are_read: bool = False) -> None:
        assert are_read, "what is claimed is read now, and so promised"
        self.asked.append(inos)
        self.on_asked()

    def is_awaited(self, ino: int) -> bool:
        return ino in self.awaited


class Scene:
    def __init__(self) -> None:
        self.service = Service()
        self.ours: list[Claim] = []
        self.come: list[Claim] = []
        segments: Any = self.service
        self.claims = Claims(segments, self._settled)

    def _settled(self, ours: list[Claim], come: list[Claim]) -> None:
        assert not any(claim.ino in self.claims for claim in (*ours, *come))
        self.ours += ours
        self.come += come

    def play(self, act: Callable[[], Awaitable[None]]) -> None:
        async def main() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.claims.run_forever)
                await act()
                nursery.cancel_scope.cancel()

        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.05))

    async def settle(self) -> None:
        """What is to be done at once is done."""
        await trio.sleep(AWAITED_POLL_S / 2)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    scene = Scene()
    monkeypatch.setattr(namespace, "is_located", lambda ino: ino in scene.service.stored)
    return scene


def claim(ino: int, *, store: bool = False, staged: bool = False) -> Claim:
    return Claim(ino, store, staged)


def test_many_are_asked_for_at_once_and_each_is_settled(scene: Scene) -> None:
    scene.service.stored, scene.service.awaited = {1}, {2}

    async def act() -> None:
        for ino in (1, 2, 3):
            scene.claims.put(claim(ino, staged=ino == 1))
        await scene.settle()
        assert scene.service.asked == [[1, 2, 3]]
        assert (scene.come, scene.ours) == ([claim(1, staged=True)], [claim(3)])
        assert 2 in scene.claims
        assert len(scene.claims) == 1

    scene.play(act)


def test_what_another_mount_reads_is_looked_for_until_it_has_come(scene: Scene) -> None:
    scene.service.awaited = {1, 2}

    async def act() -> None:
        scene.claims.put(claim(1))
        scene.claims.put(claim(2))
        await trio.sleep(3 * AWAITED_POLL_S)
        assert scene.service.asked[:2] == [[1, 2]] * 2
        assert scene.claims.has_any({2, 7})
        scene.service.stored.add(1)
        scene.service.awaited.clear()
        await trio.sleep(2 * AWAITED_POLL_S)
        assert (scene.come, scene.ours) == ([claim(1)], [claim(2)])
        assert not scene.claims.has_any({1, 2})

    scene.play(act)


def test_one_that_waits_can_be_asked_for_to_be_stored(scene: Scene) -> None:
    scene.service.awaited = {1}

    async def act() -> None:
        scene.claims.put(claim(1))
        await scene.settle()
        scene.claims.store(1)
        scene.service.awaited.clear()
        await trio.sleep(2 * AWAITED_POLL_S)
        assert scene.ours == [claim(1, store=True)]

    scene.play(act)


def test_after_the_end_of_a_plan_nothing_is_settled(scene: Scene) -> None:
    """Also what the service was just asked for; what the next plan claims meanwhile is asked."""

    def end() -> None:
        scene.service.on_asked = lambda: None
        scene.claims.clear()
        scene.claims.put(claim(2))

    scene.service.on_asked = end

    async def act() -> None:
        scene.claims.put(claim(1))
        await trio.sleep(3 * AWAITED_POLL_S)
        assert scene.ours == [claim(2)]
        assert scene.service.asked == [[1], [2]]

    scene.play(act)
