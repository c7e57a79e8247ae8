"""An origin in which every request takes a given time: a network file server's latency.

INVARIANT: leaving the context leaves no mount and no process behind. It has the latency of a
network, not its bandwidth limit; names and attributes are trusted for 3 s, as an NFS client does.
"""

import os
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_SOURCE = Path(__file__).with_name("latency_origin.c")
_MOUNT_TIMEOUT_S = 10.0
_TRUST_S = 3


class LatencyOrigin:
    """`directory`, as seen through a file server that needs `latency_s` for each request."""

    def __init__(self, directory: Path, work_dir: Path, latency_s: float) -> None:
        self.directory = work_dir / "latency-origin"
        self._behind = directory
        self._program = work_dir / "latency_origin"
        self._latency_us = round(latency_s * 1e6)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        flags = subprocess.run(
            ["pkg-config", "--cflags", "--libs", "fuse3"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        subprocess.run(
            ["gcc", "-O2", "-o", str(self._program), str(_SOURCE), *flags], check=True, timeout=60
        )
        self.directory.mkdir()
        command = [str(self._program), str(self._behind), str(self._latency_us), str(_TRUST_S)]
        self._process = subprocess.Popen([*command, str(self.directory), "-o", "ro,fsname=latency"])
        deadline = time.monotonic() + _MOUNT_TIMEOUT_S
        while not os.path.ismount(self.directory):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError("the latency origin did not mount")
            time.sleep(0.02)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def io_path(self) -> Path:
        """The kernel's counters of the server: "rchar" has what it has read for its clients."""
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/io")

    def close(self) -> None:
        if os.path.ismount(self.directory):
            lazy = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
            subprocess.run([*lazy, str(self.directory)], check=False)
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        if self.directory.is_dir() and not os.path.ismount(self.directory):
            self.directory.rmdir()
