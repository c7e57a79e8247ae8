"""Frames: what is encoded is decoded; whatever else arrives is a WireError, and cheap."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import tracemalloc
from functools import partial
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusecache.base import wire, wire_trio
from fusecache.base.wire import Decoder, Fields, Frame, WireError, encode
from fusecache.base.wire_trio import FrameStream

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=200),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.text(max_size=10), PLAIN, max_size=4)


def frame_of(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.text(max_size=10), FIELDS), max_size=3), st.randoms())
def test_what_is_sent_arrives_in_whatever_pieces(
    frames: list[tuple[str, dict[str, Any]]], rng: random.Random
) -> None:
    stream = b"".join(encode(kind, fields) for kind, fields in frames)
    decoder, found = Decoder(), []
    while stream:
        cut = rng.randint(1, len(stream))
        found += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert [(frame.type, frame.fields.raw()) for frame in found] == frames
    assert not decoder.is_inside_frame


def test_arrays_are_packed_little_endian() -> None:
    inos = np.array([1, 2, 0xFFFFFFFF], ">u4")
    (frame,) = Decoder().feed(encode("stage", {"inos": inos, "count": np.int64(3)}))
    assert frame.fields.raw()["inos"] == b"\1\0\0\0\2\0\0\0\xff\xff\xff\xff"
    assert frame.fields.array("inos", np.uint32).tolist() == inos.tolist()
    assert frame.fields.int("count", 0, 3) == 3


def test_text_that_is_no_utf8_is_sent_escaped() -> None:
    (frame,) = Decoder().feed(encode("error", {"message": "a\udcff"}))
    assert frame.fields.str("message", 10) == "a\\udcff"


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(WireError, match="too large"):
        encode("array", {"data": bytes(wire.FRAME_BYTES_MOST)})


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 0),
        struct.pack("<I", wire.FRAME_BYTES_MOST + 1),
        frame_of(b"\xc1"),
        frame_of(b""),
        frame_of(pack(["stage", {}]) + b"\0"),
        frame_of(pack(["stage", {}])[:-1]),
        frame_of(pack(["stage"])),
        frame_of(pack(["stage", {}, 1])),
        frame_of(pack(["stage", []])),
        frame_of(pack([b"stage", {}])),
        frame_of(pack(["s" * 33, {}])),
        frame_of(pack({"stage": {}})),
        frame_of(pack(["stage", {b"inos": b""}])),
        frame_of(b"\x92\xa1s\x81\x01\x01"),  # a number as a key
        frame_of(b"\x92\xa1s\x81\xa1\xff\x01"),  # no UTF-8
        frame_of(pack(["s", {"a": msgpack.ExtType(5, b"x")}])),
        frame_of(pack(["s", {"a": msgpack.Timestamp(1, 2)}])),
        frame_of(b"\x91" * 100_000),  # nested
        frame_of(pack(["s", {"a": [0] * (wire.LIST_LENGTH_MOST + 1)}])),
        frame_of(pack(["s", {"a": [[0] * 4000] * 20}])),
        frame_of(b"\x92\xa1s\x81\xa1a\xdd\xff\xff\xff\xff"),  # a list said to be huge
        frame_of(b"\x92\xa1s\x81\xa1a\xc6\xff\xff\xff\xff"),  # bytes said to be huge
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(WireError) as caught:
        Decoder().feed(data)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=2000))
def test_any_payload_is_a_frame_or_refused(payload: bytes) -> None:
    try:
        frames = Decoder().feed(frame_of(payload))
    except WireError:
        return
    assert len(frames) == 1


@settings(max_examples=50)
@given(FIELDS, st.randoms())
def test_mutated_frames_are_frames_or_refused(fields: dict[str, Any], rng: random.Random) -> None:
    data = bytearray(encode("job", fields))
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    with contextlib.suppress(WireError):
        Decoder().feed(data)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x92\xa1s\x81\xa1a" + b"\x91" * 1000,
        b"\xdd\x00\x00\x10\x00" * 600,  # nested lists that all claim to be long
        pack(["s", {"a": [[]] * 4000}]),
        pack(["s", {"a": [["ab"] * 4000] * 15}]),
        b"\x92\xa1s\x81\xa1a" + (b"\xdc\x10\x00" + b"\x80" * 4096) * 900,
    ],
)
def test_a_frame_allocates_little(payload: bytes) -> None:
    tracemalloc.start()
    try:
        with_overhead = frame_of(payload)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with contextlib.suppress(WireError):
            Decoder().feed(with_overhead)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < (24 << 20) + 4 * len(payload)


# ---- fields --------------------------------------------------------------------------------------


FIELDS_OF_ALL_KINDS = Fields(
    {
        "int": 5, "bool": True, "str": "text", "bytes": b"abcdefgh", "list": ["a", "b"],
        "map": {"int": 1}, "nil": None, "float": 1.0, "mixed": ["a", 1],
    },
    "job",
)  # fmt: skip


def test_fields() -> None:
    fields = FIELDS_OF_ALL_KINDS
    assert fields.int("int", 5, 5) == 5
    assert fields.bool("bool") is True
    assert fields.str("str", 4) == "text"
    assert fields.bytes("bytes", 8) == b"abcdefgh"
    assert fields.array("bytes", np.uint64).shape == (1,)
    assert fields.list("list", 2) == ["a", "b"]
    assert fields.strings("list", 2, 1) == ["a", "b"]
    assert fields.map("map").int("int", 0, 1) == 1
    for name in ("nil", "missing"):
        assert fields.optional_int(name, 0, 1) is None
        assert fields.optional_str(name, 1) is None
        assert fields.optional_map(name) is None
        assert name not in fields
    assert fields.optional_int("int", 0, 9) == 5


@pytest.mark.parametrize(
    ("access", "arguments"),
    [
        ("int", ("missing", 0, 1)),
        ("int", ("nil", 0, 1)),
        ("int", ("bool", 0, 1)),
        ("int", ("float", 0, 1)),
        ("int", ("int", 6, 9)),
        ("int", ("int", 0, 4)),
        ("optional_int", ("str", 0, 4)),
        ("bool", ("int",)),
        ("str", ("bytes", 9)),
        ("str", ("str", 3)),
        ("bytes", ("str", 9)),
        ("bytes", ("bytes", 7)),
        ("array", ("str", np.uint8)),
        ("array", ("list", np.uint8)),
        ("list", ("map", 9)),
        ("list", ("list", 1)),
        ("strings", ("mixed", 9, 9)),
        ("strings", ("list", 9, 0)),
        ("map", ("list",)),
        ("optional_map", ("int",)),
    ],
)
def test_fields_that_are_wrong_are_named(access: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(WireError, match=f"^job: field {arguments[0]} "):
        getattr(FIELDS_OF_ALL_KINDS, access)(*arguments)


def test_an_array_that_ends_within_an_element_is_refused() -> None:
    with pytest.raises(WireError, match="inos"):
        Fields({"inos": b"abc"}).array("inos", np.uint32)


def test_who_is_there() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert wire.peer_of(ours) == (os.getpid(), os.getuid(), os.getgid())


# ---- trio ----------------------------------------------------------------------------------------


def run(function: Any) -> Any:
    """With a clock that jumps when all wait."""
    return trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_stream_of_frames_until_its_end() -> None:
    async def main() -> list[str]:
        left, right = trio.testing.memory_stream_pair()
        ours, theirs = FrameStream(left), FrameStream(right, encode("first", {}))
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(partial(ours.send, "number", n=number))
        await ours.aclose()
        found = []
        while (frame := await theirs.receive()) is not None:
            found.append(frame.type)
        return found

    assert trio.run(main) == ["first", "number", "number", "number"]


def test_a_frame_that_is_not_completed_in_time_is_refused() -> None:
    async def main() -> float:
        left, right = trio.testing.memory_stream_pair()
        stream, data = FrameStream(right), encode("slow", {"data": bytes(100)})
        begun = trio.current_time()

        async def drip() -> None:
            for byte in data:
                await left.send_all(bytes([byte]))
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip)
            with pytest.raises(WireError, match="not completed"):
                await stream.receive()
            nursery.cancel_scope.cancel()
        return trio.current_time() - begun

    assert wire.FRAME_TIMEOUT_S <= run(main) <= wire.FRAME_TIMEOUT_S + 1


def test_an_idle_connection_is_waited_for() -> None:
    async def main() -> Frame | None:
        left, right = trio.testing.memory_stream_pair()

        async def later() -> None:
            await trio.sleep(1000)
            await left.send_all(encode("late", {}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(later)
            return await FrameStream(right).receive()

    frame = run(main)
    assert frame is not None
    assert frame.type == "late"


def test_an_end_inside_a_frame_is_an_error() -> None:
    async def main() -> None:
        left, right = trio.testing.memory_stream_pair()
        await left.send_all(encode("cut", {})[:-1])
        await left.send_eof()
        with pytest.raises(WireError, match="inside"):
            await FrameStream(right).receive()

    trio.run(main)


def test_a_peer_that_does_not_read_is_cut_off() -> None:
    async def main() -> float:
        left, right = trio.testing.lockstep_stream_pair()
        begun = trio.current_time()
        with pytest.raises(WireError, match="does not read"):
            await FrameStream(left).send("big", data=bytes(10 * wire_trio.SEND_PIECE_BYTES))
        await right.aclose()
        return trio.current_time() - begun

    assert run(main) == pytest.approx(wire.FRAME_TIMEOUT_S)


def test_what_can_be_sent_at_once_is_sent_however_long_the_loop_stands_still() -> None:
    clock = trio.testing.MockClock()

    class StandsStill(trio.abc.Instrument):
        def before_io_wait(self, timeout: float) -> None:
            clock.jump(2)

    async def main() -> Frame | None:
        left, right = map(trio.SocketStream, trio.socket.socketpair())
        async with right:
            async with left:
                with trio.move_on_after(1):
                    await FrameStream(left).send("last")
            return await FrameStream(right).receive()

    frame = trio.run(main, clock=clock, instruments=[StandsStill()])
    assert frame is not None
    assert frame.type == "last"


def test_a_slow_reader_is_not_cut_off() -> None:
    data = bytes(10 * wire_trio.SEND_PIECE_BYTES)

    async def main() -> bytes:
        left, right = trio.testing.lockstep_stream_pair()
        received = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(FrameStream(left).send, "big", data=data))
            while len(received) < len(encode("big", {"data": data})):
                await trio.sleep(wire.FRAME_TIMEOUT_S / 2)
                received += await right.receive_some(wire_trio.SEND_PIECE_BYTES)
        return bytes(received)

    assert run(main) == encode("big", {"data": data})


def test_pid_namespace_of_another_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """`unshare --pid --fork` without --mount-proc: /proc knows other numbers."""
    assert wire.pid_namespace() == os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    assert wire.pid_namespace() == 0
