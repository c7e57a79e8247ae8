"""What an order is computed from: a seed or the state of a generator, lengths, weights, ranks.

An `OrderSpec` says what the stock samplers of `torch.utils.data` (and a `DataLoader` around them)
start from. drawing.py computes the order; reading.py reads the spec of a live sampler.

INVARIANT: an `OrderSpec` that exists is valid; no later step checks its fields again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

SamplerKind = Literal[
    "sequential", "random", "distributed", "subset_random", "weighted_random", "indices"
]
LoaderDraws = Literal["never", "first", "later", "every"]
"""Before which epochs a DataLoader draws its base seed from the generator of the sampler:
`first`: `start_epoch` alone (persistent workers), `later`: all but `start_epoch` (its base seed was
drawn before `generator_state` was read), `every`: `first` and `later`."""
Indices = npt.NDArray[np.int64]

LENGTH_MOST: Final = 2**32 - 2
ALL: Final = LENGTH_MOST  # no dataset has so many samples: it is as long as there are files
WORLD_SIZE_MOST: Final = 65536
EPOCH_MOST: Final = 2**32
SEED_LEAST: Final = -(2**63)  # what torch.Generator.manual_seed takes
SEED_MOST: Final = 2**64 - 1
GENERATOR_STATE_BYTES: Final = 5056  # torch.Generator.get_state() on a CPU (mt19937)
MT19937_WORDS: Final = 624
GENERATED: Final = frozenset({"random", "subset_random", "weighted_random"})
"""Samplers whose generator goes on from epoch to epoch."""


@dataclass(frozen=True, eq=False)
class OrderSpec:
    """What an order is computed from. ValueError: a field is out of bounds (the message names it).

    `length` is the number of elements that the sampler chooses among (`len(data_source)`,
    `len(weights)`); for `subset_random` and `indices` it bounds the values.
    """

    sampler: SamplerKind
    length: int = ALL
    """ALL: that of the dataset, until its files are listed."""
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
        if self.sampler in GENERATED:
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

    @property
    def array_bytes(self) -> int:
        """Of its arrays."""
        return sum(one.nbytes for one in (self.indices, self.weights) if one is not None)

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


def is_drawn(spec: OrderSpec) -> bool:
    """Whether its order is drawn."""
    return spec.sampler in GENERATED or (spec.sampler == "distributed" and spec.shuffle)


def samples_per_epoch(spec: OrderSpec) -> int:
    """The length of every `access_sequence` of it. Computes no order."""
    if spec.indices is not None and spec.sampler in ("subset_random", "indices"):
        count = len(spec.indices)
    elif spec.sampler == "distributed":
        count = rank_samples(spec)
    elif spec.sampler == "sequential":
        count = spec.length
    else:
        count = spec.num_samples or spec.length
    return count - count % spec.batch_size if spec.batch_drop_last else count


def rank_samples(spec: OrderSpec) -> int:
    """DistributedSampler.num_samples."""
    length, world_size = spec.length, spec.world_size
    if spec.drop_last and length % world_size != 0:
        return math.ceil((length - world_size) / world_size)
    return math.ceil(length / world_size)


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
