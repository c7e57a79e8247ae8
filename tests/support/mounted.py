"""A real mount for a test: the commands, its processes, its log, and the certainty that it ends.

`Mount` runs `fusecache mount` as a user does (in a fork of what has imported it:
tests/support/commands.py) and is a context manager. Leaving it unmounts, and
fails the test when a process stays behind, or when the log has a WARNING or worse that the test did
not allow. A watchdog process, one for all of them, aborts the FUSE connection when a test hangs.

What tests know of the inside is what the commands print; only `status` is asked through the
commands' own client, because tests poll it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fusecache.base import mounts, processes
from fusecache.base.errors import UserError
from fusecache.control import control_client
from tests.support import PATIENCE_S, forking
from tests.support.commands import IMPORTABLE, Commands
from tests.support.watchdog import abort_mount

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "fusecache.cli.main")
WATCHDOG_S = 660.0  # more than a test may take (pyproject.toml)
_BAD_LINE = re.compile(
    r"\b(WARNING|ERROR|CRITICAL)\b|^Traceback|AddressSanitizer|Segmentation fault"
)
_KILLED = r"(?i)(killed|died|signal|SIGKILL|resum|re-?start|next server)"
_SLOW = r"the (index|cache) did not answer within"  # on a busy machine

_MS_REMOUNT = 32
_MOUNT_FLAGS = os.ST_RDONLY | os.ST_NOSUID | os.ST_NODEV  # as every mount has them
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")
live_mounts: list[Mount] = []
_commands = Commands()
_watches = itertools.count()


def environment(**extra: str) -> dict[str, str]:
    """The environment that makes this checkout's package importable from anywhere."""
    return {**os.environ, **IMPORTABLE, **extra}


def started() -> dict[str, str]:
    """For `Mount(env=…)`: keeper and server are started as users have them, not forked."""
    return environment(**{forking.EXEC: "1"})


def eventually(look: Callable[[], T], timeout_s: float = PATIENCE_S, every_s: float = 0.05) -> T:
    """Call `look` until it neither fails nor is False; at the deadline raise the last failure."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            value = look()
            if value is not False:
                return value
            failure: Exception = AssertionError(f"{look} stayed false for {timeout_s:g} s")
        except (AssertionError, OSError, KeyError) as error:
            failure = error
        if time.monotonic() > deadline:
            raise failure
        time.sleep(every_s)


def command(
    *arguments: str | Path,
    prefix: Sequence[str] = (),
    program: Sequence[str] = COMMAND,
    timeout_s: float = PATIENCE_S,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one `fusecache` command to its end; never raises for its exit code."""
    words = [str(argument) for argument in arguments]
    if not prefix and tuple(program) == COMMAND:
        return _commands.run(words, env or environment(), timeout_s)
    return subprocess.run(
        [*prefix, *program, *words],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=timeout_s,
        env=env or environment(),
        stdin=subprocess.DEVNULL,
        cwd="/",
    )


def without_patience(said: str) -> str:
    """What `fusecache mount` said, but not that it takes more than 10 s."""
    return re.sub("fusecache: still opening .*\n", "", said)


