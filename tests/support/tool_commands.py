"""The commands that the tools run, in forks of what has imported them already (commands.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import mounted
from tests.support.commands import SUBPROCESS_WITH_TORCH, run_with_torch
from tools import hintsd_command
from tools.fusecache_command import FusecacheMount
from tools.hintsd_command import HintsdCommand

_HINTSD = [sys.executable, "-m", "hintsd"]


def fork_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """`FusecacheMount` and `HintsdCommand` of this process: most of their time goes to imports."""
    monkeypatch.setattr(FusecacheMount, "command", _command)
    monkeypatch.setattr(HintsdCommand, "_command", lambda _: _HINTSD)
    monkeypatch.setattr(HintsdCommand, "_status", _status)
    monkeypatch.setattr(hintsd_command, "subprocess", SUBPROCESS_WITH_TORCH)


def _command(self: FusecacheMount, *arguments: str, timeout_s: float = 120.0) -> str:
    done = mounted.command(*arguments, timeout_s=timeout_s)
    if done.returncode != 0:
        raise RuntimeError(f"fusecache {arguments[0]}: {done.returncode}: {done.stderr}")
    return done.stdout


def _status(self: HintsdCommand) -> subprocess.CompletedProcess[str]:
    return run_with_torch([*_HINTSD, "status", "--json", "--socket", str(self.socket)], 30)
