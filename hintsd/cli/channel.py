"""The conversation of a command with the daemon."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from fusecache.base import command, mounts
from fusecache.base.errors import UserError

if TYPE_CHECKING:
    from fusecache.base.wire import Frame

CONNECT_TIMEOUT_S: Final = 5.0
ANSWER_TIMEOUT_S: Final = 10.0
RESTART_TIMEOUT_S: Final = 10.0
RECONNECT_INTERVAL_S: Final = 0.1
RECEIVE_BYTES: Final = 1 << 18


class Unreachable(UserError):
    """No daemon listens."""


def complain(line: str) -> None:
    """To the user, on stderr."""
    command.complain("hintsd", line)


class Channel:
    """One conversation with the daemon, one question at a time. ConnectionError: it is gone."""

    def __init__(self, socket_path: str) -> None:
        from fusecache.base import wire

        self._wire = wire
        self._decoder = wire.Decoder()
        self._frames: list[Frame] = []
        directory, name = os.path.split(os.path.abspath(socket_path))
        try:
            self._socket = mounts.connect(directory, name, CONNECT_TIMEOUT_S)
        except OSError as error:
            raise Unreachable(
                f"no hintsd answers at {socket_path} ({error.strerror or error}); "
                "start one: hintsd serve"
            ) from None
        welcome = self.ask("hello", {"version": wire.VERSION})
        self.takes_scores = welcome.get("scores") is True
        """A hintsd that is older does not."""

    def ask(
        self, kind: str, fields: dict[str, Any], timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> dict[str, Any]:
        """The fields of the answer. UserError: the daemon refuses."""
        return self.say([self._wire.encode(kind, fields)], timeout_s)

    def say(
        self, frames: Iterable[bytes], timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> dict[str, Any]:
        """The fields of the answer to the last of these. UserError: the daemon refuses."""
        self._socket.settimeout(timeout_s)
        # What it said before it hung up is still to be read.
        with contextlib.suppress(BrokenPipeError):
            for frame in frames:
                self._socket.sendall(frame)
        while True:
            answer = self._receive()
            if answer.type in ("error", "rejected"):
                raise UserError(str(answer.fields.raw().get("message")))
            if answer.type != "warning":
                return answer.fields.raw()
            complain(str(answer.fields.raw().get("message")))

    def _receive(self) -> Frame:
        while not self._frames:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError:
                raise UserError("hintsd does not answer in time; see its log") from None
            if not data:
                raise ConnectionResetError("hintsd closed the connection")
            try:
                self._frames += self._decoder.feed(data)
            except self._wire.WireError as error:
                raise UserError(f"what answers is no hintsd: {error}") from None
        return self._frames.pop(0)

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def open_channel(socket_path: str) -> Iterator[Channel]:
    """With the daemon that listens there. Unreachable."""
    with contextlib.closing(Channel(socket_path)) as channel:
        yield channel


@contextlib.contextmanager
def channel_again(socket_path: str) -> Iterator[Channel]:
    """The same with the next daemon, which may take a while to come."""
    end_s = time.monotonic() + RESTART_TIMEOUT_S
    while True:
        try:
            channel = Channel(socket_path)
            break
        except (Unreachable, ConnectionError):
            if time.monotonic() > end_s:
                raise
            time.sleep(RECONNECT_INTERVAL_S)
    with contextlib.closing(channel):
        yield channel
