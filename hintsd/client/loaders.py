"""attach: hints for a torch DataLoader, with its order announced at the moment it is drawn.

What cannot be known before (the default generator's state when an epoch begins) is read then: an
`Announcer` takes the place of the sampler inside the loader, looks at it right before its first
draw, hands the order to the job's thread, and lets the sampler go on. How a sampler is read, or
copied (unknown code, only with copy_sampler=True), is in sampler_order.py.

INVARIANT: the loader yields exactly what it would without us, and every generator is left as it
would be. What fails here is one warning, and the loader goes on without hints.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hintsd.client import summary
from hintsd.client.client import (
    Job,
    Path,
    common_root,
    listed_files,
    program_name,
    tidy_paths,
    whole_number,
)
from hintsd.client.iterators import drawing_iterator
from hintsd.client.known.datasets import files_of, is_in_memory
from hintsd.client.known.extending import NO_INDICES, Needless, Unreadable
from hintsd.client.known.shards import ShardOrder
from hintsd.client.known.streams import StreamedShards
from hintsd.client.known.web_dataset import WebDatasetShards
from hintsd.client.link import Ways
from hintsd.client.ranges.advice import Advice
from hintsd.client.ranges.rows import Ranges
from hintsd.client.sampler_order import SamplerOrder, Seat, generators_kept, seat_of
from hintsd.client.warning import warn_once
from hintsd.orders import samplers
from hintsd.orders.hint import Hint
from hintsd.orders.spec import OrderSpec

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

SHARDS_AHEAD: Final = 1  # a worker goes through its shards one by one: none waits for it
REQUIRED_TIMEOUT_S: Final = 60.0  # hintsd may have to list the dataset

_SHARDS: Final = (WebDatasetShards, StreamedShards)
_IN_MEMORY: Final = "a dataset in memory reads no files"

# INVARIANT: nothing in a value refers to its key, else no loader would ever be collected.
_jobs: weakref.WeakKeyDictionary[DataLoader[Any], tuple[Job, Announcer | None]]
_jobs = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[DataLoader[Any], int] = weakref.WeakKeyDictionary()
_count = itertools.count()
_required: set[int] = set()  # their numbers: those that were waited for


def attach(
    loader: DataLoader[Any],
    paths: Sequence[Path] | Ranges | None = None,
    epochs: int | None = None,
    *,
    copy_sampler: bool = False,
) -> Job:
    """Hint a DataLoader: it is watched from its next epoch on, until the job is closed or the
    loader is gone; a loader that is in a reference cycle goes when Python collects it: job.close()
    ends it at once. Its batches, their order and all random numbers are what they would be without.

    `paths`: the file of each index, or the ranges of large files, for a dataset that is no
    torchvision ImageFolder or DatasetFolder (or Subset or ConcatDataset of such). `epochs`: how
    many there will be, counted from 0. A loader that cannot be hinted is left alone, with one
    warning; its job `is_over`. `copy_sampler`: a sampler that is not torch's own may be copied, and
    the copy be read to its end when an epoch begins. torch's, numpy's and Python's global
    generators are put back after that; a sampler that changes anything else outside of itself would
    give another order.

    Attached again, a loader gives the job that it has, as long as that one works.
    ValueError: `epochs` is no positive number, or `paths` are no paths, or not as many as the
    dataset has samples.
    """
    epochs = None if epochs is None else whole_number("epochs", epochs, 1)
    if not hasattr(loader, "dataset") or not hasattr(loader, "batch_sampler"):
        kind = type(loader).__name__
        article = "an" if kind[0] in "aeiouAEIOU" else "a"
        return _without(f"attach takes a torch DataLoader, not {article} {kind}")
    loader = samplers.iterated_loader(loader)
    known = _jobs.get(loader)
    if known is not None:
        job, announcer = known
        if not job.is_over and announcer is not None and announcer is seat_of(loader).taken_by:
            return job
        job.close()
    dataset: Any = loader.dataset
    if paths is None or isinstance(paths, Ranges):
        tidy: list[str] | Ranges | None = paths
    else:
        tidy = tidy_paths(paths, os.getcwd())
    if tidy is not None and hasattr(dataset, "__len__") and len(tidy) != len(dataset):
        raise ValueError(f"{len(tidy)} paths for a dataset of {len(dataset)} samples")
    try:
        made = _attach(loader, tidy, epochs, copy_sampler)
    except Exception as error:
        made = _without(str(_unreadable(error))), None
    _jobs[loader] = made
    return made[0]


def stats() -> dict[str, float]:
    """`Job.stats` of each DataLoader of this process that is hinted: `hintsd/0/late`, …"""
    jobs = [job for job, _ in _jobs.values() if job.state in ("hinted", "wrong")]
    return {
        f"hintsd/{number}/{name}": value
        for number, job in enumerate(jobs)
        for name, value in job.stats().items()
    }


def _without(why: str) -> Job:
    warn_once(f"{why}; going on without hints")
    return Job(None, why=why)


def attach_unasked(loader: DataLoader[Any]) -> None:
    """`attach` on behalf of `hintsd run`: not in DataLoader workers, not again what has failed or
    was closed, and not what reads no files. What becomes of it is noted for the summary.

    NotHinted: it is required, and will not be. Nothing else is raised.
    """
    try:
        job = _job_unasked(loader)
        if job is None:
            return
        number = _numbers.setdefault(loader, next(_count))
        job.watch(functools.partial(summary.note, number))
        if number not in _required and summary.is_set(summary.REQUIRE):
            _required.add(number)
            if not job.hear(REQUIRED_TIMEOUT_S) or job.state != "hinted":
                why = job.why or summary.UNANSWERED
                raise summary.NotHinted(f"hintsd run --require: a DataLoader is not hinted: {why}")
    except summary.NotHinted:
        raise
    except Exception as error:
        warn_once(f"this DataLoader cannot be hinted: {error!r}")


def foretell(loader: DataLoader[Any]) -> Readable | Job:
    """What `attach_unasked` would have to announce of a loader; or its job, which the script has
    attached. The first epoch's order is read, and hintsd not asked. Unreadable.
    """
    try:
        loader = samplers.iterated_loader(loader)
        known = _jobs.get(loader)
        if known is not None:
            return known[0]
        if is_in_memory(loader.dataset):
            raise Needless(_IN_MEMORY)
        found = _read(loader, None, summary.is_set(summary.COPY_SAMPLERS))
    except Exception as error:
        raise _unreadable(error) from error
    is_drawn = isinstance(found.source, ShardOrder) or found.source.telling is None
    if is_drawn:  # else it would draw, which other processes may take part in
        try:
            found.source.begun()
        except Exception as error:
            raise Unreadable(found.source.untold(error)) from error
    return found


def _unreadable(error: Exception) -> Unreadable:
    """As it is told: of a dataset or sampler that does not behave, too."""
    if isinstance(error, Unreadable):
        return error
    return Unreadable(f"this DataLoader cannot be read ({error!r})")


def _job_unasked(loader: DataLoader[Any]) -> Job | None:
    """None: it needs none."""
    import torch.utils.data

    if torch.utils.data.get_worker_info() is not None:
        return None
    known = _jobs.get(loader)
    if known is None and is_in_memory(loader.dataset):
        logging.getLogger("hintsd").info(f"{_IN_MEMORY}: not hinted")
        return None
    if known is not None and known[0].is_over:
        return known[0]
    return attach(loader, copy_sampler=summary.is_set(summary.COPY_SAMPLERS))


@dataclass(frozen=True)
class Readable:
    """A loader that can be hinted: what is known of it, before it is."""

    root: str
    ways: Ways | Ranges
    seat: Seat
    source: SamplerOrder | ShardOrder
    spec: OrderSpec | None
    """Of all epochs; None: each is announced as it begins."""
    is_told: bool
    """The sampler's class tells its order: it is read neither from its batches nor from a copy."""


