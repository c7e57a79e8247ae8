"""Quiver (FAST '20): reads are substitutable, so a job takes of the dataset what is cached now.

For one job that reads every sample once an epoch. The dataset is split into chunks of half the
capacity at most; two of them are held. While the job reads one the other is loaded; a chunk of
which all was served goes, and the next comes in its place (sections 4.7 and 5.1). A sample that is
asked for and not held stays pending until its chunk is there: a held sample is read in its stead.

Every sample is seen exactly once an epoch, though in another order:

INVARIANT: a sample that was served in the stead of another is not served when its own turn comes;
another that was not served yet is.
INVARIANT: as many samples were served ahead of their turn as are pending.

Both hold for samples that are asked for once an epoch and of which the size is known, from
`Hints.sizes` or from an earlier epoch. A sample that a job asks for again in the same epoch is
never substituted.

Where the paper leaves it open, or what has no place behind `access`:
- Chunks are striped (section 5.1), sample by sample: of c chunks every c-th sample is in the same.
- Until sizes are known what comes first is kept. A dataset that fits stays whole (section 5.4).
- The loader keeps up: a chunk is there when it is needed. Jobs that share the cache, cooperative
  misses (5.2) and the choice between datasets (5.3) are not here.

Chunks need `on_load`. Without it nothing would bring what is pending, so nothing is substituted:
what was read first stays. Hits are then as many as samples are held, and bytes from the origin are
the same either way: substitution takes misses out of the reader's way, not off the origin's load.
"""

from __future__ import annotations

from array import array
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from hintsd.policies import MISS, Hints, Policy
from hintsd.policies.papers.substitutes import Substitutes

ROUNDS_MOST: Final = 16  # to find a number of chunks that all fit

WAITING, AHEAD, PENDING, DONE = range(4)  # of a sample in this epoch


