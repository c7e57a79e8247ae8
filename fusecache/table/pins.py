"""What a plan wants to stay on SSD (docs/WIRE.md, *Pins*).

INVARIANT: a list takes the place of the one before as a whole: what is in both is pinned all the
time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fusecache import _native

Inos = NDArray[np.uint32]
Marks = NDArray[np.uint8]


class Pins:
    """Of one mount. `segments` is for any thread."""

    def __init__(self) -> None:
        self.is_planned = False
        """Whether a hintsd wants files staged, fetched or pinned."""
        self.number = 0
        """Of the list, as hintsd calls it; 0: there is none."""
        self._marks: Marks | None = None  # by inode number; None: not told
        self._coming: Marks | None = None  # of the list that is being told
        self._others = False

    def plan(self) -> None:
        """Something is wanted: until a list is told, nothing is evicted."""
        self.is_planned = True

    def clear(self) -> None:
        """There is no plan: everything may go."""
        self.is_planned, self.number, self._marks, self._coming = False, 0, None, None

    def put(self, inos: Inos, number: int, others: bool, last: bool) -> Inos:
        """The next part of a list. Of the `last` one, what is larger than a block and not known to
        be on SSD as a whole. Blocking.
        """
        self.is_planned = True
        inos = inos[(inos > 0) & (inos <= _native.count())]
        if self._coming is None:
            self._coming = np.zeros(0, np.uint8)
        most = int(inos.max(initial=0))
        if most >= len(self._coming):
            self._coming = np.append(self._coming, np.zeros(most + 1 - len(self._coming), np.uint8))
        self._coming[inos] = 1
        if not last:
            return np.zeros(0, np.uint32)
        self._marks, self._others, self._coming = self._coming, others, None
        self.number = number
        return np.frombuffer(_native.segments_of(self._marks)[1], np.uint32)

    @property
    def may_evict(self) -> bool:
        """Whether what is not pinned may go, for the plan, too."""
        return self._marks is not None and self._others

    def segments(self) -> frozenset[int]:
        """In which a pinned file has a block, now. Costs a pass over all marks."""
        marks = self._marks
        if marks is None:
            return frozenset()
        return frozenset(np.frombuffer(_native.segments_of(marks)[0], np.uint32).tolist())
