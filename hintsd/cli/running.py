"""`hintsd run`: runs a command, as if it had been started itself, and sums up which of its
DataLoaders were hinted. `hintsd explain`: runs it up to its first batch, and says which would be.

INVARIANT: the command has our terminal, process group, descriptors and signals. What is sent to us
we send it, except what the terminal sends to both. What we cannot pass on, SIGKILL above all, ends
it with us: whoever ends our process id means the command.
INVARIANT: the exit status is the command's, whatever becomes of the notes and of stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, Final

from fusecache.base.command import say
from fusecache.base.errors import EXIT_FAILED, EXIT_OK, UserError
from hintsd.autohint import environment
from hintsd.cli.channel import complain
from hintsd.client import summary

EXIT_NOT_EXECUTABLE: Final = 126
EXIT_NOT_FOUND: Final = 127
EXIT_SIGNALLED: Final = 128  # + the signal, as shells have it

_KEPT: Final = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT),  # job control is the shell's
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS),
    *(signal.SIGPIPE, signal.SIGPROF, signal.SIGVTALRM),
}
_PASSED_ON: Final = signal.valid_signals() - _KEPT
_PR_SET_PDEATHSIG: Final = 1


def run_command(words: Sequence[str], *, require: bool, copy_samplers: bool) -> int:
    """The exit status. UserError: the command cannot be run.

    Of a command that SIGINT has ended there is none: we end alike. By that alone a shell knows that
    its own loop is to end, too.
    """
    sys.stdout.flush()
    if summary.is_set(summary.EXPLAIN):  # below `hintsd explain`, which sums up
        told = {summary.COPY_SAMPLERS: "1"} if copy_samplers else {}
        return _ended(_run(words, environment({**os.environ, **told})))
    with _notes() as (notes, problem):
        if notes is None and require:
            raise UserError(f"--require: loaders cannot be counted: {problem}")
        told = {
            summary.NOTES: "" if notes is None else str(notes.name),
            summary.REQUIRE: "1" if require else "0",
            summary.COPY_SAMPLERS: "1" if copy_samplers else "0",
        }
        code = _run(words, environment({**os.environ, **told}))
        found = summary.Summary(notes or ())
    try:
        complain(f"run: {found if notes is not None else problem}")
    except OSError:  # whoever read it is gone, and what was not written is not tried again
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    status = _ended(code)
    return EXIT_FAILED if status == EXIT_OK and require and not found.is_whole else status


def explain_command(words: Sequence[str], *, copy_samplers: bool) -> int:
    """The exit status: EXIT_OK if each loader would be hinted, else EXIT_FAILED; of a command that
    has read none its own, if that is another than EXIT_OK. UserError: the command cannot be run.
    """
    sys.stdout.flush()
    with _notes() as (notes, problem):
        if notes is None:
            raise UserError(f"loaders cannot be noted: {problem}")
        told = {
            summary.NOTES: str(notes.name),
            summary.REQUIRE: "0",
            summary.COPY_SAMPLERS: "1" if copy_samplers else "0",
            summary.EXPLAIN: "1",
        }
        code = _run(words, environment({**os.environ, **told}))
        found = summary.Explained(notes)
    for line in found.lines:
        say(line)
    status = _ended(code)
    if not found.lines:
        complain(f"explain: no DataLoader was read: the command has ended, with {status}")
        return status or EXIT_FAILED
    return EXIT_OK if found.is_whole else EXIT_FAILED


def _ended(code: int) -> int:
    """The exit status of a command that `_run` gave that of; as it ended, if by SIGINT."""
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return EXIT_SIGNALLED - code if code < 0 else code


@contextlib.contextmanager
def _notes() -> Iterator[tuple[BinaryIO | None, str]]:
    """The file that loaders are noted in; None: there can be none, and why."""
    try:
        fd, path = tempfile.mkstemp(prefix="hintsd-run-")
    except OSError as error:
        yield None, f"no temporary file can be made: {error.strerror}"
        return
    try:
        with open(path, "rb", opener=lambda *_: fd) as file:
            yield file, ""
    finally:
        with contextlib.suppress(OSError):  # what looks after /tmp was faster, in a long run
            os.unlink(path)


def _run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """As Popen's returncode: -N if signal N has ended it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the exit status away
    waited_for = {signal.SIGCHLD, *_PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    us, libc = os.getpid(), ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != us:  # we have ended meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        child = subprocess.Popen(words, env=environ, close_fds=False, preexec_fn=prepare)
        while child.poll() is None:
            came = signal.sigwaitinfo(waited_for)
            if came.si_signo != signal.SIGCHLD and not _has_it(came):
                child.send_signal(came.si_signo)
        while signal.sigtimedwait(waited_for, 0) is not None:
            pass  # for a command that has ended
    except FileNotFoundError:
        if os.sep in words[0] and os.path.exists(words[0]):
            why = "the interpreter that its first line names is not there"
            raise UserError(f"{words[0]}: {why}", EXIT_NOT_EXECUTABLE) from None
        raise UserError(f"{words[0]}: command not found", EXIT_NOT_FOUND) from None
    except OSError as error:
        raise UserError(f"{words[0]}: {error.strerror}", EXIT_NOT_EXECUTABLE) from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode


def _has_it(came: signal.struct_siginfo) -> bool:
    """Whether the command got this signal, too: the terminal sends to the process group, but tells
    the session's leader alone that it has hung up.
    """
    is_for_leader = came.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid()
    return came.si_code > 0 and not is_for_leader