def _read(
    loader: DataLoader[Any], paths: list[str] | Ranges | None, copy_sampler: bool
) -> Readable:
    """Unreadable; and whatever a dataset or sampler raises that does not behave."""
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        if paths is not None:
            raise Unreadable(NO_INDICES)
        return _read_shards(loader)
    ways: Ways | Ranges
    if paths is None:
        with generators_kept():  # others' code is asked
            root, ways = files_of(loader.dataset)
    elif isinstance(paths, Ranges):
        root, ways = paths.root, paths
    else:
        root, listed = common_root(paths), paths
        ways = (listed_files(root, lambda: listed),)
    seat = seat_of(loader)
    source = SamplerOrder(loader, seat, _plain)
    spec = source.stock_spec(base_seed_drawn=False)
    is_told = spec is not None or type(source.sampler) in (list, tuple, range)
    is_told = is_told or source.telling is not None or source.told_by is not None
    if not is_told and not copy_sampler and source.rebatched_spec() is None:
        raise Unreadable(
            f"the order of {type(source.sampler).__name__} cannot be told without reading it: "
            "hintsd.order_of.register its class, or allow that a copy of it is read "
            "(attach(loader, copy_sampler=True), hintsd run --copy-samplers)"
        )
    is_known = spec is not None and spec.epochs_known is None
    return Readable(root, ways, seat, source, spec if is_known else None, is_told)


