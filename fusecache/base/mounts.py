"""Which fusecache mounts exist on this machine, and where their sockets are.

Everything is read from /proc/self/mountinfo: a path is compared as text and never looked up,
because a look-up below a mount whose server is stuck would be stuck as well.

A mount is known by its device number "major:minor". Its runtime directory is
`<base>/<major:minor>/` with

    keeper.sock    requests to the keeper (restart, umount, info)
    control.sock   requests to the server (status, warm, verify); made and owned by the keeper
    keeper.json    process ids, config, log path (see keeper/keeper.py)
    log            the log of keeper and servers, unless the config names another file

INVARIANT: stdlib only, no import of ours: the keeper imports this module.
It is not a mount table of our own: what the kernel does not list is not mounted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

FILESYSTEM_TYPE = "fuse.fusecache"
SOURCE_PREFIX = "fusecache@"
KEEPER_SOCKET = "keeper.sock"
CONTROL_SOCKET = "control.sock"
HINTSD_SOCKET = "hintsd.sock"
KEEPER_FILE = "keeper.json"
LOG_FILE = "log"
STATUS_SUFFIX = ".status"
MOUNTING_LOCK = "mounting.lock"
MOUNTING_S = 60.0  # so long another's mount(2), or its fusermount3, may take

_ROOT_BASE = "/run/fusecache"
KEEPER_TITLE = "fusecache: keeper "  # `ps` shows it, with the mount point
_NOT_PUBLIC = "is not a directory that only you can write to"
_RECORD_BYTES_MOST = 1 << 20


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo. Paths are str with surrogateescape. `source` of a fusecache is the
    origin's path, whichever version mounted it: see `source_field`.
    """

    mount_id: int
    device: str  # "major:minor"
    mountpoint: str
    filesystem: str
    source: str
    super_options: dict[str, str] = field(default_factory=dict)
    root: str = "/"  # the directory of the file system that is mounted
    is_shared: bool = False  # it is mounted in other namespaces as well
    parent_id: int = 0  # the mount that it is mounted on

    @property
    def is_fusecache(self) -> bool:
        return self.filesystem == FILESYSTEM_TYPE

    @property
    def is_deleted(self) -> bool:
        """Whether the directory that is bound there was removed. No path has `//`."""
        return self.root.endswith("//deleted")

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
    """All mounts in the order of mountinfo. It does not tell what is on top: `mount --move`."""
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
                    source=unescape(fields[dash + 2]).removeprefix(SOURCE_PREFIX),
                    super_options=options,
                    root=unescape(fields[3]),
                    parent_id=int(fields[1]),
                    is_shared=any(item.startswith("shared:") for item in fields[6:dash]),
                )
            )
        except (ValueError, IndexError):
            continue  # an empty or foreign line must not hide the others
    return found


def mounts() -> list[Mount]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return parse(file.read())


def source_field(source: str) -> str:
    """What the mount table shows as the source of a fusecache. Not the path itself: `umount SOURCE`
    takes off what has that for its source. Mounts of older versions show the path.
    """
    return SOURCE_PREFIX + source


