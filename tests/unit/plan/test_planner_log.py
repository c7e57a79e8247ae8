"""The planner and a model of a mount whose SSD is a log (docs/LOG.md)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hintsd.follow.sequence import Inos
from hintsd.plan import layout, placement
from hintsd.reorder import packing
from tests.support.planner_model import KEEP_ORDER, MOVE, SORT, ModelMount
from tests.unit.plan.test_planner import FILE_BYTES, same_sizes
from tests.unit.plan.test_planner import Scene as AnyScene
from tests.unit.reorder.test_packing import FakeProbe

COUNT = 600


class Scene(AnyScene):
    turn_every = 16


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's RAM is kilobytes."""
    monkeypatch.setattr(packing, "BUFFER_BYTES_LEAST", 1)


def log_scene(
    sizes: Inos | None = None,
    *,
    ram_files: int = 150,
    stored: bool = True,
    layout: str = "reorder",
    **more: Any,
) -> Scene:
    """With 600 files of 8 KiB on SSD, if nothing else is said."""
    sizes = same_sizes(COUNT) if sizes is None else sizes
    scene = Scene(sizes, ram_bytes=ram_files * FILE_BYTES, **more)
    if stored:
        place_all(scene)
    scene.planner.set_layout(layout, None)
    return scene


def begun(*, epochs: int | None = 8, index: int = 0, **more: Any) -> tuple[Scene, list[Inos]]:
    """A `log_scene` with a shuffled job "job" that is planned for, and its orders."""
    scene = log_scene(**more)
    orders = scene.shuffled()
    scene.open("job", orders, samples=COUNT, epochs=epochs, index=index)
    scene.settle()
    return scene, orders


def place_all(scene: Scene) -> None:
    inos = np.arange(1, len(scene.mount.sizes) + 1, dtype=np.uint32)
    sizes = np.array(list(scene.mount.sizes.values()), np.uint64)
    scene.mount.ssd = set(inos.tolist())
    scene.mount.places = {ino: (-1, ino) for ino in inos.tolist()}
    scene.planner.learn(inos, sizes, np.ones(len(inos), np.uint8))


def read_epochs(scene: Scene, orders: list[Inos], first: int, stop: int, **more: Any) -> int:
    return sum(scene.read(orders[epoch].tolist(), **more) for epoch in range(first, stop))


def assert_chunks_lie_together(mount: ModelMount, order: Inos, frames: list[Any]) -> None:
    """The frames of one epoch: each is a chunk, whole, in order, and of one place on SSD."""
    chunks = [{place[1] for place in places if place} for _, _, places in frames]
    assert all(len(chunk) == 1 for chunk in chunks)
    numbers = [chunk.pop() for chunk in chunks]
    assert numbers == list(range(len(numbers)))
    assert [set(inos) for inos, _, _ in frames] == [
        set(part.tolist()) for part in np.split(order, np.cumsum([len(f[0]) for f in frames])[:-1])
    ]


# --- one job


def test_every_sample_is_moved_once_an_epoch_and_chunks_are_read_in_order() -> None:
    scene, orders = begun(epochs=5)
    assert scene.mount.frames[0][1][0] & KEEP_ORDER
    assert not any(bits[0] & KEEP_ORDER for _, bits, _ in scene.mount.frames[1:])
    late = read_epochs(scene, orders, 0, 5)
    mount = scene.mount
    assert {epoch: sorted(inos) for epoch, inos in mount.moved.items()} == {
        epoch: list(range(1, COUNT + 1)) for epoch in (1, 2, 3, 4)
    }
    frames = mount.frames
    per_epoch = len(frames) // 5
    assert len(frames) == 5 * per_epoch
    for epoch in range(1, 4):
        assert_chunks_lie_together(
            mount, orders[epoch], frames[epoch * per_epoch : (epoch + 1) * per_epoch]
        )
    assert mount.packs == [per_epoch] * 4 + [-1]
    assert late == 0


