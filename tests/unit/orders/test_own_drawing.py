"""What is drawn here is what torch draws, and leaves the generator as torch does."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hintsd.orders import _mt19937  # noqa: E402  (torch may be missing)
from hintsd.orders.drawing import Drawing, NoTorch, Order  # noqa: E402
from hintsd.orders.own_drawing import OwnDrawing, OwnGenerator, needs_torch  # noqa: E402
from hintsd.orders.spec import OrderSpec  # noqa: E402

EPOCHS = 4


class NoDrawing(Drawing):
    """What must not be asked."""

    def generator(self, state: bytes | None, seed: int | None) -> OwnGenerator:
        raise AssertionError


def used_state(source: random.Random) -> bytes:
    """Of a generator that has drawn normal numbers, too, which it keeps one of."""
    generator = torch.Generator()
    generator.manual_seed(source.randrange(2**64))
    torch.empty(source.randrange(2000)).uniform_(generator=generator)
    torch.empty(source.randrange(3)).normal_(generator=generator)
    return bytes(generator.get_state().numpy().tobytes())


def random_spec(source: random.Random) -> OrderSpec:
    length = source.choice([1, 2, 3, 100, 623, 624, 625, 5000])
    if source.random() < 0.25:
        ranks = source.randint(1, 5)
        return OrderSpec(
            "distributed",
            length,
            seed=source.choice([0, -1, 2**40, 2**63 - 9]),
            world_size=ranks,
            rank=source.randrange(ranks),
            drop_last=source.random() < 0.5 and length >= ranks,
        )
    told = replace(
        OrderSpec("random", length, seed=source.choice([0, 1, -7, 2**32, 2**64 - 1])),
        start_epoch=source.choice([0, 3]),
        batch_size=source.choice([1, 7]),
        loader_draws=source.choice(["never", "first", "later", "every"]),
    )
    if source.random() < 0.5:
        told = replace(told, seed=None, generator_state=used_state(source))
    kind = source.choice(["plain", "some", "many", "again", "seed", "subset"])
    if kind == "subset":
        picked = np.array(source.choices(range(length), k=source.randint(1, 50)), np.int64)
        return replace(told, sampler="subset_random", indices=picked)
    if kind == "plain":
        return told
    if kind == "seed":
        return replace(told, draws_seed=True)
    count = source.randint(1, length) if kind == "some" else source.randint(1, 3 * length)
    return replace(told, num_samples=count, replacement=kind == "again")


@pytest.mark.claim("P4")
@pytest.mark.parametrize("seed", range(200))
def test_all_that_torch_draws(seed: int) -> None:
    spec = random_spec(random.Random(seed))
    assert not needs_torch(spec)
    epochs = range(spec.start_epoch, spec.start_epoch + EPOCHS)
    ours, torchs = OwnDrawing(NoDrawing()), Drawing()
    drawn, expected = ours.sequences(spec, epochs, None), torchs.sequences(spec, epochs, None)
    for (found, end), (known, end_known) in zip(drawn, expected, strict=True):
        assert found.dtype == known.dtype
        assert found.tolist() == known.tolist()
        assert end == end_known
    if spec.sampler == "distributed":
        return
    end = ours.skip(spec, epochs[:2], None)
    assert end == drawn[1][1]
    [(again, _)] = ours.sequences(spec, epochs[2:3], end)
    assert again.tolist() == drawn[2][0].tolist()


@pytest.mark.parametrize("length", [100_000, 1_300_000])
def test_long_ones(length: int) -> None:
    spec = OrderSpec("random", length, seed=5)
    assert np.array_equal(Order(spec, OwnDrawing(NoDrawing())).sequence(1), Order(spec).sequence(1))


@pytest.mark.parametrize("below", [1, 3, 2**16, 2**27 + 1, 2**28 - 1])
def test_numbers_below_large_bounds(below: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(9)
    expected = torch.randint(below, (1000,), generator=generator)
    assert OwnGenerator(None, 9).numbers(below, 1000).tolist() == expected.tolist()


def test_weighted_orders_are_torch_s() -> None:
    weighted = OrderSpec("weighted_random", 9, seed=1, num_samples=5, weights=np.arange(1.0, 10.0))
    spec = replace(weighted, replacement=True)
    assert needs_torch(spec)
    found = Order(spec, OwnDrawing(Drawing())).sequence(0)
    assert found.tolist() == Order(spec).sequence(0).tolist()
    with pytest.raises(AssertionError):
        Order(spec, OwnDrawing(NoDrawing())).sequence(0)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Order(OrderSpec("distributed", 50, seed=2)).sequence(0).tolist()
    monkeypatch.setitem(sys.modules, "torch", None)
    drawing = OwnDrawing(Drawing())
    found = Order(OrderSpec("distributed", 50, seed=2), drawing).sequence(0)
    assert found.tolist() == known
    weighted = OrderSpec("weighted_random", 2, seed=1, num_samples=2, weights=np.ones(2))
    with pytest.raises(NoTorch, match="torch has to compute this order"):
        Order(weighted, drawing).sequence(0)


def test_what_is_left_to_torch() -> None:
    assert not needs_torch(OrderSpec("random", seed=1)), "its length is not known yet"
    assert not needs_torch(OrderSpec("distributed", 1 << 27, seed=1))
    assert needs_torch(OrderSpec("random", (1 << 27) + 1, seed=1))
    assert not needs_torch(OrderSpec("random", 2, seed=1, num_samples=2048))
    assert needs_torch(OrderSpec("random", 2, seed=1, num_samples=2050))


STATE = _mt19937.seeded(1)
NUMBERS = np.empty(3, np.int64)
READ_ONLY = np.empty(3, np.int64)
READ_ONLY.flags.writeable = False


def _state(left: int, following: int, seeded: int = 1) -> bytes:
    parts = np.array([left, seeded], np.int32).tobytes() + np.uint64(following).tobytes()
    return STATE[:8] + parts + STATE[24:]


BAD: dict[str, tuple[type[Exception], Callable[[], object]]] = {
    "short": (ValueError, lambda: _mt19937.draw_seed(STATE[:-1])),
    "not seeded": (ValueError, lambda: _mt19937.draw_seed(_state(1, 0, 0))),
    "none left": (ValueError, lambda: _mt19937.permute(_state(0, 624), NUMBERS)),
    "too many left": (ValueError, lambda: _mt19937.permute(_state(625, 0), NUMBERS)),
    "behind the words": (ValueError, lambda: _mt19937.permute(_state(10, 616), NUMBERS)),
    "far behind": (ValueError, lambda: _mt19937.permute(_state(1, 2**64 - 1), NUMBERS)),
    "below 0": (ValueError, lambda: _mt19937.draw(STATE, 0, NUMBERS)),
    "below too much": (ValueError, lambda: _mt19937.draw(STATE, 2**28, NUMBERS)),
    "below far too much": (ValueError, lambda: _mt19937.draw(STATE, 2**32 + 5, NUMBERS)),
    "below 0 by far": (ValueError, lambda: _mt19937.draw(STATE, -(2**32) + 5, NUMBERS)),
    "read-only": (ValueError, lambda: _mt19937.permute(STATE, READ_ONLY)),
    "32 bits": (ValueError, lambda: _mt19937.permute(STATE, NUMBERS.astype(np.int32))),
    "every second": (ValueError, lambda: _mt19937.permute(STATE, np.empty(6, np.int64)[::2])),
    "no seed": (TypeError, lambda: _mt19937.seeded("1")),  # type: ignore[arg-type]
    "a large seed": (OverflowError, lambda: OwnGenerator(None, 2**64)),
    "a small seed": (OverflowError, lambda: OwnGenerator(None, -(2**63) - 1)),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_state_and_no_room_is_refused(kind: str) -> None:
    error, call = BAD[kind]
    with pytest.raises(error):
        call()


def test_a_state_at_its_end() -> None:
    """All words are used: they are made anew first."""
    used = _state(1, 624)
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(np.frombuffer(used, np.uint8).copy()))
    assert _mt19937.permute(used, NUMBERS)
    assert NUMBERS.tolist() == torch.randperm(3, generator=generator).tolist()
