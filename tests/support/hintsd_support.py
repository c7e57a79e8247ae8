"""A hintsd in a thread of the test, with a Director that only takes notes; one in a process of its
own; and clients of both."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import trio

from fusecache.base import mounts, wire
from hintsd.daemon import server
from hintsd.daemon.datasets import Guest
from hintsd.daemon.journal import Journal
from hintsd.daemon.messages import JobRefused, Sampled
from hintsd.daemon.mount import JobInfo
from hintsd.daemon.server import Server
from hintsd.orders.hint import Hint
from hintsd.orders.spec import OrderSpec
from hintsd.users import public
from hintsd.users.public import Others
from tests.support import PATIENCE_S
from tests.support.commands import WithTorch

ANSWER_TIMEOUT_S = PATIENCE_S


class NotedDirector:
    """A Director without mounts; to its jobs, their mount. What it is told comes out of `told`, in
    order."""

    mountpoint = "/data"
    bits: bytes | None = None  # of what is cached
    fault: JobRefused | None = None  # of every job that is opened

    def __init__(self, **on: Any) -> None:
        self.on = on
        self.told: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.requests: dict[str, Hint] = {}
        self.uids: dict[str, int] = {}
        self.guests: dict[str, Guest | None] = {}
        self.refusal = ""
        self.is_slow = False
        self.asked = threading.Event()  # for its status

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def open_job(
        self,
        job: str,
        request: Hint,
        *,
        uid: int = 0,
        guest: Guest | None = None,
        resume_at: tuple[int, int] | None = None,
    ) -> JobInfo:
        self.uids[job], self.guests[job] = uid, guest
        self.told.put(("opening", job, resume_at))
        if self.is_slow:
            await trio.sleep_forever()
        if self.fault is not None:
            raise self.fault
        if self.refusal:
            raise JobRefused(self.refusal)
        if request.path == b"/broken":
            raise ZeroDivisionError
        self.requests[job] = request
        return JobInfo(cast(Any, self), samples_per_epoch=100, warnings=["old"])

    async def order(self, job: str, epoch: int, spec: OrderSpec) -> None:
        if epoch == 13:
            raise JobRefused("no 13th epoch")
        self.told.put(("order", job, epoch, spec.sampler))

    async def score(self, job: str, uses: npt.NDArray[np.float32], sampled: Sampled) -> None:
        if len(uses) == 13:
            raise JobRefused("13 scores")
        self.told.put(("scores", job, uses.tolist(), *sampled))

    async def cached(self, job: str, *, staged: bool) -> tuple[int, bytes]:
        if self.bits is None:
            raise JobRefused("no files")
        bits = self.bits[::-1] if staged else self.bits
        return 8 * len(bits) - 3, bits

    def next_chunk(self, job: str, chunks: int, unread: list[int]) -> int:
        if chunks == 13:
            raise JobRefused("no 13 chunks")
        self.told.put(("chunk", job, chunks, unread))
        return unread[-1]

    def step(self, job: str, epoch: int, batch: int) -> None:
        self.told.put(("step", job, epoch, batch))

    async def close_job(self, job: str) -> dict[str, Any]:
        self.requests.pop(job, None)
        self.told.put(("closed", job))
        return {"name": job, "state": "running", "not_late": 7}

    def status(self) -> dict[str, Any]:
        self.asked.set()
        jobs = [
            {"name": job, "state": "running", "uid": self.uids[job], "mountpoint": self.mountpoint}
            for job in self.requests
        ]
        places = (self.mountpoint, "/more") if jobs else ()
        mounts = [{"mountpoint": place, "connected": True} for place in places]
        return {"mounts": mounts, "jobs": jobs}

    def next(self, kind: str) -> tuple[Any, ...]:
        """The next thing it is told of this kind."""
        while True:
            told = self.told.get(timeout=ANSWER_TIMEOUT_S)
            if told[0] == kind:
                return told[1:]


class Daemon:
    """A Server in a thread. `kill` leaves its journal as a SIGTERM does."""

    def __init__(self, directory: Path, others: Others | None = None) -> None:
        """`others`: who is served at `public`, too."""
        self.path = str(directory / "hintsd.sock")
        self.public = mounts.public_socket(self.path)
        self._others = others
        self.jobs = directory / "jobs"
        self.director: NotedDirector
        self._ready = threading.Event()
        self._journal = Journal(str(self.jobs))
        self._thread = threading.Thread(target=trio.run, args=(self._run,))
        self._thread.start()
        assert self._ready.wait(ANSWER_TIMEOUT_S)

    async def _run(self) -> None:
        def open_director(**on: Any) -> Any:
            self.director = NotedDirector(**on)
            return self.director

        at = None if self._others is None else public.listen(self.path, self._others)
        self.server = Server(server.listen(self.path), self._journal, open_director, at)
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            self._token = trio.lowlevel.current_trio_token()
            await nursery.start(self.server.run)
            self._ready.set()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it in the server's thread."""
        return trio.from_thread.run_sync(
            functools.partial(function, *arguments), trio_token=self._token
        )

    def kill(self) -> None:
        if self._thread.is_alive():
            self.call(self._scope.cancel)
            self._thread.join(ANSWER_TIMEOUT_S)
            assert not self._thread.is_alive()
            self._journal.close()

    def files(self) -> set[str]:
        return {path.name for path in self.jobs.iterdir()} - {"lock", "number"}


