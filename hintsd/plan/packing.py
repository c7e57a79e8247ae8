"""When a dataset is packed, and into which chunks (docs/LOG.md; pure).

A *chunk* is a run of consecutive samples of one epoch's order: it is staged whole, in one command.
A log serves one epoch or several. Its *cells* are what lies together on SSD: the samples that the
first of them reads in its chunk i, the second in its chunk j, and so on; of one epoch they are its
chunks. `Log` is what layout.py and logs.py know of one job's logs; the rules are in `decide`,
`refusal` and `epochs_served`.

INVARIANT: an epoch's chunks follow from its order, the sizes and the window alone, so that another
hintsd with the same budgets cuts it alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fusecache.base.units import BLOCK_BYTES as BLOCK_BYTES  # larger files stay where they are
from fusecache.base.units import format_bytes
from fusecache.base.wire import CHUNKS_MOST as CHUNKS_MOST  # cells of a log
from hintsd.follow.sequence import CHUNK, EpochOrder, Inos, Positions
from hintsd.policies.residents import fits

CHUNK_SAMPLES_MOST = 1 << 14  # of one command, beside which others wait
EPOCHS_MOST = 3  # that one log serves: each more wears the SSD less, but by less each time
CELL_BYTES_LEAST = 512 << 10  # on average: what is read at once
BUFFER_BYTES_LEAST, BUFFER_BYTES_MOST = 64 << 10, 1 << 20
FRAME_SAMPLES = 1 << 18  # of one `pack` frame
MARGIN = 1.25
SHARED_LEAST = 0.9  # of the next epoch's samples with the present one's
COMPARED_SAMPLES = 1 << 16
WHOLE_SHARE = 0.99  # of a log's samples were moved: it can serve more epochs than one
FIRST_SHARE = 0.1  # of the bytes lie on SSD at most when an epoch counts as the first one
WAITED_SHARE = 0.01  # of an epoch's samples that its reader found missing: it has waited
# ... though it got less than this part of what the device gives at random: it was not the device.
DEVICE_SHARE = 0.5
CHEAP_BYTES = 5000  # larger samples cost no less of a processor when they lie in order

STATIC, REORDER, AUTO = "static", "reorder", "auto"

Mask = npt.NDArray[np.bool_]


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


class Probe(Protocol):
    """What was measured of the cache directory's device, in bytes/s."""

    @property
    def sequential_bytes_per_s(self) -> float:
        """Of large reads."""

    @property
    def mixed_bytes_per_s(self) -> float:
        """Of large reads, while as much is written."""

    def random_bytes_per_s(self, size_bytes: int) -> float:
        """Payload of random reads of samples of this size."""


class Verdict(NamedTuple):
    is_packed: bool
    why: str


