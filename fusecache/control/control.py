"""The server's end of the conversation with the command line: JSON lines on a Unix socket.

A request is one line {"op": ...}; the reply is any number of {"progress": {...}} lines and one last
line with "ok". Only the user that runs the server, and root, may ask. A client that hangs up ends
its operation. The socket was opened by the keeper and is handed from server to server, so clients
queue during a restart.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, cast

import trio

from fusecache.base import mounts, trust
from fusecache.base.errors import UserError

log = logging.getLogger(__name__)

LINE_BYTES_MOST = 1 << 20
CLIENTS_MOST = 32
REQUEST_TIMEOUT_S = 10.0
PROGRESS_INTERVAL_S = 0.2

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Operation = Callable[[Message, Send], Awaitable[Message]]
Takeover = Callable[[Message, Send, trio.SocketStream], Awaitable[None]]


class RequestError(UserError):
    """The client asked for something that cannot be done."""


class ControlServer:
    """Serves `operations` (name -> coroutine function(request, send progress) -> result fields),
    and `takeovers`: these answer, too, and then use the connection as they like until they return.
    """

    def __init__(
        self,
        fd: int,
        operations: dict[str, Operation],
        takeovers: dict[str, Takeover] | None = None,
    ) -> None:
        self._operations = operations
        self._takeovers = takeovers or {}
        self._socket = trio.socket.from_stdlib_socket(socket.socket(fileno=fd))
        self._clients = trio.CapacityLimiter(CLIENTS_MOST)

    async def serve_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                async with self._clients:  # wait until there is room, then accept
                    pass
                connection, _ = await self._socket.accept()
                nursery.start_soon(self._serve, trio.SocketStream(connection))

    async def _serve(self, stream: trio.SocketStream) -> None:
        async with self._clients, stream:
            try:
                await self._answer(stream)
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass  # the client is gone; in a nursery of the operation, perhaps
            except* Exception:
                log.exception("control request failed")

    async def _answer(self, stream: trio.SocketStream) -> None:
        async def send(message: Message) -> None:
            await stream.send_all(json.dumps(message).encode() + b"\n")

        if not trust.is_ours(mounts.peer_uid(cast(socket.socket, stream.socket))):
            await send({"ok": False, "error": "permission denied: not your mount", "exit": 1})
            return
        line = b""
        with trio.move_on_after(REQUEST_TIMEOUT_S):
            while not line.endswith(b"\n") and len(line) < LINE_BYTES_MOST:
                piece = await stream.receive_some(65536)
                if not piece:
                    return
                line += piece
        try:
            request = json.loads(line)
            takeover = self._takeovers.get(request["op"])
            operation = self._operations[request["op"]] if takeover is None else None
        except (ValueError, KeyError, TypeError):
            await send({"ok": False, "error": "not a request this server knows", "exit": 1})
            return
        if operation is None:
            assert takeover is not None
            await takeover(request, send, stream)
            return
        async with trio.open_nursery() as nursery:

            async def end_when_client_hangs_up() -> None:
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    while await stream.receive_some(1024):
                        pass
                nursery.cancel_scope.cancel()

            nursery.start_soon(end_when_client_hangs_up)
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                try:
                    reply = {"ok": True, **await operation(request, send)}
                except UserError as error:
                    reply = {"ok": False, "error": str(error), "exit": error.exit_code}
                except OSError as error:
                    log.exception("%s failed", request["op"])
                    reply = {"ok": False, "error": f"{request['op']}: {error}", "exit": 1}
                await send(reply)
            nursery.cancel_scope.cancel()
