"""Epochs of unequal lengths, each known only when it begins: what importance samplers draw."""

from __future__ import annotations

import numpy as np
import pytest

from fusecache.base.wire import Observed
from hintsd.follow.sequence import Inos
from hintsd.plan.files import KEPT_IN_RAM
from tests.unit.plan.test_planner import FILE_BYTES, Scene, same_sizes

COUNT = 2000
LENGTHS = [2000, 1400, 900, 1700, 1]


def drawn(scene: Scene, lengths: list[int]) -> list[Inos]:
    return [(scene.rng.permutation(COUNT)[:n] + 1).astype(np.uint32) for n in lengths]


def opened(scene: Scene, orders: list[Inos], *, epochs: int | None, workers: int = 1) -> list[int]:
    """A job whose orders are known up to the last number in this list, which the test changes."""
    known = [0]
    scene.open(
        "job",
        lambda epoch: orders[epoch] if epoch <= known[0] else None,
        samples=len(orders[0]),
        epochs=epochs,
        workers=workers,
    )
    scene.settle()
    return known


@pytest.mark.parametrize("workers", [1, 4])
def test_each_is_read_without_a_miss_and_its_place_is_told(workers: int) -> None:
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES)
    orders = drawn(scene, LENGTHS)
    known = opened(scene, orders, epochs=len(orders), workers=workers)
    for epoch, order in enumerate(orders):
        known[0] = epoch
        scene.planner.announce("job", epoch, order, scene.now)
        scene.settle()
        half = len(order) // 2
        assert scene.read(order[:half].tolist()) == 0
        scene.planner.followers.step("job", epoch, half // 16, scene.now)
        figures = scene.planner.status("job")
        assert (figures["epoch"], figures["samples"]) == (epoch, len(order))
        assert 0 <= half - figures["index"] <= 16
        assert scene.read(order[half:].tolist()) == 0
        scene.planner.followers.step("job", epoch, -(-len(order) // 16), scene.now)
        scene.settle()
    for _ in range(4):
        scene.turn(step_s=1.0)
    assert scene.planner.finished("job")
    assert set(scene.mount.origin_reads.values()) == {1}


def test_what_is_kept_stays_from_epoch_to_epoch() -> None:
    """RAM for a fifth, SSD for two: neither is fetched again, whatever the epochs' lengths."""
    ram, ssd = COUNT // 5, COUNT * 2 // 5
    scene = Scene(
        same_sizes(COUNT),
        ram_bytes=ram * FILE_BYTES,
        ssd_bytes=ssd * FILE_BYTES,
        outside_bytes=64 * FILE_BYTES,
    )
    orders = drawn(scene, [COUNT, 1400, 1800, 1000])
    known = opened(scene, orders, epochs=None)
    for epoch, order in enumerate(orders):
        known[0] = epoch
        scene.planner.announce("job", epoch, order, scene.now)
        has = set(scene.mount.ssd) | {
            int(i) for i in order if scene.planner._files.flags[i] & KEPT_IN_RAM
        }
        before = scene.mount.origin_bytes
        scene.read(order.tolist())
        scene.planner.followers.step("job", epoch, -(-len(order) // 16), scene.now)
        scene.settle()
        fetched = (scene.mount.origin_bytes - before) // FILE_BYTES
        assert fetched <= len(set(order.tolist()) - has) + ram // 8, epoch
        if epoch:
            assert fetched <= len(order) // 2, epoch


def test_an_earlier_epoch_of_another_length_begins_the_job_anew() -> None:
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES)
    orders = drawn(scene, [2000, 1400])
    known = opened(scene, orders, epochs=None)
    scene.read(orders[0].tolist())
    known[0] = 1
    scene.planner.announce("job", 1, orders[1], scene.now)
    scene.settle()
    scene.read(orders[1][:700].tolist())
    again = drawn(scene, [500])[0]
    scene.planner.announce("job", 0, again, scene.now)
    scene.turn()
    figures = scene.planner.status("job")
    assert (figures["epoch"], figures["index"], figures["samples"]) == (0, 0, 500)
    scene.read(again.tolist())
    assert scene.planner.status("job")["state"] == "running"


def test_a_known_epoch_that_gets_another_length_leaves_the_reader_where_it_is() -> None:
    """What was predicted behind it lies elsewhere then."""
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES)
    orders = drawn(scene, [600] * 4)
    scene.open("job", orders, samples=600, epochs=4)
    scene.settle()
    scene.read(orders[0][:304].tolist())
    before = scene.planner.status("job")
    shorter = drawn(scene, [350])[0]
    orders[1] = shorter
    scene.planner.announce("job", 1, shorter, scene.now)
    scene.settle()
    after = scene.planner.status("job")
    assert (after["epoch"], after["index"]) == (before["epoch"], before["index"])
    assert scene.read(orders[0][304:].tolist()) == 0
    assert scene.read(shorter.tolist()) == 0
    assert scene.read(orders[2].tolist()) == 0
    assert scene.planner.status("job")["not_late"] == 600 + 350 + 600


def test_what_is_read_stays_known_where_the_next_epoch_gets_another_length() -> None:
    """And the place in it, which no later length moves."""
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES)
    orders = drawn(scene, [400, 200, 200])
    opened(scene, orders, epochs=3)
    job = scene.planner._jobs["job"]
    for epoch in (1, 2):
        job.sequence.put(epoch, orders[epoch])
    scene.read(orders[0][:304].tolist())
    scene.planner.announce("job", 1, drawn(scene, [100])[0], scene.now)
    assert job.sequence.at(job.progress.high)[0] == 0
    assert job.sequence.orders[0].inos.tolist() == orders[0].tolist()
    scene.read(orders[0][304:].tolist())
    assert scene.planner.status("job")["state"] == "running"
    assert job.progress.evidence.strays == 0


def test_a_step_that_comes_late_is_of_the_epoch_before() -> None:
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES)
    orders = drawn(scene, [160, 1600])
    known = opened(scene, orders, epochs=None)
    scene.read(orders[0].tolist())
    known[0] = 1
    scene.planner.announce("job", 1, orders[1], scene.now)
    scene.read(orders[1][:400].tolist())
    assert min(scene.planner._jobs["job"].sequence.orders) == 1
    scene.planner.followers.step("job", 1, 1, scene.now)
    scene.planner.followers.step("job", 0, 10, scene.now)  # that the trainer has taken its last
    assert scene.planner._jobs["job"].progress.low == 160
    scene.planner.followers.step("job", 1, 25, scene.now)
    status = scene.planner.status("job")
    assert (status["epoch"], status["index"]) == (1, 400)


def test_an_empty_epoch_is_refused() -> None:
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES)
    opened(scene, drawn(scene, [600]), epochs=None)
    with pytest.raises(ValueError, match="epoch 1 has no samples"):
        scene.planner.supply("job", 1, np.empty(0, np.uint32))


