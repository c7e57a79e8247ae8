"""The C client of a pool, against servers that say what a test has them say (docs/POOL.md)."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusecache import _native
from fusecache.pool.slots import NO_SERVER, SLOTS, slot_of
from fusecache.store.types import BLOCK_BYTES
from tests.support import PATIENCE_S, native_table
from tests.support.fake_engine import (
    LEASE,
    NOTHING,
    Command,
    FakeEngine,
    bulk,
    key_of,
    listen,
    pack_block,
    say,
    say_and_close,
    then,
)
from tests.support.mounted import eventually

DATASET = "data"
NAME = b"d/f"
SIZE = 1000
HOUR_NS = 3600 * 10**9
MINUTE_NS = 60 * 10**9
SOCKETS_MOST = 16 << 20
"""What the kernel may hold of a connection, and what a test may be wrong by."""


@pytest.fixture(scope="module", autouse=True)
def nobody_is_asked_afterwards() -> Iterator[None]:
    """The fetch threads' tests may be next in this process."""
    yield
    _native.pool_slots(bytes([NO_SERVER]) * SLOTS)


def begin(
    *engines: FakeEngine,
    user: str | None = None,
    password: str | None = None,
    min_age_ns: int = 0,
    patience_ns: int = HOUR_NS,
) -> None:
    """The engines have slots by turns. Beside this origin no answer of a busy machine is slow: they
    have 1 s to begin, and leases are of 1 s and, of large files, of 4 s.
    """
    settings = (user, password, None, None, None, min_age_ns, patience_ns)
    _native.pool_begin(DATASET, *settings, has_peers=False)
    note_origin(250_000_000)
    indices = [serve_at(engine.port) for engine in engines]
    _native.pool_slots(bytes(indices) * (SLOTS // len(indices)))


def note_origin(small_ns: int) -> None:
    """Its reads take so long, on average."""
    for _ in range(100):
        _native.pool_note_origin(small_ns, SIZE)
        _native.pool_note_origin(1_000_000_000, BLOCK_BYTES)


def serve_at(port: str) -> int:
    index = _native.pool_server("127.0.0.1", port)
    _native.pool_address(index, "127.0.0.1", port)
    return index


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """The one of all slots. What nothing else ends is waited for for an hour."""
    with FakeEngine() as made:
        begin(made)
        yield made


class File:
    """One of the table, of versions that a test thinks up."""

    def __init__(self, source: Path) -> None:
        (source / "d").mkdir(parents=True)
        (source / os.fsdecode(NAME)).write_bytes(b"x")
        native_table.attach(source)
        directory = _native.lookup(native_table.ROOT, b"d")
        _native.scan(directory)
        self.ino = _native.lookup(directory, b"f")

    def version(self, size: int = SIZE, age_ns: int = HOUR_NS) -> tuple[int, int, int, int]:
        return (0, size, 17, time.time_ns() - age_ns)

    def get(
        self, version: tuple[int, int, int, int], block: int = 0, size: int | None = None
    ) -> tuple[bytes | None, bytes]:
        return _native.pool_get(self.ino, version, block, version[1] if size is None else size)


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "source")


class Counted:
    """What the counters have become more by."""

    def __init__(self) -> None:
        self._before = _native.pool_counters()

    def __getitem__(self, name: str) -> int:
        return _native.pool_counters()[name] - self._before[name]

    def all(self) -> dict[str, int]:
        return {name: self[name] for name in self._before if self[name]}


@pytest.fixture
def counted() -> Counted:
    return Counted()


def state_of(engine: FakeEngine) -> dict[str, object]:
    (found,) = (row for row in _native.pool_servers() if row["port"] == engine.port)
    return found


def content(size: int = SIZE) -> bytes:
    return random.Random(size).randbytes(size)


def name_of(key: bytes) -> bytes:
    return b"fusecache:data:" + key.hex().encode()


# ---- what is said --------------------------------------------------------------------------------


def test_a_miss_takes_the_lease_and_the_block_is_written(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    for block, size in ((0, SIZE), (3, BLOCK_BYTES)):
        version = file.version(5 * BLOCK_BYTES)
        key = key_of(NAME, version, block)
        data, ticket = file.get(version, block, size)
        assert data is None
        (asked,) = engine.commands
        assert asked[:2] == [b"SET", name_of(key)]
        assert asked[2][:4] == b"FCL1"
        assert len(asked[2]) == 12
        assert asked[3:6] == [b"NX", b"GET", b"PX"]
        assert 1000 <= int(asked[6]) <= 60_000
        engine.otherwise = say(b"+OK\r\n")
        _native.pool_finish(ticket, content(size))
        assert engine.commands[1:] == [[b"SET", name_of(key), pack_block(key, content(size))]]
        engine.commands.clear()
        engine.otherwise = say(NOTHING)
    assert counted.all() == {
        "misses": 2, "leases": 2, "written": 2, "bytes_written": SIZE + BLOCK_BYTES,
    }  # fmt: skip
    assert engine.connections == 1


def test_a_block_that_was_not_read_gives_the_lease_back(engine: FakeEngine, file: File) -> None:
    version = file.version()
    _, ticket = file.get(version)
    engine.otherwise = say(b":1\r\n")
    _native.pool_finish(ticket, None)
    assert engine.commands[1:] == [[b"UNLINK", name_of(key_of(NAME, version, 0))]]


def test_the_key_tells_versions_and_blocks_apart(engine: FakeEngine, file: File) -> None:
    base = file.version()
    for version, block in (
        (base, 0), (base, 1), ((0, SIZE, 18, base[3]), 0), ((0, SIZE, 17, base[3] - 1), 0),
        ((7, *base[1:]), 0),
    ):  # fmt: skip
        file.get(version, block)
        assert engine.commands[-1][1] == name_of(key_of(NAME, version, block))
    keys = [command[1] for command in engine.commands]
    assert keys[4] == keys[0], "inode numbers differ between hosts"
    assert len(set(keys)) == 4


def test_a_block_comes_in_pieces_of_any_size(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    cases = [(1, 1), (SIZE, 1), (SIZE, 7), (SIZE, 64), (BLOCK_BYTES, 65537), (BLOCK_BYTES, 1 << 30)]
    for size, piece in cases:
        version = file.version(size)
        answer = bulk(pack_block(key_of(NAME, version, 0), content(size)))
        engine.otherwise = say(*(answer[at : at + piece] for at in range(0, len(answer), piece)))
        data, ticket = file.get(version)
        assert data == content(size), (size, piece)
        _native.pool_finish(ticket, data)
    assert len(engine.commands) == len(cases), "they are there"
    assert counted.all() == {}
    assert state_of(engine)["hits"] == len(cases)
    assert engine.connections == 1


def test_each_slot_has_its_server(file: File) -> None:
    with FakeEngine() as even, FakeEngine() as odd:
        begin(even, odd)
        versions = [file.version(size) for size in range(1, 60)]
        for version in versions:
            file.get(version)
    for engine, parity in ((even, 0), (odd, 1)):
        asked = {command[1] for command in engine.commands}
        names = {name_of(key_of(NAME, version, 0)) for version in versions}
        assert asked == {name for name in names if slot_of(name) % 2 == parity}
        assert len(asked) > 10


def test_a_slot_without_a_server_is_nobodys(engine: FakeEngine, file: File) -> None:
    _native.pool_slots(bytes([NO_SERVER]) * SLOTS)
    data, ticket = file.get(file.version())
    _native.pool_finish(ticket, content())
    assert data is None
    assert engine.connections == 0


# ---- heirs ---------------------------------------------------------------------------------------


def test_an_heir_is_asked_when_a_server_is_gone_alone(file: File, counted: Counted) -> None:
    version = file.version()
    key = key_of(NAME, version, 0)
    with FakeEngine() as first, FakeEngine() as heir:
        begin(first)
        _native.pool_slots(*(bytes([serve_at(engine.port)]) * SLOTS for engine in (first, heir)))
        for reply in (say(NOTHING), say_and_close(b"")):  # the second one may have given a lease
            first.otherwise = reply
            data, ticket = file.get(file.version())
            assert data is None
            first.otherwise = say(b"+OK\r\n")
            _native.pool_finish(ticket, content())
        assert counted["written"] == 2
        note_origin(1_000_000)
        first.otherwise = slowly
        eventually(lambda: passes_over(file, first))
        assert heir.connections == 0

        first.be_gone()
        eventually(lambda: bool(file.get(version) and state_of(first)["is_left_alone"]))
        heir.commands.clear()
        data, ticket = file.get(version)
        assert data is None
        heir.otherwise = say(b"+OK\r\n")
        _native.pool_finish(ticket, content())
        assert heir.commands[0][:2] == [b"SET", name_of(key)]
        assert heir.commands[1:] == [[b"SET", name_of(key), pack_block(key, content())]]
        heir.otherwise = say(bulk(pack_block(key, content())))
        for _ in range(10):  # it was slow, and is asked no more, so it stays slow
            assert file.get(version)[0] == content()
        heir.be_gone()
        assert file.get(version)[0] is None


def slowly(connection: socket.socket, _: Command) -> None:
    time.sleep(0.05)
    connection.sendall(NOTHING)


def passes_over(file: File, engine: FakeEngine) -> bool:
    """Whether it was not asked."""
    before = len(engine.commands)
    file.get(file.version())
    return len(engine.commands) == before


@pytest.mark.parametrize("user", [None, "me"])
def test_logging_in(engine: FakeEngine, file: File, user: str | None) -> None:
    begin(engine, user=user, password="pass word")
    engine.replies += [say(b"+OK\r\n")]
    file.get(file.version())
    file.get(file.version())
    who = [] if user is None else [b"me"]
    assert engine.commands[0] == [b"AUTH", *who, b"pass word"]
    assert [command[0] for command in engine.commands] == [b"AUTH", b"SET", b"SET"]


def test_a_wrong_password(engine: FakeEngine, file: File, counted: Counted) -> None:
    begin(engine, password="wrong")
    engine.otherwise = say(b"-WRONGPASS invalid\r\n")
    for _ in range(5):
        assert file.get(file.version())[0] is None
    assert [command[0] for command in engine.commands] == [b"AUTH"] * 3
    assert state_of(engine)["is_left_alone"]
    assert state_of(engine)["why"] == "WRONGPASS invalid"
    assert counted["failures"] == 3


def test_what_is_too_young_is_not_shared(engine: FakeEngine, file: File) -> None:
    begin(engine, min_age_ns=MINUTE_NS)
    for age_ns in (MINUTE_NS // 2, 0, -HOUR_NS):
        data, ticket = file.get(file.version(age_ns=age_ns))
        _native.pool_finish(ticket, content())
        assert data is None
    assert engine.connections == 0
    file.get(file.version(age_ns=2 * MINUTE_NS))
    assert len(engine.commands) == 1


# ---- blocks that are none ------------------------------------------------------------------------


def damaged(value: bytes) -> dict[str, bytes]:
    """A block's value, each part of it wrong; the digest is right where it is not the part."""
    magic, size, checksum, key = struct.unpack_from("<4sIQ16s", value)
    data = value[32:]
    parts = {
        "magic": (b"FCB2", size, checksum, key),
        "size": (magic, size + 1, checksum, key),
        "checksum": (magic, size, checksum ^ 1 << 63, key),
        "key": (magic, size, checksum, key[:15] + bytes([key[15] ^ 1])),
    }
    made = {name: struct.pack("<4sIQ16s", *head) + data for name, head in parts.items()}
    for name, at in (("first byte", 0), ("last byte", -1)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        made[name] = value[:32] + bytes(flipped)
    made |= {
        "short": value[:-1], "long": value + b"x", "empty": b"", "header": value[:32],
        "a number": b"17", "as long as a lease": b"FCL2" + bytes(8),
        "of another file": pack_block(bytes(16), data),
    }  # fmt: skip
    return made


def test_a_damaged_block_is_a_miss_and_written_anew(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    version = file.version()
    key = key_of(NAME, version, 0)
    right = pack_block(key, content())
    values = damaged(right)
    for part, value in values.items():
        engine.replies += [say(bulk(value)), say(b"+OK\r\n"), say(bulk(right))]
        data, ticket = file.get(version)
        assert data is None, part
        _native.pool_finish(ticket, content())
        assert file.get(version)[0] == content(), f"{part}: what is left is no other answer"
        assert engine.commands[1:2] == [[b"SET", name_of(key), right]], part
        engine.commands.clear()
    times = len(values)
    assert counted.all() == {
        "misses": times, "damaged": times, "written": times, "bytes_written": times * SIZE,
    }  # fmt: skip


def test_a_value_of_another_type_is_written_anew(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    for _ in range(5):
        engine.replies += [say(b"-WRONGTYPE Operation against a key\r\n"), say(b"+OK\r\n")]
        data, ticket = file.get(file.version())
        assert data is None
        _native.pool_finish(ticket, content())
        assert [command[0] for command in engine.commands] == [b"SET", b"SET"]
        engine.commands.clear()
    assert counted["damaged"] == counted["written"] == 5
    assert counted["failures"] == 0, "the server is a good one"


# ---- leases --------------------------------------------------------------------------------------


def test_another_hosts_read_is_waited_for(engine: FakeEngine, file: File, counted: Counted) -> None:
    version = file.version()
    value = pack_block(key_of(NAME, version, 0), content())
    engine.replies += [say(bulk(LEASE)), say(bulk(LEASE)), say(bulk(value))]
    data, ticket = file.get(version)
    assert data == content()
    assert len(engine.commands) == 3
    _native.pool_finish(ticket, None)
    assert len(engine.commands) == 3
    assert counted.all() == {"waits": 1}


def test_a_lease_that_ends_is_taken_over(engine: FakeEngine, file: File, counted: Counted) -> None:
    version = file.version()
    engine.replies += [say(bulk(LEASE)), say(NOTHING), say(b":1\r\n")]
    data, ticket = file.get(version)
    assert data is None
    _native.pool_finish(ticket, None)
    assert [command[0] for command in engine.commands] == [b"SET", b"SET", b"UNLINK"]
    assert counted.all() == {"waits": 1, "misses": 1, "leases": 1}


def test_a_lease_that_does_not_end_is_not_waited_for_for_ever(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    begin(engine, patience_ns=1_300_000_000)
    engine.otherwise = say(bulk(LEASE))
    data, ticket = file.get(file.version())
    assert data is None
    asked = len(engine.commands)
    _native.pool_finish(ticket, content())
    _native.pool_finish(ticket, None)
    assert len(engine.commands) == asked, "the block, and the lease, are the other host's"
    assert counted.all() == {"waits": 1, "misses": 1}


def test_our_own_lease_is_none(engine: FakeEngine, file: File, counted: Counted) -> None:
    """Its answer was lost, or another reader of this host has it."""
    file.get(file.version())
    engine.otherwise = say(bulk(engine.commands[0][2]))
    data, ticket = file.get(file.version())
    assert data is None
    engine.otherwise = say(b"+OK\r\n")
    _native.pool_finish(ticket, content())
    assert counted.all() == {"misses": 2, "leases": 2, "written": 1, "bytes_written": SIZE}


# ---- answers that are none -----------------------------------------------------------------------

GARBAGE = [
    b"\r\n", b"hello\r\n", b"$\r\n", b"$x\r\n", b"$-2\r\n", b"$12abc\r\n", b"$ \r\n", b"\0\r\n",
    b"$-9223372036854775808\r\n", b"*1\r\n$-1\r\n", b"%0\r\n", b"_\r\n", b"+OK\r\n+OK\r\n",
    b"$-1\r\n$-1\r\n", b"-ERR\r\n-ERR\r\n", b"x" * 511 + b"\r\n", bytes(600), b"$-01\r\n",
    b"$ -1\r\n", b"$-1\0\r\n",
]  # fmt: skip


def test_garbage_closes_the_connection(engine: FakeEngine, file: File, counted: Counted) -> None:
    for times, answer in enumerate(GARBAGE, 1):
        engine.replies += [say(answer)]
        assert file.get(file.version())[0] is None, answer
        engine.wait_closed()
        assert counted["failures"] == times, answer
        file.get(file.version())
    assert engine.connections == len(GARBAGE) + 1
    assert not state_of(engine)["is_left_alone"]


def test_a_length_is_digits_alone(engine: FakeEngine, file: File, counted: Counted) -> None:
    version = file.version()
    value = pack_block(key_of(NAME, version, 0), content())
    lengths = (b" %d", b"+%d", b"0%d", b"%d ", b"%d\0", b"%d\0x", b"\t%d", b"0x%d", b"%d.0")
    for times, length in enumerate(lengths, 1):
        engine.replies += [say_and_close(b"$" + length % len(value) + b"\r\n" + value + b"\r\n")]
        assert file.get(version)[0] is None, length
        assert counted["failures"] == times, length
        engine.replies += [say(bulk(value))]
        assert file.get(version)[0] == content()


def test_an_answer_to_another_question_is_a_miss(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    for answer in (b"+OK\r\n", b":1\r\n", b"+\r\n"):
        engine.replies += [say(answer)]
        data, ticket = file.get(file.version())
        assert data is None
        _native.pool_finish(ticket, content())
    assert counted.all() == {"misses": 3}


class Flood:
    """A reply: `begin`, then bytes until the client closes the connection."""

    def __init__(self, begin: bytes) -> None:
        self._begin = begin
        self.sent = 0
        self.is_closed = threading.Event()

    def __call__(self, connection: socket.socket, _: Command) -> None:
        connection.sendall(self._begin)
        try:
            while self.sent < 10 * SOCKETS_MOST:
                self.sent += connection.send(b"x" * 65536)
        except ConnectionError:
            self.is_closed.set()
            raise


def test_no_more_is_received_than_fits(engine: FakeEngine, file: File) -> None:
    lengths = (SIZE + 33, 10**18, 2**63 - 1, 2**70)
    for begun in (b"", b"+", b"-", b"$", *(b"$%d\r\n" % length for length in lengths)):
        flood = Flood(begun)
        engine.replies += [flood]
        assert file.get(file.version())[0] is None, begun
        assert flood.is_closed.wait(PATIENCE_S), begun
        assert flood.sent < SOCKETS_MOST, begun
        file.get(file.version())
    assert not state_of(engine)["is_left_alone"]


def test_nothing_is_allocated_by_a_length(engine: FakeEngine, file: File) -> None:
    before = peak_bytes()
    for length in (10**18, 2**63 - 1, 1 << 30, -1):
        engine.replies += [say(b"$%d\r\n" % length)]
        assert file.get(file.version())[0] is None, length
    assert peak_bytes() - before < 1 << 29  # other threads' heaps are some 100 MiB each


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("VmPeak", "VmHWM")))


def halves(answer: bytes) -> list[bytes]:
    ends = [0, 1, 3, 6, 7, 20, 38, 39, SIZE, SIZE + 38, SIZE + 39, SIZE + 40]
    assert ends[-1] == len(answer) - 1
    return [answer[:end] for end in ends]


def test_half_an_answer_then_silence(engine: FakeEngine, file: File, counted: Counted) -> None:
    """The patience is an hour."""
    version = file.version()
    answer = bulk(pack_block(key_of(NAME, version, 0), content()))
    for times, half in enumerate(halves(answer), 1):
        engine.replies += [then(half, engine.keep_silent)]
        assert file.get(version)[0] is None, half
        assert counted.all() == {"failures": times}
        engine.replies += [say(answer)]
        assert file.get(version)[0] == content()


def test_half_an_answer_then_its_end(engine: FakeEngine, file: File, counted: Counted) -> None:
    version = file.version()
    answer = bulk(pack_block(key_of(NAME, version, 0), content()))
    for times, half in enumerate(halves(answer), 1):
        engine.replies += [say_and_close(half), say(b"+OK\r\n"), say(answer)]
        data, ticket = file.get(version)
        assert data is None, half
        _native.pool_finish(ticket, content())
        assert file.get(version)[0] == content()
        assert counted["failures"] == times
        assert counted["written"] == times, "the lease may be ours"


def test_a_trickle_is_not_waited_for(engine: FakeEngine, file: File, counted: Counted) -> None:
    version = file.version()
    answer = bulk(pack_block(key_of(NAME, version, 0), content()))
    sent = 0

    def reply(connection: socket.socket, command: Command) -> None:
        nonlocal sent
        for sent in range(len(answer)):
            connection.sendall(answer[sent : sent + 1])
            time.sleep(0.02)

    engine.replies += [reply]
    assert file.get(version)[0] is None
    assert sent < len(answer) - 1
    assert counted.all() == {"failures": 1}


def test_a_login_that_is_not_answered(engine: FakeEngine, file: File, counted: Counted) -> None:
    """A stopped server's kernel takes connections. The patience is an hour."""
    begin(engine, password="secret")
    engine.otherwise = engine.keep_silent
    for _ in range(4):
        assert file.get(file.version())[0] is None
    assert engine.connections == 3
    assert counted["failures"] == 3


def test_connections_that_are_not_taken(engine: FakeEngine, file: File, counted: Counted) -> None:
    """Of a server whose packets are lost: no answer to the first one. The patience is an hour."""
    with listen(0) as deaf:
        index = serve_at(str(deaf.getsockname()[1]))
        _native.pool_slots(bytes([index]) * SLOTS)
        with socket.create_connection(deaf.getsockname()):  # its queue is full
            for _ in range(4):
                assert file.get(file.version())[0] is None
    assert counted["failures"] == 3


# ---- errors of good servers ----------------------------------------------------------------------


def test_what_has_moved_is_a_miss(engine: FakeEngine, file: File, counted: Counted) -> None:
    for word in (b"MOVED 5 h:1", b"ASK 5 h:1", b"CLUSTERDOWN x", b"TRYAGAIN x", b"LOADING x"):
        engine.replies += [say(b"-%s\r\n" % word)]
        data, ticket = file.get(file.version())
        assert data is None
        _native.pool_finish(ticket, content())
    assert len(engine.commands) == 5
    assert counted.all() == {"misses": 5, "moved": 5}
    assert engine.connections == 1


@pytest.mark.parametrize("word", ["OOM", "NOPERM", "READONLY", "MISCONF", "NOREPLICAS"])
def test_a_server_that_takes_no_writes_is_read_from(
    engine: FakeEngine, file: File, counted: Counted, word: str
) -> None:
    version = file.version()
    value = pack_block(key_of(NAME, version, 0), content())
    engine.replies += [say(f"-{word} x\r\n".encode()), say(bulk(value))]
    assert file.get(version)[0] == content()
    for answer in (NOTHING, bulk(value), bulk(LEASE), bulk(b"?")):
        engine.otherwise = say(answer)
        begin(engine, patience_ns=1_000_000_000)  # for one answer: a lease is not waited for
        data, ticket = file.get(version)
        assert data == (content() if answer == bulk(value) else None)
        _native.pool_finish(ticket, content())
        _native.pool_finish(ticket, None)
    words = [command[0] for command in engine.commands]
    assert words[:2] == [b"SET", b"GET"]
    assert set(words[2:]) == {b"GET"}
    assert counted["failures"] == counted["written"] == 0
    assert state_of(engine)["why"] == f"{word} x"


def test_a_server_that_gives_nothing_at_all_is_left_alone(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    """An ACL without this prefix."""
    engine.otherwise = say(b"-NOPERM no permissions to access a key\r\n")
    for _ in range(10):
        assert file.get(file.version())[0] is None
    assert state_of(engine)["is_left_alone"]
    assert "NOPERM" in str(state_of(engine)["why"])
    assert len(engine.commands) == 4, "SET, then GET three times"
    assert counted["failures"] == 3


# ---- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [b"", b"+OK\r\n", b"x"])
def test_a_connection_that_ends_while_nobody_uses_it(
    engine: FakeEngine, file: File, counted: Counted, last: bytes
) -> None:
    """Also one with something in it that nobody asked for."""
    may_end = threading.Event()

    def reply(connection: socket.socket, command: Command) -> None:
        connection.sendall(NOTHING)
        assert may_end.wait(PATIENCE_S)
        connection.sendall(last)
        raise ConnectionAbortedError

    engine.replies += [reply]
    file.get(file.version())
    may_end.set()
    engine.wait_closed()
    version = file.version()
    engine.otherwise = say(bulk(pack_block(key_of(NAME, version, 0), content())))
    assert file.get(version)[0] == content()
    assert counted["failures"] == 0
    assert engine.connections == 2


def test_failures_in_a_row_and_then_one_tries(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    engine.otherwise = say_and_close(b"")
    for _ in range(20):
        assert file.get(file.version())[0] is None
    assert engine.connections == 3
    assert counted.all() == {"failures": 3, "skipped": 17}
    assert state_of(engine)["is_left_alone"]
    may_answer = threading.Event()

    def held(connection: socket.socket, command: Command) -> None:
        assert may_answer.wait(PATIENCE_S)
        connection.sendall(NOTHING)

    begun = threading.Event()

    def seen(connection: socket.socket, command: Command) -> None:
        begun.set()
        held(connection, command)

    engine.otherwise = seen
    with ThreadPoolExecutor(16) as threads:

        def keep_asking() -> None:
            while not begun.is_set():
                file.get(file.version())

        trying = [threads.submit(keep_asking) for _ in range(8)]
        try:
            assert begun.wait(30), "after a rest it is asked"
            for _ in range(20):
                file.get(file.version())
            assert engine.connections == 4, "by one"
        finally:
            begun.set()
            may_answer.set()
        for one in trying:
            one.result(PATIENCE_S)
    engine.otherwise = say(NOTHING)

    def ask() -> bool:
        file.get(file.version())
        return not state_of(engine)["is_left_alone"]

    eventually(ask)
    before = counted["skipped"]
    for _ in range(5):
        file.get(file.version())
    assert counted["skipped"] == before


def test_failures_between_answers_are_no_row(engine: FakeEngine, file: File) -> None:
    for _ in range(6):
        engine.replies += [say_and_close(b""), say_and_close(b""), say(NOTHING)]
    for _ in range(18):
        file.get(file.version())
    assert len(engine.commands) == 18
    assert not state_of(engine)["is_left_alone"]


def test_one_slow_answer_makes_no_slow_server(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    version = file.version(1 << 20)
    answer = bulk(pack_block(key_of(NAME, version, 0), content(1 << 20)))

    def reply(connection: socket.socket, _: Command) -> None:
        connection.sendall(answer[:20])
        time.sleep(0.7)  # 0.5 s is slow
        connection.sendall(answer[20:])

    engine.replies += [reply]
    assert file.get(version)[0] == content(1 << 20)
    for _ in range(20):
        file.get(file.version())
    assert counted["skipped"] == 0


def test_a_server_slower_than_the_origin_is_asked_one_time_in_16(
    engine: FakeEngine, file: File, counted: Counted
) -> None:
    def slow(connection: socket.socket, _: Command) -> None:
        time.sleep(0.06)
        connection.sendall(NOTHING)

    note_origin(1_000_000)
    engine.otherwise = slow
    eventually(lambda: file.get(file.version()) and counted["skipped"] > 0)
    assert len(engine.commands) >= 5
    for _ in range(5):
        before = len(engine.commands)
        for _ in range(16):
            file.get(file.version())
        assert len(engine.commands) == before + 1
    engine.otherwise = say(NOTHING)

    def is_asked() -> bool:
        before = counted["skipped"]
        for _ in range(16):
            file.get(file.version())
        return counted["skipped"] == before

    eventually(is_asked, every_s=0)


def test_so_many_connections_at_most(engine: FakeEngine, file: File) -> None:
    most, readers = 8, 24
    together = threading.Barrier(most + 1)

    def held(connection: socket.socket, command: Command) -> None:
        together.wait(PATIENCE_S)
        connection.sendall(NOTHING)

    engine.replies += [held] * most
    with ThreadPoolExecutor(readers) as threads:
        asking = [threads.submit(file.get, file.version()) for _ in range(readers)]
        eventually(lambda: len(engine.commands) == most)
        assert engine.connections == most
        together.wait(PATIENCE_S)
        for one in asking:
            one.result(PATIENCE_S)
    assert engine.connections == most


# ---- hostile servers -----------------------------------------------------------------------------

RIGHT = content(100)
_PIECES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([*GARBAGE, NOTHING, bulk(LEASE), b"$132\r\n", b"$12\r\n", b"\r\n", b"FCB1"]),
)


_IN_LENGTHS = st.sampled_from([b" ", b"+", b"-", b"0", b"\0", b"$ 132", b"$+132", b"$0132"])
"""What a lax reader of numbers takes."""


@st.composite
def answers(draw: st.DrawFn, right: bytes) -> bytes:
    """Anything, or the right answer with bytes changed, left out, or doubled."""
    if draw(st.booleans()):
        return b"".join(draw(st.lists(_PIECES, max_size=6)))
    answer = bytearray(right)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(answer)))
        end = draw(st.integers(at, min(len(answer), at + 20)))
        doubled = st.just(bytes(answer[at:end] * 2))
        answer[at:end] = draw(st.one_of(st.binary(max_size=8), doubled, _IN_LENGTHS))
    return bytes(answer)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeEngine, File]]:
    with FakeEngine() as engine:
        begin(engine)
        yield engine, File(tmp_path_factory.mktemp("hostile") / "source")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_hostile_server_gives_no_wrong_bytes(
    hostile: tuple[FakeEngine, File], data: st.DataObject
) -> None:
    engine, file = hostile
    version = (0, len(RIGHT), 1, 1)
    right = bulk(pack_block(key_of(NAME, version, 0), RIGHT))
    answer = data.draw(answers(right))
    engine.replies.clear()
    engine.replies += [say_and_close(answer)]
    engine.otherwise = say(right)
    got, ticket = file.get(version)
    assert got in (None, RIGHT)
    if got is not None and len(engine.replies) == 0 and answer != right:
        assert answer.startswith((right, bulk(LEASE)))
    engine.replies.clear()
    engine.replies += [say_and_close(data.draw(answers(b"+OK\r\n")))]
    _native.pool_finish(ticket, RIGHT)
    engine.replies.clear()
    eventually(lambda: file.get(version)[0] == RIGHT)
