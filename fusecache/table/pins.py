"""What is to stay on SSD: what a plan wants (docs/WIRE.md, *Pins*), and what a user does
(docs/FORMAT.md, "Pins").

INVARIANT: a list of a plan takes the place of the one before as a whole: what is in both is pinned
all the time. So do a user's pins.
"""

from __future__ import annotations

from typing import Final

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
        self._coming = _marked(self._coming, inos)
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
        return frozenset() if marks is None else _segments(marks)

    def holds(self, inos: Inos) -> NDArray[np.bool_]:
        """Which of these are pinned. All, while something is planned and no list was told."""
        if self._marks is None:
            return np.full(len(inos), self.is_planned)
        return _are_marked(self._marks, inos)


NO_LATER_ONES: Final = 1 << 32


class UserPins:
    """Of one mount: the files that a user has pinned. One thread changes it, any may ask."""

    def __init__(self) -> None:
        self._marks: Marks = np.zeros(0, np.uint8)
        self.known_to = 0
        """Inodes up to this one were looked at."""
        self._is_known = False

    def begin(self) -> None:
        """Other globs: of what they name nothing is marked."""
        self._marks, self.known_to, self._is_known = np.zeros(0, np.uint8), 0, False

    def mark(self, inos: Inos) -> None:
        self._marks = _marked(self._marks, inos)

    def replace(self, inos: Inos, known_to: int) -> None:
        """These are all that are pinned; `known_to` as in `note_known`."""
        self._marks = _marked(np.zeros(0, np.uint8), inos)
        self.note_known(known_to)

    def note_looked(self, known_to: int) -> None:
        """Inodes up to this one were looked at; more are to be."""
        self.known_to = known_to

    def note_known(self, known_to: int = NO_LATER_ONES) -> None:
        """All names up to this inode were; without it: none that comes later is pinned."""
        self.known_to, self._is_known = known_to, True

    @property
    def is_known(self) -> bool:
        return self._is_known

    def forget_dead(self) -> None:
        """What has lost its name at the origin."""
        marks = self._marks.copy()
        for ino in np.flatnonzero(marks).tolist():
            marks[ino] = not _native.is_dead(ino)
        self._marks = marks

    def holds(self, inos: Inos) -> NDArray[np.bool_]:
        """Which of these are pinned."""
        return _are_marked(self._marks, inos)

    def holds_one(self, ino: int) -> bool:
        return ino < len(self._marks) and self._marks[ino] != 0

    def may_hold(self, inos: Inos) -> NDArray[np.bool_]:
        """Which of these are pinned, or were not looked at yet."""
        found: NDArray[np.bool_] = self.holds(inos) | (inos > self.known_to)
        return found

    def segments(self) -> frozenset[int] | None:
        """In which a pinned file has a block; None: that is not known yet. Costs a pass over all
        marks.
        """
        marks = self._marks
        if not self.is_known:
            return None
        return _segments(marks) if len(marks) else frozenset()


def _marked(marks: Marks, inos: Inos) -> Marks:
    """With these."""
    most = int(inos.max(initial=0))
    if most >= len(marks):
        marks = np.append(marks, np.zeros(most + 1 - len(marks), np.uint8))
    marks[inos] = 1
    return marks


def _are_marked(marks: Marks, inos: Inos) -> NDArray[np.bool_]:
    found = np.zeros(len(inos), np.bool_)
    is_within = inos < len(marks)
    found[is_within] = marks[inos[is_within]] != 0
    return found


def _segments(marks: Marks) -> frozenset[int]:
    return frozenset(np.frombuffer(_native.segments_of(marks)[0], np.uint32).tolist())
