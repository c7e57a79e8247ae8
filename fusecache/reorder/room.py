"""What a log takes, and what there is room for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from fusecache.store import Store
from fusecache.store.log import Log
from fusecache.store.types import ALIGNMENT
from fusecache.table.pins import Pins

LOOK_SHARE = 20  # looking takes at most this part: of the time for room, of a CPU for segments
LOOK_BYTES_SHARE = 50  # of the dataset: what is moved between two looks at 27,000 files/s


def slack_bytes(chunks: int, size_bytes: int, buffer_bytes: int, chunk_bytes: int) -> int:
    """Room beyond the dataset that a log takes at full speed (docs/LOG.md): what waits in buffers
    keeps its old place, and so do three chunks of an epoch around the reader, and what moves
    between two looks.
    """
    waiting = chunks * buffer_bytes * 13 // 10
    return waiting + 3 * chunk_bytes + size_bytes // LOOK_BYTES_SHARE


class Sizes(NamedTuple):
    """Of a log."""

    slack_bytes: int = 0
    """That it wants beyond the dataset."""
    mean_bytes: int = 1
    """Of a file."""
    record_bytes: int = 1
    """Of its record on SSD."""

    @classmethod
    def of(
        cls, chunks: int, size_bytes: int, samples: int, buffer_bytes: int, epochs: int
    ) -> Sizes:
        """As Packer.begin."""
        chunk_bytes = math.ceil(size_bytes / chunks ** (1 / epochs))
        mean_bytes = -(-size_bytes // samples)
        record_bytes = -(-mean_bytes // ALIGNMENT) * ALIGNMENT
        slack = slack_bytes(chunks, size_bytes, buffer_bytes, chunk_bytes)
        return cls(slack, mean_bytes, record_bytes)

    def payload_bytes(self, size_bytes: int) -> int:
        """What of so many bytes in records is payload."""
        return size_bytes * self.mean_bytes // self.record_bytes

    @property
    def slack_payload_bytes(self) -> int:
        return self.payload_bytes(self.slack_bytes)


class Room:
    """What the store, or an open log, has room for. With thousands of segments looking takes a
    while: what is taken meanwhile is taken off.
    """

    def __init__(self, store: Store, pins: Pins | None) -> None:
        """`pins`: what else may go is room, but for a log."""
        self._store = store
        self._pins = pins
        self._free = 0
        self._stored_bytes = 0  # of the store, when that was looked at
        self._until = 0.0  # when that will not do any more ...
        self._number = 0, 0  # ... of the list of pins, and what had been evicted

    def of_store(self, has_logs: bool) -> int:
        """May wait for the disk."""
        pins = self._pins
        if has_logs:  # `take` is told all
            return self._look(self._store.room_bytes)
        if pins is not None and pins.may_evict:
            free = self._look(lambda: self._store.room_bytes(pins.segments))
        else:
            free = self._look(self._store.room_bytes)
        return max(0, free - (self._store.stored_bytes() - self._stored_bytes))

    def of_log(self, opened: Log) -> int:
        """May wait for the disk."""
        return self._look(opened.room_bytes)

    def _look(self, room_bytes: Callable[[], int]) -> int:
        begin, evicted = time.monotonic(), self._store.evicted_bytes()
        number = 0 if self._pins is None else self._pins.number, evicted
        if begin >= self._until or number != self._number:
            self._number, self._stored_bytes = number, self._store.stored_bytes()
            self._free = room_bytes()
            self._until = begin + LOOK_SHARE * (time.monotonic() - begin)
        return self._free

    def taken_bytes(self, length: int, is_open: bool) -> int:
        """What the open log has less room by, when a block is stored; without one, what is reserved
        for a new segment and not written is given back when the next log begins.
        """
        return self._store.taken_bytes(length) if is_open else length

    def take(self, size_bytes: int) -> None:
        self._free -= size_bytes

    def forget(self) -> None:
        """The room is divided otherwise now: look next time."""
        self._until = 0.0
