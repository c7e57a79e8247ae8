"""A process that runs `fusecache` commands, each in a fork of it: so none of them has to import.

A command is given what it would have as a process of its own: arguments, environment, directory,
standard streams. Tests run thousands of commands, most of them to mount and to unmount.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.support import forking

_ROOT = Path(__file__).resolve().parents[2]
_MESSAGE_BYTES = 1 << 17


class Commands:
    """The process: from the first command to the end of this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def _connection(self) -> socket.socket:
        with self._lock:
            if self._socket is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.support.commands", forking.ROOM],
                        stdin=theirs.fileno(),
                        cwd="/",
                        env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
                    )
                self._socket = ours
            return self._socket

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """`fusecache ARGUMENTS` to its end. subprocess.TimeoutExpired: it was killed."""
        connection = self._connection()
        message = json.dumps([list(arguments), dict(environment)]).encode()
        pipes = [os.pipe() for _ in range(3)]
        received = [b"", b"", b""]  # of stdout, of stderr; the pid and the exit code
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:
            for ours, _ in pipes:
                stack.callback(os.close, ours)
            try:
                socket.send_fds(connection, [message], [theirs for _, theirs in pipes])
            finally:
                for _, theirs in pipes:
                    os.close(theirs)
            selector = stack.enter_context(selectors.DefaultSelector())
            for number, (ours, _) in enumerate(pipes):
                selector.register(ours, selectors.EVENT_READ, number)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    received[key.data] += data
                    if not data:
                        selector.unregister(key.fd)
                if not ready:
                    os.kill(int(received[2].split()[0]), signal.SIGKILL)
                    raise subprocess.TimeoutExpired(list(arguments), timeout_s)
        texts = [
            io.TextIOWrapper(io.BytesIO(data), errors="surrogateescape").read()
            for data in received[:2]
        ]
        code = int(received[2].split()[1])
        return subprocess.CompletedProcess(["fusecache", *arguments], code, *texts)


def _serve() -> None:
    """On standard input, a socket: each message is a command, with three descriptors."""
    import fusecache.cli.main  # noqa: F401  (not by the process that tests run in)

    forking.prepare()
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    answers: dict[int, int] = {}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready = select.select([connection.fileno(), wake], [], [])[0]
        if wake in ready:
            os.read(wake, 1 << 10)
            _answer(answers)
        if connection.fileno() not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        if not message:
            return
        output, complaints, answer = fds
        pid = os.fork()
        if pid == 0:
            for fd in (wake, wakes, answer, *answers.values()):
                os.close(fd)
            connection.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            arguments, environment = json.loads(message)
            _run(arguments, environment, output, complaints)
        os.write(answer, b"%d " % pid)
        answers[pid] = answer
        os.close(output)
        os.close(complaints)


def _answer(answers: dict[int, int]) -> None:
    """The exit codes of what has ended."""
    while answers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        answer = answers.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(answer, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(answer)


def _run(
    arguments: list[str], environment: dict[str, str], output: int, complaints: int
) -> NoReturn:
    """In the fork."""
    from fusecache.cli.main import main

    for theirs, fd in ((output, 1), (complaints, 2)):
        os.dup2(theirs, fd)
        os.close(theirs)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["fusecache", *arguments]
    forking.run_to_end(main)


if __name__ == "__main__":
    _serve()
