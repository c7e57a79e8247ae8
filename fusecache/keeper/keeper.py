"""Holds a mount, so that a server may die at any moment without a reader noticing.

usage: python -m fusecache.keeper CONFIG_JSON [REPORT_FD]

The keeper opens the source directory, mounts, makes the inode table's memfd and the listening
control socket, and starts the server with all of them as inherited descriptors. When the server
dies the next one gets the same descriptors; the kernel repeats what the dead one had not answered.

Protocols, all one JSON object a line:

* to the server: argv[1] = {"config", "fds": {"fuse", "source", "table", "control", "ready"},
  "source_device", "source_identity", "device", "keeper_pid", "restarts", "mounted_at", "resume",
  "planned"}
* from the server, on the ready descriptor: {"ready": true, "zero_open", "warnings", "logged"} or
  {"error", "exit"}; "logged" are warnings that are in the log already; then an empty line now and
  then (processes.Watch). It exits 0 when the mount is gone, and on SIGTERM
* to the CLI, on REPORT_FD: {"ready": true, "zero_open", "warnings", "device", "log"} or
  {"error", "exit"}; without REPORT_FD (--foreground) it goes to stderr, and to systemd if it asked
* keeper.sock: {"op": "info"}, {"op": "restart", "config"}, {"op": "umount", "lazy"}
  → {"ok": true, …} or {"ok": false, "error", "exit", "pids"?}

INVARIANT: stdlib, this room, `mounts`, `processes` and `trust` only; what breaks the server's
imports cannot break the keeper.
INVARIANT: descriptors of the mount are open here until it is gone; no server's death ends it.
INVARIANT: at most one server lives, apart from threads of killed ones that are stuck in the kernel.
It is not on the path of any read, and knows nothing of the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import select
import signal
import socket
import sys
import time
from functools import partial
from typing import NoReturn

from fusecache.base import logs, mounts, processes
from fusecache.keeper import mount_namespace, mounting
from fusecache.keeper.held_mount import HeldMount
from fusecache.keeper.log_file import LogFile
from fusecache.keeper.mounting import EXIT_FAILED, Json, KeeperError
from fusecache.keeper.requests import Requests, reply
from fusecache.keeper.servers import FIRST_STARTS_MAX, POLL_S, Servers

FAULT_PAUSE_MAX_S = 1.0  # of the loop, when something in it fails again and again
LOOK_AROUND_S = 10.0  # how often the keeper looks who lives in its mount namespace
ANSWER_TIMEOUT_S = 30.0  # from ready to the first answered stat
RESEND_KERNEL = (6, 9)


class Keeper:
    """One mount from its begin to its end."""

    def __init__(self, config: Json, report_fd: int | None) -> None:
        self._report_fd = report_fd
        self._foreground = report_fd is None
        self._mounted_at = time.time()
        self._signals: list[int] = []
        self._household = mount_namespace.Household()
        self._next_look_around = time.monotonic() + LOOK_AROUND_S
        self._watchdog_s = processes.watchdog_s()
        self._next_ping = 0.0
        self.log = LogFile(self._foreground, config)
        self.mount = HeldMount(config, self.log)
        self.servers = Servers(config, self.mount, self.log, self._mounted_at)
        self.requests = Requests(
            {"info": self._info, "restart": self._restart, "umount": self._umount}
        )

    # ---- start -----------------------------------------------------------------------------------

    def first_start(self) -> Json:
        """Mount and start; the server's report once the mount answers. KeeperError."""
        last = where = ""
        for attempt in range(1, FIRST_STARTS_MAX + 1):
            # Each attempt mounts afresh: the kernel says INIT once, and a dead server may have it.
            self.mount.mount()
            if last:  # the log of the attempt before went with its runtime directory
                line = f"start {attempt - 1} of {FIRST_STARTS_MAX} failed: {last}"
                self.log.write("WARNING", line)
            try:
                report = self._try_start()
                if report is not None:
                    return report
                last = self.servers.describe_death()
                where = self.log.keep_after_failure() if attempt == FIRST_STARTS_MAX else ""
            except BaseException:
                self.servers.kill()
                self.mount.take_down()
                raise
            self.servers.kill()
            self.mount.take_down()
        raise KeeperError(f"the server does not start: {last}{where}")

    def _try_start(self) -> Json | None:
        """None: it died. KeeperError: another would do no better."""
        self.servers.start(resume=False)
        report = self.servers.wait_ready(self._is_told_to_end)
        if report is None:
            return None
        if not report.get("ready"):
            raise KeeperError(str(report.get("error")), int(report.get("exit", EXIT_FAILED)))
        if not mounting.answers(self.mount.mountpoint, ANSWER_TIMEOUT_S):
            line = "the server is ready, but the mount does not answer"
            raise KeeperError(line + self.log.keep_after_failure())
        return report

    def _is_told_to_end(self) -> bool:
        return any(number != signal.SIGHUP for number in self._signals)

    def announce(self, report: Json) -> None:
        warnings = list(report.get("warnings") or [])
        if _kernel_version() < RESEND_KERNEL:
            warnings.append(
                "this kernel is older than Linux 6.9: a reader may hang when the server dies"
            )
        if self._report_fd is None:
            for line in warnings:
                self.log.write("WARNING", line)
            self.log.write("INFO", f"mounted {self.mount.source} on {self.mount.mountpoint}")
            processes.tell_systemd(
                f"READY=1\nMAINPID={os.getpid()}\nSTATUS={self.mount.mountpoint}"
            )
            return
        message = {
            "ready": True,
            "zero_open": report.get("zero_open"),
            "warnings": [*warnings, *(report.get("logged") or [])],
            "device": self.mount.device,
            "log": self.log.path,
        }
        with contextlib.suppress(OSError):
            os.write(self._report_fd, json.dumps(message).encode() + b"\n")
        os.close(self._report_fd)
        self._report_fd = None

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> int:
        """Returns the exit code of the process. KeeperError: the mount never came to be."""
        self.catch_signals()
        self.mount.open_source()
        report = self.first_start()
        self.requests.listen(self.mount.listener)
        self.announce(report)
        pause_s = POLL_S
        while True:
            try:
                happened = self.wait_for_something()
                if self.mount.is_gone:
                    break
                # The server last: whatever is wrong with it, we can be asked, and told to go.
                if self._signals and self.look_at_signals():
                    break
                if happened or self.requests.has_clients or not self.servers.is_quiet():
                    self.requests.look()
                    self.servers.look()
                if self._is_deserted() and self._leave():
                    break
                self.ping()
                pause_s = POLL_S
            except Exception as error:  # INVARIANT: nothing but the mount's end ends this loop
                self.log.write("ERROR", f"keeper: {type(error).__name__}: {error}")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, FAULT_PAUSE_MAX_S)
        self.end()
        return 0

    def catch_signals(self) -> None:
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda caught, _frame: self._signals.append(caught))

    def wait_for_something(self) -> bool:
        """False: nothing for POLL_S."""
        # Not the FUSE descriptor: the kernel would wake us with every request. `run` asks it.
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        self.requests.register(poll)
        self.servers.register(poll)
        happened = bool(poll.poll(POLL_S * 1000))
        if happened:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 512)
        return happened

    def ping(self) -> None:
        """Tell systemd's watchdog that all is well: this loop goes round, and the mount is served,
        or its next server may still come. A slow origin is no reason to be silent.
        """
        now = time.monotonic()
        if self._watchdog_s is None or now < self._next_ping or self.servers.is_hopeless:
            return
        processes.tell_systemd("WATCHDOG=1")
        self._next_ping = now + self._watchdog_s

    # ---- requests --------------------------------------------------------------------------------

    def _info(self, request: Json, connection: socket.socket) -> Json:
        del request, connection
        info = {
            "keeper_pid": os.getpid(),
            "server_pid": self.servers.pid,
            "server_ready": self.servers.is_ready,
            "restarts": self.servers.restarts,
            "mounted_at": self._mounted_at,
            "detached": self.mount.is_detached,
            "log": self.log.path,
            "config": self.servers.config,
        }
        return {"ok": True, "info": info}

    def _restart(self, request: Json, connection: socket.socket) -> Json | None:
        return self.servers.restart(request.get("config"), partial(reply, connection))

    def _umount(self, request: Json, connection: socket.socket) -> Json | None:
        answer = self._unmount(bool(request.get("lazy")))
        if answer is None:  # just before this process ends
            self.requests.answer_at_the_end(connection)
        return answer

    def _unmount(self, lazy: bool) -> Json | None:
        """As HeldMount.unmount."""
        own = {os.getpid(), *([self.servers.pid] if self.servers.pid else [])}
        return self.mount.unmount(lazy, frozenset(own))

    # ---- end -------------------------------------------------------------------------------------

    def look_at_signals(self) -> bool:
        """True: end now, whatever is still open."""
        caught, self._signals = self._signals, []
        if signal.SIGHUP in caught:
            self.servers.restart(None, None)
        if not any(number != signal.SIGHUP for number in caught):
            return False
        processes.tell_systemd("STOPPING=1")
        answer = self._unmount(lazy=False)
        if answer is not None and answer.get("error") == "busy":
            line = f"asked to end while in use by {answer['pids']}: unmounting lazily"
            self.log.write("WARNING", line)
            answer = self._unmount(lazy=True)
        if answer is not None and not answer["ok"]:
            self.log.write("ERROR", f"cannot unmount: {answer['error']}")
            return False
        return True

    def _is_deserted(self) -> bool:
        """Whether no process is left that could reach the mount: see `mount_namespace`."""
        now = time.monotonic()
        if now < self._next_look_around or self._foreground:
            return False
        self._next_look_around = now + LOOK_AROUND_S
        return self._household.is_deserted(self.mount.device)

    def _leave(self) -> bool:
        """Unmount, unless a process outside holds something open. Whether that was done."""
        answer = self._unmount(lazy=False)
        if answer is not None and not answer["ok"]:
            return False
        self.log.write("INFO", "no process is left in the mount namespace: unmounted")
        return True

    def end(self) -> None:
        """The mount is gone, or we are told to go: the server finishes, then we clean up."""
        self.servers.end()
        self.requests.end()
        self.mount.remove_runtime_directory()
        self.requests.say_farewell()


def _kernel_version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def main(arguments: list[str]) -> NoReturn:
    processes.open_standard_descriptors()
    report_fd = int(arguments[1]) if len(arguments) > 1 else None
    if report_fd is not None:
        os.set_inheritable(report_fd, False)
    try:
        os.chdir("/")
        os.umask(0o077)
        config = json.loads(arguments[0])
        processes.show_as(f"{mounts.KEEPER_TITLE}{config['mountpoint']}")
        code = Keeper(config, report_fd).run()
    except KeeperError as failure:
        code = failure.exit_code
        if report_fd is None:
            print(f"{logs.priority('ERROR')}fusecache: {failure}", file=sys.stderr)
        else:
            line = json.dumps({"error": str(failure), "exit": code})
            with contextlib.suppress(OSError):
                os.write(report_fd, line.encode() + b"\n")
    sys.exit(code)
