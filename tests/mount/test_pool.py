"""Hosts that share what they read, and all that may fail of it (docs/POOL.md).

Hosts are mounts of one origin, with a cache each; where a link is cut, in networks of their own.
The origin counts. It is slow to open, for how long a server is waited for goes by the origin.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import valkey

from fusecache.base.wire import Result
from fusecache.config.settings import Config
from fusecache.control import control_client
from fusecache.pool.slots import SLOTS, slot_of
from fusecache.store.types import BLOCK_BYTES
from tests.conftest import Place
from tests.support import PATIENCE_S
from tests.support.fake_engine import LEASE, key_of
from tests.support.faulty_origin import SETTLED_S, Fault, FaultyOrigin
from tests.support.mounted import Mount, command, eventually, is_mounted
from tests.support.plan_client import PlanClient
from tests.support.trees import random_bytes
from tools.cluster_lib.cluster import Cluster
from tools.cluster_lib.engine import ACL, OWNER, PORT, Access, Engine, make_access

AGE_S = 2.0
DELAY_S = 0.2
DIRECTORIES, FILES = 120, 6
LARGE_BYTES = (9 << 20) + 5
LARGE_BLOCKS, LARGE_FILES = 3, 6
PART_BYTES = 128 << 10
"""Of a large file: its first READ is answered by the origin, with no more than it asks for."""
ENGINE_BYTES = 200 << 20
Contents = dict[str, bytes]


# ---- the origin ----------------------------------------------------------------------------------


class Origin:
    """Directories of small files, each for one test, and large files; all are old enough."""

    def __init__(self, place: Place, faulty: FaultyOrigin) -> None:
        self.place, self.faulty = place, faulty
        self.path = faulty.mountpoint
        self._directories = iter(range(DIRECTORIES))
        self._large = iter(range(LARGE_FILES))
        self._unread = iter(range(199, -1, -1))
        self.be_slow()

    def be_slow(self) -> None:
        """That alone."""
        self.faulty.clear()
        self.faulty.add(Fault("open", delay_s=DELAY_S))

    @staticmethod
    def make(place: Place) -> None:
        for number in range(DIRECTORIES):
            for name, content in small(number).items():
                place.write(name, content)
        for number in range(LARGE_FILES):
            place.write(*large(number))
        for number in range(200):
            place.write(f"spare/{number:03}", b"%d" % number)

    def files(self, more: int = 1) -> Contents:
        """Of directories that nobody has read yet."""
        found: Contents = {}
        for _ in range(more):
            found |= small(next(self._directories))  # StopIteration: one worker ran out of them
        return found

    def large(self) -> Contents:
        name, content = large(next(self._large))
        return {name: content}

    def unread(self) -> str:
        """A small file that no host has read."""
        return f"spare/{next(self._unread):03}"

    def bytes_read(self, contents: Contents) -> int:
        return sum(self.faulty.count("bytes", name) for name in contents)


def small(number: int) -> Contents:
    sizes = (1, 4095, 20_000, 70_001, 33, 100_000)
    return {
        f"d{number:03}/{n}": random_bytes((number, n), size + number)
        for n, size in enumerate(sizes)
    }


def large(number: int) -> tuple[str, bytes]:
    return f"large/{number}", random_bytes(("large", number), LARGE_BYTES + number)


def size_of(contents: Contents) -> int:
    return sum(map(len, contents.values()))


@contextlib.contextmanager
def counting_origin(directory: Path) -> Iterator[Origin]:
    """Of hosts that share it; its files are old enough to be kept."""
    place = Place(directory)
    Origin.make(place)
    (place.base / "origin").mkdir()
    made_s = time.time()
    with FaultyOrigin(place.source, place.base / "origin", place.base / "origin.sock") as faulty:
        time.sleep(max(0.0, made_s + SETTLED_S - time.time()))
        yield Origin(place, faulty)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    with counting_origin(tmp_path_factory.mktemp("pool")) as made:
        yield made


# ---- engines -------------------------------------------------------------------------------------


def loopback(number: int) -> str:
    """An address of this process alone."""
    pid = os.getpid()
    return f"127.{64 + number}.{pid >> 8 & 255}.{pid & 255}"


live_servers: list[Server] = []


def block_key(origin: Origin, dataset: str, name: str, block: int = 0) -> bytes:
    found = (origin.place.source / name).stat()
    version = (0, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return f"fusecache:{dataset}:{key_of(name.encode(), version, block).hex()}".encode()


def is_stored(key: bytes) -> bool:
    """A block, in any of them; a lease is none."""
    for server in live_servers:
        with contextlib.suppress(valkey.ValkeyError):  # another one's slot
            if server.client.strlen(key) > len(LEASE):
                return True
    return False


class Server:
    """An engine, and a client of it that may do all."""

    def __init__(self, directory: Path, address: str, access: Access, *options: str) -> None:
        self.access = access
        self.engine = Engine(directory, address, access, ENGINE_BYTES, (), options)
        self.engine.start()
        self.client: Any = valkey.Valkey(
            unix_socket_path=str(directory / "engine.sock"),
            username=OWNER if access.acl else None,
            password=access.owner_password if access.acl else None,
        )

    @property
    def place(self) -> str:
        return f"{self.engine.address}:{PORT}"

    def blocks(self, dataset: str) -> set[bytes]:
        prefix = f"fusecache:{dataset}:"
        found = set(self.client.scan_iter(f"{prefix}*", 1000))
        others = f"{prefix}members".encode(), f"{prefix}FCS1:".encode()
        return {key for key in found if not key.startswith(others)}

    def options(self, dataset: str) -> tuple[str, ...]:
        return plain(self.place, dataset)


def plain(places: str, dataset: str) -> tuple[str, ...]:
    return ("--pool", f"valkey://{places}/{dataset}", "--pool-insecure")


@contextlib.contextmanager
def serving(directory: Path, number: int, access: Access, *options: str) -> Iterator[Server]:
    server = Server(directory, loopback(number), access, *options)
    live_servers.append(server)
    try:
        yield server
    finally:
        live_servers.remove(server)
        server.client.close()
        server.engine.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Anybody may ask it for anything, in the clear."""
    directory = tmp_path_factory.mktemp("engine")
    access = make_access(directory / "access", [], has_tls=False, acl="")
    with serving(directory / "it", 1, access) as made:
        yield made


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """TLS, a user, a password."""
    directory = tmp_path_factory.mktemp("secure")
    access = make_access(directory / "access", [loopback(2)], has_tls=True, acl=ACL)
    with serving(directory / "it", 2, access) as made:
        yield made


