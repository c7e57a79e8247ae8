"""Records what a mount sees into a trace: the client of `recording.py`, over server restarts.

INVARIANT: the file is a readable trace at any moment, and at most a second behind: half of
it in the server's ring, half in the pending block.
INVARIANT: whatever was not recorded is noted as a gap, with its number where that is known.
It prints nothing; errors are UserError.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusecache.base import mounts
from fusecache.base.errors import EXIT_FAILED, UserError
from fusecache.base.wire import Decoder, Fields, WireError
from fusecache.control.control_client import Target, directory_of
from fusecache.traces.traces import BY_HINT, MISSES_ONLY, Writer

VERSION: Final = 1  # of the conversation
FLUSH_EVERY_S: Final = 0.5  # the server sends as often
ANSWER_TIMEOUT_S: Final = 120.0  # a large mount's names may have to be expired first
LAST_WORDS_S: Final = 10.0
RECONNECT_PAUSE_S: Final = 0.1
_LINE_BYTES_MOST: Final = 1 << 16
_NAMES_BYTES_MOST: Final = 4 << 20
_JOB_CHARACTERS_MOST: Final = 256
_COUNT_MOST: Final = 1 << 62
_AGAIN_SHARE: Final = 4  # of an epoch: hintsd may find a reader so far behind what was told


@dataclass(frozen=True, slots=True)
class Limits:
    """When a recording ends by itself; None: never."""

    seconds: float | None = None
    size_bytes: int | None = None


@dataclass(slots=True)
class _Job:
    """What hints have told of one; positions as in hintsd/follow/sequence.py."""

    number: int
    begin: int  # of the epoch that was told last
    samples: int  # of it
    next: int  # where its next stretch begins, if nothing is missing
    stop: int  # before this all is written

    @property
    def told(self) -> int:
        """Samples of that epoch that are written."""
        return self.stop - self.begin


class _ServerGoneError(Exception):
    """The connection ended without last words."""


class Recorder:
    """One recording."""

    def __init__(self, target: Target, path: str, *, every_open: bool, force: bool) -> None:
        """`force`: replace what `path` names. UserError: it is another user's mount, or its keeper
        is gone.
        """
        self._target, self._path, self._force = target, path, force
        self._directory = directory_of(target)
        self._request = {"op": "trace", "version": VERSION, "every_open": every_open}
        self._writer: Writer | None = None
        self._item_of = np.full(1024, -1, np.int64)  # by inode number
        self._clock_ns = 0  # of the server, when the recording began
        self._jobs: dict[str, _Job] = {}
        self.lost = self.reconnections = 0
        self.is_waiting = False  # for a server
        self.is_cut = False  # the mount went without its last words

    @property
    def accesses(self) -> int:
        return self._writer.accesses if self._writer is not None else 0

    @property
    def files(self) -> int:
        return self._writer.items if self._writer is not None else 0

    @property
    def size_bytes(self) -> int:
        return self._writer.size_bytes if self._writer is not None else 0

    @property
    def untold(self) -> list[tuple[str, int, int]]:
        """Jobs of which hints have not told an epoch to its end (hintsd's name, samples that were
        told, samples of an epoch): what they read after that is there as far as the mount saw it.
        """
        return [
            (name, job.told, job.samples)
            for name, job in self._jobs.items()
            if 0 < job.told < job.samples
        ]

    def run(self, limits: Limits, wake_fd: int, report: Callable[[], None]) -> str:
        """Record until `wake_fd` is readable, a limit is reached, or the mount is gone; returns
        which, as a line. `report` is called every now and then.
        """
        try:
            reason = self._run(limits, wake_fd, report)
            if self._writer is None:
                raise UserError(f"{self._target.mountpoint}: nothing was recorded: {reason}")
            if self.untold:
                self._writer.note_gap(None)
            self._writer.close()
        except UserError:
            if self._writer is not None:
                with contextlib.suppress(OSError):
                    self._writer.close()
            raise
        except OSError as error:
            line = f"{self._path}: {error.strerror or error}"
            if self._writer is not None:
                line += f"; {self._writer.written:,} accesses are in it"
            raise UserError(line) from None
        return reason

    def _run(self, limits: Limits, wake_fd: int, report: Callable[[], None]) -> str:
        begun_s = time.monotonic()
        deadline_s = None if limits.seconds is None else begun_s + limits.seconds
        has_ended = False
        while True:
            connection = self._connect()
            if self._writer is not None and (connection is not None or not has_ended):
                self._writer.note_gap(None)
            if connection is None:
                self.is_cut = not has_ended
                return "the mount is gone"
            with connection:
                talk = _Talk(connection, wake_fd, deadline_s, limits.size_bytes)
                has_ended = False
                try:
                    if reason := self._listen(talk, report):
                        return reason
                    has_ended = True  # unasked: the server ends, perhaps with its mount
                except _ServerGoneError:
                    pass
            self.is_waiting = True
            report()
            if select.select([wake_fd], [], [], RECONNECT_PAUSE_S)[0]:
                return "asked to end"

    def _connect(self) -> socket.socket | None:
        """None: there is no such mount any more. The keeper's socket outlives its servers."""
        try:
            return mounts.connect(
                self._directory, mounts.CONTROL_SOCKET, ANSWER_TIMEOUT_S, self._target.mount
            )
        except PermissionError:
            raise UserError(f"{self._target.mountpoint} belongs to another user") from None
        except (FileNotFoundError, ConnectionError):
            if mounts.is_mounted(self._target.mount):
                raise UserError(
                    f"{self._target.mountpoint}: neither server nor keeper answers"
                ) from None
            return None

    def _listen(self, talk: _Talk, report: Callable[[], None]) -> str:
        talk.send(self._request)
        answer = talk.answer()
        if answer is None:
            return talk.reason
        self._begin(answer)
        self.is_waiting = False
        assert self._writer is not None
        flushed_s = time.monotonic()
        while not talk.has_ended:
            for kind, fields in talk.frames(FLUSH_EVERY_S):
                self._take(kind, fields)
            if time.monotonic() - flushed_s >= FLUSH_EVERY_S:
                self._writer.flush()
                flushed_s = time.monotonic()
            talk.end_if_due(self._writer.size_bytes)
            report()
        return talk.reason

    def _begin(self, answer: dict[str, Any]) -> None:
        if not answer.get("ok"):
            line = f"{self._target.mountpoint}: {answer.get('error', 'refused')}"
            raise UserError(line, int(answer.get("exit", EXIT_FAILED)))
        if self._writer is not None:
            self.reconnections += 1
            return
        self._clock_ns = int(answer["now_ns"])
        seen = "each open of a file" if answer["every_open"] else MISSES_ONLY
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._writer = Writer(
            self._path,
            source=f"fusecache trace {self._target.mountpoint}, {when}: {seen}",
            times=True,
            readers=True,
            seen=True,
            names=True,
            force=self._force,
        )

    def _take(self, kind: str, fields: Fields) -> None:
        assert self._writer is not None
        if kind == "names":
            self._take_names(fields)
        elif kind == "accesses":
            inos, who = fields.array("inos", np.uint32), fields.array("who", np.uint32)
            times_ns = fields.array("times_ns", np.uint64).astype(np.int64) - self._clock_ns
            self._writer.add(
                self._item_of[inos], times_s=times_ns / 1e9, readers=who >> 8, seen=who & 0xFF
            )
            lost = fields.int("lost", 0, 1 << 62)
            if lost:
                self._writer.note_gap(lost)
                self.lost += lost
        elif kind == "passed":
            self._take_passed(fields)

    def _take_passed(self, fields: Fields) -> None:
        """A stretch of a job's sequence. A hintsd that is new, or was wrong about the place, may
        tell again what we know: a step back by less than an epoch's share is taken for that.
        """
        assert self._writer is not None
        name = fields.str("job", _JOB_CHARACTERS_MOST)
        position = fields.int("position", 0, _COUNT_MOST)
        samples = fields.int("samples", 1, _COUNT_MOST)
        begin = fields.optional_int("begin", 0, position)
        begin = position - position % samples if begin is None else begin  # an older server
        inos = fields.array("inos", np.uint32)
        job = self._jobs.setdefault(
            name, _Job(len(self._jobs) + 1, begin, samples, position, position)
        )
        if position != job.next:
            self._writer.note_gap(None)
        job.next = position + len(inos)
        again = job.stop - position
        if samples == job.samples and 0 < again <= samples // _AGAIN_SHARE:
            inos = inos[again:]
            position += again
        if len(inos) == 0:
            return
        begins = position == begin or begin != job.begin
        if begins and job.number == 1:
            self._writer.begin_epoch()
        job.begin, job.samples, job.stop = begin, samples, job.next
        items = self._item_of[np.where(inos < len(self._item_of), inos, 0)]
        items = items[items >= 0]
        time_s = (fields.int("time_ns", 0, _COUNT_MOST) - self._clock_ns) / 1e9
        self._writer.add(
            items,
            times_s=np.full(len(items), time_s),
            readers=np.full(len(items), -job.number),
            seen=np.full(len(items), BY_HINT),
        )

    def _take_names(self, fields: Fields) -> None:
        """After a restart the server tells again what we know."""
        assert self._writer is not None
        inos, sizes = fields.array("inos", np.uint32), fields.array("sizes", np.uint64)
        lengths = fields.array("lengths", np.uint32)
        names = fields.bytes("names", _NAMES_BYTES_MOST)
        highest = int(inos.max(initial=0))
        if highest >= len(self._item_of):
            grown = np.full(max(highest + 1, 2 * len(self._item_of)), -1, np.int64)
            grown[: len(self._item_of)] = self._item_of
            self._item_of = grown
        are_new: npt.NDArray[np.bool_] = self._item_of[inos] < 0
        if not are_new.all():
            of_new = np.frombuffer(names, np.uint8)[np.repeat(are_new, lengths)]
            inos, sizes, lengths = inos[are_new], sizes[are_new], lengths[are_new]
            names = of_new.tobytes()
        first = self._writer.add_named_items(sizes, lengths, names)
        self._item_of[inos] = np.arange(first, first + len(inos))


