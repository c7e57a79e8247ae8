"""MIN with bypass (Belady 1966): the yardstick. Offline: for tests and simulations only.

Knows the whole access sequence; when room is needed, what is used furthest in the future goes,
and an item that would be that one itself passes through without being kept. For items of one
size no policy fetches less; for mixed sizes it is a good heuristic.
"""

from __future__ import annotations

import heapq
from array import array
from typing import ClassVar, Final

import numpy as np

from hintsd.policies import MISS, Hints
from hintsd.policies.table import NOT_HELD, Table
from hintsd.sampling.formulas import counts

NEVER: Final = np.iinfo(np.int64).max
_STALE_MOST = 1024


class Belady(Table):
    """8 bytes an item, 16 for each access of the sequence, 40 to 80 for each item held; O(log n) an
    access. Tell it the whole sequence at once: what is not in it will not be kept. Before it is
    told, and after its end, everything passes.

    INVARIANT: every held item is used again; it is dropped at its last use.
    """

    name: ClassVar[str] = "belady"

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._sequence = self._next_use = memoryview(array("q"))
        self._position = 0
        self._uses: list[int] = []  # heap of -(position of a next use); past ones count for nothing

    def hint(self, hints: Hints) -> None:
        """Raises ValueError unless the sequence is of items, one after the other."""
        if hints.sequence is None:
            return
        sequence = counts("sequence", hints.sequence)
        order = np.argsort(sequence, kind="stable")
        again = sequence[order[1:]] == sequence[order[:-1]]
        next_use = np.full(len(sequence), NEVER)
        next_use[order[:-1][again]] = order[1:][again]
        first = order[np.concatenate([np.ones(min(1, len(order)), np.bool_), ~again])]
        self._sequence, self._next_use = sequence.data, next_use.data
        self._position = 0
        held = np.flatnonzero(self._rows["size"] > NOT_HELD)
        for item in held[~np.isin(held, sequence)].tolist():
            self._drop(item)
        self._uses = (-first[np.isin(sequence[first], held)]).tolist()
        heapq.heapify(self._uses)

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        """Raises ValueError where the sequence that was told says otherwise."""
        if item >= self._items:
            self._grow(item)
        use = self._advance(item)
        if item in self:
            if use == NEVER:
                self._drop(item)
            else:
                self._expect(use)
            return item
        if use != NEVER and self._make_room(size_bytes, use):
            self._sizes[item] = size_bytes
            self.held_bytes += size_bytes
            self._count += 1
            self._expect(use)
        return MISS

    def _advance(self, item: int) -> int:
        """The position of the next use after this one."""
        position = self._position
        if position >= len(self._sequence):
            return NEVER
        if self._sequence[position] != item:
            raise ValueError(
                f"access {position} is of item {item}; the sequence that was told says "
                f"{self._sequence[position]}"
            )
        self._position = position + 1
        return self._next_use[position]

    def _expect(self, use: int) -> None:
        heapq.heappush(self._uses, -use)
        if len(self._uses) > 2 * len(self) + _STALE_MOST:
            self._uses = [minus_use for minus_use in self._uses if -minus_use >= self._position]
            heapq.heapify(self._uses)

    def _make_room(self, size_bytes: int, use: int) -> bool:
        """Drops what is used later than `use`, if that makes enough room, else nothing."""
        wanted = self.held_bytes + size_bytes - self.capacity_bytes
        later: list[int] = []
        while wanted > 0 and self._uses and -self._uses[0] > use:
            later.append(heapq.heappop(self._uses))
            wanted -= self._sizes[self._sequence[-later[-1]]]
        if wanted > 0:
            for minus_use in later:
                heapq.heappush(self._uses, minus_use)
            return False
        for minus_use in later:
            self._drop(self._sequence[-minus_use])
        return True

    def check_invariants(self) -> None:
        super().check_invariants()
        coming = [-minus_use for minus_use in self._uses if -minus_use >= self._position]
        assert len({self._sequence[use] for use in coming}) == len(coming) == len(self)
        assert all(self._sequence[use] in self for use in coming)
