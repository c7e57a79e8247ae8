"""A hintsd for tests of the client: it accepts every job, and notes what it is told."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fusecache.base import wire
from hintsd.client.client import Job
from hintsd.client.link import Link
from hintsd.orders.drawing import access_sequence
from hintsd.orders.spec import Indices, OrderSpec, from_message
from tests.support import PATIENCE_S

LOOK_EVERY_S = 0.02


@dataclass
class Told:
    """What one job has told, over all its connections."""

    job: dict[str, Any]
    """The last `job` message, arrays in place of their names."""
    name: str
    pid: int
    resumed: list[dict[str, Any]] = field(default_factory=list)
    orders: list[tuple[int, OrderSpec]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    scores: list[bytes] = field(default_factory=list)
    sampled: list[tuple[int | None, int | None]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """The numbers of its questions for what is cached."""
    asked_staged: list[bool] = field(default_factory=list)
    """Of each, whether it was about what is staged, too."""
    walked: list[tuple[list[int], int]] = field(default_factory=list)
    """Its questions for a chunk: the unread ones, and how many there are."""
    numbers: list[int] = field(default_factory=list)
    """Of these."""
    is_closed: bool = False
    is_gone: bool = False

    def sequences(self) -> list[tuple[int, Indices]]:
        """The announced epochs, each as its indices."""
        return [(epoch, access_sequence(spec, epoch)) for epoch, spec in self.orders]

    def foreseen(self, length: int) -> OrderSpec:
        """The order of all epochs, as the `job` message gave it."""
        return from_message({"length": length, **self.job["spec"]})


class FakeHintsd:
    """Listens on `path` from `start` to `stop`. `jobs` outlives both."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: list[Told] = []
        self.refuse: Callable[[dict[str, Any]], str | None] = lambda job: None
        """The `message` of a `rejected`, or None to accept."""
        self.answers_hello: Callable[[socket.socket], bool] = lambda connection: True
        """False: the connection is left alone after `hello`."""
        self.takes_scores = True
        self.tells_cached: Callable[[int], Iterable[dict[str, Any]]] | None = None
        """The pieces of an answer to question `number`; None: it does not know of such."""
        self.tells_staged = True
        self.chooses: Callable[[list[int]], int | None] | None = None
        """Which of the unread chunks is next (None: no answer); None: it does not know of such."""
        self.refuses_chunks = False
        self.connections = 0
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def start(self) -> None:
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._begin(self._accept, self._listener)

    def stop(self) -> None:
        """As if killed: nothing is said, all connections end."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._threads[0].join(PATIENCE_S)  # what it has accepted is ended below
            self._listener.close()
            self._listener = None
        with self._changed:
            for connection in self._open:
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._threads.clear()

    def wait(self, condition: Callable[[], object]) -> None:
        """Until `condition` holds: of what was told, or of the client, which gives no sign."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while not condition():
                assert time.monotonic() < deadline, self.jobs
                self._changed.wait(LOOK_EVERY_S)

    def say(self, kind: str, **fields: Any) -> None:
        """To all clients, unasked."""
        with self._changed:
            for connection in self._open:
                connection.sendall(wire.encode(kind, fields))

    def _begin(self, target: Callable[[socket.socket], None], argument: socket.socket) -> None:
        thread = threading.Thread(target=target, args=(argument,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with self._changed:
                self._open.add(connection)
                self.connections += 1
                self._changed.notify_all()
            self._begin(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        decoder, arrays = wire.Decoder(), dict[str, bytearray]()
        told: Told | None = None
        pid = wire.peer_of(connection).pid
        try:
            while data := connection.recv(1 << 20):
                for frame in decoder.feed(data):
                    with self._changed:
                        answer, told = self._take(frame, arrays, told, connection, pid)
                        if answer is not None:
                            connection.sendall(wire.encode(*answer))
                        self._changed.notify_all()
        except OSError:
            pass
        with self._changed:
            if told is not None:
                told.is_gone = True
            self._open.discard(connection)
            connection.close()
            self._changed.notify_all()

    def _take(
        self,
        frame: wire.Frame,
        arrays: dict[str, bytearray],
        told: Told | None,
        connection: socket.socket,
        pid: int,
    ) -> tuple[tuple[str, dict[str, Any]] | None, Told | None]:
        fields = frame.fields.raw()
        match frame.type:
            case "hello":
                assert fields == {"version": 1}
                if self.answers_hello(connection):
                    told_first = {"version": 1, "pid": os.getpid(), "hintsd": "fake"}
                    known = {"scores": self.takes_scores}
                    if self.tells_cached is not None:
                        known["cached"] = True
                        known["staged"] = self.tells_staged
                    known["chunks"] = self.chooses is not None
                    return ("welcome", told_first | known), told
            case "array":
                assert len(fields["data"]) <= 1 << 20
                array = arrays.setdefault(fields["name"], bytearray())
                assert fields["offset"] == len(array)
                array += fields["data"]
                assert len(array) <= fields["total"]
            case "job":
                job = _resolved(fields, arrays)
                arrays.clear()
                if (message := self.refuse(job)) is not None:
                    return ("rejected", {"message": message}), told
                told = next((old for old in self.jobs if old.name == job["resume"]), None)
                if told is None:
                    told = Told(job, f"fake-{len(self.jobs)}", pid)
                    self.jobs.append(told)
                else:
                    told.is_gone = False
                    told.resumed.append(job)
                accepted = {
                    "job": told.name,
                    "mountpoint": "/",
                    "samples_per_epoch": 1,
                    "warnings": [],
                }
                return ("accepted", accepted), told
            case "order":
                assert told is not None
                spec = from_message(_resolved(fields["spec"], arrays))
                arrays.clear()
                told.orders.append((fields["epoch"], spec))
                return ("planned", {"epoch": fields["epoch"]}), told
            case "scores":
                assert told is not None
                told.scores.append(_resolved(fields, arrays)["uses"])
                told.sampled.append((fields["substituted"], fields["h_list"]))
                arrays.clear()
                return ("scored", {}), told
            case "cached":
                assert told is not None
                assert self.tells_cached is not None
                told.asked.append(fields["number"])
                told.asked_staged.append(fields.get("staged", False))
                for piece in self.tells_cached(fields["number"]):
                    kind = piece.pop("kind", "rejected" if "message" in piece else "cached")
                    connection.sendall(wire.encode(kind, piece))
            case "chunk":
                assert told is not None
                assert self.chooses is not None
                told.walked.append((fields["unread"], fields["chunks"]))
                told.numbers.append(fields["number"])
                if self.refuses_chunks:
                    return ("rejected", {"message": "chunk: no"}), told
                chosen = self.chooses(fields["unread"])
                if chosen is not None:
                    return ("chunk", {"number": fields["number"], "chunk": chosen}), told
            case "step":
                assert told is not None
                told.steps.append((fields["epoch"], fields["batch"]))
            case "close":
                assert told is not None
                told.is_closed = True
                return ("closed", {}), told
            case other:
                raise AssertionError(other)
        return None, told


def _resolved(value: Any, arrays: dict[str, bytearray]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"array"}:
            return bytes(arrays[value["array"]])
        return {key: _resolved(inner, arrays) for key, inner in value.items()}
    return value


def link_of(job: Job) -> Link:
    """What it speaks to."""
    assert isinstance(job._link, Link)
    return job._link
