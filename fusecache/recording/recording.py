"""The mount's end of a recording (docs/TRACES.md): what the C part noted, sent to the recorder.

One recorder at a time, on a connection of the control socket; the recording lives as long as that.
INVARIANT: readers never wait for it: what a slow recorder does not take is counted and lost.
INVARIANT: an inode's name is sent before the first access of it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from fusecache import _native
from fusecache.base.errors import EXIT_BUSY
from fusecache.base.wire import WireError
from fusecache.base.wire_trio import FrameStream
from fusecache.control.control import Message, Send
from fusecache.read.operations import Operations
from fusecache.recording.passings import Passings

log = logging.getLogger(__name__)

VERSION = 1
TAKE_EVERY_S = 0.5  # each time costs some 0.5 ms of CPU in two processes, whatever there is
LAST_WORDS_S = 1.0  # that the end of a mount waits for a recorder
TAKE_MOST = 65_536
HINTS_LAST_S = 0.3  # so much later hintsd has told what was certain when the recording ended
HINTS_WAIT_S = 1.0  # until hintsd knows of the recording: it will tell from then on

_ACCESS = np.dtype([("time_ns", "<u8"), ("ino", "<u4"), ("who", "<u4")])
_UNKNOWN, _FILE, _OTHER = 0, 1, 2

Accesses = npt.NDArray[np.void]


class Recording:
    """Serves recorders, one at a time."""

    def __init__(
        self,
        operations: Operations,
        fuse_fd: int,
        passings: Passings,
        has_hintsd: Callable[[], bool],
    ) -> None:
        self._operations = operations
        self._fuse_fd = fuse_fd
        self._passings = passings
        self._has_hintsd = has_hintsd
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
            self._passings.end()
            self._is_running = False

    async def _record(self, every_open: bool, send: Send, stream: trio.SocketStream) -> None:
        is_zero_open = self._operations.zero_open
        has_lookups = is_zero_open and every_open
        now_ns = time.monotonic_ns()
        _native.trace_begin(wires=is_zero_open and not every_open, lookups=has_lookups)
        if has_lookups:
            await trio.to_thread.run_sync(_native.expire_names, self._fuse_fd)
        sees_every_open = has_lookups or not is_zero_open
        if not sees_every_open:  # else it is exact by itself
            self._passings.begin()
        if self._passings.recording and self._has_hintsd():
            with trio.move_on_after(HINTS_WAIT_S):
                await self._passings.told.wait()
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
                if is_last and self._passings.recording and self._has_hintsd():
                    await trio.sleep(HINTS_LAST_S)
                await self._send_all(frames, seen)
                if is_last:
                    break
                try:
                    with trio.move_on_after(TAKE_EVERY_S):
                        await ended.wait()
                except trio.Cancelled:  # the mount ends
                    with trio.move_on_after(LAST_WORDS_S, shield=True):
                        await self._send_all(frames, seen)
                        await frames.send("ended")
                    raise
            await frames.send("ended")

    async def _send_all(self, frames: FrameStream, seen: _Seen) -> None:
        passed = self._passings.take()
        while await self._send_some(frames, seen):  # by which hintsd knew
            pass
        for stretch in passed:
            await self._send_names(frames, seen, stretch.inos)
            await frames.send(
                "passed", job=stretch.job, position=stretch.position, begin=stretch.begin,
                samples=stretch.samples, time_ns=stretch.time_ns, inos=stretch.inos,
            )  # fmt: skip

    async def _send_some(self, frames: FrameStream, seen: _Seen) -> bool:
        """Whether there may be more."""
        taken, lost = _native.take_accesses(TAKE_MOST)
        accesses = np.frombuffer(taken, _ACCESS)
        seen.lost += lost  # after all that the ring holds
        await self._send_names(frames, seen, accesses["ino"])
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

    async def _send_names(
        self, frames: FrameStream, seen: _Seen, inos: npt.NDArray[np.uint32]
    ) -> None:
        for names in seen.learn(inos):
            await frames.send("names", **names)


class _Seen:
    """Which inodes the recorder knows, and what it has not been told."""

    def __init__(self) -> None:
        self.lost = 0  # accesses
        self._kinds = np.zeros(1024, np.uint8)

    def learn(self, inos: npt.NDArray[np.uint32]) -> Iterator[dict[str, Any]]:
        """The fields of `names` frames for those among `inos` that are files and new. What hintsd
        names may be no inode at all.
        """
        inos = inos[(inos > 0) & (inos <= _native.count())]
        highest = int(inos.max(initial=0))
        if highest >= len(self._kinds):
            self._kinds.resize(max(highest + 1, 2 * len(self._kinds)), refcheck=False)
        new = np.unique(inos[self._kinds[inos] == _UNKNOWN])
        while len(new):
            sizes, lengths, names = _native.describe_files(new.tobytes())
            path_bytes = np.frombuffer(lengths, np.uint32)
            are_files = path_bytes > 0
            told, new = new[: len(path_bytes)], new[len(path_bytes) :]
            self._kinds[told] = np.where(are_files, _FILE, _OTHER)
            yield {
                "inos": told[are_files],
                "sizes": np.frombuffer(sizes, np.uint64)[are_files],
                "lengths": path_bytes[are_files],
                "names": names,
            }

    def are_files(self, inos: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = self._kinds[inos] == _FILE
        return mask
