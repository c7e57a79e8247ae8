"""What the planner keeps in RAM for good, and what its jobs fetch from the origin: exact counts."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import pytest

from fusecache.base.wire import Result
from hintsd.follow.sequence import Inos
from hintsd.plan.commands import Withdrawn
from hintsd.plan.files import KEPT_IN_RAM, STAGED, STORED, Files, Ssd
from hintsd.plan.lanes import LOOK_MOST
from hintsd.plan.ram import Ram
from hintsd.plan.windows import AHEAD_SHARE, LANES_AHEAD_S, NEED_SHARE
from tests.support.planner_model import loader_reads
from tests.unit.plan.test_planner import FILE_BYTES, Scene, same_sizes

TURN_S = 0.01  # of a Scene
OUTSIDE_FILES = 64  # whose pages stay where a reader has missed them


def make_scene(count: int, ram_files: int, ssd_files: int) -> Scene:
    return Scene(
        same_sizes(count),
        ram_bytes=ram_files * FILE_BYTES,
        ssd_bytes=ssd_files * FILE_BYTES,
        outside_bytes=max(OUTSIDE_FILES, ram_files // 9) * FILE_BYTES,
    )


def kept(scene: Scene) -> set[int]:
    return set(np.flatnonzero(scene.planner._files.flags & KEPT_IN_RAM).tolist())


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
@pytest.mark.parametrize(
    ("count", "batch_size", "workers"),
    [(300, 16, 1), (300, 256, 1), (300, 16, 8), (300, 256, 8), (3000, 16, 8), (12_000, 256, 8)],
)
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
    shares = []
    for epoch in range(epochs):
        scene.planner.followers.step(
            "job", epoch, 0, scene.now
        )  # nothing else tells, where all is in flight
        shares.append(traffic.read(orders[epoch], batch_size, workers, each=each, work=work))
    need = scene.planner._jobs["job"].progress.at_once * 2
    if scene.planner._windows.has_lanes:
        need = int(each / TURN_S * LANES_AHEAD_S)
    window = min(max(need, ram // AHEAD_SHARE), ram // NEED_SHARE)
    missing = (count - ssd - (ram - window)) / count
    if count == 300 and workers == 8:
        # What is read at once is more than RAM takes: all of that is kept, and readers come first.
        assert max(shares[1:]) <= 1.1 * (count - ssd - ram) / count, shares
        assert shares[0] <= 1.01, shares
        return
    assert traffic.wasted <= 0.005 * count
    assert shares[0] <= 1.01
    # one window more or less: an epoch's first files are fetched in the one before
    for share in shares[1:]:
        assert share <= 1.01 * missing, (shares, missing)
    assert len(kept(scene)) >= 0.99 * (ram - window) - 1


def test_cached_is_what_ssd_has_and_ram_keeps() -> None:
    """Not what a window holds for a moment, and not what is outside the mount."""
    count, ram, ssd = 300, 60, 100
    scene = make_scene(count, ram, ssd)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count, batch_size=16, workers=1)
    inos = np.concatenate([np.zeros(1, np.uint32), scene.planner._jobs["job"].dataset])
    assert not scene.planner.are_cached(inos).any()
    scene.turn()
    traffic = Traffic(scene)
    for order in orders[:2]:
        traffic.read(order, 16, 1, each=8, work=1 << 20)
    found = set(inos[scene.planner.are_cached(inos)].tolist())
    flags = scene.planner._files.flags
    assert found == kept(scene) | set(np.flatnonzero(flags & STORED).tolist())
    assert ssd < len(found) < ssd + ram
    assert np.count_nonzero(flags & STAGED) > len(kept(scene))
    with_staged = set(inos[scene.planner.are_cached(inos, staged=True)].tolist())
    assert with_staged == found | set(np.flatnonzero(flags & STAGED).tolist())


# --- lanes: RAM takes less than what is read at once


@pytest.mark.parametrize(
    ("count", "workers", "ssd"), [(2000, 1, 800), (2000, 4, 0), (3000, 8, 1200)]
)
def test_a_little_is_fetched_ahead_for_each_worker(count: int, workers: int, ssd: int) -> None:
    """RAM takes less than half of what is read at once, twice."""
    ram, batch_size, each = 48 * (workers + 1), 32, 4 if workers == 1 else 8
    scene = make_scene(count, ram, ssd)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count, batch_size=batch_size, workers=workers)
    scene.turn()
    traffic = Traffic(scene)
    traffic.read(orders[0], batch_size, workers, each=each, work=1 << 20)
    assert scene.planner._windows.has_lanes
    before = scene.mount.reads
    share = traffic.read(orders[1], batch_size, workers, each=each, work=1 << 20)
    assert scene.mount.reads - before <= ssd + count // 4, (
        "most of what is missing on SSD is staged"
    )
    assert traffic.wasted == 0
    assert share <= 1.01 * (count - ssd - ram + ram // AHEAD_SHARE) / count


def test_lanes_of_ranks_share_ram_and_fetch_nothing_twice() -> None:
    ranks, each, ram, ssd = 4, 400, 160, 640
    scene = make_scene(ranks * each, ram, ssd)
    rng = np.random.default_rng(3)
    orders: list[list[Inos]] = []
    for rank in range(ranks):
        files = np.arange(rank * each, (rank + 1) * each, dtype=np.uint32) + 1
        orders.append([rng.permutation(files) for _ in range(8)])
        scene.open(f"rank{rank}", orders[rank], samples=each, workers=2)
    scene.turn()
    for epoch in range(2):
        before = sum(scene.mount.origin_reads.values())
        readers = [loader_reads(order[epoch], 16, 2, 2, scene.rng) for order in orders]
        for number, reads in enumerate(zip(*readers, strict=True), 1):
            for rank, (_, ino) in enumerate(reads):
                scene.mount.read(ino, f"rank{rank}")
            if number % 4 == 0:
                scene.turn(step_s=0.04)
        fetched = sum(scene.mount.origin_reads.values()) - before
        most = ranks * each if epoch == 0 else ranks * each - ssd - ram + ram // 4
        assert fetched <= 1.02 * most, epoch
    assert scene.planner._windows.has_lanes


def test_lanes_where_no_epoch_is_known_beyond_the_one_that_is_read() -> None:
    scene = make_scene(3000, 200, 0)
    orders = scene.shuffled()
    known = [0]
    scene.open(
        "job", lambda epoch: orders[epoch] if epoch in known else None, samples=3000, workers=4
    )
    traffic = Traffic(scene)
    for epoch in range(2):
        known[:] = [epoch]
        scene.planner.announce("job", epoch, orders[epoch], scene.now)
        share = traffic.read(orders[epoch], 16, 4, each=16, work=1 << 20)
        scene.planner.followers.step("job", epoch, 3000 // 16 + 1, scene.now)
        scene.settle()
    assert scene.planner._windows.has_lanes
    assert share <= 1.01 * (3000 - 200 + 200 // AHEAD_SHARE) / 3000
    assert traffic.wasted == 0


def test_lanes_that_stand_still_give_their_room_to_a_validation() -> None:
    """Its training goes on after it: from an epoch's end, or from the midst of one."""
    for stops_at in (3000, 1600):
        scene = make_scene(4000, 200, 0)
        training, validation = np.split(np.arange(1, 4001, dtype=np.uint32), [3000])
        orders = [scene.rng.permutation(training) for _ in range(8)]
        scene.open("training", orders, samples=3000, workers=4, dataset=training)
        for count, (_, ino) in enumerate(loader_reads(orders[0], 16, 4, 2, scene.rng)):
            if count == stops_at:
                break
            scene.mount.read(ino, "training")
            if count % 16 == 0:
                scene.turn(step_s=0.02)
        scene.open("validation", [validation] * 8, samples=1000, workers=4, dataset=validation)
        scene.settle()
        shares = []
        for _ in range(2):
            before = scene.mount.reads
            for count, (_, ino) in enumerate(loader_reads(validation, 16, 4, 2, scene.rng)):
                scene.mount.read(ino, "validation")
                if count % 8 == 0:
                    scene.turn(step_s=0.02)
            shares.append((scene.mount.reads - before) / 1000)
            for _ in range(14):
                scene.turn(step_s=5)  # the training's share is not used any more
        assert scene.planner._windows.has_lanes
        assert shares[0] < 0.5, "with half of the room"
        assert shares[1] < 0.25, "with all of it"


