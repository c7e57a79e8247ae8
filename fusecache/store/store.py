"""The store: what the rest of fusecache sees of the SSD tier.

`put` appends and indexes, `lookup` finds; `housekeeping` keeps limits, follows what other processes
did to the directory, and mends. Reading payloads is the callers' business (native/segment/).

This module puts the parts together; who owns what is in docs/ARCHITECTURE.md ("Layout: rooms").
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from fusecache.base.errors import UserError
from fusecache.store.attachment import Attachment, Hooks
from fusecache.store.capacity import Place, begin_table
from fusecache.store.directory.given import Faults, Given
from fusecache.store.directory.pin_files import Pinned
from fusecache.store.housekeeping import Housekeeping, Reconciler, reindex_own
from fusecache.store.log import Logs
from fusecache.store.puts import Puts, StoreEvictions
from fusecache.store.reading import Quarantine, Reads
from fusecache.store.reuse import Reuse
from fusecache.store.types import Location, RecordFault, StoreSettings
from fusecache.store.usage import Accounts
from fusecache.store.writing import OpenSegment


class Store:
    """One process's handle on a cache directory."""

    def __init__(
        self,
        path: Path,
        settings: StoreSettings,
        on_fault: Callable[[str, str], None],
        on_segment_gone: Callable[[int], None],
        further: Sequence[Path] = (),
        reuse: Reuse | None = None,
        pinned: Callable[[], Collection[int] | None] = frozenset,
    ) -> None:
        """Use `Store.open` or `Store.reopen`. Has no directory yet: every look-up is a miss."""
        self._on_segment_gone = on_segment_gone
        faults = Faults(on_fault)
        self._given = Given((path, *further), settings.digest, faults)
        hooks = Hooks(self._followed, self._gone, self._let_go, self._lost)
        self._attachment = Attachment(self._given, settings, faults, hooks, reuse, pinned)
        self._quarantine = Quarantine()
        self._reads = Reads(self._attachment, self._quarantine)
        self._segment = OpenSegment(self._attachment)
        self._puts = Puts(self._attachment, self._segment, self._quarantine)
        self.logs = Logs(self._attachment, self._segment)
        self._reconciler = Reconciler(self._attachment, self._segment, self.logs)
        housekeeping = Housekeeping(
            self._attachment, self._segment, self._reads, self._quarantine, self._reconciler
        )
        accounts = Accounts(self._attachment, self._segment)
        # What a part does alone: its docstring is there.
        self.lookup = self._reads.lookup
        self.lookup_block = self._reads.lookup_block
        self.lookup_blocks = self._reads.lookup_blocks
        self.records_of = self._reads.records_of
        self.lookup_directory = self._reads.lookup_directory
        self.open_segment = self._reads.open_segment
        self.log_segments = self._reads.log_segments
        self.check = self._reads.check
        self.quarantine = self._quarantine.add
        self.forget = self._quarantine.forget
        self.segment_path = self._given.segment_path
        self.put = self._puts.put
        self.put_many = self._puts.put_many
        self.link = self._puts.link
        evictions = StoreEvictions(self._attachment, self._segment)
        self.evict = evictions.evict
        self.can_evict = evictions.can_evict
        self.can_punch = evictions.can_punch
        self.evicted_bytes = evictions.evicted_bytes
        self.sharing = self._attachment.sharing
        self.begin_log = self.logs.begin
        self.seal_in = self.logs.seal_in
        self.saw = self._attachment.saw
        self.number_from = self._attachment.number_from
        self.limit_to = housekeeping.limit_to
        self.adopt_orphans = self._reconciler.adopt_orphans
        self.housekeeping = housekeeping.run
        self.usage = accounts.usage
        self.dataset_bytes = accounts.dataset_bytes
        self.written_bytes = accounts.written_bytes
        self.directories = accounts.directories
        self.room_bytes = accounts.room_bytes
        self.pinned_bytes = accounts.pinned_bytes
        self.full_disk_bytes = accounts.full_disk_bytes
        self.stored_bytes = accounts.stored_bytes
        self.taken_bytes = accounts.taken_bytes

    # ---- open and close --------------------------------------------------------------------------
    @classmethod
    def open(
        cls,
        directory: Path,
        settings: StoreSettings,
        *,
        further: Sequence[Path] = (),
        create: bool = True,
        reuse: Reuse | None = None,
        pinned: Callable[[], Collection[int] | None] = frozenset,
        on_fault: Callable[[str, str], None],
        on_segment_gone: Callable[[int], None],
    ) -> Store:
        """Open or `create` a cache directory, or several (`further`) across which segments are
        striped, and adopt what dead writers left. Their parents must exist. Without `create` only
        directories are opened that have a cache already: the disk of others may not be mounted.
        `reuse` knows what may go; None: what was fetched longest ago. `pinned`: segments in which
        a user's files lie that stay; None: that is not known yet, and nothing goes. Any thread.

        `on_fault(kind, message)`: kind is one of checksum, io, disk-full, index, missing, and
        directory: one of several is not used, or lost what it held.
        `on_segment_gone(segno)`: its file is about to go, or gone; must not call the store.
        Both are called from any thread.

        UserError: not writable, newer format, another digest algorithm, in exclusive use.
        """
        store = cls(directory, settings, on_fault, on_segment_gone, further, reuse, pinned)
        try:
            if create:
                store._given.make()
            opened = store._given.open(None if create else {})
        except OSError as error:
            raise UserError(
                f"cannot use {store._given}: {error.strerror or error}:"
                " choose another with --cache-dir"
            ) from error
        attachment = store._attachment
        with attachment.lock, attachment.contained():
            attachment.attach(opened)
            store._reconciler.run()
            store._segment.keep_limits()
        return store

    @classmethod
    def reopen(
        cls,
        directory: Path,
        settings: StoreSettings,
        *,
        further: Sequence[Path] = (),
        reuse: Reuse | None = None,
        pinned: Callable[[], Collection[int] | None] = frozenset,
        on_fault: Callable[[str, str], None],
        on_segment_gone: Callable[[int], None],
    ) -> Store:
        """For a server that takes over a live mount: as `open`, but what is wrong with the
        directory is a fault, and `attach` or `housekeeping` opens it once it is there, with the
        cache in it: where it is not, its disk may not be mounted. Opens nothing yet, so it cannot
        block.
        """
        return cls(directory, settings, on_fault, on_segment_gone, further, reuse, pinned)

    def attach(self) -> None:
        """After `reopen`: have look-ups find something. Writes nothing, so it does not wait for a
        writer; the rest is for `housekeeping`.
        """
        attachment = self._attachment
        with attachment.lock, attachment.contained():
            if self._given.opened is None and not attachment.is_closed:
                attachment.reattach()

    def missed(self, ino: int, block: int, length: int) -> None:
        """A reader's block of `length` bytes came from the origin, or from another host: that says
        what may go.
        """
        if self._attachment.reuse is not None:
            self._attachment.reuse.missed(ino, block, length)

    def flush(self) -> None:
        """Commit the rows that are still in memory."""
        with self._attachment.lock, self._attachment.contained():
            self._commit()

    def settle(self) -> None:
        """Have the index take no more room than it must: what is left is what `room_bytes` says."""
        with self._attachment.lock, self._attachment.contained():
            self._segment.settle()

    def _commit(self) -> bool:
        """False: there is no index."""
        index = self._attachment.current.index
        if index is not None:
            self._quarantine.drain(self._attachment)
            index.flush()
        return index is not None

    def seal(self) -> None:
        """End the segment that is written: what is in it can be evicted then."""
        with self._attachment.lock, self._attachment.contained():
            self._seal()

    def _seal(self) -> None:
        if self._commit():
            self._segment.seal()

    # ---- beside the blocks -----------------------------------------------------------------------
    def pins_of(self, dataset: bytes) -> Pinned | None:
        """What a user has pinned of the source; None: there is no directory now. ValueError,
        UserError, OSError: there is something, and it cannot be used.
        """
        place = self._attachment.place()
        if place is None:
            return None
        try:
            return place.directory.pins.read(dataset)
        except FileNotFoundError:  # it went after `place`
            return None

    def keep_pins(self, dataset: bytes, pinned: Pinned) -> None:
        """Replaces what was pinned of the source. UserError, OSError: nothing was changed."""
        place = self._attachment.place()
        if place is None:
            raise UserError(f"{self._given} cannot be used now")
        place.directory.pins.write(dataset, pinned)

    def living(self, segnos: frozenset[int]) -> frozenset[int]:
        """Those of these segments that were not deleted. sqlite3.Error."""
        place = self._attachment.place()
        return segnos if place is None else segnos & {r.segno for r in place.index.segments.read()}

    @contextlib.contextmanager
    def saved_table(self, dataset: bytes) -> Iterator[int | None]:
        """A descriptor of what `save_table` left; None: there is none that may be used."""
        fd: int | None = None
        directory = self._given.opened
        with self._attachment.contained(), contextlib.suppress(FileNotFoundError):
            if directory is not None:
                fd = directory.tables.open(dataset)
        try:
            yield fd
        finally:
            if fd is not None:
                os.close(fd)

    def save_table(self, dataset: bytes, most_bytes: int, write: Callable[[int], int]) -> bool:
        """Keep for the next mount of the dataset what `write(fd)` writes, `most_bytes` at most; it
        returns the bytes, and may raise OSError. False: there is no room for it, or a fault.
        """
        attachment, unfinished = self._attachment, None
        with attachment.lock, attachment.contained():
            self._seal()
            place = attachment.usable_place()
            if place is not None and place.directory.is_present():
                unfinished = begin_table(place, dataset, most_bytes)
        if unfinished is None:
            return False
        with attachment.contained():
            try:
                unfinished.finish(write(unfinished.fd))
                return True
            except BaseException:
                unfinished.abandon()
                raise
        return False

    def close(self) -> None:
        with self._attachment.lock:
            if self._attachment.is_closed:
                return
            with self._attachment.contained():
                self._seal()
            self.logs.end_finished()
            self._attachment.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        self.close()
        return False

    # ---- what belongs to the directory, all parts together (with the lock) -----------------------
    def _followed(self, place: Place) -> None:
        if self._segment.writer is not None:
            reindex_own(place, self._segment.writer)
        self.logs.put_rows(place)

    def _gone(self, segno: int) -> None:
        self._puts.gone(segno)
        self._reads.gone(segno)
        if self._attachment.reuse is not None:
            self._attachment.reuse.gone(segno)
        self._on_segment_gone(segno)

    def _let_go(self) -> None:
        self._segment.abandon()
        self._puts.close()

    def _lost(self) -> None:
        self._quarantine.clear()
        self._reads.announce_gone()

    # ---- reports ---------------------------------------------------------------------------------
    @property
    def settings(self) -> StoreSettings:
        """With the limit that holds now, the least of all who use the cache."""
        return self._attachment.settings

    @property
    def adopted(self) -> int:
        """Segments of dead writers, since the start of this process."""
        return self._reconciler.adopted

    def verify(self, dataset: bytes | None) -> Iterator[tuple[Location, RecordFault | None]]:
        """`check` every record in the index (that the dataset uses)."""
        index = self._attachment.current.index
        if index is None:
            return
        self.flush()
        yield from self.check(index.records(dataset))
