"""What one server process counts and measures: each metric is declared here, once.

The counters of the C part, too, which native/base/base.h declares. `fusecache status` reads all at
one moment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal


@dataclass(frozen=True, eq=False)
class Metric:
    """`name`: unique; `help`: what it says, in a line."""

    kind: ClassVar[Literal["counter", "gauge"]]

    name: str
    unit: str
    help: str


class Counter(Metric):
    """Only grows while the server lives. Counted in Python."""

    kind = "counter"


class FrontCounter(Metric):
    """As a Counter, but counted by the C part, in the counter `of_c`."""

    kind = "counter"

    @property
    def of_c(self) -> str:
        return self.name.removeprefix("front_")


class Gauge(Metric):
    """Goes up and down. Its owner is asked."""

    kind = "gauge"


# READs that come to Python: all in ordinary mode, else those that the front does not answer.
REQUESTS: Final = Counter("requests", "READs", "READs that came to Python")
FROM_SSD: Final = Counter("from_ssd", "reads", "Answered by Python from SSD")
FROM_ORIGIN: Final = Counter("from_origin", "reads", "Answered by Python from the origin")
BYTES_REPLIED: Final = Counter("bytes_replied", "bytes", "In Python's answers to READs")
BYTES_PUSHED: Final = Counter("bytes_pushed", "bytes", "Pushed from memory into the page cache")
RANGES_DROPPED: Final = Counter("ranges_dropped", "ranges", "Dropped to hold --ram")

ORIGIN_FILES: Final = Counter("origin_files", "files", "Read from the origin by Python's threads")
BYTES_FROM_ORIGIN: Final = Counter("bytes_from_origin", "bytes", "Read there by Python's threads")
LINKED_FILES: Final = Counter("linked_files", "files", "Found on SSD by a manifest's digest")
LINKED_BYTES: Final = Counter("linked_bytes", "bytes", "Of blocks that were found so")
ORIGIN_ERRORS: Final = Counter("origin_errors", "errors", "Calls that the origin failed")
CHANGES_SEEN: Final = Counter("changes_seen", "names", "Added, removed or changed at the origin")
SWEEPS: Final = Counter("sweeps", "sweeps", "Passes over all listed directories")

NOT_PUBLISHED: Final = Counter("not_published", "blocks", "Fetched, and not put on SSD")
SEGMENTS_LOST: Final = Counter("segments_lost", "segments", "Gone from SSD, but for our own log's")
EVICTED_FILES: Final = Counter("evicted_files", "files", "Evicted, one by one, for hints")
EVICTED_BYTES: Final = Counter("evicted_bytes", "bytes", "Of room on SSD that these gave back")
MISMATCHES: Final = Counter("mismatches", "blocks", "Bad on SSD, met by a reader or `verify`")

PREFETCHED_FILES: Final = Counter("prefetched_files", "files", "Fetched from the origin for hints")
PREFETCHED_BYTES: Final = Counter("prefetched_bytes", "bytes", "Fetched from the origin for hints")
OVERTAKING_READS: Final = Counter("overtaking_reads", "READs", "Of files staged, or to be staged")
WINDOW_LOOKS: Final = Counter("window_looks", "looks", "At whether the kernel kept what is staged")
RESTORED_FILES: Final = Counter("restored_files", "files", "Staged again: the kernel let them go")
RECLAIMED_FILES: Final = Counter("reclaimed_files", "files", "Let go of by the kernel, not on SSD")

FRONT_REQUESTS: Final = FrontCounter("front_requests", "READs", "READs that reached the front")
FRONT_FROM_SSD: Final = FrontCounter("front_from_ssd", "READs", "Answered by C from SSD")
FRONT_BYTES_FROM_SSD: Final = FrontCounter("front_bytes_from_ssd", "bytes", "In those answers")
FRONT_LOOKUPS: Final = FrontCounter("front_lookups", "requests", "LOOKUPs answered by C")
FRONT_GETATTRS: Final = FrontCounter("front_getattrs", "requests", "GETATTRs answered by C")
FRONT_READDIRS: Final = FrontCounter("front_readdirs", "requests", "READDIRPLUS answered by C")
FRONT_SLOW: Final = FrontCounter("front_slow", "requests", "Handed to Python")
FRONT_FAULTS: Final = FrontCounter("front_faults", "records", "Bad or unreadable ones met by C")
FRONT_BYTES_STAGED: Final = FrontCounter("front_bytes_staged", "bytes", "Pushed from SSD for hints")
FRONT_WAITED: Final = FrontCounter("front_waited", "READs", "Waited for their chunk")
FRONT_FROM_ORIGIN: Final = FrontCounter("front_from_origin", "READs", "Answered by the fetch pool")
FRONT_BYTES_FROM_ORIGIN: Final = FrontCounter(
    "front_bytes_from_origin", "bytes", "In those answers"
)
FRONT_FILES_FETCHED: Final = FrontCounter("front_files_fetched", "files", "Read by the fetch pool")
FRONT_BYTES_FETCHED: Final = FrontCounter("front_bytes_fetched", "bytes", "Read by the fetch pool")

INODES: Final = Gauge("inodes", "inodes", "In the table")
TABLE_BYTES: Final = Gauge("table_bytes", "bytes", "Memory of the C part")
RAM_BYTES: Final = Gauge("ram_bytes", "bytes", "Of the mount in the page cache, at most")
DEPTH: Final = Gauge("depth", "fetches", "As many are in flight at most")
QUEUED_STAGE: Final = Gauge("queued_stage", "files", "To be staged")
QUEUED_FETCH: Final = Gauge("queued_fetch", "files", "To be fetched")
IN_FLIGHT: Final = Gauge("in_flight", "fetches", "For hints, in flight")

DECLARED: Final = tuple(found for found in list(globals().values()) if isinstance(found, Metric))


class Metrics:
    """The values of one server. Thread-safe."""

    def __init__(self, front: Callable[[], Mapping[str, int]] | None = None) -> None:
        """`front`: the counters of the C part, by name; None: it is not there."""
        self._front = front
        self._lock = threading.Lock()
        self._counts: dict[Metric, int] = {
            metric: 0 for metric in DECLARED if isinstance(metric, Counter)
        }
        self._gauges: dict[Gauge, Callable[[], int]] = {}

    def add(self, metric: Counter, amount: int = 1) -> None:
        with self._lock:
            self._counts[metric] += amount

    def watch(self, metric: Gauge, ask: Callable[[], int]) -> None:
        """From now on `ask` says what it is."""
        self._gauges[metric] = ask

    def read(self) -> dict[Metric, int]:
        """All that are counted or watched here, at one moment."""
        with self._lock:
            found = dict(self._counts)
        if self._front is not None:
            front = self._front()
            for metric in DECLARED:
                if isinstance(metric, FrontCounter):
                    found[metric] = front[metric.of_c]
        return found | {gauge: ask() for gauge, ask in self._gauges.items()}
