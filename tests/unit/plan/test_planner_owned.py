"""What SSD has where other hosts of a pool ask this one for some files (docs/HINTS.md)."""

from __future__ import annotations

import numpy as np
import pytest

from fusecache.base.wire import Listed
from hintsd.follow.sequence import Inos
from hintsd.plan.files import RESIDENT, STORED
from tests.unit.plan.test_planner import FILE_BYTES, Scene, same_sizes

COUNT, HOSTS = 320, 4
OWNED = np.arange(1, COUNT + 1, HOSTS, dtype=np.uint32)


def make_scene(ssd_files: int) -> Scene:
    scene = Scene(
        same_sizes(COUNT),
        ram_bytes=60 * FILE_BYTES,
        ssd_bytes=ssd_files * FILE_BYTES,
        outside_bytes=64 * FILE_BYTES,
    )
    inos = np.arange(1, COUNT + 1, dtype=np.uint32)
    where = np.where(np.isin(inos, OWNED), Listed.OWNED, 0).astype(np.uint8)
    scene.planner.learn(inos, np.full(COUNT, FILE_BYTES, np.uint64), where)
    return scene


def having(scene: Scene, flags: int) -> Inos:
    return np.flatnonzero(scene.planner._files.flags & flags).astype(np.uint32)


def settle(scene: Scene, orders: list[Inos]) -> None:
    scene.open("job", orders, samples=len(orders[0]), epochs=len(orders))
    scene.settle()


def read(scene: Scene, orders: list[Inos]) -> None:
    settle(scene, orders)
    for order in orders:
        scene.read(order.tolist())
        scene.settle()


@pytest.mark.parametrize("ssd_files", [40, 80, 120])
def test_what_others_ask_for_is_on_ssd_before_all_else(ssd_files: int) -> None:
    scene = make_scene(ssd_files)
    read(scene, scene.shuffled()[:2])
    stored = having(scene, STORED)
    assert len(stored) == ssd_files
    assert np.isin(stored, OWNED).sum() == min(ssd_files, len(OWNED))


def test_room_is_left_for_what_others_alone_read() -> None:
    """A rank of a distributed job reads a part of each epoch: others ask for the rest."""
    scene = make_scene(120)
    mine = np.arange(1, COUNT // 2 + 1, dtype=np.uint32)
    settle(scene, [scene.rng.permutation(mine) for _ in range(2)])
    stored = having(scene, STORED | RESIDENT)
    assert np.isin(OWNED[OWNED <= COUNT // 2], stored).all()
    assert len(stored) == 120 - np.count_nonzero(OWNED > COUNT // 2)


def test_a_file_that_is_learned_anew_may_be_another_hosts() -> None:
    scene = make_scene(80)
    inos = np.arange(1, COUNT + 1, dtype=np.uint32)
    others = np.where(inos % HOSTS == 2, Listed.OWNED, 0).astype(np.uint8)
    scene.planner.learn(inos, np.full(COUNT, FILE_BYTES, np.uint64), others)
    read(scene, scene.shuffled()[:2])
    assert set(having(scene, STORED).tolist()) == set(inos[inos % HOSTS == 2].tolist())


def test_that_it_is_asked_for_does_not_say_that_it_is_stored() -> None:
    scene = make_scene(80)
    assert len(having(scene, STORED)) == 0
    assert not scene.planner.are_cached(OWNED).any()
