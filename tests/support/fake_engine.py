"""A server of a pool that answers as a test says: a thread for each connection, real sockets."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import xxhash

from tests.support import PATIENCE_S

Command = list[bytes]
Reply = Callable[[socket.socket, Command], None]
"""Sends what there is to send. An OSError closes the connection."""

LEASE = b"FCL1" + b"another!"
NOTHING = b"$-1\r\n"


def key_of(path: bytes, version: tuple[int, int, int, int], block: int) -> bytes:
    """As docs/POOL.md has it."""
    head = struct.pack("<4sIQqq", b"FCP1", block, *version[1:])
    return hashlib.sha256(head + path).digest()[:16]


def pack_block(key: bytes, data: bytes) -> bytes:
    """A block's value: docs/POOL.md."""
    checksum = xxhash.xxh3_64_intdigest(data, seed=int.from_bytes(key[:8], "little"))
    return struct.pack("<4sIQ16s", b"FCB1", len(data), checksum, key) + data


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def say(*pieces: bytes) -> Reply:
    def reply(connection: socket.socket, _: Command) -> None:
        for piece in pieces:
            connection.sendall(piece)

    return reply


def then(data: bytes, after: Reply) -> Reply:
    def reply(connection: socket.socket, command: Command) -> None:
        connection.sendall(data)
        after(connection, command)

    return reply


def say_and_close(data: bytes) -> Reply:
    def reply(connection: socket.socket, _: Command) -> None:
        connection.sendall(data)
        raise ConnectionAbortedError

    return reply


_ports: set[int] = set()


def listen(backlog: int) -> socket.socket:
    """At a port that no server of this process had: the C client remembers how that one was."""
    while True:
        made = socket.create_server(("127.0.0.1", 0), backlog=backlog)
        port = made.getsockname()[1]
        if port not in _ports:
            _ports.add(port)
            return made
        made.close()


class FakeEngine:
    """A context. `replies` are for the next commands; when there are none, `otherwise`."""

    def __init__(self) -> None:
        self._listening = listen(64)
        self.port = str(self._listening.getsockname()[1])
        self.commands: list[Command] = []
        self.connections = 0
        self.replies: deque[Reply] = deque()
        self.otherwise: Reply = say(NOTHING)
        self.closed = threading.Semaphore(0)  # released for each connection that has ended
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._is_over = threading.Event()

    def __enter__(self) -> FakeEngine:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.be_gone()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def be_gone(self) -> None:
        """Who connects is refused, and who is connected hears the end."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._threads[0].join(PATIENCE_S)  # from now on nobody is let in
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def wait_closed(self) -> None:
        assert self.closed.acquire(timeout=PATIENCE_S), "the client has not closed it"

    def keep_silent(self, *_: Any) -> None:
        """A reply: none, until the test ends."""
        assert self._is_over.wait(PATIENCE_S)
        raise ConnectionAbortedError

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            self._open.add(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError), connection.makefile("rb") as file:
                while (command := _command(file)) is not None:
                    self.commands.append(command)
                    reply = self.replies.popleft() if self.replies else self.otherwise
                    reply(connection, command)
        finally:
            self._open.discard(connection)
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            self.closed.release()


def _command(file: Any) -> Command | None:
    """None: the connection has ended."""
    line = file.readline()
    if not line.endswith(b"\r\n"):
        return None
    assert line[:1] == b"*", line
    words = []
    for _ in range(int(line[1:])):
        line = file.readline()
        if not line.endswith(b"\r\n"):
            return None
        assert line[:1] == b"$", line
        value = file.read(int(line[1:]) + 2)
        if not value.endswith(b"\r\n"):
            return None
        words.append(value[:-2])
    return words
