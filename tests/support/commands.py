"""Two processes, in whose forks tests run programs: so none of them has to import (forking.py).

One runs `fusecache` commands, thousands, most of them to mount and to unmount. The other one has
torch, and runs hintsd, trainers and origins that fail on command: `WithTorch`.
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
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import forking

_ROOT = Path(__file__).resolve().parents[2]
IMPORTABLE = {"PYTHONPATH": str(_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
"""In the environment: makes this checkout's packages importable from anywhere."""
_MESSAGE_BYTES = 1 << 18
_PID_BYTES = 8  # with a space: the exit code may be in the pipe, too, when it is read
_NOTHING = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)


class _Forker:
    """The process: from the first program to the end of this one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def _connection(self) -> socket.socket:
        with self._lock:
            if self._socket is None:
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "tests.support.commands", self._kind, forking.ROOM],
                        stdin=theirs.fileno(),
                        cwd="/",
                        env={**os.environ, **IMPORTABLE},
                    )
                self._socket = ours
            return self._socket

    def fork(self, fds: Sequence[int], **become: Any) -> None:
        """`forking.become` with standard descriptors of `fds`; the pid, and later the exit code,
        come from the last of them.
        """
        socket.send_fds(self._connection(), [json.dumps(become).encode()], fds)


class Commands(_Forker):
    """`fusecache`."""

    def __init__(self) -> None:
        super().__init__("fusecache")

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """`fusecache ARGUMENTS` to its end. subprocess.TimeoutExpired: it was killed."""
        pipes = [os.pipe() for _ in range(3)]
        received = [b"", b"", b""]  # of stdout, of stderr; the pid and the exit code
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as stack:
            for ours, _ in pipes:
                stack.callback(os.close, ours)
            try:
                self.fork(
                    [_NOTHING, *(theirs for _, theirs in pipes)],
                    words=["fusecache", *arguments],
                    environment=dict(environment),
                )
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


_torch = _Forker("torch")


class WithTorch(subprocess.Popen[Any]):
    """Popen of `python -c CODE …` or `python -m MODULE …`, which have torch at once."""

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any,
        cwd: Any, env: Any, startupinfo: Any, creationflags: Any, shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: int,
        start_new_session: bool, process_group: int,
    ) -> None:  # fmt: skip
        assert forking.is_room_for(args), "too long: have it started by subprocess.Popen"
        self._answer, theirs = os.pipe()
        streams = (p2cread, c2pwrite, errwrite)
        try:
            _torch.fork(
                [fd if theirs == -1 else theirs for fd, theirs in enumerate(streams)] + [theirs],
                words=list(args),
                environment={**(os.environ if env is None else env), **IMPORTABLE},
                directory=os.fspath(cwd or os.getcwd()),
                is_leader=start_new_session,
                group=process_group,
            )
        finally:
            os.close(theirs)
            self._close_pipe_fds(  # type: ignore[attr-defined]
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
            )
        self.pid = int(os.read(self._answer, _PID_BYTES))
        self._child_created = True

    def _ended(self, timeout_s: float | None) -> int | None:
        """The exit code; None: not yet."""
        if self.returncode is None and select.select([self._answer], [], [], timeout_s)[0]:
            self.returncode = int(os.read(self._answer, 100) or b"255")
            os.close(self._answer)
        return self.returncode

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        return self._ended(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code


SUBPROCESS_WITH_TORCH = types.SimpleNamespace(**{**vars(subprocess), "Popen": WithTorch})
"""The module `subprocess` for what starts such programs itself."""


def run_with_torch(
    words: Sequence[str], timeout_s: float, directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """As subprocess.run. subprocess.TimeoutExpired: it was killed."""
    pipe = subprocess.PIPE
    with WithTorch(words, stdout=pipe, stderr=pipe, text=True, cwd=directory) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def _serve() -> None:
    """On standard input, a socket: each message is a program, with four descriptors."""
    if sys.argv[1] == "torch":
        forking.prepare("torch.utils.data", "hintsd.cli.main", "hintsd.daemon.director", "pyfuse3")
    else:
        from fusecache.server.entry import load_extension

        load_extension(zero_open=True)
        forking.prepare(
            "fusecache.cli.main", "fusecache.cli.mount_command", "fusecache.keeper.keeper",
            "fusecache.server.serving",
        )  # fmt: skip
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
        message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 4)
        if not message:
            return
        *streams, answer = fds
        begun, begins = os.pipe()
        pid = os.fork()
        if pid == 0:
            forking.become(streams=streams, kept=[begins], **json.loads(message))
        for fd in (begins, *streams):
            os.close(fd)
        os.read(begun, 1)  # its end: none of our descriptors is the program's any more
        os.close(begun)
        os.write(answer, (b"%d" % pid).ljust(_PID_BYTES))
        answers[pid] = answer


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


if __name__ == "__main__":
    _serve()
