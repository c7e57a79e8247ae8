"""Frames of the hints and plan channels (docs/WIRE.md), the validation of their fields, and the
numbers that cross the plan channel.

A frame is a length and a msgpack payload `[type, {name: value}]`. This module is the only
implementation; it does no input or output. `FrameStream` in wire_trio.py does, for trio; a blocking
socket needs `encode` and `Decoder` alone, and trainers that import them pay for no trio.

INVARIANT: whatever bytes arrive, nothing but WireError is raised, and no more is allocated than a
small multiple of what was received.
"""

from __future__ import annotations

import builtins
import os
import socket
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgpack  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

# numpy is imported late: `fusecache mount`, `umount` and `status` send and receive no arrays.

VERSION = 1
FRAME_BYTES_MOST = 4 << 20
FRAME_TIMEOUT_S = 10.0
CLIENT_FRAME_BYTES_MOST = (
    9 << 17
)  # on the hints channel, to hintsd: a MiB of an array, and its head
TYPE_LENGTH_MOST = 32
LIST_LENGTH_MOST = 4096
ITEMS_MOST = 1 << 16  # elements of all lists and maps of one frame together
CHUNKS_MOST = 4096  # of a log

_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")

T = TypeVar("T")


class WireError(Exception):
    """The peer does not keep to the format; one line."""


