"""Holds a mount, so that a server may die at any moment without a reader noticing.

usage: python -m fusecache.keeper CONFIG_JSON [REPORT_FD]

The keeper opens the source directory, mounts, makes the inode table's memfd and the listening
control socket, and starts the server with all of them as inherited descriptors. When the server
dies the next one gets the same descriptors; the kernel repeats what the dead one had not answered.

Protocols, all one JSON object a line:

* to the server: argv[1] = {"config", "fds": {"fuse", "source", "table", "control", "ready"},
  "source_device", "source_identity", "keeper_pid", "restarts", "mounted_at", "resume", "planned"}
* from the server, on the ready descriptor: {"ready": true, "zero_open", "warnings", "logged"} or
  {"error", "exit"}; "logged" are warnings that are in the log already; then an empty line now and
  then (processes.Watch). It exits 0 when the mount is gone, and on SIGTERM
* to the CLI, on REPORT_FD: {"ready": true, "zero_open", "warnings", "device", "log"} or
  {"error", "exit"}; without REPORT_FD (--foreground) it goes to stderr, and to systemd if it asked
* keeper.sock: {"op": "info"}, {"op": "restart", "config"}, {"op": "umount", "lazy"}
  → {"ok": true, …} or {"ok": false, "error", "exit", "pids"?}

INVARIANT: stdlib, `mounts`, `mount_namespace`, `processes`, `spare` and `trust` only; what breaks
the server's imports cannot break the keeper.
INVARIANT: descriptors of the mount are open here until it is gone; no server's death ends it.
INVARIANT: at most one server lives, apart from threads of killed ones that are stuck in the kernel.
It is not on the path of any read, and knows nothing of the cache.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import json
import os
import platform
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from fusecache import mount_namespace, mounts, processes, trust
from fusecache.spare import Spare

MAX_READ_BYTES = 1 << 20
POLL_S = 0.025  # how long a dead main thread can stay unnoticed
FAULT_PAUSE_MAX_S = 1.0  # of the loop, when something in it fails again and again
LOOK_AROUND_S = 10.0  # how often the keeper looks who lives in its mount namespace
START_TIMEOUT_S = 900.0  # a first start may rebuild a large index
ANSWER_TIMEOUT_S = 30.0  # from ready to the first answered stat
FIRST_STARTS_MAX = 3
STABLE_S = 30.0  # a server that lived so long after ready is replaced without delay
KILLS_MAX, KILLS_WINDOW_S = 20, 10.0  # so many SIGKILLs are an administrator's, not a fault's
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 10.0
STOP_S = 2.0  # from SIGTERM to SIGKILL at a planned restart
END_S = 10.0  # the server's time to finish when the mount is gone
REQUEST_BYTES_MAX = 1 << 20
BUSY_RETRY_S, BUSY_RETRY_PAUSE_S = 1.0, 0.01
REQUEST_TIMEOUT_S = 2.0
CLIENTS_MAX = 32
CONTROL_BACKLOG = 64
RESEND_KERNEL = (6, 9)
EXIT_FAILED, EXIT_BUSY = 1, 4
# What the kernel was told at mount time, or what the table was made for.
FIXED_FOR_LIFE = ("source", "mountpoint", "allow_other", "zero_open", "noexec")

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_NOATIME = 1, 2, 4, 8, 1024
_MNT_FORCE, _MNT_DETACH = 1, 2
_UMOUNT_NOFOLLOW = 8

Json = dict[str, Any]


class KeeperError(Exception):
    """One line for the user; the keeper ends or refuses."""

    def __init__(self, line: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(line)
        self.exit_code = exit_code


# ---- mounting ------------------------------------------------------------------------------------


def _libc_call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount_as_root(config: Json) -> int:
    """mount(2) on a new /dev/fuse descriptor, which is returned. OSError."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = (
            f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},"
            f"default_permissions,max_read={MAX_READ_BYTES}"
        )
        if config["allow_other"]:
            options += ",allow_other"
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOATIME
        if config.get("noexec"):
            flags |= _MS_NOEXEC
        _libc_call(
            "mount",
            os.fsencode(mounts.source_field(config["source"])),
            os.fsencode(config["mountpoint"]),
            mounts.FILESYSTEM_TYPE.encode(),
            ctypes.c_ulong(flags),
            options.encode(),
        )
    except BaseException:
        os.close(fd)
        raise
    return fd


