"""The simulator's policy pool: what crosses which wire, to the byte, and what waits for whom."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from fusecache.base.errors import EXIT_USAGE, UserError
from hintsd.cli import main as cli
from hintsd.policies.minio import MinIO
from hintsd.simulator import catalogue, scenario
from hintsd.simulator.clock import Clock
from hintsd.simulator.figures import footprint
from hintsd.simulator.orders import Orders
from hintsd.simulator.pool import SLOTS, Pool, owners, slot_owners
from hintsd.simulator.run import Result, Run
from hintsd.simulator.system import Dataset, Scenario, ScenarioError, StorageClass, Throughput

MB = 1 << 20
FAST = Throughput((1.0,), (1e6,))


def classes(*capacities_mb: float) -> tuple[StorageClass, ...]:
    names = ("RAM", "SSD")
    return tuple(
        StorageClass(name, size_mb, 2, FAST)
        for name, size_mb in zip(names, capacities_mb, strict=False)
    )


def made(
    workers: int, storage: tuple[StorageClass, ...], dataset: Dataset, **system: Any
) -> Scenario:
    base = scenario.load("fits-ram").system
    return Scenario("made", "", replace(base, workers=workers, storage=storage, **system), dataset)


def even(samples: int = 400, epochs: int = 3, batch_size: int = 20, **more: Any) -> Dataset:
    """Samples of 1 MB."""
    return Dataset(samples, 1.0, 0.0, batch_size, epochs, **more)


def run_of(item: Scenario, policy: str = "pool") -> Result:
    return catalogue.simulate(item, policy, Orders(item.dataset, item.system.workers, 0))


def origin_mb(item: Scenario, policy: str = "pool") -> float:
    """Of all workers."""
    return run_of(item, policy).read_mb["PFS"] * item.system.workers


# ---- what the origin sends -----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_what_all_workers_hold_together_is_read_from_the_origin_once(workers: int) -> None:
    # Owners have unequal shares: twice the mean holds the largest.
    item = made(workers, classes(2 * 400 / workers), even(epochs=5))
    assert origin_mb(item) == 400


def test_without_a_pool_each_worker_reads_the_dataset() -> None:
    """Sixty epochs: each of four workers has had each sample (chance of one missing: 5e-5)."""
    item = made(4, classes(1000.0), even(epochs=60))
    assert origin_mb(item, "fusecache") == 4 * 400
    assert origin_mb(item, "staging-buffer") == 60 * 400
    assert origin_mb(item) == 400


def test_in_few_epochs_each_worker_reads_what_came_to_it() -> None:
    item = made(4, classes(1000.0), even(epochs=3))
    orders = Orders(item.dataset, 4, 0)
    pairs = set()
    for number in range(3):
        order = orders.epoch(number)
        pairs |= set(zip(order.workers().tolist(), order.samples.tolist(), strict=True))
    assert origin_mb(item, "fusecache") == len(pairs) > 2 * 400
    assert origin_mb(item) == 400


def test_what_does_not_fit_is_read_again_in_each_epoch() -> None:
    """Four owners of some 100 MB each, with room for 10 MB of RAM and 20 of SSD: MIN's ratio."""
    result = run_of(made(4, classes(10.0, 20.0), even(epochs=5)))
    total_mb = {name: mb * 4 for name, mb in result.read_mb.items()}
    assert total_mb["PFS"] == 400 + 4 * (400 - 4 * 30)
    assert total_mb["RAM"] + total_mb["remote RAM"] == 4 * 40
    assert total_mb["SSD"] + total_mb["remote SSD"] == 4 * 80


def test_an_owner_holds_no_more_than_it_has_room_for() -> None:
    """Room for 400 MB in all, 100 an owner: those with a larger share read the rest again."""
    item = made(4, classes(100.0), even(epochs=2))
    shares = np.bincount(owners(400, 4, 0), minlength=4)
    beyond = int(np.maximum(shares - 100, 0).sum())
    assert beyond > 0
    assert origin_mb(item) == 400 + beyond


