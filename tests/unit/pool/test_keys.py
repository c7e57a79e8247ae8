"""Small values: which commands a server gets, and what it may answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusecache.pool import engine as engine_module
from fusecache.pool.address import Credentials, parse_address
from fusecache.pool.engine import Engine
from fusecache.pool.keys import Away, Keys
from tests.support.fake_engine import NOTHING, FakeEngine, bulk, say

KEY = "fusecache:d:FCS1:60000"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as made:
        yield made


class Hosts:
    """That much of pool/hosts.py."""

    def __init__(self, port: str) -> None:
        self.server: tuple[str, str] | None = ("127.0.0.1", port)
        self.asked: list[str] = []

    def server_of(self, key: str) -> tuple[str, str] | None:
        self.asked.append(key)
        return self.server

    def open_engine(self) -> Engine:
        return Engine(parse_address("valkey://127.0.0.1/d"), Credentials(), None)


def keys_of(engine: FakeEngine) -> tuple[Keys, Hosts]:
    hosts = Hosts(engine.port)
    return Keys(hosts), hosts  # type: ignore[arg-type]


def test_commands(engine: FakeEngine) -> None:
    keys, hosts = keys_of(engine)
    engine.replies.extend(
        map(say, (NOTHING, bulk(b"\0x"), b"+OK\r\n", NOTHING, b"+OK\r\n", b":1\r\n"))
    )
    assert keys.get(KEY) is None
    assert keys.get(KEY) == b"\0x"
    assert keys.put(KEY, b"v", 1.5)
    assert not keys.put(KEY, b"v", 30, is_new=True)
    assert keys.put(KEY, b"v", 0.0001, is_new=True)
    keys.remove(KEY)
    key = KEY.encode()
    assert engine.commands == [
        [b"GET", key], [b"GET", key], [b"SET", key, b"v", b"PX", b"1500"],
        [b"SET", key, b"v", b"PX", b"30000", b"NX"], [b"SET", key, b"v", b"PX", b"1", b"NX"],
        [b"UNLINK", key],
    ]  # fmt: skip
    assert hosts.asked == [KEY] * 6
    assert engine.connections == 1


def test_no_server_is_known(engine: FakeEngine) -> None:
    keys, hosts = keys_of(engine)
    hosts.server = None
    with pytest.raises(Away):
        keys.get(KEY)
    assert not engine.commands


@pytest.mark.parametrize(
    "answer",
    [
        b"-OOM command not allowed\r\n", b"-NOPERM no\r\n", b"-MOVED 5 127.0.0.1:1\r\n",
        b":5\r\n", b"*1\r\n$1\r\nx\r\n", b"nonsense\r\n",
    ],
)  # fmt: skip
def test_an_answer_that_is_none(engine: FakeEngine, answer: bytes) -> None:
    keys, _ = keys_of(engine)
    engine.replies.append(say(answer))
    with pytest.raises(Away):
        keys.get(KEY)
    engine.replies.append(say(bulk(b"x")))
    assert keys.get(KEY) == b"x", "the next one goes to a new connection, if need be"


def test_an_answer_without_end(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ANSWER_BYTES_MOST", 1 << 20)
    keys, _ = keys_of(engine)
    engine.replies.append(say(b"$536870912\r\n", *[bytes(1 << 16)] * 64))
    with pytest.raises(Away, match="more than"):
        keys.get(KEY)
    engine.replies.append(say(bulk(bytes(1 << 19))))
    engine.replies.append(say(bulk(bytes(1 << 19))))
    for _ in range(2):  # each has its own room
        assert keys.get(KEY) == bytes(1 << 19)
