"""The words that bash completes, in a bash with a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from fusecache.cli import main as cli
from tests.support.mounted import environment

Type = Callable[..., str]
PROMPT = "ready> "


@pytest.fixture
def typing(tmp_path: Path) -> Iterator[Type]:
    """typing(keys, *until) -> what the terminal shows, as soon as all of `until` is in it."""
    for name in ("fusecache", "hintsd"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m {name}.cli.main "$@"\n')
        program.chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    above, below = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=below, stdout=below, stderr=below, start_new_session=True, cwd=tmp_path,
        env=environment(PATH=path, TERM="dumb", PS1=PROMPT, INPUTRC="/dev/null", HISTFILE=""),
    ) as shell:  # fmt: skip
        os.close(below)

        def send(keys: str, *until: str) -> str:
            os.write(above, keys.encode())
            shown, deadline = "", time.monotonic() + 60
            while not all(text in shown for text in until):
                left_s = deadline - time.monotonic()
                assert select.select([above], [], [], max(0.0, left_s))[0], shown
                with contextlib.suppress(OSError):
                    shown += os.read(above, 1 << 16).decode(errors="replace")
            return shown

        try:
            send("", PROMPT)
            for name in ("fusecache", "hintsd"):
                script = f"$(_{name.upper()}_COMPLETE=bash_source {name})"
                send(f'eval "{script}"; echo do"ne"\n', "done")
            yield send
        finally:
            shell.kill()
            os.close(above)


def test_commands_and_paths_are_completed(typing: Type, tmp_path: Path) -> None:
    (tmp_path / "no-other-begins-so").touch()
    assert "Traceback" not in typing(
        "fusecache \t\t", *cli.cli.list_commands(click.Context(cli.cli))
    )
    shown = typing("stat\tno-oth\t\n", "fusecache mount;")
    assert "fusecache: no-other-begins-so is not on a fusecache mount" in shown
    typing("hintsd stat\t--jso\t--socket no-oth\t\n", "no hintsd answers at no-other-begins-so")
