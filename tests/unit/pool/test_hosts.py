"""A mount's part in a pool: whatever servers and names are like, it goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio

from fusecache import _native
from fusecache.pool import engine as engine_module
from fusecache.pool import hosts as hosts_module
from fusecache.pool.address import Credentials, parse_address
from fusecache.pool.engine import Engine, Unreachable
from fusecache.pool.hosts import Hosts
from fusecache.pool.slots import NO_SERVER, SLOTS
from tests.support import PATIENCE_S
from tests.support.fake_engine import FakeEngine, say

NO_CLUSTER = b"-ERR This instance has cluster support disabled\r\n"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hosts_module, "REFRESH_S", 0.05)
    monkeypatch.setattr(hosts_module, "LOOK_S", 0.02)
    yield
    _native.pool_slots(bytes([NO_SERVER]) * SLOTS)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as made:
        yield made


def hosts_of(*places: str) -> Hosts:
    address = parse_address(f"valkey://{','.join(places)}/d")
    return Hosts(address, Credentials(), "me", lambda: {"bytes": 5}, 0.0, 1.0)


def watch_until(hosts: Hosts, seen: Callable[[], bool]) -> None:
    async def watch() -> None:
        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(hosts.watch_forever)
                while not seen():
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()

    trio.run(watch)


def port_of(engine: FakeEngine) -> str:
    return f"127.0.0.1:{engine.port}"


def test_it_says_what_it_does(engine: FakeEngine) -> None:
    time = say(b"*2\r\n$2\r\n17\r\n$1\r\n0\r\n")
    engine.replies += [say(NO_CLUSTER), time, time, say(b":1\r\n"), say(b":1\r\n")]
    hosts = hosts_of(port_of(engine))
    watch_until(hosts, lambda: len(engine.commands) >= 5)
    words = [command[:2] for command in engine.commands[:5]]
    members = b"fusecache:d:members"
    assert words == [
        [b"CLUSTER", b"SLOTS"], [b"TIME"], [b"TIME"], [b"HSET", members], [b"EXPIRE", members]
    ]  # fmt: skip
    written = json.loads(engine.commands[3][3])
    assert engine.commands[3][2] == b"me"
    assert written["at"] == 17.0
    assert written["bytes"] == 5


NO_ANSWERS = [
    b":x\r\n", b"*1\r\n:1\r\n", b"*1\r\n*3\r\n:0\r\n:5\r\n*1\r\n:7\r\n", b"+OK\r\n", b"$-1\r\n",
    b"*-1\r\n", b":17\r\n", b"hello\r\n", b"*1\r\n" * 3000, b"$5\r\nab\r\n", b"\xff\r\n",
    b"*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\nh\r\n:1\r\n", b"$x\r\n",
    b"*1\r\n*3\r\n:0\r\n:5\r\n*2\r\n$2\r\n\xff\xfe\r\n:1\r\n",
]  # fmt: skip


def test_answers_that_are_none(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one server: a process knows 64 in its life."""
    monkeypatch.setattr(engine_module, "TIMEOUT_S", 0.3)
    for answer in NO_ANSWERS:
        engine.otherwise = say(answer)
        hosts, many = hosts_of(port_of(engine)), engine.connections + 6

        def seen(hosts: Hosts = hosts, many: int = many) -> bool:
            return engine.connections >= many and bool(hosts.status()["fault"])

        watch_until(hosts, seen)
        assert "\n" not in hosts.status()["fault"], answer


def test_a_name_that_is_none(engine: FakeEngine) -> None:
    engine.otherwise = say(NO_CLUSTER)
    hosts = hosts_of("no.such.name.invalid", port_of(engine))
    watch_until(hosts, lambda: engine.connections >= 3)
    assert hosts.status()["fault"]
    found = {row["host"]: row["has_address"] for row in hosts.status()["servers"]}
    assert not found["no.such.name.invalid"]
    assert found["127.0.0.1"]


def slots_answer(*ranges: tuple[int, int, bytes, str]) -> bytes:
    said = b"*%d\r\n" % len(ranges)
    for first, last, host, port in ranges:
        said += b"*3\r\n:%d\r\n:%d\r\n*2\r\n%s:%s\r\n" % (first, last, host, port.encode())
    return said


