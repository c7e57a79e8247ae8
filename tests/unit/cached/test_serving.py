"""The service on its socket: each request, and that what is none costs its own connection alone."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fusecache.base import wire
from fusecache.base.units import BLOCK_BYTES
from fusecache.base.wire import Peer, encode
from fusecache.cached import serving as module
from fusecache.cached.group import name_of
from fusecache.cached.talk import FINDS_MOST, FRAME_BYTES_MOST, PUTS_MOST, SEGMENTS_FROM
from fusecache.store.types import Location
from tests.unit.cached.support import (
    MIB,
    STEP,
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
OTHERS = blocks_of(2, 4)


class Peers:
    """Who connects next, to the service: other mounts, of this user."""

    def __init__(self) -> None:
        self.uid = 1000
        self.pids = count(1)
        self.pid: int | None = None

    def __call__(self, _: socket.socket) -> Peer:
        return Peer(self.pid or next(self.pids), self.uid, 1000)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    made = Peers()
    monkeypatch.setattr(module, "peer_of", made)
    return made


@pytest.fixture
def served(tmp_path: Path, peers: Peers, caplog: pytest.LogCaptureFixture) -> Iterator[Served]:
    with serving(tmp_path) as made:
        yield made
    assert not [r for r in caplog.get_records("call") if r.levelno >= logging.ERROR]


@pytest.fixture
def talker(served: Served) -> Iterator[Talker]:
    """One that is about the group of BLOCKS."""
    with Talker(served.path) as made:
        made.join(BLOCKS)
        yield made


# ---- group and make ------------------------------------------------------------------------------
def test_a_group_is_known_once_it_was_made(served: Served) -> None:
    digests = set_with(BLOCKS)
    with Talker(served.path) as talker:
        answer = talker.ask("group", name=name_of(digests)).fields
        assert not answer.bool("known")
        assert answer.int("room", 0, 1 << 60) == 0
        assert talker.make(digests).type == "ok"
        answer = talker.ask("group", name=name_of(digests)).fields
        assert answer.bool("known")
        assert 3 * STEP < answer.int("room", 0, 1 << 60) < served.groups.limit_bytes
    assert figures(served.groups).keys() == {1000}, "the uid is that of the socket"


def test_a_connection_uses_its_group_until_it_names_another_or_ends(served: Served) -> None:
    with Talker(served.path) as talker:
        for blocks in (BLOCKS, OTHERS):
            talker.join(blocks)
        one, other = (served.reported.find(blocks) for blocks in (BLOCKS, OTHERS))
        assert one is not None
        assert other is not None
        assert (one.connections, other.connections) == (0, 1)
        assert not talker.ask("group", name=bytes(32)).fields.bool("known")
        assert other.connections == 0
        talker.join(BLOCKS)
    eventually(lambda: one.connections == 0)


def unsorted(digests: bytes) -> bytes:
    return digests[32:] + digests[:32]


@pytest.mark.parametrize(
    "bad",
    [unsorted, lambda digests: digests[:32] + digests, lambda digests: digests[:-32] + bytes(32)],
    ids=["unsorted", "one twice", "one is another"],
)
def test_what_is_no_set_makes_no_group(served: Served, bad: Callable[[bytes], bytes]) -> None:
    digests = set_with(BLOCKS)
    with Talker(served.path) as talker:
        for name in {name_of(digests), name_of(bad(digests))} - {
            name_of(bad(digests)) if bad(digests)[-32:] == bytes(32) else b""
        }:
            refused = talker.make(bad(digests), name)
            assert refused.type == "refused"
            assert "not the set" in refused.fields.str("why", 1000)
            assert not talker.ask("group", name=name).fields.bool("known")
    assert not figures(served.groups)
    assert not [path for path in served.reported.root.iterdir() if path.is_dir()]


@pytest.mark.claim("D1")
def test_a_set_under_another_name_makes_no_group(served: Served) -> None:
    """Or who knows a name would have what is under it."""
    with Talker(served.path) as owner, Talker(served.path) as thief:
        owner.join(BLOCKS)
        assert owner.put(BLOCKS[0])
        mine = set_with(OTHERS)
        assert thief.make(mine, name_of(set_with(BLOCKS[:2]))).type == "refused"
        assert thief.make(mine, bytes(32)).type == "refused"
        assert thief.make(mine).type == "ok"


def test_a_set_of_a_name_that_is_there_changes_nothing(served: Served, talker: Talker) -> None:
    at = talker.put(BLOCKS[0])
    with Talker(served.path) as other:
        assert other.make(set_with(BLOCKS)).type == "ok"
        other.join(BLOCKS)
        assert other.find(BLOCKS[:1]) == [at]


def test_a_set_that_is_too_large_is_refused_before_it_comes(served: Served) -> None:
    most = served.groups.limit_bytes // 16 // 32
    with Talker(served.path) as talker:
        refused = talker.ask("make", name=bytes(32), count=most + 1)
        assert refused.type == "refused"
        assert talker.is_alive()


def test_one_group_at_a_time_is_made_by_a_user(served: Served, peers: Peers) -> None:
    digests = set_with(BLOCKS)
    with Talker(served.path) as slow, Talker(served.path) as talker:
        assert slow.ask("make", name=name_of(digests), count=4).type == "ok"
        slow.channel.send_bytes(memoryview(digests[:50]))
        assert talker.make(set_with(OTHERS)).type == "refused"
        peers.uid = 1001
        with Talker(served.path) as another:
            assert another.make(set_with(OTHERS)).type == "ok"
        slow.channel.send_bytes(memoryview(digests[50:]))
        assert slow.hear().type == "ok"


def test_a_set_that_does_not_come_leaves_nothing(served: Served) -> None:
    with Talker(served.path) as talker:
        assert talker.ask("make", name=bytes(32), count=4).type == "ok"
        talker.channel.send_bytes(memoryview(bytes(50)))
    eventually(lambda: served.connections() == 0)
    assert not [path for path in served.reported.root.iterdir() if path.is_dir()]
    with Talker(served.path) as talker:
        assert talker.make(set_with(BLOCKS)).type == "ok"


# ---- find, put, bad ------------------------------------------------------------------------------
def test_what_one_puts_another_finds(served: Served, talker: Talker) -> None:
    with Talker(served.path) as other:
        other.join(BLOCKS)
        assert other.find(BLOCKS) == [False] * 4
        places = [talker.put(block) for block in BLOCKS[:3]]
        assert all(places)
        assert other.find([*BLOCKS, block_of(99)]) == [*places, False, False]
        assert other.find([BLOCKS[2]] * FINDS_MOST) == [places[2]] * FINDS_MOST


@pytest.mark.claim("D2")
def test_a_put_of_what_is_not_as_it_says_is_refused(served: Served, talker: Talker) -> None:
    block, other = BLOCKS[0], OTHERS[0]
    for bad in (
        other,  # not of this group
        Block(block.name, other.data),
        Block(block.name, block.data + b"\0"),
        Block(block.name, block.data[:-1]),
        Block(bytes(32), block.data),
    ):
        assert talker.put(bad) is None
        assert talker.find([block, other]) == [False, False]
    assert talker.put(block)


def test_of_several_blocks_those_are_stored_that_are_good(served: Served, talker: Talker) -> None:
    one, two, three, four = BLOCKS
    bad = Block(two.name, three.data)
    places = talker.put_many([one, bad, OTHERS[0], four, three])
    assert [at is not None for at in places] == [True, False, False, True, True]
    assert talker.find([one, two, four, three]) == [places[0], False, *places[3:]]


def test_a_block_may_come_twice_in_a_put(served: Served, talker: Talker) -> None:
    one, two = BLOCKS[:2]
    first, again, last = talker.put_many([one, one, two])
    assert first == again
    assert talker.find([one, two]) == [first, last]


def test_a_put_without_room_is_refused(
    served: Served, talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.groups, "put", lambda _, blocks: [None] * len(blocks))
    assert talker.put_many(BLOCKS[:2]) == [None, None]


def test_the_largest_block_is_put_and_read(served: Served) -> None:
    block = block_of(5, BLOCK_BYTES)
    with Talker(served.path) as talker:
        talker.join([block])
        at = talker.put(block)
        assert at is not None
        fd = talker.segment(at.segno)
        assert fd is not None
        assert read_at(fd, at) == block.data


def test_a_block_is_promised_to_who_asks_first(served: Served, peers: Peers) -> None:
    first, second = Talker(served.path), Talker(served.path)
    with first, second:
        for one in (first, second):
            one.join(BLOCKS)
        assert first.find(BLOCKS[:1]) == [False], "ahead: nobody is promised it"
        assert second.find(BLOCKS[:1], promise=True) == [False]
        assert first.find(BLOCKS[:1], promise=True) == [True]
        assert first.find(BLOCKS[:1]) == [False]
        at = second.put(BLOCKS[0])
        assert first.find(BLOCKS[:1], promise=True) == [at]


def test_a_put_that_is_refused_breaks_the_promise(served: Served) -> None:
    with Talker(served.path) as first, Talker(served.path) as second:
        for one in (first, second):
            one.join(BLOCKS)
        block = BLOCKS[0]
        first.find([block], promise=True)
        assert second.put(Block(block.name, b"x")) is None
        assert second.find([block], promise=True) == [True], "it was not this one's"
        assert first.put(Block(block.name, b"x")) is None
        assert second.find([block], promise=True) == [False]


def test_promises_go_with_the_last_connection_of_a_mount(served: Served, peers: Peers) -> None:
    with Talker(served.path) as second:
        second.join(BLOCKS)
        peers.pid = 77
        first, again = Talker(served.path), Talker(served.path)
        first.join(BLOCKS)
        assert again.is_alive()
        assert first.find(BLOCKS[:1], promise=True) == [False]
        again.join(BLOCKS)
        assert again.find(BLOCKS[:1], promise=True) == [False], "it is this mount's"
        again.channel.close()
        eventually(lambda: served.connections() == 2)
        assert second.find(BLOCKS[:1], promise=True) == [True]
        first.channel.close()
        eventually(lambda: served.connections() == 1)
        assert second.find(BLOCKS[:1], promise=True) == [False]


def test_what_is_bad_is_forgotten_when_it_is_told(served: Served, talker: Talker) -> None:
    good, bad = (talker.put(block) for block in BLOCKS[:2])
    assert good is not None
    assert bad is not None
    group = served.reported.find(BLOCKS)
    assert group is not None
    with group.store.segment_path(bad.segno).open("r+b") as file:
        file.seek(bad.offset + bad.header_len)
        file.write(bytes([BLOCKS[1].data[0] ^ 1]))
    with Talker(served.path) as other:  # it cannot know
        other.join(OTHERS)
        other.doubt(bad.segno, bad.offset)
    talker.doubt(bad.segno, bad.offset + 512)  # that is no record
    talker.doubt(bad.segno + 1, bad.offset)
    talker.doubt(good.segno, good.offset)
    assert talker.find(BLOCKS[:3]) == [good, bad, False]
    talker.doubt(bad.segno, bad.offset)
    assert talker.find(BLOCKS[:3]) == [good, False, False]


# ---- segments ------------------------------------------------------------------------------------
def segment_of(talker: Talker) -> tuple[int, Location]:
    at = talker.put(BLOCKS[0])
    assert at is not None
    fd = talker.segment(at.segno)
    assert fd is not None
    return fd, at


@pytest.mark.claim("D3")
def test_a_descriptor_of_a_segment_reads_it_and_no_more(served: Served, talker: Talker) -> None:
    fd, at = segment_of(talker)
    try:
        for change in (
            lambda: os.write(fd, b"x"),
            lambda: os.pwrite(fd, b"x", at.offset),
            lambda: os.ftruncate(fd, 0),
            lambda: os.posix_fallocate(fd, 0, 1 << 20),
        ):
            with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
                change()
        for way in ("..", ".", "../../digests", "../index"):
            with pytest.raises(NotADirectoryError):
                os.open(way, os.O_RDONLY, dir_fd=fd)
        with pytest.raises(NotADirectoryError):
            os.fchdir(fd)
        # Opened anew through /proc, permissions count.
        assert os.fstat(fd).st_mode & 0o077 == 0
        group = served.reported.find(BLOCKS)
        assert group is not None
        for folder in (group.folder, group.folder / "store", served.reported.root):
            assert folder.stat().st_mode & 0o077 == 0
    finally:
        assert read_at(fd, at) == BLOCKS[0].data


def test_descriptors_have_offsets_of_their_own(talker: Talker) -> None:
    fd, at = segment_of(talker)
    again = talker.segment(at.segno)
    assert again is not None
    try:
        os.lseek(fd, 1000, os.SEEK_SET)
        assert os.lseek(again, 0, os.SEEK_CUR) == 0
    finally:
        os.close(fd)
        os.close(again)


def test_a_segment_of_another_group_is_not_to_be_had(served: Served, talker: Talker) -> None:
    at = talker.put(BLOCKS[0])
    assert at is not None
    with Talker(served.path) as other:
        other.join(OTHERS)
        assert other.segment(at.segno) is None
        theirs = other.put(OTHERS[0])
        assert theirs is not None
        assert talker.segment(theirs.segno) is None
        for segno in (1, SEGMENTS_FROM, (1 << 32) - 1):
            assert talker.segment(segno) is None


def test_a_connection_is_told_which_segments_of_its_group_live(
    served: Served, talker: Talker
) -> None:
    at = talker.put(BLOCKS[0])
    assert at is not None
    with Talker(served.path) as other:
        other.join(OTHERS)
        theirs = other.put(OTHERS[0])
        assert theirs is not None
        asked = [1, SEGMENTS_FROM, at.segno, theirs.segno, (1 << 32) - 1]
        assert talker.living(asked) == [at.segno]
        assert other.living(asked) == [theirs.segno]
        assert talker.living([theirs.segno]) == talker.living([]) == []
        assert talker.living([at.segno] * FINDS_MOST) == [at.segno]


def test_descriptors_that_are_not_received_end_the_connection(
    served: Served, talker: Talker
) -> None:
    at = talker.put(BLOCKS[0])
    assert at is not None
    with Talker(served.path) as greedy:
        greedy.join(BLOCKS)
        greedy.socket.sendall(encode("segment", {"segno": at.segno}) * 20)
        greedy.wait_for_end()
        received = greedy.channel.receive()
        assert received is not None
        os.close(received[1])
        with pytest.raises((ConnectionResetError, StopIteration)):
            assert greedy.channel.receive() is not None or next(iter(()))
    assert talker.is_alive()


# ---- what is no request --------------------------------------------------------------------------
def framed(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def said(type_: str, **fields: Any) -> bytes:
    return encode(type_, fields)


def long(length: int) -> bytes:
    return length.to_bytes(4, "little")


NAME = BLOCKS[0].name
ONE: dict[str, Any] = {"digests": NAME, "lengths": b"\1\0\0\0", "promise": False}
MALFORMED: dict[str, bytes] = {
    "length 0": framed(b""),
    "too long": struct.pack("<I", FRAME_BYTES_MOST + 1),
    "much too long": b"\xff" * 4,
    "no msgpack": framed(b"\xc1"),
    "no list": framed(b"\x01"),
    "no fields": framed(b"\x91\xa5group"),
    "fields are a list": framed(b"\x92\xa5group\x90"),
    "deep": framed(b"\x91" * 5000),
    "half of it": framed(b"\x92\xa5group"),
    "two messages": framed(b"\x92\xa5group\x80\x00"),
    "an extension": framed(b"\x92\xa5group\x81\xa4name\xd4\x01\x00"),
    "unknown": said("hello"),
    "an answer": said("ok"),
    "of the class": said("run"),
    "group: no name": said("group"),
    "group: short": said("group", name=bytes(31)),
    "group: long": said("group", name=bytes(33)),
    "group: text": said("group", name="x" * 32),
    "make: no count": said("make", name=bytes(32)),
    "make: count 0": said("make", name=bytes(32), count=0),
    "make: count below": said("make", name=bytes(32), count=-1),
    "make: too many": said("make", name=bytes(32), count=module.DIGESTS_MOST + 1),
    "make: true": said("make", name=bytes(32), count=True),
    "make: short name": said("make", name=b"x", count=1),
    "find: none": said("find", **{**ONE, "digests": b"", "lengths": b""}),
    "find: half": said("find", **{**ONE, "digests": bytes(48)}),
    "find: too many": said(
        "find",
        digests=bytes(32 * (FINDS_MOST + 1)),
        lengths=bytes(4 * (FINDS_MOST + 1)),
        promise=False,
    ),
    "find: no lengths": said("find", digests=NAME, promise=False),
    "find: more lengths": said("find", **{**ONE, "lengths": bytes(8)}),
    "find: fewer lengths": said("find", **{**ONE, "lengths": b""}),
    "find: half lengths": said("find", **{**ONE, "lengths": bytes(3)}),
    "find: no promise": said("find", digests=NAME, lengths=bytes(4)),
    "find: promise 1": said("find", **{**ONE, "promise": 1}),
    "segment: none": said("segment"),
    "segment: 0": said("segment", segno=0),
    "segment: large": said("segment", segno=1 << 32),
    "segment: text": said("segment", segno="1"),
    "put: no length": said("put", digests=NAME),
    "put: fewer lengths": said("put", digests=NAME * 2, lengths=bytes([1, 0, 0, 0])) + b"x",
    "put: length 0": said("put", digests=NAME, lengths=bytes(4)),
    "put: a length 0": said("put", digests=NAME * 2, lengths=bytes([1, 0, 0, 0] + [0] * 4)) + b"x",
    "put: too long": said("put", digests=NAME, lengths=long(BLOCK_BYTES + 1)) + bytes(100),
    "put: together too long": said("put", digests=NAME * 2, lengths=long(BLOCK_BYTES // 2 + 1) * 2)
    + bytes(100),
    "put: too many": said("put", digests=NAME * (PUTS_MOST + 1), lengths=long(1) * (PUTS_MOST + 1))
    + bytes(PUTS_MOST + 1),
    "put: short": said("put", digests=NAME[1:], lengths=long(1)) + b"x",
    "put: none": said("put", digests=b"", lengths=b""),
    "bad: a digest": said("bad", digest=NAME, length=1),
    "bad: no offset": said("bad", segno=1),
    "bad: no segment": said("bad", offset=1),
    "bad: segment 0": said("bad", segno=0, offset=1),
    "bad: large segment": said("bad", segno=1 << 32, offset=1),
    "bad: offset below": said("bad", segno=1, offset=-1),
    "bad: large offset": said("bad", segno=1, offset=1 << 63),
    "bad: text": said("bad", segno=1, offset="1"),
    "living: none": said("living"),
    "living: a list": said("living", segnos=[1]),
    "living: half": said("living", segnos=bytes(6)),
    "living: too many": said("living", segnos=bytes(4 * (FINDS_MOST + 1))),
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_no_request_ends_its_own_connection(
    shared: Served, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Talker(shared.path) as other, Talker(shared.path) as talker:
        other.join(BLOCKS)
        talker.join(BLOCKS)
        talker.socket.sendall(MALFORMED[what])
        talker.expect_end()
        at = other.put(BLOCKS[1])
        assert at is not None
        assert other.find(BLOCKS[1:2]) == [at]
    eventually(lambda: shared.connections() == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "request_",
    [
        said("find", **ONE),
        said("segment", segno=1),
        said("put", digests=NAME, lengths=long(1)) + b"x",
        said("bad", segno=1, offset=1),
        said("living", segnos=b""),
    ],
    ids=["find", "segment", "put", "bad", "living"],
)
def test_what_needs_a_group_that_was_not_named_ends_the_connection(
    shared: Served, request_: bytes
) -> None:
    for joined in (False, True):
        with Talker(shared.path) as talker:
            if joined:  # and then another that is not there
                talker.join(BLOCKS)
                assert not talker.ask("group", name=bytes(32)).fields.bool("known")
            talker.socket.sendall(request_)
            talker.expect_end()


def test_descriptors_that_come_with_a_request_are_closed(shared: Served) -> None:
    reading, writing = os.pipe()
    try:
        with Talker(shared.path) as talker:
            frame = said("group", name=bytes(32))
            socket.send_fds(talker.socket, [frame], [writing])
            assert talker.hear().type == "ok"
            socket.send_fds(talker.socket, [frame], [writing] * 3)
            talker.expect_end()
            with Talker(shared.path) as another:
                another.socket.sendall(frame[:2])
                socket.send_fds(another.socket, [frame[2:]], [writing])
                assert another.hear().type == "ok"
    finally:
        os.close(writing)
    os.set_blocking(reading, False)
    assert eventually(lambda: os.read(reading, 1) == b"")  # nobody has the other end
    os.close(reading)


def sockets() -> int:
    """That this process has."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return count


