"""What order a loader's sampler is about to draw, without drawing from anything: `SamplerOrder`.

Stock samplers are read, those of a registered class asked, others copied where that is allowed; all
global generators stand afterwards where they stood before.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hintsd.client.client import Job, explicit_order
from hintsd.client.importance.telling import telling_of
from hintsd.client.known.extending import Unreadable, order_function
from hintsd.client.known.libraries import order_in_library
from hintsd.client.warning import warn_once
from hintsd.orders import samplers
from hintsd.orders.drawing import access_sequence
from hintsd.orders.reading import spec_of
from hintsd.orders.spec import OrderSpec

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

COPIED_MOST: Final = 1 << 27  # indices of a sampler that is copied: as a list, 1 GiB


@dataclass(frozen=True)
class Seat:
    """The attribute that the loader's indices come from: `holder.attribute`.

    That is the sampler in a stock BatchSampler; if there is none, whatever the loader iterates.
    """

    holder: Any
    attribute: str

    @property
    def taken_by(self) -> Any:
        return getattr(self.holder, self.attribute)

    def give(self, stand_in: Any) -> None:
        object.__setattr__(self.holder, self.attribute, stand_in)  # DataLoader's own refuses


def seat_of(loader: DataLoader[Any]) -> Seat:
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    outer = getattr(loader, attribute)
    if samplers.is_plain_batching(outer):
        return Seat(outer, "sampler")
    return Seat(loader, attribute)


class SamplerOrder:
    """A sampler, with all of its loader that bears on the order."""

    def __init__(self, loader: DataLoader[Any], seat: Seat, plain: Callable[[Any], Any]) -> None:
        """`plain` gives the sampler that something put in its place stands for."""
        self._plain = plain
        self.sampler: Any = plain(seat.taken_by)
        self.batching: tuple[int, bool] | None = None
        self.outer: Any = None
        """What the loader iterates, if not the sampler."""
        if samplers.is_plain_batching(seat.holder):
            self.outer = seat.holder
            self.batching = seat.holder.batch_size, seat.holder.drop_last
        self.dataset = loader.dataset
        self.generator = loader.generator
        self.persistent_workers = loader.persistent_workers
        self.batches_ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self.draws_at_next = samplers.is_rebatching(self.sampler) or inspect.isgeneratorfunction(
            getattr(type(self.sampler), "__iter__", None)
        )
        self.yields_batches = False
        self.batch_ends: np.ndarray[Any, Any] | None = None
        """Of a sampler with batches of several lengths: samples before each batch; the spec's
        batches are of one sample then."""
        self.sampler_epoch: int | None = None
        """A DistributedSampler's, in the epoch before."""
        self._are_weights_told = False
        self.telling = telling_of(self.sampler, self.dataset, self.batching)
        self.told_by = order_function(self.sampler) or order_in_library(self.sampler)
        """What gives the indices of the epoch that begins, of a class that is registered."""
        self.epoch = 0
        """The next one. A DistributedSampler's own numbers are used as long as they rise."""
        self.epoch = self._next_epoch()

    def new_scores(self, spec: OrderSpec) -> np.ndarray[Any, Any] | None:
        """How often each sample is expected to be used in an epoch that is not drawn yet, shape
        (samples,); None: all alike, or as was told before.
        """
        if spec.weights is None or self._are_weights_told:
            return None
        self._are_weights_told = True
        weights = np.asarray(spec.weights, np.float64)
        most = np.inf if spec.replacement else 1
        uses = weights * (spec.num_samples or len(weights)) / weights.sum()
        scores = np.zeros(len(self.dataset))  # type: ignore[arg-type]  # a map-style dataset has one
        scores[: len(uses)] = uses.clip(max=most)[: len(scores)]
        return scores

    def drawn_ahead(self, spec: OrderSpec) -> int:
        """Samples of the epoch that begins, or will, which workers may hold, or have been given."""
        if self.batch_ends is None:
            return self.batches_ahead * spec.batch_size
        return self.batches_ahead * int(np.diff(self.batch_ends).max(initial=1))

    def begin(self, epoch: int) -> None:
        """This epoch is drawn now."""
        self.epoch = epoch + 1
        self._look_for_set_epoch()

    def _look_for_set_epoch(self) -> None:
        """One warning where each epoch of a DistributedSampler has the same order."""
        if not samplers.is_distributed(self.sampler) or not self.sampler.shuffle:
            return
        if self.sampler.epoch == self.sampler_epoch:
            warn_once(
                "set_epoch of the DistributedSampler was not called since the epoch before: both "
                "have the same order",
                "set_epoch",
            )
        self.sampler_epoch = int(self.sampler.epoch)

    def _next_epoch(self) -> int:
        if samplers.is_distributed(self.sampler):
            return max(self.epoch, int(self.sampler.epoch))
        if self.telling is not None:
            return max(self.epoch, self.telling.epoch)
        return self.epoch

    def stock_spec(self, *, base_seed_drawn: bool) -> OrderSpec | None:
        """Of a stock sampler, read without drawing; None: of unknown code."""
        from torch.utils.data import BatchSampler

        return spec_of(
            self.sampler,
            None if self.batching is None else BatchSampler(self.sampler, *self.batching),
            self.generator,
            start_epoch=self._next_epoch(),
            length=len(self.dataset),  # type: ignore[arg-type]  # a map-style dataset has one
            base_seed_drawn=base_seed_drawn,
            persistent_workers=self.persistent_workers,
        )

    def rebatched_spec(self) -> OrderSpec | None:
        """Of what gives out the batches of a stock BatchSampler anew; None: of unknown code."""
        if not samplers.is_rebatching(self.sampler):
            return None
        from torch.utils.data import BatchSampler

        inner = samplers.batching_within(self.sampler)
        if not samplers.is_plain_batching(inner):
            return None
        sampler, epoch = self._plain(inner.sampler), self._next_epoch()
        spec = spec_of(sampler, None, self.generator, start_epoch=epoch)
        if spec is None:
            return None
        indices = access_sequence(spec, epoch).tolist()
        batches = BatchSampler(indices, inner.batch_size, inner.drop_last)
        return self._listed(list(samplers.rebatched(self.sampler, batches)))

    def spec(self, job: Job) -> OrderSpec | None:
        """The order of the epoch that begins now. None: there is none, and the job was closed."""
        return self._read(job, self.begun)

    def begun(self) -> OrderSpec:
        """The order of the epoch that begins now. Exception: `untold` says why there is none."""
        if self.telling is not None:
            return self.telling.begun(self._next_epoch())
        stock = self.stock_spec(base_seed_drawn=True) or self.rebatched_spec()
        if stock is None and self.told_by is not None:
            with generators_kept(), _no_collectives():
                return self._listed(list(self.told_by(self.sampler)))
        return stock or self._listed(self._read_copy(self.sampler))

    def untold(self, error: Exception) -> str:
        return f"the order of {type(self.sampler).__name__} cannot be told ({error!r})"

    def resumed(self, job: Job, indices: Any) -> tuple[OrderSpec | None, int]:
        """As `spec`, of an iterator of the sampler that has just taken a state, and how many
        indices of that order are behind it."""
        drawn = 0

        def read() -> OrderSpec | None:
            nonlocal drawn
            stock = self.stock_spec(base_seed_drawn=True)
            if stock is None or samplers.random_kind(self.sampler) != samplers.RESUMING:
                left = self._read_copy(indices)
                return self._listed(left) if left else None
            state = indices.state_dict()
            drawn = int(state["yielded"])
            return replace(stock, generator_state=state["generator"].numpy().tobytes())

        return self._read(job, read), drawn

    def _read(self, job: Job, read: Callable[[], OrderSpec | None]) -> OrderSpec | None:
        try:
            return read()
        except Exception as error:
            job.give_up(self.untold(error))
            return None

    def _read_copy(self, original: Any) -> list[Any]:
        """What a copy of the sampler, or of its iterator, yields."""
        if len(self.sampler) > COPIED_MOST:
            raise ValueError(f"it is longer than {COPIED_MOST}")
        with generators_kept(), _no_collectives():
            twin = copy.deepcopy(original, _shared_datasets(self.sampler, self.dataset))
            return list(itertools.islice(iter(twin), len(self.sampler)))

    def _listed(self, items: list[Any]) -> OrderSpec:
        """Of the indices, or batches of indices, that the sampler will yield."""
        length = len(self.dataset)  # type: ignore[arg-type]  # a map-style dataset has one
        batch_size, drop_last = self.batching or (1, False)
        self.batch_ends = None
        self.yields_batches = bool(items) and hasattr(items[0], "__len__") and np.ndim(items[0]) > 0
        if self.yields_batches:
            sizes = np.array([len(batch) for batch in items])
            if (sizes[:-1] == sizes[0]).all() and sizes[-1] <= sizes[0]:
                batch_size = int(sizes[0])
            else:
                self.batch_ends = np.concatenate([[0], np.cumsum(sizes)])
            items = list(itertools.chain.from_iterable(items))
        indices = np.fromiter(map(int, items), np.int64, len(items))
        indices[indices < 0] += length
        return explicit_order(indices, self._next_epoch(), batch_size, drop_last, length)


