"""A trace in memory: which item was read when, by whom (docs/TRACES.md)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusecache.base.errors import EXIT_USAGE, UserError

# How a mount saw an access: the low bits of `seen`.
OPENED: Final = 1  # a look-up or an open
FROM_SSD: Final = 2  # a READ at offset 0, answered from SSD
FROM_ORIGIN: Final = 3  # a READ at offset 0, answered from beyond this host
ELSEWHERE: Final = 4  # a READ at another offset of a file of several blocks
BY_HINT: Final = 5  # not seen: hintsd says that a hinted reader has passed it
CONTINUES: Final = 16  # flag: part of an access that has been noted before

# How the source line of a recording ends that does not hold all that was read.
MISSES_ONLY: Final = "READs and fired tripwires only"

Path_ = str | os.PathLike[str]
Integers = npt.NDArray[Any]
Floats = npt.NDArray[Any]


class TraceError(UserError):
    """A file that is no trace, is damaged, or is of another version; names file and block."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=EXIT_USAGE)


@dataclass(frozen=True, slots=True)
class Importance:
    """What a sampler was told before the access at `position`."""

    position: int
    items: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Gap:
    """Before the access at `position`, accesses are missing: `lost` of them, None: not known."""

    position: int
    lost: int | None


@dataclass(frozen=True, slots=True)
class Trace:
    """An access sequence.

    items: which item each access reads, int64, shape (accesses,)
    sizes: bytes of each item, int64, shape (items,)
    epoch_starts: positions where an epoch begins, int64, ascending, the first is 0
    times_s: since the recording began, float64, shape (accesses,), to the microsecond; None: none
    importances: in the order of their positions
    readers: who read (thread id or rank; -n: the n-th job that hints told of; 0: not known), int32,
        shape (accesses,); None: one reader
    seen: how a mount saw it (OPENED, FROM_SSD, …), uint8, shape (accesses,); None: all are exact
    names: path of each item; None: none
    source: one line: where it comes from
    gaps: where a recording lost accesses, in the order of their positions
    is_complete: False: the writer was killed; later accesses may be missing
    """

    items: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    epoch_starts: npt.NDArray[np.int64]
    times_s: npt.NDArray[np.float64] | None
    importances: tuple[Importance, ...]
    readers: npt.NDArray[np.int32] | None
    seen: npt.NDArray[np.uint8] | None
    names: tuple[str, ...] | None
    source: str
    gaps: tuple[Gap, ...] = ()
    is_complete: bool = True

    def check(self) -> None:
        """ValueError, naming the field, where the parts do not belong together."""
        accesses, items = len(self.items), len(self.sizes)
        if accesses and not 0 <= int(self.items.min()) <= int(self.items.max()) < items:
            raise ValueError(f"items: each must be 0 or more and less than {items}")
        if items and int(self.sizes.min()) < 0:
            raise ValueError("sizes: each must be 0 or more")
        starts = self.epoch_starts
        if len(starts) == 0 or int(starts[0]) != 0 or np.any(np.diff(starts) <= 0):
            raise ValueError("epoch_starts: must be ascending and begin with 0")
        if int(starts[-1]) > accesses:
            raise ValueError(f"epoch_starts: {int(starts[-1])} is beyond the {accesses} accesses")
        for field, column, length in (
            ("times_s", self.times_s, accesses),
            ("readers", self.readers, accesses),
            ("seen", self.seen, accesses),
            ("names", self.names, items),
        ):
            if column is not None and len(column) != length:
                raise ValueError(f"{field}: {len(column)} values instead of {length}")
        if self.times_s is not None and not np.all(np.isfinite(self.times_s)):
            raise ValueError("times_s: each must be a finite number")
        for what, marks in (("importances", self.importances), ("gaps", self.gaps)):
            positions = [0, *(mark.position for mark in marks), accesses]
            if positions != sorted(positions):
                raise ValueError(f"{what}: positions must not descend or exceed {accesses}")
        for told in self.importances:
            if len(told.items) != len(told.values):
                raise ValueError(f"importances: {len(told.items)} items, {len(told.values)} values")
            if len(told.items) and not (
                0 <= int(told.items.min()) <= int(told.items.max()) < items
            ):
                raise ValueError(f"importances: items must be 0 or more and less than {items}")

    def select(self, mask: npt.NDArray[np.bool_]) -> Trace:
        """The accesses for which `mask` (shape (accesses,)) is true; positions move along."""
        before = np.concatenate(([0], np.cumsum(mask)))
        starts = np.unique(before[self.epoch_starts])
        return replace(
            self,
            items=self.items[mask],
            epoch_starts=starts.astype(np.int64),
            times_s=None if self.times_s is None else self.times_s[mask],
            readers=None if self.readers is None else self.readers[mask],
            seen=None if self.seen is None else self.seen[mask],
            importances=tuple(
                replace(told, position=int(before[told.position])) for told in self.importances
            ),
            gaps=tuple(replace(gap, position=int(before[gap.position])) for gap in self.gaps),
        )