def test_with_more_ram_lanes_are_windows_again() -> None:
    scene = make_scene(3000, 200, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, workers=4)
    traffic = Traffic(scene)
    traffic.read(orders[0], 16, 4, each=16, work=1 << 20)
    assert scene.planner._windows.has_lanes
    stays = kept(scene)
    scene.budget_bytes = 2000 * FILE_BYTES
    scene.planner.set_budgets(2000 * FILE_BYTES, 0)
    wasted = traffic.wasted
    traffic.read(orders[1], 16, 4, each=16, work=1 << 20)
    assert not scene.planner._windows.has_lanes
    assert stays <= kept(scene)
    assert traffic.wasted - wasted <= 20
    scene.planner.set_budgets(200 * FILE_BYTES, 0)
    scene.turn()
    assert scene.planner._windows.has_lanes
    assert scene.mount.ram_bytes <= 200 * FILE_BYTES


def test_lanes_of_orders_with_repeats() -> None:
    """A file several times in what is read at once: weighted sampling."""
    scene = make_scene(3000, 100, 600)
    orders = [(scene.rng.zipf(1.3, 3000) % 3000 + 1).astype(np.uint32) for _ in range(3)]
    scene.open("job", orders, samples=3000, epochs=3, workers=4)
    for order in orders:
        Traffic(scene).read(order, 16, 4, each=16, work=100)  # at each turn invariants are checked
    assert scene.planner._windows.has_lanes
    assert kept(scene)


