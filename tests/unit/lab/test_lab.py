"""Replays against counts by hand and theory; recordings against a training written again."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler, TensorDataset

from fusecache.base.errors import ConfigError
from fusecache.traces.traces import Importance, Trace
from hintsd.lab import grid
from hintsd.lab.grid import Capacity, parse_capacity, replay_all
from hintsd.lab.images import digits, generated
from hintsd.lab.replay import Outcome, Workload
from hintsd.lab.sampler import SAMPLERS, Repeating, make
from hintsd.lab.shuffle import lru_hit_ratio, of_rank, shuffled, zipf
from hintsd.lab.training import BATCH_SIZE, LEARNING_RATE, Network, Recording, record
from hintsd.orders.drawing import access_sequence
from hintsd.orders.spec import OrderSpec
from hintsd.policies import MISS, Hints, Policy
from hintsd.policies.catalogue import CATALOGUE

EPOCHS = 6


def trace_of(
    items: Sequence[int],
    sizes: Sequence[int],
    epoch_starts: Sequence[int] = (0,),
    importances: tuple[Importance, ...] = (),
    times_s: Sequence[float] | None = None,
) -> Trace:
    return Trace(
        items=np.array(items, np.int64),
        sizes=np.array(sizes, np.int64),
        epoch_starts=np.array(epoch_starts, np.int64),
        times_s=None if times_s is None else np.array(times_s),
        importances=importances,
        readers=None,
        seen=None,
        names=None,
        source="by hand",
    )


def replayed(trace: Trace, policy: str, capacity_bytes: int, warm_up_epochs: int = 0) -> Outcome:
    return Workload(trace, warm_up_epochs, "t").replay(policy, capacity_bytes, 0)


# ---- replay --------------------------------------------------------------------------------------


def test_lru_as_counted_by_hand() -> None:
    """0 miss, 1 miss, 0 hit, 2 miss (1 goes), 0 hit, 1 miss (2 goes)."""
    outcome = replayed(trace_of([0, 1, 0, 2, 0, 1], [20, 11, 13]), "lru", 34)
    assert (outcome.accesses, outcome.hits, outcome.substituted, outcome.evictions) == (6, 2, 0, 2)
    assert (outcome.read_bytes, outcome.hit_bytes, outcome.origin_bytes) == (95, 40, 55)
    assert outcome.hit_ratio == pytest.approx(2 / 6)
    assert outcome.byte_hit_ratio == pytest.approx(40 / 95)
    assert outcome.capacity_share == pytest.approx(34 / 44)


def test_epochs_of_the_warm_up_are_replayed_and_not_counted() -> None:
    trace = trace_of([0, 1, 2, 0, 1, 2, 2, 1, 0], [1, 1, 1], [0, 3, 6])
    assert replayed(trace, "lru", 2).evictions == 5
    later = replayed(trace, "lru", 2, warm_up_epochs=1)
    # misses 0 1 2, then hits 2 and 1, then misses 0
    assert (later.accesses, later.hits, later.evictions) == (6, 2, 4)
    last = replayed(trace, "lru", 2, warm_up_epochs=2)
    assert (last.accesses, last.hits, last.origin_bytes) == (3, 2, 1)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.8])
def test_uniform_shuffles_hit_what_theory_says(share: float) -> None:
    trace = shuffled(items=3000, epochs=5, seed=1, item_bytes=7)
    outcomes = {
        name: replayed(trace, name, int(share * 3000) * 7, warm_up_epochs=1)
        for name in ("lru", "minio", "frequency", "belady")
    }
    assert outcomes["lru"].hit_ratio == pytest.approx(lru_hit_ratio(share), abs=0.01)
    for name in ("minio", "frequency"):
        assert outcomes[name].hit_ratio == pytest.approx(share, abs=1e-9)
        assert outcomes[name].evictions == 0
    assert share <= outcomes["belady"].hit_ratio <= share + 0.01


def test_published_lru_is_the_theory() -> None:
    """iCACHE, Figure 16: its LRU column is what uniform shuffles give, to the last digit."""
    published = {0.2: 0.02, 0.4: 0.09, 0.6: 0.23, 0.8: 0.48}
    assert {share: round(lru_hit_ratio(share), 2) for share in published} == published
    assert lru_hit_ratio(1.0) == 1.0


class Scripted(Policy):
    """Answers what it is given; notes what it is told."""

    name = "scripted"
    answers: Sequence[int] = ()

    def __init__(self, capacity_bytes: int, *, on_evict: Any = None, seed: int = 0) -> None:
        super().__init__(capacity_bytes, on_evict=on_evict)
        self.told: list[tuple[int, Hints]] = []
        self.calls: list[tuple[int, int, float, float]] = []
        Scripted.last = self

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        self.calls.append((item, size_bytes, cost_s, now_s))
        if item == 2 and self.on_load is not None and self._on_evict is not None:
            self.on_load(2)
            self._on_evict(1)
        return self.answers[len(self.calls) - 1]

    def hint(self, hints: Hints) -> None:
        self.told.append((len(self.calls), hints))

    def __contains__(self, item: int) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    last: Scripted


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    monkeypatch.setitem(CATALOGUE, "scripted", Scripted)
    return Scripted


def test_what_another_item_answers_is_no_hit(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "answers", [MISS, 0, 2, MISS, 2, 0])
    trace = trace_of([2, 0, 1, 1, 2, 1], [100, 10, 1], [0, 1])
    outcome = replayed(trace, "scripted", 50, warm_up_epochs=1)
    assert (outcome.hits, outcome.substituted) == (2, 2)
    assert (outcome.hit_bytes, outcome.substituted_bytes) == (101, 20)
    assert (outcome.loaded, outcome.loaded_bytes) == (1, 1)
    assert outcome.origin_bytes == 10 + 1  # missed and loaded
    assert outcome.evictions == 1


def test_hints_come_when_they_are_known(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "answers", [MISS] * 4)
    told = tuple(
        Importance(position, np.array([item]), np.array([value], np.float32))
        for position, item, value in ((1, 0, 0.5), (2, 1, 0.25))
    )
    replayed(trace_of([0, 1, 1, 0], [4, 5], [0, 2], told), "scripted", 9)
    (first, whole), *rest = scripted.last.told
    assert first == 0
    assert whole.sequence is not None
    assert whole.uses is not None
    assert whole.sizes is not None
    assert whole.sequence.tolist() == [0, 1, 1, 0]
    assert (whole.uses.tolist(), whole.sizes.tolist()) == ([2, 2], [4, 5])
    assert [
        (position, hints.epoch, None if hints.items is None else hints.items.tolist())
        for position, hints in rest
    ] == [(0, True, None), (1, False, [0]), (2, False, [1]), (2, True, None)]
    assert rest[2][1].importance is not None
    assert rest[2][1].importance.tolist() == [0.25]


def test_a_fetch_costs_more_for_more_bytes_and_time_never_goes_back(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripted, "answers", [MISS] * 3)
    replayed(trace_of([0, 1, 0], [10**8, 0], times_s=[1.0, 3.0, 2.0]), "scripted", 9)
    items, sizes, costs_s, times_s = zip(*scripted.last.calls, strict=True)
    assert (items, sizes, times_s) == ((0, 1, 0), (10**8, 0, 10**8), (1.0, 3.0, 3.0))
    assert costs_s == pytest.approx((1.001, 0.001, 1.001))


@pytest.mark.parametrize(
    ("trace", "warm_up_epochs", "message"),
    [
        (trace_of([], [1]), 0, "t is an empty trace"),
        (trace_of([0], [0]), 0, "empty files"),
        (trace_of([0], [1 << 62, 1 << 62]), 0, "t: the sizes of its items add up to more"),
        (trace_of([0, 0, 0], [1 << 61, 0]), 0, "t: the sizes of its items add up to more"),
        (trace_of([0, 0], [1], [0, 1]), 2, "--warm-up 2 leaves nothing to count of 2 epochs"),
        (
            trace_of(
                [1, 1],
                [1, 1],
                importances=(Importance(1, np.array([0, 1]), np.array([1, math.nan], np.float32)),),
            ),
            0,
            "importance of item 1, told before access 1, is nan",
        ),
    ],
)
def test_what_cannot_be_replayed_is_named(trace: Trace, warm_up_epochs: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload(trace, warm_up_epochs, "t")


# ---- grid ----------------------------------------------------------------------------------------


def test_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = shuffled(items=200, epochs=3, seed=4, item_bytes=10)
    capacities = [Capacity(share=0.2), Capacity(size_bytes=1000)]
    policies = ["random", "lru", "minio"]

    def all_outcomes() -> list[Outcome]:
        seen: list[Outcome] = []
        outcomes = replay_all(
            trace, policies, capacities, name="t", warm_up_epochs=1, seed=5, on_outcome=seen.append
        )
        assert sorted(map(repr, seen)) == sorted(map(repr, outcomes))
        return outcomes

    alone = all_outcomes()
    assert [(outcome.policy, outcome.capacity_bytes) for outcome in alone] == [
        (policy, capacity) for policy in policies for capacity in (400, 1000)
    ]
    monkeypatch.setattr(grid, "PROCESSES_WORTH_READS", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert all_outcomes() == alone


@pytest.mark.parametrize(
    ("text", "total_bytes", "capacity_bytes"),
    [("5%", 1000, 50), (" 12.5% ", 1000, 125), ("100%", 7, 7), ("1K", 4096, 1024)],
)
def test_capacities(text: str, total_bytes: int, capacity_bytes: int) -> None:
    assert parse_capacity(text).of(total_bytes, "t") == capacity_bytes


@pytest.mark.parametrize("text", ["0%", "-5%", "101%", "nan%", "x%", "", "5", "0", "-1", "many"])
def test_impossible_capacities_are_quoted(text: str) -> None:
    with pytest.raises(ConfigError, match="--cache") as caught:
        parse_capacity(text).of(4, "t")
    assert text.removesuffix("%") in str(caught.value)


# ---- recordings ----------------------------------------------------------------------------------


@cache
def recorded(sampler: str, seed: int = 0) -> Recording:
    images = digits()
    return record(images, make(sampler, images, seed), epochs=EPOCHS, seed=seed)


def test_a_rank_reads_what_its_distributed_sampler_draws() -> None:
    trace = of_rank(items=100, epochs=3, ranks=4, seed=9)
    numbered = TensorDataset(torch.arange(100))
    sampler: DistributedSampler[Any] = DistributedSampler(numbered, 4, rank=0, seed=9)
    drawn: list[int] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        drawn += list(sampler)
    assert trace.items.tolist() == drawn
    assert trace.epoch_starts.tolist() == [0, 25, 50]


def test_zipf_reads_the_first_rank_twice_as_often_as_the_second() -> None:
    trace = zipf(items=50, epochs=2000, seed=3)
    counts = np.sort(np.bincount(trace.items, minlength=50))[::-1]
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.05)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)


def test_shuffles_are_torchs() -> None:
    trace = shuffled(items=100, epochs=3, seed=9, item_bytes=5)
    spec = OrderSpec("random", 100, seed=9)
    for epoch, start in enumerate(trace.epoch_starts.tolist()):
        sequence = access_sequence(spec, epoch).tolist()
        assert trace.items[start : start + 100].tolist() == sequence


def epochs_of(trace: Trace) -> list[list[int]]:
    return [part.tolist() for part in np.split(trace.items, trace.epoch_starts[1:])]


def written_again(batches: Sequence[Any], seed: int) -> list[Any]:
    """The losses of each batch, of a network trained on them by formulas, without torch's."""
    images = digits()
    layers = Network(images, seed).layers.state_dict()
    w1, b1, w2, b2 = (
        layers[name].numpy().astype(np.float64)
        for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    )
    losses = []
    for batch in batches:
        x, labels = images.pixels[batch].astype(np.float64), images.labels[batch]
        hidden = np.maximum(0, x @ w1.T + b1)
        powers = np.exp(hidden @ w2.T + b2)
        softmax = powers / powers.sum(1, keepdims=True)
        losses.append(-np.log(softmax[np.arange(len(batch)), labels]))
        d_logits = (softmax - np.eye(10)[labels]) / len(batch)
        d_hidden = (d_logits @ w2) * (hidden > 0)
        w2, b2 = w2 - LEARNING_RATE * d_logits.T @ hidden, b2 - LEARNING_RATE * d_logits.sum(0)
        w1, b1 = w1 - LEARNING_RATE * d_hidden.T @ x, b1 - LEARNING_RATE * d_hidden.sum(0)
    return losses


