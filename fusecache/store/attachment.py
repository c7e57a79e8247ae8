"""What the store is attached to: the cache's directory and the index in use, one of many of it.

INVARIANT: no fault of the cache leaves the store: it is told, and the result is None (`contained`).

Locks: `lock` guards the open segment, the writing connection and all changes; it may be held for
seconds (rebuild). Look-ups never take it: directory and index are replaced whole.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, TypeGuard

from fusecache.base.errors import UserError
from fusecache.store import index as idx
from fusecache.store.capacity import Place, wal_bytes
from fusecache.store.directory import Directory
from fusecache.store.directory.given import Faults, Given
from fusecache.store.index import recovery
from fusecache.store.reuse import Reuse
from fusecache.store.segment import format as fmt
from fusecache.store.types import StoreSettings

_REPAIR_SECONDS_MIN: Final = 1.0
_REPAIR_SECONDS_MAX: Final = 300.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the other parts of the store do with what belongs to the directory; with the lock."""

    followed: Callable[[Place], None]  # another index is in use: it is to have their rows
    gone: Callable[[int], None]  # this segment's file is about to go, or gone
    let_go: Callable[[], None]  # the directory is left: close what they have open in it
    lost: Callable[[], None]  # with all that was in it


class CurrentIndex:
    """Which generation of the index is in use: `index`, None: none is.

    INVARIANT: rows that were not committed when an index is left go to the next one.
    """

    def __init__(
        self,
        given: Given,
        faults: Faults,
        limit_bytes: int,
        followed: Callable[[Directory, idx.Index], None],
    ) -> None:
        """`followed` is told of each index that is used from now."""
        self.index: idx.Index | None = None
        self._given = given
        self._faults = faults
        self._followed = followed
        self._wal_bytes = wal_bytes(limit_bytes)
        self._generation = 0
        self._why_bad: str | None = None
        self._repair_at = 0.0
        self._repair_seconds = _REPAIR_SECONDS_MIN

    def close(self) -> None:
        index, self.index = self.index, None
        if index is not None:
            index.database.close()

    def forget(self) -> None:
        """The directory is gone: the next one has generations of its own. `close` it first."""
        self._why_bad = None
        self._generation = 0

    def follow_limit(self, limit_bytes: int) -> None:
        self._wal_bytes = wal_bytes(limit_bytes)
        if self.index is not None:
            self.index.database.bound_wal(self._wal_bytes)

    def is_sound(self) -> bool:
        """As far as is known. Any thread."""
        return self.index is not None and self._why_bad is None

    # ---- faults ----------------------------------------------------------------------------------
    def error(self, index: idx.Index | None, error: Exception) -> None:
        """Of this index. Any thread."""
        if index is None or index is not self.index:
            return  # closed under a lookup in another thread: that is no fault
        if idx.damage(error):
            if self._why_bad is None:
                self._why_bad = str(error)
                self._tell(f"{error}; it will be rebuilt")
        elif getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL:
            self._faults.pause()
            self._faults.tell("disk-full", f"index of {self._given.home()}: no space left")
        else:
            self._tell(str(error))

    def _tell(self, message: str) -> None:
        self._faults.tell("index", f"index of {self._given.home()}: {message}")

    # ---- generations -----------------------------------------------------------------------------
    def try_share(self, directory: Directory) -> bool:
        """The index lock, to be given back by `Generations.unshare`. False: a process builds the
        next index, or has; what others hold is in an index that housekeeping will follow.
        """
        if not directory.generations.try_share():
            return False
        if directory.generations.newest() != self._generation:
            directory.generations.unshare()
            return False
        return True

    def mend_if_bad(self, directory: Directory) -> None:
        """When it is time to."""
        if self._why_bad is not None:
            self._repair(directory)

    def mend(self, directory: Directory) -> None:
        """Follow a newer generation; rebuild a damaged or missing index."""
        index = self.index
        if index is not None and self._why_bad is None:
            try:
                status = index.database.path.stat()
                if (status.st_dev, status.st_ino) != index.database.identity:
                    self._why_bad = "replaced"
            except OSError:
                self._why_bad = "missing"
            if directory.generations.newest() > self._generation:
                self.follow_or_build(directory)
                return
            if self._why_bad is not None:
                self._tell(f"{self._why_bad}; rebuilding it")
        if self.index is None or self._why_bad is not None:
            self._repair(directory)

    def _repair(self, directory: Directory) -> None:
        now = time.monotonic()
        if now < self._repair_at:
            return
        # A disk that damages each new index must not keep us building.
        self._repair_seconds = (
            min(self._repair_seconds * 2, _REPAIR_SECONDS_MAX)
            if now < self._repair_at + 60
            else _REPAIR_SECONDS_MIN
        )
        try:
            self.follow_or_build(directory)
        except (OSError, sqlite3.Error) as error:
            line = directory.count_error(directory.members[0], error)
            if line:
                self._faults.tell("directory", line)
            raise
        finally:
            self._repair_at = time.monotonic() + self._repair_seconds

    def follow_or_build(self, directory: Directory) -> None:
        """Leave the present generation (if any) for a newer one; build that if there is none."""
        files: list[idx.FileRow] = []
        blocks: list[idx.BlockRow] = []
        if self.index is not None:
            pending = self.index.pending.copy()
            files, blocks = list(pending.files.values()), list(pending.blocks.values())
        self.close()
        generations = directory.generations
        with generations.lock():
            newest = generations.newest()
            index = self._open_if_sound(directory, newest) if newest > self._generation else None
            if index is None:
                newest = max(newest, self._generation) + 1
                recovery.rebuild(directory, newest)
                index = self._open_index(directory, newest)
        self.index, self._generation, self._why_bad = index, newest, None
        index.insert(files, blocks)
        self._followed(directory, index)

    def _open_if_sound(self, directory: Directory, generation: int) -> idx.Index | None:
        index: idx.Index | None = None
        try:
            index = self._open_index(directory, generation)
            index.segments.all()
        except (*idx.ERRORS, OSError) as error:
            self._tell(f"{error}; rebuilding it")
            if index is not None:
                index.database.close()
            return None
        return index

    def _open_index(self, directory: Directory, generation: int) -> idx.Index:
        return idx.Index(directory.generations.path(generation), self._tell, self._wal_bytes)


