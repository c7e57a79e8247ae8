"""Where hintsd is: its socket, as the mount names it.

INVARIANT: only a mount of this user's, or of root's, is asked; what it names is not connected to
here. Of another user's sockets only root's are told.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Any, Final

from fusecache.base import mounts

SOCKET_IOCTL: Final = 0x9000FC01  # _IOR(0xfc, 1, char[4096]), as in fusecache/native/front/raw.c
SOCKET_BYTES_MOST: Final = 4096
SOCKET_ATTRIBUTE: Final = "user.fusecache.hintsd"  # of servers that know no ioctl
SOCKET_VARIABLE: Final = "HINTSD_SOCKET"


class Unhinted(Exception):
    """There will be no hints for this job, for good. `reason` is the same for the same cause."""

    advice = "see docs/TROUBLESHOOTING.md"

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = message if reason is None else reason


class NotMounted(Unhinted):
    """There is no mount at the path: it may be there again later."""

    advice = "fusecache mount its directory, and let the script read it there"


def mount_of(path: str) -> mounts.Mount:
    """The fusecache mount that `path` lies on. NotMounted."""
    mount = mounts.find(path)
    if mount is None:
        raise NotMounted(f"{path} is not on a fusecache mount; going on without hints")
    return mount


def find_socket(path: str) -> tuple[str, str]:
    """hintsd's socket for the mount that `path` lies on, and `path` without links. HINTSD_SOCKET in
    the environment says the socket for all mounts: in a container it may lie elsewhere.

    NotMounted. Unhinted: hints are off for it, or they are for others to give. OSError: the mount
    does not answer now.
    """
    mount = mount_of(path)
    if mount.is_deleted:
        why = f"{mount.mountpoint} shows a directory that was deleted"
        raise Unhinted(f"{why}: mount it there anew; going on without hints")
    if told := os.environ.get(SOCKET_VARIABLE):
        if not os.path.isabs(told):  # trainings change their directory
            raise Unhinted(f"{SOCKET_VARIABLE}={told}: no absolute path; going on without hints")
        return told, mounts.resolve(path)
    try:
        address = _ask_for_socket(mount.mountpoint)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            raise Unhinted(
                f"hints are off for the mount {mount.mountpoint}; going on without", "off"
            ) from None
        raise
    if os.geteuid() not in (0, mount.uid) and _is_barred(address):
        address = os.fsencode(_public(os.fsdecode(address), mount))
    return os.fsdecode(address), mounts.resolve(path)


def place_of(path: str) -> dict[str, Any]:
    """Of a `job` message (docs/WIRE.md): where `path`, without links, lies, whatever mount
    namespace it is seen from, and whatever is bound there. {}: on no fusecache.
    """
    mount = mounts.holding(path)
    if mount is None or not mount.is_fusecache:
        return {}
    return {"device": mount.device, "inside": os.fsencode(mounts.inside(path, mount))}


def _public(address: str, mount: mounts.Mount) -> str:
    """Where root's hintsd serves us, who may not connect to its own socket `address`. Unhinted."""
    own = "mount the dataset yourself to have your own; going on without hints"
    if mount.uid != 0:
        whose = f"{mount.mountpoint} is another user's"
        raise Unhinted(f"{whose}: only its user, and root, can give it hints; {own}")
    whose, public = f"{mount.mountpoint} is root's", mounts.public_socket(address)
    try:
        is_roots = os.lstat(public).st_uid == os.lstat(os.path.dirname(public)).st_uid == mount.uid
    except OSError:
        is_roots = False
    if not is_roots:
        raise Unhinted(f"{whose}, and its hintsd serves nobody else (hintsd serve --others); {own}")
    if _is_barred(os.fsencode(public)):
        raise Unhinted(f"{whose}, and you are not in the group of {public}; {own}")
    return public


def _is_barred(address: bytes) -> bool:
    """Whether we may not connect to that socket, which need not be there."""
    try:
        os.stat(address)
    except PermissionError:
        return True
    except OSError:
        return False
    return not os.access(address, os.W_OK, effective_ids=True)


def _ask_for_socket(mountpoint: str) -> bytes:
    """OSError ENODATA: there is none."""
    fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        told = bytearray(SOCKET_BYTES_MOST)
        return bytes(told[: fcntl.ioctl(fd, SOCKET_IOCTL, told)])
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
        return os.getxattr(fd, SOCKET_ATTRIBUTE)
    finally:
        os.close(fd)
