"""SHADE's cache (FAST '23): the most important samples stay. And what its authors measure it by.

`Shade` is the Adaptive Priority-aware Prediction (APP) policy of Algorithm 1. Importance comes by
`Hints.items` and `Hints.importance`, as soon as it is known: for `shade` the rank of each sample in
its batch (sampling.rank_importance) of a trace drawn by PADS (sampling.pads_draw). The six
ablations of section 6.2 are for traces drawn by the mean loss of each batch
(sampling.batch_importance): `sh_app` is the same policy, `sh_pqlfu` and `sh_pq` leave its ghost
cache out, and `sh_lru`, `sh_lfu` and `sh_rand` evict without regard to importance.

Where the paper leaves it open:
- The ghost cache holds all samples ever cached by section 4.2.2, all ever trained by Algorithm 1.
  Here it is all whose importance was told. Nothing is forgotten: 16 bytes a sample.
- Line 5 scores a sample before it is read, though its loss is known only after. Here the score is
  the last one told. A sample of which nothing was told is let in while there is room, and is then
  the first to go; into a full cache it is not let (line 22).
- Ranks take few values, so many samples are equal. Of those the one that was read least often goes
  (the paper keeps the count beside the score and names no use; its authors' code has this one),
  then the one with the smaller index. The comparison of line 16 is by score alone.
- Samples of unequal size: victims are taken from the least important on, each being one that
  line 16 allows, until there is room; if that is not enough none of them goes.
- Prefetching of important samples (section 4.2.2) has no algorithm in the paper and is not here.
"""

from __future__ import annotations

import heapq
from array import array
from typing import ClassVar, Final

from hintsd.policies import MISS, Hints, Policy
from hintsd.policies.lfu import LFU
from hintsd.policies.lru import LRU
from hintsd.policies.papers.importance import UNKNOWN, Importance
from hintsd.policies.random_eviction import RandomEviction

STALE_MOST: Final = 1024

Entry = tuple[float, int, int]  # importance, frequency, item


class Shade(Policy):
    """APP: a sample replaces the least important one that is held if it is at least as important.

    O(log n) an access: a heap in which importance and frequency that grew are seen late, when
    their entry comes to the top.

    INVARIANT: of every held item there is an entry in the heap that is not above its key.
    """

    name: ClassVar[str] = "shade"
    counted: ClassVar[bool] = True  # of equally important ones the least often read goes

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._sizes: dict[int, int] = {}  # of the held items
        self._ghost = Importance()
        self._frequency = array("q")  # reads of every item, held or not
        self._queue: list[Entry] = []

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if item >= len(self._frequency):
            self._reserve(item + 1)
        self._frequency[item] += 1
        if item in self._sizes:
            return item
        if size_bytes <= self.capacity_bytes - self.held_bytes or self._make_room(item, size_bytes):
            self._sizes[item] = size_bytes
            self.held_bytes += size_bytes
            heapq.heappush(self._queue, self._entry(item))
        return MISS

    def __contains__(self, item: int) -> bool:
        return item in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def hint(self, hints: Hints) -> None:
        """Takes importance. Raises ValueError where it is not finite or not of the items' shape."""
        told = self._ghost.learn(hints)
        self._reserve(len(self._ghost.values))
        held = [item for item in told.tolist() if item in self._sizes]
        if len(self._queue) + len(held) > 2 * len(self._sizes) + STALE_MOST:
            self._queue = [self._entry(item) for item in self._sizes]
            heapq.heapify(self._queue)
        else:
            for item in held:
                heapq.heappush(self._queue, self._entry(item))

    def _reserve(self, items: int) -> None:
        self._ghost.reserve(items)
        missing = len(self._ghost.values) - len(self._frequency)
        self._frequency.frombytes(bytes(missing * self._frequency.itemsize))

    def _entry(self, item: int) -> Entry:
        return (self._ghost.values[item], self._frequency[item] if self.counted else 0, item)

    def _lowest(self) -> Entry:
        """The entry of the least important held item, at the top of the heap."""
        queue = self._queue
        while True:
            top = queue[0]
            if top[2] not in self._sizes:
                heapq.heappop(queue)
            elif top != (current := self._entry(top[2])):
                heapq.heapreplace(queue, current)
            else:
                return top

    def _replaces(self, item: int, victim: Entry) -> bool:
        """Algorithm 1, lines 12, 16 and 22."""
        score = self._ghost.values[item]
        return score != UNKNOWN and score >= victim[0]

    def _make_room(self, item: int, size_bytes: int) -> bool:
        """Evicts what `item` replaces. If that leaves too little room: False, and all stay."""
        if size_bytes > self.capacity_bytes:
            return False
        victims: list[tuple[Entry, int]] = []
        free_bytes = self.capacity_bytes - self.held_bytes
        while free_bytes < size_bytes:
            lowest = self._lowest()
            if not self._replaces(item, lowest):
                for entry, victim_bytes in victims:
                    self._sizes[entry[2]] = victim_bytes
                    heapq.heappush(self._queue, entry)
                return False
            heapq.heappop(self._queue)
            victim_bytes = self._sizes.pop(lowest[2])
            victims.append((lowest, victim_bytes))
            free_bytes += victim_bytes
        self.held_bytes = self.capacity_bytes - free_bytes
        if self._on_evict is not None:
            for entry, _ in victims:
                self._on_evict(entry[2])
        return True

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.held_bytes == sum(self._sizes.values())
        self._ghost.check_invariants()
        bounded = {entry[2] for entry in self._queue if entry <= self._entry(entry[2])}
        assert bounded >= self._sizes.keys()


class ShadeCoarse(Shade):
    """APP without loss decomposition, ranks and PADS: for importance of whole batches."""

    name: ClassVar[str] = "sh_app"


class ShadePriorityLfu(Shade):
    """The least important goes, of equals the least often read; all that fits is let in."""

    name: ClassVar[str] = "sh_pqlfu"

    def _replaces(self, item: int, victim: Entry) -> bool:
        return True


class ShadePriority(ShadePriorityLfu):
    """The least important goes; all that fits is let in."""

    name: ClassVar[str] = "sh_pq"
    counted: ClassVar[bool] = False


class ShadeLRU(LRU):
    """The least recently read goes."""

    name: ClassVar[str] = "sh_lru"


class ShadeLFU(LFU):
    """The least often read goes."""

    name: ClassVar[str] = "sh_lfu"


class ShadeRandom(RandomEviction):
    """Any goes."""

    name: ClassVar[str] = "sh_rand"


VARIANTS: Final = (
    Shade,
    ShadePriorityLfu,
    ShadePriority,
    ShadeLRU,
    ShadeLFU,
    ShadeRandom,
    ShadeCoarse,
)
"""SHADE and its ablations, in the order of section 6.2."""
