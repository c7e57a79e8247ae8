"""keeper.sock: one request of one line a connection, answered at once or later."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from fusecache.base import mounts, trust
from fusecache.keeper.mounting import Json

REQUEST_BYTES_MAX = 1 << 20
REQUEST_TIMEOUT_S = 2.0
CLIENTS_MAX = 32

Operation = Callable[[Json, socket.socket], Json | None]  # None: whoever took it answers later


@dataclass(slots=True)
class Client:
    """A connection: bytes so far, and when to give up on it."""

    connection: socket.socket
    deadline: float
    received: bytes = b""


def reply(connection: socket.socket, answer: Json) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        connection.sendall(json.dumps(answer).encode() + b"\n")


class Requests:
    """Those that are being made, and those that are answered when the mount is gone."""

    def __init__(self, operations: dict[str, Operation]) -> None:
        self._operations = operations
        self._listener: socket.socket | None = None
        self._clients: dict[int, Client] = {}
        self._farewells: list[socket.socket] = []

    def listen(self, listener: socket.socket | None) -> None:
        """Of one that does not block."""
        self._listener = listener

    @property
    def has_clients(self) -> bool:
        return bool(self._clients)

    def register(self, poll: select.poll) -> None:
        """What there is to wait for."""
        if self._listener is not None and len(self._clients) < CLIENTS_MAX:
            poll.register(self._listener, select.POLLIN)
        for fd in self._clients:
            poll.register(fd, select.POLLIN)

    def look(self) -> None:
        """Take and serve what has come."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._listener is not None and len(self._clients) < CLIENTS_MAX:
                connection, _ = self._listener.accept()
                if not trust.is_ours(mounts.peer_uid(connection)):
                    connection.close()
                    continue
                connection.setblocking(False)
                deadline = time.monotonic() + REQUEST_TIMEOUT_S
                self._clients[connection.fileno()] = Client(connection, deadline)
        for fd, client in list(self._clients.items()):
            try:
                data = client.connection.recv(65536)
            except BlockingIOError:
                if time.monotonic() > client.deadline:
                    self._drop(fd)
                continue
            except OSError:
                data = b""
            client.received += data
            if b"\n" in client.received:
                del self._clients[fd]
                self._serve(client)
            elif not data or len(client.received) > REQUEST_BYTES_MAX:
                self._drop(fd)

    def _drop(self, fd: int) -> None:
        self._clients.pop(fd).connection.close()

    def _serve(self, client: Client) -> None:
        connection = client.connection
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            request = json.loads(client.received.split(b"\n")[0])
            name = request["op"]
            operation = self._operations.get(name)
            if operation is not None:
                answer = operation(request, connection)
            else:
                answer = {"ok": False, "error": f"unknown request {name!r}", "exit": 2}
        except (ValueError, KeyError, TypeError) as error:
            answer = {"ok": False, "error": f"bad request: {error!r}", "exit": 2}
        if answer is not None:
            reply(connection, answer)

    def answer_at_the_end(self, connection: socket.socket) -> None:
        self._farewells.append(connection)

    def end(self) -> None:
        """No more of them."""
        if self._listener is not None:
            self._listener.close()
        for client in self._clients.values():
            client.connection.close()

    def say_farewell(self) -> None:
        """The mount is gone, with all that belongs to it."""
        for connection in self._farewells:
            reply(connection, {"ok": True})