def secured(server: Server, dataset: str) -> tuple[str, ...]:
    access = server.access
    return (
        "--pool", f"valkeys://{server.place}/{dataset}",
        "--pool-ca", str(access.certificate("ca")[0]),
        "--pool-user", access.user, "--pool-password-file", str(access.password_file),
    )  # fmt: skip


# ---- hosts ---------------------------------------------------------------------------------------


class Host:
    """A mount in a pool, and what it has counted since `mark`."""

    def __init__(self, mount: Mount, origin: Origin) -> None:
        self.mount, self.origin = mount, origin
        self._spare = iter(range(200))
        self._before: dict[str, Any] = {}
        self.mark()

    @property
    def pool(self) -> dict[str, Any]:
        found: dict[str, Any] = self.mount.value("pool")
        return found

    @property
    def server(self) -> dict[str, Any]:
        """The state of its only one."""
        (found,) = self.pool["servers"]
        return dict(found)

    def mark(self) -> None:
        self._before = self.pool

    def count(self, name: str) -> int:
        return int(self.pool[name]) - int(self._before.get(name, 0))

    def read(self, contents: Contents, threads: int = 4) -> None:
        """All of it, and it is right."""

        def is_right(name: str) -> bool:
            return (self.mount.path / name).read_bytes() == contents[name]

        with ThreadPoolExecutor(threads) as pool:
            wrong = [
                name
                for name, right in zip(contents, pool.map(is_right, contents), strict=True)
                if not right
            ]
        assert not wrong

    def write(self, contents: Contents, blocks: int = 1) -> None:
        """Read it, and wait until the pool has it, of each file so many blocks."""
        self.read(contents)
        self.has_written(contents, blocks)

    def has_written(self, contents: Contents, blocks: int = 1) -> None:
        """Wait until the pool has it, of each file so many blocks, whoever has written them."""
        dataset = self.pool["dataset"]
        keys = [
            block_key(self.origin, dataset, name, n) for name in contents for n in range(blocks)
        ]
        eventually(lambda: all(map(is_stored, keys)))

    def measure(self) -> None:
        """Read a file at the origin: by how long that takes a server is waited for."""
        (self.mount.path / self.origin.unread()).read_bytes()

    @property
    def late(self) -> int:
        """Blocks for which the server, or this machine, took too long: the origin has them."""
        return self.count("failures") + self.count("skipped")

    def has_from_pool(self, contents: Contents, parts: int = 0) -> None:
        """Read it: nothing of it comes from the origin, but parts of blocks, and what was late."""
        if not self.pool["origin_files"]:
            self.measure()
        self.mark()
        before = self.origin.bytes_read(contents)
        self.read(contents)
        late = self.late
        late_bytes = late * max(map(len, contents.values()))
        assert late <= len(contents) / 2, self.pool
        assert self.origin.bytes_read(contents) - before <= parts * PART_BYTES + late_bytes
        assert self.count("origin_files") <= late, self.pool
        assert self.count("files") + self.count("origin_files") == len(contents)
        assert 0 <= size_of(contents) - self.count("bytes") <= late_bytes
        assert self.count("misses") == 0

    def has_from_origin(self, contents: Contents, threads: int = 4) -> None:
        """Read it: each byte of it comes from the origin, once."""
        self.mark()
        before = self.origin.bytes_read(contents)
        self.read(contents, threads)
        assert self.origin.bytes_read(contents) == before + size_of(contents), self.pool
        assert self.count("files") == 0
        assert self.count("origin_files") == len(contents)

    def sweep(self) -> None:
        control_client.ask(control_client.find(str(self.mount.path)), {"op": "sweep"})

    def listen_again(self) -> None:
        """Read small files, until it leaves no server alone."""

        def look() -> bool:
            (self.mount.path / f"spare/{next(self._spare):03}").read_bytes()
            return not any(row["is_left_alone"] for row in self.pool["servers"])

        eventually(look, every_s=0.3)


