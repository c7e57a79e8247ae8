"""Into which chunks an epoch is cut, and what a log has (docs/LOG.md; pure).

A *chunk* is a run of consecutive samples of one epoch's order: it is staged whole, in one command.
A log serves one epoch or several. Its *cells* are what lies together on SSD: the samples that the
first of them reads in its chunk i, the second in its chunk j, and so on; of one epoch they are its
chunks.

INVARIANT: an epoch's chunks follow from its order, the sizes and the window alone, so that another
hintsd with the same budgets cuts it alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fusecache.base.units import BLOCK_BYTES as BLOCK_BYTES  # larger files stay where they are
from fusecache.base.wire import CHUNKS_MOST as CHUNKS_MOST  # cells of a log
from hintsd.follow.sequence import NO_INOS, SLICE, EpochOrder, Inos, Positions
from hintsd.policies import Mask
from hintsd.policies.residents import fits

CHUNK_SAMPLES_MOST = 1 << 14  # of one command, beside which others wait
EPOCHS_MOST = 3  # that one log serves: each more wears the SSD less, but by less each time
CELL_BYTES_LEAST = 512 << 10  # on average: what is read at once
BUFFER_BYTES_LEAST, BUFFER_BYTES_MOST = 64 << 10, 1 << 20
FRAME_SAMPLES = 1 << 18  # of one `pack` frame


class Grain(NamedTuple):
    """How finely a log is cut."""

    window_chunks: int  # a chunk takes such a part of the window at most,
    chunk_bytes: int  # so many bytes of it,
    chunk_samples: int  # and so many samples
    buffers_share: int  # all cells' buffers take such a part of the RAM budget at most


FINE = Grain(8, 256 << 20, CHUNK_SAMPLES_MOST, 16)
"""Of a log for one epoch: the finer, the sooner a chunk is there."""
COARSE = Grain(4, 1 << 62, 1 << 18, 8)
"""Of a log for several: the number of cells is a power of the number of chunks. A quarter of the
window is the most with which one chunk is read while two are there and the next one comes."""


def grain(epochs: int) -> Grain:
    """Of a log that serves so many; COARSE, too, where FINE makes more than CHUNKS_MOST."""
    return FINE if epochs == 1 else COARSE


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


def cut(
    order: Inos,
    ram_bytes: Callable[[Inos], npt.NDArray[np.int64]],
    window_bytes: int,
    batch: int,
    limits: Grain = FINE,
) -> Chunks | None:
    """Chunks of a part of the window; None: there would be too many.

    order: shape (samples,); `ram_bytes(inos)`: bytes that each takes in a window. A chunk has a
    batch at least, and one sample even when that is larger.
    """
    most_bytes = min(window_bytes // limits.window_chunks, limits.chunk_bytes)
    least = min(batch, CHUNK_SAMPLES_MOST)
    ends: list[int] = []
    start = largest = 0
    while start < len(order):
        if len(ends) == CHUNKS_MOST:
            return None
        own = ram_bytes(order[start : start + limits.chunk_samples])
        count = min(max(fits(own, most_bytes), least, 1), len(own))
        largest = max(largest, int(own[:count].sum()))
        start += count
        ends.append(start)
    return Chunks(np.array(ends, np.int64), largest)


def buffer_bytes(cells: int, ram_bytes: int, limits: Grain = FINE) -> int:
    """Of each cell that is written: a power of two; 0: RAM is too small for so many."""
    each = ram_bytes // limits.buffers_share // cells
    if each < BUFFER_BYTES_LEAST:
        return 0
    return min(1 << (each.bit_length() - 1), BUFFER_BYTES_MOST)


def ram_bytes_needed(chunks: int, ram_bytes: int) -> int:
    """So much RAM at least it would take: the more there is, the fewer chunks there are. Rounded
    up, so that a chunk more or less in another epoch gives the same figure.
    """
    needed = math.isqrt(chunks * BUFFER_BYTES_LEAST * FINE.buffers_share * ram_bytes)
    step = 1 << max(needed.bit_length() - 3, 0)
    return -(-needed // step) * step


def are_cells_good(cells: int, size_bytes: int, ram_bytes: int) -> bool:
    """Whether a log of so many, for several epochs, is read in large pieces, and has buffers."""
    return (
        cells <= CHUNKS_MOST
        and size_bytes >= cells * CELL_BYTES_LEAST
        and buffer_bytes(cells, ram_bytes, COARSE) > 0
    )


def epochs_served(samples: int, size_bytes: int, window_bytes: int, ram_bytes: int) -> int:
    """How many epochs one log may serve by the sizes: with M chunks each, E of them make M ** E
    cells. size_bytes: what an order takes in RAM.
    """
    chunk_bytes = min(window_bytes // COARSE.window_chunks, COARSE.chunk_bytes)
    if chunk_bytes == 0:
        return 1
    chunks = max(-(-size_bytes // chunk_bytes), -(-samples // COARSE.chunk_samples), 1)
    for epochs in range(EPOCHS_MOST, 1, -1):
        if are_cells_good(chunks**epochs, size_bytes, ram_bytes):
            return epochs
    return 1


class Cells(NamedTuple):
    """What a log has: samples by cell. `ends`: index behind each cell's last one."""

    inos: Inos
    ends: Positions


