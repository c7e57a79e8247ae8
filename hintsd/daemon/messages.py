"""Messages of the hints channel, checked: from the fields of a frame to what it says; and what is
said of those that cannot be used.

A field that is missing, of the wrong type or out of bounds is a WireError: such a client does not
speak our language, its connection ends. What is well-formed and cannot be used is a ValueError,
which is told to the client. Both are one line that names the field.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from typing import Any, BinaryIO, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from fusecache.base.wire import Fields, WireError
from hintsd.orders.hint import (
    BATCH_MOST,
    NAME_LENGTH_MOST,
    PATH_BYTES_MOST,
    PATHS_BYTES_MOST,
    Hint,
    read_hint,
    read_spec,
)
from hintsd.orders.spec import EPOCH_MOST, LENGTH_MOST, OrderSpec
from hintsd.sampling.chunks import CHUNKS_MOST

ARRAY_PIECE_BYTES_MOST: Final = 1 << 20
ARRAY_BYTES_MOST: Final = PATHS_BYTES_MOST  # of all arrays that a connection has under way
ARRAYS_MOST: Final = 64
NUMBER_MOST: Final = (1 << 63) - 1
ARRAY_NAME_LENGTH_MOST: Final = 64
ENDS_MOST: Final = 2 * ARRAY_BYTES_MOST  # where one may begin: some are begun again
SPOOL_DIRECTORY: Final = "/var/tmp"  # on a disk; /tmp may be memory


class JobRefused(Exception):
    """One line for the user."""


class NotHere(JobRefused):
    """This hintsd cannot compute the order; one with torch could."""


def internal_error() -> str:
    """What a client hears of a fault of ours, which the log tells."""
    return f"internal error: see hintsd's log, {_log_place()}"


def _log_place() -> str:
    """Where this hintsd's log goes."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and os.path.isabs(handler.stream.name):
            return str(handler.stream.name)
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):  # `fusecache mount` gives it a file
            return os.readlink("/proc/self/fd/2")
    except OSError:
        pass
    return "which is its stderr"


class _Array:
    __slots__ = ("begin", "received", "total")

    def __init__(self, begin: int, total: int) -> None:
        self.begin, self.total, self.received = begin, total, 0


class Arrays:
    """The named arrays that a client sends in pieces, before the `job` or `order` that uses them.

    They may be hundreds of megabytes (the paths of 14 million files), of a client that never comes
    to its end. So they are written to a file without a name, in SPOOL_DIRECTORY: what is not used
    yet takes no memory, and is gone with the connection, or the process. What is read from it
    belongs to the job.

    INVARIANT: an array has its `total` bytes in the file, from the place on that was chosen when it
    began; no two share a byte.

    Those of one connection. The methods write and read files: they are for threads.
    """

    def __init__(self) -> None:
        self._arrays: dict[str, _Array] = {}
        self._file: BinaryIO | None = None
        self._end = 0  # of what is taken in the file

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def held_bytes(self) -> int:
        """In the file, now or soon."""
        return self._end

    def add(self, fields: Fields, most: int = ARRAY_BYTES_MOST, ends_most: int = ENDS_MOST) -> None:
        """Take an `array` message in. WireError: not the next piece, or more bytes in all than
        `most`; in the file more than `ends_most`, with those that were begun again.
        """
        name = fields.str("name", ARRAY_NAME_LENGTH_MOST)
        total = fields.int("total", 0, most)
        offset = fields.int("offset", 0, ARRAY_BYTES_MOST)
        data = fields.bytes("data", ARRAY_PIECE_BYTES_MOST)
        if offset == 0:
            self._begin(name, total, most, ends_most)
        array = self._arrays.get(name)
        if array is None or offset != array.received:
            raise WireError("array: field offset is not where the piece before ended")
        if total != array.total:
            raise WireError("array: field total is not what it was")
        if offset + len(data) > total:
            raise WireError("array: field data goes beyond total")
        try:
            self._write(array.begin + offset, data)
        except OSError as error:
            raise WireError(f"array: it cannot be kept: {error.strerror}") from None
        array.received += len(data)

    def _begin(self, name: str, total: int, most: int, ends_most: int) -> None:
        again = self._arrays.get(name)
        if again is not None and again.total == total:
            again.received = 0
            return
        others = sum(array.total for array in self._arrays.values() if array is not again)
        if others + total > most or self._end + total > ends_most:
            raise WireError(f"array: field total: more than {most} bytes in all")
        if again is None and len(self._arrays) == ARRAYS_MOST:
            raise WireError(f"array: field name: more than {ARRAYS_MOST} arrays")
        self._arrays[name] = _Array(self._end, total)
        self._end += total

    def _write(self, place: int, data: bytes) -> None:
        if self._file is None:
            directory = SPOOL_DIRECTORY if os.access(SPOOL_DIRECTORY, os.W_OK) else None
            file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 (see `clear`)
            self._file = cast(BinaryIO, file)
        view = memoryview(data)
        while view:
            done = os.pwrite(self._file.fileno(), view, place)
            view, place = view[done:], place + done

    def take(self, where: str, named: Fields) -> bytes:
        """The whole array that a map {"array": name} means."""
        name = named.str("array", ARRAY_NAME_LENGTH_MOST)
        array = self._arrays.get(name)
        if array is None or array.received != array.total:
            raise WireError(f"{where}: the array {name!r} was not sent, or not to its end")
        if self._file is None or array.total == 0:
            return b""
        # A buffered file reads on: one system call gives 2 GiB less a page at most.
        with open(self._file.fileno(), "rb", closefd=False) as file:
            file.seek(array.begin)
            data = file.read(array.total)
        if len(data) != array.total:
            raise WireError(f"{where}: the array {name!r} cannot be read again")
        return data

    def clear(self) -> None:
        """Forget all, and give back its room."""
        self._arrays.clear()
        self._end = 0
        if self._file is not None:
            self._file.close()
            self._file = None


