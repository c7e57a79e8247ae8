"""Row pool: what several hosts take from the origin together, with a pool and without.

The hosts are network namespaces (tools/cluster_lib), their links of 400 Mbit/s, the origin's line,
which all share, of 100. The pool is an engine on each host, or the hosts themselves (peers). What
is unfair: all share two processors, and the origin's bytes do not pass the hosts' links.
"""

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench import nopfs_ranks
from tools.bench.budgets import built_nopfs
from tools.bench.processes import processor_s
from tools.bench.rows import Bench
from tools.cluster_lib import dataset
from tools.cluster_lib.cluster import Cluster
from tools.cluster_lib.engine import PORT
from tools.cluster_lib.running import Epoch, Readers, Reading

HOSTS, FILES, FILES_QUICK, FILE_BYTES = 4, 1200, 300, 110_000
EPOCHS = 3
ROUNDS = 3
ENGINE_BYTES = 256 << 20
FITS_ALL = ("--ram", "64M", "--ssd", "1G")  # one host's cache holds the dataset
FITS_A_QUARTER = ("--ram", "16M", "--ssd", "24M")
SSD_A_QUARTER = ("--ram", "16M", "--ssd", "36M")


@dataclass(frozen=True)
class Arm:
    """`trouble`: what happens to the first engine in the middle of the second epoch."""

    name: str
    has_pool: bool = True
    has_tls: bool = False
    has_peers: bool = False
    has_hints: bool = False
    trouble: str = ""


NO_POOL = Arm("no pool", has_pool=False)
POOL = Arm("pool")
TLS = Arm("pool, TLS", has_tls=True)
PEERS = Arm("peers", has_peers=True)
PEERS_TLS = Arm("peers, TLS", has_peers=True, has_tls=True)
POOL_HINTED = Arm("pool, hints", has_hints=True)
PEERS_HINTED = Arm("peers, hints", has_peers=True, has_hints=True)
KILLED = Arm("pool, an engine is killed", trouble="kill")
STOPPED = Arm("pool, an engine is stopped", trouble="stop")
CUT = Arm("pool, a host is cut off", trouble="cut")
CASES: tuple[tuple[str, str, tuple[str, ...], tuple[Arm, ...]], ...] = (
    ("ranks of one job", "distributed", FITS_ALL, (NO_POOL, POOL, TLS, PEERS)),
    ("each reads all", "all", FITS_ALL, (NO_POOL, POOL, TLS, PEERS, PEERS_TLS)),
    ("each reads all, caches a quarter", "all", FITS_A_QUARTER,
     (NO_POOL, POOL, KILLED, STOPPED, CUT, PEERS)),
    ("each reads all, SSDs a quarter", "all", SSD_A_QUARTER,
     (PEERS, PEERS_HINTED, POOL_HINTED)),
)  # fmt: skip


def pool(bench: Bench) -> None:
    """Row pool: origin bytes over the dataset's, seconds of each epoch."""
    count = FILES_QUICK if bench.quick else FILES
    nopfs = built_nopfs(bench) if "nopfs" in bench.loaders else None
    for number in range(bench.rounds(ROUNDS)):
        for case, order, caches, arms in CASES:
            for name in bench.turns(number, tuple(arm.name for arm in arms)):
                arm = next(arm for arm in arms if arm.name == name)
                epochs = _run(arm, order, caches, count, number)
                _add(bench, f"{case}: {name}", epochs, count * FILE_BYTES)
        if nopfs is not None and not _try_nopfs(bench, nopfs, count, number):
            nopfs = None
    bench.results.note(
        f"pool: {HOSTS} hosts at 400 Mbit/s, the origin at 100 Mbit/s for all; {count:,} files of "
        f"{FILE_BYTES // 1000} KB: {count * FILE_BYTES / 12.5e6:.1f} s of the origin's line"
    )


def _run(arm: Arm, order: str, caches: tuple[str, ...], count: int, seed: int) -> list[Epoch]:
    with Cluster(
        hosts=HOSTS,
        has_engines=arm.has_pool,
        has_peers=arm.has_peers,
        has_tls=arm.has_tls,
        engine_bytes=ENGINE_BYTES,
    ) as cluster:
        made = dataset.make(cluster.data, count, FILE_BYTES, seed)
        if arm.has_hints:
            cluster.start_hintsd()
        cluster.mount(*caches, *(cluster.pool_options() if arm.has_pool else ()))
        reading = Reading(order, seed, hinted=EPOCHS if arm.has_hints else 0)
        with Readers(cluster, made, reading) as readers:
            epochs = [readers.read(0)]
            with _trouble(cluster, arm.trouble, epochs[0]):
                epochs.append(readers.read(1))
            return epochs + [readers.read(epoch) for epoch in range(2, EPOCHS)]


