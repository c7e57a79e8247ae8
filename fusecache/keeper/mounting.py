"""mount(2) and umount(2), as root or by fusermount3; who uses a mount, and is it gone?"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import re
import select
import shutil
import socket
import subprocess
from typing import Any

from fusecache.base import mounts, processes

MAX_READ_BYTES = 1 << 20
EXIT_FAILED, EXIT_BUSY = 1, 4

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_NOATIME = 1, 2, 4, 8, 1024
_MNT_FORCE, _MNT_DETACH = 1, 2
_UMOUNT_NOFOLLOW = 8

Json = dict[str, Any]


class KeeperError(Exception):
    """One line for the user; the keeper ends or refuses."""

    def __init__(self, line: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(line)
        self.exit_code = exit_code


def _libc_call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def mount_as_root(config: Json) -> int:
    """mount(2) on a new /dev/fuse descriptor, which is returned. OSError."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = (
            f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},"
            f"default_permissions,max_read={MAX_READ_BYTES}"
        )
        if config["allow_other"]:
            options += ",allow_other"
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOATIME
        if config.get("noexec"):
            flags |= _MS_NOEXEC
        _libc_call(
            "mount",
            os.fsencode(mounts.source_field(config["source"])),
            os.fsencode(config["mountpoint"]),
            mounts.FILESYSTEM_TYPE.encode(),
            ctypes.c_ulong(flags),
            options.encode(),
        )
    except BaseException:
        os.close(fd)
        raise
    return fd


def mount_as_user(config: Json) -> int:
    """fusermount3 mounts, and sends the descriptor over the socket named in its environment."""
    program = shutil.which("fusermount3")
    if program is None:
        raise KeeperError("fusermount3 is not installed (Debian: apt install fuse3)")
    # fusermount3 splits at commas, and takes a backslash as an escape
    fsname = re.sub(rb"([,\\])", rb"\\\1", os.fsencode(mounts.source_field(config["source"])))
    options = (
        b"fsname=" + fsname + b",subtype=fusecache,ro,nosuid,nodev,noatime,default_permissions,"
        b"max_read=%d" % MAX_READ_BYTES
    )
    if config["allow_other"]:
        options += b",allow_other"
    if config.get("noexec"):
        options += b",noexec"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        result = subprocess.run(
            [program, b"-o", options, b"--", os.fsencode(config["mountpoint"])],
            env={**os.environ, "_FUSE_COMMFD": str(theirs.fileno()), "LC_ALL": "C"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        if result.returncode != 0:
            lines = os.fsdecode(result.stderr).strip().splitlines()
            raise KeeperError(
                lines[-1] if lines else f"fusermount3 failed with {result.returncode}"
            )
        ours.settimeout(5)
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    if not received:
        raise KeeperError("fusermount3 mounted but sent no descriptor")
    os.set_inheritable(received[0], False)
    return received[0]


def unmount(mountpoint: str, lazy: bool, abort: bool = False) -> None:
    """Take the topmost mount off `mountpoint`. OSError (EBUSY when it is in use and not `lazy`).
    `abort`: whoever waits for an answer gets an error, as far as we may.
    """
    if os.getuid() == 0:
        flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if lazy else 0) | (_MNT_FORCE if abort else 0)
        _libc_call("umount2", os.fsencode(mountpoint), ctypes.c_int(flags))
        return
    program = shutil.which("fusermount3")
    if program is None:
        raise OSError(errno.ENOENT, "fusermount3 is not installed")
    result = subprocess.run(
        [program, "-u", *(["-z"] if lazy else []), "--", os.fsencode(mountpoint)],
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    if result.returncode != 0:
        line = (os.fsdecode(result.stderr).strip().splitlines() or ["fusermount3 failed"])[-1]
        raise OSError(errno.EBUSY if "busy" in line else errno.EPERM, line)


def users_of(mountpoint: str, leave_out: frozenset[int] = frozenset(), most: int = 20) -> list[int]:
    """Processes with a directory, file or mapping below `mountpoint` (of those we may look at)."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in leave_out:
            continue
        if _uses(f"/proc/{entry}", mountpoint):
            found.append(int(entry))
            if len(found) == most:
                break
    return found


def _uses(process: str, mountpoint: str) -> bool:
    links = [f"{process}/cwd", f"{process}/root", f"{process}/exe"]
    with contextlib.suppress(OSError):
        links += [f"{process}/fd/{name}" for name in os.listdir(f"{process}/fd")]
    for link in links:
        with contextlib.suppress(OSError):
            if mounts.is_below(os.readlink(link), mountpoint):
                return True
    with contextlib.suppress(OSError), open(f"{process}/maps", "rb") as maps:
        return b" " + os.fsencode(mountpoint).rstrip(b"/") + b"/" in maps.read()
    return False


def is_gone(fuse_fd: int) -> bool:
    """Whether the connection behind the descriptor has ended (unmounted or aborted)."""
    poll = select.poll()
    poll.register(fuse_fd, 0)
    return bool(poll.poll(0))


def abort_connection(device: str) -> None:
    """Whoever waits for an answer of this mount gets an error, if fusectl is mounted."""
    with contextlib.suppress(OSError):
        path = f"/sys/fs/fuse/connections/{device.partition(':')[2]}/abort"
        with open(path, "w", encoding="ascii") as file:
            file.write("1")


def answers(mountpoint: str, timeout_s: float) -> bool:
    """Whether stat and statvfs of the mount point return: asked in a child, since it could hang."""

    def look() -> str:
        os.stat(mountpoint)
        os.statvfs(mountpoint)
        return "yes"

    return processes.ask(look, timeout_s) == "yes"
