"""Who reorders the SSD, and into which chunks (docs/LOG.md; pure).

A *chunk* is a run of consecutive samples of one epoch's order: it is staged whole, in one command,
and its samples lie together on SSD if a log was written for that epoch. `Log` is what the planner
knows of one job's logs; the rules are in `decide` and `refusal`.

INVARIANT: an epoch's chunks follow from its order, the sizes and the window alone, so that another
hintsd with the same budgets cuts it alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fusecache.units import format_bytes
from hintsd.sequence import EpochOrder, Inos, Positions

CHUNK_BYTES_MOST = 256 << 20
CHUNK_SAMPLES_MOST = 1 << 14
CHUNKS_MOST = 4096
WINDOW_CHUNKS = 8
BUFFER_BYTES_LEAST, BUFFER_BYTES_MOST = 64 << 10, 1 << 20
BUFFERS_SHARE = 16  # a sixteenth of the RAM budget is the most that all chunks' buffers take
BLOCK_BYTES = 4 << 20  # larger files stay where they are
FRAME_SAMPLES = 1 << 18  # of one `pack` frame
MARGIN = 1.25
SHARED_LEAST = 0.9  # of the next epoch's samples with the present one's
COMPARED_SAMPLES = 1 << 16
FIRST_SHARE = 0.1  # of the bytes lie on SSD at most when an epoch counts as the first one
WAITED_SHARE = 0.01  # of an epoch's samples that its reader found missing: he has waited

STATIC, REORDER, AUTO = "static", "reorder", "auto"

Mask = npt.NDArray[np.bool_]


class Probe(Protocol):
    """What was measured of the cache directory's device, in bytes/s."""

    @property
    def mixed_bytes_per_s(self) -> float:
        """Of reads, while as much is written."""

    def random_bytes_per_s(self, size_bytes: int) -> float:
        """Payload of random reads of samples of this size."""


class Verdict(NamedTuple):
    is_packed: bool
    why: str


class Chunks(NamedTuple):
    """One epoch's order, cut. `ends`: index behind each chunk's last sample, ascending."""

    ends: Positions
    largest_bytes: int

    def end_of(self, index: int) -> int:
        """End of the chunk that the sample `index` belongs to."""
        return int(self.ends[np.searchsorted(self.ends, index, "right")])

    def begin_of(self, index: int) -> int:
        number = int(np.searchsorted(self.ends, index, "right"))
        return int(self.ends[number - 1]) if number else 0


class Contents(NamedTuple):
    """What of an epoch's samples is to be packed."""

    samples: int
    size_bytes: int
    stored_bytes: int  # of it on SSD already: to be written anew


class Log:
    """One job's chunks, and the log that is written while an epoch of it is staged."""

    def __init__(self) -> None:
        self.decided = -1
        """The epoch whose staging has begun, or the one before the first."""
        self.chunks: dict[int, Chunks] = {}
        self.is_open = False
        """A log for the epoch behind `decided` takes what is staged."""
        self.pieces: Iterator[Mapping[str, Any]] | None = None  # of its `pack`, not sent yet
        self.waits_since: float | None = None  # for the order of the epoch behind
        self.keeps_order = True  # the first chunk's: its reader waits for it
        self.why = ""
        self.begun: tuple[float, int, int] | None = None
        """When `decided` began to be staged, where the reader was then, and the reads that had been
        late."""

    @property
    def largest_bytes(self) -> int:
        """Of RAM, that a chunk takes."""
        return max((chunks.largest_bytes for chunks in self.chunks.values()), default=0)

    def wanted_bytes_per_s(
        self, contents: Contents, position: int, misses: int, now: float
    ) -> float | None:
        """What its reader, who is at `position`, has taken from SSD since the last decision:
        infinite if he has waited, for then he may want more than he got; None: not known yet.
        """
        if self.begun is None:
            return None
        since, before, misses_before = self.begun
        samples = position - before
        if now <= since or samples <= 0 or not contents.samples:
            return None
        if misses - misses_before > WAITED_SHARE * samples:
            return math.inf
        return contents.size_bytes / contents.samples * samples / (now - since)

    def forget_before(self, epoch: int) -> None:
        for old in [known for known in self.chunks if known < epoch]:
            del self.chunks[old]

    def refuse(self, why: str) -> None:
        """The mount could not open it."""
        self.is_open, self.why = False, why
        self.chunks.pop(self.decided + 1, None)

    def forget(self) -> None:
        """The log is over: nothing more is moved, no epoch is cut."""
        self.chunks.clear()
        self.undecide()

    def undecide(self) -> None:
        """The log of the epoch ahead is over; the present one may begin another."""
        if self.decided >= 0:
            for epoch in [known for known in self.chunks if known > self.decided]:
                del self.chunks[epoch]
        self.decided = -1
        self.is_open = False
        self.pieces = None
        self.waits_since = None
        self.keeps_order = True
        self.begun = None