def test_what_is_read_beyond_a_window_is_passed_once_it_is_covered() -> None:
    scene = make_scene(3000, 100, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, workers=4)
    scene.turn()
    job = scene.planner._jobs["job"]
    job.reached.see(np.array([0]), np.array([10]))
    assert job.reached.take_passed(0, 4).tolist() == [0, 1, 2, 3]
    assert job.reached.take_passed(0, job.window.end).tolist() == [4, 5, 6, 7, 8, 9]


def test_lanes_look_at_few_of_the_samples_that_are_read_at_once() -> None:
    """64 workers with batches of 512: what is looked at in one decide() is bounded."""
    count, batch_size, workers = 400_000, 512, 64
    scene = make_scene(count, 40_000, 0)
    scene.open("job", scene.shuffled(), samples=count, batch_size=batch_size, workers=workers)
    scene.turn()
    job = scene.planner._jobs["job"]
    assert scene.planner._windows.has_lanes
    assert job.window.end - job.window.begin > 60_000
    assert scene.planner._ram.held_bytes == LOOK_MOST * FILE_BYTES
    for read in (0, 100):
        starts = batch_size * np.arange(workers)
        job.reached.see(starts, starts + read)
        scene.turn()
        for lane in range(workers):
            start = batch_size * lane + read + 1
            coming = np.arange(start, start + LOOK_MOST // workers)
            assert set(job.sequence.inos_at(coming).tolist()) <= scene.mount.ram, lane


def test_what_the_reader_has_passed_is_kept_and_found_by_the_next_epoch() -> None:
    scene = make_scene(2000, 400, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=2000, workers=2)
    traffic = Traffic(scene)
    traffic.read(orders[0], 16, 2, each=16, work=1 << 20)
    stays = kept(scene)
    assert 200 <= len(stays) <= 400 - 400 // AHEAD_SHARE
    assert stays <= scene.mount.ram
    fetched = Counter(scene.mount.origin_reads)
    traffic.read(orders[1], 16, 2, each=16, work=1 << 20)
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
    read = functools.partial(scene.read, turn_every=16)
    read(orders[0].tolist(), step_s=0.16)  # a hundred a second
    slow = len(kept(scene))
    read(orders[1].tolist(), step_s=0.02)
    fast = len(kept(scene))
    assert ram - ram // AHEAD_SHARE <= fast < slow
    read(orders[2].tolist(), step_s=0.16)
    assert len(kept(scene)) == fast
    read(orders[3].tolist(), step_s=0.16)
    read(orders[4][:1500].tolist(), step_s=0.16)
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


def test_what_a_job_has_kept_outlives_another_job_that_ends() -> None:
    """Kept no more it is spare, and stays as long as there is room: the mount's, not a job's."""
    scene = make_scene(1000, 400, 0)
    lasting, ending = np.split(np.arange(1, 1001, dtype=np.uint32), [600])
    orders = {"ending": ending, "lasting": lasting}
    for name, order in orders.items():
        scene.open(name, [order] * 8, samples=len(order), dataset=order)
    for start in range(0, 400, 20):
        for name, order in orders.items():
            scene.read(order[start : start + 20].tolist(), reader=name)
    stays = kept(scene)
    assert stays & set(lasting.tolist())
    assert stays & set(ending.tolist())
    scene.planner.set_budgets(399 * FILE_BYTES * 10 // 9, 0)
    assert not kept(scene)
    before = set(scene.mount.ram)
    scene.close("ending")
    scene.turn(work=0)
    assert before - scene.mount.ram == before & set(ending.tolist())


def test_what_is_spare_takes_little_memory_while_all_fits() -> None:
    """Epoch after epoch it leaves the window, and enters it again when the order is known."""
    scene = make_scene(500, 600, 0)
    orders = scene.shuffled()
    begun = 0
    scene.open(
        "job", lambda epoch: orders[epoch % 8] if epoch <= begun else None, samples=500, epochs=None
    )
    for begun, order in enumerate(3 * orders):
        scene.planner.announce("job", begun, order, scene.now)
        scene.read(order.tolist())
        scene.planner.check_invariants()
    listed = sum(map(len, scene.planner._windows.spare._parts))
    assert 0 < listed <= 500 - len(kept(scene)), "each once"
    assert set(scene.mount.origin_reads.values()) == {1}


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


def test_files_larger_than_less_ram_are_held_no_more() -> None:
    sizes = np.where(np.arange(1000) % 10 == 0, 20 * FILE_BYTES, FILE_BYTES).astype(np.uint32)
    scene = Scene(sizes, ram_bytes=200 * FILE_BYTES, ssd_bytes=0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=1000)
    scene.read(orders[0][:300].tolist())
    scene.planner.set_budgets(10 * FILE_BYTES * 10 // 9, 0)
    scene.planner.check_invariants()
    scene.turn()
    assert scene.mount.ram_bytes <= 10 * FILE_BYTES


def test_what_is_in_a_window_and_not_held_may_change_its_size() -> None:
    scene = make_scene(3000, 100, 600)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, workers=4)
    scene.turn()
    assert scene.planner._windows.has_lanes
    job = scene.planner._jobs["job"]
    last = job.sequence.inos_at(np.arange(job.window.end - 1, job.window.end))
    scene.planner.learn(last, np.array([3 * FILE_BYTES]), np.zeros(1, np.uint8))
    scene.planner.check_invariants()


def test_what_ram_would_do_is_said_and_does() -> None:
    """8 workers with 2 batches of 16 samples each: some 300 at once."""
    scene = make_scene(3000, 100, 0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, batch_size=16, workers=8)
    traffic = Traffic(scene)
    traffic.read(orders[0], 16, 8, each=16, work=1 << 20)
    needed = scene.planner.status("job")["ram_needed_bytes"]
    assert 512 * FILE_BYTES < needed < 1024 * FILE_BYTES
    scene.budget_bytes = needed
    scene.planner.set_budgets(needed - 4096, 0)
    scene.turn()
    assert scene.planner.status("job")["ram_needed_bytes"] == needed
    scene.planner.set_budgets(needed, 0)
    traffic.read(orders[1], 16, 8, each=16, work=1 << 20)
    assert scene.planner.status("job")["ram_needed_bytes"] is None
    wasted = traffic.wasted
    traffic.read(orders[2], 16, 8, each=16, work=1 << 20)
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


def test_a_file_that_is_missed_twice_is_let_go_once() -> None:
    """In one `seen` frame: a large file takes several READs."""
    files, inos = Files(), np.array([3, 4], np.uint32)
    ram = Ram(files, Ssd(files, Withdrawn()), Withdrawn())
    files.grow(5)
    ram.grow(5)
    ram.set_budget(200 * FILE_BYTES, 100 * FILE_BYTES)
    files.resize(inos, np.full(2, FILE_BYTES))
    ram.cover(inos, repeats=False)
    ram.hold(inos)
    ram.read_first(np.array([3, 3, 3], np.uint32))
    ram.check_invariants()
    assert ram.held_bytes == FILE_BYTES


def test_two_answers_about_a_file_that_come_together_both_count() -> None:
    """A fetch has ended when the file was to be staged: that is answered a moment later."""
    files, inos = Files(), np.array([3], np.uint32)
    ssd = Ssd(files, Withdrawn())
    ram = Ram(files, ssd, Withdrawn())
    files.grow(5)
    ram.grow(5)
    ram.set_budget(200 * FILE_BYTES, 100 * FILE_BYTES)
    ssd.set_room(100 * FILE_BYTES)
    files.resize(inos, np.full(1, FILE_BYTES))
    ssd.admit(inos, None)
    ssd.fetch(inos)
    ram.cover(inos, repeats=False)
    ram.hold(inos)
    ram.send(inos)
    answers = np.array([Result.STORED, Result.STAGED_AND_STORED], np.uint8)
    ram.done(np.array([3, 3], np.uint32), answers, 0.0)
    ram.check_invariants()
    ssd.check_invariants()
    assert files.having(inos, STAGED).tolist() == files.having(inos, STORED).tolist() == [3]
    assert not len(ram.retry(100.0, 10)), "staged it is"


def test_uses_are_counted_as_far_as_they_can_be() -> None:
    """Over a thousand epochs a file that is drawn often is still one of the most used."""
    files = Files()
    ssd = Ssd(files, Withdrawn())
    files.grow(3)
    for _ in range(1024):
        ssd.count(np.array([1] * 64 + [2], np.uint32))
    assert ssd.uses is not None
    assert ssd.uses[1] > ssd.uses[2] == 1024
