"""What one server process counts and measures: each metric is declared here, once.

The counters of the C part, too, which native/base/base.h declares. `fusecache status` reads all at
one moment; it shows only what `status` of server/serving.py places. `fusecache metrics` exports
only what of that, and of hintsd's status, FAMILIES names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Literal


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
FROM_ORIGIN: Final = Counter("from_origin", "reads", "Answered by Python from beyond this host")
BYTES_REPLIED: Final = Counter("bytes_replied", "bytes", "In Python's answers to READs")
BYTES_PUSHED: Final = Counter("bytes_pushed", "bytes", "Pushed from memory into the page cache")
RANGES_DROPPED: Final = Counter("ranges_dropped", "ranges", "Dropped to hold --ram")

ORIGIN_FILES: Final = Counter("origin_files", "files", "Read from the origin by Python's threads")
BYTES_FROM_ORIGIN: Final = Counter("bytes_from_origin", "bytes", "Read there by Python's threads")
POOL_FILES: Final = Counter("pool_files", "files", "From the pool, by Python's threads")
BYTES_FROM_POOL: Final = Counter("bytes_from_pool", "bytes", "From the pool, by Python's threads")
LINKED_FILES: Final = Counter("linked_files", "files", "Found on SSD by a manifest's digest")
LINKED_BYTES: Final = Counter("linked_bytes", "bytes", "Of blocks that were found so")
SERVICE_FILES: Final = Counter("service_files", "files", "Found in the host's cache service")
SERVICE_PUTS: Final = Counter("service_puts", "files", "Put into it")
SERVICE_PUT_BYTES: Final = Counter("service_put_bytes", "bytes", "Of blocks that were put into it")
ORIGIN_ERRORS: Final = Counter("origin_errors", "errors", "Calls that the origin failed")
CHANGES_SEEN: Final = Counter("changes_seen", "names", "Added, removed or changed at the origin")
SWEEPS: Final = Counter("sweeps", "sweeps", "Passes over all listed directories")
SWEPT: Final = Counter("swept", "directories", "Looked at by passes over all listed directories")

NOT_PUBLISHED: Final = Counter("not_published", "blocks", "Fetched, and not put on SSD")
SEGMENTS_LOST: Final = Counter("segments_lost", "segments", "Gone from SSD, but for our own log's")
EVICTED_FILES: Final = Counter("evicted_files", "files", "For hints or `fusecache evict`")
EVICTED_BYTES: Final = Counter("evicted_bytes", "bytes", "Of room on SSD that these gave back")
MISMATCHES: Final = Counter("mismatches", "blocks", "Bad on SSD, met by a reader or `verify`")

PREFETCHED_FILES: Final = Counter("prefetched_files", "files", "For hints, from origin or pool")
PREFETCHED_BYTES: Final = Counter("prefetched_bytes", "bytes", "For hints, from origin or pool")
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
FRONT_WAITED: Final = FrontCounter("front_waited", "READs", "Waited for bytes being staged")
FRONT_FROM_ORIGIN: Final = FrontCounter(
    "front_from_origin", "READs", "Answered by the fetch threads"
)
FRONT_BYTES_FROM_ORIGIN: Final = FrontCounter(
    "front_bytes_from_origin", "bytes", "In those answers"
)
FRONT_FILES_FETCHED: Final = FrontCounter(
    "front_files_fetched", "files", "Read from the origin by the fetch threads"
)
FRONT_BYTES_FETCHED: Final = FrontCounter(
    "front_bytes_fetched", "bytes", "Read from the origin by the fetch threads"
)
FRONT_FILES_POOLED: Final = FrontCounter("front_files_pooled", "files", "From the pool, by C")
FRONT_BYTES_POOLED: Final = FrontCounter("front_bytes_pooled", "bytes", "From the pool, by C")

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


# ---- what monitoring is told ---------------------------------------------------------------------

Of = Literal["mount", "hintsd", "job"]


@dataclass(frozen=True)
class Family:
    """Values of one name that `fusecache metrics` exports: figures of the JSON of `status`.

    `name`: without `fusecache_` and `_total`; of bytes or seconds it ends so. `of`: of each mount,
    each hintsd, or each live job. `figures`: where each stands in
    that JSON, by the value of `label`; "": there is no label, or the figure is a map, whose keys
    are its values. A figure that is absent or null is not exported.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    of: Of
    figures: Mapping[str, str]
    label: str = ""

    @property
    def unit(self) -> str:
        """bytes, seconds or ratio; "": it counts what its name says."""
        last = self.name.rpartition("_")[2]
        return last if last in ("bytes", "seconds", "ratio") else ""


