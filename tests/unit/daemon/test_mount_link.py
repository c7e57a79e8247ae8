"""The plan channel's client against a mount's end that the test plays."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import trio

from fusecache.base import mounts
from fusecache.base.disk.probe import Probe
from fusecache.base.wire_trio import FrameStream
from hintsd.daemon import mount_link
from hintsd.daemon.mount_link import (
    Done,
    Down,
    Event,
    Gone,
    LinkDown,
    LinkTree,
    MountLink,
    Seen,
    Up,
    relative,
)
from hintsd.orders import folders
from hintsd.reorder.packing import END

FACTS = {"identity": "a", "mountpoint": "/m", "source": "/s", "cache_dir": "/c", "ram_bytes": 5}
STATE = dict.fromkeys(mount_link._STATE_FIELDS, 1)


class Played:
    """The mount's end: each accepted connection with its hello answered."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.setblocking(False)
        self.is_mounted = True
        self.hello: dict[str, Any] = {"ok": True, "version": 1, "mount": FACTS}

        def connected(mountpoint: str) -> socket.socket:
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(path))
            return client

        def at(mountpoint: str) -> SimpleNamespace | None:
            return SimpleNamespace(is_fusecache=True) if self.is_mounted else None

        monkeypatch.setattr(mount_link, "_connected", connected)
        monkeypatch.setattr(mounts, "at", at)

    async def accept(self) -> FrameStream:
        return await self.answer(await self.asked())

    async def asked(self) -> trio.SocketStream:
        connection, _ = await trio.socket.from_stdlib_socket(self.listener.dup()).accept()
        stream = trio.SocketStream(connection)
        line = b""
        while not line.endswith(b"\n"):
            line += await stream.receive_some(1)
        knows = {"reclaimed": True, "owned": True}
        assert json.loads(line) == {"op": "plan", "version": 1, **knows}
        return stream

    async def answer(self, stream: trio.SocketStream) -> FrameStream:
        await stream.send_all(json.dumps(self.hello).encode() + b"\n")
        return FrameStream(stream)


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(tmp_path / "s", monkeypatch)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[MountLink, Callable[[], Any], trio.Nursery]]:
    send, receive = trio.open_memory_channel[Event](16)
    link = MountLink("/m", send)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(link.run)
            yield link, receive.receive, nursery
            nursery.cancel_scope.cancel()


def page(path: bytes, names: dict[bytes, tuple[int, int, int, int]], last: bool) -> dict[str, Any]:
    columns = np.array(list(names.values()), np.int64).reshape(-1, 4)
    kinds = (("inos", "u4"), ("sizes", "u8"), ("kinds", "u1"), ("stored", "u1"))
    return {
        "path": path,
        "error": None,
        "name_lengths": np.array([len(name) for name in names], "u2"),
        "names": b"".join(names),
        "last": last,
        **{name: columns[:, n].astype(kind) for n, (name, kind) in enumerate(kinds)},
    }


def test_what_is_said_of_logs(played: Played) -> None:
    probe = Probe(
        device=1,
        device_bytes=2,
        taken_at=3.0,
        sequential_bytes_per_s=4.0,
        write_bytes_per_s=5.0,
        mixed_bytes_per_s=6.0,
        random=((4096, 7.0),),
    )
    played.hello["mount"] = {**FACTS, "layout": "auto", "probe": {"of": "another version"}}
    played.hello["mount"]["pins"] = played.hello["mount"]["evicts"] = 1

    async def main() -> None:
        async with linked() as (_, event, _):
            server = await played.accept()
            up = await event()
            assert isinstance(up, Up)
            assert up.channel.facts[-4:] == ("auto", None, True, True)
            log = {"packing": 1, "log_written_bytes": 2, "log_segments": 3}
            await server.send("state", **STATE, **log, probe=probe.as_map())
            assert await event() == (
                {
                    **STATE,
                    **log,
                    "recording": 0,
                    "ssd_disk_full": 0,
                    "pins": 0,
                    "ssd_bytes_per_s": 0,
                },
                probe,
            )
            await up.channel.send("pack", np.empty(0, np.uint32), None, END)
            frame = await server.receive()
            assert frame is not None
            assert (frame.type, frame.fields.int("chunks", 0, 9)) == ("pack", 0)
            assert frame.fields.bool("last")

    trio.run(main)


