"""What any user of root's mount may know of it: its status, on a socket of its own.

Who connects is sent one line, the JSON of `fusecache status` without SECRET, and is hung up on.
Nothing is read from it: there is nothing to ask for, and nothing to get wrong.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio

from fusecache.base import mounts

log = logging.getLogger(__name__)

CLIENTS_MOST: Final = 16  # at a time; others wait
SEND_TIMEOUT_S: Final = 5.0
PAUSE_S: Final = 0.002  # between two: who asks without end takes little from the mount's readers
KEPT_S: Final = 0.5  # one answer serves all who ask meanwhile
SECRET: Final = (
    ("cache_dir",),
    ("ssd", "directories"),
    ("origin", "last_error"),
    ("pins", "globs"),
    ("layout", "job"),
)
"""They show names that others need not know."""
_BACKLOG: Final = 64

Status = dict[str, Any]


class PublicStatus:
    """Of the mount on `device`, as `status` tells: the control socket's operation of that name."""

    def __init__(self, device: str, status: Callable[[], Awaitable[Status]]) -> None:
        self._path = mounts.status_socket(device)
        self._status = status
        self._there: os.stat_result | None = None  # our socket, once it is there
        self._line, self._told_at = b"", -KEPT_S
        self._telling = trio.Lock()
        self._clients = trio.CapacityLimiter(CLIENTS_MOST)

    async def serve_forever(self) -> None:
        """Until cancelled; at once if the socket cannot be had."""
        try:
            listener, self._there = _listen(self._path)
        except OSError as error:
            log.warning("no status for other users: %s: %s", error.filename, error.strerror)
            return
        bound = trio.socket.from_stdlib_socket(listener)
        async with trio.open_nursery() as nursery:
            while True:
                async with self._clients:  # wait until there is room, then accept
                    pass
                connection, _ = await bound.accept()
                nursery.start_soon(self._tell, trio.SocketStream(connection))
                await trio.sleep(PAUSE_S)

    def remove(self) -> None:
        """The mount is over. Its number, and so the path, may be a newer mount's by now."""
        try:
            if self._there is not None and os.path.samestat(self._there, os.lstat(self._path)):
                os.unlink(self._path)
        except OSError as error:
            log.info("%s: %s", self._path, error.strerror)

    async def _tell(self, stream: trio.SocketStream) -> None:
        async with self._clients, stream:
            try:
                with trio.move_on_after(SEND_TIMEOUT_S):
                    await stream.send_all(await self._told())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            except Exception:
                log.exception("the status for other users failed")

    async def _told(self) -> bytes:
        async with self._telling:
            if trio.current_time() >= self._told_at + KEPT_S:
                answer = {"ok": True, "status": public((await self._status())["status"])}
                self._line, self._told_at = json.dumps(answer).encode() + b"\n", trio.current_time()
        return self._line


def public(status: Status) -> Status:
    """Without SECRET."""
    shown = {key: dict(part) if isinstance(part, dict) else part for key, part in status.items()}
    for *above, name in SECRET:
        part = shown
        for key in above:
            part = part.get(key, {})
        part.pop(name, None)
    return shown


def _listen(path: str) -> tuple[socket.socket, os.stat_result]:
    """And what it is at that path. OSError."""
    directory, name = os.path.split(path)
    with mounts.open_public_directory(directory) as held:
        listener = mounts.listen(held, name, _BACKLOG)
        listener.setblocking(False)
        os.chmod(os.path.join(held, name), 0o666)
        return listener, os.lstat(os.path.join(held, name))
