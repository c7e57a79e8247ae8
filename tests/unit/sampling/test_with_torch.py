"""hintsd.ImportanceSampler in a DataLoader: pairing, hints, states, ranks."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402  (it may be missing)

import hintsd  # noqa: E402
from hintsd import ImportanceSampler  # noqa: E402
from tests.support.commands import WithTorch  # noqa: E402
from tests.support.fake_hintsd import FakeHintsd  # noqa: E402
from tests.support.mounted import ROOT  # noqa: E402

Heard = list[warnings.WarningMessage]
LENGTH = 53

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Numbers(Dataset[int]):
    """Sample i is i, so a batch shows its indices."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.paths = [f"/data/set/{i}" for i in range(length)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def losses_of(batch: Any) -> Any:
    return torch.sin(batch.double()).square().requires_grad_()


def train(loader: Any, sampler: ImportanceSampler, epochs: int) -> list[list[int]]:
    """What is read. Each sample has a loss of its own, which tells whose it was taken for."""
    told: list[tuple[Any, Any]] = []
    remove = sampler.on_scores(lambda epoch, indices, values: told.append((indices, values)))
    read = []
    for _ in range(epochs):
        order: list[int] = []
        for batch in loader:
            batch = torch.as_tensor(batch).reshape(-1)
            told.clear()
            sampler.weigh(losses_of(batch)).mean().backward()
            sampler.learn(losses_of(batch))
            ((indices, values),) = told
            assert indices.tolist() == batch.tolist()
            if sampler.settings.scheme == "icache":
                assert values == pytest.approx(np.sin(indices) ** 2, abs=1e-6)
            order += batch.tolist()
        read.append(order)
    remove()
    return read


SETTINGS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_losses_are_paired_with_what_a_loader_gives_out(
    heard: Heard, settings: dict[str, Any], drop_last: bool
) -> None:
    data = Numbers()
    sampler = ImportanceSampler(data, "icache", fraction=0.5)
    loader = DataLoader(data, 8, sampler=sampler, drop_last=drop_last, **settings)
    read = train(loader, sampler, 4)
    rest = LENGTH % 8 if drop_last else 0
    assert [len(order) for order in read] == [LENGTH - rest] + [24 if drop_last else 26] * 3
    assert sampler.epoch == 4
    assert [str(each.message) for each in heard] == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torchdata_is_read_as_another(heard: Heard, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data = Numbers()
    sampler, plain = (ImportanceSampler(data, "icache") for _ in range(2))
    loader = stateful.StatefulDataLoader(data, 8, sampler=sampler, num_workers=workers)
    assert train(loader, sampler, 3) == train(DataLoader(data, 8, sampler=plain), plain, 3)
    assert not [each for each in heard if str(each.message).startswith("hintsd")]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_without_batches(heard: Heard, workers: int) -> None:
    data = Numbers(11)
    sampler = ImportanceSampler(data, "loss", unbiased=True, batch_size=1)
    loader = DataLoader(data, batch_size=None, sampler=sampler, num_workers=workers)
    assert sorted(train(loader, sampler, 2)[0]) == list(range(11))
    assert sampler.epoch == 2
    assert [str(each.message) for each in heard] == []


def test_batches_in_any_order_are_refused_with_a_line(heard: Heard) -> None:
    data = Numbers()
    sampler = ImportanceSampler(data)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=2, in_order=False)
    for batch in loader:
        sampler.learn(losses_of(batch))
    assert sampler.report().refused == LENGTH
    (line,) = [str(each.message) for each in heard]
    assert "in_order=False gives out batches in any order: learn(losses, indices=…)" in line
    for batch in loader:
        sampler.learn(losses_of(batch), indices=batch)
    assert sampler.report().refused == LENGTH
    assert len(heard) == 1


def test_batches_that_accelerate_deals_out_are_refused_with_a_line(heard: Heard) -> None:
    shards = pytest.importorskip("accelerate.data_loader")
    data = Numbers()
    sampler = ImportanceSampler(data)
    batches = torch.utils.data.BatchSampler(sampler, 4, False)
    shard = shards.BatchSamplerShard(batches, num_processes=2, process_index=1)
    for batch in DataLoader(data, batch_sampler=shard):
        sampler.learn(losses_of(batch))
    assert sampler.report().times.sum() == 0
    assert "each process gets a part of the batches" in str(heard[0].message)