def test_events_and_a_new_server(played: Played) -> None:
    async def main() -> None:
        async with linked() as (link, event, _):
            server = await played.accept()
            up = await event()
            assert isinstance(up, Up)
            assert up.channel.facts == ("a", "/m", "/c", 5, 0, "static", None, False, False)
            inos = np.array([1, 2], np.uint32)
            kinds = np.array([1, 2], np.uint8)
            await server.send(
                "seen", inos=inos, kinds=kinds, processes=inos + 7, parents=inos + 8, lost=3
            )
            await server.send("done", inos=inos, results=np.array([4, 5], np.uint8))
            await server.send("state", **STATE)
            seen, done = await event(), await event()
            assert isinstance(seen, Seen)
            assert seen.lost == 3
            assert list(seen.kinds) == [1, 2]
            assert list(seen.processes) == [8, 9]
            assert list(seen.parents) == [9, 10]
            assert isinstance(done, Done)
            assert list(done.results) == [4, 5]
            assert await event() == (
                STATE | {"recording": 0, "ssd_disk_full": 0, "pins": 0, "ssd_bytes_per_s": 0},
                None,
            )
            await up.channel.send("stage", inos, np.array([1, 0], np.uint8))
            await up.channel.send("clear", inos)
            frame, clear = await server.receive(), await server.receive()
            assert frame is not None
            assert frame.type == "stage"
            assert clear is not None
            assert list(frame.fields.array("store", "u1")) == [1, 0]
            assert clear.type == "clear"
            await server.aclose()
            assert isinstance(await event(), Down)
            server = await played.accept()
            again = await event()
            assert isinstance(again, Up)
            assert again.channel is not up.channel
            with pytest.raises(LinkDown):
                await up.channel.send("drop", inos)
            assert (await link.channel(1)) is again.channel

    trio.run(main)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("seen", {"inos": b"1234", "kinds": b"", "lost": 0}),
        ("done", {"inos": b"123", "results": b""}),
        ("state", {}),
        ("directory", page(b"", {}, True)),
        ("nonsense", {}),
        ("error", {"message": "no"}),
    ],
)
def test_nonsense_ends_the_channel(played: Played, kind: str, fields: dict[str, Any]) -> None:
    async def main() -> None:
        async with linked() as (_, event, _):
            server = await played.accept()
            assert isinstance(await event(), Up)
            await server.send(kind, **fields)
            assert isinstance(await event(), Down)
            await played.accept()
            assert isinstance(await event(), Up)

    trio.run(main)


def test_refused_and_gone(played: Played) -> None:
    async def main() -> None:
        played.hello = {"ok": False, "error": "busy"}
        async with linked() as (link, event, _):
            await played.accept()
            again = await played.asked()
            with pytest.raises(LinkDown, match="busy"):
                await link.channel(0)
            played.is_mounted = False
            await played.answer(again)
            assert isinstance(await event(), Gone)
            with pytest.raises(LinkDown, match="not mounted"):
                await link.channel(0)
            played.is_mounted, played.hello = True, {"ok": True, "mount": FACTS}
            await played.accept()
            assert isinstance(await event(), Up)

    trio.run(main)


TREE = {
    b"d": {b"b": (2, 0, 2, 0), b"a": (3, 0, 2, 0)},
    b"d/a": {b"2.jpg": (4, 40, 1, 1), b"1.jpg": (5, 50, 1, 0)},
    b"d/b": {b"below": (6, 0, 2, 0), b"x.txt": (7, 70, 1, 1)},
    b"d/b/below": {b"3.jpg": (8, 80, 1, 1)},
}


def test_tree_is_listed_ahead_and_survives_a_server(played: Played, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    asked: list[bytes] = []

    async def serve(server: FrameStream, most: int) -> None:
        while most and (frame := await server.receive()) is not None:
            path, most = frame.fields.bytes("path", 100), most - 1
            asked.append(path)
            entries = list(TREE[path].items())
            await server.send("directory", **page(path, dict(entries[:1]), False))
            await server.send("directory", **page(path, dict(entries[1:]), True))
        await server.aclose()

    async def main() -> None:
        async with linked() as (link, event, nursery):
            link.mountpoint = str(tmp_path)

            async def events() -> None:
                while True:
                    await event()

            async def servers() -> None:
                await serve(await played.accept(), 2)  # dies with listings unanswered
                await serve(await played.accept(), -1)

            nursery.start_soon(events)
            nursery.start_soon(servers)

            listed: list[bytes] = []

            def resolve() -> tuple[list[int], list[int]]:
                tree = LinkTree(link, b"d", nursery, listed)
                samples = folders.sample_files(tree, (".jpg",))
                return list(samples.inos), list(tree.where(samples.inos))

            assert await trio.to_thread.run_sync(resolve) == ([5, 4, 8], [0, 1, 1])
            assert listed[0] == b""
            assert sorted(b"d/" + path for path in listed[1:]) == sorted(set(asked) - {b"d"})
            assert sorted(set(asked)) == sorted(TREE)

    trio.run(main)


def test_listing_errors(played: Played) -> None:
    async def main() -> None:
        async with linked() as (link, event, nursery):
            server = await played.accept()
            await event()
            found: list[int | None] = []

            async def ask() -> None:
                try:
                    await link.list(b"x")
                except OSError as error:
                    found.append(error.errno)

            nursery.start_soon(ask)
            await server.receive()
            fields = {**page(b"x", {}, True), "error": "ESTALE: away"}
            await server.send("directory", **fields)
            while not found:
                await trio.sleep(0.001)
            assert found == [errno.ESTALE]

    trio.run(main)


def test_relative() -> None:
    assert relative(b"/m", b"/m") == b""
    assert relative(b"/m/a/b", b"/m") == b"a/b"
    assert relative(b"/mm", b"/m") is None
    assert relative(b"/a", b"/") == b"a"
