"""Frames that no client of ours sends: to hintsd, to a mount's plan channel, and to its sockets of
lines; and many more to the code that decodes them, without a socket.

The daemons must go on: the same process, other clients served, the mount's bytes right.
"""

import contextlib
import json
import os
import random
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from fusecache.base import mounts, wire
from hintsd.daemon import messages
from tools.campaign_lib.ground import Count, Ground
from tools.hintsd_command import HintsdCommand

FRAMES_A_CONNECTION = 32
DECODED_A_ROUND = 20_000
CONNECTIONS_A_ROUND = 40
PATIENCE_S = 60.0
_FILES = 200

Say = tuple[str, dict[str, Any]]


def _inos(rng: random.Random) -> bytes:
    return np.array([rng.randrange(1 << 32) for _ in range(rng.randrange(40))], np.uint32).tobytes()


def _hints(rng: random.Random, path: Path) -> Say:
    """A message as a trainer might send."""
    spec = {"sampler": "random", "length": rng.choice([0, 10, 200, 1 << 40]), "seed": 1}
    job = {
        "path": os.fsencode(path),
        "files": {"rule": "imagefolder", "extensions": [".jpg"], "allow_empty": False},
        "check": None,
        "spec": spec,
        "epochs": rng.choice([None, 1, 1 << 30]),
        "start_epoch": 0,
        "start_batch": 0,
        "workers": 2,
        "prefetch_factor": 2,
        "name": "fuzz",
        "detached": False,
        "pid": None,
    }
    data = rng.randbytes(rng.randrange(2000))
    says: list[Say] = [
        ("hello", {"version": 1}),
        ("job", job),
        ("array", {"name": "a", "total": len(data), "offset": 0, "data": data}),
        ("order", {"epoch": rng.randrange(3), "spec": spec}),
        ("order", {"epoch": 0, "spec": {"sampler": "indices", "indices": {"array": "a"}}}),
        ("step", {"epoch": 0, "batch": rng.randrange(100)}),
        ("status", {}),
        ("end", {"job": "fuzz-1"}),
        ("close", {}),
    ]
    return rng.choice(says)


def _plan(rng: random.Random, path: Path) -> Say:
    """A message as hintsd might send to a mount."""
    inos = _inos(rng)
    chunk = {"epoch": 0, "chunks": 2, "bytes": 1 << 20, "samples": 8, "buffer": 65_536}
    pack = {"first": 0, "lengths": np.array([4, 4], np.uint32).tobytes(), "last": True}
    says: list[Say] = [
        ("list", {"path": b"class1"}),
        ("stage", {"inos": inos, "store": bytes(len(inos) // 4)}),
        ("fetch", {"inos": inos}),
        ("cancel", {"inos": inos}),
        ("drop", {"inos": inos}),
        ("arm", {"inos": inos}),
        ("pack", {**chunk, **pack, "inos": bytes(range(1, 33))}),
        ("clear", {}),
        ("passed", {"recording": 1, "job": "x", "position": 0, "samples": 9, "inos": inos}),
    ]
    return rng.choice(says)


_ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1 << 31, 1 << 32, 1 << 62, -(1 << 62), 1.5, float("nan")),
    *("", "x" * 5000, b"", bytes(3), bytes(70_000), [], [[]], [0] * 4096, {}, {"a": {"b": {}}}),
)


def _mutated(say: Say, rng: random.Random) -> bytes:
    """One frame, changed in a random way; now and then not at all."""
    kind, fields = say
    way = rng.randrange(8)
    if way == 0:
        kind = rng.choice(["", "x" * 40, "status", "error", "done", kind.upper()])
    elif way in (1, 2, 3) and fields:
        fields = dict(fields)
        name = rng.choice(sorted(fields))
        if rng.random() < 0.3:
            del fields[name]
        else:
            fields[name] = rng.choice(_ODD)
    payload = bytearray(msgpack.packb([kind, fields]))
    if way in (4, 5):
        for _ in range(rng.randrange(1, 8)):
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    elif way == 6:
        payload = payload[: rng.randrange(len(payload) + 1)]
        payload += rng.randbytes(rng.randrange(20))
    length = len(payload)
    if rng.random() < 0.02:
        length = rng.choice([0, 1, length + 1, wire.FRAME_BYTES_MOST + 1, 0xFFFFFFFF])
    return struct.pack("<I", length) + bytes(payload)


def _decode_many(rng: random.Random, path: Path, count: Count) -> None:
    """Frames to the code that takes them apart, as fast as it goes."""
    for _ in range(DECODED_A_ROUND):
        data = _mutated(rng.choice([_hints, _plan])(rng, path), rng)
        count.tried["frames decoded"] += 1
        try:
            for frame in wire.Decoder().feed(data):
                if frame.type == "job":
                    messages.hint(frame.fields, messages.Arrays())
                elif frame.type == "array":
                    messages.Arrays().add(frame.fields)
        except (wire.WireError, ValueError):
            pass
        except Exception as error:
            count.failed("decoding", f"{data[:200]!r}: {error!r}")


def _talk(connection: socket.socket, frames: list[bytes]) -> int:
    """Send, and read until the other end says no more; how many were sent before it hung up."""
    sent = 0
    with contextlib.suppress(OSError):
        for frame in frames:
            connection.sendall(frame)
            sent += 1
        connection.shutdown(socket.SHUT_WR)
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass
    return sent


def _to_hintsd(address: Path, ground: Ground) -> int:
    rng = ground.rng
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(address))
        frames = [wire.encode("hello", {"version": 1})]
        frames += [
            _mutated(_hints(rng, ground.mountpoint), rng) for _ in range(FRAMES_A_CONNECTION)
        ]
        return _talk(connection, frames)


