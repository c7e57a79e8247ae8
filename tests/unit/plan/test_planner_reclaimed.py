"""What the kernel takes of a plan's RAM: it is known, counted, fetched again ahead of its use, and
what is taken again and again is not held any more. Exact counts.
"""

from __future__ import annotations

import numpy as np
import pytest

from fusecache.base.wire import Result
from hintsd.plan.files import LOST, STAGED
from hintsd.plan.ram import USABLE_SHARE
from tests.support.planner_model import loader_reads
from tests.unit.plan.test_planner import FILE_BYTES
from tests.unit.plan.test_planner_kept import Traffic, kept, make_scene

COUNT, RAM, BATCH, EACH = 2000, 600, 16, 16


class Pressed:
    """A job on a mount of whose files that are not on SSD the kernel lets `limit` be in memory,
    those staged last.
    """

    def __init__(
        self,
        *,
        count: int = COUNT,
        ram: int = RAM,
        ssd: int = 0,
        workers: int = 1,
        each: int = EACH,
    ) -> None:
        self.count = count
        self.scene = make_scene(count, ram, ssd)
        self.orders = self.scene.shuffled() * 3
        self.workers, self.each = workers, each
        self.limit: int | None = None
        self.told = 0
        self._staged: dict[int, None] = {}  # in order
        self.scene.open(
            "job", self.orders, samples=count, epochs=24, batch_size=BATCH, workers=workers
        )
        self.scene.turn()

    def read(self, epoch: int) -> float:
        """The share of the dataset that is fetched meanwhile."""
        mount = self.scene.mount
        before = sum(mount.origin_reads.values())
        reads = loader_reads(self.orders[epoch], BATCH, self.workers, 2, self.scene.rng)
        for count, (worker, ino) in enumerate(reads, 1):
            mount.read(ino, process=worker + 1)
            if count % self.each == 0:
                self.scene.turn()
                self._press()
        self.scene.turn()
        return (sum(mount.origin_reads.values()) - before) / self.count

    def _press(self) -> None:
        ram = self.scene.mount.ram - self.scene.mount.ssd
        self._staged = {ino: None for ino in self._staged if ino in ram} | dict.fromkeys(
            sorted(ram - self._staged.keys())
        )
        if self.limit is not None:
            over = max(0, len(self._staged) - self.limit)
            self.told += len(self.scene.mount.reclaim(list(self._staged)[:over]))

    @property
    def withheld(self) -> int:
        return int(self.scene.planner.status("job")["withheld_bytes"]) // FILE_BYTES

    @property
    def reclaimed(self) -> int:
        return int(self.scene.planner.status("job")["reclaimed"])