class _Talk:
    """One connection to a server: a request, its answer, frames until the server's last words."""

    def __init__(
        self,
        connection: socket.socket,
        wake_fd: int,
        deadline_s: float | None,
        size_bytes_most: int | None,
    ) -> None:
        self._connection, self._wake_fd = connection, wake_fd
        self._deadline_s, self._size_bytes_most = deadline_s, size_bytes_most
        self._decoder = Decoder()
        self._received = b""
        self._ending_since_s: float | None = None
        self.reason = ""
        self.has_ended = False

    def send(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(ConnectionError):  # it is met when the answer is read
            self._connection.sendall(json.dumps(request).encode() + b"\n")

    def answer(self) -> dict[str, Any] | None:
        """None: the recording is to end first, see `reason`."""
        patience_s = time.monotonic() + ANSWER_TIMEOUT_S
        while b"\n" not in self._received:
            self.end_if_due(0)
            if self.reason:
                return None
            if time.monotonic() > patience_s or len(self._received) > _LINE_BYTES_MOST:
                raise UserError("the server does not answer")
            self._received += self._receive(RECONNECT_PAUSE_S)
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def frames(self, timeout_s: float) -> list[tuple[str, Fields]]:
        """What has come, or comes within the time."""
        data = self._received or self._receive(timeout_s)
        self._received = b""
        try:
            frames = [(frame.type, frame.fields) for frame in self._decoder.feed(data)]
        except WireError as error:
            raise UserError(f"the server speaks another language: {error}") from None
        self.has_ended = any(kind == "ended" for kind, _ in frames)
        return frames

    def end_if_due(self, size_bytes: int) -> None:
        """Ask the server for its last words, once, when it is time."""
        now_s = time.monotonic()
        if self._ending_since_s is not None:
            if now_s - self._ending_since_s > LAST_WORDS_S:
                raise _ServerGoneError
            return
        if select.select([self._wake_fd], [], [], 0)[0]:
            self.reason = "asked to end"
        elif self._deadline_s is not None and now_s >= self._deadline_s:
            self.reason = "the time is over"
        elif self._size_bytes_most is not None and size_bytes >= self._size_bytes_most:
            self.reason = "the file has its size"
        if self.reason:
            self._ending_since_s = now_s
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)

    def _receive(self, timeout_s: float) -> bytes:
        """b"": nothing came. Ends early when the recording is to end."""
        waiting = [self._connection.fileno()]
        if self._ending_since_s is None:
            waiting.append(self._wake_fd)
            if self._deadline_s is not None:
                timeout_s = max(0.0, min(timeout_s, self._deadline_s - time.monotonic()))
        ready = select.select(waiting, [], [], timeout_s)[0]
        if self._connection.fileno() not in ready:
            return b""
        try:
            data = self._connection.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            raise _ServerGoneError
        return data