def is_below(path: str, directory: str) -> bool:
    """Whether absolute `path` is `directory` or lies below it, as text."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def at(mountpoint: str, table: list[Mount] | None = None) -> Mount | None:
    """The topmost mount exactly on the absolute path `mountpoint`."""
    stack = _stack(mountpoint, mounts() if table is None else table)
    return stack[-1] if stack else None


def fusecaches_on(mountpoint: str, table: list[Mount]) -> list[Mount]:
    """The fusecaches exactly on `mountpoint`, the topmost last."""
    return [m for m in _stack(mountpoint, table) if m.is_fusecache]


def _stack(mountpoint: str, table: list[Mount]) -> list[Mount]:
    """All mounts exactly on `mountpoint`, each behind the one that it is on."""
    left = [m for m in table if m.mountpoint == mountpoint]
    found: list[Mount] = []
    while left:
        ids = {m.mount_id for m in left}
        lowest = [m for m in left if m.parent_id not in ids - {m.mount_id}] or left
        found += lowest
        left = [m for m in left if m not in lowest]
    return found


def is_mounted(mount: Mount) -> bool:
    """Still, as far as can be told: the kernel gives numbers again at once, to other places."""

    def known(one: Mount) -> tuple[int, str, str]:
        return one.mount_id, one.device, one.mountpoint

    return known(mount) in map(known, mounts())


def holding(path: str, table: list[Mount] | None = None) -> Mount | None:
    """The mount that absolute `path` lies on: whoever goes along it comes from mount to mount, and
    to none that another one hides.
    """
    table = mounts() if table is None else table
    above = [mount for mount in table if is_below(path, mount.mountpoint)]
    ids = {mount.mount_id for mount in above}
    here: Mount | None = None
    # Of the root of all, the parent is not listed, or itself.
    further = [m for m in above if m.parent_id not in ids - {m.mount_id}]
    while further:
        here = min(further, key=lambda mount: len(mount.mountpoint))
        further = [m for m in above if m.parent_id == here.mount_id and m is not here]
    return here


def of_descriptor(fd: int, table: list[Mount]) -> Mount | None:
    """The mount that an open file is on, without asking it; None: it is in no place any more."""
    with open(f"/proc/self/fdinfo/{fd}") as lines:
        fields = dict(line.split(":", 1) for line in lines)
    return next((m for m in table if m.mount_id == int(fields["mnt_id"])), None)


def identity(path: str, mount: Mount) -> dict[str, str]:
    """What `path` on `mount` leads to, as far as the mount table tells: equal for the same file
    system that was mounted anew.
    """
    return {
        "filesystem": mount.filesystem,
        "source": mount.source,
        "inside": inside(path, mount),
    }


def inside(path: str, mount: Mount) -> str:
    """Where absolute `path`, on `mount`, lies in its file system: the same in every bind mount of
    it and in every mount namespace, as `mount.device` is. With `//`: a root that was deleted.
    """
    below = os.path.relpath(path, mount.mountpoint)
    return mount.root if below == "." else f"{mount.root.rstrip('/')}/{below}"


def shown_at(device: str, inside: str) -> tuple[Mount, str] | None:
    """The mount of all of this fusecache in our mount namespace, and the path there of what lies at
    `inside`. None: there is none, or another mount is on top of it.
    """
    table = mounts()
    for mount in table:
        if mount.device == device and mount.is_fusecache and mount.root == "/":
            path = os.path.normpath(os.path.join(mount.mountpoint, inside.lstrip("/")))
            on_top = holding(path, table)
            if on_top is not None and (on_top.device, on_top.root) == (device, "/"):
                return on_top, path
    return None


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


@contextmanager
def mounting(base: str | None = None) -> Iterator[None]:
    """One mount(2) of this user at a time, and no runtime directory in `base` made or removed
    meanwhile. OSError: the other does not end.
    """
    path = os.path.join(base or make_runtime_base(), MOUNTING_LOCK)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + MOUNTING_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.EBUSY, "another mount does not end", path) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


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


def public_directory(directory: str = _ROOT_BASE) -> str:
    """Where what other users may connect to lies: beside a directory that is its user's alone."""
    return directory.rstrip("/") + "-public"


def public_socket(path: str) -> str:
    """For other users, of the hintsd whose own socket is `path`."""
    directory, name = os.path.split(path)
    return os.path.join(public_directory(directory), name)


def status_socket(device: str) -> str:
    """For other users, of root's mount on `device`."""
    return os.path.join(public_directory(), device + STATUS_SUFFIX)


@contextmanager
def open_public_directory(directory: str, *, make: bool = True) -> Iterator[str]:
    """One of ours that others may enter, and not write to: a path of it that leads nowhere else
    meanwhile, whoever can write to what is above it. OSError: it is another's, or no such.
    """
    is_new = False
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o755)
            is_new = True
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except NotADirectoryError:  # or a link
        raise PermissionError(1, _NOT_PUBLIC, directory) from None
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(1, _NOT_PUBLIC, directory)
        if is_new and not os.listdir(fd):
            os.fchmod(fd, 0o755)  # whatever the umask
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def runtime_directory(mount: Mount) -> str | None:
    """The runtime directory of a mount, if there is one that belongs to the mount's owner."""
    for base in itertools.chain(runtime_bases(mount.uid), _bases_of_keepers(mount.uid)):
        directory = os.path.join(base, mount.device)
        if _is_private(base, mount.uid) and _is_private(directory, mount.uid):
            return directory
    return None


