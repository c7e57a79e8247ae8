"""Orders: which sample a training job reads when, element by element as torch yields it.

`Drawing` makes the calls that torch's stock samplers make, on the same kind of generator. Here that
is torch's own, and torch is imported when the first order is drawn, not before. hintsd has one of
its own (own_drawing.py), and torch in another process for what that cannot draw (torch_process.py).

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
that is left early has not made all of its draws.

INVARIANT: an order that is given out is torch's, index by index; what cannot be known is refused.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import numpy as np

from hintsd.orders.spec import (
    EPOCH_MOST,
    GENERATED,
    Indices,
    OrderSpec,
    is_drawn,
    rank_samples,
    samples_per_epoch,
)

if TYPE_CHECKING:
    import torch

ENDS_KEPT: Final = 8
EPOCH_DRAWS: Final = 1 << 10  # what an epoch costs besides its draws, in draws
WEIGHTED_DRAWS: Final = 8  # what an index of a WeightedRandomSampler costs, in draws
DRAWS_MOST: Final = 1 << 33  # before an epoch: two to ten minutes
SLICE_DRAWS: Final = 1 << 22  # at a time: some hundredths of a second
SEQUENCES_KEPT: Final = 2


class OrderUnknown(ValueError):
    """The order of this epoch does not follow from the spec."""


class NoTorch(OrderUnknown):
    """This Python cannot compute it; another one could."""

    def __init__(self) -> None:
        super().__init__(
            f"torch has to compute this order, and hintsd's Python ({sys.executable}) has none: "
            "pip install torch there"
        )


class OrderLost(OrderUnknown):
    """The process that was to compute it has ended, or hung."""


class OrderTooFar(ValueError):
    """Too much is drawn before this epoch."""


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


class Generator(ABC):
    """Of random numbers, torch's: mt19937 (Matsumoto and Nishimura 1998)."""

    @abstractmethod
    def permutation(self, length: int) -> Indices:
        """Of 0 … length - 1."""

    @abstractmethod
    def numbers(self, below: int, count: int) -> Indices:
        """Independent ones, all alike likely."""

    @abstractmethod
    def seed(self) -> int:
        """As DataLoader draws its base seed, and RandomSampler the seed of its own generator."""

    @abstractmethod
    def state(self) -> bytes:
        """As torch.Generator.get_state()."""


class TorchGenerator(Generator):
    """torch's own."""

    def __init__(self, state: bytes | None, seed: int | None) -> None:
        import torch

        self._generator = torch.Generator()
        if state is not None:
            self._generator.set_state(torch.from_numpy(np.frombuffer(state, np.uint8).copy()))
        else:
            assert seed is not None
            self._generator.manual_seed(seed)

    def permutation(self, length: int) -> Indices:
        import torch

        return _array(torch.randperm(length, generator=self._generator))

    def numbers(self, below: int, count: int) -> Indices:
        # torch's samplers draw 32 at a time. One call makes the same draws, in a hundredth of the
        # time.
        import torch

        return _array(torch.randint(below, (count,), dtype=torch.int64, generator=self._generator))

    def weighted(self, spec: OrderSpec, count: int) -> Indices:
        """As WeightedRandomSampler draws."""
        import torch

        assert spec.weights is not None
        weights = torch.from_numpy(spec.weights.copy())
        return _array(
            torch.multinomial(weights, count, spec.replacement, generator=self._generator)
        )

    def seed(self) -> int:
        import torch

        drawn = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
        return int(drawn.item())

    def state(self) -> bytes:
        return self._generator.get_state().numpy().tobytes()


