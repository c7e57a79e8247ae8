"""`hintsd run`: the command runs as if it had been started itself, and one line follows."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

RUN = (sys.executable, "-m", "hintsd", "run")


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([*RUN, *words], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_the_exit_status_is_the_commands() -> None:
    line = "hintsd: run: no DataLoader was read\n"
    assert run("--", "sh", "-c", "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n" + line)
    assert run("--", "sh", "-c", "kill -KILL $$") == (128 + signal.SIGKILL, "", line)
    assert run("--require", "--", "true") == (1, "", line)
    assert run("--require", "--", "sh", "-c", "exit 7") == (7, "", line)


_COUNTS = """
import os, signal, sys
told = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
before = signal.pthread_sigmask(signal.SIG_BLOCK, told)
print(os.getpgrp() == os.getpgid(os.getppid()), before, flush=True)
for _ in told:
    print(int(signal.sigwait(told)), flush=True)
sys.exit(5 + len(signal.sigpending()))
"""


def test_the_command_gets_our_signals_once() -> None:
    running = subprocess.Popen(
        [*RUN, "--", sys.executable, "-c", _COUNTS], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    try:
        assert running.stdout.readline() == "True set()\n"
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            running.send_signal(number)
            assert int(running.stdout.readline()) == number
        assert running.wait(60) == 5
        assert running.stdout.read() == ""
    finally:
        if running.poll() is None:
            running.kill()
        running.wait()
        running.stdout.close()


@pytest.mark.parametrize("flag", [(), ("--require", "--copy-samplers")])
def test_what_is_asked_for_is_told_to_the_command(flag: tuple[str, ...]) -> None:
    code = "import os; print(os.environ['HINTSD_REQUIRE'], os.environ['HINTSD_COPY_SAMPLERS'])"
    told = run(*flag, "--", sys.executable, "-c", code)[1]
    assert told == ("1 1\n" if flag else "0 0\n")