def _shared_datasets(sampler: Any, dataset: Any) -> dict[int, Any]:
    """A memo for deepcopy that keeps it from copying datasets along with the sampler."""
    from torch.utils.data import Dataset, Sampler

    memo: dict[int, Any] = {id(dataset): dataset}
    todo, seen = [sampler], set()
    while todo:
        inner = todo.pop()
        seen.add(id(inner))
        for value in getattr(inner, "__dict__", {}).values():
            if isinstance(value, Dataset):
                memo[id(value)] = value
            elif isinstance(value, Sampler) and id(value) not in seen:
                todo.append(value)
    return memo


@contextmanager
def generators_kept() -> Iterator[None]:
    """All global generators stand afterwards where they stood before."""
    import torch

    on_cpu, in_python = torch.get_rng_state(), random.getstate()
    in_numpy = np.random.get_state(legacy=False)
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch's own
    on_cuda = torch.cuda.get_rng_state_all() if has_cuda else None
    try:
        yield
    finally:
        torch.set_rng_state(on_cpu)
        np.random.set_state(in_numpy)
        random.setstate(in_python)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)


def _no_collectives() -> Any:
    """A context in which torch.distributed refuses to communicate: another rank, without hints,
    would not take part in what the copy of a sampler does, and all would wait for ever."""
    import torch

    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return nullcontext()
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                raise Unreadable("it communicates with other processes")
            return func(*args, **(kwargs or {}))

    return Refuse()  # type: ignore[no-untyped-call]  # as above
