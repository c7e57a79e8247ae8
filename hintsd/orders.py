"""Orders: which sample a training job reads when, element by element as torch yields it.

An `OrderSpec` says what the stock samplers of `torch.utils.data` (and a `DataLoader` around them)
start from: a seed or the state of a generator, lengths, weights, ranks. `Drawing` makes the calls
that they make, on the same kind of generator, so torch itself computes each order. torch is
imported when the first order is drawn, not before; hintsd has a process of its own for that
(torch_process.py).

When a sampler draws (torch/utils/data/sampler.py and dataloader.py; it is the same with and without
worker processes, because samplers and `BatchSampler` are Python generators that run at the first
`next`):

1. `iter(loader)` draws a base seed for the workers from the loader's generator. With persistent
   workers only the first `iter` does. See `LoaderDraws`.
2. The first batch makes the sampler draw. A `RandomSampler` without a generator draws a seed from
   torch's default generator, and orders with a new generator of that seed.
3. After its last index `RandomSampler` draws one permutation more whenever `num_samples` is a
   multiple of `length`, and uses nothing of it. The next epoch starts behind that.

Epochs beyond the first are exact only when each epoch is read to its end, since an iterator
that is left early has not made all of its draws. What becomes of a generator that others draw from,
too (torch's default generator), nobody can tell: `epochs_known` is 1 then.

INVARIANT: an `OrderSpec` that exists is valid; no later step checks its fields again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from hintsd import samplers

if TYPE_CHECKING:
    import torch

SamplerKind = Literal[
    "sequential", "random", "distributed", "subset_random", "weighted_random", "indices"
]
LoaderDraws = Literal["never", "first", "later", "every"]
"""Before which epochs a DataLoader draws its base seed from the generator of the sampler:
`first`: `start_epoch` alone (persistent workers), `later`: all but `start_epoch` (its base seed was
drawn before `generator_state` was read), `every`: `first` and `later`."""
Indices = npt.NDArray[np.int64]

LENGTH_MOST: Final = 2**32 - 2
WORLD_SIZE_MOST: Final = 65536
EPOCH_MOST: Final = 2**32
SEED_LEAST: Final = -(2**63)  # what torch.Generator.manual_seed takes
SEED_MOST: Final = 2**64 - 1
GENERATOR_STATE_BYTES: Final = 5056  # torch.Generator.get_state() on a CPU (mt19937)
MT19937_WORDS: Final = 624
ENDS_KEPT: Final = 8
EPOCH_DRAWS: Final = 1 << 10  # what an epoch costs besides its draws, in draws
WEIGHTED_DRAWS: Final = 8  # what an index of a WeightedRandomSampler costs, in draws
DRAWS_MOST: Final = 1 << 33  # before an epoch: two to ten minutes
SLICE_DRAWS: Final = 1 << 22  # at a time: some hundredths of a second
SEQUENCES_KEPT: Final = 2

_DRAWING: Final = frozenset({"random", "subset_random", "weighted_random"})


class OrderUnknown(ValueError):
    """The order of this epoch does not follow from the spec."""


class NoTorch(OrderUnknown):
    """This Python cannot compute it; another one could."""

    def __init__(self) -> None:
        super().__init__(
            f"this order has to be computed, and hintsd's Python ({sys.executable}) has no torch: "
            "pip install torch there"
        )


class OrderLost(OrderUnknown):
    """Who was to compute it has ended, or hung."""


class OrderTooFar(ValueError):
    """Too much is drawn before this epoch."""


@dataclass(frozen=True, eq=False)
class OrderSpec:
    """What an order is computed from. ValueError: a field is out of bounds (the message names it).

    `length` is the number of elements that the sampler chooses among (`len(data_source)`,
    `len(weights)`); for `subset_random` and `indices` it bounds the values.
    """

    sampler: SamplerKind
    length: int
    seed: int | None = None
    """`Generator.manual_seed` at `start_epoch`; a DistributedSampler seeds with seed + epoch."""
    generator_state: bytes | None = None
    """`torch.Generator.get_state()` at `start_epoch`, instead of `seed`."""
    draws_seed: bool = False
    """The generator only gives the seed of the one that orders (RandomSampler(generator=None))."""
    loader_draws: LoaderDraws = "never"
    replacement: bool = False
    num_samples: int | None = None
    """Of RandomSampler and WeightedRandomSampler; None: `length`."""
    weights: npt.NDArray[np.float64] | None = None
    indices: Indices | None = None
    """SubsetRandomSampler's indices; of kind `indices` the order itself."""
    world_size: int = 1
    rank: int = 0
    shuffle: bool = True
    drop_last: bool = False
    """DistributedSampler's: drop the tail that does not fill all ranks (else: pad)."""
    batch_size: int = 1
    batch_drop_last: bool = False
    """BatchSampler's: an incomplete last batch is not read."""
    start_epoch: int = 0
    """The epoch that `seed` or `generator_state` belongs to."""
    epochs_known: int | None = None
    """How many epochs from `start_epoch` on are known; None: all."""

    def __post_init__(self) -> None:
        _require(self.sampler in get_args(SamplerKind), "sampler", "is not a stock sampler")
        _in_bounds("length", self.length, 1, LENGTH_MOST)
        _in_bounds("world_size", self.world_size, 1, WORLD_SIZE_MOST)
        _in_bounds("rank", self.rank, 0, self.world_size - 1)
        _in_bounds("batch_size", self.batch_size, 1, LENGTH_MOST)
        _in_bounds("start_epoch", self.start_epoch, 0, EPOCH_MOST)
        if self.epochs_known is not None:
            _in_bounds("epochs_known", self.epochs_known, 1, EPOCH_MOST)
        if self.seed is not None:
            _in_bounds("seed", self.seed, SEED_LEAST, SEED_MOST)
        if self.num_samples is not None:
            _in_bounds("num_samples", self.num_samples, 1, LENGTH_MOST)
        _require(
            self.loader_draws in get_args(LoaderDraws),
            "loader_draws",
            f"is none of {', '.join(get_args(LoaderDraws))}",
        )
        if self.generator_state is not None:
            _check_state(self.generator_state)
        if self.sampler in _DRAWING:
            _require(
                (self.seed is None) != (self.generator_state is None),
                "seed",
                "or generator_state must be given, one of them",
            )
        if self.sampler == "distributed" and self.shuffle:
            _require(self.seed is not None, "seed", "must be given")
        if self.sampler == "weighted_random":
            self._check_weights()
        if self.sampler in ("subset_random", "indices"):
            self._check_indices()

    def _check_weights(self) -> None:
        weights = self.weights
        if weights is None or weights.dtype != np.float64 or weights.ndim != 1:
            raise ValueError("weights must be given: a row of 64-bit floats")
        _require(len(weights) == self.length, "weights", "are not `length` many")
        _require(
            bool(np.isfinite(weights).all() and (weights >= 0).all()),
            "weights",
            "must be finite and not negative",
        )
        with np.errstate(over="ignore"):
            total = float(weights.sum())
        _require(0 < total < math.inf, "weights", "must have a positive, finite sum")
        _require(
            self.replacement or (self.num_samples or self.length) <= self.length,
            "num_samples",
            "exceeds length, without replacement",
        )

    def _check_indices(self) -> None:
        indices = self.indices
        if indices is None or indices.dtype != np.int64 or indices.ndim != 1:
            raise ValueError("indices must be given: a row of 64-bit integers")
        _in_bounds("indices", len(indices), 1, LENGTH_MOST)
        _require(
            int(indices.min()) >= 0 and int(indices.max()) < self.length,
            "indices",
            f"must lie in 0 … {self.length - 1}",
        )