Mounting = Callable[..., Host]


@contextlib.contextmanager
def mounts_of(origin: Origin, base: Path) -> Iterator[Mounting]:
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(*flags: str, zero_open: bool = True, allow_log: tuple[str, ...] = ()) -> Host:
            number = next(numbers)
            path = base / f"mnt{number}"
            path.mkdir()
            if "--pool-min-age" not in flags:
                flags = (*flags, "--pool-min-age", str(AGE_S))
            mount = Mount(
                origin.path, path, base / f"cache{number}", "--ssd", "128M", *flags,
                zero_open=zero_open, allow_log=["fusecache.pool.hosts: pool: ", *allow_log],
            )  # fmt: skip
            return Host(stack.enter_context(mount), origin)

        yield start


@pytest.fixture
def mounting(origin: Origin, tmp_path: Path) -> Iterator[Mounting]:
    with mounts_of(origin, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def two(
    origin: Origin, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Host, Host]]:
    with mounts_of(origin, tmp_path_factory.mktemp("two")) as start:
        made = start(*server.options("two")), start(*server.options("two"))
        for host in made:
            host.measure()
            eventually(lambda host=host: host.count("written") == 1)  # type: ignore[misc]
        yield made


@contextlib.contextmanager
def amid_reading(host: Host, contents: Contents) -> Iterator[None]:
    """What is done then happens after ten files, and while the others are read."""
    are_read = threading.Event()

    def read() -> None:
        for number, (name, content) in enumerate(contents.items()):
            if number == 10:
                are_read.set()
            assert (host.mount.path / name).read_bytes() == content

    with ThreadPoolExecutor(1) as one:
        reading = one.submit(read)
        assert are_read.wait(PATIENCE_S)
        yield
        reading.result(PATIENCE_S)


@pytest.fixture
def hosts(two: tuple[Host, Host], server: Server) -> Iterator[tuple[Host, Host]]:
    """Two that share all, in good order, also afterwards."""
    for host in two:
        host.mark()
    yield two
    if not server.engine.is_running:
        server.engine.start()
    for host in two:
        host.listen_again()


# ---- two hosts, one fetch ------------------------------------------------------------------------


def test_what_one_host_has_read_the_other_one_has_from_it(
    hosts: tuple[Host, Host], origin: Origin, server: Server
) -> None:
    first, second = hosts
    contents = origin.files(3)
    first.write(contents)
    assert origin.bytes_read(contents) == size_of(contents)
    eventually(lambda: first.count("bytes_written") == size_of(contents))
    assert first.count("leases") == first.count("written") == len(contents)
    second.has_from_pool(contents)
    assert second.count("written") <= second.late
    assert second.count("damaged") == 0
    assert all(server.client.ttl(key) == -1 for key in server.blocks("two")), "leases expire"


def test_blocks_of_a_large_file(hosts: tuple[Host, Host], origin: Origin) -> None:
    first, second = hosts
    contents = origin.large()
    first.write(contents, LARGE_BLOCKS)
    # a reader that comes to a block before its stream does has a part of it from the origin
    assert 0 <= origin.bytes_read(contents) - size_of(contents) <= LARGE_BLOCKS * PART_BYTES
    second.has_from_pool(contents, LARGE_BLOCKS)


def test_both_at_the_same_time(hosts: tuple[Host, Host], origin: Origin) -> None:
    contents = origin.files(2)
    with ThreadPoolExecutor() as threads:
        for reading in [threads.submit(host.read, contents) for host in hosts]:
            reading.result(PATIENCE_S)
    # A host that stands still for as long as a lease loses it, and both read the file.
    assert size_of(contents) <= origin.bytes_read(contents) <= 1.5 * size_of(contents)
    from_origin = sum(host.count("origin_files") for host in hosts)
    assert len(contents) <= from_origin <= 1.5 * len(contents)
    assert sum(host.count("files") for host in hosts) == 2 * len(contents) - from_origin


