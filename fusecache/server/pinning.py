"""What `fusecache pin` keeps on SSD (docs/FORMAT.md, "Pins"): by globs, so later files count, too.

INVARIANT: what the file in the cache directory says counts: a command has changed it when it
answers, and a mount follows it when another one has changed it.
"""

from __future__ import annotations

import logging
import sqlite3
import stat
from array import array
from collections.abc import Callable

import numpy as np
import trio
from numpy.typing import NDArray

from fusecache import _native
from fusecache.base.errors import UnknownInode, UserError
from fusecache.base.metrics import CHANGES_SEEN, Metrics
from fusecache.control.control import Message, RequestError, Send
from fusecache.read.operations import Operations
from fusecache.server.globs import Globs, quoted
from fusecache.server.maintenance import WarmProgress, limit_for, taken_bytes
from fusecache.server.selecting import Asked, Failures, Turns, select, telling
from fusecache.store import Store
from fusecache.store.directory.pin_files import Pinned
from fusecache.table import namespace
from fusecache.table.pins import NO_LATER_ONES, Inos, UserPins

log = logging.getLogger(__name__)

LOOK_S = 2.0
LOOK_SHARE = 20  # asking for segments takes at most this part of the time
TELL_ALL_S = 600.0
FINISH_S = 2.0
LOCATED_AT_ONCE = 1024


