"""A spare: handed over, too slow, dead, or not needed. Without a keeper, and without imports."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.keeper import spare
from fusecache.keeper.spare import Spare
from tests.support.mounted import ROOT, eventually

CHILD = """
import sys
from fusecache.keeper import spare
launch = spare.wait(int(sys.argv[2]))
print(launch if launch is None else "became " + launch, flush=True)
"""
"""Started with `--spare FD`, as a server is."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield fd
    os.close(fd)


def begin(code: str, log: int) -> Spare:
    return Spare([sys.executable, "-c", code], {"PYTHONPATH": str(ROOT)}, log, "/m")


def said(log: int) -> str:
    return os.pread(log, 1 << 16, 0).decode()


def test_it_becomes_the_server_with_all_descriptors(log: int, tmp_path: Path) -> None:
    one = begin(CHILD, log)
    eventually(lambda: not one.is_coming())
    rotated = os.open(tmp_path / "rotated", os.O_RDWR | os.O_CREAT)
    first, second = os.memfd_create("first"), os.memfd_create("second")
    os.write(first, b"1")
    os.write(second, b"22")
    assert one.become({"serial": 3}, {"table": first, "log": rotated, "fuse": second})
    assert one.process.wait(30) == 0
    launch = json.loads(said(rotated).removeprefix("became "))
    assert launch["serial"] == 3
    assert sorted(launch["fds"]) == ["fuse", "table"]
    assert said(log) == "", "its output goes to the log that was handed over"
    for fd in (rotated, first, second):
        os.close(fd)


def test_one_that_is_faster_than_the_keeper_is_the_server(
    log: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the message and closed its end before the keeper goes on."""

    def send(*arguments: Any) -> int:
        sent = honest(*arguments)
        os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
        return sent

    honest = socket.send_fds
    one = begin(CHILD, log)
    eventually(lambda: not one.is_coming())
    monkeypatch.setattr(socket, "send_fds", send)
    assert one.become({}, {"log": log})
    assert one.process.wait(30) == 0
    assert said(log).startswith("became ")


def test_descriptors_are_those_of_their_names() -> None:
    ours, theirs = socket.socketpair()
    made = {name: os.memfd_create(name) for name in ("table", "fuse")}
    for name, fd in made.items():
        os.write(fd, name.encode())
    out = {number: os.dup(number) for number in (1, 2)}
    log = os.memfd_create("log")
    line = json.dumps({"launch": {"a": 1}, "fds": [*made, "log"]}).encode() + b"\n"
    with ours:
        # In two pieces: descriptors come with the first.
        socket.send_fds(ours, [line[:9]], [*made.values(), log])
        ours.sendall(line[9:])
        try:
            launch = json.loads(spare.wait(theirs.detach()) or "")
        finally:
            for number, fd in out.items():
                os.dup2(fd, number)
                os.close(fd)
    assert launch["a"] == 1
    assert {name: os.pread(fd, 99, 0).decode() for name, fd in launch["fds"].items()} == {
        name: name for name in made
    }
    for fd in (log, *made.values(), *launch["fds"].values()):
        os.close(fd)


def test_one_that_has_died_becomes_nothing(log: int) -> None:
    one = begin(CHILD, log)
    eventually(lambda: not one.is_coming())
    os.kill(one.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, one.process.pid, os.WEXITED | os.WNOWAIT)
    assert not one.become({}, {"log": log})
    assert one.process.returncode == -signal.SIGKILL, "it is reaped"


def test_one_that_dies_while_it_imports_is_not_coming(log: int) -> None:
    one = begin("raise SystemExit(3)", log)
    eventually(lambda: not one.is_coming())
    assert not one.become({}, {"log": log})
    assert one.process.returncode == 3


def test_patience_ends(log: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one = begin("import time; time.sleep(600)", log)
    assert one.is_coming()
    late_s = time.monotonic() + 31
    monkeypatch.setattr(time, "monotonic", lambda: late_s)
    assert not one.is_coming()
    one.end()
    assert one.process.returncode == -signal.SIGKILL


def test_the_end_of_the_keeper_is_its_end(log: int) -> None:
    one = begin(CHILD, log)
    eventually(lambda: not one.is_coming())
    one._socket.close()
    assert one.process.wait(30) == 0
    assert said(log) == "None\n"


@pytest.mark.parametrize("sent", [b"", b'{"launch": {}, '])
def test_no_whole_message_is_none(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.sendall(sent)
        ours.shutdown(socket.SHUT_WR)
        assert spare.wait(theirs.detach()) is None
        assert ours.recv(9) == b"\n"
