"""pyfuse3 handlers: thin, and the only place in Python that answers with an errno.

In zero-open mode the C front answers most requests and these see only the rest (first listings,
reads that neither the front nor the fetch threads answer, symlinks, statfs); in ordinary mode these
see all. Attributes and names never expire in the kernel when their directory is listed, because the
sweep watches it. Entries of a directory that was never listed are not swept: they expire after half
the revalidation period and are looked up at the origin again. A directory that keeps being used
that way is listed in the background.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import trio

from fusecache import _native
from fusecache.base.errors import AWAY_ERRNOS, OriginError, UnknownInode
from fusecache.base.wire import Observed, Standing
from fusecache.read.access_lists import AccessLists
from fusecache.read.directories import ListingAhead, Revalidation
from fusecache.read.origin import Origin
from fusecache.read.reader import Reader

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

FOREVER_S = 1e9
LOOKUPS_BEFORE_LISTING = 8
LOOK_WAIT_S = 0.5  # for the origin to say what is known already
BLOCK_SIZE_HINT = 128 << 10  # st_blksize
LISTING_BATCH = 512
ACL_XATTRS = (b"system.posix_acl_access", b"system.posix_acl_default")
HINTSD_XATTR = b"user.fusecache.hintsd"


def answers(handler: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """The errno boundary: every failure becomes exactly one errno, nothing ends the mount."""

    @functools.wraps(handler)
    async def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except OriginError as error:
            raise pyfuse3.FUSEError(error.errno) from None
        except UnknownInode:
            raise pyfuse3.FUSEError(errno.ESTALE) from None
        except (pyfuse3.FUSEError, trio.Cancelled):
            raise
        except Exception:
            log.exception("unexpected failure in %s", handler.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return answer


@dataclass(eq=False, slots=True)
class Look:
    """A known inode is being looked at again, for all who ask meanwhile."""

    ended: trio.Event = field(default_factory=trio.Event)
    is_there: bool = True
    error: OriginError | None = None


class Operations(pyfuse3.Operations):
    """The file system as pyfuse3 sees it."""

    supports_dot_lookup = False
    enable_writeback_cache = False

    def __init__(
        self,
        *,
        origin: Origin,
        reader: Reader,
        revalidation: Revalidation,
        source_fd: int,
        nursery: trio.Nursery,
        on_listed: Callable[[int], None],
        hintsd: bytes,
    ) -> None:
        """`hintsd`: path of its socket; empty: none."""
        super().__init__()
        self.initialized = trio.Event()
        self.zero_open = False  # known once the session is open
        self._origin = origin
        self._access_lists = AccessLists(origin)
        self._reader = reader
        self._revalidation = revalidation
        self._source_fd = source_fd
        self._nursery = nursery
        self._on_listed = on_listed
        self._hintsd = hintsd
        self._listing: dict[int, trio.Event] = {}
        self._ahead = ListingAhead(origin, nursery, self._list_ahead)
        self._unlisted_lookups: Counter[int] = Counter()
        self._looks: dict[int, Look] = {}
        self._waited_at = 0.0  # when LOOK_WAIT_S was last over (trio clock)

    def begin(self, zero_open: bool) -> None:
        """The session is open, in this mode."""
        self.zero_open = zero_open

    def init(self) -> None:
        self.initialized.set()

    # ---- names and attributes ------------------------------------------------------------------

    @answers
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        ino = _native.lookup(parent_inode, name)
        if ino == 0:
            return self._negative()
        if ino < 0 or not await self._make_fresh(ino):
            self._note_unlisted(parent_inode)
            try:
                ino = await self._origin.call(lambda _tick: _native.add(parent_inode, name))
            except OriginError as error:
                if error.errno == errno.ENOENT:
                    return self._negative()
                raise
        _native.note_seen(ino, Observed.LOOKUP, ctx.pid)
        return self._entry(ino)

    @answers
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        await self._make_fresh(inode)
        return self._entry(inode)

    @answers
    async def readlink(self, inode: int, ctx: pyfuse3.RequestContext) -> bytes:
        return await self._origin.call(lambda _tick: _native.readlink(inode))

    @answers
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        status = await self._origin.call(lambda _tick: os.fstatvfs(self._source_fd))
        data = pyfuse3.StatvfsData()
        for name in (
            "f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail",
            "f_files", "f_ffree", "f_favail", "f_namemax",
        ):  # fmt: skip
            setattr(data, name, getattr(status, name))
        return data

    # Asked for access control lists, which the kernel keeps and honours with --allow-other. For
    # others only where libfuse could not be interposed: else there is an ioctl for the one
    # attribute of ours, and the kernel learns that there are no others (native/front/raw.c).

    @answers
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if name == HINTSD_XATTR and self._hintsd:  # a part of the mount may be bound elsewhere
            return self._hintsd
        if name in ACL_XATTRS:
            version = _native.version(inode)
            acl = await self._access_lists.read(inode, name)
            if (inode, name) == (pyfuse3.ROOT_INODE, ACL_XATTRS[0]) and (
                _native.version(inode) == version
            ):
                _native.keep_root_acl(acl or b"", version[3])
            if acl is not None:
                return acl
        raise pyfuse3.FUSEError(errno.ENODATA)

    @answers
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        return [HINTSD_XATTR] if inode == pyfuse3.ROOT_INODE and self._hintsd else []

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        """Inode numbers are kept for the life of the mount."""

    async def _make_fresh(self, ino: int) -> bool:
        """Look at the origin again if nothing else watches this inode, or only an earlier mount has
        looked at it. False: the name is gone.

        An origin that takes long may hang: what is known is said meanwhile, and what the look finds
        is told to the kernel when it ends. Until it answers anything, no request waits again.
        """
        if _native.is_dead(ino) or (self._is_watched(ino) and not _native.is_unchecked(ino)):
            return True
        if not self._origin.available:
            return True
        look = self._looks.get(ino)
        if look is None:
            look = self._looks[ino] = Look()
            self._nursery.start_soon(self._look, ino, look)
        if self._waited_at <= self._origin.answered_at:
            with trio.move_on_after(LOOK_WAIT_S) as scope:
                await look.ended.wait()
            if scope.cancelled_caught:
                self._waited_at = trio.current_time()
        if look.error is not None:
            raise look.error
        return look.is_there

    async def _look(self, ino: int, look: Look) -> None:
        try:
            look.is_there = await self._origin.refresh(ino) is not None
        except OriginError as error:
            if error.errno not in AWAY_ERRNOS:  # else what we know is what we can say
                look.error = error
        finally:
            del self._looks[ino]
            look.ended.set()

    def _is_watched(self, ino: int) -> bool:
        return self._revalidation.period_s is None or _native.is_listed(_native.parent(ino))

    def _note_unlisted(self, directory: int) -> None:
        if _native.is_listed(directory):
            return
        self._unlisted_lookups[directory] += 1
        if self._unlisted_lookups[directory] == LOOKUPS_BEFORE_LISTING:
            self._nursery.start_soon(self._list_quietly, directory)

    def _negative(self) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = 0
        entry.entry_timeout = self._expiry_s()
        return entry

    def _entry(self, ino: int) -> pyfuse3.EntryAttributes:
        (mode, nlink, uid, gid, rdev, size, blocks, atime, mtime, ctime) = _native.attributes(ino)
        _native.told(ino)
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = ino
        entry.st_mode = mode
        entry.st_nlink = nlink
        entry.st_uid = uid
        entry.st_gid = gid
        entry.st_rdev = rdev
        entry.st_size = size
        entry.st_blksize = BLOCK_SIZE_HINT
        entry.st_blocks = blocks
        entry.st_atime_ns = atime
        entry.st_mtime_ns = mtime
        entry.st_ctime_ns = ctime
        entry.entry_timeout = entry.attr_timeout = (
            FOREVER_S if self._is_watched(ino) else self._expiry_s()
        )
        if _native.is_unchecked(ino):  # in a listing, or the origin is away: name and type
            entry.entry_timeout = entry.attr_timeout = 0
        if _native.plan_flags(ino.to_bytes(4, "little"))[0] & Standing.ARMED:
            entry.entry_timeout = 0  # the tripwire stands: a reader's next look-up must come here
        if stat.S_ISREG(mode) and _native.trace_sees_lookups():
            entry.entry_timeout = 0  # a recording wants to see each open
        return entry

    def _expiry_s(self) -> float:
        period_s = self._revalidation.period_s
        return FOREVER_S if period_s is None else period_s / 2

    # ---- directories ---------------------------------------------------------------------------

    @answers
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        if self.zero_open:
            raise pyfuse3.FUSEError(errno.ENOSYS)
        if _native.is_dead(inode):
            raise pyfuse3.FUSEError(errno.ESTALE)  # the kernel looks the path up again
        return inode

    async def releasedir(self, fh: int) -> None:
        """Nothing was opened."""

    @answers
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if not _native.is_listed(fh):
            await self.list(fh)
            if self._revalidation.period_s is not None:  # else what is listed stays as it is (C8)
                self._ahead.note(fh)
        if start_id in (0, _native.DOT_COOKIE):
            dots = [
                (b".", fh, _native.DOT_COOKIE),
                (b"..", _native.parent(fh), _native.DOTDOT_COOKIE),
            ]
            for name, ino, cookie in dots[start_id:]:
                if not pyfuse3.readdir_reply(token, name, self._entry(ino), cookie):
                    return
        while batch := _native.children(fh, start_id, LISTING_BATCH):
            for name, ino, cookie in batch:
                if not pyfuse3.readdir_reply(token, name, self._entry(ino), cookie):
                    return
                start_id = cookie

    async def list_checked(self, directory: int) -> None:
        """Have the directory listed, and each file in it looked at by this mount: what is to be put
        before readers unasked must not be an earlier mount's. Raises OriginError.
        """
        await self.list(directory)
        if _native.has_unchecked(directory):
            await self._revalidation.look(directory, background=False)

    async def list(self, directory: int, background: bool = False) -> None:
        """Have the directory listed; one scan serves all who wait. Raises OriginError."""
        while not _native.is_listed(directory):
            running = self._listing.get(directory)
            if running is not None:
                await running.wait()
                if not _native.is_listed(directory):
                    continue  # the other one failed: find out why ourselves
                return
            event = self._listing[directory] = trio.Event()
            try:
                await self._revalidation.look(directory, background=background)
            except OriginError as error:
                if not background and error.errno in (errno.ESTALE, errno.ENOENT, errno.ENOTDIR):
                    with contextlib.suppress(OriginError):
                        await self._origin.refresh(directory)
                raise
            finally:
                del self._listing[directory]
                event.set()
            self._on_listed(directory)
            return

    async def _list_ahead(self, directory: int) -> None:
        if directory not in self._listing:
            await self._list_quietly(directory, background=True)

    async def _list_quietly(self, directory: int, background: bool = False) -> None:
        try:
            await self.list(directory, background)
        except OriginError as error:
            log.info("cannot list a directory in the background: %s", error)

    # ---- files ---------------------------------------------------------------------------------

    @answers
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        if self.zero_open:
            raise pyfuse3.FUSEError(errno.ENOSYS)
        if _native.is_dead(inode):
            raise pyfuse3.FUSEError(errno.ESTALE)  # the kernel looks the path up again
        _native.note_open(inode, ctx.pid)
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    @answers
    async def read(  # type: ignore[override]  # pyfuse3 takes any buffer
        self, fh: int, off: int, size: int
    ) -> bytes | memoryview:
        asker, begun_ns = _native.read_asker()
        if _native.is_unchecked(fh) and not await self._make_fresh(fh):
            raise pyfuse3.FUSEError(errno.ESTALE)
        data = await self._reader.read(fh, off, size, asker)
        if len(data) < size and _native.refuse_short(fh):
            raise pyfuse3.FUSEError(errno.EINTR)
        _native.note_mount_read(time.monotonic_ns() - begun_ns)
        return data

    async def flush(self, fh: int) -> None:
        raise pyfuse3.FUSEError(errno.ENOSYS)  # asked once, never again

    async def release(self, fh: int) -> None:
        """Nothing was opened."""
