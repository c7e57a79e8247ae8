"""Telling: our own samplers' epochs as orders for hintsd, when they begin, are drawn ahead, or come
in another order than was told."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from hintsd.client.client import Job, explicit_order
from hintsd.client.importance.chunked import ChunkedSampler
from hintsd.client.importance.sampler import ImportanceSampler
from hintsd.client.importance.substitutable import SubstitutableSampler
from hintsd.orders.spec import OrderSpec


class Telling:
    """Of one loader: its sampler, its dataset, and its (batch_size, drop_last)."""

    def __init__(self, sampler: Any, dataset: Any, batching: tuple[int, bool] | None) -> None:
        self._sampler, self._dataset = sampler, dataset
        self._batching = batching or (1, False)

    def ask(self, job: Job) -> None:
        """At each draw that needs it `job` says what is cached, unless the user's function does."""
        self._sampler.set_cached(_Asked(job), is_offer=True)

    @property
    def epoch(self) -> int:
        """The sampler's own number of the epoch that begins next."""
        return int(self._sampler.epoch)

    def begun(self, epoch: int) -> OrderSpec:
        """Of the epoch that begins next, which is drawn by that. ValueError: it has no samples."""
        return self.spec(self._sampler.order_of_next_epoch(), epoch)

    def tell(self, job: Job, spec: OrderSpec) -> None:
        """The epoch of `spec` has begun."""

    def is_told(self, spec: OrderSpec) -> bool:
        """Whether the order of the epoch that begins was told before."""
        return False

    def spec(self, indices: Any, epoch: int) -> OrderSpec:
        """Indices of an epoch as its order."""
        batch_size, drop_last = self._batching
        return explicit_order(indices, epoch, batch_size, drop_last, len(self._dataset))


class _TellingScores(Telling):
    """Of an ImportanceSampler: what is drawn ahead, how often this reader is expected to use each
    sample in an epoch that is not drawn yet, and what was drawn by them, too."""

    _ahead: OrderSpec | None = None
    """What was last told of an epoch before it began."""

    def tell(self, job: Job, spec: OrderSpec) -> None:
        for _, indices in self._sampler.drawn()[:1]:
            self._ahead = self.spec(indices, spec.start_epoch + 1)
            job.announce(self._ahead.start_epoch, self._ahead)
        settings, report = self._sampler.settings, self._sampler.report()
        job.score(
            self._sampler.expected_reads() / settings.num_replicas,
            substituted=None if settings.substitute == "none" else report.substituted,
            h_list=report.h_list if settings.scheme == "icache" else None,
        )

    def is_told(self, spec: OrderSpec) -> bool:
        ahead, self._ahead = self._ahead, None
        return (
            ahead is not None
            and ahead.start_epoch == spec.start_epoch
            and np.array_equal(ahead.indices, spec.indices)  # type: ignore[arg-type]  # both have
        )


class _TellingArranged(Telling):
    """Of a SubstitutableSampler: its order is told anew whenever more of it is decided."""

    _epochs = 0, 0
    """The one that is read: the loader's number, and the sampler's."""

    def ask(self, job: Job) -> None:
        self._sampler.set_cached(_Asked(job, staged=True), is_offer=True)
        self._sampler.on_arranged(_Announced(job, self))

    def begun(self, epoch: int) -> OrderSpec:
        self._epochs = epoch, self.epoch
        return super().begun(epoch)

    def announce(self, job: Job, number: int, indices: Any) -> None:
        """So the sampler's epoch of that number is read now."""
        epoch = self._epochs[0] + number - self._epochs[1]
        job.announce(epoch, self.spec(indices, epoch))


class _TellingChunked(_TellingArranged):
    """Of a ChunkedSampler: so it is, and the epoch behind is told, too, as far as it is known."""

    def ask(self, job: Job) -> None:
        self._sampler.set_next_chunk(_AskedChunk(job), is_offer=True)
        self._sampler.on_arranged(_Announced(job, self))

    def tell(self, job: Job, spec: OrderSpec) -> None:
        self.announce(job, self.epoch, self._sampler.order_of_epoch_behind())


def telling_of(sampler: object, dataset: Any, batching: tuple[int, bool] | None) -> Telling | None:
    """None: it is none of ours, or a subclass, which may do anything."""
    if type(sampler) is ImportanceSampler:
        return _TellingScores(sampler, dataset, batching)
    if type(sampler) is SubstitutableSampler:
        return _TellingArranged(sampler, dataset, batching)
    if type(sampler) is ChunkedSampler:
        return _TellingChunked(sampler, dataset, batching)
    return None


class _Asked:
    """Asks a job what is cached. It does not keep it alive, and a copy asks nobody: samplers are
    copied and pickled."""

    def __init__(self, job: Job | None, *, staged: bool = False) -> None:
        self._job = None if job is None else weakref.ref(job)
        self._with_staged = staged

    def __call__(self) -> Any:
        job = None if self._job is None else self._job()
        return None if job is None else job.cached(staged=self._with_staged)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Asked, (None,)


class _AskedChunk:
    """Asks a job which chunk is next. As `_Asked`."""

    def __init__(self, job: Job | None) -> None:
        self._job = None if job is None else weakref.ref(job)

    def __call__(self, unread: list[int], chunks: int) -> Any:
        job = None if self._job is None else self._job()
        return None if job is None else job.next_chunk(unread, chunks)

    def __reduce__(self) -> tuple[Any, ...]:
        return _AskedChunk, (None,)


class _Announced:
    """Announces an order to a job. As `_Asked`."""

    def __init__(self, job: Job | None, telling: _TellingArranged | None) -> None:
        self._job = None if job is None else weakref.ref(job)
        self._telling = None if telling is None else weakref.ref(telling)

    def __call__(self, epoch: int, indices: Any) -> None:
        job = None if self._job is None else self._job()
        telling = None if self._telling is None else self._telling()
        if job is not None and telling is not None and not job.is_over:
            telling.announce(job, epoch, indices)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Announced, (None, None)
