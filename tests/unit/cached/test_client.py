"""A mount's end of the service: whatever the service does, a block is there or it is not."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache import _native
from fusecache.base.wire import Peer, WireError, encode
from fusecache.cached import client as module
from fusecache.cached import serving as serving_module
from fusecache.cached.client import CacheService, Refused
from fusecache.cached.talk import FINDS_MOST, NAME_BYTES, SEGMENTS_FROM, Channel, Found, pack_found
from fusecache.store.types import Location
from tests.support import PATIENCE_S
from tests.unit.cached.support import (
    MIB,
    Block,
    Served,
    Talker,
    block_of,
    blocks_of,
    eventually,
    figures,
    read_at,
    serving,
    set_with,
)

BLOCKS = blocks_of(1, 4)
NOTHING = Found(None)
OFTEN_S = 0.02


@pytest.fixture(autouse=True)
def over(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody looks for the service when the test is over."""
    is_over = threading.Event()
    watch = CacheService._look

    def look(service: CacheService) -> None:
        if is_over.is_set():
            threading.Event().wait()  # a daemon's thread
        watch(service)

    monkeypatch.setattr(CacheService, "_look", look)
    monkeypatch.setattr(module, "AGAIN_S", OFTEN_S)
    monkeypatch.setattr(module, "LOOK_S", OFTEN_S)
    yield
    is_over.set()


def joined(path: str, blocks: list[Block] = BLOCKS) -> CacheService:
    """That has tried once."""
    service = CacheService(path)
    service.use(set_with(blocks))
    service.wait(PATIENCE_S)
    return service


def names(blocks: list[Block]) -> tuple[list[bytes], list[int]]:
    return [block.name for block in blocks], [len(block) for block in blocks]


def gives_nothing(service: CacheService) -> bool:
    """No error, and no block."""
    assert service.find(*names(BLOCKS)) == [NOTHING] * len(BLOCKS)
    assert service.find(*names(BLOCKS), promise=True) == [NOTHING] * len(BLOCKS)
    assert service.put(BLOCKS) == [None] * len(BLOCKS)
    assert service.open_segment(SEGMENTS_FROM + 7) is None
    service.doubt(SEGMENTS_FROM + 7, 4096)
    return True


# ---- with a service ------------------------------------------------------------------------------
@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made


def test_before_it_is_told_which_group_it_gives_nothing(served: Served) -> None:
    service = CacheService(served.path)
    assert not service.is_used
    assert gives_nothing(service)


def test_it_makes_its_group_and_what_it_puts_another_mount_reads(served: Served) -> None:
    service = joined(served.path)
    assert service.is_used
    assert service.why_not == ""
    assert 0 < service.room_bytes < served.groups.limit_bytes
    places = service.put(BLOCKS[:3])
    assert None not in places

    other = joined(served.path)
    assert other.find(*names(BLOCKS)) == [*(Found(at) for at in places), NOTHING]
    at = places[1]
    assert at is not None
    fd = other.open_segment(at.segno)
    assert fd is not None
    assert read_at(fd, at) == BLOCKS[1].data
    assert other.open_segment(at.segno + 1) is None
    assert other.is_used
    assert figures(served.groups).keys() == {os.geteuid()}


def test_a_descriptor_does_not_go_to_programs_that_are_started(served: Served) -> None:
    service = joined(served.path)
    (at,) = service.put(BLOCKS[:1])
    assert at is not None
    fd = service.open_segment(at.segno)
    assert fd is not None
    is_inherited = os.get_inheritable(fd)
    os.close(fd)
    assert not is_inherited


