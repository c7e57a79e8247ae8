"""The I/O simulator: against the published run times, its own laws, and mistaken input."""

from __future__ import annotations

import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from fusecache.base import terminal
from fusecache.base.errors import EXIT_USAGE, UserError
from hintsd.cli import main as cli
from hintsd.simulator import catalogue, scenario
from hintsd.simulator.accesses import ROUNDING, analyse, binomial
from hintsd.simulator.clairvoyant import _Window
from hintsd.simulator.clock import Clock
from hintsd.simulator.figures import footprint, grid, plot_file, report
from hintsd.simulator.orders import Order, Orders
from hintsd.simulator.placement import NOT_CACHED, place
from hintsd.simulator.run import PFS, Result, Run
from hintsd.simulator.system import (
    Dataset,
    Scenario,
    ScenarioError,
    StorageClass,
    Throughput,
)

TOLERANCE = 0.05


def quiet(_: float) -> None:
    pass


def run_of(item: Scenario, policy: str, seed: int = 0) -> Result:
    return catalogue.simulate(item, policy, Orders(item.dataset, item.system.workers, seed))


def small(samples: int = 2000, mean_mb: float = 1.0, **system: Any) -> Scenario:
    base = scenario.load("fits-ram")
    dataset = Dataset(samples, mean_mb, mean_mb / 10, 100, 3)
    return Scenario("small", "", replace(base.system, **system), dataset)


def shown(*tables: RenderableType) -> str:
    """On a terminal of 80 columns."""
    console = Console(width=80, highlight=False, markup=False)
    with console.capture() as captured:
        console.print(*tables, sep="\n")
    return captured.get()


# ---- the published figures -----------------------------------------------------------------------


def coarser(item: Scenario, times: int) -> Scenario:
    """As many bytes, of samples so many times as large, whose batches vary as much."""
    dataset = replace(
        item.dataset,
        samples=item.dataset.samples // times,
        mean_mb=item.dataset.mean_mb * times,
        deviation_mb=item.dataset.deviation_mb * math.sqrt(times),
    )
    return replace(item, dataset=dataset)


@pytest.mark.parametrize("name", catalogue.PUBLISHED)
def test_every_published_run_time_is_reproduced(name: str) -> None:
    """Run times follow the bytes: the larger two are run with a tenth of their samples."""
    item = scenario.load(name)
    if item.dataset.samples > 10_000:
        item = coarser(item, 10)
    orders = Orders(item.dataset, item.system.workers, 0)
    for policy, entry in catalogue.POLICIES.items():
        published = catalogue.published_s(name, policy)
        result = catalogue.simulate(item, policy, orders)
        if published is not None:
            assert result.total_s == pytest.approx(published, rel=TOLERANCE), policy
        elif entry.published_s[0] is not None:
            assert result.refused == "the dataset exceeds the aggregate RAM", policy


def test_a_larger_staging_buffer_brings_nothing_and_ram_does() -> None:
    """HDMLP, section 6.2: a lower bound of 2.13 hours, and 2.76 with any staging buffer."""
    found = grid.explore(grid.paper(), "frequency", [grid.RAM_MB[1]], [grid.SSD_MB[-1]], 0, quiet)
    assert found.lower_bound_s / 3600 == pytest.approx(2.13, abs=0.01)
    hours = [(point.total_s or 0) / 3600 for point in found.staging]
    assert hours == pytest.approx([2.76] * 3, abs=0.01)
    bare, ssd, ram, both = (point.total_s or 0 for point in found.storage)
    assert found.lower_bound_s < both < ram < ssd < bare


