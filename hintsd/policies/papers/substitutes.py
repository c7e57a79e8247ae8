"""Held samples that stand for others, each once an epoch: iCACHE's L-cache, a chunk of Quiver's."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

DRAWN: Final = 4096  # random numbers at a time: one alone costs as much as fifty of many


class Substitutes:
    """A part of a cache. Every operation on one item is O(1).

    INVARIANT: every held item is either unused, and may stand for another, or used.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self.held_bytes = 0
        self.unused_bytes = 0
        self.sizes: dict[int, int] = {}
        self.unused: list[int] = []
        self._place: dict[int, int] = {}  # where in `unused`
        self._used: OrderedDict[int, None] = OrderedDict()  # in the order they were served
        self._rng = rng
        self._draws: list[float] = []

    def add(self, item: int, size_bytes: int, *, used: bool) -> None:
        self.sizes[item] = size_bytes
        self.held_bytes += size_bytes
        if used:
            self._used[item] = None
        else:
            self._offer(item)

    def use(self, item: int) -> None:
        """It was served: it stands for no other until `begin`."""
        place = self._place.pop(item, None)
        if place is None:
            return
        last = self.unused.pop()
        if last != item:
            self.unused[place] = last
            self._place[last] = place
        self.unused_bytes -= self.sizes[item]
        self._used[item] = None

    def draw(self) -> int:
        """One of `unused`, each as likely, which is used now."""
        if not self._draws:
            self._draws = self._rng.random(DRAWN).tolist()
        item = self.unused[int(self._draws.pop() * len(self.unused))]
        self.use(item)
        return item

    def begin(self) -> None:
        """A new epoch: nothing was served yet."""
        for item in self._used:
            self._offer(item)
        self._used.clear()

    def make_room(self, size_bytes: int, most_bytes: int) -> list[int] | None:
        """The used items, served first, that go so that with this one at most `most_bytes` are
        held; None, and all stay, if that is not enough.
        """
        if size_bytes > most_bytes - self.unused_bytes:
            return None
        gone = []
        while self.held_bytes + size_bytes > most_bytes:
            item = next(iter(self._used))
            self.remove(item)
            gone.append(item)
        return gone

    def shrink(self, most_bytes: int) -> list[int]:
        """The items, used ones first, that go so that at most `most_bytes` are held."""
        gone = []
        while self.held_bytes > most_bytes:
            item = next(iter(self._used)) if self._used else self.unused[-1]
            self.remove(item)
            gone.append(item)
        return gone

    def remove(self, item: int) -> int:
        """It is held no more; answers its size."""
        self.use(item)
        del self._used[item]
        size_bytes = self.sizes.pop(item)
        self.held_bytes -= size_bytes
        return size_bytes

    def check_invariants(self) -> None:
        assert self.held_bytes == sum(self.sizes.values())
        assert self.unused_bytes == sum(self.sizes[item] for item in self.unused)
        assert self._place == {item: place for place, item in enumerate(self.unused)}
        assert self._place.keys() | self._used.keys() == self.sizes.keys()
        assert len(self._place) + len(self._used) == len(self.sizes)

    def _offer(self, item: int) -> None:
        self._place[item] = len(self.unused)
        self.unused.append(item)
        self.unused_bytes += self.sizes[item]
