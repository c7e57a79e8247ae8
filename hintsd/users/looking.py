"""A program of root's that becomes another user, for good, and says what that user cannot access.

    looking.py UID GID MODE [GROUP...] < paths, a NUL between them

`MODE` is access(2)'s. It prints the number of the first path that is denied, or -1. Once it is
another user's process it has nothing of root's: no capability, no descriptor but its pipes; and
the kernel lets that user neither trace nor read it (it is not dumpable).

Run alone with -I -S: it needs the standard library only.
"""

import os
import sys


def main() -> None:
    uid, gid, mode, *groups = map(int, sys.argv[1:])
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    paths = sys.stdin.buffer.read().split(b"\0")
    denied = (number for number, path in enumerate(paths) if not os.access(path, mode))
    print(next(denied, -1))


if __name__ == "__main__":
    main()