def test_what_if_changes_the_sizes_of_the_storage_that_a_scenario_has() -> None:
    """A faster SSD of one's own helps more, and is not the paper's."""
    slow, fast = (
        small(
            400,
            storage=(
                StorageClass("RAM", 1.0, 2, small().system.staging.read),
                StorageClass("disk", 1.0, threads, Throughput((1.0,), (threads * each,))),
                StorageClass("tape", 1e6, 1, Throughput((1.0,), (1e6,))),
            ),
        )
        for threads, each in ((2, 50.0), (4, 5000.0))
    )
    found = [grid.explore(item, "frequency", [8.0], [64.0], 0, quiet) for item in (slow, fast)]
    by_paper = grid.explore(small(400), "frequency", [8.0], [64.0], 0, quiet)
    hours = [[point.total_s or 0.0 for point in one.storage] for one in found]
    assert hours[0][0] == hours[1][0]
    assert hours[0][2] == hours[1][2]  # RAM alone
    assert hours[0][1] > hours[1][1]
    assert hours[0][3] > hours[1][3]
    bare = small(400, storage=())
    assert grid.explore(bare, "frequency", [8.0], [64.0], 0, quiet).storage == found[0].storage
    assert by_paper.storage != found[0].storage  # its SSD has 86 MB/s
    assert grid.paper().system.storage[1].read_mb_per_s == 50


def test_what_if_a_policy_refuses() -> None:
    """deepio keeps samples in RAM: an SSD is none."""
    found = grid.explore(small(200), "deepio-opportunistic", [8.0], [16.0], 0, quiet)
    bare, ssd, ram, both = (point.total_s for point in found.storage)
    assert [point.total_s for point in found.staging] == [None] * 3
    assert (bare, ssd) == (None, None)
    assert ram == both is not None
    assert "refused" in shown(*report.grid(found))


def test_the_estimate_of_access_frequency_agrees_with_shuffles() -> None:
    """HDMLP, section 3.2 and Figure 2: about 323 are estimated, 329 were drawn."""
    found = analyse(4, 1000, 10_000, 0.1, 0, quiet)
    assert found.estimated == pytest.approx(323, abs=0.5)
    assert found.threshold == pytest.approx(275)
    deviation = math.sqrt(found.estimated)
    assert all(abs(drawn - found.estimated) < 4 * deviation for drawn in found.drawn)
    assert found.drawn[0] == found.histogram[276:].sum()
    assert found.histogram.sum() == 10_000
    assert found.expected.sum() == pytest.approx(10_000)


def test_the_binomial_distribution_is_that_of_counting() -> None:
    outcomes = [sum(flips) for flips in itertools.product((0, 0, 1), repeat=4)]
    assert binomial(4, 1 / 3) == pytest.approx(np.bincount(outcomes) / len(outcomes))
    assert binomial(3, 1.0).tolist() == [0, 0, 0, 1]


@given(st.lists(st.integers(0, 60), min_size=2, max_size=8).filter(any))
def test_lemma_1(counts: list[int]) -> None:
    """However a sample's E accesses fall among N workers: if one reads it (1 + d)E/N times, some
    other reads it at most (N - 1 - d)/(N - 1) * E/N times; for d < 0: at least.
    """
    workers, epochs = len(counts), sum(counts)
    for worker, count in enumerate(counts):
        rest = counts[:worker] + counts[worker + 1 :]
        delta = count * workers / epochs - 1
        bound = (workers - 1 - delta) / (workers - 1) * epochs / workers
        if delta >= 0:
            assert min(rest) <= math.ceil(bound - ROUNDING)
        if delta <= 0:
            assert max(rest) >= math.floor(bound + ROUNDING)


# ---- laws of the model ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", catalogue.POLICIES)
def test_the_parts_add_up_and_nothing_beats_the_lower_bound(policy: str) -> None:
    item = small()
    result = run_of(item, policy)
    parts = result.startup_s + result.compute_s + result.barrier_s + result.stall_s
    assert result.total_s == pytest.approx(parts)
    assert result.stall_s > -1e-6
    assert result.barrier_s >= 0
    if policy != "perfect":
        # Each worker reads what it computes on, from wherever.
        computed_mb = result.compute_s * item.system.compute_mb_per_s
        assert sum(result.read_mb.values()) == pytest.approx(computed_mb, rel=1e-6)


