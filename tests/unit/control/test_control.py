"""The control socket: what clients may send."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from fusecache.control.control import ControlServer, Message, RequestError, Send
from tests.support import PATIENCE_S


async def _echo(request: Message, send: Send) -> Message:
    await send({"progress": {"seen": request["word"]}})
    return {"word": request["word"]}


async def _refuse(request: Message, send: Send) -> Message:
    del request, send
    raise RequestError("not today")


async def _tell(request: Message, send: Send) -> Message:
    """As `warm`: progress comes from a nursery. Ends when the client is gone."""
    del request

    async def forever() -> None:
        while True:
            await send({"progress": {}})

    async with trio.open_nursery() as nursery:
        nursery.start_soon(forever)
    return {}


async def _fail(request: Message, send: Send) -> Message:
    del request, send
    raise ValueError("a fault")


@contextlib.asynccontextmanager
async def _serving(path: Path) -> AsyncIterator[ControlServer]:
    """A server at `path`, for PATIENCE_S at most."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    async with trio.open_nursery() as nursery:
        server = ControlServer(
            listener.detach(), {"echo": _echo, "refuse": _refuse, "tell": _tell, "fail": _fail}
        )
        nursery.start_soon(server.serve_forever)
        with trio.fail_after(PATIENCE_S):
            yield server
        nursery.cancel_scope.cancel()


async def _converse(path: Path, *lines: bytes) -> list[Message]:
    """What the server says to a client that sends `lines` and then waits."""
    received = b""
    async with _serving(path):
        stream = await trio.open_unix_socket(path)
        for line in lines:
            await stream.send_all(line)
        async for data in stream:
            received += data
    return [json.loads(line) for line in received.splitlines()]


def test_a_request_is_answered_after_its_progress(tmp_path: Path) -> None:
    answers = trio.run(_converse, tmp_path / "s", b'{"op": "echo",', b' "word": "hm"}\n')
    assert answers == [{"progress": {"seen": "hm"}}, {"ok": True, "word": "hm"}]


@pytest.mark.parametrize("line", [b"garbage\n", b'{"op": "format"}\n', b"[]\n", b"\n", b"\xff\n"])
def test_what_is_no_request_gets_one_line(tmp_path: Path, line: bytes) -> None:
    (answer,) = trio.run(_converse, tmp_path / "s", line)
    assert answer == {"ok": False, "error": "not a request this server knows", "exit": 1}


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    assert trio.run(_converse, tmp_path / "s", b'{"op": "refuse"}\n') == [
        {"ok": False, "error": "not today", "exit": 1}
    ]


async def _hang_up(path: Path, op: str) -> None:
    """A client that takes no more amid the answer."""
    async with _serving(path) as server, await trio.open_unix_socket(path) as stream:
        await stream.send_all(b'{"op": "%s"}\n' % op.encode())
        await stream.receive_some()
        stream.socket.shutdown(socket.SHUT_RD)  # a write fails before anything is seen
        while server._clients.borrowed_tokens:
            await trio.sleep(0.01)


@pytest.mark.parametrize(("op", "errors"), [("tell", 0), ("fail", 1)])
def test_a_client_that_hangs_up_is_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, op: str, errors: int
) -> None:
    trio.run(_hang_up, tmp_path / "s", op)
    assert [record.message for record in caplog.records] == ["control request failed"] * errors
