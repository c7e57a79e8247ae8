"""`hintsd run`: the command runs as if it had been started itself, and one line follows."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

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
told = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGXCPU}
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
        for number in (signal.SIGUSR1, signal.SIGXCPU, signal.SIGTERM, signal.SIGINT):
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


@pytest.mark.parametrize("harm", ["rm $HINTSD_NOTES", "echo {} >$HINTSD_NOTES"])
def test_the_exit_status_is_the_commands_whatever_becomes_of_the_notes(harm: str) -> None:
    line = "hintsd: run: no DataLoader was read\n"
    assert run("--", "sh", "-c", f"{harm}; exit 7") == (7, "", line)


def test_without_a_directory_for_notes_the_command_runs() -> None:
    why = "no temporary file can be made: No such file or directory"
    program = (
        "import sys, tempfile; tempfile.tempdir = '/nonexistent'; from hintsd.cli import running; "
        "sys.exit(running.run_command(sys.argv[2:], require=sys.argv[1] == '1', "
        "copy_samplers=False))"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run([*words, "0", "sh", "-c", "exit 7"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, f"hintsd: run: {why}\n")
    done = subprocess.run([*words, "1", "echo"], capture_output=True, text=True)
    assert done.stdout == ""
    assert f"--require: loaders cannot be counted: {why}" in done.stderr


def test_the_exit_status_is_the_commands_although_nobody_reads_what_we_say() -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([*RUN, "--", "sh", "-c", "exit 7"], stderr=full).returncode == 7


def test_a_script_whose_interpreter_is_missing_is_not_a_command_not_found(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    code, _, said = run("--", str(script))
    assert (code, said.count("\n")) == (126, 1)
    assert "the interpreter that its first line names" in said
    assert run("--", str(tmp_path / "nothing"))[0] == 127


def _ends(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has
        fd = os.pidfd_open(pid)
        try:
            ended, _, _ = select.select([fd], [], [], 60)
            if not ended:
                os.kill(pid, signal.SIGKILL)
            assert ended
        finally:
            os.close(fd)


_WAITS = "import os, signal; print(os.getpid(), flush=True); signal.pause()"


def test_whoever_kills_us_ends_the_command(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}  # where it leaves its notes
    running = subprocess.Popen(
        [*RUN, "--", sys.executable, "-c", _WAITS], stdout=subprocess.PIPE, text=True, env=environ
    )
    with running:
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        running.kill()
        _ends(pid)


def test_a_hangup_reaches_the_command() -> None:
    """As `ssh -t host hintsd run …`: the kernel tells the session's leader, which is us."""
    us, terminal = pty.fork()
    if us == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may be under nohup
        os.execv(sys.executable, [*RUN, "--", sys.executable, "-c", _WAITS])
    try:
        said = b""
        while not said.endswith(b"\n"):
            said += os.read(terminal, 100)
        os.close(terminal)
        _ends(int(said))
        _ends(us)
    finally:
        os.waitpid(us, 0)


def test_a_command_that_ctrl_c_has_ended_ends_the_shells_loop() -> None:
    interrupted = "kill -INT $$"
    done = subprocess.run([*RUN, "--", "sh", "-c", interrupted], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stderr == "hintsd: run: no DataLoader was read\n"
