"""What was measured, and how it compares: medians, ratios, targets; JSON and Markdown.

INVARIANT: a ratio is the median of the ratios of single rounds, in which both peers ran within
seconds of each other; a machine that gets slower meanwhile slows both. Values are "more is better"
unless the unit is seconds or bytes.
"""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Series:
    row: str
    work: str
    peer: str
    unit: str
    values: list[float] = field(default_factory=list)  # one a round

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Target:
    """`peer`'s figure against `against`'s (None: a plain limit)."""

    row: str
    work: str
    against: str | None
    limit: float
    at_most: bool = False
    peer: str = "fusecache"
    against_work: str | None = None  # None: the same work

    def claim(self) -> str:
        sign = "≤" if self.at_most else "≥"
        if self.against is None:
            return f"{self.row}: {self.work} {sign} {self.limit:,.6g}"
        other = self.against if self.against_work is None else f"{self.against} {self.against_work}"
        who = "" if self.peer == "fusecache" else f"{self.peer}, "
        return f"{self.row}: {who}{self.work} {sign} {self.limit:g} × {other}"


TARGETS = (
    Target("hot", "1 reader", "native", 0.95),
    Target("hot", "4 readers", "native", 0.95),
    Target("hot", "1 reader", "bindfs", 1.7),
    Target("hot", "4 readers", "bindfs", 1.7),
    Target("hot", "1 reader", "juicefs", 2.5),
    Target("hot", "4 readers", "juicefs", 2.5),
    Target("cold", "1 reader", "juicefs", 1.5),
    Target("cold", "4 readers", "juicefs", 1.5),
    Target("cold", "1 reader", "native", 0.6),
    Target("cold", "4 readers", "native", 0.6),
    *(
        Target("service", f"alone, {row}, {readers}", "fusecache", limit, peer="service")
        for row, limit in (("hot", 0.95), ("cold", 0.85))
        for readers in ("1 reader", "4 readers")
    ),
    Target("service", "two users, same order: from the origin", None, 1.1, True, peer="service"),
    Target("listing", "first", None, 150_000),
    Target("listing", "again", "native", 0.7),
    Target("listing", "stat of each", "native", 0.7),
    Target("stream", "cold, store empty", "native", 0.6, against_work="cold"),
    Target("stream", "cold, from the store", "native", 0.6, against_work="cold"),
    Target("stream", "hot", "native", 0.9),
    Target("memory", "proportional set size", None, 150, at_most=True),
    Target("kill", "next byte", None, 0.5, at_most=True),
    Target("hinted", "110 KB, begun cold", "device", 0.85),
    Target("hinted", "110 KB, next epoch", "device", 0.85),
    Target("hinted", "10 KB, begun cold", "native", 1.2),
    Target("hinted", "10 KB, next epoch", "native", 1.2),
    *(
        Target("hot-hinted", f"{count} files, {readers}", "native", 0.90)
        for count in ("5,000", "40,000")
        for readers in ("1 reader", "4 readers")
    ),
    *(
        Target("wrong", f"{size}, {state}", "unhinted", 0.95, peer=peer)
        for peer in ("another seed", "another revision", "half of it")
        for size in ("110 KB", "10 KB")
        for state in ("begun cold", "next epoch")
    ),
    Target("limited", "first epoch", "limit", 0.95),
    Target("latency", "first epoch", "stock", 10),
    Target("stall", "later epochs", "stock", 0.02, at_most=True),
    *(
        Target("gpu", f"decode in {decode}, later epochs: AU", None, 0.98)
        for decode in ("workers", "device")
    ),
    Target("trace", "110 KB, hot, 1 reader", "fusecache", 0.98, peer="recorded"),
    Target("trace", "110 KB, hot, 4 readers", "fusecache", 0.98, peer="recorded"),
    Target("trace", "110 KB, cold, 1 reader", "fusecache", 0.98, peer="recorded"),
    Target("trace", "110 KB, cold, 4 readers", "fusecache", 0.98, peer="recorded"),
    Target("trace", "10 KB, hot, 1 reader", "fusecache", 0.98, peer="recorded"),
    Target("trace", "10 KB, hot, 4 readers", "fusecache", 0.98, peer="recorded"),
    Target("trace", "10 KB, cold, 1 reader", "fusecache", 0.98, peer="recorded"),
    Target("trace", "10 KB, cold, 4 readers", "fusecache", 0.98, peer="recorded"),
    *(
        Target("log", f"{size}, limited", "native", 9.4, peer="reorder")
        for size in ("3 KB", "10 KB")
    ),
    Target("log", "110 KB, limited", "native", 2.5, peer="reorder"),
    *(Target("log", f"{size}, plain", "native", 1.5, peer="reorder") for size in ("3 KB", "10 KB")),
    *(
        Target("log", f"{size}, {device}", against, 0.95, peer="auto")
        for device in ("plain", "limited")
        for size in ("3 KB", "10 KB", "30 KB", "110 KB")
        for against in ("static", "reorder")
    ),
    *(
        Target("log", f"{size}, {device}: bandwidth, read only", "device", 0.9, peer="reorder")
        for size in ("10 KB", "110 KB")
        for device in ("plain", "limited")
    ),
    *(
        Target("log", f"110 KB, {device}, paced: epoch", against, 1.05, True, peer="reorder")
        for device in ("plain", "limited")
        for against in ("consumer", "static")
    ),
    *(
        Target("log", f"{work} limited", against, least, peer="reorder")
        for work in (
            "10 KB, half of it on SSD, origin's requests",
            "10 KB, half of it on SSD, origin's bandwidth",
            "110 KB, half of it on SSD, origin's bandwidth",
        )
        for against, least in (("static", 1.3), ("stock", 1.45))
    ),
    *(
        Target("log", f"10 KB, limited, beside a job: {who}", "static", 0.9, peer="reorder")
        for who in ("a second job", "an unhinted reader")
    ),
    Target("log", "MetaIndex: CPU", None, 15, at_most=True, peer="both"),
    Target("log", "MetaIndex: memory", None, 1, at_most=True, peer="both"),
    Target("plan", "until the first window", None, 15, at_most=True),
    Target("plan", "memory of hintsd's process", None, 1, at_most=True),
    *(
        Target("policies", f"{name}, {workload}", None, 500_000)
        for name in ("fifo", "lru", "lfu", "random", "s3fifo", "minio", "frequency")
        for workload in ("shuffles", "zipf")
    ),
)


