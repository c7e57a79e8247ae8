"""The importance of items as it was last told; 8 bytes an item."""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np
import numpy.typing as npt

from hintsd.policies import Hints
from hintsd.sampling.formulas import finite

UNKNOWN: Final = float("-inf")


class Importance:
    """`values[item]`: what was told of it last, UNKNOWN (less than all others) if nothing was.

    INVARIANT: every value is finite or UNKNOWN.
    """

    def __init__(self) -> None:
        self.values = array("d")

    def reserve(self, items: int) -> None:
        """Makes `values` at least this long."""
        missing = items - len(self.values)
        if missing > 0:
            self.values.extend([UNKNOWN] * max(missing, len(self.values)))

    def learn(self, hints: Hints) -> npt.NDArray[np.int64]:
        """Takes the importance values in `hints`; answers the items that they are of.

        Raises ValueError, and takes nothing, where items and importance are not of one shape, an
        item is negative or an importance is not finite.
        """
        if hints.items is None and hints.importance is None:
            return np.empty(0, np.int64)
        if hints.items is None or hints.importance is None:
            raise ValueError("items and importance are told together or not at all")
        items = np.asarray(hints.items, np.int64)
        values = finite("importance", hints.importance)
        if items.ndim != 1 or items.shape != values.shape:
            raise ValueError(
                f"items and importance must be of one length, not {items.shape} and {values.shape}"
            )
        if len(items):
            if items.min() < 0:
                raise ValueError(f"items must be 0 or more, not {items.min()}")
            self.reserve(int(items.max()) + 1)
            np.frombuffer(self.values)[items] = values
        return items

    def check_invariants(self) -> None:
        values = np.frombuffer(self.values) if self.values else np.empty(0)
        assert (np.isfinite(values) | (values == UNKNOWN)).all()