def _require(holds: bool, name: str, fault: str) -> None:
    if not holds:
        raise ValueError(f"{name} {fault}")


def _in_bounds(name: str, value: int, least: int, most: int) -> None:
    _require(least <= value <= most, name, f"must lie in {least} … {most}")


def _check_state(state: bytes) -> None:
    """Of a mt19937 as torch lays it out: u64 seed, i32 left, i32 seeded, u64 next, u64 words[624].

    torch checks less: a state with too large a `next` makes it read behind the words.
    """
    _require(len(state) == GENERATOR_STATE_BYTES, "generator_state", "has the wrong length")
    left, seeded = (int(number) for number in np.frombuffer(state, "<i4", count=2, offset=8))
    following = int(np.frombuffer(state, "<u8", count=1, offset=16)[0])
    _require(
        seeded == 1 and 1 <= left <= MT19937_WORDS and following + left <= MT19937_WORDS + 1,
        "generator_state",
        "is not the state of a CPU generator",
    )


def needs_torch(spec: OrderSpec) -> bool:
    """Whether its order is drawn."""
    return spec.sampler in _DRAWING or (spec.sampler == "distributed" and spec.shuffle)


def samples_per_epoch(spec: OrderSpec) -> int:
    """The length of every `access_sequence` of it. Computes no order."""
    if spec.indices is not None and spec.sampler in ("subset_random", "indices"):
        count = len(spec.indices)
    elif spec.sampler == "distributed":
        count = _rank_samples(spec)
    elif spec.sampler == "sequential":
        count = spec.length
    else:
        count = spec.num_samples or spec.length
    return count - count % spec.batch_size if spec.batch_drop_last else count


