"""Epochs that all hosts of a cluster read together, and what each cost.

INVARIANT: all hosts begin an epoch together, when the last one has ended the epoch before.
INVARIANT: what is counted of an epoch begins where the one before ended, the first with the
readers: what hints have fetched early is in no gap.
INVARIANT: every epoch's bytes are compared with the dataset's; what is wrong is no figure.
"""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tools.cluster_lib.cluster import Cluster, Host
from tools.cluster_lib.dataset import Dataset

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Reading:
    """How hosts read: see reader.py."""

    order: str
    seed: int = 0
    threads: int = 4
    is_direct: bool = False  # the origin itself, without a cache
    hinted: int = 0  # epochs, from 0 on, that hintsd is told of; 0: it is told nothing


@dataclass(frozen=True)
class Epoch:
    """What an epoch took, of all hosts; lists have a figure for each."""

    seconds: float  # of the host that was last
    origin_bytes: list[int]
    origin_files: list[int]
    link_received: list[int]  # bytes
    link_sent: list[int]
    processor_s: dict[str, float]  # of "mount", "engine", "hintsd", "reader", all hosts


class Readers:
    """One a host, until the context is left: each `read` is an epoch."""

    def __init__(self, cluster: Cluster, dataset: Dataset, reading: Reading) -> None:
        self._cluster, self._dataset, self._reading = cluster, dataset, reading
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[str]] = []
        self._before: Any = None  # counters, at the end of the last epoch

    def __enter__(self) -> Self:
        reading = self._reading
        self._before = self._counters()
        with contextlib.ExitStack() as stack:
            for host in self._cluster.hosts:
                self._processes.append(stack.enter_context(self._reader(host)))
            for process in self._processes:
                said, wanted = _line(process).strip(), "hinted" if reading.hinted else "ready"
                if said != wanted:
                    raise RuntimeError(f"a reader is {said or 'gone'}, not {wanted}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _reader(self, host: Host) -> "Iterator[subprocess.Popen[str]]":
        reading = self._reading
        told = {
            "root": str(host.origin if reading.is_direct else host.mountpoint),
            "names": self._dataset.names,
            "order": reading.order,
            "seed": reading.seed,
            "threads": reading.threads,
            "hinted": reading.hinted,
            "host": host.number,
            "hosts": len(self._cluster.hosts),
        }
        process = subprocess.Popen(
            [*host.enter, sys.executable, "-m", "tools.cluster_lib.reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        with process:
            try:
                _tell(process, json.dumps(told))
                yield process
            finally:
                process.kill()

    def read(self, epoch: int) -> Epoch:
        """RuntimeError: a reader failed, or read other bytes than the dataset's."""
        for process in self._processes:
            _tell(process, str(epoch))
        lines = [_line(process) for process in self._processes]
        if not all(lines):
            raise RuntimeError("a reader failed: see above")
        done: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self._check(done)
        origin, links, computed = after = self._counters()
        origin_before, links_before, computed_before = self._before
        self._before = after
        pairs = list(zip(origin, origin_before, strict=True))
        links_pairs = list(zip(links, links_before, strict=True))
        return Epoch(
            seconds=max(each["seconds"] for each in done),
            origin_bytes=[now.bytes - then.bytes for now, then in pairs],
            origin_files=[now.files - then.files for now, then in pairs],
            link_received=[now.received - then.received for now, then in links_pairs],
            link_sent=[now.sent - then.sent for now, then in links_pairs],
            processor_s={
                **{what: computed[what] - computed_before[what] for what in computed},
                "reader": sum(each["processor_s"] for each in done),
            },
        )

    def _counters(self) -> Any:
        cluster = self._cluster
        links = [host.link_bytes() for host in cluster.hosts]
        return cluster.origin_counts(), links, cluster.processor_s()

    def _check(self, done: list[dict[str, Any]]) -> None:
        read = [(each["files"], each["bytes"], each["checksum"]) for each in done]
        dataset = self._dataset
        whole = (len(dataset.names), dataset.bytes, dataset.checksum)
        together = tuple(map(sum, zip(*read, strict=True)))
        if [whole] != ([together] if self._reading.order == "distributed" else list(set(read))):
            raise RuntimeError(f"wrong bytes: files, bytes, checksum {read}, of {whole}")


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _line(process: "subprocess.Popen[str]") -> str:
    """It is empty when the process has ended."""
    assert process.stdout is not None
    return process.stdout.readline()
