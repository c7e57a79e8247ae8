"""Whether any process is left that could reach a mount that was made in a private mount namespace.

Such a mount is seen in its namespace alone (`unshare -m`, a job's sandbox). The keeper lives in it,
too, and so would keep namespace and mount for ever when the last of the others has gone.

A namespace is deserted when no process is in it but fusecache's own: keepers, servers, and a hintsd
that ends with the mounts. It never is: one that we do not know to be private, as no process that
started us lives in another; one that a file holds (`unshare --mount=FILE`); and any for who may not
see all processes (other users' namespaces are hidden from who is not root). Nor is it for a mount
that has peers in other namespaces (`shared`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from fusecache.base import mounts, processes

_OUR_TITLES = b"fusecache: "
_OUR_COMMANDS = (b"\0fusecache.keeper\0", b"\0fusecache.server\0", b"\0--until-unmounted\0")


class Household:
    """Who lives in our mount namespace."""

    def __init__(self) -> None:
        self._known = 0  # a process that lived here when we last looked
        self._own = _namespace_of(os.getpid())
        if all(_namespace_of(pid) in ("", self._own) for pid in (1, *_ancestors())):
            self._own = ""

    def is_deserted(self, device: str) -> bool:
        """Whether no process but us could reach the mount of `device`."""
        if not self._own or self._is_home(self._known):
            return False
        mount = next((mount for mount in mounts.mounts() if mount.device == device), None)
        if mount is None or mount.is_shared or self._is_held_by_a_file():
            return False
        for name in os.listdir("/proc"):
            if name.isdigit() and self._is_home(int(name)):
                self._known = int(name)
                return False
        return True

    def _is_home(self, pid: int) -> bool:
        """Whether that process is in our namespace, or may be, and is not one of fusecache's."""
        if pid <= 1:
            return False
        try:
            if os.readlink(f"/proc/{pid}/ns/mnt") != self._own:
                return False
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read()
        except (FileNotFoundError, ProcessLookupError):
            return False  # it has ended
        except OSError:
            return True
        if words.startswith(_OUR_TITLES):
            return False
        return not any(ours in words for ours in _OUR_COMMANDS)

    def _is_held_by_a_file(self) -> bool:
        """In pid 1's namespace, where `unshare --mount=FILE` and the like put it."""
        try:
            with open("/proc/1/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
                return f" {self._own} " in file.read()
        except OSError:
            return True


def _namespace_of(pid: int) -> str:
    """ "": we may not see it, or there is no such process."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return ""


def _ancestors() -> Iterator[int]:
    """Who started us, and who started that."""
    pid = os.getppid()
    while pid > 0:
        yield pid
        pid = processes.parent(pid) or 0
