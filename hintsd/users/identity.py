"""Who is at the other end of a connection, as the kernel says."""

from __future__ import annotations

import errno
import socket
import struct
from typing import Final, NamedTuple

from fusecache.base import wire

GROUPS_MOST: Final = 256  # getsockopt of Python gives 1024 bytes
_SO_PEERGROUPS: Final = 59  # asm-generic/socket.h; Linux 4.13


class Identity(NamedTuple):
    """As of its connect."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    """Further ones."""


def identity_of(connection: socket.socket) -> Identity:
    """Who is in more than GROUPS_MOST further groups counts as in none: that is less, never more.

    OSError.
    """
    peer = wire.peer_of(connection)
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * GROUPS_MOST)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        raw = b""
    return Identity(peer.uid, peer.gid, struct.unpack(f"{len(raw) // 4}I", raw))
