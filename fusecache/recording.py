"""The mount's end of a recording (docs/TRACES.md): what the C part noted, sent to who asked for it.

One recorder at a time, on a connection of the control socket; the recording lives as long as that.
INVARIANT: readers never wait for it: what a slow recorder does not take is counted and lost.
INVARIANT: an inode's name is sent before the first access of it.
"""

from __future__ import annotations

import contextlib
import logging
import stat
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import trio

from fusecache import _native
from fusecache.control import Message, Send
from fusecache.errors import EXIT_BUSY
from fusecache.operations import Operations
from fusecache.wire import WireError
from fusecache.wire_trio import FrameStream

log = logging.getLogger(__name__)

VERSION = 1
TAKE_EVERY_S = 0.1
TAKE_MOST = 65_536
NAMES_MOST = 1024  # of a frame
NAMES_BYTES_MOST = 1 << 20

_ACCESS = np.dtype([("time_ns", "<u8"), ("ino", "<u4"), ("who", "<u4")])
_UNKNOWN, _FILE, _OTHER = 0, 1, 2

Accesses = npt.NDArray[np.void]


class Recording:
    """Serves recorders, one at a time."""

    def __init__(self, operations: Operations, fuse_fd: int) -> None:
        self._operations = operations
        self._fuse_fd = fuse_fd
        self._is_running = False

    async def serve(self, request: Message, send: Send, stream: trio.SocketStream) -> None:
        """Send what is seen until the recorder ends its side of the connection, and then the rest.

        Answers with `every_open`: whether opens that the page cache serves are seen, and `now_ns`,
        the clock of the accesses' times.
        """
        if request.get("version") != VERSION:
            await send({"ok": False, "error": f"recording version {VERSION} is spoken here"})
            return
        if self._is_running:
            line = "another fusecache trace records this mount"
            await send({"ok": False, "error": line, "exit": EXIT_BUSY})
            return
        self._is_running = True
        try:
            await self._record(bool(request.get("every_open")), send, stream)
        except* WireError:
            log.info("the recording has ended: the recorder does not read")
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # it is gone
        finally:
            _native.trace_end()
            self._is_running = False

    async def _record(self, every_open: bool, send: Send, stream: trio.SocketStream) -> None:
        is_zero_open = self._operations.zero_open
        has_lookups = is_zero_open and every_open
        now_ns = time.monotonic_ns()
        _native.trace_begin(wires=is_zero_open and not every_open, lookups=has_lookups)
        if has_lookups:
            await trio.to_thread.run_sync(_native.expire_names, self._fuse_fd)
        sees_every_open = has_lookups or not is_zero_open
        await send({"ok": True, "every_open": sees_every_open, "now_ns": now_ns})
        frames, ended = FrameStream(stream), trio.Event()

        async def wait_for_end() -> None:
            with contextlib.suppress(WireError):
                await frames.receive()
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_end)
            seen = _Seen()
            while True:
                is_last = ended.is_set()
                while await self._send_some(frames, seen):
                    pass
                if is_last:
                    break
                with trio.move_on_after(TAKE_EVERY_S):
                    await ended.wait()
            await frames.send("ended")

    async def _send_some(self, frames: FrameStream, seen: _Seen) -> bool:
        """Whether there may be more."""
        taken, lost = _native.take_accesses(TAKE_MOST)
        accesses = np.frombuffer(taken, _ACCESS)
        seen.lost += lost  # after all that the ring holds
        for inos, sizes, names in seen.learn(accesses["ino"]):
            lengths = np.array([len(name) for name in names], np.uint32)
            await frames.send(
                "names", inos=inos, sizes=sizes, lengths=lengths, names=b"".join(names)
            )
        files = accesses[seen.are_files(accesses["ino"])]
        is_empty = len(accesses) < TAKE_MOST
        lost = seen.lost if is_empty else 0
        seen.lost -= lost
        if len(files) or lost:
            await frames.send(
                "accesses",
                times_ns=files["time_ns"], inos=files["ino"], who=files["who"], lost=lost,
            )  # fmt: skip
        return not is_empty


class _Seen:
    """Which inodes the recorder knows, and what it has not been told."""

    def __init__(self) -> None:
        self.lost = 0  # accesses
        self._kinds = np.zeros(1024, np.uint8)

    def learn(
        self, inos: npt.NDArray[np.uint32]
    ) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64], list[bytes]]]:
        """Inode numbers, sizes and paths of those among `inos` that are files and new."""
        highest = int(inos.max(initial=0))
        if highest >= len(self._kinds):
            self._kinds.resize(max(highest + 1, 2 * len(self._kinds)), refcheck=False)
        new = np.unique(inos[self._kinds[inos] == _UNKNOWN])
        found: list[tuple[int, int, bytes]] = []
        size_bytes = 0
        for ino in new.tolist():
            mode, _, _, _, _, size, *_ = _native.attributes(ino)
            self._kinds[ino] = _FILE if stat.S_ISREG(mode) else _OTHER
            if self._kinds[ino] == _OTHER:
                continue
            path = _native.path(ino)
            found.append((ino, size, path))
            size_bytes += len(path)
            if len(found) == NAMES_MOST or size_bytes > NAMES_BYTES_MOST:
                yield _columns(found)
                found, size_bytes = [], 0
        if found:
            yield _columns(found)

    def are_files(self, inos: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = self._kinds[inos] == _FILE
        return mask


def _columns(
    found: list[tuple[int, int, bytes]],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64], list[bytes]]:
    inos, sizes, names = zip(*found, strict=True)
    return np.array(inos, np.uint32), np.array(sizes, np.uint64), list(names)
