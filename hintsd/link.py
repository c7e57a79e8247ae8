"""Link: the connection of one job to hintsd, kept up by a thread behind the trainer's back.

The trainer hands over what it has to say (`announce`, `step`) and goes on at once; the thread
connects, sends, reads the answers, and when hintsd goes away connects again and repeats what the
new hintsd has to know: the job, the last position, the orders from there on.

INVARIANT: nothing here raises into the trainer, and only `start` and `stop(wait_s)` wait, for at
most the time they are given. What goes wrong is told by one RuntimeWarning per process and reason.
A forked child (a DataLoader worker) inherits the object, but neither thread nor connection.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import select
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Literal, NamedTuple, NoReturn, get_args

from fusecache import mounts, wire
from hintsd.orders import OrderSpec, to_message

SOCKET_IOCTL: Final = 0x9000FC01  # _IOR(0xfc, 1, char[4096]); the same in fusecache/native_raw.c
SOCKET_BYTES_MOST: Final = 4096
SOCKET_ATTRIBUTE: Final = "user.fusecache.hintsd"  # of servers that know no ioctl
CONNECT_TIMEOUT_S: Final = 1.0
ANSWER_TIMEOUT_S: Final = 10.0
STEP_INTERVAL_S: Final = 0.02
PAUSE_LEAST_S: Final = 0.05
PAUSE_MOST_S: Final = 1.0
LAST_ANSWER_TIMEOUT_S: Final = 0.5
ARRAY_PIECE_BYTES: Final = 1 << 20
INLINE_BYTES_MOST: Final = 1 << 16
RECEIVE_BYTES: Final = 1 << 16
WAKES_AT_ONCE_MOST: Final = 4096

State = Literal["waiting", "hinted", "wrong", "over"]

_warned: set[str] = set()  # reasons that this process has been told
_links: set[Link] = set()  # those with a thread, for the children of a fork


@dataclass(frozen=True)
class Files:
    """Which file an index means: the fields `files` and `check` of a `job` message."""

    rule: dict[str, Any]  # byte strings in it travel as arrays
    check: dict[str, Any] | None = None


@dataclass(frozen=True)
class Description:
    """What a job is, before hintsd has heard of it."""

    path: str
    """The dataset's directory."""
    files: tuple[Callable[[], Files], ...]
    """Ways to say it, tried in turn until one is accepted. Called in the thread: may be slow."""
    order: dict[str, Any] | None = None
    """The `spec` of all epochs, as `orders.to_message` gives it; None: `announce` tells each."""
    epochs: int | None = None
    start_epoch: int = 0
    start_batch: int = 0
    workers: int = 0
    prefetch_factor: int = 0
    name: str = ""


class Unhinted(Exception):
    """There will be no hints for this job, for good. `reason` is the same for the same cause."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class _Stopped(Exception):
    """`stop` was called while the thread waited."""


class Place(NamedTuple):
    """A line of the script."""

    file: str
    line: int
    module: str


def script_place() -> Place:
    """The line that called us: of the innermost frame that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in ("hintsd", "torch"):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def warn_once(message: str, reason: str | None = None, place: Place | None = None) -> None:
    """One RuntimeWarning per process and reason, which never becomes an exception.

    It points at `place` in the script; None: at the line that called us.
    """
    reason = message if reason is None else reason
    if reason in _warned:
        return
    _warned.add(reason)
    file, line, module = place or script_place()
    try:
        warnings.warn_explicit(f"hintsd: {message}", RuntimeWarning, file, line, module)
    except RuntimeWarning:  # the script has made errors of warnings; a hint must not end it
        logging.getLogger("hintsd").warning(message)


def find_socket(path: str) -> tuple[str, str]:
    """hintsd's socket for the mount that `path` lies on, and `path` without links.

    Unhinted: not a mount, hints are off for it, or they are for others to give. OSError: the mount
    does not answer now.
    """
    mount = mounts.find(path)
    if mount is None:
        raise Unhinted(f"{path} is not on a fusecache mount; going on without hints")
    try:
        address = _ask_for_socket(mount.mountpoint)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            raise Unhinted(
                f"hints are off for the mount {mount.mountpoint}; going on without", "off"
            ) from None
        raise
    if os.geteuid() not in (0, mount.uid) and _is_barred(address):
        whose = "root's" if mount.uid == 0 else "another user's"
        raise Unhinted(
            f"{mount.mountpoint} is {whose}: only its user, and root, can give it hints; mount the "
            "dataset yourself to have your own; going on without hints"
        )
    return os.fsdecode(address), mounts.resolve(path)


