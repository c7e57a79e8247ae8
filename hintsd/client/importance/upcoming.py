"""Upcoming: the epochs that are drawn and not begun, and all that a draw depends on.

INVARIANT: an epoch is drawn once, at the latest when it begins. All ranks draw at the same moments,
and the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hintsd.client.importance import ranks
from hintsd.client.importance.learning import Learning, say
from hintsd.client.importance.shared import call, mask_of
from hintsd.sampling.epochs import Drawing, Epoch
from hintsd.sampling.fallback import Fallback
from hintsd.sampling.formulas import Mask
from hintsd.sampling.settings import Settings

OnDrawn = Callable[[int, npt.NDArray[Any]], object]


class Upcoming:
    """Of one sampler."""

    def __init__(self, settings: Settings, drawing: Drawing, learning: Learning) -> None:
        self._settings, self._drawing, self._learning = settings, drawing, learning
        self.number = 0
        """Of the epoch that begins next."""
        self.drawn: list[Epoch] = []
        """Of all ranks, from `number` on."""
        self.fallback = Fallback()
        self._cached: Callable[[], Any] | None = None
        self._is_offer = False  # it is not the user's
        self.hooks: list[OnDrawn] = []
        if settings.num_replicas > 1:
            learning.scores.note_news()

    def first(self) -> Epoch:
        """The one that begins next; all ranks have to ask for it."""
        if not self.drawn:
            self._draw()
        return self.drawn[0]

    def take(self) -> Epoch:
        """The one that begins now. What is to be drawn ahead is drawn now, too."""
        epoch = self.first()
        self.drawn.pop(0)
        self.number = epoch.number + 1
        return epoch

    def draw_ahead(self) -> None:
        while len(self.drawn) < self._settings.draw_ahead:
            self._draw()

    def share(self, epoch: Epoch) -> Epoch:
        """What this rank reads of it."""
        return epoch.of_rank(self._settings.num_replicas, self._settings.rank)

    def reads(self) -> int:
        """Of this rank, in the epoch that begins next."""
        if self.drawn:
            mine = self.share(self.drawn[0])
            return len(mine.order) - mine.read
        samples = len(self._learning.scores)
        return self._drawing.reads(samples, self.number) // self._settings.num_replicas

    def ask(self, cached: Callable[[], Any], *, is_offer: bool) -> None:
        """At each draw, what is cached. `is_offer`: where nobody else tells it and it is needed."""
        if not is_offer or self._cached is None or self._is_offer:
            self._cached, self._is_offer = cached, is_offer

    def begin_at(self, number: int) -> None:
        """The epoch that begins next has this number."""
        if number != self.number:
            self.number, self.drawn = number, []

    def forget(self) -> None:
        """What is drawn is of another dataset."""
        self.drawn = []

    def gather(self) -> None:
        """What each rank has learned since the last time, for all; every rank has to call it."""
        learning = self._learning
        learning.flush()
        self._gather(None)

    def _draw(self) -> None:
        learning, number = self._learning, self.number + len(self.drawn)
        learning.flush()
        cached = self._gather(self._ask_cached(number))
        shuffle = number >= self._settings.warm_up and self.fallback.take_shuffle()
        draw, scores = self._drawing.draw, learning.scores
        repeat = self.fallback.is_rising
        try:
            epoch = draw(scores, number, cached=cached, shuffle=shuffle, repeat=repeat)
        except Exception as error:  # memory, say, which a plain shuffle needs less of
            say(f"an epoch cannot be drawn by its scores, and is shuffled ({error!r})")
            epoch = draw(scores, number, cached=None, shuffle=True, repeat=False)
        self.drawn.append(epoch)
        mine = self.share(epoch)
        call(self.hooks, say, number, mine.order[mine.read :])

    def _ask_cached(self, number: int) -> Mask | None:
        """Which samples are cached when this epoch is drawn, as far as anybody says."""
        samples, settings = len(self._learning.scores), self._settings
        is_needed = settings.needs_cached and number >= settings.warm_up
        if self._cached is None or (self._is_offer and not is_needed):
            return None
        return mask_of(self._cached, samples, say)

    def _gather(self, cached: Mask | None) -> Mask | None:
        """Exchange news, what rank 0 was judged by, and what is cached; the latter, of all. Where
        ranks cannot exchange it, None: each has another cache, and would draw another epoch.
        """
        settings, scores = self._settings, self._learning.scores
        if settings.num_replicas == 1:
            return cached
        if not ranks.is_together():
            if scores.seen.any():
                say(
                    "num_replicas is above 1, and torch.distributed is not initialised: each rank "
                    "draws by its own scores, and ranks read other epochs"
                )
            return None
        try:
            all_told = ranks.exchange(
                {
                    "epoch": self.number,
                    "samples": len(scores),
                    "news": scores.take_news(),
                    "fallback": self.fallback.state(),
                    "cached": None if cached is None else np.packbits(cached),
                }
            )
        except Exception as error:
            say(f"ranks cannot exchange their scores ({error!r})")
            return None
        own, cached = settings.rank, None
        for rank, told in enumerate(all_told):
            if (told["epoch"], told["samples"]) != (self.number, len(scores)):
                say(f"rank {rank} is in another epoch, or has another dataset, than rank {own}")
                continue
            indices, values, times = told["news"]
            scores.merge(indices, values, times, self._learning.epoch, is_own=rank == own)
            if rank != own and len(indices):
                call(self._learning.hooks, say, self._learning.epoch, indices, values)
            if told["cached"] is not None:
                mask = np.unpackbits(told["cached"], count=len(scores)).astype(np.bool_)
                cached = mask if cached is None else cached | mask
        self.fallback.load(all_told[0]["fallback"])
        return cached

    def state(self, begun: Epoch | None) -> dict[str, Any]:
        """`begun`: the epoch that is read now, of all ranks, as far as it is trained."""
        epochs = self.drawn if begun is None else [begun, *self.drawn]
        return {
            "epoch": self.number if begun is None else begun.number,
            "drawn": [_state(epoch) for epoch in epochs],
            "fallback": self.fallback.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave. KeyError, TypeError, ValueError: it is no such thing."""
        samples = len(self._learning.scores)
        number, drawn = int(state["epoch"]), [_epoch(told, samples) for told in state["drawn"]]
        self.fallback.load(state["fallback"])
        self.number, self.drawn = number, drawn


def _state(epoch: Epoch) -> dict[str, Any]:
    return {
        "number": epoch.number,
        "order": epoch.order.copy(),
        "weights": None if epoch.weights is None else epoch.weights.copy(),
        "computed": None if epoch.computed is None else epoch.computed.copy(),
        "counts": [epoch.repeats, epoch.substituted, int(epoch.is_shuffled), epoch.read],
    }


def _epoch(told: Mapping[str, Any], samples: int) -> Epoch:
    order = np.array(told["order"])
    if order.dtype.kind != "i" or order.ndim != 1 or not len(order):
        raise ValueError("an order is no row of integers")
    if order.min() < 0 or order.max() >= samples:
        raise ValueError("an order is of another dataset")
    order.flags.writeable = False
    weights, computed = told["weights"], told["computed"]
    repeats, substituted, is_shuffled, read = (int(count) for count in told["counts"])
    return Epoch(
        int(told["number"]),
        order,
        None if weights is None else np.array(weights, np.float32),
        None if computed is None else np.array(computed, np.bool_),
        repeats,
        substituted,
        bool(is_shuffled),
        read,
    )