@pytest.mark.parametrize("policy", catalogue.POLICIES)
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    item = small(500)
    assert run_of(item, policy, 3) == run_of(item, policy, 3)
    assert run_of(item, policy, 3).total_s != run_of(item, policy, 4).total_s


@pytest.mark.parametrize("policy", catalogue.POLICIES)
@pytest.mark.parametrize(
    "dataset",
    [
        Dataset(1, 1.0, 0.0, 100, 1),
        Dataset(3, 5000.0, 0.0, 2, 2),  # larger than the staging buffer; fewer than workers
        Dataset(1003, 0.5, 0.5, 100, 2),
        Dataset(1003, 0.5, 0.5, 100, 2, drop_last=True),
    ],
)
def test_odd_datasets(policy: str, dataset: Dataset) -> None:
    item = replace(small(), dataset=dataset)
    result = run_of(item, policy)
    if result.refused is None:
        assert math.isfinite(result.total_s)
        assert result.total_s >= run_of(item, "perfect").total_s * 0.9


@pytest.mark.parametrize("policy", catalogue.POLICIES)
def test_without_storage_a_policy_refuses_or_streams(policy: str) -> None:
    result = run_of(small(storage=()), policy)
    if result.refused is None:
        assert set(result.read_mb) <= {"PFS"}
    else:
        assert result.refused.startswith("the system has no storage class")


@pytest.mark.parametrize("policy", catalogue.POLICIES)
def test_a_first_class_that_is_not_called_ram_is_none(policy: str) -> None:
    """deepio and lbann keep samples in RAM only, and refuse; of fusecache it is the SSD."""
    read = Throughput((1.0,), (1000.0,))
    ram, ssd = StorageClass("RAM", 400.0, 2, read), StorageClass("NVMe", 400.0, 2, read)
    found = run_of(small(storage=(ssd,)), policy)
    if policy.startswith(("deepio", "lbann")):
        assert found.refused == "the system has no storage class called RAM"
        assert run_of(small(storage=(ram,)), policy).refused is None or "lbann" in policy
        return
    assert found.refused is None
    if policy == "fusecache":
        assert set(found.read_mb) == {"PFS", "NVMe"}
        assert found.read_mb["PFS"] < run_of(small(storage=(ram,)), policy).read_mb["PFS"]


def test_one_worker_alone_has_the_file_system_for_itself() -> None:
    """t(1) = 66 MB/s; one thread, preprocessing and computing one after the other."""
    item = small(workers=1)
    result = run_of(item, "naive")
    size_mb = result.compute_s * 100
    assert result.total_s == pytest.approx(size_mb * (1 / 66 + 1 / 200 + 1 / 100))
    assert result.barrier_s == pytest.approx(0)


def test_the_slower_of_network_and_file_system_counts() -> None:
    system = small().system
    assert system.pfs_s_per_mb(4) == pytest.approx(4 / 146)
    assert replace(system, pfs_network_mb_per_s=10.0).pfs_s_per_mb(4) == pytest.approx(1 / 10)
    assert system.remote_s_per_mb(0) == pytest.approx(1 / 10_000)
    assert system.remote_s_per_mb(1) == pytest.approx(1 / 43)
    assert system.local_s_per_mb(0) == pytest.approx(2 / 21_164)


def test_throughput_is_linear_between_points_and_constant_beyond() -> None:
    speed = Throughput((2.0, 4.0), (86.0, 146.0))
    assert [speed.at(clients) for clients in (1, 2, 3, 4, 9)] == [86, 86, 116, 146, 146]
    assert speed.each(4) == 36.5


def test_sizes_are_normal_and_cut_off_at_0() -> None:
    orders = Orders(Dataset(100_000, 1.0, 1.0, 100, 1), 4, 0)
    sizes = orders.sizes_mb
    assert sizes.min() == 0
    assert (sizes == 0).mean() == pytest.approx(0.1587, abs=0.005)
    assert np.median(sizes) == pytest.approx(1, abs=0.02)


