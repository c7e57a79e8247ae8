"""Access control lists of the origin's files, as the kernel asks for them with --allow-other.

A list is asked of the origin when the kernel first needs it, and kept with the version of the file:
setting one changes ctime. The kernel forgets a list with each look at the file's attributes, and
asks again: while the origin hangs, who was let in still is.

INVARIANT: what was told for one version of a file is never told for another.
INVARIANT: "none", with which the mode bits count alone, is only said where the origin has said so,
or is of a type that has no lists, by the mount table as it is now.
"""

from __future__ import annotations

import errno
import os
import time
from collections import OrderedDict
from typing import NamedTuple

from fusecache import _native
from fusecache.read.origin import GONE, Origin, file_system_of
from fusecache.store.types import Version
from fusecache.table import namespace

KEPT_MOST = 1 << 16  # about 20 MiB
FILE_SYSTEMS_WITHOUT = frozenset({"fuse.sshfs", "nfs4"})


class Found(NamedTuple):
    """`version`: what the file was when it was asked. `acl` None: the file has none."""

    version: Version
    acl: bytes | None


class AccessLists:
    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._kept: OrderedDict[tuple[int, bytes], Found] = OrderedDict()

    async def read(self, ino: int, name: bytes) -> bytes | None:
        """None: the file has none. Raises OriginError: not known; UnknownInode."""
        key = (ino, name)
        kept = self._kept.get(key)
        if kept is not None and kept.version == namespace.version(ino):
            self._kept.move_to_end(key)
            return kept.acl
        if file_system_of(_native.device(ino)) in FILE_SYSTEMS_WITHOUT:
            return None
        begun_ns = time.time_ns()
        found = await self._origin.call(lambda _tick: read(ino, name))
        # Younger than a tick of the origin's clock, another change might leave ctime as it is.
        if begun_ns - found.version.ctime_ns > self._origin.tick_ns:
            self._kept[key] = found
            if len(self._kept) > KEPT_MOST:
                self._kept.popitem(last=False)
        return found.acl


def read(ino: int, name: bytes) -> Found:
    """A list as the origin has it now. OSError: not known. Blocking."""
    fd = _native.open(ino, os.O_PATH)  # needs no right to the file, and wakes no device
    try:
        now = Version(*_native.version_of_fd(fd)[:4])
        if now != namespace.version(ino) and _native.refresh(ino) == GONE:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        try:
            return Found(now, os.getxattr(f"/proc/self/fd/{fd}", name))
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
                return Found(now, None)
            # With this one the kernel would never ask again, and grant what the mode bits do.
            if error.errno == errno.ENOSYS:
                raise OSError(errno.EIO, os.strerror(errno.EIO)) from None
            raise
    finally:
        os.close(fd)
