"""The source directory: accesses to it run here, in bounded threads, with a deadline. Two kinds do
not: the look-ups of native/front/looks.c, which passes on what takes long; and the fetch threads'
reads (native/ahead/fetch.c), which are given up by what begins them (`Fetches.give_up_on_hung` in
fetch_threads.py).

The origin may hang for ever (a dead NFS server). A reader's request that is waiting for us cannot
be killed, so no handler may wait for the origin without a limit: the call is abandoned after
`timeout_s` without progress and the reader gets EIO. Abandoned threads keep their place in the
limiter until the origin lets them go, so a dead origin holds at most `threads` of them.

The kernel asks twice: a READ that failed ahead of the reader is sent again when the reader comes to
its page. So a call about an inode that was abandoned a moment ago and still hangs soon fails:
one hang costs a reader one time-out.

ESTALE is retried once: every operation starts from the path, so the retry finds the file anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import trio

from fusecache import _native
from fusecache.base.errors import AWAY_ERRNOS, OriginChanged, OriginError, OriginTimeout
from fusecache.base.metrics import ORIGIN_ERRORS, Metrics
from fusecache.store.types import BLOCK_BYTES, Version

log = logging.getLogger(__name__)

T = TypeVar("T")
Tick = Callable[[], None]

LOCAL_TICK_NS = 20_000_000
NETWORK_TICK_NS = 2_000_000_000
LOCAL_FILE_SYSTEMS = frozenset(
    {"ext4", "xfs", "btrfs", "f2fs", "bcachefs", "tmpfs", "zfs", "overlay"}
)
# Of those that ask for no alignment. A read there costs half the CPU of one through the page cache,
# whose pages are of no further use (110 KB through FUSE: 62 against 125 us).
DIRECT_FILE_SYSTEMS = frozenset({"fuse", "nfs", "nfs4"})

GONE = 3  # _native.refresh: the name is gone or another file

HANG_S = 1.0  # how long another call about the same inode is taken for the kernel's second try
HANG_GRACE_S = 0.25  # in which the one that hangs may still come back

PROBE_TIMEOUT_S = 5.0
PROBE_AGAIN_S = 1.0

BACKGROUND_THREADS = 4

PIECE_BYTES = 1 << 20  # progress is noticed after each piece

BUFFER_BYTES_LEAST = 1 << 20  # glibc uses what is smaller again by itself (native/ahead/fetch.c)
PAGE_BYTES = 4096
BUFFERS_MOST = 16  # 64 MiB: blocks under way, and those that are kept for a second (fetcher.py)
BUFFERS_KEPT_S = 10.0


class Hang(NamedTuple):
    """A call about an inode that was given up."""

    until: float  # time.monotonic()
    ended: trio.Event  # it has come back after all


class Origin:
    """Runs functions that touch the origin.

    `threads` bounds how many run at once, and reads that have missed; `timeout_s` is the longest
    wait without progress; `tick_ns` is the age below which time stamps are not trusted: a local
    kernel's clock tick is up to 10 ms; over a network the clock is the server's, and some protocols
    keep whole seconds only.
    `reads_direct`: whole files are best read with O_DIRECT: past its own page cache.
    """

    def __init__(
        self, source_fd: int, file_system: str, threads: int, timeout_s: float, metrics: Metrics
    ) -> None:
        self.threads = threads
        self.timeout_s = timeout_s
        self.tick_ns = LOCAL_TICK_NS if file_system in LOCAL_FILE_SYSTEMS else NETWORK_TICK_NS
        self.reads_direct = file_system.partition(".")[0] in DIRECT_FILE_SYSTEMS
        self._source_fd = source_fd
        self._doubt = trio.Event()
        self._metrics = metrics
        self.available = True
        self.answered_at = 0.0  # trio clock; whatever it said
        self.last_error = ""
        self._readers = trio.CapacityLimiter(threads)
        self._background = trio.CapacityLimiter(BACKGROUND_THREADS)
        self._probes = trio.CapacityLimiter(2)
        self._hangs: dict[int, Hang] = {}

    def has_free_thread(self) -> bool:
        return self._readers.available_tokens > 0

    def has_idle_threads(self) -> bool:
        """No reader waits for a thread, and half of those in the background are free."""
        return (
            self.has_free_thread() and self._background.available_tokens > BACKGROUND_THREADS // 2
        )

    async def call(
        self, function: Callable[[Tick], T], *, background: bool = False, about: int = 0
    ) -> T:
        """function(tick) in a thread. It calls `tick` whenever it made progress, which moves the
        deadline. `about`: the inode that it asks for, if any.

        Raises OriginError with the origin's errno, OriginTimeout (EIO).
        """
        if self.hangs(about):
            with trio.move_on_after(HANG_GRACE_S):
                await self._hangs[about].ended.wait()
            if self.hangs(about):
                raise OriginTimeout(self.timeout_s)
        try:
            result = await self._attempt(function, background, about)
        except OriginError as error:
            if error.errno != errno.ESTALE or isinstance(error, OriginChanged):
                raise
            result = await self._attempt(function, background, about)
        return result

    def hangs(self, ino: int) -> bool:
        """Whether a call about the inode was given up just now, and still hangs. Any thread."""
        hang = self._hangs.get(ino)
        return hang is not None and not hang.ended.is_set() and time.monotonic() < hang.until

    def note_hang(self, ino: int, ended: trio.Event) -> None:
        now = time.monotonic()
        self._hangs = {i: hang for i, hang in self._hangs.items() if now < hang.until}
        self._hangs[ino] = Hang(now + HANG_S, ended)

    async def refresh(self, ino: int) -> bool | None:
        """Look at a known inode again, into the table.

        True: it has changed. False: it has not. None: its name is gone, or another file's (which is
        in the table then: a reader that opens the name again gets that). Raises OriginError.
        """
        result = await self.call(lambda _tick: _native.refresh(ino), about=ino)
        if result != GONE:
            return result > 0
        parent, name = _native.parent(ino), _native.name(ino)
        with contextlib.suppress(OriginError):
            await self.call(lambda _tick: _native.add(parent, name))
        return None

    async def source_times(self) -> tuple[int, int]:
        """mtime and ctime of the source, in ns, past attribute caches. Raises OriginError."""
        found = await self.call(
            lambda _tick: _native.version_of_fd(self._source_fd), background=True
        )
        return found[2:4]

    async def _attempt(self, function: Callable[[Tick], T], background: bool, about: int) -> T:
        token = trio.lowlevel.current_trio_token()
        limiter = self._background if background else self._readers
        abandoned, has_ended, ended = False, False, trio.Event()
        with trio.CancelScope(deadline=trio.current_time() + self.timeout_s) as scope:

            def extend() -> None:
                scope.deadline = trio.current_time() + self.timeout_s

            def tick() -> None:
                if abandoned:
                    raise OriginTimeout(self.timeout_s)
                token.run_sync_soon(extend, idempotent=True)

            def run() -> T:
                nonlocal has_ended
                try:
                    return function(tick)
                finally:
                    has_ended = True
                    if abandoned:
                        with contextlib.suppress(trio.RunFinishedError):
                            token.run_sync_soon(ended.set)

            try:
                result = await trio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=limiter)
            except OSError as error:
                self.answered_at = trio.current_time()
                raise self.failed(error.errno or errno.EIO, str(error)) from error
            self.answered_at = trio.current_time()
            return result
        abandoned = True
        if about and not has_ended:
            self.note_hang(about, ended)
        self.failed(errno.EIO, f"no answer within {self.timeout_s:g} s")
        raise OriginTimeout(self.timeout_s)

    def failed(self, number: int, message: str) -> OriginError:
        """A request that failed at the origin, here or in a fetch thread."""
        if number in AWAY_ERRNOS:
            self._metrics.add(ORIGIN_ERRORS)
            self.last_error = message
            self._doubt.set()
        return OriginError(number)

    async def probe_forever(self) -> None:
        """After an error that one file or the whole origin may be the cause of: ask for the source
        directory itself, until it answers.
        """
        while True:
            await self._doubt.wait()
            self._doubt = trio.Event()
            while not await self._probe():
                if self.available:
                    log.warning("origin is away: %s; cached files are served", self.last_error)
                self.available = False
                await trio.sleep(PROBE_AGAIN_S)
            if not self.available:
                log.info("origin answers again")
            self.available = True

    async def _probe(self) -> bool:
        with trio.move_on_after(min(PROBE_TIMEOUT_S, self.timeout_s)):
            try:
                await trio.to_thread.run_sync(
                    _native.version_of_fd,
                    self._source_fd,
                    abandon_on_cancel=True,
                    limiter=self._probes,
                )
            except OSError as error:
                self.last_error = str(error)
                return False
            return True
        return False


def file_system_of(device: str) -> str:
    """The type of the file system mounted from `device` ("major:minor"), as the kernel calls it."""
    with open("/proc/self/mountinfo") as mountinfo:
        for line in mountinfo:
            fields = line.split()
            if fields[2] == device:
                return fields[fields.index("-") + 1]
    return ""


class BlockBuffers:
    """Memory that blocks of large files are read into, used again once nothing refers to it.

    A fresh 4 MiB cost 20 times as much (5.4 ms of a processor, here 0.3) as reading them from the
    origin's page cache: its pages come one by one, and glibc begins a large piece 16 bytes into a
    page, whereto AMD's processors copy from the start of a page at a twelfth of their speed.

    INVARIANT: what a memoryview refers to is given to nobody else: Python refuses to resize such a
    bytearray, and that is asked before each use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffers: list[bytearray] = []
        self._used_s = 0.0
        self._is_watched = False

    def take(self, length: int) -> memoryview:
        """Of this length, with whatever in it."""
        if length < BUFFER_BYTES_LEAST or length > BLOCK_BYTES:
            return memoryview(bytearray(length))
        with self._lock:
            self._used_s = time.monotonic()
            buffer = next(filter(_is_free, self._buffers), None)
            if buffer is None:
                buffer = bytearray(PAGE_BYTES + BLOCK_BYTES)
                if len(self._buffers) < BUFFERS_MOST:
                    self._buffers.append(buffer)
            self._watch()
            begin = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % PAGE_BYTES
            return memoryview(buffer)[begin : begin + length]

    def count(self) -> int:
        return len(self._buffers)

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            threading.Thread(target=self._let_go, daemon=True).start()

    def _let_go(self) -> None:
        """Of all, when none was taken for a while. (What is in use lives on without the list.)"""
        while self._is_watched:
            time.sleep(BUFFERS_KEPT_S)
            with self._lock:
                if time.monotonic() - self._used_s >= BUFFERS_KEPT_S:
                    self._buffers.clear()
                    self._is_watched = False


def _is_free(buffer: bytearray) -> bool:
    try:
        buffer.append(0)
    except BufferError:
        return False
    buffer.pop()
    return True


buffers = BlockBuffers()


def read_range(ino: int, version: Version, offset: int, length: int, tick: Tick) -> memoryview:
    """Bytes [offset, offset + length) of the file, all of `version`.

    Raises OriginChanged when the file is not (or no longer, when all is read) of that version;
    OSError.
    """

    def check_version() -> None:
        # asks the origin, not the client's attribute cache (an NFS client's may be a minute old)
        if _native.version_of_fd(fd)[:4] != version:
            raise OriginChanged

    begun_ns = time.monotonic_ns()
    fd = _native.open(ino, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        check_version()
        content = buffers.take(length)
        done = 0
        while done < length:
            count = os.preadv(fd, [content[done : done + PIECE_BYTES]], offset + done)
            if count == 0:
                check_version()
                raise OSError(errno.EIO, "origin ends the file before its size")
            done += count
            if done < length:
                tick()
        check_version()
        # The origin's file system would keep a second copy in RAM.
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
        _native.note_origin_read(time.monotonic_ns() - begun_ns)
        return content
    finally:
        os.close(fd)