def test_a_drop_of_the_last_batch_ends_an_epoch() -> None:
    """A state that is taken behind it resumes with the next epoch."""
    data = Numbers()
    samplers = [ImportanceSampler(data, seed=1) for _ in range(3)]
    loaders = [DataLoader(data, 8, sampler=each, drop_last=True) for each in samplers]
    expected = train(loaders[0], samplers[0], 4)
    begun = train(loaders[1], samplers[1], 2)
    samplers[2].load_state_dict(samplers[1].state_dict())
    assert samplers[2].epoch == 2
    assert begun + train(loaders[2], samplers[2], 2) == expected


def test_a_state_is_saved_and_loaded_by_torch(tmp_path: Path, heard: Heard) -> None:
    """With nothing in it that torch.load has to trust, and within an epoch."""
    data = Numbers()
    samplers = [ImportanceSampler(data, "icache", draw_ahead=1) for _ in range(3)]
    loaders = [DataLoader(data, 8, sampler=each, num_workers=2) for each in samplers]
    expected = train(loaders[0], samplers[0], 4)
    begun = train(loaders[1], samplers[1], 1)
    for number, batch in enumerate(loaders[1]):
        samplers[1].learn(losses_of(batch))
        begun.append(batch.tolist())
        if number == 1:
            break
    torch.save(samplers[1].state_dict(), tmp_path / "state.pt")
    samplers[2].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    left = train(loaders[2], samplers[2], 3)
    assert sum(begun + left, []) == sum(expected, [])  # noqa: RUF017  (they are short)
    assert [str(each.message) for each in heard] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_any_precision_are_taken(dtype: Any) -> None:
    sampler = ImportanceSampler(4, "icache", batch_size=4)
    told: list[Any] = []
    sampler.on_scores(lambda epoch, indices, values: told.append(values))
    list(sampler)
    losses = torch.tensor([[0.5], [1.5], [0.25], [4.0]], dtype=dtype, requires_grad=True)
    sampler.learn(losses)
    assert told[0].tolist() == [0.5, 1.5, 0.25, 4.0]


def test_what_is_learned_is_a_copy() -> None:
    sampler = ImportanceSampler(3, "icache", batch_size=3)
    order = list(sampler)
    losses = torch.tensor([1.0, 2.0, 3.0])
    sampler.learn(losses)
    losses.zero_()
    assert sampler.state_dict()["scores"]["values"][order].tolist() == [1.0, 2.0, 3.0]


def test_labels_are_no_losses(heard: Heard) -> None:
    sampler = ImportanceSampler(3, batch_size=3)
    list(sampler)
    sampler.learn(torch.tensor([1, 2, 3]))
    (line,) = [str(each.message) for each in heard]
    assert "losses are wanted, and these are of type int64 (labels?)" in line


def test_losses_that_are_on_their_way_are_waited_for_at_the_end_only() -> None:
    """As of a GPU: a copy that is under way, and an event behind it."""

    class Event:
        is_there = False

        def query(self) -> bool:
            return self.is_there

        def synchronize(self) -> None:
            self.is_there = True

    from hintsd.client.importance.losses import Arriving

    sampler = ImportanceSampler(6, "icache", batch_size=2)
    order = list(sampler)
    first, second = Event(), Event()
    inbox = sampler._learning._arriving
    inbox.append((Arriving(np.ones(2), first), np.array(order[:2]), 0))
    inbox.append((Arriving(np.full(2, 2.0), second), np.array(order[2:4]), 0))
    sampler._learning.pairing.skip(4)
    second.is_there = True
    sampler.learn(np.full(2, 3.0))
    assert sampler._learning.scores.times.sum() == 0, "they are taken in turn"
    first.is_there = True
    sampler.learn(np.full(2, 3.0), indices=order[4:])
    assert sampler._learning.scores.times.sum() == 8
    inbox.append((Arriving(np.full(2, 5.0), Event()), np.array(order[2:4]), 0))
    assert sampler.report().times[order].tolist() == [1, 1, 2, 2, 2, 2]
    inbox.append((Arriving(np.full(2, 7.0), Event()), np.array(order[2:4]), 0))
    values = sampler.state_dict()["scores"]["values"]
    assert values[order].tolist() == [1.0, 1.0, 7.0, 7.0, 3.0, 3.0]


