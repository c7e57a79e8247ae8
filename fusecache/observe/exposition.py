"""The figures of all mounts and jobs of a host for Prometheus: base/metrics.py says which.

Counters begin when a mount's server does, and a job's when its hintsd does: they are 0 again after
a restart, which `rate` takes into account; `restarts` and `uptime_seconds` go on.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest as as_text
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics
from prometheus_client.registry import Collector, CollectorRegistry

from fusecache.base.command import printable
from fusecache.base.metrics import FAMILIES, Family, Of, figure
from fusecache.observe.asking import Host, look, maps

PREFIX: Final = "fusecache_"
FILE_NAME: Final = "fusecache.prom"
KEPT_S: Final = 1.0
"""One look serves all who ask meanwhile."""

Labels = dict[str, str]
Values = Mapping[str, Any]


class HostCollector(Collector):
    """Asks whenever it is scraped."""

    def __init__(self, ask: Callable[[], Host] = look) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._host: Host | None = None
        self._asked_s = 0.0

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if self._host is None or time.monotonic() > self._asked_s + KEPT_S:
                self._host, self._asked_s = self._ask(), time.monotonic()
            host = self._host
        yield _mounts(host)
        sources = _sources(host)
        for family in FAMILIES:
            yield _exported(family, sources[family.of])


def registry(ask: Callable[[], Host] = look) -> CollectorRegistry:
    """For the exporters of prometheus-client."""
    found = CollectorRegistry(auto_describe=False)
    found.register(HostCollector(ask))
    return found


def text(found: CollectorRegistry) -> str:
    """OpenMetrics."""
    return str(as_openmetrics(found).decode())  # type: ignore[no-untyped-call]


def write(found: CollectorRegistry, directory: str) -> None:
    """For node_exporter, whole or not at all, in the older text format, which is what it reads.
    OSError.
    """
    content = as_text(found)
    # Not prometheus-client's own: what that writes to first has a name that others can foretell.
    fd, temporary = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=directory)
    try:
        with open(fd, "wb") as file:
            file.write(content)
            os.fchmod(fd, 0o644)
        os.replace(temporary, Path(directory, FILE_NAME))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _mounts(host: Host) -> Metric:
    """What a mount is, as labels."""
    info = InfoMetricFamily(f"{PREFIX}mount", "What the mount is", labels=["mount"])
    for one in host.mounts:
        if one.status:
            version = str(one.status.get("version", ""))
            named = {"source": printable(one.target.mount.source), "version": version}
            info.add_metric([printable(one.mountpoint)], named)
    return info


def _sources(host: Host) -> dict[Of, list[tuple[Labels, Values]]]:
    """What there is of each kind: its labels, and its figures."""
    found: dict[Of, list[tuple[Labels, Values]]] = {
        "mount": [], "hintsd": [], "job": [],
    }  # fmt: skip
    for one in host.mounts:
        if one.state != "private":
            found["mount"].append(({"mount": one.mountpoint}, _of_mount(one.status)))
    for path, status in host.hintsds.items():
        up = {"up": status is not None}
        found["hintsd"].append(({"socket": path}, {**(status or {}), **up}))
        for job in maps((status or {}).get("jobs")):
            # `job` is a label of Prometheus' own.
            labels = {"mount": str(job.get("mountpoint") or ""), "hinted_job": str(job.get("name"))}
            found["job"].append((labels, {**job, "states": {str(job.get("state")): 1}}))
    return found


def _of_mount(status: Values) -> Values:
    if not status:
        return {"up": False}
    directories = figure(status, "ssd.directories") or []
    return {
        **status,
        "up": True,
        "disk_full": figure(status, "ssd.full_disk_bytes") is not None,
        "directories_out": sum(bool(one.get("why_out")) for one in directories),
    }


def _exported(family: Family, sources: list[tuple[Labels, Values]]) -> Metric:
    own = [*dict.fromkeys(name for labels, _ in sources for name in labels)]
    names = [*own, family.label] if family.label else own
    new: Any = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }[family.kind]
    found: Metric = new(PREFIX + family.name, family.help, labels=names, unit=family.unit)
    told = set[tuple[str, ...]]()
    for labels, values in sources:
        for label, value in _samples(family, values):
            texts = [printable(labels[name]) for name in own] + ([label] if family.label else [])
            if tuple(texts) not in told:  # names that are shown alike are one
                told.add(tuple(texts))
                _add(found, texts, value)
    return found


def _samples(family: Family, values: Values) -> Iterator[tuple[str, Any]]:
    for label, path in family.figures.items():
        found = figure(values, path)
        if family.label and not label:
            for key, value in found.items() if isinstance(found, dict) else ():
                yield printable(key), value
        elif found is not None:
            yield label, found


def _add(family: Metric, labels: list[str], value: Any) -> None:
    if isinstance(family, HistogramMetricFamily):
        bounds = [*(repr(float(bound)) for bound in value["bounds"]), "+Inf"]
        buckets = list(zip(bounds, accumulate(value["counts"]), strict=True))
        family.add_metric(labels, buckets=buckets, sum_value=float(value["sum"]))
    else:
        family.add_metric(labels, float(value))  # type: ignore[attr-defined]
