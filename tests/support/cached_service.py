"""`fusecache cached` as a process of its own, and raw clients of it.

Its directory and its socket lie where every user may come, as in an installation. It ends with the
test, by its process id; and with this process, if that is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusecache import _native
from fusecache.base.digest import digest
from fusecache.base.wire import Frame, WireError, peer_of
from fusecache.cached.group import BLAKE3, name_of, set_of
from fusecache.cached.talk import FINDS_MOST, Channel, Found, unpack_found
from fusecache.store.types import BLOCK_BYTES, Location
from tests.support import PATIENCE_S
from tests.support.mounted import COMMAND, ROOT, environment, eventually

_BAD_LINE = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^Traceback")


def blocks_of(path: Path) -> list[bytes]:
    data = path.read_bytes()
    return [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]


def name(block: bytes) -> bytes:
    """Its digest."""
    return digest(BLAKE3, block)


def set_for(files: Sequence[Path]) -> bytes:
    """The set of the group that these files are."""
    return set_of(b"".join(name(block) for path in files for block in blocks_of(path)))


class CachedService:
    """`with` it: it runs. Several lives: `kill`, `start`."""

    def __init__(
        self,
        *flags: str,
        uid: int = 0,
        program: Sequence[str] = COMMAND,
        env: dict[str, str] | None = None,
    ) -> None:
        """`program`, `env`: of another `uid`, who may not read this checkout."""
        self.base = Path(tempfile.mkdtemp(prefix="fusecache-cached-test-"))
        self.base.chmod(0o755)
        (self.base / "run").mkdir()
        os.chown(self.base / "run", uid, uid)
        self.root, self.socket = self.base / "run/dir", self.base / "run/socket"
        self.log_file = self.base / "log"
        self.allow_log: list[str] = []
        self._env = env or environment()
        user = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        self._words = [
            *("setpriv", "--pdeathsig", "KILL", *user, *program, "cached"),
            *("--dir", str(self.root), "--socket", str(self.socket), "--keep-free", "0", *flags),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def groups(self) -> list[Path]:
        """The folders of whole groups."""
        folders = [entry for entry in self.root.iterdir() if entry.is_dir()]
        return sorted(entry for entry in folders if not entry.name.startswith("."))

    @property
    def segments(self) -> list[Path]:
        return sorted(self.root.glob("*/store/segments/*.seg"))

    def held_bytes(self) -> int:
        """Of the disk, as `du` counts them."""
        total = 0
        for top, _, names in os.walk(self.root):
            for entry in names:
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(top, entry)).st_blocks * 512
        return total

    def start(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._words, env=self._env, cwd="/", stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip
        eventually(self._answers, every_s=0.02)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None or self._ended()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(str(self.socket))
            return peer_of(connection).pid == self.pid

    def _ended(self) -> bool:
        raise RuntimeError(f"fusecache cached has ended: {self.log()}")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        """Until `go_on`."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def __enter__(self) -> CachedService:
        try:
            self.start()
        except BaseException:
            self._destroy()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is not None:
                sys.stderr.write(f"log of the service:\n{self.log()[-4000:]}")
                return
            assert self._process is not None
            if self._process.poll() is None:
                self._process.terminate()
                assert self._process.wait(PATIENCE_S) == 0, self.log()
            lines = filter(_BAD_LINE.search, self.log().splitlines())
            bad = [one for one in lines if not any(re.search(a, one) for a in self.allow_log)]
            assert not bad, f"{bad}\n{self.log()[-3000:]}"
        finally:
            self._destroy()

    def _destroy(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.base)

    # ---- raw clients -----------------------------------------------------------------------------

    def client(self, uid: int = 0) -> Client:
        """Of that user; the process is this one. No other thread may look at files meanwhile."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(PATIENCE_S)
        os.seteuid(uid)
        try:
            connection.connect(str(self.socket))
        finally:
            os.seteuid(0)
        return Client(connection)


class Client:
    """Says to the service whatever a test wants."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.channel = Channel(connection, PATIENCE_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def ask(self, type_: str, data: bytes = b"", **fields: Any) -> Frame:
        self.channel.send(type_, data, **fields)
        received = self.channel.receive()
        assert received is not None, "the service has closed the connection"
        frame, descriptor = received
        assert descriptor < 0
        return frame

    def is_closed(self) -> bool:
        """By the service; waits for that."""
        try:
            return self.channel.receive() is None
        except (ConnectionError, WireError):
            return True

    def join(self, group: bytes) -> bool:
        """The group of that name. False: there is none."""
        return self.ask("group", name=group).fields.bool("known")

    def make(self, digests: bytes, group: bytes | None = None) -> str:
        """The group of that set, and join it; why not, if not."""
        wanted = group or name_of(digests)
        begun = self.ask("make", name=wanted, count=len(digests) // 32)
        if begun.type == "ok":
            self.channel.send_bytes(memoryview(digests))
            received = self.channel.receive()
            assert received is not None
            begun = received[0]
        if begun.type == "refused":
            return begun.fields.str("why", 1000)
        assert self.join(wanted)
        return ""

    def find(
        self, names: Sequence[bytes], lengths: Sequence[int], promise: bool = False
    ) -> list[Found]:
        found: list[Found] = []
        while len(found) < len(names):
            some = slice(len(found), len(found) + FINDS_MOST)
            packed = b"".join(length.to_bytes(4, "little") for length in lengths[some])
            answer = self.ask(
                "find", digests=b"".join(names[some]), lengths=packed, promise=promise
            )
            assert answer.type == "found"
            found += unpack_found(answer.fields.bytes("at", 1 << 20), lengths[some])
        return found

    def put(self, block: bytes, under: bytes | None = None) -> bool:
        """Whether the service has taken it."""
        names, lengths = under or name(block), len(block).to_bytes(4, "little")
        answer = self.ask("put", block, digests=names, lengths=lengths)
        return unpack_found(answer.fields.bytes("at", 64), [len(block)])[0].at is not None

    def segment(self, segno: int) -> int:
        """A descriptor, the caller's; -1: it is gone."""
        self.channel.send("segment", segno=segno)
        received = self.channel.receive()
        assert received is not None
        frame, descriptor = received
        assert frame.type == ("ok" if descriptor >= 0 else "gone")
        return descriptor

    def read(self, at: Location) -> bytes:
        """The record's payload, verified."""
        descriptor = self.segment(at.segno)
        assert descriptor >= 0
        try:
            return bytes(
                _native.read_record(descriptor, at.offset, at.header_len, at.payload_len, at.segno)
            )
        finally:
            os.close(descriptor)


def with_constants(directory: Path, role: str, **constants: float) -> dict[str, str]:
    """The environment of a process, for `fusecache.server` or `cached` (`role` is among its words),
    in which these constants of fusecache (`cached__client__AGAIN_S=0.2`) have other values.
    """
    directory.mkdir()
    lines = [f"import sys\nif {role!r} in sys.orig_argv:\n    import importlib\n"]
    for key, value in constants.items():
        *modules, constant = key.split("__")
        module = ".".join(["fusecache", *modules])
        lines.append(f"    importlib.import_module({module!r}).{constant} = {value!r}\n")
    (directory / "sitecustomize.py").write_text("".join(lines))
    return environment(PYTHONPATH=f"{ROOT}{os.pathsep}{directory}")
