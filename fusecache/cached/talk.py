"""What the cache service and mounts say to each other (docs/CACHED.md, The socket): frames, bytes
behind them, and descriptors. Blocking sockets; each side has a thread a connection.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from fusecache.base.wire import Decoder, Fields, Frame, WireError, encode
from fusecache.store.types import Location

NAME_BYTES: Final = 32
"""Of a digest, and of a group's name."""
FRAME_BYTES_MOST: Final = 1 << 20
FINDS_MOST: Final = 128
PUTS_MOST: Final = 128
SEGMENTS_FROM: Final = 1 << 31
"""Numbers of the service's segments are above it; those of a mount's own cache below."""

_LENGTH: Final = struct.Struct("<I")
_COUNT: Final = struct.Struct("i")
_PLACE: Final = struct.Struct("<IQII")


def is_of_service(segno: int) -> bool:
    """Whether the number is one of its segments, and of none of a mount's own."""
    return segno > SEGMENTS_FROM


class Found(NamedTuple):
    """What the service says of a digest."""

    at: Location | None
    is_promised: bool = False
    """Another mount reads it at the origin now."""


def pack_found(found: Iterable[Found]) -> bytes:
    packed = bytearray()
    for at, is_promised in found:
        segno, offset, header_len, _ = at or (0, 0, 0, 0)
        packed += _PLACE.pack(segno, offset, header_len, is_promised)
    return bytes(packed)


def unpack_found(packed: bytes, lengths: Sequence[int]) -> list[Found]:
    """Of as many digests as lengths. WireError."""
    if len(packed) != _PLACE.size * len(lengths):
        raise WireError("found: not one place for each digest")
    rows = zip(_PLACE.iter_unpack(packed), lengths, strict=True)
    found = []
    for (segno, offset, header_len, what), length in rows:
        at = Location(segno, offset, header_len, length) if segno else None
        if at is not None and not is_of_service(segno):
            raise WireError("found: a segment that is none of the service's")
        found.append(Found(at, at is None and what == 1))
    return found


class Channel:
    """One connection. OSError (TimeoutError among them), WireError: it is of no more use."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        """`timeout_s`: a frame, or the bytes behind it, take no longer once they have begun."""
        self._socket = connection
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._socket.close()

    def wait_at_most(self, seconds: float) -> None:
        """From now on."""
        self._timeout_s = seconds

    def shut_down(self) -> None:
        """Whoever uses it finds that it has ended. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def unread_bytes(self) -> int:
        """What was sent and not received yet."""
        (count,) = _COUNT.unpack(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_COUNT.size)))
        return int(count)

    def send(
        self, type_: str, data: bytes | memoryview = b"", *, descriptor: int = -1, **fields: Any
    ) -> None:
        """A frame, and `data` behind it; the frame carries the descriptor."""
        frame = encode(type_, fields)
        self._socket.settimeout(self._timeout_s)
        if descriptor >= 0:
            sent = socket.send_fds(self._socket, [frame], [descriptor])
            frame = frame[sent:]
        elif len(data) < 1 << 16:
            frame, data = frame + data, b""
        self._socket.sendall(frame)
        if data:
            self._socket.sendall(data)

    def send_bytes(self, data: memoryview) -> None:
        """More of them, behind a frame that says how many."""
        self._socket.settimeout(self._timeout_s)
        self._socket.sendall(data)

    def receive(self, *, waits: bool = False) -> tuple[Frame, int] | None:
        """The next frame, with the descriptor that came with it, the caller's (-1: none). None: the
        connection has ended. `waits`: for its first byte as long as it takes.
        """
        self._socket.settimeout(None if waits else self._timeout_s)
        # recv_fds() of the library leaves its flags out.
        head, ancillary, flags, _ = self._socket.recvmsg(
            _LENGTH.size, socket.CMSG_LEN(_COUNT.size), socket.MSG_CMSG_CLOEXEC
        )
        descriptor = -1
        for level, kind, packed in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                (descriptor,) = _COUNT.unpack(packed[: _COUNT.size])
        try:
            if flags & socket.MSG_CTRUNC:
                raise WireError("more than one descriptor")
            if not head:
                return None
            deadline_s = time.monotonic() + self._timeout_s
            head += self._rest(_LENGTH.size - len(head), deadline_s)
            (length,) = _LENGTH.unpack(head)
            if not 0 < length <= FRAME_BYTES_MOST:
                raise WireError(f"a frame of {length} bytes is not allowed")
            frames = Decoder().feed(head + self._rest(length, deadline_s))
            given, descriptor = descriptor, -1
            return frames[0], given
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def bytes(self, length: int) -> bytearray:
        """So many, behind a frame."""
        return self._rest(length, time.monotonic() + self._timeout_s)

    def _rest(self, length: int, deadline_s: float) -> bytearray:
        data = bytearray(length)
        view, at = memoryview(data), 0
        while at < length:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("a frame was begun and not completed")
            self._socket.settimeout(left_s)
            got = self._socket.recv_into(view[at:])
            if not got:
                raise WireError("the connection ended inside a frame")
            at += got
        return data


def names_of(fields: Fields, most: int = FINDS_MOST) -> list[bytes]:
    """The digests of a request. WireError."""
    packed = fields.bytes("digests", most * NAME_BYTES)
    if not packed or len(packed) % NAME_BYTES:
        raise WireError("digests: not one or more of 32 bytes")
    return [packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES)]