@pytest.mark.parametrize("host", [b"$9\r\n127.0.0.1\r\n", b"$0\r\n\r\n", b"$-1\r\n"])
def test_the_slots_of_a_cluster(engine: FakeEngine, host: bytes) -> None:
    """A server that knows no name of its own says none: it is where it was asked."""
    engine.otherwise = say(slots_answer((0, SLOTS - 1, host, engine.port)))
    hosts = hosts_of(port_of(engine))
    watch_until(hosts, lambda: engine.connections >= 3)
    assert hosts.status()["is_cluster"]
    assert engine.commands[1] == [b"TIME"], "it has the members' slot"


def test_a_cluster_of_too_many_servers(engine: FakeEngine) -> None:
    """Those that were there first are asked on."""
    many = [(n, n, b"$%d\r\nh%d.invalid\r\n" % (len(f"h{n}.invalid"), n), "1") for n in range(70)]
    engine.otherwise = say(slots_answer(*many))
    hosts = hosts_of(port_of(engine))
    watch_until(hosts, lambda: engine.connections >= 3)
    with pytest.raises(Unreachable, match="a Cluster of 70: at most 64"):
        Engine(parse_address("valkey://h/d"), Credentials(), None).cluster(
            ("127.0.0.1", engine.port)
        )
    assert hosts.status()["fault"]
    assert not hosts.status()["is_cluster"]


# ---- peers ---------------------------------------------------------------------------------------


def peers_of(*places: str, listen: tuple[str, str] | None = None) -> Hosts:
    address = parse_address(f"peer://{','.join(places)}/d")
    return Hosts(address, Credentials(), "me", lambda: {"bytes": 5}, 0.0, 1.0, listen)


def test_peers_are_met_and_told(engine: FakeEngine) -> None:
    time = say(b"*2\r\n$2\r\n17\r\n$1\r\n0\r\n")
    engine.replies += [time, time, say(b":1\r\n"), say(b":1\r\n")]
    hosts = peers_of(port_of(engine))
    watch_until(hosts, lambda: len(engine.commands) >= 4)
    assert [command[0] for command in engine.commands[:4]] == [b"TIME", b"TIME", b"HSET", b"EXPIRE"]
    assert hosts.has_peers
    assert hosts.status()["self"] is None


def test_a_host_that_cannot_listen_asks_all_the_same(engine: FakeEngine) -> None:
    hosts = peers_of(port_of(engine), listen=("127.0.0.1", engine.port))
    watch_until(hosts, lambda: hosts.status()["fault"].startswith("--pool-listen"))
    assert hosts.status()["self"] is None


def test_a_name_that_is_not_known_keeps_nobody_from_listening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, begun = socket.getaddrinfo, []

    def resolve(host: str, *rest: Any, **more: Any) -> Any:
        if host == "nowhere":
            raise OSError(2, "Name or service not known")
        return known(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(_native, "serve_begin", lambda *at: begun.append(at))
    hosts = peers_of("nowhere:7411", listen=("127.0.0.1", "7411"))
    watch_until(hosts, lambda: hosts.status()["fault"] == "nowhere: Name or service not known")
    assert begun == [("127.0.0.1", "7411")]


@pytest.mark.parametrize("scheme", ["valkey", "peer"])
def test_slots_of_independent_engines_have_heirs(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Cluster has none: see `_find_cluster`, which hands over no others."""
    told: list[tuple[bytes, bytes | None]] = []
    monkeypatch.setattr(_native, "pool_slots", lambda *slots: told.append(slots))
    monkeypatch.setattr(_native, "pool_server", lambda host, port: 40 + int(port))
    address = parse_address(f"{scheme}://a:1,b:2,c:3/d")
    hosts = Hosts(address, Credentials(), "me", dict, 0.0, 1.0)
    ((slots, heirs),) = told
    assert set(slots) == {41, 42, 43}
    if scheme == "peer":
        assert heirs is None
        return
    assert heirs is not None
    assert set(heirs) == {41, 42, 43}
    assert all(heir != server for heir, server in zip(heirs, slots, strict=True))
    hosts._share_out((("a", "1"),), bytes(SLOTS))  # as a Cluster says
    assert told[1] == (bytes([41]) * SLOTS, None)