class DaemonProcess:
    """A hintsd process on real mounts, as often as it is started."""

    def __init__(self, base: Path, *flags: str, is_forked: bool = True) -> None:
        """`is_forked`: from what has imported torch. Else it is what users have."""
        self._popen = WithTorch if is_forked else subprocess.Popen
        self.path = str(base / "sock")
        self._flags = flags
        self._ready = str(base / "ready")
        self._log = base / "hintsd.log"
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as ready:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._ready)
            ready.bind(self._ready)
            ready.settimeout(ANSWER_TIMEOUT_S)
            flags = ["--socket", self.path, "--log-file", str(self._log), *self._flags]
            self.process = self._popen(
                [sys.executable, "-m", "hintsd", "serve", *flags],
                env={**os.environ, "NOTIFY_SOCKET": self._ready},
            )
            assert ready.recv(100) == b"READY=1"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def jobs(self) -> list[str]:
        return [job["name"] for job in self._jobs()]

    def job(self, name: str) -> dict[str, Any]:
        """What its status says of this job. KeyError: there is none of that name."""
        return {job["name"]: job for job in self._jobs()}[name]

    def status(self) -> dict[str, Any]:
        with contextlib.closing(Client(self.path)) as client:
            return client.ask("status")

    def _jobs(self) -> list[dict[str, Any]]:
        jobs: list[dict[str, Any]] = self.status()["jobs"]
        return jobs


def resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


class Client:
    """One connection."""

    def __init__(self, path: str, *, greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(ANSWER_TIMEOUT_S)
        self.socket.connect(path)
        self._decoder = wire.Decoder()
        self._frames: list[wire.Frame] = []
        if greet:
            assert self.ask("hello", version=1)["version"] == 1

    def send(self, kind: str, **fields: Any) -> None:
        self.socket.sendall(wire.encode(kind, fields))

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.send(kind, **fields)
        return self.receive().fields.raw()

    def receive(self) -> wire.Frame:
        while not self._frames:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def rest(self) -> list[wire.Frame]:
        """All until the daemon closes the connection."""
        frames = []
        with contextlib.suppress(EOFError):
            while True:
                frames.append(self.receive())
        return frames

    def job(self, **changes: Any) -> dict[str, Any]:
        return self.ask("job", **{**JOB, **changes})

    def close(self) -> None:
        self.socket.close()


JOB: dict[str, Any] = {
    "path": b"/data/set",
    "files": {"rule": "imagefolder", "extensions": [".jpg"], "allow_empty": False},
    "check": None,
    "spec": {"sampler": "random", "seed": 0},
    "epochs": 3,
    "start_epoch": 0,
    "start_batch": 0,
    "workers": 0,
    "prefetch_factor": 0,
    "name": "train.py",
    "detached": False,
    "pid": None,
    "resume": None,
}
