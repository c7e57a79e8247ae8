"""Finds the source again after its file system was mounted anew (sshfs died, NFS was remounted).

The descriptor of the source directory, opened before we mounted, stays with the old mount for ever.
So the mount table is watched: when the source's path leads to another mount of the same file system
(type, source, directory within), that one's directory takes the descriptor's place. Nothing else
changes: inode numbers, cached bytes and readers' descriptors stay.

INVARIANT: what only looks like the source is never adopted: not what lies below it after an
unmount, not another file system, not a fusecache (it could be ours), not an empty directory where
there were names, and nothing that does not answer.
All this is read from the mount table, as text: an origin that hangs holds up nothing here.
"""

from __future__ import annotations

import errno
import logging
import os
import select

import trio

from fusecache import _native
from fusecache.base import mounts

log = logging.getLogger(__name__)

LOOK_S = 0.5
AGAIN_S = 2.0  # a new mount that does not answer yet
ANSWER_S = 5.0
ROOT_INO = 1


class Remount:
    """Watches one source. `identity` None: a keeper of an earlier version has not told it."""

    def __init__(
        self, path: str, source_fd: int, identity: dict[str, str] | None, timeout_s: float
    ) -> None:
        self._path = path
        self._fd = source_fd
        self._identity = identity
        self._timeout_s = min(ANSWER_S, timeout_s)
        self._openers = trio.CapacityLimiter(2)
        self._said = ""

    async def watch_forever(self) -> None:
        with open("/proc/self/mountinfo") as table:
            changed = select.poll()
            changed.register(table.fileno(), select.POLLPRI)
            while True:
                changed.poll(0)
                while not await self.look():
                    await trio.sleep(AGAIN_S)
                while not changed.poll(0):
                    await trio.sleep(LOOK_S)

    async def look(self) -> bool:
        """Adopt what the path leads to, if it is the source. False: it is, but cannot be used."""
        table = mounts.mounts()
        held, there = mounts.of_descriptor(self._fd, table), mounts.holding(self._path, table)
        if self._identity is None and held is not None:
            self._identity = mounts.identity(self._path, held)
        if there is None or there == held:
            return True
        if there.is_fusecache or mounts.identity(self._path, there) != self._identity:
            return True
        with trio.move_on_after(self._timeout_s):
            try:
                await trio.to_thread.run_sync(
                    self._adopt, there.mount_id, limiter=self._openers, abandon_on_cancel=True
                )
            except OSError as error:
                self._say(f"cannot be used: {error.strerror}", logging.WARNING)
                return False
            self._say("is used from now on")
            self._said = ""  # the next time is another one
            return True
        self._say("does not answer", logging.WARNING)
        return False

    def _adopt(self, mount_id: int) -> None:
        """From now on the directory on that mount is looked at. OSError. Blocking."""
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = mounts.of_descriptor(fd, mounts.mounts())
            if found is None or found.mount_id != mount_id:
                raise OSError(errno.ESTALE, "something else was mounted meanwhile")
            with os.scandir(fd) as entries:
                if next(entries, None) is None and _native.children(ROOT_INO, 0, 1):
                    raise OSError(errno.ENOENT, "it is empty")
            _native.adopt_source(fd)
            os.dup2(fd, self._fd, inheritable=False)
        finally:
            os.close(fd)

    def _say(self, what: str, level: int = logging.INFO) -> None:
        if what != self._said:
            log.log(level, "source %s was mounted anew: it %s", self._path, what)
        self._said = what
