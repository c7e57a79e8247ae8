"""Ends a mount that a test can no longer end.

It is a process of its own because a page fault on a hung mount holds the GIL.

usage: watchdog.py, with a pipe on standard input, on which it is told of mount points, as JSON:

    [7, "/tmp/mnt", 660.0]     watch number 7: so many seconds, from now on
    [7, "/tmp/mnt", null]      all is well with it

End of file (the test run died), or a mount point's time is over: the connection is aborted (umount2
with MNT_FORCE), so every reader gets an error instead of hanging, and the mount is detached. The
mount point is never looked at, which could hang as well.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import time

MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8


def abort_mount(mountpoint: str) -> bool:
    """Abort the FUSE connection and detach every mount stacked at `mountpoint`."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = False
    for _ in range(8):
        if libc.umount2(os.fsencode(mountpoint), MNT_FORCE | MNT_DETACH | UMOUNT_NOFOLLOW):
            break
        found = True
    return found


def watch() -> None:
    until: dict[int, tuple[float, str]] = {}
    said = b""
    while True:
        end_s, mountpoint = min(until.values(), default=(None, ""))
        left_s = None if end_s is None else end_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            until = {number: one for number, one in until.items() if one[1] != mountpoint}
            abort_mount(mountpoint)
        elif select.select([0], [], [], left_s)[0]:
            more = os.read(0, 1 << 16)
            if not more:
                break
            *lines, said = (said + more).split(b"\n")
            for number, mountpoint, seconds in map(json.loads, lines):
                until.pop(number, None)
                if seconds is not None:
                    until[number] = time.monotonic() + seconds, mountpoint
    for _, mountpoint in until.values():
        abort_mount(mountpoint)


if __name__ == "__main__":
    watch()