def cut(
    order: Inos, ram_bytes: Callable[[Inos], npt.NDArray[np.int64]], window_bytes: int, batch: int
) -> Chunks | None:
    """Chunks of one eighth of the window; None: there would be too many.

    order: shape (samples,); `ram_bytes(inos)`: bytes that each takes in a window. A chunk has a
    batch at least, and one sample even when that is larger.
    """
    most_bytes = min(window_bytes // WINDOW_CHUNKS, CHUNK_BYTES_MOST)
    least = min(batch, CHUNK_SAMPLES_MOST)
    ends: list[int] = []
    start = largest = 0
    while start < len(order):
        if len(ends) == CHUNKS_MOST:
            return None
        total = np.cumsum(ram_bytes(order[start : start + CHUNK_SAMPLES_MOST]))
        count = int(np.searchsorted(total, most_bytes, "right"))
        count = min(max(count, least, 1), len(total))
        largest = max(largest, int(total[count - 1]))
        start += count
        ends.append(start)
    return Chunks(np.array(ends, np.int64), largest)


def buffer_bytes(chunks: int, ram_bytes: int) -> int:
    """Of each chunk that is written: a power of two; 0: RAM is too small for so many."""
    each = ram_bytes // BUFFERS_SHARE // chunks
    if each < BUFFER_BYTES_LEAST:
        return 0
    return min(1 << (each.bit_length() - 1), BUFFER_BYTES_MOST)


def ram_bytes_needed(chunks: int, ram_bytes: int) -> int:
    """So much RAM at least it would take: the more there is, the fewer chunks there are."""
    return math.isqrt(chunks * BUFFER_BYTES_LEAST * BUFFERS_SHARE * ram_bytes)


def refusal(present: EpochOrder, coming: EpochOrder) -> str:
    """Why a log for the order that comes is not worth it; "": it may be."""
    if np.array_equal(present.inos, coming.inos):
        return "each epoch has the same order"
    sample = coming.inos[:: max(1, len(coming.inos) // COMPARED_SAMPLES)]
    if present.contains(sample).mean() < SHARED_LEAST:
        return "the next epoch reads other samples"
    return ""


def decide(
    layout: str, probe: Probe | None, contents: Contents, wanted_bytes_per_s: float | None
) -> Verdict:
    """Whether the samples are written anew in the next epoch's order.

    `wanted_bytes_per_s`: what the job takes from SSD, infinite if it has waited; None: unknown.
    """
    if layout == STATIC:
        return Verdict(False, "--layout static")
    if contents.size_bytes == 0:
        return Verdict(False, "nothing of it is to be on SSD")
    if contents.stored_bytes <= FIRST_SHARE * contents.size_bytes:
        return Verdict(True, "first epoch: written once in either layout")
    if layout == REORDER:
        return Verdict(True, "--layout reorder")
    if probe is None:
        return Verdict(False, "the device is not measured: fusecache probe does")
    if wanted_bytes_per_s is None:
        return Verdict(False, "how fast it reads is not known yet")
    mean_bytes, wanted = contents.size_bytes // contents.samples, wanted_bytes_per_s
    mixed, random = probe.mixed_bytes_per_s, probe.random_bytes_per_s(mean_bytes)
    is_packed = min(mixed, wanted) > MARGIN * min(random, wanted)
    said = f"{format_bytes(mixed)}/s in order and rewritten, {format_bytes(random)}/s at random"
    if wanted < math.inf:
        said += f", {format_bytes(wanted)}/s wanted"
    return Verdict(is_packed, f"{said}, samples of {format_bytes(mean_bytes)}")


def frames(
    epoch: int,
    order: Inos,
    chunks: Chunks,
    contents: Contents,
    buffer: int,
    is_packed: Callable[[Inos], Mask],
) -> Iterator[Mapping[str, Any]]:
    """The fields of the `pack` frames that announce a log for `epoch` (docs/WIRE.md)."""
    ends = chunks.ends
    first, start = 0, 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, start + FRAME_SAMPLES, "right")))
        inos = order[start : ends[stop - 1]]
        chosen = is_packed(inos)
        begins = np.concatenate([[start], ends[first : stop - 1]]) - start
        yield {
            "epoch": epoch,
            "chunks": len(ends),
            "bytes": contents.size_bytes,
            "buffer": buffer,
            "first": first,
            "lengths": np.add.reduceat(chosen, begins, dtype=np.uint32),
            "inos": inos[chosen],
            "last": stop == len(ends),
        }
        first, start = stop, int(ends[stop - 1])


END: Mapping[str, Any] = {
    **{"epoch": 0, "chunks": 0, "bytes": 0, "buffer": 0, "first": 0, "last": True},
    "lengths": np.empty(0, np.uint32),
    "inos": np.empty(0, np.uint32),
}
"""The fields of the `pack` after which no log is open."""