class Drawing:
    """By torch, in this process.

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
            return [(self._distributed(spec, epoch)[:count], None) for epoch in epochs]
        generator = self._generator_at(spec, end)
        drawn: list[tuple[Indices, bytes | None]] = []
        for epoch in epochs:
            _begin(spec, epoch, generator)
            drawn.append((self._draw(spec, generator)[:count], generator.state()))
        return drawn

    def skip(self, spec: OrderSpec, epochs: range, end: bytes | None) -> bytes:
        """The end of the last one of these epochs."""
        generator = self._generator_at(spec, end)
        for epoch in epochs:
            _begin(spec, epoch, generator)
            self._skip(spec, generator)
        return generator.state()

    def generator(self, state: bytes | None, seed: int | None) -> Generator:
        """One in that state; None: with that seed."""
        return TorchGenerator(state, seed)

    def _generator_at(self, spec: OrderSpec, end: bytes | None) -> Generator:
        """The spec's generator at the end of an epoch; None: at the beginning."""
        return self.generator(spec.generator_state if end is None else end, spec.seed)

    def _draw(self, spec: OrderSpec, generator: Generator) -> Indices:
        """The indices of one epoch, with no draw behind the last index (see `_finish`)."""
        count = spec.num_samples or spec.length
        if spec.sampler == "subset_random":
            assert spec.indices is not None
            return spec.indices[generator.permutation(len(spec.indices))]
        if spec.sampler == "weighted_random":
            assert isinstance(generator, TorchGenerator)
            return generator.weighted(spec, count)
        source = self.generator(None, generator.seed()) if spec.draws_seed else generator
        if spec.replacement:
            return source.numbers(spec.length, count)
        if count == spec.length:
            return source.permutation(spec.length)
        sequence = np.empty(count, np.int64)
        for begin in range(0, count, spec.length):
            part = sequence[begin : begin + spec.length]
            part[:] = source.permutation(spec.length)[: len(part)]
        return sequence

    def _skip(self, spec: OrderSpec, generator: Generator) -> None:
        """As `_draw`, of which only the generator matters."""
        if spec.draws_seed:
            generator.seed()
        else:
            self._draw(spec, generator)

    def _distributed(self, spec: OrderSpec, epoch: int) -> Indices:
        assert spec.seed is not None
        return _of_rank(spec, self.generator(None, spec.seed + epoch).permutation(spec.length))


class Order:
    """The sequences of one spec, remembering where its generator stood. For one thread."""

    def __init__(self, spec: OrderSpec, drawing: Drawing | None = None) -> None:
        """`drawing`: who draws; None: torch, in this process."""
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
        if is_drawn(self.spec) and first not in self._sequences:
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
        return spec.start_epoch if spec.sampler in GENERATED or spec.epochs_known else 0

    def _last_known(self) -> int:
        known = self.spec.epochs_known
        return EPOCH_MOST if known is None else self._first_known() + known - 1

    def _check_known(self, epoch: int) -> None:
        first, last = self._first_known(), self._last_known()
        if not first <= epoch <= last:
            raise OrderUnknown(f"the order of epoch {epoch} is not known, only of {first} … {last}")

    def _compute(self, epoch: int) -> Indices:
        spec = self.spec
        if is_drawn(spec):
            while not self.approach(epoch):
                pass
            self._draw(range(epoch, epoch + 1))
            return self._sequences.pop(epoch)
        count = samples_per_epoch(spec)
        if spec.sampler == "sequential":
            return np.arange(spec.length, dtype=np.int64)[:count]
        if spec.sampler == "distributed":
            return _of_rank(spec, np.arange(spec.length, dtype=np.int64))[:count]
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
        if spec.sampler not in GENERATED:
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
        is_first = self.spec.sampler not in GENERATED or epoch == self.spec.start_epoch
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


def _begin(spec: OrderSpec, epoch: int, generator: Generator) -> None:
    """What is drawn between the last index of the epoch before and the first one of this."""
    if epoch > spec.start_epoch:
        _finish(spec, generator)
    which = "first" if epoch == spec.start_epoch else "later"
    if spec.loader_draws in (which, "every"):
        generator.seed()


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


def _finish(spec: OrderSpec, generator: Generator) -> None:
    """What the sampler still draws when it is asked for one index more than it has."""
    if spec.sampler != "random" or spec.draws_seed or spec.replacement:
        return
    if (spec.num_samples or spec.length) % spec.length == 0:
        generator.permutation(spec.length)


def _of_rank(spec: OrderSpec, everyone: Indices) -> Indices:
    """DistributedSampler.__iter__: element p of the padded list is element p % length."""
    count = rank_samples(spec)
    mine = everyone[spec.rank : count * spec.world_size : spec.world_size]
    padding = np.arange(len(mine), count, dtype=np.int64) * spec.world_size + spec.rank
    if len(padding):
        return np.concatenate([mine, everyone[padding % spec.length]])
    return np.ascontiguousarray(mine)  # without the other ranks' parts


def _array(indices: torch.Tensor) -> Indices:
    """The tensor's own memory as an array."""
    array: Indices = indices.numpy()
    return array
