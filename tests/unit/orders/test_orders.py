"""Orders against torch itself: what its samplers and DataLoaders yield, at random."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import msgpack  # type: ignore[import-untyped]  # has no types
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hintsd.orders import drawing
from hintsd.orders.drawing import Order, OrderTooFar, OrderUnknown, access_sequence
from hintsd.orders.reading import spec_of
from hintsd.orders.spec import (
    GENERATOR_STATE_BYTES,
    OrderSpec,
    from_message,
    samples_per_epoch,
    to_message,
)

EPOCHS = 3


class Numbers(Dataset[int]):
    """Its elements are their own indices, so that a DataLoader yields its order."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(batches: Iterable[Any]) -> list[int]:
    return [int(index) for batch in batches for index in batch]


def same(found: np.ndarray[Any, Any], expected: Iterable[int]) -> bool:
    assert found.dtype == np.int64
    return bool(np.array_equal(found, np.fromiter(expected, np.int64)))


def random_length(source: random.Random) -> int:
    return source.choice([1, 2, source.randint(1, 40), source.randint(1, 300)])


def random_sampler(source: random.Random, generator: torch.Generator | None) -> Sampler[int]:
    length = random_length(source)
    match source.choice(["sequential", "random", "drawn", "subset", "weighted", "distributed"]):
        case "sequential":
            return SequentialSampler(range(length))
        case "random":
            count = source.choice([None, length, source.randint(1, 4 * length), 2 * length])
            return RandomSampler(range(length), num_samples=count, generator=generator)
        case "drawn":
            count = source.choice([None, 32, source.randint(1, 2 * length)])
            return RandomSampler(range(length), True, count, generator)
        case "subset":
            indices = [source.randrange(1000) for _ in range(length)]
            return SubsetRandomSampler(indices, generator)
        case "weighted":
            weights = [source.choice([0.0, 1.0, source.random()]) for _ in range(length)]
            weights[source.randrange(length)] = 0.5
            again = source.random() < 0.5
            count = source.randint(1, 3 * length if again else length)
            return WeightedRandomSampler(weights, count, again, generator)
        case _:
            world_size = source.choice([1, 2, 3, 8, source.randint(1, 400)])
            return DistributedSampler(
                Numbers(length),
                world_size,
                source.randrange(world_size),
                shuffle=source.random() < 0.8,
                seed=source.choice([0, 1, 2**40, source.randrange(2**31)]),
                drop_last=source.random() < 0.5,
            )


@pytest.mark.claim("P4")
@pytest.mark.parametrize("seed", [-1, -5, -(2**63), 2**63, 2**64 - 1])
def test_seeds_are_what_torch_takes_them_for(seed: int) -> None:
    """A negative one counts from 2^64 down; `distributed` adds the epoch to it."""
    spec = OrderSpec(sampler="random", length=100, seed=seed)
    sampler = RandomSampler(range(100), generator=seeded(seed))
    orders = [access_sequence(spec, epoch) for epoch in range(2)]
    assert all(same(order, sampler) for order in orders)
    assert same(access_sequence(replace(spec, seed=seed % 2**64), 0), orders[0])
    spec = OrderSpec(sampler="distributed", length=100, seed=seed, world_size=2, rank=1)
    ranked: DistributedSampler[int] = DistributedSampler(Numbers(100), 2, 1, seed=seed)
    assert same(access_sequence(spec, 0), ranked)
    if seed < 2**64 - 1:  # torch takes no more
        ranked.set_epoch(1)
        assert same(access_sequence(spec, 1), ranked)


@pytest.mark.claim("P4")
@pytest.mark.parametrize("seed", range(200))
def test_every_stock_sampler_is_followed_from_epoch_to_epoch(seed: int) -> None:
    """Bare or in a BatchSampler, with a generator of its own; the spec travels as a message."""
    source = random.Random(seed)
    generator = seeded(seed)
    torch.empty(seed % 7).uniform_(generator=generator)  # not a fresh one
    sampler = random_sampler(source, generator)
    batching = source.random() < 0.5
    batches = BatchSampler(sampler, source.randint(1, 20), source.random() < 0.5)
    start = source.choice([0, 5])
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(start)
    before, default_before = generator.get_state(), torch.get_rng_state()
    spec = spec_of(sampler, batches if batching else None, start_epoch=start)
    assert torch.equal(generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), default_before)
    assert spec is not None
    message = to_message(spec)
    again = from_message(msgpack.unpackb(msgpack.packb(message)))
    assert to_message(again) == message
    order = Order(again)
    for epoch in range(start, start + EPOCHS):
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        expected = flat(batches) if batching else list(sampler)
        found = order.sequence(epoch)
        assert same(found, expected)
        assert len(found) == samples_per_epoch(again)
        assert np.array_equal(found, access_sequence(spec, epoch))


