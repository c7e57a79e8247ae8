"""A mount that is mounted anew while orders come: its files have other numbers."""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import trio

from hintsd.daemon.datasets import Guest, Resolved
from hintsd.daemon.director import Director
from hintsd.daemon.hinted_job import HintedJob
from hintsd.daemon.mount import Mount
from hintsd.daemon.mount_link import Inos
from hintsd.daemon.ordering import Ordering
from hintsd.orders.folders import Samples
from hintsd.orders.hint import Hint
from hintsd.orders.spec import OrderSpec
from tests.support.directed import request

BEFORE = np.array([1, 2, 3], np.uint32)
ANEW = np.array([21, 22, 23], np.uint32)
ORDER = [2, 0, 1]


def resolved(inos: Inos) -> Resolved:
    sizes, stored = np.full(len(inos), 100, np.uint64), np.zeros(len(inos), np.uint8)
    return Resolved(
        mock.Mock(spec=Samples, inos=inos, sizes=sizes, __len__=lambda _: 3), stored, []
    )


class Scene:
    """A mount whose one job announces each epoch, and has announced none."""

    def __init__(self, path: Path) -> None:
        self.mount = Mount(Director(), os.fspath(path))
        job = HintedJob("job", request(path, None), b"", (0, 0), False)
        job.resolve(BEFORE)
        self.job = self.mount.jobs["job"] = job
        self.spec = OrderSpec("indices", 3, indices=np.array(ORDER, np.int64))
        self.mount._resolve = self._resolve  # type: ignore[method-assign]
        self.may_resolve = trio.Event()

    async def _resolve(self, job: HintedJob, hint: Hint, guest: Guest | None = None) -> Resolved:
        await self.may_resolve.wait()
        return resolved(ANEW)

    async def begin(self) -> None:
        planning = self.mount._planning
        async with planning.lock:
            await planning.learn(BEFORE, *resolved_columns(BEFORE))

    async def mount_anew(self, nursery: trio.Nursery) -> None:
        planning = self.mount._planning
        async with planning.lock:
            planning.begin_anew()
        nursery.start_soon(self.mount._plan_anew, self.job, planning.planner)

    def planned(self, epoch: int) -> list[int]:
        planner = self.mount._planning.planner
        return [*map(int, planner._jobs["job"].sequence.orders[epoch].inos)]


def resolved_columns(inos: Inos) -> tuple[Any, Any]:
    found = resolved(inos)
    return found.samples.sizes, found.where


Story = Callable[[Scene, trio.Nursery], Awaitable[None]]


def play(path: Path, story: Story) -> None:
    async def run() -> None:
        scene = Scene(path)
        with trio.fail_after(20):
            await scene.begin()
            async with trio.open_nursery() as nursery:
                await story(scene, nursery)

    trio.run(run)


def test_an_epoch_is_announced_before_its_files_are_found_again(tmp_path: Path) -> None:
    async def story(scene: Scene, nursery: trio.Nursery) -> None:
        await scene.mount_anew(nursery)
        await scene.mount.order("job", 0, scene.spec)
        scene.may_resolve.set()
        while not scene.job.is_planned:
            await trio.sleep(0.01)
        assert scene.planned(0) == ANEW[ORDER].tolist()

    play(tmp_path, story)


@pytest.mark.parametrize("is_supplied", [False, True], ids=["announced", "wanted"])
def test_an_order_is_computed_while_the_files_get_other_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_supplied: bool
) -> None:
    begun, may_end = trio.Event(), trio.Event()
    sequence = Ordering.sequence

    async def slowly(self: Ordering, inos: Inos, order: Any, epoch: int) -> Inos | None:
        found = await sequence(self, inos, order, epoch)
        if epoch == 1 and not begun.is_set():
            begun.set()
            await may_end.wait()
        return found

    async def story(scene: Scene, nursery: trio.Nursery) -> None:
        await scene.mount.order("job", 0, scene.spec)
        monkeypatch.setattr(Ordering, "sequence", slowly)
        computing: Callable[[], Awaitable[None]] = functools.partial(
            scene.mount.order, "job", 1, scene.spec
        )
        if is_supplied:
            computing = functools.partial(scene.mount._supply._supply, "job")
        nursery.start_soon(computing)
        await begun.wait()
        scene.may_resolve.set()
        await scene.mount_anew(nursery)
        while not scene.job.is_planned:
            await trio.sleep(0.01)
        may_end.set()
        while 1 not in scene.mount._planning.planner._jobs["job"].sequence.orders:
            await trio.sleep(0.01)
        assert scene.planned(1) == ANEW[ORDER].tolist()

    play(tmp_path, story)
