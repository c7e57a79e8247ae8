"""A tool that is ended cleans up, whatever else comes at the same moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.mounted import ROOT

SCRIPT = """
import os, signal, sys, time
from tools.interrupts import end_on_signals

def torch_hears(number, frame):
    raise RuntimeError("a worker was killed")

end_on_signals()
signal.signal(signal.SIGCHLD, torch_hears)
several = {signal.SIGCHLD, *map(int, sys.argv[1:])}
signal.pthread_sigmask(signal.SIG_BLOCK, several)
for number in several:
    os.kill(os.getpid(), number)
try:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, several)
    time.sleep(10)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGCHLD)
    time.sleep(0.1)
    print("cleaned up")
"""


@pytest.mark.parametrize("numbers", [["15"], ["2"], ["2", "15"]])
def test_one_exception_ends_it(numbers: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *numbers],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "cleaned up\n"), done.stderr