def test_what_was_warmed(hosts: tuple[Host, Host], origin: Origin) -> None:
    first, second = hosts
    contents = origin.files() | origin.large()
    done = first.mount.run("warm", first.mount.path, *contents)
    assert done.returncode == 0, done.stderr
    eventually(lambda: first.count("written") >= len(contents) + LARGE_BLOCKS - 1)
    assert origin.bytes_read(contents) == size_of(contents)
    done = second.mount.run("warm", second.mount.path, *contents)
    assert done.returncode == 0, done.stderr
    assert origin.bytes_read(contents) == size_of(contents)
    second.read(contents)


def test_what_was_hinted(hosts: tuple[Host, Host], origin: Origin) -> None:
    contents = origin.files()
    (directory,) = {name.partition("/")[0].encode() for name in contents}
    for host in hosts:
        with PlanClient(host.mount.path) as plan:
            inos = [ino for ino, *_ in plan.listing(directory).values()]
            assert plan.fetch_all(inos) == {Result.STORED: len(contents)}
        eventually(lambda: hosts[0].count("written") >= len(contents))
        host.read(contents)
    late = hosts[1].late
    assert late <= len(contents) / 2
    late_bytes = late * max(map(len, contents.values()))
    assert origin.bytes_read(contents) <= size_of(contents) + late_bytes
    assert hosts[1].count("files") >= len(contents) - late


def test_a_large_file_that_is_staged_and_not_stored(
    hosts: tuple[Host, Host], origin: Origin
) -> None:
    contents = origin.large()
    (path,) = contents
    for host in hosts:
        host.measure()
        host.mark()
        with PlanClient(host.mount.path) as plan:
            ino, *_ = plan.listing(b"large")[path.partition("/")[2].encode()]
            assert plan.stage_all([ino], store=0) == {Result.STAGED: 1}
        host.has_written(contents, LARGE_BLOCKS)
    second = hosts[1]
    late_bytes = second.late * BLOCK_BYTES
    assert late_bytes < size_of(contents) / 2
    assert 0 <= origin.bytes_read(contents) - size_of(contents) <= late_bytes
    assert 0 <= size_of(contents) - second.count("bytes") <= late_bytes
    assert second.count("files") + second.count("origin_files") == 1


def test_over_tls_with_a_user_in_both_open_modes(
    mounting: Mounting, origin: Origin, secure: Server
) -> None:
    first = mounting(*secured(secure, "tls"), zero_open=False)
    second = mounting(*secured(secure, "tls"))
    for one, other in ((first, second), (second, first)):
        contents = origin.files()
        one.write(contents)
        other.has_from_pool(contents)
    contents = origin.large()
    second.write(contents, LARGE_BLOCKS)
    first.has_from_pool(contents, 1)
    assert first.pool["is_tls"]
    assert not first.server["is_left_alone"]
    assert not second.server["is_left_alone"]
    done = first.mount.run("pool", "status", "--json", first.mount.path)
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert len(found["members"]) == 2
    assert [row["server"] for row in found["servers"]] == [secure.place]


def test_datasets_share_nothing(
    mounting: Mounting, hosts: tuple[Host, Host], origin: Origin, server: Server
) -> None:
    contents = origin.files()
    hosts[0].write(contents)
    mounting(*server.options("other")).has_from_origin(contents)


def test_what_is_young_is_not_shared(mounting: Mounting, origin: Origin, server: Server) -> None:
    (default,) = (field.default for field in fields(Config) if field.name == "pool_min_age_s")
    assert default == 60.0
    host = mounting(*server.options("young"), "--pool-min-age", "3600")
    host.has_from_origin(origin.files())
    assert server.blocks("young") == set()
    assert host.count("misses") == 0


# ---- engines that fail ---------------------------------------------------------------------------


def test_an_engine_that_is_killed(hosts: tuple[Host, Host], origin: Origin, server: Server) -> None:
    first, second = hosts
    during, after = origin.files(5), origin.files(2)
    first.write(during)
    with amid_reading(second, during):
        server.engine.kill()
    assert second.count("files") >= 10
    assert second.count("files") + second.count("origin_files") == len(during)
    for host in hosts:
        host.mark()
    for host in hosts:
        host.read(after)
        assert host.server["is_left_alone"]
        assert host.count("origin_files") == len(after)
        assert host.count("failures") < len(after), "the others did not try"
    assert origin.bytes_read(after) == 2 * size_of(after)
    server.engine.start()
    for host in hosts:
        host.listen_again()
    again = origin.files()
    first.write(again)
    second.has_from_pool(again)


