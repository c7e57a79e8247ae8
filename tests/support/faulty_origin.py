"""An origin that fails on command: a pyfuse3 pass-through file system, run as its own process.

It shows a backing directory read-only and applies *fault rules* to single operations. A rule is the
documented object `Fault`; rules and counters travel over a Unix socket, one JSON line each way. The
kernel caches nothing of it (time-outs 0, direct I/O), so that every look of fusecache at its source
is an operation here and is counted.

INVARIANT: without rules it shows what the backing directory holds.
It is not a stand-in for NFS: it has no caches and no close-to-open rules of its own.
"""

from __future__ import annotations

import dataclasses
import errno
import fnmatch
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support import PATIENCE_S
from tests.support.commands import WithTorch

SETTLED_S = 2.3  # what is younger, of an origin in user space, no mount keeps


@dataclasses.dataclass
class Fault:
    """One rule: what happens to operations of kind `op` on paths that match `path`.

    op: lookup, getattr, open, read, readdir, readlink, or * for all of them.
    path: shell pattern over the path below the backing directory ("" is the root); * matches / too.
    error: name of an errno to fail with, as "EIO"; "" for none.
    hang: wait until `FaultyOrigin.release` is called, then go on (with `error`, if any).
    delay_s: wait that long first.
    short: a read gives at most this many bytes of the file, as if it ended there; -1 for no limit.
    skip: the first `skip` matching operations pass; times: then so many are hit, -1 for all.
    """

    op: str
    path: str = "*"
    error: str = ""
    hang: bool = False
    delay_s: float = 0.0
    short: int = -1
    skip: int = 0
    times: int = -1

    def hits(self, op: str, path: str) -> bool:
        """Whether the rule applies to this operation now; counts `skip` and `times` down."""
        if self.times == 0 or self.op not in ("*", op) or not fnmatch.fnmatchcase(path, self.path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times > 0:
            self.times -= 1
        return True


class FaultyOrigin:
    """The test's side: starts the process, sends rules, always cleans up."""

    def __init__(
        self, backing: Path, mountpoint: Path, socket_path: Path, subtype: str = ""
    ) -> None:
        """`subtype`: the mount table calls it fuse.SUBTYPE, and inode numbers are the same in each
        life of the process; "": plain fuse, and numbers as they come.
        """
        self.backing, self.mountpoint, self._socket_path = backing, mountpoint, socket_path
        self._subtype = subtype
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FaultyOrigin:
        self._process = WithTorch(
            [
                *(sys.executable, "-m", __name__),
                str(self.backing),
                str(self.mountpoint),
                str(self._socket_path),
                self._subtype,
            ]
        )
        deadline = time.monotonic() + PATIENCE_S
        while not (self._socket_path.exists() and os.path.ismount(self.mountpoint)):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise AssertionError("the faulty origin did not start")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()  # closes /dev/fuse: every operation in flight ends with ENOTCONN
        self._process.wait()
        subprocess.run(
            ["umount", "-l", str(self.mountpoint)], capture_output=True, timeout=PATIENCE_S
        )

    def mount_again(self) -> None:
        """After `die`: off its place, and mounted there anew by another process."""
        self.take_off()
        self.__enter__()

    def take_off(self) -> None:
        """After `die`: nothing is mounted any more."""
        subprocess.run(["umount", "-l", str(self.mountpoint)], check=True, timeout=PATIENCE_S)
        self._socket_path.unlink(missing_ok=True)

    def die(self) -> None:
        """End the process: from now on every operation gives ENOTCONN."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _ask(self, **message: Any) -> Any:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(self._socket_path))
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as lines:
                return json.loads(lines.readline())

    def add(self, fault: Fault) -> None:
        self._ask(do="add", fault=dataclasses.asdict(fault))

    def clear(self) -> None:
        """Forget all rules and let go of what hangs."""
        self._ask(do="clear")

    def release(self) -> None:
        """Let go of everything that hangs now; the rules stay."""
        self._ask(do="release")

    def hanging(self) -> int:
        """How many operations hang at this moment."""
        return int(self._ask(do="hanging"))

    def renumber(self) -> None:
        """As if the kernel had dropped every inode of it: each file gets another number (st_ino)
        when it is looked at next, as with sshfs.
        """
        self._ask(do="renumber")

    def reset_counts(self) -> None:
        self._ask(do="reset")

    def count(self, op: str, path: str = "*") -> int:
        """Operations of kind `op` on matching paths since the last reset; "bytes": bytes read."""
        counts: dict[str, int] = self._ask(do="counts")
        total = 0
        for key, number in counts.items():
            kind, _, name = key.partition(" ")
            if kind == op and fnmatch.fnmatchcase(name, path):
                total += number
        return total


def serve(backing: str, mountpoint: str, socket_path: str, subtype: str) -> None:
    """The origin's process."""
    import pyfuse3
    import trio

    faults: list[Fault] = []
    counts: Counter[str] = Counter()
    held: set[trio.Event] = set()

    async def apply(op: str, path: str) -> int:
        """Runs the rules; returns the byte limit for a read, or -1."""
        counts[f"{op} {path}"] += 1
        limit = -1
        for fault in list(faults):
            if not fault.hits(op, path):
                continue
            if fault.delay_s:
                await trio.sleep(fault.delay_s)
            if fault.hang:
                event = trio.Event()
                held.add(event)
                try:
                    await event.wait()
                finally:
                    held.discard(event)
            if fault.error:
                raise pyfuse3.FUSEError(getattr(errno, fault.error))
            if fault.short >= 0:
                limit = fault.short
        return limit

    class Passthrough(pyfuse3.Operations):
        enable_writeback_cache = False

        def __init__(self) -> None:
            super().__init__()
            self.paths: dict[int, bytes] = {pyfuse3.ROOT_INODE: b""}
            self.numbers: dict[tuple[bytes, int], int] = {}
            self.opened: dict[int, str] = {}
            self.renumbered = 0

        def next_number(self, found: os.stat_result) -> int:
            if subtype:
                return found.st_ino + (self.renumbered << 40)
            return len(self.paths) + 1

        def full(self, path: bytes) -> bytes:
            return os.path.join(os.fsencode(backing), path) if path else os.fsencode(backing)

        def entry(self, path: bytes) -> pyfuse3.EntryAttributes:
            try:
                found = os.lstat(self.full(path))
            except OSError as error:
                raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
            # A node is a name and the file it led to: a replaced file becomes another node.
            key = (path, found.st_ino)
            number = pyfuse3.ROOT_INODE if not path else self.numbers.get(key)
            if number is None:
                number = self.numbers[key] = self.next_number(found)
                self.paths[number] = path
            entry = pyfuse3.EntryAttributes()
            for field in ("mode", "nlink", "uid", "gid", "rdev", "size", "blocks"):
                setattr(entry, f"st_{field}", getattr(found, f"st_{field}"))
            for field in ("atime", "mtime", "ctime"):
                setattr(entry, f"st_{field}_ns", getattr(found, f"st_{field}_ns"))
            entry.st_ino = pyfuse3.InodeT(number)
            entry.st_blksize = 4096
            entry.entry_timeout = entry.attr_timeout = 0
            return entry

        async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> Any:
            path = os.path.join(self.paths[parent], name)
            await apply("lookup", os.fsdecode(path))
            return self.entry(path)

        async def getattr(self, inode: int, ctx: Any = None) -> Any:
            path = self.paths[inode]
            await apply("getattr", os.fsdecode(path))
            return self.entry(path)

        async def open(self, inode: int, flags: int, ctx: Any = None) -> Any:
            path = self.paths[inode]
            await apply("open", os.fsdecode(path))
            try:
                descriptor = os.open(self.full(path), os.O_RDONLY | os.O_NOFOLLOW)
            except OSError as error:
                raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
            self.opened[descriptor] = os.fsdecode(path)
            return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(descriptor), direct_io=True)

        async def read(self, fh: int, off: int, size: int) -> bytes:
            path = self.opened[fh]
            limit = await apply("read", path)
            if limit >= 0:
                size = max(0, min(size, limit - off))
            data = os.pread(fh, size, off)
            counts[f"bytes {path}"] += len(data)
            return data

        async def release(self, fh: int) -> None:
            os.close(fh)

        async def readlink(self, inode: int, ctx: Any = None) -> Any:
            path = self.paths[inode]
            await apply("readlink", os.fsdecode(path))
            return os.readlink(self.full(path))

        async def opendir(self, inode: int, ctx: Any = None) -> Any:
            return pyfuse3.FileHandleT(inode)

        async def readdir(self, fh: int, start_id: int, token: Any) -> None:
            path = self.paths[fh]
            await apply("readdir", os.fsdecode(path))
            names = sorted(os.listdir(self.full(path)))
            for position, name in enumerate(names[start_id:], start_id + 1):
                try:
                    entry = self.entry(os.path.join(path, name))
                except pyfuse3.FUSEError:
                    continue
                if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), entry, position):
                    return

        async def statfs(self, ctx: Any = None) -> Any:
            found, answer = os.statvfs(backing), pyfuse3.StatvfsData()
            for field in (
                "bsize",
                "frsize",
                "blocks",
                "bfree",
                "bavail",
                "files",
                "ffree",
                "favail",
            ):
                setattr(answer, f"f_{field}", getattr(found, f"f_{field}"))
            return answer

    def release() -> None:
        for event in list(held):
            event.set()

    async def control(stream: trio.SocketStream) -> None:
        message = json.loads(await stream.receive_some(65536))
        answer: Any = True
        match message["do"]:
            case "add":
                faults.append(Fault(**message["fault"]))
            case "clear":
                faults.clear()
                release()
            case "release":
                release()
            case "hanging":
                answer = len(held)
            case "renumber":
                operations.numbers.clear()
                operations.renumbered += 1
            case "reset":
                counts.clear()
            case "counts":
                answer = counts
        await stream.send_all(json.dumps(answer).encode() + b"\n")
        await stream.aclose()

    async def run() -> None:
        listening = trio.socket.socket(trio.socket.AF_UNIX)
        await listening.bind(socket_path)
        listening.listen(16)
        async with trio.open_nursery() as nursery:
            listeners = [trio.SocketListener(listening)]
            nursery.start_soon(trio.serve_listeners, control, listeners)
            await pyfuse3.main(min_tasks=1, max_tasks=200)
            nursery.cancel_scope.cancel()

    options = {"fsname=faulty-origin", "default_permissions", "allow_other"}
    if subtype:
        options.add(f"subtype={subtype}")
    operations = Passthrough()
    pyfuse3.init(operations, mountpoint, options)
    trio.run(run)


if __name__ == "__main__":
    serve(*sys.argv[1:5])
