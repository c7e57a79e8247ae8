"""Scores: of every sample the last one, when it was told, and how often the sample was trained.

8 bytes a sample: f32 score, u16 epoch, u16 count.

INVARIANT: every score is finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hintsd.sampling.formulas import Integers, Mask

Values = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint16]

EPOCH_MOST: Final = 65_534  # later ones count as this one
TIMES_MOST: Final = 65_000  # and more


class Scores:
    """Of samples 0 … length - 1."""

    __slots__ = ("_news", "times", "told", "values")

    def __init__(self, length: int) -> None:
        self.values: Values = np.zeros(length, np.float32)
        self.told = np.zeros(length, np.uint16)
        """0: no score yet; else 1 + the epoch of the last one."""
        self.times = np.zeros(length, np.uint16)
        """How often it was trained, `TIMES_MOST` or a few more at most."""
        self._news: Counts | None = None

    def __len__(self) -> int:
        return len(self.values)

    @property
    def seen(self) -> Mask:
        """Which samples have a score, shape (samples,)."""
        return self.told > 0

    def learn(self, indices: Integers, values: Values, epoch: int) -> None:
        """These samples were trained in this epoch, and have these scores now: both of shape (n,);
        of a sample that comes twice the last one stays."""
        self.values[indices] = values
        self.told[indices] = min(epoch, EPOCH_MOST) + 1
        np.add.at(self.times, indices[self.times[indices] < TIMES_MOST], 1)
        if self._news is not None:
            np.add.at(self._news, indices[self._news[indices] < TIMES_MOST], 1)

    def note_news(self) -> None:
        """From now on remember what is new, for `take_news`: 2 more bytes a sample."""
        if self._news is None:
            self._news = np.zeros(len(self), np.uint16)

    def take_news(self) -> tuple[npt.NDArray[np.int64], Values, Counts]:
        """Since the last time: the samples that were trained, ascending; their scores now; how
        often they were trained."""
        if self._news is None:
            return np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.uint16)
        indices = np.flatnonzero(self._news)
        times = self._news[indices]
        self._news[indices] = 0
        return indices, self.values[indices], times

    def merge(
        self, indices: Integers, values: Values, times: Integers, epoch: int, is_own: bool
    ) -> None:
        """What another rank has learned (`take_news`); of our own the scores alone."""
        self.values[indices] = values
        self.told[indices] = min(epoch, EPOCH_MOST) + 1
        if not is_own:
            more = self.times[indices].astype(np.int64) + times
            self.times[indices] = np.minimum(more, TIMES_MOST)

    def ages(self, epoch: int) -> npt.NDArray[np.int64]:
        """Epochs since each score was told, of the samples that have one; 0: in this epoch."""
        told = self.told[self.told > 0].astype(np.int64) - 1
        return np.maximum(min(epoch, EPOCH_MOST) - told, 0)

    def resize(self, length: int) -> None:
        """The dataset has another length: what is new has no score yet."""
        for name in ("values", "told", "times", "_news"):
            old = getattr(self, name)
            if old is not None:
                new = np.zeros(length, old.dtype)
                new[: min(length, len(old))] = old[:length]
                setattr(self, name, new)

    def state(self) -> dict[str, Any]:
        """Arrays, copied, in types that torch has as well."""
        return {
            "values": self.values.copy(),
            "told": self.told.view(np.int16).copy(),
            "times": self.times.view(np.int16).copy(),
            "news": None if self._news is None else self._news.view(np.int16).copy(),
        }

    def load(self, state: Mapping[str, Any], *, is_own: bool) -> None:
        """What `state` gave; `is_own`: on this rank, so that its news are ours to tell. ValueError,
        and nothing is changed: it is no such thing."""
        values = np.array(state["values"], np.float32)
        told = np.array(state["told"], np.int16).view(np.uint16)
        times = np.array(state["times"], np.int16).view(np.uint16)
        if not values.ndim == 1 or not values.shape == told.shape == times.shape:
            raise ValueError("scores are not three rows of one length")
        if not np.isfinite(values).all():
            raise ValueError("a score is not finite")
        self.values, self.told, self.times = values, told, times
        if self._news is not None:
            news = np.zeros(len(values), np.int16)
            if is_own and state["news"] is not None:
                news[:] = state["news"]
            self._news = news.view(np.uint16)
