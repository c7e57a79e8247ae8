"""The servers of a mount, one after the other: start, report, death, planned restart, and end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from fusecache.keeper.held_mount import HeldMount
from fusecache.keeper.log_file import LogFile
from fusecache.keeper.mounting import EXIT_BUSY, EXIT_FAILED, Json, KeeperError
from fusecache.keeper.server_process import Server, command, environment, reason
from fusecache.keeper.spare import Spare

POLL_S = 0.025  # how long a dead main thread can stay unnoticed
START_TIMEOUT_S = 900.0  # a first start may rebuild a large index
FIRST_STARTS_MAX = 3
HOPELESS_STARTS = 12  # so many servers in turn that died before they were ready: most of a minute
STABLE_S = 30.0  # a server that lived so long after ready is replaced without delay
KILLS_MAX, KILLS_WINDOW_S = 20, 10.0  # so many SIGKILLs are an administrator's, not a fault's
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 10.0
STOP_S = 2.0  # from SIGTERM to SIGKILL at a planned restart
END_S = 10.0  # the server's time to finish when the mount is gone
# What the kernel was told at mount time, or what the table was made for.
FIXED_FOR_LIFE = ("source", "mountpoint", "allow_other", "zero_open", "noexec")

Answer = Callable[[Json], None]


class BackOff:
    """When the next server starts: at once after a single death, later after several."""

    def __init__(self) -> None:
        self.failures = 0
        self.next_start: float | None = None
        self._kills: list[float] = []  # when servers died lately

    def is_due(self) -> bool:
        return self.next_start is not None and time.monotonic() >= self.next_start

    def is_over(self) -> None:
        """It starts."""
        self.next_start = None

    def start_now(self) -> None:
        self.next_start = time.monotonic()

    def forget(self) -> None:
        """What has failed so far: it counts no more."""
        self.failures = 0

    def note_death(self, lived_s: float, code: int | None) -> None:
        if lived_s >= STABLE_S or self._was_only_killed(code):
            self.failures = 0

    def _was_only_killed(self, code: int | None) -> bool:
        """Whether a server was ended from outside (or by lack of memory), and not often of late:
        no reason to let readers wait.
        """
        now = time.monotonic()
        self._kills = [*(at for at in self._kills if at > now - KILLS_WINDOW_S), now]
        killed = code is None or code == -signal.SIGKILL
        return killed and len(self._kills) <= KILLS_MAX

    def fail(self) -> float:
        """A server has died, or could not be started. Returns the seconds until the next one."""
        self.failures += 1
        delay = 0.0
        if self.failures > 1:
            delay = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(self.failures - 2, 16))
        self.next_start = time.monotonic() + delay
        return delay


@dataclass(slots=True)
class Restart:
    """A planned restart under way, and who asked for it."""

    answer: Answer | None
    previous: Json  # the config to go back to if the new one is refused


class Servers:
    """Of one mount."""

    def __init__(self, config: Json, mount: HeldMount, log: LogFile, mounted_at: float) -> None:
        self.config = config
        self.restarts = 0
        self.server: Server | None = None
        self.back_off = BackOff()
        self._mount = mount
        self._log = log
        self._mounted_at = mounted_at
        self._unreaped: list[Server] = []
        self._spare: Spare | None = None
        self._early_deaths = 0  # of the last servers in turn, before they were ready
        self._restart: Restart | None = None
        self._stop_deadline: float | None = None

    @property
    def pid(self) -> int | None:
        return self.server.pid if self.server else None

    @property
    def is_ready(self) -> bool:
        return self.server is not None and self.server.ready_at is not None

    @property
    def is_hopeless(self) -> bool:
        """Whether no next server is likely to do better. It is started all the same."""
        return self.server is None and self._early_deaths >= HOPELESS_STARTS

    def _use(self, config: Json) -> None:
        self.config = config
        self._log.use(config)

    # ---- start -----------------------------------------------------------------------------------

    def start(self, resume: bool) -> None:
        """OSError: out of processes or memory. KeeperError: no log, at the first one."""
        self._log.begin_part(must=not resume)
        arguments: Json = {
            "config": self.config,
            "source_device": self._mount.source_device,
            "source_identity": self._mount.source_identity,
            "device": self._mount.device,
            "keeper_pid": os.getpid(),
            "restarts": self.restarts,
            "mounted_at": self._mounted_at,
            "resume": resume,
            "planned": self._restart is not None,
        }
        spare, self._spare = self._spare, None
        self.server = Server(arguments, self._mount.fds(), 2, spare)
        self._write_record()

    def _write_record(self) -> None:
        self._mount.write_record(
            {
                "keeper_pid": os.getpid(),
                "server_pid": self.pid,
                "mountpoint": self._mount.mountpoint,
                "source": self._mount.source,
                "restarts": self.restarts,
                "mounted_at": self._mounted_at,
                "log": self._log.path if self._log.is_file else None,
                "config": self.config,
            }
        )

    def wait_ready(self, is_told_to_end: Callable[[], bool]) -> Json | None:
        """The first server's report; None when it died, or said nothing for START_TIMEOUT_S."""
        server = self.server
        assert server is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        poll = select.poll()
        poll.register(server.ready_fd, select.POLLIN)
        while time.monotonic() < deadline:
            if is_told_to_end():
                raise KeeperError("interrupted", 130)
            if poll.poll(POLL_S * 1000):
                return server.take_report()  # None: end of file, it died
            if server.is_dead() and not poll.poll(0):
                return None
            if fault := server.fault():
                self._log.write("WARNING", f"server {server.pid} {fault}")
                return None
            if self._mount.is_gone:
                raise KeeperError(f"{self._mount.mountpoint} was unmounted during the start")
        return None

    def describe_death(self) -> str:
        assert self.server is not None
        code = self.server.exit_code(1.0)
        return ("it hangs" if code is None else reason(code)) + self._log.last_words()

    def kill(self) -> None:
        if self.server is None:
            return
        self.server.signal(signal.SIGKILL)
        if self.server.exit_code(2.0) is None:
            self._unreaped.append(self.server)
        else:
            self.server.close()
        self.server = None

    # ---- each round ------------------------------------------------------------------------------

    def register(self, poll: select.poll) -> None:
        """What there is to wait for."""
        if self.server is not None:
            poll.register(self.server.pidfd, select.POLLIN)
            if self.server.ready_fd >= 0:
                poll.register(self.server.ready_fd, select.POLLIN)

    def is_quiet(self) -> bool:
        """Whether a round in which nothing happened has nothing to do: nearly all of them."""
        if self._unreaped or self._stop_deadline is not None or self.server is None:
            return False
        if self._spare is not None and self.server.lived_s() >= STABLE_S:
            return False
        return not self.server.is_dead() and not self.server.fault()

    def look(self) -> None:
        self._unreaped = [old for old in self._unreaped if not self._is_reaped(old)]
        server = self.server
        if server is None:
            if self.back_off.is_due():
                self._start_next()
            return
        if server.has_reported():
            report = server.take_report()
            if report is not None:
                self._reported(report)
        if server.is_dead():
            if not self._mount.is_gone:  # unmounted a moment ago: it has ended as it should
                self.died(server)
        elif self._spare is not None and server.lived_s() >= STABLE_S:
            self._drop_spare()
        elif self._stop_deadline is not None and time.monotonic() > self._stop_deadline:
            server.signal(signal.SIGKILL)
        elif fault := server.condemn():
            line = f"server {server.pid} {fault}: the next one takes its place"
            self._log.write("WARNING", line)

    def _is_reaped(self, server: Server) -> bool:
        code = server.exit_code(0)
        if code is None:
            return False
        self._log.write("INFO", f"server {server.pid} is gone for good ({reason(code)})")
        server.close()
        return True

    def _start_next(self) -> None:
        if self._early_deaths and self._restart is None:
            self._have_spare()
        if self._spare is not None and self._spare.is_coming():
            return
        self.back_off.is_over()
        self.restarts += 1
        try:
            self.start(resume=True)
        except OSError as error:  # out of processes or memory: try again
            self._log.write("ERROR", f"cannot start a server: {error}")
            self.back_off.fail()

    def _have_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = Spare(command(), environment(), 2, self._mount.mountpoint)

    def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.end()

    # ---- report and death ------------------------------------------------------------------------

    def _reported(self, report: Json) -> None:
        if report.get("ready"):
            for line in report.get("warnings") or []:
                self._log.write("WARNING", line)
            if self.server is not None:
                seconds = time.monotonic() - self.server.started
                line = f"server {self.server.pid} is ready after {seconds:.2f} s"
                self._log.write("INFO", line)
            if self.back_off.failures:  # the last one died
                self._have_spare()
            warnings = [*(report.get("warnings") or []), *(report.get("logged") or [])]
            self._finish_restart({"ok": True, "warnings": warnings})
            return
        line, code = str(report.get("error")), int(report.get("exit", EXIT_FAILED))
        self._log.write("ERROR", f"the server refused to start: {line}")
        if self._restart is not None:
            self._use(self._restart.previous)
            self._finish_restart(
                {"ok": False, "exit": code, "error": f"{line} (the old configuration stays)"}
            )
            self.back_off.forget()

    def died(self, server: Server) -> None:
        """The present one has: when does the next one start?"""
        planned = self._stop_deadline is not None
        self._stop_deadline = None
        self.server = None
        self._early_deaths = self._early_deaths + 1 if server.ready_at is None else 0
        code = server.exit_code(0.01)
        if code is None:
            self._unreaped.append(server)
            how = "died, with threads still in the kernel"
        else:
            server.close()
            how = reason(code)
        self.back_off.note_death(server.lived_s(), code)
        if planned:
            self._log.write("INFO", f"server {server.pid} {how}, as asked for")
            self.back_off.start_now()
            return
        how += self._log.last_words() if code is not None and code >= 0 else ""
        delay = self.back_off.fail()
        if self._restart is not None and self.back_off.failures >= FIRST_STARTS_MAX:
            self._use(self._restart.previous)
            line = f"the server dies with the new configuration, the old one stays: {how}"
            self._finish_restart({"ok": False, "exit": EXIT_FAILED, "error": line})
        when = f"in {delay:g} s" if delay else "now"
        line = f"server {server.pid} {how}; restart {self.restarts + 1} {when}"
        self._log.write("WARNING", line)

    # ---- planned restarts ------------------------------------------------------------------------

    def restart(self, config: Json | None, answer: Answer | None) -> Json | None:
        """None: `answer` is called when the next server is ready. `config` None: as it is."""
        if self._restart is not None:
            return {"ok": False, "error": "another restart is under way", "exit": EXIT_BUSY}
        config = dict(self.config) if config is None else config
        for key in FIXED_FOR_LIFE:
            if config.get(key) != self.config.get(key):
                line = f"--{key.replace('_', '-')} cannot change while mounted: umount first"
                return {"ok": False, "error": line, "exit": 2}
        config["foreground"] = self.config.get("foreground")
        self._restart = Restart(answer, self.config)
        self._use(config)
        self.back_off.forget()
        self._drop_spare()  # what it has imported may be of an older version
        if self.server is None:
            self.back_off.start_now()
        else:
            self.server.signal(signal.SIGTERM)
            self._stop_deadline = time.monotonic() + STOP_S
        return None

    def _finish_restart(self, answer: Json) -> None:
        if self._restart is None or (self.server is not None and self._stop_deadline is not None):
            return
        restart, self._restart = self._restart, None
        self._write_record()
        if restart.answer is not None:
            restart.answer(answer)

    # ---- end -------------------------------------------------------------------------------------

    def end(self) -> None:
        """The mount is gone, or we are told to go: the server finishes."""
        self._drop_spare()
        server, self.server = self.server, None
        if server is not None:
            server.signal(signal.SIGCONT)  # it may be stopped
            if not self._mount.is_gone:
                server.signal(signal.SIGTERM)
            code = server.exit_code(END_S / 2)
            if code is None:
                server.signal(signal.SIGTERM)
                code = server.exit_code(END_S / 2)
            if code is None:
                server.signal(signal.SIGKILL)
                code = server.exit_code(2.0)
            how = "hangs" if code is None else reason(code)
            level = "INFO" if code == 0 else "WARNING"
            self._log.write(level, f"unmounted; server {server.pid} {how}")
        if self._restart is not None and self._restart.answer is not None:
            self._restart.answer({"ok": False, "error": "unmounted meanwhile", "exit": 1})
