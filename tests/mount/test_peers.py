"""Hosts that read for each other, without an engine (docs/POOL.md, Peers).

Hosts are mounts of one origin, with a cache and an address of the loopback each. The origin counts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusecache.base.wire import Place, Result
from tests import conftest
from tests.mount.test_pool import (
    LARGE_BLOCKS,
    PART_BYTES,
    Contents,
    Host,
    Mounting,
    Origin,
    counting_origin,
    loopback,
    mounts_of,
    size_of,
)
from tests.support import PATIENCE_S
from tests.support.faulty_origin import SETTLED_S, Fault
from tests.support.mounted import command, eventually, processes_of
from tests.support.plan_client import PlanClient
from tools.cluster_lib import dataset
from tools.cluster_lib.cluster import Cluster
from tools.cluster_lib.engine import Access, make_access
from tools.cluster_lib.running import Readers, Reading

PORT = 7411  # of those that are there all the time
OTHER_PORT = 7412  # of a test's own
HOSTS = 3


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    with counting_origin(tmp_path_factory.mktemp("peers")) as made:
        yield made


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Access:
    directory = tmp_path_factory.mktemp("access") / "of"
    return make_access(directory, [address(n) for n in range(HOSTS)], has_tls=True, acl="")


def address(number: int) -> str:
    return loopback(20 + number)


def url(dataset: str, scheme: str = "peers", hosts: int = HOSTS, port: int = OTHER_PORT) -> str:
    return f"{scheme}://{','.join(f'{address(n)}:{port}' for n in range(hosts))}/{dataset}"


def secure(access: Access, number: int, dataset: str, port: int) -> tuple[str, ...]:
    """Options of the host."""
    certificate, key = access.certificate(address(number))
    return (
        "--pool", url(dataset, port=port), "--pool-listen", f"{address(number)}:{port}",
        "--pool-ca", str(access.certificate("ca")[0]),
        "--pool-cert", str(certificate), "--pool-key", str(key),
    )  # fmt: skip


def plain(number: int, dataset: str, hosts: int = HOSTS) -> tuple[str, ...]:
    listen = ("--pool-listen", f"{address(number)}:{OTHER_PORT}")
    return ("--pool", url(dataset, "peer", hosts), *listen, "--pool-insecure")


def meet(*hosts: Host) -> None:
    """Wait until each knows itself and all others, and has its slots."""

    def have_met() -> bool:
        rows = [host.pool for host in hosts]
        met = all(row["self"] and not row["fault"] and not row["without"] for row in rows)
        return met and not any(s["is_left_alone"] for row in rows for s in row["servers"])

    eventually(have_met)
    members = len(hosts)
    where = str(hosts[0].mount.path)
    eventually(lambda: len(json.loads(said(where))["members"]) == members)


def said(where: str) -> str:
    return command("pool", "status", "--json", where).stdout


@contextlib.contextmanager
def three(start: Mounting, options: Callable[[int], tuple[str, ...]]) -> Iterator[list[Host]]:
    hosts = [start(*options(number)) for number in range(HOSTS)]
    for host in hosts:
        host.measure()  # what a read of the origin takes
    meet(*hosts)
    for host in hosts:
        host.mark()
    yield hosts


@pytest.fixture(scope="module")
def trio_of(
    origin: Origin, access: Access, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Host]]:
    with (
        mounts_of(origin, tmp_path_factory.mktemp("three")) as start,
        three(start, lambda number: secure(access, number, "three", PORT)) as hosts,
    ):
        yield hosts


@pytest.fixture
def hosts(trio_of: list[Host], origin: Origin) -> list[Host]:
    """Three that share all, in good order."""
    origin.be_slow()
    for host in trio_of:
        host.mark()
    return trio_of


def read_by_all(hosts: list[Host], contents: Contents) -> None:
    """All of it, by all at one time."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        for done in [pool.submit(host.read, contents) for host in hosts]:
            done.result(PATIENCE_S)


