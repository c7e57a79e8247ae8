"""An origin in which every request takes a given time: a network file server's latency.

INVARIANT: leaving the context leaves no mount and no process behind. It has the latency of a
network, and its bandwidth limit only with a `Meter`; names and attributes are trusted for 3 s, as
an NFS client does.
"""

import mmap
import os
import struct
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

HOSTS_MOST = 64  # of a meter: as in latency_origin.c
_SOURCE = Path(__file__).with_name("latency_origin.c")
_MOUNT_TIMEOUT_S = 10.0
_TRUST_S = 3


class Count(NamedTuple):
    """What a host has read of the origin."""

    bytes: int
    files: int  # how often the first byte of one


class Meter:
    """The line of one origin that several hosts share: its limit, and what each has read."""

    def __init__(self, file: Path, bytes_per_s: int) -> None:
        """`bytes_per_s`: of all hosts together; 0: no limit. OSError: `file` is there."""
        self.path = file
        with file.open("xb+") as made:
            made.truncate(16 + 16 * HOSTS_MOST)
            self._memory = mmap.mmap(made.fileno(), 0)
        self.limit(bytes_per_s)

    def limit(self, bytes_per_s: int) -> None:
        """From now on."""
        struct.pack_into("=q", self._memory, 0, bytes_per_s)

    def count(self, host: int) -> Count:
        """So far."""
        return Count(*struct.unpack_from("=QQ", self._memory, 16 + 16 * host))


def compiled(directory: Path) -> Path:
    """The server's program, in `directory`. CalledProcessError: libfuse's headers are missing."""
    program = directory / "latency_origin"
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True
    ).stdout.split()
    subprocess.run(["gcc", "-O2", "-o", str(program), str(_SOURCE), *flags], check=True, timeout=60)
    return program


class LatencyOrigin:
    """`directory`, as seen through a file server that needs `latency_s` for each request."""

    def __init__(
        self,
        directory: Path,
        work_dir: Path,
        latency_s: float,
        *,
        program: Path | None = None,
        meter: Meter | None = None,
        host: int = 0,
        prefix: Sequence[str] = (),
    ) -> None:
        """It is shown at `work_dir/latency-origin`. `program`: as `compiled`. `host`: its number in
        the meter. `prefix`: what the server is run by.
        """
        self.directory = work_dir / "latency-origin"
        self._behind = directory
        self._work_dir = work_dir
        self._program = program
        self._line = ("-", "0") if meter is None else (str(meter.path), str(host))
        self._prefix = prefix
        self._latency_us = round(latency_s * 1e6)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        program = self._program or compiled(self._work_dir)
        self.directory.mkdir()
        command = [str(program), str(self._behind), str(self._latency_us), str(_TRUST_S)]
        command += [*self._line, str(self.directory), "-o", "ro,fsname=latency"]
        self._process = subprocess.Popen([*self._prefix, *command], start_new_session=True)
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