def epochs_at_once(samples: int) -> int:
    """Epochs of so many samples that are drawn in a moment; at least one."""
    return max(1, SLICE_DRAWS // (EPOCH_DRAWS + samples) // 16)


def access_sequence(spec: OrderSpec, epoch: int) -> Indices:
    """The indices that torch yields in this epoch, in order: int64, `samples_per_epoch` of them.

    OrderUnknown: the epoch is not one that the spec tells, or there is no torch (NoTorch).
    ValueError: torch refuses the spec.
    Costs the draws of all epochs from `start_epoch` on where one generator goes on from epoch to
    epoch; going through them in turn, `Order` spares that. OrderTooFar: they are too many.
    """
    return Order(spec).sequence(epoch)


class Drawing:
    """torch, in this process.

    An *end* is how a spec's generator stood when the last index of an epoch was drawn
    (`torch.Generator.get_state()`); None: before `start_epoch`, and of a DistributedSampler.

    ImportError: there is no torch. RuntimeError, OverflowError: torch refuses the spec.
    """

    def sequences(
        self, spec: OrderSpec, epochs: range, end: bytes | None
    ) -> list[tuple[Indices, bytes | None]]:
        """What is read in each of these epochs, and its end. `end`: of the epoch before them."""
        count = samples_per_epoch(spec)
        if spec.sampler == "distributed":
            return [(_distributed(spec, epoch)[:count], None) for epoch in epochs]
        generator = _generator_at(spec, end)
        drawn: list[tuple[Indices, bytes | None]] = []
        for epoch in epochs:
            _begin(spec, epoch, generator)
            drawn.append((_draw(spec, generator)[:count], _state_of(generator)))
        return drawn

    def skip(self, spec: OrderSpec, epochs: range, end: bytes | None) -> bytes:
        """The end of the last one of these epochs."""
        generator = _generator_at(spec, end)
        for epoch in epochs:
            _begin(spec, epoch, generator)
            _skip(spec, generator)
        return _state_of(generator)


class Order:
    """The sequences of one spec, remembering where its generator stood. For one thread."""

    def __init__(self, spec: OrderSpec, drawing: Drawing | None = None) -> None:
        """`drawing`: who has torch; None: this process."""
        self.spec = spec
        self._drawing = drawing or Drawing()
        self._sequences: dict[int, Indices] = {}  # by epoch, the latest used last
        self._ends: dict[int, bytes] = {}  # by epoch

    def sequence(self, epoch: int) -> Indices:
        """As `access_sequence`; the array is shared, thus read-only."""
        found = self._sequences.pop(epoch, None)
        if found is None:
            self._check_known(epoch)
            self._make_room()
            found = self._compute(epoch)
            found.flags.writeable = False
        self._sequences[epoch] = found
        return found

    def draw_ahead(self, epochs: Sequence[int]) -> None:
        """Draw these, as far as each follows the one before, at once: `sequence` of them costs
        nothing until another one is drawn. As `sequence` raises.
        """
        first, stop = epochs[0], epochs[0] + 1
        self._check_known(first)
        if needs_torch(self.spec) and first not in self._sequences:
            self._make_room()
            while not self.approach(first):
                pass
            while stop - first < len(epochs) and epochs[stop - first] == stop <= self._last_known():
                stop += 1
            self._draw(range(first, stop))

    def _make_room(self) -> None:
        # Before one comes: three orders at a time would be 100 MB more than needed for 14 million.
        while len(self._sequences) >= SEQUENCES_KEPT:
            del self._sequences[next(iter(self._sequences))]

    def _first_known(self) -> int:
        spec = self.spec
        return spec.start_epoch if spec.sampler in _DRAWING or spec.epochs_known else 0

    def _last_known(self) -> int:
        known = self.spec.epochs_known
        return EPOCH_MOST if known is None else self._first_known() + known - 1

    def _check_known(self, epoch: int) -> None:
        first, last = self._first_known(), self._last_known()
        if not first <= epoch <= last:
            raise OrderUnknown(f"the order of epoch {epoch} is not known, only of {first} … {last}")

    def _compute(self, epoch: int) -> Indices:
        spec = self.spec
        if needs_torch(spec):
            while not self.approach(epoch):
                pass
            self._draw(range(epoch, epoch + 1))
            return self._sequences.pop(epoch)
        count = samples_per_epoch(spec)
        if spec.sampler == "sequential":
            return np.arange(spec.length, dtype=np.int64)[:count]
        if spec.sampler == "distributed":
            return _distributed(spec, epoch)[:count]
        assert spec.indices is not None
        return spec.indices[:count]

    def _draw(self, epochs: range) -> None:
        """There are no other draws before the first of these epochs."""
        with _torch_faults():
            drawn = self._drawing.sequences(self.spec, epochs, self._end_before(epochs[0]))
        for epoch, (sequence, end) in zip(epochs, drawn):
            sequence.flags.writeable = False
            self._sequences.pop(epoch, None)  # the latest used last
            self._sequences[epoch] = sequence
            if end is not None:
                self._note_end(epoch, end)

    def approach(self, epoch: int) -> bool:
        """Make some of the draws before this epoch: as many as take a moment.

        True: there are no others; `sequence` costs one epoch. OrderTooFar; or as `sequence` raises.
        """
        spec = self.spec
        if epoch in self._sequences:
            return True
        self._check_known(epoch)
        if spec.sampler not in _DRAWING:
            return True
        first = max((end + 1 for end in self._ends if end < epoch), default=spec.start_epoch)
        costs = EPOCH_DRAWS + _draws_to_skip(spec)
        if (epoch - first) * costs > DRAWS_MOST:
            raise OrderTooFar(
                f"{epoch - first:,} epochs would have to be drawn before it, more than "
                f"{DRAWS_MOST // costs:,}: if it is right, tell each epoch its order by itself"
            )
        stop = min(epoch, first + max(1, SLICE_DRAWS // costs))
        if first < stop:
            with _torch_faults():
                end = self._drawing.skip(spec, range(first, stop), self._end_before(first))
            self._note_end(stop - 1, end)
        return stop == epoch

    def copy(self) -> Order:
        """One that knows where the generator stood, too, and goes its own way from there."""
        other = Order(self.spec, self._drawing)
        other._ends = dict(self._ends)
        return other

    def _end_before(self, epoch: int) -> bytes | None:
        """`epoch` is the first one, or the one before has been drawn."""
        is_first = self.spec.sampler not in _DRAWING or epoch == self.spec.start_epoch
        return None if is_first else self._ends[epoch - 1]

    def _note_end(self, epoch: int, end: bytes) -> None:
        self._ends[epoch] = end
        while len(self._ends) > ENDS_KEPT:
            del self._ends[next(old for old in sorted(self._ends) if old != epoch)]


@contextmanager
def _torch_faults() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise NoTorch from error
    except (RuntimeError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"torch refuses this order: {reason}") from error


def _generator_at(spec: OrderSpec, end: bytes | None) -> torch.Generator:
    """The spec's generator at the end of an epoch; None: at the beginning."""
    import torch

    generator = torch.Generator()
    state = spec.generator_state if end is None else end
    if state is not None:
        generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
    else:
        assert spec.seed is not None
        generator.manual_seed(spec.seed)
    return generator


def _state_of(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()


def _begin(spec: OrderSpec, epoch: int, generator: torch.Generator) -> None:
    """What is drawn between the last index of the epoch before and the first one of this."""
    if epoch > spec.start_epoch:
        _finish(spec, generator)
    which = "first" if epoch == spec.start_epoch else "later"
    if spec.loader_draws in (which, "every"):
        _draw_seed(generator)


def _draw_seed(generator: torch.Generator) -> int:
    """As DataLoader draws its base seed, and RandomSampler the seed of its own generator."""
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _draw(spec: OrderSpec, generator: torch.Generator) -> Indices:
    """The indices of one epoch, with no draw behind the last index (see `_finish`)."""
    import torch

    count = spec.num_samples or spec.length
    if spec.sampler == "subset_random":
        assert spec.indices is not None
        return spec.indices[_array(torch.randperm(len(spec.indices), generator=generator))]
    if spec.sampler == "weighted_random":
        assert spec.weights is not None
        weights = torch.from_numpy(spec.weights.copy())
        drawn = torch.multinomial(weights, count, spec.replacement, generator=generator)
        return _array(drawn)
    source = generator
    if spec.draws_seed:
        source = torch.Generator()
        source.manual_seed(_draw_seed(generator))
    if spec.replacement:
        # torch draws 32 at a time. One call makes the same draws, in a hundredth of the time.
        return _array(torch.randint(spec.length, (count,), dtype=torch.int64, generator=source))
    if count == spec.length:
        return _array(torch.randperm(spec.length, generator=source))
    sequence = np.empty(count, np.int64)
    for begin in range(0, count, spec.length):
        part = sequence[begin : begin + spec.length]
        part[:] = torch.randperm(spec.length, generator=source).numpy()[: len(part)]
    return sequence


def _skip(spec: OrderSpec, generator: torch.Generator) -> None:
    """As `_draw`, of which only the generator matters."""
    if spec.draws_seed:
        _draw_seed(generator)
    else:
        _draw(spec, generator)


def _draws_to_skip(spec: OrderSpec) -> int:
    """About how many draws of an index `_skip` and `_finish` cost."""
    if spec.draws_seed:
        return 0
    if spec.sampler == "subset_random":
        assert spec.indices is not None
        return len(spec.indices)
    count = spec.num_samples or spec.length
    if spec.sampler == "weighted_random":
        return WEIGHTED_DRAWS * count
    permutations = -(-count // spec.length) + 1
    return count if spec.replacement else permutations * (spec.length + EPOCH_DRAWS)


def _finish(spec: OrderSpec, generator: torch.Generator) -> None:
    """What the sampler still draws when it is asked for one index more than it has."""
    import torch

    if spec.sampler != "random" or spec.draws_seed or spec.replacement:
        return
    if (spec.num_samples or spec.length) % spec.length == 0:
        torch.randperm(spec.length, generator=generator)


def _rank_samples(spec: OrderSpec) -> int:
    """DistributedSampler.num_samples."""
    length, world_size = spec.length, spec.world_size
    if spec.drop_last and length % world_size != 0:
        return math.ceil((length - world_size) / world_size)
    return math.ceil(length / world_size)


def _distributed(spec: OrderSpec, epoch: int) -> Indices:
    """DistributedSampler.__iter__: element p of the padded list is element p % length."""
    if spec.shuffle:
        import torch

        assert spec.seed is not None
        generator = torch.Generator()
        generator.manual_seed(spec.seed + epoch)
        everyone = _array(torch.randperm(spec.length, generator=generator))
    else:
        everyone = np.arange(spec.length, dtype=np.int64)
    count = _rank_samples(spec)
    mine = everyone[spec.rank : count * spec.world_size : spec.world_size]
    padding = np.arange(len(mine), count, dtype=np.int64) * spec.world_size + spec.rank
    if len(padding):
        return np.concatenate([mine, everyone[padding % spec.length]])
    return np.ascontiguousarray(mine)  # without the other ranks' parts


def _array(indices: torch.Tensor) -> Indices:
    """The tensor's own memory as an array."""
    array: Indices = indices.numpy()
    return array


def to_message(spec: OrderSpec) -> dict[str, Any]:
    """A map for msgpack (docs/WIRE.md): fields at their default are left out, arrays are
    packed, little-endian (`indices` i64, `weights` f64)."""
    message: dict[str, Any] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, np.ndarray):
            value = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        if value is not field.default and value != field.default:
            message[field.name] = value
    return message


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "sampler": (str,),
    "length": (int,),
    "seed": (int, type(None)),
    "generator_state": (bytes, type(None)),
    "draws_seed": (bool,),
    "loader_draws": (str,),
    "replacement": (bool,),
    "num_samples": (int, type(None)),
    "weights": (bytes, type(None)),
    "indices": (bytes, type(None)),
    "world_size": (int,),
    "rank": (int,),
    "shuffle": (bool,),
    "drop_last": (bool,),
    "batch_size": (int,),
    "batch_drop_last": (bool,),
    "start_epoch": (int,),
    "epochs_known": (int, type(None)),
}
_ARRAY_TYPES: Final = {"weights": "<f8", "indices": "<i8"}


def from_message(message: object) -> OrderSpec:
    """The inverse of `to_message`. ValueError: one line that names the field; nothing else is
    raised, whatever the message holds, and nothing larger than the message is allocated."""
    if not isinstance(message, dict):
        raise ValueError("an order must be a map")
    for name in ("sampler", "length"):
        _require(name in message, name, "is missing")
    values: dict[str, Any] = {}
    for name, value in message.items():
        if not isinstance(name, str):
            raise ValueError("an order's fields are named by strings")
        _require(name in _TYPES, repr(name[:40]), "is not a field of an order")
        # Exactly these: True is an int, too.
        _require(type(value) in _TYPES[name], name, "has the wrong type")
        if name in _ARRAY_TYPES and value is not None:
            _require(len(value) % 8 == 0, name, "is cut short")
            packed = np.frombuffer(value, _ARRAY_TYPES[name])
            value = packed.astype(packed.dtype.newbyteorder("="), copy=False)
        values[name] = value
    return OrderSpec(**values)


def spec_of(
    sampler: object,
    batch_sampler: object | None = None,
    loader_generator: torch.Generator | None = None,
    *,
    start_epoch: int = 0,
    length: int | None = None,
    base_seed_drawn: bool = True,
    persistent_workers: bool = False,
) -> OrderSpec | None:
    """Read a live sampler, of which epoch `start_epoch` comes next, without drawing from anything.

    `sampler`, `batch_sampler` and `loader_generator` are a DataLoader's `sampler`, `batch_sampler`
    and `generator`. To be called right before the epoch's first draw: of the sampler, or with
    `base_seed_drawn=False` of the loader (before `iter(loader)`; a loader whose persistent workers
    run already draws none). `length`: of the dataset, bounds SubsetRandomSampler's indices.

    A DistributedSampler is taken to have `set_epoch` called with numbers that rise by one.
    Of torchdata's and accelerate's random samplers (hintsd/samplers.py) one epoch is known.
    None: none of these samplers (its exact type; a subclass may do anything), or one whose order
    torch does not tell in advance.
    """
    from torch.utils.data import BatchSampler

    batching: dict[str, Any] = {}
    if batch_sampler is not None:
        if type(batch_sampler) is not BatchSampler:
            return None
        sampler = batch_sampler.sampler
        batching["batch_size"] = batch_sampler.batch_size
        batching["batch_drop_last"] = batch_sampler.drop_last
    try:
        read = _read_sampler(sampler, start_epoch, length)
        if read is None:
            return None
        if read["sampler"] in _DRAWING:
            drawing = _read_generator(
                sampler, loader_generator, base_seed_drawn, persistent_workers
            )
            if drawing is None:
                return None
            read |= drawing
        return OrderSpec(**read, **batching, start_epoch=start_epoch)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None  # a data source without a length, negative indices, weights on another device


def _read_sampler(sampler: object, start_epoch: int, length: int | None) -> dict[str, Any] | None:
    from torch.utils.data import (
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    if type(sampler) is SequentialSampler:
        return {"sampler": "sequential", "length": len(sampler.data_source)}
    kind: Any = sampler
    if type(sampler) is RandomSampler or samplers.random_kind(sampler):
        return {
            "sampler": "random",
            "length": len(kind.data_source),
            "replacement": kind.replacement,
            "num_samples": kind.num_samples,
            "draws_seed": type(sampler) is RandomSampler and sampler.generator is None,
        }
    if type(sampler) is SubsetRandomSampler:
        indices = np.array(sampler.indices)
        if indices.ndim != 1 or indices.dtype.kind not in "iu" or not len(indices):
            return None
        return {
            "sampler": "subset_random",
            "length": int(indices.max()) + 1 if length is None else length,
            "indices": indices.astype(np.int64),
        }
    if type(sampler) is WeightedRandomSampler:
        weights = sampler.weights.numpy().copy()  # a TypeError when they are not on the CPU
        return {
            "sampler": "weighted_random",
            "length": len(weights),
            "weights": weights,
            "num_samples": sampler.num_samples,
            "replacement": sampler.replacement,
        }
    if samplers.is_distributed(sampler):
        return {
            "sampler": "distributed",
            "length": len(kind.dataset),
            "seed": kind.seed + kind.epoch - start_epoch,
            "world_size": kind.num_replicas,
            "rank": kind.rank,
            "shuffle": kind.shuffle,
            "drop_last": kind.drop_last,
        }
    return None


def _read_generator(
    sampler: Any,
    loader_generator: torch.Generator | None,
    base_seed_drawn: bool,
    persistent_workers: bool,
) -> dict[str, Any] | None:
    import torch
    from torch.utils.data import RandomSampler

    default = torch.default_generator
    resuming = samplers.random_kind(sampler) == samplers.RESUMING
    generator = default if sampler.generator is None else sampler.generator
    if generator.device.type != "cpu":
        return None
    if samplers.random_kind(sampler) == samplers.SEEDING:
        return {"seed": sampler.initial_seed + sampler.epoch, "epochs_known": 1}
    if (
        (sampler.generator is default or (resuming and sampler.generator is loader_generator))
        and (type(sampler) is RandomSampler or resuming)
        and (sampler.replacement or sampler.num_samples > len(sampler.data_source))
    ):
        return None  # it draws all through the epoch, in turn with everybody else
    loader_draws: LoaderDraws = "never"
    if (default if loader_generator is None else loader_generator) is generator:
        if persistent_workers:
            loader_draws = "never" if base_seed_drawn else "first"
        else:
            loader_draws = "later" if base_seed_drawn else "every"
    return {
        "generator_state": generator.get_state().numpy().tobytes(),
        "loader_draws": loader_draws,
        "epochs_known": 1 if generator is default or resuming else None,
    }