def _read_shards(loader: DataLoader[Any]) -> Readable:
    """Of a loader whose dataset gives out samples of shards: files that are read one by one."""
    kind = next((kind for kind in _SHARDS if kind.knows(loader.dataset)), None)
    if kind is None:
        raise Unreadable(NO_INDICES)
    seat = seat_of(loader)
    source = kind(loader, _plain(seat.taken_by))
    root, listed = common_root(source.paths), source.paths
    return Readable(root, (listed_files(root, lambda: listed),), seat, source, None, True)


def _attach(
    loader: DataLoader[Any],
    paths: list[str] | Ranges | None,
    epochs: int | None,
    copy_sampler: bool,
) -> tuple[Job, Announcer | None]:
    found = _read(loader, paths, copy_sampler)
    seat, source = found.seat, found.source
    ahead = loader.prefetch_factor or 0
    hint = Hint(
        path=os.fsencode(found.root),
        spec=found.spec,
        epochs=epochs,
        start_epoch=source.epoch,
        # 0 is not known: here the trainer is the one reader
        workers=source.at_once if isinstance(source, ShardOrder) else loader.num_workers or 1,
        prefetch_factor=ahead if isinstance(source, SamplerOrder) else SHARDS_AHEAD,
        name=program_name(),
    )
    if isinstance(found.ways, Ranges):
        assert isinstance(source, SamplerOrder)
        job = Job(hint, teller=Advice(found.ways, source.drawn_ahead))
    else:
        job = Job(hint, found.ways)
    if job.is_over:
        return job, None
    for other in _announcers_of(seat):
        other.leave()
    if isinstance(source, ShardOrder):
        announcer: Announcer = ShardAnnouncer(source, job)
    else:
        announcer = Announcer(source, job)
        if source.telling is not None:
            source.telling.ask(job)
    seat.give(announcer)
    return job, announcer


# What stands in the sampler's place


def _announcers_of(seat: Seat) -> list[Announcer]:
    """Those that were attached to this sampler before: to another loader, or by mistake."""
    found = [seat.taken_by]
    if issubclass(type(found[0]), Announcer):
        found.append(found[0]._source.sampler)
    found.append(getattr(samplers.batching_within(found[-1]), "sampler", None))
    return [outer for outer in found if issubclass(type(outer), Announcer)]


class Announcer:
    """Stands for a sampler in its loader: behaves as it does, and announces each epoch's order."""

    __slots__ = ("__weakref__", "_job", "_source")

    def __init__(self, source: SamplerOrder | ShardOrder, job: Job) -> None:
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
        source.begin(epoch)
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


class ShardAnnouncer(Announcer):
    """Stands for what tells a loader of shards to draw, and announces each epoch's shards."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        indices = iter(self._source.sampler)
        return indices if self._job.is_over else self._announce_shards(indices)

    def _announce_shards(self, indices: Iterator[Any]) -> Iterator[Any]:
        source, job = self._source, self._job
        try:
            with generators_kept():  # others' code is run
                spec = source.begun()
        except Exception as error:
            job.give_up(source.untold(error))
        else:
            job.announce(spec.start_epoch, spec)
            job.step(0, spec.start_epoch)
            source.begin(spec.start_epoch)
        yield from indices


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


def _plain(sampler: Any) -> Any:
    return sampler._source.sampler if issubclass(type(sampler), Announcer) else sampler