def test_random_frames_cost_nobody_else_anything(
    shared: Served, caplog: pytest.LogCaptureFixture
) -> None:
    source = random.Random(11)
    values: list[Callable[[], Any]] = [
        lambda: source.choice([0, 1, -1, 31, 1 << 31, (1 << 32) - 1, 1 << 63, True, None, 0.5]),
        lambda: source.choice([b"", NAME, bytes(32), NAME * 2, bytes(4), bytes(8), "x", "y" * 99]),
        lambda: source.choice([[], {}, [1] * 5, {"a": {"b": []}}]),
        lambda: source.randbytes(source.randrange(70)),
        lambda: name_of(set_with(BLOCKS)),
    ]
    fields = ["name", "count", "digests", "lengths", "promise", "segno", "offset", "segnos"]
    types = ["group", "make", "find", "segment", "put", "bad", "living", "ok", "x"]

    def frame() -> bytes:
        kind = source.random()
        if kind < 0.15:
            return source.randbytes(source.randrange(1, 60))
        if kind < 0.3:
            return framed(source.randbytes(source.randrange(60)))
        made = {name: source.choice(values)() for name in fields if source.random() < 0.8}
        if source.random() < 0.7:
            made |= {"name": name_of(set_with(BLOCKS)), "promise": True}
            made |= {"digests": NAME, "lengths": bytes([9, 0, 0, 0]), "offset": 4096}
        if kind > 0.9:
            data = bytearray(wire.encode(source.choice(types), made))
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
            return bytes(data)
        data_behind = source.randbytes(source.randrange(40))
        return wire.encode(source.choice(types), made) + data_behind * (source.random() < 0.3)

    with Talker(shared.path) as other:
        other.join(BLOCKS)
        before = sockets()
        for _ in range(300):
            with Talker(shared.path) as talker:
                try:
                    if source.random() < 0.6:
                        talker.join(BLOCKS)
                    for _ in range(source.randrange(1, 6)):
                        talker.socket.sendall(frame())
                except (BrokenPipeError, ConnectionResetError):
                    pass
        eventually(lambda: shared.connections() == 1)
        eventually(lambda: sockets() <= before)
        at = other.put(BLOCKS[3])
        assert at is not None
        assert other.find([BLOCKS[3]]) == [at]
        assert other.make(set_with(OTHERS)).type == "ok"
    assert not [path for path in shared.reported.root.iterdir() if path.name.startswith(".")]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1), (0, 1, 1)])
