"""Access traces: which item was read when, by whom; in memory and as a file (docs/TRACES.md).

It knows no mount: recording/recorder.py records.
"""

from __future__ import annotations

import contextlib
import itertools
import os

from fusecache.traces.blocks import BLOCK_ACCESSES, VERSION
from fusecache.traces.merging import accesses
from fusecache.traces.reader import Reading
from fusecache.traces.trace import (
    BY_HINT,
    CONTINUES,
    ELSEWHERE,
    FROM_ORIGIN,
    FROM_SSD,
    MISSES_ONLY,
    OPENED,
    Gap,
    Importance,
    Path_,
    Trace,
    TraceError,
)
from fusecache.traces.writer import Writer

__all__ = [
    "BLOCK_ACCESSES", "BY_HINT", "CONTINUES", "ELSEWHERE", "FROM_ORIGIN", "FROM_SSD", "MISSES_ONLY",
    "OPENED", "VERSION", "Gap", "Importance", "Trace", "TraceError", "Writer", "accesses", "read",
    "write",
]  # fmt: skip


def read(path: Path_, *, parts: bool = False) -> Trace:
    """The trace in `path`; of one whose writer was killed, all that was written in whole blocks.
    Takes up to some 160 bytes of memory an access.

    `parts`: all rows, as they are written; else `accesses` of them.
    TraceError: no trace, damaged, of another version, or larger than memory. OSError.
    """
    with open(path, "rb") as file:
        reading = Reading(os.fsdecode(path), file)
        for block in reading.blocks():
            reading.take(*block)
        trace = reading.trace()
    return trace if parts else accesses(trace)


def write(path: Path_, trace: Trace) -> None:
    """The whole trace; `path` names it when it is complete, and what it named before until then.

    ValueError: parts of the trace do not belong together (`Trace.check`). OSError.
    """
    trace.check()
    part = f"{os.fspath(path)}.part"
    writer = Writer(
        part,
        source=trace.source,
        times=trace.times_s is not None,
        readers=trace.readers is not None,
        seen=trace.seen is not None,
        names=trace.names is not None,
        force=True,
    )
    try:
        with writer:
            writer.add_items(trace.sizes, trace.names)
            _write_accesses(writer, trace)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def _write_accesses(writer: Writer, trace: Trace) -> None:
    starts = set(map(int, trace.epoch_starts))
    marks = starts | {told.position for told in trace.importances}
    marks |= {gap.position for gap in trace.gaps} | {len(trace.items)}
    importances, gaps = list(trace.importances), list(trace.gaps)
    for begin, end in itertools.pairwise([*sorted(marks), len(trace.items)]):
        if begin in starts:
            writer.begin_epoch()
        while importances and importances[0].position == begin:
            writer.tell(importances[0].items, importances[0].values)
            del importances[0]
        while gaps and gaps[0].position == begin:
            writer.note_gap(gaps[0].lost)
            del gaps[0]
        if end > begin:
            some = slice(begin, end)
            writer.add(
                trace.items[some],
                times_s=None if trace.times_s is None else trace.times_s[some],
                readers=None if trace.readers is None else trace.readers[some],
                seen=None if trace.seen is None else trace.seen[some],
            )