def test_each_epoch_deals_every_sample_once() -> None:
    orders = Orders(Dataset(1003, 1.0, 0.1, 100, 2), 4, 0)
    first, second = orders.epoch(0), orders.epoch(1)
    for order in (first, second):
        assert sorted(order.samples) == list(range(1003))
        assert np.bincount(order.workers()).sum() == 1003
        assert (np.diff(order.bounds[:-1], axis=1) == 25).all()
    assert (first.samples != second.samples).any()
    kept = Orders(Dataset(1003, 1.0, 0.1, 100, 2, drop_last=True), 4, 0).epoch(0)
    assert len(set(kept.samples)) == len(kept.samples) == 1000


def test_locality_gives_a_worker_its_own_samples_of_each_batch() -> None:
    orders = Orders(Dataset(1003, 1.0, 0.1, 100, 1), 4, 0)
    owners = (np.arange(1003) % 5).astype(np.uint16)  # 4: nobody's
    plain, dealt = orders.epoch(0), orders.owned(0, owners)
    readers = dealt.workers()
    for batch, row in enumerate(dealt.bounds):
        part = slice(row[0], row[-1])
        assert sorted(dealt.samples[part]) == sorted(plain.samples[part]), batch
        for worker, room in enumerate(np.diff(row)):
            wanted = int((owners[plain.samples[part]] == worker).sum())
            mine = dealt.samples[part][readers[part] == worker]
            assert int((owners[mine] == worker).sum()) == min(wanted, room)


def test_placement_fills_classes_by_use_and_keeps_to_their_capacity() -> None:
    read = Throughput((1.0,), (1000.0,))
    storage = (StorageClass("RAM", 40.0, 1, read), StorageClass("SSD", 80.0, 1, read))
    item = replace(small(400, storage=storage), dataset=Dataset(400, 1.0, 0.1, 20, 20))
    run = Run(item, Orders(item.dataset, 4, 0), "frequency")
    placement = place(run, 0)
    uses = np.zeros((4, 400), int)
    for number in range(20):
        order = run.orders.epoch(number)
        np.add.at(uses, (order.workers(), order.samples), 1)
    for worker in range(4):
        kept = [uses[worker, placement.storage[worker] == number] for number in (0, 1)]
        rest = uses[worker, placement.storage[worker] == NOT_CACHED]
        assert kept[0].mean() > kept[1].mean() > rest.mean()
        assert kept[0].min() >= kept[1].max() - 1
        for number, kind in enumerate(storage):
            held_mb = run.sizes_mb[placement.storage[worker] == number].sum()
            assert kind.capacity_mb - 2 < held_mb <= kind.capacity_mb
    cached = placement.storage != NOT_CACHED
    assert np.isfinite(placement.since_s[cached]).all()
    assert np.isinf(placement.since_s[~cached]).all()
    assert placement.done_s == pytest.approx(placement.since_s[cached].max())


def test_fusecache_reads_an_item_once_where_everything_fits_into_ram() -> None:
    result = run_of(small(), "fusecache")
    base = run_of(small(), "staging-buffer")
    assert result.read_mb["PFS"] < base.read_mb["PFS"]
    assert result.total_s <= base.total_s


def test_what_the_window_keeps_is_what_comes_again_within_it() -> None:
    item = small(400)
    run = Run(item, Orders(item.dataset, 4, 0), "fusecache")
    window_mb = 60.0
    window = _Window(run, window_mb)
    used_mb: dict[tuple[int, int], float] = {}
    read_mb = [0.0] * 4
    found = []
    for number in range(item.dataset.epochs):
        order = run.orders.epoch(number)
        kept = window.kept(order)
        for entry, (worker, sample) in enumerate(
            zip(order.workers().tolist(), order.samples.tolist(), strict=True)
        ):
            read_mb[worker] += float(run.sizes_mb[sample])
            before_mb = used_mb.get((worker, sample))
            wanted = before_mb is not None and read_mb[worker] - before_mb <= window_mb
            assert kept[entry] == wanted
            used_mb[worker, sample] = read_mb[worker]
            found.append(wanted)
    again = 3 * 400 - len(used_mb)
    assert 0 < sum(found) < again