class Results:
    def __init__(self) -> None:
        self._series: dict[tuple[str, str, str], Series] = {}
        self.notes: list[str] = []
        self.about: dict[str, object] = {}

    def add(self, row: str, work: str, peer: str, unit: str, value: float) -> None:
        key = (row, work, peer)
        series = self._series.setdefault(key, Series(row, work, peer, unit))
        assert series.unit == unit
        series.values.append(value)

    @property
    def series(self) -> list[Series]:
        """All, in the order in which they came."""
        return list(self._series.values())

    def note(self, text: str) -> None:
        self.notes.append(text)

    def get(self, row: str, work: str, peer: str) -> Series | None:
        return self._series.get((row, work, peer))

    def measure(self, target: Target) -> float | None:
        """The figure that the target is about; None: not measured in this run."""
        own = self.get(target.row, target.work, target.peer)
        if own is None:
            return None
        if target.against is None:
            return own.median
        other = self.get(target.row, target.against_work or target.work, target.against)
        return None if other is None else _ratio(own, other)

    def markdown(self, peers: Sequence[str]) -> str:
        lines = ["# Benchmark", ""]
        lines += [f"- {key}: {value}" for key, value in self.about.items()]
        for row in dict.fromkeys(s.row for s in self._series.values()):
            lines += ["", f"## {row}", ""]
            mine = [s for s in self._series.values() if s.row == row]
            present = [p for p in peers if any(s.peer == p for s in mine)]
            lines.append("| work | unit | " + " | ".join(present) + " |")
            lines.append("| --- | --- |" + " ---: |" * len(present))
            for work, unit in dict.fromkeys((s.work, s.unit) for s in mine):
                cells = []
                for peer in present:
                    series = self.get(row, work, peer)
                    cells.append("" if series is None else _cell(series))
                lines.append(f"| {work} | {unit} | " + " | ".join(cells) + " |")
        lines += ["", "## targets", "", "| target | measured | reached |", "| --- | ---: | --- |"]
        for target in TARGETS:
            value = self.measure(target)
            if value is None:
                continue
            met = value <= target.limit if target.at_most else value >= target.limit
            shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            lines.append(f"| {target.claim()} | {shown} | {'yes' if met else '**no**'} |")
        if self.notes:
            lines += ["", "## notes", "", *[f"- {note}" for note in dict.fromkeys(self.notes)]]
        return "\n".join(lines) + "\n"

    def save(self, out: Path, peers: Sequence[str]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        targets = [
            {"claim": t.claim(), "limit": t.limit, "measured": self.measure(t)} for t in TARGETS
        ]
        data = {
            "about": self.about,
            "series": [vars(s) | {"median": s.median} for s in self._series.values()],
            "targets": [t for t in targets if t["measured"] is not None],
            "notes": list(dict.fromkeys(self.notes)),
        }
        (out / "bench.json").write_text(json.dumps(data, indent=1) + "\n")
        (out / "bench.md").write_text(self.markdown(peers))


def _ratio(own: Series, other: Series) -> float:
    pairs = list(zip(own.values, other.values, strict=False))
    return statistics.median(a / b for a, b in pairs)


def _cell(series: Series) -> str:
    def show(value: float) -> str:
        if value >= 1000:
            return f"{value:,.0f}"
        return f"{value:.3g}"

    if len(series.values) == 1:
        return show(series.values[0])
    spread = f"{show(min(series.values))}–{show(max(series.values))}"
    return f"**{show(series.median)}** ({spread})"


def machine() -> dict[str, object]:
    """Enough to know whether two runs can be compared."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "kernel": platform.release(),
        "processor": f"{os.cpu_count()} × {cpu}",
        "memory": f"{memory_kib / 2**20:.1f} GiB",
        "load average at the start": " ".join(f"{x:.2f}" for x in os.getloadavg()),
    }
