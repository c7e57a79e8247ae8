"""The socket for users other than root: beside hintsd's own, in a directory that all may enter.

It stays when hintsd ends: clients wait for the next one there. One that is not wanted any more is
removed by the next hintsd.
"""

from __future__ import annotations

import contextlib
import grp
import os
import socket
import stat
from typing import Final, NamedTuple

from fusecache.base import mounts

EVERYONE: Final = "all"
NOBODY: Final = "none"
_BACKLOG: Final = 128
_GID_MOST: Final = (1 << 32) - 2  # the next one is chown's "leave it"


class Others(NamedTuple):
    """Who may connect: the socket's mode and group."""

    mode: int
    gid: int = -1


def parse(text: str) -> Others | None:
    """Of `all`, `none` (None), or a group's name or number. ValueError: one line."""
    if text == EVERYONE:
        return Others(0o666)
    if text == NOBODY:
        return None
    try:
        gid = int(text) if text.isascii() and text.isdecimal() else grp.getgrnam(text).gr_gid
    except (KeyError, ValueError):
        gid = -1
    if not 0 <= gid <= _GID_MOST:
        raise ValueError(f"{text!r} is neither all nor none, nor a group")
    return Others(0o660, gid)


def listen(socket_path: str, others: Others) -> socket.socket:
    """A listening socket for `others`, of the hintsd whose own is `socket_path`. OSError."""
    directory, name = os.path.split(mounts.public_socket(socket_path))
    with mounts.open_public_directory(directory) as held:
        path, shown = os.path.join(held, name), os.path.join(directory, name)
        listener = mounts.listen_privately(held, name, _BACKLOG, shown)
        os.chown(path, -1, others.gid)
        os.chmod(path, others.mode)
    return listener


def close(socket_path: str) -> None:
    """Nobody but its own user is served any more by the hintsd of `socket_path`. OSError."""
    directory, name = os.path.split(mounts.public_socket(socket_path))
    with (
        contextlib.suppress(FileNotFoundError),
        mounts.open_public_directory(directory, make=False) as held,
    ):
        path = os.path.join(held, name)
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
