"""The connection of a job's thread to hintsd: frames, and the pipe that wakes who waits for one.

INVARIANT: `wake` and `stop` may be called by any thread, and never wait; all else is the thread's.
Once `stop` was called nothing waits, but for what `is_last`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Final, NoReturn

from fusecache.base import mounts, wire
from hintsd.client.finding import Unhinted

ANSWER_TIMEOUT_S: Final = 10.0
RECEIVE_BYTES: Final = 1 << 16
WAKES_AT_ONCE_MOST: Final = 4096
TEXT_BYTES_MOST: Final = 1 << 20


class Stopped(Exception):
    """`stop` was called while the thread waited, or hintsd has ended the job."""


class Connection:
    """One at a time."""

    def __init__(self, on_warning: Callable[[str], None]) -> None:
        """`on_warning(line)`: hintsd warns."""
        self._on_warning = on_warning
        self.is_stopping = False
        self.known: frozenset[str] = frozenset()
        """Of what came later than version 1, what this hintsd knows; empty: there is none."""
        self._socket: socket.socket | None = None
        self._decoder = wire.Decoder()
        self._frames: list[wire.Frame] = []
        self._wake_fds: tuple[int, ...] = ()  # of a pipe: to poll, and to write to

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the interpreter's end there may be no `os` any more.
        for fd in self._wake_fds:
            close(fd)

    def prepare(self) -> None:
        """Once, before all else. OSError: there is no descriptor to be had."""
        self._wake_fds = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def wake(self) -> None:
        """Who waits looks at what there is to do."""
        # The pipe lives as long as the object, so it cannot be another file by now. A full one has
        # woken the thread already.
        if self._wake_fds:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_fds[1], b"w")

    def stop(self) -> None:
        """Who waits ends: Stopped."""
        self.is_stopping = True
        self.wake()

    def leave(self) -> None:
        """In a forked child: the connection is the parent's."""
        for fd in self._wake_fds:
            os.close(fd)
        self._wake_fds = ()
        self.disconnect()

    # Everything below runs in the thread.

    @property
    def is_up(self) -> bool:
        return self._socket is not None

    def connect(self, address: str, timeout_s: float) -> None:
        """To the socket at this path. OSError; Stopped; Unhinted: we are not served."""
        self._decoder = wire.Decoder()
        self._frames.clear()
        directory, name = os.path.split(address)
        self._socket = mounts.connect(directory, name, timeout_s)
        self._socket.setblocking(False)
        self.send(wire.encode("hello", {"version": wire.VERSION}))
        welcome = self.expect("welcome", ANSWER_TIMEOUT_S)
        told = welcome.fields.raw()
        self.known = frozenset(name for name, value in told.items() if value is True)

    def disconnect(self) -> None:
        self.known = frozenset()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def send(self, data: bytes, *, is_last: bool = False) -> None:
        """OSError: it cannot be sent."""
        assert self._socket is not None
        rest = memoryview(data)
        end_s = time.monotonic() + ANSWER_TIMEOUT_S
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
                end_s = time.monotonic() + ANSWER_TIMEOUT_S
            except BlockingIOError:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("hintsd takes nothing") from None
                self._wait(select.POLLOUT, left_s)
                if self.is_stopping and not is_last:
                    self.disconnect()  # half a frame is out, `close` would not be understood
                    raise Stopped from None

    def expect(
        self, kind: str, timeout_s: float | None, other: str = "", *, is_last: bool = False
    ) -> wire.Frame:
        """The next frame of `kind` or `other`. TimeoutError: it did not come."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.type in (kind, other):
                    return frame
                if frame.type == "error":
                    fail(frame)
                if frame.type == "warning":
                    self._on_warning(said(frame))
                elif not is_last:  # else: answers to what was said before
                    raise wire.WireError(f"{frame.type} instead of {kind}")
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(f"no {kind} within {timeout_s:g} s")
            if self._wait(select.POLLIN, left_s):
                self._frames += self._received()
            if self.is_stopping and not is_last:
                raise Stopped

    def hear(self, timeout_s: float | None) -> list[wire.Frame]:
        """What hintsd says of its own accord; [] when the time is up, or somebody called `wake`."""
        if not self._frames and not self._wait(select.POLLIN, timeout_s):
            return []
        return self._received()

    def hear_last_words(self) -> None:
        """Unhinted: hintsd said `error`, and closed the connection while we were sending."""
        with contextlib.suppress(OSError):
            if self._socket is not None and self._wait(select.POLLIN, 0):
                self._frames = self._received()
        for frame in self._frames:
            if frame.type == "error":
                fail(frame)

    def pause(self, pause_s: float) -> None:
        """Stopped."""
        end_s = time.monotonic() + pause_s
        while not self.is_stopping and (left_s := end_s - time.monotonic()) > 0:
            self._wait(0, left_s)
        if self.is_stopping:
            raise Stopped

    def _received(self) -> list[wire.Frame]:
        assert self._socket is not None
        frames, self._frames = self._frames, []
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return frames
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "hintsd closed the connection")
        return frames + self._decoder.feed(data)

    def _wait(self, events: int, timeout_s: float | None) -> bool:
        """Until the socket is ready, somebody called `wake`, or the time is up: is it ready?"""
        poll = select.poll()  # not select(): a trainer may have more than 1024 files open
        wake_fd = self._wake_fds[0]
        poll.register(wake_fd, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, events)
        ready = dict(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
        if ready.pop(wake_fd, 0):
            os.read(wake_fd, WAKES_AT_ONCE_MOST)
        return bool(ready)


def said(frame: wire.Frame) -> str:
    """The line that a frame brings."""
    return frame.fields.str("message", TEXT_BYTES_MOST)


def fail(frame: wire.Frame) -> NoReturn:
    raise Unhinted(f"refused, going on without hints: {said(frame)}")