@pytest.mark.parametrize("seed", range(60))
def test_a_sampler_without_a_generator_is_caught_as_it_draws(seed: int) -> None:
    source = random.Random(1000 + seed)
    torch.manual_seed(seed)
    sampler = random_sampler(source, None)
    if isinstance(sampler, SequentialSampler | DistributedSampler):
        sampler = RandomSampler(range(random_length(source)))
    spec = spec_of(sampler, start_epoch=4)
    assert spec is not None
    assert same(access_sequence(spec, 4), sampler)
    for epoch in (3, 5):
        with pytest.raises(OrderUnknown, match=f"epoch {epoch} "):
            access_sequence(spec, epoch)


def loader_of(length: int, **options: Any) -> DataLoader[int]:
    return DataLoader(Numbers(length), 8, shuffle=True, **options)


@pytest.fixture
def specs_at_draw(monkeypatch: pytest.MonkeyPatch) -> list[OrderSpec | None]:
    """What `spec_of` reads at the first draw of each epoch: of each RandomSampler that runs."""
    caught: list[OrderSpec | None] = []
    draw = RandomSampler.__iter__
    loader: list[DataLoader[int]] = []
    initialise = DataLoader.__init__

    def remembering(self: DataLoader[int], *args: Any, **options: Any) -> None:
        initialise(self, *args, **options)
        loader[:] = [self]

    def catching(self: RandomSampler) -> Iterator[int]:
        (around,) = loader
        caught.append(
            spec_of(
                self,
                around.batch_sampler,
                around.generator,
                start_epoch=len(caught),
                persistent_workers=around.persistent_workers,
            )
        )
        yield from draw(self)

    monkeypatch.setattr(DataLoader, "__init__", remembering)
    monkeypatch.setattr(RandomSampler, "__iter__", catching)
    return caught


LOADERS = pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 0},
        {"num_workers": 0, "drop_last": True},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
    ],
    ids=["no workers", "drop_last", "workers", "persistent workers"],
)


@LOADERS
@pytest.mark.parametrize("length", [40, 41])
def test_a_loader_with_a_generator_read_before_its_first_epoch(
    options: dict[str, Any], length: int
) -> None:
    """The generator also gives the base seed of the workers, before each epoch."""
    loader = loader_of(length, generator=seeded(7), **options)
    spec = spec_of(
        loader.sampler,
        loader.batch_sampler,
        loader.generator,
        base_seed_drawn=False,
        persistent_workers=loader.persistent_workers,
    )
    assert spec is not None
    order, by_seed = Order(spec), Order(replace(spec, generator_state=None, seed=7))
    for epoch in range(EPOCHS):
        expected = flat(loader)
        assert same(order.sequence(epoch), expected)
        assert same(by_seed.sequence(epoch), expected)


@LOADERS
def test_a_loader_with_a_generator_read_as_its_sampler_draws(
    options: dict[str, Any], specs_at_draw: list[OrderSpec | None]
) -> None:
    loader = loader_of(41, generator=seeded(7), **options)
    epochs = [flat(loader) for _ in range(EPOCHS)]
    assert len(specs_at_draw) == EPOCHS
    for first, spec in enumerate(specs_at_draw):
        assert spec is not None
        order = Order(spec)
        for epoch in range(first, EPOCHS):
            assert same(order.sequence(epoch), epochs[epoch])