@pytest.mark.parametrize("policy", ["frequency", "fusecache"])
def test_storage_that_is_slower_than_the_shared_file_system_is_not_read(policy: str) -> None:
    fast, slow = Throughput((2.0,), (20_000.0,)), Throughput((2.0,), (20.0,))
    storage = (StorageClass("RAM", 50.0, 2, fast), StorageClass("SSD", 500.0, 2, slow))
    read_mb = run_of(small(storage=storage), policy).read_mb
    assert read_mb["PFS"] > 0
    assert not {"SSD", "remote SSD"} & set(read_mb)


def test_fusecache_shares_nothing() -> None:
    assert not any(name.startswith("remote") for name in run_of(small(), "fusecache").read_mb)


# ---- the clock -----------------------------------------------------------------------------------


def clock(workers: int, depth: int) -> Clock:
    return Clock(replace(small().system, workers=workers), depth)


def test_prefetching_is_hidden_behind_computing_but_for_the_first_batch() -> None:
    batches = np.ones((6, 1))
    nothing = np.zeros((6, 1))
    one = clock(1, 2)
    one.prefetched(batches, nothing, batches * 0.5, nothing, nothing)
    assert one.now_s == pytest.approx(6)
    late = clock(1, 2)
    late.prefetched(batches, nothing, batches * 2, nothing, nothing)
    assert late.now_s == pytest.approx(6 * 2)


def test_prefetching_waits_for_room() -> None:
    """Computing 10, 1, 1 s, fetching 1, 1, 5 s: with room for one batch the third fetch begins
    when the second batch is done (12 s... 11 + 5), else it is there long before.
    """
    compute = np.array([[10.0], [1.0], [1.0]])
    fetch = np.array([[1.0], [1.0], [5.0]])
    nothing = np.zeros((3, 1))
    narrow, wide = clock(1, 1), clock(1, 3)
    for some in (narrow, wide):
        some.prefetched(compute, nothing, fetch, nothing, nothing)
    assert wide.now_s == pytest.approx(12)
    assert narrow.now_s > wide.now_s


def test_a_batch_ends_with_its_slowest_worker() -> None:
    two = clock(2, 4)
    compute = np.array([[1.0, 3.0], [2.0, 1.0]])
    nothing = np.zeros((2, 2))
    two.prefetched(compute, nothing, nothing, nothing, nothing)
    assert two.now_s == pytest.approx(3 + 2)


def test_workers_contend_and_speed_up_when_one_is_done() -> None:
    """66 MB each, alone 1 s; the second sees one reader for 1 s (43 MB/s), then none."""
    two = clock(2, 1)
    volume = np.array([[66.0, 66.0]])
    nothing = np.zeros((1, 2))
    pfs_s = two.prefetched(nothing, nothing, nothing, nothing, volume)
    assert pfs_s[0] == pytest.approx([1, 1 + (66 - 43) / 66])
    demand = clock(2, 1)
    assert demand.on_demand(nothing, volume, nothing)[0] == pytest.approx(pfs_s[0])
    known = clock(2, 1)
    pfs_s = known.prefetched(nothing, nothing, nothing, nothing, volume, 2)
    assert pfs_s[0] == pytest.approx([66 / 43] * 2)


def test_the_sources_of_entries_become_volumes_of_batches() -> None:
    item = small(200)
    run = Run(item, Orders(item.dataset, 4, 0), "x")
    order = run.orders.epoch(0)
    part = run.part(order, 1, 2)
    assert isinstance(part, Order)
    run.prefetched([(part, np.full(len(part.samples), PFS, np.uint8))])
    sizes_mb = run.sizes_mb[order.samples[100:200]].sum()
    assert run.finish().read_mb["PFS"] == pytest.approx(sizes_mb / 4)


# ---- scenarios -----------------------------------------------------------------------------------