class Pinning:
    """Of one mount."""

    def __init__(
        self,
        *,
        operations: Operations,
        store: Store,
        dataset: bytes,
        pins: UserPins,
        metrics: Metrics,
        locate_all: Callable[[list[int]], None],
    ) -> None:
        """`locate_all` has the front know where the blocks of files lie; blocking."""
        self._operations = operations
        self._store = store
        self._dataset = dataset
        self._pins = pins
        self._metrics = metrics
        self._locate_all = locate_all
        self._lock = trio.Lock()
        self._kept: Pinned | None = None  # as the file says; None: not read yet
        self._globs = Globs(())
        self._files = self._bytes = 0  # that are marked
        self._changes = 0
        self._said = ""

    def status(self) -> Message:
        kept = self._kept or Pinned()
        known = self._pins.is_known
        return {
            "globs": list(kept.globs), "files": self._files, "bytes": self._bytes, "known": known
        }  # fmt: skip

    # ---- by itself -------------------------------------------------------------------------------

    async def keep_forever(self) -> None:
        """Know which files are pinned, and tell others in which segments they lie."""
        tell_at, tell_all_at = 0.0, trio.current_time() + TELL_ALL_S
        while True:
            async with self._lock:
                await self._follow()
                await self._mark_new()
                begin = trio.current_time()
                if begin >= tell_at:
                    await self._tell_segments()
                    tell_at = begin + LOOK_SHARE * (trio.current_time() - begin)
                if begin >= tell_all_at and self._kept and self._kept.globs:
                    await self._tell_segments(is_all=await self._knows_all_names())
                    tell_all_at = trio.current_time() + TELL_ALL_S
            await trio.sleep(LOOK_S)

    async def finish(self) -> None:
        """The mount is over: what was stored last is told."""
        with trio.move_on_after(FINISH_S):
            async with self._lock:
                await self._tell_segments()

    async def look(self) -> None:
        """What is pinned of the names that are known now."""
        async with self._lock:
            await self._follow()
            await self._mark_new()

    def may_hold(self, inos: Inos) -> NDArray[np.bool_]:
        """Which of these are pinned, or were not looked at yet."""
        return self._pins.may_hold(inos)

    async def _follow(self) -> None:
        """What the file says now."""
        try:
            found = await trio.to_thread.run_sync(self._store.pins_of, self._dataset)
            self._said = ""
        except OSError as error:  # it may pass
            self._say(f"pins cannot be read, and stay as they are: {error}")
            return
        except (ValueError, UserError) as error:
            self._say(f"pins are not used: {error}")
            found = Pinned()
        if found is None:
            return  # the cache directory is not there
        if self._kept is None or found.globs != self._kept.globs:
            self._pins.begin()
            self._globs = Globs(found.globs)
            self._files = self._bytes = 0
        self._kept = found

    def _say(self, line: str) -> None:
        if line != self._said:
            log.warning("%s", line)
        self._said = line

    async def _mark_new(self) -> None:
        """Of inodes that have come since, those that are pinned."""
        if self._kept is None:
            return
        turns, some, count = Turns(), list[int](), _native.count()
        for ino in range(self._pins.known_to + 1, count + 1) if self._kept.globs else ():
            await turns.give_way()
            try:
                mode, path = _native.attributes(ino)[0], _native.path(ino)
            except UnknownInode:
                continue
            if stat.S_ISREG(mode) and self._globs.naming(path) and not _native.is_dead(ino):
                some.append(ino)
            if len(some) == LOCATED_AT_ONCE:
                await self._mark(some)
                some = []
                self._pins.note_looked(ino)
        await self._mark(some)
        self._pins.note_known(count if self._kept.globs else NO_LATER_ONES)

    async def _mark(self, inos: list[int]) -> None:
        if inos:
            marked = np.array(inos, np.uint32)
            fresh = marked[~self._pins.holds(marked)].tolist()
            self._files += len(fresh)
            self._bytes += sum(namespace.version(ino).size for ino in fresh)
            self._pins.mark(marked)
            await trio.to_thread.run_sync(self._locate_all, inos)

    async def _tell_segments(self, is_all: bool = False) -> None:
        """`is_all`: all names are known, so what is listed beside is old."""
        if self._kept is None or not self._kept.globs:
            return
        changes = self._metrics.read()[CHANGES_SEEN]
        if changes != self._changes:
            await trio.to_thread.run_sync(self._pins.forget_dead)
            self._changes = changes
        try:
            await trio.to_thread.run_sync(self._write_segments, self._kept, is_all)
        except (UserError, OSError, sqlite3.Error) as error:
            log.warning("pinned segments are not told: %s", error)

    def _write_segments(self, kept: Pinned, is_all: bool) -> None:
        """If there are others now than the file lists."""
        segnos = self._store.living(self._pins.segments() or frozenset())
        if is_all or not segnos <= kept.segnos:  # another mount may know of more
            segnos |= frozenset() if is_all else self._store.living(kept.segnos)
            if segnos != kept.segnos:
                self._store.keep_pins(self._dataset, kept._replace(segnos=segnos))

    async def _knows_all_names(self) -> bool:
        """Whether all directories that are known are listed."""
        turns = Turns()
        for ino in range(1, _native.count() + 1):
            await turns.give_way()
            is_directory = stat.S_ISDIR(_native.attributes(ino)[0])
            if is_directory and not _native.is_listed(ino) and not _native.is_dead(ino):
                return False
        return True

    # ---- what the command asks -------------------------------------------------------------------

    async def pin(self, request: Message, send: Send) -> Message:
        """Pin what the request's "globs" name below its "prefix", or end that ("remove"); see
        docs/WIRE.md.
        """
        progress = WarmProgress()
        return await telling(lambda: self._pin(request, progress), progress.fields, send)

    async def _pin(self, request: Message, progress: WarmProgress) -> Message:
        asked = Asked.of(request)
        async with self._lock:
            await self._follow()
            if self._kept is None:
                raise RequestError("the cache directory cannot be used now")
            wanted = _without if request.get("remove") is True else _with
            globs = wanted(self._kept.globs, _joined(asked), asked)
            return await self._replace(globs, progress)

    async def _replace(self, globs: tuple[str, ...], progress: WarmProgress) -> Message:
        """These are pinned from now on, and no others. RequestError: nothing has changed."""
        assert self._kept is not None
        matching, count, failures = Globs(globs), _native.count(), Failures()

        def chosen(ino: int, path: bytes) -> None:
            size = namespace.version(ino).size
            progress.select(size, taken_bytes(size, path))

        files, unmatched = array("Q"), list[str]()
        if globs:
            asked, list_checked = Asked(list(globs), b""), self._operations.list_checked
            files, unmatched = await select(asked, list_checked, chosen, failures)
        if missing := [glob for glob in unmatched if glob not in self._kept.globs]:
            raise RequestError(f"no file matches {' '.join(missing)}; nothing was pinned")
        needed = limit_for(progress.room_bytes, progress.largest_bytes) if globs else 0
        limit = self._store.settings.limit_bytes
        if needed > limit and not set(globs) <= set(self._kept.globs):
            raise RequestError(
                f"all that would be pinned needs --ssd {-(-needed >> 20)}M, and --ssd is "
                f"{limit >> 20}M: nothing was pinned"
            )
        inos = np.array(files).astype(np.uint32)
        await trio.to_thread.run_sync(lambda: self._locate_all(inos.tolist()))
        pins = UserPins()
        pins.replace(inos, count)
        segnos = await trio.to_thread.run_sync(pins.segments) or frozenset[int]()
        if failures.count:  # files may be pinned that nobody knows
            segnos |= self._kept.segnos
        kept = Pinned(globs, segnos)
        try:
            await trio.to_thread.run_sync(self._store.keep_pins, self._dataset, kept)
        except (OSError, sqlite3.Error) as error:
            raise RequestError(f"pins cannot be kept: {error}") from None
        self._kept, self._globs = kept, matching
        if failures.count:
            self._pins.begin()
            self._files = self._bytes = 0
            await self._mark_new()
        else:
            self._pins.replace(inos, count if globs else NO_LATER_ONES)
            self._files, self._bytes = progress.files_total, progress.bytes_total
        return {
            "result": {
                "globs": list(globs),
                "files": self._files,
                "bytes": self._bytes,
                "unmatched": unmatched,
                **failures.fields(),
            }
        }


def _joined(asked: Asked) -> tuple[str, ...]:
    """The globs, relative to the mount."""
    prefix = quoted(asked.prefix.decode(errors="surrogateescape"))
    return tuple(f"{prefix}/{glob}" if prefix else glob for glob in asked.globs)


def _with(kept: tuple[str, ...], globs: tuple[str, ...], asked: Asked) -> tuple[str, ...]:
    if not asked.globs:
        raise RequestError("globs must name something")
    return tuple(dict.fromkeys(kept + globs))


def _without(kept: tuple[str, ...], globs: tuple[str, ...], asked: Asked) -> tuple[str, ...]:
    """Without globs: all of those below the prefix."""
    if not asked.globs:
        below = quoted(asked.prefix.decode(errors="surrogateescape"))
        return tuple(glob for glob in kept if below and not f"{glob}/".startswith(f"{below}/"))
    if absent := [glob for glob in globs if glob not in kept]:
        raise RequestError(f"not pinned: {' '.join(absent)}")
    return tuple(glob for glob in kept if glob not in globs)
