"""What the planner keeps in RAM for good, and what its jobs fetch from the origin: exact counts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hintsd.files import KEPT
from hintsd.planner import AHEAD_SHARE, NEED_SHARE
from hintsd.sequence import Inos
from tests.planner_model import loader_reads
from tests.unit.test_planner import FILE_BYTES, Scene, same_sizes

OUTSIDE_FILES = 64  # whose pages stay where a reader has missed them


def make_scene(count: int, ram_files: int, ssd_files: int) -> Scene:
    return Scene(
        same_sizes(count),
        ram_bytes=ram_files * FILE_BYTES,
        ssd_bytes=ssd_files * FILE_BYTES,
        outside_bytes=max(OUTSIDE_FILES, ram_files // 9) * FILE_BYTES,
    )


def kept(scene: Scene) -> set[int]:
    return set(np.flatnonzero(scene.planner._files.flags & KEPT).tolist())


class Traffic:
    """Reads epochs, and counts what is fetched."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.wasted = 0  # fetches of a file beyond the first one from one use of it to the next
        self._known: Counter[int] = Counter()

    def read(self, order: Inos, batch_size: int, workers: int, *, each: int, work: int) -> float:
        """The share of the dataset that was fetched meanwhile, or not seen before."""
        mount, before = self.scene.mount, sum(self._known.values())
        for count, (worker, ino) in enumerate(
            loader_reads(order, batch_size, workers, 2, self.scene.rng), 1
        ):
            mount.read(ino, process=worker + 1)
            self.wasted += max(0, mount.origin_reads[ino] - self._known[ino] - 1)
            self._known[ino] = mount.origin_reads[ino]
            if count % each == 0:
                self.scene.turn(work)
        self.scene.turn(work)
        return (sum(self._known.values()) - before) / len(mount.sizes)


