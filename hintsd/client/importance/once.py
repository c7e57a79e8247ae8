"""Samplers that read each sample exactly once an epoch, in an order that is decided on the way.

`OnceSampler` is what they share: epochs, what the loader has handed out, states, hooks. Which
orders there are, and what decides, is its subclasses'.

INVARIANT: only the constructor raises; in a training all that is wrong is one warning.
INVARIANT: what is read of an epoch follows from seed, number and rank alone; only its order from
what is decided.
"""

from __future__ import annotations

import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

import numpy.typing as npt

from hintsd.client.importance import ranks
from hintsd.client.importance.shared import (
    added,
    as_arrays,
    call,
    length_now,
    length_of,
    number_of_epoch,
)
from hintsd.client.iterators import drawing_iterator
from hintsd.client.warning import warn_once
from hintsd.orders import samplers
from hintsd.sampling.settings import whole

VERSION: Final = 1

OnArranged = Callable[[int, npt.NDArray[Any]], object]


class Arranged(Protocol):
    """The order of one epoch, as far as it is decided."""

    arranged: int
    """Reads that are decided."""

    def __len__(self) -> int: ...

    def reads(self, start: int = 0) -> npt.NDArray[Any]:
        """All from `start` on, as far as it is known now."""

    def decided(self, start: int, most: int) -> npt.NDArray[Any]:
        """At most so many decided ones, from `start` on."""


