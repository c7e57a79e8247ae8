"""Parts of the keeper that need no mount; the whole is tested by tests/crash and tests/mount."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fusecache.base import mounts, processes
from fusecache.keeper import held_mount, keeper, mounting, server_process, servers
from fusecache.keeper.held_mount import HeldMount
from fusecache.keeper.keeper import Keeper
from fusecache.keeper.log_file import LogFile
from fusecache.keeper.server_process import Server
from fusecache.keeper.servers import Servers
from fusecache.server.launch import Launch

IMPORTABLE = {**os.environ, **server_process.package_environment()}
CONFIG: dict[str, Any] = {
    "source": "/s",
    "mountpoint": "/m",
    "allow_other": False,
    "zero_open": True,
    "log_file": "/nonexistent/log",
}


class Dead:
    """What the keeper asks a dead server about."""

    pid = 4242

    def __init__(self, code: int | None, lived_s: float | None) -> None:
        self._code = code
        self.ready_at = None if lived_s is None else time.monotonic() - lived_s

    def exit_code(self, wait_s: float) -> int | None:
        return self._code

    def lived_s(self) -> float:
        return 0.0 if self.ready_at is None else time.monotonic() - self.ready_at

    def close(self) -> None:
        pass


@pytest.fixture
def lone(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    made = Keeper(dict(CONFIG), report_fd=-1)
    monkeypatch.setattr(made.mount, "_directory", "/nonexistent")
    return made


def delays(made: Servers, deaths: list[Dead]) -> list[float]:
    """How long the keeper waits after each death, in tenths of seconds."""
    found = []
    for dead in deaths:
        made.died(dead)  # type: ignore[arg-type]  # it has all that is asked for
        assert made.back_off.next_start is not None
        found.append(round(made.back_off.next_start - time.monotonic(), 1))
    return found


def test_a_server_that_dies_again_and_again_is_restarted_with_back_off(lone: Keeper) -> None:
    crash = [Dead(1, None) for _ in range(9)]
    assert delays(lone.servers, crash) == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0]


def unmounted(monkeypatch: pytest.MonkeyPatch, times: int) -> tuple[list[int] | None, int]:
    """Of a mount that is busy so many times: the answer, and how often it was tried."""
    tried = []

    def unmount(mountpoint: str, lazy: bool) -> None:
        tried.append((mountpoint, lazy))
        if len(tried) <= times:
            raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(mounting, "unmount", unmount)
    monkeypatch.setattr(mounting, "users_of", lambda *_: [17])
    held = HeldMount(dict(CONFIG), LogFile(foreground=True, config=CONFIG))
    users = held._unmount_unless_used(False, frozenset())
    assert set(tried) == {("/m", False)}
    return users, len(tried)


@pytest.mark.parametrize("times", [0, 3])
def test_who_has_the_mount_open_for_an_instant_does_not_hold_it(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(held_mount, "BUSY_RETRY_S", 60.0)
    assert unmounted(monkeypatch, times) == (None, times + 1)


def test_who_has_the_mount_open_all_the_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_mount, "BUSY_RETRY_S", 0.1)
    users, tried = unmounted(monkeypatch, 1 << 30)
    assert users == [17]
    assert tried > 1


def test_back_off_ends_with_stability(lone: Keeper) -> None:
    crash = Dead(-signal.SIGSEGV, 1.0)
    stable = Dead(-signal.SIGSEGV, servers.STABLE_S + 1)
    assert delays(lone.servers, [crash, crash, crash, stable, crash]) == [0.0, 0.1, 0.2, 0.0, 0.1]


def test_kills_from_outside_make_no_reader_wait(lone: Keeper) -> None:
    kills = [Dead(-signal.SIGKILL, 0.1), Dead(None, None)] * (servers.KILLS_MAX // 2)
    assert delays(lone.servers, kills) == [0.0] * servers.KILLS_MAX
    assert delays(lone.servers, kills[:3]) == [
        0.1,
        0.2,
        0.4,
    ]  # so many are a fault, whoever does it


def test_a_kill_a_second_makes_no_reader_wait_however_long_it_goes_on(
    lone: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    for second in range(200):
        monkeypatch.setattr(time, "monotonic", lambda now_s=1000.0 + second: now_s)
        assert delays(lone.servers, [Dead(-signal.SIGKILL, 0.1)]) == [0.0]


def test_the_watchdog_of_systemd_hears_of_a_mount_that_is_served_or_may_be_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock_s[0])
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)

        def said() -> bytes:
            with contextlib.suppress(BlockingIOError):
                return systemd.recv(100)
            return b""

        made = Keeper(dict(CONFIG), report_fd=-1)
        monkeypatch.setattr(made.mount, "_directory", "/nonexistent")
        made.ping()
        assert said() == b"WATCHDOG=1"
        clock_s[0] += 9
        made.ping()
        assert said() == b"", "half of the time is early enough"
        delays(made.servers, [Dead(1, None)] * (servers.HOPELESS_STARTS - 1))
        clock_s[0] += 1
        made.ping()
        assert said() == b"WATCHDOG=1", "the next server may come"
        delays(made.servers, [Dead(1, None)])
        clock_s[0] += 100
        made.ping()
        assert said() == b""
        delays(made.servers, [Dead(1, 0.1)])
        made.ping()
        assert said() == b"WATCHDOG=1", "it was ready before it died"
        monkeypatch.setenv("WATCHDOG_PID", "1")
        Keeper(dict(CONFIG), report_fd=-1).ping()
        assert said() == b"", "the watchdog is another process's"


def test_what_systemd_tells_the_keeper_is_not_told_to_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "XDG_SEAT"):
        monkeypatch.setenv(name, "1")
    assert {
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
        "LISTEN_FDS",
        "XDG_SEAT",
    }.intersection(server_process.environment()) == {"XDG_SEAT"}


def test_a_title_takes_the_place_of_the_arguments_and_of_nothing_else() -> None:
    code = (
        "import os, sys; from fusecache.base import processes\n"
        "processes.show_as('fusecache: keeper /data/' + 'long/' * 1000)\n"
        "for name in ('cmdline', 'environ', 'comm'):\n"
        "    print(open(f'/proc/self/{name}').read().rstrip('\\0\\n'))\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env={**IMPORTABLE, "LAST": "kept"})
    cmdline, environ, comm = done.stdout.splitlines()
    assert cmdline.startswith("fusecache: keeper /data/long/")
    assert len(cmdline) <= sum(len(word) + 1 for word in words)
    assert "LAST=kept" in environ.split("\0")
    assert f"PYTHONPATH={IMPORTABLE['PYTHONPATH']}" in environ.split("\0")
    assert comm == "fusecache"


def test_a_new_configuration_that_crashes_gives_way_to_the_old(lone: Keeper) -> None:
    old = lone.servers.config
    answers: list[dict[str, Any]] = []
    assert lone.servers.restart({**old, "ram_bytes": 1}, answers.append) is None
    assert lone.servers.config["ram_bytes"] == 1
    delays(lone.servers, [Dead(1, None)] * servers.FIRST_STARTS_MAX)
    assert lone.servers.config == old
    assert [answer["ok"] for answer in answers] == [False]


@pytest.mark.parametrize("key", servers.FIXED_FOR_LIFE)
def test_what_the_kernel_was_told_cannot_change(lone: Keeper, key: str) -> None:
    answer = lone.servers.restart({**lone.servers.config, key: "another"}, None)
    assert answer is not None
    assert not answer["ok"]
    assert key.replace("_", "-") in answer["error"]


def test_last_words_are_those_of_the_present_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.write_text("KeyError: an old one\n")
    kept = LogFile(foreground=False, config={"mountpoint": "/m", "log_file": str(log)})
    monkeypatch.setattr(kept, "_begin", log.stat().st_size)
    assert kept.last_words() == ""
    with log.open("a") as file:
        file.write("  | OSError: no space\n    +---------\n2026 INFO fusecache.keeper: mine\n")
    assert kept.last_words() == "; its last words: OSError: no space"
    said = {"message": "it failed", "exception": "Traceback\nOSError: no file"}
    mine = {"logger": "fusecache.keeper", "message": "mine"}
    with log.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in (said, mine)))
    assert kept.last_words() == "; its last words: OSError: no file"


def test_reasons_have_names() -> None:
    assert server_process.reason(-9) == "killed by SIGKILL"
    assert server_process.reason(-34) == "killed by SIGRTMIN"
    assert server_process.reason(-63) == "killed by signal 63"
    assert server_process.reason(3) == "ended with exit code 3"


def test_a_child_finds_the_package() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import fusecache.keeper.keeper"],
        env={**os.environ, **server_process.package_environment()},
        cwd="/",
        check=False,
    )
    assert done.returncode == 0


def test_users_of_a_directory_are_found(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        assert os.getpid() in mounting.users_of(str(tmp_path))
        assert mounting.users_of(str(tmp_path), frozenset([os.getpid()])) == []
    assert mounting.users_of(str(tmp_path)) == []
    (tmp_path / "open").touch()
    with (tmp_path / "open").open():
        assert mounting.users_of(str(tmp_path)) == [os.getpid()]


def test_a_process_whose_main_thread_ended_is_dead(tmp_path: Path) -> None:
    """Its other threads may be stuck in the kernel: the next server must not wait for them."""
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit(2), not exit_group(2): the thread stays
        if os.uname().machine == "x86_64"
        else "raise SystemExit"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    server = Server.__new__(Server)
    server.process, server.pid = process, process.pid
    server.ready_fd = -1
    server._stat = os.open(f"/proc/{process.pid}/stat", os.O_RDONLY)
    server.pidfd = os.pidfd_open(process.pid)
    try:
        deadline = time.monotonic() + 20
        while not server.is_dead():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        if os.uname().machine == "x86_64":
            assert server.exit_code(0.05) is None  # and yet it cannot be reaped
    finally:
        process.kill()
        process.wait()
        server.close()


@pytest.mark.parametrize(("answer", "expected"), [("stat", True), ("hang", False)])
def test_answers_waits_no_longer_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, expected: bool
) -> None:
    if answer == "hang":
        monkeypatch.setattr(os, "statvfs", lambda _: time.sleep(60))
    assert mounting.answers(str(tmp_path), timeout_s=20.0 if expected else 0.2) is expected


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def look(self, watch: processes.Watch, seconds: float, state: str = "S") -> str:
        """What the watch says after so long, looked at often."""
        said = ""
        for _ in range(int(seconds * 4)):
            self.now_s += 0.25
            said = said or watch.look(state)
        return said


def test_a_server_that_is_stopped_or_says_nothing_is_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, watch = Clock(monkeypatch), processes.Watch()
    assert not clock.look(watch, 2 * processes.SILENT_S)  # of an older version: it never beats
    assert not clock.look(watch, processes.STOPPED_S, "T")
    assert not clock.look(watch, 1, "S")  # it goes on
    assert "is stopped" in clock.look(watch, processes.STOPPED_S + 1, "T")
    assert not clock.look(watch, 60, "t")  # somebody debugs it
    watch.beat()
    assert not clock.look(watch, processes.SILENT_S)
    assert f"{processes.SILENT_S:g} s" in clock.look(watch, 1)
    watch.beat()
    assert not watch.look("S")


def test_a_keeper_that_did_not_run_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was suspended, or both were frozen: one long round is one second."""
    clock, watch = Clock(monkeypatch), processes.Watch()
    watch.beat()
    for _ in range(20):
        clock.now_s += 3600
        assert not watch.look("S")


