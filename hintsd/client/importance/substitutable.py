"""SubstitutableSampler: each sample exactly once an epoch, what is cached a little earlier.

    sampler = hintsd.SubstitutableSampler(dataset, batch_size=256, seed=0)
    loader = DataLoader(dataset, batch_size=256, sampler=sampler, num_workers=4)
    job = hintsd.attach(loader)

Quiver's substitutable hits (FAST '20, 4.7): any order of an epoch is as good as another, so a batch
takes, out of the next ten, what is cached, while the rest is being fetched. docs/IMPORTANCE.md says
what that is worth, and what it is not.

INVARIANT: only the constructor raises; in a training all that is wrong is one warning.
INVARIANT: no generator but its own is drawn from; what is read of an epoch follows from seed, number
and rank alone, and only its order from what is cached.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Optional

import numpy as np
import numpy.typing as npt

from hintsd.client.importance import ranks
from hintsd.client.importance.shared import (
    added,
    as_arrays,
    call,
    length_now,
    length_of,
    mask_of,
    number_of_epoch,
)
from hintsd.client.iterators import drawing_iterator
from hintsd.client.warning import warn_once
from hintsd.orders import samplers
from hintsd.sampling.arranging import Arrangement, permutation
from hintsd.sampling.formulas import Mask
from hintsd.sampling.settings import whole

VERSION: Final = 1
LOOKS_MOST: Final = 64  # an epoch is arranged, and its order told, so often: it costs O(samples)
BATCHES_FIXED: Final = 2  # decided before they are drawn, so that hintsd knows them in time
LATE_S: Final = 0.25  # behind an answer that does not come in this time ...
SKIPPED: Final = 8  # ... so many questions are not asked

OnArranged = Callable[[int, npt.NDArray[Any]], object]


def say(why: str) -> None:
    """One warning in a process, whatever numbers are in it."""
    reason = "substitutable: " + re.sub(r"[\d.]+", "", why)
    warn_once(f"SubstitutableSampler: {why}; training goes on", reason)


class _Epoch:
    """One that is read, or is to be read next."""

    def __init__(self, number: int, arrangement: Arrangement) -> None:
        self.number, self.arrangement = number, arrangement
        self.begin = self.drawn = arrangement.arranged
        """Reads that lie before it (it is resumed), and that were given out."""
        self._skipped = 0  # questions that are not asked, for an answer did not come
        self._reader: Optional[weakref.ref[Any]] = None
        self._batch_size, self._drops_last, self._batches_held = 1, False, 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}  # a copy is read by nobody

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
            say("in_order=False: a state within an epoch leaves out what was not read yet")

    def ask(self, cached: Callable[[], Any], samples: int) -> Mask | None:
        """What is cached now; None: it is not known."""
        if self._skipped:
            self._skipped -= 1
            return None
        begun_s = time.monotonic()
        found = mask_of(cached, samples, say)
        if found is None and time.monotonic() - begun_s > LATE_S:
            self._skipped = SKIPPED
        return found

    def read(self, batches: int | None) -> int:
        """Reads that the script has, or was given in so many batches; all where no more come."""
        whole_epoch = len(self.arrangement)
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


class SubstitutableSampler:
    """Gives out the indices of an epoch: a permutation, in which what is cached comes earlier."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int = 0,
        look_ahead: int = 10,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        """`dataset`: what the loader reads, or its length. `batch_size`: the loader's, in samples.

        `look_ahead`: batches out of which one is filled; each sample is read less than so many
        batches from its place in the permutation. 0: the permutation as it is.
        `num_replicas`, `rank`: of a distributed training; None: torch.distributed's, if it is
        initialised by now. A rank has its share of each epoch, as a DistributedSampler deals it
        (where the samples cannot be dealt evenly, a few come to two ranks).

        9 bytes a sample, twice where one epoch is read and the next is asked for. ValueError: an argument, which the line begins with.
        """
        told = ranks.replicas_and_rank()
        replicas = told[0] if num_replicas is None else num_replicas
        rank = told[1] if rank is None else rank
        self._samples = length_of(dataset)
        whole("batch_size", batch_size, 1)
        whole("seed", seed, None)
        whole("look_ahead", look_ahead, 0)
        whole("num_replicas", replicas, 1)
        whole("rank", rank, 0, replicas - 1)
        self._dataset, self._batch_size, self._look_ahead = dataset, batch_size, look_ahead
        self._seed, self._replicas, self._rank = seed, replicas, rank
        self._number = 0
        self._next: _Epoch | None = None  # of that number, as far as it is there
        self._now: _Epoch | None = None  # begun last
        self._is_read = False
        self._cached: Callable[[], Any] | None = None
        self._is_offer = False  # it is not the user's
        self._hooks: list[OnArranged] = []

    # ---- a sampler -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[int]:
        """The epoch begins with the first index that is asked for."""
        epoch = self._begin()
        arrangement, size = epoch.arrangement, self._batch_size
        try:
            for start in range(epoch.begin, len(arrangement), size):
                if arrangement.arranged < min(start + BATCHES_FIXED * size, len(arrangement)):
                    if self._arrange(epoch):
                        call(self._hooks, say, epoch.number, arrangement.reads(epoch.begin))
                for index in arrangement.decided(start, size).tolist():
                    epoch.drawn += 1
                    yield index
        finally:
            if self._now is epoch:
                self._is_read = False

    def __len__(self) -> int:
        """Indices of the epoch while they are given out; then those of the next one."""
        epoch = self._now if self._is_read and self._now is not None else self._next
        if epoch is None:
            return -(-self._samples // self._replicas)
        return len(epoch.arrangement) - epoch.begin

    @property
    def epoch(self) -> int:
        """The number of the epoch that begins next."""
        return self._number

    def set_epoch(self, epoch: int) -> None:
        """The epoch that begins next has this number: as of a DistributedSampler. Not needed."""
        number = number_of_epoch(epoch, say)
        if number is not None and number != self._number:
            self._number, self._next = number, None

    def order_of_next_epoch(self) -> npt.NDArray[Any]:
        """The indices that this rank reads in the epoch that begins next, in turn, as far as it is
        known now: what is cached later may change the order. Shape (reads,)."""
        epoch = self._coming()
        return epoch.arrangement.reads(epoch.begin)

    # ---- for what keeps files --------------------------------------------------------------------

    def set_cached(self, cached: Callable[[], Any], *, is_offer: bool = False) -> None:
        """`cached()` tells which samples are cached now, a mask of shape (samples,) or indices, or
        None; it is called up to 64 times an epoch. `is_offer`: attach's, which is asked where no
        other was set."""
        if not is_offer or self._cached is None or self._is_offer:
            self._cached, self._is_offer = cached, is_offer

    def on_arranged(self, hook: OnArranged) -> Callable[[], None]:
        """`hook(epoch, indices)` is called when the order of an epoch that is read changes, with
        all that this rank reads of it, as `order_of_next_epoch`. Call what is returned to end
        that."""
        return added(self._hooks, hook)

    # ---- saved and resumed -----------------------------------------------------------------------

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """All that a resumed training needs to read exactly what this one has not read, and then
        the same epochs: whatever is cached then. Each rank saves its own.

        Read is what the stock DataLoader has given to the script; or so many `batches` of this
        epoch, of a loader of which that cannot be seen."""
        epoch, read = self._now, 0
        if epoch is not None:
            read = epoch.read(batches)
            if read == len(epoch.arrangement):
                epoch = None
        if epoch is None and self._next is not None:
            epoch, read = self._next, self._next.begin
        number, (first, beyond) = self._number, (0, list[int]())
        if epoch is not None:
            number, (first, beyond) = epoch.number, epoch.arrangement.state(read)
        return {
            "version": VERSION,
            "samples": self._samples,
            "seed": self._seed,
            "batch_size": self._batch_size,
            "look_ahead": self._look_ahead,
            "replicas": self._replicas,
            "rank": self._rank,
            "epoch": number,
            "first": first,
            "beyond": beyond,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave, of a sampler with the same arguments; the rank matters only
        within an epoch."""
        try:
            told = as_arrays(state)
            mine = self.state_dict()
            is_within = told["first"] or told["beyond"]
            for name in ("version", "samples", "seed", "replicas"):
                if told[name] != mine[name]:
                    raise ValueError(f"its {name} is {told[name]}, not {mine[name]}")
            for name in ("batch_size", "look_ahead", "rank"):
                if is_within and told[name] != mine[name]:
                    raise ValueError(f"its {name} is {told[name]}, not {mine[name]}")
            number = int(told["epoch"])
            if number < 0:
                raise ValueError(f"its epoch is {number}")
            arrangement = self._arrangement(number)
            arrangement.resume(int(told["first"]), [int(place) for place in told["beyond"]])
            self._number, self._next = number, _Epoch(number, arrangement)
            self._now, self._is_read = None, False
        except Exception as error:
            say(f"this state is not taken ({type(error).__name__}: {error})")

    # ---- within ----------------------------------------------------------------------------------

    def _begin(self) -> _Epoch:
        epoch = self._now = self._coming()
        self._number, self._next, self._is_read = epoch.number + 1, None, True
        epoch.look_at_loader()
        return epoch

    def _coming(self) -> _Epoch:
        """The epoch that begins next, its first batches decided."""
        length = length_now(self._dataset, self._samples, say)
        if length != self._samples:
            self._samples, self._next = length, None
        if self._next is None:
            self._next = _Epoch(self._number, self._arrangement(self._number))
        epoch = self._next
        if epoch.arrangement.arranged == epoch.begin:
            self._arrange(epoch)
        return epoch

    def _arrangement(self, number: int) -> Arrangement:
        order = permutation(self._samples, self._seed, number, self._replicas, self._rank)
        return Arrangement(order, self._batch_size, self._look_ahead)

    def _arrange(self, epoch: _Epoch) -> bool:
        """Decide the next batches, by what is cached now; whether they come in another order."""
        batches = -(-len(epoch.arrangement) // (self._batch_size * LOOKS_MOST))
        cached: Mask | None = None
        if self._cached is not None and self._look_ahead > 0:
            cached = epoch.ask(self._cached, self._samples)
        return epoch.arrangement.arrange(max(BATCHES_FIXED, batches), cached)