class Attachment:
    """The directory (`given.opened`) and the `current` index. `settings`: with the limit that holds
    now; `reuse` knows what may go, None: what was fetched longest ago; `highest_segno` that this
    process knows of.
    """

    def __init__(
        self,
        given: Given,
        settings: StoreSettings,
        faults: Faults,
        hooks: Hooks,
        reuse: Reuse | None,
        pinned: Callable[[], Collection[int] | None],
    ) -> None:
        """Attached to nothing yet. `pinned`: see Place."""
        self.lock = threading.RLock()
        self.given = given
        self.faults = faults
        self.hooks = hooks
        self.current = CurrentIndex(given, faults, settings.limit_bytes, self._followed)
        self.settings = settings
        self.reuse = reuse
        self._pinned = pinned
        self.highest_segno = 0
        self.is_closed = False
        self._own_limit_bytes = settings.limit_bytes
        self._is_suspect = False

    # ---- attaching and leaving -------------------------------------------------------------------
    def attach(self, directory: Directory) -> None:
        """While no segment is open. sqlite3.Error, OSError: there is no index yet."""
        self.given.use(directory)
        self.current.follow_or_build(directory)
        self.follow_limit()

    def reattach(self) -> Directory | None:
        """None: it cannot be used now."""
        directory = self.given.reopen()
        if directory is not None:
            self.attach(directory)
        return directory

    def detach(self) -> None:
        """Let go of everything that belongs to the directory."""
        self.hooks.let_go()
        self.current.close()
        self.given.close()

    def lose(self) -> None:
        """The directory is not where it was."""
        self.given.lose()
        self.detach()
        self.current.forget()
        self.hooks.lost()

    def close(self) -> None:
        self.is_closed = True
        self.detach()

    def _followed(self, directory: Directory, index: idx.Index) -> None:
        self.hooks.followed(self._place(directory, index))
        self.suspect()

    # ---- settings --------------------------------------------------------------------------------
    def follow_limit(self) -> bool:
        """The least limit of all who use the cache holds for all, as long as they use it. Whether
        it is another one now.
        """
        directory = self.given.opened
        if directory is None:
            return False
        limit_bytes = directory.least_limit(self._own_limit_bytes)
        if limit_bytes == self.settings.limit_bytes:
            return False
        self.settings = replace(self.settings, limit_bytes=limit_bytes)
        self.current.follow_limit(limit_bytes)
        return True

    def limit_to(self, limit_bytes: int) -> None:
        """Our own limit is another one from now on. With the lock."""
        self._own_limit_bytes = limit_bytes
        self.follow_limit()

    @property
    def segment_bytes(self) -> int:
        """Segments are as large as fits the limit."""
        return fmt.segment_bytes(self.settings.limit_bytes)

    def saw(self, segnos: Iterable[int]) -> None:
        """These numbers have been given out."""
        self.highest_segno = max(self.highest_segno, *segnos, 0)

    def number_from(self, segno: int) -> int:
        """Give no number up to this one to a segment: they are taken elsewhere. The highest that
        was given, or is taken. Takes the lock. OSError.
        """
        with self.lock:
            directory = self.given.opened
            if directory is None:
                raise OSError(f"{self.given} cannot be used now")
            directory.number_from(segno)
            return directory.highest_segno()

    # ---- faults ----------------------------------------------------------------------------------
    @contextlib.contextmanager
    def contained(self) -> Iterator[None]:
        """Turns errors of disk and database into faults. The caller's result is then None."""
        try:
            yield
        except idx.ERRORS as error:
            self.current.error(self.current.index, error)
        except UserError as error:
            self.faults.tell("io", str(error))
        except OSError as error:
            self.given.tell_error(error)

    def suspect(self) -> None:
        """Something was found out of place: index and files are to be compared soon. Any thread."""
        self._is_suspect = True

    def take_suspicion(self) -> bool:
        is_suspect, self._is_suspect = self._is_suspect, False
        return is_suspect

    # ---- the place -------------------------------------------------------------------------------
    def place(self) -> Place | None:
        """The directory and its index, whatever that is worth. None: there is none. Any thread."""
        directory, index = self.given.opened, self.current.index
        return None if directory is None or index is None else self._place(directory, index)

    def _place(self, directory: Directory, index: idx.Index) -> Place:
        return Place(
            directory, index, self.settings, self.hooks.gone, self.faults.tell, self.reuse,
            self._pinned,
        )  # fmt: skip

    def sound_place(self) -> Place | None:
        """The same, as far as is known not damaged."""
        return self.place() if self.current.is_sound() and not self.is_closed else None

    def usable_place(self) -> Place | None:
        """The same; mends the index when it is time to."""
        directory = self.given.opened
        if directory is not None and not self.is_closed:
            self.current.mend_if_bad(directory)
        return self.sound_place()

    def is_current(self, place: Place | None) -> TypeGuard[Place]:
        """Is that still the directory, and its index?"""
        now = self.sound_place()
        return (
            now is not None
            and place is not None
            and (now.directory, now.index) == (place.directory, place.index)
        )

    @contextlib.contextmanager
    def sharing(self) -> Iterator[Place | None]:
        """The place with a sound index, which is not left for another meanwhile. None: not now.
        Errors of disk and database end the block, and are faults. Takes the lock.
        """
        with self.lock:
            place = None
            with self.contained():
                place = self._place_to_share()
            try:
                with self.contained():
                    yield place
            finally:
                if place is not None:
                    place.directory.generations.unshare()

    def _place_to_share(self) -> Place | None:
        place = self.usable_place()
        if place is None or not place.directory.is_present():
            return None  # housekeeping will find out
        return place if self.current.try_share(place.directory) else None
