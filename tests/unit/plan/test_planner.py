"""The planner and a model of a mount: HDMLP's four rules, budgets, sharing, death."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusecache.base.wire import Observed, Result
from hintsd.follow import search
from hintsd.follow.progress import IDLE_AFTER_S, Progress
from hintsd.follow.sequence import Inos
from hintsd.keeping import AUTO
from hintsd.keeping.keeping import Keeping
from hintsd.plan.followers import AWAITED_S
from hintsd.plan.planner import MountPlanner
from tests.support.planner_model import ModelMount, loader_order, loader_reads, make_planner, pages
from tests.support.policy_caller import origin_bytes

FILE_BYTES = 8192
CHECKED_MOST = 2000  # files whose invariants are checked at each turn, before or after the answers


class Scene:
    """One mount, its planner, jobs with their orders, and a clock."""

    turn_every = 32  # reads

    def __init__(
        self,
        sizes: Inos,
        *,
        ram_bytes: int,
        ssd_bytes: int = 1 << 60,
        outside_bytes: int = 0,
        seed: int = 0,
        keep: str = AUTO,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.mount = ModelMount(sizes, ssd_bytes=ssd_bytes, outside_bytes=outside_bytes)
        keeping = None if keep == AUTO else Keeping(keep)
        self.planner = make_planner(self.mount, ram_bytes, keeping)
        self.budget_bytes = ram_bytes
        self.orders: dict[str, Callable[[int], Inos | None]] = {}
        self.nobodys: set[str] = set()
        self.now = 0.0
        self.turns = 0
        self.exchanges: list[tuple[list[int], list[int]]] = []  # (dropped, staged) by one decide()

    def close(self, name: str) -> None:
        self.planner.close_job(name)
        del self.orders[name]

    def shuffled(self, count: int | None = None) -> list[Inos]:
        """Orders of eight epochs."""
        total = len(self.mount.sizes)
        return [(self.rng.permutation(total)[:count] + 1).astype(np.uint32) for _ in range(8)]

    def open(
        self,
        name: str,
        orders: list[Inos] | Callable[[int], Inos | None],
        *,
        samples: int,
        epochs: int | None = 8,
        epoch: int = 0,
        index: int = 0,
        batch_size: int = 16,
        workers: int = 1,
        is_lost: bool = False,
        is_nobodys: bool = False,
        dataset: Inos | None = None,
        owner: int = 0,
    ) -> None:
        """`is_nobodys`: the job is of no process. `dataset`: None: all files."""
        if is_nobodys:
            self.nobodys.add(name)
        self.orders[name] = orders if callable(orders) else orders.__getitem__
        self.planner.open_job(
            name,
            samples_per_epoch=samples,
            epochs=epochs,
            epoch=epoch,
            index=index,
            batch_size=batch_size,
            workers=workers,
            prefetch_factor=2,
            dataset=np.array(list(self.mount.sizes), np.uint32) if dataset is None else dataset,
            now=self.now,
            is_lost=is_lost,
            owner=owner,
        )

    def turn(self, work: int = 1 << 20, step_s: float = 0.01) -> None:
        self.now += step_s
        for name, order in self.orders.items():
            for epoch in self.planner.wanted_epochs(name):
                inos = order(epoch)
                if inos is None:
                    self.planner.unknown(name, epoch)
                else:
                    self.planner.supply(name, epoch, inos)
            if self.planner.followers.is_sought(name, self.now):
                seen, epochs = self.planner.followers.sought(name)
                self.planner.followers.found(name, search.walk(seen, epochs, order), self.now)
        commands = self.planner.decide(self.now)
        self.mount.carry_out(commands)
        changes = {
            kind: [int(i) for command in commands if command.kind == kind for i in command.inos]
            for kind in ("drop", "stage")
        }
        if changes["drop"] and changes["stage"]:
            self.exchanges.append((changes["drop"], changes["stage"]))
        self.turns += 1
        # of all files: where there are many, that takes longer than the turn
        every = 4 if len(self.mount.sizes) < CHECKED_MOST else 16
        if self.turns % every == 0:
            self.planner.check_invariants()
        self.mount.work(work)
        self.mount.deliver(self.planner, self.now, self.orders, self.nobodys)
        if self.mount.has_evicted:
            self.mount.has_evicted = False
            ram_bytes = self.budget_bytes * 10 // 9
            self.planner.set_budgets(ram_bytes, self.mount.ssd_free_bytes)
        if self.turns % every == every // 2:
            self.planner.check_invariants()
        assert self.mount.ram_bytes_most <= self.budget_bytes

    def settle(self) -> None:
        for _ in range(6):
            self.turn()

    def read(
        self,
        inos: list[int],
        *,
        turn_every: int = 0,
        work: int = 1 << 20,
        step_s: float | None = None,
        reader: str = "",
    ) -> int:
        """READs that it took. `step_s`: None: of a turn with more than 16 files as if it were
        several.
        """
        before = self.mount.reads
        turn_every = turn_every or self.turn_every
        for at in range(0, len(inos), turn_every):
            part = inos[at : at + turn_every]
            for ino in part:
                self.mount.read(ino, reader)
            self.turn(work, 0.01 * max(1, len(part) / 16) if step_s is None else step_s)
        return self.mount.reads - before


def same_sizes(count: int) -> Inos:
    return np.full(count, FILE_BYTES, np.uint32)


# --- HDMLP 3.1


def test_large_samples_have_a_wire_each_before_the_budget_is_known() -> None:
    scene = Scene(np.full(12, 9 << 20, np.uint32), ram_bytes=6 * (9 << 20))
    scene.planner.set_budgets(0, 0)  # what a mount's first job may find
    scene.open("job", scene.shuffled(), samples=12, batch_size=1)
    assert scene.planner._jobs["job"].progress.spacing == 1


def test_rule_1_next_missing_sample_first() -> None:
    scene = Scene(same_sizes(500), ram_bytes=200 * FILE_BYTES)
    orders = scene.shuffled()
    scene.mount.ssd = {3, 17}
    scene.open("job", orders, samples=500)
    scene.settle()
    assert scene.mount.staged_order == orders[0][:200].tolist()
    scene.read(orders[0][:100].tolist())
    staged = scene.mount.staged_order
    assert staged == orders[0][: len(staged)].tolist()
    assert len(staged) > 200


def test_rules_2_and_3_what_is_dropped_is_used_after_all_that_is_staged() -> None:
    count = 1000
    scene = Scene(same_sizes(count), ram_bytes=300 * FILE_BYTES)
    sequence = np.concatenate(scene.shuffled())
    scene.open(
        "job", [sequence[at : at + count] for at in range(0, 8 * count, count)], samples=count
    )
    scene.settle()
    compared = 0
    for position in range(0, 3 * count, 8):
        scene.read(sequence[position : position + 8].tolist())
        began = scene.planner.status("job")
        start = max(0, began["epoch"] * count + began["index"] - 300)
        for dropped, staged in scene.exchanges:
            uses = {ino: start + int(np.argmax(sequence[start:] == ino)) for ino in staged}
            window_end = max(uses.values())
            assert not set(sequence[window_end - 150 : window_end].tolist()) & set(dropped)
            compared += 1
        scene.exchanges.clear()
    assert compared > 20


def test_rule_4_no_room_is_idle_while_something_is_missing() -> None:
    sizes = np.random.default_rng(1).integers(1, 40_000, 300).astype(np.uint32)
    scene = Scene(sizes, ram_bytes=1_000_000)
    orders = scene.shuffled()
    scene.open("job", orders, samples=300)
    scene.settle()
    for start in range(0, 300, 10):
        idle = scene.budget_bytes - scene.mount.ram_bytes
        missing = next(
            ino for ino in np.concatenate(orders[:3])[start:] if ino not in scene.mount.ram
        )
        assert idle < pages(scene.mount.sizes[int(missing)])
        scene.read(orders[0][start : start + 10].tolist())
        scene.turn()


def test_small_datasets_stay_although_the_next_order_is_unknown() -> None:
    scene = Scene(same_sizes(200), ram_bytes=300 * FILE_BYTES)
    orders = scene.shuffled()
    known = 1
    scene.open(
        "job", lambda epoch: orders[epoch] if epoch < known else None, samples=200, epochs=None
    )
    scene.settle()
    for epoch in range(4):
        assert scene.read(orders[epoch].tolist()) == 0
        known += 1
        scene.planner.supply("job", epoch + 1, orders[epoch + 1])
        scene.turn()
    assert len(scene.mount.staged_order) == 200


# --- the whole run


def test_slow_workers_are_not_given_up_where_no_wire_was_laid_before_them() -> None:
    scene = Scene(same_sizes(8000), ram_bytes=2000 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=8000, workers=4, batch_size=64)
    scene.planner.supply("job", 0, orders[0])
    # two workers were fast before the planner had its first turn, two have only begun
    ahead = np.r_[0:3, 64:67, 128:256, 384:512]
    for position in ahead:
        scene.mount.read(int(orders[0][position]))
    scene.mount.deliver(scene.planner, scene.now, scene.orders, scene.nobodys)
    scene.settle()
    unread = set(orders[0][np.r_[3:64, 67:128]].tolist())
    assert unread <= scene.mount.ram
    scene.read([int(orders[0][512])])  # its wire stands where the wires begin: behind it are none
    scene.settle()
    assert unread <= scene.mount.ram


def test_a_small_window_that_begins_anew_is_not_spent_behind_the_reader() -> None:
    scene = Scene(same_sizes(8000), ram_bytes=200 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=8000, workers=8, batch_size=64)
    scene.settle()
    scene.read(orders[0][:3000].tolist(), turn_every=16)
    assert scene.planner.status("job")["ahead_bytes"] > 50 * FILE_BYTES
    scene.planner.set_budgets(180 * FILE_BYTES, 0)
    scene.planner.decide(scene.now)
    assert scene.planner.status("job")["ahead_bytes"] > 50 * FILE_BYTES


@pytest.mark.parametrize("workers", [1, 3])
def test_hinted_epochs_need_hardly_any_read(workers: int) -> None:
    scene = Scene(same_sizes(3000), ram_bytes=900 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, epochs=2, workers=workers, batch_size=16)
    scene.settle()
    for epoch in range(2):
        inos = list(loader_order(orders[epoch], 16, workers, 2, scene.rng))
        assert scene.read(inos) <= 15
        scene.settle()
    assert scene.planner.status("job")["epoch"] == 1
    for _ in range(4):
        scene.turn(step_s=1.0)
    assert scene.planner.finished("job")
    assert max(scene.mount.origin_reads.values()) == 1
    scene.close("job")
    scene.turn()
    assert not scene.mount.ram
    assert not scene.mount.armed
    assert not scene.mount.fetch_queue


@pytest.mark.parametrize("share", [0.05, 0.75])
def test_origin_traffic_of_uniform_shuffles_is_belady_s(share: float) -> None:
    count = 1000
    scene = Scene(
        same_sizes(count), ram_bytes=150 * FILE_BYTES, ssd_bytes=int(share * count) * FILE_BYTES
    )
    orders = scene.shuffled()
    scene.open("job", orders, samples=count, epochs=3, batch_size=4)
    fetched = []
    for epoch in range(3):
        before = scene.mount.origin_bytes
        scene.read(orders[epoch].tolist(), turn_every=8)
        fetched.append(scene.mount.origin_bytes - before)
    best = origin_bytes(
        [order.astype(int) - 1 for order in orders[:3]],
        same_sizes(count),
        int(share * count) * FILE_BYTES,
    )
    for epoch in (1, 2):
        assert fetched[epoch] <= (1 - share) * count * FILE_BYTES * 1.01
    assert sum(fetched) <= sum(best) * 1.01


def test_without_ram_files_are_fetched_to_ssd_only() -> None:
    scene = Scene(same_sizes(300), ram_bytes=0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=300)
    scene.settle()
    assert scene.mount.ssd == set(range(1, 301))
    assert not scene.mount.staged_order
    assert max(scene.mount.origin_reads.values()) == 1


def test_without_ssd_room_files_pass_to_ram() -> None:
    scene = Scene(same_sizes(1000), ram_bytes=400 * FILE_BYTES, ssd_bytes=0)
    orders = scene.shuffled()
    scene.open("job", orders, samples=1000)
    scene.settle()
    assert scene.read(orders[0].tolist()) <= 3
    assert not scene.mount.ssd


def test_two_jobs_share_every_fetch_and_every_page() -> None:
    scene = Scene(same_sizes(400), ram_bytes=500 * FILE_BYTES)
    for name in ("a", "b"):
        scene.open(name, scene.shuffled(), samples=400)
    scene.settle()
    assert len(scene.mount.ram) == 400
    assert sorted(scene.mount.staged_order) == list(range(1, 401))
    scene.close("a")
    scene.settle()
    assert len(scene.mount.ram) == 400
    scene.close("b")
    scene.settle()
    assert not scene.mount.ram


@pytest.mark.parametrize("is_lone_first", [False, True])
def test_users_get_equal_shares_before_jobs_do(is_lone_first: bool) -> None:
    """Three jobs of one user have together what another's only job has."""
    scene = Scene(same_sizes(8000), ram_bytes=480 * FILE_BYTES)
    parts = (scene.rng.permutation(8000).astype(np.uint32) + 1).reshape(4, 2000)
    owners = (7, 1, 1, 1) if is_lone_first else (1, 1, 7, 1)
    for name, part, owner in zip("abcd", parts, owners, strict=True):
        scene.open(name, [part] * 8, samples=2000, owner=owner)
        scene.settle()
    shares = [scene.planner.status(name)["window_bytes"] // FILE_BYTES for name in "abcd"]
    lone = shares.pop(owners.index(7))
    assert lone + sum(shares) == 480
    assert 180 < lone < 300, shares
    assert all(50 < share < 110 for share in shares), shares
    scene.close("d")
    scene.settle()
    shares = [scene.planner.status(name)["window_bytes"] // FILE_BYTES for name in "abc"]
    assert 180 < shares.pop(owners.index(7)) < 300, shares
    assert all(80 < share < 160 for share in shares), shares


def test_what_a_small_job_leaves_is_its_user_s() -> None:
    """A validation of forty files beside a training, and another user's training."""
    scene = Scene(same_sizes(8000), ram_bytes=480 * FILE_BYTES)
    parts = scene.rng.permutation(8000).astype(np.uint32) + 1
    for name, part, owner in (
        ("large", parts[:3000], 1),
        ("small", parts[3000:3040], 1),
        ("other", parts[4000:7000], 7),
    ):
        scene.open(name, [part] * 8, samples=len(part), epochs=1, owner=owner)
        scene.settle()
    shares = {
        name: scene.planner.status(name)["window_bytes"] // FILE_BYTES
        for name in ("large", "small", "other")
    }
    assert shares["small"] == 40
    assert 180 < shares["other"] < 300, shares
    assert shares["large"] > 140, shares


def test_jobs_get_equal_windows_and_a_closed_one_gives_its_back() -> None:
    scene = Scene(same_sizes(4000), ram_bytes=320 * FILE_BYTES)
    parts = scene.rng.permutation(4000).astype(np.uint32) + 1
    first, second = parts[:2000], parts[2000:]
    scene.open("a", lambda _: first, samples=2000)
    scene.settle()
    assert scene.planner.status("a")["window_bytes"] == 320 * FILE_BYTES
    scene.open("b", lambda _: second, samples=2000)
    scene.settle()
    shares = [scene.planner.status(name)["window_bytes"] // FILE_BYTES for name in "ab"]
    assert sum(shares) == 320
    assert min(shares) > 120
    assert set(second[: shares[1]].tolist()) <= scene.mount.ram
    scene.close("a")
    scene.settle()
    assert scene.mount.ram == set(second[:320].tolist())


def test_window_in_status_counts_a_file_once() -> None:
    scene = Scene(same_sizes(300), ram_bytes=1000 * FILE_BYTES)
    alike = scene.rng.integers(1, 101, 100).astype(np.uint32)  # with replacement
    scene.open("a", scene.shuffled(), samples=300)
    scene.settle()
    assert scene.planner.status("a")["window_bytes"] == 300 * FILE_BYTES  # of two epochs
    scene.open("b", lambda _: alike, samples=100)
    scene.settle()
    assert scene.planner.status("a")["window_bytes"] == 300 * FILE_BYTES
    distinct = len(np.unique(alike))
    assert scene.planner.status("b")["window_bytes"] == distinct * FILE_BYTES
    scene.close("a")
    scene.settle()
    assert scene.planner.status("b")["window_bytes"] == distinct * FILE_BYTES


# --- wrong hints


@pytest.mark.claim("P9")
@pytest.mark.parametrize("ram_files", [500, 4000], ids=["mostly READs", "wires only"])
@pytest.mark.parametrize("reader", ["another seed", "sequential", "another rank"])
def test_a_wrong_hint_is_noticed_and_its_plan_dropped(reader: str, ram_files: int) -> None:
    count = 3000
    scene = Scene(same_sizes(count), ram_bytes=ram_files * FILE_BYTES)
    orders = [order[: count // 2] for order in scene.shuffled()]
    scene.open("job", orders, samples=count // 2, workers=2)
    scene.settle()
    readers: dict[str, npt.NDArray[Any]] = {
        "another seed": scene.shuffled(count // 2)[0],
        "sequential": np.arange(1, count, 2),
        "another rank": np.setdiff1d(np.arange(1, count + 1), orders[0]),
    }
    reads = readers[reader]
    samples = 0
    for _ in range(20):
        for start in range(0, len(reads), 8):
            scene.read(reads[start : start + 8].tolist())
            samples += 8
            if scene.planner.status("job")["state"] == "wrong":
                break
        else:
            continue
        break
    assert scene.planner.status("job")["state"] == "wrong"
    assert samples < 2000
    scene.settle()
    assert not scene.mount.ram
    assert not scene.mount.armed
    assert not scene.mount.stage_queue
    assert not scene.mount.fetch_queue
    [(job, line)] = scene.planner.followers.notices()
    assert job == "job"
    assert "in none of the epochs that are known" in line


@pytest.mark.claim("P9")
@pytest.mark.parametrize(("ram_files", "workers"), [(500, 1), (500, 4), (48_000, 4)])
def test_a_hint_of_which_half_is_never_read_is_noticed(ram_files: int, workers: int) -> None:
    """By files that were watched and that nobody has opened. It is planned for no more until an
    order is announced: that its reader is found would tell nothing.
    """
    count = 24_000
    scene = Scene(same_sizes(count), ram_bytes=ram_files * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count, workers=workers)
    scene.settle()
    epochs = (loader_order(order, 16, workers, 2, scene.rng) for order in orders)
    reads = [ino for epoch in epochs for ino in epoch if ino % 2]
    read = 0
    while "were never opened" not in scene.planner.status("job")["reason"] and read < 12_000:
        scene.read(reads[read : read + 16], reader="job")
        read += 16
    assert "were never opened" in scene.planner.followers.notices()[-1][1]
    assert scene.planner.status("job")["state"] == "wrong"
    scene.settle()
    assert not scene.mount.ram
    assert not scene.mount.armed
    scene.read(reads[read : read + 2000], reader="job")
    assert scene.planner.status("job")["state"] == "wrong"
    scene.planner.announce("job", 0, orders[0], scene.now)
    assert scene.planner.status("job")["state"] == "waiting"
    scene.read(orders[0][:320].tolist(), turn_every=16, reader="job")
    assert scene.planner.status("job")["state"] == "running"


def test_a_hint_that_is_wrong_once_more_is_looked_for_less() -> None:
    """Half of the places have another file than is read, so that its reader is found each time, and
    strays soon again. Not much is staged for that.
    """
    count = 20_000
    scene = Scene(same_sizes(count * 3 // 2), ram_bytes=count // 5 * FILE_BYTES)
    scene.mount.ssd = set(scene.mount.sizes)
    scene.planner = make_planner(scene.mount, scene.budget_bytes)
    names = np.arange(1, count + 1, dtype=np.uint32)
    told = np.where(names % 2, names, names // 2 + count)
    place = scene.rng.permutation(count)
    order = told[place]
    scene.open("job", [order], samples=count, epochs=1, workers=4, batch_size=64, dataset=told)
    scene.settle()
    reads = list(loader_order(names[place], 64, 4, 2, scene.rng))
    scene.read(reads, turn_every=160, step_s=0.02, reader="job")
    lines = [line for _, line in scene.planner.followers.notices()]
    assert sum("not in the hinted order" in line for line in lines) >= 2
    assert scene.planner.status("job")["state"] == "wrong"
    assert len(scene.mount.staged_order) < 0.65 * count


@pytest.mark.parametrize(
    "opens",
    [lambda epoch, ino: ino % 10 > 0, lambda epoch, ino: epoch == 0],
    ids=["all but a tenth", "each once for all"],
)
def test_a_hint_of_which_little_is_never_opened_stays(opens: Callable[[int, int], bool]) -> None:
    """Nor does it speak against a hint that files are opened no more: steps tell of its reader."""
    count = 12_000
    scene = Scene(same_sizes(count), ram_bytes=500 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count)
    scene.settle()
    for epoch in range(2):
        for start in range(0, count, 64):
            batch = orders[epoch][start : start + 64].tolist()
            scene.read([ino for ino in batch if opens(epoch, ino)], reader="job")
            scene.planner.followers.step("job", epoch, start // 16 + 4, scene.now)
            scene.turn()
            assert scene.planner.status("job")["state"] != "wrong"


def test_steps_that_come_before_the_look_ups_leave_nothing_out() -> None:
    """A step moves the place past wires whose look-ups are told a fifth of a second later."""
    count, turn = 32_000, 160
    scene = Scene(same_sizes(count), ram_bytes=count * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count, workers=4)
    scene.settle()
    scene.mount.late_by = 10
    for start in range(0, count - turn, turn):
        batch = orders[0][start : start + turn].tolist()
        for ino in batch:
            scene.mount.read(ino, "job")
        scene.planner.followers.step("job", 0, (start + turn) // 16, scene.now)
        scene.turn(step_s=0.02)
    assert scene.planner.followers.notices() == []


def test_of_a_job_of_no_process_nobody_says_that_half_is_left_out() -> None:
    """What others look up would pass for what it has."""
    count = 14_000
    scene = Scene(same_sizes(count), ram_bytes=500 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count, workers=4, is_nobodys=True)
    scene.settle()
    reads = loader_order(orders[0], 16, 4, 2, scene.rng)
    scene.read([ino for ino in reads if ino % 2], turn_every=16, reader="job")
    assert not any("never opened" in line for _, line in scene.planner.followers.notices())


def test_a_half_read_hint_stays_wrong_beside_another_job() -> None:
    """Whose reader keeps hintsd listening."""
    count = 14_000
    scene = Scene(same_sizes(2 * count), ram_bytes=1500 * FILE_BYTES)
    files = {"half": np.arange(1, count + 1), "all": np.arange(count + 1, 2 * count + 1)}
    reads = {}
    for name, inos in files.items():
        orders = [scene.rng.permutation(inos).astype(np.uint32) for _ in range(2)]
        dataset = inos.astype(np.uint32)
        scene.open(name, orders, samples=count, epochs=2, workers=4, dataset=dataset)
        reads[name] = [ino for order in orders for ino in loader_order(order, 16, 4, 2, scene.rng)]
    reads["half"] = [ino for ino in reads["half"] if ino % 2]
    scene.settle()
    for start in range(0, count, 16):
        for name in files:
            for ino in reads[name][start : start + 16]:
                scene.mount.read(ino, name)
        scene.turn()
    assert scene.planner.status("half")["state"] == "wrong"
    notices = scene.planner.followers.notices()
    assert [name for name, line in notices if "never opened" in line] == ["half"]
    assert not any(name == "all" for name, _ in notices)


@pytest.mark.claim("P9")
@pytest.mark.parametrize(("turn", "late_by"), [(64, 0), (160, 0), (16, 10), (160, 10)])
def test_jobs_that_take_each_others_wires_condemn_nobody(turn: int, late_by: int) -> None:
    """Four read one dataset in the same chunks, shuffled anew by each. A wire that another one has
    taken is laid once more, by any of them; its own reader may have passed meanwhile.
    """
    count, batch_size, jobs = 12_000, 4, 4
    scene = Scene(same_sizes(count), ram_bytes=count // 10 * FILE_BYTES)
    chunks = np.array_split(scene.shuffled()[0], 20)
    reads = {}
    for job in map(str, range(jobs)):
        order = np.concatenate([scene.rng.permutation(chunk) for chunk in chunks])
        scene.open(job, [order], samples=count, epochs=1, workers=2, batch_size=batch_size)
        reads[job] = list(loader_order(order, batch_size, 2, 2, scene.rng))
    scene.settle()
    scene.mount.late_by = late_by
    for start in range(0, count - turn, turn):
        for place in range(start, start + turn, 8):
            for job, inos in reads.items():
                for ino in inos[place : place + 8]:
                    scene.mount.read(ino, job)
        scene.turn(step_s=turn / 1200)
        assert scene.planner.followers.notices() == []
    assert {scene.planner.status(job)["state"] for job in reads} <= {"running", "done"}


def test_a_second_unhinted_reader_condemns_nobody() -> None:
    scene = Scene(same_sizes(3000), ram_bytes=600 * FILE_BYTES)
    orders = scene.shuffled()
    other = scene.shuffled()
    scene.open("job", orders, samples=3000, workers=2)
    scene.settle()
    for epoch in range(2):
        both = np.stack([orders[epoch], other[epoch], other[epoch + 2]], axis=1).ravel()
        scene.read(both.tolist(), turn_every=8)
        assert scene.planner.status("job")["state"] == "running"
        status = scene.planner.status("job")
        assert abs(status["epoch"] * 3000 + status["index"] - (epoch + 1) * 3000) < 400


@pytest.mark.parametrize("ram_files", [200, 2000])
def test_ranks_of_one_dataset_leave_each_other_alone(ram_files: int) -> None:
    """Each epoch deals the samples out anew: a rank reads what another one reads later."""
    scene = Scene(same_sizes(1000), ram_bytes=ram_files * FILE_BYTES)
    whole = scene.shuffled()
    ranks = {f"rank{rank}": [epoch[rank::2] for epoch in whole] for rank in range(2)}
    for name, orders in ranks.items():
        scene.open(name, orders, samples=500, epochs=4, workers=2, batch_size=32)
    scene.settle()
    for epoch in range(4):
        scene.read(np.stack([orders[epoch] for orders in ranks.values()], axis=1).ravel().tolist())
        for name in ranks:
            status = scene.planner.status(name)
            assert status["state"] in ("running", "done"), status
            assert abs(status["epoch"] * 500 + status["index"] - (epoch + 1) * 500) < 200
    assert not [line for _, line in scene.planner.followers.notices() if "wrong" in line]


def test_two_seeds_over_one_dataset_leave_each_other_alone() -> None:
    scene = Scene(same_sizes(1000), ram_bytes=300 * FILE_BYTES)
    jobs = {f"job{number}": scene.shuffled() for number in range(2)}
    for name, orders in jobs.items():
        scene.open(name, orders, samples=1000, epochs=4, workers=2, batch_size=32)
    scene.settle()
    for epoch in range(4):
        scene.read(np.stack([orders[epoch] for orders in jobs.values()], axis=1).ravel().tolist())
        for name in jobs:
            status = scene.planner.status(name)
            assert status["state"] in ("running", "done"), status
            assert abs(status["epoch"] * 1000 + status["index"] - (epoch + 1) * 1000) < 400
    assert not [line for _, line in scene.planner.followers.notices() if "wrong" in line]


def test_ls_condemns_nobody_and_moves_nothing_far() -> None:
    scene = Scene(same_sizes(6000), ram_bytes=7000 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=6000, workers=2)
    scene.settle()
    scene.read(orders[0][:1000].tolist())
    for ino in range(1, 6001):
        scene.mount.look_up(ino)
        if ino % 100 == 0:
            scene.turn()
    status = scene.planner.status("job")
    assert status["state"] == "running"
    assert abs(status["index"] - 1000) < 1000
    assert scene.read(orders[0][1000:].tolist()) == 0
    assert scene.planner.status("job")["state"] == "running"


@pytest.mark.parametrize("place", [0, 700, 2500])
def test_a_reader_that_jumps_is_followed(place: int) -> None:
    scene = Scene(same_sizes(3000), ram_bytes=300 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, workers=1, batch_size=8)
    scene.settle()
    scene.read(orders[0][:1500].tolist(), turn_every=16)
    assert scene.read(orders[0][place:].tolist(), turn_every=16) < 60
    assert scene.planner.status("job")["state"] == "running"


def read_from_ssd() -> tuple[Scene, Inos]:
    """A job of 3,000 samples, all on SSD, that has read 600; and its order."""
    scene = Scene(same_sizes(3000), ram_bytes=300 * FILE_BYTES)
    scene.mount.ssd = set(range(1, 3001))
    (order, *_) = orders = scene.shuffled()
    scene.open("job", orders, samples=3000)
    scene.settle()
    scene.read(order[:600].tolist())
    return scene, order


def test_no_stall_is_not_predicted_while_reads_are_late() -> None:
    scene, order = read_from_ssd()
    assert scene.planner.status("job")["predicted_stall_s"] == 0.0
    scene.mount.evicts = set(order[600:900].tolist())
    scene.read(order[600:900].tolist())
    status = scene.planner.status("job")
    assert status["late"]["evicted"] > 200
    assert status["predicted_stall_s"] is None
    scene.turn(step_s=6.0)  # nobody reads
    assert scene.planner.status("job")["predicted_stall_s"] == 0.0
    scene.read(order[900:1500].tolist())
    assert scene.planner.status("job")["predicted_stall_s"] == 0.0


def test_a_stall_is_predicted_from_what_the_sources_give() -> None:
    """Of the files that are not in RAM: those on SSD at its rate, the others at the origin's."""
    scene, _ = read_from_ssd()
    job = scene.planner.status("job")
    consumer_bytes_per_s = job["samples_per_s"] * FILE_BYTES
    left_s = 2400 * FILE_BYTES / consumer_bytes_per_s

    def stall_s(origin_bytes_per_s: float, ssd_bytes_per_s: float) -> float:
        scene.planner.set_sources(origin_bytes_per_s, ssd_bytes_per_s, 0)
        return float(scene.planner.status("job")["predicted_stall_s"])

    assert stall_s(1.0, 0.0) == 0.0, "all is on SSD, whose rate is not known"
    assert stall_s(1.0, 2 * consumer_bytes_per_s) == pytest.approx(0.0, abs=0.05 * left_s)
    assert stall_s(1.0, consumer_bytes_per_s / 2) == pytest.approx(left_s, rel=0.3)


def test_no_more_are_not_late_than_the_job_has() -> None:
    """A reader who begins again passes the same samples."""
    scene = Scene(same_sizes(3000), ram_bytes=300 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, epochs=1, workers=1, batch_size=8)
    scene.settle()
    for _ in range(3):
        scene.read(orders[0][:2000].tolist())
    status = scene.planner.status("job")
    assert status["state"] == "running"
    assert 2000 <= status["not_late"] <= 3000


def test_a_trainer_that_breaks_out_of_the_epoch_is_followed() -> None:
    scene = Scene(same_sizes(3000), ram_bytes=300 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, batch_size=8)
    scene.settle()
    scene.read(orders[0][:1000].tolist())
    assert scene.read(orders[1].tolist()) < 60
    assert scene.planner.status("job")["state"] == "running"


def test_a_wrong_verdict_heals_when_somebody_follows() -> None:
    scene = Scene(same_sizes(3000), ram_bytes=300 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, batch_size=8)
    scene.settle()
    scene.read(scene.shuffled()[0][:1000].tolist())
    assert scene.planner.status("job")["state"] == "wrong"
    assert scene.read(orders[0].tolist()) < 700  # twelve of 64 wires, and what was staged late
    assert scene.planner.status("job")["state"] == "running"


def count_weighed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many observations are weighed at once, from now on."""
    weighed: list[int] = []
    take = Progress.take

    def counted_take(self: Progress, inos: Inos, *rest: Any) -> None:
        weighed.append(len(inos))
        take(self, inos, *rest)

    monkeypatch.setattr(Progress, "take", counted_take)
    return weighed


def test_where_nobody_is_planned_for_a_frame_is_weighed_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a reader who follows after all is found where the frame ends."""
    scene = Scene(same_sizes(6000), ram_bytes=600 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=6000, batch_size=8)
    scene.settle()
    wrong = scene.shuffled()[0]
    read = 0
    while scene.planner.status("job")["state"] != "wrong":
        scene.read(wrong[read : read + 8].tolist())
        read += 8
    weighed = count_weighed(monkeypatch)
    for reads in (wrong[read : read + 1000], orders[0][:1500]):
        scene.now += 0.1
        scene.planner.followers.observe(reads, np.full(len(reads), 2, np.uint8), scene.now)
    assert weighed == [1000, 1500]
    status = scene.planner.status("job")
    assert status["state"] == "running"
    assert 1400 < status["index"] <= 1500


def test_while_a_hint_is_wrong_its_readers_are_seldom_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else planning would take the cores from readers who get nothing for it."""
    weighed = count_weighed(monkeypatch)
    count = 3000
    scene = Scene(same_sizes(count), ram_bytes=count // 10 * FILE_BYTES)
    scene.open("job", endless(1, count), samples=count, epochs=None, workers=2)
    scene.settle()
    wrong_s = watched_s = 0.0
    waits_s = set()
    read = np.concatenate([endless(2, count)(epoch) for epoch in range(3)])
    for start in range(0, len(read), 8):
        weighed.clear()
        was_wrong = scene.planner.status("job")["state"] == "wrong"
        scene.read(read[start : start + 8].tolist(), turn_every=9)
        if was_wrong:
            wrong_s += 0.01
            watched_s += 0.01 * bool(weighed)
            waits_s.add(scene.planner.patience_s())
    assert wrong_s > 8
    assert waits_s == {math.inf}
    assert 1 < watched_s < 3  # the first second, and after 1, 2 and 4 s until 64 files are seen


def test_a_file_read_at_an_epochs_end_is_a_wire_at_the_next_ones_beginning() -> None:
    count, end, wire = 2000, 1847, 192  # `end` is no wire's position; `wire` is
    first = np.arange(1, count + 1, dtype=np.uint32)
    second = np.random.default_rng(1).permutation(first)
    at = int(np.flatnonzero(second == first[end])[0])
    second[[at, wire]] = second[[wire, at]]
    planner = MountPlanner(64 << 20, 1 << 40)
    planner.learn(first, np.full(count, 6000), np.ones(count, np.uint8))
    planner.open_job(
        "job",
        samples_per_epoch=count,
        epochs=2,
        epoch=0,
        index=0,
        batch_size=4,
        workers=1,
        prefetch_factor=1,
        dataset=first,
        now=0.0,
    )
    planner.supply("job", 0, first)
    planner.supply("job", 1, second)
    armed: set[int] = set()

    def decide(now: float) -> None:
        for command in planner.decide(now):
            if command.kind == "arm":
                armed.update(command.inos.tolist())

    def read(start: int, stop: int, now: float) -> None:
        """As the mount tells it: each armed file's look-up, once, all in one frame."""
        fired = [ino for ino in first[start:stop].tolist() if ino in armed]
        armed.difference_update(fired)
        planner.followers.observe(
            np.array(fired, np.uint32), np.full(len(fired), Observed.LOOKUP, np.uint8), now
        )

    decide(0.0)
    for start in range(0, count, 200):
        read(start, start + 200, now := 1.0 + start / 100)
        decide(now + 0.1)
        planner.followers.step("job", 0, (start + 200) // 4, now + 0.2)
        decide(now + 0.3)
    assert planner.status("job")["epoch"] == 1
    grid = {int(second[position]) for position in range(0, 8 * 64, 64)}
    assert grid <= armed, [int(np.flatnonzero(second == ino)[0]) for ino in grid - armed]


# --- a reader whose place is not known


def endless(seed: int, count: int) -> Callable[[int], Inos]:
    """Orders of as many epochs as one likes."""

    def order(epoch: int) -> Inos:
        return (np.random.default_rng((seed, epoch)).permutation(count) + 1).astype(np.uint32)

    return order


@pytest.mark.claim("P10")
@pytest.mark.parametrize("ram_share", [0.3, 1.2])
@pytest.mark.parametrize(("count", "gone"), [(480, 11_000), (480, 30), (3000, 5500)])
def test_a_reader_that_went_on_while_hintsd_was_away_is_found(
    count: int, gone: int, ram_share: float
) -> None:
    for seed in range(2):
        order = endless(seed, count)
        scene = Scene(same_sizes(count), ram_bytes=int(ram_share * count) * FILE_BYTES, seed=seed)
        scene.mount.ssd = set(range(1, count + 1))
        scene.open("job", order, samples=count, epochs=None, epoch=2, index=100, is_lost=True)
        at = 2 * count + 100 + gone
        read = np.concatenate([order(epoch) for epoch in range(at // count, at // count + 8)])
        for start in range(0, max(count, 1200), 24):
            scene.read(read[at % count + start :][:24].tolist(), turn_every=24)
            assert scene.planner.status("job")["state"] in ("waiting", "running")
        status = scene.planner.status("job")
        assert status["state"] == "running"
        here = status["epoch"] * count + status["index"]
        assert here == pytest.approx(at + max(count, 1200), abs=200)
        assert scene.planner.followers.notices() == []


@pytest.mark.parametrize(("count", "most"), [(20, 4096), (1000, 1048), (1 << 21, 2)])
def test_so_many_epochs_are_looked_through_at_once(count: int, most: int) -> None:
    """A look at one takes 0.2 ms, however short it is."""
    scene = Scene(same_sizes(20), ram_bytes=20 * FILE_BYTES)
    scene.open("job", lambda _: None, samples=count, epochs=None, epoch=7, is_lost=True)
    assert scene.planner.followers.sought("job")[1] == [*range(7, 7 + most), 6]


@pytest.mark.claim("P9")
@pytest.mark.parametrize(
    ("count", "ram_share", "most"), [(480, 1.2, 1000), (3000, 0.3, 700), (3000, 1.2, 3000)]
)
def test_a_wrong_hint_is_noticed_after_a_restart(count: int, ram_share: float, most: int) -> None:
    order, other = endless(1, count), endless(2, count)
    scene = Scene(same_sizes(count), ram_bytes=int(ram_share * count) * FILE_BYTES)
    scene.open("job", order, samples=count, epochs=None, epoch=2, index=100, is_lost=True)
    scene.settle()
    samples = 0
    while scene.planner.status("job")["state"] != "wrong" and samples < 5000:
        at = samples % count
        scene.read(other(samples // count)[at : at + 8].tolist(), turn_every=8)
        samples += 8
    assert scene.planner.status("job")["state"] == "wrong"
    assert samples < most


@pytest.mark.claim("P9")
@pytest.mark.parametrize(("ram_share", "most"), [(0.2, 250), (1.3, 450)])
def test_a_wrong_hint_of_short_epochs_is_noticed(ram_share: float, most: int) -> None:
    count = 480
    for seed in range(2):
        order, other = endless(seed, count), endless(seed + 100, count)
        scene = Scene(same_sizes(count), ram_bytes=int(ram_share * count) * FILE_BYTES)
        scene.open("job", order, samples=count, epochs=None, epoch=2, index=100, workers=2)
        scene.settle()
        read = np.concatenate([other(0), other(1)])
        samples = 0
        while scene.planner.status("job")["state"] != "wrong" and samples < most:
            scene.read(read[samples : samples + 8].tolist(), turn_every=8)
            samples += 8
        assert scene.planner.status("job")["state"] == "wrong"


@pytest.mark.claim("P9")
@pytest.mark.parametrize(
    ("batch_size", "workers", "ram_share"), [(4, 2, 1.3), (16, 2, 0.2), (16, 4, 0.2), (16, 4, 1.3)]
)
def test_a_right_hint_of_short_epochs_is_not_condemned(
    batch_size: int, workers: int, ram_share: float
) -> None:
    count = 480
    order = endless(workers, count)
    scene = Scene(same_sizes(count), ram_bytes=int(ram_share * count) * FILE_BYTES, seed=workers)
    scene.mount.ssd = set(range(1, count + 1))
    scene.open("job", order, samples=count, epochs=None, batch_size=batch_size, workers=workers)
    scene.settle()
    for epoch in range(4):
        scene.read(list(loader_order(order(epoch), batch_size, workers, 2, scene.rng)))
    assert scene.planner.followers.notices() == []
    status = scene.planner.status("job")
    assert status["epoch"] * count + status["index"] == pytest.approx(4 * count, abs=150)


@pytest.mark.claim("P9")
@pytest.mark.parametrize(
    ("batch_size", "workers", "ram_share"), [(64, 4, 0.2), (32, 8, 1.3), (64, 8, 0.2), (64, 8, 1.3)]
)
def test_where_most_of_an_epoch_is_read_at_once_workers_are_followed(
    batch_size: int, workers: int, ram_share: float
) -> None:
    """In no order, but each worker reads its batches in turn."""
    count = 600
    for is_right in (True, False):
        order, other = endless(1, count), endless(2, count)
        scene = Scene(same_sizes(count), ram_bytes=int(ram_share * count) * FILE_BYTES)
        scene.mount.ssd = set(range(1, count + 1))
        scene.open("job", order, samples=count, epochs=None, batch_size=batch_size, workers=workers)
        scene.settle()
        for epoch in range(12):
            read = (order if is_right else other)(epoch)
            reads = loader_reads(read, batch_size, workers, 2, scene.rng)
            for number, (worker, ino) in enumerate(reads, 1):
                scene.mount.read(ino, process=100 + worker)
                if number % 40 == 0:
                    scene.turn(step_s=0.02)
            if scene.planner.status("job")["state"] == "wrong":
                break
        assert scene.planner.status("job")["state"] == ("running" if is_right else "wrong")
        assert len(scene.planner.followers.notices()) == (not is_right)


def test_workers_that_nobody_can_tell_apart_condemn_no_hint() -> None:
    count = 600
    order = endless(1, count)
    scene = Scene(same_sizes(count), ram_bytes=count // 5 * FILE_BYTES)
    scene.open("job", order, samples=count, epochs=None, batch_size=64, workers=8)
    scene.settle()
    for epoch in range(6):
        scene.read(list(loader_order(order(epoch), 64, 8, 2, scene.rng)), turn_every=40)
    assert scene.planner.followers.notices() == []


def test_readers_of_what_is_in_ram_leave_planning_time() -> None:
    """Where more of the window is to be staged, decisions follow each other as before."""
    patience_s = {}
    for ram_share in (0.2, 3.0):
        scene = Scene(same_sizes(3000), ram_bytes=int(ram_share * 3000) * FILE_BYTES)
        orders = scene.shuffled()
        scene.open("job", orders, samples=3000)
        scene.settle()
        scene.read(orders[0][:1000].tolist())
        scene.turn()
        patience_s[ram_share] = scene.planner.patience_s()
        speed = scene.planner.status("job")["samples_per_s"]
        window = scene.planner.status("job")["window_bytes"] / FILE_BYTES
        if ram_share < 1:
            assert patience_s[ram_share] == pytest.approx(window / 6 / speed, rel=0.1)
    assert patience_s[3.0] > 10 * patience_s[0.2]


def test_a_wrong_verdict_heals_where_all_lies_in_ram() -> None:
    count = 2000
    order = endless(1, count)
    scene = Scene(same_sizes(count), ram_bytes=2 * count * FILE_BYTES)
    scene.open("job", order, samples=count, epochs=None)
    scene.settle()
    scene.read(endless(2, count)(0).tolist())
    assert scene.planner.status("job")["state"] == "wrong"
    for epoch in (5, 6):  # not one that is known
        scene.read(order(epoch).tolist())
    status = scene.planner.status("job")
    assert status["state"] == "running"
    assert status["epoch"] * count + status["index"] == pytest.approx(7 * count, abs=200)
    assert ("job", "follows its order again; planned again") in scene.planner.followers.notices()


def test_while_wrong_steps_tell_where_to_look_and_believe_nothing() -> None:
    count = 2000
    order = endless(1, count)
    scene = Scene(same_sizes(count), ram_bytes=2 * count * FILE_BYTES)
    scene.open("job", order, samples=count, epochs=None, batch_size=10)
    scene.settle()
    scene.read(endless(2, count)(0).tolist())
    assert scene.planner.status("job")["state"] == "wrong"
    scene.planner.followers.step("job", 9, 0, scene.now)
    assert scene.planner.wanted_epochs("job") == [9, 10]
    scene.settle()
    assert scene.planner.status("job")["state"] == "wrong"
    assert not scene.mount.ram
    scene.planner.announce("job", 9, order(9), scene.now)
    scene.settle()
    assert scene.planner.status("job")["state"] == "waiting"
    assert set(order(9).tolist()) <= scene.mount.ram


# --- strangers: processes that are not the job's


def strangers_order(kind: str, count: int, rng: np.random.Generator) -> Iterator[int]:
    """A reader without a hint, for ever."""
    while True:
        yield from (np.arange(count) if kind == "listing" else rng.permutation(count)) + 1


def follow(
    scene: Scene,
    order: Iterable[int],
    strangers: list[Iterator[int]],
    each: int = 1,
    stranger_is: str = "cat",
) -> Iterator[int]:
    """Reads `order` as the job's process; after each sample every stranger reads `each` more.
    Yields the samples read, after each turn.
    """
    for count, ino in enumerate(order, 1):
        scene.mount.read(ino, "job")
        for stranger in strangers * each:
            scene.mount.read(next(stranger), stranger_is)
        if count % 8 == 0:
            scene.turn()
            yield count


@pytest.mark.claim("P9")
@pytest.mark.parametrize(
    ("ram_share", "kind", "strangers", "each", "stranger_is"),
    [
        (0.3, "random", 1, 1, "cat"),
        (0.3, "listing", 1, 6, "cat"),
        (0.3, "listing", 3, 1, ""),  # "": ended, as its parent has
        (1.2, "random", 3, 1, ""),
        (1.2, "random", 1, 6, "cat"),
        (1.2, "listing", 3, 1, "cat"),
    ],
)
def test_strangers_condemn_nobody_and_move_nothing(
    ram_share: float, kind: str, strangers: int, each: int, stranger_is: str
) -> None:
    for seed, count in enumerate((480, 1500)):
        scene = Scene(same_sizes(count), ram_bytes=int(ram_share * count) * FILE_BYTES, seed=seed)
        orders = scene.shuffled()
        scene.open("job", orders, samples=count, workers=2)
        scene.settle()
        read = [
            ino for epoch in range(2) for ino in loader_order(orders[epoch], 16, 2, 2, scene.rng)
        ]
        others = [strangers_order(kind, count, scene.rng) for _ in range(strangers)]
        for samples in follow(scene, read, others, each, stranger_is):
            status = scene.planner.status("job")
            assert status["state"] == "running"
            assert abs(status["epoch"] * count + status["index"] - samples) < 300
        assert sum(status["unplanned"].values()) < 20
        assert status["not_late"] > 1.8 * count


@pytest.mark.parametrize("kind", ["random", "listing"])
@pytest.mark.parametrize("ram_share", [0.3, 1.2])
def test_a_wrong_hint_is_noticed_beside_strangers(ram_share: float, kind: str) -> None:
    count = 1500
    scene = Scene(same_sizes(count), ram_bytes=int(ram_share * count) * FILE_BYTES)
    scene.open("job", scene.shuffled(), samples=count, workers=2)
    scene.settle()
    read = np.concatenate(scene.shuffled()).tolist()
    strangers = [strangers_order(kind, count, scene.rng) for _ in range(2)]
    for samples in follow(scene, read, strangers):  # noqa: B007
        if scene.planner.status("job")["state"] == "wrong":
            break
    assert scene.planner.status("job")["state"] == "wrong"
    assert samples < 2000


def test_strangers_alone_move_no_reader_that_pauses() -> None:
    scene = Scene(same_sizes(1000), ram_bytes=400 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=1000)
    scene.settle()
    scene.read(orders[0][:300].tolist(), reader="job")
    before = scene.planner.status("job")
    window = [int(ino) for ino in orders[0][300:600]]
    scene.read(window, reader="cat")
    scene.read(list(range(1, 1001)), reader="cat")
    after = scene.planner.status("job")
    for figure in ("state", "epoch", "index", "late", "unplanned", "not_late", "window_bytes"):
        assert after[figure] == before[figure], figure
    assert scene.read(orders[0][300:].tolist(), reader="job") <= 10


def test_what_a_stranger_has_fired_is_laid_again_and_holds_the_window() -> None:
    """Also between the marks: a slow worker is still to read it."""
    scene = Scene(same_sizes(3000), ram_bytes=4000 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=3000, batch_size=64, workers=4)
    scene.settle()
    order = orders[0].tolist()
    slow = range(192, 256)  # one worker's batch
    scene.read([ino for at, ino in enumerate(order[:500]) if at not in slow], reader="job")
    job = scene.planner._jobs["job"].progress
    low = job.low
    assert low <= slow.start < job.high
    for _ in range(3):
        assert order[slow.start] in scene.mount.armed
        scene.mount.look_up(order[slow.start], "cat")
        scene.turn()
        assert job.low == low
        scene.turn()
    scene.read([order[at] for at in slow], reader="job")
    assert job.low > slow.start


def test_a_reader_whose_wires_strangers_fire_is_found_at_the_next_one() -> None:
    """Four of the first six, each before it is laid again."""
    scene = Scene(same_sizes(480), ram_bytes=600 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=480, epochs=1, batch_size=4)
    scene.settle()
    order = orders[0].tolist()
    for start, stop, stolen in ((0, 129, [64]), (129, 380, [192, 256, 320])):
        for wire in stolen:
            scene.mount.look_up(order[wire], "cat")
        for ino in order[start:stop]:
            scene.mount.read(ino, "job")
        scene.turn()
        assert scene.planner.status("job")["index"] == 129
    scene.read(order[380:400], reader="job")
    assert scene.planner.status("job")["index"] in range(385, 401)


def test_strangers_that_fire_most_wires_condemn_nobody() -> None:
    """They go through all files several times while the job's reader comes from wire to wire."""
    for seed in range(2):
        scene = Scene(same_sizes(1500), ram_bytes=1800 * FILE_BYTES, seed=seed)
        orders = scene.shuffled()
        scene.open("job", orders, samples=1500, batch_size=4, workers=2)
        scene.settle()
        for count, ino in enumerate(np.concatenate(orders[:2]).tolist(), 1):
            scene.mount.read(ino, "job")
            for wire in sorted(scene.mount.armed):
                if scene.rng.random() < 0.1:
                    scene.mount.look_up(wire, "cat")
            if count % 8 == 0:
                scene.turn(step_s=0.025)
                assert scene.planner.status("job")["state"] == "running"


def test_another_jobs_reader_takes_no_wire_away() -> None:
    scene = Scene(same_sizes(1000), ram_bytes=1200 * FILE_BYTES)
    orders = {name: scene.shuffled() for name in ("a", "b")}
    for name in orders:
        scene.open(name, orders[name], samples=1000, epochs=4, workers=2)
    scene.settle()
    for epoch in range(4):
        for at in range(0, 1000, 16):
            for name in orders:
                for ino in orders[name][epoch][at : at + 16].tolist():
                    scene.mount.read(ino, name)
            scene.turn(step_s=0.02)
            for name in orders:
                status = scene.planner.status(name)
                assert status["state"] in ("running", "done")
                assert abs(status["epoch"] * 1000 + status["index"] - epoch * 1000 - at) < 200


def test_a_wrong_seed_is_noticed_although_the_files_are_another_jobs() -> None:
    scene = Scene(same_sizes(1500), ram_bytes=500 * FILE_BYTES)
    right, wrong, read = scene.shuffled(), scene.shuffled(), scene.shuffled()
    scene.open("right", right, samples=1500, workers=2)
    scene.open("wrong", wrong, samples=1500, workers=2)
    scene.settle()
    for at in range(0, 1500, 8):
        for name, order in (("right", right), ("wrong", read)):
            for ino in order[0][at : at + 8].tolist():
                scene.mount.read(ino, name)
        scene.turn()
    assert scene.planner.status("wrong")["state"] == "wrong"
    assert scene.planner.status("right")["state"] == "running"


@pytest.mark.parametrize(("stranger_is", "is_late"), [("cat", False), ("cat", True), ("", False)])
@pytest.mark.parametrize("ram_share", [0.3, 1.2])
def test_what_strangers_read_before_the_job_begins_is_forgotten(
    ram_share: float, stranger_is: str, is_late: bool
) -> None:
    scene = Scene(same_sizes(800), ram_bytes=int(800 * ram_share) * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=800)
    scene.settle()
    stranger = strangers_order("random", 800, scene.rng)
    scene.read([next(stranger) for _ in range(2000)], reader="cat")
    assert scene.planner.status("job")["state"] == "waiting"
    assert scene.planner.status("job")["index"] == 0
    if is_late:
        scene.turn(step_s=AWAITED_S)
    if is_late or not stranger_is:
        scene.read([next(stranger) for _ in range(2000)], reader=stranger_is)
        assert scene.planner.status("job")["state"] == "wrong"
    scene.read(orders[0][:700].tolist(), reader="job")
    status = scene.planner.status("job")
    assert (status["state"], status["epoch"]) == ("running", 0)
    assert 600 < status["index"] <= 700


def test_readers_that_the_jobs_process_has_not_started_are_believed() -> None:
    """If that process reads nothing itself for long: a launcher may have announced the order."""
    scene = Scene(same_sizes(2000), ram_bytes=400 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=2000)
    scene.settle()
    scene.read(orders[0][:1000].tolist(), reader="worker")
    assert scene.planner.status("job")["index"] == 0
    scene.turn(step_s=AWAITED_S)
    assert scene.read(orders[0][1000:1900].tolist(), turn_every=16, reader="worker") < 50
    assert 1800 < scene.planner.status("job")["index"] <= 1900


@pytest.mark.claim("P9")
@pytest.mark.parametrize(("ram_share", "is_nobodys"), [(0.3, True), (1.2, False)])
def test_another_jobs_reader_says_nothing_of_a_hint_that_nobody_reads(
    ram_share: float, is_nobodys: bool
) -> None:
    """Be it of no process, or of one that reads nothing itself."""
    count = 1500
    scene = Scene(same_sizes(count), ram_bytes=int(ram_share * count) * FILE_BYTES)
    orders, read = scene.shuffled(), scene.shuffled()
    scene.open("unread", orders, samples=count, is_nobodys=is_nobodys)
    scene.open("job", read, samples=count, workers=2)
    scene.turn(step_s=AWAITED_S)
    scene.settle()
    scene.mount.evicts = set(range(1, count, 7))
    scene.read(np.concatenate(read[:2]).tolist(), reader="job")
    unread, job = (scene.planner.status(name) for name in ("unread", "job"))
    assert (unread["state"], unread["epoch"], unread["index"]) == ("waiting", 0, 0)
    assert (unread["late"], unread["unplanned"], unread["not_late"]) == ({}, {}, 0)
    assert (job["state"], job["late"].keys()) == ("running", {"evicted"})
    assert job["epoch"] * count + job["index"] > 1.9 * count
    scene.mount.evicts.clear()
    scene.read(orders[0][:600].tolist())
    assert (scene.planner.status("unread")["state"]) == "running"
    assert 500 < scene.planner.status("unread")["index"] <= 600


@pytest.mark.parametrize("is_nobodys", [True, False])
def test_a_hint_that_nobody_reads_leaves_its_share_to_the_job_that_reads(is_nobodys: bool) -> None:
    scene = Scene(same_sizes(2000), ram_bytes=400 * FILE_BYTES)
    orders, read = scene.shuffled(), scene.shuffled()
    scene.open("unread", orders, samples=2000, is_nobodys=is_nobodys)
    scene.turn(step_s=3 * IDLE_AFTER_S)
    scene.settle()
    unread = scene.planner.status("unread")
    assert (unread["state"], unread["window_bytes"]) == ("waiting", 400 * FILE_BYTES)
    scene.open("job", read, samples=2000)
    scene.read(read[0][:100].tolist(), reader="job")
    assert scene.planner.status("unread")["state"] == "waiting"  # it may begin together with that
    scene.turn(step_s=IDLE_AFTER_S - 1)
    scene.read(read[0][100:200].tolist(), reader="job")
    scene.turn(step_s=1.0)
    scene.settle()
    unread, job = (scene.planner.status(name) for name in ("unread", "job"))
    assert (unread["state"], unread["reason"]) == ("idle", "nothing of it was read yet")
    assert scene.planner.followers.notices() == []  # no fault: it may be a validation, which waits
    assert (unread["window_bytes"], job["window_bytes"]) == (0, 400 * FILE_BYTES)
    reader = "" if is_nobodys else "unread"
    for at in range(0, 400, 8):
        scene.read(orders[0][at : at + 8].tolist(), reader=reader)
        scene.read(read[0][200 + at : 208 + at].tolist(), reader="job")
    unread, job = (scene.planner.status(name) for name in ("unread", "job"))
    assert (unread["state"], unread["reason"]) == ("running", "")
    assert min(unread["window_bytes"], job["window_bytes"]) > 150 * FILE_BYTES


def test_a_hint_of_late_keeps_its_share_for_a_while() -> None:
    """Its trainer may need some time to begin."""
    scene = Scene(same_sizes(2000), ram_bytes=400 * FILE_BYTES)
    read, orders = scene.shuffled(), scene.shuffled()
    scene.open("job", read, samples=2000)
    scene.settle()
    scene.read(read[0][:200].tolist(), reader="job")
    scene.open("unread", orders, samples=2000, is_nobodys=True)
    scene.read(read[0][200:1000].tolist(), reader="job")
    unread = scene.planner.status("unread")
    assert unread["state"] == "waiting"
    assert unread["window_bytes"] > 150 * FILE_BYTES
    for at in (1000, 1050):
        scene.turn(step_s=IDLE_AFTER_S / 2)
        scene.read(read[0][at : at + 50].tolist(), reader="job")
    assert scene.planner.status("unread")["window_bytes"] == 0
    for name, order, state in (("unread", orders[0], "waiting"), ("job", read[0], "running")):
        scene.turn(step_s=2 * IDLE_AFTER_S)
        assert scene.planner.status(name)["state"] == "idle"
        scene.planner.announce(name, 0, order, scene.now)  # its trainer begins now
        scene.settle()
        assert scene.planner.status(name)["state"] == state
        assert scene.planner.status(name)["window_bytes"] > 150 * FILE_BYTES


@pytest.mark.parametrize("is_begun", [False, True], ids=["begin", "go on"])
def test_who_reads_a_moment_later_than_another_keeps_his_share(is_begun: bool) -> None:
    """Ranks that begin together, long after they were announced, or go on after a pause."""
    scene = Scene(same_sizes(4000), ram_bytes=400 * FILE_BYTES)
    names = ("a", "b")
    orders = {name: scene.shuffled(2000)[0] for name in names}
    for name in names:
        scene.open(name, [orders[name]], samples=2000, epochs=1)
    scene.settle()
    begin = 400 if is_begun else 0
    for at in range(0, begin, 8):
        for name in names:
            scene.read(orders[name][at : at + 8].tolist(), reader=name)
    scene.turn(step_s=2 * IDLE_AFTER_S)
    scene.settle()
    scene.read(orders["a"][begin : begin + 64].tolist(), reader="a")
    assert scene.planner.status("a")["state"] == "running"
    assert scene.planner.status("b")["state"] == ("idle" if is_begun else "waiting")
    assert scene.planner.status("b")["window_bytes"] > 150 * FILE_BYTES
    assert scene.read(orders["b"][begin : begin + 150].tolist(), reader="b") <= 15
    assert scene.planner.status("b")["state"] == "running"


# --- odd files


def test_odd_files() -> None:
    """Empty, larger than RAM, outside the mount, never learned, read twice."""
    sizes = same_sizes(100)
    sizes[4] = 0
    sizes[9] = 1 << 20
    scene = Scene(sizes, ram_bytes=60 * FILE_BYTES)
    order = np.concatenate([np.arange(1, 101), [0, 5, 10, 3, 3, 200]]).astype(np.uint32)
    scene.open("job", lambda _: order, samples=len(order), batch_size=2)
    scene.settle()
    readable = [ino for ino in order.tolist() if ino not in (0, 200)]
    assert scene.read(readable, turn_every=2) <= 8
    assert 10 in scene.mount.ssd
    assert not {0, 5, 10, 200} & set(scene.mount.staged_order)


@pytest.mark.parametrize("change", ["it was stored", "it has another size"])
@pytest.mark.parametrize("ram_files", [0, 50])
def test_a_file_that_a_dataset_has_twice_is_given_up_once(change: str, ram_files: int) -> None:
    """Two samples may be one file, by a link."""
    scene = Scene(same_sizes(50), ram_bytes=ram_files * FILE_BYTES)
    scene.open("job", scene.shuffled(), samples=50)
    scene.turn(work=0)
    inos = np.array([7, 8, 7], np.uint32)
    is_stored = change == "it was stored"
    size_bytes = FILE_BYTES if is_stored else 2 * FILE_BYTES
    scene.planner.learn(inos, np.full(3, size_bytes), np.full(3, is_stored, np.uint8))
    scene.planner.check_invariants()


def test_failed_files_are_tried_again_while_they_are_wanted() -> None:
    scene = Scene(same_sizes(50), ram_bytes=100 * FILE_BYTES)
    scene.mount.failing = {7}
    scene.open("job", scene.shuffled(), samples=50)
    scene.settle()
    assert 7 not in scene.mount.ram
    scene.mount.failing = set()
    for _ in range(5):
        scene.turn(step_s=1.0)
    assert 7 in scene.mount.ram


@pytest.mark.parametrize("crossing", ["the answer to a fetch", "another scan"])
def test_what_crosses_a_failure_ends_no_retry(crossing: str) -> None:
    """A fetch is answered when its file has been sent to be staged, and the stage after that; or
    the dataset is looked through again.
    """
    scene = Scene(same_sizes(50), ram_bytes=100 * FILE_BYTES)
    scene.mount.failing = {7}
    scene.open("job", scene.shuffled(), samples=50)
    scene.settle()
    inos = np.array([7], np.uint32)
    if crossing == "another scan":
        scene.planner.learn(inos, np.array([FILE_BYTES]), np.array([0], np.uint8))
    else:
        for result in (Result.STORED, Result.NO_ROOM):
            scene.planner.done(inos, np.array([result], np.uint8), scene.now)
    scene.mount.failing = set()
    for _ in range(5):
        scene.turn(step_s=1.0)
    assert 7 in scene.mount.ram
    assert scene.planner.status("job")["ahead_bytes"] == 2 * 50 * FILE_BYTES


def test_after_a_disconnect_the_window_is_sent_anew() -> None:
    scene = Scene(same_sizes(500), ram_bytes=100 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=500)
    scene.settle()
    scene.read(orders[0][:48].tolist())
    scene.mount.drop(range(1, 1000))
    scene.mount.armed.clear()
    scene.planner.disconnected()
    scene.settle()
    assert set(orders[0][48:90].tolist()) <= scene.mount.ram
    assert scene.mount.armed


def test_a_stage_that_crossed_its_cancel_is_dropped() -> None:
    scene = Scene(same_sizes(50), ram_bytes=100 * FILE_BYTES)
    scene.open("job", scene.shuffled(), samples=50)
    scene.turn(work=0)
    scene.mount.work(10)
    assert len(scene.mount.ram) == 10
    scene.close("job")
    late = scene.mount.stage_queue.popleft()[0]
    scene.turn(work=0)
    scene.mount.stage_queue.clear()
    scene.mount.ram.add(late)
    scene.planner.done(np.array([late], np.uint32), np.array([1], np.uint8), scene.now)
    scene.settle()
    assert not scene.mount.ram


def test_steps_find_the_position_too() -> None:
    scene = Scene(same_sizes(1000), ram_bytes=100 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=1000, batch_size=10)
    scene.settle()
    scene.planner.followers.step("job", 0, 50, scene.now)
    scene.settle()
    assert scene.mount.ram == set(orders[0][500:600].tolist())
    scene.planner.followers.step("job", 7, 100, scene.now)
    scene.turn()
    assert scene.planner.finished("job")
    scene.turn()
    assert not scene.mount.ram


def test_a_job_that_stops_reading_is_idle_and_makes_room() -> None:
    scene = Scene(same_sizes(2000), ram_bytes=100 * FILE_BYTES)
    a, b = scene.shuffled(), scene.shuffled()
    scene.open("a", a, samples=2000)
    scene.settle()
    scene.read(a[0][:100].tolist())
    scene.turn(step_s=100.0)
    assert scene.planner.status("a")["state"] == "idle"
    scene.open("b", b, samples=2000)
    scene.settle()
    assert set(b[0][:90].tolist()) <= scene.mount.ram
    scene.read(a[0][100:200].tolist())
    assert scene.planner.status("a")["state"] == "running"


# --- anything, in any order


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_interleaving_keeps_the_budgets_and_leaves_nothing(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 120), "files")
    seed = data.draw(st.integers(0, 1000), "seed")
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 30_000, count).astype(np.uint32)
    scene = Scene(
        sizes,
        ram_bytes=data.draw(st.integers(0, 1_500_000), "ram"),
        ssd_bytes=data.draw(st.integers(0, 3_000_000), "ssd"),
        seed=seed,
    )
    open_jobs: dict[str, int] = {}
    for turn in range(data.draw(st.integers(1, 30), "turns")):
        match data.draw(
            st.sampled_from(["open", "close", "read", "stray", "step", "lost", "turn"])
        ):
            case "open" if len(open_jobs) < 3:
                samples = data.draw(st.integers(1, count))
                orders = [rng.integers(0, count + 1, samples).astype(np.uint32) for _ in range(8)]
                scene.open(
                    f"job{turn}",
                    orders,
                    samples=samples,
                    epochs=data.draw(st.sampled_from([1, 3, 8])),
                    batch_size=data.draw(st.integers(1, 80)),
                    workers=data.draw(st.integers(0, 3)),
                )
                open_jobs[f"job{turn}"] = samples
            case "close" if open_jobs:
                name = data.draw(st.sampled_from(sorted(open_jobs)))
                scene.close(name)
                del open_jobs[name]
            case "read" if open_jobs:
                name = data.draw(st.sampled_from(sorted(open_jobs)))
                status = scene.planner.status(name)
                order = scene.orders[name](min(status["epoch"], 7))
                assert order is not None
                inos = order[status["index"] : status["index"] + 40]
                scene.read(inos.tolist(), work=data.draw(st.integers(0, 60)))
            case "stray":
                scene.read(rng.integers(1, count + 1, 30).tolist(), work=3)
            case "step" if open_jobs:
                name = data.draw(st.sampled_from(sorted(open_jobs)))
                scene.planner.followers.step(
                    name, data.draw(st.integers(0, 7)), data.draw(st.integers(0, 99)), scene.now
                )
            case "lost":
                scene.mount.stage_queue.clear()
                scene.mount.fetch_queue.clear()
                scene.mount.armed.clear()
                scene.mount.drop(range(1, 1000))
                scene.mount.deliver(scene.planner, scene.now, scene.orders)
                scene.planner.disconnected()
            case _:
                scene.turn(work=data.draw(st.integers(0, 100)), step_s=0.3)
    for name in open_jobs:
        scene.close(name)
    scene.settle()
    assert not scene.mount.ram
    assert not scene.mount.armed
    assert not scene.mount.stage_queue
    assert not scene.mount.fetch_queue


@pytest.mark.parametrize("ram_share", [0.02, 1.3])
def test_a_training_and_its_validation_say_nothing_of_each_other(ram_share: float) -> None:
    """One process reads for both jobs, and the epochs of both are short."""
    count, few = 1500, 200
    order, other = endless(1, count), endless(2, few)
    scene = Scene(same_sizes(count + few), ram_bytes=int(ram_share * count) * FILE_BYTES)
    scene.mount.ssd = set(range(1, count + few + 1))

    def validated(epoch: int) -> Inos:
        return other(epoch) + np.uint32(count)

    scene.open("train", order, samples=count, epochs=None, batch_size=32, workers=2)
    scene.settle()
    for epoch in range(5):
        for name, read in (("train", order(epoch)), ("val", validated(epoch))):
            if name not in scene.orders:
                scene.open("val", validated, samples=few, epochs=None, batch_size=32, workers=2)
            for number, (worker, ino) in enumerate(loader_reads(read, 32, 2, 2, scene.rng), 1):
                scene.mount.read(ino, "train+val", process=worker + 100 * len(name))
                if number % 16 == 0:
                    scene.turn(step_s=0.02)
    assert scene.planner.followers.notices() == []
    for name, samples in (("train", count), ("val", few)):
        status = scene.planner.status(name)
        assert status["epoch"] * samples + status["index"] == pytest.approx(5 * samples, abs=250)