def mount_as_user(config: Json) -> int:
    """fusermount3 mounts, and sends the descriptor over the socket named in its environment."""
    program = shutil.which("fusermount3")
    if program is None:
        raise KeeperError("fusermount3 is not installed (Debian: apt install fuse3)")
    # fusermount3 splits at commas, and takes a backslash as an escape
    fsname = re.sub(rb"([,\\])", rb"\\\1", os.fsencode(mounts.source_field(config["source"])))
    options = (
        b"fsname=" + fsname + b",subtype=fusecache,ro,nosuid,nodev,noatime,default_permissions,"
        b"max_read=%d" % MAX_READ_BYTES
    )
    if config["allow_other"]:
        options += b",allow_other"
    if config.get("noexec"):
        options += b",noexec"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        result = subprocess.run(
            [program, b"-o", options, b"--", os.fsencode(config["mountpoint"])],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno()), "LC_ALL": "C"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        if result.returncode != 0:
            lines = os.fsdecode(result.stderr).strip().splitlines()
            raise KeeperError(
                lines[-1] if lines else f"fusermount3 failed with {result.returncode}"
            )
        ours.settimeout(5)
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    if not received:
        raise KeeperError("fusermount3 mounted but sent no descriptor")
    os.set_inheritable(received[0], False)
    return received[0]


def unmount(mountpoint: str, lazy: bool, abort: bool = False) -> None:
    """Take the topmost mount off `mountpoint`. OSError (EBUSY when it is in use and not `lazy`).
    `abort`: whoever waits for an answer gets an error, as far as we may.
    """
    if os.getuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0) | (_MNT_FORCE if abort else 0)
        _libc_call("umount2", os.fsencode(mountpoint), ctypes.c_int(flags))
        return
    program = shutil.which("fusermount3")
    if program is None:
        raise OSError(errno.ENOENT, "fusermount3 is not installed")
    result = subprocess.run(
        [program, "-u", *(["-z"] if lazy else []), "--", os.fsencode(mountpoint)],
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    if result.returncode != 0:
        line = (os.fsdecode(result.stderr).strip().splitlines() or ["fusermount3 failed"])[-1]
        raise OSError(errno.EBUSY if "busy" in line else errno.EPERM, line)


def users_of(mountpoint: str, leave_out: frozenset[int] = frozenset(), most: int = 20) -> list[int]:
    """Processes with a directory, file or mapping below `mountpoint` (of those we may look at)."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in leave_out:
            continue
        if _uses(f"/proc/{entry}", mountpoint):
            found.append(int(entry))
            if len(found) == most:
                break
    return found


def _uses(process: str, mountpoint: str) -> bool:
    links = [f"{process}/cwd", f"{process}/root", f"{process}/exe"]
    with contextlib.suppress(OSError):
        links += [f"{process}/fd/{name}" for name in os.listdir(f"{process}/fd")]
    for link in links:
        with contextlib.suppress(OSError):
            if mounts.is_below(os.readlink(link), mountpoint):
                return True
    with contextlib.suppress(OSError), open(f"{process}/maps", "rb") as maps:
        return b" " + os.fsencode(mountpoint).rstrip(b"/") + b"/" in maps.read()
    return False


def is_gone(fuse_fd: int) -> bool:
    """Whether the connection behind the descriptor has ended (unmounted or aborted)."""
    poll = select.poll()
    poll.register(fuse_fd, 0)
    return bool(poll.poll(0))


def abort_connection(device: str) -> None:
    """Whoever waits for an answer of this mount gets an error, if fusectl is mounted."""
    with contextlib.suppress(OSError):
        path = f"/sys/fs/fuse/connections/{device.partition(':')[2]}/abort"
        with open(path, "w", encoding="ascii") as file:
            file.write("1")


def answers(mountpoint: str, timeout_s: float) -> bool:
    """Whether stat and statvfs of the mount point return: asked in a child, since it could hang."""

    def look() -> str:
        os.stat(mountpoint)
        os.statvfs(mountpoint)
        return "yes"

    return processes.ask(look, timeout_s) == "yes"


# ---- servers -------------------------------------------------------------------------------------


def _command() -> list[str]:
    # -P: the directory we are started in is no place to import from
    return [sys.executable, "-P", "-m", "fusecache.server"]


def package_environment() -> dict[str, str]:
    """What has to be in the environment for a child to find this package."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.basename(root) in ("site-packages", "dist-packages"):
        return {}
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part != root]
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, rest)])}


