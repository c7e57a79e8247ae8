"""Asking: the one question of a trainer's thread that waits for hintsd's answer: what is cached.

INVARIANT: who asks waits for at most the time that it gives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Optional

import numpy as np
import numpy.typing as npt

from fusecache.base import wire
from fusecache.base.wire import Fields, WireError
from hintsd.orders.spec import LENGTH_MOST

PIECE_BYTES_MOST = 1 << 20

Mask = npt.NDArray[np.bool_]


class Asking:
    """One question at a time: the trainer's thread asks, the link's sends and takes the answer."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # to ask
        self._changed = threading.Condition()  # of all below
        self._number = 0  # of the last question
        self._with_staged = False  # whether it is about what is staged, too
        self._is_due = self._is_settled = False  # it is to be sent; nothing more will come
        self._bits = bytearray()
        self._found: Optional[tuple[int, bytearray]] = None  # samples, and their bits

    def ask(
        self, wake: Callable[[], None], timeout_s: float, *, staged: bool
    ) -> Optional[Mask]:
        """Which samples are cached (`staged`: or staged), shape (samples,); None: no answer came in
        time. `wake` has the other thread look."""
        if not self._turn.acquire(timeout=timeout_s):
            return None
        try:
            with self._changed:
                self._number += 1
                self._is_due, self._is_settled, self._found = True, False, None
                self._bits, self._with_staged = bytearray(), staged
            wake()
            with self._changed:
                self._changed.wait_for(lambda: self._is_settled, timeout_s)
                self._is_due, found = False, self._found
                self._is_settled, self._found = True, None
        finally:
            self._turn.release()
        if found is None:
            return None
        samples, bits = found
        unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), count=samples, bitorder="little")
        return unpacked.view(np.bool_)

    # Everything below is the link's thread's.

    def take(self) -> bytes:
        """The frame to be sent; b"": there is none."""
        with self._changed:
            is_due, self._is_due = self._is_due, False
            if not is_due:
                return b""
            staged = {"staged": True} if self._with_staged else {}
            return wire.encode("cached", {"number": self._number, **staged})

    def take_in(self, fields: Fields) -> None:
        """A piece of an answer. WireError: it is none."""
        number = fields.int("number", 0, 1 << 63)
        samples = fields.int("samples", 1, LENGTH_MOST)
        offset = fields.int("offset", 0, LENGTH_MOST)
        data = fields.bytes("data", PIECE_BYTES_MOST)
        with self._changed:
            if number != self._number or self._is_settled:
                return  # it is late
            if offset != len(self._bits) or offset + len(data) > -(-samples // 8):
                raise WireError("cached: field offset or data is not the next piece")
            self._bits += data
            if len(self._bits) == -(-samples // 8):
                self._settle((samples, self._bits))

    def give_up(self) -> None:
        """No answer will come."""
        with self._changed:
            self._settle(None)

    def _settle(self, found: Optional[tuple[int, bytearray]]) -> None:
        self._is_due, self._is_settled, self._found = False, True, found
        self._changed.notify_all()