def _is_barred(address: bytes) -> bool:
    """Whether we may not connect to that socket, which need not be there."""
    try:
        os.stat(address)
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(address, os.W_OK, effective_ids=True)


def _ask_for_socket(mountpoint: str) -> bytes:
    """OSError ENODATA: there is none."""
    fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        told = bytearray(SOCKET_BYTES_MOST)
        return bytes(told[: fcntl.ioctl(fd, SOCKET_IOCTL, told)])
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
        return os.getxattr(fd, SOCKET_ATTRIBUTE)
    finally:
        os.close(fd)


class Link:
    """See the module. One job, one connection, one thread."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._place = script_place()
        self._settled = threading.Event()  # welcome, or known to be without hints for now
        self._told = threading.Event()  # accepted, or a warning has said why not
        self._lock = threading.Lock()
        self._orders: dict[int, OrderSpec] = {}  # by epoch, from the position's epoch on
        self._unsent: list[int] = []
        self._position = (description.start_epoch, description.start_batch)
        self._drawn = self._position  # told at the end, where it is further
        self._is_step_pending = False
        self._is_stopping = False
        self._is_over = False  # no thread will ever look again
        self._why_over = "closed"  # where hintsd has not said it
        self._ways = list(description.files)
        self._job: str | None = None
        self._is_described = False  # on this connection, so that there is something to close
        self._standing: tuple[State, str] = ("waiting", "")  # on this connection, and why
        self._socket: socket.socket | None = None
        self._decoder = wire.Decoder()
        self._frames: list[wire.Frame] = []
        self._wake_fds: tuple[int, ...] = ()  # of a pipe: to poll, and to write to
        self._thread = threading.Thread(target=self._run, name="hintsd", daemon=True)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the interpreter's end there may be no `os` any more.
        for fd in self._wake_fds:
            close(fd)

    @property
    def job(self) -> str | None:
        """hintsd's name for the job; None before it was accepted, and when it never will be."""
        return None if self._is_over else self._job

    @property
    def is_over(self) -> bool:
        """Whether nothing that is said now will ever be sent."""
        return self._is_over

    def __str__(self) -> str:
        of = f" of {self._description.path}" if self._description.path else ""
        state, reason = self._stand()
        why = f" ({reason})" if reason else ""
        return f"{self._job or 'unnamed'}{of}: {state}{why}"

    @property
    def state(self) -> State:
        """Where it stands now: see `Job.state`."""
        return self._stand()[0]

    def _stand(self) -> tuple[State, str]:
        standing = self._standing
        is_ours = self._is_over and standing[0] != "over"
        return ("over", self._why_over) if is_ours else standing

    def start(self) -> None:
        """Begin; waits at most CONNECT_TIMEOUT_S to learn whether hintsd is there, and not again
        in a process that has waited in vain."""
        try:
            self._wake_fds = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # no descriptor, or no thread, to be had
            self._why_over = str(error)
            self._is_over = True
            warn_once(f"going on without hints: {error}", "no resources")
            return
        _links.add(self)
        if "absent" not in _warned and not self._settled.wait(CONNECT_TIMEOUT_S):
            warn_once(
                f"no answer for {self._description.path}; going on without hints until it comes",
                "absent",
            )
            self._told.set()

    def announce(self, epoch: int, spec: OrderSpec) -> None:
        """Tell the order of `epoch`; what was told of epochs before the position is forgotten."""
        if self._is_over:
            return
        with self._lock:
            self._orders[epoch] = spec
            for old in [known for known in self._orders if known < self._position[0]]:
                del self._orders[old]
            self._unsent.append(epoch)
        self._wake()

    def step(self, epoch: int, batch: int) -> None:
        """Tell the position: `batch` batches of `epoch` have been handed out."""
        if self._is_over:
            return
        self._position = (epoch, batch)
        if not self._is_step_pending:
            self._is_step_pending = True
            self._wake()

    def drawn(self, epoch: int, batches: int) -> None:
        """As `step`, of batches that are drawn and need not have been handed out: the job's last
        step, if none of a later epoch follows."""
        self._drawn = (epoch, batches)

    @property
    def has_heard(self) -> bool:
        """Whether there was an answer, or a warning that there is none."""
        return self._told.is_set()

    def hear(self, timeout_s: float) -> None:
        """Wait so long at most for an answer, or a warning that there is none."""
        self._told.wait(timeout_s)

    def stop(self, wait_s: float = 0.0) -> None:
        """End the job; waits at most `wait_s` for hintsd to confirm it."""
        if self._is_over:
            return
        self._is_stopping = True
        self._wake()
        if wait_s > 0:
            self._thread.join(wait_s)

    def give_up(self, why: str) -> None:
        """End the job, with a warning that says why."""
        if not self._is_over and not self._is_stopping:
            self._why_over = why
            self._warn(f"{why}; going on without hints")
            self.stop()

    def leave(self, why: str) -> None:
        """Be over without a word. In a forked child: the connection is the parent's."""
        self._why_over = why
        self._is_over = True
        for fd in self._wake_fds:
            os.close(fd)
        self._wake_fds = ()
        self._disconnect()

    def _wake(self) -> None:
        # The pipe lives as long as the object, so it cannot be another file by now. A full one has
        # woken the thread already.
        if self._wake_fds:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_fds[1], b"w")

    # Everything below runs in the thread.

    def _warn(self, message: str, reason: str | None = None) -> None:
        warn_once(message, reason, self._place)

    def _run(self) -> None:
        pause_s = PAUSE_LEAST_S
        started_s = time.monotonic()
        try:
            while True:
                begun_s = time.monotonic()
                try:
                    self._connect()
                    self._open_job()
                    self._converse()
                except OSError as error:
                    self._hear_last_words()
                    is_gone = error.filename == self._description.path
                    self._disconnect(
                        f"{error.filename} {error.strerror}" if is_gone else "no hintsd answers"
                    )
                    self._report(error, time.monotonic() - started_s)
                if time.monotonic() - begun_s > PAUSE_MOST_S:  # it was no failure at once
                    pause_s = PAUSE_LEAST_S
                self._pause(pause_s)
                pause_s = min(2 * pause_s, PAUSE_MOST_S)
        except _Stopped:
            self._say_goodbye()
        except Unhinted as problem:
            self._why_over = str(problem)
            self._warn(str(problem), problem.reason)
        except wire.WireError as error:
            self._why_over = f"not understood, going on without hints: {error}"
            self._warn(self._why_over, "protocol")
        except Exception as error:  # a fault of ours must not reach the trainer either
            self._why_over = f"going on without hints after an internal error: {error!r}"
            self._warn(self._why_over)
        finally:
            self._is_over = True
            self._disconnect()
            _links.discard(self)
            with self._lock:
                self._orders.clear()
            self._settled.set()
            self._told.set()

    def _report(self, error: OSError, elapsed_s: float) -> None:
        if self._job is not None:
            self._warn("the connection was lost; going on without hints until it is back", "lost")
        elif elapsed_s >= CONNECT_TIMEOUT_S / 2 or "absent" in _warned:
            # Not at once: `fusecache mount` starts a hintsd a moment after the mount is there.
            self._warn(
                f"none answers for {self._description.path} ({error.strerror or error}): hintsd "
                "serve, or fusecache mount of it, starts one; going on without hints until one "
                "does",
                "absent",
            )
            self._settled.set()
            self._told.set()

    def _find_socket(self) -> str:
        path = self._description.path
        try:
            address, self._path = find_socket(path)
        except Unhinted as problem:
            if self._job is None or problem.reason != "no mount":
                raise
            # It was one: whoever mounts it again goes on with the job.
            raise FileNotFoundError(errno.ENOENT, "is not mounted any more", path) from None
        return address

    def _connect(self) -> None:
        address = self._find_socket()
        self._decoder = wire.Decoder()
        self._frames.clear()
        self._is_described = False
        directory, name = os.path.split(address)
        self._socket = mounts.connect(directory, name, CONNECT_TIMEOUT_S)
        self._socket.setblocking(False)
        self._send(wire.encode("hello", {"version": wire.VERSION}))
        self._expect("welcome", ANSWER_TIMEOUT_S)
        self._settled.set()

    def _open_job(self) -> None:
        while True:
            for frame in self._job_frames(self._ways[0]()):
                self._send(frame)
            self._is_described = True
            # Resolving millions of files takes its time; the connection's end is noticed anyway.
            answer = self._expect("accepted", None, "rejected")
            if answer.type == "accepted":
                break
            if len(self._ways) == 1:
                self._fail(answer)
            del self._ways[0]
        self._job = answer.fields.str("job", wire.FRAME_BYTES_MOST)
        self._standing = "hinted", ""
        for warning in answer.fields.strings("warnings", 64, wire.FRAME_BYTES_MOST):
            self._warn(warning)
        self._told.set()
        with self._lock:
            self._unsent = sorted(self._orders)

    def _job_frames(self, files: Files) -> Iterator[bytes]:
        told = self._description
        epoch, batch = self._position
        arrays: dict[str, bytes] = {}
        message = {
            "path": os.fsencode(self._path),
            "files": _by_name(files.rule, arrays, 0),
            "check": files.check,
            "spec": told.order and _by_name(told.order, arrays, INLINE_BYTES_MOST),
            "epochs": told.epochs,
            "start_epoch": epoch,
            "start_batch": batch,
            "workers": told.workers,
            "prefetch_factor": told.prefetch_factor,
            "name": told.name,
            "detached": False,
            "pid": None,
            "resume": self._job,
            "tell_state": True,
        }
        yield from _array_frames(arrays)
        yield wire.encode("job", message)

    def _converse(self) -> None:
        """Until `stop`, or OSError when the connection ends."""
        next_step_s = 0.0
        while True:
            if self._is_stopping:
                raise _Stopped
            self._send_orders()
            timeout_s: float | None = None
            if self._is_step_pending:
                timeout_s = next_step_s - time.monotonic()
                if timeout_s <= 0:
                    self._send_step()
                    next_step_s = time.monotonic() + STEP_INTERVAL_S
                    continue
            if self._frames or self._wait(select.POLLIN, timeout_s):
                self._listen()

    def _send_step(self, *, is_last: bool = False) -> None:
        self._is_step_pending = False  # before the position is read: none is missed
        epoch, batch = self._position
        self._send(wire.encode("step", {"epoch": epoch, "batch": batch}), is_last=is_last)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(OSError, wire.WireError, Unhinted):
            if self._socket is not None and self._is_described:
                if self._drawn > self._position:
                    self.step(*self._drawn)
                if self._is_step_pending:
                    self._send_step(is_last=True)
                self._send(wire.encode("close", {}), is_last=True)
                self._expect("closed", CONNECT_TIMEOUT_S, is_last=True)

    def _send_orders(self) -> None:
        while True:
            with self._lock:
                if not self._unsent:
                    return
                epoch = self._unsent.pop(0)
                spec = self._orders.get(epoch)
            if spec is None:
                continue  # the position has passed it
            arrays: dict[str, bytes] = {}
            named = _by_name(to_message(spec), arrays, INLINE_BYTES_MOST)
            for frame in _array_frames(arrays):
                self._send(frame)
            self._send(wire.encode("order", {"epoch": epoch, "spec": named}))

    def _listen(self) -> None:
        """Take in what hintsd says of its own accord."""
        for frame in self._received():
            if frame.type == "rejected":
                self._warn("an order was refused: " + frame.fields.str("message", 1 << 20))
            elif frame.type == "warning":
                self._warn(frame.fields.str("message", 1 << 20))
            elif frame.type == "state":
                self._stand_as(frame.fields)
            elif frame.type == "error":
                self._fail(frame)
            elif frame.type != "planned":
                raise wire.WireError(f"unexpected {frame.type}")

    def _stand_as(self, told: wire.Fields) -> None:
        """_Stopped: hintsd has ended the job."""
        state, reason = told.str("state", 64), told.str("reason", 1 << 20)
        for known in get_args(State):
            if state == known:
                self._standing = known, reason
        if state == "over":
            raise _Stopped

    def _expect(
        self, kind: str, timeout_s: float | None, other: str = "", *, is_last: bool = False
    ) -> wire.Frame:
        """The next frame of `kind` or `other`. TimeoutError: it did not come."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.type in (kind, other):
                    return frame
                if frame.type == "error":
                    self._fail(frame)
                if frame.type == "warning":
                    self._warn(frame.fields.str("message", 1 << 20))
                elif not is_last:  # else: answers to what was said before
                    raise wire.WireError(f"{frame.type} instead of {kind}")
            left_s = None if end_s is None else end_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(f"no {kind} within {timeout_s:g} s")
            if self._wait(select.POLLIN, left_s):
                self._frames += self._received()
            if self._is_stopping and not is_last:
                raise _Stopped

    def _hear_last_words(self) -> None:
        """Unhinted: hintsd said `error`, and closed the connection while we were sending."""
        with contextlib.suppress(OSError):
            if self._socket is not None and self._wait(select.POLLIN, 0):
                self._frames = self._received()
        for frame in self._frames:
            if frame.type == "error":
                self._fail(frame)

    def _fail(self, frame: wire.Frame) -> NoReturn:
        message = frame.fields.str("message", 1 << 20)
        raise Unhinted(f"refused, going on without hints: {message}")

    def _received(self) -> list[wire.Frame]:
        assert self._socket is not None
        frames, self._frames = self._frames, []
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return frames
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "hintsd closed the connection")
        return frames + self._decoder.feed(data)

    def _send(self, data: bytes, *, is_last: bool = False) -> None:
        assert self._socket is not None
        rest = memoryview(data)
        end_s = time.monotonic() + ANSWER_TIMEOUT_S
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
                end_s = time.monotonic() + ANSWER_TIMEOUT_S
            except BlockingIOError:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("hintsd takes nothing") from None
                self._wait(select.POLLOUT, left_s)
                if self._is_stopping and not is_last:
                    self._disconnect()  # half a frame is out, `close` would not be understood
                    raise _Stopped from None

    def _wait(self, events: int, timeout_s: float | None) -> bool:
        """Until the socket is ready, somebody called `_wake`, or the time is up: is it ready?"""
        poll = select.poll()  # not select(): a trainer may have more than 1024 files open
        wake_fd = self._wake_fds[0]
        poll.register(wake_fd, select.POLLIN)
        if self._socket is not None:
            poll.register(self._socket, events)
        ready = dict(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))
        if ready.pop(wake_fd, 0):
            os.read(wake_fd, WAKES_AT_ONCE_MOST)
        return bool(ready)

    def _pause(self, pause_s: float) -> None:
        end_s = time.monotonic() + pause_s
        while not self._is_stopping and (left_s := end_s - time.monotonic()) > 0:
            self._wait(0, left_s)
        if self._is_stopping:
            raise _Stopped

    def _disconnect(self, why: str = "") -> None:
        if self._standing[0] != "over":
            self._standing = "waiting", why
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _by_name(values: dict[str, Any], arrays: dict[str, bytes], length_most: int) -> dict[str, Any]:
    """`values`, its byte strings longer than `length_most` moved to `arrays` and named instead."""
    named = dict(values)
    for field, value in values.items():
        if isinstance(value, bytes) and len(value) > length_most:
            arrays[field] = value
            named[field] = {"array": field}
    return named


def _array_frames(arrays: dict[str, bytes]) -> Iterator[bytes]:
    for name, data in arrays.items():
        for offset in range(0, len(data), ARRAY_PIECE_BYTES):
            piece = memoryview(data)[offset : offset + ARRAY_PIECE_BYTES]
            fields = {"name": name, "total": len(data), "offset": offset, "data": piece}
            yield wire.encode("array", fields)


def _leave_all() -> None:
    for link in _links:
        link.leave("in a forked process")
    _links.clear()


def _end_all() -> None:
    """The interpreter ends: what is due to be said is said now, or never."""
    end_s = time.monotonic() + LAST_ANSWER_TIMEOUT_S
    links = list(_links)
    with contextlib.suppress(KeyboardInterrupt):
        for link in sorted(links, key=lambda link: not link.has_heard):  # nobody waits for another
            link.hear(max(0.0, end_s - time.monotonic()))
            if link.has_heard:
                link.stop()
    for link in links:
        link.stop()
    with contextlib.suppress(KeyboardInterrupt):
        for link in links:  # a thread that has not said it by then never will
            link.stop(max(0.0, end_s - time.monotonic()))


atexit.register(_end_all)
os.register_at_fork(after_in_child=_leave_all)
