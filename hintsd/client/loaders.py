"""attach: hints for a torch DataLoader, with its order announced at the moment it is drawn.

What cannot be known before (the default generator's state when an epoch begins) is read then: an
`Announcer` takes the place of the sampler inside the loader, looks at it right before its first
draw, hands the order to the job's thread, and lets the sampler go on. Our own samplers are
asked for theirs. A sampler of unknown code is copied, the copy is read to its end, and torch's,
numpy's and Python's generators are put back.

INVARIANT: the loader yields exactly what it would without us, and every generator is left as it
would be. What fails here is one warning, and the loader goes on without hints.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import os
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hintsd.orders import samplers
from hintsd.client.client import (
    Job,
    Path,
    common_root,
    explicit_order,
    listed_files,
    program_name,
    tidy_paths,
    whole_number,
)
from hintsd.client.importance.telling import telling_of
from hintsd.client.datasets import Unreadable, files_of, is_in_memory
from hintsd.client.iterators import drawing_iterator
from hintsd.client.warning import warn_once
from hintsd.orders.drawing import access_sequence
from hintsd.orders.hint import Hint
from hintsd.orders.reading import spec_of
from hintsd.orders.spec import OrderSpec

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# INVARIANT: nothing in a value refers to its key, else no loader would ever be collected.
COPIED_MOST: Final = 1 << 27  # indices of a sampler that is copied: as a list, 1 GiB

_jobs: weakref.WeakKeyDictionary[DataLoader[Any], tuple[Job, Announcer | None]]
_jobs = weakref.WeakKeyDictionary()


def attach(
    loader: DataLoader[Any],
    paths: Sequence[Path] | None = None,
    epochs: int | None = None,
    *,
    copy_sampler: bool = False,
) -> Job:
    """Hint a DataLoader: it is watched from its next epoch on, until the job is closed or the
    loader is gone; a loader that is in a reference cycle goes when Python collects it: job.close()
    ends it at once. Its batches, their order and all random numbers are what they would be without.

    `paths`: the file of each index, for a dataset that is no torchvision ImageFolder or
    DatasetFolder (or Subset or ConcatDataset of such). `epochs`: how many there will be, counted
    from 0. A loader that cannot be hinted is left alone, with one warning; its job `is_over`.
    `copy_sampler`: a sampler that is not torch's own may be copied, and the copy be read to its end
    when an epoch begins. torch's, numpy's and Python's global generators are put back after that;
    a sampler that changes anything else outside of itself would give another order.

    Attached again, a loader gives the job that it has, as long as that one works.
    ValueError: `epochs` is no positive number, or `paths` are no paths, or not as many as the
    dataset has samples.
    """
    epochs = None if epochs is None else whole_number("epochs", epochs, 1)
    if not hasattr(loader, "dataset") or not hasattr(loader, "batch_sampler"):
        kind = type(loader).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        warn_once(f"attach takes a torch DataLoader, not {article} {kind}; going on without hints")
        return Job(None)
    loader = samplers.iterated_loader(loader)
    known = _jobs.get(loader)
    if known is not None:
        job, announcer = known
        if not job.is_over and announcer is not None and announcer is _seat(loader).taken_by:
            return job
        job.close()
    dataset: Any = loader.dataset
    tidy = None if paths is None else tidy_paths(paths, os.getcwd())
    if tidy is not None and hasattr(dataset, "__len__") and len(tidy) != len(dataset):
        raise ValueError(f"{len(tidy)} paths for a dataset of {len(dataset)} samples")
    try:
        made = _attach(loader, tidy, epochs, copy_sampler)
    except Unreadable as problem:
        warn_once(f"{problem}; going on without hints")
        made = Job(None), None
    except Exception as error:  # a dataset or sampler that does not behave
        warn_once(f"this DataLoader cannot be read ({error!r}); going on without hints")
        made = Job(None), None
    _jobs[loader] = made
    return made[0]


def attach_unasked(loader: DataLoader[Any]) -> None:
    """`attach` on behalf of `hintsd run`: not in DataLoader workers, not again what has failed or
    was closed, and not what reads no files. Never raises."""
    try:
        import torch.utils.data

        if torch.utils.data.get_worker_info() is not None:
            return
        known = _jobs.get(loader)
        if known is None and is_in_memory(loader.dataset):
            logging.getLogger("hintsd").info("a dataset in memory reads no files: not hinted")
        elif known is None or not known[0].is_over:
            attach(loader)
    except Exception as error:
        warn_once(f"this DataLoader cannot be hinted: {error!r}")


def _attach(
    loader: DataLoader[Any],
    paths: list[str] | None,
    epochs: int | None,
    copy_sampler: bool,
) -> tuple[Job, Announcer | None]:
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        raise Unreadable("an IterableDataset has no indices that could be announced")
    if paths is None:
        root, ways = files_of(loader.dataset)
    else:
        root, listed = common_root(paths), paths
        ways = (listed_files(root, lambda: listed),)
    seat = _seat(loader)
    source = _Source(loader, seat)
    spec = source.stock_spec(base_seed_drawn=False)
    is_told = spec is not None or type(source.sampler) in (list, tuple, range)
    is_told = is_told or source.telling is not None
    if not is_told and not copy_sampler and source.rebatched_spec() is None:
        raise Unreadable(
            f"the order of {type(source.sampler).__name__} cannot be told without reading it: "
            "attach(loader, copy_sampler=True) if a copy of it may be read"
        )
    is_known = spec is not None and spec.epochs_known is None
    job = Job(
        Hint(
            path=os.fsencode(root),
            spec=spec if is_known else None,
            epochs=epochs,
            start_epoch=source.epoch,
            workers=loader.num_workers or 1,  # 0 is not known: here the trainer is the one reader
            prefetch_factor=loader.prefetch_factor or 0,
            name=program_name(),
        ),
        ways,
    )
    if job.is_over:
        return job, None
    for other in _announcers_of(seat):
        other.leave()
    announcer = Announcer(source, job)
    if source.telling is not None:
        source.telling.ask(job)
    seat.give(announcer)
    return job, announcer


# Where a loader keeps its sampler


@dataclass(frozen=True)
class _Seat:
    """The attribute that the loader's indices come from: `holder.attribute`.

    That is the sampler in a stock BatchSampler; if there is none, whatever the loader iterates.
    """

    holder: Any
    attribute: str

    @property
    def taken_by(self) -> Any:
        return getattr(self.holder, self.attribute)

    def give(self, announcer: Announcer) -> None:
        object.__setattr__(self.holder, self.attribute, announcer)  # DataLoader's own refuses


def _seat(loader: DataLoader[Any]) -> _Seat:
    attribute = "sampler" if loader.batch_sampler is None else "batch_sampler"
    outer = getattr(loader, attribute)
    if samplers.is_plain_batching(outer):
        return _Seat(outer, "sampler")
    return _Seat(loader, attribute)


def _announcers_of(seat: _Seat) -> list[Announcer]:
    """Those that were attached to this sampler before: to another loader, or by mistake."""
    found = [seat.taken_by]
    if type(found[0]) is Announcer:
        found.append(found[0]._source.sampler)
    found.append(getattr(samplers.batching_within(found[-1]), "sampler", None))
    return [outer for outer in found if type(outer) is Announcer]


class Announcer:
    """Stands for a sampler in its loader: behaves as it does, and announces each epoch's order."""

    __slots__ = ("__weakref__", "_job", "_source")

    def __init__(self, source: _Source, job: Job) -> None:
        object.__setattr__(self, "_source", source)
        object.__setattr__(self, "_job", job)

    def __iter__(self) -> Iterator[Any]:
        # INVARIANT: the sampler's `__iter__` and each `next` run at the very moment they would run
        # without us: some samplers draw in the one, some in the other.
        source, job = self._source, self._job
        if job.is_over:
            return iter(source.sampler)
        if source.draws_at_next:
            return self._announce(iter(source.sampler), None)
        spec = source.spec(job)
        indices = iter(source.sampler)
        if hasattr(indices, "load_state_dict"):
            return _SavedIndices(self, indices, spec)
        return self._announce(indices, spec)

    def _resume(self, indices: Any) -> Iterator[Any]:
        """What is left of an epoch, of a sampler's iterator that has just taken a state."""
        if self._job.is_over:
            return iter(indices)
        spec, drawn = self._source.resumed(self._job, indices)
        return self._announce(indices, spec, drawn)

    def leave(self) -> None:
        """Announce nothing any more: another one takes its place."""
        self._job.close(wait_s=0.0)

    def _announce(
        self, indices: Iterator[Any], spec: OrderSpec | None, drawn: int = 0
    ) -> Iterator[Any]:
        """`indices`, of which `drawn` have been drawn before."""
        source, job = self._source, self._job
        if (reader := _other_reader(source.outer or self)) is not None and not job.is_over:
            job.give_up(
                "the DataLoader that was attached is not read, but its sampler by another one "
                f"({type(reader).__name__}): attach the one that is iterated (what "
                "accelerator.prepare returned), or use hintsd run"
            )
            spec = None
        elif source.draws_at_next:
            drawn = samplers.skipped(source.sampler)
            spec = source.spec(job)
        if spec is None or drawn >= len(source.sampler):
            yield from indices
            return
        epoch = spec.start_epoch
        source.epoch = epoch + 1
        source.look_for_set_epoch()
        if source.telling is None or not source.telling.is_told(spec):
            job.announce(epoch, spec)
        if (uses := source.new_scores(spec)) is not None:
            job.score(uses)
        # The workers may hold as many batches as are drawn ahead: what was drawn before those has
        # been handed out.
        batch_items = 1 if source.yields_batches else spec.batch_size
        ends = source.batch_ends

        def place(batch: int) -> int:
            # A sampler may yield more than its length says.
            return batch if ends is None else int(ends[min(batch, len(ends) - 1)])

        def step(drawn: int) -> None:
            job.step(place(max(0, drawn // batch_items - source.batches_ahead)), epoch)

        def end(drawn: int) -> None:
            rest = 0 if spec.batch_drop_last else drawn % batch_items
            job.drawn(place(drawn // batch_items + (rest > 0)), epoch)

        # Who counts the batches never asks for the sampler's end.
        last = len(source.sampler)
        if spec.batch_drop_last:
            last -= last % batch_items
        for index in indices:
            if drawn % batch_items == 0:
                step(drawn)
            drawn += 1
            if drawn == 1 and source.telling is not None:
                source.telling.tell(job, spec)
            if drawn == last:
                end(drawn)
            yield index
        step(drawn)
        end(drawn)

    def __len__(self) -> int:
        return len(self._source.sampler)

    def __bool__(self) -> bool:
        return bool(self._source.sampler)

    def __repr__(self) -> str:
        return repr(self._source.sampler)

    @property  # type: ignore[misc]  # isinstance shall see the sampler
    def __class__(self) -> type:
        return type(self._source.sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source.sampler, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._source.sampler, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._source.sampler, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _itself, (self._source.sampler,)  # a copy is the plain sampler


class _SavedIndices:
    """Stands for a sampler's iterator that tells and takes a state: behaves as it does, and
    announces what a state leaves of the epoch."""

    __slots__ = ("_announced", "_announcer", "_indices")

    def __init__(self, announcer: Announcer, indices: Any, spec: OrderSpec | None) -> None:
        self._announcer, self._indices = announcer, indices
        self._announced = announcer._announce(indices, spec)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._announced)

    def load_state_dict(self, state: Any) -> None:
        self._indices.load_state_dict(state)
        self._announced = self._announcer._resume(self._indices)

    @property  # type: ignore[misc]  # isinstance shall see the iterator
    def __class__(self) -> type:
        return type(self._indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._indices, name)


def _other_reader(own: Any) -> Any:
    """What the DataLoader iterates that draws now, if that is another than `own` (or leaves out the
    first batches of it)."""
    reader: Any = getattr(drawing_iterator(), "_index_sampler", None)
    while samplers.is_skipping(reader):
        reader = reader.batch_sampler
    return None if reader is own else reader


def _itself(value: Any) -> Any:
    return value


# What order a sampler is about to draw


def _plain(sampler: Any) -> Any:
    return sampler._source.sampler if type(sampler) is Announcer else sampler


class _Source:
    """A sampler, with all of its loader that bears on the order."""

    def __init__(self, loader: DataLoader[Any], seat: _Seat) -> None:
        self.sampler: Any = _plain(seat.taken_by)
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

    def look_for_set_epoch(self) -> None:
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
        sampler, epoch = _plain(inner.sampler), self._next_epoch()
        spec = spec_of(sampler, None, self.generator, start_epoch=epoch)
        if spec is None:
            return None
        indices = access_sequence(spec, epoch).tolist()
        batches = BatchSampler(indices, inner.batch_size, inner.drop_last)
        return self._listed(list(samplers.rebatched(self.sampler, batches)))

    def spec(self, job: Job) -> OrderSpec | None:
        """The order of the epoch that begins now. None: there is none, and the job was closed."""

        def read() -> OrderSpec:
            if self.telling is not None:
                return self.telling.begun(self._next_epoch())
            stock = self.stock_spec(base_seed_drawn=True) or self.rebatched_spec()
            return stock or self._listed(self._read_copy(self.sampler))

        return self._read(job, read)

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
            job.give_up(f"the order of {type(self.sampler).__name__} cannot be told ({error!r})")
            return None

    def _read_copy(self, original: Any) -> list[Any]:
        """What a copy of the sampler, or of its iterator, yields."""
        if len(self.sampler) > COPIED_MOST:
            raise ValueError(f"it is longer than {COPIED_MOST}")
        with _generators_kept(), _no_collectives():
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
def _generators_kept() -> Iterator[None]:
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
