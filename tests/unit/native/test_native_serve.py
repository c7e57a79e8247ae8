"""What a host of a pool of peers answers, and what it asks others (docs/POOL.md, Peers).

The server is the C part's own, in this process; both ends speak over real sockets.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import valkey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusecache import _native
from fusecache.pool.slots import NO_SERVER, SLOTS
from fusecache.store.types import BLOCK_BYTES
from tests.support import PATIENCE_S, native_table
from tests.support.fake_engine import (
    NOTHING,
    Command,
    FakeEngine,
    bulk,
    key_of,
    listen,
    pack_block,
    say,
)
from tests.support.mounted import eventually

DATASET = "peers"
HOUR_NS = 3600 * 10**9
WAIT = b"+WAIT\r\n"
STALE = b"-STALE another version\r\n"
BUSY = b"-BUSY\r\n"
NAME = b"d/f"
CONTENT = b"some bytes of a file"

Version = tuple[int, int, int, int]


def begin(patience_ns: int = HOUR_NS, min_age_ns: int = 0) -> None:
    arguments = (None, None, None, None, None, min_age_ns, patience_ns)
    _native.pool_begin(DATASET, *arguments, has_peers=True)
    own_all()


def own_all() -> None:
    """This process has all slots, as soon as it knows itself."""
    for index, row in enumerate(_native.pool_servers()):
        if row["is_self"]:
            _native.pool_slots(bytes([index]) * SLOTS)
            return


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    """Where this process answers, for the rest of its life."""
    with listen(1) as chosen:
        number = str(chosen.getsockname()[1])
    begin()
    _native.serve_begin("127.0.0.1", number)
    index = _native.pool_server("127.0.0.1", number)
    _native.pool_address(index, "127.0.0.1", number)
    assert not _native.pool_meet(index)  # it is this process
    own_all()
    yield number
    _native.pool_slots(bytes([NO_SERVER]) * SLOTS)
    _native.asked_enable(False)


class Files:
    """Those of a table, and Python's part: it gives what is asked for."""

    def __init__(self, source: Path) -> None:
        self.source = source
        (source / "d").mkdir(parents=True)
        (source / "d/f").write_bytes(CONTENT)
        native_table.attach(source)
        self.taken: list[tuple[int, int]] = []
        self.give: Callable[[int, int], tuple[Version | None, bytes | None]] = self.content
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def version(self, name: bytes = NAME) -> Version:
        found = (self.source / name.decode()).stat()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def content(self, ino: int, block: int) -> tuple[Version | None, bytes | None]:
        path = self.source / _native.path(ino).decode()
        data = path.read_bytes()[block * BLOCK_BYTES :][:BLOCK_BYTES]
        return self.version(_native.path(ino)), data

    def _serve(self) -> None:
        while not self._is_over.is_set():
            if not select.select([_native.asked_fd()], [], [], 0.02)[0]:
                continue
            for ino, block in _native.asked_take():
                self.taken.append((ino, block))
                _native.asked_end(ino, block, *self.give(ino, block))

    def end(self) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def files(tmp_path: Path, port: str) -> Iterator[Files]:
    _native.asked_enable(True)
    made = Files(tmp_path / "source")
    yield made
    made.end()
    _native.asked_enable(False)


