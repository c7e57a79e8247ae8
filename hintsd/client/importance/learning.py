"""Learning: losses ► scores, batch by batch, and whoever wants to hear of them.

INVARIANT: what is wrong with losses is one warning; the scores that there are stay, and nothing is
raised.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from hintsd.client.importance.losses import Arriving, Refused, arriving, count_of, indices_of
from hintsd.client.importance.shared import call
from hintsd.client.warning import warn_once
from hintsd.sampling.epochs import Drawing
from hintsd.sampling.pairing import Pairing, Unpaired
from hintsd.sampling.scores import Scores

OnScores = Callable[[int, npt.NDArray[np.int64], npt.NDArray[np.float32]], object]


def say(why: str) -> None:
    """One warning in a process, whatever numbers are in it."""
    reason = "importance: " + re.sub(r"[\d.]+", "", why)
    warn_once(f"ImportanceSampler: {why}; training goes on with the scores that there are", reason)


class Learning:
    """Of one sampler: its scores, and whose the next losses are."""

    def __init__(self, scores: Scores, drawing: Drawing, batch_size: int | None) -> None:
        self.scores, self._drawing = scores, drawing
        self.pairing = Pairing(batch_size)
        self.epoch = 0
        """The one that is read now."""
        self.refused = 0
        """Losses that were not taken: of no batch, of another number, not finite."""
        self.hooks: list[OnScores] = []
        self._unpairable = ""
        self._arriving: deque[tuple[Arriving, npt.NDArray[np.int64], int]] = deque()

    def begin(self, epoch: int) -> None:
        """The losses that come from now on are of this epoch."""
        self.epoch, self._unpairable = epoch, ""

    def end(self) -> None:
        """No epoch is read: losses that come now are of no batch."""
        self.flush()
        self.pairing.begin(np.empty(0, np.int64), None)

    @property
    def pairs(self) -> bool:
        """Whether losses need no indices in this epoch."""
        return not self._unpairable

    def refuse_pairing(self, why: str) -> None:
        """In this epoch losses come in another order than batches were drawn."""
        self._unpairable = why

    def learn(self, losses: Any, indices: Any = None) -> None:
        """Losses of the next batch, or of these samples. See `ImportanceSampler.learn`."""
        try:
            count = count_of(losses)
            if indices is None:
                if self._unpairable:
                    raise Unpaired(f"{self._unpairable}: learn(losses, indices=…) is needed")
                if count < 0:
                    with suppress(Unpaired):
                        self.pairing.take(count)
                    arriving(losses)
                paired = self.pairing.take(count).astype(np.int64)
                coming = arriving(losses)
            else:
                coming = arriving(losses)
                paired = indices_of(indices, count, len(self.scores))
                self.pairing.skip(count)
            self._arriving.append((coming, paired, self.epoch))
        except (Refused, Unpaired) as problem:
            self.refused += max(1, count)
            say(str(problem))
        except Exception as error:  # a strange tensor
            say(f"losses cannot be read ({error!r})")
        while self._arriving and self._arriving[0][0].is_here:
            self._take(*self._arriving.popleft())

    def flush(self) -> None:
        """Wait for all losses that were handed over."""
        while self._arriving:
            self._take(*self._arriving.popleft())

    def _take(self, coming: Arriving, indices: npt.NDArray[np.int64], epoch: int) -> None:
        try:
            losses = coming.take()
        except Exception as error:  # of the device
            say(f"losses cannot be read ({error!r})")
            return
        finite = np.isfinite(losses)
        if not finite.all():
            count = len(losses) - int(np.count_nonzero(finite))
            self.refused += count
            say(f"{count} of {len(losses)} losses are NaN or infinite")
            losses, indices = losses[finite], indices[finite]
        if len(losses) == 0:
            return
        scores = self.scores
        before = np.where(scores.told[indices] > 0, scores.values[indices], np.nan)
        whole = max(len(coming), self.pairing.batch_size or 0)
        values = self._drawing.score(losses, before, whole).astype(np.float32)
        scores.learn(indices, values, epoch)
        call(self.hooks, say, epoch, indices, values)
