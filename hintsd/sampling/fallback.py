"""Fallback: when importance makes way for a plain shuffle (SHADE, 4.2.1).

The paper: on a steep decline, or where the accuracy stagnates, the samples are shuffled instead of
training on few important ones. It gives no numbers.

INVARIANT: what is not a finite number changes nothing.
"""

from __future__ import annotations

import math
from typing import Final

PATIENCE: Final = 2  # judgements without a new best, after which one epoch is shuffled
STEEP: Final = 0.9  # of the best accuracy: below it the next epoch is shuffled


class Fallback:
    """From the accuracies, as they are judged, what the next epoch is to be."""

    def __init__(self) -> None:
        self.best = -math.inf
        self.last = -math.inf
        self.is_rising = False
        """The last accuracy is above the one before: what is cached may be repeated."""
        self.waited = 0
        """Judgements since the best one, or since the last shuffle."""
        self.is_steep = False

    def judge(self, accuracy: float) -> bool:
        """Take the accuracy on held-out samples, 0 to 1 or to 100; whether it is a number."""
        if not math.isfinite(accuracy):
            return False
        self.is_rising = math.isfinite(self.last) and accuracy > self.last
        self.is_steep = self.best > 0 and accuracy < STEEP * self.best
        self.waited = 0 if accuracy > self.best else self.waited + 1
        self.best, self.last = max(self.best, accuracy), accuracy
        return True

    def take_shuffle(self) -> bool:
        """Whether the epoch that is drawn now is a plain shuffle."""
        is_shuffled = self.is_steep or self.waited >= PATIENCE
        if is_shuffled:
            self.is_steep, self.waited = False, 0
        return is_shuffled

    def state(self) -> dict[str, float]:
        return {
            "best": self.best,
            "last": self.last,
            "is_rising": float(self.is_rising),
            "waited": float(self.waited),
            "is_steep": float(self.is_steep),
        }

    def load(self, state: dict[str, float]) -> None:
        self.best, self.last = float(state["best"]), float(state["last"])
        self.is_rising, self.is_steep = bool(state["is_rising"]), bool(state["is_steep"])
        self.waited = int(state["waited"])