class Epoch:
    """One that is read, or is to be read next."""

    def __init__(self, number: int, order: Any, begin: int, say: Callable[[str], None]) -> None:
        """`order`: an Arranged. `begin`: reads that lie before it, where it is resumed."""
        self.number, self.order, self.begin, self.drawn = number, order, begin, begin
        self._say = say
        self._reader: weakref.ref[Any] | None = None
        self._batch_size, self._drops_last, self._batches_held = 1, False, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}  # a copy is read by nobody

    def give_out(self, start: int, most: int) -> Iterator[int]:
        """At most so many decided reads, from `start` on."""
        for index in self.order.decided(start, most).tolist():
            self.drawn += 1
            yield index

    def look_at_loader(self) -> None:
        """Who draws it now, in which batches."""
        reader = drawing_iterator()
        batching: Any = getattr(reader, "_index_sampler", None)
        if reader is None or not samplers.is_plain_batching(batching):
            return
        self._reader = weakref.ref(reader)
        self._batch_size, self._drops_last = batching.batch_size, batching.drop_last
        self._batches_held = (getattr(reader, "_num_workers", 0) or 0) * (
            getattr(reader, "_prefetch_factor", 0) or 0
        )
        if self._batches_held and not getattr(reader, "_in_order", True):
            self._say("in_order=False: a state within an epoch leaves out what was not read yet")

    def read(self, batches: int | None) -> int:
        """Reads that the script has, or was given in so many batches; all where no more come."""
        whole_epoch = len(self.order)
        if batches is not None:
            count = self.begin + batches * self._batch_size
        elif self._reader is None:
            count = self.drawn
        elif (reader := self._reader()) is not None:
            count = self.begin + int(getattr(reader, "_num_yielded", 0)) * self._batch_size
        elif self.drawn == whole_epoch:  # the loader is gone: it was read to its end
            count = whole_epoch
        else:  # it was left early: what its workers held was not read
            drawn = -(-(self.drawn - self.begin) // self._batch_size)
            count = self.begin + max(0, drawn - self._batches_held) * self._batch_size
        left = (whole_epoch - self.begin) % self._batch_size if self._drops_last else 0
        return whole_epoch if count >= whole_epoch - left else min(count, self.drawn)


class OnceSampler(ABC):
    """Gives out the indices of an epoch, each once."""

    def __init__(
        self, dataset: Any, batch_size: int, seed: int, replicas: int | None, rank: int | None
    ) -> None:
        """As the subclasses have it. ValueError: an argument, which the line begins with."""
        told = ranks.replicas_and_rank()
        replicas = told[0] if replicas is None else replicas
        rank = told[1] if rank is None else rank
        self._samples = length_of(dataset)
        whole("batch_size", batch_size, 1)
        whole("seed", seed, None)
        whole("num_replicas", replicas, 1)
        whole("rank", rank, 0, replicas - 1)
        self._dataset, self._batch_size = dataset, batch_size
        self._seed, self._replicas, self._rank = seed, replicas, rank
        self._number = 0
        self._next: Epoch | None = None  # of that number, as far as it is there
        self._now: Epoch | None = None  # begun last
        self._is_read = False
        self._hooks: list[OnArranged] = []

    # ---- a subclass's ----------------------------------------------------------------------------

    @abstractmethod
    def _order(self, number: int) -> Any:
        """The order of that epoch, which is the next one; nothing of it is decided. An Arranged."""

    @abstractmethod
    def _ahead(self) -> int:
        """Reads that are to be decided when the first of them is given out."""

    @abstractmethod
    def _decide(self, order: Any, reads: int) -> bool:
        """Decide at least so many of its reads; whether they come in another order."""

    @abstractmethod
    def _settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of a state: what must be the same in the sampler that takes it, and what must be so only
        within an epoch."""

    @abstractmethod
    def _place(self, order: Any, read: int) -> dict[str, Any]:
        """Of a state: of which epoch's order so much was read; None: of none."""

    @abstractmethod
    def _resumed(self, number: int, told: Mapping[str, Any]) -> tuple[Any, int]:
        """The order of an epoch, and how many reads lie before: what `_place` told. ValueError."""

    # ---- a sampler -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """The epoch begins with the first index that is asked for."""
        epoch = self._begin()
        size = self._batch_size
        try:
            for start in range(epoch.begin, len(epoch.order), size):
                self._advance(epoch, start)
                yield from epoch.give_out(start, size)
        finally:
            if self._now is epoch:
                self._is_read = False

    def __len__(self) -> int:
        """Indices of the epoch while they are given out; then those of the next one."""
        epoch = self._now if self._is_read and self._now is not None else self._next
        if epoch is None:
            return -(-self._samples // self._replicas)
        return len(epoch.order) - epoch.begin

    @property
    def epoch(self) -> int:
        """The number of the epoch that begins next."""
        return self._number

    def set_epoch(self, epoch: int) -> None:
        """The epoch that begins next has this number: as of a DistributedSampler. Not needed."""
        number = number_of_epoch(epoch, self._say)
        if number is not None and number != self._number:
            self._number, self._next = number, None

    def order_of_next_epoch(self) -> npt.NDArray[Any]:
        """The indices that this rank reads in the epoch that begins next, in turn, as far as it is
        known now: what is decided later may change the order. Shape (reads,)."""
        epoch = self._coming()
        reads: npt.NDArray[Any] = epoch.order.reads(epoch.begin)
        return reads

    def on_arranged(self, hook: OnArranged) -> Callable[[], None]:
        """`hook(epoch, indices)` is called when the order of an epoch changes, with all that this
        rank reads of it, as `order_of_next_epoch`. Call what is returned to end that."""
        return added(self._hooks, hook)

    # ---- saved and resumed -----------------------------------------------------------------------

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """All that a resumed training needs to read exactly what this one has not read, and then
        the same epochs. Each rank saves its own.

        Read is what the stock DataLoader has given to the script; or so many `batches` of this
        epoch, of a loader of which that cannot be seen."""
        epoch, read = self._now, 0
        if epoch is not None:
            read = epoch.read(batches)
            if read == len(epoch.order):
                epoch = None
        if epoch is None and self._next is not None:
            epoch, read = self._next, self._next.begin
        always, within = self._settings()
        number = self._number if epoch is None else epoch.number
        place = self._place(None if epoch is None else epoch.order, read)
        return {"version": VERSION, **always, **within, "epoch": number, **place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, of a sampler with the same arguments; the rank matters only
        within an epoch."""
        try:
            told = as_arrays(state)
            always, within = self._settings()
            for name, value in {"version": VERSION, **always}.items():
                if told[name] != value:
                    raise ValueError(f"its {name} is {told[name]}, not {value}")
            number = int(told["epoch"])
            if number < 0:
                raise ValueError(f"its epoch is {number}")
            order, read = self._resumed(number, told)
            for name, value in within.items():
                if read and told[name] != value:
                    raise ValueError(f"its {name} is {told[name]}, not {value}")
            self._number, self._next = number, Epoch(number, order, read, self._say)
            self._now, self._is_read = None, False
        except Exception as error:
            self._say(f"this state is not taken ({type(error).__name__}: {error})")

    # ---- within ----------------------------------------------------------------------------------

    def _say(self, why: str) -> None:
        """One warning in a process, whatever numbers are in it."""
        name = type(self).__name__
        warn_once(f"{name}: {why}; training goes on", f"{name}: " + re.sub(r"[\d.]+", "", why))

    def _begin(self) -> Epoch:
        epoch = self._now = self._coming()
        self._number, self._next, self._is_read = epoch.number + 1, None, True
        epoch.look_at_loader()
        return epoch

    def _coming(self) -> Epoch:
        """The epoch that begins next, its first reads decided."""
        length = length_now(self._dataset, self._samples, self._say)
        if length != self._samples:
            self._samples, self._next = length, None
        epoch = self._behind()
        self._keep_ahead(epoch, epoch.begin)
        return epoch

    def _behind(self) -> Epoch:
        """The epoch that begins next, as far as it is there."""
        if self._next is None:
            self._next = Epoch(self._number, self._order(self._number), 0, self._say)
        return self._next

    def _advance(self, epoch: Epoch, start: int) -> None:
        """Right before read `start` of the epoch is given out."""
        if self._keep_ahead(epoch, start):
            self._tell(epoch)

    def _keep_ahead(self, epoch: Epoch, start: int) -> bool:
        """Whether that has changed its order."""
        order = epoch.order
        least = min(start + self._ahead(), len(order))
        return order.arranged < least and self._decide(order, least)

    def _tell(self, epoch: Epoch) -> None:
        call(self._hooks, self._say, epoch.number, epoch.order.reads(epoch.begin))