def _declared(metric: Metric, figure: str, name: str = "") -> Family:
    help_ = f"{metric.help} ({metric.unit})"
    return Family(name or metric.name, metric.kind, help_, "mount", {"": figure})


def _family(
    kind: Literal["counter", "gauge"],
    name: str,
    help_: str,
    figures: str | Mapping[str, str],
    label: str = "",
    of: Of = "mount",
) -> Family:
    found = {"": figures} if isinstance(figures, str) else figures
    return Family(name, kind, help_, of, found, label)


_counter, _gauge = partial(_family, "counter"), partial(_family, "gauge")


FAMILIES: Final = (
    _gauge("up", "1: the mount's server answers; 0: it is dead, or late", "up"),
    _gauge("keeper_up", "1: the mount's keeper lives", "keeper_alive"),
    _counter("restarts", "Servers that the keeper started again", "restarts"),
    _gauge("uptime_seconds", "Since it was mounted", "uptime_s"),
    _gauge("counted_seconds", "Since its server began: counters begin then", "counted_s"),
    _gauge("zero_open", "1: zero-open mode; 0: ordinary mode, slower", "zero_open"),
    _declared(INODES, "inodes"),
    _declared(TABLE_BYTES, "table_bytes"),
    _gauge(
        "tier_bytes",
        "What a tier holds: of RAM at most; of SSD what all mounts on the cache directory have",
        {"ram": "ram.bytes", "ssd": "ssd.bytes"},
        "tier",
    ),
    _gauge(
        "tier_limit_bytes",
        "What a tier may hold: --ram, --ssd",
        {"ram": "ram.limit_bytes", "ssd": "ssd.limit_bytes"},
        "tier",
    ),
    _gauge("ssd_reserved_bytes", "On SSD, and reserved for what is written", "ssd.reserved_bytes"),
    _gauge("ssd_blocks", "Blocks on SSD", "ssd.blocks"),
    _gauge("cache_disk_full", "1: others have taken the room that --ssd promises", "disk_full"),
    _gauge("cache_directories_out", "Cache directories out of service", "directories_out"),
    _declared(EVICTED_FILES, "ssd.evicted_files"),
    _declared(EVICTED_BYTES, "ssd.evicted_bytes"),
    _gauge("dataset_files", "Files of the dataset that are known", "dataset.files"),
    _gauge("dataset_bytes", "Of those files", "dataset.bytes"),
    _gauge("dataset_on_ssd_bytes", "Of those, on SSD", "dataset.on_ssd_bytes"),
    _gauge("pinned_files", "Files that a user's pins name", "pins.files"),
    _gauge("pinned_bytes", "Of those files", "pins.bytes"),
    _counter(
        "reads",
        "READs answered, by the tier that had the bytes (origin: beyond this host, the pool "
        "included); READs that the page cache answers reach no mount, and are not counted",
        {"ssd": "reads.from_ssd", "origin": "reads.from_origin"},
        "tier",
    ),
    _counter("read_requests", "READs that reached the mount", "reads.requests"),
    Family(
        "read_seconds",
        "histogram",
        "READs that reached the mount and were answered with bytes, from their arrival on",
        "mount",
        {"": "reads.read_s"},
    ),
    _counter(
        "metadata_requests",
        "Answered by C, of what the kernel asked; all are 0 in ordinary mode",
        {
            "lookup": "metadata.lookups",
            "getattr": "metadata.getattrs",
            "readdir": "metadata.readdirs",
        },
        "kind",
    ),
    _counter("python_requests", "Of all kinds, handed to Python", "metadata.to_python"),
    _counter("waited_reads", FRONT_WAITED.help, "reads.waited_for_staging"),
    _counter("served_bytes", "Given to readers or to the page cache", "reads.bytes_served"),
    _counter("pushed_bytes", "Of those, pushed into the page cache", "reads.bytes_pushed"),
    _counter("staged_bytes", FRONT_BYTES_STAGED.help, "reads.bytes_staged"),
    _gauge("origin_up", "1: the origin answers; 0: cached files alone are served",
           "origin.available"),
    _counter("origin_files", "Files read at the origin", "origin.files"),
    _counter("origin_bytes", "Read at the origin", "origin.bytes"),
    _declared(ORIGIN_ERRORS, "origin.errors"),
    Family(
        "origin_read_seconds",
        "histogram",
        "Reads of the origin that ended well: a small file or a block, from open to close",
        "mount",
        {"": "origin.read_s"},
    ),
    _counter("pool_files", "Files that other hosts had read", "pool.files"),
    _counter("pool_bytes", "Of them", "pool.bytes"),
    _counter("pool_misses", "Blocks that the pool was asked for, and had not", "pool.misses"),
    _counter("pool_waits", "Waits until another host had read a block", "pool.waits"),
    _counter("pool_written_bytes", "Written for other hosts", "pool.bytes_written"),
    _counter(
        "pool_faults",
        "Requests that failed; blocks that were wrong; not asked, for a server was left alone",
        {"failed": "pool.failures", "damaged": "pool.damaged", "skipped": "pool.skipped"},
        "kind",
    ),
    _declared(LINKED_FILES, "manifest.linked_files"),
    _declared(LINKED_BYTES, "manifest.linked_bytes"),
    _declared(SERVICE_FILES, "service.found_files"),
    _declared(SERVICE_PUTS, "service.put_files"),
    _declared(SERVICE_PUT_BYTES, "service.put_bytes"),
    _gauge("hinted", "1: a hintsd plans for the mount", "prefetch.connected"),
    _declared(DEPTH, "prefetch.depth", "prefetch_depth"),
    _declared(IN_FLIGHT, "prefetch.in_flight", "prefetch_in_flight"),
    _gauge(
        "queued_files",
        "To be staged (from SSD into RAM), to be fetched (from origin or pool)",
        {"stage": "prefetch.queued_stage", "fetch": "prefetch.queued_fetch"},
        "queue",
    ),
    _declared(PREFETCHED_FILES, "prefetch.files"),
    _declared(PREFETCHED_BYTES, "prefetch.bytes"),
    _declared(OVERTAKING_READS, "prefetch.overtaking_reads"),
    _declared(RESTORED_FILES, "prefetch.restored_files"),
    _declared(RECLAIMED_FILES, "prefetch.reclaimed_files"),
    _counter("log_written_bytes", "Written anew by --layout reorder", "layout.log_written_bytes"),
    _declared(MISMATCHES, "integrity.mismatches"),
    _counter("cache_faults", "Of the cache directory or its disk", "integrity.faults", "kind"),
    _declared(SWEEPS, "revalidate.sweeps"),
    _declared(SWEPT, "revalidate.swept"),
    _gauge("last_sweep_seconds", "What the last sweep took", "revalidate.last_sweep_s"),
    _declared(CHANGES_SEEN, "revalidate.changes_seen"),
    # ---- of hintsd
    _gauge("hintsd_up", "1: the hintsd that a mount is to have answers", "up", of="hintsd"),
    _gauge("hintsd_uptime_seconds", "Since it began", "uptime_s", of="hintsd"),
    _gauge("hintsd_connections", "Trainers and commands", "connections", of="hintsd"),
    _gauge("job_state", "1: the job's state", "states", "state", of="job"),
    _gauge("job_epoch", "The epoch that it reads, from 0", "epoch", of="job"),
    _gauge("job_epochs", "All of its epochs", "epochs", of="job"),
    _gauge("job_sample", "Where in the epoch it reads", "index", of="job"),
    _gauge("job_samples", "Samples of the epoch", "samples", of="job"),
    _gauge("job_samples_per_second", "As fast as it reads", "samples_per_s", of="job"),
    _counter("job_reads", "Reads of samples that were not late", "not_late", of="job"),
    _counter("job_late_reads", "Reads before the sample was in RAM", "late", "reason", of="job"),
    _counter("job_unplanned_reads", "Reads that no plan was for", "unplanned", "reason", of="job"),
    _gauge("job_window_bytes", "What it will read next, held in RAM", "window_bytes", of="job"),
    _gauge("job_ahead_bytes", "In RAM before the first that is missing", "ahead_bytes", of="job"),
    _gauge("job_predicted_stall_seconds", "In the rest of this epoch", "predicted_stall_s",
           of="job"),
    _gauge("job_hit_ratio", "Samples read that took no file from the origin", "hits", of="job"),
    _gauge("job_kept_bytes", "Of RAM, what stays from epoch to epoch", "kept_bytes", of="job"),
    _gauge("job_withheld_bytes", "Of RAM, left to the kernel, which reclaims it", "withheld_bytes",
           of="job"),
)  # fmt: skip
"""All that is exported, in this order."""


def figure(values: Mapping[str, Any], path: str) -> Any:
    """What stands at that path ("origin.bytes") in a JSON; None: nothing does."""
    found: Any = values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