def test_samples_that_an_epoch_drops_come_when_they_are_first_used() -> None:
    item = made(4, classes(1000.0), even(410, 8, 100, drop_last=True))
    orders = Orders(item.dataset, 4, 0)
    used = {sample for number in range(8) for sample in orders.epoch(number).samples.tolist()}
    assert len(set(orders.epoch(0).samples.tolist())) == 400
    assert origin_mb(item) == len(used) > 400


def test_without_storage_each_epoch_is_read_and_contends_after_the_first_as_any_other_does() -> (
    None
):
    item = made(4, (), even(epochs=3))
    once = replace(item, dataset=even(epochs=1))
    assert origin_mb(item) == 3 * 400
    # All read at once: t(4) is 146 MB/s, for each of two threads.
    first_s = run_of(once).fetch_s["PFS"]
    assert first_s == pytest.approx(100 / (146 / 4) / 2)
    assert run_of(item).fetch_s["PFS"] < 0.9 * 3 * first_s


# ---- one worker alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fits-ram", "fits-worker"])
def test_one_worker_whose_ram_holds_all_is_as_fast_as_without_others(name: str) -> None:
    built_in = scenario.load(name).with_workers(1)
    ram, *rest = built_in.system.storage
    storage = (replace(ram, capacity_mb=1e6), *rest)
    item = replace(built_in, system=replace(built_in.system, storage=storage))
    alone, pooled = run_of(item, "lbann-dynamic"), run_of(item)
    assert asdict(replace(pooled, policy="lbann-dynamic")) == asdict(alone)
    assert set(pooled.read_mb) == {"PFS", "RAM"}


def test_one_worker_keeps_what_the_policy_minio_keeps() -> None:
    """Sizes differ, and half of them fit."""
    item = made(1, classes(200.0), Dataset(400, 1.0, 0.3, 20, 4))
    orders = Orders(item.dataset, 1, 0)
    sizes = (orders.sizes_mb * np.float32(MB)).astype(np.int64)
    policy = MinIO(200 * MB)
    hits_mb = 0.0
    for number in range(4):
        for sample in orders.epoch(number).samples.tolist():
            if sample in policy:
                hits_mb += float(orders.sizes_mb[sample])
            policy.access(sample, int(sizes[sample]))
    result = run_of(item)
    assert result.read_mb["RAM"] == pytest.approx(hits_mb, rel=1e-6)
    assert hits_mb == pytest.approx(3 * 200, rel=0.01)


# ---- owners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 64, 1024, 40_000, 65_534])
def test_no_owner_has_more_slots_than_its_share_and_a_twentieth(workers: int) -> None:
    loads = np.bincount(slot_owners(workers, np.random.default_rng(1)), minlength=workers)
    assert len(loads) == workers
    assert loads.sum() == SLOTS
    assert loads.max() <= max(1.05 * SLOTS / workers, np.ceil(SLOTS / workers))


def test_owners_are_chosen_by_slot_and_seed() -> None:
    found = owners(300_000, 16, 0)
    assert found.dtype == np.uint16
    assert (found == owners(300_000, 16, 0)).all()
    assert 0.05 < (found == owners(300_000, 16, 1)).mean() < 0.08
    assert np.bincount(found).max() < 1.1 * 300_000 / 16


def test_owners_are_hit_as_unevenly_as_by_chance() -> None:
    """1,024 workers with batches of 32: the most loaded owner has 1.62 times the mean of a batch,
    1.19 times that of 16 (counted elsewhere, with hashes).
    """
    item = made(1024, classes(1e6), Dataset(1024 * 32 * 16, 1.0, 0.0, 1024 * 32, 2))
    run = Run(item, Orders(item.dataset, 1024, 0), "pool")
    pool = Pool(run)
    pool.sources(run.orders.epoch(0))
    order = run.orders.epoch(1)
    out_s = pool.serving_s(order, pool.sources(order))[:, :1024]
    assert (out_s / out_s.mean()).max(axis=1).mean() == pytest.approx(1.62, abs=0.04)
    assert out_s.sum(axis=0).max() / out_s.sum(axis=0).mean() == pytest.approx(1.19, abs=0.03)


