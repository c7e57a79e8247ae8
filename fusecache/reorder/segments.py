"""Which segments the logs have, and which go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fusecache import _native
from fusecache.reorder.choosing import Candidates, Use
from fusecache.store import Store
from fusecache.store.log import Log


def survey() -> list[Use]:
    """Of each segment into which a location leads. Scans the table."""
    return [Use(*use) for use in _native.log_survey()]


class Segments:
    """Of one mount."""

    def __init__(self, store: Store, releasing: set[int]) -> None:
        """`releasing`: see Packer."""
        self._store = store
        self._releasing = releasing
        self._ours: set[int] = set()  # of its logs, not released yet
        self._left: Counter[int] = Counter()  # segment -> files whose location was switched away
        self._can_empty: dict[int, bool] = {}  # static segment -> only this mount leads there
        self._kept: dict[int, int] = {}  # ... -> how many had left it when it could not go

    def __len__(self) -> int:
        return len(self._ours)

    def copy(self) -> set[int]:
        """Those of its logs."""
        return self._ours.copy()

    def begin(self, segnos: Iterable[int]) -> None:
        """A log begins, with these."""
        self._ours.update(segnos)
        self._can_empty.clear()
        self._kept.clear()

    def give_up(self, segnos: Iterable[int]) -> None:
        """They are the store's."""
        self._ours.difference_update(segnos)

    def give_up_all(self) -> None:
        self._ours.clear()
        self._left.clear()

    def candidates(self, opened: Log, uses: list[Use], newest: set[int]) -> Candidates:
        whole = [use for use in uses if use.to_come == use.files and use.segno not in opened.segnos]
        unknown = [
            use for use in whole if use.segno not in self._ours and use.segno not in self._can_empty
        ]
        rows = opened.rows_in([use.segno for use in unknown])
        for use in unknown:
            if use.segno in rows:  # else it is to be adopted yet, perhaps
                has_left = self._left[use.segno] + use.files
                self._can_empty[use.segno] = has_left >= rows[use.segno]
        found = Candidates([], [], [])
        reserved = opened.reserved()
        for use in whole:
            if use.segno in self._ours or self._can_empty.get(use.segno, False):
                is_dead = 2 * use.bytes < reserved.get(use.segno, 0)
                is_next = use.segno in newest
                group = found.dead if is_dead else found.next if is_next else found.scattered
                group.append(use)
        return found

    def release_empty(self, newest: Log, uses: list[Use]) -> bool:
        """Whether there was one."""
        self._left.update(dict(_native.log_left()))
        live = {use.segno for use in uses}
        is_open = set[int]() if newest.is_finished else set(newest.segnos)
        gone = [segno for segno in self._ours if segno not in live and segno not in is_open]
        static = [
            segno
            for segno, left in self._left.items()
            if segno not in live and segno not in self._ours and self._kept.get(segno) != left
        ]
        if self._store.seal_in(static):  # it may have got more before: looked at again
            return self.release_empty(newest, survey())
        rows = newest.rows_in(static)
        gone += [segno for segno, count in rows.items() if count <= self._left[segno]]
        self._kept.update({segno: self._left[segno] for segno in rows})
        if not gone:
            return False
        self.release(newest, gone)
        for segno in gone:
            if not _native.segment_known(segno):  # else it is there still
                self._ours.discard(segno)
                del self._left[segno]
                self._kept.pop(segno, None)
        return True

    def remove_dead(self) -> None:
        """Delete sealed segments to which nothing leads: what logs that were cut off have left."""
        directory, segnos = self._store.logs.unused()
        live = {use.segno for use in survey()} if segnos else set[int]()
        dead = [segno for segno in segnos if segno not in live]
        if directory is not None and dead:
            self._releasing.update(dead)
            self._store.logs.release(directory, dead)
            self._releasing.clear()

    def release(self, opened: Log, segnos: list[int]) -> None:
        self._releasing.update(segnos)
        opened.release(segnos)
        self._releasing.clear()