def test_signs_of_life_come_after_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server.__new__(Server)
    server.ready_fd, theirs = os.pipe()
    server._received, server.report, server.ready_at = b"", None, None
    server.watch = processes.Watch()
    launch = Launch({}, 0, 0, 0, 0, theirs, "", 0, 0, 0.0, False, False)
    launch.report(ready=True)
    report = server.take_report()
    assert report == {"ready": True}
    beats: list[None] = []
    monkeypatch.setattr(server.watch, "beat", lambda: beats.append(None))
    for number in range(3):
        assert len(beats) == number
        assert launch.beat()
        assert server.take_report() is None  # the report is told once
    assert len(beats) == 3
    for _ in range(70_000):  # the keeper is stopped: the pipe fills, the server goes on
        assert launch.beat()
    os.close(server.ready_fd)
    assert not launch.beat()  # an older keeper has closed its end
    os.close(theirs)


def test_a_keeper_whose_work_fails_still_ends_and_does_not_spin(
    lone: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    pauses: list[float] = []

    def fail() -> None:
        rounds.append(1)
        if len(rounds) > 20:
            raise KeyboardInterrupt  # nothing less ends it
        if len(rounds) == 20:
            lone._signals.append(signal.SIGTERM)
        raise OSError(9, "Bad file descriptor")

    for owner, name, value in (
        (lone, "catch_signals", lambda: None),
        (lone.mount, "open_source", lambda: None),
        (lone, "first_start", lambda: {}),
        (lone, "announce", lambda _report: None),
        (lone, "wait_for_something", lambda: True),
        (lone.servers, "look", fail),
        (lone, "look_at_signals", lambda: True),
        (lone.requests, "look", lambda: None),
        (lone, "end", lambda: None),
        (lone.log, "write", lambda *_: None),
    ):
        monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(mounting, "is_gone", lambda _fd: False)
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert lone.run() == 0
    assert len(rounds) == 20
    assert pauses[-1] == keeper.FAULT_PAUSE_MAX_S


def test_standard_descriptors_are_open_afterwards() -> None:
    code = (
        "import os; from fusecache.base import processes\n"
        "for fd in (0, 1, 2): os.close(fd)\n"
        "processes.open_standard_descriptors()\n"
        "names = [os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)]\n"
        "raise SystemExit(names != ['/dev/null'] * 3)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], check=False, env=IMPORTABLE)
    assert done.returncode == 0


def test_who_asks_in_vain_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    """The child of a question that hangs keeps nothing open: not our output, not /dev/fuse."""
    reading, writing = os.pipe()

    def hang() -> str:
        (tmp_path / "there").touch()
        while True:
            time.sleep(60)

    assert processes.ask(hang, 0.5) is None
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
    assert processes.ask(lambda: "yes", 20) == "yes"
    assert processes.ask(lambda: str(1 / 0), 20) == ""
    assert processes.ask(lambda: " ".join(sorted(os.listdir("/proc/self/fd"))), 20) == "0 1 2 3 4"


def test_an_old_mount_and_a_new_one_have_the_same_source() -> None:
    line = "36 35 0:50 / /mnt rw - fuse.fusecache {} ro,user_id=0"
    old, new = (
        mounts.parse(line.format(source))[0] for source in ("/da\\040ta", "fusecache@/da\\040ta")
    )
    assert old == new
    assert new.source == "/da ta"
    assert mounts.source_field("/da ta") == "fusecache@/da ta"
