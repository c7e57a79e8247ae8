"""tools/cluster: what its figures rest on, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import PATIENCE_S
from tests.support.mounted import ROOT, alive, eventually
from tools.cluster_lib import dataset, remains
from tools.cluster_lib.cluster import Cluster, Host
from tools.cluster_lib.reader import order_of
from tools.cluster_lib.running import Readers, Reading

SIZES = ("--ram", "16M", "--ssd", "64M")
FILES, FILE_BYTES = 60, 20_000
SEND = """
import socket, sys
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setsockopt(socket.SOL_SOCKET, 32, 64 << 20)  # SO_SNDBUFFORCE: it never waits for the link
for _ in range(int(sys.argv[2])):
    sender.sendto(bytes(1000), (sys.argv[1], 9))
"""


def is_left(record: remains.Record) -> list[object]:
    """What there is of a cluster that should be gone."""
    found: list[object] = [*remains.namespaces(record.name), *remains.mounts_below(record.work)]
    return [
        *found,
        *(path for path in (record.work, remains.RECORDS / record.name) if path.exists()),
    ]


def send(host: Host, to: Host, packets: int) -> None:
    """So many datagrams of 1,000 bytes, to a port that nobody listens on."""
    done = host.run(sys.executable, "-c", SEND, to.address, str(packets))
    assert done.returncode == 0, done.stderr


# ---- counts --------------------------------------------------------------------------------------


def test_orders() -> None:
    names = [f"{number}" for number in range(100)]
    hosts = range(3)
    first, second = ([order_of(names, "distributed", 1, e, h, 3) for h in hosts] for e in (0, 1))
    for epoch in (first, second):
        together = itertools.chain(*epoch)
        assert sorted(together, key=int) == names, "disjoint, and together all"
    assert sorted(first[0]) != sorted(second[0]), "another permutation"
    each = [order_of(names, "all", 1, 0, host, 3) for host in hosts]
    assert all(sorted(one, key=int) == names for one in each)
    assert len({tuple(one) for one in each}) == 3


def test_what_hosts_read_of_the_origin_is_exact() -> None:
    with Cluster(hosts=3, origin_mbit=0, has_engines=False) as cluster:
        made = dataset.make(cluster.data, FILES, FILE_BYTES, seed=1)
        cluster.mount(*SIZES)
        shares = [
            [set(order_of(made.names, "distributed", 0, epoch, host, 3)) for host in range(3)]
            for epoch in (0, 1)
        ]
        with Readers(cluster, made, Reading("distributed")) as readers:
            first, second = readers.read(0), readers.read(1)
        new = [len(now - before) for before, now in zip(*shares, strict=True)]
        assert first.origin_files == [FILES // 3] * 3
        assert first.origin_bytes == [FILES // 3 * FILE_BYTES] * 3
        assert second.origin_files == new, "each has its share of the first epoch alone"
        assert second.origin_bytes == [files * FILE_BYTES for files in new]
        with Readers(cluster, made, Reading("all")) as readers:
            readers.read(0)
            whole = [(made.bytes, FILES)] * 3
            assert cluster.origin_counts() == whole, "three hosts, three datasets"
            last = readers.read(1)
        assert cluster.origin_counts() == whole
        assert sum(last.link_received) < 10_000, "nobody talks"
        assert last.processor_s["mount"] >= 0.0
        assert cluster.processor_s()["mount"] > 0.0


def test_the_origin_has_one_limit_for_all_hosts() -> None:
    rate_bps = 2_000_000
    with Cluster(hosts=3, origin_mbit=rate_bps * 8 / 1e6, has_engines=False) as cluster:
        made = dataset.make(cluster.data, 40, FILE_BYTES, seed=1)
        with Readers(cluster, made, Reading("all", is_direct=True)) as readers:
            begin = time.monotonic()
            read = readers.read(0)
            most = (time.monotonic() - begin + 0.005) * rate_bps  # with the burst
        assert read.origin_bytes == [made.bytes] * 3
        assert sum(read.origin_bytes) <= most


def test_wrong_bytes_are_no_figure() -> None:
    with Cluster(hosts=2, origin_mbit=0, has_engines=False) as cluster:
        made = dataset.make(cluster.data, 4, FILE_BYTES, seed=1)
        (cluster.data / made.names[0]).write_bytes(bytes(FILE_BYTES))
        for order in ("distributed", "all"):
            with (
                Readers(cluster, made, Reading(order, is_direct=True)) as readers,
                pytest.raises(RuntimeError, match="wrong bytes"),
            ):
                readers.read(0)


# ---- links and engines ---------------------------------------------------------------------------


def test_links_have_a_limit_and_can_be_cut() -> None:
    packets = 4000
    with Cluster(hosts=3, link_mbit=0.1, has_engines=False) as cluster:
        here, there, third = cluster.hosts

        def arrived(to: Host, packets: int) -> int:
            before = to.link_bytes().received
            send(here, to, packets)
            return to.link_bytes().received - before

        assert arrived(there, 20) > 20_000
        there.partition()
        assert arrived(there, 20) == 0
        there.heal()
        eventually(lambda: arrived(there, 1) > 1000)
        assert arrived(third, 1) > 1000
        for sender in (here, there):
            send(sender, third, packets)
        sent = [sender.link_bytes().sent for sender in (here, there)]
        assert max(sent) < packets * 1000 / 2, "it would take minutes"
        assert third.link_bytes().received < sum(sent) * 3 / 4, "its own link has a limit, too"


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def with_engines(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster(
        hosts=2, has_tls=request.param, engine_options=("--hz", "20"), acl="~* &* +@all -flushall"
    ) as cluster:
        yield cluster


def test_engines_fail_as_they_are_told(with_engines: Cluster) -> None:
    here, there = with_engines.hosts
    engine = there.engine
    assert engine is not None

    def is_reached(timeout_s: float = PATIENCE_S) -> bool:
        try:
            return engine.ask_from(here.enter, "PING", timeout_s=timeout_s) == "PONG"
        except (RuntimeError, subprocess.TimeoutExpired):
            return False

    assert is_reached()
    assert engine.ask("CONFIG", "GET", "hz").split() == ["hz", "20"]
    assert engine.ask("CONFIG", "GET", "maxmemory").split() == ["maxmemory", str(256 << 20)]
    assert engine.ask_from(here.enter, "SET", "key", "value") == "OK"
    there.partition()
    assert not is_reached(0.5)
    assert engine.answers(), "it lives"
    there.heal()
    assert is_reached()
    engine.stop()
    assert not is_reached(0.5)
    engine.resume()
    assert engine.ask_from(here.enter, "GET", "key") == "value"
    engine.restart()
    assert engine.ask_from(here.enter, "DBSIZE") == "0"
    engine.kill()
    assert not is_reached()
    with pytest.raises(RuntimeError, match="does not run"):
        engine.stop()


def test_engines_let_in_only_their_user(with_engines: Cluster) -> None:
    here, there = with_engines.hosts
    access = with_engines.access
    client = ["valkey-cli" if here.run("which", "valkey-cli").stdout else "redis-cli"]
    client += ["-e", "--no-auth-warning", "-h", there.address]
    user = ["--user", access.user, "--pass", access.password]
    ca, (certificate, key) = access.certificate("ca")[0], access.certificate("client")
    tls = ["--tls", "--cacert", str(ca)] if access.has_tls else []
    assert here.run(*client, *tls, *user, "PING").stdout.strip() == "PONG"
    assert "NOAUTH" in here.run(*client, *tls, "PING").stderr
    wrong = ["--user", access.user, "--pass", "wrong"]
    assert here.run(*client, *tls, *wrong, "PING").returncode != 0
    if access.has_tls:
        mutual = [*tls, "--cert", str(certificate), "--key", str(key)]
        assert here.run(*client, *mutual, *user, "PING").stdout.strip() == "PONG"
        assert here.run(*client, *user, "PING").returncode != 0, "not without TLS"
        assert here.run(*client, "--tls", *user, "PING").returncode != 0, "an unknown authority"
    assert there.engine is not None
    with pytest.raises(RuntimeError, match="NOPERM"):
        there.engine.ask_from(here.enter, "FLUSHALL")
    assert there.engine.ask("FLUSHALL") == "OK", "who made it may do all"
    options = with_engines.pool_options("name")
    scheme = "valkeys" if access.has_tls else "valkey"
    assert options[:2] == ("--pool", f"{scheme}://10.77.0.1:6379,10.77.0.2:6379/name")
    assert ("--pool-insecure" in options) is not access.has_tls


def test_engines_without_rules_let_in_anybody() -> None:
    with Cluster(hosts=2, acl="") as cluster:
        here, there = cluster.hosts
        assert there.engine is not None
        assert there.engine.ask_from(here.enter, "PING") == "PONG"
        assert "--pool-user" not in cluster.pool_options()


# ---- the end -------------------------------------------------------------------------------------


def test_nothing_is_left_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"content")
    with contextlib.suppress(ZeroDivisionError), Cluster(tmp_path, hosts=2) as cluster:
        record = remains.Record(cluster.name, cluster.work, -1)
        cluster.mount(*SIZES)
        host, other = cluster.hosts
        assert (host.mountpoint / "a").read_bytes() == b"content"
        assert other.engine is not None
        other.engine.stop()
        sleeper = subprocess.Popen([*host.enter, "sleep", "600"], cwd=host.mountpoint)
        eventually(lambda: sleeper.pid in remains.processes_in([host.namespace]))
        running = remains.processes_in(remains.namespaces(cluster.name))
        assert len(running) > 2 * 4, "origin, engine, keeper, server of each; sleep"
        raise ZeroDivisionError
    assert sleeper.wait(PATIENCE_S) == -signal.SIGKILL
    assert is_left(record) == []
    eventually(lambda: not any(map(alive, running)))
    assert (tmp_path / "a").read_bytes() == b"content", "the dataset is ours"


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.cluster_lib", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def started_shell() -> subprocess.Popen[str]:
    """Of two hosts."""
    command = [sys.executable, "-m", "tools.cluster_lib", "shell", "--no-pool", "--hosts", "2"]
    return subprocess.Popen(
        [*command, "--files", "2", "--", *SIZES],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_nothing_is_left_of_a_start_that_is_interrupted() -> None:
    with started_shell() as process:
        name = f"fc-{process.pid}-0"
        try:
            eventually(lambda: bool(remains.processes_in(remains.namespaces(name))))
            record = remains.Record(name, Path((remains.RECORDS / name).read_text()), -1)
        finally:
            process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (0 if "ready" in said[0] else 130), said  # 0: it came too late
    assert is_left(record) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    with started_shell() as process:
        name = f"fc-{process.pid}-0"
        try:
            assert process.stdout is not None
            assert any(line.startswith("ready") for line in process.stdout)
            record = remains.Record(name, Path((remains.RECORDS / name).read_text()), -1)
            running = remains.processes_in(remains.namespaces(name))
            assert len(running) >= 2 * 3, "origin, keeper, server of each"
        finally:
            process.send_signal(number)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert remains.namespaces(name)
        with Cluster(hosts=1, has_engines=False) as another:
            done = tool("--remove")
            assert remains.namespaces(another.name), "its owner lives"
        assert (done.returncode, done.stdout) == (0, f"removed {name}\n"), done.stderr
    else:
        assert process.returncode == 0
    assert is_left(record) == []
    assert not any(map(alive, running))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "--hosts", "0"), "Invalid value for '--hosts'"),
        (("run", "--link-mbit", "-1"), "Invalid value for '--link-mbit'"),
        (("run", "--no-mount", "--hints"), "--hints needs mounts"),
        (("shell", "--no-pool", "--tls"), "--tls needs a pool"),
        (("shell", "--data", "/nowhere"), "Invalid value for '--data'"),
        ((), "run, shell or --remove is wanted"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], line: str) -> None:
    done = tool(*arguments)
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"tools/cluster: {line}")
    assert (done.returncode, done.stdout) == (2, "")


def test_run_tells_what_each_epoch_took(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}").write_bytes(os.urandom(1000))
    arguments = [
        "run",
        "--no-pool",
        "--hints",
        "--hosts",
        "2",
        "--data",
        str(tmp_path),
        "--order",
        "all",
    ]
    arguments += ["--epochs", "2", "--json"]
    done = tool(*arguments, "--", *SIZES)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["files"], told["bytes"]) == (4, 4000)
    assert [epoch["origin_bytes"] for epoch in told["epochs"]] == [[4000, 4000], [0, 0]]
    assert told["epochs"][0]["processor_s"]["hintsd"] > 0.0