@pytest.mark.parametrize("epochs", [None, 3])
def test_where_nobody_says_which_epoch_is_the_last_one_log_too_many_is_written(
    epochs: int | None,
) -> None:
    """As docs/TUNING.md says of `attach` without `epochs`."""
    scene, orders = begun(epochs=epochs)
    read_epochs(scene, orders, 0, 3)
    moved = {epoch: len(inos) for epoch, inos in scene.mount.moved.items() if epoch <= 3}
    assert moved == {1: COUNT, 2: COUNT} | ({3: COUNT} if epochs is None else {})


def test_the_first_epoch_is_fetched_into_the_second_ones_chunks() -> None:
    scene, orders = begun(epochs=3, stored=False)
    assert scene.planner.status("job")["layout"] == "reorder"
    read_epochs(scene, orders, 0, 2)
    mount = scene.mount
    assert sorted(mount.moved[1]) == list(range(1, COUNT + 1))
    chunks = mount.packs[0]
    assert_chunks_lie_together(mount, orders[1], mount.frames[chunks : 2 * chunks])
    assert max(mount.origin_reads.values()) == 1


def test_static_mounts_get_no_log() -> None:
    scene, orders = begun(epochs=3, layout="static")
    assert scene.planner.wanted_epochs("job") == []
    assert sorted(scene.planner._jobs["job"].sequence.orders) == [0, 1]
    assert read_epochs(scene, orders, 0, 3) == 0
    assert not scene.mount.packs
    assert {bit for _, bits, _ in scene.mount.frames for bit in bits} == {1}
    assert "layout" not in scene.planner.status("job")


def halves(orders: list[Inos]) -> list[Inos]:
    """Each epoch reads the files that the one before does not."""
    half = COUNT // 2
    return [order % half + half * (epoch % 2) + 1 for epoch, order in enumerate(orders)]


@pytest.mark.parametrize(
    ("why", "ram_files", "orders_of"),
    [
        ("fits into RAM", 700, lambda shuffled: shuffled),
        ("same order", 150, lambda shuffled: [shuffled[0]] * 8),
        ("other samples", 150, halves),
        (
            "known only when it begins: give the DataLoader a generator=",
            150,
            lambda shuffled: lambda epoch: shuffled[0] if epoch == 0 else None,
        ),
    ],
)
def test_what_is_not_packed(why: str, ram_files: int, orders_of: Any) -> None:
    scene = log_scene(ram_files=ram_files)
    orders = orders_of(scene.shuffled())
    scene.open("job", orders, samples=COUNT)
    scene.settle()
    first = orders(0) if callable(orders) else orders[0]
    assert scene.read(first[:500].tolist()) == 0
    assert not scene.mount.packs
    assert scene.planner.status("job")["layout"] == "static"
    assert why in scene.planner.status("job")["layout_why"]


@pytest.mark.parametrize("repeats", [False, True])
def test_an_epoch_that_reads_a_part_has_the_rest_behind_its_chunks(repeats: bool) -> None:
    """As an importance sampler draws: seven tenths, or with replacement."""
    scene, rng = log_scene(), np.random.default_rng(1)
    share = COUNT if repeats else COUNT * 7 // 10
    orders = [(rng.choice(COUNT, share, replace=repeats) + 1).astype(np.uint32) for _ in range(4)]
    scene.open("job", orders, samples=share, epochs=4)
    scene.settle()
    assert scene.planner.status("job")["layout"] == "reorder"
    late = read_epochs(scene, orders, 0, 4)
    mount = scene.mount
    for epoch in (1, 2, 3):
        before, now = ({*orders[number].tolist()} for number in (epoch - 1, epoch))
        assert {*mount.moved[epoch]} == before  # all that was read, each once
        assert len(mount.moved[epoch]) == len(before)
        assert before - now
        assert {*mount.last_cell[epoch]} == before - now
    # Fewer wires tell the place of a reader whose files come again.
    assert late <= (0.01 * 4 * COUNT if repeats else 0)


def test_too_little_ram_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BUFFER_BYTES_LEAST", 64 << 10)
    scene = log_scene()
    scene.open("job", scene.shuffled(), samples=COUNT)
    scene.settle()
    assert not scene.mount.packs
    assert "or more would be needed" in scene.planner.status("job")["layout_why"]