def test_what_was_kept_and_is_lost_once_is_fetched_once_when_its_turn_comes() -> None:
    scene = make_scene(COUNT, RAM, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=COUNT, batch_size=BATCH)
    scene.turn()
    traffic = Traffic(scene)
    usual = [traffic.read(orders[epoch], BATCH, 1, each=EACH, work=1 << 20) for epoch in range(3)]
    for ino in orders[3][: COUNT // 2].tolist():
        scene.mount.read(ino)
        scene.turn()
    stays, window = kept(scene), scene.planner._jobs["job"].window
    coming = set(scene.planner._jobs["job"].sequence.inos_at(np.arange(window.begin, window.end)))
    before, wasted = sum(scene.mount.origin_reads.values()), traffic.wasted
    lost = set(scene.mount.reclaim(sorted(scene.mount.ram)))
    assert stays <= lost, "all of it"
    scene.mount.staged_order.clear()
    scene.turn(0)
    scene.turn(0)
    scene.turn(len(lost & coming))
    assert set(scene.mount.staged_order) == lost & coming, "what is needed soon comes first"
    assert kept(scene) == set()
    misses = scene.mount.reads
    for ino in orders[3][COUNT // 2 :].tolist():
        scene.mount.read(ino)
        scene.turn()
    for epoch in (4, 5):
        traffic.read(orders[epoch], BATCH, 1, each=EACH, work=1 << 20)
    fetched = sum(scene.mount.origin_reads.values()) - before
    assert fetched <= (2.5 * usual[2]) * COUNT + len(lost) + BATCH
    assert scene.mount.reads == misses, "none was late"
    assert wasted == 0
    status = scene.planner.status("job")
    assert (status["reclaimed"], status["withheld_bytes"]) == (len(lost), 0)
    assert len(kept(scene)) >= len(stays), "kept anew"
    assert not scene.planner._files.all_with(LOST).size, "and forgotten"


@pytest.mark.parametrize(("ssd", "limit"), [(0, 150), (800, 300)])
def test_what_is_taken_again_and_again_is_not_held(ssd: int, limit: int) -> None:
    """RAM for 600 files, and the kernel leaves less: (1 - c) is fetched, c being what it leaves."""
    pressed, epochs = Pressed(ssd=ssd, each=8), 12 if ssd else 9
    pressed.read(0)
    pressed.read(1)
    pressed.limit = limit
    shares = [pressed.read(epoch) for epoch in range(2, epochs)]
    least = COUNT - ssd - limit
    window = RAM // 8  # what is tried again and again, and taken, is less
    assert np.mean(shares[2:]) * COUNT <= least + 1.5 * window, shares
    assert RAM - limit - RAM // 8 <= pressed.withheld <= RAM - RAM // USABLE_SHARE
    assert 0.99 * pressed.told <= pressed.reclaimed <= pressed.told, "some were dropped meanwhile"
    if not ssd:
        assert pressed.scene.mount.reads <= 0.01 * epochs * COUNT, "few come late"


def test_what_the_kernel_gives_back_is_used_again() -> None:
    pressed = Pressed(count=COUNT // 2, ram=RAM // 2)
    pressed.read(0)
    usual = pressed.read(1)
    whole = len(kept(pressed.scene))
    pressed.limit = 100
    for epoch in range(2, 5):
        pressed.read(epoch)
    assert pressed.withheld > 0
    assert len(kept(pressed.scene)) <= 100
    pressed.limit = None
    for epoch in range(5, 11):
        pressed.read(epoch)
    assert pressed.withheld == 0
    assert not pressed.scene.planner._files.all_with(LOST).size
    assert len(kept(pressed.scene)) >= 0.98 * whole
    assert pressed.read(11) <= usual * 1.02


def test_a_read_of_what_is_kept_tells_that_it_was_lost_and_brings_it_back() -> None:
    pressed = Pressed()
    pressed.read(0)
    scene = pressed.scene
    ino = next(ino for ino in pressed.orders[1].tolist() if ino in kept(scene))
    for other in pressed.orders[1].tolist():
        scene.mount.evicts = {ino}
        scene.mount.read(other)
        scene.turn()
        if other == ino:
            break
    scene.mount.evicts = set()
    assert pressed.reclaimed == 1
    assert ino in kept(scene)
    assert scene.planner._files.flags[ino] & (STAGED | LOST) == STAGED | LOST
    before = scene.mount.origin_reads[ino]
    pressed.read(2)
    assert scene.mount.origin_reads[ino] == before


def test_lanes_under_pressure_hold_less() -> None:
    """At each turn invariants are checked."""
    pressed = Pressed(count=COUNT // 2, ram=48 * 5, workers=4)
    pressed.read(0)
    assert pressed.scene.planner._windows.has_lanes
    pressed.limit = 120
    shares = [pressed.read(epoch) for epoch in range(1, 6)]
    assert pressed.scene.planner._windows.has_lanes
    assert pressed.withheld > 0
    assert max(shares[2:]) <= 1.05, shares


def test_an_answer_that_crosses_what_hintsd_wants_by_now_says_nothing() -> None:
    pressed = Pressed()
    scene = pressed.scene
    planner, files = scene.planner, scene.planner._files
    window = planner._jobs["job"].window
    staged = pressed.orders[0][:8]
    assert (files.flags[staged] & STAGED != 0).all()
    answer = np.full(8, Result.RECLAIMED, np.uint8)
    planner.done(staged, answer, scene.now)
    commands = planner.decide(scene.now)
    (stage,) = [command for command in commands if command.kind == "stage"]
    assert stage.inos[:8].tolist() == staged.tolist(), "in their order, before all others"
    planner.done(staged, answer, scene.now)  # it was told before it heard of that
    planner.check_invariants()
    assert pressed.reclaimed == 8
    assert planner._ram.stage_unanswered == len(stage.inos)
    scene.mount.carry_out(commands)
    scene.settle()
    assert (files.flags[staged] & STAGED != 0).all()
    assert window.begin == 0
    absent = np.array([ino for ino in range(1, COUNT + 1) if ino not in scene.mount.ram], np.uint32)
    planner.done(absent, np.full(len(absent), Result.RECLAIMED, np.uint8), scene.now)
    planner.check_invariants()
    assert pressed.reclaimed == 8


def test_an_eighth_stays_usable_whatever_is_taken() -> None:
    pressed = Pressed()
    pressed.limit = 0
    for epoch in range(3):
        pressed.read(epoch)
    assert pressed.withheld == RAM - RAM // USABLE_SHARE
    pressed.scene.planner.set_budgets(RAM * FILE_BYTES, 0)
    assert pressed.withheld == 0, "another budget is judged anew"


def test_of_ranks_that_begin_an_epoch_one_says_that_the_last_was_calm() -> None:
    """Their mount's room is given back a step at a time, not one for each rank."""
    scene = make_scene(COUNT // 2, RAM // 2, 0)
    files = np.arange(1, COUNT // 2 + 1, dtype=np.uint32).reshape(4, -1)
    for rank, part in enumerate(files):
        scene.open(f"rank{rank}", [part] * 8, samples=len(part))
    scene.turn()
    ram = scene.planner._ram
    ram.usable_bytes = ram.budget_bytes // 2
    for _ in range(2):
        for at in range(files.shape[1]):
            for rank, part in enumerate(files):
                scene.mount.read(int(part[at]), f"rank{rank}")
            scene.turn()
    begun = [job.sequence.epoch_of(job.window.begin) for job in scene.planner._jobs.values()]
    assert min(begun) >= 1
    steps = max(begun)  # at most: each twice as long as the one before
    assert ram.usable_bytes <= ram.budget_bytes // 2 + (2**steps - 1) * ram.budget_bytes // 16


def test_two_files_stay_usable_whatever_is_taken() -> None:
    """Of large ones an eighth is none: nothing would be staged any more."""
    scene = make_scene(40, 6, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=40, batch_size=1)
    scene.turn()
    for _ in range(12):
        inos = np.array(sorted(scene.mount.ram), np.uint32)
        scene.planner.done(inos, np.full(len(inos), Result.RECLAIMED, np.uint8), scene.now)
        scene.turn()
        scene.planner.check_invariants()
    assert int(scene.planner.status("job")["withheld_bytes"]) == 4 * FILE_BYTES
    assert scene.planner._jobs["job"].window.size_bytes == 2 * FILE_BYTES