class Asker:
    """A connection to it: a context."""

    def __init__(self, port: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S)
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def end_sending(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def line(self) -> bytes:
        return self._file.readline()

    def rest(self) -> bytes:
        """Until it closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            return self._file.read()
        return b""

    def say(self, *words: bytes) -> bytes:
        self.send(request(*words))
        return self.reply()

    def reply(self) -> bytes:
        line = self.line()
        if line.startswith(b"$") and line != NOTHING:
            return line + self._file.read(int(line[1:]) + 2)
        return line

    def hello(self, dataset: str = DATASET, number: bytes = b"0" * 16) -> bytes:
        return self.say(b"HELLO", b"FCH1", dataset.encode(), number)

    def block(self, path: bytes, version: Version, block: int = 0) -> bytes:
        return self.say(b"BLOCK", path, *(b"%d" % number for number in (block, *version[1:])))

    def told_last(self, path: bytes, version: Version) -> bytes:
        """The answer, though the origin has to be asked first."""
        said = self.block(path, version)
        return self.reply() if said == WAIT else said


def request(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(map(bulk, words))


@pytest.fixture
def asker(port: str) -> Iterator[Asker]:
    with Asker(port) as made:
        assert made.hello() == b"+OK\r\n"
        yield made


def value(files: Files, name: bytes = NAME, block: int = 0) -> bytes:
    data = (files.source / name.decode()).read_bytes()[block * BLOCK_BYTES :][:BLOCK_BYTES]
    return bulk(pack_block(key_of(name, files.version(name), block), data))


def counted(name: str) -> int:
    return _native.serve_counters()[name]


def number_of(name: bytes) -> int:
    return next(n for n in range(1, 20) if _native.path(n) == name)


def ask(files: Files) -> bytes | None:
    _native.scan(number_of(b"d"))
    version = files.version()
    return _native.pool_get(number_of(NAME), version, 0, version[1])[0]


# ---- what is answered ----------------------------------------------------------------------------


def test_a_block_that_has_to_be_read_is_waited_for(files: Files, asker: Asker) -> None:
    fetched = counted("fetched")
    assert asker.block(NAME, files.version()) == WAIT
    assert asker.reply() == value(files)
    assert counted("fetched") == fetched + 1


def test_a_file_that_was_never_looked_at_is_looked_at(files: Files, asker: Asker) -> None:
    (files.source / "new/er").mkdir(parents=True)
    (files.source / "new/er/one").write_bytes(b"x" * 5000)
    assert asker.block(b"new/er/one", files.version(b"new/er/one")) == WAIT
    assert asker.reply() == value(files, b"new/er/one")


def test_the_second_block_of_a_file(files: Files, asker: Asker) -> None:
    (files.source / "large").write_bytes(b"y" * BLOCK_BYTES + b"the rest")
    version = files.version(b"large")
    assert asker.block(b"large", version, 1) == WAIT
    assert asker.reply() == value(files, b"large", 1)
    assert asker.block(b"large", version, 2) == NOTHING


def test_a_file_that_has_changed_is_looked_at_again(files: Files, asker: Asker) -> None:
    before = files.version()
    (files.source / "d/f").write_bytes(b"longer than it was before")
    assert asker.block(NAME, files.version()) == WAIT
    assert asker.reply() == value(files)
    assert asker.told_last(NAME, before) == STALE


@pytest.mark.parametrize("at", [1, 2, 3])
def test_another_version_is_stale(files: Files, asker: Asker, at: int) -> None:
    numbers = list(files.version())
    numbers[at] += 1
    stale = counted("stale")
    changed = (numbers[0], numbers[1], numbers[2], numbers[3])
    assert asker.told_last(NAME, changed) == STALE
    assert counted("stale") == stale + 1
    assert files.taken == []


NAMES = [
    b"", b"/", b"/d/f", b"d/../d/f", b"..", b"../source/d/f", b"d/./f", b".", b"d//f", b"d/f/",
    b"d/f\0", b"\0", b"d/f/g", b"none", b"d/none", b"d", b"x" * 256, b"d/" * 2000 + b"f",
    b"d/f" + b"/f" * 2047,
]  # fmt: skip


@pytest.mark.claim("S15")
@pytest.mark.parametrize("name", NAMES, ids=[repr(name[:12]) for name in NAMES])
def test_what_is_no_name_of_a_file_is_not_here(files: Files, asker: Asker, name: bytes) -> None:
    assert asker.told_last(name, files.version()) == NOTHING
    assert files.taken == []


@pytest.mark.claim("S15")
def test_a_link_is_no_file(files: Files, asker: Asker) -> None:
    (files.source / "link").symlink_to("d/f")
    (files.source / "to").symlink_to("d")
    for name in (b"link", b"to/f"):
        assert asker.told_last(name, files.version()) == NOTHING


def test_what_was_asked_by_many_is_read_once(files: Files, port: str) -> None:
    together = threading.Event()

    def give(ino: int, block: int) -> tuple[Version | None, bytes | None]:
        assert together.wait(PATIENCE_S)
        return files.content(ino, block)

    files.give = give
    requests = counted("requests")

    def ask() -> bytes:
        with Asker(port) as one:
            one.hello()
            assert one.block(NAME, files.version()) == WAIT
            return one.reply()

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask) for _ in range(8)]
        eventually(lambda: counted("requests") == requests + 8)
        together.set()
        assert {answer.result(PATIENCE_S) for answer in answers} == {value(files)}
    assert 1 <= len(files.taken) <= 2  # one may have come when the first was being ended


def test_what_python_gives_back_is_not_here(files: Files, asker: Asker) -> None:
    files.give = lambda ino, block: (None, None)
    assert asker.block(NAME, files.version()) == WAIT
    assert asker.reply() == NOTHING


@pytest.mark.parametrize("what", ["version", "shorter", "longer"])
def test_bytes_of_another_version_go_to_nobody(files: Files, asker: Asker, what: str) -> None:
    ino, size, mtime_ns, ctime_ns = files.version()
    data = {"version": CONTENT, "shorter": CONTENT[:-1], "longer": CONTENT + b"!"}[what]
    of = (ino, size, mtime_ns, ctime_ns + (what == "version"))
    files.give = lambda _ino, _block: (of, data)
    assert asker.block(NAME, files.version()) == WAIT
    assert asker.reply() == NOTHING


def test_nobody_is_waited_for_without_end(files: Files, asker: Asker) -> None:
    files.end()  # Python hangs
    begin(patience_ns=50_000_000)
    try:
        busy = counted("busy")
        assert asker.block(NAME, files.version()) == WAIT
        assert asker.reply() == BUSY
        assert counted("busy") == busy + 1
    finally:
        begin()


def test_without_python_nothing_waits(files: Files, asker: Asker) -> None:
    _native.asked_enable(False)
    assert asker.block(NAME, files.version()) == WAIT
    assert asker.reply() == BUSY


def test_what_another_host_owns_is_not_read(files: Files, asker: Asker) -> None:
    other = _native.pool_server("127.0.0.1", "9")
    _native.pool_slots(bytes([other]) * SLOTS)
    try:
        assert asker.block(NAME, files.version()) == NOTHING
        assert files.taken == []
    finally:
        own_all()


# ---- who asks ------------------------------------------------------------------------------------


def test_who_is_of_another_dataset_is_told_so(files: Files, port: str) -> None:
    with Asker(port) as one:
        assert one.hello("other") == b"-NAME another dataset\r\n"
        assert one.block(NAME, files.version()) == NOTHING


def test_who_has_not_said_hello_gets_nothing(files: Files, port: str) -> None:
    with Asker(port) as one:
        assert one.block(NAME, files.version()) == NOTHING
        assert one.say(b"HELLO", b"FCH2", DATASET.encode(), b"0" * 16).startswith(b"-ERR")
        assert one.block(NAME, files.version()) == NOTHING


def test_it_never_asks_itself(files: Files) -> None:
    requests = counted("requests")
    assert ask(files) is None
    assert counted("requests") == requests


def test_the_engines_client_reads_what_it_says_of_itself(port: str) -> None:
    client: Any = valkey.Valkey(port=int(port), lib_name=None, lib_version=None)
    _native.serve_holds(5, 7, "1.2")
    found = client.execute_command("INFO", "everything")
    text = found.decode() if isinstance(found, bytes) else str(found)
    assert "used_memory" in text
    assert abs(int(client.execute_command("TIME")[0]) - time.time()) < 60
    members = f"fusecache:{DATASET}:members"
    records = {f"host{n}".encode(): b'{"n": %d}' % n for n in range(20)}
    for name, record in records.items():
        client.execute_command("HSET", members, name, b"older")
        client.execute_command("HSET", members, name, record)
    client.execute_command("EXPIRE", members, 300)
    said = client.execute_command("HGETALL", members)
    assert records.items() <= dict(said).items()
    for command in (
        ("HGETALL", "fusecache:other:members"),
        ("SET", "a", "b"),
        ("CLUSTER", "SLOTS"),
    ):
        with pytest.raises(valkey.ResponseError):
            client.execute_command(*command)
    with pytest.raises(valkey.ResponseError):
        client.execute_command("HSET", members, "large", b"x" * 8193)
    for number in range(200):  # more than it has room for
        with contextlib.suppress(valkey.ResponseError):
            client.execute_command("HSET", members, f"more{number}", b"{}")
    assert len(client.execute_command("HGETALL", members)) <= 128
    client.close()


# ---- what is no request --------------------------------------------------------------------------

NO_REQUESTS = [
    b"\r\n", b"PING\r\n", b"*\r\n", b"*0\r\n", b"*-1\r\n", b"*9\r\n", b"*x\r\n", b"*01\r\n",
    b"*1\r\n+INFO\r\n", b"*1\r\n$-1\r\n", b"*1\r\n$99999\r\n", b"*1\r\n$4\r\nINFOx\r\n",
    b"*1\r\n$3\r\nINFO\r\n", b"*1\r\n$18446744073709551615\r\n", b"*1\r\n$16384\r\n" + b"x" * 16384,
    b"*" * 64, b"*1\r\n$4" + b" " * 64, b"\x16\x03\x01\x02\x00" + b"\0" * 64,
    request(b"BLOCK", NAME), request(b"BLOCK", NAME, b"0", b"0", b"1", b"1"),
    request(b"BLOCK", NAME, b"-1", b"1", b"1", b"1"),
    request(b"BLOCK", NAME, b"0", b"1", b"", b"1"),
    request(b"BLOCK", NAME, b"4294967296", b"1", b"1", b"1"),
    request(b"BLOCK", NAME, b"0", b"9223372036854775808", b"1", b"1"),
    request(b"BLOCK", NAME, b"0", b"1", b"1", b"1x"),
    request(b"BLOCK", NAME, b"0", b"1", b"1\0", b"1"),
    request(b"BLOCK", NAME, b"0", b"1", b"+1", b"1"),
]  # fmt: skip


@pytest.mark.claim("S15")
@pytest.mark.parametrize("data", NO_REQUESTS, ids=[repr(data[:30]) for data in NO_REQUESTS])
def test_what_is_no_request_closes_the_connection(files: Files, port: str, data: bytes) -> None:
    malformed = counted("malformed")
    with Asker(port) as one:
        one.hello()
        with contextlib.suppress(ConnectionError):
            one.send(data)
        assert one.rest() == b""
    eventually(lambda: counted("malformed") == malformed + 1)


good = request(b"HELLO", b"FCH1", DATASET.encode(), b"0" * 16)
pieces = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([
        b"*6\r\n", b"*4\r\n", b"*2\r\n", b"$5\r\n", b"$3\r\n", b"\r\n", b"BLOCK", b"HELLO",
        b"$0\r\n\r\n", b"INFO", b"d/f", good, request(b"TIME"), request(b"INFO"),
        request(b"HGETALL", b"x"),
        request(b"HSET", f"fusecache:{DATASET}:members".encode(), b"\0", b"\xff"),
        request(b"BLOCK", NAME, b"0", b"20", b"1", b"1"),
    ]),
)  # fmt: skip


@pytest.mark.claim("S15")
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sent=st.lists(pieces, max_size=8), cut=st.integers(0, 60))
def test_whatever_is_sent_others_are_answered(
    files: Files, port: str, asker: Asker, sent: list[bytes], cut: int
) -> None:
    data = b"".join(sent)
    data = data[: len(data) - cut] if cut < len(data) else data
    with Asker(port) as one:
        with contextlib.suppress(ConnectionError):
            one.send(data)
            one.end_sending()
        one.rest()  # it ends
    assert asker.say(b"TIME") == b"*2\r\n"
    for _ in range(4):
        asker.line()


def test_connections_that_have_ended_are_counted_no_more(port: str) -> None:
    def few() -> bool:
        return counted("connections") <= 1

    eventually(few)
    askers = [Asker(port) for _ in range(40)]
    for one in askers:
        one.hello()
    assert counted("connections") >= 40
    for one in askers:
        one.__exit__()
    eventually(few)


def test_more_connections_than_there_is_room_for_are_closed(files: Files, port: str) -> None:
    with contextlib.ExitStack() as stack:
        askers = [stack.enter_context(Asker(port)) for _ in range(540)]
        said = []
        for one in askers:
            with contextlib.suppress(ConnectionError):
                said.append(one.hello())
        assert 400 <= said.count(b"+OK\r\n") <= 512
    eventually(lambda: counted("connections") < 100)
    with Asker(port) as one:
        assert one.hello() == b"+OK\r\n"


# ---- what it asks others for ---------------------------------------------------------------------


def own(engine: FakeEngine) -> None:
    """It is another host, which has all slots."""
    index = _native.pool_server("127.0.0.1", engine.port)
    _native.pool_address(index, "127.0.0.1", engine.port)
    _native.pool_slots(bytes([index]) * SLOTS)


@pytest.fixture(scope="module")
def one_for_all() -> Iterator[FakeEngine]:
    """A process knows 64 servers in its life."""
    with FakeEngine() as made:
        yield made


class Owner:
    """A host that greets, and then says what a test has it say."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.answers: deque[bytes] = deque()
        self.commands: list[Command] = []
        engine.otherwise = self._reply

    def _reply(self, connection: socket.socket, words: Command) -> None:
        self.commands.append(words)
        connection.sendall(b"+OK\r\n" if words[0] == b"HELLO" else self.answers.popleft())

    @property
    def blocks(self) -> list[Command]:
        """Requests for blocks."""
        return [words for words in self.commands if words[0] == b"BLOCK"]


@pytest.fixture
def other(files: Files, one_for_all: FakeEngine) -> Iterator[Owner]:
    for _ in range(100):
        _native.pool_note_origin(250_000_000, 1000)  # no answer of a busy machine is slow
    own(one_for_all)
    yield Owner(one_for_all)
    own_all()


def state_of(engine: FakeEngine) -> dict[str, object]:
    (found,) = (row for row in _native.pool_servers() if row["port"] == engine.port)
    return found


@pytest.mark.parametrize("before", [b"", WAIT])
def test_the_owner_is_asked_by_path_and_version(files: Files, other: Owner, before: bytes) -> None:
    other.answers.append(before + value(files))
    assert ask(files) == CONTENT
    _, size, mtime_ns, ctime_ns = files.version()
    numbers = [b"%d" % number for number in (0, size, mtime_ns, ctime_ns)]
    assert other.blocks == [[b"BLOCK", NAME, *numbers]]


@pytest.mark.parametrize("said", [NOTHING, STALE, BUSY, WAIT + BUSY, WAIT + NOTHING])
def test_a_miss_is_no_failure_and_nothing_is_written(
    files: Files, other: Owner, said: bytes
) -> None:
    _native.scan(number_of(b"d"))
    ino, version = number_of(NAME), files.version()
    failures = state_of(other.engine)["failures"]
    for _ in range(5):
        other.answers.append(said)
        found, ticket = _native.pool_get(ino, version, 0, version[1])
        assert found is None
        _native.pool_finish(ticket, CONTENT)
    assert len(other.blocks) == 5
    assert {words[0] for words in other.commands} <= {b"HELLO", b"BLOCK"}
    assert state_of(other.engine)["failures"] == failures


@pytest.mark.parametrize(
    "said", [WAIT + WAIT, b"+OK\r\n", b"$5\r\nabcde\r\n", b"*1\r\n", b"WAIT\r\n"]
)
def test_what_is_no_answer_is_read_at_the_origin(files: Files, other: Owner, said: bytes) -> None:
    other.answers += [said, value(files)]
    assert ask(files) is None
    assert ask(files) == CONTENT


def test_a_flipped_byte_is_no_block(files: Files, other: Owner) -> None:
    wrong = bytearray(value(files))
    wrong[-5] ^= 1
    other.answers.append(bytes(wrong))
    damaged = _native.pool_counters()["damaged"]
    assert ask(files) is None
    assert _native.pool_counters()["damaged"] == damaged + 1


def test_a_server_that_says_it_is_us_is_not_asked(files: Files) -> None:
    with FakeEngine() as engine:
        engine.otherwise = say(b"-SELF\r\n")
        own(engine)
        try:
            assert ask(files) is None
            assert ask(files) is None
            assert [words[0] for words in engine.commands] == [b"HELLO"]
            assert engine.commands[0][1:3] == [b"FCH1", DATASET.encode()]
            assert state_of(engine)["is_self"]
            assert state_of(engine)["failures"] == 0
        finally:
            own_all()


def test_a_host_of_another_dataset_is_left_alone(files: Files) -> None:
    with FakeEngine() as engine:
        engine.otherwise = say(b"-NAME another dataset\r\n")
        own(engine)
        try:
            for _ in range(4):
                assert ask(files) is None
            assert state_of(engine)["is_left_alone"]
            assert "another dataset" in str(state_of(engine)["why"])
        finally:
            own_all()
