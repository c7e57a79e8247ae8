"""A process that has imported what a server needs, and waits to become one. Stdlib only.

A server needs half a second of a processor before it answers, nearly all of it for imports. Where
servers are killed again and again on a loaded machine, none would live so long. So a mount whose
server has died keeps a spare for a while, and one whose server died before it was ready begins the
next as a spare: what has been done of its work is not lost with a server.

On a socket it says that it has imported all (one byte). One message comes back: the line
{"launch": arguments of the server, "fds": names} with the descriptors of these names. End of file:
it is not needed, and ends.

INVARIANT: a spare holds nothing of the mount before it becomes the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from typing import Any

_MESSAGE_BYTES = 1 << 16
_FDS_MOST = 16
_SEND_S = 1.0
_PATIENCE_S = 30.0  # with one that is still importing


class Spare:
    """The keeper's end."""

    def __init__(
        self, command: list[str], environment: dict[str, str], stderr: int, mountpoint: str
    ) -> None:
        """`mountpoint`: `ps` shows it. OSError: no process can be had."""
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._patience_end = time.monotonic() + _PATIENCE_S
        self._is_ready = False
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [*command, "--spare", str(theirs.fileno()), mountpoint],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    cwd="/",
                    env=environment,
                    process_group=0,
                )
        except BaseException:
            self._socket.close()
            raise

    def is_coming(self) -> bool:
        """Whether it is still importing: it is further than a new process would be."""
        if self._is_ready or time.monotonic() > self._patience_end:
            return False
        try:
            self._is_ready = bool(self._socket.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            pass  # it has died: `become` will say so
        return False

    def become(self, launch: dict[str, Any], fds: dict[str, int]) -> bool:
        """Hand over what a server needs. False: it has died; this object is of no more use then."""
        line = json.dumps({"launch": launch, "fds": list(fds)}).encode() + b"\n"
        self._socket.settimeout(_SEND_S)
        try:
            sent = socket.send_fds(self._socket, [line], list(fds.values()))
            if sent < len(line):  # else it may be the server already, and have closed its end
                self._socket.sendall(line[sent:])
        except OSError:
            self.end()
            return False
        self._socket.close()
        return True

    def end(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def wait(fd: int) -> str | None:
    """The spare's end: the server's arguments, once it is one. None: it is not needed."""
    received, descriptors = b"", []
    with socket.socket(fileno=fd) as keeper:
        with contextlib.suppress(OSError):  # a keeper that has not waited has said all already
            keeper.sendall(b"\n")
        while not received.endswith(b"\n"):
            try:
                data, some, _, _ = socket.recv_fds(keeper, _MESSAGE_BYTES, _FDS_MOST)
            except ConnectionResetError:  # it went without having read our byte
                return None
            if not data:
                return None
            received += data
            descriptors += some
    message = json.loads(received)
    launch, fds = message["launch"], dict(zip(message["fds"], descriptors, strict=True))
    log = fds.pop("log")
    for standard in (1, 2):
        os.dup2(log, standard)  # it may have been rotated
    os.close(log)
    return json.dumps({**launch, "fds": fds})
