"""Chunks: a dataset cut into parts that form a ring, which trainings walk together (Quiver, FAST
'20, 5.1: co-operative misses; 4.7: chunks).

Every job has the same chunks, whatever its seed, and reads a chunk in an order of its own. So jobs
that are in one chunk at a time share what is fetched for any of them, however little is cached.

INVARIANT: a walk takes each chunk once, so an epoch reads each sample once, whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

CHUNKS_MOST: Final = 100
AT_IT, BESIDE_IT = 2, 1
"""What another job counts for a chunk that it is at, or that lies before or behind that."""

Indices = npt.NDArray[Any]


def next_chunk(unread: Sequence[int], others: Sequence[int], chunks: int) -> int:
    """Which chunk a job reads next: the one that has most company; of several such the first one.

    `unread`: those that its epoch has not read yet, in the order of the ring, the ring's next one
    first. `others`: of each other job, the chunk that it chose last.
    """

    def company(chunk: int) -> int:
        apart = [(other - chunk) % chunks for other in others]
        return AT_IT * apart.count(0) + BESIDE_IT * sum(one in (1, chunks - 1) for one in apart)

    return max(unread, key=company)


class Ring:
    """The chunks of a dataset, as one rank reads them: they follow from the two numbers alone."""

    def __init__(self, samples: int, chunks: int, seed: int, replicas: int, rank: int) -> None:
        """4 bytes a sample; those of several epochs share it."""
        kind = np.int32 if samples <= np.iinfo(np.int32).max else np.int64
        # no generator of numpy's: its versions may differ, and so would the chunks of two jobs
        self._order = np.argsort(_hashed(samples), kind="stable").astype(kind)
        self._ends = [samples * number // chunks for number in range(chunks + 1)]
        self._seed, self._replicas, self._rank = seed % (1 << 64), replicas, rank
        self.samples, self.chunks = samples, chunks

    @property
    def reads(self) -> int:
        """Of one epoch: as many for each rank, as a DistributedSampler deals them."""
        return -(-len(self._order) // self._replicas)

    def share(self, chunk: int, epoch: int) -> Indices:
        """The rank's samples of a chunk, in the order in which it reads them.

        The samples of all chunks are dealt in turn; where they cannot be dealt evenly, some of the
        last chunk come to two ranks."""
        begin, end = self._ends[chunk : chunk + 2]
        rng = np.random.default_rng([self._seed, epoch, chunk])
        order: Indices = rng.permutation(self._order[begin:end])
        if chunk == self.chunks - 1:
            order = np.resize(order, len(order) + -len(self._order) % self._replicas)
        return order[(self._rank - begin) % self._replicas :: self._replicas]

    def after(self, chunk: int) -> list[int]:
        """All chunks, in the order of the ring, that one last; -1: from its begin."""
        return [(chunk + step) % self.chunks for step in range(1, self.chunks + 1)]


class Walk:
    """One epoch of one rank: its chunks, and how far it is decided in which order they are read."""

    def __init__(self, ring: Ring, epoch: int, last: int) -> None:
        """`last`: the chunk that the epoch before read last, -1: there was none. 4 bytes a sample
        of the rank."""
        self._ring, self.before = ring, last
        self._shares = [ring.share(chunk, epoch) for chunk in range(ring.chunks)]
        self._taken = list[int]()
        self.unread = ring.after(last)
        """Chunks that are not decided, in the order of the ring: the next one first."""
        self.arranged = 0
        """Reads that are decided."""

    def __len__(self) -> int:
        return self._ring.reads

    def follow(self, last: int) -> bool:
        """The epoch before reads this chunk last; whether that changes `reads`: it does where
        nothing is decided."""
        if self._taken or last == self.before:
            return False
        self.before, self.unread = last, self._ring.after(last)
        return True

    @property
    def last(self) -> int:
        """The chunk that it reads last, as far as that is known now."""
        return (self.unread or self._taken)[-1]

    def take(self, chunk: int) -> bool:
        """It is read next. Whether that changes `reads`. `chunk`: one of `unread`."""
        is_other = chunk != self.unread[0]
        self._taken.append(chunk)
        self.arranged += len(self._shares[chunk])
        left = {*self.unread} - {chunk}
        self.unread = [each for each in self._ring.after(chunk) if each in left]
        return is_other

    def reads(self, start: int = 0) -> Indices:
        """The samples in the order in which they are read from `start` on: what is not decided yet
        as the ring has it. Shape (len - start,)."""
        found = np.concatenate([self._shares[chunk] for chunk in [*self._taken, *self.unread]])
        return found[start:]

    def decided(self, start: int, most: int) -> Indices:
        """The samples of at most so many decided reads, from `start` on."""
        found, begin = [self._shares[0][:0]], 0
        for chunk in self._taken:
            share = self._shares[chunk]
            found.append(share[max(0, start - begin) : max(0, start + most - begin)])
            begin += len(share)
        return np.concatenate(found)

    def state(self, read: int) -> tuple[list[int], int]:
        """Of the first `read` reads: the chunks that they are of, in turn, and how many of them are
        of the last of these."""
        begun, begin = list[int](), 0
        for chunk in self._taken:
            if begin >= read:
                break
            begun.append(chunk)
            begin += len(self._shares[chunk])
        return begun, read - begin + len(self._shares[begun[-1]]) if begun else 0

    def resume(self, begun: Iterable[int], read: int) -> int:
        """What `state` gave was read before: these chunks are decided, nothing else. The reads that
        lie before. ValueError: no walk of this length has such a state."""
        for chunk in begun:
            if chunk not in self.unread:
                raise ValueError("its chunks are not those of such an epoch")
            self.take(chunk)
        share = len(self._shares[self._taken[-1]]) if self._taken else 0
        if not 0 <= read <= share or (share > 0 and read == 0):
            raise ValueError("its reads are not those of such a chunk")
        return self.arranged - share + read


def _hashed(samples: int) -> npt.NDArray[np.uint64]:
    """Of each index a number that looks random (splitmix64: Steele et al., OOPSLA '14)."""
    value = np.arange(1, samples + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return value ^ (value >> np.uint64(31))
