"""Hosts that read for each other, without an engine (docs/POOL.md, Peers).

Hosts are mounts of one origin, with a cache and an address of the loopback each. The origin counts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import Place
from tests.mount.test_pool import (
    Contents,
    Host,
    Mounting,
    Origin,
    loopback,
    mounts_of,
    size_of,
)
from tests.support import PATIENCE_S
from tests.support.faulty_origin import SETTLED_S, FaultyOrigin
from tests.support.mounted import command, eventually
from tools.cluster_lib.engine import Access, make_access

PORT = 7411
HOSTS = 3


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Origin]:
    place = Place(tmp_path_factory.mktemp("peers"))
    Origin.make(place)
    (place.base / "origin").mkdir()
    made_s = time.time()
    with FaultyOrigin(place.source, place.base / "origin", place.base / "origin.sock") as faulty:
        time.sleep(max(0.0, made_s + SETTLED_S - time.time()))
        yield Origin(place, faulty)


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Access:
    directory = tmp_path_factory.mktemp("access") / "of"
    return make_access(directory, [address(n) for n in range(HOSTS)], has_tls=True, acl="")


def address(number: int) -> str:
    return loopback(20 + number)


def url(dataset: str, scheme: str = "peers", hosts: int = HOSTS) -> str:
    return f"{scheme}://{','.join(address(n) for n in range(hosts))}/{dataset}"


def secure(access: Access, number: int, dataset: str, name: str = "") -> tuple[str, ...]:
    """Options of the host; with the certificate `name`."""
    certificate, key = access.certificate(name or address(number))
    return (
        "--pool", url(dataset), "--pool-listen", address(number),
        "--pool-ca", str(access.certificate("ca")[0]),
        "--pool-cert", str(certificate), "--pool-key", str(key),
    )  # fmt: skip


def plain(number: int, dataset: str, hosts: int = HOSTS) -> tuple[str, ...]:
    listen = ("--pool-listen", f"{address(number)}:{PORT}")
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
        three(start, lambda number: secure(access, number, "three")) as hosts,
    ):
        yield hosts


@pytest.fixture
def hosts(trio_of: list[Host], origin: Origin) -> Iterator[list[Host]]:
    """Three that share all, in good order."""
    origin.be_slow()
    for host in trio_of:
        host.mark()
    yield trio_of


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


# ---- each file is read at the origin once --------------------------------------------------------


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
