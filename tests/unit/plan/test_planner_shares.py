"""Several datasets in one cache: each has a share, and who waits for nothing leaves its own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.planner_model import loader_order
from tests.unit.plan.test_planner import FILE_BYTES, Scene, same_sizes

COUNT = 3000  # files of each dataset
RAM, SSD = 1200, 2400  # room for so many
ORIGIN = 24  # files that it gives in a turn
EPOCHS = 20


class Trained:
    """A training of one dataset, which takes `per_turn` samples a turn: more than the origin gives,
    or less.
    """

    def __init__(
        self,
        scene: Scene,
        number: int,
        per_turn: int,
        dataset: int | None = None,
        epochs: int = EPOCHS,
    ) -> None:
        self.scene, self.name, self.per_turn = scene, f"job{number}", per_turn
        first = (number if dataset is None else dataset) * COUNT + 1
        files = np.arange(first, first + COUNT, dtype=np.uint32)
        orders = [scene.rng.permutation(files) for _ in range(epochs)]
        self._files = set(files.tolist())
        self._reads = [ino for order in orders for ino in loader_order(order, 8, 2, 2, scene.rng)]
        self.read = self.waited = 0
        scene.open(
            *(self.name, orders),
            samples=COUNT, epochs=epochs, workers=2, batch_size=8, dataset=files,
        )  # fmt: skip

    def train(self) -> None:
        """What is not in RAM it waits for, and has no more in this turn."""
        for ino in self._reads[self.read : self.read + self.per_turn]:
            self.read += 1
            if self.scene.mount.read(ino, self.name):
                self.waited += 1
                break

    @property
    def stored(self) -> int:
        """Of its files, those on SSD."""
        return len(self.scene.mount.ssd & self._files)

    @property
    def why(self) -> str:
        return str(self.scene.planner.status(self.name)["share_why"])

    @property
    def share(self) -> float:
        """Of its share, what the cache has of its dataset."""
        status = self.scene.planner.status(self.name)
        return float(status["cached_bytes"] / status["share_bytes"])


def make_scene(datasets: int) -> Scene:
    """A mount that evicts."""
    scene = Scene(
        same_sizes(datasets * COUNT),
        ram_bytes=RAM * FILE_BYTES,
        ssd_bytes=SSD * FILE_BYTES,
        outside_bytes=64 * FILE_BYTES,
    )
    scene.planner.set_pins(False, 0, others_may_go=True, evicts=True)
    return scene


def train(*jobs: Trained, turns: int) -> None:
    """The mount says each second what room there is."""
    scene = jobs[0].scene
    for turn in range(turns):
        for job in jobs:
            job.train()
        scene.turn(work=ORIGIN, step_s=0.1)
        if turn % 10 == 0:
            ram_bytes = scene.budget_bytes * 10 // 9
            scene.planner.set_budgets(ram_bytes, scene.mount.ssd_free_bytes)


def evicted(scene: Scene) -> int:
    return sum(scene.mount.evicted.values())


def test_who_comes_later_has_an_equal_share_and_then_nothing_moves() -> None:
    scene = make_scene(2)
    early = Trained(scene, 0, 40)
    train(early, turns=300)
    assert early.stored == SSD
    assert scene.planner.status("job0")["share_bytes"] is None, "there is one dataset"
    late = Trained(scene, 1, 40)
    train(early, late, turns=200)
    assert early.share == pytest.approx(1, abs=0.06)
    assert late.share == pytest.approx(1, abs=0.06)
    assert {early.why, late.why} == {"it waits for files"}
    moved = evicted(scene)
    assert SSD / 4 < moved < SSD / 2
    train(early, late, turns=200)
    assert evicted(scene) == moved


def test_who_waits_for_nothing_leaves_its_share_to_who_waits() -> None:
    scene = make_scene(2)
    slow, fast = Trained(scene, 0, 6), Trained(scene, 1, 40)
    train(slow, fast, turns=100)
    assert slow.why == fast.why == "it waits for files", "as far as is known"
    train(slow, fast, turns=500)
    assert slow.why == "it waits for nothing: others may have its share"
    assert fast.why == "it waits for files"
    assert fast.stored > 0.8 * SSD
    waited, read, moved = slow.waited, fast.read, evicted(scene)
    fetched = sum(scene.mount.origin_reads.values())
    train(slow, fast, turns=500)
    assert slow.waited == waited
    assert fast.read - read > 12_000, "with equal shares 11,983"
    assert sum(scene.mount.origin_reads.values()) - fetched < 3500, "with equal shares 6,899"
    assert evicted(scene) - moved < SSD / 20


def test_who_waits_once_its_share_is_gone_has_it_again() -> None:
    """It trains faster from then on."""
    scene = make_scene(2)
    slow, fast = Trained(scene, 0, 6), Trained(scene, 1, 40)
    train(slow, fast, turns=600)
    assert slow.share < 0.3 or slow.stored < SSD / 5
    slow.per_turn = 40
    train(slow, fast, turns=600)
    assert slow.why == "it waited when others had its share"
    assert slow.share == pytest.approx(1, abs=0.06)
    slow.per_turn = 6
    train(slow, fast, turns=300)
    assert slow.why == "it waited when others had its share"
    assert slow.share == pytest.approx(1, abs=0.06)


def test_where_nobody_waits_nothing_moves() -> None:
    """But while it is not known yet whether who comes waits."""
    scene = make_scene(2)
    early = Trained(scene, 0, 6)
    train(early, turns=700)
    late = Trained(scene, 1, 6)
    train(early, late, turns=400)
    assert early.why == late.why == "it waits for nothing"
    moved = evicted(scene)
    assert moved < SSD / 4
    train(early, late, turns=400)
    assert evicted(scene) == moved
    assert early.waited + late.waited < 20


def test_a_job_that_is_not_read_keeps_nobody_from_room() -> None:
    """It has a share; who is read has that meanwhile, but for what is fetched ahead for it."""
    scene = make_scene(2)
    read = Trained(scene, 0, 40)
    train(read, turns=20)
    assert read.stored < SSD / 3
    Trained(scene, 1, 40)
    train(read, turns=400)
    assert len(scene.mount.ssd) > 0.99 * SSD
    assert evicted(scene) < SSD / 20


def test_who_reads_one_epoch_takes_nothing_from_who_reads_more() -> None:
    scene = make_scene(2)
    often = Trained(scene, 0, 40)
    train(often, turns=300)
    once = Trained(scene, 1, 40, epochs=1)
    train(often, once, turns=120)
    assert once.read > COUNT / 2
    assert once.why == "it reads one epoch"
    assert often.stored == SSD


def test_jobs_on_one_dataset_have_one_part() -> None:
    """As ranks have, which read it once together."""
    scene = make_scene(2)
    jobs = [Trained(scene, 0, 40), Trained(scene, 1, 40, dataset=0), Trained(scene, 2, 40, 1)]
    train(*jobs, turns=400)
    shares = [scene.planner.status(job.name)["share_bytes"] for job in jobs]
    assert shares[0] == shares[1] == pytest.approx(shares[2], rel=0.01)


@pytest.mark.parametrize("may_evict", [False, True])
def test_a_mount_that_cannot_evict_keeps_what_came_first(may_evict: bool) -> None:
    scene = make_scene(2)
    scene.planner.set_pins(False, 0, others_may_go=may_evict, evicts=True)
    early = Trained(scene, 0, 40)
    train(early, turns=300)
    late = Trained(scene, 1, 40)
    train(early, late, turns=200)
    assert (evicted(scene) > 0) == may_evict
    assert (early.stored == SSD) != may_evict