GOOD = """
[system]
workers = 2
compute_mb_per_s = 100
preprocess_mb_per_s = 200
network_mb_per_s = 1e3
pfs_mb_per_s = { 1 = 50, 2 = 80 }
[system.staging]
capacity_mb = 100
threads = 2
read_mb_per_s = 20_000
[[system.storage]]
name = "NVMe"
capacity_mb = 1000
threads = 4
read_mb_per_s = { 4 = 3000 }
write_mb_per_s = { 4 = 1000 }
[dataset]
samples = 1000
mean_mb = 0.5
deviation_mb = 0.1
batch_size = 20
epochs = 2
"""


_RAM_SECOND = """[[system.storage]]
name = "RAM"
capacity_mb = 10
threads = 1
read_mb_per_s = 9
[dataset]"""


def test_a_scenario_of_ones_own() -> None:
    item = scenario.parse("mine", GOOD, "mine.toml")
    assert item.system.storage[0].write_mb_per_s == 250
    assert item.system.capacity_mb == 1000
    assert item.title == "mine"
    assert run_of(item, "frequency").total_s > 0


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("workers = 2", "workres = 2", "system.workres: unknown key; there are workers, "),
        ("workers = 2", "", "system.workers: is missing"),
        ("workers = 2", "workers = 2.5", "system.workers: must be a whole number, not 2.5"),
        ("workers = 2", "workers = 0", "system.workers: must be at least 1, not 0"),
        ("workers = 2", "workers = 99999", "system.workers: must be at most 65,534, not 99999"),
        ("= 100\np", "= nan\np", "system.compute_mb_per_s: must be a finite number, not nan"),
        ("= 100\np", "= '9'\np", "system.compute_mb_per_s: must be a number, not '9'"),
        ("= 100\np", "= true\np", "system.compute_mb_per_s: must be a number, not True"),
        ("2 = 80", "2 = -80", "system.pfs_mb_per_s.2: must be at least 1e-09, not -80"),
        ("2 = 80", "two = 80", "system.pfs_mb_per_s.two: must be a whole number of clients"),
        ("2 = 80", "0 = 80", "system.pfs_mb_per_s: a number of clients must be at least 1, not 0"),
        ("2 = 80", "01 = 80", "system.pfs_mb_per_s: numbers of clients must not repeat"),
        ("{ 1 = 50, 2 = 80 }", "{}", "system.pfs_mb_per_s: needs at least one point"),
        ("capacity_mb = 1000", "capacity_mb = 0", "system.storage[0].capacity_mb: must be above 0"),
        ("capacity_mb = 100\n", "capacity_mb = inf\n", "system.staging.capacity_mb: must be a fin"),
        ("threads = 4", "threads = -1", "system.storage[0].threads: must be at least 1, not -1"),
        ('name = "NVMe"', "", "system.storage[0].name: is missing"),
        ("[[system.storage]]", "[system.storage]", "system.storage: must be a list of tables"),
        ("samples = 1000", "samples = 0", "dataset.samples: must be at least 1, not 0"),
        ("deviation_mb = 0.1", "deviation_mb = -1", "dataset.deviation_mb: must be at least 0"),
        ("mean_mb = 0.5", "mean_mb = 1e300", "dataset.mean_mb: must be at most 1,000,000,000,000"),
        ("epochs = 2", "epochs = 2\ndrop_last = 1", "dataset.drop_last: must be true or false"),
        ("= 20\n", "= 2000\ndrop_last = true\n", "dataset.batch_size: must be at most dataset."),
        ("[system]", "[system", "not TOML: "),
        ("[dataset]", "[data]", "data: unknown key; there are title, system, dataset"),
        ("[system]\n", '[system]\n"a\\nb" = 1\n', r"system.'a\nb': unknown key"),
        ("2 = 80", '"\\n" = 80', r"system.pfs_mb_per_s.'\n': must be a whole number of clients"),
        ("workers = 2", f"workers = 1{'0' * 400}", "system.workers: is too large a number"),
        ("= 0.5", f"= 1{'0' * 400}", "dataset.mean_mb: is too large a number"),
        ("= 0.5", f"= 1{'0' * 5000}", "not TOML: "),
        ("= 0.5", f"= {'[' * 5000}", "not TOML: nested too deep"),
        ("[dataset]", _RAM_SECOND, "system.storage[0].name: must be RAM where one class is"),
        ('"NVMe"', '"PFS"', "system.storage[0].name: 'PFS' is what results call another source"),
        ('"NVMe"', '"remote SSD"', "system.storage[0].name: 'remote SSD' is what results call"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, line: str) -> None:
    assert old in GOOD
    with pytest.raises(ScenarioError) as caught:
        scenario.parse("mine", GOOD.replace(old, new), "mine.toml")
    assert str(caught.value).startswith(f"mine.toml: {line}")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == EXIT_USAGE