def test_an_engine_that_is_stopped(
    hosts: tuple[Host, Host], origin: Origin, server: Server
) -> None:
    first, second = hosts
    contents = origin.files(2)
    first.write(contents)
    server.engine.stop()
    try:
        second.has_from_origin(contents, threads=1)
        assert second.server["is_left_alone"]
        assert 3 <= second.count("failures") < len(contents) / 2
    finally:
        server.engine.resume()
    second.listen_again()
    contents = origin.files()
    second.write(contents)
    first.listen_again()
    first.has_from_pool(contents)


def test_an_engine_that_is_away_at_the_start(
    mounting: Mounting, origin: Origin, tmp_path: Path
) -> None:
    access = make_access(tmp_path / "access", [], has_tls=False, acl="")
    with serving(tmp_path / "it", 3, access) as late:
        late.engine.kill()
        host = mounting(*late.options("late"))
        eventually(lambda: "refused" in host.pool["fault"])
        host.has_from_origin(origin.files(2), threads=1)
        assert 3 <= host.count("failures") <= 6
        late.engine.start()
        host.listen_again()
        contents = origin.files()
        host.write(contents)
        mounting(*late.options("late")).has_from_pool(contents)


def test_an_engine_that_is_full_and_evicts_nothing(
    mounting: Mounting, origin: Origin, tmp_path: Path
) -> None:
    access = make_access(tmp_path / "access", [], has_tls=False, acl="")
    with serving(tmp_path / "it", 3, access) as full:
        first, second = (mounting(*full.options("full")) for _ in range(2))
        contents, more = origin.files(2), origin.files(2)
        first.write(contents)
        full.client.config_set("maxmemory-policy", "noeviction")
        full.client.config_set("maxmemory", 1)
        second.has_from_pool(contents)
        for host in (first, second):
            host.has_from_origin(more)
            assert host.count("written") == host.count("failures") == 0
            assert host.server["why"].startswith("OOM")
            assert not host.server["is_left_alone"]
        assert len(full.blocks("full")) == len(contents)


def test_a_link_that_is_cut() -> None:
    """Of one host: it has all from the origin, and the others lose but its engine."""
    contents = {f"{n}": random_bytes(n, 20_000) for n in range(200)}
    names = sorted(contents, key=int)
    before, amid, after, spare = names[:12], names[12:36], names[36:48], iter(names[48:])

    def pool_of(host: Any) -> Any:
        at = control_client.find(str(host.mountpoint))
        return control_client.ask(at, {"op": "status"})["status"]["pool"]

    def read(host: Any, names: list[str]) -> None:
        assert all((host.mountpoint / name).read_bytes() == contents[name] for name in names)

    def counted() -> list[int]:
        return [count.files for count in cluster.origin_counts()]

    def late(host: Any) -> int:
        return int(pool_of(host)["failures"] + pool_of(host)["skipped"])

    with Cluster(hosts=2, link_mbit=0, origin_mbit=0, origin_latency_s=0.02) as cluster:
        for name, content in contents.items():
            (cluster.data / name).write_bytes(content)
        cluster.mount(*cluster.pool_options(), "--ram", "16M", "--ssd", "64M")
        here, there = cluster.hosts
        read(here, before)
        eventually(lambda: pool_of(here)["written"] == 12)
        read(there, before)
        here_read, there_read = counted()
        assert here_read == 12
        assert there_read <= min(6, late(there))
        there.partition()
        read(here, amid)
        read(there, amid)
        assert counted() == [36, there_read + 24], "neither could ask the other one's"
        assert [row["is_left_alone"] for row in pool_of(here)["servers"]] == [False, True]
        assert [row["is_left_alone"] for row in pool_of(there)["servers"]] == [True, False]
        there.heal()

        def is_whole() -> bool:
            return not any(
                row["is_left_alone"] for host in cluster.hosts
                for row in pool_of(host)["servers"]
            )  # fmt: skip

        def look() -> bool:
            for host in cluster.hosts:
                (host.mountpoint / next(spare)).read_bytes()
            return is_whole()

        eventually(look, every_s=0.5)
        so_far = sum(counted())
        written = pool_of(there)["written"] + 12
        read(there, after)
        eventually(lambda: pool_of(there)["written"] >= written)
        late_before = late(here)
        read(here, after)
        more = sum(counted()) - so_far - 12
        assert 0 <= more <= min(6, late(here) - late_before)


# ---- who may not ---------------------------------------------------------------------------------


def is_refused(host: Host, origin: Origin, why: str) -> None:
    """All is right, and the origin's; the server is left alone, and it is said why."""
    host.has_from_origin(origin.files(2), threads=1)
    assert host.server["is_left_alone"]
    assert why in host.server["why"]
    assert 3 <= host.count("failures") <= 6
    assert host.count("written") == 0
    assert eventually(lambda: why in host.mount.log())