def test_two_epochs_announced_ahead_are_kept_where_their_number_is_known() -> None:
    """A sampler that draws ahead announces the epoch after next before its reader's last steps."""
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES)
    orders = np.split(drawn(scene, [COUNT])[0], [400, 500, 1100, 1600])  # of other files each
    known = opened(scene, orders, epochs=len(orders))
    scene.planner.announce("job", 1, orders[1], scene.now)
    for epoch, order in enumerate(orders):
        known[0] = epoch
        if epoch + 2 < len(orders):
            scene.planner.announce("job", epoch + 2, orders[epoch + 2], scene.now)
        known[0] = -1  # what is announced cannot be computed
        scene.settle()
        assert scene.read(order.tolist()) == 0, epoch
        scene.planner.followers.step("job", epoch, -(-len(order) // 16), scene.now)
    assert scene.planner.status("job")["state"] in ("running", "done")


@pytest.mark.parametrize("kind", [Observed.LOOKUP, Observed.SSD])
def test_what_a_step_has_overtaken_is_no_stray_where_its_file_comes_again(kind: int) -> None:
    """Its next use is far: the one that is told late is the one that was just passed."""
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT * FILE_BYTES)
    [files] = drawn(scene, [COUNT])
    order = np.concatenate([files, files[::-1]])
    known = opened(scene, [order], epochs=None)
    known[0] = 0
    scene.settle()
    scene.read(order[:320].tolist())
    scene.planner.followers.step("job", 0, 24, scene.now)
    late = order[350:384]
    scene.planner.followers.observe(late, np.full(len(late), kind, np.uint8), scene.now)
    assert scene.planner._jobs["job"].progress.evidence.strays == 0
    far = order[scene.rng.choice(np.arange(600, 1900), 40, replace=False)]
    scene.planner.followers.observe(far, np.full(len(far), Observed.SSD, np.uint8), scene.now)
    assert scene.planner._jobs["job"].progress.evidence.strays > 0


@pytest.mark.parametrize("is_followed", [True, False])
def test_what_is_read_before_its_order_is_told_speaks_for_nothing(is_followed: bool) -> None:
    """The first reads of an epoch that its trainer tells a moment later, from a cold cache."""
    scene = Scene(same_sizes(COUNT), ram_bytes=COUNT // 10 * FILE_BYTES, ssd_bytes=0)
    orders = [(scene.rng.integers(0, COUNT, COUNT) + 1).astype(np.uint32) for _ in range(2)]
    opened(scene, orders, epochs=None)
    scene.read(orders[0].tolist())
    scene.read(orders[1][:600].tolist())
    assert scene.planner.status("job")["state"] == "running"
    told = orders[1] if is_followed else scene.rng.permutation(orders[1])
    scene.planner.announce("job", 1, told, scene.now)
    scene.read(orders[1][600:].tolist())
    assert scene.planner.status("job")["state"] == ("running" if is_followed else "wrong")