def _with_arrays(fields: Fields, arrays: Arrays, where: str) -> dict[str, Any]:
    """The map with its {"array": name} values replaced by the arrays."""
    found = dict(fields.raw())
    for name, value in found.items():
        if type(value) is dict:
            found[name] = arrays.take(f"{where}: field {name}", fields.map(name))
    return found


def hint(fields: Fields, arrays: Arrays) -> Hint:
    """Of a `job` message, its arrays in their places. As `read_hint` raises."""
    message = dict(fields.raw())
    for name in ("files", "spec"):
        if name in fields:
            message[name] = _with_arrays(fields.map(name), arrays, f"job: {name}")
    return read_hint(message)


def is_of_others(fields: Fields) -> bool:
    """Field `of_others` of a `job` message. WireError."""
    return fields.raw().get("of_others") is not None and fields.bool("of_others")


def place(fields: Fields) -> tuple[str, bytes] | None:
    """Fields `device` and `inside` of a `job` message; None: its client is an older one. WireError.
    ValueError: one line.
    """
    if "device" not in fields:
        return None
    inside = fields.bytes("inside", PATH_BYTES_MOST)
    is_whole = inside.startswith(b"/") and b"\0" not in inside
    if not is_whole or b"//" in inside or b".." in inside.split(b"/"):
        raise ValueError("inside must be absolute, without `..` and `//`")
    return fields.str("device", 32), inside


def resumed_job(fields: Fields) -> str | None:
    """Field `resume` of a `job` message. WireError."""
    return fields.optional_str("resume", NAME_LENGTH_MOST)


def wants_state(fields: Fields) -> bool:
    """Field `tell_state` of a `job` message. WireError."""
    return "tell_state" in fields and fields.bool("tell_state")


def order_spec(fields: Fields, arrays: Arrays) -> tuple[int, OrderSpec]:
    """The epoch and the spec of an `order` message. WireError, ValueError: see the module."""
    epoch = fields.int("epoch", 0, EPOCH_MOST)
    return epoch, read_spec(_with_arrays(fields.map("spec"), arrays, "order: spec"))


class Sampled(NamedTuple):
    """What an importance sampler tells of its draw, for status; None: it has no such thing."""

    substituted: int | None = None
    """Reads of the epoch that stand for another sample's, of all ranks."""
    h_list: int | None = None
    """Samples on iCACHE's H-list."""


def sampled(fields: Fields) -> Sampled:
    """Of a `scores` message. WireError."""
    return Sampled(
        fields.optional_int("substituted", 0, LENGTH_MOST),
        fields.optional_int("h_list", 0, LENGTH_MOST),
    )


def scores(fields: Fields, arrays: Arrays) -> npt.NDArray[np.float32]:
    """Of a `scores` message. WireError; ValueError: they are no numbers of uses."""
    return scores_of(_with_arrays(fields, arrays, "scores").get("uses"))


def scores_of(raw: object) -> npt.NDArray[np.float32]:
    """Of a message's `uses`, or of the journal. As `scores` raises."""
    if not isinstance(raw, bytes) or len(raw) % 4:
        raise WireError("scores: field uses is no array of f4")
    uses = np.frombuffer(raw, "<f4")
    if not (np.isfinite(uses).all() and (uses >= 0).all()):
        raise ValueError("a score is negative, infinite or no number")
    return uses


def number(fields: Fields) -> int:
    """Of a `cached` or `chunk` message. WireError."""
    return fields.int("number", 0, NUMBER_MOST)


def with_staged(fields: Fields) -> bool:
    """Field `staged` of a `cached` message. WireError."""
    return "staged" in fields and fields.bool("staged")


def unread_chunks(fields: Fields) -> tuple[int, list[int]]:
    """Of a `chunk` message: how many chunks there are, and those that are unread. WireError."""
    chunks = fields.int("chunks", 1, CHUNKS_MOST)
    unread = fields.list("unread", chunks)
    are_chunks = all(type(chunk) is int and 0 <= chunk < chunks for chunk in unread)
    if not unread or not are_chunks or len(set(unread)) < len(unread):
        raise WireError(f"chunk: field unread is no list of some of {chunks} chunks")
    return chunks, unread


def step(fields: Fields) -> tuple[int, int]:
    """The epoch and the batch of a `step` message. WireError."""
    return fields.int("epoch", 0, EPOCH_MOST), fields.int("batch", 0, BATCH_MOST)
