"""Which fusecache mounts exist on this machine, and where their sockets are.

Everything is read from /proc/self/mountinfo: a path is compared as text and never looked up,
because a look-up below a mount whose server is stuck would be stuck as well.

A mount is known by its device number "major:minor". Its runtime directory is
`<base>/<major:minor>/` with

    keeper.sock    requests to the keeper (restart, umount, info)
    control.sock   requests to the server (status, warm, verify); made and owned by the keeper
    keeper.json    process ids, config, log path (see keeper.py)
    log            the log of keeper and servers, unless the config names another file

INVARIANT: stdlib only, no import of ours: the keeper imports this module.
It is not a mount table of our own: what the kernel does not list is not mounted.
"""

from __future__ import annotations

import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

FILESYSTEM_TYPE = "fuse.fusecache"
KEEPER_SOCKET = "keeper.sock"
CONTROL_SOCKET = "control.sock"
HINTSD_SOCKET = "hintsd.sock"
KEEPER_FILE = "keeper.json"
LOG_FILE = "log"

_ROOT_BASE = "/run/fusecache"


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. Paths are str with surrogateescape."""

    mount_id: int
    device: str  # "major:minor"
    mountpoint: str
    filesystem: str
    source: str
    super_options: dict[str, str] = field(default_factory=dict)

    @property
    def is_fusecache(self) -> bool:
        return self.filesystem == FILESYSTEM_TYPE

    @property
    def uid(self) -> int:
        """The user who mounted it (FUSE only)."""
        return int(self.super_options.get("user_id", "0"))


def unescape(text: str) -> str:
    r"""Undo mountinfo's octal escapes: \040 is a space; bytes that are no UTF-8 stay surrogates."""
    if "\\" not in text:
        return text
    raw = os.fsencode(text)
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m.group(1), 8)]), raw))


def parse(text: str) -> list[Mount]:
    """All mounts in the order of mountinfo; of two on one mount point the later is on top."""
    found = []
    for line in text.split("\n"):
        fields = line.split(" ")
        try:
            dash = fields.index("-", 6)
            options = {}
            for item in fields[dash + 3].split(","):
                key, _, value = item.partition("=")
                options[key] = value
            found.append(
                Mount(
                    mount_id=int(fields[0]),
                    device=fields[2],
                    mountpoint=unescape(fields[4]),
                    filesystem=unescape(fields[dash + 1]),
                    source=unescape(fields[dash + 2]),
                    super_options=options,
                )
            )
        except (ValueError, IndexError):
            continue  # an empty or foreign line must not hide the others
    return found


def mounts() -> list[Mount]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return parse(file.read())


def is_below(path: str, directory: str) -> bool:
    """Whether absolute `path` is `directory` or lies below it, as text."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def at(mountpoint: str, table: list[Mount] | None = None) -> Mount | None:
    """The topmost mount exactly on the absolute path `mountpoint`."""
    table = mounts() if table is None else table
    return next((m for m in reversed(table) if m.mountpoint == mountpoint), None)


def holding(path: str, table: list[Mount] | None = None) -> Mount | None:
    """The mount that absolute `path` lies on: the deepest mount point, of equals the topmost."""
    table = mounts() if table is None else table
    best: Mount | None = None
    for mount in table:
        if is_below(path, mount.mountpoint) and (
            best is None or len(mount.mountpoint) >= len(best.mountpoint)
        ):
            best = mount
    return best


def find(path: str) -> Mount | None:
    """The fusecache that `path` is on or below; symlinks above the mount point are followed."""
    table = mounts()
    path = os.path.abspath(path)
    mount = holding(path, table)
    if mount is None or not mount.is_fusecache:
        # Not on a fusecache as written, so it cannot be a stuck one, and may be looked up; but only
        # step by step, since a link on the way may lead into one.
        mount = holding(_resolve(path, table), table)
    return mount if mount is not None and mount.is_fusecache else None


def resolve(path: str) -> str:
    """Absolute `path` with links followed down to the first component on a fusecache."""
    return os.path.normpath(_resolve(os.path.abspath(path), mounts()))


def _resolve(path: str, table: list[Mount]) -> str:
    """Follow links in absolute `path`, stopping at the first component on a fusecache."""
    done, rest, links = "/", [part for part in path.split("/") if part], 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            done = os.path.dirname(done)
            continue
        step = os.path.join(done, part)
        mount = holding(step, table)
        if mount is not None and mount.is_fusecache:
            return os.path.join(step, *rest)
        try:
            target = os.readlink(step)
        except OSError:
            done = step
            continue
        links += 1
        if links > 40:  # the kernel's own limit
            return path
        rest = [p for p in target.split("/") if p and p != "."] + rest
        if target.startswith("/"):
            done = "/"
    return done


def runtime_bases(uid: int) -> list[str]:
    """Directories that may hold the runtime directories of `uid`'s mounts, best first."""
    if uid == 0:
        return [_ROOT_BASE]
    bases = []
    own = os.environ.get("XDG_RUNTIME_DIR")
    if own and uid == os.getuid():
        bases.append(os.path.join(own, "fusecache"))
    bases.append(f"/run/user/{uid}/fusecache")
    bases.append(f"/tmp/fusecache-{uid}")
    return bases


def make_runtime_base() -> str:
    """Create (0700) and return this user's base. OSError: none can be had that is ours alone."""
    uid = os.getuid()
    last: OSError | None = None
    for base in runtime_bases(uid):
        try:
            os.mkdir(base, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            last = error
            continue
        if _is_private(base, uid):
            return base
        last = PermissionError(1, "is not a directory of yours with mode 0700", base)
    assert last is not None
    raise last


def _is_private(directory: str, uid: int) -> bool:
    try:
        status = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not status.st_mode & 0o077


def hintsd_socket(uid: int) -> str:
    """Where `uid`'s hintsd listens unless it was told otherwise."""
    bases = runtime_bases(uid)
    return os.path.join(next((b for b in bases if _is_private(b, uid)), bases[0]), HINTSD_SOCKET)


def runtime_directory(mount: Mount) -> str | None:
    """The runtime directory of a mount, if there is one that belongs to the mount's owner."""
    for base in runtime_bases(mount.uid):
        directory = os.path.join(base, mount.device)
        if _is_private(base, mount.uid) and _is_private(directory, mount.uid):
            return directory
    return None


def keeper_record(directory: str) -> dict[str, Any]:
    """What the keeper wrote about itself; {} when there is nothing readable."""
    try:
        with open(os.path.join(directory, KEEPER_FILE), encoding="utf-8") as file:
            record = json.load(file)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


@contextmanager
def _short_path(directory: str, name: str) -> Iterator[str]:
    """A path for a socket that never exceeds the 108 bytes of sockaddr_un."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def listen(directory: str, name: str, backlog: int) -> socket.socket:
    """A listening Unix socket `name` in `directory`; one left by a dead process is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short_path(directory, name) as path:
        if os.path.lexists(path):
            os.unlink(path)
        listener.bind(path)
    listener.listen(backlog)
    return listener


def connect(directory: str, name: str, timeout_s: float | None) -> socket.socket:
    """A connection to that socket. OSError when nobody listens."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(timeout_s)
    try:
        with _short_path(directory, name) as path:
            client.connect(path)
    except OSError:
        client.close()
        raise
    return client
