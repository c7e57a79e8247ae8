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
import os
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import trio

log = logging.getLogger(__name__)

LINE_BYTES_MOST = 1 << 20
CLIENTS_MOST = 32
REQUEST_TIMEOUT_S = 10.0
PROGRESS_INTERVAL_S = 0.2

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Operation = Callable[[Message, Send], Awaitable[Message]]
Takeover = Callable[[Message, Send, trio.SocketStream], Awaitable[None]]


class RequestError(Exception):
    """The client asked for something that cannot be done; one line."""


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
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            except Exception:
                log.exception("control request failed")

    async def _answer(self, stream: trio.SocketStream) -> None:
        async def send(message: Message) -> None:
            await stream.send_all(json.dumps(message).encode() + b"\n")

        if not _is_allowed(stream.socket):
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
                except RequestError as error:
                    reply = {"ok": False, "error": str(error), "exit": 1}
                except OSError as error:
                    log.exception("%s failed", request["op"])
                    reply = {"ok": False, "error": f"{request['op']}: {error}", "exit": 1}
                await send(reply)
            nursery.cancel_scope.cancel()


def _is_allowed(connection: trio.socket.SocketType) -> bool:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (0, os.geteuid())


def glob_matcher(globs: list[str]) -> Callable[[bytes], bool]:
    """True for paths (relative to the mount point) that a glob names, or that lie below one it
    names.

    `*` and `?` do not cross `/`, `**` does, `[...]` is a set of characters; no globs: every path.
    """
    if not globs:
        return lambda path: True
    patterns = [re.compile(_glob_to_regex(os.fsencode(glob.strip("/"))) + rb"(?:/.*)?", re.DOTALL)
                for glob in globs]  # fmt: skip
    return lambda path: any(pattern.fullmatch(path) for pattern in patterns)


def _glob_to_regex(glob: bytes) -> bytes:
    result, index = b"", 0
    while index < len(glob):
        rest = glob[index:]
        if rest.startswith(b"**/"):
            result, index = result + b"(?:.*/)?", index + 3
        elif rest.startswith(b"**"):
            result, index = result + b".*", index + 2
        elif rest.startswith(b"*"):
            result, index = result + b"[^/]*", index + 1
        elif rest.startswith(b"?"):
            result, index = result + b"[^/]", index + 1
        elif rest.startswith(b"[") and (end := rest.find(b"]", 2)) > 0:
            body = rest[1:end]
            body = b"^" + body[1:] if body.startswith(b"!") else body
            result, index = result + b"[" + body.replace(b"\\", b"\\\\") + b"]", index + end + 1
        else:
            result, index = result + re.escape(rest[:1]), index + 1
    return result
