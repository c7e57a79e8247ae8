"""What the tests of the cache service share: groups with blocks, and a service on a socket."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from fusecache import _native
from fusecache.base.digest import digest
from fusecache.base.wire import Frame
from fusecache.cached.group import BLAKE3, Group, name_of, set_of
from fusecache.cached.groups import STEP_BYTES_LEAST, Groups
from fusecache.cached.serving import Service
from fusecache.cached.talk import Channel, unpack_found
from fusecache.store.types import BLOCK_BYTES, Location
from tests.support import PATIENCE_S, mounted

MIB = 1 << 20
STEP = STEP_BYTES_LEAST
SLACK = MIB  # for the sets
SMALL = 5000


eventually = partial(mounted.eventually, every_s=0.002)


class Block(NamedTuple):
    name: bytes
    data: bytes

    def __len__(self) -> int:
        return len(self.data)


_RANDOM: Final = random.Random(1).randbytes(BLOCK_BYTES)


def block_of(seed: int, length: int = SMALL) -> Block:
    data = seed.to_bytes(8, "little") + _RANDOM[8:length]
    return Block(digest(BLAKE3, data), data)


def blocks_of(seed: int, count: int, length: int = SMALL) -> list[Block]:
    return [block_of(seed * 10_000 + number, length) for number in range(count)]


def large_blocks(seed: int, count: int) -> list[Block]:
    """Eight are more than a step."""
    return blocks_of(seed, count, BLOCK_BYTES)


def set_with(blocks: list[Block]) -> bytes:
    return set_of(b"".join(block.name for block in blocks))


def figures(groups: Groups) -> dict[int, tuple[int, int, int]]:
    """By owner: groups, bytes held, bytes granted."""
    found: dict[int, tuple[int, int, int]] = {}
    with groups._lock:
        for group in groups._groups.values():
            count, held, granted = found.get(group.owner, (0, 0, 0))
            more = group.held_bytes(), group.limit_bytes
            found[group.owner] = count + 1, held + more[0], granted + more[1]
    return found


class Reported:
    """Groups, with what they reported."""

    def __init__(self, root: Path, steps: float, quota_steps: float, keep_free: int = 0) -> None:
        self.faults: list[tuple[str, str]] = []
        self.root = root
        root.mkdir(mode=0o700, exist_ok=True)
        self.groups = Groups(
            root,
            int(steps * STEP) + SLACK,
            int(quota_steps * STEP) + SLACK,
            keep_free,
            lambda kind, message: self.faults.append((kind, message)),
        )

    def make(self, owner: int, blocks: list[Block]) -> Group:
        """The new group with this set; no connection is about it."""
        digests = set_with(blocks)
        new = self.groups.begin(name_of(digests), owner, len(digests))
        try:
            new.add(digests)
            self.groups.add(new)
        finally:
            self.groups.end(new)
        group = self.find(blocks)
        assert group is not None
        return group

    def find(self, blocks: list[Block]) -> Group | None:
        """The group with this set, if it is there."""
        group = self.groups.use(name_of(set_with(blocks)))
        if group is not None:
            self.groups.leave(group)
        return group

    def fill(self, group: Group, blocks: list[Block]) -> None:
        for block in blocks:
            assert self.groups.put(group, [block]) != [None]
            self.check()

    def check(self) -> None:
        """INVARIANT: what all may hold, and what each holds, is within its limit."""
        counted = figures(self.groups).values()
        assert sum(granted for _, _, granted in counted) <= self.groups.limit_bytes
        assert all(held <= granted for _, held, granted in counted)

    def has(self, group: Group) -> bool:
        """This one, and no other of its name."""
        return self.groups._groups.get(group.name) is group

    def granted(self, owner: int) -> int:
        return figures(self.groups).get(owner, (0, 0, 0))[2]


@contextlib.contextmanager
def reported(
    root: Path, steps: float = 4, quota_steps: float = 2, keep_free: int = 0
) -> Iterator[Reported]:
    """`steps` of room, and a little for the sets."""
    made = Reported(root, steps, quota_steps, keep_free)
    try:
        yield made
        made.check()
    finally:
        made.groups.close()


def place(group: Group, block: Block) -> Location | None:
    """Where it is."""
    (at,) = group.find([(block.name, len(block))])
    return at


def held(group: Group, blocks: list[Block]) -> int:
    """How many of the blocks it has; each with the right bytes."""
    count = 0
    for block in blocks:
        data = group.read(block.name, len(block))
        assert data in (None, block.data)
        count += data is not None
    return count


# ---- over the socket -----------------------------------------------------------------------------
class Served:
    """A service, in a thread."""

    def __init__(
        self,
        folder: Path,
        steps: float = 4,
        quota_steps: float = 2,
        listener: socket.socket | None = None,
    ) -> None:
        """`listener`: one that is there; it listens at `path`."""
        self.reported = Reported(folder / "cache", steps, quota_steps)
        self.groups = self.reported.groups
        self.path = str(folder / "socket")
        if listener is None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(self.path)
            listener.listen(64)
        self.listener = listener
        self.service = Service(self.groups, listener)
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def connections(self) -> int:
        return len(self.service._open)

    def end(self) -> None:
        """The socket stays."""
        self.service.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        self.end()
        self.listener.close()
        Path(self.path).unlink(missing_ok=True)


@contextlib.contextmanager
def serving(folder: Path, steps: float = 4, quota_steps: float = 2) -> Iterator[Served]:
    made = Served(folder, steps, quota_steps)
    try:
        yield made
    finally:
        made.stop()


def packed(blocks: list[Block]) -> tuple[bytes, bytes]:
    """The digests, and the lengths."""
    lengths = b"".join(len(block).to_bytes(4, "little") for block in blocks)
    return b"".join(block.name for block in blocks), lengths


class Talker:
    """A client that says what it is told to. A context."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.settimeout(PATIENCE_S)
        self.channel = Channel(self.socket, PATIENCE_S)

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def hear(self) -> Frame:
        received = self.channel.receive()
        assert received is not None
        assert received[1] == -1
        return received[0]

    def ask(self, type_: str, data: bytes = b"", **fields: Any) -> Frame:
        self.channel.send(type_, data, **fields)
        return self.hear()

    def make(self, digests: bytes, name: bytes | None = None) -> Frame:
        """The last answer."""
        name = name_of(digests) if name is None else name
        first = self.ask("make", name=name, count=len(digests) // 32)
        if first.type != "ok":
            return first
        self.channel.send_bytes(memoryview(digests))
        return self.hear()

    def join(self, blocks: list[Block]) -> None:
        """The group with this set, made if need be."""
        digests = set_with(blocks)
        if not self.ask("group", name=name_of(digests)).fields.bool("known"):
            assert self.make(digests).type == "ok"
            assert self.ask("group", name=name_of(digests)).fields.bool("known")

    def put(self, block: Block) -> Location | None:
        return self.put_many([block])[0]

    def put_many(self, blocks: list[Block]) -> list[Location | None]:
        names, lengths = packed(blocks)
        data = b"".join(block.data for block in blocks)
        frame = self.ask("put", data, digests=names, lengths=lengths)
        assert frame.type == "found"
        found = unpack_found(frame.fields.bytes("at", 1 << 20), [len(block) for block in blocks])
        return [one.at for one in found]

    def find(self, blocks: list[Block], promise: bool = False) -> list[Location | bool]:
        """Of each where it is, or whether another one reads it now."""
        names, lengths = packed(blocks)
        frame = self.ask("find", digests=names, lengths=lengths, promise=promise)
        assert frame.type == "found"
        found = unpack_found(frame.fields.bytes("at", 1 << 20), [len(block) for block in blocks])
        return [at or is_promised for at, is_promised in found]

    def doubt(self, segno: int, offset: int) -> None:
        assert self.ask("bad", segno=segno, offset=offset).type == "ok"

    def living(self, segnos: list[int]) -> list[int]:
        frame = self.ask("living", segnos=b"".join(one.to_bytes(4, "little") for one in segnos))
        assert frame.type == "ok"
        living: list[int] = frame.fields.array("segnos", "u4").tolist()
        return living

    def segment(self, segno: int) -> int | None:
        self.channel.send("segment", segno=segno)
        received = self.channel.receive()
        assert received is not None
        frame, descriptor = received
        assert frame.type == ("ok" if descriptor >= 0 else "gone")
        return descriptor if descriptor >= 0 else None

    def is_alive(self) -> bool:
        """The service answers it."""
        return self.ask("group", name=bytes(32)).type == "ok"

    def wait_for_end(self) -> None:
        """The service has closed the connection; nothing is read."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        assert poll.poll(PATIENCE_S * 1000), "the service has not closed it"

    def expect_end(self) -> None:
        """The same, and there was no answer."""
        self.wait_for_end()
        with contextlib.suppress(ConnectionResetError):  # it did not read all that was sent
            assert self.socket.recv(1 << 16) == b""


def read_at(fd: int, at: Location) -> bytes:
    """As a mount does; closes the descriptor."""
    try:
        return _native.read_record(fd, at.offset, at.header_len, at.payload_len, at.segno)
    finally:
        os.close(fd)