def late(hosts: list[Host]) -> int:
    """Blocks for which an owner, or this machine, took too long: the origin has them, too."""
    return sum(host.late for host in hosts)


def total(hosts: list[Host], name: str) -> int:
    return sum(host.count(name) for host in hosts)


def assert_read_once(hosts: list[Host], origin: Origin, contents: Contents) -> None:
    """By all of these, and at the origin by its owner alone."""
    for host in hosts:
        host.mark()
    read_by_all(hosts, contents)
    assert late(hosts) == 0
    assert origin.bytes_read(contents) == size_of(contents)


# ---- each file is read at the origin once --------------------------------------------------------


@pytest.mark.claim("R9")
def test_everyone_reads_all_and_the_origin_is_read_once(hosts: list[Host], origin: Origin) -> None:
    contents = origin.files(8)
    read_by_all(hosts, contents)
    assert late(hosts) == 0
    assert [origin.bytes_read({name: b""}) for name in contents] == list(
        map(len, contents.values())
    )
    assert total(hosts, "origin_files") == len(contents)
    assert total(hosts, "files") == (HOSTS - 1) * len(contents)
    assert total(hosts, "bytes") == (HOSTS - 1) * size_of(contents)
    assert total(hosts, "damaged") == total(hosts, "written") == 0


def test_a_plan_is_told_of_what_other_hosts_ask_for(hosts: list[Host], origin: Origin) -> None:
    contents = origin.files(3)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(PlanClient(h.mount.path, "owned")) for h in hosts]
        of_hosts = [listed(client, contents) for client in clients]
        for where in zip(*(found.values() for found in of_hosts), strict=True):
            assert sorted(bits for _, bits in where) == [0] * (HOSTS - 1) + [Place.OWNED]
        hosts[0].read(contents)
        for client, found in zip(clients[1:], of_hosts[1:], strict=True):
            owned = [ino for ino, bits in found.values() if bits]
            assert owned, "18 files, and none is its"
            client.until(functools.partial(have_come, client, owned))
            assert client.results == {ino: [Result.STORED_FOR_OTHERS] for ino in owned}
        assert clients[0].results == {}
    assert late(hosts) == 0
    with PlanClient(hosts[0].mount.path) as older:  # a hintsd that knows of none of this
        assert {bits for _, bits in listed(older, contents).values()} <= {0, Place.STORED}


def have_come(client: PlanClient, inos: list[int]) -> bool:
    return set(inos) <= client.results.keys()


def listed(client: PlanClient, contents: Contents) -> dict[str, tuple[int, int]]:
    """Of each file the inode, and the bits of `Place`."""
    found = {}
    for directory in dict.fromkeys(name.rpartition("/")[0] for name in contents):
        for name, (ino, _, _, where) in sorted(client.listing(directory.encode()).items()):
            found[f"{directory}/{name.decode()}"] = ino, where
    assert found.keys() == contents.keys()
    return found


def test_what_is_hinted_is_on_the_ssd_of_its_owner_first() -> None:
    """All read all, and an SSD has room for half of it: from the second epoch on the hosts have it
    all. (Without owners in mind each SSD had what its own reader used first: 1.5, 0.4 and 0.3.)
    """
    with Cluster(hosts=HOSTS, link_mbit=0, origin_mbit=100, has_peers=True) as cluster:
        made = dataset.make(cluster.data, 400, 100_000, 0)
        cluster.start_hintsd()
        cluster.mount("--ram", "16M", "--ssd", "20M", *cluster.pool_options())
        with Readers(cluster, made, Reading("all", hinted=2)) as readers:
            first, second = (sum(readers.read(epoch).origin_files) for epoch in (0, 1))
    assert 400 <= first <= 1.2 * 400  # an owner that is slow is not waited for
    assert second <= 0.15 * 400