def test_weights_keep_the_graph() -> None:
    sampler = ImportanceSampler(20, "loss", unbiased=True, batch_size=20)
    train(DataLoader(Numbers(20), 20, sampler=sampler), sampler, 1)
    (batch,) = DataLoader(Numbers(20), 20, sampler=sampler)
    parameter = torch.ones(20, 1, dtype=torch.float64, requires_grad=True)
    weighed = sampler.weigh(parameter * 3)
    assert weighed.shape == (20, 1)
    assert weighed.dtype == torch.float64
    weighed.sum().backward()
    assert parameter.grad is not None
    expected = 3 / sampler.expected_reads()[batch]
    assert parameter.grad.reshape(-1).numpy() == pytest.approx(expected)


# ---- hints ---------------------------------------------------------------------------------------


def orders_of(daemon: FakeHintsd) -> dict[int, list[int]]:
    return {epoch: sequence.tolist() for epoch, sequence in daemon.jobs[0].sequences()}


@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize(
    ("ahead", "scheme", "settings"),
    [
        *((ahead, scheme, SETTINGS[0]) for ahead in (0, 1) for scheme in ("shade", "icache")),
        *((ahead, "shade", SETTINGS[1]) for ahead in (0, 1)),
        (0, "icache", SETTINGS[2]),
        (1, "icache", SETTINGS[1]),
    ],
)
def test_attach_announces_each_epoch(
    fake_hintsd: FakeHintsd, ahead: int, scheme: str, settings: dict[str, Any]
) -> None:
    data = Numbers()

    def make() -> tuple[Any, ImportanceSampler]:
        sampler = ImportanceSampler(data, scheme, draw_ahead=ahead, fraction=0.6)
        return DataLoader(data, 8, sampler=sampler, drop_last=True, **settings), sampler

    expected = train(*make(), 3)
    loader, sampler = make()
    job = hintsd.attach(loader, paths=data.paths, epochs=3)
    read = train(loader, sampler, 3)
    assert read == expected
    fake_hintsd.wait(lambda: fake_hintsd.jobs and 2 in orders_of(fake_hintsd))
    # of a fast trainer some may be passed before they are sent; one behind the last may be drawn
    for epoch, order in orders_of(fake_hintsd).items():
        assert epoch == 3 or order == read[epoch]
    told = [epoch for epoch, _ in fake_hintsd.jobs[0].orders]
    assert len(told) == len(set(told)), "each once"
    job.close()


@pytest.mark.parametrize(("scheme", "told"), [("shade", [0, 1]), ("icache", [0, 1])])
def test_an_epoch_that_is_drawn_ahead_is_announced_ahead(
    fake_hintsd: FakeHintsd, scheme: str, told: list[int]
) -> None:
    """Whether it is as long or not."""
    data, jobs = Numbers(), fake_hintsd.jobs
    sampler = ImportanceSampler(data, scheme, draw_ahead=1)
    loader = DataLoader(data, 8, sampler=sampler)
    with hintsd.attach(loader, paths=data.paths):
        next(iter(loader))
        fake_hintsd.wait(lambda: jobs and len(jobs[0].orders) == len(told))
    fake_hintsd.wait(lambda: jobs[0].is_closed)
    assert [epoch for epoch, _ in jobs[0].orders] == told


def test_an_epoch_that_is_drawn_anew_is_announced_anew(fake_hintsd: FakeHintsd) -> None:
    """What was told of it ahead is another training's now."""
    data = Numbers()
    sampler, other = (ImportanceSampler(data, draw_ahead=1, seed=seed) for seed in (1, 2))
    loader = DataLoader(data, 8, sampler=sampler)
    train(DataLoader(data, 8, sampler=other), other, 1)
    with hintsd.attach(loader, paths=data.paths):
        train(loader, sampler, 1)
        ((_, told),) = sampler.drawn()
        sampler.load_state_dict(other.state_dict())
        read = train(loader, sampler, 1)[0]
        assert told.tolist() != read
        fake_hintsd.wait(lambda: fake_hintsd.jobs and orders_of(fake_hintsd).get(1) == read)


@pytest.mark.parametrize("replicas", [1, 2])
def test_expected_uses_are_told_when_an_epoch_begins(
    fake_hintsd: FakeHintsd, replicas: int
) -> None:
    """Of the epochs behind it, by what was learned so far, and of this reader."""
    data, jobs = Numbers(50), fake_hintsd.jobs
    sampler = ImportanceSampler(data, "icache", fraction=0.4, num_replicas=replicas, rank=0)
    loader = DataLoader(data, 5, sampler=sampler)
    with hintsd.attach(loader, paths=data.paths):
        train(loader, sampler, 1)
        fake_hintsd.wait(lambda: jobs and jobs[0].scores)
        expected = sampler.expected_reads() / replicas
        next(iter(loader))
        fake_hintsd.wait(lambda: len(jobs[0].scores) > 1)
    uses = np.frombuffer(jobs[0].scores[-1], "<f4")
    assert uses == pytest.approx(expected)
    assert uses.sum() == pytest.approx(20 / replicas)
    assert np.frombuffer(jobs[0].scores[0], "<f4") == pytest.approx(np.full(50, 0.4 / replicas))