@pytest.mark.parametrize("is_slow", [False, True], ids=["", "slow origin"])
@pytest.mark.parametrize("workers", [1, 8])
@pytest.mark.parametrize("batch_size", [16, 256])
@pytest.mark.parametrize("count", [300, 30_000])
def test_what_neither_ram_nor_ssd_holds_is_fetched_once_an_epoch(
    count: int, batch_size: int, workers: int, is_slow: bool
) -> None:
    """RAM for a tenth, SSD for four. A slow origin brings less than readers ask for: all wait."""
    ram, ssd, epochs = count // 10, count * 4 // 10, 3
    scene = make_scene(count, ram, ssd)
    orders = scene.shuffled()
    each = 8 if count == 300 else 64
    work = each * 7 // 8 if is_slow else 1 << 20
    scene.open("job", orders, samples=count, epochs=epochs, batch_size=batch_size, workers=workers)
    scene.turn()  # else its first samples are read before a wire is laid
    traffic = Traffic(scene)
    shares = [
        traffic.read(orders[epoch], batch_size, workers, each=each, work=work)
        for epoch in range(epochs)
    ]
    need = scene.planner._jobs["job"].progress.at_once * 2
    window = min(max(need, ram // AHEAD_SHARE), ram // NEED_SHARE)
    missing = (count - ssd - (ram - window)) / count
    if count == 300 and workers == 8:
        # What is read at once is more than RAM takes: all of that is kept, and readers come first.
        assert max(shares[1:]) <= 1.03 * (count - ssd - ram) / count, shares
        assert shares[0] <= 1.12, shares
        return
    assert traffic.wasted <= 0.005 * count
    assert shares[0] <= 1.01
    # one window more or less: an epoch's first files are fetched in the one before
    for share in shares[1:]:
        assert share <= 1.01 * missing, (shares, missing)
    assert len(kept(scene)) >= 0.99 * (ram - window) - 1


def test_what_the_reader_has_passed_is_kept_and_found_by_the_next_epoch() -> None:
    scene = make_scene(2000, 400, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=2000, workers=2)
    traffic = Traffic(scene)
    traffic.read(orders[0], 16, 2, each=8, work=1 << 20)
    stays = kept(scene)
    assert 200 <= len(stays) <= 400 - 400 // AHEAD_SHARE
    assert stays <= scene.mount.ram
    fetched = Counter(scene.mount.origin_reads)
    traffic.read(orders[1], 16, 2, each=8, work=1 << 20)
    assert kept(scene) == stays
    assert all(scene.mount.origin_reads[ino] == fetched[ino] == 1 for ino in stays)


def test_where_ssd_takes_all_nothing_is_kept() -> None:
    scene = make_scene(2000, 400, 2000)
    orders = scene.shuffled()
    scene.open("job", orders, samples=2000)
    scene.read(orders[0].tolist())
    scene.read(orders[1].tolist())
    assert not kept(scene)
    assert max(scene.mount.origin_reads.values()) == 1


def test_ram_and_ssd_hold_different_files() -> None:
    scene = Scene(same_sizes(2000), ram_bytes=400 * FILE_BYTES, ssd_bytes=800 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=2000)
    for epoch in range(2):
        scene.read(orders[epoch].tolist())
    assert len(kept(scene)) >= 200
    assert not kept(scene) & scene.mount.ssd
    # nor is it fetched to SSD when there is more room
    scene.mount.ssd_free_bytes += 400 * FILE_BYTES
    scene.planner.set_budgets(400 * FILE_BYTES * 10 // 9, 400 * FILE_BYTES)
    scene.read(orders[2].tolist())
    assert len(kept(scene)) >= 200
    assert not kept(scene) & scene.mount.ssd
    assert scene.mount.ssd_free_bytes == 0


def test_what_ssd_has_no_room_for_after_all_is_not_fetched_ahead() -> None:
    """Others have taken it."""
    scene = make_scene(2000, 100, 1000)
    scene.open("job", scene.shuffled(), samples=2000)
    scene.turn(work=150)
    scene.mount.ssd_free_bytes = 0
    scene.turn(work=10)
    scene.turn(work=10)
    fetched = scene.mount.origin_bytes
    scene.turn()
    assert scene.mount.origin_bytes == fetched
    assert not scene.mount.fetch_queue


def test_windows_that_need_more_get_it_and_hold_it_for_an_epoch() -> None:
    count, ram = 2000, 1600
    scene = make_scene(count, ram, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count)
    scene.read(orders[0].tolist(), turn_every=1)  # a hundred a second
    slow = len(kept(scene))
    scene.read(orders[1].tolist(), turn_every=8)
    fast = len(kept(scene))
    assert ram - ram // AHEAD_SHARE <= fast < slow
    scene.read(orders[2].tolist(), turn_every=1)
    assert len(kept(scene)) == fast
    scene.read(orders[3].tolist(), turn_every=1)
    scene.read(orders[4][:1500].tolist(), turn_every=1)
    assert len(kept(scene)) > fast


def test_what_another_job_reads_too_is_kept_when_one_ends() -> None:
    scene = make_scene(1000, 400, 0)
    for name, samples in (("a", 1000), ("b", 500)):
        scene.open(name, scene.shuffled(samples), samples=samples)
    orders = {name: scene.orders[name](0) for name in ("a", "b")}
    for start in range(0, 500, 20):
        for name, order in orders.items():
            assert order is not None
            scene.read(order[start : start + 20].tolist(), reader=name)
    stays = kept(scene)
    assert stays
    scene.close("a")
    told = {int(ino) for epoch in (0, 1) for ino in scene.orders["b"](epoch)}  # type: ignore[union-attr]
    assert kept(scene) == stays & told
    scene.close("b")
    scene.turn()
    assert not scene.mount.ram


def test_less_ram_keeps_less() -> None:
    scene = make_scene(2000, 400, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=2000)
    scene.read(orders[0].tolist())
    scene.planner.set_budgets(100 * FILE_BYTES * 10 // 9, 0)
    scene.planner.check_invariants()
    scene.turn()
    assert scene.mount.ram_bytes <= 100 * FILE_BYTES
    scene.read(orders[1].tolist())
    assert 0 < len(kept(scene)) <= 100


def test_what_ram_would_do_is_said_and_does() -> None:
    """8 workers with 2 batches of 16 samples each: some 300 at once."""
    scene = make_scene(3000, 100, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, batch_size=16, workers=8)
    traffic = Traffic(scene)
    traffic.read(orders[0], 16, 8, each=8, work=1 << 20)
    needed = scene.planner.status("job")["ram_needed_bytes"]
    assert 512 * FILE_BYTES < needed < 1024 * FILE_BYTES
    scene.budget_bytes = needed
    scene.planner.set_budgets(needed - 4096, 0)
    scene.turn()
    assert scene.planner.status("job")["ram_needed_bytes"] == needed
    scene.planner.set_budgets(needed, 0)
    traffic.read(orders[1], 16, 8, each=8, work=1 << 20)
    assert scene.planner.status("job")["ram_needed_bytes"] is None
    wasted = traffic.wasted
    traffic.read(orders[2], 16, 8, each=8, work=1 << 20)
    assert traffic.wasted - wasted <= 0.005 * 3000
    scene.close("job")


def test_a_file_that_a_reader_has_missed_is_not_staged_for_him() -> None:
    scene = Scene(same_sizes(1000), ram_bytes=100 * FILE_BYTES, ssd_bytes=0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=1000)
    scene.turn()
    scene.read(orders[0][:60].tolist())
    first = orders[0][180:190].tolist()  # in order, but in no window yet
    for ino in first:
        scene.mount.read(ino)
    scene.turn()
    scene.read(orders[0][60:400].tolist())
    assert not set(first) & set(scene.mount.staged_order)
    scene.read(orders[0][400:].tolist() + orders[1].tolist())
    assert set(first) <= set(scene.mount.staged_order), "for the next use they are"