class Wanted(NamedTuple):
    """What a job's reader takes from SSD."""

    bytes_per_s: float
    late_share: float = 0.0  # of its samples that it has waited for
    others_bytes_per_s: float = 0.0  # what other jobs' readers took meanwhile

    @property
    def has_waited(self) -> bool:
        """It may want more than it got."""
        return self.late_share > WAITED_SHARE


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
        self.order_bytes: int | None = None
        """Of RAM, that an epoch would take as a whole; None: no order is known."""
        self.decided = -1
        """The epoch whose staging has begun, or the one before the first."""
        self.chunks: dict[int, Chunks] = {}
        self.is_open = False
        """A log for the epochs behind `decided` takes what is staged."""
        self.is_announced = False
        """The mount was told of a log, and not that there is none any more."""
        self.served = range(0)
        """The epochs for which the newest log is, or was, written."""
        self.epochs_most = EPOCHS_MOST
        """It serves so many: fewer, once the mount has refused a log for so many."""
        self.why = ""
        self.waits_since: float | None = None
        """For the orders of the epochs behind."""
        self.begun: tuple[float, int, int] | None = None
        """When `decided` began to be staged, where the reader was then, and the reads that had
        waited."""
        self.others_begun: Mapping[str, int] = {}
        """The samples that other jobs' readers had passed then."""
        self._samples = 0  # that it is to take
        self._moved = 0  # of them, sent to be moved
        self._moved_until = 0  # the position up to which they were counted
        self._pieces: Iterator[Mapping[str, Any]] | None = None  # of its `pack`, not sent yet
        self._keeps_order = True

    def keeps(self, epoch: int) -> bool:
        """Whether the log that this epoch reads serves the one behind it, too, and has all of it:
        then nothing is written anew.
        """
        return (
            epoch in self.served
            and epoch + 1 in self.served
            and all(later in self.chunks for later in range(epoch, self.served.stop))
            and self.is_whole
        )

    @property
    def is_whole(self) -> bool:
        return self._moved >= WHOLE_SHARE * self._samples

    def measure(self, order_bytes: int | None) -> None:
        """Of RAM, that an epoch would take as a whole."""
        self.order_bytes = order_bytes

    def say(self, why: str) -> None:
        """What becomes of it."""
        self.why = why

    def waits(self, *, is_awaited: bool, now: float, most_s: float) -> bool:
        """Whether the orders behind, which may be to come, are waited for: for so long at most."""
        if is_awaited and self.waits_since is None:
            self.waits_since = now
        if is_awaited and self.waits_since is not None and now - self.waits_since < most_s:
            return True
        self.waits_since = None
        return False

    def decide(self, epoch: int, begun: tuple[float, int, int], others: Mapping[str, int]) -> None:
        """The staging of this epoch begins."""
        self.decided, self.begun, self.others_begun = epoch, begun, others

    def begin(
        self,
        epochs: range,
        chunks: Mapping[int, Chunks],
        samples: int,
        pieces: Iterator[Mapping[str, Any]],
    ) -> None:
        """A log for these epochs takes what is staged from now on; `chunks`: theirs, and those of
        the epoch before; `pieces`: the fields of the frames that announce it.
        """
        self.is_open = self.is_announced = True
        self.served, self._samples, self._pieces = epochs, samples, pieces
        self._moved = self._moved_until = 0
        self.chunks.update(chunks)

    def close(self) -> bool:
        """It takes no more; whether it did."""
        was_open, self.is_open = self.is_open, False
        return was_open

    def withdraw(self) -> None:
        """The mount has it no more."""
        self.is_announced = False

    @property
    def is_being_announced(self) -> bool:
        return self._pieces is not None

    def take_pieces(self, most: int) -> list[Mapping[str, Any]]:
        """The next frames that announce it, so many at most."""
        found = list(itertools.islice(self._pieces or (), most))
        if found and found[-1]["last"]:
            self._pieces = None
        return found

    def take_keep_order(self) -> bool:
        """Whether the order of the chunk that is staged now is to be kept."""
        keeps, self._keeps_order = self._keeps_order, False
        return keeps

    def count_moved(self, start: int, stop: int, samples: int) -> None:
        """So many of those at [start, stop) are moved; twice counts once."""
        if start >= self._moved_until:
            self._moved += samples
            self._moved_until = stop

    def recount(self, samples: int) -> None:
        """It lacks nothing for which there was no room after all."""
        self._samples = min(self._samples, samples)

    @property
    def largest_bytes(self) -> int:
        """Of RAM, that a chunk takes."""
        return max((chunks.largest_bytes for chunks in self.chunks.values()), default=0)

    def wanted(self, contents: Contents, position: int, waited: int, now: float) -> Wanted | None:
        """Since the last decision, of its reader who is at `position` and has waited for so many
        samples in all; None: not known yet.
        """
        if self.begun is None:
            return None
        since, before, waited_before = self.begun
        samples = position - before
        if now <= since or samples <= 0 or not contents.samples:
            return None
        bytes_per_s = contents.size_bytes / contents.samples * samples / (now - since)
        return Wanted(bytes_per_s, (waited - waited_before) / samples)

    def keep_order(self) -> None:
        """Of the chunk that is staged next: its reader waits for it."""
        self._keeps_order = True

    def forget_before(self, epoch: int) -> None:
        for old in [known for known in self.chunks if known < epoch]:
            del self.chunks[old]

    def refuse(self, why: str) -> None:
        """The mount could not open it."""
        self.is_open, self.why = False, why
        self.epochs_most = max(1, len(self.served) - 1)
        self._forget_ahead()

    def forget(self) -> None:
        """The log is over: nothing more is moved, no epoch is cut."""
        self.chunks.clear()
        self.served = range(0)
        self.undecide()

    def undecide(self) -> None:
        """What was sent is void; the present epoch may begin another log, unless the one that it
        reads serves further ones: that one lies on SSD whole.
        """
        if self.decided >= 0 and not self.keeps(self.decided):
            self._forget_ahead()
        self.decided = -1
        self.why = ""
        self.is_open = self.is_announced = False
        self._pieces = None
        self.waits_since = None
        self._keeps_order = True
        self.begun = None

    def _forget_ahead(self) -> None:
        self.served = range(0)
        for epoch in [known for known in self.chunks if known > self.decided]:
            del self.chunks[epoch]


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


