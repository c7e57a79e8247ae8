"""Runs hintsd as a user would, by its command, for the demo and the benchmarks.

INVARIANT: leaving the context ends the daemon, by its own process id.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import hintsd

_START_TIMEOUT_S = 30.0
_STATUS_TIMEOUT_S = 30.0
_ANSWER_TIMEOUT_S = 30.0


def await_answer(job: "hintsd.Job") -> None:
    """Until hintsd has taken the order (it imports torch first), or 30 s have passed."""
    deadline = time.monotonic() + _ANSWER_TIMEOUT_S
    while job.state == "waiting" and time.monotonic() < deadline:
        time.sleep(0.02)


class HintsdCommand:
    """`hintsd serve --socket DIR/hintsd.sock`, until the context is left.

    Mounts find it when they are made with `--hintsd SOCKET`.
    """

    def __init__(self, directory: Path, *flags: str, prefix: tuple[str, ...] = ()) -> None:
        """`flags`: of `hintsd serve`. `prefix`: what it is run by, as nsenter in a namespace."""
        self._flags = flags
        self._prefix = prefix
        self.socket = directory / "hintsd.sock"
        self._log = directory / "hintsd.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [*self._command(), "serve", "--socket", str(self.socket), *self._flags]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                said = self._log.read_text(errors="replace").strip().splitlines()
                raise RuntimeError(f"hintsd did not start: {said[-1] if said else 'nothing said'}")
            time.sleep(0.05)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _command(self) -> list[str]:
        return [*self._prefix, str(Path(sys.executable).with_name("hintsd"))]

    def _answers(self) -> bool:
        return self.socket.exists() and self._status().returncode == 0

    def _status(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command(), "status", "--json", "--socket", str(self.socket)],
            capture_output=True,
            text=True,
            timeout=_STATUS_TIMEOUT_S,
            check=False,
        )

    def status(self) -> dict[str, Any]:
        """What `hintsd status --json` says. RuntimeError: it did not answer."""
        done = self._status()
        if done.returncode != 0:
            raise RuntimeError(f"hintsd status: {done.stderr.strip()}")
        status = json.loads(done.stdout)
        assert isinstance(status, dict)
        return status

    def memory_bytes_peak(self) -> int:
        """The most that was ever resident."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("hintsd is gone")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, 9)
            process.wait(10)
