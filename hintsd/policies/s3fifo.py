"""S3-FIFO (Yang et al., SOSP '23, Algorithm 1): three queues, no promotion on a hit.

A new item enters the small queue (a tenth of the capacity). What is used twice there moves to the
main queue; the rest goes soon, and only its name stays, in the ghost queue: what comes back while
it is there enters the main queue at once. What is first in the main queue and was used since goes
to its end again, at most three times for three uses or more.

Queues are counted in bytes. The ghost queue is a clock: an item is in it as long as names of at
most nine tenths of the capacity were put in since. Where the paper is silent this does what its
authors' simulator does (libCacheSim, S3FIFO.c): until something is evicted for the first time, what
does not fit into the small queue enters the main queue. Unlike there, a name that comes back leaves
no room for older ones in the ghost queue, and items larger than the small queue are let in: of a
cache of a few items it has no room for any.
"""

from __future__ import annotations

from typing import ClassVar, Final

from hintsd.policies import MISS
from hintsd.policies.queue import NONE, Queue
from hintsd.policies.table import NOT_HELD, Evicting

SMALL_SHARE: Final = 0.1
PROMOTED_USES: Final = 2
USES_MOST: Final = 3


class S3FIFO(Evicting):
    """9 bytes an item and 4 to 8 for each that is held; O(1) an access, over many.

    INVARIANT: `_sizes` of an item that went from the small queue is NOT_HELD - 1 - the ghost clock
    of then, before its own size was added.
    """

    name: ClassVar[str] = "s3fifo"
    ghost_share: ClassVar[float] = 0.9

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._small, self._main = Queue(), Queue()
        self._uses = bytearray()  # since it entered its queue; at most USES_MOST
        self._small_most_bytes = int(self.capacity_bytes * SMALL_SHARE)
        self._ghost_most_bytes = int(self.capacity_bytes * self.ghost_share)
        self._small_bytes = 0
        self._ghost_clock_bytes = 0  # of all names that were ever put into the ghost queue
        self._returning = False  # the item that is about to enter was in the ghost queue
        self._has_evicted = False

    def _grow(self, item: int) -> None:
        super()._grow(item)
        self._uses.extend(bytes(self._items - len(self._uses)))

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if item >= self._items:
            self._grow(item)
        state = self._sizes[item]
        if state > NOT_HELD:
            if self._uses[item] < USES_MOST:
                self._uses[item] += 1
            return item
        since_bytes = self._ghost_clock_bytes - (NOT_HELD - 1 - state)
        self._returning = state < NOT_HELD and since_bytes <= self._ghost_most_bytes
        self._let_in(item, size_bytes)
        return MISS

    def _enter(self, item: int) -> None:
        size_bytes = self._sizes[item]
        fills_up = not self._has_evicted and self._small_bytes >= self._small_most_bytes
        if self._returning or fills_up:
            self._main.append(item)
        else:
            self._small.append(item)
            self._small_bytes += size_bytes
        self._uses[item] = 0

    def _evict(self) -> None:
        self._has_evicted = True
        if self.held_bytes - self._small_bytes <= self.capacity_bytes - self._small_most_bytes:
            while (item := self._small.pop()) != NONE:
                size_bytes = self._sizes[item]
                self._small_bytes -= size_bytes
                if self._uses[item] < PROMOTED_USES:
                    self._drop(item)
                    self._sizes[item] = NOT_HELD - 1 - self._ghost_clock_bytes
                    self._ghost_clock_bytes += size_bytes
                    return
                self._main.append(item)
                self._uses[item] = 0
        self._evict_main()

    def _evict_main(self) -> None:
        while True:
            item = self._main.pop()
            if self._uses[item] == 0:
                self._drop(item)
                return
            self._main.append(item)
            self._uses[item] -= 1

    def check_invariants(self) -> None:
        super().check_invariants()
        small, main = list(self._small), list(self._main)
        assert len(small) + len(main) == len(self)
        assert all(item in self for item in (*small, *main))
        assert all(self._uses[item] <= USES_MOST for item in (*small, *main))
        assert sum(self._sizes[item] for item in small) == self._small_bytes
        assert NOT_HELD - 1 - int(self._rows["size"].min()) <= self._ghost_clock_bytes