@LOADERS
def test_a_loader_without_a_generator_is_caught_each_epoch(
    options: dict[str, Any], specs_at_draw: list[OrderSpec | None]
) -> None:
    torch.manual_seed(3)
    loader = loader_of(41, **options)
    before = spec_of(
        loader.sampler,
        loader.batch_sampler,
        base_seed_drawn=False,
        persistent_workers=loader.persistent_workers,
    )
    epochs = [flat(loader) for _ in range(EPOCHS)]
    assert before is not None
    assert same(access_sequence(before, 0), epochs[0])
    for epoch, spec in enumerate(specs_at_draw):
        assert spec is not None
        assert same(access_sequence(spec, epoch), epochs[epoch])


def test_a_loader_whose_sampler_has_another_generator() -> None:
    sampler = RandomSampler(range(30), generator=seeded(1))
    loader = DataLoader(Numbers(30), 4, sampler=sampler, generator=seeded(2))
    spec = spec_of(loader.sampler, loader.batch_sampler, loader.generator, base_seed_drawn=False)
    assert spec is not None
    assert spec.loader_draws == "never"
    order = Order(spec)
    for epoch in range(EPOCHS):
        assert same(order.sequence(epoch), flat(loader))


def test_a_loader_with_a_batch_sampler_is_read_through_it() -> None:
    """Its own `sampler` attribute is a sequential one that it never asks."""
    batches = BatchSampler(RandomSampler(range(30), generator=seeded(1)), 4, True)
    loader = DataLoader(Numbers(30), batch_sampler=batches)
    spec = spec_of(loader.sampler, loader.batch_sampler, loader.generator)
    assert spec is not None
    assert same(access_sequence(spec, 0), flat(loader))


def test_a_permutation_of_many() -> None:
    length = 2**24 + 1
    spec = OrderSpec("random", length, seed=5)
    assert np.array_equal(
        access_sequence(spec, 0), torch.randperm(length, generator=seeded(5)).numpy()
    )


def test_a_rank_of_many() -> None:
    length = 2**24 + 1
    spec = OrderSpec("distributed", length, seed=2, world_size=3, rank=2)
    sampler: Sampler[int] = DistributedSampler(Numbers(length), 3, 2, seed=2)
    assert isinstance(sampler, DistributedSampler)
    sampler.set_epoch(5)
    assert same(access_sequence(spec, 5), sampler)


@pytest.mark.parametrize("length", [2**24 + 1, 2**28 + 1, 2**32 - 2])
def test_draws_with_replacement_among_many(length: int) -> None:
    """From 2^32 on (and from 2^28, in some versions) torch draws 64 bits for an index."""
    spec = OrderSpec("random", length, seed=5, replacement=True, num_samples=1000)
    sampler = RandomSampler(range(length), True, 1000, seeded(5))
    order = Order(spec)
    for epoch in range(EPOCHS):
        assert same(order.sequence(epoch), sampler)


def test_more_weights_than_torch_takes_are_refused() -> None:
    weights = np.ones(2**24 + 1)
    spec = OrderSpec(
        "weighted_random", len(weights), seed=1, weights=weights, replacement=True, num_samples=2
    )
    with pytest.raises(ValueError, match=r"torch refuses this order: .*2\^24"):
        access_sequence(spec, 0)


def test_epochs_in_any_order() -> None:
    spec = OrderSpec("random", 20, seed=1, loader_draws="every", num_samples=50)
    expected = {epoch: access_sequence(spec, epoch).tolist() for epoch in range(20)}
    assert len({tuple(indices) for indices in expected.values()}) == 20
    order = Order(spec)
    for epoch in [3, 2, 19, 0, 18, 18, 19, 1]:
        assert same(order.sequence(epoch), expected[epoch])


def test_an_order_in_turn_draws_each_epoch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(OrderSpec("random", 20, seed=1, num_samples=30))
    draws: list[int] = []
    randperm = torch.randperm

    def counting(length: int, **options: Any) -> torch.Tensor:
        draws.append(length)
        return randperm(length, **options)

    monkeypatch.setattr(torch, "randperm", counting)
    for epoch in range(10):
        first = order.sequence(epoch)
        assert order.sequence(epoch) is first
    assert len(draws) == 20  # two an epoch make 30 of 20
    order.sequence(8)
    assert len(draws) == 20  # one of the last two
    assert not first.flags.writeable


