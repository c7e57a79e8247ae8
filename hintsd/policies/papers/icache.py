"""iCACHE (HPCA '23): important samples are cached by importance, the others are substituted.

The H-cache holds the samples of the H-list, the most important ones; the L-cache holds others, and
a sample outside the H-list that is not cached is answered by one of them (Algorithm 1). Importance
comes by `Hints.items` and `Hints.importance` at any time; the H-list is pulled from it when
`Hints.epoch` says that an epoch begins.

Where the paper leaves it open:
- The H-list is the `h_share` most important of the samples whose importance was told; 0.7 as in its
  authors' code. Before there is one every sample counts as an H-sample (their warm-up).
- H- and L-cache share the capacity 9 : 1 at first (section V-A) and, whenever the H-list is pulled,
  as H- and L-samples were read since the last pull (section III-A). The shares bind when the cache
  is full: a region may use what the other leaves free, and gives it back.
- A sample that is held is served, also where the H-list has changed since and Algorithm 1 would
  look into the other region: an H-sample that became less important stays in the H-cache, where it
  is the first to go, and an L-sample that became important moves there if it is let in.
- The shadow heap is built `REBUILT` samples an access. Should the frozen heap run out of samples
  before it is ready, the rest is built at once.
- Samples of unequal size: a victim goes only if all that must go are less important.
- A package has 1 MB, or what the L-cache has at first if that is less.

Packages need `on_load`. Without it the L-cache takes L-samples as they miss, in place of those that
were already served in this epoch.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from typing import ClassVar, Final

import numpy as np

from hintsd.policies import MISS, Hints, Policy
from hintsd.policies.papers.importance import UNKNOWN, Importance
from hintsd.policies.papers.substitutes import Substitutes
from hintsd.sampling.formulas import h_list

H_SHARE: Final = 0.7
L_PART: Final = 10  # the L-cache has at first one part in ten of the capacity
PACKAGE_BYTES: Final = 1 << 20
REBUILT: Final = 16

Entry = tuple[float, int, int]  # importance, when it was let in, item


class HCache:
    """Samples by importance: the least important goes for a more important one, no other.

    Its heap is never changed in place (section III-B): `refresh` freezes it, from then on it gives
    victims only, while what is let in and what is held already goes, with its new importance, to
    the shadow heap, which takes its place when all held samples are in it.

    INVARIANT: every held item is in the heap, in the shadow heap or among those still to go there.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self.sizes: dict[int, int] = {}
        self.importance = array("d")  # of every item, as of the last pull
        self._let_in: dict[int, int] = {}  # held items -> how many were let in before
        self._count = 0
        self._heap: list[Entry] = []
        self._shadow: list[Entry] | None = None
        self._waiting: list[int] = []  # held items that the shadow heap lacks

    def refresh(self, importance: array[float]) -> None:
        """Takes new importance values, of every item, and begins a shadow heap."""
        self.finish()
        self.importance = importance
        self._shadow = []
        self._waiting = list(self.sizes)

    def rebuild(self, items: int) -> None:
        """Moves so many items to the shadow heap; when it has all it is the heap."""
        if self._shadow is None:
            return
        for _ in range(min(items, len(self._waiting))):
            item = self._waiting.pop()
            if item in self.sizes:
                heapq.heappush(self._shadow, self._entry(item))
        if not self._waiting:
            self._heap, self._shadow = self._shadow, None

    def finish(self) -> None:
        """The shadow heap takes over now."""
        if self._shadow is not None:
            self._shadow += [self._entry(item) for item in self._waiting if item in self.sizes]
            heapq.heapify(self._shadow)
            self._waiting = []
            self._heap, self._shadow = self._shadow, None

    def admit(self, item: int, size_bytes: int, most_bytes: int) -> list[int] | None:
        """Lets it in if at most `most_bytes` are held then (lines 9 to 16): the items that went
        for it. None, and all stay, if one of these would be as important.
        """
        if size_bytes > most_bytes:
            return None
        value, heap = self._value(item), self._heap
        victims: list[tuple[Entry, int]] = []
        free_bytes = most_bytes - self.held_bytes
        while free_bytes < size_bytes:
            top = self._lowest()
            if top[0] >= value:
                for entry, victim_bytes in victims:
                    self.sizes[entry[2]], self._let_in[entry[2]] = victim_bytes, entry[1]
                    # where the shadow heap has taken over, with the importance that it goes by
                    heapq.heappush(
                        self._heap, entry if self._heap is heap else self._entry(entry[2])
                    )
                return None
            victims.append((top, self._remove(top)))
            free_bytes += victims[-1][1]
        self.held_bytes = most_bytes - free_bytes + size_bytes
        self.sizes[item] = size_bytes
        self._let_in[item] = self._count
        self._count += 1
        heapq.heappush(self._heap if self._shadow is None else self._shadow, self._entry(item))
        return [entry[2] for entry, _ in victims]

    def shrink(self, most_bytes: int) -> list[int]:
        """The least important items, that go so that at most `most_bytes` are held."""
        gone = []
        while self.held_bytes > most_bytes:
            top = self._lowest()
            self.held_bytes -= self._remove(top)
            gone.append(top[2])
        return gone

    def check_invariants(self) -> None:
        assert self.held_bytes == sum(self.sizes.values())
        assert self.sizes.keys() == self._let_in.keys()
        entries = {entry[1:] for entry in self._heap + (self._shadow or [])}
        entries |= {(self._let_in[item], item) for item in self._waiting if item in self.sizes}
        assert entries >= {(count, item) for item, count in self._let_in.items()}

    def _value(self, item: int) -> float:
        return self.importance[item] if item < len(self.importance) else UNKNOWN

    def _entry(self, item: int) -> Entry:
        return (self._value(item), self._let_in[item], item)

    def _lowest(self) -> Entry:
        """The top-node: the least important held item of the heap that gives victims."""
        while True:
            while self._heap:
                top = self._heap[0]
                if self._let_in.get(top[2]) == top[1]:
                    return top
                heapq.heappop(self._heap)
            self.finish()

    def _remove(self, top: Entry) -> int:
        heapq.heappop(self._heap)
        del self._let_in[top[2]]
        return self.sizes.pop(top[2])


