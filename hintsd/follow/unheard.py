"""Whether the processes of a job that has announced no order read its files all the same (pure).

So it is when another loader is read than the one that was attached: a framework has made its own
from it. Of a job that has announced an order, evidence.py says whether it is followed.

INVARIANT: a file that stands in another live job's order says nothing: a validation waits while
the training of the same process reads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hintsd.follow.sequence import Inos

READS_LEAST = 16
SPAN_LEAST_S = 1.0

SAID = (
    "its processes read files of this dataset, but not through what was announced: the loader that "
    "was attached is not the one that is read. Attach that one (what accelerator.prepare "
    "returned), or use hintsd run (Lightning makes its own loader)"
)


class Unheard:
    """What is read beside one job, until its first order."""

    def __init__(self) -> None:
        self.is_said = False
        self._reads = 0
        self._since = 0.0
        self._is_its: npt.NDArray[np.bool_] | None = None  # by inode number; when it is needed

    def take(self, inos: Inos, dataset: Inos, now: float) -> bool:
        """Reads by its own processes that no order explains. `dataset`: its files. Whether that is
        to be said now: once.
        """
        if self.is_said or len(inos) == 0 or len(dataset) == 0:
            return False
        if self._is_its is None:
            self._is_its = np.zeros(int(dataset.max()) + 1, np.bool_)
            self._is_its[dataset] = True
        known = inos[inos < len(self._is_its)]
        count = int(np.count_nonzero(self._is_its[known]))
        if count and not self._reads:
            self._since = now
        self._reads += count
        if not count or self._reads < READS_LEAST or now - self._since < SPAN_LEAST_S:
            return False
        self.is_said, self._is_its = True, None
        return True