def test_a_ca_that_is_not_the_servers(
    mounting: Mounting, origin: Origin, secure: Server, tmp_path: Path
) -> None:
    other = make_access(tmp_path / "other", [], has_tls=True, acl="")
    options = list(secured(secure, "wrong"))
    options[options.index("--pool-ca") + 1] = str(other.certificate("ca")[0])
    is_refused(mounting(*options), origin, "certificate")
    assert secure.blocks("wrong") == set()


def test_a_certificate_of_another_name(mounting: Mounting, origin: Origin, tmp_path: Path) -> None:
    """As of a server that has taken another one's place."""
    names = [loopback(3), "192.0.2.1"]
    access = make_access(tmp_path / "access", names, has_tls=True, acl=ACL)
    for theirs, its in zip(access.certificate(names[1]), access.certificate(names[0]), strict=True):
        shutil.copy(theirs, its)
    with serving(tmp_path / "it", 3, access) as impostor:
        host = mounting(*secured(impostor, "wrong"))
        is_refused(host, origin, "mismatch")
        assert impostor.blocks("wrong") == set()


def test_a_server_that_speaks_no_tls(
    mounting: Mounting, origin: Origin, server: Server, secure: Server
) -> None:
    options = list(secured(secure, "wrong"))
    options[1] = f"valkeys://{server.place}/wrong"
    host = mounting(*options)
    host.has_from_origin(origin.files(2))
    assert host.server["is_left_alone"]
    assert server.blocks("wrong") == set()


def test_a_wrong_password(
    mounting: Mounting, origin: Origin, secure: Server, tmp_path: Path
) -> None:
    path = tmp_path / "password"
    path.touch(0o600)
    path.write_text("wrong\n")
    options = [*secured(secure, "wrong")[:-1], str(path)]
    is_refused(mounting(*options), origin, "WRONGPASS")


def as_user(server: Server, base: Path, dataset: str, *rules: str) -> tuple[str, ...]:
    """Options of a user who may do what the rules say."""
    server.client.execute_command("ACL", "SETUSER", "someone", "reset", "on", ">secret", *rules)
    path = base / "password"
    path.touch(0o600)
    path.write_text("secret\n")
    user = ("--pool-user", "someone", "--pool-password-file", str(path))
    return (*server.options(dataset), *user)


def test_an_acl_for_another_prefix(
    mounting: Mounting, origin: Origin, server: Server, tmp_path: Path
) -> None:
    options = as_user(server, tmp_path, "closed", "~fusecache:else:*", "+@all")
    is_refused(mounting(*options), origin, "NOPERM")
    assert server.blocks("closed") == set()


def test_an_acl_that_lets_read_alone(
    mounting: Mounting, hosts: tuple[Host, Host], origin: Origin, server: Server, tmp_path: Path
) -> None:
    contents, more = origin.files(2), origin.files(2)
    hosts[0].write(contents)
    host = mounting(*as_user(server, tmp_path, "two", "~fusecache:two:*", "+get"))
    host.has_from_pool(contents)
    before = server.blocks("two")
    host.has_from_origin(more)
    assert host.count("failures") == host.count("written") == 0
    assert not host.server["is_left_alone"]
    assert server.blocks("two") == before


# ---- values that are none ------------------------------------------------------------------------


