"""Looking for a reader whose place is not known: in which epoch's order it reads, and where (pure).

A job that a new hintsd takes up is known to where it was seen last, many epochs ago if they are
short; a hint that was taken for wrong may be right after all; and where most of an epoch is in
order, only this tells whether any reader follows it. Then the files that were seen to be opened are
compared with whole epochs, in the order in which they were opened.

If no reader follows an epoch's order, each order of m of its files is as likely as any other, and
the number of pairs that were opened the wrong way round is distributed as the inversions of a
random permutation (Kendall 1938, "A new measure of rank correlation"). A DataLoader's workers swap
near files only. A place is *found* when chance explains so few inversions with at most FOUND_ERROR:
12 files all in turn, or 64 with a quarter of the pairs the wrong way round. The latest files count,
since the earlier ones may be of the epoch before.

Where others read beside it, whole files are foreign, and inversions say little. But its own make
a *chain*: the longest subsequence that is in order. Of m files in random order, k or more do so
with a chance of at most (m over k) / k!, the expected number of such subsequences: 26 of 64 are too
many. A reader in order makes a longer one than chance does, whether it is found or not.

Where many workers read large batches of few files, most of an epoch is read at once, in no order.
But each worker reads its batch in turn: of two files that one process opened one after the other,
the second lies within `span` behind the first. By chance each such *pair* does so with a
probability of less than span / n, so that the number of pairs is compared with the binomial
distribution.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hintsd.follow.evidence import CHANCE_ERROR, chance
from hintsd.follow.readers import Pids
from hintsd.follow.sequence import EpochOrder, Inos, Positions

Mask = npt.NDArray[np.bool_]
Pairs: TypeAlias = Inos
"""Files that one process opened one after the other, shape (n, 2); the latest last."""

FOUND_ERROR = 1e-8
COMPARED = (64, 56, 48, 40, 32, 28, 24, 20, 18, 16, 15, 14, 13, 12)  # files
SEEN_MOST = COMPARED[0]
WALK_EVERY = 32  # files: a look through many epochs takes long
ENOUGH = SEEN_MOST  # half of them at least are of one epoch
LOOK_EVERY = 4  # files
PAIR_SHARE = 8  # a pair's span is an eighth of an epoch at most
PROCESSES_MOST = 4096
WIRES = 64  # laid over an epoch, once a second: a look-up each costs readers little
WIRES_EVERY_S = 1.0
DENSE_WIRES = 4096  # at most, until it is decided
DENSE_SPACING = 4  # samples, at least
SCANNED_PER_S, LISTED_S = 2000, 1.0  # `ls -l` looks up more files a second
EPOCHS_LEAST, EPOCHS_MOST, SAMPLES_MOST = 2, 4096, 1 << 20  # that are looked through at once
REST_FIRST_S, REST_MOST_S = 1.0, 64.0
AWAKE_S = 1.0  # a right hint that was condemned is mostly found at once


@lru_cache
def inversions_most(count: int) -> int:
    """So many inversions of `count` files, or fewer, are no chance; -1: none are."""
    chances = np.ones(1)
    for size in range(2, count + 1):
        chances = np.convolve(chances, np.full(size, 1 / size))
    return int(np.searchsorted(np.cumsum(chances), FOUND_ERROR, "right")) - 1


@lru_cache
def chain_least(count: int) -> int:
    """A chain of so many of `count` files, or longer, is no chance."""
    lengths = range(1, count + 1)
    chances = (math.comb(count, length) / math.factorial(length) for length in lengths)
    rare = (length for length, chance in zip(lengths, chances, strict=True) if chance < FOUND_ERROR)
    return next(rare, count + 1)


def chain_mean(count: int) -> float:
    """Of so many files in random order (Baik, Deift and Johansson 1999; exact to 0.7)."""
    return 2 * math.sqrt(count) - 1.77 * math.pow(count, 1 / 6)


def chain(where: Positions) -> list[int]:
    """The longest subsequence that rises."""
    ends: list[int] = []  # ends[k]: the least that a chain of k + 1 ends with
    at: list[int] = []  # where it is
    before = [-1] * len(where)
    for index, position in enumerate(where.tolist()):
        length = bisect_left(ends, position)
        before[index] = at[length - 1] if length else -1
        ends[length : length + 1], at[length : length + 1] = [position], [index]
    found = []
    index = at[-1] if at else -1
    while index >= 0:
        found.append(int(where[index]))
        index = before[index]
    return found[::-1]


class Place(NamedTuple):
    epoch: int
    position: int
    """Index of the sample within the epoch."""
    inos: Inos
    """The order of that epoch."""


class Opened(NamedTuple):
    """What a reader was seen to open."""

    inos: Inos
    """Each file once, the latest last."""
    pairs: Pairs
    span: int
    """Samples that a worker reads in turn."""


class Search:
    """The files that a lost reader was seen to open."""

    def __init__(
        self, now: float, *, span: int = 1, rest_s: float = 0.0, awake_s: float = math.inf
    ) -> None:
        """`span`: samples that a worker reads in turn; `rest_s`: between two looks through many
        epochs at least, twice as long each time; `awake_s`: before it first sleeps.
        """
        self.files = 0  # seen
        self._span = span
        self._latest_of: dict[int, int] = {}  # process -> the last file that it opened
        self._pairs: deque[tuple[int, int]] = deque(maxlen=SEEN_MOST)
        self._reads = 0
        self._wires_at = now + (WIRES_EVERY_S if rest_s else 0.0)
        self._seen: deque[int] = deque(maxlen=SEEN_MOST)
        self._seen_at: deque[float] = deque(maxlen=SEEN_MOST)
        self._first_seen_at = math.inf
        self._looked = self._walked = 0  # counts at the last look
        self._rest_s = rest_s
        self._walk_at = now + rest_s
        self._awake_until = now + awake_s

    @property
    def is_resting(self) -> bool:
        """Whether nothing is to be decided: the hint was taken for wrong."""
        return self._rest_s > 0

    def is_asleep(self, now: float) -> bool:
        """Whether only wires are watched, until epochs are looked through again: to weigh each READ
        takes the cores from readers whose hint is wrong.
        """
        return self._awake_until <= now < self._walk_at

    @property
    def tells_apart(self) -> bool:
        """Whether what was seen tells one worker from another."""
        return bool(self._latest_of)

    def see(
        self, inos: Inos, reads: Mask, every: int, now: float, processes: Pids | None = None
    ) -> None:
        """Files that were opened, and by whom (0: not known). Of those that were read, too, only
        each so many-th counts: what lies within the disorder of a loader is in no order. For pairs
        all do.
        """
        if processes is not None:
            self._pair(inos.tolist(), processes.tolist())
        numbers = self._reads + np.cumsum(reads)
        self._reads += int(np.count_nonzero(reads))
        inos = inos[~reads | (numbers % every == 0)]
        self._seen.extend(inos.tolist())
        self._seen_at.extend([now] * len(inos))
        if len(inos):
            self._first_seen_at = min(self._first_seen_at, now)
        self.files += len(inos)
        if self.is_asleep(now):  # it may be of another epoch than what comes then
            self._walked += len(inos)

    def _pair(self, inos: list[int], processes: list[int]) -> None:
        if len(self._latest_of) > PROCESSES_MOST:
            self._latest_of.clear()
        for ino, process in zip(inos, processes, strict=True):
            before = self._latest_of.get(process, ino)
            if process:
                self._latest_of[process] = ino
            if before != ino:  # else it was looked up, and then read
                self._pairs.append((before, ino))

    def seen(self) -> Opened:
        latest = dict.fromkeys(reversed(self._seen))
        inos = np.array(list(latest)[::-1], np.uint32)
        return Opened(inos, np.array(self._pairs, np.uint32).reshape(-1, 2), self._span)

    def find(self, orders: Iterable[tuple[int, EpochOrder]]) -> tuple[int, int] | None:
        """(epoch, index) in one of these orders, once there is something new."""
        if self.files < self._looked + LOOK_EVERY:
            return None
        self._looked = self.files
        seen = self.seen()
        places = ((epoch, find(order, seen)) for epoch, order in orders)
        return next(((epoch, index) for epoch, index in places if index is not None), None)

    def is_hopeless(self, orders: Iterable[EpochOrder]) -> bool:
        """Whether the reader is in no other epoch, and chance explains what was seen, or enough
        was: it reads in none of these orders, either.
        """
        if not self._walked:
            return False
        seen = self.seen()
        return self._walked >= ENOUGH or all(_is_chance(order, seen) for order in orders)

    def begin_again(self) -> None:
        """The reader has come to another epoch: what was seen says nothing of it."""
        self._seen.clear()
        self._seen_at.clear()
        self._latest_of.clear()
        self._pairs.clear()
        self.files = self._looked = self._walked = 0
        self._wires_at = -math.inf

    def are_wires_due(self, now: float) -> bool:
        """Whether new ones are to be laid over an epoch: once in WIRES_EVERY_S."""
        is_due = now >= self._wires_at
        if is_due:
            self._wires_at = now + WIRES_EVERY_S
        return is_due

    def lasted(self, now: float, spacing: int) -> bool:
        """Whether those who fired its wires, `spacing` samples apart, were readers, not a listing:
        slow, or at it for long.
        """
        count = len(self._seen_at)
        if self._reads or count == 0:
            return self._reads > 0
        # of the middle half: others' files may lie before or behind a listing's
        slow_s = self._seen_at[count * 3 // 4] - self._seen_at[count // 4]
        return (
            now - self._first_seen_at >= 2 * LISTED_S
            or slow_s >= count * spacing / SCANNED_PER_S / 2
        )

    def is_walk_due(self, now: float) -> bool:
        """Whether more epochs are to be looked through (`walk`)."""
        enough = SEEN_MOST if self.is_resting else WALK_EVERY
        return self.files >= self._walked + enough and now >= self._walk_at

    def walked(self, now: float) -> None:
        self._walked = self.files
        self._walk_at = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, REST_MOST_S)


def find(order: EpochOrder, seen: Opened) -> int | None:
    """The index that the reader of these files has come to, if it follows this order."""
    where = order.find(seen.inos, 0)
    where = where[where >= 0]
    swapped = np.triu(where[:, None] > where)
    for count in COMPARED:
        if count <= len(where) and swapped[-count:, -count:].sum() <= inversions_most(count):
            return int(np.median(where[-5:]))
    if len(rising := chain(where)) >= chain_least(len(where)):
        return rising[-1 - len(rising) // 8]  # others' files may lengthen it at its end
    return _find_pairs(order, seen)


def _find_pairs(order: EpochOrder, seen: Opened) -> int | None:
    after, in_turn, share_percent = _pairs(order, seen)
    for count in COMPARED:
        hits = int(np.count_nonzero(in_turn[-count:]))
        if count <= len(in_turn) and chance(hits, count, share_percent) <= FOUND_ERROR:
            return int(np.median(after[in_turn][-5:]))
    return None


def _pairs(order: EpochOrder, seen: Opened) -> tuple[Positions, Mask, int]:
    """Where each pair ends, whether it is in turn, and its chance of that, in per cent."""
    n = len(order.inos)
    span = min(seen.span, n // PAIR_SHARE)
    before, after = order.find(seen.pairs[:, 0], 0), order.find(seen.pairs[:, 1], 0)
    in_turn = (before >= 0) & (after > before) & (after - before <= span)
    return after, in_turn, -(-100 * span // n)


def _is_chance(order: EpochOrder, seen: Opened) -> bool:
    """Whether chance may well explain what was seen."""
    where = order.find(seen.inos, 0)
    where = where[where >= 0]
    _, in_turn, share_percent = _pairs(order, seen)
    hits = int(np.count_nonzero(in_turn))
    return (
        len(chain(where)) <= chain_mean(len(where)) + 1
        and chance(hits, len(in_turn), share_percent) > CHANCE_ERROR
    )


def walk(
    seen: Opened, epochs: Iterable[int], order_of: Callable[[int], Inos | None]
) -> Place | None:
    """The first of `epochs` whose order the reader follows."""
    for epoch in epochs:
        inos = order_of(epoch)
        if inos is None:
            break
        if (index := find(EpochOrder(inos), seen)) is not None:
            return Place(epoch, index, inos)
    return None
