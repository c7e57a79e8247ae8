"""The mount's end of the plan channel (docs/WIRE.md): a hintsd says what it wants, here is done.

INVARIANT: one channel at a time, and the newest wins. The plan lives as long as its channel.
INVARIANT: commands take effect in the order they came; `list`, `arm` and `evict` alone do not hold
up those behind them.
INVARIANT: whatever comes over the channel, readers do not notice, and a hintsd that does not read
what it is sent is cut off.
It does no planning: what to want, and when, is the daemon's business.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import trio

from fusecache import _native
from fusecache.ahead.marks import Inos
from fusecache.ahead.prefetcher import Prefetcher
from fusecache.base.disk.probe import Device, Probe
from fusecache.base.errors import OriginError, UnknownInode
from fusecache.base.metrics import (
    CHANGES_SEEN,
    DEPTH,
    FRONT_BYTES_STAGED,
    IN_FLIGHT,
    OVERTAKING_READS,
    QUEUED_FETCH,
    QUEUED_STAGE,
    RAM_BYTES,
    SEGMENTS_LOST,
    Metrics,
)  # fmt: skip
from fusecache.base.wire import CHUNKS_MOST, VERSION, Fields, Observed, Standing, WireError
from fusecache.base.wire_trio import FrameStream
from fusecache.cached.shared import SharedBlocks
from fusecache.control.control import Message, Send
from fusecache.read.fetcher import read_so_far
from fusecache.read.operations import Operations
from fusecache.recording.passings import Passings
from fusecache.reorder.packer import Packer
from fusecache.store import Store

log = logging.getLogger(__name__)

PATH_BYTES_MOST = 64 << 10
PUBLISHED_WITHIN_S = 2.0  # else it goes to the next log, which another epoch reads in order
LISTINGS_MOST = 64
LISTING_PAGE = 8192  # entries a frame: fits with the longest names
ARMED_WAITING_MOST = 4096  # frames
REPORT_EVERY_S = 0.02
# What is seen while nothing that is read was wanted (a hint was wrong): frames cost readers' time.
QUIET_AFTER_S, QUIET_EVERY_S = 1.0, 0.1
# What is seen while nothing is to be moved: a plan's next decision waits for none of it.
CALM_AFTER_S, CALM_EVERY_S = 0.25, 0.05
REPORT_MOST = 1 << 18  # inodes a frame
SEEN_MOST = 65_536
STATE_EVERY_S = 0.5
MEASURED_BYTES_LEAST, MEASURED_WEIGHT = 1 << 20, 0.3
EPOCHS_MOST = 16  # of a log
PINS_MOST = 1 << 62  # lists
EVICT_MOST, EVICT_WAITING_MOST = 65_536, 64  # inodes a frame; frames
PAGE_BYTES, BUFFER_PAGES_MOST = 4096, 1024  # of a chunk's buffer

GONE = (trio.BrokenResourceError, trio.ClosedResourceError)
ROOT = 1


class Plan:
    """Serves plan channels."""

    def __init__(
        self,
        *,
        operations: Operations,
        prefetcher: Prefetcher,
        packer: Packer,
        preload: Callable[[int], Awaitable[None]],
        store: Store,
        metrics: Metrics,
        passings: Passings,
        mount: Message,
        device: Device,
        located: Callable[[], Awaitable[None]] | None = None,
        shared: SharedBlocks | None = None,
    ) -> None:
        """`preload(directory)` returns when the front knows where the files of a listed directory
        lie; `located()` when this host knows which files others ask it for, or that takes long.
        `mount`: what a hintsd is told of it (docs/WIRE.md). `device`: of the SSD tier.
        """
        self._operations = operations
        self._prefetcher = prefetcher
        self.packer = packer
        self._preload = preload
        self._store = store
        self.metrics = metrics
        self.passings = passings
        self._mount = mount
        self.device = device
        self._located = located
        self._shared = shared
        self._newest = 0
        self._lock = trio.Lock()
        self._scope: trio.CancelScope | None = None
        self.is_connected = False

    async def serve(self, request: Message, send: Send, stream: trio.SocketStream) -> None:
        """Speak with one hintsd until it goes, misbehaves, or another one comes."""
        if request.get("version") != VERSION:
            await send({"ok": False, "error": f"plan version {VERSION} is spoken here", "exit": 1})
            return
        if self._located is not None:
            await self._located()
        self._newest += 1
        number = self._newest
        if self._scope is not None:
            self._scope.cancel()
        async with self._lock:
            if number != self._newest:
                return
            with trio.CancelScope() as self._scope:
                if self._mount["layout"] == "auto":  # now: readers have hardly begun
                    self.device.measure_once()
                found = self.device.found
                known: Message = {} if found is None else {"probe": found.as_map()}
                if await self._prefetcher.can_evict():
                    known["evicts"] = 1
                await send({"ok": True, "version": VERSION, "mount": self._mount | known})
                try:
                    self.is_connected = True
                    await _Channel(self, FrameStream(stream), found).run(
                        tells_reclaimed=request.get("reclaimed") is True,
                        tells_owned=request.get("owned") is True,
                    )
                finally:
                    self.is_connected = False
                    self._prefetcher.end()
                    self.packer.abandon()

    # ---- what a channel asks for -----------------------------------------------------------------

    async def directory_at(self, path: bytes) -> int:
        """The inode of a directory, listed, and what is stored of it known. Raises OriginError."""
        ino = ROOT
        for name in [part for part in path.split(b"/") if part]:
            await self._list(ino)
            ino = _native.lookup(ino, name)
            if ino < 0:
                raise OriginError(errno.EACCES)
            if ino == 0:
                raise OriginError(errno.ENOENT)
        await self._list(ino)
        await self._operations.list_checked(ino)
        await self._preload(ino)
        return ino

    async def _list(self, ino: int) -> None:
        if not stat.S_ISDIR(_native.attributes(ino)[0]):
            raise OriginError(errno.ENOTDIR)
        await self._operations.list(ino)

    async def state(self) -> dict[str, int]:
        pins = self._prefetcher.pins.number  # now: what is said of room heeds them at least
        usage = await trio.to_thread.run_sync(self._store.usage)
        stored_bytes = self._store.stored_bytes()
        room_bytes = await trio.to_thread.run_sync(self.packer.room_bytes, abandon_on_cancel=True)
        is_full = room_bytes == 0 and await self._is_disk_full()
        if not self.packer.is_open:  # hintsd may have been told of what was stored meanwhile
            room_bytes = max(0, room_bytes - (self._store.stored_bytes() - stored_bytes))
        if self._shared is not None:
            room_bytes += self._shared.room_bytes
        now = self.metrics.read()
        origin_files, origin_bytes = read_so_far(now)
        return {
            "ram_bytes": now[RAM_BYTES],
            "ram_limit_bytes": self._mount["ram_bytes"],
            "ssd_bytes": usage.bytes,
            "ssd_limit_bytes": usage.limit_bytes,
            "ssd_room_bytes": room_bytes,
            "ssd_disk_full": int(is_full),
            "origin_bytes": origin_bytes,
            "origin_files": origin_files,
            "depth": now[DEPTH],
            "queued_stage": now[QUEUED_STAGE],
            "queued_fetch": now[QUEUED_FETCH],
            "in_flight": now[IN_FLIGHT],
            "changes_seen": now[CHANGES_SEEN],
            "segments_lost": now[SEGMENTS_LOST],
            "recording": self.passings.recording,
            "pins": pins,
            **self.packer.state(),
        }

    @property
    def origin_bytes(self) -> int:
        """That were read from it, whoever has read them."""
        return read_so_far(self.metrics.read())[1]

    async def _is_disk_full(self) -> bool:
        return await trio.to_thread.run_sync(self._store.full_disk_bytes) is not None

    @property
    def prefetcher(self) -> Prefetcher:
        return self._prefetcher


class _Channel:
    """One connection."""

    def __init__(self, plan: Plan, frames: FrameStream, known: Probe | None) -> None:
        """`known`: what hintsd has been told of the device."""
        self._plan = plan
        self._tells_owned = False
        self._known = known
        self._prefetcher = plan.prefetcher
        self._frames = frames
        self._done_inos, self._done_results = bytearray(), bytearray()
        self._has_done = trio.Event()
        self._send_path, self._paths = trio.open_memory_channel[bytes](LISTINGS_MOST - 1)
        self._is_packing = False  # the pieces of a log are coming
        self._moved_at = trio.current_time()  # when something was to be staged, fetched or dropped
        self._send_armed, self._armed = trio.open_memory_channel[Inos](ARMED_WAITING_MOST)
        self._send_evicted, self._evicted = trio.open_memory_channel[Inos](EVICT_WAITING_MOST)
        self._sending_done, self._sending_state = trio.Lock(), trio.Lock()
        self._origin_rate = _Rate(plan.origin_bytes)
        self._ssd_rate = _SsdRate(*self._staged())

    async def run(self, *, tells_reclaimed: bool, tells_owned: bool) -> None:
        """`tells_owned`: it is told which files other hosts of the pool ask this one for."""
        self._tells_owned = tells_owned
        self._prefetcher.begin(
            self._report, tells_reclaimed=tells_reclaimed, tells_owned=tells_owned
        )
        try:
            async with trio.open_nursery() as nursery:
                for task in (self._list, self._arm, self._evict, self._tell_done, self._tell_seen,
                             self._tell_state):  # fmt: skip
                    nursery.start_soon(task)
                await self._obey()
                nursery.cancel_scope.cancel()
        except* WireError as group:
            line = str(_first(group))
            log.info("the plan channel is closed: %s", line)
            with trio.move_on_after(1):
                with contextlib.suppress(WireError, *GONE):
                    await self._frames.send("error", message=line)
        except* GONE:
            pass

    async def _obey(self) -> None:
        while (frame := await self._frames.receive()) is not None:
            await self._command(frame.type, frame.fields)

    async def _command(self, kind: str, fields: Fields) -> None:
        if kind == "list":
            try:
                self._send_path.send_nowait(fields.bytes("path", PATH_BYTES_MOST))
            except trio.WouldBlock:
                raise WireError(f"more than {LISTINGS_MOST} listings are unanswered") from None
        elif kind == "clear":
            self._prefetcher.clear()
            self._done_inos.clear()
            self._done_results.clear()
        elif kind == "passed":
            self._plan.passings.put(fields)
        elif kind == "pack":
            await self._pack(fields)
        elif kind == "pin":
            await self._pin(fields)
        elif kind in ("stage", "fetch", "evict", "cancel", "drop", "arm"):
            await self._command_inos(kind, fields.array("inos", np.uint32), fields)
        else:
            raise WireError(f"{kind}: no such frame")

    async def _pin(self, fields: Fields) -> None:
        inos, number = fields.array("inos", np.uint32), fields.int("number", 1, PINS_MOST)
        others, last = fields.bool("others"), fields.bool("last")
        await self._prefetcher.pin(inos, number, others, last)
        if last:
            await self._send_state()

    async def _evict(self) -> None:
        async for inos in self._evicted:
            await self._prefetcher.evict(inos)
            await self._send_done()
            await self._send_state()

    async def _pack(self, fields: Fields) -> None:
        packer, chunks = self._plan.packer, fields.int("chunks", 0, CHUNKS_MOST)
        if packer.is_open and not self._is_packing:  # what was fetched for it goes there
            with trio.move_on_after(PUBLISHED_WITHIN_S):
                await self._prefetcher.published()
        if not chunks:
            self._is_packing = False
            is_end = "last" not in fields or fields.bool("last")
            await trio.to_thread.run_sync(packer.end if is_end else packer.finish)
            return
        size_bytes = fields.int("bytes", 1, 1 << 62)
        samples = fields.int("samples", 1, size_bytes)
        buffer_bytes = fields.int("buffer", 1, BUFFER_PAGES_MOST * PAGE_BYTES)
        epochs = fields.optional_int("epochs", 1, EPOCHS_MOST) or 1
        first = fields.int("first", 0, chunks)
        lengths, inos = fields.array("lengths", np.uint32), fields.array("inos", np.uint32)
        last = fields.bool("last")
        if buffer_bytes % PAGE_BYTES:
            raise WireError(f"pack: field buffer is no multiple of {PAGE_BYTES}")
        if first + len(lengths) > chunks or int(lengths.sum(dtype=np.uint64)) != len(inos):
            raise WireError("pack: field lengths does not fit the others")
        if not self._is_packing:
            await trio.to_thread.run_sync(
                packer.begin, chunks, size_bytes, samples, buffer_bytes, epochs
            )
        self._is_packing = True
        await trio.to_thread.run_sync(packer.assign, first, lengths.tolist(), inos)
        if last:
            self._is_packing = False
            await trio.to_thread.run_sync(packer.open)
            await self._send_state()  # with less room: what is stored next goes by that

    async def _command_inos(self, kind: str, inos: Inos, fields: Fields) -> None:
        if kind != "arm":
            self._moved_at = trio.current_time()
        try:
            if kind == "stage":
                store = fields.array("store", np.uint8)
                if len(store) != len(inos):
                    raise WireError("stage: field store has another length than inos")
                self._prefetcher.stage(inos, store)
            elif kind == "fetch":
                self._prefetcher.fetch(inos)
            elif kind == "cancel":
                self._prefetcher.cancel(inos)
            elif kind == "drop":
                await self._prefetcher.drop(inos)
            elif kind == "evict":
                if len(inos) > EVICT_MOST:
                    raise ValueError(f"more than {EVICT_MOST} inos")
                self._send_evicted.send_nowait(inos)
            else:
                self._send_armed.send_nowait(inos)
        except ValueError as error:
            raise WireError(f"{kind}: {error}") from None
        except trio.WouldBlock:
            raise WireError(f"{kind}: too many are waiting") from None

    async def _arm(self) -> None:
        async for inos in self._armed:
            await self._prefetcher.arm(inos)

    # ---- listings --------------------------------------------------------------------------------

    async def _list(self) -> None:
        async for path in self._paths:
            try:
                await self._send_listing(path)
            except (OriginError, UnknownInode, ValueError, OSError) as error:
                number = getattr(error, "errno", None) or errno.EIO
                name = errno.errorcode.get(number, str(number))
                await self._send_page(path, f"{name}: {os.strerror(number)}", (b"",) * 6, True)

    async def _send_listing(self, path: bytes) -> None:
        ino, after = await self._plan.directory_at(path), 0
        while True:
            *columns, after = await trio.to_thread.run_sync(
                _native.list_directory, ino, after, LISTING_PAGE, self._tells_owned,
                abandon_on_cancel=True,
            )  # fmt: skip
            await self._send_page(path, None, tuple(columns), after == 0)
            if after == 0:
                return

    async def _send_page(
        self, path: bytes, error: str | None, columns: tuple[Any, ...], last: bool
    ) -> None:
        inos, sizes, kinds, stored, name_lengths, names = columns
        await self._frames.send(
            "directory", path=path, error=error, inos=inos, sizes=sizes, kinds=kinds,
            stored=stored, name_lengths=name_lengths, names=names, last=last,
        )  # fmt: skip

    # ---- what is told unasked --------------------------------------------------------------------

    def _report(self, inos: bytes, results: bytes) -> None:
        self._done_inos += inos
        self._done_results += results
        self._has_done.set()

    async def _tell_done(self) -> None:
        while True:
            await self._has_done.wait()
            await trio.sleep(REPORT_EVERY_S)
            self._has_done = trio.Event()
            await self._send_done()

    async def _send_done(self) -> None:
        async with self._sending_done:  # what is told of an inode last is so now
            inos, self._done_inos = bytes(self._done_inos), bytearray()
            results, self._done_results = bytes(self._done_results), bytearray()
            for start in range(0, len(results), REPORT_MOST):
                stop = start + REPORT_MOST
                await self._frames.send(
                    "done", inos=inos[4 * start : 4 * stop], results=results[start:stop]
                )

    async def _tell_seen(self) -> None:
        seen_fd, wanted_at = _native.seen_fd(), trio.current_time()
        while True:
            await trio.lowlevel.wait_readable(seen_fd)
            inos, kinds, processes, parents, lost = _native.take_seen(SEEN_MOST)
            if inos or lost:
                array = np.frombuffer(kinds, np.uint8)
                is_wanted = array & Standing.WANTED != 0
                is_read = array & Observed.MASK != Observed.LOOKUP
                is_late = is_read & is_wanted
                self._prefetcher.saw_reads(np.frombuffer(inos, np.uint32)[is_read])
                self._plan.metrics.add(OVERTAKING_READS, int(np.count_nonzero(is_late)))
                if np.any(is_late & (array & Standing.STAGED != 0)):
                    self._prefetcher.window.suspect()
                if is_wanted.any():
                    wanted_at = trio.current_time()
                await self._frames.send(
                    "seen", inos=inos, kinds=kinds, processes=processes, parents=parents, lost=lost
                )
            now, pause_s = trio.current_time(), REPORT_EVERY_S
            if now - wanted_at > QUIET_AFTER_S:
                pause_s = QUIET_EVERY_S
            elif now - self._moved_at > CALM_AFTER_S:
                pause_s = CALM_EVERY_S
            await trio.sleep(pause_s)

    async def _tell_state(self) -> None:
        passings = self._plan.passings
        while True:
            changed = passings.changed
            await self._send_state()
            if changed.is_set():
                continue
            passings.told.set()
            with trio.move_on_after(STATE_EVERY_S):
                await changed.wait()

    async def _send_state(self) -> None:
        async with self._sending_state:  # what is sent last is the newest
            state, now = await self._plan.state(), trio.current_time()
            rates = {
                "origin_bytes_per_s": self._origin_rate.at(state["origin_bytes"], now),
                "ssd_bytes_per_s": self._ssd_rate.at(*self._staged()),
            }
            found = self._plan.device.found
            news = {} if found is self._known or found is None else {"probe": found.as_map()}
            self._known = found
            await self._frames.send("state", **state, **news, **rates)

    def _staged(self) -> tuple[int, float]:
        """Bytes from SSD so far, and the seconds that took."""
        return self._plan.metrics.read()[FRONT_BYTES_STAGED], self._prefetcher.staging_s()


class _Rate:
    """Of a count, over half a state's time or more."""

    def __init__(self, count: int) -> None:
        self._count, self._at, self._per_s = count, trio.current_time(), 0.0

    def at(self, count: int, now: float) -> int:
        """A second, since a while ago; `count` is now's."""
        if now - self._at > STATE_EVERY_S / 2:
            self._per_s = (count - self._count) / (now - self._at)
            self._count, self._at = count, now
        return int(self._per_s)


class _SsdRate:
    """What SSD gives while something is staged from there."""

    def __init__(self, staged_bytes: int, busy_s: float) -> None:
        self._staged_bytes, self._busy_s, self._per_s = staged_bytes, busy_s, 0.0

    def at(self, staged_bytes: int, busy_s: float) -> int:
        """Bytes a second; 0: not known yet. Where few have come since the last call, most of the
        time went into files that are not there.
        """
        size_bytes, took_s = staged_bytes - self._staged_bytes, busy_s - self._busy_s
        self._staged_bytes, self._busy_s = staged_bytes, busy_s
        if size_bytes >= MEASURED_BYTES_LEAST and took_s > 0:
            rate = size_bytes / took_s
            self._per_s += MEASURED_WEIGHT * (rate - self._per_s) if self._per_s else rate
        return int(self._per_s)


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
