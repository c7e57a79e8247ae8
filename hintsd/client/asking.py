"""Asking: the questions to hintsd that a trainer's thread waits for: what is cached, and which
chunk is next.

INVARIANT: who asks waits for at most the time that it gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fusecache.base import wire
from fusecache.base.wire import Fields, WireError
from hintsd.orders.spec import LENGTH_MOST

PIECE_BYTES_MOST = 1 << 20

Mask = npt.NDArray[np.bool_]


class Asking:
    """One question at a time: the trainer's thread asks, the link's sends and takes the answer."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` has the other thread look."""
        self._wake = wake
        self._turn = threading.Lock()  # to ask
        self._changed = threading.Condition()  # of all below
        self._number = 0  # of the last question
        self._question: tuple[str, dict[str, Any]] = ("", {})  # the last one, but for its number
        self._is_due = self._is_settled = False  # it is to be sent; nothing more will come
        self._bits = bytearray()
        self._found: Any = None

    def cached(self, timeout_s: float, *, staged: bool) -> Mask | None:
        """Which samples are cached (`staged`: or staged), shape (samples,); None: no answer came in
        time.
        """
        found = self._ask("cached", {"staged": True} if staged else {}, timeout_s)
        if found is None:
            return None
        samples, bits = found
        unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), count=samples, bitorder="little")
        return unpacked.view(np.bool_)

    def next_chunk(self, unread: list[int], chunks: int, timeout_s: float) -> int | None:
        """As `Job.next_chunk`."""
        told = {"chunks": chunks, "unread": unread}
        found: int | None = self._ask("chunk", told, timeout_s)
        return found

    def _ask(self, kind: str, told: dict[str, Any], timeout_s: float) -> Any:
        """What was settled on; None: no answer came in time."""
        if not self._turn.acquire(timeout=timeout_s):
            return None
        try:
            with self._changed:
                self._number += 1
                self._is_due, self._is_settled, self._found = True, False, None
                self._bits, self._question = bytearray(), (kind, told)
            self._wake()
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled, timeout_s)
                self._is_due, found = False, self._found
                self._is_settled, self._found = True, None
        finally:
            self._turn.release()
        return found

    # Everything below is the link's thread's.

    def take(self) -> bytes:
        """The frame to be sent; b"": there is none."""
        with self._changed:
            is_due, self._is_due = self._is_due, False
            if not is_due:
                return b""
            kind, told = self._question
            return wire.encode(kind, {"number": self._number, **told})

    def take_in_chunk(self, fields: Fields) -> None:
        """An answer. WireError: it is none."""
        number, chunk = fields.int("number", 0, 1 << 63), fields.int("chunk", 0, LENGTH_MOST)
        with self._changed:
            if self._is_awaited("chunk", number):
                self._settle(chunk)

    def take_in_cached(self, fields: Fields) -> None:
        """A piece of an answer. WireError: it is none."""
        number = fields.int("number", 0, 1 << 63)
        samples = fields.int("samples", 1, LENGTH_MOST)
        offset = fields.int("offset", 0, LENGTH_MOST)
        data = fields.bytes("data", PIECE_BYTES_MOST)
        with self._changed:
            if not self._is_awaited("cached", number):
                return
            if offset != len(self._bits) or offset + len(data) > -(-samples // 8):
                raise WireError("cached: field offset or data is not the next piece")
            self._bits += data
            if len(self._bits) == -(-samples // 8):
                self._settle((samples, self._bits))

    def give_up(self) -> None:
        """No answer will come."""
        with self._changed:
            self._settle(None)

    def _is_awaited(self, kind: str, number: int) -> bool:
        """Whether that answer is not late. WireError: it is none to this question."""
        if number != self._number or self._is_settled:
            return False
        if kind != self._question[0]:
            raise WireError(f"{kind}: field number is that of another question")
        return True

    def _settle(self, found: Any) -> None:
        self._is_due, self._is_settled, self._found = False, True, found
        self._changed.notify_all()