def make_runtime_directory(device: str) -> tuple[str, int]:
    """Create (0700) the runtime directory of this user's mount on `device`; call it in `mounting`.

    Gives its path and a descriptor, by which `remove_runtime_directory` knows it. OSError.
    """
    directory = os.path.join(make_runtime_base(), device)
    # The device number is ours now, so what lies there was left by a keeper that is gone.
    shutil.rmtree(directory, ignore_errors=True)
    os.mkdir(directory, 0o700)
    return directory, os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def remove_runtime_directory(directory: str, fd: int) -> None:
    """Remove it if it is still what `fd` was opened on, and a killed server's `status_socket`.

    When a mount ends, its device number may be a newer mount's at once, and the path with it. While
    a directory is open, no other has its inode number.
    """
    with contextlib.suppress(OSError), mounting(os.path.dirname(directory)):
        if os.path.samestat(os.lstat(directory), os.fstat(fd)):
            shutil.rmtree(directory, ignore_errors=True)
            base, device = os.path.split(directory)
            if base == _ROOT_BASE:
                os.unlink(status_socket(device))


def _bases_of_keepers(uid: int) -> Iterator[str]:
    """Where keepers of `uid` that run were told to have theirs: XDG_RUNTIME_DIR may differ. Only of
    those whose environment we may see.
    """
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if not name.isdigit() or os.stat(f"/proc/{name}").st_uid != uid:
                continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read()
            if b"\0fusecache.keeper\0" not in words and not words.startswith(KEEPER_TITLE.encode()):
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                for item in file.read().split(b"\0"):
                    if item.startswith(b"XDG_RUNTIME_DIR="):
                        yield os.path.join(os.fsdecode(item.partition(b"=")[2]), "fusecache")


def keeper_record(directory: str) -> dict[str, Any]:
    """What the keeper wrote about itself; {} when there is nothing readable.

    Root may be reading another user's: no link is followed, no FIFO is waited for, and what is
    not of the type that a keeper writes is left out. A record is text to show and numbers to
    compare: never a process to signal or a path to open.
    """
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(os.path.join(directory, KEEPER_FILE), flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return {}
            record = json.loads(file.read(_RECORD_BYTES_MOST))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    return {key: value for key, value in record.items() if _is_recorded(key, value)}


def _is_recorded(key: str, value: Any) -> bool:
    if key == "config":
        return isinstance(value, dict) and all(
            isinstance(item, (str, int, float, type(None)))
            or (isinstance(item, list) and all(isinstance(part, str) for part in item))
            for item in value.values()
        )
    return isinstance(value, (str, int, float, type(None)))


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


def listen_privately(
    directory: str, name: str, backlog: int, shown: str | None = None
) -> socket.socket:
    """As `listen`, mode 0600. FileExistsError: what is there is no socket; `shown`: its path."""
    path = os.path.join(directory, name)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "is no socket, and left as it is", shown or path)
    umask = os.umask(0o177)
    try:
        return listen(directory, name, backlog)
    finally:
        os.umask(umask)


def peer_uid(connection: socket.socket) -> int:
    """The user at the other end of a connected Unix socket (as of its connect or listen)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[1])


def connect(
    directory: str, name: str, timeout_s: float | None, mount: Mount | None = None
) -> socket.socket:
    """A connection to that socket. OSError when no process listens.

    With `mount`, whose directory it is: PermissionError when the socket is not a process of its
    user, to whose directory a link may have led us; FileNotFoundError when it is mounted no more:
    its number, and so its directory, may be another's by now.
    """
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(timeout_s)
    try:
        with _short_path(directory, name) as path:
            client.connect(path)
        if mount is not None:
            if peer_uid(client) != mount.uid:
                raise PermissionError(errno.EPERM, f"{name} is not a socket of uid {mount.uid}")
            if not is_mounted(mount):
                raise FileNotFoundError(errno.ENOENT, f"{mount.mountpoint} is mounted no more")
    except OSError:
        client.close()
        raise
    return client