def _runtime(ground: Ground) -> str:
    mount = mounts.at(str(ground.mountpoint))
    directory = mounts.runtime_directory(mount) if mount is not None else None
    if directory is None:
        raise RuntimeError("the mount has no runtime directory")
    return directory


def _to_mount(ground: Ground) -> int:
    rng = ground.rng
    with mounts.connect(_runtime(ground), mounts.CONTROL_SOCKET, PATIENCE_S) as connection:
        connection.sendall(b'{"op": "plan", "version": 1}\n')
        connection.recv(65536)
        frames = [_mutated(_plan(rng, ground.mountpoint), rng) for _ in range(FRAMES_A_CONNECTION)]
        return _talk(connection, frames)


def _lines(ground: Ground) -> int:
    """Requests of one line, to the server and to the keeper; none that would unmount."""
    rng = ground.rng
    name = rng.choice([mounts.CONTROL_SOCKET, mounts.KEEPER_SOCKET])
    say = rng.choice([{"op": "status"}, {"op": "info"}, {"op": "plan", "version": 9}, {"op": "x"}])
    line = bytearray(json.dumps(say).encode())
    for _ in range(rng.randrange(6)):
        line[rng.randrange(len(line))] ^= 1 << rng.randrange(8)
    if b"umount" in line or b"restart" in line:
        return 0
    with mounts.connect(_runtime(ground), name, PATIENCE_S) as connection:
        return _talk(connection, [bytes(line) + b"\n"])


def run(work: Path, rng: random.Random, until: float, count: Count) -> None:
    """Until the monotonic time `until`; at least one round."""
    ground = Ground(work, rng, _FILES, 10_000)
    with HintsdCommand(work) as hintsd, ground.mounted("--ssd", "64M", "--ram", "32M") as mount:
        ground.fill(mount)
        mount.command("restart", str(ground.mountpoint), "--hintsd", str(hintsd.socket))
        server = mount.status()["server_pid"]
        targets: list[tuple[str, Callable[[], int]]] = [
            ("frames to hintsd", lambda: _to_hintsd(hintsd.socket, ground)),
            ("frames to the mount", lambda: _to_mount(ground)),
            ("lines to the mount", lambda: _lines(ground)),
        ]
        while True:
            _decode_many(rng, ground.mountpoint, count)
            for what, attack in targets:
                for _ in range(CONNECTIONS_A_ROUND):
                    try:
                        count.tried[what] += attack()
                    except OSError as error:
                        count.failed(what, error)
            ground.forget()
            ground.check_all(count, "while frames were fuzzed")
            if time.monotonic() > until:
                break
        if hintsd.is_running:
            hintsd.status()
        else:
            count.failed("hintsd died of a frame")
        if mount.status()["server_pid"] != server:
            count.failed("the server died of a frame")