def flip(client: Any, key: bytes, size: int) -> None:
    byte = client.getrange(key, 32 + size // 2, 32 + size // 2)
    client.setrange(key, 32 + size // 2, bytes([byte[0] ^ 1]))


def cut(client: Any, key: bytes, size: int) -> None:
    client.set(key, client.get(key)[:-1])


def lengthen(client: Any, key: bytes, size: int) -> None:
    client.append(key, b"x")


def make_list(client: Any, key: bytes, size: int) -> None:
    client.delete(key)
    client.lpush(key, b"x")


def put_another_file(client: Any, key: bytes, size: int) -> None:
    value = client.get(key)
    client.set(key, value[:32] + bytes(size))


@pytest.mark.parametrize("damage", [flip, cut, lengthen, make_list, put_another_file])
def test_damage_is_found_and_mended(
    hosts: tuple[Host, Host], origin: Origin, server: Server, damage: Callable[..., None]
) -> None:
    first, second = hosts
    contents = origin.files()
    first.write(contents)
    right = {}
    for name in contents:
        key = block_key(origin, "two", name)
        right[key] = server.client.get(key)
        assert right[key] is not None
        damage(server.client, key, len(contents[name]))
    second.has_from_origin(contents)
    assert second.count("damaged") == second.count("misses") == len(contents)
    assert second.count("failures") == 0
    eventually(lambda: {key: server.client.get(key) for key in right} == right)


def test_a_lease_of_a_host_that_is_dead(
    hosts: tuple[Host, Host], origin: Origin, server: Server
) -> None:
    """It ends while it is waited for; another one never would."""
    first, second = hosts
    contents = dict(itertools.islice(origin.files().items(), 2))
    ends, stays = (block_key(origin, "two", name) for name in contents)
    server.client.set(ends, LEASE)
    server.client.set(stays, LEASE)
    with ThreadPoolExecutor(1) as one:
        reading = one.submit(first.read, contents)
        eventually(lambda: first.count("waits") == 2)
        server.client.pexpire(ends, 1)
        reading.result(PATIENCE_S)
    assert origin.bytes_read(contents) == size_of(contents)
    assert first.count("leases") == 1
    eventually(lambda: is_stored(ends))
    assert server.client.get(stays) == LEASE, "it is another host's"
    server.client.delete(stays)
    second.read(contents)
    assert second.count("files") == 1


def test_a_read_that_fails_leaves_no_lease(
    hosts: tuple[Host, Host], origin: Origin, server: Server
) -> None:
    first, second = hosts
    name, content = next(iter(origin.files().items()))
    first.mount.allow_log.append(name)
    origin.faulty.add(Fault("read", name, error="EIO"))
    try:
        with pytest.raises(OSError, match="Input/output error"):
            (first.mount.path / name).read_bytes()
        eventually(lambda: not server.client.exists(block_key(origin, "two", name)))
    finally:
        origin.be_slow()
    second.read({name: content})
    assert second.count("waits") == 0


# ---- files that change, servers that die ---------------------------------------------------------


def test_a_file_that_has_changed(hosts: tuple[Host, Host], origin: Origin) -> None:
    first, second = hosts
    contents = dict(itertools.islice(origin.files().items(), 3))
    for host in hosts:  # a sweep looks at what was listed
        os.listdir(host.mount.path / os.path.dirname(next(iter(contents))))
    first.write(contents)
    second.has_from_pool(contents)
    for name, content in contents.items():
        contents[name] = bytes(byte ^ 1 for byte in content)
        found = (origin.place.source / name).stat()
        origin.place.write(name, contents[name])
        os.utime(origin.place.source / name, ns=(found.st_atime_ns, found.st_mtime_ns))
    time.sleep(SETTLED_S)
    first.sweep()
    before = origin.bytes_read(contents)
    first.write(contents)
    assert origin.bytes_read(contents) == before + size_of(contents)
    second.sweep()
    second.has_from_pool(contents)


def test_the_mounts_server_is_killed(hosts: tuple[Host, Host], origin: Origin) -> None:
    first, second = hosts
    contents, more = origin.files(5), origin.files()
    first.write(contents)
    with amid_reading(second, contents):
        second.mount.kill_server()
    assert origin.bytes_read(contents) < 1.2 * size_of(contents), "but what was in the air"
    first.write(more)
    second.has_from_pool(more)
    last = origin.files()
    second.write(last)
    first.has_from_pool(last)


# ---- a Cluster -----------------------------------------------------------------------------------


def clustered(number: int) -> tuple[str, ...]:
    """A server without slots stays a primary: as a replica it would hold its primary's blocks."""
    return (
        *("--cluster-enabled", "yes", "--cluster-announce-ip", loopback(number)),
        *("--cluster-allow-replica-migration", "no"),
    )


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Server]]:
    """A Cluster, each with a third of the slots."""
    access = make_access(tmp_path / "access", [], has_tls=False, acl="")
    with contextlib.ExitStack() as stack:
        made = [
            stack.enter_context(
                serving(tmp_path / f"{number}", 4 + number, access, *clustered(4 + number))
            )
            for number in range(3)
        ]
        share = SLOTS // 3
        for number, one in enumerate(made):
            last = SLOTS - 1 if number == 2 else (number + 1) * share - 1
            one.client.execute_command("CLUSTER", "ADDSLOTSRANGE", number * share, last)
            one.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for one in made[1:]:
            one.client.execute_command("CLUSTER", "MEET", made[0].engine.address, PORT)
        eventually(lambda: all(is_whole(one) for one in made))
        yield made


def is_whole(server: Server) -> bool:
    return b"cluster_state:ok" in server.client.execute_command("CLUSTER", "INFO")


