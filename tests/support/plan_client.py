"""A hintsd for tests: says to a mount's server what the test wants, and keeps what it is told."""

from __future__ import annotations

import json
import select
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusecache.base import mounts
from fusecache.base.wire import Decoder, Frame, encode
from tests.support import PATIENCE_S

WANTED, QUEUED, FLYING, STAGED, FAILED = 8, 16, 32, 64, 128
LOOKUP, READ_SSD, READ_ORIGIN = 1, 2, 3


class PlanClient:
    """One plan channel, on blocking sockets."""

    def __init__(self, mountpoint: Path, *knows: str) -> None:
        """`knows`: words of its hello that are true (docs/WIRE.md)."""
        mount = mounts.at(str(mountpoint))
        assert mount is not None
        directory = mounts.runtime_directory(mount)
        assert directory is not None
        self.socket = mounts.connect(directory, mounts.CONTROL_SOCKET, PATIENCE_S)
        hello = {"op": "plan", "version": 1, **dict.fromkeys(knows, True)}
        self.socket.sendall(json.dumps(hello).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            piece = self.socket.recv(1)
            assert piece, "the server closed the connection"
            line += piece
        self.hello: dict[str, Any] = json.loads(line)
        self.results: dict[int, list[int]] = {}  # inode -> its results, in order
        self.seen: list[tuple[int, int]] = []
        self.askers: dict[int, set[tuple[int, int]]] = {}  # inode -> (process, its parent)
        self.lost = 0
        self.directories: list[Frame] = []
        self.state: dict[str, Any] = {}
        self.states = 0
        self.errors: list[str] = []
        self.is_open = True
        self._decoder = Decoder()

    def __enter__(self) -> PlanClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    # ---- what it says ----------------------------------------------------------------------------

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.sendall(encode(kind, fields))

    def command(self, kind: str, inos: list[int]) -> None:
        self.send(kind, inos=np.array(inos, np.uint32))

    def stage(self, inos: list[int], store: int = 1) -> None:
        flags = np.full(len(inos), store, np.uint8)
        self.send("stage", inos=np.array(inos, np.uint32), store=flags)

    def pack(self, chunks: list[list[int]], size_bytes: int, buffer_bytes: int = 65_536) -> None:
        """The log that is to be: each chunk in two pieces."""
        for first, inos in enumerate(chunks):
            half, last = len(inos) // 2, first == len(chunks) - 1
            for piece, done in ((inos[:half], False), (inos[half:], last)):
                self.send(
                    "pack", epoch=0, chunks=len(chunks), bytes=size_bytes,
                    samples=sum(map(len, chunks)), buffer=buffer_bytes,
                    first=first, lengths=np.array([len(piece)], np.uint32),
                    inos=np.array(piece, np.uint32), last=done,
                )  # fmt: skip

    def stage_all(self, inos: list[int], store: int = 1) -> Counter[int]:
        """Stage, and wait until each has its result; how often there was which."""
        return self._all(inos, lambda: self.stage(inos, store))

    def fetch_all(self, inos: list[int]) -> Counter[int]:
        return self._all(inos, lambda: self.command("fetch", inos))

    def _all(self, inos: list[int], say: Callable[[], None]) -> Counter[int]:
        for ino in inos:
            self.results.pop(ino, None)
        say()
        self.until(lambda: all(ino in self.results for ino in inos))
        return Counter(self.results[ino][-1] for ino in inos)

    def obeyed(self) -> None:
        """Wait until all commands so far have taken effect, `stage`, `fetch` and `arm` excepted."""
        self.listing(b"")

    def settle(self) -> None:
        """Wait until the server has carried out all that was sent, and has said how it stands."""
        self.obeyed()
        states = self.states
        self.until(lambda: self.states > states + 1)

    def listing(self, path: bytes) -> dict[bytes, tuple[int, int, int, int]]:
        """name -> (inode, size, kind, stored). OSError: as the server said."""
        del self.directories[:]
        self.send("list", path=path)
        self.until(
            lambda: bool(self.directories) and self.directories[-1].fields.bool("last"),
        )
        found: dict[bytes, tuple[int, int, int, int]] = {}
        for frame in self.directories:
            assert frame.fields.bytes("path", 1 << 20) == path
            error = frame.fields.optional_str("error", 1000)
            if error is not None:
                raise OSError(error)
            found.update(entries(frame))
        return found

    # ---- what it is told -------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            assert left > 0, f"the server did not say what was waited for: {self.results}"
            assert self.is_open, f"the server closed the channel: {self.errors}"
            self.listen(left)

    def listen(self, timeout_s: float) -> None:
        """Take in what comes, once."""
        if not select.select([self.socket], [], [], timeout_s)[0]:
            return
        try:
            data = self.socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        if not data:
            self.is_open = False
        for frame in self._decoder.feed(data):
            self._take(frame)

    def wait_closed(self, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while self.is_open:
            assert time.monotonic() < deadline, "the server did not close the channel"
            self.listen(0.1)

    def _take(self, frame: Frame) -> None:
        fields = frame.fields
        match frame.type:
            case "done":
                pairs = zip(_list(fields.array("inos", "u4")), _list(fields.array("results", "u1")),
                            strict=True)  # fmt: skip
                for ino, result in pairs:
                    self.results.setdefault(ino, []).append(result)
            case "seen":
                inos, kinds = fields.array("inos", "u4"), fields.array("kinds", "u1")
                self.seen += zip(_list(inos), _list(kinds), strict=True)
                askers = [_list(fields.array(name, "u4")) for name in ("processes", "parents")]
                for ino, process, parent in zip(_list(inos), *askers, strict=True):
                    self.askers.setdefault(ino, set()).add((process, parent))
                self.lost += fields.int("lost", 0, 1 << 40)
            case "directory":
                self.directories.append(frame)
            case "state":
                self.state = fields.raw()
                self.states += 1
            case "error":
                self.errors.append(fields.str("message", 1000))
            case _:
                raise AssertionError(f"the server sent {frame}")


def _list(array: NDArray[Any]) -> list[int]:
    return [int(value) for value in array]


def entries(frame: Frame) -> dict[bytes, tuple[int, int, int, int]]:
    fields, at = frame.fields, 0
    names, found = fields.bytes("names", 4 << 20), {}
    columns = [_list(fields.array(name, kind)) for name, kind in (
        ("inos", "u4"), ("sizes", "u8"), ("kinds", "u1"), ("stored", "u1"), ("name_lengths", "u2")
    )]  # fmt: skip
    for ino, size, kind, stored, length in zip(*columns, strict=True):
        found[names[at : at + length]] = (ino, size, kind, stored)
        at += length
    assert at == len(names)
    return found
