"""From one mount of a source to the next: names and attributes (docs/SEMANTICS.md, docs/FORMAT.md
"Saved tables"). What is written and believed is native/table/saved.c's business, where it lies
store/directory/tables.py's.
"""

from __future__ import annotations

import json
import logging
import time

import xxhash

from fusecache import _native
from fusecache.store import Store

log = logging.getLogger(__name__)

ROOT_INO = 1


class SavedTable:
    """That of one source. Without a usable one a mount begins with nothing: one line of the log."""

    def __init__(
        self, store: Store, dataset: bytes, identity: dict[str, str] | None, is_swept: bool
    ) -> None:
        """`identity`: of the source in the mount table (mounts.identity). Not `is_swept`: what is
        listed is never looked at again, so nothing comes from an earlier mount or goes to a later.
        """
        self._is_swept = is_swept
        self._store = store
        self._dataset = dataset
        # Several may have lain at the path, one after the other.
        key = dataset + json.dumps(identity, sort_keys=True).encode()
        self._source = xxhash.xxh3_128_digest(key)
        self.is_loaded = False
        """The table began with what an earlier mount knew."""

    def load(self) -> None:
        """Into the empty table of a mount that has answered nothing yet. Blocking."""
        if not self._is_swept:
            return
        with self._store.saved_table(self._dataset) as fd:
            if fd is None:
                return
            try:
                why_not = _native.load_table(fd, self._source)
            except OSError as error:
                why_not = str(error)
        self.is_loaded = not why_not
        if why_not:
            log.warning("the saved table is not used: %s", why_not)

    def save(self) -> None:
        """When the mount has ended; nothing, where nothing is known. Blocking."""
        if not self._is_swept or _native.count() == ROOT_INO:
            return
        begun_s = time.monotonic()
        if self._store.save_table(self._dataset, _native.saved_bytes(), self._write):
            seconds = time.monotonic() - begun_s
            log.info("%d names saved for the next mount, in %.2f s", _native.count(), seconds)

    def _write(self, fd: int) -> int:
        return _native.save_table(fd, self._source)