@pytest.mark.parametrize("least_bytes", [3 << 10, 64 << 10])
def test_who_shares_the_ram_is_named_if_it_is_enough_for_one(
    monkeypatch: pytest.MonkeyPatch, least_bytes: int
) -> None:
    monkeypatch.setattr(packing, "BUFFER_BYTES_LEAST", least_bytes)
    scene = log_scene()
    orders = scene.shuffled()
    scene.open("job", orders, samples=COUNT, epochs=3)
    scene.open("hint-49", orders, samples=COUNT, epochs=3)
    scene.settle()
    why = scene.planner.status("job")["layout_why"]
    assert "or more would be needed" in why
    named = "because hint-49 shares --ram: hintsd end hint-49"
    assert (named in why) == (least_bytes < 64 << 10)


@pytest.mark.claim("G2")
def test_another_user_who_shares_the_ram_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BUFFER_BYTES_LEAST", 3 << 10)
    scene = log_scene()
    orders = scene.shuffled()
    scene.open("job", orders, samples=COUNT, epochs=3)
    scene.open("hint-49", orders, samples=COUNT, epochs=3, owner=7)
    scene.settle()
    why = scene.planner.status("job")["layout_why"]
    assert why.endswith(", because other users' jobs share --ram")
    assert "hint-49" not in why


def test_chunks_are_coarser_where_they_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CHUNKS_MOST", 20)
    scene, orders = begun()
    assert scene.mount.packs == [17]
    assert read_epochs(scene, orders, 0, 1) == 0
    assert sorted(scene.mount.moved[1]) == list(range(1, COUNT + 1))


def test_an_order_that_comes_late_is_awaited_for_a_second() -> None:
    scene = log_scene()
    orders = scene.shuffled()
    scene.open("job", lambda epoch: orders[epoch], samples=COUNT)
    scene.planner.supply("job", 0, orders[0])
    scene.mount.carry_out(scene.planner.decide(scene.now))
    assert not scene.mount.frames
    scene.mount.carry_out(scene.planner.decide(scene.now + layout.HOLD_S / 2))
    assert not scene.mount.frames
    scene.mount.carry_out(scene.planner.decide(scene.now + 2 * layout.HOLD_S))
    assert scene.mount.frames
    assert not scene.mount.packs


def test_the_last_chunk_of_an_epoch_waits_for_no_origin_that_hangs() -> None:
    """And while what is moved is unanswered, nothing of the next epoch is staged."""
    scene = log_scene(stored=False)
    orders = scene.shuffled()
    hanging = int(orders[0][COUNT - 20])
    scene.mount.holding = {hanging}
    scene.open("job", orders, samples=COUNT, epochs=3)
    scene.settle()
    scene.read(orders[0][: COUNT - 40].tolist())
    packs = len(scene.mount.packs)
    assert scene.mount.frames[-1][0][-1] == orders[0][-1]
    scene.turn(step_s=layout.BARRIER_S / 2)
    assert len(scene.mount.packs) == packs
    scene.turn(step_s=layout.BARRIER_S)
    scene.settle()
    assert len(scene.mount.packs) == packs + 1
    assert set(scene.mount.frames[-1][0]) <= set(orders[1].tolist())