class Quiver(Policy):
    """Two chunks of the dataset, and the turns of its samples in this epoch.

    O(1) an access, and O(items of a chunk) when one is loaded.

    INVARIANT: a held item that may stand for another is WAITING or PENDING.
    """

    name: ClassVar[str] = "quiver"

    def _prepare(self, seed: int) -> None:
        super()._prepare(seed)
        self._rng = np.random.default_rng(seed)
        self._kept: dict[int, int] = {}  # what is held outside of chunks -> its size
        self._sizes = array("q")  # of every item that was asked for; -1: unknown
        self._known = 0  # items of known size
        self._turns = bytearray()
        self._planned = bytearray()  # 1: in a chunk
        self._chunks: list[npt.NDArray[np.int64]] = []
        self._planned_items = 0  # how many were known when the chunks were made
        self._buffers: list[Substitutes] = []  # the one that was loaded first is first
        self._numbers: list[int] = []  # of the chunks in them
        self._to_load: list[int] = []  # chunks that had no turn in this epoch, next one last

    def access(self, item: int, size_bytes: int, cost_s: float = 0.0, now_s: float = 0.0) -> int:
        if item >= len(self._sizes):
            self._reserve(item + 1)
        if self._sizes[item] < 0:
            self._known += 1
        self._sizes[item] = size_bytes
        if not self._buffers:
            return self._keep(item, size_bytes)
        turn = self._turns[item]
        if turn == AHEAD:
            self._turns[item] = DONE
            substitute = self._substitute()
            return item if substitute == MISS and item in self else substitute
        for buffer in self._buffers:
            if item in buffer.sizes:
                buffer.use(item)
                self._turns[item] = DONE
                self._refill()
                return item
        if turn == WAITING and self._planned[item]:
            substitute = self._substitute()
            self._turns[item] = DONE if substitute == MISS else PENDING
            return substitute
        self._turns[item] = DONE
        return MISS

    def __contains__(self, item: int) -> bool:
        return item in self._kept or any(item in buffer.sizes for buffer in self._buffers)

    def __len__(self) -> int:
        return len(self._kept) + sum(len(buffer.sizes) for buffer in self._buffers)

    def hint(self, hints: Hints) -> None:
        """Takes sizes and the begin of an epoch.

        Raises ValueError for a negative size.
        """
        if hints.sizes is not None:
            sizes = np.asarray(hints.sizes, np.int64)
            if len(sizes) and sizes.min() < 0:
                raise ValueError(f"sizes must be 0 or more, not {sizes.min()}")
            self._reserve(len(sizes))
            table = np.frombuffer(self._sizes, np.int64)
            table[: len(sizes)] = sizes
            self._known = int((table >= 0).sum())
        if hints.epoch:
            self._begin_epoch()

    def check_invariants(self) -> None:
        super().check_invariants()
        assert self.held_bytes == sum(self._kept.values()) + sum(
            buffer.held_bytes for buffer in self._buffers
        )
        assert not (self._kept and self._buffers)
        for buffer in self._buffers:
            buffer.check_invariants()
            turns = {self._turns[item] for item in buffer.unused}
            assert turns <= {WAITING, PENDING}

    def _reserve(self, items: int) -> None:
        if items <= len(self._sizes):
            return
        missing = max(items, 2 * len(self._sizes)) - len(self._sizes)
        self._sizes.extend([-1] * missing)
        self._turns.extend(bytes(missing))
        self._planned.extend(bytes(missing))

    def _keep(self, item: int, size_bytes: int) -> int:
        if item in self._kept:
            return item
        if size_bytes <= self.capacity_bytes - self.held_bytes:
            self._kept[item] = size_bytes
            self.held_bytes += size_bytes
        return MISS

    def _substitute(self) -> int:
        """A held item that was not served yet, of the older chunk if it has one; MISS if none."""
        for buffer in self._buffers:
            if buffer.unused:
                item = buffer.draw()
                self._turns[item] = DONE if self._turns[item] == PENDING else AHEAD
                self._refill()
                return item
        return MISS

    def _begin_epoch(self) -> None:
        """All samples wait again. What is held is served before anything is loaded."""
        self._turns = bytearray(len(self._turns))
        if self.on_load is not None and self._known > self._planned_items:
            self._plan()
        for number, buffer in zip(self._numbers, self._buffers, strict=True):
            buffer.begin()
            self._load(number, buffer)
        count = len(self._chunks)
        newest = self._numbers[-1] if self._numbers else 0
        order = [(newest - offset) % count for offset in range(count)]
        self._to_load = [number for number in order if number not in self._numbers]
        self._refill()

    def _plan(self) -> None:
        """Splits what is known into chunks. What is held of the first two stays."""
        self._planned_items = self._known
        sizes = np.array(self._sizes, np.int64)
        half_bytes = self.capacity_bytes // 2
        fitting = np.flatnonzero((sizes >= 0) & (sizes <= half_bytes))
        fits = int(sizes[sizes >= 0].sum()) <= self.capacity_bytes
        if (fits and not self._buffers) or len(fitting) < 2 or half_bytes == 0:
            return
        count = max(2, -(-int(sizes[fitting].sum()) // half_bytes))
        for _ in range(ROUNDS_MOST):
            chunk_bytes = np.bincount(np.arange(len(fitting)) % count, sizes[fitting])
            if chunk_bytes.max() <= half_bytes:
                break
            count += 1 + count // 20
        chunks = [fitting[number::count] for number in range(count)]
        self._chunks = [chunk[np.cumsum(sizes[chunk]) <= half_bytes] for chunk in chunks]
        self._planned = bytearray(len(self._planned))
        np.frombuffer(self._planned, np.uint8)[np.concatenate(self._chunks)] = 1
        held = self._kept
        for buffer in self._buffers:
            held |= buffer.sizes
        self._kept, self._numbers = {}, [0, 1]
        self._buffers = [Substitutes(self._rng) for _ in self._numbers]
        for number, buffer in zip(self._numbers, self._buffers, strict=True):
            for item in self._chunks[number].tolist():
                if item in held:
                    buffer.add(item, held.pop(item), used=False)
        self._evict(held)

    def _refill(self) -> None:
        """Where all of a chunk was served the next one takes its place, until all had their turn
        in this epoch.
        """
        while self._to_load:
            exhausted = next((buffer for buffer in self._buffers if not buffer.unused), None)
            if exhausted is None:
                return
            place = self._buffers.index(exhausted)
            del self._buffers[place], self._numbers[place]
            self._evict(exhausted.sizes)
            self._buffers.append(Substitutes(self._rng))
            self._numbers.append(self._to_load.pop())
            self._load(self._numbers[-1], self._buffers[-1])

    def _load(self, number: int, buffer: Substitutes) -> None:
        """What is not held of the chunk and was not read in this epoch."""
        for item in self._chunks[number].tolist():
            size_bytes = self._sizes[item]
            fits = buffer.held_bytes + size_bytes <= self.capacity_bytes // 2
            if fits and self._turns[item] != DONE and item not in buffer.sizes and self.on_load:
                self.on_load(item)
                buffer.add(item, size_bytes, used=False)
                self.held_bytes += size_bytes

    def _evict(self, held: dict[int, int]) -> None:
        for item, size_bytes in held.items():
            self.held_bytes -= size_bytes
            if self._on_evict is not None:
                self._on_evict(item)
