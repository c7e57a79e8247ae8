"""What a cluster leaves on the machine, found by its name alone, and removed.

A cluster is named fc-PID-NUMBER, by its owner's process. Its namespaces are NAME-h0, NAME-h1, … and
NAME-net, and its files lie in one directory, which its record in /run/fusecache-cluster names. The
owner holds a lock on the record: who gets it knows that the owner has ended.

INVARIANT: what is killed runs in a namespace of the cluster, and what is unmounted lies in its
directory. The processes of a mount go with it, those that use one before it.
"""

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusecache.base import mounts
from tools.fusecache_command import default_executable

RECORDS = Path("/run/fusecache-cluster")
NAMESPACES = Path("/run/netns")
_UMOUNT_TIMEOUT_S = 30.0
_END_S = 10.0


@dataclass(frozen=True)
class Record:
    """A cluster that is there, or that was and has left something."""

    name: str
    work: Path
    lock: int  # a descriptor: the owner's, or that of who removes it

    def close(self) -> None:
        """It is gone."""
        with _alone():
            (RECORDS / self.name).unlink(missing_ok=True)
        os.close(self.lock)


def claim(directory: Path | None) -> Record:
    """A new name, and a work directory below `directory` (/var/tmp), both this process's."""
    with _alone():
        names = (f"fc-{os.getpid()}-{number}" for number in itertools.count())
        name = next(name for name in names if not (RECORDS / name).exists())
        work = Path(tempfile.mkdtemp(prefix=_work_prefix(name), dir=directory or "/var/tmp"))
        new = RECORDS / "new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, os.fsencode(work))
        os.rename(new, RECORDS / name)
    return Record(name, work, lock)


def of_dead_owners() -> list[Record]:
    """Those whose owner has ended, each locked. RuntimeError: a record is none of ours."""
    found = []
    with _alone():
        for path in sorted(RECORDS.glob("fc-*")):
            lock = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            work = Path(os.fsdecode(path.read_bytes()))
            if not work.is_absolute() or not work.name.startswith(_work_prefix(path.name)):
                raise RuntimeError(f"{path} names no directory of a cluster: remove it by hand")
            found.append(Record(path.name, work, lock))
    return found


def _work_prefix(name: str) -> str:
    return f"fusecache-{name}-"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Nobody else makes or removes a record meanwhile, or looks for some. One appears locked."""
    RECORDS.mkdir(mode=0o700, exist_ok=True)
    directory = os.open(RECORDS, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def namespaces(name: str) -> list[str]:
    """Of the hosts, then that of the bridge."""
    found = sorted(path.name for path in NAMESPACES.glob(f"{name}-*"))
    return sorted(found, key=lambda each: each.endswith("-net"))


def processes_in(names: Sequence[str]) -> list[int]:
    """What runs in these network namespaces."""
    wanted = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            at = os.stat(NAMESPACES / name)
            wanted.add((at.st_dev, at.st_ino))
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            at = os.stat(f"/proc/{pid}/ns/net")
            if (at.st_dev, at.st_ino) in wanted:
                found.append(int(pid))
    return found


def mounts_below(directory: Path) -> list[tuple[str, str]]:
    """Mount point and type of each mount there, the newest first."""
    return [
        (mount.mountpoint, mount.filesystem)
        for mount in reversed(mounts.mounts())
        if Path(mount.mountpoint).is_relative_to(directory)
    ]


def remove(record: Record) -> None:
    """All of the cluster. RuntimeError: something stayed; the record, too."""
    names = namespaces(record.name)
    hosts = [name for name in names if not name.endswith("-net")]
    for pid in processes_in(names):
        _signal(pid, signal.SIGCONT)
    _kill([pid for pid in processes_in(hosts) if not is_of_mount(pid)])
    _umount([at for at, kind in mounts_below(record.work) if kind == "fuse.fusecache"])
    _kill(processes_in(names))
    for at, _ in mounts_below(record.work):
        subprocess.run(["umount", "-l", at], check=False)
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False)
    left = [*namespaces(record.name), *(at for at, _ in mounts_below(record.work))]
    if not left:
        shutil.rmtree(record.work, ignore_errors=True)
        left = [str(record.work)] if record.work.exists() else []
    if left:
        raise RuntimeError(
            f"of {record.name} stayed: {', '.join(left)}; try tools/cluster --remove"
        )
    record.close()


def is_of_mount(pid: int) -> bool:
    """Keeper, server or spare, with or without their title."""
    try:
        shown = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return shown.startswith(b"fusecache: ") or b"\0fusecache.keeper" in shown


def _umount(mountpoints: Sequence[str]) -> None:
    """All at a time. What fails is unmounted lazily, later."""
    command = [str(default_executable()), "umount"]
    running = [
        subprocess.Popen([*command, at], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for at in mountpoints
    ]
    for process in running:
        try:
            process.wait(_UMOUNT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _kill(pids: Sequence[int]) -> None:
    """Returns when they have ended, or after 10 s."""
    for pid in pids:
        _signal(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_S
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """And is no zombie, which has no namespace."""
    return os.path.exists(f"/proc/{pid}/ns/net")


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