def _environment() -> dict[str, str]:
    """Ours, without what is meant for the keeper alone."""
    ours = {k: v for k, v in os.environ.items() if k not in ("NOTIFY_SOCKET", "_FUSE_COMMFD")}
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
                    [*_command(), json.dumps({**arguments, "fds": fds})],
                    pass_fds=list(fds.values()),
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    cwd="/",
                    env=_environment(),
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

    def state(self) -> str:
        """Its main thread's: see `processes.state`."""
        try:
            return processes.letter(os.pread(self._stat, 512, 0))
        except OSError:
            return "X"

    def is_dead(self) -> bool:
        """Whether the main thread has ended; other threads may still be stuck in the kernel.

        The next server must not wait for those: what they sleep on, only it can answer.
        """
        return self.state() in "ZX"

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


# ---- the keeper ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Client:
    """A connection to keeper.sock: bytes so far, and when to give up on it."""

    connection: socket.socket
    deadline: float
    received: bytes = b""


@dataclass(slots=True)
class Restart:
    """A planned restart under way, and who asked for it."""

    client: socket.socket | None
    previous: Json  # the config to go back to if the new one is refused


class Keeper:
    def __init__(self, config: Json, report_fd: int | None) -> None:
        self.config = config
        self.report_fd = report_fd
        self.foreground = report_fd is None
        self.mounted_at = time.time()
        self.restarts = 0
        self.failures = 0
        self.kills: list[float] = []  # when servers died lately
        self.server: Server | None = None
        self.unreaped: list[Server] = []
        self.spare: Spare | None = None
        self.died_early = False  # the last server, before it was ready
        self.next_start: float | None = None
        self.restart: Restart | None = None
        self.stop_deadline: float | None = None
        self.detached = False
        self.clients: dict[int, Client] = {}
        self.farewells: list[socket.socket] = []
        self.signals: list[int] = []
        self.household = mount_namespace.Household()
        self.next_look_around = time.monotonic() + LOOK_AROUND_S
        self.device = ""  # of the mount; "" before it
        self.directory_fd = -1  # of the runtime directory; -1 before it
        self.log_begin = 0  # where the present server's part of the log begins
        self.resend = _kernel_version() >= RESEND_KERNEL

    # ---- log

    def log(self, level: str, line: str) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
        text = f"{stamp},{int(now * 1000) % 1000:03d} {level} fusecache.keeper: {line}\n"
        with contextlib.suppress(OSError):
            os.write(2, os.fsencode(text))

    def open_log(self) -> None:
        """Point stdout and stderr (ours, so the servers' too) at the log; rotate a large one."""
        if self.foreground and self.config.get("log_file") is None:
            return
        path = self.log_path
        try:
            fd = trust.open_log(path)
        except OSError as error:
            if self.server is None and self.restarts == 0:
                raise KeeperError(f"cannot write the log {path}: {error.strerror}") from None
            return
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    @property
    def log_path(self) -> str:
        return str(self.config.get("log_file") or os.path.join(self.directory, mounts.LOG_FILE))

    def last_words(self) -> str:
        """What the present server wrote last: mostly the exception that ended it. May be empty."""
        if self.foreground and self.config.get("log_file") is None:
            return ""
        try:
            fd = os.open(self.log_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                begin = max(self.log_begin, os.fstat(file.fileno()).st_size - 8192)
                file.seek(begin)
                lines = os.fsdecode(file.read()).splitlines()
        except OSError:
            return ""
        for line in reversed(lines):
            words = line.strip(" |+-")  # the frame that trio draws around nested exceptions
            if words and " fusecache.keeper: " not in words:
                return f"; its last words: {words}"
        return ""

    # ---- start

    def open_source(self) -> None:
        """Before mounting: the mount may hide it."""
        try:
            self.source_fd = os.open(
                self.config["source"], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            )
            device = os.fstat(self.source_fd).st_dev
            self.source_device = f"{os.major(device)}:{os.minor(device)}"
            mount = mounts.of_descriptor(self.source_fd, mounts.mounts())
            self.source_identity = mount and mounts.identity(self.config["source"], mount)
        except OSError as error:
            raise KeeperError(
                f"cannot open source {self.config['source']}: {error.strerror}"
            ) from None

    def mount(self) -> None:
        mountpoint = self.config["mountpoint"]
        doing = f"mount on {mountpoint}"
        try:
            with mounts.mounting():
                self.refuse_second(mounts.mounts())
                self.fuse_fd = (mount_as_root if os.getuid() == 0 else mount_as_user)(self.config)
                table = mounts.mounts()
                ours = [m for m in mounts.fusecaches_on(mountpoint, table) if m.uid == os.getuid()]
                if not ours:
                    line = f"mounted on {mountpoint}, but the kernel does not list it there"
                    raise KeeperError(line)
                self.device = ours[-1].device
                # another user's, who has a lock of his own, may have been faster by an instant
                self.refuse_second(table[: table.index(ours[-1])])
                doing = "make the runtime directory or the inode table"
                self.make_runtime_directory()
            self.table_fd = os.memfd_create("fusecache-table", os.MFD_CLOEXEC)
            self.open_log()
        except OSError as error:
            self.take_down()
            raise KeeperError(f"cannot {doing}: {error.strerror}") from None
        except KeeperError:
            self.take_down()
            raise

    def refuse_second(self, table: list[mounts.Mount]) -> None:
        mountpoint = self.config["mountpoint"]
        if mounts.fusecaches_on(mountpoint, table):
            line = f"mount point {mountpoint} is a fusecache already: another mount was faster"
            raise KeeperError(line, EXIT_BUSY)

    def make_runtime_directory(self) -> None:
        self.directory, self.directory_fd = mounts.make_runtime_directory(self.device)
        self.listener = mounts.listen(self.directory, mounts.KEEPER_SOCKET, 16)
        self.listener.setblocking(False)
        self.control = mounts.listen(self.directory, mounts.CONTROL_SOCKET, CONTROL_BACKLOG)

    def take_down(self) -> None:
        """Undo `mount` after a start that failed."""
        if self.device:
            abort_connection(self.device)  # a server's threads, or a reader, may wait for an answer
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                mounted = mounts.at(self.config["mountpoint"])
                if mounted is not None and mounted.device == self.device:
                    unmount(self.config["mountpoint"], lazy=True, abort=True)
        for name in ("fuse_fd", "table_fd"):
            fd = getattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
            setattr(self, name, -1)
        self.remove_runtime_directory()

    def remove_runtime_directory(self) -> None:
        for name in ("listener", "control"):
            listener = getattr(self, name, None)
            if listener is not None:
                listener.close()
        if self.directory_fd >= 0:
            mounts.remove_runtime_directory(self.directory, self.directory_fd)

    def keep_log_of_failure(self) -> str:
        """Where the log of a start that failed can be read, for the end of a line: the runtime
        directory goes away.
        """
        kept = self.log_path
        if self.config.get("log_file") is None:
            if self.foreground:
                return ""
            kept = os.path.join(os.path.dirname(self.directory), "last-failure.log")
            try:
                os.replace(self.log_path, kept)
            except OSError:
                return ""
        return f" (log: {kept})"

    def start_server(self, resume: bool) -> None:
        self.open_log()  # rotates
        self.log_begin = os.fstat(2).st_size
        fds = {
            "fuse": self.fuse_fd,
            "source": self.source_fd,
            "table": self.table_fd,
            "control": self.control.fileno(),
        }
        arguments: Json = {
            "config": self.config,
            "source_device": self.source_device,
            "source_identity": self.source_identity,
            "keeper_pid": os.getpid(),
            "restarts": self.restarts,
            "mounted_at": self.mounted_at,
            "resume": resume,
            "planned": self.restart is not None,
        }
        spare, self.spare = self.spare, None
        self.server = Server(arguments, fds, 2, spare)
        self.write_record()

    def write_record(self) -> None:
        record = {
            "keeper_pid": os.getpid(),
            "server_pid": self.server.pid if self.server else None,
            "mountpoint": self.config["mountpoint"],
            "source": self.config["source"],
            "restarts": self.restarts,
            "mounted_at": self.mounted_at,
            "log": self.log_path if self.config.get("log_file") or not self.foreground else None,
            "config": self.config,
        }
        path = os.path.join(self.directory, mounts.KEEPER_FILE)
        with contextlib.suppress(OSError):
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump(record, file)
            os.replace(path + ".new", path)

    def first_start(self) -> Json:
        """Mount and start; the server's report once the mount answers. KeeperError."""
        last = ""
        for attempt in range(1, FIRST_STARTS_MAX + 1):
            # Each attempt mounts afresh: the kernel says INIT once, and a dead server may have it.
            self.mount()
            if last:  # the log of the attempt before went with its runtime directory
                self.log("WARNING", f"start {attempt - 1} of {FIRST_STARTS_MAX} failed: {last}")
            try:
                self.start_server(resume=False)
                report = self.wait_ready()
                if report is not None and report.get("ready"):
                    if answers(self.config["mountpoint"], ANSWER_TIMEOUT_S):
                        return report
                    # another would do no better: this one has had ANSWER_TIMEOUT_S
                    line = "the server is ready, but the mount does not answer"
                    raise KeeperError(line + self.keep_log_of_failure())
                if report is not None:
                    raise KeeperError(
                        str(report.get("error")), int(report.get("exit", EXIT_FAILED))
                    )
                last = self.describe_death()
                where = self.keep_log_of_failure() if attempt == FIRST_STARTS_MAX else ""
            except BaseException:
                self.kill_server()
                self.take_down()
                raise
            self.kill_server()
            self.take_down()
        raise KeeperError(f"the server does not start: {last}{where}")

    def wait_ready(self) -> Json | None:
        """The first server's report; None when it died, or said nothing for START_TIMEOUT_S."""
        server = self.server
        assert server is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        poll = select.poll()
        poll.register(server.ready_fd, select.POLLIN)
        while time.monotonic() < deadline:
            if self.stop_requested():
                raise KeeperError("interrupted", 130)
            if poll.poll(POLL_S * 1000):
                return server.take_report()  # None: end of file, it died
            if server.is_dead() and not poll.poll(0):
                return None
            if fault := server.fault():
                self.log("WARNING", f"server {server.pid} {fault}")
                return None
            if is_gone(self.fuse_fd):
                raise KeeperError(f"{self.config['mountpoint']} was unmounted during the start")
        return None

    def stop_requested(self) -> bool:
        return any(number != signal.SIGHUP for number in self.signals)

    def describe_death(self) -> str:
        assert self.server is not None
        code = self.server.exit_code(1.0)
        return ("it hangs" if code is None else reason(code)) + self.last_words()

    def kill_server(self) -> None:
        if self.server is None:
            return
        self.server.signal(signal.SIGKILL)
        if self.server.exit_code(2.0) is None:
            self.unreaped.append(self.server)
        else:
            self.server.close()
        self.server = None

    def announce(self, report: Json) -> None:
        warnings = list(report.get("warnings") or [])
        if not self.resend:
            warnings.append(
                "this kernel is older than Linux 6.9: a reader may hang when the server dies"
            )
        if self.report_fd is None:
            for line in warnings:
                self.log("WARNING", line)
            self.log("INFO", f"mounted {self.config['source']} on {self.config['mountpoint']}")
            _tell_systemd(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={self.config['mountpoint']}")
            return
        line = {
            "ready": True,
            "zero_open": report.get("zero_open"),
            "warnings": [*warnings, *(report.get("logged") or [])],
            "device": self.device,
            "log": self.log_path,
        }
        with contextlib.suppress(OSError):
            os.write(self.report_fd, json.dumps(line).encode() + b"\n")
        os.close(self.report_fd)
        self.report_fd = None

    # ---- the loop

    def run(self) -> int:
        """Returns the exit code of the process. KeeperError: the mount never came to be."""
        self.catch_signals()
        self.open_source()
        report = self.first_start()
        self.announce(report)
        pause_s = POLL_S
        while True:
            try:
                happened = self.wait_for_something()
                if is_gone(self.fuse_fd):
                    break
                # The server last: whatever is wrong with it, we can be asked, and told to go.
                if self.signals and self.look_at_signals():
                    break
                if happened or not self.is_quiet():
                    self.look_at_clients()
                    self.look_at_server()
                if self.is_deserted() and self.leave():
                    break
                pause_s = POLL_S
            except Exception as error:  # INVARIANT: nothing but the mount's end ends this loop
                self.log("ERROR", f"keeper: {type(error).__name__}: {error}")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, FAULT_PAUSE_MAX_S)
        self.end()
        return 0

    def catch_signals(self) -> None:
        self.wake_read, self.wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self.wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda caught, _frame: self.signals.append(caught))

    def wait_for_something(self) -> bool:
        """False: nothing for POLL_S."""
        # Not the FUSE descriptor: the kernel would wake us with every request. `run` asks it.
        poll = select.poll()
        poll.register(self.wake_read, select.POLLIN)
        if len(self.clients) < CLIENTS_MAX:
            poll.register(self.listener, select.POLLIN)
        for fd in self.clients:
            poll.register(fd, select.POLLIN)
        if self.server is not None:
            poll.register(self.server.pidfd, select.POLLIN)
            if self.server.ready_fd >= 0:
                poll.register(self.server.ready_fd, select.POLLIN)
        happened = bool(poll.poll(POLL_S * 1000))
        if happened:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake_read, 512)
        return happened

    def is_quiet(self) -> bool:
        """Whether a round in which nothing happened has nothing to do: nearly all of them."""
        if self.clients or self.unreaped or self.stop_deadline is not None or self.server is None:
            return False
        if self.spare is not None and self.server.lived_s() >= STABLE_S:
            return False
        return not self.server.is_dead() and not self.server.fault()

    def look_at_server(self) -> None:
        self.unreaped = [old for old in self.unreaped if not self.reaped(old)]
        now = time.monotonic()
        server = self.server
        if server is None:
            if self.next_start is not None and now >= self.next_start:
                if self.died_early and self.restart is None:
                    self.have_spare()
                if self.spare is not None and self.spare.is_coming():
                    return
                self.next_start = None
                self.restarts += 1
                try:
                    self.start_server(resume=True)
                except OSError as error:  # out of processes or memory: try again
                    self.log("ERROR", f"cannot start a server: {error}")
                    self.schedule()
            return
        if server.ready_fd >= 0 and _readable(server.ready_fd):
            report = server.take_report()
            if report is not None:
                self.server_reported(report)
        if server.is_dead():
            if not is_gone(self.fuse_fd):  # unmounted a moment ago: it has ended as it should
                self.server_died(server)
        elif self.spare is not None and server.lived_s() >= STABLE_S:
            self.drop_spare()
        elif self.stop_deadline is not None and now > self.stop_deadline:
            server.signal(signal.SIGKILL)
        elif not server.is_condemned and (fault := server.fault()):
            server.is_condemned = True
            self.log("WARNING", f"server {server.pid} {fault}: the next one takes its place")
            server.signal(signal.SIGKILL)

    def have_spare(self) -> None:
        if self.spare is None:
            with contextlib.suppress(OSError):
                self.spare = Spare(_command(), _environment(), 2)

    def drop_spare(self) -> None:
        spare, self.spare = self.spare, None
        if spare is not None:
            spare.end()

    def reaped(self, server: Server) -> bool:
        code = server.exit_code(0)
        if code is None:
            return False
        self.log("INFO", f"server {server.pid} is gone for good ({reason(code)})")
        server.close()
        return True

    def server_reported(self, report: Json) -> None:
        if report.get("ready"):
            for line in report.get("warnings") or []:
                self.log("WARNING", line)
            if self.server is not None:
                seconds = time.monotonic() - self.server.started
                self.log("INFO", f"server {self.server.pid} is ready after {seconds:.2f} s")
            if self.failures:  # the last one died
                self.have_spare()
            warnings = [*(report.get("warnings") or []), *(report.get("logged") or [])]
            self.finish_restart({"ok": True, "warnings": warnings})
            return
        line, code = str(report.get("error")), int(report.get("exit", EXIT_FAILED))
        self.log("ERROR", f"the server refused to start: {line}")
        if self.restart is not None:
            self.config = self.restart.previous
            self.finish_restart(
                {"ok": False, "exit": code, "error": f"{line} (the old configuration stays)"}
            )
            self.failures = 0

    def server_died(self, server: Server) -> None:
        planned = self.stop_deadline is not None
        self.stop_deadline = None
        self.server = None
        self.died_early = server.ready_at is None
        code = server.exit_code(0.01)
        if code is None:
            self.unreaped.append(server)
            how = "died, with threads still in the kernel"
        else:
            server.close()
            how = reason(code)
        if server.lived_s() >= STABLE_S or self.was_only_killed(code):
            self.failures = 0
        if planned:
            self.log("INFO", f"server {server.pid} {how}, as asked for")
            self.next_start = time.monotonic()
            return
        how += self.last_words() if code is not None and code >= 0 else ""
        delay = self.schedule()
        if self.restart is not None and self.failures >= FIRST_STARTS_MAX:
            self.config = self.restart.previous
            line = f"the server dies with the new configuration, the old one stays: {how}"
            self.finish_restart({"ok": False, "exit": EXIT_FAILED, "error": line})
        self.log(
            "WARNING",
            f"server {server.pid} {how};"
            f" restart {self.restarts + 1} {f'in {delay:g} s' if delay else 'now'}",
        )

    def was_only_killed(self, code: int | None) -> bool:
        """Whether a server was ended from outside (or by lack of memory), and not often of late:
        no reason to let readers wait.
        """
        now = time.monotonic()
        self.kills = [*(at for at in self.kills if at > now - KILLS_WINDOW_S), now]
        killed = code is None or code == -signal.SIGKILL
        return killed and len(self.kills) <= KILLS_MAX

    def schedule(self) -> float:
        """Set when the next server starts: at once after a single death, later after several."""
        self.failures += 1
        delay = 0.0
        if self.failures > 1:
            delay = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self.failures - 2, 16))
        self.next_start = time.monotonic() + delay
        return delay

    # ---- requests

    def look_at_clients(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while len(self.clients) < CLIENTS_MAX:
                connection, _ = self.listener.accept()
                if not trust.is_ours(mounts.peer_uid(connection)):
                    connection.close()
                    continue
                connection.setblocking(False)
                deadline = time.monotonic() + REQUEST_TIMEOUT_S
                self.clients[connection.fileno()] = Client(connection, deadline)
        for fd, client in list(self.clients.items()):
            try:
                data = client.connection.recv(65536)
            except BlockingIOError:
                if time.monotonic() > client.deadline:
                    self.drop(fd)
                continue
            except OSError:
                data = b""
            client.received += data
            if b"\n" in client.received:
                del self.clients[fd]
                self.serve(client)
            elif not data or len(client.received) > REQUEST_BYTES_MAX:
                self.drop(fd)

    def drop(self, fd: int) -> None:
        self.clients.pop(fd).connection.close()

    def serve(self, client: Client) -> None:
        connection = client.connection
        connection.settimeout(REQUEST_TIMEOUT_S)
        try:
            request = json.loads(client.received.split(b"\n")[0])
            operation = request["op"]
            if operation == "info":
                answer: Json | None = {"ok": True, "info": self.info()}
            elif operation == "restart":
                answer = self.begin_restart(connection, request.get("config"))
            elif operation == "umount":
                answer = self.begin_umount(connection, bool(request.get("lazy")))
            else:
                answer = {"ok": False, "error": f"unknown request {operation!r}", "exit": 2}
        except (ValueError, KeyError, TypeError) as error:
            answer = {"ok": False, "error": f"bad request: {error!r}", "exit": 2}
        if answer is not None:
            _reply(connection, answer)

    def info(self) -> Json:
        return {
            "keeper_pid": os.getpid(),
            "server_pid": self.server.pid if self.server else None,
            "server_ready": self.server is not None and self.server.ready_at is not None,
            "restarts": self.restarts,
            "mounted_at": self.mounted_at,
            "detached": self.detached,
            "log": self.log_path,
            "config": self.config,
        }

    def begin_restart(self, connection: socket.socket | None, config: Json | None) -> Json | None:
        """None: the answer follows when the next server is ready."""
        if self.restart is not None:
            return {"ok": False, "error": "another restart is under way", "exit": EXIT_BUSY}
        config = dict(self.config) if config is None else config
        for key in FIXED_FOR_LIFE:
            if config.get(key) != self.config.get(key):
                line = f"--{key.replace('_', '-')} cannot change while mounted: umount first"
                return {"ok": False, "error": line, "exit": 2}
        config["foreground"] = self.config.get("foreground")
        self.restart = Restart(connection, self.config)
        self.config = config
        self.failures = 0
        self.drop_spare()  # what it has imported may be of an older version
        if self.server is None:
            self.next_start = time.monotonic()
        else:
            self.server.signal(signal.SIGTERM)
            self.stop_deadline = time.monotonic() + STOP_S
        return None

    def finish_restart(self, answer: Json) -> None:
        if self.restart is None or (self.server is not None and self.stop_deadline is not None):
            return
        connection, self.restart = self.restart.client, None
        self.write_record()
        if connection is not None:
            _reply(connection, answer)

    def begin_umount(self, connection: socket.socket | None, lazy: bool) -> Json | None:
        """None: the answer follows when the mount is gone, just before this process ends."""
        mountpoint = self.config["mountpoint"]
        if not self.detached:
            mounted = mounts.at(mountpoint)
            if mounted is None or mounted.device != self.device:
                what = "something is mounted over it" if mounted else "not mounted any more"
                return {"ok": False, "error": f"{mountpoint}: {what}", "exit": EXIT_FAILED}
            try:
                users = self.unmount_unless_used(lazy)
            except (OSError, subprocess.SubprocessError) as error:
                return {"ok": False, "error": f"{mountpoint}: {error}", "exit": EXIT_FAILED}
            if users is not None:
                return {"ok": False, "error": "busy", "exit": EXIT_BUSY, "pids": users}
            self.detached = lazy
        deadline = time.monotonic() + 1.0
        while not is_gone(self.fuse_fd) and time.monotonic() < deadline:
            time.sleep(0.005)
        if not is_gone(self.fuse_fd):
            self.log("INFO", "unmounted; open files are served until they are closed")
            return {"ok": True, "detached": True}
        if connection is not None:
            self.farewells.append(connection)
        return None

    def unmount_unless_used(self, lazy: bool) -> list[int] | None:
        """None: unmounted. Else the processes that use it (of those we may see). OSError.

        The server opens files of its own mount for an instant, to drop their pages: tried again.
        """
        mountpoint = self.config["mountpoint"]
        deadline = time.monotonic() + BUSY_RETRY_S
        while True:
            try:
                unmount(mountpoint, lazy)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
            else:
                return None
            # what lies below a mount over itself, these two have open all the time
            own = {os.getpid(), *([self.server.pid] if self.server else [])}
            users = users_of(mountpoint, frozenset(own))
            if users or time.monotonic() > deadline:
                return users
            time.sleep(BUSY_RETRY_PAUSE_S)

    # ---- end

    def look_at_signals(self) -> bool:
        """True: end now, whatever is still open."""
        caught, self.signals = self.signals, []
        if signal.SIGHUP in caught:
            self.begin_restart(None, None)
        if not any(number != signal.SIGHUP for number in caught):
            return False
        _tell_systemd("STOPPING=1")
        answer = self.begin_umount(None, lazy=False)
        if answer is not None and answer.get("error") == "busy":
            self.log("WARNING", f"asked to end while in use by {answer['pids']}: unmounting lazily")
            answer = self.begin_umount(None, lazy=True)
        if answer is not None and not answer["ok"]:
            self.log("ERROR", f"cannot unmount: {answer['error']}")
            return False
        return True

    def is_deserted(self) -> bool:
        """Whether nobody is left who could reach the mount: see `mount_namespace`."""
        now = time.monotonic()
        if now < self.next_look_around or self.foreground:
            return False
        self.next_look_around = now + LOOK_AROUND_S
        return self.household.is_deserted(self.device)

    def leave(self) -> bool:
        """Unmount, unless somebody outside holds something open. Whether that was done."""
        answer = self.begin_umount(None, lazy=False)
        if answer is not None and not answer["ok"]:
            return False
        self.log("INFO", "no process is left in the mount namespace: unmounted")
        return True

    def end(self) -> None:
        """The mount is gone, or we are told to go: the server finishes, then we clean up."""
        self.drop_spare()
        server, self.server = self.server, None
        if server is not None:
            server.signal(signal.SIGCONT)  # it may be stopped
            if not is_gone(self.fuse_fd):
                server.signal(signal.SIGTERM)
            code = server.exit_code(END_S / 2)
            if code is None:
                server.signal(signal.SIGTERM)
                code = server.exit_code(END_S / 2)
            if code is None:
                server.signal(signal.SIGKILL)
                code = server.exit_code(2.0)
            how = "hangs" if code is None else reason(code)
            self.log("INFO" if code == 0 else "WARNING", f"unmounted; server {server.pid} {how}")
        if self.restart is not None and self.restart.client is not None:
            _reply(self.restart.client, {"ok": False, "error": "unmounted meanwhile", "exit": 1})
        self.listener.close()
        for client in self.clients.values():
            client.connection.close()
        self.remove_runtime_directory()
        for connection in self.farewells:
            _reply(connection, {"ok": True})


def _kernel_version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def _reply(connection: socket.socket, answer: Json) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _tell_systemd(state: str) -> None:
    """sd_notify(3), for Type=notify units."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect("\0" + address[1:] if address.startswith("@") else address)
        out.sendall(state.encode(errors="surrogateescape"))


def main(arguments: list[str]) -> NoReturn:
    processes.open_standard_descriptors()
    report_fd = int(arguments[1]) if len(arguments) > 1 else None
    if report_fd is not None:
        os.set_inheritable(report_fd, False)
    try:
        os.chdir("/")
        os.umask(0o077)
        code = Keeper(json.loads(arguments[0]), report_fd).run()
    except KeeperError as failure:
        code = failure.exit_code
        if report_fd is None:
            print(f"fusecache: {failure}", file=sys.stderr)
        else:
            line = json.dumps({"error": str(failure), "exit": code})
            with contextlib.suppress(OSError):
                os.write(report_fd, line.encode() + b"\n")
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