def errno_of(action: Callable[..., object], *arguments: Any) -> str:
    """The name of the errno that the call fails with, as "EIO"; "" when it does not fail."""
    try:
        action(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def digest(path: Path | str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    return processes.state(pid) not in ("", "Z", "X")


def children(pid: int) -> list[int]:
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def processes_of(mountpoint: Path, role: str = "") -> list[int]:
    """Keeper, server and spare of that mount, or the one of this role, as `ps` shows them; before
    they have a title, as they were started.
    """
    found = []
    title = re.compile(rb"fusecache: (keeper|server|spare) " + re.escape(os.fsencode(mountpoint)))
    setting = f'"mountpoint": {json.dumps(str(mountpoint))}'.encode()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            shown = Path(f"/proc/{entry}/cmdline").read_bytes().rstrip(b"\0")
            started = setting in shown and f"fusecache.{role}".encode() in shown
            has_title = title.fullmatch(shown)
            if started or (has_title and role in ("", has_title[1].decode())):
                found.append(int(entry))
    return found


def open_flags(pid: int, path: Path) -> list[int]:
    """Of each descriptor of the file that the process has."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{fd}") == str(path):
                info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text().split()
                found.append(int(info[info.index("flags:") + 1], 8))
    return found


def is_mounted(mountpoint: Path) -> bool:
    """By the mount table: looking at the mount point itself might hang."""
    escaped = re.sub(r"[ \t\n\\]", lambda m: f"\\{ord(m[0]):03o}", str(mountpoint))
    with open("/proc/self/mountinfo", errors="surrogateescape") as table:
        return any(line.split()[4] == escaped for line in table)


@functools.cache
def _watchdog() -> subprocess.Popen[bytes]:
    """This process's; it ends with it."""
    program = [sys.executable, "-I", "-S", str(ROOT / "tests/support/watchdog.py")]
    return subprocess.Popen(program, stdin=subprocess.PIPE, bufsize=0)


def _tell_watchdog(number: int, mountpoint: Path, seconds: float | None) -> None:
    told = _watchdog().stdin
    assert told is not None
    told.write(json.dumps([number, str(mountpoint), seconds]).encode() + b"\n")


@contextlib.contextmanager
def watched(mountpoint: Path, seconds: float = WATCHDOG_S) -> Iterator[None]:
    number = next(_watches)
    _tell_watchdog(number, mountpoint, seconds)
    try:
        yield
    finally:
        _tell_watchdog(number, mountpoint, None)


class Mount:
    """One `fusecache mount SOURCE MOUNTPOINT --cache-dir …`, from start to a checked end."""

    def __init__(
        self,
        source: Path,
        mountpoint: Path,
        cache_dir: Path,
        *flags: str,
        zero_open: bool = True,
        allow_log: Sequence[str] = (),
        prefix: Sequence[str] = (),
        program: Sequence[str] = COMMAND,
        env: dict[str, str] | None = None,
        log_file: Path | None = None,
    ) -> None:
        self.source, self.path, self.cache_dir = source, mountpoint, cache_dir
        self.flags, self.zero_open = list(flags), zero_open
        self.allow_log = [_SLOW, *allow_log]
        self.log_file = log_file or cache_dir.with_name(f"{cache_dir.name}.{mountpoint.name}.log")
        self.prefix, self.program, self.env = list(prefix), list(program), env
        self.keeper_pid = 0
        self._stack = contextlib.ExitStack()

    # ---- commands ------------------------------------------------------------------------------
    def run(
        self, *arguments: str | Path, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        return command(
            *arguments,
            prefix=self.prefix,
            program=self.program,
            timeout_s=timeout_s,
            env=self.env,
        )

    def mount_arguments(self) -> list[str]:
        mode = [] if self.zero_open else ["--no-zero-open"]
        return [
            *("mount", str(self.source), str(self.path), "--cache-dir", str(self.cache_dir)),
            *("--log-file", str(self.log_file), "--hintsd", "none", "--allow-empty"),
            *(*mode, *self.flags),
        ]

    def start(self) -> Mount:
        done = self.run(*self.mount_arguments())
        assert done.returncode == 0, f"mount failed ({done.returncode}): {done.stderr}{self.log()}"
        status = self.status()
        self.keeper_pid = int(status["keeper_pid"])
        assert status["zero_open"] is self.zero_open, "the mount chose another open mode"
        return self

    def status(self) -> dict[str, Any]:
        """As `fusecache status --json` prints it; by the same client, without a new process."""
        if not self.prefix:
            try:
                reply = control_client.ask(control_client.find(str(self.path)), {"op": "status"})
            except UserError as error:
                raise AssertionError(str(error)) from None
            found: dict[str, Any] = reply["status"]
            return found
        done = self.run("status", "--json", self.path)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def value(self, *keys: str) -> Any:
        """One figure of the status: value("reads", "from_origin")."""
        found: Any = self.status()
        for key in keys:
            found = found[key]
        return found

    def umount(self, *flags: str) -> None:
        done = self.run("umount", *flags, self.path)
        assert done.returncode == 0, f"umount: {done.stderr}{self._uses(done.stderr)}"
        self.wait_gone()

    def _uses(self, said: str) -> list[str]:
        """What the processes that are named (by their numbers in brackets) have open of it."""
        found = []
        for pid in re.findall(r"\((\d+)\)", said):
            for link in (Path("/proc", pid, "cwd"), *Path("/proc", pid).glob("fd/*")):
                with contextlib.suppress(OSError):
                    if mounts.is_below(what := os.readlink(link), str(self.path)):
                        found.append(f"{link}: {what}")
        return found

    def wait_gone(self) -> None:
        eventually(lambda: not is_mounted(self.path))
        eventually(lambda: not alive(self.keeper_pid))
        self.keeper_pid = 0

    def restart(self, *flags: str) -> None:
        before = self.server_pid()
        done = self.run("restart", self.path, *flags)
        assert done.returncode == 0, done.stderr
        eventually(lambda: self.server_pid() != before)

    # ---- processes -----------------------------------------------------------------------------
    def server_pid(self) -> int:
        return int(self.status()["server_pid"])

    def kill_server(self) -> int:
        """SIGKILL to the server that answers now; returns its pid."""
        self.allow_log.append(_KILLED)
        pid = self.server_pid()
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_servers_now(self) -> None:
        """SIGKILL to every child of the keeper, ready or still starting."""
        self.allow_log.append(_KILLED)
        for pid in children(self.keeper_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ---- kernel caches -------------------------------------------------------------------------
    def drop_pages(self) -> None:
        """Forget the pages of every file of the mount; names and attributes stay."""
        for directory, _, names in os.walk(os.fsencode(self.path)):
            for name in names:
                path = os.path.join(directory, name)
                if os.path.isfile(path) and not os.path.islink(path):
                    with contextlib.suppress(OSError):
                        drop_file(path)

    def drop_kernel_caches(self) -> None:
        """Forget pages, names and inodes of this mount (root only). Not by drop_caches: that is for
        all file systems, and other tests count READs. A remount, here with the flags that stand,
        drops a file system's unused names; a FUSE inode goes with its names, pages with the inode.
        """
        if _libc.mount(None, os.fsencode(self.path), None, _MS_REMOUNT | _MOUNT_FLAGS, None):
            raise OSError(ctypes.get_errno(), "remount", str(self.path))

    def read_until_stored(self, *names: str, blocks: int) -> None:
        """Read these files until the store holds `blocks` blocks: what is too young is not kept."""

        def look() -> None:
            for name in names:
                (self.path / name).read_bytes()
                drop_file(self.path / name)
            status = self.status()
            assert status["ssd"]["blocks"] >= blocks, repr(status)

        eventually(look, every_s=0.2)

    # ---- log -----------------------------------------------------------------------------------
    def log(self) -> str:
        try:
            return self.log_file.read_text(errors="replace")
        except OSError:
            return ""

    def unexpected_log_lines(self) -> list[str]:
        allowed = [re.compile(pattern) for pattern in self.allow_log]
        return [
            line
            for line in self.log().splitlines()
            if _BAD_LINE.search(line) and not any(pattern.search(line) for pattern in allowed)
        ]

    # ---- life ----------------------------------------------------------------------------------
    def __enter__(self) -> Mount:
        live_mounts.append(self)
        self._stack.enter_context(watched(self.path))
        try:
            return self.start()
        except BaseException:
            self.destroy()
            self._stack.close()
            raise

    def __exit__(self, kind: object, *_: object) -> None:
        with self._stack:
            if kind is not None:
                self.destroy()
                return
            try:
                if self.keeper_pid:
                    self.umount()
                assert not self.unexpected_log_lines(), self.unexpected_log_lines()
                eventually(lambda: not processes_of(self.path))
            finally:
                self.destroy()

    def destroy(self) -> None:
        """Whatever is left ends now: connection, mount, processes."""
        pids = {*children(self.keeper_pid), self.keeper_pid} if self.keeper_pid else set()
        pids.update(processes_of(self.path))
        abort_mount(str(self.path))
        deadline = time.monotonic() + 3
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        abort_mount(str(self.path))
        self.keeper_pid = 0


def drop_file(path: Path | str | bytes) -> None:
    """Drop the clean pages of one file from the kernel's cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
