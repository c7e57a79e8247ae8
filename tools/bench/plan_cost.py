"""What planning a large dataset costs hintsd: listing, index to file, order, first window.

Run as a process: `python -m tools.bench.plan_cost DIRECTORIES FILES`; prints "SECONDS BYTES": until
the first commands were decided, and the most memory that was resident meanwhile, in this process
and in torch's, which begins with the clock. The listings come
as frames over a Unix socket, as a mount's server sends them, from a forked process that invents
them; all else is hintsd's own code in the order in which daemon/mount.py calls it.
"""

import errno
import resource
import socket
import sys
import time

import numpy as np
import trio

from fusecache.base.wire import Decoder, Fields, encode
from hintsd.daemon.mount_link import LinkTree, MountLink
from hintsd.orders.folders import DIRECTORY, FILE, sample_files
from hintsd.orders.torch_process import TorchProcess
from hintsd.plan.planner import MountPlanner
from tools.bench.planned import RAM_BYTES, mount_played, open_job, order_of

PAGE = 8192
FILE_BYTES = 110_000
FIRST_FILE = 1 << 20  # inode numbers below are the directories'


def _page(path: bytes, first: int, names: list[bytes], size: int, kind: int, last: bool) -> bytes:
    count = len(names)
    return encode(
        "directory",
        {
            "path": path,
            "error": None,
            "inos": np.arange(first, first + count, dtype=np.uint32).tobytes(),
            "sizes": np.full(count, size, np.uint64).tobytes(),
            "kinds": np.full(count, kind, np.uint8).tobytes(),
            "stored": np.ones(count, np.uint8).tobytes(),
            "name_lengths": np.array([len(name) for name in names], np.uint16).tobytes(),
            "names": b"".join(names),
            "last": last,
        },
    )


def _serve(connection: socket.socket, directories: int, files: int) -> None:
    """The mount's end: a line with a path is answered by the pages of that directory."""
    lines = connection.makefile("rb")
    names = [b"n%08d_%07d.JPEG" % (0, number) for number in range(files)]
    for line in lines:
        path = line.rstrip(b"\n")
        if not path:
            classes = [b"n%08d" % number for number in range(directories)]
            connection.sendall(_page(path, 2, classes, 0, DIRECTORY, True))
            continue
        begin = FIRST_FILE + int(path[1:]) * files
        for at in range(0, files, PAGE):
            some = names[at : at + PAGE]
            page = _page(path, begin + at, some, FILE_BYTES, FILE, at + PAGE >= files)
            connection.sendall(page)


class _Link(MountLink):
    """Listings from the forked process."""

    def __init__(self, connection: socket.socket) -> None:
        self.mountpoint = "/"  # only symlinks would be looked up there
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        self._decoder = Decoder()
        self._turn = trio.Lock()

    async def list(self, path: bytes) -> list[Fields]:
        pages: list[Fields] = []
        async with self._turn:
            await self._stream.send_all(path + b"\n")
            while True:
                data = await self._stream.receive_some(1 << 20)
                if not data:
                    raise OSError(errno.EPIPE, "the listing process has ended")
                for frame in self._decoder.feed(data):
                    pages.append(frame.fields)
                    if frame.fields.bool("last"):
                        return pages


async def _plan(connection: socket.socket, torch: TorchProcess) -> int:
    torch.begin()
    link = _Link(connection)
    async with trio.open_nursery() as nursery:
        tree = LinkTree(link, b"", nursery, [])
        samples = await trio.to_thread.run_sync(sample_files, tree)
        nursery.cancel_scope.cancel()
    inos = samples.inos[order_of(len(samples), torch).sequence(0)]
    planner = MountPlanner(RAM_BYTES, 0)
    planner.learn(samples.inos, samples.sizes, tree.where(samples.inos))
    open_job(planner, len(inos), epochs=90)
    planner.supply("job", 0, inos)
    commands = planner.decide(0.0)
    if not any(command.kind == "stage" and len(command.inos) for command in commands):
        raise RuntimeError("nothing was planned")
    return len(inos)


def main() -> None:
    directories, files = int(sys.argv[1]), int(sys.argv[2])
    with mount_played(lambda connection: _serve(connection, directories, files)) as connection:
        torch = TorchProcess()
        begin = time.perf_counter()
        planned = trio.run(_plan, connection, torch)
        seconds = time.perf_counter() - begin
        most_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + torch.most_bytes()
        torch.end()
    if planned != directories * files:
        raise RuntimeError(f"{planned} samples were planned")
    print(seconds, most_bytes)


if __name__ == "__main__":
    main()
