"""One server process, as its keeper sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time

from fusecache.base import processes
from fusecache.keeper.mounting import Json
from fusecache.keeper.spare import Spare


def command() -> list[str]:
    # -P: the directory we are started in is no place to import from
    return [sys.executable, "-P", "-m", "fusecache.server"]


def package_environment() -> dict[str, str]:
    """What has to be in the environment for a child to find this package."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return {}
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part != root]
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, rest)])}


def environment() -> dict[str, str]:
    """Ours, without what is meant for the keeper alone."""
    others = {"_FUSE_COMMFD", *processes.FOR_US_ALONE}
    ours = {name: value for name, value in os.environ.items() if name not in others}
    return {**ours, **package_environment()}


def reason(code: int) -> str:
    if code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"ended with exit code {code}"


class Server:
    """One server process, from its start to its reaping."""

    def __init__(self, arguments: Json, fds: dict[str, int], stderr: int, spare: Spare | None):
        """Starts it, or has the spare become it. `fds` are its descriptors, besides its end of the
        ready pipe.
        """
        self.ready_fd, theirs = os.pipe2(os.O_CLOEXEC)
        fds = {**fds, "ready": theirs}
        try:
            if spare is not None and spare.become(arguments, {**fds, "log": stderr}):
                self.process = spare.process
            else:
                self.process = subprocess.Popen(
                    [*command(), json.dumps({**arguments, "fds": fds})],
                    pass_fds=list(fds.values()),
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    cwd="/",
                    env=environment(),
                    process_group=0,  # a Ctrl-C at the terminal is for the keeper
                )
        except BaseException:
            os.close(self.ready_fd)
            raise
        finally:
            os.close(theirs)
        self.pid = self.process.pid
        self.started = time.monotonic()
        self.ready_at: float | None = None
        self.report: Json | None = None
        self.watch = processes.Watch()
        self.is_condemned = False  # it was told to go, and why was logged
        self._received = b""
        self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self.pidfd = os.pidfd_open(self.pid)

    def take_report(self) -> Json | None:
        """Read what the ready pipe has; the report, when it has just become complete. What comes
        after it are signs of life.
        """
        data = os.read(self.ready_fd, 65536)
        if not data:
            os.close(self.ready_fd)
            self.ready_fd = -1
        if self.report is not None:
            self.watch.beat()
            return None
        self._received += data
        if data and b"\n" not in self._received:
            return None
        try:
            report = json.loads(self._received.split(b"\n")[0])
        except ValueError:
            report = None  # it died before it had anything to say
        if isinstance(report, dict):
            self.report = report
            if report.get("ready"):
                self.ready_at = time.monotonic()
        return self.report

    def has_reported(self) -> bool:
        """Whether something can be read from the ready pipe, be it its end."""
        if self.ready_fd < 0:
            return False
        poll = select.poll()
        poll.register(self.ready_fd, select.POLLIN)
        return bool(poll.poll(0))

    def state(self) -> str:
        """Its main thread's: see `processes.state`."""
        try:
            return processes.fields_of(os.pread(self._stat, 512, 0))[0].decode()
        except OSError:
            return "X"

    def is_dead(self) -> bool:
        """Whether the main thread has ended; other threads may still be stuck in the kernel.

        The next server must not wait for those: what they sleep on, only it can answer.
        """
        return self.state() in "ZX"

    def condemn(self) -> str:
        """Kill it because it must be replaced although it lives: why, said once. Else ""."""
        fault = "" if self.is_condemned else self.fault()
        if fault:
            self.is_condemned = True
            self.signal(signal.SIGKILL)
        return fault

    def fault(self) -> str:
        """Why it must be replaced although it lives, or ""."""
        return self.watch.look(self.state())

    def exit_code(self, wait_s: float) -> int | None:
        """None: threads of it are still there after `wait_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(wait_s)
        return None

    def lived_s(self) -> float:
        return 0.0 if self.ready_at is None else time.monotonic() - self.ready_at

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self.process.send_signal(number)

    def close(self) -> None:
        for fd in (self.ready_fd, self._stat, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.ready_fd = self._stat = self.pidfd = -1