def _try_nopfs(bench: Bench, built: Path, files: int, seed: int) -> bool:
    """Ranks of one job; the dataset fits into each one's SSD. False: it fails, which is told."""
    found: list[tuple[float, float]] = []
    try:
        with Cluster(hosts=HOSTS, has_engines=False) as cluster:
            made = dataset.make(cluster.data, files, FILE_BYTES, seed)
            given = {"ram": 64 << 20, "ssd": 256 << 20, "epochs": EPOCHS, "seed": seed}
            with nopfs_ranks.ranks_of(cluster, made, built, **given) as epochs:
                before = 0
                for _ in range(EPOCHS):
                    seconds = next(epochs)
                    read = sum(count.bytes for count in cluster.origin_counts())
                    found.append((seconds, (read - before) / made.bytes))
                    before = read
    except (OSError, RuntimeError, ValueError) as error:
        bench.say(f"NoPFS is left out: {error}")
        bench.results.note(f"NoPFS was left out: {error}")
        return False
    for number, (seconds, datasets) in enumerate(found, 1):
        work = f"ranks of one job: epoch {number}"
        bench.results.add("pool", work, "nopfs", "s", seconds)
        bench.results.add("pool", f"{work}, origin", "nopfs", "datasets", datasets)
        bench.say(f"pool, {work}: NoPFS: {seconds:.2f} s, {datasets:.3f} datasets")
    return True


@contextmanager
def _trouble(cluster: Cluster, kind: str, before: Epoch) -> Iterator[None]:
    """It begins a second into the epoch, and stays."""
    host = cluster.hosts[0]
    engine = host.engine
    if not kind or engine is None:
        yield
        return
    begin: Callable[[], None] = {
        "kill": engine.kill, "stop": engine.stop, "cut": host.partition
    }[kind]  # fmt: skip
    timer = threading.Timer(1.0, begin)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _add(bench: Bench, what: str, epochs: list[Epoch], dataset_bytes: int) -> None:
    for number, epoch in enumerate(epochs, 1):
        datasets = sum(epoch.origin_bytes) / dataset_bytes
        computed = sum(epoch.processor_s.values())
        rate = max(epoch.link_received) / epoch.seconds / 1e6
        work = f"{what}: epoch {number}"
        bench.results.add("pool", work, "fusecache", "s", epoch.seconds)
        bench.results.add("pool", f"{work}, origin", "fusecache", "datasets", datasets)
        bench.results.add("pool", f"{work}, processor", "fusecache", "s", computed)
        bench.say(
            f"pool, {work}: {epoch.seconds:.2f} s, {datasets:.3f} datasets, "
            f"{computed:.1f} s of processors, {rate:.0f} MB/s into one host"
        )


# ---- what a MB costs -----------------------------------------------------------------------------

COST_FILES, COST_PASSES = 200, 10


def pool_cost(bench: Bench) -> None:
    """Row pool-cost: processor time of server and client a MB, one connection, beside the engine's
    own client (which makes no key, compares no checksum, and throws the bytes away).
    """
    passes = 2 if bench.quick else COST_PASSES
    for number in range(bench.rounds(5)):
        for way in bench.turns(number, ("plain", "TLS")):
            has_tls = way == "TLS"
            with Cluster(hosts=1, link_mbit=0, has_tls=has_tls, engine_bytes=64 << 20) as cluster:
                dataset.make(cluster.data, COST_FILES, FILE_BYTES, number)
                for peer, measure in (("fusecache", _own_client), ("the engine's client", _theirs)):
                    cost = measure(cluster, passes)
                    work = f"{peer}: a MB, {way}"
                    bench.results.add("pool-cost", work, "fusecache", "ms", cost * 1e3)
                    bench.say(f"pool-cost, {way}: {peer}: {cost * 1e3:.3f} ms a MB")


def _own_client(cluster: Cluster, passes: int) -> float:
    """Seconds of processors a MB."""
    access, engine = cluster.access, cluster.hosts[0].engine
    assert engine is not None
    told: dict[str, Any] = {
        "root": str(cluster.data / "000"), "address": engine.address, "port": PORT,
        "user": access.user or None, "passes": passes, "password": access.password or None,
        "ca": None, "certificate": None, "key": None,
    }  # fmt: skip
    if access.has_tls:
        certificate, key = map(str, access.certificate("client"))
        told |= {"ca": str(access.certificate("ca")[0]), "certificate": certificate, "key": key}
    command = [*cluster.hosts[0].enter, sys.executable, "-m", "tools.bench.pool_client"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(json.dumps(told) + "\n")
        client.stdin.flush()
        if client.stdout.readline() != "written\n":
            raise RuntimeError("the client of row pool-cost failed: see above")
        before_s = processor_s([engine.pid])
        client.stdin.write("\n")
        client.stdin.flush()
        done = json.loads(client.stdout.readline())
        served_s = processor_s([engine.pid]) - before_s
    cost: float = (done["processor_s"] + served_s) / (done["bytes"] / 1e6)
    return cost


def _theirs(cluster: Cluster, passes: int) -> float:
    access, engine = cluster.access, cluster.hosts[0].engine
    assert engine is not None
    engine.ask("SETRANGE", "value", str(FILE_BYTES - 1), "x")
    count = COST_FILES * passes
    command = [*cluster.hosts[0].enter, "redis-benchmark", "-h", engine.address, "-p", str(PORT)]
    command += ["-c", "1", "-n", str(count), "-q", "--user", access.user, "-a", access.password]
    if access.has_tls:
        command += ["--tls", "--cacert", str(access.certificate("ca")[0])]
    before_s = processor_s([engine.pid])
    used_s = _children_s()
    subprocess.run([*command, "GET", "value"], check=True, capture_output=True)
    cost_s = _children_s() - used_s + processor_s([engine.pid]) - before_s
    return cost_s / (count * FILE_BYTES / 1e6)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


ROWS: dict[str, Callable[[Bench], None]] = {"pool": pool, "pool-cost": pool_cost}
