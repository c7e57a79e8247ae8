"""hintsd's end of the plan channel (docs/WIRE.md): one mount, found, connected and connected again.

`MountLink.run` keeps a channel to the mount's server for as long as it runs, whatever happens to
servers and to the mount; what it is told it hands on as events, in order. `LinkTree` is a
directory of the mount as hintsd/orders/folders.py wants it, listed in bulk over the channel.

INVARIANT: an event after `Up` comes from that channel, until `Down`; commands are sent to a
channel, not to the link, so none of an old plan reaches a new server.
It knows no plan: what to send, and what the answers mean, is the Director's.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import trio

from fusecache.base import mounts, wire
from fusecache.base.disk.probe import Probe
from fusecache.base.wire import Fields, Frame, WireError
from fusecache.base.wire_trio import FrameStream
from hintsd.follow.trail import Passed
from hintsd.orders.folders import DIRECTORY, FILE, DatasetError, Listing, OsTree, Target
from hintsd.users import quota
from hintsd.users.rights import Eyes

log = logging.getLogger(__name__)

LISTINGS_MOST: Final = 64
LISTINGS_AHEAD_MOST: Final = 16  # listed before they are asked for: they lie in memory
LISTING_TIMEOUT_S: Final = 60.0  # without a server that answers
HELLO_TIMEOUT_S: Final = 10.0
HELLO_BYTES_MOST: Final = 64 << 10
PAUSE_FIRST_S: Final = 0.05
PAUSE_MOST_S: Final = 1.0
PATH_BYTES_MOST: Final = 64 << 10
COUNT_MOST: Final = 1 << 62

Inos: TypeAlias = npt.NDArray[np.uint32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Processes: TypeAlias = npt.NDArray[np.uint32]

_GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
_STATE_FIELDS: Final = (
    *("ram_bytes", "ram_limit_bytes", "ssd_bytes", "ssd_limit_bytes", "ssd_room_bytes"),
    *("origin_bytes", "origin_files", "origin_bytes_per_s", "depth", "queued_stage"),
    *("queued_fetch", "in_flight", "changes_seen", "segments_lost"),
)
_LATER_FIELDS: Final = ("recording", "ssd_disk_full", "pins", "ssd_bytes_per_s")
_LOG_FIELDS: Final = ("packing", "log_written_bytes", "log_waiting_bytes", "log_segments")


class LinkDown(Exception):
    """The channel has ended, or there is none; one line."""


class MountFacts(NamedTuple):
    """What a server says of its mount."""

    identity: str  # new with each mount
    mountpoint: str
    cache_dir: str
    ram_bytes: int
    pid_namespace: int  # of its process ids: wire.pid_namespace; 0: unknown
    layout: str = "static"  # of the samples on SSD (docs/LOG.md): or "reorder", "auto"
    probe: Probe | None = None  # what was measured of the SSD
    knows_pins: bool = False
    evicts: bool = False  # files, one by one


class Up(NamedTuple):
    channel: Channel


class Down(NamedTuple):
    pass


class Gone(NamedTuple):
    """There is no mount at the mount point any more; `Up` may come all the same, later."""


class Seen(NamedTuple):
    inos: Inos
    kinds: Bytes
    processes: Processes  # who asked
    parents: Processes  # who has started that one
    lost: int


class Done(NamedTuple):
    inos: Inos
    results: Bytes


class State(NamedTuple):
    values: dict[str, int]
    probe: Probe | None = None  # once it is measured


Event: TypeAlias = Up | Down | Gone | Seen | Done | State


@dataclass(eq=False, slots=True)
class _Asked:
    """A listing that the server owes us."""

    path: bytes
    pages: list[Fields] = field(default_factory=list)
    error: str | None = None
    answered: trio.Event = field(default_factory=trio.Event)
    is_whole: bool = False


class Channel:
    """One connection to a server, after its hello."""

    def __init__(self, frames: FrameStream, facts: MountFacts) -> None:
        self.facts = facts
        self._frames = frames
        self._asked: deque[_Asked] = deque()
        self._asking = trio.Lock()  # what is asked is answered in the same order
        self._slots = trio.CapacityLimiter(LISTINGS_MOST)
        self._is_closed = False

    async def send(
        self,
        kind: str,
        inos: Inos,
        store: Bytes | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        """One command of the plan; `fields`: all that a `pack` or a `pin` says. LinkDown."""
        if kind == "clear":
            await self._send(kind)
        elif fields is not None:
            await self._send(kind, **fields)
        elif store is None:
            await self._send(kind, inos=inos)
        else:
            await self._send(kind, inos=inos, store=store)

    async def send_passed(self, recording: int, passed: Passed) -> None:
        """To a recording that the server has told of. LinkDown."""
        await self._send(
            "passed", recording=recording, job=passed.job, position=passed.position,
            begin=passed.begin, samples=passed.samples, inos=passed.inos,
        )  # fmt: skip

    async def _send(self, kind: str, **fields: Any) -> None:
        try:
            await self._frames.send(kind, **fields)
        except (WireError, *_GONE) as error:
            raise LinkDown(str(error) or "the connection has ended") from None

    async def list(self, path: bytes) -> list[Fields]:
        """The `directory` frames of a path relative to the mount. OSError, LinkDown."""
        asked = _Asked(path)
        await self._slots.acquire_on_behalf_of(asked)  # until the server has answered
        async with self._asking:
            if self._is_closed:
                self._slots.release_on_behalf_of(asked)
                raise LinkDown("the server went away")
            self._asked.append(asked)
            # Cancelled in the middle of a frame, the connection would be of no more use.
            with trio.CancelScope(shield=True):
                await self._send("list", path=path)
        await asked.answered.wait()
        if asked.error is not None:
            raise _listing_error(asked.error, path)
        if not asked.is_whole:
            raise LinkDown("the server went away while it listed")
        return asked.pages

    async def receive(
        self, events: trio.MemorySendChannel[Event], gather_s: Callable[[], float]
    ) -> None:
        """Hand on what the server says until it goes. After an event, what comes within `gather_s`
        is read at once, unless a listing is awaited. WireError.
        """
        try:
            while (frame := await self._frames.receive()) is not None:
                if frame.type == "directory":
                    self._take_page(frame.fields)
                    continue
                await events.send(_event(frame))
                if not (self._asked or self._frames.has_frames):
                    await trio.sleep(gather_s())
        finally:
            self._is_closed = True
            while self._asked:
                self._answered()

    def _take_page(self, fields: Fields) -> None:
        if not self._asked:
            raise WireError("directory: nothing was asked")
        asked = self._asked[0]
        if fields.bytes("path", PATH_BYTES_MOST) != asked.path:
            raise WireError("directory: field path is not what was asked")
        asked.error = fields.optional_str("error", 1024)
        counts = {
            len(fields.array(name, kind))
            for name, kind in (
                *(("inos", "u4"), ("sizes", "u8"), ("kinds", "u1"), ("stored", "u1")),
                ("name_lengths", "u2"),
            )
        }
        names_bytes = int(fields.array("name_lengths", "u2").sum(dtype=np.int64))
        if len(counts) != 1 or names_bytes != len(fields.bytes("names", wire.FRAME_BYTES_MOST)):
            raise WireError("directory: its fields are of different lengths")
        asked.pages.append(fields)
        if fields.bool("last"):
            asked.is_whole = True
            self._answered()

    def _answered(self) -> None:
        asked = self._asked.popleft()
        self._slots.release_on_behalf_of(asked)
        asked.answered.set()

    async def aclose(self) -> None:
        await self._frames.aclose()


def _event(frame: Frame) -> Event:
    fields = frame.fields
    if frame.type == "seen":
        inos, kinds = fields.array("inos", np.uint32), fields.array("kinds", np.uint8)
        # a server of an earlier version does not tell who asked
        processes, parents = (
            fields.array(name, np.uint32) if name in fields else np.zeros_like(inos)
            for name in ("processes", "parents")
        )
        if not len(inos) == len(kinds) == len(processes) == len(parents):
            raise WireError("seen: its fields are of different lengths")
        return Seen(inos, kinds, processes, parents, fields.int("lost", 0, COUNT_MOST))
    if frame.type == "done":
        inos, results = fields.array("inos", np.uint32), fields.array("results", np.uint8)
        if len(inos) != len(results):
            raise WireError("done: field results has another length than inos")
        return Done(inos, results)
    if frame.type == "state":
        values = {name: fields.int(name, 0, COUNT_MOST) for name in _STATE_FIELDS}
        for name in _LATER_FIELDS:  # a server of an earlier version does not tell them
            values[name] = fields.optional_int(name, 0, COUNT_MOST) or 0
        for name in _LOG_FIELDS:  # a server that knows no log does not tell them
            if (value := fields.optional_int(name, 0, COUNT_MOST)) is not None:
                values[name] = value
        return State(values, _probe(fields))
    if frame.type == "error":
        raise WireError(f"the server says: {fields.str('message', 4096)}")
    raise WireError(f"{frame.type}: no such frame")


def _probe(fields: Fields) -> Probe | None:
    """None: the mount has none, or tells it in another way than we know."""
    found = fields.optional_map("probe")
    if found is None:
        return None
    try:
        return Probe.from_map(found.raw())
    except ValueError as error:
        log.info("%s", error)
        return None


def _listing_error(text: str, path: bytes) -> OSError:
    """The OSError that a server means with "ENOENT: …"."""
    number = getattr(errno, text.partition(":")[0], errno.EIO)
    return OSError(number, os.strerror(number), os.fsdecode(path))


class MountLink:
    """See the module. `mountpoint`: as the mount table has it."""

    def __init__(self, mountpoint: str, events: trio.MemorySendChannel[Event]) -> None:
        self.mountpoint = mountpoint
        self._named = {"mount": mountpoint}  # of log lines
        self.refusal = "has no server that answers"
        """Why there is no channel; for a sentence that begins with the mount point."""
        self.gather_s = 0.0
        """Events may wait for so long, to be read together."""
        self._events = events
        self._channel: Channel | None = None
        self._came_up = trio.Event()

    @property
    def identity(self) -> str | None:
        """Of the mount that the present channel leads to."""
        return self._channel.facts.identity if self._channel is not None else None

    def gather(self, seconds: float) -> None:
        """From now on events may wait for so long."""
        self.gather_s = seconds

    async def channel(self, timeout_s: float) -> Channel:
        """The present channel, or the next one. LinkDown: there was none in time."""
        with trio.move_on_after(timeout_s):
            while self._channel is None:
                await self._came_up.wait()
        if self._channel is None:
            raise LinkDown(self.refusal)
        return self._channel

    async def list(self, path: bytes) -> list[Fields]:
        """As `Channel.list`, asked again when the server dies. OSError."""
        while True:
            try:
                channel = await self.channel(LISTING_TIMEOUT_S)
            except LinkDown as down:
                raise OSError(errno.ENOTCONN, str(down), self.mountpoint) from None
            try:
                return await channel.list(path)
            except LinkDown:
                await trio.sleep(PAUSE_FIRST_S)

    def _is_mounted(self) -> bool:
        mount = mounts.at(self.mountpoint)
        return mount is not None and mount.is_fusecache

    async def run(self) -> None:
        """Connect, hand on what is told, connect again: until cancelled."""
        pause_s, is_gone = PAUSE_FIRST_S, False
        while True:
            if not self._is_mounted():
                self.refusal = "is not mounted any more"
                if not is_gone:
                    await self._events.send(Gone())
                is_gone = True
            elif await self._converse():
                pause_s, is_gone = PAUSE_FIRST_S, False
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MOST_S)

    async def _converse(self) -> bool:
        """One connection, to its end; whether there was one."""
        try:
            channel = await self._connect()
        except (OSError, WireError, LinkDown, *_GONE, trio.TooSlowError) as error:
            self._refused(str(error) or type(error).__name__)
            return False
        try:
            await self._events.send(Up(channel))
            self._channel = channel
            self._came_up.set()
            await channel.receive(self._events, lambda: self.gather_s)
        except WireError as error:
            log.warning(
                "%s: the plan channel is closed: %s", self.mountpoint, error, extra=self._named
            )
        finally:
            self._channel, self._came_up = None, trio.Event()
            self.refusal = "has no server that answers"
            await channel.aclose()
        await self._events.send(Down())
        return True

    def _refused(self, reason: str) -> None:
        refusal = f"cannot be connected to: {reason}"
        if refusal != self.refusal:
            log.info("%s %s", self.mountpoint, refusal, extra=self._named)
        self.refusal = refusal

    async def _connect(self) -> Channel:
        connection = await trio.to_thread.run_sync(_connected, self.mountpoint)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        try:
            with trio.fail_after(HELLO_TIMEOUT_S):
                knows = {"reclaimed": True, "owned": True}
                hello = {"op": "plan", "version": wire.VERSION, **knows}
                await stream.send_all(json.dumps(hello).encode() + b"\n")
                line, rest = await _read_line(stream)
            return Channel(FrameStream(stream, rest), _facts(line))
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise


def _connected(mountpoint: str) -> socket.socket:
    mount = mounts.at(mountpoint)
    directory = mounts.runtime_directory(mount) if mount is not None else None
    if mount is None or directory is None:
        raise LinkDown("it has no runtime directory that is its user's alone")
    connection = mounts.connect(directory, mounts.CONTROL_SOCKET, HELLO_TIMEOUT_S, mount)
    if os.geteuid() != 0 and wire.peer_of(connection).uid not in (os.geteuid(), 0):
        connection.close()
        raise LinkDown("it belongs to another user")
    return connection


async def _read_line(stream: trio.SocketStream) -> tuple[bytes, bytes]:
    received = b""
    while b"\n" not in received:
        data = await stream.receive_some()
        if not data:
            raise LinkDown("its server closed the connection")
        received += data
        if len(received) > HELLO_BYTES_MOST:
            raise WireError("its server answers something else")
    line, _, rest = received.partition(b"\n")
    return line, rest


def _facts(line: bytes) -> MountFacts:
    try:
        hello = json.loads(line)
    except ValueError:
        hello = None
    if type(hello) is not dict or hello.get("ok") is not True:
        reason = hello.get("error") if type(hello) is dict else None
        raise LinkDown(f"its server refuses: {reason or 'no reason given'}")
    mount = Fields(hello, "hello").map("mount")
    return MountFacts(
        identity=mount.str("identity", 256),
        mountpoint=mount.str("mountpoint", PATH_BYTES_MOST),
        cache_dir=mount.str("cache_dir", PATH_BYTES_MOST),
        ram_bytes=mount.int("ram_bytes", 0, COUNT_MOST),
        pid_namespace=mount.optional_int("pid_namespace", 0, COUNT_MOST) or 0,
        layout=mount.optional_str("layout", 16) or "static",
        probe=_probe(mount),
        knows_pins=bool(mount.optional_int("pins", 0, 1)),
        evicts=bool(mount.optional_int("evicts", 0, 1)),
    )


@dataclass(eq=False, slots=True)
class _Ahead:
    """A listing asked for before it is needed."""

    pages: list[Fields] = field(default_factory=list)
    error: OSError | None = None
    is_here: trio.Event = field(default_factory=trio.Event)


class LinkTree:
    """The Tree (orders/folders.py) of a mount's directory `root`, relative to it, for a thread
    that trio started. The directories that come next are listed ahead.

    `nursery`: of the trio task that waits for the thread; cancel it at the end.
    """

    def __init__(
        self,
        link: MountLink,
        root: bytes,
        nursery: trio.Nursery,
        listed: list[bytes],
        upcoming: Iterable[bytes] = (),
        eyes: Eyes | None = None,
    ) -> None:
        """`listed`: gets each directory before it is looked into, those above it first. `eyes`: of
        another user, who alone follows links: who made them is not known.
        """
        self._link, self._root, self._nursery, self._listed = link, root, nursery, listed
        self._eyes, self._entries = eyes, 0
        self._mountpoint = os.fsencode(link.mountpoint)
        top = os.path.join(self._mountpoint, root)
        self._os = OsTree(top) if eyes is None else OsTree(top, eyes.stat)
        self._upcoming = deque(upcoming)
        self._follows = not self._upcoming  # what comes next is what listings show
        self._ahead: dict[bytes, _Ahead] = {}
        self._where = np.zeros(0, np.uint8)

    def listing(self, path: bytes) -> Listing:
        self._listed.append(path)
        try:
            pages = trio.from_thread.run(self._pages, path)
        except NotADirectoryError:
            return self._listing_through_link(path)
        return self._read(path, pages)

    def resolve(self, path: bytes) -> Target:
        return self._os.resolve(path)

    def where(self, inos: Inos) -> Bytes:
        """Of each, as it was listed, the bits of `wire.Place`."""
        known = inos < len(self._where)
        where = np.zeros(len(inos), np.uint8)
        where[known] = self._where[inos[known]]
        return where

    def _listing_through_link(self, path: bytes) -> Listing:
        """The server follows no symlinks. One that leads out of the mount is the kernel's."""
        inside = relative(self._real(path), self._mountpoint)
        asked = os.path.normpath(os.path.join(self._root, path)) if self._root or path else b""
        if inside is None:
            if self._eyes is not None:
                raise DatasetError(f"{os.fsdecode(path)} leads out of the mount")
            return self._os.listing(path)
        if inside == asked:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(path))
        return self._read(path, trio.from_thread.run(self._link.list, inside))

    def _real(self, path: bytes) -> bytes:
        """Without links."""
        named = os.path.join(self._mountpoint, self._root, path)
        if self._eyes is None:
            return os.path.realpath(named)
        real = self._eyes.real(named)
        if real is None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))
        self._listed[-1] = real  # what is looked into, wherever the link leads by then
        return real

    async def _pages(self, path: bytes) -> list[Fields]:
        ahead = self._ahead.pop(path, None)
        if ahead is None:
            ahead = _Ahead()
            self._nursery.start_soon(self._fetch, path, ahead)
        await ahead.is_here.wait()
        if ahead.error is not None:
            raise ahead.error
        if self._follows:
            self._foresee(path, ahead.pages)
        while self._upcoming and len(self._ahead) < LISTINGS_AHEAD_MOST:
            coming = self._upcoming.popleft()
            if coming != path and coming not in self._ahead:
                self._ahead[coming] = _Ahead()
                self._nursery.start_soon(self._fetch, coming, self._ahead[coming])
        return ahead.pages

    async def _fetch(self, path: bytes, ahead: _Ahead) -> None:
        try:
            whole = b"/".join(part for part in (self._root, path) if part)
            ahead.pages = await self._link.list(whole)
        except OSError as error:
            ahead.error = error
        ahead.is_here.set()

    def _foresee(self, path: bytes, pages: list[Fields]) -> None:
        """`sample_files` goes through the classes in order, and through all below one first."""
        names = [name for page in pages for name in _directory_names(page)]
        names.sort(key=os.fsdecode, reverse=bool(path))
        below = [path + b"/" + name if path else name for name in names]
        self._upcoming.extendleft(reversed(below))

    def _read(self, path: bytes, pages: list[Fields]) -> Listing:
        def joined(name: str, kind: str) -> npt.NDArray[Any]:
            parts = [page.array(name, kind) for page in pages]
            return np.concatenate(parts) if parts else np.empty(0, kind)

        inos, kinds = joined("inos", "u4"), joined("kinds", "u1")
        self._entries += len(inos) + 1 + len(path) // quota.ENTRY_BYTES
        if self._eyes is not None and self._entries > quota.ENTRIES_MOST:
            raise DatasetError(f"it has more than {quota.ENTRIES_MOST:,} files and directories")
        files = kinds == FILE
        if files.any():
            most = int(inos[files].max())
            if most >= len(self._where):
                grown = np.zeros(most + most // 4 + 1, np.uint8)
                grown[: len(self._where)] = self._where
                self._where = grown
            self._where[inos[files]] = joined("stored", "u1")[files]
        names = b"".join(page.bytes("names", wire.FRAME_BYTES_MOST) for page in pages)
        return Listing(
            path, inos, joined("sizes", "u8"), kinds, joined("name_lengths", "u2"), names
        )


def _directory_names(page: Fields) -> list[bytes]:
    kinds = page.array("kinds", "u1")
    rows = np.flatnonzero(kinds == DIRECTORY)
    if not len(rows):
        return []
    ends = np.cumsum(page.array("name_lengths", "u2"), dtype=np.int64)
    starts = ends - page.array("name_lengths", "u2")
    names = page.bytes("names", wire.FRAME_BYTES_MOST)
    return [names[starts[row] : ends[row]] for row in rows]


def relative(path: bytes, directory: bytes) -> bytes | None:
    """Absolute `path` relative to `directory` (b"": the same); None: it lies elsewhere."""
    if path == directory:
        return b""
    prefix = directory.rstrip(b"/") + b"/"
    return path[len(prefix) :] if path.startswith(prefix) else None
