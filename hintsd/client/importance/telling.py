"""Telling: an ImportanceSampler's epochs as orders for hintsd, when they begin or are drawn ahead."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from hintsd.client.client import Job, explicit_order
from hintsd.client.importance.sampler import ImportanceSampler
from hintsd.orders.spec import OrderSpec


class Telling:
    """Of one loader: its sampler, its dataset, and its (batch_size, drop_last)."""

    def __init__(
        self, sampler: ImportanceSampler, dataset: Any, batching: tuple[int, bool] | None
    ) -> None:
        self._sampler, self._dataset = sampler, dataset
        self._batching = batching or (1, False)
        self._ahead: OrderSpec | None = None
        """What was last told of an epoch before it began."""

    @staticmethod
    def of(
        sampler: object, dataset: Any, batching: tuple[int, bool] | None
    ) -> Telling | None:
        """None: it is no ImportanceSampler, or a subclass, which may do anything."""
        if type(sampler) is not ImportanceSampler:
            return None
        return Telling(sampler, dataset, batching)

    def ask(self, job: Job) -> None:
        """At each draw that needs it `job` says what is cached, unless the user's function does."""
        self._sampler.set_cached(_Asked(job), is_offer=True)

    @property
    def epoch(self) -> int:
        """The sampler's own number of the epoch that begins next."""
        return self._sampler.epoch

    def begun(self, epoch: int) -> OrderSpec:
        """Of the epoch that begins next, which is drawn by that. ValueError: it is of no samples."""
        return self._spec(self._sampler.order_of_next_epoch(), epoch)

    def tell(self, job: Job, spec: OrderSpec) -> None:
        """The epoch of `spec` has begun: what is drawn ahead, how often this reader is expected to
        use each sample in an epoch that is not drawn yet, and what was drawn by them."""
        for _, indices in self._sampler.drawn()[:1]:
            self._ahead = self._spec(indices, spec.start_epoch + 1)
            job.announce(self._ahead.start_epoch, self._ahead)
        settings, report = self._sampler.settings, self._sampler.report()
        job.score(
            self._sampler.expected_reads() / settings.num_replicas,
            substituted=None if settings.substitute == "none" else report.substituted,
            h_list=report.h_list if settings.scheme == "icache" else None,
        )

    def is_told(self, spec: OrderSpec) -> bool:
        """Whether the order of the epoch that begins was told before."""
        ahead, self._ahead = self._ahead, None
        return (
            ahead is not None
            and ahead.start_epoch == spec.start_epoch
            and np.array_equal(ahead.indices, spec.indices)  # type: ignore[arg-type]  # both have
        )

    def _spec(self, indices: Any, epoch: int) -> OrderSpec:
        batch_size, drop_last = self._batching
        return explicit_order(indices, epoch, batch_size, drop_last, len(self._dataset))


class _Asked:
    """Asks a job what is cached. It does not keep it alive, and a copy asks nobody: samplers are
    copied and pickled."""

    def __init__(self, job: Job | None) -> None:
        self._job = None if job is None else weakref.ref(job)

    def __call__(self) -> Any:
        job = None if self._job is None else self._job()
        return None if job is None else job.cached()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Asked, (None,)
