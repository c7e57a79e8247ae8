"""What SSD has where other hosts of a pool ask this one for some files (docs/HINTS.md)."""

from __future__ import annotations

import numpy as np
import pytest

from fusecache.base.wire import Place, Result
from hintsd.follow.sequence import Inos
from hintsd.plan.files import KEPT_IN_RAM, RESIDENT, STORED
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
    where = np.where(np.isin(inos, OWNED), Place.OWNED, 0).astype(np.uint8)
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


def test_what_others_ask_for_is_not_kept_in_ram() -> None:
    """They would not find it there, and it could not become a resident."""
    scene = make_scene(0)
    read(scene, scene.shuffled()[:1])
    kept = having(scene, KEPT_IN_RAM)
    assert len(kept) > 10
    assert not np.isin(kept, OWNED).any()


def test_room_is_left_for_what_others_alone_read() -> None:
    """A rank of a distributed job reads a part of each epoch: others ask for the rest."""
    scene = make_scene(120)
    mine = np.arange(1, COUNT // 2 + 1, dtype=np.uint32)
    settle(scene, [scene.rng.permutation(mine) for _ in range(2)])
    waiting = OWNED[OWNED > COUNT // 2]
    stored = having(scene, STORED)
    assert np.isin(OWNED[OWNED <= COUNT // 2], stored).all()
    assert having(scene, RESIDENT).tolist() == waiting.tolist()
    assert len(stored) == 120 - len(waiting)
    for part in np.array_split(waiting, 4):  # other hosts ask for them
        store_for_others(scene, part)
        scene.settle()
    assert scene.planner._ssd.room_bytes == scene.mount.ssd_free_bytes == 0
    assert len(having(scene, RESIDENT)) == 0
    assert set(having(scene, STORED).tolist()) == {*stored.tolist(), *waiting.tolist()}
    assert len(scene.mount.ssd) == 120


def store_for_others(scene: Scene, inos: Inos) -> None:
    """The mount stores these (once), and tells it."""
    new = [int(ino) for ino in inos if int(ino) not in scene.mount.ssd]
    scene.mount.ssd.update(new)
    scene.mount.ssd_free_bytes -= len(new) * FILE_BYTES
    results = np.full(len(inos), Result.STORED_FOR_OTHERS, np.uint8)
    scene.planner.done(inos, results, scene.now)


def test_what_is_stored_for_others_counts_once() -> None:
    """Also where it was asked for, and is answered later; of unknown files nothing is noted."""
    scene = make_scene(80)
    scene.open("job", scene.shuffled()[:2], samples=COUNT, epochs=2)
    scene.turn(work=0)  # nothing is answered
    ssd = scene.planner._ssd
    room_bytes, storing_bytes = ssd.room_bytes, ssd.storing_bytes
    assert room_bytes == 80 * FILE_BYTES
    assert storing_bytes > 0
    some = OWNED[:20]
    for _ in range(2):
        store_for_others(scene, some)
        scene.planner.check_invariants()
        assert (ssd.room_bytes, ssd.storing_bytes) == (room_bytes - 20 * FILE_BYTES, storing_bytes)
    store_for_others(scene, np.array([COUNT + 1000], np.uint32))
    scene.mount.ssd.discard(COUNT + 1000)
    scene.mount.ssd_free_bytes += FILE_BYTES
    assert ssd.room_bytes == room_bytes - 20 * FILE_BYTES
    scene.settle()
    assert not np.isin(list(scene.mount.origin_reads), some).any(), "they are on SSD"
    assert set(having(scene, STORED).tolist()) == set(OWNED.tolist()) == scene.mount.ssd
    assert (ssd.room_bytes, ssd.storing_bytes) == (scene.mount.ssd_free_bytes, 0) == (0, 0)


def test_room_for_others_outlasts_a_loss_of_room() -> None:
    """Where files make way for others, too, and no job here reads what is waited for."""
    scene = make_scene(200)
    scene.planner.set_pins(False, 0, others_may_go=True, evicts=True)
    mine = np.arange(1, COUNT // 2 + 1, dtype=np.uint32)
    for name in "ab":
        of_job = [scene.rng.permutation(mine) for _ in range(2)]
        scene.open(name, of_job, samples=len(mine), epochs=2)
    scene.settle()
    waiting = having(scene, RESIDENT)
    assert len(waiting) >= 40
    scene.mount.ssd_free_bytes = 30 * FILE_BYTES
    scene.planner.set_budgets(scene.budget_bytes * 10 // 9, scene.mount.ssd_free_bytes)
    assert len(having(scene, RESIDENT)) == 30


def test_what_others_ask_for_makes_way_for_nothing() -> None:
    """Two jobs share a cache: what is used later makes way (docs/HINTS.md, *By next use*)."""
    scene = make_scene(200)
    scene.planner.set_pins(False, 0, others_may_go=True, evicts=True)
    orders = {name: scene.shuffled()[:2] for name in "ab"}
    for name, of_job in orders.items():
        scene.open(name, of_job, samples=COUNT, epochs=2)
    scene.settle()
    before = having(scene, STORED)
    assert np.isin(OWNED, before).all()
    for epoch in range(2):
        for begin in range(0, COUNT, 16):
            for of_job in orders.values():
                scene.read(of_job[epoch][begin : begin + 16].tolist())
    after = having(scene, STORED)
    assert len(np.setdiff1d(before, after)) > 10, "nothing made way"
    assert np.isin(OWNED, after).all()


def test_a_file_that_is_learned_anew_may_be_another_hosts() -> None:
    scene = make_scene(80)
    inos = np.arange(1, COUNT + 1, dtype=np.uint32)
    others = np.where(inos % HOSTS == 2, Place.OWNED, 0).astype(np.uint8)
    scene.planner.learn(inos, np.full(COUNT, FILE_BYTES, np.uint64), others)
    read(scene, scene.shuffled()[:2])
    assert set(having(scene, STORED).tolist()) == set(inos[inos % HOSTS == 2].tolist())


def test_that_it_is_asked_for_does_not_say_that_it_is_stored() -> None:
    scene = make_scene(80)
    assert len(having(scene, STORED)) == 0
    assert not scene.planner.are_cached(OWNED).any()