def test_what_each_server_does_is_what_is_read_of_it() -> None:
    """Against a loop over reads: networks of all workers, RAM and SSD, in an epoch that brings
    samples and in one that reads them.
    """
    ram = StorageClass("RAM", 10.0, 2, Throughput((2.0,), (400.0,)))
    ssd = StorageClass("SSD", 30.0, 4, Throughput((4.0,), (80.0,)), Throughput((4.0,), (20.0,)))
    item = made(4, (ram, ssd), Dataset(250, 1.0, 0.3, 21, 2), network_mb_per_s=100.0)
    run = Run(item, Orders(item.dataset, 4, 0), "pool")
    pool = Pool(run)
    for number in range(2):
        order = run.orders.epoch(number)
        sources = pool.sources(order)
        expected = np.zeros((len(order.bounds), 4, 4))  # batch, kind of server, worker
        for batch, bounds in enumerate(order.bounds):
            for reader in range(4):
                for sample in order.samples[bounds[reader] : bounds[reader + 1]]:
                    owner, size_mb = pool.held.owners[sample], float(run.sizes_mb[sample])
                    if owner == 4:
                        continue
                    sender, receiver = (reader, owner) if number == 0 else (owner, reader)
                    if owner != reader:
                        expected[batch, 0, sender] += size_mb / 100
                        expected[batch, 1, receiver] += size_mb / 100
                    if pool.held.storage[sample] == 0:
                        expected[batch, 2, owner] += size_mb / 400 if number else 0
                    else:
                        expected[batch, 3, owner] += size_mb / (80 if number else 20)
        found = pool.serving_s(order, sources).reshape(expected.shape)
        assert found == pytest.approx(expected)
        assert (expected.sum(axis=(0, 2)) > 0).tolist() == [True, True, number == 1, True]


def test_a_worker_reads_its_own_share_without_the_network() -> None:
    item = made(8, classes(1e6), even(epochs=4))
    run = Run(item, Orders(item.dataset, 8, 0), "pool")
    owned = owners(400, 8, 0)
    own = sum(
        int((owned[order.samples] == order.workers()).sum())
        for order in map(run.orders.epoch, range(1, 4))
    )
    read_mb = run_of(item).read_mb
    assert read_mb["RAM"] * 8 == own > 0
    assert read_mb["remote RAM"] * 8 == 3 * 400 - own


# ---- time ----------------------------------------------------------------------------------------


def waiting(depth: int, served_s: list[list[float]]) -> float:
    """One worker's batches: each takes 1 s to compute, while it comes from servers that take so
    long for it.
    """
    served = np.array(served_s)
    clock = Clock(made(1, (), even()).system, depth)
    nothing = np.zeros((len(served), 1))
    clock.prefetched(nothing + 1, nothing, nothing, nothing, nothing, served_s=served)
    return clock.now_s


def test_a_batch_waits_for_its_most_loaded_server_and_a_window_evens_servers_out() -> None:
    assert waiting(1, [[5.0, 1.0], [1.0, 5.0]]) == 5 + 5
    assert waiting(2, [[5.0, 1.0], [1.0, 5.0]]) == 6
    assert waiting(2, [[0.5, 0.0], [0.5, 0.0]]) == 2


def test_a_server_does_not_wait_for_another_one() -> None:
    """With room for three batches the second server goes on while the first is at its own."""
    served = [[0.0, 3.0], [9.0, 3.0], [0.0, 6.0]]
    assert waiting(3, served) == 3 + 3 + 6
    assert waiting(1, served) == 3 + 9 + 6


def test_a_server_ends_one_window_before_it_begins_the_next() -> None:
    """The third batch has room from 1 s on, and its server time from 5 s on."""
    assert waiting(2, [[0.0], [5.0], [4.0], [1.0]]) == 5 + 4 + 1