def test_explicit_indices_stay() -> None:
    indices = np.array([5, 1, 5, 0, 2], np.int64)
    spec = OrderSpec("indices", 6, indices=indices, batch_size=2, batch_drop_last=True)
    assert same(access_sequence(spec, 3), [5, 1, 5, 0])
    once = replace(spec, epochs_known=1, start_epoch=2)
    assert same(access_sequence(once, 2), [5, 1, 5, 0])
    for epoch in (1, 3):
        with pytest.raises(OrderUnknown):
            access_sequence(once, epoch)


class Reversed(SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(range(len(self)))


@pytest.mark.parametrize(
    "sampler",
    [
        Reversed(range(9)),
        RandomSampler(range(9), True, generator=torch.default_generator),
        SubsetRandomSampler([-1, 2]),
        SubsetRandomSampler([]),
        SequentialSampler(range(0)),
        BatchSampler(SequentialSampler(range(9)), 2, False),
        iter([1, 2]),
        None,
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_what_torch_does_not_tell_in_advance_is_not_read(sampler: object) -> None:
    assert spec_of(sampler) is None


class Batches(BatchSampler):
    pass


def test_a_batch_sampler_of_another_type_is_not_read() -> None:
    sampler = SequentialSampler(range(9))
    assert spec_of(sampler, Batches(sampler, 2, False)) is None


def test_a_subset_is_bounded_by_the_dataset() -> None:
    sampler = SubsetRandomSampler([3, 8])
    assert spec_of(sampler, length=8) is None
    found = spec_of(sampler, length=9)
    assert found is not None
    assert found.length == 9


STATE = seeded(1).get_state().numpy().tobytes()
RANDOM = {"sampler": "random", "length": 9, "seed": 0}
WEIGHTED = {"sampler": "weighted_random", "length": 2, "seed": 0}


def packed(*numbers: float) -> bytes:
    return np.array(numbers, "<f8").tobytes()


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (RANDOM | {"sampler": "sorted"}, "sampler"),
        ({"length": 9}, "sampler"),
        ({"sampler": "sequential"}, "length"),
        (RANDOM | {"length": 0}, "length"),
        (RANDOM | {"length": 2**32 - 1}, "length"),
        (RANDOM | {"length": True}, "length"),
        (RANDOM | {"length": 9.0}, "length"),
        (RANDOM | {"seed": None}, "seed"),
        (RANDOM | {"seed": 2**64}, "seed"),
        (RANDOM | {"generator_state": STATE}, "seed"),
        (RANDOM | {"seed": None, "generator_state": STATE[1:]}, "generator_state"),
        (RANDOM | {"seed": None, "generator_state": bytes(GENERATOR_STATE_BYTES)}, "generator_st"),
        (
            RANDOM | {"seed": None, "generator_state": STATE[:16] + b"\xff" * 8 + STATE[24:]},
            "generator_state",
        ),
        (RANDOM | {"num_samples": 0}, "num_samples"),
        (RANDOM | {"loader_draws": "always"}, "loader_draws"),
        (RANDOM | {"batch_size": 0}, "batch_size"),
        (RANDOM | {"start_epoch": -1}, "start_epoch"),
        (RANDOM | {"epochs_known": 0}, "epochs_known"),
        (RANDOM | {"speed": 1}, "speed"),
        ({"sampler": "distributed", "length": 9}, "seed"),
        (RANDOM | {"world_size": 65537}, "world_size"),
        (RANDOM | {"world_size": 2, "rank": 2}, "rank"),
        (WEIGHTED, "weights"),
        (WEIGHTED | {"weights": packed(1, 1)[1:]}, "weights"),
        (WEIGHTED | {"weights": packed(1)}, "weights"),
        (WEIGHTED | {"weights": packed(1, -1)}, "weights"),
        (WEIGHTED | {"weights": packed(1, np.nan)}, "weights"),
        (WEIGHTED | {"weights": packed(0, 0)}, "weights"),
        (WEIGHTED | {"weights": packed(1e308, 1e308)}, "weights"),
        (WEIGHTED | {"weights": packed(1, 1), "num_samples": 3}, "num_samples"),
        ({"sampler": "indices", "length": 9}, "indices"),
        ({"sampler": "indices", "length": 9, "indices": b""}, "indices"),
        ({"sampler": "indices", "length": 9, "indices": np.array([9]).tobytes()}, "indices"),
        ({"sampler": "indices", "length": 9, "indices": np.array([-1]).tobytes()}, "indices"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(message: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        from_message(message)
    assert "\n" not in str(caught.value)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.binary(max_size=40) | st.just(STATE) | st.sampled_from([0, 1, 2, "random", "indices"])
)  # fmt: skip
NAMES = st.sampled_from(sorted(OrderSpec.__dataclass_fields__)) | st.text(max_size=12)
KINDS = st.sampled_from(
    ["sequential", "random", "distributed", "subset_random", "weighted_random", "indices"]
)


@settings(deadline=None, max_examples=300)
@given(
    st.dictionaries(NAMES | SCALARS, SCALARS | st.lists(SCALARS, max_size=3)),
    KINDS,
    st.booleans(),
)
def test_any_message_is_an_order_or_a_value_error(
    message: dict[Any, Any], kind: str, shaped: bool
) -> None:
    if shaped:
        message = {"length": 3, "seed": 1, **message, "sampler": kind}
    try:
        spec = from_message(message)
    except ValueError:
        return
    assert to_message(from_message(to_message(spec))) == to_message(spec)
    if samples_per_epoch(spec) < 10_000 and spec.length < 10_000 and spec.start_epoch < 10:
        try:
            found = access_sequence(spec, spec.start_epoch)
        except ValueError:  # torch refuses it
            return
        assert len(found) == samples_per_epoch(spec)


def test_torch_is_imported_for_the_first_order_only() -> None:
    program = (
        "import sys, hintsd.orders.drawing, hintsd.orders.spec as orders;"
        "orders.from_message({'sampler': 'random', 'length': 3, 'seed': 1});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_far_epoch_is_approached_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    skip = drawing.Drawing._skip

    def counting(own: drawing.Drawing, spec: OrderSpec, generator: drawing.Generator) -> None:
        steps[-1] += 1
        skip(own, spec, generator)

    monkeypatch.setattr(drawing.Drawing, "_skip", counting)
    monkeypatch.setattr(drawing, "SLICE_DRAWS", 10 * (drawing.EPOCH_DRAWS + 200))
    for spec in (
        OrderSpec("random", 100, seed=1, loader_draws="every"),
        OrderSpec("random", 100, seed=1, draws_seed=True),
        OrderSpec("weighted_random", 100, seed=1, weights=np.ones(100), replacement=True),
    ):
        order, steps[:] = Order(spec), [0]
        expected = access_sequence(spec, 95)
        steps[:] = [0]
        while not order.approach(95):
            steps.append(0)
        assert sum(steps) == 95
        assert max(steps) <= 12
        assert same(order.sequence(95), expected)
        assert sum(steps) == 95  # all were made before


def test_an_epoch_is_skipped_as_it_is_drawn() -> None:
    for draws_seed in (False, True):
        for num_samples in (None, 50, 60):
            spec = OrderSpec(
                "random", 20, seed=3, num_samples=num_samples, draws_seed=draws_seed,
                loader_draws="every",
            )  # fmt: skip
            in_turn = Order(spec)
            each = [in_turn.sequence(epoch).tolist() for epoch in range(6)]
            assert [access_sequence(spec, epoch).tolist() for epoch in range(6)] == each


def test_too_far_an_epoch_is_refused_at_once() -> None:
    spec = OrderSpec("random", 1000, seed=0)
    with pytest.raises(OrderTooFar, match="10,000,000 epochs would have to be drawn"):
        access_sequence(spec, 10_000_000)
    near = replace(spec, start_epoch=9_999_999)
    assert len(access_sequence(near, 10_000_000)) == 1000


def test_a_copy_of_an_order_leaves_it_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(OrderSpec("random", 20, seed=1))
    order.sequence(5)
    ahead = order.copy()
    for epoch in range(6, 6 + 2 * drawing.ENDS_KEPT):
        ahead.sequence(epoch)
    monkeypatch.setattr(drawing.Drawing, "_skip", None)  # nothing has to be drawn again
    order.sequence(6)
