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

from fusecache.base import mounts, processes
from fusecache.base.errors import EXIT_FAILED, EXIT_NOT_A_MOUNT, UserError

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
        f"{target.mountpoint}: its keeper is gone, or hidden from you; "
        "fusecache umount it, then mount again"
    )


class KeeperStoppedError(UserError):
    """The keeper is stopped (SIGSTOP, Ctrl-Z): it will answer when it is told to go on."""


def stopped(target: Target, *names: str) -> list[int]:
    """Of keeper and server ("keeper_pid", "server_pid"), the processes that are stopped."""
    record = mounts.keeper_record(target.directory) if target.directory else {}
    pids = [record.get(name) for name in names or ("keeper_pid",)]
    return [pid for pid in pids if isinstance(pid, int) and processes.state(pid) == "T"]


def _check_runs(target: Target) -> None:
    """KeeperStoppedError. To be called when something listens: its process id is its own then."""
    if pids := stopped(target):
        raise KeeperStoppedError(
            f"{target.mountpoint}: its keeper (process {pids[0]}) is stopped; "
            f"kill -CONT {pids[0]} lets it go on"
        )


class _HangUpError(Exception):
    """The other end closed the connection before its last line."""


def is_kept(target: Target) -> bool:
    """Whether a keeper or a server of the mount lives, as far as its sockets tell."""
    for name in (mounts.KEEPER_SOCKET, mounts.CONTROL_SOCKET) if target.directory else ():
        try:
            _connect(target, name, ANSWER_TIMEOUT_S).close()
        except (ConnectionRefusedError, FileNotFoundError):
            continue
        except OSError:
            pass  # it listens, and is busy
        return True
    return False


def _connect(target: Target, name: str, timeout_s: float) -> socket.socket:
    return mounts.connect(directory_of(target), name, timeout_s, target.mount)


def _lines(connection: socket.socket) -> Iterator[Message]:
    received = b""
    while True:
        line, newline, rest = received.partition(b"\n")
        if newline:
            received = rest
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                raise UserError("the answer is none that fusecache gives")
            yield message
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
    in the cache, so nothing is done twice. UserError: refused, silent, or not there.
    """
    directory = directory_of(target)
    for attempt in range(RECONNECTS_MAX):
        if attempt:
            time.sleep(RECONNECT_PAUSE_S)
        try:
            with _connect(target, mounts.CONTROL_SOCKET, timeout_s) as connection:
                if stopped(target, "server_pid"):
                    _check_runs(target)  # it is who would replace that
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
    what = "; mount it again (fusecache mount), or fusecache umount" if is_gone(target) else ""
    raise UserError(f"{target.mountpoint}: neither server nor keeper answers{what}")


def ask(target: Target, request: Message, timeout_s: float = ANSWER_TIMEOUT_S) -> Message:
    """The server's last line, without its progress."""
    *_, last = converse(target, request, timeout_s)
    return last


def status(target: Target, timeout_s: float = ANSWER_TIMEOUT_S) -> Message:
    """What the server says of the mount; to another user than root of root's mount, what is public.

    UserError.
    """
    if target.mount.uid != 0 or os.getuid() == 0:
        return dict(ask(target, {"op": "status"}, timeout_s)["status"])
    directory, name = os.path.split(mounts.status_socket(target.mount.device))
    for attempt in range(RECONNECTS_MAX):
        if attempt:
            time.sleep(RECONNECT_PAUSE_S)
        try:
            with mounts.connect(directory, name, timeout_s, target.mount) as connection:
                return dict(_accepted(next(_lines(connection)))["status"])
        except TimeoutError:
            break
        except (_HangUpError, ConnectionError, BlockingIOError):
            continue  # the server died or restarts, or too many ask
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            raise UserError(
                f"{target.mountpoint} is root's, and shows its status to nobody else "
                "(fusecache mount --allow-other)"
            ) from None
    raise UserError(f"{target.mountpoint} is root's, and its server does not answer")


def is_gone(target: Target) -> bool:
    """Whether the keeper is. By its socket: processes may be out of our sight."""
    try:
        _connect(target, mounts.KEEPER_SOCKET, ANSWER_TIMEOUT_S).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return True
    except (OSError, UserError):
        pass
    return False


def ask_keeper(target: Target, request: Message, timeout_s: float = ANSWER_TIMEOUT_S) -> Message:
    """The keeper's answer, refusals included. ConnectionError: the keeper is gone."""
    try:
        with _connect(target, mounts.KEEPER_SOCKET, timeout_s) as connection:
            _check_runs(target)
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