def unread(present: EpochOrder, coming: EpochOrder) -> Inos:
    """The samples of the present epoch that the one that comes does not read, each once."""
    pieces = [present.inos[start : start + SLICE] for start in range(0, len(present.inos), SLICE)]
    found: Inos = np.concatenate([inos[~coming.contains(inos)] for inos in pieces])
    return np.unique(found) if present.repeats else found


def cells(orders: Sequence[EpochOrder], chunks: Sequence[Chunks], last: Inos = NO_INOS) -> Cells:
    """Of the epochs that a log serves: cell (i, j, k) is number (i * M2 + j) * M3 + k.

    A sample that an epoch does not read lies in any of its chunks. Of one epoch, `last`, which it
    does not read, is a cell behind all others, unless there are CHUNKS_MOST.
    """
    if len(orders) == 1:
        inos, ends = orders[0].inos, chunks[0].ends
        if not len(last) or len(ends) == CHUNKS_MOST:
            return Cells(inos, ends)
        return Cells(np.concatenate([inos, last]), np.append(ends, len(inos) + len(last)))
    parts = [orders[0].inos]
    for number, order in enumerate(orders[1:], 1):
        is_new = np.ones(len(order.inos), np.bool_)
        for start in range(0, len(is_new), SLICE):
            part = slice(start, start + SLICE)
            for before in orders[:number]:
                is_new[part] &= ~before.contains(order.inos[part])
        parts.append(order.inos[is_new])
    inos = np.concatenate(parts)
    number_of = np.zeros(len(inos), np.uint16)
    for order, (ends, _) in zip(orders, chunks, strict=True):
        for start in range(0, len(inos), SLICE):
            some = inos[start : start + SLICE]
            index = order.find(some, 0)
            chunk = np.where(index < 0, some % len(ends), np.searchsorted(ends, index, "right"))
            numbers = number_of[start : start + SLICE]
            numbers *= np.uint16(len(ends))
            numbers += chunk.astype(np.uint16)
    counts = np.bincount(number_of, minlength=math.prod(len(ends) for ends, _ in chunks))
    return Cells(inos[np.argsort(number_of, kind="stable")], np.cumsum(counts))


def frames(
    epochs: range,
    found: Cells,
    contents: Contents,
    buffer: int,
    is_packed: Callable[[Inos], Mask],
) -> Iterator[Mapping[str, Any]]:
    """The fields of the `pack` frames that announce a log for `epochs` (docs/WIRE.md)."""
    inos, ends = found
    first, start = 0, 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, start + FRAME_SAMPLES, "right")))
        some = inos[start : ends[stop - 1]]
        chosen = is_packed(some)
        counts = np.concatenate([[0], np.cumsum(chosen)])
        behind = np.concatenate([[0], counts[ends[first:stop] - start]])
        yield {
            "epoch": epochs.start,
            "epochs": len(epochs),
            "chunks": len(ends),
            "bytes": contents.size_bytes,
            "samples": contents.samples,
            "buffer": buffer,
            "first": first,
            "lengths": np.diff(behind).astype(np.uint32),
            "inos": some[chosen],
            "last": stop == len(ends),
        }
        first, start = stop, int(ends[stop - 1])


END: Mapping[str, Any] = {
    **{"epoch": 0, "epochs": 0, "chunks": 0, "bytes": 0, "samples": 0, "buffer": 0, "first": 0},
    "last": True,
    "lengths": np.empty(0, np.uint32),
    "inos": np.empty(0, np.uint32),
}
"""The fields of the `pack` after which there is no log."""

WRITTEN: Mapping[str, Any] = {**END, "last": False}
"""The fields of the `pack` after which the log is written out and read, and takes no more."""