def test_a_file_is_on_the_ssd_of_its_owner_alone(hosts: list[Host], origin: Origin) -> None:
    contents = origin.files(4)
    before = [host.mount.value("ssd")["blocks"] for host in hosts]
    first, *others = hosts
    first.read(contents)
    assert late(hosts) == 0

    def stored() -> list[int]:
        now = [host.mount.value("ssd")["blocks"] for host in hosts]
        return [after - was for after, was in zip(now, before, strict=True)]

    eventually(lambda: sum(stored()) == len(contents))
    assert all(stored())
    assert stored()[0] == first.count("origin_files")
    for host in others:
        hits = total(hosts, "files")
        host.read(contents)
        assert total(hosts, "files") > hits
    assert sum(stored()) == len(contents)
    served = [host.pool["served"] for host in hosts]
    assert all(row["hits"] for row in served)
    assert total(hosts, "origin_files") == len(contents)
    assert origin.bytes_read(contents) == size_of(contents)


def test_what_the_kernel_forgot_comes_from_the_owner_again(
    hosts: list[Host], origin: Origin
) -> None:
    contents = origin.files()
    read_by_all(hosts, contents)
    for host in hosts:
        for name in contents:
            with (host.mount.path / name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = total(hosts, "files")
    read_by_all(hosts, contents)
    assert late(hosts) == 0
    assert total(hosts, "files") > before
    assert origin.bytes_read(contents) == size_of(contents)


def test_blocks_of_a_large_file(hosts: list[Host], origin: Origin) -> None:
    contents = origin.large()
    for host in hosts:
        host.read(contents)
    # a reader that comes to a block before its stream does has a part of it from the origin
    parts = HOSTS * LARGE_BLOCKS * PART_BYTES
    assert late(hosts) == 0
    assert 0 <= origin.bytes_read(contents) - size_of(contents) <= parts
    assert total(hosts, "bytes") > size_of(contents)


def test_a_file_that_has_changed_is_never_the_old_one(hosts: list[Host], origin: Origin) -> None:
    contents = origin.files()
    for host in hosts:
        for directory in {Path(name).parent for name in contents}:
            os.listdir(host.mount.path / directory)  # so that a sweep looks there
    read_by_all(hosts, contents)
    changed = {name: bytes(reversed(content)) for name, content in contents.items()}
    for name, content in changed.items():
        origin.place.write(name, content)
    time.sleep(SETTLED_S)
    for host in hosts:  # the others have not looked yet
        host.sweep()
        host.read(changed)
    assert late(hosts) == 0
    assert origin.bytes_read(contents) == size_of(contents) + size_of(changed)


def test_pool_status_shows_hosts(hosts: list[Host], origin: Origin) -> None:
    read_by_all(hosts, origin.files())
    for host in hosts:
        found = json.loads(said(str(host.mount.path)))
        assert found["fault"] == ""
        assert found["has_peers"]
        assert sum(row["slots"] for row in found["servers"]) == 16_384
        assert all(row["fault"] == "" and row["requests"] for row in found["servers"])
        assert all(row["used_bytes"] and row["limit_bytes"] for row in found["servers"])
        assert len(found["members"]) == HOSTS
    shown = command("pool", "status", str(hosts[0].mount.path))
    assert shown.returncode == 0
    assert "read for others" in shown.stdout
    assert "left alone" not in command("status", str(hosts[0].mount.path)).stdout.lower()


# ---- what fails ----------------------------------------------------------------------------------


@pytest.fixture
def starting(origin: Origin, tmp_path: Path) -> Iterator[Mounting]:
    origin.be_slow()
    with mounts_of(origin, tmp_path) as start:
        yield start


def all_read_right(hosts: list[Host], origin: Origin, contents: Contents) -> int:
    """They do, whoever answers. How often the origin has given them."""
    before = origin.bytes_read(contents)
    read_by_all(hosts, contents)
    return (origin.bytes_read(contents) - before) // size_of(contents)


def send_all(host: Host, number: int) -> None:
    """To its keeper and its server: no process is left that would begin another one."""
    for pid in processes_of(host.mount.path):
        os.kill(pid, number)


@pytest.mark.claim("F10")
def test_a_host_that_is_stopped_costs_no_read(starting: Mounting, origin: Origin) -> None:
    with three(starting, lambda number: plain(number, "stopped")) as hosts:
        *others, stopped = hosts
        send_all(stopped, signal.SIGSTOP)
        try:
            read_by_all(others, origin.files(2))
            assert total(others, "failures")
        finally:
            send_all(stopped, signal.SIGCONT)
        for host in others:
            host.listen_again()
        meet(*hosts)
        contents = origin.files(2)
        assert_read_once(hosts, origin, contents)


def test_a_host_that_ends_costs_no_read_and_others_share_its_files(
    starting: Mounting, origin: Origin, tmp_path: Path
) -> None:
    with three(starting, lambda number: plain(number, "ended")) as hosts:
        *others, gone = hosts
        contents = origin.files(2)
        with ThreadPoolExecutor(1) as one:
            reading = one.submit(read_by_all, others, contents)
            gone.mount.umount()
            reading.result(PATIENCE_S)
        read_by_all(others, origin.files())
        name = f"{address(HOSTS - 1)}:{OTHER_PORT}"
        eventually(lambda: all(host.pool["without"] == [name] for host in others))
        shared = origin.files(4)
        assert_read_once(others, origin, shared)


def test_the_server_of_a_host_that_is_killed_answers_again(
    starting: Mounting, origin: Origin
) -> None:
    with three(starting, lambda number: plain(number, "killed")) as hosts:
        killed = hosts[1]
        killed.mount.kill_server()
        read_by_all(hosts, origin.files())
        for host in hosts:
            host.listen_again()
        meet(*hosts)
        for host in hosts:
            host.mark()
        contents = origin.files(2)
        read_by_all(hosts, contents)
        assert late(hosts) == 0
        assert origin.bytes_read(contents) == size_of(contents)


def test_an_origin_that_hangs_for_the_owner_alone_hangs_no_reader(
    starting: Mounting, origin: Origin
) -> None:
    """The first of two opens hangs, which is the owner's."""
    with three(starting, lambda number: plain(number, "hung")) as hosts:
        contents = origin.files()
        origin.faulty.add(Fault("open", path=next(iter(contents)), hang=True, times=1))
        with ThreadPoolExecutor(HOSTS) as pool:
            readings = [pool.submit(host.read, contents) for host in hosts]
            eventually(lambda: sum(reading.done() for reading in readings) >= HOSTS - 1)
            origin.faulty.release()
            for reading in readings:
                reading.result(PATIENCE_S)


class Wire:
    """A way to a host that flips a bit of each block: a context, at `place`."""

    def __init__(self, place: tuple[str, int], to: tuple[str, int]) -> None:
        self._to = to
        self._listening = socket.create_server(place)
        self._open: list[socket.socket] = []
        self.flipped = 0

    def __enter__(self) -> Wire:
        self._spawn(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    @staticmethod
    def _spawn(run: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=run, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                self._open.append(near)
                try:
                    far = socket.create_connection(self._to)
                except OSError:  # it does not listen yet
                    near.close()
                    continue
                self._open.append(far)
                self._spawn(self._pass, near, far, False)
                self._spawn(self._pass, far, near, True)

    def _pass(self, one: socket.socket, other: socket.socket, flips: bool) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(1 << 20)):
                at = data.find(b"FCB1")
                if flips and at >= 0 and len(data) > at + 32:
                    data[at + 32] ^= 1  # the first byte of a block
                    self.flipped += 1
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)


@pytest.mark.claim("F10")
def test_a_byte_that_flips_on_the_wire_is_read_at_the_origin(
    starting: Mounting, origin: Origin
) -> None:
    names = f"{address(0)}:{OTHER_PORT},{address(1)}:9999"
    options = ("--pool", f"peer://{names}/flipped", "--pool-insecure", "--pool-listen")
    with Wire((address(1), 9999), (address(1), OTHER_PORT)) as wire:
        first = starting(*options, f"{address(0)}:{OTHER_PORT}")
        second = starting(*options, f"{address(1)}:{OTHER_PORT}")
        for host in (first, second):
            host.measure()
        meet(first, second)
        contents = origin.files(2)
        flipped = wire.flipped
        for host in (first, second):
            host.mark()
            host.read(contents)
        assert wire.flipped - flipped == first.count("damaged") > 0
        assert late([first, second]) == 0
        assert first.count("origin_files") == len(contents)
        assert second.count("damaged") == 0


@pytest.mark.claim("S15")
def test_a_wrong_certificate_lets_nobody_in(
    starting: Mounting, origin: Origin, access: Access, tmp_path: Path
) -> None:
    names = [address(n) for n in range(HOSTS)]
    strange = make_access(tmp_path / "strange", names, has_tls=True, acl="")
    hosts = [starting(*secure(access, number, "strange", OTHER_PORT)) for number in range(2)]
    options = list(secure(strange, 2, "strange", OTHER_PORT))
    options[options.index("--pool-ca") + 1] = str(access.certificate("ca")[0])
    foreigner = starting(*options)
    for host in (*hosts, foreigner):
        host.measure()
        host.mark()
    contents = origin.files(2)
    read_by_all([*hosts, foreigner], contents)
    assert foreigner.count("files") == 0
    assert foreigner.count("origin_files") == len(contents)
    for host in hosts:
        eventually(lambda host=host: host.pool["served"]["refused"] > 0)  # type: ignore[misc]
        assert host.count("files") > 0
        assert f"{address(2)}:{OTHER_PORT}" not in [
            f"{row['host']}:{row['port']}" for row in host.pool["servers"] if row["hits"]
        ]
    assert foreigner.pool["served"]["requests"] == 0
    without = ssl.create_default_context(cafile=str(access.certificate("ca")[0]))
    with (
        socket.create_connection((address(0), OTHER_PORT), PATIENCE_S) as plain_socket,
        without.wrap_socket(plain_socket, server_hostname=address(0)) as connection,
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
    ):
        connection.recv(1)


def test_another_dataset_is_not_asked(starting: Mounting, origin: Origin) -> None:
    hosts = [starting(*plain(number, f"d{number}", hosts=2)) for number in range(2)]
    contents = origin.files()
    for host in hosts:
        host.measure()
        host.mark()
        host.read(contents)
        assert host.count("files") == 0
        assert host.count("origin_files") == len(contents)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--pool-listen", "0.0.0.0:7411"), "--pool-listen: only with --pool peers://"),
        (("--pool", "peer://h/d", "--pool-insecure", "--pool-listen", ":1"), "is no server"),
    ],
)
def test_where_to_listen_is_checked(
    place: conftest.Place, words: tuple[str, ...], told: str
) -> None:
    cache = ("--cache-dir", place.cache_dir, "--hintsd", "none", "--ssd", "64M")
    done = command("mount", place.source, place.mountpoint, *cache, "--allow-empty", *words)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_host_that_does_not_listen_asks(starting: Mounting, origin: Origin) -> None:
    owner = starting(*plain(0, "asks", hosts=1))
    asker = starting("--pool", url("asks", "peer", 1), "--pool-insecure")
    owner.measure()
    asker.measure()
    contents = origin.files()
    for host in (owner, asker):
        host.mark()
    asker.read(contents)
    assert late([asker]) == 0
    assert asker.count("origin_files") == 0
    assert owner.count("origin_files") == len(contents)
    assert owner.pool["served"]["fetched"] >= len(contents)
