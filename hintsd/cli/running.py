"""`hintsd run`: runs a command, as if it had been started itself, and sums up which of its
DataLoaders were hinted.

INVARIANT: the command has our terminal, process group, descriptors and signals. What is sent to us
it gets, once: what the terminal sends, it is sent as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Final

from fusecache.base.errors import EXIT_FAILED, EXIT_OK, UserError
from hintsd.autohint import environment
from hintsd.cli.channel import complain
from hintsd.client import summary

EXIT_NOT_EXECUTABLE: Final = 126
EXIT_NOT_FOUND: Final = 127
EXIT_SIGNALLED: Final = 128  # + the signal, as shells have it

_PASSED_ON: Final = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
}


def run_command(words: Sequence[str], *, require: bool, copy_samplers: bool) -> int:
    """The exit status. UserError: the command cannot be run."""
    sys.stdout.flush()
    with tempfile.NamedTemporaryFile("r", prefix="hintsd-run-") as notes:
        told = {
            summary.NOTES: notes.name,
            summary.REQUIRE: "1" if require else "0",
            summary.COPY_SAMPLERS: "1" if copy_samplers else "0",
        }
        code = _run(words, environment({**os.environ, **told}))
        found = summary.Summary(notes)
    complain(f"run: {found}")
    return EXIT_FAILED if code == EXIT_OK and require and not found.is_whole else code


def _run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would take the exit status away
    waited_for = {signal.SIGCHLD, *_PASSED_ON}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)

    def put_back() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        child = subprocess.Popen(words, env=environ, close_fds=False, preexec_fn=put_back)
        while child.poll() is None:
            came = signal.sigwaitinfo(waited_for)
            if came.si_signo != signal.SIGCHLD and came.si_code <= 0:  # else: by the terminal
                child.send_signal(came.si_signo)
    except FileNotFoundError:
        raise UserError(f"{words[0]}: command not found", EXIT_NOT_FOUND) from None
    except OSError as error:
        raise UserError(f"{words[0]}: {error.strerror}", EXIT_NOT_EXECUTABLE) from None
    finally:
        put_back()
    code = child.returncode
    return EXIT_SIGNALLED - code if code < 0 else code
