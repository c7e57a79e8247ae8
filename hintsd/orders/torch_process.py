"""torch in a process of its own, for hintsd alone: torch takes several times what hintsd takes.

The process begins with the first order that is to be drawn, and ends when none was asked for in
IDLE_S. It keeps nothing between two requests: however it ends, the next one goes on. Each request
has a connection of its own, which is sent over `control`, the process's stdin: a pickled (method of
Drawing, arguments) goes in, a pickled (kind, value) comes out. Both ends are the same code.

INVARIANT: a request waits for its answer no longer than the process lives and works: a connection
whose other end has died ends, and a process that uses no processor time for HANG_LOOKS looks is
killed.
INVARIANT: the process ends with hintsd, whatever it is doing: then `control` ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Final

from fusecache.base import processes
from hintsd.orders.drawing import Drawing, OrderLost
from hintsd.orders.spec import Indices, OrderSpec

log = logging.getLogger(__name__)

IDLE_S: Final = 300.0
HANG_LOOKS: Final = 60
LOOK_MS: Final = 1000
TRANSFER_TIMEOUT_S: Final = 60.0  # for some bytes of a message that has begun
REAP_TIMEOUT_S: Final = 1.0
TRIES: Final = 3

_FAULTS: Final[dict[str, type[Exception]]] = {
    fault.__name__: fault
    for fault in (ImportError, RuntimeError, OverflowError, ValueError, MemoryError)
}


class _Lost(Exception):
    """There was no answer; why."""


class TorchProcess(Drawing):
    """As Drawing, for any thread, and OrderLost: the process cannot be kept alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket
        self._has_ended = False

    def sequences(
        self, spec: OrderSpec, epochs: range, end: bytes | None
    ) -> list[tuple[Indices, bytes | None]]:
        found: list[tuple[Indices, bytes | None]] = self._ask("sequences", spec, epochs, end)
        return found

    def skip(self, spec: OrderSpec, epochs: range, end: bytes | None) -> bytes:
        found: bytes = self._ask("skip", spec, epochs, end)
        return found

    def begin(self) -> None:
        """Have it import torch: a request will come."""
        with contextlib.suppress(_Lost), self._lock:
            self._running()

    def most_bytes(self) -> int:
        """Of memory, that the process has had at a time."""
        assert self._process is not None
        with open(f"/proc/{self._process.pid}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM:"))

    def end(self) -> None:
        """For good: requests under way, and to come, are OrderLost."""
        with self._lock:
            self._has_ended = True
            if self._process is not None:
                self._control.close()
                _kill(self._process)

    def _ask(self, *request: Any) -> Any:
        why = ""
        for _ in range(TRIES):
            try:
                kind, value = self._converse(request)
            except _Lost as lost:
                why = f"{lost}, {TRIES} times in a row"
                if self._has_ended:
                    why = "hintsd ends"
                    break
                log.warning("%s: an order is computed anew", lost)
                continue
            if kind == ImportError.__name__:
                log.warning("torch cannot be imported: %s", value)
            if kind in _FAULTS:
                raise _FAULTS[kind](value)
            return value
        raise OrderLost(why)

    def _converse(self, request: tuple[Any, ...]) -> tuple[str, Any]:
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, self._lock:
                process = self._running()
                with contextlib.suppress(OSError):  # it has ended: then the connection ends, too
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
            ours.settimeout(TRANSFER_TIMEOUT_S)
            try:
                with ours.makefile("rwb") as stream:
                    pickle.dump(request, stream, 5)
                    stream.flush()
                    _wait(ours, process)
                    kind, value = pickle.load(stream)
            except (EOFError, OSError, pickle.UnpicklingError) as error:
                how = "hung" if isinstance(error, TimeoutError) else _end_of(process)
                self._forget(process)
                _kill(process)
                raise _Lost(f"torch's process {how}") from None
            return kind, value

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        """It gave no answer: nobody asks it again, however long it takes to end."""
        with self._lock:
            if self._process is process:
                self._control.close()
                self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        """`_lock` is held. _Lost: it cannot be started."""
        if self._has_ended:
            raise _Lost("hintsd ends")
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._process is not None:
            self._control.close()
            self._process = None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "hintsd.orders.torch_process"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                )
        except OSError as error:
            raise _Lost(f"torch's process cannot be started ({error.strerror})") from None
        self._process, self._control = process, ours
        return process


def _wait(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """Until there is an answer, or no process. TimeoutError: it does nothing.

    Looks are counted, not seconds: when the machine stands still, no look is made.
    """
    answers = select.poll()
    answers.register(connection, select.POLLIN)
    used, idle = -1, 0
    while not answers.poll(LOOK_MS):
        now = _processor_ticks(process.pid)
        used, idle = now, idle + 1 if now == used else 0
        if idle >= HANG_LOOKS:
            raise TimeoutError


def _processor_ticks(pid: int) -> int:
    """What all its threads have used."""
    return sum(map(int, processes.stat(pid)[11:13]))


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_TIMEOUT_S)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    """How it ended: its connection has."""
    try:
        status = process.wait(REAP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "gave no answer"
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


# ---- the process ---------------------------------------------------------------------------------

_importing = threading.Lock()


class _Answering:
    """How many requests are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def answer(self, connection: socket.socket) -> None:
        try:
            with connection, connection.makefile("rwb") as stream:
                method, *arguments = pickle.load(stream)
                pickle.dump(_answer(method, arguments), stream, 5)
        except (OSError, EOFError, pickle.UnpicklingError):
            pass  # the asker does not wait any more
        finally:
            self.add(-1)

    def add(self, change: int) -> None:
        with self._lock:
            self.count += change


def _answer(method: str, arguments: list[Any]) -> tuple[str, Any]:
    try:
        _import_torch()
    except Exception as error:  # a library of it may be missing, too
        return ImportError.__name__, str(error) or type(error).__name__
    try:
        return "done", getattr(Drawing(), method)(*arguments)
    except Exception as error:
        kinds = (name for name, fault in _FAULTS.items() if isinstance(error, fault))
        return next(kinds, RuntimeError.__name__), str(error) or type(error).__name__


def _import_torch() -> None:
    with _importing:  # a thread that waits for another's import, which fails, gets half a module
        import torch  # noqa: F401


def _import_ahead() -> None:
    with contextlib.suppress(Exception):  # the first request meets it again
        _import_torch()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for hintsd
    control = socket.socket(fileno=0)
    control.settimeout(IDLE_S)
    threading.Thread(target=_import_ahead, daemon=True).start()
    answering = _Answering()
    while True:
        try:
            told, connections, _, _ = socket.recv_fds(control, 1, 1)
        except TimeoutError:
            if answering.count:
                continue
            break
        if not told:
            break
        answering.add(1)
        connection = socket.socket(fileno=connections[0])
        threading.Thread(target=answering.answer, args=(connection,), daemon=True).start()
    os._exit(0)  # threads that draw do not hold it up


if __name__ == "__main__":
    main()