def bound_by_the_network() -> Scenario:
    """Sixteen workers that compute, preprocess and reach the file system in no time."""
    return made(
        16,
        classes(1e6),
        even(8000, 2, 160),
        compute_mb_per_s=1e9,
        preprocess_mb_per_s=1e9,
        pfs=Throughput((1.0,), (1e9,)),
        network_mb_per_s=10.0,
    )


def test_a_slow_network_takes_as_long_as_the_most_loaded_owner_sends_or_receives() -> None:
    """With a staging buffer that has room for all: what a worker sends is what it brings in the
    first epoch and what others read of it in the second, and so on.
    """
    item = bound_by_the_network()
    orders, owned = Orders(item.dataset, 16, 0), owners(8000, 16, 0)
    sent, received = np.zeros(16), np.zeros(16)
    for number in range(2):
        order = orders.epoch(number)
        ends = [owned[order.samples], order.workers()]
        away = ends[0] != ends[1]
        counts = [np.bincount(end[away], minlength=16) for end in ends]
        sent += counts[1 - number]
        received += counts[number]
    most_mb = float(max(sent.max(), received.max()))
    assert most_mb > 1.03 * sent.mean()
    assert run_of(item).total_s == pytest.approx(most_mb / 10, rel=1e-3)


def test_a_staging_buffer_for_one_batch_waits_for_the_unevenness_of_each() -> None:
    item = bound_by_the_network()
    narrow = replace(item.system.staging, capacity_mb=1.0)
    slow = run_of(replace(item, system=replace(item.system, staging=narrow)))
    assert slow.total_s > 1.3 * run_of(item).total_s


# ---- size, and the command -----------------------------------------------------------------------


def test_nothing_has_a_row_for_each_worker_and_sample() -> None:
    """A byte each would be 1,024 a sample."""
    item = made(1024, classes(1e6), even(200_000, 2, 200_000))
    tracemalloc.start()
    try:
        result = run_of(item)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.read_mb["PFS"] * 1024 == 200_000
    assert peak_bytes < 150 * 200_000
    assert footprint.run_bytes(scenario.load("imagenet-22k").with_workers(1024), "pool") < 2e9


def simulated(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    cli.cli.main(["simulate", *words, "--policy", "pool", "--json"], standalone_mode=False)
    results: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["results"]
    return results


def test_more_workers_each_have_as_large_a_part_of_a_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    item = scenario.load("fits-ram").with_workers(64)
    assert (item.system.workers, item.dataset.batch_size) == (64, 1600)
    (same,) = simulated(capsys, "fits-ram", "--workers", "4")
    (more,) = simulated(capsys, "fits-ram", "--workers", "64")
    assert [same["scenario"], more["scenario"]] == ["fits-ram", "fits-ram, 64 workers"]
    assert more["total_s"] == run_of(item).total_s
    # One dataset crosses the file system's wire, whoever reads it.
    assert more["read_mb"]["PFS"] * 64 == pytest.approx(same["read_mb"]["PFS"] * 4)


def test_fewer_workers_than_have_a_sample_each_share_a_batch_of_one() -> None:
    small = replace(scenario.load("fits-ram"), dataset=even(batch_size=2))
    assert small.with_workers(1).dataset.batch_size == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["fits-ram", "--workers", "0"], "system.workers: must be at least 1, not 0"),
        (["fits-ram", "--workers", "99999"], "system.workers: must be at most 65,534, not 99999"),
    ],
)
def test_a_number_of_workers_that_cannot_be_is_named(words: list[str], line: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        cli.cli.main(["simulate", *words], standalone_mode=False)
    assert str(caught.value) == line
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("words", [["--list"], ["fits-ram", "--toml"], ["--published"]])
def test_workers_are_of_runs(words: list[str]) -> None:
    with pytest.raises(Exception, match="--workers goes with none of") as caught:
        cli.cli.main(["simulate", *words, "--workers", "8"], standalone_mode=False)
    assert not isinstance(caught.value, UserError)