def batches_of(trace: Trace) -> list[Any]:
    return [
        np.array(epoch[begin : begin + BATCH_SIZE])
        for epoch in epochs_of(trace)
        for begin in range(0, len(epoch), BATCH_SIZE)
    ]


@pytest.mark.parametrize("sampler", ["loss", "icache", "coarse", "shade"])
def test_importance_lands_on_the_sample_that_earned_it(sampler: str) -> None:
    """The batches of its first epochs are trained again, and scored by the papers' formulas,
    naively.
    """
    trace = recorded(sampler).trace
    batches = batches_of(trace)
    again = written_again(batches[: len(batches) // 2], seed=0)
    scores: dict[str, Callable[[Any], list[float]]] = {
        "loss": lambda losses: losses.tolist(),
        "icache": lambda losses: losses.tolist(),
        "coarse": lambda losses: [losses.mean()] * len(losses),
        "shade": lambda losses: [math.log(sum(l > k for k in losses) + 10) for l in losses],  # noqa: E741
    }
    assert len(trace.importances) == len(batches) - 1
    position = 0
    agreeing = total = 0
    for told, batch, losses in zip(trace.importances, batches, again, strict=False):
        position += len(batch)
        assert told.position == position
        assert told.items.tolist() == batch.tolist()
        values = np.array(scores[sampler](losses))
        agreeing += int(np.isclose(told.values, values, rtol=0.02, atol=1e-4).sum())
        total += len(batch)
    # torch sums in 32 bits: two losses that are nearly equal may change their ranks
    assert agreeing / total > 0.99


def test_a_recording_is_the_same_again_and_another_with_another_seed() -> None:
    images = digits()
    first = recorded("shade")
    again = record(images, make("shade", images, 0), epochs=EPOCHS, seed=0)
    other = record(images, make("shade", images, 1), epochs=EPOCHS, seed=1)
    assert again.trace.items.tolist() == first.trace.items.tolist()
    assert again.accuracies == first.accuracies
    assert all(
        one.values.tolist() == two.values.tolist()
        for one, two in zip(again.trace.importances, first.trace.importances, strict=True)
    )
    assert other.trace.items.tolist() != first.trace.items.tolist()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_training_learns_and_begins_with_all_items(sampler: str) -> None:
    recording = recorded(sampler)
    assert recording.accuracies[0] < 0.8
    assert recording.accuracies[-1] > 0.9
    assert sorted(epochs_of(recording.trace)[0]) == list(range(1500))
    recording.trace.check()


def test_what_each_sampler_reads() -> None:
    epochs = {name: epochs_of(recorded(name).trace)[1:] for name in SAMPLERS}
    assert all(sorted(epoch) == list(range(1500)) for epoch in epochs["uniform"])
    for epoch in epochs["icache"]:
        assert len(set(epoch)) == len(epoch)
        assert 0.6 < len(epoch) / 1500 < 0.78
    for name in ("coarse", "loss", "shade"):
        assert all(len(epoch) == 1500 for epoch in epochs[name])
        assert all(len(set(epoch)) < 1100 for epoch in epochs[name])  # with repetitions


@pytest.mark.parametrize("sampler", ["loss", "shade", "icache"])
def test_hard_samples_are_read_more(sampler: str) -> None:
    """Of the last epoch, in the importance that was known when it was drawn."""
    trace = recorded(sampler).trace
    start = int(trace.epoch_starts[-1])
    known = np.zeros(1500)
    for told in trace.importances:
        if told.position <= start:
            known[told.items] = told.values
    easy, hard = np.argsort(known)[:500], np.argsort(known)[1000:]
    reads = np.bincount(trace.items[start:], minlength=1500)
    assert reads[hard].sum() > 1.2 * reads[easy].sum()


def test_repeated_items_are_those_that_the_cache_holds() -> None:
    """PADS with a cache: each epoch begins with what is held, three times each."""
    images = digits()
    cached_bytes = images.total_bytes // 5
    sampler = make("shade", images, 0, repeating=Repeating.ALWAYS, cached_bytes=cached_bytes)
    trace = record(images, sampler, epochs=4, seed=0).trace
    policy = CATALOGUE["shade"](cached_bytes)
    told = list(trace.importances)
    for position, item in enumerate(trace.items.tolist()):
        while told and told[0].position == position:
            policy.hint(Hints(items=told[0].items, importance=told[0].values))
            del told[0]
        if position in trace.epoch_starts[1:]:
            epoch = trace.items[position : position + 1500]
            held = np.array([each in policy for each in epoch.tolist()])
            repeated = int(held.sum())
            assert held[:repeated].all()
            assert 0.5 < repeated / 1500 < 0.85
            times = np.bincount(epoch[:repeated])
            assert (times % 3 == 0).all()
        policy.access(item, 64)


def test_generated_images_can_be_learned_and_have_sizes_of_their_own() -> None:
    images = generated(2000, seed=3)
    assert len(images) == 2000
    assert len(np.unique(images.sizes)) > 1500
    assert images.sizes.min() > 0
    assert generated(2000, seed=3).pixels.tobytes() == images.pixels.tobytes()
    recording = record(images, make("uniform", images, 3), epochs=3, seed=3)
    assert 0.5 < recording.accuracies[-1] < 0.99
    outcome = replayed(recording.trace, "minio", images.total_bytes // 5, warm_up_epochs=1)
    assert outcome.byte_hit_ratio == pytest.approx(0.2, abs=0.01)