class Fields:
    """The fields of a frame, or of a map in it. Each access checks type and bounds.

    All raise WireError with the field's name. The `optional_` forms give None for a field that is
    missing or nil.
    """

    __slots__ = ("_values", "_where")

    def __init__(self, values: dict[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def __contains__(self, name: builtins.str) -> builtins.bool:
        return self._values.get(name) is not None

    def __repr__(self) -> builtins.str:
        return f"Fields({self._where}: {', '.join(self._values)})"

    def raw(self) -> dict[builtins.str, Any]:
        """The map as it came: plain msgpack values, not checked any further."""
        return self._values

    def _typed(self, name: builtins.str, kind: type[T], article: builtins.str) -> T:
        value = self._values.get(name)
        if type(value) is not kind:  # a bool is no int here
            self._refuse(name, f"is not {article}" if name in self._values else "is missing")
        return value  # type: ignore[return-value]  # it has just been checked

    def _refuse(self, name: builtins.str, what: builtins.str) -> None:
        raise WireError(f"{self._where}: field {name} {what}")

    def int(self, name: builtins.str, least: builtins.int, most: builtins.int) -> builtins.int:
        value = self._typed(name, builtins.int, "an integer")
        if not least <= value <= most:
            self._refuse(name, f"is not between {least} and {most}")
        return value

    def optional_int(
        self, name: builtins.str, least: builtins.int, most: builtins.int
    ) -> builtins.int | None:
        return self.int(name, least, most) if name in self else None

    def bool(self, name: builtins.str) -> builtins.bool:
        return self._typed(name, builtins.bool, "true or false")

    def str(self, name: builtins.str, most: builtins.int) -> builtins.str:
        """Text of at most `most` characters."""
        value = self._typed(name, builtins.str, "a string")
        if len(value) > most:
            self._refuse(name, f"is longer than {most}")
        return value

    def optional_str(self, name: builtins.str, most: builtins.int) -> builtins.str | None:
        return self.str(name, most) if name in self else None

    def bytes(self, name: builtins.str, most: builtins.int) -> builtins.bytes:
        value = self._typed(name, builtins.bytes, "a byte string")
        if len(value) > most:
            self._refuse(name, f"is longer than {most} bytes")
        return value

    def array(self, name: builtins.str, dtype: DTypeLike) -> NDArray[Any]:
        """A packed little-endian array, shape (n,), read-only: a view of the frame's bytes."""
        import numpy as np

        value = self._typed(name, builtins.bytes, "an array")
        kind = np.dtype(dtype).newbyteorder("<")
        if len(value) % kind.itemsize:
            self._refuse(name, f"is not made of {kind.itemsize}-byte elements")
        return np.frombuffer(value, kind)

    def list(self, name: builtins.str, most: builtins.int) -> builtins.list[Any]:
        value: builtins.list[Any] = self._typed(name, builtins.list, "a list")
        if len(value) > most:
            self._refuse(name, f"has more than {most} elements")
        return value

    def strings(
        self, name: builtins.str, count_most: builtins.int, length_most: builtins.int
    ) -> builtins.list[builtins.str]:
        values = self.list(name, count_most)
        for value in values:
            if type(value) is not builtins.str or len(value) > length_most:
                self._refuse(name, f"has an element that is no string of at most {length_most}")
        return values

    def map(self, name: builtins.str) -> Fields:
        value: dict[Any, Any] = self._typed(name, dict, "a map")
        return Fields(value, f"{self._where}: {name}")

    def optional_map(self, name: builtins.str) -> Fields | None:
        return self.map(name) if name in self else None


class Frame(NamedTuple):
    type: str
    fields: Fields


def encode(type_: str, fields: dict[str, Any]) -> bytes:
    """One frame. Arrays are given as numpy arrays or buffers.

    WireError: it would be larger than FRAME_BYTES_MOST; the sender has to split.
    """
    payload: bytes = msgpack.packb(
        [type_, fields], default=_pack, unicode_errors="backslashreplace"
    )
    if len(payload) > FRAME_BYTES_MOST:
        raise WireError(f"{type_}: frame of {len(payload)} bytes is too large")
    return _LENGTH.pack(len(payload)) + payload


def _pack(value: object) -> object:
    import numpy as np

    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no form on the wire")


class Decoder:
    """Bytes in, frames out. After a WireError the connection is of no more use.

    INVARIANT: what it holds are bytes: a frame is decoded when it is asked for.
    """

    def __init__(self, frame_bytes_most: int = FRAME_BYTES_MOST) -> None:
        self._frame_bytes_most = frame_bytes_most
        self._buffer = bytearray()
        self._start = 0  # of what is not decoded yet

    @property
    def is_inside_frame(self) -> bool:
        """There are bytes of a frame that is not decoded."""
        return len(self._buffer) > self._start

    @property
    def has_frame(self) -> bool:
        """`next` has one, or a WireError."""
        length = self._next_length()
        return length is not None and (not self._is_allowed(length) or self._rest() >= length)

    def add(self, data: bytes | bytearray | memoryview) -> None:
        del self._buffer[: self._start]
        self._start = 0
        self._buffer += data

    def next(self) -> Frame | None:
        """The next frame; None: it is not complete."""
        length = self._next_length()
        if length is not None and not self._is_allowed(length):
            raise WireError(f"a frame of {length} bytes is not allowed")
        if length is None or self._rest() < length:
            return None
        begin = self._start + _LENGTH.size
        self._start = begin + length
        payload = bytes(memoryview(self._buffer)[begin : self._start])
        if not self.is_inside_frame:
            self._buffer.clear()
            self._start = 0
        return _decode(payload)

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """The frames that these bytes complete, in order."""
        self.add(data)
        frames: list[Frame] = []
        while (frame := self.next()) is not None:
            frames.append(frame)
        return frames

    def _next_length(self) -> int | None:
        if len(self._buffer) - self._start < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        return int(length)

    def _is_allowed(self, length: int) -> bool:
        return 1 <= length <= self._frame_bytes_most

    def _rest(self) -> int:
        """Bytes behind the next frame's length."""
        return len(self._buffer) - self._start - _LENGTH.size


def _decode(payload: bytes) -> Frame:
    items = 0

    def count(container: Any) -> Any:
        nonlocal items
        items += len(container)
        if items > ITEMS_MOST:
            raise WireError("a frame with too many elements")
        return container

    length_most = min(len(payload), LIST_LENGTH_MOST)
    try:
        message = msgpack.unpackb(
            payload,
            list_hook=count,
            object_hook=count,
            ext_hook=_refuse_extension,
            max_array_len=length_most,
            max_map_len=length_most,
            max_ext_len=0,
            strict_map_key=True,
        )
    except WireError:
        raise
    except Exception as error:  # msgpack raises many kinds, of no common base
        raise WireError(f"a payload that is not msgpack: {error or type(error).__name__}") from None
    if (
        type(message) is not list
        or len(message) != 2
        or type(message[0]) is not str
        or type(message[1]) is not dict
        or len(message[0]) > TYPE_LENGTH_MOST
        or not all(type(name) is str for name in message[1])
    ):
        raise WireError("a payload that is not [type, fields]")
    return Frame(message[0], Fields(message[1], message[0]))


def _refuse_extension(code: int, data: bytes) -> None:
    raise WireError("a payload with msgpack extensions")


class Peer(NamedTuple):
    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Who is at the other end of a connected Unix socket (as of its connect or listen)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(raw))


def pid_namespace() -> int:
    """The inode number of our pid namespace, whose process ids are ours and those of FUSE requests;
    0: the /proc that we see is not of it, so that it knows them by other numbers.
    """
    try:
        is_of_proc = os.readlink("/proc/self") == str(os.getpid())
        return os.stat("/proc/self/ns/pid").st_ino if is_of_proc else 0
    except OSError:
        return 0


# ---- numbers of the plan channel -----------------------------------------------------------------
# Plain ints: numpy takes a member of an enum for an int64, which widens arrays of bytes and makes a
# comparison up to 18 times as long. The C part has Standing again in native/plan/plan.h (a byte, of
# which no bit is left), and Observed in native/trace/trace.h.


class Place:
    """Where a listed file is, and whose it is (field `stored` of `directory`): bits."""

    STORED: Final = 1
    """On SSD, with all its blocks."""
    OWNED: Final = 2
    """Other hosts of the pool ask this one for it."""


class Result:
    """What became of a file that was to be staged or fetched (`done`)."""

    STAGED: Final = 1
    """Pushed, or a reader was first."""
    STORED: Final = 2
    """On SSD, and not pushed."""
    STAGED_AND_STORED: Final = 3
    ORIGIN_ERROR: Final = 4
    """The origin failed, hung, or is away."""
    GONE: Final = 5
    """No such inode, no regular file, or another file under its name now."""
    NO_ROOM: Final = 6
    """SSD had none for it. What was to be staged was pushed."""
    NOT_PUSHED: Final = 7
    """Worth another try."""
    RECLAIMED: Final = 8
    """The kernel has let go of what was staged, and SSD does not have it. Told unasked."""
    EVICTED: Final = 9
    """After `evict`: SSD does not have it any more."""
    NOT_EVICTED: Final = 10
    """After `evict`: SSD has it still."""
    STORED_FOR_OTHERS: Final = 11
    """On SSD, since another host asked for it. Told unasked."""


class Observed:
    """What was seen of an inode: the bits MASK of a kind in `seen`."""

    MASK: Final = 7
    LOOKUP: Final = 1
    """The look-up of a file that was armed."""
    SSD: Final = 2
    """A READ, answered from SSD."""
    ORIGIN: Final = 3
    """A READ, answered from beyond this host: from the origin, or the pool."""


class Standing:
    """How an inode stands under a plan: bits. A kind in `seen` carries those from WANTED up; in
    the mount's own byte of an inode three more stand below them.
    """

    ARMED: Final = 1
    """Its next look-up is to be reported."""
    READ: Final = 2
    """A READ has come for it while it was QUEUED or FLYING."""
    COMING: Final = 4
    """Its chunk is staged, or its bytes are being read: a READ waits for it."""
    WANTED: Final = 8
    """It is staged, or to be."""
    QUEUED: Final = 16
    FLYING: Final = 32
    """It is being fetched or staged."""
    STAGED: Final = 64
    """Pushed whole, and not dropped since."""
    FAILED: Final = 128


class Wish:
    """How a file is to be staged: bits of `store`."""

    STORE: Final = 1
    """Store it on SSD."""
    MOVE: Final = 2
    """Append it to the log that is open."""
    KEEP_ORDER: Final = 4
    """In the order of the frame, not in that on SSD."""
    SORT: Final = 8
    """Not moved, but one of a chunk."""


class Packing:
    """How it stands with a mount's log (`packing` of a `state`)."""

    NONE: Final = 0
    OPEN: Final = 1
    NO_ROOM: Final = 2
    """Refused: no room on SSD."""
    NO_CREDIT: Final = 4
    """Refused: too little room on SSD to empty even one segment."""
    WRITE_FAILED: Final = 5
    """Open, but for the chunk of which a write has failed."""
    DRAINING: Final = 6
    """Open, as far as there is room."""