def test_a_large_set_and_many_blocks_go_in_pieces(served: Served) -> None:
    blocks = BLOCKS + [Block(os.urandom(NAME_BYTES), b"?") for _ in range(3 * FINDS_MOST)]
    more = [Block(os.urandom(NAME_BYTES), b"?") for _ in range(MIB // NAME_BYTES)]
    service = joined(served.path, blocks + more)
    assert service.is_used
    (at, last) = service.put([BLOCKS[0], BLOCKS[1]])
    asked = [BLOCKS[0], *blocks[4:], BLOCKS[1]]
    found = service.find(*names(asked))
    assert len(found) == len(asked)
    assert (found[0], found[-1]) == (Found(at), Found(last))
    assert set(found[1:-1]) == {NOTHING}


def test_a_put_that_is_refused_costs_no_other_one(served: Served) -> None:
    service = joined(served.path)
    bad = Block(BLOCKS[1].name, b"of another digest")
    first, refused, strange, last = service.put([BLOCKS[0], bad, block_of(99), BLOCKS[2]])
    assert first is not None
    assert (refused, strange) == (None, None)
    assert last is not None
    assert service.is_used


def test_what_another_mount_reads_it_is_told(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = joined(served.path)
    service.put(BLOCKS[:1])
    monkeypatch.setattr(serving_module, "peer_of", lambda _: Peer(7, 7, 7))
    with Talker(served.path) as other:
        other.join(BLOCKS)
        assert other.find(BLOCKS, promise=True)[1:] == [False] * 3
        found = service.find(*names(BLOCKS), promise=True)
        assert [one.is_promised for one in found] == [False, True, True, True]
        assert not any(one.is_promised for one in service.find(*names(BLOCKS)))


def test_a_doubt_reaches_the_service(served: Served) -> None:
    service = joined(served.path)
    (at,) = service.put(BLOCKS[:1])
    group = served.reported.find(BLOCKS)
    assert group is not None
    assert at is not None
    with group.store.segment_path(at.segno).open("r+b") as file:
        file.seek(at.offset + at.header_len)
        file.write(bytes([BLOCKS[0].data[0] ^ 1]))
    assert service.find(*names(BLOCKS[:1])) == [Found(at)]
    service.doubt(at.segno, at.offset)
    assert service.find(*names(BLOCKS[:1])) == [NOTHING]


class Opened:
    """The segments that the front has open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segnos: set[int] = set()
        self.dropped: list[int] = []
        monkeypatch.setattr(_native, "segment_reads", lambda: dict.fromkeys(self.segnos, 1))
        monkeypatch.setattr(_native, "segment_drop", self.drop)

    def drop(self, segno: int) -> None:
        self.segnos.discard(segno)
        self.dropped.append(segno)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(monkeypatch)


def test_segments_that_are_gone_are_forgotten_and_no_others(served: Served, opened: Opened) -> None:
    service = joined(served.path)
    (at,) = service.put(BLOCKS[:1])
    assert at is not None
    own = {1, 7, SEGMENTS_FROM}  # of the mount's cache
    gone = {at.segno + number for number in range(1, 2 * FINDS_MOST + 3)}
    opened.segnos |= own | gone | {at.segno}
    eventually(lambda: opened.segnos == own | {at.segno})  # by itself
    assert set(opened.dropped) == gone
    assert service.is_used


def test_a_service_that_goes_has_no_segment_forgotten(tmp_path: Path, opened: Opened) -> None:
    """What is open is read on."""
    with serving(tmp_path) as served:
        service = joined(served.path)
        (at,) = service.put(BLOCKS[:1])
        assert at is not None
        opened.segnos.add(at.segno)
    eventually(lambda: service.why_not != "")
    for _ in range(2):
        with pytest.raises(OSError, match=r"Broken pipe|reset|No such file"):
            service.forget_gone()
    assert not opened.dropped


def test_threads_have_connections_of_their_own_and_few_are_kept(served: Served) -> None:
    service = joined(served.path)
    places = service.put(BLOCKS)
    wrong: list[object] = []

    def ask() -> None:
        for _ in range(10):
            found = service.find(*names(BLOCKS))
            if [one.at for one in found] != places:
                wrong.append(found)

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(service._idle) <= module.IDLE_MOST
    eventually(lambda: served.connections() <= module.IDLE_MOST)


# ---- without one ---------------------------------------------------------------------------------
def test_a_service_that_is_absent_is_told_once_and_used_when_it_comes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looks = threading.Semaphore(0)
    service = CacheService(str(tmp_path / "socket"))
    look = service._look

    def counted() -> None:
        looks.release()
        look()

    service._look = counted  # type: ignore[method-assign]
    service.use(set_with(BLOCKS))
    service.wait(PATIENCE_S)
    assert not service.is_used
    assert service.why_not == f"--cache {tmp_path}/socket: No such file or directory"
    assert gives_nothing(service)
    for _ in range(4):
        assert looks.acquire(timeout=PATIENCE_S)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert sum(service.path in record.getMessage() for record in warnings) == 1
    with serving(tmp_path):
        eventually(lambda: service.is_used and service.why_not == "")
        assert None not in service.put(BLOCKS)


def test_a_service_that_goes_and_comes_back_is_used_again(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        service = joined(served.path)
        places = service.put(BLOCKS)
        assert None not in places
        assert service.find(*names(BLOCKS[:1])) == [Found(places[0])]
    assert gives_nothing(service)
    eventually(lambda: service.why_not != "")
    assert not service.is_used
    with serving(tmp_path):
        eventually(lambda: service.is_used)
        assert [one.at for one in service.find(*names(BLOCKS))] == places


def test_a_service_that_is_another_one_has_the_group_made_there(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    path = tmp_path / "b/socket"
    with serving(tmp_path / "a") as first:
        path.symlink_to(first.path)
        service = joined(str(path))
        assert service.is_used
    path.unlink()
    with serving(tmp_path / "b") as second:
        eventually(lambda: bool(figures(second.groups)))
        eventually(lambda: service.put(BLOCKS[:1]) != [None])


def test_a_group_that_is_removed_while_it_is_used_is_made_again(served: Served) -> None:
    """Connections that were about it end."""
    service = joined(served.path)
    assert service.put(BLOCKS[:1]) != [None]
    group = served.reported.find(BLOCKS)
    assert group is not None
    with served.groups._lock:
        served.groups._remove(group)
    eventually(lambda: service.put(BLOCKS[:1]) != [None])
    assert served.reported.find(BLOCKS) is not group


def test_after_a_fault_the_service_is_left_alone_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as served:
        service = joined(served.path)
        service.put(BLOCKS[:1])
        monkeypatch.setattr(module, "AGAIN_S", PATIENCE_S)
        with service._channel(), service._channel():
            pass
        assert len(service._idle) == 2
        for channel in service._idle:
            channel.shut_down()
        assert service.find(*names(BLOCKS[:1])) == [NOTHING]
        assert not service.is_used
        assert gives_nothing(service)
        assert not service._idle, "what may be broken is not used again"


# ---- one that does not do as it should -----------------------------------------------------------
Reply = Callable[[Channel, str], None]


class FakeService:
    """Answers `group` as it should, and all else with what it was told. A context."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "fake")
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.path)
        self._listening.listen(16)
        self.replies: dict[str, Reply] = {
            "group": say("ok", known=True, room=5, limit=9),
            "living": say("ok", segnos=b""),
        }
        self.asked: list[str] = []
        self.is_over = threading.Event()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> FakeService:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.is_over.set()
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self.is_over.is_set():
                connection, _ = self._listening.accept()
                self._open.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection, PATIENCE_S)
        with contextlib.suppress(OSError, WireError), contextlib.closing(channel):
            while (received := channel.receive(waits=True)) is not None:
                frame, _ = received
                if frame.type == "put":
                    channel.bytes(int(frame.fields.array("lengths", "u4").sum()))
                self.asked.append(frame.type)
                self.replies[frame.type](channel, frame.type)


def say(type_: str, **fields: Any) -> Reply:
    return lambda channel, _: channel.send(type_, **fields)


def say_raw(data: bytes) -> Reply:
    return lambda channel, _: channel.send_bytes(memoryview(data))


def hang_up(channel: Channel, _: str) -> None:
    raise ConnectionAbortedError


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeService]:
    with FakeService(tmp_path) as made:
        yield made


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", PATIENCE_S)
    monkeypatch.setattr(module, "LOOK_S", PATIENCE_S)