class ICache(Policy):
    """H-cache, L-cache, packages and the division of the capacity between them.

    O(log n) an access; O(n log n) when the H-list is pulled.

    INVARIANT: no item is in both regions.
    INVARIANT: an item stands for another at most once an epoch, and not after it was read itself.
    """

    name: ClassVar[str] = "icache"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        on_evict: Callable[[int], object] | None = None,
        seed: int = 0,
        h_share: float = H_SHARE,
        package_bytes: int = PACKAGE_BYTES,
        load_s: float = 0.0,
    ) -> None:
        """load_s: how long the loading thread takes for a package, by the clock of `access`.

        Raises ValueError for a share outside 0 to 1 or a negative size or time.
        """
        super().__init__(capacity_bytes, on_evict=on_evict, seed=seed)
        if not 0 <= h_share <= 1:
            raise ValueError(f"h_share must be 0 to 1, not {h_share}")
        if package_bytes < 0:
            raise ValueError(f"package_bytes must be 0 or more, not {package_bytes}")
        if not load_s >= 0:
            raise ValueError(f"load_s must be 0 or more, not {load_s}")
        self.l_bytes = capacity_bytes // L_PART
        self.h_share = h_share
        self.package_bytes = min(package_bytes, self.l_bytes)
        self.load_s = load_s
        self._rng = np.random.default_rng(seed)
        self._h = HCache()
        self._l = Substitutes(self._rng)
        self._importance = Importance()
        self._sizes = array("q")  # of every item that was asked for; -1: unknown
        self._listed = bytearray()  # 1: on the H-list
        self._read = bytearray()  # 1: served in this epoch
        self._pulled = False  # there is an H-list
        self._h_reads = self._l_reads = 0  # since the last pull
        self._missed: dict[int, None] = {}  # L-samples asked for and not there since then
        self._to_pack: list[int] = []  # last first
        self._loading = False
        self._ready_s: float | None = (
            None  # when the next package is there; None: load_s from now on
        )

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if item >= len(self._sizes):
            self._reserve(item + 1)
        self._sizes[item] = size_bytes
        if self._loading:
            self._load(now_s)
        self._h.rebuild(REBUILT)
        listed = self._listed[item] or not self._pulled
        if listed:
            self._h_reads += 1
        else:
            self._l_reads += 1
        if item in self._h.sizes:
            self._read[item] = 1
            return item
        if item in self._l.sizes:
            self._l.use(item)
            self._read[item] = 1
            self._load_more(now_s)
            return item
        if listed:
            self._admit_h(item, size_bytes)
        else:
            self._missed[item] = None
            if self._l.unused:
                substitute = self._l.draw()
                self._read[substitute] = 1
                self._load_more(now_s)
                return substitute
            if self.on_load is None:
                most_bytes = max(self.l_bytes, self.capacity_bytes - self._h.held_bytes)
                gone = self._l.make_room(size_bytes, most_bytes)
                if gone is not None:
                    self._l.add(item, size_bytes, used=True)
                    self._settle(gone)
        self._read[item] = 1
        return MISS

    def __contains__(self, item: int) -> bool:
        return item in self._h.sizes or item in self._l.sizes

    def __len__(self) -> int:
        return len(self._h.sizes) + len(self._l.sizes)

    def hint(self, hints: Hints) -> None:
        """Takes importance, sizes and the begin of an epoch.

        Raises ValueError where importance is not finite or not of the items' shape, or a size is
        negative.
        """
        self._importance.learn(hints)
        self._reserve(len(self._importance.values))
        if hints.sizes is not None:
            sizes = np.asarray(hints.sizes, np.int64)
            if len(sizes) and sizes.min() < 0:
                raise ValueError(f"sizes must be 0 or more, not {sizes.min()}")
            self._reserve(len(sizes))
            np.frombuffer(self._sizes, np.int64)[: len(sizes)] = sizes
        if hints.epoch:
            self._begin_epoch()

    def check_invariants(self) -> None:
        super().check_invariants()
        self._h.check_invariants()
        self._l.check_invariants()
        self._importance.check_invariants()
        assert self.held_bytes == self._h.held_bytes + self._l.held_bytes
        assert self.package_bytes <= self.l_bytes <= self.capacity_bytes
        assert not self._h.sizes.keys() & self._l.sizes.keys()
        assert not any(self._read[item] for item in self._l.unused)

    def _reserve(self, items: int) -> None:
        self._importance.reserve(items)
        missing = len(self._importance.values) - len(self._sizes)
        self._sizes.extend([-1] * missing)
        self._listed.extend(bytes(missing))
        self._read.extend(bytes(missing))

    def _settle(self, gone: list[int]) -> None:
        """What went is told; a region that is over its share gives way to the other."""
        over_bytes = self._h.held_bytes + self._l.held_bytes - self.capacity_bytes
        if over_bytes > 0:
            part = self._l if self._l.held_bytes > self.l_bytes else self._h
            gone = gone + part.shrink(part.held_bytes - over_bytes)
        self.held_bytes = self._h.held_bytes + self._l.held_bytes
        if self._on_evict is not None:
            for item in gone:
                self._on_evict(item)

    def _admit_h(self, item: int, size_bytes: int) -> bool:
        most_bytes = self.capacity_bytes - min(self._l.held_bytes, self.l_bytes)
        gone = self._h.admit(item, size_bytes, most_bytes)
        if gone is not None:
            self._settle(gone)
        return gone is not None

    def _begin_epoch(self) -> None:
        """Pulls the H-list, divides the capacity anew and packs the L-samples."""
        self._read = bytearray(len(self._read))
        self._l.begin()
        values = np.array(self._importance.values, np.float64)
        known = np.flatnonzero(values > UNKNOWN)
        if not len(known):
            return
        if self._pulled and self._h_reads + self._l_reads:
            l_bytes = self.capacity_bytes * self._l_reads // (self._h_reads + self._l_reads)
            self.l_bytes = max(l_bytes, self.package_bytes)
        self._h_reads = self._l_reads = 0
        self._listed = bytearray(len(values))
        listed = np.frombuffer(self._listed, np.uint8)
        listed[known[h_list(values[known], self.h_share)]] = 1
        self._h.refresh(array("d", self._importance.values))
        if not self._pulled:  # the heap knows nothing that would be worth freezing
            self._h.finish()
        self._pulled = True
        for item in [item for item in self._l.sizes if self._listed[item]]:
            if not self._admit_h(item, self._l.remove(item)):
                self._settle([item])
        if self.on_load is not None:
            self._pack()
            self._loading = True
            self._ready_s = None
        self._missed.clear()

    def _pack(self) -> None:
        """All L-samples, each once: what missed goes into the first packages, then a random order
        (section III-C).
        """
        chosen = np.frombuffer(self._listed, np.uint8) == 0
        chosen &= np.frombuffer(self._sizes, np.int64) >= 0
        missed = [item for item in self._missed if chosen[item]]
        chosen[missed] = False
        rest = self._rng.permutation(np.flatnonzero(chosen))
        self._to_pack = rest.tolist() + missed[::-1]

    def _load_more(self, now_s: float) -> None:
        """The loading thread begins when all that the L-cache holds was served."""
        if not self._l.unused and self._to_pack and not self._loading:
            self._loading = True
            self._ready_s = now_s + self.load_s

    def _load(self, now_s: float) -> None:
        """Takes the packages that are there by now, as many as the L-cache has room for."""
        if self._ready_s is None:
            self._ready_s = now_s + self.load_s
        while self._l.unused_bytes + self.package_bytes <= self.l_bytes:
            if now_s < self._ready_s:
                return
            package, package_bytes = self._next_package()
            gone = self._l.make_room(package_bytes, self.l_bytes)
            if not package or gone is None or self.on_load is None:
                break
            for item in package:
                self._l.add(item, self._sizes[item], used=False)
            self._settle(gone)
            for item in package:
                self.on_load(item)
            self._ready_s += self.load_s
        self._loading = False

    def _next_package(self) -> tuple[list[int], int]:
        """The items of a package and their bytes: at most package_bytes."""
        package: list[int] = []
        total_bytes = 0
        while self._to_pack:
            item = self._to_pack[-1]
            if (
                not self._read[item]
                and item not in self
                and self._sizes[item] <= self.package_bytes
            ):
                if total_bytes + self._sizes[item] > self.package_bytes:
                    break
                package.append(item)
                total_bytes += self._sizes[item]
            self._to_pack.pop()
        return package, total_bytes