def test_a_log_stays_open_while_readers_pass_what_is_not_answered() -> None:
    scene = log_scene(stored=False)
    orders = scene.shuffled()
    scene.mount.holding = set(orders[0][COUNT - 64 :].tolist())
    scene.open("job", orders, samples=COUNT, epochs=3)
    scene.settle()
    scene.read(orders[0][: COUNT - 64].tolist())
    packs = len(scene.mount.packs)
    for batch in range((COUNT - 64) // 16, COUNT // 16):
        scene.planner.followers.step("job", 0, batch, scene.now)
        scene.turn(step_s=layout.BARRIER_S * 0.6)
        assert len(scene.mount.packs) == packs
    scene.turn(step_s=layout.BARRIER_S)
    scene.settle()
    assert len(scene.mount.packs) == packs + 1


def test_partial_cache_moves_what_is_resident_and_streams_the_rest() -> None:
    scene, orders = begun(epochs=4, stored=False, ssd_bytes=COUNT // 2 * FILE_BYTES)
    assert read_epochs(scene, orders, 0, 4) == 0
    mount = scene.mount
    residents = sorted(mount.ssd)
    assert len(residents) == COUNT // 2
    assert sorted(mount.moved[2]) == sorted(mount.moved[3]) == residents
    # some are stored as the second epoch's order comes, when the log is not announced yet
    assert len(set(residents) - set(mount.moved[1])) < 10
    for ino in residents:
        assert mount.origin_reads[ino] == 1
    chunks = [
        {place[1] for place in places if place}
        for _, bits, places in mount.frames[2 * mount.packs[0] :]
        if any(bit & MOVE for bit in bits)
    ]
    assert all(len(chunk) == 1 for chunk in chunks)


def test_repeats_lie_where_they_are_read_first() -> None:
    scene = log_scene()
    orders = [np.concatenate([order, order[:8]]) for order in scene.shuffled()]
    scene.open("job", orders, samples=COUNT + 8, epochs=4)
    scene.settle()
    read_epochs(scene, orders, 0, 4)
    for epoch in (1, 2, 3):
        assert sorted(scene.mount.moved[epoch]) == list(range(1, COUNT + 1))


# --- one log for several epochs


@pytest.fixture
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "CELL_BYTES_LEAST", 1)


def assert_cells_lie_together(mount: ModelMount, frames: list[Any], epoch: int, axis: int) -> None:
    """Each frame of an epoch has whole cells: those of one row, or one column."""
    shape = len(frames), len(frames)
    for chunk, (_, bits, places) in enumerate(frames):
        logs = {place[0] for place in places}
        chunks = {np.unravel_index(place[1], shape)[axis] for place in places}
        assert (logs, chunks) == ({epoch}, {chunk})
        assert all(bit & (SORT | MOVE) for bit in bits)


@pytest.mark.usefixtures("small_cells")
def test_one_log_serves_two_epochs() -> None:
    scene, orders = begun(epochs=7)
    assert "every 2 epochs" in scene.planner.status("job")["layout_why"]
    mount = scene.mount
    cells = mount.packs[0]
    chunks = math.isqrt(cells)
    assert read_epochs(scene, orders, 0, 7) == 0
    assert len(mount.frames) == 7 * chunks
    for epoch in range(7):
        frames = mount.frames[epoch * chunks : (epoch + 1) * chunks]
        is_moved = epoch in (0, 2, 4)
        assert all(bool(bit & MOVE) == is_moved for _, bits, _ in frames for bit in bits)
        if epoch:
            log = (epoch - 1) // 2 * 2 + 1
            assert_cells_lie_together(mount, frames, log, epoch - log)
    assert mount.packs == [cells, -1, cells, -1, cells, -1]
    assert {epoch: sorted(inos) for epoch, inos in mount.moved.items()} == {
        epoch: list(range(1, COUNT + 1)) for epoch in (1, 3, 5)
    }


@pytest.mark.usefixtures("small_cells")
def test_one_log_serves_three_epochs() -> None:
    scene, orders = begun(epochs=8, ram_files=300)
    mount = scene.mount
    assert read_epochs(scene, orders, 0, 2) == 0
    assert scene.planner.status("job")["layout"] == "log"
    assert "epochs 1 to 3 lie" in scene.planner.status("job")["layout_why"]
    assert read_epochs(scene, orders, 2, 8) == 0
    assert mount.packs == [8**3, -1, 8**3, -1, 17, -1]  # one epoch is left in the end
    assert {epoch: sorted(inos) for epoch, inos in mount.moved.items()} == {
        epoch: list(range(1, COUNT + 1)) for epoch in (1, 4, 7)
    }


@pytest.mark.usefixtures("small_cells")
def test_a_log_serves_no_epoch_whose_order_is_unknown() -> None:
    scene = log_scene()
    orders = scene.shuffled()
    known = 2
    scene.open("job", lambda epoch: orders[epoch] if epoch < known else None, samples=COUNT)
    scene.settle()
    assert "every" not in scene.planner.status("job")["layout_why"]
    scene.read(orders[0].tolist())
    assert sorted(scene.mount.moved[1]) == list(range(1, COUNT + 1))
    assert -1 not in scene.mount.packs[:-1]


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize(("skipped", "is_kept"), [(0, True), (300, False)])
def test_a_log_that_did_not_get_all_is_read_once(skipped: int, is_kept: bool) -> None:
    """A job that begins within an epoch moves what is left of it."""
    scene, orders = begun(epochs=6, index=skipped)
    scene.read(orders[0][skipped:].tolist())
    assert read_epochs(scene, orders, 1, 3) == 0
    assert (scene.mount.packs[1] == -1) == is_kept
    assert sorted(scene.mount.moved) == ([1, 3] if is_kept else [1, 2, 4])


@pytest.mark.usefixtures("small_cells")
@pytest.mark.parametrize("fetched_at_once", [COUNT, 0])
def test_a_log_is_whole_without_those_who_have_no_room_beside_its_slack(
    monkeypatch: pytest.MonkeyPatch, fetched_at_once: int
) -> None:
    """They were residents, and assigned, when the mount did not know the slack yet. They may have
    been asked for by then.
    """
    monkeypatch.setattr(placement, "FETCH_UNANSWERED_MOST", fetched_at_once)
    scene = log_scene(stored=False, ssd_bytes=COUNT // 2 * FILE_BYTES)
    orders = scene.shuffled()
    scene.open("job", orders, samples=COUNT, epochs=5)
    while not scene.mount.log_is_open:
        scene.turn(work=0)
    assert "every 2 epochs" in scene.planner.status("job")["layout_why"]
    slack_bytes = COUNT // 10 * FILE_BYTES
    scene.mount.ssd_free_bytes -= slack_bytes
    for _ in range(2):  # the mount tells it all the time
        scene.planner.set_budgets(scene.budget_bytes * 10 // 9, scene.mount.ssd_free_bytes)
        scene.settle()
    assert read_epochs(scene, orders, 0, 5) == 0
    mount = scene.mount
    assert len(mount.ssd) == COUNT // 2 - COUNT // 10
    assert mount.packs[1::2] == [-1, -1]
    assert {epoch: sorted(inos) for epoch, inos in mount.moved.items()} == {
        epoch: sorted(mount.ssd) for epoch in (1, 3)
    }


@pytest.mark.usefixtures("small_cells")
def test_a_log_that_is_whole_outlives_its_server() -> None:
    scene, orders = begun(epochs=5)
    scene.read(orders[0].tolist())
    scene.read(orders[1][:300].tolist())
    mount = scene.mount
    mount.stage_queue.clear()
    mount.armed.clear()
    mount.drop(range(1, COUNT + 1))
    mount.deliver(scene.planner, scene.now, scene.orders)
    scene.planner.disconnected()
    packs = len(mount.packs)
    scene.settle()
    assert "epochs 1 to 2 lie" in scene.planner.status("job")["layout_why"]
    scene.read(orders[1][300:].tolist())
    read_epochs(scene, orders, 2, 5)
    assert len(mount.moved[1]) == COUNT
    assert sorted(mount.moved) == [1, 3]
    assert mount.packs[packs:] == [mount.packs[0], -1]


@pytest.mark.usefixtures("small_cells")
def test_a_mount_that_refuses_many_cells_gets_fewer() -> None:
    scene, orders = begun(epochs=6)
    scene.planner.packing_refused("no room", scene.now + 2 * layout.REFUSED_AFTER_S)
    read_epochs(scene, orders, 0, 2)
    chunks = scene.mount.packs[1]
    assert chunks < scene.mount.packs[0]
    assert sorted(scene.mount.moved[2]) == list(range(1, COUNT + 1))
    assert -1 not in scene.mount.packs


@pytest.mark.usefixtures("small_cells")
def test_another_order_for_an_epoch_that_a_log_serves_ends_it() -> None:
    scene, orders = begun(epochs=7)
    scene.read(orders[0].tolist(), turn_every=8)
    scene.read(orders[1][:200].tolist(), turn_every=8)
    assert scene.mount.packs[-1] == -1
    orders[2] = orders[7]
    scene.planner.supply("job", 2, orders[2])
    scene.settle()
    assert scene.mount.packs[2] == 0
    scene.read(orders[1][200:].tolist(), turn_every=8)
    read_epochs(scene, orders, 2, 5)
    assert sorted(scene.mount.moved[3]) == list(range(1, COUNT + 1))  # the other came too late


# --- auto


@pytest.mark.parametrize(("random", "is_packed"), [(1e6, True), (4.5e6, False)])
def test_auto_follows_the_probe(random: float, is_packed: bool) -> None:
    """A reader who takes more than random reads bring."""
    scene = log_scene(layout="auto")
    orders = scene.shuffled()
    scene.open("job", orders, samples=COUNT, epochs=8)
    scene.planner.set_layout("auto", FakeProbe(5e6, random))
    scene.settle()
    assert "not known yet" in scene.planner.status("job")["layout_why"]
    read_epochs(scene, orders, 0, 3)
    assert bool(scene.mount.packs) == is_packed
    assert "at random" in scene.planner.status("job")["layout_why"]


def test_auto_counts_what_other_jobs_take_of_the_device() -> None:
    """Ranks wait for it together: each of them gets a part of what it gives at random."""
    scene = log_scene(layout="auto", ram_files=300)
    orders = {name: scene.shuffled() for name in ("a", "b")}
    scene.planner.set_layout("auto", FakeProbe(500e6, 4e6))
    for name in orders:
        scene.open(name, orders[name], samples=COUNT, epochs=8)
    scene.settle()
    for epoch in range(3):
        for at in range(0, COUNT, 8):
            for name in orders:
                scene.read(orders[name][epoch][at : at + 8].tolist(), reader=name, work=1)
    assert scene.mount.packs
    assert "readers waited: " in scene.planner.status("a")["layout_why"]


def test_auto_leaves_a_reader_alone_who_does_not_need_it() -> None:
    """He takes 600 files of 8 KiB in some 0.8 s: no faster than random reads bring them."""
    scene = log_scene(layout="auto")
    orders = scene.shuffled()
    scene.planner.set_layout("auto", FakeProbe(500e6, 100e6))
    scene.open("job", orders, samples=COUNT, epochs=8)
    scene.settle()
    assert read_epochs(scene, orders, 0, 3) == 0
    assert not scene.mount.packs
    assert "wanted" in scene.planner.status("job")["layout_why"]


def test_a_reader_whose_pages_the_kernel_took_does_not_count_as_waiting() -> None:
    """One read in ten is late, but a log would not make it sooner."""
    scene = log_scene(layout="auto")
    orders = scene.shuffled()
    scene.planner.set_layout("auto", FakeProbe(500e6, 100e6))
    scene.open("job", orders, samples=COUNT, epochs=8)
    scene.settle()
    scene.mount.evicts = set(range(1, COUNT + 1, 10))
    read_epochs(scene, orders, 0, 3)
    status = scene.planner.status("job")
    assert sum(status["late"].values()) == status["late"]["evicted"] >= COUNT // 10
    assert not scene.mount.packs
    assert "wanted" in status["layout_why"]


# --- what happens meanwhile


def test_a_killed_trainer_ends_the_log() -> None:
    scene, orders = begun()
    scene.read(orders[0][:300].tolist())
    assert scene.mount.log_is_open
    scene.close("job")
    scene.settle()
    assert not scene.mount.log_is_open
    assert scene.mount.packs[-1] == 0


def test_a_new_server_gets_the_log_of_what_is_left() -> None:
    scene, orders = begun(epochs=4)
    scene.read(orders[0].tolist())
    scene.read(orders[1][:300].tolist())
    mount = scene.mount
    lost = sum(len(buffer) for buffer in mount._buffers.values())
    assert lost
    mount.stage_queue.clear()
    mount.armed.clear()
    mount._buffers.clear()  # lost: the old places are alive
    mount.end_log()
    mount.drop(range(1, COUNT + 1))
    mount.deliver(scene.planner, scene.now, scene.orders)
    scene.planner.disconnected()
    packs = len(mount.packs)
    scene.settle()
    assert len(mount.packs) == packs + 1
    assert mount.log_epoch == 2
    scene.read(orders[1][300:].tolist())
    scene.settle()
    assert set(mount.moved[2]) == set(range(1, COUNT + 1))
    assert COUNT <= len(mount.moved[2]) <= COUNT + lost
    before = len(mount.frames)
    scene.read(orders[2].tolist())
    in_two = [frame for frame in mount.frames[before:] if set(frame[0]) <= set(orders[2].tolist())]
    assert in_two


def test_another_order_for_the_next_epoch_begins_another_log() -> None:
    scene, orders = begun(epochs=4)
    scene.read(orders[0][:200].tolist(), turn_every=8)
    orders[1] = orders[7]
    scene.planner.supply("job", 1, orders[1])
    scene.settle()
    assert scene.mount.packs[1:] == [0, scene.mount.packs[0]]
    scene.read(orders[0][200:].tolist(), turn_every=8)
    assert read_epochs(scene, orders, 1, 3) == 0
    assert sorted(scene.mount.moved[2]) == list(range(1, COUNT + 1))


def test_a_wrong_hint_ends_the_log_and_one_that_is_followed_again_begins_one() -> None:
    count = 4000
    scene = log_scene(same_sizes(count), ram_files=600)
    orders = scene.shuffled()
    scene.open("job", orders, samples=count)
    scene.settle()
    assert scene.mount.log_is_open
    scene.read(scene.rng.permutation(count)[:2000].tolist()[1:])
    status = scene.planner.status("job")
    assert (status["state"], status["layout"]) == ("wrong", "static")
    assert status["layout_why"] == "nothing is moved for a hint that is wrong"
    assert not scene.mount.log_is_open
    scene.read(orders[0][1000:2400].tolist(), turn_every=8)
    scene.settle()
    assert scene.planner.status("job")["state"] == "running"
    assert scene.mount.log_is_open


def test_of_a_job_that_is_over_it_is_known_what_was_done() -> None:
    scene, orders = begun(epochs=2)
    read_epochs(scene, orders, 0, 1)
    scene.read(orders[1][:200].tolist(), turn_every=8)
    kept = {"layout": "log", "layout_why": "no epoch follows; until then reorder: --layout reorder"}
    assert scene.planner.status("job").items() >= kept.items()
    scene.read(orders[1][200:].tolist(), turn_every=8)
    scene.now += 60
    scene.turn()
    assert scene.planner.status("job")["state"] == "done"
    assert scene.planner.status("job").items() >= kept.items()


def test_what_was_decided_is_not_said_of_a_server_that_does_not_know_it() -> None:
    scene, _ = begun(epochs=3)
    assert scene.planner.status("job")["layout_why"] == "--layout reorder"
    scene.planner.disconnected()
    assert scene.planner.status("job")["layout_why"] == "not decided yet"


def test_a_mount_that_has_no_room_is_not_asked_to_move() -> None:
    scene, orders = begun(epochs=3)
    scene.mount.end_log()
    scene.planner.packing_refused("no room", scene.now)  # may be of a log before
    assert scene.planner.status("job")["layout"] == "reorder"
    scene.planner.packing_refused("no room", scene.now + 10)
    assert scene.planner.status("job")["layout_why"] == "no room"
    assert read_epochs(scene, orders, 0, 2) == 0
    assert len(scene.mount.packs) == 3  # tried again in the next epoch


# --- two jobs


def test_the_first_job_is_packed_and_then_the_other() -> None:
    scene = log_scene(ram_files=300)
    a, b = scene.shuffled(), scene.shuffled()
    scene.open("a", a, samples=COUNT)
    scene.open("b", b, samples=COUNT)
    scene.settle()
    assert scene.planner.status("a")["layout"] == "reorder"
    assert scene.planner.status("b")["layout_why"] == "a is packed on this mount"
    for at in range(0, COUNT, 20):
        assert scene.read(a[0][at : at + 20].tolist(), reader="a") == 0
        assert scene.read(b[0][at : at + 20].tolist(), reader="b") == 0
    windows = [scene.planner.status(name)["window_bytes"] for name in "ab"]
    assert max(windows) < 2 * min(windows)
    assert sorted(scene.mount.moved[1]) == list(range(1, COUNT + 1))
    scene.close("a")
    assert read_epochs(scene, b, 1, 3, reader="b") == 0
    assert scene.planner.status("b")["layout"] == "reorder"


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_log_that_is_not_followed_stays_while_its_job_reads(is_whole: bool) -> None:
    """Where samples are not on SSD its slack is room for them."""
    half = {"stored": False, "ssd_bytes": COUNT // 2 * FILE_BYTES}
    scene, orders = begun(epochs=2, **({} if is_whole else half))
    scene.read(orders[0].tolist())
    assert scene.mount.packs[1:] == [-1 if is_whole else 0]
    scene.close("job")
    scene.settle()
    assert scene.mount.packs[-1] == 0


def test_the_log_of_one_job_does_not_end_with_another() -> None:
    scene = log_scene(ram_files=300)
    orders, b = scene.shuffled(), scene.shuffled()
    scene.open("a", [orders[0], *[orders[1]] * 5], samples=COUNT, epochs=6)
    scene.settle()
    read_epochs(scene, orders, 0, 1, reader="a")
    assert scene.mount.packs[1:] == [-1]  # all later epochs have one order
    scene.open("b", b, samples=COUNT, epochs=6)
    scene.read(orders[1].tolist(), reader="a")
    read_epochs(scene, b, 0, 2, reader="b")
    assert scene.planner.status("b")["layout"] == "reorder"
    scene.close("a")
    scene.settle()
    assert 0 not in scene.mount.packs
    assert read_epochs(scene, b, 2, 3, reader="b") == 0


def test_a_second_job_makes_chunks_smaller() -> None:
    scene = log_scene(ram_files=300)
    orders, b = scene.shuffled(), scene.shuffled()
    scene.open("a", orders, samples=COUNT)
    scene.settle()
    (chunks,) = scene.mount.packs
    for name in "bcdefgh":
        scene.open(name, b, samples=COUNT)
    scene.settle()
    assert scene.mount.packs[:2] == [chunks, 0]
    assert scene.mount.packs[2] > chunks


# --- anything, in any order


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_window_gets_through_four_epochs(data: st.DataObject) -> None:
    """No deadlock, each sample moved once an epoch at most, and once where one job reads alone."""
    count = data.draw(st.integers(20, 200), "files")
    seed = data.draw(st.integers(0, 1000), "seed")
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 20_000, count).astype(np.uint32)
    total = int(sum(-(-size // 4096) * 4096 for size in sizes.tolist()))
    scene = log_scene(
        sizes,
        ram_files=max(1, int(total * data.draw(st.floats(0.05, 1.5), "ram") / FILE_BYTES)),
        stored=data.draw(st.booleans(), "stored"),
        ssd_bytes=data.draw(st.sampled_from([1 << 60, total // 3]), "ssd"),
        seed=seed,
    )
    names = "ab"[: data.draw(st.integers(1, 2), "jobs")]
    orders = {name: scene.shuffled() for name in names}
    for name in names:
        batch = data.draw(st.integers(1, 32), "batch")
        scene.open(name, orders[name], samples=count, epochs=4, batch_size=batch)
    work = data.draw(st.sampled_from([1 << 20, 12, 3]), "work")
    kills = data.draw(st.booleans(), "killed") and len(names) == 2
    for epoch in range(4):
        for at in range(0, count, 16):
            for name in names:
                scene.read(orders[name][epoch][at : at + 16].tolist(), work=work, reader=name)
        if kills and epoch == 1:
            scene.close("a")
            names = "b"
    for inos in scene.mount.moved.values():
        assert len(inos) <= (2 if len(orders) == 2 else 1) * count
    if len(orders) == 1 and work == 1 << 20:
        for epoch, inos in scene.mount.moved.items():
            assert len(set(inos)) == len(inos), epoch
    for _ in range(200):
        scene.turn(work)
    for name in names:
        scene.planner.followers.step(name, 3, -(-count // 1), scene.now)
    for name in list(scene.orders):
        scene.close(name)
    scene.settle()
    assert not scene.mount.stage_queue
    assert not scene.mount.log_is_open
    assert not scene.mount.ram
