"""An epoch whose order is told anew while it is read, as a SubstitutableSampler does: the window
changes in place."""

from __future__ import annotations

import numpy as np
import pytest

from hintsd.follow.sequence import Inos
from hintsd.plan.files import SENT, STAGED
from hintsd.sampling.arranging import Arrangement
from tests.unit.plan.test_planner import FILE_BYTES, Scene
from tests.unit.plan.test_planner_kept import make_scene

BATCH, LOOK_AHEAD, EPOCHS = 16, 6, 3


def train(scene: Scene, orders: list[Inos], *, is_rearranged: bool, work: int) -> list[int]:
    """Files that the origin gave in each epoch. The sampler sees what is staged or stored."""
    mount, planner = scene.mount, scene.planner
    scene.turn()
    fetched = []
    for epoch in range(EPOCHS):
        before = mount.origin_reads.total()
        arrangement = Arrangement(orders[epoch], BATCH, LOOK_AHEAD)
        while arrangement.arranged < len(orders[epoch]):
            start = arrangement.arranged
            cached = np.zeros(len(mount.sizes) + 1, np.bool_)
            cached[1:] = planner.are_cached(np.arange(1, len(cached), dtype=np.uint32), staged=True)
            if arrangement.arrange(2, cached if is_rearranged else None):
                planner.announce("job", epoch, arrangement.reads(), scene.now)
            scene.read(arrangement.decided(start, 2 * BATCH).tolist(), work=work)
            assert planner.status("job")["state"] != "wrong"
        fetched.append(mount.origin_reads.total() - before)
    return fetched


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("work", [1 << 20, 7], ids=["", "slow origin"])
@pytest.mark.parametrize(
    ("count", "ram"), [(400, 330), (600, 200), (400, 60)], ids=["much RAM", "RAM", "lanes"]
)
def test_no_file_is_fetched_again_for_it(count: int, ram: int, work: int, workers: int) -> None:
    """As many as of the shuffle itself, with one job; invariants hold after each turn."""
    told = []
    for is_rearranged in (False, True):
        scene = make_scene(count, ram, count // 4)
        scene.turn_every = 16
        orders = [scene.rng.permutation(np.arange(1, count + 1)).astype(np.uint32) for _ in "012"]
        scene.open("job", orders, samples=count, epochs=EPOCHS, batch_size=BATCH, workers=workers)
        told.append(train(scene, orders, is_rearranged=is_rearranged, work=work))
        assert max(told[-1]) <= count
    plain, rearranged = told
    for before, after in zip(plain, rearranged, strict=True):
        assert after <= before + 0.02 * count, told


def test_what_is_staged_or_asked_for_stays_so() -> None:
    """Also where a file comes twice an epoch. No command takes back anything."""
    count = 300
    scene = make_scene(count, 120, 0)
    scene.turn_every = 16
    order = np.concatenate([np.arange(1, count - 19), np.arange(1, 21)]).astype(np.uint32)
    scene.open("job", [order] * 8, samples=count, batch_size=BATCH)
    scene.turn(work=40)
    planner = scene.planner
    window = planner._jobs["job"].window
    flags = planner._files.flags
    asked = set(np.flatnonzero(flags & (SENT | STAGED)).tolist())
    assert (flags & STAGED != 0).sum() < len(asked)
    begin, end = window.begin, window.end
    turned = order.copy()
    turned[: end - 8] = turned[: end - 8][::-1]
    planner.announce("job", 0, turned, scene.now)
    planner.check_invariants()
    assert (window.begin, window.end) == (begin, end)
    commands = planner.decide(scene.now)
    planner.check_invariants()
    assert {command.kind for command in commands} <= {"arm"}
    assert asked == set(np.flatnonzero(planner._files.flags & (SENT | STAGED)).tolist())
    scene.mount.carry_out(commands)
    scene.settle()
    scene.read(turned.tolist(), turn_every=8)
    assert scene.mount.origin_reads.total() <= count


def test_an_order_of_other_files_begins_a_window_anew() -> None:
    """As before: what was predicted was wrong."""
    scene = make_scene(400, 60, 0)
    scene.turn_every = 16
    first, second = (np.arange(start, start + 200, dtype=np.uint32) for start in (1, 201))
    scene.open("job", [first] * 8, samples=200, batch_size=BATCH)
    scene.settle()
    scene.planner.announce("job", 0, second, scene.now)
    scene.settle()
    staged = np.flatnonzero(scene.planner._files.flags & STAGED)
    assert staged.min() > 200


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_into_the_window_is_staged_and_fits(seed: int) -> None:
    """Files of other sizes than those that leave it."""
    count = 600
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 2 * FILE_BYTES, count).astype(np.uint32)
    scene = Scene(sizes, ram_bytes=420 * FILE_BYTES, ssd_bytes=0, outside_bytes=64 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count, batch_size=BATCH)
    scene.settle()
    scene.read(orders[0][:32].tolist())
    planner, flags = scene.planner, scene.planner._files.flags
    window = planner._jobs["job"].window
    turned = orders[0].copy()
    turned[40:] = turned[40:][::-1]
    assert not planner._windows.has_lanes
    assert window.begin < 40 < window.end < count
    planner.announce("job", 0, turned, scene.now)
    planner.check_invariants()
    scene.settle()
    inside = turned[40 : window.end]
    assert len(inside) > 8
    assert (flags[inside] & STAGED != 0).all()
