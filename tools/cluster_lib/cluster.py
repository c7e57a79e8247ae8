"""A cluster of hosts on this machine, for as long as its context lasts.

Each host is a network namespace, with its own mount, cache, and view of the origin; all mounts are
in the one mount namespace. All views share the origin's line, and what a host reads there is
counted. The origin's bytes do not pass the host's link, which is for what hosts tell each other.

INVARIANT: leaving the context leaves nothing, also on an exception, and on what
tools/interrupts.py makes of SIGINT and SIGTERM. After SIGKILL, `remains.remove` does that.
"""

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from tools.bench.processes import processor_s
from tools.cluster_lib import network, remains
from tools.cluster_lib.engine import ACL, PORT, Access, Engine, make_access
from tools.cluster_lib.network import LinkBytes
from tools.fusecache_command import FusecacheMount
from tools.hintsd_command import HintsdCommand
from tools.latency_origin import HOSTS_MOST, Count, LatencyOrigin, Meter, compiled

DATASET = "dataset"  # its name in a pool
_MIN_AGE_S = 2.0
_SETTLED_S = 2.2  # a mount keeps no file that is younger, of an origin on a network


class Host:
    """One of a cluster: `start` gives it an origin, and an engine if wanted; `mount` its mount."""

    def __init__(self, cluster: str, number: int, work: Path) -> None:
        self.number = number
        self.namespace = network.namespace(cluster, number)
        self.address = network.address(number)
        self.enter = ("nsenter", f"--net={remains.NAMESPACES / self.namespace}")
        """A command behind these words runs on the host."""
        self.directory = work / f"h{number}"
        self.mountpoint = self.directory / "mnt"
        self.cache_dir = self.directory / "cache"
        self.log = self.directory / "mount.log"
        self.hintsd: HintsdCommand | None = None
        self.engine: Engine | None = None
        self._cluster = cluster
        self._origin: LatencyOrigin | None = None
        self._mount: FusecacheMount | None = None

    @property
    def origin(self) -> Path:
        """The dataset as this host has it without a cache."""
        assert self._origin is not None
        return self._origin.directory

    def show_origin(self, data: Path, latency_s: float, program: Path, meter: Meter) -> None:
        inside = remains.NAMESPACES / network.namespace(self._cluster, network.BRIDGE)
        self._origin = LatencyOrigin(
            data,
            self.directory,
            latency_s,
            program=program,
            meter=meter,
            host=self.number,
            prefix=("nsenter", f"--net={inside}"),
        ).__enter__()

    def start_engine(self, access: Access, memory_bytes: int, options: Sequence[str]) -> None:
        directory = self.directory / "engine"
        self.engine = Engine(
            directory, self.address, access, memory_bytes, self.enter, tuple(options)
        )
        self.engine.start()

    def start_hintsd(self) -> None:
        """Mounts name it from now on."""
        self.hintsd = HintsdCommand(self.directory, prefix=self.enter).__enter__()

    def mount(self, *options: str) -> None:
        """`fusecache mount`, with the cache that is there. RuntimeError: it failed, and why."""
        hints = ("--hintsd", str(self.hintsd.socket)) if self.hintsd is not None else ()
        flags = ("--log-file", str(self.log), "--keep-free", "0", *hints, *options)
        mount = FusecacheMount(
            self.origin, self.mountpoint, self.cache_dir, flags, prefix=self.enter
        )
        self._mount = mount.__enter__()

    def umount(self) -> None:
        mount, self._mount = self._mount, None
        if mount is not None:
            mount.close()

    def status(self) -> dict[str, Any]:
        """What `fusecache status` says. RuntimeError: it says nothing."""
        assert self._mount is not None
        return self._mount.status()

    def settle(self) -> None:
        """Until all that was read has been published."""
        assert self._mount is not None
        self._mount.settle()

    def run(self, *command: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """To its end, on this host; never raises for its exit code."""
        return subprocess.run(
            [*self.enter, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def partition(self) -> None:
        """Its link loses whatever is sent. Its origin stays."""
        network.set_link(self._cluster, self.number, is_up=False)

    def heal(self) -> None:
        network.set_link(self._cluster, self.number, is_up=True)

    def link_bytes(self) -> LinkBytes:
        return network.link_bytes(self._cluster, self.number)

    def close(self) -> None:
        """What `remains.remove` has ended is not waited for by anybody else."""
        self._mount = None
        if self.hintsd is not None:
            self.hintsd.close()
        if self._origin is not None:
            self._origin.close()
        if self.engine is not None:
            self.engine.kill()


class Cluster:
    """`hosts` that read `data`: made with the context, not mounted yet."""

    def __init__(
        self,
        data: Path | None = None,
        *,
        hosts: int = 4,
        link_mbit: float = 400.0,
        origin_mbit: float = 100.0,
        origin_latency_s: float = 0.0,
        has_engines: bool = True,
        has_peers: bool = False,
        engine_bytes: int = 256 << 20,
        engine_options: Sequence[str] = (),
        has_tls: bool = False,
        acl: str = ACL,
        work_dir: Path | None = None,
    ) -> None:
        """`data`: a directory that lasts; None: `self.data` is an empty one, to be filled before
        the first mount. `link_mbit`: each way, of each host; `origin_mbit`: of all together; 0 is
        no limit. `has_peers`: the mounts are the pool's servers, instead of engines. `acl`: the
        rules of the engines' user; "": they let in anybody. `work_dir`: what there is of files lies
        below it (/var/tmp).
        ValueError: too few hosts, or too many.
        """
        if not 1 <= hosts <= HOSTS_MOST:
            raise ValueError(f"a cluster has from 1 to {HOSTS_MOST} hosts, not {hosts}")
        self._given = data
        self._count = hosts
        self._link_mbit, self._origin_mbit = link_mbit, origin_mbit
        self._latency_s = origin_latency_s
        self._has_engines = has_engines and not has_peers
        self._has_peers = has_peers
        self._engine_bytes, self._engine_options = engine_bytes, engine_options
        self._has_tls, self._acl = has_tls, acl
        self._work_dir = work_dir
        self._record: remains.Record | None = None
        self.hosts: list[Host] = []

    def __enter__(self) -> Self:
        """RuntimeError: what could not be had, and why. OSError. CalledProcessError."""
        if os.geteuid() != 0:
            raise RuntimeError("network namespaces need root")
        self._record = remains.claim(self._work_dir)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        self.data = self._given or self.work / "data"
        if self._given is None:
            self.data.mkdir()
        network.make(self.name, self._count, self._link_mbit)
        self.hosts = [Host(self.name, number, self.work) for number in range(self._count)]
        self._meter = Meter(self.work / "meter", round(self._origin_mbit * 1e6 / 8))
        program = compiled(self.work)
        addresses = [host.address for host in self.hosts]
        self.access = make_access(
            self.work / "access", addresses, has_tls=self._has_tls, acl=self._acl
        )
        for host in self.hosts:
            host.directory.mkdir()
            host.show_origin(self.data, self._latency_s, program, self._meter)
            if self._has_engines:
                host.start_engine(self.access, self._engine_bytes, self._engine_options)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """fc-PID-NUMBER: what the names of its namespaces begin with."""
        assert self._record is not None
        return self._record.name

    @property
    def work(self) -> Path:
        assert self._record is not None
        return self._record.work

    def mount(self, *options: str) -> None:
        """On all hosts. Waits until the newest file of the dataset is old enough to be kept."""
        time.sleep(max(0.0, _newest(self.data) + _SETTLED_S - time.time()))
        self.each(lambda host: host.mount(*options, *self._as_peer(host)))

    def umount(self) -> None:
        self.each(Host.umount)

    def start_hintsd(self) -> None:
        """One on each host, before its mount."""
        self.each(Host.start_hintsd)

    def each(self, action: Callable[[Host], object]) -> None:
        """All hosts at a time; the first failure is raised when all have ended."""
        with ThreadPoolExecutor(len(self.hosts)) as threads:
            for done in [threads.submit(action, host) for host in self.hosts]:
                done.result()

    def pool_options(self, dataset: str = DATASET) -> tuple[str, ...]:
        """Of `fusecache mount`: all engines, or all hosts, as one pool."""
        access, scheme = self.access, "peer" if self._has_peers else "valkey"
        at = ",".join(f"{host.address}:{PORT}" for host in self.hosts)
        if access.has_tls:
            options = ["--pool", f"{scheme}s://{at}/{dataset}"]
            options += ["--pool-ca", str(access.certificate("ca")[0])]
            if not self._has_peers:
                options += _certificate("client", access)
        else:
            options = ["--pool", f"{scheme}://{at}/{dataset}", "--pool-insecure"]
        if access.user and not self._has_peers:
            options += ["--pool-user", access.user]
            options += ["--pool-password-file", str(access.password_file)]
        return (*options, "--pool-min-age", str(_MIN_AGE_S))

    def _as_peer(self, host: Host) -> tuple[str, ...]:
        """What a host that others ask is mounted with besides: its certificate names it."""
        if not self._has_peers:
            return ()
        own = _certificate(host.address, self.access) if self.access.has_tls else []
        return "--pool-listen", f"{host.address}:{PORT}", *own

    def origin_counts(self) -> list[Count]:
        """What each host has read of the origin so far."""
        return [self._meter.count(host.number) for host in self.hosts]

    def limit_origin(self, mbit: float) -> None:
        """From now on, of all hosts together; 0: no limit."""
        self._meter.limit(round(mbit * 1e6 / 8))

    def processor_s(self) -> dict[str, float]:
        """Seconds of processor time so far, of what runs on the hosts now: "mount" (keepers and
        servers), "engine", "hintsd".
        """
        found = remains.processes_in([host.namespace for host in self.hosts])
        of_mounts = {pid for pid in found if remains.is_of_mount(pid)}
        engines = {host.engine.pid for host in self.hosts if host.engine and host.engine.is_running}
        daemons = {host.hintsd.pid for host in self.hosts if host.hintsd is not None}
        pids = {"mount": of_mounts, "engine": engines, "hintsd": daemons}
        return {what: processor_s(some) for what, some in pids.items()}

    def close(self) -> None:
        record, self._record = self._record, None
        if record is None:
            return
        try:
            remains.remove(record)
        finally:
            for host in self.hosts:
                host.close()


def _certificate(name: str, access: Access) -> list[str]:
    certificate, key = map(str, access.certificate(name))
    return ["--pool-cert", certificate, "--pool-key", key]


def _newest(directory: Path) -> float:
    """The newest ctime of a file there, in seconds of the epoch; 0: there is none."""
    found = (Path(top, name) for top, _, names in os.walk(directory) for name in names)
    return max((path.lstat().st_ctime for path in found), default=0.0)
