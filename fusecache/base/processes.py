"""Processes that hang, are stopped, or were started with less than they need; the memory that one
may use; how one is shown by `ps`, and what it and systemd tell each other. Stdlib only.

What may hang for ever (a look at a mount, or at an origin) is done in a child: a thread that hangs
in the kernel could not be left behind when its process ends.

INVARIANT: such a child holds no descriptor but its own pipe. One that hangs in a mount must not
be what keeps the mount's connection open, nor the pipe of a process that reads our output.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
from collections.abc import Callable

STOPPED_S = 3.0  # so long a server may be stopped (SIGSTOP)
SILENT_S = 30.0  # so long its event loop may say nothing
BEAT_S = 5.0  # how often it does
ROUND_MOST_S = 1.0
ANSWER_BYTES_MOST = 4096
FOR_US_ALONE = frozenset(
    ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
)
"""What systemd tells a service in its environment, and its children have no use for."""
_LISTEN_FD_FIRST = 3  # SD_LISTEN_FDS_START


def open_standard_descriptors() -> None:
    """Have 0, 1 and 2 open, on /dev/null where they were closed: what is opened next would take the
    number, and be written on as if it were stderr. To be called before anything is opened.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(fd, True)


def fields_of(text: bytes) -> list[bytes]:
    """What follows the program's name, which may hold ")", in the text of /proc/PID/stat: the
    state, the parent, … (fields 3 on in proc_pid_stat(5)).
    """
    return text.rpartition(b")")[2].split()


def stat(pid: int) -> list[bytes]:
    """Its fields, as `fields_of`; []: it has ended, or we may not see it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return fields_of(file.read())
    except OSError:
        return []


def state(pid: int) -> str:
    """Its letter: T is stopped, Z and X are dead; "" if there is none."""
    return b"".join(stat(pid)[:1]).decode()


def parent(pid: int) -> int | None:
    """0: none, or one outside the pid namespace. None: it has ended, or we may not see it."""
    fields = stat(pid)
    return int(fields[1]) if fields else None


def program(pid: int) -> str:
    """The name of what it runs, 15 bytes at most; "": it has ended."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def show_as(title: str) -> None:
    """Have `ps` show this process as `title`. It takes the place of the arguments, as
    setproctitle(3) has it; what is longer than they were is cut off. The environment stays.
    """
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(title.partition(":")[0].encode())
    begin, end = map(int, stat(os.getpid())[45:47])  # arg_start, arg_end
    text = os.fsencode(title)[: max(0, end - begin - 1)]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


# ---- systemd -------------------------------------------------------------------------------------


def tell_systemd(state: str) -> None:
    """sd_notify(3); nothing is done where no systemd asked for it."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.connect("\0" + address[1:] if address.startswith("@") else address)
        out.sendall(state.encode(errors="surrogateescape"))


def watchdog_s() -> float | None:
    """How often systemd wants to hear WATCHDOG=1: twice as often as it demands
    (sd_watchdog_enabled(3)). None: it does not.
    """
    usec, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID")
    if not usec.isdecimal() or not int(usec) or pid not in (None, str(os.getpid())):
        return None
    return int(usec) / 2e6


def handed_over() -> list[socket.socket]:
    """The sockets that systemd opened for this process (sd_listen_fds(3)). To be called once: what
    its environment said of them, and of the watchdog, is taken out for those it starts.
    """
    told = {name: os.environ.pop(name, "") for name in FOR_US_ALONE - {"NOTIFY_SOCKET"}}
    if told["LISTEN_PID"] != str(os.getpid()):
        return []
    count = told["LISTEN_FDS"]
    sockets = [
        socket.socket(fileno=fd)
        for fd in range(_LISTEN_FD_FIRST, _LISTEN_FD_FIRST + int(count if count.isdecimal() else 0))
    ]
    for each in sockets:
        each.set_inheritable(False)
    return sockets


# ---- questions -----------------------------------------------------------------------------------


def ask(question: Callable[[], str], timeout_s: float) -> str | None:
    """What `question` says, in a child; None: it did not return in time. An exception counts
    as the answer "". The child is killed, and waited for unless it hangs in the kernel.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.dup2(theirs, 3)
            os.closerange(4, 1 << 20)
            for fd in (0, 1, 2):
                os.close(fd)
            open_standard_descriptors()
            signal.set_wakeup_fd(-1)
            answer = question()
        except BaseException:
            answer = ""
        try:
            os.write(3, os.fsencode(answer)[:ANSWER_BYTES_MOST])
        finally:
            os._exit(0)
    os.close(theirs)
    try:
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        if not poll.poll(max(0.0, timeout_s) * 1000):
            return None
        return os.fsdecode(os.read(ours, ANSWER_BYTES_MOST))
    finally:
        os.close(ours)
        _end(child)


def _end(child: int) -> None:
    """Kill and reap it; one that hangs where no signal reaches is left to the reaper of orphans."""
    os.kill(child, signal.SIGKILL)
    deadline = time.monotonic() + 1.0
    while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.005)


class Watch:
    """Whether a server is stopped, or hangs. `look` is called every round of the keeper's loop.

    Time in which the keeper itself did not run (stopped, frozen, starved) counts for a second at
    most: the server may not have run either.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._stopped_s = 0.0
        self._silent_s: float | None = None  # None: it never beat, as one of an older version

    def beat(self) -> None:
        self._silent_s = 0.0

    def look(self, state: str) -> str:
        """Why it must be replaced, or ""."""
        now = time.monotonic()
        passed_s = min(now - self._last, ROUND_MOST_S)
        self._last = now
        self._stopped_s = self._stopped_s + passed_s if state == "T" else 0.0
        if self._silent_s is not None:
            self._silent_s += passed_s
        if self._stopped_s > STOPPED_S:
            return "is stopped (SIGSTOP)"
        if self._silent_s is not None and self._silent_s > SILENT_S:
            return f"has not said anything for {SILENT_S:g} s"
        return ""


def usable_memory_bytes() -> int:
    """What this process may use: free memory of the machine, or less where a cgroup says so."""
    candidates = [available_memory_bytes()]
    candidates += _cgroup_limits("/proc/self/cgroup", "/sys/fs/cgroup")
    return min(candidates)


def cgroup_limit_bytes(pid: int) -> int | None:
    """Of memory, what the cgroups of that process leave it; None: no limit, or not known."""
    return min(_cgroup_limits(f"/proc/{pid}/cgroup", "/sys/fs/cgroup"), default=None)


def total_memory_bytes() -> int:
    """Of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """Of the machine: free, or taken by what can be let go of."""
    with open("/proc/meminfo", encoding="ascii") as file:
        table = dict(line.split(":", 1) for line in file)
    amounts = [table[key] for key in ("MemAvailable", "MemTotal") if key in table]
    return min(int(text.split()[0]) for text in amounts) << 10


def _cgroup_limits(listing: str, root: str) -> list[int]:
    """Memory limits of the cgroups in `listing` and of all above them, v1 and v2."""
    found = []
    try:
        with open(listing, encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, name = [root, os.path.join(root, "unified")], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [os.path.join(root, "memory")], "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        for base in roots:
            for depth in range(len(parts) + 1):
                limit = _read_limit(os.path.join(base, *parts[:depth], name))
                if limit is not None:
                    found.append(limit)
    return found


def _read_limit(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max"
