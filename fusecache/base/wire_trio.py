"""Frames over a trio stream: bounded in time in both directions, and in memory.

Of what was received a frame and RECEIVE_BYTES are held at most, and one frame is decoded at a time.
"""

from __future__ import annotations

from typing import Any

import trio

from fusecache.base.wire import (
    FRAME_BYTES_MOST,
    FRAME_TIMEOUT_S,
    Decoder,
    Frame,
    WireError,
    encode,
)

RECEIVE_BYTES = 256 << 10
SEND_PIECE_BYTES = 64 << 10  # a send has made progress when a piece is gone


class FrameStream:
    """One connection. One task receives; any number send, whole frames one after the other."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        received: bytes = b"",
        frame_bytes_most: int = FRAME_BYTES_MOST,
    ) -> None:
        """`received`: what was read from the stream before."""
        self._stream = stream
        self._decoder = Decoder(frame_bytes_most)
        self._decoder.add(received)
        self._sending = trio.Lock()

    @property
    def has_frames(self) -> bool:
        """`receive` has a frame without reading."""
        return self._decoder.has_frame

    async def send(self, type_: str, /, **fields: Any) -> None:
        """WireError: the peer does not read. BrokenResourceError, ClosedResourceError: it is gone,
        or we have closed.
        """
        data = memoryview(encode(type_, fields))
        if self._sending.locked():
            await self._sending.acquire()
        else:  # no turn of others before the first try: none can use the caller's time up
            self._sending.acquire_nowait()
        try:
            for start in range(0, len(data), SEND_PIECE_BYTES):
                with trio.move_on_after(FRAME_TIMEOUT_S) as scope:
                    await self._stream.send_all(data[start : start + SEND_PIECE_BYTES])
                if scope.cancelled_caught:
                    await trio.aclose_forcefully(self._stream)  # it is in the middle of a frame
                    raise WireError("the peer does not read")
        finally:
            self._sending.release()

    async def receive(self) -> Frame | None:
        """The next frame; None: the connection has ended.

        WireError: not a frame, or it was not complete FRAME_TIMEOUT_S after its first byte.
        """
        if (frame := self._decoder.next()) is not None:
            await trio.lowlevel.checkpoint()
            return frame
        deadline_s = trio.current_time() + FRAME_TIMEOUT_S
        while True:
            is_inside = self._decoder.is_inside_frame
            try:
                with trio.CancelScope() as scope:
                    if is_inside:
                        scope.deadline = deadline_s
                    data = await self._stream.receive_some(RECEIVE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return None
            if scope.cancelled_caught:
                raise WireError("a frame was begun and not completed")
            if not data:
                if is_inside:
                    raise WireError("the connection ended inside a frame")
                return None
            if not is_inside:
                deadline_s = trio.current_time() + FRAME_TIMEOUT_S
            self._decoder.add(data)
            if (frame := self._decoder.next()) is not None:
                return frame

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)
