"""Ends a mount that a test can no longer end.

It is a process of its own because a page fault on a hung mount holds the GIL.

usage: watchdog.py MOUNTPOINT SECONDS, with a pipe on standard input

A line on standard input: all is well, end. End of file (the test run died) or SECONDS gone: the
connection is aborted (umount2 with MNT_FORCE), so every reader gets an error instead of hanging,
and the mount is detached. The mount point is never looked at, which could hang as well.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys

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


if __name__ == "__main__":
    readable, _, _ = select.select([0], [], [], float(sys.argv[2]))
    if not readable or not os.read(0, 1):
        abort_mount(sys.argv[1])