def test_a_good_and_a_bad_block_of_one_digest_are_told_apart(
    shared: Served, order: tuple[int, ...]
) -> None:
    block = BLOCKS[0]
    blocks = [block, Block(block.name, b"another")]
    with Talker(shared.path) as talker:
        talker.join(BLOCKS)
        places = talker.put_many([blocks[which] for which in order])
    assert [at is not None for at in places] == [which == 0 for which in order]


# ---- connections ---------------------------------------------------------------------------------
def test_half_a_request_keeps_nobody_waiting_and_ends(
    served: Served, talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    for half in (
        b"\x10",
        said("group", name=bytes(32))[:9],
        said("group", name=name_of(set_with(BLOCKS)))
        + said("put", digests=NAME, lengths=long(5000))
        + bytes(4999),
    ):
        with Talker(served.path) as slow:
            slow.socket.sendall(half)
            assert talker.put(BLOCKS[1]) is not None
            slow.wait_for_end()


def test_who_says_nothing_stays(
    served: Served, talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.05)
    with Talker(served.path) as idle, Talker(served.path) as slow:
        slow.socket.sendall(b"\x10")
        slow.wait_for_end()  # so long, and idle has waited longer
        assert idle.is_alive()


def test_who_does_not_receive_keeps_nobody_waiting(
    served: Served, talker: Talker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    many = FINDS_MOST
    question = said("find", digests=NAME * many, lengths=bytes(4 * many), promise=False)
    with Talker(served.path) as deaf:
        deaf.join(BLOCKS)
        deaf.socket.sendall(question)
        assert deaf.hear().type == "found"
        ended = threading.Event()

        def ask() -> None:
            with contextlib.suppress(ConnectionError):
                deaf.socket.sendall(question * 500)
                return
            ended.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert talker.put(BLOCKS[2]) is not None
        thread.join()
        assert ended.is_set()
    assert talker.put(BLOCKS[3]) is not None


def test_a_user_has_so_many_connections_and_others_have_theirs(
    served: Served, peers: Peers
) -> None:
    held = [Talker(served.path) for _ in range(module.CONNECTIONS_OF_USER)]
    try:
        assert held[-1].is_alive()
        with Talker(served.path) as one_more:
            one_more.expect_end()
        peers.uid = 1001
        with Talker(served.path) as other:
            assert other.is_alive()
        peers.uid = 1000
        held.pop().channel.close()
        eventually(lambda: served.connections() == module.CONNECTIONS_OF_USER - 1)
        with Talker(served.path) as again:
            assert again.is_alive()
    finally:
        for talker in held:
            talker.channel.close()


def test_all_together_have_so_many_connections(
    served: Served, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECTIONS_MOST", 3)
    held = []
    for uid in range(3):
        peers.uid = uid
        held.append(Talker(served.path))
        assert held[-1].is_alive()
    peers.uid = 3
    with Talker(served.path) as one_more:
        one_more.expect_end()
    for talker in held:
        talker.channel.close()


def test_the_end_of_the_service_ends_connections_and_keeps_what_was_stored(
    tmp_path: Path, peers: Peers
) -> None:
    with serving(tmp_path) as served, Talker(served.path) as talker:
        talker.join(BLOCKS)
        at = talker.put(BLOCKS[0])
        served.stop()
        talker.expect_end()
        again = Served(tmp_path)
        try:
            with Talker(again.path) as talker:
                talker.join(BLOCKS)
                assert talker.find(BLOCKS[:2]) == [at, False]
        finally:
            again.stop()


def test_after_its_end_the_socket_goes_on_to_listen(tmp_path: Path, peers: Peers) -> None:
    """It may be systemd's, which starts the next service on it."""
    served = Served(tmp_path)
    kept = served.listener.dup()
    with Talker(served.path) as talker:
        talker.join(BLOCKS)
        at = talker.put(BLOCKS[0])
        served.end()
        talker.expect_end()
    served.listener.close()
    with Talker(served.path) as early:  # nobody serves it
        again = Served(tmp_path, listener=kept)
        try:
            early.join(BLOCKS)
            assert early.find(BLOCKS[:2]) == [at, False]
            with Talker(again.path) as late:
                assert late.is_alive()
        finally:
            again.stop()


# ---- quotas --------------------------------------------------------------------------------------
@pytest.mark.claim("D4")
def test_a_user_with_many_small_groups_in_use_leaves_room_to_another(
    tmp_path: Path, peers: Peers
) -> None:
    """None of them has more than a step; together they are far above the quota."""
    with serving(tmp_path, steps=8) as served, contextlib.ExitStack() as stack:
        served.groups.limit_bytes, served.groups.quota_bytes = 256 * MIB, 64 * MIB
        for seed in range(7):
            greedy = stack.enter_context(Talker(served.path))
            greedy.join(blocks_of(10 + seed, 1))
        peers.uid = 1001
        other = stack.enter_context(Talker(served.path))
        other.join(BLOCKS)
        places = other.put_many(BLOCKS)
        assert None not in places
        assert other.find(BLOCKS) == places
        room = other.ask("group", name=name_of(set_with(BLOCKS))).fields.int("room", 0, 1 << 60)
        assert room > STEP // 2
        served.reported.check()
        assert served.reported.granted(1001) > STEP
        assert figures(served.groups)[1000][0] == 6, "no more than is needed is taken"