LOW: dict[str, Any] = {"scheme": "icache", "fraction": 0.5, "h_share": 0.2, "substitute": "low"}


def tell_cached(daemon: FakeHintsd, cached: Any) -> None:
    bits = np.packbits(cached, bitorder="little").tobytes()
    daemon.stop()  # what it says at first it does not say again
    daemon.tells_cached = lambda number: [
        {"number": number, "samples": len(cached), "offset": 0, "data": bits}
    ]
    daemon.start()


@pytest.mark.filterwarnings("error:hintsd:RuntimeWarning")
@pytest.mark.parametrize(
    ("settings", "asked"), [(LOW, 2), ({"repeat": 2.0}, 2), ({"scheme": "icache"}, 0), ({}, 0)]
)
def test_attach_asks_what_is_cached_where_a_draw_needs_it(
    fake_hintsd: FakeHintsd, settings: dict[str, Any], asked: int
) -> None:
    """Not in the warm-up, which reads all."""
    data, cached = Numbers(), np.arange(LENGTH) % 2 == 0
    tell_cached(fake_hintsd, cached)
    sampler = ImportanceSampler(data, **settings)
    loader = DataLoader(data, 8, sampler=sampler)
    with hintsd.attach(loader, paths=data.paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        read = train(loader, sampler, 3)
        assert len(fake_hintsd.jobs[0].asked) == asked
        if settings is not LOW:
            none = None, None
            fake_hintsd.wait(lambda: fake_hintsd.jobs[0].sampled)
            assert (fake_hintsd.jobs[0].sampled[-1] == none) == (settings != {"scheme": "icache"})
        else:
            assert sampler.report().substituted > 0
            assert cached[read[-1]].mean() > 0.6
            report, jobs = sampler.report(), fake_hintsd.jobs
            assert report.h_list == len(sampler.h_list()) == round(0.2 * LENGTH)
            figures = report.substituted, report.h_list
            fake_hintsd.wait(lambda: jobs[0].sampled[-1:] == [figures])


def test_what_the_user_says_is_cached_wins(fake_hintsd: FakeHintsd) -> None:
    data = Numbers()
    tell_cached(fake_hintsd, np.ones(LENGTH, np.bool_))
    sampler = ImportanceSampler(data, **LOW)
    sampler.set_cached(lambda: [])
    loader = DataLoader(data, 8, sampler=sampler)
    with hintsd.attach(loader, paths=data.paths) as job:
        fake_hintsd.wait(lambda: job.state == "hinted")
        train(loader, sampler, 2)
        assert fake_hintsd.jobs[0].asked == []


def test_a_sampler_that_is_attached_keeps_no_job_and_is_copied(fake_hintsd: FakeHintsd) -> None:
    data = Numbers()
    sampler = ImportanceSampler(data, **LOW)
    loader = DataLoader(data, 8, sampler=sampler)
    hintsd.attach(loader, paths=data.paths)
    fake_hintsd.wait(lambda: fake_hintsd.jobs)
    assert sorted(pickle.loads(pickle.dumps(sampler))) == list(range(LENGTH))
    del loader
    gc.collect()
    fake_hintsd.wait(lambda: fake_hintsd.jobs[0].is_closed)


def test_a_resumed_training_announces_what_is_left(fake_hintsd: FakeHintsd) -> None:
    data = Numbers()
    stopped, sampler = (ImportanceSampler(data, batch_size=8) for _ in range(2))
    for batch, _ in zip(DataLoader(data, 8, sampler=stopped), range(3)):  # noqa: B905
        stopped.learn(losses_of(batch))
    loader = DataLoader(data, 8, sampler=sampler)
    job = hintsd.attach(loader, paths=data.paths)
    sampler.load_state_dict(stopped.state_dict())
    (read,) = train(loader, sampler, 1)
    assert len(read) == LENGTH - 24
    fake_hintsd.wait(lambda: fake_hintsd.jobs and orders_of(fake_hintsd) == {0: read})
    job.close()


def test_a_subclass_is_not_announced(heard: Heard) -> None:
    """It may do anything, and is a sampler of unknown code."""

    class Own(ImportanceSampler):
        pass

    data = Numbers()
    loader = DataLoader(data, 8, sampler=Own(data))
    assert hintsd.attach(loader, paths=data.paths).is_over
    assert "the order of Own cannot be told" in str(heard[0].message)


# ---- ranks ---------------------------------------------------------------------------------------

RANK = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
import torch.distributed as distributed
from torch.utils.data import DataLoader, TensorDataset
from hintsd import ImportanceSampler
rank, store, lacking = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "lacking"
distributed.init_process_group("gloo", init_method="file://" + store, world_size=2, rank=rank)
data = TensorDataset(torch.arange(31))
ICACHE = {"scheme": "icache", "fraction": 0.5, "substitute": "low", "h_share": 0.3}
read, times, values, drawn = [], [], [], []
for settings in ({"scheme": "shade"}, ICACHE, {"scheme": "loss"}):
    sampler = ImportanceSampler(data, **settings)
    sampler.set_cached(lambda: range(rank, 31, 4))
    loader = DataLoader(data, 4, sampler=sampler)
    epochs = []
    for epoch in range(4):
        order = []
        for (batch,) in loader:
            if not order:
                drawn.append(sampler.state_dict()["upcoming"]["drawn"][0]["order"].tolist())
            order += batch.tolist()
            if not (lacking and rank == 1):
                sampler.learn(torch.sin(batch.double() * (epoch + 1)).square())
        if rank == 0:
            sampler.judge((0.9, 0.5, 0.95, 0.96)[epoch])  # what rank 0 says holds for all
        epochs.append(order)
    sampler.gather()
    report = sampler.report()
    read.append(epochs)
    times.append(report.times.tolist())
    values.append(sampler.state_dict()["scores"]["values"].tolist())
print(json.dumps({"read": read, "times": times, "values": values, "drawn": drawn}))
distributed.destroy_process_group()
"""


@pytest.mark.parametrize("kind", ["whole", "lacking"])
def test_ranks_share_scores_and_draw_the_same(tmp_path: Path, kind: str) -> None:
    """Each its part; also where one rank learns nothing."""
    command = [sys.executable, "-c", RANK]
    ranks = [
        WithTorch(
            [*command, str(rank), str(tmp_path / "store"), kind],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for rank in range(2)
    ]
    first, second = (json.loads(each.communicate()[0].splitlines()[-1]) for each in ranks)
    assert first["times"] == second["times"]
    assert first["values"] == second["values"]
    assert first["drawn"] == second["drawn"]
    for scheme in range(3):
        for epoch in range(4):
            shares = [told["read"][scheme][epoch] for told in (first, second)]
            assert len(shares[0]) == len(shares[1])
            if epoch == 0:
                assert set(shares[0]) | set(shares[1]) == set(range(31))
            elif scheme == 1:
                assert len(set(shares[0]) | set(shares[1])) == 16
        taught = [told["read"][scheme] for told in (first, second)][: 1 if kind == "lacking" else 2]
        counts = np.bincount(
            np.concatenate([np.concatenate(read) for read in taught]), minlength=31
        )
        assert first["times"][scheme] == counts.tolist()


def test_shares_of_ranks_are_disjoint_and_cover() -> None:
    samplers = [ImportanceSampler(30, num_replicas=3, rank=rank, seed=4) for rank in range(3)]
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [10, 10, 10]
    assert sorted(sum(shares, [])) == list(range(30))  # noqa: RUF017  (they are short)


def test_ranks_that_cannot_talk_are_told_so(heard: Heard) -> None:
    sampler = ImportanceSampler(30, num_replicas=3, rank=1, batch_size=10)
    list(sampler)
    sampler.learn(np.ones(10))
    list(sampler)
    assert "torch.distributed is not initialised" in str(heard[0].message)


def test_ranks_that_cannot_talk_substitute_nothing() -> None:
    """Each has another cache; told the same losses, they draw the same."""
    samplers = [
        ImportanceSampler(40, num_replicas=2, rank=rank, batch_size=10, **LOW) for rank in range(2)
    ]
    samplers[0].set_cached(lambda: range(0, 40, 2))
    samplers[1].set_cached(lambda: range(1, 40, 2))
    for sampler in samplers:
        list(sampler)
        sampler.learn(np.arange(40.0), np.arange(40))
    shares = [list(sampler) for sampler in samplers]
    assert len(set(sum(shares, []))) == 20  # noqa: RUF017  (they are short)
    assert [sampler.report().substituted for sampler in samplers] == [0, 0]
