"""Messages to the kernel: pages pushed and dropped, names and attributes forgotten.

Most messages wait for a page or directory lock that is released only when some request is answered.
So they run in threads of their own, never in the trio thread and never in a front thread, and
no thread that must answer a request waits for one. (`forget_attributes` takes no such lock.)

What the kernel must forget is a flag in the inode table, raised with the change itself and cleared
when the kernel has been told (`drain`): it survives the death of the server in between.
"""

from __future__ import annotations

import errno
import logging
import math
from collections.abc import Callable

import trio

from fusecache import _native
from fusecache.store.types import Version

log = logging.getLogger(__name__)

ATTRIBUTES_ONLY = -1  # offset of an invalidation that leaves the pages
STALE_BATCH = 16  # small: what shares a batch with an inode that is held up, waits
QUIET_ERRNOS = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTEMPTY, errno.ENOTDIR})

Range = tuple[int, int, int]  # inode, offset, length; 0, 0: all pages


class Kernel:
    """The server's end of the notification channel of one mount."""

    def __init__(self, fuse_fd: int) -> None:
        self.fuse_fd = fuse_fd
        self._droppers = trio.CapacityLimiter(2)
        self._drainers = trio.CapacityLimiter(8)
        self._pushers = trio.CapacityLimiter(3)
        self._stale = trio.Event()
        self._draining: set[trio.Event] = set()  # of each `drain` that runs: set when it has ended
        self._later: dict[int, float] = {}  # inode -> when (trio clock)

    # ---- what has changed ------------------------------------------------------------------------

    def notice_stale(self) -> None:
        """Something was flagged in the table: have it drained."""
        self._stale.set()

    async def drain_forever(self) -> None:
        while True:
            wait_s = min(self._later.values(), default=math.inf) - trio.current_time()
            with trio.move_on_after(max(0.0, wait_s)):
                await self._stale.wait()
            if self._stale.is_set():
                self._stale = trio.Event()
            now = trio.current_time()
            for ino in [ino for ino, due in self._later.items() if due <= now]:
                del self._later[ino]
                _native.mark_stale(ino)
            await self._drain(self._drainers)

    async def drain_all(self) -> None:
        """Returns when the kernel was told of all that is flagged now, whoever tells it."""
        await self._drain(None)
        for ended in [*self._draining]:  # what another one took may not be told yet
            await ended.wait()

    async def _drain(self, limiter: trio.CapacityLimiter | None) -> None:
        ended = trio.Event()
        self._draining.add(ended)
        try:
            await trio.to_thread.run_sync(self.drain, limiter=limiter, abandon_on_cancel=True)
        finally:
            self._draining.discard(ended)
            ended.set()

    def forget_later(self, ino: int, delay_s: float) -> None:
        """Have the kernel forget the inode's pages when `delay_s` has passed."""
        _native.mark_young(ino)
        self._later[ino] = trio.current_time() + delay_s
        self._stale.set()

    def drain(self) -> int:
        """Tell the kernel of everything that is flagged. Blocking. Returns how many inodes."""
        count = 0
        while batch := _native.take_stale(STALE_BATCH):
            for ino, name_is_stale, names in batch:
                self._forget(ino, name_is_stale, names)
                _native.settled(ino)
            count += len(batch)
        return count

    def _forget(self, ino: int, name_is_stale: bool, names: list[tuple[int, bytes]]) -> None:
        if name_is_stale:
            self._forget_names(names)
        if not self._inval_inode(ino, 0, 0) and not name_is_stale:
            # The kernel does not know the inode. A reply with old attributes may be on its way: the
            # entry's invalidation waits for it (the directory's lock), so ask once more after that.
            self._forget_names(names)
            self._inval_inode(ino, 0, 0)

    def _forget_names(self, names: list[tuple[int, bytes]]) -> None:
        for parent, name in names:
            try:
                _native.inval_entry(self.fuse_fd, parent, name)
            except OSError as error:
                self._refused(error)

    def forget_attributes(self, ino: int) -> None:
        """Takes no lock: may be called by a handler before it answers."""
        self._inval_inode(ino, ATTRIBUTES_ONLY, 0)

    def _inval_inode(self, ino: int, offset: int, length: int) -> bool:
        try:
            return _native.inval_inode(self.fuse_fd, ino, offset, length)
        except OSError as error:
            self._refused(error)
            return True

    def _refused(self, error: OSError) -> None:
        if error.errno not in QUIET_ERRNOS:
            log.warning("kernel refused an invalidation: %s", error)

    # ---- pages -----------------------------------------------------------------------------------

    async def drop(self, ranges: list[Range]) -> None:
        """Drop pages (and attributes) of these ranges."""

        def drop_now() -> None:
            for ino, offset, length in ranges:
                self._inval_inode(ino, offset, length)

        await trio.to_thread.run_sync(drop_now, limiter=self._droppers, abandon_on_cancel=True)

    async def push(self, ino: int, version: Version, offset: int, data: memoryview) -> int:
        """Bytes that reached the page cache; 0: the kernel does not know the inode (normal), or
        the file is another version now."""
        return await self._push(lambda: _native.push(self.fuse_fd, ino, version, offset, data))

    async def push_cached(self, ino: int, block: int, skip: int) -> int:
        """Push a block, without its first `skip` bytes, from its segment; -1: not readable."""
        return await self._push(lambda: _native.push_cached(self.fuse_fd, ino, block, skip))

    async def _push(self, function: Callable[[], int]) -> int:
        try:
            return await trio.to_thread.run_sync(
                function, limiter=self._pushers, abandon_on_cancel=True
            )
        except OSError as error:
            if error.errno not in QUIET_ERRNOS:
                log.warning("kernel refused pushed pages: %s", error)
            return 0

    def resend(self) -> None:
        """Have the kernel repeat what the dead server had taken but not answered (Linux 6.9)."""
        try:
            _native.resend(self.fuse_fd)
        except OSError as error:
            log.warning("this kernel cannot resend requests (needs Linux 6.9): %s", error)
