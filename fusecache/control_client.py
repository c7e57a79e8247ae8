"""The command line's end of the conversations with keeper and server: JSON lines on Unix sockets.

Finds a mount by path (`mounts.find`, which never touches the mount), connects, asks, and yields
the replies. A server that restarts meanwhile costs a pause: the control socket belongs to the
keeper, so a new connection waits there for the next server.

It prints nothing; errors are UserError with the exit code of the command.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusecache import mounts
from fusecache.errors import EXIT_FAILED, EXIT_NOT_A_MOUNT, UserError

ANSWER_TIMEOUT_S = 30.0  # silence of a server, or of a keeper that umounts
RESTART_TIMEOUT_S = 900.0
RECONNECTS_MAX = 20
RECONNECT_PAUSE_S = 0.1
LINE_BYTES_MAX = 64 << 20

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Target:
    """A fusecache mount and its runtime directory (None: there is none, or it is not ours)."""

    mount: mounts.Mount
    directory: str | None

    @property
    def mountpoint(self) -> str:
        return self.mount.mountpoint


def find(path: str) -> Target:
    """UserError (EXIT_NOT_A_MOUNT) when `path` is on no fusecache."""
    mount = mounts.find(path)
    if mount is None:
        where = "is not on a fusecache mount" if os.path.lexists(path) else "does not exist"
        raise UserError(f"{path} {where}; all mounts: fusecache list", EXIT_NOT_A_MOUNT)
    return Target(mount, mounts.runtime_directory(mount))


def find_all() -> list[Target]:
    return [Target(m, mounts.runtime_directory(m)) for m in mounts.mounts() if m.is_fusecache]


def directory_of(target: Target) -> str:
    """Its runtime directory. UserError: it is another user's, or there is none any more."""
    if target.directory is not None:
        return target.directory
    if target.mount.uid != os.getuid() and os.getuid() != 0:
        raise UserError(f"{target.mountpoint} belongs to another user (uid {target.mount.uid})")
    raise UserError(
        f"{target.mountpoint}: its keeper is gone; fusecache umount it, then mount again"
    )


class _HangUpError(Exception):
    """The other end closed the connection before its last line."""


def _lines(connection: socket.socket) -> Iterator[Message]:
    received = b""
    while True:
        line, newline, rest = received.partition(b"\n")
        if newline:
            received = rest
            yield json.loads(line)
            continue
        data = connection.recv(1 << 16)
        if not data or len(received) > LINE_BYTES_MAX:
            raise _HangUpError
        received += data


def converse(
    target: Target, request: Message, timeout_s: float = ANSWER_TIMEOUT_S
) -> Iterator[Message]:
    """Ask the server; yields its "progress" messages, then the one with "ok".

    When the server dies meanwhile the request is made again to the next one: what the first did is
    in the cache, so nothing is done twice. UserError: refused, silent, or nobody there.
    """
    directory = directory_of(target)
    for attempt in range(RECONNECTS_MAX):
        if attempt:
            time.sleep(RECONNECT_PAUSE_S)
        try:
            with mounts.connect(directory, mounts.CONTROL_SOCKET, timeout_s) as connection:
                connection.sendall(json.dumps(request).encode() + b"\n")
                for message in _lines(connection):
                    if "ok" in message:
                        yield _accepted(message)
                        return
                    yield message
        except TimeoutError:
            log = mounts.keeper_record(directory).get("log")
            raise UserError(
                f"{target.mountpoint}: the server does not answer (log: {log or 'its stderr'})"
            ) from None
        except (_HangUpError, ConnectionError):
            continue  # the server died or restarts; its keeper's socket takes the next connection
        except PermissionError:
            raise UserError(f"{target.mountpoint} belongs to another user") from None
        except FileNotFoundError:
            break
    raise UserError(f"{target.mountpoint}: neither server nor keeper answers")


def ask(target: Target, request: Message) -> Message:
    """The server's last line, without its progress."""
    *_, last = converse(target, request)
    return last


def ask_keeper(target: Target, request: Message, timeout_s: float = ANSWER_TIMEOUT_S) -> Message:
    """The keeper's answer, refusals included. ConnectionError: the keeper is gone."""
    directory = directory_of(target)
    try:
        with mounts.connect(directory, mounts.KEEPER_SOCKET, timeout_s) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            return next(_lines(connection))
    except TimeoutError:
        raise UserError(f"{target.mountpoint}: the keeper does not answer") from None
    except (_HangUpError, FileNotFoundError, ConnectionError):
        raise ConnectionError(f"{target.mountpoint}: its keeper is gone") from None
    except PermissionError:
        raise UserError(f"{target.mountpoint} belongs to another user") from None


def _accepted(message: Message) -> Message:
    if not message.get("ok"):
        raise UserError(str(message.get("error", "failed")), int(message.get("exit", EXIT_FAILED)))
    return message
