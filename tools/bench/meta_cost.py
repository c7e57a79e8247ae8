"""What the index of a log costs (docs/LOG.md; LCache's MetaIndex, III-C), without any disk.

Run as a process: `python -m tools.bench.meta_cost SAMPLES`. hintsd's planner makes the orders of
two epochs, cuts them into chunks and announces the log of the second; its frames go over a Unix
socket to a forked process that plays the mount: it decodes them and fills the index in C, as
reorder/packer.py does. Prints JSON: chunks; of hintsd, mount and both together cpu_s (of all
threads, from the first order to the opened log) and bytes (the peak above what was resident before:
modules, the sizes of all files, the mount's inode table).
"""

import json
import os
import resource
import socket
import stat
import struct
import sys
import tempfile
from typing import Any

import numpy as np
import torch

from fusecache import _native
from fusecache.base.wire import Decoder, encode
from hintsd.plan.layout import HOLD_S
from hintsd.plan.planner import MountPlanner
from tools.bench.planned import RAM_BYTES, mount_played, open_job, order_of

FILE_BYTES = 70_000
ALGORITHM = 1
_FIRST = 2  # inode 1 is the root
_COUNT_AT = 32  # of the highest inode number, in the header of the inode table (table/table.h)
_NODE_BYTES = 96
_NODES_AT = 4096
_MODE_AT = 56  # in a node


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident_bytes(what: str = "VmRSS") -> int:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(f"{what}:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("no such line")


class _Cost:
    """From now on."""

    def __init__(self) -> None:
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak begins anew
        self._resident_bytes = _resident_bytes()
        self._cpu_s = _cpu_s()

    def so_far(self) -> dict[str, float]:
        more_bytes = _resident_bytes("VmHWM") - self._resident_bytes
        return {"cpu_s": _cpu_s() - self._cpu_s, "bytes": more_bytes}


def _table(directory: str, samples: int) -> None:
    """An inode table of so many files of which nothing else is known, resident as a mount's is."""
    table_fd = os.memfd_create("table")
    source_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    _native.attach(table_fd, source_fd, True)
    node = bytearray(_NODE_BYTES)
    struct.pack_into("<I", node, _MODE_AT, stat.S_IFREG)
    nodes = bytes(node) * (1 << 16)
    end = _NODES_AT + _NODE_BYTES * (samples + _FIRST)
    for at in range(_NODES_AT + _FIRST * _NODE_BYTES, end, len(nodes)):
        os.pwrite(table_fd, nodes[: end - at], at)
    os.pwrite(table_fd, struct.pack("<I", samples + _FIRST - 1), _COUNT_AT)
    _native.log_survey()  # looks at every node


def _begin(chunks: int, buffer_bytes: int, directory: str) -> None:
    fds = [os.open(f"{directory}/{n}", os.O_RDWR | os.O_CREAT, 0o600) for n in range(chunks)]
    _native.log_begin(
        chunks,
        buffer_bytes,
        np.arange(1, chunks + 1, dtype=np.uint32).tobytes(),
        np.array(fds, np.int32).tobytes(),
        bytes(16),
        bytes(16),
        ALGORITHM,
        1 << 40,
    )


def _mount(connection: socket.socket, samples: int) -> None:
    decoder, chunks, assigned = Decoder(), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        _table(directory, samples)
        connection.sendall(b"!")
        cost = _Cost()
        while data := connection.recv(1 << 20):
            for frame in decoder.feed(data):
                fields = frame.fields
                if not chunks:
                    chunks = fields.int("chunks", 1, 1 << 16)
                    _begin(chunks, fields.int("buffer", 1, 1 << 30), directory)
                inos, start = fields.array("inos", np.uint32), 0
                lengths = fields.array("lengths", np.uint32).tolist()
                for chunk, length in enumerate(lengths, fields.int("first", 0, chunks)):
                    _native.log_assign(inos[start : start + length].tobytes(), chunk)
                    start += length
                assigned += start
                if fields.bool("last"):
                    _native.log_open()
        said = cost.so_far()
        some = (_FIRST, samples // 2, samples + _FIRST - 1)
        if chunks and not (assigned == samples and all(map(_native.log_wants, some))):
            raise RuntimeError(f"the log was told of {assigned} of {samples} samples")
    connection.sendall(json.dumps({"chunks": chunks, **said}).encode())


def _hintsd(connection: socket.socket, samples: int) -> dict[str, float]:
    inos = np.arange(_FIRST, samples + _FIRST, dtype=np.uint32)
    planner = MountPlanner(RAM_BYTES, 0)
    planner.set_layout("reorder", None)
    planner.learn(inos, np.full(samples, FILE_BYTES, np.uint64), np.ones(samples, np.uint8))
    open_job(planner, samples, epochs=3)
    cost = _Cost()
    order = order_of(samples)
    for epoch in range(2):
        planner.supply("job", epoch, inos[order.sequence(epoch)])
    is_open, now = False, 0.0
    while not is_open:
        packs = [c for c in planner.decide(now) if c.kind == "pack"]
        now += 0.1
        if (
            not packs and now > 2 * HOLD_S
        ):  # where the third epoch's order would help, it is awaited
            raise RuntimeError(f"nothing is packed: {planner.status('job').get('layout_why')}")
        for command in packs:
            assert command.fields is not None
            said = {
                key: value.tobytes() if isinstance(value, np.ndarray) else value
                for key, value in command.fields.items()
            }
            connection.sendall(encode("pack", said))
            is_open = bool(command.fields["last"])
    connection.shutdown(socket.SHUT_WR)
    return cost.so_far()


def main() -> None:
    samples = int(sys.argv[1])
    torch.set_num_threads(1)  # imported before anything is counted: it is not what is measured
    with mount_played(lambda connection: _mount(connection, samples)) as connection:
        if connection.recv(1) != b"!":
            raise RuntimeError("no mount")
        hintsd = _hintsd(connection, samples)
        with connection.makefile() as answer:
            mount: dict[str, Any] = json.load(answer)
    both = {key: hintsd[key] + mount[key] for key in hintsd}
    print(json.dumps({"chunks": mount["chunks"], "hintsd": hintsd, "mount": mount, "both": both}))


if __name__ == "__main__":
    main()