def test_a_file_that_is_named_like_a_built_in_scenario_is_not_set_beside_what_was_published(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "fits-ram.toml"
    path.write_text(GOOD)
    (result,) = json.loads(simulate(capsys, str(path), "--policy", "naive", "--json"))["results"]
    assert (result["scenario"], result["published_s"]) == ("fits-ram.toml", None)


def test_built_in_scenarios_load() -> None:
    for name in scenario.BUILT_IN:
        assert scenario.load(name).name == name
        assert scenario.parse(name, scenario.text_of(name), "copy.toml") == scenario.load(name)


# ---- the command ---------------------------------------------------------------------------------


def simulate(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    cli.cli.main(["simulate", *words], standalone_mode=False)
    return capsys.readouterr().out


def test_the_table_shows_published_times(capsys: pytest.CaptureFixture[str]) -> None:
    out = simulate(capsys, "fits-ram", "--policy", "naive", "--published")
    assert "27.78" in out
    assert "0.99" in out


@pytest.mark.parametrize("name", ["fits-ram", "fits-cluster"])
def test_no_line_of_the_tables_exceeds_80_columns(name: str) -> None:
    item = scenario.load(name)
    results = [
        Result(name, policy, 9999.9, 9999.9, 9999.9, 9999.9, 9999.9, 9999.9)
        for policy in catalogue.POLICIES
    ]
    results[0].fetch_s = dict.fromkeys(("PFS", "remote RAM", "remote SSD", "RAM", "SSD"), 9999.9)
    results[1].refused = "the dataset exceeds the aggregate RAM"
    text = shown(report.table(item, results, published=True))
    words = text.split()
    assert words.count("9999.9") == 11 * 5 + 11 + 5
    assert {*catalogue.POLICIES} - {*words} == {"naive"}
    assert "\nnaive: refused: the dataset exceeds the aggregate RAM\n" in text


def test_a_narrow_terminal_folds_no_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "console", lambda: Console(width=20))
    found = simulate(capsys, "fits-ram", "--policy", "naive", "--published")
    assert {"27.78", "20.26", "14.26"} <= set(found.split())


def test_json_has_one_object_with_stable_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(simulate(capsys, "fits-ram", "--policy", "frequency", "--json"))
    assert set(found) == {"seed", "results"}
    (result,) = found["results"]
    assert list(result) == [
        "scenario",
        "policy",
        "refused",
        "published_s",
        "total_s",
        "startup_s",
        "compute_s",
        "barrier_s",
        "stall_s",
        "write_s",
        "fetch_s",
        "read_mb",
    ]
    accesses = json.loads(simulate(capsys, "fits-ram", "--accesses", "--json"))["accesses"][0]
    assert accesses["samples"] == 10_000
    listed = json.loads(simulate(capsys, "--list", "--json"))
    assert tuple(listed["scenarios"]) == scenario.BUILT_IN
    assert tuple(listed["policies"]) == tuple(catalogue.POLICIES)


def test_what_if_takes_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fits-ram", "--what-if", "--ram", "1M", "--ssd", "512K", "--json"]
    found = json.loads(simulate(capsys, *words))
    assert [(point["ram_mb"], point["ssd_mb"]) for point in found["storage"]] == [
        (0, 0),
        (0, 0.5),
        (1, 0),
        (1, 0.5),
    ]


@pytest.mark.parametrize(
    ("words", "name", "magic"),
    [
        (["--policy", "naive"], "times.png", b"\x89PNG"),
        (["--what-if", "--ram", "1G", "--ssd", "1G"], "grid.svg", b"<?xml"),
        (["--accesses"], "accesses.SVG", b"<?xml"),
    ],
)
def test_plots_are_saved(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], name: str, magic: bytes
) -> None:
    pytest.importorskip("matplotlib")
    simulate(capsys, "fits-ram", *words, "--plot", str(tmp_path / name))
    assert (tmp_path / name).read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nonesuch"], "nonesuch: no such scenario; there are fits-ram, "),
        (["--policy", "magic"], "no policy 'magic'; there are perfect, naive, "),
        (
            ["--what-if", "--accesses"],
            "--list, --toml, --published, --what-if and --accesses exclude",
        ),
        (["mine.toml", "--toml"], "mine.toml: no built-in scenario; there are fits-ram, "),
        (["--toml"], "--toml takes one scenario"),
        (["--ram", "1G"], "--ram and --ssd go with --what-if"),
        (["--delta", "0.2"], "--delta goes with --accesses"),
        (["--accesses", "--policy", "naive"], "--accesses takes no policy"),
        (["--what-if", "--ram", "lots"], "'lots' is not a size"),
        (["--what-if", "--ram", "0"], "--ram and --ssd must be above 0"),
        (["--accesses", "--delta", "nan"], "--delta nan: must be between 0 and"),
        (["--plot", "x.pdf"], "--plot x.pdf: the name must end in .png or .svg"),
        (["missing.toml"], "missing.toml: No such file"),
    ],
)
def test_a_mistaken_command_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["hintsd", "simulate", *words])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code in (1, EXIT_USAGE)
    out, err = capfd.readouterr()
    assert line in err
    assert err.startswith("hintsd: ")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            [],
            "mine, frequency: needs about 1 TiB of memory for 50,000 workers, 2,000,000 samp",
        ),
        (["--policy", "fusecache"], "mine, fusecache: needs about 1 TiB of memory for 50,000"),
        (["--what-if"], "mine, frequency: needs about 1 TiB of memory for 50,000 workers,"),
        (["--accesses"], "mine, --accesses: needs about 186 GiB of memory for 50,000 workers,"),
    ],
)
def test_what_does_not_fit_into_memory_is_refused_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], line: str
) -> None:
    monkeypatch.setattr(footprint, "usable_memory_bytes", lambda: 64 << 30)
    path = tmp_path / "mine.toml"
    text = GOOD.replace("workers = 2", "workers = 50_000").replace("= 1000\nm", "= 2_000_000\nm")
    path.write_text(text.replace("batch_size = 20", "batch_size = 2_000_000"))
    with pytest.raises(UserError) as caught:
        cli.cli.main(["simulate", str(path), *words], standalone_mode=False)
    assert str(caught.value).startswith(line)
    assert str(caught.value).endswith(", batches of 2,000,000; 64 GiB are free")


def test_dollars_are_no_formula(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / r"a$\frac$.toml"
    path.write_text(GOOD.replace("NVMe", r"$\\frac$"))
    for words in ([], ["--what-if", "--ram", "1G", "--ssd", "1G"]):
        simulate(capsys, str(path), "--policy", "frequency", *words, "--plot", f"{path}.svg")


def test_progress_without_a_terminal_is_a_line_for_each_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(GOOD)
    policies = ("--policy", "naive", "--policy", "frequency")
    cli.cli.main(["simulate", str(tmp_path / "mine.toml"), *policies], standalone_mode=False)
    said = capsys.readouterr().err
    assert said == "hintsd: 1 of 2: mine naive\nhintsd: 2 of 2: mine frequency\n"


def test_a_plot_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UserError, match="it cannot be written"):
        plot_file.check(str(tmp_path / "a.png"))


def test_a_plot_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        plot_file.check(str(tmp_path / "none" / "a.png"))
