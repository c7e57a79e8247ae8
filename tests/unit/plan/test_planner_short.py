"""Epochs that are about as short as what a DataLoader has in flight: a right hint stays right."""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np
import pytest

from hintsd.follow.sequence import Inos
from tests.support.planner_model import loader_reads
from tests.unit.plan.test_planner import FILE_BYTES, Scene, endless, same_sizes

STEP_HELD_S = 0.1


class Loader:
    """A stock DataLoader with hints: its workers read, and its trainer says where it is."""

    def __init__(self, scene: Scene, batch_size: int, workers: int, *, says: bool) -> None:
        self._scene, self._batch_size, self._workers = scene, batch_size, workers
        self._says = says
        self._steps: deque[tuple[float, int, int]] = deque()

    def read(self, epoch: int, order: Inos, *, each: int, step_s: float, work: int) -> None:
        """An epoch, so many samples a turn."""
        scene, batches = self._scene, -(-len(order) // self._batch_size)
        ahead = max(1, 2 * self._workers)
        left = np.bincount(np.arange(len(order)) // self._batch_size).tolist()
        batch_of = {ino: at // self._batch_size for at, ino in enumerate(order.tolist())}
        self._step(epoch, 0)
        reads = loader_reads(order, self._batch_size, self._workers, 2, scene.rng)
        for number, (worker, ino) in enumerate(reads, 1):
            scene.mount.read(ino, "job", process=100 + worker)
            left[batch_of[ino]] -= 1
            if left[batch_of[ino]] == 0:
                oldest = next((batch for batch, rest in enumerate(left) if rest), batches)
                self._step(epoch, max(0, min(oldest + ahead, batches) - ahead))
            if number % each == 0:
                self._turn(step_s, work)
        self._turn(step_s, work)
        self._step(epoch, batches)

    def _step(self, epoch: int, batch: int) -> None:
        if self._says:
            self._steps.append((self._scene.now + STEP_HELD_S, epoch, batch))

    def _turn(self, step_s: float, work: int) -> None:
        scene = self._scene
        while self._steps and self._steps[0][0] <= scene.now:
            _, epoch, batch = self._steps.popleft()
            scene.planner.followers.step("job", epoch, batch, scene.now)
        scene.turn(work, step_s)


# (RAM of the dataset, whether its steps are told, samples a turn, seconds that takes, late by)
PACES = [
    (0.2, False, 6, 0.03, 0),
    (0.2, True, 20, 0.02, 0.25),  # a quarter of the first epoch is read before the hint comes
    (1.3, True, 3, 0.02, 0),
    (1.3, False, 60, 0.01, 0.1),
]


@pytest.mark.claim("P9")
@pytest.mark.parametrize(("batch_size", "workers"), [(16, 1), (16, 8), (64, 4), (256, 1), (256, 8)])
@pytest.mark.parametrize("count", [20, 60, 150, 400])
def test_a_right_hint_is_never_taken_for_wrong(count: int, batch_size: int, workers: int) -> None:
    for seed, (ram_share, says, each, step_s, late) in enumerate(PACES):
        order = endless(seed, count)
        scene = Scene(
            same_sizes(count),
            ram_bytes=int(ram_share * count) * FILE_BYTES,
            ssd_bytes=int(0.4 * count) * FILE_BYTES,
            seed=seed,
        )
        if late:
            before = loader_reads(order(0), batch_size, workers, 2, scene.rng)
            for _, ino in islice(before, int(late * count)):
                scene.mount.read(ino)
            scene.mount.deliver(scene.planner, scene.now, scene.orders)
        scene.open("job", order, samples=count, epochs=None, batch_size=batch_size, workers=workers)
        loader = Loader(scene, batch_size, workers, says=says)
        epochs = max(3, 300 // count)
        for epoch in range(epochs):
            loader.read(epoch, order(epoch), each=each, step_s=step_s, work=2 * each)
        assert scene.planner.followers.notices() == []
        if says:
            status = scene.planner.status("job")
            behind = epochs * count - status["epoch"] * count - status["index"]
            assert 0 <= behind <= count + STEP_HELD_S / step_s * each


@pytest.mark.parametrize("workers", [4, 8])
def test_where_nothing_is_told_the_reader_is_found_in_the_next_epoch(workers: int) -> None:
    count, epochs = 150, 6
    order = endless(0, count)
    scene = Scene(same_sizes(count), ram_bytes=count // 5 * FILE_BYTES)
    scene.open("job", order, samples=count, epochs=None, batch_size=64, workers=workers)
    loader = Loader(scene, 64, workers, says=False)
    for epoch in range(epochs):
        loader.read(epoch, order(epoch), each=2, step_s=0.02, work=4)
        assert scene.planner._jobs["job"].progress.low >= (epoch - 1) * count
        assert scene.planner._jobs["job"].progress.high <= (epoch + 1) * count
    assert scene.planner._jobs["job"].progress.moves == 0


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("count", [100, 300, 1000])
def test_a_pause_before_the_last_epoch_is_no_end(epochs: int, count: int) -> None:
    """A validation, or a model that is compiled, takes longer than a lost wire is waited for."""
    scene = Scene(same_sizes(count), ram_bytes=100 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count, epochs=epochs, batch_size=64, workers=8)
    scene.turn()
    for epoch in range(epochs):
        for _ in range(40):
            scene.turn(step_s=1)
        assert scene.planner.status("job")["state"] in ("waiting", "idle", "running"), epoch
        scene.read(orders[epoch].tolist())
    for _ in range(40):
        scene.turn(step_s=1)
    assert scene.planner.finished("job")