def test_a_cluster_and_slots_that_move(
    mounting: Mounting, origin: Origin, three: list[Server]
) -> None:
    options = plain(three[0].place, "cluster")
    first, second = mounting(*options), mounting(*options)
    for host in (first, second):
        eventually(lambda host=host: host.pool["is_cluster"])  # type: ignore[misc]
    contents = origin.files(5)
    first.write(contents)
    assert all(one.blocks("cluster") for one in three)
    second.has_from_pool(contents)
    assert len(second.pool["servers"]) == 3

    third = range(2 * (SLOTS // 3), SLOTS)
    to = three[0].client.execute_command("CLUSTER", "MYID")
    three[2].client.flushall()
    three[0].client.execute_command("CLUSTER", "BUMPEPOCH")  # or the slots' owner claims them again
    for one in three:
        with one.client.pipeline(transaction=False) as commands:
            for slot in third:
                commands.execute_command("CLUSTER", "SETSLOT", slot, "NODE", to)
            commands.execute()
    moved = [
        f"spare/{n:03}" for n in range(200)
        if slot_of(block_key(origin, "cluster", f"spare/{n:03}")) in third
    ]  # fmt: skip
    for host in (first, second):
        host.mark()
        names = iter(moved)

        def look(host: Host = host, names: Iterator[str] = names) -> bool:
            before = host.count("moved")
            (host.mount.path / next(names)).read_bytes()
            return host.count("moved") == before

        eventually(look, every_s=0.2)
        assert host.count("failures") == 0
    contents = origin.files(3)
    first.write(contents)
    second.has_from_pool(contents)
    assert three[2].blocks("cluster") == set()


# ---- bad input -----------------------------------------------------------------------------------

PLAIN, TLS = "valkey://127.0.0.1:1/d", "valkeys://127.0.0.1:1/d"
BAD = {
    "no address": (["//h/d://"], "is no address of a pool"),
    "another scheme": (["redis://h/d"], "is no address of a pool"),
    "a password": (["valkeys://me:secret@h/d"], "--pool-password-file"),
    "no dataset": (["valkeys://h"], "no name of the dataset"),
    "no server": (["valkeys://h,/d"], "is no server"),
    "no port": (["valkeys://h:0/d"], "is no server"),
    "no host": (["valkeys://a..b/d"], "is no server"),
    "many": ([f"valkeys://{','.join(f'h{n}' for n in range(65))}/d"], "at most 64"),
    "in the clear": ([PLAIN], "--pool-insecure"),
    "no CA": ([TLS], "--pool-ca"),
    "half": ([TLS, "--pool-ca", "/ca", "--pool-cert", "/c"], "--pool-cert and --pool-key"),
    "certificates": ([PLAIN, "--pool-insecure", "--pool-ca", "/ca"], "write valkeys://"),
    "no password": ([TLS, "--pool-ca", "/ca", "--pool-user", "me"], "--pool-password-file"),
    "peers in the clear": (["peer://h/d"], "--pool-insecure"),
    "peers without a certificate": (["peers://h/d", "--pool-ca", "/ca"], "--pool-cert"),
    "no user": ([TLS, "--pool-ca", "/ca", "--pool-user", "a b"], "is no name of a user"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_is_refused_in_one_line(place: Place, what: str) -> None:
    words, told = BAD[what]
    cache = ("--cache-dir", place.cache_dir, "--hintsd", "none", "--ssd", "64M", "--allow-empty")
    commands: list[tuple[str | Path, ...]] = [
        ("mount", place.source, place.mountpoint, *cache, "--pool", *words),
        ("pool", "status", *words),
    ]
    for given in commands:
        done = command(*given)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        assert told in done.stderr
        assert "secret" not in done.stderr
        assert done.stdout == ""
    assert not is_mounted(place.mountpoint)


FILES_THAT_ARE_NONE = {
    "no CA there": ["--pool-ca", "{}/none"],
    "no certificate in it": ["--pool-ca", "{}/text"],
    "no password there": ["--pool-ca", "{}/ca.crt", "--pool-password-file", "{}/none"],
    "a password that others read": ["--pool-ca", "{}/ca.crt", "--pool-password-file", "{}/text"],
    "a key of another certificate": [
        "--pool-ca", "{}/ca.crt", "--pool-cert", "{}/client.crt", "--pool-key", "{}/ca.key",
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", FILES_THAT_ARE_NONE)
def test_files_that_are_none(place: Place, what: str) -> None:
    access = make_access(place.base / "access", [], has_tls=True, acl="")
    (access.directory / "text").write_text("text\n")
    words = [word.format(access.directory) for word in FILES_THAT_ARE_NONE[what]]
    cache = ("--cache-dir", place.cache_dir, "--hintsd", "none", "--ssd", "64M", "--allow-empty")
    done = command("mount", place.source, place.mountpoint, *cache, "--pool", TLS, *words)
    assert done.returncode != 0
    assert "--pool" in done.stderr
    assert "Traceback" not in done.stderr
    assert not is_mounted(place.mountpoint)
    done = command("pool", "status", TLS, *words)
    assert done.returncode != 0
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_pool_that_does_not_answer() -> None:
    done = command("pool", "status", PLAIN, "--pool-insecure")
    assert done.returncode == 1
    assert "127.0.0.1:1: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mount_without_a_pool(place: Place) -> None:
    with Mount(place.source, place.mountpoint, place.cache_dir, "--ssd", "64M") as mount:
        assert mount.value("pool") is None
        done = mount.run("pool", "status", mount.path)
        assert done.returncode != 0
        assert "is in no pool" in done.stderr
