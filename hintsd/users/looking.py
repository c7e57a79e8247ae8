"""A program of root's that becomes another user, for good, and says what that user sees.

    looking.py UID GID [GROUP...]

It is asked on stdin until that ends: a line "WHAT BYTES", then so many bytes of paths, a NUL
between them. It answers with a line "BYTES", then so many bytes, by WHAT:

    a number    access(2)'s mode: the number of the first path that is denied, or -1
    real        of each path without links, a NUL between; empty: it leads nowhere
    stat        the same: its mode, device, inode number and size

Once it is another user's process it has nothing of root's: no capability, no descriptor but its
pipes; and the kernel lets that user neither trace nor read it (it is not dumpable).

Run alone with -I -S: it needs the standard library only.
"""

import os
import sys


def main() -> None:
    uid, gid, *groups = map(int, sys.argv[1:])
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    while line := sys.stdin.buffer.readline():
        what, size = line.split()
        paths = sys.stdin.buffer.read(int(size)).split(b"\0")
        answer = _answer(what.decode(), paths)
        sys.stdout.buffer.write(b"%d\n%b" % (len(answer), answer))
        sys.stdout.buffer.flush()


def _answer(what: str, paths: list[bytes]) -> bytes:
    if what == "real":
        return b"\0".join(map(_real, paths))
    if what == "stat":
        return b"\0".join(map(_status, paths))
    denied = (number for number, path in enumerate(paths) if not os.access(path, int(what)))
    return b"%d" % next(denied, -1)


def _real(path: bytes) -> bytes:
    try:
        return os.path.realpath(path, strict=True)
    except OSError:
        return b""


def _status(path: bytes) -> bytes:
    try:
        found = os.stat(path)
    except OSError:
        return b""
    return b"%d %d %d %d" % (found.st_mode, found.st_dev, found.st_ino, found.st_size)


if __name__ == "__main__":
    main()
