"""Of a recording's rows the accesses: what a hint told is merged with what was seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from fusecache.traces.trace import BY_HINT, CONTINUES, Gap, Integers, Trace

_HOW: Final = 7  # the bits of `seen` that are no flags
_NESTED_MOST: Final = 64  # uses of one item that are seen before the first is told: bounds the work
_BEHIND_MOST: Final = 1 << 16  # samples that hintsd is behind a reader, at most

_Mask = npt.NDArray[np.bool_]


def accesses(trace: Trace) -> Trace:
    """Of a recording's rows, one for each access: without those that continue one (CONTINUES), and
    what a hint told merged with what was seen of the same access.

    Told rows of a job keep their order, which is the job's. Each takes the latest row that was seen
    of its item before it was told and that no other has taken, if one is not too old: `seen`
    and time come from there, and so does its place among the rows of others, unless the job was
    further already. The others stand behind the one before them, at a time between those of their
    neighbours that were seen.
    """
    if trace.seen is None:
        return trace
    trace = trace.select(trace.seen & CONTINUES == 0)
    assert trace.seen is not None
    told: _Mask = trace.seen & _HOW == BY_HINT
    return _merged(trace, trace.seen, told) if told.any() else trace


def _merged(trace: Trace, seen: Integers, told: _Mask) -> Trace:
    readers = np.zeros(len(told), np.int32) if trace.readers is None else trace.readers
    times_s = None if trace.times_s is None else trace.times_s.copy()
    when = np.arange(len(told)) if trace.times_s is None else trace.times_s
    taken = _latest_seen(trace.items, when, told)  # by each told row; -1: none
    keys, how = np.arange(len(told)), seen.copy()
    for job in np.unique(readers[told]):
        its = np.flatnonzero(told & (readers == job))
        found = taken[its]
        found[_BEHIND_MOST:][found[_BEHIND_MOST:] < its[:-_BEHIND_MOST]] = -1
        taken[its] = found
        known = np.flatnonzero(found >= 0)
        if len(known) == 0:
            continue
        how[its[known]] = seen[found[known]]
        keys[its] = np.maximum(np.maximum.accumulate(found), found[known[0]])
        if times_s is not None:
            ascending = np.maximum.accumulate(times_s[found[known]])
            times_s[its] = np.interp(np.arange(len(its)), known, ascending)
    merged = np.flatnonzero(taken >= 0)
    kept = np.ones(len(told), np.bool_)
    kept[taken[merged]] = False
    order = np.argsort(keys, kind="stable")
    order = order[kept[order]]
    moved_to = np.full(len(told) + 1, len(order))
    moved_to[order] = np.arange(len(order))
    moved_to[taken[merged]] = moved_to[merged]

    def moved(positions: Iterable[int]) -> list[int]:
        found: list[int] = np.maximum.accumulate(
            moved_to[np.fromiter(positions, np.int64)]
        ).tolist()
        return found

    importances = moved(what.position for what in trace.importances)
    gaps = moved(gap.position for gap in trace.gaps)
    return replace(
        trace,
        items=trace.items[order],
        epoch_starts=np.unique([0, *moved(trace.epoch_starts[1:])]),
        times_s=None if times_s is None else times_s[order],
        readers=None if trace.readers is None else trace.readers[order],
        seen=how[order],
        importances=tuple(
            replace(what, position=at)
            for at, what in zip(importances, trace.importances, strict=True)
        ),
        gaps=tuple(Gap(at, gap.lost) for at, gap in zip(gaps, trace.gaps, strict=True)),
    )


def _latest_seen(items: Integers, when: npt.NDArray[Any], told: _Mask) -> npt.NDArray[np.int64]:
    """For each told row the row that was seen of its item: like brackets, inner pairs first."""
    found = np.full(len(items), -1, np.int64)
    left = np.lexsort((when, items))  # stable; rows are written later than they are told
    for _ in range(_NESTED_MOST):
        is_pair = ~told[left[:-1]] & told[left[1:]] & (items[left[:-1]] == items[left[1:]])
        pairs = np.flatnonzero(is_pair)
        if len(pairs) == 0:
            break
        found[left[pairs + 1]] = left[pairs]
        left = np.delete(left, np.concatenate((pairs, pairs + 1)))
    return found
