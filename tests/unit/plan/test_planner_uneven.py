"""What is kept in RAM where files are used unequally often: importance samplers, whose epochs are
known when they begin; against the same rule without a planner, and against that of equal use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from hintsd.follow.sequence import Inos
from tests.support.planner_model import pages
from tests.unit.plan.test_planner import FILE_BYTES, Scene, same_sizes

COUNT, EPOCHS = 1500, 4
Expected = npt.NDArray[np.float64]


# How often each file is expected to be used in an epoch.
WEIGHTS = 1 / np.arange(1, COUNT + 1) ** 0.9
OFTEN = COUNT * WEIGHTS / WEIGHTS.sum()
CHANCE = np.where(np.arange(COUNT) < COUNT // 2, 0.9, 0.3)


def drawn_with_replacement(rng: np.random.Generator) -> Inos:
    """As SHADE draws: some often, and most not at all."""
    return (rng.choice(COUNT, COUNT, p=OFTEN / COUNT) + 1).astype(np.uint32)


def selected(rng: np.random.Generator) -> Inos:
    """As iCACHE selects: each at most once, the important half rather than the other."""
    return (rng.permutation(np.flatnonzero(rng.random(COUNT) < CHANCE)) + 1).astype(np.uint32)


def fetched_at_best(orders: list[Inos], places: int, uses: Expected | None) -> int:
    """Fetches of a cache of so many files, that keeps what is used soonest in the epoch that is
    read, and of what is not used in it again what is used most (`uses`), or was kept first. It may
    keep nothing.
    """
    fetched, cached = 0, dict[int, float]()
    beyond = np.full(COUNT + 1, 2.0 * COUNT) if uses is None else COUNT + COUNT / np.r_[1, uses]
    for order in orders:
        later: dict[int, list[int]] = {}
        for at, ino in reversed(list(enumerate(order.tolist()))):
            later.setdefault(ino, []).append(at)
        cached = {ino: later[ino][-1] if ino in later else beyond[ino] for ino in cached}
        for ino in order.tolist():
            fetched += ino not in cached
            later[ino].pop()
            cached[ino] = later[ino][-1] if later[ino] else beyond[ino]
            if len(cached) > places:
                del cached[max(cached, key=cached.__getitem__)]
    return fetched


def read(
    scene: Scene, orders: list[Inos], uses: Expected | None = None, turn_every: int = 32
) -> int:
    """Fetches of a job that announces each epoch when it begins, and how often files are used."""
    turns: Any = {"turn_every": turn_every, "step_s": 0.01 * turn_every / 8}
    known = [0]
    scene.open(
        "job",
        lambda epoch: orders[epoch] if epoch <= known[0] else None,
        samples=len(orders[0]),
        epochs=None,
    )
    if uses is not None:
        inos = np.arange(1, COUNT + 1, dtype=np.uint32)
        scene.planner.score("job", inos, uses.astype(np.float32))
    scene.settle()
    for epoch, order in enumerate(orders):
        known[0] = epoch
        scene.planner.announce("job", epoch, order, scene.now)
        scene.settle()
        for begin in range(0, len(order), 32):
            part = order[begin : begin + 32].tolist()
            scene.read(part, **turns)
            batches = -(-(begin + len(part)) // 16)
            scene.planner.followers.step("job", epoch, batches, scene.now)
    return sum(scene.mount.origin_reads.values())


@pytest.mark.parametrize(
    ("draw", "uses", "ram_share", "is_scored"),
    [
        (drawn_with_replacement, OFTEN, 0.1, True),
        (drawn_with_replacement, OFTEN, 0.3, False),
        (selected, CHANCE, 0.1, False),
        (selected, CHANCE, 0.3, True),
    ],
)
def test_what_is_used_soonest_is_kept(
    draw: Callable[[np.random.Generator], Inos], uses: Expected, ram_share: float, is_scored: bool
) -> None:
    rng = np.random.default_rng(11)
    orders = [draw(rng) for _ in range(EPOCHS)]
    told = uses if is_scored else None
    ram = int(COUNT * ram_share)
    scene = Scene(
        same_sizes(COUNT),
        ram_bytes=ram * FILE_BYTES,
        ssd_bytes=0,
        outside_bytes=64 * FILE_BYTES,
    )
    fetched, best = read(scene, orders, told), fetched_at_best(orders, ram - ram // 8, told)
    assert fetched <= 1.1 * best, (fetched, best)  # a window has the rest
    assert scene.planner.status("job")["state"] == "running"


def test_hits_are_samples_read_without_a_file_of_the_origin() -> None:
    """Whatever the server that counts; of two jobs those of both, from when one began."""
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES, ssd_bytes=0)
    planner, orders = scene.planner, scene.shuffled()
    planner.set_sources(0.0, 0.0, 70)
    scene.open("job", lambda epoch: orders[epoch], samples=COUNT, epochs=None)
    assert planner.status("job")["hits"] is None
    scene.settle()
    scene.read(orders[0].tolist())
    planner.followers.step("job", 0, COUNT // 16, scene.now)
    planner.set_sources(0.0, 0.0, 70 + COUNT // 4)
    read = COUNT
    assert planner.status("job")["hits"] == pytest.approx(1 - COUNT // 4 / read)
    planner.set_sources(0.0, 0.0, 50)  # another server, which counts from 0
    assert planner.status("job")["hits"] == pytest.approx(1 - (COUNT // 4 + 50) / read)
    planner.set_sources(0.0, 0.0, 50 + 2 * COUNT)
    assert planner.status("job")["hits"] == 0
    scene.open("other", lambda epoch: orders[epoch], samples=COUNT, epochs=None)
    scene.close("job")
    assert planner.status("other")["hits"] is None
    scene.settle()
    planner.followers.step("other", 0, 1, scene.now)
    planner.set_sources(0.0, 0.0, 50 + 2 * COUNT + 4)
    assert planner.status("other")["hits"] == pytest.approx(1 - 4 / 16)


def test_files_of_unequal_sizes_take_no_more_than_there_is() -> None:
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 20 * FILE_BYTES, COUNT).astype(np.uint32)
    orders = [drawn_with_replacement(rng) for _ in range(3)]
    budget_bytes = sum(map(pages, sizes.tolist())) // 5
    scene = Scene(sizes, ram_bytes=budget_bytes, ssd_bytes=0)
    fetched = read(scene, orders)  # at each turn invariants are checked, and that RAM takes it
    assert fetched < 0.75 * sum(map(len, orders))


def test_permutations_keep_what_came_first() -> None:
    """There is nothing to gain, and what goes has to be fetched."""
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT // 5 * FILE_BYTES, ssd_bytes=0)
    orders = scene.shuffled()
    read(scene, orders[:2])
    kept = scene.planner._ram.kept().tolist()
    assert len(kept) >= COUNT // 5 * 7 // 8
    scene.planner.announce("job", 2, orders[2], scene.now)
    scene.read(orders[2].tolist(), turn_every=8)
    assert scene.planner._ram.kept().tolist() == kept