def following(present: EpochOrder, coming: Sequence[EpochOrder]) -> int:
    """For how many of these epochs one log can be written from what the present one reads."""
    for count, order in enumerate(coming):
        if _shared(present, order) < WHOLE_SHARE:
            return count
    return len(coming)


def _shared(present: EpochOrder, coming: EpochOrder) -> float:
    sample = coming.inos[:: max(1, len(coming.inos) // COMPARED_SAMPLES)]
    return float(present.contains(sample).mean())


def refusal(present: EpochOrder, coming: EpochOrder) -> str:
    """Why a log for the order that comes is not worth it; "": it may be."""
    if np.array_equal(present.inos, coming.inos):
        return "each epoch has the same order"
    if _shared(present, coming) < SHARED_LEAST:
        return "the next epoch reads other samples"
    return ""


def decide(
    layout: str,
    probe: Probe | None,
    contents: Contents,
    wanted: Wanted | None,
    epochs: int = 1,
) -> Verdict:
    """Whether the samples are written anew in the order of the next epoch, or of so many.

    wanted: None: unknown.
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
        return Verdict(False, "the device is not measured yet")
    if wanted is None:
        return Verdict(False, "how fast it reads is not known yet")
    mean_bytes = contents.size_bytes // contents.samples
    most = math.inf if wanted.has_waited else wanted.bytes_per_s
    random = min(probe.random_bytes_per_s(mean_bytes), most)
    mixed = probe.mixed_bytes_per_s
    taken = wanted.bytes_per_s + wanted.others_bytes_per_s
    is_device_idle = wanted.has_waited and taken < DEVICE_SHARE * random
    if is_device_idle and mean_bytes > CHEAP_BYTES:
        said = f"readers waited ({wanted.late_share:.1%} late), but not for the device: "
        said += f"{format_bytes(taken)}/s of {format_bytes(random)}/s at random"
        return Verdict(False, f"{said}, samples of {format_bytes(mean_bytes)}")
    # one of the epochs is read while it is written, and the others are only read
    costs_s = [1 / min(mixed, most)]
    costs_s += [1 / min(probe.sequential_bytes_per_s, most)] * (epochs - 1)
    is_packed = epochs / sum(costs_s) > MARGIN * random
    said = f"{format_bytes(mixed)}/s in order and rewritten"
    if epochs > 1:
        said += f", {format_bytes(probe.sequential_bytes_per_s)}/s only in order"
    said += f", {format_bytes(probe.random_bytes_per_s(mean_bytes))}/s at random"
    if most < math.inf:
        said += f", {format_bytes(most)}/s wanted"
    else:
        said += f", readers waited: {wanted.late_share:.1%} late"
    return Verdict(is_packed, f"{said}, samples of {format_bytes(mean_bytes)}")


class Cells(NamedTuple):
    """What a log has: samples by cell. `ends`: index behind each cell's last one."""

    inos: Inos
    ends: Positions


def cells(orders: Sequence[EpochOrder], chunks: Sequence[Chunks]) -> Cells:
    """Of the epochs that a log serves: cell (i, j, k) is number (i * M2 + j) * M3 + k.

    A sample that an epoch does not read lies in any of its chunks.
    """
    if len(orders) == 1:
        return Cells(orders[0].inos, chunks[0].ends)
    parts = [orders[0].inos]
    for number, order in enumerate(orders[1:], 1):
        is_new = np.ones(len(order.inos), np.bool_)
        for start in range(0, len(is_new), CHUNK):
            part = slice(start, start + CHUNK)
            for before in orders[:number]:
                is_new[part] &= ~before.contains(order.inos[part])
        parts.append(order.inos[is_new])
    inos = np.concatenate(parts)
    number_of = np.zeros(len(inos), np.uint16)
    for order, (ends, _) in zip(orders, chunks, strict=True):
        for start in range(0, len(inos), CHUNK):
            some = inos[start : start + CHUNK]
            index = order.find(some, 0)
            chunk = np.where(index < 0, some % len(ends), np.searchsorted(ends, index, "right"))
            numbers = number_of[start : start + CHUNK]
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
