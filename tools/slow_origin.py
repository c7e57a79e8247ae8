"""A slow origin without a network: ext4 on a loop device, throttled by the block I/O cgroup.

Also the two things that every cold measurement needs: dropping kernel caches, and counting what a
block device was asked for. The limit is set for this process's own cgroup, so a server must be
started from it.

INVARIANT: leaving the context takes back limit, mount, loop device and image, in that order,
whatever failed before. This is not a network: it has the bandwidth and the request rate of one,
not its latency under load or its faults.
"""

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

_V1_ROOT = Path("/sys/fs/cgroup/blkio")
_V2_ROOT = Path("/sys/fs/cgroup")
_SECTOR_BYTES = 512  # the unit of /sys/block/*/stat, whatever the device's own sector size


def drop_caches(directories: Iterable[Path] = ()) -> str:
    """Empty the kernel's caches; says how. Without root: only pages of files in `directories`."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
        return "drop_caches"
    except OSError:
        forget_pages(directories)
        return "posix_fadvise"


def forget_pages(directories: Iterable[Path]) -> None:
    """Drop the pages of all files below, that nobody has written or mapped."""
    for directory in directories:
        for folder, _, names in os.walk(directory):
            forget_files(Path(folder, name) for name in names)


def forget_files(files: Iterable[Path]) -> None:
    """Drop the pages of these files, that nobody has written or mapped."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def drops_seen() -> int:
    """How often anybody has dropped the page cache since boot: a hot pass must not see it rise."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("drop_pagecache "):
            return int(line.split()[1])
    return 0


def can_throttle() -> bool:
    """True when loop devices and block limits can be had here (root, full /dev and cgroups)."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        return False
    return (_V1_ROOT / "blkio.throttle.read_bps_device").exists() or (
        _V2_ROOT / "cgroup.controllers"
    ).exists()


class _Throttle:
    """Read limits on one block device, by the cgroup of version 1 or 2 that this process is in."""

    def __init__(self, device: str) -> None:
        self._device = device  # "major:minor"
        self._v1: Path | None = None
        self._v2_child: Path | None = None
        self._v2_home: Path | None = None
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if "blkio" in controllers.split(","):
                self._v1 = _V1_ROOT / path.lstrip("/")
            elif number == "0":
                self._v2_home = _V2_ROOT / path.lstrip("/")

    def set(self, read_bps: int, read_iops: int) -> None:
        """0 means no limit. OSError: this machine cannot limit."""
        if self._v1 is not None and self._v1.exists():
            (self._v1 / "blkio.throttle.read_bps_device").write_text(f"{self._device} {read_bps}")
            (self._v1 / "blkio.throttle.read_iops_device").write_text(f"{self._device} {read_iops}")
            return
        if self._v2_child is None:
            # A limit needs a group below the one that hands "io" down; only the root may hold
            # processes beside it.
            (_V2_ROOT / "cgroup.subtree_control").write_text("+io")
            child = _V2_ROOT / f"fusecache-slow-{os.getpid()}"
            child.mkdir()
            self._v2_child = child
            (child / "cgroup.procs").write_text(str(os.getpid()))
        limits = f"rbps={read_bps or 'max'} riops={read_iops or 'max'}"
        (self._v2_child / "io.max").write_text(f"{self._device} {limits}")

    def close(self) -> None:
        if self._v2_child is None:
            self.set(0, 0)
        elif self._v2_home is not None:
            for pid in (self._v2_child / "cgroup.procs").read_text().split():
                (self._v2_home / "cgroup.procs").write_text(pid)
            self._v2_child.rmdir()


class LoopOrigin:
    """ext4 in a sparse image file on a loop device, mounted at `work_dir/origin`."""

    def __init__(self, work_dir: Path, size_bytes: int) -> None:
        self._image = work_dir / "origin.img"
        self.directory = work_dir / "origin"
        self._size_bytes = size_bytes
        self._device: str | None = None  # /dev/loopN
        self._mounted = False
        self._throttle: _Throttle | None = None

    def __enter__(self) -> Self:
        try:
            self.directory.mkdir()
            with self._image.open("wb") as image:
                image.truncate(self._size_bytes)
            _run(
                *("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
                str(self._image),
            )
            self._device = _run("losetup", "--find", "--show", str(self._image)).strip()
            # The image's own pages would be a second cache; where direct I/O is refused they are
            # merely dropped.
            subprocess.run(
                ["losetup", "--direct-io=on", self._device], capture_output=True, check=False
            )
            _run("mount", "-o", "noatime", self._device, str(self.directory))
            self._mounted = True
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

    def throttle(self, read_bps: int, read_iops: int) -> None:
        """Limit reads of the device, from now on. OSError: this machine cannot."""
        assert self._device is not None
        number = (Path("/sys/block") / Path(self._device).name / "dev").read_text().strip()
        throttle = _Throttle(number)
        self._throttle = throttle
        throttle.set(read_bps, read_iops)

    def unthrottle(self) -> None:
        throttle, self._throttle = self._throttle, None
        if throttle is not None:
            throttle.close()

    def bytes_read(self) -> int:
        """Bytes read from the device since it exists."""
        return self._stat(2) * _SECTOR_BYTES

    def bytes_written(self) -> int:
        """The same of writes that have reached it: `os.sync()` before."""
        return self._stat(6) * _SECTOR_BYTES

    @property
    def stat_path(self) -> Path:
        """The kernel's counters of the device."""
        assert self._device is not None
        return Path("/sys/block") / Path(self._device).name / "stat"

    def _stat(self, field: int) -> int:
        return int(self.stat_path.read_text().split()[field])

    def close(self) -> None:
        try:
            self.unthrottle()
        except OSError as error:
            print(f"could not take the read limit back: {error}")
        if self._mounted:
            self._mounted = not _persist("umount", str(self.directory))
            if self._mounted:
                _persist("umount", "--lazy", str(self.directory))
                self._mounted = False
        if self._device is not None:
            _persist("losetup", "--detach", self._device)
            self._device = None
        self._image.unlink(missing_ok=True)
        if self.directory.is_dir() and not os.path.ismount(self.directory):
            self.directory.rmdir()


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _persist(*command: str) -> bool:
    """Try for two seconds: a process that is just going away may still hold the mount."""
    deadline = time.monotonic() + 2
    while subprocess.run(command, capture_output=True, check=False).returncode != 0:
        if time.monotonic() > deadline:
            print(f"failed: {' '.join(command)}")
            return False
        time.sleep(0.1)
    return True
