"""Runs fusecache as a user would, by its command, for the demo and the benchmarks.

INVARIANT: leaving the context leaves no mount and no process behind, even when the command itself
fails. Imports nothing of the package: what is measured is the installed command.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_COMMAND_TIMEOUT_S = 120.0


def default_executable() -> Path:
    """The command installed beside the running interpreter."""
    return Path(sys.executable).with_name("fusecache")


class FusecacheMount:
    """`fusecache mount SOURCE MOUNTPOINT --cache-dir DIR`, until the context is left."""

    def __init__(
        self,
        source: Path,
        mountpoint: Path,
        cache_dir: Path,
        options: tuple[str, ...] = (),
        executable: Path | None = None,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """`prefix`: what the command is run by, as nsenter in a namespace."""
        self.source = source
        self.mountpoint = mountpoint
        self._cache_dir = cache_dir
        self._options = options
        self._command = (*prefix, str(executable or default_executable()))
        self._pids: tuple[int, ...] = ()

    def __enter__(self) -> Self:
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        try:
            self.command(
                *("mount", str(self.source), str(self.mountpoint)),
                *("--cache-dir", str(self._cache_dir), "--hintsd", "none", *self._options),
            )
            self._pids = self.pids()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def command(self, *arguments: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Run `fusecache ARGUMENTS`; its output. RuntimeError: it failed, with what it said."""
        # Files, not pipes: a keeper that kept the pipe open would keep us waiting for its end.
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            done = subprocess.run(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=timeout_s,
                check=False,
            )
            out.seek(0)
            err.seek(0)
            output, complaint = out.read().decode(), err.read().decode().strip()
        if done.returncode != 0:
            said = complaint or output.strip() or "nothing said"
            raise RuntimeError(f"fusecache {arguments[0]}: exit code {done.returncode}: {said}")
        return output

    def status(self) -> dict[str, Any]:
        status = json.loads(self.command("status", str(self.mountpoint), "--json"))
        assert isinstance(status, dict)
        return status

    def pids(self) -> tuple[int, ...]:
        """Keeper and server."""
        status = self.status()
        return tuple(int(status[k]) for k in ("keeper_pid", "server_pid") if status.get(k))

    def settle(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing is published any more: counters stand still for half a second."""
        deadline = time.monotonic() + timeout_s
        before: object = None
        while time.monotonic() < deadline:
            status = self.status()
            now = (status["ssd"]["blocks"], status["ssd"]["bytes"], status["origin"]["bytes"])
            if now == before:
                return
            before = now
            time.sleep(0.5)

    def close(self) -> None:
        if not os.path.ismount(self.mountpoint):
            self._kill()
            return
        try:
            self._pids = self.pids()  # a server may have been replaced meanwhile
            self.command("umount", str(self.mountpoint), timeout_s=30)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"umount: {error}; unmounting lazily", file=sys.stderr)
            lazy = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
            subprocess.run([*lazy, str(self.mountpoint)], capture_output=True, check=False)
        self._kill()

    def _kill(self) -> None:
        """End what umount should have ended: both have five seconds to go by themselves."""
        deadline = time.monotonic() + 5
        for pid in self._pids:
            while _is_fusecache(pid):
                if time.monotonic() > deadline:
                    print(f"process {pid} did not end: killed", file=sys.stderr)
                    os.kill(pid, signal.SIGKILL)
                    break
                time.sleep(0.05)
        self._pids = ()


def _is_fusecache(pid: int) -> bool:
    """The process is there, no zombie, and still one of ours (numbers are used again)."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"fusecache" in command