def half(channel: Channel, _: str) -> None:
    channel.send_bytes(memoryview(b"\x10\0\0\0\x92"))
    channel.shut_down()


GARBAGE: dict[str, Reply] = {
    "no frame": say_raw(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "empty": say_raw(bytes(4)),
    "no msgpack": say_raw(b"\x01\0\0\0\xc1"),
    "half, and the end": half,
    "the end": hang_up,
    "nothing known": say("what"),
    "a request": say("find"),
    "no fields": say("ok"),
    "wrong types": say("ok", at="x", known=1, room="y", limit=None),
    "refused": say("refused", why="no"),
    "refused without a word": say("refused"),
    "refused at length": say("refused", why="x" * 2000),
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("request_", ["find", "put", "segment", "bad"])
def test_an_answer_that_is_none_gives_nothing(
    fake: FakeService, request_: str, what: str, rarely: None
) -> None:
    service = joined(fake.path)
    assert service.is_used
    fake.replies[request_] = GARBAGE[what]
    ask: dict[str, Callable[[], bool]] = {
        "find": lambda: service.find(*names(BLOCKS)) == [NOTHING] * 4,
        "put": lambda: service.put(BLOCKS) == [None] * 4,
        "segment": lambda: service.open_segment(SEGMENTS_FROM + 1) is None,
        "bad": lambda: service.doubt(SEGMENTS_FROM + 1, 5) is None,  # type: ignore[func-returns-value]
    }
    assert ask[request_]()
    assert request_ in fake.asked
    is_answer = (request_, what) in {
        (one, two) for one in ("segment", "bad") for two in ("no fields", "wrong types")
    }
    assert service.is_used == is_answer
    count = len(fake.asked)
    if not is_answer:
        assert gives_nothing(service)
        assert len(fake.asked) == count, "it is left alone"


@pytest.mark.parametrize("what", GARBAGE)
def test_an_answer_that_is_none_to_the_first_question_is_why_it_is_not_used(
    fake: FakeService, what: str, rarely: None
) -> None:
    fake.replies["group"] = GARBAGE[what]
    service = joined(fake.path)
    assert not service.is_used
    assert service.why_not.startswith(f"--cache {fake.path}: ")
    assert gives_nothing(service)


@pytest.mark.parametrize("what", [*GARBAGE, "ok once"])
def test_a_group_that_is_not_made_is_not_used(fake: FakeService, what: str, rarely: None) -> None:
    fake.replies["group"] = say("ok", known=False, room=0, limit=9)
    fake.replies["make"] = (
        say_raw(encode("ok", {}) + encode("refused", {"why": "others have all of the room"}))
        if what == "ok once"
        else GARBAGE[what]
    )
    service = joined(fake.path)
    if what in ("no fields", "wrong types"):  # an answer; the second does not come, or is another
        return
    assert not service.is_used
    assert gives_nothing(service)
    if what == "ok once":
        assert service.why_not.endswith(": others have all of the room")


@pytest.mark.parametrize("what", GARBAGE)
def test_an_answer_that_is_none_has_no_segment_forgotten(
    fake: FakeService, opened: Opened, what: str, rarely: None
) -> None:
    service = joined(fake.path)
    opened.segnos.add(SEGMENTS_FROM + 1)
    fake.replies["living"] = GARBAGE[what]
    with pytest.raises((OSError, WireError, Refused)):
        service.forget_gone()
    assert "living" in fake.asked
    assert not opened.dropped


def placed(*places: Found) -> bytes:
    return pack_found(places)


GOOD = Found(Location(SEGMENTS_FROM + 9, 4096, 200, len(BLOCKS[0])))
PLACES: dict[str, bytes] = {
    "none": b"",
    "fewer": placed(GOOD),
    "more": placed(GOOD, GOOD, GOOD),
    "cut": placed(GOOD, GOOD)[:-1],
    "of a mount": placed(GOOD, Found(Location(7, 4096, 200, 5))),
    "of a mount, the last": placed(GOOD, Found(Location(SEGMENTS_FROM, 4096, 200, 5))),
}


@pytest.mark.parametrize("what", PLACES)
def test_places_that_cannot_be_are_not_used(fake: FakeService, what: str, rarely: None) -> None:
    service = joined(fake.path)
    fake.replies["find"] = say("found", at=PLACES[what])
    assert service.find(*names(BLOCKS[:2])) == [NOTHING, NOTHING]
    assert not service.is_used


def test_places_are_those_that_were_told(fake: FakeService, rarely: None) -> None:
    service = joined(fake.path)
    assert service.room_bytes == 5
    packed = placed(GOOD, NOTHING, Found(None, True)) + struct.pack("<IQII", 0, 5, 5, 2)
    fake.replies["find"] = say("found", at=packed)
    assert service.find(*names(BLOCKS)) == [GOOD, NOTHING, Found(None, True), NOTHING]
    fake.replies["put"] = say("found", at=placed(GOOD))
    assert service.put(BLOCKS[:1]) == [GOOD.at]
    fake.replies["put"] = say("found", at=placed(Found(Location(7, 4096, 200, 5))))
    assert service.put(BLOCKS[:1]) == [None]
    assert not service.is_used


@pytest.mark.parametrize(
    ("request_", "type_"),
    [
        ("find", "found"),
        ("find", "what"),
        ("bad", "ok"),
        ("put", "found"),
        ("put", "refused"),
        ("segment", "what"),
        ("segment", "gone"),
    ],
)
def test_a_descriptor_that_was_not_asked_for_is_closed(
    fake: FakeService, request_: str, type_: str
) -> None:
    service = joined(fake.path)
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    fake.replies[request_] = lambda channel, _: channel.send(type_, descriptor=writing, why="no")
    eventually(lambda: service.is_used)
    service.find(*names(BLOCKS)) if request_ == "find" else None
    service.doubt(SEGMENTS_FROM + 1, 5) if request_ == "bad" else None
    service.put(BLOCKS[:1]) if request_ == "put" else None
    got = service.open_segment(SEGMENTS_FROM + 1) if request_ == "segment" else None
    os.close(writing)
    try:
        assert got is None
        assert os.read(reading, 1) == b"", f"{request_}: {type_}: nobody has the other end"
    except BlockingIOError:
        pytest.fail(f"{request_}: {type_}: the descriptor is still open")
    finally:
        os.close(reading)
        if got is not None:
            os.close(got)


# ---- who serves ----------------------------------------------------------------------------------
@pytest.mark.parametrize("uid", [0, os.geteuid(), 4242, 4243])
@pytest.mark.claim("D5")
def test_a_service_of_another_user_is_refused(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch, uid: int, rarely: None
) -> None:
    monkeypatch.setattr(module, "peer_of", lambda _: Peer(1, uid, 1))
    monkeypatch.setattr(
        module, "_user", lambda uid: "fusecache-cached" if uid == 4242 else f"user {uid}"
    )
    service = joined(fake.path)
    if uid == 4243:
        assert not service.is_used
        assert "user 4243 serves it" in service.why_not
        assert gives_nothing(service)
        assert not fake.asked, "nothing is said to it"
    else:
        assert service.is_used


def test_one_who_takes_the_service_s_place_later_is_refused(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch, rarely: None
) -> None:
    service = joined(fake.path)
    assert service.is_used
    count = len(fake.asked)
    monkeypatch.setattr(module, "peer_of", lambda _: Peer(1, 4243, 1))
    assert gives_nothing(service)
    assert len(fake.asked) == count


# ---- one that hangs ------------------------------------------------------------------------------
@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for."""
    for name in ("REQUEST_S", "MANY_S", "PUT_S"):
        monkeypatch.setattr(module, name, 0.1)
    connect, channel = CacheService._connect, CacheService._channel
    monkeypatch.setattr(
        CacheService,
        "_connect",
        lambda service, timeout_s=0.1: connect(service, timeout_s),
    )
    monkeypatch.setattr(
        CacheService,
        "_channel",
        lambda service, new=None, wait_s=0.1: channel(service, new, wait_s),
    )


@pytest.mark.parametrize("request_", ["find", "put", "segment", "bad", "group"])
def test_one_that_hangs_is_left_alone(
    fake: FakeService, caplog: pytest.LogCaptureFixture, request_: str, rarely: None, quickly: None
) -> None:
    service = joined(fake.path)
    fake.replies[request_] = lambda *_: None
    asks: dict[str, Callable[[], object]] = {
        "find": lambda: service.find(*names(BLOCKS)),
        "put": lambda: service.put(BLOCKS),
        "segment": lambda: service.open_segment(SEGMENTS_FROM + 1),
        "bad": lambda: service.doubt(SEGMENTS_FROM + 1, 5),
        "group": lambda: service.find(*names(BLOCKS)),
    }
    asks[request_]()
    assert "timed out" in caplog.text or "not completed" in caplog.text
    assert not service.is_used
    count = len(fake.asked)
    assert gives_nothing(service)
    assert len(fake.asked) == count


@pytest.mark.parametrize("request_", ["one", "find", "put", "bad"])
def test_what_nobody_waits_for_has_more_time(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch, request_: str, rarely: None
) -> None:
    service = joined(fake.path)
    monkeypatch.setattr(module, "REQUEST_S", 0.1)
    for name in ("MANY_S", "PUT_S"):
        monkeypatch.setattr(module, name, PATIENCE_S)
    count = 1 if request_ in ("one", "put") else 2

    def late(channel: Channel, type_: str) -> None:
        fake.is_over.wait(0.25)
        channel.send("ok" if type_ == "bad" else "found", at=placed(*[GOOD] * count))

    fake.replies |= dict.fromkeys(("find", "put", "bad"), late)
    if request_ == "one":  # a reader waits
        assert service.find(*names(BLOCKS[:1])) == [NOTHING]
        assert not service.is_used
        return
    if request_ == "find":
        assert service.find(*names(BLOCKS[:2])) == [GOOD, GOOD]
    elif request_ == "put":
        assert service.put(BLOCKS[:1]) == [GOOD.at]
    else:
        service.doubt(SEGMENTS_FROM + 1, 5)
    assert service.is_used


def test_one_that_answers_byte_by_byte_is_not_waited_for(
    fake: FakeService, caplog: pytest.LogCaptureFixture, rarely: None, quickly: None
) -> None:
    service = joined(fake.path)

    def drip(channel: Channel, _: str) -> None:
        for byte in encode("found", {"at": bytes(80)}):
            channel.send_bytes(memoryview(bytes([byte])))
            if fake.is_over.wait(0.03):
                break

    fake.replies["find"] = drip
    assert service.find(*names(BLOCKS)) == [NOTHING] * 4
    assert "timed out" in caplog.text or "not completed" in caplog.text
    assert not service.is_used


def test_one_that_hangs_from_the_start_keeps_nobody_waiting(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAKE_S", 0.1)
    fake.replies["group"] = lambda *_: None
    service = CacheService(fake.path)
    service.use(set_with(BLOCKS))
    assert not service.is_used
    assert gives_nothing(service)
    service.wait(PATIENCE_S)
    assert "timed out" in service.why_not
    fake.replies["group"] = say("ok", known=True, room=5, limit=9)
    eventually(lambda: service.is_used)
